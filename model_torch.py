"""The GPT for real training, long evaluation and cached generation, with four doors for a positional encoding.

B batch, T query length, S key length (S > T with a cache), H heads, D width of a head, C = H*D model width,
V vocabulary, l overridden dimensions, n a position.

How it differs from GPT-2: positions enter through one of the doors below; no biases in linear layers; dropout on the
embedding and on each residual branch, never on attention weights; the output layer need not share the embedding.
norm "rmsnorm" with mlp "swiglu" makes it the Llama-style model of the paper's tables 8 and 9.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from config import CANNOT_STREAM, LEARNED, InputError, checkpoint_file, read_run, read_weights
from expe import (
    affine_parts,
    alibi_keys,
    distances,
    dual_chunk_positions,
    expe_table,
    exqpe_table,
    learned_rows,
    rope_table,
    shaw_index,
    sinusoidal_table,
    t5_bucket,
)

BLOCK = 256                              # queries at a time, where scores need a bias: GPT._pieces
# Numbers in the largest array of logits that a loss keeps. On a CPU 42 MB: up to 32 MB the C library may leave what was
# freed in a heap that is full of holes, and a process that only reads grew by a gigabyte.
LOGITS = {"cpu": 10 * 2**20, "mps": 2**26, "cuda": 2**28}

# ---- the encodings ---------------------------------------------------------------------------------------------------


class Encoding(nn.Module):
    """No encoding (NoPE, Haviv et al. 2022): the four doors, all shut. Every other encoding opens one of them.

    What the encoding knows of integer positions is in NumPy: float64, or integers that look something up. GPT asks for
    it once a pass, casts floats once to the weights' dtype, and hands it to the doors. rows(positions), for positions
    (T,) or (B, T), is the `table` of embed, offset and rotate. pairs(queries, keys), for query and key positions
    (..., T) and (..., S), is that of score and value.
    """

    longest = math.inf                   # tokens in the longest sequence it has rows for
    streams = True                       # whether a key's position can be changed after the key was computed
    pairs = None                         # a method, if score or value are open
    reads_weights = False                # whether `value` needs the attention weights, which a fused kernel never shows

    def __init__(self, config):
        super().__init__()
        self.config, self.settings = config, config.encoding

    def rows(self, positions):
        return None

    def embed(self, x, table):
        """The residual stream x (B, T, C), once, before the first block."""
        return x

    def override(self, w):
        """The override door, phi(h) W^T = h W'^T + P W[:, :l]^T, in every block: w' of w = W_q, W_k, W_v, (3, C, C)."""
        return w

    def offset(self, w, table, parts=slice(3)):
        """The rest of that door, P W[:, :l]^T for these parts of w side by side, (..., T, C * parts), or None."""
        return None

    def rotate(self, x, table):
        """Queries or keys x (B, H, T, D) after projection, in every block."""
        return x

    def score(self, q, k, table):
        """What is added to the scores q.k/sqrt(D) before mask and softmax, (..., H or 1, T or 1, S), or None."""
        return None

    def value(self, weights, table):
        """What is added to the attention's output (B, H, T, D), from its weights (B, H, T, S); see reads_weights."""
        return 0


class Sinusoidal(Encoding):
    """Vaswani et al. 2017, section 3.5: a fixed row of sines and cosines is added to the embedding."""

    streams = False

    def rows(self, positions):
        return sinusoidal_table(positions, self.config.d_model, self.settings.base)    # (..., T, C)

    def embed(self, x, table):
        return x + table


class Learned(Encoding):
    """Vaswani et al. 2017, section 3.5; BERT, GPT-2: a trained row for each position is added to the embedding."""

    streams = False

    def __init__(self, config):
        super().__init__(config)
        self.longest = config.context
        self.weight = nn.Parameter(torch.empty(config.context, config.d_model))

    def rows(self, positions):
        return learned_rows(positions, self.config.context)                            # (...), integers

    def embed(self, x, table):
        return x + F.embedding(table, self.weight)                                     # (..., T, C)


