"""A byte-level BPE: text to tokens and back. It is trained with rustbpe, used with tiktoken, and kept in its format.

A file has a line "base64 rank" for each token. The last entry of a vocabulary is <|endoftext|>, which begins each text.
"""

import base64
import importlib
from pathlib import Path

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import rustbpe
import tiktoken

from files import hash_file, read_text, write_text
from settings import InputError

EOT = "<|endoftext|>"

# How text falls into pieces before BPE, after cl100k_base (tiktoken): words with the blank before them, up to three
# digits, runs of signs, line ends, blanks. Possessive quantifiers keep it linear on long runs.
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                 r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")

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
    text = read_text(path)
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
    return tiktoken.Encoding("tokenizer.py", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks,
                             special_tokens={EOT: len(ranks)})

def read_tokenizer(folder, meta):
    """The tokenizer in a run directory or a folder of tokens; InputError unless its hash is the one in meta."""
    if meta["source"].startswith("task:"):
        return importlib.import_module("tasks").read_tokenizer(folder, meta)           # a task's symbols
    path = Path(folder) / "tokenizer.tiktoken"
    if not path.exists() or hash_file(path) != meta["tokenizer"]["sha256"]:
        raise InputError(f"{path} is missing, or is not the tokenizer that was recorded")
    return make_tokenizer(read_ranks(path))
