"""The road from a flag to a loss: how many lines it executes, how deep it is, and that it needs no folder."""

import ast
import os
import re
import shutil
import subprocess
import sys
import traceback

import pytest
from conftest import ROOT, command

import expe

SCRIPTS = ("expe", "config", "model_numpy", "model_torch", "data", "train", "eval", "generate", "common")
FOLDERS = ("zoo", "longer", "engine", "lab", "studies", "interop", "web")
LIMITS = {"train.py --preset mini --pe expe --l 24 --steps 3": 650, "eval.py RUN --lengths 16,64": 560,
          "generate.py RUN": 460}


@pytest.fixture(scope="module")
def alone(books, tmp_path_factory):
    """The nine scripts in a folder of their own, with a run and its prepared tokens."""
    folder = tmp_path_factory.mktemp("alone")
    for name in SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", folder)
    run_alone(folder, "data.py", books, "--vocab", "300", "--min-doc-tokens", "256", "--out", "tokens")
    return folder


def run_alone(folder, *arguments, prefix=()):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *prefix, *map(str, arguments)], cwd=folder, env=environment, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_road_is_short(alone, capsys):
    """Counted by lab/walk.py; the flags of data and shape are read from the same fields as any."""
    small = ["--data", "tokens", "--vocab", "300", "--context", "16"]
    for line, limit in LIMITS.items():
        more = small if line.startswith("train") else []
        words = line.replace("RUN", str(next(alone.glob("runs/*"), ""))).split()
        said = run_alone(alone, ROOT / "lab" / "walk.py", alone, *words, *more)
        lines = int(said.split()[-1])
        with capsys.disabled():
            print(f"\n{line.split()[0]}: {lines} lines", end="")
        assert lines <= limit, f"{line} executes {lines} lines: what few people use belongs behind the wall"


def test_every_core_encoding_works_without_the_folders(alone):
    """In one process for all of train.py, eval.py and generate.py: to load torch takes seconds."""
    program = """
import train, eval, generate
small = "--preset mini --layers 1 --vocab 300 --context 16 --steps 2 --data tokens"
for pe in "nope sinusoidal learned expe exqpe rope alibi t5 shaw".split():
    train.main(f"{small} --pe {pe} --out {pe}".split())
    eval.main(f"{pe} --lengths 16".split())
    generate.main(f"{pe} --tokens 5".split())
"""
    said = run_alone(alone, "-c", program)
    assert said.count("perplexity") == 9 and len(list(alone.glob("*/checkpoint.safetensors"))) >= 9

def test_the_numpy_backend_works_without_the_folders(alone):
    flags = "--preset mini --backend numpy --vocab 300 --context 16 --steps 2 --data tokens"
    run_alone(alone, "train.py", *flags.split())


def test_at_most_eight_functions_lie_between_main_and_the_table(tokens, tmp_path, monkeypatch):
    stacks = []
    table = expe.expe_table

    def expe_table(*arguments, **keywords):
        files = [frame.name for frame in traceback.extract_stack() if str(ROOT) in frame.filename
                 and "/.venv/" not in frame.filename and "/tests/" not in frame.filename]
        stacks.append(files)
        return table(*arguments, **keywords)

    monkeypatch.setattr(expe, "expe_table", expe_table)
    for backend in ("torch", "numpy"):
        flags = ["--preset", "mini", "--vocab", "300", "--context", "16", "--steps", "1", "--data", tokens]
        assert command("train.py", *flags, "--backend", backend, "--out", backend, cwd=tmp_path).returncode == 0
    assert stacks and all(stack[0] == "main" and len(stack) + 1 <= 8 for stack in stacks), max(stacks, key=len)


def test_the_loop_is_in_one_function_in_its_order():
    [loop] = [node for node in ast.parse((ROOT / "train.py").read_text()).body if getattr(node, "name", "") == "train"]
    text = ast.unparse(loop)
    steps = ["data.batch(", "backend.step(", "add_to_log(", "validation_loss(", "save_checkpoint(", "break"]
    places = [text.index(step, text.index("for step")) for step in steps]
    assert places == sorted(places) and "yield" not in text


def test_nine_scripts_stand_at_the_top():
    assert {path.stem for path in ROOT.glob("*.py")} == set(SCRIPTS)


def modules():
    """{module: its tree} of the repository, tests left out."""
    files = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for path, name in names.items()}


def imports(tree, known, everywhere=True):
    """Which of the known modules a tree imports: everywhere, or at module level alone."""
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(known)


def test_the_wall_stands():
    known = modules()
    for name in SCRIPTS:
        assert imports(known[name], known, everywhere=False) <= set(SCRIPTS), name
    behind = {name: imports(known[name], known) - set(SCRIPTS) for name in SCRIPTS}
    assert {name for name, found in behind.items() if found} <= {
        "config", "data", "train", "eval", "generate", "model_numpy", "model_torch"}


def test_no_imports_form_a_circle():
    """At module level, where a circle fails; within functions the gates reach behind the wall, which stands on them."""
    known = modules()
    graph = {name: imports(tree, known, everywhere=False) for name, tree in known.items()}
    done = set()

    def walk(module, path):
        assert module not in path, " -> ".join([*path, module])
        for other in graph[module] if module not in done else ():
            walk(other, [*path, module])
        done.add(module)

    for name in graph:
        walk(name, [])


def test_torch_is_loaded_by_none_who_read_tables_settings_and_data():
    program = ("import sys, config, data, expe, model_numpy\n"
               "model = config.PRESETS['mini'].model\n"
               "for pe in config.ENCODINGS: model_numpy.doors_of(config.make_encoding(pe), model)\n"
               "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_plainness():
    """No class builds another, no frozen one is changed, no two unrelated values are set in one line of the scripts."""
    folders = ("engine", "zoo", "longer")
    for path in [*ROOT.glob("*.py"), *(p for folder in folders for p in ROOT.glob(f"{folder}/*.py"))]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"__new__|object\.__setattr__", text), path
