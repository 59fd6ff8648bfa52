"""The gate: how the scripts take what a user gives them, and how files are read and written.

Every wrong flag, file or value ends in one line on stderr and exit status 2: it raises InputError where it is met, and
CommandLine says it. A file is read only if it is one, and JSON only if it has its shape; a file or a folder is written
beside its place and takes it whole, so that a kill, a full disk or a second process leaves what was there.
"""

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

from config import ENCODINGS, InputError

# torch is imported where it is used, so that --help and a wrong flag answer at once.


# ---- the command line ------------------------------------------------------------------------------------------------

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")             # C0 and C1, but newline and tab

class Output:
    """Standard output for what others wrote: on a terminal without control characters, and never the end of the work.

    After the first error, which is kept in `gone`, nothing more is written: | head -1 has read enough, a disk is full.
    """

    def __init__(self, stream):
        self.stream, self.gone = stream, None
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")                    # it may lack a character of the text

    def write(self, text):
        with self.guarded():
            return self.stream.write(CONTROL.sub("", text) if self.stream.isatty() else text)

    def flush(self):
        with self.guarded():
            self.stream.flush()

    @contextlib.contextmanager
    def guarded(self):
        try:
            with naming("standard output"):
                yield
        except OSError as error:
            self.gone = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name):
        return getattr(self.stream, name)

class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser that reports every wrong input as one line on stderr, with exit status 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {CONTROL.sub('', ' '.join(str(message).split()))}\n")

    def parse_args(self, args=None, namespace=None):
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--") and word.endswith("=--"):      # argparse would make a list of it
                self.error(f"{word} has no value")
        return super().parse_args(args, namespace)

    @contextlib.contextmanager
    def one_line_errors(self):
        """Everything that the user or the machine can get wrong ends in error(); a bug keeps its traceback."""
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:                          # closed, and no file may take its number
                setattr(sys, name, open(os.devnull, "r+"))
        try:
            with contextlib.redirect_stdout(Output(sys.stdout)) as output:
                ENCODINGS.check()
                yield
                output.flush()
            if output.gone and not isinstance(output.gone, BrokenPipeError):
                raise output.gone                                   # all else is done
        except InputError as error:
            self.error(error)
        except (KeyboardInterrupt, SystemError) as error:           # the latter: a Ctrl-C that came within rustbpe
            if not isinstance(error.__cause__ or error, KeyboardInterrupt):
                raise
            self.exit(130, f"{self.prog}: stopped\n")
        except (MemoryError, RuntimeError) as error:                # the latter: torch's
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            self.error(f"not enough memory: {str(error).partition(chr(10))[0] or 'use smaller sizes'}")
        except UnicodeEncodeError as error:
            self.error(f"{error.object!r} is no name of a file")
        except OSError as error:
            self.error(f"{error.filename}: {error.strerror}" if error.filename else error)

