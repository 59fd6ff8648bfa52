import numpy as np


def rotate(q, k, positions, rope_parameters):
    D = q.shape[-1]
    frequencies = rope_parameters["rope_theta"] ** (-np.arange(0, D, 2) / D)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    return turn(q), turn(k)
