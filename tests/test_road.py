"""The wall: the scripts at the top need no folder, and nothing that computes a table needs torch."""

import ast
import os
import shutil
import subprocess
import sys

from conftest import ROOT

from positional_encodings import CORE

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
         for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")] if path.parent.name != "tests"}


def run_python(program, cwd, *arguments):
    """Run a program of a few lines in a folder that it sees alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], cwd=cwd, env=environment, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_core_encoding_works_without_the_folders(books, tmp_path):
    """In one process for all, since loading torch takes seconds."""
    for name in SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    program = """
import sys, data, train, eval, generate
books, *encodings = sys.argv[1:]
sys.argv = ["data.py", books, "--vocab", "300", "--min-doc-tokens", "256", "--out", "tokens"]
data.main()
for flags in [f"--pe {pe} --out {pe}" for pe in encodings] + ["--backend numpy --out numpy"]:
    small = "--preset mini --layers 1 --width 32 --heads 2 --vocab 300 --context 16 --steps 2 --data tokens"
    train.main([*small.split(), *flags.split()])
    run = flags.split()[-1]
    eval.main([run, "--lengths", "16"])
    generate.main([run, "--tokens", "5"])
"""
    said = run_python(program, tmp_path, books, *CORE)
    assert said.count("perplexity") == len(CORE) + 1
    assert len(list(tmp_path.glob("*/checkpoint.safetensors"))) == len(CORE) + 1


def imports_of(module):
    """Which of the repository's modules a module imports at module level."""
    found = set()
    for node in ast.parse(FILES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(FILES)


def test_no_script_imports_a_folder_at_module_level():
    for name in SCRIPTS:
        assert imports_of(name) <= set(SCRIPTS), name


def test_no_imports_at_module_level_form_a_circle():
    done = set()

    def walk(module, path):
        assert module not in path, " -> ".join([*path, module])
        for other in imports_of(module) if module not in done else ():
            walk(other, [*path, module])
        done.add(module)

    for name in FILES:
        walk(name, [])


def test_tables_settings_and_data_are_read_without_torch():
    said = run_python("import sys, config, data, expe, model_numpy, runs, tasks\n"
                      "model, _ = config.make_configs('mini')\n"
                      "from positional_encodings import CORE, make_encoding\n"
                      "for pe in CORE: model_numpy.build_encoding(make_encoding(pe), model)\n"
                      "print('torch' in sys.modules)", ROOT)
    assert said == "False\n"
