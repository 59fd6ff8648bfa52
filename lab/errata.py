"""docs/errata.md from the docstrings of tests/test_errata.py, which are read and not run: `python -m lab.errata`."""

import ast
import re
from pathlib import Path

from common import CommandLine, write_text

ROOT = Path(__file__).resolve().parent.parent
TESTS, PAGE = ROOT / "tests" / "test_errata.py", ROOT / "docs" / "errata.md"
FACTS = re.compile("source: (.+?)\nsays: (.+?)\nin fact: (.+?)(?:\n\n.*)?", re.DOTALL)         # free text follows
HEAD = """# What the sources have wrong

This page tells you where the ExPE paper, and what is written about its rivals, is wrong, and what is right.
Each row is one test, which shows the wrong value and the right one: `python -m pytest tests/test_errata.py -v`.
The paper is the ExPE preprint and its later version. The survey is another paper's appendix of formulas.
The tutorial is part 4 of the blog series Transformer Anatomy, and the explainer a chapter of a textbook.
Public code is named by its repository.
The page is made by `python -m lab.errata` of those tests' docstrings: change it there.

| source | says | in fact |
|---|---|---|
"""

def page():
    """The text of docs/errata.md. ValueError for a test_errata_... without its three facts."""
    rows = []
    for node in ast.parse(TESTS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_errata_"):
            match = FACTS.fullmatch(ast.get_docstring(node) or "")
            if match is None:
                raise ValueError(f"{node.name}: the docstring must begin with source: ..., says: ... and in fact: ...")
            rows.append("| " + " | ".join(" ".join(part.split()) for part in match.groups()) + " |\n")
    return HEAD + "".join(rows)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.errata", description=__doc__)
    with parser.one_line_errors():
        parser.parse_args(argv)
        write_text(PAGE, page())
        print(f"wrote {PAGE.relative_to(ROOT)}")

if __name__ == "__main__":
    main()
