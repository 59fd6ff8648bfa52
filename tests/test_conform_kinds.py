"""interop/conform.py: other people's code for the encodings, right and wrong in one thing, in each number format.

Each kind of mistake that a check by tolerance alone lets through has some of its own here. The implementations are
written from the formulas of vectors/, in the ways in which one would write them elsewhere, and share nothing with
interop/make_vectors.py.
"""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from conftest import slow
from test_conform import cast_to, of, yarn
from test_vectors import EACH, FILES

from expe import alibi_slopes
from interop import conform
from interop.make_vectors import Case, frequencies
from model_torch import build_encoding, score_divisor

NAMED = " it looks like "
FORMATS = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


def cut_to_bfloat16(y):
    """The next number of bfloat16 towards 0: the first 16 bits of a float32."""
    bits = np.ascontiguousarray(y, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).reshape(np.shape(y))


CASTS = {name: functools.partial(np.asarray, dtype=dtype) for name, dtype in FORMATS.items()} | {
    "bfloat16": cast_to("bfloat16"), "bfloat16 towards 0": cut_to_bfloat16}


def answer(name, function, cast):
    """conform's answer about a function whose results, but frequencies and factors, are cast to a format."""
    def finished(**inputs):
        found = function(**inputs)
        if isinstance(found, dict):
            return {key: y if key in ("inv_freq", "attention_factor") else CASTS[cast](y) for key, y in found.items()}
        return tuple(map(CASTS[cast], found)) if isinstance(found, tuple) else CASTS[cast](found)

    finished.__signature__ = inspect.signature(function)
    file = FILES[name]
    if cast == "float16":                                   # in which scores of 10^5 do not exist
        file = file | {"parts": {part: x for part, x in file["parts"].items() if part != "far"}}
    return conform.check(finished, file, cast.split()[0])


# ---- implementations: what is left out is right ----------------------------------------------------------------------


def same(x):
    return x


def beyond(threshold, f):
    """The function that changes what is larger than a threshold."""
    return lambda x: np.where(x > threshold, f(x), x)


def distances(positions, key_positions, d=same, n=same):
    return d(n(positions)[:, None, :, None] - n(key_positions)[:, None, None, :])


def alibi(**broken):
    def function(positions, key_positions, q):
        return -alibi_slopes(q.shape[1])[:, None, None] * distances(positions, key_positions, **broken)
    return function


def kerple(times=np.ones_like, **broken):
    def function(positions, key_positions, p, a):
        d = distances(positions, key_positions, **broken)
        bias = -p[:, None, None] * np.log1p(a[:, None, None] * abs(d))
        return bias * times(positions[:, None, :, None] + 0 * d)
    return function


def grape(times=1.0, **broken):
    def function(positions, key_positions, q, gate_v, w):
        unit = gate_v / np.sqrt((gate_v**2).sum(-1, keepdims=True))
        gate = np.log1p(np.exp((q * unit[:, None]).sum(-1) / np.sqrt(q.shape[-1])))
        slope = alibi_slopes(q.shape[1]) * np.log1p(np.exp(w))
        return -times * (slope[:, None] * gate)[..., None] * distances(positions, key_positions, **broken)
    return function


def fire(of_d=0, of_m=0, one=1.0):
    def function(positions, key_positions, c, L, w1, b1, w2):
        m = positions[:, :, None]
        d = np.maximum(m - key_positions[:, None], 0) + of_d
        with np.errstate(divide="ignore"):                  # without the 1, ln 0
            y = np.maximum(np.log(one + c * d), -1e6) / np.log(1 + c * np.maximum(m + of_m, L))
        return np.moveaxis(np.maximum(y[..., None] * w1 + b1, 0) @ w2.T, -1, 1)
    return function


def rows(n=same, decoding=same, j=same):
    """ExPE's table."""
    def function(positions, l, start, theta, cached_k=None):
        m = n(positions) if cached_k is None else decoding(n(positions))
        return start + theta * (m[..., None] + j(np.arange(l)))
    return function


