"""Text to tokens on disk; tokens on disk to batches. B batch, T context length.

A source is the running Python's standard library, or a file or folder of text. Its documents are read into memory,
split by a hash of their text, encoded with a byte-level BPE, and written to

    data/<name>-v<vocab>/   train.bin val.bin test.bin   uint16; each document is <|endoftext|> and then its own tokens
                            tokenizer.tiktoken           tiktoken's own text format: "base64 rank" lines
                            meta.json                    counts, source and SHA-256 of each file; written last

engine/corpora.py prepares such a folder from FineWeb and from .parquet and .jsonl files, which need not fit in memory.
"""

import base64
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import common

# common comes first: it says in one line which package is missing
# isort: split
import numpy as np
import rustbpe
import tiktoken

from common import CommandLine, at_least, hash_file, read_json, whole, write_text
from config import PRESETS, SPLITS, InputError, did_you_mean

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

NAMED_SOURCES = ("stdlib", "packages", "fineweb", "fineweb-edu")

TEXT = (".txt", ".md", ".py", ".rst")
ROWS = (".jsonl", ".parquet")

def visible_files(source, suffixes):
    """The files of a path with these endings, in sorted order, without hidden ones and the log of a run."""
    path = Path(source)
    root = path if path.is_dir() else path.parent
    paths = sorted(path.rglob("*")) if path.is_dir() and source else [path]
    return [p for p in paths if p.suffix.lower() in suffixes and p.is_file() and p.name != "log.jsonl"
            and "/." not in f"/{p.relative_to(root)}"]

def is_large(source):
    """Whether engine/corpora.py reads a source."""
    return source in NAMED_SOURCES[2:] or bool(visible_files(source, ROWS))

def find_files(source):
    """(name, path) of the readable files of a source, in sorted order."""
    if source == "stdlib":
        root = Path(os.__file__).parent
        differs = {"site-packages", "dist-packages", "test", "tests", "idle_test"}         # from machine to machine
        files = sorted(p for p in root.rglob("*.py") if not differs & set(p.relative_to(root).parts))
        return [(str(p.relative_to(root)), p) for p in files]
    if source == "packages":                                # the Python of the installed requirements
        names = re.findall(r"^[\w-]+", common.read_text(Path(__file__).parent / "requirements.txt"), re.MULTILINE)
        files = [file for name in sorted(names) for file in importlib.metadata.distribution(name).files]
        return [(str(file), Path(file.locate())) for file in sorted(files) if file.suffix == ".py"]
    path = Path(source)
    if source == "" or not path.is_file() and not path.is_dir():
        raise InputError(f"{source}: no such file or folder; a source is {', '.join(NAMED_SOURCES)} or a path"
                         f"{did_you_mean(source, NAMED_SOURCES)}")
    root = path if path.is_dir() else path.parent
    if files := [(str(p.relative_to(root)), p) for p in visible_files(source, TEXT)]:
        return files
    if is_large(source):
        raise InputError(f"{source} has rows, not texts: python -m engine.corpora {source} prepares them")
    raise InputError(f"{source} holds no file that ends in {' '.join(TEXT + ROWS)}")

def documents(source):
    """(name, text) of each document of a source: a file, or what lies between the lines <|endoftext|> of one.

    Files that are not UTF-8 are left out and named. A name is a path within the source.
    """
    skipped = []
    for name, path in find_files(source):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            skipped.append(name)
            continue
        for part, piece in enumerate(re.split(r"^<\|endoftext\|>\n?", text, flags=re.MULTILINE), 1):
            yield f"{name}:{part}" if part > 1 else name, piece
    if skipped:
        print(f"left out, since they are not UTF-8: {len(skipped)} files, such as {', '.join(skipped[:3])}")

def cut_text(text, max_chars):
    """The pieces of a text, cut at a line's end where there is one."""
    while text:
        end = max_chars if len(text) < max_chars else text.rfind("\n", 0, max_chars) + 1 or max_chars
        yield text[:end]
        text = text[end:]

