"""Speed and memory of every encoding and backend, side by side in one run.

    python bench.py                                          mini: training, evaluation, generation, data
    python bench.py --preset paper-35m --parts train --pe nope,expe,rope
    python bench.py --table                                  what each encoding costs and can do, and its loss at 16x

Every row is measured in a process of its own, which keeps its memory apart, beside one that does the same with NoPE,
the floor: A B A B, so that a machine that is slow for a minute is slow for both, and their ratio is the median of those
of the pairs. A training step is train.py's: forward, backward, clipping, AdamW. What the matrix products alone would
take follows from the rate of one large product, measured in the same minutes.
"""

import contextlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from config import (
    BACKENDS,
    DTYPES,
    DUAL_CHUNK,
    ENCODINGS,
    PRESETS,
    SCALINGS,
    SINKS,
    CommandLine,
    EncodingConfig,
    InputError,
    all_runs,
    listed,
    new_file,
    read_run,
    whole,
    write_rows,
)

PLAIN = "plain"  # a backend of this file alone: PyTorch's own parts put together, for comparison
FLOOR = "nope"
PARTS = ("train", "evaluate", "generate", "data", "profile")
BATCH = {"mini": 8, "paper-35m": 8, "llama-135m": 1, "llama-342m": 1}  # sequences in a step
EVALUATED = {"cpu": 2**11, "mps": 2**16, "cuda": 2**18}  # tokens in a timed evaluation, at least
GENERATED = 32  # tokens in a timed generation
GEMM = {"cpu": 2048, "mps": 4096, "cuda": 8192}  # rows and columns of the product that measures the machine
REST = 0.1  # seconds for the threads of the process before to fall asleep
TEXT = 2**22  # characters of the text that is encoded


def matmul_flops(config, batch):
    """Floating-point operations of one training step's matrix products, a causal attention doing half of its square.

    Two a weight and token forward, four backward (for the input and for the weight); likewise the two products of
    attention, of T/2 keys on average.
    """
    from model_numpy import parameter_shapes

    weights = sum(s[0] * s[1] for n, s in parameter_shapes(config).items() if len(s) == 2 and "embedding" not in n)
    if config.tied:
        weights += config.vocab_size * config.d_model
    attention = config.n_layers * 2 * config.d_model * config.context / 2
    return 6 * (weights + attention) * batch * config.context


# ---- processes of their own ------------------------------------------------------------------------------------------


