"""The GPT of model_torch.py in plain NumPy: forward, and backward by hand.

Every layer is one function, which returns its output and its pullback. The pullback takes the gradient of the loss by
the output and returns those of what went in; it stands under the lines that it undoes, and reads their names. `dx` is
the gradient by x, and has x's shape. The model's backward is the list of its pullbacks, from the end. Functions keep no
state, and change no array that came in unless they say so. A layer with weights has a second function under it, such
as attention_parameters, which declares their names, shapes and first values.

Where the paper's equations are (preprint's numbers; tables are in expe.py):

    1, 6, 8, 11    attention, softmax(q k^T / sqrt(D)) v      attend
    2, 4, 7, 9     q = W_q phi(h), k = W_k phi(h), v = W_v h  project, override
    3, 5           phi, by ExPE's and by ExQPE's rows         phi, expe_table, exqpe_table
    12             learned positions                          learned_embed
    13, 14         sinusoidal positions                       sinusoidal_embed, sinusoidal_table
    15, 16         RoPE                                       rope_rotate, rope_table

B batch, T query length, S key length (here S = T), H heads, D width of a head, C = H*D model width, V vocabulary,
l overridden dimensions, n a position; a linear layer has I inputs and O outputs. Weights lie as in torch, (O, I), and
params is a flat dict of them by the names of torch's state_dict. All is computed in their dtype, float64 or float32.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import expe
from positional_encodings import CORE, zoo_module, zoo_part

# ---- parameters ------------------------------------------------------------------------------------------------------

class Parameter(NamedTuple):
    """The declaration of a parameter: its shape, and a function of a random generator that makes its first values."""

    shape: tuple
    draw: Callable

    def first_values(self, rng):
        return self.draw(rng).astype(np.float32)

def normal(shape, std=0.02):
    """A parameter that starts from N(0, std^2); GPT-2's 0.02 if std is left out."""
    return Parameter(shape, lambda rng: np.float32(std) * rng.standard_normal(shape, dtype=np.float32))

def uniform(shape, low, high):
    """A parameter whose first values are drawn from low to high."""
    return Parameter(shape, lambda rng: rng.uniform(low, high, shape))

def constant(shape, value):
    """A parameter that starts at a value, or at an array of that shape."""
    return Parameter(shape, lambda rng: np.full(shape, value))

def residual_std(config):
    """What ends a residual branch starts smaller, as in GPT-2, since 2 * layers of them are summed."""
    return 0.02 / math.sqrt(2 * config.layers)

# ---- linear, embedding, dropout --------------------------------------------------------------------------------------

def linear(x, w):
    """x W^T. x (..., I), w (O, I)."""
    def pullback(dout):
        """out_o = sum_i x_i w_oi: so dx_i = sum_o dout_o w_oi, and dw_oi = dout_o x_i, summed over the rows."""
        rows = dout.reshape(-1, len(w))                                           # (rows, O)
        return (rows @ w).reshape(x.shape), rows.T @ x.reshape(-1, w.shape[1])
    out = x.reshape(-1, w.shape[1]) @ w.T                                         # (rows, O), one product for BLAS
    return out.reshape(*x.shape[:-1], len(w)), pullback

def embedding(tokens, w):
    """w[tokens]. tokens (B, T) or (T,), w (V, C), out (..., C)."""
    def pullback(dout):
        """A row of w gets the sum of the gradients of all places that looked it up."""
        order = np.argsort(tokens, axis=None, kind="stable")                      # (B*T,), equal tokens side by side
        used, first = np.unique(tokens.ravel()[order], return_index=True)
        dw = np.zeros(w.shape, dout.dtype)                                        # np.add.at takes ten times as long
        dw[used] = np.add.reduceat(dout.reshape(-1, w.shape[1])[order], first, axis=0)
        return dw
    return w[tokens], pullback

def dropout(x, mask):
    """x * mask, the mask being 0 for what is dropped and 1/(1 - rate) elsewhere; None drops nothing."""
    def pullback(dout):
        return dout if mask is None else dout * mask
    return (x if mask is None else x * mask), pullback

# ---- norms -----------------------------------------------------------------------------------------------------------

