"""Train and measure what a study asks for and its results lack.

    python -m lab.grid studies/encodings.toml --jobs 2      two runs at a time, with one thread each
    python -m lab.grid studies/encodings.toml --commands    what is left, one command a line, for xargs or Slurm

A study is a file of data, here or in a folder of your own:

    title = "ExPE with three thetas"
    preset = "mini"
    seeds = [1, 2, 3]
    [runs]                                # name = flags of train.py
    x1 = "--pe expe --theta 1/512"
    x4 = "--pe expe --theta 4/512"
    [measures]                            # name = flags of lab.measure
    same-targets = "--protocol same-targets"

It may also have `data`, the text that runs are trained on, `held_out`, the text that they are scored on, and `flags`
of train.py for all runs. [runs.NAME] is a group of runs, named NAME.RUN, which may have `flags` of its own. `{seed}` in
flags stands for the seed. A measure of some runs alone is {flags = "...", runs = ["expe*"], seeds = [1]}. [chosen] says
which seeds chose the values of a run, name = [seeds]: lab.table does not test with them.

Runs stand under runs/NAME/, and results beside the file of the study, in NAME.jsonl (lab/results.py). A study that was
stopped or killed goes on when it is started again: what its results have is not done again, and a training resumes from
its checkpoint. Whoever works on a run locks its directory, so a study may be started several times, on machines that
share the folder.
"""

import argparse
import contextlib
import fnmatch
import io
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from cli import CommandLine, at_least

# cli comes first: it says in one line which package is missing
# isort: split
import train
from engine.workers import end_with_parent, leave_ctrl_c_to_parent
from files import hash_file, read_text
from lab import measure
from lab.results import append, read_results
from model_numpy import count_parameters
from runs import CHECKPOINT, checkpoint_info, lock, read_run
from settings import InputError

OWN = {"--preset", "--seed", "--out", "--resume", "--overwrite", "--device", "--json", "--plot", "--help", "-h"}
STUDY = {"title": str, "preset": str, "seeds": list, "runs": dict, "measures": dict, "data": str, "held_out": str,
         "flags": str, "chosen": dict}
MEASURE = {"flags": str, "runs": list, "seeds": list}

class Study(NamedTuple):
    path: Path                           # of its file; results lie beside it
    title: str
    preset: str
    seeds: list
    runs: dict                           # {name: flags of train.py}
    measures: dict                       # {name: (flags of lab.measure, patterns of runs, seeds)}
    chosen: dict                         # {name of a run: the seeds that chose its values}

    @property
    def name(self):
        return self.path.stem

    @property
    def results(self):
        return self.path.with_suffix(".jsonl")

    def folder(self, run, seed):
        return Path("runs", self.name, f"{run}-s{seed}")

    def measures_of(self, run, seed):
        """{name: flags of lab.measure} of the measures of a run."""
        return {name: flags for name, (flags, patterns, seeds) in self.measures.items()
                if seed in seeds and any(fnmatch.fnmatch(run, pattern) for pattern in patterns)}

# ---- the study's file ------------------------------------------------------------------------------------------------

def read_study(path):
    """The Study of a TOML file; InputError that says what is wrong with it."""
    text = read_text(path)
    with named(path):
        try:
            values = tomllib.loads(text)
            repr(values)                                               # as deep as a message may show them
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"this is not TOML: {error}") from None
        except RecursionError:
            raise InputError("its tables or lists are nested too deep: a study has runs in groups") from None
        check(values, STUDY)
        if missing := [key for key in ("title", "preset", "seeds", "runs") if not values.get(key)]:
            raise InputError(f"this lacks {missing[0]}: python -m lab.grid --help shows a study")
        if empty := [key for key in ("data", "held_out") if values.get(key) == ""]:
            raise InputError(f"{empty[0]} must be a path or a name, got ''")
        if not all(type(seed) is int for seed in values["seeds"]):
            raise InputError(f"seeds must be whole numbers, got {values['seeds']}")
        seeds = list(dict.fromkeys(values["seeds"]))
        flags = f"{path_flag('--data', values.get('data'))} {values.get('flags', '')}".strip()
        runs = list(flatten(values["runs"], flags))
        if twice := [run for run, count in Counter(run for run, _ in runs).items() if count > 1]:
            raise InputError(f"there are two runs {twice[0]}, one of them in a group: give one another name")
        study = Study(Path(path), values["title"], values["preset"], seeds, dict(runs), {},
                      values.get("chosen", {}))
        for run in study.runs:
            with named(run):
                if not re.fullmatch(r"[\w.,=+@-]+", run):
                    raise InputError(f"a run's name is that of a folder, and has letters, digits and . , = + - _ @ "
                                     f"alone, got {run!r}")
                for seed in seeds:
                    train.read_flags(command_of(study, run, seed)[2:])
        for run, chose in study.chosen.items():
            if run not in study.runs or not isinstance(chose, list) or not all(seed in seeds for seed in chose):
                raise InputError(f"chosen: {run} must be a run, and have a list of its seeds, got {chose}")
        for name, value in values.get("measures", {}).items():
            with named(name):
                study.measures[name] = read_measure(value, values.get("held_out"), study)
        return study

