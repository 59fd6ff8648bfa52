# ruff: noqa: E501  (mutations are lines as they stand)
"""Whether the tests notice wrong lines: each mutation changes one line of the code, and the tests must fail.

    python -m lab.mutate                          every mutation; about half an hour on two cores
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
from config import InputError

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
    "engine/resume.py": "test_train test_kills",
    "engine/": "test_model test_past test_engine test_masked test_random_positions",
    "past/": "test_past test_hold test_random_positions test_softmax test_generate",
    "zoo/": "test_zoo test_softmax test_numpy test_model test_past test_errata test_export",
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
    ("model_numpy.py", "if scale < 1:", "if scale > 0:"),
    ("model_numpy.py", "std = 1.0 if name == \"embedding.weight\"", "std = 0.02 if name == \"embedding.weight\""),
    ("model_torch.py", "math.sqrt(q.shape[-1])", "q.shape[-1]"),
    ("model_torch.py", "torch.cat((a * cos - b * sin, b * cos + a * sin)", "torch.cat((a * cos + b * sin, b * cos - a * sin)"),
    ("model_torch.py", "return -self.of_each_head(q, table) * table", "return self.of_each_head(q, table) * table"),
    ("model_torch.py", "if self.slopes is None or (self.slopes.dtype, self.slopes.device) != (table.dtype, table.device):", "if self.slopes is None:"),
    ("model_torch.py", "ahead = one.triu(S - T + 1)", "ahead = one.triu(1)"),
    ("model_torch.py", "one.tril(S - T - window)", "one.tril(S - T - window - 1)"),
    ("model_torch.py", "is_causal=self.causal and T > 1", "is_causal=self.causal"),
    ("model_torch.py", "key = (self.config, n.shape, n.tobytes(), w.dtype, w.device)", "key = (n.shape, w.device)"),
    ("model_torch.py", "dtype=like.dtype if table.dtype.kind == \"f\" else None)", "dtype=None)"),
    ("data.py", "if len(text) < max_chars else", "if len(text) <= max_chars else"),
    ("data.py", "\"test\" if share < 2 * held_out", "\"test\" if share < held_out"),
    ("data.py", "return starts + rng.integers(size) if epoch else starts", "return starts"),
    ("data.py", "np.searchsorted(known, hashes, \"left\") < np.searchsorted(known, hashes, \"right\")", "np.searchsorted(known, hashes, \"left\") <= np.searchsorted(known, hashes, \"right\")"),
    ("train.py", "return config.lr * (step + 1) / warm", "return config.lr * step / warm"),
    ("train.py", "* (len(tokens) / len(batch))", "* (1 / len(batch))"),
    ("train.py", "if w.ndim < 2], \"weight_decay\": 0.0}", "if w.ndim < 2], \"weight_decay\": config.weight_decay}"),
    ("train.py", "torch.manual_seed(self.config.seed * 2**32 + step)", "torch.manual_seed(self.config.seed * 2**32)"),
    ("engine/resume.py", "if json.loads(line)[\"step\"] <= step:", "if json.loads(line)[\"step\"] < step:"),
    ("common.py", "if hash_tensors(tensors) != info[\"sha256\"]:", "if False:"),
    ("eval.py", "document[i : i + length + 1]", "document[i + 1 : i + length + 2]"),
    ("generate.py", "logits = model(read)[:, -1].cpu()", "logits = model(read)[:, 0].cpu()"),
    ("past/reading.py", "cache.positions[..., -1:] + 1", "len(cache)"),
    ("past/reading.py", "np.minimum(queries, self.config.context - 1)", "np.minimum(queries, self.config.context)"),
    ("past/reading.py", "local = self.config.context - 1 - self.chunk", "local = self.config.context - self.chunk"),
    ("past/reading.py", "None if w.is_inference() else w._version", "None if w.is_inference() else 0"),
    ("past/reading.py", "(moved - q) @ k.mT", "moved @ k.mT"),
    ("past/reading.py", ">= self.chunk.window", "> self.chunk.window"),
    ("past/reading.py", "apart == 1", "apart >= 1"),
    ("engine/fast.py", "split(b / 2**8, q.dtype, 3)", "split(b / 2**8, q.dtype, 2)"),
    ("engine/fast.py", "mul_(2**16 / (2**16 - dropped))", "mul_(1)"),
    ("engine/fast.py", "dw = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))", "dw = torch.zeros_like(w)"),
    ("engine/fast.py", "dx.copy_(((e @ w) / total).where(counted, 0))", "dx.copy_((e @ w) / total)"),
    ("engine/fast.py", "x = (x / total).where(counted, 0).to(w.dtype)", "x = (x / total).to(w.dtype)"),
    ("engine/fast.py", "losses.sum() / (targets >= 0).sum()", "losses.mean()"),
    ("engine/fast.py", "settings.scale * settings.theta * w", "settings.theta * w"),
    ("engine/fast.py", "(n - n[..., -1:])[..., None, :]", "n[..., None, :]"),
    ("zoo/cope.py", "len(self.e) - 1", "len(self.e) - 2"),
    ("zoo/cope.py", "gates * (1 - gates)", "gates"),
    ("zoo/cope.py", "scores.sigmoid().tril(S - T)", "scores.sigmoid().tril()"),
    ("zoo/cope.py", "(q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))", "q @ k.mT"),
    ("zoo/fire.py", "* early).sum()", ").sum()"),
    ("zoo/fire.py", "np.insert(keys, 0, 0, axis=-1)", "np.insert(keys, 0, 1, axis=-1)"),
    ("zoo/fire.py", "torch.maximum(m, L)", "m.clamp(min=1)"),
    ("zoo/fire.py", "PAIRS // x.shape[-1]", "PAIRS"),
    ("zoo/fox.py", "-np.logaddexp(0, -z)", "-np.logaddexp(0, z)"),
    ("zoo/fox.py", ".flip(-1).cumsum(-1).flip(-1) - gates", ".flip(-1).cumsum(-1).flip(-1)"),
    ("zoo/fox.py", "c[..., -q.shape[2] :, None]", "c[..., : q.shape[2], None]"),
    ("zoo/grape.py", "(du - u * np.vecdot(u, du)[:, None]) / size", "du / size"),
    ("zoo/grape.py", "F.normalize(self.v.type_as(like), dim=-1)", "self.v.type_as(like)"),
    ("zoo/grape.py", "math.log(math.e - 1)", "math.log(math.e)"),
    ("zoo/grape.py", " / np.float32(math.sqrt(shape[-1]))", ""),
    ("zoo/kerple.py", "np.abs(expe.distances(queries, keys))", "expe.distances(queries, keys)"),
    ("zoo/kerple.py", "{\"p\": 2, \"a\": 1}", "{\"p\": 1, \"a\": 2}"),
    ("zoo/kerple.py", "-p * ad / (1 + ad)", "-p * ad / (2 + ad)"),
    ("zoo/partial.py", "round(self.rotary_fraction * model.d_head, 9)", "self.rotary_fraction * model.d_head"),
    ("zoo/partial.py", "np.concatenate((back_k, dk[..., r:]), -1)", "np.concatenate((dk[..., :r], dk[..., r:]), -1)"),
    ("zoo/proportional.py", "cos[..., turning:], sin[..., turning:] = 1, 0", "cos[..., turning + 1:], sin[..., turning + 1:] = 1, 0"),
    ("zoo/proportional.py", "round(self.rotary_fraction * model.d_head / 2, 9)", "self.rotary_fraction * model.d_head / 2"),
    ("zoo/xpos.py", "np.clip(apart, 80 / np.log(z[0]), -80 / np.log(z[0]))", "np.clip(apart, 90 / np.log(z[0]), -90 / np.log(z[0]))"),
    ("zoo/xpos.py", "turn(dk, cos_k, -sin_k)", "turn(dk, cos_q, -sin_q)"),
    ("zoo/xpos.py", "model.context // 2", "model.context"),
    ("zoo/xpos.py", "+ 0.4) / 1.4", "+ 0.4) / 1.5"),
    ("zoo/softmax.py", "c = np.log(seen.sum(-1, keepdims=True))", "c = np.log1p(seen.sum(-1, keepdims=True))"),
    ("zoo/softmax.py", "-((1 - p.sum(-1", "((1 - p.sum(-1"),
    ("zoo/softmax.py", "keepdim=True) // FLOOR_SCALE", "keepdim=True) / FLOOR_SCALE"),
    ("zoo/softmax.py", "in_blocks = inner.embed is model_numpy.Encoding().embed", "in_blocks = True"),
    ("zoo/ablations.py", "if table.ndim == 4 else dphi[..., :l].sum(0)", "if table.ndim == 4 else dphi[0, ..., :l]"),
    ("zoo/ablations.py", "table[..., 1:] @ self.weight ", "table[..., 1:] @ self.weight.flip(0) "),
    ("zoo/llama.py", "rstd * (dz - z * along_z)", "rstd * dz"),
    ("zoo/llama.py", "(1 + gate * (1 - s))", "(1 + gate * s)"),
    ("past/cache.py", "min(len(self), self.sinks + self.window)", "min(len(self), self.sinks + self.window + 1)"),
    ("past/cache.py", "parts = self.positions, n", "parts = n, self.positions"),
    ("past/scaling.py", "min(np.ceil(pair(1)), D - 1)", "min(np.floor(pair(1)), D - 1)"),
    ("past/scaling.py", "s * length / L - (s - 1)", "s * length / L - s"),
    ("past/scaling.py", "(2 * np.pi) - 1) / (4 - 1)", "(2 * np.pi) - 1) / 4"),
    ("past/scaling.py", "long if length > L else short", "long if length >= L else short"),
    ("engine/masking.py", "draw < hidden + other", "draw < hidden"),
    ("engine/masking.py", "max(1, round(share * T))", "max(1, int(share * T))"),
    ("engine/masking.py", "hidden, vocab - 1, changed", "hidden, vocab - 2, changed"),
    ("past/writing.py", "shared = min(map(len, prompts))", "shared = max(map(len, prompts))"),
    ("past/writing.py", "room = model.longest - most + 1", "room = model.longest - most"),
    ("past/writing.py", "tokens[len(prompt) - least :]", "tokens"),
    ("past/writing.py", "if self.moves:", "if False:"),
    ("past/reading.py", "int(shared.cumprod(0).sum())", "1 + int(shared.cumprod(0).sum())"),
    ("past/writing.py", "np.random.default_rng([seed, b])", "np.random.default_rng([seed, 0])"),
    ("engine/fast.py", "ds = p * (dp - (p * dp).sum(-1, keepdim=True))", "ds = p * dp"),
    ("engine/fast.py", "db[..., :S] += (ds", "db[..., :S] = (ds"),
    ("engine/fast.py", "never = model_torch.unseen(j - i, S, causal, window, q.device)", "never = model_torch.unseen(j - i, S, causal, 0, q.device)"),
    ("zoo/fox.py", "F.logsigmoid(z.to(torch.promote_types(z.dtype, torch.float32)))", "F.logsigmoid(z)"),
    ("past/cache.py", "begin += lost", "begin += 0"),
]


def run_tests(folder, files):
    """The name of the first test that fails in a copy of the repository, or None if all pass."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [path for path in (f"tests/{name}.py" for name in files) if (folder / path).exists()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *paths],
                          cwd=folder, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [done.stderr[-200:] or "stopped"])[0].split(" - ")[0] if done.returncode else None

def try_mutation(base, file, old, new):
    """The test that notices the mutation in a copy of `base`, or None. ValueError unless `old` is in the file once."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        shutil.copytree(base, folder)
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
    with parser.one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        args = parser.parse_args(argv)
        chosen = [mutation for mutation in MUTATIONS if mutation[0] in args.files]
        survived = 0
        base = Path(scratch) / "base"
        shutil.copytree(ROOT, base, ignore=KEPT)                        # once: the working tree may change meanwhile
        every = {name: None for file in args.files for start, names in TESTS.items() if file.startswith(start)
                 for name in names.split()}
        if failed := run_tests(base, ["test_ladder", *every]):
            raise InputError(f"without any mutation {failed} fails: mend that first")
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = pool.map(lambda mutation: try_mutation(base, *mutation), chosen)
            for (file, old, new), noticed in zip(chosen, outcomes, strict=True):
                survived += noticed is None
                print(f"{'SURVIVED' if noticed is None else 'noticed':10}{file}: {old} -> {new}", flush=True)
                if noticed:
                    print(f"{'':10}{noticed}", flush=True)
        print(f"{len(chosen)} mutations, {survived} survived")
        sys.exit(survived > 2)

if __name__ == "__main__":
    main()
