"""RESULTS.md and its pictures, from the files under results/ alone."""

import functools
import itertools
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import InputError
from lab import pictures
from lab.grids import EVALUATIONS, GRIDS, LOSSES, PROBES, VARIANTS
from lab.measures import intervals
from runs import read_json, write_whole

NOTES = "\n## Notes\n"
EMPTY_NOTES = "\nWrite here: what stands below this heading is kept when the rest is made anew.\n"
HEAD = ("# Results\n\nMade by `python -m lab.reproduce report` from the files under results/, one a run and "
        "evaluation; only the notes at the end are written by hand. Losses are in nats a token, as the mean over seeds "
        "± their standard deviation. 1x is the trained length. `nonoverlap` is the paper's protocol; `same-targets` "
        "scores the same last tokens of each document with more and more context. 95% intervals (in brackets) are a "
        "paired bootstrap over documents of the mean over seeds. docs/evidence.md says what each protocol can and "
        "cannot show.\n")
NAT = "loss, nats a token"


# ---- the files, and what they say together ---------------------------------------------------------------------------

class Line(NamedTuple):
    """What the seeds of one variant with one way of scaling say together."""

    variant: str
    how: str
    family: str                          # of LOSSES or PROBES
    context: int
    rows: dict                           # (protocol, multiple of the trained length): its rows, one a seed

    @property
    def label(self):
        return f"{self.variant} {self.how}".strip()

    def values(self, multiple, protocol=None):
        """One loss a seed, by the line's own protocol unless another is named; [] where there is none."""
        found = [row["loss"] for row in self.rows.get((protocol or self.family, multiple), [])]
        return [] if None in found else found

def collect(folder):
    """({(variant, seed): run.json}, {(variant, evaluation): {seed: rows}}) of results/<preset>/."""
    runs, evaluations = {}, {}
    for path in sorted(folder.glob("*.json")):
        found = re.fullmatch(r"(.+)-s([0-9]+)\.(.+)\.json", path.name)
        if found is None or found[1] not in VARIANTS or found[3] not in (*EVALUATIONS, "run"):
            continue
        variant, seed, what = found[1], int(found[2]), found[3]
        try:
            content = read_json(path)
            _ = (content["seconds"], content["provenance"]["git"]) if what == "run" else content[0]["weights"]
        except (InputError, LookupError, TypeError):
            raise InputError(f"{path} was cut short or edited: delete it, and run its grid again") from None
        if what == "run":
            runs[variant, seed] = content
        else:
            evaluations.setdefault((variant, what), {})[seed] = content
    return runs, evaluations

def finished(grid, runs, evaluations):
    """The seeds for which a grid has all its runs and evaluations."""
    wanted = [evaluations.get((variant, name), {}) for variant, names in grid.evaluations.items() for name in names]
    seeds = set.intersection(*map(set, wanted))
    return sorted(seed for seed in seeds if all((variant, seed) in runs for variant in grid.evaluations))

def check_alike(folder, grid, evaluations, seeds):
    """InputError if a file of a grid has other rows than another seed's, or rows that scored other targets."""
    scored = {}
    for variant, names in grid.evaluations.items():
        for name, seed in itertools.product(names, seeds):
            file, rows = folder / f"{variant}-s{seed}.{name}.json", evaluations[variant, name][seed]
            for row in (row for row in rows if row["loss"] is not None):
                what = row["targets_sha256"], row["n_documents"], len(row["unit_losses"])
                other, right = scored.setdefault((row["protocol"], row["length"]), (file, what))
                if what != right:
                    raise InputError(f"{file} was scored on other documents than {other}: delete the one that is "
                                     "wrong, and run its grid again, with one --max-docs or none")
            kinds, others = ([(row["how"], row["protocol"], row["length"]) for row in some]
                             for some in (rows, evaluations[variant, name][seeds[0]]))
            if kinds != others:
                raise InputError(f"{file} has other rows than seed {seeds[0]}: delete it, and run its grid again")

