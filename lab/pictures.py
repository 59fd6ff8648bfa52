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
from lab.results import LEARNED, describe_row_progress, describe_unfinished, is_gain
from lab.statistics import MIN_SEEDS, t_quantile
from settings import InputError
from zoo.names import METHODS, colour, colours, family, name, names_of, variant_of

GREY = "#595959"                         # of all text
MARKERS = "os^DvPX*<>dp"
DASHES = ("-", "--", "-.", ":")
PROTOCOLS = {"nonoverlap": "the paper's protocol", "same-targets": "the last targets of each document",
             "sliding": "a sliding window", "spread": "targets at 16 places of each document",
             "far-repeats": "ends of far repetitions", "streaming": "token by token, in constant memory",
             "swap": "the far context is another document's",
             "repeat": "random tokens that end the window, and do or do not begin it",
             "passkey": "a number that the last sentence asks for, in the first one or not"}
PANELS = {"loss": "loss, nats a token", "val_loss": "validation loss, nats a token",
          "grad_norm": "norm of the gradient", "lr": "learning rate"}
RISE = 0.1                               # nats a token, above which a method has the upper panel of rises
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
    """The Rows of one measure of lab.table, as it prints them: curves by length, or a map of tasks.

    Means are without the seeds that chose a run's values, unless it has no other seed; then its name says so.
    """
    tested = {row.label for row in rows if not row.chosen}
    has_chosen = any(row.chosen for row in rows if row.label in tested)
    rows = [row if row.label in tested else row._replace(condition=f"{row.condition}, chose its values".lstrip(", "))
            for row in rows if not (row.chosen and row.label in tested)]
    if rows[0].protocol == "task":
        return heat(path, rows, args.title)
    protocol = next((row.protocol for row in rows if row.protocol != "sliding"), "sliding")
    values = {}                                                        # {label: {length: values of seeds}}
    for row in rows:
        if row.protocol == protocol and row.value is not None:
            values.setdefault(row.label, {}).setdefault(row.length, []).append(row.value)
    seeds = sorted({len(of_seeds) for of_line in values.values() for of_seeds in of_line.values()})
    subtitle = f"{PROTOCOLS[protocol]}; {' or '.join(map(str, seeds))} seeds"
    if any(number >= MIN_SEEDS for number in seeds):
        subtitle += "; bars: 95% intervals for other seeds"
    if has_chosen:
        subtitle += "; without seeds that chose values"
    shades = colours(values)
    lines = {name(label) + describe_unfinished(rows, label): (shades[label], of_line)
             for label, of_line in values.items()}
    curves(path, lines, args.title or "Loss past the trained length", subtitle, {row.context for row in rows},
           is_gain(rows))

