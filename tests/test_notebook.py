"""learn/expe_in_60_lines.ipynb: its saved outputs, and all of it with few steps; .ci/run executes it whole.

To save the outputs of another version: .venv/bin/jupyter-execute --inplace learn/expe_in_60_lines.ipynb
"""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, need

PATH = ROOT / "learn" / "expe_in_60_lines.ipynb"
CELLS = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
SOURCES = [(cell["cell_type"], "".join(cell["source"])) for cell in CELLS]
CODE = [source for kind, source in SOURCES if kind == "code"]
TEXT = [source for kind, source in SOURCES if kind == "markdown"]
IMAGES = 8


def read_outputs(cells):
    """All that the cells printed, and how many pictures they show."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr" or output["output_type"] == "error"]
    images = sum("image/png" in output.get("data", {}) for output in outputs)
    return "".join("".join(output.get("text", "")) for output in outputs), images


def test_every_cell_is_announced_and_predictions_stand_apart_before_a_title():
    for i, (kind, source) in enumerate(SOURCES):
        assert kind == "markdown" or SOURCES[i - 1][0] == "markdown", source
        if "**Predict" in source:
            assert source.startswith("**Predict") and "\n#" not in source and SOURCES[i + 1][1].startswith("## ")
    assert re.findall(r"\*\*Predict \((\d) of 4\)", "".join(TEXT)) == ["1", "2", "3", "4"]


def test_the_outputs_are_saved_and_small():
    assert [cell["execution_count"] for cell in CELLS if cell["cell_type"] == "code"] == list(range(1, len(CODE) + 1))
    printed, images = read_outputs(CELLS)
    assert images == IMAGES and PATH.stat().st_size < 300_000
    assert not re.search(r"(^|\s)(/|[A-Z]:\\)\w", printed)              # no path of the machine that saved them


def test_the_text_states_no_number_that_was_measured():
    printed = read_outputs(CELLS)[0]
    measured = set(re.findall(r"\d+\.\d\d+|\d+%", printed))
    assert len(measured) > 50
    for source in TEXT:
        assert not measured & set(re.findall(r"\d+\.\d\d+|\d+%", source)), source


def test_the_model_and_its_training_are_about_60_lines():
    lines = 0
    for source in CODE:
        for node in ast.parse(source).body:
            if getattr(node, "name", "") in ("Attention", "GPT", "fit"):
                for part in ast.walk(node):
                    if isinstance(part, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(part):
                        part.body = part.body[1:]
                        lines -= 1
                lines += sum(bool(line.strip()) for line in ast.get_source_segment(source, node).splitlines())
    assert 57 <= lines <= 63


def check_sentences(printed):
    """Recompute from the printed losses what the printed sentences say about them; the losses by name."""
    losses = {name: [float(loss) for loss in row.split()]
              for name, row in re.findall(r"^(\S[^\n]*?)((?: +\d+\.\d{3}){5})$", printed, re.M)}
    assert {"ExPE", "RoPE", "ExPE x256", "ExPE-K", "ExPE-K x256"} < set(losses)
    rounding = 0.0011
    verdicts = re.findall(r"^(.+) (is flat|rises|falls): its loss changes by (\S+) from", printed, re.M)
    assert len(verdicts) == 6                                                     # ExPE has two
    for name, verb, change in verdicts:
        rise = losses[name][-1] - losses[name][0]
        assert float(change) == pytest.approx(rise, abs=rounding)
        if abs(abs(rise) - 0.02) > rounding:
            assert verb == ("is flat" if abs(rise) < 0.02 else "rises" if rise > 0 else "falls"), name
    flat = {name: verb == "is flat" for name, verb, _ in verdicts}
    answers = dict(re.findall(r"^(Keys only|256 times theta|Both): ExPE's curve (.*) flat\.$", printed, re.M))
    expected = zip(("Keys only", "256 times theta", "Both"), ("ExPE-K", "ExPE x256", "ExPE-K x256"), strict=True)
    assert answers == ({} if flat["ExPE"] else
                       {change: "becomes" if flat[name] else "does not become" for change, name in expected})
    for name in ("RoPE", "ExPE"):
        for rise, left, share in re.findall(rf"^{name}, far keys hidden: of its rise of (\S+), (\S+) is left \((.*)%\)",
                                            printed, re.M):
            first, last = losses[name][0], losses[f"{name} (far keys hidden)"][-1]
            assert float(rise) == pytest.approx(losses[name][-1] - first, abs=rounding)
            assert float(left) == pytest.approx(last - first, abs=rounding)
            assert float(share) == pytest.approx(100 * (last - first) / float(rise), abs=0.5 + 200 * rounding)
    pairs = re.findall(r"(\S+) -> (\S+)   (\S+) (small|lower|higher)$", printed, re.M)
    assert len(pairs) == 4
    for before, after, difference, word in pairs:
        assert float(difference) == pytest.approx(float(after) - float(before), abs=rounding)
        if abs(abs(float(difference)) - 0.05) > rounding:
            assert word == ("small" if abs(float(difference)) < 0.05 else "lower" if after < before else "higher")
    return losses


def test_the_saved_sentences_follow_from_the_saved_numbers():
    check_sentences(read_outputs(CELLS)[0])


@pytest.mark.slow
def test_the_notebook_runs_and_its_sentences_follow_other_numbers(monkeypatch):
    nbclient, nbformat = need("nbclient"), need("nbformat")
    need("ipykernel")
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    notebook = nbformat.read(PATH, 4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    printed, images = read_outputs(notebook.cells)
    ordered, shuffled, ordered_expe, shuffled_expe = re.findall(r"^(?:in order|shuffled): (.*)$", printed, re.M)
    assert ordered == shuffled and ordered_expe != shuffled_expe
    assert images == IMAGES
    assert all(loss > 4 for row in check_sentences(printed).values() for loss in row)     # hardly trained


def run_first_cell(folder):
    program = CODE[0] + "\nimport expe\nprint(expe.__file__)"
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})


def test_the_first_cell_finds_the_repository_above_it_and_in_a_folder_below_it(tmp_path):
    assert run_first_cell(PATH.parent).stdout.split()[-1] == str(ROOT / "expe.py")
    (tmp_path / "cloned").mkdir()
    (tmp_path / "cloned" / "expe.py").write_text("")
    assert run_first_cell(tmp_path).stdout.split()[-1] == str(tmp_path / "cloned" / "expe.py")


def test_without_the_repository_the_first_cell_says_what_to_do(tmp_path):
    done = run_first_cell(tmp_path)
    assert done.returncode == 1
    assert re.search(r"FileNotFoundError: no expe\.py in .* on Colab, first run !git clone", done.stderr)


def test_no_address_of_the_repository_is_made_up_and_links_lead_somewhere():
    assert not re.search(r"https?://|OWNER", "".join(source for _, source in SOURCES))
    links = re.findall(r"\]\(([^)]+)\)", "".join(TEXT))
    assert len(links) == 3
    for link in links:
        path, _, anchor = link.partition("#")
        page = (PATH.parent / path).read_text(encoding="utf-8")
        headings = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in
                    re.findall(r"^#+ (.*)$", page, re.M)]
        assert not anchor or anchor in headings, link
