"""Every knob of a run in frozen dataclasses, each with its rule beside it; the presets, with their table in the paper.

A run is three of them: EncodingConfig (how positions enter), ModelConfig (the shape of the GPT) and TrainConfig. Every
field with a help text is a flag of train.py. A wrong value raises InputError, a ValueError that names the field, the
value and the rule. Tables 5, 6, 8 and 9 are those of the ExPE paper's preprint (appendices B and C).
"""

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import expe


class InputError(ValueError):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""

class Unused(InputError):
    """What the user gave is for other encodings, and this one has no use for it."""


# ---- knobs and their rules -------------------------------------------------------------------------------------------
# A rule is (its words, a function that says whether a value keeps it).

def whole(low, high=2**53):
    words = f"a whole number of at least {low:,}" if high == 2**53 else f"a whole number from {low:,} to {high:,}"
    return words, lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high

def number(words="a finite number", holds=lambda x: True):
    return words, lambda x: (
        isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max and bool(holds(x)))

def one_of(*names):
    return f"{', '.join(names[:-1])} or {names[-1]}", lambda x: x in names

SIZE = whole(1)
POSITIVE = number("a finite number above 0", lambda x: x > 0)
BELOW_ONE = number("at least 0 and below 1", lambda x: 0 <= x < 1)
FACTOR = number("above 0 and at most 1e6", lambda x: 0 < x <= 1e6)
LIST = "numbers above 0", lambda x: isinstance(x, tuple) and all(map(POSITIVE[1], x))
TRUTH = "true or false", lambda x: isinstance(x, bool)

def knob(default, rule, help=None, flag=None):
    """A field with its rule; with a help text it is a flag of train.py, named after the field unless `flag` is given.

    A default of None is filled in where more is known, and then keeps the rule too.
    """
    return field(default=default, metadata={"rule": rule, "help": help, "flag": flag})

class Knobs:
    """A dataclass of knobs: checks each by its rule, then what ties two of them together."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, (words, holds) = getattr(self, f.name), f.metadata["rule"]
            if not holds(value) and not (value is None and f.default is None):
                raise InputError(f"{f.name} must be {words}, got {value!r}")
        self.check()

    def check(self):
        """InputError for fields that do not go together; fills in those that depend on others."""

    @classmethod
    def from_dict(cls, values):
        """The inverse of dataclasses.asdict; InputError for a missing or unknown field."""
        try:
            return cls(**values)
        except TypeError as error:                                     # Python's own words name the field
            raise InputError(str(error).replace(".__init__()", "")) from None


# ---- the encodings: what each lets you set, and its table ------------------------------------------------------------

@dataclass(frozen=True)
class EncodingConfig(Knobs):
    """How positions enter: EncodingConfig("expe", l=24) is an object of that encoding's own class in ENCODINGS.

    Here none does (NoPE). An encoding knows two things of positions n, integers of shape (..., T): `rows`, by the
    position of each token, for the doors embed, override and rotate; `pairs`, by those of queries (..., T) and keys
    (..., S), for score and value. Both are float64, or integers that look something up, or None. `model` is the
    ModelConfig. Raises Unused for a setting that is another encoding's.
    """

    pe: str = knob("nope", ("a name", lambda x: isinstance(x, str)))
    each_block: ClassVar[bool] = False          # whether each block has parameters of its own (then embed is shut)
    both_sides: ClassVar[bool] = True           # whether it has a meaning where later keys are seen too

    def __new__(cls, pe="nope", **settings):
        if cls is EncodingConfig and pe not in ENCODINGS:
            raise InputError(f"pe must be one of {', '.join(ENCODINGS)}, got {pe!r}")
        kind = ENCODINGS[pe] if cls is EncodingConfig else cls
        for name in settings:
            if name not in kind.__dataclass_fields__:
                readers = [pe for pe, other in ENCODINGS.items() if name in other.__dataclass_fields__]
                raise Unused(f"{name} is for {' and '.join(readers) or 'no encoding'}, and {pe} has no use for it: "
                             "leave it out")
        return object.__new__(kind)

    def __post_init__(self):
        super().__post_init__()
        if ENCODINGS[self.pe] is not type(self):
            raise InputError(f"pe {self.pe!r} is another encoding's name: make this one by EncodingConfig(name, ...)")

    @classmethod
    def from_dict(cls, values):
        """Of a run's config.json; those of earlier versions hold None for what the encoding has not, and a chunk."""
        if not isinstance(values, dict) or not isinstance(values.get("pe"), str):
            raise InputError("EncodingConfig lacks the field 'pe', a name")
        return cls(**{name: value for name, value in values.items() if value is not None and name != "chunk"})

    def fit(self, model):
        """These settings for a model, those that depend on it filled in; InputError for what does not fit it."""
        return self

    def longest(self, model):
        """Tokens in the longest sequence that has positions."""
        return math.inf

    def rows(self, positions, model):
        return None

    def pairs(self, queries, keys, model):
        return None

