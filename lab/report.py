"""The pages and pictures of results/, one page a grid, from its JSON files alone."""

import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import read_text, write_text
from config import InputError
from eval import MULTIPLES
from lab import pictures
from lab.files import check_shape, read_json
from lab.grids import DATA, EVALUATIONS, GRIDS, LOSSES, MULTIPLIERS, PROBES, VARIANTS, Grid, flags_of, place_of
from lab.measures import MEASURES, interval_of_seeds
from lab.pictures import Curve
from studies import task_grid, task_pages
from studies import tuning as tuned

NOTES = "\n## Notes\n"
HEAD = """# Results

One page a grid, made with `python -m lab.reproduce report` from the JSON files beside the pages, one file for each run
and evaluation; only the notes below are written by hand. Losses are in nats a token, as mean ± standard deviation over
seeds. 1x is the trained length. `nonoverlap` is the paper's protocol, and `same-targets` scores the same last tokens of
each document with more and more context. `16x - sliding` compares with a sliding window of 1x. 95% intervals, in
brackets, are for other seeds and other documents; [evidence.md](../docs/evidence.md) says how they are made.
"""
NUMBER = int | float
RUN = {"variant": str, "seed": int, "command": str, "weights": str, "dtype": str, "parameters": int, "tokens": int,
       "trained_length": int, "seconds": NUMBER,
       "data": {"source": str, "vocab": int, "splits": {"train": {"tokens": int}}},
       "provenance": {"git": str | None, "device": str, "threads": int, "machine": str,
                      "versions": {"python": str, "torch": str}}}
ROW = {"protocol": str, "how": str, "length": int, "trained_length": int, "n_documents": int, "loss": NUMBER | None}
SCORED = {"targets_sha256": str, "unit_losses": [NUMBER], "unit_targets": [int]}
BY_POSITION = {"block": int, "by_position": [NUMBER]}
WITHOUT = {"unit_losses_without": [NUMBER]}
SHOWN = 9                                # trials of a method in a figure: all methods have as many
TIMES = [f"{multiple}x" for multiple in MULTIPLES]
FURTHER = {                              # protocols whose tables some grids have too, and what stands above these
    "spread": "Targets at 16 places of each document, with exactly 1x of context and more:",
    "far-repeats": "Ends of repetitions from further back than 1x:"}


# ---- the files, and what they say together ---------------------------------------------------------------------------

class Line(NamedTuple):
    """What the seeds of one variant with one way of scaling say together."""

    variant: str
    how: str
    context: int
    rows: dict                           # (protocol or probe, multiple of the trained length): its rows, one a seed

    @property
    def name(self):
        return pictures.label(pictures.name(self.variant), self.how)

    @property
    def colour(self):
        return pictures.colour(self.variant)

    @property
    def label(self):
        return f"{self.variant} {self.how}".strip()

    def losses(self, protocol):
        """(multiples, seeds), nan where there is none."""
        values = [[row["loss"] for row in self.rows[protocol, multiple]] for multiple in MULTIPLES]
        return np.array(values, dtype=np.float64)

def collect(folder):
    """{(variant, what): {seed: what its file says}} of results/<preset>/; what: one of EVALUATIONS, or "run"."""
    files = {}
    for path in sorted(folder.glob("*.json")):
        match = re.fullmatch(r"(.+)-s([0-9]+)\.(.+)\.json", path.name)
        if match is None or match[1] not in VARIANTS or match[3] not in (*EVALUATIONS, "run"):
            continue
        variant, seed, what = match.groups()
        try:
            said = read_json(path, RUN if what == "run" else [ROW])
            if what != "run":
                check_rows(path, said, EVALUATIONS[what].split())
        except InputError as error:
            raise InputError(f"{error}: delete it, and run its grid again") from None
        files.setdefault((variant, what), {})[int(seed)] = said
    return files