def start(job, *arguments):
    """Run job(pipe, *arguments) in a process of its own: (our end of the pipe, the process)."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=_guarded, args=(end, job, *arguments), daemon=True)
    process.start()
    end.close()
    return pipe, process


def _guarded(pipe, job, *arguments):
    try:
        job(pipe, *arguments)
    except KeyboardInterrupt:
        pass
    except (InputError, MemoryError, RuntimeError) as error:  # RuntimeError: how torch runs out of memory
        pipe.send(str(error).splitlines()[0] if str(error) else "out of memory")


def receive(pipe):
    """What a process sends; InputError with the reason if it failed."""
    try:
        reply = pipe.recv()
    except (EOFError, ConnectionResetError):
        reply = "the process ended, perhaps for want of memory"
    if isinstance(reply, str):
        raise InputError(reply)
    return reply


def peak_bytes():
    """The most memory that this process has had.

    Linux hands ru_maxrss down to a child, which would start at its parent's peak; VmHWM is the process's own.
    """
    with contextlib.suppress(FileNotFoundError):
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- what is timed ---------------------------------------------------------------------------------------------------


def plain_gpt(config):
    """The GPT that comes to mind first, of the same shape: nn.Linear, causal SDPA, all logits, F.cross_entropy."""
    import torch.nn.functional as F
    from torch import nn

    C = config.d_model

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2, self.dropout = nn.LayerNorm(C), nn.LayerNorm(C), nn.Dropout(config.dropout)
            self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
            self.up, self.down = nn.Linear(C, config.d_mlp, bias=False), nn.Linear(config.d_mlp, C, bias=False)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (config.n_heads, -1)).transpose(1, 2)
                       for part in self.qkv(self.norm1(x)).split(C, dim=-1))                  # (B, H, T, D) each
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.dropout(self.proj(y))
            return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(config.vocab_size, C), nn.Embedding(config.context, C)
            self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(C)
            self.blocks = nn.Sequential(*(Block() for _ in range(config.n_layers)))
            self.head = nn.Linear(C, config.vocab_size, bias=False)

        def forward(self, tokens, targets):
            x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
            logits = self.head(self.norm(self.blocks(self.dropout(x))))
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return Plain()


def work(pipe, preset, pe, backend, batch, dtype, device, compiled):
    """Answers (request, its arguments ...) with what was measured, until None."""
    import numpy as np

    from model_numpy import keep_freed_memory
    from train import MAKE, TorchBackend

    model, config = PRESETS[preset]
    model = replace(model, encoding=EncodingConfig(pe, l=model.encoding.l if "l" in ENCODINGS[pe] else None))
    config = replace(config, batch_size=batch, micro_batch=batch, dtype="fp32" if backend == "numpy" else dtype)
    rng, steps, context = np.random.default_rng(0), itertools.count(), model.context
    wait, memory = lambda: None, peak_bytes
    if backend == "numpy":
        square = np.ones((GEMM["cpu"], GEMM["cpu"]), np.float32)
    else:
        import torch

        device = torch.device(device)
        square = torch.ones(GEMM[device.type], GEMM[device.type], device=device)
        square = square.bfloat16() if dtype == "bf16" else square
        if device.type != "cpu":
            wait = torch.accelerator.synchronize
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated
    if backend == PLAIN:
        runner = TorchBackend(model, config, device, compiled, plain_gpt(model))
    else:
        keep_freed_memory()  # as train.py does
        runner = MAKE[backend](model, config, device, compiled)

    def tokens(batch, length):
        return rng.integers(0, model.vocab_size, (batch, length + 1))

    def seconds(job, *arguments):
        wait()
        start = time.perf_counter()
        job(*arguments)
        wait()
        return time.perf_counter() - start

    def step():
        """(Seconds of a step, operations a second of one large product after it)"""
        taken = seconds(runner.step, tokens(batch, context), next(steps))
        return taken, 2 * len(square) ** 3 / seconds(lambda: square @ square)

    def evaluate(length):
        """Seconds a token; None where there are no positions."""
        if length > runner.model.encoding.longest:
            return None
        n = max(16 * context, EVALUATED[device.type]) // length
        return seconds(runner.summed_loss, tokens(n, length)) / (n * length)

    def generate(streaming):
        """(Seconds to the first token, seconds a token after it, bytes a token in the cache); None if it cannot."""
        if streaming and not runner.model.encoding.streams:
            return None
        from generate import generate
        from model_torch import Cache

        cache = Cache(SINKS, context - SINKS - 1) if streaming else Cache()
        prompt = context if streaming else context - GENERATED  # a full stream, or all within the trained length
        writing = generate(runner.model.eval(), [tokens(1, prompt - 1)[0].tolist()], cache)
        first = seconds(next, writing)
        return first, seconds(lambda: [next(writing) for _ in range(GENERATED)]) / GENERATED, cache.nbytes / len(cache)

    def profile():
        """{operation of torch's: share of a step's time, the largest first}"""
        with torch.profiler.profile() as profiler:
            runner.step(tokens(batch, context), next(steps))
            wait()
        kind = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        times = {event.key: getattr(event, kind) for event in profiler.key_averages()}
        return {name: spent / sum(times.values()) for name, spent in sorted(times.items(), key=lambda x: -x[1])}

    jobs = {"memory": memory, "step": step, "profile": profile, "evaluate": evaluate, "generate": generate}
    for name, *arguments in iter(pipe.recv, None):
        pipe.send(jobs[name](*arguments))


class Row:
    """What is measured of one encoding by one backend, in a process of its own."""

    def __init__(self, preset, pe, backend, args):
        self.names = {"preset": preset, "pe": pe, "backend": backend}
        self.names |= {"batch": args.batch_size or BATCH[preset], "dtype": args.dtype, "device": args.device}
        self.pipe, self.process = start(work, *self.names.values(), args.compile)

    def ask(self, *request):
        try:
            with contextlib.suppress(BrokenPipeError):  # what it had to say is still in the pipe
                self.pipe.send(request)
            return receive(self.pipe)
        except InputError as error:
            raise InputError("{preset}, {pe} by {backend}, {batch} sequences: ".format(**self.names)
                             + f"{error}; use a smaller --batch-size") from None

    def end(self):
        self.pipe.send(None)
        self.process.join()


def in_turn(floor, row, repeats, *request):
    """([what the row answers, ...], [what NoPE does, ...]), asked by turns; their first answers are thrown away."""
    answers = {floor: [], row: []}  # one list, if the row is NoPE's own
    for _ in range(repeats + 1):
        for each in answers:
            time.sleep(REST)
            answers[each].append(each.ask(*request))
    return answers[row][1:], answers[floor][1:]


def measure_train(floor, row, repeats, config):
    row.ask("step")  # besides the one that in_turn throws away: compilation may take two
    mine, nope = in_turn(floor, row, repeats, "step")
    batch, seconds = row.names["batch"], median(step for step, _ in mine)
    return {
        "step_s": seconds,
        "tokens_per_s": batch * config.context / seconds,
        "flops_per_s": matmul_flops(config, batch) / seconds,
        "gemm_flops_per_s": median(rate for _, rate in mine),
        "over_nope": median(a / b for (a, _), (b, _) in zip(mine, nope, strict=True)),
        "peak_bytes": row.ask("memory"),
    }


def measure_evaluate(floor, row, repeats, config):
    found = {"evaluate_tokens_per_s": {}, "evaluate_over_nope": {}}
    for length in (k * config.context for k in (1, 2, 4, 8, 16)):
        mine, nope = in_turn(floor, row, repeats, "evaluate", length)
        if mine[0] is not None:
            found["evaluate_tokens_per_s"][length] = 1 / median(mine)
            found["evaluate_over_nope"][length] = median(a / b for a, b in zip(mine, nope, strict=True))
    return found


def measure_generate(floor, row, repeats, config):
    found = {}
    for name, streaming in (("cached", False), ("streaming", True)):
        mine, _ = in_turn(floor, row, repeats, "generate", streaming)
        if mine[0] is not None:
            first, each, size = (median(numbers) for numbers in zip(*mine, strict=True))
            found |= {f"{name}_first_token_s": first, f"{name}_tokens_per_s": 1 / each, "cache_bytes_a_token": size}
    return found


def measure_profile(floor, row, repeats, config):
    row.ask("step")
    return {"profile": row.ask("profile")}


MEASURE = {"train": measure_train, "evaluate": measure_evaluate, "generate": measure_generate,
           "profile": measure_profile}  # fmt: skip


def measure(preset, args):
    """The rows of one preset: NoPE by torch, then each of the others beside it. Only torch evaluates and generates."""
    from tqdm import tqdm

    jobs = [(pe, "torch") for pe in args.pe if pe != FLOOR and "torch" in args.backends]
    for backend in (b for b in args.backends if b != "torch" and "train" in args.parts):
        jobs += [(pe, backend) for pe in ((FLOOR,) if backend == PLAIN else args.pe)]
    floor = Row(preset, FLOOR, "torch", args)
    rows = []
    for pe, backend in tqdm([(FLOOR, "torch"), *jobs], desc=preset, leave=False, disable=not sys.stderr.isatty()):
        row = Row(preset, pe, backend, args) if rows else floor
        found = row.names | {"context": PRESETS[preset].model.context}
        for part in args.parts:
            if part == "train" or (part in MEASURE and backend == "torch"):
                found |= MEASURE[part](floor, row, args.repeats, PRESETS[preset].model)
        rows.append(found)
        if row is not floor:
            row.end()
    floor.end()
    return rows


def encode(pipe, folder):
    """Answers "data.py" and "tiktoken" with characters a second and core; folder holds a text and a tokenizer."""
    import shutil

    import data

    encoding = data.load_tokenizer(folder / "tokenizer.tiktoken")
    texts = list(data.documents(str(folder / "text.jsonl")))
    n = sum(map(len, texts))
    for request in iter(pipe.recv, None):
        begin = time.perf_counter()
        if request == "data.py":
            with contextlib.redirect_stdout(io.StringIO()):
                data.prepare(str(folder / "text.jsonl"), folder / "out", tokenizer=str(folder / "tokenizer.tiktoken"))
            pipe.send(n / (time.perf_counter() - begin) / os.cpu_count())
            shutil.rmtree(folder / "out")
        else:
            for text in texts:
                encoding.encode_ordinary(text)
            pipe.send(n / (time.perf_counter() - begin))


def measure_data(vocab, repeats):
    """{"part": "data", ...}: characters a second of data.py, from a .jsonl file to token files, and of tiktoken."""
    import data

    with tempfile.TemporaryDirectory() as folder:
        folder, texts, size = Path(folder), [], 0
        for text in data.documents("stdlib"):
            texts.append(text)
            size += len(text)
            if size >= TEXT:
                break
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
        data.save_tokenizer(data.train_tokenizer(iter(texts), vocab), folder / "tokenizer.tiktoken")
        pipe, process = start(encode, folder)
        rates = {"data.py": [], "tiktoken": []}
        for name in itertools.islice(itertools.cycle(rates), 2 * repeats + 2):
            pipe.send(name)
            rates[name].append(receive(pipe))
        pipe.send(None)
        process.join()
    ours, raw = (rates[name][1:] for name in rates)
    return {"part": "data", "vocab": vocab, "chars_per_s_a_core": median(ours), "tiktoken_chars_per_s": median(raw),
            "over_tiktoken": median(a / b for a, b in zip(ours, raw, strict=True))}


def print_rows(rows):
    """One table a part."""
    first = rows[0]
    context = first["context"]
    if "step_s" in first:
        rate = max(r["gemm_flops_per_s"] for r in rows)
        print(f"\ntraining by steps of {first['batch']} x {context} tokens, {first['dtype']} on {first['device']}; "
              f"one large matrix product: {rate / 1e9:,.0f} GFLOP/s")
        heads = f"{'step, ms':>10}{'tokens/s':>11}{'GFLOP/s':>9}{'of it':>8}{'x NoPE':>8}{'peak, MB':>10}"
        print(f"{'encoding':12}{'backend':9}{heads}")
        for r in rows:
            print(f"{r['pe']:12}{r['backend']:9}{r['step_s'] * 1e3:10,.1f}{r['tokens_per_s']:11,.0f}"
                  f"{r['flops_per_s'] / 1e9:9,.0f}{r['flops_per_s'] / rate:8.0%}"
                  f"{r['over_nope']:8.3f}{r['peak_bytes'] / 1e6:10,.0f}")
    if "evaluate_tokens_per_s" in first:
        lengths = list(first["evaluate_tokens_per_s"])
        print("\nevaluation: tokens/s, and x NoPE's time, by length")
        print(f"{'encoding':12}" + "".join(f"{length:>18,}" for length in lengths))
        for r in (r for r in rows if "evaluate_over_nope" in r):
            rates, ratios = r["evaluate_tokens_per_s"], r["evaluate_over_nope"]
            cells = (f"{rates[n]:10,.0f} ({ratios[n]:5.2f})" if n in rates else f"{'-':>18}" for n in lengths)
            print(f"{r['pe']:12}" + "".join(cells))
    if "cached_tokens_per_s" in first:
        print(f"\ngeneration of {GENERATED} tokens after {context - GENERATED:,}, or in a stream of {SINKS} sinks and "
              f"{context - SINKS - 1:,} tokens; one text")
        print(f"{'encoding':12}{'first token, ms':>17}{'tokens/s':>10}{'streaming':>11}{'cache, B/token':>16}")
        for r in (r for r in rows if "cached_tokens_per_s" in r):
            streaming = format(r["streaming_tokens_per_s"], ",.0f") if "streaming_tokens_per_s" in r else "-"
            print(f"{r['pe']:12}{r['cached_first_token_s'] * 1e3:17,.1f}{r['cached_tokens_per_s']:10,.0f}"
                  f"{streaming:>11}{r['cache_bytes_a_token']:16,.0f}")
    for r in (r for r in rows if "profile" in r):
        print(f"\n{r['pe']}, share of a training step in each of torch's operations")
        for name, share in list(r["profile"].items())[:12]:
            print(f"{share:6.1%}  {name}")


def print_data(row):
    ours, raw = row["chars_per_s_a_core"] / 1e6, row["tiktoken_chars_per_s"] / 1e6
    print(f"\ndata, million characters a second and core: {ours:.2f} by data.py, from .jsonl to files of tokens; "
          f"{raw:.2f} by tiktoken alone ({row['over_tiktoken']:.2f}x); vocabulary {row['vocab']:,}")


# ---- the decision table ----------------------------------------------------------------------------------------------


def count_operations(model, batch):
    """Floating-point operations of a forward pass over a batch of the trained length, a token.

    Those of matrix products and attention as torch counts them, and one for each number that any other operation makes;
    what only moves numbers counts too, since it takes time.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._overloadpacket in flop_registry:
                self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            elif not func.is_view:
                self.total += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
            return out

    tokens = torch.zeros(batch, model.config.context, dtype=torch.long)
    with torch.no_grad():
        model(tokens)  # the table of positions, which a training run computes once
        with Count() as count:
            model(tokens)
    return count.total / tokens.numel()


