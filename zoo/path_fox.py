"""PaTH-FoX (Yang et al. 2025, arXiv 2505.16381, section 4): tokens change the keys before them as in PaTH, and their
gates lower the scores of these keys as in FoX.

    score_mn = q_m^T H_m .. H_(n+1) k_n / sqrt(D) + ln f_(n+1) + .. + ln f_m

zoo/path.py and zoo/fox.py have both parts and their starts. The gates are added undivided, as in the paper and in FoX;
the authors' code adds them before the division by sqrt(D).
"""

import torch
import torch.nn.functional as F

import model_numpy
import zoo.path as path
from model_torch import Encoding
from zoo import fox

Settings = path.Settings
OWN = {"forget": "weight", "forget_bias": "bias"}                    # of FoX, by its names there

def score(q, k, h, table, learned):
    """The sum of both biases, (B, H, T, S)."""
    reflected, pull_path = path.score(q, k, h, table, learned)
    forgotten, pull_fox = fox.score(q, k, h, table, {theirs: learned[ours] for ours, theirs in OWN.items()})
    def pullback(dbias):
        dq, dk, dh, down = pull_path(dbias)
        _, _, dh_fox, down_fox = pull_fox(dbias)
        return dq, dk, dh + dh_fox, down | {ours: down_fox[theirs] for ours, theirs in OWN.items()}
    return reflected + forgotten, pullback

def doors(settings):
    def parameters(model):
        gates = fox.doors(settings).parameters(model)
        return path.doors(settings).parameters(model) | {ours: gates[theirs] for ours, theirs in OWN.items()}

    return model_numpy.Encoding(score=score, parameters=parameters, each_block=True)

class Layer(Encoding):
    def key_state(self, h):
        """PaTH's, and ln f, (B, H, S, D + 2)."""
        key_state = path.Layer.key_state(self, h)
        z = F.linear(h, self.forget.type_as(h), self.forget_bias.type_as(h)).to(key_state)  # (B, S, H)
        return torch.cat((key_state, F.logsigmoid(z).mT[..., None]), -1)

    def score(self, q, k, key_state, table):
        c = key_state[..., -1].cumsum(-1)                                                  # (B, H, S)
        return path.reflect(self, q, k, key_state[..., :-1]) + c[..., -q.shape[2] :, None] - c[..., None, :]
