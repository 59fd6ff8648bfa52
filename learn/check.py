"""Say in a sentence whether an exercise is solved, and if not, what is wrong: python -m learn.check 4 [FILE]

FILE is the stub in this folder unless another one is given. Exit status: 0 if all is right, 1 if not.
Right numbers are the project's. A mistake is known as an edit of the solution: what it computes then is recognised.
"""

import argparse
import contextlib
import functools
import io
import json
import re
import sys
import traceback
import types
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent / "tests")]

import cli  # noqa: F401  (it says in one line which package is missing)

# isort: split
import numpy as np
import torch
from test_ladder import BLOCKS, EXACT, climb, tiny

import model_numpy
import positional_encodings
from interop import conform
from learn.mistakes import LAYERS, MISTAKES, layer
from model_torch import build_encoding

X, DOUT = np.random.default_rng(0).standard_normal((2, 2, 6, 8))        # two texts of 6 tokens, and gradients
W_Q, W_K, WEIGHT = np.random.default_rng(1).standard_normal((3, 4, 8))  # of one head (D, C)
BIASES = np.random.default_rng(2).standard_normal((2, 2, 6, 6))         # gradients by biases (B, H, T, S)
P, A = np.log([[0.7, 1.6], [0.3, 0.9]])

def read(path, edit=("", "")):
    """The module of a file, with one piece of its text changed."""
    name = f"exercise {Path(path).stem}"
    module = sys.modules[name] = types.ModuleType(name)                 # known there, as dataclasses need it
    module.__file__ = str(path)
    text = Path(path).read_text(encoding="utf-8")
    if edit[0] and text.count(edit[0]) != 1:
        raise ValueError(f"{path} must have this text once: {edit[0]}")
    exec(compile(text.replace(*edit) if edit[0] else text, path, "exec"), vars(module))
    return module

def solution(number):
    return HERE.parent / "zoo/kerple.py" if number == 8 else next(HERE.glob(f"solutions/{number}_*.py"))

def judge(number, run, mine, right=None):
    """conform's answer about run(mine), {output: array}; right: what it must be, the solution's if left out."""
    right = run(read(solution(number))) if right is None else right
    mistakes = []
    for words, *edit in MISTAKES[number]:
        made = {k: conform.last(np.asarray(x)) for k, x in run(read(solution(number), edit=edit)).items()}
        mistakes.append({"part": "here", "looks like": words, "outputs": {k: made[k] for k in right}})
    return conform.check(lambda: run(mine), {
        "parameters": {}, "mistakes": mistakes, "returns": dict.fromkeys(right),
        "parts": {"here": {"inputs": {"length": 1}, "outputs": right, "size": dict.fromkeys(right, (99, 0))}}})

def unless_named(answer, *arguments):
    """conform's answer by the vectors, or the answer of judge(*arguments) if it knows no mistake like this one."""
    return judge(*arguments) if answer[1].endswith(conform.UNNAMED) else answer

