"""RoPE's angles for texts past the trained length: what --rope-scaling changes after training in them alone."""

from dataclasses import dataclass

import numpy as np

from expe import rope_inv_freq
from positional_encodings import RoPE
from settings import InputError, setting

CLIPPED = "clipped"                      # the scaling that has no factor


def scaled_inv_freq(d_head, base=10000.0, scaling="none", factor=1.0, trained_length=512, length=None, **lists):
    """RoPE's angles per position, expe.rope_inv_freq, for texts past the trained length L, by one of ROPE_SCALINGS.

    Returns ((D/2,) float64, attention_factor): cosines and sines are to be multiplied by the factor, which is 1 but for
    yarn and longrope; queries and keys both have it, so that scores get its square. `length` is that of the whole
    sequence, which dynamic and longrope alone read: one set of frequencies holds for all of its keys.
    Raises ValueError as rope_inv_freq does, for a d_head of 2 where the base changes, and for wrong lists of longrope.
    """
    return ROPE_SCALINGS[scaling](d_head, float(base), factor, trained_length, length, **lists)

def _none(D, base, s, L, length):
    return rope_inv_freq(D, base), 1.0                                            # (D/2,)

def _linear(D, base, s, L, length):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): the frequencies of all pairs are divided by the
    factor.

        inv_freq_i / s
    """
    return rope_inv_freq(D, base) / s, 1.0

def _ntk(D, base, s, L, length):
    """NTK-aware scaling (bloc97 2023, https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5): the base is made larger.
    The fastest pair keeps its frequency, and that of the slowest pair is divided by the factor.

        base s^(D/(D-2)) in the place of base
    """
    if D == 2:
        raise ValueError("d_head must be at least 4 to scale the base: a single pair turns by 1 whatever the base")
    return rope_inv_freq(D, base * s ** (D / (D - 2))), 1.0

def _dynamic(D, base, s, L, length):
    """Dynamic NTK (emozilla 2023, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr): this is NTK-aware scaling with
    a factor that grows with the length of the text. Up to L tokens nothing changes.

        s length/L - (s - 1) in the place of s
    """
    return _ntk(D, base, max(1.0, s * length / L - (s - 1)), L, length)

def _yarn(D, base, s, L, length):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): pairs with at most one turn in L have their frequencies
    divided by the factor, and pairs with 32 turns or more keep theirs. Between them the change is gradual.

    The ramp between slow and fast pairs is straight over i. attention_factor is 0.1 ln s + 1 if s > 1 (its section
    3.4).
    """
    def pair(turns):                                                              # that turns so often in L positions
        return D * np.log(L / (2 * np.pi * turns)) / (2 * np.log(base))

    low = max(np.floor(pair(32)), 0)
    high = min(np.ceil(pair(1)), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / max(high - low, 0.001), 0, 1)      # a step where the two coincide
    return rope_inv_freq(D, base) * (1 - ramp + ramp / s), 0.1 * np.log(s) + 1 if s > 1 else 1.0

def _llama3(D, base, s, L, length):
    """Llama 3.1's scaling (Meta 2024, https://github.com/meta-llama/llama-models): pairs with at most one turn in L
    have their frequencies divided by the factor, and pairs with 4 turns or more keep theirs. Between them the change is
    gradual.

    The ramp between slow and fast pairs is straight over the turns (Llama 3.1's code).
    """
    inv_freq = rope_inv_freq(D, base)
    ramp = np.clip((L * inv_freq / (2 * np.pi) - 1) / (4 - 1), 0, 1)              # of the turns in L positions
    return inv_freq * (ramp + (1 - ramp) / s), 1.0

def _clipped(D, base, s, L, length):
    """Clipped RoPE (Li et al. 2026, arXiv 2602.05258): the slowest pairs rotate less, and the very slowest does not
    rotate at all. It has no factor.

    The slowest 20 of 64 pairs are multiplied by (1 + cos(pi j/19)) / 2, and in other widths a like share: none in a
    head of 8 or fewer (the code of that paper's CoPE).
    """
    n = round(20 / 64 * D / 2)                                                    # pairs that fade
    fade = (1 + np.cos(np.pi * np.arange(n) / max(1, n - 1))) / 2
    return rope_inv_freq(D, base) * np.concatenate((np.ones(D // 2 - n), fade)), 1.0

def _longrope(D, base, s, L, length, long=(), short=None):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): the frequency of each pair is divided by a number of its own. A
    search finds these numbers for each model.

    inv_freq_i / x_i, of D/2 numbers x each: `long` past L, `short` up to it, all 1 if left out. attention_factor is
    sqrt(1 + ln s / ln L) if s > 1.
    """
    short = (1,) * len(long) if short is None else short
    if length is None or L < 2 or not len(long) == len(short) == D // 2:
        raise ValueError(f"longrope needs --long-factors and --short-factors of D/2 = {D // 2} numbers each, a trained "
                         f"length of 2 or more, and that of the text; got {len(long)}, {len(short)}, {L} and {length}")
    factors = np.array(long if length > L else short)
    return rope_inv_freq(D, base) / factors, np.sqrt(1 + np.log(s) / np.log(L)) if s > 1 else 1.0

ROPE_SCALINGS = {"none": _none, "linear": _linear, "ntk": _ntk, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3,
                 "longrope": _longrope, CLIPPED: _clipped}
WITH_FACTOR = tuple(name for name in ROPE_SCALINGS if name not in ("none", CLIPPED))       # those that a factor scales

@dataclass(frozen=True)
class ScaledRoPE(RoPE):
    """RoPE's settings with a scaling that is chosen after training."""

    rope_scaling: str = setting("none", one_of=tuple(ROPE_SCALINGS))
    factor: float = setting(1.0, above=0, at_most=1e6)
    length: int | None = setting(None, at_least=1)                     # of the whole sequence, for dynamic and longrope
    long: tuple | None = setting(None)                                 # longrope's numbers, past the context
    short: tuple | None = setting(None)                                # and up to it

    def check(self):
        for name in ("long", "short"):
            if min(getattr(self, name) or (1,)) <= 0:
                raise InputError(f"--{name}-factors must be numbers above 0, got {getattr(self, name)}")

    def fit(self, model):
        super().fit(model)
        try:
            self.rows(np.arange(1), model)
        except ValueError as error:                                    # a width that cannot be scaled in this way
            raise InputError(f"--rope-scaling {self.rope_scaling}: {error}") from None
        return self

    def rows(self, positions, model):
        lists = {name: getattr(self, name) for name in ("long", "short") if getattr(self, name) is not None}
        inv_freq, attention_factor = scaled_inv_freq(model.d_head, self.base, self.rope_scaling, self.factor,
                                                     model.context, self.length, **lists)
        angle = np.asarray(positions)[..., None] * inv_freq                                    # (..., D/2)
        table = np.concatenate((np.cos(angle), np.sin(angle)), axis=-1) * attention_factor
        return table[..., None, :, :]                                                          # (..., 1, T, D)
