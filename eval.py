"""The loss of runs past their trained length, by the paper's protocol: windows that do not overlap.

    python eval.py                          every run under runs/, at 1, 2, 4, 8 and 16 times its trained length L
    python eval.py runs/expe runs/rope --lengths 128,512 --plot loss.png

At each length the same held-out tokens are scored: of every document that is long enough, the largest multiple of the
longest length. Without --lengths, multiples of L that no document has are left out and named; where documents are
shorter than L, the length is L/2, L/4, ..., the longest that at least half of them have.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

from cli import PICTURES, CommandLine, at_least, listed, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch
from tqdm import tqdm

import data
from backends import pick_device
from files import write_text
from runs import describe_progress, load_model, read_checkpoint, read_named, read_run, try_to_read, warn_of_changes
from settings import InputError, prefix_errors, require_finite
from texts import NAMED_SOURCES, LeftOut, documents, full_name
from tokenizer import read_tokenizer

MULTIPLES = (1, 2, 4, 8, 16)    # of the trained length, when no --lengths are given
BATCH_TOKENS = 2**13            # in one forward pass, so that memory does not grow with the number of windows

class HeldOut(NamedTuple):
    """Text that a run is scored on."""

    name: str
    documents: list                      # of arrays, each <|endoftext|> and the document's own tokens

def held_out(run, record, split, source):
    """The HeldOut that a run is scored on.

    source: a prepared folder, or text; None for what the run was trained on, if that is still as it was then.
    """
    if data.source_of(record["data"]["source"]) is not data:
        raise InputError(f"{run} is trained on a task: score it with python eval.py {run}")
    if source and full_name(source) == record["data"]["source"]:       # of which most was trained on
        source = None
    folder = Path(record["data"]["folder"] if source is None else source)
    if source is not None and not (folder / "meta.json").exists():
        tokenizer = read_tokenizer(run, record["data"])
        left_out = LeftOut()
        found = [text for _, text in documents(source, left_out)]
        left_out.print()
        encoded = [[tokenizer.eot_token, *tokenizer.encode_ordinary(text)] for text in found]
        return HeldOut(source, [np.array(tokens, np.uint16) for tokens in encoded])
    meta = data.read_meta(folder)
    if meta["tokenizer"]["sha256"] != record["data"]["tokenizer"]["sha256"]:
        raise InputError(f"{folder} was made with another tokenizer than {run}'s: give --data the text itself")
    if not source and meta["splits"][split]["sha256"] != record["data"]["splits"][split]["sha256"]:
        raise InputError(f"{folder}/{split}.bin is not what it was when {run} was trained: give --data {folder}")
    return HeldOut(f"{split} of {folder}", data.split_documents(data.open_split(folder, split), meta["eot"]))

def say_other_text(run, record):
    """Say on stderr when a text with a name, such as stdlib, is another one here than when the run was trained.

    A folder of tokens under data/ tells; without one the version of Python does, of whose library the text is.
    """
    source, splits, version = (record["data"].get(name) for name in ("source", "splits", "python"))
    folder = data.folder_of(source, record["model"]["vocab"])
    python = sys.version.split()[0]
    if source in NAMED_SOURCES and data.is_whole(folder):
        if data.read_meta(folder)["splits"]["train"]["sha256"] != splits["train"]["sha256"]:
            print(f"{run}: the text in {folder} is another one than it was trained on", file=sys.stderr)
    elif source == "stdlib" and version not in (None, python):
        print(f"{run}: it was trained on the standard library of Python {version}, and that of Python {python} is "
              "another text", file=sys.stderr)

def cut_windows(documents, length, longest):
    """Windows (length + 1,) that do not overlap; of a document, a multiple of the longest length in targets."""
    return [document[i : i + length + 1] for document in documents
            for i in range(0, (len(document) - 1) // longest * longest, length)]

def mean_loss(model, windows, name):
    """The mean loss of all targets of windows of one length, in nats; name: of the bar in a terminal."""
    total = 0.0
    at_once = max(1, BATCH_TOKENS // len(windows[0]))
    for i in tqdm(range(0, len(windows), at_once), name, leave=False, disable=None):
        tokens = torch.from_numpy(np.stack(windows[i : i + at_once]).astype(np.int64))           # (B, T+1)
        tokens = tokens.to(model.embedding.weight.device)
        total += model.token_losses(tokens[:, :-1], tokens[:, 1:]).double().sum().item()
    require_finite(math.isfinite(total))
    return total / sum(len(window) - 1 for window in windows)

def default_lengths(texts):
    """{run: (lengths, [what is to be said of them])} for runs without --lengths: MULTIPLES of the trained length L.

    texts: {run: (source, L, documents)}. A run is scored at each multiple that its documents have; if they have not
    even L tokens, at the longest of L/2, L/4, ... that at least half of them have. Runs of one source and one L are
    scored at the same lengths, although each may have a tokenizer of its own. InputError if there is nothing to score.
    """
    sizes = {run: sorted(len(document) - 1 for document in documents) for run, (_, _, documents) in texts.items()}
    if empty := [run for run in texts if not any(sizes[run])]:
        raise InputError(f"{empty[0]} has no held-out document with a token: name others with --data")
    chosen = {}
    for run, (source, context, _) in texts.items():
        alike = [sizes[other] for other in texts if texts[other][:2] == (source, context)]
        longest = min(some[-1] for some in alike)
        multiples = [multiple * context for multiple in MULTIPLES]
        lengths = [n for n in multiples if n <= longest] or [min(half_have(context, some) for some in alike)]
        said = []
        if left_out := [f"{n:,}" for n in multiples if n > longest]:
            said.append(f"left out: {' to '.join(dict.fromkeys((left_out[0], left_out[-1])))} tokens, since the "
                        f"longest held-out document has {longest:,} (give longer ones with --data)")
        if lengths[-1] > (half := half_have(lengths[-1], sizes[run])):
            shorter = [n for n in lengths if n <= half] or [half]
            said.append(f"most documents are shorter: --lengths {','.join(map(str, shorter))} scores "
                        f"{sum(size >= shorter[-1] for size in sizes[run]):,} of {len(sizes[run]):,}")
        chosen[run] = lengths, said
    return chosen

def half_have(length, sizes):
    """The longest of length, length/2, length/4, ... that half of the documents have; sizes: their tokens, in order."""
    while length > max(1, sizes[len(sizes) // 2]):
        length //= 2
    return length

def evaluate(run, model, record, name, documents, lengths):
    """A row for each length: what --json writes. The loss is None past the positions that an encoding has.

    name, documents: what held_out gives.
    """
    context = model.config.context
    longest = lengths[-1]
    usable = [document for document in documents if len(document) > longest]
    if not usable:
        raise InputError(f"no document of {name} has {longest:,} tokens, the longest of --lengths: the longest one has "
                         f"{max(map(len, documents), default=1) - 1:,}")
    tokenizer = read_tokenizer(run, record["data"])
    sizes = np.array([len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.eot_token)] + [0])
    n_bytes = sum(int(sizes[window[1:]].sum()) for window in cut_windows(usable, longest, longest))
    rows = []
    for length in lengths:
        windows = cut_windows(usable, length, longest)
        loss, perplexity, bits = None, None, None
        if length <= model.config.encoding.longest(model.config):
            with prefix_errors(run):
                loss = mean_loss(model, windows, f"{run}, {length:,} tokens")
            perplexity = math.exp(min(loss, 700))
            bits = loss * length * len(windows) / n_bytes / math.log(2)
        rows.append({"run": str(run), "pe": record["model"]["encoding"]["pe"], "protocol": "nonoverlap", "how": "",
                     "length": length, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits,
                     "n_targets": length * len(windows), "n_documents": len(usable),
                     "n_held_out": len(documents), "data": name, "trained_length": context, "step": record["step"],
                     "steps": record["train"]["steps"], "code": record["provenance"].get("code")})
    return rows

TEXT = {"loss": ("loss, nats a token", ".3f"), "perplexity": ("perplexity", ".5g"),
        "bits_per_byte": ("bits per byte", ".3f")}                      # {what is printed of a row: (words, format)}
TASK = {"accuracy": ("accuracy", ".1%"), "whole": ("whole sequences", ".1%"), "end": ("end tokens", ".1%")}
GUESSES = {"chance": ("chance", ".1%"), "guess": ("best guess without positions", ".1%")}

def print_rows(rows, before, explained=()):
    """A run's numbers, a column for each length; a heading with what is explained, unless the one before fits."""
    def print_numbers(names):
        for name, (words, form) in names.items():
            cells = ["-" if row[name] is None else format(row[name], form if not row[name] >= 1e5 else ".3g")
                     for row in rows]
            print(f"  {words:28}" + "".join(f"{cell:>9} " for cell in cells), flush=True)

    of_task = rows[0]["protocol"] == "task"
    if [heading_of(row) for row in rows] != [heading_of(row) for row in before]:
        counts = [f"{rows[0][name]:,} {name[2:]}" for name in ("n_documents", "n_targets", "n_sequences")
                  if name in rows[0]]
        if rows[0].get("n_documents", 0) < rows[0].get("n_held_out", 0):
            counts[0] = f"{rows[0]['n_documents']:,} of {rows[0]['n_held_out']:,} held-out documents are long enough"
        print("\n" + "\n".join([f"{rows[0]['data']}: {', '.join(counts)} at every length", *explained]))
        lengths = [f"{row['length']:9,}" + " *"[row["length"] == row["trained_length"]] for row in rows]
        label = "* trained length" if any("*" in length for length in lengths) else "tokens in the window"
        print(f"{label:30}" + "".join(lengths))
        print_numbers(GUESSES if of_task else {})
    of_step = describe_progress(rows[0]["step"], rows[0]["steps"])
    print(rows[0]["run"] + f" ({of_step})" * bool(of_step))
    print_numbers({name: TASK[name] for name in TASK if rows[0][name] is not None} if of_task else TEXT)

