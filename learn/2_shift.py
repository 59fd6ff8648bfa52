"""Exercise 2. A text moves by 32 positions. What changes for ExPE-K, and what for ExPE?

Write the scores of one head, and how far they move the attention. Question: ExPE-K's scores do change under a shift.
Why do its attention weights stay?
"""

import numpy as np


def scores(x, wq, wk, rows, on):
    """q k^T / sqrt(D), (T, T). x (T, C); wq and wk (D, C). rows (T, l) override x for "k" or "qk", as on says."""
    raise NotImplementedError("override x by the rows, for q only if on says so, and return the scores")

def largest_change(before, after):
    """The largest change of any attention weight between two arrays of scores (T, T); a query sees no later key."""
    raise NotImplementedError("make weights of both and compare them")
