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

from files import lock, read_text
from runs import describe_progress
from settings import InputError

LEARNED = 0.95                           # accuracy at the trained length, from which a run has learned its task

class Row(NamedTuple):
    """One measurement of one run at one length."""

    run: str                             # its name without the seed
    condition: str                       # how positions were scaled or keys hidden; "" as trained
    seed: int
    measure: str                         # the measure's name in its study, or the protocol
    protocol: str
    length: int
    context: int                         # the trained length
    value: float | None                  # a loss, a probe's gain, or a task's accuracy
    unit_values: np.ndarray | None       # the same for each unit: a document or a trial
    unit_counts: np.ndarray | None       # targets in each unit
    targets: str                         # equal for rows that scored the same targets
    details: dict                        # what else the file says of this measurement, its targets and its run
    chosen: bool = False                 # whether this seed chose the run's values
    file: str = ""                       # of which file of results, or of --json, it was read

    @property
    def label(self):
        """What the line of this row is called in a table."""
        return ", ".join(filter(None, (self.run, self.condition)))

    @property
    def multiple(self):
        """The length as a multiple of the trained one."""
        return self.length / self.context

def describe_row_progress(details):
    """"step 140 of 1,600" of a row of --json whose run was not finished; "" of others."""
    return describe_progress(details["step"], details["steps"]) if "steps" in details else ""   # older files have none

def describe_unfinished(rows, label):
    """" (step 140 of 1,600)" of a line of a table, with the seed if it has several; "" if its runs were finished."""
    line_rows = [row for row in rows if row.label == label]
    several = len({row.seed for row in line_rows}) > 1
    words = []
    for row in line_rows:
        if steps := describe_row_progress(row.details):
            words.append(f"seed {row.seed}: {steps}" if several else steps)
    return f" ({', '.join(dict.fromkeys(words))})" if words else ""

def is_gain(rows):
    """Whether Rows are of a probe, whose value is a gain."""
    return any("without" in row.details or "gain" in row.details for row in rows)

# ---- reading and appending -------------------------------------------------------------------------------------------

def is_text(x):
    return type(x) is str

def is_count(x):
    return type(x) is int and x >= 0

def is_size(x):
    return type(x) is int and x >= 1

def is_number(x):
    return type(x) in (int, float)

def is_share(x):
    return is_number(x) and 0 <= x <= 1

def is_loss_of_targets(x):
    return type(x) is list and len(x) == 2 and all(map(is_number, x))

def list_of(check):
    return lambda x: type(x) is list and all(map(check, x))

def dict_of(check):
    return lambda x: type(x) is dict and all(map(check, x.values()))

def or_null(check):
    return lambda x: x is None or check(x)

MISSING = object()                       # the value of a field that a line lacks

def optional(check):
    return lambda x: x is MISSING or check(x)

def find_wrong_field(line, checks):
    """The name of the first field of {field: check} that a line lacks, or whose value fails the check; or None."""
    return next((name for name, check in checks.items() if not check(line.get(name, MISSING))), None)

LINE_FIELDS = {                          # {the first of these fields that a line has says its kind: {field: check}}
    "measure": {"measure": is_text, "run": is_text, "seed": is_count, "flags": is_text, "sha256": is_text,
                "rows": list_of(lambda row: type(row) is dict)},
    "run": {"run": is_text, "seed": is_count, "command": is_text, "context": is_size, "sha256": is_text,
            "data": optional(is_text), "parameters": optional(is_size), "tokens": optional(is_count),
            "code": optional(or_null(dict_of(is_text)))},
    "study": {"study": is_text, "runs": optional(list_of(is_text)), "chosen": optional(dict_of(list_of(is_count)))},
    "data": {"data": is_text, "source": is_text},
    "targets": {"targets": is_text, "counts": lambda x: list_of(is_count)(x) and sum(x) > 0, "text": optional(is_text),
                "guess": optional(is_share)}}
ROW_FIELDS = {                           # of each row of a measurement
    "protocol": is_text, "length": is_size, "how": optional(is_text), "targets": optional(is_text),
    "by_distance": optional(dict_of(is_loss_of_targets))}

def find_wrong_in_line(line, facts):
    """The first field of a line that is missing, or of another type, or does not fit the facts before it; or None.

    facts: {key: a line of data or targets}, as Results has them.
    """
    kind = next((name for name in LINE_FIELDS if type(line) is dict and name in line), None)
    if kind is None:
        return "the field that says what it is of"
    if wrong := find_wrong_field(line, LINE_FIELDS[kind]):
        return wrong
    if kind == "run" and line.get("parameters") and not (
            line.get("tokens") is not None and "source" in facts.get(line.get("data"), {})):
        return "data"                                                   # old lines of tasks have no parameters
    for row in line.get("rows", ()):
        if wrong := find_wrong_in_row(row, facts):
            return f"{wrong} in a row"

