"""model_torch.cross_entropy without an array of all logits, forward and backward."""

import torch
import torch.nn.functional as F

from engine.precision import autocasts
from model_torch import at_least_fp32

# Numbers in the largest array of logits that a loss keeps. On a CPU 42 MB: up to 32 MB the C library may leave what was
# freed in a heap that is full of holes, and a process that only reads grew by a gigabyte.
LOGITS = {"cpu": 10 * 2**20, "mps": 2**26, "cuda": 2**26, "meta": 2**26}


def pieces(w, *arrays):
    """A few rows of each array at a time, of which all logits with W (V, C) may be in memory at once."""
    rows = max(1, LOGITS[w.device.type] // len(w))
    return zip(*(x.split(rows) for x in arrays), strict=True)

def softmax_parts(logits, targets, counted):
    """(e, total, loss) of logits (rows, V), which e may overwrite, and targets (rows, 1), in fp32 at least.

    The softmax is e / total. The loss is summed over the rows that are counted (rows, 1).
    """
    e = at_least_fp32(logits)
    e -= e.amax(-1, keepdim=True)
    right = e.gather(-1, targets)                                                      # (rows, 1)
    total = e.exp_().sum(-1, keepdim=True)                                             # (rows, 1)
    return e.to(logits.dtype), total, (total.log() - right).where(counted, 0).sum()

class CrossEntropy(torch.autograd.Function):
    """model_torch.cross_entropy's mean, of h (N, C), W (V, C) and targets (N,), without three arrays of all logits.

    Their gradient (softmax - onehot) / N takes the place of some rows at a time, and goes at once into that of h and W.
    """

    @staticmethod
    def forward(ctx, h, w, targets, parts=softmax_parts):
        loss = 0
        dh = torch.empty_like(h)
        dw = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
        for x, dx, target in pieces(w, h, dh, targets[:, None]):
            counted = target >= 0                                                      # (rows, 1)
            target = target.clamp(min=0)
            e, total, part = parts(x @ w.T, target, counted)                           # (rows, V), (rows, 1), ()
            loss += part
            e.scatter_add_(-1, target, -total.to(e.dtype))                             # total (softmax - onehot)
            dx.copy_(((e @ w) / total).where(counted, 0))
            x = (x / total).where(counted, 0).to(w.dtype)
            dw.addmm_(e.T, x) if dw.dtype == w.dtype else dw.add_(e.T @ x)             # long sums in fp32 at least
        count = (targets >= 0).sum()
        ctx.save_for_backward(dh, dw, count)
        return loss / count

    @staticmethod
    def backward(ctx, dloss):
        dh, dw, count = ctx.saved_tensors
        dloss = dloss / count
        return dloss * dh, dloss * dw, None, None

def cross_entropy(h, w, targets, reduction="mean", parts=softmax_parts):
    """As model_torch.cross_entropy, the losses in fp32 at least."""
    if torch.is_grad_enabled() and reduction == "mean":
        if autocasts(h):
            h, w = (x.to(torch.get_autocast_dtype(h.device.type)) for x in (h, w))
        return CrossEntropy.apply(h.flatten(0, 1), w, targets.flatten().long(), parts)
    losses = torch.cat([F.cross_entropy(at_least_fp32(F.linear(x, w)), target.long(), reduction="none")
                        for x, target in pieces(w, h.flatten(0, 1), targets.flatten())])
    return losses.sum() / (targets >= 0).sum() if reduction == "mean" else losses.view(targets.shape)
