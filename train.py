"""One training run, from flags to checkpoint.

    python train.py --pe expe --l 24           writes runs/mini-expe-s0
    python train.py --pe expe --l 24 --resume  goes on, bit for bit on a CPU

A run is a pure function of its configs: the batch of a step, and dropout's
mask, depend on (seed, step) alone. Two backends compute it from the same first
weights and batches: PyTorch, and NumPy with gradients written by hand.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import common

os.environ.setdefault("GOMP_SPINCOUNT", "1000")         # before torch: its idle threads soon leave the cores to others

import numpy as np
import torch
from tqdm import tqdm

import codehash
import data
import model_numpy
from common import CommandLine, number, pick_device, whole
from config import (
    CORE,
    ENCODINGS,
    PRESETS,
    InputError,
    ModelConfig,
    TrainConfig,
    changed_numbers,
    configure,
    encodings_with,
    flag_of,
    kind_of,
    prefix_errors,
    settings_class,
)
from model_torch import GPT

READERS = {int: {"type": whole, "metavar": "N"}, float: {"type": number, "metavar": "X"}, str: {"metavar": "NAME"},
           bool: {"action": argparse.BooleanOptionalAction}}
UNNAMED = ("seed", "fast", "micro_batch", "eval_every", "checkpoint_every")    # in a run's name
UNUSED = "the weight {} has no gradient, since the loss does not depend on it: use it in forward, or remove it"
QUIET = np.errstate(over="ignore", invalid="ignore")       # a loss that is not finite is refused in one line
VALIDATION_WINDOWS = 128        # of the trained length, in a validation loss

# ---- from flags to configs -------------------------------------------------------------------------------------------

def read_flags(argv):
    """(args, ModelConfig, TrainConfig): the preset's settings with the flags that were given, or the resumed run's."""
    parser = CommandLine(prog="train.py", usage="train.py [--preset NAME] [--pe NAME] [flags]", description=__doc__,
                         add_help=False)
    add = parser.add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help=f"{', '.join(PRESETS)}; paper-35m on a GPU, else mini")
    add("--pe", metavar="NAME", help=f"{', '.join(ENCODINGS)} (default: expe), with its own flags")
    add("--out", type=common.folder, metavar="DIR", help="default: runs/<preset>-<pe>-<flags that differ>-s<seed>")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--resume", action="store_true", help="go on from the last checkpoint of the run directory")
    either("--overwrite", action="store_true", help="replace the run in the run directory, at the first checkpoint")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--compile", action="store_true", help="use torch.compile for the blocks; it needs a C++ compiler")
    parser.owner_of = encodings_of
    args, _ = parser.parse_known_args(argv)                             # --pe says which other flags there are
    if args.resume:
        from engine import resume
        resume.fill_in(args)                                            # --preset and --pe of the run
    args.preset = args.preset or ("paper-35m" if torch.cuda.is_available() else "mini")
    args.pe = args.pe or "expe"
    parser.prog = f"train.py --pe {args.pe}"
    add("--help", "-h", action="help", help="show this text and stop")
    defaults = {}
    kinds = {f"encoding {args.pe}": settings_class(args.pe), "model": ModelConfig, "training": TrainConfig}
    for title, kind in kinds.items():
        group = parser.add_argument_group(title)
        for f in dataclasses.fields(kind):
            if f.metadata["help"]:
                default = defaults[f.name] = PRESETS[args.preset].get(f.name, f.default)
                help = f.metadata["help"] + f" ({args.preset}: {default})" * (default is not None)
                group.add_argument(flag_of(f.name), default=None, help=help, **READERS[kind_of(f)])
    given = vars(parser.parse_args(argv, args))
    args.given = flags = {name: given[name] for name in defaults if given[name] is not None}
    args.out = args.out or Path("runs", run_name(args, flags, defaults))
    if args.resume:
        return args, *resume.check_flags(args.out, flags)
    if flags.get("data", "").startswith("task:"):
        import tasks
        flags = tasks.fill_in(flags, args.preset)
    return args, *configure(args.preset, args.pe, **flags)

def encodings_of(flag):
    """"--l is a flag of --pe expe and exqpe;" of a flag that some encodings have; None of any other."""
    *others, last = encodings_with(flag.removeprefix("--").removeprefix("no-").replace("-", "_")) or [None]
    return last and f"{flag} is a flag of --pe {' and '.join(filter(None, [', '.join(others), last]))};"

def run_name(args, flags, defaults):
    """The preset, --pe, each given flag with another value than the preset's, and the seed."""
    words = [f"{flag_of(name).strip('-')}-{Path(value).name if name in ('data', 'init_from') else value}"
             for name, value in flags.items() if value != defaults[name] and name not in UNNAMED]
    name = "-".join([args.preset, args.pe, *words, f"s{flags.get('seed', 0)}"])
    return re.sub(r"[^\w.,=+-]", "-", name)                             # Windows has no : in names