def hash_text(text):
    """64 bits of a text's SHA-256; a lone surrogate, which has no UTF-8, counts as "?"."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", errors="replace")).digest()[:8], "big")

def split_texts(texts, max_chars, min_bytes, dropped, held_out=1 / 14):     # a split's share: 50M of the paper's 700M
    """(split, name, text) of each piece of (name, text) not seen before, of max_chars characters at most.

    The split depends on the whole text alone, and so all pieces of a text fall to the same one.
    """
    seen = set()
    for name, text in texts:
        share = hash_text(text) / 2**64
        split = "val" if share < held_out else "test" if share < 2 * held_out else "train"
        for part, piece in enumerate(cut_text(text, max_chars), 1):
            encoded = piece.encode("utf-8", errors="replace")
            key = hash_text(piece)
            if len(encoded) < min_bytes:                    # a token is a byte at least
                dropped["short"] += 1
            elif key in seen:
                dropped["duplicate"] += 1
            else:
                seen.add(key)
                yield split, f"{name}#{part}" if part > 1 else name, encoded.decode("utf-8")

def split_file(text):
    """(split, name, text) of one text, cut at line ends: its last tenth is val, the tenth before that test."""
    first, second = (text.rfind("\n", 0, len(text) * tenths // 10) + 1 or len(text) * tenths // 10 for tenths in (8, 9))
    print("documents are too few to be divided: the last tenth of the text becomes val, the tenth before that test")
    return [("train", "first", text[:first]), ("test", "middle", text[first:second]), ("val", "last", text[second:])]

# ---- the tokenizer ---------------------------------------------------------------------------------------------------

def train_tokenizer(texts, vocab):
    """{token bytes: rank} of a byte-level BPE of `vocab` entries with <|endoftext|>. InputError for too little text."""
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, vocab - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in tokenizer.get_mergeable_ranks()}
    if len(ranks) < vocab - 1:
        raise InputError(f"the training text has pairs for --vocab {len(ranks) + 1} only: give that, or more text")
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
    vocab = len(ranks) + 1 if ranks else vocab or PRESETS["mini"]["vocab"]
    if not 257 <= vocab <= 2**16:
        raise InputError(f"--vocab must be from 257 (256 bytes and {EOT}) to 65,536 (tokens are uint16), got {vocab}")
    out = folder_of(source, vocab) if out is None else Path(out)
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise InputError(f"--out must be a folder, and {file} is a file")
    return out, vocab, ranks

def prepare(source, out=None, vocab=None, tokenizer=None, min_doc_tokens=None, max_tokens=0, max_doc_chars=2**20,
            overwrite=False, usual=1):
    """Turn a source into a folder of tokens, `out` or data/<name>-v<vocab>; returns its path.

    A tokenizer of `vocab` entries is trained on the training documents, or `tokenizer` is a .tiktoken file. Documents
    with fewer than min_doc_tokens are dropped (None: fewer than the usual number, if enough are left), and held-out
    ones that are nearly in train. Encoding ends at max_tokens (0: never).
    """
    out, vocab, ranks = target(source, out, vocab, tokenizer)
    check_new(out, overwrite)
    found = list(documents(source))
    for least in [min_doc_tokens] if min_doc_tokens else [usual, 1]:
        dropped = {"short": 0, "duplicate": 0}
        texts = list(split_texts(found, max_doc_chars, least, dropped))
        if {"train", "val"} <= {split for split, _, _ in texts}:
            break
    else:
        if len(found) > 1 and min_doc_tokens and dropped["short"]:
            raise InputError(f"{source}: {dropped['short']} documents are shorter than --min-doc-tokens, "
                             f"{min_doc_tokens}, and those that are left are too few: give a smaller one, or more text")
        least = 1
        texts = split_file("".join(text for _, text in found))
    if not any(text for _, _, text in texts):
        raise InputError(f"{source} has no text to train on")
    print(f"preparing {out} from {source}", flush=True)
    if ranks is None:
        training = [text for split, _, text in texts if split == "train"]
        print(f"training a tokenizer of {vocab:,} entries on {sum(map(len, training)):,} characters", flush=True)
        ranks = train_tokenizer(training, vocab)
    tokens = encode_texts(texts, make_tokenizer(ranks), least, max_tokens, dropped)
    near = drop_near(tokens)
    check_counts(source, tokens, dropped, [*near["val"]], max_tokens)
    settings = {"source": full_name(source), "vocab": vocab, "pattern": SPLIT_PATTERN, "max_tokens": max_tokens,
             "min_doc_tokens": least, "max_doc_chars": max_doc_chars, "python": sys.version.split()[0],
             "content": hash_source(source)}
    with common.lock(out):
        check_new(out, overwrite)                           # another process may have made it meanwhile
        write_text(out / "meta.json", json.dumps(settings))    # not whole yet, and from now on the folder is ours
        write_ranks(out / "tokenizer.tiktoken", ranks)
        for split in SPLITS:
            together = np.concatenate([*tokens[split].values(), np.zeros(0, np.uint16)])
            common.write_bytes(out / f"{split}.bin", together.tobytes())
        counts = {split: len(documents) for split, documents in tokens.items()}
        write_meta(out, settings, counts, dropped, near)
    if (source, vocab, least) == ("stdlib", 1024, 2048) and hash_file(out / "train.bin") != STDLIB:
        print(f"Python {settings['python']}'s library is another text than that of README's numbers, Python 3.11.7's")
    return out

def write_meta(out, settings, documents, dropped, near):
    """Write meta.json, which ends a preparation: documents is their number in each split."""
    splits = {split: {"documents": documents[split], "tokens": os.path.getsize(out / f"{split}.bin") // 2,
                      "sha256": hash_file(out / f"{split}.bin")} for split in SPLITS}
    meta = settings | {"eot": settings["vocab"] - 1, "dropped": dropped, "near": near, "splits": splits,
                       "tokenizer": {"sha256": hash_file(out / "tokenizer.tiktoken")}}
    write_text(out / "meta.json", json.dumps(meta, indent=1) + "\n")

def check_counts(source, documents, dropped, near=(), max_tokens=0):
    """InputError if a split that training needs has no documents."""
    for split in ("train", "val"):
        if not documents[split]:
            reason = ("--max-tokens ended the encoding before" if max_tokens else
                      f"all of it, {len(near)} documents, is nearly in train" if near else
                      f"{dropped['short']} documents were too short")
            raise InputError(f"{source}: no document is left for {split}, since {reason}: give more text")

def check_new(out, overwrite):
    """InputError unless a folder may be written: an empty one, an unfinished one or, by --overwrite, one of ours."""
    if not common.holds_files(out):
        return
    if not (out / "meta.json").exists() or read_json(out / "meta.json").get("pattern") != SPLIT_PATTERN:
        raise InputError(f"{out} exists and was not made by data.py, so it is left as it is: choose another --out")
    if is_whole(out) and not overwrite:
        raise InputError(f"{out} exists: use it with --data {out}, or replace it with --overwrite")

def encode_texts(texts, tokenizer, min_doc_tokens, max_tokens, dropped):
    """{split: {name: tokens of a document, <|endoftext|> first}} of (split, name, text), encoded on all cores."""
    splits = {split: {} for split in SPLITS}
    encoded = tokenizer.encode_ordinary_batch([text for *_, text in texts], num_threads=os.cpu_count())
    total = 0
    for (split, name, _), tokens in zip(texts, encoded, strict=True):
        if len(tokens) < min_doc_tokens:
            dropped["short"] += 1
        elif not 0 < max_tokens <= total:
            splits[split][name] = np.array([tokenizer.eot_token, *tokens], np.uint16)
            total += len(tokens) + 1
    return splits

def ensure(source, vocab, prepare=prepare, min_doc_tokens=1, max_tokens=0):
    """(folder, meta.json) of a source's tokens: the source itself if it is one, found under data/, or prepared now."""
    folder = Path(source) if is_whole(Path(source)) else folder_of(source, vocab)
    if not is_whole(folder):
        with common.lock(folder.parent, wait=True):         # of several runs that begin at once, one prepares the data
            if not is_whole(folder):
                prepare(source, folder, vocab, usual=min_doc_tokens, max_tokens=max_tokens)
    meta = read_meta(folder)
    if folder != Path(source):
        content = hash_source(source)
        if (meta["source"], meta.get("content", content)) != (full_name(source), content):
            raise InputError(f"{folder} is from {meta['source']}, and {source} is another text or has changed since: "
                             f"remove that folder, or prepare another with python data.py {source} --out DIR")
    if hash_file(folder / "tokenizer.tiktoken") != meta["tokenizer"]["sha256"]:
        raise InputError(f"{folder}/tokenizer.tiktoken is not the one that was recorded: prepare the folder again")
    if meta["vocab"] != vocab:
        raise InputError(f"{folder} has a vocabulary of {meta['vocab']:,}, and this run has {vocab:,}: add --vocab "
                         f"{meta['vocab']}, or prepare the text again")
    return folder, meta

