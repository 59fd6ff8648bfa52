"""The GPT of model_torch.py in plain NumPy: forward, and backward by hand.

Every layer is a pair that stands side by side: x_forward(...) returns its output and a cache, x_backward(dout, cache)
the gradients of what went in. `dx` is the gradient of the loss by x, and has x's shape. The model's backward is its
forward's list of calls, read upwards. Functions keep no state, and change no array that came in unless they say so.

Where the paper's equations are (preprint's numbers; tables are in expe.py):

    1, 6, 8, 11    attention, softmax(q k^T / sqrt(D)) v      attend_forward
    2, 4, 7, 9     q = W_q phi(h), k = W_k phi(h), v = W_v h  project_forward, override_on
    3, 5           phi, by ExPE's and by ExQPE's rows         phi_forward, expe_table, exqpe_table
    12             learned positions                          add_learned_forward
    13, 14         sinusoidal positions                       add_forward, sinusoidal_table
    15, 16         RoPE                                       rotate_forward, rope_table

B batch, T query length, S key length (here S = T), H heads, D width of a head, C = H*D model width, V vocabulary,
l overridden dimensions, n a position; a linear layer has I inputs and O outputs. Weights lie as in torch, (O, I), and
params is a flat dict of them by the names of torch's state_dict. All is computed in their dtype, float64 or float32.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

import expe
from config import CORE, zoo_module

# ---- linear, embedding, dropout --------------------------------------------------------------------------------------

def linear_forward(x, w):
    """out = x W^T. x (..., I), w (O, I), out (..., O)."""
    out = x.reshape(-1, w.shape[1]) @ w.T                                         # (rows, O), one product for BLAS
    return out.reshape(*x.shape[:-1], len(w)), (x, w)

def linear_backward(dout, cache):
    """out_o = sum_i x_i w_oi: so dx_i = sum_o dout_o w_oi, and dw_oi = dout_o x_i, summed over the rows."""
    x, w = cache
    dout = dout.reshape(-1, len(w))                                               # (rows, O)
    dx = dout @ w                                                                 # (rows, I)
    dw = dout.T @ x.reshape(-1, w.shape[1])                                       # (O, I)
    return dx.reshape(x.shape), dw

def embedding_forward(tokens, w):
    """out = w[tokens]. tokens (B, T) or (T,), w (V, C), out (..., C)."""
    return w[tokens], (tokens, w.shape)

def embedding_backward(dout, cache):
    """out = w[tokens]: a row of w gets the sum of the gradients of all places that looked it up. Returns dw."""
    tokens, shape = cache
    order = np.argsort(tokens, axis=None, kind="stable")                          # (B*T,), equal tokens side by side
    used, first = np.unique(tokens.ravel()[order], return_index=True)
    dw = np.zeros(shape, dout.dtype)
    dw[used] = np.add.reduceat(dout.reshape(-1, shape[1])[order], first, axis=0)
    return dw

def dropout_forward(x, mask):
    """out = x * mask, the mask being 0 for what is dropped and 1/(1 - rate) elsewhere; None drops nothing."""
    return (x if mask is None else x * mask), mask

def dropout_backward(dout, mask):
    """out = x * mask."""
    return dout if mask is None else dout * mask

# ---- norms -----------------------------------------------------------------------------------------------------------

def layernorm_forward(x, eps, weight, bias):
    """out = z weight + bias, z = (x - mean(x)) / sqrt(var(x) + eps), by rows. x (..., C); weight, bias (C,)."""
    z = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.vecdot(z, z)[..., None] / x.shape[-1] + eps)            # (..., 1)
    z *= rstd
    return z * weight + bias, (z, rstd, weight)

def layernorm_backward(dout, cache):
    """out = z weight + bias, z = (x - mean) rstd, rstd = (mean((x - mean)^2) + eps)^(-1/2).

    A change of x_i moves z_i by rstd; every z_j by -rstd/C, through the mean; and every z_j by -z_j rstd z_i/C, through
    rstd, whose derivative by x_i is -rstd^3 (x_i - mean)/C. Summed: dx = rstd (dz - mean(dz) - z mean(dz z)).
    """
    z, rstd, weight = cache
    rows = tuple(range(dout.ndim - 1))
    dweight, dbias = (dout * z).sum(rows), dout.sum(rows)
    dz = dout * weight
    along_z = np.vecdot(dz, z)[..., None] / z.shape[-1]                           # (..., 1)
    dx = rstd * (dz - dz.mean(-1, keepdims=True) - z * along_z)
    return dx, {"weight": dweight, "bias": dbias}


# ---- the MLPs --------------------------------------------------------------------------------------------------------

ROOT = math.sqrt(2 / math.pi)                                                     # of the tanh form (Hendrycks 2016)
CUBIC = 0.044715

def sigmoid(x):
    """1 / (1 + e^-x), which cannot overflow. Any shape."""
    return 0.5 * (1 + np.tanh(0.5 * x))

def gelu_forward(x):
    """out = x s, s = (1 + tanh(u))/2 = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). Any shape."""
    s = x * x                                                                     # x**3 would take ten times as long
    s *= ROOT * CUBIC
    s += ROOT
    s *= x                                                                        # u
    np.tanh(s, out=s)
    s += 1
    s *= 0.5
    return x * s, (x, s)

def gelu_backward(dout, cache):
    """out = x s and ds/dx = 2 s (1 - s) du/dx, so dx = dout s (1 + x (1 - s) 2 du/dx)."""
    x, s = cache
    dx = x * x
    dx *= 6 * ROOT * CUBIC
    dx += 2 * ROOT                                                                # 2 du/dx
    dx *= x
    dx *= 1 - s
    dx += 1
    dx *= s
    dx *= dout
    return dx

def gelu_mlp_forward(h, p):
    """out = W_down gelu(W_up h). h (..., C)."""
    up, cache_up = linear_forward(h, p["up.weight"])                              # (..., mlp_width)
    a, cache_gelu = gelu_forward(up)
    out, cache_down = linear_forward(a, p["down.weight"])
    return out, (cache_up, cache_gelu, cache_down)

def gelu_mlp_backward(dout, cache):
    """out = W_down gelu(W_up h)."""
    cache_up, cache_gelu, cache_down = cache
    da, dw_down = linear_backward(dout, cache_down)
    dup = gelu_backward(da, cache_gelu)
    dh, dw_up = linear_backward(dup, cache_up)
    return dh, {"up.weight": dw_up, "down.weight": dw_down}

LAYERS = {"layernorm": (layernorm_forward, layernorm_backward), "gelu": (gelu_mlp_forward, gelu_mlp_backward)}

def layer(name):
    """The pair (forward, backward) of a norm or an MLP; rmsnorm and swiglu are in zoo/llama.py."""
    return LAYERS[name] if name in LAYERS else zoo_module("llama").LAYERS[name]

# ---- the encodings ---------------------------------------------------------------------------------------------------

def small_numbers(rng, name, shape):
    return 0.02 * rng.standard_normal(shape, dtype=np.float32)

def override_shut_forward(h, table, learned):
    """What enters W_q, W_k and W_v is h, h and h. h (B, T, C)."""
    return (h, h, h), None

def override_shut_backward(dparts, cache):
    """parts = (h, h, h)."""
    dq, dk, dv = dparts
    return dq + dk + dv, {}

def softmax_forward(scores, learned):
    """p = exp(scores) / sum of exp(scores). In place. scores (..., T, S), -inf for keys that are not seen."""
    scores -= scores.max(-1, keepdims=True)                                       # exp cannot overflow then
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores, scores

def softmax_backward(dp, p):
    """p_i = exp(s_i) / sum_j exp(s_j), so dp_j/ds_i = p_j ([i = j] - p_i), and ds_i = p_i (dp_i - sum_j dp_j p_j).

    In place. Keys that are not seen have p = 0, and so no gradient.
    """
    dp -= np.vecdot(dp, p)[..., None]
    dp *= p
    return dp, {}

def value_forward(p, v, table, learned):
    """y = p v. p (B, H, T, S), v and y (B, H, T, D)."""
    y = np.empty_like(v)                                                          # as v lies in memory
    np.matmul(p, v, out=y)
    return y, (p, v)

def value_backward(dy, cache):
    """y = p v: dp = dy v^T, dv = p^T dy."""
    p, v = cache
    dv = np.empty_like(v)
    np.matmul(p.swapaxes(-1, -2), dy, out=dv)
    return dy @ v.swapaxes(-1, -2), dv, {}

def no_score_backward(dbias, cache):
    """Of a door score that adds nothing, or fixed numbers: the gradients of q, k and h. dbias (B, H, T, S)."""
    return 0, 0, 0, {}

class Encoding(NamedTuple):
    """The doors of an encoding, (forward, backward) each; left out, a door is shut, as here. `table` is what config.py
    makes of the positions, `learned` the encoding's own parameters; a backward ends with their gradients.

    embed takes the residual stream x (B, T, C), once; override h (B, T, C), in each block; rotate queries and keys
    (B, H, T, D); score returns what is added to the scores, (..., T, S) or None; softmax makes weights of masked
    scores, (B, H, T, S) each; value makes the output of weights and values, (B, H, T, D). And its own parameters:
    shapes(model) names their shapes, start(rng, name, shape) their first values.
    """

    embed: tuple = (lambda x, table, learned: (x, None), lambda dx, cache: (dx, {}))
    override: tuple = (override_shut_forward, override_shut_backward)
    rotate: tuple = (lambda q, k, table, learned: (q, k, None), lambda dq, dk, cache: (dq, dk, {}))
    score: tuple = (lambda q, k, h, table, learned: (None, None), no_score_backward)
    softmax: tuple = (softmax_forward, softmax_backward)
    value: tuple = (value_forward, value_backward)
    shapes: Callable = lambda model: {}
    start: Callable = small_numbers
    each_block: bool = False                                            # whether each block has parameters of its own

def add_forward(x, table, learned):
    """out = x + table. x (B, T, C); table (..., T, C)."""
    return x + table, None

def add_backward(dout, cache):
    """out = x + table, and the table is fixed."""
    return dout, {}

def add_learned_forward(x, table, learned):
    """out = x + w[table]. x (B, T, C); table the positions, (T,) or (B, T); w (rows, C)."""
    rows, cache = embedding_forward(table, learned["weight"])                         # (..., T, C)
    return x + rows, cache

def add_learned_backward(dout, cache):
    """out = x + w[table]: with positions (T,) the sequences share their rows, so that their gradients add up."""
    table, _ = cache
    drows = dout.sum(0) if table.ndim == 1 else dout
    return dout, {"weight": embedding_backward(drows, cache)}

def phi_forward(h, table, learned):
    """phi(h, n): the first l of the C numbers are the table's, the others h's. The paper's equation 3."""
    phi = h.copy()                                                                # (B, T, C)
    phi[..., : table.shape[-1]] = table                                           # equation 3
    return phi, table.shape[-1]

