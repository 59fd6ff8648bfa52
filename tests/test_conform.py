"""interop/conform.py: right functions pass, in every type of array, and it names each mistake that is made here.

The functions that are broken are the loops of tests/test_vectors.py; the mistakes in vectors/ come from other code.
"""

import ast
import functools
import inspect
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, refused
from test_vectors import FILES, OURS

from expe import alibi_slopes
from interop import conform
from interop.make_vectors import BASES
from lab import elsewhere


def in_format(x, dtype):
    """All floats of x in this format, so that what is computed of them is in it, too."""
    if isinstance(x, dict):
        return {key: in_format(y, dtype) for key, y in x.items()}
    if isinstance(x, list):
        return [in_format(y, dtype) for y in x]
    return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype == float else dtype(x) if type(x) is float else x


def of(name, cast=lambda x: x, decoding=None, dtype=np.float64, **broken):
    """A function for conform.py: ours of this case, broken, and what it returns cast but for frequencies.

    decoding: how it is broken at the step with a cache alone; dtype: of what goes in.
    """
    ours, exact = OURS[name], ("inv_freq", "attention_factor")
    takes = inspect.signature(ours).parameters

    def function(**everything):
        mine = {key: x for key, x in everything.items() if key in takes or {"p", "given"} & {*takes}}
        found = ours(**in_format(mine, dtype) | broken | (decoding or {} if "cached_k" in everything else {}))
        return {key: x if key in exact else cast(x) for key, x in found.items() if key in FILES[name]["returns"]}

    return function


def says(name, function, dtype=None):
    fine, line = conform.check(function, FILES[name], dtype)
    assert not fine, line
    return line


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", FILES)
def test_ours_is_right_in_float64_and_float32(name, dtype):
    ours = of(name, dtype=dtype)
    fine, line = conform.check(lambda **x: {key: np.asarray(y, dtype) for key, y in ours(**x).items()}, FILES[name])
    assert fine and line.startswith("right"), line


def cast_to(dtype):
    """numpy.asarray does not know torch's bfloat16: such numbers come as float32, and --dtype says what they were."""
    return lambda x: torch.as_tensor(np.asarray(x)).to(getattr(torch, dtype)).float()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_cast_at_the_end_alone_is_right_by_its_own_tolerance(name, dtype):
    data = json.loads(json.dumps(FILES[name]))
    if dtype == "float16":
        data["parts"].pop("far", None)  # scores of 10^5 do not fit into float16
    fine, line = conform.check(of(name, cast_to(dtype)), data, dtype)
    assert fine, line
    assert not conform.check(of(name, cast_to(dtype)), data, "float64")[0]


def bf16(n):
    return torch.from_numpy(np.asarray(n, float)).bfloat16().double().numpy().astype(int)


def fp16(n):
    return np.asarray(n, np.float16).astype(int)


def stand(n):
    return np.broadcast_to(np.arange(n.shape[-1]), n.shape)


def rounded(x):
    return float(torch.tensor(x).bfloat16())


READS_ORDER = ("learned", "cope", "fox", "cable", "selective-rope", "path", "path-fox", "softmax-log", "softmax-sinks",
               "softmax-stick")  # or has no position above 256


@pytest.mark.parametrize("name", [name for name in FILES if name not in READS_ORDER])
def test_positions_rounded_to_bf16_are_named_under_its_tolerance(name):
    """Also where the table, as exact as its positions are, is rounded once more, and seen through q and k alone."""
    words = "rounded positions: they were cast to bfloat16"
    for cast in (lambda x: x, cast_to("bfloat16")):
        assert words in says(name, of(name, cast, n=bf16), "bfloat16")
    if name in ("expe", "expe-keys", "exqpe"):
        table = {"place": lambda row, x: [rounded(y) for y in row] + x[len(row) :]}
        for shown in (["table"], ["q", "k"], ["k"]):

            def seen(shown=shown, **broken):
                function = of(name, cast_to("bfloat16"), **table, **broken)
                return lambda **x: {key: y for key, y in function(**x).items() if key in shown}

            fine, line = conform.check(seen(), FILES[name], "bfloat16")
            assert fine, line
            assert words in says(name, seen(n=bf16), "bfloat16")


