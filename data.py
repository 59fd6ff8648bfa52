"""Text to tokens on disk; tokens on disk to batches.

A source is the running Python's standard library, a file or folder, or a data set of the hub. Its documents are
streamed once, cut if huge, split by a hash of their text, encoded with a byte-level BPE, and written to

    data/<name>-v<vocab>/   train.bin val.bin test.bin   uint16; each document is <|endoftext|> and then its own tokens
                            tokenizer.tiktoken           tiktoken's own text format: "base64 rank" lines
                            meta.json                    counts, source and SHA-256 of each file

B batch, T context length.
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import os
import shutil
import sys
import sysconfig
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from config import PRESETS, CommandLine, InputError, fingerprint, read_json, whole, write_json

SPLITS = ("train", "val", "test")
HELD_OUT = 1 / 14  # share of the documents in val, and in test: the 50M of 700M tokens of the paper
MAX_DOC_CHARS = 2**20  # longer texts are cut, so that no document needs much memory
TOKENIZER_BYTES = 2**30  # the tokenizer is trained on at most so much of a source
ENCODE_CHARS = 2**22  # text that is encoded at a time
EOT = "<|endoftext|>"

# How text falls into pieces before BPE, after cl100k_base (tiktoken): words with the blank before them, up to three
# digits, runs of signs, line ends, blanks. Possessive quantifiers keep it linear on long runs.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


# ---- sources: a name or a path to a stream of texts ------------------------------------------------------------------

HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
OTHER_DATA = "choose other data with --data PATH (a file or folder of text) or --data stdlib"


def documents(source, max_doc_chars=MAX_DOC_CHARS, skipped=None):
    """The texts of a source, one by one, none longer than max_doc_chars.

    source: "stdlib", "fineweb", "fineweb-edu", or the path of a file or folder of .txt .md .py .rst (a document each),
    .jsonl (a field "text") and .parquet (a column "text", as FineWeb has), also as .gz or .xz.
    Files that are not UTF-8 are left out, and their paths go to the list `skipped`.
    Raises InputError for a path that does not exist or cannot be read as what its name says.
    """
    if source in HUB:
        for text in _dataset_texts(HUB[source], HUB[source], name="sample-10BT"):
            yield from _cut(io.StringIO(text), max_doc_chars)
        return
    for path in _files(source):
        try:
            for text in _file_texts(path):
                yield from _cut(text, max_doc_chars)
        except UnicodeDecodeError:
            if _kind(path) not in TEXT_SUFFIXES:
                raise InputError(f"{path} is not UTF-8 throughout") from None
            if skipped is not None:
                skipped.append(str(path))
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path} cannot be unpacked: {error}") from None


def _files(source):
    """The readable files of a source, in sorted order."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        leave_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # they differ between machines
        return sorted(p for p in root.rglob("*.py") if not leave_out & set(p.relative_to(root).parts))
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if _kind(p) in SUFFIXES and p.is_file())
        found = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not found:
            raise InputError(f"{source} holds no file that ends in {' '.join(SUFFIXES)} (or those with .gz, .xz)")
        return found
    if not path.exists():
        raise InputError(f"{source}: no such file or folder; data is stdlib, {', '.join(HUB)} or a path")
    if _kind(path) not in SUFFIXES:
        raise InputError(f"{source} must end in {' '.join(SUFFIXES)} (or those with .gz, .xz)")
    return [path]


def _kind(path):
    """The suffix that says what a file holds: ".jsonl" of books.jsonl.xz."""
    return (Path(path.stem) if path.suffix in (".gz", ".xz") else path).suffix.lower()


