"""lab.measure: each protocol, probe and scaling against an independent loop, and what the user sees."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused, slow

import data
from lab.measure import stored
from lab.statistics import t_quantile
from longer.cache import Cache
from longer.reading import load
from runs import load_model


@pytest.fixture(scope="module")
def windowed(workplace, tokens):
    """A run whose blocks 2 and 4 have no encoding, and the others a window of 8 keys."""
    flags = ["--pe", "expe", "--nope-every", "2", "--window", "8", *TINY, "--steps", "2", "--data", tokens]
    done = command("train.py", *flags, "--out", "windowed", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return "windowed"


def rows_of(workplace, *flags, script="lab.measure"):
    """(rows, what is printed) by lab.measure with these flags."""
    done = command(script, *flags, "--json", "rows.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return json.loads((workplace / "rows.json").read_text()), done.stdout


def documents_of(tokens, longest):
    """The documents of val that have more tokens than `longest`, as lists."""
    eot = data.read_meta(tokens)["eot"]
    documents = [document.tolist() for document in data.split_documents(data.open_split(tokens, "val"), eot)]
    return [document for document in documents if len(document) > longest]


def loss_in_loops(run, tokens, length, sinks_and_window=None, n_documents=None, **scaling):
    """(mean loss, targets) at a length of which 64 is a multiple: window by window, or token by token in a stream."""
    model = load(run)[0].scale_to(length, **scaling) if scaling or sinks_and_window else load_model(run)[0]
    total = count = 0
    for document in documents_of(tokens, 64)[:n_documents]:
        starts = range(0, (len(document) - 1) // 64 * 64, length)
        windows = torch.tensor([document[first : first + length + 1] for first in starts])      # (windows, length + 1)
        with torch.no_grad():
            if sinks_and_window:
                cache = Cache(*sinks_and_window)
                logits = torch.cat([model(token, cache=cache) for token in windows[:, :-1].split(1, dim=1)], 1)
            else:
                logits = torch.cat([model(window[None, :-1]) for window in windows])
        losses = -torch.log_softmax(logits.double(), -1).gather(-1, windows[:, 1:, None])
        total, count = total + losses.sum().item(), count + losses.numel()
    return total / count, count


def last_losses(workplace, tokens, begin, n, change=lambda document, d: document):
    """(documents, n): losses of expe's last n targets, each seen from begin(target's index, document's size) on."""
    model, _ = load_model(workplace / "runs/expe")  # the plain GPT
    found = []
    for d, document in enumerate(documents_of(tokens, 64)):
        changed, losses = change(document, d), []
        for i in range(len(document) - n, len(document)):
            with torch.no_grad():
                logits = model(torch.tensor([changed[begin(i, len(document)) : i]]))[0, -1].double()
            losses.append(-torch.log_softmax(logits, -1)[document[i]].item())
        found.append(losses)
    return np.array(found)


# ---- the paper's protocol, and what is printed -----------------------------------------------------------------------


def test_nonoverlap_is_what_eval_py_measures(workplace):
    flags = ["runs/expe", "runs/learned", "--lengths", "16,64"]
    ours, right = (rows_of(workplace, *flags, script=script)[0] for script in ("lab.measure", "eval.py"))
    assert [row["loss"] is None for row in ours] == [False, False, False, True]
    for row, other in zip(ours, right, strict=True):
        assert row["loss"] == (other["loss"] and pytest.approx(other["loss"], rel=1e-6))
        names = ["run", "pe", "protocol", "length", "trained_length", "step", "data", "n_documents"]
        names += ["n_targets"] * (row["loss"] is not None)
        assert [row[name] for name in names] == [other[name] for name in names]


# ---- other positions and precisions ----------------------------------------------------------------------------------

LISTS = {"long": tuple(1 + i / 4 for i in range(8)), "short": (1.0,) * 7 + (1.5,)}
SCALED = {                               # flags: {run: {how: the keywords of Reader.scale_to at 64 tokens}}
    "--scale 1,0.5,auto --rope-scaling none,linear,ntk,dynamic,yarn,dual-chunk,llama3": {
        "runs/expe": {"": {}, "scale 0.5": {"scale": 0.5}, "scale auto": {"scale": 0.25},
                      "dual-chunk": {"rope_scaling": "dual-chunk", "chunk": 12},
                      "scale 0.5, dual-chunk": {"scale": 0.5, "rope_scaling": "dual-chunk"},
                      "scale auto, dual-chunk": {"scale": 0.25, "rope_scaling": "dual-chunk"}},
        "runs/rope": {"": {}, "dual-chunk": {"rope_scaling": "dual-chunk", "chunk": 12}}
        | {f"{method} auto": {"rope_scaling": method, "factor": 4.0}
           for method in ("linear", "ntk", "dynamic", "yarn", "llama3")},
        "runs/learned": {"": None}},
    "--rope-scaling linear --factor 2": {"runs/rope": {"linear 2.0": {"rope_scaling": "linear", "factor": 2.0}}},
    "--rope-scaling none,self-extend,longrope "
    + " ".join(f"--{name}-factors {','.join(map(str, numbers))}" for name, numbers in LISTS.items()): {
        "runs/rope": {"": {}, "self-extend auto": {"rope_scaling": "self-extend"},
                      "longrope auto": {"rope_scaling": "longrope", **LISTS}},
        "runs/expe": {"": {}, "self-extend auto": {"rope_scaling": "self-extend"}}},
}


