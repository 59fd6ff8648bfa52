"""Each exercise: right answers of any style pass, no mistake does, and what is said of an answer is true of it."""

import re

import numpy as np
import pytest
from conftest import ROOT, process
from mutants import mutants

from learn import exercises, judge
from learn.mistakes import MISTAKES

NUMBERS = range(1, 10)
STUBS = sorted((ROOT / "learn").glob("[1-9]_*.py"))
IMPORTS = "import math\n\nimport numpy as np\nimport torch\n\n"
WRONG = {  # exercise: [(old text of the solution, new text, words of the answer)]
    1: [("np.arange(l))", "np.arange(1, l + 1))", "are counted from 1"),
        (" + np.arange(l))", " + 0 * np.arange(l))", "j is left out, so that all l numbers of a row are the same"),
        ("[..., None] + ", "[..., None] - ", "j is subtracted"),
        ("theta * (positions[..., None] + np.arange(l))", "theta * positions[..., None] + np.arange(l)",
         "j is not multiplied by theta"),
        ("start + theta * (", "theta * (start + ", "start is multiplied by theta"),
        ("theta * (positions", "1 / 8 * (positions", "none of the"),
        ("+ np.arange(l))", "+ np.arange(l)).astype(np.float16)", "too few digits"),
        ("positions[..., None]", "positions.astype(np.float16)[..., None]", "positions are rounded to float16"),
        ("positions[..., None]", "(positions % 128)[..., None]", "none of the"),
        ("positions[..., None] + np.arange(l)", "np.moveaxis(positions[..., None] + np.arange(l), -1, -2)",
         "Axes are exchanged")],
    2: [("q @ k.T", "(q @ k.T).T", "queries and keys are exchanged"),
        ('"q" in on', '"k" in on', "the queries are overridden, too"),
        (" / np.sqrt(q.shape[1])", "", "scores are not divided by sqrt(D)"),
        ("(rows, x[:, rows.shape[1] :])", "(x[:, : -rows.shape[1]], rows)", "the last l numbers are overridden"),
        ("    phi = np.concatenate((rows, x[:, rows.shape[1] :]), axis=1)",
         "    phi = x\n    phi[:, : rows.shape[1]] = rows", "scores changes its argument x"),
        ("return e / e.sum(axis=1, keepdims=True)", "return np.tril(scores)", "A softmax drops what all keys"),
        ("return e / e.sum(axis=1, keepdims=True)", "return e / e.sum(0)", "over the queries, not over the keys"),
        ("np.exp(scores) * np.tri(len(scores))", "np.exp(scores)", "later keys are not hidden"),
        ("np.abs(weights(after) - weights(before))", "(weights(before) - weights(after))", "take absolute values")],
    3: [("return q @ w", "return q @ -w", "the other sign"), ("theta * wk", "wk", "theta is left out"),
        ("theta * wk", "0.3 * wk", "none of the"),
        ("np.sqrt(q.shape[1])", "len(wk)", "the division is by D, not by sqrt(D)"),
        ("np.sqrt(q.shape[1])", "2", "none of the"),
        ("wk[:, :l].sum(axis=1)", "wk[:, :l].mean(1)", "the mean of the columns"),
        ("wk[:, :l].sum(axis=1)", "wk[:l].sum(axis=0)", "raises ValueError: matmul"),
        ("wk[:, :l]", "wk[:, 1:][:, :l]", "columns 1 to l"),
        ("wk[:, :l]", "wk", "all columns of wk")],
    4: [("np.arange(0, D, 2)", "np.arange(D // 2)", "the exponent is i/D, not 2i/D"),
        ("positions[:, None", "(positions + 1)[:, None", "positions are counted from 1"),
        ("positions[:, None", "positions[:1, None", "the positions of the first text are taken for all texts"),
        ("positions[:, None", "np.float16(positions)[:, None", ""),
        ("= positions", "= positions % 128", ""), ("= positions", "= positions % 65536", ""),
        ("np.cos(angles), np.sin(angles)", "np.cos(angles), -np.sin(angles)", "by minus the angle"),
        ("np.split(x, 2, axis=-1)", "x[..., 0::2], x[..., 1::2]", "read as (2i, 2i + 1)"),
        ("= positions", "= np.pi / 180 * positions", "degrees"), (", turn(k)", ", k", "only q is rotated"),
        ("    cos, sin = np.cos(angles), np.sin(angles)\n", "    cos, sin = rotate.__dict__.setdefault(q.shape, "
         "(np.cos(angles), np.sin(angles)))\n", "none of the"),
        ('rope_parameters["rope_theta"]', "10000.0", "the base is always 10,000"),
        ("        a, b = np.split(x, 2, axis=-1)\n", "        a, b = np.split(x, 2, axis=-1)\n        b = b.copy()\n"
         "        b[:, 1:] = 0\n", ""),
        ("return turn(q), turn(k)", "out = q.copy(), k.copy()\n    out[0][:, 0], out[1][:, 0] = turn(q)[:, 0], "
         "turn(k)[:, 0]\n    return out", "q[0, 1, 0, 0]"),
        ("return turn(q), turn(k)", "swap = lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1], -1)\n"
         "    return swap(turn(q)), swap(turn(k))", "Axes are exchanged"),
        ("return turn(q), turn(k)", "mix = lambda x: x.swapaxes(1, 2).reshape(x.shape)\n    return mix(turn(q)), "
         "mix(turn(k))", "none of the"),
        ("b * cos + a * sin", "-a * sin + b * cos", "a sin has the wrong sign")],
    5: [("g * (1 - r + r / factor)", "g * (r + (1 - r) / factor)", "the ramp is inverted"),
        ("0.1 * np.log(factor) + 1", "0.1 * np.log10(factor) + 1", "the base-10 logarithm"),
        ("0.1 * np.log(factor) + 1", "1e15", "none of the"),
        ("np.floor(p(32))", "p(32)", "low is not rounded down"),
        ("p(32)), 0), min(np.ceil(p(1))", "p(1)), 0), min(np.ceil(p(32))", "p(32) and p(1) are exchanged"),
        ("1 - r + r / factor", "1 / factor", "there is no ramp"),
        ("g * (1 - r + r / factor)", "g", "the factor is left out"),
        ("max(np.floor(p(32)), 0)", "np.floor(p(32))", "low is not clamped"),
        ("min(np.ceil(p(1)), head_dim - 1)", "np.ceil(p(1))", "high is not clamped"),
        ('rope_parameters["factor"]', "4.0", ""), ('rope_parameters["rope_theta"]', "1e4", "the base is always 10,000"),
        ('rope_parameters["original_max_position_embeddings"]', "4096", ""), ("head_dim // 2", "32", ""),
        ("np.arange(head_dim // 2)", "np.arange(head_dim)", "inv_freq has the shape (64,), and (32,) is right")],
    6: [("- mean(dz) - z", "- z", "through the mean is left out"),
        ("dz - mean(dz) - z * mean(dz * z)", "dz - dz.mean(-1)[..., None]", "through rstd is left out"),
        ("dz = dout * weight", "dz = 1 * dout", "the weight is left out"),
        (".sum(axis=(0, 1)), dout.sum(axis=(0, 1))", ".sum(0), dout.sum(0)", "the sum over the tokens is left out"),
        (".sum(axis=(0, 1)), dout.sum(axis=(0, 1))", ".sum(1), dout.sum(1)", "the sum over the batch is left out"),
        ("return rstd * (", "return np.sqrt(x.var(-1)[..., None] + eps) * (", "a division by rstd"),
        ("(dout * z).sum(", "(dout * x).sum(", "x in the place of z"),
        ("return rstd * (", "return 1 / x.std(-1)[..., None] * (", "none of the"),
        ("return rstd * (", "return np.float32(rstd) * np.float32(", "six digits only"),
        ("return rstd * (", "return -rstd * (", "dx has the wrong sign")],
    7: [("enumerate(pullback(dout))", "enumerate(pullback(dout)[:1])", "the second input of linear: look at each"),
        ("rng.standard_normal(out.shape)", "np.ones_like(out)", "Its dout has the same number everywhere"),
        ("rng.standard_normal(out.shape)", "np.eye(1, out.size).reshape(out.shape)", "Its dout is 0 for some outputs"),
        ("/ (2 * e)", "/ e", "Is each difference divided by twice the step"),
        ("> 1e-6", "> 0.1", "How large an error do you allow"),
        ("1e-5", "0.3", "is the square of it"), ("1e-5", "1e-11", "which divides roundings by a tiny number"),
        ("for step in (e, -e))", "for step in (e, 0))", "to one side only, by about "),
        ("(dout * (high - low)).sum() / (2 * e) - (d * gradient).sum()",
         "(dout * (high - low)).sum() / (2 * e)", "whose pullback is right"),
        ("d = rng.standard_normal(inputs[i].shape)", "d = np.eye(1, inputs[i].size).reshape(inputs[i].shape)",
         "It never moves some numbers of the first input"),
        ("d = rng.standard_normal(inputs[i].shape)", "d = np.ones_like(inputs[i])", "by the same amount"),
        ("return name", "return name == name", "find must return the name of a layer")],
    8: [("dp = dbias * bias ", "dp = dbias * -(table**a) ", "dp/dP = p is left out"),
        ("a * (1 - a / 2)", "1", "da/dA = a (1 - a/2) is left out"),
        ('dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))', 'dp.sum((-2, -1)), "a": da.sum((-2, -1))', "over the batch"),
        ("bias = -p *", "bias = p *", "In the NumPy half: bias["),
        ("bias = -p *", "bias = -4.0 *", "none of the"),
        ("np.maximum(table, 1)", "table", "the limit of d^a ln d is 0"),
        ("np.maximum(table, 1)", "table + 1e-6", "six digits only"),
        ("return -p * table**a", "return -p * (a * table.log()).exp()", "In the PyTorch half: dA"),
        ("return -p * table**a", "return (-p * table**a).float()", "six digits only"),
        ("np.abs(expe", "(expe", "m - n without an absolute value"),
        ("expe.distances(queries, keys)", "(expe.distances(queries, keys) + 1)", "none of the"),
        ('parameters=lambda model: {name: model_numpy.normal((model.heads,)) for name in ("p", "a")})',
         'parameters=lambda model: {"p": model_numpy.normal((model.heads,))})', "raises ")],
    9: [("wk[:, :l].sum(axis=1)", "wk[:, :l].mean(axis=1)", "the mean of the columns"),
        ("    new[:, :l] = 0\n    new[:, 0] = wk", "    new[:, 0] = wk", "now read numbers of h"),
        ("s - t, t", "s, t", "subtract it from the first"),
        ("np.arange(l)", "np.arange(1, l + 1)", "j is counted from 1"),
        ("    new = w.copy()", "    new = w", "two_columns changes its argument w"),
        ("return new\n\ndef", "return new[:, l - 1 :]\n\ndef", "one_column must return weights of the shape (D, C)")],
}
STYLES = {  # exercise: right answers in other styles
    1: [IMPORTS + """
def row(positions, l, start, theta):
    return np.stack([start + theta * positions + theta * j for j in range(l)], -1)
""", IMPORTS + """
def row(positions, l, start, theta):
    n = np.float32(positions)
    return np.float32(start) + np.float32(theta) * np.add.outer(n, np.arange(l, dtype=np.float32))
""", IMPORTS + """
def row(positions, l, start, theta):
    n = torch.from_numpy(positions)
    return start + theta * (n.unsqueeze(-1) + torch.arange(l)).float()
""", IMPORTS + """
def row(positions, l, start, theta):
    if np.ndim(positions):
        return [row(n, l, start, theta) for n in positions]
    return [start + theta * (int(positions) + j) for j in range(l)]
"""],
    2: [IMPORTS + """
def scores(x, wq, wk, rows, on):
    x, wq, wk, rows = (torch.tensor(y).float() for y in (x, wq, wk, rows))
    phi = torch.cat((rows, x[:, rows.shape[1]:]), 1)
    q, k = (phi if on == "qk" else x) @ wq.mT, phi @ wk.mT
    return q @ k.mT / q.shape[-1] ** 0.5

def largest_change(before, after):
    hidden = torch.ones(len(before), len(before)).triu(1).bool()
    a, b = (torch.tensor(y).masked_fill(hidden, -torch.inf).softmax(-1) for y in (before, after))
    return (a - b).abs().max()
""", IMPORTS + """
def scores(x, wq, wk, rows, on):
    T, l = rows.shape
    out = np.zeros((T, T))
    for m in range(T):
        for n in range(T):
            query, key = x[m].copy(), x[n].copy()
            key[:l] = rows[n]
            if on == "qk":
                query[:l] = rows[m]
            out[m, n] = sum((wq[i] @ query) * (wk[i] @ key) for i in range(len(wq))) / math.sqrt(len(wq))
    return out.tolist()

def largest_change(before, after):
    largest = 0.0
    for m in range(len(before)):
        a, b = ([math.exp(s - max(row[m, : m + 1])) for s in row[m, : m + 1]] for row in (before, after))
        largest = max([largest, *(abs(p / sum(a) - q / sum(b)) for p, q in zip(a, b))])
    return largest
""", IMPORTS + """
def scores(x, wq, wk, rows, on):
    phi = x.copy()
    phi[:, : rows.shape[1]] = rows
    return np.einsum("mi,di,nj,dj->mn", phi if "q" in on else x, wq, phi, wk) * len(wq) ** -0.5

def largest_change(before, after):
    def softmax(s):
        s = np.where(np.tril(np.ones_like(s)) == 1, s, -1e30)
        s = np.exp(s - s.max(-1, keepdims=True))
        return s / s.sum(-1, keepdims=True)
    return np.array([np.linalg.norm((softmax(after) - softmax(before)).ravel(), np.inf)])
"""],
    3: [IMPORTS + """
def slopes(x, wq, wk, l, theta):
    return theta / len(wq) ** 0.5 * np.einsum("tc,dc,dj->t", x, wq, wk[:, :l])
""", IMPORTS + """
def slopes(x, wq, wk, l, theta):
    x, wq, wk = (torch.tensor(y).float() for y in (x, wq, wk))
    return (x @ wq.T) @ (wk[:, :l].sum(1) * theta) / wq.shape[0] ** 0.5
""", IMPORTS + """
def slopes(x, wq, wk, l, theta):
    def score(m, n):
        key = np.zeros(x.shape[1])
        key[:l] = theta * (n + np.arange(l))
        return (wq @ x[m]) @ (wk @ key) / np.sqrt(len(wq))
    return [score(m, 1) - score(m, 0) for m in range(len(x))]
"""],
    4: [IMPORTS + """
def rotate(q, k, positions, rope_parameters):
    D = q.shape[-1]
    f = rope_parameters["rope_theta"] ** (-2 * np.arange(D // 2) / D)
    turns = np.exp(1j * np.einsum("bt,i->bti", positions, f))[:, None]
    def turn(x):
        z = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turns
        return np.concatenate((z.real, z.imag), -1)
    return [turn(q), turn(k)]
""", IMPORTS + """
def rotate(q, k, positions, rope_parameters):
    D = q.shape[-1]
    inv_freq = 1.0 / (rope_parameters["rope_theta"] ** (torch.arange(0, D, 2).float() / D))
    angles = torch.from_numpy(positions)[:, :, None].float() * inv_freq
    emb = torch.cat((angles, angles), -1)
    cos, sin = emb.cos()[:, None], emb.sin()[:, None]
    half = lambda x: torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
    q, k = torch.from_numpy(q).float(), torch.from_numpy(k)
    return q * cos + half(q) * sin, k * cos + half(k) * sin
""", IMPORTS + """
def rotate(q, k, positions, rope_parameters):
    B, H, T, D = q.shape
    out = np.zeros((2, B, H, T, D))
    for x, y in zip((q, k), out):
        for b, h, t, i in np.ndindex(B, H, T, D // 2):
            angle = positions[b, t] / rope_parameters["rope_theta"] ** (2 * i / D)
            R = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            y[b, h, t, [i, i + D // 2]] = R @ x[b, h, t, [i, i + D // 2]]
    return out
""", IMPORTS + """
def rotate(q, k, positions, rope_parameters):
    D, eye = q.shape[-1], np.eye(q.shape[-1] // 2)
    angles = positions[..., None] * rope_parameters["rope_theta"] ** (-np.arange(0, D, 2, dtype=np.float32) / D)
    c, s = (np.einsum("bti,ij->btij", f(np.float32(angles)), eye) for f in (np.cos, np.sin))
    R = np.block([[c, -s], [s, c]])
    return tuple(np.einsum("btij,bhtj->bhti", R, np.float32(x)) for x in (q, k))
"""],
    5: [IMPORTS + """
def frequencies(rope_parameters, head_dim):
    base, s = rope_parameters["rope_theta"], rope_parameters["factor"]
    L = rope_parameters["original_max_position_embeddings"]
    def pair(turns):
        return head_dim * math.log(L / (2 * math.pi * turns)) / (2 * math.log(base))
    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), head_dim - 1)
    found = []
    for i in range(head_dim // 2):
        r = 0 if i <= low else 1 if i >= high else (i - low) / (high - low)
        found.append((1 - r) * base ** (-2 * i / head_dim) + r * base ** (-2 * i / head_dim) / s)
    return {"inv_freq": found, "attention_factor": [0.1 * math.log(s) + 1]}
""", IMPORTS + """
def frequencies(rope_parameters, head_dim):
    base, s = rope_parameters["rope_theta"], rope_parameters["factor"]
    L = rope_parameters["original_max_position_embeddings"]
    edge = lambda t: head_dim * math.log(L / (t * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(edge(32)), 0), min(math.ceil(edge(1)), head_dim - 1)
    keep = 1 - torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return {"inv_freq": freq / s * (1 - keep) + freq * keep, "attention_factor": torch.tensor(0.1 * math.log(s) + 1.0)}
"""],
    6: [IMPORTS + """
def layernorm(x, eps, weight, bias):
    leaves = [torch.tensor(y, requires_grad=True) for y in (x, weight, bias)]
    out = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], *leaves[1:], eps)
    def pullback(dout):
        dx, dw, db = torch.autograd.grad(out, leaves, torch.tensor(dout), retain_graph=True)
        return dx, {"weight": dw, "bias": db}
    return out, pullback
""", IMPORTS + """
def layernorm(x, eps, weight, bias):
    C = x.shape[-1]
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    z = (x - x.mean(axis=-1, keepdims=True)) * rstd
    def pullback(dout):
        jacobian = (np.eye(C) - 1 / C - np.einsum("bti,btj->btij", z, z) / C) * rstd[..., None]
        dx = np.einsum("btij,btj,j->bti", jacobian, dout, weight)
        return [dx, {"bias": np.einsum("bti->i", dout), "weight": np.einsum("bti,bti->i", dout, z)}]
    return z * weight + bias, pullback
""", IMPORTS + """
def layernorm(x, eps, weight, bias):
    B, T, C = x.shape
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    z = (x - x.mean(axis=-1, keepdims=True)) * rstd
    def pullback(dout):
        dx, dweight, dbias = np.zeros_like(x), np.zeros(C), np.zeros(C)
        for b in range(B):
            for t in range(T):
                for j in range(C):
                    dz = dout[b, t, j] * weight[j]
                    dweight[j] += dout[b, t, j] * z[b, t, j]
                    dbias[j] += dout[b, t, j]
                    for i in range(C):
                        dx[b, t, i] += dz * rstd[b, t, 0] * ((i == j) - 1 / C - z[b, t, i] * z[b, t, j] / C)
        return dx, {"weight": dweight, "bias": dbias}
    return z * weight + bias, pullback
"""],
    7: [IMPORTS + """
def find(layers):
    errors = {}
    for name, f, inputs in layers:
        out, pullback = f(*inputs)
        dout = np.random.default_rng(1).normal(size=out.shape)
        errors[name] = 0
        for i, gradient in enumerate(pullback(dout)):
            for index in np.ndindex(inputs[i].shape):
                moved = [x.copy() for x in inputs]
                moved[i][index] += 1e-6
                high = (f(*moved)[0] * dout).sum()
                moved[i][index] -= 2e-6
                slope = (high - (f(*moved)[0] * dout).sum()) / 2e-6
                errors[name] = max(errors[name], abs(slope - gradient[index]))
    return max(errors, key=errors.get)
""", IMPORTS + """
def find(layers):
    rng = np.random.default_rng(3)
    for name, f, inputs in layers:
        out, pullback = f(*inputs)
        dout = rng.uniform(-1, 1, out.shape)
        gradients = pullback(dout)
        for i in range(len(inputs)):
            for _ in range(5):
                d = rng.standard_normal(inputs[i].shape)
                x = inputs[i].copy()
                inputs[i] += 1e-7 * d
                slope = np.vdot(dout, f(*inputs)[0] - out) / 1e-7
                inputs[i][...] = x
                if abs(slope - np.vdot(d, gradients[i])) > 3e-5 * max(1, abs(slope)):
                    return name
""", IMPORTS + """
def find(layers):
    for name, f, inputs in layers:
        y, pullback = f(*inputs)
        c = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).double().numpy()
        g = [torch.as_tensor(x) for x in pullback(c)]
        for i, x in enumerate(inputs):
            v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
            a = f(*inputs[:i], x + 1e-4 * v.numpy(), *inputs[i + 1:])[0]
            b = f(*inputs[:i], x - 1e-4 * v.numpy(), *inputs[i + 1:])[0]
            if not np.isclose(float((g[i] * v).sum()), np.einsum("i,i", (a - b).ravel(), c.ravel()) / 2e-4, 1e-5, 1e-5):
                return name
"""],
    9: [IMPORTS + """
def one_column(wk, l):
    D, C = wk.shape
    return np.concatenate([wk[:, :l].sum(1, keepdims=True), np.zeros((D, l - 1)), wk[:, l:]], 1)

def two_columns(w, l):
    M = np.eye(w.shape[1])
    M[:l] = 0
    M[:l, 1] = np.arange(l)
    M[:l, 0] = 1 - np.arange(l)
    return np.einsum("dc,ce->de", w, M)
""", IMPORTS + """
def one_column(wk, l):
    w = torch.tensor(wk).float()
    w[:, 0] = w[:, :l].sum(1)
    w[:, 1:l] = 0
    return w

def two_columns(w, l):
    new = np.zeros(w.shape)
    for d in range(len(w)):
        for j in range(w.shape[1]):
            if j >= l:
                new[d][j] = w[d][j]
            else:
                new[d][0] += w[d][j] * (1 - j)
                new[d][1] += w[d][j] * j
    return new.tolist()
"""],
}
EIGHT = [  # edits of exercise 8's solution that are other ways to say it
    [("-p * table**a                                                                       # (..., H, T, S)\n    log",
      "np.stack([-p[i, 0, 0] * np.power(table[..., 0, :, :], a[i, 0, 0]) for i in range(len(p))], -3)\n    log")],
    [("np.log(np.maximum(table, 1))", "np.log(table, where=table > 0, out=np.zeros_like(table))"),
     ('dp.sum((0, 2, 3))', 'np.einsum("bhts->h", dp)'), ("return 0, 0, 0,", "return 0 * q, 0 * k, 0,")],
    [("a * (1 - a / 2)", "2 * np.exp(-learned['a'])[:, None, None] / (1 + np.exp(-learned['a'])[:, None, None]) ** 2"),
     ("2 * model_numpy.sigmoid(learned[\"a\"])", "2 / (1 + np.exp(-learned['a']))")],
    [("import numpy as np\n", "import numpy as np\nimport torch\n"),
     ("return -p * table**a", "return -p * torch.where(table > 0, (a * table.clamp(min=1e-300).log()).exp(), 0)")],
    [("return -p * table**a",
      "import torch\n        return torch.einsum('hij,bhts->bhts', -p, table.expand(-1, len(p), -1, -1) ** a) "
      "if table.ndim == 4 else -p * table**a")],
]
EQUIVALENT = {  # exercise: {mutant: why it is no mistake}
    2: {**dict.fromkeys(("x -> wq (line 6)", "x -> wk (line 6)", "x -> rows (line 6)", "x -> on (line 6)",
                         "phi if 'k' in on else x -> phi (line 6)"), "both values of `on` override the keys"),
        "weights(after) - weights(before) -> weights(before) - weights(after) (line 14)":
            "the absolute value is taken"},
    4: {"q -> k (line 5)": "q and k have one D"},
    5: {**dict.fromkeys(("max(np.floor(p(32)), 0) -> max(0, np.floor(p(32))) (line 9)",
                         "min(np.ceil(p(1)), head_dim - 1) -> min(head_dim - 1, np.ceil(p(1))) (line 9)"),
                        "max and min are symmetric"),
        "np.clip((i - low) / (high - low), 0, 1) -> np.clip(0, (i - low) / (high - low), 1) (line 10)":
            "0 clipped to between x and 1 is x clipped to between 0 and 1"},
    6: {"(0, 1) -> (1, 0) (line 11)": "the order of summed axes does not matter"},
    7: {**dict.fromkeys(("np.random.default_rng(0) -> np.random (line 5)", "0 -> 1 (line 5)"), "any random numbers do"),
        **dict.fromkeys(("1e-05 -> 2e-05 (line 5)", "1e-05 -> 0.0001 (line 5)", "1e-06 -> 2e-06 (line 12)",
                         "1e-06 -> 9.999999999999999e-06 (line 12)"), "such a step or error is as good"),
        "(dout * (high - low)).sum() / (2 * e) - (d * gradient).sum() -> (d * gradient).sum() - (dout * (high - "
        "low)).sum() / (2 * e) (line 12)": "the absolute value is taken"},
    8: {"np.abs(expe.distances(queries, keys)).astype(float) -> np.abs(expe.distances(queries, keys)) (line 14)":
            "an integer to the power of a float is a float",
        "np.maximum(table, 1) -> np.maximum(1, table) (line 19)": "the maximum is symmetric",
        "('p', 'a') -> ('a', 'p') (line 29)": "both backends take the order that is declared"},
}


