"""One training run, from flags to checkpoint.

    python train.py --pe expe --l 24            trains and writes runs/mini-expe-l24-s0
    python train.py --pe expe --l 24 --resume   goes on after a Ctrl-C or a kill, bit for bit on a CPU

A run is a pure function of its configs: the batch of a step depends on (seed, step) alone, and so does dropout's mask.
Two backends compute it, from the same first weights on the same batches: torch, and NumPy with gradients by hand. (Each
draws dropout's masks by its own generator.)
"""

import dataclasses
import importlib.metadata
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

from config import (
    BACKENDS,
    ENCODING_FIELDS,
    ENCODINGS,
    PRESETS,
    CommandLine,
    EncodingConfig,
    InputError,
    ModelConfig,
    TrainConfig,
    checkpoint_file,
    fingerprint,
    number,
    read_run,
    read_weights,
    whole,
    write_json,
)

# torch, NumPy and what imports them are imported where they are used, so that --help and a wrong flag answer at once.

AUTO = {"CPU": "mini", "GPU": "paper-35m"}  # the preset of --preset auto
CHECKPOINT = ("model.safetensors", "optimizer.pt")
READ_EVERY = 10  # steps between looks at the losses: a look makes a GPU wait


# ---- from flags to configs -------------------------------------------------------------------------------------------


def command_line():
    """The parser: a flag for every field of the configs that has a help text, and those of the run itself."""
    parser = CommandLine(
        description="Train a GPT with one of the positional encodings, and write its run directory.",
        epilog="examples:\n  python train.py --pe expe --l 24\n  python train.py --pe rope --seed 1\n"
        "  python train.py --pe exqpe --theta2 1/8 --data my_books/ --tokens 3e6",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--preset", choices=("auto", *PRESETS), default="auto", help="auto: paper-35m on a GPU, mini on a CPU"
    )
    run.add_argument(
        "--out", metavar="DIR", help="the run directory (default: runs/<preset>-<encoding and its flags>-s<seed>)"
    )
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the run directory")
    run.add_argument("--overwrite", action="store_true", help="replace the run directory if it exists")
    run.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if there is one)"
    )
    run.add_argument("--compile", action="store_true", help="torch.compile the blocks; needs a C++ compiler")
    types = {int: whole, int | None: whole, float: number, float | None: number, str: str, str | None: str}
    for title, config in (("the encoding", EncodingConfig), ("the model", ModelConfig), ("training", TrainConfig)):
        group = parser.add_argument_group(title, None if config is EncodingConfig else "default: the preset's")
        for f in dataclasses.fields(config):
            if "help" in f.metadata:
                how = {"type": types.get(f.type), "metavar": f.name.upper()}
                if f.type == bool | None:
                    how = {"action": "store_true", "default": None}
                if f.name in ("pe", "backend"):
                    how = {"choices": tuple(ENCODINGS) if f.name == "pe" else BACKENDS}
                flag = f.metadata["flag"] or "--" + f.name.replace("_", "-")
                group.add_argument(flag, dest=f.name, help=f.metadata["help"], **how)
    group.add_argument("--tokens", type=whole, metavar="TOKENS", help="training tokens, instead of --steps")
    return parser


