"""The GPT against models of another library, and its invariants; engine/fast.py against the plain parts.

tests/test_ladder.py compares attention with loops over heads, queries and keys.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import need, slow
from test_ladder import BLOCKS, STYLES, T, V, numpy_params, settings, tiny

import expe
import model_numpy
import model_torch
from config import ModelConfig
from engine import cross_entropy, fast, linear_bias
from interop.over import GPT2, LLAMA
from model_torch import GPT, Encoding
from positional_encodings import ENCODINGS, make_encoding


def some_tokens(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def some_input(seed=3):
    return torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend(model, h, n=tuple(range(T))):
    """The first block's attention over h (B, T, C), at positions n."""
    attention = model.blocks[0].attn
    return attention(h, model.tables(np.array(n))[attention.encoding.settings])


def doors_of(settings, softmax="plain"):
    return model_numpy.build_encoding(settings, SimpleNamespace(softmax=softmax))


# ---- against another library's models --------------------------------------------------------------------------------


def filled(theirs, ours, kind=LLAMA):
    """A model of transformers, in float64, with our weights, as a kind of theirs calls them and lays them out."""
    theirs = theirs.double().eval()
    weights = kind.theirs(ours.state_dict(), ours.config.heads)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return theirs


def like(ours, **changes):
    """The arguments that make a config of transformers with the shape of our model."""
    c = ours.config
    return dict(vocab_size=V, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
                num_attention_heads=c.heads, num_key_value_heads=c.heads, tie_word_embeddings=c.tied,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=None, bos_token_id=None,
                eos_token_id=None, attn_implementation="eager") | changes


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tied": False}, *BLOCKS.values()], ids=str)
def test_llama_style_with_nope_every_and_window_equals_transformers_smollm3(changes):
    """Far past the trained length. SmolLM3 is Llama in blocks that have RoPE alone and no window."""
    transformers = need("transformers")
    ours, tokens = tiny("rope", "llama", **{"layers": 4} | changes), some_tokens(2, 3 * T)
    every, window = ours.config.nope_every, ours.config.window
    with_rope = [0 if every and i % every == 0 else 1 for i in range(1, 5)]
    kinds = ["sliding_attention" if window and rope else "full_attention" for rope in with_rope]
    theirs = transformers.SmolLM3Config(**like(
        ours, rms_norm_eps=1e-5, no_rope_layers=with_rope, layer_types=kinds, use_sliding_window=window > 0,
        sliding_window=window or None))
    theirs = filled(transformers.SmolLM3ForCausalLM(theirs), ours)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)  # angles and norms in fp32


def test_gpt_style_with_learned_positions_equals_transformers_gpt2():
    transformers = need("transformers")
    ours, tokens = tiny("learned", "gpt", tied=True), some_tokens(2, T)
    config = transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=16, n_layer=2, n_head=2, n_inner=40,
                                     attn_implementation="eager")
    theirs = filled(transformers.GPT2LMHeadModel(config), ours, GPT2)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


# ---- invariants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style, blocks", [("gpt", {}), ("llama", BLOCKS["both"])], ids=["gpt", "llama-both"])
@pytest.mark.parametrize("pe", ENCODINGS)
def test_no_token_sees_a_later_one(pe, style, blocks):
    model, tokens = tiny(pe, style, **blocks), some_tokens(2, T)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % V
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7:], after[:, 7:])
    before, after = (model_numpy.forward(numpy_params(model), x.numpy(), model.config)[0] for x in (tokens, changed))
    assert np.array_equal(before[:, :7], after[:, :7]) and not np.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("pe", ENCODINGS)
def test_a_window_ends_where_it_says(pe):
    model, tokens = tiny(pe, layers=1, window=4), some_tokens(1, T)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % V
    encoding = model.blocks[0].attn.encoding
    keeps = type(encoding).key_state is not Encoding.key_state  # such as sums of tokens, of which a difference counts
    same = ((model(tokens) - model(changed)).abs() <= (1e-12 if keeps else 0)).all(-1)[0]
    further = {"partial_key_offset": 1}.get(pe, 2 * hasattr(encoding, "conv"))  # tokens that a key reads before its own
    assert not same[5:9].any() and same[:5].all() and same[9 + further :].all()


