"""The NumPy twin: broken backwards that the check ladder must catch, finite differences, parameters, training.

tests/test_ladder.py compares whole models of both backends.
"""

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import command
from test_ladder import BLOCKS, EXACT, POSITIONS, SOFTMAXES, B, T, V, climb, close, numpy_params, tiny

import model_numpy
import model_torch
from positional_encodings import ENCODINGS
from zoo import ablations, llama


@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder_in_float32(pe):
    # float32 keeps 1.2e-7 of a number; sums over some dozen terms, two blocks deep, lose two digits of it, and AdamW
    # divides by the root of a mean square, which makes an error of a small gradient as large as that of a large one.
    climb(tiny(pe).float(), 1e-3, steps=3)


# ---- the ladder can fail ---------------------------------------------------------------------------------------------


def swap(monkeypatch, module, old, new):
    """Give a module what its source makes once one piece of it is changed."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    changed = types.ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(changed))
    for name, value in vars(changed).items():
        monkeypatch.setattr(module, name, value, raising=False)


BROKEN = [
    (model_numpy, "(rows @ w)", "(-rows @ w)", "nope", "gpt", "gradient of norm.bias"),
    (model_numpy, "dw[used] = np", "dw[used] = -np", "nope", "gpt", "gradient of embedding.weight"),
    (model_numpy, "else dout * mask", "else dout", "nope", "gpt", "gradient of blocks.1.mlp.down.weight"),
    (model_numpy, "- z * along_z", "+ z * along_z", "nope", "gpt", "gradient of blocks.1.mlp.down"),
    (model_numpy, "dz - dz.mean", "dz + dz.mean", "nope", "gpt", "gradient of blocks.1.mlp.down"),
    (llama, "- z * along_z", "+ z * along_z", "nope", "llama", "gradient of blocks.1.mlp.down"),
    (model_numpy, "twice_du * (1 - s)", "twice_du * (1 + s)", "nope", "gpt", "gradient of blocks.1.mlp.up"),
    (llama, "gate * (1 - s))", "gate * (1 + s))", "nope", "llama", "gradient of blocks.1.mlp.gate"),
    (model_numpy, "pull_up(pull_gelu", "pull_up(-pull_gelu", "nope", "gpt", "gradient of blocks.1.mlp.up"),
    (llama, "dh_up + dh_gate", "dh_up - dh_gate", "nope", "llama", "gradient of blocks.1.norm2"),
    (model_numpy, "dout.sum(0) if", "-dout.sum(0) if", "learned", "gpt", "gradient of encoding.weight"),
    (model_numpy, "dh[..., :l] = 0", "dh[..., :l] *= 1", "expe", "gpt", "gradient of blocks.1.norm1"),
    (ablations, "np.array([np.vdot", "-np.array([np.vdot", "learn", "gpt", "gradient of encoding.weight"),
    (model_numpy, "dq, cos, -sin", "dq, cos, sin", "rope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "dk, cos, -sin", "dk, cos, sin", "rope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "dp -= ", "dp += ", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "dq = scale", "dq = -scale", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "dk = scale", "dk = -scale", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "+ dq_score", "- dq_score", "cope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "+ dk_score", "- dk_score", "cope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "dh + dh_score", "dh - dh_score", "fox", "gpt", "gradient of blocks.1.norm1"),
    (model_numpy, "part not in on", "part in on", "exqpe", "gpt", "gradient of blocks.1.norm1"),
    (model_numpy, "dparts[1] + dparts[2]", "dparts[1] - dparts[2]", "nope", "gpt", "gradient of blocks.1.norm1"),
    (model_numpy, "((dw_q, dw_k, dw_v))", "((dw_q, -dw_k, dw_v))", "nope", "gpt", "blocks.1.attn.qkv"),
    (model_numpy, 'proj.weight": dw', 'proj.weight": -dw', "nope", "gpt", "gradient of blocks.1.attn.proj"),
    (model_numpy, "pull_bias(np.", "pull_bias(-np.", "t5", "gpt", "gradient of encoding.weight"),
    (model_numpy, "(y[..., None, :]", "(-y[..., None, :]", "shaw", "gpt", "logits"),
    (model_numpy, "return dby_distance @", "return -dby_distance @", "shaw", "gpt", "gradient of encoding"),
    (model_numpy, "dkeys = ", "dkeys = -", "shaw", "gpt", "gradient of encoding.keys"),
    (model_numpy, "swapaxes(-1, -2), dy", "swapaxes(-1, -2), -dy", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "return dy @", "return -dy @", "nope", "gpt", "gradient of blocks.1.attn.qkv"),
    (model_numpy, "to_keys(dy", "to_keys(-dy", "shaw", "gpt", "gradient of encoding"),
    (model_numpy, '{"values": by', '{"values": -by', "shaw", "gpt", "gradient of encoding.values"),
    (model_numpy, "dx += dout", "dx -= dout", "nope", "gpt", "gradient of blocks.1.attn.proj"),
    (model_numpy, "p[at_target] -= 1", "p[at_target] += 1", "nope", "gpt", "gradient of head"),
    (model_numpy, "(dlosses * counted)", "(dlosses)", "nope", "gpt", "gradient of head"),
    (model_numpy, "limit / (norm", "-limit / (norm", "nope", "gpt", "loss of step 1"),
    (model_numpy, "w *= 1 - lr * decay", "w *= 1 + lr * decay", "nope", "gpt", "loss of step 1"),
    (model_numpy, "if w.ndim >= 2", "if w.ndim >= 1", "nope", "gpt", "loss of step 1"),
]


@pytest.mark.parametrize("module, old, new, pe, style, caught_at", BROKEN, ids=lambda value: str(value)[:20])
def test_ladder_catches_a_flipped_sign(monkeypatch, module, old, new, pe, style, caught_at):
    kind = dict(pe="expe", variant={"learn": "init"}) if pe == "learn" else dict(pe=pe)
    model = tiny(style=style, dropout=0.3, window=5, **kind)
    swap(monkeypatch, module, old, new)
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
    original = model_numpy.build_encoding

    def changed(settings, config):
        encoding = original(settings, config)
        return encoding._replace(each_block=value) if settings.pe == pe else encoding

    monkeypatch.setattr(model_numpy, "build_encoding", changed)


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


@pytest.mark.parametrize("pe, changes, shared", [
    ("t5", dict(layers=3), [0, 1, 2]), ("t5", dict(layers=4, nope_every=2), [0, 2]), ("fox", {}, []),
    ("t5+sinks", {}, []), ("learned+sinks", dict(layers=3, nope_every=3), [0, 1]),
    ("t5", dict(layers=5, cycle="t5:window=3,t5:buckets=4:max_distance=3,kerple,t5"), [0, 3, 4]),
    ("fox", dict(layers=4, cycle="fox,t5"), [])], ids=str)
def test_blocks_with_the_settings_of_pe_share_an_encoding_and_all_others_have_their_own(pe, changes, shared):
    model = tiny(pe, **changes)
    plans = model_numpy.encodings_of_blocks(model.config)
    own = [f"blocks.{i}.attn.encoding." for i in range(model.config.layers)]
    assert [plan.prefix for plan in plans] == ["encoding." if i in shared else own[i] for i in range(len(own))]
    modules = [block.attn.encoding for block in model.blocks]
    assert all((modules[i] is modules[j]) == (i == j or {i, j} <= {*shared}) for i, j in np.ndindex(len(own), len(own)))
    assert (model.encoding is modules[shared[0]]) if shared else model.encoding is None
    names = [plan.prefix + name for plan, module in zip(plans, modules, strict=True)
             for name, _ in module.named_parameters()]
    assert {*names} == {name for name in model.state_dict() if "encoding." in name}


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
    (np.arange(4.0), "positions must be integers from .*, got an array of float64"),
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
