"""The paper's tables as grids: train what is missing, evaluate it, and write results/ and RESULTS.md.

    python reproduce.py table2 --preset mini --seeds 0,1,2
    python reproduce.py table2 --preset paper-35m --dry-run
    python reproduce.py ablations --preset paper-35m -- --dtype bf16 --compile     what follows -- goes to train.py
    python reproduce.py report                                                     RESULTS.md anew, from results/ alone

A grid that was stopped or killed goes on when it is started again: complete runs are not trained again, unfinished ones
resume from their checkpoint, and an evaluation is done again only if its run's weights or --max-docs have changed.
"""

import contextlib
import functools
import importlib
import io
import itertools
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import train
from config import (
    ENCODINGS,
    PRESETS,
    CommandLine,
    InputError,
    ModelConfig,
    TrainConfig,
    listed,
    read_json,
    read_run,
    whole,
    write_json,
    write_whole,
)
from eval import MULTIPLES

VARIANTS = {pe: f"--pe {pe}" for pe in ENCODINGS} | {
    "expe-on-k": "--pe expe --on k",
    "exqpe-on-k": "--pe exqpe --on k",
    "expe-constant": "--pe expe --constant",
    "expe-l1": "--pe expe --l 1",
    "expe-learn-init": "--pe expe --learn init",
    "expe-learn-random": "--pe expe --learn random",
    "expe-once": "--pe expe --once",
}
EVALUATIONS = {  # flags of eval.py, by the name of the file that they fill
    "nonoverlap": "--per-position",
    "same-targets": "--protocol same-targets",
    "swap": "--probe swap",
    "repeat": "--probe repeat",
    "scaled": "--scale 0.5",
    "scaled-same-targets": "--protocol same-targets --scale 0.5,auto",
    "extended-same-targets": "--protocol same-targets --rope-scaling linear,ntk,dynamic,yarn,dual-chunk",
    "precision-same-targets": "--protocol same-targets --dtype bf16,fp16,int8",
}
LOSSES, PROBES = ("nonoverlap", "same-targets"), ("swap", "repeat")


class Grid(NamedTuple):
    """Variants to train, and which evaluations each of them gets."""

    title: str
    evaluations: dict  # variant: names of EVALUATIONS
    paper: dict = {}  # (variant, how): its losses at 1x, 2x, 4x, ... in the paper
    of: tuple = ()  # the presets that these losses are of


TABLE2 = ("sinusoidal", "rope", "expe", "exqpe", "expe-on-k", "exqpe-on-k", "alibi", "t5", "shaw", "learned", "nope")
GRIDS = {
    "table2": Grid(
        "Table 2: every encoding, trained alike",
        dict.fromkeys(TABLE2, LOSSES + PROBES),
        {("sinusoidal", ""): (4.00, 4.75, 5.64), ("rope", ""): (3.88, 4.37, 5.05), ("expe", ""): (3.93, 3.87, 3.88)},
        ("paper-35m",),
    ),
    "ablations": Grid(
        "Table 7: ablations of ExPE",
        dict.fromkeys(
            ("expe", "expe-constant", "expe-l1", "expe-learn-init", "expe-learn-random", "expe-once"), LOSSES
        ),
        {
            ("expe", ""): (3.93, 3.87, 4.26),
            ("expe-constant", ""): (4.26, 4.21, 4.24),
            ("expe-l1", ""): (4.48, 4.83, 6.01),
            ("expe-learn-init", ""): (3.88, 3.82, 4.89),
            ("expe-learn-random", ""): (7.33, 7.34, 7.61),
            ("expe-once", ""): (4.43, 4.82, 6.18),
        },
        ("paper-35m",),
    ),
    "scaling": Grid(
        "Table 3: ExPE's and ExQPE's values halved after training",
        dict.fromkeys(("expe", "exqpe", "expe-on-k"), (*LOSSES, "scaled", "scaled-same-targets")),
        {
            ("expe", ""): (2.63, 2.59, 2.71, 5.19, 7.56),
            ("expe", "scale 0.5"): (2.76, 2.71, 2.68, 2.98, 5.65),
            ("exqpe", ""): (2.63, 2.59, 2.68, 5.01, 7.39),
            ("exqpe", "scale 0.5"): (2.74, 2.69, 2.65, 2.76, 4.98),
        },
        ("llama-342m",),
    ),
    "large": Grid(
        "Table 1: Llama's RoPE against ExPE and ExQPE",
        dict.fromkeys(("rope", "expe", "exqpe"), LOSSES),
        {("rope", ""): (2.63, 3.45, 4.55), ("expe", ""): (2.63, 2.59, 2.71), ("exqpe", ""): (2.63, 2.59, 2.68)},
        ("llama-342m",),
    ),
    "extensions": Grid(
        "ExPE against RoPE with position interpolation, NTK, YaRN and dual chunks",
        {
            "expe": ("same-targets", "scaled-same-targets"),
            "expe-on-k": ("same-targets",),
            "rope": ("same-targets", "extended-same-targets"),
        },
    ),
    "precision": Grid(
        "ExPE and ExQPE in fewer bits (the claim of section 2.3)",
        dict.fromkeys(("expe", "exqpe", "expe-on-k"), ("same-targets", "precision-same-targets")),
    ),
}
OWN = {"--preset", "--seed", "--out", "--resume", "--overwrite", "--device", "--help", "-h"} | {
    flag for flags in VARIANTS.values() for flag in flags.split() if flag.startswith("-")
}
ALL = ("table2", "ablations", "scaling", "extensions", "precision")
NOTES = "\n## Notes\n"
EMPTY_NOTES = "\nWrite here: what stands below this heading is kept when the rest is made anew.\n"


