"""CoPE (Golovneva et al. 2024, arXiv 2405.18719, section 4): a query counts the keys from its own token back to a key,
where each one adds a number between 0 and 1, by how well it matches the query. The product of the query and a trained
vector for this count is added to the score of that key.

    gate g_mj = sigmoid(q_m . k_j),  p_mn = min(g_mn + g_m(n+1) + .. + g_mm, P - 1),  bias_mn = q_m . e[p_mn]

e (P, D) is trained, and linear between whole numbers; it starts at 0, and all heads of a block share it. The gates are
of q.k as it is (the paper's equation 3); the listing in its appendix, and the authors' code, divide by sqrt(D) first.
The bias is added to q.k/sqrt(D) undivided, as in that listing; the code divides it too, unless told not to
(cope_nodiv). Keys are counted in the order in which they stand, up to the query's own: other positions than these do
not exist here.

In bf16 its gradients err 10 to 20 times as much as NoPE's once e has grown, and nearly as much in float64 with weights
that are rounded to bf16: rounding moves p across whole numbers, where the slope of e[p] jumps. No sum in fp32 helps.
Near its start, where e is small, they are as good as NoPE's. Where this matters, train it in fp32.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import model_numpy
from model_torch import Encoding, at_least_fp32
from positional_encodings import NoPE
from settings import setting


@dataclass(frozen=True)
class Settings(NoPE):
    count_to: int = setting(64, "positions that CoPE tells apart, 0 .. N-1", at_least=2, at_most=2**16)
    both_sides: ClassVar[bool] = False

def score(q, k, h, table, learned):
    """bias = (1 - w) z[floor p] + w z[ceil p], z = q e^T, w = p - floor p, p = min(sum of g from n on, P - 1)."""
    e = learned["e"]
    gates = np.tril(model_numpy.sigmoid(q @ k.swapaxes(-1, -2)))                               # (B, H, T, S)
    p = np.minimum(gates[..., ::-1].cumsum(-1)[..., ::-1], len(e) - 1)
    ends = np.floor(p).astype(int), np.ceil(p).astype(int)
    low, high = (np.take_along_axis(q @ e.T, end, -1) for end in ends)                         # (B, H, T, S) each
    w = p - ends[0]
    rise = high - low
    def pullback(dbias):
        """dp = dbias (high - low), 0 at P - 1, where both are one. A gate is in all p_mn from its key back, so
        dg_mj = dp_m0 + .. + dp_mj, and g' = g (1 - g); z[floor p] gets (1 - w) dbias, z[ceil p] w dbias.
        """
        dscore = (dbias * rise).cumsum(-1) * gates * (1 - gates)                               # (B, H, T, S)
        row = np.arange(q[..., 0].size).reshape(*q.shape[:3], 1) * len(e)
        dz = sum(np.bincount((row + end).ravel(), (dbias * part).ravel(), q[..., 0].size * len(e))
                 for end, part in zip(ends, (1 - w, w), strict=True)).astype(q.dtype)
        de = dz.reshape(-1, len(e)).T @ q.reshape(-1, q.shape[-1])                             # (P, D)
        dq = dscore @ k + dz.reshape(*q.shape[:3], -1) @ e
        return dq, dscore.swapaxes(-1, -2) @ q, 0, {"e": de}
    return low + w * rise, pullback

def doors(settings):
    return model_numpy.Encoding(
        score=score,
        parameters=lambda model: {"e": model_numpy.constant((settings.count_to, model.d_head), 0)},
        each_block=True,
    )

class Layer(Encoding):
    def score(self, q, k, key_state, table):
        T, S, last = q.shape[2], k.shape[2], len(self.e) - 1
        gates = at_least_fp32(q @ k.mT).sigmoid().tril(S - T)                              # (B, H, T, S)
        p = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)
        low, high = ((q @ self.e.T).gather(-1, end.long()) for end in (p.floor(), p.ceil()))
        return low + (p - p.floor()) * (high - low)                                        # (B, H, T, S)
