"""interop/conform.py: right functions pass, in every type of array, and it names the mistakes that are made here.

The functions that are broken are the loops of tests/test_vectors.py; the mistakes in vectors/ come from other code.
The quick tests have some of the files and one mistake of each kind; the slow ones have all files.
"""

import ast
import functools
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, refused
from test_vectors import EACH, FILES, OURS, given, turned

from expe import alibi_slopes
from interop import conform


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

    def function(**everything):
        mine = in_format(given(name, everything, ours), dtype)
        found = ours(**mine | broken | (decoding or {} if "cached_k" in everything else {}))
        return {key: x if key in exact else cast(x) for key, x in found.items() if key in FILES[name]["returns"]}

    return function


def says(name, function, dtype=None):
    fine, line = conform.check(function, FILES[name], dtype)
    assert not fine, line
    return line


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", EACH)
def test_ours_is_right_in_float64_and_float32(name, dtype):
    ours = of(name, dtype=dtype)
    fine, line = conform.check(lambda **x: {key: np.asarray(y, dtype) for key, y in ours(**x).items()}, FILES[name])
    assert fine and line.startswith("right"), line


def cast_to(dtype):
    """numpy.asarray does not know torch's bfloat16: such numbers come as float32, and --dtype says what they were."""
    return lambda x: torch.as_tensor(np.asarray(x)).to(getattr(torch, dtype)).float()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", EACH)
def test_what_is_cast_at_the_end_alone_is_right_by_its_own_tolerance(name, dtype):
    parts = {part: x for part, x in FILES[name]["parts"].items() if (dtype, part) != ("float16", "far")}
    data = FILES[name] | {"parts": parts}  # scores of 10^5 do not fit into float16
    fine, line = conform.check(of(name, cast_to(dtype)), data, dtype)
    assert fine, line
    assert not conform.check(of(name, cast_to(dtype)), data, "float64")[0]


def bf16(n):
    return torch.from_numpy(np.asarray(n, float)).bfloat16().double().numpy().astype(int)


def stand(n):
    return np.broadcast_to(np.arange(n.shape[-1]), n.shape)


def rounded(x):
    return float(torch.tensor(x).bfloat16())


@pytest.mark.parametrize("name", ["rope-default", "sinusoidal", "expe", "alibi", "t5"])
def test_positions_rounded_to_bf16_are_named_under_its_tolerance(name):
    for cast in (lambda x: x, cast_to("bfloat16")):
        line = says(name, of(name, cast, n=bf16), "bfloat16")
        assert "rounded positions: they were cast to bfloat16" in line


def instead(*f):
    return {"f": lambda _: [*f]}


G = [10.0**-i for i in range(4)]
BREAKS = [  # (case, how ours is broken, what must be said, None if it has no name): one of each kind
    ("rope-default", {"interleaved": True}, "halves and interleaved pairs"),
    ("rope-default", {"n": lambda n: n + 1}, "off by one: positions are counted from 1"),
    ("rope-default", {"n": stand}, "positions are not read: tokens are counted as they stand"),
    ("rope-default", {"n": bf16}, "rounded positions: they were cast to bfloat16"),
    ("rope-default", {"f": lambda f: [*map(rounded, f)]}, "rounded frequencies: inv_freq was cast to"),
    ("rope-default", {"root": 1.0}, "denominator: scores are not divided by sqrt(D)"),
    ("rope-default", instead(*(5e5 ** (-i / 4) for i in range(4))), "another base: 500,000, not 10,000"),
    ("rope-partial", {"first": 4}, "the last r dimensions of a head turn"),
    ("rope-partial", {"decoding": {"n": lambda n: n + 1}}, "in decoding alone, off by one: the new token's"),
    ("rope-linear", {"f": lambda f: f / 4}, "factor squared: the frequencies are scaled twice"),
    ("mrope-sections", {"n": lambda n: n[[0, 3, 3, 1, 1, 1]]}, "height and width are exchanged"),
    ("rope-yarn", {"a": lambda a: 1.0}, "attention factor missing"),
    ("rope-yarn", {"f": lambda f: [1.25 * x - y for x, y in zip(G, f, strict=True)]}, "YaRN's ramp is inverted"),
    ("rope-llama3", {"f": lambda f: [x * 8 if x < 3e-4 else x for x in f]}, None),
    ("expe", {"theta": 1 / 1024}, "factor: theta is 1/(2 x context)"),
    ("expe", {"parts": "k"}, "the override is on k, not on qk"),
    ("exqpe", {"theta1": 1 / 16, "theta2": 1 / 2048}, "theta1 and theta2 are exchanged"),
    ("alibi", {"times": -1}, "the bias has the other sign"),
    ("alibi", {"slope": lambda h, H: [2**-2, 2**-8, 2**-4][h]}, "slopes reversed: the steepest is the last head's"),
    ("alibi", {"decoding": {"times": 0}}, "in decoding alone, the bias is 0"),
    ("kerple", {"a": np.ones(2)}, "factor missing: a is left out"),
]