# ---- the work --------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One run to train, or one evaluation of it."""

    variant: str
    seed: int
    run: Path
    evaluation: str | None  # None: train it
    file: Path  # what it leaves under results/
    command: list  # train.py or eval.py and its flags
    train_flags: str  # what followed --
    max_docs: int | None
    model: ModelConfig
    train: TrainConfig


def jobs_of(args):
    """Every job of the grids that are asked for, each run before what it is evaluated by."""
    wanted = {}
    for name in args.grids:
        for variant, evaluations in GRIDS[name].evaluations.items():
            wanted.setdefault(variant, {}).update(dict.fromkeys(evaluations))
    jobs, own = [], OWN & {flag.partition("=")[0] for flag in args.train_flags}
    device = ["--device", args.device] if args.device else []
    documents = ["--max-docs", str(args.max_docs)] if args.max_docs is not None else []
    if own:
        raise InputError(f"{own.pop()} is the grid's own: leave it out of what follows --")
    train_flags = shlex.join(args.train_flags)
    for seed, (variant, evaluations) in itertools.product(args.seeds, wanted.items()):
        run = Path("runs") / args.preset / f"{variant}-s{seed}"
        flags = ["--preset", args.preset, *shlex.split(VARIANTS[variant]), "--seed", str(seed), "--out", str(run)]
        here = Path("results") / args.preset
        name = f"{variant}-s{seed}"
        command = ["train.py", *flags, *device, *args.train_flags]
        given = train.command_line().parse_args(command[1:])
        configs = train.configure(given, *PRESETS[args.preset])
        if (run / "config.json").exists():
            given.resume = True
            train.stored_run(run, given)  # InputError if the flags are not the run's
        elif run.exists():
            raise InputError(f"{run} holds no config.json, so it is not a run directory: move it away")
        asked = (train_flags, args.max_docs, *configs)
        jobs.append(Job(variant, seed, run, None, here / f"{name}.run.json", command, *asked))
        for evaluation in evaluations:
            file = here / f"{name}.{evaluation}.json"
            command = ["eval.py", str(run), *shlex.split(EVALUATIONS[evaluation])]
            command += [*documents, *device, "--json", str(file)]
            jobs.append(Job(variant, seed, run, evaluation, file, command, *asked))
    return jobs


def weights_of(run):
    """(steps done, steps in all, SHA-256 of the weights) of a run, or (0, None, None) if there is none."""
    if not (run / "config.json").exists():
        return 0, None, None
    _, config, record = read_run(run)
    checkpoint = record["checkpoint"]
    return checkpoint["step"], config.steps, checkpoint["files"]["model.safetensors"]["sha256"]


