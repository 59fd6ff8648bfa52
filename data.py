"""Text to tokens on disk; tokens on disk to batches. B batch, T context length.

Documents (texts.py) are read into memory, split by a hash of their text, encoded (tokenizer.py), and written to

    data/<name>-v<vocab>/   train.bin val.bin test.bin   uint16; each document is <|endoftext|> and then its own tokens
                            tokenizer.tiktoken           tiktoken's own text format: "base64 rank" lines
                            meta.json                    counts, source and SHA-256 of each file; written last

engine/corpora.py prepares such a folder from FineWeb, from .parquet files and from large .jsonl files, which need not
fit in memory.
"""

import functools
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import cli
from cli import CommandLine, at_least, whole

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

import files
from config import PRESETS, SPLITS
from files import hash_file, read_json, write_text
from settings import InputError, flag_of
from texts import (
    BEYOND,
    LARGE,
    NAMED_SOURCES,
    NEAR,
    REMEDIES,
    SHORT,
    LeftOut,
    cut_long,
    documents,
    drop_copies,
    drop_near,
    drop_near_copies,
    full_name,
    hash_source,
    is_large,
    split_by_hash,
    split_by_tenths,
)
from tokenizer import EOT, SPLIT_PATTERN, make_tokenizer, read_ranks, train_tokenizer, write_ranks

STDLIB = "50ac334affdbb2cd2ad6de6fa1ee9ca7711d72d70a6163343cca69e7b28af2dc"          # of train.bin, of Python 3.11.7
META = {"source": str, "vocab": int, "eot": int, "tokenizer.sha256": str, "dropped": dict, "near.val": dict,
        "near.test": dict, **{f"splits.{split}.{name}": kind for split in SPLITS
                              for name, kind in (("documents", int), ("tokens", int), ("sha256", str))}}

def source_of(name):
    """The module that makes the batches of --data: tasks.py, which is imported for task:NAME alone, or this one.

    Both have the functions ensure, open_split, batch, held_out and read_tokenizer.
    """
    return importlib.import_module("tasks" if name.startswith("task:") else "data")

# ---- preparing: a source to a folder of tokens -----------------------------------------------------------------------

class Vocabulary(NamedTuple):
    """The vocabulary that is asked for: a tokenizer of this size is trained, or there is a ready one."""

    size: int
    or_fewer: bool = False               # whether a text with pairs for fewer entries gets fewer
    ranks: dict | None = None            # {token bytes: rank} of a ready tokenizer

def choose_vocabulary(vocab=None, tokenizer=None, or_fewer=None):
    """The Vocabulary of a preparation with these flags; or_fewer: by default if no size is given."""
    if vocab is not None and tokenizer is not None:
        raise InputError("--vocab is the size of the tokenizer: leave out --vocab, or --tokenizer")
    ranks = None if tokenizer is None else read_ranks(tokenizer)
    or_fewer = vocab is None if or_fewer is None else or_fewer
    size = len(ranks) + 1 if ranks else PRESETS["mini"]["vocab"] if vocab is None else vocab
    if not 257 <= size <= 2**16:
        raise InputError(f"--vocab must be from 257 (256 bytes and {EOT}) to 65,536 (tokens are uint16), got {size}")
    return Vocabulary(size, or_fewer, ranks)

def choose_folder(source, out, vocab):
    """Where a preparation writes: `out`, or data/<name>-v<vocab>."""
    out = folder_of(source, vocab) if out is None else Path(out)
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise InputError(f"--out must be a folder, and {file} is a file")
    return out

PREPARATION = {"min_doc_tokens": 1, "max_tokens": 0, "max_doc_chars": 2**20}      # its settings beside the vocabulary

def choose_settings(source, given, of_named):
    """The settings of a preparation: those given; else, for a text with a name, of_named; else PREPARATION's."""
    of_named = of_named if source in NAMED_SOURCES else {}
    return {name: given[name] if given.get(name) is not None else of_named.get(name, default)
            for name, default in PREPARATION.items()}

