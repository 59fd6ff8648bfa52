"""Files and folders: read only if they are what they should be, and written whole or not at all.

A file is read if it is one, and JSON if it has its shape. A file or a folder is written beside its place, and takes it
when it is on the disk; so a kill, a power cut, a full disk or a second process leaves what was there.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
from pathlib import Path

from config import InputError

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
    names = os.listdir(folder) if os.path.isdir(folder) else []
    there = {name.removesuffix(".new") for name in names if not name.startswith(".")}       # .tmp...: safetensors' own
    if files[0] not in there or there - set(files):
        what = f"no {files[0]}" if files[0] not in there else min(there - set(files))
        raise InputError(f"{folder} exists and holds {what}, so it is not overwritten: choose another folder")
    if not overwrite:
        raise InputError(f"{folder} exists: {advice}, replace it by --overwrite, or choose another folder")
    if Path(os.path.realpath(folder)) in (here := Path.cwd(), *here.parents):
        raise InputError(f"{folder} is or holds the folder you are in, so it is not overwritten: leave it first")

@contextlib.contextmanager
def new_folder(folder, files, overwrite=False, advice="use it", wait=False, keep=None):
    """A scratch folder, for one process at a time, which becomes `folder` if the block ends well and else is gone.

    The rest is check_new's. What stood there before is put aside, and goes last. keep: the name of a file with which
    a scratch folder stays, for the next one that asks for it.
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

    def kept():
        return keep is not None and (scratch / keep).exists()

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
            for path in scratch.iterdir() if not kept() else ():    # of a process that was killed
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
            for path in (old,) if kept() else (scratch, old):
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):                      # there is something in it
                for parent in made:
                    parent.rmdir()
