"""train.py --random-positions P: positions that are the seed's and the step's alone, and 0, 1, 2, ... at the end."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused
from test_model import T, V, settings, some_tokens
from test_train import assert_same_run, log

import data
import model_numpy
import model_torch
from common import read_run
from config import ENCODINGS, ModelConfig, TrainConfig
from train import BACKENDS, random_positions

P = 40


def backend(name, pe="rope", micro_batch=2, **changes):
    """A backend of a tiny model, with positions drawn of 0 .. P-1."""
    encoding = settings(pe, **{"n_positions": P} if pe == "learned" else {})
    model = ModelConfig(2, 16, 2, T, V, d_mlp=40, encoding=encoding)
    config = TrainConfig(9, 4, lr=1e-3, end_lr=1e-3, micro_batch=micro_batch, random_positions=P, seed=7)
    return BACKENDS[name](model, dataclasses.replace(config, **changes), torch.device("cpu"), False)


def batch(seed=1):
    return some_tokens(4, T + 1, seed=seed).numpy()


def seen_by(name, monkeypatch, steps):
    """The positions of each forward pass of a backend's training, a list a step."""
    seen, of = [], (model_numpy, "loss_and_grads") if name == "numpy" else (model_torch.GPT, "forward")
    whole = getattr(*of)

    def watched(*given, positions=None, **more):
        seen[-1].append(positions)
        return whole(*given, positions=positions, **more)

    monkeypatch.setattr(*of, watched)
    trained = backend(name)
    for step in steps:
        seen.append([])
        trained.step(batch(), step)
    return seen


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_has_positions_of_its_own_and_all_its_sequences_share_them(name, monkeypatch):
    seen = seen_by(name, monkeypatch, [0, 1, 5])
    for parts in seen:
        assert len(parts) == 2 and np.array_equal(*parts)  # two micro-batches
        assert parts[0].shape == (T,) and (np.diff(parts[0]) > 0).all() and 0 <= parts[0][0] <= parts[0][-1] < P
    assert len({tuple(parts[0]) for parts in seen}) == 3
    (again,) = seen_by(name, monkeypatch, [5])  # of (seed, step) alone, whatever came before
    assert np.array_equal(again[0], seen[2][0])


def test_both_backends_and_all_lengths_of_a_run_have_the_same_positions_and_other_seeds_others():
    def drawn(seed=7, step=3, width=T):
        config = TrainConfig(9, 4, lr=1e-3, end_lr=1e-3, random_positions=P, seed=seed)
        return tuple(random_positions(config, step, width)["positions"])

    assert drawn() == drawn() != drawn(seed=8) and drawn() != drawn(step=4)
    assert drawn(width=P) == tuple(range(P))  # all there are


def test_every_position_is_as_likely_as_any_other():
    config, steps = TrainConfig(9, 4, lr=1e-3, end_lr=1e-3, random_positions=P), 4000
    counts = np.bincount(np.concatenate([random_positions(config, s, T)["positions"] for s in range(steps)]))
    expected, share = steps * T / P, T / P
    assert len(counts) == P and np.abs(counts - expected).max() < 4.5 * np.sqrt(steps * share * (1 - share))


@pytest.mark.parametrize("pe", ENCODINGS)
def test_both_backends_train_alike_and_score_at_0_1_2(pe):
    ours = {name: backend(name, pe) for name in BACKENDS}
    for step in range(3):
        losses, norms = zip(*(map(float, b.step(batch(step), step)) for b in ours.values()), strict=True)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-3)
    weights, config = ours["numpy"].weights(), ours["numpy"].model_config
    right = model_numpy.token_losses(weights, batch()[:, :-1], batch()[:, 1:], config, np.arange(T)).sum()
    ours["torch"].load(weights, {}, 0)
    given = data.next_tokens(batch(), 0, None)
    assert all(b.summed_loss(given) == pytest.approx(right, rel=1e-5) for b in ours.values())


def test_drawn_of_as_many_as_there_are_they_are_0_1_2_bit_for_bit(tokens, tmp_path):
    flags = ["--pe", "expe", *TINY, "--data", tokens, "--steps", "4", "--dropout", "0.1"]
    for name, more in (("a", []), ("b", ["--random-positions", 16]), ("c", ["--random-positions", 17])):
        assert command("train.py", *flags, *more, "--out", f"runs/{name}", cwd=tmp_path).returncode == 0
    a, b, c = (tmp_path / "runs" / name for name in "abc")
    assert_same_run(a, b)
    assert log(a)[0] != log(c)[0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pe", ["learned", "kerple"])
def test_a_run_resumes_bit_for_bit_and_its_name_says_so(pe, name, tokens, tmp_path, stop_at, monkeypatch):
    flags = ["--pe", pe, *TINY, "--data", tokens, "--steps", "6", "--eval-every", "3", "--random-positions", "64",
             "--backend", name, *["--n-positions", "64"] * (pe == "learned")]  # fmt: skip
    done = command("train.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert "-random_positions64-" in run.name and read_run(run)[1].random_positions == 64
    stop_at(3)
    assert command("train.py", *flags, "--out", "runs/b", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    done = command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, tmp_path / "runs" / "b")
    line = refused(command("train.py", "--out", "runs/b", "--resume", "--random-positions", "65", cwd=tmp_path))
    assert "random_positions is 64 in runs/b and 65 by these flags" in line
    done = command("eval.py", run, "--lengths", "16,64", "--max-docs", "2", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(row["loss"] for row in files.read_json(tmp_path / "rows.json"))  # learned has rows for 64


@pytest.mark.parametrize("flags, message", [
    ("--random-positions 64", "random_positions must be 0 or at least the context, 128, got 64"),
    ("--random-positions -1", "random_positions must be a whole number of at least 0, got -1"),
    ("--pe learned --random-positions 256", "learned has 128 positions, and random_positions draws of 256: see"),
    ("--pe learned --n-positions 64", "n_positions must be 0 or at least the context, 128, got 64"),
    ("--pe rope --n-positions 64", "n_positions is for learned, and rope has no use for it"),
])
def test_wrong_numbers_are_named_in_one_line(flags, message, tmp_path):
    assert message in refused(command("train.py", "--preset", "mini", "--data", "no/", *flags.split(), cwd=tmp_path))
