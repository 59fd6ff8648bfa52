"""Whether train.py --fast computes what the model of model_torch.py does, as that stands now, edited or not.

What is fast or reads with a cache calls the steps of model_torch.Attention, so that an edit of a step reaches it. Where
it replaces a step, or rests on what a step does, an edit may not. So it is compared with the plain model before
anything is computed with it: in float64 on the CPU, past the trained length, with one block of each kind, a small
vocabulary, and new weights that make scores of about 3. A difference is refused in one line that names the function to
edit. longer/compare.py does the same for what reads a trained model. Plain training and evaluation compare nothing.
"""

import contextlib
import copy
import re
from dataclasses import replace

import numpy as np
import torch

import model_torch
from engine.banded import has_band
from settings import InputError

FEWEST = 140                             # tokens that are compared, so that a limit of 100 or 128 shows
MOST = 400                               # so that a large model takes seconds
VOCAB = 256
EXACT = 1e-6                             # the largest relative error in float64
ROUNDED = 0.1                            # and in bf16, besides what rounded weights cost

def small_config(config):
    """A ModelConfig with one block of each kind, a small vocabulary and no dropout of its own."""
    kinds = [config.block(i) for i in range(config.layers)]
    layers = max(kinds.index(kind) for kind in kinds) + 1
    return replace(config, layers=layers, vocab=min(config.vocab, VOCAB), dropout=0.0)

def some_positions(config):
    """Some positions in a row, (T,), up to 70 past the trained length where there are any."""
    end = int(min(config.encoding.longest(config), max(config.context + 70, FEWEST)))
    return np.arange(max(0, end - MOST), end)

def pair_of_models(make, config):
    """make's model of a small config and the plain one, with the same new weights, in float64."""
    ours, plain = make(config), model_torch.GPT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, w in plain.named_parameters():
            noise = torch.randn(w.shape, generator=generator)
            if name.endswith("qkv.weight"):
                w.copy_(1.75 * noise / w.shape[-1] ** 0.5)             # queries and keys of 1.75, scores of 1.75^2
            else:
                w.add_(noise / w.shape[-1] ** 0.5 if w.ndim > 1 else 0.1 * noise)
            if re.search(r"encoding\..*bias$", name):
                w.add_(8 * torch.rand(w.shape, generator=generator))   # gates of all kinds, or FoX forgets what is far
    ours.load_state_dict(plain.state_dict())
    return ours.double(), plain.double()

