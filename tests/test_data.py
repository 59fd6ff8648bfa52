"""Every kind of source gives the same documents; splits, tokens and batches keep their promises."""

import argparse
import gzip
import itertools
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load
from conftest import ROOT, command, fallen_to, refused, split_of

import cli
import data
from config import InputError
from files import fingerprint, read_json, write_json

TEXTS = [f"{i}: " + "the quick brown fox\njumps over – the lazy dog, ünïcödé\n" * (i + 1) for i in range(12)]


def write_sources(folder):
    """The same texts as each kind of source that is not the hub."""
    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "files").mkdir()
    for i, text in enumerate(TEXTS):
        suffix = (".txt", ".md", ".py", ".rst", ".txt.gz", ".md.xz")[i % 6]
        opener = {"gz": gzip.open, "xz": lzma.open}.get(suffix.split(".")[-1], open)
        with opener(folder / "files" / f"{i:02}{suffix}", "wt", encoding="utf-8") as file:
            file.write(text)
    (folder / "files" / "picture.png").write_bytes(b"not text")
    (folder / "files" / ".hidden.txt").write_text("not read")
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    # The columns of FineWeb.
    table = pyarrow.table(
        {
            "text": TEXTS,
            "id": [f"<urn:uuid:{i}>" for i in range(12)],
            "dump": ["CC-MAIN-2024-10"] * 12,
            "url": ["example.org"] * 12,
            "date": ["2024-02-21T00:00:00Z"] * 12,
            "file_path": ["x.warc.gz"] * 12,
            "language": ["en"] * 12,
            "language_score": [0.9] * 12,
            "token_count": [len(text) // 4 for text in TEXTS],
        }
    )
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=5)
    return [folder / name for name in ("files", "a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d.parquet")]


def texts_of(source, **more):
    return [text for _, text in data.documents(str(source), **more)]


def test_every_kind_of_source_gives_the_same_texts(tmp_path):
    for source in write_sources(tmp_path):
        assert texts_of(source) == TEXTS, source


def test_documents_are_named_by_their_file_and_line_or_row_and_piece(tmp_path):
    folder, *rows = write_sources(tmp_path)
    (folder / "more").mkdir()
    shutil.copy(rows[0], folder / "more" / "a.jsonl")
    names = [name for name, _ in data.documents(str(folder))]
    assert names[:3] == ["00.txt", "01.md", "02.py"] and names[4:6] == ["04.txt.gz", "05.md.xz"]
    assert names[12:] == [f"more/a.jsonl:{i}" for i in range(1, 13)]
    for source in rows:
        assert [name for name, _ in data.documents(str(source))] == [f"{source.name}:{i}" for i in range(1, 13)]
    rows[0].write_text("\n" + rows[0].read_text(encoding="utf-8"), encoding="utf-8")  # lines are counted, not texts
    assert next(iter(data.documents(str(rows[0]))))[0] == "a.jsonl:2"
    pieces = [name for name, _ in data.documents(str(rows[0]), max_doc_chars=40)]
    assert pieces[:5] == ["a.jsonl:2", "a.jsonl:2#2", "a.jsonl:3", "a.jsonl:3#2", "a.jsonl:3#3"]


def test_stdlib_is_the_running_pythons_own_text():
    texts = dict(data.documents("stdlib"))
    with open(json.__file__, encoding="utf-8") as file:
        assert texts["json/__init__.py"] == file.read()
    assert len(texts) > 300 and sum(map(len, texts.values())) > 5_000_000


@pytest.mark.parametrize("limit", [1, 7, 100, 10**6])
def test_long_texts_are_cut_at_line_ends_and_lose_nothing(tmp_path, limit):
    (tmp_path / "a.txt").write_text("".join(TEXTS), encoding="utf-8")
    pieces = texts_of(tmp_path / "a.txt", max_doc_chars=limit)
    assert "".join(pieces) == "".join(TEXTS) and max(map(len, pieces)) <= limit
    if limit == 100:
        assert all(piece.endswith("\n") for piece in pieces)


