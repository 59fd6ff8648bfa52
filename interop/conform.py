"""Check anybody's positional encoding against vectors/.

    python -m interop.conform MODULE:FUNCTION --case rope-yarn

FUNCTION takes, by name, any of the case's inputs and parameters, as NumPy
arrays: vectors/NAME.json lists them, with shapes. It returns the case's first
output or a tuple of the first ones, or a dict of any of them by name, as
anything that numpy.asarray takes. For RoPE:

    def mine(q, k, positions, rope_parameters): ...; return q, k

It is called for sequences with and without gaps (near), for positions up to
10^6 (far) and for one step with a cache (decode: cached_k and cached_v are
there alone, give them a default). Exit status: 0 if all is right; 1 if not,
with one line that says where and what kind of error it looks like; 2 if it
could not be checked.
"""

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import sys
import traceback
from pathlib import Path

try:
    import numpy as np
except ModuleNotFoundError:
    print("python -m interop.conform: error: this Python has no numpy; activate .venv: source .venv/bin/activate (make "
          "setup creates it)", file=sys.stderr)
    sys.exit(2)

VECTORS = Path(__file__).resolve().parent / "vectors"
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}    # relative, of a rounding
FINISHED = "table", "inv_freq", "attention_factor"                       # computed in float32 at least, then cast once
DIGITS = 5e-5                                                            # relative: what a mistake has are five digits
READ_OFF = "scores", "weights", "out"                                    # made of the other outputs
RIGHT = "the right numbers"
UNNAMED = "mistakes that this check can name"
ENDS = Exception, SystemExit                                             # what a user's file can raise

