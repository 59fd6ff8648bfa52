"""Where the paper, and what is written about its rivals, is wrong: the rule as it stands there, and the right one.

Each test writes the wrong rule anew from its description, shows the value it gives, and then what the project does.
The sources: the ExPE paper's preprint and its later version; a survey of positional encodings; a tutorial with code;
public code of the encodings in zoo/, and of others' ports.
"""

import math

import numpy as np
import pytest
import torch
from conftest import need
from test_ladder import T, tiny
from test_model import attend, filled, like, some_input, some_tokens

import model_numpy
from config import PRESETS, ModelConfig, make_encoding
from eval import cut_windows, mean_loss
from expe import alibi_slopes, distances, expe_table, t5_bucket
from lab.formats import count_floats
from longer.cache import Cache
from longer.reading import Reader
from longer.scaling import scaled_inv_freq as rope_inv_freq
from longer.scaling import self_extend_queries


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype, claim, true", [("fp16", 33e6, 15_361), ("tf32", 1e6, 130_049)])
def test_errata_paper_2_3_numbers_in_0_to_1(dtype, claim, true):
    """source: paper, section 2.3
    says: [0, 1] holds 33e6 numbers of fp16 and about 1e6 of TF32
    in fact: 15,361 and 130,049 (`python -m lab.formats`); bf16 has 16,257, more than fp16

    Counted twice: by the formula, and over all bit patterns of the format.
    """
    patterns = {"fp16": np.arange(2**16, dtype=np.uint16).view(np.float16)}.get(dtype)
    if patterns is None:  # TF32: float32 with the last 13 bits of the fraction empty
        patterns = (np.arange(2**19, dtype=np.uint32) << 13).view(np.float32)
    with np.errstate(invalid="ignore"):
        seen = int(((patterns >= 0) & (patterns <= 1) & ~np.signbit(patterns)).sum())
    assert count_floats(dtype) == seen == true and claim / true > 7
    assert count_floats("fp16") < count_floats("bf16")  # the paper has it the other way round


def test_errata_paper_2_1_theta_is_one_over_four_contexts():
    """source: paper, section 2.1
    says: theta = 1/(2 x context)
    in fact: its range 0 to 0.25 over 512 tokens, and its table 9, are 1/(4 x context), which is the default here

    The first position past 512 tokens has the value 0.5 by the one, 0.25 by the other.
    """
    context = 512
    wrong, right = 1 / (2 * context), ModelConfig(6, 384, 12, context, 32000, encoding=make_encoding("expe")).encoding
    assert expe_table(context, 1, theta=wrong)[0] == 0.5  # twice the range 0 .. 0.25 that the paper describes
    assert expe_table(context, 1, theta=right.theta)[0] == 0.25 and right.theta == 1 / 2048  # and its table 9


def test_errata_paper_equation_2_keys_have_a_matrix_of_their_own():
    """source: paper's preprint, equation 2
    says: k_n = f_q(phi(x, n))
    in fact: k_n = f_k(phi(x, n)), as in the later version; else what m asks of n would be what n asks of m

    With f_q for both, the matrix of scores is symmetric; the model's attention is that of f_k.
    """
    model, h = tiny("expe"), some_input(seed=0)
    phi = torch.cat((torch.from_numpy(expe_table(np.arange(T), 5, theta=1 / (4 * T))), h[0, :, 5:]), dim=-1)
    w_q, w_k, w_v = model.blocks[0].attn.qkv.weight.detach().chunk(3)
    symmetric, right = (phi @ w_q.T) @ (phi @ w_q.T).T, (phi @ w_q.T) @ (phi @ w_k.T).T
    assert torch.allclose(symmetric, symmetric.T) and not torch.allclose(right, right.T)

    def attended(scores_of):
        heads = []
        for part in (slice(0, 8), slice(8, 16)):
            scores = (phi @ w_q[part].T) @ (phi @ scores_of[part].T).T / math.sqrt(8)
            scores += torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)
            heads.append(scores.softmax(-1) @ (h[0] @ w_v[part].T))
        return torch.cat(heads, -1) @ model.blocks[0].attn.proj.weight.T

    ours = attend(model, h)[0]
    assert torch.allclose(ours, attended(w_k)) and not torch.allclose(ours, attended(w_q))


