"""Every picture of losses, accuracies and attention: rows of numbers in, a file out."""

import io
import math
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from files import write_bytes
from lab.results import LEARNED, is_gain, progress_of, unfinished
from settings import InputError
from zoo.names import METHODS, colour, family, name, names_of, variant_of

GREY = "#595959"                         # of all text
MARKERS = "os^DvPX*<>dp"
DASHES = ("-", "--", "-.", ":")
PROTOCOLS = {"nonoverlap": "the paper's protocol", "same-targets": "the same targets", "sliding": "a sliding window",
             "spread": "targets at 16 places of each document", "far-repeats": "ends of far repetitions",
             "streaming": "token by token, in constant memory", "swap": "the far context is another document's",
             "repeat": "random tokens that end the window, and do or do not begin it",
             "passkey": "a number that the last sentence asks for, in the first one or not"}
PANELS = {"loss": "loss, nats a token", "val_loss": "validation loss, nats a token",
          "grad_norm": "norm of the gradient", "lr": "learning rate"}
PIXELS = 96                              # of an attention map's side

matplotlib.rcParams.update({
    **{f"{part}.color": GREY for part in ("text", "xtick", "ytick")}, "axes.edgecolor": GREY, "axes.labelcolor": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 9,
    "axes.titlelocation": "left", "axes.titlesize": 11, "svg.hashsalt": "the same bytes each time"})

