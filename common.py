"""What the scripts share: a run on disk, and a command line that answers a wrong flag, file or value in one line.

    runs/<name>/   config.json              settings, provenance, and the hashes of the data; written once
                   checkpoint.safetensors   weights, AdamW's moments; as metadata the step and the seconds
                   log.jsonl                the loss of each step, and the validation losses
                   tokenizer.tiktoken       a copy of the data's tokenizer

A checkpoint takes the place of the last one with one rename; a run that was killed before its first begins anew.
With --overwrite the new run is written into runs/<name>/.unfinished-run until its first checkpoint.
"""

import argparse
import contextlib
import difflib
import errno
import functools
import glob
import hashlib
import io
import json
import math
import os
import re
import secrets
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path


def missing_package(error):
    """What to do about a module that is not found: a line if it is a package of the requirements, else None."""
    name = str(error.name).partition(".")[0]
    for file, target in (("requirements.txt", "setup"), ("requirements-optional.txt", "setup-all")):
        if re.search(rf"^{name}==", (Path(__file__).parent / file).read_text(encoding="utf-8"), re.MULTILINE):
            return f"this Python has no {name}; activate .venv: source .venv/bin/activate (make {target} creates it)"
    return None

def report_import(kind, error, trace):
    """While a script imports what it needs, a missing package is one line, and a Ctrl-C is silent."""
    if kind is ModuleNotFoundError and (line := missing_package(error)):
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr, flush=True)
        os._exit(2)                                                    # Python itself would exit with 1
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)

sys.excepthook = report_import                                         # before what needs NumPy

import numpy as np

from config import (
    ENCODINGS,
    SPLITS,
    VARIANTS,
    InputError,
    ModelConfig,
    TrainConfig,
    check_together,
    did_you_mean,
    from_values,
)

CHECKPOINT = "checkpoint.safetensors"
NEW_RUN = ".unfinished-run"              # in a run directory, what --overwrite writes before its first checkpoint
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if hasattr(errno, "EDQUOT") else (errno.ENOSPC, errno.EFBIG)
SYNONYMS = {"--batch": "--batch-size", "--epochs": "--steps", "--learning-rate": "--lr", "--block-size": "--context",
         "--tokenizer": "python data.py SOURCE --tokenizer FILE --out DIR and then --data DIR",
         **{name: f"--pe {flags}" for name, flags in ({name: name for name in ENCODINGS} | VARIANTS).items()}}

# ---- the command line ------------------------------------------------------------------------------------------------

class Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are filled to the terminal's width; indented lines, such as examples, stay lines."""

    def _fill_text(self, text, width, indent):
        paragraphs = []
        for block in text.strip().split("\n\n"):
            lines = block.splitlines() if "\n " in f"\n{block}" else [" ".join(block.split())]
            blanks = [" " * (len(line) - len(line.lstrip()) + 4 * (len(lines) > 1)) for line in lines]
            paragraphs.append("\n".join(textwrap.fill(line, width, subsequent_indent=more, break_on_hyphens=False)
                                        for line, more in zip(lines, blanks, strict=True)))
        return "\n\n".join(paragraphs)