def phi_backward(dphi, l):
    """phi = (table, h beyond l): what was overridden gets no gradient from here."""
    dh = dphi.copy()
    dh[..., :l] = 0
    return dh, {}

def override_forward(parts, phi, h, table, learned):
    """What enters W_q, W_k, W_v: phi(h) for those in `parts`, "k", "q", "qk" or "qkv", h for others. Equation 2."""
    phi_h, cache = phi[0](h, table, learned)
    return tuple(phi_h if part in parts else h for part in "qkv"), cache

def override_backward(parts, phi, dparts, cache):
    """parts = phi(h) where overridden, h elsewhere."""
    dphi = sum(d for part, d in zip("qkv", dparts, strict=True) if part in parts)
    dh, down = phi[1](dphi, cache)
    return sum((d for part, d in zip("qkv", dparts, strict=True) if part not in parts), dh), down

def override_on(parts, phi):
    """The override door of ExPE or ExQPE, on what --on says."""
    return partial(override_forward, parts, phi), partial(override_backward, parts, phi)

def overriding(settings):
    """The doors of ExPE or ExQPE; the ablations --once and --learn are in zoo/ablations.py."""
    if settings.once or settings.learn != "none":
        return zoo_module("ablations").doors(settings)
    return Encoding(override=override_on(settings.on, (phi_forward, phi_backward)))

