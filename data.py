"""Text to tokens on disk; tokens on disk to batches. B batch, T context length.

A source is a text with a name, such as the running Python's standard library, or a file or folder of text. A document
is a file, what lies between two lines <|endoftext|> of a file, or a row of a .jsonl file. Documents are read into
memory, split by a hash of their text, encoded with a byte-level BPE, and written to

    data/<name>-v<vocab>/   train.bin val.bin test.bin   uint16; each document is <|endoftext|> and then its own tokens
                            tokenizer.tiktoken           tiktoken's own text format: "base64 rank" lines
                            meta.json                    counts, source and SHA-256 of each file; written last

engine/corpora.py prepares such a folder from FineWeb, from .parquet files and from large .jsonl files, which need not
fit in memory. Whatever is not used, a file, a row or a document, is counted and named.
"""

import base64
import codecs
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
import unicodedata
from pathlib import Path

import common

# common comes first: it says in one line which package is missing
# isort: split
import numpy as np
import rustbpe
import tiktoken

from common import CommandLine, at_least, hash_file, read_json, whole, write_text
from config import PRESETS, SPLITS, InputError, did_you_mean, flag_of

EOT = "<|endoftext|>"
STDLIB = "50ac334affdbb2cd2ad6de6fa1ee9ca7711d72d70a6163343cca69e7b28af2dc"          # of train.bin, of Python 3.11.7
META = {"source": str, "vocab": int, "eot": int, "tokenizer.sha256": str, "dropped": dict, "near.val": dict,
        "near.test": dict, **{f"splits.{split}.{name}": kind for split in SPLITS
                              for name, kind in (("documents", int), ("tokens", int), ("sha256", str))}}

# How text falls into pieces before BPE, after cl100k_base (tiktoken): words with the blank before them, up to three
# digits, runs of signs, line ends, blanks. Possessive quantifiers keep it linear on long runs.
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                 r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")

# ---- sources: a name or a path to texts ------------------------------------------------------------------------------

def source_of(name):
    """The module that makes the batches of --data: tasks.py, which is imported for task:NAME alone, or this one.

    Both have the functions ensure, open_split, batch, held_out and run_tokenizer.
    """
    return importlib.import_module("tasks" if name.startswith("task:") else "data")

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

def documents(source, left_out=None):
    """(name, text) of each document of a source. A name is a path within it, and a part or row: a.txt:2, b.jsonl:17."""
    left_out = LeftOut() if left_out is None else left_out
    for name, path in find_files(source, left_out):
        try:
            read = read_rows if path.suffix.lower() == ".jsonl" else read_parts
            for where, text in read(path, name, left_out):
                if text and not text.isspace():
                    yield where, text
                else:
                    left_out.add(EMPTY, where)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None

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

# ---- the tokenizer ---------------------------------------------------------------------------------------------------

def train_tokenizer(texts, vocab, or_fewer=False):
    """{token bytes: rank} of a byte-level BPE of `vocab` entries with <|endoftext|>.

    InputError if the text has pairs for fewer entries, unless these will do.
    """
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, vocab - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in tokenizer.get_mergeable_ranks()}
    if len(ranks) < vocab - 1:
        if not or_fewer:
            raise InputError(f"the training text has pairs for --vocab {len(ranks) + 1} only: give that, or more text")
        print(f"the training text has pairs for {len(ranks) + 1:,} entries only, and so the tokenizer has that many")
    return ranks

def read_ranks(path):
    """{token bytes: rank} of a .tiktoken file; InputError for another format."""
    ranks = {}          # not by tiktoken's own loader: it caches by path, and would return what a file held before
    text = common.read_text(path)
    try:
        for token, rank in map(str.split, text.splitlines()):
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise InputError(f'{path} is not a file of "base64 rank" lines, tiktoken\'s text format: {error}') from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise InputError(f"{path} is not a byte-level BPE: its ranks must be 0, 1, 2, ..., the 256 bytes among them")
    return ranks

def write_ranks(path, ranks):
    """Write {token bytes: rank} in tiktoken's text format."""
    lines = [f"{base64.b64encode(token).decode()} {ranks[token]}\n" for token in sorted(ranks, key=ranks.get)]
    write_text(path, "".join(lines))

