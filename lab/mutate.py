# ruff: noqa: E501  (mutations are lines as they stand)
"""Whether the tests notice wrong lines: each mutation changes one line of the code, and the tests must fail.

    python -m lab.mutate                          every mutation; some twenty minutes on two cores
    python -m lab.mutate --files zoo/fox.py       those of some files

A mutation is tried in a copy of the repository, by the check ladder and then by the tests of its file (TESTS), which are
a part of the quick suite. It survives if all of them pass. The exit status is 1 if more than two survive.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import CommandLine, at_least, listed

ROOT = Path(__file__).resolve().parent.parent
KEPT = shutil.ignore_patterns(".git", ".venv", "runs", "data", "__pycache__", ".pytest_cache", ".ruff_cache", "results",
                              "pictures", "*.egg-info")

# Which tests to run after the ladder, by the beginning of a file's name.
TESTS = {
    "expe.py": "test_expe test_zoo",
    "config.py": "test_config test_train",
    "data.py": "test_data",
    "common.py": "test_train test_paths test_kills",
    "train.py": "test_train test_kills",
    "eval.py": "test_eval",
    "generate.py": "test_generate",
    "model_": "test_numpy test_model test_past",
    "engine/": "test_model test_past test_engine test_masked test_random_positions",
    "past/": "test_past test_hold test_random_positions test_softmax test_generate",
    "zoo/": "test_zoo test_softmax test_numpy test_model test_past test_errata",
}

# (file, a piece of one line that is in the file once, what takes its place)
MUTATIONS = [
    ("expe.py", "(n + step * j)", "(n - step * j)"),
    ("expe.py", "(n - j) // len(j) + 1)", "(n - j) // len(j))"),
    ("expe.py", "** (-2 * pair / d_model)", "** (-pair / d_model)"),
    ("expe.py", "(-np.arange(0, d_head, 2) / d_head)", "(np.arange(0, d_head, 2) / d_head)"),
    ("expe.py", "2.0 ** (-8 * np.arange(1, lower + 1) / lower)", "2.0 ** (-8 * np.arange(lower) / lower)"),
    ("expe.py", "n_buckets // 2 * (d < 0)", "n_buckets // 2 * (d <= 0)"),
    ("expe.py", "while d**r * e**k < max_distance**k * e**r:", "while d**r * e**k <= max_distance**k * e**r:"),
    ("config.py", "64 / model.context if", "32 / model.context if"),
    ("config.py", "return self.slopes * (d if", "return (d if"),
    ("config.py", "if self.nope_every and (i + 1) % self.nope_every == 0:", "if self.nope_every and i % self.nope_every == 0:"),
    ("model_numpy.py", "dx = rstd * (dz - dz.mean(-1, keepdims=True) - z * along_z)", "dx = rstd * (dz - z * along_z)"),
    ("model_numpy.py", "dx *= 1 - s", "dx *= s"),
    ("model_numpy.py", "dh[..., :l] = 0", "dh[..., :0] = 0"),
    ("model_numpy.py", "return turn(dq, cos, -sin), turn(dk, cos, -sin), {}", "return turn(dq, cos, -sin), turn(dk, cos, sin), {}"),
    ("model_numpy.py", "dk *= 1 / score_divisor(q)", "dk *= 1"),
    ("model_numpy.py", "dp -= np.vecdot(dp, p)[..., None]", "dp -= 0"),
    ("model_numpy.py", "p *= (dlosses * counted)[:, None]", "p *= dlosses[:, None]"),
    ("model_numpy.py", "scores += np.triu(never, 1)", "scores += np.triu(never, 2)"),
    ("model_numpy.py", "scores += np.tril(never, -window)", "scores += np.tril(never, -window - 1)"),
    ("model_numpy.py", "return dh + dh_score + dh_output, grads_project", "return dh + dh_output, grads_project"),
    ("model_numpy.py", "decay = weight_decay if w.ndim >= 2 else 0.0", "decay = weight_decay"),
    ("model_numpy.py", "(np.sqrt(v / unbias2) + eps)", "(np.sqrt(v) + eps)"),
    ("model_numpy.py", "scale = min(1.0, limit / (norm + 1e-6))", "scale = limit / (norm + 1e-6)"),
    ("model_numpy.py", "std = 1.0 if name == \"embedding.weight\"", "std = 0.02 if name == \"embedding.weight\""),
    ("model_torch.py", "math.sqrt(q.shape[-1])", "q.shape[-1]"),
    ("model_torch.py", "torch.cat((a * cos - b * sin, b * cos + a * sin)", "torch.cat((a * cos + b * sin, b * cos - a * sin)"),
    ("model_torch.py", "return -self.of_each_head(q, table) * table", "return self.of_each_head(q, table) * table"),
    ("model_torch.py", "if self.slopes is None or (self.slopes.dtype, self.slopes.device) != (table.dtype, table.device):", "if self.slopes is None:"),
    ("model_torch.py", "ahead = one.triu(S - T + 1)", "ahead = one.triu(1)"),
    ("model_torch.py", "one.tril(S - T - window)", "one.tril(S - T - window - 1)"),
    ("model_torch.py", "causal = self.causal and T > 1", "causal = self.causal"),
    ("model_torch.py", "asked = (self.config, n.shape, n.tobytes(), w.dtype, w.device)", "asked = (n.shape, w.device)"),
    ("model_torch.py", "dtype=like.dtype if table.dtype.kind == \"f\" else None)", "dtype=None)"),
    ("data.py", "if len(text) < max_chars else", "if len(text) <= max_chars else"),
    ("data.py", "\"test\" if share < 2 * held_out", "\"test\" if share < held_out"),
    ("data.py", "return starts + rng.integers(size) if epoch else starts", "return starts"),
    ("data.py", "np.searchsorted(known, hashes, \"left\") < np.searchsorted(known, hashes, \"right\")", "np.searchsorted(known, hashes, \"left\") <= np.searchsorted(known, hashes, \"right\")"),
    ("train.py", "return config.lr * (step + 1) / warm", "return config.lr * step / warm"),
    ("train.py", "* (len(tokens) / len(batch))", "* (1 / len(batch))"),
    ("train.py", "if w.ndim < 2], \"weight_decay\": 0.0}", "if w.ndim < 2], \"weight_decay\": config.weight_decay}"),
    ("train.py", "torch.manual_seed(self.config.seed * 2**32 + step)", "torch.manual_seed(self.config.seed * 2**32)"),
    ("train.py", "json.loads(line)[\"step\"] <= step]", "json.loads(line)[\"step\"] < step]"),
    ("common.py", "if hash_tensors(tensors) != info[\"sha256\"]:", "if False:"),
    ("eval.py", "document[i : i + length + 1]", "document[i + 1 : i + length + 2]"),
    ("generate.py", "logits = model(read)[:, -1].cpu()", "logits = model(read)[:, 0].cpu()"),
]


def run_tests(folder, files):
    """The name of the first test that fails in a copy of the repository, or None if all pass."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [path for path in (f"tests/{name}.py" for name in files) if (folder / path).exists()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *paths],
                          cwd=folder, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [done.stderr[-200:] or "stopped"])[0].split(" - ")[0] if done.returncode else None

