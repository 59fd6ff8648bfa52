"""Tables against recurrences, worked examples, invariants and another library."""

import math

import numpy as np
import pytest
import torch

from config import PRESETS, make_encoding
from expe import (
    alibi_slopes,
    distances,
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
from zoo.ablations import affine_parts


def test_expe_worked_example():
    row = expe_table(511, 24)
    assert row.shape == (24,) and row.dtype == np.float64
    assert row[0] == 511 / 2048 and row[23] == 534 / 2048


def test_expe_rows_are_affine_in_position_and_dimension():
    table = expe_table(np.arange(3000), 7, start=0.25, theta=1 / 512)  # dyadic: every sum below is exact
    assert np.all(table[0] == 0.25 + np.arange(7) / 512)
    assert np.all(np.diff(table, axis=0) == 1 / 512) and np.all(np.diff(table, axis=1) == 1 / 512)


def test_expe_each_row_is_the_next_one_shifted_as_in_equation_3():
    table = expe_table(np.arange(100), 24)
    assert np.all(table[1:, :-1] == table[:-1, 1:])


def test_expe_p_is_stable_with_step_0():
    table = expe_table(np.arange(50), 5, start=1.0, theta=0.5, step=0)
    assert np.all(table == 1.0 + 0.5 * np.arange(50)[:, None])


@pytest.mark.parametrize("l", [1, 2, 3, 24, 96, 5001])
@pytest.mark.parametrize("start, theta1, theta2", [(0.0, 1 / 2048, 1 / 16), (-0.5, 0.3, 0.07)])
def test_exqpe_follows_the_recurrence_of_equation_5(l, start, theta1, theta2):
    table = exqpe_table(np.arange(5000), l, start, theta1, theta2)
    row = np.array([start + j * theta1 for j in range(l)])
    for n in range(5000):
        row[n % l] += theta2
        assert np.abs(table[n] - row).max() < 1e-10, f"row {n}"  # 5,000 sums of one rounding each


def test_exqpe_default_is_exact_where_the_steps_are_dyadic():
    assert exqpe_table(0, 3).tolist() == [1 / 16, 1 / 2048, 2 / 2048]
    assert exqpe_table(4, 3).tolist() == [2 / 16, 1 / 2048 + 2 / 16, 2 / 2048 + 1 / 16]
    assert exqpe_table(3 * 10**12, 3)[0] == (10**12 + 1) / 16  # any position in closed form


def test_sinusoidal_worked_example():
    np.testing.assert_allclose(sinusoidal_table(5, 4), [-0.9589, 0.2837, 0.0500, 0.9988], atol=5e-5)


def test_sinusoidal_next_row_is_this_one_turned():
    d, base = 10, 500.0
    table = sinusoidal_table(np.arange(200), d, base)
    for i in range(d // 2):
        w = base ** (-2 * i / d)
        sin, cos = table[:-1, 2 * i], table[:-1, 2 * i + 1]
        np.testing.assert_allclose(table[1:, 2 * i], sin * math.cos(w) + cos * math.sin(w), atol=1e-12)
        np.testing.assert_allclose(table[1:, 2 * i + 1], cos * math.cos(w) - sin * math.sin(w), atol=1e-12)


@pytest.mark.parametrize("d_head, base", [(2, 10000.0), (32, 10000.0), (64, 500000.0), (128, 100.0)])
def test_rope_frequencies_equal_those_of_transformers(d_head, base):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * d_head, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    inv_freq, factor = rope_inv_freq(d_head, base)
    np.testing.assert_allclose(inv_freq, LlamaRotaryEmbedding(config).inv_freq.numpy(), rtol=3e-7)  # theirs is fp32
    assert inv_freq.dtype == np.float64 and inv_freq.shape == (d_head // 2,) and factor == 1.0


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


def test_distances_are_those_from_query_to_key():
    n, keys = np.array([[5, 0, 7], [1, 1, 2]]), np.array([[3, 9], [-1, 4]])
    for b, m, s in np.ndindex(2, 3, 2):
        assert distances(n, n)[b, m, s] == n[b, m] - n[b, s] and distances(n, keys)[b, m, s] == n[b, m] - keys[b, s]


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


def test_alibi_slopes_of_8_and_12_heads():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(12) == pytest.approx([2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


@pytest.mark.parametrize("n_heads", [*range(1, 65), 112])
def test_alibi_slopes_equal_those_of_transformers_bloom(n_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float64)[:, 0, 1].numpy()  # slope * position 1
    np.testing.assert_allclose(alibi_slopes(n_heads), theirs, rtol=1e-6)  # theirs are float32


def test_alibi_bias_is_minus_slope_times_distance():
    n, keys = np.array([[4, 0, 9], [1, 2, 3]]), np.array([[7, 0], [2, 2]])
    for k in (n, keys):
        pairs = make_encoding("alibi").pairs(n, k, PRESETS["mini"].model)
        table = alibi_forward(np.zeros((1, 3, 3, 4)), None, None, pairs, {})[0]
        assert table.shape == (2, 3, 3, k.shape[1])
        for b, h, m, s in np.ndindex(*table.shape):
            assert table[b, h, m, s] == -(2.0 ** -[4, 8, 2][h]) * (n[b, m] - k[b, s])


def test_alibi_slopes_start_with_those_of_the_lower_power_of_two_and_lie_between_them():
    for n_heads in range(1, 65):
        slopes, lower = alibi_slopes(n_heads), 2 ** int(math.log2(n_heads))
        assert len(set(slopes)) == n_heads and np.array_equal(slopes[:lower], alibi_slopes(lower))
        assert 2.0**-8 <= slopes.min() and slopes.max() < 1


def test_t5_buckets_begin_where_they_should():
    buckets = t5_bucket(np.arange(10_001))
    first = [int(np.argmax(buckets == b)) for b in range(32)]
    assert first == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert buckets[-1] == 31 and (np.diff(buckets) >= 0).all()


@pytest.mark.parametrize("n_buckets, max_distance", [(32, 128), (32, 500), (8, 100), (64, 1000), (7, 33), (3, 10)])
def test_t5_buckets_equal_those_of_transformers(n_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    d = np.arange(10_001)
    options = {"bidirectional": False, "num_buckets": n_buckets, "max_distance": max_distance}
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(-d), **options).numpy()
    ours = t5_bucket(d, n_buckets, max_distance)
    different = np.flatnonzero(ours != theirs)
    edge = np.flatnonzero(np.diff(ours)) + 1  # theirs works in float32, which may be one bucket low exactly at an edge
    assert set(different) <= set(edge) and (theirs[different] == ours[different] - 1).all()


def test_t5_edges_are_exact_where_a_float_cannot_be():
    # 4 * 2^(k/2): bucket 6 of 8 begins at 4 * (16/4)^(2/4) = 8, and 4 * (16/4)^(1/4) = 5.66 rounds up to 6
    assert t5_bucket([3, 4, 5, 6, 7, 8, 11, 12, 16, 10**9], 8, 16).tolist() == [3, 4, 4, 5, 5, 6, 6, 7, 7, 7]
    assert t5_bucket([-1, -(10**9)]).tolist() == [0, 0]


def test_shaw_index_is_the_clipped_distance():
    d = distances(np.arange(6), np.arange(6))
    expected = [[min(max(m - n, 0), 3) for n in range(6)] for m in range(6)]
    assert shaw_index(d, 3).tolist() == expected


def test_wrong_distances_and_sizes_are_named():
    for call, message in (
        (lambda: alibi_slopes(0), "n_heads must be at least 1, got 0"),
        (lambda: t5_bucket([1.5]), "distance must be integers, got an array of float64"),
        (lambda: t5_bucket(1, 1, 128), "n_buckets of at least 2"),
        (lambda: t5_bucket(1, 32, 16), "max_distance above half of them and at most 2.24, got 32 and 16"),
        (lambda: shaw_index(1, 0), "max_distance must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_learned_rows_are_the_positions_and_no_others():
    n = np.array([[0, 4], [4, 2]], dtype=np.uint8)
    assert np.array_equal(learned_rows(n, 5), n)
    for positions, wrong in (([0, 5, 7], 5), ([3, -1], -1)):
        with pytest.raises(ValueError, match=f"positions 0 to 4 it was trained on, and none for position {wrong}"):
            learned_rows(positions, 5)


def test_wrong_widths_are_named():
    for call in (lambda: expe_table([0], 0), lambda: exqpe_table([0], -1), lambda: sinusoidal_table([0], 0)):
        with pytest.raises(ValueError, match="must be at least 1, got"):
            call()
    with pytest.raises(ValueError, match="l must be a whole number, got 2.5"):
        expe_table([0], 2.5)
    with pytest.raises(ValueError, match="d_head must be even"):
        rope_inv_freq(7)
    with pytest.raises(ValueError, match="scaling must be one of none, linear, ntk, dynamic, yarn"):
        rope_inv_freq(8, scaling="stretched")
