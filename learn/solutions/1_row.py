import numpy as np


def row(positions, l, start, theta):
    return start + theta * (positions[..., None] + np.arange(l))
