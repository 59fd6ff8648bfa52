"""Where queries and keys stand for each other in a trained model: at their own positions, or as a method has it.

A Reader (longer/reading.py) has one Mode and asks it for all that the methods do differently. Everything here is
integers, of which the Reader makes tables. B batch, T queries, S keys.
"""

import math
from dataclasses import dataclass

import numpy as np

from longer.chunks import dual_chunk_moves, self_extend_moves

DUAL_CHUNK, SELF_EXTEND, HOLD, LEAST = "dual-chunk", "self-extend", "hold", "least-slope"


@dataclass(frozen=True)
class Mode:
    """As trained: each query and each key stands at its own position. A method overrides what it changes."""

    method = "none"                      # as --rope-scaling names it
    late_keys = False                    # True: every pass gives all keys their positions; a cache keeps them without
    moves_pairs = False                  # True: some scores are of other positions, so that a pass needs all scores

    @property
    def chunk(self):
        """The method's sizes in tokens, as lab.measure records them; 0 where it has none."""
        return 0

    @property
    def least_slope(self):
        """By how much a score falls a token at least."""
        return -math.inf

    @property
    def moves_anything(self):
        """Whether queries or keys are at other positions than their own, which needs content apart from position."""
        return self.late_keys or self.moves_pairs

    def place(self, queries, keys):
        """(positions of the queries, of the keys, Moves of some pairs) from their own, (..., T) and (..., S)."""
        return queries, keys, []

@dataclass(frozen=True)
class DualChunks(Mode):
    """Dual chunks (An et al. 2024, arXiv 2402.17463): the text is cut into chunks, and positions begin anew in each.
    For keys of earlier chunks the query gets another position. So no distance is larger than in training.

    Chunks have `size` tokens; longer/chunks.py has the positions.
    """

    size: int
    context: int                         # the trained length
    method = DUAL_CHUNK
    moves_pairs = True

    @property
    def chunk(self):
        return self.size

    def place(self, queries, keys):
        return dual_chunk_moves(queries, keys, self.size, self.context)

@dataclass(frozen=True)
class SelfExtend(Mode):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): near distances stay as they are. Far distances are counted in
    groups of positions, which makes them smaller.

    Near is below `window`, and a group has `group` positions.
    """

    window: int
    group: int
    method = SELF_EXTEND
    late_keys = True
    moves_pairs = True

    @property
    def chunk(self):
        return self.window, self.group

    def place(self, queries, keys):
        return queries, keys, self_extend_moves(queries, keys, self.window, self.group)

@dataclass(frozen=True)
class Hold(Mode):
    """Hold (this repository): for ExPE and ExQPE, queries past the trained length, `context`, stay at its last
    position. Keys keep their own positions."""

    context: int
    method = HOLD
    late_keys = True

    def place(self, queries, keys):
        return np.minimum(queries, self.context - 1), keys, []

@dataclass(frozen=True)
class LeastSlope(Mode):
    """Least slope (this repository): for ExPE-K, each score falls by at least a given number for each token of
    distance."""

    slope: float
    method = LEAST

    @property
    def least_slope(self):
        return self.slope
