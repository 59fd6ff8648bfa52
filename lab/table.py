"""The tables of measured losses: means over seeds, and differences with intervals.

    python -m lab.table studies/best.jsonl --measures spread --at 1x,16x --than expe-on-k
    python -m lab.table studies/encodings.jsonl --runs "expe*" --seeds          the loss of each seed
    python -m lab.table mine.json other.json --than other                       what lab.measure or eval.py wrote
    python -m lab.table studies/best.jsonl --measures spread --plot best.png --title "FoX and ALiBi stay flat"

A number after ± makes a 95% interval for other seeds and other documents, sqrt(h1^2 + h2^2) of two half widths:

    h1 = t(f) s sqrt(1/n + 1/n)   s: the standard deviation over seeds, pooled over the methods of the table, f: their
                                  summed degrees of freedom, n: seeds; for the change of one method, s/sqrt(n)
    h2 = t(m - 1) d / sqrt(m)     d: the standard deviation of the difference over m documents, weighted by targets

docs/evidence.md explains which methods vary more and have no interval, and what one, two or choosing (+) seeds give.

    *   differs from 0 at 5%, after Holm's correction over all differences from --than, once a method: two lengths of a
        method that is flat are one test; the changes of all methods are corrected apart. It may be within the margin
    =   equal within the margin: the interval lies inside of it; neither: not separated here

Of tasks there are accuracies in %, means over all seeds, and how many seeds learned: 95% or more at the trained length.
"""

import contextlib
import fnmatch
import functools
import itertools
import math
import re
from argparse import ArgumentTypeError
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from cli import PICTURES, CommandLine, listed, new_file, number

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from files import read_text
from lab.results import LEARNED, Row, is_gain, read_results, read_rows, unfinished
from settings import InputError

MARGIN = 0.01                            # nats, of equivalence
ALONE = "± half of a 95% interval over documents alone: it says nothing of another seed"
LEGEND = """± half of a 95% interval over seeds and documents (of one seed: documents alone);
* differs from 0 after Holm's correction; = equal within {:g}; neither: not separated.
Methods that vary more, or have two seeds, show their seeds. + a seed chose its values."""

# ---- reading ---------------------------------------------------------------------------------------------------------

def read_files(paths):
    """The Rows of files of results, or of --json; a run that is in several files is called FILE/RUN."""
    stems = [Path(path).stem for path in paths]
    parts = {}
    for path, stem in zip(paths, stems, strict=True):
        rows = from_rows(read_rows(path)) if read_text(path).startswith("[") else from_results(path)
        parts[path if stems.count(stem) > 1 else stem] = rows
    often = Counter(run for rows in parts.values() for run in {row.run for row in rows})
    return [row._replace(run=f"{stem}/{row.run}") if often[row.run] > 1 else row
            for stem, rows in parts.items() for row in rows]

def from_results(path):
    """The Rows of a file of results."""
    results = read_results(path)
    chosen = results.study.get("chosen", {})
    rows = []
    for (run, seed, measure), line in results.measured.items():
        trained = results.runs.get((run, seed))
        if trained is None or trained["sha256"][:16] != line["sha256"]:     # of weights that were trained again since
            continue
        context = trained["context"]
        of = {} if "parameters" not in trained else {                   # old lines of tasks have none
            "budget": trained["tokens"] / trained["parameters"], "source": results.facts[trained["data"]]["source"]}
        of["code"] = trained.get("code")
        for row in line["rows"]:
            fact = results.facts.get(row.get("targets"), {})
            value, losses, counts = None, None, np.array(fact.get("counts", []))
            if row["protocol"] == "task":
                value = row["accuracy"]
            elif row["losses"] is not None:
                losses = np.array(row["losses"])
                losses = np.array(row["without"]) - losses if "without" in row else losses
                value = float(losses @ counts / counts.sum())
            rows.append(Row(run, row.get("how", ""), seed, measure, row["protocol"], row["length"], context, value,
                            losses, counts, row.get("targets", ""), row | fact | of, seed in chosen.get(run, ())))
    order = results.study.get("runs", [])
    return sorted(rows, key=lambda row: order.index(row.run) if row.run in order else len(order))