@dataclass(frozen=True)
class Sinusoidal(EncodingConfig):
    base: float = knob(10000.0, number("a finite number above 1", lambda x: x > 1), "base of the frequencies")

    def rows(self, positions, model):
        return expe.sinusoidal_table(positions, model.d_model, self.base)                      # (..., T, C)

@dataclass(frozen=True)
class Learned(EncodingConfig):
    n_positions: int = knob(0, whole(0), "rows of learned's table; 0: as many as the context")

    def fit(self, model):
        if self.longest(model) < model.context:
            raise InputError(f"n_positions must be 0 or at least the context, {model.context}, got {self.n_positions}")
        return self

    def longest(self, model):
        return self.n_positions or model.context

    def rows(self, positions, model):
        return expe.learned_rows(positions, self.longest(model))                               # (..., T)

@dataclass(frozen=True)
class Override(EncodingConfig):
    """What ExPE and ExQPE share: rows that override the first l dimensions of what enters W_q and W_k."""

    l: int = knob(24, SIZE, "overridden dimensions (default: the preset's; tables 6 and 9)")
    start: float | None = knob(None, number(), "value at position 0, the paper's S (default: 0)")
    on: str = knob("qk", one_of("k", "q", "qk", "qkv"), "whose input is overridden: k, q, qk or qkv (default: qk)")
    once: bool = knob(False, TRUTH, "the ablation: override the residual stream before block 1, and nothing after that")
    learn: str = knob("none", one_of("none", "init", "random"),
                      "train the two numbers that set the ramp: init from their values, random from N(0, 1), or none")
    scale: float = knob(1.0, FACTOR)            # after training: by which all values are multiplied (section 4.3)

    trained: ClassVar[tuple] = ()               # the two numbers that --learn trains, in the order of encoding.weight

    def check(self):
        if self.once and self.on != "qk":
            raise InputError("once overrides the residual stream, on the input of attention: leave one of them out")
        for name in self.drawn():
            if (value := getattr(self, name)) is not None:
                raise InputError(f"learn random draws {name}, and {value} is given: leave one out")

    def drawn(self):
        return self.trained if self.learn == "random" else ()

    def fit(self, model):
        if self.l > model.d_model:
            raise InputError(f"l must be from 1 to d_model, {model.d_model}, got {self.l}")
        ramp = 1 / (4 * model.context)
        keys = 64 / model.context                                      # what keys alone do best with: docs/evidence.md
        values = {"start": 0.0, "theta": keys if self.on == "k" else ramp, "theta1": ramp, "theta2": 1 / 16}
        return replace(self, **{name: values[name] for name in values.keys() & self.__dataclass_fields__.keys()
                                if getattr(self, name) is None and name not in self.drawn()})

    def rows(self, positions, model):
        """(..., T, l); under --learn its three parts, (..., T, l, 3): the table is affine in the numbers trained."""
        def scaled(a, b):
            return self.scale * self.table(positions, a, b)
        if self.learn != "none":
            return expe.affine_parts(scaled)
        return scaled(*(getattr(self, name) for name in self.trained))

@dataclass(frozen=True)
class ExPE(Override):
    """The paper's equations 2 and 3."""

    theta: float | None = knob(None, number(), "ExPE's step from one position to the next "
                               "(default: 1/(4 x context), table 9's 1/2048 at 512; with --on k 64/context)")
    constant: bool = knob(False, TRUTH, 'the ablation "p is stable": the same number in all l dimensions')
    trained: ClassVar[tuple] = ("start", "theta")

    def table(self, positions, start, theta):
        return expe.expe_table(positions, self.l, start, theta, step=0 if self.constant else 1)

@dataclass(frozen=True)
class ExQPE(Override):
    """The paper's equations 4 and 5."""

    theta1: float | None = knob(None, number(), "ExQPE's step from one dimension to the next (default: as theta)")
    theta2: float | None = knob(None, number(), "by how much ExQPE raises a dimension at its turn (default: 1/16)")
    trained: ClassVar[tuple] = ("theta1", "theta2")

    def table(self, positions, theta1, theta2):
        return expe.exqpe_table(positions, self.l, self.start, theta1, theta2)

