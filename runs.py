"""A run on disk, whole or not at all; and how a script says what was wrong.

    runs/<name>/   config.json  model.safetensors  optimizer.safetensors  log.jsonl  tokenizer.tiktoken

config.json names the size and the SHA-256 of the checkpoint's files, and replacing it is what commits a checkpoint:
1. FILE.new is written for each file, 2. config.json is replaced, 3. each FILE.new is renamed to FILE. A run killed
before 2 keeps its old checkpoint whole; killed after 2, the files that config.json names are still .new.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

from config import InputError, ModelConfig, TrainConfig

# torch and safetensors are imported where they are used, so that --help and a wrong flag answer at once.
CHECKPOINT = ("model.safetensors", "optimizer.safetensors")


# ---- the command line ------------------------------------------------------------------------------------------------

class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser that reports every wrong input as one line on stderr, with exit status 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(str(message).split())}\n")

    @contextlib.contextmanager
    def one_line_errors(self):
        """Everything that the user or the machine can get wrong ends in error(); a bug keeps its traceback."""
        try:
            yield
        except InputError as error:
            self.error(error)
        except (KeyboardInterrupt, SystemError) as error:           # the latter: a Ctrl-C that came within rustbpe
            if not isinstance(error.__cause__ or error, KeyboardInterrupt):
                raise
            self.exit(130, f"{self.prog}: stopped\n")
        except MemoryError as error:
            self.error(f"not enough memory: {error or 'use smaller sizes'}")
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)            # the reader of our output has gone (| head)
        except OSError as error:
            self.error(f"{error.filename}: {error.strerror}" if error.filename else error)

def number(text):
    """A finite float from "0.5", "1e-3" or "1/2048", for argparse."""
    above, _, below = text.partition("/")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if math.isfinite(value := float(above) / float(below or 1)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5, 1e-3 or 1/2048")

def whole(text):
    """An int of at most 2^53 from "600000000", "600_000_000" or "6e8", for argparse."""
    with contextlib.suppress(ValueError):
        if (value := float(text)).is_integer() and abs(value) <= 2**53:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (of at most 2^53)")

def at_least(low):
    """The argparse type of a whole number of at least `low`."""
    def read(text):
        if (value := whole(text)) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value
    return read

def listed(kind, *known):
    """The argparse type of "A,B,...": a list without repeats of what `kind` reads, each one of `known` if any are."""
    def read(text):
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if wrong := [value for value in values if known and value not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return values
    return read

def number_or_auto(text):
    """A finite float, or "auto", for argparse."""
    return text if text == "auto" else number(text)

def new_file(text):
    """The path of a file in a folder that exists and can be written, for argparse."""
    path, folder = Path(text), Path(text).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists and can be written")
    return text

def picture(text):
    """The path of a picture that can be written, for argparse: known by its suffix before the work that leads to it."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)

def pick_device(name="auto"):
    """A torch.device from "auto" (GPU if any), "cpu", "cuda", "cuda:1", "mps"; InputError if it is not here."""
    import torch

    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in has if has[kind]))
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise InputError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    kind, _, index = name.partition(":")
    if not has[kind] or (index and int(index) >= torch.cuda.device_count()):
        raise InputError(f"device {name}: torch {torch.__version__} sees none on this machine: use --device cpu")
    return torch.device(name)


# ---- files -----------------------------------------------------------------------------------------------------------

def write_whole(path, text):
    """Write a file so that no reader ever sees half of it, and a kill leaves the old one."""
    scratch = Path(f"{path}.new")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)

def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1) + "\n")

