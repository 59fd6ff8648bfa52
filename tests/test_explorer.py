"""The explorer's page: what is in it, and in a real browser its third backend against web/vectors.json and tiktoken.

model_torch.py, model_numpy.py and the page's JavaScript are held to the losses of web/vectors.json.
"""

import base64
import dataclasses
import itertools
import json
import math
import random
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, need, refused
from test_export import NASTY, change, write_run
from test_ladder import tiny

import model_numpy
import model_torch
import tasks
from eval import held_out
from runs import load_model, read_run
from tokenizer import make_tokenizer, read_ranks
from web import explorer, models, vectors

KINDS = {name: (pe, settings) for name, (pe, settings, where) in vectors.CASES.items() if not where}
TOUR = ("expe", "keys", "rope", "alibi", "fox")
TASKS = {"first-last": ("task-keys", "task-rope"), "needle": ("needle-fox", "needle-rope")}
SOURCE = "texts <!--<script> of </script>"             # as it stands, this would end the page's data or hide the rest


@pytest.fixture(scope="module")
def runs(workplace, tmp_path_factory):
    """{name: run directory} of KINDS, with weights large enough for attention to matter, trained at 16 tokens."""
    made = {}
    for name, (pe, settings) in KINDS.items():
        made[name] = tmp_path_factory.mktemp("runs") / name
        write_run(tiny(pe, vocab=300, variant=settings, context=16), made[name], workplace / "runs" / "rope")
        change(made[name], "config.json", data=read_run(made[name])[2]["data"] | {"source": SOURCE})
    for task, names in TASKS.items():
        _, meta = tasks.ensure(f"task:{task}")
        for name in names:
            pe, settings = KINDS[name.partition("-")[2]]
            made[name] = tmp_path_factory.mktemp("runs") / name
            model = tiny(pe, vocab=meta["vocab"], variant=settings, context=16)
            write_run(model, made[name], workplace / "runs" / "rope")
            change(made[name], "config.json", data={"folder": f"task:{task}", **meta})
    return made


def rounded_of(run):
    """({name: array}, ModelConfig) of a run; each row of a matrix is rounded to 255 steps, as the page has it."""
    model, _ = load_model(run)
    tensors = {name: w.numpy().copy() for name, w in model.state_dict().items()}
    for w in tensors.values():
        if w.ndim == 2:
            scale = abs(w).max(1, keepdims=True) / np.float32(127)
            w[:] = np.rint(w / scale) * scale
    return {name: w.astype(float) for name, w in tensors.items()}, model.config


def rounded_model(run):
    """The GPT of a run with the page's weights, in float64."""
    model, _ = load_model(run)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in rounded_of(run)[0].items()})
    return model.double()


def of(html, name):
    """The text of the script with an id."""
    return re.search(f'<script [^>]*id="{name}">(.*?)</script>', html, re.S)[1]


def test_the_page_holds_all_it_needs_and_each_matrix_in_8_bits(runs):
    html = explorer.page([runs[name] for name in KINDS])
    links = re.findall(r"\{\{[\w./]+: .+?\}\}", (ROOT / "web/tour.js").read_text(encoding="utf-8"))
    assert links and all("#L" in explorer.links(link) for link in links)
    assert not re.search(r"\{\{[\w./]+(: .*)?\}\}", html)
    assert not re.search(r"src=.?https?:|<link|url\(|@import", html)
    known = json.loads(of(html, "data"))
    assert known["trained"] == 16 and len(known["texts"]) == explorer.TEXTS
    assert SOURCE in known["about"] and "<" not in of(html, "data")
    assert [model["id"] for model in known["models"]] == [*KINDS]
    for model in known["models"]:
        content = base64.b85decode(of(html, f"weights-{model['id']}").replace(",", "<"))[: model["bytes"]]
        sizes = [np.prod(shape) if len(shape) == 2 else 4 * np.prod(shape) for _, shape in model["tensors"]]
        rows = sum(4 * shape[0] for _, shape in model["tensors"] if len(shape) == 2)        # their scales
        assert len(zlib.decompress(content)) == sum(sizes) + rows


