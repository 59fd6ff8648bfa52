"""The catalogue of encodings, softmaxes, cycles and methods past the trained length: docs/encodings.md, in Markdown.

    python -m lab.catalogue > docs/encodings.md

Every row is made from the code: what an encoding does and its source from the first paragraph of its docstring, which
reads `Name (source): what it does.`; its flags from its settings; where it enters from the doors that its class opens;
the numbers that it trains from a model of the preset mini; its time from studies/singles.jsonl, where `lab.bench` has
measured it. So a new file of zoo/ appears in it.
"""

import dataclasses
import inspect
import json
import re
from pathlib import Path

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
from config import make_configs
from longer.methods import limit_windows
from longer.modes import DUAL_CHUNK, HOLD, LEAST, SELF_EXTEND, DualChunks, Hold, LeastSlope, SelfExtend
from longer.scaling import ROPE_SCALINGS
from model_torch import GPT, Encoding
from positional_encodings import CORE, ENCODINGS, settings_class, zoo_module
from settings import flag_of

ROOT = Path(__file__).parent.parent
MODEL = "../model_torch.py"
DOORS = {                                # {a door of model_torch.Encoding: what it changes}
    "embed": "the embedding", "override": "what enters W_q, W_k, W_v", "rotate": "queries and keys", "score": "scores",
    "softmax": "the softmax", "value": "values"}
ON_KEYS = {                              # the variants of this repository: (name, what they do)
    "expe": ("ExPE-K", "ExPE for what enters W_k alone, with 256 times its theta: a slope that each query chooses"),
    "exqpe": ("ExQPE-K", "ExQPE for what enters W_k alone")}
INTRO = """\
# All encodings in one table

A positional encoding tells a transformer where its tokens are. This page has one line for each that `train.py` can
train, for each other softmax, for layers that take turns, and for each way to read past the trained length. It is
printed by `python -m lab.catalogue` from the docstrings and settings of the code, where the formulas and their
equations stand too. [which-encoding.md](which-encoding.md) says which one to use, [explained.md](explained.md) how
ExPE works, and [the table of abilities](../interop/README.md#what-each-encoding-can-do) which ones can share keys, be
cached, or run in a fused kernel.

## Encodings

- **enters**: the place in each block that the encoding changes. The embedding is changed once, before the first block.
- **trains**: how many numbers it adds to the preset `mini` (4 blocks, 4 heads, width 128, context 128), which has
  {plain:,} without an encoding.
- **step**: the time of a training step divided by that without an encoding (NoPE), for `mini` on one thread of a CPU
  with `--fast`; empty where no measurement is stored ([bigger.md](bigger.md#how-fast-it-is) has noisy ones of
  PaTH-FoX and DAPE). `python -m lab.bench --parts train --pe NAME` measures it.
"""
SOFTMAXES = """
## Softmaxes

`--softmax NAME` goes with any encoding.
"""
CYCLES = """
## Layers that take turns

With `--cycle` each block has one of several encodings in turn, and a window of its own.
"""
LONGER = """
## Ways to read past the trained length

Flags of `lab.measure` and `generate.py` for a trained model; nothing is trained again.
[why-length-breaks.md](why-length-breaks.md#cures-without-training) has what they do to the loss.
"""

# ---- what the code says ----------------------------------------------------------------------------------------------

def read_docstring(documented):
    """(name, source, what it does) of an object whose docstring begins with `Name (source): what it does.`"""
    return split_paragraph((inspect.getdoc(documented) or "").partition("\n\n")[0])

def split_paragraph(text):
    text = " ".join(text.split())
    found = re.fullmatch(r"([^(:]+) \((.+?)\)(, [^:(]+)?: (.+?)\.?", text)
    if not found:
        return "", "", text
    name, source, more, does = found.groups("")
    return name + more, source, does

def describe_flags(settings):
    """The flags of a class of settings, each after a comma."""
    flags = [f for f in dataclasses.fields(settings) if f.metadata.get("help")]
    return "".join(f", `{flag_of(f.name)}`" for f in flags)

