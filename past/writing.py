"""generate.py --cache: text from a run whose keys and values are kept, at other positions or in a stream without end.

With --stream each new token sees itself, the first tokens (--sinks) and the last ones (--window), at positions 0, 1, 2,
... at every step (Xiao et al. 2024).
"""

import contextlib
import copy
import functools
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import data
from common import pick_device
from config import InputError
from engine.fast import linear_of
from generate import TOKENS, distribution, draw, print_text
from model_torch import Encoding, project
from past import scaling
from past.cache import Cache
from past.reading import load


def add_flags(parser):
    """The flags that generate.py has besides with --cache."""
    parser.add_argument("--prompts", metavar="FILE", help="a prompt a line, whose texts are written side by side; "
                        "where a scaling looks at the length, it is that of the longest")
    parser.add_argument("--stream", action="store_true", help="forget all but the first and the last tokens: no end")
    scaling.add_stream_flags(parser)
    scaling.add_scaling_flags(parser)

def lightened(module, known=None):
    """A copy of a module, with the same weights, that takes less time around its operations.

    Its parameters and parts are plain attributes, and to call it is to call `forward`, past nn.Module's hooks. These
    lookups and calls are a large part of a pass over one token. known: what was copied before, by module.
    """
    known = {} if known is None else known
    if module in known:
        return known[module]
    kind = type(module)
    known[module] = light = copy.copy(module)
    parts = {name: lightened(part, known) for name, part in (module.__dict__ | module._modules).items()
             if isinstance(part, nn.Module)}
    light.__dict__ |= module._parameters | parts | {"_modules": {name: parts[name] for name in module._modules}}
    call = kind.forward
    if kind is nn.Linear:
        call = staticmethod(functools.partial(F.linear, weight=module.weight))
    elif kind is nn.LayerNorm:
        call = staticmethod(functools.partial(torch.layer_norm, normalized_shape=module.normalized_shape,
                                              weight=module.weight, bias=module.bias, eps=module.eps))
    if not isinstance(module, Encoding):                 # of which others ask for the exact class
        light.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return light

class Step:
    """model.hidden(tokens, cache=cache) for one new token of each sequence, (B, 1), by the same operations.

    model: a lightened one. Attention is written out here where its scores gain nothing, or in fp32 a_m b_n by a linear
    door, and any other is the model's own.
    """

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.kinds = {encoding.settings: encoding for encoding in model.encodings()}
        self.moves = cache.window is not None or model.chunk or model.hold            # keys, at each step
        self.blocks = [(block.norm1, block.attn, block.attn.encoding, block.attn.qkv.weight, block.attn.proj,
                        block.norm2, block.mlp, *bias_of(block.attn)) for block in model.blocks]

    def __call__(self, tokens):
        model, cache = self.model, self.cache
        if self.moves:
            return model.hidden(tokens, cache=cache)
        n = cache.positions[..., -1:] + 1
        cache.positions = np.concatenate((cache.positions, n), -1)
        tables = {settings: model.at(encoding, n, cache.positions, False) for settings, encoding in self.kinds.items()}
        first = self.blocks[0][2]
        x = first.embed(model.embedding(tokens), tables[first.settings].rows)                          # (B, 1, C)
        shape = len(tokens), model.config.n_heads, 1, -1                               # of one token: no transposition
        for norm1, attn, encoding, qkv, proj, norm2, mlp, no_bias, linear, w in self.blocks:
            at = tables[encoding.settings]
            h = norm1(x)
            if no_bias or linear and at.n is not None:
                q, k, v = project(encoding.override(h, at.rows), qkv)                                  # (B, 1, C) each
                q, k, v = q.view(shape), k.view(shape), v.view(shape)
                q, k = encoding.rotate(q, k, at.rows)                                                  # (B, H, 1, D)
                bias = None
                if no_bias:
                    k, v = cache.extend(attn, k, v)                                                    # (B, H, S, D)
                else:
                    kept = encoding.keep(h)
                    k, v, *more = cache.extend(attn, k, v, *(() if kept is h else (kept,)))
                    a, b = linear(q, *more or (h,), w, at.n)
                    bias = a[..., None] * (b[..., None, :] - b[..., -1:, None])                        # (..., H, 1, S)
                x = x + proj(attn.attend(q, k, v, bias, at.pairs).flatten(1)[:, None])
            else:
                x = x + attn(h, at._replace(cache=cache))
            x = x + mlp(norm2(x))
        return model.norm(x)