def turn(x, cos, sin):
    """Each pair (a, b) = (x_i, x_(i + D/2)) turned by its angle: (a cos - b sin, b cos + a sin). x (B, H, T, D)."""
    a, b = np.split(x, 2, axis=-1)                                                # (B, H, T, D/2) each
    out = np.empty_like(x)
    out_a, out_b = np.split(out, 2, axis=-1)                                      # views of out
    np.subtract(a * cos, b * sin, out=out_a)
    np.add(b * cos, a * sin, out=out_b)
    return out

def rotate_forward(q, k, table, learned):
    """out = R_n q, R_n k (Su et al. 2021, equation 34). table (..., 1, T, D): cosines, then sines."""
    cos, sin = np.split(table, 2, axis=-1)                                        # (..., 1, T, D/2) each
    return turn(q, cos, sin), turn(k, cos, sin), (cos, sin)

def rotate_backward(dq, dk, cache):
    """out = R q with R orthogonal, so dq = R^T dout, and R^T turns by minus the angle."""
    cos, sin = cache
    return turn(dq, cos, -sin), turn(dk, cos, -sin), {}

def score_divisor(q):
    """What q k^T is divided by: sqrt(D). q (..., D)."""
    return math.sqrt(q.shape[-1])

def alibi_forward(q, k, h, table, learned):
    """bias = -slope (m - n), by a fixed slope for each head. table m - n (..., 1, T, S)."""
    slopes = expe.alibi_slopes(q.shape[1]).astype(table.dtype)                    # (H,)
    return -slopes[:, None, None] * table, None                                   # (..., H, T, S)

