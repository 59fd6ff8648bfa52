"""DAPE (Zheng et al., NeurIPS 2024, arXiv 2405.14722), version 1: ALiBi's or KERPLE's bias is added to each score. A
small network reads the scores and biases of all heads for a query and a key, and adds one more number for each head.

    score_mn = s_mn + b_mn + f(s_mn, b_mn),  s = q.k/sqrt(D) of all H heads,  b ALiBi's or KERPLE's bias

f: 2H numbers -> 32 -> H, with a leaky ReLU of slope 0.01 in between, at each pair of a query and a key on its own. All
of it is of each block; f starts as torch's linear layers do, uniform within 1/sqrt(inputs), and KERPLE's p and a as
they do in zoo/kerple.py. The hidden layer has a bias, the last column of w1. The authors' second layer has one too, a
number a head, which their softmax drops, and those of --softmax sinks and stick would not. f holds (B, 32, T, S)
numbers, so that its memory grows with T times S.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import model_numpy
from model_torch import ALiBi, score_divisor
from settings import setting
from zoo import kerple

HIDDEN = 32
SLOPE = 0.01

@dataclass(frozen=True)
class Settings(kerple.Settings):
    bias: str = setting("kerple", "the bias that DAPE reads", one_of=("alibi", "kerple"))

def score(q, k, h, table, learned):
    """b + w2 leaky(w1 [s; b; 1]). q, k (B, H, T, D); table (..., 1, T, S); w1 (32, 2H + 1), w2 (H, 32)."""
    s = (q * (1 / model_numpy.score_divisor(q))) @ k.swapaxes(-1, -2)                          # (B, H, T, S)
    b, pull_b = (kerple.score if "p" in learned else model_numpy.alibi_score)(q, k, h, table, learned)
    x = np.concatenate((s, np.broadcast_to(b, s.shape), np.ones_like(s[:, :1])), 1)            # (B, 2H + 1, T, S)
    z = mix(learned["w1"], x)                                                                  # (B, 32, T, S)
    y = np.where(z > 0, z, SLOPE * z)
    def pullback(dbias):
        """Through f to s and b. s = q k^T / sqrt(D) is read here a second time, so q and k get a second gradient."""
        H = q.shape[1]
        dy = mix(learned["w2"].T, dbias)
        dz = np.where(z > 0, dy, SLOPE * dy)                                                   # (B, 32, T, S)
        ds, db, _ = np.split(mix(learned["w1"].T, dz), (H, 2 * H), axis=1)                     # (B, H, T, S) each
        ds = ds * (1 / model_numpy.score_divisor(q))
        down = pull_b(dbias + db)[-1]
        return ds @ k, ds.swapaxes(-1, -2) @ q, 0, down | {"w1": outer(dz, x), "w2": outer(dbias, y)}
    return b + mix(learned["w2"], y), pullback

def mix(w, x):
    """w x at each pair of a query and a key: w (m, n), x (B, n, T, S)."""
    return np.einsum("mn,bnts->bmts", w, x)

def outer(dout, x):
    """The gradient of w in mix(w, x): dout (B, m, T, S), x (B, n, T, S)."""
    return np.einsum("bmts,bnts->mn", dout, x)

def linear_weight(shape, inputs):
    """A weight that starts as torch's linear layers do, uniform within 1/sqrt(inputs)."""
    return model_numpy.Parameter(
        shape, lambda rng: rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(np.sqrt(inputs)))

def doors(settings):
    def parameters(model):
        H = model.heads
        bias = kerple.doors(None).parameters(model) if settings.bias == "kerple" else {}
        return bias | {"w1": linear_weight((HIDDEN, 2 * H + 1), 2 * H), "w2": linear_weight((H, HIDDEN), HIDDEN)}

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

class Layer(ALiBi):
    def score(self, q, k, key_state, table):
        b = (kerple.Layer if self.settings.bias == "kerple" else ALiBi).score(self, q, k, key_state, table)
        s = q @ k.mT / score_divisor(q)                                                    # (B, H, T, S)
        x = torch.cat((s, b.expand_as(s).type_as(s)), 1).movedim(1, -1)                    # (B, T, S, 2H)
        w1, w2 = self.w1.type_as(x), self.w2.type_as(x)
        y = F.leaky_relu(F.linear(x, w1[:, :-1], w1[:, -1]), SLOPE)                        # (B, T, S, 32)
        return b + F.linear(y, w2).movedim(-1, 1)                                          # (B, H, T, S)
