"""RoPE of which only the fast pairs turn, as in the global layers of Gemma 4 (a quarter).

    Pairs (i, i + D/2) as RoPE's, inv_freq_i = base^(-2i/D) for i < fraction * D/2 and 0 for the others. zoo/partial.py
    is another thing: there the first fraction * D dimensions are paired among themselves, down to the slowest.
    Source: Gemma 4's configuration, rope_type "proportional", and its code in transformers.
"""

from dataclasses import dataclass

import numpy as np

import expe
import model_numpy
from config import InputError, Sinusoidal, setting
from model_torch import RoPE


@dataclass(frozen=True)
class Settings(Sinusoidal):                                          # --base is there already
    rotary_fraction: float = setting(0.25, "share of each head's pairs that turn", above=0, at_most=1)

    def turning(self, model):
        return round(self.rotary_fraction * model.d_head / 2, 9)         # 0.28 of 50 is 14

    def fit(self, model):
        turning = self.turning(model)
        if model.d_head % 2 or turning % 1 or not turning:
            raise InputError(f"--rotary-fraction must leave whole pairs: {self.rotary_fraction} of a head's "
                             f"{model.d_head} dimensions is {turning:g} of them")
        return self

    def rows(self, positions, model):
        table = expe.rope_table(positions, model.d_head, self.base)                                 # (..., T, D)
        cos, sin = np.split(table, 2, axis=-1)                                                      # views of it
        turning = int(self.turning(model))
        cos[..., turning:], sin[..., turning:] = 1, 0
        return table[..., None, :, :]                                                               # (..., 1, T, D)

def doors(settings):
    return model_numpy.Encoding(rotate=model_numpy.rope_rotate)

Layer = RoPE
