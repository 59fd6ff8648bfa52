"""One readable file of a model: interop/modeling.py, and all that it and the model's encoding use of the reference.

Each definition is copied as it stands there, found by the names that those before it use: a name of this repository
brings its definition with it, and any other its import.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path

from config import InputError

ROOT = Path(__file__).parent.parent
GIVEN = {("config", "CORE"), ("model_torch", "ENCODINGS"), ("model_numpy", "doors_of")}        # written anew below
HEAD = '''"""A GPT with the positional encoding {pe}, for transformers:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Made by interop/export.py of the text of its repository (MIT licence): each part stands below the name of its file.
"""

'''

@functools.cache
def read(module):
    """({name: text of its definition}, {name: (module, its name there or None)}) of a file of ours.

    The class that stands in torch_class counts too.
    """
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = {}
    imported = {}
    inside = (node.body for node in tree.body if getattr(node, "name", "") == "torch_class")
    for node in itertools.chain(tree.body, *inside):
        targets = [name.id for target in getattr(node, "targets", ()) for name in ast.walk(target)
                   if isinstance(name, ast.Name)]
        first = min((part.lineno for part in getattr(node, "decorator_list", ())), default=node.lineno)
        lines = text.split("\n")[first - 1 : node.end_lineno]
        for name in targets or [getattr(node, "name", "")]:
            defined[name] = textwrap.dedent("\n".join(lines))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name: (alias.name, None) if isinstance(node, ast.Import)
                         else (node.module, alias.name) for alias in node.names}
    return defined, imported

def used(module, text):
    """(the text without the names of our modules, {(module, name) of ours}, {imports of others}) of a definition there.

    An import is (module, what is imported of it and as what, whether by `from`).
    """
    defined, imported = read(module)
    ours = set()
    others = set()
    cuts = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place, name = imported.get(node.value.id, (None, ""))
            if name is None and is_ours(place):
                ours.add((place, node.attr))
                cuts.append((node.lineno, node.value.col_offset, len(node.value.id) + 1))
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store):          # a name that is set there
            continue
        if node.id in defined:
            ours.add((module, node.id))
        if node.id in imported:
            place, name = imported[node.id]
            if not is_ours(place):
                others.add((place, (name or place) + f" as {node.id}" * (node.id != (name or place)), name is not None))
            elif name:
                ours.add((place, name))
    lines = text.split("\n")
    for line, column, length in sorted(cuts, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + lines[line - 1][column + length :]
    return "\n".join(lines), ours - GIVEN, others

def is_ours(module):
    return (ROOT / f"{module.replace('.', '/')}.py").exists()

def settings_class(name, settings):
    """(text, ours, others), as used's, of a class with the tables of an encoding and what they read of its settings."""
    fields = {field.name for field in dataclasses.fields(settings)}
    parts = {}
    members = ["rows", "pairs"]
    ours = set()
    others = set()
    for member in members:                                                # which grows meanwhile
        owner = next((kind for kind in type(settings).__mro__ if member in vars(kind)), None)
        if member in parts or member in fields or owner is None:
            continue
        value = vars(owner)[member]
        if not inspect.isfunction(value):
            parts[member] = f"{member} = {value!r}"
            continue
        text = textwrap.dedent(inspect.getsource(value))
        parts[member], more, imports = used(owner.__module__, text)
        ours, others = ours | more, others | imports
        members += [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
                  and isinstance(node.value, ast.Name) and node.value.id == "self"]
        if "super()" in text:
            raise InputError(f"{owner.__module__}.py: {member} asks a super() that cannot be told in one file: name it")
    begin = "def __init__(self, **values):\n    vars(self).update(values)"
    body = "\n\n".join(part.strip() for part in (begin, *parts.values()))
    return f"class {name}:\n{textwrap.indent(body, '    ')}", ours, others

def gathered(todo):
    """({(module, name): text}, {imports of others}) of these definitions of ours and all that they use."""
    texts = {}
    others = set()
    while todo:
        module, name = todo.pop()
        if (module, name) not in texts:
            text, ours, imports = used(module, read(module)[0][name])
            text = text.replace("doors_of(settings, config)", "settings")
            texts[module, name] = text.replace("doors.shapes(config)", "doors.shapes")
            todo, others = todo | ours, others | imports
    return texts, others

def one_file(model):
    """The text of modeling_gpt.py for a GPT of model_torch.py."""
    roots = {("interop.modeling", "GPTForCausalLM")}
    others = set()
    classes = []
    tables = {"SETTINGS": {}, "ENCODINGS": {}}
    for encoding in {block.attn.encoding.settings.pe: block.attn.encoding for block in model.blocks}.values():
        pe = encoding.settings.pe
        kind = type(encoding)
        name = "".join(re.findall(r"\w", pe)).capitalize() + "Settings"
        text, ours, imports = settings_class(name, encoding.settings)
        classes = [*classes, text]
        others = others | imports
        roots |= ours | {(kind.__module__, kind.__name__)}
        tables["SETTINGS"][pe] = name
        tables["ENCODINGS"][pe] = kind.__name__
    for table, values in tables.items():
        items = ", ".join(f'"{pe}": {value}' for pe, value in values.items())
        classes.append(f"{table} = {{{items}}}")
    texts, more = gathered(roots)
    parts = {module: [text for name in read(module)[0] if (text := texts.get((module, name)))] for module, _ in texts}
    order = sorted(parts, key=lambda module: (module == "interop.modeling", module.startswith("zoo."), module))
    titled = [(f"{module.replace('.', '/')}.py", parts[module]) for module in order]
    titled.insert(-1, ("the encoding's settings and names", classes))
    head = HEAD.format(pe=model.config.encoding.pe) + import_lines(others | more)
    sections = (f"# ---- {title} ".ljust(120, "-") + "\n\n" + "\n\n".join(dict.fromkeys(of)) for title, of in titled)
    return "\n\n\n".join((head, *sections)) + "\n"              # once each: two names may be of one line

def import_lines(imports):
    """Python's own first, and what comes from one module in one line."""
    groups = {}
    for module, what, by_from in sorted(imports):
        groups.setdefault(f"from {module} import " if by_from else f"import {what}", []).append(what * by_from)
    lines = [begin + ", ".join(names) for begin, names in groups.items()]
    python = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    return "\n".join(sorted(lines, key=lambda line: (line not in python, line.split()[0] == "from", line)))
