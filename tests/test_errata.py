"""Where the paper, and what is written about its rivals, is wrong: the rule as it stands there, and the right one.

Each test writes the wrong rule anew from its description, shows the value it gives, and then what the project does.
The sources: the ExPE paper's preprint and its later version; a survey of positional encodings; a tutorial with code.
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import command
from test_model import T, tiny

from config import PRESETS, EncodingConfig, ModelConfig
from expe import alibi_slopes, count_floats, distances, expe_table, rope_inv_freq, t5_bucket


@pytest.mark.parametrize("dtype, claim, true", [("fp16", 33e6, 15_361), ("tf32", 1e6, 130_049)])
def test_errata_paper_2_3_numbers_in_0_to_1(dtype, claim, true):
    patterns = {"fp16": np.arange(2**16, dtype=np.uint16).view(np.float16)}.get(dtype)
    if patterns is None:  # TF32: float32 with the last 13 bits of the fraction empty
        patterns = (np.arange(2**19, dtype=np.uint32) << 13).view(np.float32)
    with np.errstate(invalid="ignore"):
        seen = int(((patterns >= 0) & (patterns <= 1) & ~np.signbit(patterns)).sum())
    assert count_floats(dtype) == seen == true and claim / true > 7
    assert count_floats("fp16") < count_floats("bf16")  # the paper has it the other way round


def test_errata_paper_2_1_theta_is_one_over_four_contexts():
    context = 512
    wrong, right = 1 / (2 * context), ModelConfig(6, 384, 12, context, 32000, encoding=EncodingConfig("expe")).encoding
    assert expe_table(context, 1, theta=wrong)[0] == 0.5  # twice the range 0 .. 0.25 that the paper describes
    assert expe_table(context, 1, theta=right.theta)[0] == 0.25 and right.theta == 1 / 2048  # and its table 9


def test_errata_paper_equation_2_keys_have_a_matrix_of_their_own():
    """k_n = f_q(phi(x, n)) would make scores symmetric: what m asks of n is what n asks of m."""
    model = tiny("expe")
    h = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phi = torch.cat((model.places(np.arange(T)).table, h[0, :, 5:]), dim=-1)
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

    ours = model.blocks[0].attn(h, model.encoding, model.places(np.arange(T)))[0]
    assert torch.allclose(ours, attended(w_k)) and not torch.allclose(ours, attended(w_q))


def test_errata_paper_data_of_the_large_models_is_10_billion_tokens():
    """One version gives the large models the small corpus's split, 600M + 2 x 50M: table 8's budget is 16 of those."""
    for preset in ("llama-135m", "llama-342m"):
        model, train = PRESETS[preset]
        seen = train.steps * train.batch_size * model.context
        assert seen == pytest.approx(10e9, rel=1e-3) and seen / 600e6 > 16
        assert train.max_tokens == 9.8e9 + 2 * 100e6


def test_errata_paper_tables_2_and_7_one_model_has_one_loss(workplace, tmp_path):
    """ExPE at 4x is 3.88 in one table and 4.26 in the other. Scored by one protocol, a model gives one number."""
    losses = []
    for name in ("once.json", "again.json"):
        done = command("eval.py", "runs/expe", "--lengths", "16,64", "--json", tmp_path / name, cwd=workplace)
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in json.loads((tmp_path / name).read_text())])
    assert losses[0] == losses[1] and abs(losses[0][1] - losses[0][0]) < 4.26 - 3.88


def test_errata_survey_t5_buckets_need_the_log_of_the_largest_distance():
    def wrong(d, buckets=32):
        return d if d < buckets // 2 else buckets // 2 + math.floor(math.log(d / (buckets // 2))) * (buckets // 2)

    assert wrong(127) == 48  # of 32 buckets
    assert t5_bucket(127) == 31 and t5_bucket(np.arange(10_000)).max() == 31


def test_errata_survey_alibi_slopes_are_powers_of_8_over_the_head_count():
    def wrong(n_heads):
        return np.array([2 ** (-h / 2 ** (-math.log2(n_heads) + 3)) for h in range(1, n_heads + 1)])

    np.testing.assert_allclose(wrong(8), alibi_slopes(8))
    for n_heads in (4, 16, 32):
        np.testing.assert_allclose(alibi_slopes(n_heads), 2.0 ** (-8 * np.arange(1, n_heads + 1) / n_heads))
        assert not np.allclose(wrong(n_heads), alibi_slopes(n_heads))
    assert wrong(12)[-1] == pytest.approx(2.0**-18) and alibi_slopes(12).min() == 2.0**-8


def test_errata_tutorial_rope_mixes_two_layouts():
    """Cosines of cat((f, f)), of which every second is taken for the pairs (x_2i, x_2i+1)."""
    freq, _ = rope_inv_freq(16)
    used = np.concatenate((freq, freq))[::2]  # by the pairs 0 .. 7
    assert used.tolist() == [*freq[::2], *freq[::2]]  # each second frequency twice, the others never
    assert len(set(used)) == 4 and len(set(freq)) == 8
    model = tiny("rope", n_heads=1)  # one head of 16: the pair (i, i + 8) turns by freq_i, and by no other
    q = torch.eye(16, dtype=torch.float64)[None, None, :8]  # eight queries, the i-th along dimension i
    turned = model.encoding.rotate(q, model.places(np.ones(8, int)).table)
    angles = [math.atan2(turned[0, 0, i, i + 8], turned[0, 0, i, i]) for i in range(8)]
    np.testing.assert_allclose(angles, freq, rtol=1e-12)


def test_errata_tutorial_alibi_at_32k_is_69_gb_and_need_not_be_stored():
    assert 32 * 32768 * 32768 * 2 == pytest.approx(68.7e9, rel=1e-3)  # bytes; the tutorial says about 128 GB
    n, slope = np.arange(50), 0.25
    future = np.triu(np.full((50, 50), -np.inf), 1)
    scores = np.random.default_rng(0).standard_normal((50, 50)) + future

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    stored, a_number_a_key = softmax(scores - slope * distances(n)), softmax(scores + slope * n)
    np.testing.assert_allclose(stored, a_number_a_key, rtol=1e-12)


def test_errata_explainer_five_radians_is_less_than_a_revolution():
    assert 5 / (2 * math.pi) == pytest.approx(0.796, abs=1e-3)  # the explainer: nearly a revolution and a half