class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser that reports every wrong input as one line on stderr, with exit status 2."""

    synonyms = SYNONYMS                  # {a wrong word: what to write instead}
    owner_of = staticmethod(lambda flag: None)       # where else an unknown flag belongs, in words; train.py has it

    def __init__(self, **options):
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        if wrong := [word for word in (sys.argv[1:] if args is None else args) if "\0" in word]:
            self.error(f"{wrong[0]!r} has a NUL character, which no name and no path can have: leave it out")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        message = str(message)
        if found := re.search(r"unrecognized arguments: ([^\s=]+)", message):
            word = found[1]
            flags = [self.synonyms.get(word), "numbers with commas, as in 512,1024" * word.isdigit(),
                     *difflib.get_close_matches(word, self._option_string_actions, 1, 0.75)]
            hints = [self.owner_of(word), *(flag and f"did you mean {flag}?" for flag in flags)]
            hint = next((f"{hint} " for hint in hints if hint), "")
            message = f"{message} ({hint}{self.prog} --help lists the flags)"
        elif found := re.fullmatch(r"(.*invalid choice: '?([^']+)'?) \(choose from (.*)\)", message):
            if near := did_you_mean(found[2], re.findall(r"[\w-]+", found[3])):
                message = found[1] + near                              # without the list of all choices
        printable = "".join(c if c.isprintable() else " " for c in str(message))
        self.exit(2, f"{self.prog}: error: {' '.join(printable.split())}\n")

    @contextlib.contextmanager
    def one_line_errors(self):
        """What the user gave wrong, and too large a model, end in error(); anything else keeps its traceback.

        A character that the terminal lacks is printed as another one; a closed stream takes what is printed.
        """
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            yield
            sys.stdout.flush()
        except InputError as error:
            self.error(error)
        except ModuleNotFoundError as error:
            folder = str(error.name).partition(".")[0]
            if line := missing_package(error):
                self.error(line)
            if folder not in ("zoo", "longer", "engine", "lab"):
                raise
            self.error(f"this needs the folder {folder}/, which is not here: take it from the repository")
        except KeyboardInterrupt:
            self.exit(130, f"{self.prog}: stopped\n")
        except BrokenPipeError:                                        # what reads the output, such as head, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.exit(141)                                             # as what SIGPIPE ends
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.error(f"this name is too long for a file: {error.filename}")
            if error.errno == errno.EISDIR:
                self.error(f"{error.filename2 or error.filename} is a folder where a file belongs: move it away")
            if error.errno not in FULL:
                raise
            self.error(f"{error.filename or 'a file'} cannot be written: {error.strerror}")
        except (MemoryError, RuntimeError) as error:                   # NumPy's; torch's, on a GPU and on the CPU
            of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
            if isinstance(error, RuntimeError) and not of_torch:
                raise
            self.error(f"not enough memory: use smaller sizes ({str(error).partition(chr(10))[0]})")

def number(text):
    """A float from "0.5", "1e-3" or "1/2048", for argparse."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 24, 1e-3 or 1/2048") from None

def whole(text):
    """An int from "600000000", "600_000_000" or "6e8", for argparse."""
    value = number(text)
    if value % 1 or abs(value) > 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (of at most 2^53)")
    return int(value)

def at_least(low):
    """The argparse type of a whole number of at least `low`."""
    def read(text):
        if whole(text) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return whole(text)
    return read

def listed(kind, *known):
    """The argparse type of "A,B,...": a list without repeats of what `kind` reads, each one of `known` if any are."""
    def read(text):
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if known and not set(values) <= set(known):
            wrong = next(value for value in values if value not in known)
            near = known if len(known) <= 30 else [*(difflib.get_close_matches(wrong, known, 5) or known[:5]), "..."]
            raise argparse.ArgumentTypeError(f"{wrong!r} must be of {', '.join(near)}{did_you_mean(wrong, known)}")
        return values
    return read

def read_environment(name, least):
    """The whole number in an environment variable that torchrun sets, or `least` without one; InputError for others."""
    text = os.environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"the environment variable {name} must be a whole number of at least {least}, got {text!r}: "
                         f"unset {name}, or start the processes with torchrun, which sets it")
    return int(text)

def pick_device(name="auto"):
    """A torch.device from "auto" (a GPU if any) or the name of one that this machine has; InputError for another."""
    import torch

    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return gpu or torch.device("cpu")
    known = ["cpu", *([gpu.type, *(f"{gpu.type}:{i}" for i in range(torch.accelerator.device_count()))] if gpu else [])]
    if name not in known:
        raise InputError(f"--device must be auto or one of {', '.join(known)} on this machine, got {name!r}")
    return torch.device(name)

# ---- files -----------------------------------------------------------------------------------------------------------

def read_text(path):
    """The text of a file; InputError if it is missing, if it cannot be read, or if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None
    except ValueError:
        raise InputError(f"{path} is not a path: it has a NUL character") from None

def finite(text):
    """The float of a text; ValueError for NaN and infinities, which JSON does not have, and for 1e400."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return float(text)

