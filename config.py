"""The settings of a run in dataclasses, each with its rule beside it; the presets, with their table in the paper.

A run has three parts: the settings of its encoding, ModelConfig and TrainConfig. Every field with a help text is a flag
of train.py. A value that breaks a rule raises InputError, which names the flag and says what would be right. Tables 5,
6, 8 and 9 are those of the ExPE paper's preprint.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib
import math
import operator
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

import expe

SPLITS = ("train", "val", "test")

class InputError(ValueError):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""

@contextlib.contextmanager
def prefix_errors(flag):
    """Put a flag, or a run, before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None

def refuse_unless(finite, what="losses"):
    """InputError unless the losses, or whatever else was computed of a model, are finite."""
    if not finite:
        raise InputError(f"its {what} are not finite numbers: its weights are too large, or its positions as they are "
                         "scaled here: train it again with a lower --lr, or scale less")

# ---- fields, and their rules -----------------------------------------------------------------------------------------

def setting(default=dataclasses.MISSING, help=None, **rule):
    """A field; with a help text it is a flag of train.py. rule: at_least, at_most, above, below a number; or one_of."""
    return field(default=default, metadata={"help": help, "rule": rule})

def flag_of(name):
    return "--" + name.replace("_", "-")

KINDS = {int: "a whole number", float: "a finite number", str: "a name or a path", bool: "true or false"}
RULES = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt,
         "one_of": lambda value, names: value in names}

def kind_of(f):
    """The class of a field's values: int of `int | None`, say, which has no value of its own yet."""
    return f.type if isinstance(f.type, type) else f.type.__args__[0]

def did_you_mean(word, names):
    """A question for the end of an error message, " (did you mean expe?)"; "" if none of the names is near the word."""
    near = difflib.get_close_matches(str(word), names, 1)
    return f" (did you mean {near[0]}?)" if near else ""

def describe_rule(f):
    """What a field's value must be, in words."""
    rule = f.metadata["rule"]
    if "one_of" in rule:
        return f"{', '.join(rule['one_of'][:-1])} or {rule['one_of'][-1]}"
    bounds = " and ".join(f"{word.replace('_', ' ')} {bound:,}" for word, bound in rule.items())
    return ", ".join([KINDS.get(kind_of(f), "made by make_encoding"), *filter(None, [bounds])])

def keeps_rule(value, f):
    """Whether a field's value is of its kind, and keeps its rule."""
    kind = kind_of(f)
    if value is None:
        return f.default is None
    if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        return False
    if kind is float and not abs(value) <= sys.float_info.max:                         # neither NaN nor infinite
        return False
    if kind is int and abs(value) > 2**53 or kind is str and (value == "" or "\0" in value):
        return False
    return all(RULES[word](value, bound) for word, bound in f.metadata["rule"].items())

class Checked:
    """A dataclass that checks each field by its rule, and then what ties two of them together."""
    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not keeps_rule(value, f):
                near = did_you_mean(value, f.metadata["rule"].get("one_of", ()))
                raise InputError(f"{flag_of(f.name)} must be {describe_rule(f)}, got {value!r}{near}")
            if kind_of(f) is float and value is not None:
                object.__setattr__(self, f.name, float(value))         # of a whole number, which JSON may have
        self.check()

    def check(self):
        """InputError for fields that do not go together."""

