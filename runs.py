"""A run on disk, whole or not at all.

    runs/<name>/   config.json  model.safetensors  optimizer.safetensors  log.jsonl  tokenizer.tiktoken

config.json names the size and the SHA-256 of the checkpoint's files, and replacing it is what commits a checkpoint:
1. FILE.new is written for each file, 2. config.json is replaced, 3. each FILE.new is renamed to FILE. A run killed
before 2 keeps its old checkpoint whole; killed after 2, the files that config.json names are still .new. Each of the
three is on the disk before the next begins, so that a power cut is no worse than a kill.
"""

import difflib
import json
import os
from pathlib import Path

import numpy as np

from config import InputError, ModelConfig, TrainConfig
from files import FILE, check_shape, fingerprint, new_file_of, read_json, read_text, sync, write_json, write_whole

# torch and safetensors are imported where they are used, so that --help and a wrong flag answer at once.
CHECKPOINT = ("model.safetensors", "optimizer.safetensors")
FILES = ("config.json", *CHECKPOINT, "log.jsonl", "tokenizer.tiktoken", "log.csv", "tensorboard",     # these two: --log
         "optimizer.pt")                                               # of earlier versions
RUN = {"model": dict, "train": dict, "provenance": dict, "checkpoint": {"step": int, "files": {CHECKPOINT[0]: FILE}},
       "data": {"folder": str, "source": str, "pattern": str, "vocab": int, "tokenizer": FILE, "splits": dict}}


# ---- reading a run ---------------------------------------------------------------------------------------------------

def named_runs(names):
    """The run directories that are named, or else every one under runs/; InputError if there is none."""
    if found := [Path(name) for name in names] or sorted(p.parent for p in Path("runs").glob("[!.]*/config.json")):
        return found
    deeper = " itself: name them, as runs/*/*, or" * any(Path("runs").glob("[!.]*/[!.]*/config.json"))    # a grid's
    raise InputError(f"there is no run under runs/{deeper or ':'} train one with python train.py --pe expe --l 24")

def nearest(run):
    """In words, those of the runs under runs/ whose names are most like this one."""
    there = [str(path.parent) for path in Path("runs").glob("[!.]*/**/config.json")]
    found = difflib.get_close_matches(str(run), there, 6, cutoff=0)                    # most alike first
    more = ", ..." * (len(there) > len(found))
    return f"there is {', '.join(found)}{more}" if there else "train one with python train.py"

