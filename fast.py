"""What is fast and not plain: each stands for a plain line of model_torch.py, and a test holds the two equal.

    cross_entropy    the loss without an array of all logits                     model_torch.cross_entropy
    Dropout          16 random bits a number on a CPU instead of a whole word    nn.Dropout
    compile          torch.compile of the blocks and of the loss                 the model as it is
    keep_freed_memory                                                            the C library's own settings

train.py uses them, and so does what reads long texts; GPT takes the first two as parts.
"""

import contextlib
import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import nn

# Numbers in the largest array of logits that a loss keeps. On a CPU 42 MB: up to 32 MB the C library may leave what was
# freed in a heap that is full of holes, and a process that only reads grew by a gigabyte.
LOGITS = {"cpu": 10 * 2**20, "mps": 2**26, "cuda": 2**28}

def at_least_fp32(x):
    """A half-precision tensor in fp32, any other as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def rows_at_a_time(h, w):
    """How many of h's rows have so few logits that they may be in memory at once."""
    return max(1, LOGITS[h.device.type] // len(w))

def softmax_parts(logits, targets):
    """(e, total, loss) of logits (rows, V) and targets (rows, 1): the softmax is e / total, the loss summed over rows.

    In fp32 at least, and e in the place of the logits if they are of that; e is returned in the logits' dtype.
    """
    e = at_least_fp32(logits)
    e -= e.amax(-1, keepdim=True)
    right = e.gather(-1, targets)                                                      # (rows, 1)
    total = e.exp_().sum(-1, keepdim=True)                                             # (rows, 1)
    return e.to(logits.dtype), total, (total.log() - right).sum()

class CrossEntropy(torch.autograd.Function):
    """The mean of -log softmax(h W^T) at the targets, in nats: h (N, C), W (V, C), targets (N,).

    The logits are the largest array of a training step, and F.cross_entropy keeps three of that size. But they are
    needed for their gradient alone, (softmax - onehot) / N, which takes their place, a few rows at a time, and goes at
    once into the gradients of h and W.
    """

    @staticmethod
    def forward(ctx, h, w, targets, parts=softmax_parts):
        loss, dh, dw = 0, torch.empty_like(h), torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
        for x, dx, target in zip(*(x.split(rows_at_a_time(h, w)) for x in (h, dh, targets[:, None])), strict=True):
            e, total, part = parts(x @ w.T, target)                                    # (rows, V), (rows, 1), ()
            loss += part
            e.scatter_add_(-1, target, -total.to(e.dtype))                             # total (softmax - onehot)
            dx.copy_((e @ w) / total)
            x = (x / total).to(w.dtype)
            dw.addmm_(e.T, x) if dw.dtype == w.dtype else dw.add_(e.T @ x)             # long sums in fp32 at least
        ctx.save_for_backward(dh, dw)
        return loss / len(h)

    @staticmethod
    def backward(ctx, dloss):
        dh, dw = ctx.saved_tensors
        dloss = dloss / len(dh)
        return dloss * dh, dloss * dw, None, None

def cross_entropy(h, w, targets, reduction="mean", parts=softmax_parts):
    """As model_torch.cross_entropy, the losses in fp32 at least."""
    if torch.is_grad_enabled() and reduction == "mean":
        if torch.is_autocast_enabled(h.device.type):
            h, w = (x.to(torch.get_autocast_dtype(h.device.type)) for x in (h, w))
        return CrossEntropy.apply(h.flatten(0, 1), w, targets.flatten().long(), parts)
    pieces = zip(*(x.flatten(0, 1).split(rows_at_a_time(h, w)) for x in (h, targets)), strict=True)
    losses = torch.cat([F.cross_entropy(at_least_fp32(F.linear(x, w)), target.long(), reduction="none")
                        for x, target in pieces])
    return losses.mean() if reduction == "mean" else losses.view(targets.shape)

class Dropout(nn.Dropout):
    """nn.Dropout, at 16 random bits a number on a CPU, where torch draws a whole word for each, one by one."""

    def forward(self, x):
        if x.device.type != "cpu" or not (self.training and self.p):
            return super().forward(x)
        dropped = min(round(self.p * 2**16), 2**16 - 1)                                # of 2^16 numbers
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))

PARTS = {"dropout": Dropout, "cross_entropy": cross_entropy}            # of GPT

def compile(model):
    """torch.compile each block and the loss; tables and checks, which look at values, stay out of the graphs."""
    for block in model.blocks:
        block.compile()
    model.cross_entropy = functools.partial(cross_entropy, parts=torch.compile(softmax_parts))

def keep_freed_memory():
    """Let this process keep the memory of arrays that it has freed, for the next step; for long runs, on Linux.

    glibc's malloc otherwise gives each large array back to the system, and the system clears every page that it hands
    out again: a fifth to a third of a training step. Elsewhere this does nothing.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3                                        # malloc.h
    with contextlib.suppress(OSError, TypeError, AttributeError):                      # no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
