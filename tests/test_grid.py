"""lab.grid: a study is done once, whoever works on it, and what was stopped or killed goes on."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, command, process, read_log, refused, wait_for
from safetensors.numpy import load_file

import codehash
import train
from files import hash_file
from lab import grid, measure
from lab.results import append, read_results
from runs import CHECKPOINT, checkpoint_info, read_run

STUDY = """
title = "Three encodings"
preset = "mini"
data = "{data}"
flags = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 4 --vocab 300 --steps 60 --checkpoint-every 10"
seeds = [0]

[runs]
expe = "--pe expe"
nope = "--pe nope"
[runs.k]
flags = "--on k"
expe = "--pe expe"

[measures]
loss = "--at 1x,4x --max-docs 1"
half = {{ flags = "--at 1x,4x --max-docs 1 --scale 0.5", runs = ["expe", "k.*"] }}
"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def lines_of(folder):
    return [json.loads(line) for line in next(folder.rglob("three.jsonl")).read_text().splitlines()]


def counts(folder):
    """How often each training and measurement stands in the results."""
    done = [(line["run"], line.get("measure", "training")) for line in lines_of(folder) if "run" in line]
    return {what: done.count(what) for what in done}


ALL = {(run, "training"): 1 for run in ("expe", "nope", "k.expe")} | {
    (run, "loss"): 1 for run in ("expe", "nope", "k.expe")} | {(run, "half"): 1 for run in ("expe", "k.expe")}


