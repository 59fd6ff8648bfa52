"""The GPT of model_torch.py in plain NumPy: forward, and backward by hand.

Every layer is a pair that stands side by side: x_forward(...) returns its output and a cache, x_backward(dout, cache)
the gradients of what went in. `dx` is the gradient of the loss by x, and has x's shape. The model's backward is its
forward's list of calls, read upwards. Functions keep no state, and change no array that came in unless they say so.

Where the paper's equations are (preprint's numbers; tables are in expe.py):

    1, 6, 8, 11    attention, softmax(q k^T / sqrt(D)) v      causal_attention_forward
    2, 4, 7, 9     q = W_q phi(h), k = W_k phi(h), v = W_v h  attention_forward
    3, 5           phi, by ExPE's and by ExQPE's rows         override_forward, expe_table, exqpe_table
    12             learned positions                          add_learned_forward
    13, 14         sinusoidal positions                       add_forward, sinusoidal_table
    15, 16         RoPE                                       rotate_forward, rope_table

B batch, T query length, S key length (here S = T), H heads, D width of a head, C = H*D model width, V vocabulary,
l overridden dimensions, n a position; a linear layer has I inputs and O outputs. Weights lie as in torch, (O, I), and
params is a flat dict of them by the names of torch's state_dict: a NumPy run and a torch run share their files.
All is computed in the dtype of the params, float64 or float32.
"""

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import expe
from config import LEARNED, InputError

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
    found, first = np.unique(tokens.ravel()[order], return_index=True)
    dw = np.zeros(shape, dout.dtype)
    dw[found] = np.add.reduceat(dout.reshape(-1, shape[1])[order], first, axis=0)
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


def rmsnorm_forward(x, eps, weight):
    """out = z weight, z = x / sqrt(mean(x^2) + eps), by rows. x (..., C); weight (C,)."""
    rstd = 1 / np.sqrt(np.vecdot(x, x)[..., None] / x.shape[-1] + eps)            # (..., 1)
    z = x * rstd
    return z * weight, (z, rstd, weight)


def rmsnorm_backward(dout, cache):
    """out = z weight, z = x rstd: as layernorm_backward but for the mean. dx = rstd (dz - z mean(dz z))."""
    z, rstd, weight = cache
    dweight = (dout * z).sum(tuple(range(dout.ndim - 1)))
    dz = dout * weight
    along_z = np.vecdot(dz, z)[..., None] / z.shape[-1]                           # (..., 1)
    return rstd * (dz - z * along_z), {"weight": dweight}


NORMS = {"layernorm": (layernorm_forward, layernorm_backward), "rmsnorm": (rmsnorm_forward, rmsnorm_backward)}


# ---- the MLPs --------------------------------------------------------------------------------------------------------

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715                                    # of the tanh form (Hendrycks 2016)


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
    up, cache_up = linear_forward(h, p["up.weight"])                              # (..., d_mlp)
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


def swiglu_forward(gate, up):
    """out = gate s up, s = sigmoid(gate) = (1 + tanh(gate/2))/2, which cannot overflow. Any shape."""
    s = 0.5 * (1 + np.tanh(0.5 * gate))
    return gate * s * up, (gate, up, s)


def swiglu_backward(dout, cache):
    """out = gate s up and ds/dgate = s (1 - s), so dgate = dout up (s + gate s (1 - s)), dup = dout gate s."""
    gate, up, s = cache
    return dout * up * s * (1 + gate * (1 - s)), dout * gate * s


def swiglu_mlp_forward(h, p):
    """out = W_down (silu(W_gate h) W_up h), silu(x) = x sigmoid(x) (Shazeer 2020). h (..., C)."""
    gate, cache_gate = linear_forward(h, p["gate.weight"])                        # (..., d_mlp)
    up, cache_up = linear_forward(h, p["up.weight"])                              # (..., d_mlp)
    a, cache_swiglu = swiglu_forward(gate, up)
    out, cache_down = linear_forward(a, p["down.weight"])
    return out, (cache_gate, cache_up, cache_swiglu, cache_down)


def swiglu_mlp_backward(dout, cache):
    """out = W_down (silu(W_gate h) W_up h): h gets a gradient by way of the gate, and one by way of up."""
    cache_gate, cache_up, cache_swiglu, cache_down = cache
    da, dw_down = linear_backward(dout, cache_down)
    dgate, dup = swiglu_backward(da, cache_swiglu)
    dh_up, dw_up = linear_backward(dup, cache_up)
    dh_gate, dw_gate = linear_backward(dgate, cache_gate)
    return dh_up + dh_gate, {"gate.weight": dw_gate, "up.weight": dw_up, "down.weight": dw_down}


MLPS = {"gelu": (gelu_mlp_forward, gelu_mlp_backward), "swiglu": (swiglu_mlp_forward, swiglu_mlp_backward)}


