"""RESULTS.md and its pictures, from the files under results/ alone."""

import itertools
import math
import os
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
from lab.grids import DATA, EVALUATIONS, GAINS, GRIDS, LOSSES, PROBES, VARIANTS, Grid, flags_of, place_of
from lab.measures import MEASURES, interval_of_seeds
from lab.pictures import Curve
from studies import tuning as tuned

NOTES = "\n## Notes\n"
HEAD = ("# Results\n\nMade by `python -m lab.reproduce report` from the files under results/, one a run and "
        "evaluation; only the notes at the end are written by hand. Losses are in nats a token, as the mean over seeds "
        "± their standard deviation. 1x is the trained length. `nonoverlap` is the paper's protocol; `same-targets` "
        "scores the same last tokens of each document with more and more context, and `16x - sliding` is less the loss "
        "with 1x alone, by the run's way of reading that is best at that. 95% intervals (in brackets) are of paired "
        "differences, for other seeds and other documents; one seed alone has none. docs/evidence.md says how they "
        "are made, and what each protocol can and cannot show. `expe-x16` has 16 times the paper's theta, `expe-on-k` "
        "256 times and `expe-on-k-x1` once.\n")
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
TIMES = [f"{multiple}x" for multiple in MULTIPLES]


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
        found = [[row["loss"] for row in self.rows[protocol, multiple]] for multiple in MULTIPLES]
        return np.array(found, dtype=np.float64)

def collect(folder):
    """{(variant, what): {seed: what its file says}} of results/<preset>/; what: one of EVALUATIONS, or "run"."""
    files = {}
    for path in sorted(folder.glob("*.json")):
        found = re.fullmatch(r"(.+)-s([0-9]+)\.(.+)\.json", path.name)
        if found is None or found[1] not in VARIANTS or found[3] not in (*EVALUATIONS, "run"):
            continue
        variant, seed, what = found.groups()
        try:
            said = read_json(path, RUN if what == "run" else [ROW])
            if what != "run":
                check_rows(path, said, BY_POSITION if "--per-position" in EVALUATIONS[what] else {})
        except InputError as error:
            raise InputError(f"{error}: delete it, and run its grid again") from None
        files.setdefault((variant, what), {})[int(seed)] = said
    return files

