"""The paper's tables as grids: train what is missing, evaluate it, report it.

    python -m lab.reproduce table2
    python -m lab.reproduce table2 --jobs 8    eight runs at once
    python -m lab.reproduce table2 --commands  what is left, one command a line
    python -m lab.reproduce table2 --preset paper-35m --dry-run
    python -m lab.reproduce ablations -- --dtype bf16  train.py's flags after --
    python -m lab.reproduce tuned              trials of each method; then test
    python -m lab.reproduce report             the pages of results/ alone

A grid that was stopped or killed goes on when it is started again: complete
runs are not trained again, unfinished ones resume from their checkpoint, and an
evaluation is done again only if its run's weights or --max-docs have changed.
Whoever trains or evaluates a run locks its directory. So a grid may be started
several times, on one machine or on several that share the folder: each run is
done once, and what a killed process leaves is done by another.
"""

import argparse
import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import textwrap
import time
import timeit
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

import eval as evaluation
import train
from common import CHECKPOINT, CommandLine, at_least, checkpoint_info, holds_files, listed, lock, pick_device, read_run
from config import PRESETS, InputError
from eval import MULTIPLES
from lab import measure
from lab.files import clock, read_json, write_json
from lab.grids import ALL, DATA, EVALUATIONS, GRIDS, SEEDS, VARIANTS, flags_of, place_of, preset_of
from model_numpy import count_parameters
from studies import task_grid
from studies import tuning as tuned

WINDOWS = 150  # read at each length by an evaluation, about: for the estimate alone
OWN = {"--preset", "--seed", "--out", "--resume", "--overwrite", "--device", "--help", "-h"}
PAUSE = 2      # seconds, before runs that other processes work on are looked at again
PASS = 120     # seconds, after which `tuned` and `tasks` are asked again what is next


# ---- what is to do ---------------------------------------------------------------------------------------------------

class Job(NamedTuple):
    """One run to train, or one evaluation of it."""

    variant: str
    seed: int
    run: Path
    evaluation: str | None               # None: train it
    file: Path                           # what it leaves under results/
    command: list                        # the words of its command line
    work: float                          # about its time, in tokens of training
    args: argparse.Namespace             # the flags of all of them

def jobs_of(args):
    """Every job of the grids that are asked for, each run before its evaluations."""
    wanted = {}                          # the evaluations of each run, without repeats
    for variant, seed, names in runs_of(args):
        wanted.setdefault((variant, seed), {}).update(dict.fromkeys(names))
    own = OWN.union(*(VARIANTS[variant].split() for variant, _ in wanted), *(flags.split() for flags in data_of(args)))
    if taken := [flag for flag in args.train_flags if flag.startswith("-") and flag.partition("=")[0] in own]:
        raise InputError(f"{taken[0].partition('=')[0]} is the grid's own: leave it out of what follows --")
    jobs = [job for (variant, seed), names in wanted.items() for job in jobs_of_run(variant, seed, names, args)]
    if args.run and args.run not in {job.run.name for job in jobs}:
        raise InputError(f"--run must be one of the grid's runs, such as {jobs[0].run.name}, got {args.run}")
    return [job for job in jobs if args.run in (None, job.run.name)]

def runs_of(args):
    """(variant, seed, evaluations) of every run of the grids that are asked for; of `tuned`, as far as it has come."""
    if args.place != args.preset != (preset := preset_of(args.grids[0])):
        raise InputError(f"{args.grids[0]} varies what the preset {preset} has: leave out --preset")
    if args.grids == ("tasks",):
        return task_grid.runs(args.seeds, lambda name: trial_accuracy(name, args))
    if args.grids == ("tuned",):
        if tuned.SEED in args.seeds:
            raise InputError(f"seed {tuned.SEED} is that of the trials: give tuned --seeds without it")
        return tuned.runs(args.seeds, lambda name: trial_loss(name, args))
    return [(variant, seed, names) for seed in args.seeds for grid in args.grids
            for variant, names in GRIDS[grid].evaluations.items()]

def data_of(args):
    """The flags of train.py, and of eval.py, that say which text a place's runs are trained on and scored by."""
    return DATA.get(args.place, ("", ""))

def trial_loss(name, args):
    """The loss by which `tuned` chooses, or None if the trial is not done."""
    job = jobs_of_run(name, tuned.SEED, tuned.evaluations_of(name)[:1], args)[-1]
    return read_json(job.file)[0]["loss"] if done(job) else None

def trial_accuracy(name, args):
    """The accuracy at the trained length by which the grid `tasks` chooses, or None if the trial is not done."""
    job = jobs_of_run(name, task_grid.SEED, ("trial",), args)[-1]
    if not done(job):
        return None
    rows = read_json(job.file) if job.file.exists() else recorded(job)["rows"]
    return rows[0]["accuracy"]

