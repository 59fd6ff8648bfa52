"""Killed at every file event, and started again, a command ends as an undisturbed one; and so it does on a full disk.

A file event: a file is opened to be written, renamed, removed or synced, a folder made or removed, a line logged.

Tests start this file as a program. It imports what takes long once, and forks for each command.
"""

import importlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from conftest import ROOT, TINY

import data
import files
import runs
import train

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree",
          "shutil.copyfile", "shutil.copytree", "shutil.move"}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


# ---- the program: commands in forks of it ----------------------------------------------------------------------------


def forked(folder, script, *flags, kill_at=None, limit=None):
    """(exit status, stderr) of a command in a folder, killed at an event or with no room for a file above a limit."""
    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(said.fileno(), 2)
                os.chdir(folder)
                sys.argv = [script, *flags]
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                if kill_at is not None:
                    die_at(kill_at)
                importlib.import_module(script.removesuffix(".py")).main()
                status = 0
            except SystemExit as exit:
                status = exit.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status if isinstance(status, int) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read()


def die_at(number):
    """End this process at the event of that number in the folder it is in, as kill -9 would: nothing is flushed.

    A file that is about to be synced is one event more: half of what no sync has seen is lost, as in a power cut.
    """
    import safetensors.numpy

    here, count = os.getcwd() + os.sep, itertools.count()
    on_disk = {path.stat().st_ino: path.stat().st_size for path in Path(here).rglob("*")}
    sync, save_file, write = files.sync, safetensors.numpy.save_file, train.Log.write

    def event(last=None):
        if next(count) == number:
            if last:
                last()
            os._exit(9)

    def cut(path):
        found = os.stat(path)
        kept = min(found.st_size, on_disk.get(found.st_ino, 0))
        os.truncate(path, (kept + found.st_size) // 2)

    def hook(name, arguments):
        if name == "open" and arguments[2] & WRITING:
            paths = arguments[:1]
        elif name in EVENTS:
            paths = arguments[:2]
        else:
            return
        paths = [os.path.abspath(os.fsdecode(p)) for p in paths if isinstance(p, str | bytes | os.PathLike)]
        if any(path.startswith(here) for path in paths):
            event()
            if name == "os.rename" and os.path.exists(paths[1]):
                on_disk.pop(os.stat(paths[1]).st_ino, None)  # a new file may get its number

    def recorded_sync(path):
        event()
        if os.path.isfile(path):
            event(lambda: cut(path))
        sync(path)
        on_disk[os.stat(path).st_ino] = os.stat(path).st_size

    def recorded_save(tensors, path):
        def save_half():
            """It writes a file of its own making, which it renames."""
            save_file(tensors, scratch := path.with_name(".tmpAbCdEf"))
            os.truncate(scratch, scratch.stat().st_size // 2)

        event()
        event(save_half)
        save_file(tensors, path)
        on_disk.pop(os.stat(path).st_ino, None)

    def recorded_write(*arguments, **line):
        event()
        write(*arguments, **line)

    sys.addaudithook(hook)
    files.sync = runs.sync = data.sync = recorded_sync
    safetensors.numpy.save_file, train.Log.write = recorded_save, recorded_write


def check_run(run):
    """The last committed checkpoint of a run is whole, and so is its log; returns its step."""
    _, _, record = runs.read_run(run)
    for name in runs.CHECKPOINT:
        runs.checkpoint_file(run, record, name)
    data.run_tokenizer(run, record["data"])
    runs.log_up_to(run / "log.jsonl", record["checkpoint"]["step"])
    return record["checkpoint"]["step"]


def check_tokens(folder):
    for split in data.SPLITS:
        data.open_split(folder, split)
    assert files.fingerprint(folder / "tokenizer.tiktoken") == data.read_meta(folder)["tokenizer"]


def check_grid(folder):
    for run in folder.glob("runs/*/[!.]*"):
        check_run(run)
    for path in folder.glob("results/*/*.json"):
        files.read_json(path)


def contents(folder):
    """{path: what has to be the same each time} of every file in a folder: all but times, and what is made of them."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        found[str(path.relative_to(folder))] = value = path.read_bytes()
        assert not path.name.startswith(".") and path.suffix != ".new", path
        if path.name == "config.json":
            value = json.loads(value)
            value["checkpoint"].pop("seconds")
            value["provenance"].pop("command")
        elif path.name.endswith(".run.json"):
            value = json.loads(value)
            value.pop("seconds")
            value["provenance"].pop("command")
        elif path.name == "RESULTS.md":
            value = None
        found[str(path.relative_to(folder))] = value
    return found


def kill_everywhere(folder, command, what, check, start=None, then="again", unfinished=False, every=1, sizes=()):
    """Kill a command at each `every`-th event, and start it again; returns how many events it has.

    what: the folder that it writes. start: a command to be done before. then: what comes after a kill if the folder is
    there, "again" the same command, "resume" it with --resume, or "nothing", for it is whole. unfinished: whether the
    command goes on with a run from a step in the middle, whose checkpoint's files are yet to be renamed. sizes: other
    values of data.py's, (name, value) each.
    """
    for size in sizes:
        setattr(data, *size)
    check, place = globals()[check], Path(what)
    first, whole = folder / "first", folder / "whole"
    for path in (first, whole):
        path.mkdir()
    if start:
        done = forked(first, *start)
        assert done[0] == 0, done
        shutil.copytree(first, whole, dirs_exist_ok=True)
    done = forked(whole, *command)
    assert done[0] == 0, done
    expected = contents(whole)
    if unfinished:
        first, command = unfinished_run(folder, command, place), [*command, "--resume"]
        start = command
    for number in itertools.count(0, every):
        tried = folder / f"killed-at-{number}"
        shutil.copytree(first, tried)
        status, said = forked(tried, *command, kill_at=number)
        if status == 0:
            assert contents(tried) == expected
            return number
        assert status == 9, (number, status, said)
        now = tried / place
        if not now.exists():
            now = now.with_name(f".{now.name}.old")
        assert now.exists() or not start, f"{what} is lost by a kill at event {number}"
        if now.exists():
            check(now)
        there = (tried / place).exists() and then != "again"
        if not there or then == "resume":
            done = forked(tried, *command, *["--resume"] * there)
            assert done[0] == 0, (number, done)
        found = contents(tried)
        assert found.keys() == expected.keys(), (number, found.keys() ^ expected.keys())
        assert found == expected, (number, [name for name in found if found[name] != expected[name]])
        shutil.rmtree(tried)


def unfinished_run(folder, command, place):
    """A folder in which the run was killed in the middle, between config.json and the renames of its checkpoint."""
    for number in itertools.count():
        tried = folder / f"unfinished-{number}"
        tried.mkdir()
        assert forked(tried, *command, kill_at=number)[0] == 9
        if (tried / place / "model.safetensors.new").exists() and check_run(tried / place) == 4:
            names = runs.read_run(tried / place)[2]["checkpoint"]["files"]
            if files.fingerprint(tried / place / "model.safetensors.new") == names["model.safetensors"]:
                return tried
        shutil.rmtree(tried)


def refuses(message, limit, folder, *command):
    """A command that may write no file above a limit ends by one line."""
    status, said = forked(folder, *command, limit=limit)
    assert status == 2 and said.count("\n") == 1 and message in said and "File too large" in said, (status, said)


def train_on_a_full_disk(folder, command):
    """Full at the first checkpoint, at a later one, and at a line of the log; then there is room, and the run ends."""
    whole, run, resume = folder / "whole", folder / "runs" / "a", [*command, "--resume"]
    whole.mkdir()
    assert forked(whole, *command)[0] == 0
    weights, moments = ((whole / "runs" / "a" / name).stat().st_size for name in runs.CHECKPOINT)
    refuses("model.safetensors cannot be", weights - 1, folder, *command)
    assert not run.parent.exists()
    for line in (command, resume):
        refuses("runs/a/optimizer.safetensors cannot be", moments - 1, folder, *line)
        assert check_run(run) == 0
    steps = json.dumps({"step": 0, "note": "x" * 2 * moments}) + "\n"
    (run / "log.jsonl").write_text(steps)
    refuses("error: runs/a/log.jsonl", len(steps) - 1, folder, *resume)
    refuses("error: runs/a/log.jsonl", len(steps) + 100, folder, *resume)
    assert check_run(run) == 0 and (run / "log.jsonl").stat().st_size == len(steps) + 100  # the first is half there
    done = forked(folder, *resume)
    assert done[0] == 0, done
    log = (run / "log.jsonl").read_text()
    assert log.startswith(steps)
    (run / "log.jsonl").write_text(log.removeprefix(steps))
    assert contents(folder / "runs") == contents(whole / "runs")


def write_on_a_full_disk(folder, source, run):
    prepare = ["data.py", source, "--vocab", "300", "--out", "tokens"]
    for limit in (2_000, 10_000, 100_000):  # of the tokenizer, the first of its splits, the largest one
        refuses("data.py: error: tokens", limit, folder, *prepare)
        assert not any(folder.iterdir())
    score = ["eval.py", run, "--lengths", "16,32", "--max-docs", "1", "--json", "rows.json", "--plot", "loss.png"]
    (folder / "rows.json").write_text("what was there before")
    refuses("eval.py: error: rows.json", 200, folder, *score)
    assert (folder / "rows.json").read_text() == "what was there before"
    refuses("eval.py: error: loss.png", 10_000, folder, *score)
    assert [row["length"] for row in files.read_json(folder / "rows.json")] == [16, 32]
    assert os.listdir(folder) == ["rows.json"]


def main():
    """One line of JSON on standard input: a function's name and its arguments; its value on standard output."""
    import torch

    torch.set_num_threads(1)
    for name in ("torch._dynamo", "eval", "fast", "lab.pictures", "lab.report", "lab.reproduce", "safetensors.numpy"):
        importlib.import_module(name)
    name, positional, named = json.load(sys.stdin)
    folder = Path(positional.pop(0)).resolve()
    print(json.dumps(globals()[name](folder, *positional, **named)))


# ---- the tests -------------------------------------------------------------------------------------------------------


def program(function, *positional, **named):
    """What a function above returns in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([function, positional, named], default=str),
        text=True,
        capture_output=True,
        timeout=3 * 3600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


SMALL = [*TINY[2:], "--layers", "2", "--width", "32", "--heads", "2", "--dropout", "0.1"]


@pytest.fixture
def flags(tokens):
    return ["train.py", "--preset", "mini", "--pe", "expe", *SMALL, "--data", tokens, "--out", "runs/a",
            "--eval-every", "3", "--checkpoint-every", "2", "--steps", "6"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_a_run_killed_at_every_event_ends_as_one_that_was_not(flags, tmp_path, backend):
    command = [*flags, "--backend", backend]
    assert program("kill_everywhere", tmp_path, command, "runs/a", "check_run", then="resume") > 80


def test_a_run_killed_at_some_events_ends_as_one_that_was_not(flags, tmp_path):
    assert program("kill_everywhere", tmp_path, flags, "runs/a", "check_run", then="resume", every=13) > 80


@pytest.mark.slow
def test_a_run_that_replaces_another_is_killed_at_every_event(flags, tmp_path):
    old = [*flags, "--seed", "1", "--steps", "2"]
    command = [*flags, "--overwrite"]
    assert program("kill_everywhere", tmp_path, command, "runs/a", "check_run", start=old) > 80


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_a_run_that_goes_on_is_killed_at_every_event(flags, tmp_path, backend):
    command = [*flags, "--backend", backend]
    assert program("kill_everywhere", tmp_path, command, "runs/a", "check_run", unfinished=True) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_data_killed_at_every_event_is_prepared_as_if_it_was_not(books, copies, tmp_path, overwrite):
    command = ["data.py", str(copies), "--vocab", "300", "--min-doc-tokens", "256", "--out", "tokens"]
    old = ["data.py", str(books), "--vocab", "260", "--out", "tokens"] if overwrite else None
    command, then = ([*command, "--overwrite"], "again") if overwrite else (command, "nothing")
    assert program("kill_everywhere", tmp_path, command, "tokens", "check_tokens", start=old, then=then) > 20


SIZES = (("SAVE_CHARS", 30_000), ("ENCODE_CHARS", 8_000), ("TOKENIZER_CHARS", 40_000))


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_long_preparation_killed_at_every_event_goes_on_from_its_last_note(copies, tmp_path, every):
    command = ["data.py", str(copies), "--vocab", "300", "--min-doc-tokens", "256", "--out", "tokens"]
    how = {"then": "nothing", "sizes": SIZES, "every": every}
    assert program("kill_everywhere", tmp_path, command, "tokens", "check_tokens", **how) > 60


@pytest.mark.slow
def test_a_grid_killed_at_every_event_ends_as_one_that_was_not(tokens, tmp_path):
    command = ["lab.reproduce", "scaling", "--preset", "mini", "--seeds", "0", "--", *SMALL, "--steps", "2",
               "--data", tokens]  # fmt: skip
    assert program("kill_everywhere", tmp_path, command, ".", "check_grid") > 150


def test_what_is_left_of_a_folder_that_was_being_deleted_is_not_taken_for_it(tmp_path):
    (tmp_path / ".a.old").mkdir()
    (tmp_path / ".a.old" / "log.jsonl").write_text("config.json went first")
    with files.new_folder(tmp_path / "a", runs.FILES) as scratch:
        (scratch / "config.json").touch()
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == ["config.json"]


# A limit on the size of a file stands for a full disk.


def test_training_on_a_full_disk_keeps_its_checkpoint_and_goes_on(flags, tmp_path):
    program("train_on_a_full_disk", tmp_path, flags)


def test_data_and_eval_on_a_full_disk_name_the_file_and_leave_no_part_of_it(books, workplace, tmp_path):
    program("write_on_a_full_disk", tmp_path, books, workplace / "runs" / "rope")


if __name__ == "__main__":
    main()
