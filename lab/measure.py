"""The loss of runs past their trained length, by every protocol and probe.

    python -m lab.measure                              every run under runs/, at 1, 2, 4, 8, 16 times its trained length
    python -m lab.measure --protocol same-targets      the same targets with more and more context, with intervals
    python -m lab.measure runs/expe --probe swap       whether what is far back was used at all
    python -m lab.measure runs/expe runs/rope --scale 1,auto --rope-scaling none,linear,ntk,yarn,dual-chunk

A measure (lab/measures.py) turns held-out documents into windows of tokens; a Reader (longer/reading.py) gives the loss
of each target; here are the two brought together, a row a run and length. lab.table prints the rows. Of runs that were
trained on a task, accuracies are measured.
"""

import functools
import itertools
import sys
import textwrap
from argparse import Namespace

from cli import PICTURES, CommandLine, at_least, listed, new_file

# cli comes first: it says in one line which package is missing
# isort: split
from tqdm import tqdm

import tasks
from backends import pick_device
from eval import MULTIPLES, default_lengths, held_out
from files import write_rows
from lab import measures, table
from longer import flags, methods
from longer.reading import CANNOT_STREAM, load
from longer.scaling import CLIPPED
from runs import load_model, read_named, read_run, try_to_read, warn_of_changes
from settings import InputError, prefix_errors, require_finite
from tokenizer import read_tokenizer

TASK_ROW = ("accuracy", "whole", "end")  # of a task's row: what is stored of it

# ---- what is to be read ----------------------------------------------------------------------------------------------

def scalings_of(configs, options):
    """{run: [scale_to's keywords]}: of the values asked for, each run takes those that its encoding has a use for.

    configs: {run: what read_run gives}. Raises InputError for a value that none of the runs has a use for, or that is
    wrong for one of them.
    """
    plain = {key: value for key, value in options.items() if key != "keys"} | {"scale": 1.0, "rope_scaling": "none"}
    by_run = {run: {"scale": [], "rope_scaling": []} for run in configs}
    for name, value in [(key, value) for key in ("scale", "rope_scaling") for value in options[key]]:
        errors = []
        for run, (model, _, _) in configs.items():
            try:
                methods.scale_positions(model, model.context, **plain | {name: value})
                by_run[run][name].append(value)
            except methods.NotForThisEncoding as error:
                errors.append(f"{run}: {error}")
            except InputError as error:
                raise InputError(f"{run}: {error}") from None
        if len(errors) == len(configs):
            raise InputError(errors[0])
    return {run: [options | {"scale": scale, "rope_scaling": rope_scaling}
                  for scale in values["scale"] or [1.0] for rope_scaling in values["rope_scaling"] or ["none"]]
            for run, values in by_run.items()}

