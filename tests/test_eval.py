"""Losses against an independent loop, targets counted, and what the user sees."""

import contextlib
import json
import math
import multiprocessing
import re
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import tqdm
from conftest import TINY, command, refused

import data
from common import load_model
from lab import attention, bench
from lab.files import read_json, write_json
from past.cache import Cache
from past.reading import load


@pytest.fixture(scope="module")
def windowed(workplace, tokens):
    """A run whose blocks 2 and 4 have no encoding, and the others a window of 8 keys."""
    flags = ["--pe", "expe", "--nope-every", "2", "--window", "8", *TINY, "--steps", "2", "--data", tokens]
    done = command("train.py", *flags, "--out", "windowed", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return "windowed"


def loss_in_loops(run, tokens, length, longest, sinks_and_window=None, n_documents=None, **scaling):
    """Document by document and window by window, from the plain model's logits; or as streams, token by token."""
    model, record = load(run)
    model.scale_to(length, **scaling)
    if not scaling and not sinks_and_window:
        model, _ = load_model(run)
    total, count = 0.0, 0
    stream = data.open_split(tokens, "val").tolist()
    starts = [i for i, token in enumerate(stream) if token == record["data"]["eot"]]
    for start, end in list(zip(starts, [*starts[1:], len(stream)], strict=True))[:n_documents]:
        document = stream[start:end]
        usable = (len(document) - 1) // longest * longest
        windows = [document[first : first + length + 1] for first in range(0, usable, length)]
        if not windows:
            continue
        windows = torch.tensor(windows)  # (windows, length + 1)
        with torch.no_grad():
            if sinks_and_window:
                cache = Cache(*sinks_and_window)
                logits = torch.cat([model(token, cache=cache) for token in windows[:, :-1].split(1, dim=1)], 1)
            else:
                logits = torch.cat([model(window[None, :-1]) for window in windows])
        losses = -torch.log_softmax(logits.double(), -1).gather(-1, windows[:, 1:, None])
        total, count = total + losses.sum().item(), count + losses.numel()
    return total / count, count


@pytest.mark.parametrize("pe", ["expe", "rope"])
def test_losses_equal_an_independent_loop_and_targets_are_the_same_at_every_length(workplace, tokens, pe):
    done = command("eval.py", f"runs/{pe}", "--lengths", "16,64,128", "--json", f"{pe}.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    rows = json.loads((workplace / f"{pe}.json").read_text())
    assert [row["length"] for row in rows] == [16, 64, 128] and len({row["n_targets"] for row in rows}) == 1
    for row in rows:
        loss, count = loss_in_loops(workplace / "runs" / pe, tokens, row["length"], 128)
        assert row["n_targets"] == count and row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert (row["run"], row["pe"], row["protocol"], row["trained_length"]) == (f"runs/{pe}", pe, "nonoverlap", 16)
        assert row["scale"] == 1.0 and row["rope_scaling"] == "none"
        assert f"{loss:.3f}" in done.stdout
    assert f"{rows[0]['n_documents']} documents, {rows[0]['n_targets']:,} targets at every length" in done.stdout


def test_all_runs_in_sorted_rows_with_a_dash_past_the_learned_table_and_a_picture(workplace):
    done = command("eval.py", "--plot", "loss.png", "--json", "all.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("loss, nats a token")[1].split("perplexity")[0].splitlines()
    assert table[1].split() == ["run", "pe", "16", "32", "64", "128", "256"]
    assert [line.split()[0] for line in table[2:5]] == ["runs/expe", "runs/learned", "runs/rope"]
    assert all(line.split()[2].endswith("*") and line.count("*") == 1 for line in table[2:5])
    assert table[3].split()[3:] == ["-", "-", "-", "-"]
    rows = json.loads((workplace / "all.json").read_text())
    assert len(rows) == 15 and [row["loss"] for row in rows if row["pe"] == "learned"][1:] == [None] * 4
    assert len({row["n_targets"] for row in rows if row["loss"] is not None}) == 1
    assert (workplace / "loss.png").read_bytes().startswith(b"\x89PNG")


def longer_run(workplace, tokens):
    """A run of rope, of 9 steps where the others have 8, with a name that is long."""
    name = "runs-of-others/a-name-that-leaves-little-room-s0"
    if not (workplace / name).exists():
        flags = ["--pe", "rope", *TINY, "--steps", "9", "--data", tokens]
        assert command("train.py", *flags, "--out", name, cwd=workplace).returncode == 0
    return name


def test_tokens_trained_are_a_column_where_they_differ(workplace, tokens):
    name = longer_run(workplace, tokens)
    rows, printed = rows_of(workplace, "runs/expe", name, "--lengths", "16,64")
    assert {(row["run"], row["trained_tokens"]) for row in rows} == {("runs/expe", 8 * 64), (name, 9 * 64)}
    heading, *lines = printed.split("(* trained length)\n")[1].splitlines()[:3]
    assert heading.split() == ["run", "pe", "tokens", "16", "64"]
    assert [line.split()[:3] for line in lines] == [["runs/expe", "expe", "512"], [name, "rope", "576"]]
    _, printed = rows_of(workplace, "runs/expe", "runs/rope", "--lengths", "16,64")
    assert "512" not in printed and "tokens  " not in printed


@pytest.mark.parametrize("measure", ["--protocol=same-targets", "--probe=swap", "--protocol=nonoverlap"])
def test_tables_fit_the_terminal_and_say_the_same(workplace, tokens, monkeypatch, measure):
    said, runs = {}, ["runs/expe", longer_run(workplace, tokens)]
    for width in ("80", "300"):
        monkeypatch.setenv("COLUMNS", width)
        rows, said[width] = rows_of(workplace, *runs, measure)
        tables = said[width].split("\n\n")[1:]
        assert all(len(line) <= int(width) for table in tables for line in table.splitlines())
    numbers = [sorted(re.findall(r"[+-]?\d+\.\d{3}\*?", text.split("\n\n", 1)[1])) for text in said.values()]
    assert numbers[0] == numbers[1] and len(numbers[0]) > 8
    key = {"swap": "gain", "same-targets": "over_1x"}.get(rows[0]["protocol"])
    for row in (row for row in rows if row.get(key)):  # a line a run, and below it a line a length
        block = said["80"].split("(* trained length)" if key is None else "95% interval")[1].split(f"{row['run']} ")[1]
        value = next(line for line in block.splitlines() if line.split()[:1] == [f"{row['length']:,}"])
        assert value.endswith("{:+.3f} ({:+.3f} {:+.3f})".format(*row[key]))


def test_a_bar_over_all_runs_is_told_of_every_token_that_is_read(workplace, monkeypatch):
    told = {"read": 0, "runs": []}

    class Bar(contextlib.nullcontext):
        disable = False

        def __init__(self, total, **how):
            super().__init__(self)
            told["total"] = total

        def update(self, n):
            told["read"] += n

        def set_description(self, text):
            told["runs"].append((text, told["read"]))

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    flags = ["--lengths", "16,64", "--max-docs", "2", "--dtype", "fp32,bf16"]
    rows, printed = rows_of(workplace, "runs/expe", "runs/rope", *flags)
    each = sum(row["n_targets"] for row in rows if row["run"] == "runs/expe")  # nonoverlap scores all that it reads
    assert told == {"total": 2 * each, "read": 2 * each,
                    "runs": [("run 1 of 2, runs/expe", 0), ("run 2 of 2, runs/rope", each)]}  # fmt: skip
    assert re.search(rf"^2 runs, {2 * each:,} tokens to read, about [0-9:]+:[0-9]{{2}}$", printed, re.M)


def test_without_a_terminal_each_run_has_a_line(workplace):
    _, printed = rows_of(workplace, "runs/expe", "runs/rope", "--lengths", "16", "--max-docs", "2")
    lines = printed.splitlines()[:3]
    n = int(lines[0].split()[2].replace(",", "")) // 2
    assert lines[0].startswith(f"2 runs, {2 * n:,} tokens to read, about 0:")
    assert lines[1:] == [f"run 1 of 2, runs/expe: scoring {n:,} tokens ...",
                     f"run 2 of 2, runs/rope: scoring {n:,} tokens ..."]  # fmt: skip


def test_other_text_is_scored_with_the_runs_own_tokenizer(workplace, tokens, tmp_path):
    meta = data.read_meta(tokens)
    encoding = data.load_tokenizer(tokens / "tokenizer.tiktoken")
    for i, document in enumerate(data.split_documents(data.open_split(tokens, "val"), meta["eot"])):
        (tmp_path / f"{i:03}.txt").write_text(encoding.decode(document[1:].tolist()), encoding="utf-8")
    values = []
    for more in ([], ["--data", tokens], ["--data", tmp_path]):
        done = command("eval.py", "runs/expe", "--lengths", "16,32", "--json", "x.json", *more, cwd=workplace)
        assert done.returncode == 0, done.stderr
        values.append([(row["loss"], row["n_targets"]) for row in json.loads((workplace / "x.json").read_text())])
    assert values[0] == values[1]
    np.testing.assert_allclose(values[0], values[2], rtol=1e-6)


def test_the_source_of_the_training_text_is_scored_on_its_held_out_part_alone(workplace, books):
    done = command("eval.py", "runs/expe", "--lengths", "16", "--data", books, "--json", "x.json", cwd=workplace)
    own = command("eval.py", "runs/expe", "--lengths", "16", "--json", "y.json", cwd=workplace)
    assert done.returncode == own.returncode == 0
    rows = [json.loads((workplace / name).read_text())[0] for name in ("x.json", "y.json")]
    assert rows[0]["loss"] == rows[1]["loss"] and rows[0]["n_documents"] == rows[1]["n_documents"]


def test_a_damaged_tokenizer_is_named(workplace, tmp_path):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    (tmp_path / "a.txt").write_text("some text " * 50)
    path = tmp_path / "run" / "tokenizer.tiktoken"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-20]))
    line = refused(command("eval.py", "run", "--data", "a.txt", "--lengths", "16", cwd=tmp_path))
    assert "run/tokenizer.tiktoken has not the size and hash that were recorded" in line


