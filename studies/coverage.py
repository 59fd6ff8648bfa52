"""How often 95% intervals hold the truth where seeds and documents are both drawn: python -m studies.coverage

d[s, i] = a[s] + b[i] + e[s, i] is a paired difference of seed s on document i, its true mean 0. The sizes of its parts
are those of the files under results/mini. Seeds are normal; documents have heavy tails, or are skewed as in swap.
"""

from pathlib import Path

import numpy as np

from common import CommandLine
from config import InputError
from lab.grids import GRIDS
from lab.measures import interval_of_seeds, intervals, student
from lab.report import collect, finished, lines_of

TRIALS, DRAWS = 4000, 1000                                             # each eighth trial is bootstrapped
DESIGNS = (3, 24, 0), (3, 24, 1), (3, 12, 0), (5, 24, 0), (10, 24, 0)  # seeds, documents, whether these are uneven

def variances(d, weights):
    """What seeds, documents, and both together add to the variance of the mean of d (..., seeds, documents)."""
    S = d.shape[-2]
    n = 1 / (weights @ weights)
    by_document = d.mean(axis=-2, keepdims=True)
    centred = by_document - by_document @ weights[:, None]
    rest = d - (d @ weights)[..., None] - centred
    return ((d @ weights).var(axis=-1, ddof=1) / S, (centred**2 @ weights)[..., 0] / (n - 1),
            (rest**2 @ weights).sum(axis=-1) / (S * (S - 1) * (n - 1)))

def measured(folder):
    """{difference: the standard deviations of a, b and e} in the files of a folder, and nonoverlap's targets."""
    grid = GRIDS["table2"]
    files = collect(folder)
    sizes = {}
    if len(seeds := finished(grid, files)) < 2:
        raise InputError(f"{folder} has not two seeds of table2: run that grid first")
    rows = {line.label: line.rows for line in lines_of(grid, files, seeds)}
    pairs = [(f"{name} - expe {k}x", rows[name]["same-targets", k], rows["expe"]["same-targets", k], "unit_losses")
             for name in ("rope", "alibi", "expe-on-k-x1") for k in (1, 16)]
    pairs += [(f"{name} swap 16x", *[rows[name]["swap", 16]] * 2, "unit_losses_without") for name in ("t5", "shaw")]
    for name, mine, others, key in pairs:
        d = np.array([np.subtract(x[key], y["unit_losses"]) for x, y in zip(mine, others, strict=True)])
        seed, document, both = variances(d, np.ones(len(d[0])) / len(d[0]))
        sizes[name] = np.sqrt(np.maximum((seed - both, document - both, both), 0) * (*d.shape, d.size))
    return sizes, np.array(rows["expe"]["nonoverlap", 1][0]["unit_targets"])

def draw(rng, S, D, size, skewed):
    """d (TRIALS, S, D): e of Student's t with 3 degrees of freedom, and b too, or lognormal."""
    a = rng.normal(size=(TRIALS, S, 1))
    b = rng.standard_t(3, (TRIALS, 1, D))
    e = rng.standard_t(3, (TRIALS, S, D))
    if skewed:                                                         # of b's mean 0 and variance 3, that t has too
        b = (rng.lognormal(size=b.shape) - np.exp(0.5)) * np.sqrt(3 / (np.exp(2) - np.e))
    return size[0] * a + (size[1] * b + size[2] * e) / np.sqrt(3)

def held(rng, d, targets):
    """The share of trials whose interval holds 0, by the bootstrap over documents of the mean over seeds, by one that
    draws seeds too, by Student's t over seeds, by that of the summed parts (Satterthwaite's), by interval_of_seeds."""
    weights = targets / targets.sum()
    (_, S, D) = d.shape
    some = d[::8]
    seeds, documents = (rng.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (S, D))
    times = (seeds[:, :, None] * (documents * weights)[:, None]).reshape(DRAWS, -1)        # how often each is drawn
    seed, document, both = variances(d, weights)
    total = np.maximum(seed + document - both, np.maximum(seed, document))
    freedom = total**2 / (seed**2 / (S - 1) + document**2 / (1 / (weights @ weights) - 1))
    halves = student(S - 1) * np.sqrt(seed), [student(x) for x in freedom.round(2)] * np.sqrt(total)
    ends = [np.array(intervals(some.mean(axis=1), targets))[:, 1:].T,
            np.percentile(times @ some.reshape(len(some), -1).T / times.sum(axis=1)[:, None], (2.5, 97.5), axis=0),
            *((d @ weights).mean(axis=1) + np.outer((-1, 1), half).reshape(2, -1) for half in halves),
            np.array([interval_of_seeds(trial, targets)[1:] for trial in d]).T]
    return [np.mean((low <= 0) & (0 <= high)) for low, high in ends]

def main(argv=None):
    parser = CommandLine(prog="python -m studies.coverage", description=__doc__)
    with parser.one_line_errors():
        parser.parse_args(argv)
        (sizes, targets) = measured(Path("results/mini"))
        rng = np.random.default_rng(0)
        for S, D, uneven in DESIGNS:
            title = f"{S} seeds, {D} documents" + ", weights of nonoverlap" * uneven
            print(f"\n{title:44}  documents    crossed      seeds      parts       both")
            for name, size in sizes.items():
                shares = held(rng, draw(rng, S, D, size, "swap" in name), np.resize(targets, D) ** uneven)
                print(f"{name:44}" + "".join(f"{share:11.1%}" for share in shares), flush=True)

if __name__ == "__main__":
    main()
