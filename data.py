"""Text to tokens on disk; tokens on disk to batches. B batch, T context length.

A source is the running Python's standard library, the requirements' own Python, a file or folder, or a data set of
the hub. Its documents are streamed once, cut if huge, split by a hash of their text, encoded with a byte-level BPE, and
written to

    data/<name>-v<vocab>/   train.bin val.bin test.bin   uint16; each document is <|endoftext|> and then its own tokens
                            tokenizer.tiktoken           tiktoken's own text format: "base64 rank" lines
                            meta.json                    counts, source and SHA-256 of each file
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
import logging
import lzma
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import rustbpe
import tiktoken
from tqdm import tqdm

from cli import CommandLine, at_least, whole
from config import PRESETS, InputError
from files import FILE, check_shape, fingerprint, new_folder, open_file, read_json, sync, write_json

SPLITS = ("train", "val", "test")
HELD_OUT = 1 / 14                   # share of the documents in val, and in test: the 50M of 700M tokens of the paper
MAX_DOC_CHARS = 2**20               # longer texts are cut, so that no document needs much memory
TOKENIZER_CHARS = 2**28             # the tokenizer is trained on at most so much of a source, held in memory
ENCODE_CHARS = 2**25                # text that is encoded at a time, on all cores while more of it is read
SAVE_CHARS = 2**27                  # between two notes of how far it has come, about: a kill costs no more than that
LINE_BYTES = 2**26                  # of .jsonl, at most
ROWS = 1000                         # of .parquet at a time; datasets would take as many as the first group, be it none
NGRAM = 24                          # tokens that two texts have in common, one after the other
NEAR = 1 / 2                        # a held-out document with a larger share of its n-grams in train is left out: of
                                    # stdlib's 50, 44 have 0.38 at most and six 0.79 or more. (Of all of it: where the
                                    # end alone is in train, as a main() like any other, the loss there is as elsewhere)
HASHES = 2**22                      # n-grams of train that are held in memory, about
BLOCK = 2**18                       # tokens that are hashed at a time
BASE = 0x9E3779B97F4A7C15           # of the hashes: odd, and large
NAMED = 3                           # documents whose names are printed, at most
EOT = "<|endoftext|>"
STATE, SEEN = "state.json", "seen.bin"      # of a preparation that is under way
FILES = ("meta.json", *(f"{name}.bin" for name in SPLITS), "tokenizer.tiktoken")
META = {"source": str, "pattern": str, "vocab": int, "eot": int, "min_doc_tokens": int, "max_tokens": int,
        "tokenizer": FILE, "splits": {name: {"documents": int, "tokens": int, **FILE} for name in SPLITS},
        "dropped": {"short": int, "duplicate": int, "not_utf8": int}}
NEAR_COPIES = {"ngram": int, "share": int | float, "every": int, "val": dict, "test": dict,      # names and shares
               "kept": {"val": int | float, "test": int | float}}                               # the largest share
progress = functools.partial(tqdm, unit=" documents", disable=None, leave=False)      # None: only on a terminal

# How text falls into pieces before BPE, after cl100k_base (tiktoken): words with the blank before them, up to three
# digits, runs of signs, line ends, blanks. Possessive quantifiers keep it linear on long runs.
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                 r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")


# ---- sources: a name or a path to a stream of texts ------------------------------------------------------------------

NAMED_SOURCES = ("stdlib", "packages", "fineweb", "fineweb-edu")
HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
PACKED = {".gz": gzip.open, ".xz": lzma.open}

def documents(source, max_doc_chars=MAX_DOC_CHARS, skipped=None, at=None):
    """(name, text) of each document of a source, one by one, no text longer than max_doc_chars.

    source: "stdlib", "packages", a name in HUB, or the path of a file or folder of text (each file a document),
    .jsonl (a field "text") or .parquet (a column "text"); text and .jsonl may be packed as .gz or .xz.
    Text that is not UTF-8 is left out: its path goes to the list `skipped`. A name is a path within the source, a line
    or row of it after a colon, and after # which piece of a text that was cut, all counted from 1: a.jsonl:7#2.
    at: a list, how many of the files and how many documents of the next one have been read; it is kept up to date, and
    with one of an earlier reading that is gone on with.
    """
    at = [0, 0] if at is None else at
    for number, (name, path) in itertools.islice(enumerate(_files(source)), at[0], None):
        read, (_, before) = _read_rows if source in HUB else READERS[_kind(path)], at
        try:
            pieces = ((f"{name}{place}" + f"#{part}" * (part > 1), text) for place, file in read(path)
                      for part, text in enumerate(_cut(file, max_doc_chars), 1))
            for count, document in itertools.islice(enumerate(pieces, 1), before, None):
                at[:] = number, count
                yield document
            at[:] = number + 1, 0
        except UnicodeDecodeError:
            at[:] = number + 1, 0
            if skipped is not None:
                skipped.append(str(path))
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path} cannot be unpacked: {error}") from None

def _files(source):
    """(name, path) of the readable files of a source, in sorted order; of a data set, its shards in their order."""
    if source in HUB:
        found = _streamed(HUB[source], path=HUB[source], name="sample-10BT")
        return [(f"{HUB[source]}/{i}", found.shard(found.num_shards, i)) for i in range(found.num_shards)]
    if source == "packages":
        lines = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8")
        names = sorted(re.findall(r"^[\w-]+", lines, re.MULTILINE))
        found = [file for name in names for file in importlib.metadata.distribution(name).files]
        return [(str(file), Path(file.locate())) for file in sorted(found) if file.suffix == ".py"]
    if source == "stdlib":
        root = Path(os.__file__).parent
        differs = {"site-packages", "dist-packages", "test", "tests", "idle_test"}         # from machine to machine
        found = sorted(p for p in root.rglob("*.py") if not differs & set(p.relative_to(root).parts))
        return [(str(p.relative_to(root)), p) for p in found]
    path = Path(source)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{source} is no regular file")
    if not path.exists():
        raise InputError(f"{source}: no such file or folder; data is {', '.join(NAMED_SOURCES)} or a path")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    readable = [p for p in files if _kind(p) in READERS and p.is_file()]
    found = [p for p in readable if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not found:
        what = "holds no file that ends in" if path.is_dir() else "must end in"
        raise InputError(f"{source} {what} {' '.join(READERS)} (or those with .gz, .xz)")
    return [(str(p.relative_to(path if path.is_dir() else path.parent)), p) for p in found]

def _kind(path):
    """The suffix that says what a file holds: ".jsonl" of books.jsonl.xz."""
    return (Path(path.stem) if path.suffix in PACKED else path).suffix.lower()

def _read_text(path):
    """The whole file as one text. (Readers give its place in the path, and an open file: it may exceed the memory.)"""
    with PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        yield "", file

def _read_jsonl(path):
    """The field "text" of each line that is not blank."""
    with PACKED.get(path.suffix, open)(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise InputError(f"{path} line {number} is longer than {LINE_BYTES:,} bytes: cut its text in several")
            if not line.strip():
                continue
            try:
                text = "" + json.loads(line)["text"]        # a TypeError unless it is a string
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f'{path} line {number} is not a JSON object with a field "text" in UTF-8') from None
            yield f":{number}", io.StringIO(text)

def _read_rows(what):
    """The column "text" of a .parquet file, or of a shard of a data set."""
    if isinstance(what, Path) and what.suffix in PACKED:
        raise InputError(f"{what} is packed, and parquet is read from its end: unpack it first")
    rows = _streamed(what, path="parquet", data_files=[str(what)], batch_size=ROWS) if isinstance(what, Path) else what
    with _naming(what):
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get("text"), str):
                raise TypeError(f'no column "text" that holds strings; it has {", ".join(row)}')
            yield f":{number}", io.StringIO(row["text"])

def _streamed(what, **where):
    """What the datasets library streams from there."""
    with _naming(what):
        import datasets

        for library in ("datasets", "huggingface_hub"):             # their retries' words: one line tells it
            logging.getLogger(library).setLevel(logging.CRITICAL)
        return datasets.load_dataset(**where, split="train", streaming=True)

@contextlib.contextmanager
def _naming(what):
    """InputError for whatever ends the reading by the datasets library."""
    other = "choose other data with --data PATH (a file or folder of text) or --data stdlib"
    try:
        yield
    except ModuleNotFoundError:
        raise InputError(f"{what} is read by the datasets library: pip install datasets, or {other}") from None
    except Exception as error:      # the hub's, the network's and Arrow's own kinds have no common ancestor
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"{what} cannot be read ({reason}); {other}") from None

READERS = dict.fromkeys((".txt", ".md", ".py", ".rst"), _read_text)
READERS |= {".jsonl": _read_jsonl, ".parquet": _read_rows}

def _cut(file, limit):
    """The text of an open file, in pieces of at most limit characters, cut at a line's end where there is one."""
    rest = ""
    while piece := rest + file.read(limit - len(rest)):
        end = limit if len(piece) < limit else piece.rfind("\n") + 1 or limit
        yield piece[:end]
        rest = piece[end:]

