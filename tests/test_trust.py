"""Files that lie, and flags of every shape: one line that names what is wrong, nothing changed, nothing waited for."""

import fcntl
import io
import json
import os
import re
import shutil
import string
import struct
import subprocess
import sys
import termios

import cli
import files
import numpy as np
import pytest
import safetensors.numpy
from conftest import ROOT, TINY, command, process, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

import data
import runs

EVAL = ("eval.py", "runs/expe", "--lengths", "16,32", "--max-docs", "2")
RESUME = ("train.py", "--out", "runs/expe", "--resume")


@pytest.fixture(scope="module")
def place(workplace, tokens, tmp_path_factory):
    """A folder with a run and its tokens, whose config.json names these."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(workplace / "runs" / "expe", folder / "runs" / "expe")
    shutil.copytree(tokens, folder / "tokens")
    record = files.read_json(folder / "runs" / "expe" / "config.json")
    record["data"]["folder"] = record["train"]["data"] = "tokens"
    files.write_json(folder / "runs" / "expe" / "config.json", record)
    return folder


@pytest.fixture
def damaged(place, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(place, tmp_path / "place")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- a table of faults: the file, what is done to it, the command, what it says --------------------------------------


def text(content):
    return lambda path: path.write_text(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path):
    """One bit in the middle of it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def some_lines(which):
    return lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[which]))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def loop(path):
    path.unlink()
    path.symlink_to(path)


def fields(**values):
    """Fields of a JSON file changed, `a__b` being field b of field a; left out where they are `...`."""

    def change(path):
        record = json.loads(path.read_text())
        for name, value in values.items():
            *outer, last = name.split("__")
            part = record
            for key in outer:
                part = part[key.replace("DOT", ".")]
            part.pop(last) if value is ... else part.update({last: value})
        path.write_text(json.dumps(record))

    return change


def believed(change, *outer):
    """A change of a run's file for which config.json vouches: with its new size and hash, at that place in it."""

    def vouched(path):
        change(path)
        record = json.loads((path.parent / "config.json").read_text())
        part = record
        for key in outer:
            part = part[key]
        part.update(files.fingerprint(path))
        (path.parent / "config.json").write_text(json.dumps(record))

    return vouched


def tensors(**values):
    """Tensors of a safetensors file changed, `a__b` being a.b; for which config.json vouches."""

    def change(path):
        found = safetensors.numpy.load_file(path)
        for name, value in values.items():
            name = name.replace("__", ".")
            found[name] = np.full_like(found[name], value) if np.isscalar(value) else value
        safetensors.numpy.save_file(found, path)

    return lambda path: believed(change, "checkpoint", "files", path.name)(path)


def tokenizer(change):
    """Lines of tokenizer.tiktoken changed; for which config.json vouches."""

    def changed(path):
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return believed(changed, "data", "tokenizer")


CONFIG, META, LOG = "runs/expe/config.json", "tokens/meta.json", "runs/expe/log.jsonl"
MODEL, OPTIMIZER = "runs/expe/model.safetensors", "runs/expe/optimizer.safetensors"
BPE, TRAIN, VAL = "runs/expe/tokenizer.tiktoken", "tokens/train.bin", "tokens/val.bin"