def known(name):
    """How many mistakes a file can name."""
    return len({mistake["looks like"] for mistake in FILES[name]["mistakes"]})


@pytest.mark.parametrize("name, broken, words", BREAKS, ids=[str(words) for _, _, words in BREAKS])
def test_each_mistake_is_named_by_breaking_ours(name, broken, words):
    function = of(name, **broken)
    line = says(name, function)
    if words is None:
        assert line.endswith(f"none of the {known(name)} mistakes that this check can name"), line
        return
    assert line.partition("it looks like ")[2].startswith(words), line
    if name[:5] == "rope-" and "root" not in broken:  # as most users will give it
        assert words in says(name, lambda **x: tuple(function(**x)[part].astype(np.float32) for part in "qk"))


def fire_from_1(positions, key_positions, c, L, w1, b1, w2, first=1):
    m = positions[:, :, None] + first
    d = np.maximum(positions[:, :, None] - key_positions[:, None], 0)
    y = np.log1p(c * (d + first)) / np.log1p(c * np.maximum(m, L))
    return np.moveaxis(np.maximum(y[..., None] * w1 + b1, 0) @ w2.T, -1, 1)


def yarn(betas=(32, 1), latest=63, attention=None):
    """Angles of YaRN by the betas, in a head whose ramp ends at the latest at this pair."""
    def function(q, k, positions, rope_parameters, head_dim):
        L, s = rope_parameters["original_max_position_embeddings"], rope_parameters["factor"]
        i = np.arange(head_dim // 2)
        low, high = (head_dim * math.log(L / (2 * math.pi * beta)) / (2 * math.log(10_000)) for beta in betas)
        low, high = max(math.floor(low), 0), min(math.ceil(high), latest)
        f = 10_000.0 ** (-2 * i / head_dim)
        ramp = np.clip((i - low) / ((high - low) or 0.001), 0, 1)
        f = f * (1 - ramp + ramp / s)
        pairs = [*zip(i, i + head_dim // 2, strict=True)]
        a = 0.1 * math.log(s) + 1
        return tuple(turned(x, positions, f, factor, pairs)
                     for x, factor in zip((q, k), attention or (a, a), strict=True))
    return function


WHOLE = [  # implementations that are wrong in one thing: (case, function, what must be said)
    ("rope-yarn", yarn((1, 32)), "YaRN's betas are exchanged"),
    ("rope-yarn", yarn(attention=(1 + 0.1 * math.log(4), 1)), "attention factor on q alone"),
    ("rope-yarn-64", yarn(latest=31), "YaRN's ramp ends at D/2 - 1 at the latest"),
    ("fire", fire_from_1, "off by one: m and m - n are counted from 1"),
]


@pytest.mark.parametrize("name, function, words", WHOLE, ids=[words for _, _, words in WHOLE])
def test_wrong_implementations_are_named(name, function, words):
    assert says(name, function).partition("it looks like ")[2].startswith(words), says(name, function)


@pytest.mark.parametrize("name, function", [
    ("rope-yarn", yarn()), ("rope-yarn-64", yarn()), ("fire", functools.partial(fire_from_1, first=0))])
def test_the_functions_that_are_broken_here_are_right_otherwise(name, function):
    fine, line = conform.check(function, FILES[name])
    assert fine, line


def test_a_mistake_that_the_last_sequence_does_not_show_has_no_name():
    def wrong(positions, key_positions, q):
        bias = -alibi_slopes(3)[:, None, None] * (positions[:, None, :, None] - key_positions[:, None, None, :])
        bias[0] *= len(bias)                                            # the part near has two sequences
        return bias

    assert says("alibi", wrong).endswith(f"none of the {known('alibi')} mistakes that this check can name")


COMMON = [  # within bf16's tolerance: (case, how ours is broken, what must be said)
    ("rope-yarn", {"a": lambda a: 1 + 0.1 * math.log2(4)}, "attention factor of the base-2 logarithm"),
    ("rope-yarn", {"a": lambda a: a * 0.975}, "the right numbers, times 0.97"),
    ("rope-longrope", {"a": lambda a: 1.0}, "attention factor missing"),
    ("alibi", {"times": 0.97}, "the right numbers, times 0.9"),
]


@pytest.mark.parametrize("name, broken, words", COMMON, ids=[f"{c[0]}-{c[2]}" for c in COMMON])
def test_a_common_factor_does_not_hide_in_half_precision(name, broken, words):
    def function(**x):  # q and k, or the bias, as most users will give them
        found = of(name, cast_to("bfloat16"), **broken)(**x)
        return {key: y for key, y in found.items() if key in ("q", "k", "bias")[: 2 if "q" in found else 3]}

    assert says(name, function, "bfloat16").partition("it looks like ")[2].startswith(words)


def test_an_attention_factor_on_q_alone_does_not_hide_in_half_precision():
    name, function, words = WHOLE[1]

    def half(q, k, positions, rope_parameters, head_dim):
        return tuple(map(cast_to("bfloat16"), function(q, k, positions, rope_parameters, head_dim)))

    assert says(name, half, "bfloat16").partition("it looks like ")[2].startswith(words)


@pytest.mark.parametrize("name", EACH)
def test_independent_roundings_of_bf16_are_right(name):
    rng = np.random.default_rng(0)
    for _ in range(3):
        noisy = lambda y: np.asarray(y) * (1 + 1.5 * 2**-8 * rng.uniform(-1, 1, np.shape(y)))  # noqa: E731
        fine, line = conform.check(of(name, noisy), FILES[name], "bfloat16")
        assert fine, line


@pytest.mark.parametrize("name", EACH)
def test_each_mistake_of_a_file_is_named_by_its_own_numbers(name):
    for part, data in FILES[name]["parts"].items():
        x, right = ({key: np.array(y, float) for key, y in data[of].items()} for of in ("inputs", "outputs"))
        mistakes = [{"looks like": mistake["looks like"], "part": part, "outputs": conform.outputs_of(mistake, x)}
                    for mistake in FILES[name]["mistakes"] if mistake["part"] == part]
        file = FILES[name] | {"parts": {part: data | {"inputs": x, "outputs": right}}, "mistakes": mistakes}
        for mistake in mistakes:
            wrong = mistake["outputs"]
            found = {key: np.concatenate((y[:-1], wrong.get(key, y[-1:]))) if y.ndim > 2 else wrong.get(key, y)
                     for key, y in right.items()}
            fine, line = conform.check(lambda found=found, **x: found, file)
            assert not fine and line.endswith(f"it looks like {mistake['looks like']}"), line


def test_arrays_of_any_type_and_shapes_that_stand_for_the_whole_batch():
    def alibi(positions, key_positions, q):
        assert isinstance(q, np.ndarray) and q.dtype == np.float64 and positions.dtype == np.int64
        return -alibi_slopes(3)[:, None, None] * (positions[:, None, :, None] - key_positions[:, None, None, :])

    for kind in (torch.from_numpy, np.ndarray.tolist, lambda x: (x,), lambda x: {"bias": x}):
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
    assert "the shape (3, 6, 3), not (3, 6, 8)" in says("learned", lambda positions: weight[positions][..., :3])
    assert "not all numbers are finite" in says("learned", lambda positions: weight[positions] * np.nan)


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
"""


def test_the_command_needs_numpy_alone_and_answers_in_one_line(tmp_path, monkeypatch):
    tree = ast.parse((ROOT / "interop/conform.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names - sys.stdlib_module_names == {"numpy"}
    shutil.copy(ROOT / "interop/conform.py", tmp_path)
    shutil.copytree(ROOT / "interop/vectors", tmp_path / "vectors")
    (tmp_path / "mine.py").write_text(MINE)
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
        (("mine:asks", "--case", "alibi"), "asks for 'colour', and there are positions"),
        (("mine:fails", "--case", "alibi"), "mine.py:15: IndexError"),
    ]:
        assert words in refused(run(*arguments)), arguments


def of_transformers(q, k, positions, rope_parameters, max_position_embeddings, head_dim, dtype=torch.float32):
    """GPT-NeoX's rotation, which knows every rope_type and turns a part of a head. (ntk is another base.)"""
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"partial_rotary_factor": 1.0} | rope_parameters
    if parameters["rope_type"] == "ntk":
        theta = 10000.0 * parameters["factor"] ** (head_dim / (head_dim - 2))
        parameters = parameters | {"rope_type": "default", "rope_theta": theta}
    config = GPTNeoXConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=parameters,
                           max_position_embeddings=max_position_embeddings)
    rotary, q, k = GPTNeoXRotaryEmbedding(config), torch.tensor(q).to(dtype), torch.tensor(k).to(dtype)
    q, k = apply_rotary_pos_emb(q, k, *rotary(q, torch.tensor(positions)))
    return {"q": q.float(), "k": k.float(), "inv_freq": rotary.inv_freq, "attention_factor": rotary.attention_scaling}


def mrope_of_transformers(q, k, positions, rope_parameters, head_dim, dtype=torch.float32):
    """Qwen2-VL's rotation by sections, Qwen3-VL's where the axes are interleaved."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

    config, rotary = ((qwen3.Qwen3VLTextConfig, qwen3.Qwen3VLTextRotaryEmbedding)
                      if rope_parameters["mrope_interleaved"] else
                      (qwen2.Qwen2VLTextConfig, qwen2.Qwen2VLRotaryEmbedding))
    rotary = rotary(config(hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=2, head_dim=head_dim,
                           rope_parameters=rope_parameters))
    q, k = torch.tensor(q).to(dtype), torch.tensor(k).to(dtype)
    q, k = qwen3.apply_rotary_pos_emb(q, k, *rotary(q, torch.tensor(positions)))
    return {"q": q.float(), "k": k.float(), "inv_freq": rotary.inv_freq}


def lerope_of_transformers(q, k, positions, base, alpha, dtype=torch.float32):
    """Mistral Large 4's rotation: pairs (2i, 2i + 1) of what goes in, and (i, i + D/2) of what comes out."""
    from transformers.models.mistral_large4 import modeling_mistral_large4 as theirs

    rope = {"rope_type": "default", "rope_theta": base}
    rotary = theirs.MistralLarge4TextRotaryEmbedding(theirs.MistralLarge4TextConfig(
        qk_rope_head_dim=q.shape[-1], head_dim=q.shape[-1], rope_parameters=rope))
    rotary.alpha.copy_(torch.tensor(alpha))
    q, k = (torch.tensor(x).to(dtype).unflatten(-1, (2, -1)).mT.flatten(-2) for x in (q, k))
    q, k = theirs.apply_rotary_pos_emb_interleave(q, k, *rotary(q, torch.tensor(positions)))
    return q.float(), k.float()


@torch.no_grad()
def relative_bank_of_transformers(positions, key_positions, h, weight, bank):
    """Inkling's bias in float32, sequence by sequence."""
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    theirs = InklingRelativeLogits(*bank.shape)
    theirs.load_state_dict({"proj": torch.tensor(bank)})
    r = torch.tensor(h @ weight.T).float().unflatten(-1, (-1, len(bank)))                     # (B, T, H, R)
    return [theirs(x[None], *map(torch.tensor, n))[0] for x, *n in zip(r, positions, key_positions, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name, theirs, dtype", [
    ("lerope", lerope_of_transformers, "float32"), ("relative-bank", relative_bank_of_transformers, "float32"),
    ("lerope", functools.partial(lerope_of_transformers, dtype=torch.bfloat16), "bfloat16")])
def test_lerope_and_relative_bank_of_transformers_are_right(name, theirs, dtype):
    need("transformers")
    fine, line = conform.check(theirs, FILES[name], dtype)
    assert fine, line


@pytest.mark.filterwarnings("ignore")
def test_every_rope_of_transformers_is_right():
    need("transformers")
    for name in (name for name in FILES if "rope-" in name and name != "selective-rope"):
        theirs = mrope_of_transformers if name[0] == "m" else of_transformers
        half = functools.partial(theirs, dtype=torch.bfloat16)
        for function, dtype in ((theirs, "float32"), (half, "bfloat16")):
            fine, line = conform.check(function, FILES[name], dtype)
            assert fine and "inv_freq" in line, f"{name}: {line}"
