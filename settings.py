"""A setting: a field of a dataclass with its rule and its help text, by which it is a flag of train.py.

A value that breaks its rule raises InputError, which names the flag and says what would be right.
"""

import contextlib
import dataclasses
import difflib
import operator
import sys


class InputError(ValueError):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""

@contextlib.contextmanager
def prefix_errors(flag):
    """Put a flag, or a run, before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None

def require_finite(finite, what="losses"):
    """InputError unless the losses, or whatever else was computed of a model, are finite."""
    if not finite:
        raise InputError(f"its {what} are not finite numbers: its weights are too large, or its positions as they are "
                         "scaled here: train it again with a lower --lr, or scale less")

def did_you_mean(word, names):
    """A question for the end of an error message, " (did you mean expe?)"; "" if none of the names is near the word."""
    near = difflib.get_close_matches(str(word), names, 1)
    return f" (did you mean {near[0]}?)" if near else ""

# ---- a field and its rule --------------------------------------------------------------------------------------------

def setting(default=dataclasses.MISSING, help=None, **rule):
    """A field; with a help text it is a flag of train.py. rule: at_least, at_most, above, below a number; or one_of."""
    return dataclasses.field(default=default, metadata={"help": help, "rule": rule})

def flag_of(name):
    return "--" + name.replace("_", "-")

KINDS = {int: "a whole number", float: "a finite number", str: "a name or a path", bool: "true or false"}
RULES = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt,
         "one_of": lambda value, names: value in names}

def kind_of(f):
    """The class of a field's values: int of `int | None`, say, which has no value of its own yet."""
    return f.type if isinstance(f.type, type) else f.type.__args__[0]

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
    if kind is int and abs(value) > 2**53:
        return False
    if kind is str and (value == "" or "\0" in value):
        return False
    return all(RULES[word](value, bound) for word, bound in f.metadata["rule"].items())

# ---- a class of settings ---------------------------------------------------------------------------------------------

class Checked:
    """The base of the classes of settings: each field is checked by its rule, then what ties some of them together.

    Then the values that were left out are filled in. Nothing else writes to a config: what changes one makes another
    with dataclasses.replace.
    """

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not keeps_rule(value, f):
                near = did_you_mean(value, f.metadata["rule"].get("one_of", ()))
                raise InputError(f"{flag_of(f.name)} must be {describe_rule(f)}, got {value!r}{near}")
        self.check()
        for name, value in self.fill_in().items():
            object.__setattr__(self, name, value)                      # the class is frozen for everybody else

    def check(self):
        """InputError for fields that do not go together."""

    def fill_in(self):
        """{field: value} of what follows from other fields: here the float of a whole number, as JSON may have it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if kind_of(f) is float}
        return {name: float(value) for name, value in values.items() if value is not None}

def from_values(kind, values):
    """A class of settings made of {field: value}; InputError for a field that it does not have, or that is missing."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise InputError(f"{unknown[0]} is no setting of {kind.__name__}")
    if missing := [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]:
        raise InputError(f"{missing[0]} is missing")
    return kind(**values)

def pick(values, kind):
    """Those of {field: value} that are fields of a class of settings."""
    return {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}
