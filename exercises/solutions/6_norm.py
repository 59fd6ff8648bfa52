"""No gradient lies along (1, 1, ..., 1), since a shift of x changes nothing, and (up to eps) along z, since a scale does

not. The pullback takes both parts out.
"""

import numpy as np


def layernorm(x, eps, weight, bias):
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    z = (x - x.mean(axis=-1, keepdims=True)) * rstd

    def pullback(dout):
        dz = dout * weight
        along_1 = dz.mean(axis=-1, keepdims=True)
        along_z = z * (dz * z).mean(axis=-1, keepdims=True)
        dweight, dbias = (dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))
        return rstd * (dz - along_1 - along_z), {"weight": dweight, "bias": dbias}

    return z * weight + bias, pullback
