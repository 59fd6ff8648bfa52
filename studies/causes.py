r"""One change of the model at a time: does it explain the paper's ablations, and what does it do to ExPE-K?

    python -m studies.causes                         every pair below, one run of seed 0 each, of the preset mini
    python -m studies.causes --causes biases,post-norm --variants expe,expe-l1
    python -m studies.causes --variants expe-learn-random --causes none --seeds 0,4,5,6,7
    python -m studies.causes --variants expe-on-k --causes none,trained-gains,smaller-gains,larger-gains,rotary-half \
        --seeds 1,2,3

In the paper "p is stable" loses 0.33 nats at the trained length. Up to four times that length l = 1 rises by 1.53 and
"learn p" by 1.01. Ours do none of this, so the first causes are what a GPT may do otherwise. ("Learn p, random"
is bad for some seeds.) The last four change ExPE-K: they give each head its own multiplier of theta, or half of each
head to RoPE. Each run is scored on val by the paper's protocol. The numbers of all runs stand in
results/mini/causes.json, and what stands there is not trained again.
"""

import itertools
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from tqdm import tqdm

import data
import model_torch
import train
from common import CommandLine, at_least, listed, lock, new_file, pick_device
from config import InputError, Override, make_encoding
from engine import fast
from eval import cut_windows, mean_loss
from lab import measures
from lab.files import BAR, read_json, write_rows
from lab.grids import VARIANTS, flags_of
from studies.tuning import PRESET

ABLATIONS = ("expe", "expe-constant", "expe-l1", "expe-learn-init")
MULTIPLES = (1, 2, 4, 16)                # of the trained length
ROW = {"variant": str, "cause": str, "seed": int, "losses": [float]}

class WithBiases(fast.Attention):
    """W_q, W_k and W_v with a bias each; nn.Linear's own are used where it is called."""

    def heads(self, parts):
        return super().heads(x + bias for x, bias in zip(parts, self.qkv.bias.chunk(3), strict=True))

class PostNorm(model_torch.Block):
    """norm(x + attention(x)), then norm(x + mlp(x)), as Vaswani et al. 2017 have it."""

    def forward(self, x, at):
        x = self.norm1(x + self.dropout(self.attn(x, at)))
        return self.norm2(x + self.dropout(self.mlp(x)))

def biases(model):
    for block in model.blocks:
        block.attn.__class__ = WithBiases
        for linear in (part for part in block.modules() if isinstance(part, nn.Linear)):
            linear.bias = nn.Parameter(torch.zeros(len(linear.weight)))

def post_norm(model):
    for block in model.blocks:
        block.__class__ = PostNorm

def torch_start(model):
    """nn.Linear's own first weights, uniform in 1/sqrt(inputs), and nn.Embedding's."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.reset_parameters()

class PlaceGains(nn.Module):
    """W_k's columns of the position times a multiplier a row: b_n + n w, the key at n, becomes b_n + n (gains * w)."""

    def __init__(self, l, gains):
        super().__init__()
        self.l, self.gains = l, gains                                      # a function that gives (C, 1)

    def forward(self, w):                                                  # (3C, C)
        q, k, v = w.chunk(3)
        return torch.cat((q, torch.cat((k[:, : self.l] * self.gains(), k[:, self.l :]), 1), v))

class TrainedGains(nn.Module):
    """One a head, (C, 1) of them; its logarithm is what is trained, from that of `first`, (H,)."""

    def __init__(self, first, width):
        super().__init__()
        self.log = nn.Parameter(first.log())
        self.width = width

    def forward(self):
        return self.log.exp().repeat_interleave(self.width)[:, None]

def trained_gains(model, ratio=1.0):
    """In each block, head i starts with the multiplier ratio^i."""
    config = model.config
    for block in model.blocks:
        gains = TrainedGains(ratio ** torch.arange(config.n_heads), config.d_head)
        parametrize.register_parametrization(block.attn.qkv, "weight", PlaceGains(config.encoding.l, gains))

