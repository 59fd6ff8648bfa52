"""Pretrained RoPE models of transformers past their trained length: our Reader, and each pair's score on its own."""

import copy
import functools
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, command, need, slow
from test_ladder import tiny
from test_measure import documents_of, rows_of

from expe import rope_inv_freq
from interop.over import LLAMA, NEOX
from longer.cache import Cache
from longer.reading import Reader

transformers = need("transformers")

from interop import rope_models  # noqa: E402  (it imports transformers)
from interop.rope_models import make_window_cache, read_longer  # noqa: E402

L, T, V = 16, 70, 60                     # trained length, tokens of a text, vocabulary
EXACT = {"rtol": 1e-9, "atol": 1e-9}     # where all is float64
SINGLE = {"rtol": 1e-4, "atol": 1e-4}    # where transformers computes angles and RMSNorm in float32
METHODS = [
    ("window", {"keys": 12, "sinks": 0}), ("window", {"keys": 11, "sinks": 3}), ("window", {}),
    ("dual-chunk", {}), ("dual-chunk", {"chunk": 5}),
    ("self-extend", {"length": T}), ("self-extend", {"factor": 5, "chunk": 7}),
]  # fmt: skip
METHOD_IDS = [f"{method} {arguments}" for method, arguments in METHODS]


@pytest.fixture(autouse=True)
def several_blocks_without_gradients(monkeypatch):
    monkeypatch.setattr(rope_models, "BLOCK", 16)
    with torch.no_grad():
        yield


def some(*shape, seed=1):
    """Tokens without the first ones, which some models take for padding."""
    return torch.randint(5, V, shape, generator=torch.Generator().manual_seed(seed))


def read_in_parts(model, tokens, cache=None):
    """The logits of a text that is read with a cache: in two parts, and token by token."""
    parts = []
    for begin, end in [(0, 23), (23, 40), *((i, i + 1) for i in range(40, tokens.shape[1]))]:
        found = model(tokens[:, begin:end], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.logits)
    return torch.cat(parts, dim=1)


# ---- our Reader with the same weights --------------------------------------------------------------------------------