def heading_of(row):
    return row["data"], row["length"], row["trained_length"], row.get("n_documents"), row.get("n_targets")

def read_to_score(run, args):
    """(config.json, its HeldOut, or None of a run on a task) of a run that can be scored."""
    record = read_run(run)[2]
    read_checkpoint(run, ())
    if data.source_of(record["data"]["source"]) is not data:
        return record, None
    if not record["model"]["causal"]:
        raise InputError(f"{run} sees later tokens, so that the next one is no test of it: name other runs, or draw "
                         "its losses with python -m lab.curves")
    return record, held_out(run, record, args.split, args.data)

def score(args):
    """The rows of the runs that are asked for; each run's numbers are printed as soon as they are known."""
    device = pick_device(args.device)
    read = read_named(args.runs, functools.partial(read_to_score, args=args))
    texts = {run: (args.data or record["data"]["source"], record["model"]["context"], text.documents)
             for run, (record, text) in read.items() if text}
    if args.lengths and texts and any(max(args.lengths) % length for length in args.lengths):
        raise InputError(f"--lengths must divide the longest of them, {max(args.lengths)}, so that each scores the "
                         "same tokens")
    chosen = dict.fromkeys(texts, (sorted(args.lengths), [])) if args.lengths else default_lengths(texts)
    rows = []
    for run in read if args.runs else sorted(read, key=lambda run: read[run][0]["data"]["source"]):
        loaded = try_to_read(run, load_model, args.runs)
        if loaded is None:
            continue
        model, record = loaded
        warn_of_changes(run)
        model.to(device)
        if run in texts:
            say_other_text(run, record)
            _, text = read[run]
            lengths, explained = chosen[run]
            score_run = functools.partial(evaluate, model=model, record=record, name=text.name,
                                          documents=text.documents, lengths=lengths)
        else:
            explained = ()
            score_run = functools.partial(data.source_of(record["data"]["source"]).evaluate, model=model,
                                          record=record, args=args, multiples=MULTIPLES)
        run_rows = try_to_read(run, score_run, args.runs)
        if run_rows is not None:
            print_rows(run_rows, rows[-len(run_rows) :], explained)
            rows += run_rows
    if not rows:
        raise InputError("no run under runs/ can be scored: the lines above say why")
    return rows

def main(argv=None):
    parser = CommandLine(prog="eval.py", description="Score runs past their trained length.",
                         epilog="python -m lab.measure has other protocols, probes, scaled positions and streams")
    others = ("--rope-scaling", "--protocol", "--probe", "--keys")
    parser.synonyms = parser.synonyms | {flag: f"python -m lab.measure, which has {flag}" for flag in others}
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    add("--lengths", type=listed(at_least(1)), metavar="N,N,...", help="default: those of 1, 2, 4, 8, 16 x the trained "
        "length that held-out documents have")
    add("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    add("--data", metavar="DIR|PATH", help="score other text: a prepared folder, or text as data.py reads it")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--json", type=new_file(".json"), metavar="FILE", help="write the numbers: a list of objects")
    add("--plot", type=new_file(*PICTURES), metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = score(args)
        if args.json:
            write_text(args.json, json.dumps(rows, indent=1, allow_nan=False) + "\n")
        if args.plot:
            from lab import pictures
            pictures.losses(rows, args.plot)
            print(f"picture: {args.plot}")

if __name__ == "__main__":
    main()
