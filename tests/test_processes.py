"""Many processes by torchrun: the batches, the weights and the files of one; and how such a run ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import ROOT, TINY, command, process, refused

import runs
import train
from config import PRESETS, InputError

FLAGS = [*TINY, "--pe", "expe", "--batch-size", "8", "--steps", "6", "--eval-every", "3", "--checkpoint-every", "4"]


def start(n, *arguments, cwd, script=ROOT / "train.py"):
    """torchrun --nproc_per_node N -- train.py ..., its output to pipes. (Without -- it takes --l for its own.)"""
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n, "--", script]
    return subprocess.Popen([*map(str, (*by_torchrun, *arguments))], cwd=cwd, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})


def torchrun(n, *arguments, cwd, **how):
    """(exit status, stdout, stderr) of it."""
    process = start(n, *arguments, cwd=cwd, **how)
    said = process.communicate(timeout=240)
    return process.returncode, *said


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def assert_close(a, b):
    """Two runs' lines, in their order, and weights and moments, to fp32's tolerance."""
    for one, other in zip(log(a), log(b), strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    for name in runs.CHECKPOINT:
        one, other = (safetensors.numpy.load_file(run / name) for run in (a, b))
        assert one.keys() == other.keys()
        for name, x in one.items():
            np.testing.assert_allclose(x, other[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(tokens, tmp_path_factory):
    """A folder with the run of one process, and its flags."""
    folder = tmp_path_factory.mktemp("alone")
    flags = [*FLAGS, "--data", tokens]
    assert command("train.py", *flags, "--out", "runs/one", cwd=folder).returncode == 0
    return folder, flags


@pytest.mark.parametrize("micro", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 3))])
def test_two_processes_train_as_one_does(alone, micro):
    """Of 8 sequences each has 4: at once, in two parts, and in parts of unequal size that no process alone may have."""
    folder, flags = alone
    name = f"runs/two-{micro}"
    if micro == 3:
        flags = [str(12) if flag == "8" else flag for flag in flags]
        assert command("train.py", *flags, "--out", "runs/twelve", cwd=folder).returncode == 0
    code, out, err = torchrun(2, *flags, "--micro-batch", micro, "--out", name, cwd=folder)
    assert code == 0, err
    assert_close(folder / name, folder / ("runs/twelve" if micro == 3 else "runs/one"))
    assert out.count("next: python eval.py") == out.count("val ") / 2 == 1           # one process speaks
    assert runs.read_run(folder / name)[2]["provenance"]["processes"] == 2


@pytest.mark.slow
def test_ctrl_c_keeps_the_last_step_of_all(alone, tmp_path):
    flags = alone[1]
    flags = [*flags[: flags.index("--steps")], "--steps", "400", *flags[flags.index("--steps") + 2 :]]
    process = start(2, *flags, "--out", "runs/a", cwd=tmp_path)
    path, deadline = tmp_path / "runs" / "a" / "log.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count("\n") > 10):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and err.count("stopped; go on with: python train.py --out runs/a --resume") == 1
    step = runs.read_run(tmp_path / "runs" / "a")[2]["checkpoint"]["step"]
    assert 10 <= step < 400 and log(tmp_path / "runs" / "a")[-1]["step"] == step


@pytest.mark.slow
def test_resume_with_another_number_of_processes_is_the_run_of_one(alone, tmp_path, stop_at, monkeypatch):
    folder, flags = alone
    stop_at(1)
    assert command("train.py", *flags, "--out", "runs/a", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    assert runs.read_run(tmp_path / "runs" / "a")[2]["checkpoint"]["step"] == 2
    for n in (4, 2):                                                   # the second finds it complete
        code, out, err = torchrun(n, "--out", "runs/a", "--resume", cwd=tmp_path)
        assert code == 0, err
        assert_close(tmp_path / "runs" / "a", folder / "runs" / "one")
    assert "complete: 6 of 6 steps" in out


def test_dropout_has_masks_of_its_own_in_each_process(tokens, monkeypatch):
    """Those of the first process are those of one; the second's at no step are another's at any."""
    model, config = train.configure(train.command_line().parse_args(["--steps", "5"]), *PRESETS["mini"])
    backend, seeds = train.TorchBackend(model, config, torch.device("cpu"), False), []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x)
    for world in (1, 2, 4):
        monkeypatch.setattr(train, "WORLD", world)
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            for step in range(5):
                backend.step(np.zeros((4, 17), np.int64), step)
    assert seeds[:5] == seeds[5:10] == seeds[15:20] and len({*seeds[15:]}) == 20


def test_each_process_has_a_gpu_of_its_own_and_they_share_a_cpu(monkeypatch):
    """By a machine that says it has two."""
    cuda, taken = torch.device("cuda"), []
    assert train.own_device(torch.device("cuda:1")) == torch.device("cuda:1")  # alone it takes what is said
    for name, value in (("WORLD", 4), ("LOCAL_RANK", 1)):
        monkeypatch.setattr(train, name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert train.own_device(torch.device("cpu")) == torch.device("cpu") and taken == []
    assert train.own_device(cuda) == torch.device("cuda:1") and taken == [1]
    with pytest.raises(InputError, match="device cuda:1 is not one for each of 2 processes: use --device cuda"):
        train.own_device(torch.device("cuda:1"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="one for each of 3 processes: .* give torchrun at most 2 of them here"):
        train.own_device(cuda)


@pytest.mark.parametrize("more, message", [
    (["--batch-size", "7"], "batch_size must be a multiple of torchrun's 2 processes, got 7"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (["--backend", "numpy"], "--backend numpy is one process: start it without torchrun"),
        (["--data", "nowhere"], "nowhere"),
        (["--l=x"], "'x' is not a whole number"),
    )),
])
def test_what_cannot_work_is_said_once_and_ends_the_job(alone, more, message, tmp_path):
    code, out, err = torchrun(2, *alone[1], "--out", "runs/a", *more, cwd=tmp_path)
    ours = [line for line in err.splitlines() if "train.py: error: " in line]
    assert code != 0 and len(ours) == 1 and message in ours[0] and "exitcode  : 2 " in err
    assert "[rank" not in err and os.listdir(tmp_path) == []           # no traceback of any process


def test_a_variable_of_torchruns_without_torchrun_is_one_line(tmp_path):
    line = refused(process("train.py", cwd=tmp_path, WORLD_SIZE="2"))
    assert "WORLD_SIZE is 2: start by torchrun, or unset it" in line and "RANK expected" in line


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job_with_its_error(alone, tmp_path):
    """The second one does so in its third step; the first one does not wait for it."""
    (tmp_path / "dies.py").write_text(
        "import data, train\n"
        "batch = data.batch\n"
        "def dying(tokens, context, n, seed, step):\n"
        "    if (train.RANK, step) == (1, 2): raise OSError('the disk of this one is gone')\n"
        "    return batch(tokens, context, n, seed, step)\n"
        "data.batch = dying\n"
        "train.main()\n"
    )
    begun = time.monotonic()
    code, _, err = torchrun(2, *alone[1], "--steps", "100000", "--out", "runs/a", cwd=tmp_path, script="dies.py")
    assert code != 0 and "[rank1]: OSError: the disk of this one is gone" in err and time.monotonic() - begun < 100
    assert re.search(r"Root Cause.*?rank\s*: 1 ", err, re.S)
    assert runs.read_run(tmp_path / "runs" / "a")[2]["checkpoint"]["step"] == 0
    code, out, err = torchrun(2, "--help", cwd=tmp_path)               # none is left waiting here either
    assert code == 0 and out.count("usage: ") == 1
