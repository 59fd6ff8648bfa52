"""lab/gpu_day.py, rehearsed: what it plans, that it goes on where it was stopped, and all that it brings home."""

import argparse
import dataclasses
import math
import os

import pytest
from conftest import command, process, refused

import data
from config import InputError
from lab import gpu_day, measures
from lab.files import read_json, write_json


@pytest.fixture(scope="module")
def corpus(books, tmp_path_factory):
    """Tokens of mini's vocabulary, of short documents."""
    folder = tmp_path_factory.mktemp("day") / "tokens"
    data.prepare(str(books), folder, 1024, min_doc_tokens=256)
    return folder


@pytest.fixture
def day(corpus, tmp_path):
    args = argparse.Namespace(out=tmp_path / "out", work=tmp_path / "work", minutes=38, rehearse=True, corpus=corpus)
    made = gpu_day.Day(args)
    made.rehearse = False
    return made


def planned(day, **rates):
    rows = [{"pe": pe, "tokens_per_s": rate} for pe, rate in rates.items()]
    write_json(day.out / "bench-bf16.json", rows)
    gpu_day.plan(day, day.out / "plan.json")
    return read_json(day.out / "plan.json")


def test_the_plan_fills_the_time_that_is_left_with_equal_runs(day):
    rates = {"nope": 4000, "expe": 2000, "rope": 1000, "alibi": 4000, "t5": 1}
    day.times = {"bench": 8 * 60}
    found = planned(day, **rates)
    spent = [found["tokens_a_run"] / rate for rate in (2000, 1000, 4000, 2000, 4000)]  # sinusoidal has NoPE's rate
    step = 8 * 128 * (1 / 2000 + 1 / 1000 + 1 / 4000 + 1 / 2000 + 1 / 4000)
    time = 0.9 * (30 * 60 - 5 * gpu_day.AFTER)
    assert time - step < sum(spent) <= time and found["steps"] * 8 * 128 == found["tokens_a_run"]
    assert planned(day, **{pe: 1e9 for pe in rates})["steps"] == day.config.steps  # not more than the preset's
    day.times = {"bench": 36 * 60}
    with pytest.raises(InputError, match="2 minutes are too few for 5 runs: give more --minutes"):
        planned(day, **rates)


def test_lengths_are_those_that_documents_have(day, corpus):
    sizes = [len(document) - 1 for document in data.split_documents(data.open_split(corpus, "val"), 1023)]
    found = gpu_day.lengths(day)
    assert found[0] == 128 and sorted(sizes)[-gpu_day.ENOUGH] >= found[-1]
    assert found[-1] == 2048 or sorted(sizes)[-gpu_day.ENOUGH] < 2 * found[-1]
    day.model = dataclasses.replace(day.model, context=10**6)
    with pytest.raises(InputError, match="lacks 4 documents of 1000000 tokens: give more text"):
        gpu_day.lengths(day)


def test_a_part_is_done_once_and_its_time_counted_even_if_it_is_stopped(day):
    done, file = [], day.out / "x.json"

    def stopped(day):
        done.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        day.part("x", file, stopped)
    before = day.times["x"]
    day.part("x", file, lambda day, value: write_json(file, value), 5)
    day.part("x", file, stopped)
    assert done == [1] and read_json(file) == 5 and read_json(day.out / "times.json")["x"] > before > 0


def test_without_a_gpu_it_says_so(corpus, tmp_path):
    line = refused(command("lab.gpu_day", corpus, cwd=tmp_path))
    assert "there is no GPU here: --rehearse does the same on the CPU" in line and os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rehearsal_that_is_stopped_goes_on_and_brings_all_home(corpus, tmp_path, monkeypatch):
    evaluate, calls = gpu_day.evaluation.main, []

    def stopped(argv):
        calls.append(argv)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return evaluate(argv)

    monkeypatch.setattr(gpu_day.evaluation, "main", stopped)
    assert command("lab.gpu_day", corpus, "--rehearse", cwd=tmp_path).returncode == 130
    out = tmp_path / "gpu-day"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "times.json"}
    assert {path.name for path in (out / "runs").iterdir()} == {"expe", "rope"} and not (out / "summary.json").exists()
    done = process("lab.gpu_day", corpus, "--rehearse", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in before}  # nothing is made again
    found = read_json(out / "summary.json")
    assert found["rehearsal"] and found["losses"].keys() == gpu_day.RUNS.keys()
    for name in gpu_day.RUNS:
        assert sorted(os.listdir(out / "runs" / name)) == ["config.json", "log.jsonl"]
        config = read_json(out / "runs" / name / "config.json")
        assert config["checkpoint"]["step"] == config["train"]["steps"] == 2
        losses = found["losses"][name]
        assert losses.keys() == measures.PROTOCOLS.keys()
        assert bool(losses["streaming"]) == (name != "sinusoidal")
        by_length = losses["same-targets"]
        assert list(by_length) == [str(n) for n in found["lengths"]]
        assert all(abs(loss - math.log(1024)) < 0.5 for loss in by_length.values())
    rows = {dtype: [(row["pe"], row["dtype"]) for row in read_json(out / f"bench-{dtype}.json")]
            for dtype in ("bf16", "fp32", "tf32")}  # fmt: skip
    assert rows["bf16"] == [(pe, "bf16") for pe in ("nope", "expe", "rope", "alibi", "t5")]
    assert all(rows[dtype] == [("nope", dtype), ("expe", dtype)] for dtype in ("fp32", "tf32"))
    drawn = {path.name for path in out.glob("*.png")}
    assert drawn == {"curves.png", "nonoverlap-by-position.png", *(f"{name}.png" for name in measures.PROTOCOLS)}
    assert not [path for path in out.rglob("*") if path.suffix == ".safetensors"]
