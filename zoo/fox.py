"""FoX, the forgetting transformer (Lin et al., ICLR 2025, arXiv 2503.02130): each token has a gate. Its logarithm,
which is below 0, is added to the scores of all keys before this token, for its own query and for all later ones. So a
gate near 0 makes them forgotten.

    bias_mn = ln f_(n+1) + .. + ln f_m,  f_j = sigmoid(w_h . x_j + b_h),  x the block's input after its norm

w from N(0, 0.02^2) and b = 0, in every block anew, is where their training starts; the rest of their block is not here.
With c_n = ln f_0 + .. + ln f_n the bias is c_m - c_n, and the softmax drops c_m: what is left is one number a key, and
no (H, T, S) bias is needed (see `linear`). That counts from the last query, so that the numbers near it are small and
keep their digits; the plain form counts from the first token, as it must for no query to depend on a later one, not
even in its last bit. Tokens are counted in the order in which they stand: other positions do not exist here.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F

import model_numpy
from model_torch import Encoding, at_least_fp32
from positional_encodings import NoPE


@dataclass(frozen=True)
class Settings(NoPE):
    both_sides: ClassVar[bool] = False

def score(q, k, h, table, learned):
    """bias_mn = c_m - c_n, c the running sum of ln f, f = sigmoid(z), z = h W^T + b. h (B, T, C); W (H, C), b (H,)."""
    z, pull_z = model_numpy.linear(h, learned["weight"])                                       # (B, T, H)
    z = (z + learned["bias"]).swapaxes(1, 2)                                                   # (B, H, T)
    c = -np.logaddexp(0, -z).cumsum(-1)
    def pullback(dbias):
        """ln f_j is in every c from j on: dln f_j = dc_j + dc_(j+1) + ..; dln f/dz = 1 - f."""
        dc = dbias.sum(-1) - dbias.sum(-2)                                                     # (B, H, T)
        dz = dc[..., ::-1].cumsum(-1)[..., ::-1] * model_numpy.sigmoid(-z)
        dz = dz.swapaxes(1, 2)                                                                 # (B, T, H)
        dh, dw = pull_z(dz)
        return 0, 0, dh, {"weight": dw, "bias": dz.sum((0, 1))}
    return c[..., :, None] - c[..., None, :], pullback                                         # (B, H, T, S)

def doors(settings):
    return model_numpy.Encoding(
        score=score,
        parameters=lambda model: {"weight": model_numpy.normal((model.heads, model.width)),
                                  "bias": model_numpy.constant((model.heads,), 0)},
        each_block=True,
    )

class Layer(Encoding):
    def key_state(self, h):
        """ln f of each head and key, (B, H, S, 1), in fp32 at least."""
        z = F.linear(h, self.weight.type_as(h), self.bias.type_as(h))                      # (B, S, H)
        return F.logsigmoid(at_least_fp32(z)).mT[..., None]

    def score(self, q, k, key_state, table):
        c = key_state[..., 0].cumsum(-1)                                                   # (B, H, S)
        return c[..., -q.shape[2] :, None] - c[..., None, :]                               # (B, H, T, S)

    def linear(self, q, key_state, w, n):
        gates = key_state[..., 0]
        after = gates.flip(-1).cumsum(-1).flip(-1) - gates                                 # those of later tokens
        return gates.new_ones(1, 1), after                                                 # (1, 1), (B, H, S)
