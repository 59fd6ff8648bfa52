"""RoVE (García-Castellanos et al. 2026, arXiv 2606.11275): queries and keys rotate as in RoPE. Each value rotates by
the angles of its position too, and the output of attention rotates back by those of the query's position.

    out_m = sum over n of p_mn R_(n-m) v_n = R_m^T (sum over n of p_mn R_n v_n),  R and p_mn as RoPE has them

A value thus tells from how far away it comes. VO-RoPE (Su 2025, kexue.fm/archives/10862) and Harik's RoPER are the same
operation. The output must be rotated back: RoFormer's option rotary_value in transformers rotates values alone, which
leaves them at absolute positions.
"""

from dataclasses import dataclass

import numpy as np
import torch

import model_numpy
import model_torch
from positional_encodings import RoPE, Sinusoidal


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    fit = RoPE.fit
    rows = RoPE.rows                                                 # (..., 1, T, D)

    def pairs(self, queries, keys, model):
        """Cosines and sines of the queries' positions, then of the keys': (..., 1, T + S, D)."""
        batch = np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
        both = [np.broadcast_to(n, (*batch, n.shape[-1])) for n in (queries, keys)]
        return self.rows(np.concatenate(both, axis=-1), model)

def value(p, v, table, learned):
    """y_m = R_m^T sum_n p_mn R_n v_n. p (B, H, T, S), v (B, H, S, D)."""
    (cos, sin), (cos_k, sin_k) = (np.split(x, 2, axis=-1) for x in np.split(table, [p.shape[-2]], axis=-2))
    y, pull = model_numpy.weighted_sum(p, model_numpy.rotate_pairs(v, cos_k, sin_k), None, learned)
    def pullback(dy):
        """The transpose of a rotation rotates back: the same steps, from the last to the first."""
        dp, dv, _ = pull(model_numpy.rotate_pairs(dy, cos, sin))
        return dp, model_numpy.rotate_pairs(dv, cos_k, -sin_k), {}
    return model_numpy.rotate_pairs(y, cos, -sin), pullback

def doors(settings):
    return model_numpy.Encoding(rotate=model_numpy.rope_rotate, value=value)

class Layer(model_torch.RoPE):
    def value(self, weights, v, table):
        of_queries, of_keys = table.split(weights.shape[-2:], dim=-2)                          # (..., 1, T, D), S
        cos, sin = of_queries.chunk(2, dim=-1)
        out = weights @ model_torch.rotate_pairs(v, of_keys)
        return model_torch.rotate_pairs(out, torch.cat((cos, -sin), -1))                       # (B, H, T, D)
