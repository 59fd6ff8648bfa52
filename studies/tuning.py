"""Every method at its best: the learning rate and a knob of its own, tuned at `mini` by one rule and one budget.

1. One run a value of the method's knob, at the preset's learning rate.
2. One run a learning rate, at the best of these. NoPE has no knob, and as many more rates: nine trials for each.
3. The best of all, and the default, with fresh seeds: these alone are scored on the test split.

The best has the lowest loss on the val split at the trained length, by the paper's protocol. Nothing past the trained
length is looked at.
"""

from typing import NamedTuple

TITLE = "Every method at its best: its learning rate and a knob of its own, tuned alike"
SAYS = ("Nine trials of seed 0 choose a method's values on val at the trained length; the best and the default are "
        "then trained with fresh seeds and scored on test. ExPE-K and ALiBi do not change with length. ALiBi has the "
        "lower mean, and its best values lie at an edge of what was tried.")
PRESET, SEED = "mini", 0                 # of the trials
TRIALS = ("nonoverlap", "same-targets")  # by what they are scored, on val
FINALS = ("test-nonoverlap", "test-same-targets")
RATES = {f"lr-x{rate:g}": f"--lr {0.004 * rate:g}" for rate in (0.25, 0.5, 2)}         # multiples of mini's
MORE = {f"lr-x{rate:g}": f"--lr {0.004 * rate:g}" for rate in (0.35, 0.7, 1.2, 1.4, 1.7)}
STEP = "--theta {}/{{ramp}}"             # so many times the paper's theta, 1/ramp
MULTIPLIERS = {f"x{x}": STEP.format(x) for x in (0.25, 4, 16, 64, 256)}
MULTIPLIERS_OF_K = {value: flags for value, flags in MULTIPLIERS.items() if value != "x256"}    # their default
BASES = {f"base{base}": f"--base {base}" for base in (30, 100, 300, 1000, 100_000)}

class Method(NamedTuple):
    flags: str                           # of train.py
    knob: dict                           # {name of a value: its flags}, beside the default
    rates: dict = RATES
    before: str = ""                     # the value that was the default before it was tuned, if it is another since

METHODS = {
    "expe": Method("--pe expe", MULTIPLIERS),
    "expe-on-k": Method("--pe expe --on k", {"x1": STEP.format(1)} | MULTIPLIERS_OF_K, before="x1"),
    "rope": Method("--pe rope", BASES),
    "alibi": Method("--pe alibi", {f"x{slopes}": f"--slopes {slopes}" for slopes in (0.25, 0.5, 1.5, 2, 4)}),
    "t5": Method("--pe t5", {f"distance{far}": f"--max-distance {far}" for far in (24, 32, 64, 256, 512)}),
    "shaw": Method("--pe shaw", {f"distance{far}": f"--max-distance {far}" for far in (4, 8, 32, 64, 128)}),
    "sinusoidal": Method("--pe sinusoidal", BASES),
    "nope": Method("--pe nope", {}, RATES | MORE),
}

def variants():
    """{name: as lab.grids.VARIANTS} of every trial that there can be: METHOD, METHOD-VALUE, and either with -RATE."""
    by_name = {}
    for method, (flags, knob, rates, _) in METHODS.items():
        first = {method: flags} | {f"{method}-{value}": f"{flags} {more}" for value, more in knob.items()}
        for name, own in first.items():
            by_name |= {name: own} | {f"{name}-{rate}": f"{own} {more}" for rate, more in rates.items()}
    return by_name

def trials(method, loss):
    """(the names of a method's trials, the best of them), as far as they can be known; the best is None before that.

    loss(name): of a trial on val at the trained length, or None as long as it is missing.
    """
    _, knob, rates, _ = METHODS[method]
    names = [method, *(f"{method}-{value}" for value in knob)]
    if (first := best_of(names, loss)) is None:
        return names, None
    names += [f"{first}-{rate}" for rate in rates]
    return names, best_of(names, loss)

def default_of(method):
    """The name of its trial with the default, as that was before."""
    return f"{method}-{METHODS[method].before}" if METHODS[method].before else method

def best_of(names, loss):
    """The name with the lowest loss, the first of equal ones; None as long as any loss is missing."""
    losses = [loss(name) for name in names]
    return None if None in losses else names[losses.index(min(losses))]

def runs(seeds, loss):
    """(variant, seed, evaluations) of every run that can be known by the losses so far; seeds: the fresh ones."""
    for method in METHODS:
        names, best = trials(method, loss)
        yield from ((name, SEED, TRIALS) for name in names)
        if best is not None:
            yield from ((name, seed, FINALS) for name in dict.fromkeys((default_of(method), best)) for seed in seeds)