def test_a_run_of_the_explorer_is_found_again(workplace, monkeypatch):
    """Of text, and of a task."""
    monkeypatch.chdir(workplace)
    task = ["--preset", "mini", *models.TASK.split(), "--pe", "rope", "--steps", "2"]
    assert models.find_run(task) is None
    done = command("train.py", *task, "--out", "runs/explorer/task", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert models.find_run(task) == Path("runs/explorer/task")
    own = read_run("runs/rope")[2]["data"]["folder"]
    assert models.find_run(["--pe", "rope", *TINY, "--steps", "8", "--data", own]) == Path("runs/rope")


def test_the_products_code_is_its_text_assembled():
    wasm = need("wasmtime").wat2wasm((ROOT / "web/product.wat").read_text())
    code = "".join(re.findall(r'^  "([\w+/=]+)"', (ROOT / "web/product.js").read_text(), re.M))
    assert base64.b64decode(code) == bytes(wasm)


def test_the_result_on_the_first_screen_is_the_loss_of_the_same_targets(runs):
    known = json.loads(of(explorer.page([runs["keys"], runs["rope"]]), "data"))
    run = runs["keys"]
    documents = [x for x in held_out(run, read_run(run)[2], "val", None)[1] if len(x) > 256]
    assert 1 < len(documents) == known["documents"]
    for name in ("keys", "rope"):
        params, config = rounded_of(runs[name])
        result = known["results"][name]
        cases = [*zip((16, 32, 64, 128, 256), result["losses"], itertools.repeat(0), itertools.repeat(0)),
                 (16, result["moved"], 240, 0), (256, result["hidden"], 0, 16)]
        for length, found, start, window in cases:
            config = dataclasses.replace(config, window=window)
            losses = [model_numpy.token_losses(params, x[None, -length - 1 : -1], x[None, -length:], config,
                                               start + np.arange(length))[0, -16:] for x in documents]
            assert np.mean(losses) == pytest.approx(found, abs=1e-5)
        assert found != pytest.approx(result["losses"][-1], abs=1e-3)


def test_a_run_that_the_page_cannot_read_is_refused(workplace, runs, tmp_path):
    def said(*words):
        done = command("web.explorer", *words, "--out", tmp_path / "page.html", cwd=workplace)
        assert not (tmp_path / "page.html").exists()
        return refused(done)

    assert "has pe learned, and the page reads" in said("runs/learned")
    assert "needs a run that is trained on text" in said(runs["task-rope"])
    assert "another tokenizer or trained length" in said(runs["expe"], runs["task-rope"], runs["needle-rope"])


# ---- one oracle for three models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", vectors.CASES)
def test_the_vectors_are_numpys(name):
    case = vectors.make_case(name)
    params = {key: w.astype(float) for key, w in case.weights.items()}
    losses = model_numpy.token_losses(params, case.tokens[None, :-1], case.tokens[None, 1:], case.config,
                                      case.start + np.arange(vectors.TOKENS))[0]
    np.testing.assert_allclose(losses[:: vectors.EVERY], vectors.read_vectors()[name], rtol=0, atol=1e-6)


def test_the_vectors_are_of_the_javascript_as_it_is():
    """Otherwise the command could not see that an edit is on one side alone."""
    assert json.loads(vectors.FILE.read_text())["copy"] == vectors.hash_copy(), "python -m web.vectors makes it anew"


def norm_queries(project):
    def edited(self, h, rows):
        q, k, v = project(self, h, rows)
        return torch.nn.functional.normalize(q, dim=-1), k, v

    return edited


EDITS = {  # what is edited: (its new value, made of the old one; the file that a refusal names)
    (model_torch.Attention, "project"): (norm_queries, "web/model.js (its class Model)"),
    (model_torch, "rotate_pairs"): (
        lambda old: lambda x, table: old(old(x, table), table), "web/encodings.js (doorsOf: rope)"),
    (model_torch, "score_divisor"): (lambda old: lambda q: 2 * old(q), "web/model.js (its class Model)"),
    (model_torch.GPT, "output_weight"): (
        lambda old: property(lambda self: 2 * old.fget(self)), "web/model.js (its class Model)"),
}


@pytest.mark.parametrize("place, name", EDITS, ids=lambda x: getattr(x, "__name__", x))
def test_no_page_is_written_of_another_model(place, name, runs, tmp_path, monkeypatch):
    edit, file = EDITS[place, name]
    monkeypatch.setattr(place, name, edit(getattr(place, name)))
    said = refused(command("web.explorer", runs["rope"], "--out", tmp_path / "page.html", cwd=tmp_path))
    assert f"make the edit in {file} too" in said and not (tmp_path / "page.html").exists()
    before = vectors.FILE.read_bytes()
    assert "make the edit there first" in refused(command("web.vectors", cwd=tmp_path))
    assert vectors.FILE.read_bytes() == before


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browsers():
    """Two browsers: [False] without WebGPU, and [True] with one that computes in software."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium here: apt-get install chromium")
    gpu = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
    with need("playwright.sync_api").sync_playwright() as api:
        yield [api.chromium.launch(executable_path=found, args=["--no-sandbox", *flags]) for flags in ([], gpu)]


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    """The page of the tour's runs, and another of all."""
    folder = tmp_path_factory.mktemp("pages")
    for name, chosen in {"tour": TOUR + TASKS["first-last"], "all": (*KINDS, *TASKS["needle"]),
                         "alone": ("nope",)}.items():
        (folder / f"{name}.html").write_text(explorer.page([runs[run] for run in chosen]), encoding="utf-8")
    return folder


@pytest.fixture
def opened(browsers, html):
    """A function that opens a page, from disk; what goes wrong in it fails the test at its end."""
    wrong, pages = [], []

    def open_page(name, gpu=False):
        page = browsers[gpu].new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda sent: wrong.append(sent.url) if not sent.url.startswith(("file:", "blob:")) else None)
        page.goto((html / f"{name}.html").as_uri())
        page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []


