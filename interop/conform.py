"""Check anybody's positional encoding against vectors/.

    python -m interop.conform MODULE:FUNCTION --case rope-yarn

FUNCTION takes, by name, any of the case's inputs and parameters, as NumPy
arrays: vectors/NAME.json lists them, with shapes. It returns the case's first
output or a tuple of the first ones, or a dict of any of them by name, as
anything that numpy.asarray takes. For RoPE:

    def mine(q, k, positions, rope_parameters): ...; return q, k

It is called for two sequences, one with gaps (near), for positions up to 10^6
(far) and for one step with a cache (decode: cached_k and cached_v are there
alone, give them a default). Exit status: 0 if all is right; 1 if not, with one
line that says where and what kind of error it looks like; 2 if it could not be
checked.
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

def tolerance(dtype, terms, exact):
    """The largest error, over max(1, the right number), that is left to rounding in this format.

    A sum of terms that cancel is off by roundings of its terms, however small it is. What must be exact, such as angles
    (as large as their positions) and distances, is float32 at least even if the finished table is in half precision: so
    its size counts by float32's rounding at most. Eight roundings may add up, as in a sum over a head of 8.
    """
    unit = UNIT.get(dtype, UNIT["float64"])
    return max(1e-12, 8 * (unit * (1 + terms) + min(unit, UNIT["float32"]) * exact))

def errors(name, got, right, length):
    """The error of each number over max(1, the right one), of inv_freq times length; 0 where none is right.

    Biases and scores may differ by one number a query, since a softmax drops what all keys share: it is the error at
    the last key that the query sees, whose distance is the smallest.
    """
    if got.shape != right.shape:
        return np.full(right.shape, np.inf)

    def off(error):
        off = np.abs(error) / np.maximum(1, np.abs(right)) * (length if name == "inv_freq" else 1)
        return np.where(np.isnan(right), 0, np.nan_to_num(off, nan=np.inf))

    if name not in ("bias", "scores"):
        return off(got - right)
    return min(off(got - right), off(got - right - at_last_key(got - right, right)), key=np.max)

def at_last_key(x, right):
    """x (..., T, S) at the last key that each query sees, (..., T, 1)."""
    return np.take_along_axis(x, (~np.isnan(right)).sum(-1, keepdims=True) - 1, -1)

def turn(x, inv_freq, attention_factor, pairs, positions, of="qk"):
    """What RoPE gives for the last sequence of the inputs x if these pairs of a head turn by these angles.

    inv_freq (r/2,), or (2, r/2): those of the first of each pair, then those of the second. attention_factor: a number,
    or two, of q and of k.
    """
    angle = np.multiply.outer(np.broadcast_to(inv_freq, (2, len(pairs))), positions).swapaxes(1, 2)  # (2, T, r/2)
    (i, j) = np.transpose(pairs)
    last = {name: np.array(x[name][-1:], float) for name in "qkv"}               # (1, H, T, D)
    for y, a in zip(map(last.get, of), np.resize(attention_factor, len(of)), strict=True):
        cos, sin = a * np.cos(angle), a * np.sin(angle)
        y[..., i], y[..., j] = y[..., i] * cos[0] - y[..., j] * sin[0], y[..., j] * cos[1] + y[..., i] * sin[1]
    k, v = (np.concatenate((x[f"cached_{name}"], last[name]), 2) if f"cached_{name}" in x else last[name]
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
    return x[-1:] if x.ndim > 2 else x

def looks_like(wrong, got, right, length, allowed, known):
    """The words of the known mistake that is nearest to all outputs, to the wrong ones, to the first wrong one, or to
    a multiple of one. Mistakes are known by the last sequence, and only those count that change a wrong output.
    """
    name = wrong[0]
    off = lambda name, x, y: errors(name, x, y, length).max() / max(allowed[name], 1e-4)  # noqa: E731
    if got[name].shape == right[name].shape and not np.isfinite(got[name][~np.isnan(right[name])]).all():
        return "an overflow or a division by 0: not all numbers are finite"
    known = {words: made for words, made in known.items() if made.keys() & {*wrong}}
    for names in (got, wrong, wrong[:1]):
        pairs = {words: {name: (last(got[name]), made.get(name, last(right[name]))) for name in names}
                 for words, made in known.items() if made.keys() & {*names}}
        far = {words: max(np.nanmax(abs(np.subtract(*pair[name]))) for name in wrong if name in pair)
               for words, pair in pairs.items() if all(off(name, *pair[name]) <= 1 for name in pair)}
        if far:                                     # which is nearest, a number that all keys share decides too
            return min(far, key=far.get)
    if off(name, last(got[name]), last(right[name])) <= 1:              # its last sequence does not show the mistake
        return "no mistake that is known here"
    for words, made in {"the right numbers": {}, **known}.items():
        x = last(got[name])
        y = made.get(name, last(right[name]))
        times = np.nansum(x * y) / (np.nansum(y * y) or 1) if x.shape == y.shape else 1
        if np.isfinite(times) and abs(times - 1) > 0.01 and off(name, x, times * y) <= 1:
            return f"{words}, times {times:.6g}"
    return "no mistake that is known here"

def project(got, right, made, allowed):
    """[e . d, d . d] over all tables, q, k, biases, scores and weights, in units of what is allowed: e is the error, d
    the mistake's, and e . d / d . d its share in the error. What all keys of a query share is left out.
    """
    products = np.zeros(2)
    for name in got.keys() & made.keys() & {"table", "q", "k", "bias", "scores", "weights"}:
        y = last(right[name])
        e, d = last(got[name]) - y, made[name] - y
        if name in ("bias", "scores"):
            e, d = e - at_last_key(e, y), d - at_last_key(d, y)
        e, d = (x / (allowed[name] * np.maximum(1, np.abs(y))) for x in (e, d))
        products += np.nansum(e * d), np.nansum(d * d)
    return products

def hidden(leans, factors, unit, least):
    """The words for a mistake within the tolerance, or None. Roundings are independent, and a mistake is not.

    Each error of a right function is about 1/16 of the tolerance or less, so its share in a mistake d is 1/16/|d|.
    """
    far = {words: 2 * along - whole for words, (along, whole) in leans.items() if along > 0.5 * whole
           and (whole > 0.5 or words == f"rounded positions: they were cast to {least}")}
    if far:                                                             # whose removal leaves the least error
        words = max(far, key=far.get)
        share = leans[words][0] / leans[words][1]
        return f"together they are {share:.0%} of a known mistake's; it looks like {words}"
    for name, (along, whole) in factors.items():
        if abs(along) > 2 * unit * whole + 0.4 * np.sqrt(whole):
            return f"{name} has a common factor; it looks like the right numbers, times {1 + along / whole:.4g}"

@np.errstate(all="ignore")
def check(function, case, dtype=None):
    """(whether all is right, a line that says so or what is not)."""
    left = []
    leans = {}
    factors = {}
    for part, data in case["parts"].items():
        inputs = {name: np.array(x) if isinstance(x, list) else x
                  for name, x in (data["inputs"] | case["parameters"]).items()}
        right = {name: np.array(x, float) for name, x in data["outputs"].items()}
        outputs = call(function, copy.deepcopy(inputs), [*case["returns"]])
        length = inputs["length"]
        got = {name: outputs[name].astype(float) for name in right if name in outputs}
        for name, x in got.items():
            with contextlib.suppress(ValueError):                       # such as a bias that all queries share
                got[name] = np.broadcast_to(x, right[name].shape)
        least = dtype or max((x.dtype.name for x in outputs.values()), key=lambda name: UNIT.get(name, 0))
        allowed, single = ({name: tolerance(kind, *data["size"][name]) for name in got} for kind in (least, "float32"))
        off = {name: errors(name, x, right[name], length) for name, x in got.items()}
        known = {mistake["looks like"]: outputs_of(mistake, inputs)
                 for mistake in case["mistakes"] if mistake["part"] == part}
        if wrong := [name for name in got if off[name].max() > allowed[name]]:
            name = wrong[0]
            x = got[name]
            y = right[name]
            bad = off[name] > allowed[name]
            first = tuple(map(int, np.argwhere(bad)[0]))
            at = f" at position {inputs['positions'][..., first[0], first[-2]]}" if bad.ndim > 2 else ""
            says = f"{name} has the shape {x.shape}, not {y.shape}" if x.shape != y.shape else (
                f"{name}{[*first] or ''}{at} is {x[first]:.6g}, not {y[first]:.6g} "
                f"({bad.sum()} of {bad.size} are wrong)")
            words = looks_like(wrong, got, right, length, allowed, known)
            if all(off[name].max() <= single[name] for name in wrong):
                words = "rounded numbers: they are right to float32, whose tolerance is --dtype float32"
            return False, f"{part}: {says}; it looks like {words}"
        for words, made in known.items():
            if not words.startswith(("rounded table", "rounded bias")):         # as the finished ones may be
                leans[words] = leans.get(words, 0) + project(got, right, made, allowed)
        for name, y in right.items():
            factors[name] = factors.get(name, 0) + project(got, right, {name: 2 * last(y)}, allowed)
        left += [f"{part} {name} {off[name].max():.0e} of {allowed[name]:.0e}" for name in got]
    if words := hidden(leans, factors, UNIT.get(least, 0), least):
        return False, f"each error is within the tolerance, but {words}"
    return True, f"right; largest errors, of those allowed: {', '.join(left)}"

def main(argv=None):
    parser = argparse.ArgumentParser("python -m interop.conform", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.error = refuse
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION")
    parser.add_argument("--case", metavar="NAME", help="a file of vectors/, such as rope-yarn")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"),
                        help="whose tolerance holds (default: that of the arrays)")
    parser.add_argument("--list", action="store_true", help="the cases, with their formulas")
    args = parser.parse_args(argv)
    cases = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(VECTORS.glob("*.json"))}
    if args.list:
        return print(*(f"{name}: {case['formula']}" for name, case in cases.items()), sep="\n")
    if args.function is None or args.case not in cases:
        parser.error(f"give MODULE:FUNCTION and --case, one of {', '.join(cases)}")
    fine, line = check(load(args.function), cases[args.case], args.dtype)
    print(f"{args.case}: {line}")
    sys.exit(not fine)

if __name__ == "__main__":
    main()
