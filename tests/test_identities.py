"""What ExPE adds to a score, identity by identity, against numbers worked out from the weights alone.

docs/explained.md walks through them. In one head, with W = W_q or W_k and the rows start + theta (n + j), j < l:

    W phi(h, n) = content + n slope,    slope = theta sum_j W_j,
                                        content = sum_(i >= l) W_i h_i + sum_(j < l) W_j (start + theta j)
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_ladder import T, tiny
from test_model import attend, some_input, some_tokens

import model_numpy
from backends import TorchBackend
from config import TrainConfig, make_configs
from expe import expe_table, exqpe_table
from positional_encodings import make_encoding

C, H, D, RAMP = 16, 2, 8, 1 / (4 * T)
ON = pytest.mark.parametrize("on", ["k", "q", "qk"])


def draw_cases(n=12):
    """Settings of ExPE by chance, each with a seed of weights and input and with a first position."""
    rng = np.random.default_rng(0)
    for _ in range(n):
        how = {"l": int(rng.integers(1, C + 1)), "start": float(rng.choice([0.0, 0.7, -1.3])),
               "constant": bool(rng.integers(2)), "theta": float(rng.choice([RAMP, 0.3, -0.05]))}
        yield how, int(rng.integers(100)), int(rng.integers(-50, 51))


def expe(on, seed=0, **how):
    return tiny("expe", seed=seed, variant={"on": on, **how})


def close(ours, right, rtol=1e-10):
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def by_hand(model, h, part):
    """(content (T, C), slope (C,)) of queries or keys, from the weights, theta and start alone, column by column."""
    e, w = model.config.encoding, model.blocks[0].attn.qkv.weight.detach().numpy()[{"q": 0, "k": C}[part] :][:C]
    l = e.l if part in e.on else 0
    content, slope = np.zeros_like(h), np.zeros(C)
    for i in range(C):
        if i < l:
            content += w[:, i] * (e.start + (0 if e.constant else e.theta * i))
            slope += e.theta * w[:, i]
        else:
            content += np.outer(h[:, i], w[:, i])
    return content, slope


def by_head(model, h):
    """(a (T, D), u (D,), b (T, D), w (D,)) of each head."""
    numbers = (*by_hand(model, h, "q"), *by_hand(model, h, "k"))
    return zip(*(np.split(x, H, axis=-1) for x in numbers), strict=True)


# ---- 1: content and place come apart ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["k", "q", "qk", "qkv"])
def test_the_door_is_affine_in_the_table(on):
    """phi(h, P) = phi(h, 0) + phi(0, P), to the last bit, in both backends."""
    for how, seed, first in draw_cases():
        model, h = expe(on, **how), some_input(seed)
        P = torch.from_numpy(model.config.encoding.rows(np.arange(T) + 20_000 * first, model.config))
        override = model_numpy.build_encoding(model.config.encoding, model.config).override
        in_numpy = lambda h, P: override(h.numpy(), P.numpy(), {})[0]  # noqa: E731, B023
        for door in (model.encoding.override, in_numpy):
            for part, a, b, c in zip("qkv", door(h, P), door(h, 0 * P), door(0 * h, P), strict=True):
                assert np.array_equal(a, b + c)
                assert np.any(np.asarray(c)) == (part in on)


# ---- 2: what is in a score, and what the softmax leaves of it --------------------------------------------------------


@ON
def test_a_score_is_content_and_three_terms_of_the_positions(on):
    """q_m . k_n = a_m . b_n + n (a_m . w) + m (u . b_n) + m n (u . w)."""
    for how, seed, first in draw_cases():
        model, h, n = expe(on, seed, **how), some_input(seed), first + 3 * np.arange(T)
        attention = model.blocks[0].attn
        with torch.no_grad():
            rows = model.tables(n)[attention.encoding.settings].rows
            q, k, _ = attention.project(h, rows)
        for i, (a, u, b, w) in enumerate(by_head(model, h[0].numpy())):
            scores = a @ b.T + n * (a @ w)[:, None] + n[:, None] * (b @ u) + np.outer(n, n) * (u @ w)
            close((q[0, i] @ k[0, i].T).numpy(), scores)


def attention_by_slopes(model, h, n, without=()):
    """The first block's attention, its scores being q_m . b_n - (m - n)(q_m . w) over sqrt(D), with q_m = a_m + m u.

    without: what of m u to leave out, its product with "contents" of keys, with their "slopes", or both.
    """
    w_v, w_o = model.blocks[0].attn.qkv.weight[2 * C :], model.blocks[0].attn.proj.weight
    values, out, apart = np.split(h @ w_v.detach().numpy().T, H, axis=-1), [], n[:, None] - n
    for (a, u, b, w), v in zip(by_head(model, h), values, strict=True):
        q = {of: a if of in without else a + np.outer(n, u) for of in ("contents", "slopes")}
        scores = (q["contents"] @ b.T - apart * (q["slopes"] @ w)[:, None]) / math.sqrt(D)
        scores[np.triu_indices(T, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ v)
    return np.concatenate(out, -1) @ w_o.detach().numpy().T


@ON
def test_attention_is_that_of_a_linear_bias_whose_slope_each_query_chooses(on):
    for how, seed, first in draw_cases():
        model, h, n = expe(on, seed, **how), some_input(seed), first + 3 * np.arange(T)
        close(attend(model, h, n)[0].detach().numpy(), attention_by_slopes(model, h[0].numpy(), n))


@pytest.mark.parametrize("without", [("contents",), ("slopes",), ("contents", "slopes")])
def test_a_querys_own_position_matters_twice_on_queries_and_keys_and_never_on_keys_only(without):
    """m (u . w) makes the slope grow with m. m (u . b_n) makes some keys better liked, whatever the query asks: it
    depends on n by the key's content, and so the softmax does not drop it.
    """
    h, n = some_input(), np.arange(T) + 100
    for on in ("k", "qk"):
        model = expe(on)
        error = attend(model, h, n)[0].detach().numpy() - attention_by_slopes(model, h[0].numpy(), n, without)
        assert np.abs(error).max() < 1e-10 if on == "k" else np.abs(error).max() > 1e-2


@ON
def test_on_queries_only_no_score_depends_on_where_a_key_is(on):
    model, h, n = expe(on), some_input(), np.arange(T)
    elsewhere = np.append(np.roll(n[:-1], 3), n[-1])
    moved = (attend(model, h, elsewhere) - attend(model, h, n))[0, -1].abs().max()
    assert moved < 1e-12 if on == "q" else moved > 1e-3


# ---- 3: on keys only, attention depends on distances only ------------------------------------------------------------


def test_on_keys_only_a_shift_of_all_positions_changes_nothing():
    tokens = some_tokens(1, T)
    for how, seed, first in draw_cases():
        model = expe("k", seed, **how)
        with torch.no_grad():
            close(model(tokens, positions=torch.arange(T) + 200 * first).numpy(), model(tokens).numpy())


# ---- 4: one multiplier, and what it means to each optimizer ----------------------------------------------------------


def rewritten(model, change, **how):
    """A model of other settings, its W_q or W_k (wherever the override enters) what `change` makes of (C, C)."""
    other = expe(**{**{f: getattr(model.config.encoding, f) for f in ("on", "l", "start", "theta")}, **how})
    other.load_state_dict(model.state_dict())
    for block in other.blocks:
        with torch.no_grad():
            for part, w in zip("qk", block.attn.qkv.weight.chunk(3)[:2], strict=True):
                if part in model.config.encoding.on:
                    w.copy_(change(w.clone()))
    return other


def same(model, other, h, n=(5, *range(7, T + 6))):
    ours, theirs = (attend(m, h, n).detach() for m in (model, other))
    return bool((ours - theirs).abs().max() <= 1e-10 * ours.abs().max())


@ON
@pytest.mark.parametrize("l", [1, 2, 5, C])
@pytest.mark.parametrize("factor", [16, -0.3])
def test_theta_and_start_times_c_is_the_overridden_columns_times_c(on, l, factor):
    def divided(w):
        w[:, :l] /= factor
        return w

    model, h = expe(on, l=l, start=0.7, theta=0.3), some_input()
    multiplied = {"start": 0.7 * factor, "theta": 0.3 * factor}
    assert same(model, rewritten(model, divided, **multiplied), h)
    assert not same(model, rewritten(model, lambda w: w, **multiplied), h)


@ON
def test_start_is_a_shift_of_all_positions_and_drops_out_on_keys_only(on):
    model, h, n = expe(on, start=0.0, theta=0.3), some_input(), np.arange(T)
    other = rewritten(model, lambda w: w, start=7 * 0.3)
    close(attend(other, h, n).detach().numpy(), attend(model, h, n + 7).detach().numpy())
    assert same(model, other, h, n) == (on == "k")


@pytest.mark.parametrize("on, fewer", [("k", 1), ("k", 2), ("q", 2), ("qk", 2), ("qk", 3)])
@pytest.mark.parametrize("l", [3, 5, C])
def test_one_column_says_what_l_columns_say_on_keys_only_and_two_do_elsewhere(on, fewer, l):
    """Whatever the input: with other weights, start 0 and the dimensions that are set free left unused.

    A layer sees of its l columns their sum s = sum_j W_j and t = sum_j W_j (start/theta + j): theta (n s + t) is added.
    Two columns hold both, one holds s; and of the keys t drops out.
    """
    def fitted(w):
        columns, j = w[:, :l].clone(), torch.arange(l, dtype=w.dtype)
        s, t = columns.sum(1), columns @ (0.7 / 0.3 + j)
        w[:, :l] = 0
        w[:, 0], w[:, 1] = (s, w[:, 1]) if fewer == 1 else (s - t, t)
        return w

    model = expe(on, l=l, start=0.7, theta=0.3)
    other = rewritten(model, fitted, l=fewer, start=0.0)
    assert all(same(model, other, some_input(seed)) for seed in range(3))
    assert not same(model, rewritten(model, lambda w: w, l=fewer, start=0.0), some_input())


@pytest.mark.parametrize("l", [1, 4, 24, 96])
@pytest.mark.parametrize("theta", [1 / 512, 1 / 32])
def test_at_the_start_of_training_the_slope_is_as_large_as_theta_times_the_root_of_l(l, theta):
    """The first weights are normal, of 0.02: so theta sum_j W_j has a deviation of 0.02 theta sqrt(l) in each number.

    On keys only, of a normalised h, the slope a_m . w / sqrt(D) then has one of 0.02^2 theta sqrt(l C).
    """
    config, slopes, places = make_configs("mini")[0], [], []
    config = dataclasses.replace(config, encoding=make_encoding("expe", l=l, theta=theta, on="k"))
    for seed in range(4):
        h = np.random.default_rng(seed).standard_normal((256, config.width))
        for name, weights in model_numpy.init_params(config, seed).items():
            if name.endswith("qkv.weight"):
                w_q, w_k, _ = np.split(weights, 3)
                w = theta * w_k[:, :l].sum(1)
                q, k = (x.reshape(-1, config.heads, config.d_head) for x in (h @ w_q.T, w))
                slopes.append((q * k).sum(-1) / math.sqrt(config.d_head))
                places.append(w)
    assert np.std(places) == pytest.approx(0.02 * theta * math.sqrt(l), rel=0.06)
    assert np.std(slopes) == pytest.approx(0.02**2 * theta * math.sqrt(l * config.width), rel=0.06)


def gradients(model):
    """(of W_q, of W_k) of the first block, of the loss on some tokens; (C, C) each."""
    tokens = some_tokens(3, T + 1)
    model.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return model.blocks[0].attn.qkv.weight.grad.numpy()[:C], model.blocks[0].attn.qkv.weight.grad.numpy()[C : 2 * C]


@pytest.mark.parametrize("l", [2, 5, C])
@pytest.mark.parametrize("on", ["k", "qk"])
def test_all_overridden_columns_of_the_keys_get_one_gradient(on, l):
    """Column j of W_k gets sum_n dk_n (start + theta (n + j)), and sum_n dk_n = 0: no query minds what all keys share.

    So the offsets by j do not set the columns apart in training. Those of W_q do, on queries and keys.
    """
    of_queries, of_keys = (grad[:, :l] for grad in gradients(expe(on, l=l, start=0.4)))
    close(of_keys, np.repeat(of_keys[:, :1], l, axis=1))
    assert np.abs(of_keys).max() > 1e-5
    assert np.ptp(of_queries, axis=1).max() > 1e-2 * np.abs(of_queries).max()


def test_adamw_moves_these_columns_as_one():
    """What sets them apart is what they started with, and weight decay shrinks that: by 1 - rate x decay a step."""
    model, l, decay = expe("k", l=5, theta=RAMP), 5, 0.1
    config = TrainConfig(1, 1, lr=0.01, end_lr=0.01, weight_decay=decay)
    optimizer = TorchBackend(model.config, config, torch.device("cpu"), model=model).optimizer
    w = model.blocks[0].attn.qkv.weight
    before = w.detach()[C : 2 * C, :l].clone()
    for _ in range(7):
        gradients(model)
        optimizer.step()
    after = w.detach()[C : 2 * C, :l]
    apart = [x - x.mean(1, keepdim=True) for x in (before, after)]
    close(apart[1].numpy(), (apart[0] * (1 - 0.01 * decay) ** 7).numpy(), 1e-8)
    assert (after.mean(1) - before.mean(1)).abs().max() > 0.05


@pytest.mark.parametrize("l", [4, 9, C])
def test_a_step_of_sgd_moves_the_slope_by_theta_squared_l_and_one_of_adam_by_theta_l(l):
    """l columns of theta, or one of theta sqrt(l) that says the same: sgd keeps them equal, Adam makes the l columns
    faster by sqrt(l). So one number is enough for sgd, and Adam has two: the slope's first size, and its pace.
    """
    def one(w):
        s = w[:, :l].sum(1) / math.sqrt(l)
        w[:, :l] = 0
        w[:, 0] = s
        return w

    thetas, model = (0.3, 0.3 * math.sqrt(l)), expe("k", l=l, theta=0.3)
    pair = [model, rewritten(model, one, l=1, theta=thetas[1])]
    assert same(*pair, some_input())
    grads = [theta * gradients(m)[1][:, :columns] for m, columns, theta in zip(pair, (l, 1), thetas, strict=True)]
    sgd, adam = ([step(grad).sum(1) for grad in grads] for step in (lambda g: g, np.sign))
    close(*sgd)
    np.testing.assert_allclose(thetas[0] * adam[0], math.sqrt(l) * thetas[1] * adam[1])


@pytest.mark.parametrize("l", [1, 5, 24])
def test_exqpe_is_the_same_ramp_in_stairs_with_theta2_over_l_for_theta(l):
    """Each l positions every column has risen by theta2, as the columns of ExPE have for that theta."""
    n = np.arange(500)
    stairs = exqpe_table(n + l, l, 0.3, 0.01, 1 / 16) - exqpe_table(n, l, 0.3, 0.01, 1 / 16)
    np.testing.assert_allclose(stairs, expe_table(n + l, l, 0.3, 1 / 16 / l) - expe_table(n, l, 0.3, 1 / 16 / l))


# ---- 6: what the offset by j is good for -----------------------------------------------------------------------------


def in_bf16(**how):
    """What the columns of 2,048 rows say together once each number is rounded: their mean, in positions."""
    table = torch.from_numpy(make_encoding("expe", theta=1 / 2048, start=0.0, **how).rows(np.arange(2048), None))
    return table.bfloat16().double().mean(-1).numpy() * 2048


def test_in_bf16_the_staggered_columns_keep_apart_what_equal_ones_merge():
    """Columns that are offset round at different places: a dither. All 24 equal ones are worth one."""
    one, equal, staggered = in_bf16(l=1), in_bf16(l=24, constant=True), in_bf16(l=24)
    assert len(np.unique(one[:512])) == len(np.unique(equal[:512])) == 385
    assert len(np.unique(one)) == len(np.unique(equal)) == 641
    assert (np.diff(staggered) > 0).all()
    middle = np.arange(2048) + 23 / 2
    assert np.abs(equal - np.arange(2048)).max() == 4 and np.abs(staggered - middle).max() == 1.5
