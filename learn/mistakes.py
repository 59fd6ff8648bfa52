"""What check.py recognises: edits of the solutions, as (words, old text, new text), and exercise 7's ten layers."""

import numpy as np

import model_numpy
from zoo import llama

SUMS = '"p": dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))'                  # of zoo/kerple.py

MISTAKES = {
    1: [("start is left out", "start + ", ""),
        ("start is subtracted", "start + ", "-start + "),
        ("start is multiplied by theta", "start + theta * (", "theta * (start + ")],
    2: [("queries and keys exchanged: row m is that of query m", "q @ k.T", "k @ q.T"),
        ("the changes of scores. A softmax drops what all keys of a query share: compare weights",
         "e / e.sum(axis=1, keepdims=True)", "scores"),
        ("the changes of the scores that are seen. A softmax drops what all keys of a query share: compare weights",
         "e / e.sum(axis=1, keepdims=True)", "np.where(e > 0, scores, 0)"),
        ("exponentials that are not divided by their sum", " / e.sum(axis=1, keepdims=True)", ""),
        ("the softmax is over the queries, not over the keys", "axis=1, keep", "axis=0, keep"),
        ("later keys are not hidden from a query", " * np.tri(len(scores))", ""),
        ("the mask hides earlier keys, not later ones", "len(scores))", "len(scores)).T"),
        ("negative changes do not count: take absolute values", "np.abs", ""),
        ("positive changes do not count: take absolute values", "np.abs(weights(after) - weights(before))",
         "(weights(before) - weights(after))"),
        ("the mean of the changes, not the largest", ".max()", ".mean()")],
    3: [("the other sign: a positive slope lowers the scores of far keys", "return q", "return -q"),
        ("theta is left out", "theta * wk", "wk"),
        ("theta is applied twice", "theta * wk", "theta * theta * wk"),
        ("the division by sqrt(D) is left out", " / np.sqrt(q.shape[1])", ""),
        ("the division is by D, not by sqrt(D)", "np.sqrt(q.shape[1])", "q.shape[1]"),
        ("the mean of the columns of wk, not their sum", "sum(axis=1)", "mean(axis=1)"),
        ("the first column of wk alone", ":l].sum(axis=1)", "0]"),
        ("the last l columns of wk, not the first", ":l]", "-l:]"),
        ("all columns of wk, not the first l", ":l]", ":]"),
        ("off by one: columns 1 to l of wk, not 0 to l - 1", ":l]", "1 : l + 1]"),
        ("off by one: l + 1 columns of wk", ":l]", ": l + 1]"),
        ("off by one: l - 1 columns of wk", ":l]", ": l - 1]"),
        ("columns of wq, not of wk", "theta * wk", "theta * wq"),
        ("keys in the place of queries", "q = x @ wq", "q = x @ wk"),
        ("columns times j, but theta j is the same for all keys", ":l].sum(axis=1)", ":l] @ np.arange(l)")],
    4: [("pairs that are read as (2i, 2i + 1) and written as (i, i + D/2)",
         "np.split(x, 2, axis=-1)", "x[..., ::2], x[..., 1::2]"),
        ("a sin has the wrong sign in b cos + a sin", "b * cos + a", "b * cos - a"),
        ("b cos has the wrong sign in b cos + a sin", "b * cos + a", "-b * cos + a"),
        ("b sin has the wrong sign in a cos - b sin", "a * cos - b", "a * cos + b"),
        ("a and b are exchanged in b cos + a sin", "b * cos + a * sin", "a * cos + b * sin"),
        ("the halves are in the other order", "(a * cos - b * sin, b * cos + a * sin)",
         "(b * cos + a * sin, a * cos - b * sin)")],
    5: [("low is not rounded down", "np.floor(p(32))", "p(32)"),
        ("high is not rounded up", "np.ceil(p(1))", "p(1)"),
        ("floor and ceil are exchanged", "floor(p(32)), 0), min(np.ceil", "ceil(p(32)), 0), min(np.floor"),
        ("the ramp is not clipped to 0 and 1", "np.clip((i - low) / (high - low), 0, 1)", "(i - low) / (high - low)"),
        ("2 pi is left out of p", "(2 * np.pi * t)", "t"),
        ("p is not divided by 2 ln base", "(2 * np.log(base))", "1"),
        ("p is divided by ln base, not by 2 ln base", "(2 * np.log(base))", "np.log(base)"),
        ("a blend of wavelengths, not of frequencies", "g * (1 - r + r / factor)", "g / (1 - r + r * factor)")],
    6: [("the gradient through the mean is left out", "dz - mean(dz)", "dz"),
        ("the gradient through rstd is left out", " - z * mean(dz * z)", ""),
        ("the gradients through the mean and through rstd are left out", " - mean(dz) - z * mean(dz * z)", ""),
        ("the gradient through rstd has the other sign", "- z * mean", "+ z * mean"),
        ("the gradient through the mean has the other sign", "- mean(dz) ", "+ mean(dz) "),
        ("the weight is left out: dz is dout weight", "dz = dout * weight", "dz = dout"),
        ("rstd is left out", "rstd * (dz", "(dz"),
        ("a division by rstd, which is a factor", "rstd * (dz", "1 / rstd * (dz"),
        ("the second mean is of dz, not of dz z", "z * mean(dz * z)", "z * mean(dz)"),
        ("the second mean is not multiplied by z", "z * mean(dz * z)", "mean(dz * z)"),
        ("sums over C, not means", "y.mean", "y.sum"),
        ("means over tokens, not over a row", "y.mean(axis=-1", "y.mean(axis=1"),
        ("nothing is summed over batch and tokens", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))",
         "dout * z, dout"),
        ("the sum over the batch is left out", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))",
         "(dout * z).sum(axis=1), dout.sum(axis=1)"),
        ("the sum over the tokens is left out", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))",
         "(dout * z).sum(axis=0), dout.sum(axis=0)"),
        ("means over batch and tokens, not sums", "(dout * z).sum(axis=(0, 1)), dout.sum",
         "(dout * z).mean(axis=(0, 1)), dout.mean"),
        ("x in the place of z", "(dout * z).sum", "(dout * x).sum"),
        ("z is left out", "(dout * z).sum", "dout.sum"),
        ("the gradients of weight and bias are exchanged", '{"weight": dweight, "bias": dbias}',
         '{"weight": dbias, "bias": dweight}')],
    8: [("dp/dP = p is left out", "dbias * bias,", "dbias * bias / p,"),
        ("p is a factor once too often", "dbias * bias,", "dbias * bias * p,"),
        ("dP has the other sign", "dbias * bias,", "-dbias * bias,"),
        ("da/dA = a is left out", "(-p * (a * table)", "(-p * table"),
        ("dA has the other sign", "(-p * (a", "(p * (a"),
        ("p is left out", "(-p * (a", "(-(a"),
        ("the distance is left out", "(a * table) / (1", "a / (1"),
        ("the derivative of the logarithm, 1 / (1 + a d), is left out", " / (1 + a * table))", ")"),
        ("the derivative of the logarithm is taken for 1 / (a d)", "(a * table) / (1 + a * table)", "1"),
        ("the sum over the batch is left out", SUMS, '"p": dp.sum((2, 3)), "a": da.sum((2, 3))'),
        ("the sum over the pairs is left out", SUMS, '"p": dp.sum(0), "a": da.sum(0)'),
        ("the sum is over the heads, too", SUMS, '"p": dp.sum(), "a": da.sum()'),
        ("means, not sums", SUMS, '"p": dp.mean((0, 2, 3)), "a": da.mean((0, 2, 3))'),
        ("the gradients of P and A are exchanged", SUMS, '"a": dp.sum((0, 2, 3)), "p": da.sum((0, 2, 3))')],
}