def test_the_test_split_and_fewer_documents(workplace):
    counts = []
    for more in ([], ["--split", "test"], ["--max-docs", "1"]):
        done = command("eval.py", "runs/expe", "--lengths", "16", "--json", "x.json", *more, cwd=workplace)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads((workplace / "x.json").read_text())[0]["n_documents"])
    assert counts[2] == 1 and len(set(counts)) > 1


def test_no_document_long_enough_names_the_longest_usable_length(workplace, tokens):
    meta = data.read_meta(tokens)
    longest = max(len(d) - 1 for d in data.split_documents(data.open_split(tokens, "val"), meta["eot"]))
    line = refused(command("eval.py", "runs/expe", "--lengths", 16 * 4096, cwd=workplace))
    assert "no held-out document has 65,536 tokens" in line and f"the longest usable one is {longest:,}" in line
    exact = command("eval.py", "runs/expe", "--lengths", longest, cwd=workplace)
    assert exact.returncode == 0 and "1 document, " in exact.stdout


# ---- other positions -------------------------------------------------------------------------------------------------


def test_scaled_rows_equal_an_independent_loop_and_take_what_each_encoding_has(workplace, tokens):
    done = command(
        "eval.py", "runs/expe", "runs/rope", "runs/learned", "--lengths", "16,64", "--json", "s.json", "--plot",
        "s.png", "--max-docs", "3", "--scale", "1,0.5,auto", "--rope-scaling",
        "none,linear,ntk,dynamic,yarn,dual-chunk", cwd=workplace,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((workplace / "s.json").read_text())
    ways = {}
    for row in rows:
        ways.setdefault(row["run"], []).append((row["how"], row["length"]))
    assert {run: len(pairs) for run, pairs in ways.items()} == {"runs/expe": 12, "runs/rope": 12, "runs/learned": 2}
    assert [how for how, length in ways["runs/rope"] if length == 16] == [
        "", "linear auto", "ntk auto", "dynamic auto", "yarn auto", "dual-chunk"
    ]  # fmt: skip
    assert [how for how, length in ways["runs/expe"] if length == 16] == [
        "", "dual-chunk", "scale 0.5", "scale 0.5, dual-chunk", "scale auto", "scale auto, dual-chunk"
    ]  # fmt: skip
    by_way = {(row["run"], row["how"], row["length"]): row for row in rows}
    for run, how, scaling in (
        ("expe", "scale 0.5", {"scale": 0.5}),
        ("expe", "scale auto", {"scale": 0.25}),
        ("rope", "yarn auto", {"rope_scaling": "yarn", "factor": 4.0}),
        ("rope", "dual-chunk", {"rope_scaling": "dual-chunk", "chunk": 12}),
    ):
        row = by_way[f"runs/{run}", how, 64]
        loss, _ = loss_in_loops(workplace / "runs" / run, tokens, 64, 64, n_documents=3, **scaling)
        assert row["loss"] == pytest.approx(loss)
        assert row["scale"] == scaling.get("scale", 1.0) and row["rope_scaling"] == scaling.get("rope_scaling", "none")
        assert row["loss"] != by_way[f"runs/{run}", "", 64]["loss"] and f"{how} " in done.stdout
    for how in ("linear auto", "ntk auto", "dynamic auto", "yarn auto"):  # nothing changes at the trained length
        assert by_way["runs/rope", how, 16]["loss"] == pytest.approx(by_way["runs/rope", "", 16]["loss"], rel=1e-6)
    assert len({row["loss"] for row in rows if row["run"] == "runs/rope" and row["length"] == 64}) == 6


def test_a_factor_holds_at_every_length(workplace, tokens):
    done = command(
        "eval.py", "runs/rope", "--lengths", "16,64", "--rope-scaling", "linear", "--factor", "2", "--json", "f.json",
        "--max-docs", "3", cwd=workplace,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in json.loads((workplace / "f.json").read_text()):
        loss, _ = loss_in_loops(
            workplace / "runs/rope", tokens, row["length"], 64, n_documents=3, rope_scaling="linear", factor=2.0
        )
        assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["factor"] == 2.0


def test_streaming_equals_an_independent_loop(workplace, tokens):
    flags = ["--lengths", "16,64", "--json", "t.json", "--max-docs", "2"]
    done = command(
        "eval.py", "runs/expe", "runs/rope", "runs/learned", "--protocol", "streaming", "--sinks", "2",
        "--window", "13", *flags, cwd=workplace,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((workplace / "t.json").read_text())
    for row in rows:
        assert row["protocol"] == "streaming"
        if row["pe"] == "learned":
            assert row["loss"] is None
            continue
        loss, count = loss_in_loops(workplace / row["run"], tokens, row["length"], 64, (2, 13), n_documents=2)
        assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["n_targets"] == count
    plain = command("eval.py", "runs/expe", *flags, cwd=workplace)
    assert plain.returncode == 0
    first, second = json.loads((workplace / "t.json").read_text())
    assert first["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)  # the window is not full yet
    assert second["loss"] != pytest.approx(rows[1]["loss"], rel=1e-4)


def test_windows_and_blocks_without_an_encoding_are_scored_and_streamed(workplace, windowed, tokens):
    for stream, flags in ((None, []), ((2, 13), ["--protocol", "streaming", "--sinks", "2", "--window", "13"])):
        rows, _ = rows_of(workplace, windowed, *flags, "--lengths", "16,64", "--max-docs", "2")
        for row in rows:
            loss, count = loss_in_loops(workplace / windowed, tokens, row["length"], 64, stream, n_documents=2)
            assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["n_targets"] == count
    model, _ = load_model(workplace / windowed)
    seen, x = torch.randint(300, (1, 40)), [model.hidden, load(workplace / windowed)[0].hidden]
    with torch.no_grad():
        torch.testing.assert_close(x[0](seen), x[1](seen))


# Of an encoding in a config.json up to commit 120e1f5, null where it is another encoding's.
OLD_FIELDS = ("l", "start", "theta", "theta1", "theta2", "constant", "once", "on", "learn", "base", "buckets",
              "max_distance", "scale", "rope_scaling", "factor", "length", "chunk")


def test_runs_made_by_earlier_versions_are_evaluated_and_resumed(workplace, tmp_path):
    for pe in ("expe", "learned", "rope"):
        run = tmp_path / pe
        shutil.copytree(workplace / "runs" / pe, run)
        record = read_json(run / "config.json")
        encoding = record["model"]["encoding"]
        record["model"]["encoding"] = {"pe": pe} | {name: encoding.get(name) for name in OLD_FIELDS} | {"chunk": 0}
        assert record["model"].pop("nope_every") == record["model"].pop("window") == 0
        write_json(run / "config.json", record)
        for flags in ([], ["--protocol", "same-targets"]):
            (old, _), (new, _) = (rows_of(workplace, x, *flags, "--lengths", "16,64") for x in (run, f"runs/{pe}"))
            assert [row | {"run": pe} for row in old] == [row | {"run": pe} for row in new] and old[0]["loss"] > 1
        done = command("train.py", "--out", run, "--resume", cwd=tmp_path)
        assert done.returncode == 0 and "complete: 8 of 8 steps" in done.stdout, done.stderr


# ---- the same targets, probes, precisions ----------------------------------------------------------------------------


def rows_of(workplace, *flags):
    """What eval.py writes for these flags."""
    done = command("eval.py", *flags, "--json", "rows.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return json.loads((workplace / "rows.json").read_text()), done.stdout


def last_losses(workplace, tokens, run, begin, n, change=lambda document, d: document):
    """{document: the losses of its last n targets}, each seen from begin(target's index in the document) on."""
    model, record = load_model(workplace / "runs" / run)  # the plain GPT
    documents = [d.tolist() for d in data.split_documents(data.open_split(tokens, "val"), record["data"]["eot"])]
    found = {}
    for d, document in enumerate([document for document in documents if len(document) > 64]):
        found[d] = []
        for i in range(len(document) - n, len(document)):
            seen = change(document, d)[begin(i, len(document)) : i]
            with torch.no_grad():
                logits = model(torch.tensor([seen]))[0, -1].double()
            found[d].append(-torch.log_softmax(logits, -1)[document[i]].item())
    return found


def test_same_targets_and_sliding_equal_a_loop_over_targets(workplace, tokens):
    flags = ["--protocol", "same-targets", "--lengths", "16,64", "--targets", "8"]
    rows, printed = rows_of(workplace, "runs/expe", *flags)
    assert [(row["protocol"], row["length"]) for row in rows] == [
        ("same-targets", 16), ("same-targets", 64), ("sliding", 16)
    ]  # fmt: skip
    assert len({(row["n_targets"], row["targets_sha256"]) for row in rows}) == 1
    begins = (
        lambda i, end: end - 17,
        lambda i, end: end - 65,
        lambda i, end: end - 4 - 17 if i < end - 4 else end - 17,  # two groups of a stride of 4 = 16/4
    )
    for row, begin in zip(rows, begins, strict=True):
        found = last_losses(workplace, tokens, "expe", begin, 8)
        means = [sum(x) / 8 for x in found.values()]
        assert row["n_targets"] == 8 * len(found) and row["n_documents"] == len(found)
        np.testing.assert_allclose(row["unit_losses"], means, atol=2e-5)
        assert row["loss"] == pytest.approx(sum(means) / len(means), abs=1e-5)
    one, four, sliding = (np.array(row["unit_losses"]) for row in rows)
    assert rows[1]["over_1x"][0] == pytest.approx((four - one).mean(), abs=1e-5)
    assert rows[1]["over_sliding"][0] == pytest.approx((four - sliding).mean(), abs=1e-5)
    assert rows[1]["over_1x"][1] < rows[1]["over_1x"][0] < rows[1]["over_1x"][2]
    assert "{:+.3f} ({:+.3f} {:+.3f})".format(*rows[1]["over_1x"]) in printed


def test_two_runs_are_compared_on_the_same_documents(workplace):
    rows, printed = rows_of(workplace, "runs/expe", "runs/rope", "--protocol", "same-targets", "--lengths", "16,32")
    at = {(row["run"], row["protocol"], row["length"]): row for row in rows}
    expe, rope = at["runs/expe", "same-targets", 32], at["runs/rope", "same-targets", 32]
    value = expe["minus"]["runs/rope"]
    assert value[0] == pytest.approx(expe["loss"] - rope["loss"], abs=1e-5) and rope["minus"] == {}
    spread = np.std(np.subtract(expe["unit_losses"], rope["unit_losses"])) / math.sqrt(expe["n_documents"])
    assert value[2] - value[1] == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert "runs/expe - runs/rope" in printed and "{:+.3f} ({:+.3f} {:+.3f})".format(*value) in printed


def test_the_gain_of_swap_equals_a_loop_with_another_documents_tokens(workplace, tokens):
    rows, printed = rows_of(workplace, "runs/expe", "--probe", "swap", "--lengths", "16,64", "--targets", "4")
    assert rows[0]["loss"] is None and rows[1]["protocol"] == "swap"
    _, record = load_model(workplace / "runs" / "expe")
    documents = data.split_documents(data.open_split(tokens, "val"), record["data"]["eot"])
    documents = [document.tolist() for document in documents if len(document) > 64]

    def swapped(document, d):
        other = documents[(d + 1) % len(documents)]
        return document[: len(document) - 65] + other[-45:] + document[len(document) - 20 :]

    own = last_losses(workplace, tokens, "expe", lambda i, end: end - 65, 4)
    other = last_losses(workplace, tokens, "expe", lambda i, end: end - 65, 4, swapped)
    gains = [np.mean(other[d]) - np.mean(own[d]) for d in own]
    assert rows[1]["gain"][0] == pytest.approx(np.mean(gains), abs=1e-5)
    assert rows[1]["won"] == np.mean(np.array(gains) > 0) and rows[1]["without"] > 0
    assert "gain, with its 95% interval" in printed


@pytest.mark.parametrize("probe", ["repeat", "passkey"])
def test_probes_have_a_table_and_a_picture(workplace, probe):
    flags = ["--probe", probe, "--lengths", "64,256", "--plot", "p.svg"]
    rows, printed = rows_of(workplace, "runs/expe", "runs/rope", *flags)
    assert len(rows) == 4 and all(row["gain"][1] <= row["gain"][0] <= row["gain"][2] for row in rows)
    assert all(row["without"] - row["loss"] == pytest.approx(row["gain"][0], abs=1e-6) for row in rows)
    assert "runs/rope" in printed and "<svg" in (workplace / "p.svg").read_text()


def test_loss_by_position_averages_to_the_loss(workplace):
    rows, printed = rows_of(workplace, "runs/expe", "--lengths", "16,64", "--per-position", "--plot", "position.png")
    for row in rows:
        assert len(row["by_position"]) == row["length"] // 2 and row["block"] == 2
        assert np.mean(row["by_position"]) == pytest.approx(row["loss"], abs=1e-5)
    half = sum(rows[1]["by_position"][16:]) / 16  # positions 32 .. 63
    assert "loss at positions up to n" in printed and f"{half:.3f}" in printed.split("loss at positions")[1]


def test_precisions_round_what_they_say(workplace):
    rows, _ = rows_of(workplace, "runs/expe", "--lengths", "64", "--dtype", "fp32,bf16,fp16,int8", "--max-docs", "3")
    losses = {row["dtype"]: row["loss"] for row in rows}
    assert [row["how"] for row in rows] == ["", "bf16", "fp16", "int8"] and len(set(losses.values())) == 4
    assert all(abs(loss - losses["fp32"]) < 0.02 for loss in losses.values())
    exact, rounded = (load(workplace / "runs" / "expe", dtype=dtype)[0] for dtype in ("fp32", "int8"))
    for name, w in exact.named_parameters():
        found = rounded.get_parameter(name)
        if w.ndim == 2:  # whole multiples, from -127 to 127, of a step a row, none further from its number than half
            w, found = w.detach().double(), found.detach().double()
            step = w.abs().amax(1, keepdim=True) / 127
            levels = found / step
            assert (levels - levels.round()).abs().max() < 1e-4 and levels.round().abs().max() == 127
            assert ((found - w).abs() <= step * (0.5 + 1e-4)).all() and not torch.equal(found, w)
        else:
            assert torch.equal(found, w)


def test_a_loss_that_is_not_finite_is_called_so(workplace):
    """fp16 ends at 65,504, and so before these rows do."""
    done = command("eval.py", "runs/expe", "--dtype", "fp16", "--scale", "1e6", "--lengths", "16,64", "--per-position",
                   "--json", "none.json", cwd=workplace)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("not finite") == 4, done.stdout + done.stderr
    assert "NaN" not in (workplace / "none.json").read_text()  # which is no JSON


@pytest.mark.parametrize("run", ["runs/expe", "runs/rope", "windowed"])
def test_attention_is_what_the_outputs_are_made_of(workplace, windowed, run):
    """The weights are causal, sum to 1, and are those of the fused kernel: W_v and W_proj make the same sum of them."""
    model, _ = attention.load_watched(workplace / run)
    tokens = torch.arange(40)[None] % 300
    weights = attention.weights_of(model, tokens)
    assert weights.shape == (4, 1, 4, 40, 40) and not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1, 4, 40))
    assert torch.equal(weights, weights.tril())
    if run == windowed:  # and blocks 2 and 4 see all
        assert torch.equal(weights[::2], weights[::2].triu(-7)) and (weights[1::2].tril() > 0).sum() == 2 * 4 * 820
    plain, seen = load_model(workplace / run)[0], {}
    block = plain.blocks[0]
    handles = [block.attn.register_forward_hook(lambda module, inputs, out: seen.update(h=inputs[0], out=out))]
    with torch.no_grad():
        plain.hidden(tokens)
        v = (seen["h"] @ block.attn.qkv.weight[256:].T).unflatten(-1, (4, 32)).transpose(1, 2)
        y = (weights[0] @ v).transpose(1, 2).flatten(2) @ block.attn.proj.weight.T
    handles[0].remove()
    torch.testing.assert_close(y, seen["out"], rtol=1e-4, atol=1e-5)
    done = command("lab.attention", run, "--out", "a.png", "--lengths", "16,64", cwd=workplace)
    assert done.returncode == 0 and (workplace / "a.png").read_bytes().startswith(b"\x89PNG"), done.stderr


@pytest.mark.parametrize("line, message", [
    ("runs/learned --out a.png --lengths 16,64", "runs/learned has positions for 16 tokens, and not for 64"),
    ("runs/rope --out a.png --json b.json", "unrecognized arguments: --json b.json"),
    ("--out a.png", "the following arguments are required: RUN"),
    ("runs/rope --out a.bmp", "'a.bmp' must end in .png, .svg or .pdf"),
    ("runs/rope runs/expe --out a.png", "unrecognized arguments: runs/expe"),
])
def test_what_attention_cannot_draw_is_named_in_one_line(workplace, line, message):
    assert message in refused(command("lab.attention", *line.split(), cwd=workplace))


@pytest.mark.parametrize(
    "line, message",
    [
        ("runs/rope --scale 0.5", "runs/rope: scale is for expe and exqpe, and rope has no use for it"),
        ("runs/expe runs/rope --scale 0", "scale must be above 0 and at most 1e6, got 0"),
        ("runs/expe runs/learned --rope-scaling none,yarn", "rope_scaling is for rope, and expe has no use for it"),
        ("runs/rope --rope-scaling none,cubic", "--rope-scaling: 'cubic' is not one of none, linear, ntk, dynamic"),
        ("runs/rope --rope-scaling dual-chunk --chunk 16", "chunk must be from 1 to 15, got 16"),
        ("runs/rope --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
        ("runs/rope --rope-scaling yarn --chunk 4", "--chunk is for --rope-scaling dual-chunk"),
        ("runs/rope --rope-scaling self-extend --factor 1/2", "factor must be a whole number of at least 1 for self"),
        ("runs/expe --rope-scaling llama3", "rope_scaling is for rope, and expe has no use for it"),
        ("runs/rope --rope-scaling longrope", "runs/rope: longrope needs the length of the whole sequence"),
        ("runs/rope --rope-scaling longrope --long-factors 1,2", "and D/2 = 16 numbers each, long and short; got"),
        ("runs/rope --rope-scaling longrope --long-factors 1,0", "long must be numbers above 0, got (1.0, 0.0)"),
        ("runs/rope --rope-scaling longrope --long-factors 1,x", "--long-factors: 'x' is not a number"),
        ("runs/rope --rope-scaling yarn --long-factors 1,2", "--long-factors is for --rope-scaling longrope"),
        ("runs/learned --protocol streaming", "learned cannot stream as trained here"),
        ("runs/rope --sinks 4", "--sinks has no use with --protocol nonoverlap: leave it out"),
        ("runs/rope --protocol streaming --window 0", "--window: must be at least 1, got 0"),
        ("runs/rope --protocol same-targets --targets 17", "--targets must be from 1 to 16, the shortest length, got"),
        ("runs/rope --protocol sliding --stride 0", "--stride: must be at least 1, got 0"),
        ("runs/rope --targets 4", "--targets has no use with --protocol nonoverlap"),
        ("runs/rope --probe swap --per-position", "--per-position has no use with --probe swap"),
        ("runs/rope --probe swap", "swap has nothing to ask at 16 tokens, of which the trained length is 16"),
        ("runs/rope --dtype fp8", "'fp8' is not one of fp32, bf16, fp16, int8"),
    ],
)
def test_contradictory_flags_are_named_in_one_line(workplace, line, message):
    done = command("eval.py", "--lengths", "16", *line.split(), cwd=workplace)
    assert message in refused(done)


def test_llama3_longrope_and_self_extend_are_rows_of_their_own(workplace, tokens):
    lists = {"long": tuple(1 + i / 4 for i in range(16)), "short": (1.0,) * 15 + (1.5,)}
    flags = [x for name, numbers in lists.items() for x in (f"--{name}-factors", ",".join(map(str, numbers)))]
    done = command("eval.py", "runs/rope", "runs/expe", "--lengths", "16,64", "--max-docs", "3", "--json", "s.json",
                   "--rope-scaling", "none,llama3,longrope,self-extend", *flags, cwd=workplace)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((workplace / "s.json").read_text())
    rows = {(row["run"], row["how"], row["length"]): row["loss"] for row in rows}
    ways = {"": {}, "llama3 auto": {"rope_scaling": "llama3"}, "longrope auto": {"rope_scaling": "longrope", **lists},
            "self-extend auto": {"rope_scaling": "self-extend"}}  # fmt: skip
    assert {how for run, how, _ in rows if run == "runs/rope"} == {*ways}
    assert {how for run, how, _ in rows if run == "runs/expe"} == {"", "self-extend auto"}
    for how, scaling in ways.items():
        loss, _ = loss_in_loops(workplace / "runs" / "rope", tokens, 64, 64, n_documents=3, **scaling)
        assert rows["runs/rope", how, 64] == pytest.approx(loss)
    assert len({rows["runs/rope", how, 64] for how in ways}) == 4
    for how in ("llama3 auto", "self-extend auto"):
        assert rows["runs/rope", how, 16] == pytest.approx(rows["runs/rope", "", 16], rel=1e-6)
    assert rows["runs/rope", "longrope auto", 16] != rows["runs/rope", "", 16]  # by the short list


def test_a_process_does_not_inherit_its_parents_peak():
    ballast = np.ones(2**27)  # 1 GB
    del ballast
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(bench.peak_bytes).result() < 8e8 < 2**30 < bench.peak_bytes()
