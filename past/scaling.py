"""Other positions for a model that is trained: scaled tables, dual chunks, and their flags, as eval and generate have.

After training a model's positions can be scaled, for texts longer than those it was trained on: ExPE's and
ExQPE's values times a number, RoPE's frequencies scaled, keys and queries counted anew in chunks, or ExPE's queries
held at the last trained position.
"""

from dataclasses import replace

import numpy as np

from cli import at_least, listed, number_or_auto, whole
from config import InputError, Override, RoPE, Unused
from expe import ROPE_SCALINGS

DUAL_CHUNK, HOLD = "dual-chunk", "hold"  # what --rope-scaling takes besides RoPE's
METHODS = (*ROPE_SCALINGS, DUAL_CHUNK, HOLD)
PRECISIONS = ("fp32", "bf16", "fp16", "int8")
SINKS = 4                                # first tokens that a stream keeps (Xiao et al. 2024, section 3.1)

def scaled(trained, length, scale=1.0, rope_scaling="none", factor="auto", chunk=None):
    """A trained model's positions for sequences of `length` tokens: (its config, dual chunks' size in tokens or 0).

    scale multiplies ExPE's and ExQPE's values. rope_scaling is one of expe.ROPE_SCALINGS by a factor, or dual-chunk,
    which ExPE and ExQPE have too, in chunks of `chunk` tokens (default: 3/4 of the trained length), or hold, which they
    alone have. "auto" is length/context as a factor, its inverse as a scale, and 1 up to the trained length.
    Raises Unused for what the encoding has no use for, and InputError for a wrong value.
    """
    auto, changes, e = max(1.0, length / trained.context), {}, trained.encoding
    if scale != 1:
        changes["scale"] = 1 / auto if scale == "auto" else scale
    if rope_scaling not in ("none", DUAL_CHUNK, HOLD):
        changes |= {"rope_scaling": rope_scaling, "factor": auto if factor == "auto" else factor, "length": length}
    config = replace(trained, encoding=replace(e, **changes))
    if rope_scaling == HOLD and not (isinstance(e, Override) and e.on == "qk" and not e.once):
        raise Unused(f"hold is for queries that know their position, of expe and exqpe --on qk, and {e.pe} as trained "
                     "here has no use for it: leave it out")
    if rope_scaling != DUAL_CHUNK:
        return config, 0
    chunk = max(1, 3 * trained.context // 4) if chunk is None else chunk
    if not isinstance(chunk, int) or not 1 <= chunk < trained.context:
        raise InputError(f"chunk must be from 1 to {trained.context - 1}, got {chunk}")
    if not isinstance(e, (Override, RoPE)):
        raise Unused(f"dual chunks are for expe, exqpe and rope, and {e.pe} has no use for them: leave them out")
    if isinstance(e, Override) and (e.once or e.on != "qk"):
        raise Unused("dual chunk attention moves queries against keys: it needs an override of these two, --on qk")
    return config, chunk

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


# ---- the flags -------------------------------------------------------------------------------------------------------

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
                       help=f"RoPE's {', '.join(METHODS[:-1])}; {DUAL_CHUNK} for ExPE and ExQPE too, and {HOLD} for "
                       f"them alone: queries past the trained length stay at its last position{more} (default: none)")
    group.add_argument("--factor", type=number_or_auto, metavar="X", help="by which linear, ntk, dynamic or yarn "
                       "lengthens the context (default: auto, length / trained length; in generate.py the length of "
                       "prompt and --tokens, or of a full stream)")
    group.add_argument("--chunk", type=whole, metavar="N", help=f"{DUAL_CHUNK}'s (default: 3/4 of the trained length)")

def scaling_of(args):
    """What add_scaling_flags read, as scaled's keywords; InputError for a flag that no method asked for reads."""
    asked = {args.rope_scaling} if isinstance(args.rope_scaling, str) else {*args.rope_scaling}
    if args.factor is not None and not asked - {"none", DUAL_CHUNK, HOLD}:
        raise InputError(f"--factor is for --rope-scaling {', '.join(METHODS[1:-2])}: leave it out, or ask for one")
    if args.chunk is not None and DUAL_CHUNK not in asked:
        raise InputError(f"--chunk is for --rope-scaling {DUAL_CHUNK}: leave it out, or ask for that")
    factor = "auto" if args.factor is None else args.factor
    return {"scale": args.scale, "rope_scaling": args.rope_scaling, "factor": factor, "chunk": args.chunk}

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
