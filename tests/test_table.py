"""lab.table: its statistics against tables, formulas by hand and simulation, and what it prints."""

import json
import math
import random
import re
import statistics

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT, command, refused

from lab import table
from lab.results import Row
from lab.statistics import PooledDeviation, estimate_difference, find_significant, pool_deviations, t_quantile


def rows(losses, context=128, length=128, run="a", chosen=(), counts=None):
    """Rows of a run: losses (seeds, documents) at one length."""
    counts = np.full(len(losses[0]), 64) if counts is None else np.array(counts)
    return [Row(run, "", seed, "spread", "spread", length, context, float(np.average(x, weights=counts)), np.array(x),
                counts, "same", {}, seed in chosen) for seed, x in enumerate(losses, start=1)]


# ---- statistics ------------------------------------------------------------------------------------------------------


def pair(a, b, **kind):
    """Pairs of Rows of two runs: losses (seeds, documents)."""
    return list(zip(rows(a, **kind), rows(b), strict=True))


def difference(lines, label, reference="ref", study=None):
    return table.compare_lines(lines, study or lines, ("spread", 1), reference)[label]


@pytest.mark.parametrize(  # of printed tables, and by hand: tan(0.475 pi) and 1.9 / sqrt(2 - 1.9^2 / 2)
    "freedom, value", [(1, math.tan(0.475 * math.pi)), (2, 1.9 / math.sqrt(2 - 1.9**2 / 2)), (3, 3.182446),
                       (4, 2.776445), (9, 2.262157), (26, 2.055529), (120, 1.979930), (1e5, 1.95999)])
def test_students_t_is_that_of_the_tables(freedom, value):
    assert t_quantile(freedom) == pytest.approx(value, rel=2e-6)


def test_a_deviation_is_pooled_over_the_methods_with_three_seeds():
    groups = {"a": [1, 2, 3], "b": [5.0, 5.5, 6.0], "c": [0, 1.5, 1.5], "d": [0, 1, 0.5, 0.2], "two": [0, 9]}
    pool = pool_deviations(groups)
    squares = {name: sum((x - statistics.mean(groups[name])) ** 2 for x in groups[name]) for name in "abcd"}
    assert pool.methods == ("a", "b", "c", "d") and pool.freedom == 9
    assert pool.sd == pytest.approx(math.sqrt(sum(squares.values()) / 9))
    assert pool_deviations({"a": [1, 2, 3], "two": [0, 9]}) is None     # one method has none to share with
    assert pool_deviations({}) is None


@pytest.mark.parametrize("factor, is_pooled", [(1, True), (2.64, True), (2.65, False), (1 / 2.64, True),
                                               (1 / 2.65, False), (0, False)])
def test_no_deviation_is_pooled_unless_all_lie_within_a_factor_of_two_of_it(factor, is_pooled):
    """Of two methods, the smaller deviation is half of sqrt((1 + f^2) / 2) if f is sqrt(7) = 2.6458."""
    pool = pool_deviations({"a": [-1, 0, 1], "b": [-factor, 0, factor]})
    assert (pool is not None) == is_pooled
    if is_pooled:
        assert pool.sd == pytest.approx(math.sqrt((1 + factor**2) / 2))


def test_a_method_that_varies_much_more_than_seven_others_is_not_pooled_with_them():
    """A pool of one deviation f and seven of 1 is half of f if f^2 = 4 (f^2 + 7) / 8, so if f is sqrt(7)."""
    seven = {str(i): [-1, 0, 1] for i in range(7)}
    assert pool_deviations(seven | {"wide": [-2.64, 0, 2.64]}).freedom == 16
    assert pool_deviations(seven | {"wide": [-2.65, 0, 2.65]}) is None


def test_without_a_pool_the_interval_is_that_of_students_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, (2, 4, 1))                                  # one document, which has no interval
    found = estimate_difference(pair(a, b), None, True)
    right = scipy.stats.ttest_rel(a[:, 0], b[:, 0])
    low, high = right.confidence_interval(0.95)
    assert (found.mean - found.half_width(), found.mean + found.half_width()) == pytest.approx((low, high))
    assert found.p_value() == pytest.approx(right.pvalue) and found.seeds == pytest.approx((a - b)[:, 0])


