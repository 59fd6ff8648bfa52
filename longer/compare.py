"""Whether what reads a trained model computes what the model of model_torch.py does, as that stands now, edited or not.

As engine/compare.py does for training: a Reader in one pass and in parts with a cache, a stream beside the plain
attention of the tokens that it keeps, and queries and keys at positions of their own. longer/reading.py asks for each
of them when it is first used.
"""

import itertools

import numpy as np
import torch

from engine.banded import has_band
from engine.compare import (
    EXACT,
    check_attention,
    pair_of_models,
    refuse_above,
    refused_in_one_line,
    relative_error,
    small_config,
    some_input,
    some_positions,
)
from longer.attention import Apart, Positions
from longer.cache import Cache
from longer.chunks import Move
from longer.modes import DUAL_CHUNK, HOLD
from model_torch import as_tensor
from settings import InputError

PATH = "longer/attention.py"
PARTS = 1, 7, 64                         # tokens of the first passes with a cache; the last two come one by one
SINKS, WINDOW, STEPS = 4, 131, 6         # of a stream, and how many tokens it drops

def readers(make, config):
    """(make's Reader, the plain model) of a small config, in eval mode."""
    return [model.eval() for model in pair_of_models(make, small_config(config))]

@torch.no_grad()
def check_reading(make, config):
    """InputError unless make(config), a Reader, has the losses of model_torch.GPT, in one pass and with a cache."""
    with refused_in_one_line(PATH):
        reader, plain = readers(make, config)
        n = some_positions(reader.config)
        for ours, theirs in zip(reader.blocks, plain.blocks, strict=True):
            settings = theirs.attn.encoding.settings
            h = some_input(config, 1, len(n))
            pos = plain.tables(n)[settings]
            found, right = ours.attn(h, reader.tables(n)[settings]), theirs.attn(h, pos)
            check_attention(ours.attn, theirs.attn, h, pos, True, [found], [right])
        tokens, targets = (torch.arange(len(n))[None] * step % reader.config.vocab for step in (7, 11))
        right = plain.token_losses(tokens, targets, positions=n)
        found = reader.token_losses(tokens, targets, positions=n)
        refuse_above(relative_error(found, right), EXACT, "longer/reading.py: Reader does not compute the losses of "
                     "model_torch.py's GPT now ({error} off): make your edit there, or of cross_entropy in "
                     "engine/cross_entropy.py, too")
        if config.causal:
            check_parts(reader, tokens, targets, n, right)

def check_parts(reader, tokens, targets, n, right):
    """InputError unless a Reader that reads some tokens after others has the losses of one pass."""
    cache = Cache()
    ends = sorted({0, *(end for end in np.cumsum(PARTS) if end < len(n)), len(n) - 2, len(n) - 1, len(n)})
    pieces = [slice(i, j) for i, j in itertools.pairwise(ends)]
    found = [reader.token_losses(tokens[:, piece], targets[:, piece], positions=n[piece], cache=cache)
             for piece in pieces]
    error = relative_error(torch.cat(found, 1), right)
    refuse_above(error, EXACT, f"{PATH}: with a cache, ReadingAttention does not compute what one pass of "
                 "model_torch.py does now ({error} off): the T queries of attend, mask and unseen are the last of S "
                 "tokens: make your edit the same for any T, and for T = S")

@torch.no_grad()
def check_stream(make, config):
    """InputError unless make(config), a Reader, computes the plain attention of the tokens that a stream keeps."""
    with refused_in_one_line(PATH):
        reader, plain = readers(make, config)
        S = SINKS + WINDOW + 1
        cache = Cache(SINKS, WINDOW)
        h = some_input(config, 1, S + STEPS)
        tables = plain.tables(np.arange(S))
        for end in range(S, S + STEPS + 1):
            new = slice(end - 1 if len(cache) else 0, end)
            at = reader.tables(np.arange(new.stop - new.start), cache)
            visible = torch.cat((h[:, :SINKS], h[:, end - S + SINKS : end]), 1)
            for ours, theirs in zip(reader.blocks, plain.blocks, strict=True):
                settings = theirs.attn.encoding.settings
                found = ours.attn(h[:, new], at[settings])[:, -1]
                right = theirs.attn(visible, tables[settings])[:, -1]
                refuse_above(
                    relative_error(found, right), EXACT, f"{PATH}: in a stream, ReadingAttention does not compute what "
                    "the attention of model_torch.py does now ({error} off): move_queries and move_keys add what a "
                    "position adds to content, so that a stream needs a project that is linear in its input, and the "
                    "T queries of attend, mask and unseen are the last of S tokens")

@torch.no_grad()
def check_positions_apart(make, config, method):
    """InputError unless make(config), a Reader, computes plain attention with queries and keys at other positions.

    That is what hold, dual chunks and Self-Extend rest on; method is one of them, as --rope-scaling names it.
    """
    with refused_in_one_line(PATH):
        reader, plain = readers(make, config)
        w = plain.embedding.weight
        n = np.arange(140)
        for ours, theirs in zip(reader.blocks, plain.blocks, strict=True):
            settings = theirs.attn.encoding.settings
            at, moved, grouped = (as_tensor(settings.rows(x, config), w) for x in (n, n // 2 + 3, n // 3))
            if at is None or has_band(ours.attn):
                continue
            nowhere = torch.zeros_like(as_tensor(settings.rows(n[:1], config), w))
            pairs = as_tensor(settings.pairs(n, n, config), w)
            h = some_input(config, 1, len(n))
            if method == HOLD:
                name = "move_queries or move_keys"
                keys = at
                pos = Positions(moved, pairs, Apart(nowhere, key_rows=at))
            elif method == DUAL_CHUNK:
                name = "change_of_scores"
                keys = at
                pos = Positions(at, pairs, Apart(nowhere, moves=(Move(moved, None, True),)))
            else:                                                      # Self-Extend
                name = "change_of_scores"
                keys = grouped
                pos = Positions(at, pairs, Apart(nowhere, key_rows=at, moves=(Move(moved, grouped, True),)))
            right = attention_of(theirs.attn, h, moved, keys, pairs)
            refuse_above(relative_error(ours.attn(h, pos), right), EXACT, f"{PATH}: for {method}, {name} does not give "
                         "what project and attend of model_torch.py give now ({error} off): it needs a project that is "
                         "linear in its input, and scores q k^T / sqrt(D) to which a bias is added")

def attention_of(attention, h, query_rows, key_rows, pairs):
    """Plain attention with queries at other rows than keys, (B, T, C)."""
    q, _, _ = attention.project(h, query_rows)
    _, k, v = attention.project(h, key_rows)
    q, k = attention.encoding.rotate(q, q, query_rows)[0], attention.encoding.rotate(k, k, key_rows)[1]
    bias = attention.encoding.score(q, k, attention.encoding.key_state(h), pairs)
    return attention.output(attention.attend(q, k, v, bias, pairs), h)

@torch.no_grad()
def check_least_slope(reader):
    """InputError unless every block of ExPE-K has the linear bias whose slopes are raised."""
    for block in reader.blocks:
        if block.attn.encoding.settings.pe == "expe" and block.attn.linear is None:
            raise InputError("engine/linear_bias.py: linear_of returns None for expe, so that least-slope has no "
                             "slopes to raise: leave --rope-scaling least-slope out")