def from_values(kind, values):
    """A dataclass made of {field: value}; InputError for a field that it does not have, or that is missing."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise InputError(f"{unknown[0]} is no setting of {kind.__name__}")
    if missing := [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]:
        raise InputError(f"{missing[0]} is missing")
    return kind(**values)

# ---- the encodings: what each lets you set, and its table ------------------------------------------------------------

@dataclass(frozen=True)
class NoPE(Checked):
    """No encoding, and the base of every other one's settings; make_encoding("expe", l=24) makes them.

    An encoding derives two tables from integer positions: `rows` from each token's (..., T), for the doors embed,
    override and rotate; `pairs` from those of queries (..., T) and keys (..., S), for score and value. Both are
    float64, or integers that look something up, or None.
    """

    pe: str = setting()
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
    base: float = setting(10000.0, "base of the frequencies", above=1)

    def rows(self, positions, model):
        return expe.sinusoidal_table(positions, model.width, self.base)                      # (..., T, C)

@dataclass(frozen=True)
class Learned(NoPE):
    n_positions: int = setting(0, "rows of the learned table; 0: as many as the context", at_least=0)

    def fit(self, model):
        if self.longest(model) < model.context:
            raise InputError(f"--n-positions must be 0 or at least --context, {model.context}, got {self.n_positions}")
        return replace(self, n_positions=self.longest(model))

    def longest(self, model):
        return self.n_positions or model.context

    def rows(self, positions, model):
        return expe.learned_rows(positions, self.longest(model))                               # (..., T)

@dataclass(frozen=True)
class Override(NoPE):
    """What ExPE and ExQPE share: rows that override the first l dimensions of what enters W_q and W_k.

    `trained` names the two numbers that --learn trains, in the order of encoding.weight.
    """

    l: int = setting(24, "overridden dimensions (the paper's tables 6 and 9)", at_least=1)
    start: float | None = setting(None, "value at position 0, the paper's S")
    on: str = setting("qk", "k, q, qk or qkv: whose input is overridden", one_of=("k", "q", "qk", "qkv"))
    once: bool = setting(False, "ablation: override the residual stream once, before the first block")
    learn: str = setting("none", "init or random: train start and theta, from there", one_of=("none", "init", "random"))
    scale: float = setting(1.0, above=0)        # after training: by which all values are multiplied (section 4.3)

    def check(self):
        if self.once and self.on != "qk":
            raise InputError("--once overrides the residual stream, --on the input of attention: leave one of them out")
        if self.learn == "random" and any(getattr(self, name) is not None for name in self.trained):
            raise InputError(f"--learn random draws its own numbers: leave out --{' and --'.join(self.trained)}")

    def fit(self, model):
        if self.l > model.width:
            raise InputError(f"--l must be from 1 to the width, {model.width}, got {self.l}")
        drawn = self.trained if self.learn == "random" else ()         # these have no default
        return replace(self, **{name: value for name, value in self.defaults(model.context).items()
                                if getattr(self, name) is None and name not in drawn})

@dataclass(frozen=True)
class ExPE(Override):
    """The paper's equations 2 and 3."""

    theta: float | None = setting(None, "step between positions (default: 1/(4 x context); --on k: 64/context)")
    constant: bool = setting(False, 'the ablation "p is stable": the same number in all l dimensions')
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

    theta1: float | None = setting(None, "ExQPE's step between dimensions (default: 1/(4 x context))")
    theta2: float | None = setting(None, "by how much ExQPE raises a dimension at its turn (default: 1/16)")
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
    slopes: float = setting(1.0, "by which ALiBi's slopes are multiplied", above=0)

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys).astype(float)
        return self.slopes * (d if model.causal else abs(d))[..., None, :, :]                  # (..., 1, T, S)

@dataclass(frozen=True)
class T5(NoPE):
    buckets: int = setting(32, "buckets of distances", at_least=4, at_most=1024)
    max_distance: int = setting(128, "distance from which on all share a bucket", at_least=1, at_most=2**16)

    def check(self):
        if self.max_distance <= self.buckets // 2:
            raise InputError(f"--max-distance must be above half of --buckets, {self.buckets}, got {self.max_distance}")

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)
        return expe.t5_bucket(d, self.buckets, self.max_distance, not model.causal)            # (..., T, S)

@dataclass(frozen=True)
class Shaw(NoPE):
    max_distance: int = setting(16, "distance from which on all share a vector", at_least=1, at_most=2**16)

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)[..., None, :, :]                                     # (..., 1, T, S)
        return expe.shaw_index(d, self.max_distance, not model.causal)

