"""The README and the pages: links lead somewhere, and the commands and flags that they name exist."""

import ast
import dataclasses
import re
import sys

import pytest
from conftest import ROOT, command

import train
from positional_encodings import ENCODINGS, settings_class
from settings import InputError

PAGES = [ROOT / "README.md", ROOT / "learn" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = [ROOT / "studies" / "README.md"]


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def read_help(script):
    """What a script's --help says, with all encodings' own flags and what --cache adds; None without its package."""
    fields = [field for pe in ENCODINGS for field in dataclasses.fields(settings_class(pe))] * (script == "train.py")
    try:
        said = command(script, *["--cache"] * (script == "generate.py"), "--help", cwd=ROOT).stdout
    except (ModuleNotFoundError, InputError, SystemExit):               # of a module without lm_eval or datatrove
        assert script in ("lab.harness", "engine.corpora")
        return None
    return " ".join([said, *(f"--{field.name.replace('_', '-')}" for field in fields)])


def test_commands_and_flags_that_the_pages_name_exist():
    helps, wrong = {}, []
    for page in PAGES:
        for module, words in re.findall(r"python (-m )?(?!-m)([^`\n#|]*)", page.read_text(encoding="utf-8")):
            script = words.split(maxsplit=1)[0]
            path = script.replace(".", "/") + ".py" if module else script
            if script in ("pytest", "pip", "venv", "-c"):               # whose flags are not ours
                continue
            if not (ROOT / path).exists():
                wrong.append(f"{page.name}: python {module}{words}: there is no such file")
                continue
            if script not in helps:
                helps[script] = read_help(script)
            wrong += [f"{page.name}: python {module}{words}: there is no {flag}"
                      for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]+", words)
                      if helps[script] is not None and flag not in helps[script]]
    assert not wrong, "\n".join(wrong)
    assert len(helps) > 8


def test_targets_that_the_readme_names_are_in_the_makefile():
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"^make ([a-z-]+)|; make ([a-z-]+)", PAGES[0].read_text(encoding="utf-8"), re.M))
    assert {target for pair in named for target in pair} - {""} <= known


def test_requirements_name_all_that_the_scripts_import():
    names = set()
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
    ours = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    required = re.findall(r"^([a-z-]+)==[\d.]+$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.M)
    assert "numpy" in names and names - {*sys.stdlib_module_names} - ours <= {*required}


def test_trainings_that_the_readme_names_have_right_values():
    """Each value is read by its rule; where data and runs are is looked at later."""
    found = re.findall(r"^python train\.py ([^#\n]*)", PAGES[0].read_text(encoding="utf-8"), re.M)
    for words in found:
        train.read_flags(words.replace("--resume", "").split())
    assert len(found) >= 3
