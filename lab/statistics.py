"""The statistics of lab.table: how far a difference of losses may lie from that of other seeds and documents.

A loss varies with the seed of its training and with the documents that it is measured on. A difference of two losses
has a standard error from each of these sources. Its interval joins them, and Holm's correction says which of many
differences are significant.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

MIN_SEEDS = 3                            # of a method whose deviation over seeds is estimated
MIN_DOCUMENTS = 1.5                      # effective ones, from which a deviation over documents is estimated

# ---- Student's distribution ------------------------------------------------------------------------------------------

@functools.cache
def t_quantile(freedom, level=0.95):
    """The t for which Student's distribution has the probability `level` between -t and t.

    freedom: degrees of freedom, at least 1. With t = sqrt(freedom) tan(x), Student's density becomes proportional to
    cos(x)^(freedom - 1) on x from -pi/2 to pi/2, which is summed here.
    """
    x = np.linspace(0, np.pi / 2, 10_001)
    midpoints = (x[1:] + x[:-1]) / 2
    mass = np.cumsum(np.cos(midpoints) ** (freedom - 1))               # from 0 to x[1:]
    return math.sqrt(freedom) * math.tan(np.interp(level * mass[-1], mass, x[1:]))

# ---- one deviation over seeds for several methods --------------------------------------------------------------------

class PooledDeviation(NamedTuple):
    """A standard deviation over seeds that several methods share."""

    sd: float
    freedom: int                         # degrees of freedom: the sum over the methods of their seeds less one
    methods: tuple                       # names

def pool_deviations(values):
    """The PooledDeviation of {method: values of its seeds}: sqrt(sum of (n - 1) s^2 / sum of (n - 1)).

    Methods with fewer than three seeds are left out, and so are those that vary much more than the rest: in the order
    of their variances, the first that exceeds the mean of all smaller ones by more than `excess_limits`, and all after
    it. In tables of two to four methods, which give a wide limit, 100 times the mean is the most.
    """
    variances = {name: np.var(some, ddof=1) for name, some in values.items() if len(some) >= MIN_SEEDS}
    freedom_of = {name: len(values[name]) - 1 for name in variances}
    names = sorted(variances, key=variances.get)
    if len(names) > 1:
        ordered = np.array([variances[name] for name in names])
        means_before = np.cumsum(ordered)[:-1] / np.arange(1, len(names))
        limits = excess_limits(len(names), min(freedom_of.values()) + 1)
        if len(names) < 5:
            limits = np.minimum(limits, 100)
        exceeds = ordered[1:] > means_before * limits
        if exceeds.any():
            names = names[: 1 + int(np.argmax(exceeds))]
    freedom = sum(freedom_of[name] for name in names)
    if not freedom:
        return PooledDeviation(0.0, 0, ())
    total = sum(freedom_of[name] * variances[name] for name in names)
    return PooledDeviation(math.sqrt(total / freedom), freedom, tuple(names))

@functools.cache
def excess_limits(methods, seeds, level=0.99):
    """Ratios of each ordered variance to the mean of all smaller ones that are exceeded in one table of 100 at most.

    Simulated with methods that have the same true variance; (methods - 1,).
    """
    drawn = np.sort(np.random.default_rng(0).chisquare(seeds - 1, (200_000, methods)))
    means_before = np.cumsum(drawn, 1)[:, :-1] / np.arange(1, methods)
    return np.quantile(drawn[:, 1:] / means_before, 1 - (1 - level) / (methods - 1), axis=0)

# ---- the interval of a difference ------------------------------------------------------------------------------------

class StandardError(NamedTuple):
    """The standard error of a mean from one source of chance, seeds or documents."""

    size: float
    freedom: float                       # degrees of freedom

class Difference(NamedTuple):
    """A mean difference of losses, and the errors of its interval."""

    mean: float
    seeds: list                          # the difference of each seed
    errors: tuple = ()                   # StandardErrors over seeds and over documents; () without an interval

    def half_width(self, level=0.95):
        """Half of the interval: sqrt(h1^2 + h2^2) of Student's half widths h = t(freedom) size over both sources."""
        return math.hypot(*(t_quantile(error.freedom, level) * error.size for error in self.errors))

    def p_value(self):
        """1 - level of the widest interval that excludes 0, to 1e-5; nan without an interval over seeds."""
        if not self.errors or len(self.seeds) == 1:
            return math.nan
        low, high = 0.0, 1.0
        while high - low > 1e-5:
            level = (low + high) / 2
            if self.half_width(level) < abs(self.mean):
                low = level
            else:
                high = level
        return 1 - low

def seed_error(pooled, seeds, both_vary):
    """The StandardError of a mean over seeds: sd / sqrt(n), or sd sqrt(1/n + 1/n) if two methods vary.

    pooled: the PooledDeviation of one method.
    """
    return StandardError(pooled.sd * math.sqrt((1 + both_vary) / seeds), pooled.freedom)

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

    pooled: the PooledDeviation of one method, None if there is none that fits; both_vary: whether the rows of a pair
    are of two trainings, or of one at two lengths. Seeds that chose a value count in the mean but in no interval. There
    is an interval for three seeds and more, and, over documents alone, for one.
    """
    seeds = [a.value - b.value for a, b in pairs]
    mean = float(np.mean(seeds))
    tested = [(a, b) for a, b in pairs if not (a.chosen or b.chosen)]
    has_seed_error = len(tested) >= MIN_SEEDS and pooled is not None
    has_one_seed = len(pairs) == len(tested) == 1
    if not (has_seed_error or has_one_seed):
        return Difference(mean, seeds)
    errors = [seed_error(pooled, len(tested), both_vary)] if has_seed_error else []
    if all(a.unit_values is not None for a, _ in tested):
        by_document = np.mean([a.unit_values - b.unit_values for a, b in tested], axis=0)
        errors.append(document_error(by_document, tested[0][0].unit_counts))
    return Difference(mean, seeds, tuple(error for error in errors if error is not None))

# ---- many differences ------------------------------------------------------------------------------------------------

def find_significant(p_values, level=0.05):
    """The keys of {key: p} that are significant at this level after Holm's correction (1979).

    The smallest of m p-values must be below level/m, the next one below level/(m - 1), and so on up to the first that
    is not. A p-value that is nan is of no test.
    """
    ordered = sorted((p, key) for key, p in p_values.items() if not math.isnan(p))
    significant = set()
    for i, (p, key) in enumerate(ordered):
        if p * (len(ordered) - i) >= level:
            break
        significant.add(key)
    return significant
