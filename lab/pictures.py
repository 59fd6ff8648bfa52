"""Every picture of losses and attention: rows of numbers in, a file out that can be read on white and on black."""

import dataclasses
import itertools
import math
import re
import zlib
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter

from common import read_run
from config import InputError, make_encoding

NAMES = {                                # of a variant of lab/grids.py, and of those whose names begin as it does
    "expe": "ExPE", "rope": "RoPE", "expe-on-k": "ExPE-K", "alibi": "ALiBi", "exqpe": "ExQPE", "shaw": "Shaw",
    "t5": "T5", "sinusoidal": "sinusoidal", "exqpe-on-k": "ExQPE-K", "learned": "learned", "nope": "NoPE",
    "expe-constant": "ExPE, constant", "expe-l1": "ExPE, l 1", "expe-once": "ExPE, once",
    "expe-learn-init": "ExPE, learn init", "expe-learn-random": "ExPE, learn random",
    "kerple": "KERPLE", "fire": "FIRE", "cope": "CoPE", "fox": "FoX", "grape": "GRAPE", "xpos": "xPos",
    "partial": "RoPE, partial", "proportional": "RoPE, proportional"}
MORE_NAMES = {                           # of later methods, which have the colours of ExPE's ablations and two others
    "cable": "CABLE", "dape": "DAPE", "path": "PaTH", "path_fox": "PaTH-FoX", "pope": "PoPE", "rove": "RoVE",
    "selective_rope": "Selective RoPE"}
GREY = "#7A7A7A"                         # of all text: as far from white as from GitHub's dark page, #0d1117
COLOURS = ("#0F65CE", "#E66202", "#009C00", "#9A00FF", "#0395CC", "#896100", "#E94DB0", "#A34F50", "#57996A", "#9E459F",
           GREY, "#9075FC", "#877E48", "#F33F5A", "#C60090", "#A27599",      # of NAMES, in their order
           "#7D8A00", "#D20000", "#126C84", "#E400FC", "#5A3CFC", "#665A9C", "#C08A00", "#CC66F0")
MARKERS = (*"os^DvPX*<>dp", (4, 1, 0), (3, 1, 0), "8", (6, 1, 0))          # likewise
WORDS = {"linear": "interpolated", "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN", "dual-chunk": "dual chunks",
         "llama 4": "Llama 4"}
PROTOCOLS = {"nonoverlap": "the paper's protocol", "same-targets": "the same targets", "sliding": "a sliding window",
             "spread": "16 places in each document", "far-repeats": "ends of far repetitions",
             "streaming": "token by token, in constant memory", "swap": "swap: the far context is another document's",
             "repeat": "repeat: random tokens that end a window, and do or do not begin it",
             "passkey": "passkey: a number in the first sentence, and another one there"}
LENGTHS, POSITIONS = "tokens in the window", "position"                # what x can be called
DASHES = ("-", "--", "-.", (0, (8, 2)), (0, (6, 1, 1, 1, 1, 1)), (0, (2, 2)))
DOTS = {"linestyle": (0, (1, 1.5)), "linewidth": 1.2}
LEAST = 0.5                              # nats from the bottom to the top of a picture: 0.02 is to look small
SMALL = 0.02                             # nats: a sliding window is drawn if it is further from the loss at 1x
PIXELS = 96                              # of an attention map's side

matplotlib.rcParams.update({
    **{f"{part}.color": GREY for part in ("text", "xtick", "ytick")}, "axes.edgecolor": GREY, "axes.labelcolor": GREY,
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "svg.hashsalt": "the same bytes each time"})


# ---- names and colours -----------------------------------------------------------------------------------------------

def family(variant):
    """The longest beginning of a variant's name that is in NAMES; of others, such as a file of zoo/, the first word."""
    known = [name for name in NAMES if re.match(f"{name}(-|$)", variant)]
    return max(known, key=len, default=variant.partition("-")[0])

def colour(variant):
    """The same whatever is drawn beside it: that of NAMES, or one of the last eight, by the encoding's name."""
    first = family(variant)
    known = dict(zip((*NAMES, *MORE_NAMES), COLOURS + COLOURS[11:16] + COLOURS[8:10], strict=True))
    return known.get(first, COLOURS[-1 - zlib.crc32(first.encode()) % 8])