def try_mutation(file, old, new):
    """The test that notices the mutation, or None if it survives. ValueError unless `old` is in the file once."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        shutil.copytree(ROOT, folder, ignore=KEPT)
        text = (folder / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{file} has {old!r} {text.count(old)} times, and a mutation needs it once")
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")
        more = next(names for start, names in TESTS.items() if file.startswith(start))
        return run_tests(folder, ["test_ladder"]) or run_tests(folder, more.split())

def main(argv=None):
    parser = CommandLine(prog="python -m lab.mutate", description=__doc__.partition("\n")[0])
    files = sorted({file for file, *_ in MUTATIONS})
    parser.add_argument("--files", type=listed(str, *files), default=files, metavar="FILE,...",
                        help="mutate these files only (default: all that have mutations)")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), metavar="N",
                        help="mutations tried at once (default: %(default)s, one a core)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        chosen = [mutation for mutation in MUTATIONS if mutation[0] in args.files]
        survived = 0
        with ThreadPoolExecutor(args.jobs) as pool:
            for (file, old, new), noticed in zip(chosen, pool.map(lambda m: try_mutation(*m), chosen), strict=True):
                survived += noticed is None
                print(f"{'SURVIVED' if noticed is None else 'noticed':10}{file}: {old} -> {new}", flush=True)
                if noticed:
                    print(f"{'':10}{noticed}", flush=True)
        print(f"{len(chosen)} mutations, {survived} survived")
        sys.exit(survived > 2)

if __name__ == "__main__":
    main()
