"""Exercise 7's layers, and the ways in which a pullback of theirs can be wrong."""

import numpy as np

import model_numpy
from zoo import llama

TOKENS = np.array([0, 3, 3, 5])
TARGETS = np.array([1, 0, 5, model_numpy.IGNORED])
TABLE = np.random.default_rng(3).standard_normal((4, 2))

# name: (function, shapes of its inputs)
LAYERS = {
    "gelu": (model_numpy.gelu, [(4, 6)]),
    "linear": (model_numpy.linear, [(4, 6), (5, 6)]),
    "softmax": (lambda s: model_numpy.softmax(s, {}), [(4, 6)]),
    "cross_entropy": (lambda z: model_numpy.cross_entropy(z, TARGETS), [(4, 6)]),
    "layernorm": (lambda x, w, b: model_numpy.layernorm(x, 1e-5, w, b), [(4, 6), (6,), (6,)]),
    "rmsnorm": (lambda x, w: llama.rmsnorm(x, 1e-5, w), [(4, 6), (6,)]),
    "swiglu": (llama.swiglu, [(4, 6), (4, 6)]),
    "embedding": (lambda w: model_numpy.embedding(TOKENS, w), [(7, 3)]),
    "weighted_sum": (lambda p, v: model_numpy.weighted_sum(p, v, None, {}), [(1, 2, 4, 4), (1, 2, 4, 3)]),
    "phi": (lambda h: model_numpy.phi(h, TABLE, {}), [(4, 6)]),
}
NUMBERS = "first", "second", "third"

def last_wins(grads, dout, w):
    dw = np.zeros_like(w)
    dw[TOKENS] = dout                                                   # where tokens are equal, the last one counts
    return [dw]

def ignore_nothing(grads, dout, logits):
    return model_numpy.cross_entropy(logits, np.where(TARGETS < 0, 0, TARGETS))[1](dout.copy()),

# (layer, how its list of gradients is broken, what is wrong with them)
OWN_MISTAKES = [
    ("gelu", lambda g, dout, x: [g[0] + 1e-3 * dout * x],
     "Its gradient is off by about 1e-3."),
    ("linear", lambda g, *_: [g[0], -g[1]], "Its second gradient alone has the wrong sign."),
    ("softmax", lambda g, *_: [-g[0]], "Its gradient has the wrong sign."),
    ("cross_entropy", ignore_nothing, "The last row of its gradient alone is wrong."),
    ("layernorm", lambda g, dout, *_: [*g[:2], g[2] / len(dout)], "Its third gradient is a mean and should be a sum."),
    ("rmsnorm", lambda g, dout, x, w: [dout * w / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), g[1]],
     "Its first gradient lacks the part through the row's size."),
    ("swiglu", lambda g, *_: g[::-1], "Its two gradients are exchanged."),
    ("embedding", last_wins, "A token that occurs twice gets one gradient."),
    ("weighted_sum", lambda g, dout, p, v: [g[0], p @ dout], "Its second gradient is p dy, not p^T dy."),
    ("phi", lambda g, dout, h: [dout], "What it overrides must get no gradient."),
]

def negate(g):
    return -g

def enlarge(g):
    return 1.1 * g

def drop_the_largest(g):
    g = g.copy()
    g.flat[np.abs(g).argmax()] = 0
    return g

def exchange_two(g):
    g = g.copy()
    i, j = g.argmax(), g.argmin()
    g.flat[i], g.flat[j] = g.flat[j], g.flat[i]
    return g

def add_to_the_last(g):
    g = g.copy()
    g.flat[-1] += 0.5
    return g

ANY_MISTAKES = {                                                        # of any gradient
    negate: "has the wrong sign", enlarge: "is too large by a tenth",
    drop_the_largest: "has one number that is 0 and should not be", exchange_two: "has two numbers exchanged",
    add_to_the_last: "has a wrong last number"}

def mistakes():
    """[(layer, how its list of gradients is broken, what is wrong with them)]: own ones, then those of any."""
    every = list(OWN_MISTAKES)
    for name, (_, shapes) in LAYERS.items():
        for i in range(len(shapes)):
            for edit, words in ANY_MISTAKES.items():
                every.append((name, lambda g, *_, i=i, edit=edit: [*g[:i], edit(g[i]), *g[i + 1 :]],
                              f"Its {NUMBERS[i]} gradient {words}."))
    return every

def layer(name, edit=None):
    """(name, function, inputs): the pullback returns a list, which edit breaks; nothing that came in is changed."""
    compute, shapes = LAYERS[name]

    def function(*inputs):
        def pullback(dout):
            dout = np.array(dout, float)
            grads = compute(*(x.copy() for x in inputs))[-1](dout.copy())
            grads = grads if isinstance(grads, tuple) else (grads,)
            grads = [g for part in grads for g in (part.values() if isinstance(part, dict) else [part])]
            return list(edit(grads, dout, *inputs)) if edit else grads

        inputs = [np.array(x, float) for x in inputs]
        return compute(*(x.copy() for x in inputs))[0], pullback

    return name, function, [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]
