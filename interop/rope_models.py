"""Read past the trained length with a pretrained model of transformers that has RoPE, without training it.

    read_longer(model, "window", keys=4096)        the first 4 tokens and the last 4,096 keys of each query
    read_longer(model, "dual-chunk")               positions are counted anew in each chunk of tokens
    read_longer(model, "self-extend", factor=8)    far positions are counted in groups of 8
    read_longer(model, "none")                     as trained

Llama, Qwen2, Qwen3, Mistral, GPT-NeoX and Gemma 3 call a function that is registered in transformers'
AttentionInterface, and so do all of their layers after one of these lines. Queries and keys arrive there rotated, and a
rotation can go on: a query at position m is moved to m' by rotating it by m' - m more. A cache of transformers keeps
every key at its own position, whatever the method, and so a text that is read with it has the logits of a whole pass.
A layer that was trained with a window of its own, as Gemma 3's local ones, stays as it is.

transformers itself has YaRN, NTK, linear and llama3: interop/README.md shows how.

B batch, T new tokens, S keys (S > T with a cache), H heads, D width of a head, R rotated dimensions of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from expe import distances
from longer.chunks import Move
from longer.flags import SINKS
from longer.methods import OWN_METHODS
from longer.modes import DUAL_CHUNK, SELF_EXTEND, Mode
from settings import InputError

WINDOW = "window"
ARGUMENTS = {"none": (), WINDOW: ("keys", "sinks"), DUAL_CHUNK: ("chunk",), SELF_EXTEND: ("chunk", "factor", "length")}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma3_text")           # their config's model_type
ATTENTION = "read-longer"                # the name under which transformers finds attend and check_mask
BLOCK = 256                              # queries whose scores are made at a time: bounds the memory


def read_longer(model, method, context=None, keys=None, sinks=None, chunk=None, factor=None, length=None):
    """Let all layers of a model that see everything read with a method from now on; returns the model.

    window       Each query sees the first `sinks` tokens (default: 4) and the last `keys` keys, its own among them
                 (default: as many as fit the trained length). All of them stand as close together as if nothing lay
                 between: StreamingLLM, Xiao et al. 2024; without sinks the window of Longformer, Beltagy et al. 2020.
                 Cost: as attention with a mask, and with make_window_cache memory does not grow with the text.
    dual-chunk   Chunks of `chunk` tokens (default: 3/4 of the trained length), each with positions from 0, so that no
                 distance is above the trained ones: dual chunk attention, An et al. 2024.
    self-extend  Keys up to `chunk` tokens back (default: half the trained length) are where they are, and beyond it
                 `factor` positions count as one, or as few as a text of `length` tokens needs: Jin et al. 2024.
    none         As trained.

    The beginning of a text is read as trained by every method: sinks + keys tokens by window, two chunks but at most
    the trained length by dual-chunk, and `chunk` tokens by self-extend.
    dual-chunk computes up to three times as many scores as plain attention, and self-extend twice as many. Both hold
    the scores of 256 queries at a time, (B, H, 256, S), and rotate all S keys again for each of these blocks.

    context: the trained length in tokens (default: the config's max_position_embeddings).
    Raises ValueError for a model, a method or an argument that does not fit.
    """
    decoder = find_decoder(model)
    given = {"keys": keys, "sinks": sinks, "chunk": chunk, "factor": factor, "length": length}
    given = {name: value for name, value in given.items() if value is not None}
    context = decoder.config.max_position_embeddings if context is None else context
    check_whole("context", context, 2)
    mode = make_mode(method, context, **given)
    layers = attentions_of(decoder)
    before = next((layer.reading for layer in layers if getattr(layer, "reading", None)), None)
    implementation = before.implementation if before else decoder.config._attn_implementation
    if method == "none":
        reading = None
    else:
        layers = find_whole_layers(decoder)
        reading = Reading(mode, decoder, layers[0], implementation)
    for layer in layers:
        layer.reading = reading
    decoder.set_attn_implementation(ATTENTION if reading else implementation)
    return model

def make_window_cache(model):
    """A cache for one text, or several of one length, that keeps what a model with the method window still sees.

        model.generate(tokens, past_key_values=make_window_cache(model))

    It holds sinks + keys - 1 tokens in each layer, (B, H, sinks + keys - 1, D) of keys and of values.
    Raises ValueError for a model without that method.
    """
    decoder = find_decoder(model)
    readings = [getattr(layer, "reading", None) for layer in attentions_of(decoder)]
    mode = next((reading.mode for reading in readings if reading), None)
    if not isinstance(mode, Window):
        raise ValueError('this cache drops keys that no later token sees, which only the method window allows: call '
                         'read_longer(model, "window") first')
    cache = DynamicCache(config=decoder.config)
    cache.layers = [WindowLayer(mode) if reading else layer for reading, layer in zip(readings, cache.layers,
                                                                                     strict=True)]
    return cache

# ---- what fits -------------------------------------------------------------------------------------------------------

def find_decoder(model):
    """The text decoder of a model; ValueError unless it is one whose attention is known here."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    kind = getattr(getattr(decoder, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise ValueError(f"model must be a decoder of transformers with model_type {', '.join(FAMILIES)}, got {kind}")
    return decoder

def attentions_of(decoder):
    """The attention of each layer, as its family calls it."""
    return [getattr(layer, "self_attn", None) or layer.attention for layer in decoder.layers]

def find_whole_layers(decoder):
    """The attentions of a decoder that see all keys before them; ValueError if none does, or none can be moved."""
    config = decoder.config
    layers = attentions_of(decoder)
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError("model must be causal, and the attention of this one is bidirectional")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * len(layers)
    whole = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == "full_attention"]
    if not whole:
        raise ValueError(f"all layers of this model have a window of {config.sliding_window} keys, so that no distance "
                         "is new to them: load it with another sliding_window to change that")
    kind = rope_of(config)["rope_type"]
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"rope_type {kind} changes all frequencies as a text grows, and keys in a cache keep theirs: "
                         "give rope_parameters another rope_type, such as yarn")
    return whole

