"""The explorer's page: what is in it, and in a real browser its third backend against NumPy, tiktoken and vectors/."""

import base64
import json
import random
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, refused
from test_export import change, write_run
from test_ladder import tiny

import data
import expe
import model_numpy
from common import load_model, read_run
from config import InputError
from past.scaling import scaled_inv_freq
from web import explorer

KINDS = {                                # name: encoding, its settings
    "expe": ("expe", {"l": 5}), "keys": ("expe", {"l": 5, "on": "k", "theta": 0.5}), "rope": ("rope", {}),
    "alibi": ("alibi", {"slopes": 2.0}), "fox": ("fox", {}), "exqpe": ("exqpe", {"l": 5}), "nope": ("nope", {}),
    "sinusoidal": ("sinusoidal", {"base": 500.0}), "stable": ("expe", {"l": 5, "constant": True}),
}
TOUR = ("expe", "keys", "rope", "alibi", "fox")
SOURCE = "texts <!--<script> of </script>"             # as it stands, this would end the page's data or hide the rest


@pytest.fixture(scope="module")
def runs(workplace, tmp_path_factory):
    """{name: run directory} of KINDS, with weights large enough for attention to matter, trained at 16 tokens."""
    made = {}
    for name, (pe, settings) in KINDS.items():
        made[name] = tmp_path_factory.mktemp("runs") / name
        write_run(tiny(pe, vocab_size=300, variant=settings, context=16), made[name], workplace / "runs" / "rope")
        change(made[name], "config.json", data=read_run(made[name])[2]["data"] | {"source": SOURCE})
    return made


def halves_of(run):
    """({name: array}, ModelConfig) of a run, the weights rounded to half precision as the page has them."""
    model, _ = load_model(run)
    return {name: w.half().double().numpy() for name, w in model.state_dict().items()}, model.config


def of(html, name):
    """The text of the script with an id."""
    return re.search(f'<script [^>]*id="{name}">(.*?)</script>', html, re.S)[1]


def test_the_page_holds_all_it_needs_and_each_weight_to_half_precision(runs):
    html = explorer.page([runs[name] for name in KINDS])
    assert not re.search(r"\{\{[\w./]+(: .*)?\}\}", html)
    assert not re.search(r"(src|href)=.?https?:|url\(|@import", html)
    known = json.loads(of(html, "data"))
    assert known["trained"] == 16 and len(known["texts"]) == explorer.TEXTS
    assert SOURCE in known["about"] and "<" not in of(html, "data")
    for run, model in zip(runs.values(), known["models"], strict=True):
        tensors, _ = halves_of(run)
        packed = base64.b85decode(of(html, f"weights-{model['id']}").replace(",", "<"))[: model["bytes"]]
        high, low = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(2, -1)
        halves = (high.astype(np.uint16) << 8 | low).view(np.float16)
        np.testing.assert_array_equal(halves, np.concatenate([w.ravel() for w in tensors.values()]))
        assert model["tensors"] == [[name, list(w.shape)] for name, w in tensors.items()]


def test_a_run_that_the_page_cannot_read_is_refused(workplace, runs, tmp_path):
    def said(*words):
        done = command("web.explorer", *words, "--out", tmp_path / "page.html", cwd=workplace)
        assert not (tmp_path / "page.html").exists()
        return refused(done)

    assert "has pe learned, and the page reads" in said("runs/learned")
    for name, changes, words in (
        ("a", {"context": 8}, "another tokenizer or trained length"), ("b", {"mlp": "swiglu"}, "has mlp swiglu"),
        ("c", {"variant": {"l": 5, "scale": 0.5}}, "has scale 0.5, and")):
        model = tiny("expe", **{"vocab_size": 300, "context": 16} | changes)
        write_run(model, tmp_path / name, workplace / "runs" / "rope")
        assert words in said(runs["expe"], tmp_path / name)
    gpt, _ = load_model(runs["expe"])
    gpt.blocks[1].attn.gate = torch.nn.Linear(16, 2)
    with pytest.raises(InputError, match=r"has the weights blocks\.1\.attn\.gate\.weight, and"):
        explorer.check("run", gpt)


# ---- in a browser ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium here: apt-get install chromium")
    with need("playwright.sync_api").sync_playwright() as api:
        made = api.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    """The page of the tour's runs, and another of all."""
    folder = tmp_path_factory.mktemp("pages")
    for name, chosen in {"tour": TOUR, "all": KINDS}.items():
        (folder / f"{name}.html").write_text(explorer.page([runs[run] for run in chosen]), encoding="utf-8")
    return folder


