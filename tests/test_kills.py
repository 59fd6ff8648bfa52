"""A kill at each write of a run leaves a run that resumes or, before its first step, the old one."""

import builtins
import itertools
import os
import pathlib
import shutil

import numpy as np
import pytest
from conftest import TINY, command, read_log

import common

FLAGS = [*TINY, "--layers", "1", "--width", "32", "--heads", "2", "--steps", "4", "--checkpoint-every", "2",
         "--eval-every", "3"]


class Killed(BaseException):
    """What ends the process at once: nothing of the project's catches it."""


def kill_at(monkeypatch, n):
    """Kill the process at its n-th change of a file: before or in the middle of it; returns the count of changes."""
    count = [0]

    def count_up():
        count[0] += 1
        if count[0] == n:
            raise Killed

    def wrap(owner, name, cut=None):
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            if cut is not None and count[0] == n - 1:                   # half of it is written
                cut(original, *arguments)
            count_up()
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, wrapped)

    wrap(os, "replace")
    wrap(pathlib.Path, "unlink")
    wrap(pathlib.Path, "mkdir")
    wrap(pathlib.Path, "write_bytes", lambda write, path, content: write(path, content[: len(content) // 2]))
    opened = builtins.open

    def open_to_append(path, mode="r", *arguments, **keywords):
        if mode == "a":
            if count[0] == n - 1:
                opened(path, mode).write('{"step": 1, "lo')
            count_up()
        return opened(path, mode, *arguments, **keywords)

    monkeypatch.setattr(builtins, "open", open_to_append)
    return count


def train(flags, cwd, monkeypatch, n):
    """(whether the n-th change of a file was reached, and so the run killed there)."""
    with monkeypatch.context() as patch:
        kill_at(patch, n)
        try:
            command("train.py", *FLAGS, *flags, cwd=cwd)
        except Killed:
            return True
    return False


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert command("train.py", *FLAGS, "--data", tokens, "--out", "run", cwd=folder).returncode == 0
    return folder / "run"


def is_finished_as(run, finished):
    one, other = (common.read_checkpoint(folder)[0] for folder in (run, finished))
    return read_log(run) == read_log(finished) and all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("begin", ["new", "overwrite", "resume"])
def test_a_run_that_is_killed_anywhere_resumes(begin, finished, tokens, tmp_path, monkeypatch, stop_at):
    """Or begins again, if it has no step yet; with --overwrite the old run is whole until the new one has a step."""
    flags = {"new": [], "overwrite": ["--seed", "7", "--overwrite"], "resume": ["--resume"]}[begin]
    before = {"new": None, "overwrite": finished, "resume": tmp_path / "stopped"}[begin]
    if begin == "resume":
        stop_at(1)
        command("train.py", *FLAGS, "--data", tokens, "--out", before, cwd=tmp_path)
        monkeypatch.undo()
    for n in itertools.count(1):
        run = tmp_path / f"run{n}"
        if before:
            shutil.copytree(before, run)
        if not train(["--data", tokens, "--out", run, *flags], tmp_path, monkeypatch, n):
            break
        again = ["--resume"] if (run / "config.json").exists() else [*FLAGS, "--data", tokens]
        done = command("train.py", "--out", run, *again, cwd=tmp_path)
        assert done.returncode == 0, (n, done.stderr)
        seed = common.read_run(run)[1].seed
        assert seed == 7 or is_finished_as(run, finished), n
        assert n > 1 or seed == 0
    assert n > (6 if begin == "resume" else 15)                         # changes of files in a run


def test_a_full_disk_leaves_the_last_checkpoint(finished, tokens, tmp_path, monkeypatch):
    run = tmp_path / "run"
    write = pathlib.Path.write_bytes
    done = [0]

    def full(path, content):
        if path.name.endswith(common.CHECKPOINT):
            done[0] += 1
            if done[0] == 2:
                raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):             # no wrong input: it keeps its traceback
            command("train.py", *FLAGS, "--data", tokens, "--out", run, cwd=tmp_path)
    assert common.checkpoint_info(run)["step"] == 2
    assert command("train.py", "--out", run, "--resume", cwd=tmp_path).returncode == 0
    assert is_finished_as(run, finished)
