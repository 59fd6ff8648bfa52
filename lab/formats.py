"""What number formats do to positions, and a picture of the encodings' tables.

    python -m lab.formats --out tables.png --length 512

The paper's section 2.3 counts the numbers that a format has in [0, 1]. Here they are counted, and so are the positions
that keep a row of their own once a table is cast.
"""

import numpy as np

import expe
from common import CommandLine, whole
from lab.files import picture

# Format: bits of the exponent, bits of the fraction, and how many numbers the paper's section 2.3 sees in [0, 1].
FORMATS = {"fp32": (8, 23, "about 1e9"), "fp16": (5, 10, "33e6"), "tf32": (8, 10, "about 1e6"),
           "bf16": (8, 7, "around 16e3")}

# The tables that need no training, with the paper's settings of its 35M model: l = 24, width 384, heads of 32.
TABLES = {
    "sinusoidal": lambda positions: expe.sinusoidal_table(positions, 384),
    "expe": lambda positions: expe.expe_table(positions, 24),
    "exqpe": lambda positions: expe.exqpe_table(positions, 24),
    "rope": lambda positions: expe.rope_table(positions, 32),
}
SHOWN = {                                # the formula of each, where it enters, and which columns are drawn as curves
    "sinusoidal": (r"$\sin$ and $\cos$ of $n / 10000^{2i/d}$", "added to the embedding\n(384 columns)", (48, 96, 144)),
    "expe": (r"$\mathrm{start} + \theta\,(n + j)$", "overrides l = 24 dimensions\nbefore $W_q$ and $W_k$", (0, 12, 23)),
    "exqpe": (r"$\mathrm{start} + \theta_1\,j + \theta_2\,\max(0, \lfloor (n - j)/l \rfloor + 1)$",
              "one of l = 24 dimensions\ngrows at each position", (0, 12, 23)),
    "rope": (r"$\cos$ and $\sin$ of $n / 10000^{2i/D}$",
             "D = 32: cosines (0-15), sines (16-31)\nof the angles that turn q and k", (4, 8, 12)),
}

def count_floats(dtype):
    """How many numbers of "fp32", "tf32", "fp16" or "bf16" lie in [0, 1], both ends counted, -0 not.

    Non-negative floats are ordered as their bit patterns are, and 1 has an empty fraction under the exponent field
    2^(e-1) - 1: so there are (2^(e-1) - 1) * 2^f patterns below 1.
    """
    exponent_bits, fraction_bits, _ = FORMATS[dtype]
    return (2 ** (exponent_bits - 1) - 1) * 2**fraction_bits + 1

def round_to(x, dtype):
    """x in float64, rounded once to the nearest number of a format, ties to even."""
    exponent_bits, fraction_bits, _ = FORMATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    _, exponent = np.frexp(x)                                                     # |x| = m * 2^exponent, 0.5 <= m < 1
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, 1 - bias) - fraction_bits)   # one spacing for all subnormals
    largest = (2 - 2.0**-fraction_bits) * 2.0**bias
    rounded = np.rint(x / spacing) * spacing
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded)

def distinct_positions(encoding, dtype, length):
    """How many different rows the positions 0 .. length-1 have once the table is cast to dtype: length if none merge.

    encoding is a key of TABLES. The cast is of the finished table; positions and phases stay exact.
    """
    rows = round_to(TABLES[encoding](np.arange(length)), dtype) + 0.0                          # + 0.0: -0 becomes 0
    return len({row.tobytes() for row in rows})

def draw(path, length=512):
    """One picture of all TABLES over the positions 0 .. length-1: each a heat map, three of its columns above it."""
    from lab.pictures import Figure, colour, matplotlib, name, save, shade
    viridis = matplotlib.colormaps["viridis"].resampled(64)            # few shades, for a small file
    figure = Figure(figsize=(15, 8), layout="constrained")
    parts = figure.subfigures(1, len(TABLES))
    for part, (encoding, make), (formula, place, columns) in zip(parts, TABLES.items(), SHOWN.values(), strict=True):
        table = make(np.arange(length))                                           # (length, columns)
        part.suptitle(name(encoding), color=colour(encoding), fontsize=16)
        curves, image = part.subplots(2, 1, height_ratios=(1, 2), sharex=True)
        for column, share in zip(columns, (0, 0.5, 1), strict=True):
            shown = {"color": shade(colour(encoding), share), "linewidth": 1 + share}
            curves.plot(table[:, column], **shown, label=f"column {column}")
        curves.set_title(f"{formula}\n{place}", fontsize=12, linespacing=1.4)
        curves.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, columnspacing=1)
        mesh = image.imshow(table.T, aspect="auto", origin="lower", interpolation="none", cmap=viridis)
        image.set_xlabel("position n")
        part.colorbar(mesh, ax=image, orientation="horizontal", aspect=40)
        if encoding == "sinusoidal":
            curves.set_ylabel("value")
            image.set_ylabel("column")
    save(figure, path, dpi=88)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.formats", description="Draw the tables of the encodings side by side, and "
                         "count in each number format what the paper's section 2.3 claims.")
    parser.add_argument("--out", type=picture, metavar="FILE", default="tables.png",
                        help="the picture, .png (with an .svg beside it), .svg or .pdf (default: tables.png)")
    parser.add_argument("--length", type=whole, default=512, metavar="N", help="positions 0..N-1 (default: 512)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
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
