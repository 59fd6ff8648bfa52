"""Dual chunks and Self-Extend: far pairs of a query and a key are scored as if they were at other positions.

Both keep every distance within the trained ones. Everything here is integers; longer/modes.py says when
they are used, and longer/reading.py makes tables of them.
"""

from typing import Any, NamedTuple

import numpy as np

from expe import distances


class Move(NamedTuple):
    """Some pairs of queries and keys, and where they are for each other."""

    queries: Any                         # of T queries: positions (..., T), or their rows
    keys: Any                            # of S keys, likewise; None: where they are for all others
    chosen: Any                          # which pairs, (..., 1, T, S) booleans

def dual_chunk_moves(queries, keys, chunk, context):
    """(positions of queries, of keys, Moves) of dual chunks, of integer positions (..., T) and (..., S)."""
    local = context - 1 - chunk                          # so that all distances are trained ones
    apart = distances(queries // chunk, keys // chunk)[..., None, :, :]                # in chunks
    same, before, further = dual_chunk_positions(queries, chunk, local)
    moves = [Move(before, None, apart == 1), Move(further, None, apart > 1)]
    return same, dual_chunk_positions(keys, chunk, local)[0], [move for move in moves if move.chosen.any()]

def self_extend_moves(queries, keys, window, size):
    """The Moves of Self-Extend, of integer positions (..., T) and (..., S)."""
    far = distances(queries, keys)[..., None, :, :] >= window
    return [Move(self_extend_queries(queries, window, size), keys // size, far)] if far.any() else []

def dual_chunk_positions(positions, chunk, local):
    """The positions that dual chunk attention gives to the tokens at integer positions. An et al. 2024, section 3.

    A key lies at n mod c. A query lies at m mod c for the keys of its own chunk; at min(m mod c + c, c + w) for those
    of the chunk before, w being the local window in which these distances are true; and at min(2c - 1, c + w) for all
    further back. So no distance is above c + w, and up to one chunk nothing changes.
    Returns (same, before, further), integers of the same shape; keys lie at `same`.
    """
    n = np.asarray(positions)
    farthest = chunk + local
    same = n % chunk
    return same, np.minimum(same + chunk, farthest), np.full_like(n, min(2 * chunk - 1, farthest))

def self_extend_queries(positions, window, size):
    """Where Self-Extend puts queries for keys that are `window` positions back or more. Jin et al. 2024, section 3.

    Such a key lies at floor(n/G), and the query at floor(m/G) + w - floor(w/G), all in whole numbers: so the distances
    go on from w, each for G positions. Nearer pairs stay where they are.
    """
    return positions // size + window - window // size
