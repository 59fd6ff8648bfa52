"""Every method at its best: the learning rate and a knob of its own, tuned at `mini` by one rule.

1. One run a value of the method's knob, at the preset's learning rate.
2. One run a learning rate, at the best of these: as many as make nine trials a method. Those of LATER
   whose knob is {} have four.
3. Two or three more values of the methods whose best lay at an edge, and of ExPE; not of LATER.
4. The best of all, and the default, with fresh seeds: these alone are scored on the test split. Of LATER the best alone
   is trained with fresh seeds, in the grid `newer`.

The best has the lowest loss on the val split at the trained length, by the paper's protocol. Nothing past the trained
length is looked at.
"""

from typing import NamedTuple

TITLE = "Every method at its best: its learning rate and a knob of its own, tuned alike"
SAYS = ("Nine trials or more of seed 0 choose a method's values on val at the trained length; the best and the default "
        "are then trained with fresh seeds and scored on test. FoX, ALiBi, GRAPE and ExPE-K do not change with length. "
        "FoX and ALiBi have the lowest means, and their best rates are the highest that were tried.")
PRESET, SEED = "mini", 0                 # of the trials
TRIALS = ("nonoverlap", "same-targets")  # by what they are scored, on val; those of LATER at the trained length alone
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
    beyond: dict = {}                    # {name: flags} of the values that were tried after the nine

METHODS = {
    "expe": Method("--pe expe", MULTIPLIERS, beyond={
        f"x16-{name}": f"{STEP.format(16)} {more}" for name, more in {
            "start1": "--start 1", "l8": "--l 8", "l48": "--l 48"}.items()}),
    "expe-on-k": Method("--pe expe --on k", {"x1": STEP.format(1)} | MULTIPLIERS_OF_K, before="x1",
                        beyond={f"x{x}": STEP.format(x) for x in (1024, 4096)}),
    "rope": Method("--pe rope", BASES),
    "alibi": Method("--pe alibi", {f"x{slopes}": f"--slopes {slopes}" for slopes in (0.25, 0.5, 1.5, 2, 4)},
                    beyond={f"x{slopes}-lr-x2": f"--slopes {slopes} --lr 0.008" for slopes in (8, 16)}),
    "t5": Method("--pe t5", {f"distance{far}": f"--max-distance {far}" for far in (24, 32, 64, 256, 512)},
                 beyond={"distance20-lr-x2": "--max-distance 20 --lr 0.008",
                         "distance24-lr-x4": "--max-distance 24 --lr 0.016"}),
    "shaw": Method("--pe shaw", {f"distance{far}": f"--max-distance {far}" for far in (4, 8, 32, 64, 128)}),
    "sinusoidal": Method("--pe sinusoidal", BASES),
    **{pe: Method(f"--pe {pe}", {}, RATES | MORE) for pe in ("nope", "fox", "kerple", "grape")},
}
LATER = {                                # methods that were added after the others had been tuned
    **{pe: Method(f"--pe {pe}", {}) for pe in ("cable", "path", "path_fox")},
    "nope-stick": Method("--pe nope --softmax stick", {}),
    **{pe: Method(f"--pe {pe}", BASES) for pe in ("selective_rope", "pope")},
    "dape": Method("--pe dape", {"alibi": "--bias alibi"}, {rate: flags for rate, flags in (RATES | MORE).items()
                                                            if rate != "lr-x0.35"}),
}

def variants(methods=METHODS | LATER):
    """{name: as lab.grids.VARIANTS} of every trial that there can be: METHOD, METHOD-VALUE, and either with -RATE."""
    by_name = {}
    for method, (flags, knob, rates, _, beyond) in methods.items():
        first = {method: flags} | {f"{method}-{value}": f"{flags} {more}" for value, more in knob.items()}
        for name, own in first.items():
            by_name |= {name: own} | {f"{name}-{rate}": f"{own} {more}" for rate, more in rates.items()}
        by_name |= {f"{method}-{value}": f"{flags} {more}" for value, more in beyond.items()}
    return by_name

def evaluations_of(name):
    """By what a trial is scored; the first one chooses."""
    return ("trial",) if name in variants(LATER) else TRIALS

def trials(method, loss):
    """(the names of a method's trials, the best of them), as far as they can be known; the best is None before that.

    loss(name): of a trial on val at the trained length, or None as long as it is missing.
    """
    _, knob, rates, _, beyond = (METHODS | LATER)[method]
    names = [method, *(f"{method}-{value}" for value in knob)]
    if (first := best_of(names, loss)) is None:
        return names, None
    names += [f"{first}-{rate}" for rate in rates] + [f"{method}-{value}" for value in beyond]
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
    for method in METHODS | LATER:
        names, best = trials(method, loss)
        yield from ((name, SEED, evaluations_of(name)) for name in names)
        if best is not None and method in METHODS:
            yield from ((name, seed, FINALS) for name in dict.fromkeys((default_of(method), best)) for seed in seeds)
