"""The README and the pages: short enough, true to the files they show, and no link that leads nowhere."""

import importlib.util
import re

import pytest
from conftest import ROOT, command

from config import ENCODINGS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONAL = {"studies.harness": "lm_eval", "engine.corpora": "datatrove"}     # what a script cannot say --help without
RESULTS = sorted((ROOT / "results").glob("**/*.md"))


def prose(text):
    """The sentences of a page, its code, tables, headings and links' addresses left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("|", "#")))
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        line = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
        yield from re.split(r"(?<=[.!?])[)*]*\s+(?=[A-Z`(*\"\[])", line)


def test_the_readme_is_read_in_one_sitting():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    assert text.index("theta * (n + j)") < text.index("## What you should see")


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_over_forty_words(page):
    for sentence in prose(page.read_text(encoding="utf-8")):
        assert len(sentence.split()) <= 40, sentence


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


def test_lines_that_a_diff_takes_away_or_keeps_are_the_code():
    page = (ROOT / "docs" / "change-the-model.md").read_text(encoding="utf-8")
    for block in re.findall(r"```diff\n(.*?)```", page, re.S):
        name, *lines = block.splitlines()
        source = (ROOT / name.removeprefix("--- ")).read_text(encoding="utf-8").splitlines()
        for line in lines:
            assert line[0] in "+." or line[1:] in source, line


def flags_of(script):
    """What a script's --help says, for every encoding and with all that --cache adds."""
    if script == "train.py":
        return "".join(command(script, "--pe", pe, "--help", cwd=ROOT).stdout for pe in ENCODINGS)
    more = ["--cache"] if script == "generate.py" else []
    return command(script, *more, "--help", cwd=ROOT).stdout


def test_commands_and_flags_that_the_pages_name_exist():
    known, wrong = {}, []
    for page in PAGES:
        for module, words in re.findall(r"python (-m )?(?!-m)([^`\n#|]*)", page.read_text(encoding="utf-8")):
            script, *_ = words.split(maxsplit=1)
            path = script.replace(".", "/") + ".py" if module else script
            if script in ("pytest", "pip", "venv", "-c", "lab/walk.py"):                # whose flags are not ours
                continue
            if (needed := OPTIONAL.get(script)) and importlib.util.find_spec(needed) is None:
                continue
            if not (ROOT / path).exists():
                wrong.append(f"{page.name}: python {module}{words}: there is no such file")
                continue
            if script not in known:
                known[script] = flags_of(script)
            for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]+", words):
                if flag not in known[script]:
                    wrong.append(f"{page.name}: python {module}{words}: there is no {flag}")
    assert not wrong, "\n".join(wrong)
    assert len(known) > 10


def test_files_functions_and_flags_in_the_text_exist():
    """In backquotes: paths, names of tests and functions with (), and flags, which some source file must have."""
    sources = "".join(path.read_text(encoding="utf-8") for folder in ("*.py", "*/*.py", "interop/expe_torch/*.py")
                      for path in ROOT.glob(folder))
    made = ("config.json", "meta.json", "checkpoint.safetensors", "log.jsonl", "tokenizer.json", "modeling_gpt.py",
            "tokenizer.tiktoken", "zoo/NAME.py")                         # what the commands write, and what you write
    elsewhere = ("--nproc_per_node", "--shutdown-timeout", "--tb")       # torchrun's and pytest's
    wrong = []
    for page in PAGES:
        for words in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)):
            for path in re.findall(r"[\w/]+\.(?:py|md|json|jsonl|tiktoken|safetensors)\b", words):
                if path not in made and not (ROOT / path).exists() and not list(ROOT.glob(f"*/{path}")):
                    wrong.append(f"{page.name}: {path}")
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", words):
                name = flag.strip("-").removeprefix("no-").replace("-", "_")
                if flag not in elsewhere and flag not in sources and not re.search(rf"\b{name}: ", sources):
                    wrong.append(f"{page.name}: {flag}")
            for function in re.findall(r"\btest_\w+(?=$|\W)(?!\.py)", words):
                if f"def {function}(" not in sources and not (ROOT / "tests" / f"{function}.py").exists():
                    wrong.append(f"{page.name}: {function}")
    assert not wrong, "\n".join(wrong)
