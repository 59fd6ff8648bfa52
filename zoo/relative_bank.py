"""Relative bank (Inkling, Thinking Machines 2026, https://thinkingmachines.ai/news/introducing-inkling/): a bank holds
trained curves, each with one number for each distance. Each query adds their weighted sum to its scores, and the
query's token chooses the weights.

    bias_mn = sum over r of (W x_m)_r bank_r,(m - n) for 0 <= m - n < extent, and 0 beyond,  x the block's input

W (H R, C) makes R = --d-rel numbers for each head, all heads share the bank (R, extent), and each block has its own.
The bias comes after the division of the scores. Inkling divides by D, since it normalizes queries and keys, and may
scale the scores with ln m; neither is here. Source: InklingRelativeLogits in transformers, models/inkling. Evidence
against it: marin-community/marin#7208 tried it and kept its own encoding; with the 1/D it lost 0.46 nats there.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch.nn.functional as F

import expe
import model_numpy
from model_torch import Encoding
from positional_encodings import NoPE
from settings import setting


@dataclass(frozen=True)
class Settings(NoPE):
    both_sides: ClassVar[bool] = False
    d_rel: int = setting(16, "profiles of the distance that each query mixes", at_least=1)
    rel_extent: int = setting(0, "distances that have a bias; 0: as many as the context", at_least=0, at_most=2**16)

    def fit(self, model):
        return replace(self, rel_extent=self.extent(model))

    def extent(self, model):
        return self.rel_extent or model.context

    def pairs(self, queries, keys, model):
        """The distance, or the extent for all pairs without a bias: (..., 1, T, S)."""
        d = expe.distances(queries, keys)[..., None, :, :]
        return np.where((0 <= d) & (d < self.extent(model)), d, self.extent(model))

def score(q, k, h, table, learned):
    """bias_mn = (r_m bank)_d, d = table_mn, r = h W^T by heads. h (B, T, C), W (H R, C), bank (R, extent)."""
    bank = np.pad(learned["bank"], ((0, 0), (0, 1)))                                   # a column of 0 for the rest
    r, pull_r = model_numpy.linear(h, learned["weight"])                               # (B, T, H R)
    r = model_numpy.split_heads(r, q.shape[1])                                         # (B, H, T, R)
    def pullback(dbias):
        """A distance gets the sum over its keys; r and the bank are the factors of a product."""
        dby_distance = model_numpy.to_distances(dbias, table, bank.shape[1])           # (B, H, T, extent + 1)
        dh, dw = pull_r(model_numpy.merge_heads(dby_distance @ bank.T))
        dbank = r.reshape(-1, len(bank)).T @ dby_distance.reshape(-1, bank.shape[1])
        return 0, 0, dh, {"weight": dw, "bank": dbank[:, :-1]}
    return model_numpy.to_keys(r @ bank, table, k.shape[2]), pullback                  # (B, H, T, S)

def doors(settings):
    def parameters(model):
        return {"weight": model_numpy.normal((model.heads * settings.d_rel, model.width)),
                "bank": model_numpy.normal((settings.d_rel, settings.extent(model)))}

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

class Layer(Encoding):
    def key_state(self, h):
        """r of each head and token, (B, H, S, R)."""
        return F.linear(h, self.weight.type_as(h)).unflatten(-1, (-1, len(self.bank))).transpose(1, 2)

    def score(self, q, k, key_state, table):
        bank = F.pad(self.bank.type_as(key_state), (0, 1))
        by_distance = key_state[:, :, -q.shape[2] :] @ bank                            # (B, H, T, extent + 1)
        return by_distance.gather(-1, table.expand(*q.shape[:2], *table.shape[-2:]))   # (B, H, T, S)
