"""vectors/: small JSON files to check any implementation of an encoding with: `python -m interop.make_vectors`.

The words of a file are written by hand, with its parameters, positions, and names of common mistakes: these have the
outputs that they change or, of a rotation, its angles ("turns"), and the "parameters" that are wrong, if that is all.
A function below makes all others. This makes the numbers anew with the float64 NumPy reference: inputs (of two digits),
right outputs (of fifteen), the size of their terms, and the outputs of each mistake, so that conform.py can name it.
Biases and scores of keys ahead of a query are null.

Positions: half precision merges neighbours such as 256 and 257. 1027, 2070, 65,790 and 526,334 lie so near the middle
of two numbers of bf16 that their rounding is large, and that of n, n + 1, .., n + 4 (ExPE's row) goes both ways. ExPE's
files also have 259, 518 and 4113: bf16 rounds them up, and a cast towards 0 does not, so that a table which was cast in
this way can be told from rounded positions.

B batch, T queries, S keys, H heads, D width of a head, C = H*D, l overridden dimensions, r those of a head that turn.
"""

import dataclasses
import json
import math
from pathlib import Path

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

import expe
import model_numpy
from config import ModelConfig
from files import write_text
from interop.conform import FINISHED, tolerance
from longer.scaling import ScaledRoPE
from positional_encodings import make_encoding, settings_class
from zoo.selective_rope import conv, scale_to_unit

FOLDER = Path(__file__).resolve().parent / "vectors"
TURNS = {"rope", "partial", "proportional", "lerope", "xpos", "sinusoidal", "pope", "rove"}
LOGS = {"kerple": "pa", "dape": "pa", "fire": "cL"}                   # parameters whose logarithm the reference learns
OURS = {"gate_bias": "bias", "strength_bias": "bias", "gate_v": "v", "s": "temperature", "b": "sinks"}

class Case:
    """A file of vectors/, and the settings of the reference for it."""

    def __init__(self, name):
        self.file = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.pe, _, self.softmax = self.file["encoding"].partition("+")
        self.p = self.file["parameters"]
        self.returns = self.file["returns"]
        self.positions = {part: np.array(x["inputs"]["key_positions"]) for part, x in self.file["parts"].items()}
        q = self.file["parts"]["near"]["inputs"].get("q")
        self.H, self.D = np.shape(q)[1::2] if q else (2, 4)
        self.fields = {f.name for f in dataclasses.fields(settings_class(self.pe))}
        self.settings = {name: value for name, value in self.p.items() if name in self.fields}
        self.settings |= {"on": "k"} if name == "expe-keys" else {}
        self.rope = rope = self.p.get("rope_parameters", {})
        self.settings |= {"base": rope["rope_theta"]} if rope else {}
        self.factor, self.scaling = rope.get("factor", 1.0), rope.get("rope_type")
        self.context = rope.get("original_max_position_embeddings", self.p.get("max_position_embeddings", 512))
        if self.scaling in ("linear", "ntk"):
            self.context = int(self.context / self.factor)
        if "partial_rotary_factor" in rope:
            self.settings["rotary_fraction"] = rope["partial_rotary_factor"]
        if self.factor != 1:
            self.settings |= {"rope_scaling": self.scaling, "factor": self.factor}
        for kind in ("long", "short") if self.scaling == "longrope" else ():
            self.settings[kind] = tuple(rope[f"{kind}_factor"])

    def model(self, length, **changes):
        """The ModelConfig for a sequence of this length, its encoding in it."""
        settings = self.settings | {name: y for name, y in changes.items() if name in self.fields}
        if self.scaling in ("dynamic", "longrope"):
            settings["length"] = length
        encoding = (ScaledRoPE if "rope_scaling" in settings else make_encoding)(self.pe, **settings)
        return ModelConfig(1, self.H * self.D, self.H, self.context, vocab=2, softmax=self.softmax or "plain",
                           encoding=encoding)

    def axes(self, interleaved):
        """M-RoPE: which of time, height and width, 0, 1 and 2, each of a head's pairs turns by."""
        sections = self.rope["mrope_section"]
        axes = np.repeat(range(3), sections) * (not interleaved)
        for axis in (1, 2) if interleaved else ():
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes

    def table(self, model, n):
        """The encoding's own rows; DeepSeek's attention factor is the table's over that of mscale_all_dim."""
        if "mrope_section" in self.rope:
            axes = self.axes(self.rope.get("mrope_interleaved", False))
            return np.choose(np.tile(axes, 2), model.encoding.rows(np.broadcast_to(n, (3, *n.shape[-2:])), model))
        if not self.rope.get("truncate", True):
            return turning(np.multiply.outer(n, self.unrounded()), 0.1 * math.log(self.factor) + 1)
        table = model.encoding.rows(n, model)
        mscale = self.rope.get("mscale_all_dim", 0)
        return table * (1 / (0.1 * mscale * math.log(self.factor) + 1)) if mscale else table

    def unrounded(self):
        """YaRN's frequencies, the ends of whose ramp are not rounded: truncate is false, as in gpt-oss."""
        base, i = self.settings["base"], np.arange(self.D // 2)
        first, last = (self.D * math.log(self.context / (2 * math.pi * t)) / (2 * math.log(base)) for t in (32, 1))
        ramp = np.clip((i - first) / (last - first), 0, 1)
        return base ** (-2 * i / self.D) * (1 - ramp + ramp / self.factor)

    def learned(self, changes):
        """The reference's own parameters."""
        logs = LOGS.get(self.pe, "")
        return {OURS.get(name, name): np.log(np.atleast_1d(y)) if name in logs else np.array(y)
                for name, y in (self.p | changes).items() if name in logs or np.ndim(y)}


def turning(angles, attention_factor=1.0):
    """The table (B, 1, T, 2n) of angles (B, T, n): cosines, then sines."""
    return np.concatenate((np.cos(angles), np.sin(angles)), -1)[:, None] * attention_factor

# ---- the reference, asked --------------------------------------------------------------------------------------------

def same(x, *_):
    return x

def draw(case, n, seed):
    """The inputs of a part: integer positions (B, S), and numbers of two digits."""
    rng = np.random.default_rng(seed)
    B, S, C = *n.shape[-2:], case.H * case.D
    shapes = dict.fromkeys("qkv", (B, case.H, S, case.D)) | dict.fromkeys("xh", (B, S, C))
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (C, C))
    x = {"positions": n, "key_positions": n, "length": int(n.max()) + 1}
    for name in [name for name in case.file["takes"] if name in shapes]:
        x[name] = ((0.35 if name[0] == "w" else 1) * rng.standard_normal(shapes[name])).round(2)
    return x

