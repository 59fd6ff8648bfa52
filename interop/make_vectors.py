"""vectors/: small JSON files to check any implementation of an encoding with: `python -m interop.make_vectors`.

One file a case, made by the float64 NumPy reference: inputs, outputs of three parts (near: two sequences, one with
gaps; far: positions up to 10^6; decode: one step with a cache), and what common mistakes would give, so that conform.py
can name them. Inputs have two digits, outputs fifteen. Biases and scores of keys ahead of a query are null.

B batch, T queries, S keys, H heads, D width of a head, C = H*D, l overridden dimensions, r those of a head that turn.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import expe
import model_numpy
from common import CommandLine, write_text
from config import ModelConfig, make_encoding
from lab.formats import round_to
from past.scaling import ScaledRoPE, scaled_inv_freq

FOLDER = Path(__file__).resolve().parent / "vectors"
NEAR, DECODE = [[0, 1, 2, 3, 4, 5], [0, 5, 256, 257, 2048, 2049]], [[0, 1, 2, 300, 301, 303]]
PARTS = {"near": NEAR, "far": [[3, 4096, 65537, 524288, 999_999, 1_000_000]], "decode": DECODE}
CLOSE = {"near": NEAR, "decode": DECODE}                              # of what does not know far positions
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDED = {"float16": "fp16", "bfloat16": "bf16"}
REACH = 4096                                                          # positions of which those that merge are counted
TURNS, ORDER = {"rope", "partial", "proportional", "xpos", "sinusoidal"}, {"cope", "fox", "nope+log", "nope+sinks"}
MERGES = TURNS | {"expe", "exqpe", "alibi", "kerple", "fire"}         # by a table, or a bias, that no content changes
SAID = {
    "positions": "(B, T) integers, of the new tokens",
    "key_positions": "(B, S) integers, of all keys, cached ones first",
    "length": "of the whole sequence: the largest position of the batch + 1",
    "q": "(B, H, T, D)", "k": "(B, H, T, D)", "v": "(B, H, T, D)", "x": "(B, T, C), what the embedding gives",
    "h": "(B, T, C), the block's input", "wq": "(C, C), q = wq h", "wk": "(C, C)", "wv": "(C, C)",
    "cached_k": "(B, H, S - T, D), in the part decode alone: earlier keys as a cache holds them, turned",
    "cached_v": "(B, H, S - T, D), in the part decode alone", "cached_h": "(B, S - T, C), in the part decode alone",
    "table": "(B, T, C), or (B, T, l) of an override", "bias": "(B, H, T, S), added to q.k/sqrt(D)",
    "scores": "(B, H, T, S), q.k/sqrt(D) + bias, before mask and softmax", "weights": "(B, H, T, S), after the softmax",
    "out": "(B, H, T, D), what the causal attention gives", "attention_factor": "cosines and sines times this",
    "inv_freq": "(r/2,), radians by position of each pair that turns",
}

class Case(NamedTuple):
    """What a file says, and how the reference is asked for it."""

    pe: str
    formula: str
    source: str
    settings: dict = {}                                               # of make_encoding
    parameters: dict = {}                                             # another's function gets these
    learned: Any = lambda p: {}                                       # the reference's own parameters, of them
    takes: tuple = ("q", "k", "v")
    returns: tuple = ("bias", "scores", "out")
    heads: tuple = (2, 4)                                             # H, D
    context: int = 512
    scale: Any = lambda table: table                                  # of the encoding's own table: yarn's mscale
    parts: dict = PARTS
    mistakes: Any = lambda case, x: {}                                # {words: what `forward` is to change}
    notes: str = ""


# ---- the reference, asked --------------------------------------------------------------------------------------------

def same(x, *_):
    return x

def settled(case, length):
    """The ModelConfig of a case for a sequence of this length, its encoding in it."""
    H, D = case.heads
    length = {"length": length} if case.settings.get("rope_scaling") in ("dynamic", "longrope") else {}
    pe, _, softmax = case.pe.partition("+")
    make = ScaledRoPE if "rope_scaling" in case.settings else make_encoding
    encoding = make(pe, **case.settings, **length)
    return ModelConfig(1, H * D, H, case.context, vocab_size=2, softmax=softmax or "plain", encoding=encoding)

def draw(case, positions, seed):
    """The inputs of a part: integer positions (B, S), and numbers of two digits."""
    rng, n, (H, D) = np.random.default_rng(seed), np.array(positions), case.heads
    shapes = dict.fromkeys("qkv", (len(n), H, n.shape[1], D)) | dict.fromkeys("xh", (len(n), n.shape[1], H * D))
    x = {"positions": n, "key_positions": n, "length": int(n.max()) + 1}
    for name in case.takes:
        weight = rng.standard_normal(shapes.get(name, (H * D, H * D)))
        x[name] = (weight if name in shapes else 0.35 * weight).round(2)
    return x

def frequencies(case, length, rows=same):
    """((r/2,) radians by position, attention factor) of a case that turns: what its table is at position 1."""
    model, one = settled(case, length), np.array([[1]])
    cos, sin = np.split(rows(case.scale(model.encoding.rows(one, model)), one)[0, 0, 0], 2)
    return np.arctan2(sin, cos), np.hypot(cos, sin)[0]

def forward(case, x, n=same, keys=None, rows=same, pairs=same, bias=same, scores=same, order=None, pe=None,
            settings=None, parameters=None):
    """{name: array} for the inputs x, of all tokens at once. What is left out is right; what is given makes a mistake.

    n, keys: of positions; rows: of the table and positions; pairs, bias, scores: of these; order: of r and D, the
    dimensions of a head in which they turn; pe, settings, parameters: another encoding, and what comes before the
    case's own.
    """
    case = case._replace(pe=pe or case.pe, settings=case.settings | (settings or {}))
    model, learned = settled(case, x["length"]), case.learned(case.parameters | (parameters or {}))
    encoding, H = model_numpy.doors_of(model.encoding, model), model.n_heads
    queries, keys = n(x["positions"]), (keys or n)(x["key_positions"])
    table = rows(case.scale(model.encoding.rows(queries, model)), queries)
    apart, found = pairs(model.encoding.pairs(queries, keys, model)), {}
    q, k, v, h = (x.get(name) for name in "qkvh")
    if "x" in x:
        h, _ = encoding.embed[0](x["x"], table, learned)
        parts, _ = encoding.override[0](h, table, learned)
        q, k, v = (model_numpy.split_heads(y @ x[f"w{name}"].T, H) for name, y in zip("qkv", parts, strict=True))
        found["table"] = table if table.dtype.kind == "f" else learned["weight"][table]
    if order:
        order = order(min(table.shape[-1], q.shape[-1]), q.shape[-1])
        q, k, _ = encoding.rotate[0](q[..., order], k[..., order], table, learned)
        q, k = (y[..., np.argsort(order)] for y in (q, k))
    else:
        q, k, _ = encoding.rotate[0](q, k, table, learned)
    added, _ = encoding.score[0](q, k, h, apart, learned)
    products = scores(q @ k.swapaxes(-1, -2) / model_numpy.score_divisor(q))                   # (B, H, S, S)
    ahead = np.triu(np.ones(products.shape[-2:], bool), 1)
    added = np.where(ahead, np.nan, 0 * products if added is None else bias(added))
    p, _ = encoding.softmax[0](np.where(ahead, -np.inf, products + added), learned)
    more, _ = encoding.value[0](p, apart, learned)
    found |= {"q": q, "k": k, "v": v, "bias": added, "scores": products + added, "weights": p,
              "out": p @ v + (0 if more is None else more)}
    if "inv_freq" in case.returns:
        found["inv_freq"], found["attention_factor"] = frequencies(case, x["length"], rows)
    return found

def cut(part, x, found, returns):
    """(inputs, outputs) that a file has of a part. Of decode: the last token alone, and a cache."""
    if part == "decode":
        last = {name: np.s_[:, -1:] for name in ("positions", "x", "h", "table")}
        last |= {name: np.s_[:, :, -1:] for name in ("q", "k", "v", "bias", "scores", "weights", "out")}
        cached = {"cached_k": found["k"][:, :, :-1], "cached_v": found["v"][:, :, :-1]}
        cached |= {"cached_h": x["h"][:, :-1]} if "h" in x else {}
        x = {name: y[last[name]] if name in last else y for name, y in x.items()} | cached
        found = {name: y[last[name]] if name in last else y for name, y in found.items()}
    return x, {name: found[name] for name in returns if part != "far" or name not in ("weights", "out")}


# ---- common mistakes: {words: what `forward` is to change} -----------------------------------------------------------

def turning(inv_freq, factor=1.0, angle=same):
    """`rows` that are a table of other frequencies."""
    def rows(_, n):
        angles = angle(n[:, None, :, None] * inv_freq)                                         # (B, 1, T, r/2)
        return np.concatenate((np.cos(angles), np.sin(angles)), -1) * factor
    return rows

def interleaved(r, D):
    return np.append(np.arange(r).reshape(-1, 2).T, np.arange(r, D))

def rounding(dtype):
    return lambda n: round_to(n.astype(float), ROUNDED[dtype])

def rounded(dtype):
    return lambda n: rounding(dtype)(n).astype(int)

def usual(case, x):
    """Of any encoding; those that change nothing are left out later."""
    root, found = math.sqrt(case.heads[1]), {}
    if case.pe in TURNS - {"sinusoidal"}:
        half = "r/2" if case.pe == "partial" else "D/2"
        swapped = f"halves and interleaved pairs swapped: (2i, 2i+1) turns, where (i, i + {half}) belongs"
        found[swapped] = {"order": interleaved}
    found["off by one: positions are counted from 1, not from 0"] = {"n": lambda n: n + 1}
    if case.pe in TURNS | {"expe", "exqpe"}:                                                   # others have no row -1
        found["off by one: positions are counted from -1, not from 0"] = {"n": lambda n: n - 1}
    found["off by one: the distance is m - n + 1, not m - n"] = {"keys": lambda n: n - 1}
    found["off by one: the distance is m - n - 1, not m - n"] = {"keys": lambda n: n + 1}
    found["positions are not read: all are taken for 0"] = {"n": lambda n: 0 * n}
    found["positions are not read: tokens are counted as they stand"] = {"n": as_they_stand}
    for dtype in ROUNDED:
        found[f"rounded positions: they were cast to {dtype}"] = {"n": rounded(dtype)}
    if case.pe in TURNS | {"expe", "exqpe"}:
        found["rounded table: it was cast to bfloat16"] = {"rows": lambda y, n: rounding("bfloat16")(y)}
    found["rounded bias: it was cast to bfloat16"] = {"bias": rounding("bfloat16")}
    return found | {
        "denominator: scores are not divided by sqrt(D)": {"scores": lambda y: y * root},
        "denominator: scores are divided by D, not by sqrt(D)": {"scores": lambda y: y / root},
        "denominator: the bias is divided by sqrt(D)": {"bias": lambda y: y / root},
        "the bias has the other sign": {"bias": lambda y: -y}}

def as_they_stand(n):
    return np.broadcast_to(np.arange(n.shape[-1]), n.shape)

def usual_of_decode(case, x):
    """Of the step with a cache alone: the new token's position, or the bias."""
    new = lambda f: {"n": lambda n: np.append(n[:, :-1], f(n)[:, -1:], axis=1)}  # noqa: E731
    begin = "in decoding alone, "
    return {
        begin + "the bias is 0: the new token is taken for the only one": {"bias": lambda y: 0 * y},
        begin + "the new token's position is taken for 0": new(lambda n: 0 * n),
        begin + "the new token's position is the number of those before it": new(as_they_stand),
        begin + "positions are not read: tokens are counted as they stand": {"n": as_they_stand},
        begin + "off by one: the new token's position is one more": new(lambda n: n + 1),
        begin + "off by one: the new token's position is one less": new(lambda n: n - 1)}

