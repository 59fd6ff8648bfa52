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

import config
import data
from common import pick_device
from config import InputError
from engine.fast import linear_of
from generate import TOKENS, distribution, draw, print_text
from longer import scaling
from longer.cache import Cache
from longer.reading import load
from model_torch import T5, ALiBi, Encoding, RoPE, project

AHEAD = 64                               # positions of which Step makes the tables at once
ONE = np.arange(1)

def add_flags(parser):
    """The flags that generate.py has besides with --cache."""
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line; the texts are written side by "
                        "side, an empty line between them, and scalings that depend on the length use the longest")
    parser.add_argument("--stream", action="store_true", help="keep only the first and last tokens; write until Ctrl-C")
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
    """model.hidden(tokens, cache=cache) for one new token of each sequence, (B, 1), to the same bits.

    model: a lightened one. Attention is written out here where its scores gain nothing, or what the distance alone
    says, or in fp32 a_m b_n by a linear door, and any other is the model's own. What is made of positions is made for
    AHEAD of them at once.
    """

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        gaps = (np.diff(cache.positions) != 1).any() or cache.positions.ndim > 1
        moved = model.chunk or model.hold or model.least
        self.plain = gaps or cache.window is not None or moved                        # whether the model does it all
        self.kinds = {}                  # encoding or settings: (one such encoding, kind)
        self.ahead = {}                  # likewise: (the first of AHEAD positions, their At, the last one's bias)
        self.blocks = []
        cut = 2 * model.config.d_model
        for block in model.blocks:
            attn, encoding, w = block.attn, block.attn.encoding, block.attn.qkv.weight
            kind, linear = kind_of(attn, model.config)
            name = encoding if kind == "distance" else encoding.settings              # whose weights make a bias
            self.kinds[name] = encoding, kind
            self.blocks.append((name, kind, linear, block.norm1, attn, encoding, w, w[:cut], w[cut:], attn.proj,
                                block.norm2, block.mlp))

    def __call__(self, tokens):
        model, cache = self.model, self.cache
        if self.plain:
            return model.hidden(tokens, cache=cache)
        n = cache.positions[-1:] + 1
        cache.positions = np.concatenate((cache.positions, n))
        tables = {name: self.at(name, *made, n) for name, made in self.kinds.items()}
        first = model.blocks[0].attn.encoding
        x = first.embed(model.embedding(tokens), tables[self.blocks[0][0]][0].rows)                    # (B, 1, C)
        B, H, C = len(tokens), model.config.n_heads, x.shape[-1]                       # of one token: no transposition
        for name, kind, linear, norm1, attn, encoding, qkv, w_qk, w_v, proj, norm2, mlp in self.blocks:
            at, bias = tables[name]
            h = norm1(x)
            if kind == "other":
                x = x + attn(h, at._replace(cache=cache))
            else:
                if kind == "turn":
                    parts = F.linear(h, qkv).view(B, 3 * H, 1, -1)
                    qk = turn(parts.narrow(1, 0, 2 * H), *at.rows)                                     # (B, 2H, 1, D)
                    q, k, v = qk.narrow(1, 0, H), qk.narrow(1, H, H), parts.narrow(1, 2 * H, H)
                else:
                    parts = encoding.override(h, at.rows)                                              # (B, 1, C) each
                    if parts[0] is parts[1] is not parts[2]:                           # as project has it
                        q, k = F.linear(parts[0], w_qk).view(B, 2 * H, 1, -1).chunk(2, 1)              # (B, H, 1, D)
                        v = F.linear(parts[2], w_v).view(B, H, 1, -1)
                    else:
                        q, k, v = [part.view(B, H, 1, -1) for part in project(parts, qkv)]
                    q, k = encoding.rotate(q, k, at.rows)
                if kind == "linear":
                    kept = encoding.keep(h)
                    k, v, *more = cache.extend(attn, k, v, *(() if kept is h else (kept,)))            # (B, H, S, D)
                    a, b = linear(q, *more or (h,), at.n)
                    bias = a.unsqueeze(-1) * (b - b[..., -1:]).unsqueeze(-2)                     # (..., H, 1, S)
                else:
                    k, v = cache.extend(attn, k, v)
                x = x + proj(attn.attend(q, k, v, bias, None).reshape(B, 1, C))
            x = x + mlp(norm2(x))
        return model.norm(x)

    def at(self, name, encoding, kind, n):
        """(model.at, its bias or None) of a new token at n, (1,)."""
        model, keys = self.model, self.cache.positions
        if kind == "other":
            return model.at(encoding, n, keys, False), None
        far, at, axis, bias = self.ahead.get(name, (n[:0], None, None, None))
        i = int(n[0] - far[0]) if len(far) else 0
        if i >= len(far):
            i = 0
            far = np.arange(n[0], max(n[0] + 1, min(n[0] + AHEAD, model.longest)))
            at = model.at(encoding, far, np.concatenate((keys[:-1], far)), False)
            if kind == "distance":
                like = model.embedding.weight.new_empty(1, model.config.n_heads, 1, 1)
                bias = encoding.score(like, like, None, at.pairs[..., -1:, :])                         # (..., H, 1, S)
            if kind == "turn":
                cos, sin = at.rows.chunk(2, -1)                                                        # (..., T, D/2)
                at = at._replace(rows=(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
            elif at.rows is not None:                    # the axis of the positions is that which grows with them
                one = model.at(encoding, far[:1], np.concatenate((keys[:-1], far[:1])), False).rows
                axis = next((j for j in range(one.ndim) if one.shape[j] != at.rows.shape[j]), 0)
            self.ahead[name] = far, at, axis, bias
        if kind == "turn":
            at = at._replace(rows=[x.narrow(-2, i, 1) for x in at.rows])
        elif at.rows is not None and len(far) > 1:
            at = at._replace(rows=at.rows.narrow(axis, i, 1))
        if at.n is not None:
            at = at._replace(n=at.n[..., -len(keys) :])
        return at, None if bias is None else bias[..., -len(keys) :]

def turn(x, cos, sin):
    """RoPE.turn of x (..., D) to the same bits, cos twice beside itself and sin beside -sin."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

def kind_of(attn, model):
    """("none", "turn", "distance", "linear" or "other", the linear door or None): how Step makes a block's scores.

    model: its ModelConfig. "distance" is a bias of the distance alone.
    """
    encoding, settings = attn.encoding, attn.encoding.settings
    linear = linear_of(encoding, attn.causal)
    if type(encoding) is ALiBi and linear or type(encoding) is T5 and type(settings) is config.T5:
        return "distance", None
    if linear and attn.qkv.weight.dtype == torch.float32 and settings.pairs(ONE, ONE, model) is None:
        w = attn.qkv.weight.chunk(3)[1].unflatten(0, (attn.n_heads, -1))               # W_k
        steps = [linear.step_of(w)] if hasattr(linear, "step_of") else []
        return "linear", lambda q, kept, n: linear(q, kept, w, n, *steps)
    kind = type(encoding)
    if linear or encoding.value or kind.score is not Encoding.score or kind.keep is not Encoding.keep:
        return "other", None
    return "turn" if kind is RoPE else "none", None

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
    for b, (text, prompt, tokens) in enumerate(zip(texts, prompts, columns, strict=True)):
        if b:
            print()
        print_text(text, tokens[len(prompt) - least :], n_tokens, encoding)