# ---- the encodings ---------------------------------------------------------------------------------------------------
# A door is a pair of functions, open or shut. `own` are the encoding's own parameters, {} if it has none.


def unchanged_forward(x, table, own):
    """out = x."""
    return x, None


def unchanged_backward(dout, cache):
    """out = x; no parameters."""
    return dout, {}


def not_overridden_forward(h, table, own):
    """What enters W_q, W_k and W_v is h, h and h."""
    return (h, h, h), None


def not_overridden_backward(dparts, cache):
    """parts = (h, h, h)."""
    dq, dk, dv = dparts
    return dq + dk + dv, {}


def unscored_forward(scores, qk, table, own):
    """out = scores."""
    return scores, None


def unscored_backward(dscores, cache):
    """out = scores: nothing for q and k beyond what the scores pass on, and no parameters."""
    return dscores, 0, {}


def unvalued_forward(y, p, table, own):
    """out = y."""
    return y, None


def unvalued_backward(dout, cache):
    """out = y: nothing for the weights p beyond what y passes on, and no parameters."""
    return 0, {}


class Encoding(NamedTuple):
    """What an encoding knows of positions, and its doors, each (forward, backward); left out, a door is shut.

    rows(positions, config) is its table for positions (T,) or (B, T), in float64, or integers that look rows up.
    shapes(config) are those of its own parameters, by name. `score` has a second half, `value`, for what an encoding
    adds to the values that the scores weigh.
    """

    rows: Callable = lambda positions, config: None
    embed: tuple = (unchanged_forward, unchanged_backward)         # x (B, T, C), the residual stream before block 1
    override: tuple = (not_overridden_forward, not_overridden_backward)    # h (B, T, C), the input of W_q, W_k, W_v
    rotate: tuple = (unchanged_forward, unchanged_backward)        # qk (2, B, H, T, D), queries and keys
    score: tuple = (unscored_forward, unscored_backward)           # scores (B, H, T, S) before the mask; used up after
    value: tuple = (unvalued_forward, unvalued_backward)           # y (B, H, T, D), and the weights p (B, H, T, S)
    shapes: Callable = lambda config: {}


def add_forward(x, table, own):
    """out = x + table. x (B, T, C); table (..., T, C)."""
    return x + table, None


def add_backward(dout, cache):
    """out = x + table, and the table is fixed."""
    return dout, {}


def sinusoidal_rows(positions, config):
    return expe.sinusoidal_table(positions, config.d_model, config.encoding.base)      # (..., T, C)


def add_learned_forward(x, table, own):
    """out = x + w[table]. x (B, T, C); table the positions, (T,) or (B, T); w (context, C)."""
    rows, cache = embedding_forward(table, own["weight"])                         # (..., T, C)
    return x + rows, cache


def add_learned_backward(dout, cache):
    """out = x + w[table]: with positions (T,) the sequences share their rows, so that their gradients add up."""
    table, _ = cache
    drows = dout.sum(0) if table.ndim == 1 else dout
    return dout, {"weight": embedding_backward(drows, cache)}


def learned_rows(positions, config):
    return expe.learned_rows(positions, config.context)


def learned_shapes(config):
    return {"weight": (config.context, config.d_model)}


def override_forward(h, table, own):
    """phi(h, n): the first l of the C numbers are the table's, the others h's. The paper's equation 3."""
    phi = h.copy()                                                                # (B, T, C)
    phi[..., : table.shape[-1]] = table
    return phi, table.shape[-1]


def override_backward(dphi, l):
    """phi = (table, h beyond l): what was overridden gets no gradient from here."""
    dh = dphi.copy()
    dh[..., :l] = 0
    return dh, {}


def learned_override_forward(h, table, own):
    """phi(h, n) by a table that two trained numbers w make: table0 + w_0 table1 + w_1 table2. table (..., T, l, 3)."""
    phi, l = override_forward(h, table[..., 0] + table[..., 1:] @ own["weight"], own)
    return phi, (l, table)


def learned_override_backward(dphi, cache):
    """table = table0 + w_0 table1 + w_1 table2: dw_i is the gradient of what was overridden times table_i, summed."""
    l, table = cache
    dtable = dphi[..., :l] if table.ndim == 4 else dphi[..., :l].sum(0)           # as the table is, (..., T, l)
    dw = np.array([np.vdot(dtable, table[..., i]) for i in (1, 2)])
    dh, _ = override_backward(dphi, l)
    return dh, {"weight": dw}


