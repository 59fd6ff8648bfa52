"""One training run, from flags to checkpoint.

    python train.py --pe expe --l 24            trains and writes runs/mini-expe-s0 (l is 24 in the preset, too)
    python train.py --pe expe --l 24 --resume   goes on after a Ctrl-C or a kill, bit for bit on a CPU
    torchrun --nproc_per_node 8 -- train.py --pe expe --l 24    the same on eight GPUs (engine/distributed.py)

A run is a pure function of its configs: the batch of a step depends on (seed, step) alone, and so does dropout's mask.
Two backends compute it, from the same first weights on the same batches: torch, and NumPy with gradients by hand. (Each
draws dropout's masks with its own generator.)
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import common
import data
import model_numpy
from common import CommandLine, at_least, number, pick_device, whole
from config import (
    ENCODINGS,
    PRESETS,
    InputError,
    ModelConfig,
    TrainConfig,
    check_together,
    flag_of,
    make_encoding,
    settings_class,
)
from model_torch import GPT

READERS = {int: whole, int | None: whole, float: number, float | None: number, str: str}
UNNAMED = ("seed", "fast", "micro_batch", "eval_every", "eval_windows", "checkpoint_every")    # in a run's name


# ---- from flags to configs -------------------------------------------------------------------------------------------

def read_flags(argv):
    """(args, ModelConfig, TrainConfig): the preset's settings, with the flags that were given."""
    parser = CommandLine(
        prog="train.py", description="Train a GPT with one of the positional encodings, and write its run directory.",
        epilog="examples:\n  python train.py --pe expe --l 24\n  python train.py --pe rope --seed 1\n"
               "  python train.py --pe exqpe --theta2 1/8 --data my_books/ --tokens 3e6", add_help=False)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="the model and how it is trained (default: paper-35m on a GPU, else mini)")
    add("--pe", choices=ENCODINGS, help="the positional encoding (default: expe); it says which other flags there are")
    add("--out", metavar="DIR", help="the run directory (default: runs/<preset>-<pe>-<flags that differ>-s<seed>)")
    add("--resume", action="store_true", help="go on from the last checkpoint of the run directory")
    add("--overwrite", action="store_true", help="replace the run in the run directory, once the first step is done")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--compile", action="store_true", help="use torch.compile for the blocks; it needs a C++ compiler")
    add("--tokens", type=at_least(1), metavar="N", help="training tokens, instead of --steps")
    first, _ = parser.parse_known_args(argv)
    add("-h", "--help", action="help", help="print this, with the flags of the --pe and the --preset that are given")
    preset = first.preset or ("paper-35m" if torch.cuda.is_available() else "mini")
    pe = first.pe or "expe"
    defaults = settings_of(*configure({}, pe, preset))
    for kind in (settings_class(pe), ModelConfig, TrainConfig):
        for f in dataclasses.fields(kind):
            if f.metadata["help"]:
                add_flag(parser, f, defaults[f.name])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise InputError(f"{unknown[0]} is no flag with --pe {pe}: python train.py --pe {pe} --help lists them")
    given = {name: value for name, value in vars(args).items() if value is not None}
    model, train = configure(given, pe, preset)
    if args.tokens:
        given["steps"] = train.steps
    args.out = common.output_folder(args.out or Path("runs") / run_name(given, pe, preset, defaults))
    args.given = given
    args.preset = preset
    return args, model, train

def add_flag(parser, f, default):
    """A flag for a field, with the preset's value in its help."""
    name = flag_of(f)
    help = f"{f.metadata['help']} (here: {default})"
    if f.type is bool:
        parser.add_argument(name, dest=f.name, action=argparse.BooleanOptionalAction, default=None, help=help)
    else:
        parser.add_argument(name, dest=f.name, type=READERS[f.type], metavar=name.strip("-").upper(), help=help)

def configure(given, pe, preset):
    """(ModelConfig, TrainConfig) of a preset, with {field: value} of the flags that were given."""
    model, train = PRESETS[preset]
    kind = settings_class(pe)
    l = {"l": model.encoding.l} if "l" in kind.__dataclass_fields__ else {}
    encoding = make_encoding(pe, **l | pick(given, kind))
    changes = pick(given, ModelConfig)
    if "d_model" in given:
        changes.setdefault("d_mlp", None)
    if given.get("objective") == "mlm":
        changes.setdefault("causal", False)
    model = dataclasses.replace(model, encoding=encoding, **changes)
    changes = pick(given, TrainConfig)
    if "batch_size" in given:
        changes.setdefault("micro_batch", math.gcd(given["batch_size"], train.micro_batch))
    if "lr" in given:
        changes.setdefault("end_lr", train.end_lr * given["lr"] / train.lr)
    if "tokens" in given:
        changes["steps"] = math.ceil(given["tokens"] / (model.context * given.get("batch_size", train.batch_size)))
    train = dataclasses.replace(train, **changes)
    check_together(model, train)
    return model, train