def usual_of_rope(case, x):
    f, a = frequencies(case, x["length"])
    g = expe.rope_inv_freq(2 * len(f))
    ntk = case.settings.get("rope_scaling") in ("ntk", "dynamic")
    power = lambda p: f**p if ntk else g**p * f / g  # noqa: E731
    return {
        "attention factor missing: cosines and sines are not multiplied by it": {"rows": turning(f, 1.0)},
        "attention factor squared: cosines and sines are multiplied by it twice": {"rows": turning(f, a * a)},
        "factor missing: the frequencies are those of rope_type default": {"rows": turning(g, a)},
        "factor missing: all is as in rope_type default": {"rows": turning(g, 1.0)},
        "factor squared: the frequencies are scaled twice": {"rows": turning(f * f / g, a)},
        "denominator: the exponent is i/D, not 2i/D": {"rows": turning(power(1 / 2), a)},
        "denominator: the exponent is 2i/(D - 2), not 2i/D": {"rows": turning(power(len(f) / (len(f) - 1)), a)},
        "off by one: the exponent's i is counted from 1, not from 0": {"rows": turning(f * g[1], a)},
        "the other direction: turned by minus the angle": {"rows": turning(-f, a)},
        **{f"rounded frequencies: inv_freq was cast to {d}": {"rows": turning(rounding(d)(f), a)} for d in ROUNDED},
        **{f"rounded angles: they were cast to {d}": {"rows": turning(f, a, rounding(d))} for d in ROUNDED},
        "rounded positions, inv_freq and angles: all were cast to bfloat16": {
            "n": rounded("bfloat16"), "rows": turning(rounding("bfloat16")(f), a, rounding("bfloat16"))}}

