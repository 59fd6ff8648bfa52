"""The slope that each query chooses, in nats a token: by how much a score rises for each token that a key is nearer.

    python -m lab.slopes runs/expe runs/expe-on-k runs/alibi --out slopes.png

A score of ExPE is (q_m . b_n + n (q_m . w)) / sqrt(D), b_n and w being free of position: so query m has the slope
q_m . w / sqrt(D), and on queries and keys q_m grows with m. ALiBi's slopes are fixed. (docs/explained.md)
"""

import math

import numpy as np
import torch

from cli import CommandLine, at_least, new_file, picture
from config import ALiBi, ExPE, InputError
from files import write_rows
from lab.attention import WatchedAttention, load_watched
from lab.measures import held_out, usable
from lab.pictures import COLOURS, Figure, save
from model_torch import as_tensor, project

DOCUMENTS, PARTS, FAR = 32, 64, 1024     # FAR: how far apart the two places of a key are that tell w

class TiltedAttention(WatchedAttention):
    """WatchedAttention that keeps each query's `slope` and `reach`, the mean distance it attends to: (B, H, T) each."""

    def attend(self, q, k, v, bias, table):
        out, nothing = super().attend(q, k, v, bias, table), q.new_zeros(2, self.qkv.in_features)
        rows = as_tensor(self.encoding.settings.rows(np.array([0, FAR]), None), q)
        _, place, _ = self.heads(project(self.encoding.override(nothing, rows), self.qkv.weight))      # (H, 2, D)
        w = (place[:, 1] - place[:, 0]) / FAR                                                          # (H, D)
        slope = (q @ w[..., None])[..., 0] / math.sqrt(q.shape[-1])                                    # (B, H, T)
        if bias is not None:                                               # ALiBi's, or keys free of their positions
            slope = (bias[..., 1] - bias[..., 0]).expand_as(slope)
        self.slope = slope.detach()
        n = torch.arange(k.shape[2]).to(q)
        self.reach, self.weights = n - self.weights @ n, None
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
    e, context = model.config.encoding, model.config.context
    if not isinstance(e, ExPE | ALiBi) or getattr(e, "once", False):
        raise InputError(f"{run} has no slopes: its encoding must be expe, without --once, or alibi")
    length, rows = args.length or 4 * context, []
    source, documents = held_out(run, record, "val", args.data)
    tokens = [torch.from_numpy(document[:length].astype("int64")) for document in usable(documents, length, DOCUMENTS)]
    found = np.stack([slopes_of(model, each) for each in tokens], axis=-1)                 # (n_layers, H, 2, T, docs)
    for block, head in np.ndindex(found.shape[:2]):
        parts = slice(context), slice(-context, None), *np.array_split(np.arange(length), min(PARTS, length))
        inside, end, *parts = (summary(*found[block, head][:, part]) for part in parts)
        rows.append({"run": str(run), "pe": e.pe, "block": block, "head": head, "data": source, "length": length,
                     "trained_length": context, "inside": inside, "end": end, "by_position": parts})
    return rows

def draw(path, rows):
    """Slope against the query's position: a column a run, a row a block, a line a head in a band of nine in ten."""
    runs, blocks = list(dict.fromkeys(row["run"] for row in rows)), 1 + max(row["block"] for row in rows)
    figure = Figure(figsize=(1 + 3.2 * len(runs), 1 + 1.6 * blocks), layout="constrained")
    axes = figure.subplots(blocks, len(runs), squeeze=False, sharex="col", sharey="row")
    for row in rows:
        axis, colour = axes[row["block"], runs.index(row["run"])], COLOURS[row["head"] % len(COLOURS)]
        mean, low, high = ([part[name] for part in row["by_position"]] for name in ("slope", "low", "high"))
        x = (np.arange(len(mean)) + 0.5) * row["length"] / len(mean)
        axis.plot(x, mean, color=colour, linewidth=1.2, label=f"head {row['head']}")
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axvline(row["trained_length"], color="grey", linestyle=":", linewidth=1)
        axis.axhline(0, color="grey", linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axes[row["block"], 0].set_ylabel(f"block {row['block']}", fontsize=9)
        axes[0, runs.index(row["run"])].set_title(row["run"], fontsize=9)
    axes[0, 0].legend(fontsize=7, frameon=False, ncols=2, loc="upper left")
    figure.suptitle("Slope that each query chooses, nats a token,\nby its position (dotted: the trained length)")
    save(figure, path, dpi=90)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.slopes", description="Measure and draw the slope that each query chooses, "
                         "in each head of runs with ExPE or ALiBi, inside and past the trained length.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories of train.py")
    parser.add_argument("--out", type=picture, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers as a list, an object a head")
    parser.add_argument("--length", type=at_least(2), metavar="N", help="tokens to read (default: 4 x trained length)")
    parser.add_argument("--data", metavar="DIR|PATH", help="held-out text: a prepared folder, or text as data.py reads")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = [row for run in args.runs for row in measure(run, args)]
        width = max(len(row["run"]) for row in rows)
        print(f"{rows[0]['data']}: nats and tokens, of queries up to the trained length and of as many at the end\n\n"
              f"{'run':{width}}  block  head{'slope (9 in 10)':>26}{'reach':>7}{'slope at the end':>28}{'reach':>7}")
        for row in rows:
            cells = ("{slope:.4f} ({low:.4f} to {high:.4f}){reach:7.1f}".format(**row[x]) for x in ("inside", "end"))
            print(f"{row['run']:{width}}  {row['block']:5}  {row['head']:4}" + "".join(f"{x:>35}" for x in cells))
        if args.json:
            write_rows(args.json, rows)
        draw(args.out, rows)
        print(f"picture: {args.out}")

if __name__ == "__main__":
    main()
