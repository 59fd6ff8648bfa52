"""One page that runs trained models in the browser: a text past their trained length, what their heads do, the knobs.

    python -m web.explorer                 explorer.html, of the trained models in web/models.safetensors
    python -m web.explorer --train         trains these models, five of text and two of a task; the page of those runs
    python -m web.explorer RUN RUN ...     the page of these runs: of one data set, and of one task if there are such

The page is one file that loads nothing from elsewhere: its models' weights in 8 bits, their tokenizer, some held-out
texts and the losses of all of them, computed from these weights, are in it. The files beside this one are its parts;
model.js is a third backend, for layernorm and gelu. It must be a copy of model_torch.py, and vectors.py says whether
that is so still.
"""

import base64
import dataclasses
import json
import re
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

from cli import CommandLine, at_least, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

import tasks
from eval import MULTIPLES
from files import read_text, write_text
from runs import checkpoint_info, describe, load_model, read_run
from settings import InputError
from tokenizer import read_tokenizer
from web import models as trained
from web import vectors
from zoo.names import COLOURS, changed, colour, names_of, variant_of

WEB = Path(__file__).parent
OUT = Path("explorer.html")
TITLE = "Where are my tokens? Exact positional encodings, explored"
ABOUT = "Trained language models in your browser: why their losses rise, or do not, past the trained length."
ENCODINGS = ("nope", "sinusoidal", "expe", "exqpe", "rope", "alibi", "fox")        # those of encodings.js
TEXTS, SEQUENCES = 4, 8                  # to read; of a task at each length
TASKS = ("needle", "first-last")         # those of task.js
APART = 0.18                             # of two colours in Oklab: below it they are hard to tell from each other

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

def packed(tensors):
    """What trained.quantize returns, for a page: (deflated, in base85 with "," in place of "<"; bytes before base85).

    First all codes, then the other numbers in float32: the scales of a matrix, or all of what is no matrix.
    """
    codes = [w.tobytes() for w in tensors.values() if w.dtype == np.int8]
    others = [w.astype("<f4").tobytes() for w in tensors.values() if w.dtype != np.int8]
    small = zlib.compress(b"".join(codes + others), 9)
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
    weights, size = packed(trained.rounded(gpt))
    flags = [f"--{key}" if x is True else f"--{key} {short}" for key, x, short in changed(model)]
    return {"id": id_of(run), "name": called, "flags": " ".join([f"--pe {model.encoding.pe}", *flags]),
            "colour": taken.get(called) or distinct(colour(variant_of(run)), taken.values()),
            "config": dataclasses.asdict(model), "bytes": size,
            "tensors": [(key, w.shape) for key, w in gpt.state_dict().items()]}, weights

def task_of(runs, facts):
    """What the page knows of a task, of run directories: its symbols, some sequences of each length, and accuracies.

    facts: {run: what trained.measure returns}.
    """
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
    return {"name": name, "trained": model.context, "symbols": tasks.find(source).symbols, "sequences": sequences,
            "guess": facts[runs[0]]["guess"], "chance": facts[runs[0]]["chance"],
            "accuracy": {id_of(run): facts[run]["accuracy"] for run in runs}}

def texts_of(run, record, documents, length):
    """[{"title", "text"}] of the first of these documents, each cut after so many tokens."""
    encoding = read_tokenizer(run, record["data"])
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

