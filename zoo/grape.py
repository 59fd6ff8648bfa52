"""GRAPE, additive and query-gated (Zhang et al., ICLR 2026, arXiv 2512.07805, section 4.1): as in ALiBi, scores fall in
proportion to the distance. Each query chooses its own slope, which is always above 0.

    bias_mn = -(m - n) omega_h softplus(v_h . q_m / sqrt(D)),  omega_h = softplus(w_h) times ALiBi's slope of the head

Equation 4.6 without its part of the keys. The slopes of ALiBi, and v_h scaled to the norm 1, are the authors' code's,
as is the start: softplus(w) = 1 and v from N(0, 1/D), in every block anew. (It normalises q and k by RMSNorm, too.)
The score is a number of the query's times the key's position, up to what the softmax drops: ExPE-K is the same but
linear in q, so that its slopes may have either sign. So no (H, T, S) bias is needed: see `linear`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F

import expe
import model_numpy
from model_torch import ALiBi, score_divisor
from positional_encodings import NoPE


@dataclass(frozen=True)
class Settings(NoPE):
    both_sides: ClassVar[bool] = False

    def pairs(self, queries, keys, model):
        return expe.distances(queries, keys).astype(float)[..., None, :, :]                    # (..., 1, T, S)

def score(q, k, h, table, learned):
    """bias = -omega gate d: gate = softplus(z), z = u . q / sqrt(D), u = v/|v|. d (..., 1, T, S); v (H, D), w (H,)."""
    v, w, slopes = learned["v"], learned["w"], expe.alibi_slopes(len(learned["w"])).astype(q.dtype)
    size = np.sqrt(np.vecdot(v, v))[:, None]                                                   # (H, 1)
    u, omega = v / size, slopes * np.logaddexp(0, w)                                           # (H, D), (H,)
    z = np.vecdot(q, u[:, None]) * (1 / model_numpy.score_divisor(q))                          # (B, H, T)
    gate = np.logaddexp(0, z)
    def pullback(dbias):
        """softplus' = sigmoid; u = v/|v| cannot grow: dv = (du - u (u . du)) / |v|."""
        dslope = -(dbias * table).sum(-1)                                                      # (B, H, T)
        dw = (dslope * gate).sum((0, 2)) * slopes * model_numpy.sigmoid(w)
        dz = dslope * omega[:, None] * model_numpy.sigmoid(z) * (1 / model_numpy.score_divisor(q))
        du = (dz[..., None] * q).sum((0, 2))                                                   # (H, D)
        dv = (du - u * np.vecdot(u, du)[:, None]) / size
        return dz[..., None] * u[:, None], 0, 0, {"v": dv, "w": dw}
    return -(omega[:, None] * gate)[..., None] * table, pullback

def doors(settings):
    def parameters(model):
        H, D = model.heads, model.d_head
        return {"v": model_numpy.Parameter((H, D), lambda rng: (
                    rng.standard_normal((H, D), dtype=np.float32) / np.float32(math.sqrt(D)))),
                "w": model_numpy.constant((H,), math.log(math.e - 1))}                         # softplus of it is 1

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

class Layer(ALiBi):
    def slope(self, q, like):
        u, w = F.normalize(self.v.type_as(like), dim=-1), self.w.type_as(like)             # (H, D), (H,)
        z = (q * u[:, None]).sum(-1) / score_divisor(q)                                    # (B, H, T)
        omega, gate = (F.softplus(x, threshold=40) for x in (w, z))                        # exact in float64
        return self.of_each_head(q, like)[..., 0] * omega[:, None] * gate

    def score(self, q, k, key_state, table):
        return -self.slope(q, table)[..., None] * table                                    # (B, H, T, S)

    def linear(self, q, key_state, w, n):
        return self.slope(q, n), n                                                         # (B, H, T), (..., 1, S)
