"""The NumPy twin against torch: a ladder from the tables to ten optimizer steps, and each layer by itself.

Errors are relative to the largest entry of what torch has: below it, a sum of many terms has no digits of its own.
"""

import dataclasses
import importlib
import inspect
import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, command, refused
from test_model import STYLES, T, V, tiny

import model_numpy
import model_torch
import train
from config import ENCODINGS, PRESETS, EncodingConfig, TrainConfig
from expe import rope_table
from train import new_optimizer

EXACT = 1e-9  # float64 has 16 digits; a deep sum loses a few of them, never seven
B = 3
POSITIONS = {
    "default": None,
    "odd": np.array([4, 4, 0, 11, 2, 7, 7, 1, 10, 3, 5, 0]),  # repeats, gaps, any order
    "own": np.stack([np.arange(T), np.arange(T)[::-1], np.full(T, 6)]),  # a row for each sequence
}


def close(what, ours, theirs, tolerance):
    """Both arrays are equal up to the tolerance; a failure names what they are, and the worst index."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, f"{what} has the shape {ours.shape}, and torch's {theirs.shape}"
    error = np.abs(ours - theirs) / max(np.abs(theirs).max(initial=0), 1e-300)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= tolerance, (
        f"{what}[{', '.join(map(str, worst))}] is {ours[worst]:.12g}, and torch's {theirs[worst]:.12g}: "
        f"off by {error[worst]:.1e} of the largest"
    )


def numpy_params(model):
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def masked(model, masks):
    """Make the torch model's dropouts multiply by the given masks, one after the other."""
    masks = iter(masks)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.forward = lambda x: x * torch.from_numpy(next(masks))


def climb(model, tolerance, positions=None, dropout=False):
    """The ladder: table, logits, loss, every gradient, and ten steps of AdamW with clipping: losses and weights."""
    config, dtype = model.config, model.embedding.weight.detach().numpy().dtype
    params, rng = numpy_params(model), np.random.default_rng(0)
    tokens, targets = rng.integers(0, V, (2, B, T))
    x, y = torch.from_numpy(tokens), torch.from_numpy(targets)

    encoding = model_numpy.encoding_of(config)
    ours = model_numpy.encoding_table(encoding, B, T, positions, config, dtype)
    at = model.places(np.arange(T) if positions is None else positions)
    theirs = at.table if at.pairs is None else at.pairs
    assert (ours is None) == (theirs is None)
    if config.encoding.pe == "alibi":  # torch adds a number a key, which differs by one that all keys of a query share
        ours, theirs = np.diff(ours, axis=-1), np.broadcast_to(np.diff(theirs, axis=-1), np.diff(ours, axis=-1).shape)
    if ours is not None:
        close("table", ours, theirs, tolerance)

    def both():
        masks = list(model_numpy.dropout_masks(config, B, T, rng, dtype)) if dropout else None
        masked(model, masks or itertools.repeat(np.ones((), dtype)))
        loss, grads = model_numpy.loss_and_grads(params, tokens, targets, config, positions, masks)
        model.zero_grad()
        torch_loss = model(x, y, positions=positions)
        torch_loss.backward()
        return loss, grads, torch_loss

    logits, _ = model_numpy.forward(params, tokens, config, positions)
    close("logits", logits, model(x, None, positions).detach(), tolerance)
    loss, grads, torch_loss = both()
    close("loss", loss, torch_loss.item(), tolerance)
    assert list(grads) == list(params) == list(model_numpy.parameter_shapes(config))
    for name, parameter in reversed(list(model.named_parameters())):  # the first to fail is the nearest to the fault
        assert grads[name].dtype == dtype
        close(f"gradient of {name}", grads[name], parameter.grad, tolerance)

    settings = TrainConfig(steps=10, batch_size=B, lr=1e-2, end_lr=1e-3, weight_decay=0.3)
    optimizer, state = new_optimizer(model, settings), model_numpy.adamw_state(params)
    for step in range(10):
        loss, grads, torch_loss = both()
        close(f"loss of step {step}", loss, torch_loss.item(), tolerance)
        norm, torch_norm = model_numpy.clip_grads(grads, 0.5), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        close(f"gradient norm of step {step}", norm, torch_norm.item(), tolerance)
        assert norm > 0.5  # or else clipping went untested
        model_numpy.adamw_step(params, grads, state, 1e-2, 0.9, 0.95, weight_decay=0.3)
        optimizer.step()
    for name, weight in numpy_params(model).items():
        close(f"{name} after ten steps", params[name], weight, tolerance)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder(pe, style, tied, positions):
    climb(tiny(pe, style, tied=tied), EXACT, POSITIONS[positions])


