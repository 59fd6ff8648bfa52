"""PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534): each dimension of a query or a key becomes an arrow in a plane.
The content sets only its length, and the position sets only its angle. In RoPE the angle depends on both.

    score_mn = (1 / sqrt(D)) sum over c of softplus(q_mc) softplus(k_nc) cos((n - m) t_c + e_hc),  t_c = base^(-c/D)

Equations 3 to 8. Each of the D components of a query and of a key is the length of an arrow, which rotates with the
position; RoPE rotates pairs, whose own angle is content. e (H, D) is trained, in every block anew, starts at 0 and is
clamped to [-2 pi, 0]; the paper calls it theta. The printed t_c lacks the minus. Queries and keys become twice as wide,
values do not, and the division stays sqrt(D), as in the library PoPE-pytorch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import expe
import model_numpy
from model_torch import Encoding
from positional_encodings import Sinusoidal


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    def rows(self, positions, model):
        return expe.rope_table(positions, 2 * model.d_head, self.base)[..., None, :, :]            # (..., 1, T, 2D)

def point(x, cos, sin):
    """Arrows of these lengths, by the cosines and sines of their angles: (B, H, T, D) each to (B, H, T, 2D)."""
    return np.concatenate((x * cos, x * sin), -1)

def rotate(q, k, table, learned):
    """sqrt(2) softplus(q) (cos, sin)(m t), softplus(k) (cos, sin)(n t + e): sqrt(2) for a divisor of sqrt(2D)."""
    clamped = np.clip(learned["e"], -2 * np.pi, 0)[:, None]                                        # (H, 1, D)
    cos, sin = np.split(table, 2, axis=-1)                                                         # (..., 1, T, D) each
    cos_k = cos * np.cos(clamped) - sin * np.sin(clamped)                                          # (..., H, T, D)
    sin_k = sin * np.cos(clamped) + cos * np.sin(clamped)
    length_q, length_k = math.sqrt(2) * np.logaddexp(0, q), np.logaddexp(0, k)
    def pullback(dq, dk):
        """(x, y) = r (cos, sin): dr = dx cos + dy sin, dangle = r (dy cos - dx sin); softplus' = sigmoid. What was
        clamped gets nothing; 0, where e starts, was not.
        """
        (dx_q, dy_q), (dx_k, dy_k) = (np.split(x, 2, axis=-1) for x in (dq, dk))                   # (B, H, T, D) each
        free = (-2 * np.pi <= learned["e"]) & (learned["e"] <= 0)                                  # (H, D)
        de = (length_k * (dy_k * cos_k - dx_k * sin_k)).sum((0, 2)) * free
        dq = math.sqrt(2) * (dx_q * cos + dy_q * sin) * model_numpy.sigmoid(q)
        return dq, (dx_k * cos_k + dy_k * sin_k) * model_numpy.sigmoid(k), {"e": de}
    return point(length_q, cos, sin), point(length_k, cos_k, sin_k), pullback

def doors(settings):
    return model_numpy.Encoding(
        rotate=rotate,
        parameters=lambda model: {"e": model_numpy.constant((model.heads, model.d_head), 0)},
        each_block=True,
    )

class Layer(Encoding):
    def rotate(self, q, k, table):
        cos, sin = table.chunk(2, dim=-1)                                                      # (..., 1, T, D) each
        e = self.e.clamp(-2 * math.pi, 0)[:, None].type_as(table)                              # (H, 1, D)

        def point(x, cos, sin):
            return torch.cat((x * cos, x * sin), -1).type_as(q)                                # (B, H, T, 2D)

        rotated = cos * e.cos() - sin * e.sin(), sin * e.cos() + cos * e.sin()
        length_q, length_k = (F.softplus(x, threshold=40) for x in (q, k))                     # exact in float64
        return point(math.sqrt(2) * length_q, cos, sin), point(length_k, *rotated)