def yarn_mistakes(case, x):
    f, a = frequencies(case, x["length"])
    g, s = expe.rope_inv_freq(8), case.settings["factor"]
    low, high = (8 * math.log(case.context / (2 * math.pi * turns)) / (2 * math.log(10000)) for turns in (32, 1))
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    inverted, ends = g * (1 + 1 / s) - f, g * (1 - ramp + ramp / s)
    longest, _ = scaled_inv_freq(8, scaling="yarn", factor=s, trained_length=case.context * int(s))
    return {"length: L is max_position_embeddings, not the original one": {"rows": turning(longest, a)},
            "there is no ramp: all frequencies are divided by the factor": {"rows": turning(g / s, a)},
            "mscale is not read: attention_factor is 0.1 ln(factor) + 1": {"rows": turning(f, 0.1 * math.log(s) + 1)},
            "YaRN's ramp is inverted: fast pairs are stretched, and slow ones kept": {"rows": turning(inverted, a)},
            "the ends of YaRN's ramp are not rounded (truncate: false)": {"rows": turning(ends, a)}}

def dynamic_mistakes(case, x):
    static = scaled_inv_freq(8, scaling="ntk", factor=case.settings["factor"])[0]
    return {"the static rule: the base times factor^(D/(D-2)) at every length": {"rows": turning(static)}}

def longrope_mistakes(case, x):
    g, (_, a) = expe.rope_inv_freq(8), frequencies(case, x["length"])
    return {f"length: the {name} factors, where the others belong": {"rows": turning(g / case.settings[name], a)}
            for name in ("short", "long")}

def llama3_mistakes(case, x):
    g = expe.rope_inv_freq(8)
    steps = np.where(case.context * g / (2 * math.pi) > 4, g, g / 8)
    return {"there is no ramp: pairs are kept from 4 turns on, else divided": {"rows": turning(steps)}}

def partial_mistakes(case, x):
    whole_head = 10000.0 ** -(np.arange(2) / 4)
    return {"denominator: the exponent is 2i/D, D the whole head, not 2i/r": {"rows": turning(whole_head)},
            "as proportional RoPE has it: pairs (i, i + D/2) by the exponent 2i/D": {"pe": "proportional"},
            "halves of the whole head: (i, i + D/2) turns, where (i, i + r/2) belongs":
            {"pe": "proportional", "rows": turning(np.array([1, 0.01, 0, 0]))},
            "the last r dimensions of a head turn, not the first": {"order": lambda r, D: np.roll(np.arange(D), r)},
            "factor missing: the whole head turns": {"settings": {"rotary_fraction": 1.0}}}

def proportional_mistakes(case, x):
    by_r = np.array([1, 0.01, 0, 0])
    return {"denominator: the exponent is 2i/r, not 2i/D, D the whole head": {"rows": turning(by_r)},
            "as partial RoPE has it: pairs (i, i + r/2) by the exponent 2i/r": {"pe": "partial"},
            "halves of what turns: (i, i + r/2) turns, where (i, i + D/2) belongs":
            {"pe": "partial", "rows": turning(np.array([1, 0.1]))},
            "factor missing: the whole head turns": {"settings": {"rotary_fraction": 1.0}}}

