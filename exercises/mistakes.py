"""What check.py recognises: edits of the solutions, as (words, old text, new text), and exercise 7's ten layers."""

import numpy as np

import model_numpy
from zoo import llama

MISTAKES = {
    1: [("start is left out", "start + ", ""), ("start is subtracted", "start + ", "-start + "),
        ("start is multiplied by theta", "start + theta * (", "theta * (start + ")],
    2: [("the change of a score. All keys of a query share a part of it, which the softmax drops: compare weights",
         "e / e.sum(axis=1, keepdims=True)", "scores"),
        ("the change of a score that is seen, a part of which the softmax drops: compare weights",
         "e / e.sum(axis=1, keepdims=True)", "np.where(e > 0, scores, 0)"),
        ("exponentials that are not divided by their sum", " / e.sum(axis=1, keepdims=True)", ""),
        ("the softmax is over the queries, not over the keys", "axis=1, keep", "axis=0, keep"),
        ("later keys are not hidden from a query", " * np.tri(len(scores))", ""),
        ("the mask hides earlier keys, not later ones", "len(scores))", "len(scores)).T"),
        ("the signs of the changes are kept, so that weights that fall do not count", "np.abs", ""),
        ("the signs of the changes are kept, so that weights that grow do not count", "np.abs", "-1 * "),
        ("the mean of the changes, not the largest", ".max()", ".mean()")],
    3: [("the other sign: a positive slope lowers the scores of far keys", "return q", "return -q"),
        ("theta is left out", "theta * wk", "wk"), ("theta is applied twice", "theta * wk", "theta * theta * wk"),
        ("the division by sqrt(D) is left out", " / np.sqrt(q.shape[1])", ""),
        ("the division is by D, not by sqrt(D)", "np.sqrt(q.shape[1])", "q.shape[1]"),
        ("the mean of the columns of wk, not their sum", "sum(axis=1)", "mean(axis=1)"),
        ("the first column of wk alone", ":l].sum(axis=1)", "0]"),
        ("the last l columns of wk, not the first", ":l]", "-l:]"),
        ("all columns of wk, not the first l", ":l]", ":]"),
        ("off by one: l + 1 columns of wk", ":l]", ": l + 1]"), ("off by one: l - 1 columns of wk", ":l]", ": l - 1]"),
        ("columns of wq, not of wk", "theta * wk", "theta * wq"), ("keys in the place of queries", "q = x @ wq", "q = x @ wk"),
        ("the columns are weighed by j, but theta j is the same for all keys", ":l].sum(axis=1)", ":l] @ np.arange(l)")],
    6: [("the gradient through the mean is left out", "dz - along_1", "dz"),
        ("the gradient through rstd is left out", " - along_z)", ")"),
        ("the gradients through the mean and through rstd are left out", " - along_1 - along_z)", ")"),
        ("the gradient through rstd has the other sign", "- along_z", "+ along_z"),
        ("the gradient through the mean has the other sign", "- along_1", "+ along_1"),
        ("the weight is left out: dz is dout weight", "dz = dout * weight", "dz = dout"),
        ("rstd is left out", "rstd * (dz", "(dz"), ("a division by rstd, which is a factor", "rstd * (dz", "1 / rstd * (dz"),
        ("the mean is of dz, not of dz z", "(dz * z).mean", "dz.mean"),
        ("z is no factor of its part of dx", "z * (dz * z).mean", "(dz * z).mean"),
        ("there are sums over C, not means", "dz.mean(axis=-1, keepdims=True)\n        along_z = z * (dz * z).mean",
         "dz.sum(axis=-1, keepdims=True)\n        along_z = z * (dz * z).sum"),
        ("the means are over tokens, not over a row", "dz.mean(axis=-1, keepdims=True)\n        along_z = z * (dz * z).mean(axis=-1",
         "dz.mean(axis=1, keepdims=True)\n        along_z = z * (dz * z).mean(axis=1"),
        ("nothing is summed over batch and tokens", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))", "dout * z, dout"),
        ("the sum over the batch is left out", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))",
         "(dout * z).sum(axis=1), dout.sum(axis=1)"),
        ("the sum over the tokens is left out", "(dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))",
         "(dout * z).sum(axis=0), dout.sum(axis=0)"),
        ("there are means over batch and tokens, not sums", "(dout * z).sum(axis=(0, 1)), dout.sum(", "(dout * z).mean(axis=(0, 1)), dout.mean("),
        ("x in the place of z", "(dout * z).sum", "(dout * x).sum"), ("z is left out", "(dout * z).sum", "dout.sum"),
        ("the gradients of weight and bias are exchanged", '"weight": dweight, "bias": dbias', '"weight": dbias, "bias": dweight')],
    8: [("dp/dP = p is left out", "dbias * bias,", "dbias * bias / p,"), ("the other sign", "dbias * bias,", "-dbias * bias,"),
        ("p is a factor once too often", "dbias * bias,", "dbias * bias * p,"),
        ("da/dA = a is left out", "(-p * (a * table)", "(-p * table"), ("the other sign", "(-p * (a", "(p * (a"),
        ("p is left out", "(-p * (a", "(-(a"), ("the distance is left out", "(a * table) / (1", "a / (1"),
        ("the derivative of the logarithm, 1 / (1 + a d), is left out", " / (1 + a * table))", ")"),
        ("the derivative of the logarithm is taken for 1 / (a d)", "(a * table) / (1 + a * table)", "1"),
        ("the sum over the batch is left out", 'dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))', 'dp.sum((2, 3)), "a": da.sum((2, 3))'),
        ("the sum over the pairs is left out", 'dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))', 'dp.sum(0), "a": da.sum(0)'),
        ("the sum over the heads has made one number of two", 'dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))', 'dp.sum(), "a": da.sum()'),
        ("there are means, not sums", 'dp.sum((0, 2, 3)), "a": da.sum(', 'dp.mean((0, 2, 3)), "a": da.mean('),
        ("the gradients of P and A are exchanged", '"p": dp.sum((0, 2, 3)), "a": da', '"a": dp.sum((0, 2, 3)), "p": da')],
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
    "linear": (model_numpy.linear, [(4, 6), (5, 6)], lambda g, *_: [g[0], -g[1]],
               "Its second gradient is wrong alone: look at each input"),
    "softmax": (lambda s: model_numpy.softmax(s, {}), [(4, 6)], lambda g, *_: [-g[0]],
                "The sum of its outputs is always 1: weigh them with random numbers, the dout of its pullback"),
    "gelu": (model_numpy.gelu, [(4, 6)], lambda g, dout, x: [g[0] + 1e-4 * dout * x],
             "Its gradient is off by 1e-4: how much error do you allow?"),
    "cross_entropy": (lambda z: model_numpy.cross_entropy(z, TARGETS), [(4, 6)], ignore_nothing,
                      "The last row of its gradient is wrong alone: move all numbers, in a random direction"),
    "layernorm": (lambda x, w, b: model_numpy.layernorm(x, 1e-5, w, b), [(4, 6), (6,), (6,)],
                  lambda g, dout, *_: [*g[:2], g[2] / len(dout)], "Its third gradient is a mean and should be a sum"),
    "rmsnorm": (lambda x, w: llama.rmsnorm(x, 1e-5, w), [(4, 6), (6,)],
                lambda g, dout, x, w: [dout * w / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), g[1]],
                "Its first gradient lacks the part through the row's size"),
    "swiglu": (llama.swiglu, [(4, 6), (4, 6)], lambda g, *_: g[::-1], "Its two gradients are exchanged"),
    "embedding": (lambda w: model_numpy.embedding(TOKENS, w), [(7, 3)], last_wins,
                  "Tokens that occur twice get one gradient: move all numbers, in a random direction"),
    "weighted_sum": (lambda p, v: model_numpy.weighted_sum(p, v, None, {}), [(1, 2, 4, 4), (1, 2, 4, 3)],
                     lambda g, dout, p, v: [g[0], p @ dout], "Its second gradient is p dy, not p^T dy"),
    "phi": (lambda h: model_numpy.phi(h, TABLE, {}), [(4, 6)], lambda g, dout, h: [dout],
            "What it overrides must get no gradient"),
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
