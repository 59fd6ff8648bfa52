"""Loss past the trained length, for one run or many, as a table and a picture.

    python eval.py                              every run under runs/, at 1, 2, 4, 8, 16 times its trained length
    python eval.py runs/mini-expe-l24-s0 --lengths 128,512,2048 --plot loss.png
    python eval.py runs/expe runs/rope --scale 1,auto --rope-scaling none,linear,ntk,yarn,dual-chunk

Protocol `nonoverlap`, the paper's: the same tokens are scored at every length. Of each held-out document of at least
the longest length, the first k tokens are targets, k the largest multiple of that length. Their inputs, <|endoftext|>
and all but the last of them, are cut into windows of the length in question, which never cross documents. Negative
log-likelihoods are summed in fp64 and divided by the counted targets. It shows what a window of that length costs a
token on average; a longer window also starves fewer tokens of context, so part of a fall is not extrapolation.

Protocol `streaming`: the same windows, read token by token by a cache that keeps the first tokens and the last ones
(--sinks, --window) and lays them at positions 0, 1, 2, ... anew for each token. It shows what reading on in constant
memory costs; nothing further back than the window can be used, whatever the length.
"""

import itertools
import json
import math
import sys
from pathlib import Path

from config import (
    CANNOT_STREAM,
    DUAL_CHUNK,
    CommandLine,
    InputError,
    Unused,
    add_scaling_flags,
    add_stream_flags,
    all_runs,
    listed,
    new_file,
    picture,
    read_run,
    scaling_of,
    stream_sizes,
    whole,
)

# torch and what imports it are imported in the functions that use them, so that --help and a wrong flag answer at once.

MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length, when no --lengths are given
BATCH_TOKENS = 2**13  # tokens in one forward pass: bounds the memory, whatever the length
STREAM_TOKENS = 2**14  # tokens that all the streams side by side keep


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

    encoding = data.run_tokenizer(run, record)
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


# ---- protocols: (model, pairs, length, args, bar) to the summed loss and the number of targets -----------------------