def refuse(message):
    print("python -m interop.conform: error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)

def load(name):
    """The function of MODULE:FUNCTION; the module may lie in the current folder."""
    module, _, path = name.partition(":")
    sys.path.insert(0, "")
    try:
        value = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        inspect.signature(value)
        return value
    except ENDS as error:
        refuse(f"{name} is no MODULE:FUNCTION here: {type(error).__name__}: {error}")

def call(function, inputs, names):
    """{output: array} that the function returns for those of the given inputs that it names."""
    takes = inspect.signature(function).parameters
    everything = any(p.kind == p.VAR_KEYWORD for p in takes.values())
    for name, p in takes.items():
        if name not in inputs and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            refuse(f"the function asks for {name!r}, and there are {', '.join(inputs)}: give it a default")
    try:
        result = function(**{name: x for name, x in inputs.items() if everything or name in takes})
        if not isinstance(result, dict):
            result = dict(zip(names, result if isinstance(result, tuple) else [result], strict=False))
        result = {name: np.asarray(x) for name, x in result.items()}
    except ENDS as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        refuse(f"{Path(at.filename).name}:{at.lineno}: {type(error).__name__}: {error}")
    if not result or not result.keys() <= {*names}:
        refuse(f"the function must return some of {', '.join(names)}, got {', '.join(map(str, result)) or 'nothing'}")
    for name, x in result.items():
        if x.dtype.kind not in "fiu" and x.dtype.name not in UNIT:
            refuse(f"{name} must be an array of real numbers, got one of {x.dtype.name}")
    return result

def rounding(name, dtype, y, terms, exact):
    """How large a rounding is of each number y of an output in this format: an array as y.

    terms and exact, numbers or arrays as y, say how large the terms are that are summed there: a sum of terms that
    cancel is off by roundings of its terms, however small it is. What must be exact, such as angles (as large as their
    positions), is float32 at least even if the finished table is in half precision: so exact counts by float32's
    rounding at most.
    """
    unit = UNIT.get(dtype, UNIT["float64"])
    least = min(unit, UNIT["float32"])
    y = np.abs(np.nan_to_num(y))
    if name in FINISHED:
        return (least if name == "inv_freq" else unit) * y + 4 * least * (y + exact)
    return unit * (y + terms) + least * exact

def tolerance(name, dtype, y, terms, exact):
    """The largest error of each number y that is left to rounding in this format: an array as y.

    Eight roundings may add up, as in a sum over a head of 8. What is finished is cast once: to the nearest number or to
    the next one towards 0, which is off by two roundings at most.
    """
    most = (2 if name in FINISHED else 8) * rounding(name, dtype, y, terms, exact)
    least = 1e-12 * np.maximum(1, np.abs(np.nan_to_num(y)))
    return np.maximum(most, np.maximum(least, 2.0**-24 if dtype == "float16" else 0))   # below which float16 has steps

def errors(name, x, y, allowed, dtype):
    """(the error of each number x over the allowed one, the number by which all keys of a query are off, or 0).

    Biases and scores may differ by one number a query, since a softmax drops what all keys share: it is the error at
    the last key that the query sees, whose distance is the smallest. It is rounded too, as the largest bias is.
    """
    if x.shape != y.shape:
        return np.full(y.shape, np.inf), 0.0

    def over(error, allowed):
        return np.where(np.isnan(y), 0, np.nan_to_num(np.abs(error) / allowed, nan=np.inf))

    direct = over(x - y, allowed)
    if name not in ("bias", "scores") or direct.max(initial=0) <= 1:
        return direct, 0.0
    shared = at_last_key(x - y, y)                                               # (B, H, T, 1)
    unit = UNIT.get(dtype, UNIT["float64"])
    largest = np.nanmax(np.abs(y), -1, keepdims=True)
    more = unit * np.minimum(1, np.abs(shared)) + 2 * min(unit, UNIT["float32"]) * largest
    shifted = over(x - y - shared, allowed + 8 * more)
    return (shifted, shared) if shifted.max() <= 1 else (direct, 0.0)

def at_last_key(x, y):
    """x (..., T, S) at the last key that each query sees, (..., T, 1)."""
    return np.take_along_axis(x, (~np.isnan(y)).sum(-1, keepdims=True) - 1, -1)

def turn(x, inv_freq, attention_factor, pairs, positions, of="qk"):
    """What RoPE gives for the last sequence of the inputs x if these pairs of a head turn by these angles.

    inv_freq (r/2,), or (2, r/2): those of the first of each pair, then those of the second. positions (T,), or (r/2, T)
    of each pair. attention_factor: a number, or two, of q and of k.
    """
    n = np.transpose(np.broadcast_to(positions, (len(pairs), np.shape(positions)[-1])))          # (T, r/2)
    angle = np.broadcast_to(inv_freq, (2, len(pairs)))[:, None] * n                              # (2, T, r/2)
    (i, j) = np.transpose(pairs)
    last = {name: np.array(x[name][-1:], float) for name in "qkv"}               # (1, H, T, D)
    for y, a in zip(map(last.get, of), np.resize(attention_factor, len(of)), strict=True):
        cos, sin = a * np.cos(angle), a * np.sin(angle)
        y[..., i], y[..., j] = y[..., i] * cos[0] - y[..., j] * sin[0], y[..., j] * cos[1] + y[..., i] * sin[1]
    k, v = (np.concatenate((x[f"cached_{name}"][-1:], last[name]), 2) if f"cached_{name}" in x else last[name]
            for name in "kv")
    scores = last["q"] @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1])               # (1, H, T, S)
    T, S = scores.shape[-2:]
    scores[..., np.triu(np.ones((T, S), bool), S - T + 1)] = np.nan
    p = np.nan_to_num(np.exp(scores - np.nanmax(scores, -1, keepdims=True)))
    out = p @ v / p.sum(-1, keepdims=True)
    return last | {"scores": scores, "out": out} | (
        {"inv_freq": np.array(inv_freq)} if np.ndim(inv_freq) == 1 else {}) | (
        {} if np.ndim(attention_factor) else {"attention_factor": attention_factor})

def outputs_of(mistake, x):
    """{output: array} of the last sequence that a mistake of a file gives for the inputs x."""
    made = turn(x, **mistake["turns"]) if "turns" in mistake else mistake["outputs"]
    return {name: np.array(y, float) for name, y in made.items()}

def last(x):
    return x[-1:] if np.ndim(x) > 2 else x

