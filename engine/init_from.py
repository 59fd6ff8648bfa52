"""train.py --init-from RUN: begin with the weights of another run, all but those of another encoding."""

from pathlib import Path

import common
import model_numpy
from config import InputError, flag_of

SHARED = ("layers", "width", "heads", "vocab", "norm", "mlp", "mlp_width", "tied")      # what both must have


def check_parent(run):
    """InputError unless the parent of a train.Run is another run, with a checkpoint, whose weights have the same shapes
    but for those of its encoding, and whose tokenizer is the same."""
    parent, model = run.train_config.init_from, run.model_config
    if run.folder.resolve() == Path(parent).resolve():
        raise InputError(f"--init-from must be another run than --out, {run.folder}")
    with common.naming("--init-from"):
        its, _, record = common.read_run(parent)
        common.load_model(parent)                                      # which refuses an edited config.json
    for name in SHARED:
        if getattr(its, name) != getattr(model, name):
            raise InputError(f"{flag_of(name)} is {getattr(its, name)} in --init-from {parent}, and "
                             f"{getattr(model, name)} was given")
    if record["data"]["tokenizer"] != run.record["data"]["tokenizer"]:
        raise InputError(f"--data has another tokenizer than {parent}: give its data, {record['data']['folder']}, or "
                         f"prepare yours with data.py --tokenizer {parent}/tokenizer.tiktoken")

def load_parent(run, backend):
    """Fill the backend of a new train.Run from the checkpoint of its parent; returns what config.json holds of that."""
    parent, model = run.train_config.init_from, run.model_config
    its, _, _ = common.read_run(parent)
    tensors, info = common.read_checkpoint(parent)
    new = model_numpy.init_params(model, run.train_config.seed)
    same = (its.encoding.pe, its.cycle) == (model.encoding.pe, model.cycle)
    kept = {name: w for name, w in tensors.items()
            if name in new and w.shape == new[name].shape and (same or "encoding." not in name)}
    fresh = [name for name in new if name not in kept]
    print(f"from step {info['step']:,} of {parent}, {its.encoding.pe} to {model.encoding.pe}; new weights: "
          f"{', '.join(fresh) or 'none'}; the optimizer begins anew")
    backend.load(new | kept, 0)
    return {"run": str(parent), "step": info["step"]}