def page(runs, repository="", facts=None):
    """The HTML of run directories: of one tokenizer and trained length, and of one task and trained length.

    repository: where this repository is published, https://HOST/OWNER/NAME, for links to its files. facts: {run: what
    trained.measure returns} if that is known; else it is computed, of weights of 8 bits.
    """
    kinds = {False: [], True: []}                                       # by whether a run is of a task
    for run in runs:
        kinds[read_run(run)[2]["data"]["source"].startswith("task:")].append(run)
    if not kinds[False]:
        raise InputError("the page needs a run that is trained on text: add one")
    weights = []
    models = {True: [], False: []}
    gpts = {}
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
            gpts[run] = load_model(run)[0]
            made, its = model_of(run, gpts[run], name, colours)
            if made["id"] in {other["id"] for other in models[True] + models[False]}:
                raise InputError(f"two runs are called {made['id']}: rename the folder of one")
            models[of_task].append(made)
            weights.append((made["id"], its))
    run = kinds[False][0]
    first, _, record = read_run(run)
    documents = trained.long_documents(run)
    if facts is None:
        facts = {run: trained.measure(run, gpt, documents) for run, gpt in gpts.items()}
    known = {"trained": first.context, "multiples": MULTIPLES, "models": models[False],
             "about": describe_models(kinds[False]),
             "texts": texts_of(run, record, documents, MULTIPLES[-1] * first.context),
             "root": repository and f"{repository}/blob/main/",
             "results": {id_of(run): facts[run] for run in kinds[False]}, "documents": len(documents),
             "source": record["data"]["source"], "task": task_of(kinds[True], facts), "task_models": models[True]}
    safe = json.dumps(known, allow_nan=False).replace("<", "\\u003c")       # no text may begin or end an element
    parts = {"share": share(repository), "data": "\n".join([
        f'<script type="application/json" id="data">{safe}</script>',
        f'<script type="text/plain" id="tokenizer">{read_text(run / "tokenizer.tiktoken")}</script>',
        *(f'<script type="text/plain" id="weights-{name}">{its}</script>' for name, its in weights)])}
    files = [path for path in WEB.iterdir() if path.suffix in (".js", ".css", ".html")]
    parts |= {path.name: links(path.read_text(encoding="utf-8")).rstrip() for path in files}
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], parts["page.html"]) + "\n"

def describe_models(runs):
    """A sentence on the models of run directories on text: their number, sizes, and training."""
    read = [read_run(run) for run in runs]
    either = lambda found: " or ".join(dict.fromkeys(found))  # noqa: E731
    sizes = either(f"{model.layers} blocks and {model.width} dimensions" for model, _, _ in read)
    tokens = either(f"{checkpoint_info(run)['step'] * how.batch_size * model.context:,}"
                    for run, (model, how, _) in zip(runs, read, strict=True))
    return (f"{len(read)} model{'s' * (len(read) > 1)} of {sizes}, trained on {tokens} tokens of "
            f"{either(its['data']['source'] for _, _, its in read)} in windows of {read[0][0].context}, with matrices "
            f"of 8 bits. The texts are held-out documents of {read[0][2]['data']['source']}.")

def page_of_packed(repository=""):
    """The HTML of the models in web/models.safetensors, with the losses that web/models.json has of them."""
    with tempfile.TemporaryDirectory() as place:
        runs, manifest = trained.unpack(Path(place) / "runs", Path(place) / "text")
        if changed := trained.changed_code(runs):
            print(f"{trained.WEIGHTS}: its models were trained, and their losses computed, with other code than is "
                  f"here now: {', '.join(changed)}", file=sys.stderr)
        return page(runs, repository, {run: manifest["models"][run.name]["rounded"] for run in runs})

def main(argv=None):
    parser = CommandLine(prog="python -m web.explorer", description="Write one page that runs trained models in the "
                         "browser: read a text past their trained length, look inside, turn the knobs.")
    parser.add_argument("runs", nargs="*", metavar="RUN",
                        help="run directories of train.py (default: the models in web/models.safetensors)")
    parser.add_argument("--out", type=new_file(".html"), default=OUT, metavar="FILE", help=f"the page (default: {OUT})")
    parser.add_argument("--train", action="store_true", help=f"train what is missing of {', '.join(trained.RUNS)} of "
                        f"mini, in {trained.TRAINED}/, and show these runs")
    parser.add_argument("--steps", type=at_least(1), metavar="N",
                        help="train with so many steps each (default: mini's); with --train or alone")
    parser.add_argument("--repository", default=citation(), metavar="URL",
                        help="where this repository is published, for links to its files (default: as in CITATION.cff)")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.repository and not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]*(?<!\.git)", args.repository):
            raise InputError(f"--repository must be as https://github.com/OWNER/NAME, got {args.repository}")
        train = args.train or args.steps is not None
        if args.runs and train:
            raise InputError("--train and --steps are for runs that are trained here: leave them out, or the runs")
        vectors.check()
        runs = trained.train_missing(args.steps) if train else [Path(run) for run in args.runs]
        html = page(runs, args.repository) if runs else page_of_packed(args.repository)
        for run in runs:
            describe(run, read_run(run)[2] | checkpoint_info(run))
        write_text(args.out, html)
        print(f"open {args.out}: {len(html.encode()) / 1e6:.1f} MB")

if __name__ == "__main__":
    main()
