"""What lab/bench.py counts and times is what it says."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, command, process
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import model_torch
from config import PRESETS, InputError, make_encoding
from lab import bench
from model_torch import GPT

MINI = PRESETS["mini"].model


def plain_gpt(config):
    """The GPT that comes to mind first, of the same shape: nn.Linear, causal SDPA, all logits, F.cross_entropy."""
    C = config.d_model

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2, self.dropout = nn.LayerNorm(C), nn.LayerNorm(C), nn.Dropout(config.dropout)
            self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
            self.up, self.down = nn.Linear(C, config.d_mlp, bias=False), nn.Linear(config.d_mlp, C, bias=False)

        def forward(self, x):
            heads = self.qkv(self.norm1(x)).unflatten(-1, (3, config.n_heads, -1))            # (B, T, 3, H, D)
            y = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)  # (B, H, T, D)
            x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
            return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(config.vocab_size, C), nn.Embedding(config.context, C)
            self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(C)
            self.blocks = nn.Sequential(*(Block() for _ in range(config.n_layers)))
            self.head = nn.Linear(C, config.vocab_size, bias=False)

        def forward(self, tokens, targets):
            x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
            logits = self.head(self.norm(self.blocks(self.dropout(x))))
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return Plain()


def test_the_gpt_that_comes_to_mind_first_is_ours_with_learned_positions():
    ours, plain = GPT(replace(MINI, encoding=make_encoding("learned"))), plain_gpt(MINI)
    names = {"position.weight": "encoding.weight"}
    for part in ("qkv", "proj"):
        names |= {f"blocks.{i}.{part}.weight": f"blocks.{i}.attn.{part}.weight" for i in range(4)}
    for part in ("up", "down"):
        names |= {f"blocks.{i}.{part}.weight": f"blocks.{i}.mlp.{part}.weight" for i in range(4)}
    weights = ours.state_dict()
    plain.load_state_dict({name: weights[names.get(name, name)] for name in plain.state_dict()})
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 1024, (2, 129)))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, plain)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    found = dict(ours.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, found[names.get(name, name)].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", [MINI, replace(MINI, norm="rmsnorm", mlp="swiglu", d_mlp=300, tied=True)])
def test_the_operations_of_a_step_are_those_that_torch_counts(config):
    config = replace(config, encoding=make_encoding("nope"))
    model, tokens = GPT(config), torch.zeros(2, 129, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # of attention's, which torch counts by another rule: q k^T and p v, of T/2 keys on average, thrice
    attention = 2 * 128 * 4 * (2 * 128 * 64 * 2) * 3
    assert bench.flops_a_token(config) * 2 * 128 == products + attention


class Now:
    """A pool of one process, without the process: what is submitted is done at once, here."""

    def submit(self, job, *arguments):
        (done := Future()).set_result(job(*arguments))
        return done

    def shutdown(self):
        pass


def test_rows_stand_beside_nope(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda *how: Now())  # each process loads torch for seconds
    monkeypatch.setattr(bench, "REST", 0)
    monkeypatch.setattr(bench, "GENERATED", 4)
    monkeypatch.setattr(bench, "MULTIPLES", (1, 2))
    parts = "train,evaluate,generate,profile"
    done = command("lab.bench", "--parts", parts, "--pe", "learned,expe", "--backends", "torch,plain",
                   "--repeats", 1, "--batch-size", 2, "--device", "cpu", "--json", "b.json", cwd=tmp_path)
    bench.Work.cache_clear()
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(row["pe"], row["backend"]) for row in rows] == [
        ("nope", "torch"), ("learned", "torch"), ("expe", "torch"), ("nope", "plain")
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(2 * 128 / row["step_s"])
        assert row["flops_per_s"] == pytest.approx(bench.flops_a_token(MINI) * 2 * 128 / row["step_s"])
        assert 1e8 < row["peak_bytes"] < 4e9 and f"{row['step_s'] * 1e3:,.1f}" in done.stdout
    nope, learned, expe, plain = rows
    assert nope["over_nope"] == 1 and all(ratio == 1 for ratio in nope["evaluate_over_nope"].values())
    assert list(expe["evaluate_tokens_per_s"]) == ["128", "256"]
    assert list(learned["evaluate_tokens_per_s"]) == ["128"]
    assert "streaming_tokens_per_s" in expe and "streaming_tokens_per_s" not in learned
    assert all(row["cache_bytes_a_token"] == 4 * 2 * 128 * 4 for row in (nope, learned, expe))  # blocks, k and v, fp32
    assert "evaluate_tokens_per_s" not in plain and "cached_tokens_per_s" not in plain
    shares = expe["profile"]
    assert list(shares)[0] == "aten::mm" and sum(shares.values()) == pytest.approx(1) and "aten::mm\n" in done.stdout


def test_data_is_timed_beside_tiktoken(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TEXT", 2**20)
    done = command("lab.bench", "--parts", "data", "--repeats", 1, "--json", "b.json", cwd=tmp_path)
    [row] = json.loads((tmp_path / "b.json").read_text())
    assert row["part"] == "data" and row["over_tiktoken"] > 0 and row["over_all_cores"] > 0
    assert f"({row['over_tiktoken']:.2f}x)" in done.stdout and f"({row['over_all_cores']:.2f}x)" in done.stdout


@pytest.mark.parametrize("compiled", [False, True])
def test_the_plain_backend_has_none_of_the_parts_of_fast_py(compiled):
    model = bench.Work("mini", "nope", "plain", 2, "fp32", "cpu", compiled).backend.model
    assert type(model.blocks[0].attn) is model_torch.Attention
    assert type(model.dropout) is nn.Dropout and model.cross_entropy is model_torch.cross_entropy


def fail(reason):
    raise RuntimeError(reason)


def test_a_row_has_a_process_of_its_own_with_a_peak_of_its_own_and_says_in_one_line_what_fails():
    asked = Namespace(preset="mini", batch_size=2, dtype="fp32", device="cpu", compile=False, repeats=1)
    row = bench.Row("nope", "torch", asked)
    ballast = np.ones(2**27)                                            # 1 GB
    del ballast
    assert row.ask("memory") < 8e8 < 2**30 < bench.peak_bytes()
    for job, reason in (((fail, "no memory\nat all"), "no memory; use a smaller --batch-size"),
                        ((os._exit, 1), "A process in the process pool was terminated abruptly")):
        with pytest.raises(InputError, match=f"^mini, nope by torch, 2 sequences: {reason}"):
            row.ask("seconds", *job)
    row.pool.shutdown()


@pytest.mark.slow
def test_peak_memory_of_a_step_of_paper_35m(tmp_path):
    done = process("lab.bench", "--preset", "paper-35m", "--parts", "train", "--pe", "nope", "--backends",
                   "torch,plain", "--repeats", 2, "--device", "cpu", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, plain = (row["peak_bytes"] for row in json.loads((tmp_path / "b.json").read_text()))
    print(f"\n{ours / 1e9:.2f} GB, and {plain / 1e9:.2f} GB of the plain GPT")
    assert ours < 0.65 * plain


def test_its_processes_end_with_it_even_if_it_is_killed(tmp_path):
    code = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from lab.bench import begin

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), 9)
"""
    (script := tmp_path / "main.py").write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -9
    end = time.monotonic() + 30
    while alive(int(done.stdout)):
        assert time.monotonic() < end, "its process lives on"
        time.sleep(0.1)


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
