"""A run that is trained now: its data, what is written in its folder, how it resumes, and how a signal stops it.

runs.py has the folder's layout, and what other scripts read of it.
"""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import codehash
import data
import files
from config import PRESETS, SPLITS, changed_numbers
from runs import (
    NEW_RUN,
    check_shapes,
    checkpoint_info,
    end_replacement,
    lock,
    read_checkpoint,
    read_run,
    save_checkpoint,
)
from settings import InputError, flag_of
from tokenizer import read_tokenizer


def commit_of(folder):
    """{"git": the commit in a folder, with -dirty if files differ from it}; {} without git or a repository."""
    if not (folder / ".git").exists():                                  # git would look in the folders above, too
        return {}
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError:
        return {}
    return {"git": done.stdout.strip()} if done.returncode == 0 else {}

def prepare_data(source, *sizes, **more):
    """data.prepare; for a corpus that need not fit in memory, that of engine/corpora.py."""
    try:
        if data.is_large(source):
            if source not in data.NAMED_SOURCES:
                print(f"{source} {data.LARGE}", flush=True)
            from engine import corpora
            return corpora.prepare(source, *sizes, **more)
        return data.prepare(source, *sizes, **more)
    except InputError as error:
        raise InputError(f"{error}" if f"{error}".startswith("--") else f"--data: {error}") from None

