"""Forty minutes on one GPU: how fast training is, then the paper's table 2 with as many tokens as the time allows.

    python -m lab.gpu_day CORPUS                    CORPUS: text or tokens, as train.py --data takes it
    python -m lab.gpu_day CORPUS --rehearse         the same on the CPU by mini, two steps a run

1. bench-*.json: training steps of five encodings in bf16, of ExPE in fp32 and in TF32 (lab/bench.py).
2. plan.json: the steps that all runs of table 2 can have, by those rates and the minutes that are left.
3. Each run is trained and at once evaluated by every protocol: runs/NAME/ has its log, NAME.PROTOCOL.json its losses.
4. Pictures and summary.json.

What is to be kept, JSON, logs and pictures, is written to --out; tokens and weights to --work. Started again it goes
on: what is there is not made again, and a run resumes from its last checkpoint.
"""

import json
import platform
import shlex
import shutil
import time
from pathlib import Path

import data
import eval as evaluation
import train
from common import CommandLine, at_least, pick_device
from config import PRESETS, InputError
from lab import bench, curves, measures, pictures
from lab.files import read_json, write_json
from lab.grids import EVALUATIONS, flags_of

# torch is imported where it is used, so that --help and a wrong flag answer at once.

BENCHES = {"bf16": "nope,expe,rope,alibi,t5", "fp32": "expe", "tf32": "expe"}          # number format: encodings
RUNS = {"expe": "expe", "rope": "rope", "sinusoidal": "nope", "expe-on-k": "expe", "alibi": "alibi"}   # and whose rate
AFTER = 100                              # seconds that a run takes besides its steps: compilation, evaluation
SPARE = 0.9                              # of the time that is left is planned
DOCS, STREAMED = 64, 8                   # documents that are scored, and by a stream, token by token
ENOUGH = 4                               # documents of a length, or it is left out