# ---- the two backends ------------------------------------------------------------------------------------------------

def learning_rate(train_config, step):
    """Of step 0 .. steps-1: linear warm-up to lr, then half a cosine down to end_lr."""
    warm = round(train_config.warmup * train_config.steps)
    if step < warm:
        return train_config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, train_config.steps - 1 - warm)
    return train_config.end_lr + (train_config.lr - train_config.end_lr) * ((1 + math.cos(math.pi * progress)) / 2)

def draw_positions(train_config, step, T):
    """T of the positions 0 .. P-1 without repeats, in order, for the whole batch of a step."""
    rng = np.random.default_rng([train_config.seed, step, 1])           # apart from those of the data and of dropout
    return np.sort(rng.choice(train_config.random_positions, T, replace=False))

def micro_batches(tokens, targets, size):
    """[(tokens, targets, their share of all targets)], of `size` sequences each."""
    parts = [(tokens[i : i + size], targets[i : i + size]) for i in range(0, len(tokens), size)]
    counts = [int(np.count_nonzero(part != model_numpy.IGNORED)) for _, part in parts]
    return [(*part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)]

class TorchBackend:
    """GPT, or another module of which model(tokens, targets, positions) is the loss, and AdamW, on any device."""

    def __init__(self, model_config, train_config, device, compiled=False, model=None):
        self.train_config = train_config
        self.device = device
        if train_config.fast and model is None:
            from engine import fast
            model = fast.make_model(model_config, train_config.seed, half=train_config.dtype == "bf16")
        self.model = (model or GPT(model_config, train_config.seed)).to(device)
        if compiled:
            from engine import fast
            fast.compile(self.model)
        weights = [*self.model.parameters()]
        groups = [{"params": [w for w in weights if w.ndim >= 2], "weight_decay": train_config.weight_decay},
                  {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]              # table 5
        betas = train_config.beta1, train_config.beta2
        self.optimizer = torch.optim.AdamW(groups, train_config.lr, betas, fused=True)
        self.size = train_config.micro_batch or train_config.batch_size
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=train_config.dtype == "bf16")
        torch.set_float32_matmul_precision("high" if train_config.dtype == "tf32" else "highest")

    def tensors(self):
        """Weights and moments as arrays, after a step: {"NAME", "m.NAME" of the gradient, "v.NAME" of its square}."""
        tensors = dict(self.model.state_dict())
        for name, w in self.model.named_parameters():
            tensors[f"m.{name}"] = self.optimizer.state[w]["exp_avg"]
            tensors[f"v.{name}"] = self.optimizer.state[w]["exp_avg_sq"]
        return {name: x.cpu().contiguous().numpy() for name, x in tensors.items()}

    def load(self, tensors, step):
        """Go on from these weights and moments, after so many steps."""
        tensors = {name: torch.from_numpy(x).to(self.device) for name, x in tensors.items()}
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        for name, w in self.model.named_parameters() if step else ():
            self.optimizer.state[w] = {"step": torch.tensor(float(step), device=w.device),
                                       "exp_avg": tensors[f"m.{name}"], "exp_avg_sq": tensors[f"v.{name}"]}

    def step(self, batch, step, positions=None):
        """One optimizer step on a batch, (tokens, targets); returns the loss and the gradient's norm."""
        self.model.train()
        while True:
            torch.manual_seed(self.train_config.seed * 2**32 + step)    # of dropout
            try:
                loss = self.add_gradients(batch, positions)
                break
            except torch.OutOfMemoryError:                              # of a GPU
                self.size //= 2
                if not self.size:
                    raise
            self.optimizer.zero_grad(set_to_none=True)
            print(f"the GPU's memory is full: going on with --micro-batch {self.size}", file=sys.stderr)
        return loss, self.update(step)

    def add_gradients(self, batch, positions):
        """The loss of a batch; its gradients are added up."""
        loss = 0
        for part, share in self.losses(batch, positions):
            part = part * share
            part.backward()
            loss += part.detach()
        return loss

    def losses(self, batch, positions=None):
        """Yields the loss of each micro-batch, and its share of the batch's targets."""
        for tokens, targets, share in micro_batches(*batch, self.size):
            tokens, targets = self.on_device(tokens), self.on_device(targets)
            with self.autocast:
                loss = self.model(tokens, targets, positions)
            yield loss, share

    def on_device(self, x):
        """An array as a tensor; a GPU copies it when it gets there, and nothing waits for that."""
        x = torch.from_numpy(x)
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def update(self, step):
        """Clip the gradients, take AdamW's step, and return the gradients' norm; InputError if a weight has none."""
        if unused := [name for name, w in self.model.named_parameters() if w.grad is None]:
            raise InputError(UNUSED.format(unused[0]))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train_config.clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train_config, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def validation_loss(self, batch):
        """The mean loss of a batch, in nats."""
        self.model.eval()
        with torch.no_grad():
            return sum(loss.item() * share for loss, share in self.losses(batch))

