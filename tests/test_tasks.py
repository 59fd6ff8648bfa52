"""The small tasks: every target recomputed from the tokens alone, and runs through the commands."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import command, read_log, refused

import tasks
from runs import load_model
from tasks import IGNORED, TASKS, open_split

SMALL = ["--preset", "mini", "--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "4", "--steps", "3"]


def words(name, row):
    return [TASKS[name].symbols[token] for token in row]


def expected(name, row, queries, full):
    """{place: symbol} of all scored places of a sequence; queries: of mqar, whose filler may repeat a key."""
    n = len(row)
    if name == "even-pairs":
        unequal = np.cumsum([a != b for a, b in zip(row, row[1:], strict=False)])
        return {i: "eo"[unequal[i - 1] % 2] for i in range(1, n)}
    if name == "first-last":
        text = [symbol for symbol in row if symbol in tasks.LETTERS]
        return {i: text[0] if row[i] == "F" else text[-1] for i in range(n) if row[i] in "FL"}
    if name.startswith("back"):
        k = int(name[-1])
        return {i: row[i - k] for i in range(k, n)}
    if name.startswith("flip-flop"):
        state, answers = None, {}
        for i in range(0, n - 1, 2):
            if row[i] == "w":
                state = row[i + 1]
            if row[i] == "r":
                assert row[i + 1] == state
                answers[i] = state
        return answers
    if name == "needle":
        answer = row.index("N") + 1
        return {i: row[answer] for i in range(n - 1 if full else answer + 1, n)}
    if name.startswith("mqar"):
        pairs = max(1, n // 16)
        recall = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        return {i: recall[row[i]] for i in queries}
    if name == "indirect":
        row = [symbol for symbol in row if symbol != "_"]
        letters = row[: row.index(",")]
        _, letter, _, sign, tens, ones = row[len(letters) :]
        return {n - 1: letters[letters.index(letter) + int(sign + tens + ones)]}
    x = row[1 : row.index("|")]
    answer = {"copy": x, "sort": sorted(x, key=lambda s: int(s) if s.isdigit() else s), "reverse": x[::-1],
              "duplicate": x + x}[name.partition("-")[0]]
    shown = row[row.index("|") + 1 :]
    assert row[0] == "^" and shown[: len(answer)] == answer and set(shown[len(answer) :]) <= {"_"}
    return {row.index("|") + i: symbol for i, symbol in enumerate([*answer, "$"])}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", ["shortest", "middle", "longest"])
@pytest.mark.parametrize("name", TASKS)
def test_targets_are_those_of_the_definition(name, size, full):
    task = TASKS[name]
    length = {"shortest": task.shortest, "middle": 46, "longest": task.longest or 640}[size]
    tokens, targets = task.draw(3, 5, length, 6, full)
    again = task.draw(3, 5, length, 6, full)
    assert tokens.dtype == targets.dtype == np.int64 and tokens.shape == targets.shape == (6, length)
    assert (tokens == again[0]).all() and (targets == again[1]).all()
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < len(task.symbols)
    assert 0 < task.guess(tokens, targets) <= 1
    for row, wanted in zip(tokens, targets, strict=True):
        queries = np.flatnonzero(wanted != IGNORED)
        answers = {i: TASKS[name].symbols[token] for i, token in enumerate(wanted) if token != IGNORED}
        assert answers == expected(name, words(name, row), queries, full) != {}
        if name.startswith("mqar"):
            pairs = max(1, length // 16)
            keys = sorted(row[: 2 * pairs : 2])
            assert sorted(row[queries]) == keys and len(set(keys)) == len(keys) and max(keys) < task.answers
            assert queries.min() >= 2 * pairs and not (queries % 2).any()


def test_random_lengths_fill_the_window_in_evaluation_alone():
    for name, times in (("copy", 1), ("sort", 1), ("reverse", 1), ("duplicate", 2)):
        lengths = {full: {words(name, row).index("|") - 1 for row in TASKS[name].draw(0, 0, 50, 300, full)[0]}
                   for full in (False, True)}
        assert lengths[True] == {48 // (1 + times)} and lengths[False] == set(range(1, 48 // (1 + times) + 1))


def test_a_needle_goes_further_back_as_training_goes_on():
    for step, furthest in ((0, 8), (800, 58), (16000, 299)):
        tokens, _ = TASKS["needle"].draw(0, step, 300, 2000)
        assert 0.9 * furthest < (299 - np.argmax(tokens == 16, 1)).max() <= furthest


def test_splits_and_steps_have_sequences_of_their_own():
    seen = set()
    for split in ("train", "val", "test"):
        for seed in range(3):
            for step in range(3):
                tokens, targets = tasks.batch(open_split("task:back-3", split), 40, 4, seed, step)
                assert tokens.shape == targets.shape == (4, 40)
                seen.add(hashlib.sha256(tokens.tobytes()).hexdigest())
    assert len(seen) == 27


def test_flip_flops_ignore_as_often_as_they_should():
    for name, share in (("flip-flop", 0.8), ("flip-flop-sparse", 0.98), ("flip-flop-dense", 0.1)):
        verbs = TASKS[name].draw(0, 0, 400, 200)[0][:, 2:-2:2]
        assert (verbs == 2).mean() == pytest.approx(share, abs=0.01)
        assert (verbs == 0).mean() == pytest.approx((1 - share) / 2, abs=0.01)


def test_guesses_are_those_of_who_knows_only_the_symbols():
    for name, length, share in (("copy", 26, 0.259), ("copy", 50, 0.157), ("copy", 98, 0.093),        # H_n / n
                                ("flip-flop-dense", 512, 0.95)):
        batch = TASKS[name].draw(1, 1, length, 400, True)
        targets = np.where(batch[1] == TASKS[name].end, IGNORED, batch[1])
        assert TASKS[name].guess(batch[0], targets) == pytest.approx(share, abs=0.02), name
    rng = np.random.default_rng(0)                                       # by playing: a guess from the counts before
    tokens, targets = TASKS["back-3"].draw(2, 2, 30, 3000)
    right = [row[i - 3] == rng.choice(np.flatnonzero(np.bincount(row[:i]) == np.bincount(row[:i]).max()))
             for row in tokens for i in range(3, 30)]
    assert TASKS["back-3"].guess(tokens, targets) == pytest.approx(np.mean(right), abs=0.01)
    for name, share in (("flip-flop", 0.72), ("flip-flop-sparse", 0.89)):
        tokens, targets = TASKS[name].draw(2, 2, 128, 1000, True)
        right = []
        for row, wanted in zip(tokens, targets, strict=True):
            for i in (i for i in range(128) if wanted[i] != IGNORED):
                bits = [row[j + 1] for j in range(0, i, 2) if row[j] == 0]
                ones = bits.count(4) / len(bits)
                right.append(0.5 if ones == 0.5 else (ones > 0.5) == (wanted[i] == 4))
        assert TASKS[name].guess(tokens, targets) == pytest.approx(np.mean(right)) == pytest.approx(share, abs=0.02)
    tokens, targets = TASKS["even-pairs"].draw(2, 2, 20, 4000)
    right = []
    for row in tokens:
        for i in range(1, 20):
            same = (row[:i] == row[i]).mean()
            guess = same > 0.5 if same != 0.5 else rng.random() < 0.5
            right.append(guess == (row[0] == row[i]))
    assert TASKS["even-pairs"].guess(tokens, targets) == pytest.approx(np.mean(right), abs=0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of two tasks with each backend."""
    folder = tmp_path_factory.mktemp("tasks")
    for backend in ("torch", "numpy"):
        for name in ("flip-flop", "copy"):
            flags = ["--data", f"task:{name}", "--context", "20", "--backend", backend, "--pe", "expe", "--on", "k"]
            done = command("train.py", *SMALL, *flags, "--l", "8", "--out", f"runs/{name}-{backend}", cwd=folder)
            assert done.returncode == 0, done.stderr
    return folder


