"""A source to its documents: what text is read, what is left out of it, and into which split each document falls.

A source is a text with a name, such as the running Python's standard library, or a file or folder of text. A document
is a file, what lies between two lines <|endoftext|> of a file, or a row of a .jsonl file. Whatever is not used, a file,
a row or a document, is counted and named.
"""

import codecs
import hashlib
import importlib.metadata
import json
import os
import re
import unicodedata
from pathlib import Path

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from files import hash_file
from settings import InputError, did_you_mean

# ---- sources: a name or a path to files ------------------------------------------------------------------------------

PACKAGES = ("matplotlib", "numpy", "rustbpe", "safetensors", "tiktoken", "torch", "tqdm")       # of --data packages
NAMED_SOURCES = ("stdlib", "packages", "fineweb", "fineweb-edu")

TEXT = (".txt", ".md", ".py", ".rst")
ROWS = (".jsonl", ".parquet")
ROWS_IN_MEMORY = 2**26          # bytes of a source's .jsonl files that are read here; engine/corpora.py reads more
HASHED = 2**30                  # bytes of a source of which the content is hashed; of more, sizes and times are

class LeftOut(dict):
    """What a preparation does not use: {reason: (how many, the names of the first three)}."""

    def add(self, reason, *names, count=None):
        """Count these names, or as many as `count` says, of which these are the first."""
        before, first = self.get(reason, (0, []))
        if names:
            self[reason] = before + (count or len(names)), [*first, *names][:3]

    def print(self):
        for reason, (count, first) in self.items():
            names = ", ".join(first) + ", ..." * (count > len(first))
            print(f"left out: {reason}: {count:,}" + f" ({names})" * bool(first))

HIDDEN = "hidden files and folders"
LOGS = "log.jsonl files, which are logs of runs"
OTHERS = f"files that do not end in {' '.join(TEXT + ROWS)}"
UNREADABLE = "folders that cannot be read"
UNUSABLE = "links to nothing, and what else is no file"
NOT_UTF8 = "files or rows that are not UTF-8, or have NUL characters"
NOT_JSON = "rows that are no JSON"
NO_TEXT = "rows without a text in the field `text`"
EMPTY = "empty documents"
SHORT = "documents with fewer tokens than --min-doc-tokens"
COPIES = "exact copies of another document"
NEAR_COPIES = "near copies of another document"
NEAR = "held-out documents that are nearly in train"
BEYOND = "documents beyond --max-tokens"

REMEDIES = {SHORT: "give a smaller --min-doc-tokens, or more text", NOT_UTF8: "save the files as UTF-8",
            NOT_JSON: "each line of a .jsonl file must be one JSON object",
            NO_TEXT: "the rows of a .jsonl file need a string in the field `text`"}

def list_files(source, left_out):
    """(name, path), sorted, of the files of a path that have texts or rows: a file, or those of a folder and its links.

    This one list is what is read and what is hashed. Hidden files, logs of runs, and files with other endings are left
    out; a folder that is reached in two ways is read once.
    """
    path = Path(source)
    if str(source) == "" or not path.is_file() and not path.is_dir():
        raise InputError(f"{source}: no such file or folder; a source is {', '.join(NAMED_SOURCES)} or a path"
                         f"{did_you_mean(str(source), NAMED_SOURCES)}")
    if path.is_file():
        if path.suffix.lower() not in TEXT + ROWS:
            raise InputError(f"{source} must end in {' '.join(TEXT + ROWS)}")
        return [(path.name, path)]
    paths = []
    seen = set()
    for root, folders, files in os.walk(path, followlinks=True, onerror=lambda e: left_out.add(UNREADABLE, e.filename)):
        if (real := os.path.realpath(root)) in seen:        # a link to a folder that stands elsewhere, too
            folders.clear()
            continue
        seen.add(real)
        left_out_here = [name for name in sorted(files + folders) if name.startswith(".")]
        if left_out_here:
            left_out.add(HIDDEN, *(str(Path(root, name).relative_to(path)) for name in left_out_here))
        folders[:] = sorted((name for name in folders if not name.startswith(".")),
                            key=lambda name: (os.path.islink(Path(root, name)), name))      # linked ones last
        paths += [Path(root, name) for name in files if not name.startswith(".")]
    found = []
    for file in sorted(paths):
        name = str(file.relative_to(path))
        if file.name == "log.jsonl":
            left_out.add(LOGS, name)
        elif file.suffix.lower() not in TEXT + ROWS:
            left_out.add(OTHERS, name)
        elif not file.is_file():
            left_out.add(UNUSABLE, name)
        else:
            found.append((name, file))
    if not found:
        raise InputError(f"{source} holds no file that ends in {' '.join(TEXT + ROWS)}")
    return found

def with_ending(files, *endings):
    """Those of [(name, path)] that have one of the endings, in any case of letters."""
    return [(name, path) for name, path in files if path.suffix.lower() in endings]

LARGE = f"has .parquet files, or more than {ROWS_IN_MEMORY >> 20} MiB of .jsonl files, which datatrove reads"