def test_with_two_methods_in_a_pool_the_interval_is_that_of_students_test_of_two_samples():
    a, b = np.array([[3.0], [3.1], [3.3]]), np.array([[2.0], [2.2], [2.3]])
    pool = pool_deviations({"a": a[:, 0], "b": b[:, 0]})
    found = estimate_difference(pair(a, b), pool, True)
    right = scipy.stats.ttest_ind(a[:, 0], b[:, 0])
    low, high = right.confidence_interval(0.95)
    assert (found.mean - found.half_width(), found.mean + found.half_width()) == pytest.approx((low, high))
    assert found.p_value() == pytest.approx(right.pvalue)


def test_an_interval_joins_seeds_and_documents():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, (3, 10)), rng.normal(2, 1, (3, 10))
    found = estimate_difference(pair(a, b), PooledDeviation(0.3, 20, ()), True)
    over_seeds = 2.085963 * 0.3 * math.sqrt(2 / 3)
    over_documents = 2.262157 * statistics.stdev((a - b).mean(0)) / math.sqrt(10)
    assert found.mean == pytest.approx((a - b).mean())
    assert found.half_width() == pytest.approx(math.hypot(over_seeds, over_documents), rel=1e-5)
    assert found.half_width(1 - found.p_value()) == pytest.approx(abs(found.mean))
    change = estimate_difference(pair(a, b), PooledDeviation(0.3, 20, ()), False)    # of one method, whose seeds vary
    assert change.half_width() == pytest.approx(math.hypot(over_seeds / math.sqrt(2), over_documents), rel=1e-5)


def test_documents_are_weighted_by_their_targets():
    """Of three documents, two that weigh a quarter each, n is 1 / (1/16 + 1/16 + 1/4) = 8/3."""
    pairs = list(zip(rows([[1, 5, 3]], counts=[5, 5, 10]), rows([[0, 0, 0]], counts=[5, 5, 10]), strict=True))
    found = estimate_difference(pairs, None, True)
    right = t_quantile(8 / 3 - 1) * math.sqrt((4 / 4 + 4 / 4) / (8 / 3 - 1))
    assert (found.mean, found.half_width()) == pytest.approx((3, right)) and math.isnan(found.p_value())


@pytest.mark.parametrize("seeds, chosen", [(2, ()), (3, (1,)), (3, (1, 2, 3))])
def test_two_seeds_make_no_interval_and_seeds_that_chose_a_value_are_in_no_mean(seeds, chosen):
    a, b = np.random.default_rng(0).normal(3, 1, (2, seeds, 10))
    found = estimate_difference(pair(a, b, chosen=chosen), PooledDeviation(0.3, 20, ()), True)
    each = (a - b).mean(1)
    assert found.errors == [] and math.isnan(found.p_value())
    assert found.chosen == pytest.approx(each[: len(chosen)]) and found.seeds == pytest.approx(each[len(chosen) :])
    assert math.isnan(found.mean) if len(chosen) == seeds else found.mean == pytest.approx(each[len(chosen) :].mean())


def test_a_seed_that_chose_a_value_is_in_no_interval():
    a, b = np.random.default_rng(0).normal(3, 1, (2, 4, 10))
    with_it, without = (estimate_difference(pairs, None, True) for pairs in (pair(a, b, chosen=(1,)), pair(a, b)[1:]))
    assert with_it._replace(chosen=()) == without and len(with_it.seeds) == 3


