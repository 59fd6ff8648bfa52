"""The tour's page: every number and text of it, and nothing that a model writes is taken for HTML."""

import html.parser
import os
import subprocess
import sys

import pytest
from conftest import ROOT, command, refused

from lab import demo


class Page(html.parser.HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_the_page_has_every_loss_and_text_and_is_safe_from_them():
    rows = [{"run": str(demo.FOLDER / run), "length": length, "loss": i + length / 1000}
            for i, run in enumerate(demo.RUNS) for length in (128, 2048)]
    page = Page(demo.page(rows, dict.fromkeys(demo.RUNS, "</pre><script>alert(1)</script>"), 7))
    for row in rows:
        assert f"{row['loss']:.3f}" in page.text
    assert page.text.count("<script>alert(1)</script>") == len(demo.RUNS)
    assert "script" not in [tag for tag, _ in page.tags] and "7 steps each" in page.text
    assert {a["src"] for tag, a in page.tags if tag == "img"} == {"loss.png", "training.png"}


@pytest.mark.slow
def test_the_tour_is_made_in_one_go_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DOCUMENTS", 1)
    for _ in range(2):
        done = command("lab.demo", "--steps", "2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("open runs/demo/index.html")
    page = Page((tmp_path / "runs/demo/index.html").read_text())
    for tag, attributes in page.tags:
        assert tag != "img" or (tmp_path / "runs/demo" / attributes["src"]).read_bytes().startswith(b"\x89PNG")
    assert "is there, of 2 steps: give --steps 2" in refused(command("lab.demo", "--steps", "3", cwd=tmp_path))
    [line] = [line for _, line in demo.NEXT if "lab.measure" in line]
    line = f"{line.replace('python', sys.executable, 1)} --max-docs 2 --lengths 128,256"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "3 runs, " in done.stdout, done.stderr
