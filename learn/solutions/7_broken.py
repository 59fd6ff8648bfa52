import numpy as np


def find(layers):
    rng, e = np.random.default_rng(0), 1e-5
    for name, function, inputs in layers:
        out, pullback = function(*inputs)
        dout = rng.standard_normal(out.shape)
        for i, gradient in enumerate(pullback(dout)):
            d = rng.standard_normal(inputs[i].shape)
            high, low = (function(*inputs[:i], inputs[i] + step * d, *inputs[i + 1 :])[0] for step in (e, -e))
            if abs((dout * (high - low)).sum() / (2 * e) - (d * gradient).sum()) > 1e-6:
                return name
