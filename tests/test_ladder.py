"""The check ladder: `make test` runs it first and alone, with pytest -x, so that the lowest broken rung speaks.

    1. The tables of expe.py equal worked examples and recurrences.
    2. NumPy equals PyTorch in float64: parameters and their first values, logits, loss, each gradient, and the weights
       after some optimizer steps.
    3. Attention equals loops over heads, queries and keys, in both backends.
    4. The learning rate equals values worked out by hand.

Other tests import the tiny models and the comparison from here. Errors are relative to the largest entry of the right
array: below it, a sum of many terms has no digits of its own.
"""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch

import backends
import expe
import model_numpy
from config import ModelConfig, TrainConfig
from engine import fast
from engine.compare import check_training as compare_training
from longer import compare
from longer.cache import Cache
from longer.reading import Reader
from model_torch import GPT, Attention
from positional_encodings import CORE, ENCODINGS, make_encoding, settings_class
from settings import InputError
from zoo import softmax

B, T, V = 3, 12, 40
EXACT = 1e-9  # float64 has 16 digits; a deep sum loses a few of them, never seven
STEPS = 10
CYCLES = {
    "rope": "rope:window=4,rope:base=50:window=3,proportional,rope", "expe": "expe,t5:buckets=6:max_distance=5,nope",
    "t5": "t5:window=4,shaw:max_distance=5,t5:buckets=4:max_distance=3", "nope": "nope,lerope:window=5,lerope",
    "sinusoidal": "sinusoidal,rope,alibi:window=2", "shaw": "shaw,fox,expe:l=5:on=k:learn=init",
    "lerope": "lerope,kerple,lerope", "fox": "fox:window=6,expe:constant=true:l=3", "t5+log": "t5,rope:window=3",
    "rope+llama4": "rope:window=4,nope"}
STYLES = {"gpt": dict(norm="layernorm", mlp="gelu", tied=False), "llama": dict(norm="rmsnorm", mlp="swiglu", tied=True)}
SOFTMAXES = ("log", "sinks", "stick")                                 # and llama4, for blocks without an encoding
BLOCKS = {"every": dict(layers=4, nope_every=2), "window": dict(window=4),
          "both": dict(layers=4, nope_every=2, window=4)}
SMALL = {"l": 5, "buckets": 6, "max_distance": 5, "threshold": 5.5, "count_to": 5}
POSITIONS = {
    "default": None,
    "odd": np.array([4, 4, 0, 11, 2, 7, 7, 1, 10, 3, 5, 0]),  # repeats, gaps, any order
    "own": np.stack([np.arange(T), np.arange(T)[::-1], np.full(T, 6)]),  # a row for each sequence
}


def settings(pe, **changes):
    """Settings that suit a width of 16 and a context of 12."""
    if "rope_scaling" in changes:
        from longer.scaling import ScaledRoPE
        return ScaledRoPE(pe, **changes)
    known = {f.name for f in dataclasses.fields(settings_class(pe))}
    return make_encoding(pe, **{name: SMALL[name] for name in SMALL if name in known} | changes)


def tiny(pe="nope", style="gpt", seed=0, variant=(), make=GPT, parts=(), **changes):
    """A float64 GPT with 2 layers, width 16, 2 heads, and weights large enough for attention to matter.

    pe: an encoding, or expe+log for one with another softmax.
    """
    pe, _, kind = pe.partition("+")
    config = dict(softmax=kind or "plain", layers=2, width=16, heads=2, context=T, vocab=V, mlp_width=40)
    config |= STYLES[style] | {"encoding": settings(pe, **dict(variant))} | changes
    model = make(ModelConfig(**config), **dict(parts)).double().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def numpy_params(model):
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def close(what, found, right, tolerance, names=("NumPy", "PyTorch")):
    """AssertionError in one line unless both arrays are equal up to the tolerance."""
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape, f"{what}: the shape is {found.shape} in {names[0]}, {right.shape} in {names[1]}"
    error = np.abs(found - right) / max(np.abs(right).max(initial=0), 1e-300)
    worst = np.unravel_index(error.argmax(), error.shape)
    place = f" at [{', '.join(map(str, worst))}]" if worst else ""
    assert error[worst] <= tolerance, (f"{what}: {names[0]} and {names[1]} differ by {error[worst]:.0e} of the largest "
                                       f"entry, {found[worst]:.6g} and {right[worst]:.6g}{place}")


