"""KERPLE, logarithmic (Chi et al. 2022, arXiv 2205.09921, section 4): scores fall with the logarithm of the distance.

    bias_mn = -p_h ln(1 + a_h |m - n|),  p and a positive, trained, one of each for every head

All blocks share them (the paper's figure 1). The bias comes after the division by sqrt(D), as in the authors' code,
where p and a start uniform in (0, 2) and (0, 1) and are clamped at 0.01. Here p = e^P and a = e^A stay positive.
"""

from dataclasses import dataclass

import numpy as np

import expe
import model_numpy
from model_torch import Encoding
from positional_encodings import NoPE


@dataclass(frozen=True)
class Settings(NoPE):
    def pairs(self, queries, keys, model):
        return np.abs(expe.distances(queries, keys)).astype(float)[..., None, :, :]            # (..., 1, T, S)

def score(q, k, h, table, learned):
    """bias = -p ln(1 + a d), p = e^P and a = e^A. table d (..., 1, T, S); P and A (H,)."""
    p, a = np.exp(learned["p"])[:, None, None], np.exp(learned["a"])[:, None, None]            # (H, 1, 1) each
    bias = -p * np.log1p(a * table)                                                            # (..., H, T, S)
    def pullback(dbias):
        """dbias/dP = bias, since dp/dP = p; dbias/dA = -p a d / (1 + a d). Summed over all pairs."""
        dp, da = dbias * bias, dbias * (-p * (a * table) / (1 + a * table))                    # (B, H, T, S) each
        return 0, 0, 0, {"p": dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))}
    return bias, pullback

def log_uniform(shape, high):
    """A parameter that starts as the logarithm of a number drawn from 0.01 to high."""
    return model_numpy.Parameter(shape, lambda rng: np.log(rng.uniform(0.01, high, shape)))

def doors(settings):
    return model_numpy.Encoding(
        score=score,
        parameters=lambda model: {"p": log_uniform((model.heads,), 2), "a": log_uniform((model.heads,), 1)},
    )

class Layer(Encoding):
    def score(self, q, k, key_state, table):
        p, a = self.p.exp()[:, None, None], self.a.exp()[:, None, None]                    # (H, 1, 1) each
        return -p * (a * table).log1p()                                                    # (..., H, T, S)
