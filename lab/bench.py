"""Speed and memory of every encoding and backend, side by side in one run.

    python -m lab.bench                                      mini: training, evaluation, generation
    python -m lab.bench --preset paper-35m --parts train --pe expe,exqpe,rope
    python -m lab.bench --preset paper-35m --dtype bf16 --compile --batch-size 64        on a GPU
    python -m lab.bench --parts train --pe rope --nanogpt nanoGPT/model.py               beside a clone of nanoGPT

Every row is measured in a process of its own, which keeps its memory apart, beside one that does the same with NoPE,
the floor: A B A B, so that a machine that is slow for a minute is slow for both, and their ratio is the median of those
of the pairs. A training step is train.py's: forward, backward, clipping, AdamW. The rate of one large matrix product,
measured in the same minutes, says what the machine could do. Tokens are generated within the trained length with a
cache, by one text or several together, and in a full stream.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import re
import resource
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from cli import CommandLine, at_least, listed, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
from tqdm import tqdm

import backends
import train
from backends import pick_device
from config import PRESETS, make_configs
from engine import fast
from eval import MULTIPLES
from files import write_text
from lab.table import print_table
from longer.flags import SINKS
from positional_encodings import ENCODINGS
from settings import InputError

BACKENDS = (*backends.BACKENDS, "plain")     # torch and numpy with --fast, and torch without it
FLOOR = "nope"
METHODS = {pe: f"--pe {pe}" for pe in ENCODINGS} | {"expe-on-k": "--pe expe --on k"}
PARTS = ("train", "evaluate", "generate")
BATCH = {"mini": 8, "small": 8, "paper-35m": 8, "llama-135m": 1, "llama-342m": 1}  # sequences in a step
EVALUATED = {"cpu": 2**11, "mps": 2**16, "cuda": 2**18}                # tokens in a timed evaluation, at least
GENERATED = 32                                                         # tokens in a timed generation
TOGETHER = 8                                                           # texts that are written side by side
GEMM = {"cpu": 2048, "mps": 4096, "cuda": 8192}  # rows and columns of the product that measures the machine
REST = 0.1                               # seconds for the threads of the process before to fall asleep

# ---- what is timed ---------------------------------------------------------------------------------------------------

def peak_bytes():
    """The most memory that this process has had: on Linux VmHWM, as ru_maxrss begins with the parent's."""
    with contextlib.suppress(FileNotFoundError):
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def make_nanogpt(path, config, compiled):
    """nanoGPT's model in the same shape, with its own layers and learned positions, as TorchBackend takes one."""
    import torch
    module = runpy.run_path(path)
    if not {"GPT", "GPTConfig"} <= module.keys():
        raise InputError(f"--nanogpt must be model.py of a clone of nanoGPT, and {path} has no GPT and GPTConfig")
    shape = {"block_size": config.context, "vocab_size": config.vocab, "n_layer": config.layers, "n_head": config.heads,
             "n_embd": config.width, "dropout": config.dropout, "bias": False}

    class Loss(torch.nn.Module):
        def forward(self, tokens, targets, positions=None):
            return self.model(tokens, targets.contiguous())[1]

    loss = Loss()
    with contextlib.redirect_stdout(sys.stderr):
        loss.model = module["GPT"](module["GPTConfig"](**shape))
    if compiled:
        loss.model.compile()
    return loss