def done(job):
    """Whether a job's file is there, whole, of the complete run's weights (by their hash), and of as many documents."""
    step, steps, weights = weights_of(job.run)
    if step != steps:
        return False
    try:
        found = read_json(job.file)
        if job.evaluation is None:
            return found["weights"] == weights
        return (found[0]["weights"], found[0].get("max_docs")) == (weights, job.max_docs)
    except (InputError, LookupError, TypeError):  # missing, or cut short: it is made again
        return False


def call(command, quiet=False):
    """Run a script of ours as its command line does, in this process, so that whoever kills one kills the other."""
    main, argv = importlib.import_module(command[0].removesuffix(".py")).main, sys.argv
    try:
        sys.argv = command
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            main()
    finally:
        sys.argv = argv


def do(job):
    """Train or evaluate, and leave the job's file."""
    if job.evaluation is not None:
        return call(job.command, quiet=True)
    import torch

    step, steps, _ = weights_of(job.run)
    if steps is None or step < steps:
        torch.compiler.reset()  # what was compiled for another run
        call(job.command + ["--resume"] * (steps is not None))
    model, config, record = read_run(job.run)
    from model_numpy import count_parameters

    write_json(job.file, {
        "variant": job.variant,
        "seed": job.seed,
        "train_flags": job.train_flags,
        "command": shlex.join(["python", *job.command]),
        "parameters": count_parameters(model)[0],
        "tokens": config.steps * config.batch_size * model.context,
        "seconds": record["checkpoint"].get("seconds"),
        "trained_length": model.context,
        "dtype": config.dtype,
        "provenance": record["provenance"],
        "data": {name: record["data"][name] for name in ("source", "vocab", "splits")},
        "weights": record["checkpoint"]["files"]["model.safetensors"]["sha256"],
    })  # fmt: skip


def work(job):
    """About how long a job takes, in tokens of training: one that is read costs a third of one that is trained on."""
    if job.evaluation is None:
        return job.train.steps * job.train.batch_size * job.model.context
    flags = EVALUATIONS[job.evaluation]
    windows = 32 if "same-targets" in flags or "swap" in flags else 64 if "repeat" in flags else 320
    return (1 + flags.count(",")) * windows * sum(MULTIPLES) * job.model.context / 3


def rate_of(args, jobs):
    """(training tokens a second, where that is from): of the finished runs, or of two small steps made now."""
    rates = [found["tokens"] / found["seconds"] for job in jobs if job.evaluation is None and done(job)
             and (found := read_json(job.file))["seconds"]]  # fmt: skip
    if rates:
        return statistics.median(rates), "the rate of the finished runs"
    import numpy as np

    from model_torch import pick_device
    from train import TorchBackend

    model, config = jobs[0].model, jobs[0].train
    backend = TorchBackend(model, config, pick_device(args.device or "auto"), False)
    batch = np.zeros((min(8, config.micro_batch), model.context + 1), dtype=np.int64)
    for _ in range(2):
        begin = time.perf_counter()
        float(backend.step(batch, 0)[0])
    return batch[:, 1:].size / (time.perf_counter() - begin), "one small step, uncompiled, measured now"


def show_plan(args, jobs):
    """--dry-run: the runs, their tokens, what is left of them, and an estimate."""
    left = [job for job in jobs if not done(job)]
    for job in (job for job in jobs if job.evaluation is None):
        step, steps, _ = weights_of(job.run)
        mine = [other for other in left if other.run == job.run and other.evaluation]
        state = "to train" if steps is None else "trained" if step == steps else f"at step {step:,} of {steps:,}"
        print(f"{shlex.join(['python', *job.command])}\n    {work(job):,} tokens, {state}; "
              f"to evaluate: {', '.join(other.evaluation for other in mine) or 'nothing'}")  # fmt: skip
    tokens = sum(work(job) for job in jobs if job.evaluation is None)
    rate, source = rate_of(args, jobs)
    runs, trainings = (sum(job.evaluation is None for job in some) for some in (jobs, left))
    print(f"\n{runs} runs, {tokens:,} training tokens; left: {trainings} runs and {len(left) - trainings} evaluations, "
          f"about {train.clock(sum(map(work, left)) / rate)} by {source}")