def layernorm(x, eps, weight, bias):
    """z weight + bias, z = (x - mean(x)) / sqrt(var(x) + eps), by rows. x (..., C); weight, bias (C,)."""
    z = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.vecdot(z, z)[..., None] / x.shape[-1] + eps)            # (..., 1)
    z *= rstd
    def pullback(dout):
        """z = (x - mean) rstd, rstd = (mean((x - mean)^2) + eps)^(-1/2).

        A change of x_i moves z_i by rstd; every z_j by -rstd/C, through the mean; and every z_j by -z_j rstd z_i/C,
        through rstd, whose derivative by x_i is -rstd^3 (x_i - mean)/C. Summed:
        dx = rstd (dz - mean(dz) - z mean(dz z)).
        """
        rows = tuple(range(dout.ndim - 1))
        dweight, dbias = (dout * z).sum(rows), dout.sum(rows)
        dz = dout * weight
        along_z = np.vecdot(dz, z)[..., None] / z.shape[-1]                       # (..., 1)
        dx = rstd * (dz - dz.mean(-1, keepdims=True) - z * along_z)
        return dx, {"weight": dweight, "bias": dbias}
    return z * weight + bias, pullback

def layernorm_parameters(config):
    return {"weight": constant((config.width,), 1), "bias": constant((config.width,), 0)}

NORMS = {"layernorm": (layernorm, layernorm_parameters)}

def norm_of(config):
    """The model's norm: its function and its declaration of parameters. rmsnorm is in zoo/llama.py."""
    return NORMS[config.norm] if config.norm in NORMS else zoo_module("llama").NORMS[config.norm]

# ---- the MLP ---------------------------------------------------------------------------------------------------------

ROOT = math.sqrt(2 / math.pi)                                                     # of the tanh form (Hendrycks 2016)
CUBIC = 0.044715

def sigmoid(x):
    """1 / (1 + e^-x), which cannot overflow. Any shape."""
    return 0.5 * (1 + np.tanh(0.5 * x))

def gelu(x):
    """x s, s = (1 + tanh(u))/2 = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). Any shape."""
    u = x * (ROOT + ROOT * CUBIC * (x * x))                                       # x**3 would take ten times as long
    s = 0.5 * (1 + np.tanh(u))
    def pullback(dout):
        """ds/dx = 2 s (1 - s) du/dx, so dx = dout s (1 + x (1 - s) 2 du/dx)."""
        twice_du = 2 * ROOT + 6 * ROOT * CUBIC * (x * x)                          # 2 du/dx
        return dout * (s * (1 + x * twice_du * (1 - s)))
    return x * s, pullback

def gelu_mlp(h, p):
    """W_down gelu(W_up h). h (..., C)."""
    up, pull_up = linear(h, p["up.weight"])                                       # (..., mlp_width)
    a, pull_gelu = gelu(up)
    out, pull_down = linear(a, p["down.weight"])
    def pullback(dout):
        da, dw_down = pull_down(dout)
        dh, dw_up = pull_up(pull_gelu(da))
        return dh, {"up.weight": dw_up, "down.weight": dw_down}
    return out, pullback

def gelu_mlp_parameters(config):
    C, hidden = config.width, config.mlp_width
    return {"up.weight": normal((hidden, C)), "down.weight": normal((C, hidden), residual_std(config))}

MLPS = {"gelu": (gelu_mlp, gelu_mlp_parameters)}

def mlp_of(config):
    """The model's MLP: its function and its declaration of parameters. swiglu is in zoo/llama.py."""
    return MLPS[config.mlp] if config.mlp in MLPS else zoo_module("llama").MLPS[config.mlp]

# ---- the encodings ---------------------------------------------------------------------------------------------------

def embed_nothing(x, table, learned):
    """The residual stream as it is. x (B, T, C)."""
    return x, lambda dx: (dx, {})

def override_nothing(h, table, learned):
    """What enters W_q, W_k and W_v is h, h and h. h (B, T, C)."""
    return (h, h, h), lambda dparts: (dparts[0] + dparts[1] + dparts[2], {})

def rotate_nothing(q, k, table, learned):
    return q, k, lambda dq, dk: (dq, dk, {})

def fixed(dbias):
    """The pullback of a score that is fixed, or that there is none of: the gradients of q, k and h."""
    return 0, 0, 0, {}

def score_nothing(q, k, h, table, learned):
    return None, fixed