def t5_score_forward(q, k, h, table, learned):
    """bias = w[table], a number for each head and bucket. table (..., T, S), w (buckets, H)."""
    bias, cache = embedding_forward(table, learned["weight"])                         # (..., T, S, H)
    return np.moveaxis(bias, -1, -3), cache                                       # (..., H, T, S)

def t5_score_backward(dbias, cache):
    """bias = w[table]: a bucket's number gets the gradients of all pairs in it, summed."""
    table, _ = cache
    dbias = dbias.sum(0) if table.ndim == 2 else dbias                            # (..., H, T, S)
    return 0, 0, 0, {"weight": embedding_backward(np.moveaxis(dbias, -3, -1), cache)}

def spread_forward(x, index, S):
    """out_ms = x_m,index(ms): to each key what belongs to its distance. x (B, H, T, r), out (B, H, T, S)."""
    return np.take_along_axis(x, np.broadcast_to(index, (*x.shape[:3], S)), axis=-1), (index, x.shape[-1])

def spread_backward(dout, cache):
    """out_ms = x_m,index(ms): a distance gets the sum over its keys, here as a product with [index = r] (T, S, r)."""
    index, r = cache
    chosen = (index[..., None] == np.arange(r)).astype(dout.dtype)                # (..., 1, T, S, r)
    return (dout[..., None, :] @ chosen)[..., 0, :]                               # (B, H, T, r)

def shaw_score_forward(q, k, h, table, learned):
    """bias_mn = q_m . a_r / sqrt(D), r = table_mn. table (..., 1, T, S), a (r, D)."""
    a = learned["keys"] * (1 / score_divisor(q))
    bias, cache = spread_forward(q @ a.T, table, k.shape[2])                      # (B, H, T, r) to (B, H, T, S)
    return bias, (q, a, cache)

def shaw_score_backward(dbias, cache):
    """bias_mn = q_m . a_r / sqrt(D): q gets sum_n dbias_mn a_r, a_r the sum of dbias_mn q_m."""
    q, a, cache = cache
    dby_distance = spread_backward(dbias, cache)                                  # (B, H, T, r)
    dq = dby_distance @ a
    rows = dby_distance.reshape(-1, len(a))                                       # (B*H*T, r)
    dkeys = rows.T @ q.reshape(len(rows), -1) * (1 / score_divisor(q))
    return dq, 0, 0, {"keys": dkeys}

def shaw_value_forward(p, v, table, learned):
    """y_m = sum_n p_mn (v_n + a_r), r = table_mn: the weights summed by distance, times a vector for each."""
    a = learned["values"]
    by_distance = spread_backward(p, (table, len(a)))                             # (B, H, T, r)
    y, cache = value_forward(p, v, table, learned)
    y += by_distance @ a
    return y, (by_distance, a, table, cache)

def shaw_value_backward(dy, cache):
    """y_m = sum_n p_mn (v_n + a_r): dp_mn = dy_m . (v_n + a_r), and a_r gets its share of the weights times dy_m."""
    by_distance, a, table, cache = cache
    dp, dv, _ = value_backward(dy, cache)
    dp += spread_forward(dy @ a.T, table, dp.shape[-1])[0]                        # (B, H, T, S)
    dvalues = by_distance.reshape(-1, len(a)).T @ dy.reshape(-1, a.shape[1])
    return dp, dv, {"values": dvalues}

def learned_shapes(model):
    return {"weight": (model.encoding.longest(model), model.width)}

def t5_shapes(model):
    return {"weight": (model.encoding.buckets, model.heads)}

