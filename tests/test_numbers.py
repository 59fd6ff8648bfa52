"""Every number with a decimal point on three pages is computed from results/, or cited here."""

import itertools
import json
import re
import statistics

import numpy as np
import pytest
from conftest import ROOT

from config import PRESETS
from lab import pictures, verdict
from lab.grids import GRIDS, KNOBS, METHODS, NEWER, NEWER_KNOBS, NEWER_TOKENS, RETUNED
from lab.measures import interval_of_seeds, intervals
from studies import task_grid, tuning
from studies.flat import WAYS

SEEDS = {"packages": (1, 2), "small-packages": (1, 2), "small-books": (1,)}        # of a place, else 1 to 3
CITED = {                                # what no file of results/ has, and where it is from
    "README.md": ["3.11 or 3.12", "torch 2.13.0"],                        # versions
    "docs/evidence.md": [
        "2.949, 2.934 and 2.938",                                        # the command beside them
        "2.191 and 2.230",                                               # the same model on two processors
        "97.3 to 99.5%", "60.8 to\n92.6%", "94.1%", "89.4%",            # studies.coverage
        "t(2) = 4.30", "section 2.3", "gains 1.91",                      # Student's table; the paper
        "torch 2.11; the CPUs had 2.13",                                 # run.json of results/gpu and results/far
        "differ by\n   0.04"]}                                           # rounded up


def rows(name, protocol, length, split="val", place="mini"):
    """A row a seed, at so many times the trained length."""
    found = []
    for seed in SEEDS.get(place, (1, 2, 3)):
        what = protocol.replace("sliding", "same-targets")             # it stands in the file of these
        what = "small-" * (protocol == "copies" and place.startswith("small-")) + what
        file = f"{name}-s{seed}.{'test-' * (split == 'test')}{what}.json"
        kind = {"scaled": "nonoverlap", "copies": "repeat"}.get(protocol) or re.sub("^(held|least)-", "", protocol)
        [row] = [row for row in json.loads((ROOT / "results" / place / file).read_text())
                 if row["protocol"] == kind and row["length"] == length * row["trained_length"]]
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


def signed(values):
    """"+0.029 (+0.004, +0.054)" of [mean, low, high]."""
    mean, low, high = values
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f})"


def gain(name, probe, *where):
    return statistics.mean(np.average(gains_of(row), weights=row["unit_targets"]) for row in rows(name, probe, *where))


def gap_of_probe(name, probe, length, place="far"):
    """[mean, low, high] of what the far context is worth by a probe, on val."""
    far = rows(name, probe, length, "val", place)
    return interval_of_seeds([gains_of(row) for row in far], far[0]["unit_targets"])


def cost_of_bf16(name, length):
    """By how much the mean loss on the same targets rises if a model is read in bf16."""
    losses = [row["loss"] for seed in (1, 2, 3) for row in json.loads(
        (ROOT / f"results/mini/{name}-s{seed}.precision-same-targets.json").read_text())
        if (row["protocol"], row["dtype"], row["length"]) == ("same-targets", "bf16", 128 * length)]
    return statistics.mean(losses) - loss(name, "same-targets", length)


def rise(name, protocol, length):
    return loss(name, protocol, length) - loss(name, protocol, 1)


def lower(one, other, n):
    """By how much the first has a lower loss on test, with its interval."""
    return interval(gap(*((name, "spread", n, "test", "far") for name in (other, one))))


def rise_of(protocol, name):
    """[mean, low, high] of the loss at 16x less that at 1x, on test, of a method at its best."""
    return gap(*[(name, protocol, n, "test", "far") for n in (16, 1)])


def of_seed_1(place, name, what):
    """{length: its row} of the run with seed 1, read with positions as they were trained."""
    rows = json.loads((ROOT / f"results/{place}/{name}-s1.{what}.json").read_text())
    return {row["length"]: row for row in rows}


COPYING = {                              # the page's names: the variant, and how it is read
    "FoX, rate x2": ("fox-lr-x2-tokens-x4", "spread"),
    "ALiBi, x8, rate x2": ("alibi-x8-lr-x2-tokens-x4", "spread"),
    "ExPE-K, x64, rate x2": ("expe-on-k-x64-lr-x2-tokens-x4", "spread"),
    "ExPE-K, x64, rate x2, least slopes": ("expe-on-k-x64-lr-x2-tokens-x4", "least-spread"),
    "KERPLE, rate x2": ("kerple-lr-x2-tokens-x4", "spread"),
    "ExPE, x4, rate x3": ("expe-x4-lr-x3-tokens-x4", "spread"),
    "ExPE, x4, rate x3, hold": ("expe-x4-lr-x3-tokens-x4", "held-spread"),
    "RoPE, rate x2": ("rope-lr-x2-tokens-x4", "spread")}


LONG = {                                 # the same with ten times the tokens, two seeds
    name: (variant.replace("-tokens-x4", "-tokens-x10"), way) for name, (variant, way) in COPYING.items()
    if not name.startswith("ExPE,")} | {
    "ExPE-K, x256": ("expe-on-k-tokens-x10", "spread"),
    "ExPE-K, x256, least slopes": ("expe-on-k-tokens-x10", "least-spread")}


SMALL = {                                # the same of the larger model
    name: (re.sub("x([23])-tokens-x4", lambda rate: f"{PRESETS['small'].train.lr * int(rate[1]):g}", variant), way)
    for name, (variant, way) in COPYING.items() if not name.startswith("ExPE-K")} | {
    "ExPE-K, x256": ("expe-on-k", "spread"),
    "ExPE-K, x256, least slopes": ("expe-on-k", "least-spread")}


def changes(name, protocol, place="packages"):
    """The loss at 16x less that at 1x, a number a seed."""
    pairs = zip(*(rows(name, protocol, n, "test", place) for n in (16, 1)), strict=True)
    return [far["loss"] - near["loss"] for far, near in pairs]


