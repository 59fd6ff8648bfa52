"""A trained model at other positions: what --scale, --rope-scaling and --keys make of its config.

ExPE's and ExQPE's values are multiplied by a number, RoPE's frequencies are scaled (longer/scaling.py), far pairs get
other positions (longer/chunks.py), ExPE's queries stay at the last trained position (hold), or ExPE-K's slopes get a
least value (least-slope). For every encoding all but the last keys can be hidden.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.linear_bias import is_straight
from longer.chunks import self_extend_queries
from longer.modes import DUAL_CHUNK, HOLD, LEAST, SELF_EXTEND, DualChunks, Hold, LeastSlope, Mode, SelfExtend
from longer.scaling import ROPE_SCALINGS, ScaledRoPE
from positional_encodings import Override, RoPE
from settings import InputError

STEEP = 1                                # least-slope's default factor

class NotForThisEncoding(InputError):
    """What the user gave is for other encodings, and this one cannot use it."""

def limit_windows(config, keys=None):
    """A window (Longformer, Beltagy et al. 2020, arXiv 2004.05150): each query sees only the last N keys, its own among
    them, in every block.

    Returns how many keys each block of a model sees, 0 being all, if none sees more than the last `keys`; None: as
    trained.
    Raises InputError for a model that sees later keys, too.
    """
    windows = [config.block(i)[1] for i in range(config.layers)]
    if keys is None:
        return windows
    if not config.causal:
        raise InputError(f"--keys {keys} is for runs that look back only, and this one was trained with --no-causal, "
                         "or with --objective mlm: leave --keys out")
    return [min(window or keys, keys) for window in windows]

def scale_positions(trained, length, scale=1.0, rope_scaling="none", factor="auto", chunk=None, **lists):
    """A trained model's positions for sequences of `length` tokens: (its ModelConfig, the Mode of a Reader).

    scale multiplies ExPE's and ExQPE's values; "auto" is context/length, and 1 up to the trained length.
    rope_scaling is one of ROPE_SCALINGS, which change the config (scale_frequencies), or one of OWN_METHODS, which
    give another Mode; what factor and chunk mean is said at their functions below.
    Raises NotForThisEncoding for what the encoding cannot use, and InputError for a wrong value.
    """
    check_encoding(trained, scale, rope_scaling)
    encoding = trained.encoding
    if scale != 1:
        encoding = replace(encoding, scale=1 / stretch(trained, length) if scale == "auto" else scale)
    if rope_scaling in ROPE_SCALINGS and rope_scaling != "none":
        encoding = scale_frequencies(trained, length, rope_scaling, factor, **lists)
    config = replace(trained, encoding=encoding)
    if rope_scaling in OWN_METHODS:
        return config, OWN_METHODS[rope_scaling].make_mode(trained.context, length, factor, chunk)
    return config, Mode()

def stretch(trained, length):
    """length/context, and 1 up to the trained length."""
    return max(1.0, length / trained.context)

# ---- the methods, one function each ----------------------------------------------------------------------------------

def scale_frequencies(trained, length, rope_scaling, factor, **lists):
    """RoPE's settings with scaled frequencies; the factor "auto" is stretch(trained, length).

    lists: the tuples `long` and `short`, which longrope alone reads.
    """
    if factor == "auto":
        factor = stretch(trained, length)
    if rope_scaling != "longrope":
        lists = {}
    return ScaledRoPE(trained.encoding.pe, trained.encoding.base, rope_scaling, factor, length, **lists)

def make_dual_chunks(context, length, factor, chunk):
    """dual-chunk: chunks of `chunk` tokens (default: 3/4 of the trained length)."""
    return DualChunks(check_chunk(chunk, 3 * context // 4, context), context)

def make_self_extend(context, length, factor, chunk):
    """self-extend: a window of `chunk` tokens (default: half the trained length), then groups of `factor` positions.

    The factor "auto" is the least one with which no distance is above the trained ones.
    """
    window = check_chunk(chunk, context // 2, context)
    if factor == "auto":
        factor = next(G for G in itertools.count(1) if self_extend_queries(length - 1, window, G) < context)
    if factor < 1 or factor % 1:
        raise InputError(f"--factor must be a whole number of at least 1 for self-extend, got {factor:g}")
    return SelfExtend(window, int(factor))

def make_hold(context, length, factor, chunk):
    """hold: no query is past the trained length."""
    return Hold(context)

def make_least_slope(context, length, factor, chunk):
    """least-slope: a score falls by factor / trained length a token at least; the factor "auto" is STEEP."""
    if factor == "auto":
        factor = STEEP
    if not 0 <= factor <= 1e6:
        raise InputError(f"--factor must be from 0 to 1e6 for least-slope, got {factor:g}")
    return LeastSlope(factor / context)

def check_chunk(chunk, default, context):
    """A --chunk, or the default; InputError unless it is a whole number from 1 to below the trained length."""
    if chunk is None:
        chunk = max(1, default)
    if not isinstance(chunk, int) or not 1 <= chunk < context:
        raise InputError(f"--chunk must be from 1 to {context - 1}, got {chunk}")
    return chunk

# ---- which encodings can use them ------------------------------------------------------------------------------------

def is_rope(trained):
    return isinstance(trained.encoding, RoPE)

def overrides_both(trained):
    """Whether queries and keys have positions of ExPE or ExQPE, in every block."""
    e = trained.encoding
    return isinstance(e, Override) and e.on == "qk" and not e.once

def is_rope_or_overrides_both(trained):
    return is_rope(trained) or overrides_both(trained)

def has_straight_bias(trained):
    """Whether the encoding is ExPE-K as in the paper: only there can a slope be raised."""
    return is_straight(trained.encoding) and trained.softmax == "plain"

class Method(NamedTuple):
    """A method that is not a scaling of RoPE's frequencies alone."""

    users: str                           # the encodings that can use it, in an error's words
    fits: Callable                       # of a trained ModelConfig: whether its encoding is one of them
    make_mode: Callable                  # of (context, length, factor, chunk), of which it reads what it needs

EXPE_QK = "expe and exqpe with --on qk and without --once"
OWN_METHODS = {
    DUAL_CHUNK: Method(f"rope, and {EXPE_QK}", is_rope_or_overrides_both, make_dual_chunks),
    SELF_EXTEND: Method(f"rope, and {EXPE_QK}", is_rope_or_overrides_both, make_self_extend),
    HOLD: Method(EXPE_QK, overrides_both, make_hold),
    LEAST: Method("expe --on k without --learn and --softmax", has_straight_bias, make_least_slope),
}
METHODS = (*ROPE_SCALINGS, *OWN_METHODS)                               # of --rope-scaling

def check_encoding(trained, scale, rope_scaling):
    """NotForThisEncoding unless a trained model's encoding has a use for both."""
    e = trained.encoding
    own = f"{e.pe} --on {e.on}" + " --once" * e.once if isinstance(e, Override) else e.pe
    if rope_scaling in OWN_METHODS:
        users, fits, _ = OWN_METHODS[rope_scaling]
    else:
        users, fits = "rope", is_rope
    if rope_scaling != "none" and not fits(trained):
        raise NotForThisEncoding(f"--rope-scaling {rope_scaling} is for {users}, and this run has {own}: leave it out")
    if trained.cycle and (rope_scaling != "none" or scale != 1):
        raise NotForThisEncoding("--rope-scaling and --scale are for one encoding, and this run has a --cycle: leave "
                                 "them out")
    if scale != 1 and not isinstance(e, Override):
        raise NotForThisEncoding(f"--scale is for expe and exqpe, and this run has {own}: leave it out")
