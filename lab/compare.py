"""Two variants side by side, from the files under results/ alone: their losses, and the difference with its interval.

    python -m lab.compare expe-on-k fox --at 1x,16x --split test
    python -m lab.compare "expe-random:scale 8.0" expe --at 4x                  read in another way, after a colon
    python -m lab.compare expe-on-k-tokens-x4 expe-on-k-tokens-x4 --at 16x --than 1x --split test

The names are those of lab/grids.py and of the pages under results/. The 95% interval is for other seeds and documents.
"""

from pathlib import Path

from common import CommandLine, listed
from config import InputError
from eval import MULTIPLES
from lab.grids import EVALUATIONS, LOSSES, VARIANTS, Grid
from lab.report import FURTHER, check_alike, collect, lines_of, mean_sd, paired, table
from studies import tuning as tuned

TIMES = {f"{multiple}x": multiple for multiple in MULTIPLES}

def read_rows(folder, names, protocol, split):
    """{name: {multiple: rows, one a seed}} of variants, NAME or NAME:HOW, by the seeds that all of them have."""
    words = {what: [*flags.split(), "--protocol", "nonoverlap"] for what, flags in EVALUATIONS.items()}
    wanted = [what for what, flags in words.items() if flags[flags.index("--protocol") + 1] == protocol
              and "--probe" not in flags and ("test" in flags) == (split == "test")]
    files = collect(folder)
    variants = {name: name.partition(":")[0] for name in names}
    for variant in variants.values():
        if variant not in VARIANTS:
            raise InputError(f"{variant} is no variant of lab/grids.py, such as expe-on-k")
        if not any((variant, what) in files for what in wanted):
            raise InputError(f"{folder} has no {protocol} of {variant} on {split}: python -m lab.reproduce may make it")
    grid = Grid("", {variant: [what for what in wanted if (variant, what) in files] for variant in variants.values()})
    made = [(variant, what) for variant, names in grid.evaluations.items() for what in names]
    seeds = set.intersection(*(set(files[pair]) for pair in made))
    seeds = sorted(seeds - {tuned.SEED}) or sorted(seeds)
    if not seeds:
        raise InputError(f"{' and '.join(names)} have no seed in common under {folder}")
    check_alike(folder, grid, files, seeds)
    lines = {line.label: line for line in lines_of(grid, files, seeds)}
    by_name = {}
    for name in names:
        label = name.replace(":", " ", 1)
        if label not in lines:
            ways = ", ".join(f"{line.variant}:{line.how}" for line in lines.values() if line.how) or "none"
            raise InputError(f"{folder} has no {name}; read in other ways there are: {ways}")
        by_name[name] = {multiple: lines[label].rows[protocol, multiple] for multiple in MULTIPLES}
    return by_name

def main(argv=None):
    parser = CommandLine(prog="python -m lab.compare", description=__doc__)
    add = parser.add_argument
    add("a", metavar="A", help="a variant")
    add("b", metavar="B", help="the one whose loss is taken from A's")
    add("--at", type=listed(str, *TIMES), default=["1x", "16x"], metavar="1x,16x", help="(default: 1x,16x)")
    add("--than", choices=TIMES, help="read B at this multiple (default: at A's)")
    add("--protocol", choices=(*LOSSES, *FURTHER), default="same-targets", help="(default: same-targets)")
    add("--split", choices=("val", "test"), default="val", help="(default: val)")
    add("--place", default=tuned.PRESET, help="the folder of results/ (default: mini)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        folder = Path("results") / args.place
        if not folder.is_dir():
            raise InputError(f"--place must be a folder of results/, such as {tuned.PRESET}, got {args.place}")
        rows = read_rows(folder, [args.a, args.b], args.protocol, args.split)
        cells = []
        for at in args.at:
            than = args.than or at
            a, b = rows[args.a][TIMES[at]], rows[args.b][TIMES[than]]
            losses = [mean_sd([row["loss"] for row in some]) for some in (a, b)]
            cells.append([at, losses[0], than, losses[1], paired(a, b)])
        print(f"{args.protocol}, {args.split} of {args.place}, {len(a)} seed{'s' * (len(a) > 1)}")
        print(table(["A at", args.a, "B at", args.b, "A - B, 95% interval"], cells), end="")

if __name__ == "__main__":
    main()