def save(figure, path, dpi=110):
    """Write a picture without its date."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, metadata=undated, format=Path(path).suffix[1:])
    write_bytes(path, picture.getvalue())

# ---- losses by length ------------------------------------------------------------------------------------------------

def draw(path, rows, args):
    """The Rows of one measure of lab.table, as it prints them: curves by length, or a map of tasks."""
    if rows[0].protocol == "task":
        return heat(path, rows, args.title)
    protocol = next((row.protocol for row in rows if row.protocol != "sliding"), "sliding")
    lines = {}
    for row in rows:
        if row.protocol == protocol and row.loss is not None:
            lines.setdefault(row.line, {}).setdefault(row.length, []).append(row.loss)
    gain = is_gain(rows)
    seeds = {len(losses) for line in lines.values() for losses in line.values()}
    number = " or ".join(map(str, sorted(seeds)))
    label = f"{PROTOCOLS[protocol]}; {number} seeds" + "; bars: ±1 sd" * any(n > 1 for n in seeds)
    curves(path, {name(line) + unfinished(rows, line): (colour(line), values) for line, values in lines.items()},
           args.title or "Loss past the trained length", label, {row.context for row in rows}, gain)

def rises(path, rows, title):
    """Each run's loss at its last length minus that at the trained one, against its training tokens a parameter.

    A dot is one seed; it is hollow if the text is a path, as books are, and none of the named sources.
    """
    ends = {}
    for row in rows:
        if row.loss is not None and not row.how and "budget" in row.more:
            ends.setdefault((row.run, row.seed, row.measure), {})[row.length] = row
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    methods = list(dict.fromkeys(family(run.rpartition("/")[2]) for run, *_ in ends))
    for (run, _, _), lengths in ends.items():
        first, last = lengths.get(min(lengths)), lengths[max(lengths)]
        if first.length == first.context < last.length:
            i = methods.index(family(run.rpartition("/")[2]))
            shade = colour(methods[i])
            axis.plot(first.more["budget"] * 1.04 ** (i - len(methods) / 2), last.loss - first.loss, color=shade,
                      marker=MARKERS[i % len(MARKERS)], linestyle="", alpha=0.9,
                      markerfacecolor="none" if "/" in first.more["source"] else shade)
    if not axis.lines:
        raise InputError("there is nothing to draw: no run has losses at its trained length and at a longer one")
    for i, method in enumerate(methods):
        called, shade = METHODS.get(method, (method, colour(method)))
        axis.plot([], [], color=shade, marker=MARKERS[i % len(MARKERS)], linestyle="", label=called)
    axis.axhline(0, color=GREY, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=0.1)
    axis.set_xticks([1.5, 3, 6, 12], ["1.5", "3", "6", "12"])
    axis.set_ylim(top=4)
    axis.set_yticks([-0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3], ["-0.1", "-0.05", "0", "0.05", "0.1", "0.3", "1", "3"])
    axis.minorticks_off()
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axis.set(xlabel="training tokens a parameter", ylabel="rise of the loss past L, nats a token",
             title=f"{title}\n(the longest length minus L; a dot a seed, hollow: trained on books)")
    save(figure, path)

def losses(rows, path):
    """What the rows of eval.py or lab.measure say, a curve a run and its positions."""
    protocol = rows[0]["protocol"]
    called = {run: ", ".join(filter(None, (word, *{progress_of(row) for row in rows if row["run"] == run})))
              for run, word in names_of({row["run"] for row in rows}).items()}
    lines = {}
    for row in rows:
        value = row.get("gain", row["loss"])
        if row["protocol"] == protocol and value is not None:
            lines.setdefault((row["run"], row["how"]), {})[row["length"]] = [value]
    drawn = {", ".join(filter(None, (called[run], how))): (colour(variant_of(run)), line)
             for (run, how), line in lines.items()}
    curves(path, drawn, "Past the trained length", PROTOCOLS[protocol], {row["trained_length"] for row in rows},
           any("gain" in row for row in rows))

def curves(path, lines, title, label, trained, gain=False):
    """Curves of {name: (colour, {length: values of seeds})}; x on a log axis, dotted lines at the trained lengths.

    Each is named with its value at its end, or in a legend where the ends lie less than half as far apart as the
    curves elsewhere. InputError if there is no point to draw.
    """
    lines = {name: line for name, line in lines.items() if line[1]}
    if not lines:
        raise InputError("there is nothing to draw: no run has a loss at these lengths")
    figure = Figure(figsize=(8, max(4.5, 0.24 * len(lines) + 1.5)), layout="constrained")
    axis = figure.subplots()
    alike = Counter()
    means = {called: {length: np.mean(x) for length, x in values.items()} for called, (_, values) in lines.items()}
    lengths = sorted({length for some in means.values() for length in some})
    apart_at = {length: np.ptp([some[length] for some in means.values() if length in some]) for length in lengths}
    widest = max(reversed(lengths), key=apart_at.get)
    at = lengths[-1] if apart_at[lengths[-1]] > apart_at[widest] / 2 else widest
    for i, (called, (shade, values)) in enumerate(lines.items()):
        x = sorted(values)
        errors = [np.std(values[length], ddof=1) if len(values[length]) > 1 else 0 for length in x]
        axis.errorbar(x, [means[called][length] for length in x], errors, color=shade, capsize=2, markersize=5,
                      linestyle=DASHES[alike[shade] % len(DASHES)], marker=MARKERS[i % len(MARKERS)], linewidth=1.5,
                      elinewidth=1, label=f"{called}: {means[called].get(at, math.nan):.2f} at {at:,}")
        alike[shade] += 1
    if at == lengths[-1]:
        ends = [(some[max(some)], max(some), f"{called}: {some[max(some)]:.2f}", lines[called][0])
                for called, some in means.items()]
        name_ends(axis, sorted(ends))
    else:
        order = sorted(range(len(lines)), key=lambda i: -[*means.values()][i].get(at, -math.inf))
        handles, words = axis.get_legend_handles_labels()
        axis.legend([handles[i] for i in order], [words[i] for i in order], loc="upper right")
    if gain:
        axis.axhline(0, color=GREY, linewidth=1)
    ticks = sorted({*lengths} | trained)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" + "\n(trained)" * (tick in trained) for tick in ticks])
    axis.minorticks_off()
    for length in trained:
        axis.axvline(length, color=GREY, linestyle=":", linewidth=1)
    axis.set(xlabel="tokens in the window", title=f"{title}\n({label})",
             ylabel=f"{'gain' if gain else 'loss'}, nats a token")
    save(figure, path)

def name_ends(axis, ends):
    """Write the words of each curve, (y, x, words, colour) of its last point, right of all, none over another."""
    bottom, top = axis.get_ylim()
    if top - bottom < 0.5:                                             # 0.02 is to look small
        bottom, top = bottom - (0.5 - top + bottom) / 2, top + (0.5 - top + bottom) / 2
    space = (top - bottom) / 22
    heights = apart([y for y, *_ in ends], space)
    for (y, x, words, shade), height in zip(ends, heights, strict=True):
        line = {"arrowstyle": "-", "color": shade, "linewidth": 0.5, "relpos": (0, 0.5)}
        axis.annotate(words, (x, y), (1.01, height), textcoords=axis.get_yaxis_transform(), color=shade, va="center",
                      arrowprops=line)
    axis.set_ylim(min(bottom, heights[0] - space), max(top, heights[-1] + space))

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

# ---- training, tasks, attention --------------------------------------------------------------------------------------

def training(path, runs, unfinished):
    """Four panels by tokens seen, a curve a run: {run: {key of PANELS: (tokens, values)}}.

    unfinished: {run: "step 140 of 1,600", or "" of a run that is finished}.
    """
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    called = {run: ", ".join(filter(None, (word, unfinished[run]))) for run, word in names_of(runs).items()}
    axes = dict(zip(PANELS, figure.subplots(2, 2).flat, strict=True))
    for key, axis in axes.items():
        alike = Counter()
        for run, panels in runs.items():
            shade = colour(variant_of(run))
            axis.plot(*panels[key], color=shade, linestyle=DASHES[alike[shade] % len(DASHES)], linewidth=1.2,
                      label=called[run])
            alike[shade] += 1
        axis.set(title=PANELS[key], xlabel="tokens seen", xlim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*axes["val_loss"].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)

def heat(path, rows, title):
    """Two maps of tasks by methods, at the trained length and 4 times it.

    A cell has the accuracy in %, how many seeds have learned the task, and a colour from the best guess to 100%.
    """
    cells = {}
    for row in rows:
        task, _, method = row.run.rpartition(".")
        cells.setdefault((task, method), {}).setdefault(row.at, []).append(row)
    tasks, methods = (list(dict.fromkeys(pair[i] for pair in cells)) for i in (0, 1))
    figure = Figure(figsize=(0.52 * len(methods) + 2.2, 0.8 * len(tasks) + 2.4), layout="constrained")
    shades = matplotlib.colormaps["cividis"].resampled(20)
    places = {1: "the trained length", 4: "4 times it"}
    for axis, (multiple, words) in zip(figure.subplots(2, 1), places.items(), strict=True):
        above = np.full((len(tasks), len(methods)), np.nan)
        for (task, method), found in cells.items():
            i, j = tasks.index(task), methods.index(method)
            some = found.get(multiple, [])
            if not some:
                continue
            guess = some[0].more["guess"]
            accuracy = np.mean([row.loss for row in some])
            above[i, j] = max(0, (accuracy - guess) / max(1 - guess, 1e-9)) if guess < 1 else accuracy
            learned = sum(row.loss >= LEARNED for row in found[min(found)])
            axis.text(j, i, f"{100 * accuracy:.0f}\n{learned}/{len(some)}", ha="center", va="center", fontsize=6,
                      color="black" if above[i, j] > 0.6 else "white")
        axis.imshow(above, shades, vmin=0, vmax=1, aspect="auto", interpolation="none")
        axis.set_yticks(range(len(tasks)), tasks)
        axis.set_xticks(range(len(methods)), [*map(name, methods)], rotation=45, ha="right")
        axis.set_title(f"At {words}", fontsize=10)
        axis.set(frame_on=False)
        axis.tick_params(length=0)
    words = "accuracy in %, all seeds; colour: from the best guess to 100%; below: seeds that learned it"
    figure.suptitle(f"{title}\n({words})", x=0.01, ha="left", fontsize=11)
    save(figure, path, dpi=72)

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