# [tokens kept of another text that was read before, losses, whether the GPU is there]; with a GPU that is lost at a
# product, or at -1 for never, if `lost` is given.
READ = """async ([config, tensors, weights, tokens, how, before, lost]) => {
    const gpu = lost === null ? null : await Gpu.find(), product = gpu?.product, losses = [];
    let products = 0;
    if (gpu) gpu.product = async (...what) => {
        if (products++ === lost) gpu.device.destroy();
        await product.apply(gpu, what);
    };
    const model = new Model({ config, tensors }, Float32Array.from(weights), tokens.length, gpu);
    const text = tokens.slice(0, -1), first = model.context(before, how);
    for (let at = 0; at < before.length; at += 40) await model.read(before.slice(at, at + 40), first);
    const context = model.context(text, how), kept = context.tokens.length;
    for (const end of [7, 40, 41, 64, 128, text.length]) {
        if (end > context.tokens.length) await model.read(text.slice(context.tokens.length, end), context);
    }
    for (let from = 0; from < text.length; from += 64) {
        const to = Math.min(from + 64, text.length);
        losses.push(...lossesOf(await model.logits(context, from, to), tokens.slice(from + 1, to + 1)));
    }
    return [kept, losses, Boolean(model.gpu)];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("kept, lost", [(0, None), (90, None), (0, -1), (0, 4)])
def test_the_vectors_are_javascripts_whatever_the_pieces_and_what_is_kept_and_on_a_gpu(opened, kept, lost):
    """A GPU is not there any more once it is lost, and the losses are still right."""
    page = opened("alone", gpu=lost is not None)
    for name, right in vectors.read_vectors().items():
        config, weights, tokens, start = vectors.make_case(name)
        before = [*tokens[:kept].tolist(), *((tokens[kept:-1] + 1) % config.vocab).tolist()]
        found = page.evaluate(READ, [
            dataclasses.asdict(config), [[key, w.shape] for key, w in weights.items()],
            np.concatenate([w.ravel() for w in weights.values()]).tolist(), tokens.tolist(),
            {"start": start} | ({"see": config.window} if config.window else {}), before, lost])
        assert found[0] == kept and found[2] == (lost == -1)
        np.testing.assert_allclose(found[1][:: vectors.EVERY], right, rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("see, start", [(0, 0), (16, 240)])
def test_losses_on_the_page_are_numpys_at_every_length_and_with_each_switch(opened, runs, see, start):
    page = opened("tour")
    page.select_option("#see", str(see))
    page.set_checked("#start", start > 0)
    page.evaluate("everyLength()")
    for name in TOUR:
        get = "(id) => [windowOf(256), [...lossesAt(threadOf(id), now())], targetsMean(threadOf(id), now())]"
        window, found, shown = page.evaluate(get, name)
        halves, config = rounded_of(runs[name])
        wanted = model_numpy.token_losses(halves, np.array([window[:-1]]), np.array([window[1:]]),
                                          dataclasses.replace(config, window=see), start + np.arange(256))
        np.testing.assert_allclose(found, wanted[0], atol=1e-3)
        assert abs(np.mean(wanted[0, -16:]) - shown) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("see", [0, 16])
def test_what_is_seen_inside_and_far_back_are_pytorchs_weights(opened, runs, monkeypatch, see):
    """Of query 49; and the last 16 queries' weights on keys that are 16 or more back."""
    page = opened("tour")
    page.evaluate("(see) => show({ length: 64, see })", see)
    window = page.evaluate("windowOf(64)")
    for name in TOUR:
        model, weights = rounded_model(runs[name]), []
        for block in model.blocks:
            def watched(q, k, v, bias, table, block=block, attend=block.attn.attend, weights=weights):
                weights.extend((q @ k.mT / math.sqrt(8) + block.attn.mask(q, k, bias)).softmax(-1)[0])     # (T, S) each
                return attend(q, k, v, bias, table)

            monkeypatch.setattr(block.attn, "attend", watched)
            monkeypatch.setattr(block.attn, "window", see)
        with torch.no_grad():
            model(torch.tensor([window[:-1]]))
        heads, far = page.evaluate("""async ([id, see]) => {
            const { heads } = await threadOf(id).ask({ inside: windowOf(64), how: how({ see, start: 0 }), index: 50 });
            return [heads.map(({ weights }) => [...weights]), [...farAt(threadOf(id), now())]];
        }""", [name, see])
        np.testing.assert_allclose(heads, [w[49, :50] for w in weights], atol=1e-4)
        right = [w[-16:].tril(64 - 16 - 16).sum(-1).mean() for w in weights]
        np.testing.assert_allclose(far, right, rtol=1e-2, atol=1e-6)
        assert (max(far) > 1e-4) == (see == 0)