def configure(args, model, train):
    """The configs with the flags that were given; `model` and `train` are a preset's, or the run's to resume."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    fields = {config: [f.name for f in dataclasses.fields(config)] for config in (ModelConfig, TrainConfig)}

    pe = given.get("pe", model.encoding.pe)
    inherited = ENCODINGS[pe] if args.resume and pe == model.encoding.pe else {"l"} & set(ENCODINGS[pe])
    encoding = {name: getattr(model.encoding, name) for name in inherited} | {
        n: given[n] for n in ENCODING_FIELDS if n in given
    }
    model = dataclasses.replace(
        model, encoding=EncodingConfig(pe, **encoding), **{n: given[n] for n in fields[ModelConfig] if n in given}
    )

    changes = {name: given[name] for name in fields[TrainConfig] if name in given}
    if "batch_size" in changes and "micro_batch" not in changes:
        changes["micro_batch"] = math.gcd(changes["batch_size"], train.micro_batch)
    if changes.get("lr", train.lr) != train.lr and "end_lr" not in changes:
        changes["end_lr"] = train.end_lr * changes["lr"] / train.lr
    if "tokens" in given:
        if "steps" in given:
            raise InputError("--tokens and --steps say the same thing: leave one out")
        if given["tokens"] < 1:
            raise InputError(f"tokens must be at least 1, got {given['tokens']}")
        changes["steps"] = math.ceil(given["tokens"] / (model.context * changes.get("batch_size", train.batch_size)))
    return model, dataclasses.replace(train, **changes)


def check_flags(args):
    """InputError for flags that no preset in question can have, before torch is loaded: that takes seconds."""
    errors = []
    for preset in AUTO.values() if args.preset == "auto" else [args.preset]:
        try:
            return configure(args, *PRESETS[preset])
        except InputError as error:
            errors.append(error)
    raise errors[0]


def run_device(args, backend):
    """Where the run computes; InputError for a device that is not here, or that the backend cannot use."""
    if backend == "numpy":
        if args.device not in ("auto", "cpu") or args.compile:
            raise InputError("--backend numpy computes on the CPU, uncompiled: leave out --compile and --device")
        return "cpu"
    from model_torch import pick_device

    return pick_device(args.device)


def run_name(preset, args, model, train):
    """The default directory: the preset, the encoding and those of its flags that were given, the seed, the backend."""
    given = {name: getattr(args, name) for name in ENCODING_FIELDS}
    flags = [name if value is True else f"{name}{value:{'' if isinstance(value, str) else 'g'}}"
             for name in ENCODINGS[model.encoding.pe] if (value := given.get(name)) is not None]
    backend = [train.backend] if train.backend != "torch" else []
    return Path("runs") / "-".join([preset, model.encoding.pe, *flags, f"s{train.seed}", *backend])


def stored_run(run, args):
    """The configs and the record of the run to resume; InputError if a flag contradicts them."""
    model, train, record = read_run(run)
    for name in ("pe", *ENCODING_FIELDS):  # before they are merged with the run's, which may contradict them
        before, given = getattr(model.encoding, name), getattr(args, name)
        if given is not None and given != before:
            _refuse(run, name, "not set" if before is None else before, given)
    asked = configure(args, model, train)
    for stored, new in zip((model, train), asked, strict=True):
        for f in dataclasses.fields(stored):
            if (before := getattr(stored, f.name)) != (after := getattr(new, f.name)):
                _refuse(run, f.name, before, after)
    return model, train, record


def _refuse(run, name, before, after):
    raise InputError(
        f"{name} is {before} in {run} and {after} by these flags: "
        "resume with the run's own flags, or train under another --out"
    )


# ---- the run directory -----------------------------------------------------------------------------------------------


def provenance(device):
    """What a number of this run can be traced by: command line, versions, git commit, machine."""
    here = Path(__file__).resolve().parent
    git = (
        subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
        )
        if shutil.which("git")
        else None
    )
    packages = ("torch", "numpy", "tiktoken", "rustbpe", "safetensors")
    import torch

    return {
        "command": shlex.join(["python", *sys.argv]),
        "git": git.stdout.strip() if git and git.returncode == 0 else None,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "device": str(device),
        "threads": torch.get_num_threads(),
        "machine": platform.platform(),
    }


def save_checkpoint(run, backend, step, record, seconds=0.0):
    """Replace the run's checkpoint by this one, whole or not at all (config.py says how); seconds: trained so far."""
    import safetensors.numpy
    import torch

    try:
        safetensors.numpy.save_file(backend.weights(), run / "model.safetensors.new")
        torch.save({"step": step, "optimizer": backend.optimizer_state()}, run / "optimizer.pt.new")
    except (safetensors.SafetensorError, RuntimeError) as error:  # how these two report a full disk
        raise InputError(f"{run}: the checkpoint of step {step} cannot be written: {error}") from None
    files = {name: fingerprint(run / f"{name}.new") for name in CHECKPOINT}
    record["checkpoint"] = {"step": step, "seconds": seconds, "files": files}
    write_json(run / "config.json", record)
    for name in CHECKPOINT:
        os.replace(run / f"{name}.new", run / name)