def rotate(name, n=same, f=same, a=same, length=same, q_pairs="halves", k_pairs="halves"):
    """RoPE with the frequencies of a case."""
    def function(q, k, positions, **inputs):
        inv_freq, factor = frequencies(Case(name), length(inputs["length"]))
        i = np.arange(len(inv_freq))
        pairs = {"halves": (i, i + len(i)), "interleaved": (2 * i, 2 * i + 1)}
        angle = n(positions)[:, None, :, None] * f(inv_freq)
        cos, sin = a(factor) * np.cos(angle), a(factor) * np.sin(angle)

        def turn(x, first, second):
            out = x * 1.0
            out[..., first] = x[..., first] * cos - x[..., second] * sin
            out[..., second] = x[..., second] * cos + x[..., first] * sin
            return out

        return turn(q, *pairs[q_pairs]), turn(k, *pairs[k_pairs])
    return function


def xpos(of_q=1, of_k=-1, z=lambda i, D: (2 * i / D + 0.4) / 1.4, center=256, scale_base=512.0):
    def function(q, k, positions, base):
        D = q.shape[-1]
        i = np.arange(D // 2)
        angle = positions[:, None, :, None] * base ** (-2 * i / D)
        power = (positions[:, None, :, None] - center) / scale_base

        def turn(x, sign):
            a, b = np.split(x, 2, -1)
            cos, sin = (f(angle) * z(i, D) ** (sign * power) for f in (np.cos, np.sin))
            return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

        return turn(q, of_q), turn(k, of_k)
    return function


def weights(f):
    """Weights and output of a softmax: f(scores, -inf for later keys, inputs) are the weights."""
    def function(q, k, v, cached_k=None, cached_v=None, **inputs):
        if cached_k is not None:
            k, v = np.concatenate((cached_k, k), 2), np.concatenate((cached_v, v), 2)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        T, S = scores.shape[-2:]
        p = f(np.where(np.arange(S) > np.arange(T)[:, None] + S - T, -np.inf, scores), inputs)
        return p, p @ v
    return function


def sinks(denominator=lambda total, b, n: total + np.exp(b)):
    """denominator(sum of exp(scores), b (H, 1, 1), keys that are seen)."""
    def f(scores, inputs):
        e = np.exp(scores)
        n = np.isfinite(scores).sum(-1, keepdims=True)
        return e / denominator(e.sum(-1, keepdims=True), inputs["b"][:, None, None], n)
    return weights(f)


def log(of_n=np.log):
    def f(scores, inputs):
        seen = np.isfinite(scores)
        factor = inputs["s"][:, None, None] * of_n(seen.sum(-1, keepdims=True))
        scores = np.where(seen, factor * np.where(seen, scores, 0), -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return weights(f)


RIGHT = {"alibi": alibi(), "kerple": kerple(), "grape": grape(), "fire": fire(), "expe": rows(), "expe-keys": rows(),
         "rope-default": rotate("rope-default"), "rope-longrope": rotate("rope-longrope"), "xpos": xpos(),
         "rope-yarn": rotate("rope-yarn"), "rope-yarn-64": yarn(), "softmax-sinks": sinks(), "softmax-log": log()}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", RIGHT)
def test_right_implementations_are_right_in_every_format(name, cast):
    fine, line = answer(name, RIGHT[name], cast)
    assert fine, line


# ---- mistakes, kind by kind ------------------------------------------------------------------------------------------

SINGLE = ("float64", "float32")
HALF = ("bfloat16", "bfloat16 towards 0")
ALL = SINGLE + HALF
KINDS = [  # (case, what is wrong, the function, the formats in which it must be seen)
    # a small error of a large number
    ("alibi", "distances beyond 65,536 times 0.9", alibi(d=beyond(65_536, lambda d: 0.9 * d)), ALL),
    ("alibi", "distances beyond 4,096 times 0.99", alibi(d=beyond(4096, lambda d: 0.99 * d)), ALL),
    ("alibi", "distances beyond 4,096 and one more", alibi(d=beyond(4096, lambda d: d + 1)), SINGLE),
    ("alibi", "distances are clipped at 900,000", alibi(d=lambda d: np.minimum(d, 900_000)), ALL),
    ("alibi", "positions beyond 4,096 and 10,000 more", alibi(n=beyond(4096, lambda n: n + 10_000)), ALL),
    ("alibi", "positions of 16 bits", alibi(n=lambda n: n.astype(np.int16).astype(int)), ALL),
    ("kerple", "distances beyond 4,096 and one more", kerple(d=beyond(4096, lambda d: d + 1)), SINGLE),
    ("kerple", "positions beyond 4,096 and one more", kerple(n=beyond(4096, lambda n: n + 1)), ALL),
    ("kerple", "the bias beyond 4,096 times 0.99", kerple(times=lambda m: np.where(m > 4096, 0.99, 1)), ALL),
    ("grape", "distances beyond 4,096 times 0.99", grape(d=beyond(4096, lambda d: 0.99 * d)), ALL),
    ("grape", "the bias times 0.99", grape(0.99), ALL),
    ("grape", "the bias times 0.995", grape(0.995), SINGLE),
    ("rope-default", "the slowest pair is faster by 1/10,000",
     rotate("rope-default", f=lambda f: f * [1, 1, 1, 1.0001]), SINGLE),
    ("rope-default", "the slowest pair is faster by 1/500",
     rotate("rope-default", f=lambda f: f * [1, 1, 1, 1.002]), ALL),
    ("rope-default", "positions beyond 4,096 and one more",
     rotate("rope-default", n=beyond(4096, lambda n: n + 1)), ALL),
    # near 0 a row is small
    *[(name, f"positions and {shift}", rows(n=lambda n, shift=shift: n + shift), ALL)
      for name in ("expe", "expe-keys") for shift in (1, -1, 2, -3, 10, 40)],
    *[(name, f"in decoding positions and {shift}", rows(decoding=lambda n, shift=shift: n + shift), ALL)
      for name in ("expe", "expe-keys") for shift in (1, -1, 2)],
    ("expe", "j is reversed", rows(j=lambda j: j[::-1]), ALL), ("expe", "j is doubled", rows(j=lambda j: 2 * j), ALL),
    ("expe", "j is missing", rows(j=lambda j: 0 * j), ALL),
    # places that few texts reach
    ("rope-longrope", "the long factors from L on", rotate("rope-longrope", length=lambda n: n + 1), ALL),
    ("rope-longrope", "the short factors at L + 1", rotate("rope-longrope", length=lambda n: n - 1), ALL),
    *[(name, f"one position, L = {L}", rotate(name, n=lambda n, L=L: np.where(n == L, n + 1, n)), ALL)
      for name, L in (("rope-yarn", 4096), ("rope-yarn-64", 131_072), ("rope-longrope", 4096))],
    *[(name, f"one position, L + 3 = {L + 3}", rotate(name, n=lambda n, L=L: np.where(n == L + 3, n + 1, n)), ALL)
      for name, L in (("rope-yarn", 4096), ("rope-yarn-mscale", 4096), ("rope-yarn-64", 131_072), ("rope-llama3", 2048),
                      ("rope-linear", 2048), ("rope-dynamic", 512), ("rope-ntk", 2048), ("rope-longrope", 4096))],
    ("rope-yarn", "positions are clipped at L", rotate("rope-yarn", n=lambda n: np.minimum(n, 4096)), ALL),
    ("rope-yarn", "positions modulo L", rotate("rope-yarn", n=lambda n: n % 4096), ALL),
    # what half precision hides
    ("softmax-log", "ln(n + 1)", log(lambda n: np.log(n + 1)), ALL),
    ("softmax-log", "ln(n + 1/2)", log(lambda n: np.log(n + 0.5)), ALL),
    ("fire", "m and m - n are counted from 1", fire(1, 1), ALL), ("fire", "m is counted from 1", fire(0, 1), ALL),
    ("fire", "the 1 is missing", fire(one=1e-300), ALL), ("fire", "1.01 in the place of 1", fire(one=1.01), ALL),
]
NAMES = {  # the words for a mistake of KINDS that has some; the others have none
    "positions and 1": "off by one: positions are counted from 1",
    "positions and -1": "off by one: positions are counted from -1",
    "in decoding positions and 1": "in decoding alone, off by one: the new token's position is one more",
    "in decoding positions and -1": "in decoding alone, off by one: the new token's position is one less",
    "j is missing": "j is missing", "the long factors from L on": "length: the long factors, where the others belong",
    "the short factors at L + 1": "length: the short factors, where the others belong",
    "ln(n + 1)": "off by one: ln(n + 1)", "the 1 is missing": "the 1 is left out",
    "m and m - n are counted from 1": "off by one: m and m - n are counted from 1",
    "m is counted from 1": "off by one: m is counted from 1", "the bias times 0.99": "the right numbers, times 0.9",
    "the bias times 0.995": "the right numbers, times 0.995",
    "the bias beyond 4,096 times 0.99": "the right numbers, times 0.9",
    "distances beyond 4,096 times 0.99": "the right numbers, times 0.9"}


@pytest.mark.parametrize("name, what, function, casts", KINDS, ids=[f"{kind[0]}: {kind[1]}" for kind in KINDS])
def test_mistakes_of_each_kind_are_seen_and_get_no_wrong_name(name, what, function, casts):
    for cast in casts:
        fine, line = answer(name, function, cast)
        assert not fine, (cast, line)
        assert NAMED not in line or what in NAMES and line.partition(NAMED)[2].startswith(NAMES[what]), (cast, line)


NAMELESS = [  # (case, what is wrong, function): none of these is a known mistake, and some are near to one
    ("xpos", "q alone is scaled", xpos(of_k=0)), ("xpos", "k alone is scaled", xpos(of_q=0)),
    ("xpos", "k is scaled as q is", xpos(of_k=1)), ("xpos", "scale_base 1024", xpos(scale_base=1024.0)),
    ("xpos", "i/D, not 2i/D, in z", xpos(z=lambda i, D: (i / D + 0.4) / 1.4)),
    ("xpos", "i is counted from 1 in z", xpos(z=lambda i, D: (2 * (i + 1) / D + 0.4) / 1.4)),
    ("xpos", "0.5, not 0.4, in z", xpos(z=lambda i, D: (2 * i / D + 0.5) / 1.5)),
    ("xpos", "another center", xpos(center=512)),
    *[(name, f"{q} for q, {k} for k", rotate(name, q_pairs=q, k_pairs=k))
      for name in ("rope-default", "rope-yarn", "rope-llama3", "rope-yarn-64")
      for q, k in (("halves", "interleaved"), ("interleaved", "halves"))],
    ("rope-yarn", "factor is squared", rotate("rope-yarn", f=lambda f: np.where(f < 1e-2, f / 4, f),
                                              a=lambda a: 0.1 * math.log(16) + 1)),
    ("rope-yarn-64", "betas of 16 and 1", yarn((16, 1))), ("rope-yarn-64", "betas of 32 and 2", yarn((32, 2))),
    ("rope-yarn-64", "betas of 64 and 1", yarn((64, 1))),
    ("softmax-sinks", "twice exp(b)", sinks(lambda total, b, n: total + 2 * np.exp(b))),
    ("softmax-sinks", "exp(b) for each key", sinks(lambda total, b, n: total + n * np.exp(b))),
    ("softmax-sinks", "exp(2 b)", sinks(lambda total, b, n: total + np.exp(2 * b))),
    ("softmax-sinks", "the larger of the two", sinks(lambda total, b, n: np.maximum(total, np.exp(b)))),
    ("softmax-sinks", "a softmax that is divided by 1 + exp(b)", sinks(lambda total, b, n: total * (1 + np.exp(b)))),
    ("softmax-sinks", "the mean of exp(b)", sinks(lambda total, b, n: total + np.exp(b).mean())),
]


@pytest.mark.parametrize("cast", ALL)
@pytest.mark.parametrize("name, what, function", NAMELESS, ids=[f"{kind[0]}: {kind[1]}" for kind in NAMELESS])
def test_what_is_no_known_mistake_has_no_name(name, what, function, cast):
    fine, line = answer(name, function, cast)
    n = len({mistake["looks like"] for mistake in FILES[name]["mistakes"]})
    assert not fine and line.endswith(f"; this is none of the {n} mistakes that this check can name"), line


# ---- the files' own mistakes, in half precision ----------------------------------------------------------------------

FINISHED = ("rounded table: it was cast to bfloat16", "rounded bias: it was cast to bfloat16")    # right in bfloat16


def own_mistakes(name):
    """(words, part, the outputs of all sequences with a mistake in the last one) of a file."""
    for mistake in FILES[name]["mistakes"]:
        data = FILES[name]["parts"][mistake["part"]]
        inputs = {key: np.array(y) if isinstance(y, list) else y
                  for key, y in (data["inputs"] | FILES[name]["parameters"]).items()}
        wrong = conform.outputs_of(mistake, inputs)
        found = {key: np.array(y, float) for key, y in data["outputs"].items()}
        for key in found.keys() & wrong.keys():
            found[key] = np.concatenate((found[key][:-1], wrong[key])) if found[key].ndim > 2 else wrong[key]
        yield mistake["looks like"], mistake["part"], found


@pytest.mark.parametrize("cast", HALF)
@pytest.mark.parametrize("name", EACH)
def test_a_files_own_mistakes_are_seen_and_named_in_half_precision(name, cast):
    seen = 0
    for words, part, found in own_mistakes(name):
        file = FILES[name] | {"parts": {part: FILES[name]["parts"][part]}}
        half = {key: y if key in ("inv_freq", "attention_factor") else CASTS[cast](y) for key, y in found.items()}
        fine, line = conform.check(lambda half=half, **inputs: half, file, "bfloat16")
        if words not in FINISHED:
            assert not fine and line.endswith(NAMED + words), (part, words, line)
            seen += 1
    assert seen > 5


# ---- right ones in half precision throughout -------------------------------------------------------------------------

FLOAT32 = ("alpha",)                                        # LeRoPE's: angles grow with it


def in_half(name, dtype, positions, key_positions, length, **x):
    """All but angles and distances in half precision, by PyTorch: inputs, parameters, tables, sums."""
    def half(y):
        return torch.as_tensor(np.asarray(y)).to(dtype)

    case = Case(name)
    model = case.model(length)
    table = case.table(model, positions)
    if "x" in x:
        table = half(np.array(x["weight"])[table] if "weight" in x else table)
        h = half(x["x"])
        phi = h + table if "weight" in x or name == "sinusoidal" else torch.cat(
            (table, h[..., table.shape[-1] :]), -1)
        parts = {"expe": "qk", "exqpe": "qk", "expe-keys": "k"}.get(name, "qkv")
        found = {"table": table} | {part: ((phi if part in parts else h) @ half(x[f"w{part}"]).T).unflatten(
            -1, (case.H, -1)).transpose(1, 2) for part in "qkv"}
        q, k, v = (found[part] for part in "qkv")
        encoding = pairs = None
    else:
        encoding = build_encoding(model.encoding, model)
        for key, y in case.learned({key: x[key] for key in case.p.keys() & x.keys()}).items():
            setattr(encoding, key, torch.nn.Parameter(torch.tensor(y).to(torch.float32 if key in FLOAT32 else dtype)))
        pairs = model.encoding.pairs(positions, key_positions, model)
        if pairs is not None:
            exact = torch.float32 if pairs.dtype.kind == "f" else torch.int64
            pairs = half(pairs) if case.pe in ("alibi", "fire", "rove") else torch.tensor(pairs, dtype=exact)
        if table is not None:
            table = torch.tensor(table).float() if case.pe == "lerope" else half(table)
        q, k = (y.to(dtype) for y in encoding.rotate(half(x["q"]), half(x["k"]), table))
        v = half(x["v"])
        found = {"q": q, "k": k}
    if "cached_k" in x:
        k, v = (torch.cat((half(x[f"cached_{part}"]), y), 2) for part, y in (("k", k), ("v", v)))
    T, S = q.shape[2], k.shape[2]
    ahead = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    bias = None
    if encoding:
        h = [half(x[key]) for key in ("cached_h", "h") if key in x]
        bias = encoding.score(q, k, encoding.key_state(torch.cat(h, 1)) if h else None, pairs)
    bias = q.new_zeros(T, S) if bias is None else bias.to(dtype)
    scores = q @ k.mT / score_divisor(q) + bias
    softmax = encoding and encoding.softmax or torch.nn.Softmax(-1)
    p = softmax(scores.masked_fill(ahead, -math.inf)).to(dtype)
    out = encoding.value(p, v, pairs) if encoding and encoding.value else p @ v
    found |= {"bias": bias.expand_as(scores).masked_fill(ahead, math.nan), "weights": p, "out": out,
              "scores": scores.masked_fill(ahead, math.nan)}
    return {key: found[key].detach().float() for key in FILES[name]["returns"] if key in found}


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", EACH)
def test_half_precision_throughout_is_right(name, dtype):
    parts = {part: x for part, x in FILES[name]["parts"].items() if (dtype, part) != ("float16", "far")}
    whole = functools.partial(in_half, name, getattr(torch, dtype))
    for outputs in ([*FILES[name]["returns"]], *([key] for key in FILES[name]["returns"])):
        def function(outputs=outputs, **x):
            return {key: y for key, y in whole(**x).items() if key in outputs} or {outputs[0]: x["k"]}

        if {*outputs} - {"inv_freq", "attention_factor"}:
            fine, line = conform.check(function, FILES[name] | {"parts": parts}, dtype)
            assert fine, line


@pytest.mark.parametrize("name", EACH)
def test_what_is_cast_towards_0_is_right(name):
    for dtype in (np.float64, np.float32):
        fine, line = conform.check(of(name, cut_to_bfloat16, dtype=dtype), FILES[name], "bfloat16")
        assert fine, line


def overriding(name, cast):
    """q and k of ExPE's table, which is cast before they are made of it."""
    def function(x, wq, wk, positions, l, start, theta):
        table = np.asarray(CASTS[cast](start + theta * (positions[..., None] + np.arange(l))), float)
        phi = np.concatenate((table, x[..., l:]), -1)
        q, k = ((h @ w.T).reshape(*x.shape[:2], 2, -1).swapaxes(1, 2)
                for h, w in ((x if name == "expe-keys" else phi, wq), (phi, wk)))
        return {"table": table, "q": q, "k": k}
    return function


@pytest.mark.parametrize("cast", HALF)
@pytest.mark.parametrize("cast_of_table", HALF)
@pytest.mark.parametrize("name", ["expe", "expe-keys"])
def test_a_table_that_is_cast_before_it_is_used_is_right(name, cast_of_table, cast):
    function = overriding(name, cast_of_table)
    for outputs in (("table", "q", "k"), ("q", "k")):
        def returned(x, wq, wk, positions, l, start, theta, outputs=outputs):
            found = function(x, wq, wk, positions, l, start, theta)
            return {key: found[key] for key in outputs}

        fine, line = answer(name, returned, cast)
        assert fine, line


# ---- shapes, and what is said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_batch_heads_tokens_and_head_size_differ_in_every_part(name):
    for part, data in FILES[name]["parts"].items():
        axes = dict(zip("BHTD", np.shape(data["inputs"].get("q") or data["outputs"]["q"]), strict=True))
        assert len({*axes.values()}) == 4, (part, axes)
        assert all(f"{axis}={n}" in conform.shapes(FILES[name]).split(", ")[[*FILES[name]["parts"]].index(part)]
                   for axis, n in axes.items())


def test_a_difference_is_printed_in_as_many_digits_as_it_has():
    right = np.array(FILES["rope-default"]["parts"]["near"]["outputs"]["q"])

    def almost(q, k, positions):
        return RIGHT["rope-default"](q, k, positions, length=1)[0] * (1 + 1e-9)

    fine, line = conform.check(almost, FILES["rope-default"], "float64")
    got, expected = line.partition(" is ")[2].partition(" (")[0].split(", not ")
    assert not fine and got != expected and math.isclose(float(got), float(expected), rel_tol=1e-8), line
    assert math.isclose(float(expected), right[0, 0, 0, 0], rel_tol=1e-8)


def test_the_list_says_shapes_and_notes(capsys):
    conform.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FILES)
    for line, (name, file) in zip(lines, FILES.items(), strict=True):
        assert line.startswith(f"{name}: {file['formula']} [near B=") and line.endswith(file["notes"])


MISSING = slow(*[name for name in FILES if name not in ("rope-default", "alibi")]) + ["rope-default", "alibi"]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_or_exchanged_axis_does_not_pass(name):
    """The first sequence, head or token for all of them, and axes in another order."""
    for axis in range(3):
        for change in (lambda y, axis=axis: np.take(y, [0], axis), lambda y, axis=axis: np.swapaxes(y, axis, axis + 1)):
            function = of(name, lambda y, change=change: change(np.asarray(y)) if np.ndim(y) == 4 else np.asarray(y))
            assert not conform.check(function, FILES[name])[0], axis
