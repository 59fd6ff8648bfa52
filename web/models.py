"""The explorer's trained models, which are in the repository: their weights, and beside them what they are.

    python -m web.models unpack            writes runs/models/NAME, ordinary runs, and data/models, their held-out text
    python -m web.models pack              writes the two files, of the runs that python -m web.explorer --train makes
    python -m web.models pack RUN RUN ...  the same of other runs

    models.safetensors   NAME/WEIGHT        int8 (rows, columns): a matrix of the model NAME, times its scales
                         NAME/WEIGHT.scale  float32 (rows, 1)
                         NAME/WEIGHT        float32: a weight that is no matrix
                         val, tokenizer     uint16 tokens and uint8 letters: the held-out text, and the tokenizer's file
    models.json          of each model its config.json (command, commit, settings, hashes of the data), and its losses
                         with the original weights and with these; the meta.json of the text; what packed them

A reader of runs knows no int8, so unpack writes float32. pack refuses a model whose loss at the trained length changes
by more than NEAR. The text lies beside the weights because another Python has another standard library.
"""

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import sys
from pathlib import Path

from cli import CommandLine, folder

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import safetensors
import safetensors.numpy
import torch

import codehash
import data
import files
import tasks
import train
from eval import MULTIPLES, held_out
from files import hash_file, read_json
from model_torch import GPT
from runs import CHECKPOINT, checkpoint_info, describe_progress, load_model, lock, read_checkpoint, read_run
from runs import save_checkpoint as write_checkpoint
from settings import InputError, prefix_errors, require_finite
from training_run import commit_of

WEB = Path(__file__).parent
WEIGHTS = WEB / "models.safetensors"
MANIFEST = WEB / "models.json"
TRAINED = Path("runs/explorer")          # where the runs of RUNS are trained
UNPACKED = Path("runs/models")
TEXT = Path("data/models")               # the held-out text of unpacked runs
NEAR = 0.002                             # nats, by which 8 bits may change a loss at the trained length
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

# ---- training --------------------------------------------------------------------------------------------------------

def find_run(flags):
    """A complete run of these flags, on data as they are now, under runs/ or runs/explorer/; None if there is none."""
    _, model, config = train.read_flags(flags)
    ensure = data.source_of(config.data).ensure
    _, meta = ensure(config.data, model.vocab, data.prepare, vars(config))
    others = ("fast", "micro_batch", "eval_every", "checkpoint_every", *data.PREPARATION)
    settings = lambda config: {key: value for key, value in dataclasses.asdict(config).items()  # noqa: E731
                               if key not in others}
    for path in sorted([*Path("runs").glob("*/config.json"), *TRAINED.glob("*/config.json")]):
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
            run = TRAINED / variant
            train.main([*flags, "--out", str(run), *["--resume"] * (run / "config.json").exists()])
        runs.append(run)
    return runs

# ---- 8 bits ----------------------------------------------------------------------------------------------------------

def quantize(weights):
    """{name: int8 or float32 array} of {name: float32 array}: matrices in 8 bits, with NAME.scale beside each.

    A row w of a matrix is its codes times its scale, max |w| / 127, in float32. What is no matrix stays as it is.
    """
    made = {}
    for name, w in weights.items():
        if w.ndim == 2:
            scale = abs(w).max(1, keepdims=True) / np.float32(127)                     # (rows, 1)
            made[name] = np.rint(w / np.maximum(scale, np.finfo(w.dtype).tiny)).astype(np.int8)
            made[f"{name}.scale"] = scale
        else:
            made[name] = w
    return made

def dequantize(tensors):
    """{name: float32 array} of what quantize returns."""
    return {name: w * tensors[f"{name}.scale"] if w.dtype == np.int8 else w
            for name, w in tensors.items() if not name.endswith(".scale")}

def weights_of(gpt):
    """{name: array} of a GPT."""
    return {name: w.numpy() for name, w in gpt.state_dict().items()}

