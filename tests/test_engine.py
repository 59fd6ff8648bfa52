"""--init-from and torchrun: what is taken from a parent, and that two processes train as one."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import TINY, command, read_log, refused, wait_for

from config import make_configs
from engine import distributed
from runs import CHECKPOINT, checkpoint_info, read_checkpoint, read_run, save_checkpoint
from settings import InputError


@pytest.mark.parametrize("pe, backend", [("expe", "torch"), ("learned", "torch"), ("t5", "numpy")])
def test_all_but_the_encodings_weights_go_on(pe, backend, workplace, tokens, tmp_path):
    parent = workplace / "runs" / "learned"
    flags = [*TINY, "--pe", pe, "--backend", backend, "--steps", "1", "--lr", "1e-30", "--end-lr", "0"]
    done = command("train.py", *flags, "--data", tokens, "--init-from", parent, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    old, new = (read_checkpoint(run)[0] for run in (parent, tmp_path / "run"))
    for name in (name for name in new if name[:2] not in ("m.", "v.")):
        same = name in old and old[name].shape == new[name].shape and np.allclose(old[name], new[name], atol=1e-6)
        assert same == (pe == "learned" or "encoding." not in name), name
    _, _, record = read_run(tmp_path / "run")
    assert (record["parent"]["run"], record["parent"]["step"]) == (str(parent), 8)


def test_a_parent_that_does_not_fit_is_named(workplace, tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--init-from", workplace / "runs" / "expe", "--out", "run", "--heads", "2"]
    assert "--heads is 4 in --init-from" in refused(command("train.py", *flags, cwd=tmp_path))
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "parent")
    config = tmp_path / "parent" / "config.json"
    config.write_text(config.read_text().replace('"layers": 2', '"layers": 3'))
    flags = [*TINY, "--data", tokens, "--init-from", "parent", "--out", "run", "--layers", "3"]
    assert "is not of the model in config.json" in refused(command("train.py", *flags, cwd=tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_child_that_was_killed_before_its_first_checkpoint_begins_with_its_parents_weights(
        workplace, tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--init-from", workplace / "runs" / "expe", "--steps", "4"]
    assert command("train.py", *flags, "--out", "whole", cwd=tmp_path).returncode == 0
    command("train.py", *flags, "--out", "run", cwd=tmp_path)
    (tmp_path / "run" / CHECKPOINT).unlink()
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")


@pytest.mark.parametrize("change", ["weights", "tokenizer", "removed", "none"])
def test_such_a_child_refuses_a_parent_that_was_replaced(change, workplace, tokens, tmp_path):
    parent = tmp_path / "parent"
    shutil.copytree(workplace / "runs" / "expe", parent)
    flags = [*TINY, "--data", tokens, "--init-from", "parent", "--steps", "2", "--out", "run"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    (tmp_path / "run" / CHECKPOINT).unlink()
    record = json.loads((parent / "config.json").read_text())
    if change == "weights":
        tensors, info = read_checkpoint(parent)
        save_checkpoint(parent, tensors | {"embedding.weight": -tensors["embedding.weight"]}, info["step"])
    elif change == "tokenizer":
        record["data"]["tokenizer"]["sha256"] = "0" * 64
        (parent / "config.json").write_text(json.dumps(record))
    elif change == "removed":
        shutil.rmtree(parent)
    done = command("train.py", "--out", "run", "--resume", cwd=tmp_path)
    if change == "none":
        assert done.returncode == 0, done.stderr
    else:
        assert ("--init-from: parent is no run directory" if change == "removed" else
                "--init-from parent was replaced since run was begun with it") in refused(done)


@pytest.fixture(scope="module")
def parents(tokens, tmp_path_factory):
    """A folder with a run of each of these encodings, at a context of 16 tokens; the learned numbers move far."""
    folder = tmp_path_factory.mktemp("parents")
    flags = [*TINY, "--layers", "1", "--steps", "3", "--lr", "0.1", "--data", tokens]
    for name, own in {"plain": [], "trained": ["--learn", "init"], "drawn": ["--learn", "random"], "fire": [],
                      "learned": []}.items():
        pe = name if name in ("fire", "learned") else "expe"
        done = command("train.py", *flags, "--pe", pe, *own, "--out", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("parent, line, said", [
    ("plain", "--context 32", ["theta is 1/128 for --context 32; the parent has 1/64: add --theta 1/64 to keep it"]),
    ("plain", "--context 32 --theta 1/64", []), ("plain", "--context 32 --theta 1/9", []), ("plain", "", []),
    ("plain", "--on k", ["theta is 4; the parent has 1/64: add --theta 1/64 to keep it"]),
    ("plain", "--learn init --context 32", ["theta is 1/128 for --context 32; the parent has 1/64"]),
    ("trained", "--learn init", []), ("trained", "--learn init --context 32", []), ("drawn", "--learn init", []),
    ("trained", "--learn init --theta 1/64", []), ("trained", "--learn random", []), ("drawn", "--learn random", []),
    ("trained", "", ["start is 0; the parent has ", "theta is 1/64; the parent has "]),
    ("fire", "--context 32", ["threshold is 32 for --context 32; the parent has 16: add --threshold 16 to keep it"]),
    ("fire", "--context 32 --threshold 16", []), ("fire", "--threshold 9", []),
    ("learned", "--context 8", ["n-positions is 8 for --context 8; the parent has 16: add --n-positions 16 to keep"]),
    ("learned", "--context 32", ["n-positions is 32 for --context 32; the parent has 16, which is too few"])])
def test_config_json_has_the_numbers_that_the_weights_begin_with(parent, line, said, parents, tokens, tmp_path):
    """And what a default changes is said in a line, with the flag that keeps the parent's."""
    pe = parent if parent in ("fire", "learned") else "expe"
    flags = [*TINY, "--layers", "1", "--pe", pe, "--steps", "1", "--lr", "1e-30", "--end-lr", "0", *line.split()]
    done = command("train.py", *flags, "--data", tokens, "--init-from", parents / parent, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "; the parent has" in line]
    assert len(lines) == len(said) and all(a.startswith(b) for a, b in zip(lines, said, strict=True)), lines
    weights, old = (read_checkpoint(run)[0] for run in (tmp_path / "run", parents / parent))
    encoding = read_run(tmp_path / "run")[0].encoding
    if encoding.pe == "expe" and encoding.learn == "init":
        numbers = np.float32([encoding.start, encoding.theta])
        np.testing.assert_allclose(weights["encoding.weight"], numbers, rtol=0, atol=1e-29)
        kept = (weights["encoding.weight"] == old.get("encoding.weight", 0)).tolist()
        assert kept == ([True, "--theta" not in line] if parent != "plain" else [False, False])
    if "random" in line:
        assert encoding.theta is None and not np.isin(weights["encoding.weight"], old["encoding.weight"]).any() or (
            parent == "drawn")
    if pe == "fire":
        name, w1 = "blocks.0.attn.encoding.L", "blocks.0.attn.encoding.w1"
        kept = encoding.threshold == 16
        right = old[name] if kept else np.log(np.float32([encoding.threshold]))
        np.testing.assert_allclose(weights[name], right, rtol=1e-6)
        assert np.array_equal(weights[w1], old[w1])


