"""Say whether an exercise is solved, and if not, what is wrong: python -m learn.check 4 [FILE]

FILE is the stub in this folder unless another one is given. Exit status: 0 if all is right, 1 if not.
The file runs in a process of its own, so that an endless loop in it, or an exit, cannot end the check as well.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGUN, ANSWER, STUCK = "begun", "answer.json", "stuck.txt"              # files by which a process says how far it is

def check(number, path):
    """(whether a file solves an exercise, what to say), from a process of its own; SystemExit if it cannot start."""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | os.environ
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, __file__, "--into", folder, str(number), path],
                              stdin=subprocess.DEVNULL, env=environment)
        answer, stuck = Path(folder, ANSWER), Path(folder, STUCK)
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        if not Path(folder, BEGUN).exists():                            # it has said why
            sys.exit(done.returncode or 1)
        if found := stuck.read_text(encoding="utf-8", errors="replace"):
            lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', found)
            place = path.name + (f", line {lines[0]}," if lines else "")
            minutes, seconds = map(int, re.search(r"Timeout \(\d+:(\d+):(\d+)", found).groups())
            return False, (f"{place} was still running after {60 * minutes + seconds} seconds, and was stopped: is "
                           "there an endless loop?")
    return False, (f"{path.name} ended the program (exit status {done.returncode}) before an answer could be given: "
                   "leave out what exits.")

def answer(number, path, folder):
    """Check a file in this process, and write the answer into a folder."""
    from learn import exercises, judge

    Path(folder, BEGUN).touch()
    with open(Path(folder, STUCK), "w") as judge.Clock.file:
        try:
            found = exercises.check(number, path)
        except Exception:
            traceback.print_exc()
            found = False, "The check itself failed, as the lines above say. This is no mistake of yours."
    Path(folder, ANSWER).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)                                                         # whatever threads the file has started

def main(argv=None):
    sys.path.insert(0, str(HERE.parent))
    from cli import CommandLine

    # isort: split
    import numpy  # noqa: F401  (cli says in one line that it is missing)

    parser = CommandLine(prog="python -m learn.check", description=__doc__)
    parser.add_argument("number", type=int, choices=range(1, 10))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    path = (args.file or next(HERE.glob(f"{args.number}_*.py"))).absolute()
    if not path.is_file():
        parser.error(f"there is no file {args.file}")
    if args.into:
        answer(args.number, path, args.into)
    fine, line = check(args.number, path)
    print(line)
    if fine:
        print(f"Compare your answer to its question with that of exercise {args.number} in learn/answers.md.")
    sys.exit(not fine)

if __name__ == "__main__":
    main()
