"""One readable file of a model: hand/modeling.py, and all that it and the model's encoding use of the reference.

Each definition is copied as it stands there, found by the names that those before it use: a name of this repository
brings its definition with it, and any other its import.
"""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from pathlib import Path

from config import InputError

ROOT = Path(__file__).parent.parent
GIVEN = {("config", "ENCODINGS"), ("model_torch", "ENCODINGS"), ("model_numpy", "doors_of")}    # written anew below
HEAD = '''"""A GPT with the positional encoding {pe}, for transformers:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Made by export.py of the text of its repository (MIT licence): each part stands below the name of its file.
"""

'''

@functools.cache
def read(module):
    """({name: text of its definition}, {name: (module, its name there or None)}) of a file of ours.

    What torch_class makes counts too: its class, or the function `of` for a softmax.
    """
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    tree, defined, imported = ast.parse(text), {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        else:
            targets = (t for target in getattr(node, "targets", ()) for t in ast.walk(target))
            names = [t.id for t in targets if isinstance(t, ast.Name) and node in tree.body]
            function = isinstance(node, ast.FunctionDef) and (node in tree.body or node.name == "of")
            names = [node.name] if function or isinstance(node, ast.ClassDef) else names
            first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=getattr(node, "lineno", 0))
            for name in names:
                lines = text.split("\n")[first - 1 : node.end_lineno]
                defined.setdefault(name, textwrap.dedent("\n".join(lines)))
    return defined, imported

def used(module, text):
    """(the text without the names of our modules, {(module, name) of ours}, {imports of others}) of a definition there.

    An import is (module, what is imported of it and as what, whether by `from`).
    """
    defined, imported = read(module)
    ours, others, cuts, tree = set(), set(), [], ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place, name = imported.get(node.value.id, (None, ""))
            if name is None and is_ours(place):
                ours.add((place, node.attr))
                cuts.append((node.lineno, node.value.col_offset, len(node.value.id) + 1))
        elif isinstance(node, ast.Name) and node.id in defined:
            ours.add((module, node.id))
        if isinstance(node, ast.Name) and node.id in imported:
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
    parts, asked, ours, others = {}, ["rows", "pairs"], set(), set()
    for member in asked:                                                # which grows meanwhile
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
        asked += [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
                  and isinstance(node.value, ast.Name) and node.value.id == "self"]
        if "super()" in text:
            raise InputError(f"{owner.__module__}.py: {member} asks a super() that cannot be told in one file: name it")
    begin = "def __init__(self, **values):\n    vars(self).update(values)"
    body = "\n\n".join(part.strip() for part in (begin, *parts.values()))
    return f"class {name}:\n{textwrap.indent(body, '    ')}", ours, others

def one_file(model):
    """The text of modeling_gpt.py for a GPT of model_torch.py."""
    encodings = {block.attn.encoding.settings.pe: block.attn.encoding for block in model.blocks}
    todo, others, last, made = {("hand.modeling", "GPTForCausalLM")}, set(), [], {"SETTINGS": [], "ENCODINGS": []}
    for pe, encoding in encodings.items():
        kind = type(encoding)
        todo.add((kind.__module__, kind.__name__))
        name = "".join(re.findall(r"\w", pe)).capitalize() + "Settings"
        text, ours, imports = settings_class(name, encoding.settings)
        last, todo, others = [*last, text], todo | ours, others | imports
        how = kind.__name__
        for softmax in pe.split("+")[1:]:
            todo.add((f"zoo._{softmax}", "of"))
            how = f"{softmax}({how})"
        for table, value in (("SETTINGS", name), ("ENCODINGS", how)):
            made[table].append(f'"{pe}": {value}')
    last += [f"{table} = {{{', '.join(items)}}}" for table, items in made.items()]
    texts = {}
    while todo:
        module, name = todo.pop()
        if (module, name) not in texts:
            text, ours, imports = used(module, read(module)[0][name])
            text = text.replace("doors_of(settings).shapes(config)", "settings.shapes")
            texts[module, name] = text.replace("def of(", f"def {module.removeprefix('zoo._')}(", name == "of")
            todo, others = todo | ours, others | imports
    sections, modules = [], dict.fromkeys(["expe", "model_torch", *sorted({m for m, _ in texts}), "hand.modeling"])
    for module in [*(m for m in modules if m != "hand.modeling"), "settings", "hand.modeling"]:
        parts = last if module == "settings" else list(dict.fromkeys(           # two names may be of one line
            texts[module, name] for name in read(module)[0] if (module, name) in texts))
        if parts:
            title = "the encoding's settings and names" if module == "settings" else f"{module.replace('.', '/')}.py"
            sections.append(f"# ---- {title} ".ljust(120, "-") + "\n\n" + "\n\n".join(parts))
    head = HEAD.format(pe=model.config.encoding.pe) + import_lines(others)
    return "\n\n\n".join((head, *sections)) + "\n"

def import_lines(imports):
    """Python's own first, and what comes from one module in one line."""
    groups = {}
    for module, what, by_from in sorted(imports):
        groups.setdefault(f"from {module} import " if by_from else f"import {what}", []).append(what * by_from)
    lines = [begin + ", ".join(names) for begin, names in groups.items()]
    python = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    return "\n".join(sorted(lines, key=lambda line: (line not in python, line.split()[0] == "from", line)))