@contextlib.contextmanager
def name_the_file(model_config, params):
    """InputError that names the file of zoo/ whose pullbacks give no gradient of one of its parameters."""
    try:
        yield
    except KeyError as error:
        name = str(error.args[0])
        if name not in params or "encoding." not in name:
            raise
        if (pe := model_numpy.encoding_with(name, model_config).pe) in CORE:
            raise
        raise InputError(f"zoo/{pe}.py: no pullback gives a gradient of {name.rpartition('.')[2]}, which its "
                         "parameters declare") from None

class NumpyBackend:
    """The same in NumPy, in fp32 on the CPU. Dropout's masks are drawn by NumPy, and so are not torch's."""

    def __init__(self, model_config, train_config, device, compiled=False):
        if str(device) != "cpu" or compiled:
            raise InputError("--backend numpy computes on the CPU: leave out --compile, and give --device cpu")
        if train_config.fast:
            from engine import fast
            fast.keep_freed_memory()
        self.model_config = model_config
        self.train_config = train_config
        self.params = model_numpy.init_params(model_config, train_config.seed)
        self.state = model_numpy.adamw_state(self.params)

    def tensors(self):
        return model_numpy.join({"": self.params, "m.": self.state["m"], "v.": self.state["v"]})

    def load(self, tensors, step):
        self.params = {name: tensors[name] for name in self.params}
        if step:
            self.state = {"step": step, **{m: model_numpy.strip_prefix(f"{m}.", tensors) for m in "mv"}}

    @QUIET
    def step(self, batch, step, positions=None):
        """One optimizer step on a batch, (tokens, targets); returns the loss and the gradient's norm."""
        model_config, train_config = self.model_config, self.train_config
        rng = np.random.default_rng([train_config.seed, step])          # of dropout
        loss = 0
        grads = {}
        for tokens, targets, share in micro_batches(*batch, train_config.micro_batch or train_config.batch_size):
            masks = model_numpy.dropout_masks(model_config, *tokens.shape, rng) if model_config.dropout else None
            with name_the_file(model_config, self.params):
                part, part_grads = model_numpy.loss_and_grads(self.params, tokens, targets, model_config, positions,
                                                              masks)
            loss += share * part
            grads = model_numpy.summed(grads, {name: share * g for name, g in part_grads.items()})
        if unused := self.params.keys() - grads.keys():
            raise InputError(UNUSED.format(min(unused)))
        norm = model_numpy.clip_grads(grads, train_config.clip)
        betas = train_config.beta1, train_config.beta2
        model_numpy.adamw_step(self.params, grads, self.state, learning_rate(train_config, step), *betas,
                               weight_decay=train_config.weight_decay)
        return float(loss), norm

    @QUIET
    def validation_loss(self, batch):
        """The mean loss of a batch, in nats."""
        size = self.train_config.micro_batch or self.train_config.batch_size
        total = 0
        for tokens, targets, _ in micro_batches(*batch, size):
            total += model_numpy.token_losses(self.params, tokens, targets, self.model_config).sum(dtype="float64")
        return float(total / np.count_nonzero(batch[1] != model_numpy.IGNORED))

