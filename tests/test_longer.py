"""longer/: scaled positions, dual chunks, the cache, streams, hold and least slopes, windows, and memory.

The reader is compared with the plain GPT of the same weights, and with what the equations say pair by pair.
"""

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import need, slow
from test_ladder import T, attention_in_loops, tiny
from test_model import (
    LINEAR,
    OTHERS,
    SCORED,
    error_by_quarter,
    keeps_its_digits,
    some_tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode

import longer.reading
import model_numpy
from expe import expe_table, exqpe_table
from lab.measures import Window
from longer.cache import Cache
from longer.flags import stream_sizes
from longer.methods import STEEP, scale_positions
from longer.modes import DualChunks, Mode, SelfExtend
from longer.reading import Reader
from longer.scaling import scaled_inv_freq as rope_inv_freq
from model_torch import GPT, Attention
from positional_encodings import CORE, ENCODINGS
from settings import InputError

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def reading(pe="nope", style="gpt", variant=(), **changes):
    """A Reader with the weights of tiny; a variant may have a model's settings of blocks, and a chunk, too."""
    variant = dict(variant)
    changes |= {name: variant.pop(name) for name in ("window", "nope_every", "cycle") if name in variant}
    chunk, (window, size) = variant.pop("chunk", 0), variant.pop("groups", (0, 0))
    model = tiny(pe, style, variant=variant, make=Reader, **changes)
    if window:
        return model.scale_to(T, rope_scaling="self-extend", chunk=window, factor=size)
    return model.scale_to(T, rope_scaling="dual-chunk", chunk=chunk) if chunk else model


def plain_model(reader, **parts):
    """The GPT of model_torch.py with the reader's weights."""
    plain = GPT(reader.config, **parts).double().eval()
    plain.load_state_dict(reader.state_dict())
    return plain


def width_kept(model):
    """How many numbers a cache keeps of a token in a block: a key, a value, and what `keep` makes, of two heads."""
    encoding, h = model.blocks[0].attn.encoding, torch.zeros(1, 1, 16, dtype=torch.float64)
    table = encoding.settings.rows(np.arange(1), model.config)
    x = h.view(1, 1, 2, 8).transpose(1, 2)
    _, k = encoding.rotate(x, x, None if table is None else torch.from_numpy(table))
    kept = encoding.key_state(h)
    return 2 * (k.shape[-1] + 8 + (0 if kept is h else kept.shape[-1]))


@pytest.mark.parametrize("variant", [{"on": "k"}, {}])
def test_a_reader_that_has_read_forgets_what_it_found_in_the_settings_before(variant):
    """A linear bias is found in the settings, of which --scale changes the step."""
    used, fresh = reading("expe", variant=variant), reading("expe", variant=variant)
    tokens = torch.arange(2 * T).view(1, -1) % 10
    with torch.no_grad():
        before = used(tokens)
        after, right = (reader.scale_to(2 * T, scale=3.0)(tokens) for reader in (used, fresh))
    assert torch.equal(after, right) and not torch.equal(after, before)


@pytest.mark.parametrize("pe, stream", [("rove", None), ("fox", None), ("rope", (2, 5))])
def test_windows_of_any_lengths_and_targets_have_the_losses_of_all_their_tokens(pe, stream):
    model, read = tiny(pe, make=Reader).float(), []
    sizes = [(130, 70), (12, 1), (12, 12), (12, 5), (7, 3), (130, 3), (130, 130), (130, 2)]     # tokens, of them scored
    windows = [Window(some_tokens(1, n + 1, seed=i)[0].numpy(), scored, i) for i, (n, scored) in enumerate(sizes)]
    found = model.window_losses(windows, SimpleNamespace(update=read.append), stream)
    assert sum(read) == sum(n for n, _ in sizes)
    for window, losses in zip(windows, found, strict=True):
        tokens = torch.from_numpy(window.tokens)[None]
        right = model.token_losses(tokens[:, :-1], tokens[:, 1:], cache=Cache(*stream) if stream else None)
        np.testing.assert_allclose(losses, right[0, -window.scored :].numpy(), rtol=1e-5, atol=1e-5)


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
    ("rope", {"cycle": "rope:window=4,t5:buckets=6:max_distance=5"}),
    ("rope", {"cycle": "rope,rope:base=50:window=7"}),
    ("expe", {"cycle": "expe:window=5,expe:on=k:l=3:theta=4/9"}),
]
STUCK = [("sinusoidal", {}), ("learned", {}), ("expe", {"on": "qkv"}), ("expe", {"once": True})]  # these cannot stream
STUCK += [(pe, {}) for pe in ENCODINGS if pe not in CORE and not reading(pe).can_stream()]  # of zoo/
STREAM = [kind for kind in KINDS if kind not in STUCK]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# ---- RoPE's frequencies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_frequencies_are_transformers(scaling, seed):
    need("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = np.random.default_rng(seed)
    D, trained, length = 2 * int(rng.integers(2, 65)), *map(int, np.exp(rng.uniform(3, 12, 2)))
    base, factor = float(np.exp(rng.uniform(3, 14))), float(rng.choice([0.5, 1.0, *rng.uniform(1, 64, 3)]))
    lists = {name: tuple(rng.uniform(0.5, 50, D // 2)) for name in ("long", "short")} if scaling == "longrope" else {}
    own = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
           "longrope": {f"{name}_factor": list(x) for name, x in lists.items()}}.get(scaling, {})
    rope = {"rope_type": scaling, "rope_theta": base, "factor": factor, "original_max_position_embeddings": trained}
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=trained,
                         rope_parameters=rope | own)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling](config, "cpu", seq_len=length)
    ours, attention_factor = rope_inv_freq(D, base, scaling, factor, trained, length, **lists)
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=2e-5 if own else 3e-6)  # theirs: in float32
    assert attention_factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("D, fading", [(128, 20), (32, 5), (8, 1), (2, 0)])
