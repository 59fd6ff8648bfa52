"""What each encoding can do, for an implementation of your own: the table of interop/README.md, in Markdown.

    python -m interop.abilities

No cell is written by hand. A small model of each encoding, with random weights and in float64, is built and asked:
which doors of model_torch.py it opens, what they make of a text, and whether it reads with a cache or with padding what
it reads at once. tests/test_abilities.py computes what each cell claims in another way.

B batch, T query length, H heads, D width of a head, C = H*D model width.
"""

import dataclasses
from typing import Any, NamedTuple

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

from config import ModelConfig, make_configs
from engine.fast import FastGPT
from interop.compare import raise_weights, random_text, read_in_parts, read_padded
from longer.reading import Reader
from model_torch import GPT, Encoding
from positional_encodings import ENCODINGS
from settings import InputError

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 64, "vocab": 40, "dropout": 0.0}
B, T = 3, 24
SOFTMAXES = next(f for f in dataclasses.fields(ModelConfig) if f.name == "softmax").metadata["rule"]["one_of"]
ROWS = {                                 # {the flags of train.py after --pe: what make_configs takes besides SMALL}
    **{pe: {"pe": pe} for pe in ENCODINGS},
    **{f"{pe} --on k": {"pe": pe, "on": "k"} for pe in ("expe", "exqpe")}, "expe --on qkv": {"pe": "expe", "on": "qkv"},
    **{f"nope --softmax {kind}": {"pe": "nope", "softmax": kind} for kind in SOFTMAXES if kind != "plain"},
    "rope --window 8": {"pe": "rope", "window": 8}, "rope --cycle rope:window=8,nope": {
        "pe": "rope", "cycle": "rope:window=8,nope"}}
NOTES = {                                # {why a cell is no, or what a yes costs: the note under the table}
    "phases": "each query head changes a shared key in its own way, so shared keys are repeated first",
    "embedded": "positions are part of the embeddings, so a cached key cannot be moved to another position",
    "fixed": "a position enters the values, or is no sum apart from a key's content",
    "look back": "it looks back and has no meaning for later keys: train.py refuses it without a causal mask",
    "dimensions": "the bias is in 8 more dimensions of q and k (engine/linear_bias.py: reading, and --fast in bf16)",
    "biased": "scores gain a bias or a mask",
    "weights": "the weights are used otherwise than in a product with the values",
    "softmax": "the weights are no plain softmax of the scores",
    "tokens": "the bias of a query and a key depends on other tokens",
    "heads": "the bias of a head depends on the scores of other heads",
    "sums": "with sums over the tokens that are computed beforehand, a number or two for each token and head",
}

# ---- what is looked at -----------------------------------------------------------------------------------------------

class Block(NamedTuple):
    """The attention of one block and what its doors make of an input."""

    attention: Any                       # engine.fast.Attention, with its encoding
    h: Any                               # (B, T, C)
    rows: Any                            # the table of positions for rotate
    q: Any                               # (B, H, T, D), before rotate
    k: Any
    key_state: Any
    bias: Any                            # (..., H or 1, T, S) or None

def build(config, make):
    """make(config), a GPT with random weights, in float64."""
    model = make(config)
    model.load_state_dict(raise_weights(model.state_dict()))
    return model.double().eval()

