"""A run on disk: what train.py writes, and what all other scripts read.

    runs/<name>/   config.json              settings, provenance, and the hashes of the data; written once
                   checkpoint.safetensors   weights, AdamW's moments; as metadata the step and the seconds
                   log.jsonl                the loss of each step, and the validation losses
                   tokenizer.tiktoken       a copy of the data's tokenizer

A checkpoint takes the place of the last one with one rename; a run that was killed before its first begins anew.
With --overwrite the new run is written into runs/<name>/.unfinished-run until its first checkpoint.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import safetensors
import safetensors.numpy

import codehash
import data
import files
import model_numpy
from config import PRESETS, SPLITS, ModelConfig, TrainConfig, changed_numbers, check_together
from files import check_regular, read_json
from positional_encodings import ENCODINGS
from settings import InputError, flag_of, from_values, prefix_errors
from tokenizer import read_tokenizer

CHECKPOINT = "checkpoint.safetensors"
NEW_RUN = ".unfinished-run"              # in a run directory, what --overwrite writes before its first checkpoint

# ---- finding runs ----------------------------------------------------------------------------------------------------

def named_runs(names):
    """The run directories that are named, or every one under runs/; InputError if there is none.

    Files among them, as runs/* may have, are left out and named on stderr; InputError if there are only files.
    """
    if not names:
        if runs := sorted(path.parent for path in Path("runs").glob("*/config.json")):
            return runs
        raise InputError("there is no run under runs/: train one with python train.py --pe expe --l 24")
    files = [name for name in names if os.path.isfile(name)]
    runs = [Path(name) for name in names if name not in files]
    if not runs:
        raise InputError(f"{files[0]} is a file: name a run directory, such as runs/mini-expe-s0, or none for all runs")
    if files:
        print(f"left out, since they are files and no run directories: {', '.join(files)}", file=sys.stderr)
    return runs

def read_named(names, read):
    """{run: read(run)} of the run directories that are named; InputError if one cannot be read.

    Without names: of every run under runs/, and those that cannot be read are left out and named on stderr.
    """
    found = {run: value for run in named_runs(names) if (value := try_to_read(run, read, names)) is not None}
    if not found:
        raise InputError("no run under runs/ can be read: the lines above say why")
    return found

def try_to_read(run, read, named):
    """read(run); of a run that was not named and cannot be read, None, and the reason on stderr."""
    try:
        return read(run)
    except InputError as error:
        if named:
            raise
        reason = re.sub(rf"^{re.escape(str(run))}(: |[ /])", "", str(error))
        print(f"{run} is left out: {reason}", file=sys.stderr)

