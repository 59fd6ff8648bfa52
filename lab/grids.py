"""The paper's tables as grids: which variants are trained, by what each is evaluated, and the paper's losses."""

from typing import NamedTuple

from config import ENCODINGS, PRESETS
from studies import task_grid
from studies import tuning as tuned

VARIANTS = {pe: f"--pe {pe}" for pe in ENCODINGS} | {                  # flags of train.py, with what flags_of puts in
    "exqpe-on-k": "--pe exqpe --on k",
    "expe-constant": "--pe expe --constant",
    "expe-l1": "--pe expe --l 1",
    "expe-learn-init": "--pe expe --learn init",
    "expe-learn-random": "--pe expe --learn random",
    "expe-on-k-x1-learn-init": f"--pe expe --on k {tuned.STEP.format(1)} --learn init",
    "expe-once": "--pe expe --once",
    "expe-on-q": "--pe expe --on q",
    "expe-on-qkv": "--pe expe --on qkv",
    "expe-l1-x24": f"--pe expe --l 1 {tuned.STEP.format(24)}",
    "expe-x1024": f"--pe expe {tuned.STEP.format(1024)}",
} | {
    f"{name}-{more}": f"{flags} {extra}"
    for more, extra in {"start1": "--start 1", "start8": "--start 8", "start1-bf16": "--start 1 --dtype bf16"}.items()
    for name, flags in {"expe": "--pe expe", "expe-l8": "--pe expe --l 8", "expe-constant": "--pe expe --constant",
                        "expe-constant-l8": "--pe expe --constant --l 8", "exqpe": "--pe exqpe"}.items()
} | tuned.variants() | {
    "rope-log": "--pe rope --softmax log",
    "rope-sinks": "--pe rope --softmax sinks",
    "rope-nope4": "--pe rope --nope-every 4",
    "rope-nope4-window": "--pe rope --nope-every 4 --window 32",
    "rope-nope4-log": "--pe rope --softmax log --nope-every 4",
    "rope-nope4-window-log": "--pe rope --softmax log --nope-every 4 --window 32",
    "rope-then-nope": f"--pe nope --init-from runs/{tuned.PRESET}/rope-s{{seed}} --steps 160",      # a tenth of mini's
    "learned-random": "--pe learned --n-positions 2048 --random-positions 2048",
} | {f"{name}-random": f"{flags} --random-positions 2048"
     for name, flags in {"expe": "--pe expe", "expe-on-k": "--pe expe --on k", "rope": "--pe rope",
                         "expe-on-k-x16": tuned.variants()["expe-on-k-x16"]}.items()}
BEST = ("fox-lr-x2", "alibi-x8-lr-x2", "expe-on-k", "grape-lr-x1.7", "kerple-lr-x1.7", "shaw-distance32-lr-x2",
        "expe-x16-start1", "t5-distance20-lr-x2", "nope-lr-x1.2", "rope-base100", "sinusoidal-base1000")    # tuned.md's
NEWER = ("cable-lr-x2", "path_fox-lr-x2", "nope-stick-lr-x2", "selective_rope-base30", "pope-base100-lr-x2",
         "dape-lr-x2", "path")            # the best of studies.tuning.LATER
NEWER_TOKENS = (*NEWER[:3], "selective_rope-lr-x2", "pope-lr-x2", "dape-lr-x2", "path")          # of NEWER_KNOBS
NEWER_KNOBS = (*NEWER, "path-lr-x2", "selective_rope-lr-x2", "pope-lr-x2")          # with four times the tokens
BUDGET = ("expe-on-k", "rope-base100", "alibi-x4-lr-x2")
METHODS = ("expe-on-k", "alibi-x8-lr-x2", "fox-lr-x2", "rope-base100", "expe-x16", "kerple")     # of the grid `tokens`
KNOBS = ("expe-on-k", "expe-on-k-x4", "expe-on-k-x16", "expe-on-k-x64", "expe-on-k-x1024", "expe-on-k-lr-x2",
         "expe-on-k-x16-lr-x2", "expe-on-k-x64-lr-x2", "expe-on-k-x64-lr-x3",
         "alibi-x8", "alibi-x4-lr-x2", "alibi-x8-lr-x2", "alibi-x16-lr-x2", "alibi-x8-lr-x3",
         "fox", "fox-lr-x2", "fox-lr-x3", "kerple", "kerple-lr-x2", "kerple-lr-x3",
         "rope", "rope-base100", "rope-base1000", "rope-base100-lr-x2", "rope-lr-x2", "rope-lr-x3",
         "expe", "expe-x4", "expe-x16", "expe-x64", "expe-x16-lr-x2", "expe-x4-lr-x2", "expe-x4-lr-x3", "expe-x4-lr-x4")