class _Seen:
    """Numbers below 2^64 that have been met: eight bytes each, in `old`, but for the last ones, in `fresh`."""

    def __init__(self, old=()):
        self.old, self.fresh = np.sort(np.array(old, np.uint64)), {}                   # a dict: in the order they came

    def __contains__(self, key):
        i = np.searchsorted(self.old, np.uint64(key))
        return key in self.fresh or (i < len(self.old) and int(self.old[i]) == key)

    def save(self, path):
        """Add the fresh ones to a file, and count them among the old."""
        fresh = np.array([*self.fresh], np.uint64)
        with open(path, "ab") as file:
            fresh.tofile(file)
        self.__init__(np.concatenate((self.old, fresh)))

def _unique(texts, min_bytes, dropped, seen):
    """(split, name, text) of each text not seen before. The split depends on the text alone, not on the order."""
    for name, text in texts:
        data = text.encode("utf-8", errors="replace")       # a lone surrogate has no UTF-8: it becomes "?"
        key = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
        if len(data) < min_bytes:                           # a token is a byte at least
            dropped["short"] += 1
        elif key in seen:
            dropped["duplicate"] += 1
        else:
            seen.fresh[key] = None
            share = key / 2**64
            split = "val" if share < HELD_OUT else "test" if share < 2 * HELD_OUT else "train"
            yield split, name, data.decode("utf-8")