CORE = {"nope": NoPE, "sinusoidal": Sinusoidal, "learned": Learned, "expe": ExPE, "exqpe": ExQPE, "rope": RoPE,
        "alibi": ALiBi, "t5": T5, "shaw": Shaw}
ZOO = Path(__file__).parent / "zoo"
VARIANTS = {"expe-on-k": "expe --on k", "exqpe-on-k": "exqpe --on k"}          # {how runs are called: the flags}

def defines_settings(path):
    """Whether a module of zoo/ is an encoding: it has a class, a value or an import of the name Settings.

    It is read and not run, so that no encoding waits for the others or fails with them. A module that Python cannot
    read counts as one, so that --pe NAME shows the error in it.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except OSError:
        return False                                                    # a link to nothing, as some editors make
    except (SyntaxError, ValueError):
        return True
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return "Settings" in names

FILES = {path.stem for path in ZOO.glob("*.py") if defines_settings(path)}
ENCODINGS = (*CORE, *sorted(FILES - {*CORE}))   # the names that --pe takes; zoo/NAME.py is found by being there

def zoo_module(name):
    """zoo/NAME.py, which is imported when its encoding, softmax or layer is first asked for: the one plug-in.

    InputError if the file is not Python. Any other exception is raised inside the file, and keeps its traceback.
    """
    try:
        return importlib.import_module(f"zoo.{name}")
    except SyntaxError as error:
        if error.filename != str(ZOO / f"{name}.py"):
            raise
        raise InputError(f"zoo/{name}.py, line {error.lineno}: {error.msg}") from None

def zoo_part(pe, part):
    """The Settings, doors or Layer of zoo/PE.py; InputError that names the file if it has no such part."""
    if not hasattr(module := zoo_module(pe), part):
        raise InputError(f"zoo/{pe}.py has no {part}: a file of an encoding has Settings, doors and Layer, as "
                         "docs/change.md shows")
    return getattr(module, part)

def settings_class(pe):
    """The class of an encoding's settings; InputError for a name that is none of ENCODINGS."""
    if pe in CORE:
        return CORE[pe]
    if pe not in ENCODINGS and not (pe.isidentifier() and (ZOO / f"{pe}.py").is_file()):
        near = f" (did you mean --pe {VARIANTS[pe]}?)" if pe in VARIANTS else did_you_mean(pe, ENCODINGS)
        raise InputError(f"--pe must be {'the name of an encoding' if near else 'one of ' + ', '.join(ENCODINGS)}, got "
                         f"{pe!r}{near}")
    kind = zoo_part(pe, "Settings")
    if not (isinstance(kind, type) and issubclass(kind, NoPE) and dataclasses.is_dataclass(kind)):
        raise InputError(f"zoo/{pe}.py: Settings must be a dataclass that inherits from NoPE, as docs/change.md shows")
    return kind

def encodings_with(setting):
    """The encodings that have a setting. All of zoo/ is imported, so this is for error messages."""
    found = []
    for pe in ENCODINGS:
        with contextlib.suppress(Exception):                           # of a file of zoo/ that is not asked for
            found += [pe] * (setting in {f.name for f in dataclasses.fields(settings_class(pe)) if f.metadata["help"]})
    return found

def make_encoding(pe="nope", **settings):
    """The settings of an encoding. InputError for a name or a value that is wrong, TypeError for an unknown setting."""
    return settings_class(pe)(pe, **settings)

# ---- the model -------------------------------------------------------------------------------------------------------

