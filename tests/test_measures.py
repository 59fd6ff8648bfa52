"""Which tokens every protocol and probe reads and scores, on documents whose tokens tell where they are from."""

import math
import statistics

import numpy as np
import pytest
from conftest import ROOT, command, refused

from config import InputError
from lab import measures
from lab.measures import PROTOCOLS, Settings
from studies import coverage

LENGTHS = (16, 32, 128)
DOCUMENTS = [1000 * (d + 1) + np.arange(size) for d, size in enumerate((129, 200, 300, 401))]  # token = where it is
SETTINGS = Settings(16, 128, targets=10, stride=4, encode=lambda text: encode(text))


def encode(text):
    """A token a character, but for a digit 7, which takes two."""
    return [token for c in text for token in [60_000 + ord(c)] + [64_000] * (c == "7")]


def scored(windows):
    """The scored targets, as (document, index) pairs, in order."""
    return [(w.unit, int(x) - 1000 * (w.unit + 1)) for w in windows for x in w.tokens[len(w.tokens) - w.scored :]]


SCORED = [name for name in PROTOCOLS if name != "far-repeats"]  # for which these documents have no target


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_target_is_scored_exactly_once_at_every_length(name, length):
    [windows] = PROTOCOLS[name].conditions(DOCUMENTS, length, SETTINGS)
    if PROTOCOLS[name].whole:  # all targets of a multiple of the longest length
        right = [(d, i) for d, document in enumerate(DOCUMENTS) for i in range(1, (len(document) - 1) // 128 * 128 + 1)]
    elif name == "spread":  # ten before each of the ends: there is room for 1, 8, 16 and 16 of them
        room = {0: np.linspace(128, 128, 1), 1: np.linspace(128, 199, 8), 2: np.linspace(128, 299, 16),
                3: np.linspace(128, 400, 16)}
        right = [(d, int(end) - 9 + i) for d, ends in room.items() for end in ends for i in range(10)]
        assert len(set(right)) == len(right)
    else:  # the last ten
        right = [(d, i) for d, document in enumerate(DOCUMENTS) for i in range(len(document) - 10, len(document))]
    assert scored(windows) == right


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_window_is_a_piece_of_its_document_of_that_length(name, length):
    [windows] = PROTOCOLS[name].conditions(DOCUMENTS, length, SETTINGS)
    for window in windows:
        first = int(window.tokens[0]) - 1000 * (window.unit + 1)
        np.testing.assert_array_equal(window.tokens, DOCUMENTS[window.unit][first:][: len(window.tokens)])
        clipped = name == "sliding" and length == 128 and window.unit == 0  # 129 tokens hold no earlier full window
        assert len(window.tokens) == length + 1 or clipped
        assert 1 <= window.scored <= length


def test_a_sliding_window_scores_a_stride_at_its_end_and_same_targets_all_at_once():
    [sliding] = measures.sliding(DOCUMENTS, 16, SETTINGS)
    [same] = measures.same_targets(DOCUMENTS, 16, SETTINGS)
    assert [window.scored for window in sliding] == [4, 4, 2] * 4 and [window.scored for window in same] == [10] * 4
    least = {"sliding": 16 - 4, "same": 16 - 10}  # tokens before a target, in the window: at least
    for name, windows in (("sliding", sliding), ("same", same)):
        assert min(len(window.tokens) - window.scored for window in windows) == least[name] + 1


def test_a_spread_target_has_its_whole_context_at_the_trained_length_and_nearly_so_further_out():
    for length, scored_at_once in ((16, {1}), (32, {2}), (64, {5}), (128, {10})):
        [windows] = measures.spread(DOCUMENTS, length, SETTINGS)
        assert {window.scored for window in windows} == scored_at_once
        assert {len(window.tokens) for window in windows} == {length + 1}
    big = SETTINGS._replace(targets=100)
    assert {window.scored for window in measures.spread(DOCUMENTS, 16, big)[0]} == {1}
    assert {len(window.tokens) for window in measures.spread(DOCUMENTS, 127, SETTINGS)[0]} <= {127, 128}


def test_far_repeats_are_those_of_a_search_through_the_whole_document(monkeypatch):
    monkeypatch.setattr(measures, "REPEATS", 10**6)
    rng = np.random.default_rng(3)
    documents = [rng.integers(2, size=size).astype(np.uint16) for size in (900, 150, 700)]  # two symbols: many copies
    documents.insert(1, np.arange(300, dtype=np.uint16))  # without a copy
    windows = {length: measures.far_repeats(documents, length, SETTINGS)[0] for length in (16, 128)}
    right = []
    for document in documents:
        for i in range(128, len(document)):
            last = [j for j in range(8, i) if (document[j - 7 : j + 1] == document[i - 7 : i + 1]).all()]
            if last and 16 < i - last[-1] <= 121:
                right.append((document[i - 128 : i + 1].tolist(), i - last[-1]))
    assert 5 < len(right) == len(windows[128])
    assert [(window.tokens.tolist(), window.distance) for window in windows[128]] == right
    for far, near in zip(windows[128], windows[16], strict=True):
        copy = far.tokens[-1 - far.distance - 7 :][:8]
        assert len(copy) == 8 and (copy == far.tokens[-8:]).all()
        assert (near.tokens == far.tokens[-17:]).all() and near.scored == far.scored == 1
    assert {window.unit for window in windows[16]} <= {0, 1, 2} and windows[16][-1].unit >= 1
    losses = [np.full(1, window.distance, np.float32) for window in windows[16]]
    by_distance = measures.by_distance(windows[16], losses, 16)
    distances = np.array([distance for _, distance in right])
    for name, low in (("1x to 2x", 16), ("2x to 4x", 32), ("4x to 8x", 64)):
        inside = distances[(distances > low) & (distances <= 2 * low)]
        assert by_distance.pop(name) == [pytest.approx(inside.mean()), len(inside)]
    assert not by_distance
    monkeypatch.setattr(measures, "REPEATS", 3)
    assert max(np.bincount([window.unit for window in measures.far_repeats(documents, 16, SETTINGS)[0]])) == 3
    with pytest.raises(InputError, match="no 8 tokens of these documents stood in one before, more than 16"):
        measures.far_repeats(DOCUMENTS, 16, SETTINGS)


@pytest.mark.parametrize("length", LENGTHS)
def test_swap_keeps_the_trained_length_and_takes_the_rest_from_another_document(length):
    conditions = measures.swap(DOCUMENTS, length, SETTINGS)
    if length == 16:
        assert conditions == []
        return
    for own, other in zip(*conditions, strict=True):
        far = length - 25  # of ten targets the first one keeps 16 tokens before it
        assert own.unit == other.unit and own.scored == other.scored == 10
        np.testing.assert_array_equal(own.tokens, DOCUMENTS[own.unit][-length - 1 :])
        np.testing.assert_array_equal(own.tokens[far:], other.tokens[far:])
        assert len(own.tokens[far:]) == 16 + 10
        assert set(other.tokens[:far] // 1000) == {(own.unit + 1) % 4 + 1}


@pytest.mark.parametrize("length", LENGTHS)
def test_repeat_differs_in_the_first_copy_alone(length):
    first, second = measures.repeat(DOCUMENTS, length, SETTINGS)
    assert len(first) == len(second) == measures.TRIALS
    for a, b in zip(first, second, strict=True):
        assert len(a.tokens) == len(b.tokens) == length + 1 and a.scored == b.scored == 3
        np.testing.assert_array_equal(a.tokens[:4], a.tokens[-4:])
        np.testing.assert_array_equal(a.tokens[4:], b.tokens[4:])
        assert list(b.tokens[:4]) != list(a.tokens[:4])
    assert len({tuple(a.tokens[:4]) for a in first}) > measures.TRIALS // 2


def test_passkey_tells_one_key_and_asks_for_it_or_for_another():
    first, second = measures.passkey(DOCUMENTS, 128, SETTINGS)
    keys = set()
    for a, b in zip(first, second, strict=True):
        texts = ["".join(chr(t - 60_000) if t >= 60_000 else "#" for t in w.tokens if t != 64_000) for w in (a, b)]
        key = texts[0][-5:]
        assert texts[0].startswith(f"The pass key is {key}. Remember it.\n#") and key.isdigit()
        assert texts[0].endswith(f"#\nThe pass key is {key}") and texts[1].endswith(f"#\nThe pass key is {key}")
        assert texts[1].startswith("The pass key is ") and not texts[1].startswith(f"The pass key is {key}")
        assert len(a.tokens) == len(b.tokens) == 129 and a.scored == b.scored == 6 + key.count("7")
        between = [[i for i, t in enumerate(w.tokens) if t < 60_000] for w in (a, b)]
        assert between[0] == between[1]  # nothing else moves
        keys.add(key)
    assert len(keys) == measures.TRIALS


def test_swap_needs_another_document():
    with pytest.raises(InputError, match="needs two documents"):
        measures.swap(DOCUMENTS[:1], 128, SETTINGS)


def test_losses_are_summed_by_document_and_weighted_by_targets():
    [windows] = measures.nonoverlap(DOCUMENTS, 64, SETTINGS)
    rng = np.random.default_rng(0)
    losses = [rng.random(w.scored).astype(np.float32) for w in windows]
    row = measures.summary([windows], [losses])
    flat = np.concatenate(losses).astype(np.float64)
    assert row["n_targets"] == len(flat) == 128 * (1 + 1 + 2 + 3) and row["loss"] == pytest.approx(flat.mean())
    assert row["unit_targets"] == [128, 128, 256, 384]
    assert row["unit_losses"][2] == pytest.approx(flat[256:512].mean(), abs=1e-6)
    broken = measures.summary([windows], [[losses[0] * np.nan, *losses[1:]]])
    assert broken["loss"] is None and broken["perplexity"] is None


def test_loss_by_position_is_a_mean_over_windows_and_stretches():
    losses = np.random.default_rng(0).random((7, 20))
    right = [losses[:, begin : begin + 6].mean() for begin in (0, 6, 12, 18)]
    np.testing.assert_allclose(measures.by_position(list(losses), 6), right, atol=1e-5)


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_an_interval_is_the_normal_one_where_that_holds():
    rng = np.random.default_rng(1)
    differences, targets = rng.normal(0.3, 1, (2, 400)), np.full(400, 64)
    for (mean, low, high), row in zip(measures.intervals(differences, targets), differences, strict=True):
        half = 1.96 * row.std() / np.sqrt(400)
        assert mean == pytest.approx(row.mean())
        assert (low, high) == pytest.approx((row.mean() - half, row.mean() + half), abs=0.05 * half)


def test_an_interval_weighs_documents_by_their_targets():
    """Two documents: four equally likely draws, so that the percentiles are the least and the largest mean."""
    [(mean, low, high)] = measures.intervals([[1.0, 4.0]], [3, 1])
    assert (mean, low, high) == pytest.approx(((3 * 1 + 4) / 4, 1, 4))
    assert measures.intervals([[0.5] * 9], range(1, 10))[0] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize(  # of printed tables, and by hand: tan(0.475 pi) and 1.9 / sqrt(2 - 1.9^2 / 2)
    "freedom, value",
    [(1, math.tan(0.475 * math.pi)), (2, 1.9 / math.sqrt(2 - 1.9**2 / 2)), (3, 3.182446), (4, 2.776445), (9, 2.262157),
     (26, 2.055529), (120, 1.979930), (1e5, 1.95999)],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(freedom, value):
    assert measures.student(freedom) == pytest.approx(value, rel=3e-4 if freedom > 1000 else 1e-6)


def test_an_interval_of_seeds_is_made_of_two_of_students():
    d = np.random.default_rng(0).normal(0.3, 1, (3, 10)).tolist()
    over_seeds = 4.302653 * statistics.stdev(map(statistics.mean, d)) / math.sqrt(3)
    over_documents = 2.262157 * statistics.stdev(map(statistics.mean, zip(*d, strict=True))) / math.sqrt(10)
    half, right = math.sqrt(over_seeds**2 + over_documents**2), statistics.mean(map(statistics.mean, d))
    assert measures.interval_of_seeds(d, [64] * 10) == pytest.approx([right, right - half, right + half], rel=1e-6)


def test_an_interval_of_seeds_weighs_documents_by_their_targets():
    """Of three documents, two that weigh a quarter each, n is 1 / (1/16 + 1/16 + 1/4) = 8/3."""
    mean, low, high = measures.interval_of_seeds([[0, 4, 2], [2, 6, 4]], [5, 5, 10])
    documents = (4 / 4 + 4 / 4 + 0) / (8 / 3 - 1)  # by_document 1, 5, 3 around 3
    half = math.hypot(measures.student(1) * 1, measures.student(8 / 3 - 1) * math.sqrt(documents))
    assert (mean, low, high) == pytest.approx((3, 3 - half, 3 + half))


@pytest.mark.parametrize("d, targets", [([[1, 2, 3]], [1, 1, 1]), ([[1], [2]], [9]), ([[1, 2], [3, 4]], [1, 9])])
def test_without_two_seeds_or_documents_there_is_no_interval(d, targets):
    mean, low, high = measures.interval_of_seeds(d, targets)
    assert mean == np.average(np.mean(d, 0), weights=targets) and math.isnan(low) and math.isnan(high)


@pytest.mark.parametrize(
    "sizes, least, most",
    [((1, 0, 0), 0.95, 0.95), ((0, 1, 0), 0.95, 0.95), ((0.044, 0.017, 0.106), 0.95, 0.99)],
    ids=["seeds", "documents", "rope - expe"],
)
def test_intervals_hold_the_truth_as_often_as_they_say_where_seeds_are_drawn_too(sizes, least, most):
    """Where one part is all there is, one of Student's intervals is all of it, and exact; the bootstrap fails."""
    rng, n = np.random.default_rng(3), 1000
    shapes = (n, 3, 1), (n, 1, 27), (n, 3, 27)
    trials = sum(size * rng.normal(size=shape) for size, shape in zip(sizes, shapes, strict=True))
    ends = [measures.interval_of_seeds(trial, np.ones(27))[1:] for trial in trials]
    share = np.mean([low <= 0 <= high for low, high in ends])
    bound = lambda p: 3.3 * math.sqrt(p * (1 - p) / n)  # noqa: E731  (one such test in a thousand fails by chance)
    assert least - bound(least) <= share <= most + bound(most)
    _, low, high = np.transpose(measures.intervals(trials.mean(axis=1), np.ones(27)))
    assert np.mean((low <= 0) & (0 <= high)) < 0.7 or sizes[0] == 0


def test_variances_of_the_simulation_are_those_of_its_parts():
    """On the average of many draws: a^2 / S, b^2 / n and e^2 / (S n) with n = 1 / sum(w^2), and what is in both."""
    rng, weights = np.random.default_rng(0), np.arange(1, 9) / 36
    d = 2 * rng.normal(size=(20_000, 3, 1)) + 3 * rng.normal(size=(20_000, 1, 8)) + 4 * rng.normal(size=(20_000, 3, 8))
    n = 36**2 / sum(k**2 for k in range(1, 9))
    right = 4 / 3 + 16 / (3 * n), 9 / n + 16 / (3 * n), 16 / (3 * n)
    assert np.mean(coverage.variances(d, weights), axis=1) == pytest.approx(right, rel=0.03)


def test_the_simulation_says_what_holds(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(coverage, "TRIALS", 400)
    monkeypatch.setattr(coverage, "DESIGNS", [(3, 24, 0), (3, 24, 1)])
    coverage.main([])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if "%" in line]
    shares = {(i // 8, row[0]): [float(x.strip(" %")) for x in row[1:] if x] for i, row in enumerate(rows)}
    assert len(shares) == 16 and all(len(found) == 5 for found in shares.values())
    for (_, name), (documents, _, _, _, both) in shares.items():
        assert both > (84 if "swap" in name else 94) and documents < both
        assert documents < 80 or name != "rope - expe 1x"          # where seeds differ most, documents alone say least
    assert "results/mini has not two seeds of table2" in refused(command("studies.coverage", cwd=tmp_path))


def test_a_limit_takes_usable_documents_from_all_over_the_text():
    documents = [np.full(20 if d % 3 else 10, d) for d in range(200)]                    # 133 are long enough
    assert [x[0] for x in measures.usable(documents, 15, None)] == [d for d in range(200) if d % 3]
    chosen = np.array([x[0] for x in measures.usable(iter(documents), 15, 24)])
    assert len(chosen) == 24 and set(np.diff(chosen)) <= {7, 8, 9} and chosen[0] < 9 and chosen[-1] > 190
    assert len(measures.usable(documents, 15, 500)) == 133 and len(measures.usable(documents, 15, 1)) == 1
    with pytest.raises(InputError, match="no held-out document has 20 tokens, the longest length: .* 19"):
        measures.usable(documents, 20, None)