FAULTS = [
    *((CONFIG, damage, (EVAL, RESUME), words) for damage, words in (
        (text(""), "config.json is not valid JSON"),
        (cut, "config.json is not valid JSON"),
        (text("[" * 200_000), "config.json is not valid JSON"),
        (text("[]"), "config.json must be of type dict"),
        (pipe, "config.json is no regular file"),
        (folder, "config.json is no regular file"),
        (loop, "runs/expe holds no config.json"),
        (fields(model=...), "config.json lacks 'model'"),
        (fields(model=[1]), "model must be of type dict"),
        (fields(model__n_layers="4"), "n_layers must be a whole number"),
        (fields(model__n_layers=10**9), "n_layers must be a whole number from 1 to 10,000"),
        (fields(model__d_model=2**20), ""),  # too large a model, or not that of the weights
        (fields(model__n_heads=True), "n_heads must be a whole number"),
        (fields(model__colour=1), "unexpected keyword argument 'colour'"),
        (fields(model__encoding=3), "make_encoding lacks the field 'pe'"),
        (fields(model__encoding__pe="rotary"), "pe must be one of nope"),
        (fields(train__steps=-1), "steps must be a whole number"),
        (fields(train__lr=float("nan")), "lr must be a finite number"),
        (fields(data__folder=None), "folder must be of type str"),
        (fields(data__tokenizer__sha256=5), "sha256 must be of type str"),
        (fields(checkpoint__step="8"), "step must be of type int"),
        (fields(checkpoint__files={}), "lacks 'model.safetensors'"),
        (fields(checkpoint__files__other=True), "other must be of type dict"),
        (fields(train__beta1=10**400), "beta1 must be at least 0 and below 1"),
        (fields(checkpoint__seconds="x"), "seconds must be of type int | float"),
    )),
    (CONFIG, fields(model__context=10**12), (RESUME,), "GB of memory or more, and this machine has"),
    *((META, damage, (EVAL, RESUME), words) for damage, words in (
        (cut, "meta.json is not valid JSON"),
        (pipe, "meta.json is no regular file"),
        (fields(vocab="300"), "vocab must be of type int"),
        (fields(splits__val=...), "lacks 'val'"),
        (fields(splits__val__bytes=1.5), "bytes must be of type int"),
        (fields(dropped=0), "dropped must be of type dict"),
        (fields(near=[]), "meta.json: near must be of type dict"),
        (fields(near__val=["a.txt"]), "val must be of type dict"),
        (fields(near__test=...), "lacks 'test'"),
        (fields(eot=None), "eot must be of type int"),
    )),
    *((MODEL, damage, (EVAL, RESUME), words) for damage, words in (
        (flipped, "the right size and the wrong SHA-256 hash"),
        (cut, "model.safetensors has a size of"),
        (pipe, "model.safetensors is no regular file"),
        (tensors(norm__weight=np.nan), "norm.weight has numbers that are not finite"),
        (tensors(norm__bias=np.inf), "norm.bias has numbers that are not finite"),
        (tensors(norm__bias=np.zeros(3, np.float32)), "norm.bias has the shape and type ((3,)"),
        (tensors(norm__bias=np.zeros(128, np.float16)), "'float16')"),
    )),
    *((OPTIMIZER, damage, (RESUME,), words) for damage, words in (
        (tensors(**{"m__norm__weight": np.nan}), "m.norm.weight has numbers that are not finite"),
        (tensors(**{"v__norm__weight": np.zeros((128, 1), np.float32)}), "v.norm.weight has the shape and type"),
        (folder, "optimizer.safetensors is no regular file"),
    )),
    *((BPE, damage, (EVAL[:2] + ("--data", "book.txt", *EVAL[2:]), ("generate.py", "runs/expe")), words)
      for damage, words in (
        (flipped, "has not the size and hash that were recorded"),
        (tokenizer(lambda lines: lines[:-2] + lines[-1:]), "its ranks must be 0, 1, 2, ..."),
        (tokenizer(lambda lines: [*lines[:-1], "aGVsbG8= -1\n"]), "its ranks must be 0, 1, 2, ..."),
        (tokenizer(lambda lines: [*lines[:-1], f"aGVsbG8= {10**30}\n"]), "its ranks must be 0, 1, 2, ..."),
        (tokenizer(lambda lines: [*lines, "two words here\n"]), 'is not "base64 rank"'),
        (tokenizer(lambda lines: [*lines, lines[0]]), "its ranks must be 0, 1, 2, ..."),
        (tokenizer(lambda lines: [*lines, f"aGVsbG8= {len(lines)}\n"]), "with the vocab 300, and here it is 301"),
        (pipe, "tokenizer.tiktoken is no regular file"),
    )),
    (CONFIG, fields(data__pattern=""), (("generate.py", "runs/expe"),), "with the pattern ''"),
    (MODEL, tensors(norm__weight=3e38), (("generate.py", "runs/expe"),), "the model's logits are not finite numbers"),
    (VAL, flipped, (EVAL, RESUME), "val.bin has not the size and hash that meta.json says"),
    (VAL, pipe, (EVAL,), "val.bin is no regular file"),
    (TRAIN, flipped, (RESUME,), "train.bin has not the size and hash that meta.json says"),
    *((LOG, damage, (RESUME,), words) for damage, words in (
        (text(""), "log.jsonl has not the loss of each of the 8 steps"),
        (some_lines(slice(0, 5)), "log.jsonl has not the loss of each of the 8 steps"),
        (some_lines(slice(3, None)), "log.jsonl has not the loss of each of the 8 steps"),
        (text('{"step": true, "loss": 1}\n'), "holds a line that train.py did not write"),
        (text('{"step": 1, "loss": "x"}\n'), "holds a line that train.py did not write"),
        (text('{"step": null}\n'), "holds a line that train.py did not write"),
        (text("[" * 200_000 + "\n"), "holds a line that train.py did not write"),
        (pipe, "log.jsonl is no regular file"),
    )),
]  # fmt: skip
CASES = [(file, damage, line, words) for file, damage, lines, words in FAULTS for line in lines]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][2][0]}-{i}")
def test_a_fault_is_named_in_one_line_and_nothing_is_changed(damaged, books, number):
    file, damage, line, words = CASES[number]
    shutil.copyfile(next(books.iterdir()), damaged / "book.txt")
    damage(damaged / file)
    before = contents(damaged)
    said = refused(command(*line, cwd=damaged))
    assert words in said
    assert contents(damaged) == before


