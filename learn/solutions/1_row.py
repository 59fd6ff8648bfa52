"""Row n + 1 is row n moved by one place: they share l - 1 numbers. So l columns carry one ramp."""

import numpy as np


def row(positions, l, start, theta):
    return start + theta * (positions[..., None] + np.arange(l))
