"""The results of a study: a file of lines of JSON that is only ever appended to.

    {"study": NAME, "title", "preset", "seeds", "runs", "chosen"}      what was asked
    {"data": KEY, "source", "vocab", "splits"}            the tokens that runs were trained on
    {"run": NAME, "seed", "command", "data", "context", "parameters", "tokens", "seconds", "sha256", "commit",
     "machine", "code"}                                   a training; sha256 is that of its checkpoint.safetensors,
                                                          code has the hashes of codehash.py; older ones have none
    {"targets": KEY, "text", "counts"}                    what was scored: targets in each unit (a document, a trial)
    {"measure": NAME, "run", "seed", "flags", "sha256", "rows": [{"protocol", "how", "length", "targets", "losses"}]}
                                                          a measurement: the mean loss of each unit at each length;
                                                          sha256 begins as the run's

A run or a measurement that was made again is a further line, and the last one counts. Means, gains and intervals are
not stored: lab.table computes them.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import lock, progress, read_text
from config import InputError

LEARNED = 0.95                           # accuracy at the trained length, from which a run has learned its task

class Row(NamedTuple):
    """One measurement of one run at one length."""

    run: str                             # its name without the seed
    how: str                             # how positions were scaled or keys hidden; "" as trained
    seed: int
    measure: str
    protocol: str
    length: int
    context: int                         # the trained length
    loss: float | None                   # or a probe's gain, or a task's accuracy
    losses: np.ndarray | None            # of each unit: a document or a trial
    counts: np.ndarray | None            # targets in each unit
    targets: str                         # equal for rows that scored the same
    more: dict                           # what else the row has
    chosen: bool = False                 # whether this seed chose the run's values

    @property
    def line(self):
        return ", ".join(filter(None, (self.run, self.how)))

    @property
    def at(self):
        return self.length / self.context

def progress_of(row):
    """"step 140 of 1,600" of a row of --json whose run was not finished; "" of others."""
    return progress(row["step"], row["steps"]) if "steps" in row else ""          # older files have no steps

def unfinished(rows, line):
    """" (step 140 of 1,600)" of a line of a table, with the seed if it has several; "" if its runs were finished."""
    its = [row for row in rows if row.line == line]
    alone = len({row.seed for row in its}) == 1
    words = dict.fromkeys(f"seed {row.seed}: " * (not alone) + progress_of(row.more) for row in its
                          if progress_of(row.more))
    return f" ({', '.join(words)})" if words else ""

def is_gain(rows):
    """Whether Rows are of a probe, whose loss is a gain."""
    return any("without" in row.more or "gain" in row.more for row in rows)

class Results(NamedTuple):
    """The lines of a file, each by what it is of."""

    study: dict
    facts: dict                          # {key: a line of data or targets}
    runs: dict                           # {(run, seed): line}
    measured: dict                       # {(run, seed, measure): line}

def read_results(path):
    """The Results of a file, without a last line that a kill cut short; empty ones if there is no such file."""
    results = Results({}, {}, {}, {})
    text = read_text(path) if Path(path).exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            line = json.loads(line)
            if "measure" in line:
                line["flags"], line["sha256"], line["rows"]            # without one of them it is no measurement
                results.measured[line["run"], line["seed"], line["measure"]] = line
            elif "run" in line:
                line["command"], line["sha256"], line["context"]
                results.runs[line["run"], line["seed"]] = line
            elif "study" in line:
                results.study.update(line)
            else:
                results.facts[line.get("data") or line["targets"]] = line
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path}, line {number}, is no line of results: mend or remove it") from None
    return results

def append(path, *lines):
    """Add lines to a file of results at once, after what is whole of it; facts that it has are left out."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.parent, wait=True):
        known = read_results(path)
        lines = [line for line in lines if line != known.study
                 and ("run" in line or line.get("data", line.get("targets")) not in known.facts)]
        with open(path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            written = [json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines]
            file.write("".join(written).encode())