def rope_of(config):
    """The rope_parameters of the layers that see everything: Gemma 3 has others for its local layers."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)

def make_mode(method, context, **given):
    """The Mode of a method: where queries and keys are for each other. ValueError for what does not fit."""
    if method not in ARGUMENTS:
        raise ValueError(f"method must be {', '.join(ARGUMENTS)}, got {method!r}")
    for name in given:
        if name not in ARGUMENTS[method]:
            readers = " and ".join(other for other, names in ARGUMENTS.items() if name in names)
            raise ValueError(f"{name} is for {readers}, and method is {method}: leave it out")
    if method == "none":
        return Mode()
    if method == WINDOW:
        sinks = given.get("sinks", SINKS)
        check_whole("sinks", sinks, 0)
        keys = given.get("keys", max(1, context - sinks))
        check_whole("keys", keys, 1)
        if sinks + keys > context:
            raise ValueError(f"sinks + keys must be at most the trained length, {context}, or distances are new again; "
                             f"got {sinks} + {keys}")
        return Window(keys, sinks)
    if method == SELF_EXTEND and ("factor" in given) == ("length" in given):
        raise ValueError("self-extend needs either factor, the positions in a group, or length, the tokens of the "
                         "longest text")
    if "length" in given:
        check_whole("length", given["length"], 1)
    try:
        return OWN_METHODS[method].make_mode(context, given.get("length"), given.get("factor", "auto"),
                                             given.get("chunk"))
    except InputError as error:
        raise ValueError(str(error).replace("--", "")) from None                       # arguments here, not flags

def check_whole(name, value, least):
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")

# ---- where queries and keys are --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Window(Mode):
    """The first `sinks` tokens and the last `keys`, which stand side by side, as in a stream of longer/cache.py."""

    keys: int
    sinks: int
    method = WINDOW

    def place(self, queries, keys):
        far = (distances(queries, keys) >= self.keys) & (keys < self.sinks)[..., None, :]
        nearest = np.minimum(queries, self.sinks + self.keys - 1)
        return queries, keys, [Move(nearest, None, far[..., None, :, :])] if far.any() else []

    def find_visible(self, queries, keys):
        """Which keys a query sees of those before it, (..., T, S)."""
        return (distances(queries, keys) < self.keys) | (keys < self.sinks)[..., None, :]

class Block(NamedTuple):
    """Some queries of a pass; cosines and sines are of what their positions and those of all keys still lack."""

    rows: slice                          # which of the T queries
    queries: Any                         # (cos, sin), (B or 1, 1, rows, R/2) each; None: they are where they should be
    keys: Any                            # likewise, (B or 1, 1, S, R/2) each
    moves: list                          # Moves of such pairs; chosen is (B or 1, 1, rows, S)

class Reading:
    """How the layers of a model read: its Mode, and what they share in one pass, which the first of them prepares."""

    def __init__(self, mode, decoder, first, implementation):
        self.mode = mode
        self.decoder = decoder
        self.first = first
        self.implementation = implementation           # transformers' name of the attention that was used before
        self.device = None
        self.blocks = []
        self.visible = None              # (B or 1, 1, T, S); None where transformers' own mask, or none, is right

    def prepare(self, position_ids, S, device, masked):
        """The Blocks of T queries at position_ids, (B or 1, T), among S keys. All positions are integers, in NumPy.

        masked: whether transformers has a mask for this pass, which then is right but for a window.
        """
        queries = position_ids.cpu().numpy()
        keys = self.key_positions(queries, S)
        T = queries.shape[1]
        self.device = device
        self.blocks, visible = [], []
        for begin in range(0, T, BLOCK):
            rows = slice(begin, begin + BLOCK)
            own = queries[:, rows]
            placed, placed_keys, moves = self.mode.place(own, keys)
            moves = [Move(self.turns(move.queries, own), None if move.keys is None else self.turns(move.keys, keys),
                          torch.as_tensor(move.chosen, device=device)) for move in moves]
            self.blocks.append(Block(rows, self.turns(placed, own), self.turns(placed_keys, keys), moves))
            apart = distances(own, keys)
            seen = np.full_like(apart, True, dtype=bool) if masked else apart >= 0
            if isinstance(self.mode, Window):
                seen &= self.mode.find_visible(own, keys)
            visible.append(torch.as_tensor(seen[:, None], device=device))
        moves_any = any(block.moves for block in self.blocks)
        self.visible = torch.cat(visible, dim=2) if moves_any or isinstance(self.mode, Window) else None

    def key_positions(self, queries, S):
        """The positions of S keys, (B or 1, S). The last ones are in a row, and a window's cache may begin with sinks.

        Padding on the left has positions below 0.
        """
        if S == queries.shape[1]:
            return queries
        keys = queries[:, -1:] - (S - 1) + np.arange(S)
        sinks = getattr(self.mode, "sinks", 0)
        keys[:, :sinks] = np.minimum(keys[:, :sinks], np.arange(S)[:sinks])
        return keys

    def turns(self, positions, own):
        """(cos, sin) by which what is at its own positions is rotated to others, or None where it is there already."""
        if np.array_equal(positions, own):
            return None
        rotary = self.decoder.rotary_emb
        inv_freq = rotary.full_attention_inv_freq if hasattr(rotary, "full_attention_inv_freq") else rotary.inv_freq
        exact = torch.promote_types(inv_freq.dtype, torch.float32)                     # bf16 has no angles far out
        further = torch.as_tensor(positions - own, dtype=exact, device=self.device)
        angle = further[:, None, :, None] * inv_freq.to(self.device, exact)            # (B or 1, 1, n, R/2)
        return angle.cos(), angle.sin()

# ---- what transformers calls -----------------------------------------------------------------------------------------

def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, position_ids=None, **others):
    """The attention of a layer, as transformers' AttentionInterface has it: (output (B, T, H, D), None).

    query (B, H, T, D), key and value (B, its heads, S, D): rotated, at their own positions
    attention_mask: None, or which keys are seen, (B, 1, T, S) booleans, as check_mask makes it
    """
    reading = getattr(module, "reading", None)
    if reading is not None:
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise ValueError(f"attention_mask must be (B, S) or boolean, got {attention_mask.dtype}: a key is seen or "
                             "not")
        if module is reading.first or key.device != reading.device:
            reading.prepare(position_ids, key.shape[2], key.device, attention_mask is not None)
        if reading.visible is not None:
            attention_mask = reading.visible if attention_mask is None else attention_mask & reading.visible
    if reading is None or not any(block.moves for block in reading.blocks):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    groups = query.shape[1] // key.shape[1]
    value = repeat_kv(value, groups)
    outputs = []
    for block in reading.blocks:
        q = query[:, :, block.rows]
        scores = score(turn(q, block.queries), turn(key, block.keys), groups)                  # (B, H, rows, S)
        for move in block.moves:
            moved_key = turn(key, block.keys if move.keys is None else move.keys)
            scores = torch.where(move.chosen, score(turn(q, move.queries), moved_key, groups), scores)
        hidden = ~attention_mask[:, :, block.rows]
        scores = (scores * scaling).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        outputs.append(torch.dropout(weights, dropout, module.training) @ value)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None

def turn(x, turns):
    """Rotate queries or keys (B, heads, n, D) on; the two halves of the first R dimensions are the pairs' parts."""
    if turns is None:
        return x
    cos, sin = turns                                                                   # (B or 1, 1, n, R/2) each
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1).to(x.dtype)