BACKENDS = {"torch": TorchBackend, "numpy": NumpyBackend}

# ---- a run on disk ---------------------------------------------------------------------------------------------------

def prepare(source, *sizes, **more):
    """data.prepare; for a corpus that need not fit in memory, that of engine/corpora.py."""
    with prefix_errors("--data"):
        if data.is_large(source):
            if source not in data.NAMED_SOURCES:
                print(f"{source} {data.LARGE}", flush=True)
            from engine import corpora
            return corpora.prepare(source, *sizes, **more)
        return data.prepare(source, *sizes, **more)

def commit_of(folder):
    """{"git": the commit in a folder, with -dirty if files differ from it}; {} without git or a repository."""
    if not (folder / ".git").exists():                                  # git would look in the folders above, too
        return {}
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError:
        return {}
    return {"git": done.stdout.strip()} if done.returncode == 0 else {}

class Run:
    """A training run: what is asked of it, its data, and what is written in its folder."""

    quiet = bool(os.environ.get("TQDM_DISABLE")) or None     # tqdm's disable: None shows a bar in a terminal

    def __init__(self, argv):
        """InputError for a wrong flag, a folder that holds something else, or data that cannot be prepared."""
        self.args, self.model_config, self.train_config = read_flags(argv)
        self.folder = self.home = self.args.out                         # home: where its files are written
        self.check_folder()
        on_cpu = self.train_config.backend == "numpy" and self.args.device == "auto"
        self.device = pick_device("cpu" if on_cpu else self.args.device)
        self.source = data.source_of(self.train_config.data)
        self.tokens, meta = self.source.ensure(self.train_config.data, self.model_config.vocab, prepare,
                                               vars(self.train_config), self.args.given)
        self.model_config = dataclasses.replace(self.model_config, vocab=meta["vocab"])     # what was not given is the
        settings = {name: meta[name] for name in data.PREPARATION if name in meta}          # folder's
        self.train_config = dataclasses.replace(self.train_config, **settings)
        if self.train_config.objective == "mlm":
            from engine import masking
            self.source = masking.Masked(self.source, self.model_config.vocab)
        self.record = {
            "model": dataclasses.asdict(self.model_config), "train": dataclasses.asdict(self.train_config),
            "data": {"folder": str(self.tokens), **meta},
            "provenance": {"preset": self.args.preset, "command": shlex.join(["python", "train.py", *argv]),
                           "device": str(self.device), **commit_of(Path(__file__).parent),
                           "python": sys.version.split()[0],
                           "torch": torch.__version__, "threads": torch.get_num_threads(),
                           "code": codehash.code_of(self.model_config, self.train_config)}}
        if self.args.resume:
            from engine import resume
            resume.check_data(self)
        elif self.train_config.init_from != "none":
            from engine import init_from
            init_from.check_parent(self)

    def check_folder(self):
        """InputError unless the folder is new or empty or, with --resume or --overwrite, holds a run."""
        if common.holds_files(self.folder) and not self.args.resume:
            if not (self.folder / "config.json").exists():
                raise InputError(f"{self.folder} exists and holds no run, so it is left as it is: choose another --out")
            common.read_run(self.folder)
            if not self.args.overwrite:
                raise InputError(f"{self.folder} exists: add --resume to go on with it, or --overwrite to replace it")

    def begin(self, backend):
        """(steps done, seconds trained) before now, with the backend filled where it does not begin anew."""
        step, seconds = 0, 0.0
        if self.args.resume:
            from engine import resume
            step, seconds = resume.go_on(self, backend)
        if step == 0 and self.train_config.init_from != "none":
            from engine import init_from
            self.record["parent"] = init_from.load_parent(self, backend)
        return step, seconds

    def start(self):
        """Write what stays the same, once the first step is done; --overwrite keeps the old run beside it till save."""
        if (self.folder / "config.json").exists() and not self.args.resume:
            self.home = self.folder / common.NEW_RUN
            self.home.mkdir(exist_ok=True)
        (self.home / "log.jsonl").unlink(missing_ok=True)               # of a run that was killed before a checkpoint
        self.write("config.json", json.dumps(self.record, indent=1, allow_nan=False).encode() + b"\n")
        tokenizer = self.tokens / "tokenizer.tiktoken"
        if tokenizer.exists():
            self.write(tokenizer.name, tokenizer.read_bytes())

    def write(self, name, content):
        common.write_bytes(self.home / name, content)

    def note(self, step, loss, norm):
        """Log a step and return its loss; InputError if it or the gradient's norm is not finite."""
        loss, norm = float(loss), float(norm)
        if not math.isfinite(loss + norm):
            self.refuse(f"the loss is {loss} and the gradient's norm {norm} at step {step + 1}", updates=step)
        if step == 0:
            self.start()
        self.log(step=step + 1, loss=loss, grad_norm=norm, lr=learning_rate(self.train_config, step))
        return loss

    def note_validation(self, step, loss):
        """Log a validation loss; InputError if it is not finite."""
        if not math.isfinite(loss):
            self.refuse(f"the validation loss is {loss} after step {step}", updates=step)
        self.log(step=step, val_loss=loss)

    def refuse(self, what, updates):
        """InputError for numbers that are not finite, after so many updates of the weights."""
        config = self.train_config
        if updates:
            raise InputError(f"{what}: try a lower --lr than {config.lr:g}; the last checkpoint, if there is one, "
                             "stays")
        causes = changed_numbers(self.model_config, config)
        causes += [f"--init-from {config.init_from}"] if config.init_from != "none" else []
        raise InputError(f"{what}, before --lr matters, so the first weights or the encoding's numbers are too large: "
                         f"change {' or '.join(causes or [f'--pe {self.model_config.encoding.pe}'])}")

    def log(self, **line):
        path = self.home / "log.jsonl"
        with common.name_full_file(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def save(self, backend, step, seconds):
        common.save_checkpoint(self.home, backend.tensors(), step, seconds)
        if self.home != self.folder:
            common.settle(self.folder)                                  # the new run takes the old one's place
            self.home = self.folder

    def share_of_gpu(self, rate):
        """In words, how much of the GPU's bf16 rate so many tokens a second take."""
        if self.device.type != "cuda":
            return ""
        from engine import fast
        with contextlib.suppress(torch.OutOfMemoryError):
            share = rate * fast.flops_a_token(self.model_config) / fast.bf16_rate(self.device)
            return f", {share:.0%} of the GPU's bf16 rate"
        return ""

    def stops(self, signals):
        """Whether a signal asks to stop."""
        return bool(signals)

@contextlib.contextmanager
def stopping():
    """The times of the signals that ask to stop; one that comes a second later does not wait for the step to end."""
    signals = []

    def take(number, frame):
        if not signals:
            with contextlib.suppress(OSError):                          # Ctrl-C ends what reads 2>&1, such as tee, too
                os.write(2, b"\nstopping after this step (again: at once, back to the last checkpoint)\n")
        elif time.monotonic() > signals[0] + 1:                         # torchrun repeats a Ctrl-C at once
            raise KeyboardInterrupt
        signals.append(time.monotonic())

    asking = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")
              and signal.getsignal(number) != signal.SIG_IGN]           # nohup ignores SIGHUP
    before = {number: signal.signal(number, take) for number in asking}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