def windows_of(run, record, args, source, documents, lengths):
    """(source, documents, jobs) of a run: each job is (protocol or probe, length, lists of windows).

    source, documents: what eval.held_out gives.
    """
    measure = measures.MEASURES[args.measure]
    context = record["model"]["context"]
    longest = max(lengths)
    if measure.whole and (odd := [str(length) for length in lengths if longest % length]):
        raise InputError(f"--lengths must divide the longest, {longest}, so that each scores the same tokens: not "
                         f"{', '.join(odd)}")
    tokenizer = functools.cache(lambda: read_tokenizer(run, record["data"]))
    usual = context if args.lengths or args.at else min(context, longest)          # where no document has L tokens
    settings = measures.Settings(context, longest, args.targets or max(1, usual // measure.share),
                                 args.stride or max(1, usual // 4), lambda text: tokenizer().encode_ordinary(text))
    for flag in ("targets", "stride"):
        if flag in measure.flags and not 1 <= (value := getattr(settings, flag)) <= min(lengths):
            raise InputError(f"--{flag} must be from 1 to {min(lengths)}, the shortest length, got {value}")
    documents = measures.usable(documents, longest, args.max_docs)
    jobs = [(args.measure, length) for length in lengths]
    if measure.beside and longest > context:
        jobs.append((measure.beside, context))
    jobs = [(job, length, measures.MEASURES[job].conditions(documents, length, settings)) for job, length in jobs]
    if not any(conditions for *_, conditions in jobs):
        raise InputError(f"{args.measure} has nothing to ask at {longest} tokens, of which the trained length is "
                         f"{context}")
    return source, documents, jobs

def lengths_of(configs, texts, args):
    """{run: the lengths that are asked for, in order}; by default those that its documents have, and the others named.

    texts: {run: what held_out gives}.
    """
    contexts = {run: model.context for run, (model, _, _) in configs.items()}
    if args.lengths or args.at:
        return {run: sorted(args.lengths or {max(1, round(multiple * context)) for multiple in args.at})
                for run, context in contexts.items()}
    chosen = default_lengths({run: (args.data or configs[run][2]["data"]["source"], contexts[run], documents)
                              for run, (_, documents) in texts.items()})
    for line in dict.fromkeys(f"{texts[run][0]}: {line}" for run, (_, lines) in chosen.items() for line in lines):
        print(line, file=sys.stderr)
    return {run: lengths for run, (lengths, _) in chosen.items()}

# ---- one run ---------------------------------------------------------------------------------------------------------

def name_of(how, dtype):
    """How positions are scaled, keys hidden and numbers rounded, in a few words; "" as they were trained, in fp32."""
    scale, method = how["scale"], how["rope_scaling"]
    parts = [f"scale {scale}"] * (scale != 1)
    if method != "none":
        alone = method in (methods.DUAL_CHUNK, methods.HOLD, CLIPPED)
        steep = method == methods.LEAST and how["factor"] == "auto"
        parts.append(method if alone else f"{method} {float(methods.STEEP) if steep else how['factor']}")
    parts += [f"keys {how['keys']}"] * (how["keys"] is not None)
    return ", ".join(parts + [dtype] * (dtype != "fp32"))

def evaluate(run, work, scalings, args, bar):
    """One row a dtype, scaling of positions and length, as --json writes them; loss None where there is none.

    work: what windows_of gives; the bar is told of each token.
    """
    source, documents, jobs = work
    rows = []
    for dtype, how in itertools.product(args.dtype, scalings):
        model, record = load(run, pick_device(args.device), dtype)
        context = model.trained.context
        stream = flags.stream_sizes(args, context) if measures.MEASURES[args.measure].stream else None
        for job, length, conditions in jobs:
            span = min(length, sum(stream) + 1) if stream else length                  # no position is beyond that
            pe = model.scale_to(span, **how).config.encoding.pe
            row = {"run": str(run), "pe": pe, "protocol": job, "how": name_of(how, dtype), "chunk": model.mode.chunk,
                   "dtype": dtype, "length": length, "loss": None, "perplexity": None, "n_targets": 0,
                   "trained_length": context, "step": record["step"], "steps": record["train"]["steps"],
                   "seed": record["train"]["seed"], "code": record["provenance"].get("code"),
                   "split": args.split, "data": source, "n_documents": len(documents),
                   "max_docs": args.max_docs}
            if conditions and span <= model.longest and (not stream or model.can_stream()):
                losses = [model.window_losses(windows, bar, stream) for windows in conditions]
                row |= measures.summary(conditions, losses)
                if not row["how"]:                                      # other positions and dtypes may be too much
                    with prefix_errors(run):
                        require_finite(row["loss"] is not None)
                row["targets_sha256"] = measures.fingerprint(conditions[0])
                if job == "far-repeats" and row["loss"] is not None:
                    row["by_distance"] = measures.by_distance(conditions[0], losses[0], context)
            rows.append(row)
    return rows

def score(args):
    """The rows of the runs that are named, as --json writes them."""
    pick_device(args.device)                                           # a wrong one is no reason to leave a run out
    configs = {str(run): config for run, config in read_named(args.runs, read_run).items()}
    of_tasks = {run: config[2] for run, config in configs.items() if config[2]["data"]["source"].startswith("task:")}
    if of_tasks.keys() == configs.keys():
        return [row for run in configs for row in score_task(run, args)]
    if not args.runs:                                                   # of all runs, those on text
        configs = {run: config for run, config in configs.items() if run not in of_tasks}
    elif of_tasks:
        raise InputError(f"{next(iter(of_tasks))} was trained on a task: measure it apart from runs on text")
    for run, (model, _, _) in configs.items():
        with prefix_errors(run):
            methods.limit_windows(model, args.keys)
    if masked := [run for run, (_, train, _) in configs.items() if train.objective == "mlm"]:
        raise InputError(f"{masked[0]} predicts masked tokens, not the next one: python -m lab.curves draws its losses")
    texts = {run: text for run, (_, _, record) in configs.items() if (text := try_to_read(
        run, functools.partial(held_out, record=record, split=args.split, source=args.data), args.runs)) is not None}
    if not texts:
        raise InputError("no run under runs/ can be measured: the lines above say why")
    configs = {run: configs[run] for run in texts}
    scalings = scalings_of(configs, flags.scaling_of(args))
    work = {run: windows_of(run, configs[run][2], args, *texts[run], lengths)
            for run, lengths in lengths_of(configs, texts, args).items()}
    for run in configs:
        warn_of_changes(run)
    ways = {run: len(scalings[run]) * len(args.dtype) for run in configs}
    total = sum(ways[run] * (len(window.tokens) - 1) for run, (_, _, jobs) in work.items()
                for *_, conditions in jobs for windows in conditions for window in windows)
    rows = []
    with tqdm(total=total, unit="tok", unit_scale=True, leave=False, disable=None, smoothing=0) as bar:
        for run in configs:
            bar.set_description(run[-30:])                              # or 80 columns have no room for the time left
            measure_it = functools.partial(evaluate, work=work.pop(run), scalings=scalings[run], args=args, bar=bar)
            rows += try_to_read(run, measure_it, args.runs) or []
    if not rows:
        raise InputError("no run under runs/ can be measured: the lines above say why")
    if all(row["loss"] is None for row in rows) and args.measure == "streaming":
        raise InputError(f"{' and '.join(sorted({row['pe'] for row in rows}))} {CANNOT_STREAM}")
    return rows

def score_task(run, args):
    """The rows of a run that was trained on a task."""
    if args.keys is not None:
        raise InputError(f"--keys is for runs on text, and {run} was trained on a task: leave it out")
    model, record = load_model(run)
    warn_of_changes(run)
    model.to(pick_device(args.device))
    asked = Namespace(data=args.data, lengths=args.lengths, split=args.split, plot=None)
    return tasks.evaluate(run, model, record, asked, args.at or MULTIPLES)

def stored(row):
    """(line of targets or None, row) of a row, as lab/results.py stores them."""
    if row["protocol"] == "task":
        key = f"{row['data']}, {row['length']}"
        fact = {"targets": key, "text": row["data"], "counts": [row["n_sequences"]], "chance": row["chance"],
                "guess": row["guess"]}
        return fact, {"protocol": "task", "length": row["length"], "targets": key,
                      **{name: row[name] and round(row[name], 6) for name in TASK_ROW}}
    line = {"protocol": row["protocol"], "length": row["length"], "losses": None}
    line |= {"how": row["how"]} if row["how"] else {}
    if row["loss"] is None:
        return None, line
    key = row["targets_sha256"][:16]
    line |= {"targets": key, "losses": row["unit_losses"]}
    line |= {"by_distance": row["by_distance"]} if "by_distance" in row else {}
    line |= {"without": row["unit_losses_without"]} if "unit_losses_without" in row else {}
    return {"targets": key, "text": row["data"], "counts": row["unit_targets"]}, line

# ---- as a script -----------------------------------------------------------------------------------------------------

def command_line():
    def explained(title, entries):
        return f"{title}:\n" + "\n".join(
            textwrap.fill(f"{name}: {measure.about}", 80, initial_indent="  ", subsequent_indent="      ")
            for name, measure in entries.items())

    parser = CommandLine(
        prog="python -m lab.measure",
        description="Score runs at lengths past the trained one, on the same held-out tokens at each.",
        epilog=explained("protocols", measures.PROTOCOLS) + "\n\n" + explained("probes", measures.PROBES))
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    which = parser.add_mutually_exclusive_group().add_argument
    which("--lengths", type=listed(at_least(1)), metavar="N,N,...",
          help="default: those of 1, 2, 4, 8, 16 x the trained length that held-out documents have")
    which("--at", type=listed(table.multiple), metavar="1x,16x", help="multiples of the trained length")
    add("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    add("--data", metavar="DIR|PATH", help="score other text: a prepared folder, or text as data.py reads it")
    add("--max-docs", type=at_least(1), metavar="N", help="score N usable documents, evenly spaced")
    what = parser.add_argument_group("what is measured").add_mutually_exclusive_group().add_argument
    what("--protocol", dest="measure", choices=tuple(measures.PROTOCOLS), default="nonoverlap", metavar="NAME",
         help="how tokens are scored (default: nonoverlap)")
    what("--probe", dest="measure", choices=tuple(measures.PROBES), metavar="NAME",
         help="whether and how the far context is used")
    how = parser.add_argument_group("of some protocols and probes")
    how.add_argument("--targets", type=at_least(1), metavar="N",
                     help="same-targets, sliding and swap: targets at the end of each document (default: half the "
                          "trained length); spread: at each place (default: an eighth of it)")
    how.add_argument("--stride", type=at_least(1), metavar="N",
                     help="sliding: targets that one window scores (default: a quarter of the trained length)")
    flags.add_stream_flags(how)
    flags.add_scaling_flags(parser, several=True)
    add("--dtype", type=listed(str, *flags.PRECISIONS), default=["fp32"], metavar="NAME,...",
        help="of the weights and of what is computed: fp32, bf16, fp16, or int8 (weights alone); each a row")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--json", type=new_file(".json"), metavar="FILE", help="write the numbers: a list of objects")
    add("--plot", type=new_file(*PICTURES), metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    return parser

def read_flags(argv):
    """The flags; InputError for one that what is measured has no use for."""
    args = command_line().parse_args(argv)
    measure = measures.MEASURES[args.measure]
    kind = "probe" if args.measure in measures.PROBES else "protocol"
    for name in ("targets", "stride", "sinks", "window"):
        if name not in measure.flags and getattr(args, name) is not None:
            raise InputError(f"--{name} has no use with --{kind} {args.measure}: leave it out")
    return args

def main(argv=None):
    with command_line().one_line_errors():
        args = read_flags(argv)
        rows = score(args)
        if args.json:
            write_rows(args.json, rows)
        table.print_tables(table.from_rows(rows))
        if args.plot:
            from lab import pictures
            pictures.losses(rows, args.plot)
            print(f"\npicture: {args.plot}")

if __name__ == "__main__":
    main()
