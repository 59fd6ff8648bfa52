"""engine/corpora.py: the tokens of a loop over the documents, whatever the number of workers, and after any kill."""

import collections
import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, command, need, process, refused, slow, split_of, wait_for

import data
from texts import COPIES, EMPTY, NEAR, NO_TEXT, NOT_JSON, NOT_UTF8, SHORT
from tokenizer import read_tokenizer

need("datatrove")
parquet = need("pyarrow.parquet")
import pyarrow  # noqa: E402
from datatrove.executor import LocalPipelineExecutor  # noqa: E402

from engine import corpora  # noqa: E402

FILES = 5
TASKS = ["--tasks", "3", "--vocab", "300", "--min-doc-tokens", "256"]


@pytest.fixture(scope="module")
def texts(books):
    """The books in five files, some twice, in one file or in two, and short ones."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(books.iterdir())]
    texts += texts[:20] + ["short"] * 7
    random.Random(0).shuffle(texts)
    return texts


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "rows"
    folder.mkdir()
    for i in range(FILES):
        parquet.write_table(pyarrow.table({"text": texts[i::FILES], "id": [0] * len(texts[i::FILES])}),
                            folder / f"{i}.parquet")
    return folder


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    done = process("engine.corpora", source, "--out", out, "--workers", 1, *TASKS, cwd=out.parent)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return out


def contents(folder):
    return {name: (folder / name).read_bytes() for name in ("train.bin", "val.bin", "test.bin", "tokenizer.tiktoken")}


def test_tokens_are_those_of_a_loop_over_the_documents(texts, prepared):
    """Of copies one is kept; which one is not said, so documents are compared as a multiset."""
    meta = data.read_meta(prepared)
    encoding = read_tokenizer(prepared, meta)
    expected = {split: collections.Counter() for split in data.SPLITS}
    for text in set(texts) - {"short"}:
        expected[split_of(text)][(meta["eot"], *encoding.encode_ordinary(text))] += 1
    for split in data.SPLITS:
        documents = data.split_documents(np.array(data.open_split(prepared, split)), meta["eot"])
        assert collections.Counter(tuple(document.tolist()) for document in documents) == expected[split]
        assert meta["splits"][split]["documents"] == len(documents)
    assert {reason: count for reason, (count, _) in meta["dropped"].items()} == {SHORT: 7, COPIES: 20}


@pytest.mark.slow
@pytest.mark.parametrize("victim, sent", [("worker", "SIGKILL"), ("parent", "SIGKILL"), ("parent", "SIGTERM"),
                                          ("all", "SIGINT")])
def test_killed_work_continues_to_the_same_bytes_with_two_workers(victim, sent, source, prepared, tmp_path, start):
    """The kill comes once the first task has begun. It ends all processes: while one lives, stderr stays open."""
    words = [sys.executable, "-m", "engine.corpora", str(source), "--out", "out", "--workers", "2", *TASKS]
    started = start(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    tokens = tmp_path / "out" / "tasks" / "tokens"
    wait_for(lambda: list(tokens.glob("*")), started)
    ids = subprocess.run(["pgrep", "-f", "-P", str(started.pid), "spawn_main"], capture_output=True, text=True)
    pid = {"worker": int(ids.stdout.split()[0]), "parent": started.pid, "all": -started.pid}[victim]
    os.kill(pid, getattr(signal, sent))
    _, said = started.communicate(timeout=60)
    assert started.returncode and said.splitlines()[1:] == []
    assert (victim == "worker") == ("a worker was killed: start the same command again" in said)
    assert not data.is_whole(tmp_path / "out")
    done_before = {path: path.stat().st_mtime_ns for path in tokens.parent.glob("*/completions/*")}
    done = process("engine.corpora", source, "--out", "out", "--workers", 2, *TASKS, cwd=tmp_path)
    assert done.returncode == 0 and contents(tmp_path / "out") == contents(prepared), done.stderr
    assert all(path.stat().st_mtime_ns == changed for path, changed in done_before.items())     # not done again
    assert not list((tmp_path / "out").rglob(".unfinished-*"))


def test_a_file_of_lines_is_taken_by_its_name(texts, tmp_path, monkeypatch):
    path = tmp_path / "all [1].jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text}) for text in texts))
    flags = [path.name, "--vocab", 300, "--max-tokens", 20_000, "--out", "few"]
    with monkeypatch.context() as patch:
        patch.setattr("texts.ROWS_IN_MEMORY", path.stat().st_size - 1)
        assert "python -m engine.corpora takes the same flags" in refused(command("data.py", *flags, cwd=tmp_path))
    path.write_text('{"text": "cut\n{"text": null}\n' + path.read_text())
    done = command("engine.corpora", *flags, cwd=tmp_path)
    assert f"{NOT_JSON}: 1 (all [1].jsonl:1)" in done.stdout, done.stderr
    assert f"{NO_TEXT}: 1 (all [1].jsonl:2)" in done.stdout and corpora.REST in done.stdout
    assert done.returncode == 0, done.stderr
    few = sum(split["tokens"] for split in data.read_meta(tmp_path / "few")["splits"].values())
    assert 20_000 <= few < 20_000 + 4_000


@pytest.mark.parametrize("words, message", [
    ("books --out out", "has no .parquet or .jsonl file: python data.py books"),
    ("rows --out whole", "whole exists: use it with --data"),
    ("rows --out begun --tasks 2", "begun was begun with another value of tasks"),
    *slow(("numbers --out out", "numbers: no document is left for train or for val"),
          ("damaged --out out", "the source cannot be read (Arrow")),
    ("rows --out out --workers 0", "--workers: must be at least 1")])
def test_errors_name_what_is_wrong(words, message, source, books, prepared, tmp_path):
    for name, target in {"rows": source, "books": books, "whole": prepared}.items():
        os.symlink(target, tmp_path / name)
    for name in ("begun", "damaged", "numbers"):
        (tmp_path / name).mkdir()
    parquet.write_table(pyarrow.table({"text": [b"bytes", b"more"]}), tmp_path / "numbers" / "a.parquet")
    (tmp_path / "damaged" / "a.parquet").write_bytes((source / "0.parquet").read_bytes()[:500])
    settings = json.loads((prepared / "meta.json").read_text())
    del settings["splits"]
    (tmp_path / "begun" / "meta.json").write_text(json.dumps(settings | {"source": str(source)}))
    words = [*words.split(), "--tokenizer", prepared / "tokenizer.tiktoken"]
    assert message in refused(command("engine.corpora", *words, cwd=tmp_path))


ROWS = {"null": '{"text": null}', "number": '{"text": 5}', "list": '{"text": ["a"]}', "row": "[1]", "word": "x",
        "latin": b'{"text": "\xe9"}', "empty": '{"text": " "}', "other": '{"texts": "a"}', "deep": "[" * 100_000}
REASONS = {"word": NOT_JSON, "deep": NOT_JSON, "latin": NOT_UTF8, "empty": EMPTY}


@pytest.mark.parametrize("flags", [["data.py"], ["engine.corpora", "--workers", 1]], ids=lambda flags: flags[0])
def test_a_row_that_is_no_text_is_counted_and_named_and_the_others_are_kept(flags, texts, tmp_path):
    """The first line has a byte-order mark, and an ending may have any case."""
    lines = [json.dumps({"text": text}).encode() for text in sorted(set(texts) - {"short"})]
    rows = [row if isinstance(row, bytes) else row.encode() for row in ROWS.values()]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.JSONL").write_bytes(b"\xef\xbb\xbf" + b"\n".join([lines[0], *rows, b"", *lines[1:]]))
    done = command(*flags, "rows", "--vocab", 300, "--out", "out", cwd=tmp_path)
    meta = data.read_meta(tmp_path / "out")
    found = {}
    for line, bad in enumerate(ROWS, 2):
        found.setdefault(REASONS.get(bad, NO_TEXT), []).append(f"a.JSONL:{line}")
    assert meta["dropped"] == {reason: [len(names), names[:3]] for reason, names in found.items()}, done.stderr
    assert sum(split["documents"] for split in meta["splits"].values()) == len(lines)


@pytest.mark.slow
def test_held_out_near_copies_of_training_documents_are_left_out(books, tmp_path):
    """Of each text of train there is a copy with other blanks and one in capitals; some fall to val and to test."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(books.iterdir())]
    made = [change for text in texts if split_of(text) == "train"
            for change in (text.replace("\n", "\n\t"), text.upper())]
    (tmp_path / "rows").mkdir()
    for i in range(FILES):
        rows = [json.dumps({"text": text}) for text in [*texts, *made][i::FILES]]
        (tmp_path / f"rows/{i}.jsonl").write_text("\n".join(rows))
    done = command("engine.corpora", "rows", "--out", "out", "--vocab", 300, "--tasks", 3, "--workers", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    meta = data.read_meta(tmp_path / "out")
    held_out = [text for text in made if split_of(text) != "train"]
    assert held_out and {reason: count for reason, (count, _) in meta["dropped"].items()} == {NEAR: len(held_out)}
    for split in data.SPLITS:                                           # none of train, and no other one
        kept = sum(split_of(text) == split for text in (texts if split != "train" else [*texts, *made]))
        assert meta["splits"][split]["documents"] == kept


@pytest.mark.slow
def test_begun_work_is_begun_anew_with_overwrite(source, prepared, tmp_path):
    words = ["engine.corpora", source, "--out", "out", "--workers", 1, *TASKS]
    (tmp_path / "out").mkdir()
    begun = json.loads((prepared / "meta.json").read_text()) | {"min_doc_tokens": 5}
    (tmp_path / "out/meta.json").write_text(json.dumps({key: begun[key] for key in begun if key != "splits"}))
    (tmp_path / "out/tokenizer.tiktoken").write_text("another")
    assert "--overwrite" in refused(command(*words, cwd=tmp_path))
    assert command(*words, "--overwrite", cwd=tmp_path).returncode == 0
    assert contents(tmp_path / "out") == contents(prepared)
    assert "exists" in refused(command(*words, cwd=tmp_path))
    assert command(*words, "--overwrite", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_missing_datatrove_is_named(source, tmp_path):
    (tmp_path / "datatrove.py").write_text("raise ModuleNotFoundError('No module named datatrove', name='datatrove')")
    for line in ("engine.corpora {} --out out", "train.py --preset mini --data {} --out run"):
        done = process(*line.format(source).split(), cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert "datatrove is missing: make setup-all installs it" in refused(done)


def test_another_executor_of_datatrove_can_run_the_tasks(source, prepared, tmp_path):
    """As docs/bigger.md says for Slurm and Ray."""
    (tmp_path / "tokenizer.tiktoken").write_bytes((prepared / "tokenizer.tiktoken").read_bytes())
    steps = corpora.make_pipelines(str(source), tmp_path, tasks=3, min_doc_tokens=256)["encode"]
    LocalPipelineExecutor(steps, tasks=3, workers=1, logging_dir=str(tmp_path / "tasks/encode")).run()
    for path in (prepared / "tasks/tokens").glob("*.bin"):
        assert (tmp_path / "tasks/tokens" / path.name).read_bytes() == path.read_bytes()
    assert len([*(tmp_path / "tasks/encode/completions").iterdir()]) == 3