def from_rows(rows):
    """The Rows of what eval.py and lab.measure write: runs NAME-s0, NAME-s1, .. are seeds of one."""
    found = []
    for row in rows:
        run, seed = re.fullmatch(r"(.*?)(?:-s(\d+))?", row["run"].removeprefix("runs/").rstrip("/")).groups()
        protocol = row["protocol"]
        value, losses, counts = row.get("accuracy", row["loss"]), row.get("unit_losses"), row.get("unit_targets")
        if losses is not None:
            losses, counts = np.array(losses), np.array(counts)
            if "unit_losses_without" in row:
                losses = np.array(row["unit_losses_without"]) - losses
                value = row["gain"]
        targets = row.get("targets_sha256", "")[:16] or f"{row['data']}, {row.get('n_targets')}"
        found.append(Row(run, row["how"], int(seed or 0), protocol if protocol != "sliding" else "same-targets",
                         protocol, row["length"], row["trained_length"], value, losses, counts, targets, row))
    return found

# ---- statistics ------------------------------------------------------------------------------------------------------

@functools.cache
def student(freedom, level=0.95):
    """The t within which Student's lies with this probability: sqrt(freedom) tan x, x of density cos(x)^(freedom - 1).

    freedom: at least 1.
    """
    x = np.linspace(0, np.pi / 2, 10_001)
    mass = np.cumsum(np.cos((x[1:] + x[:-1]) / 2) ** (freedom - 1))    # from 0 to x[1:]
    return math.sqrt(freedom) * math.tan(np.interp(level * mass[-1], mass, x[1:]))

@functools.cache
def gaps(methods, seeds, level=0.99):
    """By how much each of ordered variances exceeds the mean of all smaller ones in at most one table of 100.

    Simulated, of methods that vary alike; (methods - 1,).
    """
    drawn = np.sort(np.random.default_rng(0).chisquare(seeds - 1, (200_000, methods)))
    ratios = drawn[:, 1:] / (np.cumsum(drawn, 1)[:, :-1] / np.arange(1, methods))
    return np.quantile(ratios, 1 - (1 - level) / (methods - 1), axis=0)

class Pool(NamedTuple):
    """The standard deviation over seeds that methods share, its degrees of freedom, and the methods that it is of."""

    sd: float
    freedom: int
    methods: tuple

def pool(groups):
    """The Pool of {method: its seeds' values}: of those with three seeds or more, without those that vary more."""
    groups = {name: values for name, values in groups.items() if len(values) > 2}
    names = sorted(groups, key=lambda name: np.var(groups[name], ddof=1))
    variances = np.array([np.var(groups[name], ddof=1) for name in names])
    if len(names) > 1:
        before = np.cumsum(variances)[:-1] / np.arange(1, len(names))
        most = np.minimum(gaps(len(names), min(map(len, groups.values()))), 100 if len(names) < 5 else np.inf)
        wide = variances[1:] > before * most
        names = names[: 1 + int(np.argmax(wide))] if wide.any() else names
    freedom = sum(len(groups[name]) - 1 for name in names)
    total = sum((len(groups[name]) - 1) * np.var(groups[name], ddof=1) for name in names)
    return Pool(math.sqrt(total / freedom) if freedom else 0.0, freedom, tuple(names))

class Difference(NamedTuple):
    """A mean difference, its seeds, and the standard errors of its interval, which is missing if `freedom` is empty."""

    mean: float
    seeds: list
    errors: tuple = ()                   # over seeds, over documents
    freedom: tuple = ()                  # of each of them

    def half(self, level=0.95):
        return math.hypot(*(student(f, level) * error for f, error in zip(self.freedom, self.errors, strict=True)))

    def p_value(self):
        """One less the level of the widest interval that leaves out 0, to 1e-5; nan without an interval over seeds."""
        if not self.freedom or len(self.seeds) == 1:
            return math.nan
        low, high = 0.0, 1.0
        while high - low > 1e-5:
            level = (low + high) / 2
            low, high = (level, high) if self.half(level) < abs(self.mean) else (low, level)
        return 1 - low

def difference(pairs, shared, both):
    """The Difference of [(Row, Row), ...], one pair a seed; shared: the Pool, or None; both: whether each varies."""
    mean = float(np.mean([a.loss - b.loss for a, b in pairs]))
    tested = [(a, b) for a, b in pairs if not (a.chosen or b.chosen)]
    seeds = [a.loss - b.loss for a, b in pairs]
    errors, freedom = [], []
    if len(tested) > 2 and shared is not None:
        errors.append(shared.sd * math.sqrt((1 + both) / len(tested)))
        freedom.append(shared.freedom)
    elif len(pairs) > 1 or not tested:
        return Difference(mean, seeds)
    if all(a.losses is not None for a, _ in tested):
        weights = tested[0][0].counts / tested[0][0].counts.sum()
        n = 1 / float(weights @ weights)                               # documents that weigh alike (Kish 1965)
        by_document = np.mean([a.losses - b.losses for a, b in tested], axis=0)
        if n > 1.5:
            spread = float(weights @ (by_document - weights @ by_document) ** 2)
            errors.append(math.sqrt(spread / (n - 1)))
            freedom.append(n - 1)
    return Difference(mean, seeds, tuple(errors), tuple(freedom))