def crossed(q, k, positions):
    """Cosines as interleaved pairs have them, with the halves' rotation."""
    angle = positions[:, None, :, None] * np.repeat(10.0 ** -np.arange(4), 2)
    return tuple(x * np.cos(angle) + np.concatenate((-x[..., 4:], x[..., :4]), -1) * np.sin(angle) for x in (q, k))


def turn_parts(*parts):
    """RoPE of these of q, k and v."""
    right = of("rope-default")

    def function(**x):
        v = right(**x | {"k": x["v"]})["k"] if "v" in parts else x["v"]
        return right(**x | {"v": v}) if "v" in parts else {y: right(**x)[y] if y in parts else x[y] for y in "qk"}

    return function


def backwards(*names):
    return {name: np.array(FILES["shaw"]["parameters"][name])[::-1] for name in names}


def added(row, x):
    return [y + z for y, z in zip(row, x, strict=False)] + x[len(row) :]


SWAPPED, MISSING, SQUARED = "halves and interleaved pairs", "factor missing", "factor squared"
DENOMINATOR = "denominator"
LOW, HIGH = (8 * math.log(4096 / turns / 2 / math.pi) / 2 / math.log(1e4) for turns in (32, 1))
RAMPED = [10.0**-i * (1 - 0.75 * min(max((i - LOW) / (HIGH - LOW), 0), 1)) for i in range(4)]
BREAKS = [  # (case, how ours is broken, what must be said)
    ("rope-default", {"interleaved": True}, SWAPPED),
    ("rope-partial", {"interleaved": True}, SWAPPED),
    ("rope-default", {"n": lambda n: n + 1}, "off by one: positions are counted from 1"),
    ("rope-default", {"n": bf16}, "rounded positions: they were cast to bfloat16"),
    ("rope-default", {"n": fp16}, "rounded positions: they were cast to float16"),
    ("rope-default", {"f": lambda f: [-x for x in f]}, "the other direction"),
    ("rope-default", {"f": lambda f: torch.tensor(f).bfloat16().tolist()}, "rounded frequencies: inv_freq was cast to"),
    ("rope-default", {"angle": lambda a: float(torch.tensor(a).bfloat16())}, "rounded angles: they were cast to bf"),
    ("rope-default", {"angle": lambda a: float(np.float16(a))}, "rounded angles: they were cast to float16"),
    ("rope-default", {"exponent": lambda i, D: i / D}, f"{DENOMINATOR}: the exponent is i/D"),
    ("rope-linear", {"exponent": lambda i, D: 2 * i / (D - 2)}, f"{DENOMINATOR}: the exponent is 2i/(D - 2)"),
    ("rope-partial", {"exponent": lambda i, D: 2 * i / 8}, f"{DENOMINATOR}: the exponent is 2i/D, D the whole head"),
    ("rope-proportional", {"exponent": lambda i, D: 2 * i / 4}, f"{DENOMINATOR}: the exponent is 2i/r"),
    ("rope-default", {"exponent": lambda i, D: 2 * (i + 1) / D}, "off by one: the exponent's i"),
    ("rope-yarn", {"a": lambda a: 1.0}, "attention factor missing"),
    ("rope-yarn", {"a": lambda a: a * a}, "attention factor squared"),
    ("rope-yarn", {"f": lambda f: [1, 0.1, 0.01, 0.001], "a": lambda a: 1.0}, f"{MISSING}: all is as in rope_type"),
    ("rope-linear", {"f": lambda f: [x * 4 for x in f]}, f"{MISSING}: the frequencies are those of rope_type default"),
    ("rope-linear", {"f": lambda f: [x / 4 for x in f]}, f"{SQUARED}: the frequencies are scaled twice"),
    ("rope-llama3", {"f": lambda f: [x * 8 if x < 3e-4 else x for x in f]}, "no mistake that is known here"),
    ("rope-longrope", {"length": 10**6}, "length: the long factors, where the others belong"),
    ("rope-longrope", {"length": 5}, "length: the short factors, where the others belong"),
    ("rope-yarn", {"f": lambda f: [1.25 * 10.0**-i - x for i, x in enumerate(f)]}, "YaRN's ramp is inverted"),
    ("rope-dynamic", {"f": lambda f: [(10000 * 4 ** (8 / 6)) ** (-i / 4) for i in range(4)]}, "the static rule"),
    ("rope-partial", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     f"{MISSING}: the whole head turns"),
    ("rope-ntk", {"f": lambda f: [10.0**-i for i in range(4)]}, f"{MISSING}: the frequencies are those"),
    ("rope-default", {"root": 1.0}, f"{DENOMINATOR}: scores are not divided by sqrt(D)"),
    ("alibi", {"root": 4.0}, f"{DENOMINATOR}: scores are divided by D"),
    ("xpos", {"sign": -1}, "the factors of q and k are exchanged"),
    ("xpos", {"scale_base": 256.0}, SQUARED),
    ("xpos", {"scale_base": 1e30}, f"{MISSING}: RoPE alone"),
    ("rove", {"values": 0, "back": 0}, f"{MISSING}: values are not turned"),
    ("rove", {"back": 0}, "the output is not turned back: values are at absolute positions"),
    ("rove", {"values": -1, "back": 1}, "the other direction: values turn by minus the angle"),
    ("sinusoidal", {"halves": True}, SWAPPED),
    ("sinusoidal", {"exponent": lambda i, of_cosine: i / 8}, f"{DENOMINATOR}: the exponent is i/C"),
    ("sinusoidal", {"exponent": lambda i, of_cosine: i / 3}, f"{DENOMINATOR}: the exponent is 2i/(C - 2)"),
    ("learned", {"n": lambda n: n + 1}, "off by one: positions"),
    ("expe", {"theta": 1 / 1024}, "factor: theta is 1/(2 x context)"),
    ("expe", {"theta": 1.0}, MISSING),
    ("expe", {"theta": 2.0**-22}, SQUARED),
    ("expe", {"j": 0}, "j is missing"),
    ("expe", {"parts": "qkv"}, "the override is on qkv, not on qk"),
    ("expe-keys", {"parts": "qk"}, "the override is on qk, not on k"),
    ("exqpe", {"theta1": 1 / 16, "theta2": 1 / 2048}, "theta1 and theta2 are exchanged"),
    ("alibi", {"power": 2}, SQUARED),
    ("alibi", {"power": 0}, MISSING),
    ("alibi", {"times": -1}, "the bias has the other sign"),
    ("alibi", {"times": 0.5}, f"{DENOMINATOR}: the bias is divided by sqrt(D)"),
    ("t5", {"key": lambda n: n - 1}, "off by one: the distance is m - n + 1"),
    ("t5", {"max_distance": 16 * math.e}, f"{DENOMINATOR}: floor(16 ln(d/16)), not divided"),
    ("shaw", {"values": np.zeros((4, 4))}, f"{MISSING}: values[r] are not added"),
    ("shaw", {"max_distance": 2}, "off by one: distances end"),
    ("kerple", {"a": np.ones(2)}, f"{MISSING}: a is left out"),
    ("kerple", {"p": np.array([0.49, 2.56])}, f"{SQUARED}: p is applied twice"),
    ("fire", {"c": 1.0}, f"{MISSING}: c is left out"),
    ("fire", {"L": 256.0}, f"{DENOMINATOR}: psi(max(m, L/2))"),
    ("cope", {"divide": 2.0}, f"{DENOMINATOR}: gates are sigmoid(q.k/sqrt(D))"),
    ("cope", {"own": 0}, "off by one: a key does not count itself"),
    ("fox", {"first": 0}, "off by one: ln f_n, the key's own"),
    ("fox", {"gate_bias": np.zeros(2)}, MISSING),
    ("grape", {"gate_root": 1.0}, f"{DENOMINATOR}: v.q/|v| is not divided by sqrt(D)"),
    ("grape", {"power": 2}, SQUARED),
    ("pope", {"e": np.zeros((2, 4))}, f"{MISSING}: e is left out"),
    ("pope", {"exponent": 2}, f"{DENOMINATOR}: the exponent is 2c/D, not c/D"),
    ("pope", {"n": lambda n: -n}, "the other direction: turned by minus the angle"),
    ("cable", {"gate": lambda y: 1}, f"{MISSING}: g is left out"),
    ("cable", {"gate": lambda y: 1, "relu": lambda y: np.log(1 + np.exp(y))}, "as in the authors' code: softplus"),
    ("cable", {"sign": 1}, "the printed sign"),
    ("dape", {"added": 0}, "f alone is added: KERPLE's bias is not"),
    ("dape", {"decoding": {"n": stand}}, "in decoding alone, positions are not read: tokens are counted as they"),
    ("selective-rope", {"base": 10_000.0}, "another base: 10,000, not 500,000"),
    ("selective-rope", {"conv": FILES["selective-rope"]["parameters"]["conv"] * np.array([1, 0, 0, 0])},
     f"{MISSING}: the first tap of the convolution alone is read"),
    ("path", {"silu": lambda y: y}, f"{MISSING}: the silu is left out, as in the paper's equations"),
    ("path", {"strength_bias": np.zeros(2)}, f"{MISSING}: the bias of b is left out"),
    ("path-fox", {"divide": 2.0}, f"{DENOMINATOR}: the forget gates are divided by sqrt(D)"),
    ("path", {"conv": np.array(FILES["path"]["parameters"]["conv"])[:, ::-1]},
     "the convolution runs the other way"),
    ("dape", {"product": 1.0}, f"{DENOMINATOR}: f reads q.k, not q.k/sqrt(D)"),
    ("pope", {"root": math.sqrt(8)}, f"{DENOMINATOR}: scores are divided by sqrt(2D), not by sqrt(D)"),
    ("cable", {"whose": 1}, "g is the key's, not the query's"),
    ("softmax-log", {"s": np.ones(2)}, f"{MISSING}: s is left out"),
    ("softmax-log", {"count": lambda n: n + 1}, "off by one: ln(n + 1)"),
    ("rope-proportional", {"f": lambda f: [1, 0.01]}, "as partial RoPE has it"),
    ("rope-partial", {"f": lambda f: [1, 0.1, 0, 0]}, "as proportional RoPE has it"),
    ("rope-llama3", {"f": lambda f: [1, 0.1, 0.01 / 8, 0.001 / 8]}, "there is no ramp"),
    ("rope-yarn", {"f": lambda f: RAMPED}, "the ends of YaRN's ramp are not rounded"),
    ("sinusoidal", {"fs": (math.cos, math.sin)}, "sines and cosines are exchanged"),
    ("expe", {"parts": "k"}, "the override is on k, not on qk"),
    ("expe", {"parts": "q"}, "the override is on q, not on qk"),
    ("expe-keys", {"parts": "q"}, "the override is on q, not on k"),
    ("expe-keys", {"parts": "qkv"}, "the override is on qkv, not on k"),
    ("exqpe", {"late": 5}, "off by one: floor((n - j)/l) raises"),
    ("alibi", {"slope": lambda h, H: 2 ** (-8 * (h + 1) / H)}, "slopes of 2^(-8h/H), which are for H a power of two"),
    ("alibi", {"slope": lambda h, H: 2 ** (-(h + 1) * H / 8)}, f"{DENOMINATOR}: slopes of 2^(-h H/8)"),
    ("t5", {"buckets": 16}, "buckets of both sides"),
    ("shaw", {"times": 2.0}, f"{DENOMINATOR}: q.keys[r] is not divided"),
    ("kerple", {"p": np.array([0.3, 0.9]), "a": np.array([0.7, 1.6])}, "p and a are exchanged"),
    ("fire", {"grows": 0}, f"{DENOMINATOR}: psi(L) at every m"),
    ("fox", {"first": 0, "last": 0}, "off by one: ln f_m, the query's own, is left out"),
    ("grape", {"norm": 1.0}, f"{DENOMINATOR}: v.q/sqrt(D) is not divided by |v|"),
    ("softmax-log", {"count": lambda n: 6}, "n is the length of the array"),
    ("rope-default", {"n": lambda n: n - 1}, "off by one: positions are counted from -1"),
    ("kerple", {"key": lambda n: n + 1}, "off by one: the distance is m - n - 1"),
    ("alibi", {"times": 0}, "positions are not read: all are taken for 0"),
    ("rope-default", {"n": stand}, "positions are not read: tokens are counted as they stand"),
    ("rope-default", {"n": bf16, "f": lambda f: [*map(rounded, f)], "angle": rounded},
     "rounded positions, inv_freq and angles"),
    ("sinusoidal", {"fs": (lambda x: rounded(math.sin(x)), lambda x: rounded(math.cos(x)))},
     "rounded table: it was cast to bfloat16"),
    ("t5", {"weight": torch.tensor(FILES["t5"]["parameters"]["weight"]).bfloat16().double().numpy()},
     "rounded bias: it was cast to bfloat16"),
    ("rope-partial", {"f": lambda f: [*f, 0, 0]}, "halves of the whole head: (i, i + D/2) turns"),
    ("rope-partial", {"first": 4}, "the last r dimensions of a head turn"),
    ("rope-proportional", {"f": lambda f: f[:2]}, "halves of what turns: (i, i + r/2) turns"),
    ("rope-yarn", {"rope_parameters": FILES["rope-yarn"]["parameters"]["rope_parameters"]
                   | {"original_max_position_embeddings": 16384}}, "length: L is max_position_embeddings"),
    ("rope-yarn", {"f": lambda f: [0.25 * 10.0**-i for i in range(4)]}, "there is no ramp: all frequencies"),
    ("rope-yarn-mscale", {"a": lambda a: 1 + 0.1 * math.log(4)}, "mscale is not read"),
    ("alibi", {"slope": lambda h, H: 2 ** (-2 * (h + 1))}, "slopes of the next higher power of two"),
    ("alibi", {"decoding": {"times": 0}}, "in decoding alone, the bias is 0"),
    ("fox", {"decoding": {"first": 9}}, "in decoding alone, the bias is 0"),
    ("alibi", {"decoding": {"n": stand}}, "in decoding alone, positions are not read: tokens are counted as they"),
    ("rope-yarn", {"decoding": {"n": lambda n: 0 * n}}, "in decoding alone, the new token's position is taken for 0"),
    ("expe", {"decoding": {"n": lambda n: 0 * n + 5}}, "in decoding alone, the new token's position is the number of"),
    ("rope-partial", {"decoding": {"n": lambda n: n + 1}},
     "in decoding alone, off by one: the new token's position is one more"),
    ("expe-keys", {"decoding": {"n": lambda n: n - 1}},
     "in decoding alone, off by one: the new token's position is one less"),
    ("softmax-sinks", {"b": np.array([-1e9, -1e9])}, f"{MISSING}: a plain softmax"),
    ("softmax-sinks", {"b": np.log([0.5, 1.2])}, "b is added to the denominator, not exp(b)"),
    ("softmax-stick", functools.partial(OURS["softmax-sinks"], b=np.array([-1e9, -1e9])), "a plain softmax"),
    ("softmax-stick", {"own": 0}, "a query's own key does not get what is left"),
    ("softmax-stick", {"own": 0, "before": lambda m: range(m, -1, -1)}, "the own key takes a share by its score"),
    ("softmax-stick", {"before": range}, "order: the first key takes its share first"),
    ("rope-default", crossed, "interleaved cosines and sines (0, 0, 1, 1, ..) with pairs"),
    ("rope-default", turn_parts("q"), "q alone is turned"),
    ("rope-default", turn_parts("k"), "k alone is turned"),
    ("rope-default", turn_parts("q", "k", "v"), "v is turned too"),
    ("rope-yarn", {"f": lambda f: [x * 10 ** (-i / 4) for i, x in enumerate(f)]}, "another base: 100,000, not"),
    ("sinusoidal", {"base": 1000.0}, "another base: 1,000, not"),
    ("rope-linear", {"f": lambda f: [x * 16 for x in f]}, "factor inverted: frequencies are multiplied"),
    ("rope-ntk", {"f": lambda f: [4e4 ** (-i / 4) for i in range(4)]}, "the exponent D/(D-2) is missing"),
    ("rope-dynamic", {"f": lambda f: [10 ** -i * (10 * f[1]) ** (0.75 * i) for i in range(4)]},
     "the exponent D/(D-2) is missing"),
    ("rope-llama3", {"f": lambda f: [1.125 * 10.0**-i - x for i, x in enumerate(f)]},
     "llama3's ramp is inverted: fast pairs are stretched"),
    ("rope-llama3", {"f": lambda f: [*f[:2], 1.125 * 0.01 - f[2], f[3]]}, "llama3's ramp is inverted between its ends"),
    ("sinusoidal", {"exponent": lambda i, of_cosine: (2 * i + of_cosine) / 8}, f"{DENOMINATOR}: the exponent is j/C"),
    ("alibi", {"slope": lambda h, H: 2 ** (-8 * h / H)}, "slopes from h = 0: 2^(-8h/H)"),
    ("alibi", {"slope": lambda h, H: [1, 2**-4, 2**-2][h]}, "slopes from h = 0 in the lower power of two alone"),
    ("alibi", {"slope": lambda h, H: [1, 2**-4, 1][h]}, "slopes from h = 0 in both powers of two"),
    ("alibi", {"slope": lambda h, H: [2**-2, 2**-8, 2**-4][h]}, "slopes reversed: the steepest is the last head's"),
    ("alibi", {"slope": lambda h, H: 2 ** (-8 * (H - h) / H)}, "slopes reversed: the steepest of 2^(-8h/H)"),
    ("alibi", {"slope": lambda h, H: [2**-8, 2**-4, 2**-2][h]}, "slopes reversed within the lower power of two"),
    ("t5", {"whole": math.ceil}, "rounded up: ceil(16 ln(d/16)"),
    ("shaw", backwards("keys", "values"), "the table is reversed: [max_distance - r] in keys and values"),
    ("shaw", backwards("keys"), "the keys' table is reversed"),
    ("shaw", backwards("values"), "the values' table is reversed"),
    ("expe", {"place": added}, "the rows are added, and do not override"),
    ("expe-keys", {"place": added}, "the rows are added, and do not override"),
    ("expe", {"place": added, "parts": "qkv"}, "the rows are added, in the value too"),
    ("expe", {"place": lambda row, x: x[: -len(row)] + row}, "the last l dimensions are overridden, not the first"),
    ("exqpe", {"place": lambda row, x: x[: -len(row)] + row}, "the last l dimensions are overridden, not the first"),
    ("fox", {"gate": lambda y: -np.log(1 + np.exp(y))}, "ln(1 - f) is summed, not ln f"),
    ("fox", {"gate": lambda y: 1 / (1 + np.exp(-y))}, "f is summed, not ln f"),
    *[("rope-default", {"rope_parameters": {"rope_type": "default", "rope_theta": float(base)}},
       f"another base: {base:,}, not 10,000") for base in BASES],
]