def shade(colour, share):
    """That share of a colour and the rest GREY, which is as well seen on black as on white."""
    return tuple(share * np.array(to_rgb(colour)) + (1 - share) * np.array(to_rgb(GREY)))

def name(variant):
    """'expe-on-k-x16' -> 'ExPE-K, x16', 'rope-sinks' -> 'RoPE, sinks'."""
    first = family(variant)
    more = re.sub("-(?=[a-z])|_", " ", variant[len(first) + 1 :])
    more = re.sub("(?<=[a-wyz])(?=[0-9])", " ", more)                  # base100, but not x16
    return label((NAMES | MORE_NAMES).get(first, first), more)

def label(name, how):
    """A name, and how its positions are scaled in the field's words: 'RoPE', 'yarn auto' -> 'RoPE, YaRN'."""
    return ", ".join(filter(None, (name, re.sub(f"({'|'.join(WORDS)})( auto)?", lambda found: WORDS[found[1]], how))))

def changed(model):
    """[(name, value, value in short)] of the settings of a model's encoding that are not its defaults, numbers last."""
    wide = dataclasses.replace(model, d_model=64 * model.d_model)      # that any default fits
    knobs, plain = map(dataclasses.asdict, (model.encoding, make_encoding(model.encoding.pe)))
    words = {key: x for key, x in knobs.items() if isinstance(x, bool | str)}      # on which numbers' defaults depend
    default = dataclasses.asdict(make_encoding(**words).fit(wide)) | {key: plain[key] for key in words}
    changes = [(key, x) for key, x in knobs.items() if x not in (default[key], None)]
    changes.sort(key=lambda knob: not isinstance(knob[1], bool | str))
    return [(key, x, str(x) if isinstance(x, bool | str) else                                           # 1/2048
             min(f"{x:g}", str(Fraction(x).limit_denominator(10**6)), key=len)) for key, x in changes]

def variant_of(run):
    """The variant that a run is: its encoding and softmax, and the encoding's settings that are not its defaults."""
    model, _, _ = read_run(run)
    words = [key if x is True else f"{key}-{x}" if isinstance(x, str) else key + short
             for key, x, short in changed(model)]
    return "-".join([model.encoding.pe, *words, *[model.softmax] * (model.softmax != "plain")])

def names_of(runs):
    """{run: what no other one of them is called}: its variant's name, if need be with its folder's, or its path."""
    names = {run: name(variant_of(run)) for run in runs}
    called = {run: (word, f"{word} ({Path(run).name})", f"{word} ({run})") for run, word in names.items()}
    often = Counter(itertools.chain(*map(set, called.values())))
    return {run: next(word for word in words if often[word] == 1) for run, words in called.items()}


# ---- curves ----------------------------------------------------------------------------------------------------------

class Curve(NamedTuple):
    x: list
    y: list
    errors: object                       # None, or axis.errorbar's
    colour: str
    window: float | None = None          # the loss of a sliding window of the trained length

def save(figure, path, dpi=160):
    """Write a picture without its date; beside a .png also the .svg of that name, which is sharp at any size."""
    path = Path(path)
    beside = path.with_suffix(path.suffix.replace(".png", ".svg"))
    ours = not beside.exists() or b"Matplotlib" in beside.read_bytes()[:1000]          # another's file is left alone
    for file in dict.fromkeys((path, beside) if ours else (path,)):
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix)
        figure.savefig(file, dpi=dpi, metadata=undated)