def write_rows(path, rows):
    write_whole(path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")

def read_json(path):
    """The value of a JSON file; InputError that names the file if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON: it was cut short or edited") from None

def fingerprint(path):
    """{"bytes": ..., "sha256": ...} of a file."""
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# ---- reading a run ---------------------------------------------------------------------------------------------------

def named_runs(names):
    """The run directories that are named, or else every one under runs/; InputError if there is none."""
    if found := [Path(name) for name in names] or sorted(p.parent for p in Path("runs").glob("[!.]*/config.json")):
        return found
    raise InputError("there is no run under runs/: train one with python train.py --pe expe --l 24")

def read_run(run):
    """(ModelConfig, TrainConfig, all of config.json) of a run directory; InputError that says what is wrong with it."""
    run = Path(run)
    if not run.is_dir():
        raise InputError(f"{run}: no such run directory; train one with: python train.py --out {run}")
    if not (run / "config.json").exists():
        raise InputError(f"{run} holds no config.json, so it is not a run directory of train.py")
    record = read_json(run / "config.json")
    try:
        _ = record["data"]["folder"], record["data"]["pattern"], record["data"]["tokenizer"]["sha256"]
        _ = record["checkpoint"]["step"] + sum(file["bytes"] for file in record["checkpoint"]["files"].values())
        return ModelConfig.from_dict(record["model"]), TrainConfig.from_dict(record["train"]), record
    except InputError as error:
        raise InputError(f"{run / 'config.json'}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run / 'config.json'} lacks {error}: it was cut short or edited") from None

def checkpoint_file(run, record, name):
    """The path of a checkpoint's file, FILE or still FILE.new, whose size and hash are config.json's, or InputError."""
    path, expected = Path(run) / name, record["checkpoint"]["files"][name]
    for candidate in (Path(f"{path}.new"), path):
        found = fingerprint(candidate) if candidate.exists() else None
        if found == expected:
            return candidate
    if found is None:
        raise InputError(f"{path} is missing")
    if found["bytes"] != expected["bytes"]:
        raise InputError(f"{path} has a size of {found['bytes']:,} bytes and config.json says {expected['bytes']:,}")
    raise InputError(f"{path} has the right size and the wrong SHA-256 hash: it was damaged or replaced")

def read_tensors(path, shapes):
    """{name: float32 array} of a .safetensors file; InputError unless its names and shapes are those of `shapes`."""
    import safetensors.numpy

    try:
        tensors = safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a safetensors file of NumPy's types: {error}") from None
    for name in [*shapes, *tensors]:
        if name not in tensors or name not in shapes:
            what = "lacks the" if name in shapes else "has an unknown"
            raise InputError(f"{path} {what} tensor {name}: it is of another model than config.json's")
        found, right = (tensors[name].shape, str(tensors[name].dtype)), (tuple(shapes[name]), "float32")
        if found != right:
            raise InputError(f"{path}: {name} has the shape and type {found}, and config.json makes it {right}")
    return {name: tensors[name] for name in shapes}

def load_model(run, make=None):
    """(GPT on the CPU in eval mode, all of config.json) of a run directory; make(config): another class than GPT."""
    import torch

    from model_numpy import parameter_shapes
    from model_torch import GPT

    config, _, record = read_run(run)
    try:
        path = checkpoint_file(run, record, "model.safetensors")
    except (InputError, OSError):                       # a run in training may have replaced its checkpoint just now
        config, _, record = read_run(run)
        path = checkpoint_file(run, record, "model.safetensors")
    model, weights = (make or GPT)(config), read_tensors(path, parameter_shapes(config))
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    return model.eval(), record


# ---- checkpoints -----------------------------------------------------------------------------------------------------

def save_checkpoint(run, backend, step, record, seconds=0.0):
    """Replace the run's checkpoint by this one, whole or not at all; seconds: trained so far."""
    import safetensors.numpy

    try:
        for name, tensors in zip(CHECKPOINT, (backend.weights(), backend.moments()), strict=True):
            safetensors.numpy.save_file(tensors, run / f"{name}.new")
    except safetensors.SafetensorError as error:                        # how it reports a full disk
        raise InputError(f"{run}: the checkpoint of step {step} cannot be written: {error}") from None
    files = {name: fingerprint(run / f"{name}.new") for name in CHECKPOINT}
    record["checkpoint"] = {"step": step, "seconds": seconds, "files": files}
    write_json(run / "config.json", record)
    for name in CHECKPOINT:
        os.replace(run / f"{name}.new", run / name)

def new_run(run, backend, record, tokenizer):
    """Make the run directory with the checkpoint of step 0, whole or not at all; one that is there is replaced."""
    scratch = run.parent / f".{run.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        shutil.copyfile(tokenizer, scratch / "tokenizer.tiktoken")
        (scratch / "log.jsonl").write_text("", encoding="utf-8")
        save_checkpoint(scratch, backend, 0, record)
        shutil.rmtree(run, ignore_errors=True)
        os.rename(scratch, run)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

def load_checkpoint(run, backend, record):
    """Fill the backend from the run's checkpoint; returns its step. Cuts the log back to that step."""
    if "optimizer.pt" in record["checkpoint"]["files"]:
        raise InputError(f"{run} is of an earlier version: python -m lab.upgrade {run} makes it resumable")
    weights, moments = (checkpoint_file(run, record, name) for name in CHECKPOINT)
    step = record["checkpoint"]["step"]
    shapes = {f"{moment}.{name}": shape for moment in "mv" for name, shape in backend.shapes.items()} if step else {}
    backend.load(read_tensors(weights, backend.shapes), read_tensors(moments, shapes), step)
    for path in (weights, moments):
        os.replace(path, str(path).removesuffix(".new"))               # a kill may have left the last renames undone
    path = run / "log.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)     # the last may be what a kill left of one
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} holds a line that train.py did not write: mend or remove it") from None
    write_whole(path, "".join(kept))
    return step
