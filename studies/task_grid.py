"""The grid `tasks`: which encoding solves which task of studies/tasks.py, at its trained length and past it.

    python -m lab.reproduce tasks --jobs 2

1. Trials, with seed 0: three learning rates for every encoding, and with each of them three values of the encoding's
   own knob where it has one. The first that reaches SOLVED at the trained length is chosen, and the rest of them are
   left out; if none does, the one with the highest accuracy is. Nothing longer is looked at.
2. The chosen values with fresh seeds, on 512 sequences at 1, 2, 4 and 16 times the trained length, as far as a task
   allows. None is trained on; those of the trained length are the trials' own.

Every task has one small model and one number of steps for all encodings. flip-flop@512 and the like are tasks with the
model and the length of a paper, for the methods of which it has numbers (PUBLISHED), at that length alone. A
run's files are in its directory under runs/tasks/. The report gathers them in results/tasks/, a JSON file for each
task, and makes the pages from these.
"""

import itertools
import math
import re
from pathlib import Path

from lab.files import read_json
from studies.tasks import find

PLACE = "tasks"
TITLE = "Tasks on which positions decide: who solves which, at the trained length and past it"
SEED = 0                                 # of the trials
SOLVED = 0.999                           # accuracy at the trained length at which no better values are looked for
SMALL = "--width 64 --heads 2 --eval-every 100000 --checkpoint-every 100000"
SETTINGS = {                             # of every run of a task
    "even-pairs": "--context 40 --layers 1 --batch-size 32 --steps 1200",
    "first-last": "--context 64 --layers 2 --batch-size 16 --steps 1500",
    "back-3": "--context 64 --layers 1 --batch-size 16 --steps 800",
    "back-8": "--context 64 --layers 1 --batch-size 16 --steps 800",
    "flip-flop": "--context 128 --layers 2 --batch-size 8 --steps 1000",
    "copy": "--context 26 --layers 2 --batch-size 32 --steps 2000",
    "sort": "--context 26 --layers 2 --batch-size 32 --steps 800",
    "needle": "--context 32 --layers 2 --batch-size 16 --steps 1000",
    "mqar": "--context 32 --layers 2 --batch-size 32 --steps 1200",
    "indirect": "--context 22 --layers 2 --batch-size 32 --steps 400",
    "reverse": "--context 26 --layers 2 --batch-size 32 --steps 1500",
    "duplicate": "--context 26 --layers 2 --batch-size 32 --steps 1500",
    "flip-flop@512": "--context 512 --layers 1 --batch-size 8 --steps 2000",
}
PUBLISHED = {                            # a setting: the methods, with default values
    "flip-flop@512": ("rope", "fox", "nope-stick", "path"),             # arXiv 2505.16381, table 1
}
RATES = {"lr1": "--lr 1e-3", "lr3": "--lr 3e-3", "lr10": "--lr 1e-2"}    # at the lowest, fewer seeds fail on first-last
THETA = "--theta {}/{{context}}"
KNOBS = {                                # method: flags, {name of a value: flags}; the default is one of three
    "expe": ("--pe expe", {"": "", "x16": THETA.format(4), "x64": THETA.format(16)}),
    "expe-on-k": ("--pe expe --on k", {"": "", "x16": THETA.format(4), "x1024": THETA.format(256)}),
    "rope": ("--pe rope", {"": "", "base100": "--base 100", "base1000000": "--base 1000000"}),
    "alibi": ("--pe alibi", {"": "", "x4": "--slopes 4", "x16": "--slopes 16"}),
    "fox": ("--pe fox", {"": ""}),
    "kerple": ("--pe kerple", {"": ""}),
}
OTHERS = {pe: (f"--pe {pe}", {"": ""}) for pe in (
    "shaw", "t5", "nope", "sinusoidal", "learned", "exqpe", "cope", "fire", "grape", "partial", "proportional", "xpos")}
NEW = {pe: (f"--pe {pe}", {"": ""}) for pe in (
    "pope", "cable", "dape", "selective_rope", "path", "path_fox", "rove")} | {
    "nope-stick": ("--pe nope --softmax stick", {"": ""})}
DRAWN = "--random-positions {far}"       # up to 16 times the trained length (Ruoss et al. 2023)
RANDOM = {f"{name}-random": (f"{flags} {DRAWN}", {"": ""}) for name, flags in {
    "expe": "--pe expe", "expe-on-k": "--pe expe --on k", "rope": "--pe rope",
    "learned": "--pe learned --n-positions {far}"}.items()}
