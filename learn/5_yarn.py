"""Exercise 5. Stretch RoPE to texts `factor` times as long, as YaRN does (Peng et al. 2023, sections 3.2 and 3.4).

With g_i = base^(-2i/D), i = 0 .. D/2-1, the frequencies are g_i (1 - r_i + r_i / factor). The ramp r_i is
clip((i - low) / (high - low), 0, 1) with low = max(floor(p(32)), 0) and high = min(ceil(p(1)), D - 1), where
p(t) = D ln(L / (2 pi t)) / (2 ln base) is the pair that turns t times in L tokens, the length before stretching.
Cosines and sines are multiplied by 0.1 ln(factor) + 1. Question: which pairs does YaRN leave alone, and why?
"""

import numpy as np


def frequencies(rope_parameters, head_dim):
    """{"inv_freq": (D/2,), "attention_factor": a number}; D is head_dim, and rope_parameters has rope_theta (the base),

    factor and original_max_position_embeddings (L).
    """
    raise NotImplementedError("return both")
