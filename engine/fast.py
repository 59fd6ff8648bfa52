"""The fast forms of plain parts of model_torch.py, for train.py --fast and longer/. Tests compare each with its twin.

    fast                                                                           plain
    cross_entropy      the loss without an array of all logits                     model_torch.cross_entropy
    Dropout            16 random bits a number on a CPU instead of a whole word    nn.Dropout
    LinearBias         a_m b_n as further dimensions of q and k, in half precision Attention.attend with a bias
    Banded             Shaw's vectors on a band of the scores, on a CPU            Shaw.score and Shaw.value
    Attention          uses these two; adds a trained bias in the scores' product  model_torch.Attention
    compile            torch.compile of the blocks and of the loss                 the model as it is
    bf16_rate          what a step's operations a second are compared with on a GPU
    keep_freed_memory  a process keeps the memory of freed arrays                  the C library's own settings
"""

import contextlib
import ctypes
import functools
import math
import os
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import model_numpy
import model_torch
from model_torch import at_least_fp32, score_divisor, unseen
from positional_encodings import ExPE, Shaw
from settings import InputError

# Numbers in the largest array of logits that a loss keeps. On a CPU 42 MB: up to 32 MB the C library may leave what was
# freed in a heap that is full of holes, and a process that only reads grew by a gigabyte.
LOGITS = {"cpu": 10 * 2**20, "mps": 2**26, "cuda": 2**26, "meta": 2**26}

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")     # as torch chooses it on a CPU
BAND = 64                                # queries at a time in attend_banded
PAIRS = {"cpu": 2**24, "mps": 2**25, "cuda": 2**25, "meta": 2**25}      # scores that a backward pass keeps at once

def autocasts(x):
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)

def full_precision(x):
    """A context in which nothing is autocast."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()

def in_half_precision(x):
    return x.dtype.itemsize == 2 or autocasts(x)

def is_full_on_cpu(x):
    return x.device.type == "cpu" and not in_half_precision(x)

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

class Dropout(nn.Dropout):
    """nn.Dropout, at 16 random bits a number on a CPU, where torch draws a whole word for each, one by one."""

    def forward(self, x):
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not (self.training and self.p):
            return super().forward(x)
        dropped = min(round(self.p * 2**16), 2**16 - 1)                                # of 2^16 numbers
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))

def linear_of(encoding, causal):
    """The function linear(q, kept, w, n) -> a, b by which an encoding's scores gain a_m b_n; None if it has none.

    q (B, H, T, D) and kept, what the encoding keeps of the keys' inputs, are free of position. w (H, D, C) is W_k, and
    n (..., 1, S) are the keys' positions counted from the last. a is (..., H, T or 1), b (..., 1 or H, S). All are in
    fp32 at least. An encoding of zoo/ has it as a method; for ExPE and ALiBi, and no class made of them, it is here.
    """
    settings = encoding.settings

    def alibi(q, kept, w, n):
        return settings.slopes * encoding.of_each_head(q, n)[..., 0], n                # (H, 1), (..., 1, S)

    def expe_on_keys(q, kept, w, n):
        """A position adds one vector to its key, times n, and so a number of the query's to the score."""
        step = settings.scale * settings.theta * w[..., : settings.l].sum(-1)[:, None]             # (H, 1, D)
        return (q * step).sum(-1) / score_divisor(q), n                                # (B, H, T), (..., 1, S)

    if type(encoding) is model_torch.ExPE and is_straight(settings) and not hasattr(encoding, "sees_shifts"):
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
        seen = ~unseen(T, T, causal, window, q.device) if window else None
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
                never = unseen(j - i, S, causal, window, q.device)
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
    never = unseen(T, S, causal, window, device)
    return F.pad(hidden if never is None else hidden.masked_fill(never, -torch.inf), (more, 0), value=-torch.inf)

