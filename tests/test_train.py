"""A training run: what it leaves, that it resumes bit for bit, and that each wrong flag gets one line."""

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, process, read_log, refused

import common
import data
import model_numpy
import train
from config import ENCODINGS, PRESETS, InputError, ModelConfig, TrainConfig, make_encoding

SMALL = [*TINY, "--steps", "12", "--eval-every", "5", "--checkpoint-every", "4", "--dropout", "0.1"]


def tensors(run):
    return common.read_checkpoint(run)[0]


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
    for name in ("torch", "numpy", "fast"):
        flags = {"torch": [], "numpy": ["--backend", "numpy"], "fast": ["--fast"]}[name]
        done = command("train.py", *SMALL, *flags, "--data", tokens, "--out", name, cwd=folder)
        assert done.returncode == 0, done.stderr
        found[name] = flags, folder / name
    return found


def test_a_run_leaves_what_it_promises(finished, tokens):
    _, run = finished["torch"]
    names = {"config.json", common.CHECKPOINT, "log.jsonl", "tokenizer.tiktoken", ".lock"}
    assert {path.name for path in run.iterdir()} == names
    model, config, record = common.read_run(run)
    shapes = model_numpy.parameter_shapes(model)
    found, info = common.read_checkpoint(run)
    assert {name: x.shape for name, x in found.items()} == {
        f"{kind}{name}": shape for name, shape in shapes.items() for kind in ("", "m.", "v.")}
    assert info["step"] == config.steps == 12 and len(info["sha256"]) == 64
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
    assert common.checkpoint_info(tmp_path / "run")["step"] == 7
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert same_run(tmp_path / "run", whole)
    done = command(*arguments, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "complete" in done.stdout


VARIANTS = ["--pe expe --on k", "--pe expe --once", "--pe expe --learn random", "--pe exqpe --theta2 1/8",
            "--pe t5 --buckets 4 --max-distance 3 --no-causal",
            "--pe shaw", "--pe fox", "--pe rope --softmax log", "--pe alibi --window 4", "--pe rope --nope-every 2",
            "--pe expe --objective mlm", "--pe learned --n-positions 40 --random-positions 40",
            "--pe sinusoidal --tied", "--pe nope --norm rmsnorm --mlp swiglu", "--pe rope --dtype bf16 --fast"]


@pytest.mark.parametrize("line", VARIANTS)
def test_variants_train_stop_and_resume_bit_for_bit(line, tokens, tmp_path, stop_at, monkeypatch):
    flags = [*TINY, *line.split(), "--layers", "2", "--steps", "4", "--data", tokens]
    assert command("train.py", *flags, "--out", "whole", cwd=tmp_path).returncode == 0
    stop_at(1)
    assert command("train.py", *flags, "--out", "run", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    done = command("train.py", *flags, "--out", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_run(tmp_path / "run", tmp_path / "whole")


def test_gradient_accumulation_is_the_whole_batch(tokens):
    _, model, config = train.read_flags([*TINY, "--batch-size", "6"])
    split = dataclasses.replace(config, micro_batch=4)                  # 4 sequences, and then 2
    batch = data.batch(data.open_split(tokens, "train"), model.context, 6, 0, 0)
    for kind in (train.TorchBackend, train.NumpyBackend):
        whole, parts = (kind(model, c, torch.device("cpu")).step(batch, 0) for c in (config, split))
        np.testing.assert_allclose(whole, parts, rtol=1e-5)


@pytest.mark.parametrize("kind", [train.TorchBackend, train.NumpyBackend])
def test_dropout_is_a_function_of_seed_and_step(kind, tokens):
    _, model, config = train.read_flags([*TINY, "--dropout", "0.3", "--lr", "1e-30", "--layers", "1"])
    batch = data.batch(data.open_split(tokens, "train"), model.context, 4, 0, 0)
    losses = [kind(model, config, torch.device("cpu")).step(batch, step)[0] for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


NAMES = {"--pe expe --l 24": "mini-expe-s0", "--pe expe --l 8 --lr 2e-3": "mini-expe-l-8-lr-0.002-s0",
         "--pe rope --seed 3": "mini-rope-s3", "--steps 5 --eval-every 3": "mini-expe-steps-5-s0",
         "--pe expe --on k": "mini-expe-on-k-s0", "--lr 4e-3 --no-causal": "mini-expe-causal-False-s0",
         "--preset paper-35m --pe exqpe --data a/b": "paper-35m-exqpe-data-b-s0", "--fast": "mini-expe-s0",
         "--width 32 --heads 2": "mini-expe-width-32-heads-2-s0", "--seed 2 --init-from b": "mini-expe-init-from-b-s2"}


@pytest.mark.parametrize("line", NAMES)
def test_default_names_are_preset_encoding_and_the_flags_that_differ(line):
    args, _, _ = train.read_flags(line.split() if "--preset" in line else ["--preset", "mini", *line.split()])
    assert str(args.out) == f"runs/{NAMES[line]}"


def test_flags_reach_the_configs_and_what_depends_on_them():
    line = "--preset paper-35m --pe exqpe --theta2 1/8 --width 48 --heads 3 --lr 2e-3"
    _, model, config = train.read_flags(line.split())
    assert (model.encoding.theta2, model.encoding.l, model.d_mlp, config.end_lr) == (1 / 8, 24, 192, 6e-6)
    _, model, _ = train.read_flags("--preset llama-135m --pe expe".split())
    assert (model.encoding.l, model.norm, model.mlp) == (96, "rmsnorm", "swiglu")
    assert [PRESETS[name].train.fast for name in PRESETS] == [False, False, True, True, True]


@pytest.mark.parametrize("pe", ENCODINGS)
def test_help_lists_the_encodings_own_flags(pe):
    done = command("train.py", "--pe", pe, "--help", cwd=ROOT)
    fields = [f for f in dataclasses.fields(make_encoding(pe)) if f.metadata["help"]]
    assert done.returncode == 0 and all(f"--{f.name.replace('_', '-')}" in done.stdout for f in fields)
    assert max(map(len, done.stdout.splitlines())) < 130


WRONG = {
    "--heads 3": "--heads must be a divisor of --width, 128, got 3", "--layers 0": "--layers must be",
    "--pe rope --l 3": "--l is not a flag of --pe rope", "--l 500": "--l must be from 1 to the width", "--lr x": "--lr",
    "--lr nan": "--lr must be", "--lr inf": "--lr", "--dropout 1": "--dropout must be", "--pe ropes": "--pe",
    "--steps 1.5": "--steps", "--steps 1e400": "--steps", "--theta 1/0": "--theta", "--preset big": "--preset",
    "--nope-every 1": "--nope-every must be", "--window 3 --no-causal": "--window", "--softmax llama4": "--softmax",
    "--objective mlm --pe fox": "--objective mlm", "--no-causal --pe path": "--no-causal",
    "--objective mlm --causal": "leave out --causal",
    "--random-positions 3": "--random-positions must be from 16 (--context) on, got 3",
    "--pe learned --random-positions 900": "--random-positions must be from 16 (--context) to 16 (--n-positions)",
    "--pe fox --random-positions 64": "--random-positions is for an encoding that reads positions",
    "--pe learned --n-positions 3": "--n-positions must be", "--pe t5 --buckets 64 --max-distance 8": "--max-distance",
    "--end-lr 1": "--end-lr must be", "--backend numpy --dtype bf16": "--backend numpy",
    "--device gpu": "--device must be", "--device cuda:99": "--device must be",
 "--backend numpy --compile": "--backend numpy", "--nonsense": "--nonsense",
    "--data missing": "missing: no such file", "--vocab 400": "add --vocab 300", "--init-from missing": "missing",
    "--learn random --theta 1": "--learn random", "--once --on k": "--once", "--resume --overwrite": "not allowed",
    "--width 6 --heads 2 --pe rope": "needs an even --width / --heads", "--on v": "--on must be",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_flag_is_named_in_one_line_and_nothing_is_left(line, tokens, tmp_path):
    flags = ["--preset", "mini", "--context", "16", "--vocab", "300", "--data", tokens, "--steps", "1", *line.split()]
    said = refused(command("train.py", *flags, cwd=tmp_path))
    assert WRONG[line] in said
    assert not any(path.is_file() and path.name != ".lock" for path in tmp_path.rglob("*"))


def test_a_contradicting_flag_is_named_when_a_run_is_resumed(finished, tokens, tmp_path):
    _, run = finished["torch"]
    for line, message in {"--lr 1": "--lr is 0.004", "--pe rope": "--pe is expe", "--seed 4": "--seed",
                          "--preset paper-35m": "--preset is mini", "--width 64": "--width is 128"}.items():
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
    assert common.checkpoint_info(tmp_path / "run")["step"] >= 1


@pytest.mark.parametrize("name, change", [
    ("config.json", lambda text: text[:-40]),
    ("config.json", lambda text: text.replace(b'"n_heads": 4', b'"n_heads": 0')),
    ("config.json", lambda text: text.replace(b'"d_model": 128', b'"d_model": 64')),
    ("config.json", lambda text: text.replace(b'"l": 24', b'"m": 24')), ("config.json", lambda text: b"[1]"),
    ("config.json", lambda text: text.replace(b'"steps": 12', b'"steps": "12"')),
    ("config.json", lambda text: json.dumps(json.loads(text) | {"data": None}).encode()),
    ("config.json", lambda text: json.dumps(json.loads(text) | {"provenance": None}).encode()),
    ("config.json", lambda text: json.dumps(json.loads(text) | {"data": {"splits": {}, "tokenizer": None}}).encode()),
    (common.CHECKPOINT, lambda text: text[:-40]), (common.CHECKPOINT, lambda text: text[:-9] + bytes(9)),
    (common.CHECKPOINT, lambda text: b"x"), ("tokenizer.tiktoken", lambda text: text[:-40])])
def test_a_damaged_run_is_named_in_one_line(name, change, finished, tmp_path):
    _, run = finished["torch"]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(change((tmp_path / "run" / name).read_bytes()))
    assert name in refused(command("generate.py", "run", "--tokens", "3", cwd=tmp_path))


@pytest.mark.parametrize("change", [
    lambda x: x.pop("m.norm.bias"), lambda x: x.pop("head.weight"),
    lambda x: x.update({"v.norm.bias": np.zeros((2, 2), np.float32)}),
    lambda x: x.update({"norm.bias": x["norm.bias"].astype(np.float64)})], ids=["moment", "weight", "shape", "dtype"])
def test_a_checkpoint_of_another_model_is_not_resumed(change, finished, tmp_path):
    shutil.copytree(finished["torch"][1], tmp_path / "run")
    found, _ = common.read_checkpoint(tmp_path / "run")
    change(found)
    common.save_checkpoint(tmp_path / "run", found, 8)
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert common.CHECKPOINT in refused(command("train.py", "--out", "run", "--resume", cwd=tmp_path))
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_a_real_kill_leaves_a_run_that_resumes(finished, tokens, tmp_path):
    flags = [*SMALL, "--data", str(tokens), "--out", "run"]
    running = subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, flags), "--checkpoint-every", "1"],
                               cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (tmp_path / "run" / common.CHECKPOINT).exists() and time.monotonic() < until:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert process("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert same_run(tmp_path / "run", finished["torch"][1])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, None])
def test_what_is_trained_is_kept_where_nobody_reads_what_is_printed(stop, tokens, tmp_path):
    """As with `train.py 2>&1 | tee file`, where Ctrl-C ends tee, too. Without a signal the run goes on to its end."""
    steps = "100000" if stop else "300"
    flags = [*TINY, "--layers", "1", "--steps", steps, "--eval-every", "10", "--checkpoint-every", "100000"]
    running = subprocess.Popen([sys.executable, ROOT / "train.py", *flags, "--data", tokens, "--out", "run"],
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "log.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.01)
    running.stdout.close()
    if stop:
        running.send_signal(stop)
    assert running.wait(60) == 141
    last = json.loads(read_log(tmp_path / "run")[-1])["step"]
    assert common.checkpoint_info(tmp_path / "run")["step"] == last and (stop or last == 300)


def test_each_start_is_in_the_log_and_damaged_lines_of_it_are_left_out(tokens, tmp_path, stop_at, monkeypatch):
    flags = [*TINY, "--layers", "1", "--steps", "3", "--data", tokens, "--out", "run"]
    stop_at(1)
    assert command("train.py", *flags, cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    log = tmp_path / "run" / "log.jsonl"
    first, second = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(first[:-3] + b"\xff\n" + second + b"[3]\n{}\n{\"step\": 1")
    done = command("train.py", "--out", "run", "--resume", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 2, 3, 3] and lines[1]["resumed"]["torch"] == torch.__version__
    assert lines[1]["resumed"]["command"] == "python train.py --out run --resume --device cpu"


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_keeps_the_last_step_unless_it_is_ignored(ignored, tokens, tmp_path, monkeypatch):
    """As nohup ignores it."""
    batch = data.batch

    def hang_up(tokens, context, n, seed, step):
        if step == 1:
            signal.raise_signal(signal.SIGHUP)
        return batch(tokens, context, n, seed, step)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        monkeypatch.setattr(data, "batch", hang_up)
        flags = [*TINY, "--layers", "1", "--steps", "3", "--data", tokens, "--out", "run"]
        assert command("train.py", *flags, cwd=tmp_path).returncode == (0 if ignored else 130)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert common.checkpoint_info(tmp_path / "run")["step"] == (3 if ignored else 2)


def test_two_processes_do_not_train_one_run(tokens, tmp_path):
    flags = [*TINY, "--steps", "1", "--data", tokens, "--out", "run"]
    (tmp_path / "run").mkdir()
    with common.lock(tmp_path / "run"):
        assert "in use by another process" in refused(process("train.py", *flags, cwd=tmp_path))
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0


def test_a_file_system_without_locks_stops_no_run(tokens, tmp_path, monkeypatch):
    import filelock

    def refuse(*arguments, **keywords):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    done = command("train.py", *TINY, "--layers", "1", "--steps", "1", "--data", tokens, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("run lies where files cannot be locked")


def test_the_numpy_backend_clips_by_the_norm_it_returns(tokens):
    model = ModelConfig(1, 8, 2, context=16, vocab_size=300)
    config = TrainConfig(steps=2, batch_size=2, lr=0.1, end_lr=0.1, backend="numpy", clip=1e-3)
    backend = train.NumpyBackend(model, config, torch.device("cpu"))
    _, norm = backend.step(data.batch(data.open_split(tokens, "train"), 16, 2, 0, 0), 0)
    clipped = math.sqrt(sum(float((m / 0.1) @ (m / 0.1)) for m in map(np.ravel, backend.state["m"].values())))
    assert norm > 1e-3 and clipped == pytest.approx(1e-3, rel=1e-2)


def test_configs_survive_json():
    for preset in PRESETS.values():
        stored = json.loads(json.dumps([dataclasses.asdict(preset.model), dataclasses.asdict(preset.train)]))
        assert ModelConfig.from_dict(stored[0]) == preset.model and TrainConfig(**stored[1]) == preset.train
    with pytest.raises(InputError, match="--pe must be one of"):
        make_encoding("none")
