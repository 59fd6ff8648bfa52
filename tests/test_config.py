"""The presets against the paper, and the rules that every field states."""

import argparse
import dataclasses
import math
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import model_numpy
import model_torch
from cli import number, whole
from config import ModelConfig, TrainConfig, make_configs
from files import read_text
from model_numpy import count_parameters
from positional_encodings import CORE, ENCODINGS, defines_settings, make_encoding, settings_class
from settings import InputError
from train import read_flags

SMALL = ModelConfig(layers=1, width=8, heads=2, context=16, vocab=10)


def count(preset, pe="expe"):
    return count_parameters(dataclasses.replace(make_configs(preset)[0], encoding=make_encoding(pe)))


def test_parameter_counts_are_the_papers():
    for preset, millions in {"paper-35m": 35, "llama-135m": 135, "llama-342m": 342}.items():  # tables 6 and 8
        assert round(count(preset) / 1e6) == millions
    model = make_configs("paper-35m")[0]
    assert round((count("paper-35m") - model.vocab * model.width) / 1e6) == 23  # without the embedding


def test_encodings_add_the_parameters_of_their_papers():
    added = dict.fromkeys(("sinusoidal", "expe", "exqpe", "rope", "alibi"), 0)
    for pe, own in {**added, "learned": 512 * 384, "t5": 32 * 12, "shaw": 2 * (16 + 1) * 32}.items():
        assert count("paper-35m", pe) - count("paper-35m", "nope") == own, pe


def test_presets_hold_the_papers_hyperparameters():
    model, train = make_configs("paper-35m")  # tables 5 and 6
    shape = (model.layers, model.width, model.heads, model.d_head, model.context, model.vocab)
    assert shape == (6, 384, 12, 32, 512, 32000)
    assert (model.dropout, model.encoding.pe, model.encoding.l, model.encoding.theta) == (0.1, "expe", 24, 1 / 2048)
    assert (train.batch_size, train.micro_batch, train.lr, train.end_lr, train.warmup) == (512, 64, 1e-3, 3e-6, 0.1)
    adamw = (train.beta1, train.beta2, train.weight_decay, train.dtype, train.min_doc_tokens)
    assert adamw == (0.9, 0.95, 0.1, "fp32", 4000)
    assert train.steps * 512 * 512 == pytest.approx(600e6, rel=1e-3)
    for name, shape, lr, l in (("llama-135m", (12, 768, 12), 6e-4, 96), ("llama-342m", (24, 1024, 16), 3e-4, 128)):
        model, train = make_configs(name)  # tables 8 and 9
        assert (model.layers, model.width, model.heads) == shape and model.d_head == 64 and model.norm_eps == 1e-5
        assert (model.norm, model.mlp, model.tied) == ("rmsnorm", "swiglu", name == "llama-342m")
        assert (train.lr, train.end_lr, train.warmup, train.dtype) == (lr, pytest.approx(lr / 10), 0.05, "bf16")
        assert model.encoding.l == l == model.width // 8 and train.batch_size * 512 == 2**19
        assert train.steps * 2**19 == pytest.approx(10e9, rel=1e-3)
        exqpe = dataclasses.replace(model, encoding=make_encoding("exqpe", l=l)).encoding
        assert (exqpe.start, exqpe.theta1, exqpe.theta2) == (0.0, 1 / 2048, 1 / 16)


def test_encodings_are_the_same_in_config_and_models():
    assert list(CORE) == list(model_torch.ENCODINGS) == list(model_numpy.ENCODINGS) == list(ENCODINGS[: len(CORE)])
    for pe in ENCODINGS:
        assert type(make_encoding(pe)) is settings_class(pe) and make_encoding(pe).pe == pe


