"""The table of what each encoding can do: interop/README.md shows what interop/abilities.py prints, and it is true.

Each cell's claim is computed here in another way: with kernels of PyTorch, by changing a token, or in a batch.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, need
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from config import ModelConfig, make_configs
from engine.banded import minus_infinity
from expe import alibi_slopes
from longer import compare
from longer.reading import Reader
from model_torch import GPT
from settings import InputError
from zoo import selective_rope, softmax

need("transformers")
from interop import abilities
from interop.abilities import ROWS, SMALL, build

T = 24
NOT_SEEN = torch.ones(T, T).triu(1) > 0


@pytest.fixture(scope="module")
def table():
    return {name: abilities.cells(flags) for name, flags in ROWS.items()}


def every_row(function):
    return pytest.mark.parametrize("name", ROWS)(function)


def config_of(name, **changes):
    return make_configs("mini", **SMALL | ROWS[name] | changes)[0]


def close(x, y):
    return torch.allclose(x, y, rtol=1e-9, atol=1e-9)


def parts(model):
    """What enters each block's kernel and what it gives: q, k, v and y (B, H, T, D), and the bias; h (B, T, C)."""
    n = np.arange(T)
    for attention in (block.attn for block in model.blocks):
        encoding, pos = attention.encoding, model.tables(n)[attention.encoding.settings]
        h = torch.randn(2, T, model.config.width, generator=torch.Generator().manual_seed(1)).double()
        q, k, v = attention.project(h, pos.rows)
        q, k = encoding.rotate(q, k, pos.rows)
        bias = encoding.score(q, k, encoding.key_state(h), pos.pairs)
        y = attention.attend(q, k, v, bias, pos.pairs)
        yield SimpleNamespace(attention=attention, encoding=encoding, h=h, q=q, k=k, v=v, y=y, bias=bias, pos=pos)


def kernel(q, k, v, mask=None, further=0):
    """The fused kernel with is_causal alone, or with a mask that is added; q and k may be wider than v (PoPE).

    further: dimensions that hold a bias and do not count for the scale.
    """
    width, D = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, width - D))
    scale = (width - further) ** -0.5
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)[..., :D]


def test_the_page_shows_what_the_command_prints(table):
    assert abilities.markdown(table) in (ROOT / "interop/README.md").read_text("utf-8")


def test_every_softmax_and_every_note_has_a_row(table):
    printed = abilities.markdown(table)
    assert all(f"({i + 1}) |" in printed for i in range(len(abilities.NOTES)))
    assert {name.partition("--softmax ")[2] for name in ROWS} - {""} == {*abilities.SOFTMAXES} - {"plain"}


# ---- heads -----------------------------------------------------------------------------------------------------------


@every_row
@torch.no_grad()
def test_shared_key_heads_are_those_heads_repeated(name, table):
    """Four query heads and two heads of keys and values, beside a model whose weights repeat them."""
    model = build(config_of(name), GPT)
    for attention in (block.attn for block in model.blocks):
        _, k, v = attention.qkv.weight.unflatten(0, (3, 4, -1))          # (H, D, C) each
        for w in (k, v):
            w[1], w[3] = w[0], w[2]
    for x in parts(model):
        q, k, v = x.attention.project(x.h, x.pos.rows)
        try:
            q, k = x.encoding.rotate(q, k[:, ::2], x.pos.rows)
        except RuntimeError:
            assert table[name]["fewer key heads"].startswith("no")
            continue
        assert k.shape[1] == 2 and table[name]["fewer key heads"] == "yes"
        if x.encoding.value or x.encoding.softmax or x.bias is not None or x.attention.window:
            k, v = (heads.repeat_interleave(2, 1) for heads in (k, v[:, ::2]))
            bias = x.encoding.score(q, k, x.encoding.key_state(x.h), x.pos.pairs)
            assert close(x.attention.attend(q, k, v, bias, x.pos.pairs), x.y)
        else:
            y = F.scaled_dot_product_attention(q, k, v[:, ::2], is_causal=True, enable_gqa=True,
                                               scale=v.shape[-1] ** -0.5) if q.shape == x.v.shape else x.y
            assert close(y, x.y)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def forgotten(x):
    """ln f of FoX, summed up to each token: (B, H, T)."""
    return F.logsigmoid(F.linear(x.h, x.encoding.weight, x.encoding.bias)).mT.cumsum(-1)