@pytest.mark.parametrize("name, broken, words", BREAKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREAKS)])
def test_each_mistake_is_named_by_breaking_ours(name, broken, words):
    line = says(name, of(name, **broken) if isinstance(broken, dict) else broken)
    assert line.partition("it looks like ")[2].startswith(words), line


def test_no_mistake_is_known_that_is_not_made_here():
    known = {mistake["looks like"] for file in FILES.values() for mistake in file["mistakes"]}
    assert not [words for words in known if not any(words.startswith(said) for _, _, said in BREAKS)]


@pytest.mark.parametrize("name, broken, words", [
    b for b in BREAKS if b[0][:5] == "rope-" and "known" not in b[2] and isinstance(b[1], dict)])
def test_q_and_k_in_float32_are_enough_to_name_it(name, broken, words):
    """As most users will give it: q and k alone, of float32 (a mistake of the scores cannot be seen there)."""

    def rotation(**everything):
        found = of(name, **broken)(**everything)
        return found["q"].astype(np.float32), found["k"].astype(np.float32)

    fine, line = conform.check(rotation, FILES[name])
    assert fine if "root" in broken else words in line, line


def test_only_what_is_wrong_is_named_and_only_by_mistakes_that_change_it():
    def in_float32(q, k, positions):
        """float64 all through but for the product of positions and frequencies."""
        angles = positions.astype(np.float32)[:, None, :, None] * (10000.0 ** -(np.arange(4) / 4)).astype(np.float32)
        turn = np.exp(1j * angles.astype(float))
        z = [(x[..., :4] + 1j * x[..., 4:]) * turn for x in (q, k)]
        return tuple(np.concatenate((y.real, y.imag), -1) for y in z)

    assert "rounded numbers: they are right to float32" in says("rope-default", in_float32)
    assert conform.check(in_float32, FILES["rope-default"], "float32")[0]

    def of_each_length(**everything):
        """Of dynamic's rule, by the length of each sequence, where that of the whole batch belongs."""
        names = ("positions", "key_positions", "q", "k", "v", "cached_k", "cached_v")
        parts = []
        for b in range(len(everything["q"])):
            alone = everything | {name: everything[name][b : b + 1] for name in names if name in everything}
            parts.append(of("rope-dynamic")(**alone | {"length": int(alone["key_positions"].max()) + 1}))
        return tuple(np.concatenate([part[name] for part in parts]) for name in "qk")

    assert "the last sequence's: it is right" in says("rope-dynamic", of_each_length)

    yarn = of("rope-yarn"), of("rope-yarn", a=lambda a: 1.0)
    line = says("rope-yarn", lambda **x: (yarn[0](**x)["q"], yarn[1](**x)["k"]))
    assert "k[0, 0, 0, 0]" in line and "attention factor missing" in line


