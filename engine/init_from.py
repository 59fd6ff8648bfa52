"""train.py --init-from RUN: begin with the weights of another run, all but those of another encoding.

config.json tells the child's own settings: numbers that --learn trained in the parent become the child's start and
theta, and a default that depends on the context is computed for the child's.
"""

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np

import model_numpy
from files import hash_file
from runs import CHECKPOINT, load_model, read_checkpoint, read_run
from settings import InputError, flag_of, prefix_errors
from tokenizer import read_tokenizer

SHARED = ("layers", "width", "heads", "vocab", "norm", "mlp", "mlp_width", "tied")      # what both must have


def check_parent(run):
    """InputError unless the parent of a Run is another run, with a checkpoint, whose weights have the same shapes
    but for those of its encoding, and whose tokenizer is the same."""
    parent, model = run.train_config.init_from, run.model_config
    if run.folder.resolve() == Path(parent).resolve():
        raise InputError(f"--init-from must be another run than --out, {run.folder}")
    with prefix_errors("--init-from"):
        its, _, record = read_run(parent)
        load_model(parent)                                      # which refuses an edited config.json
        read_tokenizer(parent, record["data"])                     # and this another tokenizer
    for name in SHARED:
        if getattr(its, name) != getattr(model, name):
            raise InputError(f"{flag_of(name)} is {getattr(its, name)} in --init-from {parent}, and "
                             f"{getattr(model, name)} was given")
    if record["data"]["tokenizer"] != run.record["data"]["tokenizer"]:
        raise InputError(f"--data has another tokenizer than {parent}: give its data, {record['data']['folder']}, or "
                         f"prepare yours with data.py --tokenizer {parent}/tokenizer.tiktoken")
    encoding, trained = model.encoding, trained_settings(parent)
    if trained.pe == encoding.pe and "init" == getattr(trained, "learn", None) == encoding.learn:
        learned = {name: getattr(trained, name) for name in encoding.trained if getattr(run.args, name) is None}
        run.model_config = dataclasses.replace(model, encoding=dataclasses.replace(encoding, **learned))
        run.record["model"] = dataclasses.asdict(run.model_config)

LEARNED = "encoding.weight"             # the two numbers that --learn trains, where all blocks share them

def trained_settings(run):
    """The settings of a run's encoding, with the numbers that --learn trained instead of those it began with."""
    encoding = read_run(run)[0].encoding
    learned = read_checkpoint(run)[0].get(LEARNED)
    if getattr(encoding, "learn", "none") == "none" or learned is None:
        return encoding
    return dataclasses.replace(encoding, learn="init", **dict(zip(encoding.trained, learned.tolist(), strict=True)))

def short(x):
    """A number as a flag takes it: 1/512, 24 or 0.0021."""
    fraction = Fraction(x).limit_denominator(10**5)
    return str(fraction) if float(fraction) == x else str(np.float32(x)) if np.float32(x) == x else repr(x)

def differences(model, args, parent):
    """A line for each number of the encoding that was not given as a flag and is another one in the parent."""
    trained, encoding = trained_settings(parent), model.encoding
    other_context = read_run(parent)[0].context != model.context
    for f in dataclasses.fields(encoding) if trained.pe == encoding.pe else ():
        old, new = getattr(trained, f.name), getattr(encoding, f.name)
        if old == new or {type(old), type(new)} - {int, float} or getattr(args, f.name, new) is not None:
            continue
        flag = flag_of(f.name)
        line = f"{flag[2:]} is {short(new)}" + f" for --context {model.context}" * other_context
        line += f"; the parent has {short(old)}"
        try:
            dataclasses.replace(encoding, **{f.name: old}).fit(model)
            yield f"{line}: add {flag} {short(old)} to keep it"
        except InputError:                                             # of fewer rows than the context
            yield f"{line}, which is too few for this context"

def load_parent(run, backend):
    """Fill the backend of a Run that begins from the checkpoint of its parent; returns what config.json holds of
    that. InputError if the run was killed before its first checkpoint, and its parent was replaced since."""
    parent, model = run.train_config.init_from, run.model_config
    with prefix_errors("--init-from"):
        its, _, record = read_run(parent)
        tensors, info = read_checkpoint(parent)
    hashes = {name: hash_file(Path(parent) / name) for name in ("config.json", CHECKPOINT)}
    known = run.record.get("parent")
    before = known.get("sha256", hashes) if isinstance(known, dict) else hashes         # older runs have no hashes
    if before != hashes:
        raise InputError(f"--init-from {parent} was replaced since {run.folder} was begun with it, which has no "
                         "checkpoint yet: begin it anew with --overwrite")
    with prefix_errors("--init-from"):
        read_tokenizer(parent, record["data"])                     # which refuses another one than config.json says
    new = model_numpy.init_params(model, run.train_config.seed)
    same = (its.encoding.pe, its.cycle) == (model.encoding.pe, model.cycle)
    kept = {name: w for name, w in tensors.items() if name in new and w.shape == new[name].shape
            and ("encoding." not in name or same and begins_alike(name, its, model))}
    fresh = [name for name in new if name not in kept and not np.array_equal(new[name], tensors.get(name))]
    print(f"from step {info['step']:,} of {parent}, {its.encoding.pe} to {model.encoding.pe}; new weights: "
          f"{', '.join(fresh) or 'none'}; the optimizer begins anew")
    for line in differences(model, run.args, parent) if not run.args.resume else ():
        print(line)
    backend.load(new | kept, 0)
    return {"run": str(parent), "step": info["step"], "sha256": hashes}

def begins_alike(name, *configs):
    """Whether the settings of two configs give a parameter the same first value, so that the parent's may go on.

    What --learn trains never does: start and theta are settings, and begin as config.json has them.
    """
    if name == LEARNED and hasattr(model_numpy.encoding_with(name, configs[0]), "learn"):
        return False
    parameters = [model_numpy.model_parameters(config)[name] for config in configs]
    return np.array_equal(*(parameter.first_values(np.random.default_rng(0)) for parameter in parameters))