def test_holms_correction_is_that_of_his_example():
    """Holm 1979: 0.01, 0.02, 0.03 and 0.005 at 5%: the smallest passes 0.05/4, and the next 0.05/3; 0.02 > 0.05/2
    does not hold, and 0.03 stops at 0.05/1 only if all before it pass."""
    assert find_significant({"a": 0.01, "b": 0.02, "c": 0.03, "d": 0.005}) == {"d", "a", "b", "c"}
    assert find_significant({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == {"d", "a"}
    assert find_significant({"a": 0.02, "b": 0.04, "c": 0.001, "d": math.nan}) == {"c", "a", "b"}
    assert find_significant({}) == find_significant({"a": math.nan}) == set()


def test_a_flat_method_is_one_test_and_a_rising_one_two(monkeypatch):
    asked = []
    monkeypatch.setattr(table, "find_significant", lambda p_values: asked.append(p_values) or set())
    noise = np.random.default_rng(0).normal(0, 0.02, (3, 3, 10))
    lines = table.group_rows([row for i, (run, rise) in enumerate((("a", 0), ("b", 0), ("c", 1)))
                              for length in (128, 2048)
                              for row in rows(3 + noise[i] + rise * (length > 128), length=length, run=run)])
    places = [("spread", 1), ("spread", 16)]
    differences = {place: table.compare_lines(lines, lines, place, "a") for place in places}
    table.find_significant_lines(differences, table.compare_places(lines, lines, *places), "a", 0.01)
    assert asked[0].keys() == {("b", None), ("c", ("spread", 1)), ("c", ("spread", 16))}


@pytest.mark.parametrize("methods", [2, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(methods):
    """Methods of three seeds, which vary alike, and documents: about 95%, whether they are pooled or not."""
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(1200 // methods):
        parts = ((0.02, (methods, 3, 1)), (0.1, (methods, 1, 24)), (0.05, (methods, 3, 24)))    # seeds, documents, both
        losses = sum(size * rng.normal(size=shape) for size, shape in parts)
        lines = table.group_rows([row for i, x in enumerate(losses) for row in rows(x, run=str(i))])
        found = table.compare_lines(lines, lines, ("spread", 1), "0")
        covered += [abs(value.mean) <= value.half_width() for value in found.values()]
    assert len(covered) >= 600 and 0.93 < np.mean(covered) < 0.995


def test_a_pair_with_a_lucky_small_deviation_gets_no_star_from_a_pool():
    """Paired t with two degrees of freedom would give it one: its three differences are nearly equal."""
    rng = np.random.default_rng(2)
    seeds = {"ref": [0, 0.05, -0.05], "lucky": [0.021, 0.071, -0.029], "c": [0.1, -0.1, 0], "d": [0.06, 0, -0.06]}
    documents = 1e-4 * rng.normal(size=24)
    lines = table.group_rows([row for name, x in seeds.items() for row in rows(np.add.outer(x, documents), run=name)])
    found = difference(lines, "lucky")
    assert np.std(found.seeds) < 1e-9 and found.p_value() > 0.5 and found.half_width() > 0.05
    assert found.pooled.freedom == 8


def test_lines_of_two_files_share_no_pool():
    seeds = {"ref": [0, 0.05, -0.05], "a": [0.1, -0.1, 0], "b": [0.06, 0, -0.06], "c": [0.1, 0.02, 0]}
    losses = {name: np.array(x)[:, None] for name, x in seeds.items()}
    lines = table.group_rows([row._replace(file="one" if name in ("ref", "a") else "two")
                              for name, x in losses.items() for row in rows(x, run=name)])
    assert difference(lines, "a").pooled.methods == ("ref", "a")
    found = difference(lines, "b")
    assert found.pooled is None
    assert found.p_value() == pytest.approx(scipy.stats.ttest_rel(seeds["b"], seeds["ref"]).pvalue)


# ---- what is printed -------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    """A file of results of three runs, four seeds and two documents."""
    lines = [{"study": "s", "title": "t", "preset": "mini", "seeds": [1, 2, 3], "chosen": {"b": [1]}},
             {"targets": "k", "text": "val of x", "counts": [10, 30]}]
    for run, base in (("a", 3.0), ("b", 3.5), ("c", 3.0)):
        for seed in (1, 2, 3):
            lines.append({"run": run, "seed": seed, "command": "", "context": 128, "sha256": f"{run}{seed}" + "0" * 62})
            units = [[base + seed / 100, base + seed / 100 + (length == 256) + 0.4] for length in (128, 256)]
            lines.append({"measure": "loss", "run": run, "seed": seed, "flags": "", "sha256": f"{run}{seed}" + "0" * 14,
                          "rows": [{"protocol": "nonoverlap", "length": length, "targets": "k", "losses": x}
                                   for length, x in zip((128, 256), units, strict=True)]})
    lines.append({"run": "c", "seed": 3, "command": "", "context": 128, "sha256": "again" + "0" * 59})
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"measure": "lo')
    return tmp_path


def cells(printed, run):
    """The cells of a line of a table, which may be printed in parts."""
    parts = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith(f"| {run} ")]
    return [parts[0][0].strip(), *(cell.strip() for part in parts for cell in part[1:])]


def test_a_table_has_means_changes_and_differences_with_their_seeds(study):
    done = command("lab.table", "s.jsonl", "--than", "a", cwd=study)
    assert done.returncode == 0 and "loss: loss, nats a token; val of x; 40 targets in 2 units" in done.stdout
    assert cells(done.stdout, "a")[1:3] == ["3.320", "4.070"]           # 3.02 + 0.75 x 0.4, and + 0.75
    assert re.fullmatch(r"\+0\.750 ±\S+ (\* )?\(\+0\.750 \+0\.750 \+0\.750\)", cells(done.stdout, "a")[3])
    apart = "+0.500 (+0.500 +0.500; chose: +0.500)"                     # seed 1 of b, of which it chose the values
    assert cells(done.stdout, "b") == ["b", "3.825 (chose: 3.810)", "4.575 (chose: 4.560)",
                                       "+0.750 (+0.750 +0.750; chose: +0.750)", apart, apart]
    assert "chose: seeds that chose" in done.stdout and "Two seeds have no interval." in done.stdout
    assert cells(done.stdout, "c")[1] == f"{3.015 + 0.3:.3f}"           # seed 3 was trained again, and not measured
    each = command("lab.table", "s.jsonl", "--seeds", "--at", "1x", "--runs", "a,b", cwd=study).stdout
    assert cells(each, "a") == ["a", "3.310 3.320 3.330"] and cells(each, "b") == ["b", "3.820 3.830 (chose: 3.810)"]


def save_study(path, seeds):
    """A file of results at one length, of {run: losses of seeds 1, 2, .. on one document}."""
    lines = [{"study": "s", "title": "t", "preset": "mini", "seeds": [1, 2, 3]},
             {"targets": "k", "text": "val of x", "counts": [10]}]
    for run, losses in seeds.items():
        for seed, loss in enumerate(losses, start=1):
            lines.append({"run": run, "seed": seed, "command": "", "context": 8, "sha256": f"{run}{seed}"})
            lines.append({"measure": "loss", "run": run, "seed": seed, "flags": "", "sha256": f"{run}{seed}",
                          "rows": [{"protocol": "nonoverlap", "length": 8, "targets": "k", "losses": [loss]}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("wide, deviation", [(0.06, "pooled over 3 lines"), (0.6, "each line's own")])
def test_an_interval_is_of_the_whole_study_whatever_runs_are_shown(wide, deviation, tmp_path):
    save_study(tmp_path / "s.jsonl", {"a": [3, 3.05, 3.02], "b": [3.1, 3.11, 3.16], "wide": [4, 4 + wide, 4 - wide]})
    all_runs, two_runs = (command("lab.table", "s.jsonl", "--than", "a", *flags, cwd=tmp_path).stdout
                          for flags in ((), ("--runs", "a,b")))
    assert f"Deviation over seeds: {deviation}" in all_runs and f"Deviation over seeds: {deviation}" in two_runs
    shown = [re.search(r"±(\S+)", cells(printed, "b")[2])[1] for printed in (all_runs, two_runs)]
    assert shown[0] == shown[1] and "wide" not in two_runs
    alone = pool_deviations({"a": [3, 3.05, 3.02], "b": [3.1, 3.11, 3.16]})
    assert float(shown[0]) != pytest.approx(t_quantile(4) * alone.sd * math.sqrt(2 / 3), abs=6e-4)


def test_tables_with_intervals_fit_100_columns():
    flags = "studies/tokens.jsonl --measures test-spread --than fox-lr-x2"
    printed = command("lab.table", *flags.split(), cwd=ROOT).stdout
    assert max(map(len, printed.splitlines())) <= 100 and "±" in printed
    assert len(cells(printed, "kerple")) == 1 + 5 + 1 + 5               # losses, the change, differences from FoX


def test_fresh_rows_stand_beside_stored_ones(workplace, tmp_path):
    for run in ("expe", "rope"):
        done = command("lab.measure", f"runs/{run}", "--protocol", "same-targets", "--lengths", "16,64", "--json",
                       tmp_path / f"{run}.json", cwd=workplace)
        assert done.returncode == 0, done.stderr
    printed = command("lab.table", "expe.json", "rope.json", "--than", "rope", cwd=tmp_path).stdout
    expe, rope = ([row["loss"] for row in json.loads((tmp_path / name).read_text())]
                  for name in ("expe.json", "rope.json"))
    assert cells(printed, "expe")[1:4] == [f"{loss:.3f}" for loss in expe]
    assert cells(printed, "expe")[5].startswith(f"{expe[0] - rope[0]:+.3f} ±") and "over documents alone" in printed
    done = command("eval.py", "runs/expe", "--json", tmp_path / "e.json", "--lengths", "16", cwd=workplace)
    assert done.returncode == 0
    assert "| expe |" in command("lab.table", "e.json", cwd=tmp_path).stdout


def test_seeds_that_were_trained_with_different_code_are_named(study):
    lines = [json.loads(line) for line in (study / "s.jsonl").read_text().splitlines()[:-1]]

    def printed(codes):
        for line in lines:
            if "command" in line:
                line["code"] = codes.get((line["run"], line["seed"]))
        (study / "coded.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = command("lab.table", "coded.jsonl", cwd=study)
        return [line for line in done.stdout.splitlines() if "different code" in line]

    one, other = {"expe.py": "1", "zoo/fox.py": "2"}, {"expe.py": "1", "zoo/fox.py": "3"}
    assert printed({("a", 1): one, ("a", 2): other, ("a", 3): one, ("b", 1): other, ("b", 2): other}) == [
        "a: its seeds were trained with different code: zoo/fox.py"]
    assert printed({("a", 1): one, ("a", 2): one, ("b", 1): other}) == []            # of other seeds nothing is known


def test_tasks_have_means_over_all_seeds_and_say_how_many_learned(tmp_path):
    fact = {"text": "val of task:copy", "counts": [512], "chance": 0.1, "guess": 0.2}
    lines = [{"targets": f"k{n}", **fact} for n in (8, 32)]
    for seed, (short, long) in enumerate(((1.0, 0.99), (0.4, 0.01)), start=1):
        lines.append({"run": "copy.fox", "seed": seed, "command": "", "context": 8, "sha256": f"{seed}"})
        scores = [{"protocol": "task", "length": n, "targets": f"k{n}", "accuracy": x, "whole": 0, "end": None}
                  for n, x in ((8, short), (32, long))]
        lines.append({"measure": "accuracy", "run": "copy.fox", "seed": seed, "flags": "", "sha256": f"{seed}",
                      "rows": scores})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = command("lab.table", "t.jsonl", cwd=tmp_path).stdout
    assert cells(printed, "copy") == ["copy", "8", "70, 50 (1/2)", "20, 20"]


def test_the_numbers_of_a_study_are_those_of_its_file():
    flags = "studies/best.jsonl --measures test-spread --runs fox-lr-x2,rope-base100 --at 1x,16x"
    printed = command("lab.table", *flags.split(), cwd=ROOT).stdout
    found = {}
    for line in map(json.loads, (ROOT / "studies/best.jsonl").read_text().splitlines()):
        if line.get("measure") == "test-spread" and line["run"] == "rope-base100":
            for row in line["rows"]:
                found.setdefault(row["length"], []).append(statistics.mean(row["losses"]))
    assert cells(printed, "rope-base100")[1:3] == [f"{statistics.mean(found[length]):.3f}" for length in (128, 2048)]


WRONG = [None, True, -1, 0.5, float("nan"), 10**400, "x", [], {}, [[1]], [None], [float("inf")], {"a": "b"}]


def fields_of(value, path=()):
    """The paths of the fields of JSON, of lists the first item's alone."""
    for key in value if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from fields_of(value[key], (*path, key))


def edited(line, path, *values):
    """A copy of a line of JSON with another value at a path, or without that field."""
    line = parent = json.loads(line)
    for key in path[:-1]:
        parent = parent[key]
    if values:
        parent[path[-1]] = values[0]
    else:
        del parent[path[-1]]
    return json.dumps(line)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tasks", "tokens"])
def test_an_edited_line_of_results_is_read_or_named(file, tmp_path):
    """Of each kind of line of one run, each field is removed or has a value of another type; none is a traceback."""
    rng = random.Random(file)
    lines = (ROOT / f"studies/{file}.jsonl").read_text().splitlines()
    values = list(map(json.loads, lines))
    first = next(value["run"] for value in values if "run" in value)
    lines = [line for line, value in zip(lines, values, strict=True) if value.get("run", first) == first]
    kinds = {}                                                          # {kind: the number of its first line}
    for number, value in enumerate(map(json.loads, lines)):
        kinds.setdefault((next(iter(value)), value.get("measure")), number)
    named = 0
    for number in kinds.values():
        for path in fields_of(json.loads(lines[number])):
            for values in ((), *((value,) for value in rng.sample(WRONG, 3))):
                changed = [*lines[:number], edited(lines[number], path, *values), *lines[number + 1 :]]
                (tmp_path / "s.jsonl").write_text("".join(f"{line}\n" for line in changed))
                done = command("lab.table", "s.jsonl", cwd=tmp_path)
                if done.returncode:
                    assert re.search(r": error: s\.jsonl, line \d+, is no line of results: ", refused(done))
                    named += 1
    assert named > 30


def test_an_edited_row_of_json_is_read_or_named(workplace, tmp_path):
    for flags in ("--protocol same-targets", "--probe swap"):
        done = command("lab.measure", "runs/expe", *flags.split(), "--at", "2x", "--max-docs", "3", "--json",
                       tmp_path / "rows.json", cwd=workplace)
        assert done.returncode == 0, done.stderr
        row = json.loads((tmp_path / "rows.json").read_text())[0]
        for path in fields_of(row):
            for values in ((), *((value,) for value in WRONG)):
                (tmp_path / "edited.json").write_text(f"[{edited(json.dumps(row), path, *values)}]")
                done = command("lab.table", "edited.json", cwd=tmp_path)
                assert not done.returncode or "edited.json is no file of results or of --json: " in refused(done)


@pytest.mark.parametrize("flags, message", [
    ("s.jsonl --than=", "--than must be one of a, b, c, got"),
    ("none.jsonl", "none.jsonl is missing"), ("s.jsonl --than z", "--than must be one of a, b, c, got z"),
    ("s.jsonl --runs z*", "--runs has z*, and there are a, b, c"), ("s.jsonl --measures x", "--measures has x, and"),
    ("s.jsonl --plot a.bmp", "must end in .png, .svg, .pdf"), ("bad.jsonl", "bad.jsonl, line 2, is no line"),
    ("bad.json", "bad.json is no file of results or of --json"), ("empty.jsonl", "there is no measurement in it yet")])
def test_wrong_flags_and_files_are_named_in_one_line(study, flags, message):
    (study / "bad.jsonl").write_text('{"study": "s"}\nnonsense\n')
    (study / "bad.json").write_text('[{"run": 1}]')
    (study / "empty.jsonl").write_text("")
    assert message in refused(command("lab.table", *flags.split(), cwd=study))
