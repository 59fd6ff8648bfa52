"""What lab/bench.py counts and times is what it says."""

import json
import os
from argparse import Namespace
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import command
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import model_torch
from cli import new_file
from config import make_configs
from engine import fast
from lab import bench
from model_torch import GPT
from positional_encodings import make_encoding
from settings import InputError

MINI = make_configs("mini")[0]


@pytest.mark.parametrize("config", [MINI, replace(MINI, norm="rmsnorm", mlp="swiglu", mlp_width=300, tied=True)])
def test_the_operations_of_a_step_are_those_that_torch_counts(config):
    config = replace(config, encoding=make_encoding("nope"))
    model, tokens = GPT(config), torch.zeros(2, 129, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # of attention's, which torch counts by another rule: q k^T and p v, of T/2 keys on average, thrice
    attention = 2 * 128 * 4 * (2 * 128 * 64 * 2) * 3
    assert fast.flops_a_token(config) * 2 * 128 == products + attention


class Now:
    """A pool of one process, without the process: what is submitted is done at once, here."""

    def submit(self, job, *arguments):
        (done := Future()).set_result(job(*arguments))
        return done

    def shutdown(self):
        pass


@pytest.mark.slow
def test_rows_stand_beside_nope(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda *how: Now())  # each process loads torch for seconds
    monkeypatch.setattr(bench, "REST", 0)
    monkeypatch.setattr(bench, "GENERATED", 4)
    monkeypatch.setattr(bench, "MULTIPLES", (1, 2))
    done = command("lab.bench", "--pe", "learned,expe", "--backends", "torch,plain",
                   "--repeats", 1, "--batch-size", 2, "--device", "cpu", "--json", "b.json", cwd=tmp_path)
    bench.Work.cache_clear()
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    parts = {part: [row for row in rows if row["part"] == part] for part in ("train", "evaluate", "generate")}
    assert new_file(".json")(str(tmp_path / "b.json"))                  # which --json may replace
    assert [(row["pe"], row["backend"]) for row in parts["train"]] == [
        ("nope", "torch"), ("learned", "torch"), ("learned", "plain"), ("expe", "torch"), ("expe", "plain")]
    for row in parts["train"]:
        assert row["tokens/s"] == pytest.approx(2 * 128 / row["step, ms"] * 1e3)
        assert row["GFLOP/s"] == pytest.approx(fast.flops_a_token(MINI) * row["tokens/s"] / 1e9)
        assert 100 < row["peak, MB"] < 1.01 * bench.peak_bytes() / 1e6               # of this process, and its tests
        assert f"| {row['step, ms']:,.1f}" in done.stdout
    assert parts["train"][0]["x NoPE"] == 1
    nope, learned, expe = parts["evaluate"]                             # of --fast alone
    assert nope["x NoPE at 256"] == 1 and "tokens/s at 256" in expe
    assert "tokens/s at 128" in learned and "tokens/s at 256" not in learned
    nope, learned, expe = parts["generate"]
    assert "tokens/s, streaming" in expe and "tokens/s, streaming" not in learned
    assert all(row["cache, B/token"] == 4 * 2 * 128 * 4 for row in parts["generate"])          # blocks, k and v, fp32


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_plain_backend_has_none_of_the_parts_of_fast_py(compiled):
    model = bench.Work("mini", "nope", "plain", 2, "fp32", "cpu", compiled).backend.model
    assert type(model.blocks[0].attn) is model_torch.Attention
    assert type(model.dropout) is nn.Dropout and model.cross_entropy is model_torch.cross_entropy


def fail(reason):
    raise RuntimeError(reason)


@pytest.mark.slow
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
