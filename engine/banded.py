"""Shaw's vectors on a band of the scores, for keys that lie in a row: no (B, H, T, r) products of their own.

Of the distances only the nearest have a vector of their own; all others share one, which the softmax drops.
"""

import functools

import torch
import torch.nn.functional as F

import model_torch
from engine.precision import is_full_on_cpu
from model_torch import score_divisor
from positional_encodings import Shaw

QUERIES = 64                             # that attend_banded reads at a time

def has_band(attention):
    """Whether attend_banded is for a block whose keys lie in a row: Shaw's own encoding, in fp32 or more on a CPU."""
    encoding, w = attention.encoding, attention.qkv.weight
    own = type(encoding) is model_torch.Shaw and type(encoding.settings) is Shaw and not encoding.softmax
    return own and attention.fused and attention.causal and is_full_on_cpu(w) and not torch.compiler.is_compiling()

def in_a_row(n):
    """Whether each of the positions n, an array or tensor, follows the one before it, the same in all sequences."""
    return n.ndim == 1 and bool((n[1:] == n[:-1] + 1).all())

@functools.lru_cache(maxsize=2)
def minus_infinity(T, S, causal, window, device, dtype, more=0):
    """-inf at the keys that a query does not see and 0 at others, (T, more + S); the first `more` are never seen."""
    hidden = torch.zeros(T, S, dtype=dtype, device=device)
    never = model_torch.unseen(T, S, causal, window, device)
    return F.pad(hidden if never is None else hidden.masked_fill(never, -torch.inf), (more, 0), value=-torch.inf)

def band(x, W):
    """A view (B, H, T, W) of scores x (B, H, T, N): those of the last W keys that each query sees, its own the last."""
    B, H, T, N = x.shape
    return x.as_strided((B, H, T, W), (H * T * N, T * N, N + 1, 1), x.storage_offset() + N - T + 1 - W)

class Banded(torch.autograd.Function):
    """softmax(q k^T / sqrt(D) + q_m . a_r) (v + b_r), r the key at distance W-1-r, of T queries that are the last of S.

    a and b (W, D) stand before the keys and values, so that no product is needed for them alone: the first W columns of
    the scores (..., T, W + S) are q_m . a_r, to be added to the band, and the weights get there what the band has.
    hidden (T, W + S) is added to the scores; it hides the first W columns.
    With p the weights and s the scores, ds = p (dp - sum_n p dp), where dp = dy (v + b_r)^T.
    """

    @staticmethod
    def forward(ctx, q, k, v, a, b, hidden):
        W = ctx.W = len(a)
        q = q.contiguous() / score_divisor(q)
        k, v = (torch.cat((x.expand(*y.shape[:2], -1, -1), y), 2) for x, y in ((a, k), (b, v)))    # (B, H, W + S, D)
        p = q @ k.mT                                                                   # (B, H, T, W + S)
        band(p, W).add_(p[..., :W].clone())
        p = p.add_(hidden).softmax(-1)
        p[..., :W] = band(p, W).clone()
        y = p @ v
        p[..., :W] = 0
        ctx.save_for_backward(q, k, v, p)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, p = ctx.saved_tensors
        W = ctx.W
        dy = dy.contiguous()
        dp = dy @ v.mT
        band(dp, W).add_(dp[..., :W].clone())
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        ds[..., :W] = band(ds, W).clone()
        dq, dk, dv = ds @ k / score_divisor(q), ds.mT @ q, p.mT @ dy
        db = band(p, W).reshape(-1, W).T @ dy.flatten(0, 2)
        return dq, dk[:, :, W:], dv[:, :, W:], dk[:, :, :W].sum((0, 1)), db, None

def attend(q, k, v, encoding, causal, window):
    """Attention of q (B, H, T, D), the last T of S keys and values, with Shaw's vectors: (B, H, T, D).

    All keys at the clipped distance or beyond it share one vector. The softmax drops the shared q_m . a_far if all
    scores lose it, and the weights' sum is 1 for the shared value. So only nearer keys need a vector, its difference
    from the shared one.
    """
    T, S, W = q.shape[2], k.shape[2], encoding.settings.max_distance
    keys, values = (x[: W + 1] for x in (encoding.keys, encoding.values))              # (W + 1, D) each
    near = [(x[:-1] - x[-1]).flip(0) for x in (keys, values)]
    hidden = minus_infinity(T, S, causal, window, q.device, q.dtype, W)                # (T, W + S)
    size = QUERIES if T == S else T                      # of pieces, whose queries see no later keys
    parts = []
    for i in range(0, T, size):
        j = min(T, i + size)
        end = S - T + j
        parts.append(Banded.apply(q[:, :, i:j], k[:, :, :end], v[:, :, :end], *near, hidden[i:j, : W + end]))
    return torch.cat(parts, 2) + values[-1]
