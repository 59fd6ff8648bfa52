"""One training run, from flags to checkpoint.

    python train.py --pe expe --l 24            trains and writes runs/mini-expe-s0 (l is 24 in the preset, too)
    python train.py --pe expe --l 24 --resume   goes on after a Ctrl-C or a kill, bit for bit on a CPU
    torchrun --nproc_per_node 8 -- train.py --pe expe --l 24    the same by eight GPUs

A run is a pure function of its configs: the batch of a step depends on (seed, step) alone, and so does dropout's mask.
Two backends compute it, from the same first weights on the same batches: torch, and NumPy with gradients by hand. (Each
draws dropout's masks by its own generator.)
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

import data
import files
import model_numpy
import runs
from cli import BAR, CONTROL, CommandLine, at_least, clock, listed, number, pick_device, whole
from config import ENCODINGS, PRESETS, EncodingConfig, InputError, ModelConfig, TrainConfig

# torch and what imports it are imported where they are used, so that --help and a wrong flag answer at once.

AUTO = {"CPU": "mini", "GPU": "paper-35m"}  # the preset of --preset auto
OF_DATA = ("min_doc_tokens", "max_tokens")  # settings that a run has from its folder of tokens
UNNAMED = ("seed", "micro_batch", "activation_checkpointing",              # in a run's name, but for its -s0
           "eval_every", "eval_windows", "checkpoint_every")
LOGGED = ("step", "loss", "grad_norm", "lr", "val_loss")
MOMENTS = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "m"}  # torch's names, and those on disk
LINE = 60  # tokens, and characters, of what --sample-every prints
READ_EVERY = 10  # steps between looks at the losses: a look makes a GPU wait
RANK, LOCAL_RANK, WORLD = (int(os.environ.get(name, default))                          # torchrun's
                           for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))


# ---- from flags to configs -------------------------------------------------------------------------------------------

def flags_of(*classes):
    """{name: field} of what the classes of knobs let one set on the command line."""
    found = {}
    for f in (f for knobs in classes for f in dataclasses.fields(knobs) if f.metadata.get("help")):
        found.setdefault(f.name, f)
    return found

READERS = {int: whole, int | None: whole, float: number, float | None: number, str: str}

def flag_of(f):
    """A field's flag: its name with dashes, unless it has one of its own."""
    return f.metadata["flag"] or "--" + f.name.replace("_", "-")

def settings_of(model, train):
    """{name: value} of all that flags set in these configs; --pe is not among them."""
    return {name: getattr(knobs, name) for knobs in (model.encoding, model, train) for name in flags_of(type(knobs))}