def xpos_mistakes(case, x):
    plain = turning(expe.rope_inv_freq(8))
    return {"the factors of q and k are exchanged: scores grow": {"rows": lambda y, n: np.roll(y, 8, -1)},
            "factor missing: RoPE alone": {"rows": lambda y, n: np.tile(plain(y, n), 2)},
            "factor squared: z^(m/256)": {"settings": {"scale_base": 256.0}}}

def sinusoidal_mistakes(case, x):
    def waves(exponents):
        def rows(_, n):
            angles = n[..., None] * 10000.0**-exponents
            return np.stack((np.sin(angles), np.cos(angles)), -1).reshape(*n.shape, 8)
        return rows

    return {"halves and interleaved pairs swapped: all sines first, where sines and cosines alternate":
            {"rows": lambda y, n: np.concatenate((y[..., ::2], y[..., 1::2]), -1)},
            "sines and cosines are exchanged": {"rows": lambda y, n: y[..., [1, 0, 3, 2, 5, 4, 7, 6]]},
            "denominator: the exponent is i/C, not 2i/C": {"rows": waves(np.arange(4) / 8)},
            "denominator: the exponent is 2i/(C - 2), not 2i/C": {"rows": waves(np.arange(4) / 3)},
            "off by one: the exponent's i is counted from 1, not from 0": {"rows": waves(np.arange(1, 5) / 4)}}

def expe_mistakes(case, x):
    theta, on = case.parameters["theta"], case.settings.get("on", "qk")
    others = {f"the override is on {y}, not on {on}": {"settings": {"on": y, "theta": theta}}
              for y in ("k", "q", "qk", "qkv")}
    return {"factor: theta is 1/(2 x context), not 1/(4 x context)": {"settings": {"theta": 2 * theta}},
            "factor missing: theta is left out": {"settings": {"theta": 1.0}},
            "factor squared: theta is applied twice": {"settings": {"theta": theta**2}},
            "j is missing: the same number in all l dimensions": {"settings": {"constant": True}}} | others

def exqpe_mistakes(case, x):
    return {"theta1 and theta2 are exchanged": {"settings": {"theta1": 1 / 16, "theta2": 1 / 2048}},
            "factor missing: theta2 is left out": {"settings": {"theta2": 1.0}},
            "factor squared: theta2 is applied twice": {"settings": {"theta2": 1 / 256}},
            "off by one: floor((n - j)/l) raises, not floor((n - j)/l) + 1":
            {"rows": lambda y, n: y - np.where(n[..., None] >= np.arange(5), 1 / 16, 0)}}

def alibi_mistakes(case, x):
    slopes, h = expe.alibi_slopes(3)[:, None, None], np.arange(1, 4)[:, None, None]
    return {"factor missing: the slopes are left out": {"bias": lambda y: y / slopes},
            "factor squared: the slopes are applied twice": {"bias": lambda y: y * slopes},
            "slopes of 2^(-8h/H), which are for H a power of two": {"bias": lambda y: y / slopes * 2.0 ** (-8 * h / 3)},
            "slopes of the next higher power of two": {"bias": lambda y: y / slopes * 2.0 ** (-8 * h / 4)},
            "denominator: slopes of 2^(-h H/8), not 2^(-8h/H)": {"bias": lambda y: y / slopes * 2.0 ** (-h * 3 / 8)}}

def t5_mistakes(case, x):
    d = expe.distances(x["positions"], x["key_positions"]).clip(0)
    undivided = np.where(d < 16, d, np.minimum(16 + np.floor(16 * np.log(d.clip(1) / 16)), 31)).astype(int)
    return {"buckets of both sides, half of which are for keys ahead": {"pairs": lambda y: expe.t5_bucket(d, 16)},
            "denominator: floor(16 ln(d/16)), not divided by ln(max_distance/16)":
            {"pairs": lambda y: undivided}}

def shaw_mistakes(case, x):
    return {"denominator: q.keys[r] is not divided by sqrt(D)": {"bias": lambda y: 2 * y},
            "factor missing: values[r] are not added to the output": {"parameters": {"values": np.zeros((4, 4))}},
            "off by one: distances end at max_distance - 1": {"settings": {"max_distance": 2}}}

def kerple_mistakes(case, x):
    p, a = case.parameters["p"], case.parameters["a"]
    return {"factor missing: p is left out": {"parameters": {"p": [1, 1]}},
            "factor missing: a is left out": {"parameters": {"a": [1, 1]}},
            "factor squared: p is applied twice": {"parameters": {"p": np.square(p)}},
            "p and a are exchanged": {"parameters": {"p": a, "a": p}}}

def fire_mistakes(case, x):
    L = case.parameters["L"]
    return {"factor missing: c is left out": {"parameters": {"c": 1.0}},
            "factor missing: the threshold L is left out": {"parameters": {"L": 1e-9}},
            "denominator: psi(max(m, L/2)), not psi(max(m, L))": {"parameters": {"L": L / 2}},
            "denominator: psi(L) at every m, not psi(max(m, L))":
            {"pairs": lambda y: np.concatenate((0 * y[..., :1], y[..., 1:]), -1)}}

def cope_bias(x, e, gate, own):
    """CoPE's bias by other gates, a function of q.k; own: what is taken from each count, of the key's own gate."""
    g = np.tril(1 / (1 + np.exp(-gate(x["q"] @ x["k"].swapaxes(-1, -2)))))
    p = np.minimum(g[..., ::-1].cumsum(-1)[..., ::-1] - own * g, len(e) - 1)
    low, high = (np.take_along_axis(x["q"] @ np.transpose(e), f(p).astype(int), -1) for f in (np.floor, np.ceil))
    return low + (p - np.floor(p)) * (high - low)