def check_rows(path, rows, more):
    """InputError unless the rows of an evaluation are all there, and their losses too."""
    for row in rows:
        if row["trained_length"] < 1:
            raise InputError(f"{path}: trained_length must be at least 1, got {row['trained_length']}")
        if row["loss"] is not None:
            check_shape(row, SCORED | more | (WITHOUT if row["protocol"] in PROBES else {}), path)
            sizes = {len(row[name]) for name in ("unit_targets", "unit_losses", "unit_losses_without") if name in row}
            if len(sizes) != 1 or 0 in sizes:
                raise InputError(f"{path} has another number of losses than of counts of targets")
    found = {(row["how"], row["protocol"], row["length"] / row["trained_length"]) for row in rows}
    for how, protocol in {(how, protocol) for how, protocol, _ in found if protocol != "sliding"} or {("", "any")}:
        beside = [("sliding", 1)] if protocol == "same-targets" else []
        for name, multiple in [(protocol, multiple) for multiple in MULTIPLES] + beside:
            if (how, name, multiple) not in found:
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
            line.rows.setdefault((row["protocol"], row["length"] // context), []).append(row)
    return list(lines.values())


# ---- tables ----------------------------------------------------------------------------------------------------------

def table(heads, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))

def mean_sd(values, form=".3f"):
    mean, sd = pictures.over_seeds(values)
    return "-" if np.isnan(mean) else f"{mean:{form}}" + f" ± {sd:.3f}" * (len(values) > 1)

def paired(rows, others, key="unit_losses", other_key="unit_losses"):
    """A difference between two rows of each seed: the mean with its interval, if it has one; and that of each seed."""
    if not rows or not others or any(row["loss"] is None for row in rows + others):
        return "-", "-"
    targets = rows[0]["unit_targets"]
    differences = [np.subtract(x[key], y[other_key]) for x, y in zip(rows, others, strict=True)]
    mean, low, high = interval_of_seeds(differences, targets)
    by_seed = " ".join(f"{x:+.3f}" for x in np.average(differences, axis=1, weights=targets))
    return f"{mean:+.3f}" + f" ({low:+.3f}, {high:+.3f})" * (not np.isnan(low)), by_seed

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
        cells += ["" if line is other else paired(line.rows[at], other.rows[at])[0] for at in ends]
        if paper := grid.paper.get((line.variant, line.how)):
            rise = paper[-1] - paper[0]
            over = losses[: len(paper)].mean(1) - paper
            cells += [" ".join(f"{loss:.2f}" for loss in paper), f"{rise:+.2f}", mean_sd([rises.mean() - rise], "+.2f")]
            cells += [" ".join(mean_sd([value], "+.2f") for value in over)] if preset in grid.of else []
        rows.append(cells + [""] * (len(heads) - len(cells)))
    return table(heads, rows)

def same_targets_tables(lines, than):
    """Losses with their differences, also from one of these lines, and the differences of each seed."""
    end = MULTIPLES[-1]
    sliding = {}                         # of each variant, by the way of reading that makes it lowest
    for rows, variant in ((line.rows["sliding", 1], line.variant) for line in lines):
        found = sliding.setdefault(variant, rows)
        sliding[variant] = min(found, rows, key=lambda some: pictures.over_seeds([row["loss"] for row in some])[0])
    names = ["run", "positions"]
    heads = [f"{end}x - 1x", f"{end}x - sliding", f"1x - {than}'s", f"{end}x - {than}'s"]
    other = {line.label: line for line in lines}[than]
    rows = []
    by_seed = []
    for line in lines:
        first, last = (line.rows["same-targets", multiple] for multiple in (1, end))
        losses = [*line.losses("same-targets"), [row["loss"] for row in line.rows["sliding", 1]]]
        pairs = [paired(last, first), paired(last, sliding[line.variant])]
        for multiple, mine in ((1, first), (end, last)):
            pairs.append(("", "") if line is other else paired(mine, other.rows["same-targets", multiple]))
        rows.append([line.variant, line.how, *map(mean_sd, losses), *(cell for cell, _ in pairs)])
        by_seed.append([line.variant, line.how, *(seeds for _, seeds in pairs)])
    return table([*names, *TIMES, "sliding 1x", *heads], rows), table(names + heads, by_seed)

def probes_table(lines):
    """The gains of both probes; "" if no line has any."""
    asked = [("swap", 2), ("swap", 4), ("swap", 16), ("repeat", 1), ("repeat", 4), ("repeat", 16)]
    rows = []
    for line in lines:
        gains = {at: paired(*[line.rows.get(at)] * 2, "unit_losses_without", "unit_losses") for at in asked}
        if set(gains.values()) != {("-", "-")}:
            rows.append([line.variant, *(cell for cell, _ in gains.values()), gains["swap", 16][1]])
    heads = ["run", *(f"{probe} {multiple}x" for probe, multiple in asked), "swap 16x by seed"]
    return table(heads, rows) if rows else ""

def which_of_two(lines):
    """Which of the paper's two losses of ExPE at 4x ours is nearer to, by its rise from 1x."""
    losses = {line.label: line for line in lines}["expe"].losses("nonoverlap")
    rises = losses[MULTIPLES.index(4)] - losses[0]
    if np.isnan(rises).any():
        return ""
    two = {"table 2": GRIDS["table2"].paper["expe", ""], "table 7": GRIDS["ablations"].paper["expe", ""]}
    papers = {f"{losses[2]:.2f} of {name}": losses[2] - losses[0] for name, losses in two.items()}
    nearer = min(papers, key=lambda name: abs(papers[name] - rises.mean()))
    said = " and ".join(f"{name} ({rise:+.2f} from 1x)" for name, rise in papers.items())
    seeds = " ".join(f"{rise:+.3f}" for rise in rises)
    return (f"At 4x the paper has two losses of ExPE, {said}. Ours rises by {rises.mean():+.3f} (by seed: {seeds}): "
            f"nearer to {nearer}.\n")


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
        found = pictures.by_length(lengths, line.losses(protocol) - plain[line.variant])
        most[line.how] = max(most[line.how], *np.abs(found[1]))
        drawn[line.how, line.name] = Curve(*found, line.colour)
    little = [how for how in most if most[how] < 0.005 <= max(most.values())]
    within = math.ceil(1000 * max((most[how] for how in little), default=0)) / 1000
    drawn = {name: curve for (how, name), curve in drawn.items() if how not in little}
    note = f"{' and '.join(little)}: within {within:.3f}" if little else ""
    pictures.curves(path, drawn, title, {lines[0].context}, "loss over that in fp32", note=note)

def draw_gains(path, lines, protocol, title):
    """Loss at the trained length and at the longest one over the gain of ExPE, on both and on keys alone."""
    losses = {line.label: line for line in lines}
    drawn = {}
    for (method, gains), i in itertools.product(GAINS.items(), (0, -1)):
        mine = [losses[variant] for variant in gains.values()]
        found = pictures.by_length([*gains], np.stack([line.losses(protocol)[i] for line in mine]))
        drawn[f"{pictures.name(method)}, {TIMES[i]}"] = Curve(*found, mine[0].colour)
    pictures.curves(path, drawn, title, set(), across="theta over the paper's step")

def draw_positions(path, lines, protocol, title):
    """Loss by position in the longest window that each line has a loss for."""
    drawn = {}
    for line in lines:
        rows = [line.rows[protocol, multiple] for multiple in MULTIPLES]
        longest = [some for some in rows if some[0]["loss"] is not None][-1]
        drawn[line.name] = Curve(*pictures.by_position(longest), line.colour)
    pictures.curves(path, drawn, title, {lines[0].context}, across=pictures.POSITIONS)

def draw_bars(path, lines, protocol, title):
    """Bars of the losses at a few lengths."""
    few = [MULTIPLES.index(multiple) for multiple in (1, 2, 4, 16)]
    losses = np.stack([line.losses(protocol)[few] for line in lines], axis=1)          # (few, lines, seeds)
    pictures.bars(path, [line.name for line in lines], [TIMES[i] for i in few], losses, title)

MORE_PICTURES = {                        # of a grid: kind, what draws it, of which protocol, and its title
    "table2": ("positions", draw_positions, "nonoverlap", "Loss by position"),
    "ablations": ("bars", draw_bars, "nonoverlap", GRIDS["ablations"].title),
    "gain": ("steps", draw_gains, "same-targets", "Loss by ExPE's gain, at 1 and 16 times the trained length"),
}

def draw(name, preset, lines):
    """The pictures of a grid, in pictures/; returns their Markdown."""
    Path("pictures").mkdir(exist_ok=True)
    title = GRIDS[name].title if name in GRIDS else tuned.TITLE
    images = []
    if name == "tuned":                                                    # of each method the first one: its best
        lines = {protocol: list({line.colour: line for line in reversed(found)}.values())[::-1]
                 for protocol, found in lines.items()}
    if name == "dither":                                                   # what bf16 adds to what was trained in fp32
        lines = {protocol: [line for line in found if line.how in ("", "bf16") and "bf16" not in line.variant]
                 for protocol, found in lines.items()}
    losses = draw_differences if name in ("precision", "dither") else draw_losses
    jobs = [(protocol, losses, protocol, title) for protocol in LOSSES if lines[protocol]]
    jobs += [MORE_PICTURES[name]] if name in MORE_PICTURES else []
    for kind, job, protocol, words in jobs:
        path = Path("pictures") / f"{preset}-{name}-{kind}.png"
        where = f"{preset}, {pictures.PROTOCOLS[protocol]}{', the test split' * (name == 'tuned')}"
        job(path, lines[protocol], protocol, f"{words}\n{where}")
        images.append(f"![{words} ({where})]({path})\n")
    return "".join(images)


# ---- the page --------------------------------------------------------------------------------------------------------

def report():
    """Write RESULTS.md and the pictures from results/; its notes are kept."""
    presets = [path for path in sorted(Path("results").glob("*")) if path.is_dir()]
    presets.sort(key=lambda path: path.name in DATA)
    if not presets:
        raise InputError("there is nothing under results/ to report: run a grid first, such as table2 --preset mini")
    notes = "\nWrite here: what stands below this heading is kept when the rest is made anew.\n"
    if os.path.lexists("RESULTS.md"):
        _, found, notes = read_text("RESULTS.md").partition(NOTES)
        if not found:
            raise InputError(f"RESULTS.md has no line {NOTES.strip()!r}: write it above what is to be kept")
    parts = [HEAD, *itertools.chain(*map(preset_report, presets))]
    write_text(os.path.realpath("RESULTS.md"), "\n".join(parts) + NOTES + notes)
    print("RESULTS.md is written")

def preset_report(folder):
    """The sections of one preset, whose files are in that folder; nothing is drawn before all of them are checked."""
    place = folder.name                                                 # ready: the seeds of each grid that has any
    ready = {}
    files = collect(folder)
    preset = tuned.PRESET if place in {grid.place for grid in GRIDS.values()} else place
    runs = [run for (_, what), found in files.items() if what == "run" for run in found.values()]
    if not runs:
        return []
    for name, grid in GRIDS.items():
        seeds = finished(grid, files)
        if not seeds or place_of(name, preset) != place or (name == "large" and not preset.startswith("llama")):
            continue
        others = {tuned.SEED} if place == tuned.PRESET else set()          # the trials' seed is none of a grid's
        if left := sorted(set().union(*(files[variant, "run"] for variant in grid.evaluations)) - {*seeds, *others}):
            print(f"{name} of {preset} has not all of seed {' and '.join(map(str, left))}, which is left out")
        check_alike(folder, grid, files, seeds)
        ready[name] = seeds
    sections = [section(name, GRIDS[name], preset, files, seeds) for name, seeds in ready.items()]
    if place == tuned.PRESET:
        sections.append(tuned_section(folder, files))
    return [what_was_run(place, runs), *itertools.chain(*sections), *commands(place, runs, files)]

def what_was_run(preset, runs):
    """One sentence on all runs of a preset."""
    def said(form):
        """That of the runs' files, each value once."""
        return " or ".join(dict.fromkeys(form.format_map(run) for run in runs))

    seconds = [run["seconds"] for run in runs if run["seconds"]]
    return (f"\n## {preset}\n\n{len(runs)} runs of {said('{tokens:,}')} tokens in {said('{dtype}')}, trained at "
            f"{said('{trained_length:,}')} tokens on {said('{data[source]}')} (vocabulary {said('{data[vocab]:,}')}, "
            f"{said('{data[splits][train][tokens]:,}')} training tokens); {sum(seconds) / 3600:.1f} hours of "
            f"training in all, {min(seconds):,.0f} to {max(seconds):,.0f} s a run, on {said('{provenance[device]}')} "
            f"(threads: {said('{provenance[threads]}')}), Python {said('{provenance[versions][python]}')}, torch "
            f"{said('{provenance[versions][torch]}')}, {said('{provenance[machine]}').split('-')[0]}.\n")

def tuned_section(folder, files):
    """The trials that there are; then the best and the default of each method that has all of its own, on test."""
    def loss(name):
        rows = files.get((name, tuned.TRIALS[0]), {}).get(tuned.SEED)
        return rows and rows[0]["loss"]

    rows, finals = [], []
    scored = {name: found for name in VARIANTS if (found := loss(name)) is not None
              and tuned.SEED in files.get((name, tuned.TRIALS[1]), {})}      # or a grid was stopped in between
    for method in tuned.METHODS:
        names, best = tuned.trials(method, loss)
        finals += [(best, tuned.default_of(method))] * (best is not None)
        found = [name for name in names if name in scored]
        for name in found * (len(found) > 1):                              # a default alone is other grids' too
            same = lines_of(Grid("", {name: tuned.TRIALS[1:]}), files, [tuned.SEED])[0].losses(tuned.TRIALS[1])
            losses = f"{scored[name]:.3f}", *(f"{same[MULTIPLES.index(k)][0]:.3f}" for k in (1, 4, 16))
            rows.append([pictures.name(name) + " (best)" * (name == best), f"`{flags_of(name)}`", *losses])
    if not rows:
        return []
    heads = ["trial", "flags", "1x, the paper's protocol", *(f"{k}x, the same targets" for k in (1, 4, 16))]
    parts = [f"\n### {tuned.TITLE}\n", f"Each trial is one run of seed {tuned.SEED}, scored on val. The best of a "
             f"method has the lowest loss of the first column.\n\n{table(heads, rows)}"]
    grids = [Grid(tuned.TITLE, dict.fromkeys(pair, tuned.FINALS)) for pair in finals]
    seeds = max((finished(grid, files) for grid in grids), key=len, default=[])
    finals = [pair for pair, grid in zip(finals, grids, strict=True) if finished(grid, files) == seeds]
    if seeds:
        finals.sort(key=lambda pair: "expe-on-k" not in pair)              # first, and so what all are compared with
        bests_first = itertools.chain(*zip(*finals, strict=True))
        grid = Grid(tuned.TITLE, dict.fromkeys(bests_first, tuned.FINALS))
        check_alike(folder, grid, files, seeds)
        parts.append("The best and then the defaults, on the test split, which nothing was tuned on:\n")
        parts += section("tuned", grid, tuned.PRESET, files, seeds)[1:]
    return parts

def section(name, grid, preset, files, seeds):
    """The pictures and tables of one grid, and the command that makes it.

    Differences are from ExPE's losses, or, in a grid without it, from those of its first variant.
    """
    lines = lines_of(grid, files, seeds)
    by = {protocol: [line for line in lines if (protocol, 1) in line.rows] for protocol in LOSSES}
    parts = [f"\n### {grid.title}\n", draw(name, preset, by)]
    than = "expe" if "expe" in grid.evaluations and name != "tuned" else next(iter(grid.evaluations))
    if by["nonoverlap"]:
        parts.append(f"By the paper's protocol (nonoverlap):\n\n{losses_table(grid, preset, by['nonoverlap'], than)}")
    if name == "table2":
        parts.append(which_of_two(lines))
    same_targets, by_seed = same_targets_tables(by["same-targets"], than)
    parts.append(f"The same targets with more and more context:\n\n{same_targets}")
    if len(seeds) > 1:
        parts.append(f"The differences by seed ({', '.join(map(str, seeds))}):\n\n{by_seed}")
    if probes := probes_table(lines):
        parts.append(f"Probes: the gain from what is far back, at windows of so many times 1x:\n\n{probes}")
    flags = {files[variant, "run"][seed].get("train_flags", "") for variant in grid.evaluations for seed in seeds}
    command = f"python -m lab.reproduce {name} --preset {preset} --seeds {','.join(map(str, seeds))}"
    parts.append("`" + "` or `".join(f"{command} -- {more}" if more else command for more in sorted(flags)) + "`\n")
    return parts

def present_flags(command):
    """A recorded command in the flags that train.py has now: --softmax was a part of the encoding's name."""
    return re.sub(r"--pe (\w+)\+(\w+)", r"--pe \1 --softmax \2", command)

def commands(preset, runs, files):
    """What made every file of a preset."""
    rows = [[f"{run['variant']}-s{run['seed']}", f"`{present_flags(run['command'])}`", f"{run['seconds'] or 0:,.0f}",
             f"{run['parameters']:,}", (run["provenance"]["git"] or "-")[:10]] for run in runs]
    used = {what for _, what in files}
    flags = [[name, f"`{flags}`"] for name, flags in EVALUATIONS.items() if name in used]
    evaluate = " ".join(["python -m lab.measure", f"runs/{preset}/RUN FLAGS", *DATA.get(preset, ())[1:], "--json FILE"])
    return [f"\n### The commands ({preset})\n\n" + table(["run", "command", "s", "parameters", "commit"], rows),
            f"Each results/{preset}/RUN.NAME.json is what `{evaluate}` writes:\n\n" + table(["NAME", "FLAGS"], flags)]