@pytest.mark.parametrize("pe", ENCODINGS)
def test_positions_may_be_any_integers(pe):
    model, tokens = tiny(pe), some_tokens(2, 6)
    default = model(tokens)
    assert torch.equal(default, model(tokens, positions=torch.arange(6)))
    expanded = model(tokens, positions=torch.arange(6, dtype=torch.uint8).expand(2, 6))
    torch.testing.assert_close(default, expanded, rtol=1e-12, atol=1e-12)
    odd = torch.tensor([[3, 3, 0, 11, 5, 1], [0, 1, 2, 3, 4, 5]])  # repeats, gaps, any order, a row for each sequence
    logits = model(tokens, positions=odd)
    torch.testing.assert_close(logits[1:], model(tokens[1:]), rtol=1e-12, atol=1e-12)
    orderless = all(table is None for table in exact_tables(pe, np.arange(6), model.config))  # or by the keys' order
    assert torch.allclose(logits[0], default[0]) == orderless
    if pe != "learned":
        far = model(tokens, positions=torch.tensor([-5, 10**9, 7, 7, 0, 40]))
        assert torch.isfinite(far).all()


RELATIVE = "nope rope alibi t5 shaw kerple partial grape proportional xpos rove".split()
ABSOLUTE = "sinusoidal learned expe exqpe".split()


@pytest.mark.parametrize("pe, variant, shifts", [
    *((pe, {}, {3: True}) for pe in RELATIVE), *((pe, {}, {3: False}) for pe in ABSOLUTE),
    ("exqpe", {"on": "k"}, {1: False, 5: True, 100: True, 101: False})], ids=str)  # its rows are straight by l = 5
def test_a_shift_of_all_positions_changes_nothing_for_relative_encodings_and_something_for_absolute_ones(
        pe, variant, shifts):
    model, tokens = tiny(pe, variant=variant), some_tokens(1, 8)
    for shift, same in shifts.items():
        shifted = model(tokens, positions=torch.arange(8) + shift)
        assert torch.allclose(shifted, model(tokens), rtol=1e-9, atol=1e-11) == same, shift


def exact_tables(pe, n, config):
    return [settings(pe).fit(config).rows(n, config), settings(pe).pairs(n, n, config)]


@pytest.mark.parametrize(
    "pe", [pe for pe in ENCODINGS if any(x is not None and x.dtype.kind == "f"
                                         for x in exact_tables(pe, np.arange(2), tiny().config))])
def test_tables_are_exact_at_positions_that_half_precision_merges(pe):
    n, model = np.array([256, 257, 1_000_003]), tiny(pe)
    of, exact = model.config.encoding, exact_tables(pe, n, model.config)
    for dtype in (torch.float32, torch.bfloat16):
        for found, right in zip(model.to(dtype).tables(n)[of][:2], exact, strict=True):
            assert found is right is None or torch.equal(found, torch.from_numpy(right).to(dtype))
    found = next(x for x in model.float().tables(n)[of] if x is not None)
    assert not torch.equal(found[..., 0, :], found[..., 1, :])


def test_every_encoding_starts_from_the_same_weights():
    plain = GPT(tiny().config, seed=3).state_dict()
    for pe in ENCODINGS:
        found = GPT(dataclasses.replace(tiny().config, encoding=settings(pe)), seed=3).state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.items()), pe


def test_first_weights_are_those_of_the_rule():
    config = dataclasses.replace(tiny("learned").config, width=64, mlp_width=256, vocab=500, layers=8, context=99,
                                 encoding=make_encoding("learned"))
    for tied in (False, True):
        model = GPT(dataclasses.replace(config, tied=tied), seed=5)
        for name, weight in model.named_parameters():
            if name.endswith("bias") or weight.ndim == 1:
                assert torch.equal(weight, torch.full_like(weight, not name.endswith("bias"))), name
                continue
            std = 1 if name == "embedding.weight" and not tied else 0.02
            if "proj" in name or "down" in name:
                std /= 4
            assert abs(weight.std() / std - 1) < 0.05 and abs(weight.mean()) < 0.05 * std, name
    assert not torch.equal(GPT(config, seed=5).head.weight, GPT(config, seed=6).head.weight)


