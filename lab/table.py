"""The tables of measured losses: means over seeds, and differences with intervals.

    python -m lab.table studies/best.jsonl --measures spread --at 1x,16x --than expe-on-k
    python -m lab.table studies/encodings.jsonl --runs "expe*" --seeds          the loss of each seed
    python -m lab.table mine.json other.json --than other                       what lab.measure or eval.py wrote
    python -m lab.table studies/best.jsonl --measures spread --plot best.png --title "FoX and ALiBi stay flat"

A difference such as "+0.084 ±0.041 * (+0.091 +0.070 +0.091)" is a mean, half of its 95% interval for other seeds and
other documents, and the difference of each seed. The half is sqrt(h1^2 + h2^2) of two half widths:

    h1 = t(n - 1) s / sqrt(n)     over n seeds, three or more; s: the standard deviation of their differences. If the
                                  deviations of all methods of the study lie within a factor of 2 of the pooled one,
                                  h1 has that and its degrees of freedom (and sqrt(1/n + 1/n) for two methods)
    h2 = t(m - 1) d / sqrt(m)     over m documents; d: the standard deviation of the difference, weighted by targets

One seed has h2 alone, and two seeds have no interval.

    *   significant at 5%, after Holm's correction over all differences from --than in the table; two lengths of a
        method that is flat are one test; the changes of all methods are corrected apart. It may be within the margin
    =   equal within the margin: the interval lies inside of it; neither: not separated here

Seeds that chose a run's values are behind "chose:" and in no mean, interval or test. Of tasks there are accuracies in
%, means over all other seeds, and how many seeds learned: 95% or more at the trained length.
"""

import contextlib
import fnmatch
import math
import re
import textwrap
from argparse import ArgumentTypeError
from collections import Counter
from pathlib import Path

from cli import PICTURES, CommandLine, listed, new_file, number

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from files import read_text
from lab.results import LEARNED, Row, describe_unfinished, is_gain, read_results, read_rows
from lab.statistics import MIN_SEEDS, estimate_difference, find_significant, pool_deviations
from settings import InputError

