"""vectors/: the reference makes the same files again, and loops or PyTorch give every number.

The functions here take and return what conform.py says, one number at a time; tests/test_conform.py breaks them.
"""

import functools
import inspect
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, command

import expe as reference
from interop import conform, make_vectors
from interop.make_vectors import Case, document, frequencies, kept, text
from model_torch import as_tensor, build_encoding, score_divisor
from positional_encodings import CORE

VECTORS = ROOT / "interop/vectors"
FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(VECTORS.glob("*.json"))}
QUICK = ("rope-default", "rope-yarn", "mrope-sections", "sinusoidal", "expe", "exqpe", "alibi", "t5", "shaw", "fox")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FILES]


# ---- every encoding in loops: what is left out is right, what is given breaks it; past: cached_k and cached_v --------


def same(x):
    return x


def attention(q, k, v, cached_k=None, cached_v=None, bias=None, root=None):
    """The outputs by sums over numbers; bias(b, h, i, j) of the query and key of these indices among all keys."""
    if cached_k is not None:
        k, v = np.concatenate((cached_k, k), 2), np.concatenate((cached_v, v), 2)
    (B, H, T, D), S = q.shape, k.shape[2]
    found = {name: np.full((B, H, T, S), np.nan, q.dtype) for name in ("bias", "scores", "weights")}
    found["out"] = np.zeros((B, H, T, v.shape[-1]), q.dtype)
    for b, h, t in np.ndindex(B, H, T):
        i = S - T + t
        for j in range(i + 1):
            added = bias(b, h, i, j) if bias else 0
            found["bias"][b, h, t, j] = added
            found["scores"][b, h, t, j] = dot(q[b, h, t], k[b, h, j]) / (root or math.sqrt(D)) + added
        scores = found["scores"][b, h, t, : i + 1]
        weights = [np.exp(x - max(scores)) / sum(np.exp(scores - max(scores))) for x in scores]
        found["weights"][b, h, t] = [*weights, *[0] * (S - i - 1)]
        for d in range(v.shape[-1]):
            found["out"][b, h, t, d] = dot(weights, v[b, h, : i + 1, d])
    return found


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def turned(x, n, f, a, pairs):
    """Each pair as a complex number, times a e^(i n f); n (B, T), or (r/2, B, T) of each pair."""
    out = x.copy()
    for b, h, t in np.ndindex(x.shape[:3]):
        for (i, j), frequency, m in zip(pairs, f, np.broadcast_to(n, (len(f), *n.shape[-2:])), strict=True):
            z = (x[b, h, t, i] + 1j * x[b, h, t, j]) * a * np.exp(1j * (int(m[b, t]) * frequency))
            out[b, h, t, i], out[b, h, t, j] = z.real, z.imag
    return out


AXES = {"mrope-sections": "THHWWW", "mrope-interleaved": "THWTHT"}  # of each pair's position


def rope(name, q, k, v, positions, length, n=same, f=same, a=same, interleaved=False, first=0, root=None, **past):
    """With the reference's frequencies, which tests/test_conform.py compares with those of transformers."""
    g, factor = frequencies(Case(name), length)
    g, factor = f(g), a(factor)
    r = len(g)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (first + i, first + i + r) for i in range(r)]
    positions = positions[["THW".index(axis) for axis in AXES[name]]] if name in AXES else positions
    q, k = (turned(x, n(positions), g, factor, pairs) for x in (q, k))
    return attention(q, k, v, **past, root=root) | {"q": q, "k": k, "inv_freq": np.array(g), "attention_factor": factor}


def reading(x, wq, wk, wv, positions, row, width, n=same, parts="qkv", heads=2, **past):
    """These parts are made by their matrices of x with row(n, vector) in its first dimensions; the others are of x."""
    B, T, C = x.shape
    h = np.zeros_like(x)
    for b, t in np.ndindex(B, T):
        first = row(int(n(positions)[b, t]), list(x[b, t]))
        h[b, t] = [*first, *x[b, t, len(first) :]]
    found = {"table": np.array([[row(int(m), [0.0] * width) for m in ns] for ns in n(positions)])}
    for name, w in zip("qkv", (wq, wk, wv), strict=True):
        of = h if name in parts else x
        y = [[[dot(w[o], of[b, t]) for o in range(C)] for t in range(T)] for b in range(B)]
        found[name] = np.array(y).reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)
    return found | attention(found["q"], found["k"], found["v"], **past)