# ---- fast parts against the plain ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_a_model_of_fast_parts_has_the_plain_ones_loss_and_gradients(style, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOGITS, "cpu", 7 * V)
    plain, quick = tiny("t5", style), tiny("t5", style, make=fast.FastGPT)
    assert (quick.cross_entropy, type(quick.dropout), type(quick.blocks[0].dropout), type(quick.blocks[0].attn)) == (
        fast.cross_entropy, fast.Dropout, fast.Dropout, fast.Attention)
    same_losses_and_gradients(quick, plain, 1e-12)


LINEAR = [("alibi", {}), ("alibi", {"slopes": 3}), ("fox", {}), ("grape", {}),
          ("expe", {"on": "k", "theta": 1 / 48}),
          ("expe", {"on": "k", "theta": 1 / 48, "constant": True, "start": 1.0, "scale": 3.0})]


def same_losses_and_gradients(quick, plain, digits, **given):
    """Of 3 x T tokens; each gradient to so much of its largest entry."""
    losses = [model(some_tokens(3, T), some_tokens(3, T, seed=5), **given) for model in (quick, plain)]
    torch.testing.assert_close(*losses, rtol=digits, atol=0, check_dtype=False)
    for loss in losses:
        loss.backward()
    for (name, found), right in zip(quick.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad - right.grad).abs().max() <= digits * right.grad.abs().max(), name


OWN = np.random.default_rng(0).integers(0, 50, (3, T))                  # positions, a row for each sequence
DOUBLE, SINGLE = (torch.float64, 1e-9), (torch.float32, 1e-5)


@pytest.mark.parametrize("changes, positions, dtype, digits", [
    ({}, None, *DOUBLE), ({}, OWN, *SINGLE), ({"nope_every": 2}, OWN, *DOUBLE), ({"causal": False}, OWN, *DOUBLE),
    ({"window": 4}, None, *DOUBLE)], ids=["plain", "fp32", "every", "not causal", "window"])
@pytest.mark.parametrize("pe, variant", LINEAR, ids=str)
def test_a_bias_as_further_dimensions_has_the_plain_ones_loss_and_gradients(
        pe, variant, dtype, digits, positions, changes, monkeypatch):
    quick, plain = (tiny(pe, variant=variant, make=make, **changes).to(dtype)
                   for make in (fast.FastGPT, GPT))
    with torch.no_grad():
        assert torch.equal(quick(some_tokens(3, T)), plain(some_tokens(3, T)))  # the plain form, in fp32 and above
    for block in quick.blocks:
        block.attn.linear_in_fp32 = True
    monkeypatch.setitem(linear_bias.PAIRS, "cpu", 100)                    # the backward takes few queries at a time
    linear = linear_bias.linear_of(quick.blocks[0].attn.encoding, quick.config.causal)
    shut = linear is None                                                 # no product of two numbers
    assert shut == (changes == {"causal": False} and pe in ("alibi", "grape"))
    with torch.no_grad():
        assert torch.equal(quick(some_tokens(3, T)), plain(some_tokens(3, T))) == shut
    if pe == "grape":  # the gradient of its w is a sum that cancels: in fp32 its terms' digits count
        digits *= 10 if dtype == torch.float32 else 2
    same_losses_and_gradients(quick, plain, digits, positions=positions)


