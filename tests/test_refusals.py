"""What no script may read or write: other dtypes, numbers that are not finite, settings that flags refuse, folders in
the place of files. Each is refused in one line, by every script that reads it; a bug keeps its traceback."""

import ast
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
import safetensors.numpy
from conftest import ROOT, TINY, command, process, refused

import model_numpy
import model_torch
import positional_encodings
import settings
from files import hash_file
from runs import CHECKPOINT, read_checkpoint, read_run, save_checkpoint

READERS = {                              # a run's readers, but for lab.harness, which tests/test_harness.py has
    "eval": ["eval.py", "RUN", "--json", "x.json"],
    "measure": ["lab.measure", "RUN", "--json", "x.json"],
    "attention": ["lab.attention", "RUN", "--out", "x.png"],
    "generate": ["generate.py", "RUN", "--temperature", "0", "--tokens", "3"],
    "generate --cache": ["generate.py", "RUN", "--temperature", "0", "--tokens", "3", "--cache"],
    "generate --prompts": ["generate.py", "RUN", "--temperature", "0", "--tokens", "3", "--cache", "--prompts", "two"],
    "export": ["interop.export", "RUN", "--to", "transformers", "x"],
    "explorer": ["web.explorer", "RUN", "--out", "x.html"],
    "--init-from": ["train.py", *TINY, "--data", "TOKENS", "--steps", "2", "--out", "x", "--init-from", "RUN"],
    "--resume": ["train.py", "--resume", "--steps", "9", "--out", "RUN"],
}


@pytest.fixture
def desk(workplace, tokens, tmp_path):
    """A folder with a copy of a run, and a function that gives a reader's command on it."""
    shutil.copytree(workplace / "runs/rope", tmp_path / "broken")
    (tmp_path / "two").write_text("im\nport\n")

    def read(reader):
        words = {"RUN": "broken", "TOKENS": tokens}
        return command(*(words.get(word, word) for word in READERS[reader]), cwd=tmp_path)

    return tmp_path, read


def change_weights(run, edit):
    """Write {name: edit(name, array)} in the place of a run's checkpoint."""
    tensors, info = read_checkpoint(run)
    made = {name: edit(name, x) for name, x in tensors.items()}
    (run / CHECKPOINT).write_bytes(safetensors.numpy.save(made, {name: str(x) for name, x in info.items()}))


