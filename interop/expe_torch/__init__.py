"""ExPE and ExQPE for any attention in PyTorch. This file needs only torch (pip install . and import expe_torch).

    encoding = ExPE(l=24, theta=64 / context)                ExPE on keys only, on="k", which is exactly relative
    h_q, h_k, h_v = encoding(h, positions)                   h (B, T, C) is the input of all three projections
    q, k, v = W_q(h_q), W_k(h_k), W_v(h_v)                   any number of heads, also fewer for keys than for queries
    drop_in(model, encoding)                                 all of this in a Llama of transformers

The defaults are on="k" and start 0. theta has none, since it depends on the trained context: 64/context did best with
on="k" (docs/explained.md of the repository), and the paper has 1/(4*context) with on="qk".

h is the input of attention, after its norm. Leave out RoPE and other encodings: nothing else needs the position.
positions are integers, (T,) or (B, T), on h's device: 0 .. T-1, with a cache those of the new tokens. They stay on that
device, which is never synchronized.

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

import math
from functools import partial
from numbers import Real

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ExPE", "ExQPE", "drop_in", "expe_rows", "exqpe_rows", "from_last"]

# ---- the rows --------------------------------------------------------------------------------------------------------


def _to_int64(positions):
    """The positions in int64; ValueError for any that are not integers."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions must be integers, got {positions.dtype}: a rounded position is another position")
    return positions.long()

def _integers(positions, l):
    """n (..., 1) and j (l,) in int64, on the device of the positions."""
    return _to_int64(positions)[..., None], torch.arange(l, device=positions.device)

def _wide(x):
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)

def expe_rows(positions, l, start, theta):
    """start + theta (n + j), equation 3: positions of any shape to (..., l), in float64."""
    n, j = _integers(positions, l)
    return start + theta * _wide(n + j)

def exqpe_rows(positions, l, start, theta1, theta2):
    """start + theta1 j + theta2 max(0, floor((n - j)/l) + 1), equation 5: to (..., l), in float64."""
    n, j = _integers(positions, l)
    raised = ((n - j).div(l, rounding_mode="floor") + 1).clamp(min=0)
    return start + theta1 * _wide(j) + theta2 * _wide(raised)

def from_last(positions):
    """Positions counted from the last of each sequence, (..., T) in int64: 0 and below. For ExPE with on="k" only."""
    n = _to_int64(positions)                                            # uint8 has no numbers below 0
    return n - n.amax(-1, keepdim=True) if n.numel() else n             # an empty sequence has no last position

# ---- the modules -----------------------------------------------------------------------------------------------------

