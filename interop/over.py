"""Export a run to transformers, and import a model of transformers as a run.

    to      rope with rmsnorm and swiglu is a Llama; rope, or partial, with layernorm and gelu a GPT-NeoX; learned with
            these two a GPT-2. Any other is a folder with its own code, for trust_remote_code=True.
    from    a Llama or a GPT-NeoX with the layers of this project; an error names whatever else the model has.

Neither needs transformers, since its folders are JSON and safetensors.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import common
import data
from config import InputError, ModelConfig, configure, make_encoding
from generate import TOKENS
from interop.tokens import CONFIG, from_tokenizers, to_tokenizers
from model_numpy import parameter_shapes
from model_torch import score_divisor

ROOT = Path(__file__).resolve().parent.parent
CORE = ("expe", "config", "model_numpy", "model_torch")
README = """# A GPT with the positional encoding {pe}, trained for {step:,} steps

In this folder, this writes a text that continues "The". Every text of the training data begins with the token
`<|endoftext|>`, and so must a prompt.

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code={own})
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code={own})
tokens = torch.tensor([[tokenizer.bos_token_id, *tokenizer("The").input_ids]])
written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length={length}, do_sample=False)
print(tokenizer.decode(written[0], skip_special_tokens=True))
```
"""


# ---- the architectures -----------------------------------------------------------------------------------------------

class Kind(NamedTuple):
    """An architecture of transformers: what its config.json says, and how its weights are called and laid out."""

    architecture: str
    model_type: str
    ours: dict                           # what our layers are there
    fields: dict                         # {name in its config: ours}
    fixed: dict                          # {name in its config: the values that are as ours, the first to be written}
    modules: dict                        # {our module, blocks without a number: its own, several where ours is stacked}
    biased: str = "never"                # which of our matrices have a bias there
    turn: Any = lambda name, w, n_heads: w             # our weight, laid out as there
    back: Any = lambda name, w, n_heads: w             # its inverse

    def places(self, name):
        """([their modules], weight or bias) of one of our parameters; our own module if they have none for it."""
        module, _, kind = name.rpartition(".")
        number = "".join(re.findall(r"^blocks\.(\d+)\.", module))
        places = self.modules.get(re.sub(r"\.\d+\.", ".", module), [module])
        return [place.format(number) for place in places], kind

    def fits(self, pe, model):
        """Whether a GPT of model_torch.py with an encoding is a model of this architecture."""
        c = model.config
        plain = not (c.nope_every or c.window) and c.softmax == "plain" and self.ours.items() <= vars(c).items()
        root = score_divisor(torch.empty(c.d_head)) == c.d_head**0.5                   # theirs divide scores by sqrt(D)
        modules = {re.sub(r"\.\d+\.", ".", name.rpartition(".")[0]) for name in model.state_dict()}
        return pe == c.encoding.pe and plain and root and modules <= self.modules.keys()

    def theirs(self, weights, n_heads):
        """{their name: tensor} of our {name: tensor}."""
        tensors = {}
        for name, w in weights.items():
            places, kind = self.places(name)
            parts = self.turn(name, w, n_heads).chunk(len(places))
            tensors |= {f"{place}.{kind}": part.contiguous() for place, part in zip(places, parts, strict=True)}
            if re.search(self.biased, name):
                tensors[f"{places[0]}.bias"] = w.new_zeros(len(w))
        return tensors

    def from_theirs(self, weights, config):
        """{our name: tensor} of theirs, those that heads share repeated; InputError for what is not of our layers."""
        tensors = {}
        left = dict(weights)
        for name, shape in parameter_shapes(config).items():
            places, kind = self.places(name)
            for place in places:
                if f"{place}.{kind}" not in left:
                    raise InputError(f"lacks {place}.{kind}")
            parts = [left.pop(f"{place}.{kind}").float() for place in places]
            try:
                parts = [w.unflatten(0, (-1, config.d_head)).repeat_interleave(len(parts[0]) // len(w), 0).flatten(0, 1)
                         if len(w) < len(parts[0]) else w for w in parts]
                tensors[name] = self.back(name, torch.cat(parts), config.heads).contiguous()
                if tensors[name].shape != shape:
                    raise TypeError
            except (RuntimeError, TypeError):
                raise InputError(f"has {places[0]}.{kind} in another shape than config.json makes it") from None
        kept = ("rotary_emb.inv_freq", *(f"{head}.weight" for head in self.modules["head"] if config.tied))
        for name, w in left.items():
            if w.any() and not name.endswith(kept):
                raise InputError(f"has {name}, and our layers have no such part")
        return tensors

def by_heads(name, w, n_heads):
    """W_q, W_k and W_v, each of all heads, (3C, C), as those three of each head."""
    return w.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2) if "qkv" in name else w

def by_parts(name, w, n_heads):
    return w.unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(0, 2) if "qkv" in name else w

def transposed(name, w, n_heads):
    return w.T if re.search("attn|mlp", name) else w

SHAPE = {"vocab_size": "vocab", "hidden_size": "width", "intermediate_size": "mlp_width",
         "num_hidden_layers": "layers", "num_attention_heads": "heads", "max_position_embeddings": "context",
         "tie_word_embeddings": "tied"}
TANH = ("gelu_new", "gelu_pytorch_tanh")

LLAMA = Kind(
    "LlamaForCausalLM", "llama", {"norm": "rmsnorm", "mlp": "swiglu"}, SHAPE | {"rms_norm_eps": "norm_eps"},
    {"hidden_act": ("silu",), "attention_bias": (False, True), "mlp_bias": (False, True)},
    {"embedding": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"],
     "blocks.norm1": ["model.layers.{}.input_layernorm"], "blocks.norm2": ["model.layers.{}.post_attention_layernorm"],
     "blocks.attn.qkv": [f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"],
     "blocks.attn.proj": ["model.layers.{}.self_attn.o_proj"],
     **{f"blocks.mlp.{part}": [f"model.layers.{{}}.mlp.{part}_proj"] for part in ("gate", "up", "down")}},
)

NEOX = Kind(
    "GPTNeoXForCausalLM", "gpt_neox", {"norm": "layernorm", "mlp": "gelu"},
    SHAPE | {"layer_norm_eps": "norm_eps", "hidden_dropout": "dropout"},
    {"hidden_act": TANH, "attention_bias": (False, True), "use_parallel_residual": (False,)},
    {"embedding": ["gpt_neox.embed_in"], "norm": ["gpt_neox.final_layer_norm"], "head": ["embed_out"],
     "blocks.norm1": ["gpt_neox.layers.{}.input_layernorm"],
     "blocks.norm2": ["gpt_neox.layers.{}.post_attention_layernorm"],
     "blocks.attn.qkv": ["gpt_neox.layers.{}.attention.query_key_value"],
     "blocks.attn.proj": ["gpt_neox.layers.{}.attention.dense"],
     "blocks.mlp.up": ["gpt_neox.layers.{}.mlp.dense_h_to_4h"],
     "blocks.mlp.down": ["gpt_neox.layers.{}.mlp.dense_4h_to_h"]},
    "mlp", by_heads, by_parts,
)

GPT2 = Kind(
    "GPT2LMHeadModel", "gpt2", {"norm": "layernorm", "mlp": "gelu"},
    {"vocab_size": "vocab", "n_embd": "width", "n_inner": "mlp_width", "n_layer": "layers", "n_head": "heads",
     "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied", "resid_pdrop": "dropout",
     "embd_pdrop": "dropout"},
    {"activation_function": TANH, "attn_pdrop": (0.0,)},
    {"embedding": ["transformer.wte"], "encoding": ["transformer.wpe"], "norm": ["transformer.ln_f"],
     "head": ["lm_head"], "blocks.norm1": ["transformer.h.{}.ln_1"], "blocks.norm2": ["transformer.h.{}.ln_2"],
     "blocks.attn.qkv": ["transformer.h.{}.attn.c_attn"], "blocks.attn.proj": ["transformer.h.{}.attn.c_proj"],
     "blocks.mlp.up": ["transformer.h.{}.mlp.c_fc"], "blocks.mlp.down": ["transformer.h.{}.mlp.c_proj"]},
    "attn|mlp", transposed, transposed,
)

def turning(e, model):
    rope = {"rope_type": "default", "rope_theta": e.base, "partial_rotary_factor": getattr(e, "rotary_fraction", 1.0)}
    return {"rope_parameters": rope}

def looking_up(e, model):
    return {"n_positions": e.longest(model)}

KINDS = [("rope", LLAMA, turning), ("rope", NEOX, turning), ("partial", NEOX, turning), ("learned", GPT2, looking_up)]


# ---- to transformers -------------------------------------------------------------------------------------------------

def to_transformers(run, out):
    """Write the folder of a run; returns (its architecture's name, the run's step). InputError for what cannot be."""
    folder = new_folder(out)
    gpt, record = common.load_model(run)
    config = gpt.config
    encoding = data.run_tokenizer(run, record["data"])
    if not config.causal:
        raise InputError(f"{run} sees both sides, and what generates from a cache must be causal: export a run that "
                         "was trained with a causal mask")
    known = [(kind, positions) for pe, kind, positions in KINDS if kind.fits(pe, gpt)]
    written = {"dtype": "float32", "bos_token_id": encoding.eot_token, "eos_token_id": encoding.eot_token,
               "use_cache": True}
    files = {}
    if known:
        [(kind, positions)] = known
        written |= {"architectures": [kind.architecture], "model_type": kind.model_type}
        written |= {name: getattr(config, field) for name, field in kind.fields.items()}
        written |= {name: values[0] for name, values in kind.fixed.items()} | positions(config.encoding, config)
        weights = kind.theirs(gpt.state_dict(), config.heads)
    else:
        classes = {"AutoConfig": "modeling_gpt.GPTConfig", "AutoModelForCausalLM": "modeling_gpt.GPTForCausalLM"}
        written |= {name: getattr(config, field) for name, field in SHAPE.items()}
        written |= {"architectures": ["GPTForCausalLM"], "model_type": "exact-positions", "auto_map": classes,
                    "tie_word_embeddings": False, "model": dataclasses.asdict(config)}
        weights = {f"gpt.{name}": w for name, w in gpt.state_dict().items()}
        files = sources(config.encoding.pe) | {"LICENSE": common.read_text(ROOT / "LICENSE")}
    length = min(TOKENS, config.encoding.longest(config))
    files |= {
        "README.md": README.format(pe=config.encoding.pe, step=record["step"], own=not known, length=length),
        "tokenizer.json": json.dumps(to_tokenizers(encoding)), "tokenizer_config.json": json.dumps(CONFIG, indent=1),
        "config.json": json.dumps(written, indent=1)}
    folder.mkdir(parents=True, exist_ok=True)
    common.write_bytes(folder / "model.safetensors", save(weights, {"format": "pt"}))
    for name, text in files.items():
        common.write_text(folder / name, text)
    return written["architectures"][0], record["step"]

def new_folder(out):
    """The path of a folder that is new or empty; InputError for any other."""
    folder = Path(os.path.realpath(out))
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"OUT must be a new folder, and {str(out)!r} has files in it: choose another")
    return folder

def sources(pe):
    """{file name: text} of interop/modeling_gpt.py and the files that it needs: those of CORE, zoo/ as they import it.

    They lie side by side, since transformers copies no sub-folder, and so their imports are made relative. It copies
    what `from .NAME import ...` names, which the last lines of modeling_gpt.py do for the files of zoo/.
    """
    paths = [ROOT / "interop/modeling_gpt.py", *(ROOT / f"{name}.py" for name in CORE), ROOT / f"zoo/{pe}.py"]
    texts = {}
    for path in paths:                                                                 # which grows meanwhile
        if path.exists() and path.name not in texts:
            text = common.read_text(path)
            names = re.findall(r'(?:from zoo import |\bzoo\.|zoo_module\(")(\w+)', text)
            paths += [ROOT / f"zoo/{name}.py" for name in names]
            for ours, relative in RELATIVE.items():
                text = re.sub(ours, relative, text, flags=re.MULTILINE)
            texts[path.name] = text
    zoo = [name.removesuffix(".py") for name in texts if (ROOT / "zoo" / name).exists()]
    texts["modeling_gpt.py"] += "\n" + "".join(
        f"from .{name} import __doc__ as about_{name}  # noqa: E402, F401\n" for name in zoo)
    return texts

RELATIVE = {                             # {an import of our files: the same among files that lie side by side}
    rf"^( *)import ({'|'.join(CORE)})$": r"\1from . import \2",
    rf"^( *)from ({'|'.join(CORE)}) import ": r"\1from .\2 import ",
    r"^( *)from zoo import ": r"\1from . import ",
    r"^( *)from zoo\.(\w+) import ": r"\1from .\2 import ",
    r"^( *)import zoo\.(\w+) as ": r"\1from . import \2 as ",
    r'import_module\(f"zoo(\.[^"]+)"\)': r'import_module(f"\1", __package__)',
}

# ---- from transformers -----------------------------------------------------------------------------------------------

def from_transformers(folder, out):
    """Make a run, at step 0 of its training here, of a folder of transformers; returns its architecture's name."""
    run = new_folder(out)
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder: give one that save_pretrained has written")
    theirs = common.read_json(folder / "config.json")
    kinds = {kind.model_type: kind for kind in (LLAMA, NEOX)}
    if theirs.get("model_type") not in kinds:
        raise InputError(f"{folder / 'config.json'} is of the kind {theirs.get('model_type')!r}, and what can be read "
                         f"is {' and '.join(kinds)}")
    kind = kinds[theirs["model_type"]]
    try:
        config = ModelConfig(**kind.ours, **{field: theirs[name] for name, field in kind.fields.items()},
                             encoding=rotation(kind, theirs))
        for name, values in kind.fixed.items():
            if theirs.get(name, values[0]) not in values:
                raise InputError(f"{name} is {theirs[name]!r}, and our layers have {values[0]!r}")
        if theirs.get("head_dim") not in (None, config.d_head):
            raise InputError(f"head_dim is {theirs['head_dim']}, and our heads have width/heads, {config.d_head}")
    except KeyError as error:
        raise InputError(f"{folder / 'config.json'} lacks {error}") from None
    except InputError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from None
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{path} is missing: the weights must be in one file of that name")
    try:
        weights = {re.sub(r"^lm_head\b", kind.modules["head"][0], name): w for name, w in load_file(path).items()}
        weights = kind.from_theirs(weights, config)
    except (SafetensorError, InputError) as error:
        raise InputError(f"{path} {error}") from None
    ranks = from_tokenizers(common.read_json(folder / "tokenizer.json"), folder / "tokenizer.json")
    if len(ranks) + 1 != config.vocab:
        raise InputError(f"{folder} has {len(ranks) + 1:,} tokens and a vocabulary of {config.vocab:,}")
    run.mkdir(parents=True, exist_ok=True)
    data.write_ranks(run / "tokenizer.tiktoken", ranks)
    record = {
        "model": dataclasses.asdict(config), "train": dataclasses.asdict(configure("mini")[1]),
        "data": {"folder": "unknown (give --data)", "source": "unknown", "pattern": data.SPLIT_PATTERN,
                 "vocab": len(ranks) + 1, "splits": dict.fromkeys(("train", "val", "test"), {"sha256": None}),
                 "tokenizer": {"sha256": common.hash_file(run / "tokenizer.tiktoken")}},
        "provenance": {"preset": "mini", "from": str(folder)}}
    common.write_text(run / "config.json", json.dumps(record, indent=1) + "\n")
    common.write_text(run / "log.jsonl", "")
    common.save_checkpoint(run, {name: w.numpy() for name, w in weights.items()}, 0)
    return kind.architecture

def rotation(kind, theirs):
    """The make_encoding of a config's rope_parameters, or of the fields that earlier versions had in their place."""
    old = {"rope_theta": theirs.get("rope_theta", theirs.get("rotary_emb_base", 10000.0)),
           "partial_rotary_factor": theirs.get("rotary_pct", 0.25)}
    try:
        rope = theirs.get("rope_parameters") or old | (theirs.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
    except (TypeError, AttributeError):
        raise InputError("rope_parameters must be an object with the number rope_theta") from None
    if rope_type != "default":
        raise InputError(f"rope_type is {rope_type!r}, and a run begins with 'default'")
    fraction = rope.get("partial_rotary_factor", 1.0) if kind is NEOX else 1.0
    return make_encoding("rope", base=rope["rope_theta"]) if fraction == 1 else make_encoding(
        "partial", base=rope["rope_theta"], rotary_fraction=fraction)