@dataclass
class ModelConfig(Checked):
    """The shape of the GPT. mlp_width and the encoding's defaults are filled in when it is made."""

    layers: int = setting(help="blocks", at_least=1, at_most=10_000)
    width: int = setting(help="width of the model; sets --mlp-width to 4 times it", at_least=1)
    heads: int = setting(help="attention heads of a block", at_least=1)
    context: int = setting(help="trained length, in tokens", at_least=1)
    vocab: int = setting(help="entries of the vocabulary", at_least=2, at_most=2**16)
    norm: str = setting("layernorm", "layernorm (with a bias) or rmsnorm", one_of=("layernorm", "rmsnorm"))
    mlp: str = setting("gelu", "gelu (in its tanh form) or swiglu", one_of=("gelu", "swiglu"))
    mlp_width: int | None = setting(None, "hidden width of the MLP", at_least=1)
    tied: bool = setting(False, "the output layer shares the embedding's weights")
    dropout: float = setting(0.0, "rate on the embedding and on each residual branch", at_least=0, below=1)
    norm_eps: float = setting(1e-5, above=0, below=1)
    causal: bool = setting(True, "a query sees no later key; --no-causal: it sees all keys")
    nope_every: int = setting(0, "blocks N, 2N, ... have no encoding and see all keys (RNoPE); 0: none", at_least=0)
    window: int = setting(0, "every block but those of --nope-every sees the last N keys alone; 0: all", at_least=0)
    cycle: str | None = setting(None, "encodings and windows of blocks in turn: rope:window=512,nope (zoo/cycle.py)")
    softmax: str = setting("plain", "plain, or one of zoo/softmax.py",
                           one_of=("plain", "log", "sinks", "llama4", "stick"))
    encoding: NoPE = setting(NoPE("nope"))

    def check(self):
        if self.width % self.heads:
            raise InputError(f"--heads must be a divisor of --width, {self.width}, got {self.heads}")
        if self.nope_every == 1 or self.nope_every > self.layers:
            raise InputError(f"--nope-every must be 0, or from 2 to --layers, {self.layers}, got {self.nope_every}")
        if not self.causal and (self.window or self.softmax == "stick"):
            raise InputError("--window and --softmax stick look back: give no --no-causal, and no --objective mlm")
        self.mlp_width = self.mlp_width or 4 * self.width
        self.encoding = self.encoding.fit(self)
        if "nope" not in [encoding.pe for encoding, _ in self.layer_pattern()] and self.softmax == "llama4":
            raise InputError("--softmax llama4 is for blocks without an encoding: give --nope-every, --pe nope, "
                             "or a --cycle with nope")

    @property
    def d_head(self):
        return self.width // self.heads

    def block(self, i):
        """(encoding, window) of block i, counted from 0: which encoding it has, and how many keys it sees (0: all)."""
        turns = self.layer_pattern()
        return turns[i % len(turns)]

    def layer_pattern(self):
        """The (encoding, window) that blocks have in turn."""
        if self.cycle:
            return zoo_module("cycle").layer_pattern(self)
        no_encoding = [(make_encoding("nope"), 0)] if self.nope_every else []
        return [(self.encoding, self.window)] * max(1, self.nope_every - 1) + no_encoding

    @classmethod
    def from_dict(cls, values):
        """The inverse of dataclasses.asdict; fields may have the names of older runs."""
        renamed = {"n_layers": "layers", "d_model": "width", "n_heads": "heads", "vocab_size": "vocab",
                   "d_mlp": "mlp_width"}
        values = {renamed.get(name, name): value for name, value in values.items()}
        encoding = from_values(settings_class(values["encoding"]["pe"]), values["encoding"])
        return from_values(cls, values | {"encoding": encoding})

