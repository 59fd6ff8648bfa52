"""Corpora that need not fit in memory: .parquet and .jsonl files, and FineWeb by name, through datatrove.

    python -m engine.corpora SOURCE --out data/NAME --workers 8 --tasks 64

The files of a source are divided among the tasks. A task reads its files, cuts long documents, drops short ones,
encodes the others, and notes a hash of each and a signature of its shingles. Then the tasks' tokens are joined in the
order of the tasks, without exact copies, and without held-out documents that MinHash finds to be nearly in train
(Broder 1997; not for FineWeb, of which near copies are dropped already). The result depends on --tasks and not on
--workers. The same command continues work that was stopped, and skips the tasks that are done; --overwrite begins anew.
Rows and files that are not used are counted and named, as in texts.py.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from cli import CommandLine, at_least

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
from tqdm import tqdm

import data
from config import PRESETS
from engine.workers import end_with_parent, leave_ctrl_c_to_parent
from files import lock, read_json, read_text, remove_unfinished, replacing, write_text
from settings import InputError
from texts import (
    COPIES,
    NEAR,
    NO_TEXT,
    ROWS,
    SHORT,
    TEXT,
    LeftOut,
    drop_empty,
    full_name,
    hash_shingles,
    hash_source,
    hash_text,
    list_files,
    read_rows,
    split_texts,
    with_ending,
)
from tokenizer import SPLIT_PATTERN, make_tokenizer, read_ranks, train_tokenizer, write_ranks

try:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer
    from loguru import logger
    from pyarrow.parquet import ParquetFile
except ModuleNotFoundError as error:
    missing = (f"this source is read with datatrove, and {error.name} is missing: make setup-all installs "
               "it, or choose a file or folder of text with --data PATH, or --preset mini")
    if __name__ == "__main__":
        CommandLine(prog="python -m engine.corpora").error(missing)
    raise InputError(missing) from None

HUB = {"fineweb": "hf://datasets/HuggingFaceFW/fineweb/sample/10BT",
       "fineweb-edu": "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"}
TEXTS = "files of text beside the .jsonl and .parquet files"
REST = "the rest of a task's files, after its share of --max-tokens, from"
TASKS = 16
MINHASH = MinhashConfig()              # 14 buckets of 8 hashes: near copies share some 0.7 of their shingles
TOKENIZER_CHARS = 2**28             # the tokenizer is trained on at most so much of a source
logger.remove()                     # each task has a log of its own, in tasks/encode/logs

@contextlib.contextmanager
def reading():
    """InputError for whatever goes wrong within a source: the hub, the network and Arrow have errors of their own."""
    try:
        yield
    except Exception as error:
        raise InputError(f"the source cannot be read ({type(error).__name__}: {str(error)[:200]})") from error

def list_rows(source, left_out):
    """(name, path) of the files of rows of a path; the files of text beside them are left out."""
    files = list_files(source, left_out)
    left_out.add(TEXTS, *(name for name, _ in with_ending(files, *TEXT)))
    return with_ending(files, *ROWS)

def read_files(files, left_out):
    """(name, text) of the rows of files."""
    with reading():
        for name, path in files:
            read = read_rows if path.suffix.lower() == ".jsonl" else read_parquet
            yield from drop_empty(read(path, name, left_out), left_out)

def read_parquet(path, name, left_out):
    """(name, text) of the rows of a .parquet file that have a string in the column `text`."""
    count = 0
    with ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["text"]):
            values = batch.column(0).to_pylist() if batch.num_columns else [None] * batch.num_rows
            for number, value in enumerate(values, count + 1):
                if isinstance(value, str):
                    yield f"{name}:{number}", value
                else:
                    left_out.add(NO_TEXT, f"{name}:{number}")
            count += len(values)

def texts_of(documents):
    """(name, text) of datatrove's documents."""
    with reading():
        for document in documents:
            yield document.id, document.text

def read_hub(source):
    """datatrove's reader of a data set of the hub."""
    return ParquetReader(HUB[source], read_metadata=False)

def list_hub(source):
    reader = read_hub(source)
    with reading():
        return reader.data_folder.list_files(glob_pattern=reader.glob_pattern)