def test_arrays_of_any_type_and_shapes_that_stand_for_the_whole_batch():
    def alibi(positions, key_positions, q):
        assert isinstance(q, np.ndarray) and q.dtype == np.float64 and positions.dtype == np.int64
        return -alibi_slopes(3)[:, None, None] * (positions[:, None, :, None] - key_positions[:, None, None, :])

    kinds = (lambda x: x, torch.from_numpy, lambda x: x.tolist(), lambda x: x.astype(np.float32), memoryview,
             lambda x: (x,), lambda x: {"bias": x})
    for kind in kinds:
        given = lambda positions, key_positions, q, kind=kind: kind(alibi(positions, key_positions, q))  # noqa: E731
        fine, line = conform.check(given, FILES["alibi"])
        assert fine, line
    by_key = lambda key_positions: alibi_slopes(3)[:, None, None] * key_positions[:, None, None, :]  # noqa: E731
    assert conform.check(by_key, FILES["alibi"])[0]  # (B, H, 1, S): what it lacks a softmax drops
    assert not conform.check(lambda key_positions: -by_key(key_positions), FILES["alibi"])[0]


def test_the_line_says_the_place_the_right_value_and_a_multiple():
    weight = np.array(FILES["learned"]["parameters"]["weight"])
    line = says("learned", lambda positions: weight[positions] / np.sqrt(8))
    right = FILES["learned"]["parts"]["near"]["outputs"]["table"][0][0][0]
    assert f"near: table[0, 0, 0] at position 0 is {right / math.sqrt(8):.6g}, not {right:.6g}" in line
    assert line.endswith("the right numbers, times 0.353553")
    assert "the shape (2, 6, 3), not (2, 6, 8)" in says("learned", lambda positions: weight[positions][..., :3])
    assert "is nan, not" in says("learned", lambda positions: weight[positions] * np.nan)
    line = says("alibi", lambda q, key_positions: np.full((*q.shape[:3], key_positions.shape[1]), np.inf))
    assert "is inf, not 0" in line and line.endswith("an overflow or a division by 0: not all numbers are finite")