# ---- the training run ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TrainConfig(Checked):
    """One training run: its data, its steps and its optimizer. A batch is counted in sequences of `context` tokens."""

    steps: int = setting(help="optimizer steps; with --resume, more than before go on with the run", at_least=1)
    batch_size: int = setting(help="sequences that one optimizer step sees", at_least=1, at_most=2**20)
    lr: float = setting(help="peak learning rate; --end-lr follows in proportion", above=0)
    end_lr: float = setting(help="learning rate of the last step", at_least=0)
    micro_batch: int = setting(0, "sequences in memory at once, at most; 0: the whole batch", at_least=0)
    warmup: float = setting(0.1, "share of the steps in which the rate climbs linearly to --lr", at_least=0, below=1)
    beta1: float = setting(0.9, "AdamW's decay of the first moment", at_least=0, below=1)
    beta2: float = setting(0.95, "AdamW's decay of the second moment", at_least=0, below=1)
    weight_decay: float = setting(0.1, "AdamW's decoupled decay, on matrices only", at_least=0)
    clip: float = setting(1.0, "largest norm of the whole gradient", above=0)
    backend: str = setting("torch", "numpy: gradients written by hand, on the CPU", one_of=("torch", "numpy"))
    dtype: str = setting("fp32", "tf32: matrix products in TF32 on a GPU; bf16: autocast",
                         one_of=("fp32", "tf32", "bf16"))
    fast: bool = setting(False, "use engine/fast.py: the same losses in less time and memory")
    objective: str = setting("lm", "mlm: masked tokens (Devlin 2019), sets --no-causal", one_of=("lm", "mlm"))
    random_positions: int = setting(0, "P: train at positions drawn from 0 .. P-1 (Ruoss et al. 2023)", at_least=0,
                                at_most=2**24)
    seed: int = setting(0, "seed of the first weights, the order of the data and dropout", at_least=0, below=2**32)
    data: str = setting("stdlib", "stdlib, packages, fineweb, fineweb-edu, task:NAME, or a path of text or tokens")
    init_from: str = setting("none", "begin with the weights of the run in this directory")
    min_doc_tokens: int = setting(1, "of --data: drop documents with fewer tokens; of a path the default is 1",
                                  at_least=1)
    max_tokens: int = setting(0, "of --data: end after so many tokens; 0, the default of a path: never", at_least=0)
    max_doc_chars: int = setting(2**20, "of --data: cut documents with more characters at a line's end", at_least=1)
    eval_every: int = setting(250, "steps from one validation loss to the next", at_least=1)
    checkpoint_every: int = setting(500, "steps from one checkpoint to the next", at_least=1)

    def check(self):
        if self.end_lr > self.lr:
            raise InputError(f"--end-lr must be from 0 to --lr, {self.lr}, got {self.end_lr}")
        if self.backend == "numpy" and self.dtype != "fp32":
            raise InputError("--backend numpy computes in fp32: leave out --dtype")

# ---- presets ---------------------------------------------------------------------------------------------------------

# Tables 8 and 9: 10B tokens in batches of 0.5M. The paper has no MLP width: these make 135M and 342M come out.
LLAMA = {"context": 512, "vocab": 32768, "norm": "rmsnorm", "mlp": "swiglu", "steps": 19074, "batch_size": 1024,
         "warmup": 0.05, "dtype": "bf16", "fast": True, "data": "fineweb-edu", "max_tokens": 10_000_000_000}

PRESETS = {
    # Ours: minutes on two CPU cores. Documents hold 16 times the context, so that all can be scored at that length.
    # Small batches learn more from a token.
    "mini": {
        "layers": 4, "width": 128, "heads": 4, "context": 128, "vocab": 1024, "l": 24, "steps": 1600,
        "batch_size": 8, "lr": 4e-3, "end_lr": 4e-5, "min_doc_tokens": 16 * 128, "eval_every": 200},
    # Ours too, for one or two hours on a core: ten tokens for each of its 2.56M parameters.
    "small": {
        "layers": 4, "width": 192, "heads": 6, "context": 256, "vocab": 2048, "l": 24, "steps": 12_500,
        "batch_size": 8, "lr": 3e-3, "end_lr": 3e-5, "data": "packages", "min_doc_tokens": 16 * 256},
    # Tables 5 and 6; 600M training tokens of documents of 4,000 tokens or more (section 3.1).
    "paper-35m": {
        "layers": 6, "width": 384, "heads": 12, "context": 512, "vocab": 32000, "dropout": 0.1, "l": 24,
        "steps": 2289, "batch_size": 512, "micro_batch": 64, "lr": 1e-3, "end_lr": 3e-6, "fast": True,
        "data": "fineweb", "min_doc_tokens": 4000, "max_tokens": 700_000_000},
    "llama-135m": LLAMA | {
        "layers": 12, "width": 768, "heads": 12, "mlp_width": 2048, "l": 96, "lr": 6e-4, "end_lr": 6e-4 / 10,
        "micro_batch": 64},
    "llama-342m": LLAMA | {
        "layers": 24, "width": 1024, "heads": 16, "mlp_width": 2816, "l": 128, "lr": 3e-4, "end_lr": 3e-4 / 10,
        "micro_batch": 32, "tied": True},
}

