"""train.py --random-positions P: positions that are the seed's and the step's alone, and 0, 1, 2, ... at the end."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import TINY, command
from test_ladder import T, V, settings
from test_model import some_tokens

import model_numpy
import model_torch
from backends import BACKENDS, draw_positions
from config import ModelConfig, TrainConfig
from runs import read_checkpoint

P = 40
CONFIG = TrainConfig(9, 4, lr=1e-3, end_lr=1e-3, micro_batch=2, random_positions=P, seed=7)


def backend(name, pe="rope"):
    """A backend of a tiny model, with positions drawn of 0 .. P-1."""
    encoding = settings(pe, **{"n_positions": P} if pe == "learned" else {})
    return BACKENDS[name](ModelConfig(2, 16, 2, T, V, mlp_width=40, encoding=encoding), CONFIG, torch.device("cpu"))


def batch(seed=1):
    tokens = some_tokens(4, T + 1, seed=seed).numpy()
    return tokens[:, :-1], tokens[:, 1:]


def seen_by(name, monkeypatch, steps):
    """The positions of each forward pass of a backend's training, a list for each step."""
    seen, of = [], (model_numpy, "loss_and_grads") if name == "numpy" else (model_torch.GPT, "tables")
    original = getattr(*of)

    def watched(*given):
        seen[-1].append(given[4] if name == "numpy" else given[1])
        return original(*given)

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


def test_every_position_is_as_likely_as_any_other_and_seeds_differ():
    steps, share = 4000, T / P
    assert draw_positions(CONFIG, 3, T).tolist() != draw_positions(dataclasses.replace(CONFIG, seed=8), 3, T).tolist()
    counts = np.bincount(np.concatenate([draw_positions(CONFIG, step, T) for step in range(steps)]))
    assert len(counts) == P
    assert np.abs(counts - steps * share).max() < 4.5 * np.sqrt(steps * share * (1 - share))


@pytest.mark.parametrize("pe", ["expe", "learned", "rope", "shaw", "fire"])
def test_both_backends_train_alike_and_score_at_0_1_2(pe):
    ours = {name: backend(name, pe) for name in BACKENDS}
    for step in range(3):
        losses, norms = zip(*(b.step(batch(step), step) for b in ours.values()), strict=True)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-3)
    tensors, config = ours["numpy"].tensors(), ours["numpy"].model_config
    right = model_numpy.token_losses(tensors, *batch(), config, np.arange(T)).mean()
    ours["torch"].load(tensors, 3)
    assert all(b.validation_loss(batch()) == pytest.approx(right, rel=1e-5) for b in ours.values())


def test_drawn_of_as_many_as_there_are_they_are_0_1_2_bit_for_bit(tokens, tmp_path):
    flags = ["--pe", "expe", *TINY, "--data", tokens, "--steps", "4", "--dropout", "0.1", "--layers", "1"]
    for name, more in (("a", []), ("b", ["--random-positions", 16]), ("c", ["--random-positions", 17])):
        assert command("train.py", *flags, *more, "--out", name, cwd=tmp_path).returncode == 0
    a, b, c = ({name: w.tobytes() for name, w in read_checkpoint(tmp_path / name)[0].items()} for name in "abc")
    assert a == b != c


def test_learned_positions_are_scored_up_to_the_last_one_drawn(tokens, tmp_path):
    flags = ["--pe", "learned", "--n-positions", "64", "--random-positions", "64", *TINY, "--data", tokens]
    done = command("train.py", *flags, "--steps", "1", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("eval.py", "run", "--lengths", "16,64", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(row["loss"] for row in json.loads((tmp_path / "rows.json").read_text()))  # learned has rows for 64