def read_measure(value, held_out, study):
    """(flags of lab.measure, patterns of runs, seeds) of a measure in a study's file."""
    value = value if isinstance(value, dict) else {"flags": value}
    check(value, MEASURE)
    flags = f"{value.get('flags', '')} {path_flag('--data', held_out)}"
    patterns, seeds = value.get("runs", ["*"]), value.get("seeds", study.seeds)
    if runs := measure.read_flags(split(flags)).runs:
        raise InputError(f"the run is the grid's own: leave out {' '.join(runs)}")
    if not all(isinstance(pattern, str) and fnmatch.filter(study.runs, pattern) for pattern in patterns):
        raise InputError(f"runs must be names of runs, or patterns of some, got {patterns}")
    if not all(seed in study.seeds for seed in seeds):
        raise InputError(f"seeds must be of {study.seeds}, got {seeds}")
    return flags.strip(), patterns, seeds

def path_flag(flag, path):
    """A flag and a path as a shell reads them, which is one argument whatever the path holds; "" without a path."""
    return "" if path is None else shlex.join([flag, f"./{path}" if path.startswith("-") else path])

def check(values, kinds):
    """InputError for a key that is unknown, or has a value of another type."""
    for key, value in values.items():
        if not isinstance(value, kinds.get(key, ())):
            raise InputError(f"{key} must be of type {kinds[key].__name__}" if key in kinds else
                             f"{key} must be one of {', '.join(kinds)}")

@contextlib.contextmanager
def named(name):
    """Put a name before the message of an InputError, and before the line of a parser that ends the script."""
    with contextlib.redirect_stderr(io.StringIO()) as words:
        try:
            yield
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        except SystemExit:
            raise InputError(f"{name}: {words.getvalue().partition('error: ')[2].strip()}") from None

def split(flags):
    """The words of flags, as a shell reads them; InputError for a flag that the grid sets."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise InputError(f"{error} in {flags}") from None
    if own := OWN & {word.partition("=")[0] for word in words}:
        raise InputError(f"{min(own)} is the grid's own: leave it out")
    return words

def flatten(runs, flags, group=""):
    """(name, flags) of each run, those of a group as GROUP.RUN with the group's flags."""
    if group:
        flags = f"{flags} {runs.get('flags', '')}".strip()
    for name, value in runs.items():
        if isinstance(value, dict):
            if group.count(".") > 9:
                raise InputError(f"{group}{name} is nested too deep: a study has runs in groups")
            yield from flatten(value, flags, f"{group}{name}.")
        elif not isinstance(value, str):
            raise InputError(f"{group}{name} must be flags of train.py, got {value!r}")
        elif name != "flags" or not group:
            yield group + name, f"{flags} {value}".strip()

def command_of(study, run, seed):
    """The words of the command that trains a run."""
    flags = split(study.runs[run].replace("{seed}", str(seed)))
    return ["python", "train.py", "--preset", study.preset, *flags, "--seed", str(seed), "--out",
            str(study.folder(run, seed))]

# ---- what is left ----------------------------------------------------------------------------------------------------

def left_of(study, results, run, seed):
    """(whether the run is to be trained, [names of its measures that are to be made]), by the results so far."""
    line = results.runs.get((run, seed))
    measures = study.measures_of(run, seed)
    if line is None:
        return True, list(measures)
    if line["command"] != shlex.join(command_of(study, run, seed)):
        raise InputError(f"{study.results} has {run} of another command, {line['command']}: give the run another name")
    made = {name: results.measured.get((run, seed, name), {}) for name in measures}
    left = [name for name, flags in measures.items()
            if (made[name].get("sha256"), made[name].get("flags")) != (line["sha256"][:16], flags)]
    if left and checkpoint_of(study.folder(run, seed)) != line["sha256"]:
        print(f"{study.folder(run, seed)}: its weights are not here, so {', '.join(left)} cannot be measured: to train "
              f"it again, remove its training from {study.results}", file=sys.stderr)
        left = []
    return False, left

def checkpoint_of(run):
    """The SHA-256 of a run's checkpoint, or None."""
    return hash_file(run / CHECKPOINT) if (run / CHECKPOINT).exists() else None

def unfinished(study):
    """[(run, seed)] of which something is left, seed by seed."""
    results = read_results(study.results)
    return [(run, seed) for seed in study.seeds for run in study.runs if any(left_of(study, results, run, seed))]

# ---- doing it --------------------------------------------------------------------------------------------------------

def work(study, wanted):
    """Do what is left of each wanted (run, seed) that no other process works on."""
    for run, seed in wanted:
        folder = study.folder(run, seed)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock(folder))
            except InputError:                                         # another process works on it
                continue
            results = read_results(study.results)                      # another may have done it meanwhile
            to_train, measures = left_of(study, results, run, seed)
            if to_train:
                print(f"{folder}: training", flush=True)
                append(study.results, *train_run(study, run, seed))
            for name in measures:
                print(f"{folder}: {name}", flush=True)
                append(study.results, *measure_run(study, run, seed, name))
            if to_train or measures:
                print(f"{folder}: done; {how_far(study)}", flush=True)

