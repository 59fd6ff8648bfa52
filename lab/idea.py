"""The picture of the idea: a token's row, its first numbers overwritten, and the bias of a head's scores that results.

    python -m lab.idea --out docs/idea.png

Rows and weights are drawn at random, the ramp is expe.expe_table, and the bias is that of ExPE-K (docs/explained.md):
-(m - n) s_m, with the slope s_m = q_m . w / sqrt(D) that query m chooses by its content.
"""

from cli import PICTURES, CommandLine, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np

from expe import expe_table
from lab.pictures import GREY, Figure, save

T, C, D, L = 12, 24, 8, 8                # tokens, numbers of a token, of a head, and those that are overwritten
THETA = 1 / 6

def make_example(seed=4):
    """(rows h (T, C), the same with positions (T, C), queries (T, D), W_k (D, C), bias (T, T), nan at later keys)."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(T, C))
    w_q, w_k = rng.normal(size=(2, D, C)) / C**0.5
    table = expe_table(np.arange(T), L, theta=THETA)                    # (T, L)
    phi = np.concatenate((table, h[:, L:]), axis=1)                     # the paper's equation 3
    q = h @ w_q.T                                                       # of the content alone: ExPE-K
    slopes = q @ (THETA * w_k[:, :L].sum(1)) / D**0.5                   # (T,)
    distances = np.arange(T)[:, None] - np.arange(T)
    bias = np.where(distances >= 0, -distances * slopes[:, None], np.nan)
    return h, phi, q, w_k, bias

def draw(path):
    h, phi, _, _, bias = make_example()
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(C, C, T + 4))
    titles = ("1. a token is a row of numbers", f"2. the first {L} now tell its position",
              "3. each query gets a slope")
    below = (f"{C} numbers of each token", f"{L} overwritten, the rest as it was",
             f"key 0 .. {T - 1}; grey: not seen")
    for axis, values, title, words in zip(axes, (h, phi, bias), titles, below, strict=True):
        limit = np.nanmax(np.abs(values))
        image = axis.imshow(values, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(words)
        axis.set_xticks([])
        axis.set_yticks([0, T - 1], ["query 0", f"query {T - 1}"] if values is bias else ["token 0", f"token {T - 1}"])
    axes[1].axvline(L - 0.5, color=GREY, linewidth=2)
    figure.colorbar(image, ax=axes[2]).set_ticks([-limit, 0, limit], labels=["key loses", "0", "key gains"])
    axes[2].set_facecolor("#BBBBBB")                                    # keys that a query does not see
    save(figure, path)

def main(argv=None):
    parser = CommandLine(prog="python -m lab.idea", description="Draw what ExPE does to tokens and to scores.")
    parser.add_argument("--out", type=new_file(*PICTURES), required=True, metavar="FILE", help="the picture")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        draw(args.out)
        print(f"picture: {args.out}")

if __name__ == "__main__":
    main()