def test_files_that_are_not_utf8_are_left_out_and_named(tmp_path):
    (tmp_path / "good.txt").write_text("good", encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    skipped = []
    assert list(data.documents(str(tmp_path), skipped=skipped)) == [("good.txt", "good")]
    assert skipped == [str(tmp_path / "latin1.txt")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 'a.jsonl line 2 is not a JSON object with a field "text"'),
        ("a.jsonl", b"[1, 2]\n", "a.jsonl line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl line 1 is not a JSON object"),
        ("a.txt.gz", b"plain text", "a.txt.gz cannot be unpacked"),
        ("a.txt.gz", gzip.compress(b"some text" * 1000, mtime=0)[:60], "a.txt.gz cannot be unpacked"),
        ("a.txt.xz", lzma.compress(b"some text" * 1000)[:60], "a.txt.xz cannot be unpacked"),
        ("a.parquet", b"PAR1 no parquet", "a.parquet cannot be read"),
        ("a.parquet.gz", b"", "a.parquet.gz is packed, and parquet is read from its end: unpack it first"),
        ("a.pdf", b"", "a.pdf must end in .txt .md .py .rst .jsonl .parquet"),
    ],
)
def test_unreadable_sources_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(data.documents(str(tmp_path / name)))
    with pytest.raises(InputError, match=message):  # also from within the tokenizer's training
        data.prepare(str(tmp_path / name), tmp_path / "out", 300)
    assert sorted(os.listdir(tmp_path)) == [name]


def test_a_parquet_without_rows_has_no_documents(tmp_path):
    """Its only group of none, too."""
    import pyarrow
    import pyarrow.parquet

    for name, texts in (("a", []), ("b", ["x", "y"])):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert list(data.documents(str(tmp_path))) == [("b.parquet:1", "x"), ("b.parquet:2", "y")]


