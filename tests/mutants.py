"""Mutants of a Python text: one small change each, as a hurried hand would make it."""

import ast
import copy

OPERATORS = {ast.Add: [ast.Sub, ast.Mult, ast.Div], ast.Sub: [ast.Add], ast.Mult: [ast.Div, ast.Add, ast.Sub],
             ast.Div: [ast.Mult], ast.FloorDiv: [ast.Mult], ast.Pow: [ast.Mult], ast.MatMult: []}
COMPARISONS = {ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.In: ast.NotIn, ast.Eq: ast.NotEq}
NAMES = {"min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "sin": "cos", "cos": "sin", "sum": "mean",
         "mean": "sum", "exp": "log1p", "log": "log2", "sqrt": "square", "abs": "negative", "maximum": "minimum",
         "sigmoid": "exp", "ones_like": "zeros_like"}


def changed(node, parameters):
    """New nodes in the place of one node of a syntax tree."""
    if isinstance(node, ast.BinOp):
        for kind in OPERATORS[type(node.op)]:
            yield ast.BinOp(node.left, kind(), node.right)
        yield node.left
        yield node.right
        if isinstance(node.op, ast.Sub | ast.Div | ast.Pow | ast.MatMult):
            yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in {node.value + 1, node.value - 1, 2 * node.value, 10 * node.value} - {node.value}:
            yield ast.Constant(value)
    elif isinstance(node, ast.Constant) and node.value in ("q", "k"):
        yield ast.Constant({"q": "k", "k": "q"}[node.value])
    elif isinstance(node, ast.Call):
        if node.args:
            yield node.args[0]
        if len(node.args) > 1:
            yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in NAMES:
                function = ast.Attribute(node.func.value, NAMES[node.func.attr], ast.Load())
                yield ast.Call(function, node.args, node.keywords)
            if not isinstance(node.func.value, ast.Name) or node.func.value.id not in ("np", "expe", "model_numpy"):
                yield node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield ast.Call(ast.Name(NAMES[node.func.id], ast.Load()), node.args, node.keywords)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield node.value
    elif isinstance(node, ast.Slice):
        for edge in ("lower", "upper"):
            if getattr(node, edge):
                yield ast.Slice(**{"lower": node.lower, "upper": node.upper} | {edge: None})
        yield ast.Slice(node.upper, node.lower)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in parameters:
        for name in parameters:
            if name != node.id:
                yield ast.Name(name, ast.Load())
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) == 2:
        yield ast.Tuple(node.elts[::-1], ast.Load())
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield ast.Pass()


def mutants(text):
    """{what was changed: new text} of a text: operators, constants, axes, names, calls, slices, and assignments."""
    tree = ast.parse(text)
    found = {}

    def visit(node, replace, parameters):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            parameters = [arg.arg for arg in node.args.args if arg.arg not in ("self", "settings", "h", "model")]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) or isinstance(node, ast.Import):
            return
        for new in changed(node, parameters):
            mutant = ast.unparse(replace(new))
            if mutant not in found.values() and mutant != ast.unparse(tree):
                line = getattr(node, "lineno", "")                      # a slice has none
                found[f"{ast.unparse(node)} -> {ast.unparse(new)} (line {line})"] = mutant
        for field, value in ast.iter_fields(node):
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and field not in ("annotation", "decorator_list", "returns", "args"
                                                                if not isinstance(node, ast.Call) else "annotation"):
                    visit(child, lambda new, field=field, i=i: replace(with_child(node, field, i, new)), parameters)

    def with_child(node, field, i, new):
        node = copy.copy(node)
        if i is None:
            setattr(node, field, new)
        else:
            setattr(node, field, [*getattr(node, field)[:i], new, *getattr(node, field)[i + 1 :]])
        return node

    visit(tree, lambda new: ast.fix_missing_locations(new), [])
    return found
