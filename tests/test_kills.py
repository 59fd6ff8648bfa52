"""A kill at each write of a run leaves a run that resumes or, before its first checkpoint, the old one."""

import builtins
import contextlib
import itertools
import os
import pathlib
import shutil

import numpy as np
import pytest
from conftest import TINY, command, read_log, refused, slow

from files import lock, write_bytes, write_text
from runs import CHECKPOINT, NEW_RUN, read_checkpoint, read_run

FLAGS = [*TINY, "--layers", "1", "--width", "32", "--heads", "2", "--steps", "4", "--checkpoint-every", "2",
         "--eval-every", "3"]


class Killed(BaseException):
    """What ends the process at once: nothing of the project's catches it."""


def kill_at(monkeypatch, n):
    """Kill the process at its n-th change of a file, before or in the middle of it: from then on it changes nothing."""
    count = [0]

    def count_up():
        count[0] += 1
        if count[0] >= n:
            raise Killed

    def wrap(owner, name):
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            count_up()
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, wrapped)

    wrap(os, "replace")
    for name in ("unlink", "mkdir", "rmdir"):
        wrap(pathlib.Path, name)
    opened = builtins.open

    def open_to_write(path, mode="r", *arguments, **keywords):
        if mode in ("a", "xb"):
            if count[0] == n - 1:
                opened(path, mode).write('{"step": 1, "lo' if mode == "a" else b'{"half": ')
            count_up()
        return opened(path, mode, *arguments, **keywords)

    monkeypatch.setattr(builtins, "open", open_to_write)


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
def runs(tokens, tmp_path_factory):
    """{seed: a finished run}."""
    folder = tmp_path_factory.mktemp("finished")
    for seed in (0, 7):
        done = command("train.py", *FLAGS, "--seed", seed, "--data", tokens, "--out", f"run{seed}", cwd=folder)
        assert done.returncode == 0
    return {seed: folder / f"run{seed}" for seed in (0, 7)}


@pytest.fixture
def finished(runs):
    return runs[0]


def read_all(run):
    """{name: content} of all files in a folder, its lock left out."""
    return {path.name: path.is_file() and path.read_bytes() for path in run.iterdir() if path.name != ".lock"}


def is_finished_as(run, finished):
    one, other = (read_checkpoint(folder)[0] for folder in (run, finished))
    return read_log(run) == read_log(finished) and all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("begin", ["overwrite", *slow("new", "resume")])
def test_a_run_that_is_killed_anywhere_resumes(begin, runs, finished, tokens, tmp_path, monkeypatch, stop_at):
    """Or begins again, if it has no step yet; with --overwrite the old run is whole until the new one is."""
    flags = {"new": [], "overwrite": ["--seed", "7", "--overwrite"], "resume": ["--resume"]}[begin]
    before = {"new": None, "overwrite": finished, "resume": tmp_path / "stopped"}[begin]
    if begin == "resume":
        stop_at(1)
        command("train.py", *FLAGS, "--data", tokens, "--out", before, cwd=tmp_path)
        monkeypatch.undo()
    seeds = []
    for n in itertools.count(1):
        run = tmp_path / f"run{n}"
        if before:
            shutil.copytree(before, run)
        if not train(["--data", tokens, "--out", run, *flags], tmp_path, monkeypatch, n):
            break
        if begin == "overwrite" and not (run / NEW_RUN / CHECKPOINT).exists():
            own = {name: content for name, content in read_all(run).items() if not name.startswith(".unfinished-")}
            seed = read_run(run)[1].seed
            assert seed == 7 or own == read_all(finished), n
        again = ["--resume"] if (run / "config.json").exists() else [*FLAGS, "--data", tokens]
        done = command("train.py", "--out", run, *again, cwd=tmp_path)
        assert done.returncode == 0, (n, done.stderr)
        seeds.append(read_run(run)[1].seed)
        assert is_finished_as(run, runs[seeds[-1]]), n
        assert not [name for name in os.listdir(run) if name.startswith(".unfinished-")]
    assert n > (6 if begin == "resume" else 15)                         # changes of files in a run
    assert seeds == sorted(seeds) and set(seeds) == ({0, 7} if begin == "overwrite" else {0})