def test_a_parquet_without_text_and_a_folder_without_files_are_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match='no column "text" that holds strings; it has body'):
        list(data.documents(str(tmp_path / "a.parquet")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no file that ends in"):
        list(data.documents(str(tmp_path / "empty")))


# ---- preparing -------------------------------------------------------------------------------------------------------


def decoded(folder, split):
    meta = data.read_meta(folder)
    encoding = data.load_tokenizer(folder / "tokenizer.tiktoken")
    documents = data.split_documents(data.open_split(folder, split), meta["eot"])
    assert all(document[0] == meta["eot"] for document in documents)
    return {encoding.decode(document[1:].tolist()) for document in documents}


def test_each_document_is_in_one_split_once_and_decodes_to_itself(books, tokens):
    texts = {path.read_text(encoding="utf-8") for path in books.iterdir()}
    found = [decoded(tokens, split) for split in data.SPLITS]
    assert set.union(*found) == texts and sum(map(len, found)) == len(texts)
    assert found[0] and found[1]
    meta = data.read_meta(tokens)
    assert sum(split["documents"] for split in meta["splits"].values()) == len(texts)


def test_split_tokenizer_and_tokens_do_not_depend_on_the_order(books, tokens, tmp_path):
    paths = sorted(books.iterdir())
    random.Random(1).shuffle(paths)
    (tmp_path / "books").mkdir()
    for i, path in enumerate(paths):
        shutil.copy(path, tmp_path / "books" / f"{i:02}.txt")
    other = data.prepare(str(tmp_path / "books"), tmp_path / "out", 300, min_doc_tokens=256)
    assert (other / "tokenizer.tiktoken").read_bytes() == (tokens / "tokenizer.tiktoken").read_bytes()
    for split in data.SPLITS:
        assert decoded(other, split) == decoded(tokens, split)


def test_short_documents_and_exact_duplicates_are_dropped(books, tokens, tmp_path):
    (tmp_path / "books").mkdir()
    for path in books.iterdir():
        shutil.copy(path, tmp_path / "books" / path.name)
        shutil.copy(path, tmp_path / "books" / f"copy-{path.name}")
        (tmp_path / "books" / f"short-{path.name}").write_text(f"{path.name} " * 5)
    meta = data.read_meta(data.prepare(str(tmp_path / "books"), tmp_path / "out", 300, min_doc_tokens=256))
    before = data.read_meta(tokens)
    assert meta["dropped"] == {"short": 80, "duplicate": 80, "not_utf8": 0}
    assert [meta["splits"][s]["tokens"] for s in data.SPLITS] == [before["splits"][s]["tokens"] for s in data.SPLITS]


def test_vocabulary_has_its_size_and_tiktokens_own_loader_reads_the_file(tokens):
    ours = data.load_tokenizer(tokens / "tokenizer.tiktoken")
    theirs = tiktoken.load.load_tiktoken_bpe(str(tokens / "tokenizer.tiktoken"))
    assert ours._mergeable_ranks == theirs and ours.n_vocab == 300 and ours.eot_token == 299
    assert sorted(theirs.values()) == list(range(299))
    ids = ours.encode_ordinary("a <|endoftext|> in a text is text\n")
    assert 299 not in ids and ours.decode(ids) == "a <|endoftext|> in a text is text\n"


def test_a_ready_tokenizer_is_used_as_it_is(books, tokens, tmp_path):
    folder = data.prepare(
        str(books), tmp_path / "out", tokenizer=str(tokens / "tokenizer.tiktoken"), min_doc_tokens=256
    )
    for name in ("train.bin", "val.bin", "test.bin", "tokenizer.tiktoken"):
        assert (folder / name).read_bytes() == (tokens / name).read_bytes()


def test_the_tokenizer_is_trained_on_a_bounded_part_and_nothing_is_lost(books, tokens, tmp_path, monkeypatch):
    seen, train = [], data.train_tokenizer
    monkeypatch.setattr(data, "TOKENIZER_CHARS", 100_000)
    monkeypatch.setattr(
        data, "train_tokenizer", lambda texts, vocab: train((seen.append(t) or t for t in texts), vocab)
    )
    folder = data.prepare(str(books), tmp_path / "out", 300, min_doc_tokens=256)
    assert 50_000 < sum(map(len, seen)) < 105_000
    for split in data.SPLITS:
        assert decoded(folder, split) == decoded(tokens, split)


def test_overwrite_replaces_a_folder_of_tokens_and_nothing_else(books, tmp_path):
    first = data.prepare(str(books), tmp_path / "out", 300)
    with pytest.raises(InputError, match="out exists: use it with --data"):
        data.prepare(str(books), tmp_path / "out", 290)
    data.prepare(str(books), tmp_path / "out", 290, overwrite=True)
    assert data.read_meta(first)["vocab"] == 290
    for folder in (books, tmp_path):
        before = sorted(os.listdir(folder))
        with pytest.raises(InputError, match="holds no meta.json, so it is not overwritten"):
            data.prepare(str(books), folder, 300, overwrite=True)
        assert sorted(os.listdir(folder)) == before


def test_max_tokens_ends_a_stream(books, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ENCODE_CHARS", 1000)
    folder = data.prepare(str(books), tmp_path / "out", 300, max_tokens=90_000)
    found = sum(split["tokens"] for split in data.read_meta(folder)["splits"].values())
    assert 90_000 <= found < 90_000 + 5_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of its memory from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    chosen = random.Random(0)
    words = ["".join(chosen.choices("etaoinshrdlu", k=1 + i % 9)) for i in range(4000)]
    with open(tmp_path / "big.txt", "w") as file:
        for _ in range(230):  # 26 MB, no piece like another
            file.write(" ".join(chosen.choices(words, k=20_000)) + "\n")
    program = (
        "import sys, data; data.TOKENIZER_CHARS = data.ENCODE_CHARS = data.HASHES = 2**20\n"
        "data.prepare(sys.argv[1], sys.argv[2], 300, max_doc_chars=2**17)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )

    def peak(size):
        with open(tmp_path / "part.txt", "w") as part, open(tmp_path / "big.txt") as big:
            part.write(big.read(size))
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "part.txt", tmp_path / f"out{size}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout.split()[-1]) / 1024

    small, large = peak(8_000_000), peak(24_000_000)  # MB at the peak
    assert large < small + 15, (small, large)


def launch(*arguments, cwd):
    """`python ...` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=cwd, env=environment, **output)


def launch_and_hold(*arguments, cwd):
    """The same, stopped at work on a folder in data/."""
    process, deadline = launch(*arguments, cwd=cwd), time.monotonic() + 60
    while not list(cwd.glob("data/.*.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    return process


def test_a_killed_run_leaves_no_folder_and_the_next_one_tidies_up(tmp_path):
    process = launch_and_hold(ROOT / "data.py", "stdlib", "--vocab", "2000", cwd=tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sorted(os.listdir(tmp_path / "data")) == [".stdlib-v2000.partial"]
    (tmp_path / "a.txt").write_text("too short")
    command("data.py", "a.txt", "--out", "data/stdlib-v2000", cwd=tmp_path)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_folder_made_after_a_killed_run_holds_nothing_of_it(books, tokens, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left.bin").write_bytes(b"half")
    folder = data.prepare(str(books), tmp_path / "out", 300, min_doc_tokens=256)
    assert os.listdir(tmp_path) == ["out"] and sorted(os.listdir(folder)) == sorted(os.listdir(tokens))


SMALL = (ROOT / "data.py", "stdlib", "--vocab", "300", "--max-tokens", "100_000")


def waiting(process):
    """What is said where another process has the folder. (Linux tells which.)"""
    who = rf"process {process.pid}" if sys.platform.startswith("linux") else "another process"
    return f"data/stdlib-v300 is in use by {who}: waiting for it\n"


def test_two_processes_that_prepare_one_folder_at_once_make_it_once(tmp_path):
    first = launch_and_hold(*SMALL, cwd=tmp_path)
    second = launch(*SMALL, cwd=tmp_path)
    third = launch("-c", "import data; data.ensure('stdlib', 300)", cwd=tmp_path)
    assert second.stdout.readline() == waiting(first)
    assert third.stdout.readline().startswith("preparing data/stdlib-v300 from stdlib")
    assert third.stdout.readline() == waiting(first)
    first.send_signal(signal.SIGCONT)
    assert "the first 200 tokens" in first.communicate()[0] and first.returncode == 0
    assert third.communicate()[0] == "" and third.returncode == 0
    assert second.communicate()[0].startswith("data.py: error: data/stdlib-v300 exists: use it with --data")
    assert os.listdir(tmp_path / "data") == ["stdlib-v300"]
    data.show(tmp_path / "data" / "stdlib-v300")  # its files are what meta.json says


def test_a_process_that_waited_for_one_that_failed_makes_the_folder_itself(tmp_path):
    first = launch_and_hold(*SMALL, cwd=tmp_path)
    second = launch(*SMALL, cwd=tmp_path)
    assert second.stdout.readline() == waiting(first)
    first.send_signal(signal.SIGKILL)                       # (a Ctrl-C within the tokenizer's training may be lost)
    first.communicate()
    assert "the first 200 tokens" in second.communicate()[0] and second.returncode == 0
    assert os.listdir(tmp_path / "data") == ["stdlib-v300"]


def test_show_prints_counts_quantiles_and_a_sample(tokens, tmp_path):
    shown = command("data.py", "--show", tokens, cwd=tmp_path)
    assert shown.returncode == 0 and "documents of 256 tokens or more" in shown.stdout
    for split in data.SPLITS:
        n = data.read_meta(tokens)["splits"][split]["tokens"]
        assert any(line.startswith(split) and f"{n:,}" in line for line in shown.stdout.splitlines())
    sample = shown.stdout.split("decoded:\n\n")[1]
    assert any(text.startswith(sample.rstrip("\n�")) for text in decoded(tokens, "val"))


# ---- near copies -----------------------------------------------------------------------------------------------------


def exact_shares(folder, names):
    """{name: share of its 24-grams that are in train} of held-out documents, by sets of tuples. names: {text: name}."""
    meta, encoding, found = data.read_meta(folder), data.load_tokenizer(folder / "tokenizer.tiktoken"), {}
    known = set()
    for split in data.SPLITS:
        for document in data.split_documents(data.open_split(folder, split), meta["eot"]):
            document = document.tolist()
            grams = [tuple(document[i : i + 24]) for i in range(len(document) - 23)]
            if split == "train":
                known.update(grams)
            else:
                found[names[encoding.decode(document[1:])]] = sum(gram in known for gram in grams) / len(grams)
    return found


@pytest.fixture(scope="module")
def mixed(books, tmp_path_factory):
    """(books, and held-out texts that begin as one in train, with more and more of it; all as tokens; exact shares)."""
    folder = tmp_path_factory.mktemp("mixed") / "books"
    shutil.copytree(books, folder)
    texts = [path.read_text(encoding="utf-8") for path in sorted(books.iterdir())]
    texts = [text for text in texts if split_of(text) == "train"]
    chosen = random.Random(0)
    for i in range(20):
        own = "".join(chosen.choices("etaoinshrdlu ,.\n", k=4000 - 200 * i))
        text = fallen_to(("val", "test")[i % 2], texts[i][: 200 * i] + own)
        (folder / f"mixed-{i:02}.txt").write_text(text, encoding="utf-8")
    names = {path.read_text(encoding="utf-8"): path.name for path in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "NEAR", 1)
        tokens = data.prepare(str(folder), folder.parent / "tokens", 300, min_doc_tokens=256)
    assert data.read_meta(tokens)["near"]["val"] == data.read_meta(tokens)["near"]["test"] == {}
    return folder, tokens, exact_shares(tokens, names)


@pytest.mark.parametrize("near, block", [*((near, 2**18) for near in (0, 0.1, 0.3, 0.5, 0.9)), (0.5, 97), (0.5, 1000)])
def test_held_out_documents_go_if_more_than_a_share_of_their_ngrams_is_in_train(
    mixed, tokens, tmp_path, monkeypatch, near, block
):
    folder, whole, shares = mixed
    monkeypatch.setattr(data, "NEAR", near)
    monkeypatch.setattr(data, "BLOCK", block)
    out = data.prepare(str(folder), tmp_path / "out", 300, min_doc_tokens=256)
    meta = data.read_meta(out)
    gone = {name for name, share in shares.items() if share > near}
    assert (meta["near"]["every"], meta["near"]["share"]) == (1, near)
    told = meta["near"]["val"] | meta["near"]["test"]
    assert told == {name: pytest.approx(shares[name], abs=1e-4) for name in gone} and 0 < len(gone) < len(shares)
    kept = max(share for name, share in shares.items() if name not in gone)
    assert max(meta["near"]["kept"].values()) == pytest.approx(kept, abs=1e-4)
    for split in ("val", "test"):
        texts = {(folder / name).read_text(encoding="utf-8") for name in meta["near"][split]}
        assert {split_of(text) for text in texts} <= {split}
        assert decoded(out, split) == decoded(whole, split) - texts
        assert meta["splits"][split]["documents"] == len(decoded(out, split))
        assert meta["splits"][split]["tokens"] == len(data.open_split(out, split))
    for name in ("train.bin", "tokenizer.tiktoken"):  # as of the books alone
        assert (out / name).read_bytes() == (tokens / name).read_bytes()


def test_a_sample_of_the_ngrams_decides_as_all_of_them(mixed, tmp_path, monkeypatch):
    folder, whole, shares = mixed
    monkeypatch.setattr(data, "HASHES", 2**14)
    near = data.read_meta(data.prepare(str(folder), tmp_path / "out", 300, min_doc_tokens=256))["near"]
    size = data.read_meta(whole)["splits"]["train"]["tokens"]
    assert near["every"] == -(-size // 2**14) > 5
    gone = {*near["val"], *near["test"]}
    clear = {name: share for name, share in shares.items() if abs(share - 0.5) > 0.1}
    assert {name for name, share in clear.items() if share > 0.5} == gone & clear.keys()
    assert len(gone & clear.keys()) >= 6 and len(clear) >= 15
    hashes = {every: [x for _, found in data._ngrams(whole / "train.bin", 299, every) for x in found.tolist()]
              for every in (1, near["every"])}  # fmt: skip
    assert hashes[near["every"]] == [x for x in hashes[1] if x % near["every"] == 0]
    assert len(hashes[near["every"]]) * near["every"] == pytest.approx(len(hashes[1]), rel=0.1)


def test_near_copies_are_named_by_meta_and_by_what_is_printed(copies, tokens, tmp_path):
    done = command("data.py", copies, "--vocab", "300", "--min-doc-tokens", "256", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    near = data.read_meta(tmp_path / "out")["near"]
    assert [*near["val"]] == [f"near-val-{i}.txt" for i in (0, 2, 3, 4)] and [*near["test"]] == ["near-test-1.txt"]
    said = "left out of {}, as nearly in train: {}; the others share 0.".format
    assert said("val", "4 (near-val-0.txt, near-val-2.txt, near-val-3.txt, ...)") in done.stdout
    assert said("test", "1 (near-test-1.txt)") in done.stdout
    for name in data.FILES[1:]:
        assert (tmp_path / "out" / name).read_bytes() == (tokens / name).read_bytes()
    assert said("val", "0") in command("data.py", "--show", tokens, cwd=tmp_path).stdout


def test_a_folder_of_an_earlier_version_says_nothing_of_near_copies_and_is_read(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "t")
    meta = json.loads((tokens / "meta.json").read_text())
    del meta["near"]
    (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
    shown = command("data.py", "--show", "t", cwd=tmp_path)
    assert shown.returncode == 0 and "nearly" not in shown.stdout and "the first 200 tokens" in shown.stdout


def test_a_val_of_near_copies_alone_is_refused_and_a_test_of_them_is_empty(copies, books, tmp_path):
    for path in [*copies.iterdir()]:
        if path.name.startswith("near-test") or split_of(path.read_text(encoding="utf-8")) != "test":
            (tmp_path / "books").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "books")
    folder = data.prepare(str(tmp_path / "books"), tmp_path / "out", 300, min_doc_tokens=256)
    assert data.read_meta(folder)["splits"]["test"].items() >= {"documents": 0, "tokens": 0, "bytes": 0}.items()
    assert command("data.py", "--show", "out", cwd=tmp_path).returncode == 0
    for path in [*(tmp_path / "books").iterdir()]:
        if not path.name.startswith("near") and split_of(path.read_text(encoding="utf-8")) == "val":
            path.unlink()
    line = refused(command("data.py", "books", "--vocab", "300", "--out", "none", cwd=tmp_path))
    assert "none fell to val" in line and "0 not UTF-8, 5 held out that are nearly in train)" in line
    assert sorted(os.listdir(tmp_path)) == ["books", "out"]


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_an_epoch_shows_every_token_once_as_a_target_and_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1, 1 + 16 * 37 + 5, dtype=np.uint16)
    B, T = 4, 16
    count = data.windows(tokens, T)
    assert count == 37
    steps = [data.batch(tokens, T, B, 3, step) for step in range(37)]  # four epochs: 37 * 4 windows
    assert all(b.shape == (B, T + 1) and b.dtype == np.int64 for b in steps)
    rows = np.concatenate(steps)
    orders = []
    for epoch in range(4):
        part = rows[epoch * 37 : (epoch + 1) * 37]
        assert len(set(part[:, 1:].ravel().tolist())) == 37 * T  # no target comes twice
        assert np.array_equal(part[:, 1:], part[:, :-1] % len(tokens) + 1)  # targets are the next tokens
        orders.append(tuple(part[:, 0]))
    assert len(set(orders)) == 4
    assert sorted(rows[:37, 1:].ravel().tolist()) == tokens[1 : 37 * T + 1].tolist()
    offsets = [{(first - 1) % T for first in order} for order in orders]  # two, where a window goes round the end
    assert offsets[0] == {0} and len(set(map(frozenset, offsets))) == 4
    assert np.array_equal(data.batch(tokens, T, B, 3, 20), steps[20])
    assert not np.array_equal(data.batch(tokens, T, B, 4, 20), steps[20])


@pytest.mark.parametrize("size, context, batch_size", [(200, 7, 5), (113, 16, 3), (17, 16, 4), (65, 16, 9)])
def test_batches_are_those_of_a_loop(size, context, batch_size):
    tokens = np.random.default_rng(0).integers(0, 300, size).astype(np.uint16)
    ring, rows = tokens.tolist() * 3, []
    for epoch in range(5):
        rng = np.random.default_rng([9, epoch])
        order = rng.permutation((size - 1) // context).tolist()
        shift = int(rng.integers(size)) if epoch else 0
        for window in order:
            rows.append([ring[window * context + shift + i] for i in range(context + 1)])
    for step in range(len(rows) // batch_size):
        expected = rows[step * batch_size : (step + 1) * batch_size]
        assert data.batch(tokens, context, batch_size, 9, step).tolist() == expected


def test_too_few_tokens_for_a_window_are_named():
    with pytest.raises(InputError, match="the data has 16 tokens, and one window needs 17"):
        data.batch(np.zeros(16, np.uint16), 16, 1, 0, 0)


def test_damaged_token_files_are_named(tokens, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(tokens, folder)
    whole = (folder / "val.bin").read_bytes()
    for damaged in (whole[:-2], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        (folder / "val.bin").write_bytes(damaged)
        with pytest.raises(InputError, match="val.bin has not the size and hash that meta.json says: prepare the"):
            data.open_split(folder, "val")
    (folder / "val.bin").unlink()
    with pytest.raises(InputError, match="val.bin is missing"):
        data.open_split(folder, "val")
    (folder / "meta.json").write_text('{"source": "x"')
    with pytest.raises(InputError, match="meta.json is not valid JSON"):
        data.read_meta(folder)


def test_text_is_named_from_here_and_a_folder_that_has_its_whole_path_is_still_its_own(tmp_path, books, monkeypatch):
    (tmp_path / "text").symlink_to(books)
    shutil.copytree(books, tmp_path / "mine")
    done = command("data.py", "mine", "--vocab", "300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "data/mine-v300/meta.json"
    meta = json.loads(path.read_text())
    assert meta["source"] == "./mine"
    path.write_text(json.dumps(meta | {"source": str(tmp_path / "mine")}))
    monkeypatch.chdir(tmp_path)
    assert data.ensure(str(tmp_path / "mine"), 300) == data.ensure("mine", 300) == path.parent.relative_to(tmp_path)
    assert data.full_name("text") == str(books.resolve())


def test_a_folder_is_shown_in_little_memory_whatever_its_size(tokens, tmp_path, monkeypatch, capsys):
    """16M tokens in train, an array of which, or a byte for each, would be seen; documents go over the blocks' ends."""
    folder = shutil.copytree(tokens, tmp_path / "t")
    data.show(folder)
    before = capsys.readouterr().out
    monkeypatch.setattr(data, "BLOCK", 1000)
    data.show(folder)
    assert capsys.readouterr().out == before
    monkeypatch.undo()
    long = np.zeros(2**24, np.uint16)
    long[::2048] = 299
    long.tofile(folder / "train.bin")
    meta = read_json(folder / "meta.json")
    meta["splits"]["train"] = {"documents": 2**13, "tokens": 2**24, **fingerprint(folder / "train.bin")}
    write_json(folder / "meta.json", meta)
    tracemalloc.start()
    data.show(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    assert re.search(r"train +8,192 +16,777,216 +2,047\n", capsys.readouterr().out)


# ---- a corpus of many files, stopped and gone on with ----------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The standard library in six parquet files of FineWeb's columns, and a README as a data set's on the hub."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("corpus")
    texts = [text for _, text in itertools.islice(data.documents("stdlib", max_doc_chars=3000), 360)]
    for i in range(6):
        some = texts[60 * i : 60 * (i + 1)]
        columns = {"text": some, "id": [f"<urn:uuid:{i}>"] * 60, "url": ["example.org"] * 60, "token_count": [1] * 60}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{i:03}_00000.parquet", row_group_size=16)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: '*.parquet'\n---\n")
    return folder, texts


@pytest.fixture
def small(monkeypatch):
    for name, size in {"SAVE_CHARS": 60_000, "ENCODE_CHARS": 20_000, "TOKENIZER_CHARS": 90_000}.items():
        monkeypatch.setattr(data, name, size)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(monkeypatch, batch):
    """End the preparation where a batch is taken to be encoded, as a Ctrl-C does."""
    take, count = data.take, itertools.count()  # the first is taken for the tokenizer

    def take_or_stop(*arguments):
        if next(count) == batch:
            raise KeyboardInterrupt
        return take(*arguments)

    monkeypatch.setattr(data, "take", take_or_stop)


@pytest.mark.parametrize("batch", [5, 14, 29, 40])
def test_one_that_was_stopped_goes_on_without_finished_files(corpus, small, tmp_path, monkeypatch, batch):
    folder, _ = corpus
    (tmp_path / "text").mkdir()
    for path in folder.glob("*.parquet"):
        shutil.copy(path, tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    expected = contents(data.prepare("text", "whole", 300, min_doc_tokens=64))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, batch)
        data.prepare("text", "tokens", 300, min_doc_tokens=64)
    assert not (tmp_path / "tokens").exists()
    left, read, streamed = tmp_path / ".tokens.partial" / "state.json", [], data._streamed
    first = json.loads(left.read_text())["at"][0] if left.exists() else 0
    assert (first > 0) == left.exists() == left.parent.exists() == (batch > 5)
    monkeypatch.setattr(data, "_streamed", lambda what, **where: read.append(what.name) or streamed(what, **where))
    assert contents(data.prepare("text", "tokens", 300, min_doc_tokens=64)) == expected
    assert read == [f"{i:03}_00000.parquet" for i in range(first, 6)]


def test_what_another_preparation_left_is_of_no_use(corpus, small, tmp_path, monkeypatch):
    folder, _ = corpus
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 29)
        data.prepare(str(folder), tmp_path / "tokens", 300, min_doc_tokens=64)
    assert (tmp_path / ".tokens.partial" / "state.json").exists()
    expected = contents(data.prepare(str(folder), tmp_path / "whole", 300, min_doc_tokens=100))
    assert contents(data.prepare(str(folder), tmp_path / "tokens", 300, min_doc_tokens=100)) == expected


def test_files_that_have_changed_meanwhile_are_read_from_the_first(corpus, small, tmp_path, monkeypatch):
    folder, _ = corpus
    text = tmp_path / "text"
    text.mkdir()
    for path in folder.glob("*.parquet"):
        shutil.copy(path, text)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 29)
        data.prepare(str(text), tmp_path / "tokens", 300, min_doc_tokens=64)
    assert (tmp_path / ".tokens.partial" / "state.json").exists()
    (text / "000_0.txt").write_text("one more, which comes before all others. " * 40)
    expected = contents(data.prepare(str(text), tmp_path / "whole", 300, min_doc_tokens=64))
    assert contents(data.prepare(str(text), tmp_path / "tokens", 300, min_doc_tokens=64)) == expected


def test_a_data_set_of_the_hub_is_read_shard_by_shard(corpus, monkeypatch):
    folder, texts = corpus
    monkeypatch.setitem(data.HUB, "fineweb", str(folder))
    found = list(data.documents("fineweb"))
    assert [text for _, text in found] == texts
    named = [found[i][0].removeprefix(f"{folder}/") for i in (0, 59, 60, 359)]
    assert named == ["0:1", "0:60", "1:1", "5:60"]
    at = [4, 58]
    assert list(data.documents("fineweb", at=at)) == found[298:] and at == [6, 0]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 24])