def shaw_shapes(model):
    size = (model.encoding.max_distance * (1 if model.causal else 2) + 1, model.d_head)
    return {"keys": size, "values": size}

ENCODINGS = {                                                                     # settings to doors
    "nope": lambda settings: Encoding(),
    "sinusoidal": lambda settings: Encoding(embed=(add_forward, add_backward)),
    "learned": lambda settings: Encoding(embed=(add_learned_forward, add_learned_backward), shapes=learned_shapes),
    "expe": overriding, "exqpe": overriding,
    "rope": lambda settings: Encoding(rotate=(rotate_forward, rotate_backward)),
    "alibi": lambda settings: Encoding(score=(alibi_forward, no_score_backward)),
    "t5": lambda settings: Encoding(score=(t5_score_forward, t5_score_backward), shapes=t5_shapes),
    "shaw": lambda settings: Encoding(score=(shaw_score_forward, shaw_score_backward),
                                      value=(shaw_value_forward, shaw_value_backward), shapes=shaw_shapes),
}

def doors_of(settings, config):
    """The Encoding that these settings open, with the softmax of the model's config."""
    make_doors = ENCODINGS[settings.pe] if settings.pe in CORE else zoo_module(settings.pe).doors
    if config.softmax == "plain":
        return make_doors(settings)
    return zoo_module("softmax").doors(make_doors(settings), settings, config)

# ---- attention -------------------------------------------------------------------------------------------------------

def mask(scores, causal=True, window=0):
    """-inf for the keys that a query does not see, in place. scores (..., T, S).

    causal: it sees those up to its own index; with a window, the last so many of them.
    """
    never = np.full(scores.shape[-2:], -np.inf, scores.dtype)                     # (T, S)
    if causal:
        scores += np.triu(never, 1)                                               # ahead
    if window:
        scores += np.tril(never, -window)                                         # further back than the window
    return scores

def attend_forward(q, k, v, h, encoding, table, learned, causal=True, window=0):
    """y_m = sum_n p_mn v_n, p_m the softmax over n <= m of q_m . k_n / sqrt(D) + bias_mn. The paper's equation 1.

    q, k, v and y (B, H, T, D); the doors score, softmax and value of the encoding are here.
    """
    scores = (q * (1 / score_divisor(q))) @ k.swapaxes(-1, -2)                    # (B, H, T, S)
    bias, cache_score = encoding.score[0](q, k, h, table, learned)
    if bias is not None:
        scores += bias
    p, cache_softmax = encoding.softmax[0](mask(scores, causal, window), learned)
    y, cache_value = encoding.value[0](p, v, table, learned)                      # (B, H, T, D)
    return y, (q, k, encoding, cache_score, cache_softmax, cache_value)

def attend_backward(dy, cache):
    """y by the door value, p = softmax(scores), scores = q k^T / sqrt(D): dq = ds k, dk = ds^T q."""
    q, k, encoding, cache_score, cache_softmax, cache_value = cache
    dp, dv, down_value = encoding.value[1](dy, cache_value)                       # (B, H, T, S), (B, H, S, D)
    dq, dk = np.empty_like(q), np.empty_like(k)
    dscores, down_softmax = encoding.softmax[1](dp, cache_softmax)
    dq_score, dk_score, dh, down_score = encoding.score[1](dscores, cache_score)
    np.matmul(dscores, k, out=dq)
    np.matmul(dscores.swapaxes(-1, -2), q, out=dk)
    dq *= 1 / score_divisor(q)
    dk *= 1 / score_divisor(q)
    dq += dq_score
    dk += dk_score
    return dq, dk, dv, dh, down_value | down_softmax | down_score

def split_heads(x, n_heads):
    """(B, T, C) to (B, H, T, D), a view."""
    B, T, C = x.shape
    return x.reshape(B, T, n_heads, C // n_heads).swapaxes(1, 2)                  # (B, H, T, D)

def merge_heads(x):
    """The inverse of split_heads, and a view of what lies in memory as split_heads left it."""
    B, H, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * D)                                  # (B, T, C)

def project_forward(h, p, n_heads, encoding, at, learned):
    """q, k, v = W_q h_q, W_k h_k, W_v h_v, the h's by the override door, q and k rotated. The paper's equation 2."""
    parts, cache_override = encoding.override[0](h, at.rows, learned)             # (B, T, C) each, for W_q, W_k, W_v
    (q, cache_q), (k, cache_k), (v, cache_v) = map(linear_forward, parts, np.split(p["qkv.weight"], 3))
    q, k, v = (split_heads(x, n_heads) for x in (q, k, v))                        # (B, H, T, D) each
    q, k, cache_rotate = encoding.rotate[0](q, k, at.rows, learned)
    return q, k, v, (encoding, cache_override, (cache_q, cache_k, cache_v), cache_rotate)