MINE = """
import numpy as np

def right(q, k, positions, rope_parameters):
    angles = positions[:, None, :, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    def turn(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1)
    return turn(q), turn(k)

def wrong(q, k, positions):
    return right(q, k, positions + 1, {})

def asks(q, colour): ...
def fails(q): return q[99]
def other(q): return {"queries": q}
def leaves(q): raise SystemExit(0)
def imaginary(q, k): return q + 1e-9j, k
def ragged(q): return [q, [q]]
"""


def test_the_command_needs_numpy_alone_and_answers_in_one_line(tmp_path, monkeypatch):
    tree = ast.parse((ROOT / "interop/conform.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names - sys.stdlib_module_names == {"numpy"}
    shutil.copy(ROOT / "interop/conform.py", tmp_path)
    shutil.copytree(ROOT / "interop/vectors", tmp_path / "vectors")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "over.py").write_text("import sys; sys.exit(0)")
    done = subprocess.run([sys.executable, "conform.py", "mine:right", "--case", "rope-default"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("rope-default: right; "), done
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        return command("interop.conform", *arguments, cwd=tmp_path)

    done = run("mine:wrong", "--case", "rope-default")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (1, "", 1) and "off by one" in done.stdout
    assert "factor missing" in run("mine:right", "--case", "rope-linear").stdout
    assert run("--list").stdout.count("\n") == len(FILES)
    for arguments, words in [
        (("mine:right", "--case", "rope"), "one of alibi"),
        (("mine", "--case", "alibi"), "is no MODULE:FUNCTION"),
        (("over:f", "--case", "alibi"), "over:f is no MODULE:FUNCTION here: SystemExit: 0"),
        (("mine:asks", "--case", "alibi"), "asks for 'colour', and there are positions"),
        (("mine:fails", "--case", "alibi"), "mine.py:15: IndexError"),
        (("mine:leaves", "--case", "alibi"), "mine.py:17: SystemExit: 0"),
        (("mine:imaginary", "--case", "rope-default"), "q must be an array of real numbers, got one of complex128"),
        (("mine:ragged", "--case", "rope-default"), "inhomogeneous"),
        (("mine:other", "--case", "t5"), "must return some of bias, scores, out, got queries"),
    ]:
        assert words in refused(run(*arguments)), arguments


THEIRS = {name: elsewhere.hf_rope for name in FILES if name.startswith("rope-")}
THEIRS |= {"alibi": elsewhere.hf_alibi, "t5": elsewhere.hf_t5, "softmax-sinks": elsewhere.hf_sinks}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", THEIRS)
def test_transformers_encodings_are_right(name):
    need("transformers")
    fine, line = conform.check(THEIRS[name], FILES[name])
    assert fine and ("inv_freq" in line) == name.startswith("rope-"), line