def _file_texts(path):
    """The texts of one file, each as an open text file."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    if _kind(path) == ".parquet":
        with contextlib.ExitStack() as stack:
            if opener is not open:  # parquet is read from its end: unpack it first
                packed = stack.enter_context(opener(path, "rb"))
                path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "unpacked.parquet"
                with open(path, "wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
            yield from map(io.StringIO, _dataset_texts(path, "parquet", data_files=[str(path)]))
        return
    with opener(path, "rt", encoding="utf-8") as file:
        if _kind(path) in TEXT_SUFFIXES:
            yield file
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise InputError(f'{path} line {number} is not a JSON object with a field "text" that holds a string')
            yield io.StringIO(text)


def _dataset_texts(what, *args, **kwargs):
    """The column "text" of what datasets.load_dataset streams: the hub's, or a local file's of the same schema."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{what} is read by the datasets library: pip install datasets, or {OTHER_DATA}") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what comes of them is told below
    try:
        for row in datasets.load_dataset(*args, split="train", streaming=True, **kwargs):
            if not isinstance(row.get("text"), str):
                raise InputError(f'{what} has no column "text" that holds strings; it has {", ".join(row)}')
            yield row["text"]
    except InputError:
        raise
    except Exception as error:  # the hub's, the network's and Arrow's own kinds have no common ancestor
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{what} cannot be read ({type(error).__name__}: {reason}); {OTHER_DATA}") from None


def _cut(file, limit):
    """The text of an open file, in pieces of at most limit characters, cut at a line's end where there is one."""
    piece = ""
    while more := file.read(limit - len(piece)):
        piece += more
        if len(piece) == limit:
            end = piece.rfind("\n") + 1 or limit
            yield piece[:end]
            piece = piece[end:]
    if piece:
        yield piece


def _unique(texts, min_bytes, dropped):
    """(split, text) of each text not seen before. The split depends on the text alone, not on the order."""
    seen = set()
    for text in texts:
        data = text.encode("utf-8", errors="replace")  # a lone surrogate has no UTF-8: it becomes "?"
        if len(data) < min_bytes:  # a token is a byte at least
            dropped["short"] += 1
            continue
        key = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
        if key in seen:
            dropped["duplicate"] += 1
            continue
        seen.add(key)
        share = key / 2**64
        yield ("val" if share < HELD_OUT else "test" if share < 2 * HELD_OUT else "train"), data.decode("utf-8")


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def train_tokenizer(texts, vocab):
    """{token bytes: rank} of a byte-level BPE of `vocab` entries with <|endoftext|>. InputError for too little text."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, vocab - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in tokenizer.get_mergeable_ranks()}
    if len(ranks) < vocab - 1:
        raise InputError(
            f"vocab: the training text has only enough pairs for a vocabulary of {len(ranks) + 1}, "
            f"not {vocab}: give more text, or --vocab {len(ranks) + 1} or fewer"
        )
    return ranks


def save_tokenizer(ranks, path):
    """Write {token bytes: rank} in tiktoken's text format."""
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    Path(path).write_text("".join(lines), encoding="ascii")


def load_tokenizer(path, pattern=SPLIT_PATTERN):
    """A tiktoken.Encoding from a .tiktoken file; <|endoftext|> is its last rank + 1. InputError for another format."""
    # tiktoken's own loader caches by path: it would return an old tokenizer for a file that has changed.
    ranks = {}
    try:
        for line in Path(path).read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise InputError(f'{path} line {len(ranks) + 1} is not "base64 rank", tiktoken\'s text format') from None
    if len(set(ranks.values())) < len(ranks) or any(bytes([b]) not in ranks for b in range(256)):
        raise InputError(
            f"{path} is not a byte-level BPE: each of the 256 bytes needs a rank, and no rank may stand twice"
        )
    return tiktoken.Encoding(
        Path(path).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: max(ranks.values()) + 1}
    )


def run_tokenizer(run, record):
    """The tokenizer in a run directory, whose config.json is `record`; InputError if it is not the run's own file."""
    path = Path(run) / "tokenizer.tiktoken"
    if fingerprint(path) != record["data"]["tokenizer"]:
        raise InputError(f"{path} has not the size and hash that config.json says: it was damaged or replaced")
    return load_tokenizer(path, record["data"]["pattern"])