@pytest.mark.parametrize("positions", [None, OWN], ids=["from 0", "own"])
@pytest.mark.parametrize("softmax", ["sinks", "stick"])
def test_a_linear_bias_keeps_the_shifts_that_a_softmax_sees(softmax, positions):
    """The start of the ramp, too, adds a number of the query's to all its scores."""
    variant = {"on": "k", "theta": 1 / 48, "start": 0.7}
    quick, plain = (tiny(f"expe+{softmax}", variant=variant, make=make) for make in (fast.FastGPT, GPT))
    with torch.no_grad():
        assert torch.equal(quick(some_tokens(3, T)), plain(some_tokens(3, T)))  # the plain form, in fp32 and above
    for block in quick.blocks:
        block.attn.linear_in_fp32 = True
        assert block.attn.linear is not None
    same_losses_and_gradients(quick, plain, 1e-9, positions=positions)


@pytest.mark.parametrize("changes, dtype, digits", [
    ({}, torch.float32, 2e-5), *((changes, torch.float64, 1e-10) for changes in (
        {"nope_every": 2}, {"causal": False}, {"window": 4}))], ids=["fp32", "every", "not causal", "window"])
@pytest.mark.parametrize("pe", ["fox", "grape", "cope", "cable", "path"])
def test_trained_biases_added_by_the_product_have_the_plain_ones_loss_and_gradients(
        pe, dtype, digits, changes, monkeypatch):
    quick = tiny(pe, make=fast.FastGPT, **changes).to(dtype)
    plain = tiny(pe, **changes).double()  # whose own gradients in fp32 have larger errors
    calls = []
    monkeypatch.setattr(torch, "baddbmm", lambda *given, baddbmm=torch.baddbmm, **how: (
        calls.append(pe) or baddbmm(*given, **how)))
    same_losses_and_gradients(quick, plain, digits)
    assert len(calls) == sum(block.attn.encoding.settings.pe == pe for block in quick.blocks)


LATE = np.arange(7, 7 + T)


@pytest.mark.parametrize("far, positions, changes, dtype, digits", [
    *((far, None, {}, torch.float64, 1e-12) for far in (1, 3, T - 1, T, 40)), (3, LATE, {}, torch.float32, 2e-5),
    (3, np.arange(T) // 2, {}, torch.float64, 1e-12), *((3, LATE, changes, torch.float64, 1e-12) for changes in (
        {"nope_every": 2}, {"causal": False}, {"window": 4}, {"softmax": "sinks"}))])