def answer(number, text, folder):
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    return exercises.check(number, file)


def edited(number, *edits):
    text = judge.solution(number).read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def assert_sentences(line):
    """An accusation is whole sentences, and says none of what once misled."""
    assert line[-1] in ".?" and "  " not in line, line
    assert not re.search(r"--dtype|is nan, and nan|e\+\d\d times", line), line


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.stem)
def test_the_solution_passes_and_the_stub_fails_in_a_sentence(stub):
    number = int(stub.name[0])
    fine, line = exercises.check(number, judge.solution(number))
    assert fine and re.fullmatch(r"right\. .*\d.*\.", line), line       # with the numbers that it shows
    fine, line = exercises.check(number, stub)
    assert not fine and re.match(rf"{stub.name}, line \d+, is still to be written: ", line), line
    assert_sentences(line)


@pytest.mark.parametrize("number, old, new, words", [(n, *case) for n in WRONG for case in WRONG[n]], ids=str)
def test_a_mistake_is_refused_in_words_that_are_true_of_it(number, old, new, words, tmp_path):
    fine, line = answer(number, edited(number, (old, new)), tmp_path)
    print(f"{number} | {old} | {new} | {line}")
    assert not fine and words in line, line
    assert_sentences(line)


@pytest.mark.parametrize("number, words, old, new", [(n, *case) for n in MISTAKES for case in MISTAKES[n]], ids=str)
def test_a_known_mistake_is_named_in_its_own_words(number, words, old, new, tmp_path):
    """So no two of them have the same numbers."""
    fine, line = answer(number, edited(number, (old, new)), tmp_path)
    assert not fine and line.endswith(f"It looks like this mistake: {words}."), line
    assert_sentences(line)