class Part:
    """What a function returns for a part of a case, beside the right numbers and those of the mistakes known there.

    Mistakes are known by the last sequence alone.
    """

    def __init__(self, name, case, function, dtype=None):
        data = case["parts"][name]
        self.inputs = {key: np.array(x) if isinstance(x, list) else x
                       for key, x in (data["inputs"] | case["parameters"]).items()}
        outputs = call(function, copy.deepcopy(self.inputs), [*case["returns"]])
        self.name = name
        self.dtype = dtype or max((x.dtype.name for x in outputs.values()), key=lambda name: UNIT.get(name, 0))
        self.right = {key: np.array(y, float) for key, y in data["outputs"].items() if key in outputs}
        self.got = {key: outputs[key].astype(float) for key in self.right}
        for key, x in self.got.items():
            with contextlib.suppress(ValueError):                       # such as a bias that all queries share
                self.got[key] = np.broadcast_to(x, self.right[key].shape)
        self.size = {key: [np.broadcast_to(np.array(x, float), y.shape) for x in data["size"][key]]
                     for key, y in self.right.items()}
        cast = ("rounded table", "rounded bias") if self.dtype == "bfloat16" else ()       # as the finished ones may be
        self.known = {mistake["looks like"]: outputs_of(mistake, self.inputs) for mistake in case["mistakes"]
                      if mistake["part"] == name and not mistake["looks like"].startswith(cast)}
        self.allowed = self.tolerances(self.dtype)
        self.off, self.shared = self.compare(self.allowed)
        self.wrong = [key for key, off in self.off.items() if off.max(initial=0) > 1]

    def tolerances(self, dtype):
        return {key: tolerance(key, dtype, y, *self.size[key]) for key, y in self.right.items()}

    def compare(self, allowed):
        """({output: errors over the allowed ones}, {output: what all keys of a query share in them})."""
        off = {key: errors(key, x, self.right[key], allowed[key], self.dtype) for key, x in self.got.items()}
        return tuple({key: pair[i] for key, pair in off.items()} for i in range(2))

    def difference(self, key, x, y):
        """x - y of an output's last sequence or of all; of scores that are off by a number a query, without it."""
        right = self.right[key][-len(x):] if np.ndim(x) > 2 else self.right[key]
        d = np.where(np.isnan(right), 0, x - y)
        return np.where(np.isnan(right), 0, d - at_last_key(d, right)) if np.any(self.shared[key]) else d

    def rounding(self, key):
        """A rounding of each right number, all sequences."""
        return np.maximum(rounding(key, self.dtype, self.right[key], *self.size[key]), self.allowed[key] / 1e3)

    def residuals(self, key, made):
        """The errors of the last sequence if these numbers were right, in roundings of them. They have five digits."""
        x, y = last(self.got[key]), self.right[key]
        if not np.shape(made) == x.shape == last(y).shape:              # as of frequencies of fewer pairs
            alike = np.shape(made) == x.shape and np.allclose(x, made, rtol=1e-4)
            return np.array([0.0 if alike else np.inf])
        larger = max(1, np.nanmax(np.abs(made), initial=0) / (np.nanmax(np.abs(y), initial=0) or 1))
        terms, exact = (larger * size for size in self.size[key])
        one = rounding(key, self.dtype, made, last(terms), exact.max(initial=0))
        one = one + DIGITS * np.abs(np.nan_to_num(made)) + 1e-9
        d = np.where(np.isnan(last(y)), 0, x - made)
        direct = d / one
        if key not in ("bias", "scores"):
            return direct
        shifted = np.where(np.isnan(last(y)), 0, d - at_last_key(d, last(y))) / one
        return min(direct, shifted, key=lambda x: (x**2).sum())

def enough_digits(x, y):
    """Two numbers in as many digits as it takes to see a difference."""
    for digits in range(6, 18):
        both = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if both[0] != both[1]:
            break
    return both

def distinct(energies, one):
    """The words of the smallest energy, and of those that are about as small; [] if the right numbers' is, too.

    energies: {words: the sum of squares that a mistake leaves of the errors, in roundings}. Roundings have the size
    `one`: if two mistakes are 5 of them apart, so are their energies by 25 of its squares.
    """
    least = min(energies.values())
    near = [words for words in sorted(energies, key=energies.get) if energies[words] - least < 25 * one**2]
    return near if RIGHT not in near else []

def either(words):
    """The words of one mistake, or of two that cannot be told apart."""
    return ", or like ".join(words) if len(words) < 3 else f"{len(words)} mistakes that these numbers do not tell apart"