# ---- exercise 7 ------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
TOKENS = np.array([0, 3, 3, 5])
TARGETS = np.array([1, 0, 5, model_numpy.IGNORED])
TABLE = RNG.standard_normal((4, 2))

def last_wins(grads, dout, w):
    dw = np.zeros_like(w)
    dw[TOKENS] = dout                                                   # where tokens are equal, the last one counts
    return [dw]

def ignore_nothing(grads, dout, logits):
    return model_numpy.cross_entropy(logits, np.where(TARGETS < 0, 0, TARGETS))[1](dout.copy()),

# name: (function, shapes of its inputs, how its list of gradients is broken, what to do if that is missed)
LAYERS = {
    "gelu": (model_numpy.gelu, [(4, 6)], lambda g, dout, x: [g[0] + 1e-4 * dout * x],
             "Its gradient is off by 1e-4: how much error do you allow?"),
    "linear": (model_numpy.linear, [(4, 6), (5, 6)], lambda g, *_: [g[0], -g[1]],
               "Its second gradient is wrong alone: look at each input."),
    "softmax": (lambda s: model_numpy.softmax(s, {}), [(4, 6)], lambda g, *_: [-g[0]],
                "The sum of its outputs is always 1: weigh them with random numbers, the dout of its pullback."),
    "cross_entropy": (lambda z: model_numpy.cross_entropy(z, TARGETS), [(4, 6)], ignore_nothing,
                      "The last row of its gradient is wrong alone: move all numbers, in a random direction."),
    "layernorm": (lambda x, w, b: model_numpy.layernorm(x, 1e-5, w, b), [(4, 6), (6,), (6,)],
                  lambda g, dout, *_: [*g[:2], g[2] / len(dout)], "Its third gradient is a mean and should be a sum."),
    "rmsnorm": (lambda x, w: llama.rmsnorm(x, 1e-5, w), [(4, 6), (6,)],
                lambda g, dout, x, w: [dout * w / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), g[1]],
                "Its first gradient lacks the part through the row's size."),
    "swiglu": (llama.swiglu, [(4, 6), (4, 6)], lambda g, *_: g[::-1], "Its two gradients are exchanged."),
    "embedding": (lambda w: model_numpy.embedding(TOKENS, w), [(7, 3)], last_wins,
                  "Tokens that occur twice get one gradient: move all numbers, in a random direction."),
    "weighted_sum": (lambda p, v: model_numpy.weighted_sum(p, v, None, {}), [(1, 2, 4, 4), (1, 2, 4, 3)],
                     lambda g, dout, p, v: [g[0], p @ dout], "Its second gradient is p dy, not p^T dy."),
    "phi": (lambda h: model_numpy.phi(h, TABLE, {}), [(4, 6)], lambda g, dout, h: [dout],
            "What it overrides must get no gradient."),
}

def layer(name, broken):
    """(name, function, inputs): the function's pullback returns a list, and nothing that came in is changed."""
    compute, shapes, edit, _ = LAYERS[name]

    def function(*inputs):
        def pullback(dout):
            grads = compute(*(x.copy() for x in inputs))[-1](dout.copy())
            grads = grads if isinstance(grads, tuple) else (grads,)
            grads = [g for part in grads for g in (part.values() if isinstance(part, dict) else [part])]
            return edit(grads, dout, *inputs) if name == broken else grads
        return compute(*(x.copy() for x in inputs))[0], pullback

    return name, function, [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]
