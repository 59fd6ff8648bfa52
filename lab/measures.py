"""Which tokens are read, and which targets are scored: every protocol and probe, without the model.

A measure turns held-out documents into windows: one list of them, or two. A protocol has one: the loss of its targets.
A probe has two with the same targets, one of which lacks what a model would have to fetch from far back: `gain` is by
how much the loss rises without it, and is 0 for a model that does not use its far context. A document is an array of
<|endoftext|> and its own tokens. All losses are in nats a token.
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from settings import InputError

TRIALS = 32                              # of the probes that make up their own text
ENDS = 16                                # of spread, in each document that has room for them
GRAM, REPEATS = 8, 32                    # of far-repeats: tokens of a repetition, and how many of a document are scored

class Window(NamedTuple):
    """Tokens to read: the inputs and, one further, the last target."""

    tokens: np.ndarray                   # (length + 1,)
    scored: int                          # how many of its targets count, the last ones
    unit: int                            # the document or trial that they are of
    distance: int = 0                    # of far-repeats: from the target to what it repeats

class Settings(NamedTuple):
    """What a measure may ask besides the documents and the length of a window."""

    context: int                         # the trained length
    longest: int                         # of all lengths; each document has at least so many targets
    targets: int                         # of same-targets, sliding and swap; of spread, at each end
    stride: int                          # of sliding
    encode: Callable                     # str to a list of tokens

# ---- the held-out text -----------------------------------------------------------------------------------------------

def usable(documents, longest, limit):
    """Those of at least `longest` targets, or `limit` of them, evenly spaced; InputError if there is none."""
    documents = list(documents)
    long_enough = [document for document in documents if len(document) > longest]
    if not long_enough:
        raise InputError(f"no held-out document has {longest:,} tokens, the longest length: the longest usable one is "
                         f"{max(map(len, documents), default=1) - 1:,}")
    number = min(limit or len(long_enough), len(long_enough))
    return [long_enough[i * len(long_enough) // number] for i in range(number)]

# ---- protocols: (documents, length, settings) to one list of windows, in a list --------------------------------------

def nonoverlap(documents, length, settings):
    """The paper's: all targets, in windows that do not overlap. Of a document, a multiple of the longest length."""
    windows = []
    for d, document in enumerate(documents):
        end = (len(document) - 1) // settings.longest * settings.longest
        windows += [Window(document[i : i + length + 1], length, d) for i in range(0, end, length)]
    return [windows]

def same_targets(documents, length, settings):
    """The last targets of each document, `length` tokens of context ending at the same token."""
    return [[Window(document[-length - 1 :], settings.targets, d) for d, document in enumerate(documents)]]

def sliding(documents, length, settings):
    """The same targets, `stride` at a time, each such group seen from the last `length` tokens before its end."""
    return [[window for d, document in enumerate(documents)
             for window in in_groups(document, len(document) - 1, settings.targets, settings.stride, length, d)]]

def in_groups(document, end, targets, group, length, d):
    """Windows of the last targets of a document up to the index `end`, `group` at a time."""
    for left in range(targets, 0, -group):
        scored = min(left, group)
        last = end - left + scored
        yield Window(document[max(0, last - length) : last + 1], scored, d)

