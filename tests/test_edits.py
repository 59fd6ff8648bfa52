"""An edit of a step of model_torch.py reaches every other path, or is refused by the name of the function to edit.

Each edit is made by monkeypatch. What a path computes then is compared with the plain model as edited, in a stream with
the plain attention of the tokens that it keeps. A path may differ only where its check refuses.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_ladder import T, V, tiny

import model_torch
from engine import banded, fast, linear_bias
from engine.compare import check_training
from longer import compare
from longer.cache import Cache
from longer.reading import Reader
from model_torch import GPT, Attention, score_divisor
from settings import InputError

EXACT = 1e-9
SINKS, WINDOW = 2, 9

# ---- edits -----------------------------------------------------------------------------------------------------------


def a_number_a_head(x):
    return torch.linspace(0.5, 2, x.shape[-3], dtype=x.dtype, device=x.device)[:, None, None]


def edit_project(edit):
    plain = Attention.project
    return {"project": lambda self, h, rows: edit(*plain(self, h, rows))}


def edit_scores(change=lambda scores: scores, soften=lambda scores: scores.softmax(-1), when=lambda: True):
    """attend as it can be written without a kernel, of changed scores."""
    plain = Attention.attend

    def attend(self, q, k, v, bias, table):
        if not when():
            return plain(self, q, k, v, bias, table)
        scores = q @ k.mT / score_divisor(q)
        scores = change(scores if bias is None else scores + bias)
        weights = soften(self.mask(q, k, scores))
        return self.encoding.value(weights, v, table) if self.encoding.value else weights @ v

    return {"attend": attend}


def edit_output(self, y, h):
    return self.proj((y * h[..., : self.n_heads].sigmoid().mT[..., None]).transpose(1, 2).flatten(2))


def with_a_sink(scores):
    return torch.cat((scores, scores.new_zeros(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def grouped(x):
    return x.mean(-3, keepdim=True).expand_as(x)


def scaled_by_length(self, q, k, v, bias, table, plain=Attention.attend):
    return plain(self, q * math.log(k.shape[2] + 1), k, v, bias, table)


LINEAR = {
    "temperature of queries": edit_project(lambda q, k, v: (q * a_number_a_head(q), k, v)),
    "temperature of keys": edit_project(lambda q, k, v: (q, k * a_number_a_head(k), v)),
    "values scaled": edit_project(lambda q, k, v: (q, k, v * a_number_a_head(v))),
    "bias": edit_project(lambda q, k, v: [x + a_number_a_head(x) for x in (q, k, v)]),
    "grouped queries": edit_project(lambda q, k, v: (q, grouped(k), grouped(v))),
    "gate": {"output": edit_output},
}
OTHERS = {
    "norm": edit_project(lambda q, k, v: (3 * F.normalize(q, dim=-1), 3 * F.normalize(k, dim=-1), v)),
    "cap": edit_scores(lambda scores: 2 * torch.tanh(scores / 2)),
    "softcap with gradients": edit_scores(lambda scores: 50 * torch.tanh(scores / 50), when=torch.is_grad_enabled),
    "sink by hand": edit_scores(soften=with_a_sink),
    "dropout of weights": edit_scores(
        soften=lambda scores: F.dropout(scores.softmax(-1), 0.1, torch.is_grad_enabled())),
    "logarithm of the length": {"attend": scaled_by_length},
}
ENCODINGS = [("expe", {}), ("expe", {"on": "k"}), ("rope", {}), ("alibi", {}), ("fox", {}), ("t5", {}), ("shaw", {})]


def edit(monkeypatch, steps):
    for name, step in steps.items():
        monkeypatch.setattr(Attention, name, step)


# ---- paths -----------------------------------------------------------------------------------------------------------


def error(found, right):
    return float((found - right).norm() / right.norm())


def some_tokens(length):
    return torch.from_numpy(np.random.default_rng(3).integers(0, V, (2, length)))


@torch.no_grad()
def reading_error(plain, reader):
    tokens = some_tokens(3 * T)
    cache = Cache()
    parts = torch.cat([reader(some, cache=cache) for some in tokens.split([1, 7, 1, 3 * T - 9], 1)], 1)
    right = plain(tokens)
    return max(error(reader(tokens), right), error(parts, right))


@torch.no_grad()
def stream_error(plain, reader):
    """Of each block, fed with the inputs that it had in a stream, beside plain attention over the tokens it keeps."""
    reader.compared.add("stream")                                       # that is for the test to do
    S, inputs, outputs = SINKS + WINDOW + 1, {}, {}
    for i, block in enumerate(reader.blocks):
        def record(attention, args, out, i=i):
            inputs.setdefault(i, []).append(args[0])
            outputs.setdefault(i, []).append(out)

        block.attn.register_forward_hook(record)
    reader(some_tokens(S + 8), cache=Cache(SINKS, WINDOW))
    errors = []
    for i, block in enumerate(plain.blocks):
        h, found = torch.cat(inputs[i], 1), torch.cat(outputs[i], 1)
        for t in range(S, S + 8):
            kept = [*range(SINKS), *range(t - WINDOW, t + 1)]
            right = block.attn(h[:, kept], plain.tables(np.arange(S))[block.attn.encoding.settings])
            errors.append(error(found[:, t], right[:, -1]))
    return max(errors)


def training_error(plain, quick, half):
    results = []
    for model in (plain, quick):
        for block in model.blocks:
            block.attn.linear_in_fp32 = half
        torch.manual_seed(0)
        loss = model.train()(some_tokens(3 * T), some_tokens(3 * T).flip(1))
        results.append([loss.detach(), *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)])
    return max(error(y, x) for x, y in zip(*results, strict=True) if x is not None)


def refusal(check, *arguments):
    try:
        check(*arguments)
    except InputError as problem:
        return str(problem)
    return None


def paths(pe, variant):
    """{path: (its error beside the plain model, why its check refuses it, or None)}."""
    def models(make):
        return tiny(pe, variant=variant), tiny(pe, variant=variant, make=make)

    config = tiny(pe, variant=variant).config
    why = refusal(compare.check_reading, Reader, config)
    found = {"reading": (why is None and reading_error(*models(Reader)), why)}
    if models(Reader)[1].can_stream():
        why = why or refusal(compare.check_stream, Reader, config)
        found["stream"] = why is None and stream_error(*models(Reader)), why
    for name, half in (("fast", False), ("fast in bf16", True)):
        why = refusal(check_training, fast.FastGPT, config, half)
        found[name] = why is None and training_error(*models(fast.FastGPT), half), why
    return found


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("pe, variant", ENCODINGS, ids=str)
def test_a_linear_edit_is_right_everywhere(pe, variant, name, monkeypatch):
    before = tiny(pe, variant=variant)(some_tokens(T))
    edit(monkeypatch, LINEAR[name])
    assert (tiny(pe, variant=variant)(some_tokens(T)) - before).abs().max() > 1e-3
    for path, (off, why) in paths(pe, variant).items():
        assert why is None and off < EXACT, (path, off, why)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("pe, variant", ENCODINGS, ids=str)
def test_any_other_edit_is_right_or_refused(pe, variant, name, monkeypatch):
    edit(monkeypatch, OTHERS[name])
    for path, (off, why) in paths(pe, variant).items():
        assert why or off < EXACT, (path, off)
        if why:
            assert "\n" not in why and "model_torch.py" in why and why.startswith(("engine/", "longer/")), why


def test_a_norm_is_right_where_no_key_lies_without_a_position_and_after_the_advice_of_its_refusal(monkeypatch):
    edit(monkeypatch, OTHERS["norm"])
    for pe in ("rope", "alibi", "fox", "t5", "shaw"):
        assert all(why is None for _, why in paths(pe, {}).values())
    refused = {path: why for path, (_, why) in paths("expe", {}).items() if why}
    assert refused.keys() == {"stream"} and "move_queries and move_keys" in refused["stream"]
    _, why = paths("expe", {"on": "k"})["fast in bf16"]
    assert why.startswith("engine/fast.py: attend_linear does not compute what the attention of model_torch.py does")
    assert why.endswith("or let linear_of in engine/linear_bias.py return None for expe")
    monkeypatch.setattr(fast, "linear_of", lambda *given: None)
    refused = {path for path, (_, why) in paths("expe", {"on": "k"}).items() if why}
    assert refused == {"stream"}
    with pytest.raises(InputError, match="least-slope has no slopes to raise"):
        tiny("expe", variant={"on": "k"}, make=Reader).scale_to(2 * T, rope_scaling="least-slope")


@pytest.mark.parametrize("pe, method, name, refused", [
    ("expe", "hold", "norm", "move_queries or move_keys"), ("rope", "hold", "norm", None),
    ("rope", "dual-chunk", "logarithm of the length", "change_of_scores"),
    ("expe", "self-extend", "logarithm of the length", "change_of_scores"),
    ("expe", "hold", "logarithm of the length", None), ("rope", "dual-chunk", "cap", None),
    ("expe", "self-extend", "cap", None), ("rope", "dual-chunk", "temperature of queries", None),
    ("rope", "self-extend", "bias", None), ("expe", "dual-chunk", "bias", None)])
def test_other_positions_are_refused_where_their_steps_no_longer_fit(pe, method, name, refused, monkeypatch):
    edit(monkeypatch, (LINEAR | OTHERS)[name])
    why = refusal(compare.check_positions_apart, Reader, tiny(pe).config, method)
    assert (why is None) if refused is None else f"for {method}, {refused} does not give what" in why


@pytest.mark.parametrize("owner, name, edited, pe, variant, refused", [
    (model_torch.ALiBi, "score", lambda self, q, k, h, table: -self.of_each_head(q, table) * table.clamp(max=100),
     "alibi", {}, {"reading", "stream", "fast in bf16"}),
    *((model_torch.ExPE, "override", lambda self, h, table, plain=model_torch.ExPE.override: plain(
        self, h, table.clamp(max=60 * self.settings.theta)), "expe", variant, refused)
      for variant, refused in (({}, set()), ({"on": "k"}, {"reading", "stream", "fast in bf16"})))])
def test_a_table_that_ends_past_the_trained_length_is_seen(owner, name, edited, pe, variant, refused, monkeypatch):
    monkeypatch.setattr(owner, name, edited)
    found = paths(pe, variant)
    assert {path for path, (_, why) in found.items() if why} == refused
    assert all(why or off < EXACT for off, why in found.values())


@pytest.mark.parametrize("pe, refused", [
    ("alibi", {"reading", "stream", "fast in bf16"}), ("fox", {"reading", "stream", "fast in bf16"}),
    ("rope", {"reading", "stream"}), ("t5", {"reading", "stream"}), ("shaw", {"reading", "stream"})])
def test_keys_that_are_hidden_far_away_are_hidden_everywhere_or_refused(pe, refused, monkeypatch):
    """unseen hides nothing of a single query, and attend leaves the causal mask to the kernel."""
    plain = model_torch.unseen

    def edited(T, S, causal, window, device):
        never = plain(T, S, causal, window, device)
        return never if never is None else never | torch.ones_like(never).tril(S - T - 101)

    monkeypatch.setattr(model_torch, "unseen", edited)
    banded.minus_infinity.cache_clear()
    try:
        assert {path for path, (_, why) in paths(pe, {}).items() if why} == refused
    finally:
        banded.minus_infinity.cache_clear()


def test_an_edited_loss_and_an_edit_that_other_paths_cannot_compute_are_refused(monkeypatch):
    def capped(h, w, targets, reduction="mean"):
        losses = F.cross_entropy((30 * torch.tanh(F.linear(h, w) / 30)).flatten(0, 1), targets.flatten().long(),
                                 reduction=reduction)
        return losses if reduction == "mean" else losses.view(targets.shape)

    config = tiny("alibi").config
    with monkeypatch.context() as patch:
        patch.setattr(GPT.__init__, "__defaults__", (*GPT.__init__.__defaults__[:-1], capped))
        why = refusal(check_training, fast.FastGPT, config)
        assert why.startswith("engine/cross_entropy.py: cross_entropy does not compute what")
        assert "cross_entropy in engine/cross_entropy.py" in refusal(compare.check_reading, Reader, config)
    monkeypatch.setattr(linear_bias, "augment_qk", None)
    monkeypatch.setattr(Attention, "project", edit_project(lambda q, k, v: (q, k, v[..., :3]))["project"])
    monkeypatch.setattr(Attention, "output", lambda self, y, h: self.proj(F.pad(y, (0, 5)).transpose(1, 2).flatten(2)))
    why = refusal(check_training, fast.FastGPT, config, True)
    assert "it does not fit model_torch.py as it is now (TypeError" in why and "\n" not in why


def test_a_check_draws_no_random_numbers_of_a_training():
    config = tiny("alibi").config
    torch.manual_seed(7)
    right = torch.rand(3)
    torch.manual_seed(7)
    check_training(fast.FastGPT, config, half=True)
    assert torch.equal(torch.rand(3), right) and torch.get_default_dtype() == torch.float32