RIGHT = [(number, text) for number in STYLES for text in STYLES[number]] + [(8, edited(8, *edits)) for edits in EIGHT]


@pytest.mark.parametrize("number, text", RIGHT, ids=[f"{n}-{i}" for i, (n, _) in enumerate(RIGHT)])
def test_a_right_answer_in_another_style_is_not_accused(number, text, tmp_path):
    fine, line = answer(number, text, tmp_path)
    assert fine, line


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_no_mutant_of_a_solution_passes(number, tmp_path):
    """Each operator, constant, axis, name and call of a solution matters, but for those that are equivalent."""
    every = mutants(judge.solution(number).read_text(encoding="utf-8"))
    assert len(every) >= 30
    passed = set()
    for what, text in every.items():
        fine, line = answer(number, text, tmp_path)
        if fine:
            passed.add(what)
        else:
            assert_sentences(line)
    assert passed == {*EQUIVALENT.get(number, {})}


def test_the_columns_of_exercise_9_do_what_all_do():
    """w phi(h, n) by loops over the columns of every position, with numbers that are worked out here."""
    solution = judge.read(judge.solution(9))
    w, h = np.random.default_rng(0).standard_normal((2, 5, 9))
    for n in (0, 7, 100):
        row = [0.5 + 0.25 * (n + j) for j in range(9)]
        right = [sum(w[d, c] * (row[c] if c < 6 else h[0, c]) for c in range(9)) for d in range(5)]
        two = solution.two_columns(w, 6)
        found = [sum(two[d, c] * (row[c] if c < 2 else h[0, c]) for c in range(9)) for d in range(5)]
        assert np.allclose(found, right, rtol=0, atol=1e-10)
        apart = [sum(w[d, j] * 0.25 * j for j in range(6)) for d in range(5)]        # theta t, which all keys share
        one = solution.one_column(w, 6)
        found = [sum(one[d, c] * (row[c] if c < 1 else h[0, c]) for c in range(9)) for d in range(5)]
        assert np.allclose(np.add(found, apart), right, rtol=0, atol=1e-10)