# ---- the tokenizer ---------------------------------------------------------------------------------------------------

def train_tokenizer(texts, vocab):
    """{token bytes: rank} of a byte-level BPE of `vocab` entries with <|endoftext|>. InputError for too little text."""
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, vocab - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in tokenizer.get_mergeable_ranks()}
    if len(ranks) < vocab - 1:
        raise InputError(f"vocab: the training text has only enough pairs for a vocabulary of {len(ranks) + 1}: give "
                         "more text, or a --vocab that is no larger")
    return ranks

def save_tokenizer(ranks, path):
    """Write {token bytes: rank} in tiktoken's text format."""
    lines = [f"{base64.b64encode(token).decode()} {ranks[token]}\n" for token in sorted(ranks, key=ranks.get)]
    Path(path).write_text("".join(lines), encoding="ascii")

def load_tokenizer(path):
    """A tiktoken.Encoding from a .tiktoken file; <|endoftext|> is its last rank + 1. InputError for another format."""
    ranks = {}          # not by tiktoken's own loader: it caches by path, and would return what a file held before
    with open_file(path) as file:
        lines = file.read().splitlines()
    try:
        for token, rank in map(bytes.split, lines):
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise InputError(f'{path} line {len(ranks) + 1} is not "base64 rank", tiktoken\'s text format') from None
    if sorted(ranks.values()) != list(range(len(lines))) or any(bytes([b]) not in ranks for b in range(256)):
        raise InputError(f"{path} is not a byte-level BPE: its ranks must be 0, 1, 2, ..., the 256 bytes among them")
    special = {EOT: len(ranks)}
    return tiktoken.Encoding(Path(path).stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)

def run_tokenizer(folder, written):
    """The tokenizer in a run directory or a folder of tokens; InputError unless it is as was `written` of it there."""
    path = Path(folder) / "tokenizer.tiktoken"
    if fingerprint(path) != written["tokenizer"]:
        raise InputError(f"{path} has not the size and hash that were recorded: it was damaged or replaced")
    encoding = load_tokenizer(path)
    for name, here in (("pattern", SPLIT_PATTERN), ("vocab", encoding.n_vocab)):
        if written[name] != here:
            raise InputError(f"{path} is of a tokenizer with the {name} {written[name]!r}, and here it is {here!r}")
    return encoding


