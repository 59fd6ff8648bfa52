"""LeRoPE (Karypis et al. 2026, arXiv 2607.10134, section 3.1): this is RoPE, but the frequency of each pair is trained.
Mistral Large 4 uses it.

    inv_freq_i = base^(-2i/D) e^(alpha_i),  i = 0 .. D/2-1;  pairs (i, i + D/2) rotate by n inv_freq_i, as RoPE's do

alpha (D/2,) starts at 0, where this is RoPE, and all heads and blocks share it. A vector has no weight decay here, and
none in the paper. Its table holds the integer positions, so that angles are computed in fp32 at least from exact ones.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

import expe
import model_numpy
from model_torch import Encoding, at_least_fp32, rotate_pairs
from positional_encodings import RoPE, Sinusoidal


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    fit = RoPE.fit

    def rows(self, positions, model):
        return expe.integers(positions)[..., None, :, None]                                        # (..., 1, T, 1)

def rotate(base, q, k, table, learned):
    """R q, R k, each pair by angle = n base^(-2i/D) e^alpha. q and k (B, H, T, D), table n (..., 1, T, 1)."""
    freq = expe.rope_inv_freq(q.shape[-1], base).astype(q.dtype) * np.exp(learned["alpha"])        # (D/2,)
    angle = table.astype(q.dtype) * freq                                                           # (..., 1, T, D/2)
    cos, sin = np.cos(angle), np.sin(angle)
    rotated = model_numpy.rotate_pairs(q, cos, sin), model_numpy.rotate_pairs(k, cos, sin)
    def pullback(dq, dk):
        """Of a rotated pair (a, b), of q and of k: dangle = a db - b da; dangle/dalpha is the angle itself."""
        dalpha = 0
        for out, dout in zip(rotated, (dq, dk), strict=True):
            (a, b), (da, db) = np.split(out, 2, axis=-1), np.split(dout, 2, axis=-1)               # (B, H, T, D/2) each
            dalpha = dalpha + ((a * db - b * da) * angle).sum((0, 1, 2))
        return model_numpy.rotate_pairs(dq, cos, -sin), model_numpy.rotate_pairs(dk, cos, -sin), {"alpha": dalpha}
    return *rotated, pullback

def doors(settings):
    return model_numpy.Encoding(
        rotate=functools.partial(rotate, settings.base),
        parameters=lambda model: {"alpha": model_numpy.constant((model.d_head // 2,), 0)},
    )

class Layer(Encoding):
    def rotate(self, q, k, table):
        alpha = at_least_fp32(self.alpha)
        i = torch.arange(len(alpha), dtype=alpha.dtype, device=alpha.device)
        angle = table * (self.settings.base ** (-i / len(alpha)) * alpha.exp())                # (..., 1, T, D/2)
        angles = torch.cat((angle.cos(), angle.sin()), -1)
        return rotate_pairs(q, angles), rotate_pairs(k, angles)