@pytest.mark.slow
@pytest.mark.parametrize("source, name", [("first-last", "tour"), ("needle", "all")])
def test_answers_to_the_task_are_pytorchs(opened, runs, source, name):
    page = opened(name)
    for length in (16, 64):
        page.evaluate(f"solve({{ length: {length}, sequence: 1 }})")
        for name in TASKS[source]:
            tokens, places, answers, wanted = page.evaluate("""(id) => [sequence().tokens, queries(),
                task.answers.get(id).map(({ answer }) => answer), Object.values(sequence().targets)]""", name)
            with torch.no_grad():
                logits = rounded_model(runs[name])(torch.tensor([tokens]))[0]
            assert len(places) == (4 if source == "first-last" else 1)
            assert answers == logits[places].argmax(-1).tolist()
            stands = page.evaluate("queries().map((_, i) => placeOf(i))")
            assert [tokens[place] for place in stands] == wanted
    score = tasks.score(rounded_model(runs[name]).float(), f"task:{source}", 32, sequences=128)
    assert page.evaluate("(id) => DATA.task.accuracy[id][1]", name) == score["accuracy"]


@pytest.mark.slow
def test_the_tokenizer_is_tiktokens(opened, runs):
    page, rng = opened("tour"), random.Random(7)
    encoding = make_tokenizer(read_ranks(runs["expe"] / "tokenizer.tiktoken"))
    syllables = "".join(rng.choices(["la", "re", "th", "in", "er", "sel", "f"], k=3000))
    letters = "".join(rng.choices("etaoinshr", k=20_000))
    texts = ["x" * 3000, syllables, letters, *("".join(rng.choices(NASTY, k=rng.randrange(30))) for _ in range(4_000))]
    found = page.evaluate("(texts) => texts.map((text) => TOKENIZER.encode(text))", texts)
    for text, mine in zip(texts, found, strict=True):
        assert mine == encoding.encode_ordinary(text), repr(text)
    assert page.evaluate("TOKENIZER.eot") == encoding.eot_token