def fitting(part, names):
    """The words of the known mistake that explains these outputs up to roundings; [] for none, several if all do."""
    energies = {}
    cast = []                                                           # that give these very numbers in half precision
    for words, made in part.known.items():
        if not made.keys() & {*part.wrong} & {*names}:
            continue
        made = {name: made.get(name, last(part.right[name])) for name in names}
        residuals = {name: part.residuals(name, y) for name, y in made.items()}
        if all(np.abs(x).max(initial=0) <= (3 if name in FINISHED else 8) for name, x in residuals.items()):
            energies[words] = sum((x**2).sum() for x in residuals.values())
            if all(cast_from(part, name, y) == 0 for name, y in made.items() if name != "inv_freq"):
                cast.append(words)
    if not energies:
        return []
    energies = {words: energies[words] for words in cast} or energies
    n = sum(last(part.right[name]).size for name in names)
    least = min(energies.values()) / n
    if least > 1:                                                       # a right name leaves less than a rounding each
        return []
    energies[RIGHT] = sum((part.residuals(name, last(part.right[name])) ** 2).sum() for name in names)
    return distinct(energies, max(0.1, np.sqrt(least)))

def looks_like(part):
    """The words of the known mistake that gives these numbers, or of what else they look like; None if there is none.

    It must explain all outputs, or all that scores, weights and output are made of: these may have a mistake of their
    own. A name is given only if it fits distinctly better than the next.
    """
    name = part.wrong[0]
    x, y = part.got[name], part.right[name]
    if x.shape == y.shape and not np.isfinite(x[~np.isnan(y)]).all():
        return "an overflow or a division by 0: not all numbers are finite"
    float32 = part.compare(part.tolerances("float32"))[0]
    if all(float32[key].max(initial=0) <= 1 for key in part.wrong):
        return "rounded numbers: they are right to float32, whose tolerance is --dtype float32"
    apart = [key for key in part.got if key not in READ_OFF]
    for names in ([*part.got], apart):
        if {*names} & {*part.wrong} and (words := fitting(part, names)):
            return either(words)
    if x.shape != y.shape:
        return "exchanged axes" if sorted(x.shape) == sorted(y.shape) else "a wrong shape"
    for words, made in {RIGHT: {}, **part.known}.items():
        made = made.get(name, last(y))
        if np.shape(made) != last(y).shape:
            continue
        times = np.nansum(last(x) * made) / (np.nansum(made * made) or 1)
        if np.isfinite(times) and abs(times - 1) > (0 if words == RIGHT else 0.01) and abs(times) > 1e-3:
            left, off = (part.residuals(name, y) for y in (times * made, last(y)))
            if np.abs(left).max(initial=0) <= 8 and (left**2).mean() <= 0.5 and (off**2).sum() - (left**2).sum() > 25:
                return f"{words}, times {times:.6g}"
    return None

# ---- mistakes within the tolerance -----------------------------------------------------------------------------------

def shrinking(key, unit):
    """By how much casts towards 0 may make all numbers of an output smaller: of a table and of the output, or of more.

    A cast takes about 0.7 roundings, and scores are made of two outputs that were cast.
    """
    return (4 if key in READ_OFF else 2) * unit

def errors_and(part, key, y, whole=False):
    """The errors of an output, and by what y is more than the right numbers: (n,) each, in roundings.

    Of the numbers of the last sequence, or of all, but of those that a query does not see.
    """
    cut = np.asarray if whole else last
    right = cut(part.right[key])
    seen = ~np.isnan(right)
    return [(part.difference(key, x, right) / cut(part.rounding(key)))[seen] for x in (cut(part.got[key]), y)]

def products(e, d):
    """[e . e, e . d, d . d, n] of errors e and a mistake d, (n,) each: e . d / d . d is the mistake's share in them."""
    return np.array([e @ e, e @ d, d @ d, e.size])

def factor_of(e, y):
    """(by how much more than 1 the numbers y with the errors e are multiplied, what chance may add to it)."""
    more = e @ y / (y @ y or np.inf)
    one = max(0.15, np.sqrt(((e - more * y) ** 2).mean()))
    return more, 8 * one / np.sqrt(y @ y or 1)

