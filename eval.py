"""Loss past the trained length, for one run or many, as a table and a picture.

    python eval.py                              every run under runs/, at 1, 2, 4, 8, 16 times its trained length
    python eval.py runs/mini-expe-l24-s0 --lengths 128,512,2048 --plot loss.png

Protocol `nonoverlap`, the paper's: the same tokens are scored at every length. Of each held-out document of at least
the longest length, the first k tokens are targets, k the largest multiple of that length. Their inputs, <|endoftext|>
and all but the last of them, are cut into windows of the length in question, which never cross documents. Negative
log-likelihoods are summed in fp64 and divided by the counted targets. It shows what a window of that length costs a
token on average; a longer window also starves fewer tokens of context, so part of a fall is not extrapolation.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from config import CommandLine, InputError, fingerprint, new_file, picture, read_run, whole

# torch and what imports it are imported in the functions that use them, so that --help and a wrong flag answer at once.

MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length, when no --lengths are given
BATCH_TOKENS = 2**13  # tokens in one forward pass: bounds the memory, whatever the length


# ---- what is scored --------------------------------------------------------------------------------------------------


def held_out(run, record, split, source):
    """(name, documents) a run is scored on; each document is an array of <|endoftext|> and its own tokens.

    source None: the split of the run's own data. A prepared folder: its split, if its tokenizer is the run's.
    Other text: all of its documents, encoded with the run's tokenizer.
    """
    import data

    folder = Path(source or record["data"]["folder"])
    if source is not None and data.full_name(source) == record["data"]["source"]:
        folder = Path(record["data"]["folder"])  # the text the run was trained on: its held-out part alone is scored
        source = None
    if source is None and not (folder / "meta.json").exists():
        raise InputError(f"{folder}, the data this run was trained on, is not here: score other text with --data PATH")
    if not (folder / "meta.json").exists():
        return source, encoded_documents(run, record, source)
    meta = data.read_meta(folder)
    if meta["tokenizer"]["sha256"] != record["data"]["tokenizer"]["sha256"]:
        raise InputError(f"{folder} was made with another tokenizer than the run's: give --data the text itself")
    return f"{split} of {folder}", data.split_documents(data.open_split(folder, split), meta["eot"])


def encoded_documents(run, record, source):
    """The documents of a text source, encoded with the run's tokenizer; uint16 arrays, <|endoftext|> first."""
    import numpy as np

    import data

    path = Path(run) / "tokenizer.tiktoken"
    if fingerprint(path) != record["data"]["tokenizer"]:
        raise InputError(f"{path} has not the size and hash that config.json says: it was damaged or replaced")
    encoding = data.load_tokenizer(path, record["data"]["pattern"])
    for text in data.documents(source):
        yield np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def trimmed(documents, longest, limit):
    """[(inputs, targets)] of documents that hold `longest` targets, trimmed to a multiple of it; InputError if none."""
    pairs, usable = [], 0
    for document in documents:
        usable = max(usable, len(document) - 1)
        if n := (len(document) - 1) // longest * longest:
            pairs.append((document[:n], document[1 : n + 1]))
        if len(pairs) == limit:
            break
    if not pairs:
        raise InputError(
            f"no held-out document has {longest:,} tokens, the longest length: the longest usable one is {usable:,}"
        )
    return pairs


# ---- protocols: (model, pairs, length) to the summed loss and the number of targets ----------------------------------


