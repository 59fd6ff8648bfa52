"""Compare this code with another checkout of it: token files, the first ten steps, the weights after forty.

    python -m lab.same_bits OLD [--cases expe,rope]        OLD: a checkout, such as of commit f821d60

Both train on the same machine with one thread, from the standard library's tokens, with --warmup 0: with warm-up,
encodings differ by less than what is to be found. These must have the same bits, in the losses and gradient norms of
the first ten steps and in the weights after forty: our --fast and the old code's only path, our plain path and the old
code with its fast parts taken away, and NumPy. The plain path's losses differ from the old fast ones by 1e-5 at most.
The masked objective takes its sums in another order: its losses differ by 1e-5 at most on both paths.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common import CommandLine, listed

HERE = Path(__file__).resolve().parent.parent
CASES = {"expe": "--pe expe", "expe-k": "--pe expe --on k", "rope": "--pe rope", "fox": "--pe fox",
         "alibi": "--pe alibi", "mlm": "--pe expe --objective mlm", "numpy": "--pe expe --backend numpy"}
FILES = ("train.bin", "val.bin", "test.bin", "tokenizer.tiktoken")
TOLERANCE = 1e-5
PLAIN = "import sys, fast, train; fast.PARTS.clear(); train.main(sys.argv[1:])"    # the old code without its fast parts

def run_script(root, *arguments):
    """Run Python in a checkout with one thread; its error goes where ours goes if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: {' '.join(command)}: {done.stderr[-500:]}")

def train_case(root, script, out, flags):
    """(losses and norms of the first ten steps (10, 2), {name: weights after forty})."""
    run_script(root, *script, "--preset", "mini", "--steps", "40", "--warmup", "0", "--out", out, *flags)
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    steps = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    [path] = [path for path in (out / "checkpoint.safetensors", out / "model.safetensors") if path.exists()]
    weights = {name: w for name, w in load_file(path).items() if name[:2] not in ("m.", "v.")}
    return np.array(steps[:10]), weights

def same_bits(one, other):
    same = np.array_equal(one[0], other[0]) and one[1].keys() == other[1].keys()
    return same and all(np.array_equal(one[1][name], other[1][name]) for name in one[1])

def compare_case(case, old, scratch):
    """Lines (path, what was found, whether that is good) of one case."""
    def make(root, script, path, *more):
        return train_case(root, script, scratch / f"{case}-{path}", [*CASES[case].split(), *more])

    of_old = make(old, ["train.py"], "old", "--data", scratch / "old")
    if case == "numpy":
        ours = make(HERE, ["train.py"], "new", "--data", scratch / "new")
        return [("NumPy", describe(of_old, ours), same_bits(of_old, ours))]
    of_plain = make(old, ["-c", PLAIN], "old-plain", "--data", scratch / "old")
    fast = make(HERE, ["train.py"], "fast", "--fast", "--data", scratch / "new")
    plain = make(HERE, ["train.py"], "plain", "--data", scratch / "new")
    near = {path: losses_apart(of_old, ours) <= TOLERANCE for path, ours in (("fast", fast), ("plain", plain))}
    masked = case == "mlm"
    return [("fast", describe(of_old, fast), near["fast"] if masked else same_bits(of_old, fast)),
            ("plain", describe(of_plain, plain), near["plain"] if masked else same_bits(of_plain, plain)),
            ("plain beside the old fast", describe(of_old, plain), near["plain"])]

def losses_apart(one, other):
    return abs(other[0] / one[0] - 1)[:, 0].max()

def describe(one, other):
    if same_bits(one, other):
        return "the same bits"
    losses, norms = abs(other[0] / one[0] - 1).max(0)
    return f"losses within {losses:.1e}, gradient norms within {norms:.1e}"

def main(argv=None):
    parser = CommandLine(prog="python -m lab.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD", help="another checkout of this repository")
    parser.add_argument("--cases", type=listed(str, *CASES), default=list(CASES), metavar="NAME,...",
                        help=f"of {', '.join(CASES)} (default: all)")
    with parser.one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        args = parser.parse_args(argv)
        old = args.old.resolve()
        scratch = Path(scratch)
        wrong = []
        for root, name in ((old, "old"), (HERE, "new")):
            run_script(root, "data.py", "stdlib", "--out", scratch / name)
        for file in FILES:
            same = (scratch / "old" / file).read_bytes() == (scratch / "new" / file).read_bytes()
            print(f"{file:22}{'the same bytes' if same else 'DIFFERENT'}", flush=True)
            wrong += [file] * (not same)
        for case in args.cases:
            for path, difference, good in compare_case(case, old, scratch):
                print(f"{case:8}{path:28}{difference}{'' if good else '   WRONG'}", flush=True)
                wrong += [case] * (not good)
        sys.exit(1 if wrong else 0)

if __name__ == "__main__":
    main()
