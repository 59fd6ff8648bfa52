"""Compare an export with the run's own model, before anything is written: transformers' model must have GPT's logits.

An edit of model_torch.py changes neither the classes of transformers nor the steps that interop/modeling_gpt.py
replaces. So the logits decide what a folder can be, and not a list of what is known to fit.
"""

import itertools
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

TOLERANCE = 1e-4                         # of the largest logit, in fp32
BEYOND = 70                              # tokens past the trained length, if the encoding has positions there
PADS = 4

class Difference(NamedTuple):
    at_once: bool                        # whether it is there where a text is read at once, without cache and padding
    words: str

def read_at_once(model, tokens):
    return model(tokens).logits

def read_in_parts(model, tokens):
    """With a cache: half of the text, two tokens one by one, and the others."""
    T = tokens.shape[1]
    cache = None
    parts = []
    for begin, end in itertools.pairwise(sorted({0, *(min(T, T // 2 + i) for i in range(3)), T})):
        found = model(tokens[:, begin:end], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.logits)
    return torch.cat(parts, dim=1)

def read_padded(model, tokens):
    """As a shorter text of a batch, with padding on the left."""
    mask = torch.ones(1, PADS + tokens.shape[1], dtype=torch.long)
    mask[:, :PADS] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens = torch.cat((tokens[:, -1:].expand(1, PADS), tokens), dim=1)
    return model(tokens, attention_mask=mask, position_ids=positions).logits[:, PADS:]

READINGS = {"logits": read_at_once, "logits in parts with a cache": read_in_parts, "logits with padding": read_padded}

@torch.no_grad()
def difference(gpt, build):
    """The Difference between the logits of a GPT and those of the model of transformers build(weights), if any.

    weights: {our name: tensor}. Both read a random text, past the trained length, with larger weights than the GPT's,
    since in a run that has hardly been trained attention matters little, and then with the GPT's own.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()                                      # of loading weights
    tokens = random_text(gpt.config)
    louder = type(gpt)(gpt.config, seed=None).eval()
    louder.load_state_dict(raise_weights(gpt.state_dict()))
    for plain in (louder, gpt):
        right = plain(tokens)                                                          # (1, T, V)
        model = None
        for name, read in READINGS.items():
            try:
                model = model or build(plain.state_dict()).eval()
                found = read(model, tokens)
            except MemoryError:
                raise
            except Exception as error:                                  # of steps that do not fit each other any more
                return Difference(read is read_at_once, f"{name} end in {told(error)}")
            error = ((found - right).abs().max() / right.abs().max()).item()
            if not error <= TOLERANCE:                                  # NaN, too
                amount = f"{error:.0%}" if error >= 0.01 else f"{error:.0e} of the largest"
                return Difference(read is read_at_once, f"{name} differ by {amount}")
    return None

def random_text(config):
    """(1, T) tokens, past the trained length if the encoding has positions there."""
    T = min(config.context + BEYOND, config.encoding.longest(config))
    return torch.randint(config.vocab, (1, T), generator=torch.Generator().manual_seed(0))

@torch.no_grad()
def has_its_logits_losses(gpt):
    """Whether a GPT's losses are the cross-entropy of its logits, as those of a model of transformers are."""
    tokens = random_text(gpt.config)
    losses = gpt.token_losses(tokens[:, :-1], tokens[:, 1:])[0]
    right = F.cross_entropy(gpt(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
    return torch.allclose(losses, right, rtol=TOLERANCE, atol=TOLERANCE)

def told(error):
    """An exception in one line, with its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {' '.join(str(error).split())}"

def raise_weights(weights):
    """{name: w + noise}, so that scores are about 1, and a gate that starts at 0 is not there."""
    draw = torch.Generator().manual_seed(0)
    raised = {}
    for name, w in weights.items():
        scale = 1.2 / w.shape[-1] ** 0.5 if w.ndim > 1 else 0.3
        raised[name] = w + scale * torch.randn(w.shape, generator=draw)
    return raised

def function_to_edit(gpt, make):
    """The function of interop/modeling_gpt.py that lacks an edit which a GPT has. make: its class CachedGPT."""
    def same(a, b):
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    n = np.arange(gpt.config.context)
    right = gpt.tables(n)
    found = make(gpt.config).tables(n, keys=n, padding=None, seen=None, cache=None)
    alike = all(same(table.rows, found[s].rows) and same(table.pairs, found[s].pairs) for s, table in right.items())
    return "CachedAttention.forward" if alike else "CachedGPT.tables"