RANDOM_TASKS = ("first-last", "copy", "reverse")
MORE = {f"flip-flop{at}": (f"flip-flop-sparse{at}", f"flip-flop-dense{at}") for at in ("", "@512")}     # to score, too

ROW = {"length": int, "accuracy": float, "whole": float, "end": float | None, "chance": float, "guess": float}
RUN = {"name": str, "seed": int, "flags": str, "seconds": int | float, "weights": str, "rows": [ROW]}

def methods_of(task):
    """{method: (flags, {name of a value: flags})} that are trained on a task."""
    methods = KNOBS | OTHERS | NEW | (RANDOM if task in RANDOM_TASKS else {})
    return {name: (methods[name][0], {"": ""}) for name in PUBLISHED[task]} if task in PUBLISHED else methods

def task_of(name):
    """The task of studies/tasks.py of which a name of SETTINGS or MORE is."""
    return name.partition("@")[0]

def context_of(task):
    return int(re.search(r"--context (\d+)", SETTINGS[task])[1])

def names_of(task, method):
    """{name: flags} of a method's trials on a task, in the order in which they are tried."""
    flags, knob = methods_of(task)[method]
    context = context_of(task)
    trials = {}
    for (value, more), (rate, lr) in itertools.product(knob.items(), RATES.items()):
        name = "-".join(filter(None, (f"{task}.{method}", value, rate)))
        more = f"{flags} {more}".format(context=context, far=16 * context)
        trials[name] = f"--data task:{task_of(task)} {SETTINGS[task]} {SMALL} {more} {lr}"
    return trials

def variants():
    """{name: flags of train.py} of every trial, for lab/grids.py."""
    return {name: flags for task in SETTINGS for method in methods_of(task)
            for name, flags in names_of(task, method).items()}

def runs(seeds, accuracy):
    """(variant, seed, evaluations) of every run that can be known by the trials' accuracies so far.

    The six of KNOBS come first, task by task; then the others, method by method, and NEW last.
    """
    for methods in (KNOBS, RANDOM, OTHERS, NEW):
        by_task = itertools.product(SETTINGS, methods)
        by_method = ((task, method) for method in methods for task in SETTINGS)
        for task, method in by_task if methods is KNOBS else by_method:
            if method not in methods_of(task):
                continue
            tried, best = trials(list(names_of(task, method)), accuracy)
            yield from ((name, SEED, ("trial",)) for name in tried)
            if best is not None:
                names = ("accuracy", *MORE.get(task, ()))
                yield from ((best, seed, names) for seed in seeds[: None if method in KNOBS else 2])

def trials(names, accuracy):
    """(the names that are tried, as far as that is known; the chosen one, or None before that is known)."""
    best = None
    for n, name in enumerate(names, start=1):
        if (value := accuracy(name)) is None:
            return names[:n], None
        if best is None or value > best[0]:
            best = value, name
        if value >= SOLVED:
            break
    return names[:n], best[1]

def evaluation(name, what, run):
    """(file, words of eval.py's command line) of an evaluation of a run: a trial's, a final's, or of another task."""
    task, _, method = name.partition(".")
    context = context_of(task)
    multiples = (1,) if what == "trial" or task in PUBLISHED else (1, 2, 4, 16) if what == "accuracy" else (1, 4)
    longest = find(f"task:{task_of(task)}").longest or math.inf         # where distinct symbols run out
    if re.match("learned-(?!random)", method):                          # a table of positions ends
        longest = context
    lengths = ",".join(str(context * k) for k in multiples if context * k <= longest)
    other = ["--data", f"task:{task_of(what)}"] if what in MORE.get(task, ()) else []
    return run / f"{what}.json", [*other, "--lengths", lengths]

# ---- results/tasks/ --------------------------------------------------------------------------------------------------

def read_results(task):
    """{run's name: what results/tasks/TASK.json says of it}, of today's settings."""
    path = Path("results", PLACE, f"{task}.json")
    file = read_json(path, {"settings": str, "runs": [RUN]}) if path.exists() else {"settings": None}
    return {run["name"]: run for run in file["runs"]} if file["settings"] == settings_of(task) else {}

def settings_of(task):
    """The flags of all runs that are scored on a task: SETTINGS, or those of the task of which it is one of MORE."""
    return SETTINGS[next((trained for trained, tasks in MORE.items() if task in tasks), task)]