def styles(lines, height):
    """{name: how axis.plot is to draw it} of {name: (colour, x, y)}, in a picture of that height.

    An encoding has a marker of its own; curves of one colour differ by marker and dash. Solid ones that coincide, at
    most x of both nearer than 1/80 of the height, take turns: the lowest is solid with the largest markers, and those
    above are dashed with gaps through which the others are seen.
    """
    looks = {}
    groups = []
    alike = Counter()

    def coincide(one, other):
        (_, x, y), (_, other_x, other_y) = lines[one], lines[other]
        both, i, j = np.intersect1d(x, other_x, return_indices=True)
        return len(both) > 1 and np.mean(np.abs(np.take(y, i) - np.take(other_y, j)) < height / 80) > 0.5

    for name, (colour, _, _) in lines.items():
        place = (COLOURS.index(colour) if colour in COLOURS else 0) + alike[colour]
        looks[name] = {"color": colour, "linestyle": DASHES[alike[colour] % len(DASHES)],
                       "marker": MARKERS[place % len(MARKERS)], "markersize": 5.5}
        if not alike[colour]:
            joined = [group for group in groups if any(coincide(name, other) for other in group)]
            groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), name]]
        alike[colour] += 1
    for group in groups:
        n = min(len(group), 4)
        for i, name in enumerate(sorted(group, key=list(lines).index)):
            looks[name]["markersize"] += 2.5 * max(0, n - 1 - i)
            looks[name] |= {"linestyle": (6 * (n - i % n), (6, 6 * (n - 1)))} if i else {}
    return looks

def curves(path, lines, title, trained, what="loss", across=LENGTHS, note="", least=LEAST):
    """Curves of {name: Curve}, each named at its end with its last value; x on a log axis.

    trained: the lengths where dotted lines mark the trained one. what: "loss", or something that is measured from 0.
    across: what x is called; of POSITIONS, those in one window, the points have no markers. note: what is said of 0, at
    its right. least: nats from the bottom to the top, or more if the curves need it.
    InputError if there is no point to draw.
    """
    lines = {name: line for name, line in lines.items() if len(line.x)}
    if not lines:
        raise InputError("there is nothing to draw: no run has a loss at these lengths")
    figure = Figure(figsize=(8, max(4.8, len(lines) / 4)), layout="constrained")
    axis = figure.subplots()
    ends = []
    form = "z.2f" if what == "loss" else "+z.3f"
    longest = max(line.x[-1] for line in lines.values())
    ticks = {x for line in lines.values() for x in line.x}
    height = max(least, np.ptp(np.concatenate([line.y for line in lines.values()])))
    looks = styles({name: (line.colour, line.x, line.y) for name, line in lines.items()}, height)
    for name, (x, y, errors, colour, window) in lines.items():
        look = looks[name] | ({"marker": ""} if across == POSITIONS else {})
        axis.errorbar(x, y, errors, **look, elinewidth=1, capsize=2)
        value = f"{y[-1]:{form}}".replace("+0.000", "0.000")
        ends.append((y[-1], x[-1], f"{name}: {value}" + f" at {x[-1]:,.0f}" * (x[-1] < longest), colour))
        if window is not None and not any(abs(window - y[x.index(at)]) <= SMALL for at in trained & set(x)):
            axis.plot((min(trained), longest), (window, window), color=colour, **DOTS)
    if any(line.window is not None for line in lines.values()):
        words = f"keep the last {' or '.join(map('{:,}'.format, sorted(trained)))} tokens (a sliding window), where it "
        words += f"is not within {SMALL} of the loss at the trained length"
        figure.legend([Line2D([], [], color=GREY, **DOTS)], [words], loc="outside lower center", fontsize=9)
    if what != "loss":
        axis.axhline(0, color=GREY, linewidth=1)
    name_ends(axis, sorted([end for end in ends if end[1] == longest] + [(0, longest, note, GREY)] * bool(note)), least)
    if across == POSITIONS:
        ticks = {2**i for i in range(3, 1 + math.ceil(math.log2(longest)))}
    ticks = sorted(ticks | set(trained))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,g}" + "\n(trained)" * (tick in trained) for tick in ticks])
    axis.minorticks_off()
    axis.margins(x=0.03)
    for length in trained:
        axis.axvline(length, color=GREY, linestyle=":", linewidth=1)
    axis.set(xlabel=across, ylabel=f"{what}, nats a token")
    axis.set_title(title, loc="left", fontsize=11)
    name_inside(axis, [end for end in ends if end[1] < longest])
    save(figure, path)

