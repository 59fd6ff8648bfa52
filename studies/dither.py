"""ExPE's table in fewer bits, all else in fp32: what columns lose that are equal, and columns that are offset by j.

    python -m lab.reproduce dither                        trains the runs that are named below, and others
    python -m studies.dither runs/mini/*-start[18]-s[123] --json results/mini/dither.json

Where neighbouring positions fall on one number of a format, equal columns merge them, and columns that are offset by j
round at different places (docs/explained.md). The losses are those of same-targets. Runs whose names differ in their
seed alone, as those of lab.reproduce do, are one row. Intervals are for other seeds and other documents.
"""

import itertools
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from common import CommandLine, load_model, new_file, read_run
from config import InputError, Override
from eval import held_out
from lab.files import BAR, write_rows
from lab.formats import round_to
from lab.measures import Settings, same_targets, summary, usable
from lab.report import paired
from longer.reading import Reader

MULTIPLES = (1, 4, 16)                   # of the trained length

def int8(table):
    """255 levels from minus to plus the table's largest number."""
    step = np.abs(table).max() / 127
    return np.rint(table / step) * step

FORMATS = {"fp32": np.asarray, "bf16": partial(round_to, dtype="bf16"), "fp16": partial(round_to, dtype="fp16"),
           "int8": int8}
FEWER = tuple(FORMATS)[1:]

class Rounded(Reader):
    """Reader whose table is rounded, each window's apart, and nothing else."""

    format = "fp32"

    def tables(self, n, cache=None):
        table = super().tables(n, cache)
        return {settings: at._replace(rows=self.rounded(at.rows)) for settings, at in table.items()}

    def rounded(self, rows):
        return None if rows is None else torch.from_numpy(FORMATS[self.format](rows.double().numpy())).to(rows)

def check(run):
    e = read_run(run)[0].encoding
    if not isinstance(e, Override) or e.on != "qk" or e.once or e.learn != "none":
        raise InputError(f"{run} must have expe or exqpe on queries and keys, with no --once and no --learn")

def losses_of(run):
    """A row for each format and multiple of the trained length, with the mean loss of each document's last targets."""
    model, record = load_model(run, Rounded)
    context = model.config.context
    rows = []
    settings = Settings(context, MULTIPLES[-1] * context, context // 2, 1, None)
    bar = SimpleNamespace(update=int)
    documents = usable(held_out(run, record, "val", None)[1], settings.longest, None)
    for model.format, multiple in itertools.product(FORMATS, MULTIPLES):
        [windows] = same_targets(documents, multiple * context, settings)
        rows.append({"run": run, "seed": record["train"]["seed"], "format": model.format, "multiple": multiple}
                    | summary([windows], [model.window_losses(windows, bar)]))
    return rows

def main(argv=None):
    parser = CommandLine(prog="python -m studies.dither", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories of train.py, with expe or exqpe")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers as a list")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = []
        for i, run in enumerate(args.runs):
            check(run)
            if run in args.runs[:i]:
                raise InputError(f"{run} is named twice: name each run once")
        for run in tqdm(args.runs, unit="run", leave=False, disable=None, bar_format=BAR):
            rows += losses_of(run)
        if args.json:
            write_rows(args.json, rows)
        by_variant = {}
        for row in rows:
            name = re.sub("-s[0-9]+$", "", row["run"].rstrip("/"))
            by_variant.setdefault(name, {}).setdefault((row["multiple"], row["format"]), []).append(row)
        print("the loss, and by how much it rises if the table is rounded: 95% intervals\n")
        print(" " * 9 + "".join(f"{format:>23}" for format in FEWER))
        for name, losses in by_variant.items():
            print(name)
            for multiple in MULTIPLES:
                exact = losses[multiple, "fp32"]
                rises = [paired(losses[multiple, format], exact).replace(",", "") for format in FEWER]
                mean = np.mean(np.array([row["loss"] for row in exact], dtype=float))   # nan, if one is not finite
                print(f"{multiple:2}x {mean:.3f}" + ("{:>23}" * 3).format(*rises))

if __name__ == "__main__":
    main()
