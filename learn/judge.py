"""Whether a student's functions give the right numbers, and if not, which known mistake gives such numbers.

exercises.py says what is right, on cases of random shapes and parameters, and mistakes.py lists edits of the solutions.
A mistake is named only if the edited solution has the student's numbers in every case.
"""

import contextlib
import copy
import faulthandler
import importlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interop.conform import enough_digits

HERE = Path(__file__).resolve().parent
ROUNDING = 2.0**-24                                                     # of float32, relative
CALL_SECONDS, READ_SECONDS = 5, 10                                      # the longest call, and the longest import

class Wrong(Exception):
    """Sentences that say what is wrong with an answer."""

class Raised(Wrong):
    """The student's code raised an exception."""

    def __init__(self, error, case=""):
        super().__init__(error)
        self.error = error
        self.case = case

    def sentences(self, path):
        """What happened, and in which line of the file at this path."""
        error = self.error
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else (lines or [None])[-1]
        place = Path(path).name + (f", line {line}," if line else "")
        if isinstance(error, NotImplementedError):
            return f"{place} is still to be written: {error}."
        said = " ".join(str(error).split())
        return f"{place} raises {type(error).__name__}{': ' * bool(said)}{said.rstrip('.')}.{self.case}"

class Clock:
    """Ends this process if the student's code takes too long, and writes to a file where it was."""

    file = None                                                         # no clock unless check.py gives a file

    @classmethod
    @contextlib.contextmanager
    def limit(cls, seconds):
        if cls.file:
            faulthandler.dump_traceback_later(seconds, exit=True, file=cls.file)
        try:
            yield
        finally:
            if cls.file:
                faulthandler.cancel_dump_traceback_later()

# ---- the student's code ----------------------------------------------------------------------------------------------