def check_rows(path, rows, flags):
    """InputError unless the rows of an evaluation with these flags are all there, and their losses too."""
    more = BY_POSITION if "--per-position" in flags else {}
    for row in rows:
        if row["trained_length"] < 1:
            raise InputError(f"{path}: trained_length must be at least 1, got {row['trained_length']}")
        if row["loss"] is not None:
            check_shape(row, SCORED | more | (WITHOUT if row["protocol"] in PROBES else {}), path)
            sizes = {len(row[name]) for name in ("unit_targets", "unit_losses", "unit_losses_without") if name in row}
            if len(sizes) != 1 or 0 in sizes:
                raise InputError(f"{path} has another number of losses than of counts of targets")
    present = {(row["how"], row["protocol"], row["length"] / row["trained_length"]) for row in rows}
    multiples = MULTIPLES
    if "--lengths" in flags and rows:
        multiples = [int(n) / rows[0]["trained_length"] for n in flags[flags.index("--lengths") + 1].split(",")]
    for how, protocol in {(how, protocol) for how, protocol, _ in present if protocol != "sliding"} or {("", "any")}:
        beside = [("sliding", 1)] if protocol == "same-targets" else []
        for name, multiple in [(protocol, multiple) for multiple in multiples] + beside:
            if (how, name, multiple) not in present:
                raise InputError(f"{path} lacks the row of {name} at {multiple}x")

def finished(grid, files):
    """The seeds for which a grid has all its runs and evaluations."""
    wanted = [(variant, what) for variant, names in grid.evaluations.items() for what in ("run", *names)]
    return sorted(set.intersection(*(set(files.get(at, {})) for at in wanted)))

def check_alike(folder, grid, files, seeds):
    """InputError if a file of a grid has other rows than another seed's, or rows that scored other targets."""
    scored = {}
    for variant, names in grid.evaluations.items():
        for name, seed in itertools.product(names, seeds):
            file = folder / f"{variant}-s{seed}.{name}.json"
            rows = files[variant, name][seed]
            for row in (row for row in rows if row["loss"] is not None):
                what = row["targets_sha256"], row["n_documents"], len(row["unit_losses"])
                other, right = scored.setdefault((row["protocol"], row["length"]), (file, what))
                if what != right:
                    raise InputError(f"{file} was scored on other documents than {other}: delete the one that is "
                                     "wrong, and run its grid again, with one --max-docs or none")
            kinds = [(row["how"], row["protocol"], row["length"]) for row in rows]
            if kinds != scored.setdefault((variant, name), kinds):
                raise InputError(f"{file} has other rows than seed {seeds[0]}: delete it, and run its grid again")

def lines_of(grid, files, seeds):
    """The Lines of a grid, from all of its evaluations."""
    lines = {}
    for variant, names in grid.evaluations.items():
        for row in itertools.chain(*(files[variant, name][seed] for name in names for seed in seeds)):
            context = row["trained_length"]
            line = lines.setdefault((variant, row["how"]), Line(variant, row["how"], context, {}))
            line.rows.setdefault((row["protocol"], row["length"] / context), []).append(row)
    return list(lines.values())


# ---- tables ----------------------------------------------------------------------------------------------------------

def table(heads, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))

def mean_sd(values, form=".3f"):
    mean, sd = pictures.over_seeds(values)
    return "-" if np.isnan(mean) else f"{mean:{form}}" + f" ± {sd:.3f}" * (len(values) > 1)

def paired(rows, others, key="unit_losses", other_key="unit_losses"):
    """The mean difference between two rows of each seed, with its interval if it has one."""
    if not rows or not others or any(row["loss"] is None for row in rows + others):
        return "-"
    differences = [np.subtract(x[key], y[other_key]) for x, y in zip(rows, others, strict=True)]
    mean, low, high = interval_of_seeds(differences, rows[0]["unit_targets"])
    return f"{mean:+.3f}" + f" ({low:+.3f}, {high:+.3f})" * (not np.isnan(low))