def holm(p_values):
    """{key: whether it is below 5%} of {key: p} after Holm's correction (1979)."""
    ordered = sorted((p, key) for key, p in p_values.items() if not math.isnan(p))
    passed = itertools.takewhile(lambda at: at[1][0] * (len(ordered) - at[0]) < 0.05, enumerate(ordered))
    return {key for _, (_, key) in passed}

# ---- tables ----------------------------------------------------------------------------------------------------------

def lines_of(rows):
    """{line: {(protocol, multiple of the trained length): {seed: Row}}}."""
    lines = {}
    for row in rows:
        lines.setdefault(row.line, {}).setdefault((row.protocol, row.at), {})[row.seed] = row
    return lines

def pairs_of(a, b):
    """[(Row, Row)] of the seeds that two cells {seed: Row} share, if both have a loss of the same targets."""
    pairs = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    alike = all(None not in (x.loss, y.loss) and x.targets == y.targets for x, y in pairs)
    return pairs if alike else []

def changes(cells, first, last):
    """{line: Difference of its losses at two places}."""
    pairs = {name: pairs_of(cell.get(last, {}), cell.get(first, {})) for name, cell in cells.items()}
    shared = pool({name: [a.loss - b.loss for a, b in some if not a.chosen] for name, some in pairs.items()})
    return {name: difference(some, shared if name in shared.methods else None, False)
            for name, some in pairs.items() if some}

def differences(cells, at, than):
    """{line: Difference of its loss from another line's} at one place."""
    shared = pool({name: [row.loss for row in cell.get(at, {}).values() if row.loss is not None and not row.chosen]
                   for name, cell in cells.items()})
    pairs = {name: pairs_of(cell.get(at, {}), cells[than].get(at, {})) for name, cell in cells.items() if name != than}
    return {name: difference(some, shared if {name, than} <= {*shared.methods} else None, True)
            for name, some in pairs.items() if some}

def describe(value, marks, margin):
    """"-0.088 ±0.029 *" of a Difference, or its seeds."""
    if not value.freedom:
        return " ".join(f"{seed:+.3f}" if abs(value.mean) < 0.1 else f"{seed:+.2f}" for seed in value.seeds)
    half = value.half()
    equal = abs(value.mean) + half <= margin and len(value.seeds) > 1
    return f"{value.mean:+.3f} ±{half:.3f}" + (" *" if marks else " =" if equal else "")

def compare(cells, places, than, margin):
    """{(line, place): text} of all lines' differences from one of them, with Holm's correction over the methods.

    Where a method and the other one are flat, all places are one test, of the largest p-value.
    """
    values = {at: differences(cells, at, than) for at in places}
    change = changes(cells, places[0], places[-1]) if len(places) > 1 else {}
    p_values = {}
    for name in dict.fromkeys(name for found in values.values() for name in found):
        some = {at: found[name].p_value() for at, found in values.items() if name in found}
        flat = all(one in change and abs(change[one].mean) <= margin for one in (name, than))
        p_values |= {(name, None): max(some.values())} if flat else {(name, at): p for at, p in some.items()}
    passed = holm(p_values)
    return {(name, at): describe(value, (name, at) in passed or (name, None) in passed, margin)
            for at, found in values.items() for name, value in found.items()}

def times(at):
    return f"{at:g}x"

def table_of(rows, args):
    """(heads, lines of cells) of the Rows of one measure."""
    cells = lines_of(rows)
    protocol = next((row.protocol for row in rows if row.protocol != "sliding"), rows[0].protocol)
    places = sorted({at for found in cells.values() for at in found if at[0] == protocol})
    places = [at for at in places if args.at is None or at[1] in args.at]
    if not places:
        raise InputError(f"--at has no place of {rows[0].measure}")
    beside = sorted({at for found in cells.values() for at in found if at[0] != protocol} if args.at is None else [])
    heads = ["run", *(times(at) for _, at in places), *(f"{name} {times(at)}" for name, at in beside)]
    texts = {}                                                         # {(line, head): text} of the differences
    if len(places) > 1 and not is_gain(rows):
        heads.append(head := f"{times(places[-1][1])} - {times(places[0][1])}")
        change = changes(cells, places[0], places[-1])
        passed = holm({name: value.p_value() for name, value in change.items()})
        texts |= {(name, head): describe(value, name in passed, args.margin) for name, value in change.items()}
    if args.than in cells:
        names = {at: f"{times(at[1])} - {args.than}'s" for at in places}
        heads += names.values()
        texts |= {(name, names[at]): text
                  for (name, at), text in compare(cells, places, args.than, args.margin).items()}
    body = []
    for name, found in cells.items():
        mark = " +" if any(row.chosen for cell in found.values() for row in cell.values()) else ""
        means = [mean_of(found.get(at, {}), args.seeds) for at in (*places, *beside)]
        differences_of = [texts.get((name, head), "") for head in heads[1 + len(means) :]]
        body.append([name + mark + unfinished(rows, name), *means, *differences_of])
    return heads, body