def _ready_tokenizer(name):
    """A tiktoken.Encoding from a .tiktoken file or one of tiktoken's names (gpt2), with our one special token."""
    if Path(name).suffix == ".tiktoken":
        return load_tokenizer(name)
    if name not in tiktoken.list_encoding_names():
        raise InputError(
            f"tokenizer must be a .tiktoken file or one of {', '.join(tiktoken.list_encoding_names())}, got {name!r}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise InputError(
            f"tiktoken cannot fetch {name} ({type(error).__name__}): give a .tiktoken file instead"
        ) from None
    ranks = encoding._mergeable_ranks
    return tiktoken.Encoding(
        name, pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens={EOT: max(ranks.values()) + 1}
    )


# ---- preparing: a source to a folder of tokens -----------------------------------------------------------------------


def prepare(
    source,
    out=None,
    vocab=None,
    tokenizer=None,
    min_doc_tokens=1,
    max_tokens=0,
    max_doc_chars=MAX_DOC_CHARS,
    overwrite=False,
):
    """Turn a source into a folder of tokens, as the head of this file describes it; returns the folder.

    out: the folder, or None for data/<name>-v<vocab>, which appears whole or not at all.
    vocab: entries of the tokenizer that is trained on the training documents, or None with a ready `tokenizer`
    (a .tiktoken file, or a name of tiktoken's). Documents of fewer than min_doc_tokens tokens are dropped.
    max_tokens: stop once so many are written, 0 for no end. Raises InputError when no usable document is found.
    Memory stays bounded: texts flow through; only a hash of each is kept.
    """
    encoding = _ready_tokenizer(tokenizer) if tokenizer else None
    out = Path(out) if out else folder_of(source, encoding.n_vocab if encoding else vocab)
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists: use it with --data {out}, choose another --out, or add --overwrite")
    if out.exists() and not (out / "meta.json").exists():
        raise InputError(f"{out} exists and is no folder of tokens, so it is not overwritten: choose another --out")
    if tokenizer is None and not 257 <= vocab <= 2**16:
        raise InputError(f"vocab must be from 257 (256 bytes and {EOT}) to 65,536 (tokens are uint16), got {vocab}")
    for name, value, least in (
        ("min_doc_tokens", min_doc_tokens, 1),
        ("max_tokens", max_tokens, 0),
        ("max_doc_chars", max_doc_chars, 1),
    ):
        if value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    dropped, skipped = {"short": 0, "duplicate": 0}, []
    texts = _unique(documents(source, max_doc_chars, skipped), min_doc_tokens, dropped)

    with _scratch_folder(out, overwrite) as scratch, contextlib.ExitStack() as stack:
        total = None
        if encoding is None:
            # Train on the first training documents; what has been read waits in a file, so that a stream is read once.
            spool = stack.enter_context(open(scratch / "spool.jsonl", "w+", encoding="utf-8"))
            ranks = train_tokenizer(_spooled(texts, spool), vocab)
            save_tokenizer(ranks, scratch / "tokenizer.tiktoken")
            encoding = load_tokenizer(scratch / "tokenizer.tiktoken")
            following = next(texts, None)
            if following is None:
                total = spool.tell()
            spool.seek(0)
            texts = itertools.chain(map(json.loads, spool), [following] if following else [], texts)
        else:
            save_tokenizer(encoding._mergeable_ranks, scratch / "tokenizer.tiktoken")
        if encoding.n_vocab > 2**16:
            raise InputError(f"tokenizer has {encoding.n_vocab:,} entries; tokens are uint16, so at most 65,536 fit")
        splits = _write_tokens(texts, encoding, scratch, min_doc_tokens, max_tokens, dropped, total)
        (scratch / "spool.jsonl").unlink(missing_ok=True)

        n_documents = sum(split["documents"] for split in splits.values())
        if n_documents == 0:
            raise InputError(
                f"{source} has no usable document: {dropped['short']:,} are shorter than {min_doc_tokens:,} tokens "
                f"(--min-doc-tokens), {len(skipped):,} are not UTF-8"
            )
        for name in ("train", "val"):
            if splits[name]["tokens"] == 0:
                raise InputError(
                    f"{source} has {n_documents} usable documents, and none fell to {name}: cut them smaller with "
                    "python data.py --max-doc-chars 20000, lower --min-doc-tokens, or give more documents"
                )
        meta = {
            "source": full_name(source),
            "vocab": encoding.n_vocab,
            "eot": encoding.eot_token,
            "pattern": encoding._pat_str,
            "min_doc_tokens": min_doc_tokens,
            "max_tokens": max_tokens,
            "max_doc_chars": max_doc_chars,
            "python": sys.version.split()[0],
            "dropped": {**dropped, "not_utf8": len(skipped)},
            "splits": splits,
            "tokenizer": fingerprint(scratch / "tokenizer.tiktoken"),
        }
        write_json(scratch / "meta.json", meta)
    return out