def find_wrong_in_row(row, facts):
    """The first such field of a row of a measurement; or None."""
    if wrong := find_wrong_field(row, ROW_FIELDS):
        return wrong
    fact = facts.get(row.get("targets"), {})
    if row["protocol"] == "task":
        if not is_share(row.get("accuracy")):
            return "accuracy"
        return "targets" if fact.get("guess") is None else None
    if "losses" not in row:
        return "losses"
    if row["losses"] is not None:
        if "counts" not in fact:
            return "targets"
        for name in {"losses", "without"} & row.keys():
            if not list_of(is_number)(row[name]) or len(row[name]) != len(fact["counts"]):
                return name

NUMBERS = optional(or_null(list_of(is_number)))
JSON_FIELDS = {                          # of each row of --json
    "run": is_text, "protocol": is_text, "how": is_text, "data": is_text, "length": is_size,
    "trained_length": is_size, "loss": or_null(is_number), "gain": optional(or_null(is_number)),
    "accuracy": optional(is_share), "guess": optional(is_share), "n_targets": optional(is_count),
    "targets_sha256": optional(is_text), "unit_losses": NUMBERS, "unit_losses_without": NUMBERS,
    "unit_targets": optional(or_null(list_of(is_count))), "by_distance": ROW_FIELDS["by_distance"],
    "step": optional(is_count), "steps": optional(is_size), "code": optional(or_null(dict_of(is_text)))}

def find_wrong_in_units(row):
    """The field that does not fit the others of a row of --json; or None."""
    if "steps" in row and "step" not in row:
        return "step"
    if row["protocol"] == "task":
        return next((name for name in ("accuracy", "guess") if name not in row), None)
    if row.get("unit_losses") is not None:
        units = [row[name] or [] for name in ("unit_losses", "unit_targets", "unit_losses_without") if name in row]
        if len({len(numbers) for numbers in units}) > 1 or not sum(row.get("unit_targets") or []):
            return "unit_targets"
        if "unit_losses_without" in row and row.get("gain") is None:
            return "gain"

def read_rows(path):
    """The rows of a file that --json of eval.py or lab.measure wrote; InputError that names the first wrong one."""
    try:
        rows = json.loads(read_text(path), parse_int=read_number)      # a loss may be NaN
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no file of results or of --json: {error}") from None
    for number, row in enumerate(rows, start=1):
        wrong = find_wrong_field(row, JSON_FIELDS) if type(row) is dict else "every field"
        wrong = wrong or find_wrong_in_units(row)
        if wrong:
            raise InputError(f"{path} is no file of results or of --json: in row {number} {wrong} is missing or wrong")
    return rows

def read_number(text):
    """A finite float from JSON, or an int of 64 bits."""
    value = float(text) if set(text) & set(".eEnN") else int(text)
    if not abs(value) < 2**63:
        raise ValueError(f"{text} is no finite number of 64 bits")
    return value

class Results(NamedTuple):
    """The lines of a file by their kind."""

    study: dict
    facts: dict                          # {key: a line of data or targets}
    runs: dict                           # {(run, seed): line}
    measured: dict                       # {(run, seed, measure): line}

def read_results(path):
    """The Results of a file, without a last line that a kill cut short; empty ones if there is no such file.

    InputError that names the first line which is not as the head of this file says.
    """
    results = Results({}, {}, {}, {})
    text = read_text(path) if Path(path).exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            line = json.loads(line, parse_float=read_number, parse_int=read_number, parse_constant=read_number)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}, is no line of results: {error}; mend or remove it") from None
        if wrong := find_wrong_in_line(line, results.facts):
            raise InputError(f"{path}, line {number}, is no line of results: {wrong} is missing or wrong; mend or "
                             "remove it")
        if "measure" in line:
            results.measured[line["run"], line["seed"], line["measure"]] = line
        elif "run" in line:
            results.runs[line["run"], line["seed"]] = line
        elif "study" in line:
            results.study.update(line)
        else:
            results.facts[line.get("data", line.get("targets"))] = line
    return results

def append(path, *lines):
    """Add lines to a file of results in one write; a last line that a kill cut short, and facts that it has, go."""
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
