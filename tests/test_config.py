"""The presets against the paper, and the rules that every field states."""

import dataclasses
import math

import pytest

import model_numpy
import model_torch
from common import number, whole
from config import ENCODINGS, PRESETS, InputError, ModelConfig, TrainConfig, Unused, make_encoding, settings_class
from model_numpy import count_parameters
from train import learning_rate

SMALL = ModelConfig(n_layers=1, d_model=8, n_heads=2, context=16, vocab_size=10)


def parameters(preset, pe="expe"):
    return count_parameters(dataclasses.replace(PRESETS[preset].model, encoding=make_encoding(pe)))


@pytest.mark.parametrize(
    "preset, total, without_input",
    [
        ("paper-35m", 35e6, 23e6),  # table 6
        ("llama-135m", 135e6, None),
        ("llama-342m", 342e6, None),  # table 8
    ],
)
def test_parameter_counts_are_the_papers(preset, total, without_input):
    found, outside = parameters(preset)
    assert round(found / 1e6) == total / 1e6
    assert without_input is None or round(outside / 1e6) == without_input / 1e6


def test_encodings_add_the_parameters_of_their_papers_and_none_else():
    none = dict.fromkeys(("nope", "sinusoidal", "expe", "exqpe", "rope", "alibi"), 0)
    for pe, own in {**none, "learned": 512 * 384, "t5": 32 * 12, "shaw": 2 * (16 + 1) * 32}.items():
        assert parameters("paper-35m", pe)[0] - parameters("paper-35m", "nope")[0] == own, pe
    assert len({parameters("paper-35m", pe)[1] for pe in ENCODINGS}) == 1


def test_presets_hold_the_papers_hyperparameters():
    model, train = PRESETS["paper-35m"]  # tables 5 and 6
    shape = (model.n_layers, model.d_model, model.n_heads, model.d_head, model.context, model.vocab_size)
    assert shape == (6, 384, 12, 32, 512, 32000)
    assert (model.dropout, model.encoding.pe, model.encoding.l, model.encoding.theta) == (0.1, "expe", 24, 1 / 2048)
    assert (train.batch_size, train.micro_batch, train.lr, train.end_lr, train.warmup) == (512, 64, 1e-3, 3e-6, 0.1)
    adamw = (train.beta1, train.beta2, train.weight_decay, train.dtype, train.min_doc_tokens)
    assert adamw == (0.9, 0.95, 0.1, "fp32", 4000)
    assert train.steps * 512 * 512 == pytest.approx(600e6, rel=1e-3)
    for name, shape, lr, l in (("llama-135m", (12, 768, 12), 6e-4, 96), ("llama-342m", (24, 1024, 16), 3e-4, 128)):
        model, train = PRESETS[name]  # tables 8 and 9
        assert (model.n_layers, model.d_model, model.n_heads) == shape and model.d_head == 64 and model.norm_eps == 1e-5
        assert (model.norm, model.mlp, model.tied) == ("rmsnorm", "swiglu", name == "llama-342m")
        assert (train.lr, train.end_lr, train.warmup, train.dtype) == (lr, pytest.approx(lr / 10), 0.05, "bf16")
        assert model.encoding.l == l == model.d_model // 8 and train.batch_size * 512 == 2**19
        assert train.steps * 2**19 == pytest.approx(10e9, rel=1e-3)
        exqpe = dataclasses.replace(model, encoding=make_encoding("exqpe", l=l)).encoding
        assert (exqpe.start, exqpe.theta1, exqpe.theta2) == (0.0, 1 / 2048, 1 / 16)


def test_encodings_are_the_same_in_config_and_models():
    assert list(ENCODINGS) == list(model_torch.ENCODINGS) == list(model_numpy.ENCODINGS)
    for pe in ENCODINGS:
        assert type(make_encoding(pe)) is settings_class(pe) and make_encoding(pe).pe == pe
    core = [kind for kind in ENCODINGS.values() if kind.__module__ == "config"]
    fields = [f for kind in core for f in dataclasses.fields(kind)]
    assert {f.name for f in fields if not f.metadata["help"]} == {"pe", "scale", "rope_scaling", "factor", "length",
                                                                     "long", "short"}


def test_the_encoding_and_the_window_of_each_block():
    def blocks(**changes):
        config = dataclasses.replace(SMALL, n_layers=6, encoding=make_encoding("alibi"), **changes)
        return [(settings.pe, window) for settings, window in map(config.block, range(6))]

    assert blocks() == [("alibi", 0)] * 6 and blocks(window=3) == [("alibi", 3)] * 6
    assert blocks(nope_every=3) == [("alibi", 0), ("alibi", 0), ("nope", 0)] * 2
    assert blocks(nope_every=4, window=3) == [*[("alibi", 3)] * 3, ("nope", 0), *[("alibi", 3)] * 2]
    with pytest.raises(InputError, match="nope_every must be at most n_layers, 6, got 7"):
        blocks(nope_every=7)