def run_grid(args, jobs):
    """Do all that is left, under one bar for the whole grid."""
    from tqdm import tqdm

    left = [job for job in jobs if not done(job)]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done", flush=True)
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=sum(work(job) for job in left), bar_format=bar_format, disable=not sys.stderr.isatty()) as bar:
        for i, job in enumerate(left):
            what = f"{job.run} {job.evaluation or 'training'}"
            bar.set_description(f"job {i + 1} of {len(left)}, {what}")
            if not sys.stderr.isatty():
                print(f"job {i + 1} of {len(left)}: {what}", flush=True)
            job.file.parent.mkdir(parents=True, exist_ok=True)
            do(job)
            bar.update(work(job))


# ---- the report ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """What the seeds of one variant, its positions laid in one way, say together."""

    variant: str
    how: str
    context: int
    rows: dict  # (protocol, multiple of the trained length): its rows, one a seed

    def values(self, multiple, protocol=None):
        """One loss a seed, in the first protocol unless another is named; [] where there is none."""
        protocol = protocol or next(iter(self.rows))[0]
        found = [row["loss"] for row in self.rows.get((protocol, multiple), [])]
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
            first, rows = (evaluations[variant, name][s] for s in (seeds[0], seed))
            ways, others = ([(row["how"], row["protocol"], row["length"]) for row in some] for some in (rows, first))
            file = folder / f"{variant}-s{seed}.{name}.json"
            for row in rows:
                if row["loss"] is not None:
                    what = row["targets_sha256"], row["n_documents"], len(row["unit_losses"])
                    other, right = scored.setdefault((row["protocol"], row["length"]), (file, what))
                    if what != right:
                        raise InputError(f"{file} was scored on other documents than {other}: delete the one that is "
                                         "wrong, and run its grid again, with one --max-docs or none")  # fmt: skip
            if ways != others:
                raise InputError(f"{file} has other rows than seed {seeds[0]}: delete it, and run its grid again")


