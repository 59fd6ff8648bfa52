"""The flags of what reads a trained model at other positions or in a stream: generate.py --cache and lab/."""

from cli import at_least, listed, number, whole
from longer.methods import DUAL_CHUNK, HOLD, LEAST, METHODS, SELF_EXTEND, STEEP
from longer.scaling import ROPE_SCALINGS, WITH_FACTOR
from settings import InputError, flag_of

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
SINKS = 4                                # first tokens that a stream keeps (Xiao et al. 2024, section 3.1)


def number_or_auto(text):
    """A float, or "auto", for argparse."""
    return text if text == "auto" else number(text)

def numbers(text):
    """A tuple of finite floats from "X,X,...", for argparse."""
    return tuple(number(part) for part in text.split(","))

READ_BY = {"factor": (*WITH_FACTOR, SELF_EXTEND, LEAST), "chunk": (DUAL_CHUNK, SELF_EXTEND),
           "long_factors": ("longrope",), "short_factors": ("longrope",)}      # the methods that read a flag

def add_scaling_flags(parser, several=False):
    """--keys, and a flag for each keyword of scale_positions; --scale and --rope-scaling take a list, if several."""
    add = parser.add_argument_group("past the trained length, after training").add_argument
    more = ", or several, each a row" * several
    scale, method = {"type": number_or_auto, "default": 1.0}, {"choices": METHODS, "default": "none"}
    if several:
        scale = {"type": listed(number_or_auto), "default": [1.0]}
        method = {"type": listed(str, *METHODS), "default": ["none"]}
    add("--keys", type=at_least(1), metavar="N",
        help="hide all but the last N keys of each query in every block, its own among them; a block that was trained "
        "with a smaller window keeps it (default: as trained)")
    add("--scale", metavar="X" + ",X,..." * several, **scale,
        help=f"multiply ExPE's and ExQPE's values by a number; auto: trained length / length, 1 within it{more}")
    add("--rope-scaling", metavar="METHOD" + ",METHOD,..." * several, **method,
        help=f"for RoPE: {', '.join(ROPE_SCALINGS)}; for RoPE, ExPE and ExQPE: {DUAL_CHUNK}, {SELF_EXTEND}; for ExPE "
        f"and ExQPE: {HOLD}, queries past the trained length stay at its last position; for ExPE-K: {LEAST}, a score "
        f"falls by at least --factor / trained length a token{more} (default: none)")
    add("--factor", type=number_or_auto, metavar="X",
        help=f"how far {', '.join(WITH_FACTOR)} lengthen the context (default: auto, length / trained length; in "
        f"generate.py the length of prompt and --tokens, or of a full stream); positions in a group of {SELF_EXTEND} "
        f"(default: the fewest that do); of {LEAST} (default: {STEEP})")
    add("--long-factors", type=numbers, metavar="X,X,...",
        help="the numbers by which longrope divides each pair's frequency past the trained length")
    add("--short-factors", type=numbers, metavar="X,X,...", help="and up to the trained length (default: all 1)")
    add("--chunk", type=whole, metavar="N", help=f"tokens in a chunk of {DUAL_CHUNK} (default: 3/4 of the trained "
        f"length), or before the groups of {SELF_EXTEND} (default: half of it)")

def scaling_of(args):
    """What add_scaling_flags read, as the keywords of Reader.scale_to; InputError for a flag that no method reads."""
    methods = {args.rope_scaling} if isinstance(args.rope_scaling, str) else {*args.rope_scaling}
    for name, readers in READ_BY.items():
        if getattr(args, name) is not None and not methods & {*readers}:
            raise InputError(f"{flag_of(name)} is for --rope-scaling {', '.join(readers)}: leave it out, "
                             "or ask for one of these")
    lists = {"long": args.long_factors, "short": args.short_factors}
    return {"keys": args.keys, "scale": args.scale, "rope_scaling": args.rope_scaling, "chunk": args.chunk,
            "factor": "auto" if args.factor is None else args.factor,
            **{name: factors for name, factors in lists.items() if factors is not None}}

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