class ExPE(Encoding):
    """The paper's equations 2 and 3: phi(h, n) overrides the first l of the C numbers that enter W_q and W_k.

    The product with phi is that with h, the first l columns of W being 0, plus that of the row P_n with these columns.
    So a key is the sum of what it holds and where it is, every sequence of a batch shares the second part, and h is
    never copied. (override_forward in model_numpy.py is phi as the paper has it.)

    Variants: --on k|q|qk|qkv says what phi enters; --once (table 7) overrides the residual stream before block 1 and
    nothing after that; --constant (table 7, "p is stable") has one number for all l; --learn (table 7) trains two.
    """

    def __init__(self, config):
        super().__init__(config)
        self.on = "" if self.settings.once else self.settings.on
        self.streams = not self.settings.once and "v" not in self.on
        taken = torch.tensor([[[part in self.on]] for part in "qkv"]).float()          # of P, by W_q, W_k and W_v
        self.register_buffer("taken", taken, persistent=False)                         # (3, 1, 1)
        kept = 1 - taken * (torch.arange(config.d_model) < self.settings.l)            # of h, likewise
        self.register_buffer("kept", kept, persistent=False)                           # (3, 1, C)
        if self.settings.learn != "none":
            self.weight = nn.Parameter(torch.empty(2))                                 # start and theta

    def table(self, positions, start, theta):
        return expe_table(positions, self.settings.l, start, theta, step=0 if self.settings.constant else 1)

    def rows(self, positions):
        """(..., T, l); under --learn the three parts of it, (..., T, l, 3)."""
        def scaled(a, b):
            return self.settings.scale * self.table(positions, a, b)
        if self.settings.learn != "none":
            return affine_parts(scaled)
        return scaled(*(getattr(self.settings, name) for name in LEARNED[self.settings.pe]))

    def finished(self, table):
        """The rows P (..., T, l), of what --learn has trained so far."""
        return table if self.settings.learn == "none" else table[..., 0] + (table[..., 1:] * self.weight).sum(-1)

    def embed(self, x, table):
        if not self.settings.once:
            return x
        rest = x[..., self.settings.l :]
        return torch.cat((self.finished(table).expand(*rest.shape[:-1], -1), rest), dim=-1)     # (B, T, C)

    def override(self, w):
        return w * self.kept if self.on else w

    def offset(self, w, table, parts=slice(3)):
        if not self.on:
            return None
        return F.linear(self.finished(table), (w[parts, :, : self.settings.l] * self.taken[parts]).flatten(0, 1))


class ExQPE(ExPE):
    """The paper's equations 4 and 5: the same override, by rows in which each position raises one dimension in turn."""

    def table(self, positions, theta1, theta2):
        return exqpe_table(positions, self.settings.l, self.settings.start, theta1, theta2)


class RoPE(Encoding):
    """Su et al. 2021: each pair (i, i + D/2) of a query's and a key's dimensions turns by the angle n * inv_freq_i."""

    def rows(self, positions):
        e, L = self.settings, self.config.context
        scaling = {"scaling": e.rope_scaling, "factor": e.factor, "trained_length": L, "length": e.length}
        return rope_table(positions, self.config.d_head, e.base, **scaling)[..., None, :, :]           # (..., 1, T, D)

    def rotate(self, x, table):
        cos, sin = table.chunk(2, dim=-1)                                              # (..., 1, T, D/2) each
        a, b = x.chunk(2, dim=-1)                                                      # (B, H, T, D/2) each
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class ALiBi(Encoding):
    """Press et al. 2022: the score of a key falls with its distance, by a fixed slope for each head.

    The softmax drops what is the same for all keys of a query, so that one number a key does: alibi_keys says how.
    """

    def pairs(self, queries, keys):
        return alibi_keys(queries, keys, self.config.n_heads)                          # (..., H, 1, S)

    def score(self, q, k, table):
        return table


class T5(Encoding):
    """Raffel et al. 2020: a learned number for each head and bucket of distances, added to the score.

    As in T5 all blocks share them. T5 has no 1/sqrt(D) before; here scores are divided, and the bias is added after.
    """

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(self.settings.buckets, config.n_heads))

    def pairs(self, queries, keys):
        return t5_bucket(distances(queries, keys), self.settings.buckets, self.settings.max_distance)  # (..., T, S)

    def score(self, q, k, table):
        bias = self.weight.T.index_select(1, table.flatten())                          # (H, ...)
        return bias.view(-1, *table.shape).movedim(0, -3)                              # (..., H, T, S)