def cope_mistakes(case, x):
    e = case.parameters["e"]
    divided, later = cope_bias(x, e, lambda s: s / 2, 0), cope_bias(x, e, same, 1)
    return {"denominator: gates are sigmoid(q.k/sqrt(D)), not sigmoid(q.k)": {"bias": lambda y: divided},
            "off by one: a key does not count itself": {"bias": lambda y: later}}

def fox_mistakes(case, x):
    z = (x["h"] @ np.transpose(case.parameters["weight"]) + case.parameters["gate_bias"]).swapaxes(1, 2)
    gates = -np.log1p(np.exp(-z))                                                              # ln f, (B, H, S)
    return {"off by one: ln f_n, the key's own, is added too": {"bias": lambda y: y + gates[..., None, :]},
            "off by one: ln f_m, the query's own, is left out, and ln f_n added": {
                "bias": lambda y: y + gates[..., None, :] - gates[..., None]},
            "factor missing: gate_bias is left out": {"parameters": {"gate_bias": [0, 0]}}}

def grape_mistakes(case, x):
    slopes, v = expe.alibi_slopes(2)[:, None, None], np.array(case.parameters["gate_v"])
    along, size = np.vecdot(x["q"], v[:, None]), np.linalg.norm(v, axis=-1)[:, None]           # (B, H, T), (H, 1)
    gate = lambda below: np.logaddexp(0, along / below)[..., None]  # noqa: E731
    return {"factor missing: ALiBi's slopes are left out": {"bias": lambda y: y / slopes},
            "factor squared: ALiBi's slopes are applied twice": {"bias": lambda y: y * slopes},
            "denominator: v.q/|v| is not divided by sqrt(D)": {"bias": lambda y: y * gate(size) / gate(2 * size)},
            "denominator: v.q/sqrt(D) is not divided by |v|": {"bias": lambda y: y * gate(2) / gate(2 * size)}}

def log_mistakes(case, x):
    s, seen = np.array(case.parameters["s"])[:, None, None], np.arange(1.0, 7)[:, None]
    first = np.where(seen > 1, np.log(np.maximum(seen, 2)), np.inf)                            # ln 1 = 0: any is right
    return {"factor missing: a plain softmax, which drops what is subtracted": {"scores": lambda y: y / (s * first)},
            "factor missing: s is left out": {"parameters": {"s": [1, 1]}},
            "off by one: ln(n + 1), not ln n": {"scores": lambda y: y * np.log(seen + 1) / first},
            "n is the length of the array, not the keys that are seen": {"scores": lambda y: y * math.log(6) / first}}

def sinks_mistakes(case, x):
    return {"factor missing: a plain softmax": {"parameters": {"b": [-1e9, -1e9]}},
            "b is added to the denominator, not exp(b)": {"parameters": {"b": np.log([0.5, 1.2])}}}


# ---- the cases -------------------------------------------------------------------------------------------------------

def small(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).round(2).tolist()

def arrays(p):
    return {name: np.array(y) for name, y in p.items() if np.ndim(y)}

def rope(formula, source, settings=None, context=4096, factor=1.0, rope_type="default", own=None, pe="rope", scale=same,
         notes="", **parameters):
    """A case keyed by transformers' rope_parameters, of heads 8 wide; context: what transformers calls original."""
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0} | parameters
    settings = (settings or {}) | ({"rope_scaling": rope_type, "factor": factor} if factor != 1 else {})
    longest = context if rope_type in ("default", "dynamic") else int(context * factor)
    return Case(pe, formula, source, settings, {
        "rope_parameters": rope_parameters | ({"factor": factor} if factor != 1 else {}),
        "max_position_embeddings": longest, "head_dim": 8}, returns=TURNED, heads=(2, 8), context=context, scale=scale,
        mistakes=lambda case, x: (own or (lambda *_: {}))(case, x) | usual_of_rope(case, x), notes=notes)

TURNED = ("q", "k", "scores", "out", "inv_freq", "attention_factor")
PAIRS = "a pair (i, i + D/2), (a, b), turns by n f_i: attention_factor (a cos - b sin, b cos + a sin); "
PLAIN = "g_i = 10000^(-2i/D), i = 0 .. D/2 - 1"
YARN = PAIRS + ("f_i = g_i (1 - r_i + r_i/factor), " + PLAIN + ", r_i = clip((i - low)/(high - low), 0, 1), low = "
                "max(floor(p(32)), 0), high = min(ceil(p(1)), D - 1), p(t) = D ln(L/(2 pi t))/(2 ln 10000), L = "
                "original_max_position_embeddings; attention_factor = ")
LISTS = {"long": (1.1, 1.9, 4.5, 13.0), "short": (1.0, 1.05, 1.3, 2.0)}
DEEPSEEK = 1 / (0.05 * math.log(4) + 1)                   # 0.1 ln 4 + 1, mscale's and the table's own, over the other
READ = {"takes": ("x", "wq", "wk", "wv"), "returns": ("table", "q", "k", "scores", "out")}
NO_ORDER = {"parts": CLOSE, "notes": "positions are not read: tokens count as they stand"}