# ---- preparing: a source to a folder of tokens -----------------------------------------------------------------------

def prepare(source, out=None, vocab=None, tokenizer=None, min_doc_tokens=1, max_tokens=0, max_doc_chars=MAX_DOC_CHARS,
            overwrite=False):
    """Turn a source into a folder of tokens, `out` or data/<name>-v<vocab>, which appears whole or not at all.

    A tokenizer of `vocab` entries is trained on the training documents, or `tokenizer` is a .tiktoken file. Documents
    of fewer than min_doc_tokens tokens are dropped, and held-out ones that are nearly in train. Reading ends once
    max_tokens are written (0: never). Memory stays bounded: past TOKENIZER_CHARS only a hash of each text is kept, and
    the name of each that is held out. InputError if train or val gets no document.
    """
    if tokenizer is not None:
        if Path(tokenizer).suffix != ".tiktoken":
            raise InputError(f"tokenizer must be a .tiktoken file, got {tokenizer!r}")
        vocab = load_tokenizer(tokenizer).n_vocab
    if not 257 <= vocab <= 2**16:
        raise InputError(f"vocab must be from 257 (256 bytes and {EOT}) to 65,536 (tokens are uint16), got {vocab}")
    out = folder_of(source, vocab) if out is None else Path(out)
    asked = {"source": full_name(source), "vocab": vocab, "pattern": SPLIT_PATTERN, "min_doc_tokens": min_doc_tokens,
             "max_tokens": max_tokens, "max_doc_chars": max_doc_chars, "python": sys.version.split()[0]}
    with new_folder(out, FILES, overwrite, f"use it with --data {out}", wait=True, keep=STATE) as scratch:
        here = [] if source in HUB else [(name, path.stat().st_size) for name, path in _files(source)]
        state, seen = _state(scratch, asked, {"tokenizer": tokenizer and fingerprint(tokenizer),
                                              "files": hashlib.sha256(repr(here).encode()).hexdigest()})
        dropped, skipped, path = state["dropped"], state["not_utf8"], scratch / "tokenizer.tiktoken"
        texts = progress(documents(source, max_doc_chars, skipped, state["at"]), "reading")
        texts, first = _unique(texts, min_doc_tokens, dropped, seen), []
        if tokenizer is not None:
            shutil.copyfile(tokenizer, path)
        elif not path.exists():
            first = list(take(texts, TOKENIZER_CHARS))[::-1]
            print(f"training a tokenizer of {vocab:,} entries on {sum(len(text) for *_, text in first):,} characters",
                  flush=True)
            save_tokenizer(train_tokenizer((text for split, _, text in first[::-1] if split == "train"), vocab), path)
        encoding, last = load_tokenizer(path), 0
        texts = itertools.chain((first.pop() for _ in range(len(first))), texts)       # a stream can be read once only
        for written in _write_tokens(texts, encoding, scratch, state):
            if written - last >= SAVE_CHARS and not first:             # all that was read is written
                last = written
                seen.save(scratch / SEEN)
                _save(scratch, state)
        counts = state["counts"]
        near = _drop_near(scratch, encoding.eot_token, counts, state["names"])
        count = sum(split["documents"] for split in counts.values())
        for name in ("train", "val"):
            if counts[name]["tokens"] == 0:
                raise InputError(
                    f"{source} has {count} usable documents, and none fell to {name}: cut them smaller with "
                    "--max-doc-chars 20000, lower --min-doc-tokens, or give more documents (left out: "
                    f"{dropped['short']:,} shorter than {min_doc_tokens:,} tokens, {len(skipped):,} not UTF-8, "
                    f"{len(near['val'] | near['test']):,} held out that are nearly in train)")
        for name in (STATE, SEEN):
            (scratch / name).unlink(missing_ok=True)
        for new in scratch.glob("*.new"):
            os.replace(new, new.with_suffix(""))
        write_json(scratch / "meta.json", asked | {
            "eot": encoding.eot_token, "dropped": dropped | {"not_utf8": len(skipped)}, "near": near,
            "splits": {name: {**counts[name], **fingerprint(scratch / f"{name}.bin")} for name in SPLITS},
            "tokenizer": fingerprint(path)})
    return out

