"""A trained GPT that reads on: with a cache, in a stream, in dual chunks, any length in linear memory.

Reader is the model of model_torch.py with another attention, which calls the same steps and doors; tests compare it
with the plain one. A key's content and its place come apart because the override is affine: phi(h, P) = phi(h, 0) +
phi(0, P). So its content is the door with a table of zeros, and its place is the door with an input of zeros. That is
all that streams and dual chunks need: nothing in the model knows of them. Where an encoding has a linear door
(engine/fast.py), keys stay free of position for good, and all is read at once.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common import load_model
from config import InputError
from engine import fast
from engine.fast import from_the_last, has_band, in_a_row, linear_of
from expe import distances, integers
from longer.cache import Cache
from longer.scaling import HOLD, LEAST, STEEP, Groups, dual_chunk_positions, scaled, self_extend_queries
from model_torch import GPT, Encoding, as_tensor, project, score_divisor

BLOCK = 256                              # queries read at a time where scores need a bias,
PAIRS = 2**21                            # and queries times keys
BATCH_TOKENS = 2**13                     # in one forward pass of window_losses: bounds the memory, whatever the length
OF_TABLE = "alibi", "t5", "kerple"       # encodings whose score reads the table alone: it is the same in all blocks
STREAM_TOKENS = 2**14                    # that all the streams side by side keep
CANNOT_STREAM = ("cannot stream as trained here: positions are part of the embeddings or enter W_v, or are no sum "
                 "apart from a key's content, and cannot be changed later")

class At(NamedTuple):
    """Where the tokens of one pass are, as an encoding sees it: model_numpy.Tables, and what reading on needs."""

    rows: Any                            # of the T new tokens, or None
    pairs: Any                           # of the new tokens and all S keys, or None
    n: Any                               # all S keys, counted from the last, if the encoding's linear door is used
    keys: Any                            # rows of all S keys, if kept free of position
    further: tuple                       # of chunks, groups: (rows for the queries, for keys or None, where they hold)
    batch: tuple                         # of the positions: () or (B,)
    places: dict                         # what `positioned` works out, kept with these
    cache: Cache | None
    banded: bool = False                 # whether engine/fast.py's attend_banded is for it; then pairs are None

class ReadingAttention(fast.Attention):
    """Attention over all keys that a cache holds; where keys are free of position, they get one at each step."""

    least = -math.inf                    # by how much a score falls a token at least, where the encoding has slopes

    def linear(self, *what):
        a, b = super().linear(*what)
        return a.clamp(min=self.least) if self.least > -math.inf else a, b

    def forward(self, h, at):
        if at.keys is None and not at.further:           # all get theirs once, here
            q, k, v = self.project(h, at)
        else:
            content, k, v = self.project_content(h, at)
            q = self.positioned(0, content, at.rows, at)
            k = self.positioned(1, k, at.rows, at) if at.keys is None else k
        kept = self.kept(h)
        if at.cache is not None:                                        # what an encoding makes of h is kept, too
            more = () if kept is h else (kept,)
            k, v, *more = at.cache.extend(self, k, v, *more)            # of all S keys, (B, H, S, D) and (B, H, S, n)
            kept = more[0] if more else kept
        free = k
        if at.keys is not None:
            k = self.positioned(1, free, at.keys, at)
        if at.banded:
            return self.output(self.attend_banded(q, k, v), h)
        bias = self.bias(q, k, kept, at) if at.n is None else None
        for rows, keys, chosen in at.further:                    # dual chunk attention, and groups
            moved = self.positioned(0, content, rows, at)
            moved = (moved - q) @ k.mT if keys is None else moved @ self.positioned(1, free, keys, at).mT - q @ k.mT
            moved = moved / score_divisor(q)                            # (B, H, T, S)
            bias = moved * chosen if bias is None else bias + moved * chosen
        y = self.attend(q, k, v, bias, at.pairs) if at.n is None else self.attend_linear(q, k, v, kept, at.n)
        return self.output(y, h)                                        # (B, T, C)

    def bias(self, q, k, kept, at):
        """The encoding's score, (..., H or 1, T, S); where it is the same in all blocks, it is worked out once."""
        encoding = self.encoding
        bias = at.places.get(encoding)
        if bias is None:
            bias = encoding.score(q, k, kept, at.pairs)
            if encoding.settings.pe in OF_TABLE and not torch.is_grad_enabled():
                at.places[encoding] = bias
        return bias

    def project_content(self, h, at):
        """As project, queries and keys free of position: the override's door with rows of zeros, and no rotation."""
        nowhere = None if at.rows is None else torch.zeros_like(at.rows)
        return self.heads(project(self.encoding.override(h, nowhere), self.qkv.weight))

    def positioned(self, part, content, rows, at):
        """Queries (part 0) or keys (1) free of position, (B, H, T, D), at the positions of rows."""
        if rows is None:
            return content
        place = None if torch.is_grad_enabled() else at.places.get((self, part, rows))
        if place is None:
            w = self.qkv.weight.chunk(3)[part]
            nothing = w.new_zeros(*at.batch, content.shape[2], len(w))  # (..., T, C)
            [place] = self.heads([F.linear(self.encoding.override(nothing, rows)[part], w)])
            at.places[self, part, rows] = place.detach()                               # W phi(0, P), (..., H, T, D)
        x = content + place
        return self.encoding.rotate(x, x, rows)[part]

