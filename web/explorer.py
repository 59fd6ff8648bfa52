"""One page that runs trained models in the browser: a text past their trained length, what their heads do, the knobs.

    python -m web.explorer                 trains what is missing of five small runs and two of a task: explorer.html
    python -m web.explorer RUN RUN ...     the page of these runs: of one data set, and of one task if there are such

The page is one file that loads nothing from elsewhere: its models' weights in half precision, their tokenizer, some
held-out texts and the losses of all of them are in it. The files beside this one are its parts; model.js is a third
backend, for layernorm and gelu.
"""

import base64
import dataclasses
import json
import re
import shlex
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import to_rgb

import data
import tasks
import train
from common import CommandLine, at_least, checkpoint_info, load_model, new_file, read_run, read_text, write_text
from config import InputError
from eval import MULTIPLES, held_out
from lab.measures import usable
from lab.pictures import COLOURS, changed, colour, names_of, variant_of

WEB = Path(__file__).parent
FOLDER = Path("runs/explorer")
OUT = Path("explorer.html")
TASK = "--data task:needle --context 32 --layers 2 --width 64 --heads 2 --batch-size 16 --steps 1000 --lr 3e-3"
RUNS = {                                 # name: flags of train.py; the first are those of `make train`
    "expe": "--pe expe",
    "expe-on-k": "--pe expe --on k",
    "rope": "--pe rope",
    "alibi": "--pe alibi",
    "fox": "--pe fox",
    "task-fox": f"--pe fox {TASK}",
    "task-rope": f"--pe rope {TASK}",
}
ENCODINGS = ("nope", "sinusoidal", "expe", "exqpe", "rope", "alibi", "fox")        # those of encodings.js
TEXTS, DOCUMENTS, SEQUENCES = 4, 16, 8   # to read; of the result; of a task at each length
TASKS = ("needle", "first-last")         # those of task.js
APART = 0.18                             # of two colours in Oklab: below it they are hard to tell from each other

def find_run(flags):
    """A complete run of these flags, on data as they are now, under runs/ or runs/explorer/; None if there is none."""
    _, model, config = train.read_flags(flags)
    _, meta = data.ensure(config.data, model.vocab, min_doc_tokens=config.min_doc_tokens, max_tokens=config.max_tokens)
    settings = lambda config: {key: value for key, value in dataclasses.asdict(config).items()  # noqa: E731
                               if key not in ("fast", "micro_batch", "eval_every", "checkpoint_every")}
    for path in sorted([*Path("runs").glob("*/config.json"), *FOLDER.glob("*/config.json")]):
        try:
            its, how, record = read_run(path.parent)
            same = its == model and settings(how) == settings(config) and record["data"]["splits"] == meta["splits"]
            if same and checkpoint_info(path.parent)["step"] == how.steps:
                return path.parent
        except InputError:                                             # of another version, or cut short
            continue
    return None

def train_missing(steps):
    """The run directories of RUNS, each trained if there is no such run under runs/, or gone on with."""
    runs = []
    for variant, words in RUNS.items():
        flags = ["--preset", "mini", *shlex.split(words), *(["--steps", str(steps)] if steps else [])]
        run = find_run(flags)
        if run is None:
            run = FOLDER / variant
            train.main([*flags, "--out", str(run), *["--resume"] * (run / "config.json").exists()])
        runs.append(run)
    return runs

def check(run, gpt):
    """InputError unless model.js can read a run's GPT."""
    model = gpt.config
    e = gpt.config.encoding
    plain = {"norm": "layernorm", "mlp": "gelu", "nope_every": 0, "window": 0, "cycle": None,
             "softmax": "plain", "causal": True}
    alone = {"learn": "none", "once": False, "scale": 1.0}
    wrong = [f"{key} {getattr(model, key)}" for key, value in plain.items() if getattr(model, key) != value]
    wrong += [f"pe {e.pe}"] * (e.pe not in ENCODINGS)
    wrong += [f"{key} {getattr(e, key)}" for key, value in alone.items() if getattr(e, key, value) != value]
    if wrong:
        raise InputError(f"{run} has {', '.join(wrong)}, and the page reads layernorm and gelu with one of "
                         f"{', '.join(ENCODINGS)}")
    if model.d_head % 8 or model.mlp_width % 8:
        raise InputError(f"{run} has heads of width {model.d_head} and an MLP of width {model.mlp_width}, and the page "
                         f"reads multiples of 8")
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

