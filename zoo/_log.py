"""+log, SSMax (Nakanishi 2025, arXiv 2501.19399): scores grow with the logarithm of how many keys a query sees.

    p_m = softmax(s_h ln(n_m) scores_m),  n_m the keys that m sees, s_h trained, one for each head of each block

All of a score is multiplied, a bias too, since the paper puts this in the softmax's place; without one it is the query
that is. n_m counts the keys that are left by the mask, a window or a stream, never the length of the array. The first
token sees itself alone: ln 1 = 0 makes its score 0, and its weight is 1 as with any score. s starts at 1/(ln 1024 - 1),
by which the factors of 1,024 tokens are 1 on average. An encoding that enters at the embedding shares it among blocks;
of any other each block has all parameters of its own, T5's buckets too.
"""

import functools

import numpy as np

import model_numpy


def Settings(base):
    class Settings(base):
        @property
        def each_block(self):
            doors = model_numpy.ENCODINGS[self.pe.rpartition("+")[0]](self)
            return doors.embed is model_numpy.Encoding().embed

    return Settings

def doors(base):
    def doors(settings):
        inner = base(settings)

        def forward(scores, learned):
            """p = softmax(s c scores), c = ln n. scores (B, H, T, S), -inf for keys that are not seen; s (H,)."""
            seen = scores > -np.inf
            c = np.log(seen.sum(-1, keepdims=True)).astype(scores.dtype)                       # (B, H, T, 1)
            s = learned["temperature"][:, None, None]                                          # (H, 1, 1)
            x = np.where(seen, scores, 0)
            p, cache = inner.softmax[0](np.where(seen, s * c * x, -np.inf), learned)
            return p, (s, c, x, cache)

        def backward(dp, cache):
            """z = s c x: dx = s c dz, and s_h gets the sum of c x dz over all pairs."""
            s, c, x, cache = cache
            dz, down = inner.softmax[1](dp, cache)                                             # 0 where none is seen
            return s * c * dz, down | {"temperature": (c * x * dz).sum((0, 2, 3))}

        def start(rng, name, shape):
            if name == "temperature":
                return np.full(shape, 1 / (np.log(1024) - 1), np.float32)
            return inner.start(rng, name, shape)

        shapes = lambda model: inner.shapes(model) | {"temperature": (model.n_heads,)}  # noqa: E731
        return inner._replace(softmax=(forward, backward), shapes=shapes, start=start)

    return doors

def torch_class():
    import torch

    def of(base):
        def make(settings, config):
            encoding = base(settings, config)
            inner = encoding.softmax or functools.partial(torch.softmax, dim=-1)

            def softmax(scores):
                seen = scores > -torch.inf
                c = seen.sum(-1, keepdim=True).to(torch.promote_types(scores.dtype, torch.float32)).log()
                z = encoding.temperature[:, None, None] * c * scores.masked_fill(~seen, 0)
                return inner(z.masked_fill(~seen, -torch.inf)).type_as(scores)

            encoding.softmax = softmax
            return encoding

        return make

    return of
