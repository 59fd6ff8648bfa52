"""In which precision a tensor is computed with: its dtype, or what autocast makes of it."""

import contextlib

import torch


def autocasts(x):
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)

def full_precision(x):
    """A context in which nothing is autocast."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()

def in_half_precision(x):
    return x.dtype.itemsize == 2 or autocasts(x)

def is_full_on_cpu(x):
    return x.device.type == "cpu" and not in_half_precision(x)