@pytest.mark.slow
def test_what_goes_wrong_is_said(browsers, html):
    """In a browser without what the models need; where a model fails; and where JavaScript is off."""
    address = (html / "tour.html").as_uri()
    page = browsers[False].new_page(bypass_csp=True)
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(address)
    assert "lacks DecompressionStream" in page.inner_text("#not-run")
    page.close()
    page = browsers[False].new_page(bypass_csp=True)
    page.goto(address)
    page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
    page.evaluate("threads[0].ask({ read: [1, 2, 3], how: null })")
    page.wait_for_function("at('read-note').textContent.includes('failed')")
    page.close()
    page = browsers[False].new_page(java_script_enabled=False)
    page.goto(address)
    assert "needs JavaScript" in page.inner_text("#not-run")
    page.close()


@pytest.mark.slow
def test_any_own_text_is_read_whole_and_as_text(opened):
    page = opened("tour")
    page.select_option("#text", "own")
    markup = "</textarea><script>alert(1)</script><img src=x onerror=alert(2)>" * 9
    for text in ("x" * 200_000, markup, "\0\x1b[31m\u202e" * 30, "a"):
        page.evaluate("(text) => { at('own').value = text; at('own').oninput(); }", text)
        page.wait_for_function("state.of === at('own').value.length")
        page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
        read, tokens = page.evaluate("[TOKENIZER.encode(at('own').value).slice(0, 256), state.tokens.slice(1)]")
        assert read == tokens
        assert page.evaluate("document.querySelectorAll('#models script, #models img').length") == 0


def do_step(page, step, answer):
    """Choose an answer of a step of the tour, and do the step; returns what is then said."""
    page.evaluate(f"showStep({step})")
    assert page.is_disabled("#tour-do") and not page.inner_text("#tour-seen")
    page.locator("#tour-answers input").nth(answer).check()
    page.click("#tour-do")
    page.wait_for_function("at('tour-seen').textContent.length > 12", timeout=120_000)
    return page.inner_text("#tour-seen")


@pytest.mark.slow
@pytest.mark.parametrize("name, steps", [("tour", 12), ("alone", 2 + 3)])
def test_each_step_of_the_tour_asks_first_and_has_its_numbers(opened, name, steps):
    """Whatever is predicted, the same answer is said to be right."""
    page = opened(name)
    assert page.evaluate("STEPS.length") == steps and page.locator("#task").count() == (name == "tour")
    for step in range(steps):
        seen = do_step(page, step, 0)
        right = re.match(r'You predicted "([^"]*)"(?:, which is right\.|; the answer is "([^"]*)"\.) ', seen)
        answers = page.evaluate(f"STEPS[{step}].ask()[1]")
        assert (right[2] or right[1]) in answers and right[1] == answers[0]
        assert "NaN" not in seen and "undefined" not in seen and "do it again" not in seen
        assert f'The answer: "{right[2] or right[1]}". ' in do_step(page, step, len(answers))      # I cannot say