def short(value):
    """A setting's value in a word; a float by :g, where that is all of it."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)

def add_flags(group, fields):
    """A flag for each field, with its default: that of all presets, or those of the two that --preset auto has."""
    for name, f in fields.items():
        how = {"metavar": flag_of(f).strip("-").upper().replace("-", "_"), "type": READERS.get(f.type)}
        if f.type is bool:
            how = {"action": argparse.BooleanOptionalAction, "default": None}
        known = {preset: short(settings_of(*configs).get(name, f.default)) for preset, configs in PRESETS.items()}
        words = ", ".join(f"{preset} {known[preset]}" for preset in AUTO.values())
        default = f" ({words if len(set(known.values())) > 1 else 'default: ' + known['mini']})"
        how["help"] = f.metadata["help"] + default * ("default" not in f.metadata["help"])
        group.add_argument(flag_of(f), dest=name, **how)

def command_line():
    parser = CommandLine(
        prog="train.py", description="Train a GPT with one of the positional encodings, and write its run directory.",
        epilog="examples:\n  python train.py --pe expe --l 24\n  python train.py --pe rope --seed 1\n"
               "  python train.py --pe exqpe --theta2 1/8 --data my_books/ --tokens 3e6",
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--preset", choices=("auto", *PRESETS), default="auto", help="auto: paper-35m on a GPU, else mini")
    run.add_argument("--out", metavar="DIR",
                     help="the run directory (default: runs/<preset>-<encoding>-<what differs from them>-s<seed>)")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the run directory")
    run.add_argument("--overwrite", action="store_true", help="replace the run directory if it exists")
    run.add_argument("--show", action="store_true", help="print the configuration that these flags make; train nothing")
    run.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    run.add_argument("--compile", action="store_true", help="torch.compile the blocks; needs a C++ compiler")
    run.add_argument("--sample-every", type=at_least(1), metavar="N", help="print a line of the model's, each N steps")
    run.add_argument("--log", type=listed(str, "csv", "tensorboard"), default=[], metavar="NAME,...",
                     help="write what log.jsonl holds as log.csv too (csv), or for TensorBoard (tensorboard)")
    run.add_argument("--tokens", type=at_least(1), metavar="TOKENS", help="training tokens, instead of --steps")
    encoding = parser.add_argument_group("the encoding")
    encoding.add_argument("--pe", choices=ENCODINGS, help="positional encoding (default: the preset's, expe); "
                          "rope+log, rope+sinks, ...: with the softmax of zoo/_log.py, ...")
    add_flags(encoding, flags_of(*ENCODINGS.values()))
    defaults = "default: the preset's, which --preset NAME --show prints"
    add_flags(parser.add_argument_group("the model", defaults), flags_of(ModelConfig))
    add_flags(parser.add_argument_group("training", defaults), flags_of(TrainConfig))
    return parser

def configure(args, model, train):
    """A preset's configs, `model` and `train`, with the flags that were given."""
    given = {name: value for name, value in vars(args).items() if value is not None}

    def those_of(fields):
        return {name: given[name] for name in fields if name in given}

    pe = given.get("pe", model.encoding.pe)
    settings = {"l": model.encoding.l} if "l" in flags_of(ENCODINGS[pe]) else {}
    encoding = EncodingConfig(pe, **settings | those_of(flags_of(*ENCODINGS.values())))
    changes = those_of(flags_of(ModelConfig))
    masked = given.get("objective", train.objective) == "mlm"
    if masked:
        changes.setdefault("causal", False)
    if changes.get("d_model", model.d_model) != model.d_model:
        changes.setdefault("d_mlp", None)
    model = dataclasses.replace(model, encoding=encoding, **changes)

    changes = those_of(flags_of(TrainConfig))
    if "batch_size" in changes:
        changes.setdefault("micro_batch", math.gcd(changes["batch_size"], train.micro_batch))
    if changes.get("lr", train.lr) != train.lr:
        changes.setdefault("end_lr", train.end_lr * changes["lr"] / train.lr)
    if "tokens" in given:
        if "steps" in given:
            raise InputError("--tokens and --steps say the same thing: leave one out")
        changes["steps"] = steps_for(given["tokens"], model, changes.get("batch_size", train.batch_size))
    train = dataclasses.replace(train, **changes)
    if masked and (model.causal or not encoding.both_sides):
        raise InputError("objective mlm sees both sides: leave out --causal" if model.causal else
                         f"objective mlm sees both sides, and {pe} has a meaning under a causal mask alone")
    P, longest = train.random_positions, model.encoding.longest(model)
    if 0 < P < model.context:
        raise InputError(f"random_positions must be 0 or at least the context, {model.context}, got {P}")
    if P > longest:
        raise InputError(f"{pe} has {longest} positions, and random_positions draws of {P}: see --n-positions")
    return model, train

def steps_for(tokens, model, batch_size):
    return math.ceil(tokens / (model.context * batch_size))

def run_device(args, backend):
    """Where the run computes; InputError for a device that is not here, or that the backend cannot use."""
    if backend != "numpy":
        return own_device(pick_device(args.device))
    if args.device not in ("auto", "cpu") or args.compile:
        raise InputError("--backend numpy computes on the CPU, uncompiled: leave out --compile and --device")
    return "cpu"

def choose_preset(args):
    """(name, device kind) of the preset; flags that no preset in question can have are told before torch is loaded."""
    names, errors = list(AUTO.values()) if args.preset == "auto" else [args.preset], []
    for name in names:
        try:
            configure(args, *PRESETS[name])
        except InputError as error:
            errors.append(error)
    if len(errors) == len(names):
        raise errors[0]
    kind = "GPU" if str(run_device(args, args.backend)).startswith("cuda") else "CPU"
    return AUTO[kind] if args.preset == "auto" else args.preset, kind

