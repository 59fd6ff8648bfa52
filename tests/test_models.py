"""The explorer's trained models: packed in 8 bits, unpacked as runs, and the file of the repository."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from conftest import command, refused

import eval
import model_numpy
from eval import held_out
from files import hash_file
from runs import checkpoint_info, load_model, read_checkpoint, read_run
from settings import InputError
from tasks import score
from web import explorer, models

NAMES = ("expe", "rope", "task")


@pytest.fixture(scope="module")
def packed(workplace, tmp_path_factory):
    """A folder with the two files, of two runs on text and one on a task."""
    folder = tmp_path_factory.mktemp("packed")
    words = ["--preset", "mini", *models.TASK.split(), "--pe", "rope", "--steps", "2", "--out", "runs/task"]
    assert command("train.py", *words, cwd=workplace).returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "WEIGHTS", folder / "models.safetensors")
        patch.setattr(models, "MANIFEST", folder / "models.json")
        done = command("web.models", "pack", *(f"runs/{name}" for name in NAMES), cwd=workplace)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def files(packed, tmp_path, monkeypatch):
    """The folder of a copy of the two files, which web.models reads and writes."""
    shutil.copytree(packed, tmp_path / "web")
    monkeypatch.setattr(models, "WEIGHTS", tmp_path / "web/models.safetensors")
    monkeypatch.setattr(models, "MANIFEST", tmp_path / "web/models.json")
    return tmp_path / "web"


@pytest.fixture
def unpacked(files, tmp_path):
    """A folder without the data that the models were trained on, where they are unpacked."""
    done = command("web.models", "unpack", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_an_unpacked_weight_is_the_nearest_of_255_steps_of_its_row(unpacked, workplace):
    for name in NAMES:
        original, _ = read_checkpoint(workplace / "runs" / name)
        found, info = read_checkpoint(unpacked / "runs/models" / name)
        assert info == checkpoint_info(workplace / "runs" / name)
        assert found.keys() == {key for key in original if not key.startswith(("m.", "v."))}
        for key, w in found.items():
            if w.ndim != 2:
                assert (w == original[key]).all()
                continue
            step = abs(original[key]).max(1, keepdims=True) / 127
            assert (abs(w - original[key]) <= step / 2 * (1 + 1e-4)).all()
            np.testing.assert_allclose(w / step, np.rint(w / step), atol=1e-4)


def test_every_reader_takes_an_unpacked_run_without_the_data_of_its_training(unpacked, workplace):
    run = "runs/models/rope"
    assert command("generate.py", run, "--temperature", "0", "--tokens", "3", cwd=unpacked).returncode == 0
    assert command("lab.attention", run, "--out", "x.png", cwd=unpacked).returncode == 0
    assert command("web.explorer", run, "--out", "x.html", cwd=unpacked).returncode == 0
    losses = []
    for folder, name in ((unpacked, run), (workplace, "runs/rope")):
        done = command("eval.py", name, "--json", folder / "x.json", cwd=folder)
        assert done.returncode == 0 and done.stderr == ""
        losses.append([row["loss"] for row in json.loads((folder / "x.json").read_text())])
    np.testing.assert_allclose(*losses, atol=models.NEAR)
    assert losses[0] != losses[1]
    assert command("eval.py", "runs/models/task", cwd=unpacked).returncode == 0
    done = command("train.py", "--out", "runs/models/task", "--resume", "--steps", "3", cwd=unpacked)
    assert "begin another run with --init-from runs/models/task" in refused(done)


def test_eval_says_when_the_text_here_is_another_one(tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    meta = json.loads((tokens / "meta.json").read_text())

    def said(source, python):
        eval.say_other_text("runs/x", {"model": {"vocab": 300}, "data": meta | {"source": source, "python": python}})
        return capsys.readouterr().err

    assert said("stdlib", "3.0.1").startswith("runs/x: it was trained on the standard library of Python 3.0.1")
    assert said("stdlib", meta["python"]) == said("books", "3.0.1") == ""
    shutil.copytree(tokens, "data/stdlib-v300")                         # which says for sure
    assert said("stdlib", "3.0.1") == ""
    meta["splits"]["train"]["sha256"] = "another"
    assert "data/stdlib-v300 is another one" in said("stdlib", meta["python"])


def test_what_is_there_and_differs_is_never_overwritten(files, workplace, tmp_path):
    """Nothing is written then; what is the same is left, and what a kill left out is written."""
    shutil.copytree(workplace / "runs/rope", tmp_path / "runs/models/rope")
    before = (tmp_path / "runs/models/rope/config.json").read_bytes()
    assert "models/rope exists and is not what is unpacked" in refused(command("web.models", "unpack", cwd=tmp_path))
    assert [path.name for path in (tmp_path / "runs/models").iterdir()] == ["rope"]
    assert (tmp_path / "runs/models/rope/config.json").read_bytes() == before and not (tmp_path / "data").exists()
    assert command("web.models", "unpack", "--out", "other", cwd=tmp_path).returncode == 0
    first = read_checkpoint(tmp_path / "other/rope")[0]
    (tmp_path / "other/rope/checkpoint.safetensors").unlink()
    (tmp_path / "data/models/meta.json").unlink()
    assert command("web.models", "unpack", "--out", "other", cwd=tmp_path).returncode == 0
    again = read_checkpoint(tmp_path / "other/rope")[0]
    assert first.keys() == again.keys() and all((first[name] == again[name]).all() for name in first)
    shutil.copy(tmp_path / "other/expe/checkpoint.safetensors", tmp_path / "other/rope")
    assert "other/rope exists and is not" in refused(command("web.models", "unpack", "--out", "other", cwd=tmp_path))


def test_the_same_numbers_are_stored_once(files, workplace):
    before = [path.stat().st_ino for path in sorted(files.iterdir())]
    done = command("web.models", "pack", *(f"runs/{name}" for name in NAMES), cwd=workplace)
    assert done.returncode == 0 and "the files stay as they are" in done.stdout
    assert [path.stat().st_ino for path in sorted(files.iterdir())] == before


def test_what_cannot_be_packed_or_unpacked_is_refused(files, workplace, tmp_path):
    def said(*words, cwd=workplace):
        return refused(command("web.models", *words, cwd=cwd))

    shutil.copytree(workplace / "runs/rope", tmp_path / "rope")
    record = json.loads((tmp_path / "rope/config.json").read_text())
    record["train"]["steps"] = 9
    (tmp_path / "rope/config.json").write_text(json.dumps(record))
    assert "rope is not finished (step 8 of 9)" in said("pack", tmp_path / "rope")
    assert "pack needs runs that are trained on one text" in said("pack", "runs/task")
    assert "two runs are called rope" in said("pack", "runs/rope", "runs/rope")
    assert "--out is for unpack" in said("pack", "--out", "x")
    assert "unpack writes all models" in said("unpack", "rope")
    with open(models.WEIGHTS, "ab") as file:
        file.write(b"x")
    assert "is not the file whose hash" in said("unpack", cwd=tmp_path)
    models.WEIGHTS.unlink()
    assert "is missing: take it from the repository" in said("unpack", cwd=tmp_path)
    assert "is missing: take it from the repository" in refused(command("web.explorer", cwd=tmp_path))


def test_a_model_that_8_bits_change_too_much_is_not_packed(files, workplace, monkeypatch):
    monkeypatch.setattr(models, "NEAR", 1e-9)
    assert "must be within 1e-09" in refused(command("web.models", "pack", "runs/rope", cwd=workplace))


def test_the_page_of_the_file_is_that_of_its_runs(files, unpacked, workplace, monkeypatch):
    """Its losses are those of weights in 8 bits, as they are stored."""
    monkeypatch.chdir(workplace)
    of = re.compile('id="data">(.*?)</script>', re.S)
    known, of_runs = (json.loads(of.search(html)[1]) for html in (
        explorer.page_of_packed(), explorer.page([workplace / "runs" / name for name in NAMES])))
    assert known["results"].keys() == {"expe", "rope"}
    for name, result in known["results"].items():
        np.testing.assert_allclose(result["losses"], of_runs["results"][name]["losses"], atol=1e-5)
    for name in ("guess", "chance"):
        np.testing.assert_allclose(known["task"].pop(name), of_runs["task"].pop(name), atol=1e-5)
    np.testing.assert_allclose(*(page["task"].pop("accuracy")["task"] for page in (known, of_runs)), atol=1e-5)
    assert all(known[name] == of_runs[name] for name in ("task", "texts", "about", "documents", "models"))


# ---- the file of the repository --------------------------------------------------------------------------------------

ours = pytest.mark.skipif(not models.WEIGHTS.exists(), reason="web/models.safetensors is not here")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """({run: its numbers in models.json}) of the models of the repository, unpacked."""
    folder = tmp_path_factory.mktemp("models")
    runs, manifest = models.unpack(folder / "runs", folder / "text")
    return {run: manifest["models"][run.name] for run in runs}


@pytest.mark.parametrize("spoil", [
    lambda them: them.update({"../evil": them.popitem()[1]}), lambda them: them.update(more=3),
    lambda them: next(iter(them.values())).pop("step"), lambda them: next(iter(them.values()))["config"].pop("data")])
def test_a_manifest_that_pack_did_not_write_is_refused_and_nothing_is_unpacked(spoil, files, tmp_path):
    manifest = json.loads(models.MANIFEST.read_text(encoding="utf-8"))
    spoil(manifest["models"])
    models.MANIFEST.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is not as pack writes it: take the file from the repository"):
        models.unpack(tmp_path / "out", tmp_path / "text")
    assert not (tmp_path / "out").exists() and not (tmp_path / "evil").exists()


@ours
def test_the_models_of_the_repository_are_small_and_said_to_be_what_they_are(repository):
    manifest = json.loads(models.MANIFEST.read_text(encoding="utf-8"))
    assert models.WEIGHTS.stat().st_size == manifest["bytes"] < 7e6
    assert [run.name for run in repository] == list(models.RUNS)
    text = next(iter(repository)).parent.parent / "text"
    assert hash_file(text / "val.bin") == manifest["text"]["splits"]["val"]["sha256"]
    for run, its in repository.items():
        assert read_run(run)[2]["provenance"]["git"] and its["config"]["provenance"]["command"].startswith("python tr")
        if "losses" in its["rounded"]:
            np.testing.assert_allclose(its["rounded"]["losses"], its["original"]["losses"], rtol=0, atol=models.NEAR)


def numpys_losses(run, length, start=0, window=0):
    """The mean loss of the last targets of each held-out document, in float64 by the NumPy backend."""
    model, _ = load_model(run)
    params = {name: w.numpy().astype(float) for name, w in model.state_dict().items()}
    config = dataclasses.replace(model.config, window=window)
    documents = [x.astype(int) for x in held_out(run, read_run(run)[2], "val", None)[1] if len(x) > 16 * config.context]
    losses = [model_numpy.token_losses(params, x[None, -length - 1 : -1], x[None, -length:], config,
                                       start + np.arange(length))[0, -config.context :] for x in documents]
    return np.mean(losses)


@ours
def test_the_losses_at_the_trained_length_are_those_of_the_weights(repository):
    for run, its in repository.items():
        if "losses" in its["rounded"]:
            assert numpys_losses(run, 128) == pytest.approx(its["rounded"]["losses"][0], abs=1e-4)
            assert numpys_losses(run, 128, 1920) == pytest.approx(its["rounded"]["moved"], abs=1e-3)
        else:
            accuracy = score(load_model(run)[0], "task:needle", 512, sequences=128)["accuracy"]
            assert accuracy == pytest.approx(its["rounded"]["accuracy"][-1], abs=0.02)


@ours
@pytest.mark.slow
def test_the_losses_past_the_trained_length_are_those_of_the_weights(repository):
    for run, its in repository.items():
        if "losses" in its["rounded"]:
            assert numpys_losses(run, 2048) == pytest.approx(its["rounded"]["losses"][-1], abs=1e-3)
            assert numpys_losses(run, 2048, window=128) == pytest.approx(its["rounded"]["hidden"], abs=1e-3)