def _spooled(texts, spool):
    """The training texts of the first TOKENIZER_BYTES, while all that is read is written to the spool."""
    with _bar(None, "reading") as bar:
        for split, text in texts:
            bar.update(spool.write(json.dumps([split, text]) + "\n"))
            if split == "train":
                yield text
            if spool.tell() >= TOKENIZER_BYTES:
                return


def _write_tokens(texts, encoding, folder, min_doc_tokens, max_tokens, dropped, total):
    """Encode (split, text) pairs on all cores into .bin files; returns {split: documents, tokens, bytes, sha256}."""
    counts = {name: {"documents": 0, "tokens": 0} for name in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in SPLITS}
        bar = stack.enter_context(_bar(total, "encoding"))
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))  # tiktoken lets go of the interpreter's lock
        encode = functools.partial(encoding.encode_to_numpy, disallowed_special=())
        for batch in _batches(texts):
            for (split, _), tokens in zip(batch, pool.map(encode, [text for _, text in batch]), strict=True):
                if len(tokens) < min_doc_tokens:
                    dropped["short"] += 1
                    continue
                files[split].write(np.array([encoding.eot_token], dtype=np.uint16).tobytes())
                files[split].write(tokens.astype(np.uint16).tobytes())
                counts[split]["documents"] += 1
                counts[split]["tokens"] += len(tokens) + 1
            bar.update(sum(len(text) for _, text in batch))
            if max_tokens and sum(count["tokens"] for count in counts.values()) >= max_tokens:
                break
    return {name: {**counts[name], **fingerprint(folder / f"{name}.bin")} for name in SPLITS}


def _batches(texts):
    """Lists of (split, text) of about ENCODE_CHARS characters."""
    batch, size = [], 0
    for pair in texts:
        batch.append(pair)
        size += len(pair[1])
        if size >= ENCODE_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _scratch_folder(out, overwrite):
    """A folder beside `out` that becomes `out` when the block ends well, and is gone otherwise."""
    made = not out.parent.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.partial"):  # by a run that was killed outright
        pid = left.suffixes[-2][1:]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = out.parent / f".{out.name}.{os.getpid()}.partial"
    scratch.mkdir()
    try:
        yield scratch
        if overwrite:
            shutil.rmtree(out, ignore_errors=True)
        try:
            os.rename(scratch, out)
        except OSError:
            if not (out / "meta.json").exists():  # unless another process made the same just now
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                out.parent.rmdir()  # if nothing came of it


def _alive(pid):
    if pid == os.getpid():
        return False  # in a container each run may have the same one
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _bar(total, what):
    if not sys.stderr.isatty():
        print(f"{what} ...", flush=True)
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False)


def ensure(source, vocab, min_doc_tokens=1, max_tokens=0):
    """The folder of a source's tokens: the source itself if it is one, found under data/, or prepared now.

    A folder that exists is used whatever its documents' least length is: its meta.json tells. Raises InputError if its
    vocabulary is not `vocab`.
    """
    folder = Path(source)
    if not (folder / "meta.json").exists():
        folder = folder_of(source, vocab)
        if not folder.exists():
            limit = f"documents of {min_doc_tokens:,} tokens or more"
            print(f"preparing {folder} from {source}, {limit}; for other data: --data PATH", flush=True)
            prepare(source, folder, vocab, min_doc_tokens=min_doc_tokens, max_tokens=max_tokens)
        made_from = read_meta(folder)["source"]
        if made_from != full_name(source):
            raise InputError(
                f"{folder} was made from {made_from}, not from {source}: pass --data {folder} to use it, "
                f"or prepare {source} under another name with python data.py {source} --out data/NAME"
            )
    found = read_meta(folder)["vocab"]
    if found != vocab:
        raise InputError(
            f"{folder} was made with a vocabulary of {found:,}, and this run has {vocab:,}: add --vocab {found}, "
            f"or prepare the text again with python data.py SOURCE --vocab {vocab}"
        )
    return folder