def cable_parts(x):
    """CABLE's g_m and r_1 + .. + r_n, (B, H, T) each."""
    return (F.softplus(F.linear(x.h, x.encoding.query)).mT, F.linear(x.h, x.encoding.tokens).relu().mT.cumsum(-1))


def grape_slopes(x):
    """GRAPE's slope of each query, by its equation: (B, H, T)."""
    e, D = x.encoding, x.q.shape[-1]
    omega = torch.tensor(alibi_slopes(4)) * F.softplus(e.w)
    v = e.v / e.v.norm(dim=-1, keepdim=True)
    return omega[:, None] * F.softplus((x.q * v[:, None]).sum(-1) / math.sqrt(D))


SLOPES, N = torch.tensor(alibi_slopes(4)), torch.arange(T).double()
LINEAR = {  # a_m and b_n of what scores gain, (B, H, T) each, up to what the softmax drops
    "alibi": lambda x: (SLOPES[:, None].expand(2, 4, T), N.expand(2, 4, T)),
    "fox": lambda x: (torch.ones(2, 4, T).double(), -forgotten(x)),
    "cable": cable_parts,
    "grape": lambda x: (grape_slopes(x), N.expand(2, 4, T))}


@every_row
@torch.no_grad()
def test_what_one_kernel_can_do(name, table, monkeypatch):
    """is_causal alone, with one more dimension where a note says so (in float64 one is enough); and with a mask."""
    monkeypatch.setattr(softmax, "FLOOR_SCALE", 4)                       # so that llama4's steps begin
    causal, masked = table[name]["causal kernel"], table[name]["kernel with a mask"]
    alone, added = [], []
    for x in parts(build(config_of(name), GPT)):
        q, k = x.q, x.k
        if causal == "yes: dimensions":
            a, b = LINEAR[name](x)
            q, k = torch.cat((q, math.sqrt(8) * a[..., None]), -1), torch.cat((k, b[..., None]), -1)
        alone.append(close(kernel(q, k, x.v, further=q.shape[-1] - x.q.shape[-1]), x.y))
        window = x.attention.window
        hidden = NOT_SEEN | (torch.ones(T, T).tril(-window) > 0) if window else NOT_SEEN
        bias = torch.zeros(T, T).double() if x.bias is None else x.bias
        added.append(close(kernel(x.q, x.k, x.v, bias.masked_fill(hidden, -math.inf).expand(2, 4, T, T)), x.y))
    assert all(alone) == causal.startswith("yes")
    assert all(added) == masked.startswith("yes")


def kerple(x):
    p, a = x.encoding.p.exp(), x.encoding.a.exp()
    return lambda score, b, h, m, n: score - p.flatten()[h] * torch.log1p(a.flatten()[h] * (m - n).abs())


def fire(x):
    e, L = x.encoding, x.encoding.L.exp()
    c = e.c.exp().squeeze()

    def score_mod(score, b, h, m, n):
        share = torch.log1p(c * (m - n).clamp(min=0)) / torch.log1p(c * torch.maximum(m.double(), L.squeeze()))
        return score + (e.w2[h] * ((share * e.w1.flatten() + e.b1.flatten()).relu() - e.b1.flatten().relu())).sum()
    return score_mod


def relative_bank(x):
    e = x.encoding
    r = F.linear(x.h, e.weight).unflatten(-1, (4, -1))                   # (B, T, H, R)
    by_distance = r.transpose(1, 2) @ e.bank                             # (B, H, T, extent)
    extent = by_distance.shape[-1]

    def score_mod(score, b, h, m, n):
        d = m - n
        return score + torch.where((d >= 0) & (d < extent), by_distance[b, h, m, d.clamp(0, extent - 1)], 0.0)
    return score_mod


def t5(x):
    half, most = x.encoding.settings.buckets // 2, x.encoding.settings.max_distance

    def score_mod(score, b, h, m, n):
        d = (m - n).clamp(min=0)
        far = half + (torch.log(d.clamp(min=1) / half) / math.log(most / half) * half).floor().long()
        return score + x.encoding.weight[torch.where(d < half, d, far.clamp(max=2 * half - 1)), h]
    return score_mod


