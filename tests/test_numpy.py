"""The NumPy twin: broken backwards that the check ladder must catch, each layer by itself, first weights, training.

tests/test_ladder.py compares whole models of both backends.
"""

import inspect
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, command, read_log
from test_ladder import BLOCKS, EXACT, POSITIONS, B, T, V, climb, close, numpy_params, tiny

import common
import model_numpy
import model_torch
import train
from config import ENCODINGS
from expe import rope_table
from zoo import ablations, llama


@pytest.mark.parametrize("pe", ENCODINGS)
def test_ladder_in_float32(pe):
    # float32 keeps 1.2e-7 of a number; sums over some dozen terms, two blocks deep, lose two digits of it, and AdamW
    # divides by the root of a mean square, which makes an error of a small gradient as large as that of a large one.
    climb(tiny(pe).float(), 1e-3)


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


def seen(T, causal, window):
    """[query, key]: whether it is seen, one by one."""
    return torch.tensor([[(n <= m or not causal) and (n > m - window or not window) for n in range(T)]
                         for m in range(T)])


def softmax(*how):
    """The layer of the masked softmax, of (causal, window)."""
    return (lambda scores: N.softmax_forward(N.mask(scores.copy(), *how), {}),
            lambda dp, p: N.softmax_backward(dp, p)[0], [random(2, 4, 4)],
            lambda scores: scores.masked_fill(~seen(4, *how), -math.inf).softmax(-1))


def attention(*how):
    return (lambda q, k, v: N.attend_forward(q, k, v, None, N.Encoding(), None, {}, *how),
            lambda dy, cache: N.attend_backward(dy, cache)[:3], [random(2, 3, 5, 4, seed=i) for i in range(3)],
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen(5, *how)))


def torch_rotate(q, k):
    """The pair as one complex number, times e^(i angle); queries, then keys."""
    angle = torch.complex(*torch.from_numpy(COS_SIN).chunk(2, -1))
    z = [torch.complex(*x.chunk(2, -1)) * angle for x in (q, k)]
    return torch.stack([torch.cat((x.real, x.imag), -1) for x in z])


def both_turned(q, k):
    q, k, cache = N.rotate_forward(q, k, COS_SIN, {})
    return np.stack((q, k)), cache


def t5_bias(w):
    bias, cache = N.t5_score_forward(None, None, None, INDEX, {"weight": w})
    return np.broadcast_to(bias, (2, 2, 3, 3)), cache  # of two sequences, whose gradients it sums


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
        lambda x, w: llama.rmsnorm_forward(x, 1e-5, w),
        llama.rmsnorm_backward,
        [random(2, 3, 6), random(6)],
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
    ),
    "gelu": (N.gelu_forward, N.gelu_backward, [3 * random(4, 5)], lambda x: F.gelu(x, approximate="tanh")),
    "swiglu": (
        llama.swiglu_forward,
        llama.swiglu_backward,
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
        by_name(llama.swiglu_mlp_forward, "gate.weight", "up.weight", "down.weight"),
        llama.swiglu_mlp_backward,
        [random(2, 3, 4), random(7, 4), random(7, 4, seed=1), random(4, 7)],
        lambda h, gate, up, down: (F.silu(h @ gate.T) * (h @ up.T)) @ down.T,
    ),
    "softmax": softmax(True, 0),
    "softmax, window": softmax(True, 2),
    "softmax, not causal": softmax(False, 0),
    "attend": attention(True, 0),
    "attend, window": attention(True, 3),
    "attend, not causal": attention(False, 0),
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
    "phi": (
        lambda h: N.phi_forward(h, TABLE, {}),
        N.phi_backward,
        [random(2, 5, 9)],
        lambda h: torch.cat((torch.from_numpy(TABLE).expand(2, 5, 4), h[..., 4:]), -1),
    ),
    "learned_phi": (
        lambda h, w: ablations.learned_phi_forward(h, TRIPLE, {"weight": w}),
        ablations.learned_phi_backward,
        [random(2, 5, 9), random(2)],
        lambda h, w: torch.cat((affine(w).expand(2, 5, 4), h[..., 4:]), -1),
    ),
    "spread": (
        lambda x: N.spread_forward(x, INDEX, 3),
        N.spread_backward,
        [random(2, 2, 3, 4)],
        lambda x: torch.stack([x[:, :, m, INDEX[m]] for m in range(3)], 2),
    ),
    "t5_score": (
        t5_bias,
        lambda d, cache: N.t5_score_backward(d, cache)[3],
        [random(4, 2)],
        lambda w: w[INDEX].permute(2, 0, 1).expand(2, 2, 3, 3),
    ),
    "shaw_score": (
        lambda q, a: N.shaw_score_forward(q, q, None, INDEX, {"keys": a}),
        lambda d, cache: N.shaw_score_backward(d, cache)[::3],
        [random(2, 2, 3, 5), random(4, 5)],
        lambda q, a: torch.einsum("bhtd,tsd->bhts", q, a[INDEX]) / math.sqrt(5),
    ),
    "shaw_value": (
        lambda p, v, a: N.shaw_value_forward(p, v, INDEX, {"values": a}),
        N.shaw_value_backward,
        [random(2, 2, 3, 3), random(2, 2, 3, 5), random(4, 5)],
        lambda p, v, a: p @ v + torch.einsum("bhts,tsd->bhtd", p, a[INDEX]),
    ),
    "rotate": (
        both_turned,
        lambda d, cache: N.rotate_backward(*d, cache)[:2],
        [random(2, 2, 3, 8), random(2, 2, 3, 8, seed=1)],
        torch_rotate,
    ),
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
    pairs = {name for name in vars(model_numpy) if name.endswith("_backward")} - {"no_score_backward"}  # returns zeros
    assert pairs <= {f"{layer.split(',')[0]}_backward" for layer in LAYERS} | {name for name, *_ in BROKEN}