def pick(given, kind):
    """Those of the flags that are fields of a dataclass; all encodings have the field pe, which is told apart."""
    return {f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given and f.name != "pe"}

def settings_of(model, train):
    """{field: value} of all three configs."""
    return vars(model.encoding) | vars(model) | vars(train)

def run_name(given, pe, preset, defaults):
    """The default directory's name: the preset, --pe, each given flag with another value than theirs, and the seed."""
    words = [preset, pe]
    for name, value in given.items():
        if name not in UNNAMED and value != defaults.get(name, value):
            value = Path(value).resolve().name if name in ("data", "init_from") else value
            word = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(f"{name}{'_' * word[0].isalpha()}{word}")
    return "-".join([*words, f"s{given.get('seed', 0)}"])

def check_resumed(run, given):
    """(ModelConfig, TrainConfig, record) of the run to resume; InputError for a flag that contradicts it."""
    model, config, record = common.read_run(run)
    stored = settings_of(model, config) | {"preset": record["provenance"]["preset"]}
    for name, value in given.items():
        if name in stored and stored[name] != value:
            raise InputError(f"--{name.replace('_', '-')} is {stored[name]} in {run}, and {value} was given: resume "
                             "with the run's own flags, or train under another --out")
    return model, config, record

def describe_origin(preset, argv, device):
    """What a number of this run can be traced by: preset, command line, commit, versions, machine."""
    git = ""
    with contextlib.suppress(OSError):                                  # there is no git here
        describe = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
        git = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    return {"preset": preset, "command": shlex.join(["python", "train.py", *argv]), "git": git, "device": str(device),
            "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "machine": platform.platform(), "threads": torch.get_num_threads()}


# ---- the two backends ------------------------------------------------------------------------------------------------

def learning_rate(config, step):
    """Of step 0 .. steps-1: linear warm-up to lr, then half a cosine down to end_lr."""
    warm = round(config.warmup * config.steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, config.steps - 1 - warm)
    return config.end_lr + (config.lr - config.end_lr) * (1 + math.cos(math.pi * progress)) / 2

def draw_positions(config, step, T):
    """T of the positions 0 .. P-1 without repeats, in order, for the whole batch of a step; None without P."""
    if not config.random_positions:
        return None
    rng = np.random.default_rng([config.seed, step, 1])                 # apart from those of the data and of dropout
    return np.sort(rng.choice(config.random_positions, T, replace=False))

def micro_batches(config, vocab, batch, seeds):
    """(tokens, targets) of a batch (B, T+1) by the objective, as many sequences at once as may be in memory."""
    inputs = data.OBJECTIVES[config.objective](batch, vocab, np.random.default_rng(seeds))
    size = config.micro_batch or config.batch_size
    return [[x[i : i + size] for x in inputs] for i in range(0, len(batch), size)]

class TorchBackend:
    """GPT, or another module of which model(tokens, targets, positions) is the loss, and AdamW, on any device."""

    def __init__(self, model_config, config, device, compiled=False, model=None):
        self.config = config
        self.vocab = model_config.vocab_size
        self.device = device
        parts = {}
        if config.fast:
            from engine import fast
            parts = fast.PARTS
            fast.keep_freed_memory()
        self.model = (model or GPT(model_config, config.seed, **parts)).to(device)
        if compiled:
            from engine import fast
            fast.compile(self.model)
        matrices = [w for w in self.model.parameters() if w.ndim >= 2]
        vectors = [w for w in self.model.parameters() if w.ndim < 2]    # decay is on matrices only (table 5)
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = (float(config.beta1), float(config.beta2))
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16")
        torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")

    def tensors(self):
        """Weights and moments as arrays: {"NAME", "m.NAME" of the gradient, "v.NAME" of its square}."""
        found = dict(self.model.state_dict())
        for name, w in self.model.named_parameters():
            if w in self.optimizer.state:
                found[f"m.{name}"] = self.optimizer.state[w]["exp_avg"]
                found[f"v.{name}"] = self.optimizer.state[w]["exp_avg_sq"]
        return {name: x.cpu().contiguous().numpy() for name, x in found.items()}

    def load(self, tensors, step):
        """Go on from these weights and moments, after so many steps."""
        tensors = {name: torch.from_numpy(x).to(self.device) for name, x in tensors.items()}
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        for name, w in self.model.named_parameters() if step else ():
            self.optimizer.state[w] = {"step": torch.tensor(float(step), device=w.device),
                                       "exp_avg": tensors[f"m.{name}"], "exp_avg_sq": tensors[f"v.{name}"]}

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm."""
        self.model.train()
        torch.manual_seed(self.config.seed * 2**32 + step)              # of dropout
        positions = draw_positions(self.config, step, batch.shape[1] - 1)
        loss = 0
        for tokens, targets in self.micro_batches(batch, [self.config.seed, step, 2]):
            with self.autocast:
                part = self.model(tokens, targets, positions) * (len(tokens) / len(batch))
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def micro_batches(self, batch, seeds):
        """As above, on the device."""
        parts = micro_batches(self.config, self.vocab, batch, seeds)
        return [[torch.from_numpy(x).to(self.device) for x in part] for part in parts]

    def validation_loss(self, batch):
        """The mean loss of a batch (B, T+1), in nats."""
        self.model.eval()
        total = count = 0
        for tokens, targets in self.micro_batches(batch, [0]):
            with self.autocast:
                total += self.model.token_losses(tokens, targets).cpu().double().sum().item()
            count += (targets >= 0).sum().item()
        return total / count

class NumpyBackend:
    """The same in NumPy, in fp32 on the CPU. Dropout's masks are drawn by NumPy, and so are not torch's."""

    def __init__(self, model_config, config):
        self.model_config = model_config
        self.config = config
        self.params = model_numpy.init_params(model_config, config.seed)
        self.state = model_numpy.adamw_state(self.params)

    def tensors(self):
        moments = model_numpy.over("m.", self.state["m"]) | model_numpy.over("v.", self.state["v"])
        return self.params | moments

    def load(self, tensors, step):
        self.params = {name: tensors[name] for name in self.params}
        if step:
            self.state = {"step": step, "m": model_numpy.under("m.", tensors), "v": model_numpy.under("v.", tensors)}

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm."""
        config = self.config
        rng = np.random.default_rng([config.seed, step])                # of dropout
        positions = draw_positions(config, step, batch.shape[1] - 1)
        loss = 0
        grads = {}
        for tokens, targets in micro_batches(config, self.model_config.vocab_size, batch, [config.seed, step, 2]):
            masks = None
            if self.model_config.dropout:
                masks = model_numpy.dropout_masks(self.model_config, *tokens.shape, rng)
            part, part_grads = model_numpy.loss_and_grads(self.params, tokens, targets, self.model_config, positions,
                                                          masks)
            share = len(tokens) / len(batch)
            loss += share * part
            grads = model_numpy.summed(grads, {name: share * g for name, g in part_grads.items()})
        norm = model_numpy.clip_grads(grads, config.clip)
        model_numpy.adamw_step(self.params, grads, self.state, learning_rate(config, step), config.beta1, config.beta2,
                               weight_decay=config.weight_decay)
        return float(loss), norm

    def validation_loss(self, batch):
        """The mean loss of a batch (B, T+1), in nats."""
        total = count = 0
        for tokens, targets in micro_batches(self.config, self.model_config.vocab_size, batch, [0]):
            total += model_numpy.token_losses(self.params, tokens, targets, self.model_config).sum(dtype="float64")
            count += np.count_nonzero(targets >= 0)
        return float(total / count)

def make_backend(model_config, config, device, compiled):
    if config.backend == "torch":
        return TorchBackend(model_config, config, device, compiled)
    if str(device) != "cpu" or compiled:
        raise InputError("--backend numpy computes on the CPU, uncompiled: give --device cpu, and leave out --compile")
    return NumpyBackend(model_config, config)


# ---- training --------------------------------------------------------------------------------------------------------

def start_run(run, record, tokenizer):
    """Write config.json, once the first step is done: only now goes what --overwrite replaces, by name."""
    for name in (common.CHECKPOINT, "log.jsonl"):
        (run / name).unlink(missing_ok=True)
    common.write_text(run / "config.json", json.dumps(record, indent=1) + "\n")
    common.write_text(run / "tokenizer.tiktoken", common.read_text(tokenizer))

def add_to_log(run, **line):
    with open(run / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

def cut_log(run, step):
    """Take out of log.jsonl what was trained after the checkpoint of this step, and is trained again."""
    lines = common.read_text(run / "log.jsonl").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    common.write_text(run / "log.jsonl", "".join(kept))

@contextlib.contextmanager
def stopping():
    """A list that takes the signals which ask to stop; a second one does not wait for the step to end."""
    signals = []

    def take(number, frame):
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        os.write(2, b"\nstopping after this step (again: at once, back to the last checkpoint)\n")

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

def train(run, record, model_config, config, backend, folder, first, seconds):
    """Train from step `first`, after so many seconds, until config.steps or a signal; returns the steps done."""
    context = model_config.context
    tokens = data.open_split(folder, "train")
    val_tokens = data.open_split(folder, "val")
    n_val = min(config.eval_windows, data.count_windows(val_tokens, context))
    val_batch = data.batch(val_tokens, context, n_val, 0, 0)            # (N, T+1), the same for all runs
    begun = time.perf_counter()
    with stopping() as signals:
        for step in tqdm(range(first, config.steps), initial=first, total=config.steps, disable=None, leave=False):
            batch = data.batch(tokens, context, config.batch_size, config.seed, step)
            loss, norm = backend.step(batch, step)
            if not math.isfinite(loss + norm):
                raise InputError(f"the loss is {loss} and the gradient's norm {norm} at step {step + 1}: the last "
                                 f"checkpoint stays; try a lower --lr than {config.lr:g}")
            if step == 0:
                start_run(run, record, folder / "tokenizer.tiktoken")
            done = step + 1
            add_to_log(run, step=done, loss=loss, grad_norm=norm, lr=learning_rate(config, step))
            complete = done == config.steps
            if done % config.eval_every == 0 or complete:
                val_loss = backend.validation_loss(val_batch)
                add_to_log(run, step=done, val_loss=val_loss)
                rate = (done - first) * config.batch_size * context / (time.perf_counter() - begun)
                tqdm.write(f"step {done:6,}/{config.steps:,}   loss {loss:.3f}   val {val_loss:.3f}   "
                           f"{rate:,.0f} tokens/s")
            if done % config.checkpoint_every == 0 or complete or signals:
                common.save_checkpoint(run, backend.tensors(), done, seconds + time.perf_counter() - begun)
            if signals:
                break
    return done

def check_new(run, overwrite):
    """InputError unless a run directory is a new one, an empty one or, by --overwrite, one that holds a run."""
    if common.holds_files(run):
        if not (run / "config.json").exists():
            raise InputError(f"{run} exists and holds no run, so it is left as it is: choose another --out")
        common.read_run(run)
        if not overwrite:
            raise InputError(f"{run} exists: add --resume to go on with it, --overwrite to replace it, or another --out")

def prepare_data(run, config, vocab, given, record):
    """(folder of tokens, its meta.json): prepared now if it has to be. record: of the run to resume, or None."""
    folder = data.ensure(config.data, vocab, config.min_doc_tokens, config.max_tokens)
    meta = data.read_meta(folder)
    for name in ("min_doc_tokens", "max_tokens"):
        if given.get(name, meta[name]) != meta[name]:
            raise InputError(f"{folder} was made with --{name.replace('_', '-')} {meta[name]:,}: leave the flag out, or "
                             "prepare the data again with python data.py")
    if record and record["data"]["splits"]["train"]["sha256"] != meta["splits"]["train"]["sha256"]:
        raise InputError(f"{folder} is not the data that {run} was trained on: its hash differs")
    return folder, meta

def main(argv=None, make_backend=make_backend):
    argv = sys.argv[1:] if argv is None else argv
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.distributed.is_initialized():
        from engine import distributed
        return distributed.main(argv)
    with CommandLine(prog="train.py").one_line_errors():
        args, model_config, config = read_flags(argv)
        run = args.out
        record = None
        if args.resume:
            model_config, config, record = check_resumed(run, args.given)
        else:
            check_new(run, args.overwrite)
        device = pick_device("cpu" if config.backend == "numpy" and args.device == "auto" else args.device)
        folder, meta = prepare_data(run, config, model_config.vocab_size, args.given, record)
        if record is None:
            record = {"model": dataclasses.asdict(model_config), "train": dataclasses.asdict(config),
                      "data": {"folder": str(folder), **meta}, "provenance": describe_origin(args.preset, argv, device)}
        run.mkdir(parents=True, exist_ok=True)
        with common.lock(run):
            info = common.checkpoint_info(run) if args.resume else {"step": 0, "seconds": 0.0}
            if info["step"] >= config.steps:
                return print(f"{run} is complete: {info['step']:,} of {config.steps:,} steps")
            backend = make_backend(model_config, config, device, args.compile)
            if info["step"]:
                backend.load(common.read_checkpoint(run)[0], info["step"])
                cut_log(run, info["step"])
            elif config.init_from != "none":
                from engine import init_from
                record["parent"] = init_from.load_parent(config.init_from, backend, model_config, meta)
            print(f"{run}: {model_numpy.count_parameters(model_config):,} parameters, {config.backend} on {device}, steps "
                  f"{info['step']:,} to {config.steps:,} of {config.batch_size} x {model_config.context} tokens")
            done = train(run, record, model_config, config, backend, folder, info["step"], info["seconds"])
        if done < config.steps:
            print(f"stopped; go on with: python train.py --out {run} --resume", file=sys.stderr)
            sys.exit(130)
        print(f"next: python eval.py {run}")

if __name__ == "__main__":
    main()
