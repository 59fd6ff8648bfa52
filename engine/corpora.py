"""Corpora that need not fit in memory: folders of .parquet and .jsonl files, and FineWeb by name, through datatrove.

    python -m engine.corpora SOURCE --out data/NAME --workers 8 --tasks 64

The files of a source are divided among the tasks. A task reads its files, cuts long documents, drops short ones,
encodes the others, and notes a hash of each. Then exact copies are found by their hashes, and the tasks' tokens are
joined in the order of the tasks without the copies. The result depends on --tasks and not on --workers. The same
command continues work that was stopped, and skips the tasks that are done. Near copies of a document are kept.
"""

import contextlib
import functools
import glob
import itertools
import json
import multiprocessing
import os
import re
import secrets
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import common

# common comes first: it says in one line which package is missing
# isort: split
import numpy as np
from tqdm import tqdm

import data
from config import InputError

try:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig, ExactDedupSignature, ExactFindDedups
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.utils.hashing import HashConfig
    from loguru import logger
except ModuleNotFoundError as error:
    missing = (f"this source is read with datatrove, and {error.name} is missing: make setup-all installs "
               "it, or choose a file or folder of text with --data PATH, or --preset mini")
    if __name__ == "__main__":
        common.CommandLine(prog="python -m engine.corpora").error(missing)
    raise InputError(missing) from None

HUB = {"fineweb": "hf://datasets/HuggingFaceFW/fineweb/sample/10BT",
       "fineweb-edu": "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"}
READERS = {".jsonl": JsonlReader, ".parquet": functools.partial(ParquetReader, read_metadata=False)}
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

def make_readers(source):
    """datatrove's readers of a source: of a data set of the hub, or of the .jsonl and .parquet files of a path."""
    if source in HUB:
        return [READERS[".parquet"](HUB[source])]
    path = Path(source).absolute()
    if path.is_file():                                                  # datatrove puts a * before what has no [
        return [READERS[path.suffix](str(path.parent), glob_pattern=f"{glob.escape(path.stem)}[.]{path.suffix[1:]}")]
    readers = [reader(str(path), glob_pattern=f"**/*{suffix}") for suffix, reader in READERS.items()]
    return [reader for reader in readers if list_files(reader)]

def list_files(reader):
    with reading():
        return reader.data_folder.list_files(glob_pattern=reader.glob_pattern)

def texts_of(documents):
    """(None, text) of datatrove's documents."""
    with reading():
        for document in documents:
            yield None, document.text

@contextlib.contextmanager
def replacing(path):
    """A new file to write, which takes the place of `path` once it is whole."""
    new = path.parent / f".unfinished-{secrets.token_hex(8)}-{path.name}"
    with open(new, "xb") as file:
        yield file
    os.replace(new, path)

def encode(documents, rank, world_size, folder, tokenizer, min_doc_tokens, max_tokens, max_doc_chars):
    """Write the tokens of documents to RANK.bin, their splits and sizes to RANK.npz, and pass the documents on."""
    encoding = data.make_tokenizer(data.read_ranks(tokenizer))
    dropped = {"short": 0, "duplicate": 0}
    splits = []
    sizes = []
    with replacing(folder / f"{rank:05d}.bin") as file:
        for split, _, text in data.split_texts(texts_of(documents), max_doc_chars, min_doc_tokens, dropped):
            tokens = encoding.encode_ordinary(text)
            if len(tokens) < min_doc_tokens:
                dropped["short"] += 1
                continue
            file.write(np.array([encoding.eot_token, *tokens], np.uint16).tobytes())
            splits.append(data.SPLITS.index(split))
            sizes.append(len(tokens) + 1)
            yield Document(text=text, id=str(len(sizes)))
            if 0 < max_tokens <= file.tell() // 2:
                break
    with replacing(folder / f"{rank:05d}.npz") as file:
        np.savez(file, splits=splits, sizes=sizes, **dropped)

def text_of(document):
    return document.text