def number(text):
    """A finite float from "0.5", "1e-3" or "1/2048", for argparse."""
    above, _, below = text.partition("/")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if math.isfinite(value := float(above) / float(below or 1)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5, 1e-3 or 1/2048")

def whole(text):
    """An int of at most 2^53 from "600000000", "600_000_000" or "6e8", for argparse."""
    with contextlib.suppress(ValueError):
        if (value := float(text)).is_integer() and abs(value) <= 2**53:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (of at most 2^53)")

def at_least(low):
    """The argparse type of a whole number of at least `low`."""
    def read(text):
        if (value := whole(text)) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value
    return read

def listed(kind, *known):
    """The argparse type of "A,B,...": a list without repeats of what `kind` reads, each one of `known` if any are."""
    def read(text):
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if wrong := [value for value in values if known and value not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return values
    return read

def number_or_auto(text):
    """A finite float, or "auto", for argparse."""
    return text if text == "auto" else number(text)

def new_file(text):
    """The path of a file in a folder that exists and can be written, for argparse."""
    path, folder = Path(text), Path(text).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists and can be written")
    return text

def picture(text):
    """The path of a picture that can be written, for argparse: known by its suffix before the work that leads to it."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)

def pick_device(name="auto"):
    """A torch.device from "auto" (GPU if any), "cpu", "cuda", "cuda:1", "mps"; InputError if it is not here."""
    import torch

    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in has if has[kind]))
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise InputError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    kind, _, index = name.partition(":")
    if not has[kind] or (index and int(index) >= torch.cuda.device_count()):
        raise InputError(f"device {name}: torch {torch.__version__} sees none on this machine: use --device cpu")
    return torch.device(name)


# ---- files -----------------------------------------------------------------------------------------------------------

FILE = {"bytes": int, "sha256": str}                                # the shape of what `fingerprint` returns

@contextlib.contextmanager
def naming(path):
    """Let an OSError of the block name this file: writing to one that is open knows no name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise

def open_file(path):
    """A file to read bytes from; InputError if it is missing, or a folder, pipe or device: these might never end."""
    if not os.path.isfile(path):
        raise InputError(f"{path or repr('')} is {'no regular file' if os.path.lexists(path) else 'missing'}")
    return open(path, "rb")

def read_text(path):
    """The text of a file, its ends of lines as "\\n"; InputError as open_file's, and for what is not UTF-8."""
    try:
        with open_file(path) as file:
            return io.TextIOWrapper(file, encoding="utf-8").read()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None

def sync(path):
    """Wait until a file, or the names in a folder, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

def new_file_of(path):
    """Where a file is written before it takes its place; what is there, a pipe even, is removed."""
    scratch = Path(f"{path}.new")
    scratch.unlink(missing_ok=True)
    return scratch

def write_whole(path, text):
    """Write a file so that no reader ever sees half of it, and a kill or a power cut leaves the old one or this."""
    scratch = new_file_of(Path(path).with_name(f".{Path(path).name}"))     # hidden: FILE.new may be another's
    with naming(path):
        try:
            scratch.write_text(text, encoding="utf-8")
            sync(scratch)
        except OSError:                                                 # a full disk gets back what it had
            scratch.unlink(missing_ok=True)
            raise
        os.replace(scratch, path)
        sync(scratch.parent)

def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1) + "\n")

def write_rows(path, rows):
    write_whole(path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")

def read_json(path, shape=object):
    """The value of a JSON file; InputError that names the file if it is missing, is not JSON, or not of the shape.

    A shape is a type, {name: shape} for an object that has these fields at least, or [shape] for a list.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not valid JSON: it was cut short or edited") from None
    check_shape(value, shape, path)
    return value

def check_shape(value, shape, name):
    """InputError that begins with the name, unless a value is of a shape as read_json has it."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
        raise InputError(f"{name} must be of type {getattr(kind, '__name__', kind)}, got {str(value)[:40]}")
    for key, part in shape.items() if isinstance(shape, dict) else ():
        if key not in value:
            raise InputError(f"{name} lacks {key!r}: it was cut short or edited")
        check_shape(value[key], part, f"{name}: {key}")
    for i, item in enumerate(value if isinstance(shape, list) else ()):
        check_shape(item, shape[0], f"{name}: {i}")

def fingerprint(path):
    """{"bytes": ..., "sha256": ...} of a file."""
    with open_file(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

@contextlib.contextmanager
def held(folder, wait=False, name=None):
    """Hold a folder for this process alone; where another has it, wait for its end, or InputError that names both.

    Yields the folder's descriptor. Whatever ends the process, the kernel lets go of what it held.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = f"{name or folder} is in use by {holder(descriptor)}"
            if not wait:
                raise InputError(f"{said}: wait for its end, or choose another folder") from None
            print(f"{said}: waiting for it", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)

def holder(descriptor):
    """Who holds it, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, place, _, _ = line.split()
            if kind == "FLOCK" and place.endswith(f":{os.fstat(descriptor).st_ino}"):
                return f"process {pid}"
    return "another process"

def check_new(folder, files, overwrite, advice):
    """InputError unless a folder may be written: a new one or, by --overwrite, one of these files and no others."""
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise InputError(f"{folder} exists: {advice}, replace it by --overwrite, or choose another --out")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    there = {name.removesuffix(".new") for name in names if not name.startswith(".")}       # .tmp...: safetensors' own
    if files[0] not in there or there - set(files):
        what = f"no {files[0]}" if files[0] not in there else min(there - set(files))
        raise InputError(f"{folder} exists and holds {what}, so it is not overwritten: choose another --out")
    if Path(os.path.realpath(folder)) in (here := Path.cwd(), *here.parents):
        raise InputError(f"{folder} is or holds the folder you are in, so it is not overwritten: leave it first")

@contextlib.contextmanager
def new_folder(folder, files, overwrite=False, advice="use it", wait=False):
    """A scratch folder, for one process at a time, which becomes `folder` if the block ends well and else is gone.

    The rest is check_new's. What stood there before is put aside, and goes last.
    """
    check_new(folder, files, overwrite, advice)
    whole = Path(os.path.realpath(folder))
    scratch, old = (whole.with_name(f".{whole.name}.{what}") for what in ("partial", "old"))
    made = [parent for parent in whole.parents if not parent.exists()]

    def restore():
        if whole.exists():
            (old / files[0]).unlink(missing_ok=True)                # what is left of it is never taken for the folder
        elif (old / files[0]).exists():                             # of the two renames below only one was done
            os.rename(old, whole)

    with contextlib.ExitStack() as stack:
        while True:                                                 # until it is not one that another has just renamed
            scratch.mkdir(parents=True, exist_ok=True)
            mine = os.fstat(stack.enter_context(held(scratch, wait, folder)))
            if scratch.exists() and os.path.samestat(mine, os.stat(scratch)):
                break
        try:
            restore()
            check_new(folder, files, overwrite, advice)
            if whole.exists():
                stack.enter_context(held(whole, name=folder))
            for path in scratch.iterdir():                          # of a process that was killed
                path.unlink()
            with naming(folder):
                yield scratch
            for path in (*scratch.iterdir(), scratch):
                sync(path)
            shutil.rmtree(old, ignore_errors=True)                  # of a process that was killed
            if whole.exists():
                os.rename(whole, old)
            os.rename(scratch, whole)
            sync(whole.parent)
        finally:
            restore()
            for path in (scratch, old):
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):                      # there is something in it
                for parent in made:
                    parent.rmdir()
