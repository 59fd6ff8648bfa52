"""Proportional RoPE (Gemma 4's global layers, in transformers,
https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py): this is RoPE, but only
the fastest quarter of the pairs rotates.

    Pairs (i, i + D/2) as RoPE's, inv_freq_i = base^(-2i/D) for i < fraction * D/2 and 0 for the others. zoo/partial.py
    is another thing: there the first fraction * D dimensions are paired among themselves, down to the slowest.
    Source: Gemma 4's configuration, rope_type "proportional", and its code in transformers.
"""

from dataclasses import dataclass

import numpy as np

import expe
import model_numpy
from model_torch import RoPE
from positional_encodings import Sinusoidal
from settings import InputError, setting


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    rotary_fraction: float = setting(0.25, "share of each head's pairs that rotate", above=0, at_most=1)

    def n_rotated(self, model):
        return round(self.rotary_fraction * model.d_head / 2, 9)         # 0.28 of 50 is 14

    def fit(self, model):
        n_rotated = self.n_rotated(model)
        if model.d_head % 2 or n_rotated % 1 or not n_rotated:
            raise InputError(f"--rotary-fraction must leave whole pairs: {self.rotary_fraction} of a head's "
                             f"{model.d_head} dimensions is {n_rotated:g} of them")
        return self

    def rows(self, positions, model):
        table = expe.rope_table(positions, model.d_head, self.base)                                 # (..., T, D)
        cos, sin = np.split(table, 2, axis=-1)                                                      # views of it
        n_rotated = int(self.n_rotated(model))
        cos[..., n_rotated:], sin[..., n_rotated:] = 1, 0
        return table[..., None, :, :]                                                               # (..., 1, T, D)

def doors(settings):
    return model_numpy.Encoding(rotate=model_numpy.rope_rotate)

Layer = RoPE