@dataclass(frozen=True)
class RoPE(Sinusoidal):
    rope_scaling: str = knob("none", one_of(*expe.ROPE_SCALINGS))      # all these after training: past/scaling.py
    factor: float = knob(1.0, FACTOR)
    length: int | None = knob(None, SIZE)                              # of the whole sequence, for dynamic and longrope
    long: tuple | None = knob(None, LIST)                              # longrope's numbers, past the context
    short: tuple | None = knob(None, LIST)                             # and up to it

    def fit(self, model):
        try:
            self.rows([0], model)
        except ValueError as error:                                    # a width that cannot be turned by pairs
            raise InputError(error) from None
        return self

    def rows(self, positions, model):
        scaling = {"scaling": self.rope_scaling, "factor": self.factor, "length": self.length}
        scaling |= {name: list for name, list in (("long", self.long), ("short", self.short)) if list is not None}
        table = expe.rope_table(positions, model.d_head, self.base, trained_length=model.context, **scaling)
        return table[..., None, :, :]                                                          # (..., 1, T, D)

@dataclass(frozen=True)
class ALiBi(EncodingConfig):
    slopes: float = knob(1.0, POSITIVE, "by which ALiBi's slopes are multiplied (default: 1)")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys).astype(float)
        return self.slopes * (d if model.causal else abs(d))[..., None, :, :]                  # (..., 1, T, S)

@dataclass(frozen=True)
class T5(EncodingConfig):
    buckets: int = knob(32, whole(2, 1024), "T5's buckets of distances (default: 32)")
    max_distance: int = knob(128, whole(1, 2**16), "distance from which on T5 (default: 128) and Shaw (default: 16) do "
                             "not tell two apart")

    def check(self):
        if self.max_distance <= self.buckets // 2:
            least = self.buckets // 2 + 1
            raise InputError(f"max_distance must be a whole number from {least} to 65,536, got {self.max_distance}")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)
        return expe.t5_bucket(d, self.buckets, self.max_distance, not model.causal)            # (..., T, S)

@dataclass(frozen=True)
class Shaw(EncodingConfig):
    max_distance: int = knob(16, whole(1, 2**16), T5.__dataclass_fields__["max_distance"].metadata["help"])

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)[..., None, :, :]                                     # (..., 1, T, S)
        return expe.shaw_index(d, self.max_distance, not model.causal)

class Registry(Mapping):
    """Something of every encoding, by its name: the reference's own, and then what the files of zoo/ hold of it.

    zoo/NAME.py is found by being there. Its names are listed, and the file is read when it is first asked for: the
    reference never imports one by name, and works without them. zoo/_NAME.py makes of any encoding the one +NAME.
    """

    def __init__(self, own, part):
        self.own, self.read, self.part = tuple(own), dict(own), part

    def __getitem__(self, name):
        of, _, last = name.rpartition("+")                             # rope+sinks: what zoo/_sinks.py makes of rope
        file = f"_{last}" * (of in self and last not in of.split("+")) if of else name * (name[:1] != "_")
        if name not in self.read and file in _zoo():
            try:
                part = self.part(importlib.import_module(f"zoo.{file}"))
                self.read[name] = part(self[of]) if of else part
            except Exception as error:                                 # whatever a file of the user's can raise
                raise InputError(f"zoo/{file}.py cannot be used: {type(error).__name__}: {error}") from error
        return self.read[name]

    def __iter__(self):
        return iter(dict.fromkeys((*self.own, *(name for name in _zoo() if name[0] != "_"))))

    def __len__(self):
        return len(list(iter(self)))

    def check(self):
        """InputError for a file in zoo/ that no name leads to."""
        if taken := [name for name in self.own if name in _zoo()]:
            raise InputError(f"zoo/{taken[0]}.py has the name of an encoding that is here already: rename it")

@functools.cache
def _zoo():
    return [path.stem for path in sorted((Path(__file__).parent / "zoo").glob("*.py"))]

ENCODINGS = Registry(                                                  # in the order of --pe
    {"nope": EncodingConfig, "sinusoidal": Sinusoidal, "learned": Learned, "expe": ExPE, "exqpe": ExQPE, "rope": RoPE,
     "alibi": ALiBi, "t5": T5, "shaw": Shaw},
    lambda module: module.Settings,
)


