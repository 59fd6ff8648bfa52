"""Corpora that need not fit in memory: folders of .parquet and .jsonl files, and FineWeb by name, through datatrove.

    python -m engine.corpora SOURCE --out data/NAME --workers 8 --tasks 64
    python data.py SOURCE                           does the same, with a worker for each core

The files of a source are divided among the tasks. A task reads its files, cuts long documents, drops short ones,
encodes the others, and notes a hash of each. Then exact copies are found by their hashes, and the tasks' tokens are
joined in the order of the tasks without the copies. The result depends on --tasks and not on --workers. The same
command continues work that was stopped, and skips the tasks that are done. Near copies of a document are kept.
"""

import contextlib
import glob
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
import data
from common import at_least, read_json, write_text
from config import InputError

try:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig, ExactDedupSignature, ExactFindDedups
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.utils.hashing import HashConfig
    from loguru import logger
except ModuleNotFoundError as error:
    raise InputError(f"this source is read with datatrove, and {error.name} is missing: pip install datatrove pyarrow "
                     "orjson, or choose a file or folder of text with --data PATH") from None

HUB = {"fineweb": "hf://datasets/HuggingFaceFW/fineweb/sample/10BT",
       "fineweb-edu": "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"}
TASKS = 16
TOKENIZER_CHARS = 2**28             # the tokenizer is trained on at most so much of a source
logger.remove()                     # each task has a log of its own, in tasks/encode/logs

@contextlib.contextmanager
def reading():
    """InputError for whatever goes wrong within a source: the hub, the network and Arrow have errors of their own."""
    try:
        yield
    except Exception as error:
        raise InputError(f"the source cannot be read ({type(error).__name__}: {str(error)[:200]})") from error

def pieces_of(documents, max_doc_chars):
    """(None, text) of the pieces of datatrove's documents."""
    while True:
        with reading():
            document = next(documents, None)
        if document is None:
            return
        for piece in data.cut_text(document.text, max_doc_chars):
            yield None, piece

class Encode(PipelineStep):
    """Write the tokens of documents to NUMBER.bin, their splits and sizes to NUMBER.npz, and pass the documents on."""

    type = "tokens"
    name = "encode"

    def __init__(self, folder, tokenizer, min_doc_tokens, max_tokens, max_doc_chars):
        super().__init__()
        self.folder = folder
        self.tokenizer = tokenizer
        self.min_doc_tokens = min_doc_tokens
        self.max_tokens = max_tokens
        self.max_doc_chars = max_doc_chars

    def run(self, documents, rank=0, world_size=1):
        encoding = data.make_tokenizer(data.read_ranks(self.tokenizer))
        dropped = {"short": 0, "duplicate": 0}
        splits = []
        sizes = []
        total = 0
        unfinished = self.folder / f"{rank:05d}.{os.getpid()}"
        with open(unfinished, "wb") as file:
            pieces = pieces_of(documents, self.max_doc_chars)
            for split, _, text in data.split_texts(pieces, self.min_doc_tokens, dropped):
                tokens = encoding.encode_ordinary(text)
                if len(tokens) < self.min_doc_tokens:
                    dropped["short"] += 1
                    continue
                np.array([encoding.eot_token, *tokens], np.uint16).tofile(file)
                splits.append(data.SPLITS.index(split))
                sizes.append(len(tokens) + 1)
                total += sizes[-1]
                yield Document(text=text, id=str(len(sizes)))
                if 0 < self.max_tokens <= total:
                    break
        os.replace(unfinished, self.folder / f"{rank:05d}.bin")
        np.savez(self.folder / f"{rank:05d}.npz", splits=splits, sizes=sizes, **dropped)

class Executor(LocalPipelineExecutor):
    """datatrove's local executor with Python's own pool of processes, which notices if one of them is killed."""

    def run(self, pool):
        left = self.get_incomplete_ranks()
        done = pool.map(self._run_for_rank, left, itertools.repeat(1))  # with 1 it logs to its file alone
        list(tqdm(done, "tasks", total=self.tasks, initial=self.tasks - len(left), disable=None, leave=False))

def text_of(document) -> str:
    return document.text

def make_readers(source):
    """datatrove's readers of a source: of a data set of the hub, or of the .jsonl and .parquet files of a path."""
    if source in HUB:
        return [ParquetReader(HUB[source], read_metadata=False)]
    path = Path(source).resolve()
    if path.is_file():
        pattern = glob.escape(path.name)
        if pattern == path.name:
            pattern = f"[{pattern[0]}]{pattern[1:]}"                    # datatrove puts a * before what has no bracket
        return [JsonlReader(str(path.parent), glob_pattern=pattern) if path.suffix == ".jsonl" else
                ParquetReader(str(path.parent), glob_pattern=pattern, read_metadata=False)]
    readers = [JsonlReader(str(path), glob_pattern="**/*.jsonl"),
               ParquetReader(str(path), glob_pattern="**/*.parquet", read_metadata=False)]
    return [reader for reader in readers if list_files(reader)]

def list_files(reader):
    with reading():
        return reader.data_folder.list_files(glob_pattern=reader.glob_pattern)

