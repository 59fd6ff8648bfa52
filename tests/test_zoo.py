"""The encodings of zoo/ against their formulas and another library; and one more, put there as a file and no more."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, need, refused
from test_ladder import EXACT, T, V, attention_in_loops, climb, tiny
from test_model import attend, doors_of, some_input, some_tokens

import data
import model_numpy
import positional_encodings
import zoo
from config import ModelConfig
from model_torch import GPT, build_encoding
from positional_encodings import make_encoding
from settings import InputError
from zoo.path import reflections

ODD = np.array([9, 0, 3, 3, 40, 7, 1, 2, 100, 5, 6, 8])  # positions: gaps, a repeat, no order


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def drawn(seed, *ranges):
    """Whole numbers drawn of each (low, high), by the seed."""
    return [int(x) for x in np.random.default_rng(seed).integers(*zip(*ranges, strict=True))]


def of_fla(path):
    """A file of flash-linear-attention in plain PyTorch, by PaTH's authors; the package needs triton when imported."""
    need("einops")
    if (found := importlib.util.find_spec("fla")) is None:
        return need("fla")
    spec = importlib.util.spec_from_file_location("theirs", os.path.join(*found.submodule_search_locations, path))
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    return theirs


def own(model):
    """The parameters of the first block's encoding, as arrays."""
    return {name: w.detach().numpy() for name, w in model.blocks[0].attn.encoding.named_parameters()}


def follows(model, n, bias):
    """The first block's attention over some input at positions n is that of bias(head, m, s), pair by pair in loops."""
    h, w = some_input(), (w.weight.detach().numpy() for w in (model.blocks[0].attn.qkv, model.blocks[0].attn.proj))
    right = attention_in_loops(h[0].numpy(), *w, model.config.heads, bias=bias)
    np.testing.assert_allclose(attend(model, h, n)[0].detach().numpy(), right, rtol=1e-10, atol=1e-12)


WRONG_FILES = {                          # an edit of zoo/kerple.py: what is said of zoo/mine.py
    ("class Layer", "class Layers"): "zoo/mine.py has no Layer: a file of an encoding has Settings, doors and Layer",
    ("class Settings", "class Setting"): "zoo/mine.py has no Settings",
    ("class Settings(NoPE)", "class Settings"): "zoo/mine.py: Settings must be a dataclass that inherits from NoPE",
    ("def doors(", "def door("): "zoo/mine.py has no doors",
    ('{"p": dp', '{"pp": dp'): "zoo/mine.py: no pullback gives a gradient of p, which its parameters declare",
    ("def doors(settings):", "def doors(settings)"): "zoo/mine.py, line 38: expected ':'",
}