def test_errata_paper_data_of_the_large_models_is_10_billion_tokens():
    """source: paper's later version, section 3
    says: the data of the large models are split as 600M + 2 x 50M tokens
    in fact: that is the small models' split; appendix C has 9.8B + 2 x 100M, and table 8's budget is 10B

    The steps of table 8 see 10 billion tokens, which is 16 times 600M.
    """
    for preset in ("llama-135m", "llama-342m"):
        model, train = PRESETS[preset]
        seen = train.steps * train.batch_size * model.context
        assert seen == pytest.approx(10e9, rel=1e-3) and seen / 600e6 > 16
        assert train.max_tokens == 9.8e9 + 2 * 100e6


def test_errata_paper_tables_2_and_7_one_model_has_one_loss():
    """source: paper, tables 2 and 7
    says: ExPE's loss at 4x is 3.88 in one and 4.26 in the other
    in fact: one model, two numbers: open until it is measured at that size

    The test shows only that a model scored twice by one protocol has one loss, here with a difference between two
    lengths that is smaller than that of the two tables.
    """
    model, documents = tiny("expe"), [some_tokens(200, seed=i).numpy() for i in range(3)]
    windows = {length: cut_windows(documents, length, 64) for length in (16, 64)}
    once, again = ({length: mean_loss(model, windows[length]) for length in windows} for _ in range(2))
    assert once == again and abs(once[64] - once[16]) < 4.26 - 3.88


def test_errata_survey_t5_buckets_need_the_log_of_the_largest_distance():
    """source: survey, equation 6
    says: T5's bucket is B/2 + floor(log(d/(B/2))) B/2
    in fact: that gives bucket 48 of 32 at d = 127; the log is to be divided by log(D/(B/2)), D the largest distance
    """
    def wrong(d, buckets=32):
        return d if d < buckets // 2 else buckets // 2 + math.floor(math.log(d / (buckets // 2))) * (buckets // 2)

    assert wrong(127) == 48  # of 32 buckets
    assert t5_bucket(127) == 31 and t5_bucket(np.arange(10_000)).max() == 31


def test_errata_survey_alibi_slopes_are_powers_of_8_over_the_head_count():
    """source: survey, equation 7
    says: ALiBi's slope is 2^(-h H/8)
    in fact: 2^(-8 h/H) for H a power of two, with a rule for the rest; the two are equal at 8 heads alone

    At 12 heads the survey's slopes fall to 2^-18, where ALiBi's own end at 2^-8.
    """
    def wrong(n_heads):
        return np.array([2 ** (-h / 2 ** (-math.log2(n_heads) + 3)) for h in range(1, n_heads + 1)])

    np.testing.assert_allclose(wrong(8), alibi_slopes(8))
    for n_heads in (4, 16, 32):
        np.testing.assert_allclose(alibi_slopes(n_heads), 2.0 ** (-8 * np.arange(1, n_heads + 1) / n_heads))
        assert not np.allclose(wrong(n_heads), alibi_slopes(n_heads))
    assert wrong(12)[-1] == pytest.approx(2.0**-18) and alibi_slopes(12).min() == 2.0**-8


def test_errata_tutorial_rope_mixes_two_layouts():
    """source: tutorial, `apply_rope`
    says: interleaved pairs take every second entry of cat((f, f))
    in fact: half of the frequencies are then used twice and half never: two layouts of RoPE are mixed

    In the model the pair (i, i + D/2) turns by the i-th frequency, and by no other.
    """
    freq, _ = rope_inv_freq(16)
    used = np.concatenate((freq, freq))[::2]  # by the pairs 0 .. 7
    assert used.tolist() == [*freq[::2], *freq[::2]]  # each second frequency twice, the others never
    assert len(set(used)) == 4 and len(set(freq)) == 8
    model = tiny("rope", n_heads=1)  # one head of 16: the pair (i, i + 8) turns by freq_i, and by no other
    q = torch.eye(16, dtype=torch.float64)[None, None, :8]  # eight queries, the i-th along dimension i
    turned, _ = model.encoding.rotate(q, q, model.tables(np.ones(8, int))[model.config.encoding].rows)
    angles = [math.atan2(turned[0, 0, i, i + 8], turned[0, 0, i, i]) for i in range(8)]
    np.testing.assert_allclose(angles, freq, rtol=1e-12)