MARGIN = 0.01                            # nats: a difference is equal to 0 if its interval lies within it
WIDTH = 100                              # columns of a line; a wider table is printed in parts
LEGEND_OF_ONE_SEED = "± half of a 95% interval over documents alone: it says nothing of another seed"
LEGEND = """± half of a 95% interval over seeds and documents (of one seed: documents alone), then each seed;
* significant after Holm's correction; = equal within {:g}; neither: not separated."""

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
    return [row._replace(run=f"{name}/{row.run}" if files_with[row.run] > 1 else row.run, file=name)
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
        details["parameters"] = training["parameters"]
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

def find_pools(values, lines):
    """{label: PooledDeviation} of the lines of those files whose lines vary alike.

    values: {label: values of seeds}; lines: {label: {place: cell}}, of whole files.
    """
    values_of_file = {}
    for label, seeds in values.items():
        first_cell = next(iter(lines[label].values()))
        file = next(iter(first_cell.values())).file
        values_of_file.setdefault(file, {})[label] = seeds
    pools = map(pool_deviations, values_of_file.values())
    return {label: pooled for pooled in pools if pooled is not None for label in pooled.methods}

def compare_places(lines, study, first, last):
    """{label: Difference of the line's values at the place `last` from those at `first`}.

    study: the lines of the whole files, whose deviations may be pooled.
    """
    pairs_of = {label: pair_seeds(cells.get(last, {}), cells.get(first, {})) for label, cells in study.items()}
    pools = find_pools({label: [a.value - b.value for a, b in pairs if not a.chosen]
                        for label, pairs in pairs_of.items()}, study)
    return {label: estimate_difference(pairs_of[label], pools.get(label), both_vary=False)
            for label in lines if pairs_of[label]}

def compare_lines(lines, study, place, reference):
    """{label: Difference of the line's values at a place from those of the line `reference`}.

    study: the lines of the whole files, whose deviations may be pooled.
    """
    pools = find_pools({label: [row.value for row in cells.get(place, {}).values()
                                if row.value is not None and not row.chosen]
                        for label, cells in study.items()}, study)
    differences = {}
    for label, cells in lines.items():
        pairs = pair_seeds(cells.get(place, {}), lines[reference].get(place, {}))
        if label != reference and pairs:
            share_a_pool = pools.get(label) is pools.get(reference)
            differences[label] = estimate_difference(pairs, pools.get(label) if share_a_pool else None, both_vary=True)
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
    """"+0.084 ±0.041 * (+0.091 +0.070 +0.091)" of a Difference; one seed, which is the mean, is not repeated."""
    words = []
    if difference.seeds:
        words.append(f"{difference.mean:+.3f}")
    if difference.errors:
        half = difference.half_width()
        words.append(f"±{half:.3f}")
        if is_significant:
            words.append("*")
        elif difference.over_seeds is not None and abs(difference.mean) + half <= margin:
            words.append("=")
    groups = []
    if len(difference.seeds) > 1:
        groups.append(" ".join(f"{seed:+.3f}" for seed in difference.seeds))
    if difference.chosen:
        groups.append("chose: " + " ".join(f"{seed:+.3f}" for seed in difference.chosen))
    if groups:
        words.append(f"({'; '.join(groups)})")
    return " ".join(words)

def format_mean(rows, each_seed=False, value_of=lambda row: row.value):
    """"2.715 (chose: 2.735)": the mean over Rows of seeds or each of them, and apart from it the seeds that chose."""
    counted = [value_of(row) for row in rows if not row.chosen]
    chosen = [value_of(row) for row in rows if row.chosen]
    words = []
    if counted:
        words += [f"{value:.3f}" for value in counted] if each_seed else [f"{np.mean(counted):.3f}"]
    if chosen:
        words.append(f"(chose: {' '.join(f'{value:.3f}' for value in chosen)})")
    return " ".join(words)

def format_values(cell, each_seed):
    """The mean over the seeds of a cell, or each of them; "-" where there is none, as past the last position."""
    rows = [row for _, row in sorted(cell.items())]
    if any(row.value is None for row in rows):
        return "not finite" if any(row.details.get("n_targets") for row in rows) else "-"
    return format_mean(rows, each_seed)

def format_accuracies(cells, multiples, each_seed):
    """"100, 66 (2/3)": means over seeds in % at some lengths, and how many learned the task, unless all did.

    cells: {multiple: {seed: Row}}. Seeds that chose values are apart.
    """
    def format_seeds(is_chosen):
        rows_at = {multiple: [row for _, row in sorted(cell.items()) if row.chosen == is_chosen]
                   for multiple, cell in cells.items()}
        values = [[row.value for row in rows_at[multiple]] for multiple in multiples if rows_at.get(multiple)]
        if not values:
            return ""
        if each_seed:
            return "; ".join(" ".join(f"{100 * value:.1f}" for value in of_seeds) for of_seeds in values)
        means = ", ".join(f"{100 * np.mean(of_seeds):.0f}" for of_seeds in values)
        learned = sum(row.value >= LEARNED for row in rows_at[min(cells)])
        seeds = len(values[0])
        return f"{means} ({learned}/{seeds})" if learned < seeds else means

    chosen = format_seeds(is_chosen=True)
    return " ".join(filter(None, (format_seeds(is_chosen=False), chosen and f"(chose: {chosen})")))

def describe_deviations(columns):
    """Which deviation over seeds the intervals of a table have: {head: {label: Difference}} as sentences."""
    heads_of = {}                                                      # {sentence: heads that it is true of}
    for head, differences in columns.items():
        with_interval = {label: one for label, one in differences.items() if one.over_seeds is not None}
        own = [label for label, one in with_interval.items() if one.pooled is None]
        pools = dict.fromkeys(one.pooled for one in with_interval.values() if one.pooled is not None)
        sentences = [f"pooled over {len(pooled.methods)} lines ({pooled.sd:.3f}, {pooled.freedom} degrees of freedom)"
                     for pooled in pools]
        if own:
            sentences.append("each line's own" + (f" ({', '.join(own)})" if pools else ""))
        if sentences:
            heads_of.setdefault(" or ".join(sentences), []).append(head)
    return "; ".join(f"{sentence} in {', '.join(heads)}" for sentence, heads in heads_of.items())

# ---- the layout of tables --------------------------------------------------------------------------------------------

def make_loss_table(rows, study_rows, args):
    """(heads, lines of cells, words below) of the Rows of one measure: values at each place, then differences.

    Differences are the last place's from the first, and with --than those from another line at each place. `sliding`,
    which is measured beside another protocol, stands in columns of its own and has no differences.
    """
    lines = group_rows(rows)
    study = group_rows(study_rows)
    protocol = next((row.protocol for row in rows if row.protocol != "sliding"), rows[0].protocol)
    all_places = sorted({place for cells in lines.values() for place in cells})
    places = [place for place in all_places if place[0] == protocol and (args.at is None or place[1] in args.at)]
    if not places:
        raise InputError(f"--at has no place of {rows[0].measure}")
    beside = [place for place in all_places if place[0] != protocol and args.at is None]
    first, last = places[0], places[-1]

    columns = {}                                                       # {head: {label: Difference}}
    significant = set()                                                # {(head, label)}
    changes = compare_places(lines, study, first, last) if len(places) > 1 else {}
    if len(places) > 1 and not is_gain(rows):
        head = f"{format_multiple(last[1])} - {format_multiple(first[1])}"
        columns[head] = changes
        p_values = {(head, label): change.p_value() for label, change in changes.items()}
        significant |= find_significant(p_values)
    if args.than in lines:
        head_of = {place: f"{format_multiple(place[1])} - {args.than}'s" for place in places}
        differences = {place: compare_lines(lines, study, place, args.than) for place in places}
        columns |= {head_of[place]: differences[place] for place in places}
        significant |= {(head_of[place], label) for place, label in
                        find_significant_lines(differences, changes, args.than, args.margin)}

    heads = ["run", *(format_multiple(multiple) for _, multiple in places),
             *(f"{protocol} {format_multiple(multiple)}" for protocol, multiple in beside), *columns]
    body = []
    for label, cells in lines.items():
        values = [format_values(cells.get(place, {}), args.seeds) for place in (*places, *beside)]
        texts = [format_difference(column[label], (head, label) in significant, args.margin) if label in column else ""
                 for head, column in columns.items()]
        body.append([label + describe_unfinished(rows, label), *values, *texts])
    return heads, body, describe_intervals(rows, columns, args.margin)

def describe_intervals(rows, columns, margin):
    """What stands below a table with the columns {head: {label: Difference}}, of Rows of one measure."""
    differences = [difference for column in columns.values() for difference in column.values()]
    parts = []
    if any(difference.errors for difference in differences):
        has_one_seed = len({row.seed for row in rows}) == 1
        parts.append(LEGEND_OF_ONE_SEED if has_one_seed else LEGEND.format(margin))
    if deviations := describe_deviations(columns):
        parts.append(textwrap.fill(f"Deviation over seeds: {deviations}.", WIDTH, break_on_hyphens=False))
    if any(len(difference.seeds) in range(2, MIN_SEEDS) for difference in differences):
        parts.append("Two seeds have no interval.")
    if any(row.chosen for row in rows):
        parts.append("chose: seeds that chose the run's values; they are in no mean, interval or test.")
    return "\n".join(parts)

def make_task_table(rows, args):
    """(heads, lines of cells, words below) of accuracies in %, of runs that are called TASK.METHOD: a line a task."""
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
    below = "chose: seeds that chose the run's values; they are in no mean." if any(row.chosen for row in rows) else ""
    return ["task", "trained", *heads, "best guess"], body, below

def print_table(heads, body, width=math.inf):
    """Print a table in Markdown, in parts of at most `width` columns that each begin with the first column."""
    columns = list(zip(heads, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    parts = [[0]]                                                      # numbers of columns
    for i in range(1, len(columns)):
        needed = sum(widths[j] + 3 for j in parts[-1]) + widths[i] + 4
        if needed > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(i)
    for part in parts:
        if part is not parts[0]:
            print()
        for cells in (heads, ["-" * width for width in widths], *body):
            print(f"| {' | '.join(cells[i].ljust(widths[i]) for i in part)} |")

def print_tables(rows, args=None, study_rows=None):
    """Print a table for each measure of some Rows, and what is to be known of it.

    args: those of this script; study_rows: the Rows of the whole files, from which `rows` were selected.
    """
    args = args or command_line().parse_args(["-"])
    for measure in dict.fromkeys(row.measure for row in rows):
        of_measure = [row for row in rows if row.measure == measure]
        study_of_measure = [row for row in study_rows or rows if row.measure == measure]
        print(f"\n{measure}: {describe_measure(of_measure)}\n")
        if of_measure[0].protocol == "task":
            heads, body, below = make_task_table(of_measure, args)
        else:
            heads, body, below = make_loss_table(of_measure, study_of_measure, args)
        print_table(heads, body, WIDTH)
        print_distances(of_measure)
        if below:
            print(f"\n{below}")
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
    rows_of = {}                                                       # {label: {(bin, multiple): Rows of seeds}}
    for row in rows:
        for bin_name in row.details.get("by_distance", {}):
            rows_of.setdefault(row.label, {}).setdefault((bin_name, row.multiple), []).append(row)
    if not rows_of:
        return
    bins = list(dict.fromkeys(bin_name for of_line in rows_of.values() for bin_name, _ in of_line))
    multiples = [multiple for of_line in rows_of.values() for _, multiple in of_line]
    first, last = min(multiples), max(multiples)

    def format_bin(of_line, bin_name):
        def loss_of(row):
            return row.details["by_distance"][bin_name][0]             # (loss, targets)
        return ", ".join(format_mean(of_line[bin_name, multiple], value_of=loss_of) for multiple in (first, last)
                         if (bin_name, multiple) in of_line)

    body = [[label, *(format_bin(of_line, bin_name) for bin_name in bins)] for label, of_line in rows_of.items()]
    print(f"\n{format_multiple(first)} and {format_multiple(last)}, by the distance of the copy in trained lengths\n")
    print_table(["run", *bins], body, WIDTH)

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
    add("--plot", type=new_file(*PICTURES), metavar="FILE", help="draw measures of one protocol: .png, .svg or .pdf")
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
        study_rows = select_rows(rows, "measure", args.measures or ["*"], "--measures")
        rows = select_rows(study_rows, "run", args.runs or ["*"], "--runs")
        labels = dict.fromkeys(row.label for row in rows)
        if args.than is not None and args.than not in labels:
            raise InputError(f"--than must be one of {', '.join(labels)}, got {args.than}")
        if not args.margin >= 0:
            raise InputError(f"--margin must be at least 0, got {args.margin}")
        protocols = {row.protocol for row in rows} - {"sliding"}        # same-targets has it beside its own
        if args.plot and len(protocols) > 1:
            raise InputError("--plot draws one protocol: name measures of it with --measures")
        print_tables(rows, args, study_rows)
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