# ---- training --------------------------------------------------------------------------------------------------------

def train(run, backend, first=0, seconds=0.0):
    """Train from a step on until train_config.steps or a signal; returns the steps done. seconds: trained before."""
    config = run.train_config
    context = run.model_config.context
    tokens = run.source.open_split(run.tokens, "train")
    held_out = run.source.held_out(run.tokens, context, VALIDATION_WINDOWS)
    begun = time.perf_counter()
    counted = first, begun                                              # from which step and when the rate counts
    waiting = []                                                        # losses that a GPU may still compute
    with stopping() as signals:
        bar = tqdm(range(first, config.steps), str(run.folder), config.steps, False, disable=run.quiet, initial=first)
        for step in bar:
            batch = run.source.batch(tokens, context, config.batch_size, config.seed, step)
            positions = draw_positions(config, step, context) if config.random_positions else None
            waiting.append((step, *backend.step(batch, step, positions)))
            done = step + 1
            stop = run.stops(signals) or done == config.steps
            scored = done % config.eval_every == 0 or done == config.steps
            saved = done % config.checkpoint_every == 0 or stop
            late = not (scored or saved or step == first)               # the last loss is read a step late
            while len(waiting) > late:
                loss = run.note(*waiting.pop(0))
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if scored:
                rate = (done - counted[0]) * config.batch_size * context / (time.perf_counter() - counted[1])
                val_loss = backend.validation_loss(held_out)
                run.note_validation(done, val_loss)
                with contextlib.suppress(BrokenPipeError):              # a run that nobody watches goes on
                    left = tqdm.format_interval((config.steps - done) * config.batch_size * context / rate)
                    tqdm.write(f"{run.folder}: step {done:6,}  loss {loss:.3f}  val {val_loss:.3f}  "
                               f"{rate:,.0f} tokens/s{run.share_of_gpu(rate)}"
                               + f"  {left} left" * (bar.disable and done < config.steps))
            if scored or step == first:                                 # the first step compiles
                counted = done, time.perf_counter()
            if saved:
                run.save(backend, done, seconds + time.perf_counter() - begun)
            if stop:
                break
    return done