def by_linear(x, name):
    a, b_n = LINEAR[name](x)
    return lambda score, b, h, m, n: score + a[b, h, m] * (b_n[b, h, n] - b_n[b, h, m])


SCORE_MODS = {"t5": t5, "kerple": kerple, "fire": fire, "relative_bank": relative_bank,
              **{name: lambda x, name=name: by_linear(x, name) for name in LINEAR}}


@pytest.mark.parametrize("name", SCORE_MODS)
@torch.no_grad()
def test_a_score_mod_of_each_such_bias_gives_the_plain_attention(name, table):
    """Its numbers come from arrays that grow with T, and not with T x T."""
    assert table[name]["`score_mod`"].startswith("yes")
    for x in parts(build(config_of(name), GPT)):
        score_mod = SCORE_MODS[name](x)

        def causal(score, b, h, m, n, score_mod=score_mod):
            return torch.where(m >= n, score_mod(score, b, h, m, n), -math.inf)

        assert close(flex_attention(x.q, x.k, x.v, score_mod=causal), x.y)


@every_row
@torch.no_grad()
def test_a_bias_without_a_score_mod_changes_with_other_tokens_or_heads(name, table):
    """With the token before the key, one between key and query, or the queries of another head; else it stays."""
    cell = table[name]["`score_mod`"]
    model = build(config_of(name), GPT)
    for x in parts(model):
        if x.bias is None or not table[name]["kernel with a mask"].startswith("yes"):
            continue

        def bias_of(h, q, x=x):
            _, k, _ = x.attention.project(h, x.pos.rows)
            own, k = x.encoding.rotate(x.attention.project(h, x.pos.rows)[0], k, x.pos.rows)
            bias = x.encoding.score(own if q is None else q, k, x.encoding.key_state(h), x.pos.pairs)
            return bias[..., 0, T - 2, 5]

        others, heads = x.h.clone(), x.q.clone()
        others[:, [4, 11]] += 1
        heads[:, 1:] += 1
        tokens_matter = not close(bias_of(others, None), bias_of(x.h, None))
        heads_matter = not close(bias_of(x.h, heads), bias_of(x.h, None))
        notes = {"no: tokens": (True, False), "no: heads": (False, True), "yes: sums": (True, False)}
        assert (tokens_matter, heads_matter) == notes.get(cell, (False, False))


@torch.no_grad()
def test_what_other_forms_the_page_names():
    """Five that need no bias and no other softmax in a kernel: what enters or leaves it is multiplied or rotated."""
    for x in parts(build(config_of("nope --softmax log"), GPT)):
        seen = torch.arange(1, T + 1).double().log()[:, None]
        assert close(kernel(x.encoding.temperature[:, None, None] * seen * x.q, x.k, x.v), x.y)
    for x in parts(build(config_of("nope --softmax sinks"), GPT)):
        scores = (x.q @ x.k.mT / math.sqrt(8)).masked_fill(NOT_SEEN, -math.inf)
        share = (scores.logsumexp(-1, keepdim=True) - x.encoding.sinks[:, None, None]).sigmoid()
        assert close(share * kernel(x.q, x.k, x.v), x.y)
    for x in parts(build(config_of("rove"), GPT)):
        back = torch.cat((x.pos.rows[..., :4], -x.pos.rows[..., 4:]), -1)
        assert close(turned(kernel(x.q, x.k, turned(x.v, x.pos.rows)), back), x.y)
    for x in parts(build(config_of("selective_rope"), GPT)):
        angle = selective_angles(x)
        angles = torch.cat((angle.cos(), angle.sin()), -1)
        assert close(kernel(turned(x.q, angles), turned(x.k, angles), x.v), x.y)
    for x in parts(build(config_of("partial_key_offset"), GPT)):
        before = torch.cat((x.k[:, :, :1], x.k[:, :, :-1]), 2)
        assert close(kernel(x.q, torch.cat((x.k[..., :4], before[..., 4:]), -1), x.v), x.y)


def turned(x, table):
    """Pairs (i, i + D/2) of x as complex numbers, by the angles whose cosines and sines are in the table."""
    cos, sin = table.chunk(2, -1)
    z = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag), -1)


