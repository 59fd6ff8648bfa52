"""Text to tokens and batches: what goes where, what is left out, and that batches are a function of seed and step."""

import functools
import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import TINY, command, refused, split_of

import data
import model_numpy
from config import ModelConfig, make_encoding


def read(folder, split):
    meta = data.read_meta(folder)
    encoding = data.run_tokenizer(folder, meta)
    return [encoding.decode(document[1:].tolist())
            for document in data.split_documents(data.open_split(folder, split), meta["eot"])]


def test_each_document_is_in_one_split_once_and_decodes_to_itself(books, tokens):
    texts = {split: sorted(read(tokens, split)) for split in data.SPLITS}
    sources = sorted(path.read_text(encoding="utf-8") for path in books.iterdir())
    assert {split: len(found) for split, found in texts.items()} == {
        split: sum(split_of(text) == split for text in sources) for split in data.SPLITS}
    assert sorted(sum(texts.values(), [])) == sources
    assert all(split_of(text) == split for split, found in texts.items() for text in found)


def test_short_duplicate_and_not_utf8_texts_are_left_out_and_counted(books, tmp_path, capsys):
    folder = tmp_path / "books"
    shutil.copytree(books, folder)
    (folder / "again.txt").write_bytes(next(books.iterdir()).read_bytes())
    (folder / "short.txt").write_text("short")
    (folder / "latin.txt").write_bytes(b"\xe9" * 3000)
    (folder / ".hidden.txt").write_text("hidden " * 900)
    meta = data.read_meta(data.prepare(str(folder), tmp_path / "out", 300, min_doc_tokens=256))
    assert meta["dropped"] == {"short": 1, "duplicate": 1}
    assert "not UTF-8: 1 files, such as latin.txt" in capsys.readouterr().out
    assert sum(split["documents"] for split in meta["splits"].values()) == len(list(books.iterdir()))


@pytest.mark.parametrize("limit", [7, 10**6])
def test_long_texts_are_cut_at_line_ends_lose_nothing_and_stay_in_one_split(limit):
    text = "\n".join("x" * (i % 30) for i in range(200)) + "y" * 300
    texts = [("a", f"text {i}\n{text}\n") for i in range(40)]
    made = [*data.split_texts([("one", text)], limit, 1, {"short": 0, "duplicate": 0})]
    assert "".join(piece for _, _, piece in made) == text or limit == 7            # where pieces repeat
    assert max(len(piece) for _, _, piece in made) <= limit
    assert limit == 10**6 or any(piece.endswith("\n") for _, _, piece in made)
    for name, whole in texts:
        splits = {split for split, _, _ in data.split_texts([(name, whole)], limit, 1, {"short": 0, "duplicate": 0})}
        assert splits == {split_of(whole)}


def test_marked_ends_divide_a_file_and_a_byte_order_mark_is_no_text(tmp_path):
    stories = [f"Once upon a time {i}.\n" for i in range(60)]
    (tmp_path / "stories.txt").write_text("<|endoftext|>\n".join(stories), encoding="utf-8-sig")
    assert [text for _, text in data.documents(tmp_path / "stories.txt")] == stories
    folder = data.prepare(str(tmp_path / "stories.txt"), tmp_path / "out", 300)
    texts = {split: read(folder, split) for split in data.SPLITS}
    assert sorted(sum(texts.values(), [])) == sorted(stories)
    assert all(split_of(text) == split for split, found in texts.items() for text in found)
    (tmp_path / "code.py").write_text('END = "<|endoftext|>"\n')                # no line of its own
    assert len([*data.documents(tmp_path / "code.py")]) == 1


@pytest.mark.parametrize("name", ["one.txt", "long_line.txt"])
def test_one_file_is_cut_into_the_three_splits(name, books, tmp_path):
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(books.iterdir()))
    text = text.replace("\n", " ") if name == "long_line.txt" else text
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = command("train.py", *TINY, "--steps", "1", "--data", name, cwd=tmp_path)
    assert done.returncode == 0 and "last tenth of the text becomes val" in done.stdout, done.stderr
    train, test, val = (read(tmp_path / "data" / f"{name[:-4]}-v300", split) for split in ("train", "test", "val"))
    assert [len(documents) for documents in (train, test, val)] == [1, 1, 1] and train[0] + test[0] + val[0] == text
    assert all(abs(len(part) / len(text) - 0.1) < 0.01 for part in (*test, *val))
    assert name == "long_line.txt" or train[0][-1] == test[0][-1] == "\n"


