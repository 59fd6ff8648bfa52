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
import math
import re
from argparse import ArgumentTypeError
from collections import Counter
from pathlib import Path

from cli import PICTURES, CommandLine, listed, new_file, number

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from files import read_text
from lab.results import LEARNED, Row, describe_unfinished, is_gain, read_results, read_rows
from lab.statistics import estimate_difference, find_significant, pool_deviations
from settings import InputError

MARGIN = 0.01                            # nats: a difference is equal to 0 if its interval lies within it
LEGEND_OF_ONE_SEED = "± half of a 95% interval over documents alone: it says nothing of another seed"
LEGEND = """± half of a 95% interval over seeds and documents (of one seed: documents alone);
* differs from 0 after Holm's correction; = equal within {:g}; neither: not separated.
Methods that vary more, or have two seeds, show their seeds. + a seed chose its values."""

# ---- from files to rows ----------------------------------------------------------------------------------------------

def read_files(paths):
    """The Rows of files of results, or of --json; a run that several files have is called FILE/RUN."""
    stems = [Path(path).stem for path in paths]
    rows_of_file = {}
    for path, stem in zip(paths, stems, strict=True):
        name = path if stems.count(stem) > 1 else stem
        is_json = read_text(path).startswith("[")
        rows_of_file[name] = from_rows(read_rows(path)) if is_json else from_results(path)
    files_with = Counter(run for rows in rows_of_file.values() for run in {row.run for row in rows})
    return [row._replace(run=f"{name}/{row.run}") if files_with[row.run] > 1 else row
            for name, rows in rows_of_file.items() for row in rows]

def from_results(path):
    """The Rows of a file of results, in the order of the study's runs."""
    results = read_results(path)
    chosen = results.study.get("chosen", {})
    rows = []
    for (run, seed, measure), measurement in results.measured.items():
        training = results.runs.get((run, seed))
        if training is None or training["sha256"][:16] != measurement["sha256"]:
            continue                                                   # the run was trained again since
        for stored in measurement["rows"]:
            targets = results.facts.get(stored.get("targets"), {})
            counts = np.array(targets.get("counts", []))
            value, unit_values = read_values(stored, counts)
            details = stored | targets | describe_training(training, results.facts)
            rows.append(Row(run, stored.get("how", ""), seed, measure, stored["protocol"], stored["length"],
                            training["context"], value, unit_values, counts, stored.get("targets", ""), details,
                            seed in chosen.get(run, ())))
    order = results.study.get("runs", [])
    return sorted(rows, key=lambda row: order.index(row.run) if row.run in order else len(order))

def read_values(stored, counts):
    """(value, values of the units) of a row in a file of results; (None, None) where the loss is not finite."""
    if stored["protocol"] == "task":
        return stored["accuracy"], None
    if stored["losses"] is None:
        return None, None
    unit_values = np.array(stored["losses"])
    if "without" in stored:                                            # a probe: the gain
        unit_values = np.array(stored["without"]) - unit_values
    return float(unit_values @ counts / counts.sum()), unit_values

def describe_training(training, facts):
    """What Row.details has of a training: tokens a parameter, the text, and hashes of the code."""
    details = {"code": training.get("code")}
    if "parameters" in training:                                       # old lines of tasks have none
        details["budget"] = training["tokens"] / training["parameters"]
        details["source"] = facts[training["data"]]["source"]
    return details

def from_rows(rows):
    """The Rows of what eval.py and lab.measure write: runs NAME-s0, NAME-s1, .. are seeds of one."""
    found = []
    for row in rows:
        run, seed = re.fullmatch(r"(.*?)(?:-s(\d+))?", row["run"].removeprefix("runs/").rstrip("/")).groups()
        protocol = row["protocol"]
        measure = "same-targets" if protocol == "sliding" else protocol          # which stands beside it in one table
        value, unit_values, counts = row.get("accuracy", row["loss"]), row.get("unit_losses"), row.get("unit_targets")
        if unit_values is not None:
            unit_values = np.array(unit_values)
            counts = np.array(counts)
            if "unit_losses_without" in row:                           # a probe
                unit_values = np.array(row["unit_losses_without"]) - unit_values
                value = row["gain"]
        targets = row.get("targets_sha256", "")[:16] or f"{row['data']}, {row.get('n_targets')}"
        found.append(Row(run, row["how"], int(seed or 0), measure, protocol, row["length"], row["trained_length"],
                         value, unit_values, counts, targets, row))
    return found