def list_doors(encoding):
    """What the opened doors of an encoding's class change."""
    opened = [door for door in DOORS if getattr(type(encoding), door) is not getattr(Encoding, door)]
    overridden = " and ".join(f"W_{part}" for part in getattr(encoding.settings, "on", ""))
    names = DOORS | {"override": f"what enters {overridden}"}
    return ", ".join(names[door] for door in opened) or "nothing"

def count(flags):
    """(how many numbers a GPT of mini trains with these settings, its encoding in the first block)"""
    config, _ = make_configs("mini", **flags)
    gpt = GPT(config)
    return sum(p.numel() for p in gpt.parameters()), gpt.blocks[0].attn.encoding

def read_steps(path):
    """{variant: the time of its step over NoPE's} of lab.bench's lines for mini on a CPU."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["pe"]: line["over_nope"] for line in lines if line.get("script") == "lab/bench.py"
            and (line["preset"], line["backend"], line["device"]) == ("mini", "torch", "cpu")}

# ---- the tables ------------------------------------------------------------------------------------------------------

def encoding_rows():
    plain, _ = count({"pe": "nope"})
    steps = read_steps(ROOT / "studies" / "singles.jsonl")

    def row(name, does, source, flags, more, file, variant):
        total, encoding = count(flags)
        step = f"{steps[variant]:.2f}" if variant in steps else ""
        return [name, does, source, f"`--pe {' --on '.join(flags.values())}`{more}",
                f"[{file.removeprefix('../')}]({file})", list_doors(encoding), f"{total - plain:,}", step]

    for pe in ENCODINGS:
        settings = settings_class(pe)
        documented = settings if pe in CORE else zoo_module(pe)
        file = MODEL if pe in CORE else f"../zoo/{pe}.py"
        name, source, does = read_docstring(documented)
        yield row(name or pe, does, source, {"pe": pe}, describe_flags(settings), file, pe)
        if pe in ON_KEYS:
            name, does = ON_KEYS[pe]
            yield row(name, does, "this repository", {"pe": pe, "on": "k"}, "", file, f"{pe}-on-k")

def softmax_rows():
    for paragraph in inspect.getdoc(zoo_module("softmax")).split("\n\n"):
        name, source, does = split_paragraph(paragraph)
        if source:
            flag, _, name = name.partition(", ")
            yield [f"`--softmax {flag}`", name or flag, does, source]

def cycle_rows():
    for line in inspect.getdoc(zoo_module("cycle")).splitlines():
        found = re.fullmatch(r" +(--pe .+?)  +(.+)", line)
        if found:
            yield [f"`{found[1]}`", found[2]]

def longer_rows():
    documented = {f"--rope-scaling {name}": function for name, function in ROPE_SCALINGS.items() if name != "none"}
    documented |= {f"--rope-scaling {name}": mode for name, mode in
                   {DUAL_CHUNK: DualChunks, SELF_EXTEND: SelfExtend, HOLD: Hold, LEAST: LeastSlope}.items()}
    for flags, function in {"--keys N": limit_windows, **documented}.items():
        name, source, does = read_docstring(function)
        yield [f"`{flags}`", name, does, source]

def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

def page():
    plain, _ = count({"pe": "nope"})
    return "\n".join([
        INTRO.format(plain=plain),
        table(["encoding", "what it does", "source", "flags", "file", "enters", "trains", "step"],
              encoding_rows()),
        SOFTMAXES, table(["flag", "name", "what it does", "source"], softmax_rows()),
        CYCLES, table(["flags", "as in"], cycle_rows()),
        LONGER, table(["flag", "name", "what it does", "source"], longer_rows())])

def main(argv=None):
    parser = CommandLine(prog="python -m lab.catalogue", description=(__doc__ or "").partition("\n")[0])
    with parser.one_line_errors():
        parser.parse_args(argv)
        print(page())

if __name__ == "__main__":
    main()