class Shaw(Encoding):
    """Shaw et al. 2018, equations 3 and 4: a learned vector for each clipped distance, for the keys and for the values.

    e_mn = q_m . (k_n + a^K_r) / sqrt(D), out_m = sum_n p_mn (v_n + a^V_r), r = min(m - n, max_distance). All heads
    share the vectors, and all blocks do, as with T5, so that an encoding is one thing for the whole model.
    """

    reads_weights = True

    def __init__(self, config):
        super().__init__(config)
        self.keys = nn.Parameter(torch.empty(self.settings.max_distance + 1, config.d_head))
        self.values = nn.Parameter(torch.empty(self.settings.max_distance + 1, config.d_head))

    def pairs(self, queries, keys):
        return shaw_index(distances(queries, keys), self.settings.max_distance)[..., None, :, :]       # (..., 1, T, S)

    def score(self, q, k, table):
        by_distance = q @ self.keys.T / math.sqrt(q.shape[-1])                         # (B, H, T, r)
        return by_distance.gather(-1, table.expand(*q.shape[:2], *table.shape[-2:]))   # (B, H, T, S)

    def value(self, weights, table):
        by_distance = weights.new_zeros(*weights.shape[:-1], len(self.values))         # (B, H, T, r)
        return by_distance.scatter_add(-1, table.expand_as(weights), weights) @ self.values            # (B, H, T, D)


ENCODINGS = {
    "nope": Encoding,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "expe": ExPE,
    "exqpe": ExQPE,
    "rope": RoPE,
    "alibi": ALiBi,
    "t5": T5,
    "shaw": Shaw,
}


class Places(NamedTuple):
    """Where the tokens of one pass are, as the encoding sees it: worked out once, and handed to every block."""

    table: Any                           # its rows for the T new tokens, or None
    keys: Any = None                     # its rows for all S keys, if they are kept free of position
    pairs: Any = None                    # what score and value look up, or None
    further: tuple = ()                  # of dual chunk attention: (rows for the queries, (..., 1, T, S) where)


# ---- the layers ------------------------------------------------------------------------------------------------------

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


class GELU(nn.Module):
    """W_down gelu(W_up h), in the tanh form."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, h):
        return self.down(F.gelu(self.up(h), approximate="tanh"))


class SwiGLU(nn.Module):
    """W_down (silu(W_gate h) * W_up h), Shazeer 2020."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, h):
        return self.down(F.silu(self.gate(h)) * self.up(h))


MLPS = {"gelu": GELU, "swiglu": SwiGLU}