def test_yarn_cases_need_each_clamp_and_no_rounding_hangs_on_a_last_digit():
    ends = []
    for case in exercises.yarn_cases():
        first, last = (case["D"] * np.log(case["L"] / (2 * np.pi * t)) / (2 * np.log(case["base"])) for t in (32, 1))
        assert min(abs(p - round(p)) for p in (first, last)) > 1e-3 and np.floor(first) < case["D"] - 1
        ends.append((first < 0, last > case["D"] - 1))
    assert {*ends} == {(low, high) for low in (True, False) for high in (True, False)}


@pytest.mark.parametrize("number, lines, words", [
    (1, ["import os", "os._exit(0)"], "ended the program (exit status 0) before an answer could be given"),
    (1, ["def row(*arguments):", "    import os; os._exit(0)"], "ended the program (exit status 0)"),
    (1, ["import sys", "sys.exit(0)"], "mine.py, line 2, raises SystemExit: 0."),
    (1, ["def row(positions, l, start, theta)"], "mine.py, line 1, raises SyntaxError: "),
    (1, ["x = 1"], "mine.py has no row: keep the names of the exercise."),
    (1, ["def row(positions, l, start, theta):", "    return input()"], "raises EOFError"),
    (1, ["def row(*arguments):", "    return row(*arguments)"], "raises RecursionError"),
    (1, ["def row(positions, l, start, theta):", "    pass"], "must be an array of real numbers"),
    (4, ["def rotate(q, k, positions, rope_parameters):", "    return q"], "The function must return q and k"),
    *[pytest.param(1, ["def row(positions, l, start, theta):", "    while True:", f"        {body}"],
                   "mine.py, line 3, was still running after 5 seconds", marks=pytest.mark.slow)
      for body in ("positions + 1", "__import__('time').sleep(100)")]])