def score(query, key, groups):
    return query @ repeat_kv(key, groups).mT

def check_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None,
               **others):
    """transformers' mask, booleans or None; ValueError where positions cannot be counted back from the last key."""
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError("past_key_values must be a DynamicCache, or what make_window_cache makes: another has keys "
                         "that are not written yet")
    if kv_offset and not local_size and attention_mask is not None and not attention_mask.all():
        raise ValueError("with make_window_cache all texts of a batch must have the same length, without padding: "
                         "leave past_key_values out")
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
                     local_size=local_size, **others)

class WindowLayer(DynamicLayer):
    """One layer of a cache, which keeps the sinks and the last keys - 1 of what it has read."""

    is_croppable = False                 # what it has dropped cannot come back

    def __init__(self, window):
        super().__init__()
        self.window = window
        self.cumulative_length = 0       # of all tokens read; transformers resets it under this name

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        sinks = self.window.sinks
        lost = max(0, keys.shape[2] - sinks - (self.window.keys - 1))
        if lost:
            self.keys, self.values = (torch.cat((x[:, :, :sinks], x[:, :, sinks + lost :]), dim=2)
                                      for x in (keys, values))
        return keys, values

    def get_seq_length(self):
        return self.cumulative_length

    def get_mask_sizes(self, query_length):
        """(S, how many tokens lie before the last S)."""
        stored = super().get_seq_length()
        return stored + query_length, self.cumulative_length - stored

    def crop(self, tokens_to_remove):
        raise ValueError("what make_window_cache makes cannot go back: leave past_key_values out")

AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, check_mask)