def new_run(run, backend, record, tokenizer):
    """Make the run directory with the checkpoint of step 0, whole or not at all; one that is there is replaced."""
    scratch = run.parent / f".{run.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        shutil.copyfile(tokenizer, scratch / "tokenizer.tiktoken")
        (scratch / "log.jsonl").write_text("", encoding="utf-8")
        save_checkpoint(scratch, backend, 0, record)
        if run.exists():
            shutil.rmtree(run)
        os.rename(scratch, run)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_checkpoint(run, backend, record):
    """Fill the backend from the run's checkpoint; returns its step. Cuts the log back to that step."""
    import torch

    path = run / "optimizer.pt"
    paths = [checkpoint_file(run, record, name) for name in CHECKPOINT]
    for path, name in zip(paths, CHECKPOINT, strict=True):
        os.replace(path, run / name)  # a kill may have left the last renames undone
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a dozen kinds
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    backend.load_weights(run / "model.safetensors")
    try:
        if state["step"] != record["checkpoint"]["step"]:
            raise ValueError(f"step {state['step']}, and config.json says {record['checkpoint']['step']}")
        backend.load_optimizer(state["optimizer"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{path} is not the optimizer's state of this run ({type(error).__name__}: {error})") from None
    try:
        lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= state["step"]]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{run / 'log.jsonl'} holds a line that train.py did not write: mend or remove it") from None
    (run / "log.jsonl.new").write_text("".join(kept), encoding="utf-8")
    os.replace(run / "log.jsonl.new", run / "log.jsonl")
    return state["step"]


# ---- the two backends ------------------------------------------------------------------------------------------------


def new_optimizer(model, config):
    """torch's AdamW, with decay on matrices only (table 5)."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


class TorchBackend:
    """GPT, or another module of which model(tokens, targets) is the loss, and its AdamW in torch, on any device."""

    def __init__(self, model_config, config, device, compiled, model=None):
        import torch

        from model_torch import GPT

        self.config, self.device = config, device
        self.model = (GPT(model_config, config.seed) if model is None else model).to(device)
        self.optimizer = new_optimizer(self.model, config)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
        if compiled:
            self.model.compile()

    def weights(self):
        return {name: tensor.cpu().contiguous().numpy() for name, tensor in self.model.state_dict().items()}

    def optimizer_state(self):
        return self.optimizer.state_dict()

    def load_weights(self, path):
        from model_torch import load_weights

        load_weights(self.model, path)

    def load_optimizer(self, state):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, moments in state["state"].items():  # a fused step with another shape would write past its memory
            shape = parameters[index].shape
            if moments["exp_avg"].shape != shape or moments["exp_avg_sq"].shape != shape:
                raise ValueError(f"the moments of parameter {index} must have the shape {tuple(shape)}")
        if state["state"] and len(state["state"]) != len(parameters):
            raise ValueError(f"{len(state['state'])} parameters, and the model has {len(parameters)}")
        self.optimizer.load_state_dict(state)

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm, still on the device."""
        import torch

        self.model.train()
        torch.manual_seed(self.config.seed * 2**32 + step)  # dropout's masks: by seed and step, like the data
        loss = 0
        tokens = torch.from_numpy(batch)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # or else the copy would wait for the device
        for part in tokens.to(self.device, non_blocking=True).split(self.config.micro_batch):
            with self.autocast:
                part_loss = self.model(part[:, :-1], part[:, 1:]) * (len(part) / len(batch))
            part_loss.backward()
            loss += part_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def summed_loss(self, windows):
        """The sum of the losses of the windows' targets; windows (B, T+1)."""
        import torch

        self.model.eval()
        tokens = torch.from_numpy(windows).to(self.device)
        with self.autocast:
            return self.model.token_losses(tokens[:, :-1], tokens[:, 1:]).cpu().double().sum().item()


class NumpyBackend:
    """The same in NumPy, in fp32 on the CPU. Dropout's masks are of NumPy's making, and so not torch's."""

    def __init__(self, model_config, config, device="cpu", compiled=False):
        from model_numpy import adamw_state, init_params

        self.model_config, self.config = model_config, config
        self.params = init_params(model_config, config.seed)
        self.state = adamw_state(self.params)

    def weights(self):
        return self.params

    def optimizer_state(self):
        import torch  # for its file format alone

        tensors = {key: {n: torch.from_numpy(a) for n, a in self.state[key].items()} for key in ("m", "v")}
        return {"step": self.state["step"], **tensors}

    def load_weights(self, path):
        from model_numpy import parameter_shapes

        self.params = read_weights(path, parameter_shapes(self.model_config))

    def load_optimizer(self, state):
        from model_numpy import check_state

        moments = {key: {name: tensor.numpy() for name, tensor in state[key].items()} for key in ("m", "v")}
        check_state({"step": state["step"], **moments}, self.params)
        self.state = {"step": state["step"], **moments}

    def step(self, batch, step):
        """One optimizer step on the batch (B, T+1); returns the loss and the gradient's norm."""
        import numpy as np

        from model_numpy import adamw_step, clip_grads, dropout_masks, loss_and_grads, summed

        config, rng, loss, grads = self.config, np.random.default_rng([self.config.seed, step]), 0, {}
        with np.errstate(over="ignore", invalid="ignore"):  # a loss that is not finite is told by its step
            for part in np.split(batch, range(config.micro_batch, len(batch), config.micro_batch)):
                tokens, targets = part[:, :-1], part[:, 1:]
                masks = dropout_masks(self.model_config, *tokens.shape, rng) if self.model_config.dropout else None
                part_loss, part_grads = loss_and_grads(self.params, tokens, targets, self.model_config, masks=masks)
                share = len(part) / len(batch)
                loss += share * part_loss
                grads = summed(grads, {name: share * g for name, g in part_grads.items()})
            norm = clip_grads(grads, config.clip)
            rate = config.lr_at(step)
            adamw_step(
                self.params, grads, self.state, rate, config.beta1, config.beta2, weight_decay=config.weight_decay
            )
        return loss, norm

    def summed_loss(self, windows):
        """The sum of the losses of the windows' targets; windows (B, T+1)."""
        from model_numpy import token_losses

        return token_losses(self.params, windows[:, :-1], windows[:, 1:], self.model_config).sum(dtype="float64").item()


MAKE = {"torch": TorchBackend, "numpy": NumpyBackend}


# ---- training --------------------------------------------------------------------------------------------------------


def train_run(run, model_config, config, folder, device, compiled, record, resume):
    """Train until config.steps or a signal. Returns True when the run is complete."""
    import numpy as np
    from tqdm import tqdm

    import data
    from model_numpy import count_parameters, keep_freed_memory

    keep_freed_memory()
    context, tokens_a_step = model_config.context, config.batch_size * model_config.context
    train_tokens, val_tokens = data.open_split(folder, "train"), data.open_split(folder, "val")
    data.windows(train_tokens, context)  # text that is too short is named before anything is written
    n_val = min(config.eval_windows, data.windows(val_tokens, context))
    val_windows = data.batch(val_tokens, context, n_val, 0, 0)  # (N, T+1), the same for all runs
    val_parts = np.split(val_windows, range(config.micro_batch, n_val, config.micro_batch))

    backend = MAKE[config.backend](model_config, config, device, compiled)
    first = load_checkpoint(run, backend, record) if resume else 0
    if not resume:
        new_run(run, backend, record, folder / "tokenizer.tiktoken")
    if first >= config.steps:
        print(f"{run} is complete: {first:,} of {config.steps:,} steps")
        return True

    total, outside = count_parameters(model_config)
    print(
        f"{run}: {model_config.encoding.pe}, {total / 1e6:.2f}M parameters ({outside / 1e6:.2f}M without the input "
        f"embedding), steps {first:,} to {config.steps:,} of {config.batch_size} x {context} tokens, "
        f"by {config.backend} on {device}",
        flush=True,
    )

    stop = []  # signals that came
    handlers = {s: signal.signal(s, lambda s, frame: _stop(stop, s)) for s in (signal.SIGINT, signal.SIGTERM)}
    step, unread, started = first, [], time.perf_counter()
    earlier = record["checkpoint"].get("seconds", 0.0)  # of the sessions before this one
    with (
        open(run / "log.jsonl", "a", encoding="utf-8") as log,
        tqdm(
            total=config.steps * tokens_a_step,
            initial=first * tokens_a_step,
            unit="tok",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        ) as bar,
    ):

        def must_be_finite(at_step, loss, norm):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                sys.exit(
                    f"train.py: stopped: the loss is {loss:g} and the gradient's norm {norm:g} at step {at_step}; "
                    f"the checkpoint of step {record['checkpoint']['step']} stays; try a lower --lr than {config.lr:g}"
                )

        def read_losses():
            """Write the losses that no one has looked at to the log; returns the last one."""
            for at_step, loss, norm, lr in unread:
                line = {"step": at_step, "loss": float(loss), "grad_norm": float(norm), "lr": lr}
                must_be_finite(at_step, line["loss"], line["grad_norm"])
                log.write(json.dumps(line) + "\n")
            unread.clear()
            bar.set_postfix(loss=f"{line['loss']:.3f}")
            return line["loss"]

        def checkpoint():
            if unread:
                read_losses()
            log.flush()
            save_checkpoint(run, backend, step, record, earlier + time.perf_counter() - started)

        while step < config.steps and not stop:
            batch = data.batch(train_tokens, context, config.batch_size, config.seed, step)
            unread.append((step + 1, *backend.step(batch, step), config.lr_at(step)))
            step += 1
            bar.update(tokens_a_step)
            if step % config.eval_every == 0 or step == config.steps:
                loss, val_loss = read_losses(), sum(map(backend.summed_loss, val_parts)) / val_windows[:, 1:].size
                must_be_finite(step, val_loss, 0)
                log.write(json.dumps({"step": step, "val_loss": val_loss}) + "\n")
                rate = (step - first) / (time.perf_counter() - started)
                bar.write(
                    f"step {step:6,}/{config.steps:,}   loss {loss:.3f}   val {val_loss:.3f}   "
                    f"{rate * tokens_a_step:9,.0f} tokens/s   {clock((config.steps - step) / rate)} left",
                    file=sys.stdout,
                )
                sys.stdout.flush()
            elif len(unread) == READ_EVERY:
                read_losses()
            if step % config.checkpoint_every == 0:
                checkpoint()
        if record["checkpoint"]["step"] < step:
            checkpoint()
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)
    if step == config.steps:
        print(f"trained {(step - first) * tokens_a_step:,} tokens in {clock(time.perf_counter() - started)}")
    return step == config.steps


