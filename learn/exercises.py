"""What is right in each exercise: check_N(module) raises judge.Wrong, or returns what the right answer shows.

The right numbers are those of the project's own functions, in float64. No two axes of a case have the same length, and
every parameter differs from case to case.
"""

import contextlib
import sys
from unittest.mock import patch

import numpy as np

import expe
import model_numpy
import positional_encodings
from learn import layers
from learn.judge import Raised, Task, Wrong, as_array, call, items, judge, member, named, read, same
from longer.scaling import scaled_inv_freq

DOUBLE = 2.0**-36                                                       # of what must be float64, with room for sums

def randoms(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]

def positions_of(seed, high, *shape):
    """Integers from 0 to high in any order, with repeats."""
    return np.random.default_rng(seed).integers(0, high + 1, shape)

# ---- 1: ExPE's row ---------------------------------------------------------------------------------------------------

def check_1(mine):
    cases = [
        dict(positions=np.arange(5), l=3, start=0.5, theta=0.125),
        dict(positions=positions_of(1, 300, 2, 7), l=6, start=-1.3, theta=0.01),
        dict(positions=positions_of(2, 40, 3, 2, 4), l=1, start=2.0, theta=-0.7),
        dict(positions=positions_of(4, 5000, 4, 3), l=24, start=1.0, theta=64 / 512),
        dict(positions=positions_of(3, 10**6, 6), l=9, start=0.0, theta=1 / 2048),
        dict(positions=positions_of(5, 9, 1), l=2, start=-0.25, theta=3.0),
        dict(positions=positions_of(6, 300, 2, 7), l=6, start=-1.3, theta=0.01)]        # as the second, elsewhere
    judge(1, mine, Task(
        cases,
        lambda module, **case: {"row": as_array(call(member(module, "row"), *case.values()), "row")},
        lambda positions, l, start, theta: {"row": (
            expe.expe_table(positions, l, start, theta), abs(start) + abs(theta) * (positions[..., None] + l))},
        lambda case, output, index: f" at position {case['positions'][index[:-1]]}"))
    rows = as_array(call(mine.row, np.array([4, 5]), 8, 0.0, 0.5), "row")
    shared = np.isclose(rows[0][:, None], rows[1]).sum()
    return f"The rows of two neighbours share {shared} of their {rows.shape[1]} numbers."

# ---- 2 and 3: a shift, and the slope ---------------------------------------------------------------------------------

def check_2(mine):
    cases = []
    for seed, (T, C, D, l) in enumerate([(6, 8, 4, 3), (5, 7, 3, 7), (4, 9, 6, 1), (7, 5, 2, 4)]):
        x, wq, wk, rows = randoms(seed, (T, C), (D, C), (D, C), (T, l))
        cases += [dict(x=x, wq=wq, wk=wk, rows=rows, on=on) for on in ("k", "qk")]

    def right_scores(x, wq, wk, rows, on):
        phi = model_numpy.phi(x, rows, {})[0]
        q, k = ((phi if name in on else x, w) for name, w in (("q", wq), ("k", wk)))
        divisor = np.sqrt(len(wq))
        size = np.abs(q[0]) @ np.abs(wq).T @ (np.abs(k[0]) @ np.abs(wk).T).T / divisor
        return {"scores": ((q[0] @ wq.T) @ (k[0] @ wk.T).T / divisor, size)}

    judge(2, mine, Task(
        cases, lambda module, **case: {"scores": as_array(call(member(module, "scores"), *case.values()), "scores")},
        right_scores))

    def weights(scores):
        masked = np.where(np.tri(len(scores)) > 0, scores, -np.inf)
        return model_numpy.softmax(masked.copy(), {})[0]

    pairs = [randoms(seed, (T, T), (T, T)) for seed, T in enumerate((6, 3, 5, 8, 2, 4, 7, 5))]
    judge(2, mine, Task(
        [dict(before=3 * a, after=b) for a, b in pairs],
        lambda module, **case: {"largest change": as_array(call(member(module, "largest_change"), *case.values()),
                                                           "largest change")},
        lambda before, after: {"largest change": (np.abs(weights(after) - weights(before)).max(),
                                                  1 + max(np.abs(before).max(), np.abs(after).max()))}))
    x, wq, wk = randoms(9, (6, 8), (4, 8), (4, 8))
    changes = []
    for on in ("k", "qk"):
        here, moved = (call(mine.scores, x, wq, wk, expe.expe_table(np.arange(6) + first, 3, 0, 1 / 32), on)
                       for first in (0, 32))
        change = call(mine.largest_change, as_array(here, "scores"), as_array(moved, "scores"))
        changes.append(as_array(change, "largest change").item())
    return "If this text moves by 32 positions, no weight of ExPE-K changes by more than {:.0e}, and one of ExPE's " \
           "changes by {:.1f}.".format(*changes)