WAYS = {"scale": {"scale": 0.5}} | {name: {"rope_scaling": name} for name in (*SCALINGS[1:], DUAL_CHUNK)}


def accepts(config, way):
    """Whether a trained model's positions can be laid that way."""
    try:
        config.scaled(config.context, **way)
    except InputError:
        return False
    return True


def describe(pipe, config, run):
    """Sends one row of the decision table, as measured in a process of its own."""
    import numpy as np
    import torch

    from model_torch import GPT, Cache, load_model

    model = load_model(run)[0] if run else GPT(config).eval()
    config = model.config
    longest, peak = 16 * config.context, None
    if longest <= model.encoding.longest:  # first, since a peak hides all that comes after it
        x = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocab_size, (1, longest)))
        model.token_losses(x, x)
        peak = peak_bytes()
    cache, plain = Cache(), GPT(replace(config, encoding=EncodingConfig())).eval()
    row = {
        "run": run and str(run),
        "pe": config.encoding.pe,
        "trained_length": config.context,
        "extra_parameters": sum(p.numel() for p in model.encoding.parameters()),
        "peak_bytes_at_16x": peak,
        "extra_operations_a_token": count_operations(model, 8) - count_operations(plain, 8),
        "streams": model.encoding.streams,
        "scaled_by": [name for name, way in WAYS.items() if accepts(config, way)],
    }
    with torch.no_grad():
        model(torch.zeros(1, config.context, dtype=torch.long), cache=cache)
    row["cache_bytes_a_token"] = cache.nbytes / len(cache)
    pipe.send(row)


