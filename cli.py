"""The command line of every script: a wrong flag, file or value is answered in one line, with exit status 2.

Scripts import this module first, since it says in one line which package is missing. It needs none itself.
"""

import argparse
import contextlib
import difflib
import errno
import io
import os
import re
import sys
import textwrap
from pathlib import Path

from files import FULL
from settings import InputError, did_you_mean

os.environ.setdefault("GOMP_SPINCOUNT", "1000")         # before torch: its idle threads soon leave the cores to others

# ---- a package that is missing ---------------------------------------------------------------------------------------

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

sys.excepthook = report_import

# ---- the parser ------------------------------------------------------------------------------------------------------

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

    synonyms = {}                        # {a wrong word: what to write instead}; train.py has some
    owner_of = staticmethod(lambda flag: None)       # where else an unknown flag belongs, in words; train.py has it

    def __init__(self, **options):
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        if wrong := [word for word in (sys.argv[1:] if args is None else args) if "\0" in word]:
            self.error(f"{wrong[0]!r} has a NUL character, which no name and no path can have: leave it out")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        """Print the message as one line, with what was probably meant, and exit with status 2."""
        message = str(message)
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)", message)
        wrong = re.fullmatch(r"(.*invalid choice: '?([^']+)'?) \(choose from (.*)\)", message)
        if unknown:
            message += f" ({self.hint(unknown[1])}{self.prog} --help lists the flags)"
        elif wrong and (near := did_you_mean(wrong[2], re.findall(r"[\w-]+", wrong[3]))):
            message = wrong[1] + near                                  # without the list of all choices
        printable = "".join(c if c.isprintable() else " " for c in message)
        self.exit(2, f"{self.prog}: error: {' '.join(printable.split())}\n")

    def hint(self, word):
        """What to write in the place of a word that is no flag here, and a blank; "" if nobody knows."""
        if owner := self.owner_of(word):
            return f"{owner} "
        near = difflib.get_close_matches(word, self._option_string_actions, 1, 0.75)
        commas = ["numbers with commas, as in 512,1024"] * word.isdigit()
        meant = next(iter(filter(None, [self.synonyms.get(word), *commas, *near])), None)
        return f"did you mean {meant}? " if meant else ""

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

# ---- types of arguments ----------------------------------------------------------------------------------------------

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

def folder(text):
    """A path for argparse, in which a/../b is b."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''; the one that you stand in is .")
    return Path(os.path.normpath(text))

PICTURES = (".png", ".svg", ".pdf")
BEGINNINGS = {                           # what is found in a file that was written here: by --json, web/ or --plot
    ".json": rb'^\[\s*\{\s*"(run|preset)":\s*"[^"]*",\s*"pe":', ".html": rb'id="data"',
    ".png": rb"^\x89PNG", ".svg": rb"<svg", ".pdf": rb"^%PDF"}

def new_file(*endings):
    """The argparse type of a file to write, of these endings: a new or empty one, or one of the kind written here."""
    def read(text):
        path = Path(os.path.realpath(text) if os.path.islink(text) else text)
        other = os.path.lexists(path) and not path.is_file()            # a folder, a pipe, a device
        if other or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists and can be written")
        if path.suffix not in endings:
            raise argparse.ArgumentTypeError(f"must end in {', '.join(endings)}, got {text!r}")
        if path.is_file() and path.stat().st_size and not re.search(BEGINNINGS[path.suffix], path.read_bytes()):
            raise argparse.ArgumentTypeError(f"{text!r} exists, and was not written here: choose another name")
        return str(path)
    return read