def lines_of(grid, evaluations, family, seeds):
    """The Lines of a grid by one of LOSSES or PROBES, from whichever of its evaluations measured them."""
    lines = []
    for variant, names in grid.evaluations.items():
        ways = {}
        for name, seed in itertools.product(names, seeds):
            for row in evaluations[variant, name][seed]:
                if row["protocol"] == family or (family == "same-targets" and row["protocol"] == "sliding"):
                    at = (row["protocol"], row["length"] // row["trained_length"])
                    ways.setdefault(row["how"], {}).setdefault(at, []).append(row)
        for how, rows in ways.items():
            lines.append(Line(variant, how, next(iter(rows.values()))[0]["trained_length"], rows))
    return lines


def mean_sd(values, form=".3f"):
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def paired(rows, others, key="unit_losses", other_key="unit_losses"):
    """A difference between two rows of each seed, averaged over seeds, with its bootstrap interval over documents."""
    import numpy as np

    from measures import intervals

    if not rows or not others or any(row["loss"] is None for row in rows + others):
        return "-"
    differences = [np.subtract(x[key], y[other_key]) for x, y in zip(rows, others, strict=True)]
    return "{:+.3f} ({:+.3f}, {:+.3f})".format(*intervals([np.mean(differences, axis=0)], rows[0]["unit_targets"])[0])


def table(heads, rows):
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def times(multiple):
    return f"{multiple:g}x"


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
        cells = [line.variant, line.how, *map(mean_sd, losses), mean_sd(rises, "+.3f").replace("± +", "± ")]
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
    sliding = {line.variant: line.rows["sliding", 1] for line in reversed(lines)}  # positions as they were trained
    expe = {(line.variant, line.how): line.rows for line in lines}.get(("expe", ""), {})
    heads = ["run", "positions", *map(times, multiples), "sliding 1x", f"{times(multiples[-1])} - 1x",
             f"{times(multiples[-1])} - sliding", "1x - expe's", f"{times(multiples[-1])} - expe's"]  # fmt: skip
    rows = []
    for line in lines:
        losses = [mean_sd(line.values(multiple, protocol="same-targets")) for multiple in multiples]
        last = line.rows["same-targets", multiples[-1]]
        rows.append([line.variant, line.how, *losses, mean_sd(line.values(1, protocol="sliding")),
                     paired(last, line.rows["same-targets", 1]), paired(last, sliding[line.variant]),
                     *("" if line.rows is expe else paired(line.rows["same-targets", m], expe.get(("same-targets", m)))
                       for m in (1, multiples[-1]))])  # fmt: skip
    return table(heads, rows)


def probes_table(grid, evaluations, seeds):
    found = {probe: {line.variant: line for line in lines_of(grid, evaluations, probe, seeds)} for probe in PROBES}
    asked = [("swap", 2), ("swap", 4), ("swap", 16), ("repeat", 1), ("repeat", 4), ("repeat", 16)]
    rows = []
    for variant in grid.evaluations:
        cells = [variant]
        for probe, multiple in asked:
            rows_there = found[probe][variant].rows.get((probe, multiple)) if variant in found[probe] else None
            cells.append(paired(rows_there, rows_there, "unit_losses_without", "unit_losses"))
        if set(cells[1:]) != {"-"}:
            rows.append(cells)
    return table(["run", *(f"{probe} {times(multiple)}" for probe, multiple in asked)], rows) if rows else ""


def which_of_two(lines):
    """Which of the paper's two losses of ExPE at 4x ours is nearer to, by its rise from 1x."""
    for line in lines:
        if (line.variant, line.how) == ("expe", "") and (at_4 := line.values(4)):
            rises = [b - a for a, b in zip(line.values(1), at_4, strict=True)]
            rise, seeds = statistics.mean(rises), " ".join(f"{value:+.3f}" for value in rises)
            two = {"table 2": GRIDS["table2"].paper["expe", ""], "table 7": GRIDS["ablations"].paper["expe", ""]}
            papers = {f"{losses[2]:.2f} of {name}": losses[2] - losses[0] for name, losses in two.items()}
            nearer = min(papers, key=lambda name: abs(papers[name] - rise))
            said = " and ".join(f"{name} ({paper:+.2f} from 1x)" for name, paper in papers.items())
            return (f"At 4x the paper has two losses of ExPE, {said}. Ours rises by {rise:+.3f} (by seed: {seeds}): "
                    f"nearer to {nearer}.\n")  # fmt: skip
    return ""


def draw(name, preset, lines, grid):
    """The pictures of a grid, in pictures/; returns their Markdown."""
    import numpy as np

    import pictures

    Path("pictures").mkdir(exist_ok=True)

    def path(kind):
        return Path("pictures") / f"{preset}-{name}-{kind}.png"

    def label(line):
        return f"{line.variant} {line.how}".strip()

    made = []
    for family, drawn in lines.items():
        band = {}
        for line in drawn:
            points = {m: line.values(m, protocol=family) for p, m in line.rows if p == family}
            points = {m: values for m, values in points.items() if values}
            x, mean = [m * line.context for m in points], np.array([np.mean(v) for v in points.values()])
            sd = np.array([np.std(v, ddof=1) if len(v) > 1 else 0 for v in points.values()])
            band[label(line)] = (x, mean, mean - sd, mean + sd)
        if band:
            ticks = sorted({x for line in band.values() for x in line[0]})
            pictures.curves(path(family), band, f"{grid.title} ({preset}, {family})", "tokens in the window",
                            "loss, nats a token", trained=drawn[0].context, ticks=ticks)  # fmt: skip
            made.append(path(family))
    if name == "ablations":
        groups = {label(line).replace("expe-", ""): {times(m): (np.mean(v), np.std(v, ddof=1) if len(v) > 1 else 0)
                  for m in (1, 2, 4, 16) if (v := line.values(m))} for line in lines["nonoverlap"]}  # fmt: skip
        pictures.bars(path("bars"), groups, f"{grid.title} ({preset}, nonoverlap)", "loss, nats a token")
        made.append(path("bars"))
    if name == "table2":
        curves = {}
        for line in lines["nonoverlap"]:
            rows = max(((m, rows) for (_, m), rows in line.rows.items() if rows[0]["loss"] is not None))[1]
            mean = np.mean([row["by_position"] for row in rows], axis=0)
            curves[label(line)] = pictures.by_position(mean, rows[0]["block"])
        if curves:
            pictures.curves(path("positions"), curves, f"Loss by position ({preset}, nonoverlap)", "position",
                            "loss, nats a token", trained=lines["nonoverlap"][0].context, marked=False)  # fmt: skip
            made.append(path("positions"))
    return "\n".join(f"![{grid.title}]({made_path})" for made_path in made)


def report():
    """Write RESULTS.md and the pictures from results/; its notes are kept."""
    presets = sorted(path for path in Path("results").glob("*") if path.is_dir())
    if not presets:
        raise InputError("there is nothing under results/ to report: run a grid first, such as table2 --preset mini")
    kept = Path("RESULTS.md").read_text(encoding="utf-8") if Path("RESULTS.md").exists() else NOTES + EMPTY_NOTES
    if NOTES not in kept:
        raise InputError(f"RESULTS.md has no line {NOTES.strip()!r}: write it above what is to be kept")
    notes = kept[kept.index(NOTES) + len(NOTES) :]
    parts = [
        "# Results\n\nMade by `python reproduce.py report` from the files under results/, one a run and evaluation; "
        "only the notes at the end are written by hand. Losses are in nats a token, as the mean over seeds ± their "
        "standard deviation. 1x is the trained length. `nonoverlap` is the paper's protocol; `same-targets` scores the "
        "same last tokens of each document with more and more context. 95% intervals (in brackets) are a paired "
        "bootstrap over documents of the mean over seeds. README says what each protocol can and cannot show.\n"
    ]
    for folder in presets:
        runs, evaluations = collect(folder)
        if runs:
            parts += preset_report(folder, runs, evaluations)
    write_whole("RESULTS.md", "\n".join(parts) + NOTES + notes)
    print("RESULTS.md is written")


def preset_report(folder, runs, evaluations):
    """The sections of one preset, whose files are in that folder."""
    preset = folder.name

    def said(*keys):
        """What the runs' files have there, each value once."""
        values = [functools.reduce(lambda part, key: part[key], keys, run) for run in runs.values()]
        return " or ".join(dict.fromkeys(f"{value:,}" if isinstance(value, int) else str(value) for value in values))

    ready = {}  # the seeds of each grid that has any; nothing is drawn before all of them are checked
    for name, grid in GRIDS.items():
        seeds = finished(grid, runs, evaluations)
        if not seeds or (name == "large" and not preset.startswith("llama")):
            continue
        if left := sorted({seed for variant, seed in runs if variant in grid.evaluations} - set(seeds)):
            print(f"{name} of {preset} has not all of seed {' and '.join(map(str, left))}, which is left out")
        check_alike(folder, grid, evaluations, seeds)
        ready[name] = seeds
    seconds = [run["seconds"] for run in runs.values() if run["seconds"]]
    parts = [
        f"\n## {preset}\n\n{len(runs)} runs of {said('tokens')} tokens in {said('dtype')}, trained at "
        f"{said('trained_length')} tokens on {said('data', 'source')} (vocabulary {said('data', 'vocab')}, "
        f"{said('data', 'splits', 'train', 'tokens')} training tokens); {sum(seconds) / 3600:.1f} hours of training in "
        f"all, {min(seconds):,.0f} to {max(seconds):,.0f} s a run, on {said('provenance', 'device')} (threads: "
        f"{said('provenance', 'threads')}), Python {said('provenance', 'versions', 'python')}, torch "
        f"{said('provenance', 'versions', 'torch')}, {said('provenance', 'machine').split('-')[0]}.\n"
    ]
    for name, seeds in ready.items():
        grid = GRIDS[name]
        lines = {family: lines_of(grid, evaluations, family, seeds) for family in LOSSES}
        parts.append(f"\n### {grid.title}\n")
        parts.append(draw(name, preset, lines, grid) + "\n")
        if lines["nonoverlap"]:
            parts.append(f"By the paper's protocol (nonoverlap):\n\n{losses_table(grid, preset, lines['nonoverlap'])}")
        if name == "table2":
            parts.append(which_of_two(lines["nonoverlap"]))
        parts.append(f"The same targets with more and more context:\n\n{same_targets_table(lines['same-targets'])}")
        if probes := probes_table(grid, evaluations, seeds):
            parts.append(f"Probes: the gain from what is far back, at windows of so many times 1x:\n\n{probes}")
        flags = {runs[variant, seed].get("train_flags", "") for variant in grid.evaluations for seed in seeds}
        command = f"python reproduce.py {name} --preset {preset} --seeds {','.join(map(str, seeds))}"
        parts.append("`" + "` or `".join(f"{command} -- {more}" if more else command for more in sorted(flags)) + "`\n")
    names = {job: flags for job, flags in EVALUATIONS.items() if any(e == job for _, e in evaluations)}
    parts.append(f"\n### The commands ({preset})\n\n" + table(
        ["run", "command", "s", "parameters", "commit"],
        [[f"{variant}-s{seed}", f"`{run['command']}`", f"{run['seconds'] or 0:,.0f}", f"{run['parameters']:,}",
          (run["provenance"]["git"] or "-")[:10]] for (variant, seed), run in runs.items()],
    ))  # fmt: skip
    evaluate = f"python eval.py runs/{preset}/RUN FLAGS --json FILE"
    parts.append(f"Each results/{preset}/RUN.NAME.json is what `{evaluate}` writes:\n\n"
                 + table(["NAME", "FLAGS"], [[name, f"`{flags}`"] for name, flags in names.items()]))  # fmt: skip
    return parts


# ---- as a script -----------------------------------------------------------------------------------------------------


def command_line():
    parser = CommandLine(
        description="Train and evaluate the paper's tables as grids, and write results/ and RESULTS.md.",
        epilog="grids:\n" + "\n".join(f"  {name:12}{grid.title}" for name, grid in GRIDS.items())
        + f"\n  {'all':12}{', '.join(ALL)}\n  {'report':12}no run: RESULTS.md and the pictures anew\n\n"
        "what follows -- goes to train.py:\n"
        "  python reproduce.py table2 --preset paper-35m --seeds 0 -- --dtype bf16 --compile --data my_books/",
    )  # fmt: skip
    parser.add_argument("grid", choices=(*GRIDS, "all", "report"), metavar="GRID", help="one of those below")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="mini", help="the model (default: mini)")
    parser.add_argument("--seeds", type=listed(whole), default=[0, 1, 2], metavar="N,N,...", help="default: 0,1,2")
    parser.add_argument("--max-docs", type=whole, metavar="N", help="score the first N held-out documents only")
    parser.add_argument("--device", help="of training and evaluation (default: a GPU if there is one)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, their tokens and an estimate")
    return parser


def main():
    parser = command_line()
    with parser.one_line_errors():
        argv = sys.argv[1:]
        cut = argv.index("--") if "--" in argv else len(argv)
        args = parser.parse_args(argv[:cut])
        args.train_flags = argv[cut + 1 :]
        args.grids = ALL if args.grid == "all" else (args.grid,)
        if args.grid == "report":
            if len(argv) > 1:
                parser.error(f"report reads all of results/ and takes no flag: leave out {argv[1]}")
            return report()
        if args.seeds and min(args.seeds) < 0:
            parser.error(f"--seeds must be numbers from 0 up, got {min(args.seeds)}")
        if args.max_docs is not None and args.max_docs < 1:
            parser.error(f"--max-docs must be at least 1, got {args.max_docs}")
        if args.device:
            from model_torch import pick_device

            pick_device(args.device)  # InputError if there is none
        jobs = jobs_of(args)
        if args.dry_run:
            return show_plan(args, jobs)
        run_grid(args, jobs)
        report()


if __name__ == "__main__":
    main()