FIRST, SECOND, THIRD = SCALED


@pytest.mark.parametrize("flags", [FIRST, *slow(SECOND), THIRD], ids=range(3))
def test_scaled_rows_equal_a_loop_and_each_encoding_takes_what_it_has(workplace, tokens, flags):
    rows, _ = rows_of(workplace, *SCALED[flags], "--lengths", "16,64", "--max-docs", "1", *flags.split())
    found = {(row["run"], row["how"], row["length"]): row for row in rows}
    assert found.keys() == {(run, how, length) for run in SCALED[flags] for how in SCALED[flags][run]
                            for length in (16, 64)}
    for run, ways in SCALED[flags].items():
        for how, scaling in ways.items():
            row, short = found[run, how, 64], found[run, how, 16]
            if scaling is None:  # learned has no positions there
                assert row["loss"] is None and short["loss"] > 1
                continue
            loss, _ = loss_in_loops(workplace / run, tokens, 64, n_documents=1, **scaling)
            assert row["loss"] == pytest.approx(loss, rel=1e-6)
            if how.startswith("longrope"):  # by the short list
                assert short["loss"] != found[run, "", 16]["loss"]
            elif (run == "runs/rope" or "dual-chunk" not in how) and ("auto" in how or how == "dual-chunk"):
                # nothing changes at the trained length; but chunks of 12 tokens keep distances alone, and not positions
                assert short["loss"] == pytest.approx(found[run, "", 16]["loss"], rel=1e-6)
        assert len({found[run, how, 64]["loss"] for how in ways}) == len(ways)


def with_window(workplace, run, name, **changes):
    """A copy of a run with other settings of the model in its config.json; returns its name."""
    shutil.copytree(workplace / run, workplace / name)
    path = workplace / name / "config.json"
    config = json.loads(path.read_text())
    config["model"] |= changes
    path.write_text(json.dumps(config))
    return name


def test_hidden_keys_give_the_losses_of_a_config_with_that_window(workplace, windowed, tokens):
    flags = ["--pe", "fox", *TINY, "--steps", "2", "--data", tokens, "--out", "fox"]
    assert command("train.py", *flags, cwd=workplace).returncode == 0
    runs = ["runs/rope", "runs/expe", "fox", windowed]
    copies = [with_window(workplace, run, f"{run.rpartition('/')[2]}-near", window=12) for run in runs[:3]]
    cycle = "expe:window=8,nope:window=12"
    copies.append(with_window(workplace, windowed, "windowed-near", window=0, nope_every=0, cycle=cycle))
    flags = ["--lengths", "16,64", "--max-docs", "1"]
    for more in ([], ["--protocol", "streaming", "--sinks", "2", "--window", "29"]):
        found, printed = rows_of(workplace, *runs, *flags, *more, "--keys", "12")
        right, _ = rows_of(workplace, *copies, *flags, *more)
        plain, _ = rows_of(workplace, *runs, *flags, *more)
        assert [row["loss"] for row in found] == [row["loss"] for row in right]
        assert all(row["loss"] != other["loss"] for row, other in zip(found, plain, strict=True))
        assert {row["how"] for row in found} == {"keys 12"} and printed.count(", keys 12 ") >= len(runs)
    rows, _ = rows_of(workplace, *runs[:2], *flags, "--keys", "12", "--rope-scaling", "none,yarn", "--dtype", "bf16")
    assert {row["how"] for row in rows} == {"keys 12, bf16", "yarn auto, keys 12, bf16"}
    assert {stored(row)[1]["how"] for row in rows} == {row["how"] for row in rows}