def is_large(source):
    """Whether engine/corpora.py reads a source: FineWeb, .parquet files, or more of .jsonl than fits in memory well."""
    if source in NAMED_SOURCES:
        return source.startswith("fineweb")
    files = list_files(source, LeftOut())
    rows = sum(path.stat().st_size for _, path in with_ending(files, ".jsonl"))
    return bool(with_ending(files, ".parquet")) or rows > ROWS_IN_MEMORY

def find_files(source, left_out):
    """(name, path) of the files of a source, in sorted order."""
    if source == "stdlib":
        root = Path(os.__file__).parent
        differs = {"site-packages", "dist-packages", "test", "tests", "idle_test"}         # from machine to machine
        files = sorted(p for p in root.rglob("*.py") if not differs & set(p.relative_to(root).parts))
        return [(str(p.relative_to(root)), p) for p in files]
    if source == "packages":
        files = [file for name in PACKAGES for file in importlib.metadata.distribution(name).files]
        return [(str(file), Path(file.locate())) for file in sorted(files) if file.suffix == ".py"]
    if is_large(source):
        raise InputError(f"{source} {LARGE}: make a folder of tokens with python -m engine.corpora {source} --out DIR")
    return list_files(source, left_out)

def full_name(source):
    """A source's name if it has one, else its path: from here where it lies below, or from the root."""
    if source in NAMED_SOURCES:
        return source
    path = Path(os.path.realpath(source))
    return f"./{path.relative_to(Path.cwd())}" if Path.cwd() in path.parents else str(path)

def hash_source(source):
    """A hash of the names and contents of a path's files; of more than a GiB, of their names, sizes and times.

    Of a text with a name it is None.
    """
    if source in NAMED_SOURCES:
        return None
    files = list_files(source, LeftOut())
    facts = [(name, path.stat()) for name, path in files]
    if sum(stat.st_size for _, stat in facts) > HASHED:
        listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
    else:
        listing = [(name, hash_file(path)) for name, path in files]
    return hashlib.sha256(repr(listing).encode()).hexdigest()

# ---- files to documents ----------------------------------------------------------------------------------------------

def documents(source, left_out=None):
    """(name, text) of each document of a source. A name is a path within it, and a part or row: a.txt:2, b.jsonl:17."""
    left_out = LeftOut() if left_out is None else left_out
    for name, path in find_files(source, left_out):
        try:
            read = read_rows if path.suffix.lower() == ".jsonl" else read_parts
            yield from drop_empty(read(path, name, left_out), left_out)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None

def drop_empty(texts, left_out):
    """(name, text) of those that are not blank."""
    for name, text in texts:
        if text and not text.isspace():
            yield name, text
        else:
            left_out.add(EMPTY, name)

def read_parts(path, name, left_out):
    """(name, text) of the parts of a file of text, between lines <|endoftext|>; of the whole if it has no such line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return left_out.add(NOT_UTF8, name)
    if "\0" in text:                                        # UTF-16, or no text at all
        return left_out.add(NOT_UTF8, name)
    parts = re.split(r"^<\|endoftext\|>\n?", text, flags=re.MULTILINE)
    for number, part in enumerate(parts, 1):
        if part or len(parts) == 1:                         # between two marks there may be nothing
            yield f"{name}:{number}" if number > 1 else name, part

def read_rows(path, name, left_out):
    """(name, text) of the rows of a .jsonl file: of each line that is an object with a string in the field `text`."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{name}:{number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError:
                left_out.add(NOT_UTF8, where)
            except (ValueError, RecursionError):
                left_out.add(NOT_JSON, where)
            else:
                if isinstance(row, dict) and isinstance(row.get("text"), str):
                    yield where, row["text"]
                else:
                    left_out.add(NO_TEXT, where)

# ---- documents to splits ---------------------------------------------------------------------------------------------

def cut_text(text, max_chars):
    """The pieces of a text, cut at a line's end where there is one."""
    while text:
        end = max_chars if len(text) < max_chars else text.rfind("\n", 0, max_chars) + 1 or max_chars
        yield text[:end]
        text = text[end:]

