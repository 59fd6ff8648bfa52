"""Training's numbers as curves, from log.jsonl alone."""

import json
import shutil

import pytest
from conftest import command, refused

from lab import curves, pictures


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("steps, size", [(7, 1), (7, 3), (1000, 10)])
def test_a_curve_is_the_means_of_stretches_of_steps(steps, size):
    lines = [{"step": n, "tokens": 64 * n, "loss": n**0.5} for n in range(1, steps + 1)]
    x, y = curves.curve(lines, "loss", size)
    parts = [range(first, min(first + size, steps + 1)) for first in range(1, steps + 1, size)]
    assert x.tolist() == pytest.approx([sum(64 * n for n in part) / len(part) for part in parts])
    assert y.tolist() == pytest.approx([sum(n**0.5 for n in part) / len(part) for part in parts])
    assert [len(some) for some in curves.curve(lines, "val_loss", size)] == [0, 0]


def test_a_picture_has_four_curves_a_run_also_of_one_that_is_being_written(workplace, tmp_path, monkeypatch):
    shutil.copytree(workplace / "runs", tmp_path / "runs")
    path, drawn, said, training = tmp_path / "runs/rope/log.jsonl", {}, {}, pictures.training
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + '{"step": 4, "lo')
    monkeypatch.setattr(pictures, "training", lambda path, runs, unfinished: (
        drawn.update(runs), said.update(unfinished), training(path, runs, unfinished)))
    done = command("lab.curves", "--out", "curves.svg", cwd=tmp_path)
    assert done.returncode == 0 and "3 runs: curves.svg" in done.stdout, done.stderr
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text and drawn.keys() == {"runs/expe", "runs/learned", "runs/rope"}
    assert drawn["runs/rope"]["loss"][0].tolist() == [64, 128, 192] and len(drawn["runs/rope"]["val_loss"][0]) == 0
    assert said == {"runs/expe": "", "runs/learned": "", "runs/rope": "step 3 of 8"}
    lines = log(workplace / "runs/expe")
    for key in ("loss", "val_loss", "grad_norm", "lr"):
        assert drawn["runs/expe"][key][1].tolist() == [line[key] for line in lines if key in line]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": 9, "loss": "low"}', '{"step": 9', "5"])
def test_a_line_of_another_program_is_named(workplace, tmp_path, line):
    shutil.copytree(workplace / "runs/expe", tmp_path / "run")
    with open(tmp_path / "run/log.jsonl", "a") as file:
        file.write(f"{line}\n")
    said = refused(command("lab.curves", "run", "--out", "a.png", cwd=tmp_path))
    assert "run/log.jsonl holds a line that train.py did not write" in said
    assert not (tmp_path / "a.png").exists()
