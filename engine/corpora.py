"""Folders of tokens from what need not fit in memory: FineWeb, .parquet, .jsonl, the installed requirements' Python.

    python data.py fineweb --vocab 32000 --min-doc-tokens 4000 --max-tokens 7e8

data.py calls this for such sources. Documents are streamed once; the tokenizer is trained on the first TOKENIZER_CHARS
of them. Of each text a hash is kept, and of each document that is held out its name. FineWeb and .parquet are read by
the datasets library, an optional dependency.
"""

import contextlib
import importlib.metadata
import io
import itertools
import json
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
import data
from common import hash_file, write_text
from config import InputError

HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
TOKENIZER_CHARS = 2**28             # the tokenizer is trained on at most so much of a source, held in memory
ENCODE_CHARS = 2**25                # text that is encoded at a time, on all cores while more of it is read
LINE_BYTES = 2**26                  # of .jsonl, at most
ROWS = 1000                         # of .parquet at a time
BLOCK = 2**18                       # tokens that are hashed at a time
NGRAM = 24                          # these three are as in data.drop_near
NEAR = 1 / 2
HASHES = 2**22


# ---- sources ---------------------------------------------------------------------------------------------------------

def documents(source, max_chars=2**20, skipped=None):
    """(name, text) of each document of a source, one by one, as data.documents has them."""
    for name, path in find_files(source):
        try:
            for place, file in read_texts(path):
                for part, text in enumerate(cut(file, max_chars), 1):
                    yield f"{name}{place}" + f"#{part}" * (part > 1), text
        except UnicodeDecodeError:
            if skipped is not None:
                skipped.append(str(path))

def find_files(source):
    """(name, path) of the files of a source, in sorted order; of a data set of the hub, its shards in their order."""
    if source in HUB:
        found = stream_rows(HUB[source], path=HUB[source], name="sample-10BT")
        return [(f"{HUB[source]}/{i}", found.shard(found.num_shards, i)) for i in range(found.num_shards)]
    if source == "packages":
        lines = (Path(__file__).parent.parent / "requirements.txt").read_text(encoding="utf-8")
        names = sorted(re.findall(r"^[\w-]+", lines, re.MULTILINE))
        found = [file for name in names for file in importlib.metadata.distribution(name).files]
        return [(str(file), Path(file.locate())) for file in sorted(found) if file.suffix == ".py"]
    return data.find_files(source, (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet"))

def read_texts(path):
    """(place, open file) of each text in a file: of the rows or lines of .parquet and .jsonl, and else of all of it."""
    suffix = path.suffix.lower() if isinstance(path, Path) else ".parquet"
    if suffix == ".parquet":
        return read_rows(path)
    return read_lines(path) if suffix == ".jsonl" else read_whole(path)

def read_whole(path):
    with open(path, encoding="utf-8") as file:
        yield "", file

def read_lines(path):
    """The field "text" of each line that is not blank."""
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise InputError(f"{path} line {number} is longer than {LINE_BYTES:,} bytes: cut its text in several")
            try:
                if line.strip():
                    yield f":{number}", io.StringIO("" + json.loads(line)["text"])     # a TypeError unless it is text
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f'{path} line {number} is not a JSON object with a field "text" in UTF-8') from None

def read_rows(what):
    """The column "text" of a .parquet file, or of a shard of a data set."""
    rows = what
    if isinstance(what, Path):
        rows = stream_rows(what, path="parquet", data_files=[str(what)], batch_size=ROWS)
    with naming(what):
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get("text"), str):
                raise TypeError(f'no column "text" that holds strings; it has {", ".join(row)}')
            yield f":{number}", io.StringIO(row["text"])

def stream_rows(what, **where):
    """What the datasets library streams from there."""
    with naming(what):
        import datasets

        for library in ("datasets", "huggingface_hub"):             # their retries' words: one line tells it
            logging.getLogger(library).setLevel(logging.CRITICAL)
        return datasets.load_dataset(**where, split="train", streaming=True)

@contextlib.contextmanager
def naming(what):
    """InputError for whatever ends the reading by the datasets library."""
    other = "choose other data with --data PATH (a file or folder of text) or --data stdlib"
    try:
        yield
    except ModuleNotFoundError:
        raise InputError(f"{what} is read by the datasets library: pip install datasets, or {other}") from None
    except Exception as error:      # the hub's, the network's and Arrow's own kinds have no common ancestor
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"{what} cannot be read ({reason}); {other}") from None

def cut(file, limit):
    """The text of an open file, in pieces of at most limit characters, cut at a line's end where there is one."""
    rest = ""
    while piece := rest + file.read(limit - len(rest)):
        end = limit if len(piece) < limit else piece.rfind("\n") + 1 or limit
        yield piece[:end]
        rest = piece[end:]


# ---- preparing -------------------------------------------------------------------------------------------------------

