"""The grid that tunes every method: its trials by hand, its rule, and a small one run to its end."""

import json

from conftest import ROOT, command, refused

from lab import reproduce
from lab.grids import EVALUATIONS, NEWER, flags_of
from studies import tuning as tuned
from train import read_flags

SMALL = ["--context", "16", "--batch-size", "4", "--vocab", "300", "--steps", "2", "--width", "32", "--layers", "1"]


def config_of(name):
    """What a variant's flags make of mini: (the encoding's settings, learning rate)."""
    _, model, train = read_flags(["--preset", "mini", *flags_of(name).split()])
    return model.encoding, train.lr


def test_every_method_has_nine_trials_or_four_with_its_default_among_them_and_what_was_tried_beyond():
    for method, settings in (tuned.METHODS | tuned.LATER).items():
        names, best = tuned.trials(method, lambda name: len(name))
        assert names[0] == method and best == method, "the shortest name has the lowest loss"
        few = 9 if settings.knob or method in tuned.METHODS else 4
        assert len({config_of(name) for name in names}) == len(names)
        assert len(names) == few + len(settings.beyond)


def test_the_plan_goes_from_the_knob_to_the_rate_to_fresh_seeds():
    losses = {}
    plan = lambda: [run for run in tuned.runs([1, 2], losses.get) if run[0].startswith("rope")]  # noqa: E731
    first = ["rope", "rope-base30", "rope-base100", "rope-base300", "rope-base1000", "rope-base100000"]
    assert plan() == [(name, 0, tuned.TRIALS) for name in first]
    losses |= dict.fromkeys(first, 3.0) | {"rope-base300": 2.9}
    del losses["rope"]
    assert len(plan()) == 6, "the default is missing"
    losses["rope"] = 3.1
    second = [f"rope-base300-lr-x{rate}" for rate in (0.25, 0.5, 2)]
    assert plan() == [(name, 0, tuned.TRIALS) for name in first + second]
    losses |= dict.fromkeys(second, 2.95)
    best = [(name, seed, tuned.FINALS) for name in ("rope", "rope-base300") for seed in (1, 2)]
    assert plan() == [(name, 0, tuned.TRIALS) for name in first + second] + best
    losses[second[1]] = 2.8
    assert plan()[-1] == (second[1], 2, tuned.FINALS)
    losses |= {"rope": 2.7, "rope-base300": 3.0} | {f"rope-lr-x{rate}": 2.75 for rate in (0.25, 0.5, 2)}
    assert [name for name, *_ in plan()][-2:] == ["rope", "rope"], "the default is the best: it has its seeds once"


def test_trials_never_see_the_test_split_and_finals_see_it_alone():
    assert not any("test" in EVALUATIONS[name] for name in ("trial", *tuned.TRIALS))
    assert all("--split test" in EVALUATIONS[name] for name in tuned.FINALS)


def test_a_small_tuning_runs_to_its_end_and_goes_on_from_its_results(tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"expe": tuned.Method("--pe expe", {"x4": "--theta 4/512"}, {"lr-x2": "--lr 0.008"}),
           "nope": tuned.Method("--pe nope", {}, {"lr-x2": "--lr 0.008"})}
    monkeypatch.setattr(tuned, "METHODS", few)
    monkeypatch.setattr(tuned, "LATER", {"cable": tuned.Method("--pe cable", {}, {"lr-x2": "--lr 0.008"})})
    monkeypatch.setitem(EVALUATIONS, "trial", "--lengths 16")
    flags = ["tuned", "--seeds", "1", "--max-docs", "2", "--", *SMALL, "--data", str(tokens)]
    reproduce.main(flags)
    said = lambda name: json.loads((tmp_path / f"results/mini/{name}.json").read_text())  # noqa: E731
    page = (tmp_path / "results/mini/tuned.md").read_text()
    for method, first in (("expe", ["expe", "expe-x4"]), ("nope", ["nope"])):
        loss = {name: said(f"{name}-s0.nonoverlap")[0]["loss"] for name in first}
        second = f"{min(loss, key=loss.get)}-lr-x2"
        loss[second] = said(f"{second}-s0.nonoverlap")[0]["loss"]
        best = min(loss, key=loss.get)
        assert f"| {best} | `{flags_of(best)}` |" in page
        for name in {method, best}:
            assert {row["split"] for row in said(f"{name}-s1.test-same-targets")} == {"test"}
    for name in ("cable", "cable-lr-x2"):
        [row] = said(f"{name}-s0.trial")
        assert row["length"] == row["trained_length"] and row["split"] == "val"
    assert not list(tmp_path.glob("results/mini/cable*-s1.*")), "another grid has its fresh seeds"
    cut = tmp_path / "results/mini/expe-x4-s0.same-targets.json"  # as by a kill before its last evaluation
    text = cut.read_text()
    cut.unlink()
    (tmp_path / "results/mini/tuned.md").unlink()
    reproduce.main(["report"])
    cut.write_text(text)
    files = sorted(tmp_path.rglob("results/mini/*.json"))
    before = {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    reproduce.main([*flags[:1], "--use-results", *flags[1:]])
    assert not (tmp_path / "runs").exists()
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("results/mini/*.json"))} == before


def test_the_later_methods_that_are_trained_with_fresh_seeds_are_the_best_of_their_trials():
    def loss(name):
        return json.loads((ROOT / f"results/mini/{name}-s{tuned.SEED}.trial.json").read_text())[0]["loss"]

    assert set(NEWER) == {tuned.trials(method, loss)[1] for method in tuned.LATER}


def test_the_trials_own_seed_is_refused(tmp_path):
    line = refused(command("lab.reproduce", "tuned", "--seeds", "0,1", cwd=tmp_path))
    assert "seed 0 is that of the trials: give tuned --seeds without it" in line