def test_a_run_whose_replacement_was_killed_between_two_renames_is_not_read(runs, tokens, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    shutil.copytree(runs[7], tmp_path / "run" / NEW_RUN, ignore=shutil.ignore_patterns(".lock"))
    os.replace(tmp_path / "run" / NEW_RUN / "config.json", tmp_path / "run/config.json")
    line = refused(command("generate.py", "run", "--tokens", "3", cwd=tmp_path))
    assert "--overwrite was killed while it replaced the files: python train.py --out run --resume" in line
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    assert read_all(tmp_path / "run") == read_all(runs[7])


def test_a_new_run_that_cannot_be_trained_leaves_the_old_one(finished, tokens, tmp_path):
    """Whatever its error; and --overwrite follows no link in the place of its own folder."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished, tmp_path / "another")
    (tmp_path / "another" / CHECKPOINT).unlink()
    before = read_all(tmp_path / "another")
    (tmp_path / "run" / NEW_RUN).symlink_to(tmp_path / "another")
    flags = [*FLAGS, "--data", tokens, "--out", "run", "--overwrite", "--lr", "1e30", "--warmup", "0"]
    assert "try a lower --lr" in refused(command("train.py", *flags, cwd=tmp_path))
    assert read_all(tmp_path / "run") == read_all(finished) and read_all(tmp_path / "another") == before


def test_what_a_killed_process_left_is_removed_by_the_next_that_owns_the_folder(finished, tokens, tmp_path):
    """A file that is not named as ours are stays."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copytree(tokens, tmp_path / "tokens")
    write_text(tmp_path / "new.json", "")
    left = [folder / f".unfinished-0123456789abcdef-{name}" for folder, name in (
        (run, CHECKPOINT), (tmp_path / "tokens", "train.bin"), (tmp_path, "a.json"), (tmp_path, "b.json"))]
    mine = [run / ".unfinished-thesis", tmp_path / ".unfinished-0123456789abcdef"]
    for path in (*left, *mine):
        path.write_bytes(b"half")
    assert command("train.py", "--out", "run", "--resume", cwd=tmp_path).returncode == 0
    with lock(tmp_path / "tokens"):
        pass
    write_text(tmp_path / "a.json", "")                          # another process may write it now
    assert [path.exists() for path in left] == [False, False, True, True]
    for path in left[2:]:
        os.utime(path, (0, 0))
    write_text(tmp_path / "a.json", "")
    assert [path.exists() for path in left] == [False, False, False, True] and all(path.exists() for path in mine)


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 100 KB, which ends a write as a full disk does."""
    resource = pytest.importorskip("resource", reason="this limit is of POSIX")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_new_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("old")
    with small_files(), pytest.raises(OSError, match="File too large: 'a.json'"):
        write_bytes("a.json", bytes(10**6))
    assert read_all(tmp_path) == {"a.json": b"old"}


@pytest.mark.parametrize("flags", [["--overwrite"], ["--resume", "--steps", "6"]], ids=lambda flags: flags[0])
def test_a_full_disk_is_named_in_one_line_and_leaves_the_old_run(flags, finished, tokens, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    before = read_all(tmp_path / "run")
    own = FLAGS if "--overwrite" in flags else ()
    with small_files():
        done = command("train.py", *own, "--data", tokens, "--out", "run", *flags, cwd=tmp_path)
    assert f"{CHECKPOINT} cannot be written: File too large" in refused(done)
    after = read_all(tmp_path / "run")
    if "--resume" in flags:                                             # whose log grows until then
        before |= {name: after[name] for name in ("log.jsonl", "config.json")}
    assert after == before
