"""What lab.measure prints of its rows: the paired differences, and the tables."""

import shutil

import numpy as np

from lab import measures

INTERVAL = "{0[0]:+.3f} ({0[1]:+.3f} {0[2]:+.3f})"
ALONE = "{0[0]:+.3f} (-)"                # of one document, which has no interval

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
            values = measures.intervals(differences, group[0]["unit_targets"])
            for (*_, into, key), value in zip(pairs, values, strict=True):
                into[key] = value

def pairs_of(group):
    """(row, the row to compare it with, the dict that takes the difference, its key), of rows of the same targets."""
    by_place = {(line_of(row), row["protocol"], row["length"]): row for row in group}
    lines = list(dict.fromkeys(map(line_of, group)))
    for row in group:
        line = line_of(row)
        protocol = row["protocol"]
        length = row["length"]
        trained = row["trained_length"]
        one = by_place.get((line, protocol, trained))
        other = by_place.get((row["run"], "sliding", trained)) or by_place.get((line, "sliding", trained))
        if one is not None and length != trained:
            yield row, one, row, "over_1x"
        if other is not None and protocol != "sliding":
            yield row, other, row, "over_sliding"
        row["minus"] = {}
        for later in lines[lines.index(line) + 1 :]:
            if (other := by_place.get((later, protocol, length))) is not None:
                yield row, other, row["minus"], later

def print_table(rows, title, key, form="{:.3f}"):
    """What rows have at a key: a line for each run and scaling, with a column a length; * marks the trained length.

    Where the terminal is too narrow for that (80 columns without one), a line for each length, below the run's.
    """
    main = rows[0]["protocol"]
    heads = {}
    table = {}
    for row in rows:
        tokens = "" if row["trained_tokens"] is None else f"{row['trained_tokens']:,}"
        cells = table.setdefault((row["run"], row["pe"], tokens, row["how"]), {})
        if row["loss"] is not None and key not in row:
            continue
        alone = form == INTERVAL and len(row.get("unit_targets", ())) == 1
        none = "not finite" if row["n_targets"] else "-"                   # "-": none is scored there
        text = none if row["loss"] is None else (ALONE if alone else form).format(row[key])
        beside = row["protocol"] != main
        length = row["length"]
        heads[beside, length] = f"{row['protocol']} {length:,} " if beside else f"{length:,} "
        trained = length == row["trained_length"] and not beside and row["loss"] is not None
        cells[beside, length] = text + "* "[not trained]
    if not heads:
        return
    columns = sorted(heads)
    parts = list(zip(*table, strict=True))
    kept = [i for i, part in enumerate(parts) if any(part) and (i != 2 or len(set(part)) > 1)]     # 2: the tokens
    names = aligned([[line[i] for i in kept] for line in (("run", "pe", "tokens", "positions"), *table)], "<")
    values = aligned([[cells.get(at, "") for at in columns] for cells in (heads, *table.values())], ">")
    lines = [f"{name}  {value}".rstrip() for name, value in zip(names, values, strict=True)]
    if max(map(len, lines)) > shutil.get_terminal_size().columns:
        values = aligned([(heads[at], cells.get(at, "")) for cells in table.values() for at in columns], ">")
        parts = [values[i : i + len(columns)] for i in range(0, len(values), len(columns))]
        lines = [names[0]]
        for name, part in zip(names[1:], parts, strict=True):
            lines += [name, *(f"    {value}" for value in part)]
    print(f"\n{title}")
    for line in lines:
        print(line.rstrip())

def aligned(lines, side):
    """Lines of words as text, two blanks between the columns, each as wide as its longest word."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{word:{side}{width}}" for word, width in zip(line, widths, strict=True)) for line in lines]

def shortened(names):
    """{name: what tells it from the others}: its last folder, without the words that all begin or end with."""
    words = {name: name.rpartition("/")[2].split("-") for name in names}
    if len(set(map(tuple, words.values()))) < max(2, len(words)):                      # one name, or one in two folders
        return {name: name for name in names}
    first = last = 0
    while min(map(len, words.values())) - first > 2 and len({word[first] for word in words.values()}) == 1:
        first += 1
    while min(map(len, words.values())) - first - last > 1 and len({word[-1 - last] for word in words.values()}) == 1:
        last += 1
    return {name: "-".join(word[first : len(word) - last]) for name, word in words.items()}

def print_rows(rows):
    """All that is said of the rows of one measure."""
    short = shortened([row["run"] for row in rows])
    lines = {line_of(row): line_of({**row, "run": short[row["run"]]}) for row in rows}
    rows = [{**row, "run": short[row["run"]],
             "minus": {lines[other]: value for other, value in row.get("minus", {}).items()}} for row in rows]
    scored = [row for row in rows if row["loss"] is not None]
    lines = {(row["data"], row["n_documents"], row["n_targets"], len(row["unit_targets"])) for row in scored}
    for name, n_documents, n_targets, n_units in sorted(lines):
        kind = "trials" if rows[0]["protocol"] in measures.PROBES else "of them"
        trials = f" in {n_units} {kind}" * (n_units != n_documents)
        s = "s" * (n_documents > 1)
        print(f"{name}: {n_documents:,} document{s}, {n_targets:,} targets{trials} at every length")
    if len({name for name, *_ in lines}) > 1:
        print("These are different texts, or tokens of different tokenizers: their losses do not compare.")
    print_table(rows, "loss, nats a token (* trained length)", "loss")
    if any("gain" in row for row in rows):
        print_table(rows, "loss without it", "without")
        print_table(rows, "gain, with its 95% interval over documents or trials", "gain", INTERVAL)
        print_table(rows, "share of documents or trials with a gain", "won", "{:.0%}")
    elif rows[0]["protocol"] in ("same-targets", "spread", "far-repeats"):
        titles = {"over_1x": "the trained length", "over_sliding": "a sliding window of it"}
        for key, title in ((key, title) for key, title in titles.items() if any(key in row for row in rows)):
            print_table(rows, f"difference from {title}, with its 95% interval over documents", key, INTERVAL)
        pairs = [{**row, "run": f"{line_of(row)} - {other}", "how": "", "pe": "", "trained_tokens": None, "pair": value}
                 for row in scored for other, value in row["minus"].items()]
        if pairs:
            print_table(pairs, "difference of two runs, with its 95% interval", "pair", INTERVAL)
    else:
        print_table(rows, "perplexity (* trained length)", "perplexity", "{:.1f}")
    if scored and "by_position" in scored[0]:
        print_positions(scored)
    for distance in dict.fromkeys(distance for row in scored for distance in row.get("by_distance", ())):
        parts = [{**row, "loss": row["by_distance"][distance][0], "n": row["by_distance"][distance][1]}
                 for row in scored if distance in row["by_distance"]]
        counts = " or ".join(f"{n:,}" for n in dict.fromkeys(part["n"] for part in parts))
        print_table(parts, f"loss on the {counts} targets that repeat what ended {distance} the trained length before",
                    "loss")

def print_positions(rows):
    """The loss between doubling positions of the longest window, one line a run and scaling."""
    parts = []
    for row in {line_of(row): row for row in rows}.values():           # the last of a line is the longest
        begin = 0
        end = min(row["block"], row["length"])
        while begin < row["length"]:
            inside = row["by_position"][begin // row["block"] : -(-end // row["block"])]
            parts.append({**row, "protocol": "", "length": end, "loss": sum(inside) / len(inside)})
            begin = end
            end = min(2 * end, row["length"])
    print_table(parts, "loss at positions up to n and beyond the column before", "loss")