def put_mine(text, tmp_path, monkeypatch):
    """Let zoo/mine.py be a file with this text."""
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(positional_encodings, "ZOO", tmp_path)
    monkeypatch.setattr(zoo, "__path__", [*zoo.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "zoo.mine", raising=False)


def train_mine(edit, backend, tmp_path, monkeypatch):
    """train.py --pe mine, of a zoo/mine.py that is an edit of zoo/kerple.py."""
    text = (ROOT / "zoo/kerple.py").read_text(encoding="utf-8")
    assert text.count(edit[0]) == 1
    put_mine(text.replace(*edit), tmp_path, monkeypatch)
    flags = "--preset mini --context 16 --layers 1 --batch-size 2 --steps 1 --data task:reverse --pe mine --backend"
    return command("train.py", *flags.split(), backend, "--out", "run", cwd=tmp_path)


@pytest.mark.parametrize("edit", WRONG_FILES, ids=lambda edit: edit[1])
def test_a_file_that_lacks_a_part_is_named_in_one_line(edit, tmp_path, monkeypatch):
    backend = "torch" if "Layer" in edit[0] else "numpy"
    assert WRONG_FILES[edit] in refused(train_mine(edit, backend, tmp_path, monkeypatch))


@pytest.mark.parametrize("edit, kind", [
    (("from positional_encodings import NoPE", "from positional_encodings import NoPEs"), ImportError),
    (("class Layer", "1 / 0\nclass Layer"), ZeroDivisionError),
    (('np.exp(learned["a"])', 'np.exp(learned["b"])'), KeyError)])
def test_an_exception_inside_a_file_keeps_its_traceback(edit, kind, tmp_path, monkeypatch):
    with pytest.raises(kind):
        train_mine(edit, "numpy", tmp_path, monkeypatch)


def test_a_parameter_that_a_layer_makes_itself_is_named_with_both_places(tmp_path, monkeypatch):
    own = """class Layer(Encoding):
    def __init__(self, settings, config):
        super().__init__(settings, config)
        self.c = __import__("torch").nn.Parameter(self.p.detach().clone())
"""
    said = refused(train_mine(("class Layer(Encoding):\n", own), "torch", tmp_path, monkeypatch))
    assert said.endswith("encoding.c is (4,) in the Layer of zoo/mine.py and missing in what its doors declare: both "
                         "must have it, with one shape")


ADDED_ROWS = """
import model_numpy
import model_torch
import positional_encodings
class Settings(positional_encodings.Sinusoidal):
    pass
def doors(settings):
    return model_numpy.Encoding(embed=model_numpy.sinusoidal_embed)
Layer = model_torch.Sinusoidal
"""


def test_a_file_whose_encoding_enters_at_the_embedding_can_be_pe_but_no_other_part_of_a_cycle(tmp_path, monkeypatch):
    put_mine(ADDED_ROWS, tmp_path, monkeypatch)
    monkeypatch.setattr(data, "prepare", None)                        # nothing is prepared
    flags = "--preset mini --layers 2 --data books --pe rope --cycle".split()
    assert refused(command("train.py", *flags, "rope,mine:base=50", cwd=tmp_path)).endswith(
        "--cycle cannot have 'mine:base=50' in some blocks, since mine enters once, before the first block: make it "
        "the encoding of --pe and the first part")
    model, bare = tiny("mine", cycle="mine,rope"), tiny("nope", cycle="nope,rope")
    climb(model, EXACT, steps=1)
    assert not torch.allclose(model(some_tokens(1, T)), bare(some_tokens(1, T)))


def queries_and_keys(model):
    """Those of the first block for some input, (H, T, D) each: what a score that reads content is worked out from."""
    w_q, w_k, _ = model.blocks[0].attn.qkv.weight.detach().numpy().reshape(3, model.config.heads, -1, 16)
    return [np.einsum("hdc,tc->htd", w, some_input()[0].numpy()) for w in (w_q, w_k)]


def test_kerple_is_its_formula():
    model = tiny("kerple")
    P, A = (getattr(model.encoding, name).tolist() for name in "pa")  # of each head
    follows(model, ODD, lambda head, m, s: -np.exp(P[head]) * np.log(1 + np.exp(A[head]) * abs(int(ODD[m] - ODD[s]))))


def test_fire_is_its_formula():
    model = tiny("fire")
    p = own(model)
    c, L = np.exp(p["c"][0]), np.exp(p["L"][0])
    assert c != 0.1 and 1 < L < 40  # changed from the start; some queries lie before L, some after

    def f(x, head):
        return sum(p["w2"][head, i] * max(0, p["w1"][i] * x + p["b1"][i]) for i in range(32))

    def share(m, d):
        return math.log(1 + c * d) / math.log(1 + c * max(m, L))

    follows(model, ODD, lambda head, m, s: f(share(int(ODD[m]), abs(int(ODD[m] - ODD[s]))), head))


def test_fire_starts_with_a_threshold_at_the_context():
    config = ModelConfig(2, 64, 8, 512, 40, encoding=make_encoding("fire"))
    p = model_numpy.strip_prefix("blocks.1.attn.encoding.", model_numpy.init_params(config, 0))
    assert np.exp(p["c"]) == pytest.approx(0.1) and np.exp(p["L"]) == pytest.approx(512)


@pytest.mark.parametrize("count_to", [2, 5, 64])
def test_cope_is_its_formula(count_to):
    """Gates are summed one by one, and e is interpolated by np.interp, which keeps its ends."""
    model = tiny("cope", variant={"count_to": count_to})
    (q, k), e = queries_and_keys(model), own(model)["e"]

    def bias(head, m, s):
        p = sum(1 / (1 + math.exp(-q[head, m] @ k[head, j])) for j in range(s, m + 1))
        return sum(x * np.interp(p, np.arange(count_to), column) for x, column in zip(q[head, m], e.T, strict=True))

    follows(model, np.arange(T), bias)
    follows(model, ODD, bias)  # the keys' order is all it knows


def test_grape_is_its_formula():
    model = tiny("grape")
    p, (q, _) = own(model), queries_and_keys(model)

    def bias(head, m, s):
        v, slope = p["v"][head], 2.0 ** (-4 * (head + 1))
        gate = math.log(1 + math.exp(v @ q[head, m] / math.sqrt(v @ v) / math.sqrt(8)))
        return -int(ODD[m] - ODD[s]) * slope * math.log(1 + math.exp(p["w"][head])) * gate

    follows(model, ODD, bias)
    wide = ModelConfig(1, 2048, 2, T, 40, encoding=make_encoding("grape"))
    first = doors_of(wide.encoding).parameters(wide)["v"].first_values(np.random.default_rng(0))
    assert first.shape == (2, 1024) and np.linalg.norm(first, axis=-1) == pytest.approx(1, rel=0.1)


def test_fox_is_its_formula():
    model = tiny("fox")
    p = own(model)
    f = 1 / (1 + np.exp(-(p["weight"] @ some_input()[0].numpy().T + p["bias"][:, None])))  # (H, T)
    assert f.min() < 0.3 and f.max() > 0.7
    follows(model, ODD, lambda head, m, s: sum(math.log(f[head, j]) for j in range(s + 1, m + 1)))


def test_pope_is_its_formula():
    model = tiny("pope", variant={"base": 50.0})
    e, (q, k) = np.clip(own(model)["e"], -2 * math.pi, 0), queries_and_keys(model)
    assert (own(model)["e"] > 0).any()  # clamped
    q, k = np.log(1 + np.exp(q)), np.log(1 + np.exp(k))
    plain = [np.log(np.expm1(x)) for x in (q, k)]

    def bias(head, m, s):
        angle = [(int(ODD[s]) - int(ODD[m])) * 50.0 ** (-c / 8) + e[head, c] for c in range(8)]
        score = sum(q[head, m, c] * k[head, s, c] * math.cos(angle[c]) for c in range(8))
        return (score - plain[0][head, m] @ plain[1][head, s]) / math.sqrt(8)

    follows(model, ODD, bias)


def test_rove_is_its_formula():
    """In complex numbers, query by query: a value turns by the difference of the two angles."""
    model, h = tiny("rove", variant={"base": 50.0}), some_input()[0].numpy()
    attention = model.blocks[0].attn
    w = attention.qkv.weight.detach().numpy().reshape(3, 2, 8, 16)
    q, k, v = np.einsum("phdc,tc->phtd", w[..., :4, :] + 1j * w[..., 4:, :], h)                    # (H, T, D/2) each
    angle = ODD[:, None] * 50.0 ** (-np.arange(4) / 4)
    right = np.zeros((2, T, 8))
    for head, m in np.ndindex(2, T):
        turn = np.exp(1j * (angle[: m + 1] - angle[m]))
        weights = np.exp((q[head, m].conj() * k[head, : m + 1] * turn).real.sum(-1) / math.sqrt(8))
        y = weights / weights.sum() @ (v[head, : m + 1] * turn)
        right[head, m] = np.concatenate((y.real, y.imag))
    right = np.moveaxis(right, 0, 1).reshape(T, 16) @ attention.proj.weight.detach().numpy().T
    np.testing.assert_allclose(attend(model, some_input(), ODD)[0].detach().numpy(), right, rtol=1e-10, atol=1e-12)


def test_cable_is_its_formula():
    model, x = tiny("cable"), some_input()[0].numpy()
    p = own(model)
    r, g = np.maximum(p["tokens"] @ x.T, 0), np.log(1 + np.exp(p["query"] @ x.T))  # (H, T)
    assert (r == 0).any() and r.max() > 0.5
    follows(model, ODD, lambda head, m, s: -g[head, m] * sum(r[head, j] for j in range(s + 1, m + 1)))


@pytest.mark.parametrize("kind", ["alibi", "kerple"])
def test_dape_is_its_formula(kind):
    model = tiny("dape", variant={"bias": kind})
    p, (q, k) = own(model), queries_and_keys(model)

    def base(head, m, s):
        d = abs(int(ODD[m] - ODD[s]))
        if kind == "alibi":
            return -d * 2.0 ** (-4 * (head + 1))
        return -math.exp(p["p"][head]) * math.log(1 + math.exp(p["a"][head]) * d)

    def bias(head, m, s):
        seen = [q[i, m] @ k[i, s] / math.sqrt(8) for i in range(2)] + [base(i, m, s) for i in range(2)]
        hidden = p["w1"] @ [*seen, 1]
        return base(head, m, s) + p["w2"][head] @ np.where(hidden > 0, hidden, 0.01 * hidden)

    follows(model, ODD, bias)


def conv(u, w):
    """Each column of u (T, n) on its own: w[0] u_t + w[1] u_(t-1) + .., of what there is."""
    return np.array([[sum(w[i, j] * u[t - j, i] for j in range(min(t + 1, w.shape[1]))) for i in range(u.shape[1])]
                     for t in range(len(u))])


def test_selective_rope_is_its_formula():
    model, x = tiny("selective_rope", variant={"base": 9.0, "rank": 3}), some_input()[0].numpy()
    p, (q, k) = own(model), queries_and_keys(model)
    x = np.concatenate([part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in np.split(x, 2, -1)], -1)
    angle = conv(x @ p["w1"].T @ p["w2"].T, p["conv"]).cumsum(0).reshape(T, 2, 4) * 9.0 ** (-np.arange(4) / 4)
    assert np.abs(angle[-1]).max() > 0.2

    def bias(head, m, s):
        a, b = (x[:4] + 1j * x[4:] for x in (q[head, m], k[head, s]))
        turned = np.vdot(a * np.exp(1j * angle[m, head]), b * np.exp(1j * angle[s, head])).real
        return (turned - np.vdot(a, b).real) / math.sqrt(8)

    follows(model, ODD, bias)


@pytest.mark.parametrize("part", [1, 5, 99])
@pytest.mark.parametrize("pe", ["path", "path_fox"])
def test_path_is_its_formula(pe, part, monkeypatch):
    """The reflections one by one, from the key to the query."""
    monkeypatch.setattr("zoo.path.PART", part)
    model, x = tiny(pe, variant={"rank": 5}), some_input()[0].numpy()
    p, (q, k) = own(model), queries_and_keys(model)
    u = conv(x @ p["w1"].T @ p["w2"].T, p["conv"])
    u = (u / (1 + np.exp(-u))).reshape(T, 2, 8)
    w = u / np.sqrt((u**2).sum(-1, keepdims=True) + 1e-6)
    b = 2 / (1 + np.exp(-(x @ p["strength"].T + p["bias"])))
    assert b.min() < 0.5 and b.max() > 1.5 and np.abs(np.linalg.norm(w, axis=-1) - 1).max() < 0.01
    f = 1 / (1 + np.exp(-(x @ p["forget"].T + p["forget_bias"]))) if pe == "path_fox" else np.ones((T, 2))

    def bias(head, m, s):
        key = k[head, s]
        for t in range(s + 1, m + 1):
            key = key - b[t, head] * w[t, head] * (w[t, head] @ key)                     # H x = x - b w (w . x)
        forgotten = sum(math.log(f[t, head]) for t in range(s + 1, m + 1))
        return q[head, m] @ (key - k[head, s]) / math.sqrt(8) + forgotten

    follows(model, ODD, bias)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pe", ["path", "path_fox"])
def test_path_equals_flash_linear_attention(pe, seed):
    """Its plain form computes in fp32. Its PaTH-FoX divides gates by sqrt(D), as its kernels do (errata): not here."""
    H, T, D = drawn(seed, (1, 6), (1, 151), (1, 21))
    config = ModelConfig(1, H * D, H, T, 8, encoding=make_encoding(pe))
    encoding = doors_of(config.encoding)
    q, k, v, h = *random(3, 2, H, T, D), random(2, T, H * D)
    learned = {name: 0.5 * random(*own.shape) for name, own in encoding.parameters(config).items()}
    bias, _ = encoding.score(q, k, h, None, learned)
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) / math.sqrt(D) + bias, -np.inf)
    ours = model_numpy.softmax(scores, {})[0] @ v
    gates = np.zeros((2, T, H))
    if pe == "path_fox":
        gates = -np.logaddexp(0, -(h @ learned["forget"].T + learned["forget_bias"]))               # ln f
    w, b, _ = reflections(h, learned, H)
    q, k, v, w, b = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v, w, b[..., 0]))        # (B, T, H, D)
    theirs = of_fla("ops/path_attn/naive.py").naive_path_attn(
        q, k, v, w, b, torch.from_numpy(gates * math.sqrt(D)), 1 / math.sqrt(D))
    np.testing.assert_allclose(ours, theirs.transpose(1, 2), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_relative_bank_is_the_bias_of_inkling(seed):
    """Of the last T of S tokens, in a row from anywhere or in any order, with an extent of fewer tokens or of more."""
    need("transformers")
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    H, T, more, R, extent, first = drawn(seed, (1, 5), (1, 9), (0, 30), (1, 7), (1, 40), (-100, 10**6))
    n = first + np.arange(T + more) if seed % 2 else random(T + more).argsort()
    settings = make_encoding("relative_bank", d_rel=R, rel_extent=extent)
    config = ModelConfig(1, 4 * H, H, 64, 8, encoding=settings)
    ours, theirs = build_encoding(settings, config).double(), InklingRelativeLogits(R, extent).double()
    h, q, w, bank = map(torch.from_numpy, (random(2, T + more, 4 * H), random(2, H, T, 4), random(H * R, 4 * H),
                                           random(R, extent)))
    ours.load_state_dict({"weight": w, "bank": bank})
    theirs.load_state_dict({"proj": bank})
    mixed = (h[:, more:] @ w.T).unflatten(-1, (H, R))                                              # (B, T, H, R)
    pairs = torch.from_numpy(settings.pairs(n[more:], n, config))
    torch.testing.assert_close(ours.score(q, None, ours.key_state(h), pairs),
                               theirs(mixed, *map(torch.from_numpy, (n[more:], n))), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_lerope_turns_as_transformers_mistral_large_4_does(seed):
    need("transformers")
    from transformers.models.mistral_large4 import modeling_mistral_large4 as theirs

    pairs, base, first = drawn(seed, (1, 20), (2, 10**6), (0, 5000))
    n, D = first + np.arange(T), 2 * pairs
    rope = {"rope_type": "default", "rope_theta": float(base)}
    rotary = theirs.MistralLarge4TextRotaryEmbedding(theirs.MistralLarge4TextConfig(
        qk_rope_head_dim=D, head_dim=D, rope_parameters=rope))
    encoding = make_encoding("lerope", base=float(base))
    config = ModelConfig(1, 2 * D, 2, T, 40, encoding=encoding)
    ours = build_encoding(encoding, config).double()
    q, k = torch.from_numpy(random(2, 1, 2, T, D))
    table = torch.from_numpy(encoding.rows(n, config))
    for alpha in (torch.zeros(pairs).double(), torch.from_numpy(0.5 * random(pairs))):
        ours.load_state_dict({"alpha": alpha})
        rotary.alpha.copy_(alpha)
        side_by_side = [x.unflatten(-1, (2, pairs)).mT.flatten(-2) for x in (q, k)]  # their pairs: (2i, 2i + 1)
        right = theirs.apply_rotary_pos_emb_interleave(*side_by_side, *rotary(q, torch.from_numpy(n)[None]))
        for found, expected in zip(ours.rotate(q, k, table), right, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * (first + T) * math.e)  # angles in fp32


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_partial_key_offset_is_its_formula(fraction):
    """With the keys shifted before any product, as its authors do it; the first token keeps its own."""
    model, r = tiny("partial_key_offset", variant={"rotary_fraction": fraction, "base": 9.0}), int(8 * fraction)
    q, k = queries_and_keys(model)
    angle = ODD[:, None] * 9.0 ** (-2 * np.arange(r // 2) / r)

    def turned(x):
        y = (x[..., : r // 2] + 1j * x[..., r // 2 : r]) * np.exp(1j * angle)
        return np.concatenate((y.real, y.imag, x[..., r:]), -1)

    right_q, right_k = turned(q), turned(k)
    right_k[:, 1:, r:] = right_k[:, :-1, r:].copy()
    right = right_q @ right_k.mT - q @ k.mT
    follows(model, ODD, lambda head, m, s: right[head, m, s] / math.sqrt(8))


def test_wall_is_its_formula():
    model, x = tiny("wall"), some_input()[0].numpy()
    with torch.no_grad():
        model.blocks[0].attn.encoding.bias -= 8
    p, (q, k) = own(model), queries_and_keys(model)
    f = 1 / (1 + np.exp(-p["bias"] - x @ p["weight"].T)).reshape(T, 2, 8)
    assert f.min() < 0.3 and f.max() > 0.7

    def bias(head, m, s):
        left = np.prod(f[s + 1 : m + 1, head], 0)
        return (q[head, m] * k[head, s]) @ (left - 1) / math.sqrt(8)

    follows(model, ODD, bias)


@pytest.mark.parametrize("seed, part", [(0, 16), (1, 16), (2, 16), (3, 5), (4, 1)])
def test_wall_equals_flash_linear_attention(seed, part, monkeypatch):
    """Its plain form computes in fp32. Ours are NumPy's, and torch's of all queries and of the last few."""
    monkeypatch.setattr("zoo.wall.PART", part)
    H, T, D = drawn(seed, (1, 5), (1, 80), (1, 20))
    encoding = make_encoding("wall")
    config = ModelConfig(1, H * D, H, T, 8, encoding=encoding)
    ours = build_encoding(encoding, config).double()
    q, k, v, h = *map(torch.from_numpy, random(3, 2, H, T, D)), torch.from_numpy(random(2, T, H * D))
    learned = {name: 0.5 * random(*own.shape) for name, own in doors_of(encoding).parameters(config).items()}
    ours.load_state_dict({name: torch.from_numpy(w) for name, w in learned.items()})
    kept = ours.key_state(h)

    def attend(bias, q):
        unseen = torch.ones(q.shape[2], T, dtype=torch.bool).triu(T - q.shape[2] + 1)
        return (q @ k.mT / math.sqrt(D) + bias).masked_fill(unseen, -math.inf).softmax(-1) @ v

    plain = types.ModuleType("fla.ops.utils.cumsum")  # stands in for kernels that need a GPU
    plain.chunk_global_cumsum = lambda g, scale, cu_seqlens: g.cumsum(1) * scale
    constant = types.ModuleType("fla.ops.utils.constant")
    constant.RCP_LN2 = 1 / math.log(2)
    for module in (plain, constant):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = of_fla("ops/wall_attn/naive.py").naive_wall_attn
    right = theirs(*(x.transpose(1, 2) for x in (q, k, v, kept)), scale=D**-0.5).transpose(1, 2).double()
    bias, _ = doors_of(encoding).score(q.numpy(), k.numpy(), h.numpy(), None, learned)
    last = max(1, T // 3)
    for found, expected in ((attend(torch.from_numpy(bias), q), right),
                            (attend(ours.score(q, k, kept, None).detach(), q), right),
                            (attend(ours.score(q[:, :, -last:], k, kept, None).detach(), q[:, :, -last:]),
                             right[:, :, -last:])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pe", ["path", "path_fox", "selective_rope"])
def test_small_inputs_have_finite_gradients(pe):
    """At the first weights, and where the block's input is 0."""
    config = ModelConfig(1, 16, 2, T, 40, encoding=make_encoding(pe))
    score = doors_of(config.encoding).score
    learned = {name: w.astype(float) for name, w in model_numpy.strip_prefix(
        "blocks.0.attn.encoding.", model_numpy.init_params(config, 0)).items()}
    for h in (np.zeros((1, T, 16)), some_input().numpy()):
        bias, pullback = score(random(1, 2, T, 8), random(1, 2, T, 8, seed=1), h, None, learned)
        *grads, down = pullback(np.ones_like(bias))
        assert all(np.isfinite(x).all() for x in (bias, *grads, *down.values()))


def test_popes_first_angles_are_at_the_clamps_edge_and_train():
    config = ModelConfig(1, 16, 2, T, 40, encoding=make_encoding("pope"))
    model, params, name = GPT(config), model_numpy.init_params(config), "blocks.0.attn.encoding.e"
    tokens = some_tokens(2, T + 1) % 40
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    _, grads = model_numpy.loss_and_grads(params, tokens[:, :-1].numpy(), tokens[:, 1:].numpy(), config)
    assert (params[name] == 0).all() and np.abs(grads[name]).min() > 0
    np.testing.assert_allclose(grads[name], model.get_parameter(name).grad.numpy(), rtol=1e-3, atol=1e-9)


NORMAL = 0, 0.02
UNIFORM = 0, 3**-0.5                                                  # in (-1, 1)
FIRST_VALUES = {                                                      # {parameter: (mean, standard deviation)}, D = 16
    "cable": dict(tokens=NORMAL, query=NORMAL), "cope": dict(e=(0, 0)),
    "dape": dict(p=(-0.280, 0.926), a=(-0.954, 0.885), w1=(0, 96**-0.5), w2=(0, 96**-0.5)),
    "fire": dict(c=(math.log(0.1), 0), L=(math.log(64), 0), w1=UNIFORM, b1=UNIFORM, w2=(0, 96**-0.5)),
    "fox": dict(weight=NORMAL, bias=(0, 0)), "grape": dict(v=(0, 1 / 4), w=(math.log(math.e - 1), 0)),
    "kerple": dict(p=(-0.280, 0.926), a=(-0.954, 0.885)), "lerope": dict(alpha=(0, 0)), "partial": {},
    "partial_key_offset": {}, "path": dict(w1=NORMAL, w2=NORMAL, conv=NORMAL, strength=NORMAL, bias=(0, 0)),
    "path_fox": dict(w1=NORMAL, w2=NORMAL, conv=NORMAL, strength=NORMAL, bias=(0, 0), forget=NORMAL,
                     forget_bias=(0, 0)),
    "pope": dict(e=(0, 0)), "proportional": {}, "relative_bank": dict(weight=NORMAL, bank=NORMAL), "rove": {},
    "selective_rope": dict(w1=NORMAL, w2=NORMAL, conv=NORMAL), "wall": dict(weight=NORMAL, bias=(8, 0)), "xpos": {}}


@pytest.mark.parametrize("pe", FIRST_VALUES)
def test_first_values_are_those_that_the_file_says(pe):
    """Up to five standard errors; the logarithm of a number drawn from 0.01 to 2 has the mean -0.280."""
    model = ModelConfig(1, 256, 16, 64, 40, encoding=make_encoding(pe))
    first = {name.rpartition(".")[2]: w.astype(float) for name, w in model_numpy.init_params(model, 3).items()
             if "encoding." in name}
    assert first.keys() == FIRST_VALUES[pe].keys()
    for name, (mean, std) in FIRST_VALUES[pe].items():
        n = first[name].size
        assert first[name].mean() == pytest.approx(mean, rel=1e-6, abs=5 * std / n**0.5), name
        assert first[name].std() == pytest.approx(std, rel=5 / (2 * n) ** 0.5), name


def test_dapes_first_values_are_those_of_its_authors_layers():
    """p uniform in (0, 2), a in (0, 1); a linear layer of n inputs within 1/sqrt(n), of 2H without its bias."""
    config = ModelConfig(1, 128, 64, T, 40, encoding=make_encoding("dape"))
    first = {name: w.astype(float) for name, w in model_numpy.strip_prefix(
        "blocks.0.attn.encoding.", model_numpy.init_params(config)).items()}
    for x, low, high in ((np.exp(first["p"]), 0.01, 2), (np.exp(first["a"]), 0.01, 1),
                         (first["w1"], -(128**-0.5), 128**-0.5), (first["w2"], -(32**-0.5), 32**-0.5)):
        assert low <= x.min() and x.max() <= high and x.std() == pytest.approx((high - low) / 12**0.5, rel=0.2)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_partial_turns_as_transformers_gpt_neox_does(fraction):
    need("transformers")
    from transformers.models.gpt_neox import modeling_gpt_neox as theirs

    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": fraction}
    config = theirs.GPTNeoXConfig(hidden_size=32, num_attention_heads=2, rope_parameters=rope)
    q, k = torch.randn(2, 1, 2, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n = torch.arange(T) * 3
    right = theirs.apply_rotary_pos_emb(q, k, *theirs.GPTNeoXRotaryEmbedding(config)(q, n[None]))
    model = tiny("partial", width=32, variant={"rotary_fraction": fraction, "base": 500.0})
    ours = model.encoding.rotate(q, k, model.tables(n.numpy())[model.config.encoding].rows)
    for found, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # angles in fp32
        assert torch.equal(found[..., int(16 * fraction) :], expected[..., int(16 * fraction) :])


@pytest.mark.parametrize("pe, fraction, message", [
    ("partial", 0.4, "an even width: 0.4 of a head's 8 dimensions is 3.2"), ("partial", 1.5, "at most 1, got 1.5"),
    ("proportional", 0.4, "leave whole pairs: 0.4 of a head's 8 dimensions is 1.6 of them")])
def test_all_of_a_head_is_rope_and_a_share_that_has_no_pairs_is_refused(pe, fraction, message):
    whole, rope, tokens = tiny(pe, variant={"rotary_fraction": 1.0}), tiny("rope"), some_tokens(1, T)
    torch.testing.assert_close(whole(tokens), rope(tokens), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match=f"--rotary-fraction must .*{message}"):
        ModelConfig(1, 16, 2, T, 40, encoding=make_encoding(pe, rotary_fraction=fraction))


@pytest.mark.parametrize(
    "pe, fraction, width", [("partial", 0.14, 14), ("partial", 0.58, 58), ("proportional", 0.56, 100)])
def test_a_share_that_is_whole_is_taken_though_its_product_is_not(pe, fraction, width):
    model = ModelConfig(1, 100, 1, T, 40, encoding=make_encoding(pe, rotary_fraction=fraction))
    rows = model.encoding.rows(np.arange(T), model)
    assert rows.shape == (1, T, width) and (rows[0, 1, : width // 2] != 1).sum() == round(fraction * 100) // 2


@pytest.mark.parametrize("seed", range(4))
def test_proportional_has_the_frequencies_of_transformers(seed):
    need("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    bits, turning, base, n = drawn(seed, (0, 7), (1, 65), (2, 10**6), (0, 5000))
    pairs, D = 2**bits, 2 * 2**bits
    fraction = min(turning, pairs) / pairs
    rope = {"rope_type": "proportional", "rope_theta": float(base), "partial_rotary_factor": fraction}
    theirs, one = ROPE_INIT_FUNCTIONS["proportional"](LlamaConfig(hidden_size=D, num_attention_heads=1,
                                                                  rope_parameters=rope), "cpu")
    encoding = make_encoding("proportional", rotary_fraction=fraction, base=float(base))
    model = ModelConfig(1, D, 1, T, 40, encoding=encoding)
    assert one == 1 and int(torch.count_nonzero(theirs)) == min(turning, pairs)
    right = n * theirs.double().numpy()  # in fp32 until here
    ours = encoding.rows(np.array([n]), model)[0, 0]
    np.testing.assert_allclose(ours, np.concatenate((np.cos(right), np.sin(right))), atol=3e-7 * n + 1e-12)


@pytest.mark.parametrize("scale_base", [3.0, 512.0])
def test_xpos_scores_are_its_formula_of_the_distance(scale_base):
    """Pair by pair in complex numbers: Re(q_i conj(k_i) e^(i (m-n) theta_i)) z_i^((m - n)/512)."""
    model = tiny("xpos", width=32, variant={"scale_base": scale_base})
    n = np.array([0, 5, 6, 40, 41, 57, 58, 3, 2, 9, 1, 4])
    q, k = torch.randn(2, 1, 2, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = model.tables(n)[model.config.encoding].rows
    turned_q, turned_k = model.encoding.rotate(q, k, rows)
    (a, b), apart = ((x[..., :8] + 1j * x[..., 8:] for x in (q.numpy(), k.numpy())), n[:, None] - n)
    right = 0
    for i in range(8):
        turn, z = np.exp(1j * apart * 10000.0 ** (-2 * i / 16)), ((2 * i / 16 + 0.4) / 1.4) ** (apart / scale_base)
        right = right + (a[..., :, None, i] * b[..., None, :, i].conj() * turn).real * z
    np.testing.assert_allclose((turned_q @ turned_k.mT).numpy(), right, rtol=1e-9, atol=1e-9)


def test_xpos_stays_within_fp32_and_the_distance_alone_enters_for_32695_positions_from_the_middle():
    model, tokens, far = tiny("xpos"), some_tokens(1, T), T // 2 + 32695 - T
    rows = model.config.encoding.rows(np.array([-(10**6), far, 10**6]), model.config).astype(np.float32)
    assert np.isfinite(rows).all() and np.abs(rows).max() > 1e34
    for first in (T // 2 - 32695, far):
        n = np.arange(first, first + T)
        torch.testing.assert_close(model(tokens, positions=n), model(tokens), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(model.float()(tokens, positions=n), model(tokens), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(tokens, positions=n + 2 * T), model(tokens), rtol=1e-3, atol=1e-3)


# ---- blocks in turn --------------------------------------------------------------------------------------------------


def bases(local, whole, **more):
    """The rope_parameters of Gemma's two kinds of layers."""
    return {"sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": {"rope_type": "default", "rope_theta": whole} | more}


LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
PROPORTIONAL = bases(50.0, 900.0, rope_type="proportional", partial_rotary_factor=0.5)
MODELS = {                               # {a model of transformers: (its configuration, base of ours, ours)}
    "Gemma3Text": (dict(sliding_window=4, layer_types=LAYERS, rope_parameters=bases(50.0, 900.0)), 50.0,
                   dict(cycle="rope:window=4,rope:window=4,rope:base=900")),
    "Gemma4Text": (dict(sliding_window=5, layer_types=LAYERS, rope_parameters=PROPORTIONAL, global_head_dim=8), 50.0,
                   dict(cycle="rope:window=5,rope:window=5,proportional:base=900:rotary_fraction=0.5")),
    "Cohere2": (dict(sliding_window=3, layer_types=LAYERS), 10000.0, dict(cycle="rope:window=3,rope:window=3,nope")),
    "Exaone4": (dict(sliding_window=3, layer_types=LAYERS), 10000.0, dict(nope_every=3, window=3)),
    "SmolLM3": (dict(no_rope_layer_interval=3), 2e6, dict(cycle="rope,rope,nope")),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
@pytest.mark.slow
def test_the_attention_of_blocks_in_turn_is_that_of_transformers(name):
    """Each layer of a whole random model of theirs gives its attention an input, and so its output, without norms of
    queries and keys, which ours has not."""
    need("transformers")
    import transformers

    theirs, base, ours = MODELS[name]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, **theirs)
    torch.manual_seed(0)
    model = getattr(transformers, name.removesuffix("Text") + ("TextModel" if "Text" in name else "Model"))(config)
    seen = []
    for layer in model.double().eval().layers:
        attention = layer.self_attn
        for norm in ("q_norm", "k_norm", "v_norm"):
            if hasattr(attention, norm):
                setattr(attention, norm, torch.nn.Identity())
        attention.scaling = 8**-0.5
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
        attention.register_forward_hook(
            lambda module, given, kept, out: seen.append((module, kept["hidden_states"], out[0])), with_kwargs=True)
    n = np.arange(70, 70 + T)
    model(input_ids=some_tokens(2, T), position_ids=torch.from_numpy(n)[None].expand(2, -1))
    assert len(seen) == 6
    gpt = tiny("rope", layers=6, variant={"base": base}, **ours)
    for i, (module, h, right) in enumerate(seen):
        parts = [module.q_proj.weight, module.k_proj.weight, module.v_proj.weight]
        if name == "Cohere2":                                        # its pairs lie side by side
            parts[:2] = [w.view(2, 4, 2, 16).transpose(1, 2).reshape(16, 16) for w in parts[:2]]
        attention = gpt.blocks[i].attn
        attention.load_state_dict({"qkv.weight": torch.cat(parts), "proj.weight": module.o_proj.weight})
        found = attention(h, gpt.tables(n)[attention.encoding.settings])
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


@torch.no_grad()
def test_the_logits_of_blocks_in_turn_are_those_of_smollm3():
    need("transformers")
    import transformers

    from interop.over import LLAMA

    gpt = tiny("rope", "llama", layers=4, cycle="rope,nope:window=3", tied=False)  # where there is no RoPE, as there
    config = transformers.SmolLM3Config(
        vocab_size=V, hidden_size=16, intermediate_size=40, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, rms_norm_eps=1e-5, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True,
        sliding_window=3, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    theirs = transformers.SmolLM3ForCausalLM(config).double().eval()
    theirs.load_state_dict(LLAMA.theirs(gpt.state_dict(), 2))
    tokens = some_tokens(2, T)
    torch.testing.assert_close(gpt(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


# ---- one file more ---------------------------------------------------------------------------------------------------


USE = """
import sys, pytest, train, eval, generate
run, *flags = sys.argv[1:]
sys.argv = ["train.py"]
try:
    train.main(["--pe", "mine", "--help"])
except SystemExit:
    pass
train.main([*flags, "--out", run])
eval.main([run, "--lengths", "16,32", "--json", run + "/rows.json"])
generate.main([run, "--tokens", "3"])
generate.main([run, "--tokens", "3", "--cache"])
tests = ["test_ladder.py::test_numpy_equals_torch[mine]",
         "test_numpy.py::test_each_gradient_is_the_slope_of_the_loss[gpt-mine]",
         "test_model.py::test_no_token_sees_a_later_one[mine-llama-both]"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *("tests/" + test for test in tests)]))
"""


def test_a_file_in_the_zoo_is_all_that_an_encoding_needs(tokens, tmp_path):
    """Its flags, training, evaluation, generation and the tests of all encodings, in a copy of the repository."""
    copy, run = tmp_path / "repository", tmp_path / "run"
    leave = shutil.ignore_patterns(".*", "__pycache__", "data", "runs", "studies")
    shutil.copytree(ROOT, copy, ignore=leave)
    shutil.copy(copy / "zoo" / "partial.py", copy / "zoo" / "mine.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYT")}
    flags = ["--pe", "mine", "--rotary-fraction", "0.5", *TINY, "--layers", "1", "--steps", "2", "--data", str(tokens)]
    done = subprocess.run([sys.executable, "-c", USE, str(run), *flags], cwd=copy, capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    help = " ".join(done.stdout.split())
    assert ", mine, partial" in help and "--rotary-fraction" in help
    rows = json.loads((run / "rows.json").read_text())
    assert [(row["pe"], row["length"]) for row in rows] == [("mine", 16), ("mine", 32)] and rows[1]["loss"] > 0
    assert '"rotary_fraction": 0.5' in (run / "config.json").read_text()
