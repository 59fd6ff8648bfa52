"""The loss of runs past their trained length, by the paper's protocol: windows that do not overlap.

    python eval.py                          every run under runs/, at 1, 2, 4, 8 and 16 times its trained length
    python eval.py runs/expe runs/rope --lengths 128,512 --plot loss.png

At each length the same held-out tokens are scored: of every document that is long enough, the largest multiple of the
longest length.
"""

import json
import math
import os
from pathlib import Path

import common

os.environ.setdefault("GOMP_SPINCOUNT", "1000")         # before torch: its idle threads soon leave the cores to others

import numpy as np
import torch
from tqdm import tqdm

import data
from common import PICTURES, CommandLine, at_least, listed, new_file, pick_device
from config import InputError

MULTIPLES = (1, 2, 4, 8, 16)    # of the trained length, when no --lengths are given
BATCH_TOKENS = 2**13            # in one forward pass, so that memory does not grow with the number of windows

def held_out(run, record, split, source):
    """(name, documents) a run is scored on; each document is an array of <|endoftext|> and its own tokens.

    source: a prepared folder, or text; None for what the run was trained on, if that is still as it was then.
    """
    if data.source_of(record["data"]["source"]) is not data:
        raise InputError(f"{run} is trained on a task: score it with python eval.py {run}")
    if source and data.full_name(source) == record["data"]["source"]:       # of which most was trained on
        source = None
    folder = Path(record["data"]["folder"] if source is None else source)
    if source is not None and not (folder / "meta.json").exists():
        tokenizer = data.run_tokenizer(run, record["data"])
        left_out = data.LeftOut()
        texts = [text for _, text in data.documents(source, left_out)]
        left_out.print()
        return source, [np.array([tokenizer.eot_token, *tokenizer.encode_ordinary(text)], np.uint16) for text in texts]
    meta = data.read_meta(folder)
    if meta["tokenizer"]["sha256"] != record["data"]["tokenizer"]["sha256"]:
        raise InputError(f"{folder} was made with another tokenizer than {run}'s: give --data the text itself")
    if not source and meta["splits"][split]["sha256"] != record["data"]["splits"][split]["sha256"]:
        raise InputError(f"{folder}/{split}.bin is not what it was when {run} was trained: give --data {folder}")
    return f"{split} of {folder}", data.split_documents(data.open_split(folder, split), meta["eot"])

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
    return total / sum(len(window) - 1 for window in windows)

def evaluate(run, model, record, args, multiples=MULTIPLES):
    """A row for each length: what --json writes. The loss is None past the positions that an encoding has."""
    context = model.config.context
    lengths = sorted(args.lengths or [context * multiple for multiple in multiples])
    longest = lengths[-1]
    if any(longest % length for length in lengths):
        raise InputError(f"--lengths must divide the longest of them, {longest}, so that each scores the same tokens")
    name, documents = held_out(run, record, args.split, args.data)
    usable = [document for document in documents if len(document) > longest]
    if not usable:
        raise InputError(f"no document of {name} has {longest:,} tokens, the longest of --lengths: the longest one has "
                         f"{max(map(len, documents), default=1) - 1:,}")
    tokenizer = data.run_tokenizer(run, record["data"])
    sizes = np.array([len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.eot_token)] + [0])
    n_bytes = sum(int(sizes[window[1:]].sum()) for window in cut_windows(usable, longest, longest))
    rows = []
    for length in lengths:
        windows = cut_windows(usable, length, longest)
        loss, perplexity, bits = None, None, None
        if length <= model.config.encoding.longest(model.config):
            loss = mean_loss(model, windows, f"{run}, {length:,} tokens")
            perplexity = math.exp(min(loss, 700))
            bits = loss * length * len(windows) / n_bytes / math.log(2)
        rows.append({"run": str(run), "pe": record["model"]["encoding"]["pe"], "protocol": "nonoverlap", "how": "",
                     "length": length, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits,
                     "n_targets": length * len(windows), "n_documents": len(usable), "data": name,
                     "trained_length": context, "step": record["step"]})
    return rows