def make_tokenizer(ranks):
    """A tiktoken.Encoding; <|endoftext|> is its last rank + 1."""
    return tiktoken.Encoding("data.py", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})

def run_tokenizer(folder, meta):
    """The tokenizer in a run directory or a folder of tokens; InputError unless its hash is the one in meta."""
    if meta["source"].startswith("task:"):
        return source_of(meta["source"]).run_tokenizer(folder, meta)
    path = Path(folder) / "tokenizer.tiktoken"
    if not path.exists() or hash_file(path) != meta["tokenizer"]["sha256"]:
        raise InputError(f"{path} is missing, or is not the tokenizer that was recorded")
    return make_tokenizer(read_ranks(path))

# ---- preparing: a source to a folder of tokens -----------------------------------------------------------------------

def target(source, out=None, vocab=None, tokenizer=None):
    """(folder, size of the vocabulary, ranks of a ready tokenizer or None) of a preparation with these flags."""
    if vocab is not None and tokenizer is not None:
        raise InputError("--vocab is the size of the tokenizer: leave out --vocab, or --tokenizer")
    ranks = None if tokenizer is None else read_ranks(tokenizer)
    vocab = len(ranks) + 1 if ranks else PRESETS["mini"]["vocab"] if vocab is None else vocab
    if not 257 <= vocab <= 2**16:
        raise InputError(f"--vocab must be from 257 (256 bytes and {EOT}) to 65,536 (tokens are uint16), got {vocab}")
    out = folder_of(source, vocab) if out is None else Path(out)
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise InputError(f"--out must be a folder, and {file} is a file")
    return out, vocab, ranks

PREPARATION = {"min_doc_tokens": 1, "max_tokens": 0, "max_doc_chars": 2**20}      # its settings beside the vocabulary

def fill_in(source, given, defaults):
    """The settings of a preparation: those given; else, for a text with a name, the usual ones; else the defaults."""
    defaults = defaults if source in NAMED_SOURCES else {}
    return {name: given[name] if given.get(name) is not None else defaults.get(name, default)
            for name, default in PREPARATION.items()}

def prepare(source, out=None, vocab=None, tokenizer=None, overwrite=False, defaults=PRESETS["mini"], or_fewer=None,
            **given):
    """Turn a source into a folder of tokens, `out` or data/<name>-v<vocab>; returns its path.

    A tokenizer of `vocab` entries is trained on the training documents (of fewer, if the text has pairs for fewer and
    or_fewer says so: by default if no vocab is given), or `tokenizer` is a .tiktoken file. `given` and `usual` are
    settings as fill_in takes them: documents with fewer than min_doc_tokens tokens are dropped, those with more than
    max_doc_chars characters are cut, and encoding ends at max_tokens (0: never). Copies are dropped, and so are
    held-out documents that are nearly in train.
    """
    settings = fill_in(source, given, defaults)
    or_fewer = vocab is None if or_fewer is None else or_fewer
    out, vocab, ranks = target(source, out, vocab, tokenizer)
    check_new(out, overwrite)
    print(f"preparing {out} from {source}", flush=True)
    left_out = LeftOut()
    found = list(drop_copies(documents(source, left_out), settings["min_doc_tokens"], left_out))
    made, dropped = None, left_out
    if are_many(found):
        made = make_splits(split_by_hash(found), vocab, ranks, or_fewer, settings, dropped := LeftOut(left_out))
    if not made and found and not settings["max_tokens"] and settings["min_doc_tokens"] == 1:
        print(f"too few documents to be split by a hash of their text ({len(found)}): the last tenth of the text "
              "becomes val, the tenth before that test")
        few = split_by_tenths(list(drop_near_copies(found, dropped := LeftOut(left_out))))
        made = make_splits(few, vocab, ranks, or_fewer, settings, dropped)
    if not made:
        dropped.print()
        remedy = next((remedy for reason, remedy in REMEDIES.items() if reason in dropped), "give more text")
        remedy = "leave --max-tokens out, or give more documents" if settings["max_tokens"] else remedy
        raise InputError(f"{source} has too little text for train and val: {remedy}")
    ranks, tokens, near = made
    meta = {"source": full_name(source), "vocab": len(ranks) + 1, "pattern": SPLIT_PATTERN, **settings,
            "python": sys.version.split()[0], "content": hash_source(source)}
    with common.lock(out):
        check_new(out, overwrite)                           # another process may have made it meanwhile
        write_text(out / "meta.json", json.dumps(meta))     # not whole yet, and from now on the folder is ours
        write_ranks(out / "tokenizer.tiktoken", ranks)
        for split in SPLITS:
            together = np.concatenate([*tokens[split].values(), np.zeros(0, np.uint16)])
            common.write_bytes(out / f"{split}.bin", together.tobytes())
        write_meta(out, meta, {split: len(documents) for split, documents in tokens.items()}, dropped, near)
    if (source, vocab, meta["min_doc_tokens"]) == ("stdlib", 1024, 2048) and hash_file(out / "train.bin") != STDLIB:
        print(f"Python {meta['python']}'s library is another text than that of README's numbers, Python 3.11.7's")
    return out