def rises(path, rows, title):
    """Each run's loss at its last length minus that at the trained one, against its training tokens a parameter.

    A dot is one seed. It is hollow if the training text is a path, as books are, and none of the named sources, and
    larger for a larger model. Methods that rise by more than RISE in the mean stand in a panel above the others, with
    an axis of its own.
    """
    rows_of = {}                                                       # {(run, seed, measure): {length: Row}}
    for row in rows:
        if row.value is not None and not row.condition and "budget" in row.details:
            rows_of.setdefault((row.run, row.seed, row.measure), {})[row.length] = row
    dots = {}                                                          # {method: [(Row at L, its rise)]}
    for (run, _, _), row_at in rows_of.items():
        first, last = row_at[min(row_at)], row_at[max(row_at)]
        if first.length == first.context < last.length:
            method = family(run.rpartition("/")[2])
            dots.setdefault(method, []).append((first, last.value - first.value))
    if not dots:
        raise InputError("there is nothing to draw: no run has losses at its trained length and at a longer one")
    steep = {method for method, of_method in dots.items() if np.mean([rise for _, rise in of_method]) > RISE}
    panels = [methods for methods in ([m for m in dots if m in steep], [m for m in dots if m not in steep]) if methods]
    figure = Figure(figsize=(8, 3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, methods in zip(axes, panels, strict=True):
        for i, method in enumerate(methods):
            label, shade = METHODS.get(method, (method, colour(method)))
            marker = MARKERS[list(dots).index(method) % len(MARKERS)]
            beside = 1.04 ** (i - len(methods) / 2)                    # so that dots of one budget do not hide others
            for first, rise in dots[method]:
                axis.plot(first.details["budget"] * beside, rise, color=shade, marker=marker, linestyle="", alpha=0.9,
                          markersize=3 + 3 * math.log10(max(10, first.details["parameters"] / 1e5)),
                          markerfacecolor="none" if "/" in first.details["source"] else shade)
            axis.plot([], [], color=shade, marker=marker, linestyle="", label=label)
        axis.axhline(0, color=GREY, linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks([1.5, 3, 6, 12], ["1.5", "3", "6", "12"])
        axis.minorticks_off()
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axis.set_ylabel("rise past L, nats a token")
    axes[-1].set_xlabel("training tokens a parameter")
    axes[0].set_title(f"{title}\n(the longest length minus L; a dot a seed; hollow: books; larger: a larger model)")
    save(figure, path)

def losses(rows, path):
    """What the rows of eval.py or lab.measure say: a curve for each run and condition, such as scaled positions."""
    protocol = rows[0]["protocol"]
    names = {}                                                         # {run: its name, and its step if unfinished}
    for run, word in names_of({row["run"] for row in rows}).items():
        progress = {describe_row_progress(row) for row in rows if row["run"] == run}
        names[run] = ", ".join(filter(None, (word, *progress)))
    values = {}                                                        # {(run, condition): {length: [value]}}
    for row in rows:
        value = row.get("gain", row["loss"])
        if row["protocol"] == protocol and value is not None:
            values.setdefault((row["run"], row["how"]), {})[row["length"]] = [value]
    lines = {", ".join(filter(None, (names[run], condition))): (colour(variant_of(run)), line)
             for (run, condition), line in values.items()}
    curves(path, lines, "Past the trained length", PROTOCOLS[protocol], {row["trained_length"] for row in rows},
           any("gain" in row for row in rows))

def curves(path, lines, title, subtitle, trained, gain=False):
    """Curves of {label: (colour, {length: values of seeds})}; x on a log axis, dotted lines at the trained lengths.

    Each is labelled with its value at its end, or in a legend where the ends lie less than half as far apart as the
    curves elsewhere. InputError if there is no point to draw.
    """
    lines = {label: line for label, line in lines.items() if line[1]}
    if not lines:
        raise InputError("there is nothing to draw: no run has a loss at these lengths")
    figure = Figure(figsize=(8, max(4.5, 0.24 * len(lines) + 1.5)), layout="constrained")
    axis = figure.subplots()
    means = {label: {length: np.mean(of_seeds) for length, of_seeds in values.items()}
             for label, (_, values) in lines.items()}
    lengths = sorted({length for of_line in means.values() for length in of_line})
    ranges = {length: np.ptp([of_line[length] for of_line in means.values() if length in of_line])
              for length in lengths}
    last = lengths[-1]
    widest = max(reversed(lengths), key=ranges.get)
    label_at_ends = widest == last or ranges[last] > ranges[widest] / 2
    labelled = last if label_at_ends else widest                       # the length whose values the labels have
    drawn = Counter()                                                  # {colour: curves that have it}
    for i, (label, (shade, values)) in enumerate(lines.items()):
        x = sorted(values)
        errors = [half_interval(values[length]) for length in x]
        axis.errorbar(x, [means[label][length] for length in x], errors, color=shade, capsize=2, markersize=5,
                      linestyle=DASHES[drawn[shade] % len(DASHES)], marker=MARKERS[i % len(MARKERS)], linewidth=1.5,
                      elinewidth=1, label=f"{label}: {means[label].get(labelled, math.nan):.2f} at {labelled:,}")
        drawn[shade] += 1
    if label_at_ends:
        ends = [(of_line[max(of_line)], max(of_line), f"{label}: {of_line[max(of_line)]:.2f}", lines[label][0])
                for label, of_line in means.items()]
        label_ends(axis, sorted(ends))
    else:
        downwards = sorted(range(len(lines)), key=lambda i: -[*means.values()][i].get(labelled, -math.inf))
        handles, words = axis.get_legend_handles_labels()
        axis.legend([handles[i] for i in downwards], [words[i] for i in downwards], loc="upper right")
    if gain:
        axis.axhline(0, color=GREY, linewidth=1)
    ticks = sorted({*lengths} | trained)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}\n(trained)" if tick in trained else f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    for length in trained:
        axis.axvline(length, color=GREY, linestyle=":", linewidth=1)
    axis.set(xlabel="tokens in the window", title=f"{title}\n({subtitle})",
             ylabel=f"{'gain' if gain else 'loss'}, nats a token")
    save(figure, path)

def half_interval(of_seeds):
    """Half of Student's 95% interval of the mean over seeds; 0 for fewer than MIN_SEEDS."""
    n = len(of_seeds)
    return t_quantile(n - 1) * np.std(of_seeds, ddof=1) / n**0.5 if n >= MIN_SEEDS else 0

def label_ends(axis, ends):
    """Write the label of each curve, (y, x, label, colour) of its last point, right of all, none over another."""
    bottom, top = axis.get_ylim()
    if top - bottom < 0.5:                                             # so that a difference of 0.02 looks small
        margin = (0.5 - top + bottom) / 2
        bottom -= margin
        top += margin
    space = (top - bottom) / 22
    heights = spread_heights([y for y, *_ in ends], space)
    for (y, x, label, shade), height in zip(ends, heights, strict=True):
        line = {"arrowstyle": "-", "color": shade, "linewidth": 0.5, "relpos": (0, 0.5)}
        axis.annotate(label, (x, y), (1.01, height), textcoords=axis.get_yaxis_transform(), color=shade, va="center",
                      arrowprops=line)
    axis.set_ylim(min(bottom, heights[0] - space), max(top, heights[-1] + space))

def spread_heights(heights, space):
    """Ascending heights, moved to be at least `space` apart with the least sum of squared moves.

    Less `space` for each one below it, the new heights must only ascend. That is isotonic regression: neighbours that
    would descend share their mean (pool adjacent violators; Barlow et al. 1972).
    """
    pools = []                                                         # (sum, count) of heights that share a mean
    for i, height in enumerate(heights):
        pools.append((height - i * space, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            upper_sum, upper_count = pools.pop()
            lower_sum, lower_count = pools.pop()
            pools.append((upper_sum + lower_sum, upper_count + lower_count))
    means = [total / count for total, count in pools for _ in range(count)]
    return [mean + i * space for i, mean in enumerate(means)]

# ---- training, tasks, attention --------------------------------------------------------------------------------------

def training(path, runs, unfinished):
    """Four panels by tokens seen, a curve a run: {run: {key of PANELS: (tokens, values)}}.

    unfinished: {run: "step 140 of 1,600", or "" of a run that is finished}.
    """
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    names = {run: ", ".join(filter(None, (word, unfinished[run]))) for run, word in names_of(runs).items()}
    axes = dict(zip(PANELS, figure.subplots(2, 2).flat, strict=True))
    for key, axis in axes.items():
        drawn = Counter()                                              # {colour: curves that have it}
        for run, panels in runs.items():
            shade = colour(variant_of(run))
            single = len(panels[key][0]) == 1                          # a curve of one value would be invisible
            axis.plot(*panels[key], color=shade, linestyle=DASHES[drawn[shade] % len(DASHES)], linewidth=1.2,
                      marker="o" if single else None, label=names[run])
            drawn[shade] += 1
        axis.set(title=PANELS[key], xlabel="tokens seen", xlim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*axes["val_loss"].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)

def heat(path, rows, title):
    """Two maps of tasks by methods side by side, at the trained length and 4 times it.

    A cell has the accuracy in %, how many seeds have learned the task, and a colour from the best guess to 100%.
    """
    cells = {}                                                         # {(task, method): {multiple: Rows of seeds}}
    for row in rows:
        task, _, method = row.run.rpartition(".")
        cells.setdefault((task, method), {}).setdefault(row.multiple, []).append(row)
    tasks = list(dict.fromkeys(task for task, _ in cells))
    methods = list(dict.fromkeys(method for _, method in cells))
    figure = Figure(figsize=(max(8, 1.3 * len(methods) + 1.4), 0.45 * len(tasks) + 1.8), layout="constrained")
    shades = matplotlib.colormaps["cividis"].resampled(20)
    places = {1: "the trained length", 4: "4 times it"}
    for axis, (multiple, words) in zip(figure.subplots(1, 2, sharey=True), places.items(), strict=True):
        above_guess = np.full((len(tasks), len(methods)), np.nan)      # 0: the best guess, 1: all right
        for (task, method), rows_at in cells.items():
            if multiple not in rows_at:
                continue
            i, j = tasks.index(task), methods.index(method)
            accuracies = [row.value for row in rows_at[multiple]]
            accuracy = np.mean(accuracies)
            guess = rows_at[multiple][0].details["guess"]
            above_guess[i, j] = max(0, (accuracy - guess) / max(1 - guess, 1e-9)) if guess < 1 else accuracy
            learned = sum(row.value >= LEARNED for row in rows_at[min(rows_at)])
            ink = "black" if above_guess[i, j] > 0.6 else "white"
            axis.text(j, i - 0.1, f"{100 * accuracy:.0f}", ha="center", va="center", fontsize=11, color=ink)
            axis.text(j, i + 0.3, f"{learned} of {len(accuracies)}", ha="center", va="center", fontsize=7, color=ink)
        axis.imshow(above_guess, shades, vmin=0, vmax=1, aspect="auto", interpolation="none")
        axis.set_yticks(range(len(tasks)), tasks)
        axis.set_xticks(range(len(methods)), [*map(name, methods)], rotation=45, ha="right")
        axis.set_title(f"At {words}", fontsize=10)
        axis.set(frame_on=False)
        axis.tick_params(length=0)
    words = ("large numbers: accuracy in %, mean of all seeds; blue: the best guess, yellow: 100%\n"
             "small numbers, in both maps: seeds that learned the task, with 95% or more at the trained length")
    figure.suptitle(f"{title}\n{words}", x=0.01, ha="left", fontsize=11)
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
        for (block, head), axis in np.ndenumerate(axes):
            weight = maps[block, head]
            relative = pool_maxima(weight / weight.max(-1, keepdims=True))
            image = axis.imshow(relative, shades, vmin=0, vmax=1, extent=(0, length, length, 0), interpolation="none")
            axis.set(xticks=[], yticks=[], frame_on=False)
        for head, axis in enumerate(axes[0]):
            axis.set_title(f"head {head}", fontsize=8)
        for block, axis in enumerate(axes[:, 0]):
            axis.set_ylabel(f"block {block}", fontsize=8)
    figure.suptitle(f"{title}\nkeys to the right, queries downwards", fontsize=10)
    last.colorbar(image, cax=last.subplots(), label="weight over the query's largest one")
    save(figure, path, dpi=90)

def pool_maxima(x):
    """(T, T) as at most PIXELS a side, each the maximum of its square."""
    edges = np.linspace(0, len(x), min(len(x), PIXELS) + 1).astype(int)[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(x, edges, axis=0), edges, axis=1)
