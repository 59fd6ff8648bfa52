"""Wall's gates far from their first bias of 8, over more tokens than torch scores by the formula: zoo/wall.py."""

import numpy as np
import pytest
import torch
from test_model import doors_of

import model_numpy
from config import ModelConfig
from model_torch import build_encoding
from positional_encodings import make_encoding
from zoo import wall

H, D, S = 2, 4, 70
CONFIG = ModelConfig(1, H * D, H, S, 8, encoding=make_encoding("wall"))
NAMES = ("q", "k", "h", "weight", "bias")


def inputs(bias):
    """{name: array} for a batch of 2, and the gradient of the loss with respect to the scores."""
    rng = np.random.default_rng(0)
    shapes = [(2, H, S, D), (2, H, S, D), (2, S, H * D), (H * D, H * D), (H * D,)]
    x = dict(zip(NAMES, map(rng.standard_normal, shapes), strict=True))
    return x | {"weight": 0.3 * x["weight"], "bias": x["bias"] + bias}, rng.standard_normal((2, H, S, S))


def formula(q, k, h, weight, bias, G):
    """bias_mn and the gradients of sum(G bias), from sums over m, n and c as the file's first lines write them."""
    z = h @ weight.T + bias
    P = np.cumsum(-np.logaddexp(0, -z), 1).reshape(2, S, H, D).swapaxes(1, 2)                      # (B, H, S, D)
    seen = np.arange(S)[:, None] >= np.arange(S)
    E = np.exp(np.where(seen[..., None], P[:, :, :, None] - P[:, :, None], -np.inf))               # (B, H, m, n, D)
    scores = np.einsum("bhmc,bhnc,bhmnc->bhmn", q, k, E) / np.sqrt(D)
    G = G / np.sqrt(D)
    terms = G[..., None] * q[:, :, :, None] * k[:, :, None] * E
    dlnf = np.stack([terms[:, :, j:, :j].sum((2, 3)) for j in range(S)], 1)      # ln f_j stands between n < j <= m
    dz = dlnf.reshape(2, S, H * D) / (1 + np.exp(z))
    return scores - q @ k.swapaxes(2, 3) / np.sqrt(D), {
        "q": np.einsum("bhmn,bhnc,bhmnc->bhmc", G, k, E) - G @ k,
        "k": np.einsum("bhmn,bhmc,bhmnc->bhnc", G, q, E) - G.swapaxes(2, 3) @ q,
        "h": dz @ weight, "weight": np.einsum("bsi,bsj->ij", dz, h), "bias": dz.sum((0, 1))}


def in_torch(x, G, T):
    """The scores of the last T queries, and the gradients."""
    layer = build_encoding(CONFIG.encoding, CONFIG).to(torch.from_numpy(G).dtype)
    layer.load_state_dict({name: torch.from_numpy(x[name]) for name in ("weight", "bias")})
    q, k, h = (torch.from_numpy(x[name]).requires_grad_() for name in "qkh")
    found = layer.score(q[:, :, S - T :], k, layer.key_state(h), None)
    grads = torch.autograd.grad((found * torch.from_numpy(G)[:, :, S - T :]).sum(), (q, k, h, layer.weight, layer.bias))
    return found.detach().numpy(), {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


def in_numpy(x, G, T):
    found, pullback = doors_of(CONFIG.encoding).score(x["q"], x["k"], x["h"], None, x)
    dq, dk, dh, down = pullback(G)
    return found, {"q": dq, "k": dk, "h": dh, **down}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bias", [0, -4, -20, -100])
@pytest.mark.parametrize("compute, T", [(in_torch, S), (in_torch, 40), (in_torch, 1), (in_numpy, S)],
                         ids=["torch", "torch after 30 cached", "torch after 69 cached", "numpy"])
def test_scores_and_gradients_are_those_of_the_formula(compute, T, bias, dtype):
    """To the rounding of a sum P, and that of a token's own score, which adds to P_m what it takes from P_n = P_m."""
    x, G = inputs(bias)
    G[:, :, : S - T] = 0                                                # the loss has the last T queries' scores alone
    scores, right = formula(**x, G=G)
    found, grads = compute({name: a.astype(dtype) for name, a in x.items()}, G.astype(dtype), T)
    eps, largest = np.finfo(dtype).eps, S * np.logaddexp(0, -x["bias"]).max()                 # of all -P, nearly
    near = 1e-9 if dtype == "float64" else 1e-5 + eps * largest
    for name in NAMES:
        assert grads[name].dtype == dtype
        atol = near * np.abs(right[name]).max() + 10 * S * eps
        np.testing.assert_allclose(grads[name], right[name], rtol=0, atol=atol, err_msg=name)
    np.testing.assert_allclose(found, scores[:, :, S - T :], rtol=0, atol=near * np.abs(scores).max())


def test_all_first_biases_are_8():
    params = model_numpy.strip_prefix("blocks.0.attn.encoding.", model_numpy.init_params(CONFIG))
    assert (params["bias"] == 8).all() and 0 < params["weight"].std() < 0.04 and S > 4 * wall.PART
