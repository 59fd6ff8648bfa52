"""The slope that each query chooses, in nats a token: by how much a score rises for each token that a key is nearer.

    python -m studies.slopes runs/expe runs/expe-on-k runs/alibi --out slopes.png

A score of ExPE is (q_m . b_n + n (q_m . w)) / sqrt(D), b_n and w being free of position: so query m has the slope
q_m . w / sqrt(D), and on queries and keys q_m grows with m. ALiBi's slopes are fixed. (docs/explained.md)
"""

import itertools

import numpy as np
import torch

from common import CommandLine, at_least, new_file
from config import ALiBi, ExPE, InputError
from eval import held_out
from lab.attention import WatchedAttention, load_watched
from lab.files import picture, write_rows
from lab.measures import usable
from lab.pictures import DASHES, GREY, Figure, Line2D, colour, name, names_of, save, shade, variant_of
from model_torch import as_tensor, project

DOCUMENTS, PARTS, FAR = 32, 64, 1024     # FAR: how far apart the two places of a key are that tell w

class TiltedAttention(WatchedAttention):
    """WatchedAttention that keeps each query's `slope` and `reach`, the mean distance it attends to: (B, H, T) each."""

    def attend(self, q, k, v, bias, table):
        out = super().attend(q, k, v, bias, table)
        nothing = q.new_zeros(2, self.qkv.in_features)
        rows = as_tensor(self.encoding.settings.rows(np.array([0, FAR]), None), q)
        _, place, _ = self.heads(project(self.encoding.override(nothing, rows), self.qkv.weight))      # (H, 2, D)
        w = (place[:, 1] - place[:, 0]) / FAR                                                          # (H, D)
        slope = self.scores(q, w[:, None])[..., 0]                                                     # (B, H, T)
        if bias is not None:                                               # ALiBi's, or keys free of their positions
            slope = (bias[..., 1] - bias[..., 0]).expand_as(slope)
        self.slope = slope.detach()
        n = torch.arange(k.shape[2]).to(q)
        self.reach = n - self.weights @ n
        self.weights = None
        return out

def slopes_of(model, tokens):
    """Slopes and reaches in every block of a Reader with TiltedAttention, for tokens (T,): (n_layers, H, 2, T)."""
    with torch.enable_grad():                                          # so that all queries are read at once
        model.hidden(tokens[None])
    return np.array([torch.stack((b.attn.slope[0], b.attn.reach[0]), dim=1).numpy() for b in model.blocks])

def summary(slopes, reaches):
    """Their means, and between what nine slopes in ten lie."""
    low, high = np.percentile(slopes, (5, 95))
    return {"slope": float(slopes.mean()), "low": float(low), "high": float(high), "reach": float(reaches.mean())}

def measure(run, args):
    """A row for each head of a run, of the first tokens of held-out documents."""
    model, record = load_watched(run, attention=TiltedAttention)
    e = model.config.encoding
    context = model.config.context
    if not isinstance(e, ExPE | ALiBi) or getattr(e, "once", False):
        raise InputError(f"{run} has no slopes: its encoding must be expe, without --once, or alibi")
    length = args.length or 4 * context
    rows = []
    source, documents = held_out(run, record, "val", args.data)
    tokens = [torch.from_numpy(document[:length].astype("int64")) for document in usable(documents, length, DOCUMENTS)]
    slopes = np.stack([slopes_of(model, each) for each in tokens], axis=-1)                 # (n_layers, H, 2, T, docs)
    for block, head in np.ndindex(slopes.shape[:2]):
        parts = slice(context), slice(-context, None), *np.array_split(np.arange(length), min(PARTS, length))
        inside, end, *parts = (summary(*slopes[block, head][:, part]) for part in parts)
        rows.append({"run": str(run), "pe": e.pe, "block": block, "head": head, "data": source, "length": length,
                     "trained_length": context, "inside": inside, "end": end, "by_position": parts})
    return rows

def draw(path, rows):
    """Slope against the query's position: a column a run, a row a block, a line a head in a band of nine in ten."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    blocks = 1 + max(row["block"] for row in rows)
    heads = 1 + max(row["head"] for row in rows)
    called = names_of(runs)
    figure = Figure(figsize=(1.4 + 3.2 * len(runs), 1.6 + 1.6 * blocks), layout="constrained")
    axes = figure.subplots(blocks, len(runs), squeeze=False, sharex="col", sharey="row")
    for row in rows:
        axis = axes[row["block"], runs.index(row["run"])]
        share = 1 - row["head"] / heads
        look = {"color": shade(colour(variant_of(row["run"])), share), "linestyle": DASHES[row["head"] % len(DASHES)]}
        mean, low, high = ([part[name] for part in row["by_position"]] for name in ("slope", "low", "high"))
        x = (np.arange(len(mean)) + 0.5) * row["length"] / len(mean)
        axis.plot(x, mean, **look, linewidth=1.4)
        axis.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
        axis.axvline(row["trained_length"], color=GREY, linestyle=":", linewidth=1)
        axis.axhline(0, color=GREY, linewidth=0.5)
    for block, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"block {block}\nnats a token", fontsize=9)
    for run, top, bottom in zip(runs, axes[0], axes[-1], strict=True):
        top.set_title(called[run], color=colour(variant_of(run)), fontsize=11)
        bottom.set_xlabel("position of the query", fontsize=9)
    shown = [Line2D([], [], color=GREY, linestyle=DASHES[head % len(DASHES)]) for head in range(heads)]
    figure.legend(shown, [f"head {head}" for head in range(heads)], loc="outside lower center", ncols=8, fontsize=9)
    figure.suptitle("Slope that each query chooses, a head's mean and nine in ten\n(dotted: the trained length)",
                    fontsize=11)
    save(figure, path, dpi=110)

def main(argv=None):
    parser = CommandLine(prog="python -m studies.slopes", description="Measure and draw the slope that each query "
                         "chooses, in each head of runs with ExPE or ALiBi, inside and past the trained length.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories of train.py")
    parser.add_argument("--out", type=picture, required=True, metavar="FILE",
                        help="the picture: .png (with an .svg beside it), .svg or .pdf")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers as a list, an object a head")
    parser.add_argument("--length", type=at_least(2), metavar="N", help="tokens to read (default: 4 x trained length)")
    parser.add_argument("--data", metavar="DIR|PATH", help="held-out text: a prepared folder, or text as data.py reads")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = [row for run in args.runs for row in measure(run, args)]
        print(f"{rows[0]['data']}\nnats and tokens, of queries up to the trained length and of as many at the end")
        for run, own in itertools.groupby(rows, lambda row: row["run"]):
            print(f"\n{run} ({name(variant_of(run))})\n"
                  f"block head{'slope (9 in 10)':>29}{'reach':>6}{'slope at the end':>29}{'reach':>6}")
            for row in own:
                print(f"{row['block']:5}{row['head']:5}", end="")
                for x in (row["inside"], row["end"]):
                    cell = "{slope:.4f} ({low:.4f} to {high:.4f})".format(**x)
                    print(f"{cell:>29}{x['reach']:6.1f}", end="\n" * (x is row["end"]))
        if args.json:
            write_rows(args.json, rows)
        draw(args.out, rows)
        print(f"picture: {args.out}")

if __name__ == "__main__":
    main()