def test_both_backends_train_a_task_alike(runs):
    for name in ("flip-flop", "copy"):
        losses = [[json.loads(line).get("loss", 0) for line in read_log(runs / f"runs/{name}-{backend}")]
                  for backend in ("torch", "numpy")]
        np.testing.assert_allclose(*losses, atol=1e-5)


def test_runs_resume_and_are_scored_by_their_data(runs):
    done = command("eval.py", "--json", "rows.json", cwd=runs)
    rows = json.loads((runs / "rows.json").read_text())
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("val of")] == [
        f"val of task:{name}: 512 sequences at every length" for name in ("copy", "flip-flop")]
    assert {row["length"] for row in rows if "copy" in row["data"]} == {20, 40, 80}          # 52 symbols run out
    assert {row["length"] for row in rows if "flip" in row["data"]} == {20, 40, 80, 160, 320}
    assert all((row["end"] is None) == ("flip" in row["data"]) for row in rows)
    done = command("eval.py", "runs/flip-flop-torch", "--data", "task:flip-flop-dense", "--lengths", "20,30", cwd=runs)
    assert done.returncode == 0 and "val of task:flip-flop-dense" in done.stdout
    done = command("train.py", "--out", "runs/copy-torch", "--resume", cwd=runs)
    assert "is complete" in done.stdout


