"""Partial RoPE (GPT-NeoX-20B, Black et al. 2022, arXiv 2204.06745, section 2.1): RoPE rotates only the first quarter of
each head's dimensions.

    The first r = fraction * D dimensions rotate as RoPE's do, inv_freq_i = base^(-2i/r), pairs (i, i + r/2); the rest
    of a head knows no position.
"""

from dataclasses import dataclass

import numpy as np
import torch

import expe
import model_numpy
from model_torch import RoPE
from positional_encodings import Sinusoidal
from settings import InputError, setting


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    rotary_fraction: float = setting(0.25, "share of each head's dimensions that rotate", above=0, at_most=1)

    def width(self, model):
        return round(self.rotary_fraction * model.d_head, 9)             # 0.14 of 100 is 14

    def fit(self, model):
        if self.width(model) % 2 or not self.width(model):
            raise InputError(f"--rotary-fraction must leave an even width: {self.rotary_fraction} of a head's "
                             f"{model.d_head} dimensions is {self.width(model):g}")
        return self

    def rows(self, positions, model):
        return expe.rope_table(positions, int(self.width(model)), self.base)[..., None, :, :]       # (..., 1, T, r)

def rotate(q, k, table, learned):
    """The first r of D dimensions rotate. q and k (B, H, T, D); table (..., 1, T, r): cosines, then sines."""
    r = table.shape[-1]
    rotated_q, rotated_k, pull = model_numpy.rope_rotate(q[..., :r], k[..., :r], table, learned)
    def pullback(dq, dk):
        """The rest passes through."""
        back_q, back_k, down = pull(dq[..., :r], dk[..., :r])
        return np.concatenate((back_q, dq[..., r:]), -1), np.concatenate((back_k, dk[..., r:]), -1), down
    return np.concatenate((rotated_q, q[..., r:]), -1), np.concatenate((rotated_k, k[..., r:]), -1), pullback

def doors(settings):
    return model_numpy.Encoding(rotate=rotate)

class Layer(RoPE):
    def rotate(self, q, k, table):
        r = table.shape[-1]
        rotated = super().rotate(q[..., :r], k[..., :r], table)
        return [torch.cat((a, b[..., r:]), dim=-1) for a, b in zip(rotated, (q, k), strict=True)]