def configure(preset, pe="expe", **flags):
    """(ModelConfig, TrainConfig) of a preset with an encoding, and {field: value} of the flags that were given."""
    values = PRESETS[preset] | flags
    if "lr" in flags and "end_lr" not in flags:
        values["end_lr"] = values["end_lr"] * flags["lr"] / PRESETS[preset]["lr"]
    if "width" in flags and "mlp_width" not in flags:
        values["mlp_width"] = None                                         # 4 times it
    if values.get("objective") == "mlm":
        values.setdefault("causal", False)
    encoding = make_encoding(pe, **pick(values, settings_class(pe)))
    model, train = ModelConfig(encoding=encoding, **pick(values, ModelConfig)), TrainConfig(**pick(values, TrainConfig))
    check_together(model, train)
    return model, train

def check_together(model, train):
    """InputError for settings of a model and a training run that do not go together."""
    if train.objective == "mlm" and model.causal:
        raise InputError("--objective mlm sees both sides: leave out --causal")
    if train.objective == "lm" and not model.causal and not train.data.startswith("task:"):
        raise InputError("--no-causal shows a query its target, the next token: leave it out, or add --objective mlm")
    if not (model.causal or model.encoding.both_sides):
        raise InputError(f"--pe {model.encoding.pe} looks back: give no --no-causal, and no --objective mlm")
    if train.random_positions:
        check_random_positions(train.random_positions, model)
    check_tables(model, train)

def check_random_positions(drawn, model):
    """InputError unless positions can be drawn from so many."""
    kinds, longest = {type(encoding) for encoding, _ in model.layer_pattern()}, model.encoding.longest(model)
    if all(kind.rows is NoPE.rows and kind.pairs is NoPE.pairs for kind in kinds):
        raise InputError(f"--random-positions is for encodings that read positions, not {model.encoding.pe}")
    if not model.context <= drawn <= longest:
        most = f" to {longest} (--n-positions)" if math.isfinite(longest) else " on"
        raise InputError(f"--random-positions must be from {model.context} (--context){most}, got {drawn}")

def check_tables(model, train):
    """InputError if an encoding's table has a number beyond those of float32 at a trained position."""
    last = (train.random_positions or model.context) - 1
    positions = np.array([0, last])
    for encoding, _ in model.layer_pattern():
        with np.errstate(all="ignore"):
            tables = encoding.rows(positions, model), encoding.pairs(positions, positions, model)
            finite = [np.isfinite(np.float32(table)).all() for table in tables if table is not None]
        if not all(finite):
            wrong = changed_numbers(model, train) or [f"--context {model.context}"]
            raise InputError(f"{' with '.join(wrong)} cannot be: up to position {last:,} the "
                             f"table of --pe {encoding.pe} has numbers beyond those of float32")

def changed_numbers(model, train):
    """["--theta 0.5", ...]: the fractions among encodings' settings that are no defaults, and --random-positions."""
    found = []
    for encoding in dict.fromkeys(encoding for encoding, _ in model.layer_pattern()):
        names = {f.name: f.default for f in dataclasses.fields(encoding) if kind_of(f) is float}
        usual = replace(encoding, **names).fit(model)
        found += [f"{flag_of(name)} {getattr(encoding, name):g}" for name in names
                  if getattr(encoding, name) != getattr(usual, name)]
    return found + ([f"--random-positions {train.random_positions}"] if train.random_positions else [])

def pick(values, kind):
    """Those of {field: value} that are fields of a dataclass."""
    return {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}
