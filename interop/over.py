"""The architectures of transformers that a run of ours can become, with the names and layouts of their weights."""

import math
import re
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """An architecture of transformers: what its config.json says, and how its weights are called and laid out."""

    architecture: str
    model_type: str
    encodings: tuple                     # those of ours that it has
    ours: dict                           # what our layers are there
    fields: dict                         # {name in its config: ours}
    fixed: dict                          # {name in its config: its value}
    positions: Any                       # (settings of the encoding, ModelConfig) to what its config says of them
    modules: dict                        # {our module, blocks without a number: its own, several where ours is stacked}
    biased: str = "never"                # which of our matrices have a bias there
    lay_out: Any = lambda name, w, n_heads: w          # our weight, laid out as there

    def fits(self, config):
        """Whether a GPT of this ModelConfig is a model of this architecture, unless model_torch.py was edited."""
        alike = not (config.nope_every or config.window or config.cycle) and config.softmax == "plain"
        return alike and config.encoding.pe in self.encodings and self.ours.items() <= vars(config).items()

    def settings(self, config):
        """What its config.json says of a ModelConfig."""
        named = {"architectures": [self.architecture], "model_type": self.model_type}
        values = {name: getattr(config, field) for name, field in self.fields.items()}
        return named | values | self.fixed | self.positions(config.encoding, config)

    def homeless(self, weights):
        """The names of our {name: tensor} that this architecture has no place for."""
        return [name for name in weights if module_of(name) not in self.modules]

    def theirs(self, weights, n_heads):
        """{their name: tensor} of our {name: tensor}."""
        tensors = {}
        for name, w in weights.items():
            number = "".join(re.findall(r"\.(\d+)\.", name))                           # of the block
            places = [place.format(number) for place in self.modules[module_of(name)]]
            parts = self.lay_out(name, w, n_heads).chunk(len(places))
            for place, part in zip(places, parts, strict=True):
                tensors[place + name[name.rindex(".") :]] = part.contiguous()          # .weight or .bias
            if re.search(self.biased, name):
                tensors[f"{places[0]}.bias"] = w.new_zeros(len(w))
        return tensors

def module_of(name):
    """Our module that has this parameter, blocks without a number."""
    return re.sub(r"\.\d+\.", ".", name.rpartition(".")[0])

def by_heads(name, w, n_heads):
    """W_q, W_k and W_v, each of all heads, (3C, C), as those three of each head."""
    return w.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2) if "qkv" in name else w

def transposed(name, w, n_heads):
    return w.T if re.search("attn|mlp", name) else w

def rotary(e, model):
    """RoPE as transformers has it, of the first int(D * partial_rotary_factor) dimensions: 0.58 of 100 would be 57."""
    fraction = getattr(e, "rotary_fraction", 1.0)
    while int(model.d_head * fraction) < round(model.d_head * fraction):
        fraction = math.nextafter(fraction, 1)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": e.base, "partial_rotary_factor": fraction}}

SHAPE = {"vocab_size": "vocab", "hidden_size": "width", "intermediate_size": "mlp_width",
         "num_hidden_layers": "layers", "num_attention_heads": "heads", "max_position_embeddings": "context",
         "tie_word_embeddings": "tied"}

LLAMA = Kind(
    "LlamaForCausalLM", "llama", ("rope",), {"norm": "rmsnorm", "mlp": "swiglu"}, SHAPE | {"rms_norm_eps": "norm_eps"},
    {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}, rotary,
    {"embedding": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"],
     "blocks.norm1": ["model.layers.{}.input_layernorm"], "blocks.norm2": ["model.layers.{}.post_attention_layernorm"],
     "blocks.attn.qkv": [f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"],
     "blocks.attn.proj": ["model.layers.{}.self_attn.o_proj"],
     **{f"blocks.mlp.{part}": [f"model.layers.{{}}.mlp.{part}_proj"] for part in ("gate", "up", "down")}},
)

NEOX = Kind(
    "GPTNeoXForCausalLM", "gpt_neox", ("rope", "partial"), {"norm": "layernorm", "mlp": "gelu"},
    SHAPE | {"layer_norm_eps": "norm_eps", "hidden_dropout": "dropout"},
    {"hidden_act": "gelu_new", "attention_bias": False, "use_parallel_residual": False}, rotary,
    {"embedding": ["gpt_neox.embed_in"], "norm": ["gpt_neox.final_layer_norm"], "head": ["embed_out"],
     "blocks.norm1": ["gpt_neox.layers.{}.input_layernorm"],
     "blocks.norm2": ["gpt_neox.layers.{}.post_attention_layernorm"],
     "blocks.attn.qkv": ["gpt_neox.layers.{}.attention.query_key_value"],
     "blocks.attn.proj": ["gpt_neox.layers.{}.attention.dense"],
     "blocks.mlp.up": ["gpt_neox.layers.{}.mlp.dense_h_to_4h"],
     "blocks.mlp.down": ["gpt_neox.layers.{}.mlp.dense_4h_to_h"]},
    "mlp", by_heads,
)

GPT2 = Kind(
    "GPT2LMHeadModel", "gpt2", ("learned",), {"norm": "layernorm", "mlp": "gelu"},
    {"vocab_size": "vocab", "n_embd": "width", "n_inner": "mlp_width", "n_layer": "layers", "n_head": "heads",
     "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied", "resid_pdrop": "dropout",
     "embd_pdrop": "dropout"},
    {"activation_function": "gelu_new", "attn_pdrop": 0.0}, lambda e, model: {"n_positions": e.longest(model)},
    {"embedding": ["transformer.wte"], "encoding": ["transformer.wpe"], "norm": ["transformer.ln_f"],
     "head": ["lm_head"], "blocks.norm1": ["transformer.h.{}.ln_1"], "blocks.norm2": ["transformer.h.{}.ln_2"],
     "blocks.attn.qkv": ["transformer.h.{}.attn.c_attn"], "blocks.attn.proj": ["transformer.h.{}.attn.c_proj"],
     "blocks.mlp.up": ["transformer.h.{}.mlp.c_fc"], "blocks.mlp.down": ["transformer.h.{}.mlp.c_proj"]},
    "attn|mlp", transposed,
)
