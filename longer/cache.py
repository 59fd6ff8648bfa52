"""What a model has read: the keys and values of every block, all of them or those of a stream."""

import numpy as np


class Cache:
    """The keys and values of the tokens that a model has read: model(tokens, cache=cache) continues after them.

    Without a window every key is kept, with its position. With one it streams (Xiao et al. 2024): each new token sees
    itself, the first `sinks` tokens and the last `window` tokens before it, and what no later token will see is
    dropped. A stream keeps its keys without a position, and at every step gives them 0 .. S-1 anew, the new token last.
    No gradient goes back through a cache.
    """

    def __init__(self, sinks=0, window=None):
        self.sinks, self.window = sinks, window
        self.positions = np.zeros(0, np.uint8)   # of the keys, (S,) or (B, S); any integer type fits
        self.blocks = {}                 # by a block's W_qkv: (arrays (B, H, capacity, width) of k, v, ..; begin, end)
        self.tables = None, None         # of a stream: what Reader.tables made last, and for what

    @property
    def is_stream(self):
        return self.window is not None

    def __len__(self):
        return self.positions.shape[-1]

    def __getitem__(self, attention):
        """The keys and values of a block's attention, and what else it keeps: a list of (B, H, S, width)."""
        arrays, begin, end = self.blocks[attention.qkv.weight]
        return [x[:, :, begin:end] for x in arrays]

    @property
    def nbytes(self):
        return sum(x[:, :, begin:end].nbytes for arrays, begin, end in self.blocks.values() for x in arrays)

    def positions_with(self, n):
        """The positions of all keys that a pass over new tokens at n, (T,) or (B, T), sees: (S,) or (B, S)."""
        if self.is_stream:
            return np.arange(min(len(self), self.sinks + self.window) + n.shape[-1])
        batch = np.broadcast_shapes(self.positions.shape[:-1], n.shape[:-1])
        return np.concatenate([np.broadcast_to(x, (*batch, x.shape[-1])) for x in (self.positions, n)], axis=-1)

    def extend(self, attention, *parts):
        """Add what a block keeps of its new tokens, keys first, (B, H, T, width) each; returns all S of each part."""
        n = parts[0].shape[2]
        block = attention.qkv.weight
        arrays, begin, end = self.blocks.get(block) or ([part[:, :, :0] for part in parts], 0, 0)
        if self.is_stream and (lost := end - begin - self.sinks - self.window) > 0:
            for x in arrays:                            # the sinks move to the beginning of the window
                x[:, :, begin + lost : begin + lost + self.sinks] = x[:, :, begin : begin + self.sinks].clone()
            begin += lost
        if end + n > arrays[0].shape[2]:                # now and then; a quarter of the new arrays is left free
            size = end - begin + n
            size += max(64, size // 4)
            larger = [part.new_empty(*part.shape[:2], size, part.shape[3]) for part in parts]
            for x, old in zip(larger, arrays, strict=True):
                x[:, :, : end - begin] = old[:, :, begin:end]
            arrays, begin, end = larger, 0, end - begin
        self.blocks[block] = arrays, begin, end + n
        for x, part in zip(arrays, parts, strict=True):
            x[:, :, end : end + n].copy_(part.detach())
        return self[attention]
