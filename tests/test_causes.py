"""Models with one thing changed: that it is changed, and that nothing else is."""

import json
import math

import pytest
import torch
from conftest import command, refused

import model_torch
from config import ModelConfig, make_encoding
from studies import causes


def model(change=None):
    made = model_torch.GPT(ModelConfig(2, 32, 2, 16, 50, encoding=make_encoding("expe", l=8)), **causes.fast.PARTS)
    if change is not None:
        change(made)
    return made


TOKENS = torch.arange(60).view(4, 15) % 50


def test_biases_start_at_zero_and_each_is_used():
    changed = model(causes.biases)
    assert torch.equal(changed(TOKENS), model()(TOKENS))
    changed(TOKENS, TOKENS).backward()
    added = {name: w for name, w in changed.named_parameters() if name.endswith("bias") and "norm" not in name}
    assert len(added) == 2 * 4 and all(w.grad is not None for w in added.values())
    for name, w in added.items():
        q, k, v = w.grad.chunk(3) if "qkv" in name else (w.grad,) * 3
        assert q.abs().max() > 1e-9 and v.abs().max() > 1e-9, name
        assert "qkv" not in name or k.abs().max() < 1e-7  # q.b is one number for all keys: the softmax drops it


def test_post_norm_ends_each_half_of_a_block_with_its_norm():
    changed, blocks = model(causes.post_norm), []
    for block in changed.blocks:
        block.register_forward_hook(lambda block, given, out: blocks.append(out))
    changed(TOKENS)
    for out in blocks:  # norms start as weight 1, bias 0
        assert torch.allclose(out.mean(-1), torch.zeros(4, 15), atol=1e-6)
        assert torch.allclose(out.var(-1, unbiased=False), torch.ones(4, 15), atol=1e-3)


def test_torchs_first_weights_are_uniform_within_one_over_the_root_of_the_inputs():
    changed = model(causes.torch_start)
    matrices = [w for name, w in changed.named_parameters() if "embedding" not in name and w.ndim == 2]
    assert all(0.9 < w.abs().max() * w.shape[1] ** 0.5 <= 1.0001 for w in matrices)
    assert changed.embedding.weight.std().item() == pytest.approx(1, abs=0.1)


def test_with_nothing_changed_it_is_train_pys_own_run_and_what_is_there_is_not_trained_again(tokens, tmp_path):
    flags = ["--context", "16", "--vocab", "300", "--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "4"]
    flags += ["--data", tokens, "--steps", "5"]
    done = command("train.py", "--preset", "mini", "--fast", "--pe", "expe", *flags, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    asked = ("studies.causes", "--variants", "expe", "--out", "c.json")
    done = command(*asked, "--causes", "none,post-norm", "--", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "c.json").read_text())
    assert first["train_loss"] == log[4]["loss"] != second["train_loss"]
    done = command("eval.py", "run", "--lengths", "16,32,64,256", "--json", "rows.json", cwd=tmp_path)
    scored = {row["length"]: row["loss"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert done.returncode == 0 and first["losses"] == pytest.approx([scored[n] for n in (16, 32, 64, 256)], abs=1e-6)
    again = command(*asked, "--causes", "none", "--", *flags, cwd=tmp_path)
    assert again.returncode == 0 and json.loads((tmp_path / "c.json").read_text()) == [first, second]
    others = command(*asked, "--causes", "none", "--", *flags, "--steps", "7", cwd=tmp_path)
    assert "c.json has this run with other flags" in refused(others)
    for words, said in {
        "--causes new": "'new' must be of none",
        "-- --steps 2": "add --out FILE",
        "--variants rope --causes trained-gains": "which rope lacks: name a variant of expe",
    }.items():
        assert said in refused(command("studies.causes", *words.split(), cwd=tmp_path))
    assert not (tmp_path / "results").exists()


def keys_alone(change=None, theta=1 / 64):
    encoding = make_encoding("expe", on="k", l=8, theta=theta)
    made = model_torch.GPT(ModelConfig(2, 32, 2, 16, 50, encoding=encoding), **causes.fast.PARTS).double()
    for block in made.blocks:
        block.attn.qkv.weight.data *= 20  # first weights are small, and so is what positions change
    if change is not None:
        change(made)
    return made.double()


def test_a_trained_gain_of_a_head_is_theta_times_it_and_learns():
    changed = keys_alone(causes.trained_gains)
    gains = [block.attn.qkv.parametrizations.weight[0].gains for block in changed.blocks]
    assert torch.equal(changed(TOKENS), keys_alone()(TOKENS))
    for gain in gains:
        gain.log.data.fill_(math.log(5))
    assert torch.allclose(changed(TOKENS), keys_alone(theta=5 / 64)(TOKENS), rtol=0, atol=1e-12)
    changed(TOKENS, TOKENS).backward()
    assert all(gain.log.grad.abs().min() > 1e-9 for gain in gains)
    for name, ratio in ("smaller-gains", 1 / 8), ("larger-gains", 8):
        causes.CAUSES[name][1](spread := keys_alone())
        weight, plain = spread.blocks[1].attn.qkv.weight, keys_alone().blocks[1].attn.qkv.weight
        times = torch.ones_like(plain)
        times[32 + 16 : 32 + 32, :8] = ratio  # W_k's rows of the second head, and the columns of the position
        assert torch.allclose(weight, plain * times, rtol=1e-6)


def test_with_half_of_each_head_turning_keys_alone_stay_relative():
    plain, changed = keys_alone(), keys_alone(causes.rotary_half)
    at = torch.arange(15)
    assert torch.allclose(changed(TOKENS, positions=at + 1000), changed(TOKENS, positions=at), rtol=0, atol=1e-10)
    assert (changed(TOKENS) - plain(TOKENS)).abs().max() > 1e-3
    w, own = (made.blocks[0].attn.qkv.weight[32:64, :8].unflatten(0, (2, 16)) for made in (changed, plain))
    assert not w[:, :8].any() and torch.equal(w[:, 8:], own[:, 8:])
    q, k = torch.randn(2, 1, 2, 9, 16, dtype=torch.float64)
    turned_q, turned_k = changed.encoding.rotate(q, k, None)
    assert torch.equal(turned_q[..., 8:], q[..., 8:]) and torch.equal(turned_k[..., 8:], k[..., 8:])
    angles = torch.arange(9)[:, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
    pairs = torch.complex(q[..., :4], q[..., 4:8]) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(turned_q[..., :8], torch.cat((pairs.real, pairs.imag), -1), rtol=0, atol=1e-12)