CASES = {
    "rope-default": rope(PAIRS + "f = g, " + PLAIN, "Su et al. 2021, equation 34"),
    "rope-linear": rope(PAIRS + "f = g/factor, " + PLAIN, "Chen et al. 2023", None, 512, 4.0, "linear"),
    "rope-dynamic": rope(
        PAIRS + "f_i = b^(-2i/D), b = 10000 (factor length/L - (factor - 1))^(D/(D-2)), L = max_position_embeddings; "
        "b = 10000 up to L", "bloc97 and emozilla 2023; transformers, _compute_dynamic_ntk_parameters", None, 512, 4.0,
        "dynamic", dynamic_mistakes, notes="length is of the whole batch, cached tokens too, for all of its keys"),
    "rope-ntk": rope(
        PAIRS + "f_i = b^(-2i/D), b = 10000 factor^(D/(D-2))", "bloc97 2023", None, 512, 4.0, "ntk",
        notes="transformers has no such type: rope_type default with rope_theta = b is the same"),
    "rope-yarn": rope(
        YARN + "0.1 ln(factor) + 1", "Peng et al. 2023, sections 3.2 and 3.4", None, 4096, 4.0, "yarn", yarn_mistakes,
        original_max_position_embeddings=4096),
    "rope-yarn-mscale": rope(
        YARN + "(0.1 mscale ln(factor) + 1)/(0.1 mscale_all_dim ln(factor) + 1)",
        "DeepSeek-V2's code; transformers, _compute_yarn_parameters", None, 4096, 4.0, "yarn", yarn_mistakes,
        scale=lambda table: table * DEEPSEEK, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5,
        notes="DeepSeek multiplies scores by (0.1 mscale_all_dim ln(factor) + 1)^2 too: not done here"),
    "rope-longrope": rope(
        PAIRS + "f_i = g_i/x_i, " + PLAIN + ", x = long_factor for length > L, else short_factor; L = "
        "original_max_position_embeddings, attention_factor = sqrt(1 + ln(factor)/ln(L))",
        "Ding et al. 2024; transformers, _compute_longrope_parameters", LISTS, 4096, 4.0, "longrope", longrope_mistakes,
        original_max_position_embeddings=4096, long_factor=list(LISTS["long"]), short_factor=list(LISTS["short"])),
    "rope-llama3": rope(
        PAIRS + "f_i = g_i (t_i + (1 - t_i)/factor), " + PLAIN + ", t_i = clip((L g_i/(2 pi) - low)/(high - low), 0, "
        "1), L = original_max_position_embeddings, low and high = low_freq_factor and high_freq_factor",
        "Llama 3.1's code, Meta 2024; transformers, _compute_llama3_parameters", None, 2048, 8.0, "llama3",
        llama3_mistakes, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048),
    "rope-proportional": rope(
        PAIRS + "f = g for i < partial_rotary_factor D/2, else 0; " + PLAIN,
        "Gemma 4's configuration; transformers, _compute_proportional_rope_parameters", {"rotary_fraction": 0.5},
        rope_type="proportional", own=proportional_mistakes, pe="proportional", partial_rotary_factor=0.5),
    "rope-partial": rope(
        "the first r = partial_rotary_factor D dimensions of a head turn as pairs (i, i + r/2) by n 10000^(-2i/r); "
        "the rest stands still", "GPT-NeoX-20B, Black et al. 2022, section 2.1", {"rotary_fraction": 0.5},
        own=partial_mistakes, pe="partial", partial_rotary_factor=0.5),
    "xpos": Case(
        "xpos", PAIRS + "f = g, " + PLAIN + "; then q times z_i^((m - center)/scale_base), k times z_i^((center - n)/"
        "scale_base), z_i = (2i/D + 0.4)/1.4", "Sun et al. 2022, section 3.2", {},
        {"base": 10000.0, "scale_base": 512.0, "center": 256}, returns=("q", "k", "scores", "out"), heads=(2, 8),
        parts=CLOSE, mistakes=xpos_mistakes, notes="scores do not depend on center; q and k do"),
    "sinusoidal": Case(
        "sinusoidal", "row n holds sin(n base^(-2i/C)) on column 2i and cos of it on 2i + 1; h = x + row; q = wq h, "
        "k = wk h, v = wv h by heads", "Vaswani et al. 2017, section 3.5", {}, {"base": 10000.0}, **READ,
        mistakes=sinusoidal_mistakes),
    "learned": Case(
        "learned", "row n is weight[n]; h = x + row; q = wq h, k = wk h, v = wv h by heads",
        "the ExPE paper, equation 12", {"n_positions": 16}, {"weight": small(16, 8)}, arrays, **READ, context=16,
        parts={"near": [[0, 1, 2, 3, 4, 5], [0, 2, 3, 7, 12, 14]], "decode": [[0, 1, 2, 9, 10, 13]]}),
    "expe": Case(
        "expe", "row n is start + theta (n + j), j = 0 .. l-1; phi = row n, then x past its first l numbers; q = wq "
        "phi, k = wk phi, v = wv x by heads", "the ExPE paper (Datseris et al. 2025), equations 2 and 3", {"l": 5},
        {"l": 5, "start": 0.0, "theta": 1 / 2048}, **READ, mistakes=expe_mistakes),
    "expe-keys": Case(
        "expe", "row n is start + theta (n + j), j = 0 .. l-1; phi = row n, then x past its first l numbers; q = wq x, "
        "k = wk phi, v = wv x by heads", "the ExPE paper's equations 2 and 3, on keys alone",
        {"l": 5, "on": "k", "theta": 1 / 2048},
        {"l": 5, "start": 0.0, "theta": 1 / 2048}, **READ, mistakes=expe_mistakes),
    "exqpe": Case(
        "exqpe", "row n is start + theta1 j + theta2 max(0, floor((n - j)/l) + 1), j = 0 .. l-1; the rest as expe",
        "the ExPE paper, equations 4 and 5", {"l": 5},
        {"l": 5, "start": 0.0, "theta1": 1 / 2048, "theta2": 1 / 16}, **READ, mistakes=exqpe_mistakes),
    "alibi": Case(
        "alibi", "bias = -slope_h (m - n); slopes 2^(-8h/H), h = 1 .. H, for H a power of two, else those of the next "
        "lower power, then every other one of twice as many heads",
        "Press et al. 2022, section 3, and the authors' code", heads=(3, 4), mistakes=alibi_mistakes),
    "t5": Case(
        "t5", "bias = weight[bucket(m - n), h]; bucket(d) = d for d < 16, else min(16 + floor(16 ln(d/16)/"
        "ln(max_distance/16)), 31)", "Raffel et al. 2020, section 2.1", {"max_distance": 128},
        {"buckets": 32, "max_distance": 128, "weight": small(32, 2)}, arrays, mistakes=t5_mistakes,
        parts=PARTS | {"near": [NEAR[0], [0, 5, 30, 90, 256, 257]]},
        notes="T5 itself does not divide its scores by sqrt(D)"),
    "shaw": Case(
        "shaw", "bias = q_m.keys[r]/sqrt(D), r = min(m - n, max_distance); out_m = sum over n of p_mn (v_n + "
        "values[r])", "Shaw et al. 2018, equations 3 and 4", {"max_distance": 3},
        {"max_distance": 3, "keys": small(4, 4), "values": small(4, 4, seed=6)}, arrays, mistakes=shaw_mistakes),
    "kerple": Case(
        "kerple", "bias = -p_h ln(1 + a_h |m - n|)", "Chi et al. 2022, section 4, the logarithmic kind", {},
        {"p": [0.7, 1.6], "a": [0.3, 0.9]}, lambda p: {name: np.log(y) for name, y in p.items()},
        mistakes=kerple_mistakes),
    "fire": Case(
        "fire", "bias_h = w2_h.relu(w1 y + b1), y = ln(1 + c (m - n))/ln(1 + c max(m, L)), m counted from 0",
        "Li et al. 2024, section 3", {"fire_width": 4},
        {"c": 0.1, "L": 512.0, "w1": [0.8, 1.5, 2.0, 1.1], "b1": [0.0, -0.5, -0.2, -0.3], "w2": small(2, 4)},
        lambda p: arrays(p) | {name: np.log([p[name]]) for name in "cL"}, mistakes=fire_mistakes,
        notes="b1 is at most 0, so that f(0) = 0; a last bias of f is what the softmax drops"),
    "cope": Case(
        "cope", "bias = (1 - w) q.e[floor p] + w q.e[ceil p], w = p - floor p, p = min(g_mn + .. + g_mm, P - 1), g_mj "
        "= sigmoid(q_m.k_j), P the rows of e", "Golovneva et al. 2024, section 4, equation 3", {"count_to": 4},
        {"e": small(4, 4)}, arrays, mistakes=cope_mistakes, **NO_ORDER),
    "fox": Case(
        "fox", "bias = ln f_(n+1) + .. + ln f_m, f_j = sigmoid(weight_h.h_j + gate_bias_h)",
        "Lin et al., ICLR 2025", {}, {"weight": small(2, 8), "gate_bias": [0.5, 2.0]},
        lambda p: {"weight": np.array(p["weight"]), "bias": np.array(p["gate_bias"])}, takes=("q", "k", "v", "h"),
        mistakes=fox_mistakes, **NO_ORDER),
    "grape": Case(
        "grape", "bias = -(m - n) slope_h softplus(w_h) softplus(gate_v_h.q_m/(|gate_v_h| sqrt(D))), ALiBi's slopes",
        "Zhang et al., ICLR 2026, equation 4.6 without its part of the keys, and the authors' code", {},
        {"gate_v": small(2, 4), "w": [0.2, 0.9]}, lambda p: {"v": np.array(p["gate_v"]), "w": np.array(p["w"])},
        mistakes=grape_mistakes),
    "softmax-log": Case(
        "nope+log", "weights of query m = softmax(s_h ln(n_m) q_m.k_n/sqrt(D)), n_m the number of keys that m sees",
        "SSMax, Nakanishi 2025, arXiv 2501.19399", {}, {"s": [0.43, 0.2]}, lambda p: {"temperature": np.array(p["s"])},
        returns=("weights", "out"), mistakes=log_mistakes, **NO_ORDER),
    "softmax-sinks": Case(
        "nope+sinks", "weights = exp(q_m.k_n/sqrt(D)) / (exp(b_h) + the sum of it over the keys that m sees)",
        "gpt-oss, OpenAI 2025", {}, {"b": [0.5, 1.2]}, lambda p: {"sinks": np.array(p["b"])},
        returns=("weights", "out"), mistakes=sinks_mistakes, **NO_ORDER),
}