def are_many(found):
    """Whether a hash of their text splits documents well: some fall to val, and train has half of the text or more."""
    sizes = dict.fromkeys(SPLITS, 0)
    for split, _, text in split_by_hash(found):
        sizes[split] += len(text)
    return sizes["val"] > 0 and sizes["train"] >= sum(sizes.values()) / 2

def make_splits(texts, vocab, ranks, or_fewer, settings, left_out):
    """(ranks, {split: {name: tokens}}, near copies) of (split, name, text); None if train or val is left empty."""
    texts = list(cut_long(texts, settings, left_out))
    training = [text for split, _, text in texts if split == "train"]
    if not training:
        return None
    if ranks is None:
        print(f"training a tokenizer of {vocab:,} entries on {sum(map(len, training)):,} characters", flush=True)
        ranks = train_tokenizer(training, vocab, or_fewer)
    tokens = encode_texts(texts, make_tokenizer(ranks), settings, left_out)
    near = drop_near(tokens, {(split, name): text for split, name, text in texts})
    left_out.add(NEAR, *near["val"], *near["test"])
    return (ranks, tokens, near) if tokens["train"] and tokens["val"] else None

def write_meta(out, settings, documents, left_out, near):
    """Write meta.json, which ends a preparation: documents is their number in each split."""
    splits = {split: {"documents": documents[split], "tokens": os.path.getsize(out / f"{split}.bin") // 2,
                      "sha256": hash_file(out / f"{split}.bin")} for split in SPLITS}
    meta = settings | {"eot": settings["vocab"] - 1, "dropped": left_out, "near": near, "splits": splits,
                       "tokenizer": {"sha256": hash_file(out / "tokenizer.tiktoken")}}
    write_text(out / "meta.json", json.dumps(meta, indent=1) + "\n")

def check_new(out, overwrite):
    """InputError unless a folder may be written: an empty one, an unfinished one or, by --overwrite, one of ours."""
    if not common.holds_files(out):
        return
    if not (out / "meta.json").exists() or read_json(out / "meta.json").get("pattern") != SPLIT_PATTERN:
        raise InputError(f"{out} exists and was not made by data.py, so it is left as it is: choose another --out")
    if is_whole(out) and not overwrite:
        raise InputError(f"{out} exists: use it with --data {out}, or replace it with --overwrite")

def encode_texts(texts, tokenizer, settings, left_out):
    """{split: {name: tokens of a document, <|endoftext|> first}} of (split, name, text), encoded on all cores."""
    splits = {split: {} for split in SPLITS}
    encoded = tokenizer.encode_ordinary_batch([text for *_, text in texts], num_threads=os.cpu_count())
    total = 0
    for (split, name, _), tokens in zip(texts, encoded, strict=True):
        if len(tokens) < settings["min_doc_tokens"]:
            left_out.add(SHORT, name)
        elif 0 < settings["max_tokens"] <= total:
            left_out.add(BEYOND, name)
        else:
            splits[split][name] = np.array([tokenizer.eot_token, *tokens], np.uint16)
            total += len(tokens) + 1
    return splits