def softmax(scores, learned):
    """p = exp(scores) / sum of exp(scores). In place. scores (..., T, S), -inf for keys that are not seen."""
    scores -= scores.max(-1, keepdims=True)                                       # exp cannot overflow then
    p = np.exp(scores, out=scores)
    p /= p.sum(-1, keepdims=True)
    def pullback(dp):
        """p_i = exp(s_i) / sum_j exp(s_j), so dp_j/ds_i = p_j ([i = j] - p_i), and ds_i = p_i (dp_i - sum_j dp_j p_j).

        In place. Keys that are not seen have p = 0, and so no gradient.
        """
        dp -= np.vecdot(dp, p)[..., None]
        dp *= p
        return dp, {}
    return p, pullback

def weighted_sum(p, v, table, learned):
    """y = p v. p (B, H, T, S), v and y (B, H, T, D)."""
    def pullback(dy):
        """dp = dy v^T, dv = p^T dy."""
        return dy @ v.swapaxes(-1, -2), np.matmul(p.swapaxes(-1, -2), dy, out=np.empty_like(v)), {}
    return np.matmul(p, v, out=np.empty_like(v)), pullback                        # as v lies in memory

class Encoding(NamedTuple):
    """The doors of an encoding; left out, a door is shut, as here. `table` is what its settings make of the positions,
    `learned` the encoding's own parameters, and every pullback ends with their gradients.

    embed takes the residual stream x (B, T, C), once; override h (B, T, C), in each block; rotate queries and keys
    (B, H, T, D); score returns what is added to the scores, (..., T, S) or None; softmax makes weights of masked
    scores, (B, H, T, S) each; value makes the output of weights and values, (B, H, T, D). And parameters(model)
    declares the encoding's own, {name: Parameter}.
    """

    embed: Callable = embed_nothing
    override: Callable = override_nothing
    rotate: Callable = rotate_nothing
    score: Callable = score_nothing
    softmax: Callable = softmax
    value: Callable = weighted_sum
    parameters: Callable = lambda model: {}
    each_block: bool = False                                            # whether each block has parameters of its own

def sinusoidal_embed(x, table, learned):
    """x + table, which is fixed. x (B, T, C); table (..., T, C)."""
    return x + table, lambda dout: (dout, {})

def learned_embed(x, table, learned):
    """x + w[table]. x (B, T, C); table the positions, (T,) or (B, T); w (rows, C)."""
    rows, pull_rows = embedding(table, learned["weight"])                         # (..., T, C)
    def pullback(dout):
        """With positions (T,) the sequences share their rows, so that their gradients add up."""
        return dout, {"weight": pull_rows(dout.sum(0) if table.ndim == 1 else dout)}
    return x + rows, pullback

def phi(h, table, learned):
    """phi(h, n): the first l of the C numbers are the table's, the others h's. The paper's equation 3."""
    l = table.shape[-1]
    out = h.copy()                                                                # (B, T, C)
    out[..., :l] = table                                                          # equation 3
    def pullback(dphi):
        """What was overridden gets no gradient from here."""
        dh = dphi.copy()
        dh[..., :l] = 0
        return dh, {}
    return out, pullback

def expe_override(on, phi=phi):
    """The override door of ExPE or ExQPE: phi(h) enters those of W_q, W_k and W_v in `on`, h the others. Equation 2."""
    def override(h, table, learned):
        phi_h, pull_phi = phi(h, table, learned)
        def pullback(dparts):
            dphi = sum(d for part, d in zip("qkv", dparts, strict=True) if part in on)
            dh, down = pull_phi(dphi)
            return sum((d for part, d in zip("qkv", dparts, strict=True) if part not in on), dh), down
        return tuple(phi_h if part in on else h for part in "qkv"), pullback

    return override

def build_expe(settings):
    """ExPE or ExQPE; the ablations --once and --learn are in zoo/ablations.py."""
    if settings.once or settings.learn != "none":
        return zoo_module("ablations").doors(settings)
    return Encoding(override=expe_override(settings.on))

def rotate_pairs(x, cos, sin):
    """Each pair (a, b) = (x_i, x_(i + D/2)) rotated by its angle: (a cos - b sin, b cos + a sin). x (B, H, T, D)."""
    a, b = np.split(x, 2, axis=-1)                                                # (B, H, T, D/2) each
    out = np.empty_like(x)
    out_a, out_b = np.split(out, 2, axis=-1)                                      # views of out
    np.subtract(a * cos, b * sin, out=out_a)
    np.add(b * cos, a * sin, out=out_b)
    return out