def jobs_of_run(variant, seed, evaluations, args):
    """A run's training and its evaluations; InputError if it is there, and not by these flags."""
    name = f"{variant}-s{seed}"
    run = Path("runs") / args.place / name
    results = Path("results") / args.place
    device = ["--device", args.device] if args.device else []
    command = ["python", "train.py", "--preset", args.preset, *shlex.split(flags_of(variant, seed, args.preset))]
    data, held_out = map(shlex.split, data_of(args))
    command += ["--seed", str(seed), "--out", str(run), *data, *device, *args.train_flags]
    _, model, config = train.read_flags(command[2:])
    if (run / "config.json").exists():
        train.read_flags([*command[2:], "--resume"])
    elif holds_files(run):
        raise InputError(f"{run} holds no config.json, so it is not a run directory: move it away")
    tokens = config.steps * config.batch_size * model.context
    file = run / "run.json" if args.place == task_grid.PLACE else results / f"{name}.run.json"
    jobs = [Job(variant, seed, run, None, file, command, tokens, args)]
    documents = ["--max-docs", str(args.max_docs)] if args.max_docs else []
    for what in evaluations:
        if args.place == task_grid.PLACE:
            file, words = task_grid.evaluation(variant, what, run)
            command = ["python", "eval.py", str(run), *words, *device, "--json", str(file)]
            jobs.append(Job(variant, seed, run, what, file, command, tokens / 10, args))
            continue
        flags = EVALUATIONS[what]
        file = results / f"{name}.{what}.json"
        lengths = 1 if what == "trial" else sum(MULTIPLES)             # times the trained length
        tokens = (1 + flags.count(",")) * WINDOWS * lengths * model.context
        command = ["python", "-m", "lab.measure", str(run), *shlex.split(flags), *held_out, *documents, *device]
        command += ["--json", str(file)]
        work = tokens / 3                                              # no backward pass
        jobs.append(Job(variant, seed, run, what, file, command, work, args))
    return jobs

def weights_of(run):
    """(steps done, steps in all, SHA-256 of the weights) of a run, or (0, None, None) if there is none."""
    if not (run / "config.json").exists():
        return 0, None, None
    _, config, _ = read_run(run)
    path = run / CHECKPOINT
    info = info_at(run, path.stat().st_mtime_ns if path.exists() else None)
    return info["step"], config.steps, info["sha256"]

@functools.cache
def info_at(run, time):
    """checkpoint_info, which hashes all weights, once for each time at which the checkpoint was written."""
    return checkpoint_info(run)

def done(job):
    """Whether a job's file is there, whole, of the complete run's weights (by their hash), and of as many documents.

    By --use-results, a run that is not here has the weights of which its results speak.
    """
    step, steps, weights = weights_of(job.run)
    if steps is None and job.args.use_results and job.args.place == task_grid.PLACE:
        return recorded(job) is not None
    try:
        result = read_json(job.file)
        max_docs = None
        if steps is None and job.args.use_results:
            run = read_json(job.file.with_name(f"{job.run.name}.run.json"))
            weights = run["weights"] if run["train_flags"] == shlex.join(job.args.train_flags) else None
            step = steps if weights else 0
        if job.evaluation is not None:
            result = result[0]
            max_docs = ([None] + [int(n) for flag, n in itertools.pairwise(job.command) if flag == "--max-docs"])[-1]
        return step == steps and (result["weights"], result.get("max_docs")) == (weights, max_docs)
    except (InputError, LookupError, TypeError):                       # missing, or cut short: it is made again
        return False


def recorded(job):
    """What results/tasks/ says of the run that a job trains or scores, or None."""
    trained = job.variant.partition(".")[0]
    task = job.evaluation if job.evaluation in task_grid.MORE.get(trained, ()) else trained
    return results_of(task).get(job.run.name)

@functools.cache
def results_of(task):
    """task_grid.read_results, read once."""
    return task_grid.read_results(task)


# ---- doing it --------------------------------------------------------------------------------------------------------

