"""Tables against another library, at positions of any shape, and wrong sizes.

tests/test_ladder.py has the worked examples and recurrences.
"""


import numpy as np
import pytest
import torch
from conftest import need

from expe import (
    alibi_slopes,
    expe_table,
    exqpe_table,
    integers,
    learned_rows,
    rope_table,
    sinusoidal_table,
    t5_bucket,
)

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
        one = TABLES[name](int(positions[index]))                       # whose cosines other kernels may compute
        np.testing.assert_allclose(table[index], one, rtol=2**-51, atol=2**-51)
    with pytest.raises(ValueError, match="positions must be integers from .*, got an array of float64"):
        TABLES[name](np.array([0.0, 1.0]))


@pytest.mark.parametrize("n_heads", [*range(1, 18), 32, 63, 112])
def test_alibi_slopes_equal_those_of_transformers_bloom(n_heads):
    bloom = need("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float64)[:, 0, 1].numpy()  # slope * position 1
    np.testing.assert_allclose(alibi_slopes(n_heads), theirs, rtol=1e-6)  # theirs are float32


@pytest.mark.parametrize("n_buckets, max_distance, both_sides", [
    (32, 128, False), (64, 1000, False), (7, 33, False), (3, 10, False), (32, 128, True), (10, 100, True)])
def test_t5_buckets_equal_those_of_transformers(n_buckets, max_distance, both_sides):
    t5 = need("transformers.models.t5.modeling_t5")
    d = np.arange(-300, 301) if both_sides else np.arange(10_001)
    theirs = t5.T5Attention._relative_position_bucket(torch.from_numpy(-d), both_sides, n_buckets, max_distance).numpy()
    ours = t5_bucket(d, n_buckets, max_distance, both_sides)
    different = np.flatnonzero(ours != theirs)
    edge = np.flatnonzero(np.diff(ours)) + 1  # theirs works in float32, which may be one bucket low exactly at an edge
    assert set(different) <= set(edge) and (theirs[different] == ours[different] - 1).all()


@pytest.mark.parametrize("call, message", [
    (lambda: learned_rows([0, 5, 7], 5), "positions 0 to 4 it was trained on, and none for position 5"),
    (lambda: expe_table([0.5], 2), "positions must be integers"),
    *((lambda n=n: expe_table(n, 2), f"from -2.63 to 2.63 - 1, which int64 can hold, got {got}") for n, got in [
        ([2**63], 2**63), (np.array([0, 2**64 - 1], np.uint64), 2**64 - 1), ([2**64], "an array of object"),
        ([0, -(2**63) - 1], "an array of object"), ([-1, 2**63], "an array of float64"), ([2.0**63], "an array of")]),
    (lambda: t5_bucket(np.uint64(2**63)), "distance must be integers from .*, got 9223372036854775808"),
])
def test_wrong_positions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_of_every_kind_that_int64_holds_are_taken():
    for n in (np.array([0, 2**63 - 1], np.uint64), np.array([3], np.uint8), [-(2**63), 2**63 - 1], 5, []):
        found = integers(n)
        assert found.dtype == np.int64 and found.tolist() == np.asarray(n).tolist()
