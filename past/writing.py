"""generate.py --cache: text from a run whose keys and values are kept, at other positions or in a stream without end.

With --stream each new token sees itself, the first tokens (--sinks) and the last ones (--window), at positions 0, 1, 2,
... at every step (Xiao et al. 2024).
"""

import contextlib
import itertools

import numpy as np
import torch

import data
from common import pick_device
from config import InputError
from generate import TOKENS, distribution, draw, print_text
from past import scaling
from past.cache import Cache
from past.reading import load


def add_flags(parser):
    """The flags that generate.py has besides with --cache."""
    parser.add_argument("--stream", action="store_true", help="forget all but the first and the last tokens: no end")
    scaling.add_stream_flags(parser)
    scaling.add_scaling_flags(parser)

@torch.no_grad()
def generate_cached(model, prompts, cache, seed=0, **sampling):
    """Yields, step after step and without end, the next token of each sequence, [B].

    prompts: B lists of tokens, each at least one. All sequences are read side by side: where the shortest prompt has
    ended, the longer ones still give their own tokens, and only then those that are drawn. A sequence draws from its
    own generator, of the seed and its index, so that the others do not matter. sampling: generate.distribution's.
    """
    rngs = [np.random.default_rng([seed, b]) for b in range(len(prompts))]
    shared = min(map(len, prompts))
    read = torch.tensor([prompt[:shared] for prompt in prompts])         # (B, T)
    for t in itertools.count(shared):
        h = model.hidden(read.to(model.embedding.weight.device), cache=cache)[:, -1:]             # (B, 1, C)
        p = distribution((h @ model.output_weight.T)[:, 0].cpu(), **sampling)                     # (B, V)
        drawn = [prompt[t] if t < len(prompt) else draw(row[None], rng)
                 for prompt, rng, row in zip(prompts, rngs, p, strict=True)]
        read = torch.tensor(drawn)[:, None]
        yield drawn

def write(args, sampling):
    """What generate.py does with --cache."""
    positions = scaling.scaling_of(args)
    if not args.stream and (args.sinks is not None or args.window is not None):
        raise InputError("--sinks and --window say what a stream keeps: add --stream, or leave them out")
    model, record = load(args.run, pick_device(args.device))
    encoding = data.run_tokenizer(args.run, record["data"])
    prompt = [encoding.eot_token, *encoding.encode_ordinary(args.prompt)]
    if args.stream:
        model.check_stream()
        cache = Cache(*scaling.stream_sizes(args, model.config.context))
        n_tokens = args.tokens
        longest = cache.sinks + cache.window + 1
    else:
        room = model.longest - len(prompt) + 1           # the last token is drawn, and not read
        cache = Cache()
        n_tokens = args.tokens or max(1, min(TOKENS, room))
        longest = len(prompt) + n_tokens - 1
        if n_tokens > room:
            raise InputError(f"{args.run} has positions for {model.longest} tokens: <|endoftext|> and prompt are "
                             f"{len(prompt)}, so that --tokens can be at most {room}")
    model.scale_to(longest, **positions)
    tokens = (drawn for [drawn] in generate_cached(model, [prompt], cache, args.seed, **sampling))
    with contextlib.suppress(KeyboardInterrupt):         # how a stream ends
        print_text(args.prompt, tokens, n_tokens, encoding, stop=not args.stream)
