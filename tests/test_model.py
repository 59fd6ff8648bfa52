"""The GPT against equations written out in loops, against two models of another library, and against its invariants."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model_torch
from config import ENCODINGS, EncodingConfig, ModelConfig
from expe import expe_table, exqpe_table, sinusoidal_table
from model_torch import GPT, Encoding, Places

V, T = 40, 12
STYLES = {"gpt": dict(norm="layernorm", mlp="gelu", tied=False), "llama": dict(norm="rmsnorm", mlp="swiglu", tied=True)}


SMALL = {"l": 5, "buckets": 6, "max_distance": 5}


def settings(pe, **changes):
    """An EncodingConfig that suits a width of 16 and a context of 12."""
    return EncodingConfig(pe, **{name: SMALL[name] for name in SMALL if name in ENCODINGS.get(pe, ())} | changes)


def tiny(pe="nope", style="gpt", seed=0, variant=(), **changes):
    """A float64 GPT with 2 layers, width 16, 2 heads, and weights large enough for attention to matter."""
    config = ModelConfig(
        **dict(
            n_layers=2,
            d_model=16,
            n_heads=2,
            context=T,
            vocab_size=V,
            d_mlp=40,
            **STYLES[style],
            encoding=settings(pe, **dict(variant)),
        )
        | changes
    )
    torch.manual_seed(seed)
    model = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def some_tokens(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


# ---- against the equations -------------------------------------------------------------------------------------------


def attention_in_loops(h, w_qkv, w_proj, n_heads, override=None, turn=None, on="qk", bias=None, shaw=None):
    """Equations 1 to 3 token by token and head by head. h (T, C); override (T, l) for q and k; turn (T, D/2) angles;

    bias(head, m, n) is added to a score; shaw(m, n) returns the vectors that are added to key n and to value n.
    """
    T, D = len(h), h.shape[1] // n_heads
    w_q, w_k, w_v = np.split(w_qkv, 3)
    phi = h.copy()
    if override is not None:
        phi[:, : override.shape[1]] = override
    enters = {part: phi if part in on else h for part in "qkv"}
    out = np.zeros_like(h)
    for head in range(n_heads):
        part = slice(head * D, (head + 1) * D)
        for m in range(T):
            scores, values = [], []
            for n in range(m + 1):
                q, k = (w_q @ enters["q"][m])[part], (w_k @ enters["k"][n])[part]
                values.append((w_v @ enters["v"][n])[part])
                if shaw is not None:
                    k, values[n] = k + shaw(m, n)[0], values[n] + shaw(m, n)[1]
                if turn is not None:
                    q = (q[: D // 2] + 1j * q[D // 2 :]) * np.exp(1j * turn[m])
                    k = (k[: D // 2] + 1j * k[D // 2 :]) * np.exp(1j * turn[n])
                scores.append(np.vdot(q, k).real / math.sqrt(D) + (bias(head, m, n) if bias else 0))
            weights = np.exp(scores) / np.sum(np.exp(scores))
            out[m, part] = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return out @ w_proj.T


def bucket_by_formula(d, buckets, max_distance):
    """T5's rule as its paper's code has it, for one distance."""
    half = buckets // 2
    if d < half:
        return max(d, 0)
    return min(half + int(math.log(d / half) / math.log(max_distance / half) * (buckets - half)), buckets - 1)


@pytest.mark.parametrize(
    "pe, variant",
    [
        *((pe, {}) for pe in ("nope", "expe", "exqpe", "rope", "alibi", "t5", "shaw")),
        *(("expe", {"on": on}) for on in ("k", "q", "qkv")),
        ("exqpe", {"on": "k"}),
        ("expe", {"constant": True}),
        ("expe", {"learn": "init"}),
        ("exqpe", {"learn": "random", "start": 0.3}),
    ],
    ids=str,
)
def test_attention_follows_the_papers_equations(pe, variant):
    model, n = tiny(pe, variant=variant), np.arange(T) * 3 + 100
    h = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    attention = model.blocks[0].attn
    ours = attention(h, model.encoding, model.places(n)).detach().numpy()[0]
    ramp = 1 / (4 * T)
    own = {name: p.detach().numpy() for name, p in model.encoding.named_parameters()}
    two = own.get("weight", {"expe": (0.0, ramp), "exqpe": (ramp, 1 / 16)}.get(pe))  # what --learn trains
    options = {}
    if pe == "expe":
        options["override"] = expe_table(n, 5, *two, step=0 if variant.get("constant") else 1)
    if pe == "exqpe":
        options["override"] = exqpe_table(n, 5, variant.get("start", 0.0), *two)
    if pe == "rope":
        options["turn"] = np.outer(n, [10000.0 ** (-2 * i / 8) for i in range(4)])
    if pe == "alibi":
        options["bias"] = lambda head, m, s: -(2 ** (-4 * (head + 1))) * (n[m] - n[s])
    if pe == "t5":
        options["bias"] = lambda head, m, s: own["weight"][bucket_by_formula(n[m] - n[s], 6, 5), head]
    if pe == "shaw":
        options["shaw"] = lambda m, s: [own[part][min(n[m] - n[s], 5)] for part in ("keys", "values")]
    loops = attention_in_loops(
        h.numpy()[0],
        attention.qkv.weight.detach().numpy(),
        attention.proj.weight.detach().numpy(),
        2,
        on=variant.get("on", "qk"),
        **options,
    )
    np.testing.assert_allclose(ours, loops, rtol=1e-10, atol=1e-12)


def test_sinusoidal_is_added_to_the_embedding():
    model, tokens = tiny("sinusoidal"), some_tokens(1, T)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    model(tokens)
    embedded = model.embedding.weight[tokens[0]].detach().numpy()
    expected = embedded + sinusoidal_table(np.arange(T), 16)
    np.testing.assert_allclose(seen[0][0].detach().numpy(), expected, rtol=1e-12)


def test_once_overrides_the_residual_stream_before_the_first_block_and_nothing_else():
    model, tokens, n = tiny("expe", variant={"once": True}), some_tokens(1, T), np.arange(T)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    model(tokens)
    expected = model.embedding.weight[tokens[0]].detach().numpy()
    expected[:, :5] = expe_table(n, 5, 0.0, 1 / (4 * T))
    np.testing.assert_allclose(seen[0][0].detach().numpy(), expected, rtol=1e-12)
    at, w = model.places(n), model.blocks[0].attn.qkv.weight.view(3, 16, 16)
    assert model.encoding.override(w) is w and all(model.encoding.offset(part, w, at.table) is None for part in "qkv")


def test_value_door_needs_no_score_and_keeps_the_mask(monkeypatch):
    seen = []

    class Nothing(Encoding):  # adds 0 to the output, and shows the weights
        reads_weights = True

        def value(self, weights, table):
            seen.append(weights)
            return 0

    plain, h = tiny(), torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setitem(model_torch.ENCODINGS, "nope", Nothing)
    model = tiny()
    attention = model.blocks[0].attn
    torch.testing.assert_close(
        attention(h, model.encoding, Places(None)),
        plain.blocks[0].attn(h, plain.encoding, Places(None)),
        rtol=1e-10,
        atol=1e-12,
    )
    assert torch.equal(seen[0], seen[0].tril()) and torch.allclose(seen[0].sum(-1), torch.ones((), dtype=torch.float64))


def test_score_door_adds_to_the_scaled_scores_before_the_mask(monkeypatch):
    class Linear(Encoding):  # ALiBi's bias for slopes 1/2 and 1/4, in two lines
        def pairs(self, queries, keys):
            return -np.array([[[0.5]], [[0.25]]]) * np.abs(queries[:, None] - keys).astype(np.float64)

        def score(self, q, k, table):
            return table

    monkeypatch.setitem(model_torch.ENCODINGS, "nope", Linear)
    model = tiny()
    h = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    attention = model.blocks[0].attn
    ours = attention(h, model.encoding, model.places(np.arange(T)))
    q, k, v = (h @ w.T for w in attention.qkv.weight.split(16))
    heads = []
    for head, slope in enumerate((0.5, 0.25)):
        part = slice(head * 8, head * 8 + 8)
        scores = q[0, :, part] @ k[0, :, part].T / math.sqrt(8)
        for m in range(T):
            for n in range(T):
                scores[m, n] = scores[m, n] - slope * (m - n) if n <= m else -math.inf
        heads.append(scores.softmax(-1) @ v[0, :, part])
    torch.testing.assert_close(ours[0], torch.cat(heads, -1) @ attention.proj.weight.T, rtol=1e-10, atol=1e-12)


# ---- against another library's models --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_llama_style_equals_transformers_llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = tiny("rope", "llama", tied=tied)
    theirs = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=V,
                hidden_size=16,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=2,
                rms_norm_eps=1e-5,
                tie_word_embeddings=tied,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                attn_implementation="eager",
            )
        )
        .double()
        .eval()
    )
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    weights = {}
    for name, value in ours.state_dict().items():
        if name in names:
            weights[names[name]] = value
            continue
        layer, rest = name.removeprefix("blocks.").split(".", 1)
        if rest == "attn.qkv.weight":
            for part, w in zip("qkv", value.split(16), strict=True):
                weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = w
        else:
            rest = {
                "attn.proj.weight": "self_attn.o_proj.weight",
                "norm1.weight": "input_layernorm.weight",
                "norm2.weight": "post_attention_layernorm.weight",
            }.get(rest) or rest.replace(".weight", "_proj.weight")
            weights[f"model.layers.{layer}.{rest}"] = value
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = some_tokens(2, 3 * T)  # far past the trained length
    torch.testing.assert_close(
        ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5
    )  # theirs computes angles and norms in fp32


def test_gpt_style_with_learned_positions_equals_transformers_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = tiny("learned", "gpt", tied=True)
    theirs = (
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=V, n_positions=T, n_embd=16, n_layer=2, n_head=2, n_inner=40, attn_implementation="eager"
            )
        )
        .double()
        .eval()
    )
    own = ours.state_dict()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            name = (
                name.removeprefix("transformer.").replace("h.", "blocks.", 1)
                if ".h." in name
                else name.removeprefix("transformer.")
            )
            for old, new in (
                ("wte", "embedding"),
                ("wpe", "encoding"),
                ("ln_f", "norm"),
                ("ln_1", "norm1"),
                ("ln_2", "norm2"),
                ("attn.c_attn", "attn.qkv"),
                ("attn.c_proj", "attn.proj"),
                ("mlp.c_fc", "mlp.up"),
                ("mlp.c_proj", "mlp.down"),
            ):
                name = name.replace(old, new)
            if name in own:
                parameter.copy_(
                    own[name].T
                    if name.endswith(("qkv.weight", "proj.weight", "up.weight", "down.weight"))
                    else own[name]
                )
            else:
                assert name.endswith(("qkv.bias", "proj.bias", "up.bias", "down.bias")), name
                parameter.zero_()  # we have no biases in linear layers
    tokens = some_tokens(2, T)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)
    logits = ours(tokens)
    by_hand = torch.stack(
        [-logits[b, t].log_softmax(-1)[some_tokens(2, T, seed=9)[b, t]] for b in range(2) for t in range(T)]
    ).mean()
    torch.testing.assert_close(ours(tokens, some_tokens(2, T, seed=9)), by_hand, rtol=1e-10, atol=1e-10)


# ---- invariants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pe", ENCODINGS)
def test_no_token_sees_a_later_one(pe, style):
    model, tokens = tiny(pe, style), some_tokens(2, T)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % V
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("pe", ENCODINGS)
def test_positions_may_be_any_integers(pe):
    model, tokens = tiny(pe), some_tokens(2, 6)
    default = model(tokens)
    assert torch.equal(default, model(tokens, positions=torch.arange(6)))
    expanded = model(tokens, positions=torch.arange(6, dtype=torch.int32).expand(2, 6))
    torch.testing.assert_close(default, expanded, rtol=1e-12, atol=1e-12)
    odd = torch.tensor([[3, 3, 0, 11, 5, 1], [0, 1, 2, 3, 4, 5]])  # repeats, gaps, any order, a row for each sequence
    logits = model(tokens, positions=odd)
    torch.testing.assert_close(logits[1:], model(tokens[1:]), rtol=1e-12, atol=1e-12)
    assert torch.allclose(logits[0], default[0]) == (pe == "nope")
    if pe != "learned":
        far = model(tokens, positions=torch.tensor([-5, 10**9, 7, 7, 0, 40]))
        assert torch.isfinite(far).all()


def test_shifting_all_positions_changes_nothing_for_relative_encodings_and_something_for_absolute_ones():
    tokens = some_tokens(1, 8)
    for pe, relative in {
        **dict.fromkeys(("nope", "rope", "alibi", "t5", "shaw"), True),
        **dict.fromkeys(("sinusoidal", "learned", "expe", "exqpe"), False),
    }.items():
        model = tiny(pe)
        shifted = model(tokens, positions=torch.arange(8) + 3)
        assert torch.allclose(shifted, model(tokens), rtol=1e-9, atol=1e-11) == relative, pe


def test_expe_on_keys_alone_is_relative():
    """n enters scores as n (a_m . w) alone, and the softmax over n drops what all keys share: distances are left."""
    tokens = some_tokens(1, 8)
    for on in ("k", "q", "qk", "qkv"):
        model = tiny("expe", variant={"on": on})
        shifted = model(tokens, positions=torch.arange(8) + 100)
        assert torch.allclose(shifted, model(tokens), rtol=1e-9, atol=1e-11) == (on == "k"), on
    model = tiny("exqpe", variant={"on": "k"})  # its rows are straight from one multiple of l = 5 to the next alone
    for shift in (1, 5, 100, 101):
        shifted = model(tokens, positions=torch.arange(8) + shift)
        assert torch.allclose(shifted, model(tokens), rtol=1e-9, atol=1e-11) == (shift % 5 == 0), shift


@pytest.mark.parametrize("pe", ["sinusoidal", "expe", "exqpe", "rope"])
def test_tables_are_exact_at_positions_that_half_precision_merges(pe):
    positions, model = np.array([256, 257, 1_000_003]), tiny(pe)
    exact = model.encoding.rows(positions)
    for dtype in (torch.float32, torch.bfloat16):
        cast_once = torch.from_numpy(exact).to(dtype)
        assert torch.equal(model.to(dtype).places(positions).table, cast_once)
    rows = model.float().places(positions).table
    assert not torch.equal(rows[..., 0, :], rows[..., 1, :])


def test_table_follows_the_length_and_the_dtype_of_the_weights():
    model = tiny("expe")
    four, nine = np.arange(4), np.arange(9)
    assert model.places(four).table.shape == (4, 5) and model.places(nine).table.shape == (9, 5)
    assert model.places(nine) is model.places(np.arange(9)) and model.float().places(nine).table.dtype == torch.float32


def test_every_encoding_starts_from_the_same_weights():
    states = {}
    for pe in ENCODINGS:
        config = dataclasses.replace(tiny().config, encoding=settings(pe))
        states[pe] = GPT(config, seed=3).state_dict()
        for name, value in states["nope"].items():
            assert torch.equal(value, states[pe][name]), (pe, name)


def test_first_weights_are_those_of_the_rule():
    config = dataclasses.replace(tiny("learned").config, d_model=64, d_mlp=256, vocab_size=500, n_layers=8, context=99)
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


def test_dropout_is_on_the_embedding_and_on_each_residual_branch_only():
    model = tiny(dropout=0.5, n_layers=1).train()
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, inputs, out: seen.append((out == 0).double().mean().item()))
    model(some_tokens(8, T))
    assert len(seen) == 3 and all(0.4 < share < 0.6 for share in seen)  # embedding, attention branch, MLP branch
    torch.manual_seed(0)
    a = model(some_tokens(8, T))
    torch.manual_seed(0)
    assert torch.equal(a, model(some_tokens(8, T))) and not torch.equal(a, model.eval()(some_tokens(8, T)))


def test_token_losses_are_the_terms_of_the_mean_loss(monkeypatch):
    model, tokens, targets = tiny("rope"), some_tokens(3, 50), some_tokens(3, 50, seed=5)
    monkeypatch.setitem(model_torch.LOGITS, "cpu", 7 * V)
    losses = model.token_losses(tokens, targets)
    assert losses.shape == (3, 50)
    torch.testing.assert_close(losses.mean(), model(tokens, targets), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(losses.mean(), model(tokens, targets), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 10, 1000])
@pytest.mark.parametrize("size", [1, 1e4])  # 1e4: exp would overflow
def test_cross_entropy_and_its_gradients_are_torchs(rows, size, monkeypatch):
    monkeypatch.setitem(model_torch.LOGITS, "cpu", rows * V)
    rng = np.random.default_rng(0)
    h, w = (torch.from_numpy(rng.standard_normal(shape)).requires_grad_() for shape in ((10, 8), (V, 8)))
    targets = torch.from_numpy(rng.integers(0, V, 10))
    targets[3] = targets[7]  # a row of dW with two targets
    found = torch.autograd.grad(3 * model_torch.CrossEntropy.apply(size * h, w, targets), (h, w))
    right = torch.autograd.grad(3 * F.cross_entropy(F.linear(size * h, w), targets), (h, w))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12 * size)
    assert torch.autograd.gradcheck(model_torch.CrossEntropy.apply, (h, w, targets))


def test_bf16_loss_sums_its_gradients_in_fp32(monkeypatch):
    rng = np.random.default_rng(0)
    h = torch.from_numpy(rng.standard_normal((4096, 16))).requires_grad_()
    w = (torch.from_numpy(rng.standard_normal((V, 16))) / 4).requires_grad_()
    targets = torch.from_numpy(rng.integers(0, V, 4096))
    right = torch.autograd.grad(F.cross_entropy(F.linear(h, w), targets), (h, w))
    monkeypatch.setitem(model_torch.LOGITS, "cpu", 16 * V)  # 256 parts, whose sum in bf16 would be off by 10% and more
    found = torch.autograd.grad(model_torch.CrossEntropy.apply(h.bfloat16(), w.bfloat16(), targets), (h, w))
    for x, y in zip(found, right, strict=True):
        assert (x - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_keeps_its_share_and_the_mean(p):
    dropout, x = model_torch.Dropout(p), torch.ones(999, 1001, dtype=torch.float64, requires_grad=True)
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


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pe", ENCODINGS)
def test_bf16_autocast_trains(pe, style):
    model = tiny(pe, style).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(some_tokens(2, T), some_tokens(2, T, seed=4))
    loss.backward()
    exact = tiny(pe, style)(some_tokens(2, T), some_tokens(2, T, seed=4))
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.1 * exact
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# ---- wrong input -----------------------------------------------------------------------------------------------------


def test_wrong_tokens_and_positions_are_named():
    model = tiny("learned")
    for tokens, message in (
        (torch.tensor([[0, V]]), f"tokens must be from 0 to {V - 1}, got {V}"),
        (torch.tensor([[-1]]), "got -1"),
        (torch.zeros(3, dtype=torch.long), r"tokens must have the shape \(B, T\), got \(3,\)"),
        (torch.zeros(2, 0, dtype=torch.long), r"got \(2, 0\)"),
        (torch.zeros(1, 2), "tokens must be int64 or int32"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(ValueError, match=r"targets must have the shape \(1, 4\), got \(1, 3\)"):
        model(some_tokens(1, 4), some_tokens(1, 3))
    with pytest.raises(
        ValueError,
        match="learned has a row for each of the positions 0 to 11 it was trained on, and none for position 12",
    ):
        model(some_tokens(1, T + 1))
    with pytest.raises(ValueError, match=r"positions must be integers of shape \(4,\) or \(1, 4\), got float32"):
        model(some_tokens(1, 4), positions=torch.arange(4.0))
    with pytest.raises(ValueError, match=r"got int64 of \(5,\)"):
        model(some_tokens(1, 4), positions=torch.arange(5))


@pytest.mark.slow
@pytest.mark.parametrize("pe", ENCODINGS)
def test_compiled_model_equals_the_eager_one(pe):
    model, tokens, targets = tiny(pe).float(), some_tokens(2, T), some_tokens(2, T, seed=4)
    eager = model(tokens, targets)
    model.compile()
    torch.testing.assert_close(model(tokens, targets), eager, rtol=1e-5, atol=1e-5)