@pytest.fixture(scope="module")
def text(tokens):
    return STUDY.format(data=tokens)


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    """A folder in which the study was done by its --commands; the file stands in another folder."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "mine").mkdir()
    (folder / "mine/three.toml").write_text(text)
    lines = command("lab.grid", "mine/three.toml", "--commands", cwd=folder).stdout.splitlines()
    assert [path.name for path in folder.iterdir()] == ["mine"] and len(lines) == 3
    for line in lines:
        *python, module = shlex.split(line)[:3]
        assert python == ["python", "-m"]
        made = command(module, *shlex.split(line)[3:], cwd=folder)
        assert made.returncode == 0, made.stderr
    return folder


def test_each_run_is_done_once_and_then_none_is_left(done):
    assert counts(done) == ALL
    assert not command("lab.grid", "mine/three.toml", "--commands", cwd=done).stdout
    before = (done / "mine/three.jsonl").read_text()
    assert command("lab.grid", "mine/three.toml", cwd=done).returncode == 0
    assert (done / "mine/three.jsonl").read_text() == before
    run = next(line for line in lines_of(done) if line.get("run") == "k.expe")
    assert run["sha256"] == hash_file(done / "runs/three/k.expe-s0" / CHECKPOINT)
    assert run["command"].startswith("python train.py --preset mini --data ") and run["tokens"] == 60 * 4 * 16
    assert run["code"] == codehash.code_of(*read_run(done / "runs/three/k.expe-s0")[:2])
    assert run["command"].endswith("--on k --pe expe --seed 0 --out runs/three/k.expe-s0")


def test_results_are_what_lab_measure_prints(done):
    flags = "runs/three/expe-s0 --at 1x,4x --max-docs 1 --json rows.json"
    assert command("lab.measure", *flags.split(), cwd=done).returncode == 0
    fresh = json.loads((done / "rows.json").read_text())
    [stored] = [line["rows"] for line in lines_of(done) if line.get("measure") == "loss" and line["run"] == "expe"]
    assert [(row["length"], row["losses"]) for row in stored] == [(row["length"], row["unit_losses"]) for row in fresh]
    assert "| k.expe, scale 0.5 |" in command("lab.table", "mine/three.jsonl", cwd=done).stdout


def test_a_new_seed_or_measure_adds_what_is_missing_alone(done, text, tmp_path):
    for name in ("mine/three.jsonl", "runs"):
        subprocess.run(["cp", "-r", done / name, tmp_path], check=True)
    (tmp_path / "three.toml").write_text(text.replace("[measures]", '[measures]\nswap = "--probe swap --at 4x"'))
    assert command("lab.grid", "three.toml", cwd=tmp_path).returncode == 0
    assert counts(tmp_path) == ALL | {(run, "swap"): 1 for run in ("expe", "nope", "k.expe")}
    (tmp_path / "runs/three/expe-s0" / CHECKPOINT).unlink()       # of what is complete, no weights are needed
    assert not command("lab.grid", "three.toml", "--commands", cwd=tmp_path).stdout
    (tmp_path / "three.toml").write_text(text.replace("[measures]", '[measures]\nmore = "--at 2x"'))
    done = command("lab.grid", "three.toml", "--commands", cwd=tmp_path)
    assert "expe-s0: its weights are not here, so more cannot be measured" in done.stderr
    assert "--run expe-s0" not in done.stdout and "--run nope-s0" in done.stdout
    results = tmp_path / "three.jsonl"                          # a training that is removed is made again
    results.write_text("".join(line for line in results.open() if '"run":"expe","seed":0,"command"' not in line))
    assert "--run expe-s0" in command("lab.grid", "three.toml", "--commands", cwd=tmp_path).stdout
    (tmp_path / "three.toml").write_text(text.replace('nope = "--pe nope"', 'nope = "--pe rope"'))
    assert "has nope of another command" in refused(command("lab.grid", "three.toml", cwd=tmp_path))


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_do_each_job_once(text, tmp_path, start):
    """The training of a killed worker goes on from its checkpoint, and has the weights of one that was not killed."""
    right, tmp_path = tmp_path / "right", tmp_path / "killed"
    for folder in (right, tmp_path):
        folder.mkdir()
    (right / "three.toml").write_text(text)
    assert process("lab.grid", "three.toml", cwd=right, **ONE_THREAD).returncode == 0
    (tmp_path / "three.toml").write_text(text)
    words = [sys.executable, "-m", "lab.grid", "three.toml"]
    workers = [start(words, cwd=tmp_path, environment=ONE_THREAD, **QUIET) for _ in range(2)]
    checkpoint = tmp_path / "runs/three/expe-s0" / CHECKPOINT
    end = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < end:
        time.sleep(0.002)
    for worker in workers:
        worker.kill()                                                   # whichever of the two trains it
        worker.wait()
    assert checkpoint.exists()
    grid = process("lab.grid", "three.toml", "--jobs", "2", cwd=tmp_path, **ONE_THREAD)
    said = grid.stdout.splitlines()
    assert grid.returncode == 0 and "runs/three/expe-s0: training" in said
    before = "three.jsonl: {} of 3 runs are complete, {} left".format    # one may be done
    assert said[0] in (before(0, 3), before(1, 2))
    assert sum(line.endswith(": done; 2 of 3 runs are complete, 1 left") for line in said) == 1
    assert said[-1] == "three.jsonl: 3 of 3 runs are complete" and said.count(said[-1]) == 1
    assert counts(tmp_path) == ALL
    for run in ("expe", "nope", "k.expe"):
        one, other = (load_file(folder / f"runs/three/{run}-s0" / CHECKPOINT) for folder in (tmp_path, right))
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_that_another_process_holds_is_left_to_it(text, tmp_path, start):
    (tmp_path / "three.toml").write_text(text.replace("--steps 60", "--steps 2"))
    (tmp_path / "runs/three/expe-s0").mkdir(parents=True)
    holder = start([sys.executable, "-c", "import sys\nfrom runs import lock\nwith lock('runs/three/expe-s0'):\n"
                    "    print('held', flush=True)\n    sys.stdin.read()"], cwd=tmp_path, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    assert command("lab.grid", "three.toml", cwd=tmp_path).returncode == 0
    holder.communicate()
    assert {run for run, _ in counts(tmp_path)} == {"nope", "k.expe"}


@pytest.mark.slow
def test_ctrl_c_keeps_the_last_step_and_ends_all_workers(text, tmp_path, start):
    (tmp_path / "three.toml").write_text(text.replace("--steps 60", "--steps 100000"))
    grid = start([sys.executable, "-m", "lab.grid", "three.toml", "--jobs", "2"], cwd=tmp_path, environment=ONE_THREAD,
                 stdout=subprocess.DEVNULL)
    checkpoints = [tmp_path / f"runs/three/{run}-s0" / CHECKPOINT for run in ("expe", "nope")]
    end = time.monotonic() + 120
    while not all(path.exists() for path in checkpoints) and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(grid.pid, signal.SIGINT)
    grid.wait(timeout=60)
    with contextlib.suppress(ProcessLookupError):                       # none of the group is left
        os.killpg(grid.pid, 0)
        pytest.fail("a worker goes on")
    assert grid.returncode and all(checkpoint_info(path.parent)["step"] for path in checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGHUP"])
def test_workers_end_with_their_parent_and_keep_the_last_step(sent, text, tmp_path, start):
    """The signal comes to the parent alone. While a worker lives, the pipe of its output stays open."""
    long = text.replace("--steps 60 --checkpoint-every 10", "--steps 100000 --checkpoint-every 100000")
    (tmp_path / "three.toml").write_text(long)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)              # nohup has tests, and what they start, ignore it
    grid = start([sys.executable, "-m", "lab.grid", "three.toml", "--jobs", "2"], cwd=tmp_path, environment=ONE_THREAD,
                 stderr=subprocess.STDOUT)
    signal.signal(signal.SIGHUP, before)
    folders = [tmp_path / f"runs/three/{run}-s0" for run in ("expe", "nope")]
    wait_for(lambda: all((folder / "log.jsonl").exists() for folder in folders), grid)
    grid.send_signal(getattr(signal, sent))
    grid.communicate(timeout=120)
    for folder in folders:
        assert checkpoint_info(folder)["step"] == json.loads(read_log(folder)[-1])["step"]


def test_a_line_that_a_kill_cut_short_is_taken_back(tmp_path):
    path = tmp_path / "r.jsonl"
    fact, a, c = {"targets": "k", "counts": [1]}, *({"run": run, "seed": 0, "command": "", "sha256": "", "context": 1}
                                                    for run in "ac")
    append(path, fact, a)
    path.write_text(path.read_text() + '{"run": "b", "se')
    append(path, fact, c)
    assert list(map(json.loads, path.read_text().splitlines())) == [fact, a, c]
    assert read_results(path).runs.keys() == {("a", 0), ("c", 0)}


@pytest.mark.parametrize("old, new, message", [
    ('"mini"', '"huge"', "expe: argument --preset: invalid choice: 'huge'"),
    ("seeds = [0]", "", "three.toml: this lacks seeds"),
    ("seeds = [0]", "seeds = [-1]", "expe: --seed must be a whole number, at least 0"),
    ("[runs]", "runs]", "is not TOML"),
    ('"--pe nope"', "5", "nope must be flags of train.py, got 5"),
    ('"--pe nope"', '"--pe nope --seed 3"', "nope: --seed is the grid's own"),
    ('"--pe nope"', '"--pe rope --base x"', "nope: argument --base: 'x' is not a number"),
    ('"--pe nope"', '"--pe nope --l 9"', "nope: unrecognized arguments: --l 9"),
    ("--scale 0.5", "--scale x", "half: argument --scale: 'x' is not"), ("flags = ", "flag = ", "flag must be one of"),
    ("seeds = [0]", "seeds = [0]\nchosen = {expe = 1}", "chosen: expe must be a run"),
    ('["expe", "k.*"]', '["rope"]', "half: runs must be names of runs"), ("--max-docs 1 --scale", "x", "leave out x"),
    ("--max-docs 1 --scale", "--json a.json --scale", "half: --json is the grid's own"),
    ("nope = ", '"../nope" = ', "is that of a folder, and has letters, digits and"),
    ("nope = ", '"" = ', "is that of a folder"), ("nope = ", '"a b" = ', "is that of a folder"),
    ("nope = ", '"k.expe" = ', "there are two runs k.expe"),
    ("seeds = [0]", "seeds = [true]", "seeds must be whole numbers"),
    ("seeds = [0]", 'seeds = [0]\nheld_out = ""', "held_out must be a path or a name, got ''"),
    ("seeds = [0]", "seeds = [0]\nheld_out = 0", "held_out must"),
    ('"--pe nope"', '"--pe \'nope"', "No closing quotation in"),
    ("runs = ", "run = ", "half: run must be one of flags, runs, seeds"),
    ("--max-docs 1 --scale", "--stride 2 --scale", "half: --stride has no use with --protocol nonoverlap")])
def test_a_wrong_study_is_named_in_one_line(text, tmp_path, old, new, message):
    assert old in text
    (tmp_path / "three.toml").write_text(text.replace(old, new, 1))
    line = refused(command("lab.grid", "three.toml", cwd=tmp_path))
    assert message in line and "three.toml" in line and not (tmp_path / "runs").exists()


def test_a_path_of_a_study_is_one_argument(tmp_path):
    """Also where it has blanks, or looks like flags; a path without them stands in a command as it did."""
    for path in ("a b", "texts --steps 3", "it's", "-x", "data/eltec"):
        (tmp_path / "s.toml").write_text(f'''title = "t"\npreset = "mini"\nseeds = [1]\ndata = "{path}"
held_out = "{path}"\nflags = "--steps 7"\n[runs]\nexpe = "--pe expe"\n[measures]\nloss = "--at 1x"\n''')
        study = grid.read_study(tmp_path / "s.toml")
        given = "./-x" if path == "-x" else path
        args, _, config = train.read_flags(grid.command_of(study, "expe", 1)[2:])
        assert (config.data, config.steps) == (given, 7)
        flags = study.measures_of("expe", 1)["loss"]
        assert measure.read_flags(shlex.split(flags)).data == given
    assert flags == "--at 1x --data data/eltec" and study.runs["expe"] == "--data data/eltec --steps 7 --pe expe"


@pytest.mark.parametrize("name", ["", "0", "nope", "expe-s1"])
def test_a_run_that_the_study_has_not_is_refused(name, text, tmp_path):
    (tmp_path / "three.toml").write_text(text)
    line = refused(command("lab.grid", "three.toml", "--run", name, cwd=tmp_path))
    assert "--run must be one of the study's runs, such as expe-s0, got" in line and not (tmp_path / "runs").exists()


def test_the_studies_of_this_repository_can_be_read_and_their_results_are_theirs():
    for path in sorted((ROOT / "studies").glob("*.toml")):
        left = command("lab.grid", path, "--commands", cwd=ROOT)
        assert left.returncode == 0, left.stderr
        done = path.with_suffix(".jsonl").exists()
        if done and path.stem != "paper-35m-books":                # of which some seeds are left
            assert len(left.stdout.splitlines()) <= 2, path             # of two studies a seed was not measured
