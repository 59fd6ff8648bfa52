"""A grid of tiny runs: planned, killed and gone on with, evaluated, and reported from its files alone."""

import json
import math
import operator
import re
import shutil
import statistics
from pathlib import Path

import pytest
from conftest import command, refused

from common import read_run
from eval import MULTIPLES
from lab import report
from lab.grids import EVALUATIONS, GRIDS, VARIANTS, Grid
from lab.measures import student

WHAT = ("run", "nonoverlap", "same-targets", "scaled", "scaled-same-targets")
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch-size", "4", "--vocab", "300"]


@pytest.fixture(scope="module")
def grid(tokens, tmp_path_factory):
    """A folder in which a grid of three variants and two seeds was run to its end."""
    folder = tmp_path_factory.mktemp("grid")
    flags = [*SMALL, "--steps", "4", "--data", tokens]
    done = command("lab.reproduce", "scaling", "--seeds", "0,1", "--", *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_variant_is_a_run_of_its_own():
    flags = [value.split()[1:] for value in VARIANTS.values()]
    assert len(set(map(tuple, flags))) == len(flags)
    for grid in GRIDS.values():
        assert set(grid.evaluations) <= set(VARIANTS)
        assert {variant for variant, _ in grid.paper} <= set(grid.evaluations)
        assert {name for names in grid.evaluations.values() for name in names} <= set(EVALUATIONS)


def test_a_grid_leaves_runs_results_a_report_and_pictures(grid):
    names = {f"{variant}-s{seed}" for variant in ("expe", "exqpe", "expe-on-k-x1") for seed in (0, 1)}
    assert {path.name for path in (grid / "runs/mini").iterdir()} == names
    files = {path.name for path in (grid / "results/mini").glob("*.json")}
    assert files == {f"{name}.{what}.json" for name in names for what in WHAT}
    model, _, _ = read_run(grid / "runs/mini/expe-on-k-x1-s1")
    assert model.encoding.on == "k" and model.encoding.pe == "expe"
    assert (grid / "pictures/mini-scaling-nonoverlap.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (grid / "results/mini").glob("*.md")] == ["scaling.md"]      # the finished grid alone
    text = (grid / "results/mini/scaling.md").read_text()
    assert text.startswith(f"# {GRIDS['scaling'].title}\n\n{GRIDS['scaling'].says}\n")
    assert "| expe-on-k-x1 | `--pe expe --on k --theta 1/512` |" in text
    index = (grid / "results/README.md").read_text()
    assert f"- [{GRIDS['scaling'].title}](mini/scaling.md)" in index and "## Notes" in index


def test_numbers_of_the_report_are_those_of_the_files(grid):
    text = (grid / "results/mini/scaling.md").read_text()
    at = [{(row["how"], row["length"]): row for what in ("nonoverlap", "scaled")
           for row in json.loads((grid / f"results/mini/expe-s{seed}.{what}.json").read_text())}
          for seed in (0, 1)]

    def from_the_plain(length):
        parts = [(part["scale 0.5", length], part["", length]) for part in at]
        d = [[x - y for x, y in zip(row["unit_losses"], plain["unit_losses"], strict=True)] for row, plain in parts]
        targets = parts[0][0]["unit_targets"]
        weights = [x / sum(targets) for x in targets]
        by_seed = [sum(map(operator.mul, x, weights)) for x in d]
        mean, n = statistics.mean(by_seed), 1 / sum(w * w for w in weights)
        spread = sum(w * ((x + y) / 2 - mean) ** 2 for w, x, y in zip(weights, *d, strict=True)) / (n - 1)
        half = math.hypot(12.7062 * statistics.stdev(by_seed) / math.sqrt(2), student(n - 1) * math.sqrt(spread))
        return f"{mean:+.3f} ({mean - half:+.3f}, {mean + half:+.3f})"

    for how in ("", "scale 0.5"):
        losses = [[part[how, length]["loss"] for part in at] for length in (16, 32, 64, 128, 256)]
        cells = [f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}" for x in losses]
        rises = [b - a for a, b in zip(losses[0], losses[4], strict=True)]
        line = f"| expe | {how} | {' | '.join(cells)} | {statistics.mean(rises):+.3f} ± {statistics.stdev(rises):.3f} |"
        line += f" {from_the_plain(16)} | {from_the_plain(256)} |" if how else "  |  |"
        numbers = {"": "2.63 2.59 2.71 5.19 7.56", "scale 0.5": "2.76 2.71 2.68 2.98 5.65"}[how]
        paper = float(numbers.split()[-1]) - float(numbers.split()[0])
        assert f"{line} {numbers} | {paper:+.2f} | {statistics.mean(rises) - paper:+.2f} |" in text
    same = [json.loads((grid / f"results/mini/exqpe-s{seed}.scaled-same-targets.json").read_text()) for seed in (0, 1)]
    at = [{(row["how"], row["protocol"], row["length"]): row for row in part} for part in same]
    longest, first = ("scale auto", "same-targets", 256), ("scale auto", "same-targets", 16)
    n = at[0][longest]["n_documents"]
    assert at[0][longest]["unit_targets"] == [8] * n
    d = [[part[longest]["unit_losses"][i] - part[first]["unit_losses"][i] for i in range(n)] for part in at]
    by_seed, by_document = [statistics.mean(x) for x in d], [statistics.mean(x) for x in zip(*d, strict=True)]
    over_seeds = 12.7062 * statistics.stdev(by_seed) / math.sqrt(2)
    half = math.hypot(over_seeds, student(n - 1) * statistics.stdev(by_document) / math.sqrt(n))
    mean = statistics.mean(by_seed)
    found = f"{mean:+.3f} ({mean - half:+.3f}, {mean + half:+.3f})"
    assert re.search(rf"\| exqpe \| scale auto \|.*\| {re.escape(found)} \|", text)


def test_tables_of_spread_targets_far_repetitions_and_copies_are_those_of_the_files(tokens, tmp_path, monkeypatch):
    monkeypatch.setitem(EVALUATIONS, "copies", "--probe repeat --lengths 8,16,32,64,128,256")
    whats = ["test-spread", "test-far-repeats", "swap", "copies"]
    grid = Grid("A title", {"expe-on-k": whats, "expe-x16": [*whats, "test-held-spread"]}, place="far")
    monkeypatch.setitem(GRIDS, "tokens", grid)
    done = command("lab.reproduce", "tokens", "--seeds", "1,2", "--", *SMALL, "--steps", "4", "--data", tokens,
                   cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results/far/tokens.md").read_text()
    assert (tmp_path / "pictures/mini-tokens-spread.png").exists() and "mini-tokens-repeat.png" in text
    rows = {(name, what): [json.loads((tmp_path / f"results/far/{name}-s{seed}.{what}.json").read_text())
                           for seed in (1, 2)] for name, names in grid.evaluations.items() for what in names}

    def shown(values, form=".3f"):
        return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):.3f}"

    for how, what in ("", "test-spread"), ("hold", "test-held-spread"):
        losses = zip(*([row["loss"] for row in part] for part in rows["expe-x16", what]), strict=True)
        assert f"| expe-x16 | {how} | {' | '.join(map(shown, losses))} |" in text
    assert "sliding" not in text
    for name in grid.evaluations:
        firsts, lasts = ([part[i]["by_distance"] for part in rows[name, "test-far-repeats"]] for i in (0, -1))
        gains = [shown([a[at][0] - b[at][0] for a, b in zip(firsts, lasts, strict=True)], "+.3f") for at in firsts[0]]
        assert f"| {name} |  | {' | '.join(gains)} |" in text
        heads = [f"{at} back ({n:,} targets)" for at, (_, n) in firsts[0].items()]
        assert f"| run | positions | {' | '.join(heads)} |" in text
        near = [part[0] for part in rows[name, "copies"]]
        assert [row["length"] for row in near] == [8, 8]
        gain = statistics.mean(row["without"] - row["loss"] for row in near)
        assert re.search(rf"\| {name} \| .*\| {re.escape(f'{gain:+.3f}')} \(", text)
    said = command("lab.compare", "expe-x16", "expe-on-k", "--place", "far", "--split", "test", "--protocol", "spread",
                   "--at", "1x", cwd=tmp_path).stdout
    assert shown([part[0]["loss"] for part in rows["expe-x16", "test-spread"]]) in said


def test_each_way_of_reading_is_compared_with_the_best_sliding_window_of_its_run():
    row = lambda loss: [{"loss": loss, "unit_losses": [loss, loss], "unit_targets": [8, 8]}]  # noqa: E731
    rows = lambda loss, beside: {("same-targets", k): row(loss) for k in MULTIPLES} | {("sliding", 1): row(beside)}  # noqa: E731
    for beside in (2.75, 2.5), (2.5, 2.75):
        lines = [report.Line("expe", how, 16, rows(3.0, x)) for how, x in zip(("", "scale 4.0"), beside, strict=True)]
        table = report.same_targets_table(lines, "expe")
        assert [line.split(" | ")[9] for line in table.splitlines()] == ["16x - sliding", "---", "+0.500", "+0.500"]


def test_a_report_of_one_seed_has_differences_and_no_interval(grid, tmp_path):
    (tmp_path / "results/mini").mkdir(parents=True)
    for path in (grid / "results/mini").glob("*-s1.*.json"):
        shutil.copy(path, tmp_path / "results/mini")
    assert command("lab.reproduce", "report", cwd=tmp_path).returncode == 0
    [row] = re.findall(r"^\| exqpe \| scale auto \|.*", (tmp_path / "results/mini/scaling.md").read_text(), re.M)
    assert re.search(r"(\| [+-]\d\.\d{3} ){4}\|$", row)


def test_results_alone_make_the_report_and_its_notes_are_kept(grid, tmp_path):
    (tmp_path / "results/mini").mkdir(parents=True)
    for path in (grid / "results/mini").glob("*.json"):
        shutil.copy(path, tmp_path / "results/mini")
    (tmp_path / "results/README.md").write_text("old\n\n## Notes\n\nWhat did not work: x.\n")
    assert command("lab.reproduce", "report", cwd=tmp_path).returncode == 0
    again, text = ((folder / "results/README.md").read_text() for folder in (tmp_path, grid))
    assert again.split("## Notes")[0] == text.split("## Notes")[0]
    assert again.endswith("\n## Notes\n\nWhat did not work: x.\n")
    made = [path.relative_to(grid) for folder in ("pictures", "results") for path in (grid / folder).rglob("*.[mps]*")]
    assert len(made) > 3
    for path in set(made) - {Path("results/README.md")}:
        assert (tmp_path / path).read_bytes() == (grid / path).read_bytes(), path


def test_what_is_done_is_left_alone_and_what_is_lost_is_made_again(grid, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(grid, folder)
    tokens = read_run(folder / "runs/mini/expe-s0")[1].data
    again = ["lab.reproduce", "scaling", "--seeds", "0,1", "--", *SMALL, "--steps", "4", "--data", tokens]
    file = folder / "results/mini/expe-s0.scaled.json"
    before, weights = file.read_text(), (folder / "runs/mini/expe-s0/checkpoint.safetensors").stat().st_mtime_ns
    file.unlink()
    rows = json.loads((folder / "results/mini/expe-s1.scaled.json").read_text())
    rows[0]["weights"] = "of another run"
    (folder / "results/mini/expe-s1.scaled.json").write_text(json.dumps(rows))
    (folder / "results/mini/exqpe-s1.scaled.json").write_text('[{"run": "runs/mi')
    done = command(*again, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "27 of 30 jobs are done" in done.stdout and file.read_text() == before
    assert (folder / "results/mini/expe-s1.scaled.json").read_text() == (
        grid / "results/mini/expe-s1.scaled.json"
    ).read_text()
    assert (folder / "runs/mini/expe-s0/checkpoint.safetensors").stat().st_mtime_ns == weights
    (folder / "results/mini/exqpe-s1.scaled.json").unlink()
    plan = command(*again[:4], "--dry-run", *again[4:], cwd=folder)
    assert "6 runs, 1,536 training tokens; left: 0 runs and 1 evaluations, about" in plan.stdout


def test_a_dry_run_writes_nothing(tmp_path):
    done = command("lab.reproduce", "table2", "--seeds", "0", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 runs, 19,660,800 training tokens; left: 12 runs and 48 evaluations, about" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_grid_may_have_a_preset_and_a_text_of_its_own(tmp_path):
    done = command("lab.reproduce", "novels", "--seeds", "1", "--dry-run", "--verbose", cwd=tmp_path)
    trains = [line for line in done.stdout.splitlines() if "train.py" in line]
    assert len(trains) == 4 and all("--preset small" in line and "--data data/eltec" in line for line in trains)
    assert "--pe rope --lr 0.006 --seed 1 --out runs/small-books/rope-lr-0.006-s1" in trains[3]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("report", "there is nothing under results/ to report"),
        ("scaling --seeds 0 -- --stepz 4", "--stepz is not a flag of --pe expe"),
        ("scaling --seeds 0 -- --pe=rope", "--pe is the grid's own"),
        ("report --seeds 1", "report reads all of results/ and takes no flag: leave out --seeds"),
        ("hold --preset small", "hold varies what the preset mini has: leave out --preset"),
        ("sizes --preset mini", "sizes varies what the preset small has: leave out --preset"),
    ],
)
def test_wrong_flags_are_named_in_one_line(flags, message, tmp_path):
    assert message in refused(command("lab.reproduce", *flags.split(), cwd=tmp_path))
    assert not (tmp_path / "results").exists() and not (tmp_path / "runs").exists()


def test_flags_that_are_not_the_runs_own_are_refused(grid):
    line = refused(command("lab.reproduce", "scaling", "--seeds", "0", "--", "--steps", "9", cwd=grid))
    assert "--steps is 4 in runs/mini/expe-s0, and 9 was given" in line


def test_a_report_needs_whole_files_and_a_place_for_its_notes(grid, tmp_path):
    shutil.copytree(grid / "results", tmp_path / "results")
    (tmp_path / "results/mini/notes.json").write_text("[]")  # no file of a grid
    path = tmp_path / "results/mini/expe-s0.scaled.json"
    whole = path.read_text()
    lacking = [{name: x for name, x in row.items() if name != "unit_losses"} for row in json.loads(whole)]
    for text, words in (whole[:100], "is not valid JSON"), (json.dumps(lacking), "lacks 'unit_losses'"):
        path.write_text(text)
        line = refused(command("lab.reproduce", "report", cwd=tmp_path))
        assert f"expe-s0.scaled.json {words}: it was cut short or edited: delete it" in line
    path.write_text(whole)
    (tmp_path / "results/README.md").write_text("## Notes by hand\n")
    assert "README.md has no line '## Notes'" in refused(command("lab.reproduce", "report", cwd=tmp_path))
    assert (tmp_path / "results/README.md").read_text() == "## Notes by hand\n"


def test_other_documents_are_scored_again_and_never_averaged(grid, tmp_path):
    shutil.copytree(grid / "results", tmp_path / "results")
    path = tmp_path / "results/mini/expe-s1.same-targets.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([row | {"n_documents": 1} for row in rows]))
    line = refused(command("lab.reproduce", "report", cwd=tmp_path))
    assert "expe-s1.same-targets.json was scored on other documents than" in line
    faults = ((rows[:-1], "lacks the row of sliding at 1x"), ([*rows, rows[-1]], "has other rows than seed 0"))
    for some, words in faults:
        path.write_text(json.dumps(some))
        line = refused(command("lab.reproduce", "report", cwd=tmp_path))
        assert f"expe-s1.same-targets.json {words}: delete it" in line
    assert (tmp_path / "results/README.md").read_text() == (grid / "results/README.md").read_text()
    path.unlink()
    done = command("lab.reproduce", "report", cwd=tmp_path)
    assert done.returncode == 0 and "scaling of mini has not all of seed 1, which is left out" in done.stdout
    tokens = read_run(grid / "runs/mini/expe-s0")[1].data
    flags = ["--seeds", "0,1", "--max-docs", "1", "--dry-run", "--", *SMALL, "--steps", "4", "--data", tokens]
    plan = command("lab.reproduce", "scaling", *flags, cwd=grid)
    assert "left: 0 runs and 24 evaluations" in plan.stdout
