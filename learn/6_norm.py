"""Exercise 6. The forward half of LayerNorm stands here. Write its pullback.

The mean and rstd of a row depend on each of its numbers, too. All arrays are float64, and the gradients must be.
Question: which two directions of a row of x get no gradient?
"""

import numpy as np


def layernorm(x, eps, weight, bias):
    """z weight + bias, z = (x - mean) rstd, by rows. x (B, T, C); weight and bias (C,)."""
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    z = (x - x.mean(axis=-1, keepdims=True)) * rstd

    def pullback(dout):
        """The gradients: (that of x, {"weight": that of weight, "bias": that of bias}). dout (B, T, C)."""
        raise NotImplementedError("return dx, {...}")

    return z * weight + bias, pullback
