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
import math
import os
import re
import sys
from pathlib import Path

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import safetensors
import safetensors.numpy

import codehash
import files
import model_numpy
from config import SPLITS, ModelConfig, TrainConfig, check_together
from files import check_regular, read_json
from positional_encodings import ENCODINGS
from settings import InputError, from_values

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
