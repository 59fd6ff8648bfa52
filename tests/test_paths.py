"""Hostile output paths: a folder or file that a script did not make is never deleted, moved or replaced."""

import argparse
import os
import signal
import socket
import sys

import pytest
import torch
from conftest import ROOT, TINY, command, group, process, refused

import backends
from cli import PICTURES, new_file

PATHS = ["", ".", "..", "missing/../existing", "link", "file", "existing", "loop", "file/inside", "existing/file",
         "foreign-config", "foreign-meta"]


def snapshot(folder):
    """{path: content or kind} of all that lies in a folder, locks left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name != ".lock" and not name.startswith(("cache", "tokens")):
            found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture
def desk(tmp_path):
    """A folder that holds folders and files of others, and a subfolder to stand in."""
    here = tmp_path / "desk" / "here"
    for folder in ("existing", "foreign-config", "foreign-meta"):
        (here / folder).mkdir(parents=True)
        (here / folder / "file").write_text("precious")
    (here / "foreign-config" / "config.json").write_text('{"model": "yours"}')
    (here / "foreign-meta" / "meta.json").write_text('{"splits": 1, "pattern": "a*b"}')
    (here / "file").write_text("precious")
    (here / "link").symlink_to("existing")
    (here / "loop").symlink_to("loop")
    (here.parent / "above").write_text("precious")
    return here


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume"]], ids=" ".join)
@pytest.mark.parametrize("path", PATHS)
def test_training_leaves_what_is_there(path, flags, desk, tokens):
    before = snapshot(desk.parent)
    done = command("train.py", *TINY, "--steps", "1", "--data", tokens, "--out", path, *flags, cwd=desk)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert snapshot(desk.parent) == before


@pytest.mark.parametrize("flags", [[], ["--overwrite"]], ids=" ".join)
@pytest.mark.parametrize("path", PATHS)
def test_preparing_leaves_what_is_there(path, flags, desk, books):
    before = snapshot(desk.parent)
    done = command("data.py", books, "--vocab", "300", "--min-doc-tokens", "9", "--out", path, *flags, cwd=desk)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert snapshot(desk.parent) == before


def test_what_else_lies_in_a_run_stays_with_overwrite(desk, tokens):
    train = ["train.py", *TINY, "--steps", "1", "--data", tokens, "--out", "run"]
    assert command(*train, cwd=desk).returncode == 0
    (desk / "run" / "notes.txt").write_text("precious")
    assert command(*train, cwd=desk).returncode == 2
    assert command(*train, "--overwrite", "--seed", "5", cwd=desk).returncode == 0
    assert (desk / "run" / "notes.txt").read_text() == "precious"
    assert '"seed": 5' in (desk / "run" / "config.json").read_text()


def test_links_within_a_run_or_a_folder_of_tokens_are_replaced_and_what_they_name_stays(desk, books, tokens):
    train = ["train.py", *TINY, "--steps", "1", "--data", tokens, "--out", "run"]
    prepare = ["data.py", books, "--vocab", "300", "--min-doc-tokens", "9", "--out", "made"]
    for script, name in ((train, "run/tokenizer.tiktoken"), (prepare, "made/train.bin")):
        assert command(*script, cwd=desk).returncode == 0
        (desk / name).unlink()
        (desk / name).symlink_to(desk / "file")
        assert command(*script, "--overwrite", cwd=desk).returncode == 0
        assert (desk / "file").read_text() == "precious" and not (desk / name).is_symlink()


def test_an_empty_folder_and_a_link_to_one_take_a_run(desk, tokens):
    (desk / "empty").mkdir()
    (desk / "pointer").symlink_to("empty")
    done = command("train.py", *TINY, "--steps", "1", "--data", tokens, "--out", "pointer", cwd=desk)
    assert done.returncode == 0 and (desk / "empty" / "config.json").exists() and (desk / "pointer").is_symlink()


@pytest.mark.parametrize("error", [OSError(5, "an edit of yours"), RuntimeError("the memory of this edit")])
def test_a_bug_keeps_its_traceback(error, tokens, tmp_path, monkeypatch):
    def step(self, batch, step):
        raise error

    monkeypatch.setattr(backends.TorchBackend, "step", step)
    with pytest.raises(type(error)) as found:
        command("train.py", *TINY, "--data", tokens, "--out", "run", cwd=tmp_path)
    assert found.value is error


@pytest.mark.parametrize("error", [MemoryError("8 TiB"), torch.OutOfMemoryError("CUDA: 8 TiB"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate 8 TiB")])
def test_too_large_a_model_is_named_in_one_line(error, tokens, tmp_path, monkeypatch):
    def step(self, batch, step):
        raise error

    monkeypatch.setattr(backends.TorchBackend, "step", step)
    line = refused(command("train.py", *TINY, "--data", tokens, "--out", "run", cwd=tmp_path))
    assert "not enough memory: use smaller sizes" in line and "8 TiB" in line


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="it makes pipes and sockets by name")
@pytest.mark.parametrize("ending", [".json", ".html", *PICTURES])
def test_no_output_replaces_what_is_no_file(ending, tmp_path):
    """All of --json, --plot and --out of a file are read by new_file."""
    os.mkfifo(tmp_path / f"pipe{ending}")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / f"socket{ending}"))
    for name, target in (("device", "/dev/null"), ("link", f"pipe{ending}"), ("loop", f"loop{ending}")):
        (tmp_path / (name + ending)).symlink_to(target)
    for name in ("pipe", "socket", "device", "link", "loop"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a file"):
            new_file(ending)(str(tmp_path / (name + ending)))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it writes to a device that is always full")
def test_a_full_disk_is_named_in_one_line_where_it_is_that_of_the_output(workplace):
    with open("/dev/full", "w") as full, group([sys.executable, ROOT / "eval.py", "runs/expe"], workplace,
                                               stdout=full) as started:
        _, said = started.communicate(timeout=300)
    assert started.returncode == 2 and said == "eval.py: error: a file cannot be written: No space left on device\n"


def test_a_terminal_that_lacks_a_character_shows_another_one(workplace):
    done = process("generate.py", "runs/expe", "--prompt", "ж☃", "--tokens", "2", cwd=workplace,
                   PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert done.returncode == 0 and done.stdout.startswith("?") and not done.stderr, done.stderr


def test_a_system_without_a_closed_terminals_signal_trains(tokens, tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")
    done = command("train.py", *TINY, "--steps", "1", "--data", tokens, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
