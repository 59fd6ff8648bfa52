"""k_n = b_n + n w, w = theta sum_j wk_j, so the score grows by q . w / sqrt(D) if the key is one nearer.

Far keys gain if q . w < 0.
"""

import numpy as np


def slopes(x, wq, wk, l, theta):
    q = x @ wq.T
    w = theta * wk[:, :l].sum(axis=1)
    return q @ w / np.sqrt(q.shape[1])