def spread(documents, length, settings):
    """Targets at 16 ends spread over each document, in groups of which each is seen from a window ending with it.

    The groups shrink with the windows, and at the trained length each is one target, which thus has exactly that many
    tokens before it; further out it has 15 in 2,048 fewer at most. A document without room for 16 has fewer ends.
    """
    windows = []
    group = max(1, settings.targets * length // settings.longest) if length > settings.context else 1
    for d, document in enumerate(documents):
        room = len(document) - 1 - settings.longest
        ends = np.linspace(settings.longest, len(document) - 1, min(ENDS, room // settings.targets + 1), dtype=int)
        for end in ends:
            windows += in_groups(document, end, settings.targets, group, length, d)
    return [windows]

def far_repeats(documents, length, settings):
    """The last token of each 8-gram that stood in its document before, further back than the trained length.

    Its nearest copy lies in the longest window and ends more than the trained length before it. Of a document at most
    32 such targets are scored, evenly spread. Each is seen from as many tokens as the window has.
    """
    windows = []
    for document in documents:
        unit = windows[-1].unit + 1 if windows else 0                   # some documents may have no target
        latest = {}
        targets = []
        for i in range(GRAM, len(document)):                            # the first token is <|endoftext|>
            gram = document[i - GRAM + 1 : i + 1].tobytes()
            distance = i - latest.get(gram, i)
            latest[gram] = i
            if i >= settings.longest and settings.context < distance <= settings.longest - GRAM + 1:
                targets.append((i, distance))
        chosen = np.linspace(0, len(targets) - 1, min(REPEATS, len(targets)), dtype=int)
        windows += [Window(document[i - length : i + 1], 1, unit, n) for i, n in (targets[at] for at in chosen)]
    if not windows:
        raise InputError(f"no {GRAM} tokens of these documents stood in one before, more than {settings.context} and "
                         f"at most {settings.longest - GRAM + 1} tokens back")
    return [windows]

# ---- probes: (documents, length, settings) to two lists, with and without; [] where nothing can be asked -------------

def swap(documents, length, settings):
    """same_targets; and with all that is further back from them than the trained length taken from another document."""
    if (far := length - (settings.context + settings.targets - 1)) <= 0:
        return []
    if len(documents) < 2:
        raise InputError("the probe swap needs two documents of the longest length, and there is one")
    [windows] = same_targets(documents, length, settings)
    others = documents[1:] + documents[:1]
    swapped = [window._replace(tokens=np.concatenate((other[-far:], window.tokens[far:])))
               for window, other in zip(windows, others, strict=True)]
    return [windows, swapped]

def repeat(documents, length, settings):
    """A segment of random tokens at both ends of a window; and with another one at its beginning.

    The segments are a quarter of the trained length, drawn from the tokens of the documents. All of the second copy is
    scored but its first token, which nothing tells.
    Raises InputError for a length in which two segments do not fit.
    """
    size = settings.context // 4
    if size < 2 or length < 2 * size:
        raise InputError(f"the probe repeat needs windows of {max(4, 2 * size)} tokens or more, got {length}")
    rng = np.random.default_rng(0)
    pool = np.concatenate([document[1:] for document in documents])
    segments = [rng.choice(pool, (2, size)) for _ in range(TRIALS)]
    return around(documents, length, [(a, b, a, size - 1) for a, b in segments])

def passkey(documents, length, settings):
    """A five-digit key in the first sentence of a window, asked for in its last; and with another key in the first.

    The other key has as many tokens, so that nothing else moves. Raises InputError for a length without room for both.
    """
    encode = settings.encode
    rng = np.random.default_rng(0)
    trials = []
    keys = (encode(f" {key}") for key in iter(lambda: rng.integers(10_000, 100_000), None))
    for key in itertools.islice(keys, TRIALS):
        other = next(other for other in keys if other != key and len(other) == len(key))
        begin, changed = ([*encode("The pass key is"), *x, *encode(". Remember it.\n")] for x in (key, other))
        end = [*encode("\nThe pass key is"), *key]
        if length < (least := len(begin) + len(end) - 1):
            raise InputError(f"the probe passkey needs windows of {least} tokens or more, got {length}")
        trials.append((begin, changed, end, len(key)))
    return around(documents, length, trials)

def around(documents, length, trials):
    """Both lists of windows, of trials (beginning, another one, end, scored): between lies a document's own text."""
    conditions = [], []
    for i, (*beginnings, end, scored) in enumerate(trials):
        for windows, beginning in zip(conditions, beginnings, strict=True):
            between = documents[i % len(documents)][1 : length + 2 - len(beginning) - len(end)]
            windows.append(Window(np.concatenate((beginning, between, end)), scored, i))
    return conditions

class Measure(NamedTuple):
    """A protocol or a probe, and what is printed of it."""

    conditions: Callable                       # to lists of windows: a protocol's one, or a probe's two
    about: str                           # what it can show and what it cannot, for --help
    flags: tuple = ()                    # of lab.measure, that it reads
    stream: bool = False                 # whether windows are read by a stream of constant memory
    beside: str | None = None            # the protocol to which it is compared, at the trained length
    whole: bool = False                  # whether all targets of a window are scored
    share: int = 2                       # the default of --targets is the trained length over this

PROTOCOLS = {
    "nonoverlap": Measure(
        nonoverlap,
        "the paper's. The same tokens are scored at every length, in windows that do not overlap. A longer window also "
        "leaves fewer tokens without context, and the loss cannot tell this gain from a loss further on.",
        whole=True),
    "same-targets": Measure(
        same_targets,
        "the last --targets tokens of each document, with 1x, 2x, ... the trained length of context before their end, "
        "and with a sliding window beside it: what more context is worth for the very same targets.",
        flags=("targets", "stride"), beside="sliding"),
    "sliding": Measure(
        sliding,
        "the same targets, --stride at a time, each group from a window of that length ending with it. At the trained "
        "length it keeps the last tokens and forgets the rest: a model uses a longer context only if it beats this.",
        flags=("targets", "stride")),
    "spread": Measure(
        spread,
        "--targets tokens at each of 16 places of each document, each seen from as many tokens before it as the length "
        "says. A lower loss past the trained length means that far context is used. It costs a hundred times as many "
        "tokens as same-targets at the trained length, and sixteen times at the longest.",
        flags=("targets",), share=8),
    "far-repeats": Measure(
        far_repeats,
        "the last token of each run of 8 tokens that stood in the same document before, further back than the trained "
        "length and nowhere nearer (LongPPL's idea, arXiv 2410.23771, without a second model). A model that can use "
        "far context has a lower loss once the window reaches the copy."),
    "streaming": Measure(
        nonoverlap,
        "nonoverlap's windows, read token by token with a cache that keeps the first tokens and the last (--sinks, "
        "--window) at positions 0, 1, 2, ... at every step: what reading on in constant memory costs.",
        flags=("sinks", "window"), stream=True, whole=True),
}
PROBES = {
    "swap": Measure(
        swap,
        "same-targets, and again with everything that is further back from them all than the trained length taken from "
        "another document. Without a gain the far context was not used; a gain does not say what for.",
        flags=("targets",)),
    "repeat": Measure(
        repeat,
        "random tokens at the beginning of a window and again at its end, and the same end after another beginning: "
        "from how far away a model copies."),
    "passkey": Measure(
        passkey,
        "a number in the first sentence of a window that the last one asks for, and the same after another number: "
        "retrieval by models that can read the question, which small ones cannot at any length."),
}
MEASURES = PROTOCOLS | PROBES

# ---- what is made of the losses --------------------------------------------------------------------------------------

def by_unit(windows, losses):
    """(mean loss, number of targets) of documents or trials, (units,) each, from windows' losses, (scored,) each."""
    units = [window.unit for window in windows]
    with np.errstate(invalid="ignore"):                                # a sum that is not finite is told by summary
        total = np.bincount(units, [values.sum(dtype=np.float64) for values in losses])
    count = np.bincount(np.repeat(units, [window.scored for window in windows]))
    return total / count, count

def by_distance(windows, losses, context):
    """{"1x to 2x": [mean loss, number of targets], ...} of far-repeats: by the distance in trained lengths."""
    doublings = np.log2([(window.distance - 1) / context for window in windows]).astype(int)
    values = np.concatenate(losses).astype(np.float64)
    return {f"{2**n}x to {2**(n + 1)}x": [values[doublings == n].mean(), int((doublings == n).sum())]
            for n in np.unique(doublings).tolist()}

def summary(conditions, losses):
    """What a row says of the losses of a measure's one or two lists of windows; loss None if any is not finite."""
    units, (targets, *_) = zip(*map(by_unit, conditions, losses), strict=True)
    row = {"loss": None, "perplexity": None, "n_targets": int(targets.sum())}
    if not np.isfinite(units).all():
        return row
    loss, *without = (float(means @ targets / targets.sum()) for means in units)
    rounded = [[round(x, 6) for x in means.tolist()] for means in units]
    row |= {"loss": loss, "perplexity": math.exp(min(loss, 700))}
    row |= {"unit_losses": rounded[0], "unit_targets": targets.tolist()}
    if without:
        row |= {"without": without[0], "gain": without[0] - loss, "unit_losses_without": rounded[1]}
    return row

def fingerprint(windows):
    """SHA-256 of the scored targets, document by document: two rows that share it scored the same ones."""
    targets = np.concatenate([window.tokens[-window.scored :] for window in windows])
    return hashlib.sha256(targets.astype(np.uint16)).hexdigest()
