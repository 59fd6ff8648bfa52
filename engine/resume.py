"""train.py --resume: the flags of the run that goes on, its checkpoint, and what stays of its log."""

import contextlib
import dataclasses
import json

import codehash
import common
import data
from config import PRESETS, SPLITS, InputError, flag_of


def fill_in(args):
    """Set --preset and --pe, by which other flags are read, to those of the run in args.out."""
    if args.out is not None:
        record = read_run(args.out)[2]
        preset = record["provenance"].get("preset")
        if preset not in [None, *PRESETS]:
            raise InputError(f"{args.out}/config.json was edited: provenance.preset must be one of "
                             f"{', '.join(PRESETS)}, got {preset!r}")
        stored = {"preset": preset, "pe": record["model"]["encoding"]["pe"]}
        check(args.out, stored, vars(args))
        vars(args).update(stored)

def check_flags(run, flags):
    """(ModelConfig, TrainConfig) of the run to resume; InputError for a flag that contradicts it."""
    model, config, record = read_run(run)
    if flags.get("steps", 0) > config.steps:                            # a longer run, by the schedule of so many steps
        config = dataclasses.replace(config, steps=flags["steps"])
    check(run, vars(model.encoding) | vars(model) | vars(config), flags)
    return model, dataclasses.replace(config, data=record["data"]["folder"])           # its text may have changed

def read_run(run):
    """common.read_run, once a replacement by --overwrite that a kill has broken off is completed or taken back."""
    if (run / common.NEW_RUN).exists():
        with common.lock(run):                                          # which does that
            pass
    return common.read_run(run)

def check(run, stored, flags):
    """InputError for a flag that was given with another value than is stored of a run."""
    for name, value in stored.items():
        if flags.get(name) not in (None, value):
            raise InputError(f"{flag_of(name)} is {value} in {run}, and {flags[name]} was given: resume with the run's "
                             "own flags, or train under another --out")

def check_data(run):
    """InputError unless a train.Run has the data that it was trained on."""
    stored, now = common.read_run(run.folder)[2]["data"], run.record["data"]
    changed = [split for split in SPLITS if stored["splits"][split]["sha256"] != now["splits"][split]["sha256"]]
    for name in ("tokenizer", "sequences"):                             # sequences: of a task, but not in older runs
        if stored.get(name, now.get(name)) != now.get(name):
            changed.append(name)
    if changed:
        raise InputError(f"{run.tokens} is not the data that {run.folder} was trained on: the hash of "
                         f"{', '.join(changed)} differs")
    if common.checkpoint_info(run.folder)["step"]:
        data.run_tokenizer(run.folder, stored)                          # which refuses another one

def go_on(run, backend):
    """Go on with a train.Run: fill the backend from its checkpoint; returns (steps done, seconds trained).

    What was logged after the checkpoint is trained again, and goes. If the code is not the one that trained so far,
    config.json gets the new hashes and the step from which they hold; an older run has no hashes, and gets none.
    """
    now, run.record = run.record, common.read_run(run.folder)[2]
    run.record["train"]["steps"] = run.train_config.steps
    info = common.checkpoint_info(run.folder)
    origin, code = run.record["provenance"], now["provenance"]["code"]
    if not info["step"]:                                                # it begins anew
        origin["code"] = code
    elif "code" in origin:
        before, origin["code"] = origin["code"], codehash.go_on(origin["code"], code, info["step"])
        if files := [file for file, its in origin["code"].items() if its != before.get(file)]:
            print(f"{run.folder}: it goes on with other code than it was trained with: {', '.join(files)}")
    if info["step"]:
        load_checkpoint(run.folder, backend, run.model_config)
        run.write("log.jsonl", kept_log(run.folder, info["step"]))
        run.write("config.json", json.dumps(run.record, indent=1, allow_nan=False).encode() + b"\n")
        run.log(step=info["step"], resumed=now["provenance"])
    return info["step"], info["seconds"]

def load_checkpoint(run, backend, model_config):
    """Go on from the run's checkpoint; InputError unless it has the weights and moments of the model."""
    tensors, info = common.read_checkpoint(run)
    common.check_shapes(run, tensors, model_config, ("", "m.", "v."))
    backend.load(tensors, info["step"])

def kept_log(run, step):
    """The lines of log.jsonl up to the checkpoint of this step."""
    kept = []
    log = run / "log.jsonl"
    for line in log.read_bytes().splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):   # of a damaged line
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
    return b"".join(kept)
