"""Each exercise: its solution passes; its stub and plausible mistakes fail, each in a sentence of its own."""

import pytest
from conftest import ROOT

from learn import check

STUBS = sorted((ROOT / "learn").glob("[1-8]_*.py"))
WRONG = {  # exercise: [(old text of the solution, new text, words of the answer)]
    1: [("np.arange(l))", "np.arange(1, l + 1))", "positions are counted from 1"),
        (" + np.arange(l))", " + 0 * np.arange(l))", "j is missing: the same number in all l dimensions"),
        ("[..., None] + ", "[..., None] - ", "j is subtracted: theta (n - j)"),
        ("theta * (positions[..., None] + np.arange(l))", "theta * positions[..., None] + np.arange(l)",
         "j is not multiplied by theta"),
        ("start + theta * (", "theta * (start + ", "start is multiplied by theta"),
        ("positions[..., None] + np.arange(l)", "np.moveaxis(positions[..., None] + np.arange(l), -1, -2)",
         "has the shape (3, 5, 6), not (3, 6, 5); it looks like exchanged axes")],
    2: [("q @ k.T", "(q @ k.T).T", "queries and keys exchanged"),
        ('"q" in on', '"k" in on', "the override is on qk, not on k"),
        (" / np.sqrt(q.shape[1])", "", "scores are not divided by sqrt(D)"),
        ("(rows, x[:, rows.shape[1] :])", "(x[:, : -rows.shape[1]], rows)", "the last l dimensions are overridden"),
        ("return e / e.sum(axis=1, keepdims=True)", "return np.tril(scores)", "A softmax drops what all keys"),
        ("return e / e.sum(axis=1, keepdims=True)", "return e / e.sum(0)", "over the queries, not over the keys"),
        ("np.tri(len(scores))", "1", "later keys are not hidden"),
        ("np.abs(weights(after) - weights(before))", "(weights(before) - weights(after))", "take absolute values")],
    3: [("return q @ w", "return q @ -w", "the other sign"), ("theta * wk", "wk", "theta is left out"),
        ("np.sqrt(q.shape[1])", "len(wk)", "the division is by D, not by sqrt(D)"),
        ("wk[:, :l].sum(axis=1)", "wk[:, :l].mean(1)", "the mean of the columns"),
        ("wk[:, :l].sum(axis=1)", "wk[:l].sum(axis=0)", "ValueError: matmul"),
        ("wk[:, :l]", "wk[:, 1:][:, :l]", "off by one: columns 1 to l"),
        ("wk[:, :l]", "wk", "all columns of wk")],
    4: [("np.arange(0, D, 2)", "np.arange(D // 2)", "the exponent is i/D, not 2i/D"),
        ("positions[:, None", "(positions + 1)[:, None", "positions are counted from 1"),
        ("np.cos(angles), np.sin(angles)", "np.cos(angles), -np.sin(angles)", "turned by minus the angle"),
        ("np.split(x, 2, axis=-1)", "x[..., 0::2], x[..., 1::2]", "read as (2i, 2i + 1)"),
        ("= positions", "= np.pi / 180 * positions", "degrees"), ("turn(k)", "k", "q alone is turned"),
        ("b * cos + a * sin", "-a * sin + b * cos", "a sin has the wrong sign")],
    5: [("g * (1 - r + r / factor)", "g * (r + (1 - r) / factor)", "YaRN's ramp is inverted"),
        ("0.1 * np.log(factor) + 1", "0.1 * np.log10(factor) + 1", "of the base-10 logarithm"),
        ("np.floor(p(32))", "p(32)", "low is not rounded down"),
        ("p(32)), 0), min(np.ceil(p(1))", "p(1)), 0), min(np.ceil(p(32))", "a division by 0"),
        ("1 - r + r / factor", "1 / factor", "there is no ramp"), ("g * (1 - r + r / factor)", "g", "factor missing")],
    6: [("- mean(dz) - z", "- z", "through the mean is left out"),
        ("dz - mean(dz) - z * mean(dz * z)", "dz - dz.mean(-1)[..., None]", "through rstd is left out"),
        ("dz = dout * weight", "dz = 1 * dout", "the weight is left out"),
        (".sum(axis=(0, 1)), dout.sum(axis=(0, 1))", ".sum(0), dout.sum(0)", "the sum over the tokens is left out"),
        (".sum(axis=(0, 1)), dout.sum(axis=(0, 1))", ".sum(1), dout.sum(1)", "the sum over the batch is left out"),
        ("return rstd * (", "return np.sqrt(x.var(-1)[..., None] + eps) * (", "a division by rstd"),
        ("(dout * z).sum(", "(dout * x).sum(", "x in the place of z"),
        ("return rstd * (", "return -rstd * (", "the right numbers, times -1")],
    7: [("enumerate(pullback(dout))", "enumerate(pullback(dout)[:1])", "look at each input"),
        ("rng.standard_normal(out.shape)", "np.ones_like(out)", "The sum of its outputs is always 1"),
        ("/ (2 * e)", "/ e", "do you divide by twice the step"), ("> 1e-6", "> 0.1", "how much error do you allow"),
        ("1e-5", "0.3", "is your step larger than 1e-5?"), ("1e-5", "1e-11", "is the step 1e-7 or more"),
        ("d = rng.standard_normal(inputs[i].shape)", "d = np.eye(1, inputs[i].size).reshape(inputs[i].shape)",
         "in a random direction"),
        ("return name", "return name == name", "find must return a name")],
    8: [("dbias * bias,", "dbias * -np.log1p(a * table),", "dp/dP = p is left out"),
        ("(-p * (a * table) / (1 + a * table))", "-p * table / (1 + a * table)", "da/dA = a is left out"),
        ('dp.sum((0, 2, 3)), "a": da.sum((0, 2, 3))', 'dp.sum((-2, -1)), "a": da.sum((-2, -1))', "over the batch"),
        ("bias = -p *", "bias = p *", "the NumPy half, near: bias"),
        ("return -p * (a * table).log1p()", "return -p * (1 + a * table).log2()", "the logarithm is of base 2"),
        ("bias = -p * np.log1p(a * table)", "bias = -p * a * np.log1p(table)", "a is a factor"),
        ("expe.distances(queries, keys)", "(expe.distances(queries, keys) + 1)", "the distance is m - n + 1"),
        ("import expe\n", "import expe\nfrom zoo.kerple import doors\n", "your file imports zoo/")],
}


def answer(number, text, folder):
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    return check.check(number, file)


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.stem)
def test_the_solution_passes_and_the_stub_fails_in_a_sentence(stub):
    number = int(stub.name[0])
    fine, line = check.check(number, check.solution(number))
    assert fine and line.startswith("right"), line
    fine, line = check.check(number, stub)
    assert not fine and line.startswith(f"{stub.name}:") and "NotImplementedError: " in line, line


@pytest.mark.parametrize("number, old, new, words", [(n, *case) for n in WRONG for case in WRONG[n]], ids=str)
def test_a_mistake_is_named(number, old, new, words, tmp_path):
    text = check.solution(number).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    fine, line = answer(number, text.replace(old, new), tmp_path)
    print(f"{number} | {old} | {new} | {line}")
    assert not fine and words in line, line