def _finite(name, value):
    """The value as a float; ValueError that names the argument if it is not a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)

def _step(name, value):
    """As _finite, but not 0."""
    if _finite(name, value) == 0:
        raise ValueError(f"{name} must not be 0, which gives all positions the same numbers")
    return float(value)

def _cast_rows(rows, like, name):
    """Rows in the dtype of a tensor; ValueError that names it if it would cut off what is not whole."""
    if not like.is_floating_point():
        raise ValueError(f"{name} must be real floating-point numbers, such as torch.float32, got {like.dtype}")
    return rows.to(like.dtype)

class ExPE(nn.Module):
    """(h, positions) to what enters W_q, W_k and W_v, h (..., T, C): the paper's equations 2 and 3. No parameters.

    on: whose input is overridden, of "q", "k" and "v": "k" (exactly relative), "qk" (the paper's) or others.
    theta: 64/context with on="k", 1/(4*context) with on="qk", of the context in training. Raises ValueError for an l
    below 1 or above C, another `on`, a theta or start that is not finite, a theta of 0, an h of integers, positions
    that are not integers, and more or fewer of them than h has tokens.
    """

    def __init__(self, l, *, theta, start=0.0, on="k"):
        super().__init__()
        if not isinstance(l, int) or isinstance(l, bool) or l < 1:
            raise ValueError(f"l must be a whole number of at least 1, got {l!r}")
        if not on or set(on) - set("qkv"):
            raise ValueError(f'on must be of the letters of "qkv", got {on!r}')
        self.l = l
        self.on = on
        self.numbers = _finite("start", start), _step("theta", theta)

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
        table = _cast_rows(self.rows(positions), h, "h")                               # (..., T, l)
        return torch.cat((table.expand(*h.shape[:-1], self.l), h[..., self.l :]), -1)  # equation 3

    def forward(self, h, positions):
        phi = self.phi(h, positions)
        return tuple(phi if part in self.on else h for part in "qkv")                  # equation 2

    def content(self, h):
        """h with its first l numbers set to 0, so that W phi(h) = W content(h) + place(W, positions)."""
        return torch.cat((torch.zeros_like(h[..., : self.l]), h[..., self.l :]), -1)   # (..., T, C)

    def place(self, weight, positions):
        """What positions add to W phi, (..., T, rows of W): the row times the first l columns of W (.., C)."""
        return F.linear(_cast_rows(self.rows(positions), weight, "weight"), weight[:, : self.l])

    def extra_repr(self):
        return f"l={self.l}, numbers={self.numbers}, on={self.on!r}"

class ExQPE(ExPE):
    """ExPE with the paper's equations 4 and 5. Its rows are straight only between multiples of l. With on="k" it is
    therefore relative only for shifts by multiples of l, and `from_last` cannot be used. theta1: 1/(4*context).
    Raises ValueError as ExPE does; it is theta2 that must not be 0.
    """

    def __init__(self, l, *, theta1, theta2=1 / 16, start=0.0, on="qk"):
        super().__init__(l, theta=1.0, start=start, on=on)              # any theta: rows has two others
        self.numbers = _finite("start", start), _finite("theta1", theta1), _step("theta2", theta2)

    def rows(self, positions):
        return exqpe_rows(positions, self.l, *self.numbers)

# ---- in a Llama of transformers --------------------------------------------------------------------------------------

LLAMAS = "llama", "mistral", "qwen2", "qwen3"             # model types whose attention is made of the same parts

class NoRotation(nn.Module):
    """In the place of a Llama's rotary embedding: cosines of 1 and sines of 0, which leave q and k as they are.

    No rope_type of transformers is left to act: some compute frequencies anew in each pass, some multiply q and k.
    """

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x, position_ids):
        """(cosines, sines), (B or 1, T, D) each, of x (B, T, C) and position_ids (B or 1, T)."""
        sines = x.new_zeros(*position_ids.shape, self.width)
        return sines + 1, sines

def _keep_positions(on, attention, args, inputs):
    """A hook before attention: its projections get the positions (B or 1, T), with a cache those of the new tokens."""
    for part in on:
        getattr(attention, f"{part}_proj").positions = inputs["position_ids"]

def _enter(encoding, projection, args):
    """A hook before a projection: the encoding overrides its input (B, T, C)."""
    return (encoding.phi(args[0], projection.positions),)

def drop_in(model, encoding):
    """Put an ExPE or ExQPE into every layer of a Llama of transformers in RoPE's place; returns the model.

    A LlamaForCausalLM, or a Mistral, Qwen2 or Qwen3, whose attention is made of the same parts.

    The hooks read only the module that they are called with, so that a deep copy of the model has its own positions.
    Hooks are not saved: call drop_in again after from_pretrained. Raises ValueError for another model or
    encoding, and for a model that has an encoding already.
    """
    if not isinstance(encoding, ExPE):
        raise ValueError(f"drop_in needs an ExPE or ExQPE, got {type(encoding).__name__}")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    layers = getattr(getattr(model, "model", None), "layers", None)
    if kind not in LLAMAS or layers is None:
        raise ValueError(f"drop_in needs a Llama, Mistral, Qwen2 or Qwen3 of transformers, got {type(model).__name__}")
    if isinstance(model.model.rotary_emb, NoRotation):
        raise ValueError("this model has an encoding already: build or load it anew, and call drop_in once")
    model.model.rotary_emb = NoRotation(layers[0].self_attn.head_dim)
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(partial(_keep_positions, encoding.on), with_kwargs=True)
        for part in encoding.on:
            getattr(layer.self_attn, f"{part}_proj").register_forward_pre_hook(partial(_enter, encoding))
    return model
