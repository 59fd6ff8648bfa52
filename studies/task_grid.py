"""The grid `tasks`: which encoding solves which task of studies/tasks.py, at its trained length and past it.

    python -m lab.reproduce tasks --jobs 2

1. Trials, with seed 0: three learning rates for every encoding, and three values of its own knob where it has one.
2. The values with the highest accuracy by token at the trained length, with fresh seeds. Nothing longer is looked at.

Every task has one small model and one number of steps for all encodings. eval.py scores the runs on 512 new sequences a
length. results/tasks/ has a JSON file for each run, and tasks.md the table that is made of them.
"""

import itertools
import re
import statistics

from common import write_text
from config import ENCODINGS
from lab.files import read_json
from lab.pictures import name as name_of

PLACE = "tasks"
TITLE = "Tasks on which positions decide: who solves which, at the trained length and past it"
SEED = 0                                 # of the trials
LEARNED = 0.95                           # accuracy at the trained length from which a run has learned its task
EVALUATIONS = ("accuracy",)
SMALL = "--width 64 --heads 2 --eval-every 100000 --checkpoint-every 100000"
SETTINGS = {                             # of every run of a task
    "even-pairs": "--context 40 --layers 1 --batch-size 32 --steps 600",
    "first-last": "--context 64 --layers 2 --batch-size 32 --steps 1500",
    "back-3": "--context 64 --layers 1 --batch-size 32 --steps 1500",
    "back-8": "--context 64 --layers 1 --batch-size 32 --steps 1500",
    "flip-flop": "--context 128 --layers 2 --batch-size 16 --steps 1500",
    "copy": "--context 50 --layers 2 --batch-size 32 --steps 3000",
    "sort": "--context 50 --layers 2 --batch-size 32 --steps 3000",
    "needle": "--context 64 --layers 2 --batch-size 64 --steps 2000",
    "mqar": "--context 64 --layers 2 --batch-size 32 --steps 3000",
    "indirect": "--context 46 --layers 2 --batch-size 64 --steps 3000",
    "reverse": "--context 50 --layers 2 --batch-size 32 --steps 2000",
    "duplicate": "--context 50 --layers 2 --batch-size 32 --steps 2000",
}
RATES = {"lr1": "--lr 1e-3", "lr3": "--lr 3e-3", "lr10": "--lr 1e-2"}
THETA = "--theta {}/{{context}}"
KNOBS = {                                # method: flags, {name of a value: flags}; the default is one of three
    "expe": ("--pe expe", {"": "", "x16": THETA.format(4), "x64": THETA.format(16)}),
    "expe-on-k": ("--pe expe --on k", {"": "", "x16": THETA.format(4), "x1024": THETA.format(256)}),
    "rope": ("--pe rope", {"": "", "base100": "--base 100", "base1000000": "--base 1000000"}),
    "alibi": ("--pe alibi", {"": "", "x4": "--slopes 4", "x16": "--slopes 16"}),
    "fox": ("--pe fox", {"": ""}),
    "kerple": ("--pe kerple", {"": ""}),
}
OTHERS = {pe: (f"--pe {pe}", {"": ""}) for pe in ENCODINGS if pe not in KNOBS}

def names_of(task, method):
    """{name: flags} of the trials of a method on a task."""
    flags, knob = (KNOBS | OTHERS)[method]
    context = re.search(r"--context (\d+)", SETTINGS[task])[1]
    trials = {}
    for (value, more), (rate, lr) in itertools.product(knob.items(), RATES.items()):
        name = "-".join(filter(None, (f"{task}.{method}", value, rate)))
        trials[name] = f"--data task:{task} {SETTINGS[task]} {SMALL} {flags} {more.format(context=context)} {lr}"
    return trials

def variants():
    """{name: flags of train.py} of every trial, for lab/grids.py."""
    pairs = itertools.product(SETTINGS, KNOBS | OTHERS)
    return {name: flags for task, method in pairs for name, flags in names_of(task, method).items()}

def runs(seeds, accuracy):
    """(variant, seed, evaluations) of every run that can be known by the trials' accuracies so far, task by task."""
    for task in SETTINGS:
        for method in KNOBS | OTHERS:
            names = list(names_of(task, method))
            yield from ((name, SEED, EVALUATIONS) for name in names)
            if (best := best_of(names, accuracy)) is not None:
                yield from ((best, seed, EVALUATIONS) for seed in (seeds if method in KNOBS else seeds[:2]))

def best_of(names, accuracy):
    """The name with the highest accuracy, the first of equal ones; None as long as any is missing."""
    values = [accuracy(name) for name in names]
    return None if None in values else names[values.index(max(values))]

# ---- the page --------------------------------------------------------------------------------------------------------

def report(folder):
    """Write tasks.md of a folder of results, a table a task; returns its part of the index."""
    files = {path.name.removesuffix(".accuracy.json"): read_json(path, [{"accuracy": float, "length": int}])
             for path in sorted(folder.glob("*.accuracy.json"))}

    def accuracy(name):
        rows = files.get(f"{name}-s{SEED}")
        return rows[0]["accuracy"] if rows else None

    words = f"""Accuracy by token in %: the mean of the seeds that learned the task, which have {LEARNED:.0%} or more at
the trained length, or of all seeds if none did. Three learning rates, and three values of a method's knob, are tried
with another seed; the column "values" has the best. The guess knows the symbols and no positions.

```
python -m lab.reproduce tasks
```
"""
    parts = [f"# {TITLE}\n", words]
    for task, settings in SETTINGS.items():
        rows = []
        for method in KNOBS | OTHERS:
            best = best_of(list(names_of(task, method)), accuracy)
            finals = [files[name] for name in (f"{best}-s{seed}" for seed in range(1, 10)) if name in files]
            if finals:
                learned = [final for final in finals if final[0]["accuracy"] >= LEARNED]
                means = [statistics.mean(row["accuracy"] for row in column)
                         for column in zip(*(learned or finals), strict=True)]
                guess = finals[0]
                rows.append((means, [name_of(method), best.partition(f".{method}")[2].strip("-") or "-",
                                     f"{len(learned)} of {len(finals)}", *(f"{100 * x:.1f}" for x in means)]))
        if rows:
            lengths = [row["length"] for row in guess]
            heads = ["method", "values", "learned", *map(str, lengths)]
            line = ["best guess", "", "", *(f"{100 * row['guess']:.1f}" for row in guess)]
            rows.sort(key=lambda row: -row[0][min(2, len(row[0]) - 1)])
            cells = [cells + [""] * (len(heads) - len(cells)) for _, cells in rows]
            table = "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *cells, line))
            parts.append(f"## {task}\n\n`{settings}`\n\n{table}")
    if len(parts) == 2:
        return []
    write_text(folder / "tasks.md", "\n".join(parts))
    return [f"\n## {folder.name}\n\n- [{TITLE}]({folder.name}/tasks.md)\n"]