def override_on(parts, override):
    """The override of what enters W_q, W_k, W_v, where `parts` is "k", "q", "qk" or "qkv"; the others have h."""
    phi_forward, phi_backward = override

    def on_forward(h, table, own):
        """parts = phi(h) where overridden, h elsewhere."""
        phi, cache = phi_forward(h, table, own)
        return tuple(phi if part in parts else h for part in "qkv"), cache

    def on_backward(dparts, cache):
        """parts = phi(h) where overridden, h elsewhere."""
        dphi = sum(d for part, d in zip("qkv", dparts, strict=True) if part in parts)
        dh, down = phi_backward(dphi, cache)
        return sum((d for part, d in zip("qkv", dparts, strict=True) if part not in parts), dh), down

    return on_forward, on_backward


def expe_table(e, start, theta, positions):
    return e.scale * expe.expe_table(positions, e.l, start, theta, step=0 if e.constant else 1)    # (..., T, l)


def exqpe_table(e, theta1, theta2, positions):
    return e.scale * expe.exqpe_table(positions, e.l, e.start, theta1, theta2)    # (..., T, l)


def override_rows(table):
    """The rows of an encoding that overrides: a table, or the three parts from which --learn makes one."""
    def rows(positions, config):
        e = config.encoding
        if e.learn != "none":
            return expe.affine_parts(lambda a, b: table(e, a, b, positions))      # (..., T, l, 3)
        return table(e, *(getattr(e, name) for name in LEARNED[e.pe]), positions)              # (..., T, l)
    return rows


def overriding(table):
    """The encoding, by its config, that overrides with the rows of a table: --learn, --once and --on choose how."""
    def encoding(config):
        e = config.encoding
        phi, shapes = (override_forward, override_backward), {}
        if e.learn != "none":
            phi, shapes = (learned_override_forward, learned_override_backward), {"weight": (2,)}
        door = {"embed": phi} if e.once else {"override": override_on(e.on, phi)}
        return Encoding(override_rows(table), shapes=lambda config: shapes, **door)
    return encoding


def turn(x, cos, sin):
    """Each pair (a, b) = (x_i, x_(i + D/2)) turned by its angle: (a cos - b sin, b cos + a sin)."""
    a, b = np.split(x, 2, axis=-1)                                                # (2, B, H, T, D/2) each
    out = np.empty_like(x)
    out_a, out_b = np.split(out, 2, axis=-1)                                      # views of out
    np.subtract(a * cos, b * sin, out=out_a)
    np.add(b * cos, a * sin, out=out_b)
    return out


def rotate_forward(qk, table, own):
    """out = R_n q, R_n k (Su et al. 2021, equation 34). qk (2, B, H, T, D); table (..., T, D): cosines, then sines."""
    cos, sin = np.split(table, 2, axis=-1)                                        # (..., 1, T, D/2) each
    return turn(qk, cos, sin), (cos, sin)


def rotate_backward(dout, cache):
    """out = R q with R orthogonal, so dq = R^T dout, and R^T turns by minus the angle."""
    cos, sin = cache
    return turn(dout, cos, -sin), {}


def rope_rows(positions, config):
    e, D = config.encoding, config.d_head
    scaling = {"scaling": e.rope_scaling, "factor": e.factor, "trained_length": config.context, "length": e.length}
    return expe.rope_table(positions, D, e.base, **scaling)[..., None, :, :]      # (..., 1, T, D)


def add_score_forward(scores, qk, table, own):
    """out = scores + table. scores (B, H, T, S); table (..., H, T, S)."""
    return scores + table, None


def add_score_backward(dscores, cache):
    """out = scores + table, and the table is fixed."""
    return dscores, 0, {}


def alibi_rows(positions, config):
    return expe.alibi_table(positions, config.n_heads)                            # (..., H, T, S)


def t5_score_forward(scores, qk, table, own):
    """out = scores + w[table], a number for each head and bucket. table (..., T, S), w (buckets, H)."""
    bias, cache = embedding_forward(table, own["weight"])                         # (..., T, S, H)
    return scores + np.moveaxis(bias, -1, -3), cache


def t5_score_backward(dscores, cache):
    """out = scores + w[table]: a bucket's number gets the gradients of all pairs in it, summed."""
    table, _ = cache
    dbias = dscores.sum(0) if table.ndim == 2 else dscores                        # (..., H, T, S)
    return dscores, 0, {"weight": embedding_backward(np.moveaxis(dbias, -3, -1), cache)}


def t5_rows(positions, config):
    e = config.encoding
    return expe.t5_bucket(expe.distances(positions), e.buckets, e.max_distance)   # (..., T, S)


def t5_shapes(config):
    return {"weight": (config.encoding.buckets, config.n_heads)}


def spread_forward(x, index, S):
    """out_ms = x_m,index(ms): to each key what belongs to its distance. x (B, H, T, r), out (B, H, T, S)."""
    return np.take_along_axis(x, np.broadcast_to(index, (*x.shape[:3], S)), axis=-1), (index, x.shape[-1])