def gains_of(row):
    """What the far context is worth by a probe, a number a document or trial."""
    return np.subtract(row["unit_losses_without"], row["unit_losses"])


def gains(name, probe, n, place="packages"):
    """What the far context is worth by a probe on val, a number a seed."""
    return [row["without"] - row["loss"] for row in rows(name, probe, n, "val", place)]


def rows_by_length(methods, place):
    """A table with ten times the tokens, or ten a parameter."""
    for name, (variant, way) in methods.items():
        cells = [name, *(f"{loss(variant, way, n, 'test', place):.3f}" for n in (1, 2, 4, 16)),
                 ", ".join(f"{x:+.3f}" for x in changes(variant, way, place))]
        if way == "spread":
            cells.append(", ".join(f"{x:+.3f}" for x in changes(variant, "far-repeats", place)))
            nats = (statistics.mean(gains(variant, "copies", n, place)) for n in (0.5, 1, 2, 4, 16))
            cells += [f"{round(x, 2) + 0:.2f}" for x in nats]
        yield f"| {' | '.join(cells + [''] * (12 - len(cells)))} |"


def falls(name, distance):
    """By how much the loss on repetitions from so far back falls from 1x to 16x, a number a seed."""
    pairs = zip(*(rows(name, "far-repeats", n, "test", "packages") for n in (1, 16)), strict=True)
    return [near["by_distance"][distance][0] - far["by_distance"][distance][0] for near, far in pairs]


def growth(name, tokens):
    """The loss at 16x less that at 1x on the packages, seed 1, with so many times `mini`'s tokens."""
    losses = of_seed_1("packages", name.replace("-tokens-x10", {1: "", 4: "-tokens-x4"}[tokens]), "test-spread")
    return losses[2048]["loss"] - losses[128]["loss"]


def by_seed(values, form=".3f"):
    """"0.157 and 0.199" of a number a seed."""
    return " and ".join(f"{x:{form}}" for x in values)


def long_claims():
    """What more-tokens.md says of ten times the tokens."""
    fox, alibi, ours, kerple, rope, default = (name for name, way in LONG.values() if way == "spread")
    names = (fox, alibi, ours, kerple, rope, default)
    at = {(name, way, n): [row["loss"] for row in rows(name, way, n, "test", "packages")]
          for name, way in LONG.values() for n in (1, 2, 4, 8, 16)}
    mean = {key: statistics.mean(losses) for key, losses in at.items()}
    copied = {(name, n): gains(name, "copies", n / 128) for name in names for n in (64, 128, 256, 512, 2048)}
    late = {name: [far - near for near, far in zip(at[name, "spread", 4], at[name, "spread", 16], strict=True)]
            for name in (ours, default)}
    for i in (0, 1):                                                     # what holds with each seed
        rise = {key: changes(*key)[i] for key in LONG.values()}
        assert [*sorted(rise, key=rise.get)[:2]] == [(kerple, "spread"), (fox, "spread")]
        assert {way for _, way in sorted(rise, key=rise.get)[2:4]} == {"least-spread"}
        assert all(rise[name, "least-spread"] < -0.04 for name in (ours, default))
        assert all(max(names, key=lambda name: copied[name, n][i]) == kerple for n in (128, 256, 512))
        assert all(max(names, key=lambda name: falls(name, far)[i]) == kerple
                   for far in ("1x to 2x", "2x to 4x", "4x to 8x", "8x to 16x"))
        assert all(changes(name, "far-repeats")[i] < 0 for name in names if name != rope)
        assert min(late[ours][i], late[default][i]) > 0.01
        assert all(at[name, "least-spread", 16][i] < at[name, "least-spread", 4][i] for name in (ours, default))
        assert all(at[default, way, n][i] < at[ours, way, n][i] for way in ("spread", "least-spread") for n in (1, 16))
        assert all(copied[default, n][i] < copied[ours, n][i] for n in (256, 512))
        assert max(copied[fox, 2048][i], copied[alibi, 2048][i]) < 0.005
    clear = {(name, what) for name, what in (*LONG.values(), *((name, "far-repeats") for name in names))
             if gap(*((name, what, n, "test", "packages") for n in (16, 1)))[2] < 0}
    assert clear == {*((name, "far-repeats") for name in (kerple, fox, alibi, ours)), (kerple, "spread"),
                     (ours, "least-spread")}
    best = (kerple, "spread"), (fox, "spread"), (ours, "least-spread"), (default, "least-spread")
    change = {key: np.array([[row["unit_losses"] for row in rows(*key, n, "test", "packages")] for n in (16, 1)])
              for key in best}                                           # (2, seeds, documents)
    targets = rows(*best[0], 1, "test", "packages")[0]["unit_targets"]
    apart = {pair: interval_of_seeds(change[pair[0]][0] - change[pair[0]][1] - change[pair[1]][0] + change[pair[1]][1],
                                     targets) for pair in itertools.combinations(best, 2)}
    assert all(low < 0 < high for _, low, high in apart.values()), apart
    swaps = {name: gap_of_probe(name, "swap", 16, "packages") for name in names}
    assert {name for name, (_, low, _) in swaps.items() if low > 0} == {kerple, fox, default}
    defaults = [gap(*((name, "spread", n, "test", "packages") for name in (ours, default))) for n in (1, 16)]
    assert all(low < 0 < high for _, low, high in defaults)
    assert [one < other for one, other in zip(at[kerple, "spread", 16], at[fox, "spread", 16], strict=True)
            ] == [False, True]                                           # KERPLE's and FoX's order differs by seed
    first, last = ({name: mean[name, "spread", n] for name in names} for n in (1, 16))
    assert min(first, key=first.get) == fox and sorted(names, key=last.get)[:2] == [kerple, fox]
    between = max(max(at[name, "spread", 1]) - min(at[name, "spread", 1]) for name in names)
    most = [by_seed(copied[name, 2048], ".2f") for name in (ours, default, kerple)]
    few = {name: growth(name, 1) for name in names[:5]}
    more = {name: growth(name, 4) for name in (fox, alibi, kerple)}
    assert max(map(abs, (few[fox], few[alibi], few[ours]))) < 0.002 < few[kerple]
    assert min(few, key=few.get) == fox and sorted(few, key=few.get)[-2:] == [kerple, rope]
    assert min(more[kerple] - now for now in changes(kerple, "spread")) > 0.05
    [scored], [repeated] = ({sum(row["unit_targets"]) for row in rows(fox, what, 16, "test", "packages")}
                            for what in ("spread", "far-repeats"))
    return [
        f"({scored:,}, and {repeated} far repetitions)",
        f"the seeds of ExPE-K x64 have {most[0]}, those of x256 {most[1]}, and KERPLE's {most[2]}",
        f"lies between {few[fox]:+.3f} (FoX) and {few[kerple]:+.3f} (KERPLE), and RoPE rises by {few[rope]:.3f}",
        "ExPE-K x64 has {:+.3f} with ten times the tokens; seed 2 has {:+.3f}".format(*changes(ours, "spread")),
        f"it is {more[fox]:+.3f} with FoX, {more[kerple]:+.3f} with KERPLE and {more[alibi]:+.3f} with ALiBi",
        "within 0.002 of 0 with 1.64M tokens for three methods, and from 6.55M to 16.38M KERPLE falls most",
        f"lie between {min(first.values()):.3f} (FoX) and {max(first.values()):.3f}", f"up to {between:.3f} apart",
        "by more than 0.04 each"]


