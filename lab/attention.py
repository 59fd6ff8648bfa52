"""A picture of what a run attends to: every head of every block, inside and past the trained length.

    python -m lab.attention runs/expe --out attention.png
    python -m lab.attention runs/rope --out attention.png --lengths 128,512 --rope-scaling yarn
"""

import functools

from cli import PICTURES, CommandLine, at_least, listed, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

from backends import pick_device
from eval import held_out
from lab import pictures
from lab.measures import usable
from longer import flags
from longer.reading import Reader, ReadingAttention, load
from runs import describe_progress, warn_of_changes
from settings import InputError, prefix_errors, require_finite
from zoo.names import name, variant_of


class WatchedAttention(ReadingAttention):
    """ReadingAttention that keeps the last softmax, `weights` (B, H, T, S), which a fused kernel never shows."""

    fused = False                        # ALiBi's and the like: a bias, and no further dimensions of q and k

    def attend(self, q, k, v, bias, table):
        value = self.encoding.value

        def watch(weights, v, table):
            self.weights = weights.detach()
            return value(weights, v, table) if value else weights @ v

        self.encoding.value = watch      # so that attend makes the weights, and hands them over
        try:
            return super().attend(q, k, v, bias, table)
        finally:
            del self.encoding.value

def load_watched(run, device="cpu", dtype="fp32", attention=WatchedAttention):
    """longer.reading.load, of a Reader with WatchedAttention or a kind of it."""
    return load(run, device, dtype, functools.partial(Reader, attention=attention))

def weights_of(model, tokens):
    """The attention weights of every block of a watched Reader, (layers, B, H, T, T)."""
    with torch.enable_grad():                                          # so that all queries are read at once
        model.hidden(tokens)
    return torch.stack([block.attn.weights for block in model.blocks])

def main(argv=None):
    parser = CommandLine(prog="python -m lab.attention",
                         description="Draw the attention of each head of a run, inside and past the trained length.")
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory of train.py")
    add("--out", type=new_file(*PICTURES), required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    add("--title", metavar="TEXT", help="what the picture shows (default: the run's encoding)")
    add("--lengths", type=listed(at_least(1)), metavar="N,N,...", help="default: the trained length and 4 times it")
    add("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    add("--data", metavar="DIR|PATH", help="read other text: a prepared folder, or text as data.py reads it")
    add("--dtype", choices=flags.PRECISIONS, default="fp32", help="as in lab.measure (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    flags.add_scaling_flags(parser)
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        options = flags.scaling_of(args)
        model, record = load_watched(args.run, pick_device(args.device), args.dtype)
        context = model.config.context
        weights = {}
        lengths = sorted(args.lengths or [n for n in (context, 4 * context) if n <= model.longest])
        if lengths[-1] > model.longest:
            raise InputError(f"{args.run} has positions for {model.longest} tokens, and not for {lengths[-1]}")
        source, documents = held_out(args.run, record, args.split, args.data)
        [document] = usable(documents, lengths[-1], 1)
        tokens = torch.from_numpy(document.astype("int64")).to(model.embedding.weight.device)
        for length in lengths:
            model.scale_to(length, **options)
            weights[length] = weights_of(model, tokens[None, :length])[:, 0].float().cpu().numpy()     # (n, H, T, T)
            with prefix_errors(args.run):
                require_finite(np.isfinite(weights[length]).all(), "attention weights")
        warn_of_changes(args.run)
        words = filter(None, (str(args.run), describe_progress(record["step"], record["train"]["steps"]), source))
        title = args.title or f"Attention with {name(variant_of(args.run))}"
        pictures.attention(args.out, weights, f"{title} ({', '.join(words)})")
        print(f"picture: {args.out}")

if __name__ == "__main__":
    main()
