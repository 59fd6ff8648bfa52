"""+sinks: a trained logit of each head joins the softmax's denominator and has no value (gpt-oss; OpenAI 2025).

    p_mn = exp(scores_mn) / (exp(b_h) + sum over the seen n of exp(scores_mn)),  b_h of each head of each block

So that a head's weights may sum to less than 1. b starts from N(0, 0.02^2), as in transformers' modeling_gpt_oss. Any
encoding with the plain softmax has it; one that enters at the embedding shares b among blocks, and of any other each
block has all parameters of its own, T5's buckets too. With +log or +llama4 it comes first: rope+sinks+log, where the
scores are scaled and the sink is not. With ExPE on keys alone weights then depend on absolute positions: all scores of
a query share a part that grows with its position, which the plain softmax drops.
"""

import numpy as np

import model_numpy
from config import InputError


def Settings(base):
    class Settings(base):
        def fit(self, model):
            of = self.pe.partition("+sinks")[0]
            if "+" in of or model_numpy.ENCODINGS[of](self).softmax != model_numpy.Encoding().softmax:
                raise InputError("sinks take the place of a plain softmax, before what scales the scores, as in "
                                 f"rope+sinks+log: not in {self.pe}")
            return super().fit(model)

        @property
        def each_block(self):
            return model_numpy.ENCODINGS[self.pe.rpartition("+")[0]](self).embed is model_numpy.Encoding().embed

    return Settings

def softmax_forward(scores, learned):
    """p = exp(scores) / (exp(b) + sum of exp(scores)). scores (B, H, T, S), b (H,)."""
    b = learned["sinks"][:, None, None]                                                        # (H, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), b)                                         # exp cannot overflow
    p = np.exp(scores - top)
    p /= np.exp(b - top) + p.sum(-1, keepdims=True)
    return p, p

def softmax_backward(dp, p):
    """As the plain one; b is a score whose weight is 1 - sum p and whose dp is 0: db = -(1 - sum p) sum_j dp_j p_j."""
    along = np.vecdot(dp, p)[..., None]                                                        # (B, H, T, 1)
    return p * (dp - along), {"sinks": -((1 - p.sum(-1, keepdims=True)) * along).sum((0, 2, 3))}

def doors(base):
    def doors(settings):
        inner = base(settings)

        def start(rng, name, shape):
            return (model_numpy.small_numbers if name == "sinks" else inner.start)(rng, name, shape)

        shapes = lambda model: inner.shapes(model) | {"sinks": (model.n_heads,)}  # noqa: E731
        return inner._replace(softmax=(softmax_forward, softmax_backward), shapes=shapes, start=start)

    return doors

def torch_class():
    import torch

    from model_torch import Encoding

    def of(base):
        def make(settings, config):
            encoding = base(settings, config)

            def softmax(scores):
                sinks = encoding.sinks[:, None, None].expand(*scores.shape[:-1], 1).type_as(scores)
                return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

            encoding.softmax = softmax
            if type(encoding).override is not Encoding.override:       # on keys alone: it leaves out a number of each
                encoding.linear = None                                 # query's, which is not dropped here
            return encoding

        return make

    return of