def over_documents(differences, row):
    """[mean, low, high] of a single run's paired differences, for other documents."""
    return intervals([differences], row["unit_targets"])[0]


NOVELS = {name: key for name, key in SMALL.items() if not name.startswith(("KERPLE", "ExPE,"))}


def small_claims():
    """What more-tokens.md says of the larger model."""
    place, names = "small-packages", {}
    for name, (variant, _) in SMALL.items():
        names.setdefault(variant, name.partition(",")[0])
    fox, alibi, kerple, expe, rope, ours = names

    def order(loss_of):
        """The names, the lowest loss first."""
        return listed([names[name] for name in sorted(loss_of, key=loss_of.get)])

    def apart(one, other):
        """[mean, low, high] of one loss on test less another; each is a method, a protocol and a multiple."""
        return gap(*((*which, "test", place) for which in (one, other)))

    at = {(*key, n): [row["loss"] for row in rows(*key, n, "test", place)] for key in SMALL.values() for n in (1, 16)}
    before = {name: [row["loss"] for row in rows(f"{then}-tokens-x10", "spread", 16, "test", "packages")]
              for name, then in ((name, name.replace("-0.006", "-x2")) for name in names if name != expe)}
    far_out = order({name: statistics.mean(both) for name, both in before.items()})
    assert before[fox][0] < before[kerple][0] and before[alibi][1] < before[ours][1]
    near = order({name: at[name, "spread", 1][0] for name in names})
    copied = {(name, n): gains(name, "copies", n, place) for name in names for n in (0.5, 0.75, 1, 2, 4, 8, 16)}
    for i in (0, 1):                                                     # what holds with each seed
        assert order({name: at[name, "spread", 16][i] for name in before}) == far_out
        assert order({name: at[name, "spread", 1][i] for name in names}) == near
        assert at[fox, "spread", 16][i] < at[expe, "held-spread", 16][i] < at[ours, "least-spread", 16][i]
        fallen = {key for key in SMALL.values() if at[(*key, 16)][i] < at[(*key, 1)][i]}
        assert fallen == {*SMALL.values()} - {(name, "spread") for name in (alibi, rope, expe)}
        gained = [name for name in (kerple, fox, ours, alibi, expe, rope) if changes(name, "far-repeats", place)[i] < 0]
        assert gained == [kerple, fox, ours]
    assert all(low < 0 < high for n in (1, 16) for _, low, high in [apart((kerple, "spread", n), (fox, "spread", n))])
    assert all(apart((kerple, "spread", n), (ours, "spread", n))[2] < 0 for n in (1, 16))
    assert {key for key in SMALL.values() if apart((*key, 16), (*key, 1))[2] < 0} == {
        (fox, "spread"), (ours, "least-spread"), (kerple, "spread")}
    assert [name for name in names if apart((name, "far-repeats", 16), (name, "far-repeats", 1))[2] < 0] == [kerple]
    read = [names[name] for name in (kerple, fox, ours, rope, alibi, expe)
            if gap_of_probe(name, "swap", 16, place)[1] > 0]
    most = {names[max(names, key=lambda name: statistics.mean(copied[name, n]))] for n in (0.5, 0.75, 1, 2, 4, 8)}
    assert most == {"KERPLE"}
    last = [names[max(names, key=lambda name: copied[name, 16][i])] for i in (0, 1)]
    machines = {name: [json.loads((ROOT / f"results/{place}/{name}-s{seed}.run.json").read_text())
                       ["provenance"]["device"] for seed in (1, 2)] for name in names}
    assert [names[name] for name, devices in machines.items() if devices != ["cpu", "cpu"]] == [
        "FoX", "ALiBi", "ExPE", "RoPE"]
    run = json.loads((ROOT / f"results/{place}/{ours}-s1.run.json").read_text())
    tokens, train = run["tokens"], run["data"]["splits"]["train"]["tokens"]
    scored, repeated = (rows(ours, what, 1, "test", place)[0] for what in ("spread", "far-repeats"))
    model = PRESETS["small"].model
    return [
        *rows_by_length(SMALL, place), f"{tokens / 1e6:.2f}M tokens, ten for each",
        f"{model.n_layers} layers, width {model.d_model}, trained length {model.context}, a vocabulary of "
        f"{model.vocab_size:,} and {run['parameters'] / 1e6:.2f}M parameters",
        f"| {tokens / 1e6:.2f}M | {tokens / train:.2f} | 1, 2 |",
        f"{sum(scored['unit_targets']):,} targets of `spread` and {sum(repeated['unit_targets'])} far repetitions of "
        f"{scored['n_documents']} documents",
        f"With both seeds it is {far_out} at 16x, as", f"At 1x the order is {near} with both",
        f"By `swap` at 16x {listed(read)} read", f"seed 1 puts {last[0]} first and seed 2 {last[1]}"]


