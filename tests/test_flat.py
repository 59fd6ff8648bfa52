"""studies/flat.py against the plain model: slopes, limits and shares worked out key by key."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused

from config import ModelConfig, make_encoding
from longer.reading import Reader
from model_torch import GPT, project
from studies import flat

TOKENS = torch.arange(48)[None] * 7 % 50


BENT = partial(Reader, attention=flat.Bent)


def model(cls=BENT):
    made = cls(ModelConfig(2, 32, 2, 16, 50, encoding=make_encoding("expe", l=24, on="k", start=1.0)))
    torch.manual_seed(0)
    made.load_state_dict({name: w + 0.3 * torch.randn_like(w) for name, w in made.state_dict().items()})
    return made.double().eval()


def plain_scores(plain, block, h):
    """(slope (H, T), content (H, T, T)) of a block's input h: the keys are moved, and the scores looked at."""
    attn, T = plain.blocks[block].attn, h.shape[1]

    def scores(n):
        rows = torch.as_tensor(plain.config.encoding.rows(n, plain.config)).double()
        q, k, _ = attn.heads(project(attn.encoding.override(h, rows), attn.qkv.weight))
        return (q @ k.mT)[0] / math.sqrt(q.shape[-1])                                  # (H, T, T)

    at_0, at_1 = scores(np.zeros(T, dtype=int)), scores(np.ones(T, dtype=int))
    return (at_1 - at_0)[..., 0], at_0


@torch.no_grad()
@pytest.mark.parametrize("way", flat.WAYS)
def test_each_way_of_reading_is_the_plain_models_with_slopes_and_distances_changed(way):
    bent, plain, least, furthest = model(), model(GPT), *flat.WAYS[way]
    flat.bend(bent, least, furthest)
    inputs = []
    for block in bent.blocks:
        block.attn.register_forward_hook(lambda attn, given, out: inputs.append((given[0], out)))
    found = bent(TOKENS)
    T = TOKENS.shape[1]
    m, n = np.indices((T, T))
    changed = 0
    for i, (h, out) in enumerate(inputs):
        slope, content = plain_scores(plain, i, h)
        used = slope.clamp(min=least / 16)
        distance = torch.as_tensor(np.minimum(m - n, furthest * 16)).double()
        p = (content - used[..., None] * distance).masked_fill(torch.as_tensor(n > m), -torch.inf).softmax(-1)
        attn = plain.blocks[i].attn
        _, _, v = attn.heads(project([h] * 3, attn.qkv.weight))
        y = attn.proj((p @ v).transpose(1, 2).flatten(2))
        assert torch.allclose(y, out, atol=1e-9)
        changed += int((slope < max(least / 16, 0)).sum())
    assert changed > 20
    same = torch.allclose(found, plain(TOKENS), atol=1e-9)
    assert same == (way == "as trained")


def test_as_trained_it_is_the_reader_in_fp32():
    bent, reader = model(), model(Reader)
    with torch.no_grad():
        assert torch.allclose(bent.float()(TOKENS), reader.float()(TOKENS), atol=1e-4)


def test_losses_are_lab_measures_and_shares_are_counted(tokens, tmp_path):
    flags = [*TINY[2:], "--l", "8", "--on", "k", "--data", tokens, "--steps", "3", "--batch-size", "4"]
    for seed in 1, 2:
        done = command("train.py", "--preset", "mini", "--pe", "expe", *flags, "--seed", seed, "--out", f"a-s{seed}",
                       cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for protocol in "same-targets", "spread":
        done = command("studies.flat", "a-s1", "a-s2", "--protocol", protocol, "--split", "test", "--json",
                       f"{protocol}.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / f"{protocol}.json").read_text())
        line = refused(command("studies.flat", "a-s1", "./a-s1/", cwd=tmp_path))
        assert "a-s1/ is named twice" in line
        rows, shares = ([row for row in found if ("way" in row) == of] for of in (True, False))
        command("lab.measure", "a-s1", "a-s2", "--protocol", protocol, "--split", "test", "--lengths", "16,32,64,256",
                "--json", f"m-{protocol}.json", cwd=tmp_path)
        measured = [row["loss"] for row in json.loads((tmp_path / f"m-{protocol}.json").read_text())
                    if row["protocol"] == protocol]
        assert [row["loss"] for row in rows if row["way"] == "as trained"] == pytest.approx(measured, abs=1e-5)
        assert len(rows) == 2 * len(flat.WAYS) * 4 and len(shares) == 2 * 4 * 4
        assert all(0 <= row[where][0] <= row[where][1] <= 1 for row in shares for where in ("within", "past"))
        assert all(row["n_targets"] == rows[0]["n_targets"] for row in rows)


@torch.no_grad()
def test_the_shares_of_small_slopes_are_those_of_the_plain_models_scores():
    bent, plain = model(), model(GPT)
    flat.bend(bent, *flat.WAYS["as trained"])
    inputs = []
    for block in bent.blocks:
        block.attn.counts = torch.zeros(TOKENS.shape[1], 2, 3)
        block.attn.register_forward_hook(lambda attn, given, out: inputs.append(given[0]))
    bent(TOKENS)
    for i, (h, block) in enumerate(zip(inputs, bent.blocks, strict=True)):
        slope, _ = plain_scores(plain, i, h)
        expected = [(slope < 0).T, (slope < 2 / 16).T, torch.ones_like(slope).T]
        assert torch.equal(block.attn.counts, torch.stack(expected, -1).float()) and 0 < expected[0].sum() < 96


def test_runs_without_such_slopes_are_named(workplace, tokens, tmp_path):
    assert "runs/rope must have expe on keys only" in refused(command("studies.flat", "runs/rope", cwd=workplace))
    assert "runs/expe must have expe on keys only" in refused(command("studies.flat", "runs/expe", cwd=workplace))
    assert "--max-docs" in refused(command("studies.flat", "runs/expe", "--max-docs", "0", cwd=workplace))
