import numpy as np


def layernorm(x, eps, weight, bias):
    mean = lambda y: y.mean(axis=-1, keepdims=True)  # noqa: E731
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    z = (x - mean(x)) * rstd

    def pullback(dout):
        dz = dout * weight
        dweight, dbias = (dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))
        return rstd * (dz - mean(dz) - z * mean(dz * z)), {"weight": dweight, "bias": dbias}

    return z * weight + bias, pullback