def rope_rotate(q, k, table, learned):
    """R_n q, R_n k (Su et al. 2021, equation 34). table (..., 1, T, D): cosines, then sines."""
    cos, sin = np.split(table, 2, axis=-1)                                        # (..., 1, T, D/2) each
    def pullback(dq, dk):
        """out = R q with R orthogonal, so dq = R^T dout, and R^T rotates by minus the angle."""
        return rotate_pairs(dq, cos, -sin), rotate_pairs(dk, cos, -sin), {}
    return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin), pullback

def score_divisor(q):
    """What q k^T is divided by: sqrt(D). q (..., D)."""
    return math.sqrt(q.shape[-1])

def alibi_score(q, k, h, table, learned):
    """-slope (m - n), by a fixed slope for each head. table m - n (..., 1, T, S)."""
    slopes = expe.alibi_slopes(q.shape[1]).astype(table.dtype)                    # (H,)
    return -slopes[:, None, None] * table, fixed                                  # (..., H, T, S)

def t5_score(q, k, h, table, learned):
    """bias = w[table], a number for each head and bucket. table (..., T, S), w (buckets, H)."""
    bias, pull_bias = embedding(table, learned["weight"])                         # (..., T, S, H)
    def pullback(dbias):
        """A bucket's number gets the gradients of all pairs in it, summed."""
        dbias = dbias.sum(0) if table.ndim == 2 else dbias                        # (..., H, T, S)
        return 0, 0, 0, {"weight": pull_bias(np.moveaxis(dbias, -3, -1))}
    return np.moveaxis(bias, -1, -3), pullback                                    # (..., H, T, S)

def to_keys(x, index, S):
    """out_ms = x_m,index(ms): to each key what belongs to its distance. x (B, H, T, r), out (B, H, T, S)."""
    return np.take_along_axis(x, np.broadcast_to(index, (*x.shape[:3], S)), axis=-1)

def to_distances(y, index, r):
    """The pullback of to_keys: a distance gets the sum over its keys, here as a product with [index = r] (T, S, r)."""
    chosen = (index[..., None] == np.arange(r)).astype(y.dtype)                   # (..., 1, T, S, r)
    return (y[..., None, :] @ chosen)[..., 0, :]                                  # (B, H, T, r)

def shaw_score(q, k, h, table, learned):
    """bias_mn = q_m . a_r / sqrt(D), r = table_mn. table (..., 1, T, S), a (r, D)."""
    scale = 1 / score_divisor(q)
    a = learned["keys"] * scale
    def pullback(dbias):
        """q gets sum_n dbias_mn a_r, a_r the sum of dbias_mn q_m."""
        dby_distance = to_distances(dbias, table, len(a))                         # (B, H, T, r)
        dkeys = dby_distance.reshape(-1, len(a)).T @ q.reshape(-1, q.shape[-1]) * scale
        return dby_distance @ a, 0, 0, {"keys": dkeys}
    return to_keys(q @ a.T, table, k.shape[2]), pullback                          # (B, H, T, r) to (B, H, T, S)

def shaw_value(p, v, table, learned):
    """y_m = sum_n p_mn (v_n + a_r), r = table_mn: the weights summed by distance, times a vector for each."""
    a = learned["values"]
    by_distance = to_distances(p, table, len(a))                                  # (B, H, T, r)
    y, pull_y = weighted_sum(p, v, table, learned)
    y += by_distance @ a
    def pullback(dy):
        """dp_mn = dy_m . (v_n + a_r), and a_r gets its share of the weights times dy_m."""
        dp, dv, _ = pull_y(dy)
        dp += to_keys(dy @ a.T, table, dp.shape[-1])                              # (B, H, T, S)
        return dp, dv, {"values": by_distance.reshape(-1, len(a)).T @ dy.reshape(-1, a.shape[1])}
    return y, pullback

ENCODINGS = {                                                                     # settings to Encoding
    "nope": lambda settings: Encoding(),
    "sinusoidal": lambda settings: Encoding(embed=sinusoidal_embed),
    "learned": lambda settings: Encoding(embed=learned_embed, parameters=lambda model: {
        "weight": normal((settings.longest(model), model.width))}),
    "expe": build_expe, "exqpe": build_expe,
    "rope": lambda settings: Encoding(rotate=rope_rotate),
    "alibi": lambda settings: Encoding(score=alibi_score),
    "t5": lambda settings: Encoding(score=t5_score, parameters=lambda model: {
        "weight": normal((settings.buckets, model.heads))}),
    "shaw": lambda settings: Encoding(score=shaw_score, value=shaw_value, parameters=lambda model: {
        name: normal((settings.max_distance * (1 if model.causal else 2) + 1, model.d_head))
        for name in ("keys", "values")}),
}