def decision_table(runs):
    """One row a run, and one for each encoding of which there is none: what it costs and can do, and its losses."""
    import eval as evaluation

    rows = []
    configs = {run: read_run(run)[0] for run in runs}
    mini = PRESETS["mini"].model
    for pe in ENCODINGS:
        l = mini.encoding.l if "l" in ENCODINGS[pe] else None
        jobs = [(config, run) for run, config in configs.items() if config.encoding.pe == pe]
        for config, run in jobs or [(replace(mini, encoding=EncodingConfig(pe, l=l)), None)]:
            print(f"{run or pe} ...", file=sys.stderr, flush=True)
            pipe, process = start(describe, config, run)
            row = receive(pipe)
            process.join()
            rows.append(row | {"loss_1x": None, "loss_16x": None})
    for row in rows:
        if row["run"]:
            args, context = evaluation.command_line().parse_args([row["run"]]), row["trained_length"]
            args.lengths = [context, 16 * context]
            try:
                one, sixteen = evaluation.evaluate(row["run"], [(1.0, "none")], args)
                row |= {"loss_1x": one["loss"], "loss_16x": sixteen["loss"]}
            except InputError as error:
                print(f"{row['run']} has no loss here: {error}", file=sys.stderr)
    return rows


def print_decision_table(rows):
    width = max(len(row["run"] or row["pe"]) for row in rows)
    columns = (11, 11, 10, 10, 9, 8, 8, 7)
    for name, words in (
        ("", ("extra", "extra op/", "cache B/", "peak at", "", "loss", "loss", "16x")),
        ("run", ("parameters", "token", "token", "16x, MB", "streams", "1x", "16x", "/ 1x")),
    ):
        heads = "".join(f"{word:>{size}}" for word, size in zip(words, columns, strict=True))
        print(f"{name:{width}}{heads}{'  scaled after training by' if name else ''}")
    for row in rows:
        one, sixteen, memory = row["loss_1x"], row["loss_16x"], row["peak_bytes_at_16x"]
        print(f"{row['run'] or row['pe']:{width}}{row['extra_parameters']:11,}{row['extra_operations_a_token']:11,.0f}"
              f"{row['cache_bytes_a_token']:10,.0f}{'-' if memory is None else format(memory / 1e6, ',.0f'):>10}"
              f"{'yes' if row['streams'] else 'no':>9}{'-' if one is None else format(one, '.3f'):>8}"
              f"{'-' if sixteen is None else format(sixteen, '.3f'):>8}"
              f"{'-' if sixteen is None else format(sixteen / one, '.3f'):>7}  {', '.join(row['scaled_by']) or '-'}")
    if missing := [row["pe"] for row in rows if row["run"] is None]:
        print(f"\nno run, and so no loss: train with make train PE=\"{' '.join(missing)}\"")