def make_pair(form, groups=1, **rope):
    """(Reader, the same as a Llama or GPT-NeoX of transformers), in float64, with 4 heads.

    groups: so many heads have the same keys and values, which the Llama has once. rope: of its rope_parameters.
    """
    kind, style = {"llama": (LLAMA, "llama"), "neox": (NEOX, "gpt")}[form]
    ours = tiny("rope", style, make=Reader, vocab=V, context=L, width=32, heads=4)
    D = ours.config.d_head
    for block in ours.blocks:
        _, *shared = block.attn.qkv.weight.view(3, 4 // groups, groups, D, 32)
        for w in shared:
            w.copy_(w[:, :1].clone().expand_as(w))
    weights = kind.theirs(ours.state_dict(), 4)
    for name, w in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = w.view(4 // groups, groups, D, 32)[:, 0].flatten(0, 1)
    settings = kind.settings(ours.config)
    settings["rope_parameters"] |= rope
    if groups > 1:
        settings["num_key_value_heads"] = 4 // groups
    config = transformers.AutoConfig.for_model(**settings, dtype="float64")
    architecture = getattr(transformers, kind.architecture)
    return ours, architecture.from_pretrained(None, config=config, state_dict=weights).double().eval()


def make_exact(model):
    """Give a model of transformers the angles and RMSNorm of float64, which it computes in float32."""
    rotary = model.get_decoder().rotary_emb
    rotary.inv_freq = torch.from_numpy(rope_inv_freq(2 * len(rotary.inv_freq)))

    def rotate(x, position_ids):
        angle = (position_ids[..., None] * rotary.inv_freq).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    rotary.forward = rotate
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(F.rms_norm, normalized_shape=(32,), weight=module.weight,
                                               eps=module.variance_epsilon)
    return model


def our_logits(ours, tokens, method, arguments):
    if method == "window" and (sinks := arguments.get("sinks", 4)):
        return ours.scale_to(T)(tokens, cache=Cache(sinks, arguments.get("keys", L - sinks) - 1))
    if method == "window":
        return ours.scale_to(T, keys=arguments["keys"])(tokens)
    arguments = {name: value for name, value in arguments.items() if name != "length"}
    return ours.scale_to(T, rope_scaling=method, **arguments)(tokens)


@pytest.mark.parametrize("method, arguments", METHODS, ids=METHOD_IDS)
@pytest.mark.parametrize("form, groups", [("llama", 2), ("neox", 1), *slow(("llama", 1), ("llama", 4))])
def test_logits_are_our_readers_at_once_and_with_each_cache(form, groups, method, arguments):
    ours, theirs = make_pair(form, groups)
    tokens = some(3, T)
    make_exact(theirs)
    plain = theirs(tokens).logits
    torch.testing.assert_close(plain, ours(tokens), **EXACT)
    right = our_logits(ours, tokens, method, arguments)
    assert (right - plain)[:, 2 * L :].abs().max() > 0.1
    read_longer(theirs, method, **arguments)
    torch.testing.assert_close(theirs(tokens).logits, right, **EXACT)
    torch.testing.assert_close(read_in_parts(theirs, tokens), right, **EXACT)
    if method == "window":
        cache = make_window_cache(theirs)
        torch.testing.assert_close(read_in_parts(theirs, tokens, cache), right, **EXACT)
        kept = arguments.get("keys", L - 4) + arguments.get("sinks", 4) - 1
        assert {layer.keys.shape for layer in cache.layers} == {(3, 4 // groups, kept, 8)}
    read_longer(theirs, "none")
    assert torch.equal(theirs(tokens).logits, plain)


@pytest.mark.parametrize("form", ["llama", "neox"])
def test_yarn_and_a_raised_base_of_transformers_are_our_readers_at_once_and_with_a_cache(form):
    """By rope_parameters alone. A base that is raised for the longest text is dynamic NTK, with one base for all."""
    tokens, s = some(2, T), T / L
    yarn = {"rope_type": "yarn", "factor": s, "original_max_position_embeddings": L}
    raised = {"rope_theta": 10000 * s ** (8 / (8 - 2))}
    for method, factor, rope in (("yarn", s, yarn), ("dynamic", 1.0, raised), ("ntk", s, raised)):
        ours, theirs = make_pair(form, **rope)
        right = ours.scale_to(T, rope_scaling=method, factor=factor)(tokens)
        torch.testing.assert_close(theirs(tokens).logits, right, **SINGLE)
        torch.testing.assert_close(read_in_parts(theirs, tokens), right, **SINGLE)


def test_dynamic_ntk_of_transformers_is_our_readers_at_once_but_not_with_a_cache():
    tokens = some(2, T)
    ours, theirs = make_pair("llama", rope_type="dynamic", factor=3.0)
    right = ours.scale_to(T, rope_scaling="dynamic", factor=3.0)(tokens)
    torch.testing.assert_close(theirs(tokens).logits, right, **SINGLE)
    _, theirs = make_pair("llama", rope_type="dynamic", factor=3.0)
    assert (read_in_parts(theirs, tokens) - right)[:, -1].abs().max() > 0.1


# ---- every family, each pair's score on its own ----------------------------------------------------------------------

SHAPE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": L, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
BASES = {"sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
         "full_attention": {"rope_type": "default", "rope_theta": 3000.0}}
FAMILIES = {
    "llama": GROUPED,
    "llama-yarn": GROUPED | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                                 "original_max_position_embeddings": L}},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "mistral": GROUPED | {"sliding_window": None},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "gemma3_text": GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 6, "rope_parameters": BASES,
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}  # fmt: skip


def make_model(family, seed=0, **changes):
    """A random float64 model whose attention matters."""
    settings = SHAPE | FAMILIES[family] | changes
    config = transformers.AutoConfig.for_model(family.partition("-")[0], **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for w in model.parameters():
        w.copy_(w + 0.3 * torch.randn_like(w))
    return model


def distance(method, m, n, keys=12, sinks=4, chunk=None, factor=None, **_):
    """The distance at which a query at m scores a key at n <= m, or None if it does not see it, by the papers."""
    if method == "window" and m - n >= keys:
        return min(m, sinks + keys - 1) - n if n < sinks else None
    if method == "dual-chunk":
        chunk = chunk or L * 3 // 4
        if m // chunk == n // chunk:
            return m - n
        far = m % chunk + chunk if m // chunk == n // chunk + 1 else 2 * chunk - 1
        return min(far, L - 1) - n % chunk
    if method == "self-extend":
        chunk = chunk or L // 2
        factor = factor or next(G for G in range(1, T) if (T - 1) // G + chunk - chunk // G < L)
        return m - n if m - n < chunk else m // factor + chunk - chunk // factor - n // factor
    return m - n


def read_pair_by_pair(model, tokens, method, arguments):
    """The logits of a copy of the model whose layers without a window score each pair at its distance.

    Their queries and keys are not rotated: as complex numbers they are multiplied by e^(i distance theta_j).
    """
    model = copy.deepcopy(model)
    decoder = model.get_decoder()
    rotary, parameters = decoder.rotary_emb, decoder.config.rope_parameters
    base = parameters.get("full_attention", parameters)["rope_theta"]
    R = 4 if decoder.config.model_type == "gpt_neox" else 8
    theta = base ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    if parameters.get("rope_type") == "yarn":
        theta = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](decoder.config)[0].double()
    n_tokens = tokens.shape[1]
    apart = [[distance(method, m, n, **arguments) if n <= m else None for n in range(n_tokens)]
             for m in range(n_tokens)]
    seen = torch.tensor([[d is not None for d in row] for row in apart])
    d = torch.tensor([[d or 0 for d in row] for row in apart], dtype=torch.float64)
    phase = torch.polar(torch.ones(()).double(), d[..., None] * theta)                 # (T, S, R/2)
    rotate = rotary.forward

    def leave_unrotated(x, position_ids, layer_type=None):
        cos, sin = rotate(x, position_ids, *([layer_type] if layer_type else []))
        if layer_type == "sliding_attention":
            return cos, sin
        return torch.full_like(cos, getattr(rotary, "attention_scaling", 1.0)), torch.zeros_like(sin)

    def attend(module, query, key, value, attention_mask, scaling, sliding_window=None, **others):
        if sliding_window:
            own = transformers.AttentionInterface()["sdpa"]
            return own(module, query, key, value, attention_mask, scaling=scaling, **others)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        q, k = (torch.complex(x[..., : R // 2], x[..., R // 2 : R]) for x in (query, key))
        scores = torch.einsum("bhmj,bhnj,mnj->bhmn", q, k.conj(), phase).real + query[..., R:] @ key[..., R:].mT
        weights = (scores * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    rotary.forward = leave_unrotated
    transformers.AttentionInterface.register("pair-by-pair", attend)
    transformers.AttentionMaskInterface.register("pair-by-pair", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("pair-by-pair")
    return model(tokens).logits


@pytest.mark.parametrize("method, arguments", METHODS, ids=METHOD_IDS)
@pytest.mark.parametrize("family", ["gemma3_text", *slow(*(name for name in FAMILIES if name != "gemma3_text"))])
def test_each_pair_is_scored_at_its_distance_at_once_and_with_each_cache(family, method, arguments):
    model, tokens = make_model(family), some(2, T)
    plain = model(tokens).logits
    torch.testing.assert_close(plain, read_pair_by_pair(model, tokens, "none", {}), **SINGLE)
    right = read_pair_by_pair(model, tokens, method, arguments)
    assert (right - plain)[:, 2 * L :].abs().max() > 0.1
    read_longer(model, method, **arguments)
    found = model(tokens).logits
    torch.testing.assert_close(found, right, **SINGLE)
    torch.testing.assert_close(read_in_parts(model, tokens), found, **SINGLE)
    if method == "window":
        torch.testing.assert_close(read_in_parts(model, tokens, make_window_cache(model)), found, **SINGLE)


@pytest.mark.parametrize("method, arguments, length", [
    ("window", {}, L), ("window", {"keys": 9, "sinks": 2}, 11), ("dual-chunk", {}, L), ("dual-chunk", {"chunk": 5}, 10),
    ("self-extend", {"length": L}, L), ("self-extend", {"factor": 3}, 8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["gemma3_text", *slow(*(name for name in FAMILIES if name != "gemma3_text"))])
def test_a_short_text_is_read_as_trained(family, method, arguments, length):
    model, tokens = make_model(family), some(2, 2 * L)
    plain = model(tokens).logits
    found = read_longer(model, method, **arguments)(tokens).logits
    torch.testing.assert_close(found[:, :length], plain[:, :length], **SINGLE)
    if "length" not in arguments:
        assert (found[:, length + 2 :] - plain[:, length + 2 :]).abs().max() > 0.1


SLIDING = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}
OWN_WINDOWS = {
    "mistral": ({}, {"sliding_window": 9}),
    "qwen2": ({}, SLIDING), "qwen3": ({}, SLIDING),
    "gemma3_text": ({"layer_types": ["full_attention"] * 3}, {
        "layer_types": ["sliding_attention"] * 3, "sliding_window": 9,
        "rope_parameters": BASES | {"sliding_attention": BASES["full_attention"]}}),
}  # fmt: skip


@pytest.mark.parametrize("family", OWN_WINDOWS)
def test_a_window_is_transformers_own_sliding_window(family):
    ours, theirs = (make_model(family, **changes) for changes in OWN_WINDOWS[family])
    tokens = some(2, T)
    right = theirs(tokens).logits
    assert (ours(tokens).logits - right).abs().max() > 0.1
    read_longer(ours, "window", keys=9, sinks=0)
    torch.testing.assert_close(ours(tokens).logits, right, **SINGLE)
    torch.testing.assert_close(read_in_parts(ours, tokens, make_window_cache(ours)), right, **SINGLE)
    with pytest.raises(ValueError, match="all layers of this model have a window of 9 keys"):
        read_longer(theirs, "dual-chunk")


# ---- batches, generation, formats ------------------------------------------------------------------------------------


def greedy(model, tokens, steps):
    """What a model writes, reading all anew at each step."""
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return tokens


@pytest.mark.parametrize("method, arguments", METHODS, ids=METHOD_IDS)
def test_generation_writes_what_whole_passes_do_with_padding_and_with_beams(method, arguments):
    model, tokens = read_longer(make_model("llama"), method, **arguments), some(2, 30)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    right = greedy(model, tokens, 12)
    assert torch.equal(model.generate(tokens, **options), right)
    short = tokens[:1, 7:]
    padded = torch.cat((torch.cat((torch.zeros(1, 7, dtype=torch.long), short), dim=1), tokens[1:]))
    found = model.generate(padded, attention_mask=(padded > 0).long(), **options)
    assert torch.equal(found[:1, 7:], greedy(model, short, 12)) and torch.equal(found[1:], right[1:])
    if method == "window":
        assert torch.equal(model.generate(tokens, past_key_values=make_window_cache(model), **options), right)
        beams = [model.generate(tokens, num_beams=3, past_key_values=cache, **options)
                 for cache in (None, make_window_cache(model))]
        assert torch.equal(*beams)
        with pytest.raises(ValueError, match="texts of a batch must have the same length, without padding"):
            model.generate(padded, attention_mask=(padded > 0).long(), past_key_values=make_window_cache(model),
                           **options)


@pytest.mark.parametrize("method, arguments", METHODS, ids=METHOD_IDS)
def test_texts_in_one_row_and_gradients_are_those_of_each_text(method, arguments):
    model = read_longer(make_model("llama"), method, **arguments)
    texts = some(1, 40), some(1, 30, seed=2)
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    found = model(torch.cat(texts, dim=1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, torch.cat([model(text).logits for text in texts], dim=1), **SINGLE)
    w = model.get_decoder().layers[0].self_attn.k_proj.weight

    def loss():
        return F.cross_entropy(model(texts[0]).logits[0, :-1], texts[0][0, 1:])

    with torch.enable_grad():
        loss().backward()
    direction = torch.randn_like(w)
    slope = (w.grad * direction).sum()
    losses = []
    for step in (1e-4, -1e-4):
        w.add_(step * direction)
        losses.append(loss())
        w.sub_(step * direction)
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-4, slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method, arguments", [("window", {}), ("dual-chunk", {}), ("self-extend", {"length": L})])
def test_a_mask_of_the_users_own_may_show_later_keys(method, arguments):
    """As transformers' masks do for the parts of an image."""
    model, tokens = make_model("llama"), some(2, L)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    mask[3:9, 3:9] = True
    options = {"attention_mask": mask.expand(2, 1, L, L), "use_cache": False}
    right = model(tokens, **options).logits
    assert (model(tokens).logits - right).abs().max() > 0.1
    torch.testing.assert_close(read_longer(model, method, **arguments)(tokens, **options).logits, right, **SINGLE)


@pytest.mark.parametrize("method, arguments", METHODS, ids=METHOD_IDS)
def test_half_precision_stays_near(method, arguments):
    model, tokens = make_model("llama"), some(2, T)
    for w in model.parameters():
        w.copy_(w.bfloat16())                                           # so that the weights are the same
    right = read_longer(model, method, **arguments)(tokens).logits
    found = model.bfloat16()(tokens).logits
    assert found.dtype == torch.bfloat16
    assert (found - right).square().mean() < 0.01 * right.var()


def test_gemma_3_with_images_reads_a_text_as_its_text_model_does():
    text = make_model("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=1,
                                       image_token_id=4, boi_token_index=3, eoi_token_index=2)
    model = transformers.Gemma3ForConditionalGeneration(config).double().eval()
    model.get_decoder().load_state_dict(text.model.state_dict())
    tokens = some(2, T)
    for method, arguments in METHODS:
        right = read_longer(text, method, **arguments).model(tokens).last_hidden_state
        read_longer(model, method, **arguments)
        found = model(tokens, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(found, right, **SINGLE)


@pytest.mark.slow
def test_the_lines_of_the_readme_run(tmp_path, capsys):
    """On a model with a trained length of 128, whose last 128 targets they score."""
    page = (ROOT / "interop/README.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Read past the trained length")
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    make_model("llama", max_position_embeddings=128).save_pretrained(tmp_path)
    names = {"NAME": tmp_path, "tokens": some(1, 16 * 128 + 1)}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3 and names["written"].shape[1] > 16 * 128 + 1
    assert names["model"].config.rope_parameters["rope_type"] == "yarn"
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["128", "512", "2048"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, arguments, words", [
    ("yarn", {}, "method must be none, window, dual-chunk, self-extend, got 'yarn'"),
    ("dual-chunk", {"keys": 4}, "keys is for window, and method is dual-chunk: leave it out"),
    ("window", {"chunk": 4}, "chunk is for dual-chunk and self-extend, and method is window: leave it out"),
    ("none", {"keys": 4}, "keys is for window, and method is none: leave it out"),
    ("window", {"keys": 0}, "keys must be a whole number of at least 1, got 0"),
    ("window", {"keys": 4.0}, "keys must be a whole number of at least 1, got 4.0"),
    ("window", {"sinks": -1}, "sinks must be a whole number of at least 0, got -1"),
    ("window", {"keys": 14, "sinks": 3}, "sinks + keys must be at most the trained length, 16, or distances are new "
                                         "again; got 3 + 14"),
    ("dual-chunk", {"chunk": 16}, "chunk must be from 1 to 15, got 16"),
    ("dual-chunk", {"context": 1}, "context must be a whole number of at least 2, got 1"),
    ("self-extend", {}, "self-extend needs either factor, the positions in a group, or length"),
    ("self-extend", {"factor": 2, "length": 64}, "self-extend needs either factor"),
    ("self-extend", {"factor": 1.5}, "factor must be a whole number of at least 1 for self-extend, got 1.5"),
    ("self-extend", {"length": 1e3}, "length must be a whole number of at least 1, got 1000.0"),
], ids=str)  # fmt: skip
def test_a_wrong_method_or_argument_is_refused_in_one_line_and_changes_nothing(method, arguments, words):
    model, tokens = read_longer(make_model("llama"), "dual-chunk"), some(1, 40)
    before = model(tokens).logits
    with pytest.raises(ValueError) as error:
        read_longer(model, method, **arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert torch.equal(model(tokens).logits, before)


def test_models_masks_and_caches_that_do_not_fit_are_refused():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=V))
    for model in (gpt2, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="model must be a decoder of transformers with model_type llama, qwen2, "):
            read_longer(model, "window")
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type dynamic changes all frequencies as a text grows"):
        read_longer(make_model("llama", rope_parameters=dynamic), "window")
    with pytest.raises(ValueError, match="model must be causal"):
        read_longer(make_model("gemma3_text", use_bidirectional_attention=True), "window")
    model, tokens = make_model("llama"), some(1, 8)
    with pytest.raises(ValueError, match='call read_longer\\(model, "window"\\) first'):
        make_window_cache(model)
    read_longer(model, "window")
    with pytest.raises(ValueError, match="past_key_values must be a DynamicCache"):
        model(tokens, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ValueError, match="attention_mask must be \\(B, S\\) or boolean, got torch.float64"):
        model(tokens, attention_mask=torch.zeros(1, 1, 8, 8, dtype=torch.float64))
    cache = make_window_cache(model)
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(-1)


# ---- a trained model, from train.py to its losses --------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    """(folder of a run that has learned something, the folder that it was exported to)."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*TINY, "--pe", "rope", "--norm", "rmsnorm", "--mlp", "swiglu", "--batch-size", "32", "--steps", "400"]
    done = command("train.py", *flags, "--data", tokens, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = command("interop.export", "run", "--to", "transformers", "exported", cwd=folder)
    assert done.returncode == 0 and json.loads((folder / "exported/config.json").read_text())["model_type"] == "llama"
    return folder


def parameters_of(scaling, length):
    """rope_parameters for texts of this length."""
    s = length / L
    return {"default": {}, "yarn": {"rope_type": "yarn", "factor": s, "original_max_position_embeddings": L},
            "dynamic": {"rope_type": "dynamic", "factor": s}, "ntk": {"rope_theta": 10000 * s ** (16 / 14)}}[scaling]


def read_exported(folder, rope, method, **arguments):
    """The exported model with some rope_parameters and a method."""
    config = transformers.AutoConfig.from_pretrained(folder / "exported")
    config.rope_parameters |= rope
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", config=config)
    return read_longer(model, method, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("flags, scaling, method, arguments", [
    ([], "default", "none", {}),
    (["--keys", L], "default", "window", {"keys": L, "sinks": 0}),
    (["--rope-scaling", "dual-chunk"], "default", "dual-chunk", {}),
    (["--rope-scaling", "self-extend"], "default", "self-extend", {}),
    (["--rope-scaling", "yarn"], "yarn", "none", {}),
    (["--rope-scaling", "dynamic"], "dynamic", "none", {}),
    (["--rope-scaling", "ntk"], "ntk", "none", {}),
], ids=str)  # fmt: skip
def test_losses_of_a_trained_model_are_those_of_lab_measure(trained, tokens, flags, scaling, method, arguments):
    protocol = ["--protocol", "same-targets", "--targets", 8, "--at", "1x,4x,16x"]
    rows, _ = rows_of(trained, "run", *protocol, *flags)
    right = {row["length"]: row["loss"] for row in rows if row["protocol"] == "same-targets"}
    documents = documents_of(tokens, 16 * L)
    assert sorted(right) == [L, 4 * L, 16 * L] and len(documents) > 2
    documents = torch.tensor([document[-16 * L - 1 :] for document in documents])
    for length, loss in right.items():
        own = {"length": length} if method == "self-extend" else {}
        model = read_exported(trained, parameters_of(scaling, length), method, **arguments, **own)
        logits = model(documents[:, -length - 1 : -1], logits_to_keep=8).logits
        found = F.cross_entropy(logits.flatten(0, 1), documents[:, -8:].flatten()).item()
        assert found == pytest.approx(loss, abs=1e-4), length
    if method == "none" and scaling == "default":
        assert right[L] < np.log(300) - 1                               # it has learned something
        assert right[16 * L] > right[L] + 0.1                           # and has something to lose


@pytest.mark.slow
def test_losses_of_a_window_with_sinks_are_those_of_a_stream_of_lab_measure(trained, tokens):
    flags = ["--protocol", "streaming", "--sinks", 2, "--window", 9, "--at", "1x,4x,16x"]
    rows, _ = rows_of(trained, "run", *flags)
    documents = documents_of(tokens, 16 * L)
    model = read_exported(trained, {}, "window", keys=10, sinks=2)
    for row, length in zip(rows, (L, 4 * L, 16 * L), strict=True):
        ends = [(document, (len(document) - 1) // (16 * L) * 16 * L) for document in documents]
        windows = torch.tensor([document[i : i + length + 1] for document, end in ends for i in range(0, end, length)])
        logits = model(windows[:, :-1]).logits
        found = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
        assert row["length"] == length and found == pytest.approx(row["loss"], abs=1e-4)
