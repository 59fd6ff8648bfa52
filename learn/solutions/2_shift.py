import numpy as np


def scores(x, wq, wk, rows, on):
    phi = np.concatenate((rows, x[:, rows.shape[1] :]), axis=1)
    q, k = (phi if "q" in on else x) @ wq.T, (phi if "k" in on else x) @ wk.T
    return q @ k.T / np.sqrt(q.shape[1])

def weights(scores):
    e = np.exp(scores) * np.tri(len(scores))
    return e / e.sum(axis=1, keepdims=True)

def largest_change(before, after):
    return np.abs(weights(after) - weights(before)).max()