def losses_table(grid, preset, lines, than):
    """Ours by the paper's protocol, with their differences from one of these lines, beside the paper's numbers.

    What is comparable in another model is the rise.
    """
    end = MULTIPLES[max(map(len, grid.paper.values()), default=len(MULTIPLES)) - 1]
    ends = [("nonoverlap", multiple) for multiple in (1, MULTIPLES[-1])]
    heads = ["run", "positions", *TIMES, f"rise to {end}x", *(f"{multiple}x - {than}'s" for _, multiple in ends)]
    other = {line.label: line for line in lines}[than]
    if grid.paper:
        heads += [f"paper, 1x to {end}x", "paper's rise", "our rise - paper's"]
        heads += ["our losses - paper's"] if preset in grid.of else []
    rows = []
    for line in lines:
        losses = line.losses("nonoverlap")
        rises = losses[MULTIPLES.index(end)] - losses[0]
        cells = [line.variant, line.how, *map(mean_sd, losses), mean_sd(rises, "+.3f")]
        cells += ["" if line is other else paired(line.rows[at], other.rows[at]) for at in ends]
        if paper := grid.paper.get((line.variant, line.how)):
            rise = paper[-1] - paper[0]
            over = losses[: len(paper)].mean(1) - paper
            cells += [" ".join(f"{loss:.2f}" for loss in paper), f"{rise:+.2f}", mean_sd([rises.mean() - rise], "+.2f")]
            cells += [" ".join(mean_sd([value], "+.2f") for value in over)] if preset in grid.of else []
        rows.append(cells + [""] * (len(heads) - len(cells)))
    return table(heads, rows)

def same_targets_table(lines, than, protocol="same-targets"):
    """Losses with their differences, also from one of these lines, and from a sliding window if that stands beside."""
    end = MULTIPLES[-1]
    beside = MEASURES[protocol].beside
    sliding = {}                         # of each variant, by the way of reading that makes it lowest
    for rows, variant in ((line.rows[beside, 1], line.variant) for line in lines if beside):
        best = sliding.setdefault(variant, rows)
        sliding[variant] = min(best, rows, key=lambda some: pictures.over_seeds([row["loss"] for row in some])[0])
    heads = ["run", "positions", *TIMES, *["sliding 1x"] * bool(beside), f"{end}x - 1x",
             *[f"{end}x - sliding"] * bool(beside), f"1x - {than}'s", f"{end}x - {than}'s"]
    other = {line.label: line for line in lines}[than]
    table_rows = []
    for line in lines:
        first, last = (line.rows[protocol, multiple] for multiple in (1, end))
        cells = [*map(mean_sd, line.losses(protocol))]
        cells += [mean_sd([row["loss"] for row in line.rows[beside, 1]])] if beside else []
        cells += [paired(last, first), *([paired(last, sliding[line.variant])] if beside else [])]
        for multiple, mine in ((1, first), (end, last)):
            cells.append("" if line is other else paired(mine, other.rows[protocol, multiple]))
        table_rows.append([line.variant, line.how, *cells])
    return table(heads, table_rows)

def distances_table(lines):
    """By how much far-repeats' loss falls from 1x to the longest window, by how far back the copy is."""
    first, last = MULTIPLES[0], MULTIPLES[-1]
    bins = lines[0].rows["far-repeats", first][0]["by_distance"]
    table_rows = []
    for line in lines:
        pairs = list(zip(*(line.rows["far-repeats", multiple] for multiple in (first, last)), strict=True))
        table_rows.append([line.variant, line.how, *(
            mean_sd([a["by_distance"][at][0] - b["by_distance"][at][0] for a, b in pairs], "+.3f") for at in bins)])
    return table(["run", "positions", *(f"{at} back ({n:,} targets)" for at, (_, n) in bins.items())], table_rows)

def probes_table(lines):
    """The gains of both probes; "" if no line has any."""
    places = [("swap", 2), ("swap", 4), ("swap", 16), ("repeat", 0.5), ("repeat", 1), ("repeat", 4), ("repeat", 16)]
    places = [place for place in places if any(place in line.rows for line in lines)]
    rows = []
    for line in lines:
        gains = [paired(*[line.rows.get(place)] * 2, "unit_losses_without", "unit_losses") for place in places]
        if set(gains) != {"-"}:
            rows.append([line.variant, *gains])
    return table(["run", *(f"{probe} {multiple}x" for probe, multiple in places)], rows) if rows and places else ""