# ---- 1: tables -------------------------------------------------------------------------------------------------------


def exqpe_rows(n_rows, l, start, theta1, theta2):
    """Equation 5, row by row: each position raises one dimension."""
    row = [start + j * theta1 for j in range(l)]
    rows = []
    for n in range(n_rows):
        row[n % l] += theta2
        rows.append(list(row))
    return np.array(rows)


TABLES = {
    "expe_table": (lambda: expe.expe_table([0, 511], 3, 0.25),
                   [[512 / 2048, 513 / 2048, 514 / 2048], [1023 / 2048, 1024 / 2048, 1025 / 2048]]),
    "expe_table, step 0": (lambda: expe.expe_table([0, 511], 2, 0.25, step=0), [[512 / 2048] * 2, [1023 / 2048] * 2]),
    "exqpe_table": (lambda: expe.exqpe_table(np.arange(50), 7, 0.5, 0.3, 0.07), exqpe_rows(50, 7, 0.5, 0.3, 0.07)),
    "sinusoidal_table": (lambda: expe.sinusoidal_table(5, 4), [-0.958924275, 0.283662185, 0.049979169, 0.998750260]),
    "learned_rows": (lambda: expe.learned_rows([[0, 4], [4, 2]], 5), [[0, 4], [4, 2]]),
    "rope_table": (lambda: expe.rope_table([0, 3], 4),
                   [[1, 1, 0, 0], [-0.989992497, 0.999550034, 0.141120008, 0.029995500]]),
    "distances": (lambda: expe.distances([5, 0], [3, 9]), [[2, -4], [-3, -9]]),
    "alibi_slopes of 8": (lambda: expe.alibi_slopes(8), [2.0**-h for h in range(1, 9)]),
    "alibi_slopes of 12": (lambda: expe.alibi_slopes(12), [2.0**-h for h in (*range(1, 9), 0.5, 1.5, 2.5, 3.5)]),
    # Bucket 6 of 8 begins at 4 * (16/4)^(2/4) = 8 exactly, and 4 * (16/4)^(1/4) = 5.66 rounds up to 6.
    "t5_bucket": (lambda: expe.t5_bucket([-1, 3, 4, 5, 6, 7, 8, 11, 12, 16, 10**9], 8, 16),
                  [0, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]),
    "t5_bucket of both sides": (lambda: expe.t5_bucket([1, -1, 20, -20], 16, 16, both_sides=True), [1, 9, 7, 15]),
    "shaw_index": (lambda: expe.shaw_index([-1, 0, 2, 3, 9], 3), [0, 0, 2, 3, 3]),
    "shaw_index of both sides": (lambda: expe.shaw_index([-9, -1, 0, 2, 9], 3, both_sides=True), [0, 2, 3, 5, 6]),
}


@pytest.mark.parametrize("table", TABLES)
def test_table_equals_a_worked_example(table):
    found, right = TABLES[table]
    close("values", found(), right, EXACT, ("expe.py", "the example"))


# ---- 2: NumPy against PyTorch ----------------------------------------------------------------------------------------


END = 0.02 / math.sqrt(2 * 2)                                         # of two layers
FIRST_STDS = {                                                        # of normal numbers; of no other parameter
    "embedding.weight": 1.0, "head.weight": 0.02, "attn.qkv.weight": 0.02, "attn.proj.weight": END,
    "mlp.gate.weight": 0.02, "mlp.up.weight": 0.02, "mlp.down.weight": END,
    "encoding.weight": 0.02, "encoding.keys": 0.02, "encoding.values": 0.02}            # learned and t5; shaw
FIRST_CONSTANTS = {f"{norm}.{name}": value for norm in ("norm", "norm1", "norm2")
                   for name, value in (("weight", 1), ("bias", 0))}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pe", CORE)
