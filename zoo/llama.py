"""The layers of Llama-style blocks in NumPy: --norm rmsnorm and --mlp swiglu."""

import numpy as np

import model_numpy


def rmsnorm(x, eps, weight):
    """z weight, z = x / sqrt(mean(x^2) + eps), by rows. x (..., C); weight (C,)."""
    rstd = 1 / np.sqrt(np.vecdot(x, x)[..., None] / x.shape[-1] + eps)            # (..., 1)
    z = x * rstd
    def pullback(dout):
        """As that of model_numpy.layernorm but for the mean: dx = rstd (dz - z mean(dz z))."""
        dweight = (dout * z).sum(tuple(range(dout.ndim - 1)))
        dz = dout * weight
        along_z = np.vecdot(dz, z)[..., None] / z.shape[-1]                       # (..., 1)
        return rstd * (dz - z * along_z), {"weight": dweight}
    return z * weight, pullback

def rmsnorm_parameters(config):
    return {"weight": model_numpy.constant((config.width,), 1)}

def swiglu(gate, up):
    """gate s up, s = sigmoid(gate). Any shape."""
    s = model_numpy.sigmoid(gate)
    def pullback(dout):
        """ds/dgate = s (1 - s), so dgate = dout up (s + gate s (1 - s)), dup = dout gate s."""
        return dout * up * s * (1 + gate * (1 - s)), dout * gate * s
    return gate * s * up, pullback

def swiglu_mlp(h, p):
    """W_down (silu(W_gate h) W_up h), silu(x) = x sigmoid(x) (Shazeer 2020). h (..., C)."""
    gate, pull_gate = model_numpy.linear(h, p["gate.weight"])                     # (..., mlp_width)
    up, pull_up = model_numpy.linear(h, p["up.weight"])                           # (..., mlp_width)
    a, pull_swiglu = swiglu(gate, up)
    out, pull_down = model_numpy.linear(a, p["down.weight"])
    def pullback(dout):
        """h gets a gradient by way of the gate, and one by way of up."""
        da, dw_down = pull_down(dout)
        dgate, dup = pull_swiglu(da)
        dh_up, dw_up = pull_up(dup)
        dh_gate, dw_gate = pull_gate(dgate)
        return dh_up + dh_gate, {"gate.weight": dw_gate, "up.weight": dw_up, "down.weight": dw_down}
    return out, pullback

def swiglu_mlp_parameters(config):
    gate = {"gate.weight": model_numpy.normal((config.mlp_width, config.width))}
    return gate | model_numpy.gelu_mlp_parameters(config)

NORMS = {"rmsnorm": (rmsnorm, rmsnorm_parameters)}
MLPS = {"swiglu": (swiglu_mlp, swiglu_mlp_parameters)}
