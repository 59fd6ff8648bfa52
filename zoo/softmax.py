"""Other softmaxes, for any encoding: --softmax log, sinks, llama4 or stick.

log, SSMax (Nakanishi 2025, arXiv 2501.19399): the scores of a query are multiplied by the logarithm of how many keys it
sees, and by a trained number of the head.

    p_m = softmax(s_h ln(n_m) scores_m),  n_m the keys that m sees, s_h trained, one for each head of each block

The whole score is multiplied, with any bias, since the paper puts this in the softmax's place; without a bias it is the
query that is multiplied. n_m counts the keys that the mask, a window or a stream leaves, never the length of the array.
The first token sees itself alone: ln 1 = 0 makes its score 0, and its weight is 1 as with any score. s starts at
1/(ln 1024 - 1), with which the factors of 1,024 tokens are 1 on average.

sinks (gpt-oss, OpenAI 2025, arXiv 2508.10925): each head has a trained number, which the softmax treats as the score of
one more key. This key has no value, so the weights of the real keys can sum to less than 1.

    p_mn = exp(scores_mn) / (exp(b_h) + sum over the seen n of exp(scores_mn)),  b_h of each head of each block

b starts from N(0, 0.02^2), as in transformers' modeling_gpt_oss. With ExPE-K weights then depend on absolute positions:
all scores of a query share a part that grows with its position, which the plain softmax drops.

llama4, Llama 4's temperature (Meta 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/): in blocks without
an encoding, scores are multiplied by a number that grows in steps with how many keys the query sees.

    p_m = softmax((1 + attn_scale ln(1 + floor(n_m / floor_scale))) scores_m),  n_m the keys that m sees

Such a query sees all before it, so that n_m = m + 1. The names and numbers, 0.1 and 8,192, are those of Llama 4's
configuration in transformers. Blocks with an encoding keep the plain softmax: give --nope-every, or --pe nope.

stick, stick-breaking (Tan et al. 2024, arXiv 2410.17980): a query visits the keys before it, the nearest first. Each
key takes a share of the weight that is left, the sigmoid of its score, and the query's own key gets the rest. So the
order matters, and no encoding is needed.

    p_mn = b_mn times the product over n < j < m of (1 - b_mj),  b = sigmoid(scores),  n < m

A query's own key gets what is left, the product over all j < m, so that weights sum to 1 (as in the authors' tests; in
their layer it is dropped, and the first query sees nothing). Scores count as they are, not up to a number a query.
With ExPE-K, whose scores grow with the position, gradients in bf16 err 5 to 10 times as much as NoPE's, and as much in
float64 with weights that are rounded to bf16: a sum over all keys makes much of little. With NoPE they do not.

An encoding that enters at the embedding shares the parameters of log and sinks among blocks. With log and sinks and any
other encoding, each block has all parameters of its own, T5's buckets too.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

import model_numpy
from model_numpy import constant, normal
from model_torch import at_least_fp32

FLOOR_SCALE = 8192
ATTN_SCALE = 0.1


# ---- NumPy -----------------------------------------------------------------------------------------------------------

def log(scores, learned):
    """p = softmax(s c scores), c = ln n. scores (B, H, T, S), -inf for keys that are not seen; s (H,)."""
    seen = scores > -np.inf
    c = np.log(seen.sum(-1, keepdims=True)).astype(scores.dtype)                               # (B, H, T, 1)
    s = learned["temperature"][:, None, None]                                                  # (H, 1, 1)
    x = np.where(seen, scores, 0)
    p, pull = model_numpy.softmax(np.where(seen, s * c * x, -np.inf), learned)
    def pullback(dp):
        """z = s c x: dx = s c dz, and s_h gets the sum of c x dz over all pairs."""
        dz, _ = pull(dp)                                                                       # 0 where none is seen
        return s * c * dz, {"temperature": (c * x * dz).sum((0, 2, 3))}
    return p, pullback

def sinks(scores, learned):
    """p = exp(scores) / (exp(b) + sum of exp(scores)). scores (B, H, T, S), b (H,)."""
    b = learned["sinks"][:, None, None]                                                        # (H, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), b)                                         # exp cannot overflow
    p = np.exp(scores - top)
    p /= np.exp(b - top) + p.sum(-1, keepdims=True)
    def pullback(dp):
        """As the plain one; b is a score with weight 1 - sum p and dp 0: db = -(1 - sum p) sum_j dp_j p_j."""
        along = np.vecdot(dp, p)[..., None]                                                    # (B, H, T, 1)
        return p * (dp - along), {"sinks": -((1 - p.sum(-1, keepdims=True)) * along).sum((0, 2, 3))}
    return p, pullback

def llama4(scores, learned):
    """p = softmax(c scores), c = 1 + 0.1 ln(1 + floor(n / 8192)), which is fixed. scores (B, H, T, S)."""
    n = (scores > -np.inf).sum(-1, keepdims=True)                                              # (B, H, T, 1)
    c = (1 + ATTN_SCALE * np.log1p(n // FLOOR_SCALE)).astype(scores.dtype)
    p, pull = model_numpy.softmax(c * scores, learned)
    return p, lambda dp: (c * pull(dp)[0], {})

def stick(scores, learned):
    """ln p_mn = scores_mn + sum over n <= j < m of ln(1 - b_mj). scores (B, H, T, S), -inf for keys not seen."""
    T, S = scores.shape[-2:]
    own = np.eye(T, S, S - T, dtype=bool)                                                      # a query's own key
    x = np.where(own, -np.inf, scores)
    after = -np.logaddexp(0, x)[..., ::-1].cumsum(-1)[..., ::-1]                               # ln(1 - b) from n on
    p = np.exp(x + after)                                                                      # x = ln b - ln(1 - b)
    p[..., own] = np.exp(after[..., 0])
    b = np.exp(-np.logaddexp(0, -x))
    def pullback(dp):
        """With a = p dp, a_r of the own key: ln b_n has the derivative 1 - b_n, and ln(1 - b_n) has -b_n, which is in
        all p_mj from j < n and in what is left: ds_n = a_n - b_n (a_r + the sum over j <= n of a_j).
        """
        a = p * dp
        rest = a[..., own][..., None]                                                          # (B, H, T, 1)
        a[..., own] = 0
        return a - b * (rest + a.cumsum(-1)), {}
    return p, pullback

KINDS = {"log": log, "sinks": sinks, "llama4": llama4, "stick": stick}
PARAMETERS = {"log": lambda model: {"temperature": constant((model.heads,), 1 / (math.log(1024) - 1))},
              "sinks": lambda model: {"sinks": normal((model.heads,))}}

def doors(inner, settings, config):
    """The doors `inner` of an encoding with the softmax of the model's config."""
    if config.softmax == "llama4":
        return inner._replace(softmax=llama4) if settings.pe == "nope" else inner
    if config.softmax == "stick":
        return inner._replace(softmax=stick)

    def parameters(model):
        return inner.parameters(model) | PARAMETERS[config.softmax](model)

    in_blocks = inner.embed is model_numpy.embed_nothing
    return inner._replace(softmax=KINDS[config.softmax], parameters=parameters, each_block=in_blocks)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

