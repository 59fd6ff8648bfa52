"""The settings of a run in dataclasses, each with its rule beside it; the presets, with their table in the paper.

A run has three parts: the settings of its encoding, ModelConfig and TrainConfig. Every field with a help text is a flag
of train.py. A value that breaks a rule raises InputError, which names the flag and says what would be right. Tables 5,
6, 8 and 9 are those of the ExPE paper's preprint.
"""

import dataclasses
import importlib
import math
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import expe

SPLITS = ("train", "val", "test")

class InputError(ValueError):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""

# ---- fields, and their rules: (words, whether a value keeps it) ------------------------------------------------------

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
NOT_NEGATIVE = number("a finite number of at least 0", lambda x: x >= 0)
BELOW_ONE = number("at least 0 and below 1", lambda x: 0 <= x < 1)
TRUTH = "true or false", lambda x: isinstance(x, bool)
TEXT = "a name or a path", lambda x: isinstance(x, str) and x != ""

def knob(default, rule, help=None, flag=None):
    """A field with its rule; with a help text it is a flag of train.py, of the field's name unless `flag` is given."""
    return field(default=default, metadata={"rule": rule, "help": help, "flag": flag})

def flag_of(f):
    return f.metadata["flag"] or "--" + f.name.replace("_", "-")

class Checked:
    """A dataclass that checks each field by its rule, and then what ties two of them together."""
    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            words, holds = f.metadata["rule"]
            if not holds(value) and not (value is None and f.default is None):
                raise InputError(f"{flag_of(f)} must be {words}, got {value!r}")
        self.check()

    def check(self):
        """InputError for fields that do not go together."""

# ---- the encodings: what each lets you set, and its table ------------------------------------------------------------

@dataclass(frozen=True)
class NoPE(Checked):
    """No encoding, and the base of every other one's settings; make_encoding("expe", l=24) makes them.

    An encoding derives two tables from integer positions: `rows` from each token's (..., T), for the doors embed,
    override and rotate; `pairs` from those of queries (..., T) and keys (..., S), for score and value. Both are
    float64, or integers that look something up, or None.
    """

    pe: str = knob(dataclasses.MISSING, TEXT)
    both_sides: ClassVar[bool] = True           # whether it has a meaning where later keys are seen too

    def fit(self, model):
        """These settings with the defaults that depend on the model filled in; InputError for what does not fit it."""
        return self

    def longest(self, model):
        """Tokens in the longest sequence that has positions."""
        return math.inf

    def rows(self, positions, model):
        return None

    def pairs(self, queries, keys, model):
        return None

@dataclass(frozen=True)
class Sinusoidal(NoPE):
    base: float = knob(10000.0, number("a finite number above 1", lambda x: x > 1), "base of the frequencies")

    def rows(self, positions, model):
        return expe.sinusoidal_table(positions, model.d_model, self.base)                      # (..., T, C)

@dataclass(frozen=True)
class Learned(NoPE):
    n_positions: int = knob(0, whole(0), "rows of the learned table; 0: as many as the context")

    def fit(self, model):
        if self.longest(model) < model.context:
            raise InputError(f"--n-positions must be 0 or at least --context, {model.context}, got {self.n_positions}")
        return self

    def longest(self, model):
        return self.n_positions or model.context

    def rows(self, positions, model):
        return expe.learned_rows(positions, self.longest(model))                               # (..., T)

