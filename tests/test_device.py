"""Ready for a GPU, without one: every encoding computes on another device, and compiles whole.

The device is torch's meta, which has shapes and no numbers: a tensor that was left on the CPU, or a look at a value, is
an error there.
"""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused, slow

import backends
from config import ModelConfig, make_configs
from engine import fast, linear_bias
from generate import distribution
from longer.cache import Cache
from longer.reading import Reader
from model_torch import GPT
from positional_encodings import ENCODINGS, make_encoding

META = torch.device("meta")
SMALL = ModelConfig(2, 64, 4, context=32, vocab=50, dropout=0.1)
CONFIGS = {pe: dataclasses.replace(SMALL, encoding=make_encoding(pe)) for pe in ENCODINGS}
CONFIGS |= {f"expe-{name}": dataclasses.replace(SMALL, encoding=make_encoding("expe", **variant))
            for name, variant in {"k": {"on": "k"}, "learn": {"learn": "init"}, "once": {"once": True}}.items()}
CONFIGS |= {f"{pe}-blocks": dataclasses.replace(CONFIGS[pe], nope_every=2, window=8)
            for pe in ("expe", "rope", "alibi")}


QUICK = ("expe", "rope", "alibi", "fox", "shaw", "learned", "expe-k", "rope-blocks")
FEW = [*QUICK, *slow(*(name for name in CONFIGS if name not in QUICK))]


@pytest.mark.parametrize("name", FEW)
def test_loss_and_gradients_are_on_the_device(name):
    tokens = torch.zeros(2, 32, dtype=torch.long, device=META)
    for make, autocast in ((GPT, False), (fast.FastGPT, False), (fast.FastGPT, True)):
        model = make(CONFIGS[name]).to(META)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, tokens)
        loss.backward()
        assert loss.device == META and all(w.grad.device == META for w in model.parameters())


@pytest.mark.parametrize("name", FEW)
def test_caches_and_streams_compute_on_the_device(name, monkeypatch):
    """Twice the trained length; a cache that is read on token by token, and a stream past its window; in bf16."""
    reader = Reader(CONFIGS[name]).eval()
    streams = reader.can_stream()
    reader.to(META, dtype := torch.bfloat16)
    longest = min(64, reader.longest)
    tokens = torch.zeros(2, longest, dtype=torch.long, device=META)
    losses = reader.token_losses(tokens, tokens)
    assert losses.device == META and losses.shape == tokens.shape and losses.dtype == torch.float32
    # can_stream looks at numbers, once, before a stream begins
    monkeypatch.setattr(Reader, "can_stream", lambda self: streams)
    for cache in [Cache(), Cache(4, 27)][: 1 + streams]:
        with torch.no_grad():
            for n in [24, 1, 1] if cache.window is None else [24, 8, 1, 1]:
                h = reader.hidden(tokens[:, :n], cache=cache)
                assert h.device == META and h.shape == (2, n, 64) and h.dtype == dtype
        assert all(x.device == META for block in reader.blocks for x in cache[block.attn])
    assert distribution(h[:, -1] @ reader.output_weight.T, temperature=0.8, top_k=5).device == META


def test_compile_without_a_compiler_is_refused(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "COMPILER", "no-such-compiler")
    done = command("train.py", *TINY, "--data", tokens, "--compile", "--out", "run", cwd=tmp_path)
    assert "--compile needs the C++ compiler no-such-compiler: install it, or leave out --compile" in refused(done)


@pytest.mark.slow
def test_models_that_one_process_compiles_in_turn_are_all_compiled(monkeypatch):
    """lab.grid trains so. torch runs a function without its graph, and fullgraph ends it, at the ninth graph."""
    monkeypatch.setattr(fast, "COMPILER", "sh")                             # which the backend does not need
    for width in range(8, 88, 8):
        model = GPT(ModelConfig(layers=1, width=width, heads=2, context=8, vocab=10, encoding=make_encoding("rope")))
        fast.compile(model, backend="eager", options=None, fullgraph=True)
        model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(fast.COMPILER), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step_compiles_without_a_graph_break(name, dtype):
    """Blocks and loss, each one graph, to the same losses."""
    config = dataclasses.replace(CONFIGS[name], dropout=0.0)
    changes = {"batch_size": 4, "micro_batch": 2, "lr": 0.01, "end_lr": 0.01, "warmup": 0.0, "fast": True,
               "dtype": dtype}
    setting = dataclasses.replace(make_configs("mini")[1], **changes)
    found = []
    for compiled in (False, True):
        backend = backends.TorchBackend(config, setting, torch.device("cpu"))
        if compiled:
            fast.compile(backend.model, fullgraph=True)
        batches = [np.random.default_rng(i).integers(0, 50, (4, 33)) for i in range(2)]
        found.append([backend.step((batch[:, :-1], batch[:, 1:]), i)[0].item() for i, batch in enumerate(batches)])
    assert found[0] == pytest.approx(found[1], rel=1e-4 if dtype == "fp32" else 2e-3)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(fast.COMPILER), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("encoding", [make_encoding("fox"), make_encoding("expe", on="k", theta=1 / 128)])
def test_compiled_gradients_in_bf16_are_those_of_the_plain_graph(encoding):
    """At the size of `mini`, whose kernels transpose blocks of 32 x 32 numbers."""
    config = dataclasses.replace(make_configs("mini")[0], encoding=encoding, layers=1)
    setting = dataclasses.replace(make_configs("mini")[1], dtype="bf16", fast=True)
    tokens, targets = (torch.from_numpy(np.random.default_rng(i).integers(0, 1024, (8, 128))) for i in (0, 1))
    found = []
    for compiled in (False, True):
        backend = backends.TorchBackend(config, setting, torch.device("cpu"), compiled)
        with backend.autocast:
            loss = backend.model(tokens, targets, None)
        loss.backward()
        found.append({name: w.grad for name, w in backend.model.named_parameters()})
    for w, plain in found[0].items():
        assert (found[1][w] - plain).norm() < 0.01 * plain.norm(), w


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(fast.COMPILER), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_code_keeps_all_digits_of_a_linear_bias(dtype):
    """torch.compile leaves out a conversion to a shorter dtype and back."""
    q, k = torch.zeros(2, 1, 1, 300, 16, dtype=dtype)
    a, b = torch.full((1, 1, 300), 0.7), torch.arange(300.0)[None, None]
    torch.compiler.reset()

    def parts(q, k, a, b):
        return tuple(linear_bias.augment_qk(q, k, a, b))

    for function in (parts, torch.compile(parts, fullgraph=True)):
        q8, k8 = (x.double() for x in function(q, k, a, b))
        scores = q8 @ k8.mT / 4
        assert (scores - scores[..., :1] - 0.7 * b[..., None, :]).abs().max() < 1e-3
