"""What a processor changes: the same runs with two threads and with older instructions, beside runs of other seeds.

    python -m studies.noise                          five methods at mini, three trainings each, all of seed 1
    python -m studies.noise --variants rope,fox --json noise.json
    python -m studies.noise --gpu                    from results/ alone: the grid `gpu` beside the same seeds on a CPU

Two threads add numbers in another order than one, and so do older instructions (AVX2 in place of AVX-512). Rounding
differs in the last bits, and 1,600 steps make that visible in the loss. Losses are those of same-targets on val. What
the file has is not trained again. Seeds 1 to 3 are those of results/mini, whose seed 1 stands
in the column `results`: it was trained with one thread, by older code or on another processor. The last columns are the
standard deviation over the four and that over the seeds.
"""

import itertools
import math
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

import train
from common import CommandLine, checkpoint_info, listed, lock, new_file
from config import InputError
from eval import MULTIPLES
from lab.compare import read_rows
from lab.files import BAR, read_json, write_rows
from lab.grids import GRIDS, SEEDS, VARIANTS, flags_of
from lab.report import table
from studies.tuning import PRESET

METHODS = ("expe", "expe-on-k", "rope", "alibi", "fox")
SEED = 1
WAYS = {                                 # name: what the environment of a training has; MKL and oneDNN are torch's
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "AVX2": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
ENDS = (1, MULTIPLES[-1])
ROW = {"variant": str, "way": str, "flags": str, "weights": str, "losses": [float]}
ROOT = Path(__file__).resolve().parent.parent

def run(variant, way, words):
    """Train and score one run in processes of their own, which read their environment as they start; a row."""
    place = Path("runs/noise") / f"{variant}-{way.replace(' ', '-').lower()}"
    scores = place / "same-targets.json"
    more = ["--resume"] if (place / "config.json").exists() else []
    env = os.environ | WAYS[way] | {"PYTHONPATH": str(ROOT)}
    for command in ([ROOT / "train.py", *words, "--out", place, *more],
                    ["-m", "lab.measure", place, "--protocol", "same-targets", "--json", scores]):
        done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{place}: {(done.stderr.strip() or 'it was killed').splitlines()[-1]}")
    losses = {row["length"] // row["trained_length"]: row["loss"] for row in read_json(scores)
              if row["protocol"] == "same-targets"}
    return {"variant": variant, "way": way, "flags": shlex.join(words), "weights": checkpoint_info(place)["sha256"],
            "losses": [losses[end] for end in ENDS]}

def of_results(variant):
    """{seed: {multiple: loss}} on val under results/; InputError without seed 1 or another."""
    rows = read_rows(ROOT / "results" / PRESET, [variant], "same-targets", "val")[variant]
    losses = {row["seed"]: {end: rows[end][i]["loss"] for end in ENDS} for i, row in enumerate(rows[1])}
    if SEED not in losses or len(losses) < 2:
        raise InputError(f"results/{PRESET} has {variant} on val without seed {SEED} and another: choose among "
                         f"{', '.join(METHODS)}")
    return losses

def compared(rows):
    """The lines of the table: of each method and length the losses, their deviation, and that over seeds."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        ways = {row["way"]: row["losses"] for row in rows if row["variant"] == variant}
        seeds = of_results(variant)
        for i, end in enumerate(ENDS):
            other = seeds[SEED][end]
            losses = [*(ways[way][i] for way in WAYS if way in ways), other]
            cells = [f"{ways[way][i]:.3f}" if way in ways else "-" for way in WAYS]
            lines.append([variant, f"{end}x", *cells, f"{other:.3f}", f"{statistics.stdev(losses):.3f}",
                          f"{statistics.stdev(own[end] for own in seeds.values()):.3f}"])
    return lines

def of_place(place, variant):
    """{multiple: the loss of each of SEEDS} of `spread` on test under results/PLACE; InputError if one is missing."""
    rows = read_rows(ROOT / "results" / place, [variant], "spread", "test")[variant]
    losses = {end: {row["seed"]: row["loss"] for row in rows[end] if row["loss"] is not None} for end in ENDS}
    if missing := [seed for end in ENDS for seed in SEEDS if seed not in losses[end]]:
        raise InputError(f"--gpu needs a loss of {variant} with seed {missing[0]} under results/{place}")
    return {end: [losses[end][seed] for seed in SEEDS] for end in ENDS}

def beside_gpu():
    """The lines of --gpu: of each method of the grid `gpu` its means on CPUs and on the GPU, and two deviations.

    That over machines is of the two losses of a seed, pooled over seeds; that over seeds is pooled over both machines.
    """
    lines = []
    for variant in GRIDS["gpu"].evaluations:
        cpu, gpu = (of_place(place, variant) for place in ("far", "gpu"))
        for end in ENDS:
            pairs = list(zip(cpu[end], gpu[end], strict=True))
            spreads = (math.sqrt(statistics.mean(map(statistics.variance, groups)))
                       for groups in (pairs, (cpu[end], gpu[end])))
            numbers = *map(statistics.mean, (cpu[end], gpu[end])), *spreads
            lines.append([variant, f"{end}x", *(f"{x:.3f}" for x in numbers)])
    return lines

def main(argv=None):
    parser = CommandLine(prog="python -m studies.noise", description=__doc__)
    add = parser.add_argument
    add("--variants", type=listed(str, *VARIANTS), metavar="NAME,...",
        help=f"of lab/grids.py, with results on val (default: {','.join(METHODS)})")
    add("--ways", type=listed(str, *WAYS), metavar="WAY,...", help=", ".join(WAYS))
    add("--gpu", action="store_true", help="print the grid gpu beside results/far, and train nothing")
    add("--json", type=new_file, metavar="FILE", help=f"default: results/{PRESET}/noise.json")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.gpu:
            if args.variants or args.ways or args.json:
                parser.error("--gpu reads results/ and takes no other flag: leave the others out")
            return print(table(["method", "at", "CPU", "GPU", "sd of machines", "sd of seeds"], beside_gpu()), end="")
        args.variants, args.ways = args.variants or METHODS, args.ways or list(WAYS)
        words = {variant: ["--preset", PRESET, *shlex.split(flags_of(variant, SEED)), "--seed", str(SEED)]
                 for variant in args.variants}
        for variant in args.variants:                                  # all are right before the first is trained
            train.read_flags(words[variant])
            of_results(variant)
        path = Path(args.json or f"results/{PRESET}/noise.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        Path("runs/noise").mkdir(parents=True, exist_ok=True)
        with lock(Path("runs/noise")):
            rows = read_json(path, [ROW]) if path.exists() else []
            jobs = list(itertools.product(args.variants, args.ways))
            for variant, way in tqdm(jobs, unit="run", leave=False, disable=None, bar_format=BAR):
                if not any((row["variant"], row["way"]) == (variant, way) for row in rows):
                    rows.append(run(variant, way, words[variant]))
                    write_rows(path, rows)
        print(table(["method", "at", *WAYS, "results", "sd of these", "sd of seeds"], compared(rows)), end="")

if __name__ == "__main__":
    main()
