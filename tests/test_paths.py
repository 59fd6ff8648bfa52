"""Hostile output paths: a folder or file that a script did not make is never deleted, moved or replaced."""

import os

import pytest
from conftest import TINY, command

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
