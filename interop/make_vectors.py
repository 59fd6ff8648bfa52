"""vectors/: small JSON files to check any implementation of an encoding with: `python -m interop.make_vectors`.

One file a case, made by the float64 NumPy reference: inputs, outputs of three parts (near: two sequences, one with
gaps; far: positions up to 10^6; decode: one step with a cache), and what common mistakes would give, so that conform.py
can name them: outputs, or the angles of a rotation ("turns"). Inputs have two digits, outputs fifteen. Biases and
scores of keys ahead of a query are null.

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
from interop import conform
from lab.formats import round_to
from longer.scaling import ScaledRoPE, scaled_inv_freq
from zoo import dape
from zoo.selective_rope import conv_forward, unit_forward

FOLDER = Path(__file__).resolve().parent / "vectors"
# Half precision merges neighbours such as 256 and 257. 1027, 2070, 65,790 and 526,334 lie so near the middle of two
# numbers of bf16 that their rounding is large, and that of n, n + 1, .., n + 4 (ExPE's row) goes both ways.
NEAR = [[0, 1, 2, 3, 4, 5], [0, 2, 256, 257, 2070, 2071]]
DECODE = [[0, 1, 2, 300, 301, 303]]
PARTS = {"near": NEAR, "far": [[3, 1027, 65_790, 526_334, 999_999, 1_000_000]], "decode": DECODE}
CLOSE = {"near": NEAR, "decode": DECODE}                              # of what does not know far positions
ROUNDED = {"float16": "fp16", "bfloat16": "bf16"}
TURNS = {"rope", "partial", "proportional", "xpos", "sinusoidal", "pope", "rove"}
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
    rng = np.random.default_rng(seed)
    n = np.array(positions)
    (H, D) = case.heads
    shapes = dict.fromkeys("qkv", (len(n), H, n.shape[1], D)) | dict.fromkeys("xh", (len(n), n.shape[1], H * D))
    x = {"positions": n, "key_positions": n, "length": int(n.max()) + 1}
    for name in case.takes:
        weight = rng.standard_normal(shapes.get(name, (H * D, H * D)))
        x[name] = (weight if name in shapes else 0.35 * weight).round(2)
    return x

def frequencies(case, length, rows=same):
    """((r/2,) radians by position, attention factor) of a case that turns: what its table is at position 1."""
    model = settled(case, length)
    one = np.array([[1]])
    cos, sin = np.split(rows(case.scale(model.encoding.rows(one, model)), one)[0, 0, 0], 2)
    return np.arctan2(sin, cos), np.hypot(cos, sin)[0]

def forward(case, x, n=same, keys=None, rows=same, pairs=same, bias=same, scores=same, weights=same, order=None,
            place=None, settings=None, parameters=None):
    """{name: array} for the inputs x, of all tokens at once. What is left out is right; what is given makes a mistake.

    n, keys: of positions; rows: of the table and positions; pairs, bias, scores, weights: of these; order: the
    dimensions of a head in the order in which they turn; place: of x and the table, in the place of the override;
    settings, parameters: those that come before the case's own.
    """
    case = case._replace(settings=case.settings | (settings or {}))
    model = settled(case, x["length"])
    learned = case.learned(case.parameters | (parameters or {}))
    encoding = model_numpy.doors_of(model.encoding, model)
    H = model.n_heads
    queries = n(x["positions"])
    keys = (keys or n)(x["key_positions"])
    table = rows(case.scale(model.encoding.rows(queries, model)), queries)
    apart = pairs(model.encoding.pairs(queries, keys, model))
    outputs = {}
    q, k, v, h = (x.get(name) for name in "qkvh")
    if "x" in x:
        h, _ = encoding.embed[0](x["x"], table, learned)
        parts, _ = encoding.override[0](h, table, learned)
        if place:
            parts = [place(h, table) if name in model.encoding.on else h for name in "qkv"]
        q, k, v = (model_numpy.split_heads(y @ x[f"w{name}"].T, H) for name, y in zip("qkv", parts, strict=True))
        outputs["table"] = table if table.dtype.kind == "f" else learned["weight"][table]
    if order is not None:
        q, k, _ = encoding.rotate[0](q[..., order], k[..., order], table, learned)
        q, k = (y[..., np.argsort(order)] for y in (q, k))
    else:
        q, k, _ = encoding.rotate[0](q, k, table, learned)
    added, _ = encoding.score[0](q, k, h, apart, learned)
    products = scores(q @ k.swapaxes(-1, -2) / model_numpy.score_divisor(q))                   # (B, H, S, S)
    ahead = np.triu(np.ones(products.shape[-2:], bool), 1)
    added = np.where(ahead, np.nan, 0 * products if added is None else bias(added))
    p = weights(encoding.softmax[0](np.where(ahead, -np.inf, products + added), learned)[0])
    outputs |= {"q": q, "k": k, "v": v, "bias": added, "scores": products + added, "weights": p,
              "out": encoding.value[0](p, v, apart, learned)[0]}
    if "inv_freq" in case.returns:
        outputs["inv_freq"], outputs["attention_factor"] = frequencies(case, x["length"], rows)
    return outputs

def cut(part, x, outputs, returns):
    """(inputs, outputs) that a file has of a part. Of decode: the last token alone, and a cache."""
    if part == "decode":
        last = {name: np.s_[:, -1:] for name in ("positions", "x", "h", "table")}
        last |= {name: np.s_[:, :, -1:] for name in ("q", "k", "v", "bias", "scores", "weights", "out")}
        cached = {"cached_k": outputs["k"][:, :, :-1], "cached_v": outputs["v"][:, :, :-1]}
        cached |= {"cached_h": x["h"][:, :-1]} if "h" in x else {}
        x = {name: y[last[name]] if name in last else y for name, y in x.items()} | cached
        outputs = {name: y[last[name]] if name in last else y for name, y in outputs.items()}
    return x, {name: outputs[name] for name in returns if part != "far" or name not in ("weights", "out")}


# ---- common mistakes: {words: what `forward` is to change} -----------------------------------------------------------

def turning(inv_freq, factor=1.0, angle=same):
    """`rows` that are a table of other frequencies."""
    def rows(_, n):
        angles = angle(n[:, None, :, None] * inv_freq)                                         # (B, 1, T, r/2)
        return np.concatenate((np.cos(angles), np.sin(angles)), -1) * factor
    return rows

def turned(case, x, f=None, a=None, pairs=None, n=same, of="qk"):
    """A mistake in turning, as conform.turn has it. It takes a hundredth of the room of the numbers that it gives."""
    right, factor = frequencies(case, x["length"])
    f = right if f is None else np.array(f)
    a = factor if a is None else a
    pairs = halves(len(f)) if pairs is None else pairs
    return {"turns": {"inv_freq": f, "attention_factor": a, "pairs": pairs, "positions": n(x["positions"])[-1],
                      "of": of}}

def halves(half, first=0):
    return [[first + i, first + i + half] for i in range(half)]

def rounding(dtype):
    return lambda n: round_to(n.astype(float), ROUNDED[dtype])

def rounded(dtype):
    return lambda n: rounding(dtype)(n).astype(int)

def usual(case, x):
    """Of any encoding; those that change nothing are left out later."""
    root = math.sqrt(case.heads[1])
    changes = {}
    if case.pe == "xpos":
        changes["halves and interleaved pairs swapped: (2i, 2i+1) turns, where (i, i + D/2) belongs"] = {
            "order": np.arange(8).reshape(4, 2).T.ravel()}
    changes["off by one: positions are counted from 1, not from 0"] = {"n": lambda n: n + 1}
    if case.pe in TURNS | {"expe", "exqpe"}:                                                   # others have no row -1
        changes["off by one: positions are counted from -1, not from 0"] = {"n": lambda n: n - 1}
    changes["off by one: the distance is m - n + 1, not m - n"] = {"keys": lambda n: n - 1}
    changes["off by one: the distance is m - n - 1, not m - n"] = {"keys": lambda n: n + 1}
    changes["positions are not read: all are taken for 0"] = {"n": lambda n: 0 * n}
    changes["positions are not read: tokens are counted as they stand"] = {"n": as_they_stand}
    for dtype in ROUNDED:
        changes[f"rounded positions: they were cast to {dtype}"] = {"n": rounded(dtype)}
    if case.pe in TURNS | {"expe", "exqpe"}:
        changes["rounded table: it was cast to bfloat16"] = {"rows": lambda y, n: rounding("bfloat16")(y)}
    changes["rounded bias: it was cast to bfloat16"] = {"bias": rounding("bfloat16")}
    return changes | {
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

BASES = 10, 500, 1000, 2000, 5000, 20_000, 50_000, 100_000, 150_000, 500_000, 1_000_000, 5_000_000, 10_000_000

def usual_of_rope(case, x):
    f, a = frequencies(case, x["length"])
    half = "r/2" if case.pe == "partial" else "D/2"
    i = np.arange(len(f))
    g = 10000.0 ** (-i / len(f))
    ntk = case.settings.get("rope_scaling") in ("ntk", "dynamic")
    power = lambda p: f**p if ntk else g**p * f / g  # noqa: E731
    change = lambda *f_and_a, **more: turned(case, x, *f_and_a, **more)  # noqa: E731
    return {
        f"halves and interleaved pairs swapped: (2i, 2i+1) turns, where (i, i + {half}) belongs":
        change(pairs=[[2 * j, 2 * j + 1] for j in i]),
        f"interleaved cosines and sines (0, 0, 1, 1, ..) with pairs (i, i + {half}), whose cosines are (0, 1, .., 0, 1,"
        " ..)": change(f.repeat(2).reshape(2, -1), a, pairs=halves(len(f))),
        "q alone is turned, and k is not": change(of="q"),
        "k alone is turned, and q is not": change(of="k"),
        "v is turned too": change(of="qkv"),
        "attention factor missing: cosines and sines are not multiplied by it": change(f, 1.0),
        "attention factor squared: cosines and sines are multiplied by it twice": change(f, a * a),
        "factor missing: the frequencies are those of rope_type default": change(g, a),
        "factor missing: all is as in rope_type default": change(g, 1.0),
        "factor squared: the frequencies are scaled twice": change(f * f / g, a),
        "factor inverted: frequencies are multiplied where they should be divided": change(
            np.divide(g * g, f, where=f > 0, out=0 * f), a),
        "denominator: the exponent is i/D, not 2i/D": change(power(1 / 2), a),
        "denominator: the exponent is 2i/(D - 2), not 2i/D": change(power(len(f) / (len(f) - 1)), a),
        "off by one: the exponent's i is counted from 1, not from 0": change(f * g[1], a),
        "the other direction: turned by minus the angle": change(-f, a),
        **{f"rounded frequencies: inv_freq was cast to {d}": change(rounding(d)(f), a) for d in ROUNDED},
        **{f"rounded angles: they were cast to {d}": {"rows": turning(f, a, rounding(d))} for d in ROUNDED},
        "rounded positions, inv_freq and angles: all were cast to bfloat16": {
            "n": rounded("bfloat16"), "rows": turning(rounding("bfloat16")(f), a, rounding("bfloat16"))},
        **{f"another base: {b:,}, not 10,000": change(f * (b / 1e4) ** (-i / len(f)), a) for b in BASES}}

def ntk_mistakes(case, x):
    b = 10000 * case.settings["factor"]
    dynamic = case.settings["rope_scaling"] == "dynamic"
    b = 10000 * max(1, case.settings["factor"] * (x["length"] / case.context - 1) + 1) if dynamic else b
    static = scaled_inv_freq(8, scaling="ntk", factor=case.settings["factor"])[0]
    return {"the exponent D/(D-2) is missing from the base": turned(case, x, b ** (-np.arange(4) / 4)),
            "the static rule: the base times factor^(D/(D-2)) at every length": turned(case, x, static)}

def yarn_mistakes(case, x):
    f, a = frequencies(case, x["length"])
    g = expe.rope_inv_freq(8)
    s = case.settings["factor"]
    low, high = (8 * math.log(case.context / (2 * math.pi * turns)) / (2 * math.log(10000)) for turns in (32, 1))
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    inverted = g * (1 + 1 / s) - f
    ends = g * (1 - ramp + ramp / s)
    longest, _ = scaled_inv_freq(8, scaling="yarn", factor=s, trained_length=case.context * int(s))
    return {"length: L is max_position_embeddings, not the original one": turned(case, x, longest),
            "there is no ramp: all frequencies are divided by the factor": turned(case, x, g / s),
            "mscale is not read: attention_factor is 0.1 ln(factor) + 1": turned(case, x, f, 0.1 * math.log(s) + 1),
            "YaRN's ramp is inverted: fast pairs are stretched, and slow ones kept": turned(case, x, inverted),
            "the ends of YaRN's ramp are not rounded (truncate: false)": turned(case, x, ends)}

def longrope_mistakes(case, x):
    g = expe.rope_inv_freq(8)
    return {f"length: the {name} factors, where the others belong": turned(case, x, g / case.settings[name])
            for name in ("short", "long")}

def llama3_mistakes(case, x):
    g = expe.rope_inv_freq(8)
    (f, _) = frequencies(case, x["length"])
    turns = case.context * g / (2 * math.pi)
    inverted = g * (1 + 1 / 8) - f
    between = np.where((turns > 1) & (turns < 4), inverted, f)
    return {"there is no ramp: pairs are kept from 4 turns on, else divided": turned(
                case, x, np.where(turns > 4, g, g / 8)),
            "llama3's ramp is inverted: fast pairs are stretched, and slow ones kept": turned(case, x, inverted),
            "llama3's ramp is inverted between its ends": turned(case, x, between)}

def partial_mistakes(case, x):
    whole = 10000.0 ** -(np.arange(4) / 4)
    return {"denominator: the exponent is 2i/D, D the whole head, not 2i/r": turned(case, x, whole[:2]),
            "as proportional RoPE has it: pairs (i, i + D/2) by the exponent 2i/D": turned(
                case, x, [1, 0.1], pairs=halves(4)[:2]),
            "halves of the whole head: (i, i + D/2) turns, where (i, i + r/2) belongs": turned(
                case, x, [1, 0.01], pairs=halves(4)[:2]),
            "the last r dimensions of a head turn, not the first": turned(case, x, pairs=halves(2, first=4)),
            "factor missing: the whole head turns": turned(case, x, whole)}

def proportional_mistakes(case, x):
    return {"denominator: the exponent is 2i/r, not 2i/D, D the whole head": turned(case, x, [1, 0.01, 0, 0]),
            "as partial RoPE has it: pairs (i, i + r/2) by the exponent 2i/r": turned(case, x, [1, 0.01]),
            "halves of what turns: (i, i + r/2) turns, where (i, i + D/2) belongs": turned(case, x, [1, 0.1]),
            "factor missing: the whole head turns": turned(case, x, 10000.0 ** -(np.arange(4) / 4))}

def xpos_mistakes(case, x):
    plain = turning(expe.rope_inv_freq(8))
    return {"the factors of q and k are exchanged: scores grow": {"rows": lambda y, n: np.roll(y, 8, -1)},
            "factor missing: RoPE alone": {"rows": lambda y, n: np.tile(plain(y, n), 2)},
            "factor squared: z^(m/256)": {"settings": {"scale_base": 256.0}}}

def sinusoidal_mistakes(case, x):
    twice = lambda i: np.repeat(i, 2)  # noqa: E731
    def waves(exponents, base=10000.0):
        def rows(_, n):
            angles = n[..., None] * base**-np.broadcast_to(exponents, 8)
            return np.where(np.arange(8) % 2, np.cos(angles), np.sin(angles))
        return rows

    return {"halves and interleaved pairs swapped: all sines first, where sines and cosines alternate":
            {"rows": lambda y, n: np.concatenate((y[..., ::2], y[..., 1::2]), -1)},
            "sines and cosines are exchanged": {"rows": lambda y, n: y[..., [1, 0, 3, 2, 5, 4, 7, 6]]},
            "denominator: the exponent is i/C, not 2i/C": {"rows": waves(twice(np.arange(4) / 8))},
            "denominator: the exponent is j/C of each column j, not 2i/C of the pair (2i, 2i + 1)":
            {"rows": waves(np.arange(8) / 8)},
            "denominator: the exponent is 2i/(C - 2), not 2i/C": {"rows": waves(twice(np.arange(4) / 3))},
            "off by one: the exponent's i is counted from 1, not from 0": {"rows": waves(twice(np.arange(1, 5) / 4))},
            **{f"another base: {b:,.0f}, not 10,000": {"rows": waves(twice(np.arange(4) / 4), b)}
               for b in (1000.0, 100_000.0, 500_000.0, 1_000_000.0)}}

def expe_mistakes(case, x):
    theta = case.parameters["theta"]
    on = case.settings.get("on", "qk")
    others = {f"the override is on {y}, not on {on}": {"settings": {"on": y, "theta": theta}}
              for y in ("k", "q", "qk", "qkv")}
    return {"factor: theta is 1/(2 x context), not 1/(4 x context)": {"settings": {"theta": 2 * theta}},
            "factor missing: theta is left out": {"settings": {"theta": 1.0}},
            "factor squared: theta is applied twice": {"settings": {"theta": theta**2}},
            "j is missing: the same number in all l dimensions": {"settings": {"constant": True}},
            **others, **misplaced(5)}

def misplaced(l):
    added = {"place": lambda x, table: np.concatenate((x[..., :l] + table, x[..., l:]), -1)}
    return {"the rows are added, and do not override": added,
            "the rows are added, in the value too, and do not override": added | {"settings": {"on": "qkv"}},
            "the last l dimensions are overridden, not the first":
            {"place": lambda x, table: np.concatenate((x[..., :-l], table), -1)}}

def exqpe_mistakes(case, x):
    return misplaced(5) | {"theta1 and theta2 are exchanged": {"settings": {"theta1": 1 / 16, "theta2": 1 / 2048}},
            "factor missing: theta2 is left out": {"settings": {"theta2": 1.0}},
            "factor squared: theta2 is applied twice": {"settings": {"theta2": 1 / 256}},
            "off by one: floor((n - j)/l) raises, not floor((n - j)/l) + 1":
            {"rows": lambda y, n: y - np.where(n[..., None] >= np.arange(5), 1 / 16, 0)}}

def alibi_mistakes(case, x):
    slopes = expe.alibi_slopes(3)[:, None, None]
    h = np.arange(1, 4)[:, None, None]
    powers = {"slopes of 2^(-8h/H), which are for H a power of two": -8 * h / 3,
              "slopes of the next higher power of two": -8 * h / 4,
              "denominator: slopes of 2^(-h H/8), not 2^(-8h/H)": -h * 3 / 8,
              "slopes from h = 0: 2^(-8h/H), h = 0 .. H - 1": -8 * (h - 1) / 3,
              "slopes from h = 0 in the lower power of two alone": np.array([0, -4, -2])[:, None, None],
              "slopes from h = 0 in both powers of two": -4 * (h == 2),
              "slopes reversed: the steepest is the last head's": np.log2(slopes[::-1]),
              "slopes reversed: the steepest of 2^(-8h/H) is the last head's": -8 * (4 - h) / 3,
              "slopes reversed within the lower power of two": np.array([-8, -4, -2])[:, None, None]}
    return {"factor missing: the slopes are left out": {"bias": lambda y: y / slopes},
            "factor squared: the slopes are applied twice": {"bias": lambda y: y * slopes},
            **{words: {"bias": lambda y, p=p: y / slopes * 2.0**p} for words, p in powers.items()}}

def t5_mistakes(case, x):
    d = expe.distances(x["positions"], x["key_positions"]).clip(0)
    far = 16 * np.log(d.clip(1) / 16)
    undivided = np.where(d < 16, d, np.minimum(16 + np.floor(far), 31)).astype(int)
    ceiled = np.where(d < 16, d, np.minimum(16 + np.ceil(far / math.log(8)), 31)).astype(int)
    return {"buckets of both sides, half of which are for keys ahead": {"pairs": lambda y: expe.t5_bucket(d, 16)},
            "denominator: floor(16 ln(d/16)), not divided by ln(max_distance/16)":
            {"pairs": lambda y: undivided},
            "rounded up: ceil(16 ln(d/16)/ln(max_distance/16)), not floor": {"pairs": lambda y: ceiled}}

def shaw_mistakes(case, x):
    back = {name: case.parameters[name][::-1] for name in ("keys", "values")}
    return {"the keys' table is reversed: [max_distance - r]": {"parameters": {"keys": back["keys"]}},
            "the table is reversed: [max_distance - r] in keys and values": {"parameters": back},
            "the values' table is reversed: [max_distance - r]": {"parameters": {"values": back["values"]}},
            "denominator: q.keys[r] is not divided by sqrt(D)": {"bias": lambda y: 2 * y},
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
    divided = cope_bias(x, e, lambda s: s / 2, 0)
    later = cope_bias(x, e, same, 1)
    return {"denominator: gates are sigmoid(q.k/sqrt(D)), not sigmoid(q.k)": {"bias": lambda y: divided},
            "off by one: a key does not count itself": {"bias": lambda y: later}}

def fox_mistakes(case, x):
    z = (x["h"] @ np.transpose(case.parameters["weight"]) + case.parameters["gate_bias"]).swapaxes(1, 2)
    gates = -np.log1p(np.exp(-z))                                                              # ln f, (B, H, S)
    def summed(of_each):
        total = of_each.cumsum(-1)
        return lambda y: total[..., None] - total[..., None, :]
    return {"ln(1 - f) is summed, not ln f": {"bias": summed(-np.log1p(np.exp(z)))},
            "f is summed, not ln f": {"bias": summed(np.exp(gates))},
            "off by one: ln f_n, the key's own, is added too": {"bias": lambda y: y + gates[..., None, :]},
            "off by one: ln f_m, the query's own, is left out, and ln f_n added": {
                "bias": lambda y: y + gates[..., None, :] - gates[..., None]},
            "factor missing: gate_bias is left out": {"parameters": {"gate_bias": [0, 0]}}}

def grape_mistakes(case, x):
    slopes = expe.alibi_slopes(2)[:, None, None]
    v = np.array(case.parameters["gate_v"])
    along = np.vecdot(x["q"], v[:, None])                               # (B, H, T), (H, 1)
    size = np.linalg.norm(v, axis=-1)[:, None]
    gate = lambda below: np.logaddexp(0, along / below)[..., None]  # noqa: E731
    return {"factor missing: ALiBi's slopes are left out": {"bias": lambda y: y / slopes},
            "factor squared: ALiBi's slopes are applied twice": {"bias": lambda y: y * slopes},
            "denominator: v.q/|v| is not divided by sqrt(D)": {"bias": lambda y: y * gate(size) / gate(2 * size)},
            "denominator: v.q/sqrt(D) is not divided by |v|": {"bias": lambda y: y * gate(2) / gate(2 * size)}}

def pope_mistakes(case, x):
    return {"factor missing: e is left out": {"parameters": {"e": np.zeros((2, 4))}},
            "denominator: scores are divided by sqrt(2D), not by sqrt(D)": {"scores": lambda y: y / math.sqrt(2)},
            "denominator: the exponent is 2c/D, not c/D": {"settings": {"base": 1e8}},
            "the other direction: turned by minus the angle": {"n": lambda n: -n}}

def rove_mistakes(case, x):
    S = x["positions"].shape[1]
    def stand(y, *tokens):
        y = y.copy()                                                    # the queries' turns, then the keys'
        y[..., slice(*tokens), :] = np.repeat([1, 0], y.shape[-1] // 2)
        return y

    return {"factor missing: values are not turned, as in RoPE": {"pairs": lambda y: stand(y, None)},
            "the output is not turned back: values are at absolute positions": {"pairs": lambda y: stand(y, S)},
            "the other direction: values turn by minus the angle": {
                "pairs": lambda y: y * np.repeat([1, -1], y.shape[-1] // 2)}}

def sums_of(y):
    """(B, H, T, S): y_(n+1) + .. + y_m, of y (B, S, H)."""
    total = y.swapaxes(1, 2).cumsum(-1)
    return total[..., None] - total[..., None, :]

def cable_mistakes(case, x):
    y, z = (x["h"] @ np.transpose(case.parameters[name]) for name in ("tokens", "query"))
    g = np.logaddexp(0, z).swapaxes(1, 2)                                                      # (B, H, T)
    return {"the printed sign: the bias is g_m times the sum, which rewards distance": {"bias": lambda b: -b},
            "factor missing: g is left out": {"bias": lambda b: b / g[..., None]},
            "as in the authors' code: softplus in the place of relu, and no g": {
                "bias": lambda b: -sums_of(np.logaddexp(0, y))},
            "g is the key's, not the query's": {"bias": lambda b: b / g[..., None] * g[..., None, :]}}

def dape_mistakes(case, x):
    learned = case.learned(case.parameters)
    table = settled(case, x["length"]).encoding.pairs(x["positions"], x["key_positions"], None)
    b = -learned_of(learned, "p") * np.log1p(learned_of(learned, "a") * table)                 # (B, H, T, S)
    undivided, _ = dape.score_forward(2 * x["q"], x["k"], None, table, learned)
    return {"f alone is added: KERPLE's bias is not": {"bias": lambda y: y - b},
            "denominator: f reads q.k, not q.k/sqrt(D)": {"bias": lambda y: undivided},
            "factor missing: the bias of the hidden layer is left out": {
                "parameters": {"w1": [[*row[:-1], 0] for row in case.parameters["w1"]]}}}

def learned_of(learned, name):
    return np.exp(learned[name])[:, None, None]

def selective_mistakes(case, x):
    p = case.parameters
    return {"factor missing: the first tap of the convolution alone is read": {
                "parameters": {"conv": [[row[0], 0, 0, 0] for row in p["conv"]]}},
            "the convolution runs the other way: its last tap is the token's own": {
                "parameters": {"conv": [row[::-1] for row in p["conv"]]}},
            "another base: 10,000, not 500,000": {"settings": {"base": 10_000.0}}}

def path_bias(case, x):
    """PaTH's bias (B, H, T, T), key by key, without the silu of the authors' code."""
    p = case.learned(case.parameters)
    u, _ = conv_forward(x["h"] @ p["w1"].T @ p["w2"].T, p["conv"])
    w, _ = unit_forward(model_numpy.split_heads(u, 2))                                         # (B, H, T, D)
    b = 2 / (1 + np.exp(-(x["h"] @ p["strength"].T + p["bias"]).swapaxes(1, 2)))               # (B, H, T)
    bias = np.zeros((*b.shape, b.shape[-1]))
    for n in range(b.shape[-1]):
        key = x["k"][:, :, n]
        for m in range(n + 1, b.shape[-1]):
            key = key - (b[:, :, m] * np.vecdot(w[:, :, m], key))[..., None] * w[:, :, m]
            bias[:, :, m, n] = np.vecdot(x["q"][:, :, m], key - x["k"][:, :, n]) / 2
    return bias

def path_mistakes(case, x):
    p = case.parameters
    plain = path_bias(case, x)
    return {"factor missing: the silu is left out, as in the paper's equations": {"bias": lambda y: plain},
            "the convolution runs the other way: its last tap is the token's own": {
                "parameters": {"conv": [row[::-1] for row in p["conv"]]}},
            "factor missing: the bias of b is left out": {"parameters": {"strength_bias": [0, 0]}}}

def path_fox_mistakes(case, x):
    gates = -np.log1p(np.exp(-(x["h"] @ np.transpose(case.parameters["forget"]) + case.parameters["forget_bias"])))
    forgotten = sums_of(gates)
    return path_mistakes(case, x) | {
        "denominator: the forget gates are divided by sqrt(D)": {"bias": lambda y: y - forgotten / 2},
        "factor missing: the forget gates are left out": {"bias": lambda y: y - forgotten}}

def log_mistakes(case, x):
    s = np.array(case.parameters["s"])[:, None, None]
    seen = np.arange(1.0, 7)[:, None]
    first = np.where(seen > 1, np.log(np.maximum(seen, 2)), np.inf)                            # ln 1 = 0: any is right
    return {"factor missing: a plain softmax, which drops what is subtracted": {"scores": lambda y: y / (s * first)},
            "factor missing: s is left out": {"parameters": {"s": [1, 1]}},
            "off by one: ln(n + 1), not ln n": {"scores": lambda y: y * np.log(seen + 1) / first},
            "n is the length of the array, not the keys that are seen": {"scores": lambda y: y * math.log(6) / first}}

def sinks_mistakes(case, x):
    return {"factor missing: a plain softmax": {"parameters": {"b": [-1e9, -1e9]}},
            "b is added to the denominator, not exp(b)": {"parameters": {"b": np.log([0.5, 1.2])}}}

def stick_mistakes(case, x):
    s = 1 / (1 + np.exp(-x["q"] @ x["k"].swapaxes(-1, -2) / math.sqrt(case.heads[1])))          # (B, H, S, S)
    own = np.eye(s.shape[-1])

    def left(s):
        """What the keys before a key of this axis leave: the products of 1 - s."""
        return np.cumprod(1 - s, -1) / (1 - s)

    before, too = np.tril(s, -1), np.tril(s)
    from_first = before * left(before) + own * (1 - before).prod(-1)[..., None]
    with_own = too * left(too[..., ::-1])[..., ::-1]
    plain = too / (1 - too)                                                                    # exp of the score
    return {"a plain softmax": {"weights": lambda p: plain / plain.sum(-1, keepdims=True)},
            "a query's own key does not get what is left: weights sum to less than 1":
            {"weights": lambda p: p * (1 - own)},
            "the own key takes a share by its score, as the others do": {"weights": lambda p: with_own},
            "order: the first key takes its share first, not the nearest": {"weights": lambda p: from_first}}


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

PATH = ("scores = q_m^T H_m .. H_(n+1) k_n / sqrt(D), H_t = I - b_t w_t w_t^T, b_t = 2 sigmoid(strength_h.h_t + "
        "strength_bias_h), w_t = y_t / sqrt(|y_t|^2 + 1e-6), y = silu(conv_0 u_t + conv_1 u_(t-1) + conv_2 u_(t-2)) in "
        "each head, u = w2 w1 h")
REFLECTIONS = {"w1": small(3, 8), "w2": small(8, 3, seed=6), "conv": small(8, 3, seed=7),
               "strength": small(2, 8, seed=8), "strength_bias": [0.3, -0.4]}

def reflected(p):
    names = {"w1": "w1", "w2": "w2", "conv": "conv", "strength": "strength", "bias": "strength_bias"}
    return {ours: np.array(p[theirs]) for ours, theirs in names.items()}

CASES = {
    "rope-default": rope(PAIRS + "f = g, " + PLAIN, "Su et al. 2021, equation 34"),
    "rope-linear": rope(PAIRS + "f = g/factor, " + PLAIN, "Chen et al. 2023", None, 512, 4.0, "linear"),
    "rope-dynamic": rope(
        PAIRS + "f_i = b^(-2i/D), b = 10000 (factor length/L - (factor - 1))^(D/(D-2)), L = max_position_embeddings; "
        "b = 10000 up to L", "bloc97 and emozilla 2023; transformers, _compute_dynamic_ntk_parameters", None, 512, 4.0,
        "dynamic", ntk_mistakes, notes="length is of the whole batch, cached tokens too, for all of its keys"),
    "rope-ntk": rope(
        PAIRS + "f_i = b^(-2i/D), b = 10000 factor^(D/(D-2))", "bloc97 2023", None, 512, 4.0, "ntk",
        ntk_mistakes, notes="transformers has no such type: rope_type default with rope_theta = b is the same"),
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
        "k = wk phi, v = wv x by heads", "the ExPE paper's equations 2 and 3, on keys only",
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
    "pope": Case(
        "pope", "scores = the sum over c of softplus(q_mc) softplus(k_nc) cos((n - m) t_c + e_hc) / sqrt(D), t_c = "
        "base^(-c/D); e within -2 pi .. 0", "Gopalakrishnan et al. 2025, arXiv 2509.10534, equations 3 to 8", {},
        {"base": 10000.0, "e": [[0.0, -0.4, -2.0, -6.0], [-1.0, -0.3, 0.0, -3.0]]}, lambda p: {"e": np.array(p["e"])},
        returns=("scores", "out"), mistakes=pope_mistakes,
        notes="cached keys are softplus(k_n) (cos, sin)(n t + e), all cosines first"),
    "rove": Case(
        "rove", PAIRS + "f = g, " + PLAIN + "; out_m = R_m^T (sum over n of p_mn R_n v_n), R_n being the turn of k_n",
        "García-Castellanos et al. 2026, arXiv 2606.11275; Su 2025, kexue.fm/archives/10862", {},
        {"base": 10000.0}, returns=("q", "k", "scores", "out"), mistakes=rove_mistakes,
        notes="cached values are not turned"),
    "cable": Case(
        "cable", "bias = -g_m (r_(n+1) + .. + r_m), r_j = relu(tokens_h.h_j), g_m = softplus(query_h.h_m)",
        "Veisi et al. 2025, arXiv 2503.08067v3, equations 2 to 7, with the sign of a penalty", {},
        {"tokens": small(2, 8), "query": small(2, 8, seed=6)}, arrays, takes=("q", "k", "v", "h"),
        mistakes=cable_mistakes, **NO_ORDER),
    "dape": Case(
        "dape", "bias_h = b_h + w2_h.leaky(w1 [s_1 .. s_H, b_1 .. b_H, 1]), s = q.k/sqrt(D), b_h = -p_h ln(1 + a_h "
        "|m - n|), leaky(x) = max(x, x/100)", "DAPE's first version, Zheng et al., NeurIPS 2024, with KERPLE", {},
        {"p": [0.7, 1.6], "a": [0.3, 0.9], "w1": small(32, 5), "w2": small(2, 32, seed=6)},
        lambda p: arrays(p) | {name: np.log(p[name]) for name in "pa"}, mistakes=dape_mistakes),
    "selective-rope": Case(
        "selective_rope", "q and k turn as RoPE's pairs (i, i + D/2), by base^(-2i/D) (z_1 + .. + z_t); z_t = conv_0 "
        "u_t + .. + conv_3 u_(t-3), u = w2 w1 x, in each head; x = h by heads, over sqrt(|h|^2 + 1e-6)",
        "Movahedi et al. 2025, arXiv 2511.17388, and the authors' code", {"rank": 3},
        {"base": 500_000.0, "w1": small(3, 8), "w2": small(4, 3, seed=6), "conv": small(4, 4, seed=7)}, arrays,
        takes=("q", "k", "v", "h"), returns=("scores", "out"), mistakes=selective_mistakes, parts=CLOSE,
        notes="positions are not read: tokens count as they stand; cached keys are not turned"),
    "path": Case(
        "path", PATH, "Yang et al. 2025, arXiv 2505.16381, sections 2.2 and 3.2, and the authors' code", {"rank": 3},
        REFLECTIONS, lambda p: reflected(p), takes=("q", "k", "v", "h"), returns=("scores", "out"),
        mistakes=path_mistakes, **NO_ORDER),
    "path-fox": Case(
        "path_fox", PATH + "; and ln f_(n+1) + .. + ln f_m, f_j = sigmoid(forget_h.h_j + forget_bias_h), undivided",
        "Yang et al. 2025, arXiv 2505.16381", {"rank": 3},
        REFLECTIONS | {"forget": small(2, 8, seed=9), "forget_bias": [0.5, 2.0]},
        lambda p: reflected(p) | {name: np.array(p[name]) for name in ("forget", "forget_bias")},
        takes=("q", "k", "v", "h"), returns=("scores", "out"), mistakes=path_fox_mistakes, **NO_ORDER),
    "softmax-log": Case(
        "nope+log", "weights of query m = softmax(s_h ln(n_m) q_m.k_n/sqrt(D)), n_m the number of keys that m sees",
        "SSMax, Nakanishi 2025, arXiv 2501.19399", {}, {"s": [0.43, 0.2]}, lambda p: {"temperature": np.array(p["s"])},
        returns=("weights", "out"), mistakes=log_mistakes, **NO_ORDER),
    "softmax-sinks": Case(
        "nope+sinks", "weights = exp(q_m.k_n/sqrt(D)) / (exp(b_h) + the sum of it over the keys that m sees)",
        "gpt-oss, OpenAI 2025", {}, {"b": [0.5, 1.2]}, lambda p: {"sinks": np.array(p["b"])},
        returns=("weights", "out"), mistakes=sinks_mistakes, **NO_ORDER),
    "softmax-stick": Case(
        "nope+stick", "weights = s_mn times the product over n < j < m of (1 - s_mj) for n < m, s = "
        "sigmoid(q.k/sqrt(D)), and the product over all j < m for n = m", "Tan et al. 2024, arXiv 2410.17980",
        returns=("weights", "out"), mistakes=stick_mistakes, **NO_ORDER),
}


# ---- the files -------------------------------------------------------------------------------------------------------

def sizes(case, x, found, outputs):
    """{output: [terms, exact]} for conform.tolerance: how large the terms are that cancel, over max(1, the right one).

    By the same sums, of squares, since roundings are independent. The terms may be rounded as the output is; exact is
    of angles (as large as their positions) and of what all keys of a query share in their bias.
    """
    (H, D) = case.heads                                                 # (B, 1, T, 1)
    turns = x["positions"][:, None, :, None] * (case.pe in TURNS)
    root = lambda q, k, over=1: np.sqrt(q**2 @ k.swapaxes(-1, -2) ** 2 / over)  # noqa: E731
    if "x" in x:                                                                               # q = wq phi
        wide = np.zeros_like(x["x"])
        size = found["table"].shape[-1]
        wide[..., :size] = np.abs(found["table"])
        heads = lambda h, name: model_numpy.split_heads(root(h, x[f"w{name}"]), H)  # noqa: E731
        terms = {name: heads(np.abs(x["x"]) + wide, name) for name in "qk"}
        exact = {name: heads(wide**0, name) * turns for name in "qk"}
    else:                                                                                      # a cos - b sin
        r = {"partial": D // 2, "pope": 2 * D}.get(case.pe, D)
        norm = lambda y: np.hypot(y[..., :r], np.roll(y[..., :r], r // 2, -1))  # noqa: E731
        terms = {name: np.concatenate((norm(found[name]), np.abs(found[name][..., r:])), -1) for name in "qk"}
        exact = {name: terms[name] * turns for name in "qk"}
    q, k = (np.maximum(np.abs(found[name]), terms[name]) for name in "qk")
    bias = np.nan_to_num(found["bias"])
    shared = 2 * np.abs(bias).max(-1, keepdims=True)
    scores = (root(q, k, D) + np.abs(bias), np.hypot(root(exact["q"], k, D), root(q, exact["k"], D)) + shared)
    p = found["weights"]
    v = np.abs(found["v"]).max()
    weighed = [2 * np.sqrt((p**2 * (1 - p) ** 2 * y**2).sum(-1, keepdims=True)) for y in scores]
    largest = x["length"] * (case.pe in TURNS)
    sums = {"q": (terms["q"], exact["q"]), "k": (terms["k"], exact["k"]), "bias": (0, shared), "scores": scores,
            "weights": weighed, "table": (0, largest),
            "out": (v * weighed[0], v * (weighed[1] + turns * (case.pe == "rove"))),           # whose output is turned
            "inv_freq": (0, largest), "attention_factor": (0, 0)}
    over = {name: np.maximum(1, np.abs(np.nan_to_num(found[name]))) for name in outputs}
    return {name: [float(f"{np.max(y / over[name]):.1e}") for y in sums[name]] for name in outputs}

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

def mistaken(case, parts, size):
    """The mistakes that can be told from what is right and from each other: [{words, part, its last sequence}]."""
    mistakes = []
    seen = set()
    rope = case.returns is TURNED
    for part, (whole, x, right) in parts.items():
        close = {name: max(2e-4, conform.tolerance("float32", *size[part][name])) for name in right}
        changes = usual_of_decode(case, x) if part == "decode" else case.mistakes(case, whole)
        changes |= usual(case, whole) if part == "near" else {}
        changes = {words: change for words, change in changes.items() if words not in seen}
        if case.pe in MERGES | {"t5", "shaw", "grape"}:                 # in each part, since some show it best far out
            changes["rounded positions: they were cast to bfloat16"] = {"n": rounded("bfloat16")}
        for words, change in changes.items():
            change = turned(case, whole, **change) if rope and change.keys() == {"n"} else change
            if turns := change.get("turns"):
                turns["positions"] = turns["positions"][-x["positions"].shape[1]:]
                wrong = conform.turn(x, **turns)
            else:
                _, wrong = cut(part, whole, forward(case, whole, **change), case.returns)
            wrong = {name: last(wrong[name]) for name in right if name in wrong}
            if all(alike(name, y, last(right[name]), close[name]) for name, y in wrong.items()):
                continue
            wrong = {name: plain(y, 5 if np.ndim(y) > 2 else 15) for name, y in wrong.items()
                     if not alike(name, y, last(right[name]), 1e-5)}
            if json.dumps(wrong) not in seen:
                mistakes.append({"looks like": words, "part": part} | (
                    {"turns": {name: y if name == "of" else plain(y, 15) for name, y in turns.items()}} if turns
                    else {"outputs": wrong}))
            seen |= {words, json.dumps(wrong)}
    return mistakes

def last(y):
    return y[-1:] if np.ndim(y) > 2 else y

def document(case):
    """The whole file of a case as a dict."""
    inputs = {part: draw(case, n, seed) for seed, (part, n) in enumerate(case.parts.items())}
    outputs = {part: forward(case, x) for part, x in inputs.items()}
    cuts = {part: cut(part, x, outputs[part], case.returns) for part, x in inputs.items()}
    size = {part: sizes(case, x, outputs[part], cuts[part][1]) for part, x in inputs.items()}
    takes = dict.fromkeys(name for x, _ in cuts.values() for name in x)
    parts = {part: {"size": size[part], "inputs": {name: plain(y, 15) for name, y in x.items()},
                    "outputs": {name: plain(y, 15) for name, y in found.items()}} for part, (x, found) in cuts.items()}
    return {
        "encoding": case.pe, "formula": case.formula, "source": case.source, "notes": case.notes,
        "function": f"f takes, by name, any of {', '.join((*takes, *case.parameters))}; it returns a dict of any "
                    f"outputs by name, or a tuple of the first of these: {', '.join(case.returns)}",
        "takes": {name: SAID[name] for name in takes}, "returns": {name: SAID[name] for name in case.returns},
        "size": "of each output, [terms, exact] over max(1, the right value): of the terms that cancel, and of what "
                "is float32 at least, such as angles; conform.tolerance makes the largest error of them",
        "parameters": case.parameters, "parts": parts,
        "mistakes": mistaken(case, {part: (x, *cuts[part]) for part, x in inputs.items()}, size)}

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
