"""One training run, from flags to checkpoint.

    python train.py --pe expe --l 24           writes runs/mini-expe-s0
    python train.py --pe expe --l 24 --resume  goes on, bit for bit on a CPU

A run is a pure function of its configs: the batch of a step, and dropout's mask, depend on (seed, step) alone. The step
itself is in backends.py, and what is written in the run's folder in training_run.py.
"""

import argparse
import contextlib
import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path

import cli
from cli import CommandLine, number, whole

# cli comes first: it says in one line which package is missing
# isort: split
import torch
from tqdm import tqdm

import runs
import training_run
from backends import BACKENDS, learning_rate, pick_device
from config import PRESETS, ModelConfig, TrainConfig, make_configs
from model_numpy import count_parameters
from positional_encodings import ENCODINGS, VARIANTS, encodings_with, settings_class
from settings import InputError, flag_of, kind_of

VALIDATION_WINDOWS = 128        # of the trained length, in a validation loss

# ---- the loop --------------------------------------------------------------------------------------------------------

def train(run, backend, first=0, seconds=0.0):
    """Train from a step on until train_config.steps or a signal; returns the steps done. seconds: trained before."""
    config = run.train_config
    context = run.model_config.context
    tokens = run.source.open_split(run.data_folder, "train")
    held_out = run.source.held_out(run.data_folder, context, VALIDATION_WINDOWS)
    begun = time.perf_counter()
    with training_run.catch_signals() as signals, Progress(run, backend, first) as progress:
        for step in range(first, config.steps):
            batch = run.source.batch(tokens, context, config.batch_size, config.seed, step)
            loss, norm = backend.step(batch, step)
            run.add_step(step, learning_rate(config, step), loss, norm)
            done = step + 1
            is_last = run.must_stop(signals) or done == config.steps
            is_scored = done % config.eval_every == 0 or done == config.steps
            is_saved = done % config.checkpoint_every == 0 or is_last
            # To read a loss makes a GPU wait. So a step's loss is read while the next one is computed, except here.
            run.log_steps(all_but=0 if is_scored or is_saved or step == first else 1)
            if is_scored:
                loss = backend.validation_loss(held_out)
                run.log_validation(done, loss)
                progress.print(done, loss)
            if is_saved:
                run.save(backend, done, seconds + time.perf_counter() - begun)
            progress.count(done)
            if is_last:
                break
    return done

class Progress:
    """A bar in a terminal; and a line for each validation, with the tokens a second since the one before."""

    def __init__(self, run, backend, first):
        config = run.train_config
        self.run = run
        self.backend = backend
        self.tokens_a_step = config.batch_size * run.model_config.context
        self.first = first
        self.bar = tqdm(None, str(run.folder), config.steps, False, disable=run.quiet, initial=first)
        self.restart(first)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()

    def restart(self, done):
        """The rate counts from this step on."""
        self.counted_from = done
        self.begun = time.perf_counter()

    def count(self, done):
        self.bar.set_postfix_str(f"loss {self.run.last_loss:.3f}", refresh=False)
        self.bar.update()
        if done == self.first + 1:                                      # the first step compiles
            self.restart(done)

    def print(self, done, val_loss):
        tokens = (done - self.counted_from) * self.tokens_a_step
        rate = tokens / (time.perf_counter() - self.begun)
        steps = self.run.train_config.steps
        left = tqdm.format_interval((steps - done) * self.tokens_a_step / rate)
        left = f"  {left} left" if self.bar.disable and done < steps else ""            # a bar shows it, too
        with contextlib.suppress(BrokenPipeError):                      # a run that nobody watches goes on
            tqdm.write(f"{self.run.folder}: step {done:6,}  loss {self.run.last_loss:.3f}  val {val_loss:.3f}  "
                       f"{rate:,.0f} tokens/s{self.backend.share_of_gpu(rate)}{left}")
        self.restart(done)

# ---- from a command to a trained run ---------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    with CommandLine(prog="train.py").one_line_errors():
        if cli.read_environment("WORLD_SIZE", 1) > 1:
            raise InputError("several processes train with torchrun --nproc_per_node N -m -- engine.distributed FLAGS")
        run = open_run(argv)
        with runs.lock(run.folder):
            train_run(run, BACKENDS[run.train_config.backend])

def open_run(argv, make=training_run.Run):
    """The Run that the flags ask for, with its data; InputError for a wrong flag, folder or text."""
    args, model_config, train_config = read_flags(argv)
    on_cpu = train_config.backend == "numpy" and args.device == "auto"
    run = make(argv, args, model_config, train_config, pick_device("cpu" if on_cpu else args.device))
    if train_config.init_from != "none" and not args.resume:
        from engine import init_from
        init_from.check_parent(run)
    return run

def train_run(run, make_backend):
    """Train what is left of a run, with the backend that is made of (ModelConfig, TrainConfig, device, compiled)."""
    run.check_folder()                                                  # another process may have made it meanwhile
    config = run.train_config
    if run.args.resume and runs.checkpoint_info(run.folder)["step"] >= config.steps:
        return print(f"{run.folder} is complete: {config.steps:,} of {config.steps:,} steps")
    backend = make_backend(run.model_config, config, run.device, run.args.compile)
    first, seconds = run.resume(backend) if run.args.resume else (0, 0.0)
    if first == 0 and config.init_from != "none":
        from engine import init_from
        run.record["parent"] = init_from.load_parent(run, backend)
    print(describe_training(run, first))
    if train(run, backend, first, seconds) < config.steps:
        print(f"stopped; go on with: python train.py --out {shlex.quote(str(run.folder))} --resume", file=sys.stderr)
        sys.exit(130)
    print(f"next: python eval.py {shlex.quote(str(run.folder))}")

