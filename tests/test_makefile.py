"""make setup and make train, without a download."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(not (os.name == "posix" and shutil.which("make")), reason="this test needs make")


def make(*words, cwd=ROOT, **environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}     # not of make test
    done = subprocess.run(["make", *words], cwd=cwd, text=True, capture_output=True, env=own | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words, trains, scores", [
    (["STEPS=200"], ["--pe expe --l 24 --steps 200 --out runs/expe-steps-200"], "runs/expe-steps-200"),
    (["PE=fox expe-on-k"], ["--pe fox --out runs/fox", "--pe expe --l 24 --on k --out runs/expe-on-k"],
     "runs/fox runs/expe-on-k"),
    (["PE=fox rope", "STEPS=9", "JOBS=1"],
     ["--pe fox --steps 9 --out runs/fox-steps-9", "--pe rope --steps 9 --out runs/rope-steps-9"],
     "runs/fox-steps-9 runs/rope-steps-9")])
def test_train_with_steps_makes_runs_of_its_own(words, trains, scores, tmp_path):
    """A run that exists is resumed; bars are off where several runs share the terminal."""
    (tmp_path / ".venv").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "runs/rope-steps-9").mkdir(parents=True)
    (tmp_path / "runs/rope-steps-9/config.json").touch()
    lines = " ".join(make("-n", "-o", ".venv/installed", "train", *words, cwd=tmp_path).replace("\\\n", "").split())
    lines = lines.replace("'", "")                                      # of what make quotes for the shell
    found = re.findall(r"train\.py --preset mini (.*?)(?= \.venv| make|$)", lines)
    assert [line.removesuffix(" --resume") for line in found] == trains
    assert [line.endswith("--resume") for line in found] == ["rope-steps-9" in line for line in trains]
    assert f"eval.py {scores} --plot" in lines
    assert ("TQDM_DISABLE=1" in lines) == (len(trains) > 1 and "JOBS=1" not in words)


@pytest.mark.slow
def test_setup_says_what_it_does_and_makes_the_instruments_be_found_from_any_folder(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for name in ("Makefile", "lab", *(path.name for path in ROOT.glob("requirements*.txt"))):
        (project / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    said = make("setup", "PIP=echo installing", cwd=project, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    lines = said.splitlines()
    sentences = [line for line in lines if not line.startswith("installing")]
    assert sentences[0].startswith("Creating .venv") and any("minutes" in line for line in sentences)
    [fineweb] = [line for line in lines if line.startswith("installing datatrove")]
    assert re.findall(r"(\w+)==", fineweb) == ["datatrove", "orjson", "pyarrow", "tokenizers"]
    assert ".venv is ready. Next: make train" in said
    find = "import importlib.util; print(importlib.util.find_spec('lab.measure').origin)"
    found = subprocess.run([project / ".venv/bin/python", "-c", find], cwd=tmp_path, text=True, capture_output=True)
    assert found.stdout.strip().endswith("lab/measure.py"), found.stderr
    again = make("setup", "PIP=false", cwd=project)
    assert again.startswith(".venv is ready")
