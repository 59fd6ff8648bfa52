"""The wall: the reference imports nothing from a folder and works without them; no imports form a circle."""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

REFERENCE = {"expe", "config", "data", "model_numpy", "model_torch", "train", "runs", "cli", "files", "fast"}
GATES = {"eval", "export", "generate"}  # short scripts at the top that may reach behind the wall
PART = {"expe_torch"}  # for other people's models: it stands alone
ALONE = {"conform"}  # at the top to be copied away: it imports nothing of the repository, and nothing imports it
FOLDERS = {"past", "zoo", "lab", "hand"}


@functools.cache
def modules():
    """{module: its file} of the repository; tests are imported by their own names."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), *(path for f in FOLDERS for path in ROOT.glob(f"{f}/*.py"))]
    return {path.stem if path.parent.name not in FOLDERS else f"{path.parent.name}.{path.stem}": path for path in files}


@functools.cache
def imports(module):
    """Which modules or folders of the repository a module imports, anywhere in its text: in functions too.

    (config.py reads zoo/ by its files' names, which are not written in it.)
    """
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.rpartition(".")[0] if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in modules() or name in FOLDERS}


def circles(graph):
    """The paths a -> b -> ... -> a that a walk along the edges of {module: modules} comes upon, if there are any."""
    done, found = set(), []

    def walk(module, path):
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                walk(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def test_what_stands_at_the_top_is_the_reference_and_its_gates():
    assert {path.stem for path in ROOT.glob("*.py")} == REFERENCE | GATES | PART | ALONE
    assert {path.parent.name for path in ROOT.glob("[a-z]*/*.py")} - FOLDERS == {"tests"}


@pytest.mark.parametrize("module", sorted(REFERENCE))
def test_the_reference_imports_nothing_from_behind_the_wall(module):
    assert imports(module) <= REFERENCE


def test_what_stands_alone_imports_nothing_and_is_imported_by_tests_only():
    assert not any(imports(module) for module in ALONE)
    assert {module for module in modules() if imports(module) & ALONE} <= {f"test_{module}" for module in ALONE}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_behind_the_wall_stands_on_the_reference(folder):
    """zoo/ on the reference alone; past/ and hand/ on it and themselves; lab/ may measure all of them."""
    allowed = {"zoo": REFERENCE, "past": {*REFERENCE, "past"}, "hand": {*REFERENCE, "hand"},
               "lab": {*REFERENCE, *GATES, *PART, *FOLDERS}}[folder]
    for module in modules():
        if module.startswith(f"{folder}."):
            assert {name.split(".")[0] for name in imports(module)} <= allowed, module


def test_the_part_that_others_drop_in_needs_nothing_of_ours():
    assert all(imports(module) == set() for module in PART)


def test_no_imports_form_a_circle():
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b -> c -> d -> b"]
    assert imports("train") >= {"config", "runs", "model_torch", "fast"}  # the last two within functions
    assert circles({module: imports(module) for module in modules()}) == []


def test_torch_is_loaded_by_none_who_read_the_tables_and_the_numpy_model():
    program = (
        "import sys, config, expe, model_numpy\n"
        "for pe in config.ENCODINGS: model_numpy.doors_of(config.EncodingConfig(pe))\n"
        "print(sorted({'torch', 'safetensors', 'tiktoken'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_the_reference_alone_trains(backend, books, tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    flags = ["--preset", "mini", "--context", "16", "--batch-size", "4", "--vocab", "300", "--steps", "3"]
    flags += ["--backend", backend, "--data", books, "--min-doc-tokens", "1", "--out", "run"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=tmp_path, capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["checkpoint"]["step"] == 3