def sinusoidal(x, wq, wk, wv, positions, base, **broken):
    C = x.shape[-1]

    def row(n, x):
        waves = [f(n * base ** (-2 * i / C)) for i in range(C // 2) for f in (np.sin, np.cos)]
        return [y + z for y, z in zip(waves, x, strict=True)]

    return reading(x, wq, wk, wv, positions, row, C, **broken)


def learned(x, wq, wk, wv, positions, weight, **broken):
    return reading(x, wq, wk, wv, positions, lambda n, x: np.add(weight[n], x), x.shape[-1], **broken)


def expe(x, wq, wk, wv, positions, l, start, theta, **broken):
    def row(n, x):
        return [start + theta * (n + i) for i in range(l)]

    return reading(x, wq, wk, wv, positions, row, l, **{"parts": "qk"} | broken)


def exqpe(x, wq, wk, wv, positions, l, start, theta1, theta2, **broken):
    rows = [[start + theta2 * (i == 0) + theta1 * i for i in range(l)]]  # the paper's recurrence, from p_0 on
    while len(rows) <= 2100:
        rows.append([x + theta2 * (i == len(rows) % l) for i, x in enumerate(rows[-1])])

    def row(n, x):
        far = n - n % l - l if n > 2000 else 0  # whole rounds raise all alike
        return [y + theta2 * far / l for y in rows[n - far]]

    return reading(x, wq, wk, wv, positions, row, l, **{"parts": "qk"} | broken)


def slope(h, H):
    lower = 2 ** int(math.log2(H))
    return 2 ** (-8 * (h + 1) / lower) if h < lower else 2 ** (-8 * (2 * (h - lower) + 1) / (2 * lower))


def alibi(q, k, v, positions, key_positions, n=same, times=1, slope=slope, **past):
    m = n(key_positions)

    def bias(b, h, i, j):
        return -times * slope(h, q.shape[1]) * int(m[b, i] - m[b, j])

    return attention(q, k, v, **past, bias=bias)


def by_torch(name, n=same, **x):
    """Of a case without loops here: the ladder, tests/test_zoo.py or tests/test_softmax.py checks its formula."""
    case = Case(name)
    parameters = case.learned({key: x[key] for key in case.p.keys() & x.keys()})
    model = case.model(x["length"])
    encoding = build_encoding(model.encoding, model)
    x = {key: torch.as_tensor(y) if isinstance(y, np.ndarray) else y for key, y in x.items()}
    q, k, v = (x[part] for part in "qkv")
    for key, y in parameters.items():
        setattr(encoding, key, torch.nn.Parameter(torch.as_tensor(y, dtype=q.dtype)))
    queries, keys = (n(x[key].numpy()) for key in ("positions", "key_positions"))
    rows, pairs = (as_tensor(y, q) for y in (model.encoding.rows(queries, model),
                                             model.encoding.pairs(queries, keys, model)))
    q, k = encoding.rotate(q, k, rows)
    found = {"q": q, "k": k}
    k, v = (torch.cat((x[f"cached_{part}"], y), 2) if f"cached_{part}" in x else y for part, y in (("k", k), ("v", v)))
    h = torch.cat((x["cached_h"], x["h"]), 1) if "cached_h" in x else x.get("h")
    T, S = q.shape[2], k.shape[2]
    ahead = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    bias = encoding.score(q, k, None if h is None else encoding.key_state(h), pairs)
    bias = q.new_zeros(T, S) if bias is None else bias
    scores = q @ k.mT / score_divisor(q) + bias
    weights = (encoding.softmax or torch.nn.Softmax(-1))(scores.masked_fill(ahead, -math.inf))
    out = encoding.value(weights, v, pairs) if encoding.value else weights @ v
    found |= {"bias": bias.expand_as(scores).masked_fill(ahead, math.nan), "weights": weights, "out": out,
              "scores": scores.masked_fill(ahead, math.nan)}
    return {key: y.detach().numpy() for key, y in found.items()}


OURS = {name: functools.partial(rope if "rope-" in name else by_torch, name) for name in FILES} | {
    "sinusoidal": sinusoidal, "learned": learned, "expe": expe, "exqpe": exqpe, "alibi": alibi,
    "expe-keys": functools.partial(expe, parts="k"),
}


# ---- the files -------------------------------------------------------------------------------------------------------


def test_every_encoding_that_has_positions_has_a_file_with_all_parts():
    assert FILES.keys() == OURS.keys()                                  # a new file of zoo/ may have none yet
    assert {*CORE} - {"nope"} <= {file["encoding"] for file in FILES.values()}
    for name, file in FILES.items():
        assert file["formula"] and file["source"] and file["parts"].keys() >= {"near", "decode"}, name
        if "far" in file["parts"]:
            assert np.max(file["parts"]["far"]["inputs"]["positions"]) == 10**6, name


@pytest.mark.parametrize("name", EACH)
def test_made_again_they_are_the_same(name):
    """All but the last digits, which another processor's cosine may change."""
    new, old = document(name), FILES[name]
    number = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
    in_file = (VECTORS / f"{name}.json").read_text(encoding="utf-8")
    assert re.split(number, text(new) + "\n") == re.split(number, in_file)
    nears = {"parameters": 1e-12, "mistakes": 2e-4}                      # of five digits
    pairs = [(new[key], old[key], near) for key, near in nears.items()]
    for part, x in old["parts"].items():
        nears = {"size": 0.1, "inputs": rounding(x), "outputs": rounding(x)}            # sizes have two digits
        pairs += [(new["parts"][part][key], x[key], near) for key, near in nears.items()]
    for a, b, near in pairs:
        a, b = (np.array(re.findall(number, text(y)), float) for y in (a, b))
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


def tolerances(part):
    """{output: the error of each number that a part of a file leaves to rounding in float64}."""
    sizes = {name: [np.array(x, float) for x in size] for name, size in part["size"].items()}
    return {name: conform.tolerance(name, "float64", np.array(y, float), *sizes[name])
            for name, y in part["outputs"].items()}


def rounding(part):
    """The largest error over max(1, a number) that a part of a file leaves to rounding: it grows with the positions."""
    return make_vectors.most_allowed(part)


def test_tolerances_grow_with_positions_and_are_of_the_size_of_roundings():
    for name in ("rope-default", "sinusoidal"):
        near, far = (rounding(FILES[name]["parts"][part]) for part in ("near", "far"))
        assert 2**-52 < far / 10**6 < 2**-48 and 2**-52 < near / 2070 < 2**-47


@pytest.mark.parametrize("name", EACH)
def test_a_processor_that_rounds_otherwise_changes_no_file(name, monkeypatch):
    """Cosines, sines and powers are up to two units in the last place away, as those of another processor may be."""
    exact = {f: getattr(np, f) for f in ("cos", "sin", "exp", "log1p")}
    rng = np.random.default_rng(0)

    def otherwise(x):
        return x * (1 + rng.integers(-2, 3, np.shape(x)) * 2.0**-52)

    for f, function in exact.items():
        monkeypatch.setattr(np, f, lambda x, function=function, **out: otherwise(function(x, **out)))
    plain_inv_freq = reference.rope_inv_freq
    monkeypatch.setattr(reference, "rope_inv_freq", lambda *given: otherwise(plain_inv_freq(*given)))
    made = document(name)
    assert kept(made, FILES[name]) == FILES[name]
    test_made_again_they_are_the_same(name)


def test_the_command_writes_exactly_these_files(tmp_path, monkeypatch):
    monkeypatch.setattr(make_vectors, "FOLDER", shutil.copytree(VECTORS, tmp_path / "vectors"))
    done = command("interop.make_vectors", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for path in VECTORS.glob("*.json"):
        assert (tmp_path / "vectors" / path.name).read_bytes() == path.read_bytes(), path.name
        assert path.stat().st_size < 300_000, path.name


def given(name, inputs, function):
    """What this function takes of a case's inputs and parameters, as conform.py gives it."""
    everything = {key: np.array(x) if isinstance(x, list) else x
                  for key, x in (inputs | FILES[name]["parameters"]).items()}
    takes = inspect.signature(function).parameters
    more = {name for name, parameter in takes.items() if parameter.kind == parameter.VAR_KEYWORD}
    cache = {"cached_k", "cached_v"} if more & {"past", "broken"} else {}
    return {key: x for key, x in everything.items() if key in takes or key in cache or more & {"p", "given", "x"}}


@pytest.mark.parametrize("name", FILES)
def test_the_numbers_come_out_of_loops_or_of_pytorch(name):
    for part, data in FILES[name]["parts"].items():
        found = OURS[name](**given(name, data["inputs"], OURS[name]))
        for output, right in data["outputs"].items():
            right, ours = np.array(right, float), np.asarray(found[output], float)
            assert right.shape == ours.shape and np.array_equal(np.isnan(right), np.isnan(ours)), (part, output)
            off = np.nan_to_num(np.abs(ours - right))
            assert (off <= tolerances(data)[output]).all(), (part, output, off.max())