# ---- pictures --------------------------------------------------------------------------------------------------------

def draw_losses(path, lines, protocol, title):
    """Loss by length, its standard deviation over seeds as bars, and that of each variant's sliding window."""
    lengths = [multiple * lines[0].context for multiple in MULTIPLES]
    drawn = {}
    for line in lines:
        beside = line.rows.get((MEASURES[protocol].beside, 1)) if not line.how else None
        window = beside and np.mean([row["loss"] for row in beside])
        drawn[line.name] = Curve(*pictures.by_length(lengths, line.losses(protocol)), line.colour, window)
    pictures.curves(path, drawn, title, {lines[0].context})

def draw_differences(path, lines, protocol, title):
    """What each way of reading a variant's runs adds to their loss as they are, with its standard deviation.

    The ways that add less than 0.005 to each loss are named in one note.
    """
    lengths = [multiple * lines[0].context for multiple in MULTIPLES]
    plain = {line.variant: line.losses(protocol) for line in lines if not line.how}
    drawn = {}
    most = Counter()
    for line in (line for line in lines if line.how):
        points = pictures.by_length(lengths, line.losses(protocol) - plain[line.variant])
        most[line.how] = max(most[line.how], *np.abs(points[1]))
        drawn[line.how, line.name] = Curve(*points, line.colour)
    little = [how for how in most if most[how] < 0.005 <= max(most.values())]
    within = math.ceil(1000 * max((most[how] for how in little), default=0)) / 1000
    drawn = {name: curve for (how, name), curve in drawn.items() if how not in little}
    note = f"{' and '.join(little)}: within {within:.3f}" if little else ""
    pictures.curves(path, drawn, title, {lines[0].context}, "loss over that in fp32", note=note)

def draw_multipliers(path, lines, protocol, title):
    """Loss at the trained length and at the longest one over the multiplier of theta, for ExPE and ExPE-K."""
    losses = {line.label: line for line in lines}
    drawn = {}
    for (method, variants), i in itertools.product(MULTIPLIERS.items(), (0, -1)):
        mine = [losses[variant] for variant in variants.values()]
        points = pictures.by_length([*variants], np.stack([line.losses(protocol)[i] for line in mine]))
        drawn[f"{pictures.name(method)}, {TIMES[i]}"] = Curve(*points, mine[0].colour)
    pictures.curves(path, drawn, title, set(), across="theta multiplier")

def by_tokens(lines, protocol):
    """{method: (colour, millions of tokens of training, losses (tokens, MULTIPLES, seeds))}."""
    def trained(line):
        return line.rows[protocol, 1][0]["trained_tokens"]

    methods = {}
    for line in sorted(lines, key=trained):
        methods.setdefault(line._replace(variant=line.variant.partition("-tokens")[0]).name, []).append(line)
    return {method: (mine[0].colour, [round(trained(line) / 1e6, 2) for line in mine],
                     np.stack([line.losses(protocol) for line in mine])) for method, mine in methods.items()}

def draw_tokens(path, lines, protocol, title):
    """Loss at the trained length against the tokens of training."""
    methods = by_tokens([line for line in lines if not line.how], protocol)
    drawn = {method: Curve(*pictures.by_length(tokens, losses[:, 0]), colour)
             for method, (colour, tokens, losses) in methods.items()}
    pictures.curves(path, drawn, title, set(), across="million tokens of training")

def draw_far(path, lines, protocol, title):
    """What the longest window adds to this loss, of the methods to which it adds less than 0.5 on average."""
    changes = {method: (colour, tokens, losses[:, -1] - losses[:, 0])
               for method, (colour, tokens, losses) in by_tokens(lines, protocol).items()}
    drawn = {method: Curve(*pictures.by_length(tokens, change), colour)
             for method, (colour, tokens, change) in changes.items() if change.mean() < 0.5}
    what = f"loss at {TIMES[-1]} less that at 1x"
    pictures.curves(path, drawn, title, set(), what, across="million tokens of training", least=0.1)