def mean_of(cell, each):
    """The mean over the seeds of a cell, or each of them; "-" where there is none, as past the last position."""
    losses = [row.loss for _, row in sorted(cell.items())]
    if None in losses:
        return "not finite" if any(row.more.get("n_targets") for row in cell.values()) else "-"
    if not losses:
        return ""
    return " ".join(f"{loss:.3f}" for loss in losses) if each else f"{np.mean(losses):.3f}"

def tasks_table(rows, args):
    """(heads, lines of cells) of accuracies in %, of runs that are called TASK.METHOD: a line a task."""
    places = sorted({row.at for row in rows if args.at is None or row.at in args.at})
    cells, trained, guesses = {}, {}, {}
    for row in rows:
        task, _, method = row.run.rpartition(".")
        task = task or row.measure
        cells.setdefault(task, {}).setdefault(method, {}).setdefault(row.at, {})[row.seed] = row
        trained[task] = row.context
        guesses.setdefault(task, {})[row.at] = row.more["guess"]
    methods = list(dict.fromkeys(method for found in cells.values() for method in found))
    body = []
    for task, found in cells.items():
        guess = ", ".join(f"{100 * guesses[task][at]:.0f}" for at in places if at in guesses[task])
        values = [accuracies(found.get(method, {}), places, args.seeds) for method in methods]
        body.append([task, str(trained[task]), *values, guess])
    of_method = {method: [row._replace(run=method) for row in rows if row.run.rpartition(".")[2] == method]
                 for method in methods}
    heads = [method + unfinished(of_method[method], method) for method in methods]
    return ["task", "trained", *heads, "best guess"], body

def accuracies(cell, places, each):
    """"100, 66 (2/3)": means over seeds in % at some lengths, and how many have learned the task, unless all have."""
    values = [[row.loss for _, row in sorted(cell[at].items())] for at in places if at in cell]
    if not values:
        return ""
    if each:
        return "; ".join(" ".join(f"{100 * value:.1f}" for value in some) for some in values)
    learned = sum(row.loss >= LEARNED for row in cell[min(cell)].values())
    text = ", ".join(f"{100 * np.mean(some):.0f}" for some in values)
    return text + f" ({learned}/{len(values[0])})" * (learned < len(values[0]))

def print_table(heads, body):
    """A table in Markdown."""
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    for cells in (heads, ["-" * width for width in widths], *body):
        print(f"| {' | '.join(f'{cell:{width}}' for cell, width in zip(cells, widths, strict=True))} |")

def print_tables(rows, args=None):
    """Print a table for each measure of some Rows; args: those of this script (default: its defaults)."""
    args = args or command_line().parse_args(["-"])
    for measure in dict.fromkeys(row.measure for row in rows):
        some = [row for row in rows if row.measure == measure]
        task = some[0].protocol == "task"
        print(f"\n{measure}: {what_of(some)}\n")
        heads, body = (tasks_table if task else table_of)(some, args)
        print_table(heads, body)
        print_distances(some)
        if any("±" in cell for line in body for cell in line):
            alone = len({row.seed for row in some}) == 1
            print("\n" + (ALONE if alone else LEGEND).format(args.margin))
    print_code(rows)

def print_code(rows):
    """Name the lines whose seeds were trained with different code, as far as that was stored."""
    codes = {}                                                         # {run: {seed: {file: hash}}}
    for row in rows:
        if row.more.get("code"):
            codes.setdefault(row.run, {})[row.seed] = row.more["code"]
    for run, by_seed in codes.items():
        files = sorted(set().union(*by_seed.values()))
        if other := [file for file in files if len({code.get(file) for code in by_seed.values()}) > 1]:
            print(f"\n{run}: its seeds were trained with different code: {', '.join(other)}")