@dataclass(frozen=True)
class Override(NoPE):
    """What ExPE and ExQPE share: rows that override the first l dimensions of what enters W_q and W_k.

    `trained` names the two numbers that --learn trains, in the order of encoding.weight.
    """

    l: int = knob(24, SIZE, "overridden dimensions (the paper's tables 6 and 9)")
    start: float | None = knob(None, number(), "value at position 0, the paper's S")
    on: str = knob("qk", one_of("k", "q", "qk", "qkv"), "whose input is overridden")
    once: bool = knob(False, TRUTH, "ablation: override the residual stream once, before the first block")
    learn: str = knob("none", one_of("none", "init", "random"), "train start and theta, from defaults or random values")
    scale: float = knob(1.0, POSITIVE)          # after training: by which all values are multiplied (section 4.3)

    def check(self):
        if self.once and self.on != "qk":
            raise InputError("--once overrides the residual stream, --on the input of attention: leave one of them out")
        if self.learn == "random" and any(getattr(self, name) is not None for name in self.trained):
            raise InputError(f"--learn random draws its own numbers: leave out --{' and --'.join(self.trained)}")

    def fit(self, model):
        if self.l > model.d_model:
            raise InputError(f"--l must be from 1 to the width, {model.d_model}, got {self.l}")
        drawn = self.trained if self.learn == "random" else ()         # these have no default
        return replace(self, **{name: value for name, value in self.defaults(model.context).items()
                                if getattr(self, name) is None and name not in drawn})

@dataclass(frozen=True)
class ExPE(Override):
    """The paper's equations 2 and 3."""

    theta: float | None = knob(None, number(), "step between positions (default: 1/(4 x context); --on k: 64/context)")
    constant: bool = knob(False, TRUTH, 'the ablation "p is stable": the same number in all l dimensions')
    trained: ClassVar[tuple] = ("start", "theta")

    def defaults(self, context):
        return {"start": 0.0, "theta": 64 / context if self.on == "k" else 1 / (4 * context)}

    def rows(self, positions, model):
        step = 0 if self.constant else 1
        if self.learn == "none":
            return self.scale * expe.expe_table(positions, self.l, self.start, self.theta, step)
        return self.scale * expe.affine_parts(lambda a, b: expe.expe_table(positions, self.l, a, b, step))

@dataclass(frozen=True)
class ExQPE(Override):
    """The paper's equations 4 and 5."""

    theta1: float | None = knob(None, number(), "ExQPE's step between dimensions (default: 1/(4 x context))")
    theta2: float | None = knob(None, number(), "by how much ExQPE raises a dimension at its turn (default: 1/16)")
    trained: ClassVar[tuple] = ("theta1", "theta2")

    def defaults(self, context):
        return {"start": 0.0, "theta1": 1 / (4 * context), "theta2": 1 / 16}

    def rows(self, positions, model):
        if self.learn == "none":
            return self.scale * expe.exqpe_table(positions, self.l, self.start, self.theta1, self.theta2)
        return self.scale * expe.affine_parts(lambda a, b: expe.exqpe_table(positions, self.l, self.start, a, b))

@dataclass(frozen=True)
class RoPE(Sinusoidal):
    def fit(self, model):
        if model.d_head % 2:
            raise InputError(f"--pe {self.pe} needs an even --width / --heads, got {model.d_head}")
        return self

    def rows(self, positions, model):
        return expe.rope_table(positions, model.d_head, self.base)[..., None, :, :]            # (..., 1, T, D)

@dataclass(frozen=True)
class ALiBi(NoPE):
    slopes: float = knob(1.0, POSITIVE, "by which ALiBi's slopes are multiplied")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys).astype(float)
        return self.slopes * (d if model.causal else abs(d))[..., None, :, :]                  # (..., 1, T, S)

@dataclass(frozen=True)
class T5(NoPE):
    buckets: int = knob(32, whole(4, 1024), "buckets of distances")
    max_distance: int = knob(128, whole(1, 2**16), "distance from which on all share a bucket")

    def check(self):
        if self.max_distance <= self.buckets // 2:
            raise InputError(f"--max-distance must be above half of --buckets, {self.buckets}, got {self.max_distance}")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)
        return expe.t5_bucket(d, self.buckets, self.max_distance, not model.causal)            # (..., T, S)

@dataclass(frozen=True)
class Shaw(NoPE):
    max_distance: int = knob(16, whole(1, 2**16), "distance from which on all share a vector")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)[..., None, :, :]                                     # (..., 1, T, S)
        return expe.shaw_index(d, self.max_distance, not model.causal)