def rounded(gpt):
    """What quantize returns of a GPT, whose own weights become those."""
    tensors = quantize(weights_of(gpt))
    gpt.load_state_dict({name: torch.from_numpy(w) for name, w in dequantize(tensors).items()})
    return tensors

# ---- what the page says of a model -----------------------------------------------------------------------------------

def long_documents(run):
    """The held-out documents of a run on text that have 16 times its trained length; InputError without one."""
    model, _, record = read_run(run)
    longest = MULTIPLES[-1] * model.context
    title, documents = held_out(run, record, "val", None)
    if not (usable := [document for document in documents if len(document) > longest]):
        raise InputError(f"no document of {title} has {longest:,} tokens, 16 times the trained length: give more text")
    return usable

def measure(run, gpt, documents):
    """Losses, as losses_of has them, or of a run on a task accuracies, as accuracies_of; of these weights."""
    source = read_run(run)[2]["data"]["source"]
    with prefix_errors(run):
        return accuracies_of(gpt, source) if source.startswith("task:") else losses_of(gpt, documents)

def losses_of(gpt, documents):
    """{"losses": at each of MULTIPLES, and "moved" and "hidden", of the two edits of docs/why-length-breaks.md}.

    The targets are the same: the last of each document, as many as the trained length. Moved is a text at 1x that
    begins where the last targets of the longest one do; hidden, at 16x, has the last keys alone, as many as the
    trained length.
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
        require_finite(math.isfinite(mean))
        return mean

    return {"losses": [loss(gpt, multiple * context) for multiple in MULTIPLES],
            "moved": loss(gpt, context, longest - context), "hidden": loss(windowed, longest)}

def accuracies_of(gpt, source):
    """{"accuracy" and "guess": at each of MULTIPLES, "chance"} of a model of a task, in shares of 1."""
    scores = [tasks.score(gpt, source, multiple * gpt.config.context, sequences=128) for multiple in MULTIPLES]
    return {name: [score[name] for score in scores] for name in ("accuracy", "guess")} | {"chance": scores[0]["chance"]}

# ---- packing ---------------------------------------------------------------------------------------------------------

def pack(runs, command):
    """Write WEIGHTS and MANIFEST of run directories, unless they have these numbers; returns what to say of that.

    InputError for a run that is not finished, and for a model that 8 bits change too much.
    """
    tensors = {}
    models = {}
    texts = {}                                                          # {hash of val: a run}
    for run in runs:
        _, config, record = read_run(run)
        info = checkpoint_info(run)
        if words := describe_progress(info["step"], config.steps):
            raise InputError(f"{run} is not finished ({words}): go on with python train.py --out {run} --resume")
        if run.name in models:
            raise InputError(f"two runs are called {run.name}: rename the folder of one")
        if not record["data"]["source"].startswith("task:"):
            texts[record["data"]["splits"]["val"]["sha256"]] = run
        models[run.name] = {"step": info["step"], "seconds": info["seconds"], "config": record}
    if len(texts) != 1:
        raise InputError("pack needs runs that are trained on one text, and some on tasks: name those with RUN ...")
    [text_run] = texts.values()
    documents = long_documents(text_run)
    lines = []
    for run in runs:
        print(f"measuring {run}, with its own weights and with those of 8 bits", flush=True)
        gpt, _ = load_model(run)
        original = measure(run, gpt, documents)
        tensors |= {f"{run.name}/{name}": w for name, w in rounded(gpt).items()}
        facts = {"original": original, "rounded": measure(run, gpt, documents)}
        lines.append(f"{run.name}: {describe_change(run, **facts)}")
        models[run.name] |= to_decimals(facts)
    meta = {key: value for key, value in models[text_run.name]["config"]["data"].items() if key != "folder"}
    tensors["val"] = np.concatenate(held_out(text_run, read_run(text_run)[2], "val", None).documents)
    tensors["tokenizer"] = np.frombuffer((text_run / "tokenizer.tiktoken").read_bytes(), np.uint8)
    content = safetensors.numpy.save(tensors)
    if WEIGHTS.exists() and WEIGHTS.read_bytes() == content and is_near(models, read_json(MANIFEST, models=dict)):
        return [*lines, "these are the weights and the losses that are there already: the files stay as they are"]
    files.write_bytes(WEIGHTS, content)
    manifest = {"sha256": hash_file(WEIGHTS), "bytes": len(content), "command": command, **commit_of(WEB.parent),
                "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count(),
                            "python": platform.python_version(), "torch": torch.__version__},
                "text": meta, "models": models}
    files.write_text(MANIFEST, json.dumps(manifest, indent=1, allow_nan=False) + "\n")
    return lines

def is_near(models, manifest):
    """Whether a manifest has the losses of these models, but for what differs from processor to processor."""
    facts = [[{kind: its[kind] for kind in ("original", "rounded")} for its in some.values()]
             for some in (models, manifest["models"])]
    return to_decimals(facts[0], 4) == to_decimals(facts[1], 4)

def to_decimals(facts, digits=6):
    """Every number of nested objects and lists, rounded: further digits differ from processor to processor."""
    if isinstance(facts, dict):
        return {key: to_decimals(value, digits) for key, value in facts.items()}
    return [to_decimals(value, digits) for value in facts] if isinstance(facts, list) else round(facts, digits)

def describe_change(run, original, rounded):
    """What 8 bits change; InputError if the loss at the trained length changes by more than NEAR."""
    if "accuracy" in original:
        pairs = zip(original["accuracy"], rounded["accuracy"], strict=True)
        return f"accuracies change by {100 * max(abs(x - y) for x, y in pairs):.1f} points at most"
    changes = [abs(x - y) for x, y in zip(original["losses"], rounded["losses"], strict=True)]
    if changes[0] > NEAR:
        raise InputError(f"8 bits change the loss of {run} at the trained length by {changes[0]:.4f} nats, and what is "
                         f"packed must be within {NEAR}: leave it out")
    return f"losses change by {changes[0]:.4f} nats at the trained length, and by {max(changes):.4f} at most"

# ---- reading what was packed -----------------------------------------------------------------------------------------

def read():
    """({name: array} of WEIGHTS, MANIFEST's object); InputError if one is missing, or if they are not of each other."""
    if not WEIGHTS.exists():
        raise InputError(f"{WEIGHTS} is missing: take it from the repository, or train the models with python -m "
                         "web.explorer --train, and pack them with python -m web.models pack")
    if not MANIFEST.exists():
        raise InputError(f"{MANIFEST} is missing: take it from the repository")
    manifest = read_json(MANIFEST, sha256=str, text=dict, models=dict)
    if hash_file(WEIGHTS) != manifest["sha256"]:
        raise InputError(f"{WEIGHTS} is not the file whose hash {MANIFEST} has: take both from the repository")
    for name, model in manifest["models"].items():
        if not (re.fullmatch(r"[\w-]+", name) and has(model, "step", "seconds", "config", "original", "rounded")
                and has(model["config"], "model", "train", "data", "provenance")):
            raise InputError(f"{MANIFEST}: the model {name!r} is not as pack writes it: take the file from the "
                             "repository")
    try:
        return safetensors.numpy.load_file(WEIGHTS), manifest
    except safetensors.SafetensorError as error:
        raise InputError(f"{WEIGHTS} cannot be read ({error}): take it from the repository") from None

def has(found, *keys):
    """Whether a part of MANIFEST is an object with these keys."""
    return isinstance(found, dict) and {*keys} <= found.keys()

def unpack(out=UNPACKED, text=TEXT):
    """Write the models as runs, OUT/NAME, and their held-out text as a folder of tokens; ([run], MANIFEST's object).

    What is there already and the same is left as it is. InputError, and nothing is written, if something else is there.
    """
    tensors, manifest = read()
    tokenizer = tensors["tokenizer"].tobytes()
    of_text = {"tokenizer.tiktoken": tokenizer, "val.bin": tensors["val"].tobytes(),
               "meta.json": json.dumps(manifest["text"], indent=1).encode() + b"\n"}
    folders = {text: (of_text, None)}
    for name, model in manifest["models"].items():
        record = model["config"]
        record["provenance"]["weights"] = "matrices rounded to 8 bits, from web/models.safetensors"
        contents = {}
        if not record["data"]["source"].startswith("task:"):
            record["data"]["folder"] = str(text)
            contents["tokenizer.tiktoken"] = tokenizer
        contents["config.json"] = json.dumps(record, indent=1).encode() + b"\n"
        its = {key.removeprefix(f"{name}/"): w for key, w in tensors.items() if key.startswith(f"{name}/")}
        folders[Path(out) / name] = contents, (dequantize(its), model["step"], model["seconds"])
    for place, (contents, checkpoint) in folders.items():
        check_free(place, contents, checkpoint)
    for place, (contents, checkpoint) in folders.items():
        with lock(place):
            check_free(place, contents, checkpoint)
            for name, content in contents.items():
                files.write_bytes(place / name, content)
            if checkpoint:                                              # last, since without one the run is not whole
                write_checkpoint(place, *checkpoint)
    return [place for place, (_, checkpoint) in folders.items() if checkpoint], manifest

def check_free(place, contents, checkpoint):
    """InputError if a folder holds files, unless they are these, {name: bytes}, and this checkpoint, or some of them.
    """
    if not files.holds_files(place):
        return
    there = [name for name in contents if (place / name).exists()]
    same = bool(there) and all((place / name).is_file() and (place / name).read_bytes() == contents[name]
                               for name in there)
    if same and checkpoint and (place / CHECKPOINT).exists():
        weights, step, _ = checkpoint
        found, info = read_checkpoint(place)
        same = info["step"] == step and found.keys() == weights.keys() and all(
            np.array_equal(found[name], weights[name]) for name in weights)
    if not same:
        raise InputError(f"{place} exists and is not what is unpacked, so it is left as it is: move it away, or give "
                         "--out, another folder")

def changed_code(runs):
    """The files that compute the losses of these runs, and are not what they were when the runs were trained."""
    changed = {}
    for model, config, record in map(read_run, runs):
        then = record["provenance"].get("code", {})
        changed |= dict.fromkeys(codehash.differing(then, codehash.code_of(model, config)))
    return list(changed)

# ---- as a script -----------------------------------------------------------------------------------------------------

def main(argv=None):
    parser = CommandLine(prog="python -m web.models", description="Unpack the explorer's trained models as runs, or "
                         "pack runs in their place.", epilog="example: python -m web.models unpack, and then python "
                         "generate.py runs/models/expe-on-k --prompt 'def '")
    add = parser.add_argument
    add("action", choices=("unpack", "pack"), help="unpack: write runs; pack: write the files of the repository")
    add("runs", nargs="*", metavar="RUN", help=f"what to pack (default: {', '.join(RUNS)} of {TRAINED})")
    add("--out", type=folder, metavar="DIR", help=f"where to unpack (default: {UNPACKED})")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.action == "pack":
            if args.out:
                raise InputError(f"--out is for unpack: pack writes {WEIGHTS} and {MANIFEST}")
            runs = [Path(run) for run in args.runs] or [TRAINED / name for name in RUNS]
            command = shlex.join(["python", "-m", "web.models", *(sys.argv[1:] if argv is None else argv)])
            print("\n".join(pack(runs, command)))
            print(f"{WEIGHTS}: {WEIGHTS.stat().st_size / 1e6:.2f} MB; {MANIFEST} says what it is of")
        else:
            if args.runs:
                raise InputError(f"unpack writes all models: leave {args.runs[0]} out")
            runs, _ = unpack(args.out or UNPACKED)
            print(f"unpacked: {' '.join(map(str, runs))}; their held-out text: {TEXT}")

if __name__ == "__main__":
    main()
