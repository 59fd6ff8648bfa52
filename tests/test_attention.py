"""lab/attention.py draws the weights that a model's outputs are made of."""

import pytest
import torch
from conftest import command, refused

from lab import attention


@pytest.mark.parametrize("run", ["expe", "rope"])
def test_attention_is_what_the_outputs_are_made_of(workplace, run):
    """The weights are causal, sum to 1, and are those of the fused kernel: W_v and W_proj make the same sum of them."""
    model, _ = attention.load_watched(workplace / "runs" / run)
    tokens = torch.arange(40)[None] % 300
    weights = attention.weights_of(model, tokens)
    assert weights.shape == (4, 1, 4, 40, 40) and not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1, 4, 40))
    assert torch.equal(weights, weights.tril())
    block, seen = model.blocks[0], {}
    handle = block.attn.register_forward_hook(lambda module, inputs, out: seen.update(h=inputs[0], out=out))
    with torch.no_grad():
        model.hidden(tokens)
        v = (seen["h"] @ block.attn.qkv.weight[256:].T).unflatten(-1, (4, 32)).transpose(1, 2)
        y = (weights[0] @ v).transpose(1, 2).flatten(2) @ block.attn.proj.weight.T
    handle.remove()
    torch.testing.assert_close(y, seen["out"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", ["runs/expe --lengths 16,64", "runs/learned --dtype int8",
                                   "runs/rope --lengths 64 --rope-scaling dual-chunk"])
def test_a_picture(workplace, flags):
    done = command("lab.attention", *flags.split(), "--out", "a.png", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert (workplace / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, message", [
    ("runs/learned --out a.png --lengths 16,64", "runs/learned has positions for 16 tokens, and not for 64"),
    ("runs/rope", "the following arguments are required: --out"),
    ("runs/rope --out a.bmp", "'a.bmp' must end in .png, .svg or .pdf"),
    ("runs/rope --out a.png --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
    ("runs/none --out a.png", "runs/none: no such run directory"),
])
def test_wrong_flags_are_named_in_one_line(workplace, flags, message):
    line = refused(command("lab.attention", *flags.split(), cwd=workplace))
    assert message in line and line.startswith("python -m lab.attention: error: ")