def spread_backward(dout, cache):
    """out_ms = x_m,index(ms): a distance gets the sum over its keys, here as a product with [index = r] (T, S, r)."""
    index, r = cache
    chosen = (index[..., None] == np.arange(r)).astype(dout.dtype)                # (..., 1, T, S, r)
    return (dout[..., None, :] @ chosen)[..., 0, :]                               # (B, H, T, r)


def shaw_score_forward(scores, qk, table, own):
    """out_mn = scores_mn + q_m . a_r / sqrt(D), r = table_mn. table (..., 1, T, S), a (max_distance + 1, D)."""
    q, a = qk[0], own["keys"] * (1 / math.sqrt(qk.shape[-1]))
    by_distance = q @ a.T                                                         # (B, H, T, r)
    more, cache = spread_forward(by_distance, table, scores.shape[-1])
    return scores + more, (qk, a, cache)


def shaw_score_backward(dscores, cache):
    """out_mn = scores_mn + q_m . a_r / sqrt(D): q gets sum_n dscores_mn a_r, a_r the sum of dscores_mn q_m."""
    qk, a, cache = cache
    dby_distance = spread_backward(dscores, cache)                                # (B, H, T, r)
    dqk = np.zeros_like(qk)
    dqk[0] = dby_distance @ a
    rows = dby_distance.reshape(-1, len(a))                                       # (B*H*T, r)
    dkeys = rows.T @ qk[0].reshape(len(rows), -1) * (1 / math.sqrt(qk.shape[-1]))
    return dscores, dqk, {"keys": dkeys}


def shaw_value_forward(y, p, table, own):
    """out_m = y_m + sum_n p_mn a_r, r = table_mn: the weights summed by distance, times a vector for each."""
    a = own["values"]
    by_distance = spread_backward(p, (table, len(a)))                             # (B, H, T, r)
    return y + by_distance @ a, (by_distance, a, table, p.shape[-1])


def shaw_value_backward(dout, cache):
    """out_m = y_m + sum_n p_mn a_r: dp_mn = dout_m . a_r, and a_r gets its share of the weights times dout_m."""
    by_distance, a, table, S = cache
    dp, _ = spread_forward(dout @ a.T, table, S)                                  # (B, H, T, S)
    dvalues = by_distance.reshape(-1, len(a)).T @ dout.reshape(-1, a.shape[1])
    return dp, {"values": dvalues}


def shaw_rows(positions, config):
    return expe.shaw_index(expe.distances(positions), config.encoding.max_distance)[..., None, :, :]   # (..., 1, T, S)


def shaw_shapes(config):
    size = (config.encoding.max_distance + 1, config.d_head)
    return {"keys": size, "values": size}


ENCODINGS = {
    "nope": Encoding(),
    "sinusoidal": Encoding(sinusoidal_rows, embed=(add_forward, add_backward)),
    "learned": Encoding(learned_rows, embed=(add_learned_forward, add_learned_backward), shapes=learned_shapes),
    "expe": overriding(expe_table),
    "exqpe": overriding(exqpe_table),
    "rope": Encoding(rope_rows, rotate=(rotate_forward, rotate_backward)),
    "alibi": Encoding(alibi_rows, score=(add_score_forward, add_score_backward)),
    "t5": Encoding(t5_rows, score=(t5_score_forward, t5_score_backward), shapes=t5_shapes),
    "shaw": Encoding(shaw_rows, score=(shaw_score_forward, shaw_score_backward),
                     value=(shaw_value_forward, shaw_value_backward), shapes=shaw_shapes),
}


def encoding_of(config):
    """The config's encoding: an entry of ENCODINGS, or what the entry makes of the config's variants.

    Raises InputError for dual chunk attention, which model_torch alone has: it is for models that are trained.
    """
    if config.encoding.chunk:
        raise InputError(f"dual chunk attention is in model_torch alone: chunk must be 0, got {config.encoding.chunk}")
    entry = ENCODINGS[config.encoding.pe]
    return entry if isinstance(entry, Encoding) else entry(config)


# ---- attention -------------------------------------------------------------------------------------------------------


def causal_softmax_forward(scores, causal=True):
    """p = exp(scores) / sum of exp(scores), over the keys up to the query's own index. In place. scores (..., T, S)."""
    if causal:
        scores += np.triu(np.full(scores.shape[-2:], -np.inf, scores.dtype), 1)   # what is ahead gets -inf, the rest 0
    scores -= scores.max(-1, keepdims=True)                                       # exp cannot overflow then
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores, scores


def causal_softmax_backward(dp, p):
    """p_i = exp(s_i) / sum_j exp(s_j), so dp_j/ds_i = p_j ([i = j] - p_i), and ds_i = p_i (dp_i - sum_j dp_j p_j).

    In place. Keys that are not seen have p = 0, and so no gradient.
    """
    dp -= np.vecdot(dp, p)[..., None]
    dp *= p
    return dp