def test_each_parameter_is_in_both_backends_and_has_first_values_of_its_own(pe, style):
    """A new parameter of the core is named here, until both models have it and its first values are written down."""
    config = ModelConfig(layers=2, width=64, heads=2, context=64, vocab=300, encoding=make_encoding(pe, **(
        {"l": 24} if pe in ("expe", "exqpe") else {})), **STYLES[style])
    GPT(config, seed=None)                                            # which names a parameter that is in one alone
    rng, found = np.random.default_rng(1), model_numpy.init_params(config, seed=1)
    for name in sorted(found, key=lambda name: name.startswith("encoding.")):                 # the encoding's are last
        kind = re.sub(r"^blocks\.\d+\.", "", name)
        known = f"{name}: write its first values down in this test, too"
        assert kind in FIRST_STDS | FIRST_CONSTANTS, known
        if kind in FIRST_CONSTANTS:
            right = np.full(found[name].shape, FIRST_CONSTANTS[kind], np.float32)
        else:
            std = 0.02 if config.tied and name == "embedding.weight" else FIRST_STDS[kind]
            right = np.float32(std) * rng.standard_normal(found[name].shape, np.float32)
        assert found[name].dtype == np.float32 and found[name].tobytes() == right.tobytes(), f"{name} has other values"


def test_a_parameter_of_one_backend_alone_is_named_with_both_places(monkeypatch):
    config = ModelConfig(layers=2, width=16, heads=2, context=T, vocab=V)

    class GatedAttention(Attention):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.gate = torch.nn.Linear(16, 2, bias=False)

    alone = r"^blocks.0.attn.gate.weight is \(2, 16\) in model_torch.py and missing in what model_numpy.py declares"
    with pytest.raises(InputError, match=f"{alone}: both must have it, with one shape$"):
        GPT(config, attention=GatedAttention)
    plain = model_numpy.attention_parameters
    for name, shape, in_torch in (("gate.weight", (2, 16), "missing"), ("proj.weight", (16, 8), "(16, 16)")):
        monkeypatch.setattr(model_numpy, "attention_parameters",
                            lambda config, name=name, shape=shape: plain(config) | {name: model_numpy.normal(shape)})
        said = f"blocks.0.attn.{name} is {in_torch} in model_torch.py and {shape} in what model_numpy.py declares"
        for seed in (None, 0):
            with pytest.raises(InputError, match=f"^{re.escape(said)}"):
                GPT(config, seed)


