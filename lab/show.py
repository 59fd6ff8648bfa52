"""What eval.py says of its rows: the paired differences, and the tables."""

import numpy as np

from lab import measures

INTERVAL = "{0[0]:+.3f} ({0[1]:+.3f} {0[2]:+.3f})"

def line_of(row):
    """What makes a line of a table or a curve of a picture: the run, and how its positions are scaled."""
    return f"{row['run']} {row['how']}".strip()

def compare(rows):
    """Give rows of the same targets their paired differences, each with a 95% interval over documents.

    over_1x: from the same line's loss at the trained length; over_sliding: from the run's loss by a sliding window of
    that length, its positions as it was trained if it has such a line; minus: {line: ...}, from each line further down.
    """
    same_targets = {}
    for row in rows:
        if row["loss"] is not None:
            same_targets.setdefault((row["targets_sha256"], row["n_documents"]), []).append(row)
    for group in same_targets.values():
        if pairs := list(pairs_of(group)):
            differences = [np.subtract(row["unit_losses"], other["unit_losses"]) for row, other, *_ in pairs]
            found = measures.intervals(differences, group[0]["unit_targets"])
            for (*_, into, key), value in zip(pairs, found, strict=True):
                into[key] = value

def pairs_of(group):
    """(row, the row to compare it with, the dict that takes the difference, its key), of rows of the same targets."""
    found = {(line_of(row), row["protocol"], row["length"]): row for row in group}
    lines = list(dict.fromkeys(map(line_of, group)))
    for row in group:
        line, protocol, length, trained = line_of(row), row["protocol"], row["length"], row["trained_length"]
        one = found.get((line, protocol, trained))
        other = found.get((row["run"], "sliding", trained)) or found.get((line, "sliding", trained))
        if one is not None and length != trained:
            yield row, one, row, "over_1x"
        if other is not None and protocol != "sliding":
            yield row, other, row, "over_sliding"
        row["minus"] = {}
        for later in lines[lines.index(line) + 1 :]:
            if (other := found.get((later, protocol, length))) is not None:
                yield row, other, row["minus"], later

def print_table(rows, title, key, form="{:.3f}"):
    """One line a run and scaling, one column a length, of what rows have at a key; * marks the trained length."""
    main, heads, table = rows[0]["protocol"], {}, {}
    for row in rows:
        cells = table.setdefault((row["run"], row["pe"], row["how"]), {})
        if row["loss"] is not None and key not in row:
            continue
        text = "-" if row["loss"] is None else form.format(row[key])
        beside, length = row["protocol"] != main, row["length"]
        heads[beside, length] = f"{row['protocol']} {length:,} " if beside else f"{length:,} "
        trained = length == row["trained_length"] and not beside and text != "-"
        cells[beside, length] = text + "* "[not trained]
    if not heads:
        return
    any_pe, any_how = (any(line[i] for line in table) for i in (1, 2))
    table = {("run", "pe" * any_pe, "positions" * any_how): heads} | table
    runs, hows = (max(len(line[i]) for line in table) for i in (0, 2))
    widths = {at: 2 + max(len(cells.get(at, "")) for cells in table.values()) for at in sorted(heads)}
    print(f"\n{title}")
    for (run, pe, how), cells in table.items():
        names = f"{run:{runs}}  " + f"{pe:10}" * any_pe + f"{how:{hows}}  " * any_how
        print((names + "".join(f"{cells.get(at, ''):>{width}}" for at, width in widths.items())).rstrip())

def print_rows(rows):
    """All that is said of the rows of one measure."""
    scored = [row for row in rows if row["loss"] is not None]
    lines = {(row["data"], row["n_documents"], row["n_targets"], len(row["unit_targets"])) for row in scored}
    for name, n_documents, n_targets, n_units in sorted(lines):
        trials = f" in {n_units} trials" * (n_units != n_documents)
        print(f"{name}: {n_documents:,} documents, {n_targets:,} targets{trials} at every length")
    print_table(rows, "loss, nats a token (* trained length)", "loss")
    if any("gain" in row for row in rows):
        print_table(rows, "loss without it", "without")
        print_table(rows, "gain, with its 95% interval over documents or trials", "gain", INTERVAL)
        print_table(rows, "share of documents or trials with a gain", "won", "{:.0%}")
    elif rows[0]["protocol"] == "same-targets":
        for key, title in (("over_1x", "the trained length"), ("over_sliding", "a sliding window of it")):
            print_table(rows, f"difference from {title}, with its 95% interval over documents", key, INTERVAL)
        pairs = [{**row, "run": f"{line_of(row)} - {other}", "how": "", "pe": "", "pair": value}
                 for row in scored for other, value in row["minus"].items()]
        if pairs:
            print_table(pairs, "difference of two runs, with its 95% interval over documents", "pair", INTERVAL)
    else:
        print_table(rows, "perplexity (* trained length)", "perplexity", "{:.1f}")
    if scored and "by_position" in scored[0]:
        print_positions(scored)

def print_positions(rows):
    """The loss between doubling positions of the longest window, one line a run and scaling."""
    parts = []
    for row in {line_of(row): row for row in rows}.values():           # the last of a line is the longest
        begin, end = 0, min(row["block"], row["length"])
        while begin < row["length"]:
            inside = row["by_position"][begin // row["block"] : -(-end // row["block"])]
            parts.append({**row, "protocol": "", "length": end, "loss": sum(inside) / len(inside)})
            begin, end = end, min(2 * end, row["length"])
    print_table(parts, "loss at positions up to n and beyond the column before", "loss")
