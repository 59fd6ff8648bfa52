"""Exercise 3. How steeply does the score of ExPE-K fall with the distance of a key?

The score is content - slope x distance, and each query has a slope of its own: predict it from the weights of the head.
Question: for which queries do far keys gain?
"""

import numpy as np


def slopes(x, wq, wk, l, theta):
    """(T,), of the queries of a text x (T, C), which ExPE-K does not override; wq and wk (D, C)."""
    raise NotImplementedError("return the slope of each query")