def causal_attention_forward(qk, v, encoding, table, own, causal=True):
    """y_m = sum_n p_mn v_n, p_m the softmax over n <= m of q_m . k_n / sqrt(D). The paper's equation 1.

    qk (2, B, H, T, D), v and y (B, H, T, D).
    """
    q, k = qk
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.swapaxes(-1, -2)              # (B, H, T, S)
    scores, cache_score = encoding.score[0](scores, qk, table, own)
    p, _ = causal_softmax_forward(scores, causal)
    y = np.empty_like(v)                                                          # as v lies in memory
    np.matmul(p, v, out=y)                                                        # (B, H, T, D)
    y, cache_value = encoding.value[0](y, p, table, own)
    return y, (qk, v, p, encoding, cache_score, cache_value)


def causal_attention_backward(dy, cache):
    """y = p v, p = softmax(scores), scores = q k^T / sqrt(D): dp = dy v^T, dv = p^T dy, dq = ds k, dk = ds^T q."""
    qk, v, p, encoding, cache_score, cache_value = cache
    q, k = qk
    dp_value, down_value = encoding.value[1](dy, cache_value)
    dv = np.empty_like(v)
    np.matmul(p.swapaxes(-1, -2), dy, out=dv)                                     # (B, H, S, D)
    dp = dy @ v.swapaxes(-1, -2)                                                  # (B, H, T, S)
    dp += dp_value
    dscores = causal_softmax_backward(dp, p)
    dscores, dqk_score, down_score = encoding.score[1](dscores, cache_score)
    dqk = np.empty_like(qk)
    np.matmul(dscores, k, out=dqk[0])
    np.matmul(dscores.swapaxes(-1, -2), q, out=dqk[1])
    dqk *= 1 / math.sqrt(q.shape[-1])
    dqk += dqk_score
    return dqk, dv, down_value | down_score


def split_heads(x, n, n_heads):
    """(B, T, n*C) to (n, B, H, T, D), a view."""
    B, T, _ = x.shape
    return x.reshape(B, T, n, n_heads, -1).transpose(2, 0, 3, 1, 4)               # (n, B, H, T, D)


def merge_heads(x):
    """The inverse of split_heads, and a view of what lies in memory as split_heads left it."""
    n, B, H, T, D = x.shape
    return x.transpose(1, 3, 0, 2, 4).reshape(B, T, n * H * D)                    # (B, T, n*C)


def attention_forward(h, p, config, encoding, table, own):
    """out = W_proj attention(W_q phi(h), W_k phi(h), W_v h), phi the override. h (B, T, C). Equation 2 of the paper."""
    parts, cache_override = encoding.override[0](h, table, own)                   # (B, T, C) each, for W_q, W_k, W_v
    q, k, v = (linear_forward(x, w) for x, w in zip(parts, np.split(p["qkv.weight"], 3), strict=True))
    qk = split_heads(np.concatenate((q[0], k[0]), axis=-1), 2, config.n_heads)    # (2, B, H, T, D)
    qk, cache_rotate = encoding.rotate[0](qk, table, own)
    v_heads = split_heads(v[0], 1, config.n_heads)[0]                             # (B, H, T, D)
    y, cache_attention = causal_attention_forward(qk, v_heads, encoding, table, own, config.causal)
    out, cache_proj = linear_forward(merge_heads(y[None]), p["proj.weight"])      # (B, T, C)
    caches = (cache_override, (q[1], k[1], v[1]), cache_rotate, cache_attention, cache_proj)
    return out, (encoding, config.n_heads, caches)


def attention_backward(dout, cache):
    """out = W_proj attention(W_q phi(h), W_k phi(h), W_v h): h gets gradients through phi and through v."""
    encoding, n_heads, (cache_override, cache_qkv, cache_rotate, cache_attention, cache_proj) = cache
    dy, dw_proj = linear_backward(dout, cache_proj)                               # (B, T, C)
    dqk, dv, down_attention = causal_attention_backward(split_heads(dy, 1, n_heads)[0], cache_attention)
    dqk, down_rotate = encoding.rotate[1](dqk, cache_rotate)                      # (2, B, H, T, D)
    dq, dk, dv = (merge_heads(d[None]) for d in (*dqk, dv))                       # (B, T, C) each
    (dq, dw_q), (dk, dw_k), (dv, dw_v) = map(linear_backward, (dq, dk, dv), cache_qkv)
    dh, down_override = encoding.override[1]((dq, dk, dv), cache_override)        # (B, T, C)
    grads = {"qkv.weight": np.concatenate((dw_q, dw_k, dw_v)), "proj.weight": dw_proj}
    return dh, grads, summed(down_attention, down_rotate, down_override)


