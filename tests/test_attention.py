"""lab/attention.py draws the weights that a model's outputs are made of."""

import pytest
import torch
from conftest import command, refused, slow
from test_model import LINEAR, tiny

from lab import attention
from longer.reading import Reader
from model_torch import GPT


@pytest.mark.parametrize("pe, variant, changes", [
    ("rope", {}, {}), ("expe", {}, {}), *((pe, variant, {}) for pe, variant in LINEAR), ("rope+sinks", {}, {}),
    ("alibi+log", {}, {}), ("expe", {}, {"nope_every": 2, "window": 8})])
def test_attention_is_what_the_outputs_are_made_of(pe, variant, changes):
    """The weights are causal, sum to 1 but for a sink's, and make the outputs: W_v and W_proj give the same sum."""
    def watched(config):
        return Reader(config, attention=attention.WatchedAttention)

    model, plain = (tiny(pe, variant=variant, make=make, **changes) for make in (watched, GPT))
    tokens = torch.arange(40)[None] % model.config.vocab
    weights, H = attention.weights_of(model, tokens), model.config.heads
    assert weights.shape == (model.config.layers, 1, H, 40, 40) and not weights.requires_grad
    left = 1 - weights.sum(-1)
    assert (left.min() > 0 and left.max() > 0.1) if model.config.softmax == "sinks" else left.abs().max() < 1e-5
    assert torch.equal(weights, weights.tril())
    if changes:  # the second block has no encoding, and sees all keys
        assert torch.equal(weights[0], weights[0].triu(-7)) and (weights[1].tril() > 0).sum() == H * 820
    block, seen = model.blocks[0], {}
    handle = block.attn.register_forward_hook(lambda module, inputs, out: seen.update(h=inputs[0], out=out))
    with torch.no_grad():
        model.hidden(tokens)
        v = (seen["h"] @ block.attn.qkv.weight.chunk(3)[2].T).unflatten(-1, (H, -1)).transpose(1, 2)
        y = (weights[0] @ v).transpose(1, 2).flatten(2) @ block.attn.proj.weight.T
        assert torch.allclose(model(tokens), plain(tokens), rtol=1e-10, atol=1e-10)
    handle.remove()
    torch.testing.assert_close(y, seen["out"], rtol=1e-4, atol=1e-5)


def test_shaws_attention_is_shown_in_full():
    model = tiny("shaw", make=lambda config: Reader(config, attention=attention.WatchedAttention))
    tokens = torch.arange(40)[None] % model.config.vocab
    weights = attention.weights_of(model, tokens)
    assert torch.equal(weights, weights.tril()) and (1 - weights.sum(-1)).abs().max() < 1e-5
    torch.testing.assert_close(model(tokens), tiny("shaw")(tokens))


@pytest.mark.parametrize("flags", [
    "runs/rope --lengths 64 --rope-scaling dual-chunk",
    *slow("runs/expe --lengths 16,64", "runs/learned --dtype int8")])
def test_a_picture(workplace, flags):
    done = command("lab.attention", *flags.split(), "--out", "a.png", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert (workplace / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, message", [
    ("runs/learned --out a.png --lengths 16,64", "runs/learned has positions for 16 tokens, and not for 64"),
    ("runs/rope", "the following arguments are required: --out"),
    ("--out a.png", "the following arguments are required: RUN"),
    ("runs/rope runs/expe --out a.png", "unrecognized arguments: runs/expe"),
    ("runs/rope --out a.bmp", "must end in .png, .svg, .pdf, got 'a.bmp'"),
    ("runs/rope --out a.png --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
    ("runs/none --out a.png", "runs/none is no run directory"),
])
def test_wrong_flags_are_named_in_one_line(workplace, flags, message):
    line = refused(command("lab.attention", *flags.split(), cwd=workplace))
    assert message in line and line.startswith("python -m lab.attention: error: ")