def describe_training(run, first):
    """What is trained, in a line."""
    model, config = run.model_config, run.train_config
    theta = getattr(model.encoding, "theta", None)
    rates = f"lr {config.lr:g}" if theta is None else f"lr {config.lr:g}, theta {theta:g}"
    tokens = run.record["data"]["splits"]["train"]["tokens"]
    seen = config.steps * config.batch_size * model.context
    epochs = f", {seen / tokens:,.2f} epochs of text" if tokens else ""                # a task has no text
    return (f"{run.folder}: {count_parameters(model):,} parameters, {config.backend} on {run.device}, {rates}, steps "
            f"{first:,} to {config.steps:,}{epochs}")

# ---- the flags -------------------------------------------------------------------------------------------------------

READERS = {int: {"type": whole, "metavar": "N"}, float: {"type": number, "metavar": "X"}, str: {"metavar": "NAME"},
           bool: {"action": argparse.BooleanOptionalAction}}
UNNAMED = ("seed", "fast", "micro_batch", "eval_every", "checkpoint_every")    # settings that no run is named after
ENCODING_FLAGS = {name: name for name in ENCODINGS} | VARIANTS
SYNONYMS = {"--batch": "--batch-size", "--epochs": "--steps", "--learning-rate": "--lr", "--block-size": "--context",
            "--tokenizer": "python data.py SOURCE --tokenizer FILE --out DIR and then --data DIR",
            **{name: f"--pe {flags}" for name, flags in ENCODING_FLAGS.items()},
            **{f"--{name}": f"--pe {flags}" for name, flags in ENCODING_FLAGS.items()}}

def read_flags(argv):
    """(args, ModelConfig, TrainConfig): the preset's settings with the flags that were given, or the resumed run's."""
    parser = CommandLine(prog="train.py", usage="train.py [--preset NAME] [--pe NAME] [flags]", description=__doc__,
                         add_help=False)
    parser.synonyms = SYNONYMS
    parser.owner_of = name_encodings_with
    add = parser.add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help=f"{', '.join(PRESETS)}; paper-35m on a GPU, else mini")
    add("--pe", metavar="NAME", help=f"{', '.join(ENCODINGS)} (default: expe), with its own flags")
    add("--out", type=cli.folder, metavar="DIR", help="default: runs/<preset>-<pe>-<flags that differ>-s<seed>")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--resume", action="store_true", help="go on from the last checkpoint of the run directory")
    either("--overwrite", action="store_true", help="replace the run in the run directory, at the first checkpoint")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--compile", action="store_true", help="use torch.compile for the blocks; it needs a C++ compiler")
    args, _ = parser.parse_known_args(argv)
    if args.resume and args.out is not None:
        training_run.resume_preset(args)                                        # --preset and --pe of the run
    args.preset = args.preset or ("paper-35m" if torch.cuda.is_available() else "mini")
    args.pe = args.pe or "expe"

    settings = add_settings(parser, args.preset, args.pe)               # --preset and --pe say which flags there are
    parser.parse_args(argv, args)
    args.given = {name: getattr(args, name) for name in settings if getattr(args, name) is not None}
    args.out = args.out or Path("runs", name_run(args.preset, args.pe, args.given))
    if args.resume:
        return args, *training_run.resume_configs(args.out, args.given)
    given = args.given
    if given.get("data", "").startswith("task:"):
        import tasks
        given = tasks.fill_in(given, args.preset)
    return args, *make_configs(args.preset, args.pe, **given)

def add_settings(parser, preset, pe):
    """Add the flag of each setting that a run with this encoding has; returns the settings' names."""
    parser.prog = f"train.py --pe {pe}"
    parser.add_argument("--help", "-h", action="help", help="show this text and stop")
    names = []
    for title, kind in ((f"encoding {pe}", settings_class(pe)), ("model", ModelConfig), ("training", TrainConfig)):
        group = parser.add_argument_group(title)
        for f in dataclasses.fields(kind):
            if f.metadata["help"]:
                default = PRESETS[preset].get(f.name, f.default)
                shown = f" ({preset}: {default})" if default is not None else ""
                group.add_argument(flag_of(f.name), default=None, help=f.metadata["help"] + shown,
                                   **READERS[kind_of(f)])
                names.append(f.name)
    return names

def name_encodings_with(flag):
    """"--l is a flag of --pe expe and exqpe;" of a flag that some encodings have; None of any other."""
    names = encodings_with(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    if names:
        return f"{flag} is a flag of --pe {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))};"

def name_run(preset, pe, given):
    """The preset, --pe, each given flag with another value than the preset's, and the seed."""
    fields = {f.name: f for kind in (settings_class(pe), ModelConfig, TrainConfig) for f in dataclasses.fields(kind)}
    words = []
    for name, value in given.items():
        if name not in UNNAMED and value != PRESETS[preset].get(name, fields[name].default):
            value = Path(value).name if name in ("data", "init_from") else value
            words.append(f"{flag_of(name).strip('-')}-{value}")
    name = "-".join([preset, pe, *words, f"s{given.get('seed', 0)}"])
    return re.sub(r"[^\w.,=+-]", "-", name)                             # Windows has no : in names

if __name__ == "__main__":
    main()