def _state(folder, asked, found):
    """(how far a preparation has come, the texts it has seen): by what one that was stopped left, or at its beginning.

    What is left is of use if the same was asked and found, and is cut back to what it had when that was noted.
    """
    asked, path = asked | found, folder / STATE
    if path.exists() and (state := read_json(path))["asked"] == asked:
        for split in SPLITS:
            os.truncate(folder / f"{split}.bin", 2 * state["counts"][split]["tokens"])
        os.truncate(folder / SEEN, 8 * state["seen"])
        print(f"going on: {sum(count['tokens'] for count in state['counts'].values()):,} tokens are there", flush=True)
        return state, _Seen(np.fromfile(folder / SEEN, np.uint64))
    for left in folder.iterdir():
        left.unlink()
    return {"asked": asked, "at": [0, 0], "counts": {split: {"documents": 0, "tokens": 0} for split in SPLITS},
            "names": {"val": [], "test": []}, "dropped": {"short": 0, "duplicate": 0}, "not_utf8": []}, _Seen()

def _save(folder, state):
    """Note how far a preparation has come, once all of it is on the disk."""
    for name in (*(f"{split}.bin" for split in SPLITS), SEEN, "tokenizer.tiktoken"):
        sync(folder / name)
    write_json(folder / STATE, state | {"seen": os.path.getsize(folder / SEEN) // 8})

def _write_tokens(texts, encoding, folder, state):
    """Encode (split, name, text) on all cores into .bin files; yields the characters so far, when they are in them."""
    counts, names, asked, characters = state["counts"], state["names"], state["asked"], 0
    encode = functools.partial(encoding.encode_to_numpy, disallowed_special=())        # of no text <|endoftext|> itself
    texts = iter(progress(texts, "encoding"))
    with contextlib.ExitStack() as stack:
        cores = ThreadPoolExecutor(os.cpu_count())
        stack.callback(cores.shutdown, cancel_futures=True)            # a Ctrl-C waits for no more than is under way
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "ab")) for split in SPLITS}
        while taken := [(one, cores.submit(encode, one[-1])) for one in take(texts, ENCODE_CHARS)]:
            for (split, name, text), encoded in taken:
                tokens = encoded.result()
                characters += len(text)
                if len(tokens) < asked["min_doc_tokens"]:
                    state["dropped"]["short"] += 1
                    continue
                files[split].write(np.append(encoding.eot_token, tokens).astype(np.uint16))
                counts[split]["documents"] += 1
                counts[split]["tokens"] += len(tokens) + 1
                if split in names:
                    names[split].append(name)
            for file in files.values():
                file.flush()
            if 0 < asked["max_tokens"] <= sum(count["tokens"] for count in counts.values()):
                break
            yield characters

def take(texts, size):
    """The next (split, name, text), of about `size` characters in all."""
    while size > 0 and (one := next(texts, None)):
        yield one
        size -= len(one[-1])

def ensure(source, vocab, min_doc_tokens=1, max_tokens=0):
    """The folder of a source's tokens: the source itself if it is one, found under data/, or prepared now.

    A folder that exists is used whatever its documents' least length. InputError if its vocabulary is not `vocab`.
    """
    folder = Path(source) if (Path(source) / "meta.json").exists() else folder_of(source, vocab)
    if not folder.exists():
        limit = f"documents of {min_doc_tokens:,} tokens or more"
        print(f"preparing {folder} from {source}, {limit}; for other data: --data PATH", flush=True)
        try:
            prepare(source, folder, vocab, min_doc_tokens=min_doc_tokens, max_tokens=max_tokens)
        except InputError:
            if not folder.exists():                         # else another process has made it meanwhile
                raise
    meta = read_meta(folder)
    if folder != Path(source) and full_name(meta["source"]) != full_name(source):
        raise InputError(f"{folder} was made from {meta['source']}, not from {source}: prepare that by python data.py "
                         f"{source} --out DIR, and give --data DIR")
    if (found := meta["vocab"]) != vocab:
        raise InputError(f"{folder} was made with a vocabulary of {found:,}, and this run has {vocab:,}: "
                         f"add --vocab {found}, or prepare the text again")
    return folder

