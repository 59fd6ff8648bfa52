"""The table of the methods that README shows, from the files under results/ alone.

    python -m lab.verdict                     method, flags, what it is good for, trials, losses at 1x and 16x, cost
    python -m lab.verdict --full              the table of docs/evidence.md, with differences from one reference
    python -m lab.verdict --full --reference fox-lr-x2               the same, with differences from FoX

Losses are those at targets in 16 places of each document (`--protocol spread`), means over seeds on the test split, on
which nothing was tuned. What a method is good for is which tasks it learns (GOOD_FOR, from results/tasks/). Cost is the
time of a training step with --fast on a CPU over NoPE's (results/mini/bench.json; docs/speed.md has the command), and
the parameters beyond NoPE's. Other processors give other losses, by as much as docs/evidence.md says.
"""

import dataclasses
import re
import statistics
from pathlib import Path

import numpy as np

import train
from common import CommandLine
from config import InputError
from eval import MULTIPLES
from lab import pictures
from lab.compare import read_rows
from lab.files import read_json
from lab.grids import GRIDS, flags_of
from lab.measures import adjust_by_holm, p_value
from lab.report import collect, paired, table
from studies import tuning as tuned

FOLDER = Path("results") / tuned.PRESET
FAR = Path("results") / GRIDS["spread"].place
ENDS = (1, MULTIPLES[-1])
GOOD_FOR = {                             # method of results/tasks/: (words, {task: the multiple to which it has 95%})
    "fox": ("marked tokens and latest writes", {"needle": 16, "flip-flop": 16}),
    "alibi": ("text ends and latest writes", {"first-last": 16, "flip-flop": 16}),
    "kerple": ("marked tokens; sorting to 2x", {"needle": 16, "sort": 2}),
    "grape": ("text ends and latest writes", {"first-last": 16, "flip-flop": 16}),
    "expe-on-k": ("latest writes; recall to 2x", {"flip-flop": 16, "mqar": 2}),
    "shaw": ("exact offsets past trained length", {"back-3": 16, "back-8": 4}),
    "t5": ("sorting to twice trained length", {"sort": 2}),
    "expe": ("latest writes to four times", {"flip-flop": 4}),
    "nope": ("sorting, which needs no positions", {"sort": 4}),
    "rope": ("exact offsets within trained length", {"back-3": 1, "back-8": 1}),
    "sinusoidal": ("comparing with the first symbol", {"even-pairs": 4}),
}

def tuned_variants():
    """{variant: its trials} of the best values of each method that was tuned and scored; the method is the first one's
    name.
    """
    files, scored = collect(FOLDER), collect(FAR)

    def loss(name):
        rows = files.get((name, tuned.TRIALS[0]), {}).get(tuned.SEED)
        return rows and rows[0]["loss"]

    chosen = (tuned.trials(method, loss) for method in tuned.METHODS)
    return {best: names for names, best in chosen if (best, "test-spread") in scored}

def edges(variant, trials):
    """Which of a variant's values lie at an edge of what was tried: "theta", "lr", both or "no"."""
    values = {name: train.read_flags(["--preset", tuned.PRESET, *flags_of(name).split()])[1:] for name in trials}
    values = {name: dataclasses.asdict(model.encoding) | {"lr": config.lr} for name, (model, config) in values.items()}
    tried = {key: {own[key] for own in values.values()} for key in values[variant]}
    names = [key.replace("_", " ") for key, some in tried.items() if len(some) > 2 and not isinstance(min(some), str)
             and values[variant][key] in (min(some), max(some))]
    return " and ".join(names) or "no"

def name_of(variant):
    return re.sub(",? lr x", ", rate x", pictures.name(variant))

def cost_of(method, variant):
    """"1.04, +2,064": the time of a training step over NoPE's, and the parameters beyond NoPE's."""
    [ratio] = [row["over_nope"] for row in read_json(FOLDER / "bench.json") if row["pe"] == method]
    return f"{ratio:.2f}, +{parameters(variant) - parameters('nope'):,}"

def mean_of(rows):
    return statistics.mean(row["loss"] for row in rows)

def committed():
    """README's rows, by the loss at 16x."""
    trials = tuned_variants()
    rows = read_rows(FAR, trials, "spread", "test")
    return [[name_of(variant), f"`{flags_of(variant)}`", GOOD_FOR[trials[variant][0]][0], str(len(trials[variant])),
             *(f"{mean_of(rows[variant][end]):.3f}" for end in ENDS), cost_of(trials[variant][0], variant)]
            for variant in sorted(trials, key=lambda variant: mean_of(rows[variant][ENDS[1]]))]

def full(reference):
    """Rows with trials, edges, parameters, 1x on all targets, losses, and differences from the reference.

    A star marks what is significant at 5% after Holm's correction over all of these differences.
    """
    trials = tuned_variants()
    if reference not in trials:
        raise InputError(f"--reference must be a method of the table, such as fox-lr-x2, got {reference}")
    rows = read_rows(FAR, trials, "spread", "test")
    pairs = {}                                                         # differences (seeds, documents), and targets
    for variant, end in ((variant, end) for variant in trials if variant != reference for end in ENDS):
        mine, other = ([row["unit_losses"] for row in rows[name][end]] for name in (variant, reference))
        pairs[variant, end] = np.subtract(mine, other), rows[variant][end][0]["unit_targets"]
    adjusted = dict(zip(pairs, adjust_by_holm([p_value(*pair) for pair in pairs.values()]), strict=True))
    lines = []
    for variant in sorted(trials, key=lambda variant: mean_of(rows[variant][ENDS[1]])):
        cells = [paired(rows[variant][end], rows[reference][end]) + " *" * bool(adjusted[variant, end] < 0.05)
                 if variant != reference else "" for end in ENDS]
        lines.append([name_of(variant), str(len(trials[variant])), edges(variant, trials[variant]),
                      f"{parameters(variant):,}", all_targets(variant),
                      *(f"{mean_of(rows[variant][end]):.3f}" for end in ENDS), *cells])
    return lines

def parameters(variant):
    return read_json(next(FOLDER.glob(f"{variant}-s[0-9]*.run.json")))["parameters"]

def all_targets(variant):
    """The mean loss at 1x of all targets of test, by the paper's protocol."""
    return f"{mean_of(read_rows(FOLDER, [variant], 'nonoverlap', 'test')[variant][1]):.3f}"

def main(argv=None):
    parser = CommandLine(prog="python -m lab.verdict", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the table of docs/evidence.md")
    parser.add_argument("--reference", metavar="NAME",
                        help="with --full: the variant from which differences are taken (default: expe-on-k)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.reference and not args.full:
            parser.error("--reference is for --full: add it, or leave this out")
        if args.full:
            reference = args.reference or "expe-on-k"
            heads = ["method", "trials", "at an edge", "parameters", "1x, all targets",
                     *(f"{end}x" for end in ENDS), *(f"{end}x - {name_of(reference)}" for end in ENDS)]
            print(table(heads, full(reference)), end="")
        else:
            heads = ["method", "flags", "good for", "trials", *(f"{end}x" for end in ENDS), "cost"]
            print(table(heads, committed()), end="")

if __name__ == "__main__":
    main()
