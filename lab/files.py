"""What the instruments share: files of JSON that are read by their shape, and argparse types for files to write."""

import argparse
import json
from pathlib import Path

from common import new_file, read_text, write_text
from config import InputError

BAR = "{l_bar}{bar}{r_bar}   \x1b[3D"                               # tqdm's own, and three columns for a ^C


def clock(seconds):
    """"1:05", or "1:00:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"

def picture(text):
    """The path of a picture that can be written, for argparse: known by its suffix before the work that leads to it."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)

def write_json(path, value):
    write_text(path, json.dumps(value, indent=1) + "\n")

def write_rows(path, rows):
    write_text(path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")

def read_json(path, shape=object):
    """The value of a JSON file; InputError that names the file if it is not JSON, or not of the shape.

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
