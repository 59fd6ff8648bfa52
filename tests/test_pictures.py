"""What the pictures of lab/pictures.py show: whose colour, which names, at what height."""

import argparse
import itertools
import shutil

import numpy as np
import pytest
from conftest import ROOT, command, refused

from lab import pictures
from lab.idea import make_example
from lab.results import Row
from settings import InputError
from train import read_flags
from zoo import names


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, which are not written."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path, dpi=100: figures.append(figure))
    return figures


def rows(run, losses):
    lengths = [16 * 2**i for i in range(len(losses))]
    return [{"run": str(run), "how": "", "protocol": "nonoverlap", "length": length, "trained_length": 16, "loss": loss}
            for length, loss in zip(lengths, losses, strict=True)]


# Machado et al. 2009, severity 1: what protanopes and deuteranopes see of linear red, green and blue.
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))


def lab(colour, seen):
    """A colour in CIELAB (D65), as somebody sees it."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(seen @ np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = to_xyz @ linear / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_cielab_is_that_of_the_tables():
    np.testing.assert_allclose(lab("#FF0000", np.eye(3)), [53.24, 80.09, 67.20], atol=0.02)
    np.testing.assert_allclose(lab("#FFFFFF", np.array(PROTANOPIA)), [100, 0, 0], atol=0.02)


@pytest.mark.parametrize("seen", [np.eye(3), PROTANOPIA, DEUTERANOPIA], ids=["all", "protanopes", "deuteranopes"])
def test_methods_that_are_drawn_together_are_told_apart_by_everybody(seen):
    colours = {name: names.colour(name) for name in ("fox", "alibi", "grape", "kerple", "expe-on-k", "expe", "rope",
                                                             "dape", "path_fox", "nope", "path", "cable")}
    for (one, a), (other, b) in itertools.combinations(colours.items(), 2):
        assert np.linalg.norm(lab(a, np.array(seen)) - lab(b, np.array(seen))) >= 10, (one, other)
    assert len(set(names.COLOURS)) == len(names.METHODS)
    own = names.colours(["x1", "x4", "x16", "rope", "x64", "x256"])                 # of a user's own study
    assert own.pop("rope") == names.colour("rope")
    for a, b in itertools.combinations(own.values(), 2):
        assert np.linalg.norm(lab(a, np.array(seen)) - lab(b, np.array(seen))) >= 10, (a, b)


def test_an_encoding_has_its_colour_and_name_whatever_is_drawn_beside_it(workplace, tmp_path, drawn):
    run = workplace / "runs/rope"
    shutil.copytree(run, tmp_path / "other")
    pictures.losses(rows(workplace / "runs/expe", [3, 4]) + rows(run, [3, 5]) + rows(tmp_path / "other", [2, None]), "")
    axis = drawn[0].axes[0]
    found = [container.lines[0] for container in axis.containers]
    assert [line.get_color() for line in found] == [names.colour(name) for name in ("expe", "rope", "rope")]
    assert [list(line.get_ydata()) for line in found] == [[3, 4], [3, 5], [2]]
    assert found[1].get_linestyle() != found[2].get_linestyle()         # of one encoding
    assert {text.get_text() for text in axis.texts} == {"ExPE: 4.00", "RoPE (rope): 5.00", "RoPE (other): 2.00"}


@pytest.mark.parametrize("flags, name", [
    ("--pe expe --on k", "ExPE-K"), ("--pe expe --softmax sinks --on k", "ExPE-K, sinks"), ("--pe nope", "NoPE"),
    ("--pe expe --on k --theta 1/2048 --start 0.1", "ExPE-K, start 0.1 theta 1/2048"), ("--pe fox", "FoX")])
def test_a_run_is_named_by_its_settings_as_shortly_as_they_can_be_said(flags, name, monkeypatch):
    made = (*read_flags(["--preset", "mini", *flags.split()])[1:], {})
    monkeypatch.setattr(names, "read_run", lambda run: made)
    assert names.names_of(["run"]) == {"run": name}


def test_a_table_is_drawn_with_its_seeds(drawn):
    lines = {"ExPE": ("#000000", {16: [3.0, 3.2], 32: [4.0, 4.2, 4.4]}), "none": ("#000000", {})}
    pictures.curves("", lines, "RoPE rises", "2 seeds", {16})
    [container] = drawn[0].axes[0].containers
    assert list(container.lines[0].get_ydata()) == pytest.approx([3.1, 4.2])
    low, high = container.lines[2][0].get_segments()[1][:, 1]
    assert (high - low) / 2 == pytest.approx(4.302653 * 0.2 / 3**0.5)      # t of 2 degrees of freedom, by its table
    assert drawn[0].axes[0].get_title(loc="left") == "RoPE rises\n(2 seeds)"
    with pytest.raises(InputError, match="there is nothing to draw"):
        pictures.curves("", {"none": ("#000000", {})}, "", "", {16})


def test_a_seed_that_chose_a_runs_values_is_in_no_mean_of_a_picture(drawn):
    seeds = {("fox", 1, True): 9.0, ("fox", 2, False): 3.0, ("fox", 3, False): 3.2, ("rope", 1, True): 4.0}
    found = [Row(run, "", seed, "spread", "spread", 16, 16, value, None, None, "", {}, chosen)
             for (run, seed, chosen), value in seeds.items()]
    pictures.draw("", found, argparse.Namespace(title="t"))
    axis = drawn[0].axes[0]
    assert [list(container.lines[0].get_ydata()) for container in axis.containers] == [[pytest.approx(3.1)], [4.0]]
    assert {text.get_text() for text in axis.texts} == {"FoX: 3.10", "RoPE, chose its values: 4.00"}
    assert "without seeds that chose values" in axis.get_title(loc="left")


@pytest.mark.parametrize("flags", ["best.jsonl --measures test-spread --runs fox*,rope*",
                                   "encodings.jsonl --measures same-targets,extended-same-targets --runs rope",
                                   "tasks.jsonl --measures accuracy", "best.jsonl --measures test-spread --rises"])
def test_studies_are_drawn_from_their_results(flags, tmp_path):
    file, *more = flags.split()
    flag = [] if "--rises" in more else ["--plot"]
    done = command("lab.table", ROOT / "studies" / file, *more, *flag, "a.png", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG"), done.stderr


def test_one_picture_has_one_protocol(tmp_path):
    flags = "--measures nonoverlap,same-targets --plot a.png".split()
    done = command("lab.table", ROOT / "studies/readme.jsonl", *flags, cwd=tmp_path)
    assert "--plot draws one protocol: name measures of it" in refused(done) and not (tmp_path / "a.png").exists()


def test_the_picture_of_the_idea_shows_the_bias_that_the_overridden_rows_make():
    """Scores with positions, less those with all keys at position 0, are the bias up to a number for each query."""
    h, phi, q, w_k, bias = make_example()
    L = (h != phi).any(0).sum()
    at_zero = np.concatenate((phi[:1, :L].repeat(len(h), 0), h[:, L:]), axis=1)
    added = q @ ((phi - at_zero) @ w_k.T).T / q.shape[1] ** 0.5
    seen = ~np.isnan(bias)
    for m in range(len(h)):
        difference = (added - bias)[m, seen[m]]
        np.testing.assert_allclose(difference, difference[0], atol=1e-12)
