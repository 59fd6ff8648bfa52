import numpy as np


def frequencies(rope_parameters, head_dim):
    base, factor = rope_parameters["rope_theta"], rope_parameters["factor"]
    L = rope_parameters["original_max_position_embeddings"]
    i = np.arange(head_dim // 2)
    p = lambda t: head_dim * np.log(L / (2 * np.pi * t)) / (2 * np.log(base))  # noqa: E731
    low, high = max(np.floor(p(32)), 0), min(np.ceil(p(1)), head_dim - 1)
    r = np.clip((i - low) / (high - low), 0, 1)
    g = base ** (-2 * i / head_dim)
    return {"inv_freq": g * (1 - r + r / factor), "attention_factor": 0.1 * np.log(factor) + 1}