def test_errata_tutorial_alibi_at_32k_is_69_gb_and_need_not_be_stored():
    """source: tutorial, ALiBi at 32K tokens and 32 heads
    says: the bias takes about 128 GB in fp16
    in fact: 68.7 GB; and it need not be stored, since under a causal softmax it equals slope x n, one number a key
    """
    assert 32 * 32768 * 32768 * 2 == pytest.approx(68.7e9, rel=1e-3)  # bytes; the tutorial says about 128 GB
    n, slope = np.arange(50), 0.25
    future = np.triu(np.full((50, 50), -np.inf), 1)
    scores = np.random.default_rng(0).standard_normal((50, 50)) + future

    stored, a_number_a_key = softmax(scores - slope * distances(n, n)), softmax(scores + slope * n)
    np.testing.assert_allclose(stored, a_number_a_key, rtol=1e-12)


def test_errata_tutorial_yarn_stretches_the_wrong_dimensions():
    """source: tutorial, YaRN's ramp
    says: frequencies times (1 - ramp)/s + ramp, with a ramp over wavelengths
    in fact: inverted: it stretches the fast pairs and keeps the slow ones.
        The ramp runs over pairs, and the factor is 1 - ramp + ramp/s

    The tutorial's ramp is low where a pair turns often. The right one keeps, at s times the trained length, every slow
    pair within the angles of training.
    """
    s, L, base, D = 4, 512, 10000.0, 32
    plain, _ = rope_inv_freq(D)
    wavelength = 2 * math.pi / plain
    low, high = L / 32, L  # wavelengths of pairs that turn 32 times, and once
    ramp = np.clip((wavelength - low) / (high - low), 0, 1)
    wrong = plain * ((1 - ramp) / s + ramp)
    right, _ = rope_inv_freq(D, base, "yarn", s, L)
    assert wrong[0] == plain[0] / s and wrong[-1] == plain[-1]  # the fast pair stretched, the slow one left alone
    assert right[0] == plain[0] and right[-1] == pytest.approx(plain[-1] / s)  # the other way round
    # What it is for: at s times the trained length no slow pair turns further than it did in training.
    assert s * L * right[-1] == pytest.approx(L * plain[-1]) and s * L * wrong[-1] == pytest.approx(s * L * plain[-1])


def test_errata_tutorial_yarns_temperature_is_an_inverse_square():
    """source: tutorial, YaRN's temperature
    says: t = 0.1 ln s + 1
    in fact: sqrt(1/t) = 0.1 ln s + 1, so that scores grow by its square instead of falling

    Queries and keys are stretched once each, so that a token's score with itself grows by 1/t.
    """
    s = 4
    wrong = 0.1 * math.log(s) + 1  # as t, which divides the scores
    model = tiny("rope", variant={"rope_scaling": "yarn", "factor": float(s)})
    q = torch.ones(1, 2, 1, 8, dtype=torch.float64)
    queries, keys = model.encoding.rotate(q, q, model.tables(np.array([7]))[model.config.encoding].rows)
    # both queries and keys are stretched, once each: a token's score with itself grows by 1/t
    grown = (queries * keys).sum(-1)[0, 0, 0].item() / 8
    assert grown == pytest.approx(1.13862944**2) and grown > 1 > 1 / wrong


def test_errata_tutorial_dynamic_ntk_depends_on_the_length():
    """source: tutorial, `dynamic_ntk_scaling`
    says: the base times s^(D/(D-2)) at every length
    in fact: that is the static rule; the dynamic one depends on the length, and changes nothing up to the trained one
    """
    def wrong(s, D=32):
        return (10000.0 * s ** (D / (D - 2))) ** (-np.arange(0, D, 2) / D)

    np.testing.assert_allclose(wrong(4), rope_inv_freq(32, scaling="ntk", factor=4)[0])
    inside, beyond, farther = (rope_inv_freq(32, scaling="dynamic", factor=4, length=n)[0] for n in (512, 1024, 4096))
    np.testing.assert_array_equal(inside, rope_inv_freq(32)[0])  # identity inside the trained length, 512
    assert not np.allclose(wrong(4), inside) and beyond[-1] > farther[-1]


