"""The pages and pictures of the grid `tasks`: results/tasks/, from the files of its runs.

    python -m studies.task_pages             prints the first table of docs/tasks.md, from results/tasks/ alone
    python -m studies.task_pages --newer     prints that of the methods that were added later
    python -m studies.task_pages --paper     prints its table of a flip-flop beside a paper's numbers
"""

import json
import statistics
from pathlib import Path

from common import CommandLine, write_text
from config import InputError
from lab import pictures
from lab.files import read_json
from studies.task_grid import (
    KNOBS,
    MORE,
    NEW,
    OTHERS,
    PLACE,
    ROW,
    SEED,
    SETTINGS,
    TITLE,
    methods_of,
    names_of,
    settings_of,
    trials,
)
from studies.task_grid import read_results as read

SHOWN = (1, 4)                           # times the trained length
LEARNED = 0.95                           # accuracy at the trained length from which a run has learned its task
TRAINING = {"variant": str, "seed": int, "command": str, "seconds": int | float, "weights": str}
FLIP_FLOP = {                            # errors in %: in distribution, sparse, dense (arXiv 2505.16381, table 1)
    "rope": "6.9, 40.3, 0.01", "fox": "8.3, 36.3, 0", "nope-stick": "9.6, 38.9, 0", "path": "0, 0.0001, 0"}
WORDS = f"""Accuracy by token in %: the mean of the seeds that learned the task, which have {LEARNED:.0%} or more at the
trained length, or of all seeds if none did. The values were chosen with another seed, by the accuracy at the trained
length alone. The best guess knows the symbols and no positions. A name with @ is a task with the model and the length
of a paper.

```
python -m lab.reproduce tasks
```
"""

def report(folder):
    """Write results/tasks/ and its pictures; returns its part of the index."""
    gather(folder)
    results = all_finals()
    if not results:
        return []
    seconds = sum(run["seconds"] for task in SETTINGS for run in read(task).values())
    parts = [f"# {TITLE}\n", WORDS, f"All runs together took {seconds / 3600:.1f} core-hours of training.\n"]
    Path("pictures").mkdir(exist_ok=True)
    ours = without_published(results)
    for path, draw, words, methods in (
            ("tasks-lengths.png", pictures.panels, "Accuracy by length", list(KNOBS)),
            ("tasks-map.png", pictures.heat, "Accuracy at the trained length and at 4 times it, as far as a task goes",
             [method for method in (*KNOBS, *OTHERS, *NEW) if any(method in found for found in ours.values())])):
        draw(Path("pictures", path), ours, words, methods)
        parts.append(f"![{words}](../../pictures/{path})\n")
    parts += [f"## {task}\n\n`{settings_of(task)}`\n\n{table(methods)}" for task, methods in results.items()]
    write_text(folder / "tasks.md", "\n".join(parts))
    return [f"\n## {PLACE}\n\n- [{TITLE}]({PLACE}/tasks.md)\n"]

def gather(folder):
    """Write the files of runs/tasks/ into results/tasks/TASK.json, beside what is there of the same settings."""
    runs = {}
    for path in sorted(Path("runs", PLACE).glob("*/run.json")):
        run = read_json(path, TRAINING)
        trained = run["variant"].partition(".")[0]
        scores = {"trial": trained, "accuracy": trained} | {task: task for task in MORE.get(trained, ())}
        for name, task in scores.items():
            file = path.with_name(f"{name}.json")
            if trained in SETTINGS and file.exists():
                named = runs.setdefault(task, read(task))
                named[path.parent.name] = {
                    "name": path.parent.name, "seed": run["seed"], "flags": run["command"].partition(" --data ")[2],
                    "seconds": run["seconds"], "weights": run["weights"],
                    "rows": [{key: row[key] for key in ROW} for row in read_json(file, [ROW])]}
    for task, named in runs.items():
        settings = json.dumps(settings_of(task))
        lines = ",\n".join(json.dumps(named[name]) for name in sorted(named))
        write_text(folder / f"{task}.json", f'{{"settings": {settings}, "runs": [\n{lines}\n]}}\n')

