"""The explorer's page: what is in it, and in a real browser its third backend against NumPy, tiktoken and vectors/."""

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

import expe
import model_numpy
import tasks
from eval import held_out
from generate import generate
from longer.scaling import scaled_inv_freq
from runs import load_model, read_run
from tokenizer import make_tokenizer, read_ranks
from web import explorer

KINDS = {                                # name: encoding, its settings
    "expe": ("expe", {"l": 5}), "keys": ("expe", {"l": 5, "on": "k", "theta": 0.5}), "rope": ("rope", {}),
    "alibi": ("alibi", {"slopes": 2.0}), "fox": ("fox", {}), "exqpe": ("exqpe", {"l": 5}), "nope": ("nope", {}),
    "sinusoidal": ("sinusoidal", {"base": 500.0}), "stable": ("expe", {"l": 5, "constant": True}),
}
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
    assert not re.search(r"\{\{[\w./]+(: .*)?\}\}", html)
    assert not re.search(r"src=.?https?:|<link|url\(|@import", html)
    known = json.loads(of(html, "data"))
    assert known["trained"] == 16 and len(known["texts"]) == explorer.TEXTS
    assert SOURCE in known["about"] and "<" not in of(html, "data")
    for run, model in zip(runs.values(), known["models"], strict=False):
        tensors, _ = rounded_of(run)
        packed = base64.b85decode(of(html, f"weights-{model['id']}").replace(",", "<"))[: model["bytes"]]
        content = zlib.decompress(packed)
        matrices = sum(w.size for w in tensors.values() if w.ndim == 2)
        codes, others = np.frombuffer(content[:matrices], np.int8), np.frombuffer(content[matrices:], "<f4")
        for w in tensors.values():
            if w.ndim == 2:
                own, codes = codes[: w.size].reshape(w.shape), codes[w.size :]
                scale, others = others[: len(w), None], others[len(w) :]
                np.testing.assert_array_equal(own * scale, w)
            else:
                np.testing.assert_array_equal(others[: w.size], w)
                others = others[w.size :]
        assert len(codes) == len(others) == 0
        assert model["tensors"] == [[name, list(w.shape)] for name, w in tensors.items()]


def test_a_published_page_links_to_its_code_and_a_picture(runs):
    html = explorer.page([runs["rope"]], "https://github.com/someone/something")
    assert 'property="og:image" content="https://github.com/someone/something/raw/main/docs/explorer.png"' in html
    assert json.loads(of(html, "data"))["root"] == "https://github.com/someone/something/blob/main/"
    assert "og:image" not in explorer.page([runs["rope"]])