# ---- the block -------------------------------------------------------------------------------------------------------


def block_forward(x, p, config, encoding, table, own, masks):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). x (B, T, C)."""
    norm_forward, mlp_forward = NORMS[config.norm][0], MLPS[config.mlp][0]
    h, cache_norm1 = norm_forward(x, config.norm_eps, **under("norm1.", p))
    a, cache_attn = attention_forward(h, under("attn.", p), config, encoding, table, own)
    a, mask1 = dropout_forward(a, next(masks))
    x = x + a
    h, cache_norm2 = norm_forward(x, config.norm_eps, **under("norm2.", p))
    m, cache_mlp = mlp_forward(h, under("mlp.", p))
    m, mask2 = dropout_forward(m, next(masks))
    return x + m, (config, cache_norm1, cache_attn, mask1, cache_norm2, cache_mlp, mask2)


def block_backward(dout, cache):
    """out = x + branch(x): the gradient goes past the branch as it is, and through it besides."""
    config, cache_norm1, cache_attn, mask1, cache_norm2, cache_mlp, mask2 = cache
    norm_backward, mlp_backward = NORMS[config.norm][1], MLPS[config.mlp][1]
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


def cross_entropy_forward(logits, targets):
    """loss_i = -log softmax(logits_i)[target_i] in nats; returns all of them. logits (N, V), targets (N,), losses (N,).

    Nothing overflows: with the row's largest logit subtracted, loss = log(sum exp(logits)) - logits[target].
    """
    at_target = (np.arange(len(targets)), targets)
    p = logits - logits.max(-1, keepdims=True)
    losses = -p[at_target]
    np.exp(p, out=p)
    total = p.sum(-1, keepdims=True)
    losses += np.log(total[:, 0])
    p /= total
    return losses, (p, at_target)


def cross_entropy_backward(dlosses, cache):
    """loss = log(sum_j exp(z_j)) - z_target, so dz_i = dloss (p_i - [i = target]). Uses up its cache. dlosses (N,)."""
    p, at_target = cache
    p[at_target] -= 1
    p *= dlosses[:, None]
    return p


# ---- the model -------------------------------------------------------------------------------------------------------


def parameter_shapes(config):
    """{name: shape} of all parameters, in the order of torch's state_dict."""
    C, V = config.d_model, config.vocab_size
    norm = {"weight": (C,), "bias": (C,)} if config.norm == "layernorm" else {"weight": (C,)}
    attn = {"qkv.weight": (3 * C, C), "proj.weight": (C, C)}
    mlp = {"up.weight": (config.d_mlp, C), "down.weight": (C, config.d_mlp)}
    if config.mlp == "swiglu":
        mlp = {"gate.weight": (config.d_mlp, C), **mlp}
    block = over("norm1.", norm) | over("attn.", attn) | over("norm2.", norm) | over("mlp.", mlp)
    shapes = {"embedding.weight": (V, C)}
    for i in range(config.n_layers):
        shapes |= over(f"blocks.{i}.", block)
    shapes |= over("norm.", norm)
    if not config.tied:
        shapes["head.weight"] = (V, C)
    return shapes | over("encoding.", encoding_of(config).shapes(config))