class Reader(GPT):
    """GPT for reading: its losses and logits at any length, with a cache if one is given, and at other positions.

    Raises ValueError as GPT does, and for a cache that the tokens or the encoding do not go with.
    """

    def __init__(self, config, seed=0, attention=ReadingAttention):
        super().__init__(config, seed, **fast.PARTS | {"attention": attention})
        self.trained = config
        self.chunk = 0
        self.hold = self.least = False

    def encodings(self):
        return {block.attn.encoding for block in self.blocks}

    def scale_to(self, length, **how):
        """Go on with the positions that longer.scaling.scaled makes of the trained ones. Returns self."""
        self.config, self.chunk = scaled(self.trained, length, **how)
        self.hold = how.get("rope_scaling") == HOLD
        self.least = how.get("rope_scaling") == LEAST
        factor = how.get("factor", "auto")
        least = (STEEP if factor == "auto" else factor) / self.trained.context
        for block in self.blocks:
            block.attn.least = least if self.least else -math.inf
        e = self.config.encoding
        for encoding in self.encodings():
            encoding.settings = e if encoding.settings.pe == e.pe else encoding.settings
        return self

    @property
    def longest(self):
        return self.config.encoding.longest(self.config)

    def streams(self):
        """Whether a key's position can be changed later: none may be part of the embeddings or enter W_v, and what an
        override adds must be a sum apart from a key's content.
        """
        if self.longest < math.inf:
            return False
        x = self.embedding.weight[None, :1]                             # far enough to differ from 0 in any format
        far = np.array([2**20])
        for encoding in self.encodings():
            there = as_tensor(encoding.settings.rows(far, self.config), x)
            nowhere = None if there is None else torch.zeros_like(there)
            whole, content = encoding.override(x, there), encoding.override(x, nowhere)
            summed = map(torch.add, content, encoding.override(0 * x, there))          # affine: the head of this file
            embedded = not torch.equal(encoding.embed(x, there), encoding.embed(x, nowhere))
            if embedded or not torch.equal(whole[2], content[2]) or not all(map(torch.allclose, whole, summed)):
                return False
        return True

    def check_stream(self):
        if not self.streams():
            raise InputError(f"{self.config.encoding.pe} {CANNOT_STREAM}")

    @torch.no_grad()
    def window_losses(self, windows, bar, stream=None):
        """The losses in nats of the scored targets of each of lab.measures' windows, a list of float32 arrays.

        stream: the (sinks, window) of a cache that reads on token by token. Windows of one length that follow each
        other are read side by side; the bar is told of each token.
        """
        losses = []
        device = self.embedding.weight.device
        for length, same in itertools.groupby(windows, lambda window: len(window.tokens) - 1):
            same = list(same)
            step = 64 if stream else length
            at_once = max(1, STREAM_TOKENS // (sum(stream) + 1) if stream else BATCH_TOKENS // length)
            for batch in (same[i : i + at_once] for i in range(0, len(same), at_once)):
                tokens = np.stack([window.tokens for window in batch]).astype(np.int64)
                tokens = torch.from_numpy(tokens).to(device)
                cache = Cache(*stream) if stream else None
                first = length - max(window.scored for window in batch)                # none before it is scored
                parts = []
                for j in range(0, length, step):
                    x = tokens[:, j : j + step + 1]     # one token more than is read
                    h = self.hidden(x[:, :-1], cache=cache)[:, max(0, first - j) :]
                    if h.shape[1]:
                        targets = x[:, -h.shape[1] :]
                        parts.append(self.cross_entropy(h, self.output_weight, targets, reduction="none").float().cpu())
                    bar.update(x[:, 1:].numel())
                found = torch.cat(parts, dim=1).numpy()         # (windows, length - first)
                losses += [row[row.size - window.scored :] for row, window in zip(found, batch, strict=True)]
        return losses

    def hidden(self, tokens, positions=None, cache=None):
        if cache is not None:
            self.check_cache(cache, tokens, positions)
        T = tokens.shape[1]
        read = super().hidden
        if positions is None and cache:
            positions = np.arange(T) + cache.positions[..., -1:] + 1
        n = np.arange(T) if positions is None else integers(positions)
        begins = self.begins(T, cache)
        if len(begins) > 1 and cache is None:
            cache = Cache()
        parts = [read(tokens[:, i:j], n[..., i:j], cache=cache) for i, j in itertools.pairwise([*begins, T])]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]                 # (B, T, C)

    def begins(self, T, cache):
        """Where the pieces begin in which T tokens are read, one after the other, as memory and a stream allow.

        A kernel that is told `causal` alone never holds the scores. Where it must be given a bias or a mask, that is an
        (H, T, S) array: BLOCK queries at a time, and fewer for many keys, keep it small. (Where gradients are kept, all
        are read at once.)
        """
        kept = len(cache or ())
        first = T
        learning = torch.is_grad_enabled() and cache is None
        if cache is not None and cache.window is not None:
            first = min(T, max(1, cache.sinks + cache.window + 1 - kept))              # then one at a time
        size = first
        if self.config.causal and not learning and (kept or self.masked()):
            size = max(1, min(BLOCK, PAIRS // (T + kept)))
        return [*range(0, first, size), *range(first, T)]

    def masked(self):
        """Whether any block needs a bias or a mask besides the causal one."""
        return bool(self.chunk) or any(
            attn.window or attn.encoding.value or attn.encoding.softmax
            or (type(attn.encoding).score is not Encoding.score and linear_of(attn.encoding, attn.causal) is None)
            for attn in (block.attn for block in self.blocks))

    def tables(self, n, cache=None):
        """{settings: At} of new tokens at positions n, which are added to the cache; the last result is kept."""
        keys = n
        free = self.hold or isinstance(self.chunk, Groups) or (cache is not None and cache.window is not None)
        if cache is not None:
            keys = cache.positions_with(n)
        queries = keys[..., -n.shape[-1] :]
        w = self.embedding.weight
        weights = self.parameters()                        # those of which `positioned` and `bias` keep what they make
        if not (free or self.chunk):
            weights = [w for e in self.encodings() if e.settings.pe in OF_TABLE for w in e.parameters()]
        versions = [None if w.is_inference() else (w.data_ptr(), w._version) for w in weights]
        banded = [has_band(block.attn) for block in self.blocks]
        key = (queries.tobytes(), keys.tobytes(), n.shape, self.config, self.chunk, self.hold, free, w.dtype, w.device,
               banded, versions)
        if self._tables[0] != key or None in versions:
            kinds = {encoding.settings: encoding for encoding in self.encodings()}
            self._tables = key, {settings: self.at(kinds[settings], queries, keys, free) for settings in kinds}
        if cache is not None:
            cache.positions = keys
        return {settings: at._replace(cache=cache) for settings, at in self._tables[1].items()}

    def at(self, encoding, queries, keys, free):
        """Where tokens at `queries` are among those at `keys`, for one encoding.

        Its linear door, if it has one, is for passes over all keys at once; and for every pass, if it has no table of
        pairs, which has exact distances. Rows of zeros then keep all keys free of position.
        """
        settings = encoding.settings
        w = self.embedding.weight
        further = ()

        def rows(n):
            return as_tensor(settings.rows(n, self.config), w)

        if linear_of(encoding, self.config.causal) is not None:
            new = rows(queries)
            n = as_tensor(from_the_last(keys), w)
            one = np.arange(1)
            if queries.shape == keys.shape or settings.pairs(one, one, self.config) is None:
                return At(None if new is None else torch.zeros_like(new), None, n, None, (), (), {}, None)
        attention = next(block.attn for block in self.blocks if block.attn.encoding is encoding)
        if has_band(attention) and in_a_row(keys):
            return At(None, None, None, None, (), (), {}, None, True)
        pairs = as_tensor(settings.pairs(queries, keys, self.config), w)
        if isinstance(self.chunk, Groups):
            far = distances(queries, keys)[..., None, :, :] >= self.chunk.window
            beyond = rows(self_extend_queries(queries, *self.chunk)), rows(keys // self.chunk.size)
            further = ((*beyond, torch.as_tensor(far, device=w.device)),) if far.any() else ()
        elif self.chunk:
            local = self.config.context - 1 - self.chunk                # so that all distances are trained ones
            apart = distances(queries // self.chunk, keys // self.chunk)[..., None, :, :]      # in chunks
            queries, before, beyond = dual_chunk_positions(queries, self.chunk, local)
            keys, _, _ = dual_chunk_positions(keys, self.chunk, local)
            further = tuple((rows(n), None, torch.as_tensor(chosen, device=w.device))
                            for n, chosen in ((before, apart == 1), (beyond, apart > 1)) if chosen.any())
        if self.hold:                                                   # their slopes grow no further
            queries = np.minimum(queries, self.config.context - 1)
        return At(rows(queries), pairs, None, rows(keys) if free else None, further, queries.shape[:-1], {}, None)

    def check_cache(self, cache, tokens, positions):
        if not self.config.causal:
            raise InputError("a cache needs causal attention: without it, what was read depends on what follows")
        if cache.window is not None and positions is not None:
            raise InputError("a stream sets its own positions: leave positions out")
        if cache.window is not None and not cache:
            self.check_stream()
        if cache and self.blocks[0].attn.qkv.weight not in cache.blocks:
            raise InputError("the cache was filled by another model: begin a new one with Cache()")
        if cache and (count := cache.batch) != len(tokens):
            raise InputError(f"the cache holds {count} sequences, and there are {len(tokens)} in tokens")

def load(run, device="cpu", dtype="fp32", make=Reader):
    """(Reader, or make's, in eval mode, all of config.json) of a run; InputError that says what is wrong with it.

    dtype: one of longer.scaling.PRECISIONS. bf16 and fp16: the weights, and so the tables too and all that is computed.
    int8: each row of a matrix is rounded to 255 levels from minus to plus its largest number; products stay in fp32.
    """
    model, record = load_model(run, make)
    if dtype == "int8":
        with torch.no_grad():
            for w in (w for w in model.parameters() if w.ndim == 2):
                step = w.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127           # (rows, 1)
                w.copy_((w / step).round() * step)
    return model.to(device, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)), record
