"""A small corpus of real text, its tokens, and the commands of the project as a user runs them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402  (the project is a folder of scripts, not a package)

TINY = ["--preset", "mini", "--context", "16", "--batch-size", "4", "--vocab", "300"]


def command(script, *arguments, cwd, timeout=300, **environment):
    """Run `python SCRIPT ...` in a folder; returns the finished process, with its output as text."""
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        cwd=cwd,
        timeout=timeout,
        text=True,
        capture_output=True,
        env=os.environ | environment,
    )


def refused(process):
    """The one line that a refused command prints: nothing else on stderr, no traceback, exit status 2."""
    lines = process.stderr.strip().splitlines()
    assert process.returncode == 2, process.stderr
    assert len(lines) == 1 and ": error: " in lines[0], process.stderr
    return lines[0]


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """A folder of 80 texts: the beginnings of files of the standard library, as .txt."""
    folder = tmp_path_factory.mktemp("books") / "books"
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(p for p in library.glob("*.py") if p.stat().st_size > 6000)[:80]:
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokens(books, tmp_path_factory):
    """The books, prepared with a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("tokens") / "books-v300"
    data.prepare(str(books), folder, 300, min_doc_tokens=256)
    return folder


@pytest.fixture(scope="session")
def workplace(tokens, tmp_path_factory):
    """A folder with one tiny run of three encodings under runs/, made by train.py."""
    folder = tmp_path_factory.mktemp("workplace")
    for pe in ("expe", "learned", "rope"):
        done = command(
            "train.py", "--pe", pe, *TINY, "--steps", "8", "--data", tokens, "--out", f"runs/{pe}", cwd=folder
        )
        assert done.returncode == 0, done.stderr
    return folder