def set_softmax(encoding, config):
    """Give an Encoding of model_torch.py the softmax of the model's config."""
    if config.softmax == "log":
        encoding.softmax = lambda scores: log_softmax(scores, encoding.temperature)
    if config.softmax == "sinks":
        encoding.softmax = lambda scores: sinks_softmax(scores, encoding.sinks)
        encoding.sees_shifts = True                                    # of all scores of a query
    if config.softmax == "stick":
        encoding.softmax = stick_softmax
        encoding.sees_shifts = True
    if config.softmax == "llama4" and encoding.settings.pe == "nope":
        encoding.softmax = llama4_softmax

def log_softmax(scores, temperature):
    """softmax(s ln(n) scores): scores (B, H, T, S), -inf for keys that are not seen; s (H,)."""
    seen = scores > -torch.inf
    c = seen.sum(-1, keepdim=True).to(torch.promote_types(scores.dtype, torch.float32)).log()
    z = temperature[:, None, None] * c * scores.masked_fill(~seen, 0)
    return z.masked_fill(~seen, -torch.inf).softmax(-1).type_as(scores)

def sinks_softmax(scores, sinks):
    """softmax over the scores (B, H, T, S) and one more logit b (H,), whose weight is left out."""
    sinks = sinks[:, None, None].expand(*scores.shape[:-1], 1).type_as(scores)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

def llama4_softmax(scores):
    """softmax((1 + 0.1 ln(1 + floor(n / 8192))) scores): scores (B, H, T, S), -inf for keys that are not seen."""
    steps = (scores > -torch.inf).sum(-1, keepdim=True) // FLOOR_SCALE
    steps = steps.to(torch.promote_types(scores.dtype, torch.float32))
    return ((1 + ATTN_SCALE * steps.log1p()) * scores).softmax(-1).type_as(scores)

def stick_softmax(scores):
    """p_mn = b_mn times the product over n < j < m of (1 - b_mj), and p_mm what is left; scores (B, H, T, S), b their
    sigmoid."""
    T, S = scores.shape[-2:]
    own = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T).triu(S - T)     # a query's own key
    x = at_least_fp32(scores).masked_fill(own, -torch.inf)
    after = F.logsigmoid(-x).flip(-1).cumsum(-1).flip(-1)                                      # ln(1 - b) from n on
    return torch.where(own, after[..., :1], x + after).exp().type_as(scores)