def project_backward(dq, dk, dv, cache):
    """q, k, v = W_q h_q, W_k h_k, W_v h_v: h gets gradients through each of the three."""
    encoding, cache_override, cache_qkv, cache_rotate = cache
    dq, dk, down_rotate = encoding.rotate[1](dq, dk, cache_rotate)                # (B, H, T, D) each
    merged = map(merge_heads, (dq, dk, dv))                                       # (B, T, C) each
    (dq, dw_q), (dk, dw_k), (dv, dw_v) = map(linear_backward, merged, cache_qkv)
    dh, down_override = encoding.override[1]((dq, dk, dv), cache_override)        # (B, T, C)
    return dh, {"qkv.weight": np.concatenate((dw_q, dw_k, dw_v))}, down_rotate | down_override

def output_forward(y, h, p):
    """out = W_proj y, the heads side by side. y (B, H, T, D); h (B, T, C), the block's input, is not used here."""
    out, cache = linear_forward(merge_heads(y), p["proj.weight"])                 # (B, T, C)
    return out, (cache, y.shape[1])

def output_backward(dout, cache):
    """out = W_proj y: the gradients of y and of h, which is not used, and of the parameters."""
    cache_proj, n_heads = cache
    dy, dw_proj = linear_backward(dout, cache_proj)                               # (B, T, C)
    return split_heads(dy, n_heads), 0, {"proj.weight": dw_proj}

def attention_forward(h, p, config, encoding, at, learned, window=0):
    """out = output(attend(project(h))). h and out (B, T, C)."""
    q, k, v, cache_project = project_forward(h, p, config.heads, encoding, at, learned)
    y, cache_attend = attend_forward(q, k, v, h, encoding, at.pairs, learned, config.causal, window)
    out, cache_output = output_forward(y, h, p)                                   # (B, T, C)
    return out, (cache_project, cache_attend, cache_output)

def attention_backward(dout, cache):
    """out = output(attend(project(h))): h gets gradients from all three."""
    cache_project, cache_attend, cache_output = cache
    dy, dh_output, grads_output = output_backward(dout, cache_output)             # (B, H, T, D)
    dq, dk, dv, dh_score, down_attend = attend_backward(dy, cache_attend)
    dh, grads_project, down_project = project_backward(dq, dk, dv, cache_project)
    return dh + dh_score + dh_output, grads_project | grads_output, summed(down_attend, down_project)

# ---- the block -------------------------------------------------------------------------------------------------------

def block_forward(x, p, config, encoding, at, learned, window, masks):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). x (B, T, C)."""
    norm_forward, _ = layer(config.norm)
    mlp_forward, _ = layer(config.mlp)
    h, cache_norm1 = norm_forward(x, config.norm_eps, **under("norm1.", p))
    a, cache_attn = attention_forward(h, under("attn.", p), config, encoding, at, learned, window)
    a, mask1 = dropout_forward(a, next(masks))
    x = x + a
    h, cache_norm2 = norm_forward(x, config.norm_eps, **under("norm2.", p))
    m, cache_mlp = mlp_forward(h, under("mlp.", p))
    m, mask2 = dropout_forward(m, next(masks))
    return x + m, (config, cache_norm1, cache_attn, mask1, cache_norm2, cache_mlp, mask2)

def block_backward(dout, cache):
    """out = x + branch(x): the gradient goes past the branch as it is, and through it besides."""
    config, cache_norm1, cache_attn, mask1, cache_norm2, cache_mlp, mask2 = cache
    _, norm_backward = layer(config.norm)
    _, mlp_backward = layer(config.mlp)
    dh, dmlp = mlp_backward(dropout_backward(dout, mask2), cache_mlp)
    dx, dnorm2 = norm_backward(dh, cache_norm2)
    dx += dout
    dh, dattn, down = attention_backward(dropout_backward(dx, mask1), cache_attn)
    dbranch, dnorm1 = norm_backward(dh, cache_norm1)
    dx += dbranch
    grads = over("norm1.", dnorm1) | over("attn.", dattn) | over("norm2.", dnorm2) | over("mlp.", dmlp)
    return dx, grads, down

def under(prefix, p):
    """The entries whose names start with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}

