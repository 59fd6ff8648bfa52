"""How often the 95% intervals of lab.table hold the true difference, in tables that are drawn at random.

    python -m lab.coverage --tables 1000

Each table has 2, 4 or 12 methods with three seeds and 16 documents, at two lengths. A loss is a part of the seed plus a
part of each document, all drawn with mean 0: so every true difference is 0, and an interval holds it if it contains 0.
"""

from cli import CommandLine, at_least

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from lab.results import Row
from lab.table import compare_lines, compare_places, group_rows, print_table

SEEDS, DOCUMENTS, METHODS = 3, 16, (2, 4, 12)
DIFFERING = "0"                          # the method whose seeds vary otherwise, where one does
KINDS = {
    "all methods alike": lambda rng, differs: rng.normal(size=SEEDS),
    "one method three times as much": lambda rng, differs: rng.normal(size=SEEDS) * (3 if differs else 1),
    "seeds of one method at two values":
        lambda rng, differs: rng.normal(size=SEEDS) + differs * rng.choice((-3, 3), SEEDS),
}

def draw_lines(rng, draw_seeds, methods, of_documents):
    """The lines of one table; of_documents is the deviation of a document's part, 0 if documents do not matter."""
    rows = []
    for method in map(str, range(methods)):
        for length in (128, 2048):
            shared = of_documents * rng.normal(size=DOCUMENTS)                     # the same for all seeds
            losses = draw_seeds(rng, method == DIFFERING)[:, None] + shared + of_documents / 2 * rng.normal(
                size=(SEEDS, DOCUMENTS))                                           # (seeds, documents)
            rows += [Row(method, "", seed, "spread", "spread", length, 128, float(values.mean()), values,
                         np.full(DOCUMENTS, 64), "same", {}) for seed, values in enumerate(losses)]
    return group_rows(rows)

def find_shares(rng, draw_seeds, methods, of_documents, tables):
    """The shares of intervals that contain 0: of all, of the differing method's changes, and of its differences."""
    holds, changes, differences = [], [], []
    for _ in range(tables):
        lines = draw_lines(rng, draw_seeds, methods, of_documents)
        first, last = ("spread", 1.0), ("spread", 16.0)
        for made, of_differing in ((compare_places(lines, lines, first, last), changes),
                                   (compare_lines(lines, lines, first, str(methods - 1)), differences)):
            of_table = {method: abs(one.mean) <= one.half_width() for method, one in made.items()}
            holds += of_table.values()
            of_differing.append(of_table[DIFFERING])
    return np.mean(holds), np.mean(changes), np.mean(differences)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.coverage", description="How often intervals hold the true difference.")
    parser.add_argument("--tables", type=at_least(1), default=1000, metavar="N", help="tables of each kind and size")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
    rng, rows = np.random.default_rng(7), []
    for name, draw_seeds in KINDS.items():
        shares = 100 * np.array([find_shares(rng, draw_seeds, methods, of_documents, args.tables)
                                 for methods in METHODS for of_documents in (0, 1)])
        ranges = zip(shares.min(0), shares.max(0), strict=True)
        rows.append([name, *(f"{low:.0f} to {high:.0f}%" for low, high in ranges)])
    print_table(["how seeds vary", "all intervals", "changes of the differing method", "its differences"], rows)

if __name__ == "__main__":
    main()
