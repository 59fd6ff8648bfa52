"""Other positions for a trained model: scaled tables, dual chunks, a window of keys, and the flags for them.

After training a model's positions can be scaled, for texts longer than those it was trained on: ExPE's and ExQPE's
values are multiplied by a number, RoPE's frequencies are scaled, keys and queries are counted anew in chunks or far
ones in groups, ExPE's queries stay at the last trained position (hold), or ExPE-K's slopes get a least value
(least-slope). For every encoding all but the last keys can be hidden.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cli import at_least, listed, number, whole
from engine import fast
from expe import rope_inv_freq
from positional_encodings import Override, RoPE
from settings import InputError, setting

DUAL_CHUNK, SELF_EXTEND, HOLD, LEAST = OWN = "dual-chunk", "self-extend", "hold", "least-slope"      # of --rope-scaling
CLIPPED = "clipped"                      # the scaling of RoPE that has no factor
PRECISIONS = ("fp32", "bf16", "fp16", "int8")
STEEP = 1                                # least-slope's default factor
SINKS = 4                                # first tokens that a stream keeps (Xiao et al. 2024, section 3.1)

class NotForThisEncoding(InputError):
    """What the user gave is for other encodings, and this one cannot use it."""

# ---- RoPE's scalings -------------------------------------------------------------------------------------------------

def scaled_inv_freq(d_head, base=10000.0, scaling="none", factor=1.0, trained_length=512, length=None, **lists):
    """RoPE's angles per position, expe.rope_inv_freq, for texts past the trained length L, s being the factor:

        linear   inv_freq_i / s: position interpolation (Chen et al. 2023)
        ntk      base s^(D/(D-2)) for base (bloc97 2023): the first pair as it was, the last one slower by exactly s
        dynamic  likewise, by s length/L - (s - 1) for s; up to the trained length nothing changes
        yarn     pairs that turn 32 times or more in L positions as they were, those that turn once at most divided by
                 s, and a straight ramp over i between the two (Peng et al. 2023, section 3.2)
        llama3   likewise of those that turn 4 times or more and once at most, the ramp being over the number of turns
                 (Llama 3.1's code; Meta 2024)
        clipped  the slowest 20 of 64 pairs fade to 0, by (1 + cos(pi j/19)) / 2, and in proportion in other widths:
                 none in a head of 8 or fewer. s has no part in it (CoPE's code; arXiv 2602.05258, 2026)
        longrope inv_freq_i / x_i, of D/2 numbers x each: `long` past L, `short` up to it, all 1 if left out (Ding et
                 al. 2024). A search finds them, model by model

    Returns ((D/2,) float64, attention_factor): cosines and sines are to be multiplied by the factor, which is 1 but for
    yarn: 0.1 ln s + 1 if s > 1 (its section 3.4; queries and keys both have it, so that scores get its square); and for
    longrope: sqrt(1 + ln s / ln L) if s > 1. `length` is that of the whole sequence, which dynamic and longrope alone
    read: one set of frequencies holds for all of its keys.
    Raises ValueError as rope_inv_freq does, for a d_head of 2 where the base changes, and for wrong lists of longrope.
    """
    return ROPE_SCALINGS[scaling](d_head, float(base), factor, trained_length, length, **lists)

def _none(D, base, s, L, length):
    return rope_inv_freq(D, base), 1.0                                            # (D/2,)

def _linear(D, base, s, L, length):
    return rope_inv_freq(D, base) / s, 1.0

def _ntk(D, base, s, L, length):
    if D == 2:
        raise ValueError("d_head must be at least 4 to scale the base: a single pair turns by 1 whatever the base")
    return rope_inv_freq(D, base * s ** (D / (D - 2))), 1.0

def _dynamic(D, base, s, L, length):
    return _ntk(D, base, max(1.0, s * length / L - (s - 1)), L, length)

def _yarn(D, base, s, L, length):
    def pair(turns):                                                              # that turns so often in L positions
        return D * np.log(L / (2 * np.pi * turns)) / (2 * np.log(base))

    low = max(np.floor(pair(32)), 0)
    high = min(np.ceil(pair(1)), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / max(high - low, 0.001), 0, 1)      # a step where the two coincide
    return rope_inv_freq(D, base) * (1 - ramp + ramp / s), 0.1 * np.log(s) + 1 if s > 1 else 1.0

def _llama3(D, base, s, L, length):
    inv_freq = rope_inv_freq(D, base)
    ramp = np.clip((L * inv_freq / (2 * np.pi) - 1) / (4 - 1), 0, 1)              # of the turns in L positions
    return inv_freq * (ramp + (1 - ramp) / s), 1.0

def _clipped(D, base, s, L, length):
    n = round(20 / 64 * D / 2)                                                    # pairs that fade
    fade = (1 + np.cos(np.pi * np.arange(n) / max(1, n - 1))) / 2
    return rope_inv_freq(D, base) * np.concatenate((np.ones(D // 2 - n), fade)), 1.0

def _longrope(D, base, s, L, length, long=(), short=None):
    short = (1,) * len(long) if short is None else short
    if length is None or L < 2 or not len(long) == len(short) == D // 2:
        raise ValueError(f"longrope needs --long-factors and --short-factors of D/2 = {D // 2} numbers each, a trained "
                         f"length of 2 or more, and that of the text; got {len(long)}, {len(short)}, {L} and {length}")
    factors = np.array(long if length > L else short)
    return rope_inv_freq(D, base) / factors, np.sqrt(1 + np.log(s) / np.log(L)) if s > 1 else 1.0

ROPE_SCALINGS = {"none": _none, "linear": _linear, "ntk": _ntk, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3,
                 "longrope": _longrope, CLIPPED: _clipped}
METHODS = (*ROPE_SCALINGS, *OWN)
FACTORS = tuple(ROPE_SCALINGS)[1:-1]     # those that a factor scales

@dataclass(frozen=True)
class ScaledRoPE(RoPE):
    """RoPE's settings with a scaling that is chosen after training."""

    rope_scaling: str = setting("none", one_of=tuple(ROPE_SCALINGS))
    factor: float = setting(1.0, above=0, at_most=1e6)
    length: int | None = setting(None, at_least=1)                     # of the whole sequence, for dynamic and longrope
    long: tuple | None = setting(None)                                 # longrope's numbers, past the context
    short: tuple | None = setting(None)                                # and up to it

    def check(self):
        for name in ("long", "short"):
            if min(getattr(self, name) or (1,)) <= 0:
                raise InputError(f"--{name}-factors must be numbers above 0, got {getattr(self, name)}")

    def fit(self, model):
        super().fit(model)
        try:
            self.rows(np.arange(1), model)
        except ValueError as error:                                    # a width that cannot be scaled in this way
            raise InputError(f"--rope-scaling {self.rope_scaling}: {error}") from None
        return self

    def rows(self, positions, model):
        lists = {name: getattr(self, name) for name in ("long", "short") if getattr(self, name) is not None}
        inv_freq, attention_factor = scaled_inv_freq(model.d_head, self.base, self.rope_scaling, self.factor,
                                                     model.context, self.length, **lists)
        angle = np.asarray(positions)[..., None] * inv_freq                                    # (..., D/2)
        table = np.concatenate((np.cos(angle), np.sin(angle)), axis=-1) * attention_factor
        return table[..., None, :, :]                                                          # (..., 1, T, D)

# ---- a trained model's positions -------------------------------------------------------------------------------------

class Groups(NamedTuple):
    """Of Self-Extend: distances below `window` are as they are, and beyond it `size` positions count as one."""

    window: int
    size: int

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
                           fast.is_straight(e) and trained.softmax == "plain"),
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

def dual_chunk_positions(positions, chunk, local):
    """The positions that dual chunk attention gives to the tokens at integer positions. An et al. 2024, section 3.

    A key lies at n mod c. A query lies at m mod c for the keys of its own chunk; at min(m mod c + c, c + w) for those
    of the chunk before, w being the local window in which these distances are true; and at min(2c - 1, c + w) for all
    further back. So no distance is above c + w, and up to one chunk nothing changes.
    Returns (same, before, further), integers of the same shape; keys lie at `same`.
    """
    n = np.asarray(positions)
    farthest = chunk + local
    same = n % chunk
    return same, np.minimum(same + chunk, farthest), np.full_like(n, min(2 * chunk - 1, farthest))

def self_extend_queries(positions, window, size):
    """Where Self-Extend puts queries for keys that are `window` positions back or more. Jin et al. 2024, section 3.

    Such a key lies at floor(n/G), and the query at floor(m/G) + w - floor(w/G), all in whole numbers: so the distances
    go on from w, each for G positions. Nearer pairs stay where they are.
    """
    return positions // size + window - window // size

# ---- the flags -------------------------------------------------------------------------------------------------------

def number_or_auto(text):
    """A float, or "auto", for argparse."""
    return text if text == "auto" else number(text)

def numbers(text):
    """A tuple of finite floats from "X,X,...", for argparse."""
    return tuple(number(part) for part in text.split(","))

READ_BY = {"factor": (*FACTORS, SELF_EXTEND, LEAST), "chunk": (DUAL_CHUNK, SELF_EXTEND),
           "long_factors": ("longrope",), "short_factors": ("longrope",)}      # the methods that read a flag

def add_scaling_flags(parser, several=False):
    """--keys, and scaled's keywords --scale, --rope-scaling, --factor and others; of the first two a list, if several.
    """
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
        help=f"how far {', '.join(FACTORS)} lengthen the context (default: auto, length / trained length; in "
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
            raise InputError(f"--{name.replace('_', '-')} is for --rope-scaling {', '.join(readers)}: leave it out, "
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