# ---- the model -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ModelConfig(Knobs):
    """The shape of the GPT."""

    n_layers: int = knob(MISSING, whole(1, 10_000), "blocks", "--layers")
    d_model: int = knob(MISSING, SIZE, "width of the residual stream", "--width")
    n_heads: int = knob(MISSING, SIZE, "attention heads of a block", "--heads")
    context: int = knob(MISSING, SIZE, "trained length, in tokens")
    vocab_size: int = knob(MISSING, whole(2, 2**16), "entries of the vocabulary", "--vocab")
    norm: str = knob("layernorm", one_of("layernorm", "rmsnorm"), "layernorm (with bias) or rmsnorm")
    mlp: str = knob("gelu", one_of("gelu", "swiglu"), "gelu (tanh form) or swiglu")
    d_mlp: int | None = knob(None, SIZE, "hidden width of the MLP (default: the preset's; 4 x --width)", "--mlp-width")
    tied: bool = knob(False, TRUTH, "the output layer shares the embedding's weights")
    dropout: float = knob(0.0, BELOW_ONE, "rate on the embedding and on each residual branch")
    norm_eps: float = knob(1e-5, number("above 0", lambda x: x > 0))
    causal: bool = knob(True, TRUTH, "a query sees no later key; --no-causal shows what order the encoding alone knows")
    nope_every: int = knob(0, ("0 or a whole number of at least 2", lambda x: whole(0)[1](x) and x != 1),
                           "blocks N, 2N, ... have no encoding and see all (RNoPE); 0: none")
    window: int = knob(0, whole(0), "the other blocks see the last N keys, a query's own among them; 0: all")
    encoding: EncodingConfig = field(default_factory=EncodingConfig, metadata={
        "rule": ("an EncodingConfig", lambda x: isinstance(x, EncodingConfig))})

    def check(self):
        if self.d_model % self.n_heads:
            raise InputError(f"n_heads must be a divisor of d_model, {self.d_model}, got {self.n_heads}")
        if self.nope_every > self.n_layers:
            raise InputError(f"nope_every must be at most n_layers, {self.n_layers}, got {self.nope_every}")
        if self.window and not self.causal:
            raise InputError("window counts the keys before a query: it needs a causal model")
        if self.d_mlp is None:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        object.__setattr__(self, "encoding", self.encoding.fit(self))

    @property
    def d_head(self):
        return self.d_model // self.n_heads

    def block(self, i):
        """(encoding, window) of block i, counted from 0: which encoding it has, and how many keys it sees (0: all)."""
        if self.nope_every and (i + 1) % self.nope_every == 0:
            return EncodingConfig("+".join(("nope", *self.encoding.pe.split("+")[1:]))), 0
        return self.encoding, self.window

    @classmethod
    def from_dict(cls, values):
        if isinstance(values, dict) and "encoding" in values:
            values = {**values, "encoding": EncodingConfig.from_dict(values["encoding"])}
        return super().from_dict(values)