# ---- from rows to differences ----------------------------------------------------------------------------------------
# A line of a table is a run and its condition, and a place is (protocol, multiple of the trained length). Where a line
# and a place cross there is a cell, {seed: Row}.

def group_rows(rows):
    """{label of a line: {place: cell}}."""
    lines = {}
    for row in rows:
        cells = lines.setdefault(row.label, {})
        cells.setdefault((row.protocol, row.multiple), {})[row.seed] = row
    return lines

def pair_seeds(cell, other):
    """[(Row, Row)] of the seeds that two cells share; [] unless all have a value, and the same targets."""
    pairs = [(cell[seed], other[seed]) for seed in sorted(cell.keys() & other.keys())]
    comparable = all(None not in (a.value, b.value) and a.targets == b.targets for a, b in pairs)
    return pairs if comparable else []

def compare_places(lines, first, last):
    """{label: Difference of the line's values at the place `last` from those at `first`}."""
    pairs_of = {label: pair_seeds(cells.get(last, {}), cells.get(first, {})) for label, cells in lines.items()}
    pooled = pool_deviations({label: [a.value - b.value for a, b in pairs if not a.chosen]
                              for label, pairs in pairs_of.items()})
    return {label: estimate_difference(pairs, pooled if label in pooled.methods else None, both_vary=False)
            for label, pairs in pairs_of.items() if pairs}

def compare_lines(lines, place, reference):
    """{label: Difference of the line's values at a place from those of the line `reference`}."""
    pooled = pool_deviations({label: [row.value for row in cells.get(place, {}).values()
                                      if row.value is not None and not row.chosen]
                              for label, cells in lines.items()})
    differences = {}
    for label, cells in lines.items():
        pairs = pair_seeds(cells.get(place, {}), lines[reference].get(place, {}))
        if label != reference and pairs:
            both_pooled = label in pooled.methods and reference in pooled.methods
            differences[label] = estimate_difference(pairs, pooled if both_pooled else None, both_vary=True)
    return differences

def find_significant_lines(differences, changes, reference, margin):
    """{(place, label)} of {place: {label: Difference}} from a reference that are significant, by one correction.

    changes: {label: Difference of the last place from the first}. Where a line and the reference are flat, which is a
    change within the margin, all places are one test, with the largest p-value.
    """
    def is_flat(label):
        return label in changes and abs(changes[label].mean) <= margin

    p_values = {}                                                      # {(label, place, or None for all): p}
    for label in dict.fromkeys(label for of_place in differences.values() for label in of_place):
        tests = {place: of_place[label].p_value() for place, of_place in differences.items() if label in of_place}
        if is_flat(label) and is_flat(reference):
            p_values[label, None] = max(tests.values())
        else:
            p_values |= {(label, place): p for place, p in tests.items()}
    significant = find_significant(p_values)
    return {(place, label) for place, of_place in differences.items() for label in of_place
            if (label, place) in significant or (label, None) in significant}

# ---- the text of cells -----------------------------------------------------------------------------------------------

def format_multiple(multiple):
    return f"{multiple:g}x"

def format_difference(difference, is_significant, margin):
    """"-0.088 ±0.029 *" of a Difference, or its seeds if it has no interval."""
    if not difference.errors:
        digits = 3 if abs(difference.mean) < 0.1 else 2
        return " ".join(f"{seed:+.{digits}f}" for seed in difference.seeds)
    half = difference.half_width()
    text = f"{difference.mean:+.3f} ±{half:.3f}"
    if is_significant:
        return f"{text} *"
    is_equal = abs(difference.mean) + half <= margin and len(difference.seeds) > 1
    return f"{text} =" if is_equal else text

def format_values(cell, each_seed):
    """The mean over the seeds of a cell, or each of them; "-" where there is none, as past the last position."""
    values = [row.value for _, row in sorted(cell.items())]
    if None in values:
        has_targets = any(row.details.get("n_targets") for row in cell.values())
        return "not finite" if has_targets else "-"
    if not values:
        return ""
    return " ".join(f"{value:.3f}" for value in values) if each_seed else f"{np.mean(values):.3f}"

