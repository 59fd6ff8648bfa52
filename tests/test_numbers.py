"""Every number with a decimal point in README.md and docs/evidence.md is computed from results/, or cited here."""

import json
import re
import statistics

import numpy as np
import pytest
from conftest import ROOT

from config import PRESETS
from lab.grids import GRIDS
from lab.measures import interval_of_seeds

SEEDS = (1, 2, 3)
CITED = {                                # what no file of results/ has, and where it is from
    "README.md": ["3.11 or 3.12", "torch 2.13.0"],                        # versions
    "docs/evidence.md": [
        "2.949, 2.934 and 2.938",                                        # the command beside them
        "97.3 to 99.5%", "60.8 to\n92.6%", "94.1%", "89.4%",            # studies.coverage
        "t(2) = 4.30", "section 2.3", "gains 1.91", "below 0.05"]}                     # Student's table; the paper


def rows(name, protocol, length, split="val"):
    """A row a seed, at so many times the trained length."""
    found = []
    for seed in SEEDS:
        file = f"{name}-s{seed}.{'test-' * (split == 'test')}{protocol}.json"
        kind = "nonoverlap" if protocol == "scaled" else protocol.removeprefix("held-")
        [row] = [row for row in json.loads((ROOT / "results/mini" / file).read_text())
                 if row["protocol"] == kind and row["length"] == 128 * length]
        found.append(row)
    return found


def loss(*what):
    return statistics.mean(row["loss"] for row in rows(*what))


def gap(a, b):
    """[mean, low, high] of the losses of a less those of b."""
    a, b = rows(*a), rows(*b)
    differences = [[x - y for x, y in zip(one["unit_losses"], other["unit_losses"], strict=True)]
                   for one, other in zip(a, b, strict=True)]
    return interval_of_seeds(differences, a[0]["unit_targets"])


def interval(values):
    """"0.029 (0.004 to 0.054)" of [mean, low, high]."""
    mean, low, high = values
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def gain(name, probe, length):
    return statistics.mean(
        np.average(np.subtract(row["unit_losses_without"], row["unit_losses"]), weights=row["unit_targets"])
        for row in rows(name, probe, length))


def rise(name, protocol, length):
    return loss(name, protocol, length) - loss(name, protocol, 1)


def claims():
    """{page: the texts that it must have}, computed."""
    same, all_targets = "same-targets", "nonoverlap"
    run = json.loads((ROOT / "results/mini/expe-s1.run.json").read_text())
    tokens, train = run["tokens"], run["data"]["splits"]["train"]["tokens"]
    budget, alibi, fox, kerple = "expe-on-k-tokens-x4", "alibi-x8-lr-x2", "fox-lr-x2", "kerple-lr-x1.7"
    longer = "alibi-x4-lr-x2-tokens-x4"
    copying = [gain(name, "repeat", 1) for name in GRIDS["table2"].evaluations]
    scaled = [loss("expe", "scaled", length) - loss("expe", all_targets, length) for length in (1, 16)]
    ends = [end for name in ("expe-on-k", "alibi", "fox", "grape")
            for end in gap((name, same, 16), (name, same, 1))[1:]]
    ends += [end for name in ("expe-on-k", alibi, fox, "grape-lr-x1.7")
             for end in gap((name, same, 16, "test"), (name, same, 1, "test"))[1:]]
    assert max(map(abs, ends)) < 0.025 and max(copying) <= 0.05 and PRESETS["mini"].model.context == 128
    held = [loss("expe-x16", kind, length, "test") for kind, length in (("held-same-targets", 16), (same, 1))]
    paper = [f"{rise(name, all_targets, 4):+.2f}" for name in ("expe", "exqpe", "rope", "sinusoidal")]
    return {
        "README.md": [
            f"from {loss('expe', same, 1):.3f} at the trained length to {loss('expe', same, 16):.3f} at 16 times",
            f"RoPE from {loss('rope', same, 1):.3f} to {loss('rope', same, 16):.3f}"],
        "docs/evidence.md": [
            f"{run['parameters'] / 1e6:.2f}M parameters", f"{train / 1e6:.2f}M training tokens",
            *(f"{n * tokens / 1e6:.2f}M tokens, which is {n * tokens / train:.2f} epochs" for n in (1, 4)),
            f"gains {min(copying):.3f} to {max(copying):.3f} nats", "at most 0.05 nats within",
            f"ExPE-K [rises by {gap((budget, same, 16, 'test'), (budget, same, 1, 'test'))[0]:.2f}](",
            f"by {interval(gap(('rope-base100', all_targets, 1, 'test'), ('expe-on-k', all_targets, 1, 'test')))}",
            *(f"by {interval(gap(('expe-on-k', all_targets, n, 'test'), (alibi, all_targets, n, 'test')))}"
              for n in (1, 16)),
            *(interval(gap((alibi, all_targets, n, "test"), (fox, all_targets, n, "test"))) for n in (1, 16)),
            f"KERPLE rises by {interval(gap((kerple, same, 16, 'test'), (kerple, same, 1, 'test')))}",
            "lies within 0.025 of 0",
            f"ExPE rises by {rise('expe', same, 16):.2f} and RoPE by {rise('rope', same, 16):.2f} on",
            f"flat to 4x ({paper[0]})",
            f"by {interval(gap(('expe-on-k-x1', same, 1), ('expe-on-k', same, 1)))} on val",
            f"flat: {held[0]:.3f} at 1x and at 16x" if f"{held[0]:.3f}" == f"{held[1]:.3f}" else "not flat",
            f"rises by {interval(gap((budget, same, 16, 'test'), (budget, same, 1, 'test')))}",
            f"lies {interval(gap((budget, same, 1, 'test'), (longer, same, 1, 'test')))} above ALiBi",
            ", ".join(paper), f"ExPE rises by {rise('expe', same, 4):.2f} |",
            f"{scaled[0]:.2f} lost, {-scaled[1]:.2f} gained",
            interval(gap(("expe-constant", same, 1), ("expe", same, 1))),
            f"costs RoPE {gain('rope', 'swap', 16):.3f}, T5 {gain('t5', 'swap', 16):.3f} and NoPE "
            f"{gain('nope', 'swap', 16):.3f}"]}


@pytest.mark.parametrize("page", ["README.md", "docs/evidence.md"])
def test_every_number_is_computed_or_has_a_source(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    tables = re.compile(r"\| (test|val) \||\| [^|]* \| `--pe|\| [^|]* \| \d+x \|")   # compared where they are made
    text = "\n".join(line for line in lines if not tables.match(line))
    squeezed = " ".join(text.split())
    known = [" ".join(claim.split()) for claim in claims()[page]]
    missing = [claim for claim in known if claim not in squeezed]
    assert not missing, missing
    rest = squeezed
    for claim in sorted([*known, *(" ".join(words.split()) for words in CITED[page])], key=len, reverse=True):
        rest = rest.replace(claim, " ")
    rest = re.sub(r"```.*?```", " ", rest)                               # commands, and the table that they print
    rest = re.sub(r"\]\([^)]*\)", " ", rest)                            # addresses
    numbers = re.findall(r"(?<![\w.])[-+]?\d+\.\d+(?![\w.]*\d)", rest)
    assert not numbers, numbers
