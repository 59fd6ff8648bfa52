"""A trained GPT that goes on after what it has read: with a cache, in a stream, at other positions, in linear memory.

Reader is the model of model_torch.py with ReadingAttention (longer/attention.py). Tests compare it with the plain one.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import torch

from engine import fast
from engine.banded import has_band, in_a_row
from engine.fast import zeros_like
from engine.linear_bias import from_the_last
from expe import integers
from longer import compare
from longer.attention import Apart, Positions, ReadingAttention
from longer.cache import Cache
from longer.chunks import Move
from longer.methods import limit_windows, scale_positions
from longer.modes import LEAST, Mode
from model_torch import GPT, Encoding, as_tensor
from runs import load_model
from settings import InputError

BLOCK = 256                              # queries read at a time where scores need a bias,
PAIRS = 2**21                            # and queries times keys
BATCH_TOKENS = 2**13                     # in one forward pass of window_losses: bounds the memory, whatever the length
STREAM_TOKENS = 2**14                    # that all the streams of one forward pass keep
CANNOT_STREAM = ("cannot stream as trained here: positions are part of the embeddings or enter W_v, or are no sum "
                 "apart from a key's content, and cannot be changed later")

class Reader(GPT):
    """GPT for reading: its losses and logits at any length, with a cache or without one, and at other positions.

    Raises ValueError as GPT does, and for a cache that does not fit the tokens or the encoding.
    """

    def __init__(self, config, seed=0, attention=ReadingAttention):
        super().__init__(config, seed, **fast.PARTS | {"attention": attention})
        self.trained = config
        self.make_reader = functools.partial(type(self), attention=attention)          # for longer/compare.py
        self.compared = set()                                           # what longer/compare.py has checked
        self.mode = Mode()

    def scale_to(self, length, keys=None, **how):
        """Use the positions that longer.methods.scale_positions makes of the trained ones from now on. Returns self.

        keys: from now on every block sees the last `keys` keys at most; None: as many as it was trained with.
        """
        windows = limit_windows(self.trained, keys)
        config, mode = scale_positions(self.trained, length, **how)
        if mode.moves_anything and mode.method not in self.compared:
            compare.check_positions_apart(self.make_reader, self.trained, mode.method)
            self.compared.add(mode.method)
        self.config = config
        self.mode = mode
        for i, block in enumerate(self.blocks):
            block.attn.window = windows[i]
            block.attn.least = mode.least_slope
            block.attn.encoding.settings, _ = self.config.block(i)
            block.attn.__dict__.pop("linear", None)                     # was of the settings before
        if mode.method == LEAST:
            compare.check_least_slope(self)
        return self

    @property
    def longest(self):
        return self.config.encoding.longest(self.config)

    def can_stream(self):
        """Whether a key's position can be changed later: none may be part of the embeddings or enter W_v, and what an
        override adds must be a sum apart from a key's content.
        """
        if self.longest < math.inf:
            return False
        x = self.embedding.weight[None, :1]                             # far enough to differ from 0 in any format
        far = np.array([2**20])
        for encoding in {block.attn.encoding for block in self.blocks}:
            rows = as_tensor(encoding.settings.rows(far, self.config), x)
            zeros = None if rows is None else torch.zeros_like(rows)
            whole, content = encoding.override(x, rows), encoding.override(x, zeros)
            summed = map(torch.add, content, encoding.override(0 * x, rows))           # affine: see longer/attention.py
            embedded = not torch.equal(encoding.embed(x, rows), encoding.embed(x, zeros))
            if embedded or not torch.equal(whole[2], content[2]) or not all(map(torch.allclose, whole, summed)):
                return False
        return True

    @torch.no_grad()
    def window_losses(self, windows, bar, stream=None):
        """The losses in nats of the scored targets of each of lab.measures' windows, a list of float32 arrays.

        stream: the (sinks, window) of a cache that reads on token by token. Neighbouring windows of the same length
        are read side by side; the bar is told of each token.
        """
        losses = []
        device = self.embedding.weight.device
        for length, same in itertools.groupby(windows, lambda window: len(window.tokens) - 1):
            same = list(same)
            step = 64 if stream else length
            at_once = max(1, STREAM_TOKENS // (sum(stream) + 1) if stream else BATCH_TOKENS // length)
            for batch in (same[i : i + at_once] for i in range(0, len(same), at_once)):
                tokens = np.stack([window.tokens for window in batch]).astype(np.int64)
                tokens = torch.from_numpy(tokens).to(device)            # (windows, length + 1)
                cache = Cache(*stream) if stream else None
                first = length - max(window.scored for window in batch)                # none before it is scored
                parts = []
                for j in range(0, length, step):
                    x = tokens[:, j : j + step + 1]                     # one token more than is read
                    h = self.hidden(x[:, :-1], cache=cache)[:, max(0, first - j) :]
                    if h.shape[1]:
                        targets = x[:, -h.shape[1] :]
                        parts.append(self.cross_entropy(h, self.output_weight, targets, reduction="none").float().cpu())
                    bar.update(x[:, 1:].numel())
                scored = torch.cat(parts, dim=1).numpy()                # (windows, length - first)
                losses += [row[row.size - window.scored :] for row, window in zip(scored, batch, strict=True)]
        return losses

    def hidden(self, tokens, positions=None, cache=None):
        if cache is not None:
            self.check_cache(cache, tokens, positions)
        T = tokens.shape[1]
        if positions is None:
            n = np.arange(T) + cache.positions[..., -1:] + 1 if cache else np.arange(T)
        else:
            n = integers(positions)
        starts = self.piece_starts(T, cache)
        if len(starts) > 1 and cache is None:
            cache = Cache()
        read = super().hidden
        parts = [read(tokens[:, i:j], n[..., i:j], cache=cache) for i, j in itertools.pairwise([*starts, T])]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]                 # (B, T, C)

    def piece_starts(self, T, cache):
        """Where the pieces begin in which T tokens are read, one after the other, as memory and a stream allow.

        A kernel that only needs to know that attention is causal never holds the scores. One that needs a bias or a
        mask is given an (H, T, S) array, which BLOCK queries at a time, and fewer for many keys, keep small. With
        gradients all queries are read at once.
        """
        n_cached = len(cache or ())
        first = T
        learning = torch.is_grad_enabled() and cache is None
        if cache is not None and cache.is_stream:
            first = min(T, max(1, cache.sinks + cache.window + 1 - n_cached))              # then one at a time
        size = first
        if self.config.causal and not learning and (n_cached or self.needs_scores()):
            size = max(1, min(BLOCK, PAIRS // (T + n_cached)))
        return [*range(0, first, size), *range(first, T)]

    def needs_scores(self):
        """Whether any block needs an array of all scores, for a bias or a mask besides the causal one."""
        return self.mode.moves_pairs or any(
            attn.window or attn.encoding.value or attn.encoding.softmax
            or (type(attn.encoding).score is not Encoding.score and attn.linear is None)
            for attn in (block.attn for block in self.blocks))

    def tables(self, n, cache=None):
        """{settings: Positions} of new tokens at positions n, which are added to the cache.

        All steps of a full stream have the same positions: its cache keeps what the first of them makes.
        """
        stream = cache is not None and cache.is_stream
        keys = n if cache is None else cache.positions_with(n)
        key = self.config, self.mode, n.shape[-1], len(keys)
        if stream and cache.tables[0] == key:
            tables = cache.tables[1]
        else:
            late_keys = stream or self.mode.late_keys
            attentions = {block.attn.encoding.settings: block.attn for block in self.blocks}
            tables = {settings: self.positions_of(attn, n, keys, late_keys) for settings, attn in attentions.items()}
        if cache is not None:
            cache.positions = keys
        if stream:
            cache.tables = key, tables
        return {settings: replace(pos, cache=cache) for settings, pos in tables.items()}

    def positions_of(self, attention, n, keys, late_keys=False):
        """The Positions of tokens at n, the last of those at keys, for a block's attention.

        late_keys: whether the pass gives all keys their positions, as in a stream.
        A linear bias is used where a pass reads all keys at once, and in every pass if the encoding has no table of
        pairs, whose distances are exact. Rows of zeros then keep all keys without a position.
        """
        settings = attention.encoding.settings
        w = self.embedding.weight
        queries = keys[..., -n.shape[-1] :]

        def rows(n):
            return None if n is None else as_tensor(settings.rows(n, self.config), w)

        if attention.linear is not None:
            one = np.arange(1)
            if queries.shape == keys.shape or settings.pairs(one, one, self.config) is None:
                return Positions(zeros_like(rows(queries)), n=as_tensor(from_the_last(keys), w))
        if has_band(attention) and in_a_row(keys):
            return Positions(banded=True)
        pairs = as_tensor(settings.pairs(queries, keys, self.config), w)
        queries, keys, moves = self.mode.place(queries, keys)
        moves = tuple(Move(rows(move.queries), rows(move.keys), torch.as_tensor(move.chosen, device=w.device))
                      for move in moves)
        key_rows = rows(keys) if late_keys else None
        apart = None
        if moves or key_rows is not None:
            apart = Apart(zeros_like(rows(np.arange(1))), key_rows, moves, queries.shape[:-1])
        return Positions(rows(queries), pairs, apart)

    def check_stream(self):
        if not self.can_stream():
            raise InputError(f"{self.config.encoding.pe} {CANNOT_STREAM}")
        if "stream" not in self.compared:
            compare.check_stream(self.make_reader, self.trained)
            self.compared.add("stream")

    def check_cache(self, cache, tokens, positions):
        if not self.config.causal:
            raise InputError("a cache needs causal attention: without it, what was read depends on what follows")
        if cache.is_stream and positions is not None:
            raise InputError("a stream sets its own positions: leave positions out")
        if cache.is_stream and not cache:
            self.check_stream()
        attention = self.blocks[0].attn
        if cache and attention.qkv.weight not in cache.blocks:
            raise InputError("the cache was filled by another model: begin a new one with Cache()")
        if cache and (count := len(cache[attention][0])) != len(tokens):
            raise InputError(f"the cache holds {count} sequences, and there are {len(tokens)} in tokens")

def load(run, device="cpu", dtype="fp32", make=Reader):
    """(Reader, or make's, in eval mode, all of config.json) of a run; InputError that says what is wrong with it.

    dtype: one of longer.flags.PRECISIONS. bf16 and fp16: the weights, and so the tables too and all that is computed.
    int8: each row of a matrix is rounded to 255 levels from minus to plus its largest number; products stay in fp32.
    """
    model, record = load_model(run, make)
    compare.check_reading(model.make_reader, model.config)
    if dtype == "int8":
        with torch.no_grad():
            for w in (w for w in model.parameters() if w.ndim == 2):
                step = w.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127           # (rows, 1)
                w.copy_((w / step).round() * step)
    return model.to(device, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)), record
