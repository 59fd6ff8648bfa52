"""What pictures and pages call an encoding, and its colour."""

import dataclasses
import itertools
import re
import zlib
from collections import Counter
from fractions import Fraction
from pathlib import Path

from positional_encodings import make_encoding
from runs import read_run

METHODS = {                              # how a run of studies/ or --pe begins: (its name in pictures, its colour)
    "expe": ("ExPE", "#194DCD"), "rope": ("RoPE", "#7D3B04"), "expe-on-k": ("ExPE-K", "#2DC269"),
    "alibi": ("ALiBi", "#6D128E"), "fox": ("FoX", "#196F6C"), "kerple": ("KERPLE", "#901342"),
    "grape": ("GRAPE", "#AA9C23"), "sinusoidal": ("sinusoidal", "#1A8CFF"), "exqpe": ("ExQPE", "#0E7490"),
    "exqpe-on-k": ("ExQPE-K", "#57996A"), "shaw": ("Shaw", "#59783A"), "t5": ("T5", "#0000B2"),
    "learned": ("learned", "#9E459F"), "nope": ("NoPE", "#22C3C3"), "fire": ("FIRE", "#877E48"),
    "cope": ("CoPE", "#F33F5A"), "xpos": ("xPos", "#D20000"), "partial": ("RoPE, partial", "#126C84"),
    "proportional": ("RoPE, proportional", "#E400FC"), "cable": ("CABLE", "#A064B4"), "dape": ("DAPE", "#70B8FF"),
    "path": ("PaTH", "#00B286"), "path_fox": ("PaTH-FoX", "#1A1AFF"), "pope": ("PoPE", "#4C004C"),
    "rove": ("RoVE", "#665A9C"), "selective_rope": ("Selective RoPE", "#4C0000"), "lerope": ("LeRoPE", "#8A5A00"),
    "relative_bank": ("relative bank", "#3F6B8C"), "wall": ("Wall", "#2F4F2F"), "gemma3": ("Gemma 3", "#B35C00"),
    "partial_key_offset": ("key offset", "#5B5BD6")}
COLOURS = tuple(colour for _, colour in METHODS.values())
APART = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")     # Okabe and Ito's, 2008

def family(variant):
    """The longest beginning of a variant's name that is in METHODS; of others, such as a new file of zoo/, the first
    word."""
    known = [name for name in METHODS if re.match(f"{name}(-|,|$)", variant)]
    return max(known, key=len, default=variant.partition("-")[0])

def colour(variant):
    """The same whatever is drawn beside it."""
    first = family(variant)
    return METHODS[first][1] if first in METHODS else COLOURS[-1 - zlib.crc32(first.encode()) % 8]

def colours(variants):
    """{variant: its colour}; those of no known family get APART in order, so that what is drawn together differs."""
    unknown = dict.fromkeys(family(variant) for variant in variants if family(variant) not in METHODS)
    of_unknown = dict(zip(unknown, itertools.cycle(APART), strict=False))
    return {variant: of_unknown.get(family(variant)) or colour(variant) for variant in variants}

def name(variant):
    """'expe-on-k-x16' -> 'ExPE-K, x16', 'rope-sinks' -> 'RoPE, sinks'."""
    first = family(variant)
    more = re.sub("-(?=[a-z])|_", " ", variant[len(first) :].lstrip("-, "))
    more = re.sub("(?<=[a-wyz])(?=[0-9])", " ", more).replace("lr x", "rate x")                # base100, but not x16
    return ", ".join(filter(None, (METHODS.get(first, (first,))[0], more)))

def changed(model):
    """[(name, value, value in short)] of the settings of a model's encoding that are not its defaults, numbers last."""
    wide = dataclasses.replace(model, width=64 * model.width)      # that any default fits
    values, plain = map(dataclasses.asdict, (model.encoding, make_encoding(model.encoding.pe)))
    words = {key: x for key, x in values.items() if isinstance(x, bool | str)}      # on which numbers' defaults depend
    default = dataclasses.asdict(make_encoding(**words).fit(wide)) | {key: plain[key] for key in words}
    changes = [(key, x) for key, x in values.items() if x not in (default[key], None)]
    changes.sort(key=lambda change: not isinstance(change[1], bool | str))
    return [(key, x, str(x) if isinstance(x, bool | str) else                                           # 1/2048
             min(f"{x:g}", str(Fraction(x).limit_denominator(10**6)), key=len)) for key, x in changes]

def variant_of(run):
    """The variant that a run is: its encoding and softmax, and the encoding's settings that are not its defaults."""
    model, _, _ = read_run(run)
    words = [key if x is True else f"{key}-{x}" if isinstance(x, str) else key + short
             for key, x, short in changed(model)]
    words += [model.softmax] * (model.softmax != "plain") + ["cycle"] * bool(model.cycle)
    return "-".join([model.encoding.pe, *words])

def names_of(runs):
    """{run: what no other one of them is called}: its variant's name, if need be with its folder's, or its path."""
    names = {run: name(variant_of(run)) for run in runs}
    called = {run: (word, f"{word} ({Path(run).name})", f"{word} ({run})") for run, word in names.items()}
    often = Counter(itertools.chain(*map(set, called.values())))
    return {run: next(word for word in words if often[word] == 1) for run, words in called.items()}