def run_training(run, make_backend):
    """Train what is left of a run, with the backend that is made of (ModelConfig, TrainConfig, device, compiled)."""
    run.check_folder()                                                  # another process may have made it meanwhile
    steps = run.train_config.steps
    if run.args.resume and common.checkpoint_info(run.folder)["step"] >= steps:
        return print(f"{run.folder} is complete: {steps:,} of {steps:,} steps")
    backend = make_backend(run.model_config, run.train_config, run.device, run.args.compile)
    first, seconds = run.begin(backend)
    theta = getattr(run.model_config.encoding, "theta", None)
    rates = f"lr {run.train_config.lr:g}" if theta is None else f"lr {run.train_config.lr:g}, theta {theta:g}"
    tokens = run.record["data"]["splits"]["train"]["tokens"]
    seen = steps * run.train_config.batch_size * run.model_config.context
    epochs = f", {seen / tokens:,.2f} epochs of text" if tokens else ""         # a task has no text
    print(f"{run.folder}: {model_numpy.count_parameters(run.model_config):,} parameters, {run.train_config.backend} on "
          f"{run.device}, {rates}, steps {first:,} to {steps:,}{epochs}")
    if train(run, backend, first, seconds) < steps:
        print(f"stopped; go on with: python train.py --out {shlex.quote(str(run.folder))} --resume", file=sys.stderr)
        sys.exit(130)
    print(f"next: python eval.py {shlex.quote(str(run.folder))}")

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    with CommandLine(prog="train.py").one_line_errors():
        if common.read_environment("WORLD_SIZE", 1) > 1:
            raise InputError("several processes train with torchrun --nproc_per_node N -m -- engine.distributed FLAGS")
        run = Run(argv)
        with common.lock(run.folder):
            run_training(run, BACKENDS[run.train_config.backend])

if __name__ == "__main__":
    main()
