"""learn/expe_in_60_lines.ipynb: all of it runs, here with few steps; .ci/run executes it whole."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, need

PATH = ROOT / "learn" / "expe_in_60_lines.ipynb"
CELLS = [(cell["cell_type"], "".join(cell["source"]), cell.get("outputs")) for cell in
         json.loads(PATH.read_text(encoding="utf-8"))["cells"]]
CODE = [source for kind, source, _ in CELLS if kind == "code"]


def test_every_cell_is_announced_and_has_no_output():
    kinds = [kind for kind, *_ in CELLS]
    assert kinds.count("code") == 15 and not any(outputs for *_, outputs in CELLS)
    assert all(kinds[i - 1] == "markdown" for i, kind in enumerate(kinds) if kind == "code")
    assert sum("**Predict.**" in source for _, source, _ in CELLS) == 3


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    nbclient, nbformat = need("nbclient"), need("nbformat")
    need("ipykernel")
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    notebook = nbformat.read(PATH, 4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    ordered, shuffled, ordered_expe, shuffled_expe = re.findall(r"^(?:in order|shuffled): (.*)$", printed, re.M)
    assert ordered == shuffled and ordered_expe != shuffled_expe
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5


def test_without_a_clone_the_first_cell_makes_one_at_the_public_address(tmp_path):
    program = re.sub(r'"https://[^"]*"', repr(str(ROOT)), CODE[0]) + "\nimport expe\nprint(expe.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    assert done.stdout.split() == [str(tmp_path / "repository"), str(tmp_path / "repository" / "expe.py")], done.stderr
    address = re.findall(r"^repository-code: \"?([^\"\s]+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert re.findall(r'"(https://[^"]*)"', CODE[0]) == (address or ["https://github.com/OWNER/REPOSITORY"])