def run_name(preset, model, train):
    """The default directory: the preset, --pe, the fewest settings that make these configs of them, and the seed.

    So runs that share a name differ in UNNAMED at most, or in the place of a folder of text.
    """
    pe, settings, words = model.encoding.pe, settings_of(model, train), []
    told, fields = dict(settings), flags_of(type(model.encoding), ModelConfig, TrainConfig)
    for name in settings:
        fewer = {other: value for other, value in told.items() if other != name}
        with contextlib.suppress(InputError):
            if settings_of(*configure(argparse.Namespace(pe=pe, **fewer), *PRESETS[preset])) == settings:
                told = fewer
    if "init_from" in told:
        told["init_from"] = Path(train.init_from).resolve().name
    if "data" in told:
        told["data"] = data.folder_of(train.data, model.vocab_size).name.removesuffix(f"-v{model.vocab_size}")
    for name in (name for name in told if name not in UNNAMED):
        word, value = flag_of(fields[name]).strip("-").replace("-", "_"), told[name]
        words.append({True: word, False: f"no_{word}"}[value] if isinstance(value, bool) else
                     word + "_" * (isinstance(value, str) or word[-1].isdigit()) + short(value))
    return Path("runs") / "-".join([preset, pe, *words, f"s{train.seed}"])

def show(preset, run, model, train):
    """--show: every setting, its flag and its value, marked where the preset with this --pe has another."""
    some = argparse.Namespace(pe=model.encoding.pe, nope_every=model.nope_every)       # without it some cannot be
    plain = settings_of(*configure(some, *PRESETS[preset])) | {"nope_every": PRESETS[preset].model.nope_every}
    total, _ = model_numpy.count_parameters(model)
    print(f"{run}: {total:,} parameters, {train.steps * train.batch_size * model.context:,} training tokens\n"
          f"(* is other than {preset} with --pe {model.encoding.pe})\n")
    fields = flags_of(type(model.encoding), ModelConfig, TrainConfig)
    for name, value in settings_of(model, train).items():
        own = f" ({preset}: {short(plain[name])})" * (value != plain[name])
        print(f"{'*' if own else ' '} {name:25}{flag_of(fields[name]):27}{short(value)}{own}")

def stored_run(run, args):
    """The configs and the record of the run to resume; InputError if a flag, or a preset that is named, contradicts."""
    model, train, record = runs.read_run(run)
    stored = {**vars(model.encoding), **vars(model), **vars(train)}
    asked = {name: given for name in ("pe", *flags_of(*ENCODINGS.values(), ModelConfig, TrainConfig))
             if (given := getattr(args, name)) is not None}
    if args.tokens is not None:
        asked["steps"] = steps_for(args.tokens, model, train.batch_size)
    if args.preset != "auto":
        new, new_train = configure(args, *PRESETS[args.preset])
        preset = {**vars(new.encoding), **vars(new), **vars(new_train)}
        asked |= {name: value for name, value in preset.items() if name not in (*asked, *OF_DATA)}
    for name, value in asked.items():
        if value is not None and value != stored.get(name):
            raise InputError(f"{name} is {stored.get(name, 'not set')} in {run} and {value} by these flags: resume "
                             "with the run's own flags, or train under another --out")
    return model, train, record

def provenance(argv, device):
    """What a number of this run can be traced by: command line, versions, git commit, machine."""
    import torch

    git, here = None, Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):   # no git, or no repository
        describe = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        git = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    packages = ("torch", "numpy", "tiktoken", "rustbpe", "safetensors")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"command": shlex.join(["python", "train.py", *argv]), "git": git, "device": str(device),
            "versions": {"python": platform.python_version()} | versions,
            "processes": WORLD, "threads": torch.get_num_threads(), "machine": platform.platform()}


# ---- the two backends ------------------------------------------------------------------------------------------------

def learning_rate(config, step):
    """Of step 0 .. steps-1: linear warm-up to lr, then half a cosine down to end_lr."""
    warm = round(config.warmup * config.steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, config.steps - 1 - warm)
    return config.end_lr + (config.lr - config.end_lr) * (1 + math.cos(math.pi * progress)) / 2

def random_positions(config, step, T):
    """{"positions": T of 0 .. P-1 without repeats, in order}, for the whole batch of a step; {} without P."""
    rng = np.random.default_rng([config.seed, step, 1])                 # apart from those of the data and of dropout
    P = config.random_positions
    return {"positions": np.sort(rng.choice(P, T, replace=False))} if P else {}

def asked(config, vocab, batch, seeds=(0,)):
    """What the model is given of a batch (B, T+1), by the objective: {"tokens", "targets"}, and "at" of masked ones."""
    return data.OBJECTIVES[config.objective](batch, vocab, np.random.default_rng(seeds))

def pieces(given, size):
    """The same, `size` sequences at a time."""
    return [{name: x[i : i + size] for name, x in given.items()} for i in range(0, len(given["tokens"]), size)]