def full_name(source):
    """A source's name if it has one, else its path: from here where it lies below, or from the root."""
    path, here = Path(os.path.realpath(source)), Path.cwd()
    full = f"./{path.relative_to(here)}" if here in path.parents else str(path)
    return source if source in NAMED_SOURCES else full

def folder_of(source, vocab):
    """data/<name>-v<vocab>: where a source's tokens lie unless --out says otherwise."""
    return Path("data") / f"{Path(full_name(source)).name.split('.')[0] or 'text'}-v{vocab}"


# ---- near copies: held-out documents that are nearly in train --------------------------------------------------------

def _drop_near(folder, eot, counts, names):
    """Leave out of val.bin.new and test.bin.new each document of which more than NEAR of the n-grams are in train.bin.

    counts, {split: documents, tokens}, is set right; names: {split: those of its documents}. Returns what meta.json
    says of it: names and shares of what went, the largest share of what is kept, and that one n-gram in `every` was
    compared. (Of more than HASHES in train a sample is: the same in each split, for it is drawn by their hashes.)
    """
    every = max(1, -(-counts["train"]["tokens"] // HASHES))
    found = [_distinct(hashes) for _, hashes in _ngrams(folder / "train.bin", eot, every)]
    known = _distinct(np.concatenate([np.zeros(0, np.uint64), *found]))
    near = {"ngram": NGRAM, "share": NEAR, "every": every, "kept": {}}
    for split in names:
        path, size = folder / f"{split}.bin", len(names[split])
        compared, shared = np.zeros((2, size), int)
        for document, hashes in _ngrams(path, eot, every):
            order = hashes.argsort()                        # numbers in their order are found ten times as fast
            document, hashes = document[order], hashes[order]
            hit = np.searchsorted(known, hashes, "left") < np.searchsorted(known, hashes, "right")
            compared += np.bincount(document, minlength=size)
            shared += np.bincount(document[hit], minlength=size)
        shares = shared / np.maximum(compared, 1)
        out = shares > NEAR
        near[split] = {names[split][i]: round(float(shares[i]), 4) for i in np.flatnonzero(out)}
        near["kept"][split] = round(float(shares[~out].max(initial=0)), 4)
        if near[split]:
            counts[split] = {"documents": size - len(near[split]), "tokens": _take_out(path, eot, out)}
    return near

def _take_out(path, eot, out):
    """Write FILE.new without those documents for which `out` is true; returns how many tokens it has."""
    with open(f"{path}.new", "wb") as file:
        for block, document in _blocks(path, eot):
            file.write(block[~out[document]])
        return file.tell() // 2

def _distinct(values):
    """The distinct values, sorted, as np.unique's, which takes 20 times as long for 2^18 of them (NumPy 2.4)."""
    values = np.sort(values)
    return values[np.flatnonzero(np.diff(values, prepend=~values[:1]))]

def _ngrams(path, eot, every):
    """(document, hash) of the n-grams within a document whose hash is a multiple of `every`, (n,) each, by blocks."""
    def chosen(part):
        block, document = part
        hashes = _polynomial(block, NGRAM)
        hashes ^= hashes >> 32                              # or else low bits would be of the tokens' low bits alone
        hashes *= 0xBF58476D1CE4E5B9
        hashes ^= hashes >> 32
        here = document[: len(hashes)]
        some = np.flatnonzero((here == document[NGRAM - 1 :]) & (hashes % every == 0))
        return here[some], hashes[some]

    blocks = _blocks(path, eot, NGRAM - 1)
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        while some := list(itertools.islice(blocks, 4 * os.cpu_count())):
            yield from cores.map(chosen, some)

def _polynomial(x, n):
    """The sum over j < n of x_(i+j) b^(n-1-j) modulo 2^64, b odd, for each i: from sums of half as many."""
    if n == 1 or len(x) < n:
        return x[: max(0, len(x) - n + 1)].astype(np.uint64)
    power, half = n // 2, _polynomial(x, n // 2)
    whole = half[:-power] * np.uint64(pow(BASE, power, 2**64)) + half[power:]
    return whole[:-1] * np.uint64(BASE) + x[n - 1 :] if n % 2 else whole

def _blocks(path, eot, more=0):
    """(tokens, the number of each one's document) of a file by blocks, each with `more` tokens of the next one."""
    first = -1
    for start in progress(range(0, os.path.getsize(path) // 2, BLOCK), "reading back", unit=" blocks"):
        block = np.fromfile(path, np.uint16, BLOCK + more, offset=2 * start)
        yield block, first + np.cumsum(block == eot)
        first += np.count_nonzero(block[:BLOCK] == eot)

def _lengths(path, eot):
    """Tokens of each document of a file, <|endoftext|> not counted, (n,): by blocks, for it may exceed the memory."""
    starts = [i * BLOCK + np.flatnonzero(block == eot) for i, (block, _) in enumerate(_blocks(path, eot))]
    return np.diff(np.concatenate([*starts, [os.path.getsize(path) // 2]])) - 1


# ---- reading: a folder of tokens to batches and documents ------------------------------------------------------------

def read_meta(folder):
    """meta.json of a prepared folder; InputError if there is none, or if it is not one of ours."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise InputError(f"{folder} is not a folder of tokens (no meta.json): make one with data.py")
    meta = read_json(path, META)
    if "near" in meta:                                      # earlier versions did not look for near copies
        check_shape(meta["near"], NEAR_COPIES, f"{path}: near")
    if meta["eot"] != meta["vocab"] - 1:
        raise InputError(f"{path}: eot must be the last entry of the vocabulary, {meta['vocab'] - 1}: it was edited")
    return meta

def open_split(folder, split):
    """The tokens of one split, uint16 (n,), mapped from disk. InputError if the file is not what meta.json says."""
    path, written = Path(folder) / f"{split}.bin", read_meta(folder)["splits"][split]
    if not path.exists():
        raise InputError(f"{path} is missing: prepare the folder again with python data.py")
    if not fingerprint(path).items() <= written.items():
        raise InputError(f"{path} has not the size and hash that meta.json says: prepare the folder again")
    return np.memmap(path, np.uint16, "r") if written["bytes"] else np.zeros(0, np.uint16)   # no tokens, no map

def windows(tokens, context):
    """How many windows of `context` inputs, each with its next token as target, fit the tokens. InputError if none."""
    count = (len(tokens) - 1) // context
    if count < 1:
        raise InputError(f"the data has {len(tokens):,} tokens, and one window needs {context + 1:,}: give more text")
    return count

def batch(tokens, context, batch_size, seed, step):
    """The batch of one step, int64 (B, T+1): inputs are [:, :-1], targets [:, 1:]. A pure function of its arguments.

    An epoch is a permutation of the corpus's non-overlapping windows, so that each token is seen once an epoch. They
    take no heed of documents. In each epoch but the first they begin elsewhere: the end is followed by the beginning.
    """
    count = windows(tokens, context)
    index = range(step * batch_size, (step + 1) * batch_size)
    starts = [_starts(len(tokens), context, seed, i // count)[i % count] for i in index]
    return tokens[np.add.outer(starts, np.arange(context + 1)) % len(tokens)].astype(np.int64)         # (B, T+1)

@functools.lru_cache(maxsize=2)     # a batch may straddle two epochs
def _starts(size, context, seed, epoch):
    """Where the windows of an epoch begin, in its order; all but the first epoch's are shifted by one number."""
    rng = np.random.default_rng([seed, epoch])
    starts = rng.permutation((size - 1) // context) * context
    return starts + rng.integers(size) if epoch else starts

def split_documents(tokens, eot):
    """The documents of a split as slices of it, each <|endoftext|> and then its own tokens."""
    starts = np.flatnonzero(tokens == eot)
    return np.split(tokens, starts[1:]) if len(starts) else []


# ---- objectives: what a model is asked of a batch --------------------------------------------------------------------

SHARE, HIDDEN, OTHER = 0.15, 0.8, 0.1   # of a sequence are asked for; of these hidden, and changed to any token

def next_tokens(batch, vocab, rng):
    """{"tokens", "targets"}, (B, T) each, of (B, T+1): at every token the one that follows."""
    return {"tokens": batch[:, :-1], "targets": batch[:, 1:]}

def masked_tokens(batch, vocab, rng):
    """{"tokens" (B, T), "targets" (B, k), "at" (B, k)} of (B, T+1): at k places, what stood there (Devlin et al. 2019,
    section 3.1). k is SHARE of T, rounded; of these places 8 in 10 hold <|endoftext|>, one any token, one its own.
    """
    tokens = batch[:, :-1].copy()
    B, T = tokens.shape
    at = np.sort(rng.random((B, T)).argsort(-1)[:, : max(1, round(SHARE * T))])         # (B, k)
    targets, draw = np.take_along_axis(tokens, at, -1), rng.random(at.shape)
    other = np.where(draw < HIDDEN + OTHER, rng.integers(vocab, size=at.shape), targets)
    np.put_along_axis(tokens, at, np.where(draw < HIDDEN, vocab - 1, other), -1)
    return {"tokens": tokens, "targets": targets, "at": at}

OBJECTIVES = {"lm": next_tokens, "mlm": masked_tokens}


# ---- as a script -----------------------------------------------------------------------------------------------------

def show(folder):
    """Print what a prepared folder holds, once its files are what meta.json says."""
    folder, meta = Path(folder), read_meta(folder)
    limit = f"documents of {meta['min_doc_tokens']:,} tokens or more"
    print(f"{folder}: from {meta['source']}, a vocabulary of {meta['vocab']:,}, {limit}")
    print("left out: {short:,} short, {duplicate:,} duplicate, {not_utf8:,} not UTF-8".format(**meta["dropped"]))
    for split in ("val", "test") if "near" in meta else ():
        names, most = [*meta["near"][split]], meta["near"]["kept"][split]
        named = f" ({', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)})" * bool(names)
        print(f"left out of {split}, as nearly in train: {len(names):,}{named}; the others share {most} at most")
    print(f"\n{'split':6}{'documents':>11}{'tokens':>15}{'median length':>16}")
    for split in SPLITS:
        tokens, lengths = open_split(folder, split), _lengths(folder / f"{split}.bin", meta["eot"])
        print(f"{split:6}{len(lengths):11,}{len(tokens):15,}{int(np.median(lengths) if len(lengths) else 0):16,}")
    encoding, val = run_tokenizer(folder, meta), folder / "val.bin"
    sample = open_split(folder, "val")[1 : 1 + min(200, _lengths(val, meta["eot"])[0])]
    print(f"\nthe first {len(sample)} tokens of the first val document, decoded:\n\n{encoding.decode(sample.tolist())}")

def main():
    parser = CommandLine(description="Turn text into tokens on disk, or show what a prepared folder holds.",
                         epilog="example: python data.py fineweb --vocab 32000 --min-doc-tokens 4000 --max-tokens 7e8")
    mini, size, add = PRESETS["mini"], {"type": at_least(1), "metavar": "N"}, parser.add_argument
    either = parser.add_mutually_exclusive_group(required=True).add_argument
    either("source", nargs="?",
           help=f"{', '.join(NAMED_SOURCES)}, or a file or folder of {' '.join(READERS)} (.gz, .xz)")
    either("--show", metavar="DIR", help="print a prepared folder's counts, median document length and a sample")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--vocab", type=whole, metavar="N", default=mini.model.vocab_size,
           help="entries of the tokenizer to train (default: %(default)s)")
    either("--tokenizer", metavar="FILE", help="use a ready tokenizer, a .tiktoken file")
    add("--min-doc-tokens", **size, default=mini.train.min_doc_tokens, help="drop shorter (default: %(default)s)")
    add("--max-doc-chars", **size, default=MAX_DOC_CHARS, help="cut longer at a line's end (default: %(default)s)")
    add("--max-tokens", "--tokens", type=at_least(0), metavar="N", default=0,
        help="stop after so many, as 700M (default: 0, no end)")
    add("--out", metavar="DIR", help="the folder to write (default: data/<name>-v<vocab>)")
    add("--overwrite", action="store_true", help="replace the folder if it exists")
    with parser.one_line_errors():
        args = vars(parser.parse_args())
        folder = args.pop("show")
        show(prepare(**args) if folder is None else folder)

if __name__ == "__main__":
    main()
