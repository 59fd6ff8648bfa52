"""Exercise 3. How steeply does the score of ExPE-K fall with the distance of a key?

Only the keys are overridden: phi replaces the first l numbers of the token at position n by the row of exercise 1, and
the score of query m and key n is (wq x_m) . (wk phi(x_n, n)) / sqrt(D). Written with the distance m - n, it is

    content of the two tokens - slope_m (m - n) + a number that all keys of query m share.

Each query has a slope of its own. Predict it from the weights of the head.
Question: for which queries do far keys gain?
"""

import numpy as np


def slopes(x, wq, wk, l, theta):
    """(T,), the slope of each token of a text x (T, C) as a query; wq and wk (D, C)."""
    raise NotImplementedError("return the slope of each query")