def check_3(mine):
    cases = []
    for seed, (T, C, D, l, theta) in enumerate([(6, 8, 4, 3, 0.3), (3, 7, 5, 1, -0.8), (5, 6, 2, 6, 0.02),
                                                (1, 9, 3, 5, 1.5), (4, 5, 7, 2, 0.125)]):
        x, wq, wk = randoms(seed, (T, C), (D, C), (D, C))
        cases.append(dict(x=x, wq=wq, wk=wk, l=l, theta=theta))

    def measured(x, wq, wk, l, theta):
        """By how much the score of a key grows if it moves one position nearer, whatever the key."""
        far, near = (model_numpy.phi(x, expe.expe_table(np.arange(len(x)) + n, l, 0, theta), {})[0] @ wk.T
                     for n in (0, 1))
        slope = ((x @ wq.T) * (near - far)).sum(1) / np.sqrt(len(wq))
        return {"slopes": (slope, abs(theta) * np.abs(x) @ np.abs(wq).T @ np.abs(wk[:, :l]).sum(1))}

    judge(3, mine, Task(
        cases, lambda module, **case: {"slopes": as_array(call(member(module, "slopes"), *case.values()), "slopes")},
        measured, lambda case, output, index: f" of the query at position {index[0]}"))
    slopes = as_array(call(mine.slopes, *cases[0].values()), "slopes")
    return (f"The slopes of the first text's six queries are {', '.join(f'{slope:.2f}' for slope in slopes)}: some are "
            "negative.")

# ---- 4 and 5: RoPE and YaRN ------------------------------------------------------------------------------------------

def check_4(mine):
    cases = []
    for seed, (B, H, T, D, base, high) in enumerate([(2, 3, 5, 8, 1e4, 20), (3, 2, 4, 6, 50.0, 500),
                                                     (1, 4, 3, 10, 5e5, 3000), (4, 1, 6, 2, 777.0, 60),
                                                     (2, 5, 1, 4, 3.0, 200), (3, 2, 7, 16, 1e6, 10**5),
                                                     (3, 2, 4, 6, 50.0, 500)]):               # as the second, elsewhere
        q, k = randoms(seed, (B, H, T, D), (B, H, T, D))
        cases.append(dict(q=q, k=k, positions=positions_of(seed, high, B, T), base=base))

    def run(module, q, k, positions, base):
        rotated = call(member(module, "rotate"), q, k, positions, {"rope_type": "default", "rope_theta": base})
        if getattr(rotated, "ndim", 0) == q.ndim + 1:                   # both in one array
            rotated = tuple(rotated)
        return items(rotated, ("q", "k"), "q and k")

    def right(q, k, positions, base):
        table = expe.rope_table(positions, q.shape[-1], base)[:, None]
        exact = 1 + positions[:, None, :, None]                         # an angle is rounded as its position
        rotated = model_numpy.rope_rotate(q, k, table, {})[:2]
        return {name: (y, exact * np.abs(x).max()) for name, y, x in zip("qk", rotated, (q, k), strict=True)}

    judge(4, mine, Task(cases, run, right, lambda case, output, index:
                        f" at position {case['positions'][index[0], index[2]]}"))
    q, k = randoms(7, (1, 1, 1, 8), (1, 1, 1, 8))

    def score(m, n):
        return np.sum(run(mine, q, k, np.array([[m]]), 1e4)["q"] * run(mine, q, k, np.array([[n]]), 1e4)["k"])

    return (f"The score of q at 5 and k at 3 is {score(5, 3):.6f}, that of q at 105 and k at 103 is "
            f"{score(105, 103):.6f}, and that of q at 5 and k at 4 is {score(5, 4):.6f}.")