def rotary_half(model):
    """Half of each head's dimensions turn, as those of the encoding `partial` do, and the other half has the place."""
    config = model.config
    settings = make_encoding("partial", rotary_fraction=0.5)
    turning = model_torch.make_encoding_module(settings, config)
    still = (torch.arange(config.d_model) % config.d_head >= config.d_head // 2)[:, None].float()
    for block in model.blocks:
        parametrize.register_parametrization(block.attn.qkv, "weight", PlaceGains(config.encoding.l, lambda: still))

    def rotate(q, k, table):
        rows = settings.rows(np.arange(q.shape[2]), config)
        return turning.rotate(q, k, model_torch.as_tensor(rows, q))

    model.encoding.rotate = rotate

CAUSES = {                               # name: (flags of train.py, what is done to the model before its first step)
    "none": ("", None),
    "biases": ("", biases),
    "post-norm": ("", post_norm),
    "torch-start": ("", torch_start),
    "dropout": ("--dropout 0.1", None),
    "tied": ("--tied", None),
    "adam": ("--beta2 0.999 --weight-decay 0", None),                      # Adam's own betas, and no decay
    "llama": ("--norm rmsnorm --mlp swiglu", None),
    "trained-gains": ("", trained_gains),
    "smaller-gains": ("", partial(trained_gains, ratio=1 / 8)),
    "larger-gains": ("", partial(trained_gains, ratio=8.0)),
    "rotary-half": ("", rotary_half),
}
OF_KEYS = ("none", "trained-gains", "smaller-gains", "larger-gains", "rotary-half")

def losses(model, documents, context):
    """By the paper's protocol, in windows of each of MULTIPLES."""
    return [mean_loss(model, cut_windows(documents, k * context, MULTIPLES[-1] * context)) for k in MULTIPLES]

def configured(variant, cause, seed, args):
    """The flags of train.py of one run, and the ModelConfig and TrainConfig that they make; InputError if none."""
    words = shlex.split(f"{flags_of(variant)} {CAUSES[cause][0]} --seed {seed}") + args.train_flags
    _, model_config, config = train.read_flags(["--preset", PRESET, "--fast", *words])
    if cause in OF_KEYS[1:] and not isinstance(model_config.encoding, Override):
        raise InputError(f"{cause} changes what ExPE puts into W_k, which {variant} lacks: name a variant of expe")
    return words, model_config, config

def run(variant, cause, seed, args):
    """Train and score one model; a row of the file."""
    change = CAUSES[cause][1]
    words, model_config, config = configured(variant, cause, seed, args)
    folder, meta = data.ensure(config.data, model_config.vocab_size, config.min_doc_tokens, config.max_tokens)
    tokens = data.open_split(folder, "train")
    context = model_config.context
    torch.manual_seed(config.seed)
    model = model_torch.GPT(model_config, config.seed, **fast.PARTS)
    if change is not None:
        change(model)
    backend = train.TorchBackend(model_config, config, pick_device("cpu"), False, model)
    for step in tqdm(range(config.steps), f"{variant}, {cause}", leave=False, disable=None, bar_format=BAR):
        loss, _ = backend.step(data.batch(tokens, context, config.batch_size, config.seed, step), step)
    model.eval()
    documents = data.split_documents(data.open_split(folder, "val"), meta["eot"])
    values = losses(model, measures.usable(documents, MULTIPLES[-1] * context, None), context)
    return {"variant": variant, "cause": cause, "seed": config.seed, "flags": shlex.join(words), "steps": config.steps,
            "train_loss": float(loss), "losses": values}

def main(argv=None):
    parser = CommandLine(prog="python -m studies.causes", description=__doc__)
    parser.add_argument("--causes", type=listed(str, *CAUSES), metavar="NAME,...", help=", ".join(CAUSES))
    parser.add_argument("--variants", type=listed(str, *VARIANTS), metavar="NAME,...",
                        help=f"default: {','.join(ABLATIONS)}; expe-on-k for {','.join(OF_KEYS)}")
    parser.add_argument("--seeds", type=listed(at_least(0)), default=[0], metavar="N,N,...", help="default: 0")
    parser.add_argument("--out", type=new_file, metavar="FILE", help=f"default: results/{PRESET}/causes.json")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="of train.py, for every run")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if args.train_flags and not args.out:
            parser.error("runs with flags of their own need a file of their own: add --out FILE")
        for wanted in asked(args):
            configured(*wanted, args)                                      # all are right before the first is trained
        path = Path(args.out or f"results/{PRESET}/causes.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.parent):
            rows = read_json(path, [ROW]) if path.exists() else []
            for variant, cause, seed in asked(args):
                words = shlex.join(configured(variant, cause, seed, args)[0])
                same = [row for row in rows if (row["variant"], row["cause"], row["seed"]) == (variant, cause, seed)]
                if any(row["flags"] != words for row in same):
                    raise InputError(f"{path} has this run with other flags, {same[0]['flags']}: name another --out")
                if not same:
                    rows.append(run(variant, cause, seed, args))
                    write_rows(path, rows)
        print(f"{'what is changed':16}{'variant':16}{'seed':>4}" + "".join(f"{k}x".rjust(8) for k in MULTIPLES))
        for row in rows:
            losses = "".join(f"{loss:8.3f}" for loss in row["losses"])
            print(f"{row['cause']:16}{row['variant']:16}{row['seed']:4}{losses}")

def asked(args):
    """(variant, cause, seed) of every run: without --variants, of the ablations or of ExPE-K."""
    for seed, cause in itertools.product(args.seeds, args.causes or CAUSES):
        own = ABLATIONS * (cause == "none" or cause not in OF_KEYS) + ("expe-on-k",) * (cause in OF_KEYS)
        for variant in args.variants or own:
            yield variant, cause, seed

if __name__ == "__main__":
    main()