def finals(task):
    """{method: (its chosen values, the share of seeds that learned the task, the rows of its table)} of a task."""
    runs = read(task)
    trained = next((name for name, tasks in MORE.items() if task in tasks), task)
    tried = read(trained)

    def accuracy(name):
        run = tried.get(f"{name}-s{SEED}")
        return run and run["rows"][0]["accuracy"]

    found = {}
    for method in methods_of(trained):
        _, best = trials(list(names_of(trained, method)), accuracy)
        seeds = [run for name, run in runs.items() if run["seed"] != SEED and name == f"{best}-s{run['seed']}"]
        if seeds:
            learned = [run for run in seeds if tried[run["name"]]["rows"][0]["accuracy"] >= LEARNED]
            rows = [{"length": rows[0]["length"], "guess": rows[0]["guess"]} | {
                key: statistics.mean(row[key] for row in rows) for key in ("accuracy", "whole")}
                for rows in zip(*(run["rows"] for run in learned or seeds), strict=True)]
            found[method] = best.partition(f".{method}")[2].strip("-"), (len(learned), len(seeds)), rows
    return found

def all_finals():
    """{task: finals(task)} of every task that has any."""
    tasks = [task for trained in SETTINGS for task in (trained, *MORE.get(trained, ()))]
    return {task: found for task in tasks if (found := finals(task))}

def without_published(results):
    return {task: found for task, found in results.items() if "@" not in task}

def summary(results, methods=KNOBS):
    """A table of docs/tasks.md: accuracies in % at the trained length and at 4 times it as far as a task goes, in
    brackets the share of seeds that learned the task unless all did."""
    lines = [["task", "trained", *map(pictures.name, methods), "best guess"]]
    lines.append(["---"] * len(lines[0]))
    for task, found in results.items():
        longest = max((rows for _, _, rows in found.values()), key=len)
        cells = []
        for method in methods:
            if method not in found:
                cells.append("")
                continue
            _, (learned, seeds), rows = found[method]
            cells.append(percents(rows, "accuracy") + f" ({learned}/{seeds})" * (learned < seeds))
        lines.append([task, str(longest[0]["length"]), *cells, percents(longest, "guess")])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

def percents(rows, name):
    """The numbers of `name` at SHOWN times the trained length, in %."""
    return ", ".join(f"{100 * row[name]:.0f}" for row in rows if row["length"] / rows[0]["length"] in SHOWN)

def table(methods):
    """The table of a task in Markdown, the best at the longest length that all but learned positions reach first."""
    longest = max((rows for _, _, rows in methods.values()), key=len)
    heads = ["method", "values", "learned", *(f"{row['length']}" for row in longest)]
    lines = []
    for method, (values, (learned, seeds), rows) in methods.items():
        cells = [f"{100 * row['accuracy']:.1f}" for row in rows] + [""] * (len(longest) - len(rows))
        lines.append((rows[min(2, len(rows) - 1)]["accuracy"],
                      [pictures.name(method), values, f"{learned} of {seeds}", *cells]))
    lines.sort(key=lambda line: -line[0])
    guess = ["best guess", "", "", *(f"{100 * row['guess']:.1f}" for row in longest)]
    rows = heads, ["---"] * len(heads), *(row for _, row in lines), guess
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

def beside_paper():
    """The errors in % of the flip-flop of FLIP_FLOP, a number a seed, and those of its table."""
    task = "flip-flop@512"
    found = finals(task)
    if not found:
        raise InputError(f"results/{PLACE}/ has no {task}: python -m lab.reproduce tasks makes it")
    results = [read(scored) for scored in (task, *MORE[task])]
    lines = [["method", "in distribution", "sparse", "dense", "the paper's"], ["---"] * 5]
    for method, (values, _, _) in found.items():
        some = [[run for name, run in runs.items() if run["seed"] != SEED
                 and name == f"{task}.{method}-{values}-s{run['seed']}"] for runs in results]
        cells = [", ".join(f"{100 - 100 * run['rows'][0]['accuracy']:.2f}" for run in runs) for runs in some]
        lines.append([f"{pictures.name(method)}, {values}", *cells, FLIP_FLOP[method]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

def main(argv=None):
    parser = CommandLine(prog="python -m studies.task_pages", description=__doc__)
    either = parser.add_mutually_exclusive_group().add_argument
    either("--newer", action="store_true", help="the methods that were added later")
    either("--paper", action="store_true", help="the flip-flop of PaTH's paper, beside its numbers")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        results = without_published(all_finals())
        complete = [method for method in NEW if all(method in found for found in results.values())]
        print(beside_paper() if args.paper else summary(results, complete if args.newer else KNOBS), end="")

if __name__ == "__main__":
    main()
