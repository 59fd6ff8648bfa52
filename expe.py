"""Positions in, numbers out: every encoding as a pure function of integer positions, in float64.

The positions may have any shape and order, and hold any integers; every table has one more axis than they have.
NumPy alone: no torch, no model. Run as a script, `python expe.py` draws the tables side by side and measures
what the paper says of number formats (section 2.3).

n a position, j a dimension, l the number of overridden dimensions, start the paper's S, D the width of a head.
Paper: "ExPE: Exact Positional Encodings for Generative Transformer Models with Extrapolating Capabilities",
Datseris, Vassileva, Koychev and Boytcheva.
"""

import functools
import operator

import numpy as np


def _integers(positions, name="positions"):
    """The positions as an int64 array; ValueError for anything else, since a rounded position is another position."""
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iu" and positions.size:
        raise ValueError(f"{name} must be integers, got an array of {positions.dtype}")
    return positions.astype(np.int64)


def _width(name, value, least=1):
    """A width as an int; ValueError unless it is a whole number of at least `least`."""
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


# ---- the tables ------------------------------------------------------------------------------------------------------

def expe_table(positions, l, start=0.0, theta=1 / 2048, step=1):
    """ExPE's rows: a straight ramp in the position. Shape (..., l). Paper, equation 3.

        p_n = start + theta*n,  and row n is (p_n, p_(n+1), ..., p_(n+l-1)), so entry j is start + theta*(n + step*j)

    step=0 is the ablation "p is stable" (table 7): the same number in all l dimensions.
    All l columns carry one ramp up to a constant, so that l and theta together set one number, the ramp's gain.
    Raises ValueError for positions that are not integers and for l below 1.
    """
    n = _integers(positions)[..., None]                                           # (..., 1)
    j = np.arange(_width("l", l))                                                 # (l,)
    return float(start) + float(theta) * (n + step * j)                           # (..., l)


def exqpe_table(positions, l, start=0.0, theta1=1 / 2048, theta2=1 / 16):
    """ExQPE's rows: each position raises one of the l dimensions in turn. Shape (..., l). Paper, equation 5.

        p_0 = (start + theta2, start + theta1, start + 2*theta1, ...)
        p_n = p_(n-1) with dimension n mod l raised by theta2

    In closed form dimension j has been raised once at n = j, and once more every l positions after that:
    start + j*theta1 + theta2 * max(0, (n - j)//l + 1).
    Raises ValueError for positions that are not integers and for l below 1.
    """
    n = _integers(positions)[..., None]                                           # (..., 1)
    j = np.arange(_width("l", l))                                                 # (l,)
    raised = np.maximum(0, (n - j) // len(j) + 1)                                 # (..., l)
    return float(start) + j * float(theta1) + float(theta2) * raised


def affine_parts(table):
    """The three arrays that make up a table which is affine in two numbers, on a last axis: (..., l) to (..., l, 3).

    table(a, b) = parts[..., 0] + a parts[..., 1] + b parts[..., 2]: so a and b can be trained (the paper's "learned").
    ExPE's table is affine in start and theta, ExQPE's in theta1 and theta2.
    """
    zero, one, other = table(0, 0), table(1, 0), table(0, 1)
    return np.stack((zero, one - zero, other - zero), axis=-1)


def sinusoidal_table(positions, d_model, base=10000.0):
    """Sines on even columns, cosines on odd ones. Shape (..., d_model). Vaswani et al. 2017, section 3.5.

        p[n, 2i] = sin(n / base^(2i/d_model)),  p[n, 2i+1] = cos(n / base^(2i/d_model))

    Raises ValueError for positions that are not integers and for d_model below 1.
    """
    n = _integers(positions)[..., None]                                           # (..., 1)
    column = np.arange(_width("d_model", d_model))                                # (d_model,)
    pair = column // 2
    angle = n * float(base) ** (-2 * pair / d_model)                              # (..., d_model)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle))


def learned_rows(positions, context):
    """Which rows of a learned table of `context` rows the positions look up: those of their own number. Same shape.

    Raises ValueError for a position without a row, and for positions that are not integers.
    """
    n = _integers(positions)
    if outside := n[(n < 0) | (n >= context)].tolist():
        raise ValueError(f"learned has a row for each of the positions 0 to {context - 1} it was trained on, "
                         f"and none for position {outside[0]}")
    return n


def rope_inv_freq(d_head, base=10000.0, scaling="none", factor=1.0, trained_length=512, length=None):
    """RoPE's angle in radians by which each pair of dimensions turns per position. Su et al. 2021, section 3.2.2.

        inv_freq_i = base^(-2i/D),  i = 0 .. D/2-1

    Past the trained length L, s being the factor:

        linear   inv_freq_i / s: position interpolation (Chen et al. 2023)
        ntk      base s^(D/(D-2)) for base (bloc97 2023): the first pair as it was, the last one slower by exactly s
        dynamic  likewise, by s length/L - (s - 1) for s; up to the trained length nothing changes
        yarn     pairs that turn 32 times or more in L positions as they were, those that turn once at most divided by
                 s, and a straight ramp over i between the two (Peng et al. 2023, section 3.2)

    Returns ((D/2,) float64, attention_factor): cosines and sines are to be multiplied by the factor, which is 1 but for
    yarn: 0.1 ln s + 1 if s > 1 (its section 3.4; queries and keys both have it, so that scores get its square).
    `length` is that of the whole sequence, which dynamic alone reads: one set of frequencies holds for all of its keys.
    Raises ValueError for an odd d_head, a scaling that is not known, a factor of 0 or less or above 1e6, a base of 1 or
    less, a length below 1 or left out where it is needed, and a d_head of 2 where the base changes.
    """
    if _width("d_head", d_head) % 2:
        raise ValueError(f"d_head must be even for RoPE to pair its dimensions, got {d_head}")
    if scaling not in ROPE_SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(ROPE_SCALINGS)}, got {scaling!r}")
    if not 0 < factor <= 1e6:
        raise ValueError(f"factor must be above 0 and at most 1e6, got {factor!r}")
    if not 1 < base < np.inf:
        raise ValueError(f"base must be a finite number above 1, got {base!r}")
    return ROPE_SCALINGS[scaling](d_head, float(base), factor, _width("trained_length", trained_length), length)