def how_far(study):
    """In words, how many runs of a study are complete, and how many are left."""
    with contextlib.redirect_stderr(io.StringIO()):                    # what lacks its weights was named before
        left = len(unfinished(study))
    total = len(study.seeds) * len(study.runs)
    return f"{total - left} of {total} runs are complete" + f", {left} left" * (left > 0)

def train_run(study, run, seed):
    """Train a run, or go on with it; returns its lines of the results."""
    folder = study.folder(run, seed)
    command = command_of(study, run, seed)
    with contextlib.redirect_stdout(sys.stderr):
        train.main([*command[2:], *["--resume"] * (folder / "config.json").exists()])
    model, config, record = read_run(folder)
    origin = record["provenance"]
    data = {name: record["data"][name] for name in ("source", "vocab", "splits")}
    key = data["splits"]["train"]["sha256"][:16]
    machine = (f"{platform.platform()}, {origin['device']}, {origin['threads']} threads, Python {origin['python']}, "
               f"torch {origin['torch']}")
    line = {"run": run, "seed": seed, "command": shlex.join(command), "data": key, "context": model.context,
            "parameters": count_parameters(model), "tokens": config.steps * config.batch_size * model.context,
            "seconds": round(checkpoint_info(folder)["seconds"], 1), "sha256": checkpoint_of(folder),
            "commit": origin.get("git"), "machine": machine, "code": origin.get("code")}
    return {"data": key, **data}, line

def measure_run(study, run, seed, name):
    """Measure a run; returns the lines of the results: new targets, and the measurement."""
    flags = study.measures_of(run, seed)[name]
    folder = study.folder(run, seed)
    with contextlib.redirect_stdout(sys.stderr):
        rows = measure.score(measure.read_flags([str(folder), *shlex.split(flags)]))
    facts, rows = zip(*map(measure.stored, rows), strict=True)
    line = {"measure": name, "run": run, "seed": seed, "flags": flags, "sha256": checkpoint_of(folder)[:16],
            "rows": rows}
    return *{fact["targets"]: fact for fact in facts if fact}.values(), line

def run_workers(path, jobs):
    """Work on a study in several processes of one thread each; returns their largest exit status."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = [tempfile.TemporaryFile("w+") for _ in range(jobs)]         # a pipe that nobody reads would fill up
    words = [sys.executable, "-m", "lab.grid", path, "--worker"]
    workers = [subprocess.Popen(words, env=os.environ | threads, stdin=subprocess.PIPE, stderr=log) for log in logs]
    try:
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()                                         # a training keeps its last step
        for worker in workers:
            worker.wait()
    for worker, log in zip(workers, logs, strict=True):
        if worker.returncode:
            log.seek(0)
            words, bug, trace = log.read().strip().partition("Traceback")
            print(bug + trace or words.rpartition("\n")[2] or f"signal {-worker.returncode} ended a worker",
                  file=sys.stderr)                                     # of a wrong input, the last line
    return max(abs(worker.returncode) for worker in workers)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.grid", description=__doc__)
    parser.add_argument("study", metavar="STUDY.toml", help="what to train and measure")
    how = parser.add_mutually_exclusive_group().add_argument
    how("--jobs", type=at_least(1), metavar="N", help="work on N runs at once, a thread each")
    how("--run", metavar="NAME-sSEED", help="work on this run alone")
    how("--commands", action="store_true", help="print what is left, one command a line, and stop")
    how("--worker", action="store_true", help=argparse.SUPPRESS)       # one of --jobs, which says itself how far it is
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.worker:
            leave_ctrl_c_to_parent()
            end_with_parent(lambda: os.read(0, 1))                      # of its stdin, which ends with the parent
        study = read_study(args.study)
        names = {f"{run}-s{seed}": (run, seed) for seed in study.seeds for run in study.runs}
        if args.run is not None and args.run not in names:
            raise InputError(f"--run must be one of the study's runs, such as {next(iter(names))}, got {args.run!r}")
        wanted = unfinished(study) if args.run is None else [names[args.run]]
        if args.commands:
            for run, seed in wanted:
                print(shlex.join(["python", "-m", "lab.grid", args.study, "--run", f"{run}-s{seed}"]))
            return
        asked = {"study": study.name, "title": study.title, "preset": study.preset, "seeds": study.seeds,
                 "runs": list(study.runs), "chosen": study.chosen}
        append(study.results, asked)
        if not args.worker:
            print(f"{study.results}: {how_far(study)}", flush=True)
        if args.jobs and (status := run_workers(args.study, args.jobs)):
            sys.exit(status)
        if not args.jobs:
            work(study, wanted)
        if wanted and not args.worker:
            print(f"{study.results}: {how_far(study)}")

if __name__ == "__main__":
    main()
