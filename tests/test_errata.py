"""Rows of docs/errata.md that need no other library: the wrong rule, written anew, and then what is done here."""

import math

import numpy as np
import pytest
import torch
from test_ladder import T, tiny
from test_model import some_input

from config import ModelConfig
from expe import alibi_slopes, expe_table, t5_bucket
from longer.chunks import self_extend_queries
from longer.scaling import scaled_inv_freq
from positional_encodings import make_encoding


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- the paper -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, claimed, true", [("fp16", 33e6, 15_361), ("tf32", 1e6, 130_049), ("bf16", 0, 16_257)])
def test_numbers_in_0_to_1(name, claimed, true):
    """Over all bit patterns of a format; the paper's section 2.3 has more in fp16 than in the others."""
    if name == "fp16":
        numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    else:                                                  # float32 with the last bits of the fraction empty
        bits = {"tf32": 19, "bf16": 16}[name]
        numbers = (np.arange(2**bits, dtype=np.uint32) << (32 - bits)).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert ((numbers >= 0) & (numbers <= 1) & ~np.signbit(numbers)).sum() == true != claimed


def test_theta_is_one_over_four_contexts():
    """Section 2.1 says 1/(2 context); its range 0 to 0.25 over 512 tokens, and its table 9, are 1/(4 context)."""
    right = ModelConfig(6, 384, 12, 512, 32000, encoding=make_encoding("expe")).encoding.theta
    assert expe_table(512, 1, theta=1 / (2 * 512))[0] == 0.5 and expe_table(512, 1, theta=right)[0] == 0.25


# ---- a survey and a tutorial -----------------------------------------------------------------------------------------


def test_t5_buckets_need_the_log_of_the_largest_distance():
    """The survey's equation 6 has B/2 + floor(log(d/(B/2))) B/2: bucket 48 of 32 at d = 127."""
    assert 16 + math.floor(math.log(127 / 16)) * 16 == 48
    assert t5_bucket(127) == 31 and t5_bucket(np.arange(10_000)).max() == 31


def test_alibi_slopes_are_powers_of_8_over_the_head_count():
    """The survey's equation 7 has 2^(-h H/8), which is right at 8 heads alone: at 12 it falls to 2^-18."""
    wrong = lambda n_heads: 2.0 ** (-np.arange(1, n_heads + 1) * n_heads / 8)  # noqa: E731
    np.testing.assert_allclose(wrong(8), alibi_slopes(8))
    for n_heads in (4, 16, 32):
        np.testing.assert_allclose(alibi_slopes(n_heads), 2.0 ** (-8 * np.arange(1, n_heads + 1) / n_heads))
    assert wrong(12)[-1] == 2.0**-18 and alibi_slopes(12).min() == 2.0**-8


def test_yarn_stretches_the_slow_pairs():
    """The tutorial has (1 - ramp)/s + ramp over wavelengths: the fast pairs stretched, the slow ones left alone."""
    s, L, D = 4, 512, 32
    plain, right = scaled_inv_freq(D)[0], scaled_inv_freq(D, 10000.0, "yarn", s, L)[0]
    wavelength = 2 * math.pi / plain
    ramp = np.clip((wavelength - L / 32) / (L - L / 32), 0, 1)
    wrong = plain * ((1 - ramp) / s + ramp)
    assert wrong[0] == plain[0] / s and wrong[-1] == plain[-1]
    assert right[0] == plain[0] and right[-1] == pytest.approx(plain[-1] / s)
    assert s * L * right[-1] == pytest.approx(L * plain[-1])             # no slow pair turns further than in training


def test_yarns_temperature_is_an_inverse_square():
    """The tutorial has t = 0.1 ln s + 1; it is sqrt(1/t), so that scores grow by its square instead of falling."""
    model, q = tiny("rope", variant={"rope_scaling": "yarn", "factor": 4.0}), torch.ones(1, 2, 1, 8).double()
    queries, keys = model.encoding.rotate(q, q, model.tables(np.array([7]))[model.config.encoding].rows)
    assert (queries * keys).sum(-1)[0, 0, 0].item() / 8 == pytest.approx((0.1 * math.log(4) + 1) ** 2)


# ---- public code -----------------------------------------------------------------------------------------------------


def test_a_forget_gate_is_added_as_a_logarithm():
    """Code of FoX multiplies scores by gates: forgetting a key of score -2 by 0.01 makes it heavier."""
    scores, forgotten = np.array([-2.0, 0.0]), np.array([0.01, 1.0])
    weights = [softmax(x)[0] for x in (scores * forgotten, scores, scores + np.log(forgotten))]
    assert weights == pytest.approx([0.495, 0.119, 0.0013], abs=1e-3)
    encoding, q = tiny("fox").blocks[0].attn.encoding, torch.zeros(1, 2, T, 8, dtype=torch.float64)
    encoding.weight.data[:], encoding.bias.data[:] = 0, math.log(0.01 / 0.99)
    bias = encoding.score(q, q, encoding.key_state(some_input()), None)[0, 0, -1].detach().numpy()
    np.testing.assert_allclose(bias, math.log(0.01) * np.arange(T - 1, -1, -1), rtol=1e-9)  # once for each later token


def test_self_extend_has_no_fractions_of_a_position():
    """Its code has m // G + w - w / G for queries of far keys: the nearest of them, 5 back, is at 4.33 or 5.33."""
    w, G, m = 5, 3, np.arange(5, 40)
    wrong, right = (queries - (m - w) // G for queries in (m // G + w - w / G, self_extend_queries(m, w, G)))
    assert set(np.round(wrong, 2)) == {4.33, 5.33} and set(right) == {5, 6} and right.dtype.kind == "i"


def test_cables_code_is_fox():
    """Its bias is c_m - c_n, c the running sum of -softplus(W x + b): FoX with -W and -b, the same for all queries."""
    h, q = some_input(), torch.zeros(1, 2, T, 8, dtype=torch.float64)
    fox, cable = (tiny(pe).blocks[0].attn.encoding for pe in ("fox", "cable"))
    with torch.no_grad():
        c = -torch.nn.functional.softplus(-(h @ fox.weight.T + fox.bias)).cumsum(1).mT
        wrong, right = c[..., None] - c[..., None, :], cable.score(q, q, cable.key_state(h), None)
        torch.testing.assert_close(wrong.tril(), fox.score(q, q, fox.key_state(h), None).tril().expand_as(wrong))
    wrong, right = ((bias[0, 0, 5:, 5] - bias[0, 0, 5:, 0]).numpy() for bias in (wrong, right))  # for each later query
    assert np.ptp(wrong) < 1e-12 and np.ptp(right) > 0.1 * right.max() > 0