@pytest.fixture
def opened(browser, html):
    """A function that opens a page, from disk; what goes wrong in it fails the test at its end."""
    wrong, pages = [], []

    def open_page(name):
        page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
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


@pytest.mark.slow
def test_logits_are_numpys_whatever_the_pieces(opened, runs):
    page, rng = opened("all"), np.random.default_rng(5)
    tokens = rng.integers(300, size=70)
    for i, (name, run) in enumerate(runs.items()):
        found = page.evaluate("""async ([i, tokens]) => {
            const made = DATA.models[i];
            const model = new Model(made, await weightsOf(at(`weights-${made.id}`).textContent, made.bytes));
            return [7, 40, 41, 70].flatMap((to) => [...model.read(tokens.slice(model.tokens.length, to))]);
        }""", [i, tokens.tolist()])
        halves, config = halves_of(run)
        wanted, _ = model_numpy.forward(halves, tokens[None], config)
        np.testing.assert_allclose(np.reshape(found, wanted[0].shape), wanted[0], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_losses_on_the_page_are_numpys_at_every_length(opened, runs):
    page = opened("tour")
    page.evaluate("everyLength()")
    for name in TOUR:
        window, found = page.evaluate("(id) => [windowOf(16), [...state.found.get(`${id} 16`)]]", name)
        halves, config = halves_of(runs[name])
        wanted = model_numpy.token_losses(halves, np.array([window[:-1]]), np.array([window[1:]]), config)
        np.testing.assert_allclose(found, wanted[0], atol=1e-3)
        shown = page.evaluate("(id) => targetsMean(state.found.get(`${id} 16`))", name)
        assert abs(np.mean(wanted[0, -16:]) - shown) < 1e-3


@pytest.mark.slow
def test_what_is_seen_inside_is_what_numpy_attends_to(opened, runs, monkeypatch):
    """And the line of ExPE, of ALiBi and of FoX is what is left of the scores without the content's part."""
    page, kept = opened("tour"), []
    softmax = model_numpy.softmax_forward

    def watched(scores, learned):
        kept.append(scores.copy())
        return softmax(scores, learned)

    doors = model_numpy.Encoding._field_defaults | {"softmax": (watched, model_numpy.softmax_backward)}
    monkeypatch.setattr(model_numpy.Encoding.__new__, "__defaults__", tuple(doors.values()))
    window = page.evaluate("windowOf(4)")
    for name in TOUR:
        kept.clear()
        halves, config = halves_of(runs[name])
        model_numpy.forward(halves, np.array([window[:-1]]), config)
        found = page.evaluate("""async (id) => {
            await show(4);
            const { found } = await threads.find((thread) => thread.id === id).ask({ inside: windowOf(4), index: 50 });
            return found.map(({ scores, added, weights, ...where }) => ({
                ...where, scores: [...scores], weights: [...weights], added: added && [...added] }));
        }""", name)
        assert len(found) == 4
        for each in found:
            wanted = kept[each["block"]][0, each["head"], 49, :50]
            np.testing.assert_allclose(np.subtract(each["scores"], each["scores"][-1]), wanted - wanted[-1], atol=1e-3)
            p = np.exp(wanted - wanted.max())
            np.testing.assert_allclose(each["weights"], p / p.sum(), atol=1e-4)
            if name == "alibi":
                slopes = 2 * expe.alibi_slopes(2)
                np.testing.assert_allclose(each["added"], slopes[each["head"]] * np.arange(-49, 1), atol=1e-6)
            if name in ("expe", "keys"):
                np.testing.assert_allclose(each["added"], line_of(halves, config, each, window), rtol=1e-3, atol=1e-3)
            assert (each["added"] is None) == (name == "rope")


def line_of(halves, config, seen, window):
    """By how much more query 49 scores each key than its own, if h is 0 in all of them beyond the first l numbers."""
    l, D, C = config.encoding.l, config.d_head, config.d_model
    queries = []
    forward = model_numpy.attend_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_numpy, "attend_forward", lambda q, *rest: (queries.append(q), forward(q, *rest))[1])
        model_numpy.forward(halves, np.array([window[:-1]]), config)
    q, head = queries[seen["block"]][0, seen["head"], 49], seen["head"]
    phi = np.zeros((50, C))
    phi[:, :l] = expe.expe_table(np.arange(50), l, config.encoding.start, config.encoding.theta)
    k = phi @ halves[f"blocks.{seen['block']}.attn.qkv.weight"][C + head * D : C + (head + 1) * D].T
    return (k - k[-1]) @ q / np.sqrt(D)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expe", "expe-keys", "exqpe", "rope-default", "sinusoidal", "alibi", "fox"])
