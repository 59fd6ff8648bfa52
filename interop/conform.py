"""Hold anybody's positional encoding against vectors/: python -m interop.conform MODULE:FUNCTION --case rope-yarn

FUNCTION takes, by name, any of the case's inputs and parameters, as NumPy arrays: vectors/NAME.json lists them, with
shapes. It returns the case's first output or a tuple of the first ones, or a dict of any of them by name, as anything
that numpy.asarray takes. For RoPE: def mine(q, k, positions, rope_parameters): ...; return q, k

It is called for two sequences, one with gaps (near), for positions up to 10^6 (far) and for one step with a cache
(decode: cached_k and cached_v are there alone, give them a default). Exit status: 0 if all is right; 1 if not, with one
line that says where and what kind of error it looks like; 2 if it could not be checked.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import sys
import traceback
from pathlib import Path

import numpy as np

VECTORS = Path(__file__).resolve().parent / "vectors"

def refuse(message):
    print("python -m interop.conform: error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)

def load(name):
    """The function of MODULE:FUNCTION; the module may lie in the folder where one is."""
    module, _, path = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        inspect.signature(found)
        return found
    except Exception as error:                                          # whatever a user's file can raise
        refuse(f"{name} is no MODULE:FUNCTION here: {type(error).__name__}: {error}")

def called(function, given, names):
    """{output: array} of what the function returns for those of the given inputs that it names."""
    takes = inspect.signature(function).parameters
    everything = any(p.kind == p.VAR_KEYWORD for p in takes.values())
    for name, p in takes.items():
        if name not in given and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            refuse(f"the function asks for {name!r}, and there are {', '.join(given)}: give it a default")
    try:
        result = function(**{name: x for name, x in given.items() if everything or name in takes})
        if not isinstance(result, dict):
            result = dict(zip(names, result if isinstance(result, tuple) else [result], strict=False))
        result = {name: np.asarray(x) for name, x in result.items()}
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        refuse(f"{Path(at.filename).name}:{at.lineno}: {type(error).__name__}: {error}")
    if not result or not result.keys() <= {*names}:
        refuse(f"the function must return some of {', '.join(names)}, got {', '.join(result) or 'nothing'}")
    return result

def errors(name, got, right, length):
    """The error of each number over max(1, the right one), of inv_freq times length; 0 where none is right.

    Biases and scores may differ by one number a query: a softmax drops what all keys share.
    """
    if got.shape != right.shape:
        return np.full(right.shape, np.inf)

    def off(got, right):
        off = np.abs(got - right) / np.maximum(1, np.abs(right)) * (length if name == "inv_freq" else 1)
        return np.where(np.isnan(right), 0, np.nan_to_num(off, nan=np.inf))

    if name not in ("bias", "scores"):
        return off(got, right)
    return min(off(got, right), off(got - got[..., :1], right - right[..., :1]), key=np.max)

def looks_like(wrong, got, right, length, near, mistakes):
    """The words of the known mistake that is nearest to all of this, or to the wrong outputs, or to a multiple of one.

    Mistakes are known by the last sequence, and only those are asked that change one of the wrong outputs.
    """
    last = lambda x: x[-1:] if x.ndim > 2 else x  # noqa: E731
    off = lambda name, x, y: errors(name, x, y, length).max()  # noqa: E731
    if all(off(name, last(got[name]), last(right[name])) <= near for name in wrong):
        return "the last sequence's: it is right, and others of the batch are not"
    known = {m["looks like"]: {name: np.array(x, float) for name, x in m["outputs"].items()} for m in mistakes}
    known = {words: made for words, made in known.items() if made.keys() & {*wrong}}
    for names in (got, wrong):
        far = {words: max(off(name, last(got[name]), made.get(name, last(right[name]))) for name in names)
               for words, made in known.items()}
        if far and min(far.values()) <= near:
            return min(far, key=far.get)
    name = wrong[0]
    for words, made in {"the right numbers": {}, **known}.items():
        x, y = last(got[name]), made.get(name, last(right[name]))
        times = np.nansum(x * y) / (np.nansum(y * y) or 1) if x.shape == y.shape else 1
        if np.isfinite(times) and off(name, x, times * y) <= near:
            return f"{words}, times {times:.6g}"
    return "no mistake that is known here"

@np.errstate(all="ignore")
def check(function, case, dtype=None):
    """(whether all is right, a line that says so or what is not)."""
    left = []
    for part, data in case["parts"].items():
        given = (data["inputs"] | case["parameters"]).items()
        given = {name: np.array(x) if isinstance(x, list) else x for name, x in given}
        right = {name: np.array(x, float) for name, x in data["outputs"].items()}
        found, length = called(function, given, [*case["returns"]]), given["length"]
        got = {name: found[name].astype(float) for name in right if name in found}
        for name, x in got.items():
            with contextlib.suppress(ValueError):                       # such as a bias that all queries share
                got[name] = np.broadcast_to(x, right[name].shape)
        tolerance = data["tolerance"]
        allowed = {name: tolerance.get(dtype or found[name].dtype.name, tolerance["float64"]) for name in got}
        off = {name: errors(name, x, right[name], length) for name, x in got.items()}
        if wrong := [name for name in got if off[name].max() > allowed[name]]:
            name, x, y = wrong[0], got[wrong[0]], right[wrong[0]]
            bad = off[name] > allowed[name]
            first = tuple(map(int, np.argwhere(bad)[0]))
            at = f" at position {given['positions'][first[0], first[-2]]}" if bad.ndim > 2 else ""
            says = f"{name} has the shape {x.shape}, not {y.shape}" if x.shape != y.shape else (
                f"{name}{[*first] or ''}{at} is {x[first]:.6g}, not {y[first]:.6g} "
                f"({bad.sum()} of {bad.size} are wrong)")
            known = [mistake for mistake in case["mistakes"] if mistake["part"] == part]
            words = looks_like(wrong, got, right, length, max(allowed[name], 1e-4), known)
            if all(off[name].max() <= tolerance["float32"] for name in wrong):
                words = "rounded numbers: they are right to float32, whose tolerance is --dtype float32"
            return False, f"{part}: {says}; it looks like {words}"
        left += [f"{part} {name} {off[name].max():.0e} of {allowed[name]:.0e}" for name in got]
    return True, f"right; largest errors, of those allowed: {', '.join(left)}"

def main(argv=None):
    parser = argparse.ArgumentParser("python -m interop.conform", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.error = refuse
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION")
    parser.add_argument("--case", metavar="NAME", help="a file of vectors/, such as rope-yarn")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"),
                        help="whose tolerance holds (default: that of the arrays which are returned)")
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
