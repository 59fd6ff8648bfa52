"""train.py --resume: the flags of the run that goes on, its checkpoint, and what stays of its log."""

import contextlib
import json

import numpy as np

import common
import model_numpy
from config import PRESETS, InputError, fields_of, flag_of


def choose_flags(first, preset, pe):
    """(preset, pe), by which flags are read: those of the run to resume, unless they were given."""
    if first.out is None:
        return preset, pe
    _, _, record = common.read_run(common.output_folder(first.out))
    own = record["provenance"].get("preset")
    return first.preset or (own if own in PRESETS else preset), first.pe or record["model"]["encoding"]["pe"]

def check_flags(run, values):
    """(ModelConfig, TrainConfig) of the run to resume; InputError for a flag that contradicts it."""
    model, config, record = common.read_run(run)
    stored = vars(model.encoding) | vars(model) | vars(config) | {"preset": record["provenance"].get("preset")}
    flags = {f.name: flag_of(f) for f in fields_of(model.encoding.pe)}
    for name, value in values.items():
        if name in stored and stored[name] != value:
            raise InputError(f"{flags.get(name, '--' + name)} is {stored[name]} in {run}, and {value} was given: "
                             "resume with the run's own flags, or train under another --out")
    return model, config

def load_checkpoint(run, backend, model_config):
    """Go on from the run's checkpoint; InputError unless it has the weights and moments of the model, in fp32."""
    tensors, info = common.read_checkpoint(run)
    shapes = model_numpy.parameter_shapes(model_config)
    expected = {prefix + name: shape for prefix in ("", "m.", "v.") for name, shape in shapes.items()}
    if {name: x.shape for name, x in tensors.items()} != expected or {x.dtype for x in tensors.values()} != {
            np.dtype(np.float32)}:
        raise InputError(f"{run / common.CHECKPOINT} is not of the model in config.json: one of them was edited")
    backend.load(tensors, info["step"])

def cut_log(run, step):
    """Take out of log.jsonl what was trained after the checkpoint of this step, and is trained again."""
    kept = []
    for line in (run / "log.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError):   # of a line that was cut short or damaged
            if json.loads(line)["step"] <= step:
                kept.append(line.decode() + "\n")
    common.write_text(run / "log.jsonl", "".join(kept))