def test_a_run_of_the_explorer_is_found_again(workplace, monkeypatch):
    """Of text, and of a task."""
    monkeypatch.chdir(workplace)
    task = ["--preset", "mini", *explorer.TASK.split(), "--pe", "rope", "--steps", "2"]
    assert explorer.find_run(task) is None
    done = command("train.py", *task, "--out", "runs/explorer/task", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert explorer.find_run(task) == Path("runs/explorer/task")
    own = read_run("runs/rope")[2]["data"]["folder"]
    assert explorer.find_run(["--pe", "rope", *TINY, "--steps", "8", "--data", own]) == Path("runs/rope")


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


# [tokens kept of another text that was read before, logits, whether the GPU is there] of model i; with a GPU that is
# lost at a product, or -1 for never, if `lost` is given.
READ = """async ([i, tokens, see, start, ends, before, lost]) => {
    const made = DATA.models[i], how = { see: see || Infinity, start };
    const gpu = lost === null ? null : await Gpu.find(), product = gpu?.product;
    let products = 0;
    if (gpu) gpu.product = async (...what) => {
        if (products++ === lost) gpu.device.destroy();
        await product.apply(gpu, what);
    };
    const weights = await weightsOf(at(`weights-${made.id}`).textContent, made.bytes, made.tensors), logits = [];
    const model = new Model(made, weights, tokens.length + 10, gpu), first = model.context(before, how);
    for (let at = 0; at < before.length; at += 40) await model.read(before.slice(at, at + 40), first);
    const context = model.context(tokens, how), kept = context.tokens.length;
    for (const end of ends) {
        if (end > context.tokens.length) await model.read(tokens.slice(context.tokens.length, end), context);
    }
    for (let from = 0; from < tokens.length; from += 32) {
        logits.push(...(await model.logits(context, from, Math.min(from + 32, tokens.length))).map((z) => [...z]));
    }
    return [kept, logits, Boolean(model.gpu)];
}"""


def read_with(page, i, run, tokens, see, start, ends, before=(), lost=None):
    """(what READ gives, NumPy's logits)."""
    found = page.evaluate(READ, [i, tokens.tolist(), see, start, ends, list(before), lost])
    halves, config = rounded_of(run)
    config = dataclasses.replace(config, window=see)
    return found, model_numpy.forward(halves, tokens[None], config, start + np.arange(len(tokens)))[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("see, start, kept", [(0, 0, 0), (20, 333, 50)])
def test_logits_are_numpys_whatever_the_pieces_and_what_is_kept_of_another_text(opened, runs, see, start, kept):
    page, tokens = opened("all"), np.random.default_rng(5).integers(300, size=70)
    before = [*tokens[:kept].tolist(), *((tokens[kept:] + 1) % 300).tolist()]
    for i, name in enumerate(KINDS):
        found, wanted = read_with(page, i, runs[name], tokens, see, start, [7, 40, 41, 64, 70], before)
        assert found[0] == kept
        np.testing.assert_allclose(found[1], wanted, atol=2e-4 * max(1, np.abs(wanted).max() / 10), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [-1, 4])
def test_logits_of_a_gpu_are_numpys_and_go_on_without_it_where_it_is_lost(opened, runs, lost):
    page, tokens = opened("tour", gpu=True), np.random.default_rng(8).integers(300, size=256 + 20)
    for i, name in enumerate(TOUR):
        found, wanted = read_with(page, i, runs[name], tokens, 0, 0, [256, 276], lost=lost)
        assert found[2] == (lost < 0) and np.abs(wanted).max() > 1
        np.testing.assert_allclose(found[1], wanted, rtol=0, atol=1e-3, err_msg=name)


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
def test_what_is_seen_inside_is_what_pytorch_attends_to(opened, runs, monkeypatch, see):
    """Of query 49; and the line of ExPE and of ALiBi is what is left of its scores without the keys' content."""
    page, seen = opened("tour"), slice(50 - (see or 50), 50)
    window = page.evaluate("windowOf(64)")
    for name in TOUR:
        model, kept = rounded_model(runs[name]), []
        for block in model.blocks:
            def watched(q, k, v, bias, table, attend=block.attn.attend, kept=kept):
                kept.append((q[0, :, 49].numpy(), (q @ k.mT / math.sqrt(8) + (0 if bias is None else bias))[0, :, 49]))
                return attend(q, k, v, bias, table)

            monkeypatch.setattr(block.attn, "attend", watched)
            monkeypatch.setattr(block.attn, "window", see)
        with torch.no_grad():
            model(torch.tensor([window[:-1]]))
        heads = page.evaluate("""async ([id, see]) => {
            const thread = threads.find((each) => each.id === id);
            const { heads } = await thread.ask({ inside: windowOf(64), how: how({ see, start: 0 }), index: 50 });
            return heads.map(({ scores, added, weights, ...where }) => ({
                ...where, scores: [...scores], weights: [...weights], added: added && [...added] }));
        }""", [name, see])
        assert len(heads) == 4
        for each in heads:
            (q, scores), head = kept[each["block"]], each["head"]
            scores = scores[head, seen]
            np.testing.assert_allclose(each["weights"][seen], scores.softmax(-1), atol=1e-4)
            shown = np.subtract(each["scores"], each["scores"][-1])[seen]
            np.testing.assert_allclose(shown, scores - scores[-1], atol=1e-3)
            assert (each["added"] is None) == (name == "rope")
            if name == "alibi":
                line = 2 * expe.alibi_slopes(2)[head] * np.arange(-49, 1)
                np.testing.assert_allclose(each["added"], line, atol=1e-6)
            if name in ("expe", "keys") and not see:
                e, w_k = model.config.encoding, model.blocks[each["block"]].attn.qkv.weight.detach().numpy()[16:32]
                k = expe.expe_table(np.arange(50), 5, e.start, e.theta) @ w_k[8 * head : 8 * head + 8, :5].T
                np.testing.assert_allclose(each["added"], (k - k[-1]) @ q[head] / math.sqrt(8), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_heads_far_weights_are_worth_what_pytorch_loses_without_them(opened, runs, monkeypatch):
    page, model = opened("tour"), rounded_model(runs["fox"])
    window, found = page.evaluate("""async () => {
        const all = [], what = { worth: windowOf(64), how: how(plain(64)), targets: TRAINED, near: NEAR };
        await threadOf("fox").ask(what, ({ worth }) => all.push(worth));
        return [windowOf(64), all];
    }""")
    attention, far = model.blocks[1].attn, torch.arange(48, 64)[:, None] - torch.arange(64) >= 4
    losses, mask, pair = [], attention.mask, torch.tensor([window])
    for heads in ([], [0], [1]):
        lost = torch.zeros(2, 64, 64, dtype=torch.bool)
        lost[heads, -16:] = far
        monkeypatch.setattr(attention, "mask", lambda *x, lost=lost: mask(*x).masked_fill(lost, -math.inf))
        monkeypatch.setattr(attention, "window", 64)  # or else no mask is made
        losses.append(model.token_losses(pair[:, :-1], pair[:, 1:])[0, -16:].mean().item())
    np.testing.assert_allclose(found[2:], np.subtract(losses[1:], losses[0]), rtol=0, atol=1e-4)
    assert np.abs(found[2:]).max() > 1e-2


@pytest.mark.slow
def test_two_models_write_what_pytorch_writes(opened, runs):
    page = opened("tour")
    page.evaluate("show({ length: 64, see: 0, start: 0, chosen: 9 })")
    page.select_option("#write-a", "keys")
    page.select_option("#write-b", "rope")
    page.click("#write-do")
    page.wait_for_function("at('write-words').textContent.startsWith('Each model wrote 40')", timeout=60_000)
    prompt = page.evaluate("windowOf(64)")[:55]
    for name in ("keys", "rope"):
        written = generate(rounded_model(runs[name]), prompt, temperature=0)
        assert page.evaluate("(id) => threadOf(id).written", name) == [*itertools.islice(written, 40)]


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
@pytest.mark.parametrize("name", ["expe", "exqpe", "sinusoidal"])
def test_its_tables_are_those_of_the_vectors(opened, name):
    page, case = opened("tour"), json.loads((ROOT / "interop/vectors" / f"{name}.json").read_text())
    for part in case["parts"].values():
        table = part["outputs"]["table"]
        width = np.shape(table)[-1]
        found = page.evaluate(f"""([n, width, s]) => n.map((row) => row.map((m) =>
            Array.from({{length: width}}, (_, j) => {name}Entry(m, j, s))))""",
            [part["inputs"]["positions"], width, {"width": width, **case["parameters"]}])
        np.testing.assert_allclose(found, table, atol=1e-9 * max(1, np.abs(table).max()))


@pytest.mark.slow
def test_frequencies_are_expes_for_every_scaling_of_the_knobs(opened):
    page = opened("tour")
    for scaling in ("none", "linear", "ntk", "yarn"):
        for D, base, factor, trained in ((64, 500.0, 1.0, 512), (32, 1e6, 16.0, 128)):
            found = page.evaluate("([D, s]) => ropeFrequencies(D, s)",
                                  [D, {"base": base, "scaling": scaling, "factor": factor, "trained": trained}])
            wanted = scaled_inv_freq(D, base, scaling, factor, trained)
            np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
            assert found[1] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.slow
def test_rounding_is_torchs(opened):
    rng = np.random.default_rng(2)
    numbers = np.concatenate([rng.normal(size=500) * 10.0 ** rng.integers(-9, 6, 500), np.arange(2040, 2060) + 0.5,
                              [0, 65504, 65519.99, 65520, 6e-8, 2.9e-8, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-11]])
    page, numbers = opened("tour"), numbers.astype(np.float32).astype(float)
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = page.evaluate(f"(numbers) => numbers.map((x) => String(FORMATS.{name}(x)))", numbers.tolist())
        wanted = torch.tensor(numbers, dtype=torch.float32).to(kind).double().numpy()
        np.testing.assert_array_equal([float(x.replace("Infinity", "inf")) for x in found], wanted)


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
def test_the_weights_on_far_keys_are_pytorchs(opened, runs, monkeypatch):
    """Of the last 16 queries of 64, on keys that are 16 or more back; and none is left where only 16 are seen."""
    page = opened("tour")
    page.evaluate("show({ length: 64 })")
    window = page.evaluate("windowOf(64)")
    for name in TOUR:
        model, kept = rounded_model(runs[name]), []
        for block in model.blocks:
            def watched(q, k, v, bias, table, block=block, attend=block.attn.attend, kept=kept):
                scores = q @ k.mT / math.sqrt(8) + block.attn.mask(q, k, bias)
                kept.append(scores.softmax(-1)[0, :, -16:].tril(64 - 16 - 16).sum(-1).mean(-1))
                return attend(q, k, v, bias, table)

            monkeypatch.setattr(block.attn, "attend", watched)
        with torch.no_grad():
            model(torch.tensor([window[:-1]]))
        found = page.evaluate("(id) => farAt(threadOf(id), now())", name)
        np.testing.assert_allclose(found, torch.cat(kept), rtol=1e-2, atol=1e-6)
        assert max(found) > 1e-4
    page.evaluate("show({ see: TRAINED })")
    assert page.evaluate("threads.every((thread) => farAt(thread, now()).every((x) => x === 0))")


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
    assert page.locator("#not-run").count() == 0
    page.evaluate("threads[0].ask({ read: [1, 2, 3], how: null })")
    page.wait_for_function("at('read-note').textContent.includes('failed')")
    assert page.evaluate("show({ length: 64 })")                        # the others, and this one, go on
    page.evaluate("doStep()")
    page.wait_for_function("at('tour-seen').textContent.includes('failed')")
    page.close()
    broken = html / "broken.html"
    broken.write_text((html / "tour.html").read_text().replace("new WebAssembly.Memory(", "new WebAssembly.Lost("))
    page = browsers[False].new_page(bypass_csp=True)
    page.goto(broken.as_uri())
    page.wait_for_function("at('read-note').textContent.includes('Lost is not a constructor')")
    page.evaluate("doStep()")
    page.wait_for_function("at('tour-seen').textContent.includes('Lost is not a constructor')")
    page.wait_for_function("at('task-models').textContent.includes('No answer')")
    page.close()
    page = browsers[False].new_page(java_script_enabled=False)
    page.goto(address)
    assert "needs JavaScript" in page.inner_text("#not-run")
    page.close()


@pytest.mark.slow
def test_a_link_shows_what_was_shown(opened, browsers):
    page = opened("tour")
    page.select_option("#text", "1")
    page.evaluate("show({ length: 64, see: 16, start: START, chosen: null })")
    page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
    page.evaluate("showStep(2)")
    page.locator(".model .tokens span").nth(60).click()                 # of 64: 3 before the last
    page.wait_for_function("location.hash.includes('chosen=3')")
    other = browsers[False].new_page(bypass_csp=True)
    other.goto(page.url)
    other.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
    shown = "[at('text').value, state.length, state.see, state.start, state.chosen, step, windowOf(64)]"
    assert other.evaluate(shown) == page.evaluate(shown)
    assert other.evaluate(shown)[:6] == ["1", 64, 16, 240, 3, 2]
    for broken in ("text=99&length=x&see=7&chosen=-4&step=1e9", "text=-1&length=3&chosen=x&step=-2&start=x"):
        other.goto(page.url.partition("#")[0] + "#" + broken)           # of the same page: it follows
        other.wait_for_function("state.see === 0 && state.length === 16 && state.chosen === null")
        other.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
    other.close()


@pytest.mark.slow
def test_another_text_keeps_the_length_and_clears_what_was_written(opened):
    page = opened("tour")
    page.evaluate("show({ length: 64 })")
    page.click("#write-do")
    page.wait_for_function("at('write-words').textContent.startsWith('Each model wrote 40')", timeout=60_000)
    page.select_option("#text", "1")
    assert page.evaluate("[state.length, at('written').children.length]") == [64, 0]


@pytest.mark.slow
def test_any_own_text_is_read_whole_and_as_text(opened):
    page = opened("tour")
    page.select_option("#text", "own")
    markup = "</textarea><script>alert(1)</script><img src=x onerror=alert(2)>" * 9
    for text in ("x" * 200_000, markup, "\0\x1b[31m\u202e" * 30, "a"):
        page.evaluate("(text) => { at('own').value = text; at('own').oninput(); }", text)
        page.wait_for_function("state.of === at('own').value.length")
        page.wait_for_function("threads.every((thread) => thread.bar.value === thread.bar.max)")
        assert ("say little" in page.inner_text("#read-note")) == page.evaluate(
            "threads.every((thread) => targetsMean(thread, now()) > Math.log(300))")
        read = page.evaluate("[TOKENIZER.encode(at('own').value).slice(0, 256), state.tokens.slice(1), state.length]")
        assert read[0] == read[1] and read[2] == len(read[0])
        assert page.evaluate("document.querySelectorAll('#models script, #models img').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name, steps", [("tour", 12), ("alone", 5)])
def test_each_step_of_the_tour_has_its_numbers(opened, name, steps):
    page = opened(name)
    assert page.evaluate("STEPS.length") == steps and page.locator("#task").count() == (name == "tour")
    for step in range(steps):
        page.evaluate(f"showStep({step})")
        page.evaluate("doStep()")
        page.wait_for_function("!at('tour-do').disabled && at('tour-seen').textContent.length > 12", timeout=120_000)
        seen = page.inner_text("#tour-seen")
        assert "NaN" not in seen and "undefined" not in seen and "do it again" not in seen