# ---- reading a run ---------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def name_missing_file(run):
    """InputError that names the file of zoo/ which a run needs and which is not here."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name)
        if name.partition(".")[0] != "zoo":
            raise
        file = f"{name.replace('.', '/')}.py" if "." in name else "the folder zoo/"
        raise InputError(f"{run} needs {file}, which is not here") from None

def read_run(run):
    """(ModelConfig, TrainConfig, all of config.json) of a run directory; InputError that says what is wrong with it."""
    path = Path(run) / "config.json"
    if (Path(run) / NEW_RUN / CHECKPOINT).exists():
        raise InputError(f"{run} is not whole, since train.py --overwrite was killed while it replaced the files: "
                         f"python train.py --out {run} --resume puts the others in place")
    if not path.exists():
        raise InputError(f"{run} is no run directory (no config.json): python train.py writes one")
    texts = ["model.encoding.pe", "data.folder", "data.source", "data.tokenizer.sha256"]
    texts += [f"data.splits.{split}.sha256" for split in SPLITS]
    others = {"train": dict, "provenance": dict, "data.splits.train.tokens": int}
    record = read_json(path, **others, **dict.fromkeys(texts, str))
    code = record["provenance"].get("code", {})                        # older runs have none
    if type(code) is not dict or not all(type(its) is str for its in code.values()):
        raise InputError(f"{path} was edited: provenance.code must have a hash for each file")
    if (pe := record["model"]["encoding"]["pe"]) not in ENCODINGS:
        raise InputError(f"{run} needs zoo/{pe}.py, which is not here")
    try:
        with name_missing_file(run):
            model, train = ModelConfig.from_dict(record["model"]), from_values(TrainConfig, record["train"])
            check_together(model, train)
            if train.data.startswith("task:"):
                import tasks
                fields = vars(train) | vars(model)
                names = "data", "objective", "context", "vocab", "causal"
                tasks.fill_in({name: fields[name] for name in names}, "mini")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return model, train, record | {
        "model": dataclasses.asdict(model), "train": dataclasses.asdict(train)}        # with what older runs lack

def read_checkpoint(run, names=None):
    """({name: array} of weights and moments, {"step", "seconds"}) of a run; names: of arrays (default: all).

    InputError if there is no checkpoint, if it was cut short, or if it has other numbers than those of a training:
    finite ones in fp32. This is the one place where checkpoints are read.
    """
    path = Path(run) / CHECKPOINT
    if not path.exists():
        raise InputError(f"{run} has no checkpoint yet: go on with python train.py --out {run} --resume")
    check_regular(path)
    try:
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():
                if (dtype := file.get_slice(name).get_dtype()) != "F32":
                    raise InputError(f"{path} is not of the model in config.json: {name} is of dtype {dtype}, and not "
                                     "F32, so one of them was edited")
            tensors = {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
            metadata = file.metadata()
        if not 0 <= int(metadata["step"]) <= 2**53:
            raise ValueError(f"its step is {metadata['step']}")
        info = {"step": int(metadata["step"]), "seconds": float(metadata["seconds"])}
        if not math.isfinite(info["seconds"]):
            raise ValueError(f"its seconds are {metadata['seconds']}")
    except InputError:
        raise
    except (safetensors.SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint of train.py ({error}): it was cut short or replaced") from None
    if wrong := first_not_finite(tensors):
        raise InputError(f"{run} has weights that are NaN or infinite, first {wrong}: its training diverged, so train "
                         "it again with a lower --lr")
    return tensors, info

def first_not_finite(tensors):
    """The name of the first of {name: array} that has a NaN or an infinity, or None."""
    return next((name for name, x in tensors.items() if not np.isfinite(x).all()), None)

def checkpoint_info(run):
    """{"step", "seconds"} of the run's checkpoint; step 0 if it has none yet."""
    if not (Path(run) / CHECKPOINT).exists():
        return {"step": 0, "seconds": 0.0}
    return read_checkpoint(run, ())[1]

def load_model(run, make=None):
    """(GPT, or make's model, on the CPU in eval mode; config.json with the checkpoint's step) of a run."""
    import torch  # here, since what only lists runs starts without it

    from model_torch import GPT

    config, _, record = read_run(run)
    tensors, info = read_checkpoint(run)
    weights = {name: x for name, x in tensors.items() if not name.startswith(("m.", "v."))}
    with name_missing_file(run):
        check_shapes(run, weights, config)
        model = (make or GPT)(config, seed=None)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model.eval(), record | info

def check_shapes(run, tensors, config, prefixes=("",)):
    """InputError unless {name: array} has the model's weights and, by prefixes, its moments, and no others."""
    shapes = model_numpy.parameter_shapes(config)
    if {name: x.shape for name, x in tensors.items()} != {
            prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}:
        raise InputError(f"{Path(run) / CHECKPOINT} is not of the model in config.json: one of them was edited")

# ---- what is said of a run -------------------------------------------------------------------------------------------

def describe_progress(step, steps):
    """"step 140 of 1,600" of a run that is not finished, and "" of one that is."""
    return f"step {step:,} of {steps:,}" * (step < steps)

def warn_of_changes(run):
    """Say on stderr which code of a run is not what it was trained with; nothing of an older run, without a record."""
    model, train, record = read_run(run)
    if changed := codehash.differing(record["provenance"].get("code", {}), codehash.code_of(model, train)):
        print(f"{run}: it was trained with other code than is here now: {', '.join(changed)}", file=sys.stderr)

def describe(run, record):
    """Say on stderr what a text of a run is of: its step, and changed code; record: as load_model gives it."""
    if words := describe_progress(record["step"], record["train"]["steps"]):
        print(f"{run}: {words}", file=sys.stderr)
    warn_of_changes(run)