def _unscaled(D, base, s, L, length):
    return base ** (-np.arange(0, D, 2) / D), 1.0                                 # (D/2,)


def _linear(D, base, s, L, length):
    return _unscaled(D, base, s, L, length)[0] / s, 1.0


def _ntk(D, base, s, L, length):
    if D == 2:
        raise ValueError("d_head must be at least 4 to scale the base: a single pair turns by 1 whatever the base")
    return _unscaled(D, base * s ** (D / (D - 2)), s, L, length)


def _dynamic(D, base, s, L, length):
    if length is None:
        raise ValueError("dynamic needs the length of the whole sequence, got None")
    return _ntk(D, base, max(1.0, s * _width("length", length) / L - (s - 1)), L, length)


def _yarn(D, base, s, L, length):
    def pair(turns):                                                              # that turns so often in L positions
        return D * np.log(L / (2 * np.pi * turns)) / (2 * np.log(base))

    low, high = max(np.floor(pair(32)), 0), min(np.ceil(pair(1)), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / max(high - low, 0.001), 0, 1)      # a step where the two coincide
    inv_freq, _ = _unscaled(D, base, s, L, length)
    return inv_freq * (1 - ramp + ramp / s), 0.1 * np.log(s) + 1 if s > 1 else 1.0


ROPE_SCALINGS = {"none": _unscaled, "linear": _linear, "ntk": _ntk, "dynamic": _dynamic, "yarn": _yarn}


def rope_table(positions, d_head, base=10000.0, **scaling):
    """Cosines, then sines, of every pair's angle n * inv_freq_i. Shape (..., d_head). Su et al. 2021, equation 34.

    The keywords scaling, factor, trained_length and length are rope_inv_freq's, and so is what it raises.
    """
    inv_freq, attention_factor = rope_inv_freq(d_head, base, **scaling)
    angle = _integers(positions)[..., None] * inv_freq                            # (..., D/2)
    return np.concatenate((np.cos(angle), np.sin(angle)), axis=-1) * attention_factor


def dual_chunk_positions(positions, chunk, local):
    """The positions that dual chunk attention gives to the tokens at integer positions. An et al. 2024, section 3.

    A key lies at n mod c. A query lies at m mod c for the keys of its own chunk; at min(m mod c + c, c + w) for those
    of the chunk before, w being the local window in which these distances are true; and at min(2c - 1, c + w) for all
    further back. So no distance is above c + w, and up to one chunk nothing changes.
    Returns (same, before, further), integers of the same shape; keys lie at `same`.
    Raises ValueError for positions that are not integers, chunk below 1 and local below 0.
    """
    n, c = _integers(positions), _width("chunk", chunk)
    farthest = c + _width("local", local, 0)
    same = n % c
    return same, np.minimum(same + c, farthest), np.full_like(n, min(2 * c - 1, farthest))