def name_ends(axis, ends, least):
    """Write the words of each curve, (y, x, words, colour) of its last point, right of all, none over another."""
    bottom, top = axis.get_ylim()
    missing = max(0, least - (top - bottom)) / 2
    bottom = bottom - missing
    top = top + missing
    space = (top - bottom) / 22
    heights = apart([y for y, *_ in ends], space)
    for (y, x, words, colour), height in zip(ends, heights, strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)}
        axis.annotate(words, (x, y), (1.01, height), textcoords=axis.get_yaxis_transform(), color=colour, va="center",
                      fontsize=9, arrowprops=line)
    axis.set_ylim(min(bottom, heights[0] - space), max(top, heights[-1] + space))

def name_inside(axis, ends):
    """Write the words of curves that end early beside their last points, where they hide the least of the others."""
    axis.figure.draw_without_rendering()                               # or nothing has its place yet
    drawn = [line.get_transform().transform_path(line.get_path()).interpolated(50).vertices for line in axis.lines]
    drawn = np.concatenate(drawn)
    inside = axis.get_window_extent()
    for y, x, words, colour in ends:
        text = axis.annotate(words, (x, y), (0, 0), textcoords="offset points", color=colour, ha="center", va="center",
                             fontsize=9, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5})
        text.get_window_extent()                                       # puts the words at the point
        box = Text.get_window_extent(text).padded(4)
        hidden = {}
        for far, turn in itertools.product(np.arange(1, 10, 0.5), np.arange(32) * np.pi / 16):
            right = box.width * (0.5 + 0.1 * far) * np.cos(turn)
            up = box.height * far * np.sin(turn)
            place = box.translated(right, up)
            if inside.contains(*place.min) and inside.contains(*place.max):
                hidden[right, up] = place.count_contains(drawn) + far
        text.set_position(np.multiply(min(hidden, key=hidden.get), 72 / axis.figure.dpi))
        text.set_in_layout(False)

