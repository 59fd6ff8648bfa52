"""FIRE (Li et al. 2024, arXiv 2310.04418, section 3): a small network makes a bias of the distance, one for each head.
It reads the distance divided by the query's position, or by a trained threshold where that is larger. All three enter
by their logarithms, so the network reads numbers from 0 to 1 at any length.

    bias_mn = f_h(psi(m - n) / psi(max(m, L))),  psi(x) = ln(1 + c x),  f an MLP with ReLU, 1 -> 32 -> H

c starts at 0.1 and L at the trained length, where the authors have 512. Both are powers of e here and so stay positive:
nothing is divided by 0, and no epsilon is needed. m counts from 0, as in the paper's listing. Every block has its own
function (FIRE-S shares one). What f gives to all keys alike the softmax drops: f has no last bias, and f(0) = 0, by

    f(x) = W_2 (relu(w_1 x + b_1) - relu(b_1)) = W_2 max(w_1 x + min(b_1, 0), min(-b_1, 0))
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

import expe
import model_numpy
from model_numpy import constant, uniform
from model_torch import Encoding
from positional_encodings import NoPE
from settings import setting

PAIRS = 2**12                            # of query and key, whose hidden numbers are in memory at a time, and in cache


@dataclass(frozen=True)
class Settings(NoPE):
    threshold: float | None = setting(None, "FIRE's first L: queries before it share one scale of distances "
                                   "(default: the trained length)", above=0)
    fire_width: int = setting(32, "hidden width of FIRE's function", at_least=1)
    both_sides: ClassVar[bool] = False

    def fit(self, model):
        return replace(self, threshold=self.threshold or float(model.context))

    def pairs(self, queries, keys, model):
        """The distance of each query to position 0, then to each key: (..., T, 1 + S)."""
        keys = np.insert(keys, 0, 0, axis=-1)
        return np.abs(expe.distances(queries, keys)).astype(float)

def score(q, k, h, table, learned):
    """bias = W_2 hidden, hidden = max(w_1 x + min(b_1, 0), min(-b_1, 0)), x = ln(1 + c d) / ln(1 + c r), r = max(m, L).

    table (..., T, 1 + S): m, then d.
    """
    w1, b1, w2 = (learned[name] for name in ("w1", "b1", "w2"))
    m, d, c, L = table[..., :1], table[..., 1:], np.exp(learned["c"]), np.exp(learned["L"])
    r = np.maximum(m, L)                                                                       # (..., T, 1)
    x = np.log1p(c * d) / np.log1p(c * r)                                                      # (..., T, S)
    line, floor = x[..., None] * w1 + np.minimum(b1, 0), np.minimum(-b1, 0)                    # (..., T, S, 32), (32,)
    hidden, on = np.maximum(line, floor), line > floor
    def pullback(dbias):
        """x = a/b with a = ln(1 + c d), b = ln(1 + c r): da = dx/b, db = -dx x/b.

        d ln(1 + c y) = (c dy + y dc) / (1 + c y). r = L where r > m, and is fixed elsewhere; c = e^C and L = e^Lambda,
        so dC = c dc, dLambda = L dL. A b_1 below 0 is in the line, one above 0 is in the floor.
        """
        dbias = dbias.sum(0) if d.ndim == 2 else dbias                                         # (..., H, T, S)
        dout = np.moveaxis(dbias, -3, -1)                                                      # (..., T, S, H)
        dhidden = dout @ w2                                                                    # (..., T, S, 32)
        dline, dfloor = ((dhidden * part).reshape(-1, len(w1)) for part in (on, ~on))          # (pairs, 32) each
        dx = (dline @ w1).reshape(x.shape)                                                     # (..., T, S)
        da = dx / np.log1p(c * r)
        db = -(da * x).sum(-1, keepdims=True)                                                  # (..., T, 1)
        dc = (da * d / (1 + c * d)).sum() + (db * r / (1 + c * r)).sum()
        dL = (db * c / (1 + c * r) * (r > m)).sum()
        return 0, 0, 0, {"c": c * dc, "L": L * dL, "w1": x.ravel() @ dline,
                         "b1": np.where(b1 < 0, dline.sum(0), -dfloor.sum(0)),
                         "w2": dout.reshape(-1, len(w2)).T @ hidden.reshape(-1, len(w1))}
    return np.moveaxis(hidden @ w2.T, -1, -3), pullback                                        # (..., H, T, S)

def doors(settings):
    def parameters(model):
        """The weights start as those of torch's linear layers, uniform within 1/sqrt(inputs)."""
        width = settings.fire_width
        return {"c": constant((1,), math.log(0.1)), "L": constant((1,), math.log(settings.threshold)),
                "w1": uniform((width,), -1, 1), "b1": uniform((width,), -1, 1),
                "w2": uniform((model.heads, width), -(width**-0.5), width**-0.5)}

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

class Layer(Encoding):
    def score(self, q, k, key_state, table):
        m, d, c, L = table[..., :1], table[..., 1:], self.c.exp(), self.L.exp()
        x = (c * d).log1p() / (c * torch.maximum(m, L)).log1p()                            # (..., T, S)
        below, floor = self.b1.clamp(max=0), (-self.b1).clamp(max=0)                       # (32,) each
        rows = x[..., None].split(max(1, PAIRS // x.shape[-1]), dim=-3)                    # (..., some of T, S, 1)
        hidden = (torch.maximum(torch.addcmul(below, y, self.w1), floor) for y in rows)    # (..., S, 32)
        return torch.cat([y @ self.w2.T for y in hidden], dim=-3).movedim(-1, -3)          # (..., H, T, S)