def read_run(run):
    """(ModelConfig, TrainConfig, all of config.json) of a run directory; InputError that says what is wrong with it."""
    run = Path(run)
    if not run.is_dir():
        raise InputError(f"{run}: no such run directory; {nearest(run)}")
    if not (run / "config.json").exists():
        raise InputError(f"{run} holds no config.json, so it is not a run directory of train.py; {nearest(run)}")
    record = read_json(run / "config.json", RUN)
    try:
        checkpoint = {"seconds": 0, **record["checkpoint"]}                # which the first versions did not count
        shape = {"seconds": int | float, "files": dict.fromkeys(checkpoint["files"], FILE)}
        check_shape(checkpoint, shape, "checkpoint")
        return ModelConfig.from_dict(record["model"]), TrainConfig.from_dict(record["train"]), record
    except InputError as error:
        raise InputError(f"{run / 'config.json'}: {error}") from None

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
    except (safetensors.SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a safetensors file of NumPy's types: {error}") from None
    for name in [*shapes, *tensors]:
        if name not in tensors or name not in shapes:
            what = "lacks the" if name in shapes else "has an unknown"
            raise InputError(f"{path} {what} tensor {name}: it is of another model than config.json's")
        found, right = (tensors[name].shape, str(tensors[name].dtype)), (tuple(shapes[name]), "float32")
        if found != right:
            raise InputError(f"{path}: {name} has the shape and type {found}, and config.json makes it {right}")
        if not np.isfinite(tensors[name]).all() or (name.startswith("v.") and tensors[name].min() < 0):
            raise InputError(f"{path}: {name} has numbers that are not finite, or squares below 0")
    return {name: tensors[name] for name in shapes}

def read_weights(run):
    """({name: array}, ModelConfig, all of config.json) of a run directory; InputError as read_run and read_tensors."""
    from model_numpy import parameter_shapes

    config, _, record = read_run(run)
    try:
        path = checkpoint_file(run, record, "model.safetensors")
    except (InputError, OSError):                       # a run in training may have replaced its checkpoint just now
        config, _, record = read_run(run)
        path = checkpoint_file(run, record, "model.safetensors")
    return read_tensors(path, parameter_shapes(config)), config, record

def load_model(run, make=None):
    """(GPT on the CPU in eval mode, all of config.json) of a run directory; make(config): another class than GPT."""
    import torch

    from model_torch import GPT

    weights, config, record = read_weights(run)                         # before memory is taken for the model
    model = (make or GPT)(config)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    return model.eval(), record


def check_parent(parent, model):
    """InputError unless this run's weights have the shapes and the use of a model's, but for those of its encoding."""
    its, _, _ = read_run(parent)
    for name in ("n_layers", "d_model", "n_heads", "vocab_size", "norm", "mlp", "d_mlp", "tied"):
        if (found := getattr(its, name)) != (right := getattr(model, name)):
            raise InputError(f"{name} is {found} in {parent} and {right} by these flags: to begin from it, give its")

def begin_from(parent, backend, model, data):
    """Begin with the weights of another run that check_parent has passed, all but those of another encoding.

    data: what config.json holds of this run's. Returns what it is to hold of the parent. InputError for a tokenizer
    that is not the parent's.
    """
    weights, its, record = read_weights(parent)
    if record["data"]["tokenizer"] != data["tokenizer"]:
        raise InputError(f"{data['folder']} has another tokenizer than {parent}: give its own data, "
                         f"{record['data']['folder']}, or data.py --tokenizer {parent}/tokenizer.tiktoken")
    new, same = backend.weights(), its.encoding.pe == model.encoding.pe
    kept = {name: w for name, w in weights.items()
            if name in new and w.shape == new[name].shape and (same or "encoding." not in name)}
    dropped, anew = (", ".join(name for name in all if name not in kept) or "none" for all in (weights, new))
    step = record["checkpoint"]["step"]
    print(f"from step {step:,} of {parent}, {its.encoding.pe} to {model.encoding.pe}: weights dropped: {dropped}; "
          f"new: {anew}; the optimizer begins anew")
    backend.load(new | kept, {}, 0)
    return {"run": str(parent), "step": step, "weights": record["checkpoint"]["files"][CHECKPOINT[0]]}


# ---- checkpoints -----------------------------------------------------------------------------------------------------

def write_tensors(path, tensors):
    """Write {name: array} to FILE.new, for commit; returns that path."""
    import safetensors.numpy

    try:
        safetensors.numpy.save_file(tensors, new := new_file_of(path))
    except safetensors.SafetensorError as error:                        # how it reports a full disk
        raise InputError(f"{path} cannot be written: {error}") from None
    return new

def save_checkpoint(run, backend, step, record, seconds=0.0):
    """Replace the run's checkpoint by this one, whole or not at all; seconds: trained so far."""
    for name, tensors in zip(CHECKPOINT, (backend.weights(), backend.moments()), strict=True):
        write_tensors(run / name, tensors)
    record["checkpoint"] = {"step": step, "seconds": seconds, "files": {}}
    commit(run, record, CHECKPOINT)

def commit(run, record, names):
    """Make what stands in FILE.new of each name a part of the run's checkpoint: the three steps at the head."""
    for name in (*(f"{name}.new" for name in names), "log.jsonl", "."):
        sync(run / name)
    record["checkpoint"]["files"] |= {name: fingerprint(run / f"{name}.new") for name in names}
    write_json(run / "config.json", record)
    for name in names:
        os.replace(run / f"{name}.new", run / name)
    sync(run)

def fill(backend, run, record):
    """Fill the backend from the run's checkpoint; returns the paths of its files."""
    weights, moments = (checkpoint_file(run, record, name) for name in CHECKPOINT)
    step = record["checkpoint"]["step"]
    shapes = {f"{moment}.{name}": shape for name, shape in backend.shapes.items() if step
              for moment in ("m" if name in backend.by_muon else "mv")}
    backend.load(read_tensors(weights, backend.shapes), read_tensors(moments, shapes), step)
    return weights, moments

def load_checkpoint(run, backend, record):
    """Fill the backend from the run's checkpoint; returns its step. Cuts the log back to that step."""
    if "optimizer.pt" in record["checkpoint"]["files"]:
        raise InputError(f"{run} is of an earlier version: python -m lab.upgrade {run} makes it resumable")
    paths, step = fill(backend, run, record), record["checkpoint"]["step"]
    log = log_up_to(run / "log.jsonl", step)
    for path in paths:
        os.replace(path, str(path).removesuffix(".new"))               # a kill may have left the last renames undone
    for path in run.glob(".tmp*"):                                      # or what safetensors had written of a file
        path.unlink()
    write_whole(run / "log.jsonl", log)
    return step

def log_up_to(path, step):
    """The text of a log's lines up to that step; InputError if the loss of any is not among them."""
    text = read_text(path)
    try:
        lines = text.splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.endswith("\n")]     # the last may be what a kill left of one
        for line in read:
            check_shape(line, {"step": int, "loss": int | float} if "loss" in line else {"step": int}, path)
        losses = [line["step"] for line in read if line["step"] <= step and "loss" in line]
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"{path} holds a line that train.py did not write: mend or remove it") from None
    if len(losses) != step or any(i != found for i, found in enumerate(losses, 1)):
        raise InputError(f"{path} has not the loss of each of the {step} steps: it was cut short, or is another run's")
    return "".join(line for line, of in zip(lines, read, strict=False) if of["step"] <= step)
