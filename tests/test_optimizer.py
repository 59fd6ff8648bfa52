"""Muon: its step by singular values, which matrices it takes, and a run that resumes bit for bit."""

import dataclasses
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import TINY, command, refused

import runs
import train
from config import ENCODINGS, PRESETS, ModelConfig, make_encoding

SMALL = ModelConfig(2, 16, 2, context=8, vocab_size=20, encoding=make_encoding("nope"))
MUON = dataclasses.replace(PRESETS["mini"].train, optimizer="muon", lr=0.01, end_lr=0.01, warmup=0.0, clip=1e9,
                           batch_size=2, micro_batch=2)  # fmt: skip


def test_a_step_makes_singular_values_one_and_is_as_long_as_adamws():
    """Nesterov's first momentum is along the gradient. Jordan's five iterations of 3.4445 x - 4.775 x^3 + 2.0315 x^5,
    after a division by the Frobenius norm, act on singular values; torch does them in bf16.
    """
    backend, rng = train.TorchBackend(SMALL, MUON, torch.device("cpu"), False), np.random.default_rng(0)
    before = {name: w.detach().double().numpy().copy() for name, w in backend.model.named_parameters()}
    grads = {name: rng.normal(size=w.shape) for name, w in before.items()}
    for name, w in backend.model.named_parameters():
        w.grad = torch.from_numpy(grads[name]).float()
    muon, adamw = backend.optimizers
    muon.step(), adamw.step()
    assert len(backend.by_muon) == 2 * 4
    for name, w in backend.model.named_parameters():
        decay = 1 - 0.01 * 0.1 * (w.ndim == 2)
        step = (before[name] * decay - w.detach().numpy()) / 0.01
        if name in backend.by_muon:
            u, s, v = np.linalg.svd(grads[name], full_matrices=False)
            s = s / np.linalg.norm(s)
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            assert 0.5 < s.min() and s.max() < 1.3
            moved = 0.2 * math.sqrt(max(w.shape)) * (u * s) @ v
            assert np.linalg.norm(step - moved) < 0.02 * np.linalg.norm(moved)
            assert 0.1 < np.sqrt(np.mean(step**2)) < 0.3  # AdamW's: 0.2 to 0.4 in training (Liu et al. 2025)
        else:
            np.testing.assert_allclose(step, np.sign(grads[name]), rtol=1e-3)          # AdamW's first


@pytest.mark.parametrize("pe", ENCODINGS)
def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest(pe):
    backend = train.TorchBackend(dataclasses.replace(SMALL, d_model=64, encoding=make_encoding(pe)), MUON,
                                 torch.device("cpu"), False)  # fmt: skip
    assert backend.moments() == {}
    backend.step(np.zeros((2, 9), np.int64), 0)
    of_blocks = {f"blocks.{i}.{part}.weight" for i in (0, 1)
                 for part in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")}  # fmt: skip
    names = backend.shapes.keys()
    assert backend.moments().keys() == {f"m.{name}" for name in names} | {f"v.{name}" for name in names - of_blocks}
    assert all(x.shape == backend.shapes[name[2:]] for name, x in backend.moments().items())


def test_a_run_by_muon_resumes_bit_for_bit(tokens, tmp_path, stop_at, monkeypatch):
    flags = [*TINY, "--pe", "kerple", "--data", tokens, "--steps", "6", "--dropout", "0.1", "--optimizer", "muon"]
    assert command("train.py", *flags, "--out", "runs/a", cwd=tmp_path).returncode == 0
    stop_at(3)
    assert command("train.py", *flags, "--out", "runs/b", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    assert runs.read_run(tmp_path / "runs" / "b")[2]["checkpoint"]["step"] == 4
    assert command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path).returncode == 0
    for name in runs.CHECKPOINT:
        a, b = (safetensors.torch.load_file(tmp_path / "runs" / run / name) for run in "ab")
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert "v.blocks.0.attn.qkv.weight" not in a and "m.blocks.0.attn.qkv.weight" in a and "v.encoding.a" in a
    logs = [[line for line in (tmp_path / "runs" / run / "log.jsonl").read_text().splitlines()] for run in "ab"]
    assert logs[0] == logs[1]
    line = refused(command("train.py", "--out", "runs/b", "--resume", "--optimizer", "adamw", cwd=tmp_path))
    assert "optimizer is muon in runs/b and adamw by these flags" in line
    line = refused(command("train.py", *flags, "--backend", "numpy", "--out", "runs/c", cwd=tmp_path))
    assert "optimizer muon are torch's" in line


def test_muon_learns(tokens, tmp_path):
    """As far as AdamW in as many steps, at AdamW's own rate; of a small model, since its products are in bf16."""
    small, losses = [*TINY, "--layers", "2", "--width", "64"], []
    for name in ("adamw", "muon"):
        flags = [*small, "--pe", "expe", "--data", tokens, "--steps", "100", "--optimizer", name, "--out", name]
        done = command("train.py", *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.rpartition("val ")[2].split()[0]))
    assert losses[1] < losses[0] + 0.05 and losses[1] < 5.0
