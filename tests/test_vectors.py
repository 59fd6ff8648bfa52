"""vectors/: the reference makes the same files again, and loops that call nothing of the project give every number.

The functions here take and return what conform.py says, one number at a time; tests/test_conform.py breaks them.
"""

import inspect
import json
import math
import re

import numpy as np
import pytest
from conftest import ROOT

from config import ENCODINGS
from interop.make_vectors import document, text

VECTORS = ROOT / "interop/vectors"
FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(VECTORS.glob("*.json"))}


# ---- every encoding in loops: what is left out is right, what is given breaks it; past: cached_k and cached_v --------


def same(x):
    return x


def whole(x, cached, axis=2):
    return x if cached is None else np.concatenate((cached, x), axis)


def softmax(scores, h):
    e = [np.exp(s - max(scores)) for s in scores]
    return [x / sum(e) for x in e]


def attention(q, k, v, cached_k=None, cached_v=None, bias=None, root=None, weigh=softmax):
    """The outputs by sums over numbers; bias(b, h, i, j) of the query and key of these indices among all keys."""
    k, v = whole(k, cached_k), whole(v, cached_v)
    (B, H, T, D), S = q.shape, k.shape[2]
    found = {name: np.full((B, H, T, S), np.nan, q.dtype) for name in ("bias", "scores", "weights")}
    found["out"] = np.zeros((B, H, T, v.shape[-1]), q.dtype)
    for b, h, t in np.ndindex(B, H, T):
        i = S - T + t
        for j in range(i + 1):
            added = bias(b, h, i, j) if bias else 0
            found["bias"][b, h, t, j] = added
            found["scores"][b, h, t, j] = dot(q[b, h, t], k[b, h, j]) / (root or math.sqrt(D)) + added
        weights = weigh(found["scores"][b, h, t, : i + 1], h)
        found["weights"][b, h, t] = [*weights, *[0] * (S - i - 1)]
        for d in range(v.shape[-1]):
            found["out"][b, h, t, d] = dot(weights, v[b, h, : i + 1, d])
    return found


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def frequencies(p, D, longest, length, exponent=lambda i, D: 2 * i / D):
    """(radians of each pair by position, attention factor) of transformers' rope_parameters, by each paper's words."""
    base, s, L = p["rope_theta"], p.get("factor", 1.0), p.get("original_max_position_embeddings", longest)
    r = int(D * p.get("partial_rotary_factor", 1)) if p["rope_type"] == "default" else D
    kind, a = p["rope_type"], 1.0
    if kind == "dynamic":
        base *= max(1.0, s * length / longest - (s - 1)) ** (D / (D - 2))
    if kind == "ntk":
        base *= s ** (D / (D - 2))
    g = [base ** -exponent(i, r) for i in range(r // 2)]
    if kind == "linear":
        g = [x / s for x in g]
    if kind == "proportional":
        g = [x if i < p["partial_rotary_factor"] * D / 2 else 0.0 for i, x in enumerate(g)]
    if kind == "longrope":
        g = [x / y for x, y in zip(g, p["long_factor" if length > L else "short_factor"], strict=True)]
        a = np.sqrt(1 + np.log(s) / np.log(L))
    if kind == "llama3":
        for i, x in enumerate(g):
            turns = L * x / (2 * math.pi)
            if turns <= p["high_freq_factor"]:
                t = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
                g[i] = x / s if t <= 0 else x * t + x / s * (1 - t)
    if kind == "yarn":
        low, high = (D * np.log(L / (turns * 2 * math.pi)) / (2 * np.log(base)) for turns in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(D // 2)]
        g = [x * (1 - y) + x / s * y for x, y in zip(g, ramp, strict=True)]
        a = 1 + 0.1 * p.get("mscale", 1) * np.log(s)
        a /= 1 + 0.1 * p["mscale_all_dim"] * np.log(s) if "mscale_all_dim" in p else 1
    return g, a


def turned(x, n, f, a=1, pairs=None, angle=same):
    """Each pair, (i, i + D/2) if not given, as a complex number, times a e^(i n f)."""
    out, pairs = x.copy(), pairs or [(i, i + x.shape[-1] // 2) for i in range(len(f))]
    for b, h, t in np.ndindex(x.shape[:3]):
        for (i, j), frequency in zip(pairs, f, strict=True):
            z = (x[b, h, t, i] + 1j * x[b, h, t, j]) * a * np.exp(1j * angle(int(n[b, t]) * frequency))
            out[b, h, t, i], out[b, h, t, j] = z.real, z.imag
    return out


def powers(base, D, exponent=2):
    return [base ** (-exponent * i / D) for i in range(D // 2)]


def rope(q, k, v, positions, length, rope_parameters, max_position_embeddings, head_dim, n=same, f=same, a=same,
         angle=same, interleaved=False, first=0, root=None, exponent=lambda i, D: 2 * i / D, **past):
    g, factor = frequencies(rope_parameters, head_dim, max_position_embeddings, length, exponent)
    g, factor = f(g), a(factor)
    r = len(g)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (first + i, first + i + r) for i in range(r)]
    q, k = (turned(x, n(positions), g, factor, pairs, angle) for x in (q, k))
    return attention(q, k, v, **past, root=root) | {"q": q, "k": k, "inv_freq": np.array(g), "attention_factor": factor}


def xpos(q, k, v, positions, base, scale_base, center, n=same, sign=1, **past):
    D = q.shape[-1]
    q, k = (turned(x, n(positions), powers(base, D)) for x in (q, k))
    for b, h, t, d in np.ndindex(q.shape):
        z = ((2 * (d % (D // 2)) / D + 0.4) / 1.4) ** (sign * (int(n(positions)[b, t]) - center) / scale_base)
        q[b, h, t, d], k[b, h, t, d] = q[b, h, t, d] * z, k[b, h, t, d] / z
    return attention(q, k, v, **past) | {"q": q, "k": k}


def rove(q, k, v, positions, key_positions, base, cached_k=None, cached_v=None, n=same, back=-1, values=1):
    f, kept = powers(base, q.shape[-1]), key_positions.shape[1] - q.shape[2]
    q, k = (turned(x, n(positions), f) for x in (q, k))
    v = turned(whole(v, cached_v), values * n(key_positions), f)
    found = attention(q, k, v[:, :, kept:], cached_k, v[:, :, :kept])
    return found | {"q": q, "k": k, "out": turned(found["out"], back * n(positions), f)}


def reading(x, wq, wk, wv, positions, row, width, n=same, parts="qkv", heads=2, place=lambda row, x: row, **past):
    """These parts are made by their matrices of what place(row(n, vector), vector) makes of x; the others are of x."""
    B, T, C = x.shape
    h = np.zeros_like(x)
    for b, t in np.ndindex(B, T):
        h[b, t] = place(row(int(n(positions)[b, t]), list(x[b, t])), list(x[b, t]))
    found = {"table": np.array([[row(int(m), [0.0] * width) for m in ns] for ns in n(positions)])}
    for name, w in zip("qkv", (wq, wk, wv), strict=True):
        of = h if name in parts else x
        y = [[[dot(w[o], of[b, t]) for o in range(C)] for t in range(T)] for b in range(B)]
        found[name] = np.array(y).reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)
    return found | attention(found["q"], found["k"], found["v"], **past)


def sinusoidal(x, wq, wk, wv, positions, base, halves=False, exponent=None, fs=(np.sin, np.cos), **broken):
    C = x.shape[-1]
    exponent = exponent or (lambda i, of_cosine: 2 * i / C)

    def row(n, x):
        waves = [f(n * base ** -exponent(i, j)) for i in range(C // 2) for j, f in enumerate(fs)]
        return [y + z for y, z in zip(waves[::2] + waves[1::2] if halves else waves, x, strict=True)]

    return reading(x, wq, wk, wv, positions, row, C, **broken)


def learned(x, wq, wk, wv, positions, weight, **broken):
    def row(n, x):
        return [y + z for y, z in zip(weight[n], x, strict=True)]

    return reading(x, wq, wk, wv, positions, row, x.shape[-1], **broken)


def first(row, x):
    return row + x[len(row) :]


def expe(x, wq, wk, wv, positions, l, start, theta, j=1, **broken):
    def row(n, x):
        return [start + theta * (n + j * i) for i in range(l)]

    return reading(x, wq, wk, wv, positions, row, l, **{"place": first, "parts": "qk"} | broken)


def exqpe(x, wq, wk, wv, positions, l, start, theta1, theta2, late=0, **broken):
    rows = [[start + theta2 * (i == late) + theta1 * i for i in range(l)]]  # the paper's recurrence, from p_0 on
    while len(rows) <= 2100:
        rows.append([x + theta2 * (i == len(rows) % l and len(rows) >= late) for i, x in enumerate(rows[-1])])

    def row(n, x):
        far = n - n % l - l if n > 2000 else 0  # whole rounds raise all alike
        return [y + theta2 * far / l for y in rows[n - far]]

    return reading(x, wq, wk, wv, positions, row, l, **{"place": first, "parts": "qk"} | broken)


def biased(of):
    """A function of what conform.py gives, from of(h, m, n, d, p): the bias of positions m and n; p the parameters."""

    def function(q, k, v, positions, key_positions, cached_k=None, cached_v=None, n=same, key=same, times=1, root=None,
                 **p):
        m, keys, S = n(key_positions), key(n(key_positions)), key_positions.shape[1]

        def bias(b, h, i, j):
            query = q[b, h, i - S + q.shape[2]]
            return times * of(h, int(m[b, i]), int(keys[b, j]), query, p | {"H": q.shape[1]})

        return attention(q, k, v, cached_k, cached_v, bias, root)

    return function


def slope(h, H):
    lower = 2 ** int(math.log2(H))
    return 2 ** (-8 * (h + 1) / lower) if h < lower else 2 ** (-8 * (2 * (h - lower) + 1) / (2 * lower))


def bucket(d, p):
    half = p["buckets"] // 2
    far = np.log(max(d, 1) / half) / np.log(p["max_distance"] / half)
    return d if d < half else min(half + p.get("whole", int)(far * half), 2 * half - 1)


def softplus(x):
    return np.log(1 + np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def fire_bias(h, m, n, q, p):
    y = np.log(1 + p["c"] * (m - n)) / np.log(1 + p["c"] * max(m * p.get("grows", 1), p["L"]))
    return sum(w2 * max(w1 * y + b1, 0) for w1, b1, w2 in zip(p["w1"], p["b1"], p["w2"][h], strict=True))


def grape_bias(h, m, n, q, p):
    v, root = p["gate_v"][h], p.get("gate_root", math.sqrt(len(q)))
    along = dot(v, q) / p.get("norm", np.sqrt(dot(v, v))) / root
    return -(m - n) * slope(h, p["H"]) ** p.get("power", 1) * softplus(p["w"][h]) * softplus(along)


def shaw_bias(h, m, n, q, p):
    return dot(q, p["keys"][min(m - n, p["max_distance"])]) / math.sqrt(len(q))


def shaw(values, positions, key_positions, max_distance, **given):
    found = biased(shaw_bias)(positions=positions, key_positions=key_positions, max_distance=max_distance, **given)
    T, S = positions.shape[1], key_positions.shape[1]
    for b, h, t, d in np.ndindex(found["out"].shape):
        for j in range(S - T + t + 1):
            r = min(int(positions[b, t] - key_positions[b, j]), max_distance)
            found["out"][b, h, t, d] += found["weights"][b, h, t, j] * values[r][d]
    return found


def cope(q, k, v, e, cached_k=None, cached_v=None, divide=1.0, own=1):
    every = whole(k, cached_k)

    def bias(b, h, i, j):
        query, keys = q[b, h, i - every.shape[2] + q.shape[2]], every[b, h, : i + 1]
        gates = [sigmoid(dot(query, key) / divide) for key in keys]
        p = min(sum(gates[j + (not own) :]), len(e) - 1)
        ends = [dot(query, e[f(p)]) for f in (math.floor, math.ceil)]
        return (1 - p % 1) * ends[0] + p % 1 * ends[1]

    return attention(q, k, v, cached_k, cached_v, bias)


def fox(q, k, v, h, weight, gate_bias, cached_h=None, first=1, last=1, gate=lambda y: np.log(sigmoid(y)), **past):
    h = whole(h, cached_h, 1)

    def bias(b, head, i, j):
        return sum(gate(dot(weight[head], h[b, o]) + gate_bias[head]) for o in range(j + first, i + last))

    return attention(q, k, v, **past, bias=bias)


def softmax_log(q, k, v, s, count=same, **past):
    """As scores times s ln n, so that softmax(s ln(n) x) is n^(s x) over its sum."""

    def weigh(scores, h):
        shares = [count(len(scores)) ** (s[h] * x) for x in scores]
        return [x / sum(shares) for x in shares]

    return attention(q, k, v, **past, weigh=weigh)


def softmax_sinks(q, k, v, b, **past):
    """By a further key, of which the score is b and the value 0."""
    return attention(q, k, v, **past, weigh=lambda scores, h: softmax([*scores, b[h]], h)[:-1])


def softmax_stick(q, k, v, own=1, before=lambda m: range(m - 1, -1, -1), **past):
    """A stick of length 1: from the query back each key breaks off its share of what is left."""

    def weigh(scores, h):
        m, left = len(scores) - 1, 1.0
        weights = [0.0] * (m + 1)
        for n in before(m):
            weights[n], left = left * sigmoid(scores[n]), left * (1 - sigmoid(scores[n]))
        weights[m] += own * left
        return weights

    return attention(q, k, v, **past, weigh=weigh)


def pope(q, k, v, positions, base, e, n=same, exponent=1, root=None, **past):
    """By arrows as complex numbers; a cache has their real parts and then their imaginary ones."""
    D = q.shape[-1]
    arrows = np.zeros((2, *q.shape), complex)
    for b, h, t, c in np.ndindex(q.shape):
        angle = float(n(positions)[b, t]) * base ** (-exponent * c / D)
        arrows[0, b, h, t, c] = softplus(q[b, h, t, c]) * np.exp(1j * angle)
        arrows[1, b, h, t, c] = softplus(k[b, h, t, c]) * np.exp(1j * (angle + min(0, max(-2 * math.pi, e[h][c]))))
    wide = [np.concatenate((x.real, x.imag), -1).astype(q.dtype) for x in arrows]
    return attention(*wide, v, **past, root=root or math.sqrt(D))


def cable(q, k, v, h, tokens, query, cached_h=None, relu=lambda y: max(y, 0.0), gate=softplus, sign=-1, whose=0,
          **past):
    h = whole(h, cached_h, 1)

    def bias(b, head, i, j):
        passed = sum(relu(dot(tokens[head], h[b, t])) for t in range(j + 1, i + 1))
        return sign * gate(dot(query[head], h[b, j if whose else i])) * passed

    return attention(q, k, v, **past, bias=bias)


def dape(q, k, v, key_positions, p, a, w1, w2, cached_k=None, cached_v=None, n=same, added=1, product=None):
    every, at = whole(k, cached_k), n(key_positions)
    _, H, T, D = q.shape

    def bias(b, h, i, j):
        kerple = [-p[o] * np.log(1 + a[o] * abs(int(at[b, i]) - int(at[b, j]))) for o in range(H)]
        scores = [q[b, o, i - every.shape[2] + T] @ every[b, o, j] / (product or math.sqrt(D)) for o in range(H)]
        hidden = [dot(row, [*scores, *kerple, 1]) for row in w1]
        return added * kerple[h] + sum(w * (y if y > 0 else 0.01 * y) for w, y in zip(w2[h], hidden, strict=True))

    return attention(q, k, v, cached_k, cached_v, bias)


def convolved(h, w1, w2, conv, b, t):
    """The taps of w2 w1 h at token t, one number at a time."""
    sums = np.zeros(len(conv))
    for i in range(min(t + 1, len(conv[0]))):
        u = np.array(w2) @ (np.array(w1) @ h[b, t - i])
        sums += [row[i] * y for row, y in zip(conv, u, strict=True)]
    return sums


def selective_rope(q, k, v, h, base, w1, w2, conv, cached_k=None, cached_v=None, cached_h=None):
    h, k = whole(h, cached_h, 1), whole(k, cached_k)
    (B, H, T, D), S = q.shape, k.shape[2]
    x = h.reshape(B, S, H, -1)
    x = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)).reshape(h.shape)
    angle = np.zeros((B, S, H * D // 2))
    for b, t in np.ndindex(B, S):
        angle[b, t] = (angle[b, t - 1] if t else 0) + convolved(x, w1, w2, conv, b, t)
    turn = np.exp(1j * angle.reshape(B, S, H, D // 2) * powers(base, D)).swapaxes(1, 2)

    def turned(x, by):
        pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * by
        return np.concatenate((pairs.real, pairs.imag), -1)

    return attention(turned(q, turn[:, :, S - T :]), turned(k, turn), v, None, cached_v)


def path(q, k, v, h, w1, w2, conv, strength, strength_bias, forget=None, forget_bias=None, cached_k=None, cached_v=None,
         cached_h=None, silu=lambda y: y * sigmoid(y), divide=1.0):
    """Each key is reflected by one token after the other on its way to the query."""
    h, every = whole(h, cached_h, 1), whole(k, cached_k)
    *_, T, D = q.shape

    def bias(b, head, i, j):
        key, forgotten = every[b, head, j], 0.0
        for t in range(j + 1, i + 1):
            y = silu(convolved(h, w1, w2, conv, b, t))[head * D : (head + 1) * D]
            w = y / np.sqrt(y @ y + 1e-6)
            key = key - 2 * sigmoid(strength[head] @ h[b, t] + strength_bias[head]) * (w @ key) * w
            if forget is not None:
                forgotten += np.log(sigmoid(forget[head] @ h[b, t] + forget_bias[head]))
        query = q[b, head, i - every.shape[2] + T]
        return query @ (key - every[b, head, j]) / math.sqrt(D) + forgotten / divide

    return attention(q, k, v, cached_k, cached_v, bias)


OURS = {name: rope for name in FILES if name.startswith("rope-")} | {
    "xpos": xpos, "sinusoidal": sinusoidal, "learned": learned, "expe": expe, "exqpe": exqpe, "shaw": shaw,
    "pope": pope, "cable": cable, "dape": dape, "selective-rope": selective_rope, "path": path, "path-fox": path,
    "rove": rove, "softmax-stick": softmax_stick, "cope": cope, "fox": fox, "softmax-log": softmax_log,
    "softmax-sinks": softmax_sinks, "fire": biased(fire_bias),
    "expe-keys": lambda x, wq, wk, wv, positions, l, start, theta, **broken: expe(
        x, wq, wk, wv, positions, l, start, theta, **{"parts": "k"} | broken),
    "alibi": biased(lambda h, m, n, q, p: -(m - n) * p.get("slope", slope)(h, p["H"]) ** p.get("power", 1)),
    "t5": biased(lambda h, m, n, q, p: p["weight"][bucket(m - n, p)][h]),
    "kerple": biased(lambda h, m, n, q, p: -p["p"][h] * np.log(1 + p["a"][h] * abs(m - n))),
    "grape": biased(grape_bias),
}


# ---- the files -------------------------------------------------------------------------------------------------------


def test_every_encoding_that_has_positions_has_a_file_with_all_parts():
    assert FILES.keys() == OURS.keys() and {file["encoding"] for file in FILES.values()} >= {*ENCODINGS} - {"nope"}
    for name, file in FILES.items():
        assert file["formula"] and file["source"] and file["parts"].keys() >= {"near", "decode"}, name
        if "far" in file["parts"]:
            assert max(file["parts"]["far"]["inputs"]["positions"][0]) == 10**6, name


@pytest.mark.parametrize("name", FILES)
def test_made_again_they_are_the_same(name):
    """All but the last digits, which another CPU's cosine may change."""
    new, old = text(document(name)), (VECTORS / f"{name}.json").read_text(encoding="utf-8")
    number = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
    begin = old.index('"mistakes"')
    assert re.split(number, new + "\n") == re.split(number, old)
    for (a, b), tolerance in (((new[:begin], old[:begin]), 1e-12), ((new[begin:], old[begin:]), 2e-4)):
        a, b = (np.array(re.findall(number, x), float) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def given(name, inputs, function):
    """What this function takes of a case's inputs and parameters, as conform.py gives it."""
    everything = {key: np.array(x) if isinstance(x, list) else x
                  for key, x in (inputs | FILES[name]["parameters"]).items()}
    takes = inspect.signature(function).parameters
    more = {name for name, parameter in takes.items() if parameter.kind == parameter.VAR_KEYWORD}
    cache = {"cached_k", "cached_v"} if more & {"past", "broken"} else {}
    return {key: x for key, x in everything.items() if key in takes or key in cache or more & {"p", "given"}}


@pytest.mark.parametrize("name", FILES)
def test_the_numbers_come_out_of_loops(name):
    for part, data in FILES[name]["parts"].items():
        found = OURS[name](**given(name, data["inputs"], OURS[name]))
        for output, right in data["outputs"].items():
            right, ours = np.array(right, float), np.asarray(found[output], float)
            assert right.shape == ours.shape and np.array_equal(np.isnan(right), np.isnan(ours)), (part, output)
            near = 1e-9 if part == "far" else 1e-11
            np.testing.assert_allclose(ours, right, rtol=1e-9, atol=near, err_msg=f"{part} {output}")