def full_name(source):
    """A source's name if it has one, else its absolute path."""
    return source if source == "stdlib" or source in HUB else str(Path(source).resolve())


def folder_of(source, vocab):
    """data/<name>-v<vocab>: where a source's tokens lie unless --out says otherwise."""
    return Path("data") / f"{Path(full_name(source)).name.split('.')[0] or 'text'}-v{vocab}"


# ---- reading: a folder of tokens to batches and documents ------------------------------------------------------------


def read_meta(folder):
    """meta.json of a prepared folder; InputError if there is none, or if it is not one of ours."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise InputError(f"{folder} is not a folder of tokens (no meta.json): make one with python data.py SOURCE")
    meta = read_json(path)
    try:
        numbers = [meta[name] for name in ("vocab", "eot", "min_doc_tokens", "max_tokens")]
        numbers += [meta["splits"][split][name] for split in SPLITS for name in ("documents", "tokens", "bytes")]
        texts = [meta["source"], meta["pattern"], meta["tokenizer"]["sha256"]]
        texts += [meta["splits"][split]["sha256"] for split in SPLITS]
        sound = all(isinstance(n, int) for n in numbers) and all(isinstance(t, str) for t in texts) and meta["dropped"]
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise InputError(f"{path} is not as data.py writes it: prepare the folder again")
    return meta


def open_split(folder, split):
    """The tokens of one split, uint16 (n,), mapped from disk. InputError if the file is not what meta.json says."""
    meta, path = read_meta(folder), Path(folder) / f"{split}.bin"
    expected = meta["splits"][split]["bytes"]
    if not path.exists():
        raise InputError(f"{path} is missing: prepare the folder again with python data.py")
    if path.stat().st_size != expected:
        found = path.stat().st_size
        raise InputError(f"{path} has a size of {found:,} bytes, and meta.json says {expected:,}: prepare it again")
    if expected == 0:
        return np.zeros(0, np.uint16)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")  # (n,)
    if tokens.max() >= meta["vocab"]:
        raise InputError(f"{path} holds the token id {tokens.max()}, outside its vocabulary of {meta['vocab']:,}")
    return tokens


def windows(tokens, context):
    """How many windows of `context` inputs, each with its next token as target, fit the tokens. InputError if none."""
    count = (len(tokens) - 1) // context
    if count < 1:
        raise InputError(f"the data has {len(tokens):,} tokens, and one window needs {context + 1:,}: give more text")
    return count


def batch(tokens, context, batch_size, seed, step):
    """The batch of one step, int64 (B, T+1): inputs are [:, :-1], targets [:, 1:]. A pure function of its arguments.

    An epoch is a permutation of the corpus's non-overlapping windows, so that each token is seen once an epoch.
    """
    count = windows(tokens, context)
    index = np.arange(step * batch_size, (step + 1) * batch_size)
    start = [int(_order(count, seed, i // count)[i % count]) * context for i in index.tolist()]
    return np.stack([tokens[s : s + context + 1] for s in start]).astype(np.int64)  # (B, T+1)


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _order(count, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(count)


def split_documents(tokens, eot):
    """The documents of a split as slices of it, each <|endoftext|> and then its own tokens."""
    starts = np.flatnonzero(tokens == eot)
    return np.split(tokens, starts[1:]) if len(starts) else []


# ---- as a script -----------------------------------------------------------------------------------------------------


def show(folder):
    """Print what a prepared folder holds, once its files are what meta.json says."""
    folder, meta = Path(folder), read_meta(folder)
    encoding = load_tokenizer(folder / "tokenizer.tiktoken", meta["pattern"])
    limit = f"documents of {meta['min_doc_tokens']:,} tokens or more"
    print(f"{folder}: from {meta['source']}, a vocabulary of {meta['vocab']:,}, {limit}")
    print("left out: {short:,} short, {duplicate:,} duplicate, {not_utf8:,} not UTF-8\n".format(**meta["dropped"]))
    print(f"{'split':6}{'documents':>11}{'tokens':>15}   tokens in a document: ", end="")
    print(f"{'min':>8}{'10%':>8}{'median':>8}{'90%':>9}{'max':>9}")
    for split in SPLITS:
        tokens = open_split(folder, split)
        if fingerprint(folder / f"{split}.bin")["sha256"] != meta["splits"][split]["sha256"]:
            raise InputError(
                f"{folder / split}.bin has the right size and the wrong SHA-256 hash: prepare the folder again"
            )
        lengths = [len(document) - 1 for document in split_documents(tokens, meta["eot"])]
        quantiles = np.quantile(lengths, (0, 0.1, 0.5, 0.9, 1)) if lengths else [0] * 5
        print(
            f"{split:6}{len(lengths):11,}{len(tokens):15,}{'':25}"
            + "".join(f"{int(q):{width},}" for q, width in zip(quantiles, (8, 8, 8, 9, 9), strict=True))
        )
    sample = split_documents(open_split(folder, "val"), meta["eot"])[0][1:201]
    print(f"\nthe first {len(sample)} tokens of the first val document, decoded:\n\n{encoding.decode(sample.tolist())}")


def main():
    parser = CommandLine(
        description="Turn text into tokens on disk, or show what a prepared folder holds.",
        epilog="examples:\n  python data.py stdlib\n  python data.py books/ --vocab 32000 --min-doc-tokens 4000\n"
        "  python data.py fineweb --vocab 32000 --min-doc-tokens 4000 --max-tokens 7e8\n"
        "  python data.py --show data/stdlib-v1024",
    )
    mini = PRESETS["mini"]
    parser.add_argument(
        "source",
        nargs="?",
        help=f"stdlib | {' | '.join(HUB)} | a file or folder of {' '.join(SUFFIXES)}, also .gz, .xz",
    )
    parser.add_argument(
        "--show", metavar="DIR", help="print a prepared folder's counts, document lengths and a decoded sample"
    )
    parser.add_argument(
        "--vocab", type=whole, metavar="N", help=f"entries of the tokenizer to train (default: {mini.model.vocab_size})"
    )
    parser.add_argument("--tokenizer", metavar="NAME|FILE", help="use a ready tokenizer: gpt2, or a .tiktoken file")
    parser.add_argument(
        "--min-doc-tokens",
        type=whole,
        metavar="N",
        default=mini.train.min_doc_tokens,
        help="drop shorter documents (default: %(default)s, 16 times mini's context; the paper keeps 4000 and more)",
    )
    parser.add_argument(
        "--max-doc-chars",
        type=whole,
        metavar="N",
        default=MAX_DOC_CHARS,
        help="cut longer documents at a line's end (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=whole, metavar="N", default=0, help="stop after so many tokens (default: 0, no end)"
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to write (default: data/<name>-v<vocab>)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    with parser.one_line_errors():
        args = parser.parse_args()
        if (args.source is None) == (args.show is None):
            parser.error("give a source to prepare, as in python data.py stdlib, or a folder to show, by --show DIR")
        if args.show:
            return show(args.show)
        if args.vocab and args.tokenizer:
            parser.error("--vocab is for training a tokenizer, and --tokenizer brings its own: leave one out")
        vocab = args.vocab if args.vocab is not None else mini.model.vocab_size
        options = (args.min_doc_tokens, args.max_tokens, args.max_doc_chars, args.overwrite)
        show(prepare(args.source, args.out, vocab, args.tokenizer, *options))


if __name__ == "__main__":
    main()
