"""Attention over keys that were read before, and at positions that are chosen after training.

ReadingAttention calls the steps of model_torch.Attention. A key's content and its position come apart because the
override, and so project, is affine: phi(h, P) = phi(h, 0) + phi(0, P). A key's content is project(h, 0), and what a
position adds is project(0, P) - project(0, 0). Streams, dual chunks and the like need nothing else, and the model knows
nothing of them. Where an encoding has a linear bias (engine/linear_bias.py), its keys never hold a position.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import fast
from engine.fast import zeros_like
from longer.cache import Cache
from model_torch import score_divisor


@dataclass
class Apart:
    """What keeps content and position apart until a pass is read, in a stream and in some Modes (longer/modes.py).

                     key_rows     moves
        hold         all S keys   none
        dual-chunk   None         pairs of other chunks: queries move, keys stay (Move.keys is None)
        self-extend  all S keys   pairs at least a window apart: both move
        a stream     all S keys   its Mode's
    """

    nowhere: Any                         # the rows of one token, all zeros
    key_rows: Any = None                 # rows of all S keys, which have no position in a cache; None: theirs is kept
    moves: tuple = ()                    # Moves of longer/chunks.py, of rows: pairs that are scored at other positions
    batch: tuple = ()                    # the batch dimensions of the positions: () or (B,)
    shares: dict = field(default_factory=dict)       # what position_shares has made, for the next step of a stream

@dataclass
class Positions:
    """Where the tokens of one pass are, as one encoding sees it: these fields are set, and the others have no part.

        every key gets its position as it is read    rows and pairs, each None if the encoding has no such table
        a stream, hold, dual-chunk, self-extend      rows and pairs, likewise; apart where there are rows
        a linear bias (engine/linear_bias.py)        rows, all zeros, so that no key has a position; n
        Shaw's vectors on a band (engine/banded.py)  banded
        tokens read before these                     cache, beside any of the above
    """

    rows: Any = None                     # of the T new tokens, as in model_numpy.Tables; zeros for a linear bias
    pairs: Any = None                    # of the new tokens and all S keys, likewise
    apart: Apart | None = None           # None: a key gets its position once, when it is read
    n: Any = None                        # integer positions of all S keys, counted from the last, for a linear bias
    banded: bool = False                 # whether engine/banded.py is used
    cache: Cache | None = None

class ReadingAttention(fast.Attention):
    """Attention over all keys that a cache holds."""

    least = -math.inf                    # of least-slope: by how much a score falls a token at least
    adds_shifts = False

    def forward(self, h, pos):
        if pos.apart is not None:
            return self.read_apart(h, pos, pos.apart)
        q, k, v = self.project(h, pos.rows)
        if pos.n is None:
            q, k = self.encoding.rotate(q, k, pos.rows)
        k, v, key_state = self.extend(pos.cache, h, k, v)                              # of all S keys
        if pos.banded:
            y = self.attend_banded(q, k, v)
        elif pos.n is not None:
            y = self.attend_linear(q, k, v, key_state, pos.rows, pos.n)
        else:
            bias = self.encoding.score(q, k, key_state, pos.pairs)                     # (..., H or 1, T, S) or None
            y = self.attend(q, k, v, bias, pos.pairs)
        return self.output(y, h)                                                       # (B, T, C)

    def read_apart(self, h, pos, apart):
        """As forward, where some pairs of queries and keys are at other positions, or all keys get theirs only now."""
        content_q, content_k, v = self.project(h, zeros_like(pos.rows))
        q = self.move_queries(content_q, pos.rows, apart)
        if apart.key_rows is None:
            k, v, key_state = self.extend(pos.cache, h, self.move_keys(content_k, pos.rows, apart), v)
        else:
            content_k, v, key_state = self.extend(pos.cache, h, content_k, v)
            k = self.move_keys(content_k, apart.key_rows, apart)
        bias = self.encoding.score(q, k, key_state, pos.pairs)
        for move in apart.moves:
            moved_q = self.move_queries(content_q, move.queries, apart)
            moved_k = None if move.keys is None else self.move_keys(content_k, move.keys, apart)
            change = self.change_of_scores(q, k, moved_q, moved_k) * move.chosen
            bias = change if bias is None else bias + change
        return self.output(self.attend(q, k, v, bias, pos.pairs), h)

    def extend(self, cache, h, k, v):
        """k and v (B, H, S, D) of all S keys, of which a cache holds those before the new ones, and their key_state."""
        key_state = self.key_state(h)
        if cache is None:
            return k, v, key_state
        if key_state is h:                                                             # nothing reads that of a cache
            return *cache.extend(self, k, v), h
        return cache.extend(self, k, v, key_state)

    def move_queries(self, content, rows, apart):
        """Queries (B, H, T, D) at the positions of rows, of their content: what project makes without a position."""
        if rows is None:
            return content
        share, _ = self.position_shares(content.shape[2], rows, apart)
        return self.encoding.rotate(content + share, content + share, rows)[0]

    def move_keys(self, content, rows, apart):
        """Keys (B, H, S, D), likewise."""
        if rows is None:
            return content
        _, share = self.position_shares(content.shape[2], rows, apart)
        return self.encoding.rotate(content + share, content + share, rows)[1]

    def position_shares(self, T, rows, apart):
        """What the positions of T tokens add to queries and to keys before rotate, (..., H, T, D) each."""
        key = self, rows
        shares = None if torch.is_grad_enabled() else apart.shares.get(key)
        if shares is None:
            zeros = self.qkv.weight.new_zeros(*(apart.batch or (1,)), T, self.qkv.weight.shape[1])
            somewhere, nowhere = self.project(zeros, rows), self.project(zeros[:, :1], apart.nowhere)
            shares = [x - y for x, y in zip(somewhere[:2], nowhere[:2], strict=True)]
            apart.shares[key] = [x.detach() for x in shares]
        return shares

    def change_of_scores(self, q, k, moved_q, moved_k=None):
        """By how much q k^T / sqrt(D) changes with other queries and keys, (B, H, T, S); None: the keys stay."""
        change = (moved_q - q) @ k.mT if moved_k is None else moved_q @ moved_k.mT - q @ k.mT
        return change / score_divisor(q)

    def factors(self, *content):
        """As linear_of has them, but no slope below the least one."""
        a, b = super().factors(*content)
        return a.clamp(min=self.least) if self.least > -math.inf else a, b
