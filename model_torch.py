"""The GPT in PyTorch, as plain as it can be said, with six doors for a positional encoding.

This is the plain version. Others make it fast (engine/fast.py) and take it past the trained length (longer/): they call
the steps of Attention, and each is compared with what stands here before it computes anything. model_numpy.py is the
same model by hand.

B batch, T query length, S key length (here S = T), H heads, D width of a head, C = H*D model width, V vocabulary,
l overridden dimensions, n a position.

How it differs from GPT-2: positions enter through one of the doors below; no biases in linear layers; dropout on the
embedding and on each residual branch, never on attention weights; the output layer need not share the embedding.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import model_numpy
from expe import alibi_slopes, integers
from positional_encodings import CORE, zoo_module, zoo_part
from settings import InputError


def score_divisor(q):
    """What q k^T is divided by: sqrt(D). q (..., D)."""
    return math.sqrt(q.shape[-1])

def at_least_fp32(x):
    """A half-precision tensor in fp32, any other as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

# ---- the encodings ---------------------------------------------------------------------------------------------------

class Encoding(nn.Module):
    """No encoding (NoPE, Haviv et al. 2022): the six doors, all shut. Every other encoding opens some.

    Its settings (positional_encodings.py) make `table` of the positions: their `rows` for embed, override and rotate,
    their `pairs` for score and value. Its own parameters are those that its half in NumPy declares.
    """

    softmax = None                       # softmax(scores): in the place of the plain one; masked scores (B, H, T, S)
    value = None                         # value(weights, v, table): in the place of weights @ v, (B, H, T, D)

    def __init__(self, settings, config):
        super().__init__()
        self.settings = settings
        self.n_heads = config.heads
        for name, parameter in model_numpy.build_encoding(settings, config).parameters(config).items():
            self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))

    def embed(self, x, table):
        """The residual stream x (B, T, C), once, before block 1."""
        return x

    def override(self, h, table):
        """What enters W_q, W_k and W_v, in every block: h (B, T, C) in, three of them out."""
        return h, h, h

    def rotate(self, q, k, table):
        """Queries and keys (B, H, T, D) after projection."""
        return q, k

    def key_state(self, h):
        """What score reads of the keys' inputs h (B, S, C), and a cache holds: h, or (B, H, S, n) numbers of it."""
        return h

    def score(self, q, k, key_state, table):
        """What is added to the scores q k^T / sqrt(D) before mask and softmax, (..., H or 1, T, S), or None."""
        return None

class Sinusoidal(Encoding):
    """Vaswani et al. 2017, section 3.5: a fixed row of sines and cosines is added to the embedding."""

    def embed(self, x, table):
        return x + table

class Learned(Encoding):
    """Vaswani et al. 2017, section 3.5; BERT, GPT-2: a trained row for each position is added to the embedding."""

    def embed(self, x, table):
        return x + F.embedding(table, self.weight)                                     # (..., T, C)

def phi(h, table):
    """The paper's equation 3: h (B, T, C) with the table (..., T, l) in the place of its first l dimensions."""
    l = table.shape[-1]
    return torch.cat((table.expand(*h.shape[:-1], l), h[..., l:]), -1)                 # (B, T, C)

class ExPE(Encoding):
    """The paper's equations 2 and 3, with ExQPE's rows 4 and 5: in every block phi(h) enters W_q and W_k; --on
    k|q|qk|qkv says which.
    """

    def override(self, h, table):
        phi_h = phi(h, table)
        return [phi_h if part in self.settings.on else h for part in "qkv"]            # equation 2

def build_expe(settings, config):
    """ExPE or ExQPE; the ablations --once and --learn are in zoo/ablations.py."""
    if settings.once or settings.learn != "none":
        return zoo_module("ablations").Layer(settings, config)
    return ExPE(settings, config)

def rotate_pairs(x, table):
    """Each pair (i, i + D/2) of x (B, H, T, D) by its angle; table (..., T, D): cosines, then sines."""
    cos, sin = table.chunk(2, dim=-1)                                                  # (..., T, D/2) each
    a, b = x.chunk(2, dim=-1)                                                          # (B, H, T, D/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

class RoPE(Encoding):
    """Su et al. 2021: each pair (i, i + D/2) of a query's and a key's dimensions is rotated by n * inv_freq_i."""

    def rotate(self, q, k, table):
        return rotate_pairs(q, table), rotate_pairs(k, table)