def test_unset_fields_take_their_defaults_where_the_context_is_known():
    expe = dataclasses.replace(SMALL, d_model=32, encoding=make_encoding("expe")).encoding
    assert (expe.l, expe.start, expe.theta) == (24, 0.0, 1 / 64)
    assert not hasattr(expe, "theta1") and not hasattr(expe, "base")
    keys = dataclasses.replace(SMALL, d_model=32, encoding=make_encoding("expe", on="k")).encoding
    assert (keys.start, keys.theta) == (0.0, 64 / 16)
    assert dataclasses.replace(SMALL, encoding=make_encoding("rope")).encoding.base == 10000.0


def test_configs_survive_json():
    for model, train in PRESETS.values():
        assert ModelConfig.from_dict(dataclasses.asdict(model)) == model
        assert TrainConfig.from_dict(dataclasses.asdict(train)) == train
    with pytest.raises(InputError, match="unexpected keyword argument 'colour'"):
        ModelConfig.from_dict(dataclasses.asdict(SMALL) | {"colour": 1})
    with pytest.raises(InputError, match="missing .* argument.* 'lr'"):
        TrainConfig.from_dict({"steps": 1, "batch_size": 1, "end_lr": 0})


# What config.json of an earlier version holds of an encoding: every field of every encoding, and a chunk.
NONE = dict.fromkeys(("l", "start", "theta", "theta1", "theta2", "constant", "once", "on", "learn", "base", "buckets",
                      "max_distance", "scale", "rope_scaling", "factor", "length", "chunk"))
EARLIER = {
    "nope": ({}, {}),
    "expe": ({"l": 6, "start": 0.0, "theta": 0.25, "constant": False, "once": False, "on": "k", "learn": "none",
              "scale": 1.0, "chunk": 0}, {"l": 6, "theta": 0.25, "on": "k"}),
    "exqpe": ({"l": 6, "start": 0.5, "once": True, "learn": "random", "scale": 1.0, "chunk": 0},
              {"l": 6, "start": 0.5, "once": True, "learn": "random"}),
    "rope": ({"base": 500.0, "rope_scaling": "none", "factor": 1.0, "chunk": 0}, {"base": 500.0}),
    "shaw": ({"max_distance": 7}, {"max_distance": 7}),
}


