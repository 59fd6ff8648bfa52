"""The softmax door, --softmax log (SSMax), sinks and llama4, of any encoding: formulas, and transformers."""

import math

import numpy as np
import pytest
import torch
from conftest import TINY, command, need
from test_ladder import EXACT, T, climb, tiny
from test_model import attend, like, some_input, some_tokens

import longer.reading
import model_numpy
import zoo.softmax
from longer.cache import Cache
from longer.reading import Reader
from settings import InputError

NUMBERS = zoo.softmax.FLOOR_SCALE, zoo.softmax.ATTN_SCALE


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(zoo.softmax, "FLOOR_SCALE", 3)


# ---- the ladder, which has their gradients, can fail -----------------------------------------------------------------


@pytest.mark.parametrize("softmax, name", [("log", "temperature"), ("sinks", "sinks")])
def test_ladder_catches_a_flipped_sign(softmax, name, monkeypatch):
    right = zoo.softmax.KINDS[softmax]

    def wrong(scores, learned):
        p, pullback = right(scores, learned)

        def negated(dp):
            dscores, down = pullback(dp)
            return dscores, {name: -down[name]}

        return p, negated

    monkeypatch.setitem(zoo.softmax.KINDS, softmax, wrong)
    with pytest.raises(AssertionError, match=f"gradient of blocks.1.*{name}"):
        climb(tiny(f"rope+{softmax}"), EXACT)


# ---- against the formulas --------------------------------------------------------------------------------------------


def stick_in_loops(scores):
    """A stick is broken from the query back: each key takes its sigmoid of what is left, the query's own the rest."""
    p = np.zeros_like(scores)
    for m, row in enumerate(scores):
        left = 1.0
        for n in range(m - 1, -1, -1):
            p[m, n] = left / (1 + math.exp(-row[n]))
            left -= p[m, n]
        p[m, m] = left
    return p


def softmax_in_loops(scores, s=None, b=None):
    """Row by row, of the keys up to a query's own: exp(s ln(n) x) over the sum of them and of exp(b)."""
    p = np.zeros_like(scores)
    for m, row in enumerate(scores):
        x = row[: m + 1] * (1 if s is None else s * math.log(m + 1))
        p[m, : m + 1] = np.exp(x) / (np.exp(x).sum() + (0 if b is None else math.exp(b)))
    return p


@pytest.mark.parametrize("pe", ["nope+log", "nope+sinks", "nope+stick"])
def test_attention_is_its_formula(pe):
    model, h = tiny(pe), some_input()
    attention = model.blocks[0].attn
    own = {name: p.detach().numpy() for name, p in attention.encoding.named_parameters()}
    w_q, w_k, w_v = np.split(attention.qkv.weight.detach().numpy(), 3)
    x, out = h[0].numpy(), []
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        scores = (x @ w_q[rows].T) @ (x @ w_k[rows].T).T / math.sqrt(8)
        how = {to: own[name][head] for to, name in (("s", "temperature"), ("b", "sinks")) if name in own}
        p = stick_in_loops(scores) if "stick" in pe else softmax_in_loops(scores, **how)
        out.append(p @ (x @ w_v[rows].T))
    right = np.concatenate(out, -1) @ attention.proj.weight.detach().numpy().T
    np.testing.assert_allclose(attend(model, h)[0].detach().numpy(), right, rtol=1e-10, atol=1e-12)


def test_a_stick_of_equal_scores_halves_and_stays_finite_at_any_score():
    halves = zoo.softmax.stick_softmax(torch.zeros(1, 1, 1, 6))[0, 0, 0]
    np.testing.assert_allclose(halves, [0.5**5, 0.5**4, 0.5**3, 0.5**2, 0.5, 0.5**5], rtol=2**-20)
    far = torch.tensor([[[[-1e4, 1e4, -1e4, 0.0]]]], requires_grad=True)
    p = zoo.softmax.stick_softmax(far)
    p.square().sum().backward()
    np.testing.assert_allclose(p.detach(), [[[[0, 1, 0, 0]]]], atol=2**-21)
    assert torch.isfinite(far.grad).all()
    numbers, pullback = zoo.softmax.stick(far.detach().numpy(), {})
    np.testing.assert_allclose(numbers, [[[[0, 1, 0, 0]]]], atol=2**-21)
    assert np.isfinite(pullback(numbers)[0]).all()


def test_n_counts_the_keys_of_a_window_and_not_the_array():
    """With s = 1/ln 4 and a window of 4, all queries but the first three are as without."""
    log, plain, h = tiny("nope+log", window=4), tiny("nope", window=4), some_input()
    plain.load_state_dict({name: w for name, w in log.state_dict().items() if "temperature" not in name})
    with torch.no_grad():
        log.blocks[0].attn.encoding.temperature.fill_(1 / math.log(4))
    ours, theirs = attend(log, h), attend(plain, h)
    torch.testing.assert_close(ours[:, 3:], theirs[:, 3:], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours[:, 1:3], theirs[:, 1:3])


