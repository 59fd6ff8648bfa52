"""Text from a run, with a key/value cache that can stream without end.

    python generate.py runs/mini-expe-s0 --prompt "def main(" --tokens 200
    python generate.py runs/mini-expe-s0 --prompt "import " --prompt "class " --temperature 0
    python generate.py runs/mini-rope-s0 --stream                        goes on until Ctrl-C, in constant memory

A text begins as a training document does, after <|endoftext|>. With --stream each new token sees itself, the first
tokens (--sinks) and the last ones (--window), at positions 0, 1, 2, ... at every step (Xiao et al. 2024).
"""

import codecs
import contextlib
import io
import itertools
import math
import sys
import time

from cli import CommandLine, at_least, number, pick_device
from config import InputError
from files import read_text
from past import scaling

# torch and what imports it are imported in the functions that use them, so that --help and a wrong flag answer at once.
TOKENS = 200  # of a text that does not stream


# ---- the next token --------------------------------------------------------------------------------------------------

def distribution(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The probabilities (B, V), float64, from which the next token is drawn.

    softmax(logits / temperature); of that the top_k largest, renewed; of those the fewest whose sum reaches top_p
    (Holtzman et al. 2020), renewed. Temperature 0 puts all on the largest logit.
    """
    import torch

    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits.double() - logits.double().amax(-1, keepdim=True)    # or else a small temperature would overflow
    p, order = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)      # (B, V)
    if top_k is not None:
        p[:, top_k:] = 0
        p /= p.sum(-1, keepdim=True)
    p[p.cumsum(-1) - p >= top_p] = 0                    # what lies before it is enough
    p /= p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p)

def generate(model, prompts, cache, seed=0, **how):
    """Yields, step after step and without end, the next token of each sequence, (B,).

    prompts: B lists of tokens, each at least one. All sequences are read side by side: where the shortest prompt has
    ended, the longer ones still give their own tokens, and only then those that are drawn. A sequence draws from its
    own generator, by the seed and its index, so that the others do not matter. `how` is distribution's.
    """
    import numpy as np
    import torch

    rngs = [np.random.default_rng([seed, b]) for b in range(len(prompts))]
    shared = min(map(len, prompts))
    read = torch.tensor([prompt[:shared] for prompt in prompts])         # (B, T)
    for t in itertools.count(shared):
        with torch.no_grad():
            h = model.hidden(read.to(model.embedding.weight.device), cache=cache)[:, -1]          # (B, C)
            below = distribution((h @ model.output_weight.T).cpu(), **how).cumsum(-1)             # (B, V)
        if not below.isfinite().all():
            raise InputError("the model's logits are not finite numbers: its weights are too large")
        drawn = []
        for prompt, rng, row in zip(prompts, rngs, below, strict=True):
            given = t < len(prompt)
            drawn.append(prompt[t] if given else int(torch.searchsorted(row, rng.random() * row[-1], right=True)))
        read = torch.tensor(drawn)[:, None]
        yield drawn


# ---- the command -----------------------------------------------------------------------------------------------------

def write(steps, prompts, n_tokens, encoding, stop):
    """Print the texts, each to n_tokens beyond its prompt or, if `stop`, to its <|endoftext|>; returns tokens drawn.

    A single text appears token by token, several one below the other once all are finished or Ctrl-C ends them. Bytes
    that do not make a character yet wait for those that follow.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    outs = [sys.stdout] if len(prompts) == 1 else [io.StringIO() for _ in prompts]
    left, drawn = [n_tokens for _ in prompts], 0

    def show(b, tokens):
        print(decoders[b].decode(encoding.decode_bytes(tokens)), end="", file=outs[b], flush=True)

    for b, prompt in enumerate(prompts):
        show(b, prompt[1:])  # without the <|endoftext|> that it begins with
    with contextlib.suppress(KeyboardInterrupt):                # how a stream ends
        for t, step in enumerate(steps, start=min(map(len, prompts))):
            for b, token in enumerate(step):
                if t < len(prompts[b]) or not left[b]:
                    continue
                ended = stop and token == encoding.eot_token
                drawn += 1
                left[b] = 0 if ended else left[b] - 1
                show(b, [] if ended else [token])
            if not any(left) or getattr(sys.stdout, "gone", None):
                break
    for b, out in enumerate(outs):
        print(end="\n" if out is sys.stdout else f"--- {b + 1} ---\n{out.getvalue()}\n", flush=True)
    return drawn

def read_flags(parser, argv):
    """The flags as typed; InputError for values and combinations that no run can have."""
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory of train.py")
    add("--prompt", action="append", default=[], metavar="TEXT", help="how a text begins; again: more, side by side")
    add("--prompt-file", metavar="FILE", help="one more prompt: all of a UTF-8 file")
    add("--tokens", type=at_least(1), metavar="N", help=f"to write at most (default: {TOKENS}; with --stream: no end)")
    add("--temperature", type=number, metavar="X", default=1.0, help="divides logits; 0: the likeliest (default: 1)")
    add("--top-k", type=at_least(1), metavar="N", help="draw from the N likeliest tokens (default: all)")
    add("--top-p", type=number, metavar="X", default=1.0, help="draw from the fewest that sum to X (default: 1, all)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the draw (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--stream", action="store_true", help="forget all but the first and the last tokens: no end")
    scaling.add_stream_flags(parser)
    scaling.add_scaling_flags(parser)
    args = parser.parse_args(argv)
    if args.temperature < 0:
        raise InputError(f"--temperature must be at least 0, got {args.temperature}")
    if not 0 < args.top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, got {args.top_p}")
    if args.temperature == 0 and (args.top_k is not None or args.top_p < 1):
        raise InputError("--temperature 0 takes the likeliest token: leave out --top-k and --top-p")
    if args.stream and args.tokens is None and len(args.prompt) + (args.prompt_file is not None) > 1:
        raise InputError("several texts are shown when they are finished, and a stream has no end: add --tokens")
    if not args.stream and (args.sinks is not None or args.window is not None):
        raise InputError("--sinks and --window say what a stream keeps: add --stream, or leave them out")
    return args

def main(argv=None):
    parser = CommandLine(prog="generate.py", description="Write text with a trained model, token by token.",
                         epilog=__doc__[__doc__.index("    python") :])
    with parser.one_line_errors():
        args = read_flags(parser, argv)
        asked = scaling.scaling_of(args)
        if args.prompt_file is not None:
            args.prompt.append(read_text(args.prompt_file))
        from data import run_tokenizer
        from past.cache import Cache
        from past.reading import load
        model, record = load(args.run, pick_device(args.device))
        encoding = run_tokenizer(args.run, record["data"])
        prompts = [[encoding.eot_token, *encoding.encode_ordinary(text)] for text in args.prompt or [""]]
        given = max(map(len, prompts))
        if args.stream:
            model.check_stream()
            cache, n_tokens = Cache(*scaling.stream_sizes(args, model.config.context)), args.tokens or math.inf
            longest = cache.sinks + cache.window + 1
        else:
            room = max(0, model.longest - given + 1)                     # the last token is drawn, and not read
            cache, n_tokens = Cache(), args.tokens or max(1, min(TOKENS, room))
            longest = given + n_tokens - 1
            if n_tokens > room:
                raise InputError(f"{model.config.encoding.pe} has positions for {model.longest} tokens: <|endoftext|> "
                                 f"and prompt are {given}, so that --tokens can be at most {room}")
        model.scale_to(longest, **asked)

        start = time.perf_counter()
        how = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        drawn = write(generate(model, prompts, cache, args.seed, **how), prompts, n_tokens, encoding, not args.stream)
        seconds = time.perf_counter() - start
        print(f"{drawn:,} tokens in {seconds:.1f} s, {drawn / seconds:,.0f} tokens/s", file=sys.stderr)

if __name__ == "__main__":
    main()
