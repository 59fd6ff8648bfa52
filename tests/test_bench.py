"""What lab/bench.py counts and times is what it says."""

import json
import os
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import command, process, refused
from torch.utils.flop_counter import FlopCounterMode

from config import PRESETS, EncodingConfig, InputError
from lab import bench
from model_torch import GPT

MINI = PRESETS["mini"].model


def test_the_plain_gpt_is_ours_with_learned_positions():
    ours, plain = GPT(replace(MINI, encoding=EncodingConfig("learned"))), bench.plain_gpt(MINI)
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
    config = replace(config, encoding=EncodingConfig("nope"))
    model, tokens = GPT(config), torch.zeros(2, 129, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # of attention's, which torch counts by another rule: q k^T and p v, of T/2 keys on average, thrice
    attention = 2 * 128 * 4 * (2 * 128 * 64 * 2) * 3
    assert bench.matmul_flops(config, 2) == products + attention


def test_rows_stand_beside_nope(tmp_path):
    parts = "train,evaluate,generate,data,profile"
    done = process("lab.bench", "--parts", parts, "--pe", "learned,expe", "--backends", "torch,plain,plain+malloc",
                   "--repeats", 1, "--batch-size", 2, "--device", "cpu", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *rows, text = json.loads((tmp_path / "b.json").read_text())
    assert [(row["pe"], row["backend"]) for row in rows] == [
        ("nope", "torch"), ("learned", "torch"), ("expe", "torch"), ("nope", "plain"), ("nope", "plain+malloc")
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(2 * 128 / row["step_s"])
        assert row["flops_per_s"] == pytest.approx(bench.matmul_flops(MINI, 2) / row["step_s"])
        assert 1e8 < row["peak_bytes"] < 4e9 and f"{row['step_s'] * 1e3:,.1f}" in done.stdout
    nope, learned, expe, plain, _ = rows
    assert nope["over_nope"] == 1 and all(ratio == 1 for ratio in nope["evaluate_over_nope"].values())
    assert list(expe["evaluate_tokens_per_s"]) == ["128", "256", "512", "1024", "2048"]
    assert list(learned["evaluate_tokens_per_s"]) == ["128"]
    assert "streaming_tokens_per_s" in expe and "streaming_tokens_per_s" not in learned
    assert all(row["cache_bytes_a_token"] == 4 * 2 * 128 * 4 for row in (nope, learned, expe))  # blocks, k and v, fp32
    assert "evaluate_tokens_per_s" not in plain and "cached_tokens_per_s" not in plain
    shares = expe["profile"]
    assert list(shares)[0] == "aten::mm" and sum(shares.values()) == pytest.approx(1) and "aten::mm\n" in done.stdout
    assert text["part"] == "data" and text["over_tiktoken"] > 0


def test_the_plain_gpt_is_left_out_beside_presets_of_another_shape(tmp_path):
    flags = ["--preset", "llama-135m", "--parts", "train"]
    line = refused(command("lab.bench", *flags, "--backends", "torch,plain", cwd=tmp_path))
    assert "plain has layernorm and gelu, and llama-135m has not: leave it out of --backends" in line


@pytest.fixture
def row():
    asked = Namespace(preset="mini", batch_size=2, dtype="fp32", device="cpu", compile=False, repeats=1)
    row = bench.Row("nope", "torch", asked)
    yield row
    row.pool.shutdown()


def fail(reason):
    raise RuntimeError(reason)


def test_a_process_does_not_inherit_its_parents_peak(row):
    ballast = np.ones(2**27)                                            # 1 GB
    del ballast
    assert row.ask("memory") < 8e8 < 2**30 < bench.peak_bytes()


@pytest.mark.parametrize("job, reason", [((fail, "no memory\nat all"), "no memory; use a smaller --batch-size"),
                                         ((os._exit, 1), "A process in the process pool was terminated abruptly")])
def test_what_fails_in_a_process_is_told_in_one_line(row, job, reason):
    with pytest.raises(InputError, match=f"^mini, nope by torch, 2 sequences: {reason}"):
        row.ask("seconds", *job)


@pytest.mark.slow
def test_peak_memory_of_a_step_of_paper_35m(tmp_path):
    done = process("lab.bench", "--preset", "paper-35m", "--parts", "train", "--pe", "nope", "--backends",
                   "torch,plain", "--repeats", 2, "--device", "cpu", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, plain = (row["peak_bytes"] for row in json.loads((tmp_path / "b.json").read_text()))
    print(f"\n{ours / 1e9:.2f} GB, and {plain / 1e9:.2f} GB of the plain GPT")
    assert ours < 0.65 * plain
