"""Small synthetic tasks on which positions decide, as a source of data: --data task:NAME.

    python train.py --data task:even-pairs --context 40 --layers 1 --width 64 --heads 2 --pe expe --on k
    python eval.py RUN                                           accuracies at 1 to 16 times the trained length
    python eval.py RUN --data task:flip-flop-sparse              those of another task with the same symbols
    python generate.py RUN --prompt "a b b" --tokens 1

A task is a pure function of (seed, step, length, batch). It returns tokens and targets, int64 (batch, length) each, and
nothing is scored where a target is -100. length is the window in tokens, so that one function serves every length.
Where sequences have random lengths, full=True draws the longest that fit, as the evaluation does. The docstrings show
a short example: `.` is a target that is not scored. Chance is one over the number of answers. The guess is the accuracy
of the best guess from the symbols alone, without knowing where they stand, on the sequences that are scored.
"""

import hashlib
import itertools
import json
import math
import string
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import PRESETS, SPLITS
from settings import InputError, did_you_mean, flag_of, prefix_errors, require_finite

IGNORED = -100
SEQUENCES = 512                          # that an evaluation scores at each length
LETTERS = list(string.ascii_lowercase[:16])

# ---- the tasks -------------------------------------------------------------------------------------------------------

def even_pairs(seed, step, length, batch, full=False):
    """Whether a string has an even number of unequal neighbours, after each symbol but the first (Ruoss et al. 2023).

        tokens   a b b a a b                It has if the first and the last symbol are equal.
        targets  . o o e e o                Symbols: a, b; e (even), o (odd). Chance 50%.
    """
    rng = np.random.default_rng([seed, step])
    tokens = rng.integers(2, size=(batch, length))
    targets = 2 + (tokens != tokens[:, :1])
    targets[:, 0] = IGNORED
    return tokens, targets

