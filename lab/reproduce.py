"""The paper's tables as grids: train what is missing, evaluate it, and write results/ and RESULTS.md.

    python -m lab.reproduce table2 --preset mini --seeds 0,1,2
    python -m lab.reproduce table2 --preset paper-35m --dry-run
    python -m lab.reproduce ablations --preset paper-35m -- --dtype bf16 --compile     what follows -- is train.py's
    python -m lab.reproduce report                                     RESULTS.md anew, from results/ alone

A grid that was stopped or killed goes on when it is started again: complete runs are not trained again, unfinished ones
resume from their checkpoint, and an evaluation is done again only if its run's weights or --max-docs have changed.
"""

import contextlib
import io
import itertools
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import eval as evaluation
import train
from config import PRESETS, InputError, ModelConfig, TrainConfig
from lab.grids import ALL, EVALUATIONS, GRIDS, VARIANTS
from model_numpy import count_parameters
from runs import CommandLine, at_least, listed, pick_device, read_json, read_run, write_json

# torch and what imports it are imported where they are used, so that --help and a wrong flag answer at once.

OWN = {"--preset", "--seed", "--out", "--resume", "--overwrite", "--device", "--help", "-h"} | {
    flag for flags in VARIANTS.values() for flag in flags.split() if flag.startswith("-")}


# ---- what is to do ---------------------------------------------------------------------------------------------------

class Job(NamedTuple):
    """One run to train, or one evaluation of it."""

    variant: str
    seed: int
    run: Path
    evaluation: str | None               # None: train it
    file: Path                           # what it leaves under results/
    command: list                        # flags of train.py or eval.py
    train_flags: str                     # what followed --
    max_docs: int | None
    model: ModelConfig
    train: TrainConfig

    @property
    def line(self):
        """The command line that does the same."""
        return shlex.join(["python", "eval.py" if self.evaluation else "train.py", *self.command])

    @property
    def work(self):
        """About how long it takes, in tokens of training: one that is read costs a third of one that is trained on."""
        if self.evaluation is None:
            return self.train.steps * self.train.batch_size * self.model.context
        flags = EVALUATIONS[self.evaluation]
        windows = 32 if "same-targets" in flags or "swap" in flags else 64 if "repeat" in flags else 320
        return (1 + flags.count(",")) * windows * sum(evaluation.MULTIPLES) * self.model.context / 3

def jobs_of(args):
    """Every job of the grids that are asked for, each run before its evaluations."""
    if own := OWN & {flag.partition("=")[0] for flag in args.train_flags}:
        raise InputError(f"{own.pop()} is the grid's own: leave it out of what follows --")
    wanted = {}                          # the evaluations of each variant, without repeats
    for variant, names in (item for name in args.grids for item in GRIDS[name].evaluations.items()):
        wanted.setdefault(variant, {}).update(dict.fromkeys(names))
    jobs = [jobs_of_run(variant, seed, names, args) for seed in args.seeds for variant, names in wanted.items()]
    return list(itertools.chain(*jobs))

def jobs_of_run(variant, seed, evaluations, args):
    """A run's training and its evaluations; InputError if it is there, and not by these flags."""
    name, results = f"{variant}-s{seed}", Path("results") / args.preset
    run, device = Path("runs") / args.preset / name, ["--device", args.device] if args.device else []
    command = ["--preset", args.preset, *shlex.split(VARIANTS[variant]), "--seed", str(seed), "--out", str(run)]
    command += [*device, *args.train_flags]
    given = train.command_line().parse_args(command)
    asked = shlex.join(args.train_flags), args.max_docs, *train.configure(given, *PRESETS[args.preset])
    if (run / "config.json").exists():
        given.resume = True
        train.stored_run(run, given)     # InputError if the flags are not the run's
    elif run.exists():
        raise InputError(f"{run} holds no config.json, so it is not a run directory: move it away")
    jobs = [Job(variant, seed, run, None, results / f"{name}.run.json", command, *asked)]
    documents = ["--max-docs", str(args.max_docs)] if args.max_docs is not None else []
    for what in evaluations:
        file = results / f"{name}.{what}.json"
        command = [str(run), *shlex.split(EVALUATIONS[what]), *documents, *device, "--json", str(file)]
        jobs.append(Job(variant, seed, run, what, file, command, *asked))
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
    except (InputError, LookupError, TypeError):                       # missing, or cut short: it is made again
        return False


# ---- doing it --------------------------------------------------------------------------------------------------------

