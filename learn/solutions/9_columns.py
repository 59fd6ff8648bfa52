import numpy as np


def one_column(wk, l):
    new = wk.copy()
    new[:, :l] = 0
    new[:, 0] = wk[:, :l].sum(axis=1)
    return new

def two_columns(w, l):
    s, t = w[:, :l].sum(axis=1), w[:, :l] @ np.arange(l)
    new = w.copy()
    new[:, :l] = 0
    new[:, 0], new[:, 1] = s - t, t
    return new