RETUNED = ("expe-on-k-x64-lr-x2", "alibi-x8-lr-x2", "fox-lr-x2", "rope-lr-x2", "kerple-lr-x2", "expe-x4-lr-x3")
SIZES = ("expe-on-k", *(name.replace("lr-x2", "lr-0.006").replace("lr-x3", "lr-0.009") for name in RETUNED[1:]))
VARIANTS["alibi-x8"] = "--pe alibi --slopes 8"
VARIANTS |= {name: f"{VARIANTS[first]} --lr {0.004 * float(rate):g}" for name in KNOBS if name not in VARIANTS
             for first, _, rate in [name.partition("-lr-x")]}
VARIANTS |= {name: f"{VARIANTS[first]} --lr {rate}" for name in SIZES[1:]
             for first, _, rate in [name.partition("-lr-")]}
VARIANTS |= {f"{name}-tokens-x{times}": f"{VARIANTS[name]} --steps {times * 1600}" for times, names in {
    2: BUDGET, 4: (*KNOBS, *NEWER_KNOBS), 10: ("expe-on-k", *RETUNED[:5])}.items() for name in names}
VARIANTS |= task_grid.variants()
EVALUATIONS = {                          # flags of lab.measure, by the name of the file that they fill
    "trial": f"--lengths {PRESETS[tuned.PRESET].model.context}",
    "nonoverlap": "--per-position",
    "same-targets": "--protocol same-targets",
    "swap": "--probe swap",
    "repeat": "--probe repeat",
    "copies": "--probe repeat --lengths 64,96,128,256,512,1024,2048",
    "small-copies": "--probe repeat --lengths 128,192,256,512,1024,2048,4096",
    "scaled": "--scale 0.5",
    "scaled-same-targets": "--protocol same-targets --scale 0.5,auto",
    "spread-same-targets": "--protocol same-targets --scale 2,4,8,16",
    "spread-rope-same-targets": "--protocol same-targets --rope-scaling linear --factor 1/16",
    "extended-same-targets": "--protocol same-targets --rope-scaling linear,ntk,dynamic,yarn,dual-chunk",
    "precision-same-targets": "--protocol same-targets --dtype bf16,fp16,int8",
    "test-nonoverlap": "--split test",
    "test-same-targets": "--split test --protocol same-targets",
    "test-held-same-targets": "--split test --protocol same-targets --rope-scaling hold",
    "test-spread": "--split test --protocol spread",
    "test-held-spread": "--split test --protocol spread --rope-scaling hold",
    "test-least-spread": "--split test --protocol spread --rope-scaling least-slope --factor 1",
    "test-far-repeats": "--split test --protocol far-repeats",
}
LOSSES = ("nonoverlap", "same-targets")
PROBES = ("swap", "repeat")
SAME = ("same-targets",)
OF_SMALL = ("test-nonoverlap", "test-same-targets", "swap", "small-copies")
SEEDS = [1, 2, 3]                        # of every grid, if no others are asked for; that of the trials is none of them

class Grid(NamedTuple):
    """Variants to train, and which evaluations each of them gets. (`tuned`, which finds them as it goes, is none.)"""

    title: str
    evaluations: dict                    # variant: names of EVALUATIONS
    paper: dict = {}                     # (variant, how): its losses at 1x, 2x, 4x, ... in the paper
    of: tuple = ()                       # the presets that these losses are of
    place: str = ""                      # the folder of its runs and results, if only one preset has these
    preset: str = tuned.PRESET           # that one
    says: str = ""                       # what its tables show, in two sentences