def make_pipelines(source, out, tasks=TASKS, min_doc_tokens=1, max_tokens=0, max_doc_chars=2**20):
    """The two pipelines of datatrove, for its executors: {"encode": steps, "copies": steps}, of `tasks` tasks each.

    out holds tokenizer.tiktoken. A task stops after its share of max_tokens (0: never).
    """
    readers = make_readers(source)
    with_files = min(tasks, max(len(list_files(reader)) for reader in readers))
    folder = Path(out).resolve() / "tasks"                              # datatrove remembers relative paths
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    step = functools.partial(encode, folder=folder / "tokens", tokenizer=folder.parent / "tokenizer.tiktoken",
                             min_doc_tokens=min_doc_tokens, max_tokens=-(-max_tokens // with_files),
                             max_doc_chars=max_doc_chars)
    config = ExactDedupConfig(text_of, hash_config=HashConfig(hash_fc="sha1"))
    return {"encode": [*readers, step, ExactDedupSignature(str(folder / "hashes"), config, finder_workers=tasks)],
            "copies": [ExactFindDedups(str(folder / "hashes"), str(folder / "copies"), config)]}

def end_with_parent():
    """End a worker as soon as its parent has ended, whatever ended it; a Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()

def run_tasks(pipelines, folder, tasks, workers):
    """Run what is left of the tasks. Python's own pool, unlike datatrove's, notices a worker that is killed."""
    os.environ.setdefault("TQDM_DISABLE", "1")                          # datatrove's own bars, in the workers
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # it warns of what it frees after a kill
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
            try:
                for name, steps in pipelines.items():
                    executor = LocalPipelineExecutor(steps, tasks, logging_dir=str(folder / name))
                    left = executor.get_incomplete_ranks()
                    running = [pool.submit(executor._run_for_rank, rank, 1) for rank in left]   # 1: logs to files alone
                    done = as_completed(running)
                    for task in tqdm(done, "tasks", tasks, initial=tasks - len(left), disable=None, leave=False):
                        task.result()
            except BaseException:                                       # the pool would wait for tasks that run
                for worker in multiprocessing.active_children():
                    worker.kill()
                raise
    except BrokenProcessPool:
        raise InputError("a worker was killed: start the same command again, which continues (with fewer --workers, "
                         "if memory was short)") from None

def texts_for_tokenizer(source, max_doc_chars):
    """The texts of training documents, until they have TOKENIZER_CHARS characters."""
    documents = itertools.chain(*(reader.run() for reader in make_readers(source)))
    size = 0
    print(f"training a tokenizer on the first {TOKENIZER_CHARS:,} characters of {source} at most", flush=True)
    for split, _, text in data.split_texts(texts_of(documents), max_doc_chars, 1, {"short": 0, "duplicate": 0}):
        if split == "train":
            yield text
            size += len(text)
        if size >= TOKENIZER_CHARS:
            break

def join(out, tasks):
    """Join the tasks' tokens, without the copies, into the splits; returns (their documents, what was dropped)."""
    folder = out / "tasks"
    documents = dict.fromkeys(data.SPLITS, 0)
    dropped = {"short": 0, "duplicate": 0}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(replacing(out / f"{split}.bin")) for split in data.SPLITS]
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
    return documents, dropped

def prepare(source, out=None, vocab=None, tokenizer=None, min_doc_tokens=None, max_tokens=0, max_doc_chars=2**20,
            overwrite=False, usual=1, workers=None, tasks=TASKS):
    """Make a folder of tokens as data.prepare does, with little of the source in memory at once; returns its path.

    InputError if the folder exists, or was begun with other settings.
    """
    out, vocab, ranks = data.target(source, out, vocab, tokenizer)
    min_doc_tokens = min_doc_tokens or usual
    settings = {"source": data.full_name(source), "vocab": vocab, "pattern": data.SPLIT_PATTERN, "tasks": tasks,
                "max_tokens": max_tokens, "min_doc_tokens": min_doc_tokens, "max_doc_chars": max_doc_chars,
                "content": data.hash_source(source)}
    data.check_new(out, overwrite=True)
    if data.is_whole(out):
        raise InputError(f"{out} exists: use it with --data {out}, remove it, or choose another --out")
    with common.lock(out):
        begun = common.read_json(out / "meta.json") if (out / "meta.json").exists() else settings
        if changed := [name for name, value in settings.items() if begun.get(name) != value]:
            raise InputError(f"{out} was begun with another value of {changed[0]}: choose another --out")
        common.write_text(out / "meta.json", json.dumps(settings))      # not whole yet, and from now on ours
        for path in [*out.glob(".unfinished-*"), *out.glob("tasks/tokens/.unfinished-*")]:
            path.unlink()                                               # a kill has left it
        if not (out / "tokenizer.tiktoken").exists():
            ranks = ranks or data.train_tokenizer(texts_for_tokenizer(source, max_doc_chars), vocab)
            data.write_ranks(out / "tokenizer.tiktoken", ranks)
        pipelines = make_pipelines(source, out, tasks, min_doc_tokens, max_tokens, max_doc_chars)
        run_tasks(pipelines, out.resolve() / "tasks", tasks, workers or os.cpu_count())
        documents, dropped = join(out, tasks)
        data.check_counts(source, documents, dropped)
        data.write_meta(out, settings, documents, dropped, {"val": {}, "test": {}})
    say_what_is_left_out(source, out / "tasks/encode/logs")
    print(f"{out}/tasks holds the work of the tasks, and may be deleted")
    return out

def say_what_is_left_out(source, logs):
    """Print which rows datatrove could not read, and which files beside those of rows were not."""
    said = "".join(path.read_text(encoding="utf-8") for path in sorted(logs.glob("*")))
    if unread := re.findall(r"Error when reading `(.*?)`: (?!input data is empty)", said):
        print(f"left out: {len(unread)} lines that are no JSON, of {', '.join(dict.fromkeys(unread))}")
    if "Found document without text" in said:
        print("left out: rows without a text in the field `text`")
    if others := data.visible_files(source, data.TEXT):
        print(f"left out, beside .jsonl and .parquet: {len(others)} files, such as {others[0].name}")

def main():
    parser = data.make_parser()
    parser.prog = "python -m engine.corpora"
    parser.description = __doc__
    parser.epilog = None
    parser.add_argument("--workers", type=common.at_least(1), metavar="N",
                        help="processes at once (default: one a core)")
    parser.add_argument("--tasks", type=common.at_least(1), default=TASKS, metavar="M",
                        help="into which the files are dealt out: the result depends on it (default: %(default)s)")
    with parser.one_line_errors():
        args = vars(parser.parse_args())
        if not data.is_large(args["source"]):
            raise InputError(f"{args['source']} has no .parquet or .jsonl file: python data.py {args['source']}")
        data.show(prepare(**args))

if __name__ == "__main__":
    main()
