"""Speed and memory of the backends, side by side in one run.

    python bench.py                               one training step of mini and paper-35m, torch and NumPy, fp32, CPU
    python bench.py --presets mini --pe rope      another encoding

Every backend lives in a process of its own, which keeps its memory apart; the steps are timed in turn, A B A B, so that
a machine that is slow for a minute is slow for all. A step is forward, backward, clipping and AdamW, as train.py does
it. The floor is what the matrix products alone would take at the rate measured here, in the same minutes.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from config import BACKENDS, ENCODINGS, PRESETS, CommandLine, EncodingConfig, InputError, new_file, whole

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


def worker(pipe, *job):
    """A process that answers "step" and "gemm" with seconds, "memory" with its peak in bytes; failing, with why."""
    try:
        answer(pipe, *job)
    except KeyboardInterrupt:
        pass
    except (MemoryError, RuntimeError) as error:  # RuntimeError: how torch runs out of memory
        pipe.send(str(error).splitlines()[0] if str(error) else "out of memory")


def answer(pipe, preset, pe, backend, batch):
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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        pipe.send(peak if request == "memory" else seconds)


def measure(preset, pe, backends, batch, repeats):
    """[{backend, step_s, ...}] for one preset: medians of interleaved steps."""
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, {}
    for backend in backends:
        pipes[backend], end = context.Pipe()
        processes[backend] = context.Process(target=worker, args=(end, preset, pe, backend, batch), daemon=True)
        processes[backend].start()
        end.close()

    def ask(backend, request):
        try:
            pipes[backend].send(request)
            reply = pipes[backend].recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reply = "the process ended, perhaps for want of memory"
        if isinstance(reply, str):
            raise InputError(f"{preset} by {backend}, batch {batch}: {reply}; use a smaller --batch-size")
        return reply

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


def names_of(known):
    def names(text):
        parts = list(dict.fromkeys(text.split(",")))
        if wrong := [part for part in parts if part not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return parts

    return names


def main():
    parser = CommandLine(
        description="Time a training step of each backend, side by side, beside what its matrix products alone take.",
        epilog="examples:\n  python bench.py\n  python bench.py --presets mini --pe rope --json bench.json",
    )
    parser.add_argument(
        "--presets", type=names_of(PRESETS), default=["mini", "paper-35m"], metavar="NAME,...",
        help=f"of {', '.join(PRESETS)} (default: mini,paper-35m)",
    )  # fmt: skip
    parser.add_argument(
        "--backends", type=names_of(BACKENDS), default=list(BACKENDS), metavar="NAME,...",
        help=f"of {', '.join(BACKENDS)}; ratios are to the first (default: all)",
    )  # fmt: skip
    parser.add_argument("--pe", choices=tuple(ENCODINGS), default="expe", help="positional encoding (default: expe)")
    batches = "default: " + ", ".join(f"{n} for {preset}" for preset, n in BATCH.items())
    parser.add_argument("--batch-size", type=whole, metavar="N", help=f"sequences ({batches})")
    parser.add_argument("--repeats", type=whole, default=7, metavar="N", help="timed steps of each (default: 7)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers as a list of objects")
    with parser.one_line_errors():
        args = parser.parse_args()
        for name, value in (("--batch-size", args.batch_size), ("--repeats", args.repeats)):
            if value is not None and value < 1:
                parser.error(f"{name} must be at least 1, got {value}")
        rows = []
        for preset in args.presets:
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
