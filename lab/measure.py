"""The loss of runs past their trained length, by every protocol and probe, as tables and pictures.

    python -m lab.measure                              every run under runs/, at 1, 2, 4, 8, 16 times its trained length
    python -m lab.measure --protocol same-targets      the same targets with more and more context, with intervals
    python -m lab.measure runs/expe --probe swap       whether what is far back was used at all
    python -m lab.measure runs/expe runs/rope --scale 1,auto --rope-scaling none,linear,ntk,yarn,dual-chunk

A measure (lab/measures.py) turns held-out documents into windows of tokens, of which lab/plan.py says how many there
are; a Reader (longer/reading.py) gives the loss of each target; here are the two brought together, a row a run and
length.
"""

import itertools
import textwrap

from tqdm import tqdm

from common import CommandLine, at_least, listed, named_runs, new_file, pick_device, read_run
from config import InputError
from eval import MULTIPLES
from lab import measures, plan, show
from lab.files import BAR, picture, write_rows
from longer import scaling
from longer.reading import CANNOT_STREAM, load

# ---- one run ---------------------------------------------------------------------------------------------------------

def name_of(how, dtype):
    """How positions are scaled and numbers rounded, in a word or two; "" as they were trained, in fp32."""
    scale, method = how["scale"], how["rope_scaling"]
    parts = [f"scale {scale}"] * (scale != 1)
    if method != "none":
        alone = method in (scaling.DUAL_CHUNK, scaling.HOLD, scaling.CLIPPED)
        steep = method == scaling.LEAST and how["factor"] == "auto"
        parts.append(method if alone else f"{method} {float(scaling.STEEP) if steep else how['factor']}")
    return ", ".join(parts + [dtype] * (dtype != "fp32"))

def evaluate(run, work, scalings, args, bar):
    """One row a dtype, scaling of positions and length, as --json writes them; loss None where there is none.

    work: what plan.measured gives; the bar is told of each token.
    """
    (source, documents, jobs) = work
    rows = []
    for dtype, how in itertools.product(args.dtype, scalings):
        model, record = load(run, pick_device(args.device), dtype)
        context = model.trained.context
        train = record["train"]
        stream = scaling.stream_sizes(args, context) if measures.MEASURES[args.measure].stream else None
        for job, length, conditions in jobs:
            span = min(length, sum(stream) + 1) if stream else length                  # no position is beyond that
            e = model.scale_to(span, **how).config.encoding
            row = {
                "run": str(run), "pe": e.pe, "protocol": job, "how": name_of(how, dtype),
                "scale": getattr(e, "scale", 1.0), "rope_scaling": how["rope_scaling"],
                "factor": getattr(e, "factor", None), "chunk": model.chunk, "dtype": dtype, "length": length,
                "loss": None, "perplexity": None, "n_targets": 0, "trained_length": context,
                "step": record["step"], "trained_tokens": record["step"] * train["batch_size"] * context,
                "seed": train["seed"], "weights": record["sha256"],
                "split": args.split, "data": source, "n_documents": len(documents), "max_docs": args.max_docs,
            }
            if conditions and span <= model.longest and (not stream or model.streams()):
                losses = [model.window_losses(windows, bar, stream) for windows in conditions]
                row |= measures.summary(conditions, losses)
                row["targets_sha256"] = measures.fingerprint(conditions[0])
                if job == "far-repeats":
                    row["by_distance"] = measures.by_distance(conditions[0], losses[0], context)
                if args.per_position and row["loss"] is not None:
                    block = max(1, context // 8)
                    row |= {"block": block, "by_position": measures.by_position(losses[0], block)}
            rows.append(row)
    return rows


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
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    parser.add_argument("--lengths", type=listed(at_least(1)), metavar="N,N,...",
                        help="default: 1, 2, 4, 8 and 16 times the trained length")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    parser.add_argument("--data", metavar="DIR|PATH",
                        help="score other text: a prepared folder, or text as data.py reads it")
    parser.add_argument("--max-docs", type=at_least(1), metavar="N", help="score N usable documents, evenly spaced")
    what = parser.add_argument_group("what is measured").add_mutually_exclusive_group()
    what.add_argument("--protocol", dest="measure", choices=tuple(measures.PROTOCOLS), default="nonoverlap",
                      help="how tokens are scored (default: nonoverlap)")
    what.add_argument("--probe", dest="measure", choices=tuple(measures.PROBES),
                      help="whether and how the far context is used")
    how = parser.add_argument_group("of some protocols and probes")
    how.add_argument("--per-position", action="store_true", default=None,
                     help="the loss by position in the window too, smoothed over eighths of the trained length: where "
                          "does an encoding break? (nonoverlap and streaming; --plot draws it)")
    how.add_argument("--targets", type=at_least(1), metavar="N",
                     help="same-targets, sliding and swap: targets at the end of each document (default: half the "
                          "trained length); spread: at each place (default: an eighth of it)")
    how.add_argument("--stride", type=at_least(1), metavar="N",
                     help="sliding: targets that one window scores (default: a quarter of the trained length)")
    scaling.add_stream_flags(how)
    scaling.add_scaling_flags(parser, several=True)
    parser.add_argument("--dtype", type=listed(str, *scaling.PRECISIONS), default=["fp32"], metavar="NAME,...",
                        help="of the weights and of what is computed: fp32, bf16, fp16, or int8 (weights alone); each "
                             "a row")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    parser.add_argument("--json", type=new_file, metavar="FILE",
                        help="write the numbers as a list of objects, one a run and length")
    parser.add_argument("--plot", type=picture, metavar="FILE",
                        help="draw loss against length: .png (and an .svg beside it), .svg or .pdf")
    return parser

def check(args):
    """InputError for a flag that what is measured has no use for."""
    measure = measures.MEASURES[args.measure]
    kind = "probe" if args.measure in measures.PROBES else "protocol"
    for name in ("targets", "stride", "sinks", "window", "per_position"):
        if name not in measure.flags and getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} has no use with --{kind} {args.measure}: leave it out")

