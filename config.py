"""Every knob of a run, in frozen dataclasses that refuse a wrong value, and the presets with their table in the paper.

Standard library alone. Below the dataclasses: how scripts report a wrong input, and how a run lies on disk.
Tables 5, 6, 8 and 9 are those of the ExPE paper's preprint (appendices B and C).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple


class InputError(ValueError):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""


class Unused(InputError):
    """What the user gave is for other encodings, and this one has no use for it."""


def _check(config, name, ok, rule):
    """InputError that names the field, the rule and the value, unless ok(value)."""
    value = getattr(config, name)
    if not ok(value):
        raise InputError(f"{name} must be {rule}, got {value!r}")


def _whole(low, high=math.inf):
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high


def _number(low=-math.inf, high=math.inf):
    return lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and low <= x <= high


def _positive(x):
    return _number(0)(x) and x > 0


def knob(default, help, flag=None):
    """A field with the help text of its flag in train.py; the flag is the field's name, with dashes, unless given."""
    return field(default=default, metadata={"help": help, "flag": flag})


# ---- the encoding ----------------------------------------------------------------------------------------------------

def _ramp(context):
    return 1 / (4 * context)


# Every encoding, in the order of --pe: those fields of EncodingConfig that it reads, with their defaults, which may
# depend on the context. None: as an option that was not asked for.
_OVERRIDE = {"once": False, "on": "qk", "learn": "none", "scale": 1.0, "chunk": 0}
ENCODINGS = {
    "nope": {},
    "sinusoidal": {"base": 10000.0},
    "learned": {},
    "expe": {"l": 24, "start": 0.0, "theta": _ramp, "constant": False, **_OVERRIDE},
    "exqpe": {"l": 24, "start": 0.0, "theta1": _ramp, "theta2": 1 / 16, **_OVERRIDE},
    "rope": {"base": 10000.0, "rope_scaling": "none", "factor": 1.0, "length": None, "chunk": 0},
    "alibi": {},
    "t5": {"buckets": 32, "max_distance": 128},
    "shaw": {"max_distance": 16},
}
# The two numbers that --learn trains, in the order of the parameter encoding.weight.
LEARNED = {"expe": ("start", "theta"), "exqpe": ("theta1", "theta2")}
SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn")  # of RoPE's frequencies; expe.rope_inv_freq says how
DUAL_CHUNK = "dual-chunk"  # what --rope-scaling takes besides
CANNOT_STREAM = (
    "cannot stream as trained here: positions are part of the embeddings or the values, where they cannot be "
    "changed later"
)
SINKS = 4  # first tokens that a stream keeps (Xiao et al. 2024, section 3.1)


