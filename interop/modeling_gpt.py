"""The GPT of model_torch.py for transformers: its config, and attention over a cache, so that `generate` works.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

interop/export.py copies this file into the folder of an exported model, and beside it the files that it imports.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import ModelConfig
from model_torch import GPT, Attention, as_tensor
from positional_encodings import CORE, zoo_module


class GPTConfig(PretrainedConfig):
    """model: the fields of a ModelConfig, with those of the encoding's settings; the rest is for transformers alone."""

    model_type = "exact-positions"

    def __init__(self, model=None, use_cache=True, **values):
        self.model, self.use_cache = model, use_cache
        super().__init__(**values)

    def model_config(self):
        encoding = self.model["encoding"]
        kind = CORE.get(encoding["pe"]) or zoo_module(encoding["pe"]).Settings
        vocab = getattr(self, "vocab_size", self.model["vocab"])         # which resize_token_embeddings changes
        return ModelConfig(**self.model | {"encoding": kind(**encoding), "vocab": vocab})

class At(NamedTuple):
    """Where the tokens of one pass are, as an encoding sees it: model_numpy.Tables, and what a cache needs besides."""

    rows: Any                            # of the T new tokens, or None
    pairs: Any                           # of the new tokens and all S keys, or None
    n: Any                               # the positions of the new tokens, (T,) or (B, T)
    padding: Any                         # (B, 1, T, S), -inf where a key only pads; or None
    seen: Any                            # (B, 1, T, 1), whether a new token is one, and no padding; or None
    cache: Any                           # transformers', or None

class CachedAttention(Attention):
    """Attention over all keys that a cache of transformers holds: model_torch.py's, with the cache and the padding.

    An edit of Attention's own forward there is needed here too; its other steps are shared.
    """

    def forward(self, h, pos):
        q, k, v = self.project(h, pos.rows)                                            # (B, H, T, D) each
        q, k = self.encoding.rotate(q, k, pos.rows)
        kept = self.encoding.key_state(h)
        if pos.seen is not None and kept.shape != h.shape:
            kept = kept * pos.seen                                                     # padding says nothing
        if pos.cache is not None and kept.shape != h.shape:                            # its bytes lie beside the values
            D = v.shape[-1]
            exact = kept.dtype
            k, v = pos.cache.update(k, torch.cat((v, kept.contiguous().view(v.dtype)), -1), self.layer)
            v, kept = v[..., :D], v[..., D:].contiguous().view(exact)                  # of all S keys
        elif pos.cache is not None:
            k, v = pos.cache.update(k, v, self.layer)
        bias = self.encoding.score(q, k, kept, pos.pairs)
        if pos.padding is not None:
            bias = pos.padding if bias is None else bias + pos.padding
        return self.output(self.attend(q, k, v, bias, pos.pairs), h)                   # (B, T, C)

class CachedGPT(GPT):
    """GPT, whose passes also read from a cache and give their hidden states.

    hidden, and so a call of the model, takes besides
    states: a list, which gets the input of each block and the norm's output, (B, T, C) each, or None
    chosen: which of the T tokens' outputs are returned, all if left out
    keys, padding, seen, cache: of tables
    """

    def __init__(self, config):
        super().__init__(config, seed=None, attention=CachedAttention)
        for i, block in enumerate(self.blocks):
            block.attn.layer = i

    def hidden(self, tokens, positions=None, states=None, chosen=slice(None), **options):
        def keep(block, inputs):
            states.append(inputs[0])

        hooks = [] if states is None else [block.register_forward_pre_hook(keep) for block in self.blocks]
        try:
            h = super().hidden(tokens, positions, **options)                           # (B, T, C)
        finally:
            for hook in hooks:
                hook.remove()
        if states is not None:
            states.append(h)
        return h[:, chosen]

    def tables(self, n, keys, padding, seen, cache):
        """{settings: At} of new tokens at positions n, (T,) or (B, T), among all keys at (S,) or (B, S)."""
        w = self.embedding.weight
        tables = {}
        for s in {block.attn.encoding.settings for block in self.blocks}:
            parts = s.rows(n, self.config), s.pairs(n, keys, self.config), n
            tables[s] = At(*(as_tensor(x, w) for x in parts), padding, seen, cache)
        return tables

class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPTConfig
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.gpt = CachedGPT(config.model_config())
        self.post_init()

    def get_input_embeddings(self):
        return self.gpt.embedding

    def set_input_embeddings(self, embedding):
        self.gpt.embedding = embedding

    def get_output_embeddings(self):
        return getattr(self.gpt, "head", None)                           # None: the embedding is the output layer, too

    def set_output_embeddings(self, head):
        self.gpt.head = head

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, logits_to_keep=0, output_hidden_states=None, output_attentions=None, **options):
        """Logits (B, T, V), and with labels the mean loss in nats of each next token.

        Trainer gives the number of all targets of its accumulated batches, num_items_in_batch, for that mean.
        output_hidden_states: (B, T, C) before each block, and after the last norm.

        attention_mask (B, S): 0 for what only pads a text, on either side. Positions count what is left, from 0, unless
        position_ids (B, T) give them. NumPy makes exact tables of integers on the CPU, so that a GPU waits for the mask
        and the position_ids of each pass.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be (B, S): a cache that is not a DynamicCache asks for another")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions is not possible here: leave it out")
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
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [] if keep else None
        chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt(input_ids, None, queries, states=states, chosen=chosen, keys=keys, padding=padding, seen=new,
                          cache=cache)                                                 # (B, T, V)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss, logits, cache, tuple(states) if keep else None)