def frequencies(case, length, rows=same):
    """((r/2,) radians by position, attention factor) of a case that turns: what its table is at position 1."""
    one = np.ones((3, 1, 1) if "mrope_section" in case.rope else (1, 1), int)
    cos, sin = np.split(rows(case.table(case.model(length), one), one)[0, 0, 0], 2)
    return np.arctan2(sin, cos), np.hypot(cos, sin)[0]

def forward(case, x, n=same, key_n=None, rows=same, pairs=same, bias=same, scores=same, weights=same, order=None,
            inputs=(), **changes):
    """{name: array} for the inputs x, of all tokens at once. What is left out is right; what is given makes a mistake.

    n, key_n: of positions; rows: of the table and positions; pairs, bias, scores, weights: of these; order: the
    dimensions of a head in the order in which they turn; inputs, changes: inputs, and settings and parameters, in the
    place of the case's own.
    """
    x = x | dict(inputs)
    model = case.model(x["length"], **changes)
    learned = case.learned(changes)
    doors = model_numpy.build_encoding(model.encoding, model)
    queries = n(x["positions"])
    keys = (key_n or n)(x["key_positions"])
    table = rows(case.table(model, queries), queries)
    apart = pairs(model.encoding.pairs(queries, keys, model))
    outputs = {}
    q, k, v, h = (x.get(name) for name in "qkvh")
    if "x" in x:
        h, _ = doors.embed(x["x"], table, learned)
        parts, _ = doors.override(h, table, learned)
        q, k, v = (model_numpy.split_heads(y @ x[f"w{name}"].T, case.H) for name, y in zip("qkv", parts, strict=True))
        outputs["table"] = table if table.dtype.kind == "f" else learned["weight"][table]
    if order is not None:
        q, k = q[..., order], k[..., order]
    q, k, _ = doors.rotate(q, k, table, learned)
    if order is not None:
        q, k = (y[..., np.argsort(order)] for y in (q, k))
    added, _ = doors.score(q, k, h, apart, learned)
    products = scores(q @ k.swapaxes(-1, -2) / model_numpy.score_divisor(q))                   # (B, H, S, S)
    ahead = np.triu(np.ones(products.shape[-2:], bool), 1)
    added = np.where(ahead, np.nan, 0 * products if added is None else bias(added))
    p = weights(doors.softmax(np.where(ahead, -np.inf, products + added), learned)[0])
    outputs |= {"q": q, "k": k, "v": v, "bias": added, "scores": products + added, "weights": p,
                "out": doors.value(p, v, apart, learned)[0]}
    if "inv_freq" in case.returns:
        outputs["inv_freq"], outputs["attention_factor"] = frequencies(case, x["length"], rows)
    return outputs

def cut(part, x, outputs, returns):
    """(inputs, outputs) that a file has of a part. Of decode: the last token alone, and a cache."""
    if part == "decode":
        last = lambda y: y[..., -1:, :] if np.ndim(y) > 2 else y  # noqa: E731  (B, T, C) or (B, H, T, D)
        cached = {f"cached_{name}": y[..., :-1, :] for name, y in (x | outputs).items() if name in ("k", "v", "h")}
        n = {"positions": x["positions"][..., -1:], "key_positions": x["key_positions"]}
        x = {name: last(y) for name, y in x.items()} | n | cached
        outputs = {name: last(y) for name, y in outputs.items()}
    return x, {name: outputs[name] for name in returns if part != "far" or name not in ("weights", "out")}


# ---- common mistakes: {words: what `forward` is to change} -----------------------------------------------------------

def rounding(dtype):
    """The function that rounds numbers once to the nearest of float16 or bfloat16, ties to even."""
    def cast(y, *_):
        if dtype == "float16":
            return y.astype(np.float16).astype(y.dtype)
        digits, exponent = np.frexp(y)
        return np.ldexp(np.rint(digits * 2**8), exponent - 8).astype(y.dtype)
    return cast

def as_they_stand(n):
    return np.broadcast_to(np.arange(n.shape[-1]), n.shape)

