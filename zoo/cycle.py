"""--cycle: blocks in turn have their own encoding and window, as in Gemma 3 and 4, Cohere 2, EXAONE 4 and SmolLM3.

    --pe rope --cycle rope:window=512,rope:window=512,rope:base=1e6          Gemma 3: local blocks, then a global one
    --pe rope --cycle rope:window=512,rope:window=512,proportional:base=1e6  Gemma 4: the third has proportional RoPE
    --pe rope --cycle rope:window=512,rope:window=512,nope                   Cohere 2, as --nope-every 3 --window 512

A part is a name that --pe takes, its settings, and the number of keys that its blocks see, which are all if it is left
out. Parts with the name of --pe have the settings of its flags, but for those that they change; the first changes none.
Blocks with the settings of --pe share its parameters, if it shares any; each other block has its own. Only --pe's own
encoding may enter before the first block.
"""

import math
from dataclasses import fields, replace

import model_numpy
from positional_encodings import make_encoding
from settings import InputError, kind_of

WORDS = {"true": True, "false": False}

def layer_pattern(model):
    """[(encoding, window)] of the parts of a ModelConfig's cycle. InputError that names --cycle for what is wrong."""
    parts = model.cycle.split(",")
    found = [read(part, model) for part in parts]
    if model.window or model.nope_every or not model.causal:
        raise InputError("--cycle has its own windows and looks back: leave out --window, --nope-every and --no-causal")
    if len(found) > model.layers:
        raise InputError(f"--cycle must have at most as many parts as --layers, {model.layers}, got {len(found)}")
    if found[0][0] != model.encoding:
        raise InputError(f"--cycle must begin with the encoding of --pe, {model.encoding.pe}, whose settings are flags")
    for part, (e, _) in zip(parts, found, strict=True):
        if e != model.encoding and model_numpy.build_encoding(e, model).embed is not model_numpy.embed_nothing:
            more = ", or add :once=false to it" if getattr(e, "once", False) else ""
            raise InputError(f"--cycle cannot have {part.strip()!r} in some blocks, since {e.pe} enters once, before "
                             f"the first block: make it the encoding of --pe and the first part{more}")
    return found

def read(part, model):
    """(encoding, window) of NAME:SETTING=VALUE:window=N, of which NAME alone is needed."""
    pe, *pairs = part.strip().split(":")
    try:
        e = model.encoding if pe == model.encoding.pe else make_encoding(pe)
        kinds = {f.name: kind_of(f) for f in fields(e) if f.name != "pe"} | {"window": int}
        values = {}
        for name, _, text in (pair.partition("=") for pair in pairs):
            if name not in kinds:
                raise InputError(f"{pe} has the settings {', '.join(kinds)}, got {name!r}")
            if name in values:
                raise InputError(f"{name} stands there twice")
            kind = kinds[name]
            values[name] = WORDS.get(text, text) if kind is bool else text if kind is str else number(text, kind)
        window = values.pop("window", 0)
        if window < 0:
            raise InputError(f"window must be at least 0, got {window}")
        if values.get("learn") == "random":                                      # which draws the numbers that e has
            e = replace(e, **dict.fromkeys(e.trained))
        new = replace(e, **values)
        if hasattr(e, "defaults"):                                   # some of which depend on other settings
            before, after = e.defaults(model.context), new.defaults(model.context)
            for name in after.keys() - values.keys():
                if after[name] != before.get(name) and getattr(e, name) is not None:
                    raise InputError(f"it needs its own {name}: add :{name}={after[name]:g}, its default, or another")
        return new.fit(model), window
    except InputError as error:
        raise InputError(f"--cycle has parts such as rope:base=1e6:window=512, got {part!r}: {error}") from None

def number(text, kind):
    """The int or float of "24", "1e6" or "1/512", as flags have them."""
    above, _, below = text.partition("/")
    try:
        value = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if math.isnan(value) or kind is int and (value % 1 or abs(value) > 2**53):
        kinds = {int: "whole number (of at most 2^53)", float: "number such as 24, 1e-3 or 1/2048"}
        raise InputError(f"{text!r} is not a {kinds[kind]}")
    return kind(value)