VARIANTS = {
    "expe": [
        *({"on": on} for on in ("k", "q", "qkv")),
        *({"learn": learn} for learn in ("init", "random")),
        {"constant": True},
        {"l": 1},
        {"l": 16},
        {"once": True},
        {"once": True, "learn": "init", "constant": True},
        {"on": "qkv", "learn": "random", "start": None},
        {"start": 0.3, "theta": -0.1, "on": "k", "learn": "init"},
        {"scale": 0.5},
        {"scale": 0.5, "learn": "init"},
    ],
    "rope": [{"rope_scaling": "yarn", "factor": 3.0}, {"rope_scaling": "dynamic", "factor": 2.0, "length": 40}],
    "exqpe": [
        *({"on": on} for on in ("k", "qkv")),
        {"learn": "init", "start": 0.2},
        {"learn": "random"},
        {"once": True},
        {"scale": 0.25},
    ],
    "t5": [{"buckets": 2, "max_distance": 3}, {"buckets": 7, "max_distance": 6}],
    "shaw": [{"max_distance": 1}, {"max_distance": 40}],
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pe, variant", [(pe, v) for pe, variants in VARIANTS.items() for v in variants], ids=str)
def test_ladder_of_the_variants(pe, variant, positions):
    climb(tiny(pe, variant=variant), EXACT, POSITIONS[positions])


@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder_without_a_mask(pe):
    climb(tiny(pe, causal=False), EXACT, POSITIONS["odd"])


@pytest.mark.parametrize("n_heads", [1, 4, 8])
@pytest.mark.parametrize("pe", ["alibi", "t5", "shaw"])
def test_ladder_at_other_head_counts(pe, n_heads):
    climb(tiny(pe, n_heads=n_heads), EXACT)


@pytest.mark.parametrize("style", STYLES)
def test_ladder_with_dropout(style):
    climb(tiny("expe", style, dropout=0.3), EXACT, dropout=True)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder_in_float32(pe, style):
    # float32 keeps 1.2e-7 of a number; sums over some dozen terms, two blocks deep, lose two digits of it, and AdamW
    # divides by the root of a mean square, which makes an error of a small gradient as large as that of a large one.
    climb(tiny(pe, style).float(), 1e-3)


# ---- the ladder can fail ---------------------------------------------------------------------------------------------


def swap(monkeypatch, name, old, new):
    """Put a copy of a function of model_numpy, with one piece of its source changed, wherever the function is used."""
    original = getattr(model_numpy, name)
    source = inspect.getsource(original)
    body = source.split('"""')[-1]  # beyond the docstring
    assert body.count(old) == 1, (name, old)
    scope = dict(vars(model_numpy))
    exec(source.removesuffix(body) + body.replace(old, new), scope)
    changed = lambda pair: tuple(scope[name] if f is original else f for f in pair)  # noqa: E731
    monkeypatch.setattr(model_numpy, name, scope[name])
    for table in (model_numpy.NORMS, model_numpy.MLPS):
        for key, pair in table.items():
            monkeypatch.setitem(table, key, changed(pair))
    encoding_of = model_numpy.encoding_of

    def encoding_with_it(config):
        encoding = encoding_of(config)
        doors = {door: changed(getattr(encoding, door)) for door in ("embed", "override", "rotate", "score", "value")}
        return encoding._replace(**doors)

    monkeypatch.setattr(model_numpy, "encoding_of", encoding_with_it)


@pytest.mark.parametrize(
    "name, old, new, pe, style, caught_at",
    [
        ("linear_backward", "dout @ w", "-dout @ w", "nope", "gpt", "gradient of norm.bias"),
        ("embedding_backward", "dw[found] = np", "dw[found] = -np", "nope", "gpt", "gradient of embedding.weight"),
        ("dropout_backward", "dout * mask", "dout", "nope", "gpt", "gradient of blocks.1.mlp.down.weight"),
        ("layernorm_backward", "- z * along_z", "+ z * along_z", "nope", "gpt", "gradient of blocks.1.mlp.down"),
        ("layernorm_backward", "dz - dz.mean", "dz + dz.mean", "nope", "gpt", "gradient of blocks.1.mlp.down"),
        ("rmsnorm_backward", "- z * along_z", "+ z * along_z", "nope", "llama", "gradient of blocks.1.mlp.down"),
        ("gelu_backward", "1 - s", "1 + s", "nope", "gpt", "gradient of blocks.1.mlp.up"),
        ("swiglu_backward", "(1 - s)", "(1 + s)", "nope", "llama", "gradient of blocks.1.mlp.gate"),
        ("gelu_mlp_backward", "(dup", "(-dup", "nope", "gpt", "gradient of blocks.1.mlp.up"),
        ("swiglu_mlp_backward", "dh_up + dh_gate", "dh_up - dh_gate", "nope", "llama", "gradient of blocks.1.norm2"),
        ("add_learned_backward", "dout.sum(0)", "-dout.sum(0)", "learned", "gpt", "gradient of encoding.weight"),
        ("override_backward", "dh[..., :l] = 0", "dh[..., :l] *= 1", "expe", "gpt", "gradient of blocks.1.norm1"),
        ("rotate_backward", "-sin", "sin", "rope", "gpt", "gradient of blocks.1.attn.qkv"),
        ("causal_softmax_backward", "dp -= ", "dp += ", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
        ("causal_attention_backward", "dqk *= 1", "dqk *= -1", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
        ("override_on", "part not in parts", "part in parts", "exqpe", "gpt", "gradient of blocks.1.norm1"),
        ("not_overridden_backward", "dk + dv", "dk - dv", "nope", "gpt", "gradient of blocks.1.norm1"),
        ("attention_backward", "(dw_q, dw_k, dw_v)", "(dw_q, -dw_k, dw_v)", "nope", "gpt", "blocks.1.attn.qkv"),
        ("t5_score_backward", "(np.moveaxis(", "(-np.moveaxis(", "t5", "gpt", "gradient of encoding.weight"),
        ("spread_backward", "dout[..., None", "-dout[..., None", "shaw", "gpt", "logits"),
        ("shaw_score_backward", "dqk[0] = ", "dqk[0] = -", "shaw", "gpt", "gradient of encoding"),
        ("shaw_score_backward", "dkeys = ", "dkeys = -", "shaw", "gpt", "gradient of encoding.keys"),
        ("shaw_value_backward", "forward(dout", "forward(-dout", "shaw", "gpt", "gradient of encoding"),
        ("shaw_value_backward", "dvalues = ", "dvalues = -", "shaw", "gpt", "gradient of encoding.values"),
        ("block_backward", "dx += dout", "dx -= dout", "nope", "gpt", "gradient of blocks.1.attn.proj"),
        ("cross_entropy_backward", "-= 1", "+= 1", "nope", "gpt", "gradient of head"),
        ("clip_grads", "limit / (norm", "-limit / (norm", "nope", "gpt", "loss of step 1"),
        ("adamw_step", "w *= 1 - lr * decay", "w *= 1 + lr * decay", "nope", "gpt", "loss of step 1"),
        ("adamw_step", "if whole.ndim >= 2", "if whole.ndim >= 1", "nope", "gpt", "loss of step 1"),
    ],
)
def test_ladder_catches_a_flipped_sign(monkeypatch, name, old, new, pe, style, caught_at):
    model = tiny(pe, style, dropout=0.3)
    swap(monkeypatch, name, old, new)
    with pytest.raises(AssertionError, match=caught_at):
        climb(model, EXACT, dropout=True)


# ---- each layer by itself: (forward and backward, its arrays, what torch computes) -----------------------------------


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


TOKENS = np.array([[3, 1, 3], [0, 4, 3]])
TABLE = random(5, 4)
COS_SIN = rope_table(np.array([7, 0, 30]), 8)  # (3, 8)


TRIPLE = random(5, 4, 3)
INDEX = np.array([[0, 3, 1], [1, 0, 0], [2, 2, 3]])


def affine(w):
    """The table that two numbers make of a TRIPLE."""
    return torch.from_numpy(TRIPLE[..., 0]) + sum(w[i] * torch.from_numpy(TRIPLE[..., i + 1]) for i in range(2))


def softmax_with_copy(scores):
    return model_numpy.causal_softmax_forward(scores.copy())


def torch_attention(qk, v):
    return F.scaled_dot_product_attention(*qk, v, is_causal=True)


def torch_rotate(qk):
    """The pair as one complex number, times e^(i angle)."""
    z = torch.complex(*qk.chunk(2, -1)) * torch.complex(*torch.from_numpy(COS_SIN).chunk(2, -1))
    return torch.cat((z.real, z.imag), -1)


def attention_of(qk, v):
    return model_numpy.causal_attention_forward(qk, v, model_numpy.ENCODINGS["nope"], None, {})


def by_name(layer, *names):
    """A layer that takes a dict of its parameters, as one that takes them one by one."""
    return lambda x, *arrays: layer(x, dict(zip(names, arrays, strict=True)))


N = model_numpy
LAYERS = {
    "linear": (N.linear_forward, N.linear_backward, [random(2, 3, 5), random(4, 5)], F.linear),
    "embedding": (
        lambda w: N.embedding_forward(TOKENS, w),
        N.embedding_backward,
        [random(6, 4)],
        lambda w: F.embedding(torch.from_numpy(TOKENS), w),
    ),
    "dropout": (
        lambda x: N.dropout_forward(x, TABLE > 0),
        N.dropout_backward,
        [random(5, 4, seed=1)],
        lambda x: x * torch.from_numpy(TABLE > 0),
    ),
    "layernorm": (
        lambda x, w, b: N.layernorm_forward(x, 1e-5, w, b),
        N.layernorm_backward,
        [random(2, 3, 6), random(6), random(6, seed=1)],
        lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5),
    ),
    "rmsnorm": (
        lambda x, w: N.rmsnorm_forward(x, 1e-5, w),
        N.rmsnorm_backward,
        [random(2, 3, 6), random(6)],
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
    ),
    "gelu": (N.gelu_forward, N.gelu_backward, [3 * random(4, 5)], lambda x: F.gelu(x, approximate="tanh")),
    "swiglu": (
        N.swiglu_forward,
        N.swiglu_backward,
        [3 * random(4, 5), random(4, 5, seed=1)],
        lambda gate, up: F.silu(gate) * up,
    ),
    "gelu_mlp": (
        by_name(N.gelu_mlp_forward, "up.weight", "down.weight"),
        N.gelu_mlp_backward,
        [random(2, 3, 4), random(7, 4), random(4, 7)],
        lambda h, up, down: F.gelu(h @ up.T, approximate="tanh") @ down.T,
    ),
    "swiglu_mlp": (
        by_name(N.swiglu_mlp_forward, "gate.weight", "up.weight", "down.weight"),
        N.swiglu_mlp_backward,
        [random(2, 3, 4), random(7, 4), random(7, 4, seed=1), random(4, 7)],
        lambda h, gate, up, down: (F.silu(h @ gate.T) * (h @ up.T)) @ down.T,
    ),
    "causal_softmax": (
        softmax_with_copy,
        N.causal_softmax_backward,
        [random(2, 4, 4)],
        lambda s: s.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -math.inf).softmax(-1),
    ),
    "causal_attention": (
        attention_of,
        N.causal_attention_backward,
        [random(2, 2, 3, 5, 4), random(2, 3, 5, 4)],
        torch_attention,
    ),
    "cross_entropy": (
        lambda z: N.cross_entropy_forward(z, TOKENS[0]),
        N.cross_entropy_backward,
        [5 * random(3, 5)],
        lambda z: F.cross_entropy(z, torch.from_numpy(TOKENS[0]), reduction="none"),
    ),
    "add": (
        lambda x: N.add_forward(x, TABLE, {}),
        N.add_backward,
        [random(2, 5, 4)],
        lambda x: x + torch.from_numpy(TABLE),
    ),
    "add_learned": (
        lambda x, w: N.add_learned_forward(x, TOKENS[0], {"weight": w}),
        N.add_learned_backward,
        [random(2, 3, 4), random(6, 4)],
        lambda x, w: x + w[torch.from_numpy(TOKENS[0])],
    ),
    "override": (
        lambda h: N.override_forward(h, TABLE, {}),
        N.override_backward,
        [random(2, 5, 9)],
        lambda h: torch.cat((torch.from_numpy(TABLE).expand(2, 5, 4), h[..., 4:]), -1),
    ),
    "learned_override": (
        lambda h, w: N.learned_override_forward(h, TRIPLE, {"weight": w}),
        N.learned_override_backward,
        [random(2, 5, 9), random(2)],
        lambda h, w: torch.cat((affine(w).expand(2, 5, 4), h[..., 4:]), -1),
    ),
    "spread": (
        lambda x: N.spread_forward(x, INDEX, 3),
        N.spread_backward,
        [random(2, 2, 3, 4)],
        lambda x: torch.stack([x[:, :, m, INDEX[m]] for m in range(3)], 2),
    ),
    "add_score": (
        lambda scores: N.add_score_forward(scores, None, random(2, 3, 3, seed=2), {}),
        lambda d, cache: N.add_score_backward(d, cache)[0],
        [random(2, 2, 3, 3)],
        lambda scores: scores + torch.from_numpy(random(2, 3, 3, seed=2)),
    ),
    "t5_score": (
        lambda scores, w: N.t5_score_forward(scores, None, INDEX, {"weight": w}),
        lambda d, cache: N.t5_score_backward(d, cache)[::2],
        [random(2, 2, 3, 3), random(4, 2)],
        lambda scores, w: scores + w[INDEX].permute(2, 0, 1),
    ),
    "shaw_score": (
        lambda scores, qk, a: N.shaw_score_forward(scores, qk, INDEX, {"keys": a}),
        N.shaw_score_backward,
        [random(2, 2, 3, 3), random(2, 2, 2, 3, 5), random(4, 5)],
        lambda scores, qk, a: scores + torch.einsum("bhtd,tsd->bhts", qk[0], a[INDEX]) / math.sqrt(5),
    ),
    "shaw_value": (
        lambda y, p, a: N.shaw_value_forward(y, p, INDEX, {"values": a}),
        lambda d, cache: (d, *N.shaw_value_backward(d, cache)),
        [random(2, 2, 3, 5), random(2, 2, 3, 3), random(4, 5)],
        lambda y, p, a: y + torch.einsum("bhts,tsd->bhtd", p, a[INDEX]),
    ),
    "rotate": (lambda qk: N.rotate_forward(qk, COS_SIN, {}), N.rotate_backward, [random(2, 2, 2, 3, 8)], torch_rotate),
}


def gradients(layer, *arrays):
    """The output, a random upstream gradient, and the gradients of all arrays, in their order."""
    forward, backward = LAYERS[layer][:2]
    out, cache = forward(*arrays)
    out = out.copy()
    dout = random(*out.shape, seed=9)
    found = backward(dout.copy(), cache)
    found = found if isinstance(found, tuple) else (found,)
    flat = [list(g.values()) if isinstance(g, dict) else [g] for g in found]
    return out, dout, list(itertools.chain(*flat))


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_against_autograd(layer):
    arrays, theirs = LAYERS[layer][2:]
    out, dout, found = gradients(layer, *arrays)
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]
    expected = theirs(*tensors)
    close(layer, out, expected.detach(), 1e-10)
    expected.backward(torch.from_numpy(dout))
    for i, (gradient, tensor) in enumerate(zip(found, tensors, strict=True)):
        close(f"{layer}: gradient {i}", gradient, tensor.grad, 1e-10)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_against_central_differences(layer):
    forward, _, arrays, _ = LAYERS[layer]
    _, dout, found = gradients(layer, *arrays)
    for i, gradient in enumerate(found):
        slopes = np.zeros_like(arrays[i])
        for index in np.ndindex(*slopes.shape):
            ends = []
            for change in (1e-5, -1e-5):  # the error is about change^2 = 1e-10
                moved = [a.copy() for a in arrays]
                moved[i][index] += change
                ends.append((forward(*moved)[0] * dout).sum())
            slopes[index] = (ends[0] - ends[1]) / 2e-5
        close(f"{layer}: gradient {i}", gradient, slopes, 1e-6)