def _stop(stop, signal_number):
    if stop:
        sys.exit(128 + signal_number)  # a second Ctrl-C does not wait for the step to end
    stop.append(signal_number)


def clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


def main():
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args()
        if args.resume and args.overwrite:
            parser.error("--resume goes on with a run, --overwrite discards it: leave one out")
        record = None
        if args.resume and args.out:
            run = Path(args.out)
        else:
            check_flags(args)
            device = run_device(args, args.backend)
            kind = "GPU" if str(device).startswith("cuda") else "CPU"
            preset = AUTO[kind] if args.preset == "auto" else args.preset
            model, config = configure(args, *PRESETS[preset])
            run = Path(args.out) if args.out else run_name(preset, args, model, config)
        if args.resume:
            model, config, record = stored_run(run, args)
            device = run_device(args, config.backend)
        elif args.overwrite and run.exists() and not (run / "config.json").exists():
            raise InputError(f"{run} exists and is no run directory, so it is not overwritten: choose another --out")
        elif run.exists() and not args.overwrite:
            raise InputError(
                f"{run} exists: go on with it by --resume, replace it by --overwrite, or choose another --out"
            )
        elif args.preset == "auto":
            print(f"--preset auto: {preset}, for a {kind}", flush=True)
        import data

        folder = data.ensure(config.data, model.vocab_size, config.min_doc_tokens, config.max_tokens)
        meta = data.read_meta(folder)
        for name in ("min_doc_tokens", "max_tokens"):
            if getattr(args, name) not in (None, meta[name]):
                raise InputError(
                    f"{folder} was made with {name} {meta[name]:,}, not {getattr(args, name):,}: leave the flag out, "
                    f"or prepare {config.data} again with python data.py"
                )
        if record is None:
            config = dataclasses.replace(config, **{name: meta[name] for name in ("min_doc_tokens", "max_tokens")})
            record = {
                "model": dataclasses.asdict(model),
                "train": dataclasses.asdict(config),
                "data": {"folder": str(folder), **meta},
                "provenance": provenance(device),
            }
        elif record["data"]["splits"] != meta["splits"]:
            raise InputError(f"{folder} is not the data that {run} was trained on: its files' hashes differ")
        if not train_run(run, model, config, folder, device, args.compile, record, args.resume):
            print(f"stopped; go on with: python train.py --out {run} --resume", file=sys.stderr)
            sys.exit(130)
        print(f"next: python eval.py {run}")


if __name__ == "__main__":
    main()