def novels_claims():
    """What more-tokens.md says of novels."""
    place = "small-books"
    fox, alibi, rope, ours = dict.fromkeys(variant for variant, _ in NOVELS.values())
    names = fox, alibi, rope, ours

    def of_all(name):
        """[mean, low, high] of the loss on all targets less ExPE-K's, for other documents."""
        [one], [other] = (rows(which, "nonoverlap", 1, "test", place) for which in (name, ours))
        return over_documents(np.subtract(one["unit_losses"], other["unit_losses"]), one)

    copied = [gains(name, "copies", n, place)[0] for name in names for n in (0.5, 0.75, 1, 2, 4, 8, 16)]
    most = max(gain(name, "copies", 0.5, "val", "small-packages") for name in names)
    swaps = {name: over_documents(gains_of(row), row) for name in names for row in rows(name, "swap", 16, "val", place)}
    assert all(low < 0 for _, low, _ in swaps.values())
    far = [-changes(name, "far-repeats", place)[0] for name in names]
    slides = {name: over_documents(np.subtract(*(rows(name, way, n, "test", place)[0]["unit_losses"] for way, n in (
        ("same-targets", 16), ("sliding", 1)))), rows(name, "same-targets", 16, "test", place)[0]) for name in names}
    assert all(high > 0 for _, _, high in slides.values())
    changed = [changes(*key, place)[0] for key in NOVELS.values() if key[0] != rope]
    run = json.loads((ROOT / f"results/{place}/{ours}-s1.run.json").read_text())
    split = run["data"]["splits"]["train"]
    tokens, train = run["tokens"], split["tokens"]
    scored, repeated = (rows(ours, what, 1, "test", place)[0] for what in ("spread", "far-repeats"))
    lower = [interval(-np.array(of_all(name))[[0, 2, 1]]) for name in (fox, alibi)]
    return [
        *rows_by_length(NOVELS, place), f"| {tokens / 1e6:.2f}M | {tokens / train:.2f} | 1 |",
        f"{sum(scored['unit_targets']):,} targets of `spread` and {sum(repeated['unit_targets'])} far repetitions, in "
        f"{scored['n_documents']} excerpts", f"{split['documents']} documents of {train / 1e6:.2f}M tokens",
        f"at most {max(copied):.2f} nats in any", f"reach up to {most:.0f} nats", f"by more than {max(far):.3f}",
        f"change by at most {max(map(abs, changed)):.3f}", f"than ExPE-K by {lower[0]} and {lower[1]}",
        f"higher by {interval(of_all(rope))}"]


def copying_rows():
    """The table with four times the tokens."""
    for name, (variant, way) in COPYING.items():
        first, last = (loss(variant, way, n, "test", "far") for n in (1, 16))
        cells = [name, f"{first:.3f}", f"{last:.3f}", signed(gap(*((variant, way, n, "test", "far") for n in (16, 1))))]
        if way == "spread":
            cells.append(signed(rise_of("far-repeats", variant)))
            gains = (gain(variant, "copies", n / 128, "val", "far") for n in (64, 128, 256, 512, 2048))
            cells += [f"{round(nats, 2) + 0:.2f}" for nats in gains]
        yield f"| {' | '.join(cells + [''] * (10 - len(cells)))} |"


TRIED = {                                # by the grid `knobs`; first the values of the grid `tokens`
    pictures.name(pictures.family(first)): sorted(
        (name for name in KNOBS if pictures.family(name) == pictures.family(first)), key=first.__ne__)
    for first in METHODS}


def knob_rows():
    """The table of values tuned at four times the tokens: losses on val of seed 1, and on test of three."""
    losses = {name: of_seed_1("far", f"{name}-tokens-x4", "nonoverlap")[128]["loss"]
              for names in TRIED.values() for name in names}
    best = {method: min(names, key=losses.get) for method, names in TRIED.items()}
    assert {f"{name}-tokens-x4" for name in best.values()} == set(GRIDS["retuned"].evaluations)
    for method, names in TRIED.items():
        rates = {name: float(name.partition("-lr-x")[2] or 1) for name in names}
        assert rates[best[method]] < max(rates.values())                 # as the page says, and the next one:
        assert (rates[best[method]] == rates[names[0]]) == (method in ("FoX", "ALiBi"))
        cells = [method, str(len(names))]
        pair = {name: (f"{name}-tokens-x4", "spread", 1, "test", "far") for name in (best[method], names[0])}
        for name, scored in reversed(pair.items()):
            cells += [f"`{name}`", f"{losses[name]:.3f}", f"{loss(*scored):.3f}"]
        if len(pair) == 2:
            change = gap(*pair.values())
            assert change[0] < 0 < change[2]                             # lower means; none significant
            cells.append(signed(change))
        yield f"| {' | '.join(cells + [''] * (9 - len(cells)))} |"
    ours, other = (losses[name] for name in ("expe-on-k-x64-lr-x2", "expe-on-k-x16"))
    yield f"ExPE-K has {ours:.3f} on val with 64 times theta and twice the rate, and {other:.3f} with 16"