def check_regular(path):
    """InputError for a folder, a pipe or a device in the place of a file of ours: a pipe would be waited for."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is a folder, a pipe, a device or a link to nothing, and not a file: move it away")

def read_json(path, **fields):
    """The object in a JSON file; InputError unless it has these fields, {NAME: type}; A.B is of an object in it."""
    check_regular(path)
    text = read_text(path)
    try:
        value = dict(json.loads(text, parse_float=finite, parse_constant=finite))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path} was cut short or edited: {error}") from None
    for name, kind in fields.items():
        if type(functools.reduce(lambda x, key: type(x) is dict and x.get(key), name.split("."), value)) is not kind:
            raise InputError(f"{path} was edited: {name} is missing, or is not of type {kind.__name__}")
    return value

PICTURES = (".png", ".svg", ".pdf")
SIGNATURES = {".json": rb'^\[\s*\{\s*"(run|preset)":\s*"[^"]*",\s*"pe":', ".html": rb'id="data"', ".png": rb"^\x89PNG",
        ".svg": rb"<svg", ".pdf": rb"^%PDF"}        # what a file has that --json, the explorer or --plot wrote

def new_file(*endings):
    """The argparse type of a file to write, of these endings: a new or empty one, or one of the kind written here."""
    def read(text):
        path = Path(os.path.realpath(text) if os.path.islink(text) else text)
        other = os.path.lexists(path) and not path.is_file()            # a folder, a pipe, a device
        if other or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists and can be written")
        if path.suffix not in endings:
            raise argparse.ArgumentTypeError(f"must end in {', '.join(endings)}, got {text!r}")
        if path.is_file() and path.stat().st_size and not re.search(SIGNATURES[path.suffix], path.read_bytes()):
            raise argparse.ArgumentTypeError(f"{text!r} exists, and was not written here: choose another name")
        return str(path)
    return read

def write_text(path, text):
    """Write a file so that no reader sees half of it."""
    write_bytes(path, text.encode())

def write_rows(path, rows):
    """Write a list of objects as JSON, a line each."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    write_text(path, f"[\n{lines}\n]\n")

def write_bytes(path, content):
    """Write a file so that a kill or a full disk leaves the old one."""
    with replacing(path) as file:
        file.write(content)

@contextlib.contextmanager
def replacing(path):
    """A new file to write, which takes the place of `path` once it is whole, and goes if it cannot be written.

    A kill leaves it: remove_unfinished, or the next write of the same file an hour later, removes it.
    """
    path = Path(path)
    remove_unfinished(path.parent, path.name, 3600)
    new = path.parent / f".unfinished-{secrets.token_hex(8)}-{path.name}"
    try:
        with name_full_file(path), open(new, "xb") as file:
            yield file
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise

@contextlib.contextmanager
def name_full_file(path):
    """Name the file in the error of a disk that is full, which a write to an open file leaves out."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise

def is_unfinished(name):
    """Whether a file's name is one that replacing() gives to a file which is not whole yet."""
    return re.match(r"\.unfinished-[0-9a-f]{16}-", name) is not None

def remove_unfinished(folder, of="", age=0):
    """Remove the unfinished files that a killed process left in a folder; of: one file alone; age: in seconds."""
    for path in Path(folder).glob(f".unfinished-*-{glob.escape(of) or '*'}"):
        with contextlib.suppress(OSError):                              # of a folder, or what another removes
            if is_unfinished(path.name) and time.time() - path.lstat().st_mtime >= age:
                path.unlink()

def hash_file(path):
    """The SHA-256 of a file; InputError if it cannot be read, as a folder in its place."""
    check_regular(path)
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None

def folder(text):
    """A path for argparse, in which a/../b is b."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''; the one that you stand in is .")
    return Path(os.path.normpath(text))

def holds_files(folder):
    """Whether a folder holds anything besides what a killed script may have left before it wrote its first file."""
    return os.path.isdir(folder) and not all(name == ".lock" or is_unfinished(name) for name in os.listdir(folder))

@contextlib.contextmanager
def lock(folder, wait=False):
    """Make a folder, and hold it for this process alone; InputError if another holds it, unless this waits for it.

    A folder that others write in too is waited for. In any other, what a killed process left unfinished is removed.
    """
    def clean_up():
        if not wait:
            settle(folder)
            remove_unfinished(folder)

    from filelock import FileLock, Timeout

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be made: {error.strerror}") from None
    try:                                                               # a singleton: this process may take it again
        with FileLock(f"{os.path.realpath(folder)}/.lock", timeout=-1 if wait else 0, is_singleton=True):
            clean_up()
            try:
                yield
            finally:
                clean_up()                                              # after an error
    except Timeout:
        raise InputError(f"{folder} is in use by another process: wait for its end, or choose another folder") from None

# ---- a run on disk ---------------------------------------------------------------------------------------------------

def named_runs(names):
    """The run directories that are named, or every one under runs/; InputError if there is none.

    Files among them, as runs/* may have, are left out and named on stderr; InputError if there are only files.
    """
    if not names:
        if runs := sorted(path.parent for path in Path("runs").glob("*/config.json")):
            return runs
        raise InputError("there is no run under runs/: train one with python train.py --pe expe --l 24")
    files = [name for name in names if os.path.isfile(name)]
    runs = [Path(name) for name in names if name not in files]
    if not runs:
        raise InputError(f"{files[0]} is a file: name a run directory, such as runs/mini-expe-s0, or none for all runs")
    if files:
        print(f"left out, since they are files and no run directories: {', '.join(files)}", file=sys.stderr)
    return runs