def build_encoding(settings, config):
    """The Encoding of these settings, with the softmax of the model's config."""
    encoding = (ENCODINGS[settings.pe] if settings.pe in CORE else zoo_part(settings.pe, "doors"))(settings)
    return encoding if config.softmax == "plain" else zoo_module("softmax").doors(encoding, settings, config)

class BlockEncoding(NamedTuple):
    """What encodes positions in one block, and which keys it sees."""

    settings: Any                                                                 # of positional_encodings.py
    window: int                                                                   # keys that a query sees; 0: all
    encoding: Encoding
    shared: bool                                                                  # with others of these settings
    prefix: str                                                                   # of its parameters' names in params

def encodings_of_blocks(config):
    """A BlockEncoding for each block. What both backends share among blocks is said here and nowhere else.

    Blocks with the settings of --pe share one encoding and its parameters, encoding.NAME, unless it is declared with
    each_block. Every other block has its own, blocks.i.attn.encoding.NAME. The first block's enters the embedding, too.
    """
    pattern = config.layer_pattern()
    encodings = {settings: build_encoding(settings, config) for settings in {settings for settings, _ in pattern}}
    plans = []
    for i in range(config.layers):
        settings, window = pattern[i % len(pattern)]
        encoding = encodings[settings]
        shared = settings == config.encoding and not encoding.each_block
        prefix = "encoding." if shared else f"blocks.{i}.attn.encoding."
        plans.append(BlockEncoding(settings, window, encoding, shared, prefix))
    return plans

# ---- attention -------------------------------------------------------------------------------------------------------

def mask(scores, causal, window):
    """-inf for the keys that a query does not see, in place. scores (..., T, S)."""
    never = np.full(scores.shape[-2:], -np.inf, scores.dtype)                     # (T, S)
    if causal:
        scores += np.triu(never, 1)                                               # ahead of its own index
    if window:
        scores += np.tril(never, -window)                                         # further back than the window
    return scores

def attend(q, k, v, h, encoding, table, learned, causal, window):
    """y_m = sum_n p_mn v_n, p_m the softmax over n <= m of q_m . k_n / sqrt(D) + bias_mn. The paper's equation 1.

    q, k, v and y (B, H, T, D); the doors score, softmax and value of the encoding are here.
    """
    scale = 1 / score_divisor(q)
    scores = (scale * q) @ k.swapaxes(-1, -2)                                     # (B, H, T, S)
    bias, pull_score = encoding.score(q, k, h, table, learned)
    if bias is not None:
        scores += bias
    p, pull_softmax = encoding.softmax(mask(scores, causal, window), learned)
    y, pull_value = encoding.value(p, v, table, learned)                          # (B, H, T, D)
    def pullback(dy):
        """scores = q k^T / sqrt(D): dq = ds k, dk = ds^T q, both over sqrt(D)."""
        dp, dv, down_value = pull_value(dy)                                       # (B, H, T, S), (B, H, S, D)
        dscores, down_softmax = pull_softmax(dp)
        dq_score, dk_score, dh, down_score = pull_score(dscores)
        dq = scale * np.matmul(dscores, k, out=np.empty_like(q)) + dq_score
        dk = scale * np.matmul(dscores.swapaxes(-1, -2), q, out=np.empty_like(k)) + dk_score
        return dq, dk, dv, dh, down_value | down_softmax | down_score
    return y, pullback

def split_heads(x, n_heads):
    """(B, T, C) to (B, H, T, D), a view."""
    B, T, C = x.shape
    return x.reshape(B, T, n_heads, C // n_heads).swapaxes(1, 2)                  # (B, H, T, D)

def merge_heads(x):
    """The inverse of split_heads, and a view of what lies in memory as split_heads left it."""
    B, H, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * D)                                  # (B, T, C)