def make_pipelines(source, out, tasks=TASKS, min_doc_tokens=1, max_tokens=0, max_doc_chars=2**20):
    """The two pipelines of datatrove, for its executors: {"encode": steps, "copies": steps}, of `tasks` tasks each.

    out holds tokenizer.tiktoken. A task stops after its share of max_tokens (0: never).
    """
    readers = make_readers(source)
    with_files = min(tasks, max(len(list_files(reader)) for reader in readers))
    folder = Path(out).resolve() / "tasks"                              # datatrove remembers relative paths
    config = ExactDedupConfig(text_of, hash_config=HashConfig(hash_fc="sha1"))
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    return {
        "encode": [*readers, Encode(folder / "tokens", folder.parent / "tokenizer.tiktoken", min_doc_tokens,
                                    -(-max_tokens // with_files), max_doc_chars),
                   ExactDedupSignature(str(folder / "hashes"), config, finder_workers=tasks)],
        "copies": [ExactFindDedups(str(folder / "hashes"), str(folder / "copies"), config)]}

def train_tokenizer(source, vocab, max_doc_chars):
    """{token bytes: rank} of a tokenizer trained on the first TOKENIZER_CHARS characters of the training documents."""
    documents = itertools.chain(*(reader.run() for reader in make_readers(source)))
    texts = []
    size = 0
    for split, _, text in data.split_texts(pieces_of(documents, max_doc_chars), 1, {"short": 0, "duplicate": 0}):
        if split == "train":
            texts.append(text)
            size += len(text)
        if size >= TOKENIZER_CHARS:
            break
    print(f"training a tokenizer of {vocab:,} entries on {size:,} characters", flush=True)
    return data.train_tokenizer(texts, vocab)

def join(out, tasks):
    """Join the tasks' tokens, without the copies, into the splits; returns (their documents, what was dropped)."""
    folder = out / "tasks"
    documents = dict.fromkeys(data.SPLITS, 0)
    dropped = {"short": 0, "duplicate": 0}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(out / f"{split}.bin.unfinished", "wb")) for split in data.SPLITS]
        for task in range(tasks):
            index = np.load(folder / "tokens" / f"{task:05d}.npz")
            copies = {i for path in folder.glob(f"copies/*/{task:05d}.c4_dup") for i in np.fromfile(path, np.uint32)}
            dropped["short"] += int(index["short"])
            dropped["duplicate"] += int(index["duplicate"]) + len(copies)
            with open(folder / "tokens" / f"{task:05d}.bin", "rb") as tokens:
                for i, (split, size) in enumerate(zip(index["splits"], index["sizes"], strict=True)):
                    document = tokens.read(2 * size)
                    if i not in copies:
                        files[split].write(document)
                        documents[data.SPLITS[split]] += 1
    for split in data.SPLITS:
        os.replace(out / f"{split}.bin.unfinished", out / f"{split}.bin")
    return documents, dropped

def prepare(source, out, vocab, ranks=None, min_doc_tokens=1, max_tokens=0, max_doc_chars=2**20, workers=None,
            tasks=TASKS):
    """Make a folder of tokens as data.prepare does, with little of the source in memory at once; returns its path.

    ranks: of a ready tokenizer, or None. InputError if the folder exists, or was begun with other settings.
    """
    settings = {"source": data.full_name(source), "vocab": vocab, "pattern": data.SPLIT_PATTERN, "tasks": tasks,
                "max_tokens": max_tokens, "min_doc_tokens": min_doc_tokens, "max_doc_chars": max_doc_chars,
                "files": data.hash_listing(source)}
    data.check_new(out, overwrite=True)
    if data.is_whole(out):
        raise InputError(f"{out} exists: use it with --data {out}, remove it, or choose another --out")
    with common.lock(out):
        if (out / "meta.json").exists():
            begun = read_json(out / "meta.json")
            if changed := [name for name, value in settings.items() if begun.get(name) != value]:
                raise InputError(f"{out} was begun with another value of {changed[0]}: choose another --out")
        write_text(out / "meta.json", json.dumps(settings))             # not whole yet, and from now on ours
        if not (out / "tokenizer.tiktoken").exists():
            data.write_ranks(out / "tokenizer.tiktoken", ranks or train_tokenizer(source, vocab, max_doc_chars))
        pipelines = make_pipelines(source, out, tasks, min_doc_tokens, max_tokens, max_doc_chars)
        os.environ.setdefault("TQDM_DISABLE", "1")                      # datatrove's own bars, in the workers
        workers = workers or os.cpu_count()
        try:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                for name, steps in pipelines.items():
                    Executor(steps, tasks, workers, str(out.resolve() / "tasks" / name)).run(pool)
        except BrokenProcessPool:
            raise InputError("a worker was killed: start the same command again, which continues (with fewer "
                             "--workers, if memory was short)") from None
        documents, dropped = join(out, tasks)
        data.check_counts(source, documents, dropped)
        data.write_meta(out, settings, documents, dropped, {"val": {}, "test": {}})
    print(f"{out}/tasks holds the work of the tasks, and may be deleted")
    return out

def main():
    parser = data.make_parser()
    parser.prog = "python -m engine.corpora"
    parser.description = __doc__
    parser.epilog = None
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes at once (default: one a core)")
    parser.add_argument("--tasks", type=at_least(1), default=TASKS, metavar="M",
                        help="into which the files are dealt out: the result depends on it (default: %(default)s)")
    with parser.one_line_errors():
        args = vars(parser.parse_args())
        if not data.is_large(args["source"]):
            raise InputError(f"{args['source']} has no .parquet or .jsonl file: python data.py {args['source']}")
        data.show(data.prepare(**args))

if __name__ == "__main__":
    main()