def conforms(function, name, parts=("near", "far", "decode")):
    case = json.loads((conform.VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return conform.check(function, case | {"parts": {part: case["parts"][part] for part in parts}})

def ladder(**model):
    """Whether both backends have the same losses and gradients, and train to the same weights."""
    climb(tiny(**model), EXACT)
    return True, "right, and the ladder is green"

# ---- the exercises: each yields answers, (whether all is right, a line), until one is not right ----------------------

def check_1(mine):
    yield conforms(mine.row, "expe")
    yield judge(1, lambda module: {"table": module.row(np.arange(9), 3, 0.5, 1 / 8)}, mine)

def check_2(mine):
    rows = (np.arange(6)[:, None] + np.arange(3)) / 32

    def by_heads(on, x, wq, wk, positions, l, theta):
        rows = theta * (positions[..., None] + np.arange(l))            # (B, T, l)
        heads = list(zip(np.split(wq, 2), np.split(wk, 2), strict=True))
        return {"scores": np.array([[mine.scores(h, *head, row, on) for head in heads]
                                    for h, row in zip(x, rows, strict=True)])}

    def changes(module):
        k, moved_k, qk, moved_qk = (read(solution(2)).scores(X[0], W_Q, W_K, rows + first, on)
                                    for on in ("k", "qk") for first in (0, 1))
        return {"expe_k": module.largest_change(k, moved_k), "expe": module.largest_change(qk, moved_qk),
                "expe_back": module.largest_change(moved_qk, qk)}

    for name, on in (("expe-keys", "k"), ("expe", "qk")):
        yield unless_named(conforms(functools.partial(by_heads, on), name, ["near"]), 2,
                           lambda module, on=on: {"scores": module.scores(X[0], W_Q, W_K, rows, on)}, mine)
    yield judge(2, changes, mine)
    yield True, "right: 32 positions further on, ExPE-K's weights change by {:.0e}, and ExPE's by {:.0e}".format(
        *changes(mine).values())

def check_3(mine):
    rows = 0.3 * (np.arange(6)[:, None] + np.arange(3))
    far, near = (model_numpy.phi(X[0], rows + 0.3 * n, {})[0] @ W_K.T for n in (0, 1))
    gain = ((near - far) * (X[0] @ W_Q.T)).sum(1) / 2                   # of a key that is one nearer, measured
    yield judge(3, lambda module: {"slopes": module.slopes(X[0], W_Q, W_K, 3, 0.3)}, mine, {"slopes": gain})

def check_4(mine):
    yield unless_named(conforms(mine.rotate, "rope-default"), 4, lambda module: {
        name: x.reshape(-1, 8) for name, x in zip("qk", module.rotate(
            X[:, None], X[:, None], np.arange(12).reshape(2, 6), {"rope_theta": 1e4}), strict=True)}, mine)

def check_5(mine):
    parameters = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    for name in ("rope-yarn", "rope-yarn-64"):
        yield unless_named(conforms(mine.frequencies, name), 5, lambda module: module.frequencies(parameters, 64), mine)

def check_6(mine):
    def gradients(module):
        dx, grads = module.layernorm(X, 1e-5, *WEIGHT[:2])[1](DOUT)
        return {"dx": np.reshape(dx, (-1, 8)), **{f"d{name}": g for name, g in grads.items()}}

    yield judge(6, gradients, mine, gradients(model_numpy))
    with patch.dict(model_numpy.NORMS, layernorm=(mine.layernorm, model_numpy.layernorm_parameters)):
        yield ladder()

def check_7(mine):
    for broken, (*_, words) in LAYERS.items():
        found = mine.find([layer(name, broken) for name in LAYERS])
        if found is not None and found not in LAYERS:
            yield False, f"find must return a name, such as {broken!r}, and returned {found!r}"
        elif found not in (None, broken):
            step = mine.find([layer("linear", None)]) is None           # whose differences are exact for any large step
            yield False, f"{broken} is broken, and you named {found}, whose pullback is right: " + (
                "is your step larger than 1e-5?" if step else
                "do you divide by twice the step, is the step 1e-7 or more, and do you allow errors of 1e-6?")
        yield found == broken, f"{broken} is broken, and you named no layer. {words}"
    yield True, "right: you find each of the ten"

def check_8(mine):
    if re.search(r"^\s*(from|import) zoo", Path(mine.__file__).read_text(encoding="utf-8"), re.M):
        yield False, "your file imports zoo/, where the solution is: write the formula yourself"

    def numpy_half(positions, key_positions, q, k, p, a):
        table = model.encoding.pairs(positions, key_positions, model)
        return {"bias": mine.score(q, k, None, table, {"p": np.log(p), "a": np.log(a)})[0]}

    def torch_half(positions, key_positions, q, k, p, a):
        encoding = build_encoding(model.encoding, model)
        encoding.load_state_dict({"p": torch.tensor(p).log(), "a": torch.tensor(a).log()}, assign=True)
        table = torch.tensor(model.encoding.pairs(positions, key_positions, model))
        return {"bias": encoding.score(torch.tensor(q), torch.tensor(k), None, table).detach().numpy()}

    def gradients(module):
        q, d = np.ones((2, 2, 6, 4)), np.abs(np.subtract.outer(np.arange(6.0), np.arange(6.0)))[None]
        grads = module.score(q, q, None, d, {"p": P, "a": A})[1](BIASES)[3]
        return {f"d{name.upper()}": g for name, g in grads.items()}

    encodings = (*positional_encodings.ENCODINGS, "mine")
    with patch.object(positional_encodings, "ENCODINGS", encodings), patch.dict(sys.modules, {"zoo.mine": mine}):
        model = tiny("mine").config
        for words, half in (("the NumPy half, ", numpy_half), ("the PyTorch half, ", torch_half)):
            fine, line = conforms(half, "kerple")
            yield fine, words + line
        yield judge(8, gradients, mine)
        yield ladder(pe="mine")
        yield ladder(pe="mine", style="llama", **BLOCKS["both"])
        yield ladder(pe="mine", causal=False, heads=1)

def check(number, path):
    """(whether an exercise is solved by a file, a line that says so or what is wrong)."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            answers = globals()[f"check_{number}"](read(path))
            fine, line = next((answer for answer in answers if not answer[0]), (True, "right"))
        return fine, line.removeprefix("here: ").partition("; largest errors")[0]
    except SystemExit:                                                  # conform could not call the function
        return False, said.getvalue().partition("error: ")[2].strip()
    except AssertionError as error:                                     # a rung of the ladder
        return False, str(error)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        return False, ":".join([Path(path).name, *map(str, lines[-1:])]) + f": {type(error).__name__}: {error}"

def main(argv=None):
    parser = argparse.ArgumentParser("python -m learn.check", description=__doc__)
    parser.add_argument("number", type=int, choices=range(1, 9))
    parser.add_argument("file", nargs="?", type=Path)
    args = parser.parse_args(argv)
    fine, line = check(args.number, args.file or next(HERE.glob(f"{args.number}_*.py")))
    print(line)
    sys.exit(not fine)

if __name__ == "__main__":
    main()