def hash_text(text):
    """64 bits of a text's SHA-256; a lone surrogate, which has no UTF-8, counts as "?"."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", errors="replace")).digest()[:8], "big")

def drop_copies(texts, min_bytes, left_out):
    """(name, text) of those not seen before, of min_bytes bytes at least: a token is a byte at least."""
    seen = set()
    for name, text in texts:
        encoded = text.encode("utf-8", errors="replace")
        key = hash_text(text)
        if len(encoded) < min_bytes:
            left_out.add(SHORT, name)
        elif key in seen:
            left_out.add(COPIES, name)
        else:
            seen.add(key)
            yield name, encoded.decode("utf-8")

def split_by_hash(texts, held_out=1 / 14):                  # a split's share: 50M of the paper's 700M
    """(split, name, text): the split depends on the text alone."""
    for name, text in texts:
        share = hash_text(text) / 2**64
        yield "val" if share < held_out else "test" if share < 2 * held_out else "train", name, text

def split_by_tenths(texts):
    """(split, name, text): the last tenth of all text, in its order, becomes val, and the tenth before that test.

    A cut lies at the last line's end or document's end within the twentieth of all text before it, if there is one.
    """
    total = sum(len(text) for _, text in texts)
    cuts = []
    for tenths in (8, 9):
        start = 0
        for _, text in texts:
            if start + len(text) > total * tenths // 10:
                break
            start += len(text)
        within = total * tenths // 10 - start
        ends = [end for end in (text.rfind("\n", 0, within) + 1, 0) if within - end <= total // 20 and start + end]
        cuts.append(start + max(ends, default=within))
    start = 0
    for name, text in texts:
        for split, low, high in zip(("train", "test", "val"), (0, *cuts), (*cuts, total), strict=True):
            if part := text[max(0, low - start) : max(0, high - start)]:
                yield split, name if len(part) == len(text) else f"{name}, its part in {split}", part
        start += len(text)

def split_texts(texts, settings, left_out):
    """(split, name, text) of the pieces of texts (name, text), split by their hash, without copies and short ones."""
    return cut_long(split_by_hash(drop_copies(texts, settings["min_doc_tokens"], left_out)), settings, left_out)

def cut_long(texts, settings, left_out):
    """(split, name, text) of the pieces of texts, of max_doc_chars characters at most, each once."""
    seen = set()
    for split, name, text in texts:
        for number, piece in enumerate(cut_text(text, settings["max_doc_chars"]), 1):
            where = f"{name}#{number}" if number > 1 else name
            key = hash_text(piece)
            if len(piece.encode()) < settings["min_doc_tokens"]:
                left_out.add(SHORT, where)
            elif key in seen:
                left_out.add(COPIES, where)
            else:
                seen.add(key)
                yield split, where, piece

# ---- near copies -----------------------------------------------------------------------------------------------------

SHINGLE = 64                            # characters without blanks, about twelve words
# Blanks, controls, and what Unicode calls default ignorable: characters that are not seen.
BLANKS = re.compile("[\\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
                    "\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]+")
BASE = 0x9E3779B97F4A7C15               # odd, and so it has an inverse modulo 2^64

def hash_shingles(text, every=1):
    """Hashes, uint64, of all runs of 64 characters of a text, without blanks and in small letters.

    Those that are multiples of `every` are returned. A shorter text has one hash. So copies agree that differ in
    indents, line width, no-break blanks, characters of no width, or case.
    """
    text = BLANKS.sub("", unicodedata.normalize("NFKC", text).casefold())
    x = np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32).astype(np.uint64)
    n = min(SHINGLE, len(x))
    powers = np.multiply.accumulate(np.full(len(x), BASE, np.uint64))
    inverses = np.multiply.accumulate(np.full(len(x), pow(BASE, -1, 2**64), np.uint64))
    sums = np.concatenate((np.zeros(1, np.uint64), np.add.accumulate(x * powers)))
    hashes = (sums[n:] - sums[: len(sums) - n]) * inverses[: len(sums) - n]     # of n characters, wherever they stand
    hashes ^= hashes >> 32                                  # or low bits would depend on the characters' low bits alone
    hashes *= 0xBF58476D1CE4E5B9
    hashes ^= hashes >> 32
    return np.unique(hashes[hashes % every == 0])

def drop_near_copies(texts, left_out, limit=1 / 2):
    """(name, text) of few documents, without those of which more than half of the shingles are in one before."""
    known = np.zeros(0, np.uint64)
    for name, text in texts:
        hashes = hash_shingles(text)
        if np.isin(hashes, known).sum() > limit * len(hashes):
            left_out.add(NEAR_COPIES, name)
        else:
            known = np.union1d(known, hashes)
            yield name, text

def drop_near(tokens, texts, limit=1 / 2, most=2**24):
    """Leave out of val and test, in `tokens`, each document of which more than half of the shingles are in train.

    tokens: {split: {name: tokens}}; texts: {(split, name): text}. Returns what meta.json says of it: the names of those
    documents with their shares. Of more than `most` characters in train, one shingle in `every` is compared.
    """
    every = max(1, -(-sum(len(texts["train", name]) for name in tokens["train"]) // most))
    known = [hash_shingles(texts["train", name], every) for name in tokens["train"]]
    known = np.unique(np.concatenate([np.zeros(0, np.uint64), *known]))
    near = {"shingle": SHINGLE, "share": limit, "every": every}
    for split in ("val", "test"):
        shares = {}
        for name in tokens[split]:
            found = hash_shingles(texts[split, name], every)
            shared = np.searchsorted(known, found, "left") < np.searchsorted(known, found, "right")
            shares[name] = round(float(shared.sum() / max(1, len(found))), 4)
        near[split] = {name: share for name, share in shares.items() if share > limit}
        tokens[split] = {name: document for name, document in tokens[split].items() if name not in near[split]}
    return near
