"""Text from a run.

    python generate.py runs/mini-expe-s0 --prompt "def main(" --tokens 200
    python generate.py runs/mini-expe-s0 --prompt "import " --temperature 0
    python generate.py runs/mini-rope-s0 --cache --stream                goes on until Ctrl-C, in constant memory

A text begins as a training document does, after <|endoftext|>. Each new token is drawn from a forward pass over all
tokens before it; --cache keeps their keys and values instead (past/), and brings flags of its own.
"""

import codecs
import itertools
import sys

import numpy as np
import torch

import common
import data
from common import CommandLine, at_least, number, pick_device
from config import InputError

TOKENS = 200  # of a text, when no --tokens are given

def distribution(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The probabilities (B, V), float64, from which the next token is drawn.

    softmax(logits / temperature); of that the top_k largest, renewed; of those the fewest whose sum reaches top_p
    (Holtzman et al. 2020), renewed. Temperature 0 puts all on the largest logit.
    """
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

def draw(p, rng):
    """A token drawn from the probabilities (1, V)."""
    below = p.cumsum(-1)[0]                                                                       # (V,)
    if not below.isfinite().all():
        raise InputError("the model's logits are not finite numbers: its weights are too large")
    return int(torch.searchsorted(below, rng.random() * below[-1], right=True))

@torch.no_grad()
def generate(model, prompt, seed=0, **sampling):
    """Yields one new token after the other, without end, after a prompt of at least one. sampling: distribution's."""
    rng = np.random.default_rng([seed, 0])
    tokens = list(prompt)
    while True:
        read = torch.tensor([tokens], device=model.embedding.weight.device)                       # (1, T)
        logits = model(read)[:, -1].cpu()                                                         # (1, V)
        tokens.append(draw(distribution(logits, **sampling), rng))
        yield tokens[-1]

def read_flags(argv):
    parser = CommandLine(prog="generate.py", description="Write text with a trained model, token by token.")
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory of train.py")
    add("--prompt", default="", metavar="TEXT", help="how the text begins")
    add("--tokens", type=at_least(1), metavar="N", help=f"tokens to write at most (default: {TOKENS})")
    add("--temperature", type=number, metavar="X", default=1.0, help="divides logits; 0: the likeliest (default: 1)")
    add("--top-k", type=at_least(1), metavar="N", help="draw from the N likeliest tokens (default: all)")
    add("--top-p", type=number, metavar="X", default=1.0, help="draw from the fewest that sum to X (default: 1, all)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of the draw (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--cache", action="store_true", help="keep keys and values; adds the flags of past/writing.py: "
        "generate.py --cache --help")
    if "--cache" in argv:
        from past import writing
        writing.add_flags(parser)
    args = parser.parse_args(argv)
    if not args.temperature >= 0 or not 0 < args.top_p <= 1:
        raise InputError("--temperature must be at least 0, and --top-p above 0 and at most 1")
    return args

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    with CommandLine(prog="generate.py").one_line_errors():
        args = read_flags(argv)
        sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        if args.cache:
            from past import writing
            return writing.write(args, sampling)
        model, record = common.load_model(args.run)
        model.to(pick_device(args.device))
        encoding = data.run_tokenizer(args.run, record["data"])
        prompt = [encoding.eot_token, *encoding.encode_ordinary(args.prompt)]
        longest = model.config.encoding.longest(model.config)
        n_tokens = args.tokens or max(1, min(TOKENS, longest - len(prompt) + 1))
        if len(prompt) + n_tokens - 1 > longest:         # the last token is drawn, and not read
            raise InputError(f"{args.run} has positions for {longest} tokens: <|endoftext|> and prompt are "
                             f"{len(prompt)}, so that --tokens can be at most {longest - len(prompt) + 1}")
        print_text(args.prompt, generate(model, prompt, args.seed, **sampling), n_tokens, encoding)

def print_text(prompt, tokens, n_tokens, encoding, stop=True):
    """Print a prompt and up to n_tokens new tokens as they come, to <|endoftext|> if `stop`; None: without end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")           # a character that lacks bytes waits for them
    print(prompt, end="", flush=True)
    for token in itertools.islice(tokens, n_tokens):
        if stop and token == encoding.eot_token:
            break
        print(decoder.decode(encoding.decode_bytes([token])), end="", flush=True)
    print()

if __name__ == "__main__":
    main()
