"""PaTH (Yang et al. 2025, arXiv 2505.16381): each token after a key, up to the query's own, changes the key before the
query is compared with it. The token chooses a direction, and the key's part along it shrinks or is reflected.

    score_mn = q_m^T H_m .. H_(n+1) k_n / sqrt(D),  H_t = I - b_t w_t w_t^T

w = l2norm(silu(conv(W2 W1 x))) in each head, x the block's input, W1 of --rank rows, conv causal over three tokens for
each number by itself; b = 2 sigmoid(u_h . x + a_h). The paper's equations omit the silu of the authors' code. Weights
start from N(0, 0.02^2) and a from 0, in every block anew. With W, b and K of all tokens in rows, and strict(.) what
lies below the diagonal,

    scores - q.k/sqrt(D) = -lower(Q W^T) Z / sqrt(D),  (I + strict(diag(b) W W^T)) Z = diag(b) strict(W K^T)

since z_jn, by how much of w_j key n is changed on its way to a query, is b_j (w_j . k_n less the sum over n < i < j
of w_j . w_i z_in). NumPy solves this for all tokens at once, in time that grows with T^3. PyTorch solves it in parts
and takes queries from part to part, in time that grows with T^2; a reading with a cache solves all parts anew. Neither
has an array of T x T x D numbers.
Tokens are counted in the order in which they stand: other positions do not exist here.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

import model_numpy
from model_numpy import constant, normal
from model_torch import Encoding, at_least_fp32, score_divisor
from positional_encodings import NoPE
from settings import setting
from zoo.selective_rope import conv, convolve, scale_to_unit, unit

TAPS = 3                                                             # tokens that the convolution sees
PART = 32                                                            # keys that are reflected at once

@dataclass(frozen=True)
class Settings(NoPE):
    both_sides: ClassVar[bool] = False
    rank: int = setting(32, "rows of W1, by which tokens choose their reflections", at_least=1)

def reflections(h, learned, H):
    """w (B, H, T, D) of length 1 (scale_to_unit), and b (B, H, T, 1). h (B, T, C)."""
    y, pull_1 = model_numpy.linear(h, learned["w1"])                                           # (B, T, rank)
    u, pull_2 = model_numpy.linear(y, learned["w2"])                                           # (B, T, C)
    x, pull_conv = conv(u, learned["conv"])
    gate = model_numpy.sigmoid(x)
    w, pull_w = scale_to_unit(model_numpy.split_heads(x * gate, H))
    z, pull_z = model_numpy.linear(h, learned["strength"])                                     # (B, T, H)
    s = model_numpy.sigmoid(z + learned["bias"])
    def pullback(dw, db):
        """b = 2 s, s' = s (1 - s); silu' = gate (1 + x (1 - gate))."""
        dz = 2 * db[..., 0].swapaxes(1, 2) * s * (1 - s)                                       # (B, T, H)
        dh, dstrength = pull_z(dz)
        dx = model_numpy.merge_heads(pull_w(dw)) * gate * (1 + x * (1 - gate))
        du, dconv = pull_conv(dx)
        dy, dw2 = pull_2(du)
        dh_1, dw1 = pull_1(dy)
        return dh + dh_1, {"w1": dw1, "w2": dw2, "conv": dconv, "strength": dstrength, "bias": dz.sum((0, 1))}
    return w, 2 * s.swapaxes(1, 2)[..., None], pullback

def solve(lower, right):
    """X of lower X = right (..., T, n), row by row: none reads a later one. lower (..., T, T), with a diagonal of 1."""
    x = right.copy()
    for i in range(1, x.shape[-2]):
        x[..., i : i + 1, :] -= lower[..., i : i + 1, :i] @ x[..., :i, :]
    return x

def score(q, k, h, table, learned):
    """-lower(Q W^T) Z / sqrt(D), L Z = diag(b) strict(W K^T), L = I + strict(diag(b) W W^T)."""
    w, b, pull_reflections = reflections(h, learned, q.shape[1])
    gram, wk = w @ w.swapaxes(-1, -2), w @ k.swapaxes(-1, -2)                                  # (B, H, T, T) each
    lower = np.eye(q.shape[2], dtype=q.dtype) + np.tril(b * gram, -1)
    z = solve(lower, np.tril(b * wk, -1))
    p = np.tril(q @ w.swapaxes(-1, -2))
    scale = 1 / model_numpy.score_divisor(q)
    def pullback(dbias):
        """Of L Z = R: dR = L^-T dZ, dL = -dR Z^T. b scales rows of both W W^T and W K^T; W stands twice in W W^T."""
        dproduct = -scale * dbias
        dp = np.tril(dproduct @ z.swapaxes(-1, -2))                                            # of P, through Q and W
        upper = lower.swapaxes(-1, -2)[..., ::-1, ::-1]                                        # L^T, from the last row
        dright = solve(upper, (p.swapaxes(-1, -2) @ dproduct)[..., ::-1, :])[..., ::-1, :]
        dlower = -np.tril(dright @ z.swapaxes(-1, -2), -1)
        dright = np.tril(dright, -1)
        db = (dlower * gram + dright * wk).sum(-1, keepdims=True)                              # (B, H, T, 1)
        dgram, dwk = b * dlower, b * dright
        dw = dp.swapaxes(-1, -2) @ q + (dgram + dgram.swapaxes(-1, -2)) @ w + dwk @ k
        dh, down = pull_reflections(dw, db)
        return dp @ w, dwk.swapaxes(-1, -2) @ w, dh, down
    return -scale * (p @ z), pullback

def doors(settings):
    def parameters(model):
        C, H = model.width, model.heads
        return {"w1": normal((settings.rank, C)), "w2": normal((C, settings.rank)), "conv": normal((C, TAPS)),
                "strength": normal((H, C)), "bias": constant((H,), 0)}

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

def reflect(encoding, q, k, key_state):
    """Of tensors: what PaTH adds to the scores, (B, H, T, S); key_state as Layer makes it, of all S keys.

    In parts of C tokens, as in the paper's algorithm; the first is filled up with zeros. The reflections of a part's
    tokens are I - W^T U W. Keys are taken to the end of their part and queries to the start of theirs, and from there
    through the parts before.
    """
    T, S = q.shape[2], k.shape[2]
    C = min(PART, S)

    def parts(x):                                                                              # (B, H, N, C, D)
        return F.pad(x, (0, 0, -x.shape[2] % C, 0)).unflatten(2, (-1, C))

    b = parts(key_state[..., -1:])
    w = parts(unit(F.silu(convolve(key_state[..., :-1], encoding.conv))))
    q, k = parts(q.to(w)), parts(k.to(w))
    first = k.shape[2] - q.shape[2]                                                            # part that has a query
    eye = torch.eye(C, dtype=w.dtype, device=w.device)
    u = torch.linalg.solve_triangular((b * (w @ w.mT)).tril(-1), b * eye, upper=False, unitriangular=True)
    uw, z = u @ w, u @ (w @ k.mT).tril(-1)                                                     # (B, H, N, C, D or C)
    p = (q @ w[:, :, first:].mT).tril()
    own = q @ k[:, :, first:].mT - p @ z[:, :, first:]
    k_end, q_start = k - z.mT @ w, q - p @ uw[:, :, first:]
    rows = q[:, :, 0, :0]                                                                      # queries of later parts
    columns = []
    for j in reversed(range(k.shape[2])):
        column = rows @ k_end[:, :, j].mT
        rows = rows - rows @ w[:, :, j].mT @ uw[:, :, j]
        if j >= first:
            column = torch.cat((own[:, :, j - first], column), 2)
            rows = torch.cat((q_start[:, :, j - first], rows), 2)
        columns.append(F.pad(column, (0, 0, q.shape[2] * C - column.shape[2], 0)))
    added = torch.cat(columns[::-1], -1) - q.flatten(2, 3) @ k.flatten(2, 3).mT
    return added[..., -T:, -S:].tril(S - T) / score_divisor(q)

class Layer(Encoding):
    def key_state(self, h):
        """W2 W1 x and b of each head and token, (B, H, S, D + 1), in fp32 at least."""
        u = F.linear(F.linear(h, self.w1.type_as(h)), self.w2.type_as(h))                      # (B, S, C)
        u = at_least_fp32(u).unflatten(-1, (self.n_heads, -1))                                 # (B, S, H, D)
        z = at_least_fp32(F.linear(h, self.strength.type_as(h), self.bias.type_as(h)))         # (B, S, H)
        return torch.cat((u, 2 * z.sigmoid()[..., None]), -1).transpose(1, 2)

    def score(self, q, k, key_state, table):
        return reflect(self, q, k, key_state)
