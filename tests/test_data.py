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
from config import PRESETS, ModelConfig
from positional_encodings import make_encoding
from texts import COPIES, HIDDEN, NEAR_COPIES, NOT_UTF8, SHORT, LeftOut, documents, drop_near, hash_source, split_texts
from tokenizer import read_tokenizer


def read(folder, split):
    meta = data.read_meta(folder)
    encoding = read_tokenizer(folder, meta)
    return [encoding.decode(document[1:].tolist())
            for document in data.split_documents(data.open_split(folder, split), meta["eot"])]


def test_each_document_is_in_one_split_once_and_decodes_to_itself(books, tokens):
    texts = {split: sorted(read(tokens, split)) for split in data.SPLITS}
    sources = sorted(path.read_text(encoding="utf-8") for path in books.iterdir())
    assert {split: len(found) for split, found in texts.items()} == {
        split: sum(split_of(text) == split for text in sources) for split in data.SPLITS}
    assert sorted(sum(texts.values(), [])) == sources
    assert all(split_of(text) == split for split, found in texts.items() for text in found)


def test_short_duplicate_and_not_utf8_texts_are_left_out_and_counted(books, tmp_path):
    folder = tmp_path / "books"
    shutil.copytree(books, folder)
    (folder / "again.txt").write_bytes(next(books.iterdir()).read_bytes())
    (folder / "short.txt").write_text("short")
    (folder / "latin.txt").write_bytes(b"\xe9" * 3000)
    (folder / ".hidden.txt").write_text("hidden " * 900)
    meta = data.read_meta(data.prepare(str(folder), tmp_path / "out", 300, min_doc_tokens=256))
    assert {reason: count for reason, (count, _) in meta["dropped"].items()} == {
        HIDDEN: 1, NOT_UTF8: 1, SHORT: 1, COPIES: 1}
    assert meta["dropped"][NOT_UTF8][1] == ["latin.txt"] and meta["dropped"][SHORT][1] == ["short.txt"]
    assert sum(split["documents"] for split in meta["splits"].values()) == len(list(books.iterdir()))


@pytest.mark.parametrize("limit", [7, 10**6])
def test_long_texts_are_cut_at_line_ends_lose_nothing_and_stay_in_one_split(limit):
    text = "\n".join("x" * (i % 30) for i in range(200)) + "y" * 300
    texts = [("a", f"text {i}\n{text}\n") for i in range(40)]
    settings = data.PREPARATION | {"max_doc_chars": limit}
    made = [*split_texts([("one", text)], settings, LeftOut())]
    assert "".join(piece for _, _, piece in made) == text or limit == 7            # where pieces repeat
    assert max(len(piece) for _, _, piece in made) <= limit
    assert limit == 10**6 or any(piece.endswith("\n") for _, _, piece in made)
    for name, whole in texts:
        splits = {split for split, _, _ in split_texts([(name, whole)], settings, LeftOut())}
        assert splits == {split_of(whole)}


def words(i, n=60):
    """A text of n words that no other i has."""
    rng = np.random.default_rng(i)
    return " ".join("".join("abcdefgh"[j] for j in rng.integers(8, size=rng.integers(2, 7))) for _ in range(n)) + "\n"


def decode_all(folder):
    return sorted(text for split in data.SPLITS for text in read(folder, split))


def test_one_list_of_files_is_read_and_hashed(tmp_path):
    """Endings in any case, linked folders once, rows beside texts; what is not read is named."""
    other = tmp_path / "other"
    folder = tmp_path / "texts"
    for path in (folder / "deep", other, folder / ".git"):
        path.mkdir(parents=True)
    read_files = {"a.txt": 0, "B.TXT": 1, "deep/c.Md": 2, "deep/d.py": 3, "e.RST": 4}
    for name, i in read_files.items():
        (folder / name).write_text(words(i))
    (other / "f.txt").write_text(words(5))
    rows = [json.dumps({"text": words(i)}) for i in range(6, 70)]
    (folder / "g.Jsonl").write_text("\n".join(rows))
    (folder / "linked").symlink_to(other)
    (folder / "again").symlink_to(folder / "deep")
    (folder / "loop").symlink_to(folder)
    (folder / "nowhere.txt").symlink_to(folder / "missing.txt")
    for name in (".git/h.txt", ".hidden.jsonl", "log.jsonl", "i.txt.gz", "j.png"):
        (folder / name).write_text("not to be read")
    before = hash_source(str(folder))
    done = command("data.py", "texts", "--vocab", "300", "--out", "out", cwd=tmp_path)
    assert decode_all(tmp_path / "out") == sorted(map(words, range(70))), done.stderr
    for line in ("hidden files and folders: 2 (.git, .hidden.jsonl)", "logs of runs: 1 (log.jsonl)",
                 ".parquet: 2 (i.txt.gz, j.png)", "links to nothing, and what else is no file: 1 (nowhere.txt)"):
        assert line in done.stdout
    for name in (".git/h.txt", "log.jsonl", "j.png"):
        (folder / name).write_text("changed")
        assert hash_source(str(folder)) == before
    for name in ("deep/c.Md", "g.Jsonl"):                               # of the same size as before
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"a", b"b"))
        assert hash_source(str(folder)) != before
        (folder / name).write_bytes(content)
        assert hash_source(str(folder)) == before