def test_files_that_changed_since_they_were_prepared_are_noticed(books, tmp_path):
    shutil.copytree(books, tmp_path / "books")
    train = ["train.py", *TINY, "--steps", "1", "--data", "books", "--overwrite"]
    for changed in (False, False, True):
        if changed:
            (tmp_path / "books" / "more.txt").write_text("more")
        done = command(*train, cwd=tmp_path)
        assert done.returncode == 2 * changed and ("has changed since" in done.stderr) == changed
    command("data.py", "books", "--vocab", "300", "--overwrite", cwd=tmp_path)
    assert command(*train, cwd=tmp_path).returncode == 0


def test_a_ready_tokenizer_is_used_as_it_is(books, tokens, tmp_path):
    out = data.prepare(str(books), tmp_path / "again", tokenizer=tokens / "tokenizer.tiktoken", min_doc_tokens=256)
    for name in ("train.bin", "val.bin", "test.bin", "tokenizer.tiktoken"):
        assert (out / name).read_bytes() == (tokens / name).read_bytes()


def test_near_copies_are_left_out_as_by_counting_sets(books, tmp_path):
    """Of 20 texts in train two copies each, below another first line: some fall to val and to test."""
    copies = shutil.copytree(books, tmp_path / "books")
    texts = [text for path in sorted(books.iterdir()) if split_of(text := path.read_text(encoding="utf-8")) == "train"]
    made = {f"near-{i}-{n}.txt": f"copy {n}\n{text}" for i, text in enumerate(texts[:20]) for n in range(2)}
    for name, text in made.items():
        (copies / name).write_text(text, encoding="utf-8")
    meta = data.read_meta(data.prepare(str(copies), tmp_path / "out", 300, min_doc_tokens=256))
    near = meta["near"]
    for split in ("val", "test"):
        assert set(near[split]) == {name for name, text in made.items() if split_of(text) == split} != set()
    encoding = data.make_tokenizer(data.read_ranks(tmp_path / "out" / "tokenizer.tiktoken"))

    def ngrams(text):
        found = [meta["eot"], *encoding.encode_ordinary(text)]
        return [tuple(found[i : i + near["ngram"]]) for i in range(len(found) - near["ngram"] + 1)]

    known = {gram for text in read(tmp_path / "out", "train") for gram in ngrams(text)}
    for split in ("val", "test"):
        for name, share in near[split].items():
            grams = ngrams((copies / name).read_text(encoding="utf-8"))
            assert share == round(sum(gram in known for gram in grams) / len(grams), 4) > near["share"]
        for grams in map(ngrams, read(tmp_path / "out", split)):
            assert sum(gram in known for gram in grams) <= near["share"] * len(grams)