def distances(queries, keys=None):
    """m - n for every query position m and key position n: (..., T) and (..., S) to (..., T, S). No keys: the same."""
    m = _integers(queries)
    n = m if keys is None else _integers(keys)
    return m[..., :, None] - n[..., None, :]                                      # (..., T, S)


def alibi_slopes(n_heads):
    """ALiBi's slope of each head, (n_heads,). Press et al. 2022, section 3, and their code for other head counts.

    For a power of two, 2^(-8/H), 2^(-16/H), ..., 2^-8. Otherwise those of the next lower power of two, and then every
    other slope of twice as many heads, until there are enough. Raises ValueError for n_heads below 1.
    """
    lower = 2 ** (_width("n_heads", n_heads).bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower, 2) / (2 * lower))
    return np.concatenate((slopes, between))[:n_heads]


def alibi_table(positions, n_heads):
    """What ALiBi adds to the scores: -slope (m - n) for every head, query and key. Shape (..., H, T, S)."""
    return -alibi_slopes(n_heads)[:, None, None] * distances(positions)[..., None, :, :]


def alibi_keys(queries, keys, n_heads):
    """ALiBi with one number a key: what can be added instead of -slope (m - n), of shape (..., H, 1, S).

    -slope (m - n) = slope n - slope m, and the softmax over n drops what all keys of a query share: so the distance
    from any one query does for all. The last one's keeps the numbers small where the weights are large: slope*n itself
    would be 8,192 at n = 16,384, where float32 is a thousandth apart.
    """
    last = np.asarray(queries)[..., -1:]
    return -alibi_slopes(n_heads)[:, None, None] * distances(last, keys)[..., None, :, :]


def t5_bucket(distance, n_buckets=32, max_distance=128):
    """The bucket of each causal distance m - n >= 0, integers of the same shape. Raffel et al. 2020, section 2.1.

    The first half of the buckets, e = n_buckets//2, hold one distance each. The other r = n_buckets - e grow by a
    constant factor: bucket e + k begins at the first d with (d/e)^r >= (max_distance/e)^k. From max_distance on all is
    the last bucket; below 0 the first.
    Raises ValueError for distances that are not integers, n_buckets below 2, and max_distance within the first half or
    above 2^24.
    """
    buckets = _t5_buckets(n_buckets, max_distance)
    return buckets[np.clip(_integers(distance, "distance"), 0, max_distance)]


@functools.lru_cache
def _t5_buckets(n_buckets, max_distance):
    """The buckets of the distances 0 .. max_distance, their edges found in whole numbers, so that none is rounded."""
    e = _width("n_buckets", n_buckets) // 2
    if e < 1 or not e < _width("max_distance", max_distance) <= 2**24:
        raise ValueError(f"t5_bucket needs n_buckets of at least 2 and max_distance above half of them and at most "
                         f"2^24, got {n_buckets} and {max_distance}")
    r, first = n_buckets - e, list(range(e))
    for k in range(r):
        d = max(e, int(e * (max_distance / e) ** (k / r)) - 1)
        while d**r * e**k < max_distance**k * e**r:
            d += 1
        first.append(d)
    buckets = np.searchsorted(first, np.arange(max_distance + 1), side="right") - 1
    buckets.flags.writeable = False                                               # one array for all callers
    return buckets


def shaw_index(distance, max_distance):
    """Which learned vector each causal distance m - n >= 0 looks up: min(m - n, max_distance). Shaw et al. 2018, eq. 4.

    Integers of the same shape; what lies ahead (below 0) counts as 0. Raises ValueError for max_distance below 1.
    """
    return np.clip(_integers(distance, "distance"), 0, _width("max_distance", max_distance))


# ---- number formats --------------------------------------------------------------------------------------------------

# Format: bits of the exponent, bits of the fraction, and how many numbers the paper's section 2.3 sees in [0, 1].
FORMATS = {
    "fp32": (8, 23, "about 1e9"),
    "fp16": (5, 10, "33e6"),
    "tf32": (8, 10, "about 1e6"),
    "bf16": (8, 7, "around 16e3"),
}


def _format(dtype):
    if dtype not in FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
    return FORMATS[dtype][:2]


def count_floats(dtype):
    """How many numbers of "fp32", "tf32", "fp16" or "bf16" lie in [0, 1], both ends counted, -0 not.

    Non-negative floats are ordered as their bit patterns are, and 1 has an empty fraction under the exponent field
    2^(e-1) - 1: so there are (2^(e-1) - 1) * 2^f patterns below 1. Raises ValueError for another dtype.
    """
    exponent_bits, fraction_bits = _format(dtype)
    return (2 ** (exponent_bits - 1) - 1) * 2**fraction_bits + 1


