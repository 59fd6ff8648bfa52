"""ExPE-K past its trained length: which heads have slopes near 0 or below, and whether another reading mends it.

    python -m lab.reproduce tokens                   trains the runs of far/, and `long` those of packages/
    python -m studies.flat runs/far/expe-on-k-tokens-x4-s[123] --json results/far/flat.json
    python -m studies.flat runs/packages/expe-on-k-{tokens-x10-s1,x64-lr-x2-tokens-x10-s1} --max-docs 24 \\
        --json results/packages/flat.json

A query of ExPE-K chooses a slope, by which a score falls for each token that its key is further back. Nothing keeps a
slope from being small, or below 0, and then far keys count. L being the trained length, the same weights are also read
with slopes of at least 0, 1/L, 2/L or 4/L, or with keys beyond 2L scored as if they were 2L away. The table of heads
gives the share of slopes below 0 and below 2/L, of queries up to the trained length and of those past it. Runs whose
names differ in their seed alone are one row. Intervals are for other seeds and other documents.
"""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from common import CommandLine, at_least, new_file, read_run
from config import InputError
from engine.fast import is_straight
from eval import held_out
from lab.attention import load_watched
from lab.files import BAR, write_rows
from lab.measures import MEASURES, Settings, summary, usable
from lab.report import mean_sd, paired, table
from longer.reading import ReadingAttention

MULTIPLES = (1, 2, 4, 16)                # of the trained length
WAYS = {                                 # name: (the least slope times L, the furthest distance over L)
    "as trained": (-math.inf, math.inf),
    "at least 0": (0, math.inf),
    "at least 1/L": (1, math.inf),
    "at least 2/L": (2, math.inf),
    "at least 4/L": (4, math.inf),
    "at most 2L": (-math.inf, 2),
}
BELOW = (0, 2)                           # times 1/L: slopes whose share is told

class Bent(ReadingAttention):
    """ReadingAttention with furthest distances beside its least slopes; it counts small slopes by the query's place."""

    furthest, context = math.inf, 1                                    # in tokens; the trained length
    counts = None                                                      # (positions, heads, 3): below BELOW, and all

    def attend_linear(self, q, k, v, kept, n):
        w = self.qkv.weight.chunk(3)[1].unflatten(0, (self.n_heads, -1))               # (H, D, C)
        slopes, n = self.linear(q, kept, w, n)                                         # (B, H, T), (..., 1, S)
        if self.counts is not None:
            small = [slopes * self.context < below for below in BELOW]
            self.counts += torch.stack((*small, slopes == slopes), -1).sum(0).transpose(0, 1)
        apart = (n[..., None, :] - n[..., -q.shape[2] :, None]).clamp(min=-self.furthest)
        return self.attend(q, k, v, slopes[..., None] * apart, None)

def bend(model, least, furthest):
    """Give the blocks of a Reader with Bent attention the limits of one of WAYS."""
    context = model.trained.context
    for block in model.blocks:
        block.attn.least, block.attn.furthest, block.attn.context = least / context, furthest * context, context

def rows_of(run, args):
    """Two lists of rows: of each way and multiple of the trained length, and of each head."""
    model, record = load_watched(run, attention=Bent)
    context = model.config.context
    measure = MEASURES[args.protocol]
    settings = Settings(context, MULTIPLES[-1] * context, max(1, context // measure.share), max(1, context // 4), None)
    documents = usable(held_out(run, record, args.split, None)[1], settings.longest, args.max_docs)
    rows = []
    windows = {multiple: measure.conditions(documents, multiple * context, settings)[0] for multiple in MULTIPLES}
    bar = SimpleNamespace(update=int)
    every = [torch.zeros(settings.longest, model.config.n_heads, 3) for _ in model.blocks]     # as Bent.counts
    for way, multiple in itertools.product(WAYS, MULTIPLES):
        bend(model, *WAYS[way])
        for block, counts in zip(model.blocks, every, strict=True):
            block.attn.counts = counts if way == "as trained" and multiple == MULTIPLES[-1] else None
        scored = summary([windows[multiple]], [model.window_losses(windows[multiple], bar)])
        rows.append({"run": run, "seed": record["train"]["seed"], "way": way, "multiple": multiple,
                     "protocol": args.protocol, "split": args.split, "weights": record["sha256"]} | scored)
    shares = [{"run": run, "block": block, "head": head,
               **{where: (part[:, head, :-1].sum(0) / part[:, head, -1].sum()).tolist()
                  for where, part in (("within", counts[:context]), ("past", counts[context:]))}}
              for block, counts in enumerate(every) for head in range(counts.shape[1])]
    return rows, shares

def check(run):
    """InputError unless a run is ExPE-K's, with one slope a query."""
    model = read_run(run)[0]
    if not is_straight(model.encoding) or model.softmax != "plain" or model.nope_every:
        raise InputError(f"{run} must have expe on keys only (--on k), with no --learn, --softmax or --nope-every")

def print_rows(rows, shares):
    """A line for each variant and way, and one for each head."""
    by_variant = {}
    for row in rows:
        name = re.sub("-s[0-9]+$", "", row["run"].rstrip("/"))
        by_variant.setdefault(name, {}).setdefault((row["way"], row["multiple"]), []).append(row)
    first, *_, last = MULTIPLES
    lines = []
    for name, losses in by_variant.items():
        for way in WAYS:
            cells = [mean_sd([row["loss"] for row in losses[way, multiple]]) for multiple in MULTIPLES]
            lines.append([name, way, *cells, paired(losses[way, last], losses[way, first]),
                          paired(losses[way, first], losses["as trained", first]),
                          paired(losses[way, last], losses["as trained", last])])
    print(table(["run", "read", *(f"{multiple}x" for multiple in MULTIPLES), f"{last}x - {first}x",
                 *(f"{end}x - as trained" for end in (first, last))], lines))
    heads = [f"below {below}/L, {where}".replace("0/L", "0") for where in ("to 1x", "past it") for below in BELOW]
    print(table(["run", "block", "head", *heads],
                [[row["run"], str(row["block"]), str(row["head"]), *map("{:.1%}".format, row["within"] + row["past"])]
                 for row in shares]), end="")

def main(argv=None):
    parser = CommandLine(prog="python -m studies.flat", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directories of train.py, with --pe expe --on k")
    add("--protocol", choices=("same-targets", "spread"), default="same-targets",
        help="of lab.measure (default: same-targets)")
    add("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    add("--max-docs", type=at_least(1), metavar="N", help="score N usable documents, evenly spaced")
    add("--json", type=new_file, metavar="FILE", help="write the numbers as a list, the heads last")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        for i, run in enumerate(args.runs):
            check(run)
            if any(Path(run).resolve() == Path(other).resolve() for other in args.runs[:i]):
                raise InputError(f"{run} is named twice: name each run once")
        rows, shares = [], []
        for run in tqdm(args.runs, unit="run", leave=False, disable=None, bar_format=BAR):
            for found, more in zip((rows, shares), rows_of(run, args), strict=True):
                found += more
        if args.json:
            write_rows(args.json, rows + shares)
        print_rows(rows, shares)

if __name__ == "__main__":
    main()