def count_parameters(config):
    """(all parameters, those without input embedding and the encoding's own). A tied matrix counts once."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    inputs = sum(size for name, size in sizes.items() if name.startswith(("embedding.", "encoding.")))
    return sum(sizes.values()), sum(sizes.values()) - inputs


def init_params(config, seed=0):
    """The first weights of a run, {name: float32}, equal to those of model_torch.GPT(config, seed) in every bit."""
    rng, params = np.random.default_rng(seed), {}
    for name, shape in parameter_shapes(config).items():
        mean, std = config.initial(name)
        draw = rng.standard_normal(shape, dtype=np.float32) if std else np.float32(0)
        params[name] = np.broadcast_to(np.float32(mean) + np.float32(std) * draw, shape).copy()
    return params


def forward(params, tokens, config, positions=None, masks=None):
    """The logits (B, T, V) of integer tokens (B, T), and the cache of backward.

    positions: any integers, (T,) or (B, T); 0 .. T-1 if left out. masks: from dropout_masks; None for no dropout.
    Raises ValueError for a parameter that is missing, extra, or of a wrong shape or dtype; for tokens, positions or
    masks of a wrong shape or dtype, a token outside the vocabulary, and a position without a row.
    """
    dtype = check_params(params, config)
    check_tokens(tokens, "tokens", config)
    encoding, own = encoding_of(config), under("encoding.", params)
    table = encoding_table(encoding, *tokens.shape, positions, config, dtype)
    masks = check_masks(masks, *tokens.shape, config, dtype)

    x, cache_embedding = embedding_forward(tokens, params["embedding.weight"])    # (B, T, C)
    x, cache_embed = encoding.embed[0](x, table, own)
    x, mask = dropout_forward(x, next(masks))
    cache_blocks = []
    for i in range(config.n_layers):
        x, cache_block = block_forward(x, under(f"blocks.{i}.", params), config, encoding, table, own, masks)
        cache_blocks.append(cache_block)
    h, cache_norm = NORMS[config.norm][0](x, config.norm_eps, **under("norm.", params))
    logits, cache_head = linear_forward(h, params[output_name(config)])           # (B, T, V)
    return logits, (config, encoding, cache_embedding, cache_embed, mask, cache_blocks, cache_norm, cache_head)


def backward(dlogits, cache):
    """The gradient of every parameter, by name, from that of the logits (B, T, V): forward, read upwards.

    Raises ValueError for a gradient of another shape or dtype than the logits had.
    """
    config, encoding, cache_embedding, cache_embed, mask, cache_blocks, cache_norm, cache_head = cache
    h, w_output = cache_head
    shape, dtype = (*h.shape[:-1], len(w_output)), w_output.dtype
    if np.shape(dlogits) != shape or dlogits.dtype != dtype:
        raise InputError(f"dlogits must be {dtype} of {shape}, got {np.asarray(dlogits).dtype} of {np.shape(dlogits)}")
    dh, dw_output = linear_backward(dlogits, cache_head)
    dx, dnorm = NORMS[config.norm][1](dh, cache_norm)                             # (B, T, C)
    grads, downs = over("norm.", dnorm), []
    for i in reversed(range(config.n_layers)):
        dx, dblock, down = block_backward(dx, cache_blocks[i])
        grads |= over(f"blocks.{i}.", dblock)
        downs.append(down)
    dx = dropout_backward(dx, mask)
    dx, down = encoding.embed[1](dx, cache_embed)
    dw_embedding = embedding_backward(dx, cache_embedding)
    grads |= over("encoding.", summed(*downs, down))                              # every block shares its parameters
    grads = summed(grads, {output_name(config): dw_output}, {"embedding.weight": dw_embedding})   # one matrix if tied
    return {name: grads[name] for name in parameter_shapes(config)}


def loss_and_grads(params, tokens, targets, config, positions=None, masks=None):
    """(mean cross-entropy in nats, {name: gradient}). targets are integers (B, T) as tokens are; else as forward."""
    check_tokens(tokens, "tokens", config)
    check_tokens(targets, "targets", config, tokens.shape)
    logits, cache = forward(params, tokens, config, positions, masks)
    losses, cache_loss = cross_entropy_forward(logits.reshape(-1, config.vocab_size), targets.ravel())
    dlosses = np.full_like(losses, 1 / losses.size)                               # loss = mean(losses)
    dlogits = cross_entropy_backward(dlosses, cache_loss)
    return losses.mean(), backward(dlogits.reshape(logits.shape), cache)


def token_losses(params, tokens, targets, config, positions=None):
    """The cross-entropy of each target in nats, (B, T); arguments as loss_and_grads has them."""
    check_tokens(tokens, "tokens", config)
    check_tokens(targets, "targets", config, tokens.shape)
    logits, _ = forward(params, tokens, config, positions)
    losses, _ = cross_entropy_forward(logits.reshape(-1, config.vocab_size), targets.ravel())
    return losses.reshape(targets.shape)


def output_name(config):
    return "embedding.weight" if config.tied else "head.weight"


def dropout_masks(config, B, T, rng, dtype=np.float32):
    """The masks of one forward pass, drawn one after the other: for the embedding, then two in each block."""
    for _ in range(1 + 2 * config.n_layers):
        kept = rng.random((B, T, config.d_model), dtype=np.float32) >= config.dropout
        yield kept * np.dtype(dtype).type(1 / (1 - config.dropout))


def encoding_table(encoding, B, T, positions, config, dtype):
    """The encoding's rows for these positions: exact in float64, cast once."""
    n = np.arange(T) if positions is None else np.asarray(positions)
    if n.dtype.kind not in "iu" or n.shape not in ((T,), (B, T)):
        raise InputError(f"positions must be integers of shape ({T},) or ({B}, {T}), got {n.dtype} of {n.shape}")
    rows = encoding.rows(n, config)
    return rows.astype(dtype) if rows is not None and rows.dtype.kind == "f" else rows


def check_params(params, config):
    """The dtype of the params; InputError that names an entry which is not as the config makes it."""
    return check_arrays("params", params, parameter_shapes(config))