class Attention(nn.Module):
    """Multi-head attention; causal: a query sees the keys at indices up to its own, whatever their positions."""

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.causal = config.n_heads, config.causal
        self.seen = None                                                               # or a list, for the weights
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)           # W_q, W_k and W_v, stacked
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, h, encoding, at, cache=None):
        B, T, C = h.shape
        w = self.qkv.weight.view(3, C, C)                                              # W_q, W_k and W_v

        def heads(x):
            return x.unflatten(-1, (self.n_heads, -1)).transpose(-2, -3)               # (..., H, T, D)

        def place(part, content, table):
            """Queries (part 0) or keys (part 1) without positions, (B, H, T, D), laid at those of the table."""
            offset = encoding.offset(w, table, slice(part, part + 1))                  # (..., T, C)
            return encoding.rotate(content if offset is None else content + heads(offset), table)

        x = F.linear(h, encoding.override(w).flatten(0, 1))                            # (B, T, 3C)
        if at.keys is None and not at.further:                                         # all are laid once, here
            if (offset := encoding.offset(w, at.table)) is not None:                   # (..., T, 3C)
                x += offset                                                            # whole: a slice would be copied
            q, k, v = (heads(part) for part in x.chunk(3, dim=-1))                     # (B, H, T, D) each
            q, k = encoding.rotate(q, at.table), encoding.rotate(k, at.table)
        else:
            content, k, v = (heads(part) for part in x.chunk(3, dim=-1))
            q, k = place(0, content, at.table), k if at.keys is not None else place(1, k, at.table)
        if cache is not None:
            k, v = cache.extend(self, k, v)                                            # (B, H, S, D)
        if at.keys is not None:
            k = place(1, k, at.keys)

        bias = encoding.score(q, k, at.pairs)
        for table, where in at.further:                                                # dual chunk attention
            moved = (place(0, content, table) - q) @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
            bias = moved * where if bias is None else bias + moved * where
        y = self.attend(q, k, v, bias, encoding, at)                                   # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))                           # (B, T, C)

    def attend(self, q, k, v, bias, encoding, at):
        """softmax(q k^T / sqrt(D) + bias) v, and what the encoding's value door adds."""
        T, S, masked = q.shape[2], k.shape[2], self.causal and q.shape[2] > 1
        explicit = encoding.reads_weights or self.seen is not None
        if bias is None and not explicit and (T == S or not masked):
            return F.scaled_dot_product_attention(q, k, v, is_causal=masked)
        bias = q.new_zeros(T, S) if bias is None else bias
        if masked:
            ahead = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
            bias = bias.masked_fill(ahead, -math.inf)
        bias = bias.type_as(q)                                                         # (..., T or 1, S)
        if not explicit:                                                               # fused, if bias has 2 or 4 axes
            bias = bias[None] if bias.ndim == 3 else bias
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)               # (B, H, T, S)
        if self.seen is not None:
            self.seen.append(weights)
        return weights @ v + encoding.value(weights, at.pairs)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config):
        super().__init__()
        norm = NORMS[config.norm]
        self.norm1, self.attn = norm(config.d_model, eps=config.norm_eps), Attention(config)
        self.norm2, self.mlp = norm(config.d_model, eps=config.norm_eps), MLPS[config.mlp](config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x, encoding, at, cache=None):
        x = x + self.dropout(self.attn(self.norm1(x), encoding, at, cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Dropout(nn.Dropout):
    """nn.Dropout, at 16 random bits a number on a CPU, where torch draws a whole word for each, one by one."""

    def forward(self, x):
        if x.device.type != "cpu" or not (self.training and self.p):
            return super().forward(x)
        dropped = min(round(self.p * 2**16), 2**16 - 1)                                # of 2^16 numbers
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))


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


# ---- what has been read ----------------------------------------------------------------------------------------------