def yarn_cases():
    """One for each clamp, and random ones whose rounded pairs are not near an integer."""
    cases = [dict(base=1e4, factor=4.0, L=4096, D=64),
             dict(base=1e4, factor=8.0, L=4096, D=64), dict(base=1e4, factor=8.0, L=2048, D=64),
             dict(base=1e4, factor=2.0, L=100, D=16),                   # p(32) is below 0
             dict(base=10.0, factor=3.0, L=900, D=8),                   # p(1) is above D - 1
             dict(base=3.0, factor=8.0, L=60, D=4),                     # both
             dict(base=100.0, factor=16.0, L=2000, D=256)]              # p(32), p(33) and p(31) differ by almost 1
    rng = np.random.default_rng(5)
    while len(cases) < 13:
        case = dict(base=float(np.rint(np.exp(rng.uniform(3, 14)))), factor=round(rng.uniform(1.5, 40), 1),
                    L=int(np.exp(rng.uniform(6, 12))), D=int(2 * rng.integers(4, 65)))
        first, last = (case["D"] * np.log(case["L"] / (2 * np.pi * t)) / (2 * np.log(case["base"])) for t in (32, 1))
        if min(abs(p - round(p)) for p in (first, last)) > 0.02 and first < case["D"] / 2 - 1:
            cases.append(case)
    return cases

def check_5(mine):
    def run(module, base, factor, L, D):
        parameters = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": L}
        return named(call(member(module, "frequencies"), parameters, D), ("inv_freq", "attention_factor"),
                     "a dict with 'inv_freq' and 'attention_factor'")

    def right(base, factor, L, D):
        inv_freq, attention_factor = scaled_inv_freq(D, base, "yarn", factor, L)
        return {"inv_freq": (inv_freq, 4 * inv_freq), "attention_factor": (np.array(attention_factor), 2)}

    judge(5, mine, Task(yarn_cases(), run, right))
    stretched = run(mine, 1e4, 4.0, 4096, 64)["inv_freq"] / expe.rope_inv_freq(64, 1e4)
    kept, divided = (np.isclose(stretched, factor).sum() for factor in (1, 1 / 4))
    return (f"Of the 32 pairs of a head of 64, {kept} keep their frequency if 4,096 tokens are stretched by 4, "
            f"{divided} turn a quarter as fast, and the others are in between.")

# ---- 6 and 7: gradients ----------------------------------------------------------------------------------------------

def check_6(mine):
    cases = []
    for seed, (B, T, C, eps, scale) in enumerate([(2, 3, 5, 1e-5, 1.0), (1, 4, 8, 0.3, 2.0), (3, 1, 7, 1e-5, 0.003),
                                                  (4, 2, 6, 1e-3, 0.05), (5, 3, 2, 0.02, 1.0)]):
        x, dout, weight, bias = randoms(seed, (B, T, C), (B, T, C), C, C)
        cases.append(dict(x=scale * x + 2, eps=eps, weight=weight, bias=bias, dout=dout))

    def run(module, x, eps, weight, bias, dout):
        made = call(member(module, "layernorm"), x, eps, weight, bias)
        if not isinstance(made, tuple) or len(made) != 2:
            raise Wrong("layernorm must return its output and its pullback.")
        call(module.layernorm, 3 * x, eps, weight, bias)                # a model has many of them
        made_dx = call(made[1], dout)
        if not isinstance(made_dx, tuple | list) or len(made_dx) != 2:
            raise Wrong('pullback must return dx and a dict, {"weight": ..., "bias": ...}.')
        grads = named(made_dx[1], ("weight", "bias"), 'dx and {"weight": ..., "bias": ...}')
        return {"out": as_array(made[0], "out"), "dx": as_array(made_dx[0], "dx"),
                "dweight": grads["weight"], "dbias": grads["bias"]}

    def right(x, eps, weight, bias, dout):
        out, pullback = model_numpy.layernorm(x, eps, weight, bias)
        dx, grads = pullback(dout)
        z, rstd = (out - bias) / weight, 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
        each = np.abs(dout * weight).max() * (1 + np.abs(z).max()) ** 2
        return {"out": (out, 1 + rstd * np.abs(weight) * np.abs(x).max()), "dx": (dx, rstd * each),
                "dweight": (grads["weight"], (np.abs(dout) * (rstd + np.abs(z))).sum((0, 1))),
                "dbias": (grads["bias"], np.abs(dout).sum((0, 1)))}

    judge(6, mine, Task(cases, run, right, rounding=DOUBLE))
    x, dout = randoms(8, (1, 1, 64), (1, 1, 64))
    made = run(mine, x, 1e-5, np.ones(64), np.zeros(64), dout)
    dx, z = np.ravel(made["dx"]), np.ravel(made["out"])
    ones, along_z = (abs(dx @ d) / np.linalg.norm(dx) / np.linalg.norm(d) for d in (np.ones(64), z))
    return (f"For a row of 64 numbers, the cosine between the gradient and (1, ..., 1) is {ones:.0e}, and between the "
            f"gradient and z it is {along_z:.0e}, which eps leaves.")

