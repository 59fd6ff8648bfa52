"""Models with one thing changed: that it is changed, and that nothing else is."""

import json

import pytest
import torch
from conftest import TINY, command, refused

import model_torch
from config import EncodingConfig, ModelConfig
from lab import causes


def model(change=None):
    made = model_torch.GPT(ModelConfig(2, 32, 2, 16, 50, encoding=EncodingConfig("expe", l=8)), **causes.fast.PARTS)
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
    flags = [*TINY[2:], "--data", tokens, "--steps", "5", "--batch-size", "4", "--micro-batch", "4"]
    done = command("train.py", "--preset", "mini", "--pe", "expe", *flags, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    asked = ("lab.causes", "--variants", "expe", "--out", "c.json")
    done = command(*asked, "--causes", "none,post-norm", "--", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "c.json").read_text())
    assert first["train_loss"] == log[4]["loss"] != second["train_loss"]
    done = command("eval.py", "run", "--lengths", "16,32,64,256", "--json", "rows.json", cwd=tmp_path)
    scored = {row["length"]: row["loss"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert done.returncode == 0 and first["losses"] == pytest.approx([scored[n] for n in (16, 32, 64)], abs=1e-6)
    again = command(*asked, "--causes", "none", "--", *flags, "--steps", "7", cwd=tmp_path)
    assert again.returncode == 0 and json.loads((tmp_path / "c.json").read_text()) == [first, second]
    assert "'new' is not one of none" in refused(command("lab.causes", "--causes", "new", cwd=tmp_path))