def test_a_run_is_not_its_own_parent(workplace, tokens, tmp_path):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    flags = [*TINY, "--data", tokens, "--init-from", "run", "--out", "run", "--overwrite"]
    assert "another run than --out" in refused(command("train.py", *flags, cwd=tmp_path))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def losses(run):
    return [[json.loads(line).get(name, 0) for name in ("step", "loss", "grad_norm", "val_loss")]
            for line in read_log(run)]


@pytest.mark.slow
def test_one_and_two_processes_have_the_same_losses(tokens, tmp_path, start_torchrun):
    """With all that is drawn or split anew in each process: positions, masked tokens and micro-batches."""
    flags = "--pe t5 --objective mlm --batch-size 8 --micro-batch 2 --random-positions 64".split()
    flags = [*TINY, *flags, "--steps", "6", "--eval-every", "3", "--data", tokens]
    assert command("train.py", *flags, "--out", "plain", cwd=tmp_path).returncode == 0
    printed, _ = start_torchrun(2, *flags, "--out", "two", cwd=tmp_path).communicate(timeout=200)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "plain"), atol=1e-5, err_msg=printed)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_at_one_step_and_the_run_goes_on(tokens, tmp_path, start_torchrun):
    run = tmp_path / "run"
    flags = [*TINY, "--steps", "100000", "--data", tokens, "--checkpoint-every", "5", "--out", run]
    started = start_torchrun(2, *flags, cwd=tmp_path)
    wait_for((run / CHECKPOINT).exists, started)
    os.killpg(started.pid, signal.SIGINT)
    printed, _ = started.communicate(timeout=60)
    assert printed.count("stopped; go on with") == 2, printed
    step = checkpoint_info(run)["step"]
    assert losses(run)[-1][0] == step
    record = json.loads((run / "config.json").read_text())
    record["train"]["steps"] = step + 4                                 # instead of 100,000
    (run / "config.json").write_text(json.dumps(record))
    printed, _ = start_torchrun(2, "--out", run, "--resume", cwd=run.parent).communicate(timeout=200)
    assert "next: python eval.py" in printed and checkpoint_info(run)["step"] == step + 4, printed
    assert [line[0] for line in losses(run) if line[1]] == list(range(1, step + 5))


@pytest.mark.slow
def test_all_processes_end_with_torchrun_and_keep_the_last_step(tokens, tmp_path, start_torchrun):
    """While one lives, the pipe of its output stays open."""
    flags = [*TINY, "--steps", "100000", "--data", tokens, "--checkpoint-every", "100000", "--out", "run"]
    started = start_torchrun(2, *flags, cwd=tmp_path)
    wait_for((tmp_path / "run/log.jsonl").exists, started)
    started.kill()
    started.communicate(timeout=120)
    assert checkpoint_info(tmp_path / "run")["step"] == losses(tmp_path / "run")[-1][0]


def test_errors_of_several_processes_name_the_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "WORLD", 2)
    config = dataclasses.replace(make_configs("mini")[1], batch_size=3)
    with pytest.raises(InputError, match="--batch-size must be a multiple of the 2 processes, got 3"):
        distributed.DistributedBackend(None, make_configs("mini")[0], config, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(command("train.py", *TINY, cwd=tmp_path))
    assert "torchrun --nproc_per_node N -m -- engine.distributed FLAGS" in line