def check_7(mine):
    rng = np.random.default_rng(0)
    every = layers.mistakes()
    for i, (broken, edit, words) in enumerate(every):
        others = [name for name in layers.LAYERS if name != broken]
        if i >= len(layers.OWN_MISTAKES):                               # all ten layers would take many seconds
            others = rng.permutation(others)[:2].tolist()
        names = rng.permutation([broken, *others]).tolist()
        found = call(member(mine, "find"), [layers.layer(name, edit if name == broken else None) for name in names])
        if found == broken:
            continue
        if found is None:
            raise Wrong(f"The pullback of {broken} is wrong, and find names no layer. {words} "
                        f"{blind_spot(*watch(mine, broken, edit, broken))}")
        if not isinstance(found, str) or found not in names:
            raise Wrong(f"find must return the name of a layer, such as {broken!r}, and returned {found!r}.")
        raise Wrong(f"find names {found}, whose pullback is right; that of {broken} is wrong. {words} "
                    f"{inaccuracy(*watch(mine, broken, edit, found))}")
    _, function, (scores,) = layers.layer("softmax")
    pullback = function(scores)[1]
    sizes = [np.abs(2 * pullback(dout)[0]).max() for dout in (np.ones_like(scores), *randoms(6, scores.shape))]
    return (f"You find each of {len(every)} mistakes. If the gradient of a softmax has the wrong sign, a dout of ones "
            "shows it by {:.0e}, and a random one by {:.1f}.".format(*sizes))

def watch(mine, broken, edit, watched):
    """(name, moves, douts) of what find does to one layer of two: by how much it moves the inputs, and its douts.

    moves: a list of [array for each input], one for each call that moves an input.
    """
    name, function, inputs = layers.layer(watched, edit if watched == broken else None)
    originals = [x.copy() for x in inputs]
    moves, douts = [], []

    def recorded(*given):
        given = [np.asarray(x, float) for x in given]
        if [x.shape for x in given] == [x.shape for x in originals]:
            move = [x - y for x, y in zip(given, originals, strict=True)]
            moves.extend([move] if any(np.any(x) for x in move) else [])
        out, pullback = function(*given)

        def recorded_pullback(dout):
            douts.append(np.array(dout, float))
            return pullback(dout)

        return out, recorded_pullback

    other = next(layer for layer in layers.LAYERS if layer not in (broken, watched))
    others = [layers.layer(other), layers.layer(broken, edit)][: 1 + (watched != broken)]
    with contextlib.suppress(Exception):                                # what was seen before it counts
        mine.find([(name, recorded, inputs), *others])
    return name, moves, douts

