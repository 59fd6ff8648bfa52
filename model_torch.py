"""The GPT for real training and long evaluation, with four doors through which a positional encoding can enter.

B batch, T length, H heads, D width of a head, C = H*D model width, V vocabulary, l overridden dimensions, n a position.

How it differs from GPT-2: positions enter through one of the doors below; no biases in linear layers; dropout on the
embedding and on each residual branch, never on attention weights; the output layer need not share the embedding.
norm "rmsnorm" with mlp "swiglu" makes it the Llama-style model of the paper's tables 8 and 9.
"""

import math
import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from config import LEARNED, InputError, checkpoint_file, read_run, read_weights
from expe import (
    affine_parts,
    alibi_table,
    distances,
    expe_table,
    exqpe_table,
    learned_rows,
    rope_table,
    shaw_index,
    sinusoidal_table,
    t5_bucket,
)

# ---- the encodings ---------------------------------------------------------------------------------------------------


class Encoding(nn.Module):
    """No encoding (NoPE, Haviv et al. 2022): the four doors, all shut. Every other encoding opens one of them.

    rows(positions) is what the encoding knows of integer positions (T,) or (B, T), in NumPy: float64, or integers that
    look something up. GPT computes it once a forward pass, casts floats once to the weights' dtype, and hands it to the
    doors as `table`.
    """

    longest = math.inf                   # tokens in the longest sequence it has rows for
    reads_weights = False                # whether `value` needs the attention weights, which a fused kernel never shows

    def __init__(self, config):
        super().__init__()
        self.config, self.settings = config, config.encoding

    def rows(self, positions):
        return None

    def embed(self, x, table):
        """The residual stream x (B, T, C), once, before the first block."""
        return x

    def override(self, h, table):
        """What enters W_q, W_k and W_v in every block, each h (B, T, C) or a changed h."""
        return h, h, h

    def rotate(self, q, k, table):
        """Queries and keys (B, H, T, D) after projection, in every block."""
        return q, k

    def score(self, q, k, table):
        """What is added to the scores q.k/sqrt(D) before mask and softmax, (..., T, S), or None for nothing."""
        return None

    def value(self, weights, table):
        """What is added to the attention's output (B, H, T, D), from its weights (B, H, T, S); see reads_weights."""
        return 0


class Sinusoidal(Encoding):
    """Vaswani et al. 2017, section 3.5: a fixed row of sines and cosines is added to the embedding."""

    def rows(self, positions):
        return sinusoidal_table(positions, self.config.d_model, self.settings.base)    # (..., T, C)

    def embed(self, x, table):
        return x + table


class Learned(Encoding):
    """Vaswani et al. 2017, section 3.5; BERT, GPT-2: a trained row for each position is added to the embedding."""

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

    Variants: --on k|q|qk|qkv says what phi enters; --once (table 7) overrides the residual stream before block 1 and
    nothing after that; --constant (table 7, "p is stable") has one number for all l; --learn (table 7) trains two.
    """

    def __init__(self, config):
        super().__init__(config)
        if self.settings.learn != "none":
            self.weight = nn.Parameter(torch.empty(2))                                 # start and theta

    def table(self, positions, start, theta):
        return expe_table(positions, self.settings.l, start, theta, step=0 if self.settings.constant else 1)

    def rows(self, positions):
        """(..., T, l); under --learn the three parts of it, (..., T, l, 3)."""
        if self.settings.learn != "none":
            return affine_parts(lambda a, b: self.table(positions, a, b))
        return self.table(positions, *(getattr(self.settings, name) for name in LEARNED[self.settings.pe]))

    def phi(self, x, table):
        """x (B, T, C) with its first l numbers overridden."""
        if self.settings.learn != "none":
            table = table[..., 0] + (table[..., 1:] * self.weight).sum(-1)             # (..., T, l)
        B, T, C = x.shape
        l = table.shape[-1]
        return torch.cat((table.to(x.dtype).expand(B, T, l), x[..., l:]), dim=-1)      # (B, T, C)

    def embed(self, x, table):
        return self.phi(x, table) if self.settings.once else x

    def override(self, h, table):
        if self.settings.once:
            return h, h, h
        phi = self.phi(h, table)
        return tuple(phi if part in self.settings.on else h for part in "qkv")


class ExQPE(ExPE):
    """The paper's equations 4 and 5: the same override, by rows in which each position raises one dimension in turn."""

    def table(self, positions, theta1, theta2):
        return exqpe_table(positions, self.settings.l, self.settings.start, theta1, theta2)


class RoPE(Encoding):
    """Su et al. 2021: each pair (i, i + D/2) of a query's and a key's dimensions turns by the angle n * inv_freq_i."""

    def rows(self, positions):
        return rope_table(positions, self.config.d_head, self.settings.base)[..., None, :, :]     # (..., 1, T, D)

    def rotate(self, q, k, table):
        cos, sin = table.chunk(2, dim=-1)                                              # (..., 1, T, D/2) each

        def turn(x):
            a, b = x.chunk(2, dim=-1)                                                  # (B, H, T, D/2) each
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
        return turn(q), turn(k)


class ALiBi(Encoding):
    """Press et al. 2022: the score of a key falls with its distance, by a fixed slope for each head."""

    def rows(self, positions):
        return alibi_table(positions, self.config.n_heads)                             # (..., H, T, S)

    def score(self, q, k, table):
        return table