def score(args):
    """The rows of the runs that are named, as --json writes them."""
    configs = {str(run): read_run(run) for run in named_runs(args.runs)}
    if masked := [run for run, (_, train, _) in configs.items() if train.objective == "mlm"]:
        raise InputError(f"{masked[0]} predicts masked tokens, not the next one: python -m lab.curves draws its losses")
    scalings = plan.scalings(configs, scaling.scaling_of(args))
    work = {run: plan.measured(run, record, args.lengths or [model.context * multiple for multiple in MULTIPLES], args)
            for run, (model, _, record) in configs.items()}
    tokens = {run: plan.tokens_of(jobs, scalings[run], args) for run, (_, _, jobs) in work.items()}
    rows = []
    with tqdm(total=sum(tokens.values()), unit="tok", unit_scale=True, leave=False, disable=None, smoothing=0,
              bar_format=BAR) as bar:
        for i, run in enumerate(configs, 1):
            label = f"run {i} of {len(configs)}, {run}"
            bar.set_description(label[:30])                     # or 80 columns have no room for the time left
            if bar.disable:                                     # stderr is no terminal
                print(f"{label}: scoring {tokens[run]:,} tokens ...", flush=True)
            rows += evaluate(run, work.pop(run), scalings[run], args, bar)
    if all(row["loss"] is None for row in rows) and args.measure == "streaming":
        raise InputError(f"{' and '.join(sorted({row['pe'] for row in rows}))} {CANNOT_STREAM}")
    for run, step in {row["run"]: row["step"] for row in rows}.items():
        if step < (steps := configs[run][1].steps):
            print(f"{run} is not finished: step {step:,} of {steps:,}")
    return rows

def main(argv=None):
    parser = command_line()
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.lengths:
            args.lengths.sort()
        check(args)
        rows = score(args)
        show.compare(rows)
        if args.json:
            write_rows(args.json, rows)
        show.print_rows(rows)
        if args.plot:
            from lab import pictures
            pictures.losses(rows, args.plot)
            print(f"\npicture: {args.plot}")

if __name__ == "__main__":
    main()
