"""Which tokens every protocol and probe reads and scores, on documents whose tokens tell where they are from."""

import numpy as np
import pytest

from config import InputError
from lab import measures
from lab.measures import MEASURES, PROTOCOLS, Settings
from lab.pictures import apart

LENGTHS = (16, 32, 128)
DOCUMENTS = [1000 * (d + 1) + np.arange(size) for d, size in enumerate((129, 200, 300, 401))]  # token = where it is
SETTINGS = Settings(16, 128, targets=10, stride=4, encode=lambda text: encode(text))


def encode(text):
    """A token a character, but for a digit 7, which takes two."""
    return [token for c in text for token in [60_000 + ord(c)] + [64_000] * (c == "7")]


def scored(windows):
    """The scored targets, as (document, index) pairs, in order."""
    return [(w.unit, int(x) - 1000 * (w.unit + 1)) for w in windows for x in w.tokens[len(w.tokens) - w.scored :]]


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_target_is_scored_exactly_once_at_every_length(name, length):
    [windows] = PROTOCOLS[name].conditions(DOCUMENTS, length, SETTINGS)
    if PROTOCOLS[name].whole:  # all targets of a multiple of the longest length
        right = [(d, i) for d, document in enumerate(DOCUMENTS) for i in range(1, (len(document) - 1) // 128 * 128 + 1)]
    else:  # the last ten
        right = [(d, i) for d, document in enumerate(DOCUMENTS) for i in range(len(document) - 10, len(document))]
    assert scored(windows) == right


@pytest.mark.parametrize("name", PROTOCOLS)
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


@pytest.mark.parametrize(
    "probe, documents, length, message",
    [
        ("swap", DOCUMENTS[:1], 128, "needs two documents"),
        ("repeat", DOCUMENTS, 7, "needs windows of 8 tokens or more, got 7"),
        ("passkey", DOCUMENTS, 16, "needs windows of"),
    ],
)
def test_a_probe_says_what_it_needs(probe, documents, length, message):
    with pytest.raises(InputError, match=message):
        MEASURES[probe].conditions(documents, length, SETTINGS)


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


def test_nineteen_in_twenty_intervals_hold_the_truth():
    rng = np.random.default_rng(2)
    held = 0
    for i in range(300):
        [(_, low, high)] = measures.intervals([rng.exponential(1, 60)], np.ones(60), seed=i)
        held += low <= 1 <= high
    assert 0.88 <= held / 300 <= 0.98


def test_labels_keep_their_distance_and_move_no_further_than_they_must():
    assert apart([1.0, 2.0, 9.0], 1.0) == [1.0, 2.0, 9.0]
    np.testing.assert_allclose(apart([1.0, 1.0, 1.0], 1.0), [0.0, 1.0, 2.0])  # around where they are
    found = apart(sorted(np.random.default_rng(0).random(30)), 0.05)
    assert np.diff(found).min() > 0.05 - 1e-12