CORE = {"nope": NoPE, "sinusoidal": Sinusoidal, "learned": Learned, "expe": ExPE, "exqpe": ExQPE, "rope": RoPE,
        "alibi": ALiBi, "t5": T5, "shaw": Shaw}
FILES = {path.stem for path in (Path(__file__).parent / "zoo").glob("*.py")
         if re.search(r"^(class )?Settings\b", path.read_text(encoding="utf-8"), re.MULTILINE)}
ENCODINGS = (*CORE, *sorted(FILES - {*CORE}))   # the names that --pe takes; zoo/NAME.py is found by being there

def zoo_module(name):
    """zoo/NAME.py, which is imported when its encoding, softmax or layer is first asked for: the one plug-in."""
    return importlib.import_module(f"zoo.{name}")

def settings_class(pe):
    """The class of an encoding's settings; InputError for a name that is none of ENCODINGS."""
    if pe not in ENCODINGS:
        raise InputError(f"--pe must be one of {', '.join(ENCODINGS)}, got {pe!r}")
    return CORE[pe] if pe in CORE else zoo_module(pe).Settings

def make_encoding(pe="nope", **settings):
    """The settings of an encoding. InputError for a name or a value that is wrong, TypeError for an unknown setting."""
    return settings_class(pe)(pe, **settings)

# ---- the model -------------------------------------------------------------------------------------------------------

@dataclass
class ModelConfig(Checked):
    """The shape of the GPT. d_mlp and the encoding's defaults are filled in when it is made."""

    n_layers: int = knob(dataclasses.MISSING, whole(1, 10_000), "blocks", "--layers")
    d_model: int = knob(dataclasses.MISSING, SIZE, "width of the model; sets --mlp-width to 4 times it", "--width")
    n_heads: int = knob(dataclasses.MISSING, SIZE, "attention heads of a block", "--heads")
    context: int = knob(dataclasses.MISSING, SIZE, "trained length, in tokens")
    vocab_size: int = knob(dataclasses.MISSING, whole(2, 2**16), "entries of the vocabulary", "--vocab")
    norm: str = knob("layernorm", one_of("layernorm", "rmsnorm"), "layernorm (with bias) or rmsnorm")
    mlp: str = knob("gelu", one_of("gelu", "swiglu"), "gelu (tanh form) or swiglu")
    d_mlp: int | None = knob(None, SIZE, "hidden width of the MLP", "--mlp-width")
    tied: bool = knob(False, TRUTH, "the output layer shares the embedding's weights")
    dropout: float = knob(0.0, BELOW_ONE, "rate on the embedding and on each residual branch")
    norm_eps: float = knob(1e-5, POSITIVE)
    causal: bool = knob(True, TRUTH, "a query sees no later key; --no-causal: it sees all keys")
    nope_every: int = knob(0, whole(0), "blocks N, 2N, ... have no encoding and see all keys (RNoPE); 0: none")
    window: int = knob(0, whole(0), "every block but those of --nope-every sees the last N keys alone; 0: all")
    softmax: str = knob("plain", one_of("plain", "log", "sinks", "llama4", "stick"), "plain, or one of zoo/softmax.py")
    encoding: NoPE = knob(NoPE("nope"), ("made by make_encoding", lambda x: isinstance(x, NoPE)))

    def check(self):
        if self.d_model % self.n_heads:
            raise InputError(f"--heads must be a divisor of --width, {self.d_model}, got {self.n_heads}")
        if self.nope_every == 1 or self.nope_every > self.n_layers:
            raise InputError(f"--nope-every must be 0, or from 2 to --layers, {self.n_layers}, got {self.nope_every}")
        if not self.causal and (self.window or self.softmax == "stick"):
            raise InputError("--window and --softmax stick look back: give no --no-causal, and no --objective mlm")
        if self.softmax == "llama4" and self.encoding.pe != "nope" and not self.nope_every:
            raise InputError("--softmax llama4 is for blocks without an encoding: give --nope-every too, or --pe nope")
        self.d_mlp = self.d_mlp or 4 * self.d_model
        self.encoding = self.encoding.fit(self)

    @property
    def d_head(self):
        return self.d_model // self.n_heads

    def block(self, i):
        """(encoding, window) of block i, counted from 0: which encoding it has, and how many keys it sees (0: all)."""
        if self.nope_every and (i + 1) % self.nope_every == 0:
            return make_encoding("nope"), 0
        return self.encoding, self.window

    @classmethod
    def from_dict(cls, values):
        """The inverse of dataclasses.asdict."""
        return cls(**values | {"encoding": make_encoding(**values["encoding"])})