def test_an_unfinished_folder_is_prepared_again_and_a_finished_one_is_kept(books, tokens, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def fail(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "hash_file", fail)                          # a kill, once the tokens are written
        with pytest.raises(KeyboardInterrupt):
            data.prepare(str(books), out, 300, min_doc_tokens=256)
    assert not data.is_whole(out)
    data.prepare(str(books), out, 300, min_doc_tokens=256)
    assert (out / "train.bin").read_bytes() == (tokens / "train.bin").read_bytes()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(data.InputError, match="exists: use it with --data"):
        data.prepare(str(books), out, 300)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    data.prepare(str(books), out, 400, overwrite=True)
    assert data.read_meta(out)["vocab"] == 400


def test_what_cannot_be_prepared_leaves_the_old_folder(books, tokens, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(tokens, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for flags in (["--vocab", "60000"], ["--min-doc-tokens", "1e6"], ["--vocab", "20"], ["--tokenizer", books]):
        refused(command("data.py", books, "--out", out, "--overwrite", *flags, cwd=tmp_path))
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_script_prepares_and_shows(books, tmp_path):
    done = command("data.py", books, "--vocab", "300", "--min-doc-tokens", "256", cwd=tmp_path)
    again = command("data.py", "data/books-v300", cwd=tmp_path)
    assert done.returncode == again.returncode == 0
    assert done.stdout.endswith(again.stdout) and "80 documents" not in again.stdout
    counts = {line.split()[0]: int(line.split()[1]) for line in again.stdout.splitlines()[1:]}
    assert sum(counts.values()) == len(list(books.iterdir()))
    assert "leave the flags out" in refused(command("data.py", "data/books-v300", "--vocab", "400", cwd=tmp_path))


@pytest.mark.parametrize("name", ["train.bin", "meta.json"])
def test_damaged_tokens_are_named(name, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    (tmp_path / "tokens" / name).write_bytes((tokens / name).read_bytes()[:-7])
    assert name in refused(command("train.py", *TINY, "--data", "tokens", "--steps", "1", cwd=tmp_path))


@pytest.mark.parametrize("field, value", [("vocab", None), ("splits", {}), ("splits.val.documents", "x"),
                                          ("near.val", 1), ("dropped", []), ("tokenizer.sha256", 5)])
def test_a_field_that_was_edited_is_named(field, value, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    *outer, name = field.split(".")
    functools.reduce(dict.get, outer, meta)[name] = value
    (tmp_path / "tokens/meta.json").write_text(json.dumps(meta))
    assert f"meta.json was edited: {field}" in refused(command("data.py", "tokens", cwd=tmp_path))


def test_tokens_beyond_the_vocabulary_are_named(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    (tmp_path / "tokens/meta.json").write_text(json.dumps(meta | {"vocab": 280}))
    flags = [*TINY, "--vocab", "280", "--data", "tokens", "--steps", "1"]
    assert "has a token 299, beyond the vocabulary of 280" in refused(command("train.py", *flags, cwd=tmp_path))


@pytest.mark.parametrize("size, context, batch_size", [(100, 7, 4), (64, 8, 9)])
def test_batches_are_those_of_a_loop(size, context, batch_size):
    tokens = np.arange(size).astype(np.uint16)
    starts = []
    for epoch in range(6):
        rng = np.random.default_rng([5, epoch])
        order = [int(i) * context for i in rng.permutation((size - 1) // context)]
        shift = int(rng.integers(size)) if epoch else 0
        starts += [start + shift for start in order]
    for step in range(4):
        found = data.batch(tokens, context, batch_size, 5, step)
        expected = [[(start + t) % size for t in range(context + 1)]
                    for start in starts[step * batch_size : (step + 1) * batch_size]]
        assert found[0].dtype == np.int64
        assert [part.tolist() for part in found] == [[row[:-1] for row in expected], [row[1:] for row in expected]]


def test_batches_tokens_and_the_tokenizer_are_byte_for_byte_these(tmp_path):
    """What results/ rests on: on another machine, or in a later version, these integers must be the same."""
    words = np.random.default_rng(0).integers(97, 123, (9, 400, 5)).astype(np.uint8)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(words):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(b" ".join(map(bytes, text)))
    folder = data.prepare(str(tmp_path / "texts"), tmp_path / "out", 300, min_doc_tokens=9)
    tokens, targets = data.batch(np.arange(99).astype(np.uint16), 7, 4, 5, 9)
    made = {"batch": np.concatenate((tokens, targets[:, -1:]), 1).tobytes(),
            "tokens": (folder / "train.bin").read_bytes(), "tokenizer": (folder / "tokenizer.tiktoken").read_bytes()}
    assert {name: hashlib.sha256(content).hexdigest()[:16] for name, content in made.items()} == {
        "batch": "c52c9b61b1338640", "tokens": "25fef21196860c15", "tokenizer": "6971efe5d5003cc4"}


FIRST_WEIGHTS = {                        # the sum of w times 1 .. 97, in turn
    "learned": 1678.042277, "t5": 1689.217042, "shaw": 1698.277981, "kerple": 1618.493841,
    "fire": 1576.862970, "cope": 1963.230562, "fox": 1461.886742, "grape": 1060.878388,
    "dape": 1467.488150, "pope": 928.840636, "cable": 904.515182, "path": 1136.387623,
    "path_fox": 1843.176574, "selective_rope": 2088.989312,
}


@pytest.mark.parametrize("pe", FIRST_WEIGHTS)
def test_first_weights_are_these_but_for_roundings(pe):
    """On one machine they are the same bytes (tests/test_ladder.py). Others may round otherwise: NumPy draws the normal
    numbers beyond 3.6 with the C library's log1p, and some encodings start at logarithms. Each is added with a weight
    of its own, so that their order counts, and may be off by two roundings of float32.
    """
    params = model_numpy.init_params(ModelConfig(2, 16, 2, 12, 40, encoding=make_encoding(pe)), 1)
    w = np.concatenate([x.ravel() for x in params.values()]).astype(float)
    factors = 1 + np.arange(len(w)) % 97
    right = FIRST_WEIGHTS[pe]
    assert abs(factors @ w - right) <= 2 * 2.0**-24 * (factors @ abs(w))
