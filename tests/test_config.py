"""The presets against the paper, and the rules that every field states."""

import dataclasses
import math

import pytest

from config import (
    ENCODING_FIELDS,
    ENCODINGS,
    PRESETS,
    EncodingConfig,
    InputError,
    ModelConfig,
    TrainConfig,
    number,
    whole,
)
from model_numpy import count_parameters
from model_torch import ENCODINGS as TORCH_ENCODINGS

SMALL = ModelConfig(n_layers=1, d_model=8, n_heads=2, context=16, vocab_size=10)


def parameters(preset, pe="expe"):
    return count_parameters(dataclasses.replace(PRESETS[preset].model, encoding=EncodingConfig(pe)))


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
    assert (model.n_layers, model.d_model, model.n_heads, model.d_head, model.context, model.vocab_size) == (
        6,
        384,
        12,
        32,
        512,
        32000,
    )
    assert (model.dropout, model.encoding.pe, model.encoding.l, model.encoding.theta) == (0.1, "expe", 24, 1 / 2048)
    assert (train.batch_size, train.micro_batch, train.lr, train.end_lr, train.warmup) == (512, 64, 1e-3, 3e-6, 0.1)
    assert (train.beta1, train.beta2, train.weight_decay, train.dtype, train.min_doc_tokens) == (
        0.9,
        0.95,
        0.1,
        "fp32",
        4000,
    )
    assert train.steps * 512 * 512 == pytest.approx(600e6, rel=1e-3)
    for name, shape, lr, l in (("llama-135m", (12, 768, 12), 6e-4, 96), ("llama-342m", (24, 1024, 16), 3e-4, 128)):
        model, train = PRESETS[name]  # tables 8 and 9
        assert (model.n_layers, model.d_model, model.n_heads) == shape and model.d_head == 64 and model.norm_eps == 1e-5
        assert (model.norm, model.mlp, model.tied) == ("rmsnorm", "swiglu", name == "llama-342m")
        assert (train.lr, train.end_lr, train.warmup, train.dtype) == (lr, pytest.approx(lr / 10), 0.05, "bf16")
        assert model.encoding.l == l == model.d_model // 8 and train.batch_size * 512 == 2**19
        assert train.steps * 2**19 == pytest.approx(10e9, rel=1e-3)
        exqpe = dataclasses.replace(model, encoding=EncodingConfig("exqpe", l=l)).encoding
        assert (exqpe.start, exqpe.theta1, exqpe.theta2) == (0.0, 1 / 2048, 1 / 16)


def test_encodings_are_the_same_in_config_and_model():
    assert list(ENCODINGS) == list(TORCH_ENCODINGS)
    fields = {f.name for f in dataclasses.fields(EncodingConfig)} - {"pe"}
    assert {name for read in ENCODINGS.values() for name in read} == fields
    assert fields - set(ENCODING_FIELDS) == {"scale", "rope_scaling", "factor", "length", "chunk"}  # no flags


def test_unset_fields_take_their_defaults_where_the_context_is_known():
    expe = dataclasses.replace(SMALL, d_model=32, encoding=EncodingConfig("expe")).encoding
    assert (expe.l, expe.start, expe.theta, expe.theta1, expe.base) == (24, 0.0, 1 / 64, None, None)
    assert dataclasses.replace(SMALL, encoding=EncodingConfig("rope")).encoding.base == 10000.0


def test_configs_survive_json():
    for model, train in PRESETS.values():
        assert ModelConfig.from_dict(dataclasses.asdict(model)) == model
        assert TrainConfig.from_dict(dataclasses.asdict(train)) == train
    with pytest.raises(InputError, match="ModelConfig has no field 'colour'"):
        ModelConfig.from_dict(dataclasses.asdict(SMALL) | {"colour": 1})
    with pytest.raises(InputError, match="TrainConfig lacks the field 'lr'"):
        TrainConfig.from_dict({"steps": 1, "batch_size": 1, "end_lr": 0})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_layers=0), "n_layers must be a whole number of at least 1, got 0"),
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
        (dict(encoding="rope"), "encoding must be an EncodingConfig, got 'rope'"),
        (dict(encoding=EncodingConfig("expe", l=9)), "l must be from 1 to d_model, 8, got 9"),
    ],
)
def test_model_config_names_field_value_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(pe="rotary"), "pe must be one of nope, sinusoidal, .*, got 'rotary'"),
        (dict(pe="expe", l=0), "l must be a whole number of at least 1, got 0"),
        (dict(pe="expe", l=True), "l must be a whole number of at least 1, got True"),
        (dict(pe="expe", theta=math.inf), "theta must be a finite number, got inf"),
        (dict(pe="rope", base=1), "base must be a finite number above 1, got 1"),
        (dict(pe="rope", l=24), "l is for expe and exqpe, and rope has no use for it"),
        (dict(pe="exqpe", constant=True), "constant is for expe, and exqpe has no use for it"),
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
        (dict(pe="shaw", buckets=8), "buckets is for t5, and shaw has no use for it"),
        (dict(pe="expe", theta2=0.1), "theta2 is for exqpe, and expe has no use for it"),
    ],
)
def test_encoding_config_names_field_value_and_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        EncodingConfig(**fields)


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
    rates = [train.lr_at(step) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert (rates[30] + rates[89]) / 2 == pytest.approx(0.55)  # a cosine is symmetric about its middle
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_numbers_on_the_command_line():
    assert (
        number("1/2048") == 1 / 2048 and number("3e-3") == 0.003 and whole("6e8") == whole("600_000_000") == 600_000_000
    )
    for wrong in ("", "x", "1/0", "nan", "inf"):
        with pytest.raises(Exception, match="is not a"):
            number(wrong)
    with pytest.raises(Exception, match="'1.5' is not a whole number"):
        whole("1.5")
