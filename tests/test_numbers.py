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
from studies.flat import WAYS

SEEDS = (1, 2, 3)
CITED = {                                # what no file of results/ has, and where it is from
    "README.md": ["3.11 or 3.12", "torch 2.13.0"],                        # versions
    "docs/evidence.md": [
        "2.949, 2.934 and 2.938",                                        # the command beside them
        "2.191 and 2.230",                                               # the same model on two processors
        "97.3 to 99.5%", "60.8 to\n92.6%", "94.1%", "89.4%",            # studies.coverage
        "t(2) = 4.30", "section 2.3", "gains 1.91",                      # Student's table; the paper
        "below 0.1", "differ by\n   0.04"]}                              # rounded up


def rows(name, protocol, length, split="val", place="mini"):
    """A row a seed, at so many times the trained length."""
    found = []
    for seed in SEEDS:
        file = f"{name}-s{seed}.{'test-' * (split == 'test')}{protocol}.json"
        kind = "nonoverlap" if protocol == "scaled" else protocol.removeprefix("held-").removeprefix("least-")
        [row] = [row for row in json.loads((ROOT / "results" / place / file).read_text())
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


def rise_of(protocol, name):
    """[mean, low, high] of the loss at 16x less that at 1x, on test, of a method at its best."""
    return gap(*[(name, protocol, n, "test", "far") for n in (16, 1)])


def of_seed_1(place, name, what):
    """{length: its row} of the one run that copies."""
    rows = json.loads((ROOT / f"results/{place}/{name}-s1.{what}.json").read_text())
    return {row["length"]: row for row in rows}


def copying_claims():
    """What evidence.md says of runs with four and ten times the tokens."""
    methods = {name: f"{variant}-tokens-x4" for name, variant in {
        "FoX": "fox-lr-x2", "ALiBi": "alibi-x8-lr-x2", "ExPE-K": "expe-on-k", "KERPLE": "kerple",
        "RoPE": "rope-base100", "ExPE": "expe-x16"}.items()}
    copies = {name: of_seed_1("far", variant, "copies") for name, variant in methods.items()}
    worth = {(name, n): f"{row['without'] - row['loss']:.2f}" for name in methods for n, row in copies[name].items()}
    assert all(float(worth[name, 2048]) == 0 for name in ("FoX", "ALiBi"))
    assert worth["ExPE-K", 2048] == worth["KERPLE", 2048]
    held = [f"{row['loss']:.3f}" for row in of_seed_1("far", methods["ExPE"], "test-held-spread").values()]
    spread = {name: [f"{row['loss']:.3f}" for row in of_seed_1("far", variant, "test-spread").values()]
              for name, variant in methods.items()}
    far = {name: of_seed_1("far", variant, "test-far-repeats") for name, variant in methods.items()}
    falls = {name: f"{far[name][128]['loss'] - far[name][2048]['loss']:.3f}" for name in methods}
    near = {name: "{:.3f}".format(np.subtract(*(far[name][n]["by_distance"]["1x to 2x"][0] for n in (128, 2048))))
            for name in methods}
    more = {n: f"{row['without'] - row['loss']:.2f}" for n, row in of_seed_1(
        "packages", "expe-on-k-tokens-x10", "copies").items()}
    tens = [f"{row['loss']:.3f}" for row in of_seed_1("packages", "expe-on-k-tokens-x10", "test-spread").values()]
    assert tens[2] == min(tens)
    flat = [json.loads((ROOT / f"results/{place}/flat.json").read_text()) for place in ("far", "packages")]
    slopes = [{(way, n): "{:.3f}".format(statistics.mean(
        row["loss"] for row in part if (row.get("way"), row.get("multiple")) == (way, n)))
        for way in WAYS for n in (1, 16)} for part in flat]
    small = [row["past"][1] for row in flat[0] if "past" in row and row["run"].endswith("s1")]
    assert len(small) == 16 and {row["protocol"] for row in flat[0] + flat[1] if "way" in row} == {"same-targets"}
    words = {4: "four"}[sum(share > 0.1 for share in small)]
    ten = of_seed_1("packages", "expe-on-k-tokens-x10", "test-least-spread")
    at = {(what, n): ("expe-on-k-tokens-x4", what, n, "test", "far") for what in ("spread", "least-spread")
          for n in (1, 16)}
    rose, fell = (gap(at[what, 16], at[what, 1]) for what in ("spread", "least-spread"))
    lower = gap(at["spread", 16], at["least-spread", 16])
    by_seed = [row["loss"] for row in rows("rope-base100-tokens-x4", "same-targets", 1, "test")]
    parameters = json.loads((ROOT / "results/packages/expe-on-k-tokens-x10-s1.run.json").read_text())
    tokens, train = parameters["tokens"], parameters["data"]["splits"]["train"]["tokens"]
    return [
        f"{tokens / 1e6:.2f}M tokens of the packages, {tokens / train:.2f} epochs",
        f"In windows of 64 a repetition is worth {worth['FoX', 64]} nats to FoX, {worth['ALiBi', 64]} to ALiBi, "
        f"{worth['ExPE-K', 64]} to ExPE-K, {worth['KERPLE', 64]} to KERPLE and {worth['RoPE', 64]} to RoPE",
        f"worth {', '.join(worth[name, 256] for name in ('FoX', 'ALiBi', 'ExPE-K', 'KERPLE'))} and "
        f"{worth['RoPE', 256]}. At 2,048 ExPE-K and KERPLE keep {worth['ExPE-K', 2048]}, and FoX and ALiBi nothing",
        f"falls by {falls['FoX']} with FoX, {falls['KERPLE']} with KERPLE, {falls['ExPE-K']} with ExPE-K and "
        f"{falls['ALiBi']} with ALiBi",
        f"falls by {near['FoX']}, {near['KERPLE']}, {near['ExPE-K']} and {near['ALiBi']}.",
        f"FoX falls from {spread['FoX'][0]} to {spread['FoX'][-1]} and ALiBi from {spread['ALiBi'][0]} to "
        f"{spread['ALiBi'][-1]}. KERPLE rises from {spread['KERPLE'][0]} to {spread['KERPLE'][-1]}, ExPE-K from "
        f"{spread['ExPE-K'][0]} to {spread['ExPE-K'][-1]}, ExPE with 16 times theta from {spread['ExPE'][0]} to "
        f"{spread['ExPE'][-1]} (with `hold` it falls to {held[-1]}), and RoPE from {spread['RoPE'][0]} to "
        f"{spread['RoPE'][-1]}",
        f"{more[128]} nats in windows of 128, {more[256]} in 256, {more[512]} in 512 and {more[2048]} in 2,048",
        f"falls from {tens[0]} at 1x to {tens[2]} at 4x, and rises to {tens[-1]} at 16x",
        *(f"{way} | {' | '.join(part[way, n] for part in slopes for n in (1, 16))} |"
          for way in ("as trained", "at least 0", "at least 1/L", "at least 2/L", "at least 4/L")),
        f"distances held at 2L | {' | '.join(part['held at 2L', n] for part in slopes for n in (1, 16))} |",
        f"is {interval(rose)} as trained, and {interval(fell)} with least slopes.",
        f"At 16x least slopes lower the loss by {interval(lower)}.",
        f"ten times the tokens it is {ten[128]['loss']:.3f} at 1x and {ten[2048]['loss']:.3f} at",
        f"{words} of the 16 heads", f"it lies {by_seed[0] - statistics.mean(by_seed[1:]):.2f} above seeds 2 and 3"]


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
    flat = ("expe-on-k", alibi, fox, "grape-lr-x1.7")
    changes = {name: rise_of("spread", name) for name in flat}
    assert max(abs(end) for change in changes.values() for end in change[1:]) < 0.01
    most = max(abs(change[0]) for name, change in changes.items() if name in flat[:3])
    grape = rise_of("far-repeats", "grape-lr-x1.7")
    pays = {name: rise_of("far-repeats", name)[0] for name in GRIDS["repeats"].evaluations}
    assert max(abs(pays[name]) for name in (*flat, kerple)) <= 0.01 < min(
        value for name, value in pays.items() if name not in (*flat, kerple))
    assert max(map(abs, ends)) < 0.025 and max(copying) <= 0.05 and PRESETS["mini"].model.context == 128
    held = [loss("expe-x16", kind, length, "test") for kind, length in (("held-same-targets", 16), (same, 1))]
    paper = [f"{rise(name, all_targets, 4):+.2f}" for name in ("expe", "exqpe", "rope", "sinusoidal")]
    return {
        "README.md": [
            f"from {loss('expe', same, 1):.3f} at the trained length to {loss('expe', same, 16):.3f} at 16 times",
            f"RoPE from {loss('rope', same, 1):.3f} to {loss('rope', same, 16):.3f}", f"change by at most {most:.3f}"],
        "docs/evidence.md": [
            *copying_claims(), f"{run['parameters'] / 1e6:.2f}M parameters", f"{train / 1e6:.2f}M training tokens",
            *(f"{n * tokens / 1e6:.2f}M tokens, which is {n * tokens / train:.2f} epochs" for n in (1, 4)),
            f"gains {min(copying):.3f} to {max(copying):.3f} nats", "at most 0.05 nats within",
            f"ExPE-K [rises by {gap((budget, same, 16, 'test'), (budget, same, 1, 'test'))[0]:.2f}](",
            f"by {interval(gap(('rope-base100', all_targets, 1, 'test'), ('expe-on-k', all_targets, 1, 'test')))}",
            *(f"by {interval(gap(('expe-on-k', all_targets, n, 'test'), (alibi, all_targets, n, 'test')))}"
              for n in (1, 16)),
            *(interval(gap((alibi, all_targets, n, "test"), (fox, all_targets, n, "test"))) for n in (1, 16)),
            f"ExPE-K rises by {interval(changes['expe-on-k'])}, and KERPLE by {interval(rise_of('spread', kerple))}",
            f"fall, by {interval(-np.array(grape)[[0, 2, 1]])}", "lies within 0.01 of 0",
            "within 0.025, on the same targets of val", "by at most 0.01",
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
    tables = re.compile(r"\| [^|]* \| \d+ \| (lr|no|max distance) \|"       # compared where they are made
                        r"|\| [^|]* \| `--pe|\| [^|]* \| \d+x \|")
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
