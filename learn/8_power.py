"""Exercise 8. An encoding as a file of zoo/: the other kind of KERPLE (Chi et al. 2022), bias_mn = -p_h |m - n|^a_h.

P and A (H,) are learned, by the names "p" and "a". p = e^P is positive, and a = 2 sigmoid(A) is between 0 and 2.
docs/change.md says what the parts do, and has the logarithmic kind in full. All arrays are float64.
Question: what do pairs at the distances 0 and 1 say about the exponent a?
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
        """The distances |m - n| as floats, (..., 1, T, S); expe.distances helps."""
        raise NotImplementedError("return the table")

def score(q, k, h, table, learned):
    """The bias (..., H, T, S), and its pullback: dbias (B, H, T, S) -> 0, 0, 0, {"p": dP, "a": dA}."""
    raise NotImplementedError("return bias, pullback")

def doors(settings):
    return model_numpy.Encoding(
        score=score, parameters=lambda model: {name: model_numpy.normal((model.heads,)) for name in ("p", "a")})

class Layer(Encoding):
    def score(self, q, k, key_state, table):
        raise NotImplementedError("return the bias in torch; self.p and self.a are P and A")
