"""Which code computes the loss of a model: a short hash of each file, so that a number can be traced to its code.

That is the tables, the model and its encodings. How a text is prepared and a step is taken has no hash: of the text
config.json has its own, and the step's effect is in the weights.

train.py stores {file: hash} in config.json; what prints a number compares it with the files of today. The hash is of
what a file computes: docstrings, comments, layout, line endings, the words of errors and the help of flags have no part
in it, and it is the same on every machine and from Python 3.11 on.
"""

import ast
import hashlib
from pathlib import Path

from positional_encodings import CORE, NoPE
from settings import setting

ROOT = Path(__file__).parent
FAST = [f"engine/{name}.py" for name in ("fast", "cross_entropy", "linear_bias", "banded", "precision")]
FROM = ", from step "                    # between the hashes of a file that changed while the run was trained

def code_of(model, train):
    """{file: hash} of a run's ModelConfig and TrainConfig: the tables, the model of its backend, and its encodings.

    Of positional_encodings.py only the classes of these encodings' settings count. Files of zoo/ count with those that
    they import from there, and those of engine/ that --fast computes with.
    """
    encodings = [encoding for encoding, _ in model.layer_pattern()]
    classes = {kind.__name__ for e in encodings for kind in type(e).__mro__
               if issubclass(kind, NoPE) and kind.__module__ == NoPE.__module__}
    files = ["expe.py", f"model_{train.backend}.py"]
    files += FAST * (train.fast and train.backend == "torch")
    files += with_imports(zoo_files(model, train, encodings))
    hashes = {file: hash_code(ROOT / file) for file in files}
    core = f"{NoPE.__module__}.py"
    return {core: hash_code(ROOT / core, classes)} | hashes

def zoo_files(model, train, encodings):
    """The files of zoo/ that a model's cycle, encodings, softmax and layers are in."""
    names = ["cycle"] * bool(model.cycle) + [e.pe for e in encodings if e.pe not in CORE]
    names += ["ablations"] * any(e.pe in CORE and (getattr(e, "once", False) or getattr(e, "learn", "none") != "none")
                                 for e in encodings)
    names += ["softmax"] * (model.softmax != "plain")
    names += ["llama"] * (train.backend == "numpy" and (model.norm, model.mlp) != ("layernorm", "gelu"))
    return [f"zoo/{name}.py" for name in dict.fromkeys(names)]

def with_imports(files):
    """These files of zoo/, and those that they import from there."""
    found = dict.fromkeys(files)
    waiting = [*files]
    while waiting:
        for node in ast.walk(read_tree(ROOT / waiting.pop()) or ast.Module([], [])):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            paths = [f"{module.replace('.', '/')}.py" for module in modules if module.startswith("zoo.")]
            new = [path for path in paths if path not in found and (ROOT / path).exists()]
            found |= dict.fromkeys(new)
            waiting += new
    return [*found]

def read_tree(path):
    """The syntax tree of a file; None if there is no such file, or if it is no Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError):
        return None

def hash_code(path, classes=None):
    """A short hash of what a file computes, or some of its classes; "missing" without the file."""
    tree = read_tree(path)
    if tree is None:
        return "missing"
    parts = [node for node in tree.body if classes is None or getattr(node, "name", None) in classes]
    return hashlib.sha256(repr(nested_lists(parts)).encode("utf-8", "surrogatepass")).hexdigest()[:12]

def nested_lists(node):
    """A syntax tree as nested lists, without what changes no number.

    That is written out here, because ast.dump and ast.unparse change from one Python to the next.
    """
    if isinstance(node, list):
        return [nested_lists(part) for part in node if not is_docstring(part)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise):                                     # the words of an error
        return ["Raise"]
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == setting.__name__:
        node = ast.Call(node.func, node.args[:1], [])                   # the default, without help and rule
    if isinstance(node, ast.JoinedStr):                                 # 3.12 adds empty parts
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    return [type(node).__name__, *([name, nested_lists(value)] for name, value in ast.iter_fields(node)
                                   if name != "kind" and value is not None and value != [])]

def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

# ---- hashes of a run -------------------------------------------------------------------------------------------------

NONE = "none"                            # in the place of a hash: the file is not one of those that compute the loss

def go_on(then, now, step):
    """{file: hash} of a run that began with the code `then`, and goes on at a step with `now`."""
    hashes = {}
    for file in then | now:
        before, its = then.get(file, NONE), now.get(file, NONE)
        hashes[file] = before if before.endswith(its) else f"{before}{FROM}{step} {its}"
    return hashes

def differing(then, now):
    """The files of {file: hash} that are not now what they were then, in words; none of a run without a record."""
    found = []
    for file in then | now if then else ():
        its = then.get(file, NONE)
        if its != now.get(file, NONE):
            found.append(file + (f" (it changed at step {its.rpartition(FROM)[2].split()[0]})" if FROM in its else ""))
    return found