def test_every_backward_of_the_file_is_tested_alone_or_caught_by_the_ladder():
    pairs = {name.removesuffix("_backward") for name in vars(model_numpy) if name.endswith("_backward")}
    assert pairs - set(LAYERS) == {"attention", "block", "unchanged", "not_overridden", "unscored", "unvalued"}


def test_adamw_of_a_matrix_of_several_blocks_equals_torchs():
    rng = np.random.default_rng(0)
    w, grads = rng.standard_normal((1000, 77)), [rng.standard_normal((1000, 77)) for _ in range(3)]
    assert w.size > 2 * 2**15 and 1000 % (2**15 // 77) != 0
    theirs = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    params = {"w": w}
    state = model_numpy.adamw_state(params)
    for g in grads:
        theirs.grad = torch.from_numpy(g.copy())
        optimizer.step()
        model_numpy.adamw_step(params, {"w": g}, state, 0.01, 0.8, 0.9, 1e-3, 0.2)
    close("w", params["w"], theirs.detach(), 1e-12)


def test_dropout_masks_keep_the_mean():
    config = tiny(dropout=0.3, n_layers=1).config
    masks = np.stack(list(model_numpy.dropout_masks(config, 50, 100, np.random.default_rng(0), np.float64)))
    assert masks.shape == (3, 50, 100, 16) and set(np.unique(masks)) == {0.0, 1 / 0.7}
    assert abs(masks.mean() - 1) < 0.01 and not np.array_equal(masks[0], masks[1])


def test_token_losses_are_torchs_at_any_positions():
    model, (tokens, targets) = tiny("expe"), np.random.default_rng(0).integers(0, V, (2, B, T))
    ours = model_numpy.token_losses(numpy_params(model), tokens, targets, model.config, POSITIONS["odd"])
    theirs = model.token_losses(torch.from_numpy(tokens), torch.from_numpy(targets), POSITIONS["odd"])
    close("losses", ours, theirs, 1e-10)


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe", ENCODINGS)
def test_without_mask_and_encoding_a_permuted_input_gives_the_permuted_output(pe):
    model, permutation = tiny(pe, causal=False), np.random.default_rng(0).permutation(T)
    tokens = np.random.default_rng(1).integers(0, V, (1, T))
    params = numpy_params(model)
    for logits_of in (
        lambda tokens: model_numpy.forward(params, tokens, model.config)[0],
        lambda tokens: model(torch.from_numpy(tokens)).detach().numpy(),
    ):
        permuted, straight = logits_of(tokens[:, permutation]), logits_of(tokens)[:, permutation]
        assert np.allclose(permuted, straight, rtol=1e-9, atol=1e-11) == (pe == "nope")


@pytest.mark.parametrize("pe", ENCODINGS)
def test_with_a_mask_order_is_known_even_without_an_encoding(pe):
    model, permutation = tiny(pe), np.random.default_rng(0).permutation(T)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, V, (1, T)))
    assert not torch.allclose(model(tokens[:, permutation]), model(tokens)[:, permutation])


