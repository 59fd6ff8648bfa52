"""--objective mlm: which tokens are masked, both backends on it, and the forms of encodings that see both sides."""

import itertools
import json

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused
from test_ladder import T, V, tiny
from test_model import some_tokens

import model_numpy
from engine.masking import mask_tokens
from model_numpy import IGNORED
from positional_encodings import ENCODINGS, settings_class

BOTH = [pe for pe in ENCODINGS if settings_class(pe).both_sides]


def some_masked(B=3, seed=0):
    """Tokens (B, T) without <|endoftext|>, and (tokens, targets) of them."""
    batch = np.random.default_rng(seed).integers(0, V - 1, (B, T))
    return batch, mask_tokens(batch, V, np.random.default_rng([seed, 1]))


def test_targets_are_what_stood_at_masked_places_and_the_other_tokens_are_as_they_were():
    batch, (tokens, targets) = some_masked(B=200)
    masked = targets != IGNORED
    assert (masked.sum(1) == round(0.15 * T)).all() and masked.any(0).all()
    assert (targets == np.where(masked, batch, IGNORED)).all()
    assert (tokens == batch)[~masked].all()
    assert all(map(np.array_equal, some_masked(B=200)[1], (tokens, targets)))


def test_eight_in_ten_are_hidden_one_is_any_token_and_one_itself():
    batch = np.random.default_rng(0).integers(0, 999, (400, 512))
    tokens, targets = mask_tokens(batch, 1000, np.random.default_rng(1))
    masked = targets != IGNORED
    assert (masked.sum(1) == round(0.15 * 512)).all()
    tokens, targets = tokens[masked], targets[masked]
    hidden, own = (tokens == 999).mean(), (tokens == targets).mean()
    tolerance = 5 * np.sqrt(0.8 * 0.2 / len(tokens))
    assert abs(hidden - 0.8001) < tolerance and abs(own - 0.1001) < tolerance  # of any tokens one in 1,000 is either
    assert len(np.unique(tokens[(tokens != 999) & (tokens != targets)])) > 900


@pytest.mark.parametrize("pe", BOTH)
def test_the_loss_is_the_mean_over_the_masked_tokens_in_both_backends(pe):
    model, (_, given) = tiny(pe, causal=False), some_masked()
    params = {name: w.detach().numpy() for name, w in model.named_parameters()}
    tokens, targets = map(torch.from_numpy, given)
    masked = targets != IGNORED
    each = -model(tokens).log_softmax(-1)[masked].gather(-1, targets[masked][:, None])[:, 0]
    for loss in (model(tokens, targets).item(), model_numpy.loss_and_grads(params, *given, model.config)[0]):
        assert loss == pytest.approx(each.mean().item(), rel=1e-12)
    for losses in (model.token_losses(tokens, targets),
                   torch.from_numpy(model_numpy.token_losses(params, *given, model.config))):
        torch.testing.assert_close(losses[masked], each, rtol=1e-10, atol=1e-12)
        assert not losses[~masked].any()


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


FLAGS = [*TINY, "--objective", "mlm", "--steps", "6", "--eval-every", "3"]


def test_both_backends_train_alike_and_with_micro_batches_too(tokens, tmp_path):
    flags = [*FLAGS, "--data", tokens, "--pe", "alibi"]
    runs, losses = {"torch": [], "fast": ["--fast"], "micro": ["--micro-batch", 1], "numpy": ["--backend", "numpy"]}, {}
    for name, more in runs.items():
        done = command("train.py", *flags, *more, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        losses[name] = [line.get("loss", line.get("val_loss")) for line in lines]
        assert losses[name] == pytest.approx(losses["torch"], rel=2e-5)
    assert losses["torch"][-1] < losses["torch"][0] and len(losses["torch"]) == 8
    config = json.loads((tmp_path / "torch/config.json").read_text())
    assert config["train"]["objective"] == "mlm" and config["model"]["causal"] is False
    for line in ("generate.py torch", "eval.py torch"):
        assert "sees later tokens" in refused(command(*line.split(), cwd=tmp_path))
    assert "a cache needs causal attention" in refused(command("generate.py", "torch", "--cache", cwd=tmp_path))
    for script, flags in (("lab.measure", ()), ("generate.py", ("--cache",))):
        said = refused(command(script, "torch", *flags, "--keys", 8, cwd=tmp_path))
        assert "--keys 8 is for runs that look back only" in said and "--no-causal" in said
