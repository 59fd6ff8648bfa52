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
    p, a = np.exp(learned["p"])[:, None, None], 2 * model_numpy.sigmoid(learned["a"])[:, None, None]   # (H, 1, 1) each
    bias = -p * table**a                                                                       # (..., H, T, S)
    log = np.log(np.maximum(table, 1))         # at the distance 0 the power is 0 for every a, and so is its derivative
    def pullback(dbias):
        """dbias/dP = bias, since dp/dP = p; dbias/dA = bias ln d da/dA, and da/dA = a (1 - a/2)."""
        dp = dbias * bias                                                                      # (B, H, T, S)
        da = dp * log * a * (1 - a / 2)                                                        # (B, H, T, S)
        return 0, 0, 0, {"p": dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))}
    return bias, pullback

def doors(settings):
    return model_numpy.Encoding(
        score=score, parameters=lambda model: {name: model_numpy.normal((model.heads,)) for name in ("p", "a")})

class Layer(Encoding):
    def score(self, q, k, key_state, table):
        p, a = self.p.exp()[:, None, None], 2 * self.a.sigmoid()[:, None, None]                # (H, 1, 1) each
        return -p * table**a                                                                   # (..., H, T, S)
