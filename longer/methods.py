"""A trained model at other positions: what --scale, --rope-scaling and --keys make of its config.

ExPE's and ExQPE's values are multiplied by a number, RoPE's frequencies are scaled (longer/scaling.py), far pairs get
other positions (longer/chunks.py), ExPE's queries stay at the last trained position (hold), or ExPE-K's slopes get a
least value (least-slope). For every encoding all but the last keys can be hidden.
"""

import itertools
from dataclasses import replace

from engine.linear_bias import is_straight
from longer.chunks import Groups, self_extend_queries
from longer.scaling import ROPE_SCALINGS, ScaledRoPE
from positional_encodings import Override, RoPE
from settings import InputError

DUAL_CHUNK, SELF_EXTEND, HOLD, LEAST = OWN = "dual-chunk", "self-extend", "hold", "least-slope"
METHODS = (*ROPE_SCALINGS, *OWN)         # of --rope-scaling
STEEP = 1                                # least-slope's default factor

class NotForThisEncoding(InputError):
    """What the user gave is for other encodings, and this one cannot use it."""

def limit_windows(config, keys=None):
    """How many keys each block of a model sees, 0 being all, if none sees more than the last `keys`; None: as trained.

    Raises InputError for a model that sees later keys, too.
    """
    windows = [config.block(i)[1] for i in range(config.layers)]
    if keys is None:
        return windows
    if not config.causal:
        raise InputError(f"--keys {keys} is for runs that look back only, and this one was trained with --no-causal, "
                         "or with --objective mlm: leave --keys out")
    return [min(window or keys, keys) for window in windows]

def scaled(trained, length, scale=1.0, rope_scaling="none", factor="auto", chunk=None, **lists):
    """A trained model's positions for sequences of `length` tokens: (its config, dual chunks' size in tokens or 0).

    scale multiplies ExPE's and ExQPE's values. rope_scaling is one of ROPE_SCALINGS with a factor (and for longrope
    with the tuples `long` and `short`); or dual-chunk, for RoPE, ExPE and ExQPE, in chunks of `chunk` tokens (default:
    3/4 of the trained length); or self-extend, likewise, which returns Groups instead, with a window of `chunk` tokens
    (default: half the trained length) and a whole number as factor, the size; or hold, for ExPE and ExQPE; or
    least-slope, for ExPE-K. The factor "auto" is length/context and the scale "auto" its inverse, both 1 up to the
    trained length; for self-extend it is the least size with which no distance is above the trained ones.
    Raises NotForThisEncoding for what the encoding cannot use, and InputError for a wrong value.
    """
    e = trained.encoding
    moved = isinstance(e, Override) and e.on == "qk" and not e.once    # queries and keys have positions, in every block
    chunks = "rope, and expe and exqpe with --on qk and without --once", moved or isinstance(e, RoPE)
    whose, fits = {"none": ("all", True), DUAL_CHUNK: chunks, SELF_EXTEND: chunks,
                   HOLD: ("expe and exqpe with --on qk and without --once", moved),
                   LEAST: ("expe --on k without --learn and --softmax",
                           is_straight(e) and trained.softmax == "plain"),
                   }.get(rope_scaling, ("rope", isinstance(e, RoPE)))
    own = f"{e.pe} --on {e.on}" + " --once" * e.once if isinstance(e, Override) else e.pe
    if not fits:
        raise NotForThisEncoding(f"--rope-scaling {rope_scaling} is for {whose}, and this run has {own}: leave it out")
    if trained.cycle and (rope_scaling != "none" or scale != 1):
        raise NotForThisEncoding("--rope-scaling and --scale are for one encoding, and this run has a --cycle: leave "
                                 "them out")
    if scale != 1 and not isinstance(e, Override):
        raise NotForThisEncoding(f"--scale is for expe and exqpe, and this run has {own}: leave it out")

    auto = max(1.0, length / trained.context)
    if scale != 1:
        e = replace(e, scale=1 / auto if scale == "auto" else scale)
    if rope_scaling not in ("none", *OWN):
        lists = lists if rope_scaling == "longrope" else {}
        e = ScaledRoPE(e.pe, e.base, rope_scaling, auto if factor == "auto" else factor, length, **lists)
    config = replace(trained, encoding=e)
    if rope_scaling == LEAST and factor != "auto" and not 0 <= factor <= 1e6:
        raise InputError(f"--factor must be from 0 to 1e6 for least-slope, got {factor:g}")
    if rope_scaling not in (DUAL_CHUNK, SELF_EXTEND):
        return config, 0

    quarters = 3 if rope_scaling == DUAL_CHUNK else 2
    chunk = max(1, quarters * trained.context // 4) if chunk is None else chunk
    if not isinstance(chunk, int) or not 1 <= chunk < trained.context:
        raise InputError(f"--chunk must be from 1 to {trained.context - 1}, got {chunk}")
    if rope_scaling == DUAL_CHUNK:
        return config, chunk
    if factor == "auto":
        factor = next(G for G in itertools.count(1) if self_extend_queries(length - 1, chunk, G) < trained.context)
    if factor < 1 or factor % 1:
        raise InputError(f"--factor must be a whole number of at least 1 for self-extend, got {factor:g}")
    return config, Groups(chunk, int(factor))