def new_optimizers(model, config):
    """torch's AdamW, with decay on matrices only (table 5); by --optimizer muon, Muon before it for those of blocks.

    Muon (Jordan 2024) steps by the momentum with its singular values made 1, here times 0.2 sqrt(rows or columns,
    whichever are more): the size of AdamW's step, so that rate and decay are AdamW's (Liu et al. 2025, equation 4).
    """
    import torch

    parameters, fused = dict(model.named_parameters()), next(model.parameters()).device.type != "meta"
    muon = [parameters.pop(name) for name in names_by_muon(model, config)]
    rest = parameters.values()
    groups = [{"params": [w for w in rest if w.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(float(config.beta1), float(config.beta2)), fused=fused)
    rates = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(muon, **rates), adamw] if muon else [adamw]

def names_by_muon(model, config):
    """Names of the matrices of blocks, none of an encoding's, if Muon is to train them."""
    return [name for name, w in model.named_parameters() if config.optimizer == "muon" and w.ndim == 2
            and name.startswith("blocks.") and ".encoding." not in name]

class TorchBackend:
    """GPT, or another module of which model(tokens, targets) is the loss, and its optimizer in torch, on any device."""

    def __init__(self, model_config, config, device, compiled, model=None):
        import torch

        import fast
        from model_torch import GPT

        self.config, self.device, self.shapes = config, device, model_numpy.parameter_shapes(model_config)
        self.vocab = model_config.vocab_size
        self.model = (GPT(model_config, config.seed, **fast.PARTS) if model is None else model).to(device)
        self.loss = self.model
        self.optimizers, self.by_muon = new_optimizers(self.model, config), names_by_muon(self.model, config)
        self.many, bf16 = device.type != "meta", config.dtype == "bf16"        # meta: shapes alone, tensor by tensor
        self.autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
        if config.activation_checkpointing:
            fast.checkpoint_activations(self.model)
        if compiled:
            fast.compile(self.model)

    def weights(self):
        return {name: tensor.cpu().contiguous().numpy() for name, tensor in self.model.state_dict().items()}

    def moments(self):
        """As arrays: {"m.NAME": of the gradient, "v.NAME": of its square, if AdamW's}; {} before the first step."""
        names, states = {w: name for name, w in self.model.named_parameters()}, [o.state for o in self.optimizers]
        return {f"{MOMENTS[key]}.{names[w]}": x.cpu().numpy() for state in states for w in state
                for key, x in state[w].items() if key in MOMENTS}

    def load(self, weights, moments, step):
        """Go on from these weights and moments, after so many steps."""
        import torch

        weights, moments = ({name: torch.from_numpy(x) for name, x in found.items()} for found in (weights, moments))
        self.model.load_state_dict(weights)
        for name, w in self.model.named_parameters():
            *muon, adamw = self.optimizers
            if step and name in self.by_muon:
                muon[0].state[w] = {"momentum_buffer": moments[f"m.{name}"].to(w.device)}
            elif step:
                adamw.state[w] = {"step": torch.tensor(float(step), device=w.device),
                                  "exp_avg": moments[f"m.{name}"].to(w.device),
                                  "exp_avg_sq": moments[f"v.{name}"].to(w.device)}

    def join(self):
        """Share each step with the processes that torchrun started; all begin with the first one's weights."""
        import torch

        self.loss = torch.nn.parallel.DistributedDataParallel(self.model)

    def here(self, part):
        """Arrays as tensors on the device."""
        import torch

        found = {name: torch.from_numpy(x) for name, x in part.items()}
        if self.device.type == "cuda":
            found = {name: x.pin_memory() for name, x in found.items()}               # or the copy would wait for it
        return {name: x.to(self.device, non_blocking=True) for name, x in found.items()}

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm, still on the device."""
        import torch

        self.model.train()
        mask = step + RANK * self.config.steps                          # dropout's: by seed and step, as the data
        torch.manual_seed(self.config.seed * 2**32 + mask)
        loss, where = 0, random_positions(self.config, step, batch.shape[1] - 1)
        given = asked(self.config, self.vocab, batch, [self.config.seed, step, 2])
        mine = self.here({name: np.split(x, WORLD)[RANK] for name, x in given.items()})       # (B / WORLD, ...) each
        parts = pieces(mine, self.config.micro_batch)
        for i, part in enumerate(parts, 1):
            self.loss.require_backward_grad_sync = i == len(parts)      # DDP adds up the last sums alone
            with self.autocast:
                share = len(part["tokens"]) * WORLD / len(batch)
                part_loss = self.loss(**part, **where) * share
            part_loss.backward()
            loss += part_loss.detach()
        if WORLD > 1:
            torch.distributed.all_reduce(loss)
            loss /= WORLD
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=self.many)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.config, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def summed_loss(self, part):
        """The sum of the losses of its targets; part: as `asked` has it."""
        self.model.eval()
        with self.autocast:
            return self.model.token_losses(**self.here(part)).cpu().double().sum().item()

class NumpyBackend:
    """The same in NumPy, in fp32 on the CPU. Dropout's masks are of NumPy's making, and so not torch's."""

    by_muon = ()

    def __init__(self, model_config, config, device="cpu", compiled=False):
        self.model_config, self.config, self.shapes = model_config, config, model_numpy.parameter_shapes(model_config)
        self.params = model_numpy.init_params(model_config, config.seed)
        self.state = model_numpy.adamw_state(self.params)

    def weights(self):
        return self.params

    def moments(self):
        found = model_numpy.over("m.", self.state["m"]) | model_numpy.over("v.", self.state["v"])
        return found if self.state["step"] else {}

    def load(self, weights, moments, step):
        self.params, m, v = weights, model_numpy.under("m.", moments), model_numpy.under("v.", moments)
        self.state = {"step": step, "m": m, "v": v} if step else self.state

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm."""
        config, rng, loss, grads = self.config, np.random.default_rng([self.config.seed, step]), 0, {}
        where = random_positions(config, step, batch.shape[1] - 1)
        with np.errstate(over="ignore", invalid="ignore"):              # a loss that is not finite is told by its step
            given = asked(config, self.model_config.vocab_size, batch, [config.seed, step, 2])
            for part in pieces(given, config.micro_batch):
                masks, share = None, len(part["tokens"]) / len(batch)
                if self.model_config.dropout:
                    masks = model_numpy.dropout_masks(self.model_config, *part["tokens"].shape, rng)
                part_loss, part_grads = model_numpy.loss_and_grads(self.params, config=self.model_config, masks=masks,
                                                                   **part, **where)
                loss += share * part_loss
                grads = model_numpy.summed(grads, {name: share * g for name, g in part_grads.items()})
            norm = model_numpy.clip_grads(grads, config.clip)
            model_numpy.adamw_step(self.params, grads, self.state, learning_rate(config, step), config.beta1,
                                   config.beta2, weight_decay=config.weight_decay)
        return loss, norm

    def summed_loss(self, part):
        """The sum of the losses of its targets; part: as `asked` has it."""
        return model_numpy.token_losses(self.params, config=self.model_config, **part).sum(dtype="float64").item()

BACKENDS = {"torch": TorchBackend, "numpy": NumpyBackend}


# ---- many processes --------------------------------------------------------------------------------------------------
# torchrun starts this script WORLD times. The first process does all that one alone would do. The others hear from it
# what to train, and then which step is next, of whose batch each takes its share.

def told(what=None):
    """What the first process says, in every one."""
    if WORLD > 1:
        import torch

        said = [what]
        torch.distributed.broadcast_object_list(said, device=torch.device("cpu"))
        return said[0]

@contextlib.contextmanager
def together():
    """Meet the other processes; at the end of the block, however it is left, the first one sends them away."""
    import torch

    try:
        torch.distributed.init_process_group(timeout=datetime.timedelta(days=7))       # data may be prepared first
    except ValueError as error:                                         # a variable that torchrun sets is not there
        raise InputError(f"WORLD_SIZE is {WORLD}: start by torchrun, or unset it ({error})") from None
    try:
        yield
    finally:
        if RANK == 0:
            told(None)
        torch.distributed.destroy_process_group()

def follow():
    """All that a process other than the first one does."""
    from fast import keep_freed_memory

    with together():
        for which in (signal.SIGINT, signal.SIGTERM):
            signal.signal(which, signal.SIG_IGN)                        # the first one says when to end
        if (plan := told()) is None:
            return
        keep_freed_memory()
        run, model_config, config, folder, device, record, args = plan
        tokens = data.open_split(folder, "train")
        backend = TorchBackend(model_config, config, own_device(device), args.compile)
        if record["checkpoint"]["step"]:
            runs.fill(backend, run, record)
        backend.join()
        while (step := told()) is not None:
            backend.step(data.batch(tokens, model_config.context, config.batch_size, config.seed, step), step)

def own_device(device):
    """Of the processes of a machine each has a GPU of its own; they may share a CPU."""
    import torch

    if WORLD == 1 or device.type != "cuda":
        return device
    here, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device.index or here > there:
        raise InputError(f"device {device} is not one for each of {here} processes: use --device cuda, and give "
                         f"torchrun at most {there} of them here")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)

def check_processes(config):
    """InputError for what the processes of torchrun cannot share."""
    if config.backend == "numpy" and WORLD > 1:
        raise InputError("--backend numpy is one process: start it without torchrun")
    if config.batch_size % WORLD:
        raise InputError(f"batch_size must be a multiple of torchrun's {WORLD} processes, got {config.batch_size}")


# ---- training --------------------------------------------------------------------------------------------------------

@np.errstate(over="ignore", invalid="ignore")                           # of weights that diverge
def sample(weights, config, encoding, seed):
    """A line as these weights write it, at temperature 1; drawn by a generator of its own, not by training's."""
    rng, tokens = np.random.default_rng(seed), [encoding.eot_token]
    while len(tokens) < min(LINE, config.context):
        logits, _ = model_numpy.forward(weights, np.array([tokens]), config)           # (1, T, V)
        tokens.append(int((logits[0, -1] + rng.gumbel(size=config.vocab_size)).argmax()))
    return " ".join(CONTROL.sub("", encoding.decode(tokens[1:])).split())[:LINE]

def further_logs(names, run, held):
    """Functions that take each line of log.jsonl, a dict, to where --log says."""
    if "csv" in names:
        rows = csv.DictWriter(held.enter_context(open(run / "log.csv", "w", buffering=1)), LOGGED, lineterminator="\n")
        rows.writeheader()
        yield rows.writerow
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        board = held.enter_context(SummaryWriter(run / "tensorboard", purge_step=1))   # what it had is told anew
        yield lambda line: [board.add_scalar(name, line[name], line["step"]) for name in line if name != "step"]

class Log:
    """log.jsonl and the progress bar of a run. Losses may still be on their way: they are read READ_EVERY steps."""

    def __init__(self, run, config, record, first, context, started, further):
        self.config, self.record, self.first = config, record, first
        tokens_a_step = self.tokens_a_step = config.batch_size * context
        self.started = started
        self.path, self.unread = run / "log.jsonl", []
        self.file = open(self.path, "a", encoding="utf-8", buffering=1)
        self.further = list(further)                    # which begin with what the run's steps before left in log.jsonl
        for line, add in itertools.product(files.read_text(self.path).splitlines(), self.further):
            add(json.loads(line))
        self.bar = tqdm(total=config.steps * tokens_a_step, initial=first * tokens_a_step, unit="tok", unit_scale=True,
                        disable=not sys.stderr.isatty(), dynamic_ncols=True, bar_format=BAR)

    def step(self, step, loss, norm):
        self.unread.append((step, loss, norm))
        self.bar.update(self.tokens_a_step)
        if len(self.unread) == READ_EVERY:
            self.read()

    def read(self):
        """Write the losses that no one has looked at."""
        for step, loss, norm in self.unread:
            self.last = float(loss)
            self.write(step, loss=self.last, grad_norm=float(norm), lr=learning_rate(self.config, step - 1))
        self.unread.clear()
        self.bar.set_postfix(loss=f"{self.last:.3f}")

    def validation(self, step, loss):
        self.read()
        self.write(step, val_loss=loss)
        rate = (step - self.first) / self.seconds()
        self.say(step, f"loss {self.last:.3f}   val {loss:.3f}   {rate * self.tokens_a_step:9,.0f} tokens/s   "
                       f"{clock((self.config.steps - step) / rate)} left")

    def say(self, step, words):
        self.bar.write(f"step {step:6,}/{self.config.steps:,}   {words}", file=sys.stdout)
        sys.stdout.flush()

    def write(self, step, **line):
        for name, value in line.items():
            if not math.isfinite(value):
                sys.exit(f"train.py: stopped: the {name} is {value:g} at step {step}; the checkpoint of step "
                         f"{self.record['checkpoint']['step']} stays; try a lower --lr than {self.config.lr:g}")
        with files.naming(self.path):
            self.file.write(json.dumps({"step": step, **line}) + "\n")
            for add in self.further:
                add({"step": step, **line})

    def seconds(self):
        return time.perf_counter() - self.started

    def close(self):
        self.bar.close()
        with files.naming(self.path):                    # what a full disk did not take is tried again
            self.file.close()

@contextlib.contextmanager
def stopping():
    """A list that takes the signals which ask to stop; a second one does not wait for the step to end."""
    came = []

    def take(which, frame):
        if came:
            raise KeyboardInterrupt
        came.append(which)
        with contextlib.suppress(OSError):              # and no print: this may have come within one
            os.write(2, b"\nstopping after this step (again: at once, back to the last checkpoint)\n")

    before = {which: signal.signal(which, take) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)

def begin(run, backend, record, steps, tokenizer, overwrite):
    """Make the run's folder, and return what the steps return. It appears once the first step is done.

    So a size that this machine refuses leaves nothing behind, and what --overwrite replaces goes last.
    """
    with files.new_folder(run, runs.FILES, overwrite) as scratch:
        shutil.copyfile(tokenizer, scratch / "tokenizer.tiktoken")
        (scratch / "log.jsonl").touch()
        runs.save_checkpoint(scratch, backend, 0, record)
        return itertools.chain([next(steps)], steps)

def train_run(run, model_config, config, folder, device, record, args, held):
    """Train until config.steps or a signal. Returns True when the run is complete. held: a stack of locks."""
    from fast import keep_freed_memory

    keep_freed_memory()
    context, (total, outside) = model_config.context, model_numpy.count_parameters(model_config)
    memory = check_memory(model_config, config, device)
    train_tokens, val_tokens = data.open_split(folder, "train"), data.open_split(folder, "val")
    data.windows(train_tokens, context)                 # text that is too short is named before anything is written
    n_val = min(config.eval_windows, data.windows(val_tokens, context))
    val = data.batch(val_tokens, context, n_val, 0, 0)                                 # (N, T+1), the same for all runs
    val = asked(config, model_config.vocab_size, val)
    val_parts = pieces(val, config.micro_batch)
    tokenizer = data.load_tokenizer(folder / "tokenizer.tiktoken")
    backend = BACKENDS[config.backend](model_config, config, device, args.compile)

    def steps(first):
        if WORLD > 1:
            told((run, model_config, config, folder, device, record, args))
            backend.join()
        for step in range(first, config.steps):
            told(step)
            yield backend.step(data.batch(train_tokens, context, config.batch_size, config.seed, step), step)

    started, first = time.perf_counter(), 0
    if args.resume:
        first = runs.load_checkpoint(run, backend, record)
        losses = steps(first)
    else:
        if config.init_from != "none":
            record["parent"] = runs.begin_from(config.init_from, backend, model_config, record["data"])
        losses = begin(run, backend, record, steps(0), folder / "tokenizer.tiktoken", args.overwrite)
        held.enter_context(files.held(run))
    if first >= config.steps:
        print(f"{run} is complete: {first:,} of {config.steps:,} steps")
        return True
    print(f"{run}: {model_config.encoding.pe}, {total / 1e6:.2f}M parameters ({outside / 1e6:.2f}M without embedding)\n"
          f"steps {first:,} to {config.steps:,} of {config.batch_size} x {context} tokens, "
          f"by {config.backend} on {device}\n{flops_a_token(model_config) / 1e9:,.3g} GFLOPs a token, about {memory}",
          flush=True)
    log = Log(run, config, record, first, context, started, further_logs(args.log, run, held))
    earlier = record["checkpoint"].get("seconds", 0)
    with stopping() as signals, contextlib.closing(log):
        for step, (loss, norm) in enumerate(losses, first + 1):
            log.step(step, loss, norm)
            complete = step == config.steps
            if step % config.eval_every == 0 or complete:
                log.validation(step, sum(map(backend.summed_loss, val_parts)) / val["targets"].size)
            if args.sample_every and step % args.sample_every == 0:
                log.say(step, sample(backend.weights(), model_config, tokenizer, [config.seed, step]))
            if step % config.checkpoint_every == 0 or complete or signals:
                log.read()
                runs.save_checkpoint(run, backend, step, record, earlier + log.seconds())
            if signals:
                break
    if complete:
        print(f"trained {(step - first) * log.tokens_a_step:,} tokens in {clock(log.seconds())}")
    return complete

def flops_a_token(model):
    """Of a training step: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), N counting the weights that multiply.

    A weight costs two operations forward and four backward, and so does each of the T keys in attention's two products;
    under a causal mask they are T/2 on average. What activation checkpointing computes again is not counted.
    """
    weights = sum(math.prod(shape) for name, shape in model_numpy.parameter_shapes(model).items()
                  if len(shape) == 2 and (model.tied or name != "embedding.weight"))
    keys = model.context / (2 if model.causal else 1)
    return 6 * weights + 12 * model.n_layers * model.d_model * keys

def memory_of(model, config):
    """Bytes of a training step, about: (weights, gradients and AdamW's moments; activations).

    16 a parameter. Of a token a block keeps 12 C + 2 d_mlp numbers or so, with SwiGLU 12 C + 4 d_mlp, in bf16 some of
    them in fp32; by activation checkpointing C, and one block the rest. Biases of all pairs and logits come on top.
    """
    kept = 12 * model.d_model + {"gelu": 2, "swiglu": 4}[model.mlp] * model.d_mlp
    kept *= 2.3 if config.dtype == "bf16" else 4
    kept = kept + 4 * model.d_model * model.n_layers if config.activation_checkpointing else kept * model.n_layers
    tokens = min(config.micro_batch, config.batch_size // WORLD) * model.context
    return 16 * model_numpy.count_parameters(model)[0], round(tokens * kept)

def check_memory(model, config, device):
    """memory_of in words; InputError for what a step on the CPU needs, if this machine has less."""
    found, machine = memory_of(model, config), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need, parameters = (f"{size / 1e9:,.3g}" for size in (sum(found), found[0]))
    if str(device) == "cpu" and sum(found) > machine:
        raise InputError(f"{found[0] // 16:,} parameters and {config.micro_batch:,} sequences at once need {need} GB "
                         f"of memory or more, and this machine has {machine / 1e9:,.0f}: give a smaller --width, "
                         "--layers, --vocab or --micro-batch, or --activation-checkpointing")
    return f"{need} GB of memory ({parameters} for weights, gradients and moments)"

def prepare(args, model, config, record, run):
    """(folder of tokens, config, meta.json) of the run: prepared now if it has to be; to resume, as it was."""
    folder = data.ensure(config.data, model.vocab_size, config.min_doc_tokens, config.max_tokens)
    meta = data.read_meta(folder)
    data.run_tokenizer(folder, meta)                    # InputError unless it is the one that the run will have
    of_data = {name: meta[name] for name in OF_DATA}
    for name, value in of_data.items():
        if getattr(args, name) not in (None, value):
            raise InputError(f"{folder} was made with {name} {value:,}, not {getattr(args, name):,}: leave the flag "
                             f"out, or prepare {config.data} again with python data.py")
    if record is not None:                              # a newer data.py may leave out more of val and test
        same = {name: record["data"]["splits"].get(name) == meta["splits"][name] for name in ("train", "val")}
        if not same["train"]:
            raise InputError(f"{folder} is not the data that {run} was trained on: its files' hashes differ")
        if not same["val"]:
            print(f"val of {folder} is not what it was: the log's val losses are of other documents before and after")
    return folder, dataclasses.replace(config, **of_data), meta

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if RANK:
        return follow()
    with CommandLine(prog="train.py").one_line_errors(), contextlib.ExitStack() as held:
        if WORLD > 1:
            held.enter_context(together())
        parser = command_line()
        args = parser.parse_args(argv)
        if args.resume and (args.overwrite or args.show):
            parser.error("--resume goes on with a run, --overwrite discards it, --show trains none: leave one out")
        if args.sample_every and args.objective == "mlm":
            parser.error("--sample-every writes from left to right, and --objective mlm does not: leave it out")
        if "tensorboard" in args.log and importlib.util.find_spec("tensorboard") is None:
            raise InputError("--log tensorboard needs the package tensorboard: pip install tensorboard, or --log csv")
        record = None
        if not args.resume or args.out is None:
            preset, kind = choose_preset(args)
            model, config = configure(args, *PRESETS[preset])
        run = Path(args.out) if args.out is not None else run_name(preset, model, config)
        if args.show:
            return show(preset, run, model, config)
        if args.resume:
            if run.is_dir():
                held.enter_context(files.held(run))                     # before it is read: another may be writing
            model, config, record = stored_run(run, args)
        else:
            files.check_new(run, runs.FILES, args.overwrite, "go on with it by --resume")
            if config.init_from != "none":
                if run.resolve() == Path(config.init_from).resolve():
                    raise InputError(f"init_from must be another run than --out, {run}, which it would replace")
                runs.check_parent(config.init_from, model)
            if args.preset == "auto":
                print(f"--preset auto: {preset}, for a {kind}", flush=True)
        check_processes(config)
        device = run_device(args, config.backend)
        folder, config, meta = prepare(args, model, config, record, run)
        if record is None:
            record = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(config),
                      "data": {"folder": str(folder), **meta}, "provenance": provenance(argv, device)}
        if not train_run(run, model, config, folder, device, record, args, held):
            print(CONTROL.sub("", f"stopped; go on with: python train.py --out {run} --resume"), file=sys.stderr)
            sys.exit(130)
        print(f"next: python eval.py {run}")

if __name__ == "__main__":
    main()
