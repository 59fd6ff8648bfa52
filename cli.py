"""The command line: how the scripts take what a user gives them, and say what was wrong.

Every wrong flag, file or value raises InputError where it is met. CommandLine makes one line of it on stderr, with exit
status 2.
"""

import argparse
import contextlib
import math
import os
import re
import sys
from pathlib import Path

from config import ENCODINGS, InputError
from files import naming

# torch is imported where it is used, so that --help and a wrong flag answer at once.

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")             # C0 and C1, but newline and tab
BAR = "{l_bar}{bar}{r_bar}   \x1b[3D"                               # tqdm's own, and three columns for a ^C

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

    def exit(self, status=0, message=None):
        if message and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")                            # over what a bar and ^C have left on the line
        super().exit(status, message)

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

def clock(seconds):
    """"1:05", or "1:00:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"

def number(text):
    """A finite float from "0.5", "1e-3" or "1/2048", for argparse."""
    above, _, below = text.partition("/")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if math.isfinite(value := float(above) / float(below or 1)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5, 1e-3 or 1/2048")

def whole(text):
    """An int of at most 2^53 from "600000000", "600_000_000", "6e8" or "600M" (or k, or B), for argparse."""
    unit = {"k": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1)
    with contextlib.suppress(ValueError):
        if (value := float(text[: len(text) - (unit > 1)]) * unit).is_integer() and abs(value) <= 2**53:
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