# ---- the files -------------------------------------------------------------------------------------------------------

def tolerance(case, part, x, found):
    """{dtype: largest error, over max(1, the right value)}: 8 roundings, and as many in float32 of angles or scores.

    An angle is as large as its position, and its error is absolute; so is that of a score, to what a softmax makes of
    it. At least 1e-12: that is no less than exact.
    """
    size = x["positions"].max() if case.pe in TURNS else 0 if part == "far" else np.nanmax(np.abs(found["scores"]))
    allowed = {dtype: 8 * (unit + min(unit, UNIT["float32"]) * (1 + size)) for dtype, unit in UNIT.items()}
    return {dtype: max(1e-12, float(f"{y:.1g}")) for dtype, y in allowed.items()}

def plain(y, digits):
    """An array or number as lists that JSON has: so many digits, null for what is not a number."""
    if np.ndim(y):
        return [plain(part, digits) for part in y]
    whole = isinstance(y, int | np.integer)
    return int(y) if whole else None if np.isnan(y) else float(f"{y:.{digits}g}") + 0.0

def alike(name, x, y, close):
    """Whether these differ by nothing, or by what a softmax drops."""
    if np.shape(x) != np.shape(y):
        return False
    ways = [(x, y)] + ([(x - x[..., :1], y - y[..., :1])] if name in ("bias", "scores") else [])
    return any(np.allclose(*way, rtol=close, atol=close, equal_nan=True) for way in ways)