def change_settings(run, path, value):
    """Set A.B.C of a run's config.json."""
    record = json.loads((run / "config.json").read_text())
    *parents, name = path.split(".")
    inner = record
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    (run / "config.json").write_text(json.dumps(record))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["eval", "--init-from", "--resume"])
def test_no_reader_takes_weights_of_another_dtype(reader, desk):
    folder, read = desk
    change_weights(folder / "broken", lambda name, x: x.astype(np.int64) if name == "norm.weight" else x)
    line = refused(read(reader))
    assert f"broken/{CHECKPOINT} is not of the model in config.json: norm.weight is of dtype I64" in line


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "float64"])
def test_every_other_dtype_is_refused(dtype, desk):
    folder, _ = desk
    change_weights(folder / "broken", lambda name, x: x.astype(dtype))
    for names in (None, ()):                                            # also where the step alone is read
        with pytest.raises(settings.InputError, match="is of dtype [A-Z0-9]+, and not F32, so one of them was edited"):
            read_checkpoint(folder / "broken", names)


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_weights_that_are_not_finite(reader, desk):
    folder, read = desk
    change_weights(folder / "broken", lambda name, x: x * np.float32(np.nan if name == "norm.bias" else 1))
    line = refused(read(reader))
    assert "broken has weights that are NaN or infinite, first norm.bias: its training diverged" in line
    assert not [*folder.glob("x*")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_losses_or_logits_that_are_not_finite(reader, desk):
    """The weights are finite, and so large that what is computed of them is not."""
    folder, read = desk
    change_weights(folder / "broken", lambda name, x: x * np.float32(1e37) if "norm" in name else x)
    done = read(reader)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and ": error: " in line and "Traceback" not in done.stderr, done.stderr
    if reader.startswith("--"):
        assert "the loss is nan" in line
        assert (reader == "--resume") == ("try a lower --lr" in line)
        assert (reader == "--init-from") == ("are too large: change --init-from broken" in line)
    else:
        assert "broken: its " in line and "are not finite numbers: its weights are too large" in line
        assert not [*folder.glob("x*")]


def test_a_run_that_was_not_named_is_left_out(desk, workplace):
    folder, _ = desk
    shutil.copytree(workplace / "runs/rope", folder / "runs/right")
    shutil.move(folder / "broken", folder / "runs/broken")
    change_weights(folder / "runs/broken", lambda name, x: x * np.float32(1e37) if "norm" in name else x)
    for script in ("eval.py", "lab.measure"):
        done = command(script, "--json", "x.json", cwd=folder)
        assert done.returncode == 0 and "runs/broken is left out: its losses are not finite" in done.stderr, done.stderr
        assert {row["run"] for row in json.loads((folder / "x.json").read_text())} == {"runs/right"}


def test_accuracies_are_not_those_of_logits_that_are_not_finite(tmp_path):
    flags = "--preset mini --layers 1 --data task:needle --context 16 --batch-size 4 --steps 1 --out run".split()
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    change_weights(tmp_path / "run", lambda name, x: x * np.float32(1e37) if "norm" in name else x)
    for script in ("eval.py", "lab.measure"):
        assert "run: its logits are not finite numbers" in refused(command(script, "run", cwd=tmp_path))


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_weights_that_are_not_finite_are_not_saved(backend, tokens, tmp_path):
    """The loss of a step is that of the weights before it."""
    flags = [*TINY, "--data", tokens, "--backend", backend, "--lr", "1e38"]
    line = refused(command("train.py", *flags, "--steps", "1", "--out", "a", cwd=tmp_path))
    assert "the validation loss is nan after step 1: try a lower --lr than 1e+38" in line
    flags += ["--checkpoint-every", "1"]                                # before any validation loss
    line = refused(command("train.py", *flags, "--steps", "9", "--out", "b", cwd=tmp_path))
    assert re.search("after step 1 [a-z0-9.]+ has numbers that are NaN or infinite, so nothing is saved: try a", line)
    for run in "ab":
        assert not (tmp_path / run / CHECKPOINT).exists()
        assert "NaN" not in (tmp_path / run / "log.jsonl").read_text()


def test_the_old_checkpoint_stays_where_a_new_one_is_not_finite(workplace, tmp_path):
    run = shutil.copytree(workplace / "runs/rope", tmp_path / "run")
    before = (run / CHECKPOINT).read_bytes()
    tensors, _ = read_checkpoint(run)
    tensors["m.norm.bias"][0] = np.inf
    with pytest.raises(settings.InputError, match="after step 9 m.norm.bias has numbers"):
        save_checkpoint(run, tensors, 9)
    assert (run / CHECKPOINT).read_bytes() == before


@pytest.mark.slow
def test_several_processes_save_no_weights_that_are_not_finite(tokens, tmp_path, start_torchrun):
    flags = [*TINY, "--layers", "1", "--steps", "9", "--data", tokens, "--lr", "1e38", "--checkpoint-every", "1"]
    started = start_torchrun(2, *flags, "--out", "run", cwd=tmp_path)
    printed, _ = started.communicate(timeout=200)
    assert started.returncode and "numbers that are NaN or infinite, so nothing is saved" in printed, printed
    assert "[rank" not in printed                                       # of a traceback
    assert not (tmp_path / "run" / CHECKPOINT).exists()


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["eval", "generate", "--init-from", "--resume"])
@pytest.mark.parametrize("name", ["config.json", CHECKPOINT, "tokenizer.tiktoken", "log.jsonl"])
def test_a_folder_in_the_place_of_a_file_of_a_run(name, reader, desk):
    folder, read = desk
    (folder / "broken" / name).unlink()
    (folder / "broken" / name).mkdir()
    done = read(reader)
    if name != "log.jsonl" or reader == "--resume":
        assert name in refused(done)
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "tokenizer.tiktoken"])
def test_a_folder_in_the_place_of_a_file_of_tokens(name, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    (tmp_path / "tokens" / name).unlink()
    (tmp_path / "tokens" / name).mkdir()
    assert name in refused(command("train.py", *TINY, "--data", "tokens", "--steps", "1", cwd=tmp_path))


def test_an_odd_number_of_bytes_is_no_file_of_tokens(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    with open(tmp_path / "tokens/train.bin", "ab") as file:
        file.write(b"x")
    meta = json.loads((tmp_path / "tokens/meta.json").read_text())
    meta["splits"]["train"]["sha256"] = hash_file(tmp_path / "tokens/train.bin")
    (tmp_path / "tokens/meta.json").write_text(json.dumps(meta))
    line = refused(command("train.py", *TINY, "--data", "tokens", "--steps", "1", cwd=tmp_path))
    assert "train.bin has an odd number of bytes" in line


DEEP = "[" * 10**5 + "]" * 10**5


def test_what_is_nested_too_deep_is_refused(desk):
    folder, read = desk
    (folder / "deep.json").write_text(DEEP)
    head = 'title = "x"\npreset = "mini"\nseeds = [0]\n'
    (folder / "list.toml").write_text(f"{head}[runs]\na = {DEEP}\n")
    (folder / "runs.toml").write_text(f'{head}{"runs" + ".a" * 500} = "--pe expe"\n')
    (folder / "chosen.toml").write_text(f'{head}{"chosen" + ".a" * 5000} = 1\n[runs]\na = "--pe expe"\n')
    assert "deep.json is no file of results" in refused(command("lab.table", "deep.json", cwd=folder))
    for name in ("list", "runs", "chosen"):
        assert "nested too deep" in refused(command("lab.grid", f"{name}.toml", "--commands", cwd=folder))
    with open(folder / "broken/log.jsonl", "a") as log:
        log.write(f"{DEEP}\n")
    assert read("--resume").returncode == 0                             # as any damaged line, it is trained again
    assert "[[" not in (folder / "broken/log.jsonl").read_text()


@pytest.mark.parametrize("words", [
    ["train.py", "--out", "a\0b"], ["train.py", "--data", "a\0b"], ["train.py", "--init-from", "a\0b"],
    ["train.py", "--resume", "--out", "a\0b"], ["eval.py", "a\0b"], ["eval.py", "--data", "a\0b"],
    ["eval.py", "--json", "a\0b.json"], ["generate.py", "a\0b"], ["generate.py", "x", "--cache", "--prompts", "a\0b"],
    ["data.py", "a\0b"], ["data.py", "x", "--out", "a\0b"], ["lab.grid", "a\0b"], ["lab.table", "a\0b"]])
def test_a_nul_in_a_name_is_refused(words, tmp_path):
    assert "has a NUL character" in refused(command(*words, cwd=tmp_path))


# ---- bugs ------------------------------------------------------------------------------------------------------------


def test_a_bug_in_an_encodings_file_is_not_called_an_edited_config(workplace, monkeypatch):
    def fit(self, model):
        return None + model.context

    monkeypatch.setattr(positional_encodings.RoPE, "fit", fit)
    with pytest.raises(TypeError, match="unsupported operand"):
        command("eval.py", "runs/rope", cwd=workplace)


def test_a_weight_that_the_loss_does_not_read_is_named_at_the_first_step(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(model_torch.Shaw, "value", None)                # an edit that no longer reads shaw's values
    flags = [*TINY, "--pe", "shaw", "--data", tokens, "--steps", "1", "--out", "run"]
    line = refused(command("train.py", *flags, cwd=tmp_path))
    assert "the weight encoding.values has no gradient, since the loss does not depend on it" in line
    loss_and_grads = model_numpy.loss_and_grads

    def without_one(*arguments):
        loss, grads = loss_and_grads(*arguments)
        grads.pop("encoding.keys")
        return loss, grads

    monkeypatch.setattr(model_numpy, "loss_and_grads", without_one)
    line = refused(command("train.py", *flags, "--backend", "numpy", cwd=tmp_path))
    assert "the weight encoding.keys has no gradient" in line


# ---- config.json -----------------------------------------------------------------------------------------------------

EDITS = [
    ("model.encoding.theta", "0.5", "--theta must be a finite number"),
    ("model.encoding.theta", 1e308, "--theta 1e+308 cannot be"),
    ("model.encoding.theta", float("nan"), "config.json was cut short or edited: NaN is not a finite number"),
    ("model.encoding.l", 2**60, "--l must be"), ("model.encoding.lenght", 1, "lenght is no setting of ExPE"),
    ("model.context", 2**63, "--context must be a whole number"), ("model.norm_eps", 2**63, "--norm-eps must be"),
    ("model.heads", "4", "--heads must be a whole number"),
    ("model.causal", False, "--no-causal shows a query its target"),
    ("model.causal", 1, "--causal must be true or false"), ("model.cycle", "expe,rotary", "--cycle"),
    ("model.width", 2**53, ""), ("model.depth", 3, "depth is no setting of ModelConfig"),
    ("train.objective", "mlm", "--objective mlm sees both sides"), ("train.steps", "8", "--steps must be"),
    ("train.random_positions", 3, "--random-positions must be from 16"), ("train.lr", -1, "--lr must be"),
    ("train.random_positions", 10**15, "--random-positions must be a whole number, at least 0 and at most 16,777,216"),
    ("train.data", "a\0b", "--data must be a name or a path"),
    ("train.epochs", 3, "epochs is no setting of TrainConfig"),
    ("data.folder", "a\0b", ""), ("data.near", float("inf"), "Infinity is not a finite number"),
]


@pytest.mark.parametrize("path, value, message", EDITS, ids=[f"{path}={value}"[:40] for path, value, _ in EDITS])
def test_a_value_that_flags_refuse_is_refused_in_config_json(path, value, message, workplace, tmp_path):
    run = shutil.copytree(workplace / "runs/expe", tmp_path / "run")
    change_settings(run, path, value)
    assert message in refused(command("eval.py", "run", cwd=tmp_path))


def test_encodings_that_look_back_are_refused_without_a_causal_mask_in_config_json(workplace, tmp_path):
    run = shutil.copytree(workplace / "runs/rope", tmp_path / "run")
    change_settings(run, "model.encoding", {"pe": "fox"})
    change_settings(run, "model.causal", False)
    change_settings(run, "train.objective", "mlm")
    assert "--pe fox looks back" in refused(command("generate.py", "run", cwd=tmp_path))


def test_settings_of_a_task_are_checked_in_config_json(tmp_path):
    flags = "--preset mini --layers 1 --data task:needle --context 16 --batch-size 4 --steps 1 --out run".split()
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    change_settings(tmp_path / "run", "model.context", 1)
    assert "config.json: --context must be at least" in refused(command("eval.py", "run", cwd=tmp_path))


def test_a_whole_number_is_a_float_where_a_setting_is_one(workplace, tmp_path):
    """As JSON of other programs may have it."""
    run = shutil.copytree(workplace / "runs/rope", tmp_path / "run")
    change_settings(run, "model.encoding.base", 10000)
    base = read_run(run)[0].encoding.base
    assert (base, type(base)) == (10000, float)


# ---- flags and the environment ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line, message", [
    ("--theta 1e308", "--theta 1e+308 cannot be: up to position 15 the table of --pe expe has numbers beyond those"),
    ("--start=-1e300", "--start -1e+300 cannot be"), ("--pe alibi --slopes 1e300", "--slopes 1e+300 cannot be"),
    ("--theta 1e36", "before --lr matters, so the first weights or the encoding's numbers are too large: "
     "change --theta 1e+36"),
    ("--learn init --theta 1e39", "too large: change --theta 1e+39"),
    ("--random-positions 1e15", "--random-positions must be a whole number, at least 0 and at most 16,777,216")])
def test_positions_that_are_too_large_are_named_and_not_the_learning_rate(line, message, tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--steps", "1", *line.split()]
    assert message in refused(command("train.py", *flags, cwd=tmp_path))


@pytest.mark.parametrize("value", ["x", "0", "-1", "", "1.5"])
def test_a_wrong_number_of_processes_in_the_environment(value, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", value)
    line = refused(command("train.py", *TINY, cwd=tmp_path))
    assert f"WORLD_SIZE must be a whole number of at least 1, got '{value}'" in line


# ---- python -OO ------------------------------------------------------------------------------------------------------


def test_no_check_is_an_assert_and_no_docstring_is_needed():
    """python -O strips asserts, and -OO docstrings too."""
    folders = ("zoo", "longer", "engine", "lab", "interop", "web", "learn")
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert ROOT / "train.py" in paths and ROOT / "lab/measure.py" in paths
    for name in paths:
        tree = ast.parse(name.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{name}:{node.lineno}"
            inner = getattr(node, "value", None) if isinstance(node, ast.Attribute | ast.Subscript) else None
            assert getattr(inner, "id", None) != "__doc__", f"{name}:{node.lineno}"


@pytest.mark.slow
def test_help_without_docstrings(tmp_path):
    done = process("train.py", "--help", cwd=tmp_path, PYTHONOPTIMIZE="2")
    assert done.returncode == 0 and re.match("usage: ", done.stdout), done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="it makes pipes by name")
@pytest.mark.parametrize("name", ["config.json", CHECKPOINT, "tokenizer.tiktoken"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, workplace, tmp_path):
    shutil.copytree(workplace / "runs/rope", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for somebody who writes into the pipe"))
    signal.alarm(60)
    try:
        said = refused(command("generate.py", "run", "--tokens", "2", cwd=tmp_path))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert name in said


def test_a_rate_that_overflows_ends_in_one_line(tokens, tmp_path):
    flags = [*TINY, "--layers", "1", "--steps", "1", "--data", tokens, "--out", "run"]
    refused(command("train.py", *flags, "--lr", "1e308", cwd=tmp_path))
    assert not (tmp_path / "run" / CHECKPOINT).exists()


@pytest.mark.parametrize("what", ["parent", "own"])
def test_a_tokenizer_that_was_replaced_is_refused(what, workplace, tmp_path):
    """A parent's by --init-from, and a run's own by --resume."""
    shutil.copytree(workplace / "runs/rope", tmp_path / "run")
    (tmp_path / "run/tokenizer.tiktoken").write_text("QQ== 0\n")
    folder = read_run(tmp_path / "run")[2]["data"]["folder"]
    flags = {"parent": [*TINY, "--pe", "rope", "--data", folder, "--init-from", "run", "--out", "child"],
             "own": ["--out", "run", "--resume", "--steps", "9"]}
    assert "tokenizer" in refused(command("train.py", *flags[what], cwd=tmp_path))