def prepare(source, out, vocab, ranks, min_doc_tokens, max_tokens, max_doc_chars, overwrite):
    """As data.prepare, one document after the other; ranks: of a ready tokenizer, or None."""
    asked = {"source": data.full_name(source), "vocab": vocab, "pattern": data.SPLIT_PATTERN, "max_tokens": max_tokens,
             "min_doc_tokens": min_doc_tokens, "max_doc_chars": max_doc_chars, "python": sys.version.split()[0],
             "files": data.hash_listing(source)}
    dropped = {"short": 0, "duplicate": 0}
    skipped = []
    texts = tqdm(documents(source, max_doc_chars, skipped), "reading", unit=" documents", disable=None, leave=False)
    texts = data.split_texts(texts, min_doc_tokens, dropped)
    if ranks is None:
        first = list(take(texts, TOKENIZER_CHARS))
        training = [text for split, _, text in first if split == "train"]
        print(f"training a tokenizer of {vocab:,} entries on {sum(map(len, training)):,} characters", flush=True)
        ranks = data.train_tokenizer(training, vocab)
        texts = itertools.chain(first, texts)                           # a stream can be read once only
    out.mkdir(parents=True, exist_ok=True)
    with common.lock(out):
        data.check_new(out, overwrite)
        write_text(out / "meta.json", json.dumps(asked))
        data.write_ranks(out / "tokenizer.tiktoken", ranks)
        names = write_tokens(texts, data.make_tokenizer(ranks), out, min_doc_tokens, max_tokens, dropped)
        near = drop_near(out, vocab - 1, names)
        for name in ("train", "val"):
            if not names[name]:
                raise InputError(f"{source}: no usable document fell to {name}: cut them smaller with --max-doc-chars "
                                 "20000, lower --min-doc-tokens, or give more documents")
        splits = {split: {"documents": len(names[split]), "tokens": os.path.getsize(out / f"{split}.bin") // 2,
                          "sha256": hash_file(out / f"{split}.bin")} for split in data.SPLITS}
        meta = asked | {"eot": vocab - 1, "dropped": dropped | {"not_utf8": len(skipped)}, "near": near,
                        "splits": splits, "tokenizer": {"sha256": hash_file(out / "tokenizer.tiktoken")}}
        write_text(out / "meta.json", json.dumps(meta, indent=1) + "\n")
    return out

def take(texts, size):
    """The next (split, name, text), of about `size` characters in all."""
    while size > 0 and (one := next(texts, None)):
        yield one
        size -= len(one[-1])

def write_tokens(texts, encoding, out, min_doc_tokens, max_tokens, dropped):
    """Encode (split, name, text) on all cores into .bin files; returns {split: names of its documents}."""
    names = {split: [] for split in data.SPLITS}
    total = 0
    with contextlib.ExitStack() as stack:
        cores = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        files = {split: stack.enter_context(open(out / f"{split}.bin", "wb")) for split in data.SPLITS}
        while taken := list(take(texts, ENCODE_CHARS)):
            encoded = cores.map(encoding.encode_ordinary, [text for *_, text in taken])
            for (split, name, _), tokens in zip(taken, encoded, strict=True):
                if len(tokens) < min_doc_tokens:
                    dropped["short"] += 1
                    continue
                np.array([encoding.eot_token, *tokens], np.uint16).tofile(files[split])
                names[split].append(name)
                total += len(tokens) + 1
            if 0 < max_tokens <= total:
                break
    return names


# ---- near copies -----------------------------------------------------------------------------------------------------

def drop_near(out, eot, names):
    """As data.drop_near, from the .bin files, by blocks; takes the documents that are left out from names, too."""
    every = max(1, -(-(os.path.getsize(out / "train.bin") // 2) // HASHES))
    found = [hashes for _, hashes in read_ngrams(out / "train.bin", eot, every)]
    known = np.sort(np.concatenate([np.zeros(0, np.uint64), *found]))
    near = {"ngram": NGRAM, "share": NEAR, "every": every, "kept": {}}
    for split in ("val", "test"):
        path = out / f"{split}.bin"
        compared = np.zeros(len(names[split]), int)
        shared = np.zeros(len(names[split]), int)
        for document, hashes in read_ngrams(path, eot, every):
            hit = np.searchsorted(known, hashes, "left") < np.searchsorted(known, hashes, "right")
            compared += np.bincount(document, minlength=len(compared))
            shared += np.bincount(document[hit], minlength=len(compared))
        shares = shared / np.maximum(compared, 1)
        left_out = shares > NEAR
        near[split] = {names[split][i]: round(float(shares[i]), 4) for i in np.flatnonzero(left_out)}
        near["kept"][split] = round(float(shares[~left_out].max(initial=0)), 4)
        if left_out.any():
            with open(f"{path}.unfinished", "wb") as file:
                for block, document in read_blocks(path, eot):
                    file.write(block[~left_out[document]])
            os.replace(f"{path}.unfinished", path)
            names[split] = [name for name in names[split] if name not in near[split]]
    return near

def read_ngrams(path, eot, every):
    """(document, hash) of the n-grams within a document whose hash is a multiple of `every`, (n,) each, by blocks."""
    for block, document in read_blocks(path, eot, NGRAM - 1):
        hashes, kept = data.hash_ngrams(block, every, NGRAM)
        inside = document[kept] == document[kept + NGRAM - 1]
        yield document[kept][inside], hashes[inside]

def read_blocks(path, eot, more=0):
    """(tokens, the number of each one's document) of a file by blocks, each with `more` tokens of the next one."""
    first = -1
    for start in range(0, os.path.getsize(path) // 2, BLOCK):
        block = np.fromfile(path, np.uint16, BLOCK + more, offset=2 * start)
        yield block, first + np.cumsum(block == eot)
        first += np.count_nonzero(block[:BLOCK] == eot)
