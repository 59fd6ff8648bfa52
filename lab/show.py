"""What eval.py says of its rows: the paired differences, and the tables."""

from lab import measures


def line_of(row):
    """(run, how): what makes a line of a table or a curve of a picture."""
    return row["run"], row["how"]

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
        pairs = list(pairs_of(group))
        differences = [[a - b for a, b in zip(row["unit_losses"], other["unit_losses"], strict=True)]
                       for row, other, *_ in pairs]
        if pairs:
            found = measures.intervals(differences, group[0]["unit_targets"])
            for (*_, into, key), value in zip(pairs, found, strict=True):
                into[key] = value

def pairs_of(group):
    """(row, the row to compare it with, the dict that takes the difference, its key), of rows of the same targets."""
    found = {(*line_of(row), row["protocol"], row["length"]): row for row in group}
    lines = list(dict.fromkeys(map(line_of, group)))
    for row in group:
        line, protocol, length, trained = line_of(row), row["protocol"], row["length"], row["trained_length"]
        one = found.get((*line, protocol, trained))
        other = found.get((row["run"], "", "sliding", trained)) or found.get((*line, "sliding", trained))
        if one is not None and length != trained:
            yield row, one, row, "over_1x"
        if other is not None and protocol != "sliding":
            yield row, other, row, "over_sliding"
        row["minus"] = {}
        for later in lines[lines.index(line) + 1 :]:
            if (other := found.get((*later, protocol, length))) is not None:
                yield row, other, row["minus"], " ".join(later).strip()

def spread(value):
    """A difference with its interval, in words of a table."""
    return "{:+.3f} ({:+.3f} {:+.3f})".format(*value)

def print_table(rows, title, cell):
    """One line a run and scaling, one column a length: cell(row), "" to leave it empty; * marks the trained length."""
    main, columns, table = rows[0]["protocol"], {}, {}
    for row in rows:
        column = row["protocol"], row["length"]
        columns[column] = f"{row['length']:,}" if column[0] == main else f"{column[0]} {row['length']:,}"
        text = "-" if row["loss"] is None else cell(row)
        trained = row["length"] == row["trained_length"] and row["protocol"] == main and text not in ("", "-")
        table.setdefault((row["run"], row["pe"], row["how"]), {})[column] = text + "* "[not trained]
    columns = {column: head for column, head in columns.items()
               if any(cells.get(column, "").strip() for cells in table.values())}
    if not columns:
        return
    widths = {column: 2 + max(len(head) + 1, *(len(cells.get(column, "")) for cells in table.values()))
              for column, head in columns.items()}
    runs, hows = (max(len(line[i]) for line in table) for i in (0, 2))
    hows, pes = max(hows, 9) + 2 if hows else 0, 10 if any(pe for _, pe, _ in table) else 0
    heads = "".join(f"{head + ' ':>{widths[column]}}" for column, head in columns.items())
    print(f"\n{title}")
    print(f"{'run':{runs}}  {'pe' if pes else '':{pes}}{'positions' if hows else '':{hows}}{heads}".rstrip())
    for (run, pe, how), cells in table.items():
        line = "".join(f"{cells.get(column, ''):>{width}}" for column, width in widths.items())
        print(f"{run:{runs}}  {pe:{pes}}{how:{hows}}{line}".rstrip())

def print_rows(rows):
    """All that is said of the rows of one measure."""
    scored = [row for row in rows if row["loss"] is not None]
    lines = {(row["data"], row["n_documents"], row["n_targets"], len(row["unit_targets"])) for row in scored}
    for name, n_documents, n_targets, n_units in sorted(lines):
        trials = f" in {n_units} trials" * (n_units != n_documents)
        print(f"{name}: {n_documents:,} documents, {n_targets:,} targets{trials} at every length")
    print_table(rows, "loss, nats a token (* trained length)", lambda row: format(row["loss"], ".3f"))
    if any("gain" in row for row in rows):
        print_table(rows, "loss without it", lambda row: format(row["without"], ".3f"))
        print_table(rows, "gain, with its 95% interval", lambda row: spread(row["gain"]))
        print_table(rows, "share of documents or trials with a gain", lambda row: f"{row['won']:.0%}")
        return
    if rows[0]["protocol"] == "same-targets":
        for key, title in (("over_1x", "the trained length"), ("over_sliding", "a sliding window of it")):
            print_table(rows, f"difference from {title}, with its 95% interval",
                        lambda row, key=key: spread(row[key]) if key in row else "")
        pairs = [{**row, "run": f"{' '.join(line_of(row)).strip()} - {other}", "how": "", "pe": "", "pair": value}
                 for row in scored for other, value in row["minus"].items()]
        if pairs:
            print_table(pairs, "difference of two runs, with its 95% interval", lambda row: spread(row["pair"]))
    else:
        print_table(rows, "perplexity (* trained length)", lambda row: format(row["perplexity"], ".1f"))
    if any("by_position" in row for row in scored):
        print_positions([row for row in scored if "by_position" in row])

def print_positions(rows):
    """The loss between doubling positions of the longest window, one line a run and scaling."""
    rows = list({line_of(row): row for row in sorted(rows, key=lambda row: row["length"])}.values())  # the longest
    longest = rows[-1]
    block, ends = longest["block"], [longest["block"]]
    while ends[-1] < longest["length"]:
        ends.append(min(2 * ends[-1], longest["length"]))
    parts = []
    for row in rows:
        for begin, end in zip([0, *ends], ends, strict=False):
            inside = row["by_position"][begin // block : -(-end // block)]
            if end <= row["length"] and row["block"] == block:
                parts.append({**row, "protocol": "", "length": end, "loss": sum(inside) / len(inside)})
    print_table(parts, "loss at positions up to n and beyond the column before", lambda row: format(row["loss"], ".3f"))