def test_what_a_file_does_cannot_end_the_check_or_pass_it(number, lines, words, tmp_path):
    (tmp_path / "mine.py").write_text("\n".join(lines), encoding="utf-8")
    done = process("learn.check", str(number), "mine.py", cwd=tmp_path)
    assert done.returncode == 1 and words in done.stdout, done
    assert done.stdout.count("\n") == 1


def test_the_command_answers_a_solution_and_a_missing_file(tmp_path):
    done = process("learn.check", "2", judge.solution(2), cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    numbers = re.search(r"of ExPE-K changes by more than (\S+), and one of ExPE's changes by (\S+)\.", done.stdout)
    assert float(numbers[1]) < 1e-12 and float(numbers[2]) > 0.5
    done = process("learn.check", "2", "none.py", cwd=tmp_path)
    assert done.returncode == 2 and "there is no file none.py" in done.stderr


def test_no_page_shows_a_solution_before_its_exercise():
    """The stubs, and the README above its last section, link to no page that has an answer."""
    before = (ROOT / "learn" / "README.md").read_text(encoding="utf-8").partition("## When you have")[0]
    for text in (before, *(stub.read_text(encoding="utf-8") for stub in STUBS)):
        assert not re.search(r"answers\.md|solutions|explained\.md|model_numpy\.py", text)
    shown = (ROOT / "docs" / "change.md").read_text(encoding="utf-8")
    assert "table**a" not in shown and "sigmoid(A)" not in shown
