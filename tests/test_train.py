"""A training run: what it leaves, that it resumes bit for bit, and that each wrong flag gets one line."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, process, read_log, refused, slow, wait_for

import backends
import data
import model_numpy
import tasks
import train
from engine import masking
from files import hash_file
from runs import CHECKPOINT, checkpoint_info, read_checkpoint, read_run
from training_run import commit_of

SMALL = [*TINY, "--steps", "12", "--eval-every", "5", "--checkpoint-every", "4", "--dropout", "0.1"]


def tensors(run):
    return read_checkpoint(run)[0]


def same_run(a, b):
    """Whether two runs have the same weights, moments and log."""
    one, other = tensors(a), tensors(b)
    same_log = read_log(a) == read_log(b)
    return same_log and one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    """{flags: the folder of a run that was not interrupted}."""
    folder = tmp_path_factory.mktemp("finished")
    found = {}
    for name, flags in {"torch": [], "numpy": ["--backend", "numpy"], "fast": ["--fast"]}.items():
        done = command("train.py", *SMALL, *flags, "--data", tokens, "--out", name, cwd=folder)
        assert done.returncode == 0, done.stderr
        found[name] = flags, folder / name
    return found


def test_a_run_leaves_what_it_promises(finished, tokens):
    _, run = finished["torch"]
    names = {"config.json", CHECKPOINT, "log.jsonl", "tokenizer.tiktoken", ".lock"}
    assert {path.name for path in run.iterdir()} == names
    model, config, record = read_run(run)
    shapes = model_numpy.parameter_shapes(model)
    found, info = read_checkpoint(run)
    assert {name: x.shape for name, x in found.items()} == {
        f"{kind}{name}": shape for name, shape in shapes.items() for kind in ("", "m.", "v.")}
    assert info["step"] == config.steps == 12
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 12]
    assert record["data"]["splits"] == data.read_meta(tokens)["splits"]
    assert record["provenance"]["command"].startswith("python train.py --preset mini")


@pytest.mark.parametrize("name", ["torch", "numpy", "fast"])
def test_ctrl_c_keeps_the_last_step_and_resumes(name, finished, tokens, tmp_path, stop_at, monkeypatch):
    flags, whole = finished[name]
    arguments = ["train.py", *SMALL, *flags, "--data", tokens, "--out", "run"]
    stop_at(6)
    done = command(*arguments, cwd=tmp_path)
    monkeypatch.undo()
    assert done.returncode == 130 and "go on with: python train.py --out run --resume" in done.stderr
    assert checkpoint_info(tmp_path / "run")["step"] == 7
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert same_run(tmp_path / "run", whole)
    done = command(*arguments, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "complete" in done.stdout


def test_a_run_goes_on_with_its_tokens_where_the_text_has_changed(books, tmp_path):
    shutil.copytree(books, tmp_path / "books")
    flags = [*TINY, "--steps", "4", "--data", "books", "--out", "run"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    (tmp_path / "books" / "more.txt").write_text("more")
    assert "has changed since" in refused(command("train.py", *flags, "--overwrite", cwd=tmp_path))
    (tmp_path / "run/log.jsonl").unlink()
    done = command("train.py", "--out", "run", "--resume", "--steps", "6", cwd=tmp_path)
    assert done.returncode == 0 and checkpoint_info(tmp_path / "run")["step"] == 6, done.stderr


@pytest.mark.parametrize("changed", [*data.SPLITS, "tokenizer"])
def test_a_run_goes_on_with_its_own_data_alone(changed, tokens, tmp_path):
    """Here another folder of tokens took the place of the run's, which is whole and differs in one file."""
    shutil.copytree(tokens, tmp_path / "data")
    flags = [*TINY, "--layers", "1", "--steps", "1", "--data", "data", "--out", "run"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    path = tmp_path / "data" / ("tokenizer.tiktoken" if changed == "tokenizer" else f"{changed}.bin")
    meta = data.read_meta(tmp_path / "data")
    if changed == "tokenizer":
        *lines, last = path.read_text().splitlines()
        path.write_text("".join(f"{line}\n" for line in [last, *lines]))
    else:
        path.write_bytes(path.read_bytes()[:-2])
    (meta["tokenizer"] if changed == "tokenizer" else meta["splits"][changed])["sha256"] = hash_file(path)
    (tmp_path / "data/meta.json").write_text(json.dumps(meta))
    line = refused(command("train.py", "--out", "run", "--resume", "--steps", "2", cwd=tmp_path))
    assert f"data is not the data that run was trained on: the hash of {changed} differs" in line


def test_a_finished_run_goes_on_to_more_steps(tokens, tmp_path):
    flags = [*TINY, "--steps", "4", "--data", tokens, "--out", "run"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    before = read_log(tmp_path / "run")
    for more in ("9", "7"):                                             # not fewer than there are
        done = command("train.py", "--out", "run", "--resume", "--steps", more, cwd=tmp_path)
        assert (done.returncode == 0) == (more == "9"), done.stderr
    assert read_log(tmp_path / "run")[: len(before)] == before
    assert checkpoint_info(tmp_path / "run")["step"] == read_run(tmp_path / "run")[1].steps == 9
    rates = [line["lr"] for line in map(json.loads, read_log(tmp_path / "run")) if "lr" in line]
    assert rates[4:] == [backends.learning_rate(read_run(tmp_path / "run")[1], step) for step in range(4, 9)]


VARIANTS = ["--pe expe --once --learn random", "--pe exqpe --theta2 1/8 --softmax sinks", "--pe t5 --window 9",
            "--pe fox --window 4 --nope-every 2", "--pe expe --objective mlm", "--pe rope --dtype bf16 --fast",
            "--pe learned --n-positions 40 --random-positions 40", "--pe shaw --tied --norm rmsnorm --mlp swiglu"]


@pytest.mark.parametrize("line", [*VARIANTS[4:7], *slow(*VARIANTS[:4], *VARIANTS[7:])])
def test_variants_train_stop_and_resume_bit_for_bit(line, tokens, tmp_path, stop_at, monkeypatch):
    flags = [*TINY, *line.split(), "--steps", "4", "--data", tokens]
    assert command("train.py", *flags, "--out", "whole", cwd=tmp_path).returncode == 0
    stop_at(1)
    assert command("train.py", *flags, "--out", "run", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    done = command("train.py", *flags, "--out", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("line", ["", "--objective mlm", *(f"--data task:{name} --context 40" for name in tasks.TASKS)])
def test_gradient_accumulation_is_the_whole_batch(line, tokens):
    """Also where sequences have different numbers of targets, as those of many tasks have."""
    flags = [*TINY[:2], "--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "6", *line.split()]
    _, model, config = train.read_flags(flags if "task:" in line else [*flags, "--vocab", "300", "--context", "16"])
    source, folder = (tasks, config.data) if "task:" in line else (data, tokens)
    batch = source.batch(source.open_split(folder, "train"), model.context, 6, 0, 0)
    if config.objective == "mlm":
        batch = masking.mask_tokens(batch[0], model.vocab, np.random.default_rng(0))
    for kind in (backends.TorchBackend, backends.NumpyBackend):
        found = []
        for size in (0, 1, 4):
            backend = kind(model, dataclasses.replace(config, micro_batch=size), torch.device("cpu"))
            found.append([backend.validation_loss(batch), *map(float, backend.step(batch, 0))])
        np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-5)
        assert found[0][0] == pytest.approx(found[0][1], rel=1e-6)


def test_a_step_waits_for_no_number_of_the_device(tokens, monkeypatch):
    """.item(), float() and .cpu() would; the loop reads a loss when the next step is on its way."""
    _, model, config = train.read_flags([*TINY, "--micro-batch", "2"])
    backend = backends.TorchBackend(model, config, torch.device("cpu"))
    batch = data.batch(data.open_split(tokens, "train"), model.context, 4, 0, 0)
    backend.step(batch, 0)
    with monkeypatch.context() as patched:
        for name in ("item", "__float__", "__bool__", "__int__", "__index__", "cpu", "tolist", "numpy", "nonzero"):
            patched.setattr(torch.Tensor, name, lambda self, *more: pytest.fail("a step waits"))
        loss, norm = backend.step(batch, 1)
    assert torch.is_tensor(loss) and torch.is_tensor(norm)


@pytest.mark.parametrize("nan", [6, 7])
@pytest.mark.parametrize("pause", ["--checkpoint-every", "--eval-every"])
def test_a_nan_before_a_pause_ends_the_run_there(tokens, tmp_path, monkeypatch, pause, nan):
    """Losses are read a step late, but a checkpoint or a validation loss waits for all that come before it."""
    step = backends.TorchBackend.step

    def broken(self, batch, number):
        loss, norm = step(self, batch, number)
        return loss if number != nan else loss * np.nan, norm

    monkeypatch.setattr(backends.TorchBackend, "step", broken)
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--data", str(tokens), "--out", str(tmp_path / "run"), "--steps", "12", pause, "8"])
    assert stop.value.code == 2 and not (tmp_path / "run" / CHECKPOINT).exists()
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [(line["step"], "loss" in line) for line in map(json.loads, lines)] == [(i, True) for i in range(1, nan + 1)]


def test_a_full_gpu_memory_halves_the_micro_batch(tokens, monkeypatch, capsys):
    """The step is repeated whole: its loss and weights are those of a run that began so."""
    _, model, config = train.read_flags([*TINY, "--dropout", "0.1", "--batch-size", "4"])
    batch = data.batch(data.open_split(tokens, "train"), model.context, 4, 0, 0)
    right = backends.TorchBackend(model, dataclasses.replace(config, micro_batch=1), torch.device("cpu"))
    backend = backends.TorchBackend(model, config, torch.device("cpu"))
    forward, calls = backend.model.forward, []

    def short(tokens, *more):
        calls.append(len(tokens))
        if len(tokens) == 4 or len(calls) == 3:                         # the second time with gradients of a part
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tokens, *more)

    backend.model.forward = short
    assert backend.step(batch, 0)[0] == right.step(batch, 0)[0]
    assert calls == [4, 2, 2, 1, 1, 1, 1] and "--micro-batch 1" in capsys.readouterr().err
    assert all(torch.equal(x, y) for x, y in zip(backend.model.parameters(), right.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [backends.TorchBackend, backends.NumpyBackend])
def test_dropout_is_a_function_of_seed_and_step(kind, tokens):
    _, model, config = train.read_flags([*TINY, "--dropout", "0.3", "--lr", "1e-30", "--layers", "1"])
    batch = data.batch(data.open_split(tokens, "train"), model.context, 4, 0, 0)
    losses = [kind(model, config, torch.device("cpu")).step(batch, step)[0] for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("line, name", [
    ("--preset mini --pe expe --l 24 --fast", "mini-expe-s0"),
    ("--preset mini --pe expe --l 8 --lr 2e-3 --tied", "mini-expe-l-8-tied-True-lr-0.002-s0"),
    ("--preset paper-35m --pe exqpe --data a/b", "paper-35m-exqpe-data-b-s0"),
    ("--pe expe --cycle expe:window=3,expe:theta=1/512", "mini-expe-cycle-expe-window=3,expe-theta=1-512-s0")])
def test_default_names_are_preset_encoding_and_the_flags_that_differ(line, name):
    args, _, _ = train.read_flags(line.split())
    assert str(args.out) == f"runs/{name}"


def test_flags_reach_the_configs_and_what_depends_on_them():
    line = "--preset paper-35m --pe exqpe --theta2 1/8 --width 48 --heads 3 --lr 2e-3"
    _, model, config = train.read_flags(line.split())
    assert (model.encoding.theta2, model.encoding.l, model.mlp_width, config.end_lr) == (1 / 8, 24, 192, 6e-6)
    _, model, _ = train.read_flags("--preset llama-135m --pe expe".split())
    assert (model.encoding.l, model.norm, model.mlp) == (96, "rmsnorm", "swiglu")


WRONG = {
    "--heads 3": "--heads must be a divisor of --width, 128, got 3", "--lr nan": "--lr must be",
    "--pe rope --l 3":
        "unrecognized arguments: --l 3 (--l is a flag of --pe expe and exqpe; train.py --pe rope --help",
    "--pe expe --no-once --fire-width 3": "--fire-width is a flag of --pe fire;",
    "--pe exep": "--pe must be the name of an encoding, got 'exep' (did you mean expe?)",
    "--pe wal": "got 'wal' (did you mean wall?)", "--preset mni": "invalid choice: 'mni' (did you mean mini?",
    "--softmax lgo": "got 'lgo' (did you mean log?)",
    "--data task:first-lats": "got task:first-lats (did you mean first-last?)",
    "--l 500": "--l must be from 1 to the width",
    "--steps 1.5": "--steps", "--theta 1/0": "--theta", "--preset big": "--preset", "--nonsense": "--nonsense",
    "--no-causal": "--no-causal shows a query its target", "--objective mlm --pe fox": "--objective mlm",
    "--objective mlm --causal": "leave out --causal",
    "--random-positions 3": "--random-positions must be from 16 (--context) on, got 3",
    "--pe fox --random-positions 64": "--random-positions is for encodings that read positions",
    "--pe nope --cycle nope,rope --random-positions 3": "--random-positions must be from 16 (--context) on, got 3",
    "--device cuda:99": "--device must be", "--backend numpy --compile": "--backend numpy",
    "--data missing": "--data: missing: no such file", "--vocab 400": "a vocabulary of 300, and --vocab 400 was given",
    f"--out {'a' * 300} --resume": "this name is too long for a file",
    "--init-from missing": "--init-from: missing", "rope": "did you mean --pe rope?",
    "--pe expe-on-k": "did you mean --pe expe --on k?", "--batch 3": "did you mean --batch-size?",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_flag_is_named_in_one_line_and_nothing_is_left(line, tokens, tmp_path):
    flags = ["--preset", "mini", "--context", "16", "--vocab", "300", "--data", tokens, "--steps", "1", *line.split()]
    said = refused(command("train.py", *flags, cwd=tmp_path))
    assert WRONG[line] in said
    assert not any(path.is_file() and path.name != ".lock" for path in tmp_path.rglob("*"))


SCRIPTS = [*sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")),
           *(f"{path.parent.name}.{path.stem}" for folder in ("engine", "interop", "learn", "lab", "studies", "web")
             for path in sorted((ROOT / folder).glob("*.py")) if "__main__" in path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_without_the_packages_is_told_where_they_are(script):
    """Of -S no package is found; tests/test_corpora.py has a datatrove that is missing alone."""
    words = [script] if script.endswith(".py") else ["-m", script]
    done = subprocess.run([sys.executable, "-S", *words], cwd=ROOT, text=True, capture_output=True)
    line = refused(done)
    assert re.search(r"this Python has no \w+; activate .venv: source .venv/bin/activate \(make setup", line)


@pytest.mark.parametrize("script, name", [("generate.py", "torch"), ("lab.measure", "torch"), ("data.py", "tiktoken")])
def test_another_missing_package_is_named_and_a_missing_module_of_an_edit_keeps_its_traceback(script, name, tmp_path):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no module', name='{name}.nn')")
    done = process(script, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert f"this Python has no {name}; activate" in refused(done)
    (tmp_path / f"{name}.py").write_text("import a_module_of_an_edit")
    done = process(script, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "'a_module_of_an_edit'" in done.stderr


def test_where_there_is_no_bar_the_lines_say_how_long_it_takes(tokens, tmp_path):
    flags = [*TINY, "--layers", "1", "--steps", "4", "--eval-every", "2", "--data", tokens, "--out", "run"]
    lines = command("train.py", *flags, cwd=tmp_path).stdout.splitlines()
    assert [bool(re.search(r"tokens/s  \d\d:\d\d left$", line)) for line in lines] == [False, True, False, False]


def test_a_contradicting_flag_is_named_when_a_run_is_resumed(finished, tokens, tmp_path):
    _, run = finished["torch"]
    for line, message in {"--lr 1": "--lr is 0.004", "--pe rope": "--pe is expe", "--width 32": "is 64"}.items():
        assert message in refused(command("train.py", "--out", run, "--resume", *line.split(), cwd=tmp_path))


def test_a_run_that_exists_is_not_trained_over(finished, tmp_path):
    _, run = finished["torch"]
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert "--resume" in refused(command("train.py", "--preset", "mini", "--out", run, cwd=tmp_path))
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}
    assert "no run directory" in refused(command("train.py", "--out", "none", "--resume", cwd=tmp_path))


def test_a_run_that_diverges_stops_and_keeps_its_checkpoint(tokens, tmp_path):
    flags = [*TINY, "--lr", "1e30", "--clip", "1e30", "--steps", "50", "--checkpoint-every", "1", "--data", tokens]
    said = refused(command("train.py", *flags, "--out", "run", cwd=tmp_path))
    assert "try a lower --lr" in said
    assert checkpoint_info(tmp_path / "run")["step"] >= 1


@pytest.mark.parametrize("name, change", [
    ("config.json", lambda text: text[:-40]), ("config.json", lambda text: b"[1]"),
    ("config.json", lambda text: text.replace(b'"heads": 4', b'"heads": 0')),
    ("config.json", lambda text: text.replace(b'"width": 64', b'"width": 32')),
    ("config.json", lambda text: text.replace(b'"layers": 2', b'"layers": 1')),  # block 1 has weights all the same
    ("config.json: ", lambda text: text.replace(b'"layers": 2', b'"tied": true')),
    ("config.json was edited: model.encoding.pe", lambda text: text.replace(b'"pe": "', b'"pe": 5, "of": "')),
    ("config.json was edited: data.splits.val.sha256", lambda text: text.replace(b'"val": {\n', b'"other": {\n')),
    ("config.json was edited: provenance", lambda text: text.replace(b'"provenance": {', b'"provenance": 1, "x": {')),
    (CHECKPOINT, lambda text: text[:-40]),
    ("tokenizer.tiktoken", lambda text: text[:-40])])
def test_a_damaged_run_is_named_in_one_line(name, change, finished, tmp_path):
    _, run = finished["torch"]
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / re.match("[a-z.]+", name).group()
    path.write_bytes(change(path.read_bytes()))
    assert name in refused(command("generate.py", "run", "--tokens", "3", cwd=tmp_path))


TRAIN = [sys.executable, ROOT / "train.py"]


def test_a_real_kill_leaves_a_run_that_resumes(finished, tokens, tmp_path, start):
    flags = [*SMALL, "--data", tokens, "--out", "run", "--checkpoint-every", "1"]
    running = start([*TRAIN, *flags], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    wait_for((tmp_path / "run" / CHECKPOINT).exists, running)
    running.kill()
    running.wait()
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert same_run(tmp_path / "run", finished["torch"][1])


def test_a_run_belongs_to_one_process_and_is_kept_where_nobody_reads_what_it_prints(tokens, tmp_path, start):
    """As with `train.py 2>&1 | tee file`, where Ctrl-C ends tee, too."""
    flags = [*TINY, "--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "100000", "--data", tokens]
    running = start([*TRAIN, *flags, "--out", "run"], cwd=tmp_path, stderr=subprocess.STDOUT)
    wait_for((tmp_path / "run" / "log.jsonl").exists, running)
    for more in (["--resume"], [*flags, "--overwrite"]):
        assert "in use by another process" in refused(command("train.py", "--out", "run", *more, cwd=tmp_path))
    running.stdout.close()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 141
    last = json.loads(read_log(tmp_path / "run")[-1])["step"]
    assert checkpoint_info(tmp_path / "run")["step"] == last


@pytest.mark.parametrize("sent, ignored", [
    (signal.SIGHUP, False), (signal.SIGHUP, True), (signal.SIGTERM, False)])
def test_a_signal_keeps_the_last_step_unless_it_is_ignored(sent, ignored, tokens, tmp_path, stop_at):
    """As nohup ignores SIGHUP."""
    before = signal.signal(sent, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        stop_at(1, sent)
        flags = [*TINY, "--layers", "1", "--steps", "3", "--data", tokens, "--out", "run"]
        assert command("train.py", *flags, cwd=tmp_path).returncode == (0 if ignored else 130)
    finally:
        signal.signal(sent, before)
    assert checkpoint_info(tmp_path / "run")["step"] == (3 if ignored else 2)


@pytest.mark.parametrize("name", ["x'; touch touched; echo '", "it's", "$(touch touched)", "a b"])
def test_the_path_of_the_code_is_no_command(name, tmp_path):
    """A repository in a folder of this name: the commit is git's; without git or a repository there is none."""
    folder = tmp_path / name
    folder.mkdir()
    assert commit_of(folder) == {}
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit_of(folder) == {"git": head}
    (folder / "below").mkdir()
    assert commit_of(folder / "below") == {}                      # the commit is not that of another project
    assert not any((place / "touched").exists() for place in (tmp_path, folder, ROOT, Path.cwd()))


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == {}
