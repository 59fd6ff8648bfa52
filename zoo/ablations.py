"""The ablations of table 7 that need more than a setting of ExPE's table: --once and --learn, for ExPE and ExQPE.

--once overrides the residual stream before block 1, and nothing after that. --learn trains the two numbers that set the
ramp, ExPE's start and theta, ExQPE's theta1 and theta2: the table is affine in them.
"""

import numpy as np

import model_numpy
import model_torch
from model_numpy import Encoding, constant, expe_override, normal


def learned_phi(h, table, learned):
    """phi(h, n) by a table that two trained numbers w make: table0 + w_0 table1 + w_1 table2. table (..., T, l, 3)."""
    phi, pull_phi = model_numpy.phi(h, table[..., 0] + table[..., 1:] @ learned["weight"], learned)
    def pullback(dphi):
        """dw_i is the gradient of what was overridden times table_i, summed."""
        l = table.shape[-2]
        dtable = dphi[..., :l] if table.ndim == 4 else dphi[..., :l].sum(0)       # as the table is, (..., T, l)
        dw = np.array([np.vdot(dtable, table[..., i]) for i in (1, 2)])
        return pull_phi(dphi)[0], {"weight": dw}
    return phi, pullback

def doors(settings):
    """ExPE or ExQPE: --learn, --once and --on choose how."""
    phi = model_numpy.phi if settings.learn == "none" else learned_phi
    door = {"embed": phi} if settings.once else {"override": expe_override(settings.on, phi)}
    if settings.learn == "none":
        return Encoding(**door)
    if settings.learn == "random":
        weight = normal((2,), 1.0)
    else:
        weight = constant((2,), [getattr(settings, name) for name in settings.trained])
    return Encoding(**door, parameters=lambda model: {"weight": weight})

class Layer(model_torch.ExPE):
    def trained(self, table):
        if self.settings.learn == "none":
            return table
        return table[..., 0] + table[..., 1:] @ self.weight                                # (..., T, l)

    def embed(self, x, table):
        return model_torch.phi(x, self.trained(table)) if self.settings.once else x

    def override(self, h, table):
        return (h, h, h) if self.settings.once else super().override(h, self.trained(table))
