"""What each positional encoding lets you set, and the table that it makes of integer positions.

make_encoding("expe", l=24) makes settings; --pe takes the names of ENCODINGS. The encodings of the core are here, and
each other one is a file of zoo/, which is found by being there. What an encoding does with its table stands in
model_torch.py and model_numpy.py. Tables 5 to 9 are those of the ExPE paper's preprint.
"""

import ast
import contextlib
import dataclasses
import importlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import expe
from settings import Checked, InputError, did_you_mean, setting

# ---- the encodings of the core ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class NoPE(Checked):
    """NoPE (Haviv et al. 2022, arXiv 2203.16634): there is no encoding. A model can tell the order of tokens only from
    the causal mask, which hides from each query all later tokens.

    It is the base of every other one's settings; make_encoding("expe", l=24) makes them.

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
    """Sinusoidal (Vaswani et al. 2017, arXiv 1706.03762, section 3.5): sines and cosines of a token's position are
    added to its embedding."""

    base: float = setting(10000.0, "base of the frequencies", above=1)

    def rows(self, positions, model):
        return expe.sinusoidal_table(positions, model.width, self.base)                      # (..., T, C)

@dataclass(frozen=True)
class Learned(NoPE):
    """Learned (Vaswani et al. 2017, arXiv 1706.03762, section 3.5; GPT-2, https://github.com/openai/gpt-2): each
    position has a trained row of numbers, which is added to the embedding of the token there."""

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

    def defaults(self, context):
        """{setting: value} of the numbers that may be left out, by the trained length."""

    def fit(self, model):
        if self.l > model.width:
            raise InputError(f"--l must be from 1 to the width, {model.width}, got {self.l}")
        left_out = {name: value for name, value in self.defaults(model.context).items() if getattr(self, name) is None}
        return replace(self, **left_out)

@dataclass(frozen=True)
class ExPE(Override):
    """ExPE (Datseris et al. 2025, arXiv 2509.19569, equations 2 and 3): the first l dimensions of what enters W_q and
    W_k are overridden. All l numbers grow by the same step, theta, from each position to the next."""

    theta: float | None = setting(None, "step between positions (default: 1/(4 x context); --on k: 64/context)")
    constant: bool = setting(False, 'the ablation "p is stable": the same number in all l dimensions')
    trained: ClassVar[tuple] = ("start", "theta")

    def defaults(self, context):
        if self.learn == "random":                                     # which draws both
            return {}
        return {"start": 0.0, "theta": 64 / context if self.on == "k" else 1 / (4 * context)}

    def rows(self, positions, model):
        step = 0 if self.constant else 1
        if self.learn == "none":
            return self.scale * expe.expe_table(positions, self.l, self.start, self.theta, step)
        return self.scale * expe.affine_parts(lambda a, b: expe.expe_table(positions, self.l, a, b, step))

@dataclass(frozen=True)
class ExQPE(Override):
    """ExQPE (Datseris et al. 2025, arXiv 2509.19569, equations 4 and 5): as in ExPE, all l dimensions are overridden.
    From one position to the next only one of the l numbers grows, each in its turn."""

    theta1: float | None = setting(None, "ExQPE's step between dimensions (default: 1/(4 x context))")
    theta2: float | None = setting(None, "by how much ExQPE raises a dimension at its turn (default: 1/16)")
    trained: ClassVar[tuple] = ("theta1", "theta2")

    def defaults(self, context):
        if self.learn == "random":                                     # which draws theta1 and theta2
            return {"start": 0.0}
        return {"start": 0.0, "theta1": 1 / (4 * context), "theta2": 1 / 16}

    def rows(self, positions, model):
        if self.learn == "none":
            return self.scale * expe.exqpe_table(positions, self.l, self.start, self.theta1, self.theta2)
        return self.scale * expe.affine_parts(lambda a, b: expe.exqpe_table(positions, self.l, self.start, a, b))

@dataclass(frozen=True)
class RoPE(Sinusoidal):
    """RoPE (Su et al. 2021, arXiv 2104.09864): each pair of dimensions of a query or a key rotates by its frequency
    times the position. So a score depends on the distance, and not on where both tokens stand."""

    def fit(self, model):
        if model.d_head % 2:
            raise InputError(f"--pe {self.pe} needs an even --width / --heads, got {model.d_head}")
        return self

    def rows(self, positions, model):
        return expe.rope_table(positions, model.d_head, self.base)[..., None, :, :]            # (..., 1, T, D)

@dataclass(frozen=True)
class ALiBi(NoPE):
    """ALiBi (Press et al. 2022, arXiv 2108.12409): the score of a key falls in proportion to its distance. Each head
    has a fixed slope."""

    slopes: float = setting(1.0, "by which ALiBi's slopes are multiplied", above=0)

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys).astype(float)
        return self.slopes * (d if model.causal else abs(d))[..., None, :, :]                  # (..., 1, T, S)

@dataclass(frozen=True)
class T5(NoPE):
    """T5 (Raffel et al. 2020, arXiv 1910.10683): near distances have a bucket each, and far ones share
    buckets. A trained number for each head and bucket is added to the score."""

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
    """Shaw (Shaw et al. 2018, arXiv 1803.02155, equations 3 and 4): a trained vector for the distance is added to the
    key, and another one to the value. All distances from `--max-distance` on share a vector."""

    max_distance: int = setting(16, "distance from which on all share a vector", at_least=1, at_most=2**16)

    def pairs(self, queries, keys, model):
        d = expe.distances(queries, keys)[..., None, :, :]                                     # (..., 1, T, S)
        return expe.shaw_index(d, self.max_distance, not model.causal)

CORE = {"nope": NoPE, "sinusoidal": Sinusoidal, "learned": Learned, "expe": ExPE, "exqpe": ExQPE, "rope": RoPE,
        "alibi": ALiBi, "t5": T5, "shaw": Shaw}
# ---- by name ---------------------------------------------------------------------------------------------------------

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
        raise InputError(f"--pe {pe}: zoo/{pe}.py has no {part}: a file of an encoding has Settings, doors and Layer, "
                         "as docs/change.md shows")
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