class ALiBi(Encoding):
    """Press et al. 2022: the score of a key falls with its distance, by a fixed slope for each head.

    Without a causal mask it falls to both sides, as its authors advise.
    """

    slopes = None                        # (H, 1, 1), made where and as the table is: a copy to a GPU would make it wait

    def of_each_head(self, q, table):
        if self.slopes is None or (self.slopes.dtype, self.slopes.device) != (table.dtype, table.device):
            self.slopes = table.new_tensor(alibi_slopes(q.shape[1]))[:, None, None]
        return self.slopes

    def score(self, q, k, key_state, table):
        return -self.of_each_head(q, table) * table                                    # (..., H, T, S)

class T5(Encoding):
    """Raffel et al. 2020: a learned number for each head and bucket of distances, added to the score.

    As in T5 all blocks share them. T5 has no 1/sqrt(D) before; here scores are divided, and the bias is added after.
    """

    def score(self, q, k, key_state, table):
        bias = self.weight.T.index_select(1, table.flatten())                          # (H, ...)
        return bias.view(-1, *table.shape).movedim(0, -3)                              # (..., H, T, S)

class Shaw(Encoding):
    """Shaw et al. 2018, equations 3 and 4: a learned vector for each clipped distance, for the keys and for the values.

    e_mn = q_m . (k_n + a^K_r) / sqrt(D), out_m = sum_n p_mn (v_n + a^V_r), r as expe.shaw_index has it. All heads
    share the vectors, and all blocks do, as with T5, so that an encoding is one thing for the whole model.
    """

    def score(self, q, k, key_state, table):
        by_distance = q @ self.keys.T / score_divisor(q)                               # (B, H, T, r)
        return by_distance.gather(-1, table.expand(*q.shape[:2], *table.shape[-2:]))   # (B, H, T, S)

    def value(self, weights, v, table):
        by_distance = weights.new_zeros(*weights.shape[:-1], len(self.values))         # (B, H, T, r)
        by_distance = by_distance.scatter_add(-1, table.expand_as(weights), weights)
        return weights @ v + by_distance @ self.values                                 # (B, H, T, D)

ENCODINGS = {"nope": Encoding, "sinusoidal": Sinusoidal, "learned": Learned, "expe": build_expe, "exqpe": build_expe,
             "rope": RoPE, "alibi": ALiBi, "t5": T5, "shaw": Shaw}

def build_encoding(settings, config):
    """The Encoding of these settings, with the softmax of the model's config."""
    kind = ENCODINGS[settings.pe] if settings.pe in CORE else zoo_part(settings.pe, "Layer")
    encoding = kind(settings, config)
    if config.softmax != "plain":
        zoo_module("softmax").set_softmax(encoding, config)
    return encoding

# ---- the layers ------------------------------------------------------------------------------------------------------

class GeluMLP(nn.Module):
    """W_down gelu(W_up h), in the tanh form."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, h):
        return self.down(F.gelu(self.up(h), approximate="tanh"))

class SwigluMLP(nn.Module):
    """W_down (silu(W_gate h) * W_up h), Shazeer 2020."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, h):
        return self.down(F.silu(self.gate(h)) * self.up(h))

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
MLPS = {"gelu": GeluMLP, "swiglu": SwigluMLP}

def apply_qkv(parts, w):
    """W_q h_q, W_k h_k and W_v h_v, (..., T, C) each, w (3C, C); neighbours that are one array share one product."""
    h_q, h_k, h_v = parts
    C = w.shape[1]
    if h_q is h_k is h_v:
        return F.linear(h_q, w).chunk(3, dim=-1)
    if h_q is h_k:
        return *F.linear(h_q, w[: 2 * C]).chunk(2, dim=-1), F.linear(h_v, w[2 * C :])
    return [F.linear(h, part) for h, part in zip(parts, w.chunk(3), strict=True)]

def unseen(T, S, causal, window, device):
    """Which keys a query does not see, (T, S), the queries being the last T of S; None if it sees all.

    causal: those ahead of its own index, whatever the positions. With a window, all but the last so many, its own
    among them. Attention.attend leaves the plain causal mask to the kernel: an edit here needs one of its condition.
    """
    if not causal or (T == 1 and not window):
        return None
    one = torch.ones(T, S, dtype=torch.bool, device=device)
    ahead = one.triu(S - T + 1)
    return ahead | one.tril(S - T - window) if window else ahead