def test_hashes_of_ngrams_are_the_polynomial_that_they_are_said_to_be(n):
    for size in (0, 1, n - 1, n, n + 1, 100):
        x = np.random.default_rng(size).integers(2**16, size=size).astype(np.uint16)
        wanted = [sum(int(x[i + j]) * data.BASE ** (n - 1 - j) for j in range(n)) % 2**64 for i in range(size - n + 1)]
        assert data._polynomial(x, n).tolist() == wanted


def test_what_was_seen_is_eight_bytes_each(tmp_path):
    rng, seen, known = random.Random(0), data._Seen(), set()
    for _ in range(5):
        for key in [rng.randrange(2**64) for _ in range(200)] + [0, 2**64 - 1]:
            assert (key in seen) == (key in known)
            if key not in seen:
                seen.fresh[key] = None
            known.add(key)
        seen.save(tmp_path / "seen.bin")
        assert not seen.fresh and seen.old.nbytes == 8 * len(known)
    assert all(key in seen for key in known) and not any(key - 1 in seen for key in known - {0} if key - 1 not in known)
    again = data._Seen(np.fromfile(tmp_path / "seen.bin", np.uint64))
    assert again.old.tolist() == sorted(known)


def test_packages_are_the_python_of_the_requirements():
    names = [name for name, _ in data._files("packages")]
    pinned = [line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert names == sorted(names, key=Path) and all(name.endswith(".py") for name in names)
    assert {"torch", "numpy", "tqdm", "tiktoken"} <= set(pinned) & {Path(name).parts[0] for name in names}
    site, name = Path(np.__file__).parents[1], "numpy/linalg/__init__.py"
    assert dict(itertools.islice(data.documents("packages"), 3000))[name] == (site / name).read_text()


@pytest.mark.parametrize("text, value", [("700M", 7e8), ("10B", 1e10), ("1.5k", 1500), ("0.7B", 7e8), ("6e8", 6e8)])
def test_tokens_may_be_counted_in_millions(text, value):
    assert cli.whole(text) == value and isinstance(cli.whole(text), int)
    for wrong in ("1.5", "M", "", "1.0001k", "1T"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.whole(wrong)