@pytest.mark.parametrize("text, is_one", [
    ("class Settings(NoPE):\n    pass\n", True), ("Settings = fox.Settings\n", True), ("Settings: type = NoPE\n", True),
    ("from zoo.fox import Settings\n", True), ("from zoo.fox import Layer as Settings\n", True),
    ('"""A docstring.\n\nSettings of others are not settings.\n"""\n', False), ("SettingsOf = 3\n", False),
    ("def f():\n    Settings = 3\n", False), ("from zoo.fox import Settings as Other\n", False),
    ("class Settings(NoPE:\n", True), ("\0", True)])                            # broken: --pe NAME shows the error
def test_what_a_file_of_zoo_defines_makes_it_an_encoding(text, is_one, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    assert defines_settings(tmp_path / "mine.py") == is_one
    (tmp_path / "link.py").symlink_to(tmp_path / "nothing")
    assert not defines_settings(tmp_path / "link.py")


@pytest.mark.slow
def test_a_broken_file_of_zoo_breaks_its_own_encoding_alone(tmp_path):
    """In a copy of the scripts, beside a file that is no text and one that Python cannot read."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "zoo", tmp_path / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "zoo" / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "zoo" / "broken.py").write_text("class Settings(NoPE:\n")
    (tmp_path / "zoo" / ".#broken.py").symlink_to("nothing")                                  # as Emacs makes
    for pe, said in (("rope", "--base X"), ("fox", "--help"), ("broken", "zoo/broken.py, line 1: ")):
        done = subprocess.run([sys.executable, "train.py", "--pe", pe, "--help"], cwd=tmp_path, text=True,
                              capture_output=True)
        assert (done.returncode == 0) == (pe != "broken") and said in done.stdout + done.stderr, done.stderr


def test_the_encoding_and_the_window_of_each_block():
    def blocks(**changes):
        config = dataclasses.replace(SMALL, layers=6, encoding=make_encoding("alibi"), **changes)
        return [(settings.pe, window) for settings, window in map(config.block, range(6))]

    assert blocks() == [("alibi", 0)] * 6 and blocks(window=3) == [("alibi", 3)] * 6
    assert blocks(nope_every=3) == [("alibi", 0), ("alibi", 0), ("nope", 0)] * 2
    assert blocks(nope_every=4, window=3) == [*[("alibi", 3)] * 3, ("nope", 0), *[("alibi", 3)] * 2]
    assert blocks(cycle="alibi:window=3,alibi,nope") == [("alibi", 3), ("alibi", 0), ("nope", 0)] * 2
    with pytest.raises(InputError, match="--nope-every must be 0, or from 2 to --layers, 6, got 7"):
        blocks(nope_every=7)


def test_a_part_of_a_cycle_has_the_settings_of_pe_but_for_those_that_it_changes():
    rope = make_encoding("rope", base=50.0)
    config = dataclasses.replace(SMALL, layers=3, encoding=rope, cycle="rope:window=3,rope:base=1e6,expe:l=3:on=k")
    other, _ = config.block(1)
    assert config.block(0) == (rope, 3) and other == dataclasses.replace(rope, base=1e6)
    assert config.block(2)[0] == make_encoding("expe", l=3, on="k").fit(config)  # theta 64/16
    drawn = dataclasses.replace(SMALL, layers=2, encoding=make_encoding("expe", l=3), cycle="expe,expe:learn=random")
    assert drawn.block(1)[0] == make_encoding("expe", l=3, learn="random").fit(drawn)  # no start, no theta
    stored = dataclasses.asdict(config)
    assert ModelConfig.from_dict(stored) == config and stored.pop("cycle")
    assert ModelConfig.from_dict(stored).block(1) == (rope, 0)  # of a run before there were cycles


@pytest.mark.parametrize("cycle, changes, message", [
    ("nope,rope", {}, "--cycle must begin with the encoding of --pe, rope"), ("rope:base=9", {}, "must begin with"),
    ("rope,rotary", {}, "got 'rotary': --pe must be one of nope, "), ("rope,", {}, "got '': --pe must be"),
    ("rope,rope:bass=9", {}, "'rope:bass=9': rope has the settings base, window, got 'bass'"),
    ("rope,rope:base=x", {}, "'rope:base=x': 'x' is not a number"), ("rope,rope:base=1", {}, "--base must.*above 1"),
    ("rope,rope:window=-2", {}, "window must be at least 0, got -2"),
    ("rope,rope:window", {}, "'' is not a whole number"),
    ("rope,rope:window=1e30", {}, "1e30' is not a whole number .of at most 2.53"),
    ("rope,rope:base=2:base=3", {}, "base stands there twice"),
    ("rope,expe", {}, "--l must be from 1 to the width, 8, got 24"), ("rope,expe:constant=1", {}, "--constant must be"),
    ("rope,rope,nope", {}, "at most as many parts as --layers, 2, got 3"),
    ("rope,learned", {}, "--cycle cannot have 'learned' in some blocks, since learned enters once, before the first "
     "block: make it the encoding of --pe and the first part$"),
    ("rope,expe:l=3:once=true", {}, "cannot have 'expe:l=3:once=true' in some blocks, since expe enters once, before "
     "the first block: make it the encoding of --pe and the first part, or add :once=false to it$"),
    ("rope,nope", {"window": 3}, "leave out --window"), ("rope,nope", {"causal": False}, "leave out .*--no-causal")])
def test_a_cycle_that_cannot_be_is_refused(cycle, changes, message):
    with pytest.raises(InputError, match=f"--cycle.*{message.removeprefix('--cycle')}"):
        dataclasses.replace(SMALL, layers=2, encoding=make_encoding("rope"), cycle=cycle, **changes)


@pytest.mark.parametrize("first, other, theta", [("qk", "k", 64 / 16), ("k", "qk", 1 / 64)])
def test_a_part_that_overrides_another_input_needs_its_own_theta(first, other, theta):
    cycle = f"expe,expe:on={other}"
    config = dataclasses.replace(SMALL, layers=2, encoding=make_encoding("expe", l=3, on=first))
    with pytest.raises(InputError, match=f"'expe:on={other}': .* add :theta={theta:g}, its default"):
        dataclasses.replace(config, cycle=cycle)
    found, _ = dataclasses.replace(config, cycle=f"{cycle}:theta={theta}").block(1)
    assert found == make_encoding("expe", l=3, on=other).fit(config)


def test_unset_fields_take_their_defaults_where_the_context_is_known():
    expe = dataclasses.replace(SMALL, width=32, encoding=make_encoding("expe")).encoding
    assert (expe.l, expe.start, expe.theta) == (24, 0.0, 1 / 64)
    assert not hasattr(expe, "theta1") and not hasattr(expe, "base")
    keys = dataclasses.replace(SMALL, width=32, encoding=make_encoding("expe", on="k")).encoding
    assert (keys.start, keys.theta) == (0.0, 64 / 16)
    assert dataclasses.replace(SMALL, encoding=make_encoding("rope")).encoding.base == 10000.0


WRONG_MODELS = [
    (dict(layers=0), "--layers must be a whole number, at least 1 and at most 10,000, got 0"),
    (dict(heads=3), "--heads must be a divisor of --width, 8, got 3"),
    (dict(norm="batchnorm"), "--norm must be layernorm or rmsnorm, got 'batchnorm'"),
    (dict(tied="yes"), "--tied must be true or false, got 'yes'"),
    (dict(dropout=math.nan), "--dropout must be a finite number, at least 0 and below 1, got nan"),
    (dict(heads=8, encoding=make_encoding("rope")), "--pe rope needs an even --width / --heads, got 1"),
    (dict(encoding=make_encoding("learned", n_positions=15)), "--n-positions must be 0 or at least --context, 16, got"),
    (dict(window=4, causal=False), "--window and --softmax stick look back: give no --no-causal"),
    (dict(softmax="llama4", encoding=make_encoding("rope")), "--softmax llama4 is for blocks without an encoding"),
]
WRONG_ENCODINGS = [
    (dict(pe="rotary"), "--pe must be one of nope, sinusoidal, .*, got 'rotary'"),
    (dict(pe="expe", l=True), "--l must be a whole number, at least 1, got True"),
    (dict(pe="expe", theta=math.inf), "--theta must be a finite number, got inf"),
    (dict(pe="rope", base=1), "--base must be a finite number, above 1, got 1"),
    (dict(pe="expe", once=True, on="k"), "--once overrides the residual stream, --on the input of attention"),
    (dict(pe="expe", learn="random", theta=0.1), "--learn random draws .* leave out --start and --theta"),
    (dict(pe="t5", buckets=32, max_distance=16), "--max-distance must be above half of --buckets, 32, got 16"),
]
WRONG_RUNS = [
    (dict(end_lr=1.0), "--end-lr must be from 0 to --lr"),
    (dict(dtype="fp16"), "--dtype must be fp32, tf32 or bf16, got 'fp16'"),
    (dict(backend="numpy", dtype="bf16"), "--backend numpy computes in fp32"),
]
RUN = TrainConfig(steps=10, batch_size=16, lr=1e-3, end_lr=0.0)


@pytest.mark.parametrize("make, changes, message", [
    *((lambda **changes: dataclasses.replace(SMALL, **changes), *wrong) for wrong in WRONG_MODELS),
    *((make_encoding, *wrong) for wrong in WRONG_ENCODINGS),
    *((lambda **changes: dataclasses.replace(RUN, **changes), *wrong) for wrong in WRONG_RUNS),
])
def test_a_wrong_setting_is_refused_with_flag_value_and_rule(make, changes, message):
    with pytest.raises(InputError, match=message):
        make(**changes)


@pytest.mark.parametrize("pe, settings", [
    ("expe", {"on": "k"}), ("expe", {"on": "k", "theta": 9.0}), ("expe", {"on": "k", "theta": 9.0, "learn": "init"}),
    ("exqpe", {"on": "k", "theta2": 99.0}), ("rope", {"cycle": "rope,expe:on=k:theta=9"})])
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_tf32_takes_every_theta_that_bf16_takes(dtype, pe, settings):
    """A factor of a product keeps 10 bits in TF32, and 7 in bf16: TF32 errs less at any theta."""
    assert make_configs("mini", pe, dtype=dtype, **settings)[1].dtype == dtype


def test_numbers_on_the_command_line():
    assert number("1/2048") == 1 / 2048 and number("3e-3") == 0.003
    assert whole("6e8") == whole("600_000_000") == 600_000_000
    for read, text in [(number, "x"), (number, ""), (number, "1/0"), (whole, "1.5"), (whole, "nan"), (whole, "inf")]:
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not a"):
            read(text)


def test_a_text_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    for name, reason in (("none.txt", "is missing"), (".", "cannot be read: "),
                         ("latin.txt", "is not UTF-8 text: invalid continuation byte at byte 3")):
        with pytest.raises(InputError) as found:
            read_text(tmp_path / name)
        assert str(found.value).startswith(f"{tmp_path / name} {reason}")


@pytest.mark.parametrize("flags, name, value", [
    ("--lr 0.008", "end_lr", 8e-5), ("--lr 0.008 --end-lr 0.001", "end_lr", 0.001),
    ("--width 64", "mlp_width", 256), ("--width 64 --mlp-width 99", "mlp_width", 99), ("--heads 2", "mlp_width", 512),
    ("--objective mlm", "causal", False),
    ("--on k", "theta", 64 / 128), ("--on k --theta 3", "theta", 3), ("--context 64", "theta", 1 / 256)])
def test_a_flag_sets_the_defaults_that_its_help_names(flags, name, value):
    _, model, train = read_flags(["--preset", "mini", "--pe", "expe", *flags.split()])
    assert (vars(model.encoding) | vars(model) | vars(train))[name] == pytest.approx(value)