def project(h, p, n_heads, encoding, pos, learned):
    """q, k, v = W_q h_q, W_k h_k, W_v h_v, the h's by the override door, q and k rotated. The paper's equation 2."""
    parts, pull_override = encoding.override(h, pos.rows, learned)                # (B, T, C) each, for W_q, W_k, W_v
    (q, pull_q), (k, pull_k), (v, pull_v) = map(linear, parts, np.split(p["qkv.weight"], 3))
    q, k, v = (split_heads(x, n_heads) for x in (q, k, v))                        # (B, H, T, D) each
    q, k, pull_rotate = encoding.rotate(q, k, pos.rows, learned)
    def pullback(dq, dk, dv):
        """h gets gradients through each of the three."""
        dq, dk, down_rotate = pull_rotate(dq, dk)                                 # (B, H, T, D) each
        (dq, dw_q), (dk, dw_k), (dv, dw_v) = (
            pull(merge_heads(d)) for pull, d in ((pull_q, dq), (pull_k, dk), (pull_v, dv)))            # (B, T, C) each
        dh, down_override = pull_override((dq, dk, dv))                           # (B, T, C)
        return dh, {"qkv.weight": np.concatenate((dw_q, dw_k, dw_v))}, down_rotate | down_override
    return q, k, v, pullback

def attention(h, p, config, encoding, pos, learned, window=0):
    """W_proj y, y = attend(project(h)) with the heads side by side. h and out (B, T, C)."""
    q, k, v, pull_project = project(h, p, config.heads, encoding, pos, learned)
    y, pull_attend = attend(q, k, v, h, encoding, pos.pairs, learned, config.causal, window)
    out, pull_out = linear(merge_heads(y), p["proj.weight"])                      # (B, T, C)
    def pullback(dout):
        """h gets gradients through q, k and v, and from a score that reads it."""
        dy, dw_proj = pull_out(dout)                                              # (B, T, C)
        dq, dk, dv, dh_score, down_attend = pull_attend(split_heads(dy, config.heads))
        dh, grads, down_project = pull_project(dq, dk, dv)
        return dh + dh_score, grads | {"proj.weight": dw_proj}, summed(down_attend, down_project)
    return out, pullback

def attention_parameters(config):
    C = config.width
    return {"qkv.weight": normal((3 * C, C)), "proj.weight": normal((C, C), residual_std(config))}

# ---- the block -------------------------------------------------------------------------------------------------------

def block(x, p, config, encoding, pos, learned, window, masks):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). x (B, T, C)."""
    norm, _ = norm_of(config)
    mlp, _ = mlp_of(config)
    h, pull_norm1 = norm(x, config.norm_eps, **strip_prefix("norm1.", p))
    a, pull_attention = attention(h, strip_prefix("attn.", p), config, encoding, pos, learned, window)
    a, pull_dropout1 = dropout(a, next(masks))
    x = x + a
    h, pull_norm2 = norm(x, config.norm_eps, **strip_prefix("norm2.", p))
    m, pull_mlp = mlp(h, strip_prefix("mlp.", p))
    m, pull_dropout2 = dropout(m, next(masks))
    def pullback(dout):
        """out = x + branch(x): the gradient goes past the branch as it is, and through it besides."""
        dh, dmlp = pull_mlp(pull_dropout2(dout))
        dx, dnorm2 = pull_norm2(dh)
        dx += dout
        dh, dattn, down = pull_attention(pull_dropout1(dx))
        dbranch, dnorm1 = pull_norm1(dh)
        dx += dbranch
        parts = {"norm1.": dnorm1, "attn.": dattn, "norm2.": dnorm2, "mlp.": dmlp}
        return dx, join(parts), down
    return x + m, pullback

def block_parameters(config, encoding):
    """Those of a block; encoding: those of its encoding that it does not share, in their place among torch's."""
    _, norm_parameters = norm_of(config)
    _, mlp_parameters = mlp_of(config)
    attn = attention_parameters(config) | add_prefix("encoding.", encoding)
    return join({"norm1.": norm_parameters(config), "attn.": attn,
                 "norm2.": norm_parameters(config), "mlp.": mlp_parameters(config)})

