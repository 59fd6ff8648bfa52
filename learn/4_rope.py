"""Exercise 4. Rotate queries and keys as RoPE does (Su et al. 2021), in the halves that Llama uses.

The pair (i, i + D/2) = (a, b) becomes (a cos - b sin, b cos + a sin) for the angle n base^(-2i/D), i = 0 .. D/2-1.
Question: why does the score of q at m and k at n depend on m - n only?
"""

import numpy as np


def rotate(q, k, positions, rope_parameters):
    """q and k (B, H, T, D), positions (B, T), the base is rope_parameters["rope_theta"]; returns both, rotated."""
    raise NotImplementedError("return q, k")