def first_last(seed, step, length, batch, full=False):
    """The first or the last letter of a text, which stands behind a random number of filler symbols.

        tokens   # - # c a b a F L L F      Four queries, F (first) or L (last), end the window. At most half of the
        targets  . . . . . . . c a a c      rest is filler. Symbols: a-p; filler + - # *; F, L. Chance 1/16.
    """
    rng = np.random.default_rng([seed, step])
    size = length - 4
    tokens = rng.integers(16, size=(batch, length))
    begin = rng.integers(size // 2 + 1, size=batch)                     # of the text
    filler = np.arange(size) < begin[:, None]
    tokens[:, :size] = np.where(filler, 16 + tokens[:, :size] % 4, tokens[:, :size])
    last = rng.integers(2, size=(batch, 4))
    tokens[:, size:] = 20 + last
    targets = np.full_like(tokens, IGNORED)
    targets[:, size:] = np.where(last, tokens[:, size - 1 : size], tokens[np.arange(batch), begin][:, None])
    return tokens, targets

def back(seed, step, length, batch, full=False, k=3):
    """The letter k places back: back-3 and back-8.

        tokens   d a c b b a                k = 3
        targets  . . . d a c                Symbols: a-p. Chance 1/16.
    """
    rng = np.random.default_rng([seed, step])
    tokens = rng.integers(16, size=(batch, length))
    targets = np.full_like(tokens, IGNORED)
    targets[:, k:] = tokens[:, :-k]
    return tokens, targets

def flip_flop(seed, step, length, batch, full=False, ignore=0.8):
    """Read the bit that was written last (Liu et al. 2023): FFL(0.8), 0.98 (sparse) and 0.1 (dense).

        tokens   w 1 i 0 r 1 i 1 r 1        Instructions w (write), r (read) and i (ignore, of that probability), each
        targets  . . . . 1 . . . 1 .        with a bit; the first is w, the last r. Symbols: w, r, i, 0, 1. Chance 50%.
    """
    rng = np.random.default_rng([seed, step])
    n = length // 2
    verbs = rng.choice(3, size=(batch, n), p=[(1 - ignore) / 2, (1 - ignore) / 2, ignore])              # w, r, i
    verbs[:, 0], verbs[:, -1] = 0, 1
    bits = rng.integers(2, size=(batch, n))
    writes = np.maximum.accumulate(np.where(verbs == 0, np.arange(n), 0), axis=1)       # the last write's place
    bits = np.where(verbs == 1, np.take_along_axis(bits, writes, 1), bits)
    tokens = np.full((batch, length), 2)
    tokens[:, : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = verbs, 3 + bits
    targets = np.full_like(tokens, IGNORED)
    targets[:, : 2 * n : 2] = np.where(verbs == 1, 3 + bits, IGNORED)
    return tokens, targets

def transduce(seed, step, length, batch, full, symbols, distinct, answer, times=1):
    """`<bos> x <sep> answer(x) <eos>`, padded: of copy, sort, reverse and duplicate; x has 1 symbol or more."""
    rng = np.random.default_rng([seed, step])
    longest = (length - 2) // (1 + times)
    tokens = np.full((batch, length), symbols + 2)                      # symbols, then <bos>, <sep>, <pad>, <eos>
    targets = np.full_like(tokens, IGNORED)
    for row, wanted in zip(tokens, targets, strict=True):
        n = longest if full else rng.integers(1, longest + 1)
        x = rng.permutation(symbols)[:n] if distinct else rng.integers(symbols, size=n)
        y = answer(x)
        row[: n + 2 + len(y)] = [symbols, *x, symbols + 1, *y]
        wanted[n + 1 : n + 2 + len(y)] = [*y, symbols + 3]
    return tokens, targets

def copy(seed, step, length, batch, full=False, symbols=52):
    """Repeat n distinct ones of 52 symbols, or of 150 (copy-150, as lacoco-lab/length_generalization has it).

        tokens   ^ 7 3 9 | 7 3 9            ^ begins, | separates, $ ends; the end is scored apart.
        targets  . . . . 7 3 9 $            Symbols: 0-51. Chance 1/52; by exclusion (1 + 1/2 + ... + 1/n) / n.
    """
    return transduce(seed, step, length, batch, full, symbols, True, lambda x: x)

def sort(seed, step, length, batch, full=False, symbols=52):
    """Repeat n distinct ones of 52 symbols, or of 150 (sort-150), in ascending order.

        tokens   ^ 7 3 9 | 3 7 9            As copy. The order is that of the symbols, so no position is needed.
        targets  . . . . 3 7 9 $            Symbols: 0-51. Chance 1/52.
    """
    return transduce(seed, step, length, batch, full, symbols, True, np.sort)

def reverse(seed, step, length, batch, full=False):
    """Repeat a string backwards (Ruoss et al. 2023).

        tokens   ^ a b b | b b a
        targets  . . . . b b a $            Symbols: a, b. Chance 50%.
    """
    return transduce(seed, step, length, batch, full, 2, False, lambda x: x[::-1])

def duplicate(seed, step, length, batch, full=False):
    """Repeat a string twice (Ruoss et al. 2023).

        tokens   ^ a b b | a b b a b b
        targets  . . . . a b b a b b $      Symbols: a, b. Chance 50%.
    """
    return transduce(seed, step, length, batch, full, 2, False, lambda x: np.tile(x, 2), times=2)

def needle(seed, step, length, batch, full=False):
    """The letter behind the one marker N in a text of letters.

        tokens   c a N d b a c              Training scores every place after it, evaluation the last one. In training
        targets  . . . . d d d              N is at most 8 + step / 16 places back. Symbols: a-p; N. Chance 1/16.
    """
    rng = np.random.default_rng([seed, step])
    tokens = rng.integers(16, size=(batch, length))
    furthest = length - 1 if full else min(length - 1, 8 + step // 16)
    place = length - 1 - rng.integers(2, furthest + 1, size=(batch, 1))
    np.put_along_axis(tokens, place, 16, 1)
    scored = np.arange(length) > (length - 2 if full else place + 1)
    return tokens, np.where(scored, np.take_along_axis(tokens, place + 1, 1), IGNORED)

def mqar(seed, step, length, batch, full=False, symbols=64):
    """Multi-query associative recall as in zoology (Arora et al. 2023); mqar-256 has its small setting's vocabulary.

        tokens   k4 v9 k2 v7 k2 v1 v3 k4    A pair for every 16 tokens, then each key, scored once, at an even place,
        targets  .  .  .  .  v7 .  .  v9    nearer ones more often (gap^-0.99); the rest is random. Symbols: 0-63.
                                            Chance 1/32.
    """
    rng = np.random.default_rng([seed, step])
    pairs = max(1, length // 16)
    space = (length - 2 * pairs) // 2
    tokens = rng.integers(symbols, size=(batch, length))
    targets = np.full_like(tokens, IGNORED)
    p = np.arange(1, space + 1) ** -0.99
    for row, wanted in zip(tokens, targets, strict=True):
        keys = 1 + rng.permutation(symbols // 2 - 1)[:pairs]
        values = symbols // 2 + rng.permutation(symbols // 2)[:pairs]
        row[: 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        places = 2 * pairs + 2 * rng.choice(space, size=pairs, replace=False, p=p / p.sum())
        row[places], wanted[places] = keys, values
    return tokens, targets

def indirect(seed, step, length, batch, full=False):
    """The letter that stands so many places right or left of a given one (Gopalakrishnan et al. 2025, section 4).

        tokens   q c a z m , a , + 0 2      Distinct letters, half as many as fit or more; a letter; a shift of at most
        targets  . . . . . . . . . . m      15 that exists. Symbols: a-z, A-Z; , + - 0-9 and padding. Chance 1/52.
    """
    rng = np.random.default_rng([seed, step])
    longest = min(52, length - 6)
    tokens = np.full((batch, length), 65)
    targets = np.full_like(tokens, IGNORED)
    for row, wanted in zip(tokens, targets, strict=True):
        n = longest if full else rng.integers((longest + 1) // 2, longest + 1)
        letters = rng.permutation(52)[:n]
        at = rng.integers(n)
        shift = rng.integers(max(-15, -at), min(15, n - 1 - at) + 1)
        tens, ones = divmod(abs(shift), 10)
        row[length - n - 6 :] = [*letters, 52, letters[at], 52, 54 if shift < 0 else 53, 55 + tens, 55 + ones]
        wanted[-1] = letters[at + shift]
    return tokens, targets

# ---- the best guess from the symbols alone: (tokens, targets, without the end) to its accuracy -----------------------

def share_of_most(tokens, symbols, places):
    """The share that the most frequent of the symbols has in a row before n, the mean over (row, n) of places."""
    counts = (tokens[..., None] == np.arange(symbols)).cumsum(1)                     # (batch, length, symbols)
    before = counts[places[:, 0], places[:, 1] - 1]
    return float((before.max(-1) / before.sum(-1)).mean())

def guess_even_pairs(tokens, targets):
    """The first symbol is any of those before the last."""
    same = np.stack([(tokens[:, :n] == tokens[:, n : n + 1]).mean(1) for n in range(1, tokens.shape[1])])
    return float(np.maximum(same, 1 - same).mean())

def guess_letters(tokens, targets, symbols=16):
    """The most frequent letter before."""
    return share_of_most(tokens, symbols, np.argwhere(targets != IGNORED))

def guess_flip_flop(tokens, targets):
    """The bit of the instruction before, or the bit that was written most often: whichever is right more often."""
    rows, places = np.nonzero(targets != IGNORED)
    ones = np.where(tokens[:, :-1] == 0, 2 * tokens[:, 1:] - 7, 0).cumsum(1)[rows, places - 1]         # less zeros
    most = np.where(ones == 0, 0.5, (ones > 0) == (targets[rows, places] == 4))
    return float(max((tokens[rows, places - 1] == targets[rows, places]).mean(), most.mean()))

def guess_remaining(tokens, targets):
    """The most frequent of the symbols that are still to come."""
    shares = []
    for wanted in targets:
        left = wanted[wanted != IGNORED].tolist()
        for n in range(len(left)):
            shares.append(max(map(left[n:].count, set(left[n:]))) / len(left[n:]))
    return float(np.mean(shares))

def guess_sort(tokens, targets):
    """The order is that of the symbols."""
    return 1.0

def guess_twice(tokens, targets):
    """As guess_remaining, in each half of the answer."""
    answers = [wanted[wanted != IGNORED] for wanted in targets]
    return guess_remaining(tokens, [answer[: len(answer) // 2] for answer in answers])

def guess_mqar(tokens, targets):
    """Any of the values."""
    return 1 / max(1, tokens.shape[1] // 16)

def guess_indirect(tokens, targets):
    """Any of the other letters; the letter itself, if the shift is 0."""
    others = (tokens < 52).sum(1) - 2
    return float(np.where(tokens[:, -2:].sum(1) == 110, 1, 1 / np.maximum(1, others)).mean())

# ---- the registry ----------------------------------------------------------------------------------------------------

class Task(NamedTuple):
    """A task: its function, its symbols by their token, its number of answers, its guess, and its windows."""

    draw: object
    symbols: list
    answers: int
    guess: object
    shortest: int                        # that has a target
    longest: int | None = None           # where distinct symbols run out
    end: int | None = None               # the token that ends an answer, which is scored apart

def of_distinct(draw, guess, n):
    """The Task of a function of n distinct symbols."""
    symbols = [*map(str, range(n)), "^", "|", "_", "$"]
    return Task(partial(draw, symbols=n), symbols, n, guess, 4, 2 * n + 2, end=n + 3)

def of_pairs(n):
    """The Task mqar with n symbols."""
    return Task(partial(mqar, symbols=n), [*map(str, range(n))], n // 2, guess_mqar, 4, 16 * (n // 2 - 1))

STRING = ["a", "b", "^", "|", "_", "$"]
BITS = ["w", "r", "i", "0", "1"]
TASKS = {
    "even-pairs": Task(even_pairs, ["a", "b", "e", "o"], 2, guess_even_pairs, 2),
    "first-last": Task(first_last, [*LETTERS, *"+-#*FL"], 16, guess_letters, 5),
    "back-3": Task(back, LETTERS, 16, guess_letters, 4),
    "back-8": Task(partial(back, k=8), LETTERS, 16, guess_letters, 9),
    "flip-flop": Task(flip_flop, BITS, 2, guess_flip_flop, 4),
    "flip-flop-sparse": Task(partial(flip_flop, ignore=0.98), BITS, 2, guess_flip_flop, 4),
    "flip-flop-dense": Task(partial(flip_flop, ignore=0.1), BITS, 2, guess_flip_flop, 4),
    "copy": of_distinct(copy, guess_remaining, 52),
    "copy-150": of_distinct(copy, guess_remaining, 150),
    "sort": of_distinct(sort, guess_sort, 52),
    "sort-150": of_distinct(sort, guess_sort, 150),
    "needle": Task(needle, [*LETTERS, "N"], 16, guess_letters, 3),
    "mqar": of_pairs(64),
    "mqar-256": of_pairs(256),
    "indirect": Task(indirect, [*string.ascii_letters, *",+-0123456789_"], 52, guess_indirect, 8, 58),
    "reverse": Task(reverse, STRING, 2, guess_remaining, 4, None, 5),
    "duplicate": Task(duplicate, STRING, 2, guess_twice, 5, None, 5),
}

def find(source):
    """The Task of "task:NAME"; InputError for another name."""
    name = source.removeprefix("task:")
    if name not in TASKS:
        raise InputError(f"--data task:NAME must have one of {', '.join(TASKS)}, got {source}"
                         f"{did_you_mean(name, TASKS)}")
    return TASKS[name]

def check_lengths(flag, source, lengths):
    """InputError for a window in which a task has no target, or for which its symbols run out."""
    task = find(source)
    if min(lengths) < task.shortest or task.longest and max(lengths) > task.longest:
        most = f" and at most {task.longest}" if task.longest else ""
        wrong = next(length for length in lengths if length < task.shortest or length > (task.longest or length))
        raise InputError(f"{flag} must be at least {task.shortest}{most} for {source}, got {wrong}")

# ---- a task as data: the functions of data.py ------------------------------------------------------------------------

def fill_in(flags, preset):
    """The flags of a run with the task's vocabulary; InputError for flags that do not go with a task."""
    size = len(find(flags["data"]).symbols)
    if settings := [name for name in ("min_doc_tokens", "max_tokens", "max_doc_chars") if name in flags]:
        raise InputError(f"{flag_of(settings[0])} is for text: leave it out, or leave out --data {flags['data']}")
    if flags.get("vocab", size) != size:
        raise InputError(f"--vocab is {size} for --data {flags['data']}: leave it out")
    if flags.get("objective") == "mlm":
        raise InputError("--objective mlm is for text: leave it out, or leave out --data task:NAME")
    context = flags.get("context", PRESETS[preset]["context"])
    check_lengths("--context", flags["data"], [context])
    if flags.get("causal") is False:
        tokens, targets = batch(open_split(flags["data"], "val"), context, 8, 0, 0)
        if (tokens[:, 1:] == targets[:, :-1])[targets[:, :-1] != IGNORED].mean() > 0.5:
            raise InputError(f"--no-causal shows a query of {flags['data']} its target, the next symbol: leave it out")
    return flags | {"vocab": size}

def ensure(source, *sizes, **more):
    """(folder, meta.json) as data.ensure returns them: the task's name, and hashes that change with its definition."""
    splits = {split: {"documents": 0, "tokens": 0, "sha256": hash_batch(source, split)} for split in SPLITS}
    hashes = {"sequences": {"sha256": hash_sequences(source)}, "tokenizer": {"sha256": hash_symbols(source)}}
    return Path(source), {"source": source, "vocab": len(find(source).symbols), "eot": None, "splits": splits} | hashes

def hash_batch(source, split):
    """The hash of one batch, by which a split is known in older runs and in studies/."""
    pairs = np.stack(batch(open_split(source, split), 46, 8, 0, 0), -1)                        # (8, 46, 2)
    return hashlib.sha256(np.pad(pairs, ((0, 0), (0, 1), (0, 0))).tobytes()).hexdigest()

def hash_sequences(source):
    """The hash of batches that differ in all that a sequence depends on: split, length, batch size, seed and step."""
    task, sha256 = find(source), hashlib.sha256()
    lengths = sorted({task.shortest, 46, min(300, task.longest or 300)})
    for split, length, size, seed, step in itertools.product(SPLITS, lengths, (1, 3), (0, 1), (0, 7, 5000)):
        for part in batch(open_split(source, split), length, size, seed, step):
            sha256.update(part.astype("<i8").tobytes())
    return sha256.hexdigest()

def hash_symbols(source):
    return hashlib.sha256(json.dumps(find(source).symbols).encode()).hexdigest()

def is_unchanged(record):
    """Whether the task of a config.json's "data" draws what it drew then; older runs know it by one batch alone."""
    _, now = ensure(record["source"])
    return all(record.get(name, now[name]) == now[name] for name in ("splits", "sequences", "tokenizer"))

def open_split(source, split):
    """What batch draws from: a task, and the number of its split."""
    return find(str(source)), SPLITS.index(split)

def batch(task_and_split, context, batch_size, seed, step):
    """(tokens, targets) of one step, int64 (B, T) each. Held-out sequences have their full length."""
    task, split = task_and_split
    return task.draw(len(SPLITS) * seed + split, step, context, batch_size, full=split > 0)

def held_out(source, context, most):
    return batch(open_split(source, "val"), context, most, 0, 0)

class Symbols:
    """A task's symbols in the place of a tokenizer: texts are symbols with blanks between them."""

    eot_token = None

    def __init__(self, symbols):
        self.symbols = symbols

    def encode_ordinary(self, text):
        if unknown := [word for word in text.split() if word not in self.symbols]:
            raise InputError(f"--prompt must have symbols of the task ({' '.join(self.symbols[:20])} ...) with blanks "
                             f"between them, got {unknown[0]!r}")
        return [self.symbols.index(word) for word in text.split()] or [0]

    def decode_bytes(self, tokens):
        return "".join(f" {self.symbols[token]}" for token in tokens).encode()

def read_tokenizer(folder, meta):
    if meta["tokenizer"]["sha256"] != hash_symbols(meta["source"]):
        raise InputError(f"{meta['source']} has other symbols than when {folder} was trained: train again")
    return Symbols(find(meta["source"]).symbols)

# ---- accuracies ------------------------------------------------------------------------------------------------------

def score(model, task, length, split="val", sequences=SEQUENCES, drawn=0):
    """{"accuracy", "whole", "end", "chance", "guess", "n_sequences"} of a model at one length, in shares of 1.

    drawn: of a run with --random-positions, below which positions are drawn here too, as Ruoss et al. 2023 do.
    """
    import torch

    tokens, targets = batch(open_split(task, split), length, sequences, 0, length)
    device = model.embedding.weight.device
    at_once = max(1, 2**14 // length)
    rng = np.random.default_rng(length)
    chosen = []
    for part in np.split(tokens, range(at_once, sequences, at_once)):
        positions = np.sort(rng.choice(drawn, length, replace=False)) if drawn else None
        with torch.no_grad():
            logits = model(torch.from_numpy(part).to(device), positions=positions)
        require_finite(logits.isfinite().all(), "logits")
        chosen.append(logits.argmax(-1).cpu().numpy())
    chosen = np.concatenate(chosen)
    kind = find(task)
    end = targets == (-1 if kind.end is None else kind.end)
    scored = (targets != IGNORED) & ~end
    right = chosen == targets
    return {"accuracy": right[scored].mean().item(), "whole": (right | ~scored).all(1).mean().item(),
            "end": right[end].mean().item() if end.any() else None, "chance": 1 / kind.answers,
            "guess": kind.guess(tokens, np.where(end, IGNORED, targets)), "n_sequences": sequences}

def evaluate(run, model, record, args, multiples):
    """A row for each length, as eval.evaluate's, with accuracies in the place of losses."""
    source = record["data"]["source"] if args.data is None else args.data
    if not source.startswith("task:") or find(source).symbols != find(record["data"]["source"]).symbols:
        raise InputError(f"{run} is trained on {record['data']['source']}: --data must be a task with the same symbols")
    if source == record["data"]["source"] and not is_unchanged(record["data"]):
        raise InputError(f"{source} is not what it was when {run} was trained: train again")
    if args.plot:
        raise InputError(f"--plot draws losses, and {run} has accuracies: leave it out")
    context = model.config.context
    drawn = record["train"]["random_positions"]
    longest = min(model.config.encoding.longest(model.config), drawn or math.inf)
    most = min(find(source).longest or math.inf, longest)
    asked = (max(1, round(multiple * context)) for multiple in multiples)
    lengths = args.lengths or [length for length in asked if length <= most] or [context]
    check_lengths("--lengths", source, lengths)
    if max(lengths) > longest:
        raise InputError(f"--lengths must be at most {longest:,} for the positions of {run}, got {max(lengths):,}")
    with prefix_errors(run):
        scores = {length: score(model, source, length, args.split, drawn=drawn) for length in sorted(lengths)}
    return [{"run": str(run), "pe": record["model"]["encoding"]["pe"], "protocol": "task", "how": "", "length": length,
             "data": f"{args.split} of {source}", "trained_length": context, "step": record["step"],
             "steps": record["train"]["steps"], "code": record["provenance"].get("code"),
             "loss": None} | its
            for length, its in scores.items()]