def test_each_block_has_its_own_and_log_starts_as_the_plain_softmax_of_1024_tokens_on_average():
    params = model_numpy.init_params(tiny("t5+log").config)
    own = [name for name in params if "encoding" in name]
    assert own == [f"blocks.{i}.attn.encoding.{name}" for i in range(2) for name in ("weight", "temperature")]
    s = params["blocks.0.attn.encoding.temperature"]
    assert s.shape == (2,) and s.mean() * np.log(np.arange(1, 1025)).mean() == pytest.approx(1, rel=1e-3)
    assert [n for n in model_numpy.init_params(tiny("learned+sinks").config) if "sinks" in n] == ["encoding.sinks"]


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor_scale, attn_scale", [(3, 0.1), (5, 0.7)])
def test_llama4_equals_transformers(floor_scale, attn_scale, monkeypatch):
    """Its attention of a layer without RoPE, on the same weights."""
    need("transformers")
    from transformers.models.llama4 import modeling_llama4 as theirs

    assert NUMBERS == (theirs.Llama4TextConfig.floor_scale, theirs.Llama4TextConfig.attn_scale) == (8192, 0.1)
    monkeypatch.setattr(zoo.softmax, "FLOOR_SCALE", floor_scale)
    monkeypatch.setattr(zoo.softmax, "ATTN_SCALE", attn_scale)
    model, h = tiny("nope+llama4"), some_input()
    shape = like(model, head_dim=8, no_rope_layers=[0, 1], attn_temperature_tuning=True, floor_scale=floor_scale,
                 attn_scale=attn_scale, layer_types=["full_attention"] * 2)
    layer = theirs.Llama4TextAttention(theirs.Llama4TextConfig(**shape), 0).double().eval()
    weights = dict(zip("qkv", model.blocks[0].attn.qkv.weight.detach().chunk(3), strict=True))
    weights["o"] = model.blocks[0].attn.proj.weight.detach()
    layer.load_state_dict({f"{part}_proj.weight": w for part, w in weights.items()})
    never = torch.ones(T, T).triu(1).bool()
    right, _ = layer(h, None, torch.zeros(1, 1, T, T).masked_fill(never, -math.inf))
    torch.testing.assert_close(attend(model, h), right, rtol=1e-5, atol=1e-6)  # theirs: factors in fp32
    assert not torch.allclose(attend(model, h), attend(tiny("nope"), h))


def test_llama4_leaves_blocks_with_an_encoding_alone_and_needs_one_without():
    model, bare = tiny("rope+llama4", layers=2, nope_every=2), tiny("rope", layers=2, nope_every=2)
    h = some_input()
    for i, same in ((0, True), (1, False)):
        ours, theirs = (m.blocks[i].attn(h, m.tables(np.arange(T))[m.blocks[i].attn.encoding.settings])
                        for m in (model, bare))
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12) == same
    with pytest.raises(InputError, match="--softmax llama4 is for blocks without an encoding: give --nope-every"):
        tiny("rope+llama4")


# ---- past the trained length -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe, changes", [
    ("rope+log", {}), ("nope+sinks", {}), ("nope+stick", {}), ("fox+sinks", {}), ("t5+sinks", {"nope_every": 2}),
    ("rope+llama4", {"nope_every": 2}), ("expe+sinks", {"variant": {"on": "k"}}),
    ("expe+stick", {"variant": {"on": "k"}}),
    ("alibi+sinks", {"window": 5})], ids=str)
def test_read_in_pieces_and_in_blocks_of_queries_it_is_the_plain_model(pe, changes, monkeypatch):
    model, tokens = tiny(pe, make=Reader, **changes), some_tokens(2, 40)
    with torch.no_grad():
        whole = tiny(pe, **changes)(tokens)
        for size in (1, 7):
            cache = Cache()
            pieces = [model(x, cache=cache) for x in tokens.split(size, 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-10)
        monkeypatch.setattr(longer.reading, "BLOCK", 5)
        torch.testing.assert_close(model(tokens), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pe", ["nope+log", "nope+sinks", "nope+stick", "nope+llama4"])
def test_a_stream_counts_the_keys_that_it_keeps(pe):
    """Of one block without positions: it is the plain model on the first 2 tokens, the last 6 and the new one."""
    model, plain, tokens = tiny(pe, make=Reader, layers=1), tiny(pe, layers=1), some_tokens(2, 30)
    with torch.no_grad():
        found = model(tokens, cache=Cache(2, 6))
        for t in (1, 8, 9, 29):
            seen = sorted({0, 1, *range(max(0, t - 6), t + 1)})
            right = plain(tokens[:, [i for i in seen if i <= t]])[:, -1]
            torch.testing.assert_close(found[:, t], right, rtol=1e-10, atol=1e-10)


def test_log_keeps_its_digits_in_bf16():
    scores = 8 * torch.randn(1, 2, 1, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    s = torch.tensor([0.5, 0.25])
    found, right = (zoo.softmax.log_softmax(scores.to(dtype), s.to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-6)


def test_a_large_sink_takes_all_weight_and_overflows_nothing():
    with np.errstate(over="raise"):
        p, _ = zoo.softmax.sinks(np.zeros((1, 1, 1, 3)), {"sinks": np.array([1e4])})
    assert np.array_equal(p, np.zeros((1, 1, 1, 3)))


# ---- as a user has it ------------------------------------------------------------------------------------------------


def test_a_run_begins_from_one_with_another_softmax(tokens, workplace, tmp_path):
    flags = ["--pe", "rope", "--softmax", "log", *TINY, "--data", tokens, "--steps", "1"]
    done = command("train.py", *flags, "--init-from", workplace / "runs" / "rope", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0 and "blocks.0.attn.encoding.temperature, blocks.1.attn" in done.stdout, done.stderr