def usual(case):
    """Of any encoding. Of the step with a cache alone: the new token's position, or the bias."""
    root = math.sqrt(case.D)
    new = lambda f: {"n": lambda n: np.append(n[..., :-1], f(n)[..., -1:], axis=-1)}  # noqa: E731
    decoding = {
        "the bias is 0: the new token is taken for the only one": {"bias": lambda y: 0 * y},
        "the new token's position is taken for 0": new(lambda n: 0 * n),
        "the new token's position is the number of those before it": new(as_they_stand),
        "positions are not read: tokens are counted as they stand": {"n": as_they_stand},
        "off by one: the new token's position is one more": new(lambda n: n + 1),
        "off by one: the new token's position is one less": new(lambda n: n - 1)}
    return {f"in decoding alone, {words}": change for words, change in decoding.items()} | {
        "off by one: positions are counted from 1, not from 0": {"n": lambda n: n + 1},
        "off by one: positions are counted from -1, not from 0": {"n": lambda n: n - 1},
        "off by one: the distance is m - n + 1, not m - n": {"key_n": lambda n: n - 1},
        "off by one: the distance is m - n - 1, not m - n": {"key_n": lambda n: n + 1},
        "positions are not read: all are taken for 0": {"n": lambda n: 0 * n},
        "positions are not read: tokens are counted as they stand": {"n": as_they_stand},
        **{f"rounded positions: they were cast to {d}": {"n": rounding(d)} for d in ("float16", "bfloat16")},
        "rounded table: it was cast to bfloat16": {"rows": rounding("bfloat16")},
        "rounded bias: it was cast to bfloat16": {"bias": rounding("bfloat16")},
        "denominator: scores are not divided by sqrt(D)": {"scores": lambda y: y * root},
        "denominator: scores are divided by D, not by sqrt(D)": {"scores": lambda y: y / root},
        "denominator: the bias is divided by sqrt(D)": {"bias": lambda y: y / root},
        "the bias has the other sign": {"bias": lambda y: -y}}

def rope(case, x):
    """What is no turn by other angles.

    Angles in the middle of two numbers of bf16, such as 257, must stay there when another processor computes f: so f
    has 14 digits.
    """
    f, a = frequencies(case, x["length"])
    f = np.array(plain(f, 14))
    bf16, fp16 = rounding("bfloat16"), rounding("float16")
    angles = lambda cast, f=f: {"rows": lambda _, n: turning(cast(n[..., None] * f), a)}  # noqa: E731
    if "mrope_section" in case.rope:
        return {}
    return {
        "rounded positions, inv_freq and angles: all were cast to bfloat16": {"n": bf16} | angles(bf16, bf16(f)),
        "rounded angles: they were cast to float16": angles(fp16),
        "rounded angles: they were cast to bfloat16": angles(bf16)}

def lerope(case, x):
    f = expe.rope_inv_freq(case.D, case.p["base"]) * np.exp(case.p["alpha"])
    angles = lambda cast: {"rows": lambda n, _: cast(n * f) / f}  # noqa: E731  (its table is the positions)
    return {f"rounded angles: they were cast to {d}": angles(rounding(d)) for d in ("float16", "bfloat16")}

def xpos(case, x):
    swapped = np.arange(8).reshape(4, 2).T.ravel()
    root = np.tile(np.sqrt((np.arange(4) / 4 + 0.4) / 1.4), 2)                                 # z^(center/512)
    return {
        "center is not subtracted: z^(m/512)": {"rows": lambda y, n: y * np.concatenate((root, 1 / root))},
        "the factors of q and k are exchanged: scores grow": {"rows": lambda y, n: np.roll(y, 8, -1)},
        "halves and interleaved pairs swapped: (2i, 2i+1) turns, where (i, i + D/2) belongs": {"order": swapped}}