def some_input(config, *shape):
    """Numbers such as a norm gives, (*shape, C), in float64."""
    return torch.randn(*shape, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

@contextlib.contextmanager
def refused_in_one_line(path):
    """An InputError for any other error; all numbers are float64, and no random numbers of the caller's are drawn."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)                         # of a constant that an edit makes, too
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise InputError(f"{path}: it does not fit model_torch.py as it is now ({type(error).__name__}: {reason}): "
                             "make your edit there too") from error
        finally:
            torch.set_default_dtype(before)

def relative_error(found, right):
    """The norm of the difference over that of the right array; infinity for another shape."""
    if found.shape != right.shape:
        return float("inf")
    found, right = found.detach().double(), right.detach().double()
    size = right.norm()
    return float((found - right).norm() / (size if size > 0 else 1))

def refuse_above(error, limit, message):
    """InputError of a message, with {error} in it, if a relative error is above the limit."""
    if not error <= limit:
        raise InputError(message.format(error=f"{error:.2g}" if error < 0.001 else f"{error:.1%}"))

def describe_attention(ours, theirs, h, pos, linear):
    """(the function in which two blocks' attention differs, what to do); pos: of the plain block.

    linear: whether a linear bias is used where there is one.
    """
    if has_band(ours):
        return "engine/fast.py: attend_banded", "make your edit in engine/banded.py too, or let has_band return False"
    if linear and ours.linear is not None:
        return "engine/fast.py: attend_linear", ("make your edit there too, or let linear_of in engine/linear_bias.py "
                                                 f"return None for {ours.encoding.settings.pe}")
    q, k, v = theirs.project(h, pos.rows)
    q, k = theirs.encoding.rotate(q, k, pos.rows)
    bias = theirs.encoding.score(q, k, theirs.encoding.key_state(h), pos.pairs)
    results = []
    for attention in (ours, theirs):
        torch.manual_seed(0)
        results.append(attention.attend(q, k, v, bias, pos.pairs))
    if relative_error(*results) > EXACT:
        return "engine/fast.py: attend or mask", "make your edit there too, or remove the one that differs"
    file = f"{type(ours).__module__.replace('.', '/')}.py"
    return f"{file}: forward of {type(ours).__name__}", "make your edit there too, or in one of the steps that it calls"

def check_attention(ours, theirs, h, pos, linear, found, right):
    """InputError that names the function if what two blocks' attention made is not the same."""
    error = max(map(relative_error, found, right))
    if not error <= EXACT:
        name, advice = describe_attention(ours, theirs, h, pos, linear)
        refuse_above(error, EXACT, f"{name} does not compute what the attention of model_torch.py does now "
                     f"({{error}} off): {advice}")

# ---- training --------------------------------------------------------------------------------------------------------

def check_training(make, config, half=False):
    """InputError unless make(config), a GPT of fast parts, has the loss and the gradients of model_torch.GPT.

    In train mode from the same seed, so that a dropout counts that only one of them has. half: also as bf16 trains it.
    """
    path = "engine/fast.py"
    config = small_config(config)
    n = some_positions(config)
    with refused_in_one_line(path), torch.enable_grad():
        fast, plain = pair_of_models(make, config)
        tables = [model.tables(n) for model in (fast, plain)]
        for i, (ours, theirs) in enumerate(zip(fast.blocks, plain.blocks, strict=True)):
            ours.attn.linear_in_fp32 = half
            if config.block(i) in [config.block(j) for j in range(i)]:
                continue
            settings = theirs.attn.encoding.settings
            pos = [table[settings] for table in tables]
            h = some_input(config, 1, len(n))
            found, right = (forward_and_backward(block.attn, h, at)
                            for block, at in zip((ours, theirs), pos, strict=True))
            check_attention(ours.attn, theirs.attn, h, pos[1], half, found, right)
            if half:
                check_in_bf16(path, ours.attn, theirs.attn, h, pos)
        check_loss(fast, plain, config)
        check_all_gradients(path, fast, plain, config, n)

def forward_and_backward(attention, h, pos):
    """The output of a block's attention, and the gradients by its input and by each parameter."""
    torch.manual_seed(0)
    attention.train()
    h = h.detach().requires_grad_()
    y = attention(h, pos)
    weights = dict(attention.named_parameters()) | dict(attention.encoding.named_parameters())
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).sin()
    grads = torch.autograd.grad((y * (1 + upstream)).sum(), [h, *weights.values()], allow_unused=True)
    return [y.detach(), *(torch.zeros(()) if g is None else g for g in grads)]

def check_in_bf16(path, ours, theirs, h, pos):
    """Two blocks' attention by autocast in bf16; right is the plain one in fp32, or in bf16.

    Either may be nearer: the plain one loses digits of positions, too. What is allowed grows with what it costs to
    round the weights and the input alone, since large slopes make much of little.
    """
    ours, theirs, rounded = (in_fp32(attention) for attention in (ours, theirs, theirs))
    pos = [at._replace(rows=to_fp32(at.rows), pairs=to_fp32(at.pairs)) for at in pos]
    h = h.float()

    def run(attention, h, at, half=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return forward_and_backward(attention, h, at)[0]

    with torch.no_grad():
        rounded.qkv.weight.copy_(rounded.qkv.weight.bfloat16())
    exact = run(theirs, h, pos[1])
    cost = relative_error(run(rounded, h.bfloat16().float(), pos[1]), exact)
    found = run(ours, h, pos[0], half=True)
    error = min(relative_error(found, right) for right in (exact, run(theirs, h, pos[1], half=True)))
    refuse_above(error, ROUNDED + 3 * cost, f"{path}: in bf16, attend_linear or attend does not compute what the "
                 "attention of model_torch.py does now ({error} off): make your edit there too")

def in_fp32(attention):
    attention = copy.deepcopy(attention).float()
    attention.encoding.float()                                         # is no module of it where blocks share it
    attention.__dict__.pop("linear", None)                             # is of the other encoding
    return attention

def to_fp32(table):
    return table.float() if table is not None and table.is_floating_point() else table

def check_loss(ours, plain, config):
    """InputError unless two models' cross_entropy and its gradients are the same."""
    h = some_input(config, 2, 40)
    targets = torch.arange(80).view(2, 40) * 7 % config.vocab
    targets[0, 3] = -100
    results = []
    for model in (ours, plain):
        x, w = (3 * y.detach() / y.std() for y in (h, plain.output_weight))
        x, w = x.requires_grad_(), (w / config.width**0.5).requires_grad_()            # logits of 9
        loss = model.cross_entropy(x, w, targets)
        results.append([loss.detach(), *torch.autograd.grad(loss, (x, w))])
        with torch.no_grad():
            results[-1].append(model.cross_entropy(x, w, targets, reduction="none"))
    error = max(map(relative_error, *results))
    refuse_above(error, EXACT, "engine/cross_entropy.py: cross_entropy does not compute what that of model_torch.py "
                 "does now ({error} off): make your edit there too")

def check_all_gradients(path, ours, plain, config, n):
    """InputError unless two models have the same loss of some tokens, and the same gradient of each parameter."""
    tokens, targets = (torch.arange(len(n))[None] * step % config.vocab for step in (7, 11))
    losses = []
    for model in (ours, plain):
        torch.manual_seed(0)
        losses.append(model.train()(tokens, targets, positions=n))
    refuse_above(relative_error(*losses), EXACT, f"{path}: FastGPT has another loss than model_torch.py's GPT now "
                 "({error} off): make your edit there too")
    weights = [dict(model.named_parameters()) for model in (ours, plain)]
    grads = [torch.autograd.grad(loss, [*own.values()], allow_unused=True)
             for loss, own in zip(losses, weights, strict=True)]
    for name, *both in zip(weights[0], *grads, strict=True):
        error = relative_error(*(torch.zeros(()) if g is None else g for g in both))
        refuse_above(error, EXACT, f"{path}: FastGPT has another gradient of {name} than model_torch.py's GPT now "
                     "({error} off): make your edit there too")