class Cache:
    """The keys and values of the tokens that a model has read: model(tokens, cache=cache) reads on from there.

    Without a window every key is kept, with its position. With one it streams (Xiao et al. 2024): each new token sees
    itself, the first `sinks` tokens and the last `window` before it, and what no later one will see is dropped. Keys
    are then kept free of position, and at every step lie at 0 .. S-1 anew, the new token's last.
    No gradient goes back through it. Raises InputError for a window below 1 and for sinks below 0.
    """

    def __init__(self, sinks=0, window=None):
        kept = sinks == 0 if window is None else isinstance(window, int) and window >= 1
        if not (kept and isinstance(sinks, int) and sinks >= 0):
            raise InputError(f"a stream needs sinks of at least 0 and a window of at least 1, got {sinks} and {window}")
        self.sinks, self.window = sinks, window
        self.positions = None                                                          # of the keys, (S,) or (B, S)
        self.kept = {}                   # by block: (room (2, B, H, ..., D), begin, end), begin:end being k and v

    def __len__(self):
        return 0 if self.positions is None else self.positions.shape[-1]

    def __getitem__(self, block):
        """The keys and values that a block has kept, (2, B, H, S, D)."""
        room, begin, end = self.kept[block]
        return room[..., begin:end, :]

    @property
    def nbytes(self):
        return sum(self[block].nbytes for block in self.kept)

    def positions_with(self, n):
        """The positions of all keys that a pass over new tokens at n, (T,) or (B, T), sees: (S,) or (B, S)."""
        if self.window is not None:
            return np.arange(min(len(self), self.sinks + self.window) + n.shape[-1])
        if not self:
            return n
        shape = np.broadcast_shapes(self.positions.shape[:-1], n.shape[:-1])
        return np.concatenate([np.broadcast_to(x, (*shape, x.shape[-1])) for x in (self.positions, n)], axis=-1)

    def extend(self, block, k, v):
        """Keep the keys and values of a block's new tokens; returns all that they see."""
        n = k.shape[2]
        room, begin, end = self.kept.get(block, (k.new_empty(2, *k.shape[:2], 0, k.shape[3]), 0, 0))
        if self.window is not None and (lost := end - begin - self.sinks - self.window) > 0:
            room[..., begin + lost : begin + lost + self.sinks, :] = room[..., begin : begin + self.sinks, :].clone()
            begin += lost                                                              # the sinks follow the window
        if end + n > room.shape[3]:                                                    # now and then, leaving some free
            old, size = room[..., begin:end, :], end - begin + n
            room = k.new_empty(2, *k.shape[:2], size + max(64, size // 4), k.shape[3])
            begin, end = 0, end - begin
            room[..., :end, :] = old
        room[0, :, :, end : end + n], room[1, :, :, end : end + n] = k.detach(), v.detach()
        self.kept[block] = room, begin, end + n
        return self[block]


# ---- the model -------------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """A decoder-only transformer with any encoding of config.ENCODINGS.

    tokens: integers below V, (B, T). With targets, likewise, it returns the scalar mean cross-entropy in nats, without
    them the logits (B, T, V). positions: any integers, (T,) or (B, T); if left out 0 .. T-1, or those that follow on
    what the cache holds. Any length works, save for `learned`. Raises ValueError for a wrong shape or dtype, a token
    outside the vocabulary, a position without a row, and a cache that the tokens or the encoding do not go with. The
    seed alone decides the first weights, in this and in every other version of torch.
    """

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = NORMS[config.norm](config.d_model, eps=config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.encoding = ENCODINGS[config.encoding.pe](config)           # last, so that all start from the same weights
        self.softmax_parts = softmax_parts                              # or that, compiled
        self._places = (None, None)                                     # the last key and value of places()
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed):
        """Normal numbers (ModelConfig.initial), drawn in the order of the parameters."""
        rng = np.random.default_rng(seed)
        for name, parameter in self.named_parameters():
            mean, std = self.config.initial(name)
            draw = rng.standard_normal(parameter.shape, dtype=np.float32) if std else np.float32(0)
            start = np.float32(mean) + np.float32(std) * draw
            parameter.copy_(torch.from_numpy(np.broadcast_to(start, parameter.shape).copy()))

    def compile(self):
        """torch.compile each block and the loss; tables and checks, which look at values, stay out of the graphs."""
        for block in self.blocks:
            block.compile()
        self.softmax_parts = torch.compile(softmax_parts)

    def use(self, config):
        """Go on with another config of the same weights: ModelConfig.scaled's, or the one that was trained.

        Raises InputError for the config of another model, and for one by which positions have no rows.
        """
        if dataclasses.replace(config, encoding=self.config.encoding) != self.config or (
            config.encoding.pe != self.config.encoding.pe
        ):
            raise InputError("the config is of another model: use takes what ModelConfig.scaled makes of this one's")
        self.config = self.encoding.config = config
        self.encoding.settings = config.encoding
        self._places = (None, None)
        try:
            self.encoding.rows(np.arange(1))
        except ValueError as error:
            raise InputError(error) from None

    def forward(self, tokens, targets=None, positions=None, cache=None):
        h = self.hidden(tokens, positions, cache)                                      # (B, T, C)
        if targets is None:
            return F.linear(h, self.output_weight)                                     # (B, T, V)
        self._check_tokens(targets, "targets", tokens.shape)
        if not torch.is_grad_enabled():
            return self._losses(h, targets).mean()
        w = self.output_weight
        if torch.is_autocast_enabled(h.device.type):
            h, w = (x.to(torch.get_autocast_dtype(h.device.type)) for x in (h, w))
        return CrossEntropy.apply(h.flatten(0, 1), w, targets.flatten().long(), self.softmax_parts)

    @torch.no_grad()
    def token_losses(self, tokens, targets, positions=None, cache=None):
        """Cross-entropy of each target in nats (B, T)."""
        self._check_tokens(targets, "targets", tokens.shape)
        return self._losses(self.hidden(tokens, positions, cache), targets)

    def _losses(self, h, targets):
        shape, h, targets, w = targets.shape, h.flatten(0, 1), targets.flatten(), self.output_weight
        losses = [F.cross_entropy(at_least_fp32(F.linear(x, w)), target, reduction="none")
                  for x, target in zip(*(x.split(rows_at_a_time(h, w)) for x in (h, targets)), strict=True)]
        return torch.cat(losses).view(shape)                                           # (B, T)

    def attention(self, tokens, positions=None):
        """The attention weights of every block, (n_layers, B, H, T, T)."""
        for block in self.blocks:
            block.attn.seen = []
        try:
            with torch.enable_grad():                                   # so that all queries are read at once
                self.hidden(tokens, positions)
            return torch.stack([block.attn.seen[0].detach() for block in self.blocks])
        finally:
            for block in self.blocks:
                block.attn.seen = None

    def hidden(self, tokens, positions=None, cache=None):
        """The final norm's output (B, T, C): what the output layer reads."""
        self._check_tokens(tokens, "tokens")
        if cache is not None:
            self._check_cache(cache, tokens, positions)
        n = self._positions(*tokens.shape, positions, cache)                           # (T,) or (B, T)
        sizes = self._pieces(tokens.shape[1], cache)
        if len(sizes) == 1:
            return self._read(tokens, n, cache)
        ends, cache = np.cumsum(sizes), Cache() if cache is None else cache
        parts = [self._read(tokens[:, end - size : end], n[..., end - size : end], cache)
                 for size, end in zip(sizes, ends, strict=True)]
        return torch.cat(parts, dim=1)

    def _read(self, tokens, n, cache):
        """hidden for one piece of the tokens, at positions n."""
        keys = n if cache is None else cache.positions_with(n)
        streaming = cache is not None and cache.window is not None
        at = self.places(keys[..., -n.shape[-1] :], keys, streaming)
        if cache is not None:
            cache.positions = keys
        x = self.dropout(self.encoding.embed(self.embedding(tokens), at.table))        # (B, T, C)
        for block in self.blocks:
            x = block(x, self.encoding, at, cache)
        return self.norm(x)

    def _pieces(self, T, cache):
        """How many of T tokens to read at a time, one after the other: all, or as many as memory and a stream allow.

        A kernel that is told `causal` alone never holds the scores. Where it must be given a bias or a mask, that is an
        (H, T, S) array: BLOCK queries at a time keep it linear in S. (Where gradients are kept, all are at once.)
        """
        first = T
        if cache is not None and cache.window is not None:
            first = min(T, max(1, cache.sinks + cache.window + 1 - len(cache)))
        biased = self.encoding.pairs is not None or self.encoding.reads_weights or self.config.encoding.chunk
        learning = torch.is_grad_enabled() and cache is None
        size = first if learning or not self.config.causal or not (biased or cache) else BLOCK
        return [size] * (first // size) + [first % size] * (first % size > 0) + [1] * (T - first)

    @property
    def output_weight(self):
        return self.embedding.weight if self.config.tied else self.head.weight         # (V, C)

    def places(self, queries, keys=None, streaming=False):
        """Places of queries (T,) or (B, T) among keys (S,) or (B, S), the same if left out; exact, then cast once.

        The last result is kept: a training run asks for the same over and over.
        """
        queries = np.asarray(queries)
        keys = queries if keys is None else np.asarray(keys)
        weight, chunk = self.embedding.weight, self.config.encoding.chunk
        asked = (queries.shape, queries.tobytes(), keys.tobytes(), streaming, weight.dtype, weight.device)
        if self._places[0] == asked:
            return self._places[1]

        def cast(rows):
            if rows is None:
                return None
            dtype = weight.dtype if rows.dtype.kind == "f" else torch.long
            return torch.as_tensor(rows, device=weight.device, dtype=dtype)

        further = ()
        own, key_positions = queries, keys
        if chunk:
            local = self.config.context - 1 - chunk                     # so that all distances are trained ones
            own, before, beyond = dual_chunk_positions(queries, chunk, local)
            key_positions = dual_chunk_positions(keys, chunk, local)[0]
            apart = distances(queries // chunk, keys // chunk)[..., None, :, :]        # in chunks, (..., 1, T, S)
            further = tuple((cast(self.encoding.rows(n)), torch.as_tensor(where, device=weight.device))
                            for n, where in ((before, apart == 1), (beyond, apart > 1)) if where.any())
        at = Places(
            table=cast(self.encoding.rows(own)),
            keys=cast(self.encoding.rows(key_positions)) if streaming else None,
            pairs=None if self.encoding.pairs is None else cast(self.encoding.pairs(queries, keys)),
            further=further,
        )
        self._places = (asked, at)
        return at

    def _positions(self, B, T, positions, cache):
        """The positions of the new tokens as given, or those that follow on the cache's: (T,) or (B, T)."""
        if positions is None:
            return np.arange(T) + (cache.positions[..., -1:] + 1 if cache else 0)
        n = np.asarray(positions.cpu() if torch.is_tensor(positions) else positions)
        if n.dtype.kind not in "iu" or n.shape not in ((T,), (B, T)):
            raise InputError(f"positions must be integers of shape ({T},) or ({B}, {T}), got {n.dtype} of {n.shape}")
        return n

    def check_stream(self):
        """InputError if the encoding's positions enter where they cannot be moved later."""
        if not self.encoding.streams:
            raise InputError(f"{self.config.encoding.pe} {CANNOT_STREAM}")

    def _check_cache(self, cache, tokens, positions):
        if not self.config.causal:
            raise InputError("a cache needs causal attention: without it, what was read depends on what follows")
        if cache.window is not None:
            self.check_stream()
        if cache.window is not None and positions is not None:
            raise InputError("a stream lays its own positions: leave positions out")
        if cache and self.blocks[0].attn not in cache.kept:
            raise InputError("the cache was filled by another model: begin a new one with Cache()")
        if cache and (found := next(iter(cache.kept.values()))[0].shape[1]) != len(tokens):
            raise InputError(f"the cache holds {found} sequences, and there are {len(tokens)} in tokens")

    def _check_tokens(self, tokens, name, shape=None):
        if tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(f"{name} must be int64 or int32, got {tokens.dtype}")
        if tokens.ndim != 2 or tokens.numel() == 0 or tokens.shape != (shape or tokens.shape):
            right = "(B, T)" if shape is None else tuple(shape)
            raise InputError(f"{name} must have the shape {right}, got {tuple(tokens.shape)}")
        if tokens.device.type == "cpu":                                 # elsewhere the look would stall the device
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise InputError(f"{name} must be from 0 to {self.config.vocab_size - 1}, got {wrong}")


def at_least_fp32(x):
    """A half-precision tensor in fp32, any other as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_model(run, device="cpu", dtype="fp32"):
    """(GPT in eval mode, all of config.json) of a run directory; InputError that says what is wrong with it.

    dtype: one of config.PRECISIONS. bf16 and fp16: the weights, and so the tables too and all that is computed. int8:
    each row of a matrix is rounded to 255 levels from minus to plus its largest number; the products stay in fp32.
    """
    config, _, record = read_run(run)
    try:
        path = checkpoint_file(run, record, "model.safetensors")
    except InputError:                                  # a run in training may have replaced its checkpoint just now
        config, _, record = read_run(run)
        path = checkpoint_file(run, record, "model.safetensors")
    try:
        model = GPT(config)
    except ValueError as error:
        raise InputError(f"{run}/config.json: {error}") from None
    load_weights(model, path)
    if dtype == "int8":
        round_weights(model)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    return model.to(device, precision).eval(), record


@torch.no_grad()
def round_weights(model):
    """Round each matrix to 8 bits a number and a scale a row, in place."""
    for w in (w for w in model.parameters() if w.ndim == 2):
        step = w.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127                   # (rows, 1)
        w.copy_((w / step).round() * step)


def load_weights(model, path):
    """Fill the model from a .safetensors file; InputError for a tensor that is missing, unknown or of another shape."""
    weights = read_weights(path, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})


def pick_device(name="auto"):
    """A torch.device from "auto" (GPU if any), "cpu", "cuda", "cuda:1", "mps"; InputError if it is not here."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in has if has[kind]))
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise InputError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    kind, _, index = name.partition(":")
    if not has[kind] or (index and int(index) >= torch.cuda.device_count()):
        raise InputError(f"device {name}: torch {torch.__version__} sees none on this machine: use --device cpu")
    return torch.device(name)
