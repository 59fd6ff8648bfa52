"""Exercise 1. Which l numbers does ExPE write over the first l dimensions of the token at position n?

The paper's equation 3: entry j of row n is start + theta (n + j), j = 0 .. l-1.
Question: two tokens stand next to each other. Which numbers do their rows share?
"""

import numpy as np


def row(positions, l, start, theta):
    """positions: integers of any shape (...); returns (..., l)."""
    raise NotImplementedError("return the row of each position")