class T5(Encoding):
    """Raffel et al. 2020: a learned number for each head and bucket of distances, added to the score.

    As in T5 all blocks share them. T5 has no 1/sqrt(D) before; here scores are divided, and the bias is added after.
    """

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(self.settings.buckets, config.n_heads))

    def rows(self, positions):
        return t5_bucket(distances(positions), self.settings.buckets, self.settings.max_distance)      # (..., T, S)

    def score(self, q, k, table):
        return F.embedding(table, self.weight).movedim(-1, -3)                         # (..., H, T, S)


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

    def rows(self, positions):
        return shaw_index(distances(positions), self.settings.max_distance)[..., None, :, :]           # (..., 1, T, S)

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
    """Multi-head attention; causal: query m sees the keys at indices up to its own, whatever their positions."""

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.causal = config.n_heads, config.causal
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)           # W_q, W_k and W_v, stacked
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, h, encoding, table):
        B, T, C = h.shape
        inputs = encoding.override(h, table)                                           # of W_q, W_k and W_v
        q, k, v = (F.linear(x, w).view(B, T, self.n_heads, -1).transpose(1, 2)         # (B, H, T, D) each
                   for x, w in zip(inputs, self.qkv.weight.chunk(3), strict=True))
        q, k = encoding.rotate(q, k, table)
        bias = encoding.score(q, k, table)
        if bias is None and encoding.reads_weights:
            bias = q.new_zeros(T, T)
        if bias is not None:
            if self.causal:
                bias = bias.masked_fill(torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1), -math.inf)
            bias = bias.type_as(q)                                                     # (..., T, S)
        if encoding.reads_weights:
            weights = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)           # (B, H, T, S)
            y = weights @ v + encoding.value(weights, table)                           # (B, H, T, D)
        else:
            fused = F.scaled_dot_product_attention
            y = fused(q, k, v, attn_mask=bias, is_causal=self.causal and bias is None)                 # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))                           # (B, T, C)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config):
        super().__init__()
        norm = NORMS[config.norm]
        self.norm1, self.attn = norm(config.d_model, eps=config.norm_eps), Attention(config)
        self.norm2, self.mlp = norm(config.d_model, eps=config.norm_eps), MLPS[config.mlp](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, encoding, table):
        x = x + self.dropout(self.attn(self.norm1(x), encoding, table))
        return x + self.dropout(self.mlp(self.norm2(x)))


# ---- the model -------------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """A decoder-only transformer with any encoding of config.ENCODINGS.

    tokens: integers below V, (B, T). With targets, likewise, it returns the scalar mean cross-entropy in nats, without
    them the logits (B, T, V). positions: any integers, (T,) or (B, T); 0 .. T-1 if left out. Any length works, save for
    `learned`. Raises ValueError for a wrong shape or dtype, a token outside the vocabulary, and a position without a
    row. The seed alone decides the first weights, in this and in every other version of torch.
    """

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = NORMS[config.norm](config.d_model, eps=config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.encoding = ENCODINGS[config.encoding.pe](config)           # last, so that all start from the same weights
        self._table = (None, None)                                      # the last key and rows of table()
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
        """torch.compile each block; tables and checks, which look at values, stay outside of the compiled graphs."""
        for block in self.blocks:
            block.compile()

    def forward(self, tokens, targets=None, positions=None):
        h = self.hidden(tokens, positions)                                             # (B, T, C)
        logits = F.linear(h, self.output_weight)                                       # (B, T, V)
        if targets is None:
            return logits
        self._check_tokens(targets, "targets", tokens.shape)
        return F.cross_entropy(at_least_fp32(logits).flatten(0, 1), targets.flatten())  # (B*T, V), (B*T,)

    def hidden(self, tokens, positions=None):
        """The final norm's output (B, T, C): what the output layer reads."""
        self._check_tokens(tokens, "tokens")
        table = self.table(*tokens.shape, positions)
        x = self.dropout(self.encoding.embed(self.embedding(tokens), table))           # (B, T, C)
        for block in self.blocks:
            x = block(x, self.encoding, table)
        return self.norm(x)

    @torch.no_grad()
    def token_losses(self, tokens, targets, positions=None, rows=1024):
        """Cross-entropy of each target in nats (B, T), with the logits of `rows` tokens in memory at a time."""
        self._check_tokens(targets, "targets", tokens.shape)
        h = self.hidden(tokens, positions).flatten(0, 1)                               # (B*T, C)
        losses = [F.cross_entropy(at_least_fp32(F.linear(part, self.output_weight)), target, reduction="none")
                  for part, target in zip(h.split(rows), targets.flatten().split(rows), strict=True)]
        return torch.cat(losses).view(tokens.shape)                                    # (B, T)

    @property
    def output_weight(self):
        return self.embedding.weight if self.config.tied else self.head.weight         # (V, C)

    def table(self, B, T, positions=None):
        """The encoding's rows for these positions: exact in float64, cast once to the weights' dtype."""
        weight = self.embedding.weight
        key = (T, weight.dtype, weight.device) if positions is None else None
        if key is not None and self._table[0] == key:
            return self._table[1]
        n = np.arange(T) if positions is None else positions.cpu() if torch.is_tensor(positions) else positions
        n = np.asarray(n)
        if n.dtype.kind not in "iu" or n.shape not in ((T,), (B, T)):
            raise InputError(f"positions must be integers of shape ({T},) or ({B}, {T}), got {n.dtype} of {n.shape}")
        rows = self.encoding.rows(n)
        if rows is not None:
            dtype = weight.dtype if rows.dtype.kind == "f" else torch.long
            rows = torch.as_tensor(rows, device=weight.device, dtype=dtype)
        if key is not None:
            self._table = (key, rows)
        return rows

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


def load_model(run, device="cpu"):
    """(GPT in eval mode, all of config.json) of a run directory; InputError that says what is wrong with it."""
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
    return model.to(device).eval(), record


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
