"""interop/conform.py: right functions pass, in every type of array, and it names each mistake that is made here.

The functions that are broken are the loops of tests/test_vectors.py; the mistakes in vectors/ come from other code.
"""

import ast
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, refused
from test_vectors import FILES, OURS, given

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


READS_ORDER = ("learned", "cope", "fox", "cable", "selective-rope", "path", "path-fox", "softmax-log", "softmax-sinks",
               "softmax-stick")  # or has no position above 256


@pytest.mark.parametrize("name", [name for name in FILES if name not in READS_ORDER])
def test_positions_rounded_to_bf16_are_named_under_its_tolerance(name):
    for cast in (lambda x: x, cast_to("bfloat16")):
        line = says(name, of(name, cast, n=bf16), "bfloat16")
        assert "rounded positions: they were cast to bfloat16" in line


def parameter(name, key):
    return np.array(FILES[name]["parameters"][key])


def instead(*f):
    return {"f": lambda _: [*f]}


G = [10.0**-i for i in range(4)]
MISSING, DENOMINATOR = "factor missing", "denominator"
DECODING = "in decoding alone, "
BREAKS = {  # case: [(how ours is broken, what must be said)]
    "rope-default": [
        ({"interleaved": True}, "halves and interleaved pairs"),
        ({"n": lambda n: n + 1}, "off by one: positions are counted from 1"),
        ({"n": stand}, "positions are not read: tokens are counted as they stand"),
        ({"n": bf16}, "rounded positions: they were cast to bfloat16"),
        ({"f": lambda f: [*map(rounded, f)]}, "rounded frequencies: inv_freq was cast to"),
        ({"angle": rounded}, "rounded angles: they were cast to bf"),
        ({"f": np.sqrt}, f"{DENOMINATOR}: the exponent is i/D"),
        ({"root": 1.0}, f"{DENOMINATOR}: scores are not divided by sqrt(D)"),
        (instead(*(5e5 ** (-i / 4) for i in range(4))), "another base: 500,000, not 10,000")],
    "rope-partial": [
        (instead(1, 0.1), f"{DENOMINATOR}: the exponent is 2i/D, D the whole head"),
        ({"first": 4}, "the last r dimensions of a head turn"),
        ({"decoding": {"n": lambda n: n + 1}}, DECODING + "off by one: the new token's position is one more")],
    "rope-proportional": [(instead(1, 0.01), "as partial RoPE has it")],
    "rope-linear": [({"f": lambda f: f / 4}, "factor squared: the frequencies are scaled twice")],
    "rope-ntk": [(instead(*(4e4 ** (-i / 4) for i in range(4))), "the exponent D/(D-2) is missing")],
    "rope-dynamic": [(instead(*((10000 * 4 ** (8 / 6)) ** (-i / 4) for i in range(4))), "the static rule")],
    "rope-yarn": [
        ({"a": lambda a: 1.0}, "attention factor missing"),
        ({"f": lambda f: [1.25 * x - y for x, y in zip(G, f, strict=True)]}, "YaRN's ramp is inverted"),
        ({"decoding": {"n": lambda n: 0 * n}}, DECODING + "the new token's position is taken for 0")],
    "rope-yarn-mscale": [({"a": lambda a: 1 + 0.1 * math.log(4)}, "mscale is not read")],
    "rope-longrope": [({"length": 10**6}, "length: the long factors, where the others belong")],
    "rope-llama3": [
        ({"f": lambda f: [x * 8 if x < 3e-4 else x for x in f]}, "no mistake that is known here"),
        ({"f": lambda f: [*f[:2], 1.125 * 0.01 - f[2], f[3]]}, "llama3's ramp is inverted between its ends")],
    "sinusoidal": [
        ({"halves": True}, "halves and interleaved pairs"),
        ({"fs": (lambda x: rounded(math.sin(x)), lambda x: rounded(math.cos(x)))}, "rounded table: it was cast to")],
    "expe": [
        ({"theta": 1 / 1024}, "factor: theta is 1/(2 x context)"), ({"j": 0}, "j is missing"),
        ({"parts": "k"}, "the override is on k, not on qk"),
        ({"decoding": {"n": lambda n: 0 * n + 5}}, DECODING + "the new token's position is the number of")],
    "expe-keys": [({"parts": "qk"}, "the override is on qk, not on k")],
    "exqpe": [
        ({"theta1": 1 / 16, "theta2": 1 / 2048}, "theta1 and theta2 are exchanged"),
        ({"late": 5}, "off by one: floor((n - j)/l) raises")],
    "alibi": [
        ({"root": 4.0}, f"{DENOMINATOR}: scores are divided by D"), ({"times": -1}, "the bias has the other sign"),
        ({"slope": lambda h, H: 2 ** (-8 * (h + 1) / H)}, "slopes of 2^(-8h/H), which are for H a power of two"),
        ({"slope": lambda h, H: [2**-2, 2**-8, 2**-4][h]}, "slopes reversed: the steepest is the last head's"),
        ({"decoding": {"times": 0}}, DECODING + "the bias is 0")],
    "shaw": [
        ({"values": np.zeros((4, 4))}, f"{MISSING}: values[r] are not added"),
        ({"keys": parameter("shaw", "keys")[::-1].copy()}, "the keys' table is reversed")],
    "kerple": [
        ({"a": np.ones(2)}, f"{MISSING}: a is left out"),
        ({"p": np.array([0.3, 0.9]), "a": np.array([0.7, 1.6])}, "p and a are exchanged")],
    "fire": [({"L": 256.0}, f"{DENOMINATOR}: psi(max(m, L/2))")],
    "path": [({"conv": parameter("path", "conv")[:, ::-1].copy()}, "the convolution runs the other way")],
    "softmax-sinks": [({"b": np.log([0.5, 1.2])}, "b is added to the denominator, not exp(b)")],
}
BREAKS = [(name, broken, words) for name, breaks in BREAKS.items() for broken, words in breaks]


