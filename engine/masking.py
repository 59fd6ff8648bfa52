"""Masked language modelling, --objective mlm (Devlin et al. 2019, section 3.1)."""

import numpy as np

from model_numpy import IGNORED


def mask_tokens(tokens, vocab, rng, share=0.15, hidden=0.8, other=0.1):
    """(tokens, targets), (B, T) each, of tokens (B, T): the target is what stood at a masked place, elsewhere IGNORED.

    A share of the T places, rounded, is masked: 8 in 10 of them hold <|endoftext|>, one any token, one its own.
    """
    tokens = tokens.copy()
    B, T = tokens.shape
    at = np.sort(rng.random((B, T)).argsort(-1)[:, : max(1, round(share * T))])         # (B, k)
    originals = np.take_along_axis(tokens, at, -1)                                      # (B, k)
    draw = rng.random(at.shape)
    changed = np.where(draw < hidden + other, rng.integers(vocab, size=at.shape), originals)
    np.put_along_axis(tokens, at, np.where(draw < hidden, vocab - 1, changed), -1)
    targets = np.full_like(tokens, IGNORED)
    np.put_along_axis(targets, at, originals, -1)
    return tokens, targets

class Masked:
    """A source of batches (data.py) with masked tokens, drawn by (seed, step), in the place of its own targets."""

    def __init__(self, source, vocab):
        self.source = source
        self.vocab = vocab
        self.open_split = source.open_split

    def batch(self, tokens, context, batch_size, seed, step):
        tokens, _ = self.source.batch(tokens, context, batch_size, seed, step)
        return mask_tokens(tokens, self.vocab, np.random.default_rng([seed, step, 2]))

    def held_out(self, folder, context, most):
        tokens, _ = self.source.held_out(folder, context, most)
        return mask_tokens(tokens, self.vocab, np.random.default_rng([0]))