def test_the_vectors_hold(opened, name):
    page, case = opened("tour"), json.loads((ROOT / "interop/vectors" / f"{name}.json").read_text())
    p = case["parameters"]
    for part in ("near", *(["far"] if "far" in case["parts"] else [])):
        x, y = case["parts"][part]["inputs"], case["parts"][part]["outputs"]
        n = np.array(x["positions"])
        if "table" in y:
            entry = {"expe": "expeEntry", "exqp": "exqpeEntry", "sinu": "sinusoidalEntry"}[name[:4]]
            width = np.shape(y["table"])[-1]
            found = page.evaluate(f"""([n, width, s]) => n.map((row) => row.map((m) =>
                Array.from({{length: width}}, (_, j) => {entry}(m, j, s))))""",
                [n.tolist(), width, {"width": width, **p}])
            np.testing.assert_allclose(found, y["table"], atol=1e-9 * max(1, np.abs(y["table"]).max()))
        if "wq" in x and "l" in p:
            e = {"pe": name[:5].strip("-"), "on": "k" if name == "expe-keys" else "qk", "constant": False, **p}
            C = np.shape(x["x"])[-1]
            found = page.evaluate("""([x, n, w, C, e]) => x.map((h, b) => {
                const doors = doorsOf({ d_model: C, n_heads: 1 }, e);
                const p = { "qkv.weight": Float32Array.from(w.flat(2)) };
                const { q, k } = project(Float32Array.from(h.flat()), n[b], p, C, doors);
                return [[...q], [...k]];
            })""", [x["x"], n.tolist(), [x["wq"], x["wk"], x["wv"]], C, e])
            for b, (q, k) in enumerate(found):
                for mine, right in ((q, y["q"][b]), (k, y["k"][b])):
                    right = np.moveaxis(right, 0, 1)                                   # (T, H, D)
                    np.testing.assert_allclose(np.reshape(mine, right.shape), right,
                                               atol=1e-5 * max(1, np.abs(right).max()))
        if name == "rope-default":
            D = np.shape(x["q"])[-1]
            found = page.evaluate("""([q, n, D, base]) => q.map((heads, b) => heads.map((rows) => rows.map((row, t) => {
                const x = Float64Array.from(row);
                doorsOf({ d_model: D, n_heads: 1 }, { pe: "rope", base }).rotate(x, n[b][t]);
                return [...x];
            })))""", [x["q"], n.tolist(), D, p["rope_parameters"]["rope_theta"]])
            np.testing.assert_allclose(found, y["q"], atol=1e-6)
        if "bias" in y:
            bias = np.array(y["bias"], float)                       # None, so NaN, where nothing is seen
            H, keys = bias.shape[1], np.array(x["key_positions"])
            learned = {"encoding.weight": np.ravel(p.get("weight", [])).tolist(), "encoding.bias": p.get("gate_bias")}
            h = x.get("h", np.zeros((*keys.shape, 1)).tolist())
            found = np.array(page.evaluate("""([n, h, H, pe, p]) => n.map((row, b) => {
                const { key } = doorsOf({ d_model: h[0][0].length, n_heads: H }, { pe, slopes: 1 }), all = [];
                row.forEach((m, t) => all.push(key(h[b][t], m, p, all.at(-1))));
                return all;
            })""", [keys.tolist(), h, H, name, learned]))                              # (B, S, H)
            for b, head, t in np.ndindex(bias.shape[:3]):
                seen = keys[b] <= n[b, t]
                mine, right = found[b, seen, head], bias[b, head, t][seen]
                np.testing.assert_allclose(mine - mine[-1], right - right[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_frequencies_are_expes_for_every_scaling_of_the_knobs(opened):
    page = opened("tour")
    for scaling in ("none", "linear", "ntk", "yarn"):
        for D, base, factor, trained in ((8, 1e4, 4.0, 128), (64, 500.0, 1.0, 512), (32, 1e6, 16.0, 128)):
            found = page.evaluate("([D, s]) => ropeFrequencies(D, s)",
                                  [D, {"base": base, "scaling": scaling, "factor": factor, "trained": trained}])
            wanted = scaled_inv_freq(D, base, scaling, factor, trained)
            np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
            assert found[1] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.slow
def test_rounding_is_torchs(opened):
    rng = np.random.default_rng(2)
    numbers = np.concatenate([rng.normal(size=500) * 10.0 ** rng.integers(-9, 6, 500), np.arange(2040, 2060) + 0.5,
                              [0, 65504, 65519.99, 65520, 1e39, 6e-8, 2.9e-8, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-11]])
    with np.errstate(over="ignore"):
        numbers = numbers.astype(np.float32).astype(float)
    page = opened("tour")
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = page.evaluate(f"(numbers) => numbers.map((x) => String(FORMATS.{name}(x)))", numbers.tolist())
        wanted = torch.tensor(numbers, dtype=torch.float32).to(kind).double().numpy()
        np.testing.assert_array_equal([float(x.replace("Infinity", "inf")) for x in found], wanted)


NASTY = [
    "", " ", "\n", "\r\n", "a\r\n\r\n b", "   x", "x   ", "\t\t\n  \n", "I'M we'LL don'\u017f '\u017ft", "½⅓x",
    "naïve café", "\uff11\uff12\uff13\uff14", "e\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1e7\U0001f1ec", "\u0085x\u0085", "\ufeffx \ufeff",
    "\u200b\u2028\u2029x", "a\u00a0\u3000b", "\0\x01\x7f", "\u0661\u0662\u0663\u0664", "«»—…", "<|endoftext|>",
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\ud83d", "x" * 3000,
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8", "\U0001d49c\U0001d4c1\U0001d454",
]
OWN = [
    "</textarea><script>alert(1)</script><img src=x onerror=alert(2)>" * 9, "\0\x1b[31m\u202e" * 30, "x" * 50_000, " ",
    "\U0001f469\u200d\U0001f467" * 200, "two words",
]


@pytest.mark.slow
def test_the_tokenizer_is_tiktokens(opened, runs):
    page, rng = opened("tour"), random.Random(7)
    encoding = data.make_tokenizer(data.read_ranks(runs["expe"] / "tokenizer.tiktoken"))
    letters = [*"abcdefgh XYZ'-_.,;:!?()[]{}<>=+*/\\\"\t\n\r0123456789", *"".join(x for x in NASTY if len(x) < 99)]
    texts = NASTY + ["".join(rng.choices(letters, k=rng.randrange(60))) for _ in range(4_000)]
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    found = page.evaluate("(texts) => texts.map((text) => TOKENIZER.encode(text))", texts)
    for text, mine in zip(texts, found, strict=True):
        assert mine == encoding.encode_ordinary(text), repr(text)
    assert page.evaluate("TOKENIZER.eot") == encoding.eot_token


@pytest.mark.slow
@pytest.mark.parametrize("text", OWN)
def test_any_text_is_read_and_nothing_else(opened, text):
    page = opened("tour")
    page.select_option("#text", "own")
    page.fill("#own", text)
    page.wait_for_timeout(800)
    page.wait_for_function("state.tokens.length < 2 || threads.every((thread) => thread.bar.value === thread.bar.max)")
    read = page.evaluate("[TOKENIZER.encode(at('own').value).slice(0, 256), state.tokens.slice(1)]")
    assert read[0] == read[1]
    assert page.evaluate("document.querySelectorAll('#models script, #models img').length") == 0
    page.keyboard.press("Tab")


@pytest.mark.slow
def test_the_tour_can_be_taken_by_the_keyboard_alone(opened):
    page = opened("tour")
    for step in range(7):
        page.focus("#tour-do")
        page.keyboard.press("Enter")
        page.wait_for_function("!at('tour-do').disabled && at('tour-seen').textContent.length > 9", timeout=120_000)
        seen = page.inner_text("#tour-seen")
        assert "NaN" not in seen and "undefined" not in seen and " -," not in seen
        if step < 6:
            page.focus("#tour-next")
            page.keyboard.press("Enter")
    assert page.inner_text("#tour-title").startswith("Tour, step 7 of 7")


@pytest.mark.slow
def test_merged_positions_are_counted_as_torch_rounds_them(opened):
    page = opened("tour")
    page.evaluate("turn('expe'), move('start', 1), move('theta', -9), move('l', 8)")
    rows = torch.tensor(expe.expe_table(np.arange(256), 8, 1.0, 1 / 512)).to(torch.bfloat16)
    merged = int((rows[1:] == rows[:-1]).all(1).sum())
    equal = int((rows[1:, 0] == rows[:-1, 0]).sum())
    assert f"{equal} with equal columns, {merged} with staggered" in page.inner_text("#merged") and equal > merged
