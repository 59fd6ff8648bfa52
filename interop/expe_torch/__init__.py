"""ExPE and ExQPE for any attention in PyTorch: one file that needs torch alone (pip install . and import expe_torch).

    encoding = ExPE(l=24, theta=64 / context)                on="k": ExPE on keys only, which is exactly relative
    h_q, h_k, h_v = encoding(h, positions)                   h (B, T, C) is what would have entered all three
    q, k, v = W_q(h_q), W_k(h_k), W_v(h_v)                   any number of heads, of keys fewer than of queries too

h is what attention reads, after its norm; nothing else knows the position, so that RoPE and the like are left out.
positions are integers, (T,) or (B, T), on h's device: 0 .. T-1, with a cache those of the new tokens. They stay there,
and the device is never waited for. theta has no default, since it follows the context in training: 64/context did best
with on="k" (docs/evidence.md), and the paper has 1/(4*context), with on="qk".

Exact: a row is computed of whole numbers in float64, and then cast once to h's dtype. (A device without float64, as
mps, takes fp32.) What that cast loses cannot be had back, and it grows with the position: the numbers theta*(n + j) are
as far apart as theta, and those that a format with p bits holds near x are x 2^(1-p) apart or a half of it. At
theta = 2^-11 fp32 (p = 24) keeps all n below 2^24 apart, bf16 (p = 8) those below 2^8: 256 and 257 are one number.
With on="k" there is a way round: position n adds n times one vector to the key, so that all keys may be counted from
any origin (the softmax drops what they share). `from_last` counts them from the last: those that are near, which matter
most, have the smallest numbers. Where keys are cached, keep W_k's product with `content(h)`, which knows no position,
and add `place` to it where they are read: what does not move in the cache is then counted from the last at every step.

n a position, j a dimension below l, start the paper's S. Paper: "ExPE: Exact Positional Encodings for Generative
Transformer Models with Extrapolating Capabilities", Datseris, Vassileva, Koychev and Boytcheva 2025.
"""

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ExPE", "ExQPE", "expe_rows", "exqpe_rows", "from_last"]


def _whole(positions, l):
    """n (..., 1) in int64 and j (l,), on the device of the positions; ValueError for any that are not integers."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions must be integers, got {positions.dtype}: a rounded position is another position")
    return positions.long()[..., None], torch.arange(l, device=positions.device)

def _wide(x):
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)

def expe_rows(positions, l, start, theta):
    """start + theta (n + j), equation 3: positions of any shape to (..., l), in float64."""
    n, j = _whole(positions, l)
    return start + theta * _wide(n + j)

def exqpe_rows(positions, l, start, theta1, theta2):
    """start + theta1 j + theta2 max(0, floor((n - j)/l) + 1), equation 5: to (..., l), in float64."""
    n, j = _whole(positions, l)
    raised = ((n - j).div(l, rounding_mode="floor") + 1).clamp(min=0)
    return start + theta1 * _wide(j) + theta2 * _wide(raised)

def from_last(positions):
    """The same, counted from the last of each sequence, (..., T): 0 and below. For ExPE with on="k" alone."""
    return positions - positions.amax(-1, keepdim=True)

class ExPE(nn.Module):
    """(h, positions) to what enters W_q, W_k and W_v, h (..., T, C): the paper's equations 2 and 3. No parameters.

    on: whose input is overridden, of "q", "k" and "v": "k" (exactly relative), "qk" (the paper's) or others.
    theta: 64/context with on="k", 1/(4*context) with on="qk", of the context in training. Raises ValueError for an l
    below 1 or above C, another `on`, positions that are not integers, and more or fewer of them than h has tokens.
    """

    def __init__(self, l, *, theta, start=0.0, on="k"):
        super().__init__()
        self.l = l
        self.on = on
        self.numbers = (start, theta)
        if not (isinstance(l, int) and l >= 1):
            raise ValueError(f"l must be a whole number of at least 1, got {l!r}")
        if not on or set(on) - set("qkv"):
            raise ValueError(f'on must be of the letters of "qkv", got {on!r}')

    def rows(self, positions):
        return expe_rows(positions, self.l, *self.numbers)

    def phi(self, h, positions):
        """h of which the first l numbers are the position's row: of W_q, W_k or W_v alone, as for a hook on one."""
        if self.l > h.shape[-1]:
            raise ValueError(f"l must be at most the width, {h.shape[-1]}, got {self.l}")
        expected = tuple(h.shape[:-1])
        shape = tuple(positions.shape)
        if shape not in (expected, expected[-1:], (*[1] * (len(expected) - 1), *expected[-1:])):      # (1, T) too
            raise ValueError(f"positions must have the shape {expected[-1:]} or {expected}, got {shape}")
        table = self.rows(positions).to(h.dtype)                                       # (..., T, l)
        return torch.cat((table.expand(*h.shape[:-1], self.l), h[..., self.l :]), -1)  # equation 3

    def forward(self, h, positions):
        phi = self.phi(h, positions)
        return tuple(phi if part in self.on else h for part in "qkv")                  # equation 2

    def content(self, h):
        """phi without a position, of which W phi = W content(h) + place(W, positions): the first l numbers are 0."""
        return torch.cat((torch.zeros_like(h[..., : self.l]), h[..., self.l :]), -1)   # (..., T, C)

    def place(self, weight, positions):
        """What positions add to W phi, (..., T, rows of W): the row's product with the first l columns of W (.., C)."""
        return F.linear(self.rows(positions).to(weight.dtype), weight[:, : self.l])

    def extra_repr(self):
        return f"l={self.l}, numbers={self.numbers}, on={self.on!r}"

class ExQPE(ExPE):
    """Likewise by the paper's equations 4 and 5. Its rows are straight only from one multiple of l to the next, so that
    with on="k" it is relative for shifts by multiples of l, and `from_last` is not for it. theta1: 1/(4*context).
    """

    def __init__(self, l, *, theta1, theta2=1 / 16, start=0.0, on="qk"):
        super().__init__(l, theta=theta1, start=start, on=on)
        self.numbers = start, theta1, theta2

    def rows(self, positions):
        return exqpe_rows(positions, self.l, *self.numbers)
