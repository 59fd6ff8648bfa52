"""ExPE-K read with slopes that have a least value, against the plain model with such a bias."""

import json
import math

import pytest
import torch
from conftest import command, refused
from test_ladder import T, tiny
from test_model import some_tokens

from longer.cache import Cache
from longer.reading import Reader
from longer.scaling import STEEP, NotForThisEncoding, scaled
from model_torch import GPT, Attention, project

EXACT = {"rtol": 1e-9, "atol": 1e-9}


class Steep(Attention):
    """Scores of keys that are all at position 0, less the larger of the slope and the least one times the distance."""

    least = STEEP / T

    def forward(self, h, at):
        q, k, v = self.heads(project(self.encoding.override(h, 0 * at.rows), self.qkv.weight))
        _, k1, _ = self.heads(project(self.encoding.override(h, 0 * at.rows + at.rows[1:2] - at.rows[:1]),
                                      self.qkv.weight))
        slope = (q @ (k1 - k).mT)[..., :1] / math.sqrt(q.shape[-1])                    # (B, H, T, 1)
        n = torch.arange(h.shape[1]).double()
        bias = -slope.clamp(min=self.least) * (n[:, None] - n)
        return self.proj(self.attend(q, k, v, bias, None).transpose(1, 2).flatten(2))


def models(**variant):
    """(a Reader of ExPE-K, the plain GPT, the plain GPT with least slopes) of the same weights."""
    reader = tiny("expe", variant={"on": "k", **variant}, make=Reader)
    plain, steep = GPT(reader.trained).double(), GPT(reader.trained, attention=Steep).double()
    for model in (plain, steep):
        model.load_state_dict(reader.state_dict())
    return reader.scale_to(4 * T, rope_scaling="least-slope"), plain, steep


@pytest.mark.parametrize("variant", [{}, {"l": 1, "start": 0.5, "theta": 0.3}])
@torch.no_grad()
def test_a_score_falls_by_the_least_slope_or_more(variant):
    reader, plain, steep = models(**variant)
    tokens = some_tokens(2, 4 * T)
    torch.testing.assert_close(reader(tokens), steep(tokens), **EXACT)
    assert (reader(tokens) - plain(tokens)).abs().max() > 1e-3
    for block in steep.blocks:
        block.attn.least = 3 / T
    reader.scale_to(4 * T, rope_scaling="least-slope", factor=3)
    torch.testing.assert_close(reader(tokens), steep(tokens), **EXACT)
    torch.testing.assert_close(reader.scale_to(4 * T)(tokens), plain(tokens), **EXACT)  # and no longer


@pytest.mark.parametrize("size", [1, 5, 2 * T])
@torch.no_grad()
def test_cached_logits_are_uncached_ones(size):
    reader, _, steep = models()
    tokens, cache = some_tokens(2, 3 * T), Cache()
    parts = [reader(tokens[:, i : i + size], cache=cache) for i in range(0, 3 * T, size)]
    torch.testing.assert_close(torch.cat(parts, dim=1), steep(tokens), **EXACT)


@pytest.mark.parametrize("pe, variant", [("expe", {}), ("expe", {"on": "k", "learn": "init"}), ("alibi", {}),
                                         ("rope", {}), ("exqpe", {"on": "k"})])  # fmt: skip
def test_it_is_for_slopes_that_queries_choose(pe, variant):
    with pytest.raises(NotForThisEncoding, match=f"least-slope is for expe --on k, .* {pe} as trained"):
        scaled(tiny(pe, variant=variant).config, 48, rope_scaling="least-slope")


def test_measure_and_generate_take_it(tokens, tmp_path):
    done = command("train.py", "--pe", "expe", "--on", "k", "--preset", "mini", "--context", "16", "--vocab", "300",
                   "--steps", "3", "--batch-size", "4", "--data", tokens, "--out", "k", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("lab.measure", "k", "--lengths", "16,64", "--rope-scaling", "none,least-slope", "--factor", "8",
                   "--json", "l.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = {(row["how"], row["length"]): row["loss"] for row in json.loads((tmp_path / "l.json").read_text())}
    assert {how for how, _ in losses} == {"", "least-slope 8.0"}
    assert losses["", 64] != losses["least-slope 8.0", 64]
    for more in [], ["--stream"]:
        done = command("generate.py", "k", "--prompt", "def ", "--tokens", "30", "--cache", *more, "--rope-scaling",
                       "least-slope", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for factor in "-1", "nan", "inf":
        line = refused(command("lab.measure", "k", "--rope-scaling", "least-slope", "--factor", factor, cwd=tmp_path))
        assert "--factor must be from 0 to 1e6 for least-slope" in line
    done = command("lab.measure", "k", "--lengths", "64", "--rope-scaling", "least-slope", "--json", "l.json",
                   cwd=tmp_path)
    assert [row["how"] for row in json.loads((tmp_path / "l.json").read_text())] == ["least-slope 1.0"]