@pytest.mark.parametrize("number, size", [(1, 400), (2, 200), (5, 50), (40, 50), (2000, 10)])
def test_any_number_of_short_texts_trains_and_none_is_dropped(number, size, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(number):
        (tmp_path / f"texts/{i:04}.txt").write_text(words(i, size))
    flags = ["--preset", "mini", "--layers", "1", "--width", "8", "--heads", "1", "--l", "4", "--steps", "1"]
    done = command("train.py", *flags, "--data", "texts", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    record = json.loads((tmp_path / "run/config.json").read_text())
    assert record["train"]["min_doc_tokens"] == 1 and record["data"]["vocab"] == record["model"]["vocab"]
    kept = "".join(text for split in ("train", "test", "val") for text in read(tmp_path / "data/texts-v1024", split))
    assert len(kept) == sum(len(words(i, size)) for i in range(number))
    assert not {*read(tmp_path / "data/texts-v1024", "train")} & {*read(tmp_path / "data/texts-v1024", "val")}


def test_few_documents_are_cut_between_or_within_them_without_copies(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [words(i, 400) for i in range(4)]
    for i, text in enumerate([*texts, texts[0]]):
        (folder / f"{i}.txt").write_text(text)
    out = data.prepare(str(folder), tmp_path / "out", 300, max_doc_chars=500)
    assert "too few documents to be split by a hash of their text (4)" in capsys.readouterr().out
    parts = {split: read(out, split) for split in data.SPLITS}
    assert "".join(parts["train"] + parts["test"] + parts["val"]) == "".join(texts)
    assert max(len(part) for split in data.SPLITS for part in parts[split]) <= 500
    assert data.read_meta(out)["dropped"] == {COPIES: [1, ["4.txt"]]}
    assert sum(text in parts["train"] for text in texts) == 0 and len(parts["train"]) >= 12     # each has its mark
    assert not {*parts["train"]} & {*parts["val"], *parts["test"]}


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", "caf\u00e9 au lait".encode("latin-1"), "save the files as UTF-8"),
    ("a.txt", "text".encode("utf-16-le"), "save the files as UTF-8"),
    ("a.jsonl", b'{"content": "text"}', "the field `text`"), ("a.jsonl", b"[\n1,\n2", "one JSON object"),
    ("a.txt", b" \n", "give more text"), ("a.txt", words(0, 400).encode(), "leave --max-tokens out")])
def test_what_would_be_right_is_said_where_nothing_can_be_used(name, content, message, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(content)
    flags = ["--max-tokens", "100"] * ("max-tokens" in message)
    done = command("data.py", "texts", "--vocab", "300", "--out", "out", *flags, cwd=tmp_path)
    assert message in refused(done) and not (tmp_path / "out").exists()


def test_near_copies_among_few_documents_are_left_out_before_the_cut(tmp_path):
    """The last file is the first with other blanks: val is a part of the third one, and no text stands twice."""
    texts = [words(i, 300) for i in range(3)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate([*texts, texts[0].replace(" ", "\t  ")]):
        (tmp_path / f"texts/{i}.txt").write_text(text)
    out = data.prepare(str(tmp_path / "texts"), tmp_path / "out", 300)
    assert data.read_meta(out)["dropped"] == {NEAR_COPIES: [1, ["3.txt"]]}
    assert "".join(text for split in ("train", "test", "val") for text in read(out, split)) == "".join(texts)


def test_the_settings_of_a_prepared_folder_are_the_runs(tmp_path):
    """A setting that is given must be the folder's; what is not given is the folder's, and config.json has it."""
    (tmp_path / "texts").mkdir()
    for i in range(160):
        (tmp_path / f"texts/{i}.txt").write_text(words(i, 20 if i % 2 else 80))
    flags = ["--vocab", "290", "--min-doc-tokens", "100", "--max-doc-chars", "9000"]
    assert command("data.py", "texts", *flags, "--out", "made", cwd=tmp_path).returncode == 0
    train = ["train.py", "--preset", "mini", "--context", "16", "--steps", "1", "--overwrite", "--out", "run", "--data"]
    for source, flags, wrong in [
            ("made", [], None), ("made", ["--min-doc-tokens", "100", "--vocab", "290"], None),
            ("made", ["--min-doc-tokens", "5"], "was prepared with --min-doc-tokens 100, and --min-doc-tokens 5 was"),
            ("made", ["--max-tokens", "5000"], "was prepared with --max-tokens 0, and"),
            ("made", ["--max-doc-chars", "5000"], "was prepared with --max-doc-chars 9000, and"),
            ("made", ["--vocab", "300"], "has a vocabulary of 290"),
            ("texts", ["--min-doc-tokens", "100"], None), ("texts", [], None),
            ("texts", ["--min-doc-tokens", "99"], "data/texts-v1024 was prepared with --min-doc-tokens 100"),
            ("task:flip-flop", ["--max-tokens", "9"], "--max-tokens is for text")]:
        done = command(*train, source, *flags, cwd=tmp_path)
        if wrong:
            assert wrong in refused(done)
        else:
            assert done.returncode == 0, done.stderr
            record = json.loads((tmp_path / "run/config.json").read_text())
            settings = {name: record["train"][name] for name in data.PREPARATION}
            assert settings == {name: record["data"][name] for name in data.PREPARATION}
            assert settings["min_doc_tokens"] == 100 and record["model"]["vocab"] == record["data"]["vocab"]
    done = command(*train, "made", "--tokenizer", "x", cwd=tmp_path)
    assert "python data.py SOURCE --tokenizer FILE" in refused(done)


@pytest.mark.parametrize("preset", ["mini", "small"])
def test_a_text_with_a_name_is_prepared_with_the_limits_of_the_preset(preset, tmp_path, monkeypatch):
    texts = [(str(i), words(i, 40) * (60 if i % 2 else 1)) for i in range(50)]
    monkeypatch.setattr(data, "documents", lambda source, left_out=None: iter(texts))
    flags = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 4 --vocab 300 --steps 1 --out run"
    done = command("train.py", "--preset", preset, *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run/config.json").read_text())
    limits = {name: PRESETS[preset].get(name, default) for name, default in data.PREPARATION.items()}
    assert limits["min_doc_tokens"] > 2000
    assert limits.items() <= record["data"].items() and limits.items() <= record["train"].items()
    assert record["data"]["dropped"][SHORT][0] == 25


def test_marked_ends_divide_a_file_and_a_byte_order_mark_is_no_text(tmp_path):
    stories = [f"Once upon a time {i}.\n" for i in range(60)]
    (tmp_path / "stories.txt").write_text("<|endoftext|>\n".join(stories), encoding="utf-8-sig")
    assert [text for _, text in documents(tmp_path / "stories.txt")] == stories
    folder = data.prepare(str(tmp_path / "stories.txt"), tmp_path / "out", 300)
    texts = {split: read(folder, split) for split in data.SPLITS}
    assert sorted(sum(texts.values(), [])) == sorted(stories)
    assert all(split_of(text) == split for split, found in texts.items() for text in found)
    (tmp_path / "code.py").write_text('END = "<|endoftext|>"\n')                # no line of its own
    assert len([*documents(tmp_path / "code.py")]) == 1


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

    def shingles(text):
        text = "".join(text.lower().split())
        return {text[i : i + near["shingle"]] for i in range(len(text) - near["shingle"] + 1)}

    known = {shingle for text in read(tmp_path / "out", "train") for shingle in shingles(text)}
    for split in ("val", "test"):
        for name, share in near[split].items():
            found = shingles((copies / name).read_text(encoding="utf-8"))
            assert share == round(len(found & known) / len(found), 4) > near["share"]
        for found in map(shingles, read(tmp_path / "out", split)):
            assert len(found & known) <= near["share"] * len(found)


CHANGES = {"tabs": lambda text: text.replace("    ", "\t"), "indents": lambda text: text.replace("\n", "\n        "),
           "trailing": lambda text: text.replace("\n", " \t\n"), "no-break": lambda text: text.replace(" ", "\u00a0"),
           "no width": lambda text: "\u200b".join(text), "width": lambda text: " ".join(text.split()),
           "narrow": lambda text: "\n".join(text.split()), "case": str.upper, "soft": lambda text: "\u00ad".join(text),
           "joiner": lambda text: "\u034f".join(text), "selector": lambda text: "\ufe0f".join(text),
           "tags": lambda text: "\U000e0020".join(text), "braille": lambda text: text.replace(" ", "\u2800"),
           "filler": lambda text: text.replace(" ", "\u3164"), "controls": lambda text: text.replace(" ", " \x01")}


@pytest.mark.parametrize("words_of", [lambda i: words(i, 80), lambda i: words(i, 4), lambda i: CHINESE(i)],
                         ids=["long", "short", "chinese"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_with_other_blanks_or_case_is_a_near_copy_and_others_are_none(change, words_of):
    texts = {("train", str(i)): words_of(i) for i in range(60)}
    texts |= {("val", str(i)): CHANGES[change](words_of(i)) for i in range(20)}
    texts |= {("test", str(i)): words_of(i) for i in range(1000, 1040)}
    tokens = {split: {name: () for key, name in texts if key == split} for split in data.SPLITS}
    near = drop_near(tokens, texts)
    assert len(near["val"]) == 20 and not tokens["val"]
    assert not near["test"] and len(tokens["test"]) == 40


def CHINESE(i):
    """A text without blanks between its words."""
    return "".join(map(chr, np.random.default_rng(i).integers(0x4E00, 0x5E00, 60))) + "\n"


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
    """What studies/ rests on: on another machine, or in a later version, these integers must be the same."""
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
