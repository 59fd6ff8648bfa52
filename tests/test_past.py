"""Past the trained length: scaled positions, dual chunk attention, the cache, streams, windows, and memory.

The reader is held equal to the plain GPT of the same weights, and to what the equations say pair by pair.
"""

import dataclasses
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_model import (
    LINEAR,
    SCORED,
    T,
    V,
    bucket_by_formula,
    error_by_quarter,
    same_losses_and_gradients,
    set_each_block,
    some_tokens,
    tiny,
)
from torch.utils._python_dispatch import TorchDispatchMode

import model_numpy
import past.reading
from config import CORE, ENCODINGS, InputError, make_encoding
from expe import expe_table, exqpe_table
from model_torch import GPT
from past.cache import Cache
from past.reading import Reader
from past.scaling import dual_chunk_positions, scaled
from past.scaling import scaled_inv_freq as rope_inv_freq
from past.scaling import scaled_rope_table as rope_table

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def reading(pe="nope", style="gpt", variant=(), **changes):
    """A Reader with the weights of tiny; a variant may have a model's window and nope_every, and a chunk, too."""
    variant = dict(variant)
    changes |= {name: variant.pop(name) for name in ("window", "nope_every") if name in variant}
    chunk, (window, size) = variant.pop("chunk", 0), variant.pop("groups", (0, 0))
    model = tiny(pe, style, variant=variant, make=Reader, **changes)
    if window:
        return model.scale_to(T, rope_scaling="self-extend", chunk=window, factor=size)
    return model.scale_to(T, rope_scaling="dual-chunk", chunk=chunk) if chunk else model


def plain_model(reader):
    """The GPT of model_torch.py with the reader's weights."""
    plain = GPT(reader.config).double().eval()
    plain.load_state_dict(reader.state_dict())
    return plain


def kept(model):
    """How many arrays a cache keeps of a block: keys, values, and where the score asks for it the block's input."""
    return 2 + getattr(model.blocks[0].attn.encoding, "keeps_input", False)


KINDS = [
    *((pe, {}) for pe in ENCODINGS),
    *(("expe", {"on": on}) for on in ("k", "q", "qkv")),
    ("exqpe", {"on": "k"}),
    ("expe", {"once": True}),
    ("expe", {"learn": "random"}),
    ("rope", {"rope_scaling": "yarn", "factor": 3.0}),
    ("rope", {"rope_scaling": "dynamic", "factor": 2.0, "length": 40}),
    ("rope", {"rope_scaling": "longrope", "factor": 2.0, "length": 40, "long": (1.0, 1.5, 2.0, 9.0)}),
    ("rope", {"chunk": 5}),
    ("expe", {"chunk": 5, "scale": 0.5}),
    ("rope", {"groups": (5, 3)}),
    ("expe", {"groups": (4, 2), "scale": 0.5, "nope_every": 2, "window": 9}),
    ("expe", {"nope_every": 2, "window": 5}),
    ("alibi", {"nope_every": 2}),
    ("shaw", {"window": 3}),
]
STUCK = [("sinusoidal", {}), ("learned", {}), ("expe", {"on": "qkv"}), ("expe", {"once": True})]  # these cannot stream
STUCK += [(pe, {}) for pe in ENCODINGS if pe not in CORE and not reading(pe).streams()]  # of zoo/
STREAM = [kind for kind in KINDS if kind not in STUCK]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# ---- RoPE's frequencies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 16.0])
@pytest.mark.parametrize("length", [64, 512, 513, 2048, 10_000])
@pytest.mark.parametrize("trained, base", [(512, 10000.0), (128, 10000.0), (4096, 500000.0)])
@pytest.mark.parametrize("D", [8, 32, 64, 128])
def test_frequencies_are_transformers(D, trained, base, length, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for scaling in ("linear", "dynamic", "yarn"):
        parameters = {"rope_type": scaling, "rope_theta": base, "factor": factor}
        if scaling == "yarn":
            parameters["original_max_position_embeddings"] = trained
        config = LlamaConfig(
            hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=trained, rope_parameters=parameters
        )
        theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling](config, "cpu", seq_len=length)
        ours, attention_factor = rope_inv_freq(D, base, scaling, factor, trained, length)
        np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=3e-6)  # theirs is computed in float32
        assert attention_factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
def test_frequencies_of_drawn_settings_are_transformers(scaling, seed):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = np.random.default_rng(seed)
    D, trained, length = 2 * int(rng.integers(2, 65)), *map(int, np.exp(rng.uniform(3, 12, 2)))
    base, factor = float(np.exp(rng.uniform(3, 14))), float(rng.choice([0.5, 1.0, *rng.uniform(1, 64, 3)]))
    lists = {name: tuple(rng.uniform(0.5, 50, D // 2)) for name in ("long", "short")} if scaling == "longrope" else {}
    own = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
           "longrope": {f"{name}_factor": list(x) for name, x in lists.items()}}[scaling]
    rope = {"rope_type": scaling, "rope_theta": base, "factor": factor, "original_max_position_embeddings": trained}
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, rope_parameters=rope | own)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling](config, "cpu", seq_len=length)
    ours, attention_factor = rope_inv_freq(D, base, scaling, factor, trained, length, **lists)
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=2e-5)  # theirs is computed in float32
    assert attention_factor == pytest.approx(their_factor, rel=1e-12)


