"""Masked language modelling: what is asked for, both backends on it, and the forms of encodings that see both sides."""

import itertools
import json

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused
from test_model import T, some_tokens, tiny
from transformers.models.t5.modeling_t5 import T5Attention

import data
import expe
import model_numpy
from config import ENCODINGS, ModelConfig, make_encoding, settings_class

BOTH = [pe for pe in ENCODINGS if settings_class(pe).both_sides]
V = 40


def asked(B=3, seed=0, vocab=V):
    batch = np.random.default_rng(seed).integers(0, vocab - 1, (B, T + 1))
    return batch, data.masked_tokens(batch, vocab, np.random.default_rng([seed, 1]))


def test_encodings_that_have_a_meaning_without_a_mask():
    assert set(BOTH) >= {"nope", "sinusoidal", "learned", "expe", "exqpe", "rope", "alibi", "t5", "shaw", "kerple"}
    assert not {"fox", "cope", "fire", "grape", "xpos"} & set(BOTH)


def test_what_is_asked_for_stood_there_and_the_rest_is_as_it_was():
    batch, given = asked(B=200)
    tokens, targets, at = given["tokens"], given["targets"], given["at"]
    assert at.shape == targets.shape == (200, round(0.15 * T)) and (np.diff(at) > 0).all()
    assert (targets == np.take_along_axis(batch, at, -1)).all()
    changed = tokens != batch[:, :-1]
    np.put_along_axis(changed, at, False, -1)
    assert not changed.any() and len(np.unique(at)) == T
    again = data.masked_tokens(batch, V, np.random.default_rng([0, 1]))
    assert all((again[name] == given[name]).all() for name in given)


def test_eight_in_ten_are_hidden_one_is_any_token_and_one_itself():
    batch = np.random.default_rng(0).integers(0, 999, (400, 513))
    given = data.masked_tokens(batch, 1000, np.random.default_rng(1))
    assert given["at"].shape[1] == 77 == round(0.15 * 512)
    there, n = np.take_along_axis(given["tokens"], given["at"], -1), given["at"].size
    hidden, own = (there == 999).mean(), (there == given["targets"]).mean()
    tolerance = 5 * np.sqrt(0.8 * 0.2 / n)
    assert abs(hidden - 0.8001) < tolerance and abs(own - 0.1001) < tolerance  # of any tokens one in 1,000 is either
    assert len(np.unique(there[(there != 999) & (there != given["targets"])])) > 900


@pytest.mark.parametrize("pe", BOTH)
def test_both_backends_have_the_same_loss_and_gradients_at_the_places_asked_for(pe):
    model, (_, given) = tiny(pe, causal=False), asked()
    params = {name: w.detach().numpy() for name, w in model.named_parameters()}
    loss, grads = model_numpy.loss_and_grads(params, config=model.config, **given)
    given = {name: torch.from_numpy(x) for name, x in given.items()}
    theirs = model(**given)
    theirs.backward()
    assert theirs.item() == pytest.approx(loss, rel=1e-12)
    for name, w in model.named_parameters():
        found = np.zeros_like(grads[name]) if w.grad is None else w.grad.numpy()
        np.testing.assert_allclose(found, grads[name], rtol=1e-9, atol=1e-12, err_msg=name)
    rows, at = torch.arange(3)[:, None], given["at"]
    every = model(given["tokens"]).log_softmax(-1)[rows, at].gather(-1, given["targets"][..., None])
    assert theirs.item() == pytest.approx(-every.mean().item(), rel=1e-12)
    losses = model.token_losses(**given)
    assert losses.shape == at.shape and losses.mean().item() == pytest.approx(theirs.item(), rel=1e-12)


@pytest.mark.parametrize("pe", BOTH)
def test_a_place_sees_what_follows_it(pe):
    model, tokens = tiny(pe, causal=False), some_tokens(1, T)
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % V
    assert (model(tokens)[0, 0] - model(other)[0, 0]).abs().max() > 1e-6


def test_alibi_falls_to_both_sides():
    model, n = tiny("alibi", causal=False), np.array([0, 1, 5, 2])
    table = model.tables(n)[model.config.encoding].pairs
    bias = model.blocks[0].attn.encoding.score(torch.zeros(1, 2, 4, 8).double(), None, None, table)
    for (h, slope), m, s in itertools.product(enumerate((2**-4, 2**-8)), range(4), range(4)):  # of two heads
        assert bias[h, m, s].item() == -slope * abs(n[m] - n[s])


@pytest.mark.parametrize("buckets, far", [(32, 128), (16, 40), (64, 512), (10, 100)])
def test_t5s_buckets_of_both_sides_are_transformers_own(buckets, far):
    n = np.arange(300)
    d = expe.distances(n, n)
    right = T5Attention._relative_position_bucket(torch.from_numpy(-d), True, buckets, far).numpy()
    found = expe.t5_bucket(d, buckets, far, both_sides=True)
    np.testing.assert_array_equal(found, right)
    assert (found[d < 0] >= buckets // 2).all() and (found[d >= 0] < buckets // 2).all()


def test_shaws_vectors_of_both_sides():
    d = np.arange(-9, 10)
    assert expe.shaw_index(d, 4, both_sides=True).tolist() == [min(max(x, -4), 4) + 4 for x in d]
    config = ModelConfig(1, 16, 2, 8, V, causal=False, encoding=make_encoding("shaw", max_distance=4))
    shapes = model_numpy.parameter_shapes(config)
    assert shapes["encoding.keys"] == shapes["encoding.values"] == (9, 8)


FLAGS = [*TINY, "--objective", "mlm", "--steps", "6", "--eval-every", "3"]


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_both_backends_train_alike_and_by_micro_batches_too(tokens, tmp_path):
    flags = [*FLAGS, "--data", tokens, "--pe", "alibi"]
    runs = {"torch": [], "micro": ["--micro-batch", "1"], "numpy": ["--backend", "numpy"]}
    for name, more in runs.items():
        done = command("train.py", *flags, *more, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, *others = ([line.get("loss", line.get("val_loss")) for line in log(tmp_path / name)] for name in runs)
    for other in others:
        assert other == pytest.approx(first, rel=2e-5)
    assert first[-1] < first[0] and len(first) == 8
    config = json.loads((tmp_path / "torch/config.json").read_text())
    assert config["train"]["objective"] == "mlm" and config["model"]["causal"] is False


def test_what_does_not_go_with_it_is_told(tokens, tmp_path):
    def line(*more):
        return refused(command("train.py", *FLAGS, "--data", tokens, "--out", "a", *more, cwd=tmp_path))

    for pe in sorted(set(ENCODINGS) - set(BOTH)):
        assert f"objective mlm sees both sides, and {pe} has a meaning under a causal mask alone" in line("--pe", pe)
    assert "leave out --causal" in line("--causal")
    assert "--sample-every writes from left to right" in line("--sample-every", "2")
    assert not (tmp_path / "a").exists()
    done = command("train.py", *FLAGS, "--data", tokens, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a tells masked tokens, and not the next one" in refused(command("eval.py", "a", cwd=tmp_path))
    assert "a cache needs causal attention" in refused(command("generate.py", "a", cwd=tmp_path))
    assert command("eval.py", "a", "--curves", "a.png", cwd=tmp_path).returncode == 0
