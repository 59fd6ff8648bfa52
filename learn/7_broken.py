"""Exercise 7. One of several layers has a wrong pullback. Find it, whichever it is and whatever is wrong.

A pullback turns the gradient of the output into the gradients of the inputs. So for a small step e in any direction d
of one input, the sum of dout (f(x + e d) - f(x - e d)) / 2e must equal the sum of d times the gradient of that input.
Question: why is a dout of ones a bad choice?
"""

import numpy as np


def find(layers):
    """The name of the wrong one. layers: [(name, function, inputs)], where function(*inputs) returns (out, pullback),

    and pullback(dout) returns a list of gradients, one for each input. All arrays are float64. Exactly one layer is
    wrong; the smallest mistake changes the numbers of a gradient by about 1e-3.
    """
    raise NotImplementedError("return a name")
