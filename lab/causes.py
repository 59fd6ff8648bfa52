"""Where our ablations and the paper's table 7 disagree: does something else in the model make the difference?

    python -m lab.causes                         every pair below, one run of seed 0 each, of the preset mini
    python -m lab.causes --causes biases,post-norm --variants expe,expe-l1

In the paper "p is stable" loses 0.33 nats at the trained length, and l = 1 rises by 1.53 up to four times that length;
of ours neither does. Each run here changes one thing that a GPT may have otherwise, and is scored on val by the paper's
protocol. The numbers of all runs stand in results/study/causes.json, and what stands there is not trained again.
"""

import shlex
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import cli
import data
import fast
import model_torch
import train
from cli import CommandLine, listed, pick_device
from config import PRESETS
from files import held, read_json, write_rows
from lab import measures
from lab.grids import VARIANTS
from lab.tuned import STUDY

WHICH, BATCH = ("expe", "expe-constant", "expe-l1"), 4096               # the latter in tokens
MULTIPLES, LONGEST = (1, 2, 4), 16       # of the trained length: those scored, and what a document has, as in eval.py

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

CAUSES = {                               # name: (flags of train.py, what is done to the model before its first step)
    "none": ("", None),
    "biases": ("", biases),
    "post-norm": ("", post_norm),
    "torch's first weights": ("", torch_start),
    "dropout 0.1": ("--dropout 0.1", None),
    "tied embedding": ("--tied", None),
    "Adam's own betas, no decay": ("--beta2 0.999 --weight-decay 0", None),
    "rmsnorm and swiglu": ("--norm rmsnorm --mlp swiglu", None),
}

def losses(model, documents, context):
    """The loss by the paper's protocol, of windows of each of MULTIPLES."""
    settings, found = measures.Settings(context, LONGEST * context, 1, 1, None), []
    for length in (multiple * context for multiple in MULTIPLES):
        [windows] = measures.nonoverlap(documents, length, settings)
        parts = torch.tensor([window.tokens.tolist() for window in windows]).split(max(1, BATCH // length))
        total = sum(model.token_losses(part[:, :-1], part[:, 1:]).double().sum().item() for part in parts)
        found.append(total / (len(windows) * length))
    return found

def run(variant, cause, args):
    """Train and score one pair; a row of the file."""
    flags, change = CAUSES[cause]
    words = shlex.split(f"{VARIANTS[variant]} {flags} --seed {args.seed}") + args.train_flags
    model_config, config = train.configure(train.command_line().parse_args(words), *PRESETS["mini"])
    folder = data.ensure(config.data, model_config.vocab_size, config.min_doc_tokens, config.max_tokens)
    tokens, context = data.open_split(folder, "train"), model_config.context
    torch.manual_seed(config.seed)
    model = model_torch.GPT(model_config, config.seed, **fast.PARTS)
    if change is not None:
        change(model)
    backend = train.TorchBackend(model_config, config, pick_device("cpu"), False, model)
    for step in tqdm(range(config.steps), f"{variant}, {cause}", leave=False, disable=None, bar_format=cli.BAR):
        loss, _ = backend.step(data.batch(tokens, context, config.batch_size, config.seed, step), step)
    model.eval()
    documents = data.split_documents(data.open_split(folder, "val"), data.read_meta(folder)["eot"])
    found = losses(model, measures.usable(documents, LONGEST * context, None), context)
    return {"variant": variant, "cause": cause, "seed": config.seed, "flags": shlex.join(words), "steps": config.steps,
            "train_loss": float(loss), "losses": found}

def main(argv=None):
    parser = CommandLine(prog="python -m lab.causes", description=__doc__)
    parser.add_argument("--causes", type=listed(str, *CAUSES), default=[*CAUSES], metavar="NAME,...",
                        help=f"default: all, {', '.join(CAUSES)}")
    parser.add_argument("--variants", type=listed(str, *VARIANTS), default=[*WHICH], metavar="NAME,...",
                        help=f"default: {','.join(WHICH)}")
    parser.add_argument("--seed", type=cli.at_least(0), default=0, metavar="N", help="default: 0")
    parser.add_argument("--out", type=cli.new_file, metavar="FILE", help=f"default: results/{STUDY}/causes.json")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="of train.py, for every run")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        path = Path(args.out or f"results/{STUDY}/causes.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(path.parent):
            rows = read_json(path, [dict]) if path.exists() else []
            for pair in [(variant, cause) for cause in args.causes for variant in args.variants]:
                if not any((row["variant"], row["cause"], row["seed"]) == (*pair, args.seed) for row in rows):
                    rows.append(run(*pair, args))
                    write_rows(path, rows)
        print(f"{'what is changed':28}{'variant':18}" + "".join(f"{k}x".rjust(8) for k in MULTIPLES))
        for row in rows:
            print(f"{row['cause']:28}{row['variant']:18}" + "".join(f"{loss:8.3f}" for loss in row["losses"]))

if __name__ == "__main__":
    main()
