"""Losses of tiny models, to which model_torch.py and the page's copy of it, model.js and encodings.js, are held.

    python -m web.vectors            writes web/vectors.json, after an edit of the model on both sides

For each encoding of the page, a GPT whose weights NumPy draws in the order of their names reads a text past its trained
length. web/explorer.py compares model_torch.py with these losses before it writes a page. tests/test_explorer.py
compares model_numpy.py with them, and the page's JavaScript in a browser.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

from cli import CommandLine
from files import read_json, read_text, write_text

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

from config import ModelConfig
from model_torch import GPT
from positional_encodings import make_encoding
from settings import InputError

WEB = Path(__file__).parent
FILE = WEB / "vectors.json"
COPY = ("model.js", "encodings.js")
TOKENS = 140                             # that are read, by models that are trained at CONTEXT
CONTEXT = 16
EVERY = 7                                # of so many losses one is kept
NEAR = 1e-5                              # in float64; the file has six decimals
CASES = {                                # name: encoding, its settings, and where it differs from a plain reading
    "nope": ("nope", {}, {}),
    "window": ("nope", {}, {"window": 20}),
    "sinusoidal": ("sinusoidal", {"base": 500.0}, {}),
    "expe": ("expe", {"l": 5}, {}),
    "keys": ("expe", {"l": 5, "on": "k", "theta": 0.5}, {}),
    "stable": ("expe", {"l": 5, "constant": True}, {}),
    "exqpe": ("exqpe", {"l": 5}, {}),
    "rope": ("rope", {}, {}),
    "moved": ("rope", {}, {"window": 20, "start": 333}),
    "alibi": ("alibi", {"slopes": 2.0}, {}),
    "fox": ("fox", {}, {}),
}

class Case(NamedTuple):
    config: ModelConfig
    weights: dict                        # {name: float32 array}
    tokens: np.ndarray                   # (TOKENS + 1,): what is read, and the last target
    start: int                           # the position of the first token

def make_case(name):
    pe, settings, where = CASES[name]
    config = ModelConfig(layers=2, width=16, heads=2, context=CONTEXT, vocab=40, mlp_width=40, tied=False,
                         window=where.get("window", 0), encoding=make_encoding(pe, **settings))
    rng = np.random.default_rng(0)
    tokens = rng.integers(config.vocab, size=TOKENS + 1)
    shapes = {key: tuple(w.shape) for key, w in GPT(config, seed=None).state_dict().items()}
    weights = {}
    for key in sorted(shapes):
        noise = 0.3 * rng.standard_normal(shapes[key], np.float32)      # scores of about 1
        weights[key] = noise + np.float32("norm" in key and key.endswith("weight"))
    return Case(config, weights, tokens, where.get("start", 0))

@torch.no_grad()
def losses_of(case):
    """(2, TOKENS): the losses of model_torch.py in float64, as token_losses has them and of its logits."""
    model = GPT(case.config, seed=None).double().eval()
    model.load_state_dict({key: torch.from_numpy(w) for key, w in case.weights.items()})
    tokens = torch.from_numpy(case.tokens)[None]
    positions = case.start + np.arange(TOKENS)
    logits = model(tokens[:, :-1], None, positions)[0]                                 # (TOKENS, V)
    of_logits = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    return torch.stack((model.token_losses(tokens[:, :-1], tokens[:, 1:], positions)[0], of_logits)).numpy()

def read_vectors():
    """{name: the losses of its tokens 0, EVERY, 2 EVERY, ...} of the file."""
    return read_json(FILE, losses=dict)["losses"]

def different(vectors):
    """The names of the cases in which model_torch.py has other losses than these."""
    found = {name: losses_of(make_case(name))[:, ::EVERY] for name in CASES}
    return [name for name in CASES if name not in vectors or not np.abs(found[name] - vectors[name]).max() <= NEAR]

def check():
    """InputError that names the file to edit unless model_torch.py has the losses of the file."""
    wrong = different(read_vectors())
    if not wrong:
        return
    encodings = sorted({CASES[name][0] for name in wrong})
    in_model = "nope" in encodings                                      # whose doors are shut
    where = "web/model.js (its class Model)" if in_model else f"web/encodings.js (doorsOf: {', '.join(encodings)})"
    raise InputError("the page has its own copy of the model, and model_torch.py was edited since: make the edit in "
                     f"{where} too, then the numbers of both with python -m web.vectors, and compare them with "
                     "python -m pytest -m 'slow or not slow' tests/test_explorer.py")

def hash_copy():
    return hashlib.sha256("".join(read_text(WEB / name) for name in COPY).encode()).hexdigest()

def main(argv=None):
    parser = CommandLine(prog="python -m web.vectors", description="Write web/vectors.json: losses of model_torch.py, "
                         "which the page's JavaScript must have, too.")
    with parser.one_line_errors():
        parser.parse_args(argv)
        made = hash_copy()
        if FILE.exists() and read_json(FILE, copy=str)["copy"] == made and different(read_vectors()):
            raise InputError("model_torch.py was edited, and web/model.js and web/encodings.js are as they were: make "
                             "the edit there first, or the page shows another model")
        losses = {name: losses_of(make_case(name)) for name in CASES}
        if wrong := [name for name, both in losses.items() if not math.isclose(*both.sum(-1), rel_tol=1e-9)]:
            raise InputError(f"model_torch.py's cross_entropy is no longer that of its logits, as with {wrong[0]}: the "
                             "page has one for both")
        rows = [f' "{name}": {json.dumps([round(x, 6) for x in both[0, ::EVERY].tolist()])}'
                for name, both in losses.items()]
        write_text(FILE, f'{{"copy": "{made}",\n"losses": {{\n' + ",\n".join(rows) + "\n}}\n")
        print(f"{FILE}: losses of {len(losses)} models")

if __name__ == "__main__":
    main()
