"""The NumPy twin: broken backwards that the check ladder must catch, finite differences, parameters, training.

tests/test_ladder.py compares whole models of both backends.
"""

import inspect
import json

import numpy as np
import pytest
import torch
from conftest import command
from test_ladder import BLOCKS, EXACT, POSITIONS, SOFTMAXES, B, T, V, climb, close, numpy_params, tiny

import model_numpy
import model_torch
from config import ENCODINGS
from zoo import ablations, llama


@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder_in_float32(pe):
    # float32 keeps 1.2e-7 of a number; sums over some dozen terms, two blocks deep, lose two digits of it, and AdamW
    # divides by the root of a mean square, which makes an error of a small gradient as large as that of a large one.
    climb(tiny(pe).float(), 1e-3, steps=3)


# ---- the ladder can fail ---------------------------------------------------------------------------------------------


DOORS = ("embed", "override", "rotate", "score", "softmax", "value")


def swap(monkeypatch, name, old, new):
    """Put a copy of a function of model_numpy, with one piece of its source changed, wherever the function is used."""
    module = next(module for module in (model_numpy, llama, ablations) if hasattr(module, name))
    original = getattr(module, name)
    source = inspect.getsource(original)
    body = source.split('"""')[-1]  # beyond the docstring
    assert body.count(old) == 1, (name, old)
    scope = dict(vars(module))
    exec(source.removesuffix(body) + body.replace(old, new), scope)
    changed = lambda pair: tuple(scope[name] if f is original else f for f in pair)  # noqa: E731
    monkeypatch.setattr(module, name, scope[name])
    for table in (model_numpy.LAYERS, llama.LAYERS):
        for key, pair in table.items():
            monkeypatch.setitem(table, key, changed(pair))
    original_doors = model_numpy.doors_of

    def doors_with_it(of, config):
        doors = original_doors(of, config)
        return doors._replace(**{door: changed(getattr(doors, door)) for door in DOORS})

    monkeypatch.setattr(model_numpy, "doors_of", doors_with_it)