def test_shaws_vectors_on_a_band_have_the_plain_ones_loss_and_gradients(
        far, positions, changes, dtype, digits, monkeypatch):
    quick, plain = (tiny("shaw", variant={"max_distance": far}, make=make, **changes).to(dtype)
                    for make in (fast.FastGPT, GPT))
    calls = []
    forward = fast.Attention.attend_banded
    monkeypatch.setattr(fast.Attention, "attend_banded", lambda *args: calls.append(args) or forward(*args))
    same_losses_and_gradients(quick, plain, digits, positions=positions)
    in_a_row = positions is None or positions[1] == positions[0] + 1
    blocks = 0 if changes.get("softmax") or changes.get("causal") is False or not in_a_row else len(quick.blocks)
    assert len(calls) == (blocks // 2 if "nope_every" in changes else blocks)


def error_by_quarter(model, pe, variant=()):
    """What bf16 makes of the first attention's output over 512 tokens: its error relative to its size, (4,).

    A model in fp32 runs by autocast. The right one has the same weights, in float64.
    """
    h = torch.randn(4, 512, 16, generator=torch.Generator().manual_seed(3)).to(model.embedding.weight.dtype)
    exact = tiny(pe, variant=variant, window=model.config.window)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        right = attend(exact, h.double(), range(512))
        with torch.autocast("cpu", torch.bfloat16, enabled=h.dtype == torch.float32):
            wrong = attend(model, h, range(512)) - right
    wrong, right = ((x.unflatten(1, (4, -1)) ** 2).mean((0, 2, 3)) for x in (wrong, right))
    return (wrong / right).sqrt()


SCORED = [*LINEAR[:2], ("t5", {}), ("shaw", {}), ("kerple", {}), ("expe", {"on": "k", "theta": 1 / 8}),
          ("fire", {}), ("cope", {}), ("fox", {}), ("grape", {}), ("expe+log", {"on": "k", "theta": 1 / 8})]


OTHERS = [(pe, {}) for pe in ENCODINGS                               # files added later, too; three change no attention
          if pe not in ("nope", "sinusoidal", "learned") and (pe, {}) not in SCORED]


def keeps_its_digits(error, bare, pe, variant):
    """Whether the error is below twice NoPE's in each quarter; eight times, since phases may sum what tokens choose."""
    return (error < (2 if (pe, variant) in SCORED else 8) * bare).all()


@pytest.mark.parametrize("window, pe, variant", [
    *((window, *case) for case in SCORED for window in (0, 64)), *((0, *case) for case in OTHERS)], ids=str)
def test_positions_cost_bf16_training_no_digits(window, pe, variant):
    bare = error_by_quarter(tiny(make=fast.FastGPT, window=window).float(), "nope")
    model = tiny(pe, variant=variant, make=fast.FastGPT, window=window).float()
    assert keeps_its_digits(error_by_quarter(model, pe, variant), bare, pe, variant)


@functools.cache
def bf16_gradient_errors(pe, variant, length, window=0):
    """Two of {parameter: the relative error of its gradient}, of 2 layers on `length` tokens, beside float64's.

    Of training in bf16, and of float64 with weights that are rounded to bf16. pe: as `tiny` takes it, expe+sinks too.
    """
    pe, _, softmax = pe.partition("+")
    known = {"encoding": make_encoding(pe, **dict(variant)), "window": window, "softmax": softmax or "plain"}
    config = ModelConfig(2, 32, 2, context=length, vocab=V, mlp_width=40, **known)
    model, rounded, exact = fast.FastGPT(config, 0), *(GPT(config, seed=None).double() for _ in "12")
    with torch.no_grad():
        for w in model.parameters():
            w.add_(0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(w.numel())))
    exact.load_state_dict(model.state_dict())
    rounded.load_state_dict({name: w.bfloat16() for name, w in model.state_dict().items()})
    tokens, targets = some_tokens(1, length), some_tokens(1, length, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    for term in (loss, rounded(tokens, targets), exact(tokens, targets)):
        term.backward()
    right = {name: w.grad for name, w in exact.named_parameters()}
    return [{name: float((w.grad - right[name]).norm() / right[name].norm()) for name, w in found.named_parameters()}
            for found in (model, rounded)]


FUSED = [("fox", ()), ("grape", ()), ("alibi", ()), ("expe", (("on", "k"),))]
UNFUSED = [(pe, ()) for pe in ENCODINGS if pe not in ("nope", "fox", "grape", "alibi")]
WORSE = {"fire": 25, "dape": 12, "grape": 12, "selective_rope": 8}      # of some that are summed over all pairs


@pytest.mark.parametrize("pe, variant, length, window", [
    *((*case, 512, 0) for case in FUSED), ("expe", (("on", "k"),), 512, 100),
    *slow(*((*case, 512, 100) for case in FUSED[:-1] + UNFUSED), *((*case, 2048, 0) for case in FUSED + UNFUSED))])
def test_positions_cost_bf16_gradients_no_digits(pe, variant, length, window):
    """No parameter's error is above three times NoPE's largest and 4 times that of rounded weights alone."""
    found, rounded = bf16_gradient_errors(pe, variant, length, window)
    limit = 3 * max(bf16_gradient_errors("nope", (), length, window)[0].values())
    worst = {name: error / rounded[name] for name, error in found.items() if error > limit}
    assert max(worst.values(), default=0) <= WORSE.get(pe, 4), worst


ON_K = (("on", "k"),)


def test_expe_on_keys_with_sinks_has_gradients_in_bf16_as_good_as_nopes():
    """Each parameter's error is at most twice NoPE's; it was 4 times while the keys held their positions."""
    found, _ = bf16_gradient_errors("expe+sinks", ON_K, 512)
    bare, _ = bf16_gradient_errors("nope", (), 512)
    assert {name: error / bare[name] for name, error in found.items() if name in bare and error > 2 * bare[name]} == {}


@pytest.mark.parametrize("pe, variant", [("cope", ()), ("expe+stick", ON_K)], ids=str)
def test_what_bf16_costs_the_gradients_of_cope_and_stick_is_what_rounded_weights_cost(pe, variant):
    """In float64, too, they make more than 5 times as much as NoPE of weights that are rounded to bf16.

    Beside that training in bf16 costs them at most twice what it costs NoPE.
    """
    found, rounded = bf16_gradient_errors(pe, variant, 512)
    bare, bare_rounded = bf16_gradient_errors("nope", (), 512)
    assert max(rounded[name] / bare_rounded[name] for name in bare) > 5
    limit = 2 * max(bare[name] / bare_rounded[name] for name in bare)
    assert {name: error / rounded[name] for name, error in found.items() if error > limit * rounded[name]} == {}


def has_linear_door(pe, variant):
    linear_bias.is_straight.cache_clear()
    linear_bias.is_distance.cache_clear()
    return linear_bias.linear_of(tiny(pe, variant=variant).blocks[0].attn.encoding, True) is not None


@pytest.mark.parametrize("pe, variant, name, edited", [
    ("expe", {"on": "k"}, "expe_table", lambda n, l, start, theta, step: np.log1p(n)[..., None] * np.full(l, theta)),
    *((pe, {}, "distances", lambda m, n: np.log1p(np.abs(m[:, None] - n))) for pe in ("alibi", "grape"))])
def test_a_table_that_is_not_straight_has_no_linear_door(pe, variant, name, edited, monkeypatch):
    """As after an edit of it to a ramp in the logarithm of the position or of the distance."""
    with monkeypatch.context() as patch:
        patch.setattr(expe, name, edited)
        assert not has_linear_door(pe, variant)
    assert has_linear_door(pe, variant)


@pytest.mark.parametrize("dtype, digits", [(torch.float32, 2**-22), (torch.bfloat16, 2**-15), (torch.float16, 2**-20)])
def test_further_dimensions_keep_their_digits_over_8192_keys(dtype, digits):
    """Slopes that bf16 rounds by 1 in 256: what scores gain is right, and the output as good as without a bias."""
    S, D, rows = 8192, 32, torch.tensor([0, 1, 100, 4096, 8191])
    q, k, v = torch.randn(3, 1, 2, S, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    slopes, n = torch.tensor([[0.25], [1 / 128]]) * 1.0039 / math.sqrt(2), torch.arange(1.0 - S, 1.0)[None]
    wide, bias = [*linear_bias.augment_qk(q, k, slopes, n)], slopes.double()[..., None] * (n - n.mT[rows])

    def scores(q, k):
        return q.double()[:, :, rows] @ k.double().mT / math.sqrt(D)

    def error(q, k, bias):
        right = (scores(q[..., -D:], k[..., -D:]) + bias).masked_fill(n > n.mT[rows], -math.inf)
        right = right.softmax(-1) @ v.double()
        padded = F.pad(v, (0, q.shape[-1] - D))
        found = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=D**-0.5)[:, :, rows, :D]
        return (found - right).square().mean().sqrt()

    gain = scores(*wide) - scores(q, k)
    torch.testing.assert_close((gain - gain[..., -1:])[0], bias - bias[..., -1:], rtol=digits, atol=1e-9)
    assert error(*wide, bias) < 3 * error(q, k, 0)


def test_what_would_cost_bf16_digits(monkeypatch):
    """Keys that hold their positions, as in the plain form; and a bias that is counted from the last query."""
    bare, right = error_by_quarter(tiny().float(), "nope"), model_torch.ALiBi.score
    monkeypatch.setattr(model_torch.ALiBi, "score", lambda self, q, k, h, table: right(
        self, q, k, h, table[..., -1:, :].expand_as(table)))
    for pe, variant, quarters in (("expe", {"on": "k", "theta": 1 / 8}, [2, 3]), ("alibi", {"slopes": 3}, [0, 1])):
        assert (error_by_quarter(tiny(pe, variant=variant).float(), pe, variant) > 4 * bare)[quarters].all()


@pytest.mark.parametrize("make", [GPT, fast.FastGPT])
def test_token_losses_are_the_terms_of_the_mean_loss(make, monkeypatch):
    model, tokens, targets = tiny("rope", make=make), some_tokens(3, 50), some_tokens(3, 50, seed=5)
    monkeypatch.setitem(cross_entropy.LOGITS, "cpu", 7 * V)
    losses = model.token_losses(tokens, targets)
    assert losses.shape == (3, 50)
    by_hand = -model(tokens).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses, by_hand, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(losses.mean(), model(tokens, targets), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(losses.mean(), model(tokens, targets), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows, size, reduction", [
    (1, 1, "none"), (7, 1, "mean"), (7, 1e4, "none"), (1000, 1e4, "mean")])  # 1e4: exp would overflow
def test_fast_cross_entropy_and_its_gradients_are_the_plain_ones(rows, size, reduction, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOGITS, "cpu", rows * V)
    rng = np.random.default_rng(0)
    h, w, upstream = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((2, 5, 8), (V, 8), (2, 5)))
    h, w, targets = h.requires_grad_(), w.requires_grad_(), torch.from_numpy(rng.integers(0, V, (2, 5)))
    targets[0, 3] = targets[1, 2]  # a row of dW with two targets
    upstream = 3 if reduction == "mean" else upstream
    losses = [part(size * h, w, targets, reduction) for part in (fast.cross_entropy, model_torch.cross_entropy)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12 * size)
    found, right = (torch.autograd.grad((upstream * loss).sum(), (h, w)) for loss in losses)
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12 * size)
    if reduction == "mean":
        assert torch.autograd.gradcheck(fast.cross_entropy, (h, w, targets))