def set_masks(model, masks):
    """Make the dropouts of a torch model multiply by the masks, one after the other."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.forward = lambda x: x * torch.from_numpy(next(masks))


def climb(model, tolerance, positions=None, steps=STEPS):
    """Compare both backends: the logits, the loss, every gradient, and some steps of AdamW with clipping."""
    config = model.config
    dtype = model.embedding.weight.detach().numpy().dtype
    rates = TrainConfig(steps=steps, batch_size=B, lr=3e-3, end_lr=3e-4, weight_decay=0.3, clip=0.5)
    backend = backends.TorchBackend(config, rates, torch.device("cpu"), model=model)
    params = numpy_params(model)
    state = model_numpy.adamw_state(params)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, V, (2, B, T))
    targets[:, 2] = model_numpy.IGNORED
    x, y = torch.from_numpy(tokens), torch.from_numpy(targets)
    logits, _ = model_numpy.forward(params, tokens, config, positions)
    close("logits", logits, model(x, None, positions).detach(), tolerance)
    for step in range(steps):
        masks = None
        if config.dropout:
            masks = list(model_numpy.dropout_masks(config, B, T, rng, dtype))
            set_masks(model, iter(masks))
        loss, grads = model_numpy.loss_and_grads(params, tokens, targets, config, positions, masks)
        torch_loss = model(x, y, positions=positions)
        torch_loss.backward()
        close(f"loss of step {step}", loss, torch_loss.item(), tolerance)
        if step == 0:
            names = [name for name, _ in model.named_parameters()]
            assert list(grads) == list(params) == names, "the names of gradients and of parameters differ"
            for name, parameter in reversed(list(model.named_parameters())):  # what fails first is nearest to the fault
                assert grads[name].dtype == dtype, f"gradient of {name}: its dtype is {grads[name].dtype}, not {dtype}"
                close(f"gradient of {name}", grads[name], parameter.grad, tolerance)
        norm = model_numpy.clip_grads(grads, rates.clip)
        assert norm > rates.clip, "the gradient is too small for clipping to be tested"
        close(f"gradient norm of step {step}", norm, backend.update(step), tolerance)
        model_numpy.adamw_step(params, grads, state, backends.learning_rate(rates, step), rates.beta1, rates.beta2,
                               weight_decay=rates.weight_decay)
    for name, weight in numpy_params(model).items():
        close(f"{name} after {steps} steps", params[name], weight, tolerance)


def name_case(pe, style="gpt", positions="default", variant=(), **changes):
    values = [f"{name}={value}" for name, value in (dict(variant) | changes).items()]
    others = [style] * (style != "gpt") + values + [f"{positions} positions"] * (positions != "default")
    return ", ".join([pe, *others])


VARIANTS = {
    "expe": [{"on": "k"}, {"on": "q"}, {"on": "qkv"}, {"constant": True}, {"l": 1}, {"l": 16}, {"scale": 0.5},
             {"learn": "init"}, {"learn": "random", "on": "qkv"}, {"once": True},
             {"once": True, "learn": "init", "constant": True},
             {"start": 0.3, "theta": -0.1, "on": "k", "learn": "init"}],
    "exqpe": [{"on": "k"}, {"learn": "init", "start": 0.2}, {"learn": "random", "scale": 0.5}, {"once": True}],
    "rope": [{"rope_scaling": "yarn", "factor": 3.0}, {"rope_scaling": "dynamic", "factor": 2.0, "length": 40}],
    "alibi": [{"slopes": 3}],
    "t5": [{"buckets": 4, "max_distance": 3}, {"buckets": 7, "max_distance": 6}],
    "shaw": [{"max_distance": 1}, {"max_distance": 40}],
}
CASES = {name_case(**case): case for case in [
    *(dict(pe=pe) for pe in ENCODINGS),
    *(dict(pe=pe, style="llama", positions="own", **BLOCKS["both"]) for pe in ENCODINGS),
    *(dict(pe=pe, causal=False, heads=1, positions="odd") for pe in ENCODINGS),
    *(dict(pe=pe, variant=v, positions=("odd", "own")[i % 2]) for pe in VARIANTS for i, v in enumerate(VARIANTS[pe])),
    *(dict(pe=pe, **BLOCKS[name]) for pe in ("nope", "expe", "t5", "shaw") for name in ("every", "window")),
    *(dict(pe="expe", style=style, dropout=0.3) for style in STYLES),
    dict(pe="nope", tied=True), dict(pe="nope", style="llama", tied=False),
    *(dict(pe=f"{pe}+{kind}", positions="odd") for pe, kind in zip(ENCODINGS, itertools.cycle(SOFTMAXES))),
    *(dict(pe=f"expe+{kind}", variant={"on": "k"}) for kind in SOFTMAXES),
    dict(pe="expe+sinks", variant={"once": True, "learn": "init"}),
    *(dict(pe=pe, style="llama", **BLOCKS["both"]) for pe in ("t5+log", "shaw+sinks", "rope+llama4")),
    *(dict(pe=pe, cycle=cycle, layers=4, positions="odd") for pe, cycle in CYCLES.items()),
    dict(pe="expe", variant={"once": True}, cycle="expe,rope,expe:once=false:l=3", layers=4),
    *(dict(pe=pe, causal=False) for pe in ("rope+log", "rope+sinks", "nope+llama4"))]}


@pytest.mark.parametrize("case", CASES)
def test_numpy_equals_torch(case):
    arguments = dict(CASES[case])
    positions = POSITIONS[arguments.pop("positions", "default")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "FLOOR_SCALE", 4)  # so that so few tokens fill more than one step of llama4
        climb(tiny(**arguments), EXACT, positions)


# ---- 3: attention against loops --------------------------------------------------------------------------------------


def attention_in_loops(h, w_qkv, w_proj, n_heads, override=None, angles=None, on="qk", bias=None, shaw=None, window=0):
    """Equations 1 to 3 token by token and head by head. h (T, C); override (T, l) for q and k; angles (T, D/2) of RoPE;

    bias(head, m, n) is added to a score; shaw(m, n) returns the vectors that are added to key n and to value n. A query
    sees the last `window` keys, its own among them; with 0 all up to its own.
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
            for n in range(max(0, m + 1 - window) if window else 0, m + 1):
                q, k, v = (w_q @ enters["q"][m])[part], (w_k @ enters["k"][n])[part], (w_v @ enters["v"][n])[part]
                if shaw is not None:
                    k, v = k + shaw(m, n)[0], v + shaw(m, n)[1]
                if angles is not None:
                    q = (q[: D // 2] + 1j * q[D // 2 :]) * np.exp(1j * angles[m])
                    k = (k[: D // 2] + 1j * k[D // 2 :]) * np.exp(1j * angles[n])
                scores.append(np.vdot(q, k).real / math.sqrt(D) + (bias(head, m, n) if bias else 0))
                values.append(v)
            weights = np.exp(np.subtract(scores, max(scores)))
            weights /= weights.sum()
            out[m, part] = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return out @ w_proj.T


def bucket_by_formula(d, buckets, max_distance):
    """T5's rule as its paper's code has it, for one distance."""
    half = buckets // 2
    if d < half:
        return max(d, 0)
    return min(half + int(math.log(d / half) / math.log(max_distance / half) * (buckets - half)), buckets - 1)


def expected_rows(n, own, pe, variant):
    """The rows of ExPE or ExQPE, (T, 5), from the equations."""
    ramp = 1 / (4 * T)
    if pe == "expe":
        start, theta = own.get("weight", (0.0, 64 / T if variant.get("on") == "k" else ramp))
        return np.array([[start + theta * (m if variant.get("constant") else m + j) for j in range(5)] for m in n])
    return exqpe_rows(max(n) + 1, 5, variant.get("start", 0.0), *own.get("weight", (ramp, 1 / 16)))[n]


def attend_in_loops(model, i, h, n, variant):
    """attention_in_loops of block i, of its input h (T, C) at positions n, with biases and rows worked out anew."""
    params = numpy_params(model)
    own = model_numpy.strip_prefix("encoding.", params)
    encoding, window = model.config.block(i)
    pe = "nope" if variant.get("once") else encoding.pe
    options = {}
    if pe in ("expe", "exqpe"):
        options["override"] = expected_rows(n, own, pe, variant)
    if pe == "rope":
        options["angles"] = np.outer(n, [10000.0 ** (-2 * j / 8) for j in range(4)])
    if pe == "alibi":
        options["bias"] = lambda head, m, s: -variant.get("slopes", 1) * 2 ** (-4 * (head + 1)) * (n[m] - n[s])
    if pe == "t5":
        options["bias"] = lambda head, m, s: own["weight"][bucket_by_formula(n[m] - n[s], 6, 5), head]
    if pe == "shaw":
        options["shaw"] = lambda m, s: [own[part][min(n[m] - n[s], 5)] for part in ("keys", "values")]
    weights = (params[f"blocks.{i}.attn.{name}.weight"] for name in ("qkv", "proj"))
    return attention_in_loops(h, *weights, 2, on=variant.get("on", "qk"), window=window, **options)


def enter_block_1(model, tokens, n, variant):
    """The residual stream (T, C) before block 1, by each encoding's paper."""
    params = numpy_params(model)
    x = params["embedding.weight"][tokens]
    pe = model.config.encoding.pe
    if pe == "learned":
        x += params["encoding.weight"][n]
    if pe == "sinusoidal":
        angles = np.outer(n, [10000.0 ** (-2 * (j // 2) / 16) for j in range(16)])
        x += np.where(np.arange(16) % 2, np.cos(angles), np.sin(angles))
    if variant.get("once"):
        x[:, :5] = expected_rows(n, model_numpy.strip_prefix("encoding.", params), pe, variant)
    return x


LOOPED = {name_case(**case): case for case in [
    *(dict(pe=pe) for pe in CORE if pe != "learned"), dict(pe="learned", variant={"n_positions": 134}),
    *(dict(pe="expe", variant={"on": on}) for on in ("k", "q", "qkv")), dict(pe="exqpe", variant={"on": "k"}),
    dict(pe="expe", variant={"constant": True}), dict(pe="expe", variant={"learn": "init"}),
    dict(pe="expe", variant={"once": True}), dict(pe="exqpe", variant={"once": True, "learn": "init"}),
    dict(pe="exqpe", variant={"learn": "random", "start": 0.3}), dict(pe="alibi", variant={"slopes": 3}),
    *(dict(pe=pe, **BLOCKS["both"]) for pe in CORE if pe != "learned"),
    dict(pe="nope", **BLOCKS["window"]), dict(pe="expe", window=1), dict(pe="rope", window=T),
    dict(pe="alibi", layers=3, nope_every=3)]}


@pytest.mark.parametrize("case", LOOPED)
def test_attention_of_each_block_equals_loops(case):
    model, n, seen = tiny(**LOOPED[case]), np.arange(T) * 3 + 100, []
    variant = LOOPED[case].get("variant", {})
    tokens = np.random.default_rng(1).integers(0, V, (1, T))
    entered = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: entered.append(inputs[0][0].detach()))
    for block in model.blocks:
        block.attn.register_forward_hook(lambda attention, inputs, out: seen.append((inputs[0], out[0].detach())))
    model(torch.from_numpy(tokens), positions=n)
    close("input of block 0", entered[0], enter_block_1(model, tokens[0], n, variant), EXACT, ("PyTorch", "the paper"))
    params = numpy_params(model)
    assert len(seen) == model.config.layers, "a block has no attention"
    for i, (h, by_torch) in enumerate(seen):
        h = h.detach().numpy()
        right = attend_in_loops(model, i, h[0], n, variant)
        close(f"attention of block {i}", by_torch, right, EXACT, ("PyTorch", "loops"))
        encoding, window = model.config.block(i)
        by_numpy, _ = model_numpy.attention(
            h, model_numpy.strip_prefix(f"blocks.{i}.attn.", params), model.config,
            model_numpy.build_encoding(encoding, model.config), model_numpy.tables(encoding, n, model.config, h.dtype),
            model_numpy.strip_prefix("encoding.", params), window)
        close(f"attention of block {i}", by_numpy[0], right, EXACT, ("NumPy", "loops"))


# ---- 4: the learning rate --------------------------------------------------------------------------------------------


def test_learning_rate_equals_values_worked_out_by_hand():
    """Four steps of warm-up, then half a cosine: at a quarter of it 0.1 + 0.9 (1 + cos 45 degrees)/2."""
    config = TrainConfig(steps=9, batch_size=1, lr=1.0, end_lr=0.1, warmup=4 / 9)
    rates = [0.25, 0.5, 0.75, 1.0, 1.0, 0.8681980515, 0.55, 0.2318019485, 0.1]
    for step, right in enumerate(rates):
        close(f"rate of step {step} of {config.steps}", backends.learning_rate(config, step), right, EXACT,
              ("train.py", "the right value"))
    assert backends.learning_rate(dataclasses.replace(config, warmup=0.0), 0) == 1.0


# ---- 5: the model as it stands, edited or not, in every other path ---------------------------------------------------


@pytest.mark.parametrize("pe, variant", [("sinusoidal", {}), ("expe", {}), ("expe", {"on": "k"}), ("rope", {}),
                                         ("alibi", {}), ("fox", {}), ("shaw", {}), ("nope+sinks", {})], ids=str)
def test_cached_measured_and_fast_models_compute_what_the_plain_one_does(pe, variant):
    """For one encoding of each door. An edit of model_torch.py that does not reach one of them fails here."""
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, V, (2, T)))
    plain = tiny(pe, variant=variant)
    quick = tiny(pe, variant=variant, make=fast.FastGPT)
    reader = tiny(pe, variant=variant, make=Reader)
    with torch.no_grad():
        right = plain(tokens)
        close("logits", quick(tokens), right, EXACT, ("engine/fast.py", "model_torch.py"))
        close("logits", reader(tokens), right, EXACT, ("longer/reading.py", "model_torch.py"))
        if reader.can_stream() or pe == "sinusoidal":
            cache = Cache()
            cached = torch.cat([reader(some, cache=cache) for some in tokens.split(3, 1)], 1)
            close("cached logits", cached, right, EXACT, ("longer/reading.py", "model_torch.py"))
    compare_training(fast.FastGPT, plain.config, half=True)
    compare.check_reading(Reader, plain.config)
    if reader.can_stream():
        compare.check_stream(Reader, plain.config)