BROKEN = [
    ("linear_backward", "dout @ w", "-dout @ w", "nope", "gpt", "gradient of norm.bias"),
    ("embedding_backward", "dw[used] = np", "dw[used] = -np", "nope", "gpt", "gradient of embedding.weight"),
    ("dropout_backward", "dout * mask", "dout", "nope", "gpt", "gradient of blocks.1.mlp.down.weight"),
    ("layernorm_backward", "- z * along_z", "+ z * along_z", "nope", "gpt", "gradient of blocks.1.mlp.down"),
    ("layernorm_backward", "dz - dz.mean", "dz + dz.mean", "nope", "gpt", "gradient of blocks.1.mlp.down"),
    ("rmsnorm_backward", "- z * along_z", "+ z * along_z", "nope", "llama", "gradient of blocks.1.mlp.down"),
    ("gelu_backward", "1 - s", "1 + s", "nope", "gpt", "gradient of blocks.1.mlp.up"),
    ("swiglu_backward", "(1 - s)", "(1 + s)", "nope", "llama", "gradient of blocks.1.mlp.gate"),
    ("gelu_mlp_backward", "(dup", "(-dup", "nope", "gpt", "gradient of blocks.1.mlp.up"),
    ("swiglu_mlp_backward", "dh_up + dh_gate", "dh_up - dh_gate", "nope", "llama", "gradient of blocks.1.norm2"),
    ("add_learned_backward", "dout.sum(0)", "-dout.sum(0)", "learned", "gpt", "gradient of encoding.weight"),
    ("phi_backward", "dh[..., :l] = 0", "dh[..., :l] *= 1", "expe", "gpt", "gradient of blocks.1.norm1"),
    ("learned_phi_backward", "np.array([np", "-np.array([np", "learn", "gpt", "gradient of encoding.weight"),
    ("rotate_backward", "dq, cos, -sin", "dq, cos, sin", "rope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("rotate_backward", "dk, cos, -sin", "dk, cos, sin", "rope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("mask", "never, -window", "never, 1 - window", "nope", "gpt", "logits"),
    ("mask", "never, 1)", "never, 2)", "nope", "gpt", "logits"),
    ("softmax_backward", "dp -= ", "dp += ", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("attend_backward", "dq *= 1", "dq *= -1", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("attend_backward", "dk *= 1", "dk *= -1", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("attend_backward", "dq += ", "dq -= ", "cope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("attend_backward", "dk += ", "dk -= ", "cope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("attention_backward", "dh + dh_score", "dh - dh_score", "fox", "gpt", "gradient of blocks.1.norm1"),
    ("override_backward", "part not in parts", "part in parts", "exqpe", "gpt", "gradient of blocks.1.norm1"),
    ("override_shut_backward", "dk + dv", "dk - dv", "nope", "gpt", "gradient of blocks.1.norm1"),
    ("project_backward", "((dw_q, dw_k, dw_v))", "((dw_q, -dw_k, dw_v))", "nope", "gpt", "blocks.1.attn.qkv"),
    ("output_backward", "proj.weight\": dw", "proj.weight\": -dw", "nope", "gpt", "gradient of blocks.1.attn.proj"),
    ("t5_score_backward", "(np.moveaxis(", "(-np.moveaxis(", "t5", "gpt", "gradient of encoding.weight"),
    ("spread_backward", "dout[..., None", "-dout[..., None", "shaw", "gpt", "logits"),
    ("shaw_score_backward", "return dq", "return -dq", "shaw", "gpt", "gradient of encoding"),
    ("shaw_score_backward", "dkeys = ", "dkeys = -", "shaw", "gpt", "gradient of encoding.keys"),
    ("value_backward", "swapaxes(-1, -2), dy", "swapaxes(-1, -2), -dy", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("value_backward", "return dy @", "return -dy @", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    ("shaw_value_backward", "forward(dy", "forward(-dy", "shaw", "gpt", "gradient of encoding"),
    ("shaw_value_backward", "dvalues = ", "dvalues = -", "shaw", "gpt", "gradient of encoding.values"),
    ("block_backward", "dx += dout", "dx -= dout", "nope", "gpt", "gradient of blocks.1.attn.proj"),
    ("cross_entropy_backward", "-= 1", "+= 1", "nope", "gpt", "gradient of head"),
    ("cross_entropy_backward", "dlosses * counted", "dlosses", "nope", "gpt", "gradient of head"),
    ("clip_grads", "limit / (norm", "-limit / (norm", "nope", "gpt", "loss of step 1"),
    ("adamw_step", "w *= 1 - lr * decay", "w *= 1 + lr * decay", "nope", "gpt", "loss of step 1"),
    ("adamw_step", "if w.ndim >= 2", "if w.ndim >= 1", "nope", "gpt", "loss of step 1"),
]


@pytest.mark.parametrize("name, old, new, pe, style, caught_at", BROKEN)
def test_ladder_catches_a_flipped_sign(monkeypatch, name, old, new, pe, style, caught_at):
    kind = dict(pe="expe", variant={"learn": "init"}) if pe == "learn" else dict(pe=pe)
    model = tiny(style=style, dropout=0.3, window=5, **kind)
    swap(monkeypatch, name, old, new)
    with pytest.raises(AssertionError, match=caught_at):
        climb(model, EXACT)


# ---- without PyTorch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style, pe", [
    *(("gpt", pe) for pe in ENCODINGS), *(("gpt", f"expe+{kind}") for kind in SOFTMAXES), ("llama", "nope")])
def test_each_gradient_is_the_slope_of_the_loss(style, pe):
    """Along a random direction in each parameter, by central differences, whose error is about 1e-5^2 = 1e-10."""
    model, rng = tiny(pe, style, layers=1), np.random.default_rng(0)
    params, (tokens, targets) = numpy_params(model), rng.integers(0, V, (2, B, T))
    loss_at = lambda params: model_numpy.loss_and_grads(params, tokens, targets, model.config)[0]  # noqa: E731
    for name, gradient in model_numpy.loss_and_grads(params, tokens, targets, model.config)[1].items():
        direction = rng.standard_normal(gradient.shape)
        high, low = (loss_at(params | {name: params[name] + step * direction}) for step in (1e-5, -1e-5))
        error = abs((high - low) / 2e-5 - (gradient * direction).sum())
        assert error <= 1e-6 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("limit", [0.5, 5.1])
def test_gradients_are_clipped_as_torch_clips_them(limit):
    grads = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}        # of norm 5
    w = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in grads.values()]
    for x, g in zip(w, grads.values(), strict=True):
        x.grad = torch.from_numpy(g.copy())
    norm = torch.nn.utils.clip_grad_norm_(w, limit)
    assert model_numpy.clip_grads(grads, limit) == norm.item() == 5
    for x, g in zip(w, grads.values(), strict=True):
        np.testing.assert_allclose(g, x.grad.numpy(), rtol=1e-12)


def test_dropout_masks_keep_the_mean():
    config = tiny(dropout=0.3, layers=1).config
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


# ---- parameters of the encodings -------------------------------------------------------------------------------------


def set_each_block(monkeypatch, pe, value=True):
    """Let each block have parameters of its own of an encoding, or let all share them."""
    original = model_numpy.doors_of

    def changed(settings, config):
        doors = original(settings, config)
        return doors._replace(each_block=value) if settings.pe == pe else doors

    monkeypatch.setattr(model_numpy, "doors_of", changed)


@pytest.mark.parametrize("blocks", [{}, BLOCKS["both"]], ids=["plain", "both"])
@pytest.mark.parametrize("each_block", [False, True])
def test_own_parameters_lie_in_the_blocks_that_have_them(each_block, blocks, monkeypatch):
    set_each_block(monkeypatch, "t5", each_block)
    config, blind = tiny("t5", **blocks).config, (1, 3) if "nope_every" in blocks else ()
    names = [f"blocks.{i}.attn.encoding.weight" for i in range(config.layers) if i not in blind]
    ours, model = model_numpy.init_params(config, 5), model_torch.GPT(config, 5)
    assert [name for name in ours if "encoding" in name] == (names if each_block else ["encoding.weight"])
    assert list(ours) == [name for name, _ in model.named_parameters()]
    assert len({ours[name].tobytes() for name in ours if "encoding" in name}) == (len(names) if each_block else 1)
    objects = {id(model.blocks[i].attn.encoding) for i in range(config.layers) if i not in blind}
    assert len(objects) == (len(names) if each_block else 1)
    assert all(not list(model.blocks[i].attn.encoding.parameters()) for i in blind)
    plain = model_numpy.init_params(tiny(**blocks).config, 5)
    assert all(np.array_equal(ours[name], plain[name]) for name in plain)


# ---- training --------------------------------------------------------------------------------------------------------


def read_losses(run):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_both_backends_train_to_the_same_losses(tokens, tmp_path):
    flags = ["--preset", "mini", "--context", "32", "--width", "64", "--layers", "1", "--vocab", "300"]
    flags += ["--data", tokens, "--steps", "30"]
    for backend in ("torch", "numpy"):
        done = command("train.py", *flags, "--backend", backend, "--out", f"runs/{backend}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert command("train.py", *flags, "--backend", "numpy", "--fast", "--out", "fast", cwd=tmp_path).returncode == 0
    by_torch, by_numpy = (np.array(read_losses(tmp_path / "runs" / backend)) for backend in ("torch", "numpy"))
    assert len(by_torch) == 30 and by_numpy[-1] < by_numpy[0] - 1
    assert abs(by_numpy - by_torch).max() < 1e-3
    assert read_losses(tmp_path / "fast") == by_numpy.tolist()
    done = command("eval.py", "--lengths", "32,64", "--json", "rows.json", cwd=tmp_path)  # of both runs
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 4
    for a, b in zip(rows[:2], rows[2:], strict=True):
        assert a["length"] == b["length"] and abs(a["loss"] / b["loss"] - 1) < 5e-3


# ---- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions, message", [
    (np.arange(4.0), "positions must be integers, got an array of float64"),
    (np.arange(4) - 1, "learned has a row for each of the positions 0 to 11 .* none for position -1"),
    (np.arange(4) + T, "none for position 12"),
])
def test_both_backends_refuse_positions_that_no_row_belongs_to(positions, message):
    model = tiny("learned")
    tokens = np.zeros((2, 4), int)
    with pytest.raises(ValueError, match=message):
        model(torch.from_numpy(tokens), positions=positions)
    with pytest.raises(ValueError, match=message):
        model_numpy.forward(numpy_params(model), tokens, model.config, positions)