def test_bf16_loss_sums_its_gradients_in_fp32(monkeypatch):
    rng = np.random.default_rng(0)
    h = torch.from_numpy(rng.standard_normal((4096, 16))).requires_grad_()
    w = (torch.from_numpy(rng.standard_normal((V, 16))) / 4).requires_grad_()
    targets = torch.from_numpy(rng.integers(0, V, 4096))
    right = torch.autograd.grad(F.cross_entropy(F.linear(h, w), targets), (h, w))
    monkeypatch.setitem(cross_entropy.LOGITS, "cpu", 16 * V)  # 256 parts, whose sum in bf16 is off by 10% and more
    found = torch.autograd.grad(cross_entropy.CrossEntropy.apply(h.bfloat16(), w.bfloat16(), targets), (h, w))
    for x, y in zip(found, right, strict=True):
        assert (x - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("p", [0.1, 0.999])
def test_fast_dropout_keeps_its_share_and_the_mean(p):
    dropout, x = fast.Dropout(p), torch.ones(999, 1001, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    y = dropout(x)
    n, dropped = y.numel(), (y == 0)
    assert abs(dropped.double().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5 + 2**-17
    for part in dropped.double().flatten()[: n - n % 4].view(-1, 4).unbind(-1):  # each of the four in a random word
        assert abs(part.mean().item() - p) < 10 * (p * (1 - p) / n) ** 0.5 + 2**-17
    torch.testing.assert_close(y.unique(), torch.tensor([0, 1 / (1 - p)]).double(), rtol=2**-16 / (1 - p), atol=0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    torch.manual_seed(0)
    assert torch.equal(y, dropout(x)) and not torch.equal(y, dropout(x))
    assert dropout.eval()(x) is x or torch.equal(dropout(x), x)


@pytest.mark.parametrize("pe", [*ENCODINGS, "rope+sinks", "alibi+log"])
def test_bf16_autocast_trains_the_plain_parts(pe):
    tokens, targets = some_tokens(2, T), some_tokens(2, T, seed=4)
    exact, model = tiny(pe, "llama")(tokens, targets), tiny(pe, "llama").float().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.1 * exact
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