def common_factor(key, numbers, unit):
    """(where numbers of an output have a common factor, the factor), or None.

    numbers: {part: (e, y) of errors_and, and whether each number is of the part's largest third}, which finds far keys
    that alone are wrong.
    """
    every = [np.concatenate(x) for x in zip(*numbers.values(), strict=True)]
    groups = {key: every} | {f"{key} in {part}": x for part, x in numbers.items()}
    groups |= {f"the largest {key} in {part}": (e[large], y[large], large) for part, (e, y, large) in numbers.items()}
    for where, (e, y, _) in groups.items():
        more, chance = factor_of(e, y)
        if not -max(shrinking(key, unit), 1.25 * unit + chance) <= more <= 0.5 * unit + chance:
            return where, 1 + more
    return None

def casts(x, y, slack, unit):
    """How many of the numbers x are not y cast to a format of this rounding: to the nearest number, or towards 0."""
    step = 2 * unit * 2.0 ** np.floor(np.log2(np.maximum(np.maximum(np.abs(x), np.abs(y)), 1e-30)))
    shorter = np.where(x * y < 0, np.inf, np.abs(y) - np.abs(x))
    near = np.abs(x - y) > step / 2 + slack
    towards_0 = (shorter < -slack) | (shorter > step + slack)
    return min(np.count_nonzero(near), np.count_nonzero(towards_0))

def cast_from(part, key, y, whole=False):
    """How many numbers of an output, in its last sequence or in all, are not the numbers y in half precision.

    None: these are not numbers in half precision, or of another shape.
    """
    unit = UNIT.get(part.dtype, 0)
    cut = (lambda x: x) if whole else last
    right = cut(part.right[key])
    if unit <= UNIT["float32"] or key == "inv_freq" or not np.shape(y) == cut(part.got[key]).shape == right.shape:
        return None
    seen = ~np.isnan(right)
    terms, exact = (cut(size) for size in part.size[key])
    slack = 8 * UNIT["float32"] * (np.abs(y) + terms + exact) + (0 if whole else DIGITS * np.abs(y))
    return casts(cut(part.got[key])[seen], y[seen], slack[seen], unit)

def refuted(part, made):
    """Whether a table or another output that is not read off is the right one, cast, and not that of a mistake."""
    return any(cast_from(part, key, last(part.right[key])) == 0 and (cast_from(part, key, y) or 0) > 2
               for key, y in made.items() if key in part.got and key not in READ_OFF)

def hidden(parts):
    """What a mistake within the tolerance looks like, or None. In float32 none is as small as that.

    Numbers in half precision that are the right ones, cast, are right. If they are a mistake's, cast, it is made. Of
    others, errors are independent if they are roundings, and a mistake's are not: roundings of the size `one` have a
    share of about one/|d| in a mistake d.
    """
    dtype = parts[0].dtype
    unit = UNIT.get(dtype, 0)
    if unit <= UNIT["float32"]:
        return None
    explained, leans, factors = {}, {}, {}
    disproved = {words for part in parts for words, made in part.known.items() if refuted(part, made)}
    for part in parts:
        doubtful = [key for key, y in part.right.items()
                    if np.ndim(y) > 2 and cast_from(part, key, y, whole=True) != 0]
        for key in doubtful:
            y = part.right[key]
            large = np.abs(y[~np.isnan(y)]) > np.nanquantile(np.abs(y), 2 / 3)
            factors.setdefault(key, {})[part.name] = [*errors_and(part, key, 2 * y, whole=True), large]
        for words, made in part.known.items():
            for key in made.keys() & {*doubtful}:
                right = last(part.right[key])
                missed = cast_from(part, key, right) or 0
                if missed and cast_from(part, key, made[key]) == 0:
                    explained[words] = explained.get(words, 0) + missed
                shown = np.nanmax(np.abs(made[key] - right)) > 2 * DIGITS * np.nanmax(np.abs(right))
                if shown and (key != "out" or len(part.got) == 1) and words not in disproved:
                    e, y = errors_and(part, key, 2 * right)
                    smaller = np.clip(factor_of(e, y)[0], -shrinking(key, unit), 0)
                    of_mistake = products(e - smaller * y, errors_and(part, key, made[key])[1])
                    leans[words] = leans.get(words, 0) + of_mistake
    most = max(explained.values(), default=0)
    if most > 2:
        words = [name for name, n in explained.items() if n == most]
        return f"the numbers are a known mistake's, cast to {dtype}; it looks like {either(words)}"
    left = {}
    for words, (whole, along, mistake, n) in leans.items():
        energy = whole - 2 * along + mistake
        one = max(0.1, np.sqrt(energy / n))
        if 0.7 < along / (mistake or np.inf) < 1.5 and along > 6 * one * np.sqrt(mistake):
            left[words] = energy
    if words := distinct(left, 0.5) if left else []:
        share = leans[words[0]][1] / leans[words[0]][2]
        return f"together they are {share:.0%} of a known mistake's; it looks like {either(words)}"
    for key, numbers in factors.items():
        if found := common_factor(key, numbers, unit):
            return f"{found[0]} has a common factor; it looks like {RIGHT}, times {found[1]:.4g}"
    return None

