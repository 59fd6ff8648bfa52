"""One page that runs trained models in the browser: a text past their trained length, what their heads do, the knobs.

    python -m web.explorer                 trains what is missing of five small runs, and writes explorer.html
    python -m web.explorer RUN RUN ...     of runs that there are, of one data set

The page is one file without links to anything outside: its models' weights in half precision, their tokenizer and some
held-out texts are in it. The files beside this one are its parts; model.js is a third backend, for layernorm and gelu.
"""

import base64
import dataclasses
import json
import os
import re
import shlex
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

import data
import train
from common import CommandLine, at_least, checkpoint_info, load_model, new_file, read_run, read_text, write_text
from config import PRESETS, InputError
from eval import held_out
from lab.measures import usable
from lab.pictures import COLOURS, GREY, changed, colour, names_of, variant_of

WEB = Path(__file__).parent
FOLDER = Path("runs/explorer")
OUT = Path("explorer.html")
RUNS = {                                 # name: flags of train.py
    "expe": "--pe expe",
    "expe-on-k": "--pe expe --on k",
    "rope": "--pe rope",
    "alibi": "--pe alibi",
    "fox": "--pe fox",
}
ENCODINGS = ("nope", "sinusoidal", "expe", "exqpe", "rope", "alibi", "fox")        # those of encodings.js
MULTIPLES, TEXTS = 16, 4                 # the longest length, in trained ones; held-out texts

def train_missing(steps):
    """The run directories of RUNS, each trained if it is not there, or gone on with."""
    for variant, flags in RUNS.items():
        run = FOLDER / variant
        resume = "--resume" if (run / "config.json").exists() else ""
        train.main(shlex.split(f"--preset mini {flags} --steps {steps} --out {run} {resume}"))
    return [FOLDER / variant for variant in RUNS]

def check(run, gpt):
    """InputError unless model.js can read a run's GPT."""
    model = gpt.config
    e = gpt.config.encoding
    plain = {"norm": "layernorm", "mlp": "gelu", "nope_every": 0, "window": 0, "softmax": "plain",
             "causal": True}
    alone = {"learn": "none", "once": False, "scale": 1.0}
    wrong = [f"{key} {getattr(model, key)}" for key, value in plain.items() if getattr(model, key) != value]
    wrong += [f"pe {e.pe}"] * (e.pe not in ENCODINGS)
    wrong += [f"{key} {getattr(e, key)}" for key, value in alone.items() if getattr(e, key, value) != value]
    if wrong:
        raise InputError(f"{run} has {', '.join(wrong)}, and the page reads layernorm and gelu with one of "
                         f"{', '.join(ENCODINGS)}")
    code = "".join((WEB / name).read_text(encoding="utf-8") for name in ("model.js", "encodings.js"))
    for name in gpt.state_dict():
        short = re.sub(r"^blocks\.\d+\.(attn\.)?", "", name)
        if f'["{short}"]' not in code:
            raise InputError(f"{run} has the weights {name}, and the page reads no such part")

def packed(run, tensors):
    """Weights for a page: (halves, all high bytes before all low ones, deflated, in base85 with "," for "<"; bytes)."""
    with np.errstate(over="ignore"):
        halves = np.concatenate([np.ravel(w) for w in tensors.values()]).astype("<f2")
    if not np.isfinite(halves).all():
        raise InputError(f"{run} has weights above 65,504, which half precision can't hold")
    low, high = halves.view(np.uint8).reshape(-1, 2).T
    small = zlib.compress(high.tobytes() + low.tobytes(), 9)
    return base64.b85encode(small, pad=True).decode().replace("<", ","), len(small)

def model_of(run, called, taken):
    """What the page knows of a run: (a dict for JSON, the weights as text). taken: colours that others have."""
    gpt, _ = load_model(run)
    model = gpt.config
    tensors = {name: w.numpy() for name, w in gpt.state_dict().items()}
    check(run, gpt)
    weights, size = packed(run, tensors)
    free = [colour(variant_of(run)), *(each for each in reversed(COLOURS) if each not in taken), GREY]
    flags = [f"--{key}" if x is True else f"--{key} {short}" for key, x, short in changed(model)]
    return {"id": re.sub(r"\W+", "-", Path(run).name), "name": called, "flags": " ".join([f"--pe {model.encoding.pe}",
            *flags]), "colour": free[free[0] in taken], "config": dataclasses.asdict(model), "bytes": size,
            "tensors": [(key, w.shape) for key, w in tensors.items()]}, weights