@functools.cache                         # one a process, made by its first question
class Work:
    """What is measured of one encoding by one backend, in that process."""

    def __init__(self, preset, pe, backend, batch, dtype, device, compiled):
        from model_torch import cross_entropy
        fast = ["--no-fast" if backend == "plain" else "--fast"]
        _, self.model, config = train.read_flags(["--preset", preset, *METHODS[pe].split(), "--dtype", dtype, *fast])
        self.config = replace(config, batch_size=batch, micro_batch=batch)
        self.rng = np.random.default_rng(0)
        self.steps = itertools.count()
        self.wait = lambda: None
        self.memory = peak_bytes
        self.square = np.ones((GEMM["cpu"], GEMM["cpu"]), np.float32)
        if backend != "numpy":
            import torch
            device, size = torch.device(device), GEMM[torch.device(device).type]
            self.square = torch.ones(size, size, device=device, dtype=torch.bfloat16 if dtype == "bf16" else None)
            if device.type != "cpu":
                self.wait = torch.accelerator.synchronize
            if device.type == "cuda":
                self.memory = torch.cuda.max_memory_allocated
        if backend not in BACKENDS:
            plain = replace(self.config, fast=False)
            model = make_nanogpt(backend, self.model, compiled)
            self.backend = backends.TorchBackend(self.model, plain, device, model=model)
            return
        kind = backends.NumpyBackend if backend == "numpy" else backends.TorchBackend
        self.backend = kind(self.model, self.config, device, compiled)
        if backend == "plain":
            self.backend.model.cross_entropy = cross_entropy   # which --compile replaced

    @functools.cached_property
    def reader(self):
        """What reads, for eval.py and generate.py."""
        from longer.reading import Reader
        return Reader(self.model).to(self.backend.device).eval()

    def tokens(self, batch, length):
        return self.rng.integers(0, self.model.vocab, (batch, length + 1))

    def seconds(self, job, *arguments):
        self.wait()
        begin = time.perf_counter()
        job(*arguments)
        self.wait()
        return time.perf_counter() - begin

    def step(self):
        """(Seconds of a training step, operations a second of one large product after it)"""
        batch = self.tokens(self.config.batch_size, self.model.context)
        seconds = self.seconds(self.backend.step, (batch[:, :-1], batch[:, 1:]), next(self.steps))
        return seconds, 2 * len(self.square) ** 3 / self.seconds(lambda: self.square @ self.square)

    def evaluate(self, length):
        """Seconds a token; None where there are no positions."""
        import torch
        if length > self.reader.longest:
            return None
        n = max(16 * self.model.context, EVALUATED[self.backend.device.type]) // length
        tokens = torch.from_numpy(self.tokens(n, length)).to(self.backend.device)
        with self.backend.autocast:
            return self.seconds(self.reader.token_losses, tokens[:, :-1], tokens[:, 1:]) / (n * length)

    def generate(self, streaming, texts):
        """(Seconds to the first token, seconds a token of each text after it, bytes a token in the cache), or None."""
        from generate import choose
        from longer.cache import Cache
        from longer.writing import generate_cached
        if streaming and not self.reader.can_stream():
            return None
        context = self.model.context
        cache = Cache(SINKS, context - SINKS - 1) if streaming else Cache()
        prompt = context if streaming else context - GENERATED         # a full stream, or all within the trained length
        writing = generate_cached(self.reader, self.tokens(texts, prompt - 1).tolist(), cache, choose)
        first = self.seconds(next, writing)
        each = self.seconds(lambda: [next(writing) for _ in range(GENERATED)]) / GENERATED
        return first, each, cache.nbytes / len(cache) / texts

# ---- rows, in turn ---------------------------------------------------------------------------------------------------

def begin():
    """Of a process that works for another: a Ctrl-C is the asker's, and it ends with the asker, even a killed one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: multiprocessing.parent_process().join() or os._exit(1), daemon=True).start()

def answer(arguments, method, *asked):
    return getattr(Work(*arguments), method)(*asked)

class Row:
    """One encoding by one backend, whose Work is done in a process of its own; floor: NoPE's Row (of its own: None)."""

    def __init__(self, pe, backend, args, floor=None):
        self.floor = floor or self
        self.repeats = args.repeats
        self.model = make_configs(args.preset)[0]
        self.names = {"preset": args.preset, "pe": pe, "backend": backend, "batch": args.batch_size,
                      "dtype": args.dtype, "device": args.device}
        self.work = *self.names.values(), args.compile
        os.environ["GOMP_SPINCOUNT"] = "300000"             # of workers in turns, whose threads would wake up late
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin)

    def ask(self, method, *arguments):
        """What the Work answers in its process; InputError that says why it cannot."""
        try:
            return self.pool.submit(answer, self.work, method, *arguments).result()
        except (InputError, MemoryError, RuntimeError) as error:   # torch out of memory
            row = "{preset}, {pe} by {backend}, {batch} sequences".format(**self.names)
            reason = str(error).partition("\n")[0] or "out of memory"
            raise InputError(f"{row}: {reason}; use a smaller --batch-size") from None

    def in_turn(self, *request):
        """(medians of the answers, medians of their ratios to NoPE's) but for the first; None without answers."""
        answers = {self.floor: [], self: []}                           # one list, if the row is NoPE's own
        for _ in range(self.repeats + 1):
            for each, values in answers.items():
                time.sleep(REST)
                values.append(each.ask(*request))
        if answers[self][0] is None:
            return None
        mine, nope = (np.array(answers[each][1:]) for each in (self, self.floor))
        return np.median(mine, axis=0), np.median(mine / nope, axis=0)

    def train(self):
        self.ask("step")                 # besides the one that in_turn throws away: compilation may take two
        (seconds, rate), (over_nope, _) = self.in_turn("step")
        tokens = self.names["batch"] * self.model.context / seconds
        return {"step, ms": 1e3 * seconds, "tokens/s": tokens, "GFLOP/s": fast.flops_a_token(self.model) * tokens / 1e9,
                "product's": rate / 1e9, "x NoPE": over_nope, "peak, MB": self.ask("memory") / 1e6}

    def evaluate(self):
        numbers = {}
        for length in (k * self.model.context for k in MULTIPLES):
            if timing := self.in_turn("evaluate", length):
                numbers |= {f"tokens/s at {length:,}": 1 / timing[0], f"x NoPE at {length:,}": timing[1]}
        return numbers

    def generate(self):
        numbers = {}
        kinds = ("cached", False, 1), (f"of {TOGETHER} texts", False, TOGETHER), ("streaming", True, 1)
        for name, streaming, texts in kinds:
            if timing := self.in_turn("generate", streaming, texts):
                first, each, size = timing[0]
                numbers |= {f"tokens/s, {name}": texts / each}
                numbers |= {"first token, ms": 1e3 * first, "cache, B/token": size} if name == "cached" else {}
        return numbers