def blind_spot(name, moves, douts):
    """A sentence about what a function that finds no mistake in a layer cannot see."""
    if not moves or not douts:
        return f"It never moves the inputs of {name}, or never calls its pullback."
    for i, number in enumerate(layers.NUMBERS[: len(moves[0])]):
        of_input = np.array([move[i].ravel() for move in moves if np.any(move[i])])
        if not len(of_input):
            return f"It never moves the {number} input of {name}: look at each."
        if not of_input.any(axis=0).all():
            return f"It never moves some numbers of the {number} input of {name}: move all, in a random direction."
        if np.allclose(of_input, of_input[:, :1], rtol=1e-3, atol=0):
            return ("It moves all numbers of an input by the same amount, and so sees only the sum of a gradient: move "
                    "them in a random direction.")
    if all(np.ptp(dout) == 0 for dout in douts):
        return "Its dout has the same number everywhere, and so it sees only the sum of the outputs: draw a random one."
    if any(np.count_nonzero(dout) < dout.size for dout in douts):
        return "Its dout is 0 for some outputs: draw a random one."
    return "How large an error do you allow? Is the gradient of each input compared?"

def inaccuracy(name, moves, douts):
    """A sentence about why a function accuses a right layer: how it moves the inputs."""
    moves = np.array([np.concatenate([x.ravel() for x in move]) for move in moves])
    if not len(moves):
        return f"It never moves the inputs of {name}."
    step = np.abs(moves).max(axis=1).mean()
    both = all((np.abs(moves + move).max(axis=1) < 0.01 * np.abs(move).max()).any() for move in moves)
    if not both:
        return (f"It moves inputs of {name} to one side only, by about {step:.0e}: such a difference has an error "
                "about as large as the step. Move them to both sides.")
    if step > 1e-3:
        return f"It moves inputs by about {step:.0e}: the error of such a difference is the square of it. Try 1e-5."
    if step < 1e-8:
        return f"It moves inputs by about {step:.0e}, which divides roundings by a tiny number. Try 1e-5."
    return (f"It moves inputs of {name} to both sides, by about {step:.0e}, which is accurate to about 1e-8. Is each "
            "difference divided by twice the step, multiplied by dout, and compared with the gradient of the same "
            "input along the same direction?")

# ---- 8: an encoding --------------------------------------------------------------------------------------------------

def check_8(mine):
    import model_torch  # noqa: F401  (here, so that it is no part of a call's time, and stays in sys.modules)

    for name in ("Settings", "score", "doors", "Layer"):
        member(mine, name)
    cases = []
    for seed, (B, H, T, S, high) in enumerate([(2, 3, 4, 6, 9), (3, 2, 5, 4, 40), (1, 4, 6, 2, 300), (2, 1, 3, 5, 1)]):
        rng = np.random.default_rng(seed)
        cases.append(dict(positions=positions_of(seed, high, B, T), key_positions=positions_of(seed + 9, high, B, S),
                          p=rng.uniform(0.1, 3, H), a=rng.uniform(0.2, 1.9, H), dbias=randoms(seed, (B, H, T, S))[0]))

    encodings = (*positional_encodings.ENCODINGS, "mine")
    with patch.object(positional_encodings, "ENCODINGS", encodings), patch.dict(sys.modules):
        for half, run in (("NumPy", power_in_numpy), ("PyTorch", power_in_torch)):
            try:
                judge(8, mine, Task(cases, run, power_by_formula, place_of_pair, DOUBLE))
            except Raised:
                raise
            except Wrong as error:
                raise Wrong(f"In the {half} half: {error}") from error
        sys.modules["zoo.mine"] = mine
        models = compare_backends(mine.Settings("mine"))
        near, far = (np.abs(power_in_numpy(mine, np.array([[0, d]]), np.array([[0, d]]), np.ones(1), np.ones(1),
                                           np.ones((1, 1, 2, 2)))["dA"]).max() for d in (1, 2))
    return (f"In {models} whole models, NumPy and PyTorch have the same losses and gradients. "
            f"The gradient of A is {near:.0f} if all distances are 0 and 1, and {far:.1f} if they are 0 and 2.")