def later_rows():
    """The table of the methods that were added later, with four times the tokens, the lowest loss at 16x first."""
    trial = {name: of_seed_1("far", f"{name}-tokens-x4", "trial")[128]["loss"] for name in NEWER_KNOBS}
    of_method = {}
    for name in NEWER_KNOBS:
        of_method.setdefault(pictures.family(name), []).append(name)
    best = sorted((min(names, key=trial.get) for names in of_method.values()), key=trial.get)
    assert {*best} == {*NEWER_TOKENS} and [*best[:2], best[-1]] == ["dape-lr-x2", "path_fox-lr-x2", "nope-stick-lr-x2"]

    def at(name, n):
        return f"{name}-tokens-x4", "spread", n, "test", "far"

    assert all(gap(at(name, 16), at(name, 1))[2] < 0 for name in ("cable-lr-x2", "path_fox-lr-x2", "dape-lr-x2"))
    clear = [("pope-lr-x2", "rope-lr-x2", 16), ("fox-lr-x2", "nope-stick-lr-x2", 16), ("path", "rope-lr-x2", 16),
             ("path_fox-lr-x2", "fox-lr-x2", 1), ("path_fox-lr-x2", "fox-lr-x2", 16),
             ("dape-lr-x2", "fox-lr-x2", 1), ("dape-lr-x2", "fox-lr-x2", 16), ("dape-lr-x2", "kerple-lr-x2", 16)]
    assert all(gap(at(one, n), at(other, n))[2] < 0 for one, other, n in clear)       # as the page says, and these:
    unclear = [("pope-lr-x2", "rope-lr-x2", 1), ("path", "rope-lr-x2", 1), *(
        (one, other, n) for n in (1, 16) for one, other in (
            ("cable-lr-x2", "fox-lr-x2"), ("selective_rope-lr-x2", "rope-lr-x2"), ("dape-lr-x2", "path_fox-lr-x2")))]
    assert all(low < 0 < high for one, other, n in unclear for _, low, high in [gap(at(one, n), at(other, n))])
    all_names = {*NEWER_TOKENS, *RETUNED}
    assert [sorted(all_names, key=lambda name: loss(*at(name, n)))[:2] for n in (1, 16)] == [
        ["path_fox-lr-x2", "dape-lr-x2"], ["dape-lr-x2", "path_fox-lr-x2"]]
    worth = {(name, n): gain(f"{name}-tokens-x4", "copies", n / 128, "val", "far")
             for name in all_names for n in (64, 128, 256, 512, 2048)}
    assert all(max(all_names, key=lambda name: worth[name, n]) == "dape-lr-x2" for n in (64, 128, 256, 512, 2048))
    assert all(worth["selective_rope-lr-x2", n] > worth["rope-lr-x2", n] for n in (64, 128, 256, 512, 2048))
    for name in sorted(NEWER_TOKENS, key=lambda name: loss(*at(name, 16))):
        cells = [verdict.name_of(name), f"{trial[name]:.3f}", *(f"{loss(*at(name, n)):.3f}" for n in (1, 16))]
        cells += [signed(gap(at(name, 16), at(name, 1))), signed(gap(at(name, 16), at("fox-lr-x2", 16)))]
        gains = (worth[name, n] for n in (64, 128, 256, 512, 2048))
        yield f"| {' | '.join(cells + [f'{round(nats, 2) + 0:.2f}' for nats in gains])} |"


def later_claims():
    """What more-tokens.md says of them."""
    dape, path_fox, fox, kerple, path, rope, stick = (f"{name}-tokens-x4" for name in (
        "dape-lr-x2", "path_fox-lr-x2", "fox-lr-x2", "kerple-lr-x2", "path", "rope-lr-x2", "nope-stick-lr-x2"))
    seeds = listed([f"{row['loss']:.3f}" for row in rows(path, "spread", 1, "test", "far")])
    copied = listed([f"{nats:.2f}" for nats in gains(dape, "copies", 4, "far")])
    return [*("lower than FoX's by {} at 1x and by {} at 16x".format(
                *(lower(name, fox, n) for n in (1, 16))) for name in (dape, path_fox)),
            f"in windows of 512 they have {copied}",
            f"lower than KERPLE's by {lower(dape, kerple, 16)} at 16x",
            f"differ: they have {seeds} at 1x", f"lower than RoPE's by {lower(path, rope, 16)} at 16x",
            f"higher than FoX's by {lower(fox, stick, 16)} at 16x"]


def hours_of_later():
    """Of training all runs of these methods, the tasks' too: on CPUs, and on a GPU that several runs shared."""
    ours = re.compile(f"({'|'.join(task_grid.NEW)})-")
    runs = [json.loads(path.read_text()) for path in (ROOT / "results").glob("*/*.run.json") if ours.match(path.name)]
    tasks = [run["seconds"] for task in task_grid.SETTINGS for name, run in task_grid.read_results(task).items()
             if ours.match(name.partition(".")[2])]
    gpu, cpu = (sum(run["seconds"] for run in runs if (run["provenance"]["device"] == "cuda") == on) for on in (1, 0))
    return f"{(cpu + sum(tasks)) / 3600:.1f} core-hours on CPUs and {gpu / 3600:.1f} hours"


def listed(words):
    """"0.1, 0.2 and 0.3"."""
    return f"{', '.join(words[:-1])} and {words[-1]}"


