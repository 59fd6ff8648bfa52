"""Other positions for a model that is trained: scaled tables, dual chunks, and their flags, as eval and generate have.

After training a model's positions can be scaled, for texts longer than those it was trained on: ExPE's and
ExQPE's values times a number, RoPE's frequencies scaled, keys and queries counted anew in chunks or far ones in groups,
or ExPE's queries held at the last trained position.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cli import at_least, listed, number, number_or_auto, whole
from config import InputError, Override, RoPE, Unused
from expe import ROPE_SCALINGS

DUAL_CHUNK, SELF_EXTEND, HOLD = "dual-chunk", "self-extend", "hold"      # what --rope-scaling takes besides RoPE's
METHODS = (*ROPE_SCALINGS, DUAL_CHUNK, SELF_EXTEND, HOLD)
PRECISIONS = ("fp32", "bf16", "fp16", "int8")
SINKS = 4                                # first tokens that a stream keeps (Xiao et al. 2024, section 3.1)

class Groups(NamedTuple):
    """Of Self-Extend: distances below `window` are as they are, and beyond it `size` positions count as one."""

    window: int
    size: int

def scaled(trained, length, scale=1.0, rope_scaling="none", factor="auto", chunk=None, **lists):
    """A trained model's positions for sequences of `length` tokens: (its config, dual chunks' size in tokens or 0).

    scale multiplies ExPE's and ExQPE's values. rope_scaling is one of expe.ROPE_SCALINGS by a factor (and for longrope
    by lists, the tuples `long` and `short`); or dual-chunk, which ExPE and ExQPE have too, in chunks of `chunk` tokens
    (default: 3/4 of the trained length); or self-extend, likewise, which returns Groups instead, with a window of
    `chunk` tokens (default: half the trained length) and by the factor a whole size; or hold, which the two alone have.
    "auto" is length/context as a factor, its inverse as a scale, and 1 up to the trained length; for self-extend it is
    the least size by which no distance is above the trained ones.
    Raises Unused for what the encoding has no use for, and InputError for a wrong value.
    """
    auto, changes, e = max(1.0, length / trained.context), {}, trained.encoding
    if scale != 1:
        changes["scale"] = 1 / auto if scale == "auto" else scale
    if rope_scaling not in ("none", DUAL_CHUNK, SELF_EXTEND, HOLD):
        changes |= {"rope_scaling": rope_scaling, "factor": auto if factor == "auto" else factor, "length": length}
        changes |= lists if rope_scaling == "longrope" else {}
    config = replace(trained, encoding=replace(e, **changes))
    if rope_scaling == HOLD and not (isinstance(e, Override) and e.on == "qk" and not e.once):
        raise Unused(f"hold is for queries that know their position, of expe and exqpe --on qk, and {e.pe} as trained "
                     "here has no use for it: leave it out")
    if rope_scaling not in (DUAL_CHUNK, SELF_EXTEND):
        return config, 0
    quarters = 3 if rope_scaling == DUAL_CHUNK else 2
    chunk = max(1, quarters * trained.context // 4) if chunk is None else chunk
    if not isinstance(chunk, int) or not 1 <= chunk < trained.context:
        raise InputError(f"chunk must be from 1 to {trained.context - 1}, got {chunk}")
    if not isinstance(e, (Override, RoPE)):
        raise Unused(f"{rope_scaling} is for expe, exqpe and rope, and {e.pe} has no use for it: leave it out")
    if isinstance(e, Override) and (e.once or e.on != "qk"):
        raise Unused(f"{rope_scaling} moves queries against keys: it needs an override of these two, --on qk")
    if rope_scaling == DUAL_CHUNK:
        return config, chunk
    if factor == "auto":
        factor = next(G for G in itertools.count(1) if self_extend_queries(length - 1, chunk, G) < trained.context)
    if factor < 1 or factor % 1:
        raise InputError(f"factor must be a whole number of at least 1 for self-extend, got {factor:g}")
    return config, Groups(chunk, int(factor))

def dual_chunk_positions(positions, chunk, local):
    """The positions that dual chunk attention gives to the tokens at integer positions. An et al. 2024, section 3.

    A key lies at n mod c. A query lies at m mod c for the keys of its own chunk; at min(m mod c + c, c + w) for those
    of the chunk before, w being the local window in which these distances are true; and at min(2c - 1, c + w) for all
    further back. So no distance is above c + w, and up to one chunk nothing changes.
    Returns (same, before, further), integers of the same shape; keys lie at `same`.
    """
    n, farthest = np.asarray(positions), chunk + local
    same = n % chunk
    return same, np.minimum(same + chunk, farthest), np.full_like(n, min(2 * chunk - 1, farthest))

def self_extend_queries(positions, window, size):
    """Where Self-Extend puts queries for keys that are `window` positions back or more. Jin et al. 2024, section 3.

    Such a key lies at floor(n/G), and the query at floor(m/G) + w - floor(w/G), all in whole numbers: so the distances
    go on from w, each for G positions. Nearer pairs stay where they are.
    """
    return positions // size + window - window // size


# ---- the flags -------------------------------------------------------------------------------------------------------

def numbers(text):
    """A tuple of finite floats from "X,X,...", for argparse."""
    return tuple(number(part) for part in text.split(","))

def add_scaling_flags(parser, several=False):
    """--scale, --rope-scaling, --factor and --chunk, scaled's keywords; of the first two a list, if several."""
    group, more = parser.add_argument_group("past the trained length, after training"), ""
    scale, rope_scaling = {"type": number_or_auto, "default": 1.0}, {"choices": METHODS, "default": "none"}
    if several:
        more = ", or several, each a row"
        scale = {"type": listed(number_or_auto), "default": [1.0]}
        rope_scaling = {"type": listed(str, *METHODS), "default": ["none"]}
    group.add_argument("--scale", metavar="X" + ",X,..." * several, **scale,
                       help="multiply ExPE's and ExQPE's values by a number; auto: trained length / length, 1 within "
                       f"it{more}")
    group.add_argument("--rope-scaling", metavar="METHOD" + ",METHOD,..." * several, **rope_scaling,
                       help=f"RoPE's {', '.join(METHODS[:-1])}; these two for ExPE and ExQPE too, and {HOLD} for "
                       f"them alone: queries past the trained length stay at its last position{more} (default: none)")
    group.add_argument("--factor", type=number_or_auto, metavar="X", help=f"by which {', '.join(METHODS[1:-3])} "
                       "lengthen the context (default: auto, length / trained length; in generate.py the length of "
                       f"prompt and --tokens, or of a full stream); positions in a group of {SELF_EXTEND} (default: "
                       "the fewest that do)")
    for name, where in (("long", "past the trained length"), ("short", "up to it (default: all 1)")):
        group.add_argument(f"--{name}-factors", type=numbers, metavar="X,X,...",
                           help=f"longrope's, by which it divides the frequency of each pair {where}")
    group.add_argument("--chunk", type=whole, metavar="N", help=f"tokens in a chunk of {DUAL_CHUNK} (default: 3/4 of "
                       f"the trained length), or before the groups of {SELF_EXTEND} (default: half of it)")

