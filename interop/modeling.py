"""The GPT of model_torch.py as transformers calls it: its config, a forward pass with a cache, and so `generate`.

interop/one_file.py copies this, and what it uses of the other files, into the one file of an exported model.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import CORE as SETTINGS
from model_torch import ENCODINGS, NORMS, Attention, Block, as_tensor
from zoo.softmax import set_softmax


class GPTConfig(PretrainedConfig):
    """The shape of the GPT. encodings: {name: what it is set to}; which: (name, window) of each block."""

    model_type = "exact-positions"
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                     "intermediate_size": "d_mlp", "max_position_embeddings": "context"}

    def __init__(self, n_layers=1, d_model=1, n_heads=1, use_cache=True, **values):
        self.n_layers, self.d_model, self.n_heads, self.use_cache = n_layers, d_model, n_heads, use_cache
        super().__init__(**values)

    @property
    def d_head(self):
        return self.d_model // self.n_heads

class At(NamedTuple):
    """Where the tokens of one pass are, as an encoding sees it."""

    rows: Any                            # of the T new tokens, or None
    pairs: Any                           # of the new tokens and all S keys, or None
    padding: Any                         # (B, 1, T, S), -inf where a key is none; or None
    seen: Any                            # (B, 1, T, 1), whether a new token is one, and no padding; or None
    cache: Any                           # transformers', or None

class CachedAttention(Attention):
    """Attention over all keys that a cache of transformers holds."""

    def forward(self, h, at):
        q, k, v = self.project(h, at)                                                  # (B, H, T, D) each
        kept = self.encoding.keep(h)
        if at.seen is not None and kept.shape != h.shape:
            kept = kept * at.seen                                                      # padding says nothing
        if at.cache is not None and kept.shape != h.shape:                             # its bytes lie beside the values
            D = v.shape[-1]
            exact = kept.dtype
            k, v = at.cache.update(k, torch.cat((v, kept.contiguous().view(v.dtype)), -1), self.layer)
            v, kept = v[..., :D], v[..., D:].contiguous().view(exact)                  # of all S keys
        elif at.cache is not None:
            k, v = at.cache.update(k, v, self.layer)
        bias = self.encoding.score(q, k, kept, at.pairs)
        if at.padding is not None:
            bias = at.padding if bias is None else bias + at.padding
        return self.output(self.attend(q, k, v, bias, at.pairs), h)                    # (B, T, C)

class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPTConfig
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        settings = {name: SETTINGS[name](**values) for name, values in config.encodings.items()}
        shared = {name: self.make_encoding(of) for name, of in settings.items() if not of.each_block}
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for i, (name, window) in enumerate(config.which):
            attention = CachedAttention(config, shared.get(name) or self.make_encoding(settings[name]), window)
            attention.layer = i
            self.blocks.append(Block(config, attention, nn.Dropout(config.dropout)))
        self.norm = NORMS[config.norm](config.d_model, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.encoding = shared.get(config.encoding)                                    # or each block has its own
        self.post_init()

    def make_encoding(self, settings):
        encoding = ENCODINGS[settings.pe](settings, self.config)
        if self.config.softmax != "plain":
            set_softmax(encoding, self.config)
        return encoding

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, logits_to_keep=0, **ignored):
        """Logits (B, T, V), and with labels the mean loss in nats of each next token.

        attention_mask (B, S): 0 for what only pads a text, on either side. Positions count what is left, from 0, unless
        position_ids (B, T) say them. Tables are exact: NumPy makes them of whole numbers, on the CPU, so that a GPU
        waits for the mask and the position_ids of each pass.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be (B, S): a cache that is not a DynamicCache asks for another")
        T = input_ids.shape[1]
        cache = past_key_values
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        S = T + (0 if cache is None else cache.get_seq_length())
        padding = new = None
        keys = np.arange(S)
        if attention_mask is not None and not attention_mask.all():
            seen = attention_mask[:, -S:].bool()                                       # (B, S)
            new = seen[:, None, S - T :, None]
            keys = (seen.cumsum(-1) - 1).clamp(min=0).cpu().numpy()
            itself = torch.eye(S, dtype=torch.bool, device=seen.device)[S - T :]       # or it would see nothing
            padding = torch.zeros(len(seen), 1, T, S, dtype=self.dtype, device=seen.device)
            padding = padding.masked_fill(~(seen[:, None] | itself)[:, None], -torch.inf)
        queries = keys[..., -T:] if position_ids is None else position_ids.cpu().numpy()
        keys = queries if S == T else keys
        x = self.embedding(input_ids)                                                  # (B, T, C)
        kinds = {block.attn.encoding.settings.pe: block.attn.encoding.settings for block in self.blocks}
        at = {name: At(as_tensor(of.rows(queries, self.config), x), as_tensor(of.pairs(queries, keys, self.config), x),
                       padding, new, cache) for name, of in kinds.items()}
        x = self.dropout(x if self.encoding is None else self.encoding.embed(x, at[self.config.encoding].rows))
        for block in self.blocks:
            x = block(x, at[block.attn.encoding.settings.pe])
        x = self.norm(x)[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        logits = F.linear(x, (self.head or self.embedding).weight)                     # (B, T, V)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss, logits, cache)