@pytest.mark.slow
def test_streaming_equals_a_loop_and_also_where_blocks_have_windows_and_no_encoding(workplace, windowed, tokens):
    runs, flags = ["runs/expe", "runs/learned", windowed], ["--lengths", "16,64", "--max-docs", "1"]
    rows, _ = rows_of(workplace, *runs, *flags, "--protocol", "streaming", "--sinks", "2", "--window", "13")
    plain, _ = rows_of(workplace, *runs, *flags)
    for kind, stream in ((rows, (2, 13)), (plain, None)):
        for row in (row for row in kind if row["loss"] is not None):
            loss, count = loss_in_loops(workplace / row["run"], tokens, row["length"], stream, n_documents=1)
            assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["n_targets"] == count
    assert [row["loss"] for row in rows if row["pe"] == "learned"] == [None, None]
    assert plain[0]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)  # the window is not full yet
    assert plain[1]["loss"] != pytest.approx(rows[1]["loss"], rel=1e-5)


def test_precisions_round_what_they_say(workplace):
    flags = ["runs/expe", "--lengths", "64", "--dtype", "fp32,bf16,fp16,int8", "--max-docs", "1"]
    losses = {row["dtype"]: row["loss"] for row in rows_of(workplace, *flags)[0]}
    assert len(set(losses.values())) == 4 and all(abs(loss - losses["fp32"]) < 0.02 for loss in losses.values())
    exact, rounded = (load(workplace / "runs" / "expe", dtype=dtype)[0] for dtype in ("fp32", "int8"))
    for name, w in exact.named_parameters():
        found = rounded.get_parameter(name)
        if w.ndim == 2:  # whole multiples, from -127 to 127, of a step for each row, none further away than half of it
            w, found = w.detach().double(), found.detach().double()
            step = w.abs().amax(1, keepdim=True) / 127
            levels = found / step
            assert (levels - levels.round()).abs().max() < 1e-4 and levels.round().abs().max() == 127
            assert ((found - w).abs() <= step * (0.5 + 1e-4)).all() and not torch.equal(found, w)
        else:
            assert torch.equal(found, w)


def test_a_loss_that_is_not_finite_is_called_so(workplace):
    """The largest number of fp16 is 65,504, and these rows are larger."""
    rows, printed = rows_of(workplace, *"runs/expe --dtype fp16 --scale 1e6 --lengths 16,64 "
                            "--max-docs 1".split())
    assert printed.count("not finite") == 2 and [row["loss"] for row in rows] == [None, None]
    assert "NaN" not in (workplace / "rows.json").read_text()  # which is no JSON


# ---- the same targets, and probes ------------------------------------------------------------------------------------


def test_same_targets_and_sliding_equal_a_loop_over_targets(workplace, tokens):
    rows, printed = rows_of(workplace, "runs/expe", "runs/rope", "--protocol", "same-targets", "--lengths", "16,64",
                            "--targets", "8")
    rows, others = rows[:3], rows[3:]
    assert [(row["protocol"], row["length"]) for row in rows] == [
        ("same-targets", 16), ("same-targets", 64), ("sliding", 16)
    ]  # fmt: skip
    assert len({(row["n_targets"], row["targets_sha256"]) for row in rows + others}) == 1
    begins = (
        lambda i, end: end - 17,
        lambda i, end: end - 65,
        lambda i, end: end - 4 - 17 if i < end - 4 else end - 17,  # two groups of a stride of 4 = 16/4
    )
    for row, begin in zip(rows, begins, strict=True):
        losses = last_losses(workplace, tokens, begin, 8)
        assert row["n_targets"] == losses.size and row["n_documents"] == len(losses)
        np.testing.assert_allclose(row["unit_losses"], losses.mean(axis=1), atol=2e-5)
        assert row["loss"] == pytest.approx(losses.mean(), abs=1e-5)
    one, four, sliding = (np.array(row["unit_losses"]) for row in rows)
    change = (four - one).mean()
    half = t_quantile(len(one) - 1) * np.std(four - one, ddof=1) / np.sqrt(len(one))
    assert f"| {change:+.3f} ±{half:.3f}" in printed and f"| {sliding.mean():.3f}" in printed
    assert "over documents alone" in printed


