"""The README and the pages: short enough, true to the files they show, and no link that leads nowhere."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text):
    """The sentences of a page, its code, tables, headings and links' addresses left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("|", "#")))
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        line = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
        yield from re.split(r"(?<=[.!?])[)*]*\s+(?=[A-Z`(*\"\[])", line)


def test_the_readme_is_read_in_one_sitting():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 200 and len(text.split()) <= 2200
    assert text.index("theta * (n + j)") < text.index("## What you should see")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "RESULTS.md"], ids=lambda page: page.name)
def test_no_sentence_is_over_forty_words(page):
    for sentence in prose(page.read_text(encoding="utf-8")):
        assert len(sentence.split()) <= 40, sentence


def test_the_line_counts_of_the_reading_order_are_the_files():
    rows = re.findall(r"^\| \[(\w+\.py)\].*\| (\d+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) == len(list(ROOT.glob("*.py")))
    for name, count in rows:
        assert int(count) == len((ROOT / name).read_text(encoding="utf-8").splitlines()), name


def test_code_that_is_shown_is_the_code():
    squeezed = lambda text: re.sub(r"\s+", " ", text)  # noqa: E731  (indentation and blank lines may differ)
    files = [*ROOT.glob("*.py"), *ROOT.glob("zoo/*.py"), *ROOT.glob("lab/*.py")]
    sources = squeezed("".join(path.read_text(encoding="utf-8") for path in files))
    shown = 0
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for piece in re.split(r"\n\s*\n(?=\S)", re.sub(r"^# .*\n", "", block)):
                code = squeezed(re.sub(r"  # h \(B, T, C\), table.*|  # equation \d", "", piece)).strip()
                assert code in squeezed(re.sub(r" # h \(B, T, C\), table \(T, l\)| # equation \d", "", sources)), piece
                shown += 1
    assert shown > 10


@pytest.mark.parametrize("script", ["train.py", "eval.py", "generate.py", "data.py", "export.py"])
def test_flags_that_the_pages_name_exist(script):
    known = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True).stdout
    for page in PAGES:
        blocks = "".join(re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
        for line in re.findall(rf"python {script}[^\n#]*", blocks):
            for flag in re.findall(r"--[a-z][a-z-]+", line):
                assert flag in known, (page.name, line)