def format_accuracies(cells, multiples, each_seed):
    """"100, 66 (2/3)": means over seeds in % at some lengths, and how many learned the task, unless all did.

    cells: {multiple: {seed: Row}}.
    """
    values = [[row.value for _, row in sorted(cells[multiple].items())] for multiple in multiples if multiple in cells]
    if not values:
        return ""
    if each_seed:
        return "; ".join(" ".join(f"{100 * value:.1f}" for value in of_seeds) for of_seeds in values)
    means = ", ".join(f"{100 * np.mean(of_seeds):.0f}" for of_seeds in values)
    shortest = cells[min(cells)]
    learned = sum(row.value >= LEARNED for row in shortest.values())
    seeds = len(values[0])
    return f"{means} ({learned}/{seeds})" if learned < seeds else means

# ---- the layout of tables --------------------------------------------------------------------------------------------

def make_loss_table(rows, args):
    """(heads, lines of cells) of the Rows of one measure: values at each place, and differences to the right of them.

    Differences are the last place's from the first, and with --than those from another line at each place. `sliding`,
    which is measured beside another protocol, stands in columns of its own and has no differences.
    """
    lines = group_rows(rows)
    protocol = next((row.protocol for row in rows if row.protocol != "sliding"), rows[0].protocol)
    all_places = sorted({place for cells in lines.values() for place in cells})
    places = [place for place in all_places if place[0] == protocol and (args.at is None or place[1] in args.at)]
    if not places:
        raise InputError(f"--at has no place of {rows[0].measure}")
    beside = [place for place in all_places if place[0] != protocol and args.at is None]
    first, last = places[0], places[-1]

    changes = compare_places(lines, first, last) if len(places) > 1 else {}
    columns = {}                                                       # {head: {label: text}} of the differences
    if len(places) > 1 and not is_gain(rows):
        significant = find_significant({label: change.p_value() for label, change in changes.items()})
        columns[f"{format_multiple(last[1])} - {format_multiple(first[1])}"] = {
            label: format_difference(change, label in significant, args.margin) for label, change in changes.items()}
    if args.than in lines:
        differences = {place: compare_lines(lines, place, args.than) for place in places}
        significant = find_significant_lines(differences, changes, args.than, args.margin)
        for place in places:
            columns[f"{format_multiple(place[1])} - {args.than}'s"] = {
                label: format_difference(difference, (place, label) in significant, args.margin)
                for label, difference in differences[place].items()}

    heads = ["run", *(format_multiple(multiple) for _, multiple in places),
             *(f"{protocol} {format_multiple(multiple)}" for protocol, multiple in beside), *columns]
    body = []
    for label, cells in lines.items():
        has_chosen = any(row.chosen for cell in cells.values() for row in cell.values())
        name = label + (" +" if has_chosen else "") + describe_unfinished(rows, label)
        values = [format_values(cells.get(place, {}), args.seeds) for place in (*places, *beside)]
        body.append([name, *values, *(column.get(label, "") for column in columns.values())])
    return heads, body

def make_task_table(rows, args):
    """(heads, lines of cells) of accuracies in %, of runs that are called TASK.METHOD: a line a task."""
    multiples = sorted({row.multiple for row in rows if args.at is None or row.multiple in args.at})
    cells_of = {}                                                      # {task: {method: {multiple: {seed: Row}}}}
    trained_length = {}                                                # {task: tokens}
    guesses = {}                                                       # {task: {multiple: accuracy of the best guess}}
    rows_of_method = {}
    for row in rows:
        task, _, method = row.run.rpartition(".")
        task = task or row.measure
        cells = cells_of.setdefault(task, {}).setdefault(method, {})
        cells.setdefault(row.multiple, {})[row.seed] = row
        trained_length[task] = row.context
        guesses.setdefault(task, {})[row.multiple] = row.details["guess"]
        rows_of_method.setdefault(method, []).append(row._replace(run=method))
    methods = list(dict.fromkeys(method for of_task in cells_of.values() for method in of_task))
    heads = [method + describe_unfinished(rows_of_method[method], method) for method in methods]
    body = []
    for task, of_task in cells_of.items():
        guess = ", ".join(f"{100 * guesses[task][multiple]:.0f}" for multiple in multiples if multiple in guesses[task])
        values = [format_accuracies(of_task.get(method, {}), multiples, args.seeds) for method in methods]
        body.append([task, str(trained_length[task]), *values, guess])
    return ["task", "trained", *heads, "best guess"], body

