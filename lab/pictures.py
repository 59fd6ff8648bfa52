"""Every picture of losses and attention: rows of numbers in, a file out."""

import math
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import cycler
from matplotlib.figure import Figure

from config import InputError
from files import naming

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe, Ito: colour-blind-safe
STYLES = ("-", "--", ":")
PIXELS = 96  # of an attention map's side


# ---- curves ----------------------------------------------------------------------------------------------------------

def save(figure, path, dpi):
    with naming(path):                                                  # where a disk is full
        figure.savefig(path, dpi=dpi)

def curves(path, lines, title, trained, what="loss", positions=False):
    """Curves of {label: (x, y, errors)}, each named at its end; x on a log axis; errors: None, or axis.errorbar's.

    trained: the lengths where dotted lines mark the trained one. positions: whether x is the position in one window,
    and not its length. Raises InputError if there is no point to draw.
    """
    lines = {label: line for label, line in lines.items() if len(line[0])}
    if not lines:
        raise InputError("there is nothing to draw: no run has a loss at these lengths")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axis, ends, ticks = figure.subplots(), [], set(trained)
    axis.set_prop_cycle(cycler(linestyle=STYLES) * cycler(color=COLOURS))
    marks = {"marker": "" if positions else "o", "markersize": 4}
    for label, (x, y, errors) in lines.items():
        if errors is None:
            [line] = axis.plot(x, y, **marks)
        else:
            line, *_ = axis.errorbar(x, y, errors, elinewidth=1, capsize=2, **marks)
        ends.append((y[-1], x[-1], label, line.get_color()))
        ticks.update(x)
    name_ends(axis, sorted(ends))
    if positions:
        ticks = {2**i for i in range(3, 1 + math.ceil(math.log2(max(ticks))))}
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ticks), [f"{tick:,.0f}" for tick in sorted(ticks)])
    axis.minorticks_off()
    if what == "gain":
        axis.axhline(0, color="grey", linewidth=1)
    for length in trained:
        axis.axvline(length, color="grey", linestyle=":", linewidth=1)
        axis.annotate("trained length", (length, 1), (4, -4), xycoords=("data", "axes fraction"),
                      textcoords="offset points", color="grey", va="top", fontsize=9)
    axis.set(xlabel="position" if positions else "tokens in the window", ylabel=f"{what}, nats a token")
    axis.set_title("\n".join(textwrap.wrap(title, 75, break_on_hyphens=False)), fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=100)

def name_ends(axis, ends):
    """Write the label of each curve, (y, x, label, colour) of its last point, beside it, none over another."""
    bottom, top = axis.get_ylim()
    space = (top - bottom) / 22
    heights = apart([y for y, *_ in ends], space)
    for (y, x, label, colour), height in zip(ends, heights, strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)}
        axis.annotate(label, (x, y), (x * 1.09, height), color=colour, va="center", fontsize=9, arrowprops=line)
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
    losses, block, ends = np.mean([row["by_position"] for row in rows], axis=0), rows[0]["block"], [1]
    while ends[-1] < len(losses):
        ends.append(min(len(losses), max(ends[-1] + 1, round(1.15 * ends[-1]))))
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return [block * (p.start + p.stop) / 2 for p in parts], [float(np.mean(losses[p])) for p in parts], None

def losses(rows, path):
    """What eval.py's rows say, a curve a run and its positions: the loss, a probe's gain, or the loss by position."""
    protocol, lines = rows[0]["protocol"], {}
    rows = [row for row in rows if row["loss"] is not None and row["protocol"] == protocol]
    pes = [pe for _, pe in {(row["run"], row["pe"]) for row in rows}]
    for row in rows:
        name = row["pe"] if pes.count(row["pe"]) == 1 else Path(row["run"]).name
        lines.setdefault(f"{name} {row['how']}".strip(), []).append(row)
    trained = {row["trained_length"] for row in rows}
    if any("by_position" in row for row in rows):
        drawn = {label: by_position(line[-1:]) for label, line in lines.items()}       # the last is the longest
        curves(path, drawn, f"Loss by position in a window ({protocol})", trained, positions=True)
    elif any("gain" in row for row in rows):
        drawn = {label: gains(line) for label, line in lines.items()}
        title = f"What the far context is worth: probe {protocol}, with 95% intervals"
        curves(path, drawn, title, trained, "gain")
    else:
        drawn = {label: by_length([row["length"] for row in line], [[row["loss"]] for row in line])
                 for label, line in lines.items()}
        curves(path, drawn, f"Loss past the trained length, on the same targets ({protocol})", trained)

def gains(line):
    """(lengths, gains, how far their intervals go below and above), of a probe's rows."""
    mean, low, high = np.transpose([row["gain"] for row in line])
    return [row["length"] for row in line], mean, (mean - low, high - mean)


# ---- bars and maps ---------------------------------------------------------------------------------------------------

def bars(path, names, labels, losses, title):
    """A group of bars for each name, each of them with its number on it, of losses (labels, names, seeds)."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axis, width, x = figure.subplots(), 0.8 / len(labels), np.arange(len(names))
    heights, errors = over_seeds(losses)
    for i, label in enumerate(labels):
        begin = x + (i - (len(labels) - 1) / 2) * width
        drawn = axis.bar(begin, heights[i], width * 0.92, yerr=errors[i], color=COLOURS[i], ecolor="grey", label=label)
        axis.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    axis.set_xticks(x, names)
    bottom = max(0, math.floor(np.nanmin(heights) - 0.5))
    axis.set_ylim(bottom=bottom)
    axis.set(title=title, ylabel=f"loss, nats a token (the axis starts at {bottom})")
    axis.legend(frameon=False, ncols=len(labels), loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=100)

def attention(path, weights, title):
    """Maps of {length: (blocks, H, T, T)}: a row a block, a column a head, the lengths side by side.

    Each query's weights are drawn over its largest one, so that a pattern shows at any length; long windows are pooled
    to PIXELS a side by their maximum.
    """
    blocks, heads = next(iter(weights.values())).shape[:2]
    size = max(0.45, min(1.1, 14 / (heads * len(weights))))
    figure = Figure(figsize=(size * heads * len(weights) + 1, size * blocks + 1.1), layout="constrained")
    parts = figure.subfigures(1, len(weights), squeeze=False)[0]
    for part, (length, maps) in zip(parts, weights.items(), strict=True):
        part.suptitle(f"{length:,} tokens", fontsize=10)
        axes = part.subplots(blocks, heads, squeeze=False)
        for at, axis in np.ndenumerate(axes):
            x = pooled(maps[at] / maps[at].max(-1, keepdims=True))
            axis.imshow(x, cmap="cividis", vmin=0, vmax=1, extent=(0, length, length, 0), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        for head, axis in enumerate(axes[0]):
            axis.set_title(f"head {head}", fontsize=8)
        for block, axis in enumerate(axes[:, 0]):
            axis.set_ylabel(f"block {block}", fontsize=8)
    figure.suptitle(f"{title}: keys to the right, queries downwards, bright = a query's largest weight", fontsize=10)
    save(figure, path, dpi=90)

def pooled(x):
    """(T, T) as at most PIXELS a side, each the maximum of its square."""
    edges = np.linspace(0, len(x), min(len(x), PIXELS) + 1).astype(int)[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(x, edges, axis=0), edges, axis=1)
