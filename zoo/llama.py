"""The layers of Llama-style blocks in NumPy, --norm rmsnorm and --mlp swiglu, as pairs of forward and backward."""

import numpy as np

import model_numpy


def rmsnorm_forward(x, eps, weight):
    """out = z weight, z = x / sqrt(mean(x^2) + eps), by rows. x (..., C); weight (C,)."""
    rstd = 1 / np.sqrt(np.vecdot(x, x)[..., None] / x.shape[-1] + eps)            # (..., 1)
    z = x * rstd
    return z * weight, (z, rstd, weight)

def rmsnorm_backward(dout, cache):
    """out = z weight, z = x rstd: as model_numpy.layernorm_backward but for the mean. dx = rstd (dz - z mean(dz z))."""
    z, rstd, weight = cache
    dweight = (dout * z).sum(tuple(range(dout.ndim - 1)))
    dz = dout * weight
    along_z = np.vecdot(dz, z)[..., None] / z.shape[-1]                           # (..., 1)
    return rstd * (dz - z * along_z), {"weight": dweight}

def swiglu_forward(gate, up):
    """out = gate s up, s = sigmoid(gate). Any shape."""
    s = model_numpy.sigmoid(gate)
    return gate * s * up, (gate, up, s)

def swiglu_backward(dout, cache):
    """out = gate s up and ds/dgate = s (1 - s), so dgate = dout up (s + gate s (1 - s)), dup = dout gate s."""
    gate, up, s = cache
    return dout * up * s * (1 + gate * (1 - s)), dout * gate * s

def swiglu_mlp_forward(h, p):
    """out = W_down (silu(W_gate h) W_up h), silu(x) = x sigmoid(x) (Shazeer 2020). h (..., C)."""
    gate, cache_gate = model_numpy.linear_forward(h, p["gate.weight"])                        # (..., mlp_width)
    up, cache_up = model_numpy.linear_forward(h, p["up.weight"])                              # (..., mlp_width)
    a, cache_swiglu = swiglu_forward(gate, up)
    out, cache_down = model_numpy.linear_forward(a, p["down.weight"])
    return out, (cache_gate, cache_up, cache_swiglu, cache_down)

def swiglu_mlp_backward(dout, cache):
    """out = W_down (silu(W_gate h) W_up h): h gets a gradient by way of the gate, and one by way of up."""
    cache_gate, cache_up, cache_swiglu, cache_down = cache
    da, dw_down = model_numpy.linear_backward(dout, cache_down)
    dgate, dup = swiglu_backward(da, cache_swiglu)
    dh_up, dw_up = model_numpy.linear_backward(dup, cache_up)
    dh_gate, dw_gate = model_numpy.linear_backward(dgate, cache_gate)
    return dh_up + dh_gate, {"gate.weight": dw_gate, "up.weight": dw_up, "down.weight": dw_down}

LAYERS = {"rmsnorm": (rmsnorm_forward, rmsnorm_backward), "swiglu": (swiglu_mlp_forward, swiglu_mlp_backward)}
