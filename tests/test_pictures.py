"""What the pictures of lab/pictures.py and lab/report.py show: whose colour, which names, at what height."""

import shutil

import numpy as np
import pytest
from matplotlib.colors import to_hex

from config import InputError
from lab import pictures, report
from lab.grids import GRIDS, VARIANTS, flags_of
from lab.pictures import Curve, curves
from train import read_flags


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, which are not written."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path, dpi=100: figures.append(figure))
    return figures


def lines(figure):
    """{label without its value: the curve of that colour}, of a figure in which no two have one colour."""
    axis = figure.axes[0]
    curves = {to_hex(line.get_color()): line for container in axis.containers for line in container.lines[:1]}
    return {text.get_text().split(":")[0]: curves[to_hex(text.get_color())] for text in axis.texts}


def rows(run, losses, protocol="nonoverlap", how=""):
    lengths = [16 * 2**i for i in range(len(losses))]
    return [{"run": str(run), "how": how, "protocol": protocol, "length": length, "trained_length": 16, "loss": loss}
            for length, loss in zip(lengths, losses, strict=True)]


# ---- names and colours -----------------------------------------------------------------------------------------------


def test_an_encoding_has_its_colour_and_name_whatever_is_drawn_beside_it(workplace, drawn):
    runs = workplace / "runs"
    pictures.losses(rows(runs / "expe", [3, 4]) + rows(runs / "rope", [3, 5]), "")
    pictures.losses(rows(runs / "rope", [2, 3]) + rows(runs / "learned", [3, None]), "")
    first, second = map(lines, drawn)
    assert set(first) == {"ExPE", "RoPE"} and set(second) == {"RoPE", "learned"}
    assert first["RoPE"].get_color() == second["RoPE"].get_color() != first["ExPE"].get_color()
    assert list(second["RoPE"].get_ydata()) == [2, 3] and list(first["ExPE"].get_ydata()) == [3, 4]


def test_runs_of_one_encoding_are_named_by_the_run_and_told_apart_by_their_line(workplace, tmp_path, drawn):
    run = workplace / "runs/rope"
    shutil.copytree(run, tmp_path / "other")
    shutil.copytree(run, tmp_path / "rope")
    pictures.losses(rows(run, [3, 4]) + rows(tmp_path / "other", [3, 5]) + rows(tmp_path / "rope", [2, 3]), "")
    axis = drawn[0].axes[0]
    named = {f"RoPE ({run}): 4.00", "RoPE (other): 5.00", f"RoPE ({tmp_path / 'rope'}): 3.00"}
    assert {text.get_text() for text in axis.texts} == named
    found = [container.lines[0] for container in axis.containers]
    assert len({line.get_color() for line in found}) == 1 and len({line.get_linestyle() for line in found}) == 3


def test_every_variant_has_a_name_of_its_own_and_the_colour_of_its_encoding():
    assert len(set(map(pictures.name, VARIANTS))) == len(VARIANTS)
    assert pictures.colour("rope-base100-lr-x2") == pictures.colour("rope") != pictures.colour("expe-on-k-x16")
    assert pictures.colour("expe-on-k-x16") == pictures.colour("expe-on-k") != pictures.colour("expe-x16")
    for grid in GRIDS.values():                            # curves of one encoding have one colour and differ by dash
        assert len(set(map(pictures.colour, grid.evaluations))) == len(set(map(pictures.family, grid.evaluations)))
    assert len(pictures.NAMES) == len(set(map(pictures.colour, pictures.NAMES)))
    for variant, base in (("rope-sinks", "rope"), ("expe-on-k-log", "expe-on-k"), ("kerple-llama4", "kerple")):
        assert pictures.colour(variant) == pictures.colour(base)


@pytest.fixture
def trained_by(monkeypatch):
    """trained_by(flags): the run that is read next was trained by these flags of train.py."""
    def pretend(flags):
        made = (*read_flags(["--preset", "mini", *flags.split()])[1:], {})
        monkeypatch.setattr(pictures, "read_run", lambda run: made)

    return pretend


@pytest.mark.parametrize("variant", [*GRIDS["table2"].evaluations, *GRIDS["ablations"].evaluations, "rope-log"])
def test_a_run_is_named_as_the_variant_that_its_flags_are_of(variant, trained_by):
    trained_by(flags_of(variant))
    assert pictures.variant_of("run") == variant.replace("-x1", "-theta1/512")


@pytest.mark.parametrize("flags, name", [
    ("--pe expe --softmax sinks --on k", "ExPE-K, sinks"), ("--pe nope --softmax llama4", "NoPE, Llama 4"),
    ("--pe expe --on k --theta 1/2048 --start 0.1", "ExPE-K, start 0.1 theta 1/2048"),
])
def test_a_run_of_no_variant_is_named_by_its_settings_as_shortly_as_they_can_be_said(trained_by, flags, name):
    trained_by(flags)
    assert pictures.names_of(["run"]) == {"run": name}


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_the_sliding_window_is_a_level_line_of_the_runs_colour(workplace, drawn):
    run = workplace / "runs/rope"
    found = [rows(run, [3, 4], "same-targets"), rows(run, [2.9], "sliding"),
             rows(run, [3, 3.5], "same-targets", "yarn auto"), rows(run, [2.8], "sliding", "yarn auto")]
    pictures.losses(sum(found, []), "")
    axis = drawn[0].axes[0]
    [level] = [line for line in axis.lines if list(line.get_ydata()) == [2.9, 2.9]]
    assert list(level.get_xdata()) == [16, 32] and level.get_color() == pictures.colour("rope")
    [words] = [text.get_text() for text in drawn[0].legends[0].texts]
    assert words.startswith("keep the last 16 tokens (a sliding window), where it is not within 0.02")
    assert axis.get_title(loc="left").endswith("the same targets")


def line_of(how, losses, window):
    at = {(protocol, 2**i): [{"loss": loss + more + seed} for seed in (0, 0.2)]
          for protocol, more in (("same-targets", 0), ("nonoverlap", 1)) for i, loss in enumerate(losses)}
    return report.Line("expe", how, 16, at | {("sliding", 1): [{"loss": window}, {"loss": window + 0.2}]})


def test_the_reports_baseline_is_that_of_the_protocol_and_differences_are_from_fp32(drawn):
    plain, bf16 = line_of("", [2, 3, 4, 5, 6], 2.4), line_of("bf16", [2, 3, 4, 5, 6.5], 2.5)
    for protocol in ("same-targets", "nonoverlap"):
        report.draw_losses("", [plain, bf16], protocol, "")
    level, none = ([line for line in figure.axes[0].lines if set(line.get_ydata()) == {2.5}] for figure in drawn)
    assert len(level) == 1 and not none and not drawn[1].legends
    report.draw_differences("", [plain, bf16], "same-targets", "")
    axis = drawn[2].axes[0]
    [curve] = [container.lines[0] for container in axis.containers]
    np.testing.assert_allclose(curve.get_ydata(), [0, 0, 0, 0, 0.5], atol=1e-12)
    assert [text.get_text() for text in axis.texts] == ["ExPE, bf16: +0.500"]
    assert any(set(line.get_ydata()) == {0} for line in axis.lines)


def test_nothing_to_draw_is_said_in_one_line():
    with pytest.raises(InputError, match="there is nothing to draw"):
        curves("", {"none": Curve([], [], None, "#000000")}, "", {16})