def test_errata_tutorial_streaming_cache_slides_a_window_that_is_not_full():
    """source: tutorial, `StreamingKVCache`
    says: a chunk that does not fit in what is left moves the window by the chunk's whole size
    in fact: if the window is not full, zeros that were never written stay in it and are attended to,
        and tokens are lost

    A buffer of 8 with 2 sinks, a chunk of 4 and one of 5: tokens 3 and 4 give way to a stale zero.
    """
    sinks, size, length = 2, 8, 0
    buffer = np.zeros(size)  # 0: nothing was ever written here; tokens are 1, 2, 3, ...
    for chunk in (np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8, 9])):
        if length + len(chunk) <= size:
            buffer[length : length + len(chunk)] = chunk
            length += len(chunk)
        else:
            buffer[sinks : -len(chunk)] = buffer[sinks + len(chunk) :].copy()
            buffer[-len(chunk) :] = chunk
    assert buffer.tolist() == [1, 2, 0, 5, 6, 7, 8, 9]  # 3 and 4 are lost for a stale zero, which is attended to

    model, cache, kept = tiny(make=Reader), Cache(sinks, size - sinks), Cache()
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        model(tokens[:, 4:], cache=cache)
        model(tokens, cache=kept)
    first = model.blocks[0].attn  # whose keys and values are those of the token alone
    assert len(cache) == len(kept) == 9
    torch.testing.assert_close(cache[first][0], kept[first][0])  # all nine: the last sees 2 sinks and 6 more
    with torch.no_grad():
        model(torch.tensor([[10]]), cache=cache)
    assert len(cache) == 9 and torch.equal(cache[first][0][:, :, :2], kept[first][0][:, :, :2])
    assert torch.equal(cache[first][0][:, :, 2:8], kept[first][0][:, :, 3:9])


def test_errata_a_forget_gate_is_added_as_a_logarithm():
    """source: code of FoX, iushv/ml_research_papers, `ForgettingAttention`
    says: the scores are multiplied by a sigmoid of query and key
    in fact: the logarithms of the gates of all tokens after the key are added. A product with a gate below 1 raises a
        score below 0: forgetting a key would then make it heavier

    One key of score -2 that is to be forgotten (a gate of 0.01) beside one of score 0 that is not.
    """
    scores, forgotten = np.array([-2.0, 0.0]), np.array([0.01, 1.0])
    assert softmax(scores * forgotten)[0] == pytest.approx(0.495, abs=1e-3)  # the code: it was 0.119
    assert softmax(scores)[0] == pytest.approx(0.119, abs=1e-3)
    assert softmax(scores + np.log(forgotten))[0] == pytest.approx(0.0013, abs=1e-4)  # the paper: 0.01 of its odds
    model, h = tiny("fox"), some_input()
    encoding, q = model.blocks[0].attn.encoding, torch.zeros(1, 2, T, 8, dtype=torch.float64)
    encoding.bias.data[:] = 50.0  # nothing is forgotten
    assert encoding.score(q, q, encoding.keep(h), None).abs().max() < 1e-9
    encoding.weight.data[:], encoding.bias.data[:] = 0, math.log(0.01 / 0.99)
    bias = encoding.score(q, q, encoding.keep(h), None)[0, 0, -1].detach().numpy()
    np.testing.assert_allclose(bias, math.log(0.01) * np.arange(T - 1, -1, -1), rtol=1e-9)  # once for each later token


def test_errata_cope_counts_by_gates_of_the_product_as_it_is():
    """source: CoPE's own listing, and its code, facebookresearch/RAM, `ContextPosSelfAttn`
    says: gates are sigmoid(q.k/sqrt(D))
    in fact: its equation has sigmoid(q.k), as here; at D = 64 and q.k = -8 a key counts 0.27 by the one, 0.0003 by the
        other, so that over 1,000 such keys they are 269 positions apart
    """
    def counted(x):
        return 1 / (1 + math.exp(-x))

    assert counted(-8 / math.sqrt(64)) == pytest.approx(0.27, abs=2e-3) and counted(-8) == pytest.approx(3e-4, rel=0.2)
    assert 1000 * (counted(-1) - counted(-8)) == pytest.approx(268.6, abs=0.1)
    model = tiny("cope", variant={"count_to": 64})
    encoding, q = model.blocks[0].attn.encoding, torch.zeros(1, 2, T, 8, dtype=torch.float64)
    encoding.e.data[:] = torch.arange(64.0, dtype=torch.float64)[:, None]  # e[p] = (p, ..., p): a bias shows its p
    q[..., 0] = 1.0
    p = encoding.score(q, -8 * q, None, None)[0, 0, -1]
    np.testing.assert_allclose(p.detach().numpy(), counted(-8) * np.arange(T, 0, -1), rtol=1e-9)


