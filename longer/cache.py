"""What a model has read: the keys and values of every block, all of them or those of a stream."""

import numpy as np
import torch

from config import InputError


class Cache:
    """The keys and values of the tokens that a model has read: model(tokens, cache=cache) reads on from there.

    Without a window every key is kept, with its position. With one it streams (Xiao et al. 2024): each new token sees
    itself, the first `sinks` tokens and the last `window` before it, and what no later one will see is dropped. Keys
    are then kept free of position, and at every step lie at 0 .. S-1 anew, the new token's last.
    No gradient goes back through it. Raises InputError for a window below 1 and for sinks below 0.
    """

    def __init__(self, sinks=0, window=None):
        streams = isinstance(window, int) and window >= 1
        if not isinstance(sinks, int) or sinks < 0 or not (streams or (window is None and sinks == 0)):
            raise InputError(f"a stream needs sinks of at least 0 and a window of at least 1, got {sinks} and {window}")
        self.sinks, self.window = sinks, window
        self.positions = np.zeros(0, np.uint8)   # of keys, (S,) or (B, S); any type fits
        self.blocks = {}                 # by a block's W_qkv: (rooms (B, H, ..., width) of k, v and more, begin, end)

    def __len__(self):
        return self.positions.shape[-1]

    def __getitem__(self, attention):
        """The keys and values of a block's attention, and what else it keeps, a list of (B, H, S, width)."""
        return self.seen(*self.blocks[attention.qkv.weight])

    @property
    def batch(self):
        """How many sequences it holds; None before the first pass."""
        return next((len(rooms[0]) for rooms, _, _ in self.blocks.values()), None)

    @staticmethod
    def seen(rooms, begin, end):
        return [room.narrow(2, begin, end - begin) for room in rooms]

    @property
    def nbytes(self):
        return sum(x.nbytes for block in self.blocks.values() for x in self.seen(*block))

    def positions_with(self, n):
        """The positions of all keys that a pass over new tokens at n, (T,) or (B, T), sees: (S,) or (B, S)."""
        if self.window is not None:
            return np.arange(min(len(self), self.sinks + self.window) + n.shape[-1])
        parts = self.positions, n
        if n.shape[:-1] != self.positions.shape[:-1]:
            shape = np.broadcast_shapes(self.positions.shape[:-1], n.shape[:-1])
            parts = [np.broadcast_to(x, (*shape, x.shape[-1])) for x in parts]
        return np.concatenate(parts, axis=-1)

    def extend(self, attention, *parts):
        """Keep what there is of a block's new tokens, keys first, (B, H, T, width) each; returns all S seen of each."""
        n = parts[0].shape[2]
        block = attention.qkv.weight
        rooms, begin, end = self.blocks.get(block) or ([part[:, :, :0] for part in parts], 0, 0)
        if self.window is not None and (lost := end - begin - self.sinks - self.window) > 0:
            for room in rooms:                          # the sinks follow the window
                room[:, :, begin + lost : begin + lost + self.sinks] = room[:, :, begin : begin + self.sinks].clone()
            begin += lost
        if end + n > rooms[0].shape[2]:                                                # now and then, leaving some free
            size = end - begin + n
            size += max(64, size // 4)
            with torch.inference_mode(False):           # for passes in that mode and without it
                larger = [part.new_empty(*part.shape[:2], size, part.shape[3]) for part in parts]
            for room, old in zip(larger, rooms, strict=True):
                room[:, :, : end - begin] = old[:, :, begin:end]
            rooms, begin, end = larger, 0, end - begin
        self.blocks[block] = rooms, begin, end + n
        for room, part in zip(rooms, parts, strict=True):
            room.narrow(2, end, n).copy_(part.detach())
        return self.seen(rooms, begin, end + n)