def lines_of(grid, evaluations, family, seeds):
    """The Lines of a grid by one of LOSSES or PROBES, from whichever of its evaluations measured them."""
    lines, protocols = [], (family, "sliding") if family == "same-targets" else (family,)
    for variant, names in grid.evaluations.items():
        found = {}
        for name, seed in itertools.product(names, seeds):
            for row in (row for row in evaluations[variant, name][seed] if row["protocol"] in protocols):
                at = row["protocol"], row["length"] // row["trained_length"]
                found.setdefault(row["how"], {}).setdefault(at, []).append(row)
        for how, rows in found.items():
            lines.append(Line(variant, how, family, next(iter(rows.values()))[0]["trained_length"], rows))
    return lines


# ---- tables ----------------------------------------------------------------------------------------------------------

def table(heads, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))

def times(multiple):
    return f"{multiple:g}x"

def mean_sd(values, form=".3f"):
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):{form.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"

def paired(rows, others, key="unit_losses", other_key="unit_losses"):
    """A difference between two rows of each seed, averaged over seeds, with its bootstrap interval over documents."""
    if not rows or not others or any(row["loss"] is None for row in rows + others):
        return "-"
    differences = [np.subtract(x[key], y[other_key]) for x, y in zip(rows, others, strict=True)]
    return "{:+.3f} ({:+.3f}, {:+.3f})".format(*intervals([np.mean(differences, axis=0)], rows[0]["unit_targets"])[0])

def losses_table(grid, preset, lines):
    """Ours by the paper's protocol beside the paper's numbers; what is comparable in another model is the rise."""
    multiples = sorted({multiple for line in lines for _, multiple in line.rows})
    last = max((len(numbers) for numbers in grid.paper.values()), default=len(multiples))
    end = multiples[min(last, len(multiples)) - 1]
    heads = ["run", "positions", *map(times, multiples), f"rise to {times(end)}"]
    if grid.paper:
        heads += [f"paper, 1x to {times(end)}", "paper's rise", "our rise - paper's"]
        heads += ["our losses - paper's"] if preset in grid.of else []
    rows = []
    for line in lines:
        losses = [line.values(multiple) for multiple in multiples]
        rises = [b - a for a, b in zip(losses[0], line.values(end), strict=False)]
        cells = [line.variant, line.how, *map(mean_sd, losses), mean_sd(rises, "+.3f")]
        if paper := grid.paper.get((line.variant, line.how)):
            rise = paper[-1] - paper[0]
            cells += [" ".join(f"{loss:.2f}" for loss in paper), f"{rise:+.2f}"]
            cells.append(f"{statistics.mean(rises) - rise:+.2f}" if rises else "-")
            if preset in grid.of:
                both = [(ours, theirs) for ours, theirs in zip(losses, paper, strict=False) if ours]
                cells.append(" ".join(f"{statistics.mean(ours) - theirs:+.2f}" for ours, theirs in both))
        rows.append(cells + [""] * (len(heads) - len(cells)))
    return table(heads, rows)

def same_targets_table(lines):
    multiples = sorted({multiple for line in lines for protocol, multiple in line.rows if protocol == "same-targets"})
    end = multiples[-1]
    sliding = {line.variant: line.rows["sliding", 1] for line in reversed(lines)}      # positions as they were trained
    expe = {line.label: line.rows for line in lines}.get("expe", {})
    heads = ["run", "positions", *map(times, multiples), "sliding 1x", f"{times(end)} - 1x", f"{times(end)} - sliding",
             "1x - expe's", f"{times(end)} - expe's"]
    rows = []
    for line in lines:
        first, last = (line.rows["same-targets", multiple] for multiple in (1, end))
        cells = [line.variant, line.how, *(mean_sd(line.values(multiple)) for multiple in multiples)]
        cells += [mean_sd(line.values(1, "sliding")), paired(last, first), paired(last, sliding[line.variant])]
        for multiple, mine in ((1, first), (end, last)):
            cells.append("" if line.rows is expe else paired(mine, expe.get(("same-targets", multiple))))
        rows.append(cells)
    return table(heads, rows)

def probes_table(grid, evaluations, seeds):
    """The gains of both probes; "" if no variant has any."""
    asked = [("swap", 2), ("swap", 4), ("swap", 16), ("repeat", 1), ("repeat", 4), ("repeat", 16)]
    lines = [line for probe in PROBES for line in lines_of(grid, evaluations, probe, seeds)]
    rows = []
    for variant in grid.evaluations:
        found = {at: rows for line in lines if line.variant == variant for at, rows in line.rows.items()}
        gains = [paired(found.get(at), found.get(at), "unit_losses_without", "unit_losses") for at in asked]
        if set(gains) != {"-"}:
            rows.append([variant, *gains])
    return table(["run", *(f"{probe} {times(multiple)}" for probe, multiple in asked)], rows) if rows else ""

def which_of_two(lines):
    """Which of the paper's two losses of ExPE at 4x ours is nearer to, by its rise from 1x."""
    expe = {line.label: line for line in lines}["expe"]
    if not expe.values(4):
        return ""
    rises = [b - a for a, b in zip(expe.values(1), expe.values(4), strict=True)]
    rise, seeds = statistics.mean(rises), " ".join(f"{value:+.3f}" for value in rises)
    two = {"table 2": GRIDS["table2"].paper["expe", ""], "table 7": GRIDS["ablations"].paper["expe", ""]}
    papers = {f"{losses[2]:.2f} of {name}": losses[2] - losses[0] for name, losses in two.items()}
    nearer = min(papers, key=lambda name: abs(papers[name] - rise))
    said = " and ".join(f"{name} ({paper:+.2f} from 1x)" for name, paper in papers.items())
    return (f"At 4x the paper has two losses of ExPE, {said}. Ours rises by {rise:+.3f} (by seed: {seeds}): nearer to "
            f"{nearer}.\n")


# ---- pictures --------------------------------------------------------------------------------------------------------

def mean_and_sd(values):
    return np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0

def draw_losses(path, lines, title):
    """Loss by length, its standard deviation over seeds as bars."""
    drawn = {}
    for line in lines:
        found = {m: values for p, m in line.rows if p == line.family and (values := line.values(m))}
        mean, sd = np.array([mean_and_sd(values) for values in found.values()]).reshape(-1, 2).T
        drawn[line.label] = [m * line.context for m in found], mean, mean - sd, mean + sd
    ticks = sorted({x for xs, *_ in drawn.values() for x in xs})
    pictures.curves(path, drawn, title, "tokens in the window", NAT, trained=lines[0].context, ticks=ticks)

def draw_positions(path, lines, title):
    """Loss by position in the longest window that each line has a loss for."""
    drawn = {}
    for line in lines:
        _, rows = max((m, rows) for (_, m), rows in line.rows.items() if rows[0]["loss"] is not None)
        mean = np.mean([row["by_position"] for row in rows], axis=0)
        drawn[line.label] = pictures.by_position(mean, rows[0]["block"])
    pictures.curves(path, drawn, title, "position", NAT, trained=lines[0].context, marked=False)

def draw_bars(path, lines, title):
    """Bars of the losses at a few lengths."""
    groups = {line.label.replace("expe-", ""): {times(m): mean_and_sd(values) for m in (1, 2, 4, 16)
                                                if (values := line.values(m))} for line in lines}
    pictures.bars(path, groups, title, NAT)

def draw(name, preset, lines):
    """The pictures of a grid, in pictures/; returns their Markdown."""
    Path("pictures").mkdir(exist_ok=True)
    title = GRIDS[name].title
    jobs = [(family, draw_losses, f"{title} ({preset}, {family})") for family in LOSSES if lines[family]]
    if name == "ablations":
        jobs.append(("bars", draw_bars, f"{title} ({preset}, nonoverlap)"))
    if name == "table2":
        jobs.append(("positions", draw_positions, f"Loss by position ({preset}, nonoverlap)"))
    paths = [Path("pictures") / f"{preset}-{name}-{kind}.png" for kind, *_ in jobs]
    for path, (kind, job, words) in zip(paths, jobs, strict=True):
        job(path, lines[kind if kind in LOSSES else "nonoverlap"], words)
    return "\n".join(f"![{title}]({path})" for path in paths)


# ---- the page --------------------------------------------------------------------------------------------------------

def report():
    """Write RESULTS.md and the pictures from results/; its notes are kept."""
    presets = sorted(path for path in Path("results").glob("*") if path.is_dir())
    if not presets:
        raise InputError("there is nothing under results/ to report: run a grid first, such as table2 --preset mini")
    before = Path("RESULTS.md").read_text(encoding="utf-8") if Path("RESULTS.md").exists() else NOTES + EMPTY_NOTES
    if NOTES not in before:
        raise InputError(f"RESULTS.md has no line {NOTES.strip()!r}: write it above what is to be kept")
    parts = [HEAD, *itertools.chain(*map(preset_report, presets))]
    write_whole("RESULTS.md", "\n".join(parts) + before[before.index(NOTES) :])
    print("RESULTS.md is written")

def preset_report(folder):
    """The sections of one preset, whose files are in that folder; nothing is drawn before all of them are checked."""
    preset, ready = folder.name, {}      # ready: the seeds of each grid that has any
    runs, evaluations = collect(folder)
    if not runs:
        return []
    for name, grid in GRIDS.items():
        seeds = finished(grid, runs, evaluations)
        if not seeds or (name == "large" and not preset.startswith("llama")):
            continue
        if left := sorted({seed for variant, seed in runs if variant in grid.evaluations} - set(seeds)):
            print(f"{name} of {preset} has not all of seed {' and '.join(map(str, left))}, which is left out")
        check_alike(folder, grid, evaluations, seeds)
        ready[name] = seeds
    sections = [section(name, preset, runs, evaluations, seeds) for name, seeds in ready.items()]
    return [what_was_run(preset, runs), *itertools.chain(*sections), *commands(preset, runs, evaluations)]

def what_was_run(preset, runs):
    """One sentence on all runs of a preset."""
    def said(*keys):
        """What the runs' files have there, each value once."""
        values = [functools.reduce(lambda part, key: part[key], keys, run) for run in runs.values()]
        return " or ".join(dict.fromkeys(f"{value:,}" if isinstance(value, int) else str(value) for value in values))

    seconds = [run["seconds"] for run in runs.values() if run["seconds"]]
    return (f"\n## {preset}\n\n{len(runs)} runs of {said('tokens')} tokens in {said('dtype')}, trained at "
            f"{said('trained_length')} tokens on {said('data', 'source')} (vocabulary {said('data', 'vocab')}, "
            f"{said('data', 'splits', 'train', 'tokens')} training tokens); {sum(seconds) / 3600:.1f} hours of "
            f"training in all, {min(seconds):,.0f} to {max(seconds):,.0f} s a run, on {said('provenance', 'device')} "
            f"(threads: {said('provenance', 'threads')}), Python {said('provenance', 'versions', 'python')}, torch "
            f"{said('provenance', 'versions', 'torch')}, {said('provenance', 'machine').split('-')[0]}.\n")

def section(name, preset, runs, evaluations, seeds):
    """The pictures and tables of one grid, and the command that makes it."""
    grid = GRIDS[name]
    lines = {family: lines_of(grid, evaluations, family, seeds) for family in LOSSES}
    parts = [f"\n### {grid.title}\n", draw(name, preset, lines) + "\n"]
    if lines["nonoverlap"]:
        parts.append(f"By the paper's protocol (nonoverlap):\n\n{losses_table(grid, preset, lines['nonoverlap'])}")
    if name == "table2":
        parts.append(which_of_two(lines["nonoverlap"]))
    parts.append(f"The same targets with more and more context:\n\n{same_targets_table(lines['same-targets'])}")
    if probes := probes_table(grid, evaluations, seeds):
        parts.append(f"Probes: the gain from what is far back, at windows of so many times 1x:\n\n{probes}")
    flags = {runs[variant, seed].get("train_flags", "") for variant in grid.evaluations for seed in seeds}
    command = f"python -m lab.reproduce {name} --preset {preset} --seeds {','.join(map(str, seeds))}"
    parts.append("`" + "` or `".join(f"{command} -- {more}" if more else command for more in sorted(flags)) + "`\n")
    return parts

def commands(preset, runs, evaluations):
    """What made every file of a preset."""
    rows = [[f"{variant}-s{seed}", f"`{run['command']}`", f"{run['seconds'] or 0:,.0f}", f"{run['parameters']:,}",
             (run["provenance"]["git"] or "-")[:10]] for (variant, seed), run in runs.items()]
    flags = [[name, f"`{flags}`"] for name, flags in EVALUATIONS.items() if any(e == name for _, e in evaluations)]
    evaluate = f"python eval.py runs/{preset}/RUN FLAGS --json FILE"
    return [f"\n### The commands ({preset})\n\n" + table(["run", "command", "s", "parameters", "commit"], rows),
            f"Each results/{preset}/RUN.NAME.json is what `{evaluate}` writes:\n\n" + table(["NAME", "FLAGS"], flags)]
