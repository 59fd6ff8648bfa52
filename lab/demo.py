"""A tour in one go: train three encodings shortly, evaluate, draw and generate, and a page that shows what happened.

    python -m lab.demo                   writes runs/demo/index.html; `make demo` sets up what it needs first

The runs are short ones of the preset `mini`. What was trained is kept: a tour that was stopped goes on.
"""

import contextlib
import html
import io
import json
import shlex
from pathlib import Path

import generate
import train
from common import CommandLine, at_least, read_run, read_text, write_text
from config import InputError
from lab import curves, measure
from lab.pictures import name as name_of

FOLDER = Path("runs/demo")
DOCUMENTS = 8
RUNS = {                                 # name: flags of train.py, and what there is to see
    "rope": ("--pe rope", "RoPE turns queries and keys by angles. Past the trained length it meets distances that it "
             "never saw."),
    "expe": ("--pe expe --l 24", "ExPE writes the position into what enters W_q and W_k. The slope that it gives to a "
             "distance grows with the query's own position."),
    "expe-on-k": ("--pe expe --l 24 --on k", "ExPE-K overrides only the keys: its scores know distances."),
}
PROMPT = "def main("
NEXT = (
    ("the full runs, some minutes each", 'make train PE="expe rope sinusoidal"'),
    ("the same targets with more and more context", "python -m lab.measure runs/demo/*/ --protocol same-targets"),
    ("your own text, a file or folder of it", "python train.py --pe expe --on k --data my_books/"),
)
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } img { max-width: 100% }
pre { overflow-x: auto; padding: .6rem; border: 1px solid }
"""

def call(main, *words):
    """Run a script of ours in this process, and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(shlex.split(" ".join(map(str, words))))
    return printed.getvalue()

def tour(steps):
    """Train, evaluate, draw and generate; returns (rows of lab.measure, {run: text})."""
    for name, (flags, _) in RUNS.items():
        run = FOLDER / name
        print(f"training {run}: {steps:,} steps", flush=True)
        resume = "--resume" if (run / "config.json").exists() else ""
        train.main(shlex.split(f"--preset mini {flags} --steps {steps} --out {run} {resume}"))
    print("evaluating at 1 to 16 times the trained length", flush=True)
    runs = " ".join(str(FOLDER / name) for name in RUNS)
    call(measure.main, runs, f"--max-docs {DOCUMENTS} --json {FOLDER}/loss.json --plot {FOLDER}/loss.png")
    call(curves.main, runs, f"--out {FOLDER}/training.png")
    print("generating", flush=True)
    texts = {name: call(generate.main, FOLDER / name, f"--prompt '{PROMPT}' --tokens 120 --temperature 0.7")
             for name in RUNS}
    return json.loads(read_text(FOLDER / "loss.json")), texts

def page(rows, texts, steps):
    """The HTML of what happened, with its pictures beside it."""
    lengths = sorted({row["length"] for row in rows})
    heads = "".join(f"<th>{length:,}</th>" for length in lengths)
    losses = {name: [row["loss"] for row in rows if row["run"] == str(FOLDER / name)] for name in RUNS}
    lines = "".join(f"<tr><td>{name_of(run)}</td>{''.join(f'<td>{x:.3f}</td>' for x in values)}</tr>"
                    for run, values in losses.items())
    seen = "".join(f"<li><b>{name_of(run)}</b> (<code>{flags}</code>). {words} From {lengths[0]:,} to {lengths[-1]:,} "
                   f"tokens its loss went by {losses[run][-1] - losses[run][0]:+.3f}.</li>"
                   for run, (flags, words) in RUNS.items())
    wrote = "".join(f"<h3>{name_of(run)}</h3><pre>{html.escape(text)}</pre>" for run, text in texts.items())
    more = "".join(f"<p>{html.escape(what)}:</p><pre>{html.escape(command)}</pre>" for what, command in NEXT)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>Exact positional encodings: a tour</title>"
            f"<style>{STYLE}</style><h1>What happens past the trained length</h1>"
            f"<p>Three models were trained just now on windows of {lengths[0]} tokens, {steps:,} steps each: the same "
            f"data, first weights and order, and another encoding of the position.</p>"
            f"<h2>What you see</h2><img src=loss.png alt='loss against the length of the window'><table><tr><th>loss, "
            f"nats a token, in windows of</th>{heads}</tr>{lines}</table><p>The same tokens of {DOCUMENTS} held-out "
            f"documents are scored in every column.</p><ul>{seen}</ul><p>These runs are short. Trained for "
            f"longer, RoPE and ExPE lose more past the trained length, and differ more: the README has them after "
            f"1,600 steps.</p><h2>How they were trained</h2><img "
            f"src=training.png alt='losses, norm of the gradient and learning rate by tokens seen'>"
            f"<h2>What they write after <code>{html.escape(PROMPT)}</code></h2>{wrote}<h2>Next</h2><p>After "
            f"<code>source .venv/bin/activate</code>:</p>{more}</html>\n")

def main(argv=None):
    parser = CommandLine(prog="python -m lab.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=at_least(1), default=600, metavar="N", help="of each run (default: 600)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        for run in (FOLDER / name for name in RUNS if (FOLDER / name / "config.json").exists()):
            if (steps := read_run(run)[1].steps) != args.steps:
                raise InputError(f"{run} is there, of {steps:,} steps: give --steps {steps}, or delete {FOLDER}")
        rows, texts = tour(args.steps)
        write_text(FOLDER / "index.html", page(rows, texts, args.steps))
        print(f"\nopen {FOLDER}/index.html")

if __name__ == "__main__":
    main()