def do(job):
    """Train or evaluate, and leave the job's file; in this process, so that whoever kills one kills the other."""
    if job.evaluation is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            return evaluation.main(job.command)
    import torch
    step, steps, _ = weights_of(job.run)
    if steps is None or step < steps:
        torch.compiler.reset()                                         # what was compiled for another run
        train.main(job.command + ["--resume"] * (steps is not None))
    model, config, record = read_run(job.run)
    write_json(job.file, {
        "variant": job.variant, "seed": job.seed, "train_flags": job.train_flags, "command": job.line,
        "parameters": count_parameters(model)[0], "tokens": config.steps * config.batch_size * model.context,
        "seconds": record["checkpoint"].get("seconds"), "trained_length": model.context, "dtype": config.dtype,
        "provenance": record["provenance"],
        "data": {name: record["data"][name] for name in ("source", "vocab", "splits")},
        "weights": record["checkpoint"]["files"]["model.safetensors"]["sha256"],
    })

def rate_of(args, runs, left):
    """(training tokens a second, where that is from): of the finished runs, or of two small steps made now."""
    files = [read_json(job.file) for job in runs if job not in left]
    if rates := [found["tokens"] / found["seconds"] for found in files if found["seconds"]]:
        return statistics.median(rates), "the rate of the finished runs"
    model, config = runs[0].model, runs[0].train
    backend = train.TorchBackend(model, config, pick_device(args.device or "auto"), False)
    batch = np.zeros((min(8, config.micro_batch), model.context + 1), dtype=np.int64)
    for _ in range(2):
        begin = time.perf_counter()
        float(backend.step(batch, 0)[0])
    return batch[:, 1:].size / (time.perf_counter() - begin), "one small step, uncompiled, measured now"

def show_plan(args, jobs):
    """--dry-run: the runs, their tokens, what is left of them, and an estimate."""
    left, runs = [job for job in jobs if not done(job)], [job for job in jobs if job.evaluation is None]
    for job in runs:
        step, steps, _ = weights_of(job.run)
        state = "to train" if steps is None else "trained" if step == steps else f"at step {step:,} of {steps:,}"
        names = [other.evaluation for other in left if other.run == job.run and other.evaluation]
        print(f"{job.line}\n    {job.work:,} tokens, {state}; to evaluate: {', '.join(names) or 'nothing'}")
    rate, source = rate_of(args, runs, left)
    trainings = sum(job.evaluation is None for job in left)
    print(f"\n{len(runs)} runs, {sum(job.work for job in runs):,} training tokens; left: {trainings} runs and "
          f"{len(left) - trainings} evaluations, about {train.clock(sum(job.work for job in left) / rate)} by {source}")

def run_grid(jobs):
    """Do all that is left, under one bar for the whole grid."""
    left, quiet = [job for job in jobs if not done(job)], not sys.stderr.isatty()
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done", flush=True)
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=sum(job.work for job in left), bar_format=bar_format, disable=quiet) as bar:
        for i, job in enumerate(left):
            what = f"job {i + 1} of {len(left)}: {job.run} {job.evaluation or 'training'}"
            bar.set_description(what)
            if quiet:
                print(what, flush=True)
            job.file.parent.mkdir(parents=True, exist_ok=True)
            do(job)
            bar.update(job.work)


# ---- as a script -----------------------------------------------------------------------------------------------------

def main(argv=None):
    from lab.report import report
    argv = sys.argv[1:] if argv is None else argv
    titles = {name: grid.title for name, grid in GRIDS.items()}
    titles |= {"all": ", ".join(ALL), "report": "no run: RESULTS.md and the pictures anew"}
    parser = CommandLine(
        prog="python -m lab.reproduce",
        description="Train and evaluate the paper's tables as grids, and write results/ and RESULTS.md.",
        epilog="grids:\n" + "".join(f"  {name:12}{title}\n" for name, title in titles.items()) +
               "\nwhat follows -- goes to train.py:\n  python -m lab.reproduce table2 --preset paper-35m --seeds 0 -- "
               "--dtype bf16 --compile --data my_books/")
    parser.add_argument("grid", choices=(*GRIDS, "all", "report"), metavar="GRID", help="one of those below")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="mini", help="the model (default: mini)")
    parser.add_argument("--seeds", type=listed(at_least(0)), default=[0, 1, 2], metavar="N,N,...",
                        help="default: 0,1,2")
    parser.add_argument("--max-docs", type=at_least(1), metavar="N", help="score the first N held-out documents only")
    parser.add_argument("--device", help="of training and evaluation (default: a GPU if there is one)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, their tokens and an estimate")
    with parser.one_line_errors():
        cut = argv.index("--") if "--" in argv else len(argv)
        args = parser.parse_args(argv[:cut])
        args.train_flags, args.grids = argv[cut + 1 :], ALL if args.grid == "all" else (args.grid,)
        if args.grid == "report":
            if len(argv) > 1:
                parser.error(f"report reads all of results/ and takes no flag: leave out {argv[1]}")
            return report()
        if args.device:
            pick_device(args.device)                                   # InputError if there is none
        jobs = jobs_of(args)
        if args.dry_run:
            return show_plan(args, jobs)
        run_grid(jobs)
        report()

if __name__ == "__main__":
    main()
