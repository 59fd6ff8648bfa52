"""Tables against recurrences, worked examples, invariants and another library."""

import math

import numpy as np
import pytest
import torch
from conftest import need
from test_ladder import exqpe_rows

from config import PRESETS, make_encoding
from expe import (
    affine_parts,
    alibi_slopes,
    expe_table,
    exqpe_table,
    learned_rows,
    rope_inv_freq,
    rope_table,
    shaw_index,
    sinusoidal_table,
    t5_bucket,
)
from model_numpy import alibi_forward


def test_expe_rows_are_affine_in_position_and_dimension():
    table = expe_table(np.arange(3000), 7, start=0.25, theta=1 / 512)  # dyadic: every sum below is exact
    assert np.all(table[0] == 0.25 + np.arange(7) / 512)
    assert np.all(np.diff(table, axis=0) == 1 / 512) and np.all(np.diff(table, axis=1) == 1 / 512)


@pytest.mark.parametrize("l", [1, 2, 24, 1001])
@pytest.mark.parametrize("start, theta1, theta2", [(0.0, 1 / 2048, 1 / 16), (-0.5, 0.3, 0.07)])
def test_exqpe_follows_the_recurrence_of_equation_5(l, start, theta1, theta2):
    table, right = exqpe_table(np.arange(1000), l, start, theta1, theta2), exqpe_rows(1000, l, start, theta1, theta2)
    np.testing.assert_allclose(table, right, rtol=0, atol=1e-10)  # 1,000 sums of one rounding each


