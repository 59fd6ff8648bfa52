"""Other libraries' encodings as functions to check: python -m interop.conform lab.elsewhere:hf_rope --case rope-yarn

hf_... are of transformers, a test dependency; xt_... of x-transformers, which you install. Each is the library's own
class or function, given the case's numbers in float32. docs/elsewhere.md says what they come to.
"""

import math

import numpy as np
import torch


def tensor(x):
    """An array as a tensor, float32 or int64."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    return x.float() if x.is_floating_point() else x


# ---- transformers ----------------------------------------------------------------------------------------------------

def hf_rope(q, k, positions, rope_parameters, max_position_embeddings, head_dim):
    """GPT-NeoX's rotation, which knows every rope_type and turns a part of a head. (ntk is another rope_theta.)"""
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"partial_rotary_factor": 1.0} | rope_parameters
    if parameters["rope_type"] == "ntk":
        theta = 10000.0 * parameters["factor"] ** (head_dim / (head_dim - 2))
        parameters = parameters | {"rope_type": "default", "rope_theta": theta}
    config = GPTNeoXConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=parameters,
                           max_position_embeddings=max_position_embeddings)
    rotary, q, k = GPTNeoXRotaryEmbedding(config), tensor(q), tensor(k)
    q, k = apply_rotary_pos_emb(q, k, *rotary(q, tensor(positions)))
    return {"q": q, "k": k, "inv_freq": rotary.inv_freq, "attention_factor": rotary.attention_scaling}

def hf_alibi(q, key_positions):
    """Bloom's, slope times n: it counts keys as they stand, which is where the mask says that they are."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    B, H, _, _ = q.shape
    mask = torch.ones(1, int(key_positions.max()) + 1)
    bias = build_alibi_tensor(mask, H, torch.float32)[:, 0]                       # (H, all positions)
    return bias[:, tensor(key_positions)].transpose(0, 1)[:, :, None]             # (B, H, 1, S)

def hf_t5(positions, key_positions, weight, buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = tensor(key_positions[:, None, :] - positions[:, :, None])             # (B, T, S)
    index = T5Attention._relative_position_bucket(ahead, False, buckets, max_distance)
    return tensor(weight)[index].permute(0, 3, 1, 2)

def hf_sinks(q, k, v, b, cached_k=None, cached_v=None):
    """gpt-oss's."""
    from types import SimpleNamespace

    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    k, v = (x if old is None else np.concatenate((old, x), 2) for x, old in ((k, cached_k), (v, cached_v)))
    T, S = q.shape[2], k.shape[2]
    module = SimpleNamespace(num_key_value_groups=1, sinks=tensor(b), training=False)
    mask = torch.full((T, S), -math.inf).triu(S - T + 1)[None, None]
    out, weights = eager_attention_forward(module, tensor(q), tensor(k), tensor(v), mask, q.shape[-1] ** -0.5)
    return weights, out.transpose(1, 2)


# ---- x-transformers --------------------------------------------------------------------------------------------------

def xt_turned(q, k, positions, **how):
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    rotary = RotaryEmbedding(q.shape[-1], **how)
    angles, scale = rotary(tensor(positions))
    of_k = scale if isinstance(scale, float) else 1 / scale
    q, k = apply_rotary_pos_emb(tensor(q), angles, scale), apply_rotary_pos_emb(tensor(k), angles, of_k)
    return {"q": q, "k": k, "inv_freq": rotary.inv_freq / rotary.interpolation_factor}

def xt_settings(rope_parameters):
    """The types that it has, by its own names."""
    names = {"linear": "interpolation_factor", "ntk": "base_rescale_factor"}
    kind = rope_parameters["rope_type"]
    return {names[kind]: rope_parameters["factor"]} if kind in names else {}

def xt_rope(q, k, positions, rope_parameters):
    return xt_turned(q, k, positions, **xt_settings(rope_parameters))

def xt_permuted(x, back=False):
    """The rows of a head so that pairs (i, i + D/2) stand as (2i, 2i+1), or back."""
    order = np.arange(x.shape[-1]).reshape(2, -1).T.ravel()
    return x[..., np.argsort(order) if back else order]

def xt_rope_permuted(q, k, positions, rope_parameters):
    """As a checkpoint is ported: W_q and W_k with their rows in the other order."""
    turned = xt_turned(xt_permuted(q), xt_permuted(k), positions, **xt_settings(rope_parameters))
    return turned | {name: xt_permuted(turned[name].numpy(), back=True) for name in "qk"}

def xt_xpos(q, k, positions, cached_k=None):
    """Its scores; its q and k are counted from the middle of what is given, which for the step with a cache is said."""
    if cached_k is not None:                                                      # of 512 positions, as the case has it
        q, k = (np.concatenate((x, x), 2) for x in (q, k))
        positions = np.append(positions, [[511]], 1)
    turned = xt_turned(xt_permuted(q), xt_permuted(k), positions, use_xpos=True)
    q, k = (xt_permuted(turned[name].numpy(), back=True) for name in "qk")
    if cached_k is not None:
        q = q[:, :, :1]
        k = np.concatenate((cached_k, k[:, :, :1]), 2)
    return {"scores": (q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])).astype(np.float32)}

def xt_alibi(q, positions, key_positions):
    from x_transformers.x_transformers import AlibiPositionalBias

    return AlibiPositionalBias(q.shape[1]).forward_custom_pos(tensor(positions), tensor(key_positions))

def xt_t5(positions, key_positions, weight, buckets, max_distance):
    from x_transformers.x_transformers import RelativePositionBias

    ahead = tensor(key_positions[:, None, :] - positions[:, :, None])             # (B, T, S)
    index = RelativePositionBias._relative_position_bucket(ahead, True, buckets, max_distance)
    return tensor(weight)[index].permute(0, 3, 1, 2)

def xt_cope(q, k, e, cached_k=None):
    """Given the logits that its attention gives it: q.k/sqrt(D), of masked keys very small."""
    from x_transformers.x_transformers import CoPE

    k = k if cached_k is None else np.concatenate((cached_k, k), 2)
    T, S = q.shape[2], k.shape[2]
    logits = tensor(q) @ tensor(k).mT / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), torch.finfo(torch.float32).min)
    cope = CoPE(q.shape[-1], q.shape[1], len(e))
    cope.pos_emb.data = tensor(e)
    return cope(tensor(q), logits).detach()

def xt_fox(h, weight, gate_bias, cached_h=None):
    from x_transformers.x_transformers import DataDependentAlibi

    T = h.shape[1]
    h = h if cached_h is None else np.concatenate((cached_h, h), 1)
    alibi = DataDependentAlibi(h.shape[-1], len(weight))
    alibi.to_forget_gates[0].weight.data, alibi.to_forget_gates[0].bias.data = tensor(weight), tensor(gate_bias)
    return alibi(tensor(h)).detach()[:, :, -T:]

def xt_sinusoidal(x, positions):
    from x_transformers.x_transformers import ScaledSinusoidalEmbedding

    table = ScaledSinusoidalEmbedding(x.shape[-1])
    return torch.stack([table(tensor(x), pos=tensor(n)) for n in positions]).detach()

def xt_learned(x, positions, weight):
    from x_transformers.x_transformers import AbsolutePositionalEmbedding

    table = AbsolutePositionalEmbedding(x.shape[-1], len(weight))
    table.emb.weight.data = tensor(weight)
    return table(tensor(x), pos=tensor(positions)).detach()