class Run:
    """A run that is trained now: its settings, its data, and what is written in its folder.

    args: all of train.py's flags as they were parsed, the settings too; args.given has {setting: value} of those that
    were given. record is what config.json holds.
    """

    quiet = bool(os.environ.get("TQDM_DISABLE")) or None     # tqdm's disable: None shows a bar in a terminal

    def __init__(self, argv, args, model_config, train_config, device):
        """InputError for a folder that holds something else, or data that cannot be prepared."""
        import torch

        self.args = args
        self.folder = args.out
        self.writes_to = args.out                                       # with --overwrite elsewhere, until a checkpoint
        self.device = device
        self.waiting = []                                               # steps whose losses were not read yet
        self.check_folder()
        self.source = data.source_of(train_config.data)
        self.data_folder, meta = self.source.ensure(train_config.data, model_config.vocab, prepare_data,
                                                    vars(train_config), args.given)
        # What was not given is the folder's: the size of its vocabulary, and how it was prepared.
        self.model_config = dataclasses.replace(model_config, vocab=meta["vocab"])
        prepared = {name: meta[name] for name in data.PREPARATION if name in meta}
        self.train_config = dataclasses.replace(train_config, **prepared)
        if train_config.objective == "mlm":
            from engine import masking
            self.source = masking.Masked(self.source, self.model_config.vocab)
        self.record = {
            "model": dataclasses.asdict(self.model_config), "train": dataclasses.asdict(self.train_config),
            "data": {"folder": str(self.data_folder), **meta},
            "provenance": {"preset": args.preset, "command": shlex.join(["python", "train.py", *argv]),
                           "device": str(device), **commit_of(Path(__file__).parent),
                           "python": sys.version.split()[0],
                           "torch": torch.__version__, "threads": torch.get_num_threads(),
                           "code": codehash.code_of(self.model_config, self.train_config)}}
        if args.resume:
            self.check_same_data()

    def check_folder(self):
        """InputError unless the folder is new or empty or, with --resume or --overwrite, holds a run."""
        if files.holds_files(self.folder) and not self.args.resume:
            if not (self.folder / "config.json").exists():
                raise InputError(f"{self.folder} exists and holds no run, so it is left as it is: choose another --out")
            read_run(self.folder)
            if not self.args.overwrite:
                raise InputError(f"{self.folder} exists: add --resume to go on with it, or --overwrite to replace it")

    # ---- files

    def start(self):
        """Write what stays the same, once the first step is done; --overwrite keeps the old run beside it till save."""
        if (self.folder / "config.json").exists() and not self.args.resume:
            self.writes_to = self.folder / NEW_RUN
            self.writes_to.mkdir(exist_ok=True)
        (self.writes_to / "log.jsonl").unlink(missing_ok=True)          # of a run that was killed before a checkpoint
        self.write_record()
        tokenizer = self.data_folder / "tokenizer.tiktoken"
        if tokenizer.exists():                                          # a task has none
            self.write(tokenizer.name, tokenizer.read_bytes())

    def write(self, name, content):
        files.write_bytes(self.writes_to / name, content)

    def write_record(self):
        self.write("config.json", json.dumps(self.record, indent=1, allow_nan=False).encode() + b"\n")

    def log(self, **line):
        path = self.writes_to / "log.jsonl"
        with files.name_full_file(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def save(self, backend, step, seconds):
        save_checkpoint(self.writes_to, backend.tensors(), step, seconds)
        if self.writes_to != self.folder:
            end_replacement(self.folder)                                # the new run takes the old one's place
            self.writes_to = self.folder

    # ---- losses

    def add_step(self, step, rate, loss, norm):
        """Note a step (from 0), its learning rate, loss and gradient's norm, which a GPU may still compute."""
        self.waiting.append((step, rate, loss, norm))

    def log_steps(self, all_but=0):
        """Log the steps that were noted, all but the last `all_but`; InputError if a number is not finite.

        To read a number makes a GPU wait until it is computed.
        """
        while len(self.waiting) > all_but:
            step, rate, loss, norm = self.waiting.pop(0)
            loss, norm = float(loss), float(norm)
            if not math.isfinite(loss + norm):
                self.refuse(f"the loss is {loss} and the gradient's norm {norm} at step {step + 1}", updates=step)
            if step == 0:
                self.start()
            self.log(step=step + 1, loss=loss, grad_norm=norm, lr=rate)
            self.last_loss = loss

    def log_validation(self, step, loss):
        """Log a validation loss; InputError if it is not finite."""
        if not math.isfinite(loss):
            self.refuse(f"the validation loss is {loss} after step {step}", updates=step)
        self.log(step=step, val_loss=loss)

    def refuse(self, what, updates):
        """InputError for numbers that are not finite, after so many updates of the weights."""
        config = self.train_config
        if updates:
            raise InputError(f"{what}: try a lower --lr than {config.lr:g}; the last checkpoint, if there is one, "
                             "stays")
        causes = changed_numbers(self.model_config, config)
        causes += [f"--init-from {config.init_from}"] if config.init_from != "none" else []
        raise InputError(f"{what}, before --lr matters, so the first weights or the encoding's numbers are too large: "
                         f"change {' or '.join(causes or [f'--pe {self.model_config.encoding.pe}'])}")

    # ---- resume

    def check_same_data(self):
        """InputError unless the data are those that the run was trained on."""
        stored, now = read_run(self.folder)[2]["data"], self.record["data"]
        changed = [split for split in SPLITS if stored["splits"][split]["sha256"] != now["splits"][split]["sha256"]]
        for name in ("tokenizer", "sequences"):                         # sequences: of a task, but not in older runs
            if stored.get(name, now.get(name)) != now.get(name):
                changed.append(name)
        if changed:
            raise InputError(f"{self.data_folder} is not the data that {self.folder} was trained on: the hash of "
                             f"{', '.join(changed)} differs")
        if checkpoint_info(self.folder)["step"]:
            read_tokenizer(self.folder, stored)                         # which refuses another one

    def resume(self, backend):
        """Fill the backend from the last checkpoint; returns (steps done, seconds trained).

        What was logged after the checkpoint is trained again, and goes. If the code is not the one that trained so far,
        config.json gets the new hashes and the step from which they hold; an older run has no hashes, and gets none.
        """
        now, self.record = self.record, read_run(self.folder)[2]
        self.record["train"]["steps"] = self.train_config.steps
        info = checkpoint_info(self.folder)
        origin, code = self.record["provenance"], now["provenance"]["code"]
        if not info["step"]:                                            # it begins anew
            origin["code"] = code
            return 0, info["seconds"]
        if "code" in origin:
            before, origin["code"] = origin["code"], codehash.go_on(origin["code"], code, info["step"])
            if changed := [file for file, its in origin["code"].items() if its != before.get(file)]:
                print(f"{self.folder}: it goes on with other code than it was trained with: {', '.join(changed)}")
        tensors, info = read_checkpoint(self.folder)
        if not any(name.startswith(("m.", "v.")) for name in tensors):
            raise InputError(f"{self.folder} has weights alone, without the optimizer's state, as unpacked models do: "
                             f"begin another run with --init-from {self.folder}")
        check_shapes(self.folder, tensors, self.model_config, ("", "m.", "v."))
        backend.load(tensors, info["step"])
        self.write("log.jsonl", read_kept_log(self.folder, info["step"]))
        self.write_record()
        self.log(step=info["step"], resumed=now["provenance"])
        return info["step"], info["seconds"]

    # ---- signals

    def must_stop(self, signals):
        """Whether a signal asks to stop."""
        return bool(signals)

def read_kept_log(run, step):
    """The lines of log.jsonl up to the checkpoint of this step."""
    kept = []
    log = run / "log.jsonl"
    for line in log.read_bytes().splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):   # of a damaged line
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
    return b"".join(kept)