@np.errstate(all="ignore")
def check(function, case, dtype=None):
    """(whether all is right, a line that says so or what is not)."""
    parts = []
    for name in case["parts"]:
        part = Part(name, case, function, dtype)
        if part.wrong:
            words = looks_like(part)
            n = len({mistake["looks like"] for mistake in case["mistakes"]})
            return False, f"{name}: {first_wrong(part)}; " + (
                f"it looks like {words}" if words else f"this is none of the {n} {UNNAMED}")
        parts.append(part)
    if words := hidden(parts):
        return False, f"each error is within the tolerance, but {words}"
    largest = [f"{part.name} {key} {off.max(initial=0):.0%}" for part in parts for key, off in part.off.items()]
    return True, f"right; largest errors, of those allowed: {', '.join(largest)}"

def first_wrong(part):
    """The first wrong number of a part, and the right one."""
    name = part.wrong[0]
    x, y = part.got[name], part.right[name]
    if x.shape != y.shape:
        return f"{name} has the shape {x.shape}, not {y.shape}"
    bad = part.off[name] > 1
    first = tuple(map(int, np.argwhere(bad)[0]))
    at = f" at position {part.inputs['positions'][..., first[0], first[-2]]}" if bad.ndim > 2 else ""
    x, y = enough_digits(x[first], y[first])
    return f"{name}{[*first] or ''}{at} is {x}, not {y} ({bad.sum()} of {bad.size} are wrong)"

def shapes(case):
    """The axes of a case in each part, such as "near B=3 H=2 T=6 D=4 S=6, decode B=3 H=2 T=1 D=4 S=6"."""
    lines = []
    for name, data in case["parts"].items():
        q = data["inputs"].get("q") or data["outputs"]["q"]
        axes = dict(zip("BHTD", np.shape(q), strict=True)) | {"S": np.shape(data["inputs"]["key_positions"])[-1]}
        lines.append(" ".join([name, *(f"{axis}={n}" for axis, n in axes.items())]))
    return ", ".join(lines)

def describe(name, case):
    """A line for --list: the formula of a case, its shapes, and what is to be noted."""
    return f"{name}: {case['formula']} [{shapes(case)}]" + (f" Note: {case['notes']}" if case["notes"] else "")

def main(argv=None):
    parser = argparse.ArgumentParser("python -m interop.conform", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.error = refuse
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION")
    parser.add_argument("--case", metavar="NAME", help="a file of vectors/, such as rope-yarn")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"),
                        help="whose tolerance holds (default: that of the arrays)")
    parser.add_argument("--list", action="store_true", help="the cases, with formula, shapes and notes")
    args = parser.parse_args(argv)
    cases = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(VECTORS.glob("*.json"))}
    if args.list:
        return print(*(describe(name, case) for name, case in cases.items()), sep="\n")
    if args.function is None or args.case not in cases:
        parser.error(f"give MODULE:FUNCTION and --case, one of {', '.join(cases)}")
    fine, line = check(load(args.function), cases[args.case], args.dtype)
    print(f"{args.case}: {line}")
    sys.exit(not fine)

if __name__ == "__main__":
    main()
