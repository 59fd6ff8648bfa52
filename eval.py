"""What a run's loss is past the trained length, for one run or many, as tables and pictures.

    python eval.py                              every run under runs/, at 1, 2, 4, 8, 16 times its trained length
    python eval.py --protocol same-targets      the same targets with more and more context, with intervals
    python eval.py runs/expe --probe swap       whether what is far back was used at all
    python eval.py runs/expe runs/rope --scale 1,auto --rope-scaling none,linear,ntk,yarn,dual-chunk

measures.py has the protocols and the probes; here are the runs, the reading, and what is shown.
"""

import functools
import itertools
import sys
import textwrap
from pathlib import Path

from config import (
    CANNOT_STREAM,
    DUAL_CHUNK,
    PRECISIONS,
    CommandLine,
    InputError,
    Unused,
    add_scaling_flags,
    add_stream_flags,
    listed,
    new_file,
    picture,
    read_run,
    runs_to_score,
    scaling_of,
    stream_sizes,
    whole,
    write_rows,
)

# torch, NumPy and what imports them are imported where they are used, so that --help and a wrong flag answer at once.

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


def usable(documents, longest, limit):
    """Those of at least `longest` targets, the first `limit` of them; InputError if there is none."""
    found, most = [], 0
    for document in documents:
        most = max(most, len(document) - 1)
        if len(document) > longest:
            found.append(document)
        if len(found) == limit:
            break
    if not found:
        raise InputError(
            f"no held-out document has {longest:,} tokens, the longest length: the longest usable one is {most:,}"
        )
    return found


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(model, windows, bar, stream=None):
    """The losses in nats of the scored targets of each window, a list of float32 arrays.

    stream: the (sinks, window) of a cache that reads on token by token. Windows of one length are read side by side.
    """
    import numpy as np
    import torch

    from model_torch import Cache

    device, losses, by_length = model.embedding.weight.device, [None] * len(windows), {}
    for i, window in enumerate(windows):
        by_length.setdefault(len(window.tokens) - 1, []).append(i)
    for length, indices in by_length.items():
        at_once = max(1, STREAM_TOKENS // (sum(stream) + 1) if stream else BATCH_TOKENS // length)
        step = 64 if stream else length
        for batch in (indices[i : i + at_once] for i in range(0, len(indices), at_once)):
            tokens = np.stack([windows[i].tokens for i in batch]).astype(np.int64)  # (windows, length + 1)
            tokens, cache, parts = torch.from_numpy(tokens).to(device), Cache(*stream) if stream else None, []
            for j in range(0, length, step):
                x = tokens[:, j : j + step + 1]
                parts.append(model.token_losses(x[:, :-1], x[:, 1:], cache=cache).float().cpu())
                bar.update(parts[-1].numel())
            for i, found in zip(batch, torch.cat(parts, dim=1).numpy(), strict=True):  # (length,)
                losses[i] = found[len(found) - windows[i].scored :]
    return losses


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


def name_of(scale, rope_scaling, factor, dtype="fp32"):
    """How positions are laid and numbers rounded, in a word or two; "" as they were trained, in fp32."""
    parts = [f"scale {scale}"] if scale != 1 else []
    if rope_scaling != "none":
        parts.append(rope_scaling if rope_scaling == DUAL_CHUNK else f"{rope_scaling} {factor}")
    return ", ".join(parts + [dtype] * (dtype != "fp32"))


def evaluate(run, ways, args):
    """One row a dtype, way of laying positions and length, as --json writes them; loss None where there is none."""
    from tqdm import tqdm

    import data
    import measures
    from model_torch import load_model, pick_device

    trained, _, record = read_run(run)
    device, name = pick_device(args.device), args.probe or args.protocol
    measure, context = measures.MEASURES[name], trained.context
    lengths = args.lengths or [context * multiple for multiple in MULTIPLES]
    longest = max(lengths)
    if measure.whole and (odd := [str(length) for length in lengths if longest % length]):
        raise InputError(
            f"lengths must divide the longest, {longest}, so that each scores the same tokens: not {', '.join(odd)}"
        )
    tokenizer = functools.cache(lambda: data.run_tokenizer(run, record))
    settings = measures.Settings(
        context=context,
        longest=longest,
        targets=context // 2 if args.targets is None else args.targets,
        stride=context // 4 if args.stride is None else args.stride,
        encode=lambda text: tokenizer().encode_ordinary(text),
    )
    for flag in ("targets", "stride"):
        if flag in measure.flags and not 1 <= (value := getattr(settings, flag)) <= min(lengths):
            raise InputError(f"--{flag} must be from 1 to {min(lengths)}, the shortest length, got {value}")
    source, documents = held_out(run, record, args.split, args.data)
    documents = usable(documents, longest, args.max_docs)
    jobs = [(name, length) for length in lengths]
    if measure.beside and longest > context:
        jobs.append((measure.beside, context))
    jobs = [(job, length, measures.MEASURES[job].arms(documents, length, settings)) for job, length in jobs]
    if not any(arms for *_, arms in jobs):
        raise InputError(f"{name} has nothing to ask at {longest} tokens, of which the trained length is {context}")
    stream = stream_sizes(args, context) if measure.stream else None

    rows, how = [], scaling_of(args)
    n_tokens = sum(len(window.tokens) - 1 for *_, arms in jobs for windows in arms for window in windows)
    n_tokens *= len(ways) * len(args.dtype)
    if not sys.stderr.isatty():
        print(f"scoring {run} by {n_tokens:,} tokens ...", flush=True)
    with tqdm(
        total=n_tokens,
        desc=str(run),
        unit="tok",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        for dtype, (scale, rope_scaling) in itertools.product(args.dtype, ways):
            model, _ = load_model(run, device, dtype)
            for job, length, arms in jobs:
                span = min(length, sum(stream) + 1) if stream else length  # no position is beyond that
                model.use(trained.scaled(span, scale, rope_scaling, how["factor"], how["chunk"]))
                laid = model.config.encoding
                row = {
                    "run": str(run),
                    "pe": laid.pe,
                    "protocol": job,
                    "how": name_of(scale, rope_scaling, how["factor"], dtype),
                    "scale": laid.scale or 1.0,
                    "rope_scaling": rope_scaling,
                    "factor": laid.factor,
                    "chunk": laid.chunk,
                    "dtype": dtype,
                    "length": length,
                    "loss": None,
                    "perplexity": None,
                    "n_targets": 0,
                    "trained_length": context,
                    "step": record["checkpoint"]["step"],
                    "seed": record["train"]["seed"],
                    "weights": record["checkpoint"]["files"]["model.safetensors"]["sha256"],
                    "split": args.split,
                    "data": source,
                    "n_documents": len(documents),
                    "max_docs": args.max_docs,
                }
                if arms and span <= model.encoding.longest and (not stream or model.encoding.streams):
                    losses = [read(model, windows, bar, stream) for windows in arms]
                    row |= measures.summary(arms, losses) | {"targets_sha256": measures.fingerprint(arms[0])}
                    if args.per_position:
                        block = max(1, context // 8)
                        row |= {"block": block, "by_position": measures.by_position(losses[0], block)}
                rows.append(row)
    return rows


# ---- what is shown ---------------------------------------------------------------------------------------------------


def compare(rows):
    """Give rows of the same targets their paired differences, each with a 95% interval over documents.

    over_1x: from the same line's loss at the trained length; over_sliding: from the run's loss by a sliding window of
    that length, its positions as it was trained if it has such a line; minus: {line: ...}, from each line further down.
    """
    import measures

    same_targets = {}
    for row in rows:
        if row["loss"] is not None:
            same_targets.setdefault((row["targets_sha256"], row["n_documents"]), []).append(row)
    for group in same_targets.values():
        found = {(*line_of(row), row["protocol"], row["length"]): row for row in group}
        lines, pairs = list(dict.fromkeys(map(line_of, group))), []
        for row in group:
            line, protocol, length = line_of(row), row["protocol"], row["length"]
            trained = row["trained_length"]
            one = found.get((*line, protocol, trained))
            other = found.get((row["run"], "", "sliding", trained)) or found.get((*line, "sliding", trained))
            if one is not None and length != trained:
                pairs.append((row, one, row, "over_1x"))
            if other is not None and protocol != "sliding":
                pairs.append((row, other, row, "over_sliding"))
            row["minus"] = {}
            for later in lines[lines.index(line) + 1 :]:
                if (other := found.get((*later, protocol, length))) is not None:
                    pairs.append((row, other, row["minus"], " ".join(later).strip()))
        if pairs:
            differences = [[a - b for a, b in zip(row["unit_losses"], other["unit_losses"], strict=True)]
                           for row, other, *_ in pairs]  # fmt: skip
            for (*_, into, key), value in zip(
                pairs, measures.intervals(differences, group[0]["unit_targets"]), strict=True
            ):
                into[key] = value


def line_of(row):
    """(run, how): what makes a line of a table or a curve of a picture."""
    return row["run"], row["how"]


def spread(value):
    """A difference with its interval, in words of a table."""
    return "{:+.3f} ({:+.3f} {:+.3f})".format(*value)


def print_table(rows, title, cell):
    """One line a run and way, one column a length: cell(row), "" to leave it empty; * marks the trained length."""
    columns = list(dict.fromkeys((row["protocol"], row["length"]) for row in rows))
    main = rows[0]["protocol"]
    heads = [f"{length:,}" if protocol == main else f"{protocol} {length:,}" for protocol, length in columns]
    table = {}
    for row in rows:
        text = "-" if row["loss"] is None else cell(row)
        trained = row["length"] == row["trained_length"] and row["protocol"] == main and text not in ("", "-")
        cells = table.setdefault((row["run"], row["pe"], row["how"]), {})
        cells[row["protocol"], row["length"]] = text + "* "[not trained]
    filled = [i for i, column in enumerate(columns) if any(cells.get(column, "").strip() for cells in table.values())]
    if not filled:
        return
    widths = {i: 2 + max(len(heads[i]) + 1, *(len(cells.get(columns[i], "")) for cells in table.values()))
              for i in filled}  # fmt: skip
    runs, ways = (max(len(line[i]) for line in table) for i in (0, 2))
    ways, pes = max(ways, 9) + 2 if ways else 0, 10 if any(pe for _, pe, _ in table) else 0
    print(f"\n{title}\n{'run':{runs}}  {'pe' if pes else '':{pes}}{'positions' if ways else '':{ways}}"
          + "".join(f"{heads[i] + ' ':>{widths[i]}}" for i in filled).rstrip())  # fmt: skip
    for (run, pe, how), cells in table.items():
        print((f"{run:{runs}}  {pe:{pes}}{how:{ways}}"
               + "".join(f"{cells.get(columns[i], ''):>{widths[i]}}" for i in filled)).rstrip())  # fmt: skip


def print_rows(rows):
    """All that is said of the rows of one measure."""
    lines = {(row["data"], row["n_documents"], row["n_targets"], len(row["unit_targets"]))
             for row in rows if row["loss"] is not None}  # fmt: skip
    for name, n_documents, n_targets, n_units in sorted(lines):
        trials = f" in {n_units} trials" * (n_units != n_documents)
        print(f"{name}: {n_documents:,} documents, {n_targets:,} targets{trials} at every length")
    scored = [row for row in rows if row["loss"] is not None]
    if any("gain" in row for row in rows):
        print_table(rows, "loss, nats a token (* trained length)", lambda row: format(row["loss"], ".3f"))
        print_table(rows, "loss without it", lambda row: format(row["without"], ".3f"))
        print_table(rows, "gain, with its 95% interval", lambda row: spread(row["gain"]))
        print_table(rows, "share of documents or trials with a gain", lambda row: f"{row['won']:.0%}")
        return
    print_table(rows, "loss, nats a token (* trained length)", lambda row: format(row["loss"], ".3f"))
    if rows[0]["protocol"] == "same-targets":
        for key, title in (("over_1x", "the trained length"), ("over_sliding", "a sliding window of it")):
            print_table(rows, f"difference from {title}, with its 95% interval",
                        lambda row, key=key: spread(row[key]) if key in row else "")  # fmt: skip
        pairs = [{**row, "run": f"{' '.join(line_of(row)).strip()} - {other}", "how": "", "pe": "", "pair": value}
                 for row in scored for other, value in row["minus"].items()]  # fmt: skip
        if pairs:
            print_table(pairs, "difference of two runs, with its 95% interval", lambda row: spread(row["pair"]))
    else:
        print_table(rows, "perplexity (* trained length)", lambda row: format(row["perplexity"], ".1f"))
    if any("by_position" in row for row in scored):
        print_positions([row for row in scored if "by_position" in row])


def print_positions(rows):
    """The loss between doubling positions of the longest window, one line a run and way."""
    rows = list({line_of(row): row for row in sorted(rows, key=lambda row: row["length"])}.values())  # the longest
    longest = rows[-1]
    block, ends = longest["block"], [longest["block"]]
    while ends[-1] < longest["length"]:
        ends.append(min(2 * ends[-1], longest["length"]))
    spans = list(zip([0, *ends], ends, strict=False))
    parts = []
    for row in rows:
        for begin, end in spans:
            inside = row["by_position"][begin // block : -(-end // block)]
            if end <= row["length"] and row["block"] == block:
                parts.append({**row, "protocol": "", "length": end, "loss": sum(inside) / len(inside)})
    print_table(parts, "loss at positions up to n and beyond the column before", lambda row: format(row["loss"], ".3f"))


def draw_attention(args):
    """The picture of one run's attention over the first usable document."""
    import torch

    import pictures
    from model_torch import load_model, pick_device

    if len(args.runs) != 1 or len(args.dtype) > 1 or len(args.scale) > 1 or len(args.rope_scaling) > 1:
        raise InputError("--attention draws one run in one way: name one run, one --dtype and one way of scaling")
    run, how = args.runs[0], scaling_of(args)
    model, record = load_model(run, pick_device(args.device), args.dtype[0])
    trained, weights = model.config, {}
    lengths = args.lengths or [length for length in (trained.context, 4 * trained.context)
                               if length <= model.encoding.longest]  # fmt: skip
    if max(lengths) > model.encoding.longest:
        raise InputError(f"{run} has positions for {model.encoding.longest} tokens, and not for {max(lengths)}")
    source, documents = held_out(run, record, args.split, args.data)
    tokens = torch.from_numpy(usable(documents, max(lengths), 1)[0].astype("int64")).to(model.embedding.weight.device)
    for length in lengths:
        model.use(trained.scaled(length, args.scale[0], args.rope_scaling[0], how["factor"], how["chunk"]))
        weights[length] = model.attention(tokens[None, :length])[:, 0].float().cpu().numpy()  # (n_layers, H, T, T)
    pictures.attention(args.attention, weights, f"{run}, {source}")
    print(f"picture: {args.attention}")


# ---- as a script -----------------------------------------------------------------------------------------------------


def command_line():
    from measures import PROBES, PROTOCOLS

    def explained(title, entries):
        return f"{title}:\n" + "\n".join(
            textwrap.fill(f"{name}: {measure.about}", 100, initial_indent="  ", subsequent_indent="      ")
            for name, measure in entries.items()
        )

    parser = CommandLine(
        description="Score runs at lengths past the trained one, on the same held-out tokens at each.",
        epilog=explained("protocols", PROTOCOLS) + "\n\n" + explained("probes", PROBES),
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    parser.add_argument(
        "--lengths", type=listed(whole), metavar="N,N,...", help="default: 1, 2, 4, 8 and 16 times the trained length"
    )
    parser.add_argument("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    parser.add_argument(
        "--data", metavar="DIR|PATH", help="score this instead: a prepared folder, or text as data.py reads it"
    )
    parser.add_argument("--max-docs", type=whole, metavar="N", help="score the first N usable documents only")
    what = parser.add_argument_group("what is measured").add_mutually_exclusive_group()
    what.add_argument(
        "--protocol", choices=tuple(PROTOCOLS), default="nonoverlap", help="how tokens are scored (default: nonoverlap)"
    )
    what.add_argument("--probe", choices=tuple(PROBES), help="whether and how the far context is used")
    what.add_argument(
        "--tasks", type=listed(str), metavar="NAME,...",
        help="benchmarks by lm_eval, such as hellaswag,arc_easy,arc_challenge,mmlu",
    )  # fmt: skip
    what.add_argument(
        "--attention", type=picture, metavar="FILE",
        help="draw the attention of each head, inside and at 4 times the trained length, of one run",
    )  # fmt: skip
    how = parser.add_argument_group("of some protocols and probes")
    how.add_argument(
        "--per-position", action="store_true",
        help="the loss by position in the window too, smoothed over eighths of the trained length: where does an "
             "encoding break? (nonoverlap and streaming; --plot draws it)",
    )  # fmt: skip
    how.add_argument(
        "--targets", type=whole, metavar="N",
        help="same-targets, sliding and swap: targets at the end of each document (default: half the trained length)",
    )  # fmt: skip
    how.add_argument(
        "--stride", type=whole, metavar="N",
        help="sliding: targets that one window scores (default: a quarter of the trained length)",
    )  # fmt: skip
    add_stream_flags(how)
    tasks = parser.add_argument_group("of --tasks")
    tasks.add_argument("--limit", type=whole, metavar="N", help="the first N examples of each task only")
    tasks.add_argument("--shots", type=whole, metavar="N", help="examples in the prompt (default: the task's own)")
    tasks.add_argument("--task-path", metavar="DIR", help="a folder of tasks in lm_eval's own YAML format")
    add_scaling_flags(parser, several=True)
    parser.add_argument(
        "--dtype", type=listed(str, *PRECISIONS), default=["fp32"], metavar="NAME,...",
        help="of the weights and of what is computed: fp32, bf16, fp16, or int8 (weights alone); each a row",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if there is one)"
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the numbers as a list of objects, one a run and length"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    return parser


ANYWAY = {"runs", "device", "dtype"}
TEXT = {"lengths", "split", "data", "scale", "rope_scaling", "factor", "chunk"}


def check(parser, args):
    """InputError for a flag that is wrong, or that what is asked for has no use for."""
    from measures import MEASURES

    if args.tasks:
        what, reads = "--tasks", {"tasks", "limit", "shots", "task_path", "json"}
    elif args.attention:
        what, reads = "--attention", TEXT | {"attention"}
    else:
        measure = MEASURES[args.probe or args.protocol]
        what = f"--probe {args.probe}" if args.probe else f"--protocol {args.protocol}"
        reads = TEXT | {"protocol", "probe", "max_docs", "plot", "json", *measure.flags}
        reads |= {"per_position"} if measure.whole else set()
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in ANYWAY | reads:
            raise InputError(f"--{name.replace('_', '-')} has no use with {what}: leave it out")
    for name, least in (("max_docs", 1), ("limit", 1), ("shots", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.lengths is not None:
        if min(args.lengths) < 1:
            raise InputError(f"--lengths must be whole numbers above 0, such as 512,1024,2048, got {min(args.lengths)}")
        args.lengths.sort()


def score(args):
    """The rows of the runs that are named, with their differences, as --json writes them."""
    runs = runs_to_score(args.runs)
    configs = {str(run): read_run(run) for run in runs}
    ways = plan({run: model for run, (model, _, _) in configs.items()}, args)
    rows = [row for run in configs for row in evaluate(run, ways[run], args)]
    if all(row["loss"] is None for row in rows) and args.protocol == "streaming" and not args.probe:
        raise InputError(f"{' and '.join(sorted({row['pe'] for row in rows}))} {CANNOT_STREAM}")
    for run, (_, train, record) in configs.items():
        if record["checkpoint"]["step"] < train.steps:
            print(f"{run} is not finished: step {record['checkpoint']['step']:,} of {train.steps:,}")
    compare(rows)
    return rows


def main():
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args()
        check(parser, args)
        if args.tasks:
            import tasks

            rows = tasks.score(args)
            tasks.print_rows(rows)
        elif args.attention:
            return draw_attention(args)
        else:
            rows = score(args)
            print_rows(rows)
        if args.plot:
            import pictures

            pictures.losses(rows, args.plot)
            print(f"\npicture: {args.plot}")
        if args.json:
            write_rows(args.json, rows)


if __name__ == "__main__":
    main()
