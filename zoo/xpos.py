"""xPos (Sun et al. 2022, arXiv 2212.10554, section 3.2): queries and keys rotate as in RoPE. Each pair's part of a
score also shrinks with the distance, at a rate of its own.

    q_m times z_i^((m - c)/512) and k_n times z_i^((c - n)/512),  z_i = (2i/D + 0.4)/1.4,  i = 0 .. D/2-1

so that the part of pair i gets z_i^((m - n)/512), whatever c is. Here c is half the trained length: it must be one for
all keys that a cache holds. Both factors are within e^-80 .. e^80, and so within fp32 and bf16 (fp16 ends at e^11), up
to 32,695 positions from there. They grow no further, so that two tokens beyond that have RoPE alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import expe
import model_numpy
from model_torch import Encoding, rotate_pairs
from positional_encodings import RoPE, Sinusoidal
from settings import setting


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    both_sides: ClassVar[bool] = False                               # scores of later keys would grow with distance
    scale_base: float = setting(512.0, "positions in which xPos' factors apply once", above=0)

    fit = RoPE.fit

    def rows(self, positions, model):
        """Cosines and sines for the queries, then for the keys: (..., 1, T, 2D)."""
        cos, sin = np.split(expe.rope_table(positions, model.d_head, self.base), 2, axis=-1)        # (..., T, D/2) each
        z = (np.arange(0, model.d_head, 2) / model.d_head + 0.4) / 1.4                              # (D/2,)
        apart = (np.asarray(positions)[..., None] - model.context // 2) / self.scale_base           # (..., T, 1)
        factor = z ** np.clip(apart, 80 / np.log(z[0]), -80 / np.log(z[0]))
        return np.concatenate((cos * factor, sin * factor, cos / factor, sin / factor), -1)[..., None, :, :]

def rotate(q, k, table, learned):
    """s_m R_m q, R_n k / s_n. q and k (B, H, T, D); table (..., 1, T, 2D): s cos, s sin, cos / s, sin / s."""
    cos_q, sin_q, cos_k, sin_k = np.split(table, 4, axis=-1)                                        # (..., 1, T, D/2)
    def pullback(dq, dk):
        """out = s R q: dq = s R^T dout, and s R^T rotates by minus the angle."""
        return model_numpy.rotate_pairs(dq, cos_q, -sin_q), model_numpy.rotate_pairs(dk, cos_k, -sin_k), {}
    return model_numpy.rotate_pairs(q, cos_q, sin_q), model_numpy.rotate_pairs(k, cos_k, sin_k), pullback

def doors(settings):
    return model_numpy.Encoding(rotate=rotate)

class Layer(Encoding):
    def rotate(self, q, k, table):
        of_q, of_k = table.chunk(2, dim=-1)                                                     # (..., 1, T, D)
        return rotate_pairs(q, of_q), rotate_pairs(k, of_k)
