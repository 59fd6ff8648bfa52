"""The rules of remedies.toml applied to remedies.jsonl: each method and free remedy beside ExPE-K, and the verdicts.

    python -m studies.remedies
    python -m studies.remedies --of FoX      the same comparisons of FoX, for which no rule was fixed before the runs

The rules were fixed before the first run; they stand at the head of remedies.toml, and the numbers of rules here are
theirs. A verdict is of the seeds that both sides have. It is provisional while a seed of the study is missing.
"""

from pathlib import Path

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from lab.statistics import MIN_SEEDS, t_quantile
from lab.table import from_results, print_table

FILE = Path(__file__).with_suffix(".jsonl")
MARGIN = 0.02                            # nats a token
COPIES = 1.0                             # nats: what a repetition at 64 tokens is worth to a seed that copies
NAMES = {"expe-on-k-x64-lr-x2": "ExPE-K", "rope-lr-x2": "RoPE", "expe-x4-lr-x3": "ExPE", "fox-lr-x2": "FoX",
         "alibi-x8-lr-x2": "ALiBi"}
WAYS = {"test-spread": "as it is", "test-keys-spread": "a mask of the last L keys",
        "test-dual-chunk-spread": "dual chunks", "test-yarn-spread": "YaRN", "test-held-spread": "hold",
        "test-least-spread": "least-slope"}
AGAIN = "re-reading the last L tokens"
PLAIN = "test-spread"

def read_losses(path):
    """{(method, way): {seed: {multiple of L: loss}}}, and {method: {seed: gain of a repetition at 64 tokens}}."""
    losses, gains = {}, {}
    for row in from_results(path):
        method = NAMES[row.run]
        if row.measure == "copies" and row.multiple == 0.5:
            gains.setdefault(method, {})[row.seed] = row.value
        elif row.measure in WAYS:
            losses.setdefault((method, WAYS[row.measure]), {}).setdefault(row.seed, {})[row.multiple] = row.value
    for method in ("RoPE", "ExPE"):                                     # the same targets are read in the same windows
        losses[method, AGAIN] = {seed: {1: at[1], 16: at[1]} for seed, at in losses[method, WAYS[PLAIN]].items()}
    return losses, gains

def interval(differences):
    """(mean, half of Student's 95% interval) of differences, one for each seed; nan for the half of too few seeds."""
    n = len(differences)
    half = t_quantile(n - 1) * np.std(differences, ddof=1) / n**0.5 if n >= MIN_SEEDS else np.nan
    return float(np.mean(differences)), float(half)

def verdict(mean, half):
    """Rule 1: what the interval says of ExPE-K minus a rival."""
    if mean + half < -MARGIN:
        return "better"
    if mean - half > MARGIN:
        return "worse"
    return "equal" if -MARGIN < mean - half and mean + half < MARGIN else "open"

def is_flat(mean, half):
    """Rule 2, for a change from L to 16L; too few seeds have no interval."""
    if np.isnan(half):
        return "open"
    return "flat" if -MARGIN < mean - half and mean + half < MARGIN else "not flat"

def describe(differences):
    mean, half = interval(differences)
    seeds = " ".join(f"{x:+.3f}" for x in differences)
    return f"{mean:+.3f}" + f" ±{half:.3f}" * (not np.isnan(half)) + f" ({seeds})"

def subtract(ours, theirs, multiple, seeds=None):
    """The differences of the seeds that both have, in order."""
    return [ours[seed][multiple] - theirs[seed][multiple] for seed in sorted(ours.keys() & theirs.keys())
            if seeds is None or seed in seeds]

def main(argv=None):
    parser = CommandLine(prog="python -m studies.remedies", description=__doc__)
    parser.add_argument("--of", default="ExPE-K", choices=tuple(NAMES.values()), metavar="METHOD",
                        help=f"the method that is compared with each other one: {', '.join(NAMES.values())}")
    method_of = parser.parse_args(argv).of
    losses, gains = read_losses(FILE)
    ours = losses[method_of, WAYS[PLAIN]]
    for (method, way), of_seeds in losses.items():
        if way == WAYS[PLAIN]:
            print(f"{method}: seeds {' '.join(map(str, sorted(of_seeds)))}")

    means = [[method, way, *(f"{np.mean([at[multiple] for at in of_seeds.values()]):.3f}" for multiple in (1, 16)),
              describe([at[16] - at[1] for _, at in sorted(of_seeds.items())]),
              is_flat(*interval([at[16] - at[1] for at in of_seeds.values()]))]
             for (method, way), of_seeds in losses.items()]
    print("\nlosses at L and 16L, and their change (rule 2)\n")
    print_table(["method", "read how", "L", "16L", "16L minus L", "rule 2"], means)

    rivals = [key for key in losses if key[0] != method_of]
    for multiple in (1, 16):
        body = []
        for key in rivals:
            differences = subtract(ours, losses[key], multiple)
            body.append([*key, describe(differences), verdict(*interval(differences))])
        print(f"\n{method_of} as it is, minus each rival, at {'L' if multiple == 1 else '16L'} (rule 1)\n")
        print_table(["rival", "read how", "difference", f"{method_of} is"], body)

    print("\nrule 5: seeds that copy, of those measured, and their losses at 16L as they are\n")
    copying = {method: {seed for seed, gain in of_seeds.items() if gain >= COPIES}
               for method, of_seeds in gains.items()}
    body = []
    for method, of_seeds in gains.items():
        at = losses[method, WAYS[PLAIN]]
        groups = [" ".join(f"{at[seed][16]:.3f}" for seed in sorted(at) if (seed in copying[method]) == which)
                  for which in (True, False)]
        worth = " ".join(f"{of_seeds[seed]:.2f}" for seed in sorted(of_seeds))
        body.append([method, f"{len(copying[method])} of {len(of_seeds)}", worth, *groups])
    print_table(["method", "copy", "worth of a repetition, nats", "those that copy", "the others"], body)
    print()
    for method, way in rivals:
        theirs = losses[method, way]
        both_copy = copying[method_of] & copying[method]
        neither_copies = (gains[method_of].keys() & gains[method].keys()) - copying[method_of] - copying[method]
        for name, regime in (("copy", both_copy), ("do not copy", neither_copies)):
            differences = subtract(ours, theirs, 16, regime)
            if MIN_SEEDS <= len(differences) < len(subtract(ours, theirs, 16)):
                said = verdict(*interval(differences))
                print(f"{method}, {way}: pairs that {name} alone: {describe(differences)}, {method_of} is {said}")

if __name__ == "__main__":
    main()
