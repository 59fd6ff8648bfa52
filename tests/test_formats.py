"""Number formats against bit patterns, and against torch's own rounding."""

import numpy as np
import pytest
import torch

from lab.formats import FORMATS, TABLES, count_floats, distinct_positions, round_to

# The bit patterns of each format without a sign: (how many, bits to shift them by to fp32; None: float16's own).
PATTERNS = {"fp16": (2**15, None), "bf16": (2**15, 16), "tf32": (2**18, 13), "fp32": (2**31, 0)}


@pytest.mark.parametrize("dtype", FORMATS)
def test_count_floats_by_looking_at_every_bit_pattern(dtype):
    n_patterns, shift = PATTERNS[dtype]
    count, some = 0, np.arange(min(n_patterns, 2**18), dtype=np.uint32)
    for first in range(0, n_patterns, len(some)):
        bits = some + np.uint32(first)
        values = bits.astype(np.uint16).view(np.float16) if shift is None else (bits << shift).view(np.float32)
        count += int(np.count_nonzero(values <= 1))  # a NaN is not <= 1
    assert count_floats(dtype) == count


@pytest.mark.parametrize(
    "dtype, torch_dtype", [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_round_to_equals_torch(dtype, torch_dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100_000) * 2.0 ** rng.integers(-45, 15, 100_000)
    x = np.concatenate(
        (
            x.astype(np.float32).astype(np.float64),  # fp32 values: torch rounds doubles twice on their way
            [0.0, 1.0, 256.0, 257.0, 258.0, 259.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 65519.0, 65520.0, -70000.0],
        )
    )
    assert np.array_equal(round_to(x, dtype), torch.from_numpy(x).to(torch_dtype).double().numpy())


def test_round_to_tf32_keeps_ten_bits_of_fraction():
    assert round_to(1 + 2.0**-10, "tf32") == 1 + 2.0**-10
    assert round_to(1 + 2.0**-11, "tf32") == 1.0 and round_to(1 + 3 * 2.0**-11, "tf32") == 1 + 2.0**-9  # ties to even


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("length", [512, 5000])
def test_distinct_positions_equals_a_cast_and_a_count_in_torch(name, length):
    table = torch.from_numpy(TABLES[name](np.arange(length))).float()
    for dtype, torch_dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rows = table.to(torch_dtype).float()
        assert distinct_positions(name, dtype, length) == len(torch.unique(rows, dim=0))