def encode(documents, rank, world_size, folder, tokenizer, settings, files=None):
    """Write what a task makes of its share of the files, or of datatrove's documents, and pass the documents on.

    RANK.bin has the tokens, RANK.txt the names of documents, RANK.npz their splits, sizes and hashes, and what was left
    out.
    """
    encoding = make_tokenizer(read_ranks(tokenizer))
    left_out = LeftOut()
    texts = texts_of(documents) if files is None else read_files(files[rank::world_size], left_out)
    splits = []
    sizes = []
    hashes = []
    names = []
    with replacing(folder / f"{rank:05d}.bin") as file:
        for split, name, text in split_texts(texts, settings, left_out):
            tokens = encoding.encode_ordinary(text)
            if len(tokens) < settings["min_doc_tokens"]:
                left_out.add(SHORT, name)
                continue
            file.write(np.array([encoding.eot_token, *tokens], np.uint16).tobytes())
            splits.append(data.SPLITS.index(split))
            sizes.append(len(tokens) + 1)
            hashes.append(hash_text(text))
            names.append(name)
            yield Document(text=text, id=str(len(sizes)))
            if 0 < settings["max_tokens"] <= file.tell() // 2:
                left_out.add(REST, name)
                break
    write_text(folder / f"{rank:05d}.txt", "".join(f"{name}\n" for name in names))
    with replacing(folder / f"{rank:05d}.npz") as file:
        np.savez(file, splits=splits, sizes=sizes, hashes=np.array(hashes, np.uint64), left_out=json.dumps(left_out))

class Signatures(MinhashDedupSignature):
    """MinHash signatures of the shingles of texts.py: of the 1,024 smallest hashes, so that none takes long."""

    def get_shingles(self, text):
        return hash_shingles(text)[:1024, None]

def make_pipelines(source, out, tasks=TASKS, **settings):
    """Pipelines of datatrove, for its executors: {"encode": steps} of `tasks` tasks, and those that find near copies.

    out holds tokenizer.tiktoken; settings are those of data.prepare. A task stops after its share of max_tokens.
    """
    settings = data.PREPARATION | settings
    files = None if source in HUB else list_rows(source, LeftOut())
    with_files = min(tasks, len(list_hub(source) if files is None else files))
    folder = Path(out).resolve() / "tasks"                              # datatrove remembers relative paths
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    step = functools.partial(encode, folder=folder / "tokens", tokenizer=folder.parent / "tokenizer.tiktoken",
                             settings=settings | {"max_tokens": -(-settings["max_tokens"] // with_files)},
                             files=files and [(name, path.absolute()) for name, path in files])
    if files is None:
        return {"encode": [read_hub(source), step]}
    signatures, pairs, clusters = (str(folder / name) for name in ("signatures", "pairs", "clusters"))
    return {"encode": [step, Signatures(signatures, MINHASH, WhitespaceTokenizer())],
            "pair": [MinhashDedupBuckets(signatures, pairs, config=MINHASH)],
            "cluster": [MinhashDedupCluster(pairs, clusters, config=MINHASH, save_cluster_id=True)]}

def begin_worker():
    """What a worker does first: it ends with its parent, which alone answers a Ctrl-C."""
    leave_ctrl_c_to_parent()
    end_with_parent(multiprocessing.parent_process().join)

def run_tasks(pipelines, folder, tasks, processes):
    """Run what is left of the tasks. Python's own pool, unlike datatrove's, notices a worker that is killed."""
    os.environ.setdefault("TQDM_DISABLE", "1")                          # datatrove's own bars, in the workers
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # it warns of what it frees after a kill
    try:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), begin_worker) as pool:
            try:
                for name, steps in pipelines.items():
                    tasks = {"encode": tasks, "pair": MINHASH.num_buckets, "cluster": 1}[name]
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
    """The texts of training documents, until they have TOKENIZER_CHARS characters. InputError if there is none."""
    left_out = LeftOut()
    texts = texts_of(read_hub(source).run()) if source in HUB else read_files(list_rows(source, left_out), left_out)
    size = 0
    print(f"training a tokenizer on the first {TOKENIZER_CHARS:,} characters of {source} at most", flush=True)
    for split, _, text in split_texts(texts, data.PREPARATION | {"max_doc_chars": max_doc_chars}, left_out):
        if split == "train":
            yield text
            size += len(text)
        if size >= TOKENIZER_CHARS:
            break
    if not size:
        left_out.print()
        raise InputError(f"{source} has no text to train on")

def find_copies(tokens, tasks):
    """For each task, whether its documents are exact copies of one before, bool (n,)."""
    hashes = [np.load(tokens / f"{task:05d}.npz")["hashes"] for task in range(tasks)]
    together = np.concatenate(hashes)
    copies = np.ones(len(together), bool)
    copies[np.unique(together, return_index=True)[1]] = False           # the first of each hash
    return np.split(copies, np.cumsum([len(part) for part in hashes])[:-1])

def find_near(folder, splits):
    """For each task, the indices of its held-out documents that share a cluster with one of train.

    splits: of the documents of each task.
    """
    train = data.SPLITS.index("train")
    clusters = [np.fromfile(path, np.uint32).reshape(-1, 2) if path.exists() else np.zeros((0, 2), np.uint32)
                for path in (folder / f"clusters/{task:06d}.clusters" for task in range(len(splits)))]
    in_train = np.concatenate([pairs[split[pairs[:, 0]] == train, 1]                    # (document, cluster) in a row
                               for pairs, split in zip(clusters, splits, strict=True)])
    return [set(pairs[(split[pairs[:, 0]] != train) & np.isin(pairs[:, 1], in_train), 0].tolist())
            for pairs, split in zip(clusters, splits, strict=True)]