def oklab(colour):
    """A colour's place in Oklab (Ottosson 2020), in which distances are those that one sees."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0515], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    axes = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return axes @ np.cbrt(cones @ linear)

def distinct(own, taken):
    """A model's own colour, or the one that is furthest from those taken if its own is too near to one of them."""
    apart = lambda c: min((np.linalg.norm(oklab(c) - oklab(other)) for other in taken), default=1)  # noqa: E731
    return own if apart(own) >= APART else max(COLOURS, key=apart)

def model_of(run, called, taken):
    """What the page knows of a run: (a dict for JSON, the weights as text). taken: {name: colour} of others."""
    gpt, _ = load_model(run)
    model = gpt.config
    tensors = {name: w.numpy() for name, w in gpt.state_dict().items()}
    check(run, gpt)
    weights, size = packed(run, tensors)
    flags = [f"--{key}" if x is True else f"--{key} {short}" for key, x, short in changed(model)]
    return {"id": id_of(run), "name": called, "flags": " ".join([f"--pe {model.encoding.pe}", *flags]),
            "colour": taken.get(called) or distinct(colour(variant_of(run)), taken.values()),
            "config": dataclasses.asdict(model), "bytes": size,
            "tensors": [(key, w.shape) for key, w in tensors.items()]}, weights

def results_of(runs, documents, context):
    """{id: [the mean loss of the last `context` targets of documents, at each of MULTIPLES]} of runs."""
    losses = {}
    for run in runs:
        gpt, _ = load_model(run)
        losses[id_of(run)] = []
        for multiple in MULTIPLES:
            windows = [torch.tensor(document[-multiple * context - 1 :].astype(int)) for document in documents]
            scored = [gpt.token_losses(window[None, :-1], window[None, 1:])[0, -context:] for window in windows]
            losses[id_of(run)].append(torch.stack(scored).double().mean().item())
    return losses

def task_of(runs):
    """What the page knows of a task: its symbols, some sequences of each length, and the accuracies of the runs."""
    if not runs:
        return None
    model, _, record = read_run(runs[0])
    source = record["data"]["source"]
    if (name := source.removeprefix("task:")) not in TASKS:
        raise InputError(f"{runs[0]} is trained on {source}, and the page shows the tasks {' and '.join(TASKS)}")
    sequences = {}
    for length in (multiple * model.context for multiple in MULTIPLES):
        pairs = zip(*tasks.batch(tasks.open_split(source, "val"), length, SEQUENCES, 0, length), strict=True)
        sequences[length] = [{"tokens": tokens.tolist(), "targets": {
            int(t): int(targets[t]) for t in np.flatnonzero(targets != tasks.IGNORED)}} for tokens, targets in pairs]
    scores = {id_of(run): [tasks.score(load_model(run)[0], source, length, sequences=128) for length in sequences]
              for run in runs}
    return {"name": name, "trained": model.context, "symbols": tasks.find(source).symbols,
            "sequences": sequences, "guess": [row["guess"] for row in scores[id_of(runs[0])]],
            "accuracy": {run: [row["accuracy"] for row in rows] for run, rows in scores.items()}}

def texts_of(run, record, documents, length):
    """[{"title", "text"}] of the first of these documents, each cut after so many tokens."""
    encoding = data.run_tokenizer(run, record["data"])
    texts = []
    for i, document in enumerate(documents[:TEXTS]):
        text = encoding.decode([int(token) for token in document[1 : length + 1]], errors="ignore")
        first = next((line for line in text.splitlines() if line.strip()), "")
        texts.append({"title": f"held-out text {i + 1}: {first.strip()[:40]}", "text": text})
    return texts

def id_of(run):
    return re.sub(r"\W+", "-", Path(run).name)

def links(text, root=WEB.parent):
    """Every {{file: words}} made into file#Ln, n being the line that begins with these words."""
    def place(match):
        path, words = match.groups()
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        return f"{path}#L{1 + next(i for i, line in enumerate(lines) if line.startswith(words))}"

    return re.sub(r"\{\{([\w./]+): (.+?)\}\}", place, text)

