"""The fast forms of plain parts of model_torch.py, for train.py --fast and longer/. Tests compare each with its twin.

    fast                                                                           plain
    cross_entropy      the loss without an array of all logits                     model_torch.cross_entropy
    Dropout            16 random bits a number on a CPU instead of a whole word    nn.Dropout
    attend_linear      a_m b_n as further dimensions of q and k, in half precision Attention.attend with a bias
    attend_banded      Shaw's vectors on a band of the scores, on a CPU            Shaw.score and Shaw.value
    attend             adds a trained bias in the scores' product, on a CPU        Attention.attend with a bias
    mask               the same array for all blocks                               Attention.mask
    FastGPT            GPT with these, and with positions as integers              GPT
    compile            torch.compile of the blocks and of the loss                 the model as it is
    bf16_rate          what a step's operations a second are compared with on a GPU
    keep_freed_memory  a process keeps the memory of freed arrays                  the C library's own settings

engine/compare.py compares FastGPT with the model of model_torch.py before a training begins.
"""

import contextlib
import ctypes
import functools
import math
import os
import shutil
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import model_numpy
import model_torch
from engine import banded, compare
from engine.banded import has_band, in_a_row, minus_infinity
from engine.cross_entropy import cross_entropy, softmax_parts
from engine.linear_bias import LinearBias, from_the_last, linear_of
from engine.precision import autocasts, full_precision, in_half_precision, is_full_on_cpu
from model_torch import as_tensor, at_least_fp32, score_divisor
from settings import InputError

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")     # as torch chooses it on a CPU

# ---- the parts -------------------------------------------------------------------------------------------------------

class Dropout(nn.Dropout):
    """nn.Dropout, at 16 random bits a number on a CPU, where torch draws a whole word for each, one by one."""

    def forward(self, x):
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not (self.training and self.p):
            return super().forward(x)
        dropped = min(round(self.p * 2**16), 2**16 - 1)                                # of 2^16 numbers
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))

class Attention(model_torch.Attention):
    """Attention with Shaw's band and, in half precision, a linear bias; in every other case the plain steps.

    In fp32 training keeps the plain form of a linear bias, which is no slower.
    """

    fused = True                         # False: with a bias, for a class that wants to see the scores
    linear_in_fp32 = False               # True: the linear bias in every precision
    adds_shifts = True                   # False: where the linear bias is used, pos.rows has no positions

    def forward(self, h, pos):
        if has_band(self) and in_a_row(pos.n):
            q, k, v = self.project(h, pos.rows)
            return self.output(self.attend_banded(q, k, v), h)
        if self.linear is None or not (self.linear_in_fp32 or in_half_precision(h)):
            return super().forward(h, pos)
        q, k, v = self.project(h, zeros_like(pos.rows))
        return self.output(self.attend_linear(q, k, v, self.key_state(h), pos.rows, from_the_last(pos.n)), h)

    def key_state(self, h):
        """The encoding's key_state of the block's input h (B, T, C), computed in fp32 at least; h if it is h itself."""
        if type(self.encoding).key_state is model_torch.Encoding.key_state:
            return h
        with full_precision(h):
            return self.encoding.key_state(at_least_fp32(h))

    @functools.cached_property
    def linear(self):
        """linear_of the encoding, or None."""
        return linear_of(self.encoding, self.causal, self.adds_shifts)

    def factors(self, *content):
        """a and b of linear_of."""
        return self.linear(*content)

    def key_columns(self, rows):
        """What project makes of each overridden number of a key, (H, D, l); rows (..., l): any rows, or None."""
        if rows is None:
            return None
        l = rows.shape[-1]
        one_each = torch.eye(l + 1, l, dtype=rows.dtype, device=rows.device)           # and none at all
        _, k, _ = self.project(self.qkv.weight.new_zeros(1, l + 1, self.qkv.weight.shape[1]), one_each)
        return (k[0, :, :-1] - k[0, :, -1:]).mT.contiguous()

    def attend_linear(self, q, k, v, key_state, rows, n):
        """As attend; key_state is of all S keys, and their places n (..., 1, S) are counted from the last.

        rows (..., T, l): of the queries' positions; any, where the softmax drops a shift of all scores; or None.
        """
        T, S = q.shape[2], k.shape[2]
        if autocasts(q):                 # an edit of project may have multiplied by an fp32 number
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        with full_precision(q):
            x, w = at_least_fp32(q), self.key_columns(rows)
            w = None if w is None else at_least_fp32(w)
            a, b = self.factors(x, key_state, w, n.type_as(x))
            if T != S or self.encoding.softmax or not self.fused:                      # in fp32, for the bias' digits
                bias = a[..., None] * (b[..., None, :] - b[..., -T:, None])
                if w is not None and hasattr(self.encoding, "sees_shifts"):
                    own = at_least_fp32(rows)[..., None, :, :] @ w.mT                  # (..., H, T, D)
                    bias = bias + (x * own).sum(-1, keepdim=True) / score_divisor(q)
                return self.attend(x, k.type_as(x), v.type_as(x), bias, None).type_as(q)
            return LinearBias.apply(q, k, v, a, b, self.causal, self.window)

    def attend_banded(self, q, k, v):
        """As attend with Shaw's vectors."""
        return banded.attend(q, k, v, self.encoding, self.causal, self.window)

    def attend(self, q, k, v, bias, table):
        """As the plain one, but a trained bias of each sequence, in full precision on a CPU, is added by the product.

        Kernels want one width: narrower values get zeros, as beside PoPE's keys.
        """
        plain_softmax = self.encoding.value is None and self.encoding.softmax is None
        if plain_softmax and bias is not None and bias.ndim == 4 and bias.requires_grad and is_full_on_cpu(q):
            bias = self.mask(q, k, bias).expand(*q.shape[:3], k.shape[2])              # (B, H, T, S)
            scores = torch.baddbmm(*(x.flatten(0, 1) for x in (bias, q, k.mT)), alpha=1 / score_divisor(q))
            return scores.view_as(bias).softmax(-1) @ v
        if (more := q.shape[-1] - v.shape[-1]) and self.encoding.value is None:
            return super().attend(q, k, F.pad(v, (0, more)), bias, table)[..., :-more]
        return super().attend(q, k, v, bias, table)

    def mask(self, q, k, bias):
        """As the plain one, whose blocks all make the same numbers."""
        hidden = minus_infinity(q.shape[2], k.shape[2], self.causal, self.window, q.device, q.dtype)
        return hidden if bias is None else bias.type_as(q) + hidden