def ensure(source, vocab, prepare=prepare, defaults=PRESETS["mini"], given=()):
    """(folder, meta.json) of a source's tokens: the source itself if it is one, found under data/, or prepared now.

    usual: settings of a preparation, for a text with a name; given: those on the command line, "vocab" among them. What
    is given must be the folder's. A text with pairs for fewer than `vocab` entries gets fewer if vocab is not given.
    """
    given = dict(given)
    folder = Path(source) if is_whole(Path(source)) else folder_of(source, vocab)
    settings = {name: given[name] for name in PREPARATION if name in given}
    if not is_whole(folder):
        with common.lock(folder.parent, wait=True):         # of several runs that begin at once, one prepares the data
            if not is_whole(folder):
                show(prepare(source, folder, vocab, defaults=defaults, or_fewer="vocab" not in given, **settings))
    meta = read_meta(folder)
    if folder != Path(source):
        content = hash_source(source)
        if (meta["source"], meta.get("content", content)) != (full_name(source), content):
            raise InputError(f"{folder} is from {meta['source']}, and {source} is another text or has changed since: "
                             f"remove that folder, or prepare another with python data.py {source} --out DIR")
    if hash_file(folder / "tokenizer.tiktoken") != meta["tokenizer"]["sha256"]:
        raise InputError(f"{folder}/tokenizer.tiktoken is not the one that was recorded: prepare the folder again")
    if "vocab" in given and meta["vocab"] != vocab:
        raise InputError(f"{folder} has a vocabulary of {meta['vocab']}, and --vocab {vocab} was given: leave it out, "
                         "or prepare the text again")
    for name, value in settings.items():
        if meta.get(name, value) != value:
            flag = flag_of(name)
            raise InputError(f"{folder} was prepared with {flag} {meta[name]}, and {flag} {value} was given: leave it "
                             f"out, or prepare another folder with python data.py {shlex.quote(meta['source'])} {flag} "
                             f"{value} --out DIR")
    return folder, meta

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

def is_whole(folder):
    """Whether a folder of tokens was prepared to its end."""
    return (folder / "meta.json").exists() and "splits" in read_json(folder / "meta.json")

def full_name(source):
    """A source's name if it has one, else its path: from here where it lies below, or from the root."""
    if source in NAMED_SOURCES:
        return source
    path = Path(os.path.realpath(source))
    return f"./{path.relative_to(Path.cwd())}" if Path.cwd() in path.parents else str(path)

def folder_of(source, vocab):
    """data/<name>-v<vocab>: where a source's tokens lie unless --out says otherwise."""
    return Path("data") / f"{Path(full_name(source)).name.split('.')[0] or 'text'}-v{vocab}"

# ---- reading: a folder of tokens to batches and documents ------------------------------------------------------------

def read_meta(folder):
    """meta.json of a folder that data.py has prepared; InputError if there is none, or if it is not whole."""
    return read_json(Path(folder) / "meta.json", **META)

def open_split(folder, split):
    """The tokens of one split, uint16 (n,), mapped from disk. InputError if the file is not what meta.json says."""
    path = Path(folder) / f"{split}.bin"
    meta = read_meta(folder)
    if not path.exists() or hash_file(path) != meta["splits"][split]["sha256"]:
        raise InputError(f"{path} is missing or has not the hash that meta.json says: prepare the folder again")
    if path.stat().st_size % 2:
        raise InputError(f"{path} has an odd number of bytes, and a token has two: prepare the folder again")
    tokens = np.memmap(path, np.uint16, "r") if path.stat().st_size else np.zeros(0, np.uint16)
    if tokens.max(initial=0) >= meta["vocab"]:
        raise InputError(f"{path} has a token {tokens.max()}, beyond the vocabulary of {meta['vocab']:,} in meta.json: "
                         "prepare the folder again")
    return tokens

def count_windows(tokens, context):
    """How many windows of `context` inputs, each with its next token as target, fit the tokens. InputError if none."""
    if len(tokens) <= context:
        raise InputError(f"{getattr(tokens, 'filename', 'the data')} has {len(tokens):,} tokens, and one window needs "
                         f"{context + 1:,}: give more text")
    return (len(tokens) - 1) // context

