"""How many lines of this project one command executes: the length of the road that a reader of that command walks.

    python tests/walk.py train.py --preset mini --pe expe --l 24 --steps 3 --out runs/walk

A line counts if it runs in the body of a function (with the line `def`), or at module or class level and is no import,
docstring, or head of a function or class. Packages and tests are left out. (nanoGPT's train.py has 272 such lines.)
"""

import ast
import collections
import runpy
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def trace(frame, event, arg):
    path = frame.f_code.co_filename
    if not path.startswith(str(ROOT)) or "/.venv/" in path or "/tests/" in path:
        return None
    entered[path].add(frame.f_code.co_firstlineno)

    def lines(frame, event, arg):
        if event == "line":
            ran[path].add(frame.f_lineno)
        return lines

    return lines


def count(path):
    """(Lines of a file that ran in functions, at module or class level)."""
    inside, called, heads = set(), set(), set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            heads |= {*range(node.lineno, node.end_lineno + 1)}
        if isinstance(node, ast.ClassDef):
            heads |= {node.lineno, *(each.lineno for each in node.decorator_list)}
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            inside |= {*range(first, node.end_lineno + 1)}
            if first in entered[path]:
                called |= {node.lineno, *range(node.body[0].lineno, node.end_lineno + 1)}
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            heads |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len((ran[path] | called & entered[path]) & called - heads), len(ran[path] - inside - heads)


ran, entered = collections.defaultdict(set), collections.defaultdict(set)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(ROOT))
threading.settrace(trace)
sys.settrace(trace)
try:
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
except SystemExit as stop:
    print(f"exit {stop.code}", file=sys.stderr)
sys.settrace(None)
counts = {Path(path).name: count(path) for path in sorted(entered)}
print(f"{sys.argv[0]} runs {sum(map(sum, counts.values()))} lines: "
      + ", ".join(f"{name} {sum(both)}" for name, both in counts.items()))
