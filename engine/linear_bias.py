"""A bias a_m b_n on the scores as further dimensions of q and k, so that one fused kernel does it all.

There is no array of (H, T, S) numbers, and no key holds a position, whose digits half precision would round. linear_of
says which encodings have such a bias, augment_qk writes it into q and k, and LinearBias is the kernel with a backward.
"""

import functools
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import model_torch
from engine.precision import full_precision
from model_torch import at_least_fp32, score_divisor
from positional_encodings import ExPE

PAIRS = {"cpu": 2**24, "mps": 2**25, "cuda": 2**25, "meta": 2**25}      # scores that a backward pass keeps at once

# ---- which encodings have one ----------------------------------------------------------------------------------------

def linear_of(encoding, causal, adds_shifts=False):
    """The function linear(q, key_state, w, n) -> a, b by which an encoding's scores gain a_m b_n; None if it has none.

    q (B, H, T, D) and the key_state of all keys are free of position. w (H, D, l) is what enters a key for each number
    that is overridden, or None without an override: W_k's first l columns, as Attention.project applies them. n
    (..., 1, S) are the keys' positions counted from the last. a is (..., H, T or 1), b (..., 1 or H, S). All are in
    fp32 at least. An encoding of zoo/ has it as a method; for ExPE and ALiBi, and no class made of them, it is here.
    With None the plain form is computed, in which an edit of model_torch.py has its effect.

    adds_shifts: whether the caller adds what a query's own row adds to all its scores, as softmaxes that see it need.
    """
    settings = encoding.settings

    def alibi(q, key_state, w, n):
        return settings.slopes * encoding.of_each_head(q, n)[..., 0], n                # (H, 1), (..., 1, S)

    def expe_on_keys(q, key_state, w, n):
        """A position adds one vector to its key, times n, and so a number of the query's to the score."""
        step = settings.scale * settings.theta * w.sum(-1)[:, None]                    # (H, 1, D)
        return (q * step).sum(-1) / score_divisor(q), n                                # (B, H, T), (..., 1, S)

    sees_shifts = hasattr(encoding, "sees_shifts") and not adds_shifts
    if type(encoding) is model_torch.ExPE and is_straight(settings) and not sees_shifts:
        return expe_on_keys              # without a_m b_m, which a softmax drops unless it sees shifts
    if isinstance(encoding, model_torch.ALiBi) and not (causal and is_distance(settings)):
        return None                      # |m - n| is no such product
    return alibi if type(encoding) is model_torch.ALiBi else getattr(encoding, "linear", None)

@functools.lru_cache
def is_distance(settings):
    """Whether the pairs of ALiBi's settings, or of settings made of them, are the distance times --slopes."""
    n = np.array([0, 1, 5, 2**16])
    pairs = settings.pairs(n, n, SimpleNamespace(causal=True))
    return np.allclose(pairs, getattr(settings, "slopes", 1) * (n[:, None] - n))

@functools.lru_cache
def is_straight(settings):
    """Whether settings are those of ExPE on keys only, and their rows rise by theta from each position to the next."""
    if type(settings) is not ExPE or settings.on != "k":
        return False
    near, far = settings.rows(np.array([1, 2**16]), None) - settings.rows(np.array([0, 0]), None)      # (l,) each
    return np.allclose(near, settings.scale * settings.theta) and np.allclose(far, 2**16 * near)

# ---- in q and k ------------------------------------------------------------------------------------------------------

def split(x, dtype, parts):
    """Numbers whose sum is x, all but the last of a dtype of 16 bits; each is what those before it lack.

    Bits are cut off, since torch.compile leaves out a conversion to a shorter dtype and back.
    """
    dropped = {torch.bfloat16: 16, torch.float16: 13}[dtype]                           # of an fp32 number's bits
    numbers = []
    for _ in range(parts - 1):
        numbers.append((x.float().view(torch.int32) & -(2**dropped)).view(torch.float32).to(x.dtype))
        x = x - numbers[-1]
    return [*numbers, x]

