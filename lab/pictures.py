"""Every picture of losses and attention: rows of numbers in, a file out."""

import math
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from config import InputError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe, Ito: colour-blind-safe
STYLES = ("-", "--", ":")
PIXELS = 96  # of an attention map's side


# ---- curves ----------------------------------------------------------------------------------------------------------

def curves(path, lines, title, xlabel, ylabel, trained=None, ticks=None, zero=False, marked=True):
    """Curves of {label: (x, y, low, high)}, each named at its end; x on a log axis; low and high may be None.

    trained: where a dotted line marks the trained length. ticks: of the x axis, powers of two unless they are given.
    Raises InputError if there is no point to draw.
    """
    lines = {label: line for label, line in lines.items() if len(line[0])}
    if not lines:
        raise InputError("there is nothing to draw: no run has a loss at these lengths")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axis = figure.subplots()
    ends, dots = [], {"marker": "o", "markersize": 4}
    for i, (label, (x, y, low, high)) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        style = {"color": colour, "linestyle": STYLES[i // len(COLOURS) % len(STYLES)]}
        if low is None:
            axis.plot(x, y, **style, **(dots if marked else {}))
        else:
            axis.errorbar(x, y, (np.subtract(y, low), np.subtract(high, y)), elinewidth=1, capsize=2, **dots, **style)
        ends.append((y[-1], x[-1], label, colour))
    name_ends(axis, sorted(ends))
    axis.set_xscale("log", base=2)
    furthest = max(max(x) for x, *_ in lines.values())
    ticks = ticks or [2**i for i in range(3, 1 + math.ceil(math.log2(furthest)))]
    axis.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axis.minorticks_off()
    if zero:
        axis.axhline(0, color="grey", linewidth=1)
    if trained:
        axis.axvline(trained, color="grey", linestyle=":", linewidth=1)
        axis.annotate("trained length", (trained, 1), (4, -4), xycoords=("data", "axes fraction"),
                      textcoords="offset points", color="grey", va="top", fontsize=9)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_title("\n".join(textwrap.wrap(title, 75, break_on_hyphens=False)), fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)

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

def by_position(losses, block):
    """(positions, losses, None, None): means over stretches of `block` positions, further out of ever longer ones."""
    ends = [1]
    while ends[-1] < len(losses):
        ends.append(min(len(losses), max(ends[-1] + 1, round(1.15 * ends[-1]))))
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return [block * (p.start + p.stop) / 2 for p in parts], [float(np.mean(losses[p])) for p in parts], None, None

def losses(rows, path):
    """What eval.py's rows say, a curve a run and its positions: the loss, a probe's gain, or the loss by position."""
    rows = [row for row in rows if row["loss"] is not None and row["protocol"] == rows[0]["protocol"]]
    protocol, lines = rows[0]["protocol"] if rows else "", {}
    pes = [pe for _, pe in {(row["run"], row["pe"]) for row in rows}]
    for row in rows:
        name = row["pe"] if pes.count(row["pe"]) == 1 else Path(row["run"]).name
        lines.setdefault(f"{name} {row['how']}".strip(), []).append(row)
    contexts = {row["trained_length"] for row in rows}
    trained = contexts.pop() if len(contexts) == 1 else None
    if any("by_position" in row for row in rows):
        longest = {label: max(line, key=lambda row: row["length"]) for label, line in lines.items()}
        drawn = {label: by_position(row["by_position"], row["block"]) for label, row in longest.items()}
        return curves(path, drawn, f"Loss by position in a window ({protocol})", "position", "loss, nats a token",
                      trained=trained, marked=False)
    ticks, drawn = sorted({row["length"] for row in rows} | ({trained} - {None})), {}
    probe = any("gain" in row for row in rows)
    for label, line in lines.items():
        y = np.array([row["gain"] for row in line]).T if probe else ([row["loss"] for row in line], None, None)
        drawn[label] = [row["length"] for row in line], *y
    title = (f"What the far context is worth: probe {protocol}, with 95% intervals" if probe else
             f"Loss past the trained length, on the same targets ({protocol})")
    what = f"{'gain' if probe else 'loss'}, nats a token"
    curves(path, drawn, title, "tokens in the window", what, trained, ticks, zero=probe)


# ---- bars and maps ---------------------------------------------------------------------------------------------------

def bars(path, groups, title, ylabel):
    """Bars of {group: {label: (height, error)}}, each with its number on it."""
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        heights, errors = zip(*(group.get(label, (math.nan, 0)) for group in groups.values()), strict=True)
        x = np.arange(len(groups)) + (i - (len(labels) - 1) / 2) * width
        drawn = axis.bar(x, heights, width * 0.92, yerr=errors, color=COLOURS[i], ecolor="grey", label=label)
        axis.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    axis.set_xticks(np.arange(len(groups)), groups)
    low = min(height for group in groups.values() for height, _ in group.values())
    bottom = max(0, math.floor(low - 0.5))
    axis.set_ylim(bottom=bottom)
    axis.set(title=title, ylabel=f"{ylabel} (the axis starts at {bottom})")
    axis.legend(frameon=False, ncols=len(labels), loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)

def attention(path, weights, title):
    """Maps of {length: one (H, T, T) array a block}: a row a block, a column a head, the lengths side by side.

    Each query's weights are drawn over its largest one, so that a pattern shows at any length; long windows are pooled
    to PIXELS a side by their maximum.
    """
    blocks, heads = (len(next(iter(weights.values()))), len(next(iter(weights.values()))[0]))
    size = max(0.45, min(1.1, 14 / (heads * len(weights))))
    figure = Figure(figsize=(size * heads * len(weights) + 1, size * blocks + 1.1), layout="constrained")
    for part, (length, maps) in zip(np.atleast_1d(figure.subfigures(1, len(weights))), weights.items(), strict=True):
        part.suptitle(f"{length:,} tokens", fontsize=10)
        axes = part.subplots(blocks, heads, squeeze=False)
        for block, head in np.ndindex(blocks, heads):
            axis, found = axes[block, head], maps[block][head]
            x = pooled(found / found.max(-1, keepdims=True))
            axis.imshow(x, cmap="cividis", vmin=0, vmax=1, extent=(0, length, length, 0), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if block == 0:
                axis.set_title(f"head {head}", fontsize=8)
            if head == 0:
                axis.set_ylabel(f"block {block}", fontsize=8)
    figure.suptitle(f"{title}: keys to the right, queries downwards, bright = a query's largest weight", fontsize=10)
    figure.savefig(path, dpi=90)

def pooled(x):
    """(T, T) as at most PIXELS a side, each the maximum of its square."""
    edges = np.linspace(0, len(x), min(len(x), PIXELS) + 1).astype(int)[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(x, edges, axis=0), edges, axis=1)
