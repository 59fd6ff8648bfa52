"""A grid in several processes: each job is done once, and what a killed process leaves is done by another."""

import collections
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, command, process, refused

import common
from lab import reproduce

SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch-size", "4", "--vocab", "300"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def flags(tokens, steps):
    small = [*SMALL, "--steps", str(steps), "--checkpoint-every", "10", "--data", str(tokens)]
    return ["--seeds", "0", "--max-docs", "1", "--", *small]


def jobs_done(printed):
    """How often each job was begun, by the words that say so; what trainings print may stand on the same line."""
    jobs = "training|nonoverlap|same-targets|scaled-same-targets|scaled"
    return collections.Counter(re.findall(rf"(runs/mini/[\w-]+ (?:{jobs}))(?=,|\s)", printed))


def hashes(folder):
    return {run.name: common.checkpoint_info(run)["sha256"] for run in sorted((folder / "runs/mini").iterdir())}


@pytest.fixture(scope="module")
def by_commands(tokens, tmp_path_factory):
    """A folder in which a grid was done by its --commands, all at once, and what they printed."""
    folder = tmp_path_factory.mktemp("commands")
    lines = command("lab.reproduce", "scaling", "--commands", *flags(tokens, 60), cwd=folder).stdout
    assert not any(folder.iterdir()) and len(lines.splitlines()) == 3
    lines = lines.replace("python ", f"{shlex.quote(sys.executable)} ")
    done = subprocess.run(["xargs", "-P", "4", "-I{}", "sh", "-c", "{}"], input=lines, cwd=folder, env=ENVIRONMENT,
                          text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_commands_do_each_job_once_and_then_none_is_left(by_commands, tokens):
    folder, printed = by_commands
    assert set(jobs_done(printed).values()) == {1} and len(jobs_done(printed)) == 15
    assert len(list((folder / "results/mini").glob("*.json"))) == 15 and not list(folder.glob("*.md"))
    assert not command("lab.reproduce", "scaling", "--commands", *flags(tokens, 60), cwd=folder).stdout


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="finds a worker by the lock that it holds")
def test_the_job_of_a_killed_worker_is_taken_up_by_another(by_commands, tokens, tmp_path):
    """Two workers; the one that trains exqpe-s0 is killed after its first checkpoint."""
    words = [sys.executable, "-m", "lab.reproduce", "scaling", "--jobs", "2", *flags(tokens, 60)]
    grid = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)
    run = tmp_path / "runs/mini/exqpe-s0"
    end = time.monotonic() + 120
    while not (run / common.CHECKPOINT).exists() and time.monotonic() < end:
        time.sleep(0.002)
    inode = (run / ".lock").stat().st_ino
    [pid] = [int(line.split()[4]) for line in open("/proc/locks") if line.split()[5].endswith(f":{inode}")]
    os.kill(pid, signal.SIGKILL)
    assert common.checkpoint_info(run)["step"] < 60
    printed, _ = grid.communicate(timeout=300)
    assert grid.returncode == 0
    counts = jobs_done(printed)
    assert counts.pop("runs/mini/exqpe-s0 training") == 2 and set(counts.values()) == {1} and len(counts) == 14
    assert hashes(tmp_path) == hashes(by_commands[0])                   # of both, one thread a run


def test_a_run_that_another_process_holds_is_left_to_it(by_commands, tokens, monkeypatch):
    folder, _ = by_commands
    run = folder / "runs/mini/expe-s0"
    file = folder / "results/mini/expe-s0.scaled.json"
    text = file.read_text()
    file.unlink()
    monkeypatch.setattr(reproduce, "PAUSE", 0.1)
    words = ["lab.reproduce", "scaling", "--run", "expe-s0", *flags(tokens, 60)]
    with ThreadPoolExecutor(1) as pool, open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                                # of another opening of the file: it counts
        grid = pool.submit(command, *words, cwd=folder)
        time.sleep(1)
        left_alone = not grid.done() and not file.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
    assert left_alone and "expe-s0 scaled" in grid.result().stdout and file.read_text() == text


def test_an_error_of_a_worker_ends_the_grid_with_its_line(tokens, tmp_path):
    done = process("lab.reproduce", "scaling", "--jobs", "2", *flags(tokens, 60), "--lr", "1e30", "--end-lr", "0",
                   cwd=tmp_path)
    assert done.returncode == 2 and "try a lower --lr than 1e+30" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words, message", [
    ("--run rope-s0", "--run must be one of the grid's runs, such as expe-s1, got rope-s0"),
    ("--jobs 0", "--jobs: must be at least 1")])
def test_wrong_flags_are_named(words, message, tmp_path):
    assert message in refused(command("lab.reproduce", "scaling", *words.split(), cwd=tmp_path))
    assert not list(tmp_path.iterdir())