def mistaken(case, parts, close):
    """The mistakes that can be told from what is right and from each other: [{words, part, its last sequence}]."""
    found, seen = [], set()
    for part, (x, right) in parts.items():
        changes = usual_of_decode(case, x) if part == "decode" else case.mistakes(case, x)
        changes |= usual(case, x) if part == "near" else {}
        for words in [words for words in changes if words not in seen]:
            _, wrong = cut(part, x, forward(case, x, **changes[words]), case.returns)
            if all(alike(name, y, right[name], close) for name, y in wrong.items()):
                continue
            wrong = {name: plain(y[-1:], 5) if np.ndim(y) > 2 else plain(y, 15) for name, y in wrong.items()
                     if not alike(name, y, right[name], 1e-5)}
            if json.dumps(wrong) not in seen:
                found.append({"looks like": words, "part": part, "outputs": wrong})
            seen |= {words, json.dumps(wrong)}
    return found

def left(rows):
    """Which of the rows (REACH, ...) are an earlier one's once they are cast: {dtype: how many stay, the first}."""
    found = {}
    for dtype in ROUNDED:
        cast, first = rounding(dtype)(rows).reshape(REACH, -1) + 0.0, {}
        pairs = [[i, first.setdefault(row.tobytes(), i)] for i, row in enumerate(cast)]
        found[dtype] = {"left": len(first), "first": [pair for pair in pairs if pair[0] != pair[1]][:6]}
    return found

def merged(case):
    """What merges of the positions 0 .. REACH-1 if they are cast, or a table of floats, or a bias by distance."""
    n, model, says = np.arange(REACH), settled(case, REACH), "[n, the earlier one that it falls together with]"
    found = {"of": REACH, "says": says, "positions that are cast": left(n)}
    rows = case.pe in MERGES and model.encoding.rows(n, model)
    if rows is None:
        pairs = model.encoding.pairs(n[-1:], n[::-1], model)
        nothing = np.zeros((1, model.n_heads, 1, model.d_head))
        score, _ = model_numpy.doors_of(model.encoding, model).score
        bias, _ = score(nothing, nothing, None, pairs, case.learned(case.parameters))          # (..., H, 1, REACH)
        return found | {"distances whose bias is cast": left(np.moveaxis(bias, -1, 0))}
    return found | ({} if rows is False else {"positions whose table is cast": left(case.scale(rows))})

def document(case):
    """The whole file of a case as a dict."""
    inputs = {part: draw(case, n, seed) for seed, (part, n) in enumerate(case.parts.items())}
    outputs = {part: forward(case, x) for part, x in inputs.items()}
    cuts = {part: cut(part, x, outputs[part], case.returns) for part, x in inputs.items()}
    allowed = {part: tolerance(case, part, x, outputs[part]) for part, x in inputs.items()}
    takes = dict.fromkeys(name for x, _ in cuts.values() for name in x)
    parts = {part: {"tolerance": allowed[part], "inputs": {name: plain(y, 15) for name, y in x.items()},
                    "outputs": {name: plain(y, 15) for name, y in found.items()}} for part, (x, found) in cuts.items()}
    close = max(2e-4, allowed["near"]["float32"])
    return {
        "encoding": case.pe, "formula": case.formula, "source": case.source, "notes": case.notes,
        "function": f"f takes, by name, any of {', '.join((*takes, *case.parameters))}; it returns a dict of any "
                    f"outputs by name, or a tuple of the first of these: {', '.join(case.returns)}",
        "takes": {name: SAID[name] for name in takes}, "returns": {name: SAID[name] for name in case.returns},
        "tolerance": "by dtype of what is returned: the largest error, over max(1, the right value); of inv_freq "
                     "times length; angles and scores may be computed in float32",
        "parameters": case.parameters, "parts": parts, "merge": {} if case.pe in ORDER else merged(case),
        "mistakes": mistaken(case, {part: (x, cuts[part][1]) for part, x in inputs.items()}, close)}

def text(value, margin=""):
    """JSON with a line for each field and each row of numbers."""
    deeper = margin + " "
    if isinstance(value, dict) and value:
        lines = (f"{deeper}{json.dumps(name)}: {text(y, deeper)}" for name, y in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(deeper + text(y, deeper) for y in value) + f"\n{margin}]"
    return json.dumps(value)

def main(argv=None):
    parser = CommandLine(prog="python -m interop.make_vectors", description="Write vectors/ by the NumPy reference.")
    with parser.one_line_errors():
        parser.parse_args(argv)
        for name, case in CASES.items():
            write_text(FOLDER / f"{name}.json", text(document(case)) + "\n")
        print(f"wrote {len(CASES)} files of vectors/, {sum(f.stat().st_size for f in FOLDER.glob('*.json')):,} bytes")

if __name__ == "__main__":
    main()