def bias_of(attn):
    """(whether nothing is added to the scores, the linear door by which something is, or None, W_k (H, D, C))."""
    kind = type(attn.encoding)
    linear = linear_of(attn.encoding, attn.causal)
    shut = kind.score is Encoding.score and kind.keep is Encoding.keep
    w = attn.qkv.weight.chunk(3)[1].unflatten(0, (attn.n_heads, -1))
    return shut and linear is None, linear if w.dtype == torch.float32 else None, w

@torch.inference_mode()
def generate_cached(model, prompts, cache, seed=0, **sampling):
    """Yields, step after step and without end, the next token of each sequence, [B].

    prompts: B lists of tokens, each at least one. All sequences are read side by side: where the shortest prompt has
    ended, the longer ones still give their own tokens, and only then those that are drawn. A sequence draws from its
    own generator, of the seed and its index, so that the others do not matter. sampling: generate.distribution's.
    """
    rngs = [np.random.default_rng([seed, b]) for b in range(len(prompts))]
    shared = min(map(len, prompts))
    model = lightened(model)
    device = model.embedding.weight.device
    read = torch.tensor([prompt[:shared] for prompt in prompts], device=device)                   # (B, T)
    h = model.hidden(read, cache=cache)[:, -1:]                                                   # (B, 1, C)
    step = Step(model, cache)
    for t in itertools.count(shared):
        p = distribution((h @ model.output_weight.T)[:, 0].cpu(), **sampling)                     # (B, V)
        drawn = [prompt[t] if t < len(prompt) else draw(row[None], rng)
                 for prompt, rng, row in zip(prompts, rngs, p, strict=True)]
        yield drawn
        h = step(torch.tensor(drawn, device=device)[:, None])

def read_prompts(args):
    """The texts of --prompt or --prompts."""
    if args.prompts is None:
        return [args.prompt]
    for flag in ("prompt", "stream"):
        if getattr(args, flag):
            raise InputError(f"--prompts gives all prompts of texts that end: leave out --{flag}")
    try:
        with open(args.prompts, encoding="utf-8-sig") as file:
            lines = [line.removesuffix("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {args.prompts}: {error}") from None
    if not lines:
        raise InputError(f"--prompts {args.prompts} has no line: write one prompt a line")
    return lines

def write(args, sampling):
    """What generate.py does with --cache."""
    positions = scaling.scaling_of(args)
    if not args.stream and (args.sinks is not None or args.window is not None):
        raise InputError("--sinks and --window say what a stream keeps: add --stream, or leave them out")
    texts = read_prompts(args)
    model, record = load(args.run, pick_device(args.device))
    encoding = data.run_tokenizer(args.run, record["data"])
    prompts = [[x for x in (encoding.eot_token, *encoding.encode_ordinary(text)) if x is not None] for text in texts]
    most = max(map(len, prompts))
    if args.stream:
        model.check_stream()
        cache = Cache(*scaling.stream_sizes(args, model.config.context))
        n_tokens = args.tokens
        longest = cache.sinks + cache.window + 1
    else:
        room = model.longest - most + 1                  # the last token is drawn, and not read
        cache = Cache()
        n_tokens = args.tokens or max(1, min(TOKENS, room))
        longest = most + n_tokens - 1
        if n_tokens > room:
            raise InputError(f"{args.run} has positions for {model.longest} tokens: <|endoftext|> and prompt are "
                             f"{most}, so that --tokens can be at most {room}")
    model.scale_to(longest, **positions)
    steps = generate_cached(model, prompts, cache, args.seed, **sampling)
    if args.prompts is None:
        with contextlib.suppress(KeyboardInterrupt):     # how a stream ends
            print_text(args.prompt, (drawn for [drawn] in steps), n_tokens, encoding, stop=not args.stream)
        return
    least = min(map(len, prompts))
    columns = zip(*itertools.islice(steps, most - least + n_tokens), strict=True)
    for text, prompt, tokens in zip(texts, prompts, columns, strict=True):
        print_text(text, tokens[len(prompt) - least :], n_tokens, encoding)