def nonoverlap(model, pairs, length, args, bar):
    """Documents in windows of `length` that do not overlap: (summed negative log-likelihood in nats, targets)."""
    return _windows(model, pairs, length, bar, max(1, BATCH_TOKENS // length))


def streaming(model, pairs, length, args, bar):
    """The same windows, each read token by token by a stream of constant memory: the same sum, and targets."""
    from model_torch import Cache

    sizes = stream_sizes(args, model.config.context)
    at_once = max(1, STREAM_TOKENS // (sum(sizes) + 1))
    return _windows(model, pairs, length, bar, at_once, new_cache=lambda: Cache(*sizes), step=64)


def _windows(model, pairs, length, bar, at_once, new_cache=lambda: None, step=None):
    """Sums the losses of all windows, `at_once` side by side; with a cache, read on by `step` tokens at a time."""
    import numpy as np
    import torch

    device, step = model.embedding.weight.device, step or length
    inputs = np.concatenate([x.reshape(-1, length) for x, _ in pairs])  # (windows, length)
    targets = np.concatenate([y.reshape(-1, length) for _, y in pairs])
    total = 0.0
    for i in range(0, len(inputs), at_once):
        cache = new_cache()
        for j in range(0, length, step):
            x, y = (torch.from_numpy(a[i : i + at_once, j : j + step].astype(np.int64)).to(device)
                    for a in (inputs, targets))  # fmt: skip
            total += model.token_losses(x, y, cache=cache).cpu().double().sum().item()
            bar.update(x.numel())
    return total, targets.size


PROTOCOLS = {"nonoverlap": nonoverlap, "streaming": streaming}


def plan(configs, args):
    """{run: [(scale, rope_scaling)]}: of the values asked for, each run takes those that its encoding has a use for.

    Raises InputError for a value that none of the runs has a use for, or that is wrong for one of them.
    """
    how = scaling_of(args)
    plain = how | {"scale": 1.0, "rope_scaling": "none"}
    found = {run: {"scale": [], "rope_scaling": []} for run in configs}
    for name in ("scale", "rope_scaling"):
        for value in how[name]:
            errors = []
            for run, model in configs.items():
                try:
                    model.scaled(model.context, **plain | {name: value})
                    found[run][name].append(value)
                except Unused as error:
                    errors.append(f"{run}: {error}")
                except InputError as error:
                    raise InputError(f"{run}: {error}") from None
            if len(errors) == len(configs):
                raise InputError(errors[0])
    return {run: list(itertools.product(*(values or [plain[name]] for name, values in ways.items())))
            for run, ways in found.items()}  # fmt: skip


def name_of(scale, rope_scaling, factor):
    """How positions are laid, in a word or two; "" as they were trained."""
    parts = [f"scale {scale}"] if scale != 1 else []
    if rope_scaling != "none":
        parts.append(rope_scaling if rope_scaling == DUAL_CHUNK else f"{rope_scaling} {factor}")
    return ", ".join(parts)


def evaluate(run, ways, args):
    """One row a way of laying positions and a length, as --json writes them; loss None where there is none."""
    from tqdm import tqdm

    from model_torch import load_model, pick_device

    model, record = load_model(run, pick_device(args.device))
    trained = model.config
    lengths = args.lengths or [trained.context * multiple for multiple in MULTIPLES]
    longest = max(lengths)
    if odd := [str(length) for length in lengths if longest % length]:
        raise InputError(
            f"lengths must divide the longest, {longest}, so that each scores the same tokens: not {', '.join(odd)}"
        )
    if args.protocol == "streaming":
        full = sum(stream_sizes(args, trained.context)) + 1  # tokens: no position is beyond
    name, documents = held_out(run, record, args.split, args.data)
    pairs = trimmed(documents, longest, args.max_docs)
    n_targets = sum(len(y) for _, y in pairs)
    how = scaling_of(args)
    common = {
        "run": str(run),
        "pe": trained.encoding.pe,
        "protocol": args.protocol,
        "split": args.split,
        "data": name,
        "n_documents": len(pairs),
        "trained_length": trained.context,
        "step": record["checkpoint"]["step"],
    }
    rows = []
    if not sys.stderr.isatty():
        print(f"scoring {run} ...", flush=True)
    with tqdm(
        total=n_targets * len(lengths) * len(ways),
        desc=str(run),
        unit="tok",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        for (scale, rope_scaling), length in itertools.product(ways, lengths):
            span = min(length, full) if args.protocol == "streaming" else length
            model.use(trained.scaled(span, scale, rope_scaling, how["factor"], how["chunk"]))
            settings = model.config.encoding
            row = {
                **common,
                "how": name_of(scale, rope_scaling, how["factor"]),
                "scale": settings.scale or 1.0,
                "rope_scaling": rope_scaling,
                "factor": settings.factor,
                "chunk": settings.chunk,
                "length": length,
                "loss": None,
                "perplexity": None,
                "n_targets": 0,
            }
            if span <= model.encoding.longest and (args.protocol != "streaming" or model.encoding.streams):
                total, count = PROTOCOLS[args.protocol](model, pairs, length, args, bar)
                row |= {"loss": total / count, "perplexity": math.exp(min(total / count, 700)), "n_targets": count}
            rows.append(row)
    return rows


# ---- what is shown ---------------------------------------------------------------------------------------------------


def print_table(rows, key, title, form):
    """One row a run and way, one column a length; * marks the trained length, a dash what the encoding cannot do."""
    lines = list(dict.fromkeys((row["run"], row["pe"], row["how"]) for row in rows))
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["run"], row["how"], row["length"]): row for row in rows}
    runs, ways = (max(len(line[i]) for line in lines) for i in (0, 2))
    ways = max(ways, 9) + 2 if ways else 0
    print(f"\n{title}\n{'run':{runs}}  {'pe':10}{'positions' if ways else '':{ways}}"
          + "".join(f"{length:>9,} " for length in lengths))  # fmt: skip
    for run, pe, how in lines:
        line = f"{run:{runs}}  {pe:10}{how:{ways}}"
        for length in lengths:
            row = cells.get((run, how, length))
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
    curves = {}
    for row in rows:
        curve = curves.setdefault((row["run"], row["pe"], row["how"]), [])
        if row["loss"] is not None:
            curve.append((row["length"], row["loss"]))
    runs = {run: pe for run, pe, _ in curves}
    ends = []
    for i, ((run, pe, how), points) in enumerate(curves.items()):
        if points:
            style = {"color": colours[i % len(colours)], "linestyle": ("-", "--", ":")[i // len(colours) % 3]}
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
            label = pe if list(runs.values()).count(pe) == 1 else Path(run).name
            ends.append((points[-1][1], points[-1][0], f"{label} {how}".strip(), colours[i % len(colours)]))
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
        title=f"Loss past the trained length, the same targets at every length ({rows[0]['protocol']})",
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


# ---- as a script -----------------------------------------------------------------------------------------------------


def command_line():
    parser = CommandLine(
        description="Score runs at lengths past the trained one, on the same held-out tokens at each.",
        epilog=__doc__[__doc__.index("Protocol") :],
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    parser.add_argument(
        "--lengths", type=listed(whole), metavar="N,N,...", help="default: 1, 2, 4, 8 and 16 times the trained length"
    )
    parser.add_argument(
        "--protocol", choices=tuple(PROTOCOLS), default="nonoverlap", help="how tokens are scored (default: nonoverlap)"
    )
    parser.add_argument("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    parser.add_argument(
        "--data", metavar="DIR|PATH", help="score this instead: a prepared folder, or text as data.py reads it"
    )
    parser.add_argument("--max-docs", type=whole, metavar="N", help="score the first N usable documents only")
    add_stream_flags(parser.add_argument_group("protocol streaming"))
    add_scaling_flags(parser, several=True)
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if there is one)"
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the numbers as a list of objects, one a run and length"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    return parser


def main():
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args()
        if args.max_docs is not None and args.max_docs < 1:
            parser.error(f"--max-docs must be at least 1, got {args.max_docs}")
        if args.lengths is not None:
            if min(args.lengths) < 1:
                parser.error(f"--lengths must be whole numbers above 0, such as 512,1024,2048, got {min(args.lengths)}")
            args.lengths.sort()
        if args.protocol != "streaming" and (args.sinks is not None or args.window is not None):
            parser.error("--sinks and --window are for --protocol streaming: leave them out, or ask for that")
        runs = [Path(run) for run in args.runs] or all_runs()
        if not runs:
            parser.error("there is no run under runs/: train one with python train.py --pe expe --l 24")
        configs = {str(run): read_run(run) for run in runs}
        ways = plan({run: model for run, (model, _, _) in configs.items()}, args)
        rows = [row for run in configs for row in evaluate(run, ways[run], args)]
        if args.protocol == "streaming" and all(row["loss"] is None for row in rows):
            parser.error(f"{' and '.join(sorted({row['pe'] for row in rows}))} {CANNOT_STREAM}")
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