def test_spread_equals_a_loop_over_targets(workplace, tokens):
    rows, printed = rows_of(workplace, "runs/expe", "--protocol", "spread", "--lengths", "16,64", "--targets", "4")
    model, _ = load_model(workplace / "runs/expe")
    documents = [np.array(document) for document in documents_of(tokens, 64)]
    for row, length in zip(rows, (16, 64), strict=True):
        means = []
        for document in documents:
            room = len(document) - 1 - 64
            losses = []
            for end in np.linspace(64, len(document) - 1, min(16, room // 4 + 1)).astype(int):
                for i in range(end - 3, end + 1):
                    begin = i - 16 if length == 16 else end - 64
                    with torch.no_grad():
                        logits = model(torch.from_numpy(document[begin:i].astype(np.int64))[None])[0, -1]
                    losses.append(-torch.log_softmax(logits.double(), -1)[int(document[i])].item())
            means.append((np.mean(losses), len(losses)))
        np.testing.assert_allclose(row["unit_losses"], [mean for mean, _ in means], atol=2e-5)
        assert row["unit_targets"] == [n for _, n in means]
    assert "4x - 1x" in printed and "sliding" not in printed


def test_the_gain_of_swap_equals_a_loop_with_another_documents_tokens(workplace, tokens):
    rows, printed = rows_of(workplace, *"runs/expe --probe swap --lengths 16,64 --targets 4".split())
    assert rows[0]["loss"] is None and rows[1]["protocol"] == "swap"
    documents = documents_of(tokens, 64)

    def swapped(document, d):
        other = documents[(d + 1) % len(documents)]
        return document[: len(document) - 65] + other[-45:] + document[len(document) - 20 :]

    own, other = (last_losses(workplace, tokens, lambda i, end: end - 65, 4, *change) for change in ((), (swapped,)))
    gains = (other - own).mean(axis=1)
    assert rows[1]["gain"] == pytest.approx(gains.mean(), abs=1e-5)
    assert rows[1]["without"] == pytest.approx(other.mean(), abs=1e-5)
    assert f"| {gains.mean():.3f}" in printed and "gain, nats" in printed


@pytest.mark.parametrize("probe", ["repeat", "passkey"])
def test_probes_have_a_table_and_a_picture(workplace, probe):
    flags = ["--probe", probe, "--lengths", "64,128", "--plot", "p.svg"]
    rows, printed = rows_of(workplace, "runs/expe", "runs/rope", *flags)
    assert len(rows) == 4
    assert all(row["without"] - row["loss"] == pytest.approx(row["gain"], abs=1e-6) for row in rows)
    assert "| rope" in printed and "<svg" in (workplace / "p.svg").read_text()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ("runs/rope --scale 0.5", "--scale is for expe and exqpe, and this run has rope"),
        ("runs/expe runs/rope --scale 0", "--scale must be a finite number, above 0"),
        ("runs/expe runs/learned --rope-scaling none,yarn", "--rope-scaling yarn is for rope, and this run has expe"),
        ("runs/rope --rope-scaling none,cubic", "--rope-scaling: 'cubic' must be of none, linear, ntk, dynamic"),
        ("runs/rope --rope-scaling dual-chunk --chunk 16", "--chunk must be from 1 to 15, got 16"),
        ("runs/rope --keys 0", "--keys: must be at least 1, got 0"),
        ("runs/rope --keys -3", "--keys: must be at least 1, got -3"),
        ("runs/rope --keys 1.5", "--keys: '1.5' is not a whole number"),
        ("runs/rope --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
        ("runs/rope --rope-scaling yarn --chunk 4", "--chunk is for --rope-scaling dual-chunk"),
        ("runs/rope --rope-scaling self-extend --factor 1/2", "--factor must be a whole number of at least 1 for self"),
        ("runs/rope --rope-scaling longrope", "longrope needs --long-factors and --short-factors of D/2 = "),
        ("runs/rope --rope-scaling longrope --long-factors 1,2", "of D/2 = 8 numbers each, a trained length of 2 or"),
        ("runs/rope --rope-scaling longrope --long-factors 1,0", "--long-factors must be numbers above 0, got"),
        ("runs/rope --rope-scaling longrope --long-factors 1,x", "--long-factors: 'x' is not a number"),
        ("runs/rope --rope-scaling yarn --long-factors 1,2", "--long-factors is for --rope-scaling longrope"),
        ("runs/learned --protocol streaming", "learned cannot stream as trained here"),
        ("runs/rope --sinks 4", "--sinks has no use with --protocol nonoverlap: leave it out"),
        ("runs/rope --protocol streaming --window 0", "--window: must be at least 1, got 0"),
        ("runs/rope --protocol same-targets --targets 17", "--targets must be from 1 to 16, the shortest length, got"),
        ("runs/rope --at 0.0x", "--at: '0.0x' is not a multiple of the trained length, such as 16x"),
        ("runs/rope --protocol sliding --stride 0", "--stride: must be at least 1, got 0"),
        ("runs/rope --probe swap --stride 2", "--stride has no use with --probe swap"),
        ("runs/rope --probe swap", "swap has nothing to ask at 16 tokens, of which the trained length is 16"),
        ("runs/rope --dtype fp8", "'fp8' must be of fp32, bf16, fp16, int8"),
        ("runs/rope --lengths 16,24", "lengths must divide the longest, 24"),
        ("runs/rope --lengths 65536", "no held-out document has 65,536 tokens"),
    ],
)
def test_contradictory_flags_are_named_in_one_line(workplace, line, message):
    assert message in refused(command("lab.measure", "--lengths", "16", *line.split(), cwd=workplace))