# ---- an encoding of the reader's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_the_readmes_own_encoding_climbs_the_ladder(style, monkeypatch):
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Add your own")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", section, re.DOTALL)
    assert [file for file, _ in blocks] == ["config", "model_torch", "model_numpy"]
    for file, code in blocks:
        module = importlib.import_module(file)
        monkeypatch.setitem(module.ENCODINGS, "partial", None)  # gone again after the test
        exec(code, dict(vars(module)))
    for positions in POSITIONS.values():
        climb(tiny("partial", style), EXACT, positions)
    model, tokens = tiny("partial", style), torch.arange(8)[None]
    assert torch.allclose(model(tokens), model(tokens, positions=torch.arange(8) + 5), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(model(tokens), model(tokens, positions=torch.arange(8) * 2))


# ---- the score door --------------------------------------------------------------------------------------------------


def test_score_door_has_gradients(monkeypatch):
    """An encoding of our own making: scores fall with the distance, faster for a query with a larger sum."""

    def rows(positions, *config):
        return -0.1 * np.abs(positions[..., :, None] - positions[..., None, :]).astype(float)

    class Torch(model_torch.Encoding):
        def pairs(self, queries, keys):
            return rows(queries)

        def score(self, q, k, table):
            return table * q.sum(-1, keepdim=True)  # (B, H, T, S)

    def score_forward(scores, qk, table, own):
        return scores + table * qk[0].sum(-1, keepdims=True), (table, qk)

    def score_backward(dscores, cache):
        table, qk = cache
        dqk = np.zeros_like(qk)
        dqk[0] = (dscores * table).sum(-1, keepdims=True)
        return dscores, dqk, {}

    monkeypatch.setitem(model_torch.ENCODINGS, "nope", Torch)
    monkeypatch.setitem(model_numpy.ENCODINGS, "nope", N.Encoding(rows, score=(score_forward, score_backward)))
    climb(tiny(), EXACT)


# ---- one set of parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_torchs(preset):
    config = dataclasses.replace(PRESETS[preset].model, encoding=EncodingConfig("learned"), n_layers=2)
    with torch.device("meta"):
        theirs = {name: tuple(p.shape) for name, p in model_torch.GPT(config).named_parameters()}
    assert list(model_numpy.parameter_shapes(config).items()) == list(theirs.items())


@pytest.mark.parametrize("tied", [False, True])
def test_first_weights_are_torchs(tied):
    config = dataclasses.replace(tiny("learned").config, tied=tied)
    ours, theirs = model_numpy.init_params(config, 5), numpy_params(model_torch.GPT(config, 5))
    assert all(np.array_equal(ours[name], theirs[name]) and ours[name].dtype == np.float32 for name in theirs)
    assert not np.array_equal(ours["embedding.weight"], model_numpy.init_params(config, 6)["embedding.weight"])


def test_no_torch_is_needed():
    program = "import sys; sys.modules['torch'] = None\nimport model_numpy, expe, config"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# ---- training --------------------------------------------------------------------------------------------------------


def logged(run):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_both_backends_train_to_the_same_losses(tokens, tmp_path):
    mini, losses = PRESETS["mini"].train, {}
    rate = mini.lr_at(49)  # the climb to it over 50 steps is the beginning of mini's own warm-up
    for backend in ("torch", "numpy"):
        out = f"runs/{backend}"
        done = command(
            *("train.py", "--preset", "mini", "--vocab", "300", "--data", tokens, "--pe", "expe"),
            *("--steps", "50", "--lr", rate, "--warmup", "1", "--backend", backend, "--out", out),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        losses[backend] = logged(tmp_path / out)
    assert len(losses["torch"]) == 50
    differences = np.abs(np.subtract(*losses.values()))
    curve = "\n".join(f"{i:4} {a:.5f} {b:.5f}" for i, (a, b) in enumerate(zip(*losses.values(), strict=True), 1))
    assert differences.max() < 1e-3, f"step, torch, numpy:\n{curve}"
    assert losses["numpy"][-1] < losses["numpy"][0] - 1
    done = command("eval.py", "--lengths", "128,256", cwd=tmp_path)  # both runs, from the files of either backend
    rows = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("runs/")]
    assert done.returncode == 0 and len(rows) == 4, done.stdout + done.stderr
    for numpy_row, torch_row in (rows[:2], rows[2:]):
        for a, b in zip(numpy_row, torch_row, strict=True):
            assert abs(float(a.rstrip("*")) / float(b.rstrip("*")) - 1) < 5e-3


@pytest.fixture(scope="module")
def numpy_run(tokens, tmp_path_factory):
    """Flags of a run with dropout and micro-batches, the folder it was made in, and the run."""
    folder = tmp_path_factory.mktemp("numpy")
    flags = [*TINY, "--pe", "learned", "--data", tokens, "--steps", "40", "--dropout", "0.1", "--micro-batch", "2"]
    flags += ["--backend", "numpy", "--checkpoint-every", "10", "--eval-every", "20"]
    done = command("train.py", *flags, "--out", "runs/a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return flags, folder, folder / "runs" / "a"


def test_a_numpy_run_that_was_killed_goes_on_bit_for_bit(numpy_run, monkeypatch):
    flags, folder, run = numpy_run
    step = train.NumpyBackend.step

    def step_until_power_fails(self, batch, number):
        if number == 27:
            raise SystemExit(9)
        return step(self, batch, number)

    monkeypatch.setattr(train.NumpyBackend, "step", step_until_power_fails)
    assert command("train.py", *flags, "--out", "runs/b", cwd=folder).returncode == 9
    monkeypatch.undo()
    done = command("train.py", "--out", "runs/b", "--resume", cwd=folder)  # the backend is the run's own
    assert done.returncode == 0 and "steps 20 to 40" in done.stdout, done.stdout + done.stderr
    assert_same_weights_and_log(run, folder / "runs" / "b")
    state = [torch.load(r / "optimizer.pt", weights_only=True)["optimizer"] for r in (run, folder / "runs" / "b")]
    for key in ("m", "v"):
        assert all(torch.equal(state[0][key][name], state[1][key][name]) for name in state[0][key])


def assert_same_weights_and_log(a, b):
    first, second = (safetensors.numpy.load_file(run / "model.safetensors") for run in (a, b))
    assert all(np.array_equal(first[name], second[name]) for name in first | second)
    assert (a / "log.jsonl").read_text() == (b / "log.jsonl").read_text()


def test_micro_batches_change_nothing_but_rounding(tokens, tmp_path):
    for micro in (4, 1):
        flags = [*TINY, "--pe", "rope", "--data", tokens, "--steps", "5", "--backend", "numpy", "--micro-batch", micro]
        assert command("train.py", *flags, "--out", f"runs/{micro}", cwd=tmp_path).returncode == 0
    assert np.allclose(logged(tmp_path / "runs/4"), logged(tmp_path / "runs/1"), rtol=1e-5)


def test_torch_reads_what_numpy_wrote_and_numpy_what_torch_wrote(numpy_run, workplace):
    tokens = np.arange(32).reshape(2, 16)
    for run in (numpy_run[2], workplace / "runs" / "rope"):
        model, _ = model_torch.load_model(run)
        params = safetensors.numpy.load_file(run / "model.safetensors")
        logits, _ = model_numpy.forward(params, tokens, model.config)
        close("logits", logits, model(torch.from_numpy(tokens)).detach(), 1e-4)


def test_a_loss_that_is_not_finite_is_told_and_the_checkpoint_stays(tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--steps", "30", "--backend", "numpy", "--lr", "1e30"]
    done = command("train.py", *flags, "--out", "runs/a", cwd=tmp_path)
    assert "stopped: the loss is" in str(done.returncode) and "the checkpoint of step 0 stays" in str(done.returncode)


# ---- wrong input -----------------------------------------------------------------------------------------------------


def changed(params, name, value):
    return {**params, name: value}


def test_wrong_parameters_are_named():
    config = tiny().config
    good = model_numpy.init_params(config)
    tokens, name = np.zeros((1, 4), int), "blocks.1.attn.proj.weight"
    missing = {key: value for key, value in good.items() if key != name}
    for params, message in (
        (missing, rf"params lacks {name}, which should have the shape \(16, 16\)"),
        (changed(good, "blocks.2.norm1.weight", good["norm.weight"]), "unknown entry blocks.2.norm1.weight"),
        (changed(good, name, good[name][:, 1:]), rf"{name} must have the shape \(16, 16\), got \(16, 15\)"),
        (changed(good, name, good[name].astype(np.float16)), "NumPy array of float32 or float64, got float16"),
        (changed(good, name, good[name].tolist()), "NumPy array of float32 or float64, got list"),
        (changed(good, name, good[name].astype(np.float64)), "float32 throughout or float64 throughout, got both"),
        (None, "params must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            model_numpy.forward(params, tokens, config)


def test_wrong_tokens_targets_and_positions_are_named():
    config = tiny("learned").config
    params, good = model_numpy.init_params(config), np.zeros((2, 4), int)
    for tokens, message in (
        (good + V, f"tokens must be from 0 to {V - 1}, got {V}"),
        (good - 1, "got -1"),
        (good[0], r"tokens must have the shape \(B, T\), got \(4,\)"),
        (good[:, :0], r"got \(2, 0\)"),
        (good.astype(float), "tokens must be a NumPy array of integers, got float64"),
        ([[1, 2]], "tokens must be a NumPy array of integers, got list"),
        (np.zeros((1, T + 1), int), "learned has a row for each of the positions 0 to 11 .* none for position 12"),
    ):
        with pytest.raises(ValueError, match=message):
            model_numpy.forward(params, tokens, config)
    with pytest.raises(ValueError, match=r"tokens must have the shape \(B, T\), got \(4,\)"):
        model_numpy.loss_and_grads(params, good[0], good[0], config)
    logits, cache = model_numpy.forward(params, good, config)
    shape = r"dlogits must be float32 of \(2, 4, 40\), got "
    for dlogits, message in ((logits[:1], shape + "float32"), (logits.astype(float), shape + "float64")):
        with pytest.raises(ValueError, match=message):
            model_numpy.backward(dlogits, cache)
    wrong = r"targets must have the shape \(2, 4\), got \(2, 3\)"
    for targets, message in ((good[:, 1:], wrong), (good + V, "targets must be from 0")):
        with pytest.raises(ValueError, match=message):
            model_numpy.loss_and_grads(params, good, targets, config)
    for positions, message in (
        (np.arange(5), r"positions must be integers of shape \(4,\) or \(2, 4\), got int64 of \(5,\)"),
        (np.arange(4.0), "got float64"),
        (np.arange(4) - 1, "none for position -1"),
    ):
        with pytest.raises(ValueError, match=message):
            model_numpy.forward(params, good, config, positions)


def test_wrong_gradients_and_states_are_named():
    params = model_numpy.init_params(tiny().config)
    grads, state = {name: np.zeros_like(w) for name, w in params.items()}, model_numpy.adamw_state(params)
    with pytest.raises(ValueError, match=r"grads lacks norm.bias"):
        model_numpy.adamw_step(params, {n: g for n, g in grads.items() if n != "norm.bias"}, state, 1e-3)
    with pytest.raises(ValueError, match=r"grads: norm.bias must have the shape \(16,\), got \(3,\)"):
        model_numpy.adamw_step(params, changed(grads, "norm.bias", np.zeros(3)), state, 1e-3)
    with pytest.raises(ValueError, match="grads must be of the params' dtype, float32, got float64"):
        model_numpy.adamw_step(params, {n: g.astype(float) for n, g in grads.items()}, state, 1e-3)
    for wrong, message in (
        ({}, "state must be as adamw_state makes it"),
        (None, "state must be as adamw_state makes it"),
        ({**state, "step": "3"}, "state: step must be a whole number of at least 0, got '3'"),
        ({**state, "step": -1}, "got -1"),
        ({**state, "v": {n: v.astype(float) for n, v in state["v"].items()}}, "float32, float32, float64"),
    ):
        with pytest.raises(ValueError, match=message):
            model_numpy.adamw_step(params, grads, wrong, 1e-3)
    with pytest.raises(ValueError, match="params is empty"):
        model_numpy.adamw_step({}, {}, model_numpy.adamw_state({}), 1e-3)
    other = model_numpy.adamw_state(model_numpy.init_params(tiny(d_mlp=24).config))
    with pytest.raises(ValueError, match=r"state m: blocks.0.mlp.up.weight must have the shape \(40, 16\), got \(24"):
        model_numpy.adamw_step(params, grads, other, 1e-3)
    assert state["step"] == 0 and other["step"] == 0


def test_wrong_masks_are_named():
    config, tokens = tiny(dropout=0.5).config, np.zeros((2, 4), int)
    params, rng = model_numpy.init_params(config), np.random.default_rng(0)
    good = list(model_numpy.dropout_masks(config, 2, 4, rng))
    for masks, message in (
        (good[1:], "masks must be 5, one for the embedding and two for each block, got 4"),
        ([m.astype(float) for m in good], r"masks must be float32 of \(2, 4, 16\), got float64"),
        ([m[:, 1:] for m in good], r"got float32 of \(2, 3, 16\)"),
        ([1.0] * 5, r"got float of \(\)"),
        ([m.tolist() for m in good], r"got list of \(2, 4, 16\)"),
        (5, "got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model_numpy.forward(params, tokens, config, masks=masks)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--device", "cuda"], "--backend numpy computes on the CPU"),
        (["--compile"], "leave out --compile and --device"),
        (["--dtype", "bf16"], "dtype must be fp32 for the NumPy backend (--dtype fp32), got 'bf16'"),
    ],
)
def test_flags_that_numpy_has_no_use_for(flags, message, tokens, tmp_path):
    done = command("train.py", "--backend", "numpy", *TINY, "--data", tokens, *flags, cwd=tmp_path)
    assert message in refused(done) and not (tmp_path / "runs").exists()


def test_an_unknown_backend_and_a_change_of_backend_are_refused(numpy_run):
    _, folder, _ = numpy_run
    assert "--backend: invalid choice: 'jax'" in refused(command("train.py", "--backend", "jax", cwd=folder))
    done = command("train.py", "--out", "runs/a", "--resume", "--backend", "torch", cwd=folder)
    assert "backend is numpy in runs/a and torch by these flags" in refused(done)
