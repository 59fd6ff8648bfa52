"""One page that runs trained models in the browser: a text past their trained length, what their heads do, the knobs.

    python -m web.explorer                 trains what is missing of five small runs and two of a task: explorer.html
    python -m web.explorer RUN RUN ...     the page of these runs: of one data set, and of one task if there are such

The page is one file that loads nothing from elsewhere: its models' weights in 8 bits, their tokenizer, some held-out
texts and the losses of all of them, computed from these weights, are in it. The files beside this one are its parts;
model.js is a third backend, for layernorm and gelu. It must be a copy of model_torch.py, and vectors.py says whether
that is so still.
"""

import base64
import dataclasses
import json
import math
import re
import shlex
import zlib
from collections import Counter
from pathlib import Path

from common import (
    CommandLine,
    at_least,
    checkpoint_info,
    load_model,
    new_file,
    read_run,
    read_text,
    write_text,
)

# common comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

import codehash
import data
import tasks
import train
from config import InputError, prefix_errors, refuse_unless
from eval import MULTIPLES, held_out
from model_torch import GPT
from web import vectors
from zoo.names import COLOURS, changed, colour, names_of, variant_of

WEB = Path(__file__).parent
FOLDER = Path("runs/explorer")
OUT = Path("explorer.html")
TITLE = "Where are my tokens? Exact positional encodings, explored"
ABOUT = "Trained language models in your browser: why their losses rise, or do not, past the trained length."
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
TEXTS, SEQUENCES = 4, 8                  # to read; of a task at each length
TASKS = ("needle", "first-last")         # those of task.js
APART = 0.18                             # of two colours in Oklab: below it they are hard to tell from each other

def find_run(flags):
    """A complete run of these flags, on data as they are now, under runs/ or runs/explorer/; None if there is none."""
    _, model, config = train.read_flags(flags)
    ensure = data.source_of(config.data).ensure
    _, meta = ensure(config.data, model.vocab, data.prepare, vars(config))
    others = ("fast", "micro_batch", "eval_every", "checkpoint_every", *data.PREPARATION)
    settings = lambda config: {key: value for key, value in dataclasses.asdict(config).items()  # noqa: E731
                               if key not in others}
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

def quantize(gpt):
    """Round a GPT's matrices to 8 bits, in place. Returns the codes of all, int8, and the other numbers, float32.

    A row w of a matrix is its codes times its scale, max |w| / 127, in float32. The other numbers are these scales and
    all weights that are no matrix, in the order of state_dict.
    """
    codes = []
    others = []
    for w in gpt.state_dict().values():
        if w.ndim == 2:
            scale = w.abs().amax(1, keepdim=True) / 127                # (rows, 1)
            code = (w / scale.clamp(min=torch.finfo(w.dtype).tiny)).round()
            w.copy_(code * scale)
            codes.append(code.flatten().to(torch.int8))
        others.append((scale if w.ndim == 2 else w).flatten())
    return torch.cat(codes).numpy(), torch.cat(others).numpy()

def packed(codes, others):
    """What quantize returns, for a page: (deflated, in base85 with "," in place of "<"; bytes before base85)."""
    small = zlib.compress(codes.tobytes() + others.astype("<f4").tobytes(), 9)
    return base64.b85encode(small, pad=True).decode().replace("<", ","), len(small)

def oklab(colour):
    """A colour's place in Oklab (Ottosson 2020), in which distances are those that one sees."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0515], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    axes = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return axes @ np.cbrt(cones @ linear)

def distinct(own, taken):
    """A model's own colour, or the one that is furthest from those taken if its own is too near to one of them."""
    apart = lambda c: min((np.linalg.norm(oklab(c) - oklab(other)) for other in taken), default=1)  # noqa: E731
    return own if apart(own) >= APART else max(COLOURS, key=apart)

def model_of(run, gpt, called, taken):
    """What the page knows of a run: (a dict for JSON, the weights as text). taken: {name: colour} of others.

    The GPT's weights are rounded to those of the page.
    """
    model = gpt.config
    check(run, gpt)
    weights, size = packed(*quantize(gpt))
    flags = [f"--{key}" if x is True else f"--{key} {short}" for key, x, short in changed(model)]
    return {"id": id_of(run), "name": called, "flags": " ".join([f"--pe {model.encoding.pe}", *flags]),
            "colour": taken.get(called) or distinct(colour(variant_of(run)), taken.values()),
            "config": dataclasses.asdict(model), "bytes": size,
            "tensors": [(key, w.shape) for key, w in gpt.state_dict().items()]}, weights

def results_of(gpt, documents):
    """[loss at each of MULTIPLES], then those of the two edits of docs/why-length-breaks.md, of the same targets.

    The edits: at 1x a text that begins where the last targets of the longest one do; at 16x the last keys alone, as
    many as the trained length. The targets are the last of each document, as many.
    """
    context = gpt.config.context
    longest = MULTIPLES[-1] * context
    windowed = GPT(dataclasses.replace(gpt.config, window=context), seed=None)
    windowed.load_state_dict(gpt.state_dict())

    def loss(model, length, start=0):
        windows = [torch.tensor(document[-length - 1 :].astype(int))[None] for document in documents]
        positions = np.arange(start, start + length)
        losses = [model.token_losses(x[:, :-1], x[:, 1:], positions)[0, -context:] for x in windows]
        mean = torch.cat(losses).double().mean().item()
        refuse_unless(math.isfinite(mean))
        return mean

    return {"losses": [loss(gpt, multiple * context) for multiple in MULTIPLES],
            "moved": loss(gpt, context, longest - context), "hidden": loss(windowed, longest)}