def address(citation=WEB.parent / "CITATION.cff"):
    """Where this repository's files can be read by anyone, by its citation; "" if that has no address."""
    found = re.search(r"^repository-code: *[\"']?(https://[^\s\"']+)", read_text(citation), re.M)
    return f"{found[1].rstrip('/')}/blob/main/" if found else ""

def page(runs):
    """The HTML of run directories: of one tokenizer and trained length, and of one task and trained length."""
    kinds = {False: [], True: []}                                       # by whether a run is of a task
    for run in runs:
        kinds[read_run(run)[2]["data"]["source"].startswith("task:")].append(run)
    if not kinds[False]:
        raise InputError("the page needs a run that is trained on text: add one")
    weights = []
    models = {True: [], False: []}
    for of_task, group in kinds.items():
        called = names_of(group)
        short = Counter(word.partition(",")[0] for word in called.values())             # of ExPE-K, theta 0.5
        for run in group:
            model, _, its = read_run(run)
            first, _, record = read_run(group[0])
            if its["data"]["tokenizer"] != record["data"]["tokenizer"] or model.context != first.context:
                raise InputError(f"{run} has another tokenizer or trained length than {group[0]}: compare runs of one "
                                 f"kind")
            word = called[run].partition(",")[0]
            name = word if short[word] == 1 else called[run]
            colours = {other["name"]: other["colour"] for other in models[False] + models[True]}
            made, its = model_of(run, name, colours)
            if made["id"] in {other["id"] for other in models[True] + models[False]}:
                raise InputError(f"two runs are called {made['id']}: rename the folder of one")
            models[of_task].append(made)
            weights.append((made["id"], its))
    run = kinds[False][0]
    first, _, record = read_run(run)
    documents = usable(held_out(run, record, "val", None)[1], MULTIPLES[-1] * first.context, DOCUMENTS)
    read = [read_run(run) for run in kinds[False]]
    either = lambda found: " or ".join(dict.fromkeys(found))  # noqa: E731
    sizes = either(f"{model.layers} blocks and {model.width} dimensions" for model, _, _ in read)
    tokens = either(f"{checkpoint_info(run)['step'] * how.batch_size * model.context:,}"
                    for run, (model, how, its) in zip(kinds[False], read, strict=True))
    about = (f"{len(read)} models of {sizes}, trained on {tokens} tokens of "
             f"{either(its['data']['source'] for _, _, its in read)} in windows of {first.context}, in half precision. "
             f"The texts are held-out documents of {record['data']['source']}.")
    known = {"trained": first.context, "multiples": MULTIPLES, "models": models[False], "about": about,
             "texts": texts_of(run, record, documents, MULTIPLES[-1] * first.context), "root": address(),
             "results": results_of(kinds[False], documents, first.context), "documents": len(documents),
             "task": task_of(kinds[True]), "task_models": models[True]}
    safe = json.dumps(known).replace("<", "\\u003c")                      # no text may begin or end an element
    parts = {"data": "\n".join([
        f'<script type="application/json" id="data">{safe}</script>',
        f'<script type="text/plain" id="tokenizer">{read_text(run / "tokenizer.tiktoken")}</script>',
        *(f'<script type="text/plain" id="weights-{name}">{its}</script>' for name, its in weights)])}
    files = [path for path in WEB.iterdir() if path.suffix in (".js", ".css", ".html")]
    parts |= {path.name: links(path.read_text(encoding="utf-8")).rstrip() for path in files}
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], parts["page.html"]) + "\n"

def main(argv=None):
    parser = CommandLine(prog="python -m web.explorer", description="Write one page that runs trained models in the "
                         "browser: read a text past their trained length, look inside, turn the knobs.")
    parser.add_argument("runs", nargs="*", metavar="RUN",
                        help=f"run directories of train.py (default: {', '.join(RUNS)} of mini, trained if missing)")
    parser.add_argument("--out", type=new_file(".html"), default=OUT, metavar="FILE", help=f"the page (default: {OUT})")
    parser.add_argument("--steps", type=at_least(1), metavar="N",
                        help="of each run that is trained (default: mini's)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.runs and args.steps:
            raise InputError("--steps is for runs that are trained here: leave it out, or the runs")
        html = page([Path(run) for run in args.runs] or train_missing(args.steps))
        write_text(args.out, html)
        print(f"open {args.out}: {len(html.encode()) / 1e6:.1f} MB")

if __name__ == "__main__":
    main()
