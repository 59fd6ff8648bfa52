"""ExPE and ExQPE for any attention in PyTorch. This file needs only torch (pip install . and import expe_torch).

    encoding = ExPE(l=24, theta=64 / context)                on="k": ExPE on keys only, which is exactly relative
    h_q, h_k, h_v = encoding(h, positions)                   h (B, T, C) is the input of all three projections
    q, k, v = W_q(h_q), W_k(h_k), W_v(h_v)                   any number of heads, also fewer for keys than for queries

h is the input of attention, after its norm. Leave out RoPE and other encodings: nothing else needs the position.
positions are integers, (T,) or (B, T), on h's device: 0 .. T-1, with a cache those of the new tokens. They stay on that
device, which is never synchronized. theta has no default, since it depends on the trained context: 64/context did best
with on="k" (docs/evidence.md), and the paper uses 1/(4*context) with on="qk".

Precision: a row is computed from integers in float64 (fp32 on devices without float64, such as mps) and is cast once to
h's dtype. The cast loses digits, and more at larger positions. The numbers theta*(n + j) are theta apart, and a format
with p bits has a spacing of x 2^(1-p), or half of it, near x. At theta = 2^-11 fp32 (p = 24) distinguishes all n below
2^24, and bf16 (p = 8) those below 2^8: 256 and 257 become one number.
With on="k" position n adds n times one vector to the key, so that keys may be counted from any origin: the softmax
drops what all keys share. `from_last` counts them from the last one, so that near keys, which matter most, have the
smallest numbers. With a key cache, keep W_k's product with `content(h)`, which does not depend on positions, and add
`place` when the keys are read. Then the cache stays as it is, while positions are counted from the last at every step.

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
    """Positions counted from the last of each sequence, (..., T): 0 and below. For ExPE with on="k" only."""
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
        """h with its first l numbers replaced by the position's row. A hook on one projection can call it alone."""
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
        """h with its first l numbers set to 0, so that W phi(h) = W content(h) + place(W, positions)."""
        return torch.cat((torch.zeros_like(h[..., : self.l]), h[..., self.l :]), -1)   # (..., T, C)

    def place(self, weight, positions):
        """What positions add to W phi, (..., T, rows of W): the row times the first l columns of W (.., C)."""
        return F.linear(self.rows(positions).to(weight.dtype), weight[:, : self.l])

    def extra_repr(self):
        return f"l={self.l}, numbers={self.numbers}, on={self.on!r}"

class ExQPE(ExPE):
    """ExPE with the paper's equations 4 and 5. Its rows are straight only between multiples of l. With on="k" it is
    therefore relative only for shifts by multiples of l, and `from_last` cannot be used. theta1: 1/(4*context).
    """

    def __init__(self, l, *, theta1, theta2=1 / 16, start=0.0, on="qk"):
        super().__init__(l, theta=theta1, start=start, on=on)
        self.numbers = start, theta1, theta2

    def rows(self, positions):
        return exqpe_rows(positions, self.l, *self.numbers)
