"""Which tokens every protocol and probe reads and scores, on documents whose tokens tell where they are from."""

import numpy as np
import pytest

from lab import measures
from lab.measures import PROTOCOLS, Settings
from settings import InputError

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


@pytest.mark.slow
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


def test_a_limit_takes_usable_documents_from_all_over_the_text():
    documents = [np.full(20 if d % 3 else 10, d) for d in range(200)]                    # 133 are long enough
    assert [x[0] for x in measures.usable(documents, 15, None)] == [d for d in range(200) if d % 3]
    chosen = np.array([x[0] for x in measures.usable(iter(documents), 15, 24)])
    assert len(chosen) == 24 and set(np.diff(chosen)) <= {7, 8, 9} and chosen[0] < 9 and chosen[-1] > 190
    assert len(measures.usable(documents, 15, 500)) == 133 and len(measures.usable(documents, 15, 1)) == 1
    with pytest.raises(InputError, match="no held-out document has 20 tokens, the longest length: .* 19"):
        measures.usable(documents, 20, None)