def augment_qk(q, k, a, b):
    """q and k (B, H, T, D) with eight more dimensions, by which q k^T / sqrt(D) gains a_m b_n; in fp32 a_m (b_n - b_m).

    a (..., H, T or 1), b (..., 1 or H, T). To the softmax both are one. Half precision has a and b in parts, a whole
    number below 2^16 exactly in two, and kernels sum in fp32. In fp32 a large a_m b_n would round the rest of the score
    away without -a_m b_m beside it: with parts of a of 8 bits and a whole b their sum is exact.
    """
    a = score_divisor(q) * a
    if q.dtype.itemsize == 2:                                                          # 2^8: fp16 ends at 65,504
        terms = [(x, y) for x in split(a * 2**8, q.dtype, 2) for y in split(b / 2**8, q.dtype, 3)]
    else:
        terms = [term for x in split(a, torch.bfloat16, 3) for term in ((x, b), (-x * b, torch.ones_like(b)))]
    for x, numbers in zip((q, k), zip(*terms, strict=True), strict=True):
        more = F.pad(torch.stack(torch.broadcast_tensors(*numbers), -1), (0, 2))       # (..., T or 1, 8)
        yield torch.cat((more.type_as(x).expand(*x.shape[:3], -1), x), -1)             # (B, H, T, 8 + D)

class LinearBias(torch.autograd.Function):
    """softmax(q k^T / sqrt(D) + a_m (b_n - b_m)) v over the keys that are seen, q, k, v and the result (B, H, T, D).

    Forward it is one fused kernel. In half precision that kernel's backward would round each term of the gradients of a
    and b, sums in which large terms cancel. So the weights are computed again in fp32 at least, for a block of queries
    at a time. With s the scores and p the weights, ds = p (dp - sum_n p dp), da_m = sum_n ds_mn (b_n - b_m) and
    db_n = sum_m ds_mn a_m; what b_m itself would get is a_m sum_n ds_mn = 0.
    """

    @staticmethod
    def forward(ctx, q, k, v, a, b, causal, window):
        ctx.save_for_backward(q, k, v, a, b)
        ctx.seen = causal, window
        T, D = q.shape[2:]
        seen = ~model_torch.unseen(T, T, causal, window, q.device) if window else None
        scale = 1 / score_divisor(q)
        q, k = augment_qk(q, k, a, b)
        v = F.pad(v, (0, 8))                                                           # kernels want one width
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal and not window, scale=scale)[..., :D]

    @staticmethod
    def backward(ctx, dy):
        inputs = ctx.saved_tensors
        causal, window = ctx.seen
        T = dy.shape[2]
        divisor = score_divisor(inputs[0])
        with full_precision(dy):
            dy, q, k, v, a, b = map(at_least_fp32, (dy, *inputs))
            a, b = a.expand(q.shape[:3]), b.expand(q.shape[:3])                        # (B, H, T)
            dq, dk, dv, da, db = map(torch.zeros_like, (q, k, v, a, b))
            rows = max(1, PAIRS[q.device.type] // (q.shape[0] * q.shape[1] * T))
            for i in range(0, T, rows):
                j = min(T, i + rows)
                S = j if causal else T                                                 # keys that any of them sees
                apart = b[..., None, :S] - b[..., i:j, None]                           # (B, H, rows, S)
                scores = q[..., i:j, :] @ k[..., :S, :].mT / divisor + a[..., i:j, None] * apart
                never = model_torch.unseen(j - i, S, causal, window, q.device)
                p = (scores if never is None else scores.masked_fill(never, -torch.inf)).softmax(-1)
                dp = dy[..., i:j, :] @ v[..., :S, :].mT
                ds = p * (dp - (p * dp).sum(-1, keepdim=True))
                dv[..., :S, :] += p.mT @ dy[..., i:j, :]
                dq[..., i:j, :] = ds @ k[..., :S, :] / divisor
                dk[..., :S, :] += ds.mT @ q[..., i:j, :] / divisor
                da[..., i:j] = (ds * apart).sum(-1)
                db[..., :S] += (ds * a[..., i:j, None]).sum(-2)
        grads = zip((dq, dk, dv, da, db), inputs, strict=True)
        return *(g.sum_to_size(x.shape).type_as(x) for g, x in grads), None, None

def from_the_last(n):
    """Integer positions n, (T,) or (B, T), counted from the last: 0 or less in order, (..., 1, T)."""
    return (n - n[..., -1:])[..., None, :]
