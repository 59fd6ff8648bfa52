"""Queries that stay at the last trained position, against the plain model with two overrides."""

import json

import pytest
import torch
from conftest import command
from test_ladder import T, tiny
from test_model import some_tokens

from longer.cache import Cache
from longer.reading import Reader
from longer.scaling import NotForThisEncoding, scaled
from model_torch import GPT, Attention, project

EXACT = {"rtol": 1e-10, "atol": 1e-10}
KINDS = pytest.mark.parametrize("pe, variant", [
    ("expe", {}), ("expe", {"l": 1, "start": 0.5, "theta": 0.3}), ("exqpe", {}), ("expe", {"learn": "init"}),
])  # fmt: skip


class Held(Attention):
    """W_q phi(h, min(m, T - 1)) and W_k phi(h, n), each by the door as it is; positions count from 0 here."""

    def forward(self, h, at):
        place = torch.arange(len(at.rows)).clamp(max=T - 1)
        of_queries, of_others = (self.encoding.override(h, rows) for rows in (at.rows[place], at.rows))
        parts = project((of_queries[0].clone(), *of_others[1:]), self.qkv.weight)
        q, k, v = self.heads(parts)
        return self.proj(self.attend(q, k, v, None, None).transpose(1, 2).flatten(2))


def models(pe, variant):
    """(a Reader that holds, the plain GPT, the plain GPT that holds) of the same weights."""
    reader = tiny(pe, variant=variant, make=Reader).scale_to(4 * T, rope_scaling="hold")
    plain, held = GPT(reader.trained).double(), GPT(reader.trained, attention=Held).double()
    for model in (plain, held):
        model.load_state_dict(reader.state_dict())
    return reader, plain, held


@KINDS
@torch.no_grad()
def test_queries_past_the_trained_length_stay_at_its_last_position(pe, variant):
    reader, plain, held = models(pe, variant)
    tokens = some_tokens(2, 4 * T)
    torch.testing.assert_close(reader(tokens), held(tokens), **EXACT)
    inside = (reader(tokens) - plain(tokens))[:, :T].abs().max()
    assert inside < 1e-10 < 1e-3 < (reader(tokens) - plain(tokens)).abs().max()
    torch.testing.assert_close(reader.scale_to(4 * T)(tokens), plain(tokens), **EXACT)  # and no longer


@KINDS
@pytest.mark.parametrize("size", [1, 5, 2 * T])
@torch.no_grad()
def test_cached_logits_are_uncached_ones(pe, variant, size):
    reader, _, held = models(pe, variant)
    tokens, cache = some_tokens(2, 3 * T), Cache()
    parts = [reader(tokens[:, i : i + size], cache=cache) for i in range(0, 3 * T, size)]
    torch.testing.assert_close(torch.cat(parts, dim=1), held(tokens), **EXACT)


@torch.no_grad()
def test_past_the_trained_length_distances_are_all_that_counts():
    reader, plain, _ = models("expe", {})
    tokens, n = some_tokens(1, T), torch.arange(T) + T
    torch.testing.assert_close(reader(tokens, positions=n + 1000), reader(tokens, positions=n), **EXACT)
    assert (plain(tokens, positions=n + 1000) - plain(tokens, positions=n)).abs().max() > 1e-3


@pytest.mark.parametrize("pe, variant", [("expe", {"on": "k"}), ("expe", {"on": "qkv"}), ("expe", {"once": True}),
                                         ("alibi", {}), ("rope", {})])  # fmt: skip
def test_it_is_for_queries_that_know_their_position(pe, variant):
    with pytest.raises(NotForThisEncoding, match=f"hold is for queries that know their position, .* {pe} as trained"):
        scaled(tiny(pe, variant=variant).config, 48, rope_scaling="hold")


def test_measure_names_it(workplace):
    done = command("lab.measure", "runs/expe", "--lengths", "16,64", "--rope-scaling", "none,hold", "--json", "h.json",
                   cwd=workplace)
    assert done.returncode == 0, done.stderr
    losses = {(row["how"], row["length"]): row["loss"] for row in json.loads((workplace / "h.json").read_text())}
    assert losses["hold", 16] == pytest.approx(losses["", 16], rel=1e-6) and losses["hold", 64] != losses["", 64]
