"""Selective RoPE (Movahedi et al. 2025, arXiv 2511.17388): queries and keys rotate as in RoPE, but the tokens choose
the angles. Each token adds an angle for each pair, and a query or a key rotates by the sum up to its own token.

    angle_t = c (z_1 + .. + z_t),  z = conv(W2 W1 x),  c_i = base^(-2i/D),  i = 0 .. D/2-1 in each head

x is the block's input, each head's slice of it scaled to length 1; W1 has --rank rows; conv is causal, over four
tokens, for each angle by itself. Pairs (i, i + D/2) of queries and keys rotate, as RoPE's do. This is the default of
the authors' code, without its activation, bias and gate. All weights start from N(0, 0.02^2), in every block anew:
training begins close to NoPE. The door `rotate` does not see x, so the rotated product less the plain one is added to
the score.
Tokens are counted in the order in which they stand: other positions do not exist here.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

import expe
import model_numpy
from model_numpy import normal
from model_torch import Encoding, at_least_fp32, rotate_pairs, score_divisor
from positional_encodings import NoPE, RoPE
from settings import setting

TAPS = 4                                                             # tokens that the convolution sees
EPS = 1e-6                                                           # as in fla's l2norm

@dataclass(frozen=True)
class Settings(NoPE):
    both_sides: ClassVar[bool] = False
    base: float = setting(500_000.0, "base of the frequencies", above=1)
    rank: int = setting(16, "rows of W1, by which tokens choose their angles", at_least=1)

    fit = RoPE.fit

def scale_to_unit(x):
    """x / sqrt(|x|^2 + eps) of (..., D): of length 1, or less where x is small."""
    size = np.sqrt(np.vecdot(x, x) + EPS)[..., None]
    out = x / size
    def pullback(dout):
        """dsize = out . dx: dx = (dout - out (out . dout)) / size."""
        return (dout - out * np.vecdot(out, dout)[..., None]) / size
    return out, pullback

def unit(x):
    """scale_to_unit, of tensors."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()

def conv(x, w):
    """out_t = sum over i of w_i x_(t-i), 0 before the first token. x (B, T, n), w (n, taps)."""
    before = np.pad(x, ((0, 0), (w.shape[1] - 1, 0), (0, 0)))
    seen = sliding_window_view(before, w.shape[1], 1)[..., ::-1]                        # (B, T, n, taps), x_(t-i)
    def pullback(dout):
        """x_t is in out_(t+i) with w_i: dx_t = sum over i of w_i dout_(t+i), dw_i = sum over t of dout_t x_(t-i)."""
        after = np.pad(dout, ((0, 0), (0, w.shape[1] - 1), (0, 0)))
        return (sliding_window_view(after, w.shape[1], 1) * w).sum(-1), np.einsum("btn,btni->ni", dout, seen)
    return (seen * w).sum(-1), pullback

def convolve(x, w):
    """conv, of tensors by heads: x (B, H, S, n), w (H n, taps)."""
    w = w.type_as(x).unflatten(0, (x.shape[1], -1))                                                # (H, n, taps)
    return sum(F.pad(x, (0, 0, i, 0))[:, :, : x.shape[2]] * w[:, None, :, i] for i in range(w.shape[-1]))

def score(base, q, k, h, table, learned):
    """(R q . R k - q . k) / sqrt(D), R by each token's angles. h (B, T, C); W1 (rank, C), W2 (H D/2, rank)."""
    B, H, T, D = q.shape
    x, pull_x = scale_to_unit(h.reshape(B, T, H, D))
    y, pull_1 = model_numpy.linear(x.reshape(h.shape), learned["w1"])                              # (B, T, rank)
    u, pull_2 = model_numpy.linear(y, learned["w2"])                                               # (B, T, H D/2)
    z, pull_conv = conv(u, learned["conv"])
    c = expe.rope_inv_freq(D, base).astype(q.dtype)                                                # (D/2,)
    angle = c * model_numpy.split_heads(z, H).cumsum(-2)                                           # (B, H, T, D/2)
    cos, sin = np.cos(angle), np.sin(angle)
    rotated = model_numpy.rotate_pairs(q, cos, sin), model_numpy.rotate_pairs(k, cos, sin)
    scale = 1 / model_numpy.score_divisor(q)
    def pullback(dbias):
        """Of a rotated pair (a, b), of q and of k: dangle = a db - b da; z_t is in every angle from t on."""
        dscore = dbias * scale
        drotated = dscore @ rotated[1], dscore.swapaxes(-1, -2) @ rotated[0]
        dq = model_numpy.rotate_pairs(drotated[0], cos, -sin) - dscore @ k
        dk = model_numpy.rotate_pairs(drotated[1], cos, -sin) - dscore.swapaxes(-1, -2) @ q
        dangle = 0
        for out, dout in zip(rotated, drotated, strict=True):
            (a, b), (da, db) = np.split(out, 2, axis=-1), np.split(dout, 2, axis=-1)               # (B, H, T, D/2) each
            dangle = dangle + a * db - b * da
        dz = (c * dangle)[..., ::-1, :].cumsum(-2)[..., ::-1, :]
        du, dconv = pull_conv(model_numpy.merge_heads(dz))
        dy, dw2 = pull_2(du)
        dx, dw1 = pull_1(dy)
        return dq, dk, pull_x(dx.reshape(x.shape)).reshape(h.shape), {"w1": dw1, "w2": dw2, "conv": dconv}
    return (rotated[0] @ rotated[1].swapaxes(-1, -2) - q @ k.swapaxes(-1, -2)) * scale, pullback

def doors(settings):
    def parameters(model):
        angles = model.width // 2
        return {"w1": normal((settings.rank, model.width)), "w2": normal((angles, settings.rank)),
                "conv": normal((angles, TAPS))}

    return model_numpy.Encoding(score=functools.partial(score, settings.base), parameters=parameters, each_block=True)

class Layer(Encoding):
    def key_state(self, h):
        """W2 W1 x of each head and token, (B, H, S, D/2), in fp32 at least."""
        x = unit(h.unflatten(-1, (self.n_heads, -1))).flatten(-2)                              # (B, S, C)
        u = F.linear(F.linear(x, self.w1.type_as(x)), self.w2.type_as(x))                      # (B, S, H D/2)
        return at_least_fp32(u).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def score(self, q, k, key_state, table):
        z = convolve(key_state, self.conv)                                                     # (B, H, S, D/2)
        c = torch.as_tensor(expe.rope_inv_freq(q.shape[-1], self.settings.base)).to(z)
        angle = c * z.cumsum(-2)                                                               # (B, H, S, D/2)
        angles = torch.cat((angle.cos(), angle.sin()), -1)
        rotated_q, rotated_k = rotate_pairs(q, angles[:, :, -q.shape[2] :]), rotate_pairs(k, angles)
        return (rotated_q @ rotated_k.mT - q @ k.mT) / score_divisor(q)                          # (B, H, T, S)
