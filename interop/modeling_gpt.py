"""The GPT of model_torch.py for transformers: its config, and attention over a cache, so that `generate` works.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

interop/export.py copies this file into the folder of an exported model, and beside it the files that it imports.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, C = H*D model width, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import ModelConfig
from expe import integers
from model_torch import GPT, Attention, as_tensor
from positional_encodings import CORE, zoo_module

# Their scores read the key before another one, or count keys, and would take padding between two tokens for a token.
COUNT_KEYS = {"cope", "partial_key_offset", "path", "path_fox", "selective_rope"}

BOUNDARIES = {"cu_seq_lens_q", "seq_idx"}        # by which DataCollatorWithFlattening says where packed texts begin
PACKED = "texts are packed into one row here ({}): give each text a row of its own, with padding and an attention_mask"

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

def count_on(cached, real):
    """The positions (B, T) of new tokens that count on from the last one of cached (B, S - T) which is no padding.

    real (B, S): whether a token is no padding. A text begins at 0, and so does the padding before it.
    """
    B, before = cached.shape
    cached = np.concatenate((np.full((B, 1), -1), cached), axis=1)                     # before the text begins
    real_before = np.concatenate((np.ones((B, 1), bool), real[:, :before]), axis=1)
    last = before - np.flip(real_before, axis=1).argmax(axis=1)                        # (B,), an index
    n = cached[np.arange(B), last][:, None] + real[:, before:].cumsum(axis=1)          # (B, T)
    return np.where(last[:, None] > 0, n, n.clip(min=0))

def check_one_text(positions, real):
    """ValueError if positions (B, S) return to 0 in any row, as those of texts that are packed into one row do."""
    highest = np.maximum.accumulate(np.where(real, positions, -1), axis=1)
    if (real[:, 1:] & (positions[:, 1:] == 0) & (highest[:, :-1] >= 0)).any():
        raise ValueError(PACKED.format("position_ids return to 0 within it"))

def has_padding_between(real):
    """Whether any row of real (B, S) has padding between two tokens."""
    first, last = real.argmax(axis=1), real.shape[1] - 1 - np.flip(real, axis=1).argmax(axis=1)
    return (real.any(axis=1) & (real.sum(axis=1) < last - first + 1)).any()

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

    def positions_in(self, cache, B):
        """The positions of the keys of B sequences in a cache, (B, S); ValueError for a cache that has none."""
        if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError("past_key_values must be a DynamicCache that keeps every key: this model has no other")
        if not cache.get_seq_length():
            return np.empty((B, 0), np.int64)
        layer = cache.layers[-1]
        if len(cache.layers) != len(self.gpt.blocks) + 1 or layer.get_seq_length() != cache.get_seq_length():
            raise ValueError("past_key_values must come from this model, which keeps the positions of its keys there: "
                             "begin with a new DynamicCache()")
        if len(layer.keys) != B:
            raise ValueError(f"past_key_values holds {len(layer.keys)} sequences, and input_ids has {B}: they must be "
                             "as many")
        return layer.keys[:, 0, :, 0].cpu().numpy()

    def add_positions(self, cache, n):
        """Keep the positions n (B, T) of new keys in a layer of the cache, after those of all blocks."""
        while len(cache.layers) <= len(self.gpt.blocks):
            cache.layers.append(DynamicLayer())
        n = n[:, None, :, None]                                                        # (B, 1, T, 1)
        cache.update(n, n, len(self.gpt.blocks))

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, logits_to_keep=0, output_hidden_states=None, output_attentions=None, **options):
        """Logits (B, T, V), and with labels the mean loss in nats of each next token.

        Trainer gives the number of all targets of its accumulated batches, num_items_in_batch, for that mean.
        output_hidden_states: (B, T, C) before each block, and after the last norm.

        attention_mask (B, S): 0 for what only pads a text, on either side, or between tokens if the encoding allows it.
        position_ids (B, T) or (1, T): any integers, such as positions from an offset or with gaps. Left out, positions
        count what is no padding: from 0, or on from the last one in the cache. NumPy makes exact tables of integers on
        the CPU, so that a GPU waits for the mask and the positions of each pass.
        past_key_values: a DynamicCache. Its last layer holds the position of each key, so that what drops or reorders
        keys does the same with positions.

        ValueError for a mask, a cache or positions that do not fit, and for texts that are packed into one row.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be (B, S): a cache that is not a DynamicCache asks for another")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions is not possible here: leave it out")
        if names := BOUNDARIES & options.keys():
            raise ValueError(PACKED.format(f"as {min(names)} says"))
        B, T = input_ids.shape
        cache = past_key_values
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        cached = np.empty((B, 0), np.int64) if cache is None else self.positions_in(cache, B)
        S = cached.shape[1] + T
        padding = new = None
        real = np.ones((B, S), bool)                                                   # what is no padding
        if attention_mask is not None and not attention_mask.all():
            if attention_mask.shape != (B, S):
                raise ValueError(f"attention_mask must be (B, S), ({B}, {S}) here, a column for each key in the cache "
                                 f"and each new token, got {tuple(attention_mask.shape)}")
            seen = attention_mask.bool()
            new = seen[:, None, S - T :, None]
            real = seen.cpu().numpy()
            attentions = [block.attn for block in self.gpt.blocks]
            if has_padding_between(real) and any(a.window or a.encoding.settings.pe in COUNT_KEYS for a in attentions):
                raise ValueError("attention_mask has padding between tokens, which this model's encoding or window "
                                 "takes for tokens: pad texts on the left")
            itself = torch.eye(S, dtype=torch.bool, device=seen.device)[S - T :]       # or it would see nothing
            padding = torch.zeros(B, 1, T, S, dtype=self.dtype, device=seen.device)
            padding = padding.masked_fill(~(seen[:, None] | itself)[:, None], -torch.inf)
        if position_ids is None:
            n = count_on(cached, real)
        elif tuple(position_ids.shape) in {(B, T), (1, T)}:
            n = np.broadcast_to(integers(position_ids.cpu(), "position_ids"), (B, T))
        else:
            raise ValueError(f"position_ids must be (B, T), ({B}, {T}) here, one for each of input_ids, got "
                             f"{tuple(position_ids.shape)}")
        positions = np.concatenate((cached, n), axis=1)                                # (B, S)
        check_one_text(positions, real)
        keys = positions[0] if (positions == positions[0]).all() else positions        # rows alike share their tables
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [] if keep else None
        chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt(input_ids, None, keys[..., S - T :], states=states, chosen=chosen, keys=keys, padding=padding,
                          seen=new, cache=cache)                                       # (B, T, V)
        if cache is not None:
            self.add_positions(cache, torch.from_numpy(n.copy()).to(input_ids.device))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss, logits, cache, tuple(states) if keep else None)