class Attention(nn.Module):
    """Multi-head attention, the paper's equations 1 and 2, with the encoding and the window of one block.

    The classes that are faster (engine/fast.py) or read with a cache (longer/attention.py) call these same steps in
    another order or for other positions, so that an edit of a step is theirs too; where one replaces a step,
    engine/compare.py compares the two before anything is computed.
    """

    def __init__(self, config, encoding, window):
        super().__init__()
        self.n_heads = config.heads
        self.causal = config.causal
        self.window = window
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)           # W_q, W_k and W_v, stacked
        self.proj = nn.Linear(config.width, config.width, bias=False)
        # A reference, by which torch registers nothing: blocks may share an encoding, and GPT registers each once.
        object.__setattr__(self, "encoding", encoding)

    def forward(self, h, pos):
        q, k, v = self.project(h, pos.rows)                                            # (B, H, T, D) each
        q, k = self.encoding.rotate(q, k, pos.rows)
        bias = self.encoding.score(q, k, self.encoding.key_state(h), pos.pairs)        # (..., H or 1, T, S) or None
        return self.output(self.attend(q, k, v, bias, pos.pairs), h)                   # (B, T, C)

    def project(self, h, rows):
        """The queries, keys and values of a block's input h (..., T, C) before rotate, (..., H, T, D) each."""
        parts = apply_qkv(self.encoding.override(h, rows), self.qkv.weight)            # (..., T, C) each
        return [x.unflatten(-1, (self.n_heads, -1)).transpose(-2, -3) for x in parts]

    def attend(self, q, k, v, bias, table):
        """softmax(q k^T / sqrt(D) + bias) v over the keys that are seen, or what the encoding's doors make of it."""
        T, S = q.shape[2], k.shape[2]
        plain_softmax = self.encoding.value is None and self.encoding.softmax is None
        if plain_softmax and bias is None and not self.window and T in (1, S):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and T > 1, scale=1 / score_divisor(q))
        bias = self.mask(q, k, bias)                                                   # (..., T, S)
        if plain_softmax:
            bias = bias[None] if bias.ndim == 3 else bias                              # the kernel wants 2 or 4 axes
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1 / score_divisor(q))
        soften = self.encoding.softmax or nn.Softmax(-1)
        weights = soften(q @ k.mT / score_divisor(q) + bias)                           # (B, H, T, S)
        return self.encoding.value(weights, v, table) if self.encoding.value else weights @ v

    def mask(self, q, k, bias):
        """The bias, or 0, with -inf at keys that are not seen."""
        T, S = q.shape[2], k.shape[2]
        bias = q.new_zeros(T, S) if bias is None else bias.type_as(q)
        never = unseen(T, S, self.causal, self.window, q.device)
        return bias if never is None else bias + q.new_zeros(T, S).masked_fill(never, -math.inf)

    def output(self, y, h):
        """W_proj y, (B, T, C), of the heads' y (B, H, T, D); h (B, T, C), the block's input, is not used here."""
        return self.proj(y.transpose(1, 2).flatten(2))                                 # (B, T, C)