@pytest.mark.parametrize("name, broken, words", BREAKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREAKS)])
def test_each_mistake_is_named_by_breaking_ours(name, broken, words):
    function = of(name, **broken)
    line = says(name, function)
    assert line.partition("it looks like ")[2].startswith(words), line
    if name[:5] == "rope-" and "known" not in words and "root" not in broken:  # as most users will give it
        assert words in says(name, lambda **x: tuple(function(**x)[part].astype(np.float32) for part in "qk"))


@pytest.mark.parametrize("name", FILES)
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
    assert "the shape (2, 6, 3), not (2, 6, 8)" in says("learned", lambda positions: weight[positions][..., :3])
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


def of_transformers(q, k, positions, rope_parameters, max_position_embeddings, head_dim):
    """GPT-NeoX's rotation in float32, which knows every rope_type and turns a part of a head. (ntk is another base.)"""
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"partial_rotary_factor": 1.0} | rope_parameters
    if parameters["rope_type"] == "ntk":
        theta = 10000.0 * parameters["factor"] ** (head_dim / (head_dim - 2))
        parameters = parameters | {"rope_type": "default", "rope_theta": theta}
    config = GPTNeoXConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=parameters,
                           max_position_embeddings=max_position_embeddings)
    rotary, q, k = GPTNeoXRotaryEmbedding(config), torch.tensor(q).float(), torch.tensor(k).float()
    q, k = apply_rotary_pos_emb(q, k, *rotary(q, torch.tensor(positions)))
    return {"q": q, "k": k, "inv_freq": rotary.inv_freq, "attention_factor": rotary.attention_scaling}


def mrope_of_transformers(q, k, positions, rope_parameters, head_dim):
    """Qwen2-VL's rotation by sections, Qwen3-VL's where the axes are interleaved."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

    config, rotary = ((qwen3.Qwen3VLTextConfig, qwen3.Qwen3VLTextRotaryEmbedding)
                      if rope_parameters["mrope_interleaved"] else
                      (qwen2.Qwen2VLTextConfig, qwen2.Qwen2VLRotaryEmbedding))
    rotary = rotary(config(hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=2, head_dim=head_dim,
                           rope_parameters=rope_parameters))
    q, k = torch.tensor(q).float(), torch.tensor(k).float()
    q, k = qwen3.apply_rotary_pos_emb(q, k, *rotary(q, torch.tensor(positions)))
    return {"q": q, "k": k, "inv_freq": rotary.inv_freq}


@pytest.mark.filterwarnings("ignore")
def test_every_rope_of_transformers_is_right():
    need("transformers")
    for name in (name for name in FILES if "rope-" in name and name != "selective-rope"):
        fine, line = conform.check(mrope_of_transformers if name[0] == "m" else of_transformers, FILES[name])
        assert fine and "inv_freq" in line, f"{name}: {line}"