def batch(tokens, context, batch_size, seed, step):
    """(tokens, targets) of one step, int64 (B, T) each; a target is the next token. A pure function of its arguments.

    An epoch is a permutation of the corpus's non-overlapping windows, so that each token is seen once an epoch. They
    take no heed of documents. In each epoch but the first they begin elsewhere: the end is followed by the beginning.
    """
    count = count_windows(tokens, context)
    index = range(step * batch_size, (step + 1) * batch_size)
    starts = [window_starts(len(tokens), context, seed, i // count)[i % count] for i in index]
    windows = tokens[np.add.outer(starts, np.arange(context + 1)) % len(tokens)].astype(np.int64)      # (B, T+1)
    return windows[:, :-1], windows[:, 1:]

def held_out(folder, context, most):
    """A batch of val's first windows, as many as there are or `most`."""
    tokens = open_split(folder, "val")
    context = min(context, max(1, len(tokens) - 1))         # a small text has one shorter window
    return batch(tokens, context, min(most, count_windows(tokens, context)), 0, 0)

@functools.lru_cache(maxsize=2)     # a batch may straddle two epochs
def window_starts(size, context, seed, epoch):
    """Where the windows of an epoch begin, in its order; all but the first epoch's are shifted by one number."""
    rng = np.random.default_rng([seed, epoch])
    starts = rng.permutation((size - 1) // context) * context
    return starts + rng.integers(size) if epoch else starts

def split_documents(tokens, eot):
    """The documents of a split as slices of it, each <|endoftext|> and then its own tokens."""
    starts = np.flatnonzero(tokens == eot)
    return np.split(tokens, starts[1:]) if len(starts) else []

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

# ---- as a script -----------------------------------------------------------------------------------------------------

def show(folder):
    """Print what a prepared folder holds, and what was left out of it."""
    meta = read_meta(folder)
    print(f"{folder}: from {meta['source']}, a vocabulary of {meta['vocab']:,}")
    for split, counts in meta["splits"].items():
        print(f"{split:6}{counts['documents']:9,} documents{counts['tokens']:14,} tokens")
    LeftOut((reason, (value, []) if isinstance(value, int) else value)      # an older folder has the counts alone
            for reason, value in meta["dropped"].items() if value).print()
    if not {"share", "minhash"} & meta["near"].keys():
        print("held-out documents that are nearly in train were not looked for")

def make_parser():
    """The flags of a preparation."""
    parser = CommandLine(description="Turn text into tokens on disk, and show what a folder of them holds.",
                         epilog="example: python data.py my_books/ --vocab 8192")
    mini = PRESETS["mini"]                                  # whose settings are the defaults
    add = parser.add_argument
    add("source", help=f"{', '.join(NAMED_SOURCES)}, a file or folder of text, or a folder that data.py has made")
    add("--vocab", type=whole,
        help=f"entries of the tokenizer (default: {mini['vocab']}, or as many as the text has pairs for)")
    add("--tokenizer", metavar="FILE", help="use a ready tokenizer, a .tiktoken file")
    add("--min-doc-tokens", type=at_least(1), metavar="N",
        help=f"drop documents with fewer tokens (default: 1; of a text with a name {mini['min_doc_tokens']})")
    add("--max-doc-chars", type=at_least(1), metavar="N",
        help=f"cut documents with more characters at a line's end (default: {PREPARATION['max_doc_chars']:,})")
    add("--max-tokens", type=at_least(0), metavar="N", help="stop after this many tokens (default: 0, no end)")
    add("--out", type=common.folder, metavar="DIR", help="the folder to write (default: data/<name>-v<vocab>)")
    add("--overwrite", action="store_true", help="prepare the folder again, if data.py made it")
    return parser

def main():
    parser = make_parser()
    with parser.one_line_errors():
        args = parser.parse_args()
        made = is_whole(Path(args.source))
        if made and len(sys.argv) > 2:
            raise InputError(f"{args.source} is a folder of tokens: leave the flags out, or give the text itself")
        if not made and is_large(args.source):
            raise InputError(f"{args.source} {LARGE}: python -m engine.corpora takes the same flags")
        show(args.source if made else prepare(**vars(args)))

if __name__ == "__main__":
    main()