def test_accuracies_are_those_of_a_loop(runs):
    model, _ = load_model(runs / "runs/copy-torch")
    found = tasks.score(model, "task:copy", 40, "test", 20)
    tokens, targets = TASKS["copy"].draw(2, 40, 40, 20, True)
    right, ends, whole = [], [], []
    for row, wanted in zip(tokens, targets, strict=True):
        chosen = model(torch.tensor(row[None]))[0].argmax(-1).tolist()
        mine = [chosen[i] == wanted[i] for i in range(40) if wanted[i] not in (IGNORED, 55)]
        right += mine
        whole.append(all(mine))
        ends += [chosen[i] == 55 for i in range(40) if wanted[i] == 55]
    means = {"accuracy": np.mean(right), "whole": np.mean(whole), "end": np.mean(ends)}
    assert {name: found[name] for name in means} == pytest.approx(means)


def test_runs_with_random_positions_are_scored_at_drawn_ones(runs):
    flags = ["--data", "task:copy", "--context", "20", "--pe", "rope", "--random-positions", "60"]
    assert command("train.py", *SMALL, *flags, "--out", "drawn", cwd=runs).returncode == 0
    done = command("eval.py", "drawn", "--lengths", "20,60", "--json", "drawn.json", cwd=runs)
    assert done.returncode == 0 and "--lengths must be at most 60" in refused(
        command("eval.py", "drawn", "--lengths", "61", cwd=runs))
    model, _ = load_model(runs / "drawn")
    for row in json.loads((runs / "drawn.json").read_text()):
        tokens, targets = TASKS["copy"].draw(1, row["length"], row["length"], 512, True)
        positions = np.sort(np.random.default_rng(row["length"]).choice(60, row["length"], replace=False))
        batch = min(512, 2**14 // row["length"])                        # the first of which share one draw
        right = model(torch.tensor(tokens[:batch]), positions=positions).argmax(-1).numpy() == targets[:batch]
        scored = (targets[:batch] != IGNORED) & (targets[:batch] != 55)
        assert abs(right[scored].mean() - row["accuracy"]) < (1e-9 if batch == 512 else 0.02)


def test_symbols_are_written(runs):
    words = ["generate.py", "runs/flip-flop-torch", "--prompt", "w 1 i 0 r", "--tokens", "3", "--temperature", "0"]
    done = command(*words, cwd=runs)
    assert done.stdout == command(*words, "--cache", cwd=runs).stdout
    assert done.returncode == 0 and set(done.stdout.split()) <= set("wri01") and len(done.stdout.split()) == 8


@pytest.mark.parametrize("line, message", [
    ("train.py --data task:copies", "--data task:NAME must have one of even-pairs"),
    ("train.py --data task:copy --vocab 99", "--vocab is 56 for --data task:copy: leave it out"),
    ("train.py --data task:copy --objective mlm", "--objective mlm is for text"),
    ("train.py --data task:copy --preset mini", "--context must be at least 4 and at most 106 for task:copy, got 128"),
    ("eval.py runs/copy-torch --lengths 3,8", "--lengths must be at least 4 and at most 106 for task:copy, got 3"),
    ("eval.py runs/copy-torch --data task:reverse", "--data must be a task with the same symbols"),
    ("eval.py runs/copy-torch --plot a.png", "--plot draws losses"),
    ("generate.py runs/copy-torch --prompt abc", "--prompt must have symbols of the task")])
def test_errors_name_the_flag(line, message, runs):
    script, *flags = line.split()
    assert message in refused(command(script, *flags, cwd=runs))


HASHES = {
    "even-pairs": ["489737f5", "10ea6054"], "first-last": ["ff24174d", "4a1da27d"],
    "back-3": ["b5715c9e", "d8689b8f"], "back-8": ["c18aa4d9", "30e2bd11"],
    "flip-flop": ["b601e0d7", "1b897fb2"], "flip-flop-sparse": ["74da0133", "d5621ffb"],
    "flip-flop-dense": ["23bcbe1d", "faf733d4"], "copy": ["67098fe4", "6f88f717"],
    "copy-150": ["e597c010", "30e6d8d6"], "sort": ["b3e9e416", "cf8c1baa"],
    "sort-150": ["e8776e7a", "fc6c4ff5"], "needle": ["cd269c9d", "ce012a0c"],
    "mqar": ["58968b9a", "0cfd7cd8"], "mqar-256": ["4a9585f8", "44927283"],
    "indirect": ["37a81eee", "cefc7e6f"], "reverse": ["f64e3a31", "3fdf2c0b"],
    "duplicate": ["df113879", "fae550b1"],
}


def edited(change):
    """TASKS["copy"].draw with its tokens changed where the arguments say so, as an edit of a task may do."""
    draw = TASKS["copy"].draw

    def changed(seed, step, length, batch, full=False):
        tokens, targets = draw(seed, step, length, batch, full)
        tokens[0, 1] = (tokens[0, 1] + bool(change(seed, step, length, batch, full))) % 52
        return tokens, targets

    return changed


CHANGES = {"all": lambda *_: True, "another step": lambda seed, step, *_: step > 0,
           "another seed": lambda seed, *_: seed > 2, "longer": lambda seed, step, length, *_: length > 64,
           "shorter": lambda seed, step, length, *_: length < 46, "other batches": lambda *x: x[3] < 8,
           "full in training": lambda *x: x[4] and x[2] > 64}


@pytest.mark.parametrize("change", CHANGES)
def test_a_task_that_changed_is_refused(change, runs, monkeypatch):
    assert "is complete" in command("train.py", "--out", "runs/copy-torch", "--resume", cwd=runs).stdout
    monkeypatch.setitem(TASKS, "copy", TASKS["copy"]._replace(draw=edited(CHANGES[change])))
    assert "is not what it was when" in refused(command("eval.py", "runs/copy-torch", cwd=runs))
    resumed = command("train.py", "--out", "runs/copy-torch", "--resume", "--steps", "9", cwd=runs)
    assert "task:copy is not the data that runs/copy-torch was trained on" in refused(resumed)


def test_a_task_whose_held_out_sequences_changed_is_refused(runs, monkeypatch):
    """Also by a run from before the hash of many batches."""
    draw = TASKS["copy"].draw
    shutil.copytree(runs / "runs/copy-torch", runs / "older-held-out")
    record = json.loads((runs / "older-held-out/config.json").read_text())
    del record["data"]["sequences"]
    (runs / "older-held-out/config.json").write_text(json.dumps(record))
    monkeypatch.setitem(TASKS, "copy", TASKS["copy"]._replace(
        draw=lambda seed, *how, full=False: draw(seed + 3 * (seed % 3 == 2), *how, full=full)))     # of test alone
    resumed = command("train.py", "--out", "older-held-out", "--resume", "--steps", "9", cwd=runs)
    assert "the hash of test differs" in refused(resumed)


def test_a_task_with_other_symbols_is_refused(runs, monkeypatch):
    symbols = TASKS["copy"].symbols
    monkeypatch.setitem(TASKS, "copy", TASKS["copy"]._replace(symbols=[*symbols[1::-1], *symbols[2:]]))
    assert "is not what it was when" in refused(command("eval.py", "runs/copy-torch", cwd=runs))
    generated = command("generate.py", "runs/copy-torch", "--prompt", "7", "--tokens", "1", cwd=runs)
    assert "task:copy has other symbols than when runs/copy-torch was trained" in refused(generated)
    assert "is not the data" in refused(command("train.py", "--out", "runs/copy-torch", "--resume", cwd=runs))


def test_a_run_from_before_this_hash_is_read_and_resumed(runs, monkeypatch):
    shutil.copytree(runs / "runs/copy-torch", runs / "older")
    record = json.loads((runs / "older/config.json").read_text())
    assert record["data"].pop("sequences") and "sequences" not in record["data"]
    (runs / "older/config.json").write_text(json.dumps(record))
    assert command("eval.py", "older", cwd=runs).returncode == 0
    assert command("train.py", "--out", "older", "--resume", "--steps", "4", cwd=runs).returncode == 0
    monkeypatch.setitem(TASKS, "copy", TASKS["copy"]._replace(draw=tasks.sort))
    assert "is not what it was when" in refused(command("eval.py", "older", cwd=runs))


def test_hashes_of_the_standard_tasks_are_those_of_published_runs():
    """Of the first batch of each split, by which older runs and studies/ know a task; and of many batches."""
    found = {name: [x["sha256"][:8] for x in (meta["splits"]["train"], meta["sequences"])]
             for name in TASKS for _, meta in [tasks.ensure(f"task:{name}")]}
    assert found == HASHES