def task_of(runs):
    """What the page knows of a task, of {run: GPT}: its symbols, some sequences of each length, and accuracies."""
    if not runs:
        return None
    first = next(iter(runs))
    model, _, record = read_run(first)
    source = record["data"]["source"]
    if (name := source.removeprefix("task:")) not in TASKS:
        raise InputError(f"{first} is trained on {source}, and the page shows the tasks {' and '.join(TASKS)}")
    sequences = {}
    for length in (multiple * model.context for multiple in MULTIPLES):
        pairs = zip(*tasks.batch(tasks.open_split(source, "val"), length, SEQUENCES, 0, length), strict=True)
        sequences[length] = [{"tokens": tokens.tolist(), "targets": {
            int(t): int(targets[t]) for t in np.flatnonzero(targets != tasks.IGNORED)}} for tokens, targets in pairs]
    scores = {}
    for run, gpt in runs.items():
        with prefix_errors(run):
            scores[id_of(run)] = [tasks.score(gpt, source, length, sequences=128) for length in sequences]
    return {"name": name, "trained": model.context, "symbols": tasks.find(source).symbols,
            "sequences": sequences, "guess": [row["guess"] for row in scores[id_of(first)]],
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
    """Every {{file: words}} made into file#Ln, n being the first line that begins with these words, or into file."""
    def place(match):
        path, words = match.groups()
        lines = enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1)
        return path + next((f"#L{n}" for n, line in lines if line.startswith(words)), "")

    return re.sub(r"\{\{([\w./]+): (.+?)\}\}", place, text)

def citation():
    """Where this repository is published, by CITATION.cff; "" if it does not say."""
    found = re.search(r"^repository-code: *[\"']?(https://[^\s\"']+)", read_text(WEB.parent / "CITATION.cff"), re.M)
    return found[1].rstrip("/") if found else ""

def share(repository):
    """The elements by which a link to the page shows a title and a picture."""
    tags = {"og:title": TITLE, "og:type": "website", "og:description": ABOUT}
    if repository:
        tags |= {"og:image": f"{repository}/raw/main/docs/explorer.png", "twitter:card": "summary_large_image"}
    return "\n".join(f'<meta property="{name}" content="{content}">' for name, content in tags.items())

def page(runs, repository=""):
    """The HTML of run directories: of one tokenizer and trained length, and of one task and trained length.

    repository: where this repository is published, https://HOST/OWNER/NAME, for links to its files.
    """
    kinds = {False: [], True: []}                                       # by whether a run is of a task
    for run in runs:
        kinds[read_run(run)[2]["data"]["source"].startswith("task:")].append(run)
    if not kinds[False]:
        raise InputError("the page needs a run that is trained on text: add one")
    weights = []
    models = {True: [], False: []}
    gpts = {True: {}, False: {}}
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
            gpts[of_task][run] = load_model(run)[0]
            made, its = model_of(run, gpts[of_task][run], name, colours)
            if made["id"] in {other["id"] for other in models[True] + models[False]}:
                raise InputError(f"two runs are called {made['id']}: rename the folder of one")
            models[of_task].append(made)
            weights.append((made["id"], its))
    run = kinds[False][0]
    first, _, record = read_run(run)
    longest = MULTIPLES[-1] * first.context
    title, documents = held_out(run, record, "val", None)
    documents = [document for document in documents if len(document) > longest]
    if not documents:
        raise InputError(f"no document of {title} has {longest:,} tokens, 16 times the trained length: give more text")
    for run in runs:
        codehash.describe(run, read_run(run)[2] | checkpoint_info(run))
    read = [read_run(run) for run in kinds[False]]
    either = lambda found: " or ".join(dict.fromkeys(found))  # noqa: E731
    sizes = either(f"{model.layers} blocks and {model.width} dimensions" for model, _, _ in read)
    tokens = either(f"{checkpoint_info(run)['step'] * how.batch_size * model.context:,}"
                    for run, (model, how, its) in zip(kinds[False], read, strict=True))
    about = (f"{len(read)} model{'s' * (len(read) > 1)} of {sizes}, trained on {tokens} tokens of "
             f"{either(its['data']['source'] for _, _, its in read)} in windows of {first.context}, with matrices of 8 "
             f"bits. The texts are held-out documents of {record['data']['source']}.")
    results = {}
    for run, gpt in gpts[False].items():
        with prefix_errors(run):
            results[id_of(run)] = results_of(gpt, documents)
    known = {"trained": first.context, "multiples": MULTIPLES, "models": models[False], "about": about,
             "texts": texts_of(run, record, documents, longest), "root": repository and f"{repository}/blob/main/",
             "results": results, "documents": len(documents), "source": record["data"]["source"],
             "task": task_of(gpts[True]), "task_models": models[True]}
    safe = json.dumps(known, allow_nan=False).replace("<", "\\u003c")       # no text may begin or end an element
    parts = {"share": share(repository), "data": "\n".join([
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
    parser.add_argument("--repository", default=citation(), metavar="URL",
                        help="where this repository is published, for links to its files (default: as in CITATION.cff)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.repository and not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]*(?<!\.git)", args.repository):
            raise InputError(f"--repository must be as https://github.com/OWNER/NAME, got {args.repository}")
        if args.runs and args.steps:
            raise InputError("--steps is for runs that are trained here: leave it out, or the runs")
        vectors.check()
        html = page([Path(run) for run in args.runs] or train_missing(args.steps), args.repository)
        write_text(args.out, html)
        print(f"open {args.out}: {len(html.encode()) / 1e6:.1f} MB")

if __name__ == "__main__":
    main()
