"""Files that a kill or a full disk leaves whole: read with one-line errors, written with one rename, hashed, locked."""

import contextlib
import errno
import functools
import glob
import hashlib
import json
import math
import os
import re
import secrets
import time
from pathlib import Path

from settings import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if hasattr(errno, "EDQUOT") else (errno.ENOSPC, errno.EFBIG)

# ---- reading ---------------------------------------------------------------------------------------------------------

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

def hash_file(path):
    """The SHA-256 of a file; InputError if it cannot be read, as a folder in its place."""
    check_regular(path)
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None

# ---- writing ---------------------------------------------------------------------------------------------------------

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

# ---- a folder for one process ----------------------------------------------------------------------------------------

def holds_files(folder):
    """Whether a folder holds anything besides what a killed script may have left before it wrote its first file."""
    return os.path.isdir(folder) and not all(name == ".lock" or is_unfinished(name) for name in os.listdir(folder))

@contextlib.contextmanager
def lock(folder, wait=False):
    """Make a folder, and hold it for this process alone; InputError if another holds it, unless this waits for it.

    A folder that others write in too is waited for. In any other, what a killed process left unfinished is removed.
    """
    from filelock import FileLock, Timeout

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made: {error.strerror}") from None
    try:                                                               # a singleton: this process may take it again
        with FileLock(f"{os.path.realpath(folder)}/.lock", timeout=-1 if wait else 0, is_singleton=True):
            if not wait:
                remove_unfinished(folder)
            try:
                yield
            finally:
                if not wait:
                    remove_unfinished(folder)                           # after an error
    except Timeout:
        raise InputError(f"{folder} is in use by another process: wait for its end, or choose another folder") from None