def apart(heights, space):
    """Ascending heights, moved as little as possible (in squares) to be `space` apart: pools of those that are not."""
    pools = []  # (sum, count) of heights less what the labels below take
    for i, height in enumerate(heights):
        pools.append((height - i * space, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (a, m), (b, n) = pools.pop(), pools.pop()
            pools.append((a + b, m + n))
    level = [total / count for total, count in pools for _ in range(count)]
    return [height + i * space for i, height in enumerate(level)]

def over_seeds(losses):
    """(means, standard deviations) of losses (..., seeds), where None counts as nan."""
    losses = np.array(losses, dtype=np.float64)
    means = losses.mean(axis=-1)
    return means, losses.std(axis=-1, ddof=1) if losses.shape[-1] > 1 else np.zeros_like(means)

def by_length(lengths, losses):
    """(lengths, means, standard deviations or None) of losses (lengths, seeds), where they are not nan."""
    means, errors = over_seeds(losses)
    there = ~np.isnan(means)
    return np.array(lengths)[there].tolist(), means[there], errors[there] if errors.any() else None

def by_position(rows):
    """(positions, losses, None), of one row a seed: means over ever longer stretches of positions."""
    losses = np.mean([row["by_position"] for row in rows], axis=0)
    block = rows[0]["block"]
    ends = [1]
    while ends[-1] < len(losses):
        ends.append(min(len(losses), max(ends[-1] + 1, round(1.15 * ends[-1]))))
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return [block * (p.start + p.stop) / 2 for p in parts], [float(np.mean(losses[p])) for p in parts], None

def points(line):
    """(x, y, errors) of a line of rows: the loss by position, a probe's gain with its interval, or the loss."""
    lengths = [row["length"] for row in line]
    if "by_position" in line[-1]:
        return by_position(line[-1:])                                  # the last is the longest
    if "gain" in line[-1]:
        mean, low, high = np.transpose([row["gain"] for row in line])
        return lengths, mean, (mean - low, high - mean)
    return lengths, [row["loss"] for row in line], None

def losses(rows, path):
    """What the rows of eval.py or lab.measure say, a curve a run and its positions."""
    protocol = rows[0]["protocol"]
    lines = {}
    drawn = {}
    rows = [row for row in rows if row["loss"] is not None]
    beside = {row["run"]: row["loss"] for row in reversed(rows) if row["protocol"] != protocol}
    for row in (row for row in rows if row["protocol"] == protocol):
        lines.setdefault((row["run"], row["how"]), []).append(row)
    called = names_of({run for run, _ in lines})
    for (run, how), line in lines.items():
        drawn[label(called[run], how)] = Curve(*points(line), colour(variant_of(run)), beside.pop(run, None))
    probe, positions = (any(key in row for row in rows) for key in ("gain", "by_position"))
    title = ("What the far context is worth, with 95% intervals" if probe else
             "Loss by position in a window" if positions else "Loss past the trained length")
    title += f"\n{PROTOCOLS.get(protocol, protocol)}"
    across = POSITIONS if positions else LENGTHS
    curves(path, drawn, title, {row["trained_length"] for row in rows}, "gain" if probe else "loss", across)


PANELS = {"loss": "loss, nats a token", "val_loss": "validation loss, nats a token",
          "grad_norm": "norm of the gradient", "lr": "learning rate"}

def training(path, runs):
    """Four panels by tokens seen, a curve a run: {run: {key of PANELS: (tokens, values)}}."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    called = names_of(runs)
    axes = dict(zip(PANELS, figure.subplots(2, 2).flat, strict=True))
    for key, axis in axes.items():
        lines = {run: (colour(variant_of(run)), *panels[key]) for run, panels in runs.items()}
        height = np.ptp(np.concatenate([y for _, _, y in lines.values()] or [[0]]))
        for run, look in styles(lines, height).items():
            look |= {} if key == "val_loss" else {"marker": ""}
            axis.plot(*runs[run][key], **look, linewidth=1.2, label=called[run])
    for key, axis in axes.items():
        axis.set_title(PANELS[key], loc="left", fontsize=11)
        axis.set(xlabel="tokens seen", xlim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*axes["val_loss"].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle("How the runs were trained, by the tokens seen", fontsize=11)
    save(figure, path)


# ---- bars and maps ---------------------------------------------------------------------------------------------------

def bars(path, names, labels, losses, title):
    """A group of bars for each name, each of them with its number on it, of losses (labels, names, seeds)."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(labels)
    x = np.arange(len(names))
    heights, errors = over_seeds(losses)
    for i, (label, share) in enumerate(zip(labels, np.linspace(0, 1, len(labels)), strict=True)):
        begin = x + (i - (len(labels) - 1) / 2) * width
        look = {"color": shade(COLOURS[0], share), "ecolor": GREY, "label": label}
        drawn = axis.bar(begin, heights[i], width * 0.92, yerr=errors[i], **look)
        axis.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    axis.set_xticks(x, [name.replace(", ", "\n") for name in names])
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_ylabel("loss, nats a token")
    figure.legend(ncols=len(labels), loc="outside lower center")
    save(figure, path)

def attention(path, weights, title):
    """Maps of {length: (blocks, H, T, T)}: a row a block, a column a head, the lengths side by side.

    Each query's weights are drawn over its largest one, so that a pattern shows at any length; long windows are pooled
    to PIXELS a side by their maximum.
    """
    shades = matplotlib.colormaps["cividis"].resampled(16)             # few, for a small file
    blocks, heads = next(iter(weights.values())).shape[:2]
    size = max(0.45, min(1.1, 14 / (heads * len(weights))))
    figure = Figure(figsize=(size * heads * len(weights) + 1.7, size * blocks + 1.1), layout="constrained")
    *parts, last = figure.subfigures(1, len(weights) + 1, width_ratios=(*[size * heads] * len(weights), 0.7))
    for part, (length, maps) in zip(parts, weights.items(), strict=True):
        part.suptitle(f"{length:,} tokens", fontsize=10)
        axes = part.subplots(blocks, heads, squeeze=False)
        for at, axis in np.ndenumerate(axes):
            x = pooled(maps[at] / maps[at].max(-1, keepdims=True))
            image = axis.imshow(x, shades, vmin=0, vmax=1, extent=(0, length, length, 0), interpolation="none")
            axis.set(xticks=[], yticks=[], frame_on=False)
        for head, axis in enumerate(axes[0]):
            axis.set_title(f"head {head}", fontsize=8)
        for block, axis in enumerate(axes[:, 0]):
            axis.set_ylabel(f"block {block}", fontsize=8)
    figure.suptitle(f"{title}\nkeys to the right, queries downwards", fontsize=10)
    last.colorbar(image, cax=last.subplots(), label="weight over the query's largest one")
    save(figure, path, dpi=90)

def pooled(x):
    """(T, T) as at most PIXELS a side, each the maximum of its square."""
    edges = np.linspace(0, len(x), min(len(x), PIXELS) + 1).astype(int)[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(x, edges, axis=0), edges, axis=1)


# ---- accuracies of tasks ---------------------------------------------------------------------------------------------

def panels(path, results, title, methods):
    """Accuracy by length, a panel a task, of {task: {method: (values, learned, rows)}}; dotted: the best guess."""
    columns = 4
    n = len(results)
    figure = Figure(figsize=(9, 2.1 * math.ceil((n + 1) / columns) + 0.4), layout="constrained")
    axes = figure.subplots(math.ceil((n + 1) / columns), columns, sharey=True).flat
    looks = {method: {"color": colour(method), "marker": MARKERS[i], "markersize": 4, "linewidth": 1.2, "alpha": 0.85}
             for i, method in enumerate(methods)}
    for axis, (task, found) in zip(axes, results.items(), strict=False):
        for method in (method for method in methods if method in found):
            rows = found[method][2]
            axis.plot([row["length"] for row in rows], [100 * row["accuracy"] for row in rows], **looks[method])
        longest = max((rows for _, _, rows in found.values()), key=len)
        lengths = [row["length"] for row in longest]
        axis.plot(lengths, [100 * row["guess"] for row in longest], color=GREY, **DOTS)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7)
        axis.minorticks_off()
        axis.set_title(task, loc="left", fontsize=10)
        axis.set_ylim(-4, 104)
    axes = figure.axes
    for axis in axes[n:]:
        axis.set_axis_off()
    lines = [Line2D([], [], **looks[method]) for method in methods] + [Line2D([], [], color=GREY, **DOTS)]
    axes[n].legend(lines, [*map(name, methods), "best guess without positions"], loc="center left", fontsize=8)
    figure.suptitle(f"{title}, in tokens; the first length is the trained one", x=0.01, ha="left", fontsize=11)
    figure.supylabel("accuracy by token, %", fontsize=10)
    save(figure, path, dpi=110)

def heat(path, results, title, methods):
    """Accuracies in % as two maps of tasks by methods, at the trained length and at 4 times it, of panels' results."""
    shades = matplotlib.colormaps["cividis"].resampled(20)
    figure = Figure(figsize=(10, 0.55 * len(results) + 2.6), layout="constrained")
    places = {1: "at the trained length", 4: "at 4 times it"}
    for axis, (multiple, words) in zip(figure.subplots(2, 1), places.items(), strict=True):
        values = np.full((len(results), len(methods)), np.nan)
        for (i, found), (j, method) in itertools.product(enumerate(results.values()), enumerate(methods)):
            rows = found[method][2] if method in found else []
            for row in rows:
                if row["length"] == multiple * rows[0]["length"]:
                    values[i, j] = 100 * row["accuracy"]
                    axis.text(j, i, f"{values[i, j]:.0f}", ha="center", va="center", fontsize=7,
                              color="black" if values[i, j] > 60 else "white")
        axis.imshow(values, shades, vmin=0, vmax=100, aspect="auto", interpolation="none")
        axis.set_yticks(range(len(results)), list(results), fontsize=8)
        axis.set_xticks(range(len(methods)), [*map(name, methods)], fontsize=8, rotation=45, ha="right")
        axis.set_title(words, loc="left", fontsize=10)
        axis.set(frame_on=False)
        axis.tick_params(length=0)
    figure.suptitle(f"{title}, in %", x=0.01, ha="left", fontsize=11)
    save(figure, path, dpi=110)