def strip_prefix(prefix, p):
    """The entries whose names start with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}

def add_prefix(prefix, p):
    """The inverse of strip_prefix."""
    return {prefix + name: value for name, value in p.items()}

def join(parts):
    """One dict of {prefix: dict}, each with its prefix."""
    return {prefix + name: value for prefix, p in parts.items() for name, value in p.items()}

def summed(*dicts):
    """The union of the dicts; values of the same name are added."""
    total = {}
    for name, value in itertools.chain(*(d.items() for d in dicts)):
        total[name] = total[name] + value if name in total else value
    return total

# ---- the loss --------------------------------------------------------------------------------------------------------

IGNORED = -100                                                                    # a target that the loss leaves out

def cross_entropy(logits, targets):
    """-log softmax(logits)[target] in nats, for each target; 0 where it is IGNORED. logits (..., V), targets (...).

    Nothing overflows: with the row's largest logit subtracted, loss = log(sum exp(logits)) - logits[target].
    """
    counted = targets != IGNORED
    at_target = (*np.indices(targets.shape, sparse=True), np.where(counted, targets, 0))
    p = logits - logits.max(-1, keepdims=True)
    losses = -p[at_target]
    np.exp(p, out=p)
    total = p.sum(-1, keepdims=True)
    losses += np.log(total[..., 0])
    p /= total
    def pullback(dlosses):
        """loss = log(sum_j exp(z_j)) - z_target, so dz_i = dloss (p_i - [i = target]). Can be called once."""
        p[at_target] -= 1
        return np.multiply(p, (dlosses * counted)[..., None], out=p)
    return np.where(counted, losses, 0), pullback

# ---- the model -------------------------------------------------------------------------------------------------------

class Tables(NamedTuple):
    """What an encoding derives from the positions n of one pass, as NoPE in positional_encodings.py says."""

    rows: np.ndarray | None
    pairs: np.ndarray | None

def model_parameters(config):
    """{name: Parameter} of the whole model, in the order of torch's state_dict.

    An embedding that is not the output layer too starts at 1, torch's own default: no smaller than the rows that the
    sinusoidal encoding adds to it.
    """
    C, V = config.width, config.vocab
    _, norm_parameters = norm_of(config)
    parameters = {"embedding.weight": normal((V, C), 0.02 if config.tied else 1.0)}
    shared = {}
    for i, plan in enumerate(encodings_of_blocks(config)):
        own = plan.encoding.parameters(config)
        if plan.shared:
            shared, own = own, {}
        parameters |= add_prefix(f"blocks.{i}.", block_parameters(config, own))
    parameters |= add_prefix("norm.", norm_parameters(config))
    if not config.tied:
        parameters["head.weight"] = normal((V, C))
    return parameters | add_prefix("encoding.", shared)

def parameter_shapes(config):
    """{name: shape} of all parameters, in the order of torch's state_dict."""
    return {name: parameter.shape for name, parameter in model_parameters(config).items()}