def what_of(rows):
    """What was scored, in a line."""
    scored = [row for row in rows if row.loss is not None]
    unit = "accuracy, %" if rows[0].protocol == "task" else "gain, nats" if is_gain(rows) else "loss, nats a token"
    texts = list(dict.fromkeys(row.more.get("data") or row.more.get("text", "") for row in scored))
    words = {f"{row.counts.sum():,} targets in {len(row.losses)} units" for row in scored if row.losses is not None}
    return "; ".join(filter(None, [unit, " or ".join(texts) * (len(texts) < 3),
                                   " or ".join(sorted(words)) * (len(words) < 3)]))

def print_distances(rows):
    """The loss by the distance of the copy, where rows have it."""
    by_distance = {}                                                   # {line: {(bin, multiple): losses of seeds}}
    for row in rows:
        for name, (loss, _) in row.more.get("by_distance", {}).items():
            by_distance.setdefault(row.line, {}).setdefault((name, row.at), []).append(loss)
    if by_distance:
        bins = dict.fromkeys(name for found in by_distance.values() for name, _ in found)
        first, last = (f(at for found in by_distance.values() for _, at in found) for f in (min, max))
        print(f"\n{times(first)} and {times(last)}, by the distance of the copy in trained lengths\n")
        print_table(["run", *bins], [[name, *(
            ", ".join(f"{np.mean(found[bin, at]):.3f}" for at in (first, last) if (bin, at) in found) for bin in bins)]
            for name, found in by_distance.items()])

# ---- as a script -----------------------------------------------------------------------------------------------------

def multiple(text):
    """16 from "16x", a multiple of the trained length, for argparse."""
    with contextlib.suppress(ArgumentTypeError):
        if text.endswith("x") and 0 < (value := number(text[:-1])) < math.inf:
            return value if value % 1 else int(value)
    raise ArgumentTypeError(f"{text!r} is not a multiple of the trained length, such as 16x")

def command_line():
    parser = CommandLine(prog="python -m lab.table", description=__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="studies/STUDY.jsonl, or what --json of lab.measure or eval.py wrote")
    add("--measures", type=listed(str), metavar="NAME,...", help="these alone (default: all)")
    add("--runs", type=listed(str), metavar="NAME,...", help="these alone, * for any text (default: all)")
    add("--at", type=listed(multiple), metavar="1x,16x", help="these multiples of the trained length (default: all)")
    add("--than", metavar="NAME", help="differences from this run, too")
    add("--seeds", action="store_true", help="each seed in the place of the mean")
    add("--margin", type=number, default=MARGIN, metavar="X", help="nats, of equivalence (default: %(default)s)")
    add("--plot", type=new_file(*PICTURES), metavar="FILE", help="draw the one measure too: .png, .svg or .pdf")
    add("--rises", type=new_file(*PICTURES), metavar="FILE",
        help="draw the last length minus 1x against training tokens a parameter, a dot a seed")
    add("--title", default="", metavar="TEXT", help="what the picture shows")
    return parser

def main(argv=None):
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = read_files(args.files)
        if not rows:
            raise InputError(f"{' and '.join(args.files)}: there is no measurement in it yet")
        for flag, key in (("measures", "measure"), ("runs", "run")):
            names = dict.fromkeys(getattr(row, key) for row in rows)
            patterns = getattr(args, flag) or ["*"]
            if missing := [word for word in patterns if not fnmatch.filter(names, word)]:
                raise InputError(f"--{flag} has {missing[0]}, and there are {', '.join(names)}")
            order = {name: i for i, word in reversed([*enumerate(patterns)]) for name in fnmatch.filter(names, word)}
            rows = sorted((row for row in rows if getattr(row, key) in order), key=lambda row: order[getattr(row, key)])
        lines = dict.fromkeys(row.line for row in rows)
        if args.than is not None and args.than not in lines:
            raise InputError(f"--than must be one of {', '.join(lines)}, got {args.than}")
        if not args.margin >= 0:
            raise InputError(f"--margin must be at least 0, got {args.margin}")
        if args.plot and len({row.measure for row in rows}) > 1:
            raise InputError("--plot draws one measure: name it with --measures")
        print_tables(rows, args)
        if args.plot:
            from lab import pictures
            pictures.draw(args.plot, rows, args)
            print(f"\npicture: {args.plot}")
        if args.rises:
            from lab import pictures
            pictures.rises(args.rises, rows, args.title)
            print(f"\npicture: {args.rises}")

if __name__ == "__main__":
    main()
