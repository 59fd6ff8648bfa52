"""Wall (Averbuch and Pai, Tilde Research, 2026, https://blog.tilderesearch.com/blog/wall-attn): each token has a gate
for every dimension. A dimension's part of a score is multiplied by its gates of all tokens after the key, up to the
query's own.

    score_mn = sum over c of q_mc k_nc exp(P_mc - P_nc) / sqrt(D),  P_n = ln f_0 + .. + ln f_n

f_j = sigmoid(W x_j + b), x the block's input. W (C, C), in every block anew, starts from N(0, 0.02^2) and b at 8, near
NoPE. A forgotten score goes to 0, not to minus infinity as in FoX. Source: fla/ops/wall_attn/naive.py and
fla/layers/wall_attn.py in flash-linear-attention 0.6.0. NumPy computes the formula as it stands. Torch does so for at
most 16 tokens. Of more, the later half is scored with the earlier one by exp(P_m - P_e) exp(P_e - P_n), e the last key
of that, so no factor overflows, and each half by itself in the same way. Keys of a cache are such an earlier half.
"""

import numpy as np
import torch
import torch.nn.functional as F

import model_numpy
from model_torch import Encoding, score_divisor
from zoo import fox

PART = 16                                                            # tokens that torch scores by the formula
Settings = fox.Settings                                              # none, and no later keys

def score(q, k, h, table, learned):
    """bias_mn = sum_c q_mc k_nc (E_mnc - 1) / sqrt(D), E_mnc = exp(P_mc - P_nc), 0 for later keys. h (B, T, C)."""
    z, pull_z = model_numpy.linear(h, learned["weight"])                                           # (B, T, C)
    z = model_numpy.split_heads(z + learned["bias"], q.shape[1])                                   # (B, H, T, D)
    P = -np.logaddexp(0, -z).cumsum(2)
    E = np.exp(np.minimum(P[:, :, :, None] - P[:, :, None], 0))                                    # (B, H, T, S, D)
    E *= np.tri(q.shape[2], dtype=q.dtype)[..., None]
    scale = 1 / model_numpy.score_divisor(q)
    def pullback(dbias):
        """P_m scales q_m and -P_n scales k_n: dP = q dq - k dk of E's part. ln f_j is in every P from j on."""
        dscore = dbias * scale
        dq = (dscore[..., None] * k[:, :, None] * E).sum(3)
        dk = (dscore[..., None] * q[:, :, :, None] * E).sum(2)
        dz = (q * dq - k * dk)[:, :, ::-1].cumsum(2)[:, :, ::-1] * model_numpy.sigmoid(-z)         # dln f/dz = 1 - f
        dz = model_numpy.merge_heads(dz)                                                           # (B, T, C)
        dh, dw = pull_z(dz)
        return dq - dscore @ k, dk - dscore.swapaxes(-1, -2) @ q, dh, {"weight": dw, "bias": dz.sum((0, 1))}
    return scale * ((q[:, :, :, None] * k[:, :, None] * E).sum(-1) - q @ k.swapaxes(-1, -2)), pullback

def doors(settings):
    return model_numpy.Encoding(
        score=score,
        parameters=lambda model: {"weight": model_numpy.normal((model.width, model.width)),
                                  "bias": model_numpy.constant((model.width,), 8)},
        each_block=True,
    )

class Layer(Encoding):
    def key_state(self, h):
        """ln f of each head, token and dimension, (B, H, S, D), in fp32 at least."""
        return fox.Layer.key_state(self, h)[..., 0].unflatten(1, (self.n_heads, -1)).mT

    def score(self, q, k, key_state, table):
        P, S, T = key_state.cumsum(2), k.shape[2], q.shape[2]                                  # the last T are queries
        def far(i, h, j):
            """The sums of queries h to j - 1 and keys i to h - 1, which lie before them: (B, H, j - h, h - i)."""
            end = P[:, :, h - 1, None]
            key = k[:, :, i:h] * (end - P[:, :, i:h]).exp()
            return q[:, :, h - S + T : j - S + T] * (P[:, :, h:j] - end).exp() @ key.mT
        def square(i, j):
            """The sums of queries and keys i to j - 1: (B, H, j - i, j - i)."""
            if j - i > PART:
                h = (i + j) // 2
                return torch.cat((F.pad(square(i, h), (0, j - h)), torch.cat((far(i, h, j), square(h, j)), 3)), 2)
            E = (P[:, :, i:j, None] - P[:, :, None, i:j]).clamp(max=0).exp()                   # (B, H, j-i, j-i, D)
            return (q[:, :, i - S + T : j - S + T, None] * k[:, :, None, i:j] * E).sum(-1).tril()
        earlier = [far(0, S - T, S)] if S > T else []
        return (torch.cat((*earlier, square(S - T, S)), 3) - q @ k.mT) / score_divisor(q)      # (B, H, T, S)