def read_named(names, read):
    """{run: read(run)} of the run directories that are named; InputError if one cannot be read.

    Without names: of every run under runs/, and those that cannot be read are left out and named on stderr.
    """
    found = {run: value for run in named_runs(names) if (value := try_to_read(run, read, names)) is not None}
    if not found:
        raise InputError("no run under runs/ can be read: the lines above say why")
    return found

def try_to_read(run, read, named):
    """read(run); of a run that was not named and cannot be read, None, and the reason on stderr."""
    try:
        return read(run)
    except InputError as error:
        if named:
            raise
        reason = re.sub(rf"^{re.escape(str(run))}(: |[ /])", "", str(error))
        print(f"{run} is left out: {reason}", file=sys.stderr)

@contextlib.contextmanager
def name_missing_file(run):
    """InputError that names the file of zoo/ which a run needs and which is not here."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name)
        if name.partition(".")[0] != "zoo":
            raise
        file = f"{name.replace('.', '/')}.py" if "." in name else "the folder zoo/"
        raise InputError(f"{run} needs {file}, which is not here") from None

def progress(step, steps):
    """"step 140 of 1,600" of a run that is not finished, and "" of one that is."""
    return f"step {step:,} of {steps:,}" * (step < steps)

def read_run(run):
    """(ModelConfig, TrainConfig, all of config.json) of a run directory; InputError that says what is wrong with it."""
    path = Path(run) / "config.json"
    if (Path(run) / NEW_RUN / CHECKPOINT).exists():
        raise InputError(f"{run} is not whole, since train.py --overwrite was killed while it replaced the files: "
                         f"python train.py --out {run} --resume puts the others in place")
    if not path.exists():
        raise InputError(f"{run} is no run directory (no config.json): python train.py writes one")
    texts = ["model.encoding.pe", "data.folder", "data.source", "data.tokenizer.sha256"]
    texts += [f"data.splits.{split}.sha256" for split in SPLITS]
    others = {"train": dict, "provenance": dict, "data.splits.train.tokens": int}
    record = read_json(path, **others, **dict.fromkeys(texts, str))
    code = record["provenance"].get("code", {})                        # older runs have none
    if type(code) is not dict or not all(type(its) is str for its in code.values()):
        raise InputError(f"{path} was edited: provenance.code must have a hash for each file")
    if (pe := record["model"]["encoding"]["pe"]) not in ENCODINGS:
        raise InputError(f"{run} needs zoo/{pe}.py, which is not here")
    try:
        with name_missing_file(run):
            model, train = ModelConfig.from_dict(record["model"]), from_values(TrainConfig, record["train"])
            check_together(model, train)
            if train.data.startswith("task:"):
                import tasks
                fields = vars(train) | vars(model)
                names = "data", "objective", "context", "vocab", "causal"
                tasks.fill_in({name: fields[name] for name in names}, "mini")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return model, train, record | {"model": asdict(model), "train": asdict(train)}      # with what older runs lack

def settle(run):
    """End the replacement of a run by --overwrite: the caller holds the run's lock.

    Until the new run has a checkpoint, its files lie in a folder of their own, and are removed here: the old run stays.
    From then on they are renamed into the place of the old ones, the checkpoint last. A kill between two renames
    leaves files of both runs, which read_run refuses while the new checkpoint lies in that folder; the next call
    renames the others, so that the new run is whole.
    """
    run, new = Path(run), Path(run) / NEW_RUN
    if new.is_symlink():                                                # what it names is not ours
        new.unlink()
    if not new.is_dir():
        return
    whole = (new / CHECKPOINT).exists()
    for name in ("config.json", "tokenizer.tiktoken", "log.jsonl", CHECKPOINT):
        with contextlib.suppress(FileNotFoundError):                    # renamed before a kill, or not written yet
            if whole:
                os.replace(new / name, run / name)
            else:
                (new / name).unlink()
    remove_unfinished(new)
    with contextlib.suppress(OSError):                                  # somebody's own file stays in it
        new.rmdir()

def save_checkpoint(run, tensors, step, seconds=0.0):
    """Replace the run's checkpoint with one rename; seconds: trained so far.

    InputError, and the last checkpoint stays, if any of the tensors has a number that is not finite.
    """
    import safetensors.numpy

    check_finite(tensors, step)
    metadata = {"step": str(step), "seconds": f"{seconds:.3f}"}
    write_bytes(Path(run) / CHECKPOINT, safetensors.numpy.save(tensors, metadata))

def check_finite(tensors, step):
    """InputError if any of {name: array} that is to be saved has a NaN or an infinity."""
    if wrong := first_not_finite(tensors):
        raise InputError(f"after step {step} {wrong} has numbers that are NaN or infinite, so nothing is saved: try a "
                         "lower --lr; the last checkpoint, if there is one, stays")

def read_checkpoint(run, names=None):
    """({name: array} of weights and moments, {"step", "seconds"}) of a run; names: of arrays (default: all).

    InputError if there is no checkpoint, if it was cut short, or if it has other numbers than those of a training:
    finite ones in fp32. This is the one place where checkpoints are read.
    """
    import safetensors

    path = Path(run) / CHECKPOINT
    if not path.exists():
        raise InputError(f"{run} has no checkpoint yet: go on with python train.py --out {run} --resume")
    check_regular(path)
    try:
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():
                if (dtype := file.get_slice(name).get_dtype()) != "F32":
                    raise InputError(f"{path} is not of the model in config.json: {name} is of dtype {dtype}, and not "
                                     "F32, so one of them was edited")
            tensors = {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
            metadata = file.metadata()
        if not 0 <= int(metadata["step"]) <= 2**53:
            raise ValueError(f"its step is {metadata['step']}")
        info = {"step": int(metadata["step"]), "seconds": float(metadata["seconds"])}
        if not math.isfinite(info["seconds"]):
            raise ValueError(f"its seconds are {metadata['seconds']}")
    except InputError:
        raise
    except (safetensors.SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint of train.py ({error}): it was cut short or replaced") from None
    if wrong := first_not_finite(tensors):
        raise InputError(f"{run} has weights that are NaN or infinite, first {wrong}: its training diverged, so train "
                         "it again with a lower --lr")
    return tensors, info

def first_not_finite(tensors):
    """The name of the first of {name: array} that has a NaN or an infinity, or None."""
    return next((name for name, x in tensors.items() if not np.isfinite(x).all()), None)

def checkpoint_info(run):
    """{"step", "seconds"} of the run's checkpoint; step 0 if it has none yet."""
    if not (Path(run) / CHECKPOINT).exists():
        return {"step": 0, "seconds": 0.0}
    return read_checkpoint(run, ())[1]

def load_model(run, make=None):
    """(GPT, or make's model, on the CPU in eval mode; config.json with the checkpoint's step) of a run."""
    import torch

    from model_torch import GPT

    config, _, record = read_run(run)
    tensors, info = read_checkpoint(run)
    weights = {name: x for name, x in tensors.items() if not name.startswith(("m.", "v."))}
    with name_missing_file(run):
        check_shapes(run, weights, config)
        model = (make or GPT)(config, seed=None)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model.eval(), record | info

def check_shapes(run, tensors, config, prefixes=("",)):
    """InputError unless {name: array} has the model's weights and, by prefixes, its moments, and no others."""
    import model_numpy

    shapes = model_numpy.parameter_shapes(config)
    if {name: x.shape for name, x in tensors.items()} != {
            prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}:
        raise InputError(f"{Path(run) / CHECKPOINT} is not of the model in config.json: one of them was edited")
