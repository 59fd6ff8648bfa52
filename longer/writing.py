"""generate.py --cache: text from a run whose keys and values are kept, at other positions or in a stream without end.

With --stream each new token sees itself, the first tokens (--sinks) and the last ones (--window), at positions 0, 1, 2,
... at every step (Xiao et al. 2024).
"""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import torch

from backends import pick_device
from longer import flags
from longer.cache import Cache
from longer.reading import load
from runs import describe
from settings import InputError, prefix_errors
from tokenizer import read_tokenizer


def add_flags(parser):
    """The additional flags of generate.py --cache."""
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line; the texts are written side by "
                        "side, an empty line between them, and scalings that depend on the length use the longest")
    parser.add_argument("--stream", action="store_true", help="keep only the first and last tokens; write until Ctrl-C")
    flags.add_stream_flags(parser)
    flags.add_scaling_flags(parser)

@torch.no_grad()
def generate_cached(model, prompts, cache, choose, seed=0):
    """Yields, step after step and without end, the next token of each sequence, [B].

    prompts: B lists of tokens, each at least one. All sequences are read side by side: where the shortest prompt has
    ended, the longer ones still give their own tokens, and only then those that are drawn. A sequence draws from its
    own generator, of the seed and its index, so that the others do not matter. choose(logits (1, V), generator) draws.
    """
    rngs = [np.random.default_rng([seed, b]) for b in range(len(prompts))]
    shared = min(map(len, prompts))
    tokens = [prompt[:shared] for prompt in prompts]
    for t in itertools.count(shared):
        read = torch.tensor(tokens, device=model.embedding.weight.device)              # (B, T), then (B, 1)
        h = model.hidden(read, cache=cache)[:, -1]                                     # (B, C)
        logits = (h @ model.output_weight.T).cpu()                                     # (B, V)
        drawn = [prompt[t] if t < len(prompt) else choose(row[None], rng)
                 for prompt, rng, row in zip(prompts, rngs, logits, strict=True)]
        yield drawn
        tokens = [[token] for token in drawn]

def read_prompts(args):
    """The texts of --prompt or --prompts."""
    if args.prompts is None:
        return [args.prompt]
    for flag in ("prompt", "stream"):
        if getattr(args, flag):
            raise InputError(f"--prompts gives all prompts of texts that end: leave out --{flag}")
    try:
        return Path(args.prompts).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {args.prompts}: {error}") from None

def write(args, choose, print_text, most):
    """What generate.py does with --cache, by its own choose and print_text; most: tokens of a text without --tokens."""
    positions = flags.scaling_of(args)
    if not args.stream and (args.sinks is not None or args.window is not None):
        raise InputError("--sinks and --window say what a stream keeps: add --stream, or leave them out")
    texts = read_prompts(args)
    model, record = load(args.run, pick_device(args.device))
    describe(args.run, record)
    tokenizer = read_tokenizer(args.run, record["data"])
    prompts = [[x for x in (tokenizer.eot_token, *tokenizer.encode_ordinary(text)) if x is not None] for text in texts]
    sizes = [len(prompt) for prompt in prompts]
    if args.stream:
        model.check_stream()
        cache = Cache(*flags.stream_sizes(args, model.config.context))
        n_tokens = args.tokens
        longest = cache.sinks + cache.window + 1
    else:
        cache = Cache()
        room = model.longest - max(sizes) + 1            # the last token is drawn, and not read
        n_tokens = args.tokens or max(1, min(most, room))
        longest = max(sizes) + n_tokens - 1
        if n_tokens > room:
            raise InputError(f"{args.run} has positions for {model.longest} tokens: <|endoftext|> and prompt are "
                             f"{max(sizes)}, so that --tokens can be at most {room}")
    model.scale_to(longest, **positions)
    steps = generate_cached(model, prompts, cache, choose, args.seed)
    if len(texts) == 1:                                  # its tokens are printed as they come
        columns = [(token for [token] in steps)]
    else:
        with prefix_errors(args.run):
            columns = zip(*itertools.islice(steps, max(sizes) - min(sizes) + n_tokens), strict=True)
    with contextlib.suppress(KeyboardInterrupt), prefix_errors(args.run):              # Ctrl-C ends a stream
        for b, (text, size, tokens) in enumerate(zip(texts, sizes, columns, strict=True)):
            new = itertools.islice(tokens, size - min(sizes), None)
            print_text("\n" * (b > 0) + text, new, n_tokens, tokenizer, stop=not args.stream)