def check_arrays(what, arrays, shapes):
    """The one dtype of a dict of arrays; InputError for an entry that is missing, extra, or misshaped."""
    if not isinstance(arrays, dict):
        raise InputError(f"{what} must be a dict of NumPy arrays by name, got {type(arrays).__name__}")
    if not shapes:
        raise InputError(f"{what} is empty")
    if missing := [name for name in shapes if name not in arrays]:
        raise InputError(f"{what} lacks {missing[0]}, which should have the shape {shapes[missing[0]]}")
    dtypes = set()
    for name, array in arrays.items():
        if name not in shapes:
            raise InputError(f"{what} has an unknown entry {name}; it should have {', '.join(shapes)}")
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise InputError(f"{what}: {name} must be a NumPy array of float32 or float64, got {found}")
        if array.shape != shapes[name]:
            raise InputError(f"{what}: {name} must have the shape {shapes[name]}, got {array.shape}")
        dtypes.add(array.dtype)
    if len(dtypes) > 1:
        raise InputError(f"{what} must be float32 throughout or float64 throughout, got both")
    return dtypes.pop()


def check_tokens(tokens, name, config, shape=None):
    """InputError unless these are integers of the shape (B, T), or of the shape given, inside the vocabulary."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
        found = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise InputError(f"{name} must be a NumPy array of integers, got {found}")
    if tokens.ndim != 2 or tokens.size == 0 or tokens.shape != (shape or tokens.shape):
        raise InputError(f"{name} must have the shape {shape or '(B, T)'}, got {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise InputError(f"{name} must be from 0 to {config.vocab_size - 1}, got {wrong}")


def check_masks(masks, B, T, config, dtype):
    """An iterator over the masks of a forward pass, or over None; InputError for a wrong number, shape or dtype."""
    if masks is None:
        return itertools.repeat(None)
    masks = list(masks) if np.iterable(masks) else [masks]
    shape, number = (B, T, config.d_model), 1 + 2 * config.n_layers
    if len(masks) != number:
        raise InputError(f"masks must be {number}, one for the embedding and two for each block, got {len(masks)}")
    for mask in masks:
        if not isinstance(mask, np.ndarray) or mask.shape != shape or mask.dtype != dtype:
            found = getattr(mask, "dtype", type(mask).__name__)
            raise InputError(f"masks must be {dtype} of {shape}, got {found} of {np.shape(mask)}")
    return iter(masks)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def clip_grads(grads, limit):
    """Scale all gradients, in place, so that their joint norm is at most `limit`; returns the norm they had."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in grads.values()))
    scale = min(1.0, limit / (norm + 1e-6))                                       # as torch's clip_grad_norm_ has it
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

    Raises ValueError for a gradient or a moment that is missing, extra, or of another shape or dtype than it has to be.
    """
    dtype = check_state(state, params)
    found = check_arrays("grads", grads, {name: w.shape for name, w in params.items()})
    if found != dtype:
        raise InputError(f"grads must be of the params' dtype, {dtype}, got {found}")
    state["step"] += 1
    unbias1, unbias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
    for name, whole in params.items():
        decay = weight_decay if whole.ndim >= 2 else 0.0
        for rows in row_blocks(whole):
            w, g, m, v = whole[rows], grads[name][rows], state["m"][name][rows], state["v"][name][rows]
            m *= beta1
            m += (1 - beta1) * g
            v *= beta2
            v += (1 - beta2) * np.square(g)
            w *= 1 - lr * decay
            w -= (lr / unbias1) * m / (np.sqrt(v / unbias2) + eps)


def check_state(state, params):
    """The dtype of params and state; InputError unless the state is one of AdamW for such params."""
    if not isinstance(state, dict) or state.keys() != {"step", "m", "v"}:
        raise InputError("state must be as adamw_state makes it: a dict of step, m and v")
    if not isinstance(state["step"], int) or state["step"] < 0:
        raise InputError(f"state: step must be a whole number of at least 0, got {state['step']!r}")
    shapes = {name: w.shape for name, w in params.items()}
    named = {"params": params, "state m": state["m"], "state v": state["v"]}
    dtypes = [check_arrays(what, arrays, shapes) for what, arrays in named.items()]
    if len(set(dtypes)) > 1:
        raise InputError(f"params and state must be of one dtype, got {', '.join(map(str, dtypes))}")
    return dtypes[0]


def row_blocks(x, size=2**15):
    """Slices of rows that hold about `size` numbers, few enough to stay in a core's cache from one line to the next."""
    step = max(1, size * len(x) // x.size)
    return (slice(i, i + step) for i in range(0, len(x), step))


# ---- memory ----------------------------------------------------------------------------------------------------------


def keep_freed_memory():
    """Let this process keep the memory of arrays that it has freed, for the next step; for long runs, on Linux.

    glibc's malloc otherwise gives each large array back to the system, and the system clears every page that it hands
    out again: a fifth to a third of a training step. Elsewhere this does nothing.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3                                   # malloc.h
    with contextlib.suppress(OSError, TypeError, AttributeError):                 # no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