# ---- writing a run ---------------------------------------------------------------------------------------------------

def save_checkpoint(run, tensors, step, seconds=0.0):
    """Replace the run's checkpoint with one rename; seconds: trained so far.

    InputError, and the last checkpoint stays, if any of the tensors has a number that is not finite.
    """
    check_finite(tensors, step)
    metadata = {"step": str(step), "seconds": f"{seconds:.3f}"}
    files.write_bytes(Path(run) / CHECKPOINT, safetensors.numpy.save(tensors, metadata))

def check_finite(tensors, step):
    """InputError if any of {name: array} that is to be saved has a NaN or an infinity."""
    if wrong := first_not_finite(tensors):
        raise InputError(f"after step {step} {wrong} has numbers that are NaN or infinite, so nothing is saved: try a "
                         "lower --lr; the last checkpoint, if there is one, stays")

def end_replacement(run):
    """End the replacement of a run by --overwrite: the caller holds the run's lock.

    Until the new run has a checkpoint, its files lie in a folder of their own, and are removed here: the old run stays.
    From then on they are renamed into the place of the old ones, the checkpoint last. A kill between two renames
    leaves files of both runs, which read_run refuses while the new checkpoint lies in that folder; the next call
    renames the others, so that the new run is whole.
    """
    run, new = Path(run), Path(run) / NEW_RUN
    if new.is_symlink():                                                # what it names is not ours
        new.unlink()
    if not new.is_dir():
        return
    whole = (new / CHECKPOINT).exists()
    for name in ("config.json", "tokenizer.tiktoken", "log.jsonl", CHECKPOINT):
        with contextlib.suppress(FileNotFoundError):                    # renamed before a kill, or not written yet
            if whole:
                os.replace(new / name, run / name)
            else:
                (new / name).unlink()
    files.remove_unfinished(new)
    with contextlib.suppress(OSError):                                  # somebody's own file stays in it
        new.rmdir()

@contextlib.contextmanager
def lock(folder):
    """Hold a run's folder for this process alone; InputError if another one holds it. Ends a broken-off replacement."""
    with files.lock(folder):
        end_replacement(folder)
        try:
            yield
        finally:
            end_replacement(folder)                                     # after an error

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
    with prefix_errors("--data"):
        if data.is_large(source):
            if source not in data.NAMED_SOURCES:
                print(f"{source} {data.LARGE}", flush=True)
            from engine import corpora
            return corpora.prepare(source, *sizes, **more)
        return data.prepare(source, *sizes, **more)

class Run:
    """A run that is trained now: its settings, its data, and what is written in its folder.

    args: the flags of train.py but for the settings: out, resume, overwrite, preset, given ({setting: value} of the
    flags that were given). record is what config.json holds.
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
        self.tokens, meta = self.source.ensure(train_config.data, model_config.vocab, prepare_data, vars(train_config),
                                               args.given)
        # What was not given is the folder's: the size of its vocabulary, and how it was prepared.
        self.model_config = dataclasses.replace(model_config, vocab=meta["vocab"])
        prepared = {name: meta[name] for name in data.PREPARATION if name in meta}
        self.train_config = dataclasses.replace(train_config, **prepared)
        if train_config.objective == "mlm":
            from engine import masking
            self.source = masking.Masked(self.source, self.model_config.vocab)
        self.record = {
            "model": dataclasses.asdict(self.model_config), "train": dataclasses.asdict(self.train_config),
            "data": {"folder": str(self.tokens), **meta},
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
        tokens = self.tokens / "tokenizer.tiktoken"
        if tokens.exists():                                             # a task has none
            self.write(tokens.name, tokens.read_bytes())

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
            raise InputError(f"{self.tokens} is not the data that {self.folder} was trained on: the hash of "
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
        check_shapes(self.folder, tensors, self.model_config, ("", "m.", "v."))
        backend.load(tensors, info["step"])
        self.write("log.jsonl", kept_log(self.folder, info["step"]))
        self.write_record()
        self.log(step=info["step"], resumed=now["provenance"])
        return info["step"], info["seconds"]

    # ---- signals

    def must_stop(self, signals):
        """Whether a signal asks to stop."""
        return bool(signals)

def kept_log(run, step):
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