def measure(args):
    """{part: rows}: NoPE by torch, then each of the others beside it. Only torch evaluates and generates."""
    floor = None
    parts = {part: [] for part in args.parts}
    others = [("learned", args.nanogpt)] * bool(args.nanogpt)
    jobs = dict.fromkeys([(FLOOR, "torch"), *itertools.product(args.pe, args.backends), *others])      # each once
    for pe, backend in tqdm(jobs, desc=args.preset, leave=False, disable=None):
        row = Row(pe, backend, args, floor)
        floor = floor or row
        for part, rows in parts.items():
            if part == "train" or backend == "torch":
                rows.append(row.names | getattr(row, part)())
        if row is not floor:
            row.pool.shutdown()
    floor.pool.shutdown()
    return parts

def print_part(part, rows):
    """A table: a line a row, a column a number that any row has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numbers = [key for key in keys if key not in ("preset", "pe", "backend", "batch", "dtype", "device")]
    body = [[row["pe"], row["backend"], *(f"{row[key]:,.{3 if 'NoPE' in key else 1 if 'ms' in key else 0}f}"
                                          if key in row else "-" for key in numbers)] for row in rows]
    print(f"\n{part}: {rows[0]['preset']}, {rows[0]['batch']} sequences, {rows[0]['dtype']} on {rows[0]['device']}\n")
    print_table(["encoding", "backend", *numbers], body)

# ---- as a script -----------------------------------------------------------------------------------------------------

def main(argv=None):
    parser = CommandLine(prog="python -m lab.bench", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="mini", metavar="NAME",
        help=f"the shape: {', '.join(PRESETS)} (default: mini)")
    add("--parts", type=listed(str, *PARTS), default=list(PARTS), metavar="NAME,...",
        help=f"of {', '.join(PARTS)} (default: all)")
    add("--pe", type=listed(str, *METHODS), default=list(ENCODINGS), metavar="NAME,...",
        help=f"of {', '.join(METHODS)}; {FLOOR} by torch, with which all are compared, is always there (default: all)")
    add("--backends", type=listed(str, *BACKENDS), metavar="NAME,...",
        help=f"of {', '.join(BACKENDS)}: torch and numpy are train.py --fast, plain is torch without it (default: "
             "torch, and numpy where it can)")
    batches = ", ".join(f"{n} for {preset}" for preset, n in BATCH.items())
    add("--batch-size", type=at_least(1), metavar="N", help=f"sequences in a training step (default: {batches})")
    add("--repeats", type=at_least(1), default=7, metavar="N", help="timed rounds of each (default: 7)")
    add("--dtype", choices=("fp32", "tf32", "bf16"), default="fp32", help="torch's, as in train.py (default: fp32)")
    add("--compile", action="store_true", help="torch.compile the blocks that train, as in train.py")
    add("--nanogpt", metavar="FILE", help="train this model too: model.py of a clone of github.com/karpathy/nanoGPT")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto, a GPU if any)")
    add("--json", type=new_file(".json"), metavar="FILE", help="write the numbers as a list of objects")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        args.device = str(pick_device(args.device))
        args.batch_size = args.batch_size or BATCH[args.preset]
        by_numpy = args.device == "cpu" and args.dtype == "fp32" and not args.compile
        if "numpy" in (args.backends or ()) and not by_numpy:
            raise InputError("numpy computes in fp32 on the CPU, uncompiled: leave it out of --backends")
        if args.nanogpt is not None and not Path(args.nanogpt).is_file():
            raise InputError(f"--nanogpt must be model.py of a clone of nanoGPT, and {args.nanogpt} is no file")
        args.backends = args.backends or [name for name in backends.BACKENDS if name != "numpy" or by_numpy]
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}", flush=True)
        parts = measure(args)
        if args.json:
            rows = [row | {"part": part} for part, some in parts.items() for row in some]
            write_text(args.json, json.dumps(rows, indent=1, allow_nan=False) + "\n")
        for part, rows in parts.items():
            print_part(part, rows)

if __name__ == "__main__":
    main()