def test_clipped_fades_the_slowest_pairs_whatever_the_factor(D, fading):
    found, factor = rope_inv_freq(D, 500.0, "clipped")
    plain, _ = rope_inv_freq(D, 500.0)
    right = [f * 0.5 * (1 + math.cos(math.pi * max(0, j) / max(1, fading - 1)))
             for j, f in enumerate(plain, start=fading - D // 2)]
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-15)
    assert factor == 1 and rope_inv_freq(D, 500.0, "clipped", 8.0)[0].tolist() == found.tolist()
    assert fading < 2 or found[-1] < 1e-15 < found[-2]


def test_longrope_has_one_list_for_all_keys_of_a_sequence_and_its_factor_is_in_the_tables_once():
    lists = {"long": (1, 2, 3, 4), "short": (1, 1, 1, 1.5)}
    config = tiny("rope").config
    for length, name, factor in ((T, "short", 1), (T + 1, "long", math.sqrt(1 + math.log(1 + 1 / T) / math.log(T)))):
        rows = scale_positions(config, length, rope_scaling="longrope", **lists)[0].encoding.rows(np.array([1]), config)
        right = np.cos(rope_inv_freq(8)[0] / lists[name]) * factor
        np.testing.assert_allclose(rows[0, 0, :4], right, rtol=1e-12)


def test_ntk_slows_the_last_pair_by_its_factor_and_dynamic_is_ntk_of_a_growing_one():
    plain, _ = rope_inv_freq(32)
    for factor in (2, 4, 16.5):
        ntk, one = rope_inv_freq(32, scaling="ntk", factor=factor)
        assert ntk[0] == one == 1 and ntk[-1] == pytest.approx(plain[-1] / factor, rel=1e-12)
        np.testing.assert_allclose(np.diff(np.log(ntk)), math.log(ntk[1]), rtol=1e-9)  # still one ratio
        for length, stretch in ((100, 1), (512, 1), (1024, 2 * factor - (factor - 1)), (4096, 8 * factor - factor + 1)):
            dynamic = rope_inv_freq(32, scaling="dynamic", factor=factor, trained_length=512, length=length)[0]
            np.testing.assert_allclose(dynamic, rope_inv_freq(32, scaling="ntk", factor=stretch)[0], rtol=1e-12)


# ---- the config of a model that is trained ---------------------------------------------------------------------------


def test_positions_scaled_anew():
    rope, expe = tiny("rope").config, tiny("expe").config  # trained at 12
    e = scale_positions(rope, 48, rope_scaling="yarn")[0].encoding
    assert (e.rope_scaling, e.factor, e.length, e.base) == ("yarn", 4.0, 48, 10000.0)
    assert scale_positions(rope, 6, rope_scaling="linear")[0].encoding.factor == 1.0
    assert scale_positions(rope, 48, rope_scaling="linear", factor=2.5)[0].encoding.factor == 2.5
    assert scale_positions(rope, 48, rope_scaling="dual-chunk") == (rope, DualChunks(9, T))
    assert scale_positions(rope, 48) == (rope, Mode())
    extended = scale_positions(rope, 48, rope_scaling="self-extend")
    assert extended == (rope, SelfExtend(6, 8))  # so that 47 // 8 + 6 is a trained distance
    assert scale_positions(expe, 48, scale="auto")[0].encoding.scale == 0.25
    assert scale_positions(expe, 6, scale="auto") == (expe, Mode())
    found, mode = scale_positions(expe, 48, scale=0.5, rope_scaling="dual-chunk", chunk=4)
    assert found.encoding == dataclasses.replace(expe.encoding, scale=0.5) and mode == DualChunks(4, T)
    assert stream_sizes(SimpleNamespace(sinks=None, window=None), 48) == (4, 43)  # 48 with the new token itself


@pytest.mark.parametrize("pe, variant, method, how, message", [
    ("expe", {"on": "k"}, "least-slope", {"factor": math.nan}, "--factor must be from 0 to 1e6 for least-slope"),
    ("rope", {}, "dual-chunk", {"chunk": 12}, "--chunk must be from 1 to 11, got 12"),
    ("rope", {}, "self-extend", {"factor": 2.5}, "--factor must be a whole number of at least 1"),
    ("rope", {}, "longrope", {"long": (1.0,) * 4, "short": (1.0,)}, "D/2 = 4 numbers each, .* got 4, 1, 12 and 48"),
    ("rope", {}, "none", {"scale": 0.5}, "--scale is for expe and exqpe, and this run has rope: leave it out"),
    ("expe", {}, "yarn", {}, "yarn is for rope, and this run has expe --on qk: leave it out"),
    ("t5", {}, "dual-chunk", {}, "for rope, and expe and exqpe with --on qk and without --once, and this run has t5"),
    ("expe", {"on": "k"}, "self-extend", {}, "has expe --on k"), ("expe", {"once": True}, "hold", {}, "--once"),
    ("expe", {"on": "k", "learn": "init"}, "least-slope", {}, "is for expe --on k without --learn")])
def test_a_wrong_value_and_a_scaling_for_other_encodings_are_refused(pe, variant, method, how, message):
    with pytest.raises(InputError, match=message):
        scale_positions(tiny(pe, variant=variant).config, 48, rope_scaling=method, **how)


def test_scalings_of_blocks_in_turn_are_refused_and_without_one_each_keeps_its_base():
    model, tokens = reading("rope", cycle="rope:window=4,rope:base=50"), some_tokens(1, 3 * T)
    before = model(tokens)
    torch.testing.assert_close(model.scale_to(3 * T)(tokens), before, **EXACT)
    for how in ({"rope_scaling": "yarn"}, {"rope_scaling": "dual-chunk"}, {"scale": 0.5}):
        with pytest.raises(InputError, match="--rope-scaling and --scale .* this run has a --cycle: leave them out"):
            model.scale_to(3 * T, **how)


def test_scale_multiplies_the_papers_values():
    n = np.arange(30)
    for pe, table in (("expe", expe_table), ("exqpe", exqpe_table)):
        model = tiny(pe, variant={"scale": 0.5, "start": 0.25})
        numbers = (1 / 48,) if pe == "expe" else (1 / 48, 1 / 16)
        rows = model.config.encoding.rows(n, model.config)
        np.testing.assert_allclose(rows, table(n, 5, 0.25, *numbers) / 2, rtol=1e-15)


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


def turn(x, n):
    """RoPE of one head of 8 dimensions, in complex numbers."""
    z = (x[:4] + 1j * x[4:]) * np.exp(1j * n * 10000.0 ** (-2 * np.arange(4) / 8))
    return np.concatenate((z.real, z.imag))


def follows(model, score):
    """The first block's attention over 40 tokens is that of score(x_m, w_q, m, x_n, w_k, n), not yet divided."""
    attention = model.blocks[0].attn
    h = torch.randn(1, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, h = attention(h, model.tables(np.arange(40))[model.config.encoding])[0], h[0].numpy()
    w_q, w_k, _ = attention.qkv.weight.numpy().reshape(3, 2, 8, 16)

    def more(head, m, n):
        of = w_q[head], w_k[head]
        return (score(h[m], of[0], m, h[n], of[1], n) - (of[0] @ h[m]) @ (of[1] @ h[n])) / math.sqrt(8)

    right = attention_in_loops(h, attention.qkv.weight.numpy(), attention.proj.weight.numpy(), 2, bias=more)
    np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pe, chunk", [("rope", 1), ("rope", 7), ("expe", 4), ("exqpe", 11)])
def test_dual_chunk_attention_follows_its_definition(pe, chunk):
    model = reading(pe, variant={"chunk": chunk})

    def lay(x, w, n):
        if pe == "rope":
            return turn(w @ x, n)
        row = expe_table(n, 5, 0, 1 / 48) if pe == "expe" else exqpe_table(n, 5, 0, 1 / 48, 1 / 16)
        return w @ np.concatenate((row, x[5:]))

    def score(x, w_q, m, y, w_k, n):
        same, farthest = m % chunk, T - 1
        where = {0: same, 1: min(same + chunk, farthest)}.get(m // chunk - n // chunk, min(2 * chunk - 1, farthest))
        return lay(x, w_q, where) @ lay(y, w_k, n % chunk)

    follows(model, score)


# ---- Self-Extend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("w, G", [(1, 2), (4, 3), (6, 5), (11, 40), (6, 1)])
def test_self_extend_follows_its_definition(w, G):
    def score(x, w_q, m, y, w_k, n):
        distance = m - n if m - n < w else m // G - n // G + w - w // G
        assert G > 1 or distance == m - n
        return turn(w_q @ x, distance) @ (w_k @ y)

    follows(reading("rope", variant={"groups": (w, G)}), score)


@pytest.mark.parametrize("w", [1, 4, 6, 11])
def test_by_the_size_that_is_chosen_no_distance_is_above_the_trained_ones_and_by_a_smaller_one_some_are(w):
    config = tiny("rope").config
    for length in (1, 12, 13, 40, 200):
        _, mode = scale_positions(config, length, rope_scaling="self-extend", chunk=w)
        window, G = mode.window, mode.group
        farthest = {size: max(d if d < w else (length - 1) // size - (length - 1 - d) // size + w - w // size
                              for d in range(length)) for size in (G, G - 1) if size}
        assert window == w and farthest[G] < T and (G == 1 or farthest[G - 1] >= T) and (G == 1) == (length <= T)


# ---- hold and least slopes -------------------------------------------------------------------------------------------


class Held(Attention):
    """W_q phi(h, min(m, T - 1)) and W_k phi(h, n), each with the plain override; positions count from 0 here."""

    def forward(self, h, at):
        last = torch.arange(len(at.rows)).clamp(max=T - 1)
        q, _, _ = self.project(h, at.rows[last])
        _, k, v = self.project(h, at.rows)
        return self.output(self.attend(q, k, v, None, None), h)


class Steep(Attention):
    """Scores of keys that are all at position 0, less the larger of the slope and the least one times the distance."""

    least = STEEP / T

    def forward(self, h, at):
        q, k, v = self.project(h, 0 * at.rows)
        _, k1, _ = self.project(h, 0 * at.rows + at.rows[1:2] - at.rows[:1])
        slope = (q @ (k1 - k).mT)[..., :1] / math.sqrt(q.shape[-1])                    # (B, H, T, 1)
        n = torch.arange(h.shape[1]).double()
        return self.output(self.attend(q, k, v, -slope.clamp(min=self.least) * (n[:, None] - n), None), h)


@pytest.mark.parametrize("pe, variant, method, definition", [
    ("expe", {"l": 1, "start": 0.5, "theta": 0.3}, "hold", Held), ("exqpe", {}, "hold", Held),
    ("expe", {"learn": "init"}, "hold", Held), ("expe", {"on": "k"}, "least-slope", Steep),
    ("expe", {"on": "k", "l": 1, "start": 0.5, "theta": 0.3}, "least-slope", Steep)])
def test_hold_and_least_slope_follow_their_definitions_with_a_cache_too(pe, variant, method, definition):
    reader, tokens = reading(pe, variant=variant), some_tokens(2, 4 * T)
    plain, right = plain_model(reader), plain_model(reader, attention=definition)
    found = reader.scale_to(4 * T, rope_scaling=method)(tokens)
    torch.testing.assert_close(found, right(tokens), rtol=1e-9, atol=1e-9)
    single = copy.deepcopy(reader).float()
    for size in (1, 5):
        for model, tolerance in ((reader, 1e-9), (single, 1e-4)):
            cache = Cache()
            pieces = [model(x, cache=cache) for x in tokens.split(size, 1)]
            torch.testing.assert_close(torch.cat(pieces, dim=1).double(), found, rtol=tolerance, atol=tolerance)
    assert (found - plain(tokens)).abs().max() > 1e-3
    if method == "hold":
        torch.testing.assert_close(found[:, :T], plain(tokens)[:, :T], **EXACT)
    else:
        for block in right.blocks:
            block.attn.least = 3 / T
        reader.scale_to(4 * T, rope_scaling=method, factor=3)
        torch.testing.assert_close(reader(tokens), right(tokens), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reader.scale_to(4 * T)(tokens), plain(tokens), **EXACT)  # and no longer


def test_past_the_trained_length_hold_sees_distances_only():
    reader = reading("expe").scale_to(4 * T, rope_scaling="hold")
    tokens, n = some_tokens(1, T), torch.arange(T) + T
    torch.testing.assert_close(reader(tokens, positions=n + 1000), reader(tokens, positions=n), **EXACT)
    plain = plain_model(reader)
    assert (plain(tokens, positions=n + 1000) - plain(tokens, positions=n)).abs().max() > 1e-3


# ---- a window of keys ------------------------------------------------------------------------------------------------

LIMITED = [                              # encoding, variant, and what of the config is the same as --keys 5
    *((pe, {}, {"window": 5}) for pe in ("rope", "expe", "alibi", "fox", "shaw", "relative_bank", "path_fox")),
    ("rope+sinks", {}, {"window": 5}),
    ("expe", {"on": "k"}, {"window": 5}),
    ("rope", {"window": 9}, {"window": 5}),
    ("rope", {"window": 3}, {"window": 3}),
    ("rope", {"nope_every": 2}, {"nope_every": 0, "cycle": "rope:window=5,nope:window=5"}),
    ("expe", {"nope_every": 2, "window": 3}, {"nope_every": 0, "window": 0, "cycle": "expe:window=3,nope:window=5"}),
    ("rope", {"cycle": "rope:window=4,rope:base=50"}, {"cycle": "rope:window=4,rope:base=50:window=5"}),
]


def with_config(reader, make=Reader, **changes):
    """A model of make's class with the reader's weights, and its config but for some changes."""
    model = make(dataclasses.replace(reader.trained, **changes)).double().eval()
    model.load_state_dict(reader.state_dict())
    return model


@pytest.mark.parametrize("pe, variant, same", LIMITED, ids=str)
def test_the_last_keys_alone_are_seen_as_by_a_model_of_that_window(pe, variant, same):
    reader, tokens = reading(pe, variant=variant), some_tokens(2, 3 * T)
    before, right = reader(tokens), with_config(reader, GPT, **same)(tokens)
    reader.scale_to(3 * T, keys=5)
    torch.testing.assert_close(reader(tokens), right, **EXACT)
    for sizes in ((3 * T,), (20, *[1] * 6, 10), (1,) * 3 * T):
        cache = Cache()
        pieces = [reader(x, cache=cache) for x in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), right, **EXACT)
    assert variant == {"window": 3} or (before - right).abs().max() > 1e-3
    torch.testing.assert_close(reader.scale_to(3 * T)(tokens), before, **EXACT)         # and no longer


@pytest.mark.parametrize("pe, variant, same", [case for case in LIMITED if case[:2] not in STUCK], ids=str)
@pytest.mark.parametrize("sinks, window", [(2, 9), (3, 2)])                    # without sinks, or with two
def test_a_stream_sees_the_last_keys_alone_as_with_a_model_of_that_window(pe, variant, same, sinks, window):
    reader, tokens = reading(pe, variant=variant), some_tokens(2, 3 * T)
    other = with_config(reader, **same)
    found, right = (model(tokens, cache=Cache(sinks, window)) for model in (reader.scale_to(3 * T, keys=5), other))
    torch.testing.assert_close(found, right, **EXACT)


@pytest.mark.parametrize("how", [{"rope_scaling": "dual-chunk", "chunk": 4}, {"rope_scaling": "self-extend"},
                                 {"rope_scaling": "yarn"}, {"rope_scaling": "hold"}], ids=str)
def test_keys_are_hidden_beside_a_scaling(how):
    reader, tokens = reading("expe" if how["rope_scaling"] == "hold" else "rope"), some_tokens(1, 3 * T)
    right = with_config(reader, window=7).scale_to(3 * T, **how)(tokens)
    torch.testing.assert_close(reader.scale_to(3 * T, keys=7, **how)(tokens), right, **EXACT)
    assert (reader.scale_to(3 * T, **how)(tokens) - right).abs().max() > 1e-3


def test_as_many_keys_as_there_are_tokens_change_nothing_and_a_table_of_positions_ends_where_it_did():
    reader, tokens = reading("learned"), some_tokens(1, T)
    before = reader(tokens)
    torch.testing.assert_close(reader.scale_to(T, keys=T)(tokens), before, **EXACT)
    assert reader.scale_to(3 * T, keys=4).longest == T
    with pytest.raises(ValueError, match="none for position"):
        reader(some_tokens(1, 3 * T))


def test_keys_are_refused_where_later_ones_are_seen():
    with pytest.raises(InputError, match="--keys 5 is for runs that look back only"):
        tiny("rope", make=Reader, causal=False).scale_to(T, keys=5)


# ---- the cache -------------------------------------------------------------------------------------------------------


FEW = [("expe", {}), ("rope", {}), ("fox", {}), ("t5", {}), ("expe", {"on": "k"}), ("rope", {"chunk": 5})]


@pytest.mark.parametrize("style, size, positions, pe, variant", [
    *(("gpt", 7, "gaps", *kind) for kind in KINDS), *(("gpt", 2, "own", *kind) for kind in FEW),
    *(("llama", 1, "default", *kind) for kind in FEW)], ids=str)
def test_cached_logits_equal_uncached_ones(pe, variant, style, size, positions):
    model = reading(pe, style, variant)
    S, rng = min(model.longest, 40), np.random.default_rng(0)  # learned has 12 rows
    tokens, n = some_tokens(3, S), {
        "default": np.arange(S),
        "gaps": np.sort(rng.choice(min(model.longest, 90), S, replace=False)),
        "own": rng.integers(0, S, (3, S)),
    }[positions]
    whole, cache = model(tokens, positions=None if positions == "default" else n), Cache()
    if not model.mode.moves_pairs:
        torch.testing.assert_close(whole, plain_model(model)(tokens, positions=n), **EXACT)
    for first in range(0, S, size):
        piece = slice(first, min(first + size, S))
        given = None if positions == "default" and first % 2 else n[..., piece]  # both ways of the same positions
        logits = model(tokens[:, piece], positions=given, cache=cache)
        torch.testing.assert_close(logits, whole[:, piece], **EXACT)
    assert len(cache) == S and np.array_equal(cache.positions, n)
    assert cache.nbytes == 2 * width_kept(model) * 3 * S * 8  # blocks, numbers, sequences, tokens, float64


@pytest.mark.parametrize("pe, variant", KINDS, ids=str)
def test_reading_by_blocks_changes_nothing(pe, variant, monkeypatch):
    model = reading(pe, variant=variant)
    whole_model, S = model if model.mode.moves_pairs else plain_model(model), min(model.longest, 40)
    tokens, targets = some_tokens(2, S), some_tokens(2, S, seed=3)
    whole, losses = whole_model(tokens), whole_model.token_losses(tokens, targets)
    monkeypatch.setattr(longer.reading, "BLOCK", 5)
    torch.testing.assert_close(model(tokens), whole, **EXACT)
    torch.testing.assert_close(model.token_losses(tokens, targets), losses, **EXACT)
    cache = Cache()
    model(tokens[:, :3], cache=cache)
    torch.testing.assert_close(model(tokens[:, 3:], cache=cache), whole[:, 3:], **EXACT)


def test_a_cache_that_does_not_fit_is_refused_and_left_as_it_was():
    model, cache = reading("learned"), Cache()
    model(some_tokens(2, 10), cache=cache)
    for tokens, message in ((some_tokens(3, 1), "the cache holds 2 sequences, and there are 3 in tokens"),
                            (some_tokens(2, 3), "none for position 12")):
        with pytest.raises(ValueError, match=message):
            model(tokens, cache=cache)
        assert len(cache) == 10 and all(cache[block.attn][0].shape[2] == 10 for block in model.blocks)
    with pytest.raises(InputError, match="the cache was filled by another model"):
        reading("learned")(some_tokens(2, 1), cache=cache)


@pytest.mark.parametrize("pe, variant", [*STUCK, ("expe", {})], ids=str)
def test_an_encoding_whose_positions_cannot_be_changed_later_is_refused_by_streams(pe, variant):
    """The last one has an override that is not affine, as after an edit."""
    model = reading(pe, variant=variant)
    if (pe, variant) not in STUCK:
        assert model.can_stream()
        model.encoding.override = lambda h, table: [h * (1 + table.sum(-1, keepdim=True))] * 2 + [h]
    with pytest.raises(InputError, match=f"{pe} cannot stream as trained here: positions are part of"):
        model(some_tokens(1, 2), cache=Cache(1, 3))


# ---- streams ---------------------------------------------------------------------------------------------------------


def stream_by_doors(model, tokens, sinks, window):
    """Logits (B, T, V) of one token after the other, in NumPy.

    Every block keeps its inputs. Each step picks those of the first `sinks` and the last `window` tokens before it, and
    of the token itself, and takes model_numpy's attention over them at positions 0, 1, 2, ..., whose last row counts.
    """
    c, p = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    strip_prefix, inputs, logits = model_numpy.strip_prefix, [[] for _ in model.blocks], []

    def norm(x, p):
        return model_numpy.norm_of(c)[0](x, c.norm_eps, **p)[0]

    for t, token in enumerate(tokens.T.tolist()):
        x = p["embedding.weight"][token][:, None]  # (B, 1, C)
        seen = [*sorted({*range(min(sinks, t)), *range(max(0, t - window), t)}), t]
        for i, kept in enumerate(inputs):
            settings, block_window, encoding, _, prefix = model_numpy.encodings_of_blocks(c)[i]
            block, own = strip_prefix(f"blocks.{i}.", p), strip_prefix(prefix, p)
            attn = strip_prefix("attn.", block)
            kept.append(norm(x, strip_prefix("norm1.", block)))
            h = np.concatenate([kept[s] for s in seen], axis=1)
            at = model_numpy.tables(settings, np.arange(len(seen)), c, float)
            x = x + model_numpy.attention(h, attn, c, encoding, at, own, block_window)[0][:, -1:]
            x = x + model_numpy.mlp_of(c)[0](norm(x, strip_prefix("norm2.", block)), strip_prefix("mlp.", block))[0]
        logits.append(norm(x, strip_prefix("norm.", p)) @ p["head.weight"].T)
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("sinks, window, pe, variant", [
    *((2, 6, *kind) for kind in FEW[:5]),
    *slow(*((2, 6, pe, v) for pe, v in STREAM if (pe, v) not in FEW[:5] and not {"chunk", "groups"} & {*v}),
          *((*sizes, *kind) for sizes in ((0, 4), (4, 1)) for kind in FEW[:5]))], ids=str)
def test_a_stream_of_ten_windows_equals_brute_force(pe, variant, sinks, window):
    model, cache = reading(pe, variant=variant), Cache(sinks, window)
    tokens = some_tokens(2, 10 * (sinks + window))
    brute_force = stream_by_doors(model, tokens, sinks, window)
    sizes, ours = itertools.cycle([sinks + window - 1, 3, 1, 1, 2, 7]), []
    while sum(x.shape[1] for x in ours) < tokens.shape[1]:
        first = sum(x.shape[1] for x in ours)
        ours.append(model(tokens[:, first : first + next(sizes)], cache=cache))
        assert len(cache) <= sinks + window + 1
        assert cache.nbytes <= 2 * width_kept(model) * 2 * (sinks + window + 1) * 8
    np.testing.assert_allclose(torch.cat(ours, 1), brute_force, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("pe, variant", [("rope", {}), *(k for k in STREAM if {"chunk", "groups"} & {*k[1]})], ids=str)
def test_a_stream_is_the_plain_model_until_its_window_is_full(pe, variant):
    model, tokens = reading(pe, variant=variant), some_tokens(2, 40)
    plain = (model if model.mode.moves_pairs else plain_model(model))(tokens)
    streamed = model(tokens, cache=Cache(2, 8))
    torch.testing.assert_close(streamed[:, :11], plain[:, :11], **EXACT)
    assert not torch.allclose(streamed[:, 11:], plain[:, 11:])
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


QUICK = ("expe", "alibi", "t5")          # of each way to score a pair one; the others are slow
GROWING = [*((pe, {}) for pe in QUICK),
           *slow(*((pe, v) for pe, v in KINDS if reading(pe).longest > T and (v or pe not in QUICK)))]


@pytest.mark.parametrize("pe, variant", GROWING, ids=str)
def test_no_array_grows_with_the_square_of_the_length(pe, variant, monkeypatch):
    monkeypatch.setattr(longer.reading, "BLOCK", 16)
    model, sizes = reading(pe, variant=variant).float(), []
    for S in (256, 512):
        with Largest() as largest:
            model.token_losses(some_tokens(1, S), some_tokens(1, S, seed=2))
            if (pe, variant) in STREAM:
                model.hidden(some_tokens(1, S), cache=Cache(4, 2 * S))
        sizes.append(largest.size)
    numbers = 32 if pe == "dape" else 1  # that are computed of each score
    assert sizes[0] == sizes[1] or sizes[1] <= 2 * sizes[0] and sizes[1] < numbers * 512 * 512 / 4


@pytest.mark.parametrize("pe, variant", LINEAR, ids=str)
def test_a_linear_bias_needs_no_blocks_of_queries(pe, variant):
    model = reading(pe, variant=variant)
    assert model.piece_starts(4096, None) == reading().piece_starts(4096, None) == [0]
    assert reading("t5").piece_starts(4096, None) != [0]
    assert model.positions_of(model.blocks[0].attn, np.arange(4096), np.arange(4096)).pairs is None


# ---- digits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe, variant", SCORED + OTHERS, ids=str)
def test_positions_cost_bf16_reading_no_digits(pe, variant):
    """To 42 times the trained length."""
    error, bare = (error_by_quarter(reading(name, variant=own).bfloat16(), name, own)
                   for name, own in ((pe, variant), ("nope", {})))
    assert keeps_its_digits(error, bare, pe, variant)


def error_in_fp32(pe, variant, first, size=256):
    """The largest error of the logits of 256 tokens at positions from `first` on, read in fp32, so many at a time."""
    model, n, tokens, cache = reading(pe, variant=variant), np.arange(first, first + 256), some_tokens(2, 256), Cache()
    right, model = plain_model(model)(tokens, positions=n), model.float()
    pieces = [model(x, positions=at, cache=cache)
              for x, at in zip(tokens.split(size, 1), np.split(n, 256 // size), strict=True)]
    return (torch.cat(pieces, 1) - right).abs().max().item()


def test_late_positions_in_fp32():
    """Distances keep their digits at any position; an override of queries and keys loses them with the square."""
    linear = [(pe, variant) for pe, variant in LINEAR if pe != "fox"]  # whose tokens count, wherever they are
    kinds, error = [("nope", {}), ("rope", {}), *linear, ("expe", {}), ("exqpe", {})], {}
    for pe, variant in kinds:
        error[pe, *variant.values()] = [error_in_fp32(pe, variant, n) for n in (0, 2_048, 16_384, 65_536, 10**6)]
        print(pe, *variant.values(), *(f"{largest:.1e}" for largest in error[pe, *variant.values()]))
    for pe, variant in linear:
        by_pieces = error_in_fp32(pe, variant, 10**6, size=8)
        assert max(*error[pe, *variant.values()], by_pieces) < 4 * error["nope",][0]
    assert error["expe",][2] > 100 * error["nope",][0]  # 16,384; by 10^6 each query sees one key alone