def draw_positions(path, lines, protocol, title):
    """Loss by position in the longest window that each line has a loss for."""
    drawn = {}
    for line in lines:
        rows = [line.rows[protocol, multiple] for multiple in MULTIPLES]
        longest = [some for some in rows if some[0]["loss"] is not None][-1]
        drawn[line.name] = Curve(*pictures.by_position(longest), line.colour)
    pictures.curves(path, drawn, title, {lines[0].context}, across=pictures.POSITIONS)

def gain_of(row):
    """What a probe's row says the far context is worth, in nats; nan without a loss."""
    if row["loss"] is None:
        return np.nan
    return np.average(np.subtract(row["unit_losses_without"], row["unit_losses"]), weights=row["unit_targets"])

def draw_probe(path, lines, probe, title):
    """What a probe's gain is at each length, with the standard deviation over seeds."""
    drawn = {}
    for line in lines:
        gains = {at: [gain_of(row) for row in rows] for (what, at), rows in line.rows.items() if what == probe}
        lengths = [round(at * line.context) for at in gains]
        drawn[line.name] = Curve(*pictures.by_length(lengths, np.array([*gains.values()])), line.colour)
    pictures.curves(path, drawn, title, {lines[0].context}, "gain")

def draw_bars(path, lines, protocol, title):
    """Bars of the losses at a few lengths."""
    few = [MULTIPLES.index(multiple) for multiple in (1, 2, 4, 16)]
    losses = np.stack([line.losses(protocol)[few] for line in lines], axis=1)          # (few, lines, seeds)
    pictures.bars(path, [line.name for line in lines], [TIMES[i] for i in few], losses, title)

MORE_PICTURES = {                        # of a grid: kind, what draws it, of which protocol, and its title
    "table2": [("positions", draw_positions, "nonoverlap", "Loss by position"),
               ("repeat", draw_probe, "repeat", "What a repetition at both ends of a window is worth")],
    "ablations": [("bars", draw_bars, "nonoverlap", GRIDS["ablations"].title)],
    **{grid: [("tokens", draw_tokens, protocol, "Loss at 1x against tokens of training"),
              ("far", draw_far, protocol, "What windows of 16x add, without the methods that rise by 0.5 or more")]
       for grid, protocol in {"budget": "same-targets", "growth": "spread"}.items()},
    **dict.fromkeys(("tokens", "retuned", "long", "sizes", "novels"), [
        ("repeat", draw_probe, "repeat", "What a repetition at both ends of a window is worth")]),
    "theta": [("multipliers", draw_multipliers, "same-targets", "Loss by theta multiplier, at 1x and 16x")],
}

def draw(name, preset, lines):
    """The pictures of a grid, in pictures/; returns their Markdown."""
    Path("pictures").mkdir(exist_ok=True)
    title = GRIDS[name].title if name in GRIDS else tuned.TITLE
    images = []
    one = all(len(rows) == 1 for some in lines.values() for line in some for rows in line.rows.values())
    if name == "tuned":                                                    # of each method the first one: its best
        lines = {protocol: list({line.colour: line for line in reversed(some)}.values())[::-1]
                 for protocol, some in lines.items()}
    if name == "dither":                                                   # what bf16 adds to what was trained in fp32
        lines = {protocol: [line for line in some if line.how in ("", "bf16") and "bf16" not in line.variant]
                 for protocol, some in lines.items()}
    ends = {line.variant.partition("-tokens")[2] for some in lines.values() for line in some}
    if len(ends) == 1:                                                     # which the title says
        lines = {protocol: [line._replace(variant=line.variant.partition("-tokens")[0]) for line in some]
                 for protocol, some in lines.items()}
    losses = draw_differences if name in ("precision", "dither") else draw_losses
    jobs = [(protocol, losses, protocol, title) for protocol in (*LOSSES, "spread")
            if lines[protocol] and name != "growth"]                       # where RoPE would hide the others
    jobs += MORE_PICTURES.get(name, [])
    for kind, job, protocol, words in jobs:
        path = Path("pictures") / f"{preset}-{name}-{kind}.png"
        label = f"{preset}, {pictures.PROTOCOLS[protocol]}{', the test split' * (name == 'tuned')}{', one seed' * one}"
        job(path, lines[protocol], protocol, f"{words}\n{label}")
        images.append(f"![{words} ({label})](../../{path})\n")
    return "".join(images)