def do(job):
    """Train or evaluate, and leave the job's file; in this process, so that whoever kills one kills the other."""
    if job.evaluation is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            return evaluation.main(job.command[2:]) if "eval.py" in job.command else measure.main(job.command[3:])
    import torch
    torch.compiler.reset()                                             # what was compiled for another run
    there = (job.run / "config.json").exists()
    train.main(job.command[2:] + ["--resume"] * there)                 # of a complete run, only what a kill left undone
    model, config, record = read_run(job.run)
    info = checkpoint_info(job.run)
    origin = record["provenance"]
    cards = [torch.cuda.get_device_name(origin["device"])] if origin["device"].startswith("cuda") else []
    write_json(job.file, {
        "variant": job.variant, "seed": job.seed, "train_flags": shlex.join(job.args.train_flags),
        "command": shlex.join(job.command), "parameters": count_parameters(model), "tokens": job.work,
        "seconds": info["seconds"], "trained_length": model.context, "dtype": config.dtype,
        "provenance": {name: origin[name] for name in ("git", "device", "threads")} | {
            "machine": ", ".join([platform.platform(), *cards]),
            "versions": {name: origin[name] for name in ("python", "torch")}},
        "data": {name: record["data"][name] for name in ("source", "vocab", "splits")},
        "weights": info["sha256"],
    })

def rate_of(runs, left):
    """(training tokens a second, where that is from): of the finished runs, or of two small steps made now."""
    made = [(job, read_json(job.file, {"seconds": int | float}) if job.file.exists() else recorded(job))
            for job in runs if job not in left]
    if rates := [job.work / result["seconds"] for job, result in made if result["seconds"]]:
        return statistics.median(rates), "the rate of the finished runs"
    args = runs[0].args
    _, model, config = train.read_flags(runs[0].command[2:])
    backend = train.TorchBackend(model, config, pick_device(args.device or "auto"), False)
    batch = np.zeros((min(8, config.micro_batch or config.batch_size), model.context + 1), dtype=np.int64)
    _, seconds = timeit.repeat(lambda: backend.step(batch, 0), number=1, repeat=2)
    return batch[:, 1:].size / seconds, "one small step, uncompiled, measured now"

def show_plan(jobs, verbose):
    """--dry-run: a line a run, with what is left of it (verbose: and the commands), and an estimate of it all."""
    left = [job for job in jobs if not done(job)]
    runs = [job for job in jobs if job.evaluation is None]
    lines = [("run", "tokens", "state", "to evaluate")]
    for job in runs:
        step, steps, _ = weights_of(job.run)
        state = "in results/" if steps is None else "trained" if step == steps else f"step {step:,} of {steps:,}"
        state = "to train" if steps is None and job in left else state
        names = [other.evaluation for other in left if other.run == job.run and other.evaluation]
        lines.append((job.run.name, f"{job.work:,}", state, ", ".join(names) or "nothing"))
    a, b, c, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    indent = " " * (a + b + c + 6)
    width = max(shutil.get_terminal_size().columns, len(indent) + 24)
    for i, (name, tokens, state, names) in enumerate(lines):
        text = f"{name:{a}}  {tokens:>{b}}  {state:{c}}  {names}"
        print(textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False))
        for job in (job for job in jobs if verbose and i and job.run == runs[i - 1].run):
            print(f"    {shlex.join(job.command)}")
    rate, source = rate_of(runs, left)
    trainings = sum(job.evaluation is None for job in left)
    print(f"\n{len(runs)} runs, {sum(job.work for job in runs):,} training tokens; left: {trainings} runs and "
          f"{len(left) - trainings} evaluations, about {clock(sum(job.work for job in left) / rate)} by {source}")

def show_commands(jobs, argv):
    """--commands: a line for each run of which something is left."""
    words = [word for word in argv if word != "--commands"]
    for run in dict.fromkeys(job.run.name for job in jobs if not done(job)):
        print(shlex.join(["python", "-m", "lab.reproduce", "--run", run, *words]))

def run_grid(args):
    """Do all that is left and that no other process does, and what `tuned` then knows to be next."""
    tried = set()
    said = ""
    while True:
        jobs = jobs_of(args)
        left = [job for job in jobs if job.file not in tried and not done(job)]
        line = f"{len(jobs) - len(left)} of {len(jobs)} jobs are done"
        if line != said:
            say(said := line)
        if not left:
            break
        tried |= (tried_now := do_free(left))
        if not tried_now:
            time.sleep(PAUSE)

def say(line):
    """Print a line with one write, so that those of several workers do not mix."""
    print(f"{line}\n", end="", flush=True)

def do_free(left):
    """Do what is left of each run that no other process works on; returns the files of these jobs."""
    begin = time.perf_counter()
    work = 0
    tried = set()
    for run, jobs in itertools.groupby(left, lambda job: job.run):
        if time.perf_counter() - begin > PASS:
            break
        run.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock(run))
            except InputError:                                         # another process works on it
                continue
            for job in jobs:
                tried.add(job.file)
                if done(job):                                          # by another process, meanwhile
                    continue
                rest = sum(other.work for other in left if other.file not in tried) + job.work
                seconds = (time.perf_counter() - begin) / work * rest / (job.args.jobs or 1) if work else 0
                about = f", about {clock(seconds)} left for all" if work else ""
                say(f"{job.run} {job.evaluation or 'training'}{about}")
                (do_quietly if job.args.jobs else do)(job)
                work += job.work
    return tried