def read_run_to_resume(run):
    """read_run, once a replacement by --overwrite that a kill has broken off is completed or taken back."""
    if (run / NEW_RUN).exists():
        with lock(run):                                                 # which does that
            pass
    return read_run(run)

def resume_preset(args):
    """Set --preset and --pe, by which other flags are read, to those of the run in args.out."""
    record = read_run_to_resume(args.out)[2]
    preset = record["provenance"].get("preset")
    if preset not in [None, *PRESETS]:
        raise InputError(f"{args.out}/config.json was edited: provenance.preset must be one of "
                         f"{', '.join(PRESETS)}, got {preset!r}")
    stored = {"preset": preset, "pe": record["model"]["encoding"]["pe"]}
    check_same_flags(args.out, stored, vars(args))
    vars(args).update(stored)

def resume_configs(run, given):
    """(ModelConfig, TrainConfig) of the run to resume; InputError for a flag that contradicts it."""
    model, config, record = read_run_to_resume(run)
    if given.get("steps", 0) > config.steps:                            # a longer run, by the schedule of so many steps
        config = dataclasses.replace(config, steps=given["steps"])
    check_same_flags(run, vars(model.encoding) | vars(model) | vars(config), given)
    return model, dataclasses.replace(config, data=record["data"]["folder"])           # its text may have changed

def check_same_flags(run, stored, given):
    """InputError for a flag that was given with another value than is stored of a run."""
    for name, value in stored.items():
        if given.get(name) not in (None, value):
            raise InputError(f"{flag_of(name)} is {value} in {run}, and {given[name]} was given: resume with the run's "
                             "own flags, or train under another --out")

@contextlib.contextmanager
def catch_signals():
    """The times of the signals that ask to stop; one that comes a second later does not wait for the step to end."""
    times = []

    def take(number, frame):
        if not times:
            with contextlib.suppress(OSError):                          # Ctrl-C ends what reads 2>&1, such as tee, too
                os.write(2, b"\nstopping after this step (again: at once, back to the last checkpoint)\n")
        elif time.monotonic() > times[0] + 1:                           # torchrun repeats a Ctrl-C at once
            raise KeyboardInterrupt
        times.append(time.monotonic())

    caught = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")
              and signal.getsignal(number) != signal.SIG_IGN]           # nohup ignores SIGHUP
    before = {number: signal.signal(number, take) for number in caught}
    try:
        yield times
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