# ---- the training run ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TrainConfig(Knobs):
    """One training run: its data, its steps and its optimizer. A batch is counted in sequences of `context` tokens."""

    steps: int = knob(MISSING, SIZE, "optimizer steps")
    batch_size: int = knob(MISSING, whole(1, 2**20), "sequences that one optimizer step sees")
    lr: float = knob(MISSING, POSITIVE, "peak learning rate")
    end_lr: float = knob(MISSING, number("a finite number of at least 0", lambda x: x >= 0),
                         "learning rate of the last step")
    micro_batch: int = knob(0, whole(0), "sequences in memory at once; 0: the whole batch")
    activation_checkpointing: bool = knob(False, TRUTH, "keep a block's input alone, and compute the rest again for "
                                          "its gradient: the same run in less memory, a third slower")
    warmup: float = knob(0.1, number("from 0 to 1", lambda x: 0 <= x <= 1),
                         "share of the steps in which the rate climbs linearly to --lr")
    optimizer: str = knob("adamw", one_of("adamw", "muon"),
                          "adamw, the paper's, or muon for the blocks' matrices and AdamW for the rest")
    beta1: float = knob(0.9, BELOW_ONE, "AdamW's decay of the first moment")
    beta2: float = knob(0.95, BELOW_ONE, "AdamW's decay of the second moment")
    weight_decay: float = knob(0.1, number("a finite number of at least 0", lambda x: x >= 0),
                               "AdamW's decoupled decay, on matrices only")
    clip: float = knob(1.0, POSITIVE, "largest norm of the whole gradient")
    backend: str = knob("torch", one_of("torch", "numpy"),
                        "torch, or numpy: the same model with gradients by hand, in fp32 on the CPU")
    dtype: str = knob("fp32", one_of("fp32", "tf32", "bf16"),
                      "fp32, tf32 (a GPU may round products), or bf16 by autocast, with the weights in fp32")
    objective: str = knob("lm", one_of("lm", "mlm"),
                          "lm: the next token; mlm: masked ones, 15 in 100, both sides in sight (Devlin et al. 2019)")
    random_positions: int = knob(0, whole(0), "P: train at positions drawn of 0 .. P-1, in order, new at each step "
                                 "and the same for a whole batch (Ruoss et al. 2023); 0: at 0, 1, 2, ...")
    seed: int = knob(0, whole(0, 2**32 - 1), "of the first weights, the order of the data and dropout")
    data: str = knob("stdlib", ("stdlib, packages, fineweb, fineweb-edu or a path", lambda x: isinstance(x, str) and x),
                     "stdlib, packages (the requirements' Python), fineweb, fineweb-edu, a file or folder of text, or "
                     "one made by data.py")
    init_from: str = knob("none", ("a run directory, or none", lambda x: isinstance(x, str)),
                          "begin with the weights of another run, whose directory this is")
    min_doc_tokens: int = knob(1, SIZE, "leave shorter documents out when the data is prepared on the way")
    max_tokens: int = knob(0, whole(0), "tokens to collect when the data is prepared on the way; 0: all")
    eval_every: int = knob(250, SIZE, "steps from one validation loss to the next")
    eval_windows: int = knob(256, SIZE, "windows of --context tokens in a validation loss")
    checkpoint_every: int = knob(500, SIZE, "steps from one checkpoint to the next")

    def check(self):
        if self.end_lr > self.lr:
            raise InputError(f"end_lr must be from 0 to lr, {self.lr}, got {self.end_lr}")
        if self.micro_batch == 0:
            object.__setattr__(self, "micro_batch", self.batch_size)
        if self.batch_size % self.micro_batch:
            raise InputError(f"micro_batch must be a divisor of batch_size, {self.batch_size}, got {self.micro_batch}")
        if self.backend == "numpy" and self.dtype != "fp32":
            raise InputError(f"dtype must be fp32 for the NumPy backend (--dtype fp32), got {self.dtype!r}")
        if self.backend == "numpy" and (self.activation_checkpointing or self.optimizer != "adamw"):
            raise InputError("activation_checkpointing and optimizer muon are torch's: not of the NumPy backend")

class Preset(NamedTuple):
    """A model and how it is trained. Its encoding is ExPE as the paper sets it; ExQPE takes l from it."""

    model: ModelConfig
    train: TrainConfig

def _llama(n_layers, d_model, n_heads, d_mlp, l, lr, micro_batch, tied):
    """Tables 8 and 9: 10B tokens in batches of 0.5M. The paper has no MLP width: these make 135M and 342M come out."""
    return Preset(
        ModelConfig(n_layers, d_model, n_heads, context=512, vocab_size=32768, norm="rmsnorm", mlp="swiglu",
                    d_mlp=d_mlp, tied=tied, encoding=EncodingConfig("expe", l=l)),
        TrainConfig(steps=19074, batch_size=1024, micro_batch=micro_batch, lr=lr, end_lr=lr / 10, warmup=0.05,
                    dtype="bf16", data="fineweb-edu", max_tokens=10_000_000_000),
    )

PRESETS = {
    # Ours: minutes on two CPU cores. Documents hold 16 times the context, so that all can be scored at that length.
    "mini": Preset(
        ModelConfig(4, 128, 4, context=128, vocab_size=1024, encoding=EncodingConfig("expe", l=24)),
        TrainConfig(steps=1600, batch_size=8, lr=4e-3, end_lr=4e-5,             # small batches learn more from a token
                    min_doc_tokens=16 * 128, eval_every=200, eval_windows=128),
    ),
    # Tables 5 and 6; 600M training tokens of documents of 4,000 tokens or more (section 3.1).
    "paper-35m": Preset(
        ModelConfig(6, 384, 12, context=512, vocab_size=32000, dropout=0.1, encoding=EncodingConfig("expe", l=24)),
        TrainConfig(steps=2289, batch_size=512, micro_batch=64, lr=1e-3, end_lr=3e-6,
                    data="fineweb", min_doc_tokens=4000, max_tokens=700_000_000),
    ),
    "llama-135m": _llama(12, 768, 12, d_mlp=2048, l=96, lr=6e-4, micro_batch=64, tied=False),
    "llama-342m": _llama(24, 1024, 16, d_mlp=2816, l=128, lr=3e-4, micro_batch=32, tied=True),
}