TEXT = {"loss": ("loss, nats a token", ".3f"), "perplexity": ("perplexity", ".5g"),
        "bits_per_byte": ("bits per byte", ".3f")}                      # {what is printed of a row: (words, format)}
TASK = {"accuracy": ("accuracy", ".1%"), "whole": ("whole sequences", ".1%"), "end": ("end tokens", ".1%")}
GUESSES = {"chance": ("chance", ".1%"), "guess": ("best guess without positions", ".1%")}

def print_rows(rows, before):
    """A run's numbers, a column for each length; a heading, unless the one before fits."""
    def print_numbers(names):
        for name, (words, form) in names.items():
            cells = ["-" if row[name] is None else format(row[name], form if not row[name] >= 1e5 else ".3g")
                     for row in rows]
            print(f"  {words:28}" + "".join(f"{cell:>9} " for cell in cells), flush=True)

    of_task = rows[0]["protocol"] == "task"
    if [heading_of(row) for row in rows] != [heading_of(row) for row in before]:
        counts = [f"{rows[0][name]:,} {name[2:]}" for name in ("n_documents", "n_targets", "n_sequences")
                  if name in rows[0]]
        print(f"\n{rows[0]['data']}: {', '.join(counts)} at every length")
        lengths = [f"{row['length']:9,}" + " *"[row["length"] == row["trained_length"]] for row in rows]
        print(f"{'* trained length':30}" + "".join(lengths))
        print_numbers(GUESSES if of_task else {})
    print(rows[0]["run"])
    print_numbers({name: TASK[name] for name in TASK if rows[0][name] is not None} if of_task else TEXT)

def heading_of(row):
    return row["data"], row["length"], row["trained_length"]

def main(argv=None):
    parser = CommandLine(prog="eval.py", description="Score runs past their trained length.",
                         epilog="python -m lab.measure has other protocols, probes, scaled positions and streams")
    others = ("--rope-scaling", "--protocol", "--probe")
    parser.meant = parser.meant | {flag: f"python -m lab.measure, which has {flag}" for flag in others}
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    add("--lengths", type=listed(at_least(1)), metavar="N,N,...", help="default: 1, 2, 4, 8, 16 x the trained length")
    add("--split", choices=("val", "test"), default="val", help="held-out documents (default: val)")
    add("--data", metavar="DIR|PATH", help="score other text: a prepared folder, or text as data.py reads it")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--json", type=new_file(".json"), metavar="FILE", help="write the numbers: a list of objects")
    add("--plot", type=new_file(*PICTURES), metavar="FILE", help="draw loss against length: .png, .svg or .pdf")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        rows = []
        records = {run: common.read_run(run)[2] for run in common.named_runs(args.runs)}
        for run, record in records.items():
            common.read_checkpoint(run, ())                             # before any is scored
            if not record["model"]["causal"] and data.source_of(record["data"]["source"]) is data:
                raise InputError(f"{run} sees later tokens, so that the next one is no test of it: name other runs, or "
                                 "draw its losses with python -m lab.curves")
        for run in records if args.runs else sorted(records, key=lambda run: records[run]["data"]["source"]):
            model, record = common.load_model(run)
            source = data.source_of(record["data"]["source"])
            score = evaluate if source is data else source.evaluate
            run_rows = score(run, model.to(pick_device(args.device)), record, args, MULTIPLES)
            print_rows(run_rows, rows[-len(run_rows) :])
            rows += run_rows
        if args.json:
            common.write_text(args.json, json.dumps(rows, indent=1) + "\n")
        if args.plot:
            from lab import pictures
            pictures.losses(rows, args.plot)
            print(f"picture: {args.plot}")

if __name__ == "__main__":
    main()