@pytest.mark.parametrize("pe", EARLIER)
def test_configs_of_earlier_runs_are_read(pe):
    stored, right = EARLIER[pe]
    values = dataclasses.asdict(SMALL) | {"encoding": {"pe": pe} | NONE | stored}
    values = {name: value for name, value in values.items() if name not in ("nope_every", "window")}  # they are new
    assert ModelConfig.from_dict(values) == dataclasses.replace(SMALL, encoding=make_encoding(pe, **right))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_layers=0), "n_layers must be a whole number from 1 to 10,000, got 0"),
        (dict(d_model=8.0), "d_model must be a whole number of at least 1, got 8.0"),
        (dict(n_heads=3), "n_heads must be a divisor of d_model, 8, got 3"),
        (dict(context=-1), "context must be a whole number of at least 1, got -1"),
        (dict(vocab_size=2**16 + 1), "vocab_size must be a whole number from 2 to 65,536"),
        (dict(norm="batchnorm"), "norm must be layernorm or rmsnorm, got 'batchnorm'"),
        (dict(mlp="relu"), "mlp must be gelu or swiglu, got 'relu'"),
        (dict(tied="yes"), "tied must be true or false, got 'yes'"),
        (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (dict(dropout=math.nan), "dropout must be at least 0 and below 1, got nan"),
        (dict(norm_eps=0), "norm_eps must be above 0, got 0"),
        (dict(encoding="rope"), "encoding must be an make_encoding, got 'rope'"),
        (dict(encoding=make_encoding("expe", l=9)), "l must be from 1 to d_model, 8, got 9"),
        (dict(n_heads=8, encoding=make_encoding("rope")), "d_head must be even"),
        (dict(encoding=make_encoding("rope", rope_scaling="dynamic")), "dynamic needs the length of the whole"),
        (dict(nope_every=1), "nope_every must be 0 or a whole number of at least 2, got 1"),
        (dict(nope_every=-2), "nope_every must be 0 or a whole number of at least 2, got -2"),
        (dict(nope_every=True), "nope_every must be 0 or a whole number of at least 2, got True"),
        (dict(window=-1), "window must be a whole number of at least 0, got -1"),
        (dict(window=2.5), "window must be a whole number of at least 0, got 2.5"),
        (dict(window=4, causal=False), "window .* needs a causal model"),
        (dict(d_mlp=0), "d_mlp must be a whole number of at least 1, got 0"),
    ],
)
def test_model_config_names_field_value_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(pe="rotary"), "pe must be one of nope, sinusoidal, .*, got 'rotary'"),
        (dict(pe="rope", colour=1), "colour is for no encoding, and rope has no use for it"),
        (dict(pe="expe", l=0), "l must be a whole number of at least 1, got 0"),
        (dict(pe="expe", l=True), "l must be a whole number of at least 1, got True"),
        (dict(pe="expe", theta=math.inf), "theta must be a finite number, got inf"),
        (dict(pe="expe", scale=0.0), "scale must be above 0 and at most 1e6, got 0.0"),
        (dict(pe="rope", factor=1e7), "factor must be above 0 and at most 1e6, got 10000000.0"),
        (dict(pe="rope", rope_scaling="ntk2"), "rope_scaling must be none, linear, ntk, dynamic, yarn, llama3 or long"),
        (dict(pe="rope", length=0), "length must be a whole number of at least 1, got 0"),
        (dict(pe="rope", base=1), "base must be a finite number above 1, got 1"),
        (dict(pe="rope", l=24), "l is for expe and exqpe.*, and rope has no use for it"),
        (dict(pe="exqpe", constant=True), "constant is for expe.*, and exqpe has no use for it"),
        (dict(pe="rope", on="k"), "on is for expe and exqpe"),
        (dict(pe="expe", on="kq"), "on must be k, q, qk or qkv, got 'kq'"),
        (dict(pe="expe", learn="yes"), "learn must be none, init or random, got 'yes'"),
        (dict(pe="expe", once=True, on="k"), "once overrides the residual stream, on the input of attention"),
        (dict(pe="expe", learn="random", theta=0.1), "learn random draws theta, and 0.1 is given: leave one out"),
        (dict(pe="exqpe", learn="random", theta2=0.1), "learn random draws theta2, and 0.1 is given"),
        (dict(pe="expe", once=1), "once must be true or false, got 1"),
        (dict(pe="t5", buckets=1), "buckets must be a whole number from 2 to 1,024, got 1"),
        (dict(pe="shaw", max_distance=0), "max_distance must be a whole number from 1 to 65,536, got 0"),
        (dict(pe="t5", buckets=32, max_distance=16), "max_distance must be a whole number from 17 to 65,536, got 16"),
        (dict(pe="shaw", buckets=8), "buckets is for t5.*, and shaw has no use for it"),
        (dict(pe="expe", theta2=0.1), "theta2 is for exqpe.*, and expe has no use for it"),
    ],
)
def test_encoding_config_names_field_value_and_rule(fields, message):
    with pytest.raises(Unused if "no use" in message else InputError, match=message):
        make_encoding(**fields)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(steps=0), "steps must be a whole number of at least 1, got 0"),
        (dict(micro_batch=3), "micro_batch must be a divisor of batch_size, 16, got 3"),
        (dict(lr=0), "lr must be a finite number above 0, got 0"),
        (dict(end_lr=1.0), "end_lr must be from 0 to lr"),
        (dict(warmup=1.5), "warmup must be from 0 to 1, got 1.5"),
        (dict(beta2=1), "beta2 must be at least 0 and below 1, got 1"),
        (dict(weight_decay=-1), "weight_decay must be a finite number of at least 0, got -1"),
        (dict(dtype="fp16"), "dtype must be fp32, tf32 or bf16, got 'fp16'"),
        (dict(seed=-1), "seed must be a whole number from 0"),
        (dict(data=""), "data must be"),
    ],
)
def test_train_config_names_field_value_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(steps=10, batch_size=16, lr=1e-3, end_lr=0.0), **changes)


def test_learning_rate_climbs_linearly_and_falls_along_half_a_cosine():
    train = TrainConfig(steps=110, batch_size=1, lr=1.0, end_lr=0.1, warmup=10 / 110)
    rates = [learning_rate(train, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert (rates[30] + rates[89]) / 2 == pytest.approx(0.55)  # a cosine is symmetric about its middle
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_numbers_on_the_command_line():
    assert number("1/2048") == 1 / 2048 and number("3e-3") == 0.003
    assert whole("6e8") == whole("600_000_000") == 600_000_000
    for wrong in ("", "x", "1/0", "nan", "inf"):
        with pytest.raises(Exception, match="is not a"):
            number(wrong)
    with pytest.raises(Exception, match="'1.5' is not a whole number"):
        whole("1.5")