def hash_source(source):
    """A hash of what a path holds: of its texts, or of the names and sizes of its files of rows; of a name, None."""
    if source in NAMED_SOURCES:
        return None
    rows = [(path.name, path.stat().st_size) for path in visible_files(source, ROWS)]
    listing = rows or [(name, hash_file(path)) for name, path in find_files(source)]
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

def hash_ngrams(tokens, every, n, base=0x9E3779B97F4A7C15):
    """Sorted hashes of the n-grams of tokens, uint64: those that are multiples of `every`. base: odd, and large."""
    x = tokens.astype(np.uint64)
    hashes = np.zeros(max(0, len(x) - n + 1), np.uint64)
    for j in range(n):                                      # the sum of x_(i+j) base^(n-1-j) modulo 2^64
        hashes = hashes * np.uint64(base) + x[j : j + len(hashes)]
    hashes ^= hashes >> 32                                  # or else low bits would be of the tokens' low bits alone
    hashes *= 0xBF58476D1CE4E5B9
    hashes ^= hashes >> 32
    return np.sort(hashes[hashes % every == 0])

def drop_near(tokens, n=24, limit=1 / 2, most=2**22):
    """Leave out of val and test, in place, each document of which more than half of the n-grams are in train.

    Returns what meta.json says of it: the names of those documents with their shares. Of stdlib's 50 held-out documents
    44 stay, with shares of 0.38 at most. Of more than `most` n-grams in train, one in `every` is compared.
    """
    every = max(1, -(-sum(map(len, tokens["train"].values())) // most))
    hashes = [hash_ngrams(document, every, n) for document in tokens["train"].values()]
    known = np.sort(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    near = {"ngram": n, "share": limit, "every": every}
    for split in ("val", "test"):
        shares = {}
        for name, document in tokens[split].items():
            hashes = hash_ngrams(document, every, n)        # numbers in their order are found faster
            shared = np.searchsorted(known, hashes, "left") < np.searchsorted(known, hashes, "right")
            shares[name] = round(float(shared.sum() / max(1, len(hashes))), 4)
        near[split] = {name: share for name, share in shares.items() if share > limit}
        tokens[split] = {name: document for name, document in tokens[split].items() if name not in near[split]}
    return near

# ---- as a script -----------------------------------------------------------------------------------------------------

def show(folder):
    """Print what a prepared folder holds."""
    meta = read_meta(folder)
    near = ", ".join([*meta["near"]["val"], *meta["near"]["test"]]) or "none"
    print(f"{folder}: from {meta['source']}, a vocabulary of {meta['vocab']:,}; left out: {meta['dropped']}, nearly in "
          f"train: {near if 'share' in meta['near'] else 'not looked for'}")
    for split, counts in meta["splits"].items():
        print(f"{split:6}{counts['documents']:9,} documents{counts['tokens']:14,} tokens")

def make_parser():
    """The flags of a preparation."""
    parser = CommandLine(description="Turn text into tokens on disk, and show what a folder of them holds.",
                         epilog="example: python data.py my_books/ --vocab 8192")
    mini = PRESETS["mini"]                                  # whose settings are the defaults
    add = parser.add_argument
    add("source", help=f"{', '.join(NAMED_SOURCES)}, a file or folder of text, or a folder that data.py has made")
    add("--vocab", type=whole, help=f"entries of the tokenizer (default: {mini['vocab']})")
    add("--tokenizer", metavar="FILE", help="use a ready tokenizer, a .tiktoken file")
    add("--min-doc-tokens", type=at_least(1), metavar="N",
        help=f"drop texts with fewer tokens (default: {mini['min_doc_tokens']}, if enough are left)")
    parser.set_defaults(usual=mini["min_doc_tokens"])
    add("--max-doc-chars", type=at_least(1), default=2**20,
        help="cut texts with more characters at a line's end (default: %(default)s)")
    add("--max-tokens", type=at_least(0), default=0, help="stop after this many tokens (default: 0, no end)")
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
            raise InputError(f"{args.source} need not fit in memory: python -m engine.corpora takes the same flags")
        show(args.source if made else prepare(**vars(args)))

if __name__ == "__main__":
    main()
