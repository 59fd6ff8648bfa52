"""studies/slopes.py against the plain model: a key is moved, and its scores are looked at."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused

from expe import alibi_slopes
from lab import attention
from model_torch import GPT, project
from studies import slopes

RUNS = {"qk": ["--pe", "expe"], "k": ["--pe", "expe", "--on", "k", "--start", "0.3"], "alibi": ["--pe", "alibi"],
        "learn": ["--pe", "expe", "--learn", "init"], "once": ["--pe", "expe", "--once"],
        "bare": ["--pe", "expe", "--nope-every", "2"]}  # fmt: skip


@pytest.fixture(scope="module")
def place(tokens, tmp_path_factory):
    """A folder with a tiny run of each of RUNS."""
    folder = tmp_path_factory.mktemp("slopes")
    for name, flags in RUNS.items():
        done = command("train.py", *flags, *TINY, "--steps", "8", "--data", tokens, "--out", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def of_run(run, cls=slopes.TiltedAttention):
    """A watched model in float64 with weights large enough to tilt, and the plain one with the same weights."""
    model, _ = attention.load_watched(run, attention=cls)
    plain = GPT(model.config).double()
    torch.manual_seed(0)
    weights = {name: w.double() + 0.1 * torch.randn_like(w, dtype=torch.float64)
               for name, w in model.state_dict().items()}  # fmt: skip
    for other in (model.double(), plain):
        other.load_state_dict(weights)
    return model, plain


@torch.no_grad()
def scores(plain, block, h, n):
    """q_m . k_n / sqrt(D) and what the encoding adds, (H, T, T), of a block's input h at positions n, by its doors."""
    attn = plain.blocks[block].attn
    at = plain.tables(n)[attn.encoding.settings]
    q, k, _ = attn.heads(project(attn.encoding.override(h, at.rows), attn.qkv.weight))
    q, k = attn.encoding.rotate(q, k, at.rows)
    bias = attn.encoding.score(q, k, h, at.pairs)
    return ((q @ k.mT) / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)).squeeze(0)


@pytest.mark.parametrize("name", ["qk", "k", "alibi", "learn", "bare"])
def test_a_slope_is_what_the_scores_of_a_key_gain_where_it_is_moved_by_one(place, name):
    model, plain = of_run(place / name)
    tokens, seen, T = torch.arange(40) * 7 % 300, [], 40
    found = slopes.slopes_of(model, tokens)[:, :, 0]  # (n_layers, H, T)
    for block in plain.blocks:
        block.attn.register_forward_pre_hook(lambda attn, given: seen.append(given[0]))
    plain(tokens[None])
    assert np.abs(found[0]).max() > 1e-3
    for block, h in enumerate(seen):
        for key, by in ((0, 1), (20, 1), (39, -5)):
            n = np.arange(T)
            before = scores(plain, block, h, n)
            n[key] += by
            gained = (scores(plain, block, h, n) - before)[:, :, key].numpy() / by
            others = np.arange(T) != key  # that query is moved too
            np.testing.assert_allclose(found[block][:, others], gained[:, others], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["qk", "alibi"])
def test_the_reach_is_the_mean_distance_under_the_weights(place, name):
    model, _ = of_run(place / name)
    tokens = torch.arange(24) * 5 % 300
    reach = slopes.slopes_of(model, tokens)[:, :, 1]
    watched, _ = of_run(place / name, attention.WatchedAttention)
    weights = attention.weights_of(watched, tokens[None])[:, 0].numpy()
    for at in np.ndindex(reach.shape):
        right = sum(weights[at][n] * (at[2] - n) for n in range(at[2] + 1))
        assert reach[at] == pytest.approx(right, rel=1e-4, abs=1e-4)


def test_without_queries_nothing_is_tilted_and_all_keys_weigh_the_same(place):
    model, _ = of_run(place / "k")
    for block in model.blocks:
        block.attn.qkv.weight.data[:128] = 0
    found = slopes.slopes_of(model, torch.arange(30))
    assert not found[:, :, 0].any()
    np.testing.assert_allclose(found[:, :, 1], np.broadcast_to(np.arange(30) / 2, (4, 4, 30)), atol=1e-5)


def test_the_file_has_the_means_of_each_head_by_position_and_a_picture_is_made(place):
    done = command("studies.slopes", "qk", "alibi", "--out", "s.png", "--json", "s.json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "s.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((place / "s.json").read_text())
    assert [(row["run"], row["block"], row["head"]) for row in rows] == [
        (run, block, head) for run in ("qk", "alibi") for block in range(4) for head in range(4)]
    for row in rows:
        assert len(row["by_position"]) == row["length"] == 4 * row["trained_length"] == 64  # so each part is a position
        for part, at in (("inside", slice(16)), ("end", slice(48, 64))):
            for name in ("slope", "reach"):
                mean = np.mean([x[name] for x in row["by_position"][at]])
                assert row[part][name] == pytest.approx(mean, rel=1e-4, abs=1e-7)
            assert row[part]["low"] <= row[part]["slope"] <= row[part]["high"]
            if row["pe"] == "alibi":
                fixed = [row[part][name] for name in ("slope", "low", "high")]
                assert fixed == pytest.approx([alibi_slopes(4)[row["head"]]] * 3, rel=1e-5)


def test_a_run_whose_encoding_has_no_slopes_is_named(place):
    line = refused(command("studies.slopes", "once", "--out", "a.png", cwd=place))
    assert "once has no slopes: its encoding must be expe, without --once, or alibi" in line