def over(prefix, p):
    """The inverse of under."""
    return {prefix + name: value for name, value in p.items()}

def summed(*dicts):
    """The union of the dicts; values of the same name are added."""
    total = {}
    for name, value in itertools.chain(*(d.items() for d in dicts)):
        total[name] = total[name] + value if name in total else value
    return total

# ---- the loss --------------------------------------------------------------------------------------------------------

IGNORED = -100                                                                    # a target that the loss leaves out

def cross_entropy_forward(logits, targets):
    """loss_i = -log softmax(logits_i)[target_i] in nats, 0 where the target is IGNORED. logits (N, V), targets (N,).

    Returns all losses (N,). Nothing overflows: with the row's largest logit subtracted, loss = log(sum exp(logits)) -
    logits[target].
    """
    counted = targets != IGNORED
    at_target = (np.arange(len(targets)), np.where(counted, targets, 0))
    p = logits - logits.max(-1, keepdims=True)
    losses = -p[at_target]
    np.exp(p, out=p)
    total = p.sum(-1, keepdims=True)
    losses += np.log(total[:, 0])
    p /= total
    return np.where(counted, losses, 0), (p, at_target, counted)

def cross_entropy_backward(dlosses, cache):
    """loss = log(sum_j exp(z_j)) - z_target, so dz_i = dloss (p_i - [i = target]). Uses up its cache. dlosses (N,)."""
    p, at_target, counted = cache
    p[at_target] -= 1
    p *= (dlosses * counted)[:, None]
    return p

# ---- the model -------------------------------------------------------------------------------------------------------

class Tables(NamedTuple):
    """What an encoding derives from the positions n of one pass: config.NoPE says what rows and pairs are."""

    rows: np.ndarray | None
    pairs: np.ndarray | None
    n: np.ndarray | None = None          # the positions themselves, for engine/fast.py

def parameter_shapes(config):
    """{name: shape} of all parameters, in the order of torch's state_dict."""
    C, V = config.width, config.vocab
    norm = {"weight": (C,), "bias": (C,)} if config.norm == "layernorm" else {"weight": (C,)}
    attn = {"qkv.weight": (3 * C, C), "proj.weight": (C, C)}
    mlp = {"up.weight": (config.mlp_width, C), "down.weight": (C, config.mlp_width)}
    if config.mlp == "swiglu":
        mlp = {"gate.weight": (config.mlp_width, C), **mlp}
    shapes = {"embedding.weight": (V, C)}
    for i in range(config.layers):
        doors = doors_of(config.block(i)[0], config)
        own = over("encoding.", doors.shapes(config)) if doors.each_block else {}
        block = over("norm1.", norm) | over("attn.", attn | own) | over("norm2.", norm) | over("mlp.", mlp)
        shapes |= over(f"blocks.{i}.", block)
    shapes |= over("norm.", norm)
    if not config.tied:
        shapes["head.weight"] = (V, C)
    doors = doors_of(config.encoding, config)
    return shapes if doors.each_block else shapes | over("encoding.", doors.shapes(config))