def copying_claims(shares):
    """What more-tokens.md says; shares: the tokens of `mini`, in millions and in epochs of the library."""
    flat = {}
    for row in (row for place in ("far", "packages")
                for row in json.loads((ROOT / f"results/{place}/flat.json").read_text())):
        flat.setdefault(re.sub(".*/|-s[0-9]$", "", row["run"]), []).append(row)
    assert list(flat) == ["expe-on-k-tokens-x4", "expe-on-k-tokens-x10", "expe-on-k-x64-lr-x2-tokens-x10"]
    slopes = [{(way, n): "{:.3f}".format(statistics.mean(
        row["loss"] for row in part if (row.get("way"), row.get("multiple")) == (way, n)))
        for way in WAYS for n in (1, 16)} for part in flat.values()]
    assert {row["protocol"] for part in flat.values() for row in part if "way" in row} == {"same-targets"}
    small = {}                                                           # heads, by run
    for row in (row for part in flat.values() for row in part if "past" in row):
        small.setdefault(row["run"].rpartition("/")[2], []).append(row["past"][1] > 0.1)
    n = [["no", "one", "two", "three", "four", "five", "six"][sum(heads)] for heads in small.values()]
    assert {len(heads) for heads in small.values()} == {16} and n[1] == n[2]
    lower = gap(*[("expe-on-k-tokens-x4", way, 16, "test", "far") for way in ("spread", "least-spread")])
    fox, alibi, ours, kerple, expe, rope = dict.fromkeys(variant for variant, _ in COPYING.values())
    at = {(name, way, n): (name, way, n, "test", "far") for name, way in COPYING.values() for n in (1, 2, 4, 8, 16)}
    seeds = listed([f"{row['loss']:.3f}" for row in rows(*at[ours, "spread", 1])])
    means = {name: loss(*at[name, "spread", 1]) for name in (fox, alibi, rope)}
    names = (fox, alibi, ours, kerple, expe, rope)
    swaps = {name: gap_of_probe(name, "swap", 16) for name in names}
    assert [name for name, (_, low, high) in swaps.items() if not low < 0 < high] == [ours, rope]
    assert {name for name in names if min(gains(name, "swap", 16, "far")) > 0.001} >= {rope, kerple, ours, fox}
    copied = {(name, n): gains(name, "copies", n / 128, "far") for name in names for n in (64, 128, 256, 512)}
    words = {key: listed([f"{gain:.2f}" for gain in worth]) for key, worth in copied.items()}
    apart = max(max(copied[name, 128]) - min(copied[name, 128]) for name in (fox, alibi))
    assert all(rise_of(what, name)[2] < 0 for what in ("spread", "far-repeats") for name in (fox, alibi))
    from_ours = [gap(at[name, "spread", 1], at[ours, "spread", 1]) for name in (fox, alibi, kerple, expe, rope)]
    assert all(low < 0 < high for _, low, high in from_ours)
    assert rise_of("far-repeats", kerple)[2] < 0
    assert max(means.values()) < min(loss(*at[name, "spread", 1]) for name in (kerple, expe, ours))
    ways = ((kerple, "spread"), (ours, "least-spread"), (expe, "held-spread"))
    assert all(last["loss"] < first["loss"] for name, way in ways
               for first, last in zip(rows(*at[name, way, 1]), rows(*at[name, way, 16]), strict=True))
    assert all(last["loss"] < first["loss"] for first, last in zip(
        *(rows(ours, "far-repeats", n, "test", "far") for n in (1, 16)), strict=True))
    assert rise_of("far-repeats", "expe-on-k-tokens-x4")[2] < 0
    most = [max(names, key=lambda name: statistics.mean(copied[name, n])) for n in (64, 128, 256, 512)]
    assert most == [rope] * 3 + [kerple]
    parameters = json.loads((ROOT / "results/packages/expe-on-k-tokens-x10-s1.run.json").read_text())
    tokens, train = parameters["tokens"], parameters["data"]["splits"]["train"]["tokens"]
    budget = " | ".join(listed([f"{n * share:.2f}{unit}" for n in (1, 2, 4)])
                        for share, unit in zip(shares, ("M", ""), strict=True))
    return [
        *copying_rows(), *later_rows(), *later_claims(), hours_of_later(), *knob_rows(),
        f"lie within {max(means.values()) - min(means.values()):.3f} of each other",
        f"whose seeds have {seeds}", f"its seeds have {words[kerple, 512]}",
        f"where they have {words[ours, 128]}, and those of FoX and ALiBi by at most {np.ceil(100 * apart) / 100:.2f}",
        *rows_by_length(LONG, "packages"), *long_claims(), *small_claims(), *novels_claims(),
        f"needs | {tokens / 1e6:.2f}M | {tokens / train:.2f} |",
        *(f"{way} | {' | '.join(part[way, n] for part in slopes for n in (1, 16))} |"
          for way in ("as trained", "at least 0", "at least 1/L", "at least 2/L", "at least 4/L")),
        f"further keys scored as at 2L | {' | '.join(part['at most 2L', n] for part in slopes for n in (1, 16))} |",
        f"{n[1]} or {n[0]} of the 16 heads", f"With ten times the tokens {n[3]} have, and {n[4]} with 64 times theta",
        listed([f"{n * tokens / 1e6:.2f}M" for n in (0.1, 0.4, 1)]), f"library | {budget} |",
        "library | {:.2f}M | {:.2f} |".format(*(4 * x for x in shares)), f"`mini`, {shares[0]:.2f}M tokens",
        listed([f"{n * tokens / train:.2f}" for n in (0.1, 0.4, 1)]),
        f"least slopes lower the mean loss at 16x by {interval(lower)}",
        f"that of the ExPE-K of `retuned` by {interval(gap(at[ours, 'spread', 16], at[ours, 'least-spread', 16]))}"]


