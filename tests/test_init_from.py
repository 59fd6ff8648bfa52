"""train.py --init-from RUN: which weights go on, which are dropped and new, and what a run says of its parent."""

import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import TINY, command, refused
from test_train import assert_same_run, log

import data
import files
import train
from config import ENCODINGS
from runs import read_run

STEPS = ("--steps", "3", "--eval-every", "3")


def arrays(run):
    return safetensors.numpy.load_file(run / "model.safetensors")


@pytest.fixture(scope="module")
def parents(tokens, tmp_path_factory):
    """A folder in which runs/PE is a short run of each encoding that has weights of its own, and of rope and expe."""
    folder = tmp_path_factory.mktemp("parents")
    for pe in ("rope", "expe", "learned", "t5", "shaw", "kerple"):
        done = command("train.py", "--pe", pe, *TINY, *STEPS, "--data", tokens, "--out", f"runs/{pe}", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def first_weights(monkeypatch):
    """A list that takes the weights of the next runs as they are before the first step."""
    seen = []
    for kind in train.BACKENDS.values():
        def watched(self, batch, step, whole=kind.step):
            if step == 0:
                seen.append({name: np.array(w) for name, w in self.weights().items()})
            return whole(self, batch, step)

        monkeypatch.setattr(kind, "step", watched)
    return seen


def begun(parents, tokens, monkeypatch, *flags):
    """(what train.py does with these flags, the weights it began with)."""
    seen = first_weights(monkeypatch)
    done = command("train.py", *TINY, *STEPS, "--data", tokens, "--overwrite", *flags, cwd=parents)
    assert done.returncode == 0, done.stderr
    return done, seen[0]


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("pe", ENCODINGS)
@pytest.mark.parametrize("parent", ["rope", "t5"])
def test_all_but_the_encodings_weights_go_on(parent, pe, backend, parents, tokens, monkeypatch):
    flags = ["--pe", pe, "--init-from", f"runs/{parent}", "--backend", backend, "--seed", "5", "--out", "runs/child"]
    done, first = begun(parents, tokens, monkeypatch, *flags)
    theirs = arrays(parents / "runs" / parent)
    own = [name for name in first if "encoding." in name]
    for name, w in first.items():
        assert (name in theirs and np.array_equal(w, theirs[name])) == (name not in own or pe == parent), name
    dropped = "none" if pe == parent or parent == "rope" else "encoding.weight"
    new = "none" if pe == parent or not own else ", ".join(own)
    said = f", {parent} to {pe}: weights dropped: {dropped}; new: {new}; the optimizer begins anew\n"
    assert f"from step 3 of runs/{parent}{said}" in done.stdout and done.stdout.count("from step") == 1


def test_the_parent_is_recorded_and_the_name_is_another(parents, tokens, monkeypatch):
    flags = ["--pe", "nope", "--init-from", "runs/rope"]
    begun(parents, tokens, monkeypatch, *flags)
    run = parents / "runs" / "mini-nope-context16-vocab300-steps3-batch_size4-data_books-v300-init_from_rope-s0"
    _, config, record = read_run(run)
    weights = files.fingerprint(parents / "runs" / "rope" / "model.safetensors")
    assert record["parent"] == {"run": "runs/rope", "step": 3, "weights": weights} and config.init_from == "runs/rope"
    assert "parent" not in read_run(parents / "runs" / "rope")[2]
    assert command("eval.py", run, "--lengths", "16,64", "--max-docs", "2", cwd=parents).returncode == 0
    begun(parents, tokens, monkeypatch, "--pe", "rope", "--init-from", run, "--out", "runs/grandchild")
    assert read_run(parents / "runs" / "grandchild")[2]["parent"]["run"] == str(run)


def test_a_step_from_a_parent_is_the_optimizers_first_on_the_parents_loss(parents, tokens, monkeypatch):
    """With the same encoding the first loss is what the parent's weights give, here by the other backend."""
    losses = {}
    for backend in ("torch", "numpy"):
        flags = ["--pe", "t5", "--init-from", "runs/t5", "--backend", backend, "--out", "runs/x"]
        begun(parents, tokens, monkeypatch, *flags)
        losses[backend] = [line["loss"] for line in log(parents / "runs" / "x") if "loss" in line]
    assert losses["torch"] == pytest.approx(losses["numpy"], rel=1e-4)
    model, config, _ = read_run(parents / "runs" / "x")
    fresh = train.NumpyBackend(model, config, "cpu", False)
    fresh.load(arrays(parents / "runs" / "t5"), {}, 0)
    batch = data.batch(data.open_split(tokens, "train"), 16, 4, 0, 0)
    assert fresh.step(batch, 0)[0] == pytest.approx(losses["torch"][0], rel=1e-5)


@pytest.mark.parametrize("flags, new", [
    (["--pe", "expe", "--context", "32"], "none"), (["--pe", "expe", "--theta", "1/128"], "none"),
    (["--pe", "expe", "--learn", "init"], "encoding.weight"), (["--pe", "expe", "--nope-every", "2"], "none"),
    (["--pe", "learned", "--context", "32"], "encoding.weight"),
    (["--pe", "shaw", "--max-distance", "9"], "encoding.keys, encoding.values"),
])
def test_additional_training_at_another_length_or_scale(flags, new, parents, tokens, monkeypatch):
    pe = flags[1]
    done, first = begun(parents, tokens, monkeypatch, *flags, "--init-from", f"runs/{pe}", "--out", "runs/child")
    assert f"of runs/{pe}, {pe} to {pe}: weights dropped: " in done.stdout and f"; new: {new}" in done.stdout
    assert np.array_equal(first["blocks.0.attn.qkv.weight"], arrays(parents / "runs" / pe)["blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_it_resumes_bit_for_bit_and_without_its_parent(backend, parents, tokens, tmp_path, stop_at, monkeypatch):
    shutil.copytree(parents / "runs" / "kerple", tmp_path / "runs" / "kerple")
    flags = [*TINY, "--data", tokens, "--steps", "6", "--dropout", "0.1", "--pe", "t5", "--init-from", "runs/kerple",
             "--backend", backend]  # fmt: skip
    assert command("train.py", *flags, "--out", "runs/a", cwd=tmp_path).returncode == 0
    stop_at(3)
    assert command("train.py", *flags, "--out", "runs/b", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "runs" / "kerple")
    done = command("train.py", *flags, "--out", "runs/b", "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "from step" not in done.stdout, done.stderr
    assert_same_run(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    a, b = (read_run(tmp_path / "runs" / name)[2]["parent"] for name in "ab")
    assert a == b and a["step"] == 3


@pytest.mark.parametrize("flags, message", [
    (["--width", "64"], "d_model is 128 in runs/rope and 64 by these flags: to begin from it, give its"),
    (["--heads", "2"], "n_heads is 4 in runs/rope and 2 by these flags"),
    (["--layers", "2"], "n_layers is 4 in runs/rope and 2 by these flags"),
    (["--vocab", "301"], "vocab_size is 300 in runs/rope and 301 by these flags"),
    (["--mlp", "swiglu"], "mlp is gelu in runs/rope and swiglu by these flags"),
    (["--tied"], "tied is False in runs/rope and True by these flags"),
    (["--init-from", "runs/nowhere"], "runs/nowhere: no such run directory"),
    (["--init-from", ".."], ".. holds no config.json, so it is not a run directory"),
], ids=str)
def test_what_does_not_fit_is_named_in_one_line(flags, message, parents, tokens):
    before = sorted((parents / "runs").iterdir())
    flags = [*TINY, "--data", tokens, "--pe", "nope", "--init-from", "runs/rope", *flags]
    assert message in refused(command("train.py", *flags, "--out", "runs/no", cwd=parents))
    assert sorted((parents / "runs").iterdir()) == before


def test_a_run_does_not_replace_the_one_that_it_begins_from(parents, tokens):
    flags = [*TINY, "--data", tokens, "--pe", "nope", "--init-from", "runs/rope", "--out", "runs/../runs/rope"]
    before = files.fingerprint(parents / "runs" / "rope" / "model.safetensors")
    line = refused(command("train.py", *flags, "--overwrite", cwd=parents))
    assert "init_from must be another run than --out, runs/../runs/rope, which it would replace" in line
    assert files.fingerprint(parents / "runs" / "rope" / "model.safetensors") == before


def test_another_tokenizer_and_a_damaged_parent_are_named(parents, books, tokens, tmp_path):
    other = tmp_path / "books"
    shutil.copytree(books, other)
    for path in other.iterdir():
        path.write_text(path.read_text(encoding="utf-8").replace("the", "xyz"), encoding="utf-8")
    flags = [*TINY, "--pe", "nope", "--init-from", parents / "runs" / "rope", "--out", tmp_path / "no"]
    line = refused(command("train.py", *flags, "--data", other, "--min-doc-tokens", "256", cwd=tmp_path))
    assert "data/books-v300 has another tokenizer than " in line and f"own data, {tokens}, or data.py --to" in line
    shutil.copytree(parents / "runs" / "rope", tmp_path / "rope")
    torch.save({}, tmp_path / "rope" / "model.safetensors")
    line = refused(command("train.py", *flags, "--data", tokens, "--init-from", tmp_path / "rope", cwd=tmp_path))
    assert "rope/model.safetensors has a size of" in line and not (tmp_path / "no").exists()