def test_llama3_counts_turns_in_the_trained_length():
    """What turns 4 times or more is kept, what turns once at most is divided by s, halfway between it is the mean."""
    D, L, s = 128, 8192, 8.0
    plain = rope_inv_freq(D, 500_000.0)[0]
    ours, turns = rope_inv_freq(D, 500_000.0, "llama3", s, L)[0], L * plain / (2 * math.pi)
    assert np.array_equal(ours[turns >= 4], plain[turns >= 4]) and (turns >= 4).sum() == 29
    assert np.array_equal(ours[turns <= 1], plain[turns <= 1] / s) and (turns <= 1).sum() == 29
    assert (np.diff(ours) < 0).all()
    halfway = 2.5 * 2 * math.pi / plain[32]  # a length in which pair 32 turns 2.5 times
    found = rope_inv_freq(D, 500_000.0, "llama3", s, round(halfway))[0][32]
    assert found == pytest.approx(plain[32] * (1 + 1 / s) / 2, rel=1e-3)


def test_longrope_has_one_list_for_all_keys_of_a_sequence():
    lists = {"long": (1, 2, 3, 4), "short": (1, 1, 1, 1.5)}

    def at(length):
        return rope_inv_freq(8, 10000.0, "longrope", 4.0, 64, length, **lists)

    plain, _ = rope_inv_freq(8)
    np.testing.assert_allclose(at(64)[0], plain / lists["short"], rtol=1e-15)
    np.testing.assert_allclose(at(65)[0], plain / lists["long"], rtol=1e-15)
    assert at(64)[1] == at(65)[1] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    config = tiny("rope").config
    for length, name in ((T, "short"), (T + 1, "long")):
        e = scaled(config, length, rope_scaling="longrope", **lists)[0].encoding
        np.testing.assert_allclose(e.rows(np.array([1]), config)[0, 0, :4] / rope_inv_freq(
            8, 10000.0, "longrope", e.factor, T, length, **lists)[1], np.cos(plain / lists[name]), rtol=1e-12)


def test_scaled_frequencies_by_hand():
    plain, one = rope_inv_freq(32)
    np.testing.assert_allclose(plain[[0, 8, 15]], [1, 0.01, 10 ** (-4 * 30 / 32)], rtol=1e-12)
    np.testing.assert_allclose(rope_inv_freq(32, scaling="linear", factor=4)[0], plain / 4, rtol=1e-15)
    for factor in (2, 4, 16.5):
        ntk, ntk_factor = rope_inv_freq(32, scaling="ntk", factor=factor)
        assert ntk[0] == 1 and ntk[-1] == pytest.approx(plain[-1] / factor, rel=1e-12)
        np.testing.assert_allclose(np.diff(np.log(ntk)), math.log(ntk[1]), rtol=1e-9)  # still one ratio
        for length, stretch in ((100, 1), (512, 1), (1024, 2 * factor - (factor - 1)), (4096, 8 * factor - factor + 1)):
            dynamic = rope_inv_freq(32, scaling="dynamic", factor=factor, trained_length=512, length=length)[0]
            np.testing.assert_allclose(dynamic, rope_inv_freq(32, scaling="ntk", factor=stretch)[0], rtol=1e-12)
    yarn, yarn_factor = rope_inv_freq(32, scaling="yarn", factor=4, trained_length=512)
    right = [1.0, 0.56234133, 0.28234622, 0.13972195, 0.06785714, 0.03213379, 0.01468200, 0.00635100, 0.0025]
    np.testing.assert_allclose(yarn[:9], right, rtol=1e-6)
    np.testing.assert_allclose(yarn[8:], plain[8:] / 4, rtol=1e-12)
    assert yarn_factor == pytest.approx(1.13862944, rel=1e-8) and one == ntk_factor == 1
    assert rope_inv_freq(32, scaling="yarn", factor=0.5)[1] == 1  # never below
    table = rope_table(np.array([0, 3]), 32, scaling="yarn", factor=4, trained_length=512)
    np.testing.assert_allclose(np.hypot(*np.split(table, 2, axis=-1)), 1.13862944, rtol=1e-8)  # once, in one place


def test_identity_inside_the_trained_length():
    plain = rope_inv_freq(16)[0]
    assert np.array_equal(rope_inv_freq(16, scaling="dynamic", factor=7, trained_length=512, length=512)[0], plain)
    for scaling in ("linear", "ntk", "yarn"):
        np.testing.assert_allclose(rope_inv_freq(16, scaling=scaling, factor=1.0)[0], plain, rtol=1e-15)


