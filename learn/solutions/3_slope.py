import numpy as np


def slopes(x, wq, wk, l, theta):
    q = x @ wq.T
    w = theta * wk[:, :l].sum(axis=1)
    return q @ w / np.sqrt(q.shape[1])