def scaling_of(args):
    """What add_scaling_flags read, as scaled's keywords; InputError for a flag that no method asked for reads."""
    asked = {args.rope_scaling} if isinstance(args.rope_scaling, str) else {*args.rope_scaling}
    factors = [*METHODS[1:-3], SELF_EXTEND]
    if args.factor is not None and not asked & {*factors}:
        raise InputError(f"--factor is for --rope-scaling {', '.join(factors)}: leave it out, or ask for one")
    if args.chunk is not None and not asked & {DUAL_CHUNK, SELF_EXTEND}:
        raise InputError(f"--chunk is for --rope-scaling {DUAL_CHUNK} or {SELF_EXTEND}: leave it out, or ask for that")
    lists = {"long": args.long_factors, "short": args.short_factors}
    lists = {name: list for name, list in lists.items() if list is not None}
    if lists and "longrope" not in asked:
        raise InputError(f"--{next(iter(lists))}-factors is for --rope-scaling longrope: leave it out, or ask for that")
    factor = "auto" if args.factor is None else args.factor
    return {"scale": args.scale, "rope_scaling": args.rope_scaling, "factor": factor, "chunk": args.chunk} | lists

def add_stream_flags(group):
    """--sinks and --window, which stream_sizes reads."""
    group.add_argument("--sinks", type=at_least(0), metavar="N",
                       help=f"first tokens that a stream keeps (default: {SINKS})")
    group.add_argument("--window", type=at_least(1), metavar="N",
                       help="last tokens that a stream keeps (default: what makes a full stream as long as the trained "
                       "length)")

def stream_sizes(args, context):
    """(sinks, window) of a stream; InputError if the sinks leave no window."""
    sinks = SINKS if args.sinks is None else args.sinks
    if args.window is None and sinks > context - 2:
        raise InputError(f"--sinks {sinks} leave no window within the trained length, {context}: give --window too")
    return sinks, args.window or context - sinks - 1