def main():
    parser = CommandLine(
        description="Measure the speed and memory of the encodings, side by side: training by each backend, "
        "evaluation, generation, and data.py; or say what each encoding costs and can do (--table).",
        epilog="examples:\n  python bench.py\n  python bench.py --preset paper-35m --parts train --pe expe,exqpe,rope\n"
        "  python bench.py --preset paper-35m --dtype bf16 --compile --batch-size 64     on a GPU\n"
        "  python bench.py --table",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="mini", help="the model's shape (default: mini)")
    parser.add_argument(
        "--parts", type=listed(str, *PARTS), default=list(PARTS[:-1]), metavar="NAME,...",
        help=f"of {', '.join(PARTS)} (default: all but the last)",
    )  # fmt: skip
    parser.add_argument(
        "--pe", type=listed(str, *ENCODINGS), default=list(ENCODINGS), metavar="NAME,...",
        help=f"of {', '.join(ENCODINGS)}; {FLOOR}, which all are held against, is always there (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--backends", type=listed(str, *BACKENDS, PLAIN), metavar="NAME,...",
        help=f"of {', '.join(BACKENDS)}, and {PLAIN}, the GPT that comes to mind first (default: all on a CPU, and "
             f"all but numpy on a GPU)",
    )  # fmt: skip
    batches = "default: " + ", ".join(f"{n} for {preset}" for preset, n in BATCH.items())
    parser.add_argument("--batch-size", type=whole, metavar="N", help=f"sequences in a training step ({batches})")
    parser.add_argument("--repeats", type=whole, default=7, metavar="N", help="timed rounds of each (default: 7)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="torch's, as in train.py (default: fp32)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks, as in train.py")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto, a GPU if there is one)"
    )
    parser.add_argument(
        "--table", nargs="*", metavar="RUN",
        help="instead: what each encoding costs and can do, and the loss at 16 times the trained length over that at "
             "it, for these runs (default: every run under runs/)",
    )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers as a list of objects")
    with parser.one_line_errors():
        args = parser.parse_args()
        for name, value in (("--batch-size", args.batch_size), ("--repeats", args.repeats)):
            if value is not None and value < 1:
                parser.error(f"{name} must be at least 1, got {value}")
        if args.table is not None:
            for name in ("preset", "parts", "pe", "backends", "batch_size", "repeats", "dtype", "compile", "device"):
                if getattr(args, name) != parser.get_default(name):
                    parser.error(f"--table goes with --json alone: leave out --{name.replace('_', '-')}")
            rows = decision_table([Path(run) for run in args.table] or all_runs())
            print_decision_table(rows)
        else:
            rows = bench(args)
        if args.json:
            write_rows(args.json, rows)


def bench(args):
    """Measure what the flags ask for, and print it; returns the rows."""
    from model_torch import pick_device

    args.device, rows = str(pick_device(args.device)), []
    model = PRESETS[args.preset].model
    alike = (model.norm, model.mlp, model.tied) == ("layernorm", "gelu", False)  # what plain_gpt is
    if args.backends is None:
        args.backends = [*BACKENDS, PLAIN] if args.device == "cpu" else ["torch", PLAIN]
        args.backends = [b for b in args.backends if b != PLAIN or alike]
    if PLAIN in args.backends and not alike:
        raise InputError(f"{PLAIN} has layernorm and gelu, and {args.preset} has not: leave it out of --backends")
    if "numpy" in args.backends and (args.device != "cpu" or args.dtype != "fp32" or args.compile):
        raise InputError("numpy computes in fp32 on the CPU, uncompiled: leave it out of --backends")
    if set(args.parts) & set(MEASURE):
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}", flush=True)
        rows = measure(args.preset, args)
        print_rows(rows)
    if "data" in args.parts:
        rows.append(measure_data(PRESETS[args.preset].model.vocab_size, args.repeats))
        print_data(rows[-1])
    return rows


if __name__ == "__main__":
    main()
