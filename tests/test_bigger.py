"""What the larger presets need: they train, in the memory said, and activation checkpointing changes no number."""

import dataclasses
import json

import pytest
import safetensors.numpy
import torch
from conftest import TINY, command

import model_numpy
import runs
import train
from config import ENCODINGS, PRESETS, ModelConfig, make_encoding

SMALL = ModelConfig(3, 64, 4, context=32, vocab_size=50, dropout=0.1)


def made(config, **changes):
    """A GPT in training, as train.py makes it."""
    changes = {"dtype": "fp32", "micro_batch": 2, "batch_size": 2, **changes}
    return train.TorchBackend(config, dataclasses.replace(PRESETS["mini"].train, **changes), torch.device("cpu"), False)


def some_tokens(config, batch=2):
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pe", ENCODINGS)
def test_activation_checkpointing_changes_no_bit_of_the_loss_and_the_gradients(pe):
    config, found = dataclasses.replace(SMALL, encoding=make_encoding(pe)), []
    for checkpointed in (False, True):
        model = made(config, activation_checkpointing=checkpointed).model.train()
        ran = []
        for block in model.blocks:
            block.mlp.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        torch.manual_seed(7)
        loss = model(some_tokens(config), some_tokens(config))
        loss.backward()
        found.append([loss, *(w.grad for w in model.parameters())])
        assert len(ran) == 3 * (1 + checkpointed)  # forward, and for the gradient again
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def kept(config, batch, **changes):
    """Bytes that autograd keeps of a forward pass, weights and what is made of them alone left out by a difference."""
    backend, sizes = made(config, **changes), []
    for n in (batch, 2 * batch):
        model, found, own = backend.model.train(), {}, {id(w) for w in backend.model.parameters()}

        def keep(x, found=found, own=own):
            if id(x) not in own:
                found[x.untyped_storage().data_ptr()] = x  # held, or else its place would be taken by another
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), backend.autocast:
            model(some_tokens(config, n), some_tokens(config, n))
        sizes.append(sum(x.untyped_storage().nbytes() for x in found.values()))
    return sizes[1] - sizes[0]


@pytest.mark.parametrize("preset", ["paper-35m", "llama-135m"])
@pytest.mark.parametrize("pe", ["nope", "expe", "rope"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_need_the_memory_that_is_said(preset, pe, dtype):
    """Of the blocks: two numbers of layers are compared, so that embedding and loss drop out."""
    by_layers = []
    for layers in (1, 3):
        config = dataclasses.replace(PRESETS[preset].model, n_layers=layers, context=64, vocab_size=64,
                                     encoding=make_encoding(pe))  # fmt: skip
        config_of_run = dataclasses.replace(PRESETS[preset].train, batch_size=2, micro_batch=2, dtype=dtype)
        said = train.memory_of(config, config_of_run)[1]
        by_layers.append((kept(config, 2, dtype=dtype), said))
    found, said = (b - a for a, b in zip(*by_layers, strict=True))
    assert said == pytest.approx(found, rel=0.16)


def test_checkpointed_blocks_keep_their_inputs_alone():
    by_layers = [kept(dataclasses.replace(SMALL, n_layers=n, dropout=0.0), 2, activation_checkpointing=True)
                 for n in (1, 3)]  # fmt: skip
    assert by_layers[1] - by_layers[0] == 2 * (2 * 32) * 64 * 4  # blocks, tokens, width, bytes
    config = dataclasses.replace(PRESETS["mini"].train, batch_size=2, micro_batch=2,
                                 activation_checkpointing=True)  # fmt: skip
    said = [train.memory_of(dataclasses.replace(SMALL, n_layers=n), config)[1] for n in (1, 3)]
    assert said[1] - said[0] == by_layers[1] - by_layers[0]


def test_a_checkpointed_run_is_the_same_run(tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--steps", "3", "--dropout", "0.1", "--pe", "expe"]
    for name, more in (("a", []), ("b", ["--activation-checkpointing"])):
        done = command("train.py", *flags, *more, "--out", f"runs/{name}", cwd=tmp_path)
        assert done.returncode == 0 and "GFLOPs a token, about 0.0" in done.stdout, done.stderr
    for name in runs.CHECKPOINT:
        a, b = ((tmp_path / "runs" / run / name).read_bytes() for run in "ab")
        assert a == b


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama-135m", "llama-342m"])
def test_the_papers_larger_models_train(preset, tokens, tmp_path):
    """At their own depth, width and number format; vocabulary, context and batch are cut, the batch still of parts."""
    flags = ["--preset", preset, "--data", tokens, "--vocab", "300", "--context", "32", "--batch-size", "4",
             "--micro-batch", "2", "--steps", "4", "--warmup", "0.25", "--activation-checkpointing"]  # fmt: skip
    done = command("train.py", *flags, "--out", "runs/a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (tmp_path / "runs" / "a" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in losses if "loss" in line]
    assert losses[-1] < losses[0] - 0.2 and "2 x 32" not in done.stdout
    model, config, _ = runs.read_run(tmp_path / "runs" / "a")
    assert config.dtype == "bf16" and config.batch_size // config.micro_batch == 2
    weights = safetensors.numpy.load_file(tmp_path / "runs" / "a" / "model.safetensors")
    full = PRESETS[preset].model
    for name, shape in model_numpy.parameter_shapes(full).items():
        cut = tuple(300 if size == full.vocab_size else size for size in shape)
        assert weights.pop(name).shape == cut, name
    assert not weights and full.tied == (preset == "llama-342m")