def sinusoidal(case, x):
    j = np.arange(8)

    def waves(exponents):
        def rows(_, n):
            angles = n[..., None] * 10_000.0**-exponents
            return np.where(j % 2, np.cos(angles), np.sin(angles))
        return {"rows": rows}

    return {
        "halves and interleaved pairs swapped: all sines first, where sines and cosines alternate": {
            "rows": lambda y, n: np.concatenate((y[..., ::2], y[..., 1::2]), -1)},
        "sines and cosines are exchanged": {"rows": lambda y, n: y[..., [1, 0, 3, 2, 5, 4, 7, 6]]},
        "x is multiplied by sqrt(C)": {"inputs": {"x": x["x"] * math.sqrt(8)}},
        "all cosines first, then all sines": {"rows": lambda y, n: np.concatenate((y[..., 1::2], y[..., ::2]), -1)},
        "denominator: the exponent is j/C of each column j, not 2i/C of the pair (2i, 2i + 1)": waves(j / 8),
        "off by one: the exponent's i is counted from 1, not from 0": waves((j // 2 + 1) / 4)}

def learned(case, x):
    return {"x is multiplied by sqrt(C)": {"inputs": {"x": x["x"] * math.sqrt(8)}}}

def misplaced(x, l):
    added = {"rows": lambda y, n: x["x"][..., :l] + y}
    turned = {name: np.roll(x[name], l, -1) for name in ("x", "wq", "wk", "wv")}              # the last l come first
    return {"the rows are added, and do not override": added,
            "the rows are added, in the value too, and do not override": added | {"on": "qkv"},
            "the last l dimensions are overridden, not the first": {"inputs": turned}}

def overriding(case, x):
    theta, j = case.p["theta"], np.arange(5)
    return misplaced(x, 5) | {
        "j is subtracted: theta (n - j)": {"rows": lambda y, n: y - 2 * theta * j},
        "j is not multiplied by theta: theta n + j": {"rows": lambda y, n: y + (1 - theta) * j},
        "j is a factor: theta n (j + 1)": {"rows": lambda y, n: theta * n[..., None] * (j + 1)}}

def exqpe(case, x):
    j = np.arange(5)
    late = {"rows": lambda y, n: y - np.where(n[..., None] >= j, 1 / 16, 0)}
    raised = lambda f: {"rows": lambda _, n: j / 2048 + f(n[..., None] + 0 * j).clip(0) / 16}  # noqa: E731
    return misplaced(x, 5) | {
        "all l dimensions rise at each position": raised(lambda n: n),
        "all l dimensions rise together: floor(n/l)": raised(lambda n: n // 5),
        "the last dimension rises first": raised(lambda n: (n + j - 4) // 5 + 1),
        "off by one: floor((n - j)/l) raises, not floor((n - j)/l) + 1": late}

def sloped(slopes, whose):
    slopes = slopes[:, None, None]
    return {f"factor missing: {whose}slopes are left out": {"bias": lambda y: y / slopes},
            f"factor squared: {whose}slopes are applied twice": {"bias": lambda y: y * slopes}}

def alibi(case, x):
    slopes = expe.alibi_slopes(3)                                       # 2^-4, 2^-8, 2^-2
    h = np.arange(1, 4)
    d = expe.distances(x["positions"], x["key_positions"])[:, None].clip(1)
    others = {"slopes of e^(-8h/H), not 2^(-8h/H)": np.exp(-8 * h / 3), "all heads have the first one's slope": 2.0**-4,
              "slopes of 2^(-8h/H), which are for H a power of two": 2.0 ** (-8 * h / 3),
              "slopes of the next higher power of two": 2.0 ** (-8 * h / 4),
              "denominator: slopes of 2^(-h H/8), not 2^(-8h/H)": 2.0 ** (-h * 3 / 8),
              "slopes from h = 0: 2^(-8h/H), h = 0 .. H - 1": 2.0 ** (-8 * (h - 1) / 3),
              "slopes from h = 0 in the lower power of two alone": 2.0 ** np.array([0, -4, -2]),
              "slopes from h = 0 in both powers of two": 2.0 ** np.array([0, -4, 0]),
              "slopes reversed: the steepest is the last head's": slopes[::-1],
              "slopes reversed: the steepest of 2^(-8h/H) is the last head's": 2.0 ** (-8 * (4 - h) / 3),
              "slopes reversed within the lower power of two": 2.0 ** np.array([-8, -4, -2])}
    return sloped(slopes, "the ") | {words: {"bias": lambda y, times=y / slopes: y * times[:, None, None]}
                                     for words, y in others.items()} | {
        "the logarithm of the distance: ln(1 + m - n)": {"bias": lambda y: y / d * np.log1p(d)}}

def t5(case, x):
    d = expe.distances(x["positions"], x["key_positions"]).clip(0)
    far = 16 * np.log(d.clip(1) / 16)

    def buckets(whole, divisor):
        """A logarithm that is a whole number stays one when another processor computes it: so it has 9 places."""
        k = whole((far / divisor).round(9))
        return {"pairs": lambda y: np.where(d < 16, d, np.minimum(16 + k, 31)).astype(int)}

    return {
        "buckets of both sides, half of which are for keys ahead": {"pairs": lambda y: expe.t5_bucket(d, 16)},
        "denominator: floor(16 ln(d/16)), not divided by ln(max_distance/16)": buckets(np.floor, 1),
        "distances are clipped at 31, without logarithms": {"pairs": lambda y: d.clip(max=31)},
        "the logarithm is of base 2: floor(log2(d/16))": buckets(np.floor, 16 * math.log(2)),
        "rounded: rint(16 ln(d/16)/ln(max_distance/16)), not floor": buckets(np.rint, math.log(8)),
        "rounded up: ceil(16 ln(d/16)/ln(max_distance/16)), not floor": buckets(np.ceil, math.log(8))}

def shaw(case, x):
    far = expe.distances(x["positions"], x["key_positions"])[:, None] > case.p["max_distance"]
    return {"denominator: q.keys[r] is not divided by sqrt(D)": {"bias": lambda y: 2 * y},
            "keys further back than max_distance have no bias": {"bias": lambda y: np.where(far, 0, y)}}

def kerple(case, x):
    d = expe.distances(x["positions"], x["key_positions"])[:, None].clip(0)
    p, a = (np.reshape(case.p[name], (2, 1, 1)) for name in "pa")
    others = {"a is a factor: p a ln(1 + |m - n|)": a * np.log1p(d), "the distance is divided by a": np.log1p(d / a),
              "the logarithm is of base 2": np.log2(1 + a * d), "the logarithm is left out: p a |m - n|": a * d,
              "KERPLE's other kind, a power: p |m - n|^a": d**a, "p ln(a + |m - n|)": np.log(a + d)}
    return {words: {"bias": lambda _, y=y: -p * y} for words, y in others.items()}

def fire(case, x):
    at_L = {"pairs": lambda y: np.concatenate((0 * y[..., :1], y[..., 1:]), -1)}
    m, d = x["positions"][..., None], expe.distances(x["positions"], x["key_positions"]).clip(0)
    L, w1, b1, w2 = (np.array(case.p[name]) for name in ("L", "w1", "b1", "w2"))
    psi = lambda y: np.log1p(case.p["c"] * y)  # noqa: E731
    made = lambda y, f=same: {"bias": lambda _: np.moveaxis(f(y[..., None] * w1 + b1) @ w2.T, -1, 1)}  # noqa: E731
    relu = lambda y: made(y, lambda z: z.clip(0))  # noqa: E731
    return {"denominator: psi(L) at every m, not psi(max(m, L))": at_L,
            "off by one: m is counted from 1 in max(m, L)": relu(psi(d) / psi((m + 1).clip(L))),
            "off by one: m and m - n are counted from 1": relu(psi(d + 1) / psi((m + 1).clip(L))),
            "denominator: psi(min(m, L)), not psi(max(m, L))": relu(psi(d) / psi(m.clip(1e-9, L))),
            "denominator: psi of the last m, not of each": relu(psi(d) / psi(m.max(1, keepdims=True).clip(L))),
            "the 1 is left out: ln(c (m - n))/ln(c max(m, L))": relu(
                np.log(case.p["c"] * d).clip(-1e9) / np.log(case.p["c"] * m.clip(1.01 / case.p["c"]).clip(L))),
            "the logarithm is left out: (m - n)/max(m, L)": relu(d / m.clip(L)),
            "psi is of the quotient: psi((m - n)/max(m, L))": relu(psi(d / m.clip(L))),
            "relu is left out": made(psi(d) / psi(m.clip(L)))}

def bias_with(case, x, **inputs):
    """The bias that the reference has for other inputs."""
    return {"bias": lambda _: forward(case, x | inputs)["bias"]}

def cope(case, x):
    q, e = x["q"], np.array(case.p["e"])
    own = q @ e[0]                                                      # (B, H, T): the bias of a key that counts 0
    gates = np.tril(1 / (1 + np.exp(-q @ x["k"].swapaxes(-1, -2))))
    count = lambda g: g[..., ::-1].cumsum(-1)[..., ::-1]  # noqa: E731
    p = count(gates).clip(max=3)

    def at(p):
        share = (1 - np.abs(p.clip(0, 3)[..., None] - np.arange(4))).clip(0)                   # (B, H, T, S, P)
        return {"bias": lambda _: np.vecdot(share, (q @ e.T)[..., None, :])}

    return {"denominator: gates are sigmoid(q.k/sqrt(D)), not sigmoid(q.k)": bias_with(case, x, k=x["k"] / 2),
            "keys are counted from the left, not from the query": at(gates.cumsum(-1)),
            "gates are 1: keys are counted as they stand": at(count(np.tril(0 * gates + 1))),
            "p is rounded to the nearest row": at(np.rint(p)), "p is rounded down: q.e[floor p]": at(np.floor(p)),
            "the rows' weights are exchanged": at(np.floor(p) + np.ceil(p) - p),
            "off by one: p is one less": at(count(gates) - 1),
            "off by one: a key does not count itself": {
                "bias": lambda y: np.concatenate((y[..., 1:], own[..., None]), -1)}}

def log_gates(x, weight, bias):
    """ln f (B, H, T), f = sigmoid(w.h + b)."""
    return -np.log1p(np.exp(-(x["h"] @ np.transpose(weight) + bias))).swapaxes(1, 2)

def sums_of(y):
    """(B, H, T, S): y_(n+1) + .. + y_m, of y (B, H, T)."""
    total = y.cumsum(-1)
    return total[..., None] - total[..., None, :]

def fox(case, x):
    logs = log_gates(x, case.p["weight"], case.p["gate_bias"])
    of_key, of_query = logs[..., None, :], logs[..., None]
    forgets, none = np.exp(np.tril(sums_of(logs))), lambda y: 0 * y
    return {
        "weights are multiplied by the gates, after the softmax": {"bias": none, "weights": lambda p: p * forgets},
        "scores are multiplied by the gates": {"bias": none, "scores": lambda y: y * forgets},
        "the product of the gates is added, not its logarithm": {"bias": lambda y: forgets},
        "the logarithm is of base 2": {"bias": lambda y: y / math.log(2)},
        "the sigmoid is left out": {"bias": lambda y: sums_of(-np.log(np.expm1(-logs)))},
        "the sum is missing: ln f_m of the query alone": {"bias": lambda y: np.tril(of_query + 0 * y, -1)},
        "the sum is missing: ln f_n of the key alone": {"bias": lambda y: np.tril(of_key + 0 * y, -1)},
        "f is summed, not ln f": {"bias": lambda y: sums_of(np.exp(logs))},
        "off by one: ln f_n, the key's own, is added too": {"bias": lambda y: y + of_key},
        "off by one: ln f_m, the query's own, is left out, and ln f_n added": {"bias": lambda y: y + of_key - of_query}}

def relative_bank(case, x):
    d = expe.distances(x["positions"], x["key_positions"])
    r = model_numpy.split_heads(x["h"] @ np.transpose(case.p["weight"]), 2)                    # (B, H, S, R)
    bank, extent = np.array(case.p["bank"]), case.p["rel_extent"]
    profiles = np.where((0 <= d) & (d < extent), bank[:, d.clip(0, extent - 1)], 0)            # (R, B, T, S)
    return {
        "keys beyond the extent have the bias of its last distance": {"pairs": lambda y: y.clip(max=extent - 1)},
        "off by one: distance 4, the extent, has the bias of 3": {"pairs": lambda y: y - (d == extent)[:, None]},
        "the distance is n - m, not m - n: only a query's own key has a bias": {"pairs": lambda y: extent * (y > 0)},
        "r is the key's, not the query's": {"bias": lambda _: np.einsum("bhnr,rbmn->bhmn", r, profiles)}}

def grape(case, x):
    size = np.linalg.norm(case.p["gate_v"], axis=-1)[:, None, None]
    softplus = lambda y: np.logaddexp(0, y)  # noqa: E731
    z, of_key = (np.vecdot(x[name], (case.p["gate_v"] / size[..., 0])[:, None]) / 2 for name in "qk")     # (B, H, T)
    gates = {"sigmoid in the place of softplus": 1 / (1 + np.exp(-z)), "relu in the place of softplus": z.clip(0),
             "factor missing: the query's gate is left out": 1 + 0 * z}
    return sloped(expe.alibi_slopes(2), "ALiBi's ") | {
        words: {"bias": lambda y, g=g: y * (g / softplus(z))[..., None]} for words, g in gates.items()} | {
        "the gate is the key's, not the query's": {
            "bias": lambda y: y / softplus(z)[..., None] * softplus(of_key)[..., None, :]},
        "denominator: v.q/|v| is not divided by sqrt(D)": bias_with(case, x, q=2 * x["q"]),
        "denominator: v.q/sqrt(D) is not divided by |v|": bias_with(case, x, q=size * x["q"])}

def pope(case, x):
    c = np.arange(case.D)
    by = lambda t: {"rows": lambda _, n: turning(n[..., None] * t)}  # noqa: E731
    lengths = {"relu": lambda y: y.clip(0), "exp": np.exp, "the absolute value": np.abs,
               "sigmoid": lambda y: 1 / (1 + np.exp(-y))}
    return {f"{words} in the place of softplus": {"inputs": {name: np.log(np.expm1(f(x[name]))) for name in "qk"}}
            for words, f in lengths.items()} | {
            "the printed sign: t_c = base^(+c/D)": by(10_000.0 ** (c / case.D)),
            "off by one: c is counted from 1": by(10_000.0 ** (-(c + 1) / case.D)),
            "pairs share a frequency, as in RoPE": by(10_000.0 ** (-(c // 2 * 2) / case.D)),
            "denominator: scores are divided by sqrt(2D), not by sqrt(D)": {"scores": lambda y: y / math.sqrt(2)},
            "the other direction: turned by minus the angle": {"n": lambda n: -n}}

def rove(case, x):
    S = x["positions"].shape[1]                                         # table: the queries' turns, then the keys'
    still = np.repeat([1, 0], 2)                                        # cosines, then sines
    return {"factor missing: values are not turned, as in RoPE": {"pairs": lambda y: 0 * y + still},
            "the output is not turned back: values are at absolute positions": {
                "pairs": lambda y: np.where(np.arange(2 * S)[:, None] < S, still, y)},
            "the other direction: values turn by minus the angle": {"pairs": lambda y: y * np.repeat([1, -1], 2)}}

def cable(case, x):
    y, z = ((x["h"] @ np.transpose(case.p[name])).swapaxes(1, 2) for name in ("tokens", "query"))
    g = np.logaddexp(0, z)                                                                     # (B, H, T)
    own = g[..., None] * y.clip(0)[..., None, :]                                               # g_m r_n
    return {"off by one: r_n, the key's own, is added too": {"bias": lambda b: b - own},
            "relu is left out": {"bias": lambda b: -g[..., None] * sums_of(y)},
            "softplus in the place of relu": {"bias": lambda b: -g[..., None] * sums_of(np.logaddexp(0, y))},
            "sigmoid in the place of softplus": {"bias": lambda b: b / g[..., None] / (1 + np.exp(-z))[..., None]},
            "the printed sign: the bias is g_m times the sum, which rewards distance": {"bias": lambda b: -b},
            "factor missing: g is left out": {"bias": lambda b: b / g[..., None]},
            "as in the authors' code: softplus in the place of relu, and no g": {
                "bias": lambda b: -sums_of(np.logaddexp(0, y))},
            "g is the key's, not the query's": {"bias": lambda b: b / g[..., None] * g[..., None, :]}}

def dape(case, x):
    kerple = forward(case, x, w2=0 * np.array(case.p["w2"]))["bias"]
    back = forward(case, x, w1=-np.array(case.p["w1"]))["bias"] - kerple        # leaky(z) + leaky(-z)/100 is a relu
    return {"relu in the place of leaky": {"bias": lambda y: kerple + (y - kerple + back / 100) / 0.9999},
            "leaky is left out": {"bias": lambda y: kerple + (y - kerple - back) / 1.01},
            "f alone is added: KERPLE's bias is not": {"bias": lambda y: y - kerple},
            "denominator: f reads q.k, not q.k/sqrt(D)": bias_with(case, x, q=2 * x["q"])}

def path(case, x):
    def bias(silu=True, unit=lambda y: scale_to_unit(y)[0], twice=2):
        """That of the reflections, (B, H, T, T), query by query."""
        p = case.learned({})
        u, _ = conv(x["h"] @ p["w1"].T @ p["w2"].T, p["conv"])
        w = unit(model_numpy.split_heads(u / (1 + np.exp(-u)) if silu else u, 2))              # (B, H, T, D)
        b = twice * np.exp(log_gates(x, p["strength"], p["bias"]))                             # (B, H, T)
        keys = x["k"].copy()                                                                   # as the query sees them
        scores = []
        for m in range(keys.shape[2]):
            along = np.vecdot(keys[:, :, :m], w[:, :, m, None])                                # (B, H, m)
            keys[:, :, :m] -= (b[:, :, m, None] * along)[..., None] * w[:, :, m, None]
            scores.append(np.vecdot(keys - x["k"], x["q"][:, :, m, None]) / 2)
        return np.stack(scores, 2)

    right = bias()
    return {words: {"bias": lambda y, wrong=wrong: y - right + wrong} for words, wrong in {
        "factor missing: the silu is left out, as in the paper's equations": bias(silu=False),
        "factor missing: b is sigmoid, not 2 sigmoid": bias(twice=1), "w is not divided by its length": bias(unit=same),
    }.items()}

def path_fox(case, x):
    logs = log_gates(x, case.p["forget"], case.p["forget_bias"])
    gates = sums_of(logs)
    return path(case, x) | {
        "off by one: ln f_n, the key's own, is added too": {"bias": lambda y: y + logs[..., None, :]},
        "denominator: the forget gates are divided by sqrt(D)": {"bias": lambda y: y - gates / 2},
        "factor missing: the forget gates are left out": {"bias": lambda y: y - gates}}

def log(case, x):
    s = np.array(case.p["s"])[:, None, None]
    seen = np.arange(1.0, 7)[:, None]
    logs = np.log(seen).clip(1e-300)                                    # of the first query any softmax is right
    return {
        "factor missing: a plain softmax, which drops what is subtracted": {"scores": lambda y: y / (s * logs)},
        **{f"the logarithm is of base {b}": {"scores": lambda y, b=b: y / math.log(b)} for b in (2, 10, 512)},
        "1 + ln n, not ln n": {"scores": lambda y: y * (1 + logs) / logs},
        "off by one: ln(n + 1), not ln n": {"scores": lambda y: y * np.log(seen + 1) / logs},
        "n is the length of the array, not the keys that are seen": {"scores": lambda y: y * math.log(6) / logs}}

def sinks(case, x):
    b = np.exp(case.p["b"])[:, None, None]

    def shifted(p):
        whole = b / (1 - p.sum(-1, keepdims=True))                                             # exp(b) + the sum of exp
        return p * whole / (whole - b + b * p.max(-1, keepdims=True) * whole)

    return {"the largest score is subtracted from scores, and not from b": {"weights": shifted}}

def stick(case, x):
    s = np.tril(1 / (1 + np.exp(-x["q"] @ x["k"].swapaxes(-1, -2) / math.sqrt(case.D))))       # (B, H, S, S)
    own = np.eye(s.shape[-1])
    odds = s / (1 - s)                                                                         # exp of the score

    def shares(s):
        """What each key takes of that which the keys before it leave."""
        return s * np.cumprod(1 - s, -1) / (1 - s)

    from_first = shares(s * (1 - own))
    return {
        "a plain softmax": {"weights": lambda p: odds / odds.sum(-1, keepdims=True)},
        "a query's own key does not get what is left: weights sum to less than 1": {"weights": lambda p: p * (1 - own)},
        "the first key gets what is left, not the own": {
            "weights": lambda p: p * (1 - own) + np.eye(1, len(own))[0] * (p * own).sum(-1, keepdims=True)},
        "the own key takes a share by its score, as the others do": {
            "weights": lambda p: shares(s[..., ::-1])[..., ::-1]},
        "order: the first key takes its share first, not the nearest": {
            "weights": lambda p: from_first + own * (1 - from_first.sum(-1, keepdims=True))}}

OWN = (rope, lerope, xpos, sinusoidal, learned, exqpe, alibi, t5, shaw, kerple, fire, cope, fox, relative_bank, grape,
       pope, rove, cable, dape, path, path_fox, log, sinks, stick)
MISTAKES = {f.__name__: f for f in OWN} | {"expe": overriding, "partial": rope, "proportional": rope}


# ---- the files -------------------------------------------------------------------------------------------------------

SAMPLES = 24
SUMS = {"fox", "cable", "cope", "path", "path_fox", "selective_rope"}   # a bias is a difference of running sums
NEVER_ROUNDED = {"alpha"}                                               # of LeRoPE: angles grow with it
DISTANCES = {"kerple", "dape", "grape"}                                 # whose numbers of a pair are distances

def sizes(case, part, x):
    """{output: [terms, exact]} for conform.tolerance, each an array as the output of this part has it, or 0.

    They are measured: numbers are changed by a step or minus a step, relative to each, at random, and the root mean
    square of an output's changes over the step is the size of its terms, since roundings are independent too. terms: of
    inputs, parameters, table, bias, scores and weights, which may all be rounded as the output is. A softmax answers
    the errors of half precision otherwise than smaller ones: the larger size counts. exact: of angles, and of running
    sums, which are float32 at least.
    """
    right = forward(case, x)
    signs = np.random.default_rng(99)

    def measure(step, changed):
        """changed(share): what `forward` is to change if every number y is off by share(y)."""
        squares = dict.fromkeys(right, 0)
        for _ in range(SAMPLES):
            made = forward(case, x, **changed(lambda y: step * signs.choice((-1, 1), np.shape(y)) * y))
            for name, y in right.items():
                if y is not None:
                    squares[name] = squares[name] + ((made[name] - y) / step) ** 2
        return {name: np.sqrt(y / SAMPLES) for name, y in squares.items()}

    def changed(share):
        off = lambda y, *_: y + share(y) if y is not None and y.dtype.kind == "f" else y  # noqa: E731
        hooks = {"rows": off, "bias": off, "scores": off, "weights": off}
        hooks |= {} if case.pe in DISTANCES else {"pairs": off}
        learned = {name: off(np.array(y)) for name, y in case.p.items() if np.ndim(y) and name not in NEVER_ROUNDED}
        return hooks | learned | {"inputs": {name: off(y) for name, y in x.items() if np.ndim(y)}}

    small, half = (measure(step, changed) for step in (2.0**-20, 2.0**-8))
    terms = {name: np.maximum(y, half[name]) for name, y in small.items()}
    exact = measure(2.0**-24, lambda share: turned_by(case, x, share)) if case.pe in TURNS else {}
    if case.pe in SUMS:
        sums = 2 * np.nan_to_num(np.abs(right["bias"])).max(-1, keepdims=True)                 # (B, H, T, 1)
        exact = {"bias": sums + 0 * right["bias"], "scores": sums + 0 * right["bias"],
                 "out": sums * np.abs(right["v"]).max() + 0 * right["out"]}
    right, terms, exact = (cut(part, x, {name: y.get(name, np.zeros(np.shape(right[name]))) for name in case.returns},
                               case.returns)[1] for y in (right, terms, exact))
    return {name: [0 if name in FINISHED else short(terms[name], y), short(exact[name], y)]
            for name, y in right.items()}

def turned_by(case, x, share):
    """What `forward` is to change if every angle a is off by share(a)."""
    def turn(cos, sin, angle):
        d = share(angle)
        return cos * np.cos(d) - sin * np.sin(d), sin * np.cos(d) + cos * np.sin(d)

    def rows(table, n):
        if case.pe == "lerope":
            freq = expe.rope_inv_freq(case.D, case.p["base"])
            return n[:, None, :, None] + share(n[:, None, :, None] + 0 * freq)                 # (B, 1, T, D/2)
        if case.pe == "sinusoidal":
            f = case.p["base"] ** (-np.arange(0, table.shape[-1], 2) / table.shape[-1])
            cos, sin = turn(table[..., 1::2], table[..., ::2], n[..., None] * f)
            return np.stack((sin, cos), -1).reshape(table.shape)
        parts = np.split(table, 4 if case.pe == "xpos" else 2, axis=-1)
        one = case.table(case.model(x["length"]), np.ones((*n.shape[:-2], 1, 1), int))[0, 0, 0]
        r = parts[0].shape[-1]
        f = np.arctan2(one[r : 2 * r], one[:r])
        n = np.choose(case.axes(case.rope["mrope_interleaved"]), n[..., None]) if n.ndim > 2 else n[..., None]
        angle = (n * f)[:, None]                                                               # (B, 1, T, r)
        return np.concatenate([y for pair in zip(parts[::2], parts[1::2], strict=True)
                               for y in turn(*pair, angle)], -1)

    both = np.concatenate((x["positions"], x["key_positions"]), -1)                            # as RoVE's pairs have it
    return {"rows": rows} | ({"pairs": lambda table: rows(table, both)} if case.pe == "rove" else {})

def short(size, y):
    """An array of two digits, 0 where y is not a number and where it is a rounding; a number if all are 0."""
    size = np.where(np.isnan(y), 0, size)
    size = np.where(size < 1e-9 * max(1, size.max(initial=0)), 0, size)
    return whole(plain(size, 2)) if np.any(size) else 0

def whole(y):
    """Lists of numbers, 1300 in the place of 1300.0: a third of these files are such numbers."""
    return [whole(part) for part in y] if isinstance(y, list) else int(y) if y == int(y) else y

def plain(y, digits):
    """Arrays and numbers as JSON has them: lists, numbers of so many digits, null for what is not a number."""
    if isinstance(y, dict):
        return {name: plain(part, digits) for name, part in y.items()}
    if np.ndim(y):
        return [plain(part, digits) for part in y]
    if isinstance(y, int | np.integer):
        return int(y)
    return None if np.isnan(y) else float(f"{y:.{digits}g}") + 0.0                             # + 0.0: no -0.0

def mistaken(case, mistake, x):
    """A mistake of a file, its outputs made anew for the last sequence; the angles of a rotation stay."""
    if "turns" in mistake:
        return mistake
    own = MISTAKES.get(case.softmax or case.pe, lambda case, x: {})
    change = mistake.get("parameters") or (own(case, x) | usual(case))[mistake["looks like"]]
    _, wrong = cut(mistake["part"], x, forward(case, x, **change), case.returns)
    return mistake | {"outputs": {name: plain(wrong[name][-1:], 5) if wrong[name].ndim > 2 else plain(wrong[name], 15)
                                  for name in mistake["outputs"]}}

@np.errstate(all="ignore")
def document(name):
    """The whole file of a case as a dict: its words as they are, its numbers made anew."""
    case = Case(name)
    inputs = {part: draw(case, n, seed) for seed, (part, n) in enumerate(case.positions.items())}
    parts = {}
    for part, x in inputs.items():
        found = forward(case, x)
        shown, right = cut(part, x, found, case.returns)
        parts[part] = {"size": sizes(case, part, x), "inputs": plain(shown, 15), "outputs": plain(right, 15)}
    mistakes = [mistaken(case, mistake, inputs[mistake["part"]]) for mistake in case.file["mistakes"]]
    return case.file | {"parts": parts, "mistakes": mistakes}

def text(value, margin=""):
    """JSON with a line for each field and each row of numbers."""
    deeper = margin + " "
    if isinstance(value, dict) and value:
        lines = (f"{deeper}{json.dumps(name)}: {text(y, deeper)}" for name, y in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(deeper + text(y, deeper) for y in value) + f"\n{margin}]"
    return json.dumps(value)

def most_allowed(part):
    """The largest error over max(1, a number) that conform.py leaves to rounding in a part of a file, in float64."""
    right = {name: np.array(y, float) for name, y in part["outputs"].items()}
    sizes = {name: [np.array(size, float) for size in part["size"][name]] for name in right}
    return max(np.nanmax(tolerance(name, "float64", y, *sizes[name]) / np.maximum(1, np.abs(y)))
               for name, y in right.items())

def kept(new, old, near=1e-12):
    """new with the numbers of old where all but the last digits agree: another processor's cosine changes these.

    Of a part with sizes, near is the largest error that conform.py leaves to rounding: at position n an angle n f has n
    times the rounding of f. Sizes have two digits, and what mistakes give has five.
    """
    if isinstance(new, dict):
        if new.keys() == {"size", "inputs", "outputs"}:
            near = most_allowed(new)
        nears = {"size": 0.1, "mistakes": 2e-4}
        return {name: kept(y, old.get(name), nears.get(name, near)) for name, y in new.items()}
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [kept(*pair, near) for pair in zip(new, old, strict=True)]
    same = isinstance(new, int | float) and old is not None and math.isclose(new, old, rel_tol=near, abs_tol=near)
    return old if same else new

def main(argv=None):
    parser = CommandLine(prog="python -m interop.make_vectors", description=(__doc__ or "").partition("\n\n")[0])
    with parser.one_line_errors():
        parser.parse_args(argv)
        for path in sorted(FOLDER.glob("*.json")):
            write_text(path, text(kept(document(path.stem), json.loads(path.read_text(encoding="utf-8")))) + "\n")
        print(f"wrote {len([*FOLDER.glob('*.json')])} files of vectors/")

if __name__ == "__main__":
    main()