class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added."""

    def __init__(self, config, attention, dropout):
        super().__init__()
        self.norm1 = NORMS[config.norm](config.width, eps=config.norm_eps)
        self.attn = attention
        self.norm2 = NORMS[config.norm](config.width, eps=config.norm_eps)
        self.mlp = MLPS[config.mlp](config)
        self.dropout = dropout

    def forward(self, x, pos):
        x = x + self.dropout(self.attn(self.norm1(x), pos))
        return x + self.dropout(self.mlp(self.norm2(x)))

# ---- the model -------------------------------------------------------------------------------------------------------

def cross_entropy(h, w, targets, reduction="mean"):
    """-log softmax(h W^T) at targets (B, T), in nats: the mean, or all by "none". h (B, T, C), w (V, C).

    Targets of -100 are left out: of the mean, and with "none" their loss is 0.
    """
    logits = F.linear(h, w)                                                            # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction=reduction)
    return losses if reduction == "mean" else losses.view(targets.shape)

class GPT(nn.Module):
    """A decoder-only transformer with any encoding of positional_encodings.ENCODINGS.

    tokens: integers below V, (B, T). With targets, likewise or -100, it returns the scalar mean cross-entropy in nats,
    without them the logits (B, T, V). positions: any integers, (T,) or (B, T); 0 .. T-1 if left out. Any length works,
    save for `learned`. Raises ValueError for positions that are not integers, and for one without a row. Its first
    weights are model_numpy.init_params of the seed; with seed None they are to be loaded. Of attention, dropout and
    cross_entropy engine/fast.py and longer/ have others.
    """

    def __init__(self, config, seed=0, attention=Attention, dropout=nn.Dropout, cross_entropy=cross_entropy):
        super().__init__()
        self.config = config
        self.cross_entropy = cross_entropy
        self._tables = (None, None)
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.dropout = dropout(config.dropout)
        self.blocks = nn.ModuleList()
        shared = None                                                   # the one encoding that blocks may share
        for plan in model_numpy.encodings_of_blocks(config):
            if plan.shared and shared is None:
                shared = build_encoding(plan.settings, config)
            encoding = shared if plan.shared else build_encoding(plan.settings, config)
            block = Block(config, attention(config, encoding, plan.window), dropout(config.dropout))
            if not plan.shared:
                block.attn.encoding = encoding                          # registered as blocks.i.attn.encoding
            self.blocks.append(block)
        self.norm = NORMS[config.norm](config.width, eps=config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.encoding = shared                                          # registered as encoding; None if there is none
        check_parameters(self)
        if seed is not None:
            weights = model_numpy.init_params(config, seed)
            self.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})

    def forward(self, tokens, targets=None, positions=None, **options):
        h = self.hidden(tokens, positions, **options)                                  # (B, T, C)
        if targets is None:
            return F.linear(h, self.output_weight)                                     # (B, T, V)
        return self.cross_entropy(h, self.output_weight, targets)

    @torch.no_grad()
    def token_losses(self, tokens, targets, positions=None, **options):
        """The cross-entropy of each target in nats, (B, T), 0 where it is -100."""
        h = self.hidden(tokens, positions, **options)
        return self.cross_entropy(h, self.output_weight, targets, reduction="none")

    def hidden(self, tokens, positions=None, **options):
        """The final norm's output (B, T, C): what the output layer reads."""
        n = np.arange(tokens.shape[1]) if positions is None else integers(positions)
        tables = self.tables(n, **options)
        x = self.embedding(tokens.long())                                              # (B, T, C)
        first = self.blocks[0].attn.encoding
        x = self.dropout(first.embed(x, tables[first.settings].rows))
        for block in self.blocks:
            x = block(x, tables[block.attn.encoding.settings])
        return self.norm(x)

    @property
    def output_weight(self):
        return self.embedding.weight if self.config.tied else self.head.weight         # (V, C)

    def tables(self, n):
        """{settings: Tables} of positions n, (T,) or (B, T): exact, then cast once to the weights' dtype.

        It remembers the last result: a training run asks for the same over and over.
        """
        w = self.embedding.weight
        key = (self.config, n.shape, n.tobytes(), w.dtype, w.device)
        if self._tables[0] != key:
            self._tables = (key, {})
            for s in {block.attn.encoding.settings for block in self.blocks}:
                parts = s.rows(n, self.config), s.pairs(n, n, self.config)
                self._tables[1][s] = model_numpy.Tables(*(as_tensor(x, w) for x in parts))
        return self._tables[1]

def check_parameters(model):
    """InputError that names a parameter of a GPT which model_numpy.py does not declare, or the other way round."""
    in_torch = {name: tuple(w.shape) for name, w in model.named_parameters()}
    in_numpy = model_numpy.parameter_shapes(model.config)
    for name in in_torch | in_numpy:
        here, there = (shapes.get(name) for shapes in (in_torch, in_numpy))
        if here != there:
            settings = model_numpy.encoding_with(name, model.config)
            in_zoo = settings is not None and settings.pe not in CORE
            module = f"the Layer of zoo/{settings.pe}.py" if in_zoo else "model_torch.py"
            declaration = "what its doors declare" if in_zoo else "what model_numpy.py declares"
            raise InputError(f"{name} is {here or 'missing'} in {module} and {there or 'missing'} in {declaration}: "
                             "both must have it, with one shape")

def as_tensor(table, like):
    """An encoding's table, or None, on the device of a tensor; floats in its dtype, cast once."""
    if table is None:
        return None
    return torch.as_tensor(table, device=like.device, dtype=like.dtype if table.dtype.kind == "f" else None)
