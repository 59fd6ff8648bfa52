"""CABLE (Veisi et al. 2025, arXiv 2503.08067, equations 2 to 7): the score of a key falls by a sum over the tokens
after it, up to the query's own. Each of them adds a number of at least 0, and the query multiplies the sum by another
such number.

    bias_mn = -g_m (r_(n+1) + .. + r_m),  r_j = relu(w_h . x_j),  g_m = softplus(u_h . x_m),  x the block's input

The authors' code has no g, and softplus in the place of relu. That is FoX with the signs of its weights flipped, since
-softplus(z) = ln sigmoid(-z). (It also leaves out the division of scores by sqrt(D); here they are divided.) The paper
prints the bias without the minus that makes it a penalty. w and u start from N(0, 0.02^2), in every block anew. Tokens
are counted in the order in which they stand: other positions do not exist here.
"""

import numpy as np
import torch
import torch.nn.functional as F

import model_numpy
from model_torch import Encoding, at_least_fp32
from zoo import fox

Settings = fox.Settings                                              # none, and no later keys

def score(q, k, h, table, learned):
    """bias_mn = -g_m (c_m - c_n), c the running sum of relu(y), g = softplus(z). h (B, T, C); both weights (H, C)."""
    y, pull_y = model_numpy.linear(h, learned["tokens"])                                       # (B, T, H)
    z, pull_z = model_numpy.linear(h, learned["query"])
    y, z = y.swapaxes(1, 2), z.swapaxes(1, 2)                                                  # (B, H, T)
    c = np.maximum(y, 0).cumsum(-1)
    apart = c[..., :, None] - c[..., None, :]                                                  # (B, H, T, S)
    g = np.logaddexp(0, z)
    def pullback(dbias):
        """dg_m = -sum_n dbias (c_m - c_n), and r_j is in every c from j on."""
        dapart = -g[..., None] * dbias
        dz = -(dbias * apart).sum(-1) * model_numpy.sigmoid(z)                                 # (B, H, T)
        dc = dapart.sum(-1) - dapart.sum(-2)
        dy = dc[..., ::-1].cumsum(-1)[..., ::-1] * (y > 0)
        dh_y, dw_y = pull_y(dy.swapaxes(1, 2))
        dh_z, dw_z = pull_z(dz.swapaxes(1, 2))
        return 0, 0, dh_y + dh_z, {"tokens": dw_y, "query": dw_z}
    return -g[..., None] * apart, pullback

def doors(settings):
    return model_numpy.Encoding(
        score=score,
        parameters=lambda model: {
            name: model_numpy.normal((model.heads, model.width)) for name in ("tokens", "query")},
        each_block=True,
    )

class Layer(Encoding):
    def key_state(self, h):
        """r and g of each head and token, (B, H, S, 2), in fp32 at least."""
        r = at_least_fp32(F.linear(h, self.tokens.type_as(h))).relu()                      # (B, S, H)
        g = F.softplus(at_least_fp32(F.linear(h, self.query.type_as(h))), threshold=40)    # exact in float64
        return torch.stack((r, g), -1).transpose(1, 2)

    def score(self, q, k, key_state, table):
        c = key_state[..., 0].cumsum(-1)                                                   # (B, H, S)
        T = q.shape[2]
        return -key_state[..., -T:, 1, None] * (c[..., -T:, None] - c[..., None, :])       # (B, H, T, S)

    def linear(self, q, key_state, w, n):
        r = key_state[..., 0]
        after = r.flip(-1).cumsum(-1).flip(-1) - r                                         # those of later tokens
        return key_state[..., -q.shape[2] :, 1], -after                                    # (B, H, T), (B, H, S)
