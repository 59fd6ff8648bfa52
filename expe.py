"""Positions in, numbers out: every encoding as a pure function of integer positions, in float64.

The positions may have any shape and order, and hold any integers that fit int64; every table has one more axis than
they have. What is no such integer raises ValueError. Sizes are checked where they are given (positional_encodings.py).
NumPy alone: no torch, no model.

n a position, j a dimension, l the number of overridden dimensions, start the paper's S, D the width of a head.
Paper: "ExPE: Exact Positional Encodings for Generative Transformer Models with Extrapolating Capabilities",
Datseris, Vassileva, Koychev and Boytcheva.
"""

import functools

import numpy as np


def integers(positions, name="positions"):
    """The positions as an int64 array; ValueError for anything else, since a rounded position is another position."""
    positions = np.asarray(positions)
    rule = f"{name} must be integers from -2^63 to 2^63 - 1, which int64 can hold"
    if positions.dtype.kind not in "iu" and positions.size:
        raise ValueError(f"{rule}, got an array of {positions.dtype}")
    if positions.size and positions.max() > np.iinfo(np.int64).max:     # of uint64: astype would make it negative
        raise ValueError(f"{rule}, got {positions.max()}")
    return positions.astype(np.int64)

def expe_table(positions, l, start=0.0, theta=1 / 2048, step=1):
    """ExPE's rows: a straight ramp in the position. Shape (..., l). Paper, equation 3.

        p_n = start + theta*n,  and row n is (p_n, p_(n+1), ..., p_(n+l-1)), so entry j is start + theta*(n + step*j)

    step=0 is the ablation "p is stable" (table 7): the same number in all l dimensions.
    All l columns carry one ramp up to a constant, so that l and theta together set one number.
    """
    n = integers(positions)[..., None]                                           # (..., 1)
    j = np.arange(l)                                                 # (l,)
    return float(start) + float(theta) * (n + step * j)                           # (..., l)

def exqpe_table(positions, l, start=0.0, theta1=1 / 2048, theta2=1 / 16):
    """ExQPE's rows: each position raises one of the l dimensions in turn. Shape (..., l). Paper, equation 5.

        p_0 = (start + theta2, start + theta1, start + 2*theta1, ...)
        p_n = p_(n-1) with dimension n mod l raised by theta2

    In closed form dimension j has been raised once at n = j, and once more every l positions after that:
    start + j*theta1 + theta2 * max(0, (n - j)//l + 1).
    """
    n = integers(positions)[..., None]                                           # (..., 1)
    j = np.arange(l)                                                 # (l,)
    raised = np.maximum(0, (n - j) // len(j) + 1)                                 # (..., l)
    return float(start) + j * float(theta1) + float(theta2) * raised

def affine_parts(table):
    """The parts (..., l, 3) of a table that is affine in two numbers: table(a, b) = parts_0 + a parts_1 + b parts_2."""
    zero, one, other = table(0, 0), table(1, 0), table(0, 1)
    return np.stack((zero, one - zero, other - zero), axis=-1)

def sinusoidal_table(positions, d_model, base=10000.0):
    """Sines on even columns, cosines on odd ones. Shape (..., d_model). Vaswani et al. 2017, section 3.5.

        p[n, 2i] = sin(n / base^(2i/d_model)),  p[n, 2i+1] = cos(n / base^(2i/d_model))
    """
    n = integers(positions)[..., None]                                           # (..., 1)
    column = np.arange(d_model)                                # (d_model,)
    pair = column // 2
    angle = n * float(base) ** (-2 * pair / d_model)                              # (..., d_model)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle))

def learned_rows(positions, context):
    """Which rows of a learned table of `context` rows the positions look up: those of their own number. Same shape.

    Raises ValueError for a position without a row.
    """
    n = integers(positions)
    if outside := n[(n < 0) | (n >= context)].tolist():
        raise ValueError(f"learned has a row for each of the positions 0 to {context - 1} it was trained on, "
                         f"and none for position {outside[0]}")
    return n

def rope_inv_freq(d_head, base=10000.0):
    """The angle in radians by which RoPE turns each pair of dimensions per position. Shape (d_head/2,), float64.

        inv_freq_i = base^(-2i/D),  i = 0 .. D/2-1                                Su et al. 2021, section 3.2.2

    d_head is even. (longer/scaling.py scales the angles for long texts.)
    """
    return float(base) ** (-np.arange(0, d_head, 2) / d_head)                     # (D/2,)

def rope_table(positions, d_head, base=10000.0):
    """Cosines, then sines, of every pair's angle n * inv_freq_i. Shape (..., d_head). Su et al. 2021, equation 34."""
    angle = integers(positions)[..., None] * rope_inv_freq(d_head, base)         # (..., D/2)
    return np.concatenate((np.cos(angle), np.sin(angle)), axis=-1)

def distances(queries, keys):
    """m - n for every query position m and key position n: (..., T) and (..., S) to (..., T, S)."""
    return integers(queries)[..., :, None] - integers(keys)[..., None, :]       # (..., T, S)

def alibi_slopes(n_heads):
    """ALiBi's slope of each head, (n_heads,). Press et al. 2022, section 3, and their code for other head counts.

    For a power of two, 2^(-8/H), 2^(-16/H), ..., 2^-8. Otherwise those of the next lower power of two, and then every
    other slope of twice as many heads, until there are enough.
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower, 2) / (2 * lower))
    return np.concatenate((slopes, between))[:n_heads]

def t5_bucket(distance, n_buckets=32, max_distance=128, both_sides=False):
    """The bucket of each causal distance m - n >= 0, integers of the same shape. Raffel et al. 2020, section 2.1.

    The first half of the buckets, e = n_buckets//2, hold one distance each. The other r = n_buckets - e grow by a
    constant factor: bucket e + k begins at the first d with (d/e)^r >= (max_distance/e)^k. From max_distance on all is
    the last bucket; below 0 the first. For both sides, half of the buckets are for |m - n|, and the other half for that
    of keys ahead.
    """
    d = integers(distance, "distance")
    if both_sides:
        return t5_bucket(abs(d), n_buckets // 2, max_distance) + n_buckets // 2 * (d < 0)
    return _t5_buckets(n_buckets, max_distance)[np.clip(d, 0, max_distance)]

@functools.lru_cache
def _t5_buckets(n_buckets, max_distance):
    """The buckets of the distances 0 .. max_distance, their edges found in whole numbers, so that none is rounded."""
    e = n_buckets // 2
    r = n_buckets - e
    first = list(range(e))
    for k in range(r):
        d = max(e, int(e * (max_distance / e) ** (k / r)) - 1)
        while d**r * e**k < max_distance**k * e**r:
            d += 1
        first.append(d)
    buckets = np.searchsorted(first, np.arange(max_distance + 1), side="right") - 1
    buckets.flags.writeable = False                                               # one array for all callers
    return buckets

def shaw_index(distance, max_distance, both_sides=False):
    """Which learned vector each causal distance m - n >= 0 looks up: min(m - n, max_distance). Shaw et al. 2018, eq. 4.

    Integers of the same shape; what lies ahead (below 0) counts as 0, or for both sides as distances of its own, all of
    them from 0 to 2 max_distance.
    """
    least = -max_distance * both_sides
    return np.clip(integers(distance, "distance"), least, max_distance) - least