def prepare_power(module, positions, key_positions, p, a):
    """(the model, its table, P and A) of an encoding's module, for numbers p and a of each head."""
    from config import ModelConfig

    H = len(p)
    sys.modules["zoo.mine"] = module
    settings = module.Settings("mine")
    model = ModelConfig(layers=1, width=8 * H, heads=H, context=positions.shape[1], vocab=2, encoding=settings)
    table = np.asarray(call(settings.pairs, positions, key_positions, model))
    return model, table, {"p": np.log(p), "a": np.log(a / (2 - a))}

def as_bias(x, dbias, name="bias"):
    bias = as_array(x, name)
    return np.broadcast_to(bias, dbias.shape) if bias.ndim == 4 and bias.shape[0] == 1 else bias

def power_in_numpy(module, positions, key_positions, p, a, dbias):
    model, table, learned = prepare_power(module, positions, key_positions, p, a)
    q, k = (np.ones((len(n), len(p), n.shape[1], 8)) for n in (positions, key_positions))
    made = call(module.score, q, k, None, table, learned)
    if not isinstance(made, tuple) or len(made) != 2:
        raise Wrong("score must return the bias and its pullback.")
    call(module.score, q, k, None, table + 1, learned)              # of another block
    grads = call(made[1], dbias)
    if not isinstance(grads, tuple | list) or len(grads) != 4:
        raise Wrong('The pullback must return 0, 0, 0, {"p": ..., "a": ...}.')
    if any(np.any(grad) for grad in grads[:3]):
        raise Wrong("The bias does not depend on q, k and h, so the pullback must return 0 as their gradients.")
    grads = named(grads[3], ("p", "a"), '0, 0, 0, {"p": ..., "a": ...}')
    return {"bias": as_bias(made[0], dbias), "dP": grads["p"], "dA": grads["a"]}

def power_in_torch(module, positions, key_positions, p, a, dbias):
    import torch

    from model_torch import build_encoding

    model, table, learned = prepare_power(module, positions, key_positions, p, a)
    q, k = (torch.ones((len(n), len(p), n.shape[1], 8)).double() for n in (positions, key_positions))

    def forward_and_backward():
        encoding = build_encoding(model.encoding, model)
        encoding.load_state_dict({name: torch.tensor(x) for name, x in learned.items()}, assign=True)
        bias = encoding.score(q, k, None, torch.tensor(table))
        bias.backward(torch.tensor(dbias).sum_to_size(bias.shape))
        return bias, encoding.p.grad, encoding.a.grad

    bias, dp, da = call(forward_and_backward)
    return {"bias": as_bias(bias, dbias), "dP": as_array(dp, "dP"), "dA": as_array(da, "dA")}

def power_by_formula(positions, key_positions, p, a, dbias):
    """bias = -p d^a, dbias/dp = -d^a and dbias/da = -p d^a ln d, with dp/dP = p and da/dA = a (2 - a)/2."""
    d = np.abs(positions[:, None, :, None] - key_positions[:, None, None, :]).astype(float)
    p, a = p[:, None, None], a[:, None, None]
    bias = -p * d**a
    log = np.log(d, where=d > 0, out=np.zeros_like(d))
    dp, da = dbias * bias, dbias * bias * log * a * (2 - a) / 2
    return {"bias": (bias, 1 + np.abs(bias))} | {
        name: (g.sum((0, 2, 3)), 1 + np.abs(g).sum((0, 2, 3))) for name, g in (("dP", dp), ("dA", da))}

def place_of_pair(case, output, index):
    return "" if output != "bias" else " at query position {} and key position {}".format(
        case["positions"][index[0], index[2]], case["key_positions"][index[0], index[3]])