# ---- the pages -------------------------------------------------------------------------------------------------------

def report():
    """Write results/PLACE/GRID.md, their pictures, and results/README.md, whose notes are kept."""
    places = [path for path in sorted(Path("results").glob("*")) if path.is_dir()]
    places.sort(key=lambda path: path.name in DATA)
    if not places:
        raise InputError("there is nothing under results/ to report: run a grid first, such as table2 --preset mini")
    notes = "\nWrite here: what stands below this heading is kept when the rest is made anew.\n"
    index = Path("results/README.md")
    if index.exists():
        _, heading, notes = read_text(index).partition(NOTES)
        if not heading:
            raise InputError(f"{index} has no line {NOTES.strip()!r}: write it above what is to be kept")
    parts = [HEAD, *(part for place in places for part in report_place(place))]
    write_text(index, "\n".join(parts) + NOTES + notes)
    print(f"{index} and the pages that it names are written")

def report_place(folder):
    """Write the pages of one place and return its part of the index; all files are checked before one is drawn."""
    place = folder.name
    if place == task_grid.PLACE:
        return task_pages.report(folder)
    files = collect(folder)
    preset = next((grid.preset for grid in GRIDS.values() if grid.place == place), place)
    runs = [run for (_, what), seeds in files.items() if what == "run" for run in seeds.values()]
    if not runs:
        return []
    ready = {}                                                         # the seeds of each grid that has any
    for name, grid in GRIDS.items():
        seeds = finished(grid, files)
        if not seeds or place_of(name, preset) != place or (name == "large" and not preset.startswith("llama")):
            continue
        others = {tuned.SEED} if place == tuned.PRESET else set()      # the trials' seed is none of a grid's
        if left := sorted(set().union(*(files[variant, "run"] for variant in grid.evaluations)) - {*seeds, *others}):
            print(f"{name} of {preset} has not all of seed {' and '.join(map(str, left))}, which is left out")
        check_alike(folder, grid, files, seeds)
        ready[name] = seeds
    pages = {name: (GRIDS[name], page(name, GRIDS[name], preset, files, seeds)) for name, seeds in ready.items()}
    if place == tuned.PRESET and (tuned_page := page_of_tuned(folder, files)):
        pages["tuned"] = tuned_page
    for name, (_, text) in pages.items():
        write_text(folder / f"{name}.md", text)
    lines = [f"- [{grid.title}]({place}/{name}.md)\n" for name, (grid, _) in pages.items()]
    return [what_was_run(place, runs), "".join(lines)]

def what_was_run(preset, runs):
    """One sentence on all runs of a preset."""
    def values(form):
        """That of the runs' files, each value once."""
        return " or ".join(dict.fromkeys(form.format_map(run) for run in runs))

    hours = sum(run["seconds"] or 0 for run in runs) / 3600
    tokens = {run["tokens"]: run["tokens"] / run["data"]["splits"]["train"]["tokens"] for run in runs}
    tokens = " or ".join(f"{n:,} tokens ({epochs:.2f} epochs)" for n, epochs in sorted(tokens.items()))
    return (f"\n## {preset}\n\n{len(runs)} run{'s' * (len(runs) > 1)} of {tokens} in {values('{dtype}')}, trained at "
            f"{values('{trained_length:,}')} tokens on {values('{data[source]}')} (vocabulary "
            f"{values('{data[vocab]:,}')}, {values('{data[splits][train][tokens]:,}')} training tokens); {hours:.1f} "
            f"hours of training on {values('{provenance[device]}')} (threads: {values('{provenance[threads]}')}), "
            f"Python {values('{provenance[versions][python]}')}, torch {values('{provenance[versions][torch]}')}.\n")