def print_table(heads, body):
    """Print a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    for cells in (heads, ["-" * width for width in widths], *body):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        print(f"| {' | '.join(padded)} |")

def print_tables(rows, args=None):
    """Print a table for each measure of some Rows, and what is to be known of it; args: those of this script."""
    args = args or command_line().parse_args(["-"])
    for measure in dict.fromkeys(row.measure for row in rows):
        of_measure = [row for row in rows if row.measure == measure]
        print(f"\n{measure}: {describe_measure(of_measure)}\n")
        is_task = of_measure[0].protocol == "task"
        heads, body = (make_task_table if is_task else make_loss_table)(of_measure, args)
        print_table(heads, body)
        print_distances(of_measure)
        if any("±" in cell for line in body for cell in line):
            has_one_seed = len({row.seed for row in of_measure}) == 1
            print("\n" + (LEGEND_OF_ONE_SEED if has_one_seed else LEGEND.format(args.margin)))
    print_different_code(rows)

def describe_measure(rows):
    """What was scored, in a line."""
    unit = "accuracy, %" if rows[0].protocol == "task" else "gain, nats" if is_gain(rows) else "loss, nats a token"
    scored = [row for row in rows if row.value is not None]
    texts = list(dict.fromkeys(row.details.get("data") or row.details.get("text", "") for row in scored))
    sizes = sorted({f"{row.unit_counts.sum():,} targets in {len(row.unit_values)} units"
                    for row in scored if row.unit_values is not None})
    parts = [unit, *(" or ".join(words) for words in (texts, sizes) if len(words) < 3)]
    return "; ".join(filter(None, parts))

def print_distances(rows):
    """Print losses by the distance of the copy that a target repeats, in rows that have them."""
    losses = {}                                                        # {label: {(bin, multiple): losses of seeds}}
    for row in rows:
        for bin_name, (loss, _) in row.details.get("by_distance", {}).items():
            losses.setdefault(row.label, {}).setdefault((bin_name, row.multiple), []).append(loss)
    if not losses:
        return
    bins = list(dict.fromkeys(bin_name for of_line in losses.values() for bin_name, _ in of_line))
    multiples = [multiple for of_line in losses.values() for _, multiple in of_line]
    first, last = min(multiples), max(multiples)
    body = []
    for label, of_line in losses.items():
        cells = [", ".join(f"{np.mean(of_line[bin_name, multiple]):.3f}" for multiple in (first, last)
                           if (bin_name, multiple) in of_line) for bin_name in bins]
        body.append([label, *cells])
    print(f"\n{format_multiple(first)} and {format_multiple(last)}, by the distance of the copy in trained lengths\n")
    print_table(["run", *bins], body)

def print_different_code(rows):
    """Name the runs whose seeds were trained with different code, as far as that was stored."""
    codes = {}                                                         # {run: {seed: {file: hash}}}
    for row in rows:
        if row.details.get("code"):
            codes.setdefault(row.run, {})[row.seed] = row.details["code"]
    for run, code_of_seed in codes.items():
        files = sorted(set().union(*code_of_seed.values()))
        different = [file for file in files if len({code.get(file) for code in code_of_seed.values()}) > 1]
        if different:
            print(f"\n{run}: its seeds were trained with different code: {', '.join(different)}")

# ---- the command line ------------------------------------------------------------------------------------------------

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

def select_rows(rows, field, patterns, flag):
    """The Rows whose field matches one of the patterns, in the order of these; InputError for one that has no row."""
    names = dict.fromkeys(getattr(row, field) for row in rows)
    order = {}                                                         # {name: the first pattern that it matches}
    for i, pattern in enumerate(patterns):
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise InputError(f"{flag} has {pattern}, and there are {', '.join(names)}")
        for name in matching:
            order.setdefault(name, i)
    return sorted((row for row in rows if getattr(row, field) in order), key=lambda row: order[getattr(row, field)])

def main(argv=None):
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = read_files(args.files)
        if not rows:
            raise InputError(f"{' and '.join(args.files)}: there is no measurement in it yet")
        rows = select_rows(rows, "measure", args.measures or ["*"], "--measures")
        rows = select_rows(rows, "run", args.runs or ["*"], "--runs")
        labels = dict.fromkeys(row.label for row in rows)
        if args.than is not None and args.than not in labels:
            raise InputError(f"--than must be one of {', '.join(labels)}, got {args.than}")
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