def prepare(source, out=None, vocab=None, tokenizer=None, overwrite=False, defaults=PRESETS["mini"], or_fewer=None,
            **given):
    """Turn a source into a folder of tokens, `out` or data/<name>-v<vocab>; returns its path.

    A tokenizer of `vocab` entries is trained on the training documents (of fewer, if the text has pairs for fewer and
    or_fewer says so: by default if no vocab is given), or `tokenizer` is a .tiktoken file. `given` and `defaults` are
    settings as choose_settings takes them: documents with fewer than min_doc_tokens tokens are dropped, those with more
    than max_doc_chars characters are cut, and encoding ends at max_tokens (0: never). Copies are dropped, and so are
    held-out documents that are nearly in train.
    """
    settings = choose_settings(source, given, defaults)
    vocabulary = choose_vocabulary(vocab, tokenizer, or_fewer)
    out = choose_folder(source, out, vocabulary.size)
    check_new(out, overwrite)
    print(f"preparing {out} from {source}", flush=True)
    left_out = LeftOut()
    found = list(drop_copies(documents(source, left_out), settings["min_doc_tokens"], left_out))
    made = split_and_encode(found, vocabulary, settings, left_out)
    if made is None:
        left_out.print()
        remedy = next((remedy for reason, remedy in REMEDIES.items() if reason in left_out), "give more text")
        remedy = "leave --max-tokens out, or give more documents" if settings["max_tokens"] else remedy
        raise InputError(f"{source} has too little text for train and val: {remedy}")
    ranks, tokens, near = made
    meta = {"source": full_name(source), "vocab": len(ranks) + 1, "pattern": SPLIT_PATTERN, **settings,
            "python": sys.version.split()[0], "content": hash_source(source)}
    with files.lock(out):
        check_new(out, overwrite)                           # another process may have made it meanwhile
        write_text(out / "meta.json", json.dumps(meta))     # not whole yet, and from now on the folder is ours
        write_ranks(out / "tokenizer.tiktoken", ranks)
        for split in SPLITS:
            together = np.concatenate([*tokens[split].values(), np.zeros(0, np.uint16)])
            files.write_bytes(out / f"{split}.bin", together.tobytes())
        write_meta(out, meta, {split: len(documents) for split, documents in tokens.items()}, left_out, near)
    is_of_readme = (source, vocabulary.size, settings["min_doc_tokens"]) == ("stdlib", 1024, 2048)
    if is_of_readme and hash_file(out / "train.bin") != STDLIB:
        print(f"Python {meta['python']}'s library is another text than that of README's numbers, Python 3.11.7's")
    return out

def split_and_encode(found, vocabulary, settings, left_out):
    """(ranks, {split: {name: tokens}}, near copies) of documents (name, text); None if train or val is left empty.

    Documents fall to the splits by a hash of their text. If they are too few for that, the end of the text is held out.
    What one of the two ways leaves out is added to left_out.
    """
    of_documents = LeftOut(left_out)
    if are_many(found):
        made = make_splits(split_by_hash(found), vocabulary, settings, left_out)
        if made:
            return made
    if not found or settings["max_tokens"] or settings["min_doc_tokens"] > 1:
        return None
    left_out.clear()                                        # what the other way left out
    left_out.update(of_documents)
    print(f"too few documents to be split by a hash of their text ({len(found)}): the last tenth of the text "
          "becomes val, the tenth before that test")
    texts = split_by_tenths(list(drop_near_copies(found, left_out)))
    return make_splits(texts, vocabulary, settings, left_out)

def are_many(found):
    """Whether a hash of their text splits documents well: some fall to val, and train has half of the text or more."""
    sizes = dict.fromkeys(SPLITS, 0)
    for split, _, text in split_by_hash(found):
        sizes[split] += len(text)
    return sizes["val"] > 0 and sizes["train"] >= sum(sizes.values()) / 2

def make_splits(texts, vocabulary, settings, left_out):
    """(ranks, {split: {name: tokens}}, near copies) of (split, name, text); None if train or val is left empty."""
    texts = list(cut_long(texts, settings, left_out))
    training = [text for split, _, text in texts if split == "train"]
    if not training:
        return None
    ranks = vocabulary.ranks
    if ranks is None:
        print(f"training a tokenizer of {vocabulary.size:,} entries on {sum(map(len, training)):,} characters",
              flush=True)
        ranks = train_tokenizer(training, vocabulary.size, vocabulary.or_fewer)
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
    if not files.holds_files(out):
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

    defaults: settings of a preparation, for a text with a name. given: those on the command line, "vocab" among them;
    they must be the folder's. A text with pairs for fewer than `vocab` entries gets fewer if vocab is not given.
    """
    given = dict(given)
    folder = Path(source) if is_whole(Path(source)) else folder_of(source, vocab)
    if not is_whole(folder):
        settings = {name: given[name] for name in PREPARATION if name in given}
        with files.lock(folder.parent, wait=True):         # of several runs that begin at once, one prepares the data
            if not is_whole(folder):
                show(prepare(source, folder, vocab, defaults=defaults, or_fewer="vocab" not in given, **settings))
    meta = read_meta(folder)
    check_folder(folder, meta, source, vocab, given)
    return folder, meta

def check_folder(folder, meta, source, vocab, given):
    """InputError unless a prepared folder is of the source as it is now, and was prepared as it is asked for."""
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
    for name in PREPARATION:
        if name in given and meta.get(name, given[name]) != given[name]:
            flag = flag_of(name)
            command = f"python data.py {shlex.quote(meta['source'])} {flag} {given[name]} --out DIR"
            raise InputError(f"{folder} was prepared with {flag} {meta[name]}, and {flag} {given[name]} was given: "
                             f"leave it out, or prepare another folder with {command}")

def is_whole(folder):
    """Whether a folder of tokens was prepared to its end."""
    return (folder / "meta.json").exists() and "splits" in read_json(folder / "meta.json")

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
                         f"{context + 1:,}: give more text, or a shorter --context")
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
    add("--out", type=cli.folder, metavar="DIR", help="the folder to write (default: data/<name>-v<vocab>)")
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