def page_of_tuned(folder, files):
    """(Grid, page): the best and the default of each method on test, and a figure of the trials; None if unfinished."""
    def loss(name):
        rows = files.get((name, tuned.TRIALS[0]), {}).get(tuned.SEED)
        return rows and rows[0]["loss"]

    pairs = {}                                                         # of each method that is done: best, default
    trials = {}
    for method in tuned.METHODS:
        names, best = tuned.trials(method, loss)
        if best is not None:
            pairs[method] = best, tuned.default_of(method)
            trials[method] = sorted(map(loss, names))[:SHOWN]
    grids = {method: Grid(tuned.TITLE, dict.fromkeys(pair, tuned.FINALS)) for method, pair in pairs.items()}
    seeds = max((finished(grid, files) for grid in grids.values()), key=len, default=[])
    if not seeds:
        return None
    methods = [method for method in grids if finished(grids[method], files) == seeds]
    methods.sort(key=lambda method: method != "expe-on-k")             # the first is what all are compared with
    variants = itertools.chain(*zip(*(pairs[method] for method in methods), strict=True))
    grid = Grid(tuned.TITLE, dict.fromkeys(variants, tuned.FINALS), says=tuned.SAYS)
    check_alike(folder, grid, files, seeds)
    path = Path("pictures") / f"{tuned.PRESET}-tuned-trials.png"
    path.parent.mkdir(exist_ok=True)
    drawn = {pictures.name(method): Curve(range(1, 1 + len(some)), np.array(some), None, pictures.colour(method))
             for method, some in trials.items()}
    title = f"The {SHOWN} best trials of each method\n{tuned.PRESET}, seed {tuned.SEED}, val, 1x"
    pictures.curves(path, drawn, title, set(), across="trial")
    return grid, page("tuned", grid, tuned.PRESET, files, seeds) + f"\n![{title.splitlines()[0]}](../../{path})\n"

def page(name, grid, preset, files, seeds):
    """The page of one grid. Differences are from ExPE's losses, or, in a grid without it, from its first variant's."""
    lines = lines_of(grid, files, seeds)
    by = {what: [line for line in lines if {(what, 1), (what, MULTIPLES[-1])} <= {*line.rows}]
          for what in (*LOSSES, *FURTHER, *PROBES)}
    than = "expe" if "expe" in grid.evaluations and name != "tuned" else next(iter(grid.evaluations))
    flags = {files[variant, "run"][seed].get("train_flags", "") for variant in grid.evaluations for seed in seeds}
    command = f"python -m lab.reproduce {name} --preset {preset} --seeds {','.join(map(str, seeds))}"
    commands = "\n".join(f"{command} -- {more}" if more else command for more in sorted(flags))
    parts = [f"# {grid.title}\n", *([f"{grid.says}\n"] if grid.says else []), f"```\n{commands}\n```\n",
             draw(name, preset, by)]
    if by["nonoverlap"]:
        parts.append(f"The paper's protocol (nonoverlap):\n\n{losses_table(grid, preset, by['nonoverlap'], than)}")
    if trials := [line for line in lines if ("nonoverlap", 1) in line.rows and line not in by["nonoverlap"]]:
        parts.append("Losses on val at the trained length, which choose:\n\n" + table(["run", "1x"], [
            [line.variant, mean_sd([row["loss"] for row in line.rows["nonoverlap", 1]])] for line in trials]))
    for what, words in {"same-targets": "The same targets with more and more context:", **FURTHER}.items():
        if by[what]:
            parts.append(f"{words}\n\n{same_targets_table(by[what], than, what)}")
    if by["far-repeats"]:
        parts.append("By how much the loss on these falls from 1x to 16x, by the distance of the copy:\n\n"
                     + distances_table(by["far-repeats"]))
    if probes := probes_table(lines):
        parts.append(f"Probes: the gain from what is far back, at windows of so many times 1x:\n\n{probes}")
    rows = [[variant, f"`{flags_of(variant, preset=preset)}`"] for variant in grid.evaluations]
    return "\n".join([*parts, "The flags of each run:\n\n" + table(["run", "flags of train.py"], rows)])