@dataclass(frozen=True)
class EncodingConfig:
    """How positions enter. A field left None takes its default in ModelConfig, if the encoding reads it at all.

    Those from scale on are not flags of train.py: ModelConfig.scaled sets them in the config of a trained model.
    """

    pe: str = knob("nope", "positional encoding")
    l: int | None = knob(None, "overridden dimensions (default: the preset's; tables 6 and 9)")
    start: float | None = knob(None, "value at position 0, the paper's S (default: 0)")
    theta: float | None = knob(
        None, "ExPE's step from one position to the next (default: 1/(4 x context), table 9's 1/2048 at 512)"
    )
    theta1: float | None = knob(
        None, "ExQPE's step from one dimension to the next (default: 1/(4 x context), as theta)"
    )
    theta2: float | None = knob(None, "by how much ExQPE raises a dimension at its turn (default: 1/16, table 9)")
    constant: bool | None = knob(None, 'the ablation "p is stable": ExPE with the same number in all l dimensions')
    once: bool | None = knob(None, "the ablation: override the residual stream before block 1, and nothing after that")
    on: str | None = knob(None, "whose input is overridden: k, q, qk or qkv (default: qk, as in the paper)")
    learn: str | None = knob(
        None, "train start and theta, or theta1 and theta2: init from their defaults, random from N(0, 1), or none"
    )
    base: float | None = knob(None, "base of the geometric frequencies (default: 10,000)")
    buckets: int | None = knob(None, "T5's buckets of distances (default: 32)")
    max_distance: int | None = knob(
        None, "distance from which T5 (default: 128) and Shaw (default: 16) do not tell two apart"
    )
    scale: float | None = None  # by which ExPE's and ExQPE's values are multiplied (section 4.3)
    rope_scaling: str | None = None  # one of SCALINGS
    factor: float | None = None  # by which rope_scaling lengthens the context
    length: int | None = None  # of the whole sequence, for dynamic
    chunk: int | None = None  # dual chunk attention's, in tokens; 0: none

    def __post_init__(self):
        _check(self, "pe", lambda x: x in ENCODINGS, f"one of {', '.join(ENCODINGS)}")
        for name in (f.name for f in dataclasses.fields(self) if f.name != "pe"):
            if getattr(self, name) is not None and name not in ENCODINGS[self.pe]:
                readers = " and ".join(pe for pe, fields in ENCODINGS.items() if name in fields)
                raise Unused(f"{name} is for {readers}, and {self.pe} has no use for it: leave it out")
        if self.l is not None:
            _check(self, "l", _whole(1), "a whole number of at least 1")
        for name in ("start", "theta", "theta1", "theta2"):
            if getattr(self, name) is not None:
                _check(self, name, _number(), "a finite number")
        for name in ("constant", "once"):
            _check(self, name, lambda x: x is None or isinstance(x, bool), "true or false")
        if self.on is not None:
            _check(self, "on", lambda x: x in ("k", "q", "qk", "qkv"), "k, q, qk or qkv")
        if self.learn is not None:
            _check(self, "learn", lambda x: x in ("none", "init", "random"), "none, init or random")
        if self.once and self.on is not None:
            raise InputError("once overrides the residual stream, on the input of attention: leave one of them out")
        if self.learn == "random":
            for name in LEARNED[self.pe]:
                if getattr(self, name) is not None:
                    raise InputError(f"learn random draws {name}, and {getattr(self, name)} is given: leave one out")
        if self.base is not None:
            _check(self, "base", lambda x: _number(1)(x) and x > 1, "a finite number above 1")
        if self.buckets is not None:
            _check(self, "buckets", _whole(2, 1024), "a whole number from 2 to 1,024")
        if self.max_distance is not None:
            least = 1 if self.buckets is None else self.buckets // 2 + 1
            _check(self, "max_distance", _whole(least, 2**16), f"a whole number from {least} to 65,536")
        for name in ("scale", "factor"):
            if getattr(self, name) is not None:
                _check(self, name, lambda x: _positive(x) and x <= 1e6, "above 0 and at most 1e6")
        if self.rope_scaling is not None:
            _check(self, "rope_scaling", lambda x: x in SCALINGS, f"one of {', '.join(SCALINGS)}")
        if self.length is not None:
            _check(self, "length", _whole(1), "a whole number of at least 1")
        if self.rope_scaling == "dynamic" and self.length is None:
            raise InputError("dynamic scaling needs the length of the whole sequence, got none")
        if self.chunk is not None:
            _check(self, "chunk", _whole(0), "a whole number of at least 0")
        if self.chunk and (self.once or self.on not in (None, "qk")):
            raise Unused("dual chunk attention moves queries against keys: it needs an override of these two, --on qk")