def join(out, tasks, left_out):
    """Join the tasks' tokens, without copies, into the splits; returns the number of documents of each."""
    tokens = out / "tasks/tokens"
    documents = dict.fromkeys(data.SPLITS, 0)
    indices = [np.load(tokens / f"{task:05d}.npz") for task in range(tasks)]
    copies = find_copies(tokens, tasks)
    near_copies = find_near(out / "tasks", [index["splits"] for index in indices])
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(replacing(out / f"{split}.bin")) for split in data.SPLITS]
        for task, index in enumerate(indices):
            names = read_text(tokens / f"{task:05d}.txt").splitlines()
            for reason, (count, first) in json.loads(str(index["left_out"])).items():
                left_out.add(reason, *first, count=count)
            with open(tokens / f"{task:05d}.bin", "rb") as file:
                for i, (split, size) in enumerate(zip(index["splits"], index["sizes"], strict=True)):
                    document = file.read(2 * size)
                    if copies[task][i]:
                        left_out.add(COPIES, names[i])
                    elif i in near_copies[task]:
                        left_out.add(NEAR, names[i])
                    else:
                        files[split].write(document)
                        documents[data.SPLITS[split]] += 1
    return documents

def prepare(source, out=None, vocab=None, tokenizer=None, overwrite=False, defaults=PRESETS["mini"], or_fewer=None,
            workers=None, tasks=TASKS, **given):
    """Make a folder of tokens as data.prepare does, with little of the source in memory at once; returns its path.

    InputError if the folder exists, or was begun with other settings, unless overwrite begins it anew.
    """
    settings = data.choose_settings(source, given, defaults)
    vocabulary = data.choose_vocabulary(vocab, tokenizer, or_fewer)
    out = data.choose_folder(source, out, vocabulary.size)
    meta = {"source": full_name(source), "vocab": vocabulary.size, "pattern": SPLIT_PATTERN, "tasks": tasks, **settings,
            "content": hash_source(source)}
    data.check_new(out, overwrite)
    with lock(out):
        data.check_new(out, overwrite)                                  # another process may have made it meanwhile
        if overwrite:
            begin_anew(out)
        begun = read_json(out / "meta.json") if (out / "meta.json").exists() else meta
        if changed := [name for name, value in meta.items() if begun.get(name) != value]:
            raise InputError(f"{out} was begun with another value of {changed[0]}: choose another --out, or begin anew "
                             f"with python -m engine.corpora {source} --out {out} --overwrite")
        write_text(out / "meta.json", json.dumps(meta))          # not whole yet, and from now on ours
        remove_unfinished(out / "tasks/tokens")
        if not (out / "tokenizer.tiktoken").exists():
            texts = texts_for_tokenizer(source, settings["max_doc_chars"])
            ranks = vocabulary.ranks or train_tokenizer(texts, vocabulary.size, vocabulary.or_fewer)
            write_ranks(out / "tokenizer.tiktoken", ranks)
        meta["vocab"] = len(read_ranks(out / "tokenizer.tiktoken")) + 1
        run_tasks(make_pipelines(source, out, tasks, **settings), out.resolve() / "tasks", tasks,
                  workers or os.cpu_count())
        left_out = LeftOut()
        if source not in HUB:
            list_rows(source, left_out)                                 # which files are not read
        documents = join(out, tasks, left_out)
        if not (documents["train"] and documents["val"]):
            left_out.print()
            raise InputError(f"{source}: no document is left for train or for val: give more text, or a smaller "
                             "--min-doc-tokens")
        near = {"val": {}, "test": {}} | ({} if source in HUB else {"minhash": repr(MINHASH)})
        data.write_meta(out, meta, documents, left_out, near)
    print(f"{out}/tasks holds the work of the tasks, and may be deleted")
    return out

def begin_anew(out):
    """Delete what a preparation has made in its folder."""
    for name in ("meta.json", "tokenizer.tiktoken", *(f"{split}.bin" for split in data.SPLITS)):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "tasks", ignore_errors=True)

def main():
    parser = data.make_parser()
    parser.prog = "python -m engine.corpora"
    parser.description = __doc__
    parser.epilog = None
    parser.add_argument("--workers", type=at_least(1), metavar="N",
                        help="processes at once (default: one a core)")
    parser.add_argument("--tasks", type=at_least(1), default=TASKS, metavar="M",
                        help="into which the files are dealt out: the result depends on it (default: %(default)s)")
    with parser.one_line_errors():
        args = vars(parser.parse_args())
        if args["source"] not in HUB and not list_rows(args["source"], LeftOut()):
            raise InputError(f"{args['source']} has no .parquet or .jsonl file: python data.py {args['source']}")
        data.show(prepare(**args))

if __name__ == "__main__":
    main()