def test_wrong_scalings_are_named():
    for more, message in (
        ({"scaling": "dynamic"}, "dynamic needs the length of the whole sequence, got None"),
        ({"scaling": "yarn", "factor": 0}, "factor must be above 0 and at most 1e6, got 0"),
        ({"scaling": "linear", "factor": math.inf}, "factor must be above 0 and at most 1e6, got inf"),
        ({"scaling": "dynamic", "length": 0}, "length must be at least 1, got 0"),
        ({"base": 1.0}, "base must be a finite number above 1, got 1.0"),
        ({"scaling": "longrope", "long": (1, 1, 1, 1)}, "longrope needs the length of the whole .* got None, 512"),
        ({"scaling": "longrope", "length": 9}, r"and D/2 = 4 numbers each, long and short; got 9, 512, 0 and 0"),
        ({"scaling": "longrope", "length": 9, "long": (1, 1, 1)}, "got 9, 512, 3 and 3"),
        ({"scaling": "longrope", "length": 9, "long": (1,) * 4, "short": (1,)}, "got 9, 512, 4 and 1"),
        ({"scaling": "ntk", "factor": 1e300}, "factor must be above 0 and at most 1e6, got 1e[+]300"),
        ({"trained_length": 0}, "trained_length must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_inv_freq(8, **more)
    with pytest.raises(ValueError, match="d_head must be at least 4"):
        rope_inv_freq(2, scaling="ntk", factor=2)


# ---- the config of a model that is trained ---------------------------------------------------------------------------


def test_positions_scaled_anew():
    rope, expe = tiny("rope").config, tiny("expe").config  # trained at 12
    e = scaled(rope, 48, rope_scaling="yarn")[0].encoding
    assert (e.rope_scaling, e.factor, e.length, e.base) == ("yarn", 4.0, 48, 10000.0)
    assert scaled(rope, 6, rope_scaling="linear")[0].encoding.factor == 1.0
    assert scaled(rope, 48, rope_scaling="linear", factor=2.5)[0].encoding.factor == 2.5
    assert scaled(rope, 48, rope_scaling="dual-chunk") == (rope, 9) and scaled(rope, 48) == (rope, 0)
    assert scaled(expe, 48, scale="auto")[0].encoding.scale == 0.25 and scaled(expe, 6, scale="auto") == (expe, 0)
    found, chunk = scaled(expe, 48, scale=0.5, rope_scaling="dual-chunk", chunk=4)
    assert found.encoding == dataclasses.replace(expe.encoding, scale=0.5) and chunk == 4
    for trained, more, message in (
        (rope, {"scale": 0.5}, "scale is for expe and exqpe, and rope has no use for it"),
        (expe, {"rope_scaling": "yarn"}, "is for rope, and this run has expe"),
        (tiny("t5").config, {"rope_scaling": "dual-chunk"}, "for expe, exqpe and rope, and this run has t5"),
        (rope, {"rope_scaling": "dual-chunk", "chunk": 0}, "chunk must be from 1 to 11, got 0"),
        (rope, {"rope_scaling": "dual-chunk", "chunk": 2.5}, "chunk must be from 1 to 11, got 2.5"),
        (expe, {"scale": 1e40}, r"scale must be above 0 and at most 1e6, got 1e\+40"),
        (tiny("expe", variant={"on": "qkv"}).config, {"rope_scaling": "dual-chunk"}, "it needs --on qk"),
        (rope, {"rope_scaling": "dual-chunk", "chunk": 12}, "chunk must be from 1 to 11, got 12"),
        (rope, {"rope_scaling": "cubic"}, "rope-scaling must be none, linear, .* or longrope, got 'cubic'"),
        (rope, {"rope_scaling": "longrope"}, "longrope needs .* D/2 = 4 numbers each, .* got 48, 12, 0 and 0"),
        (rope, {"rope_scaling": "longrope", "long": (1.0, 0.0, 1.0, 1.0)}, "long-factors must be numbers above 0"),
        (rope, {"rope_scaling": "self-extend", "factor": 2.5}, "factor must be a whole number of at least 1 for self"),
        (rope, {"rope_scaling": "self-extend", "chunk": 12}, "chunk must be from 1 to 11, got 12"),
        (tiny("t5").config, {"rope_scaling": "self-extend"}, "self-extend is for expe, exqpe and rope, and this run has t5"),
        (tiny("expe", variant={"on": "k"}).config, {"rope_scaling": "self-extend"}, "it needs --on qk"),
        (rope, {"rope_scaling": "ntk", "factor": -1.0}, "factor must be above 0 and at most 1e6, got -1.0"),
        (tiny("expe", variant={"on": "k"}).config, {"rope_scaling": "dual-chunk"}, "it needs --on qk"),
        (tiny("rope", n_heads=8).config, {"rope_scaling": "ntk"}, "d_head must be at least 4"),
    ):
        with pytest.raises(InputError, match=message):
            scaled(trained, 48, **more)


def test_scale_multiplies_the_papers_values():
    n = np.arange(30)
    for pe, table in (("expe", expe_table), ("exqpe", exqpe_table)):
        model = tiny(pe, variant={"scale": 0.5, "start": 0.25})
        numbers = (1 / 48,) if pe == "expe" else (1 / 48, 1 / 16)
        rows = model.config.encoding.rows(n, model.config)
        np.testing.assert_allclose(rows, table(n, 5, 0.25, *numbers) / 2, rtol=1e-15)
    plain = tiny("expe")
    halved = GPT(dataclasses.replace(plain.config, encoding=dataclasses.replace(plain.config.encoding, scale=0.5)))
    halved.double().eval().load_state_dict(plain.state_dict())
    theta = GPT(dataclasses.replace(plain.config, encoding=make_encoding("expe", l=5, theta=1 / 96)))
    theta.double().eval().load_state_dict(plain.state_dict())
    tokens = some_tokens(2, 30)
    torch.testing.assert_close(halved(tokens), theta(tokens), **EXACT)  # start is 0: half of theta is half of all
    assert not torch.allclose(halved(tokens), plain(tokens))


def test_a_reader_goes_back_and_forth_between_positions_of_its_model():
    model, tokens = reading("rope"), some_tokens(2, 30)
    trained, plain = model.config, model(tokens)
    yarn = model.scale_to(30, rope_scaling="yarn")(tokens)
    alone = tiny("rope", variant={"rope_scaling": "yarn", "factor": 2.5})
    torch.testing.assert_close(yarn, alone(tokens), **EXACT)
    assert not torch.allclose(yarn, plain)
    assert torch.equal(model.scale_to(30)(tokens), plain) and model.config == model.trained == trained
    assert torch.equal(model.scale_to(30, rope_scaling="yarn")(tokens), yarn)


# ---- dual chunk attention --------------------------------------------------------------------------------------------


def test_dual_chunk_positions():
    same, before, further = dual_chunk_positions(np.arange(12), 4, 2)
    assert same.tolist() == [0, 1, 2, 3] * 3
    assert before.tolist() == [4, 5, 6, 6] * 3 and further.tolist() == [6] * 12
    assert dual_chunk_positions(5, 4, 9)[2] == 7  # 2c - 1 is as far as a key two chunks back can be


def dual_chunk_in_loops(h, model, lay):
    """One attention layer, pair by pair: lay(part, x, n) gives a query or key its position."""
    c, context = model.chunk, model.config.context
    attention, S = model.blocks[0].attn, len(h)
    out = np.zeros_like(h)
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        w_q, w_k, w_v = (w[rows] for w in np.split(attention.qkv.weight.numpy(), 3))
        for m in range(S):
            scores = []
            for n in range(m + 1):
                farthest = context - 1
                where = {0: m % c, 1: min(m % c + c, farthest)}.get(m // c - n // c, min(2 * c - 1, farthest))
                scores.append(lay(h[m], w_q, where) @ lay(h[n], w_k, n % c) / math.sqrt(8))
            p = np.exp(np.array(scores) - max(scores))
            out[m, rows] = (p / p.sum()) @ (h[: m + 1] @ w_v.T)
    return out @ attention.proj.weight.numpy().T


@pytest.mark.parametrize("chunk", [1, 4, 7, 11])
@pytest.mark.parametrize("pe", ["rope", "expe", "exqpe"])
def test_dual_chunk_attention_follows_its_definition(pe, chunk):
    model, n = reading(pe, variant={"chunk": chunk}), np.arange(40)
    h = torch.randn(1, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def lay(x, w, n):
        if pe == "rope":
            q = w @ x
            z = (q[:4] + 1j * q[4:]) * np.exp(1j * n * 10000.0 ** (-2 * np.arange(4) / 8))
            return np.concatenate((z.real, z.imag))
        row = expe_table(n, 5, 0, 1 / 48) if pe == "expe" else exqpe_table(n, 5, 0, 1 / 48, 1 / 16)
        return w @ np.concatenate((row, x[5:]))

    ours = model.blocks[0].attn(h, model.tables(n)[model.config.encoding])[0]
    np.testing.assert_allclose(ours, dual_chunk_in_loops(h[0].numpy(), model, lay), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pe", ["rope", "expe", "exqpe"])
def test_dual_chunk_is_the_plain_model_up_to_one_chunk(pe):
    model, plain, tokens = reading(pe, variant={"chunk": 8}), tiny(pe), some_tokens(2, 20)
    torch.testing.assert_close(model(tokens[:, :8]), plain(tokens[:, :8]), **EXACT)
    assert pe != "rope" or torch.equal(model(tokens[:, :8]), plain(tokens[:, :8]))  # an override is a sum of two here
    if pe == "rope":  # within the local window, of 12 - 1 - 8 tokens, distances are true across the edge of a chunk
        torch.testing.assert_close(model(tokens)[:, :12], plain(tokens)[:, :12], **EXACT)
    assert not torch.allclose(model(tokens), plain(tokens))


# ---- Self-Extend -----------------------------------------------------------------------------------------------------


def self_extend_in_loops(h, model, w, G, turn):
    """One attention layer of RoPE, pair by pair, by the distance that a pair is given; turn(x, distance)."""
    attention, S = model.blocks[0].attn, len(h)
    out, given = np.zeros_like(h), np.zeros((S, S), int)
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        w_q, w_k, w_v = (x[rows] for x in np.split(attention.qkv.weight.numpy(), 3))
        for m in range(S):
            for n in range(m + 1):
                given[m, n] = m - n if m - n < w else m // G - n // G + w - w // G
            scores = np.array([turn(w_q @ h[m], given[m, n]) @ (w_k @ h[n]) / math.sqrt(8) for n in range(m + 1)])
            p = np.exp(scores - scores.max())
            out[m, rows] = (p / p.sum()) @ (h[: m + 1] @ w_v.T)
    return out @ attention.proj.weight.numpy().T, given


@pytest.mark.parametrize("w, G", [(1, 2), (4, 3), (6, 5), (11, 40), (6, 1)])
def test_self_extend_follows_its_definition(w, G):
    model, n = reading("rope", variant={"groups": (w, G)}), np.arange(40)
    h = torch.randn(1, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def turn(x, d):
        z = (x[:4] + 1j * x[4:]) * np.exp(1j * d * 10000.0 ** (-2 * np.arange(4) / 8))
        return np.concatenate((z.real, z.imag))

    ours = model.blocks[0].attn(h, model.tables(n)[model.config.encoding])[0]
    right, given = self_extend_in_loops(h[0].numpy(), model, w, G, turn)
    np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-12)
    assert G > 1 or np.array_equal(given, np.tril(n[:, None] - n))


@pytest.mark.parametrize("length", [1, 12, 13, 40, 200])
@pytest.mark.parametrize("w", [1, 4, 6, 11])
def test_by_the_size_that_is_chosen_no_distance_is_above_the_trained_ones_and_by_a_smaller_one_some_are(w, length):
    config, (window, G) = scaled(tiny("rope").config, length, rope_scaling="self-extend", chunk=w)
    farthest = {size: max(d if d < w else (length - 1) // size - (length - 1 - d) // size + w - w // size
                          for d in range(length)) for size in (G, G - 1) if size}
    assert window == w and farthest[G] < T and (G == 1 or farthest[G - 1] >= T) and (G == 1) == (length <= T)


def test_self_extend_is_the_plain_model_up_to_its_window_or_the_trained_length():
    model, plain, tokens = reading("rope", variant={"groups": (7, 4)}), tiny("rope"), some_tokens(2, 30)
    torch.testing.assert_close(model(tokens)[:, :7], plain(tokens)[:, :7], **EXACT)
    assert not torch.allclose(model(tokens)[:, 8:], plain(tokens)[:, 8:])
    by_itself = reading("rope").scale_to(T, rope_scaling="self-extend")
    torch.testing.assert_close(by_itself(tokens[:, :T]), plain(tokens[:, :T]), **EXACT)


# ---- the cache -------------------------------------------------------------------------------------------------------


def longer(model):
    """Learned positions have 12 rows: the other encodings are asked for 40 tokens."""
    return min(model.longest, 40)


@pytest.mark.parametrize("positions", ["default", "gaps", "own"])
@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("pe, variant", KINDS, ids=str)
def test_cached_logits_equal_uncached_ones(pe, variant, style, size, positions):
    model = reading(pe, style, variant)
    S, rng = longer(model), np.random.default_rng(0)
    tokens, n = some_tokens(3, S), {
        "default": np.arange(S),
        "gaps": np.sort(rng.choice(min(model.longest, 90), S, replace=False)),
        "own": rng.integers(0, S, (3, S)),
    }[positions]
    whole, cache = model(tokens, positions=None if positions == "default" else n), Cache()
    if not model.chunk:
        torch.testing.assert_close(whole, plain_model(model)(tokens, positions=n), **EXACT)
    for first in range(0, S, size):
        piece = slice(first, min(first + size, S))
        given = None if positions == "default" and first % 2 else n[..., piece]  # both ways of the same positions
        logits = model(tokens[:, piece], positions=given, cache=cache)
        torch.testing.assert_close(logits, whole[:, piece], **EXACT)
    assert len(cache) == S and np.array_equal(cache.positions, n)
    assert cache.nbytes == 2 * kept(model) * 3 * S * 16 * 8  # blocks, parts, sequences, tokens, width, float64


@pytest.mark.parametrize("pe, variant", KINDS, ids=str)
def test_reading_by_blocks_changes_nothing(pe, variant, monkeypatch):
    model = reading(pe, variant=variant)
    whole_model, S = model if model.chunk else plain_model(model), longer(model)
    tokens, targets = some_tokens(2, S), some_tokens(2, S, seed=3)
    whole, losses = whole_model(tokens), whole_model.token_losses(tokens, targets)
    monkeypatch.setattr(past.reading, "BLOCK", 5)
    torch.testing.assert_close(model(tokens), whole, **EXACT)
    torch.testing.assert_close(model.token_losses(tokens, targets), losses, **EXACT)
    cache = Cache()
    model(tokens[:, :3], cache=cache)
    torch.testing.assert_close(model(tokens[:, 3:], cache=cache), whole[:, 3:], **EXACT)


def test_a_cache_that_does_not_fit_is_refused_and_left_as_it_was():
    model, cache = reading("learned"), Cache()
    model(some_tokens(2, 10), cache=cache)
    for tokens, message in (
        (some_tokens(3, 1), "the cache holds 2 sequences, and there are 3 in tokens"),
        (torch.full((2, 1), V), f"tokens must be from 0 to {V - 1}, got {V}"),
        (some_tokens(2, 3), "none for position 12"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, cache=cache)
        assert len(cache) == 10 and all(cache[block.attn].shape[3] == 10 for block in model.blocks)
    with pytest.raises(InputError, match="a cache needs causal attention"):
        reading(causal=False)(some_tokens(1, 2), cache=Cache())
    with pytest.raises(InputError, match="a stream sets its own positions"):
        reading()(some_tokens(1, 2), positions=torch.arange(2), cache=Cache(1, 3))
    for pe, variant in STUCK:
        with pytest.raises(InputError, match=f"{pe} cannot stream as trained here: positions are part of"):
            reading(pe, variant=variant)(some_tokens(1, 2), cache=Cache(1, 3))
    used = Cache()
    reading()(some_tokens(1, 2), cache=used)
    with pytest.raises(InputError, match="the cache was filled by another model"):
        reading()(some_tokens(1, 2), cache=used)
    for sinks, window in ((-1, 3), (0, 0), (4, None), (1.5, 3)):
        with pytest.raises(InputError, match="sinks of at least 0 and a window of at least 1"):
            Cache(sinks, window)


@pytest.mark.parametrize("given, message", [
    ({"tokens": torch.full((2, 3), V)}, f"tokens must be from 0 to {V - 1}, got {V}"),
    ({"targets": torch.full((2, 3), -1)}, f"targets must be from 0 to {V - 1}, got -1"),
    ({"targets": some_tokens(3, 2)}, r"targets must be integers of shape \(2, 3\), got int64 of \(3, 2\)"),
    ({"positions": np.arange(4)}, r"positions must be integers of shape \(3,\) or \(2, 3\), got int64 of \(4,\)"),
])
def test_a_reader_refuses_what_the_plain_model_does(given, message):
    for model in (reading("expe"), tiny("expe")):
        with pytest.raises(ValueError, match=message):
            model(**{"tokens": some_tokens(2, 3), "targets": some_tokens(2, 3)} | given)


def test_what_each_block_has_of_its_own_is_cached_and_streamed(monkeypatch):
    set_each_block(monkeypatch, "t5")
    model, tokens = reading("t5", nope_every=3, n_layers=3), some_tokens(2, 40)
    own = [name for name in model.state_dict() if "encoding" in name]
    assert own == ["blocks.0.attn.encoding.weight", "blocks.1.attn.encoding.weight"]
    assert not torch.equal(*(model.state_dict()[name] for name in own))
    whole = plain_model(model)(tokens)
    for size in (1, 2, 7):
        cache = Cache()
        torch.testing.assert_close(torch.cat([model(x, cache=cache) for x in tokens.split(size, 1)], 1), whole, **EXACT)
    brute = [stream_by_doors(model, row.tolist(), 2, 6) for row in tokens]
    np.testing.assert_allclose(model(tokens, cache=Cache(2, 6)), brute, rtol=1e-9, atol=1e-10)
    monkeypatch.setattr(past.reading, "BLOCK", 5)
    torch.testing.assert_close(model(tokens), whole, **EXACT)


def test_an_override_of_values_cannot_stream_whatever_the_dtype_or_if_each_block_has_its_own(monkeypatch):
    merged = {"on": "qkv", "start": 1.0, "theta": 1 / 2048}  # positions 0 and 1 are one number in bf16
    assert not reading("expe", variant=merged).bfloat16().streams()
    set_each_block(monkeypatch, "expe")
    assert reading("expe").streams() and not reading("expe", variant={"on": "qkv"}).streams()


def test_what_is_kept_of_positions_follows_the_weights():
    model, tokens = reading("expe", variant={"learn": "random"}), some_tokens(2, 20)
    for name in ("blocks.0.attn.qkv.weight", "encoding.weight"):
        before = model(tokens, cache=Cache(0, 30))
        model.get_parameter(name).mul_(1.5)
        after = model(tokens, cache=Cache(0, 30))
        torch.testing.assert_close(after, plain_model(model)(tokens), **EXACT)
        assert not torch.allclose(after, before)


@torch.enable_grad()
def test_gradients_pass_through_dual_chunks_again_and_again():
    model, tokens, found = reading("expe", variant={"chunk": 5}), some_tokens(2, 20), []
    for _ in range(2):
        with torch.no_grad():
            model(tokens)
        model.zero_grad()
        model(tokens, tokens).backward()
        found.append(model.blocks[0].attn.qkv.weight.grad)
    w, step = model.blocks[0].attn.qkv.weight, 1e-6
    with torch.no_grad():
        slopes = []
        for change in (step, -2 * step):
            w[19, 2] += change  # of W_k, in a column that is overridden
            slopes.append(model(tokens, tokens).item())
    assert torch.equal(*found)
    assert found[0][19, 2].item() == pytest.approx((slopes[0] - slopes[1]) / (2 * step), rel=1e-6)


# ---- streams ---------------------------------------------------------------------------------------------------------


def stream_in_loops(model, tokens, sinks, window):
    """Logits (T, V) of one token after the other, in NumPy and from the equations alone.

    Every token's keys before position, and values, are kept as first computed. Each step picks the first `sinks` and
    the last `window` of those before it, lays them and the token itself at 0, 1, 2, ..., and takes one softmax, which
    leaves out what is further back than the block's own window.
    """
    D = 8
    p = {name: value.numpy() for name, value in model.state_dict().items()}
    ramp, e = 1 / (4 * T), model.config.encoding
    if e.pe == "rope":
        lists = {"long": e.long} if e.rope_scaling == "longrope" else {}
        inv_freq, factor = rope_inv_freq(D, 10000.0, e.rope_scaling, e.factor, T, e.length, **lists)

    def norm(x, name):
        z = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        return z * p[f"{name}.weight"] + p[f"{name}.bias"]

    def position_part(e, w, n, part):
        if e.pe not in ("expe", "exqpe") or part not in e.on:
            return 0
        theta = 64 / T if e.on == "k" else ramp
        two = p.get("encoding.weight", {"expe": (0.0, theta), "exqpe": (ramp, 1 / 16)}[e.pe])
        row = expe_table(n, 5, *two) if e.pe == "expe" else exqpe_table(n, 5, 0.0, *two)
        return w[:, :5] @ (e.scale * row)

    def content(e, w, h, part):
        return w @ (np.concatenate((np.zeros(5), h[5:])) if e.pe in ("expe", "exqpe") and part in e.on else h)

    def turned(e, x, n):
        if e.pe != "rope":
            return x
        z = (x[:4] + 1j * x[4:]) * np.exp(1j * n * inv_freq) * factor
        return np.concatenate((z.real, z.imag))

    kept, logits = [[] for _ in model.blocks], []
    for t, token in enumerate(tokens):
        x = p["embedding.weight"][token]
        for i in range(len(model.blocks)):
            h, (e, block_window) = norm(x, f"blocks.{i}.norm1"), model.config.block(i)
            w_q, w_k, w_v = np.split(p[f"blocks.{i}.attn.qkv.weight"], 3)
            seen = sorted({*range(min(sinks, t)), *range(max(0, t - window), t)})
            kept[i].append((content(e, w_k, h, "k"), w_v @ h))
            keys = [kept[i][s][0] + position_part(e, w_k, n, "k") for n, s in enumerate([*seen, t])]
            values = [kept[i][s][1] for s in [*seen, t]]
            m = len(seen)  # the token's own position
            q, y = content(e, w_q, h, "q") + position_part(e, w_q, m, "q"), np.zeros(16)
            for head in range(2):
                part, scores, rows = slice(head * D, head * D + D), [], []
                for n in range(max(0, m + 1 - block_window) if block_window else 0, m + 1):
                    k, v = keys[n][part], values[n][part]
                    if e.pe == "shaw":
                        k = k + p["encoding.keys"][min(m - n, 5)]
                        v = v + p["encoding.values"][min(m - n, 5)]
                    score = turned(e, q[part], m) @ turned(e, k, n) / math.sqrt(D)
                    if e.pe == "alibi":
                        score -= 2.0 ** (-4 * (head + 1)) * (m - n)
                    if e.pe == "t5":
                        score += p["encoding.weight"][bucket_by_formula(m - n, 6, 5), head]
                    scores.append(score)
                    rows.append(v)
                weights = np.exp(np.array(scores) - max(scores))
                y[part] = weights / weights.sum() @ np.array(rows)
            x = x + p[f"blocks.{i}.attn.proj.weight"] @ y
            u = p[f"blocks.{i}.mlp.up.weight"] @ norm(x, f"blocks.{i}.norm2")
            gelu = 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            x = x + p[f"blocks.{i}.mlp.down.weight"] @ gelu
        logits.append(p["head.weight"] @ norm(x, "norm"))
    return np.array(logits)


def stream_by_doors(model, tokens, sinks, window):
    """stream_in_loops for any encoding: each step is model_numpy's attention over the inputs of what the token sees,

    found at 0, 1, 2, ..., of which the last row counts.
    """
    c, p = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    under, inputs, logits = model_numpy.under, [[] for _ in model.blocks], []

    def norm(x, p):
        return model_numpy.NORMS[c.norm][0](x, c.norm_eps, **p)[0]

    for t, token in enumerate(tokens):
        x = p["embedding.weight"][None, None, token]
        seen = [*sorted({*range(min(sinks, t)), *range(max(0, t - window), t)}), t]
        for i, kept in enumerate(inputs):
            (settings, block_window), block = c.block(i), under(f"blocks.{i}.", p)
            own = under("attn.encoding.", block) if model_numpy.doors_of(settings, model.config).each_block else under("encoding.", p)
            kept.append(norm(x, under("norm1.", block)))
            h = np.concatenate([kept[s] for s in seen], axis=1)
            at = model_numpy.tables(settings, np.arange(len(seen)), c, float)
            doors, attn = model_numpy.doors_of(settings, model.config), under("attn.", block)
            x = x + model_numpy.attention_forward(h, attn, c, doors, at, own, block_window)[0][:, -1:]
            x = x + model_numpy.MLPS[c.mlp][0](norm(x, under("norm2.", block)), under("mlp.", block))[0]
        logits.append(p["head.weight"] @ norm(x, under("norm.", p))[0, 0])
    return np.array(logits)


@pytest.mark.parametrize("sinks, window", [(2, 6), (0, 4), (4, 1)])
@pytest.mark.parametrize("pe, variant", [(pe, v) for pe, v in STREAM if not {"chunk", "groups"} & {*v}], ids=str)
def test_a_stream_of_twenty_windows_equals_brute_force(pe, variant, sinks, window):
    model, cache = reading(pe, variant=variant), Cache(sinks, window)
    tokens, brute_force = some_tokens(2, 20 * (sinks + window)), stream_in_loops
    if pe not in CORE:  # of zoo/: the loops do not know it
        brute_force = stream_by_doors
    brute = [brute_force(model, row.tolist(), sinks, window) for row in tokens]
    sizes, ours = itertools.cycle([sinks + window - 1, 1, 1, 2, 7]), []
    while sum(x.shape[1] for x in ours) < tokens.shape[1]:
        first = sum(x.shape[1] for x in ours)
        ours.append(model(tokens[:, first : first + next(sizes)], cache=cache))
        assert len(cache) <= sinks + window + 1
        assert cache.nbytes <= 2 * kept(model) * 2 * (sinks + window + 1) * 16 * 8
    np.testing.assert_allclose(torch.cat(ours, 1), np.array(brute), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("pe, variant", STREAM, ids=str)
def test_a_stream_is_the_plain_model_until_its_window_is_full(pe, variant):
    model, tokens = reading(pe, variant=variant), some_tokens(2, 40)
    plain = (model if model.chunk else plain_model(model))(tokens)
    streamed = model(tokens, cache=Cache(2, 8))
    torch.testing.assert_close(streamed[:, :11], plain[:, :11], **EXACT)
    far = model.config.window == 0 or model.config.nope_every > 0  # or else each block sees its last 3 keys either way
    assert torch.allclose(streamed[:, 11:], plain[:, 11:], rtol=1e-10, atol=1e-10) != far
    torch.testing.assert_close(model(tokens, cache=Cache(2, 37)), plain, **EXACT)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that any operation made, views of smaller ones left out."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("pe, variant", [(pe, v) for pe, v in KINDS if reading(pe).longest > T], ids=str)
def test_no_array_grows_with_the_square_of_the_length(pe, variant, monkeypatch):
    monkeypatch.setattr(past.reading, "BLOCK", 32)
    model, sizes = reading(pe, variant=variant).float(), []
    for S in (512, 1024):
        with Largest() as largest:
            model.token_losses(some_tokens(1, S), some_tokens(1, S, seed=2))
            if (pe, variant) in STREAM:
                model.hidden(some_tokens(1, S), cache=Cache(4, 2 * S))
        sizes.append(largest.size)
    assert sizes[1] <= 2 * sizes[0] and sizes[1] < 1024 * 1024 / 4


@pytest.mark.parametrize("pe, variant", LINEAR, ids=str)
def test_a_linear_bias_needs_no_blocks_of_queries(pe, variant):
    model = reading(pe, variant=variant)
    assert model.begins(4096, None) == [0] == reading().begins(4096, None) != reading("t5").begins(4096, None)
    assert model.at(model.blocks[0].attn.encoding, np.arange(4096), np.arange(4096), False).pairs is None


@torch.enable_grad()
@pytest.mark.parametrize("dtype, digits", [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("pe, variant", LINEAR, ids=str)
def test_what_is_read_at_once_has_the_plain_gradients(pe, variant, dtype, digits):
    model = reading(pe, variant=variant).to(dtype)
    same_losses_and_gradients(model, plain_model(model).to(dtype), digits)


# ---- digits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe, variant", SCORED, ids=str)
def test_positions_cost_bf16_reading_no_digits(pe, variant):
    """In no quarter of 42 times the trained length is the error twice NoPE's own."""
    bare = error_by_quarter(reading().bfloat16(), "nope")
    assert (error_by_quarter(reading(pe, variant=variant).bfloat16(), pe, variant) < 2 * bare).all()


def error_in_fp32(pe, variant, first, size=256):
    """The largest error of the logits of 256 tokens at positions from `first` on, read in fp32, so many at a time."""
    model, n, tokens, cache = reading(pe, variant=variant), np.arange(first, first + 256), some_tokens(2, 256), Cache()
    right, model = plain_model(model)(tokens, positions=n), model.float()
    pieces = [model(x, positions=at, cache=cache)
              for x, at in zip(tokens.split(size, 1), np.split(n, 256 // size), strict=True)]
    return (torch.cat(pieces, 1) - right).abs().max().item()


def test_late_positions_in_fp32():
    """Distances keep their digits at any position; an override of queries and keys loses them with the square."""
    print()
    linear = [(pe, variant) for pe, variant in LINEAR if pe != "fox"]  # whose tokens count, wherever they are
    kinds, error = [("nope", {}), ("rope", {}), *linear, ("expe", {}), ("exqpe", {})], {}
    for pe, variant in kinds:
        at = [error_in_fp32(pe, variant, first) for first in (0, 2_048, 16_384, 65_536, 10**6)]
        error[pe, *variant.values()] = at
        print(f"{pe:6}{variant!s:60}" + "".join(f"{x:10.1e}" for x in at))
    for pe, variant in linear:
        by_pieces = error_in_fp32(pe, variant, 10**6, size=8)
        assert max(*error[pe, *variant.values()], by_pieces) < 4 * error["nope",][0]
    assert error["expe",][2] > 100 * error["nope",][0]  # 16,384; by 10^6 each query sees one key alone


def test_an_override_that_is_not_affine_is_refused_by_streams():
    model = reading("expe")
    assert model.streams()
    model.encoding.override = lambda h, table: [h * (1 + table.sum(-1, keepdim=True))] * 2 + [h]
    with pytest.raises(InputError, match="cannot stream as trained here"):
        model(some_tokens(1, 2), cache=Cache(1, 3))


def test_alibis_bias_keeps_its_digits_at_16384():
    """-slope (m - n) in fp32, where slope n, which gives the same attention, would lose three digits."""
    n, model = np.arange(16384 - 256, 16384), tiny("alibi", n_heads=2)
    distances = torch.from_numpy(model.config.encoding.pairs(n[-64:], n, model.config))
    q = distances.new_zeros(1, 2, 64, 8)
    table = model.encoding.score(q, q, None, distances).numpy()
    assert table.shape == (2, 64, 256)
    scores = np.random.default_rng(0).standard_normal((2, 64, 256))
    scores += np.triu(np.full((64, 256), -np.inf), 256 - 64 + 1)
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    exact = softmax(scores - slopes * (n[-64:, None] - n))
    np.testing.assert_allclose(softmax(scores + table), exact, rtol=1e-12)

    def error(bias):
        return np.abs(softmax(scores.astype(np.float32) + bias.astype(np.float32)) - exact).max() / exact.max()

    assert np.array_equal(model.encoding.score(q, q, None, distances.float()).numpy(), table.astype(np.float32))
    assert error(table) < 1e-6 < 20e-6 < error(slopes * n)


PEAK = """
import sys, numpy as np, torch
from dataclasses import replace
from config import PRESETS, make_encoding
from lab.bench import peak_bytes
from past.reading import Reader
preset, pe, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = PRESETS[preset].model
encoding = config.encoding if pe == "expe" else make_encoding(pe)
model = Reader(replace(config, encoding=encoding)).eval()
tokens = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1)))
assert torch.isfinite(model.token_losses(tokens[:, :-1], tokens[:, 1:])).all()
print(peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("preset, length", [("mini", 16384), ("paper-35m", 8192)])
@pytest.mark.parametrize("pe", [pe for pe in ENCODINGS if reading(pe).longest > T])
def test_peak_memory_of_a_long_document(pe, preset, length):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, preset, pe, str(length)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    peak = int(done.stdout)
    print(f"{preset}, {pe}, {length:,} tokens: {peak / 1e9:.2f} GB")
    assert peak < 3e9  # the whole process; a bias for all pairs would take 4.3 GB for mini, 3.2 GB for paper-35m