def texts_of(run, record, length):
    """[{"title", "text"}] of held-out documents of that many tokens or more, cut behind them."""
    _, documents = held_out(run, record, "val", None)
    encoding = data.run_tokenizer(run, record["data"])
    texts = []
    for i, document in enumerate(usable(documents, length, TEXTS)):
        text = encoding.decode([int(token) for token in document[1 : length + 1]], errors="ignore")
        first = next((line for line in text.splitlines() if line.strip()), "")
        texts.append({"title": f"held-out text {i + 1}: {first.strip()[:40]}", "text": text})
    return texts

def links(text, root=WEB.parent):
    """Every {{file: words}} made into file#Ln, n the line that begins with these words."""
    def place(match):
        path, words = match.groups()
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        return f"{path}#L{1 + next(i for i, line in enumerate(lines) if line.startswith(words))}"

    return re.sub(r"\{\{([\w./]+): (.+?)\}\}", place, text)

def page(runs, root=""):
    """The HTML of run directories, of one tokenizer and trained length. root: what leads from it to this repository."""
    called = names_of(runs)
    models = []
    weights = []
    short = Counter(word.partition(",")[0] for word in called.values())    # ExPE-K, theta 0.5
    first, _, record = read_run(runs[0])
    for run in runs:
        model, _, its = read_run(run)
        if its["data"]["tokenizer"] != record["data"]["tokenizer"] or model.context != first.context:
            raise InputError(f"{run} has another tokenizer or trained length than {runs[0]}: compare runs of one kind")
        word = called[run].partition(",")[0]
        made, its = model_of(run, word if short[word] == 1 else called[run], {other["colour"] for other in models})
        if made["id"] in {other["id"] for other in models}:
            raise InputError(f"two runs are called {made['id']}: rename the folder of one")
        models.append(made)
        weights.append(its)
    texts = texts_of(runs[0], record, MULTIPLES * first.context)
    read = [read_run(run) for run in runs]
    either = lambda found: " or ".join(dict.fromkeys(found))  # noqa: E731
    sizes = either(f"{model.n_layers} blocks and {model.d_model} dimensions" for model, _, _ in read)
    tokens = either(f"{checkpoint_info(run)['step'] * how.batch_size * model.context:,}"
                    for run, (model, how, its) in zip(runs, read, strict=True))
    about = (f"{len(runs)} models of {sizes}, trained on {tokens} tokens of "
             f"{either(its['data']['source'] for _, _, its in read)} in windows of {first.context}, here in half "
             f"precision; held-out texts of {record['data']['source']}.")
    known = {"trained": first.context, "models": models, "texts": texts, "about": about, "root": root}
    safe = json.dumps(known).replace("<", "\\u003c")                      # no text may begin or end an element
    parts = {"data": "\n".join([
        f'<script type="application/json" id="data">{safe}</script>',
        f'<script type="text/plain" id="tokenizer">{read_text(Path(runs[0]) / "tokenizer.tiktoken")}</script>',
        *(f'<script type="text/plain" id="weights-{model["id"]}">{its}</script>'
          for model, its in zip(models, weights, strict=True))])}
    files = [path for path in WEB.iterdir() if path.suffix in (".js", ".css", ".html")]
    parts |= {path.name: links(path.read_text(encoding="utf-8")).rstrip() for path in files}
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], parts["page.html"]) + "\n"

def main(argv=None):
    parser = CommandLine(prog="python -m web.explorer", description="Write one page that runs trained models in the "
                         "browser: read a text past their trained length, look inside, turn the knobs.")
    parser.add_argument("runs", nargs="*", metavar="RUN",
                        help=f"run directories of train.py (default: {', '.join(RUNS)} of mini, trained if missing)")
    parser.add_argument("--out", type=new_file, default=OUT, metavar="FILE", help=f"the page (default: {OUT})")
    parser.add_argument("--steps", type=at_least(1), metavar="N",
                        help="of each run that is trained (default: mini's)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.runs and args.steps:
            raise InputError("--steps is for runs that are trained here: leave it out, or the runs")
        root = os.path.relpath(WEB.parent, Path(args.out).parent).replace(os.sep, "/") + "/"
        html = page([Path(run) for run in args.runs] or train_missing(args.steps or PRESETS["mini"].train.steps), root)
        write_text(args.out, html)
        print(f"open {args.out}: {len(html.encode()) / 1e6:.1f} MB")

if __name__ == "__main__":
    main()