def test_sinusoidal_next_row_is_this_one_turned():
    d, base = 10, 500.0
    table = sinusoidal_table(np.arange(200), d, base)
    for i in range(d // 2):
        w = base ** (-2 * i / d)
        sin, cos = table[:-1, 2 * i], table[:-1, 2 * i + 1]
        np.testing.assert_allclose(table[1:, 2 * i], sin * math.cos(w) + cos * math.sin(w), atol=1e-12)
        np.testing.assert_allclose(table[1:, 2 * i + 1], cos * math.cos(w) - sin * math.sin(w), atol=1e-12)


@pytest.mark.parametrize("d_head, base", [(2, 10000.0), (64, 500000.0)])
def test_rope_frequencies_equal_those_of_transformers(d_head, base):
    transformers = need("transformers")
    config = transformers.LlamaConfig(hidden_size=4 * d_head, num_attention_heads=4,
                                      rope_parameters={"rope_type": "default", "rope_theta": base})
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    inv_freq = rope_inv_freq(d_head, base)
    np.testing.assert_allclose(inv_freq, theirs, rtol=3e-7)  # theirs is fp32
    assert inv_freq.dtype == np.float64 and inv_freq.shape == (d_head // 2,)


def test_rope_products_depend_on_the_distance_alone_and_norms_are_kept():
    rng, D = np.random.default_rng(0), 16
    q, k = rng.standard_normal((2, D))

    def turned(x, n):
        cos, sin = np.split(rope_table(n, D), 2)
        return (x[: D // 2] + 1j * x[D // 2 :]) * (cos + 1j * sin)  # pair (i, i + D/2) as one complex number

    products = [np.vdot(turned(q, m), turned(k, m - 37)).real for m in (37, 100, 5000, 100_000)]
    np.testing.assert_allclose(products, products[0], rtol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(turned(q, 12345)), np.linalg.norm(q), rtol=1e-12)
    assert abs(products[0] - np.vdot(turned(q, 37), turned(k, 1)).real) > 1e-3


TABLES = {
    "sinusoidal": lambda n: sinusoidal_table(n, 384),
    "expe": lambda n: expe_table(n, 24),
    "exqpe": lambda n: exqpe_table(n, 24),
    "rope": lambda n: rope_table(n, 32),
}


@pytest.mark.parametrize("name", TABLES)
def test_positions_of_any_shape_and_order(name):
    positions = np.array([[7, 0, 10**6], [-3, 7, 511]])
    table = TABLES[name](positions)
    assert table.dtype == np.float64 and table.shape[:2] == (2, 3)
    for index in np.ndindex(2, 3):
        assert np.array_equal(table[index], TABLES[name](int(positions[index])))
    with pytest.raises(ValueError, match="positions must be integers, got an array of float64"):
        TABLES[name](np.array([0.0, 1.0]))


def test_affine_parts_make_up_every_table():
    n = np.array([3, -1, 1000])
    for make in (
        lambda a, b: expe_table(n, 4, a, b, step=0),
        lambda a, b: expe_table(n, 4, a, b),
        lambda a, b: exqpe_table(n, 4, 0.7, a, b),
    ):
        parts = affine_parts(make)
        assert parts.shape == (3, 4, 3)
        np.testing.assert_allclose(parts[..., 0] + 0.3 * parts[..., 1] - 2 * parts[..., 2], make(0.3, -2), rtol=1e-12)


@pytest.mark.parametrize("n_heads", [*range(1, 18), 32, 63, 112])
def test_alibi_slopes_equal_those_of_transformers_bloom(n_heads):
    bloom = need("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float64)[:, 0, 1].numpy()  # slope * position 1
    np.testing.assert_allclose(alibi_slopes(n_heads), theirs, rtol=1e-6)  # theirs are float32


def test_alibi_bias_is_minus_slope_times_distance():
    n, keys = np.array([[4, 0, 9], [1, 2, 3]]), np.array([[7, 0], [2, 2]])
    for k in (n, keys):
        pairs = make_encoding("alibi").pairs(n, k, PRESETS["mini"].model)
        table = alibi_forward(np.zeros((1, 3, 3, 4)), None, None, pairs, {})[0]
        assert table.shape == (2, 3, 3, k.shape[1])
        for b, h, m, s in np.ndindex(*table.shape):
            assert table[b, h, m, s] == -(2.0 ** -[4, 8, 2][h]) * (n[b, m] - k[b, s])


def test_t5_buckets_begin_where_they_should():
    buckets = t5_bucket(np.arange(10_001))
    first = [int(np.argmax(buckets == b)) for b in range(32)]
    assert first == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert buckets[-1] == 31 and (np.diff(buckets) >= 0).all()


@pytest.mark.parametrize("n_buckets, max_distance", [(32, 128), (64, 1000), (7, 33), (3, 10)])
def test_t5_buckets_equal_those_of_transformers(n_buckets, max_distance):
    t5 = need("transformers.models.t5.modeling_t5")
    d = np.arange(10_001)
    options = {"bidirectional": False, "num_buckets": n_buckets, "max_distance": max_distance}
    theirs = t5.T5Attention._relative_position_bucket(torch.from_numpy(-d), **options).numpy()
    ours = t5_bucket(d, n_buckets, max_distance)
    different = np.flatnonzero(ours != theirs)
    edge = np.flatnonzero(np.diff(ours)) + 1  # theirs works in float32, which may be one bucket low exactly at an edge
    assert set(different) <= set(edge) and (theirs[different] == ours[different] - 1).all()


@pytest.mark.parametrize("call, message", [
    (lambda: alibi_slopes(0), "n_heads must be a whole number of at least 1, got 0"),
    (lambda: t5_bucket([1.5]), "distance must be integers, got an array of float64"),
    (lambda: t5_bucket(1, 1, 128), "n_buckets of at least 2"),
    (lambda: t5_bucket(1, 32, 16), "max_distance above half of them and at most 2.24, got 32 and 16"),
    (lambda: shaw_index(1, 0), "max_distance must be a whole number of at least 1, got 0"),
    (lambda: learned_rows([0, 5, 7], 5), "positions 0 to 4 it was trained on, and none for position 5"),
    (lambda: learned_rows([3, -1], 5), "none for position -1"),
    (lambda: expe_table([0], 2.5), "l must be a whole number of at least 1, got 2.5"),
    (lambda: exqpe_table([0], -1), "l must be a whole number of at least 1, got -1"),
    (lambda: sinusoidal_table([0], 0), "d_model must be a whole number of at least 1, got 0"),
    (lambda: rope_inv_freq(7), "d_head must be even"),
    (lambda: rope_inv_freq(8, 1.0), "base must be a finite number above 1, got 1.0"),
])
def test_wrong_sizes_and_positions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
