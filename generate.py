"""Text from a run.

    python generate.py runs/mini-expe-s0 --prompt "def main(" --tokens 200
    python generate.py runs/mini-expe-s0 --prompt "import " --temperature 0
    python generate.py runs/mini-rope-s0 --cache --stream                goes on until Ctrl-C, in constant memory

A text begins as a training document does, after <|endoftext|>. Each new token is drawn from a forward pass over all
tokens before it; --cache keeps their keys and values instead (longer/), and brings flags of its own.
"""

import codecs
import functools
import itertools
import sys

from cli import CommandLine, at_least, number

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

from backends import pick_device
from runs import describe, load_model
from settings import InputError, prefix_errors, require_finite
from tokenizer import read_tokenizer

TOKENS = 200  # of a text, when no --tokens are given

def distribution(logits, temperature=1.0, top_k=None):
    """The probabilities (B, V), float64, from which the next token is drawn: softmax(logits / temperature).

    top_k: only the k largest logits keep a probability. Temperature 0 puts all on the largest one.
    """
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits.double()
    logits = logits - logits.amax(-1, keepdim=True)                      # or else a small temperature would overflow
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]                          # (B, 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return (logits / temperature).softmax(-1)

def draw(p, rng):
    """A token drawn from the probabilities (1, V)."""
    below = p.numpy()[0].cumsum()                                                                 # (V,)
    return int(np.searchsorted(below, rng.random() * below[-1], side="right"))

def choose(logits, rng, **sampling):
    """The next token of a text, drawn by the logits (1, V). sampling: distribution's temperature and top_k.

    InputError if the logits are not finite: a greedy choice among them would be the first token.
    """
    require_finite(logits.isfinite().all(), "logits")
    return draw(distribution(logits.cpu(), **sampling), rng)

@torch.no_grad()
def generate(model, prompt, seed=0, **sampling):
    """Yields one new token after the other, without end, after a prompt of at least one."""
    rng = np.random.default_rng([seed, 0])
    tokens = list(prompt)
    while True:
        read = torch.tensor([tokens], device=model.embedding.weight.device)                       # (1, T)
        tokens.append(choose(model(read)[:, -1], rng, **sampling))
        yield tokens[-1]

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = CommandLine(prog="generate.py", description="Write text with a trained model, token by token.")
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory of train.py")
    add("--prompt", default="", metavar="TEXT", help="how the text begins")
    add("--tokens", type=at_least(1), metavar="N", help=f"tokens to write at most (default: {TOKENS})")
    add("--temperature", type=number, metavar="X", default=1.0, help="divides logits; 0: the likeliest (default: 1)")
    add("--top-k", type=at_least(1), metavar="N", help="draw from the N likeliest tokens (default: all)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of the draw (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--cache", action="store_true", help="keep keys and values (longer/writing.py); see generate.py --cache --help")
    parser.synonyms = parser.synonyms | {flag: f"--cache {flag}" for flag in ("--stream", "--rope-scaling", "--keys")}
    if "--cache" in argv:
        from longer import writing
        writing.add_flags(parser)
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if not args.temperature >= 0:
            raise InputError(f"--temperature must be at least 0, got {args.temperature}")
        sampling = {"temperature": args.temperature, "top_k": args.top_k}
        if args.cache:
            return writing.write(args, functools.partial(choose, **sampling), print_text, TOKENS)
        model, record = load_model(args.run)
        describe(args.run, record)
        model.to(pick_device(args.device))
        if not model.config.causal:
            raise InputError(f"{args.run} sees later tokens, and a text has none yet: name a run with a causal mask")
        tokenizer = read_tokenizer(args.run, record["data"])
        prompt = [x for x in (tokenizer.eot_token, *tokenizer.encode_ordinary(args.prompt)) if x is not None]
        room = model.config.encoding.longest(model.config) - len(prompt) + 1     # the last token is drawn, and not read
        n_tokens = args.tokens or max(1, min(TOKENS, room))
        if n_tokens > room:
            raise InputError(f"{args.run} has positions for {room + len(prompt) - 1} tokens: <|endoftext|> and prompt "
                             f"are {len(prompt)}, so that --tokens can be at most {room}")
        with prefix_errors(args.run):
            print_text(args.prompt, generate(model, prompt, args.seed, **sampling), n_tokens, tokenizer)

def print_text(prompt, tokens, n_tokens, tokenizer, stop=True):
    """Print a prompt and up to n_tokens new tokens as they come, to <|endoftext|> if `stop`; None: without end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")           # a character that lacks bytes waits for them
    print(prompt, end="", flush=True)
    for token in itertools.islice(tokens, n_tokens):
        if stop and token == tokenizer.eot_token:
            break
        print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
    print()

if __name__ == "__main__":
    main()
