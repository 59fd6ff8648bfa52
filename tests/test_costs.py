"""The decision table: counts that can be worked out by hand, and what stands under results/."""

import json

import pytest
from conftest import ROOT, command, refused

from config import ModelConfig, make_encoding
from lab.grids import flags_of
from studies import costs
from studies.tuning import LATER
from train import read_flags


def config_of(pe, softmax="plain", **knobs):
    return ModelConfig(2, 32, 2, 16, 50, softmax=softmax, encoding=make_encoding(pe, **knobs))


def test_operations_are_those_of_the_formulas():
    plain, l, C, T, V, layers = costs.operations(config_of("nope")), 8, 32, 16, 50, 2
    products = layers * 2 * (4 * C * C + 8 * C * C + 2 * T * C) + 2 * C * V  # projections, MLP, attention; the head
    assert products < plain < products + layers * (40 * C + 8 * 2 * T)  # norms, gelu, residuals; scores
    assert costs.operations(config_of("sinusoidal")) - plain == C  # one sum
    assert costs.operations(config_of("learned")) - plain == C
    assert costs.operations(config_of("expe", l=l)) == plain  # it moves numbers
    assert costs.operations(config_of("rope")) - plain == layers * 2 * 6 * C // 2  # a pair: four products, two sums
    assert costs.operations(config_of("t5")) - plain == 0


@pytest.mark.parametrize(
    "pe, softmax, expected",
    [("nope", "plain", "0 yes causal"), ("learned", "plain", "512 no causal"), ("t5", "plain", "64 yes another"),
     ("alibi", "plain", "0 yes causal"), ("rope", "log", "4 yes another"), ("fox", "plain", "132 yes causal")],
)  # fmt: skip
def test_what_a_model_can_do(pe, softmax, expected):
    found = costs.costs(config_of(pe, softmax))
    assert f"{found['parameters']} {found['streams']} {found['kernel']}" == expected
    cache = 2 * 4 * 2 * 32  # keys and values, fp32, two blocks of width 32; of FoX a number for each of two heads
    assert found["cache, B"] == f"{cache + 2 * 4 * 2 * (pe == 'fox')}"


def test_the_page_has_what_the_command_counts():
    section = (ROOT / "docs/past-the-length.md").read_text().partition("## What each encoding costs")[2]
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()
                       if line.startswith("|"))
    assert set(LATER) < {name for name, *_ in rows} < set(costs.SHOWN)
    for name, *cells in rows:
        _, config, _ = read_flags(["--preset", "mini", *flags_of(name).split()])
        assert costs.costs(config) == dict(zip(heads[1:], cells, strict=True)), name


def test_losses_are_those_of_the_files(tmp_path):
    done = command("studies.costs", "--variants", "rope,rope-sinks", "--seeds", "0", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((ROOT / "results/mini/rope-s0.same-targets.json").read_text())
    at = {(row["protocol"], row["length"]): row["loss"] for row in rows}
    head, _, rope, sinks = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    first, last, sliding = at["same-targets", 128], at["same-targets", 2048], at["sliding", 128]
    assert rope[6:] == [f"{first:.3f}", f"{last - first:+.3f}", f"{last - sliding:+.3f}", "0"]
    assert rope[1:6] == ["0", "3,072", "4,096", "yes", "causal"] and sinks[4:6] == ["yes", "another"]
    assert "'new' must be of nope" in refused(command("studies.costs", "--variants", "new", cwd=tmp_path))