def claims():
    """{page: the texts that it must have}, computed."""
    same, all_targets = "same-targets", "nonoverlap"
    run = json.loads((ROOT / "results/mini/expe-s1.run.json").read_text())
    tokens, train = run["tokens"], run["data"]["splits"]["train"]["tokens"]
    small = json.loads((ROOT / "results/small-packages/expe-on-k-s1.run.json").read_text())["parameters"]
    alibi, fox, kerple = "alibi-x8-lr-x2", "fox-lr-x2", "kerple-lr-x1.7"
    copying = [gain(name, "repeat", 1) for name in GRIDS["table2"].evaluations]
    scaled = [loss("expe", "scaled", length) - loss("expe", all_targets, length) for length in (1, 16)]
    ends = [end for name in ("expe-on-k", "alibi", "fox", "grape")
            for end in gap((name, same, 16), (name, same, 1))[1:]]
    flat = ("expe-on-k", alibi, fox, "grape-lr-x1.7")
    changes = {name: rise_of("spread", name) for name in flat}
    assert max(abs(end) for change in changes.values() for end in change[1:]) < 0.01
    most = max(abs(change[0]) for change in changes.values())
    grape = rise_of("far-repeats", "grape-lr-x1.7")
    pays = {name: rise_of("far-repeats", name)[0] for name in GRIDS["repeats"].evaluations}
    assert max(abs(pays[name]) for name in (*flat, kerple)) <= 0.01 < min(
        value for name, value in pays.items() if name not in (*flat, kerple))
    assert max(map(abs, ends)) < 0.025 and max(copying) <= 0.05 and PRESETS["mini"].model.context == 128
    [at_8x] = {f"{cost_of_bf16(name, 8):.2f}" for name in ("expe", "exqpe")}             # the same of both
    held = [loss("expe-x16", kind, length, "test") for kind, length in (("held-same-targets", 16), (same, 1))]
    paper = [f"{rise(name, all_targets, 4):+.2f}" for name in ("expe", "exqpe", "rope", "sinusoidal")]
    machines = {(name, n): [loss(name, "spread", n, "test", place) for place in ("far", "gpu")]
                for name in GRIDS["gpu"].evaluations for n in (1, 16)}
    orders = [sorted(machines, key=lambda key: machines[key][i]) for i in (0, 1)]
    moved = max(abs(cpu - gpu) for key, (cpu, gpu) in machines.items() if key != ("rope-base100", 16))
    assert orders[0] == orders[1]
    first = [[rows(name, "spread", 1, "test", place)[0]["loss"] for name in ("fox-lr-x2", "alibi-x8-lr-x2")]
             for place in ("far", "gpu")]
    assert (first[0][0] < first[0][1]) != (first[1][0] < first[1][1])   # seed 1 swaps
    return {
        "README.md": [
            f"from {loss('expe', same, 1):.3f} at the trained length to {loss('expe', same, 16):.3f} at 16 times",
            f"RoPE from {loss('rope', same, 1):.3f} to {loss('rope', same, 16):.3f}", f"change by at most {most:.3f}",
            f"a model of {small / 1e6:.2f}M parameters, but not on novels"],
        "docs/more-tokens.md": copying_claims([tokens / 1e6, tokens / train]),
        "docs/evidence.md": [
            *newer_rows(), *newer_claims(), f"The means differ by {moved:.3f} at most",
            f"[With {small / 1e6:.2f}M parameters]", f"{run['parameters'] / 1e6:.2f}M parameters",
            f"{train / 1e6:.2f}M training tokens", f"{tokens / 1e6:.2f}M tokens, which is {tokens / train:.2f} epochs",
            f"gains {min(copying):.3f} to {max(copying):.3f} nats", "at most 0.05 nats within",
            f"by {interval(gap(('rope-base100', all_targets, 1, 'test'), ('expe-on-k', all_targets, 1, 'test')))}",
            *(f"by {interval(gap(('expe-on-k', all_targets, n, 'test'), (alibi, all_targets, n, 'test')))}"
              for n in (1, 16)),
            *(interval(gap((alibi, all_targets, n, "test"), (fox, all_targets, n, "test"))) for n in (1, 16)),
            f"ExPE-K rises by {interval(changes['expe-on-k'])}, and KERPLE by {interval(rise_of('spread', kerple))}",
            f"a fall by {interval(-np.array(grape)[[0, 2, 1]])}", "lies within 0.01 of 0",
            "within 0.025, on the same targets of val", "by at most 0.01",
            f"ExPE rises by {rise('expe', same, 16):.2f} and RoPE by {rise('rope', same, 16):.2f} on",
            f"flat to 4x ({paper[0]})",
            f"by {interval(gap(('expe-on-k-x1', same, 1), ('expe-on-k', same, 1)))} on val",
            f"it has {held[0]:.3f} at 1x and at 16x" if f"{held[0]:.3f}" == f"{held[1]:.3f}" else "not flat",
            ", ".join(paper), f"ExPE rises by {rise('expe', same, 4):.2f} |",
            f"{scaled[0]:.2f} lost, {-scaled[1]:.2f} gained",
            f"rise by {at_8x} at 8x, and ExQPE's by {cost_of_bf16('exqpe', 16):.2f} at 16x",
            interval(gap(("expe-constant", same, 1), ("expe", same, 1))),
            f"of RoPE by {gain('rope', 'swap', 16):.3f}, of T5 by {gain('t5', 'swap', 16):.3f} and of NoPE by "
            f"{gain('nope', 'swap', 16):.3f}"]}


def trial_loss(name):
    """By which a trial is chosen."""
    return json.loads((ROOT / f"results/mini/{name}-s{tuning.SEED}.trial.json").read_text())[0]["loss"]


def newer_rows():
    """The table of the methods that were added later, the lowest loss at 16x first."""
    trials = {best: names for names, best in (tuning.trials(method, trial_loss) for method in tuning.LATER)}
    for name in sorted(NEWER, key=lambda name: loss(name, "spread", 16, "test", "far")):
        cells = [f"{loss(name, 'spread', n, 'test', 'far'):.3f}" for n in (1, 2, 4, 16)]
        scored = GRIDS["newer"].evaluations[name]
        cells += [signed(rise_of(what, name)) if f"test-{what}" in scored else "" for what in ("spread", "far-repeats")]
        cells.append(signed(gap(*((which, "spread", 16, "test", "far") for which in (name, "fox-lr-x2")))))
        yield f"| {verdict.name_of(name)} | {len(trials[name])} | {' | '.join(cells)} |"