def count_parameters(config):
    """The number of all parameters. A tied matrix counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())

def init_params(config, seed=0):
    """The first weights of a run, {name: float32}: those of model_torch.GPT(config, seed) too, which loads them.

    GPT-2's normal numbers of 0.02, and 0.02 / sqrt(2 layers) for what ends a residual branch; norms start as weight
    1, bias 0. An embedding that is not the output layer too starts at 1, torch's own default: no smaller than the rows
    that the sinusoidal encoding adds to it. The encoding's own come last: every encoding starts from the same others.
    """
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(config)
    start = doors_of(config.encoding, config).start
    params = dict.fromkeys(shapes)
    for name in sorted(shapes, key=lambda name: "encoding." in name):
        if "encoding." in name:
            params[name] = start(rng, name.rpartition(".")[2], shapes[name])
        elif "norm" in name.split(".")[-2]:                                       # norm, blocks.0.norm1, ...
            params[name] = np.full(shapes[name], name.endswith("weight"), np.float32)
        else:
            std = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("proj.weight", "down.weight")) else 0.02
            std = 1.0 if name == "embedding.weight" and not config.tied else std
            params[name] = np.float32(std) * rng.standard_normal(shapes[name], dtype=np.float32)
    return params

def forward(params, tokens, config, positions=None, masks=None):
    """The logits (B, T, V) of integer tokens (B, T), and the cache of backward.

    positions: any integers, (T,) or (B, T); 0 .. T-1 if left out. masks: from dropout_masks; None for no dropout.
    Raises ValueError for positions that are not integers, and for one without a row.
    """
    n = np.arange(tokens.shape[1]) if positions is None else expe.integers(positions)
    dtype = params["embedding.weight"].dtype
    blocks = [config.block(i) for i in range(config.layers)]
    at = {}
    for settings in {config.encoding, *(settings for settings, _ in blocks)}:
        at[settings] = tables(settings, n, config, dtype)
    encoding = doors_of(config.encoding, config)
    shared = under("encoding.", params)
    masks = itertools.repeat(None) if masks is None else iter(masks)

    x, cache_embedding = embedding_forward(tokens, params["embedding.weight"])    # (B, T, C)
    x, cache_embed = encoding.embed[0](x, at[config.encoding].rows, shared)
    x, mask = dropout_forward(x, next(masks))
    cache_blocks = []
    for i, (settings, window) in enumerate(blocks):
        p = under(f"blocks.{i}.", params)
        doors = doors_of(settings, config)
        learned = under("attn.encoding.", p) if doors.each_block else shared
        x, cache = block_forward(x, p, config, doors, at[settings], learned, window, masks)
        cache_blocks.append(cache)
    h, cache_norm = layer(config.norm)[0](x, config.norm_eps, **under("norm.", params))
    logits, cache_head = linear_forward(h, params[output_name(config)])           # (B, T, V)
    return logits, (config, encoding, cache_embedding, cache_embed, mask, cache_blocks, cache_norm, cache_head)

def backward(dlogits, cache):
    """The gradient of every parameter, by name, from that of the logits (B, T, V): forward, read upwards."""
    config, encoding, cache_embedding, cache_embed, mask, cache_blocks, cache_norm, cache_head = cache
    dh, dw_output = linear_backward(dlogits, cache_head)
    dx, dnorm = layer(config.norm)[1](dh, cache_norm)                             # (B, T, C)
    grads, downs = over("norm.", dnorm), []
    for i in reversed(range(config.layers)):
        dx, dblock, down = block_backward(dx, cache_blocks[i])
        grads |= over(f"blocks.{i}.", dblock)
        each = doors_of(config.block(i)[0], config).each_block
        downs.append(over(f"blocks.{i}.attn.encoding." if each else "encoding.", down))
    dx = dropout_backward(dx, mask)
    dx, down = encoding.embed[1](dx, cache_embed)
    dw_embedding = embedding_backward(dx, cache_embedding)
    ends = {output_name(config): dw_output}, {"embedding.weight": dw_embedding}   # one matrix if tied
    grads = summed(grads, *downs, over("encoding.", down), *ends)                 # blocks may share parameters
    return {name: grads[name] for name in parameter_shapes(config)}

def loss_and_grads(params, tokens, targets, config, positions=None, masks=None):
    """(mean cross-entropy in nats, {name: gradient}). targets (B, T) may be IGNORED. The rest is as in forward."""
    logits, cache = forward(params, tokens, config, positions, masks)
    losses, cache_loss = cross_entropy_forward(logits.reshape(-1, config.vocab), targets.ravel())
    n_targets = np.count_nonzero(targets != IGNORED)
    dlosses = np.full_like(losses, 1 / n_targets)                                 # loss = sum(losses) / n_targets
    dlogits = cross_entropy_backward(dlosses, cache_loss).reshape(logits.shape)
    return losses.sum() / losses.dtype.type(n_targets), backward(dlogits, cache)

def token_losses(params, tokens, targets, config, positions=None):
    """The cross-entropy of each target in nats, (B, T), 0 where it is IGNORED; arguments as loss_and_grads has them."""
    logits, _ = forward(params, tokens, config, positions)
    losses, _ = cross_entropy_forward(logits.reshape(-1, config.vocab), targets.ravel())
    return losses.reshape(targets.shape)

def tables(settings, positions, config, dtype):
    """The Tables of an encoding: exact in float64 or integers, floats cast once."""
    pair = settings.rows(positions, config), settings.pairs(positions, positions, config)
    return Tables(*(x.astype(dtype) if x is not None and x.dtype.kind == "f" else x for x in pair))

def output_name(config):
    return "embedding.weight" if config.tied else "head.weight"

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