# Those that are flags of train.py.
ENCODING_FIELDS = tuple(f.name for f in dataclasses.fields(EncodingConfig) if "help" in f.metadata and f.name != "pe")


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the GPT. The encoding's unset fields are filled in here, where the context is known."""

    n_layers: int
    d_model: int
    n_heads: int
    context: int = knob(MISSING, "trained length, in tokens")
    vocab_size: int = knob(MISSING, "entries of the vocabulary", flag="--vocab")
    norm: str = "layernorm"  # layernorm (with bias) | rmsnorm
    mlp: str = "gelu"  # gelu (tanh form) | swiglu
    d_mlp: int | None = None  # hidden width of the MLP; 4 x d_model
    tied: bool = False  # the output layer shares the embedding's weights
    dropout: float = knob(0.0, "rate on the embedding and on each residual branch, never on attention weights")
    norm_eps: float = 1e-5
    causal: bool = True  # a query sees no later key; False shows what order is known from the encoding alone
    encoding: EncodingConfig = field(default_factory=EncodingConfig)

    def __post_init__(self):
        for name in ("n_layers", "d_model", "n_heads", "context"):
            _check(self, name, _whole(1), "a whole number of at least 1")
        _check(self, "vocab_size", _whole(2, 2**16), "a whole number from 2 to 65,536 (tokens lie on disk as uint16)")
        _check(self, "n_heads", lambda x: self.d_model % x == 0, f"a divisor of d_model, {self.d_model}")
        _check(self, "norm", lambda x: x in ("layernorm", "rmsnorm"), "layernorm or rmsnorm")
        _check(self, "mlp", lambda x: x in ("gelu", "swiglu"), "gelu or swiglu")
        if self.d_mlp is None:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        _check(self, "d_mlp", _whole(1), "a whole number of at least 1")
        for name in ("tied", "causal"):
            _check(self, name, lambda x: isinstance(x, bool), "true or false")
        _check(self, "dropout", lambda x: _number(0, 1)(x) and x < 1, "at least 0 and below 1")
        _check(self, "norm_eps", _positive, "above 0")
        _check(self, "encoding", lambda x: isinstance(x, EncodingConfig), "an EncodingConfig")

        e, unset = self.encoding, {}
        leave = ("on",) if e.once else ()
        leave += LEARNED[e.pe] if e.learn == "random" else ()
        for name, default in ENCODINGS[e.pe].items():
            if getattr(e, name) is None and name not in leave:
                unset[name] = default(self.context) if callable(default) else default
        object.__setattr__(self, "encoding", replace(e, **unset))
        if self.encoding.l is not None and self.encoding.l > self.d_model:
            raise InputError(f"l must be from 1 to d_model, {self.d_model}, got {self.encoding.l}")
        if self.encoding.chunk and self.encoding.chunk >= self.context:
            raise InputError(f"chunk must be below the trained length, {self.context}, got {self.encoding.chunk}")

    @property
    def d_head(self):
        return self.d_model // self.n_heads

    def scaled(self, length, scale=1.0, rope_scaling="none", factor="auto", chunk=None):
        """The config of the same trained model, its positions laid for sequences of `length` tokens.

        scale multiplies ExPE's and ExQPE's values. rope_scaling is one of SCALINGS by a factor, or dual-chunk, which
        ExPE and ExQPE have too, in chunks of `chunk` tokens (default: 3/4 of the trained length). "auto" is
        length/context as a factor, its inverse as a scale, and 1 up to the trained length.
        Raises Unused for what the encoding has no use for, and InputError for a wrong value.
        """
        auto, changes = max(1.0, length / self.context), {}
        if scale != 1:
            changes["scale"] = 1 / auto if scale == "auto" else scale
        if rope_scaling == DUAL_CHUNK:
            changes["chunk"] = max(1, 3 * self.context // 4) if chunk is None else chunk
            if changes["chunk"] == 0:
                raise InputError(f"chunk must be from 1 to {self.context - 1}, got 0")
        elif rope_scaling != "none":
            changes |= {"rope_scaling": rope_scaling, "factor": auto if factor == "auto" else factor, "length": length}
        return replace(self, encoding=replace(self.encoding, **changes))

    def initial(self, name):
        """Mean and standard deviation of the normal numbers from which a parameter starts, by its name.

        GPT-2's 0.02, and 0.02 / sqrt(2 n_layers) for what ends a residual branch; norms start as weight 1, bias 0. An
        embedding that is not the output layer too starts at 1, torch's own default: no smaller than the rows that the
        sinusoidal encoding adds to it. What --learn trains starts from the flags' numbers, or from N(0, 1); all else
        that an encoding trains from N(0, 0.02^2).
        """
        if self.encoding.learn == "init" and name.startswith("encoding."):
            return [getattr(self.encoding, field) for field in LEARNED[self.encoding.pe]], 0.0
        if self.encoding.learn == "random" and name.startswith("encoding."):
            return 0.0, 1.0
        if "norm" in name.split(".")[-2]:  # norm, blocks.0.norm1, ...
            return (0.0, 0.0) if name.endswith("bias") else (1.0, 0.0)
        if name == "embedding.weight" and not self.tied:
            return 0.0, 1.0
        ends_branch = name.endswith(("attn.proj.weight", "mlp.down.weight"))
        return 0.0, 0.02 / math.sqrt(2 * self.n_layers) if ends_branch else 0.02

    @classmethod
    def from_dict(cls, values):
        """The inverse of dataclasses.asdict; InputError for a missing or unknown field."""
        values = dict(values)
        if "encoding" in values:
            values["encoding"] = _from_dict(EncodingConfig, values["encoding"])
        return _from_dict(cls, values)


# ---- the training run ------------------------------------------------------------------------------------------------


BACKENDS = ("torch", "numpy")
DTYPES = ("fp32", "tf32", "bf16")  # that a run can be trained in
PRECISIONS = ("fp32", "bf16", "fp16", "int8")  # that a trained run can be evaluated in; model_torch.load_model says how


@dataclass(frozen=True)
class TrainConfig:
    """One training run: its data, its steps and its optimizer. A batch is counted in sequences of `context` tokens."""

    steps: int = knob(MISSING, "optimizer steps")
    batch_size: int = knob(MISSING, "sequences that one optimizer step sees")
    lr: float = knob(MISSING, "peak learning rate")
    end_lr: float = knob(MISSING, "learning rate of the last step")
    micro_batch: int = knob(0, "sequences in memory at once; 0: the whole batch")
    warmup: float = knob(0.1, "share of the steps in which the rate climbs linearly to --lr")
    beta1: float = knob(0.9, "AdamW's decay of the first moment")
    beta2: float = knob(0.95, "AdamW's decay of the second moment")
    weight_decay: float = knob(0.1, "AdamW's decoupled decay, on matrices only")
    clip: float = knob(1.0, "largest norm of the whole gradient")
    backend: str = knob("torch", "torch, or numpy: the same model with gradients by hand, in fp32 on the CPU")
    dtype: str = knob(
        "fp32", "fp32, tf32 (fp32 whose matrix products a GPU may round), or bf16 by autocast, with the weights in fp32"
    )
    seed: int = knob(0, "of the first weights, the order of the data and dropout")
    data: str = knob("stdlib", "stdlib, fineweb, fineweb-edu, a file or folder of text, or a folder made by data.py")
    min_doc_tokens: int = knob(1, "leave shorter documents out when the data is prepared on the way")
    max_tokens: int = knob(0, "tokens to collect when the data is prepared on the way; 0: all")
    eval_every: int = knob(250, "steps from one validation loss to the next")
    eval_windows: int = knob(256, "windows of --context tokens in a validation loss")
    checkpoint_every: int = knob(500, "steps from one checkpoint to the next")

    def __post_init__(self):
        for name in ("steps", "batch_size", "min_doc_tokens", "eval_every", "eval_windows", "checkpoint_every"):
            _check(self, name, _whole(1), "a whole number of at least 1")
        if self.micro_batch == 0:
            object.__setattr__(self, "micro_batch", self.batch_size)
        _check(
            self,
            "micro_batch",
            lambda x: _whole(1)(x) and self.batch_size % x == 0,
            f"a divisor of batch_size, {self.batch_size}",
        )
        _check(self, "max_tokens", _whole(0), "a whole number of at least 0")
        _check(self, "lr", _positive, "a finite number above 0")
        _check(self, "end_lr", lambda x: _number(0)(x) and x <= self.lr, f"from 0 to lr, {self.lr}")
        _check(self, "warmup", _number(0, 1), "from 0 to 1")
        for name in ("beta1", "beta2"):
            _check(self, name, lambda x: _number(0, 1)(x) and x < 1, "at least 0 and below 1")
        _check(self, "weight_decay", _number(0), "a finite number of at least 0")
        _check(self, "clip", _positive, "a finite number above 0")
        _check(self, "backend", lambda x: x in BACKENDS, " or ".join(BACKENDS))
        _check(self, "dtype", lambda x: x in DTYPES, "fp32, tf32 or bf16")
        if self.backend == "numpy":
            _check(self, "dtype", lambda x: x == "fp32", "fp32 for the NumPy backend (--dtype fp32)")
        _check(self, "seed", _whole(0, 2**32 - 1), "a whole number from 0 to 4,294,967,295")
        _check(self, "data", lambda x: isinstance(x, str) and x != "", "stdlib, fineweb, fineweb-edu or a path")

    def lr_at(self, step):
        """The learning rate of step 0 .. steps-1: linear warm-up to lr, then half a cosine down to end_lr."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - 1 - warm)
        return self.end_lr + (self.lr - self.end_lr) * (1 + math.cos(math.pi * progress)) / 2

    @classmethod
    def from_dict(cls, values):
        """The inverse of dataclasses.asdict; InputError for a missing or unknown field."""
        return _from_dict(cls, values)


def _from_dict(cls, values):
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise InputError(f"{cls.__name__} has no field {name!r}; it has {', '.join(known)}")
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{cls.__name__} lacks the field {name!r}")
    return cls(**values)


class Preset(NamedTuple):
    """A model and how it is trained. Its encoding is ExPE as the paper sets it; others take l alone from it."""

    model: ModelConfig
    train: TrainConfig


def _expe(l):
    return EncodingConfig("expe", l=l)


PRESETS = {
    # Ours: minutes on two CPU cores. Documents hold 16 times the context, so that all can be scored at that length.
    "mini": Preset(
        ModelConfig(n_layers=4, d_model=128, n_heads=4, context=128, vocab_size=1024, encoding=_expe(24)),
        TrainConfig(  # 1.64M tokens; small batches learn more from each
            steps=1600, batch_size=8, lr=4e-3, end_lr=4e-5, min_doc_tokens=16 * 128, eval_every=200, eval_windows=128
        ),
    ),
    # Tables 5 and 6; 600M training tokens of documents of 4,000 tokens or more (section 3.1).
    "paper-35m": Preset(
        ModelConfig(
            n_layers=6, d_model=384, n_heads=12, context=512, vocab_size=32000, dropout=0.1, encoding=_expe(24)
        ),
        TrainConfig(
            steps=2289,
            batch_size=512,
            micro_batch=64,
            lr=1e-3,
            end_lr=3e-6,
            data="fineweb",
            min_doc_tokens=4000,
            max_tokens=700_000_000,
        ),
    ),
    # Tables 8 and 9; 10B tokens in batches of 0.5M. The paper gives no MLP width: 2,048 and 2,816 make 135M and 342M.
    "llama-135m": Preset(
        ModelConfig(
            n_layers=12,
            d_model=768,
            n_heads=12,
            context=512,
            vocab_size=32768,
            norm="rmsnorm",
            mlp="swiglu",
            d_mlp=2048,
            encoding=_expe(96),
        ),
        TrainConfig(
            steps=19074,
            batch_size=1024,
            micro_batch=64,
            lr=6e-4,
            end_lr=6e-5,
            warmup=0.05,
            dtype="bf16",
            data="fineweb-edu",
            max_tokens=10_000_000_000,
        ),
    ),
    "llama-342m": Preset(
        ModelConfig(
            n_layers=24,
            d_model=1024,
            n_heads=16,
            context=512,
            vocab_size=32768,
            norm="rmsnorm",
            mlp="swiglu",
            d_mlp=2816,
            tied=True,
            encoding=_expe(128),
        ),
        TrainConfig(
            steps=19074,
            batch_size=1024,
            micro_batch=32,
            lr=3e-4,
            end_lr=3e-5,
            warmup=0.05,
            dtype="bf16",
            data="fineweb-edu",
            max_tokens=10_000_000_000,
        ),
    ),
}


# ---- the command line ------------------------------------------------------------------------------------------------


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser that reports every wrong input as one line on stderr, with exit status 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(str(message).split())}\n")

    @contextlib.contextmanager
    def one_line_errors(self):
        """Everything that the user or the machine can get wrong ends in error(); a bug keeps its traceback."""
        try:
            yield
        except InputError as error:
            self.error(error)
        except KeyboardInterrupt:
            self.exit(130, f"{self.prog}: stopped\n")
        except MemoryError as error:
            self.error(f"not enough memory: {error or 'use smaller sizes'}")
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output has gone (| head): no complaint
        except OSError as error:
            self.error(f"{error.filename}: {error.strerror}" if error.filename else error)


def number(text):
    """A finite float from "0.5", "1e-3" or "1/2048", for argparse."""
    above, _, below = text.partition("/")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if math.isfinite(value := float(above) / float(below or 1)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5, 1e-3 or 1/2048")


def whole(text):
    """An int of at most 2^53 from "600000000", "600_000_000" or "6e8", for argparse."""
    with contextlib.suppress(ValueError):
        if (value := float(text)).is_integer() and abs(value) <= 2**53:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (of at most 2^53)")


def number_or_auto(text):
    """A finite float, or "auto", for argparse."""
    return text if text == "auto" else number(text)


def listed(kind, *known):
    """The argparse type of "A,B,...": a list without repeats of what `kind` reads, each one of `known` if any are."""

    def read(text):
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if wrong := [value for value in values if known and value not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
        return values

    return read


def add_scaling_flags(parser, several=False):
    """--scale, --rope-scaling, --factor and --chunk of ModelConfig.scaled; of the first two a list, if several."""
    group = parser.add_argument_group("past the trained length, after training")
    methods, more, value = (*SCALINGS, DUAL_CHUNK), "", "X"
    of = {"type": number_or_auto, "default": 1.0}, {"choices": methods, "default": "none"}
    if several:
        more, value = ", or several, each a row", "X,X,..."
        of = {"type": listed(number_or_auto), "default": [1.0]}, {"type": listed(str, *methods), "default": ["none"]}
    group.add_argument(
        "--scale", metavar=value, **of[0],
        help=f"multiply ExPE's and ExQPE's values by a number; auto: trained length / length, 1 within it{more}",
    )  # fmt: skip
    group.add_argument(
        "--rope-scaling", metavar="METHOD" + (",METHOD,..." if several else ""), **of[1],
        help=f"RoPE's {', '.join(methods)}; {DUAL_CHUNK} is for ExPE and ExQPE too{more} (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--factor", type=number_or_auto, metavar="X",
        help="by which linear, ntk, dynamic or yarn lengthens the context (default: auto, length / trained length; in "
             "generate.py the length of prompt and --tokens, or of a full stream)",
    )  # fmt: skip
    group.add_argument("--chunk", type=whole, metavar="N", help=f"{DUAL_CHUNK}'s (default: 3/4 of the trained length)")


def scaling_of(args):
    """What add_scaling_flags read, as keywords of ModelConfig.scaled; InputError for a flag that no method asked reads.

    With several=True, scale and rope_scaling are lists.
    """
    asked = {args.rope_scaling} if isinstance(args.rope_scaling, str) else {*args.rope_scaling}
    if args.factor is not None and not asked - {"none", DUAL_CHUNK}:
        raise InputError(f"--factor is for --rope-scaling {', '.join(SCALINGS[1:])}: leave it out, or ask for one")
    if args.chunk is not None and DUAL_CHUNK not in asked:
        raise InputError(f"--chunk is for --rope-scaling {DUAL_CHUNK}: leave it out, or ask for that")
    factor = "auto" if args.factor is None else args.factor
    return {"scale": args.scale, "rope_scaling": args.rope_scaling, "factor": factor, "chunk": args.chunk}


def add_stream_flags(group):
    """--sinks and --window, which stream_sizes reads."""
    group.add_argument("--sinks", type=whole, metavar="N", help=f"first tokens that a stream keeps (default: {SINKS})")
    group.add_argument(
        "--window", type=whole, metavar="N",
        help="last tokens that a stream keeps (default: what makes a full stream as long as the trained length)",
    )  # fmt: skip


def stream_sizes(args, context):
    """(sinks, window) of a stream; InputError unless they are at least 0 and 1."""
    sinks = SINKS if args.sinks is None else args.sinks
    if args.window is None and sinks > context - 2:
        raise InputError(f"--sinks {sinks} leave no window within the trained length, {context}: give --window too")
    window = context - sinks - 1 if args.window is None else args.window
    for name, value, least in (("sinks", sinks, 0), ("window", window, 1)):
        if value < least:
            raise InputError(f"--{name} must be at least {least}, got {value}")
    return sinks, window


def picture(text):
    """The path of a picture that can be written, for argparse: known by its suffix before the work that leads to it."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)


def new_file(text):
    """The path of a file in a folder that exists and can be written, for argparse."""
    path, folder = Path(text), Path(text).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists and can be written")
    return text


# ---- a run on disk ---------------------------------------------------------------------------------------------------
# runs/<name>/ holds config.json, model.safetensors, optimizer.pt, log.jsonl and tokenizer.tiktoken. config.json names
# the size and the SHA-256 of the checkpoint's files, and replacing it is what commits a checkpoint:
#   1. FILE.new is written for each file, 2. config.json is replaced, 3. each FILE.new is renamed to FILE.
# A run killed before 2 keeps its old checkpoint whole; killed after 2, the files that config.json names are still .new.


def write_json(path, value):
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def write_rows(path, rows):
    """Write a list of objects as JSON, one a line, likewise."""
    write_whole(path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it, and a kill leaves the old one."""
    scratch = Path(f"{path}.new")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def read_json(path):
    """The value of a JSON file; InputError that names the file if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON: it was cut short or edited") from None


def fingerprint(path):
    """{"bytes": ..., "sha256": ...} of a file."""
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def all_runs():
    """Every run directory under runs/, sorted."""
    return sorted(path.parent for path in Path("runs").glob("[!.]*/config.json"))


def runs_to_score(named):
    """The run directories that are named, or else all of them; InputError if there is none."""
    if not (runs := [Path(run) for run in named] or all_runs()):
        raise InputError("there is no run under runs/: train one with python train.py --pe expe --l 24")
    return runs


def read_run(run):
    """(ModelConfig, TrainConfig, all of config.json) of a run directory; InputError that says what is wrong with it."""
    run = Path(run)
    if not run.is_dir():
        raise InputError(f"{run}: no such run directory; train one with: python train.py --out {run}")
    if not (run / "config.json").exists():
        raise InputError(f"{run} holds no config.json, so it is not a run directory of train.py")
    record = read_json(run / "config.json")
    try:
        model, train = ModelConfig.from_dict(record["model"]), TrainConfig.from_dict(record["train"])
        _ = record["data"]["folder"], record["data"]["pattern"], record["data"]["tokenizer"]["sha256"]
        if not isinstance(record["checkpoint"]["step"], int) or not isinstance(record["checkpoint"]["files"], dict):
            raise InputError("checkpoint must hold a step and its files")
        return model, train, record
    except InputError as error:
        raise InputError(f"{run / 'config.json'}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run / 'config.json'} lacks {error}: it was cut short or edited") from None


def checkpoint_file(run, record, name):
    """The path of a checkpoint's file, FILE or still FILE.new, whose size and hash are config.json's.

    Raises InputError that says whether the file is missing, or its size or its hash is off.
    """
    path, expected = Path(run) / name, record["checkpoint"]["files"].get(name)
    found = None
    for candidate in (Path(f"{path}.new"), path):
        with contextlib.suppress(FileNotFoundError):
            found = fingerprint(candidate)
            if found == expected:
                return candidate
    if expected is None or not path.exists():
        raise InputError(f"{path} is missing" if expected else f"{run}/config.json does not name {name}: it was edited")
    if found["bytes"] != expected["bytes"]:
        raise InputError(
            f"{path} has a size of {found['bytes']:,} bytes and config.json says {expected['bytes']:,}: "
            "it was cut short or replaced"
        )
    raise InputError(f"{path} has the right size and the wrong SHA-256 hash: it was damaged or replaced")


def read_weights(path, shapes):
    """{name: float32 array} of a .safetensors file; InputError unless its names and shapes are those of `shapes`."""
    import safetensors.numpy

    try:
        weights = safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a safetensors file of NumPy's types: {error}") from None
    for name in [*shapes, *weights]:
        if name not in weights or name not in shapes:
            what = "lacks the" if name in shapes else "has an unknown"
            raise InputError(f"{path} {what} tensor {name}: it is of another model than config.json's")
        found, right = tuple(weights[name].shape), tuple(shapes[name])
        if found != right:
            raise InputError(f"{path}: {name} has the shape {found}, and config.json makes it {right}")
        if weights[name].dtype != "float32":
            raise InputError(f"{path}: {name} must be float32, got {weights[name].dtype}")
    return {name: weights[name] for name in shapes}