def do_quietly(job):
    """Do a job and print nothing but the line of an error."""
    words = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(words):
            do(job)
    except SystemExit:
        print(f"{job.run}: {words.getvalue().strip().splitlines()[-1]}", file=sys.stderr)
        raise

def run_workers(args):
    """Run the grid in --jobs processes of one thread each; an error or a signal to stop ends them all."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = [multiprocessing.get_context("spawn").Process(target=work, args=[args]) for _ in range(args.jobs)]
    try:
        for worker in workers:
            worker.start()
        while alive := [worker.sentinel for worker in workers if worker.exitcode is None]:
            wait(alive)
            if any((worker.exitcode or 0) > 0 for worker in workers):
                break
    finally:
        started = [worker for worker in workers if worker.pid]
        for worker in started:
            worker.terminate()                                         # a training keeps its last step
        for worker in started:
            worker.join()
    codes = [worker.exitcode for worker in workers]
    if max(codes) > 0:
        sys.exit(max(codes))                                           # its worker has said why
    if 0 not in codes:
        raise InputError(f"all {args.jobs} workers were killed: start the same command again, which goes on")

def work(args):
    """What a worker of run_workers does."""
    with CommandLine(prog="python -m lab.reproduce").one_line_errors():
        run_grid(args)


# ---- as a script -----------------------------------------------------------------------------------------------------

def main(argv=None):
    from lab.report import report
    argv = sys.argv[1:] if argv is None else argv
    titles = {name: grid.title for name, grid in GRIDS.items()}
    titles |= {"tuned": tuned.TITLE, "tasks": task_grid.TITLE, "all": ", ".join(ALL),
               "report": "train nothing, and write the pages of results/"}
    grids = "\n".join(textwrap.fill(title, 80, initial_indent=f"  {name:14}", subsequent_indent=" " * 16)
                      for name, title in titles.items())
    parser = CommandLine(prog="python -m lab.reproduce", description=__doc__, epilog=f"grids:\n{grids}")
    parser.add_argument("grid", choices=titles, metavar="GRID", help="one of those below")
    parser.add_argument("--preset", choices=tuple(PRESETS), metavar="NAME",
                        help=f"{', '.join(PRESETS)} (default: mini, or the grid's own)")
    parser.add_argument("--seeds", type=listed(at_least(0)), metavar="N,N,...",
                        help=f"default: {','.join(map(str, SEEDS))} (the trials of tuned have seed {tuned.SEED})")
    parser.add_argument("--max-docs", type=at_least(1), metavar="N", help="score N documents, evenly spaced")
    parser.add_argument("--device", help="device of training and evaluation (default: a GPU if any)")
    parser.add_argument("--use-results", action="store_true",
                        help="count a run whose results are under results/ as done, although its weights are not here")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, their tokens and an estimate")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: each run's commands too")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="work on N runs at once, with one thread each")
    parser.add_argument("--commands", action="store_true",
                        help="print the commands that are left, one run a line, for xargs, GNU parallel or Slurm")
    parser.add_argument("--run", metavar="NAME", help="work on this run of the grid alone, and write no report")
    with parser.one_line_errors():
        cut = argv.index("--") if "--" in argv else len(argv)
        args = parser.parse_args(argv[:cut])
        args.train_flags = argv[cut + 1 :]
        args.grids = ALL if args.grid == "all" else (args.grid,)
        args.preset = args.preset or preset_of(args.grids[0])
        args.place = place_of(args.grids[0], args.preset)
        args.seeds = args.seeds or SEEDS
        if args.grid == "report":
            if len(argv) > 1:
                parser.error(f"report reads all of results/ and takes no flag: leave out {argv[1]}")
            return report()
        if args.verbose and not args.dry_run:
            parser.error("--verbose is for --dry-run: add it, or leave this out")
        if args.device:
            pick_device(args.device)                                   # InputError if there is none
        if args.dry_run:
            return show_plan(jobs_of(args), args.verbose)
        if args.commands:
            return show_commands(jobs_of(args), argv)
        jobs_of(args)                                                  # InputError before a folder is made
        (Path("results") / args.place).mkdir(parents=True, exist_ok=True)
        (run_workers if args.jobs else run_grid)(args)
        if not args.run:
            report()

if __name__ == "__main__":
    main()
