"""Partial key offset (ClassicLarry 2025, https://github.com/KellerJordan/modded-nanogpt/pull/169): RoPE rotates half of
each head's dimensions. In the other half each token has, in the place of its own key, the key of the token before it.

    score_mn = (R q_m . R k_n over the first r dimensions + q_m . k_(n-1) over the rest) / sqrt(D),  r = fraction * D

One block can so find what came after an earlier token, which otherwise takes two. The first token reads its own key.
Sources: KellerJordan/modded-nanogpt#169, where blocks with long windows have it, and marin-community/marin#4802, whose
halves are these. Both normalize queries and keys, which is not done here. In marin#5795 its loss is 0.034 nats below
that without it; 0.008 of these come from the key of another document, which the first token here does not read. The
door rotate does not see the keys of a cache, so q_m . (k_(n-1) - k_n) is added to the score. Order decides which key is
before, not the positions.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

import model_numpy
from model_torch import score_divisor
from settings import setting
from zoo import partial


@dataclass(frozen=True)
class Settings(partial.Settings):                                    # --base is there already
    rotary_fraction: float = setting(0.5, "share of each head's dimensions that rotate", above=0, below=1)

def score(fraction, q, k, h, table, learned):
    """bias_mn = q_m . (k_(n-1) - k_n) / sqrt(D), 0 for n = 0, over the dimensions that do not rotate."""
    r = round(fraction * q.shape[-1])
    scale = 1 / model_numpy.score_divisor(q)
    change = -np.diff(k[..., r:], axis=-2, prepend=k[..., :1, r:])                         # (B, H, S, D-r)
    def pullback(dbias):
        """k_n is in change_n with -1, and in change_(n+1) with 1; change_0 is fixed."""
        dq, dk = np.zeros_like(q), np.zeros_like(k)
        dq[..., r:] = scale * (dbias @ change)
        dchange = scale * (dbias.swapaxes(-1, -2) @ q[..., r:])[..., 1:, :]                # (B, H, S-1, D-r)
        dk[..., 1:, r:] -= dchange
        dk[..., :-1, r:] += dchange
        return dq, dk, 0, {}
    return scale * (q[..., r:] @ change.swapaxes(-1, -2)), pullback                        # (B, H, T, S)

def doors(settings):
    return model_numpy.Encoding(rotate=partial.rotate, score=functools.partial(score, settings.rotary_fraction))

class Layer(partial.Layer):
    def key_state(self, h):
        """1 of each head and token, (B, H, S, 1): an exported model makes it 0 where a key only pads a text."""
        return h.new_ones(len(h), self.n_heads, h.shape[1], 1)

    def score(self, q, k, key_state, table):
        r = round(self.settings.rotary_fraction * q.shape[-1])
        change = (k[:, :, :-1, r:] - k[:, :, 1:, r:]) * key_state[:, :, :-1].type_as(k)        # (B, H, S-1, D-r)
        return q[..., r:] @ F.pad(change, (0, 0, 1, 0)).mT / score_divisor(q)                  # (B, H, T, S)
