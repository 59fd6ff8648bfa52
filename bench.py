"""Speed and memory of the backends, side by side in one run.

    python bench.py                               one training step of mini and paper-35m, torch and NumPy, fp32, CPU
    python bench.py --presets mini --pe rope      another encoding
    python bench.py --table                       what each encoding costs and can do, and its loss at 16x over 1x

Every backend lives in a process of its own, which keeps its memory apart; the steps are timed in turn, A B A B, so that
a machine that is slow for a minute is slow for all. A step is forward, backward, clipping and AdamW, as train.py does
it. The floor is what the matrix products alone would take at the rate measured here, in the same minutes.
"""

import contextlib
import json
import multiprocessing
import platform
import re
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from config import (
    BACKENDS,
    DUAL_CHUNK,
    ENCODINGS,
    PRESETS,
    SCALINGS,
    CommandLine,
    EncodingConfig,
    InputError,
    all_runs,
    listed,
    new_file,
    read_run,
    whole,
)

BATCH = {"mini": 16, "paper-35m": 4, "llama-135m": 1, "llama-342m": 1}  # sequences in a step
GEMM = 2048  # rows and columns of the product that measures the machine
REST = 0.3  # seconds for the threads of the process before to fall asleep


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


# ---- a training step -------------------------------------------------------------------------------------------------


def train_steps(pipe, preset, pe, backend, batch):
    """Answers "step" and "gemm" with seconds, "memory" with the peak in bytes, until "end"."""
    import numpy as np

    from train import MAKE

    model, config = PRESETS[preset]
    l = model.encoding.l if "l" in ENCODINGS[pe] else None
    model = replace(model, encoding=EncodingConfig(pe, l=l))
    config = replace(config, batch_size=batch, micro_batch=batch, dtype="fp32", backend=backend)
    rng = np.random.default_rng(0)
    if backend == "torch":
        import torch

        trainer = MAKE[backend](model, config, torch.device("cpu"), False)
        square = torch.ones(GEMM, GEMM)
    else:
        trainer = MAKE[backend](model, config)
        square = np.ones((GEMM, GEMM), np.float32)
    step = 0
    for request in iter(pipe.recv, "end"):
        tokens = rng.integers(0, model.vocab_size, (batch, model.context + 1))
        start = time.perf_counter()
        if request == "step":
            loss, _ = trainer.step(tokens, step)
            assert np.isfinite(float(loss))
            step += 1
        elif request == "gemm":
            square @ square
        seconds = time.perf_counter() - start
        pipe.send(peak_bytes() if request == "memory" else seconds)


def measure(preset, pe, backends, batch, repeats):
    """[{backend, step_s, ...}] for one preset: medians of interleaved steps."""
    from tqdm import tqdm

    pipes, processes = {}, {}
    for backend in backends:
        pipes[backend], processes[backend] = start(train_steps, preset, pe, backend, batch)

    def ask(backend, request):
        try:
            with contextlib.suppress(BrokenPipeError):  # what it had to say is still in the pipe
                pipes[backend].send(request)
            return receive(pipes[backend])
        except InputError as error:
            raise InputError(f"{preset} by {backend}, batch {batch}: {error}; use a smaller --batch-size") from None

    for backend in backends:
        for request in ("step", "step", "gemm"):  # warm up
            ask(backend, request)
    times = {(backend, what): [] for backend in backends for what in ("step", "gemm")}
    with tqdm(total=repeats * len(backends), desc=preset, leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(repeats):
            for backend in backends:
                time.sleep(REST)
                times[backend, "gemm"].append(ask(backend, "gemm"))
                times[backend, "step"].append(ask(backend, "step"))
                bar.update()
    config = PRESETS[preset].model
    rate = max(2 * GEMM**3 / statistics.median(times[backend, "gemm"]) for backend in backends)
    floor = matmul_flops(config, batch) / rate
    rows = []
    for backend in backends:
        seconds = statistics.median(times[backend, "step"])
        first = statistics.median(times[backends[0], "step"])
        rows.append(
            {
                "preset": preset,
                "pe": pe,
                "backend": backend,
                "batch": batch,
                "context": config.context,
                "step_s": seconds,
                "tokens_per_s": batch * config.context / seconds,
                "gemm_flops_per_s": rate,
                "floor_s": floor,
                "over_floor": seconds / floor,
                f"over_{backends[0]}": seconds / first,
                "peak_bytes": ask(backend, "memory"),
            }
        )
    for backend in backends:
        pipes[backend].send("end")
        processes[backend].join()
    return rows


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
        description="Time a training step of each backend, side by side, beside what its matrix products alone take; "
        "or say what each encoding costs and can do (--table).",
        epilog="examples:\n  python bench.py\n  python bench.py --presets mini --pe rope --json bench.json\n"
        "  python bench.py --table",
    )
    parser.add_argument(
        "--presets", type=listed(str, *PRESETS), default=["mini", "paper-35m"], metavar="NAME,...",
        help=f"of {', '.join(PRESETS)} (default: mini,paper-35m)",
    )  # fmt: skip
    parser.add_argument(
        "--backends", type=listed(str, *BACKENDS), default=list(BACKENDS), metavar="NAME,...",
        help=f"of {', '.join(BACKENDS)}; ratios are to the first (default: all)",
    )  # fmt: skip
    parser.add_argument("--pe", choices=tuple(ENCODINGS), default="expe", help="positional encoding (default: expe)")
    batches = "default: " + ", ".join(f"{n} for {preset}" for preset, n in BATCH.items())
    parser.add_argument("--batch-size", type=whole, metavar="N", help=f"sequences ({batches})")
    parser.add_argument("--repeats", type=whole, default=7, metavar="N", help="timed steps of each (default: 7)")
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
        rows = []
        if args.table is not None:
            if given := [name for name in ("presets", "backends", "pe", "batch_size", "repeats")
                         if getattr(args, name) != parser.get_default(name)]:  # fmt: skip
                parser.error(f"--table goes with --json alone: leave out --{given[0].replace('_', '-')}")
            rows = decision_table([Path(run) for run in args.table] or all_runs())
            print_decision_table(rows)
        for preset in args.presets if args.table is None else ():
            batch = args.batch_size or BATCH[preset]
            found = measure(preset, args.pe, args.backends, batch, args.repeats)
            config = PRESETS[preset].model
            print(
                f"\n{preset}, {args.pe}: one training step of {batch} x {config.context} tokens, fp32, on the CPU of "
                f"{platform.machine()}; matrix products {found[0]['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s, "
                f"and so a floor of {found[0]['floor_s'] * 1e3:,.0f} ms"
            )
            first = args.backends[0]
            print(f"{'backend':10}{'step, ms':>10}{'tokens/s':>10}{'x floor':>9}{'x ' + first:>9}{'peak, MB':>10}")
            for row in found:
                print(
                    f"{row['backend']:10}{row['step_s'] * 1e3:10,.0f}{row['tokens_per_s']:10,.0f}"
                    f"{row['over_floor']:9.2f}{row['over_' + first]:9.2f}{row['peak_bytes'] / 1e6:10,.0f}"
                )
            rows += found
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