# ---- the training run ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TrainConfig(Checked):
    """One training run: its data, its steps and its optimizer. A batch is counted in sequences of `context` tokens."""

    steps: int = knob(dataclasses.MISSING, SIZE, "optimizer steps")
    batch_size: int = knob(dataclasses.MISSING, whole(1, 2**20), "sequences that one optimizer step sees")
    lr: float = knob(dataclasses.MISSING, POSITIVE, "peak learning rate; --end-lr follows in proportion")
    end_lr: float = knob(dataclasses.MISSING, NOT_NEGATIVE, "learning rate of the last step")
    micro_batch: int = knob(0, whole(0), "sequences in memory at once, at most; 0: the whole batch")
    warmup: float = knob(0.1, BELOW_ONE, "share of the steps in which the rate climbs linearly to --lr")
    beta1: float = knob(0.9, BELOW_ONE, "AdamW's decay of the first moment")
    beta2: float = knob(0.95, BELOW_ONE, "AdamW's decay of the second moment")
    weight_decay: float = knob(0.1, NOT_NEGATIVE, "AdamW's decoupled decay, on matrices only")
    clip: float = knob(1.0, POSITIVE, "largest norm of the whole gradient")
    backend: str = knob("torch", one_of("torch", "numpy"), "torch, or numpy: gradients written by hand, on the CPU")
    dtype: str = knob("fp32", one_of("fp32", "tf32", "bf16"), "tf32: matrix products in TF32 on a GPU; bf16: autocast")
    fast: bool = knob(False, TRUTH, "use engine/fast.py: the same losses in less time and memory")
    objective: str = knob("lm", one_of("lm", "mlm"), "lm: next tokens; mlm: masked (Devlin 2019), sets --no-causal")
    random_positions: int = knob(0, whole(0), "P: train at positions drawn from 0 .. P-1 (Ruoss et al. 2023)")
    seed: int = knob(0, whole(0, 2**32 - 1), "seed of the first weights, the order of the data and dropout")
    data: str = knob("stdlib", TEXT, "stdlib, packages, fineweb, fineweb-edu, task:NAME, or a path of text or tokens")
    init_from: str = knob("none", TEXT, "begin with the weights of the run in this directory")
    min_doc_tokens: int = knob(1, SIZE)         # of documents, where data is prepared on the way
    max_tokens: int = knob(0, whole(0))         # to collect then; 0: all
    eval_every: int = knob(250, SIZE, "steps from one validation loss to the next")
    checkpoint_every: int = knob(500, SIZE, "steps from one checkpoint to the next")

    def check(self):
        if self.end_lr > self.lr:
            raise InputError(f"--end-lr must be from 0 to --lr, {self.lr}, got {self.end_lr}")
        if self.backend == "numpy" and self.dtype != "fp32":
            raise InputError("--backend numpy computes in fp32: leave out --dtype")

class Preset(NamedTuple):
    """A model and how it is trained. Its encoding is ExPE as the paper sets it; ExQPE takes l from it."""

    model: ModelConfig
    train: TrainConfig

def _llama(n_layers, d_model, n_heads, d_mlp, l, lr, micro_batch, tied):
    """Tables 8 and 9: 10B tokens in batches of 0.5M. The paper has no MLP width: these make 135M and 342M come out."""
    return Preset(
        ModelConfig(n_layers, d_model, n_heads, context=512, vocab_size=32768, norm="rmsnorm", mlp="swiglu",
                    d_mlp=d_mlp, tied=tied, encoding=make_encoding("expe", l=l)),
        TrainConfig(steps=19074, batch_size=1024, micro_batch=micro_batch, lr=lr, end_lr=lr / 10, warmup=0.05,
                    dtype="bf16", fast=True, data="fineweb-edu", max_tokens=10_000_000_000),
    )