class Day:
    """Where things lie, how long each took, and the flags of what is done."""

    def __init__(self, args):
        self.out, self.work, self.minutes = Path(args.out), Path(args.work), args.minutes
        self.rehearse, self.device = args.rehearse, str(pick_device("cpu" if args.rehearse else "auto"))
        self.preset = "mini" if args.rehearse else "paper-35m"
        self.model, self.config = PRESETS[self.preset]
        self.tokens = args.corpus if (Path(args.corpus) / "meta.json").exists() else self.work / "tokens"
        for folder in (self.out / "runs", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.times = read_json(self.out / "times.json") if (self.out / "times.json").exists() else {}

    @property
    def left(self):
        """Seconds of the whole time, those of an earlier start counted too."""
        return 60 * self.minutes - sum(self.times.values())

    def part(self, name, file, job, *arguments):
        """Do a part unless its file is there, and count its time, also if it is stopped."""
        if file.exists():
            return
        print(f"--- {name}, {train.clock(max(0, self.left))} left", flush=True)
        begun = time.perf_counter()
        try:
            job(self, *arguments)
        finally:
            self.times[name] = self.times.get(name, 0) + time.perf_counter() - begun
            write_json(self.out / "times.json", self.times)


# ---- the parts -------------------------------------------------------------------------------------------------------

def prepare(day, corpus):
    data.prepare(corpus, day.tokens, day.model.vocab_size, min_doc_tokens=day.config.min_doc_tokens)

def measure(day, dtype, file):
    """bench's rows of a number format, as it writes them."""
    few = "--batch-size 1 --repeats 1" if day.rehearse else f"--batch-size {day.config.micro_batch} --compile"
    flags = f"--preset {day.preset} --parts train --backends torch --pe {BENCHES[dtype]} --dtype {dtype} {few}"
    bench.main([*flags.split(), "--device", day.device, "--json", str(file)])

def plan(day, file):
    """As many steps for each run as the time allows, at most the preset's."""
    rates = {row["pe"]: row["tokens_per_s"] for row in read_json(day.out / "bench-bf16.json")}
    seconds_a_token = sum(1 / rates[pe] for pe in RUNS.values())
    tokens = SPARE * (day.left - AFTER * len(RUNS)) / seconds_a_token
    a_step = day.config.batch_size * day.model.context
    steps = 2 if day.rehearse else min(day.config.steps, int(tokens / a_step))
    if steps < 2:
        raise InputError(f"{day.left / 60:.0f} minutes are too few for {len(RUNS)} runs: give more --minutes")
    write_json(file, {"steps": steps, "tokens_a_run": steps * a_step, "rates": rates, "lengths": lengths(day)})

def lengths(day):
    """1x, 2x, ... the trained length, as far as there are documents."""
    tokens = data.open_split(day.tokens, "val")
    sizes = [len(document) - 1 for document in data.split_documents(tokens, data.read_meta(day.tokens)["eot"])]
    found = [k * day.model.context for k in evaluation.MULTIPLES]
    found = [n for n in found if sum(size >= n for size in sizes) >= ENOUGH]
    if not found:
        raise InputError(f"val of {day.tokens} lacks {ENOUGH} documents of {day.model.context} tokens: give more text")
    return found

def train_one(day, name, steps):
    """Train a run, or go on with it, and bring its log and its config home."""
    import torch
    torch.compiler.reset()                                              # what was compiled for another run
    run, every = day.work / name, max(1, steps // 10)
    few = "--batch-size 2" if day.rehearse else "--dtype bf16 --compile"
    resume = "--resume" * (run / "config.json").exists()
    train.main([*shlex.split(f"--preset {day.preset} {flags_of(name, preset=day.preset)} --steps {steps} "
                             f"--eval-every {every} --checkpoint-every {every} --device {day.device} {few} {resume}"),
                "--data", str(day.tokens), "--out", str(run)])
    home = day.out / "runs" / name
    home.mkdir(exist_ok=True)
    for file in ("log.jsonl", "config.json"):                           # the last is the sign that it is complete
        shutil.copyfile(run / file, home / file)

def score(day, name, protocol, file, found):
    """A run's losses by one protocol; [] where it cannot be read so. A stream goes token by token, so it reads less."""
    from past.reading import load
    run, docs = day.work / name, DOCS
    if protocol == "streaming":
        if not load(run)[0].streams():
            return write_json(file, [])
        found, docs = found[::2][:2], STREAMED                          # 1x and 4x
    flags = EVALUATIONS.get(protocol, f"--protocol {protocol}").split()
    evaluation.main([str(run), *flags, "--lengths", ",".join(map(str, found)), "--device", day.device, "--max-docs",
                     str(2 if day.rehearse else docs), "--json", str(file)])

def draw(day):
    """A picture a protocol, the paper's by position too, and the curves of training."""
    for protocol in measures.PROTOCOLS:
        rows = [row for name in RUNS for row in read_json(day.out / f"{name}.{protocol}.json")]
        if any("by_position" in row for row in rows):
            pictures.losses(rows, day.out / f"{protocol}-by-position.png")
        rows = [{key: x for key, x in row.items() if key != "by_position"} for row in rows]
        pictures.losses(rows, day.out / f"{protocol}.png")
    curves.main([*(str(day.out / "runs" / name) for name in RUNS), "--out", str(day.out / "curves.png")])

def summary(day, planned):
    """What was run on what, how long it took, and each run's losses by length."""
    import torch

    gpu = torch.cuda.get_device_name() if day.device.startswith("cuda") else platform.processor() or "cpu"
    losses = {name: {protocol: {row["length"]: row["loss"] for row in read_json(day.out / f"{name}.{protocol}.json")
                                if row["protocol"] == protocol} for protocol in measures.PROTOCOLS} for name in RUNS}
    return {"device": gpu, "torch": torch.__version__, "preset": day.preset, "rehearsal": day.rehearse, **planned,
            "seconds": day.times, "losses": losses}


# ---- as a script -----------------------------------------------------------------------------------------------------

def run_day(day, corpus):
    out, planned = day.out, day.out / "plan.json"
    day.part("tokens", Path(day.tokens) / "meta.json", prepare, corpus)
    for dtype in BENCHES:
        file = out / f"bench-{dtype}.json"
        day.part(f"bench {dtype}", file, measure, dtype, file)
    day.part("plan", planned, plan, planned)
    planned = read_json(planned)
    print(json.dumps(planned, indent=1))
    for name in RUNS:
        home = out / "runs" / name / "config.json"
        if not home.exists() and day.left < 0:
            raise InputError(f"{day.minutes} minutes are over before {name} is trained: give more --minutes to go on")
        day.part(f"training {name}", home, train_one, name, planned["steps"])
        for protocol in measures.PROTOCOLS:
            file = out / f"{name}.{protocol}.json"
            day.part(f"{name} by {protocol}", file, score, name, protocol, file, planned["lengths"])
    draw(day)
    write_json(out / "summary.json", summary(day, planned))
    print(f"\n{sum(day.times.values()) / 60:.1f} minutes; what is to be kept is in {out}")

def main(argv=None):
    parser = CommandLine(prog="python -m lab.gpu_day", description=__doc__)
    parser.add_argument("corpus", metavar="CORPUS", help="a folder of text, or of tokens that data.py has made")
    parser.add_argument("--out", default="gpu-day", metavar="DIR", help="what is to be kept (default: gpu-day)")
    parser.add_argument("--work", default="runs/gpu-day", metavar="DIR",
                        help="tokens and weights (default: runs/gpu-day)")
    parser.add_argument("--minutes", type=at_least(1), default=38, metavar="N", help="for all of it (default: 38)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: mini, two steps a run")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if not (args.rehearse or str(pick_device("auto")).startswith("cuda")):
            raise InputError("there is no GPU here: --rehearse does the same on the CPU, two steps a run")
        run_day(Day(args), args.corpus)

if __name__ == "__main__":
    main()
