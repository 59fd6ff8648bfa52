"""How runs were trained: loss, validation loss, gradient norm and learning rate, by tokens seen.

    python -m lab.curves RUN RUN --out curves.png     four panels, a curve a run

No model is loaded, and a run that is still in training is shown as far as it has come, with its step. The numbers are
in each run's log.jsonl, a line of JSON a step.
"""

import itertools
import json
from pathlib import Path

from cli import PICTURES, CommandLine, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from files import read_text
from lab import pictures
from runs import describe_progress, read_named, read_run, warn_of_changes
from settings import InputError

POINTS = 100                             # of the longest run's curve, about: a mean over as many steps of each run

def read_log(run):
    """[{"step", "tokens", "loss", "grad_norm", "lr", "val_loss" where there is one}] of a run, by steps.

    InputError for a line that train.py did not write; the last may be what a kill left of one, or is being written.
    """
    (model, train, _) = read_run(run)
    path = Path(run) / "log.jsonl"
    lines = {}
    for text in (text for text in read_text(path).splitlines(keepends=True) if text.endswith("\n")):
        try:
            line = json.loads(text)
            line.pop("resumed", None)                         # where and how the run went on
            step = int(line["step"])
            lines.setdefault(step, {"tokens": step * train.batch_size * model.context}).update(
                {key: float(value) for key, value in line.items()})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path} holds a line that train.py did not write: mend or remove it") from None
    return [lines[step] for step in sorted(lines)]

def curve(lines, key, size):
    """(tokens, values) of what lines have at a key, each the mean over `size` steps."""
    there = [(line["step"] - 1, line["tokens"], line[key]) for line in lines if key in line]
    parts = [list(part) for _, part in itertools.groupby(there, lambda point: point[0] // size)]
    return np.array([np.mean(part, axis=0)[1:] for part in parts]).reshape(-1, 2).T

def main(argv=None):
    parser = CommandLine(prog="python -m lab.curves", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    parser.add_argument("--out", type=new_file(*PICTURES), required=True, metavar="FILE", help="the picture")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        runs = {str(run): lines for run, lines in read_named(args.runs, read_log).items()}
        size = max(1, max(map(len, runs.values())) // POINTS)
        unfinished = {run: describe_progress(int(lines[-1]["step"]) if lines else 0, read_run(run)[1].steps)
                      for run, lines in runs.items()}
        for run in runs:
            warn_of_changes(run)
        pictures.training(args.out, {run: {key: curve(lines, key, size) for key in pictures.PANELS}
                                     for run, lines in runs.items()}, unfinished)
        print(f"{len(runs)} run{'s' * (len(runs) > 1)}: {args.out}")

if __name__ == "__main__":
    main()
