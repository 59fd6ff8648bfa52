"""What each encoding costs and what it can do, counted and not timed; and how far its loss rises, by results/.

    python -m studies.costs                          all encodings and mixes, at mini
    python -m studies.costs --preset paper-35m --variants expe,expe-on-k,rope,fox

Beyond NoPE's: the parameters; and the operations a token of a forward pass at the trained length, those of matrix
products as torch counts them, and one for each number that anything else computes, but neither moves nor masks. The
cache is what a token leaves in it, in fp32. A stream puts keys at other positions later. The kernel is torch's `causal`
one alone, in half precision and wherever texts are read; or another, which is given a bias, a window or a softmax of
its own. Losses are of the last targets of val's documents, over the seeds named.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import model_torch
import train
from common import CommandLine, at_least, listed
from config import PRESETS, make_encoding
from lab.grids import GRIDS, SEEDS, TABLE2, VARIANTS, Grid, flags_of
from lab.report import collect, lines_of, mean_sd, table
from longer.cache import Cache
from longer.reading import Reader
from model_numpy import count_parameters
from studies.tuning import LATER

MOVES = {"_unsafe_view", "cat", "stack", "clone", "copy_", "_to_copy", "embedding", "index_select", "gather", "zeros",
         "new_zeros", "ones", "fill_", "constant_pad_nd", "where", "masked_fill", "tril", "triu", "scalar_tensor"}
SHOWN = [*dict.fromkeys((*TABLE2, *GRIDS["zoo"].evaluations, *LATER, "rove", *GRIDS["mixes"].evaluations))]
BATCH = 8                                # sequences of the pass that is counted
WHAT = "same-targets"
HEADS = ("encoding", "parameters", "operations", "cache, B", "streams", "kernel", "1x", "16x - 1x", "16x - sliding",
         "seeds")

class Count(TorchDispatchMode):
    """Adds up the operations of all that runs inside."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        elif not func.is_view and func.overloadpacket.__name__ not in MOVES:
            self.total += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
        return out

class Attention(model_torch.Attention):
    def mask(self, q, k, bias):
        """As the plain one, which adds -inf. Here it is filled in, which does not count."""
        T, S = q.shape[2], k.shape[2]
        bias = q.new_zeros(T, S) if bias is None else bias
        never = model_torch.unseen(T, S, self.causal, self.window, q.device)
        return bias if never is None else bias.masked_fill(never, -torch.inf)

@torch.no_grad()
def operations(config):
    """Of a token in a forward pass over a batch of the trained length."""
    model = model_torch.GPT(config, attention=Attention)
    tokens = torch.zeros(BATCH, config.context, dtype=torch.long)
    model(tokens)                                                      # tables of positions are made once
    with sdpa_kernel(SDPBackend.MATH), Count() as count:               # fused, it hides its own
        model(tokens)
    return round(count.total / tokens.numel())

@torch.no_grad()
def costs(config):
    """{head: cell} of one model's costs."""
    plain = replace(config, encoding=make_encoding(), softmax="plain", nope_every=0, window=0)
    reader = Reader(config)
    cache = Cache()
    reader(torch.zeros(1, config.context, dtype=torch.long), cache=cache)
    return {
        "parameters": f"{count_parameters(config) - count_parameters(plain):,}",
        "operations": f"{operations(config) - operations(plain):,}",
        "cache, B": f"{cache.nbytes // len(cache):,}",
        "streams": "yes" if reader.streams() else "no",
        "kernel": "another" if reader.masked() else "causal",
    }

def losses(variant, files, seeds):
    """{head: cell} of its losses on the same targets, over those of the seeds that there are; files: `collect`'s."""
    seeds = [seed for seed in seeds if seed in files.get((variant, WHAT), {})]
    if not seeds:
        return {}
    [line] = (line for line in lines_of(Grid("", {variant: (WHAT,)}), files, seeds) if not line.how)
    first, *_, last = line.losses(WHAT)
    cells = {"1x": mean_sd(first), "seeds": ",".join(map(str, seeds))}
    if np.isnan(last).any():                                           # learned: no rows past the trained length
        return cells
    sliding = np.array([row["loss"] for row in line.rows["sliding", 1]])
    return cells | {"16x - 1x": mean_sd(last - first, "+.3f"), "16x - sliding": mean_sd(last - sliding, "+.3f")}

def main(argv=None):
    parser = CommandLine(prog="python -m studies.costs", description=__doc__)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="mini", help="the model (default: mini)")
    parser.add_argument("--variants", type=listed(str, *VARIANTS), metavar="NAME,...", help="of lab/grids.py",
                        default=SHOWN)
    parser.add_argument("--seeds", type=listed(at_least(0)), metavar="N,...", default=SEEDS,
                        help=f"of the losses (default: {','.join(map(str, SEEDS))})")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        files = collect(Path("results") / args.preset)
        rows = []
        for variant in args.variants:
            flags = flags_of(variant, preset=args.preset).split()
            _, config, _ = train.read_flags(["--preset", args.preset, *flags])
            cells = costs(config) | losses(variant, files, args.seeds)
            rows.append([variant, *(cells.get(head, "-") for head in HEADS[1:])])
        print(table(HEADS, rows), end="")

if __name__ == "__main__":
    main()
