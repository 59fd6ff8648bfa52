"""lab.compare and lab.verdict: every number recomputed from the files, Holm's correction by hand."""

import json
import math
import statistics

import numpy as np
import pytest
from conftest import ROOT, command, refused

from lab import verdict
from lab.grids import GRIDS
from lab.measures import adjust_by_holm, interval_of_seeds, p_value, student
from studies import task_pages


def rows(name, seed, length, protocol="same-targets"):
    found = json.loads((ROOT / f"results/mini/{name}-s{seed}.test-{protocol}.json").read_text())
    [row] = [row for row in found if row["protocol"] == protocol and row["length"] == length]
    return row


@pytest.mark.parametrize("a, b, length", [("fox", "expe-on-k", 2048), ("rope-base100", "alibi-x4-lr-x2", 128)])
def test_a_difference_and_its_interval_are_those_of_the_files(a, b, length):
    done = command("lab.compare", a, b, "--at", f"{length // 128}x", "--split", "test", cwd=ROOT)
    d = np.array([np.subtract(rows(a, seed, length)["unit_losses"], rows(b, seed, length)["unit_losses"])
                  for seed in (1, 2, 3)])                               # documents have as many targets each
    by_seed, by_document = d.mean(1), d.mean(0)
    n = d.shape[1]
    half = math.hypot(4.302653 * by_seed.std(ddof=1) / math.sqrt(3), 2.093024 * by_document.std(ddof=1) / math.sqrt(n))
    assert n == 20 and f"{d.mean():+.3f} ({d.mean() - half:+.3f}, {d.mean() + half:+.3f})" in done.stdout, done.stdout
    for name in (a, b):
        losses = [rows(name, seed, length)["loss"] for seed in (1, 2, 3)]
        assert f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}" in done.stdout


@pytest.mark.parametrize("words, message", [
    ("fox fox --place no", "--place must be a folder of results/"),
    ("rop expe", "rop is no variant of lab/grids.py"), ("fox fire --split test", "has no same-targets of fire on test"),
    ("expe rope:ntk", "has no rope:ntk; read in other ways there are: expe:scale 0.5"),
    ("expe rope --at 3x", "must be of 1x, 2x, 4x, 8x, 16x")])
def test_wrong_names_are_told(words, message):
    assert message in refused(command("lab.compare", *words.split(), cwd=ROOT))


def test_the_grid_of_spread_targets_has_every_method_at_its_best():
    assert set(GRIDS["spread"].evaluations) == set(verdict.tuned_variants())


def test_student_is_the_tables():
    for freedom, level, value in ((2, 0.95, 4.3027), (2, 0.99, 9.9248), (19, 0.9, 1.7291), (23, 0.999, 3.7676)):
        assert student(freedom, level) == pytest.approx(value, rel=1e-3)


def test_a_p_value_is_where_its_interval_ends_at_0():
    differences = np.random.default_rng(0).normal(0.1, 0.1, (3, 20))
    p = p_value(differences, np.ones(20))
    assert 0.001 < p < 0.9
    for level, inside in ((1 - p + 0.002, True), (1 - p - 0.002, False)):
        _, low, high = interval_of_seeds(differences, np.ones(20), level)
        assert (low <= 0 <= high) == inside


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04, of which the largest so far counts."""
    assert adjust_by_holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert adjust_by_holm([0.5, 0.6]) == pytest.approx([1, 1])


def test_what_a_method_is_good_for_is_what_it_learns_of_the_tasks():
    assert sorted(verdict.GOOD_FOR) == sorted(names[0] for names in verdict.tuned_variants().values())
    for method, (words, tasks) in verdict.GOOD_FOR.items():
        assert len(words.split()) == 5 and tasks
        for task, multiple in tasks.items():
            _, (learned, _), rows = task_pages.finals(task)[method]
            [accuracy] = [row["accuracy"] for row in rows if row["length"] == multiple * rows[0]["length"]]
            assert learned and accuracy >= task_pages.LEARNED, (method, task)


def test_pages_show_what_the_command_prints():
    for page, flags in (("README.md", []), ("docs/evidence.md", ["--full"])):
        printed = command("lab.verdict", *flags, cwd=ROOT).stdout
        cells = {tuple(cell.strip() for cell in line.split("|")) for line in printed.splitlines()[2:]}
        shown = {tuple(cell.strip() for cell in line.split("|"))
                 for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")}
        assert cells and cells <= shown, cells - shown


@pytest.mark.parametrize("flags, words", [
    (["--reference", "fox-lr-x2"], "--reference is for --full: add it"),
    (["--full", "--reference", "fox"], "--reference must be a method of the table")])
def test_verdict_names_what_does_not_fit(flags, words):
    done = command("lab.verdict", *flags, cwd=ROOT)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
