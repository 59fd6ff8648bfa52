"""The statistics of lab.table: how far a difference of losses may lie from that of other seeds and documents.

A loss varies with the seed of its training and with the documents that it is measured on. A difference of two losses
has a standard error from each of these sources. Its interval joins them, and Holm's correction says which of many
differences are significant.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

MIN_SEEDS = 3                            # for an interval over seeds
MIN_DOCUMENTS = 1.5                      # effective ones, for an interval over documents
MAX_RATIO = 2                            # between a deviation and the pooled one that may stand for it

# ---- one deviation over seeds for several methods --------------------------------------------------------------------

class PooledDeviation(NamedTuple):
    """A standard deviation over seeds that several methods share."""

    sd: float
    freedom: int                         # degrees of freedom: the sum over the methods of their seeds less one
    methods: tuple                       # names

def pool_deviations(values):
    """The PooledDeviation of {method: values of its seeds}: sqrt(sum of (n - 1) s^2 / sum of (n - 1)).

    It is of the methods with three seeds or more. None if there are fewer than two of them, or if the own deviation s
    of any is less than half of the pooled one or more than twice it: then they do not vary alike.
    """
    values = {method: seeds for method, seeds in values.items() if len(seeds) >= MIN_SEEDS}
    if len(values) < 2:
        return None
    freedoms = np.array([len(seeds) - 1 for seeds in values.values()])
    deviations = np.array([np.std(seeds, ddof=1) for seeds in values.values()])
    sd = math.sqrt(freedoms @ deviations**2 / freedoms.sum())
    if deviations.min() < sd / MAX_RATIO or deviations.max() > sd * MAX_RATIO:
        return None
    return PooledDeviation(sd, int(freedoms.sum()), tuple(values))

# ---- the interval of a difference ------------------------------------------------------------------------------------

@functools.cache
def t_quantile(freedom, level=0.95):
    """The t for which Student's distribution has the probability `level` between -t and t; freedom: above 0."""
    from scipy.stats import t  # here, because it takes a second
    return float(t.isf((1 - level) / 2, freedom))

class StandardError(NamedTuple):
    """The standard error of a mean from one source of chance, seeds or documents."""

    size: float
    freedom: float                       # degrees of freedom

class Difference(NamedTuple):
    """A mean difference of losses, and the errors of its interval."""

    seeds: tuple                         # the difference of each seed
    chosen: tuple                        # of seeds that chose a value: they are in no mean, interval or test
    over_seeds: StandardError | None = None
    over_documents: StandardError | None = None
    pooled: PooledDeviation | None = None            # what over_seeds is of; None: of the seeds themselves

    @property
    def mean(self):
        return float(np.mean(self.seeds)) if self.seeds else math.nan

    @property
    def errors(self):
        return [error for error in (self.over_seeds, self.over_documents) if error is not None]

    def half_width(self, level=0.95):
        """Half of the interval: sqrt(h1^2 + h2^2) of Student's half widths h = t(freedom) size over both sources."""
        return math.hypot(*(t_quantile(error.freedom, level) * error.size for error in self.errors))

    def p_value(self):
        """1 - level of the widest interval that excludes 0; nan without an interval over seeds.

        Of one source alone that is the p-value of Student's test.
        """
        if self.over_seeds is None:
            return math.nan
        if self.mean == 0:
            return 1.0
        from scipy.optimize import brentq
        smallest = 1e-12
        if self.half_width(1 - smallest) <= abs(self.mean):
            return smallest
        return brentq(lambda p: self.half_width(1 - p) - abs(self.mean), smallest, 1)

def document_error(differences, counts):
    """The StandardError of a mean over documents that is weighted by their targets; None for too few documents.

    differences, counts: (documents,). With weights w that sum to 1 there are m = 1 / sum of w^2 effective documents
    (Kish 1965), and the error is sqrt(sum of w (d - mean)^2 / (m - 1)) with m - 1 degrees of freedom.
    """
    weights = counts / counts.sum()
    documents = 1 / float(weights @ weights)
    if documents <= MIN_DOCUMENTS:
        return None
    variance = float(weights @ (differences - weights @ differences) ** 2)
    return StandardError(math.sqrt(variance / (documents - 1)), documents - 1)

def estimate_difference(pairs, pooled, both_vary):
    """The Difference of [(Row, Row), ...], a pair for each seed.

    pooled: the PooledDeviation of one method, or None; both_vary: whether the rows of a pair are of two trainings, or
    of one at two lengths. Three seeds or more have an interval, and one seed has that over documents alone.

    Over n seeds the standard error is s / sqrt(n) with n - 1 degrees of freedom and the deviation s of the differences,
    as in Student's paired test. With a pooled deviation it is sd sqrt(1/n + 1/n), or sd / sqrt(n) if one training
    varies.
    """
    counted = [(a, b) for a, b in pairs if not (a.chosen or b.chosen)]
    seeds = tuple(a.value - b.value for a, b in counted)
    chosen = tuple(a.value - b.value for a, b in pairs if a.chosen or b.chosen)
    n = len(seeds)
    if n < MIN_SEEDS and n != 1:
        return Difference(seeds, chosen)
    over_seeds, over_documents = None, None
    if n >= MIN_SEEDS and pooled is not None:
        over_seeds = StandardError(pooled.sd * math.sqrt((2 if both_vary else 1) / n), pooled.freedom)
    elif n >= MIN_SEEDS:
        over_seeds = StandardError(float(np.std(seeds, ddof=1)) / math.sqrt(n), n - 1)
    if all(a.unit_values is not None for a, _ in counted):
        by_document = np.mean([a.unit_values - b.unit_values for a, b in counted], axis=0)
        over_documents = document_error(by_document, counted[0][0].unit_counts)
    return Difference(seeds, chosen, over_seeds, over_documents, pooled if over_seeds is not None else None)

# ---- many differences ------------------------------------------------------------------------------------------------

def find_significant(p_values, level=0.05):
    """The keys of {key: p} that are significant at this level after Holm's correction (1979).

    The smallest of m p-values must be at most level/m, the next one level/(m - 1), and so on up to the first that is
    not. A p-value that is nan is of no test.
    """
    tests = {key: p for key, p in p_values.items() if not math.isnan(p)}
    if not tests:
        return set()
    from statsmodels.stats.multitest import multipletests  # here, because it takes two seconds
    rejected = multipletests(list(tests.values()), alpha=level, method="holm")[0]
    return {key for key, is_rejected in zip(tests, rejected, strict=True) if is_rejected}