def test_errata_cope_between_two_whole_positions():
    """source: explainer of CoPE
    says: between whole numbers e[p] is (p - floor p) e[ceil p] + (1 - p - floor p) e[floor p]
    in fact: the second weight is 1 - p + floor p; the two are to sum to 1, and at p = 2.25 the explainer's give -3
    """
    p = 2.25
    wrong, right = ((p - 2, 1 - p - 2), (p - 2, 1 - p + 2))
    assert sum(wrong) == -3 and sum(right) == 1
    model = tiny("cope", variant={"count_to": 64})
    encoding, q = model.blocks[0].attn.encoding, torch.zeros(1, 2, 3, 8, dtype=torch.float64)
    q[..., 0], k = 1.0, torch.zeros(1, 2, 3, 8, dtype=torch.float64)
    k[..., 0] = math.log(3)  # gates of 3/4: three of them make 2.25
    found = encoding.score(q, k, None, None)[0, 0, 2, 0].item()
    low, high = encoding.e[2:4, 0].tolist()
    assert found == pytest.approx(right[0] * high + right[1] * low) != pytest.approx(wrong[0] * high + wrong[1] * low)


def fire_shares(positions, L):
    """What FIRE's function is given at c = 0.1, (T, S), by a function that is the identity."""
    config = ModelConfig(1, 16, 1, 512, 40, encoding=make_encoding("fire", threshold=L))
    table = model_numpy.tables(config.encoding, positions, config, float).pairs
    learned = {"c": np.log([0.1]), "L": np.log([L]), "w1": np.ones(1), "b1": np.zeros(1), "w2": np.ones((1, 1))}
    return model_numpy.doors_of(config.encoding, config).score[0](None, None, None, table, learned)[0][0]


def test_errata_fires_logarithm_is_of_one_more():
    """source: a public port of FIRE, with `safe_log`
    says: psi(x) = ln(c x + 1e-6)
    in fact: psi(x) = ln(c x + 1), which is 0 at 0. By the port a token's share of its own way back is -3.5 at 512
        tokens, and the nearest nine keys are below 0, where shares are to run from 0 to 1
    """
    d, L = np.arange(512), 512.0
    wrong = np.log(0.1 * d + 1e-6) / math.log(0.1 * L + 1e-6)
    assert wrong[0] == pytest.approx(-3.51, abs=0.01) and (wrong[:10] < 0).all() and wrong[11] > 0
    right = fire_shares(d, L)[-1, ::-1]  # by distance
    assert right[0] == 0 and (np.diff(right) > 0).all() and right[-1] < 1
    assert right[10] == pytest.approx(math.log(2) / math.log(52.2))