PRESETS = {
    # Ours: minutes on two CPU cores. Documents hold 16 times the context, so that all can be scored at that length.
    "mini": Preset(
        ModelConfig(4, 128, 4, context=128, vocab_size=1024, encoding=make_encoding("expe", l=24)),
        TrainConfig(steps=1600, batch_size=8, lr=4e-3, end_lr=4e-5,             # small batches learn more from a token
                    min_doc_tokens=16 * 128, eval_every=200),
    ),
    # Ours too, for one or two hours on a core: ten tokens for each of its 2.56M parameters.
    "small": Preset(
        ModelConfig(4, 192, 6, context=256, vocab_size=2048, encoding=make_encoding("expe", l=24)),
        TrainConfig(steps=12_500, batch_size=8, lr=3e-3, end_lr=3e-5, data="packages", min_doc_tokens=16 * 256),
    ),
    # Tables 5 and 6; 600M training tokens of documents of 4,000 tokens or more (section 3.1).
    "paper-35m": Preset(
        ModelConfig(6, 384, 12, context=512, vocab_size=32000, dropout=0.1, encoding=make_encoding("expe", l=24)),
        TrainConfig(steps=2289, batch_size=512, micro_batch=64, lr=1e-3, end_lr=3e-6, fast=True,
                    data="fineweb", min_doc_tokens=4000, max_tokens=700_000_000),
    ),
    "llama-135m": _llama(12, 768, 12, d_mlp=2048, l=96, lr=6e-4, micro_batch=64, tied=False),
    "llama-342m": _llama(24, 1024, 16, d_mlp=2816, l=128, lr=3e-4, micro_batch=32, tied=True),
}

def configure(flags, pe, preset):
    """(ModelConfig, TrainConfig) of a preset, with {field: value} of the flags that were given."""
    model, train = PRESETS[preset]
    encoding = make_encoding(pe, **pick({"l": model.encoding.l} | flags, settings_class(pe)))
    changes = pick(flags, ModelConfig)
    if "d_model" in flags:
        changes.setdefault("d_mlp", None)
    if flags.get("objective") == "mlm":
        changes.setdefault("causal", False)
    model = replace(model, encoding=encoding, **changes)
    changes = pick(flags, TrainConfig)
    if "lr" in flags:
        changes.setdefault("end_lr", train.end_lr * flags["lr"] / train.lr)
    train = replace(train, **changes)
    if model.causal and train.objective == "mlm" or not (model.causal or model.encoding.both_sides):
        raise InputError("--objective mlm sees both sides: leave out --causal" if model.causal else
                         f"--pe {pe} looks back: give no --no-causal, and no --objective mlm")
    if train.random_positions:
        longest = model.encoding.longest(model)
        most = f" to {longest} (--n-positions)" if math.isfinite(longest) else " on"
        if (kind := type(model.encoding)).rows is NoPE.rows and kind.pairs is NoPE.pairs:
            raise InputError(f"--random-positions is for an encoding that reads positions: leave it out of --pe {pe}")
        if not model.context <= train.random_positions <= longest:
            raise InputError(f"--random-positions must be from {model.context} (--context){most}, got "
                             f"{train.random_positions}")
    return model, train

def fields_of(pe):
    """The fields of a run's three parts: the settings of its encoding, ModelConfig and TrainConfig."""
    return [f for kind in (settings_class(pe), ModelConfig, TrainConfig) for f in dataclasses.fields(kind)]

def pick(flags, kind):
    """The flags that are fields of a dataclass, without pe, which every encoding has and make_encoding takes first."""
    return {f.name: flags[f.name] for f in dataclasses.fields(kind) if f.name in flags and f.name != "pe"}
