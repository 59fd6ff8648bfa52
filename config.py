"""The configuration of a run: ModelConfig, TrainConfig, the presets, and the rules that tie settings together.

A run has three classes of settings: those of its encoding (positional_encodings.py) and the two here. Every field with
a help text is a flag of train.py. make_configs is the one place where a preset, the flags that were given and the
defaults that follow from them become values. Tables 5, 6, 8 and 9 are those of the ExPE paper's preprint.
"""

import dataclasses
import math
from dataclasses import dataclass, replace

import numpy as np

from positional_encodings import NoPE, make_encoding, settings_class, zoo_module
from settings import Checked, InputError, flag_of, from_values, kind_of, pick, setting

SPLITS = ("train", "val", "test")

# ---- the model -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
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

    def fill_in(self):
        mlp_width = 4 * self.width if self.mlp_width is None else self.mlp_width
        return super().fill_in() | {"mlp_width": mlp_width, "encoding": self.encoding.fit(self)}

    def __post_init__(self):
        super().__post_init__()
        encodings = [encoding.pe for encoding, _ in self.layer_pattern()]             # InputError for a wrong --cycle
        if self.softmax == "llama4" and "nope" not in encodings:
            raise InputError("--softmax llama4 is for blocks without an encoding: give --nope-every, --pe nope, "
                             "or a --cycle with nope")

    @property
    def d_head(self):
        return self.width // self.heads

    def block(self, i):
        """(encoding, window) of block i, counted from 0: which encoding it has, and how many keys it sees (0: all)."""
        pattern = self.layer_pattern()
        return pattern[i % len(pattern)]

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
    dtype: str = setting("fp32", "tf32: matrix products in TF32 on a GPU; bf16: autocast; with ExPE-K add --fast",
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

def make_configs(preset, pe="expe", **given):
    """(ModelConfig, TrainConfig) of a preset with an encoding; given: {setting: value} of the flags that were given."""
    values = PRESETS[preset] | given
    if "lr" in given and "end_lr" not in given:
        values["end_lr"] = values["end_lr"] * given["lr"] / PRESETS[preset]["lr"]
    if "width" in given and "mlp_width" not in given:
        values["mlp_width"] = None                                     # 4 times it, and not the preset's
    if values.get("objective") == "mlm" and "causal" not in given:
        values["causal"] = False
    encoding = make_encoding(pe, **pick(values, settings_class(pe)))
    model = ModelConfig(encoding=encoding, **pick(values, ModelConfig))
    train = TrainConfig(**pick(values, TrainConfig))
    check_together(model, train)
    return model, train

# ---- what only several settings decide -------------------------------------------------------------------------------

# Each rule takes a ModelConfig and a TrainConfig, and returns what is wrong with them in one line, or None.

def masked_tokens_need_both_sides(model, train):
    if train.objective == "mlm" and model.causal:
        return "--objective mlm sees both sides: leave out --causal"

def next_tokens_need_a_causal_mask(model, train):
    if train.objective == "lm" and not model.causal and not train.data.startswith("task:"):
        return "--no-causal shows a query its target, the next token: leave it out, or add --objective mlm"

def some_encodings_look_back(model, train):
    if not model.causal and not model.encoding.both_sides:
        return f"--pe {model.encoding.pe} looks back: give no --no-causal, and no --objective mlm"

def random_positions_need_a_table(model, train):
    tables = {(type(encoding).rows, type(encoding).pairs) for encoding, _ in model.layer_pattern()}
    if train.random_positions and tables == {(NoPE.rows, NoPE.pairs)}:
        return f"--random-positions is for encodings that read positions, not {model.encoding.pe}"

def random_positions_hold_a_window(model, train):
    longest = model.encoding.longest(model)
    if train.random_positions and not model.context <= train.random_positions <= longest:
        most = f" to {longest} (--n-positions)" if math.isfinite(longest) else " on"
        return f"--random-positions must be from {model.context} (--context){most}, got {train.random_positions}"

def tables_are_finite(model, train):
    """Every number of an encoding's table must be one of float32, up to the last position that is trained."""
    last = (train.random_positions or model.context) - 1
    positions = np.array([0, last])
    for encoding, _ in model.layer_pattern():
        with np.errstate(all="ignore"):
            tables = encoding.rows(positions, model), encoding.pairs(positions, positions, model)
            finite = [np.isfinite(np.float32(table)).all() for table in tables if table is not None]
        if not all(finite):
            wrong = changed_numbers(model, train) or [f"--context {model.context}"]
            return (f"{' with '.join(wrong)} cannot be: up to position {last:,} the table of --pe {encoding.pe} has "
                    "numbers beyond those of float32")

RULES = (masked_tokens_need_both_sides, next_tokens_need_a_causal_mask, some_encodings_look_back,
         random_positions_need_a_table, random_positions_hold_a_window, tables_are_finite)

def check_together(model, train):
    """InputError for settings of a model and a training run that do not go together."""
    for rule in RULES:
        if message := rule(model, train):
            raise InputError(message)

def changed_numbers(model, train):
    """["--theta 0.5", ...]: the fractions among encodings' settings that are no defaults, and --random-positions."""
    found = []
    for encoding in dict.fromkeys(encoding for encoding, _ in model.layer_pattern()):
        defaults = {f.name: f.default for f in dataclasses.fields(encoding) if kind_of(f) is float}
        plain = replace(encoding, **defaults).fit(model)
        found += [f"{flag_of(name)} {getattr(encoding, name):g}" for name in defaults
                  if getattr(encoding, name) != getattr(plain, name)]
    return found + ([f"--random-positions {train.random_positions}"] if train.random_positions else [])
