"""Ready for a GPU, without one: every encoding computes on another device, never waits for it, and compiles whole.

The device is torch's meta, which has shapes and no numbers: a tensor that was left on the CPU, or a look at a value,
is an error there. A wait is what torch.cuda.set_sync_debug_mode calls one, a number or a tensor that goes back to the
host, and a copy to the device besides a step's batch. (AdamW's kernel of all tensors at once, which is not for meta,
runs on the CPU in the other tests.)
"""

import contextlib
import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fast
import model_torch
import train
from config import ENCODINGS, PRESETS, EncodingConfig, ModelConfig
from generate import distribution
from past.cache import Cache
from past.reading import Reader

META = torch.device("meta")
SMALL = ModelConfig(2, 64, 4, context=32, vocab_size=50, dropout=0.1)
CONFIGS = {pe: dataclasses.replace(SMALL, encoding=EncodingConfig(pe)) for pe in ENCODINGS}
CONFIGS |= {f"expe-{name}": dataclasses.replace(SMALL, encoding=EncodingConfig("expe", **variant))
            for name, variant in {"k": {"on": "k"}, "learn": {"learn": "init"}, "once": {"once": True}}.items()}
CONFIGS |= {f"{pe}-blocks": dataclasses.replace(CONFIGS[pe], nope_every=2, window=8)
            for pe in ("expe", "rope", "alibi")}
LOOKS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")


class Wait(AssertionError):
    pass


class NoWait(TorchDispatchMode):
    """Raises Wait where the host would wait for the device; copies to it are counted instead."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        def devices(tree):
            return {x.device.type for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}

        name, given = function.overloadpacket.__name__, devices((arguments, keywords))
        if name in LOOKS and "meta" in given:
            raise Wait(f"{name} looks at a number")
        if name in ("_to_copy", "copy_"):
            source = arguments[1 if name == "copy_" else 0].device.type
            to = arguments[0].device if name == "copy_" else (keywords or {}).get("device") or source
            if (source, torch.device(to).type) == ("meta", "cpu"):
                raise Wait(f"{name} goes back to the host")
            self.copies += (source, torch.device(to).type) == ("cpu", "meta")
        return function(*arguments, **(keywords or {}))


def backend_on(device, config, **changes):
    changes = {"batch_size": 4, "micro_batch": 2, "steps": 9, **changes}
    return train.TorchBackend(config, dataclasses.replace(PRESETS["mini"].train, **changes), device, False)


def batch(seed=0):
    return np.random.default_rng(seed).integers(0, 50, (4, 33))


def step_without_a_wait(config, **changes):
    """A step after the first one, which makes the tables; returns how many copies went to the device."""
    backend = backend_on(META, config, **changes)
    backend.step(batch(), 0)
    with NoWait() as mode:
        loss, norm = backend.step(batch(), 1)
    assert loss.device == norm.device == META
    assert all(w.device == META for w in backend.model.parameters())
    return mode.copies


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step_never_waits_for_the_device(name):
    assert step_without_a_wait(CONFIGS[name]) == 2  # the batch: tokens and targets


@pytest.mark.parametrize("changes", [{"activation_checkpointing": True}, {"optimizer": "muon"}], ids=str)
def test_nor_does_one_that_recomputes_or_is_muons(changes):
    assert step_without_a_wait(CONFIGS["expe"], **changes) == 2


def test_masked_tokens_bring_their_places_and_random_positions_a_table_for_each_step():
    masked = dataclasses.replace(CONFIGS["expe"], causal=False)
    assert step_without_a_wait(masked, objective="mlm") == 3
    assert step_without_a_wait(CONFIGS["expe"], random_positions=64) == 2 + 2  # rows, and keys' places


def looks(x):
    x.sum().item()


def moves(x):
    x.cpu()


def asks(x):
    if x.sum() > 0:
        return


def counts(x):
    x.nonzero()


@pytest.mark.parametrize("planted", [looks, moves, asks, counts])
@pytest.mark.parametrize("where", [model_torch.Block, model_torch.Attention])
def test_a_wait_that_is_planted_is_found(planted, where, monkeypatch):
    """In a block, or in the attention of it; not in the first step, so that the step which is looked at has it."""
    forward, calls = where.forward, []

    def waiting(self, x, at):
        calls.append(planted(x) if len(calls) >= 4 else None)  # two blocks, two parts of a batch
        return forward(self, x, at)

    monkeypatch.setattr(where, "forward", waiting)
    with pytest.raises(Wait):
        step_without_a_wait(CONFIGS["nope"])


def test_a_copy_that_is_planted_is_counted(monkeypatch):
    forward = model_torch.Block.forward
    monkeypatch.setattr(model_torch.Block, "forward",
                        lambda self, x, at: forward(self, x + torch.ones(64).to(x.device), at))
    assert step_without_a_wait(CONFIGS["nope"]) == 2 + 4


def on_meta(pe, dtype):
    return Reader(CONFIGS[pe]).to(META, dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pe", CONFIGS)
def test_evaluation_caches_and_streams_compute_on_the_device(pe, dtype, monkeypatch):
    """Lengths to four times the trained one; a cache read on token by token, and a stream past its window."""
    reader, streams = on_meta(pe, dtype), Reader(CONFIGS[pe]).streams()
    longest = min(128, reader.longest)
    tokens = torch.zeros(2, longest, dtype=torch.long, device=META)
    losses = reader.token_losses(tokens, tokens)
    assert losses.device == META and losses.shape == tokens.shape and losses.dtype == torch.float32
    monkeypatch.setattr(Reader, "streams", lambda self: streams)  # which looks at numbers, once, before a stream begins
    for cache in [Cache(), Cache(4, 27)][: 1 + streams]:
        steps = [24, 1, 1] if cache.window is None else [24, 8, 1, 1]
        with torch.no_grad():
            for n in steps:
                h = reader.hidden(tokens[:, :n], cache=cache)
                assert h.device == META and h.shape == (2, n, 64) and h.dtype == dtype
        assert all(cache[block.attn].device == META for block in reader.blocks)
    assert distribution(h[:, -1] @ reader.output_weight.T, temperature=0.8, top_k=5).device == META


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step_compiles_without_a_graph_break(name):
    """Blocks and loss, each one graph, to the same loss and gradients; and with dropout, whose masks are others."""
    for dropout in (0.0, 0.1):
        config, found = dataclasses.replace(CONFIGS[name], dropout=dropout), []
        for compiled in (False, True):
            torch.compiler.reset()
            backend = backend_on(torch.device("cpu"), config, lr=0.01, end_lr=0.01, warmup=0.0)
            if compiled:
                fast.compile(backend.model, fullgraph=True)
            found.append([float(backend.step(batch(i), i)[0]) for i in range(2 if dropout == 0 else 1)])
        assert found[0] == pytest.approx(found[1], rel=1e-4 if dropout == 0 else 0.05)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_a_graph_break_that_is_planted_is_found(monkeypatch):
    forward = model_torch.Block.forward

    def breaking(self, x, at):
        return forward(self, x if x.sum() > 0 else -x, at)

    for changed in (forward, breaking):
        torch.compiler.reset()
        monkeypatch.setattr(model_torch.Block, "forward", changed)
        backend = backend_on(torch.device("cpu"), CONFIGS["nope"])
        fast.compile(backend.model, fullgraph=True)
        found = pytest.raises(torch._dynamo.exc.Unsupported, match="branching")
        with found if changed is breaking else contextlib.nullcontext():
            backend.step(batch(), 0)