def selective_angles(x):
    """Selective RoPE's equations: z = conv(W2 W1 x), summed up; each head's slice of x has length 1."""
    e = x.encoding
    unit = x.h.unflatten(-1, (4, -1))
    unit = (unit / (unit.norm(dim=-1, keepdim=True) ** 2 + selective_rope.EPS).sqrt()).flatten(-2)
    u = F.linear(F.linear(unit, e.w1), e.w2)                             # (B, T, H D/2)
    taps = e.conv.shape[-1]
    z = F.conv1d(F.pad(u.mT, (taps - 1, 0)), e.conv.flip(-1)[:, None], groups=len(e.conv))  # of the token itself first
    c = e.settings.base ** -(torch.arange(4).double() / 4)
    return (z.mT.unflatten(-1, (4, -1)).transpose(1, 2).cumsum(-2)) * c


class Pairs(TorchDispatchMode):
    """Keeps how many matrices of T x T numbers the largest array has that is made of such."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.shape[-2:] in ((61, 61), (61, 61 + 16)):        # with Shaw's band
                self.largest = max(self.largest, math.prod(x.shape[:-2]))
        return result


@every_row
@torch.no_grad()
def test_the_numbers_for_pairs_are_the_largest_array_that_reading_makes(name, table):
    reader = build(config_of(name), Reader)
    tokens = torch.randint(40, (3, 61), generator=torch.Generator().manual_seed(0))
    minus_infinity.cache_clear()                                         # which other tests have filled
    with Pairs() as pairs:
        reader(tokens)
    right = {"T": 0, "T T": 1, "H T T": 4, "B H T T": 12}[table[name]["numbers for pairs"]]
    assert pairs.largest == (2 * right if name == "dape" else right)    # whose network reads scores and biases


# ---- reading ---------------------------------------------------------------------------------------------------------


@every_row
def test_a_stream_reads_as_the_plain_attention_of_what_it_keeps(name, table):
    reader = Reader(config_of(name, context=200) if name == "learned" else config_of(name))
    if table[name]["stream"] == "yes":
        compare.check_stream(reader.make_reader, reader.config)
    else:
        with pytest.raises(InputError, match="cannot stream as trained here"):
            reader.check_stream()


@every_row
@torch.no_grad()
def test_without_a_causal_mask_the_first_token_sees_the_last(name, table):
    if table[name]["both directions"] != "yes":
        with pytest.raises(InputError, match="look back|looks back"):
            config_of(name, objective="mlm")
        return
    config = config_of(name, objective="mlm")
    assert isinstance(config, ModelConfig) and not config.causal
    tokens = torch.arange(T)[None] % 40
    model, other = build(config, GPT), tokens.clone()
    other[0, -1] += 1
    logits = model(torch.cat((tokens, other)))
    assert logits.isfinite().all() and not close(logits[0, 0], logits[1, 0])


@every_row
@torch.no_grad()
def test_texts_of_a_padded_batch_are_read_as_alone_and_go_on_from_a_cache(name, table):
    """Padded on the left; then three more tokens, one by one, at the positions that follow."""
    assert table[name]["padding"] == "yes" and table[name]["key cache"].startswith("yes")
    plain = build(config_of(name), GPT)
    theirs = abilities.export(plain)
    tokens = torch.randint(40, (2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :7] = 0
    right = plain(tokens[:1, 7:]), plain(tokens[1:])
    first = theirs(tokens[:, :-3], attention_mask=mask[:, :-3])
    logits, cache = [first.logits], first.past_key_values
    for t in range(T - 3, T):
        n = mask[:, : t + 1].sum(-1, keepdim=True) - 1
        step = theirs(tokens[:, t : t + 1], attention_mask=mask[:, : t + 1], position_ids=n, past_key_values=cache)
        logits.append(step.logits)
    logits = torch.cat(logits, 1)
    assert close(logits[:1, 7:], right[0]) and close(logits[1:], right[1])


def test_a_cache_or_padding_that_is_not_followed_makes_the_cell_no(monkeypatch):
    from interop.modeling_gpt import CachedAttention

    monkeypatch.setattr(CachedAttention, "forward", lambda self, h, pos: super(CachedAttention, self).forward(h, pos))
    found = abilities.cells(ROWS["nope"])
    assert (found["key cache"], found["padding"]) == ("no", "no")
