"""+llama4: in blocks without an encoding scores grow with how many keys a query sees, in steps (Llama 4; Meta 2025).

    p_m = softmax((1 + attn_scale ln(1 + floor(n_m / floor_scale))) scores_m),  n_m the keys that m sees

Such a query sees all before it, so that n_m = m + 1. The names and numbers, 0.1 and 8,192, are those of Llama 4's
configuration in transformers. Where the encoding has rows or pairs nothing changes: give --nope-every, or --pe nope.
"""

import functools

import numpy as np

from config import InputError

FLOOR_SCALE, ATTN_SCALE = 8192, 0.1


def bare(settings):
    """Whether a block has no encoding but this: by --pe nope+llama4, or as config.block names those of --nope-every."""
    return settings.pe.startswith("nope+")

def Settings(base):
    class Settings(base):
        def fit(self, model):
            if not (bare(self) or model.nope_every):
                raise InputError(f"llama4 is for blocks without an encoding, and with {self.pe} there is none: give "
                                 "--nope-every too, or another --pe")
            return super().fit(model)

    return Settings

def doors(base):
    def doors(settings):
        inner = base(settings)

        def forward(scores, learned):
            """p = softmax(c scores), c = 1 + 0.1 ln(1 + floor(n / 8192)). scores (B, H, T, S)."""
            n = (scores > -np.inf).sum(-1, keepdims=True)                                      # (B, H, T, 1)
            c = (1 + ATTN_SCALE * np.log1p(n // FLOOR_SCALE)).astype(scores.dtype)
            p, cache = inner.softmax[0](c * scores, learned)
            return p, (c, cache)

        def backward(dp, cache):
            """z = c scores, and c is fixed."""
            c, cache = cache
            dz, down = inner.softmax[1](dp, cache)
            return c * dz, down

        return inner._replace(softmax=(forward, backward)) if bare(settings) else inner

    return doors

def torch_class():
    import torch

    def of(base):
        def make(settings, config):
            encoding = base(settings, config)
            inner = encoding.softmax or functools.partial(torch.softmax, dim=-1)

            def softmax(scores):
                steps = (scores > -torch.inf).sum(-1, keepdim=True) // FLOOR_SCALE
                steps = steps.to(torch.promote_types(scores.dtype, torch.float32))
                return inner((1 + ATTN_SCALE * steps.log1p()) * scores).type_as(scores)

            if bare(settings):
                encoding.softmax = softmax
            return encoding

        return make

    return of