def zeros_like(rows):
    """Rows of zeros, by which an override gives content without a position; None for None."""
    return None if rows is None else torch.zeros_like(rows)

PARTS = {"attention": Attention, "dropout": Dropout, "cross_entropy": cross_entropy}            # of GPT

# ---- the model -------------------------------------------------------------------------------------------------------

class FastTables(NamedTuple):
    """model_numpy.Tables of one encoding, and the positions themselves."""

    rows: Any
    pairs: Any
    n: Any                               # (T,) or (B, T) integers

class FastGPT(model_torch.GPT):
    """GPT of these parts."""

    def __init__(self, config, seed=0):
        super().__init__(config, seed, **PARTS)
        self._fast_tables = (None, None)

    def tables(self, n):
        tables = super().tables(n)
        if self._fast_tables[0] is not tables:                                         # GPT makes new ones of other n
            at = as_tensor(n, self.embedding.weight)
            fast_tables = {settings: FastTables(made.rows, made.pairs, at) for settings, made in tables.items()}
            self._fast_tables = tables, fast_tables
        return self._fast_tables[1]

def make_model(model_config, seed, half=False):
    """FastGPT, once it is known to compute what model_torch.py does; the process keeps freed memory.

    half: whether it is to be trained in bf16. Raises InputError if an edit of model_torch.py is not followed here.
    """
    keep_freed_memory()
    compare.check_training(FastGPT, model_config, half)
    return FastGPT(model_config, seed)

def compile(model, **how):
    """torch.compile each block and the loss; tables and checks, which look at values, stay out of the graphs."""
    if model.embedding.weight.device.type == "cpu":
        if not shutil.which(COMPILER):
            raise InputError(f"--compile needs the C++ compiler {COMPILER}: install it, or leave out --compile")
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            how = {"options": {"cpp.simdlen": 256}} | how    # g++ 12 errs in kernels that transpose bf16 with AVX-512
    torch.compiler.reset()                                   # graphs of other models count against a limit of 8
    for block in model.blocks:
        getattr(block.attn, "linear", None)                  # is found by looking at values
        block.compile(**how)
    model.cross_entropy = functools.partial(cross_entropy, parts=torch.compile(softmax_parts, **how))

def flops_a_token(model):
    """Of a training step: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), N counting the weights that multiply.

    A weight costs two operations forward and four backward, and so does each of the T keys in attention's two products;
    under a causal mask they are T/2 on average.
    """
    weights = sum(math.prod(shape) for name, shape in model_numpy.parameter_shapes(model).items()
                  if len(shape) == 2 and (model.tied or name != "embedding.weight"))
    keys = model.context / (2 if model.causal else 1)
    return 6 * weights + 12 * model.layers * model.width * keys

@functools.cache
def bf16_rate(device):
    """Operations a second of one large bf16 product on a GPU."""
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    for i in range(12):
        if i == 2:                                                                     # the first ones are slower
            torch.cuda.synchronize(device)
            begun = time.perf_counter()
        x @ x
    torch.cuda.synchronize(device)
    return 10 * 2 * len(x) ** 3 / (time.perf_counter() - begun)

def keep_freed_memory():
    """Let this process keep the memory of arrays that it has freed, for the next step; for long runs, on Linux.

    glibc's malloc otherwise gives each large array back to the system, and the system clears every page that it hands
    out again: a fifth to a third of a training step. Elsewhere this does nothing.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3                                        # malloc.h
    with contextlib.suppress(OSError, TypeError, AttributeError):                      # no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