def nonoverlap(model, pairs, length, bar):
    """Documents in windows of `length` that do not overlap: (summed negative log-likelihood in nats, targets)."""
    import numpy as np
    import torch

    device = model.embedding.weight.device
    inputs = np.concatenate([x.reshape(-1, length) for x, _ in pairs])  # (windows, length)
    targets = np.concatenate([y.reshape(-1, length) for _, y in pairs])
    total, at_once = 0.0, max(1, BATCH_TOKENS // length)
    for i in range(0, len(inputs), at_once):
        x, y = (torch.from_numpy(a[i : i + at_once].astype(np.int64)).to(device) for a in (inputs, targets))
        total += model.token_losses(x, y).cpu().double().sum().item()
        bar.update(x.numel())
    return total, targets.size


PROTOCOLS = {"nonoverlap": nonoverlap}


def evaluate(run, args):
    """One row a length, as --json writes them; loss is None where the encoding has no position to give."""
    from tqdm import tqdm

    from model_torch import load_model, pick_device

    model, record = load_model(run, pick_device(args.device))
    trained = model.config.context
    lengths = args.lengths or [trained * multiple for multiple in MULTIPLES]
    longest = max(lengths)
    if odd := [str(length) for length in lengths if longest % length]:
        raise InputError(
            f"lengths must divide the longest, {longest}, so that each scores the same tokens: not {', '.join(odd)}"
        )
    name, documents = held_out(run, record, args.split, args.data)
    pairs = trimmed(documents, longest, args.max_docs)
    n_targets = sum(len(y) for _, y in pairs)
    common = {
        "run": str(run),
        "pe": model.config.encoding.pe,
        "protocol": args.protocol,
        "scale": 1.0,
        "rope_scaling": "none",
        "split": args.split,
        "data": name,
        "n_documents": len(pairs),
        "trained_length": trained,
        "step": record["checkpoint"]["step"],
    }
    rows = []
    if not sys.stderr.isatty():
        print(f"scoring {run} ...", flush=True)
    with tqdm(
        total=n_targets * len(lengths),
        desc=str(run),
        unit="tok",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        for length in lengths:
            row = {**common, "length": length, "loss": None, "perplexity": None, "n_targets": 0}
            if length <= model.encoding.longest:
                total, count = PROTOCOLS[args.protocol](model, pairs, length, bar)
                row |= {"loss": total / count, "perplexity": math.exp(min(total / count, 700)), "n_targets": count}
            rows.append(row)
    return rows


# ---- what is shown ---------------------------------------------------------------------------------------------------


def print_table(rows, key, title, form):
    """One row a run, one column a length; * marks the trained length, a dash what the encoding cannot do."""
    runs, lengths = sorted({(row["run"], row["pe"]) for row in rows}), sorted({row["length"] for row in rows})
    cells = {(row["run"], row["length"]): row for row in rows}
    width = max(len(run) for run, _ in runs)
    print(f"\n{title}\n{'run':{width}}  {'pe':10}" + "".join(f"{length:>9,} " for length in lengths))
    for run, pe in runs:
        line = f"{run:{width}}  {pe:10}"
        for length in lengths:
            row = cells.get((run, length))
            value = "" if row is None else "-" if row[key] is None else format(row[key], form)
            line += f"{value:>9}{'*' if row and length == row['trained_length'] else ' '}"
        print(line.rstrip())


def plot(rows, path):
    """Loss against length for all runs, the length on a log axis, each curve named at its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = (
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#000000",
    )  # Okabe and Ito: colour-blind-safe
    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    runs = sorted({row["run"] for row in rows})
    pes = [next(row["pe"] for row in rows if row["run"] == run) for run in runs]
    ends = []
    for i, run in enumerate(runs):
        points = sorted((row["length"], row["loss"]) for row in rows if row["run"] == run and row["loss"] is not None)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colours[i % len(colours)])
            ends.append(
                (
                    points[-1][1],
                    points[-1][0],
                    pes[i] if pes.count(pes[i]) == 1 else Path(run).name,
                    colours[i % len(colours)],
                )
            )
    low, high = axis.get_ylim()
    at = -math.inf
    for loss, length, label, colour in sorted(ends):  # labels from the lowest up, each clear of the one below
        at = max(loss, at + (high - low) / 22)
        axis.text(length * 1.06, at, label, color=colour, va="center", fontsize=10)
    lengths = sorted({row["length"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    for trained in {row["trained_length"] for row in rows}:
        axis.axvline(trained, color="grey", linestyle=":", linewidth=1)
        axis.annotate(
            "trained length",
            (trained, 1),
            (4, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="grey",
            va="top",
            fontsize=9,
        )
    axis.set(
        xlabel="tokens in the window",
        ylabel="loss, nats a token",
        title="Loss past the trained length, the same targets at every length",
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


# ---- as a script -----------------------------------------------------------------------------------------------------


def length_list(text):
    """[512, 1024] from "512,1024", for argparse."""
    lengths = [whole(part) for part in text.split(",")]
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, such as 512,1024,2048")
    return sorted(set(lengths))


def main():
    parser = CommandLine(
        description="Score runs at lengths past the trained one, on the same held-out tokens at each.",
        epilog=__doc__[__doc__.index("Protocol") :],
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    parser.add_argument(
        "--lengths", type=length_list, metavar="N,N,...", help="default: 1, 2, 4, 8 and 16 times the trained length"
    )
    parser.add_argument(
        "--protocol", choices=tuple(PROTOCOLS), default="nonoverlap", help="how tokens are scored (default: nonoverlap)"
    )
    parser.add_argument("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    parser.add_argument(
        "--data", metavar="DIR|PATH", help="score this instead: a prepared folder, or text as data.py reads it"
    )
    parser.add_argument("--max-docs", type=whole, metavar="N", help="score the first N usable documents only")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if there is one)"
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the numbers as a list of objects, one a run and length"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    with parser.one_line_errors():
        args = parser.parse_args()
        if args.max_docs is not None and args.max_docs < 1:
            parser.error(f"--max-docs must be at least 1, got {args.max_docs}")
        runs = [Path(run) for run in args.runs] or sorted(
            path.parent for path in Path("runs").glob("[!.]*/config.json")
        )
        if not runs:
            parser.error("there is no run under runs/: train one with python train.py --pe expe --l 24")
        configs = {str(run): read_run(run) for run in runs}
        rows = [row for run in dict.fromkeys(runs) for row in evaluate(run, args)]
        for name, n_documents, n_targets in sorted(
            {(row["data"], row["n_documents"], row["n_targets"]) for row in rows if row["n_targets"]}
        ):
            print(f"{name}: {n_documents:,} documents, {n_targets:,} targets at every length")
        for run, (_, train, record) in configs.items():
            if record["checkpoint"]["step"] < train.steps:
                print(f"{run} is not finished: step {record['checkpoint']['step']:,} of {train.steps:,}")
        print_table(rows, "loss", "loss, nats a token (* trained length)", ".3f")
        print_table(rows, "perplexity", "perplexity (* trained length)", ".1f")
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if args.plot:
            plot(rows, args.plot)
            print(f"\npicture: {args.plot}")


if __name__ == "__main__":
    main()