MULTIPLIERS = {                                # {theta multiplier: the variant that has it} of two methods
    method: {x: method if x == default else f"{method}-x{x}" for x in (0.25, 1, 4, 16, 64, 256, 1024)}
    for method, default in {"expe": 1, "expe-on-k": 256}.items()}

TABLE2 = ("sinusoidal", "rope", "expe", "exqpe", "expe-on-k-x1", "expe-on-k", "exqpe-on-k", "alibi", "t5", "shaw",
          "learned", "nope")
TABLE7 = ("expe", "expe-constant", "expe-l1", "expe-learn-init", "expe-learn-random", "expe-once")
ANOTHER_WAY = {"expe-on-k": ("test-least-spread",), "expe": ("test-held-spread",), "": ()}     # by how a name begins
def far(names, end="", rest=("swap", "copies")):
    """The evaluations of methods whose models may copy; ExPE and ExPE-K are read in another way, too."""
    more = {name: next(way for first, way in ANOTHER_WAY.items() if name.startswith(first)) for name in names}
    return {name + end: ("test-spread", *more[name], "test-far-repeats", *rest) for name in names}

GRIDS = {
    "table2": Grid(
        "Table 2: every encoding, trained alike", dict.fromkeys(TABLE2, LOSSES + PROBES),
        {("sinusoidal", ""): (4.00, 4.75, 5.64), ("rope", ""): (3.88, 4.37, 5.05), ("expe", ""): (3.93, 3.87, 3.88)},
        of=("paper-35m",),
        says="On the same targets only ExPE-K, ExQPE-K and ALiBi do not change with length. ExPE looks flat to 4x by "
             "the paper's protocol, because longer windows starve fewer tokens."),
    "ablations": Grid(
        "Table 7: ablations of ExPE", dict.fromkeys(TABLE7, LOSSES),
        {("expe", ""): (3.93, 3.87, 4.26), ("expe-constant", ""): (4.26, 4.21, 4.24),
         ("expe-l1", ""): (4.48, 4.83, 6.01), ("expe-learn-init", ""): (3.88, 3.82, 4.89),
         ("expe-learn-random", ""): (7.33, 7.34, 7.61), ("expe-once", ""): (4.43, 4.82, 6.18)},
        of=("paper-35m",),
        says="`--once` fails past 1x and `--l 1` learns badly, as in the paper. The constant ramp does not differ "
             "significantly from ExPE, and with these three seeds `--learn random` does not either."),
    "scaling": Grid(
        "Table 3: ExPE's and ExQPE's values halved after training",
        dict.fromkeys(("expe", "exqpe", "expe-on-k-x1"), (*LOSSES, "scaled", "scaled-same-targets")),
        {("expe", ""): (2.63, 2.59, 2.71, 5.19, 7.56), ("expe", "scale 0.5"): (2.76, 2.71, 2.68, 2.98, 5.65),
         ("exqpe", ""): (2.63, 2.59, 2.68, 5.01, 7.39), ("exqpe", "scale 0.5"): (2.74, 2.69, 2.65, 2.76, 4.98)},
        of=("llama-342m",),
        says="Halving the values costs ExPE 0.07 at 1x and gains 0.19 at 16x by the paper's protocol, which is the "
             "direction of the paper's table 3. It does not help ExPE-K, which is flat without it."),
    "large": Grid(
        "Table 1: Llama's RoPE against ExPE and ExQPE", dict.fromkeys(("rope", "expe", "exqpe"), LOSSES),
        {("rope", ""): (2.63, 3.45, 4.55), ("expe", ""): (2.63, 2.59, 2.71), ("exqpe", ""): (2.63, 2.59, 2.68)},
        of=("llama-342m",),
        says="The paper's model of 342M parameters."),
    "extensions": Grid(
        "ExPE against RoPE with position interpolation, NTK, YaRN and dual chunks",
        {"expe": ("same-targets", "scaled-same-targets"), "expe-on-k-x1": SAME,
         "rope": ("same-targets", "extended-same-targets")},
        says="With dual chunks RoPE rises least of its extensions. ExPE-K is flat as it is."),
    "precision": Grid(
        "ExPE and ExQPE in fewer bits (the claim of section 2.3)",
        dict.fromkeys(("expe", "exqpe", "expe-on-k", "expe-on-k-x1"), ("same-targets", "precision-same-targets")),
        says="fp16 and 8-bit weights change the means by 0.002 at most. bf16 raises those of ExPE and ExQPE by 0.01 at "
             "8x, and that of ExQPE by 0.03 at 16x. It does not change ExPE-K's."),
    "doors": Grid(
        "Which of W_q, W_k and W_v the override enters",
        dict.fromkeys(("expe-on-k-x1", "expe-on-q", "expe", "expe-on-qkv", "expe-once"), LOSSES),
        says="Overriding only the keys loses nothing at 1x and is flat to 16x. Every override that enters W_q or W_v "
             "rises."),
    "theta": Grid(
        "Theta times 1/4 to 1,024, one dimension with 24 times theta, and a trained theta",
        dict.fromkeys((name for method in MULTIPLIERS.values() for name in method.values()), SAME)
        | dict.fromkeys(("expe-l1", "expe-l1-x24", "expe-learn-init", "expe-on-k-x1-learn-init"), SAME),
        says="ExPE-K is flat for every multiplier and lowest from 4 to 256. ExPE is lowest at 16 and learns worse than "
             "with the paper's theta from 64 on."),
    "hold": Grid(
        "Queries that stay at the last trained position (`hold`), after training, on the test split",
        {**dict.fromkeys(("expe", "expe-x16", "exqpe"), ("test-same-targets", "test-held-same-targets")),
         **dict.fromkeys(("expe-on-k", "alibi-x4-lr-x2"), ("test-same-targets",))}, place=tuned.PRESET,
        says="With `hold`, queries past the trained length stay at its last position, and ExPE and ExQPE become flat "
             "without training. ExPE with 16 times theta then has the lowest mean of the ExPE variants."),
    "dither": Grid(
        "The staggered ramp as a dither: starts at which bf16 merges neighbours",
        dict.fromkeys((f"{name}-{start}" for start in ("start1", "start8")
                       for name in ("expe", "expe-constant", "exqpe", "expe-l8", "expe-constant-l8")),
                      ("same-targets", "precision-same-targets"))
        | dict.fromkeys(("expe-start1-bf16", "expe-constant-start1-bf16", "exqpe-start1-bf16"),
                        ("same-targets", "precision-same-targets")),
        says="Where bf16 merges neighbouring positions, equal columns lose more than columns that are offset by j. "
             "Training in bf16 makes up for about half of the loss."),
    "zoo": Grid(
        "The field's other methods, trained alike, each with its default values",
        dict.fromkeys(("nope", "rope", "alibi", "expe", "expe-on-k", "kerple", "fire", "cope", "fox", "grape", "xpos",
                       "partial", "proportional"), SAME),
        says="FoX has the lowest mean at every length. FoX, GRAPE, ALiBi and ExPE-K do not change with length."),
    "mixes": Grid(
        "Blocks without an encoding, windows, other softmaxes, and RoPE dropped after training",
        dict.fromkeys(("rope", "rope-log", "rope-sinks", "rope-nope4", "rope-nope4-log", "rope-nope4-window",
                       "rope-nope4-window-log", "rope-then-nope", "alibi", "expe-on-k"), SAME), place=tuned.PRESET,
        says="Windows of 32 tokens keep RoPE within 0.03 of its loss at 1x. A block without an encoding, other "
             "softmaxes and DroPE do not."),
    "random": Grid(
        "Trained at random positions up to 16 times the trained length",
        dict.fromkeys(("expe", "expe-on-k", "rope", "learned-random"), SAME)
        | {"rope-random": ("same-targets", "spread-rope-same-targets")}
        | dict.fromkeys(("expe-random", "expe-on-k-random", "expe-on-k-x16-random"),
                        ("same-targets", "spread-same-targets")),
        place=tuned.PRESET,
        says="Random positions make RoPE and ExPE nearly flat at NoPE's loss if neighbours are 1 apart in evaluation. "
             "Read 16 apart, as in training, both rise."),
    "budget": Grid(
        "Twice and four times the tokens, with values tuned at mini's tokens, on the test split",
        dict.fromkeys((f"{name}{tokens}" for tokens in ("", "-tokens-x2", "-tokens-x4")
                       for name in BUDGET), ("test-same-targets",)),
        place=tuned.PRESET,
        says="ALiBi's lead over ExPE-K grows with the tokens. With four times the tokens ExPE-K rises by 0.02 from 1x "
             "to 16x with every seed."),
    "spread": Grid(
        "Every method at its best, scored by targets at 16 places of each document, on the test split",
        dict.fromkeys(BEST, ("test-spread",)), place="far",
        says="FoX, ALiBi and GRAPE do not change with length, ExPE-K rises by 0.004 and KERPLE by 0.015. FoX and ALiBi "
             "have the lowest means."),
    "gpu": Grid(
        "Five methods at their best, trained again with the same seeds on a GPU, on the test split",
        dict.fromkeys(("expe-on-k", "fox-lr-x2", "alibi-x8-lr-x2", "kerple-lr-x1.7", "rope-base100"), ("test-spread",)),
        place="gpu",
        says="The same methods change with length as on a CPU. A loss differs from that of the same seed on a CPU by "
             "0.022 at most, where the method does not rise."),
    "repeats": Grid(
        "Every method at its best, scored by the ends of far repetitions, on the test split",
        dict.fromkeys(BEST, ("test-far-repeats",)), place="far",
        says="Far context hardly pays at this budget: FoX, ALiBi, ExPE-K, GRAPE and KERPLE change by less than "
             "0.01 from 1x to 16x. The others rise."),
    "newer": Grid(
        "Methods that were added later at the best of their trials, beside others, on the test split",
        dict.fromkeys(("expe-on-k", "fox-lr-x2", "alibi-x8-lr-x2", "kerple-lr-x1.7", "rope-base100", *NEWER),
                      ("test-spread", "test-far-repeats"))
        | dict.fromkeys(("path", "path_fox-lr-x2"), ("test-spread",)),   # far-repeats takes half an hour on a CPU
        place="far",
        says="PaTH-FoX has the lowest mean at every length. It, NoPE with stick-breaking attention and CABLE are flat, "
             "and PaTH, PoPE and Selective RoPE rise."),
    "newer-knobs": Grid(
        "Four times the tokens, the methods that were added later at one or two values each, on val",
        dict.fromkeys((f"{name}-tokens-x4" for name in NEWER_KNOBS), ("trial",)), place="far",
        says="PaTH is better at the preset's rate than at twice it. Selective RoPE and PoPE are better with their own "
             "base and twice the rate than with the values of a quarter of these tokens (one seed)."),
    "newer-tokens": Grid(
        "Four times the tokens, the methods that were added later: losses on test, copies on val",
        dict.fromkeys((f"{name}-tokens-x4" for name in NEWER_TOKENS), ("test-spread", "copies")), place="far",
        says="DAPE and PaTH-FoX have the lowest losses, and with CABLE they fall from 1x to 16x. By mean DAPE copies "
             "most. NoPE with stick-breaking attention is flat and hardly copies. PaTH, PoPE and Selective RoPE rise."),
    "tokens": Grid(
        "Four times the tokens, at which models copy: losses on test, probes on val",
        far(METHODS, "-tokens-x4"), place="far",
        says="With values tuned at a quarter of these tokens, FoX and ALiBi have the lowest losses and copy most. "
             "These two and ExPE-K gain from far context at the ends of far repetitions, and FoX and ALiBi on all "
             "targets."),
    "knobs": Grid(
        "Four times the tokens, other values of each method's own knob and rate, on val",
        dict.fromkeys((f"{name}-tokens-x4" for name in KNOBS), ("nonoverlap", "copies")), place="far",
        says="Where models copy, smaller thetas are best for ExPE-K and ExPE, RoPE's own base is, and higher rates for "
             "all but FoX and ALiBi (one seed). No best rate is the highest that was tried."),
    "retuned": Grid(
        "Four times the tokens, each method with the best values of knobs: losses on test, probes on val",
        far(RETUNED, "-tokens-x4"), place="far",
        says="FoX, ALiBi and RoPE have nearly the same mean at 1x; seeds of ExPE-K, ExPE and KERPLE differ more, and "
             "no method differs significantly from ExPE-K there. FoX, ALiBi and KERPLE gain where the text repeats."),
    "long": Grid(
        "Ten times the tokens, on the packages that the project needs: losses on test, probes on val",
        far((*RETUNED[:5], "expe-on-k"), "-tokens-x10"), place="packages",
        says="With both seeds KERPLE gains most from far context, and then FoX and ExPE-K with least slopes; no "
             "interval separates these three. KERPLE copies most in windows of 128 and 256 tokens."),
    "growth": Grid(
        "One, four and ten times the tokens, on the packages that the project needs, on the test split",
        far(RETUNED[:5], "-tokens-x10", ()) | far(RETUNED[:5], "-tokens-x4", ())
        | dict.fromkeys(RETUNED[:5], ("test-spread",)), place="packages",
        says="With mini's tokens no method gains more than 0.002 from far context, and with four times the losses of "
             "all but RoPE fall by more. From four to ten times KERPLE's gain grows most (one seed)."),
    "sizes": Grid(
        "The preset small, with ten tokens a parameter, on the packages: losses on test, probes on val",
        far(SIZES, rest=OF_SMALL), place="small-packages", preset="small",
        says="With both seeds the order at 16x is that of mini's means with ten times the tokens: KERPLE, FoX, ExPE-K, "
             "ALiBi, RoPE. The first three gain from far context, and ALiBi does not."),
    "novels": Grid(
        "The preset small, with ten tokens a parameter, on English novels, scored on other authors'",
        far(SIZES[:4], rest=OF_SMALL), place="small-books", preset="small",
        says="On novels these models hardly copy, and far context is worth nothing to them at 16x. FoX, ALiBi and "
             "ExPE-K do not change with length, and RoPE rises (one seed)."),
    "books": Grid(
        "English novels, scored on other authors', with default and best values",
        dict.fromkeys(("expe", "expe-x16", "expe-on-k-x1", "expe-on-k", "rope", "rope-base100", "alibi",
                       "alibi-x4-lr-x2"), SAME), place="books",
        says="ExPE-K and ALiBi do not change with length on novels either, and ExPE and RoPE rise. ExPE-K and tuned "
             "ALiBi do not differ significantly at 1x."),
}
HALF = "--dtype bf16 --fast --compile"   # so small trains in less time; it is scored in fp32
DATA = {                                 # of a place: the flags of train.py, and of eval.py
    "books": ("--data data/eltec", "--data data/eltec-heldout"),
    "packages": ("--data packages", "--max-docs 24"),                  # of 133 on test: as many as mini has on val
    "small-packages": (f"--data packages {HALF}", "--max-docs 12"),    # half as many, since its windows are longer
    "small-books": (f"--data data/eltec {HALF}", "--data data/eltec-heldout --max-docs 12"),
}
ALL = ("table2", "ablations", "scaling", "extensions", "precision")    # what the grid `all` stands for

def flags_of(variant, seed=0, preset=tuned.PRESET):
    """The flags of train.py of a run; ramp: one over the paper's theta, four contexts."""
    return VARIANTS[variant].format(seed=seed, ramp=4 * PRESETS[preset].model.context)

def preset_of(grid):
    """The preset of a grid, if none is asked for."""
    return GRIDS[grid].preset if grid in GRIDS else tuned.PRESET

def place_of(grid, preset):
    """The folder under runs/ and results/ of a grid: its own, or its preset's."""
    if grid == "tasks":
        return task_grid.PLACE
    return tuned.PRESET if grid == "tuned" else (grid in GRIDS and GRIDS[grid].place) or preset
