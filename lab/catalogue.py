"""The catalogue of encodings, softmaxes, cycles and methods past the trained length: docs/encodings.md, in Markdown.

    python -m lab.catalogue > docs/encodings.md

Every row is made from the code: what an encoding does and its source from the first paragraph of its docstring, which
reads `Name (source): what it does.`; its flags from its settings; where it enters from the doors that its class opens;
the numbers that it trains from a model of the preset mini; its time from studies/singles.jsonl, where `lab.bench` has
measured it. So a new file of zoo/ appears in it. An `arXiv NNNN.NNNNN` or a web address in a source becomes a link.
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
    "expe": ("ExPE-K", "This is ExPE for what enters W_k alone; its default theta is 256 times ExPE's. So scores fall "
             "or rise with the distance, by a slope that each query chooses."),
    "exqpe": ("ExQPE-K", "This is ExQPE for what enters W_k alone.")}
INTRO = """\
# All encodings in one table

A positional encoding tells a transformer where its tokens are. This page has one line for each that `train.py` can
train, for each other softmax, for layers that take turns, and for each way to read past the trained length. It is
printed by `python -m lab.catalogue` from the docstrings and settings of the code, where the formulas and their
equations stand too. [which-encoding.md](which-encoding.md) says which one to use, [explained.md](explained.md) how
ExPE works, and [the table of abilities](../interop/README.md#what-each-encoding-can-do) which ones can share keys, be
cached, or run in a fused kernel.

## Words

The [glossary](explained.md#glossary) has more of them.

- **query, key, value**: attention makes these three vectors of each token, with the matrices W_q, W_k and W_v. The
  numbers of a vector are called its *dimensions*.
- **score**: a query and a key have a score. It is their dot product, divided by the square root of their number of
  dimensions. A *softmax* turns the scores of a query into weights, and attention's output for this query is the sum of
  the values with these weights. A query sees the keys up to its own token's, and none of later tokens.
- **distance**: how many tokens the key stands before the query.
- **slope**: by how much a score falls for each token of distance.
- **bias**: a number that is added to a score before the softmax.
- **head**: a block of the model computes attention in several heads side by side. Each head has its own queries, keys
  and values.
- **gate**: a number between 0 and 1 that the model computes from a token's content.
- **embedding**: the trained vector with which a token enters the model.
- **pair, frequency**: RoPE takes the dimensions of a query or a key two by two. Such a pair is a point in a plane. From
  one position to the next it rotates by an angle, which is called its frequency. The first pair is the fastest, with
  the frequency 1, and the last is the slowest.
- **base**: the number that sets all frequencies. It is 10,000 unless `--base` changes it. In a head with D dimensions
  pair i has the frequency base^(-2i/D), where i counts from 0. A larger base makes all pairs but the first slower.
- **L**: the trained length, which is the number of tokens in the texts of the training (`--context`).

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

These take the place of the plain softmax. `--softmax NAME` goes with any encoding.
"""
CYCLES = """
## Layers that take turns

With `--cycle` each block has one of several encodings in turn, and a window of its own. In a window of N keys each
query sees only the last N keys, its own among them. A *local* block has a window, and a *global* one sees all keys. The
models are those of the library transformers; Gemma 3 also has a [report](https://arxiv.org/abs/2503.19786).
"""
LONGER = """
## Ways to read past the trained length

`lab.measure` and `generate.py --cache` have these flags for a trained model, and nothing is trained again.
[why-length-breaks.md](why-length-breaks.md#cures-without-training) says what they do to the loss.

- **factor**: how many times as long as L a text may be. `--factor` sets it. If that is left out, it is the length of
  the text divided by L, and 1 for shorter texts. With `self-extend`, `--factor` is the number of positions in a group;
  if it is left out, it is the least that brings all distances within L. With `least-slope` the least slope is
  `--factor` divided by L; if it is left out, it is 1.
- **turns in L**: how often a pair rotates all the way round in L positions. That is L times its frequency, divided by
  2 pi. A slow pair makes less than one turn, so past L it reaches angles that it never had in training.
"""

# ---- what the code says ----------------------------------------------------------------------------------------------

def read_docstring(documented):
    """(name, source, what it does) of an object whose docstring begins with `Name (source): what it does.`"""
    return split_paragraph((inspect.getdoc(documented) or "").partition("\n\n")[0])

def split_paragraph(text):
    text = " ".join(text.split())
    found = re.fullmatch(r"([^(:]+) \((.+?)\)(, [^:(]+)?: (.+)", text)
    if not found:
        return "", "", text
    name, source, more, does = found.groups("")
    return name + more, link_source(source), does[0].upper() + does[1:]

def link_source(source):
    """A source in Markdown, with links for its arXiv numbers and web addresses."""
    source = re.sub(r"https://([^\s,;]*[^\s,;/])/?", r"[\1](\g<0>)", source)
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)

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