def test_errata_fires_threshold_starts_at_the_trained_length():
    """source: code of FIRE, chuanyang-Zheng/DAPE, `FIRE`
    says: the threshold starts at half of the trained length, 512 // 2
    in fact: at 512, as in the paper's listing, where the trained length's queries all share one scale

    So the first key of query 300 is all the way back by the one, and 0.87 of it by the other.
    """
    wrong, right = (fire_shares(np.arange(301), L)[300, 0] for L in (512.0 // 2, 512.0))
    assert wrong == pytest.approx(1) and right == pytest.approx(math.log(31) / math.log(52.2))
    assert right == pytest.approx(0.868, abs=1e-3)
    assert ModelConfig(1, 16, 1, 512, 40, encoding=make_encoding("fire")).encoding.threshold == 512


def test_errata_grapes_gate_is_of_a_product_over_the_root_of_the_width():
    """source: docstring in GRAPE's code, model-architectures/GRAPE, `QueryGatedAdditiveBias`
    says: the slope is omega_h softplus(v_h^T q_i)
    in fact: omega_h softplus(v_h^T q_i / sqrt(D)), as in the paper's equation 4.6 and in the code below the docstring,
        which scales v_h to the norm 1, too; at D = 64 and v.q = 16 the slope is 2.1 and not 16
    """
    softplus = np.logaddexp
    assert softplus(0, 16) == pytest.approx(16) and softplus(0, 16 / math.sqrt(64)) == pytest.approx(2.127, abs=1e-3)
    model = tiny("grape", d_model=128)  # two heads of 64
    encoding, q = model.blocks[0].attn.encoding, torch.zeros(1, 2, T, 64, dtype=torch.float64)
    encoding.v.data[:], encoding.w.data[:] = 0, math.log(math.e - 1)  # omega: ALiBi's slopes
    encoding.v.data[:, 0], q[..., 0] = 7.0, 16.0
    table = model.tables(np.arange(T))[model.config.encoding].pairs
    slopes = -encoding.score(q, q, None, table)[0, :, -1, -2].detach().numpy()  # of the key one before
    np.testing.assert_allclose(slopes, alibi_slopes(2) * softplus(0, 2), rtol=1e-9)


def test_errata_ports_of_proportional_rope_take_the_width_that_turns_for_the_heads():
    """source: ports of Gemma 4's proportional RoPE
    says: as GPT-NeoX's: the first r = pD dimensions of a head, by base^(-2i/r), in pairs (i, i + r/2)
    in fact: base^(-2i/D) for i < r/2 in pairs (i, i + D/2); the other pairs of the head stand still

    At p = 1/4 of 16 dimensions: two pairs turn, the second by base^(-1/8), where the ports have base^(-1/2).
    """
    wrong = 10000.0 ** (-np.arange(0, 4, 2) / 4)
    q = torch.eye(16, dtype=torch.float64)[None, None, :8]  # eight queries, the i-th along dimension i
    angles = {}
    for pe in ("proportional", "partial"):
        model = tiny(pe, n_heads=1)
        turned, _ = model.encoding.rotate(q, q, model.tables(np.ones(8, int))[model.config.encoding].rows)
        partner = {"proportional": 8, "partial": 2}[pe]
        angles[pe] = [math.atan2(turned[0, 0, i, i + partner], turned[0, 0, i, i]) for i in range(8)]
    np.testing.assert_allclose(angles["proportional"], [1, 10000.0 ** (-1 / 8), *[0] * 6], rtol=1e-12)
    np.testing.assert_allclose(angles["partial"][:2], wrong, rtol=1e-12)  # which is right for GPT-NeoX
    assert wrong[1] == 0.01


def test_errata_self_extends_code_has_fractions_of_a_position():
    """source: Self-Extend's code, `self_extend_forward`
    says: queries of far keys lie at m // G + w - w / G
    in fact: m // G + w - w // G, as in the paper and in the same file's code for one new token;
        else no distance is a trained one, and a text read at once differs from one read token by token

    With w = 5 and G = 3 the nearest of the far keys, 5 back, is at 4.33 or 5.33 by the one, at 5 or 6 by the other.
    """
    w, G, m = 5, 3, np.arange(5, 40)
    wrong = m // G + w - w / G - (m - w) // G
    right = self_extend_queries(m, w, G) - (m - w) // G
    assert set(np.round(wrong, 2)) == {4.33, 5.33} and set(right) == {5, 6} and right.dtype.kind == "i"
    model, tokens, cache = tiny("rope", make=Reader), some_tokens(1, 30), Cache()
    model.scale_to(30, rope_scaling="self-extend", chunk=w, factor=G)
    with torch.no_grad():
        stepwise = torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)
        torch.testing.assert_close(stepwise, model(tokens), rtol=1e-9, atol=1e-9)


def test_errata_transformers_longrope_changes_the_frequencies_of_new_keys_alone():
    """source: transformers 5.23, longrope with a cache
    says: past the trained length the long factors are for the tokens that are read from then on
    in fact: all keys of a text need one list: those in the cache keep the short one, and the text differs from one that
        is read at once. Here the length of the whole text is given first

    Llama of the same weights, read to 18 tokens of 12 trained ones.
    """
    need("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    lists = {"long": (1.0, 2.0, 4.0, 8.0), "short": (1.0, 1.0, 1.0, 1.0)}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": T,
            "long_factor": list(lists["long"]), "short_factor": list(lists["short"])}
    ours, tokens = tiny("rope", "llama", make=Reader), some_tokens(1, 18)
    theirs = filled(LlamaForCausalLM(LlamaConfig(**like(ours, rms_norm_eps=1e-5, rope_parameters=rope))), ours)
    ours.scale_to(18, rope_scaling="longrope", factor=2.0, **lists)
    with torch.no_grad():
        at_once, first = theirs(tokens).logits, theirs(tokens[:, :9])
        later = theirs(tokens[:, 9:], past_key_values=first.past_key_values).logits
        assert (later - at_once[:, 9:]).abs().max() > 1e-2
        torch.testing.assert_close(ours(tokens), at_once, rtol=1e-4, atol=1e-4)  # theirs: angles in fp32
        cache = Cache()
        stepwise = torch.cat([ours(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)
        torch.testing.assert_close(stepwise, ours(tokens), rtol=1e-9, atol=1e-9)


def test_errata_path_foxs_gates_are_not_divided():
    """source: code of PaTH-FoX, fla-org/flash-linear-attention, `parallel_path_attn` and `naive_path_attn`
    says: the sums of the gates' logarithms join the products before all are divided by sqrt(D)
    in fact: they are added undivided, as in the paper's section 4 and in FoX. At D = 64 a gate of 0.5 leaves 0.92 of a
        key's weight by the one, 0.5 by the other
    """
    assert math.exp(math.log(0.5) / math.sqrt(64)) == pytest.approx(0.917, abs=1e-3)
    encoding, q = tiny("path_fox", d_model=128).blocks[0].attn.encoding, torch.zeros(1, 2, T, 64, dtype=torch.float64)
    encoding.forget.data[:], encoding.forget_bias.data[:] = 0, 0  # gates of 0.5
    h = torch.randn(1, T, 128, dtype=torch.float64)
    bias = encoding.score(q, q, encoding.keep(h), None)[0, 0, -1].detach().numpy()  # q = 0: reflections add nothing
    np.testing.assert_allclose(bias, math.log(0.5) * np.arange(T - 1, -1, -1), rtol=1e-9)


def test_errata_cables_code_is_fox():
    """source: code of CABLE, axiomlab/Cable of March 2025, `CausalSelfAttention`
    says: the bias is c_m - c_n, c the running sum of -softplus(W x + b)
    in fact: that is FoX with -W and -b, and two keys are as far apart for all queries. By the paper's third version,
        equations 2 to 7, each query weighs the sum by a number of its own
    """
    h, q = some_input(), torch.zeros(1, 2, T, 8, dtype=torch.float64)
    fox, cable = (tiny(pe).blocks[0].attn.encoding for pe in ("fox", "cable"))
    with torch.no_grad():
        c = -torch.nn.functional.softplus(-(h @ fox.weight.T + fox.bias)).cumsum(1).mT  # W = -FoX's, b = -FoX's
        wrong, right = c[..., None] - c[..., None, :], cable.score(q, q, cable.keep(h), None)
        torch.testing.assert_close(wrong.tril(), fox.score(q, q, fox.keep(h), None).tril().expand_as(wrong))
    wrong, right = ((bias[0, 0, 5:, 5] - bias[0, 0, 5:, 0]).numpy() for bias in (wrong, right))  # for each later query
    assert np.ptp(wrong) < 1e-12 and np.ptp(right) > 0.1 * right.max() > 0


def test_errata_cables_code_divides_by_one():
    """source: code of CABLE, axiomlab/Cable of March 2025, `CausalSelfAttention`
    says: q and k are divided by sqrt(C / n_embd) each, where C is the width of the input
    in fact: C is n_embd, so that q.k is not divided at all. Here it is divided by sqrt(D), as in other attention: by 8
        at 12 heads in a width of 768
    """
    model, h = tiny("cable"), some_input()
    attention = model.blocks[0].attn
    attention.encoding.tokens.data[:] = 0  # no token adds anything: plain attention is left
    q, k, v = attention.project(h, model.tables(np.arange(T))[attention.encoding.settings])
    wrong, right = (attention.output((q @ k.mT / divisor + torch.full((T, T), -torch.inf).triu(1)).softmax(-1) @ v, h)
                    for divisor in (1, math.sqrt(8)))  # two heads in a width of 16
    torch.testing.assert_close(attend(model, h), right, rtol=1e-9, atol=1e-9)
    assert (wrong - right).abs().max() > 1e-2


def dape_v2(x, w1, b1, w2, b2):
    """What the code of DAPE's second version adds to scores and biases x (1, 2H, T, S)."""
    hidden = torch.nn.functional.leaky_relu(torch.nn.functional.conv2d(x.tril(), w1, b1, padding=(0, 1)))
    return torch.nn.functional.conv2d(hidden, w2, b2, padding=(0, 1))


def dape_v2_weights():
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((32, 4, 1, 3), (32,), (2, 32, 1, 3),
                                                                                  (2,))]


def test_errata_dape_v2_sees_whether_a_token_follows():
    """source: code of DAPE, chuanyang-Zheng/DAPE, `Kerple_DAPEV2`
    says: of two convolutions over keys, what the first one reads is masked, and nothing else
    in fact: no later key's score gets in, but the hidden column after the diagonal is not 0, so that the last token's
        own score changes when another token follows: it has to be masked, too
    """
    weights, x = dape_v2_weights(), torch.randn(1, 4, T + 1, T + 1, dtype=torch.float64)
    alone, followed = dape_v2(x[..., :T, :T], *weights)[..., -1, :], dape_v2(x, *weights)[..., T - 1, :T]
    torch.testing.assert_close(alone[..., :-1], followed[..., :-1])
    assert (alone - followed)[..., -1].abs().min() > 1e-3
    model, h = tiny("dape"), some_input()  # version 1, which is the one here, reads one key at a time
    torch.testing.assert_close(attend(model, h)[:, :-1], attend(model, h[:, :-1], range(T - 1)), rtol=1e-9, atol=1e-9)


def test_errata_dape_v2_with_a_cache_keeps_the_first_key_alone():
    """source: code of DAPE, chuanyang-Zheng/DAPE, `Kerple_DAPEV2`, with a cache
    says: torch.tril masks the scores of one new query as it masks those of all
    in fact: tril counts rows from 0, so that of one row it keeps the first key and sets all others to 0
    """
    weights, x = dape_v2_weights(), torch.randn(1, 4, T, T, dtype=torch.float64)
    last = x[..., -1:, :]
    assert last.tril()[..., 1:].abs().max() == 0 < last.tril()[..., 0].abs().min()
    assert (dape_v2(last, *weights) - dape_v2(x, *weights)[..., -1:, :]).abs().max() > 1
    model, tokens, cache = tiny("dape", make=Reader), some_tokens(1, T), Cache()
    with torch.no_grad():
        stepwise = torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)
        torch.testing.assert_close(stepwise, model(tokens), rtol=1e-9, atol=1e-9)


def test_errata_selective_rope_without_its_convolution_forgets_its_angles():
    """source: code of Selective RoPE, timurcarstensen/selective-rope, `skip_conv`
    says: with z_t - z_(t-1) in the place of the convolution, a cache needs no state of the running sum
    in fact: that holds only if neither gate nor bias is used, since the sum is then z_t. With either of them, as in its
        configs/copying, a text that is read in two parts gets other angles after the first part
    """
    z, gate = np.random.default_rng(0).standard_normal((2, T, 4))

    def angles(z, gate=1.0, bias=0.0):
        return (gate * (np.diff(z, axis=0, prepend=0) + bias)).cumsum(0)

    np.testing.assert_allclose(angles(z), z, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(angles(z[5:]), angles(z)[5:], rtol=1e-9, atol=1e-12)
    assert np.abs(angles(z[5:], gate[5:]) - angles(z, gate)[5:]).max() > 0.1
    assert np.abs(angles(z[5:], bias=0.3) - angles(z, bias=0.3)[5:]).min() > 0.1
    model, tokens, cache = tiny("selective_rope", make=Reader), some_tokens(1, T), Cache()
    with torch.no_grad():
        parts = torch.cat([model(part, cache=cache) for part in tokens.split(5, dim=1)], dim=1)
        torch.testing.assert_close(parts, model(tokens), rtol=1e-9, atol=1e-9)


def test_errata_edifice_subtracts_what_a_softmax_drops():
    """source: Edifice, `SSMax`
    says: SSMax is exp(x_i - s ln n) over its sum
    in fact: exp(s ln(n) x_i) over its sum: a softmax drops what is subtracted from all scores. And n is the number of
        keys that a query sees, not the length of the array
    """
    x, s = np.random.default_rng(0).standard_normal(12), 0.43

    np.testing.assert_allclose(softmax(x - s * math.log(12)), softmax(x), rtol=1e-12)  # nothing is changed
    encoding = tiny("nope+log").blocks[0].attn.encoding
    with torch.no_grad():
        encoding.temperature.fill_(s)
        padded = torch.from_numpy(np.append(x, [-np.inf] * 20)).expand(1, 2, 1, 32)
        ours = encoding.softmax(padded)[0, 0, 0].numpy()
    np.testing.assert_allclose(ours[:12], softmax(s * math.log(12) * x), rtol=1e-12)
    assert not ours[12:].any() and not np.allclose(ours[:12], softmax(s * math.log(32) * x))


def test_the_page_of_errata_is_made_of_these_docstrings():
    """docs/errata.md is what `python -m lab.errata` writes: run it after a change here."""
    from lab import errata

    assert errata.PAGE.read_text(encoding="utf-8") == errata.page()