def count_parameters(config):
    """The number of all parameters. A tied matrix counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())

def encoding_with(name, config):
    """The settings of the encoding that has the parameter of this name; None for a parameter of the rest."""
    return next((plan.settings for plan in encodings_of_blocks(config) if name.startswith(plan.prefix)), None)

def init_params(config, seed=0):
    """The first weights of a run, {name: float32}: those of model_torch.GPT(config, seed) too, which loads them.

    The encodings' own are drawn last, so that a model starts from the same others with every encoding.
    """
    rng = np.random.default_rng(seed)
    parameters = model_parameters(config)
    prefixes = tuple(plan.prefix for plan in encodings_of_blocks(config))
    params = dict.fromkeys(parameters)
    for name in sorted(parameters, key=lambda name: name.startswith(prefixes)):
        params[name] = parameters[name].first_values(rng)
    return params

def forward(params, tokens, config, positions=None, masks=None):
    """The logits (B, T, V) of integer tokens (B, T), and the list of pullbacks that backward takes.

    positions: any integers, (T,) or (B, T); 0 .. T-1 if left out. masks: from dropout_masks; None for no dropout.
    Raises ValueError for positions that are not integers, and for one without a row.
    """
    n = np.arange(tokens.shape[1]) if positions is None else expe.integers(positions)
    plans = encodings_of_blocks(config)
    first = plans[0]
    dtype = params["embedding.weight"].dtype
    pos = {settings: tables(settings, n, config, dtype) for settings in {plan.settings for plan in plans}}
    norm, _ = norm_of(config)
    head = "embedding.weight" if config.tied else "head.weight"
    masks = itertools.repeat(None) if masks is None else iter(masks)

    x, pull_embedding = embedding(tokens, params["embedding.weight"])             # (B, T, C)
    x, pull_embed = first.encoding.embed(x, pos[first.settings].rows, strip_prefix(first.prefix, params))
    x, pull_dropout = dropout(x, next(masks))
    pullbacks = [(lambda dx: (None, pull_embedding(dx)), "embedding.weight"),     # and the prefixes of what it gives
                 (lambda dx: pull_embed(pull_dropout(dx)), first.prefix)]
    for i, plan in enumerate(plans):
        p = strip_prefix(f"blocks.{i}.", params)
        learned = strip_prefix(plan.prefix, params)
        x, pull_block = block(x, p, config, plan.encoding, pos[plan.settings], learned, plan.window, masks)
        pullbacks.append((pull_block, f"blocks.{i}.", plan.prefix))
    h, pull_norm = norm(x, config.norm_eps, **strip_prefix("norm.", params))
    logits, pull_head = linear(h, params[head])                                   # (B, T, V)
    return logits, [*pullbacks, (pull_norm, "norm."), (pull_head, head)]

def backward(dlogits, pullbacks, config):
    """The gradient of every parameter, by name, from that of the logits (B, T, V): the pullbacks from the end.

    It empties their list, so that the arrays of each are freed once it was called. Blocks may share parameters.
    """
    d, grads = dlogits, {}
    while pullbacks:
        pullback, *prefixes = pullbacks.pop()
        d, *parts = pullback(d)                                                   # dx, then an array or a dict each
        for prefix, part in zip(prefixes, parts, strict=True):
            grads = summed(grads, add_prefix(prefix, part) if isinstance(part, dict) else {prefix: part})
    return {name: grads[name] for name in parameter_shapes(config)}

def loss_and_grads(params, tokens, targets, config, positions=None, masks=None):
    """(mean cross-entropy in nats, {name: gradient}). targets (B, T) may be IGNORED. The rest is as in forward."""
    logits, pullbacks = forward(params, tokens, config, positions, masks)
    losses, pull_loss = cross_entropy(logits, targets)
    n_targets = np.count_nonzero(targets != IGNORED)
    dlosses = np.full_like(losses, 1 / n_targets)                                 # loss = sum(losses) / n_targets
    return losses.sum() / losses.dtype.type(n_targets), backward(pull_loss(dlosses), pullbacks, config)

def token_losses(params, tokens, targets, config, positions=None):
    """The cross-entropy of each target in nats, (B, T), 0 where it is IGNORED; arguments as loss_and_grads has them."""
    logits, _ = forward(params, tokens, config, positions)
    return cross_entropy(logits, targets)[0]

def tables(settings, positions, config, dtype):
    """The Tables of an encoding: exact in float64 or integers, floats cast once."""
    pair = settings.rows(positions, config), settings.pairs(positions, positions, config)
    return Tables(*(x.astype(dtype) if x is not None and x.dtype.kind == "f" else x for x in pair))

def dropout_masks(config, B, T, rng, dtype=np.float32):
    """The masks of one forward pass, drawn one after the other: for the embedding, then two in each block."""
    for _ in range(1 + 2 * config.layers):
        kept = rng.random((B, T, config.width), dtype=np.float32) >= config.dropout
        yield kept * np.dtype(dtype).type(1 / (1 - config.dropout))

# ---- the optimizer ---------------------------------------------------------------------------------------------------

def clip_grads(grads, limit):
    """Scale all gradients, in place, so that their joint norm is at most `limit`; returns the norm they had."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in grads.values()))
    scale = limit / (norm + 1e-6)                                                 # as torch's clip_grad_norm_ has it
    if scale < 1:
        for g in grads.values():
            g *= scale
    return norm

def adamw_state(params):
    """The state of AdamW before its first step."""
    return {"step": 0} | {moment: {name: np.zeros_like(w) for name, w in params.items()} for moment in ("m", "v")}

def adamw_step(params, grads, state, lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1):
    """One step of AdamW (Loshchilov and Hutter 2019), in place on params and state; decay on matrices only.

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
        w = w - lr decay w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    """
    state["step"] += 1
    unbias1 = 1 - beta1 ** state["step"]
    unbias2 = 1 - beta2 ** state["step"]
    for name, w in params.items():
        decay = weight_decay if w.ndim >= 2 else 0.0
        g, m, v = grads[name], state["m"][name], state["v"][name]
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * np.square(g)
        w *= 1 - lr * decay
        w -= (lr / unbias1) * m / (np.sqrt(v / unbias2) + eps)