class Attention(model_torch.Attention):
    """In half precision a linear bias enters as further dimensions of q and k, and the plain causal kernel does it all.

    There is no array of (H, T, S) numbers, and no key holds a position, whose digits would be rounded. In fp32 training
    keeps the plain form, which is no slower.
    """

    fused = True                         # False: with a bias, for a class that wants to see the scores

    def forward(self, h, pos):
        if has_band(self) and in_a_row(pos.n):
            return self.output(self.attend_banded(*self.project(h, pos)), h)
        if not in_half_precision(h) or self.linear is None:
            return super().forward(h, pos)
        nowhere = None if pos.rows is None else torch.zeros_like(pos.rows)
        q, k, v = self.project(h, pos._replace(rows=nowhere))
        return self.output(self.attend_linear(q, k, v, self.kept(h), from_the_last(pos.n)), h)         # (B, T, C)

    def kept(self, h):
        """What the encoding keeps of the block's input h (B, T, C), computed in fp32 at least; h if it keeps that."""
        if type(self.encoding).key_state is model_torch.Encoding.key_state:
            return h
        with full_precision(h):
            return self.encoding.key_state(at_least_fp32(h))

    @functools.cached_property
    def linear(self):
        """linear_of the encoding, or None."""
        return linear_of(self.encoding, self.causal)

    def factors(self, *content):
        """a and b of linear_of."""
        return self.linear(*content)

    def attend_linear(self, q, k, v, kept, n):
        """As attend; kept is of all S keys, and their places n (..., 1, S) are counted from the last."""
        T, S = q.shape[2], k.shape[2]
        w = self.qkv.weight.chunk(3)[1].unflatten(0, (self.n_heads, -1))               # (H, D, C)
        with full_precision(q):
            x, w = at_least_fp32(q), at_least_fp32(w)
            a, b = self.factors(x, kept, w, n.type_as(x))
            if T != S or self.encoding.softmax or not self.fused:                      # in fp32, for the bias' digits
                bias = a[..., None] * (b[..., None, :] - b[..., -T:, None])
                return self.attend(x, k.type_as(x), v.type_as(x), bias, None).type_as(q)
            return LinearBias.apply(q, k, v, a, b, self.causal, self.window)

    def attend_banded(self, q, k, v):
        """As attend with Shaw's vectors, of which all keys at the clipped distance or beyond it share one.

        The softmax drops the shared q_m . a_far if all scores lose it, and the weights' sum is 1 for the shared value.
        So only nearer keys need a vector, its difference from the shared one.
        """
        T, S, W = q.shape[2], k.shape[2], self.encoding.settings.max_distance
        keys, values = (x[: W + 1] for x in (self.encoding.keys, self.encoding.values))            # (W + 1, D) each
        near = [(x[:-1] - x[-1]).flip(0) for x in (keys, values)]
        hidden = minus_infinity(T, S, self.causal, self.window, q.device, q.dtype, W)  # (T, W + S)
        size = BAND if T == S else T                     # of pieces, whose queries see no later keys
        parts = []
        for i in range(0, T, size):
            j = min(T, i + size)
            end = S - T + j
            parts.append(Banded.apply(q[:, :, i:j], k[:, :, :end], v[:, :, :end], *near, hidden[i:j, : W + end]))
        return torch.cat(parts, 2) + values[-1]

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

PARTS = {"attention": Attention, "dropout": Dropout, "cross_entropy": cross_entropy}            # of GPT

def make_model(model_config, seed, half=False):
    """GPT with these parts, once they are known to be the plain ones' equals; the process keeps freed memory."""
    keep_freed_memory()
    model = model_torch.GPT(model_config, seed, **PARTS)
    check_same_as_plain(model, "engine/fast.py", half)
    return model

@torch.no_grad()
def check_same_as_plain(model, where, half=False):
    """InputError unless attention in a GPT with other parts gives what model_torch.py's gives, as that stands now.

    Otherwise an edit of a step that the parts replace would have no effect. Both read the same numbers on the CPU, with
    scores of about 3, in fp32 or by autocast in bf16. where: the file of the parts.
    """
    with torch.device("meta"):                                                             # takes no memory
        plain = model_torch.GPT(model.config, seed=None)
    plain.load_state_dict(model.state_dict(), assign=True)                                 # the same tensors
    n = np.arange(min(model.config.context, 64))
    h = model.blocks[0].norm1(model.embedding(torch.from_numpy(n) * 7 % model.config.vocab))[None]    # (1, T, C)
    h = h * (90 / math.sqrt(model.config.width))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        ours, right = (torch.stack([block.attn(h, gpt.tables(n)[block.attn.encoding.settings]).float()
                                    for block in gpt.blocks]) for gpt in (model, plain))
    error = ((ours - right).abs().max() / right.abs().max()).item()
    if error > (0.03 if half else 1e-3):
        raise InputError(f"{where} has another attention than model_torch.py, by {error:.1%}: make an edit of a step "
                         f"that {where} replaces there too")

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