@pytest.mark.slow
def test_a_question_about_a_rise_is_asked_only_where_a_loss_rose(opened):
    """By 0.1 nats or more, which is what all words on the page go by."""
    page = opened("tour")
    said = page.evaluate("""(rises) => rises.map((rise) => {
        for (const thread of threads) for (const length of [TRAINED, count()]) {
            const losses = new Float64Array(length).fill(3 + (length > TRAINED && thread === ROPE ? rise : 0));
            state.found.set(keyOf(thread, plain(length)), { losses });
        }
        return [STEPS[0].seen(), STEPS[0].right(), change(ROPE)];
    })""", [0.09, 0.11])
    assert "?" not in said[0][0] and "No loss rises" in said[0][0] and said[0][1] == 0
    assert "?" in said[1][0] and said[1][1] == 1
    assert said[0][2] == "RoPE stays flat, from 3.000 to 3.090" and said[1][2] == "RoPE rises from 3.000 to 3.110"
    assert "0.1 nats" in page.inner_text("#flat-words") and "0.1 nats" in page.inner_text("#verdict-words")


@pytest.mark.slow
def test_chance_and_uniform_weights_stand_beside_the_numbers(opened):
    page = opened("tour")
    page.evaluate("readCauses()")
    page.wait_for_function("at('verdicts').children.length === threads.length")
    *losses, far = page.locator("#causes tbody tr").last.locator("td").all_inner_texts()
    assert set(losses) == {f"{math.log(300):.3f}"}
    length = page.evaluate("count()")
    uniform = np.tril(np.ones((length, length)))
    uniform /= uniform.sum(1, keepdims=True)
    assert far == f"{100 * np.tril(uniform, -16)[-16:].sum(1).mean():.0f}%"
    assert "right in 6.3% of all texts" in page.inner_text("#task-about")                   # of one of 16 letters


@pytest.mark.slow
def test_the_steepest_head_is_the_one_whose_slope_is_the_furthest_from_0(opened):
    heads = [{"added": [0, 1]}, {"added": [0, -3, -6]}, {"added": None}, {"added": [5, 7]}]
    assert opened("tour").evaluate("(heads) => steepest(heads)", heads) == 1


@pytest.mark.slow
def test_on_a_phone_each_step_fits_its_box(opened):
    page = opened("tour")
    page.set_viewport_size({"width": 360, "height": 740})
    fits = "at('tour').scrollHeight <= at('tour').clientHeight && document.documentElement.scrollWidth <= 360"
    for step in range(page.evaluate("STEPS.length")):
        page.evaluate(f"showStep({step})")
        assert page.evaluate(fits), step
        do_step(page, step, 0)
        assert page.evaluate(fits), step


@pytest.mark.slow
@pytest.mark.skipif(not models.WEIGHTS.exists(), reason="web/models.safetensors is not here")
def test_a_thousand_has_a_comma_wherever_it_stands_on_the_page_of_the_repository(browsers, tmp_path):
    (tmp_path / "page.html").write_text(explorer.page_of_packed(), encoding="utf-8")
    page = browsers[False].new_page(bypass_csp=True)
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
    for step in range(page.evaluate("STEPS.length")):
        page.evaluate(f"showStep({step})")
        texts = page.locator("section > p, svg text, output").all_text_contents()
        said = "\n".join([page.inner_text("#tour"), *texts])
        assert not re.findall(r"(?<![\d.,/^])\d{4,}", said), step
    page.close()