def compare_backends(encoding):
    """The number of models with an encoding in which both backends have the same loss and gradients; Wrong if not.

    The models are causal and not, in GPT's and Llama's style, with blocks that have no encoding and blocks that see
    few keys. Their weights are large enough for attention to matter.
    """
    import torch

    from config import ModelConfig
    from model_torch import GPT

    shape = dict(width=16, context=12, vocab=40, mlp_width=40, encoding=encoding)
    models = [dict(layers=2, heads=2), dict(layers=2, heads=1, causal=False),
              dict(layers=4, heads=2, norm="rmsnorm", mlp="swiglu", tied=True, nope_every=2, window=4)]
    tokens, targets = np.random.default_rng(0).integers(0, 40, (2, 3, 12))

    def both(config):
        model = GPT(config).double()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        loss = model(torch.tensor(tokens), torch.tensor(targets))
        loss.backward()
        params = {name: x.detach().numpy().copy() for name, x in model.named_parameters()}
        found, grads = model_numpy.loss_and_grads(params, tokens, targets, config)
        return {"the loss": (found, loss.item())} | {f"the gradient of {name}": (grads[name], x.grad.numpy())
                                                     for name, x in reversed(list(model.named_parameters()))}

    for model in models:
        for what, (found, right) in call(both, ModelConfig(**shape, **model), seconds=30).items():
            if not same(found, right, 1e-9 * np.abs(right).max()).all():
                raise Wrong(f"Each half alone is right, but in a whole model they differ: {what} is not the same in "
                            f"NumPy and in PyTorch. The model has {', '.join(f'{k} = {v}' for k, v in model.items())}.")
    return len(models)

# ---- 9: columns ------------------------------------------------------------------------------------------------------

def check_9(mine):
    cases = []
    for seed, (T, C, D, l, start, theta) in enumerate([(6, 8, 3, 4, 0.0, 0.3), (5, 9, 4, 2, 0.7, -0.2),
                                                       (4, 7, 2, 7, -1.0, 0.05), (7, 6, 5, 3, 2.0, 0.5)]):
        x, wq, wk = randoms(seed, (T, C), (D, C), (D, C))
        cases.append(dict(x=x, wq=wq, wk=wk, positions=positions_of(seed, 30, T), l=l, start=start, theta=theta))

    def attention(x, wq, wk, positions, l, start, theta):
        """The weights of all queries of x for keys that are overridden, every key being seen."""
        keys = model_numpy.phi(x, expe.expe_table(positions, l, start, theta), {})[0] @ wk.T
        return model_numpy.softmax((x @ wq.T) @ keys.T / np.sqrt(len(wq)), {})[0]

    def by_one(module, x, wq, wk, positions, l, start, theta):
        new = with_shape(call(member(module, "one_column"), wk, l), wk, "one_column")
        return {"weights": attention(x, wq, new, positions, 1, start, theta)}

    judge(9, mine, Task(
        cases, by_one, lambda **case: {"weights": (attention(**case), 30)},
        lambda case, output, index: " of query {} and key {}, with one_column's weights".format(*index)))

    def by_two(module, x, wq, wk, positions, l, start, theta):
        new = with_shape(call(member(module, "two_columns"), wk, l), wk, "two_columns")
        return {"product": model_numpy.phi(x, expe.expe_table(positions, 2, start, theta), {})[0] @ new.T}

    def by_all(x, wq, wk, positions, l, start, theta):
        phi = model_numpy.phi(x, expe.expe_table(positions, l, start, theta), {})[0]
        return {"product": (phi @ wk.T, 4 * l * (np.abs(phi) @ np.abs(wk).T))}

    judge(9, mine, Task(cases, by_two, by_all, lambda case, output, index:
                        f" of the token at position {case['positions'][index[0]]}, with two_columns' weights"))
    w = 0.02 * randoms(7, (64, 32))[0]
    new = with_shape(call(mine.one_column, w, 24), w, "one_column")
    return (f"If the weights start with a standard deviation of {w.std():.2f}, that of the one column which does the "
            f"work of 24 is {new[:, 0].std():.2f}.")

def with_shape(x, w, name):
    """The weights that a function returned, which must have w's shape."""
    x = as_array(x, name)
    if x.shape != w.shape:
        raise Wrong(f"{name} must return weights of the shape (D, C), here {w.shape}, and returns {x.shape}.")
    return x.astype(float)

def check(number, path):
    """(whether a file solves an exercise, sentences that say what it shows or what is wrong)."""
    try:
        return True, f"right. {globals()[f'check_{number}'](read(path))}"
    except Raised as error:
        return False, error.sentences(path)
    except Wrong as error:
        return False, str(error)