@pytest.mark.parametrize("limit", [0.5, 4.9, 5.1, 100.0])
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


# ---- parameters of the encodings -------------------------------------------------------------------------------------


def set_each_block(monkeypatch, pe, value=True):
    """Let each block have parameters of its own of an encoding, or let all share them."""
    original = model_numpy.doors_of

    def changed(settings, config):
        doors = original(settings, config)
        return doors._replace(each_block=value) if settings.pe == pe else doors

    monkeypatch.setattr(model_numpy, "doors_of", changed)


@pytest.mark.parametrize("blocks", [{}, *BLOCKS.values()], ids=["plain", *BLOCKS])
@pytest.mark.parametrize("each_block", [False, True])
def test_own_parameters_lie_in_the_blocks_that_have_them(each_block, blocks, monkeypatch):
    set_each_block(monkeypatch, "t5", each_block)
    config, blind = tiny("t5", **blocks).config, (1, 3) if "nope_every" in blocks else ()
    names = [f"blocks.{i}.attn.encoding.weight" for i in range(config.n_layers) if i not in blind]
    ours, model = model_numpy.init_params(config, 5), model_torch.GPT(config, 5)
    assert [name for name in ours if "encoding" in name] == (names if each_block else ["encoding.weight"])
    assert list(ours) == [name for name, _ in model.named_parameters()]
    assert len({ours[name].tobytes() for name in ours if "encoding" in name}) == (len(names) if each_block else 1)
    objects = {id(model.blocks[i].attn.encoding) for i in range(config.n_layers) if i not in blind}
    assert len(objects) == (len(names) if each_block else 1)
    assert all(not list(model.blocks[i].attn.encoding.parameters()) for i in blind)
    plain = model_numpy.init_params(tiny(**blocks).config, 5)
    assert all(np.array_equal(ours[name], plain[name]) for name in plain)


# ---- training --------------------------------------------------------------------------------------------------------


def read_losses(run):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_both_backends_train_to_the_same_losses(tokens, tmp_path):
    flags = ["--preset", "mini", "--context", "32", "--width", "64", "--layers", "2", "--vocab", "300"]
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


@pytest.fixture(scope="module")
def numpy_run(tokens, tmp_path_factory):
    """Flags of a run with dropout and micro-batches, the folder it was made in, and the run."""
    folder = tmp_path_factory.mktemp("numpy")
    flags = [*TINY, "--pe", "learned", "--data", tokens, "--steps", "40", "--dropout", "0.1", "--micro-batch", "2"]
    flags += ["--backend", "numpy", "--checkpoint-every", "10", "--eval-every", "20"]
    done = command("train.py", *flags, "--out", "runs/a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return flags, folder, folder / "runs" / "a"


def test_a_numpy_run_that_was_killed_resumes_bit_for_bit(numpy_run, monkeypatch):
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
    (first, info), (second, again) = (common.read_checkpoint(r) for r in (run, folder / "runs" / "b"))
    assert info["step"] == again["step"] == 40 and info["sha256"] == again["sha256"] and first.keys() == second.keys()
    assert read_log(run) == read_log(folder / "runs" / "b")


def test_torch_reads_what_numpy_wrote_and_numpy_what_torch_wrote(numpy_run, workplace):
    tokens = np.arange(32).reshape(2, 16)
    for run in (numpy_run[2], workplace / "runs" / "rope"):
        model, _ = common.load_model(run)
        logits, _ = model_numpy.forward(common.read_checkpoint(run)[0], tokens, model.config)
        close("logits", logits, model(torch.from_numpy(tokens)).detach(), 1e-4)


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
