"""--init-from and torchrun: what is taken from a parent, and that two processes train as one."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, command, refused

import common


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("pe", ["expe", "learned", "t5"])
def test_all_but_the_encodings_weights_go_on(pe, backend, workplace, tokens, tmp_path):
    parent = workplace / "runs" / "learned"
    flags = [*TINY, "--pe", pe, "--backend", backend, "--steps", "1", "--lr", "1e-30", "--end-lr", "0"]
    flags += ["--data", tokens]
    done = command("train.py", *flags, "--init-from", parent, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    old, new = (common.read_checkpoint(run)[0] for run in (parent, tmp_path / "run"))
    for name in (name for name in new if name[:2] not in ("m.", "v.")):
        same = name in old and old[name].shape == new[name].shape and np.allclose(old[name], new[name], atol=1e-6)
        assert same == (pe == "learned" or "encoding." not in name), name
    _, _, record = common.read_run(tmp_path / "run")
    assert record["parent"]["step"] == 8 and record["parent"]["sha256"] == common.checkpoint_info(parent)["sha256"]


@pytest.mark.parametrize("flags, message", [
    ("--heads 2", "--heads is 4"), ("--width 64", "--width is 128"), ("--norm rmsnorm", "--norm is layernorm")])
def test_a_parent_that_does_not_fit_is_named(flags, message, workplace, tokens, tmp_path):
    parent = workplace / "runs" / "expe"
    more = ["--data", tokens, "--init-from", parent, "--out", "run"]
    done = command("train.py", *TINY, *flags.split(), *more, cwd=tmp_path)
    assert message in refused(done)


def test_a_run_is_not_its_own_parent(workplace, tokens, tmp_path):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    flags = [*TINY, "--data", tokens, "--init-from", "run", "--out", "run", "--overwrite"]
    assert "another run than --out" in refused(command("train.py", *flags, cwd=tmp_path))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def torchrun(n, *arguments, cwd):
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n, "--"]
    words = [*map(str, (*started, ROOT / "train.py", *arguments))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=cwd, text=True, capture_output=True, env=environment, timeout=200)


def test_two_processes_train_as_one_and_resume(tokens, tmp_path):
    flags = [*TINY, "--steps", "4", "--data", tokens]
    assert command("train.py", *flags, "--out", "one", cwd=tmp_path).returncode == 0
    done = torchrun(2, *flags, "--out", "two", "--objective", "lm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = (common.read_checkpoint(tmp_path / name)[0] for name in ("one", "two"))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=2e-4 if name[:2] not in ("m.", "v.") else 1e-3)
    done = torchrun(2, *flags, "--backend", "numpy", "--out", "n", cwd=tmp_path)
    assert "--backend numpy is one process" in done.stderr