def newer_claims():
    """What evidence.md says of them."""
    tuned_names = [*GRIDS["spread"].evaluations, *NEWER]
    at = {(name, n): loss(name, "spread", n, "test", "far") for name in tuned_names for n in (1, 16)}
    assert all(min(tuned_names, key=lambda name: at[name, n]) == "path_fox-lr-x2" for n in (1, 16))
    flat = ("path_fox-lr-x2", "nope-stick-lr-x2", "cable-lr-x2", "dape-lr-x2")
    assert all(low < 0 < high for name in flat[1:] for n in (1, 16)
               for _, low, high in [gap(*((which, "spread", n, "test", "far") for which in (name, "fox-lr-x2")))])
    assert max(abs(rise_of("spread", name)[0]) for name in flat[:3]) < 0.002
    assert all(low < 0 < high for n in (1, 16) for _, low, high in [
        gap(*((which, "spread", n, "test", "far") for which in ("selective_rope-base30", "rope-base100")))])
    assert all(rise_of(what, "dape-lr-x2")[1] < 0 for what in ("spread", "far-repeats"))
    assert gap(*((name, "spread", 1, "test", "far") for name in ("path", "rope-base100")))[1] < 0
    assert [sum(name.endswith(value) for name in NEWER) for value in ("-lr-x2", "-base30")] == [5, 1]    # at an edge
    pope = [lower("pope-base100-lr-x2", "rope-base100", n) for n in (1, 16)]
    return [f"than NoPE's with a softmax by {lower('nope-stick-lr-x2', 'nope-lr-x1.2', 1)}",
            f"than RoPE's by {pope[0]} at 1x and by {pope[1]} at 16x",
            f"it starts from, by {lower('dape-lr-x2', 'kerple-lr-x1.7', 16)}",
            f"without gates rises by {interval(rise_of('spread', 'path'))}",
            f"at 16x its loss is lower by {lower('path', 'rope-base100', 16)}",
            "than FoX's by {} at 1x and by {} at 16x".format(
                *(lower("path_fox-lr-x2", "fox-lr-x2", n) for n in (1, 16)))]


def whole(claim):
    """A pattern of the claim where no further digit follows it."""
    return re.escape(claim) + r"(?!\d)"


@pytest.mark.parametrize("page", ["README.md", "docs/evidence.md", "docs/more-tokens.md"])
def test_every_number_is_computed_or_has_a_source(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    tables = re.compile(r"\| [^|]* \| \d+ \| (lr|no|max distance) \|"       # compared where they are made
                        r"|\| [^|]* \| `--pe|\| [^|]* \| \d+x \|")
    text = "\n".join(line for line in lines if not tables.match(line))
    squeezed = " ".join(text.split())
    known = [" ".join(claim.split()) for claim in claims()[page]]
    missing = [claim for claim in known if not re.search(whole(claim), squeezed)]
    assert not missing, missing
    rest = squeezed
    for claim in sorted([*known, *(" ".join(words.split()) for words in CITED.get(page, ()))], key=len, reverse=True):
        rest = re.sub(whole(claim), " ", rest)
    rest = re.sub(r"```.*?```", " ", rest)                               # commands, and the table that they print
    rest = re.sub(r"\]\([^)]*\)", " ", rest)                            # addresses
    numbers = re.findall(r"(?<![\w.])[-+]?\d+\.\d+(?![\w.]*\d)", rest)
    assert not numbers, numbers


def test_far_beyond_16_times_is_what_the_files_say():
    """The table of past-the-length.md, and what it says of the two kinds of encodings."""
    page = " ".join((ROOT / "docs/past-the-length.md").read_text(encoding="utf-8").split())
    runs = {}
    for path in sorted((ROOT / "results/extreme").glob("*.json")):
        rows = json.loads(path.read_text())
        assert [(row["length"], row["n_targets"], row["n_documents"]) for row in rows] == [
            (length, 1280, 5) for length in (128, 2048, 8192, 16384)]
        runs.setdefault(path.stem[:-3], []).append([row["loss"] for row in rows])
    for name, losses in runs.items():
        seeds = ", ".join(path.stem[-1] for path in sorted((ROOT / "results/extreme").glob(f"{name}-s?.json")))
        means = " | ".join(f"{x:.3f}" for x in np.mean(losses, 0))
        assert f"| {verdict.name_of(name)} | {seeds} | {means} |" in page
        rotates = name.startswith(("rope", "pope"))
        assert all(sorted(seed) == seed for seed in losses) or not rotates
        assert rotates or np.ptp(losses, 1).max() < 0.0065
    assert "1,280 targets" in page and "changes by 0.006 at most" in page


def test_the_whole_strings_that_are_copied_are_those_of_the_results():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    names = {"path": "PaTH", "cable": "CABLE", "shaw": "Shaw", "partial": "partial RoPE", "fire": "FIRE",
             "rope-random": "RoPE at random positions"}
    copied = {}
    for name, run in task_grid.read_results("copy").items():
        if run["seed"]:
            copied.setdefault(re.sub(r"^copy\.|-lr.*", "", name), []).extend(
                100 * row["whole"] for row in run["rows"] if row["length"] == 52)
    most = {method: max(seeds) for method, seeds in copied.items() if seeds and max(seeds) >= 0.5}
    shown = sorted(most, key=most.get, reverse=True)
    assert ", ".join(f"{names[method]} {listed([f'{seed:.0f}' for seed in copied[method]])}%" for method in shown
                     ) + ", others 0% |" in page


def test_the_loss_of_indirect_indexing_at_the_papers_size_is_that_of_its_log():
    page = " ".join((ROOT / "docs/tasks.md").read_text(encoding="utf-8").split())
    log = json.loads((ROOT / "results/tasks/indirect-at-size.log.json").read_text())
    last = {name: statistics.mean(loss for _, loss in lines[-10:]) for name, lines in log.items()}
    assert f"was {last['pope']:.2f} with PoPE and {last['rope']:.2f} with RoPE, where a guess" in page
    assert f"has {np.log(39):.2f} (" in page and "after 21,000 of 30,000 steps with PoPE and 22,000 with RoPE" in page
    assert (log["pope"][-1][0], log["rope"][-1][0]) == (21_000, 22_000)
