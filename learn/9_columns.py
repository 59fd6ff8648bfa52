"""Exercise 9. What can l overridden columns express that fewer cannot? (Do it after exercise 3.)

phi overrides the first l numbers of h (C,) by the row start + theta (n + j), j = 0 .. l-1. A layer with the weights
w (D, C) reads w phi(h, n). Write weights that do the same with fewer overridden columns: with one for the keys of
ExPE-K, and with two for ExPE. They are (D, C), too, and phi then overrides one or two numbers of h, by the same start
and theta. Numbers of h that w does not see must stay unseen.
Question: if more columns express no more, why does l change what a model learns?
"""

import numpy as np


def one_column(wk, l):
    """Key weights with which ExPE-K has, with l = 1, the attention weights that wk (D, C) has with l."""
    raise NotImplementedError("return the key weights")

def two_columns(w, l):
    """Weights with which phi has, with l = 2, the product w phi(h, n) of w (D, C) with l >= 2, for every h and n."""
    raise NotImplementedError("return the weights")