def blocks_of(model):
    """The Block of each of a FastGPT's blocks."""
    n = np.arange(T)
    tables = model.tables(n)
    h = torch.randn(B, T, model.config.width, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    for attention in (block.attn for block in model.blocks):
        encoding = attention.encoding
        rows, pairs = tables[encoding.settings][:2]
        q, k, _ = attention.project(h, rows)
        key_state = encoding.key_state(h)
        yield Block(attention, h, rows, q, k, key_state, encoding.score(*encoding.rotate(q, k, rows), key_state, pairs))

# ---- the columns: each says of a block, or of the whole model, what stands in the cell -------------------------------

def fewer_key_heads(block):
    """Whether one head of keys, shared by all query heads, enters as that head repeated would."""
    rotate = block.attention.encoding.rotate
    one = block.k[:, :1]
    shared, repeated = (rotate(block.q, k, block.rows)[1] for k in (one, one.expand_as(block.q)))
    same = shared.shape[1] == 1 and torch.allclose(shared.expand_as(repeated), repeated)
    return "yes" if same else "no: phases"

def only_causal(block):
    """Whether scaled_dot_product_attention(q, k, v, is_causal=True) is all of it."""
    encoding = block.attention.encoding
    if encoding.softmax:
        return "no: softmax"
    if encoding.value:
        return "no: weights"
    if block.bias is None and not block.attention.window:
        return "yes"
    return "yes: dimensions" if block.attention.linear and not block.attention.window else "no: biased"

def with_mask(block):
    """Whether that kernel is enough with an attn_mask of numbers, which it adds to the scores."""
    cell = only_causal(block)
    return "yes" if cell in ("no: biased", "yes: dimensions") else cell

def with_score_mod(block):
    """Whether a bias can be computed in the kernel, for a query and a key at a time: flex_attention's score_mod."""
    cell = with_mask(block)
    if cell != "yes" or block.bias is None:
        return cell
    m, n = T - 1, T // 3
    one = block.bias[..., 0, m, n].sum() + 0 * (block.q.sum() + block.h.sum())         # 0: whatever it depends on
    by_q, by_h = torch.autograd.grad(one, [block.q, block.h], retain_graph=True)
    if by_h[:, [j for j in range(T) if j not in (m, n)]].any():
        return "yes: sums" if block.attention.linear else "no: tokens"
    return "no: heads" if by_q[:, 1:].any() else "yes"

def pairs_in_memory(block):
    """The shape of the largest array with a number for each pair that reading a text at once needs; "T" if none."""
    encoding = block.attention.encoding
    if only_causal(block).startswith("yes"):
        return "T"
    if encoding.softmax or encoding.value:
        return "B H T T"
    if block.bias is None:
        return "T T"
    *others, H = (1, 1, *block.bias.shape[:-2])[-2:]
    return "B " * (others != [1]) + "H " * (H > 1) + "T T"

def cached(model, plain, exported):
    """Whether reading in parts with a cache is reading at once, and how many numbers a head keeps beside k and v."""
    more = max(0 if (x := block.key_state).shape == block.h.shape else x.shape[-1] for block in blocks_of(model))
    return agrees(read_in_parts, plain, exported, f", and {more} more" if more else "")

def padded(model, plain, exported):
    """Whether a text that is padded on the left has the logits of the text alone."""
    return agrees(read_padded, plain, exported)

@torch.no_grad()
def agrees(read, plain, exported, more=""):
    tokens = random_text(plain.config)
    return f"yes{more}" if torch.allclose(read(exported, tokens), plain(tokens), rtol=1e-9, atol=1e-9) else "no"

def export(plain):
    """interop/modeling_gpt.py's model with the weights of a GPT."""
    from interop.modeling_gpt import GPTConfig, GPTForCausalLM

    model = GPTForCausalLM(GPTConfig(model=dataclasses.asdict(plain.config), vocab_size=plain.config.vocab))
    model.gpt.load_state_dict(plain.state_dict())
    return model.double().eval()

def streams(reader):
    """Whether a key's position can be changed after it was read, so that a stream need not end."""
    if reader.can_stream():
        return "yes"
    encodings = {block.attn.encoding for block in reader.blocks}
    embedded = any(type(encoding).embed is not Encoding.embed for encoding in encodings)
    return f"no: {'embedded' if embedded else 'fixed'}"

def both_directions(flags):
    """Whether train.py takes it with --objective mlm, which has no causal mask."""
    try:
        make_configs("mini", **SMALL | flags, objective="mlm")
    except InputError:
        return "no: look back"
    return "yes"

def worst(cells):
    """The cell of a model by those of its blocks."""
    return max(cells, key=lambda cell: (cell.startswith("no"), len(cell)))

def cells(flags):
    """{column: cell} of one row."""
    config, _ = make_configs("mini", **SMALL | flags)
    model, plain, reader = (build(config, make) for make in (FastGPT, GPT, Reader))
    exported = export(plain)
    blocks = list(blocks_of(model))

    def of_blocks(column):
        return worst(map(column, blocks))

    return {
        "fewer key heads": of_blocks(fewer_key_heads), "key cache": cached(model, plain, exported),
        "causal kernel": of_blocks(only_causal), "kernel with a mask": of_blocks(with_mask),
        "`score_mod`": of_blocks(with_score_mod), "numbers for pairs": of_blocks(pairs_in_memory),
        "stream": streams(reader), "both directions": both_directions(flags),
        "padding": padded(model, plain, exported)}

# ---- the table -------------------------------------------------------------------------------------------------------

def markdown(rows):
    """The table of {flags: {column: cell}}, and under it the notes that cells name."""
    numbers = {}                                                       # {a note's name: its number}, as they come

    def short(cell):
        answer, _, name = cell.partition(": ")
        return f"{answer} ({numbers.setdefault(name, len(numbers) + 1)})" if name else answer

    first, *_ = rows.values()
    lines = [["`--pe`", *first], ["---"] * (len(first) + 1)]
    lines += [[f"`{flags}`", *map(short, cells.values())] for flags, cells in rows.items()]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", *(f"{number}. {NOTES[name][0].upper()}{NOTES[name][1:]}."
                                    for name, number in numbers.items())])

def main(argv=None):
    parser = CommandLine(prog="python -m interop.abilities", description=(__doc__ or "").partition("\n")[0])
    with parser.one_line_errors():
        parser.parse_args(argv)
        print(markdown({name: cells(flags) for name, flags in ROWS.items()}))

if __name__ == "__main__":
    main()