# ---- fuzzing, by seeds of hypothesis' own ----------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**18, -(10**18), 1e308, "", "../../x", "\x1b[2J", 2**31, -1, 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
BOUND = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


def places(value, path=()):
    """The way to every part of a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value, path, new):
    """The value with another one at that place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def well_answered(done):
    """A command did what it was asked, or refused it in one line."""
    if done.returncode != 0:
        refused(done)


def fuzz_json(folder, file, lines, examples):
    whole = files.read_json(folder / file)

    @settings(max_examples=examples, **BOUND)
    @given(st.sampled_from(list(places(whole))), ANYTHING)
    def change_one_place(path, new):
        (folder / file).write_text(json.dumps(replaced(whole, path, new)))
        for line in lines:
            well_answered(command(*line, cwd=folder))

    change_one_place()


def fuzz_flags(folder, script, before, after, examples):
    """Every flag that a script's --help names, two at a time, each with a value of any shape (but no path)."""
    explained = command(script, "--help", cwd=folder).stdout
    known = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)(, --no-[a-z-]+)?( [A-Z{]\S*)?", explained, re.M)
    known = [(flag, bool(value)) for flag, _, value in known if flag != "--help"]
    assert len(known) > 5
    shapes = st.one_of(
        st.text(string.printable.replace("/", ""), max_size=6), st.integers().map(str), st.floats().map(str),
        st.sampled_from(["", "0", "-1", "1e18", "1/0", "nan", "inf", "a,b", "1,2", ",", "--", "\x1b[2J", "\udcff"]),
    )  # fmt: skip

    @settings(max_examples=examples, **BOUND)
    @given(st.lists(st.tuples(st.sampled_from(known), shapes), min_size=1, max_size=2))
    def give(chosen):
        flags = [f"{flag}={value}" if takes_value else flag for (flag, takes_value), value in chosen]
        well_answered(command(script, *before, *flags, *after, cwd=folder))

    give()


SCRIPTS = {  # what stands before the flags, and after them: there it bounds the work
    "train.py": (("--data", "nowhere"), ()),
    "eval.py": (("runs/expe",), ("--max-docs", "1")),
    "generate.py": (("runs/expe",), ("--tokens", "2")),
    "data.py": (("book.txt",), ()),
    "lab.bench": ((), ("--repeats", "0")),
}
READERS = [(CONFIG, (EVAL, RESUME)), (META, (EVAL, RESUME, ("data.py", "--show", "tokens")))]


@pytest.mark.parametrize("file, lines", READERS, ids=["config.json", "meta.json"])
def test_any_value_at_any_place_of_a_json_file(damaged, file, lines):
    fuzz_json(damaged, file, lines, 60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_any_value_of_any_flag(damaged, books, script):
    shutil.copyfile(next(books.iterdir()), damaged / "book.txt")
    fuzz_flags(damaged, script, *SCRIPTS[script], 60)


@pytest.mark.slow
def test_the_same_for_ten_minutes(place, tmp_path, books):
    for file, lines in READERS:
        fuzz_json(shutil.copytree(place, tmp_path / file.replace("/", "-")), file, lines, 900)
    shutil.copyfile(next(books.iterdir()), place / "book.txt")
    for script, line in SCRIPTS.items():
        fuzz_flags(place, script, *line, 600)


# ---- what a terminal gets, who reads, and who else is at work --------------------------------------------------------


def start(*arguments, cwd, **how):
    """`python SCRIPT ...` in a process of its own."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    return subprocess.Popen([sys.executable, ROOT / arguments[0], *map(str, arguments[1:])], cwd=cwd, **how)


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all():
    text, ours, theirs = "a\x1b[2J\x07\x9b1mb\tc\r\n", *os.openpty()
    with open(theirs, "w", newline="") as terminal:
        cli.Output(terminal).write(text)
    assert os.read(ours, 100) == b"a[2J1mb\tc\r\n"  # of "\r\n" the terminal itself makes the "\r"
    pipe = io.StringIO()
    cli.Output(pipe).write(text)
    assert pipe.getvalue() == text


def test_a_last_line_is_written_over_what_a_bar_and_a_ctrl_c_have_left_there(monkeypatch):
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "stderr", terminal)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        bar = tqdm(total=10, file=terminal, dynamic_ncols=True, bar_format=BAR)
        with cli.CommandLine(prog="a.py").one_line_errors():
            raise KeyboardInterrupt
    drawn, last = os.read(ours, 1000).decode().split("\r\x1b[K")
    visible, back = drawn.strip("\r").split("\x1b[", 1)
    assert len(visible) <= 80 and visible.endswith("it/s]   ") and back.startswith("3D") and last == "a.py: stopped\r\n"
    bar.close()


def test_an_error_names_a_file_without_its_control_characters(tmp_path):
    line = refused(process("eval.py", "no\x1b[2Jsuch", cwd=tmp_path))
    assert "no[2Jsuch: no such run directory" in line


TRAIN = ("train.py", "--pe", "rope", *TINY, "--data", "tokens", "--steps", "30", "--out", "runs/new")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_training_goes_on_when_no_one_reads_what_it_says(place, tmp_path, closed):
    shutil.copytree(place / "tokens", tmp_path / "tokens")
    process = start(*TRAIN, cwd=tmp_path)
    getattr(process, closed).close()  # before a word was written
    process.wait(timeout=120)
    assert process.returncode == 0
    assert runs.read_run(tmp_path / "runs" / "new")[2]["checkpoint"]["step"] == 30


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_scripts_start_with_a_closed_stream(damaged, descriptor):
    program = f"import os, sys; os.close({descriptor}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    line = [ROOT / EVAL[0], *EVAL[1:], "--json", "rows.json"]
    done = subprocess.run([sys.executable, "-c", program, *line], cwd=damaged, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len(files.read_json(damaged / "rows.json", [dict])) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it stands for a full disk")
def test_results_are_written_though_standard_output_is_full(damaged):
    with open("/dev/full", "w") as full:
        process = start(*EVAL, "--json", "rows.json", cwd=damaged, stdout=full)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and said == "eval.py: error: standard output: No space left on device\n"
    assert len(files.read_json(damaged / "rows.json", [dict])) == 2


def test_a_stream_ends_when_its_reader_has_gone(damaged):
    process = start("generate.py", "runs/expe", "--stream", cwd=damaged)
    assert process.stdout.read(5)
    process.stdout.close()
    process.wait(timeout=60)
    assert process.returncode == 0 and "Traceback" not in process.stderr.read()


def test_text_outside_an_ascii_locale_is_printed_somehow(damaged):
    (damaged / "p.txt").write_text("naïve café", encoding="utf-8")
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = process("generate.py", "runs/expe", "--prompt-file", "p.txt", "--tokens", "3", cwd=damaged, **environment)
    assert done.returncode == 0 and "na?ve caf?" in done.stdout


@pytest.mark.parametrize("second", [
    ("--out", "runs/expe", "--resume"), (*TINY, "--data", "tokens", "--out", "runs/expe", "--overwrite"),
], ids=["--resume", "--overwrite"])  # fmt: skip
def test_a_run_that_is_being_trained_is_left_alone(damaged, second):
    before = contents(damaged)
    with files.lock(damaged / "runs" / "expe"):
        line = refused(process("train.py", *second, cwd=damaged))
    who = f"process {os.getpid()}" if sys.platform.startswith("linux") else "another process"
    assert f"runs/expe is in use by {who}: wait for its end" in line
    assert contents(damaged) == before


@pytest.mark.parametrize("where", [("runs/expe", "."), ("runs/expe", "../expe"), ("runs/expe/deep", "..")], ids=str)
def test_the_folder_that_one_is_in_is_not_overwritten(damaged, where):
    here, out = where
    (damaged / here).mkdir(exist_ok=True)
    before = contents(damaged)
    line = refused(command("train.py", *TINY, "--data", damaged / "tokens", "--out", out, "--overwrite",
                           cwd=damaged / here))  # fmt: skip
    assert "so it is not overwritten" in line and contents(damaged) == before


@pytest.mark.parametrize("script", ["train.py", "data.py"])
def test_a_folder_that_holds_anything_else_is_not_overwritten(damaged, script):
    out = {"train.py": "runs/expe", "data.py": "tokens"}[script]
    (damaged / out / "thesis.txt").write_text("years of work")
    before = contents(damaged)
    line = {"train.py": (*TINY, "--data", "tokens"), "data.py": (f"{out}/thesis.txt", "--vocab", "300")}[script]
    said = refused(command(script, *line, "--out", out, "--overwrite", cwd=damaged))
    assert f"{out} exists and holds thesis.txt, so it is not overwritten" in said and contents(damaged) == before


def test_a_size_that_is_refused_leaves_no_run(damaged):
    for flags in (("--width", 2**20), ("--batch-size", 2**20, "--micro-batch", 2**20)):
        line = refused(command("train.py", *TINY, "--data", "tokens", "--out", "runs/new", *flags, cwd=damaged))
        assert "GB of memory or more, and this machine has" in line
        assert os.listdir(damaged / "runs") == ["expe"]


def test_a_line_of_jsonl_without_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n{"text": "' + "x" * 1000 + '"}\n')
    assert "a.jsonl line 2 is longer than 1,000 bytes" in refused(command("data.py", "a.jsonl", cwd=tmp_path))


def test_a_broken_parquet_file_is_one_line(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    assert "bad.parquet cannot be read" in refused(process("data.py", "bad.parquet", cwd=tmp_path))