def round_to(x, dtype):
    """x in float64, rounded once to the nearest number of a format, ties to even. Same shape as x.

    Raises ValueError for a dtype that is not in FORMATS.
    """
    exponent_bits, fraction_bits = _format(dtype)
    bias = 2 ** (exponent_bits - 1) - 1
    _, exponent = np.frexp(x)                                                     # |x| = m * 2^exponent, 0.5 <= m < 1
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, 1 - bias) - fraction_bits)   # one spacing for all subnormals
    largest = (2 - 2.0**-fraction_bits) * 2.0**bias
    rounded = np.rint(x / spacing) * spacing
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded)


# The tables that need no training, with the paper's settings of its 35M model: l = 24, width 384, heads of 32.
TABLES = {
    "sinusoidal": lambda positions: sinusoidal_table(positions, 384),
    "expe": lambda positions: expe_table(positions, 24),
    "exqpe": lambda positions: exqpe_table(positions, 24),
    "rope": lambda positions: rope_table(positions, 32),
}


def distinct_positions(encoding, dtype, length):
    """How many different rows the positions 0 .. length-1 have once the table is cast to dtype: length if none merge.

    encoding is a key of TABLES. The cast is of the finished table; positions and phases stay exact.
    Raises ValueError for an unknown encoding or dtype and for a length below 1.
    """
    if encoding not in TABLES:
        raise ValueError(f"encoding must be one of {', '.join(TABLES)} (those with a fixed table), got {encoding!r}")
    rows = round_to(TABLES[encoding](np.arange(_width("length", length))), dtype) + 0.0      # + 0.0: -0 becomes 0
    return len({row.tobytes() for row in rows})


# ---- as a script -----------------------------------------------------------------------------------------------------

def draw(path, length=512):
    """One picture of all TABLES over the positions 0 .. length-1: each a heat map, three of its columns above it."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = {"figsize": (15, 8), "height_ratios": (1, 2), "sharex": "col", "layout": "constrained"}
    figure, axes = plt.subplots(2, len(TABLES), **shape)
    titles = {"sinusoidal": "sinusoidal: added to the embedding\n(384 columns)",
              "expe": "ExPE: overrides l = 24 dimensions\nbefore $W_q$ and $W_k$",
              "exqpe": "ExQPE: one of l = 24 dimensions\ngrows at each position",
              "rope": "RoPE: cosines (columns 0-15), sines (16-31)\nof the angles that turn q and k"}
    for (curves, image), name in zip(axes.T, TABLES, strict=True):
        table = TABLES[name](np.arange(length))                                   # (length, columns)
        columns = table.shape[1]
        for column, colour in zip((0, columns // 2, columns - 1), ("#0072B2", "#E69F00", "#009E73"), strict=True):
            curves.plot(table[:, column], color=colour, linewidth=1.2, label=f"column {column}")
        curves.set_title(titles[name], fontsize=10)
        curves.legend(fontsize=7, loc="upper left", framealpha=0.9)
        mesh = image.imshow(table.T, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis")
        image.set_xlabel("position n")
        figure.colorbar(mesh, ax=image, orientation="horizontal", aspect=40)
    axes[0, 0].set_ylabel("value")
    axes[1, 0].set_ylabel("column")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main():
    from config import CommandLine, picture, whole

    parser = CommandLine(description="Draw the tables of the encodings side by side, and count in each number format "
                                     "what the paper's section 2.3 claims.")
    parser.add_argument("--out", type=picture, metavar="FILE", default="tables.png",
                        help="the picture, .png, .svg or .pdf (default: tables.png)")
    parser.add_argument("--length", type=whole, default=512, metavar="N", help="positions 0..N-1 (default: 512)")
    with parser.one_line_errors():
        args = parser.parse_args()
        if not 1 <= args.length <= 2**16:
            parser.error(f"--length must be from 1 to 65,536, got {args.length}")
        draw(args.out, args.length)

        print("numbers in [0, 1], 0 and 1 counted\n")
        print(f"{'format':8}{'the paper says':>16}{'in fact':>16}")
        for dtype, (_, _, claim) in FORMATS.items():
            print(f"{dtype:8}{claim:>16}{count_floats(dtype):>16,}")
        print("\npositions that keep a row of their own once the table is cast\n")
        print(f"{'encoding':12}{'of':>8}" + "".join(f"{dtype:>8}" for dtype in FORMATS))
        for name in TABLES:
            for length in (args.length, 16 * args.length):
                counts = "".join(f"{distinct_positions(name, dtype, length):8,}" for dtype in FORMATS)
                print(f"{name:12}{length:8,}{counts}")
        print(f"\npicture: {args.out}")


if __name__ == "__main__":
    main()