def read(path, edit=None):
    """The module of a file, with one piece of its text changed: edit is (old text, new text)."""
    name = f"exercise {Path(path).stem}"
    module = sys.modules[name] = types.ModuleType(name)                 # known there, as dataclasses need it
    module.__file__ = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if edit:
            if text.count(edit[0]) != 1:
                raise ValueError(f"{path} must have this text once: {edit[0]}")
            text = text.replace(*edit)
        if "torch" in text:
            with contextlib.suppress(ImportError):
                importlib.import_module("torch")                        # which takes long, and is no loop
        with Clock.limit(READ_SECONDS):
            exec(compile(text, str(path), "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:                                      # SystemExit, too
        raise Raised(error) from error
    return module

def solution(number):
    return next(HERE.glob(f"solutions/{number}_*.py"))

def member(module, name):
    """A function or class of the student's module."""
    if not hasattr(module, name):
        raise Wrong(f"{Path(module.__file__).name} has no {name}: keep the names of the exercise.")
    return getattr(module, name)

def call(function, *arguments, seconds=CALL_SECONDS):
    """What a student's function returns for copies of the arguments, which it must not change."""
    given = copy.deepcopy(arguments)
    try:
        with Clock.limit(seconds):
            result = function(*given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Raised(error) from error
    for i, (before, after) in enumerate(zip(arguments, given, strict=True)):
        if isinstance(before, np.ndarray) and not np.array_equal(before, after):
            name = list(inspect.signature(function).parameters)[i]
            raise Wrong(f"{function.__name__} changes its argument {name}, which the caller still needs: change a "
                        f"copy, {name}.copy(), instead.")
    return result

def as_array(x, name):
    """An array of real numbers of what a function returned: an array, a list, a number or a tensor."""
    try:
        x = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
        kind = x.dtype.kind
    except Exception:                                                   # as of lists of different lengths, or bfloat16
        kind = "O"
    if kind not in "fiu":
        what = f"an array of {x.dtype}" if isinstance(x, np.ndarray) and kind != "O" else type(x).__name__
        raise Wrong(f"{name} must be an array of real numbers, in float32 or float64, and is {what}.")
    if kind == "f" and x.dtype.itemsize < 4:
        raise Wrong(f"{name} is in {x.dtype}, which has too few digits: return float32 or float64.")
    return x

def items(result, names, form):
    """{name: array} of a tuple or list that a function must return in this form."""
    if not isinstance(result, tuple | list) or len(result) != len(names):
        what = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise Wrong(f"The function must return {form}, and returns {what}.")
    return {name: as_array(x, name) for name, x in zip(names, result, strict=True)}

def named(result, names, form):
    """{name: array} of a dict that a function must return in this form."""
    if not isinstance(result, dict) or {*result} != {*names}:
        what = f"a dict with {', '.join(map(repr, result)) or 'nothing'}" if isinstance(result, dict) else (
            type(result).__name__)
        raise Wrong(f"The function must return {form}, and returns {what}.")
    return {name: as_array(result[name], name) for name in names}

# ---- the numbers -----------------------------------------------------------------------------------------------------

@dataclass
class Task:
    """What some functions of an exercise must give.

    run(module, **case) returns {output: array}, by the module's functions. right(**case) returns {output: (array,
    size)} of the right numbers: size, which broadcasts to the array, says how large the terms are from which a number
    comes, since these are rounded. place(case, output, index) says where a number stands, such as " at position 129".
    """

    cases: list
    run: Callable
    right: Callable
    place: Callable = lambda case, output, index: ""
    rounding: float = ROUNDING                                          # relative, of the coarsest numbers allowed

    def allowed(self, size):
        """The largest error that is left to rounding. Some numbers are sums of ten."""
        return 16 * self.rounding * np.asarray(size)

def describe(case):
    """The case in words: its numbers, and the shapes of its arrays."""
    words = [f"{name} = {value}" if isinstance(value, str) else
             f"{name} = {value:.6g}" if np.ndim(value) == 0 else f"{name} of shape {np.shape(value)}"
             for name, value in case.items()]
    return f" The inputs are {', '.join(words)}."

def judge(number, mine, task):
    """Raise Wrong unless the functions of a module have the right numbers in all cases of a task."""
    got, right, failed = [], [], None
    for i, case in enumerate(task.cases):
        try:
            got.append(task.run(mine, **copy.deepcopy(case)))
        except Wrong as error:
            if failed is not None:                                      # the wrong numbers of a case before say more
                break
            if isinstance(error, Raised):
                error.case = describe(case)
            raise
        right.append(task.right(**case))
        wrong = [name for name, (y, size) in right[i].items() if not same(got[i][name], y, task.allowed(size)).all()]
        if wrong and failed is None:
            failed = i, wrong[0]
    if failed is None:
        return
    i, name = failed
    x, (y, size) = got[i][name], right[i][name]
    words = known_mistake(number, task, got, right, name)
    words = words or unknown(number, task, got, right, name)
    raise Wrong(f"{first_wrong(task, task.cases[i], name, x, y, size)} {words}")

def same(x, y, allowed):
    """Where numbers are equal up to the allowed error, or neither is finite; False if their shapes differ."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape and not (x.size == y.size == 1):              # [1.4] counts as the number 1.4
        return np.array(False)
    with np.errstate(invalid="ignore"):
        near = np.abs(x.reshape(y.shape) - y) <= allowed
    return near | ~(np.isfinite(x.reshape(y.shape)) | np.isfinite(y))

def first_wrong(task, case, name, x, y, size):
    """Sentences about the first wrong number of an output."""
    if x.size != y.size or x.shape != y.shape and y.size > 1:
        axes = " Axes are exchanged." if x.shape != y.shape and sorted(x.shape) == sorted(y.shape) else ""
        return f"{name} has the shape {x.shape}, and {y.shape} is right.{axes}{describe(case)}"
    x = x.reshape(y.shape)
    bad = ~same(x, y, task.allowed(size))
    index = tuple(map(int, np.argwhere(bad)[0]))
    got, right = enough_digits(float(x[index]), float(y[index]))
    where = f"{name}[{', '.join(map(str, index))}]" if index else name
    count = f"; {bad.sum()} of {bad.size} numbers of {name} are wrong" if bad.size > 1 else ""
    return f"{where}{task.place(case, name, index)} is {got}, and {right} is right{count}.{describe(case)}"

def known_mistake(number, task, got, right, name):
    """A sentence with the known mistake that has the student's numbers in all cases; None if there is none.

    It has all outputs of the student, or at least the one with this name.
    """
    from learn.mistakes import MISTAKES

    made = []                                                           # [(words, outputs of each case)]
    for words, *edit in MISTAKES[number]:
        try:
            with np.errstate(all="ignore"):
                module = read(solution(number), edit)
                made.append((words, [task.run(module, **copy.deepcopy(case)) for case in task.cases[: len(got)]]))
        except Wrong:                                                   # an edit that raises has no numbers
            continue
    for names in ([*right[0]], [name]):
        for words, outputs in made:
            if all(same(got[i][key], outputs[i][key], task.allowed(largest(right[i][key][1], outputs[i][key]))).all()
                   for i in range(len(got)) for key in names):
                return f"It looks like this mistake: {words}."
    return None

def largest(*arrays):
    """The largest finite number of some arrays, without its sign."""
    numbers = np.abs(np.concatenate([np.ravel(x).astype(float) for x in arrays]))
    return numbers[np.isfinite(numbers)].max(initial=0)

def unknown(number, task, got, right, name):
    """A sentence about numbers that no known mistake has, such as that some are not finite."""
    from learn.mistakes import MISTAKES

    if not all(np.isfinite(outputs[name]).all() for outputs in got):
        return "Not all numbers are finite: look for an overflow, a division by 0, or the logarithm of 0."
    coarse = ROUNDING / task.rounding
    if all(same(outputs[name], r[name][0], coarse * task.allowed(r[name][1])).all()
           for outputs, r in zip(got, right, strict=False)):
        return "The numbers are right to about six digits only: compute in float64, and add no small numbers."
    if all(outputs[name].shape == r[name][0].shape for outputs, r in zip(got, right, strict=False)):
        x, y = (np.concatenate([np.ravel(part) for part in parts]) for parts in (
            [outputs[name] for outputs in got], [r[name][0] for r in right[: len(got)]]))
        factor = x @ y / (y @ y)
        near = all(same(outputs[name], factor * r[name][0], task.allowed(r[name][1]) * abs(factor)).all()
                   for outputs, r in zip(got, right, strict=False))
        if near and np.unique(y.round(9)).size > 2 and 0.01 < abs(factor) < 100:
            return f"In all cases the numbers are {factor:.4g} times the right ones."
    return f"This is none of the {len(MISTAKES[number])} mistakes that this check can name."
