"""Compare this code with another checkout of it: the tokens, the first ten steps and the weights after forty.

    git worktree add ../before HEAD~1
    python -m lab.same_bits ../before [--cases expe,rope]

Both train on one machine with one thread, from the standard library's tokens, with --warmup 0: with warm-up, steps
differ by less than what is to be found. A line says of each case whether all bits are the same, or by how much the
losses and gradient norms of the first ten steps differ at most. The exit status is 1 if any case differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common import CHECKPOINT, CommandLine, listed

HERE = Path(__file__).resolve().parent.parent
CASES = {"expe": "--pe expe", "expe-fast": "--pe expe --fast", "expe-k": "--pe expe --on k", "rope": "--pe rope",
         "fox": "--pe fox", "fox-fast": "--pe fox --fast", "alibi": "--pe alibi", "shaw": "--pe shaw",
         "mlm": "--pe expe --objective mlm", "numpy": "--pe expe --backend numpy"}
FILES = ("train.bin", "val.bin", "test.bin", "tokenizer.tiktoken")

def run_script(root, *arguments):
    """Run a script of a checkout with one thread; its error goes where ours goes if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: {' '.join(command)}: {done.stderr[-500:]}")

def train_case(root, case, tokens, out):
    """(losses and norms of the first ten steps (10, 2), {name: weights after forty}) of a case in a checkout."""
    run_script(root, "train.py", "--preset", "mini", "--steps", "40", "--warmup", "0", "--data", tokens, "--out", out,
               *CASES[case].split())
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    steps = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    return np.array(steps[:10]), load_file(out / CHECKPOINT)

def describe_difference(one, other):
    """"" if all bits are the same, or by how much the first ten steps differ."""
    (steps, weights), (other_steps, other_weights) = one, other
    if np.array_equal(steps, other_steps) and weights.keys() == other_weights.keys() and all(
            np.array_equal(w, other_weights[name]) for name, w in weights.items()):
        return ""
    losses, norms = abs(other_steps / steps - 1).max(0)
    return f"DIFFERENT: losses within {losses:.1e}, gradient norms within {norms:.1e}"

def main(argv=None):
    parser = CommandLine(prog="python -m lab.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, metavar="FOLDER", help="another checkout of this repository")
    parser.add_argument("--cases", type=listed(str, *CASES), default=list(CASES), metavar="NAME,...",
                        help=f"of {', '.join(CASES)} (default: all)")
    with parser.one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        args = parser.parse_args(argv)
        roots = {"other": args.other.resolve(), "ours": HERE}
        scratch = Path(scratch)
        for name, root in roots.items():
            run_script(root, "data.py", "stdlib", "--out", scratch / name)
        found = {file: "" if (scratch / "other" / file).read_bytes() == (scratch / "ours" / file).read_bytes()
                 else "DIFFERENT" for file in FILES}
        print("".join(f"{file:22}{found[file] or 'the same bytes'}\n" for file in FILES), end="", flush=True)
        for case in args.cases:
            found[case] = describe_difference(*(train_case(root, case, scratch / name, scratch / f"{case}-{name}")
                                                for name, root in roots.items()))
            print(f"{case:22}{found[case] or 'the same bits'}", flush=True)
        sys.exit(any(found.values()))

if __name__ == "__main__":
    main()
