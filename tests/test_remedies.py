"""studies/remedies.py: its interval is Student's, and its verdicts are those of the rules in remedies.toml."""

import numpy as np
import pytest

from studies.remedies import interval, is_flat, verdict


def test_the_interval_is_that_of_students_test():
    scipy_stats = pytest.importorskip("scipy.stats")
    differences = [0.031, -0.012, 0.044, 0.009, 0.027]
    low, high = scipy_stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    mean, half = interval(differences)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert np.isnan(interval(differences[:2])[1])


@pytest.mark.parametrize("low, high, said", [
    (-0.09, -0.021, "better"), (-0.09, -0.019, "open"), (-0.019, 0.019, "equal"), (-0.021, 0.01, "open"),
    (0.019, 0.3, "open"), (0.021, 0.3, "worse"), (-0.5, 0.5, "open")])
def test_a_verdict_follows_from_where_the_interval_lies(low, high, said):
    assert verdict((low + high) / 2, (high - low) / 2) == said


def test_too_few_seeds_have_no_verdict():
    assert verdict(-1.0, np.nan) == "open" and is_flat(0.0, np.nan) == "open"
    assert is_flat(0.001, 0.01) == "flat" and is_flat(0.015, 0.01) == "not flat"
