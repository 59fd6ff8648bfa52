"""Losses against an independent loop, targets counted, and what the user sees."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import command, process, refused

import bench
import data
from config import ENCODINGS
from model_torch import Cache, load_model


def loss_in_loops(run, tokens, length, longest, sinks_and_window=None, n_documents=None, **scaling):
    """Document by document and window by window, from the logits; or as a stream, token by token."""
    model, record = load_model(run)
    model.use(model.config.scaled(length, **scaling))
    total, count = 0.0, 0
    stream = data.open_split(tokens, "val").tolist()
    starts = [i for i, token in enumerate(stream) if token == record["data"]["eot"]]
    for start, end in list(zip(starts, [*starts[1:], len(stream)], strict=True))[:n_documents]:
        document = stream[start:end]
        usable = (len(document) - 1) // longest * longest
        for first in range(0, usable, length):
            window = document[first : first + length + 1]
            with torch.no_grad():
                if sinks_and_window:
                    cache = Cache(*sinks_and_window)
                    logits = torch.cat([model(torch.tensor([[token]]), cache=cache) for token in window[:-1]], 1)
                else:
                    logits = model(torch.tensor([window[:-1]]))
            picked = torch.log_softmax(logits[0].double(), -1)[range(length), window[1:]]
            total, count = total - picked.sum().item(), count + length
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


def test_other_text_is_scored_with_the_runs_own_tokenizer(workplace, tokens, tmp_path):
    meta = data.read_meta(tokens)
    encoding = data.load_tokenizer(tokens / "tokenizer.tiktoken", meta["pattern"])
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
    assert "run/tokenizer.tiktoken has not the size and hash that config.json says" in line


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
    assert exact.returncode == 0 and "1 documents" in exact.stdout


# ---- other ways of laying positions ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "line, message",
    [
        ("runs/rope --scale 0.5", "runs/rope: scale is for expe and exqpe, and rope has no use for it"),
        ("runs/expe runs/rope --scale 0", "scale must be above 0 and at most 1e6, got 0"),
        ("runs/expe runs/learned --rope-scaling none,yarn", "rope_scaling is for rope, and expe has no use for it"),
        ("runs/rope --rope-scaling none,cubic", "--rope-scaling: 'cubic' is not one of none, linear, ntk, dynamic"),
        ("runs/rope --rope-scaling dual-chunk --chunk 16", "chunk must be below the trained length, 16, got 16"),
        ("runs/rope --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
        ("runs/rope --rope-scaling yarn --chunk 4", "--chunk is for --rope-scaling dual-chunk"),
        ("runs/learned --protocol streaming", "learned cannot stream as trained here"),
        ("runs/rope --sinks 4", "--sinks and --window are for --protocol streaming"),
        ("runs/rope --protocol streaming --window 0", "--window must be at least 1, got 0"),
    ],
)
def test_contradictory_flags_are_named_in_one_line(workplace, line, message):
    done = command("eval.py", *line.split(), "--lengths", "16", cwd=workplace)
    assert message in refused(done)


def fat(pipe):
    pipe.send(bench.peak_bytes())


def test_a_process_does_not_inherit_its_parents_peak():
    ballast = np.ones(2**27)  # 1 GB
    del ballast
    pipe, process = bench.start(fat)
    assert bench.receive(pipe) < 8e8 < 2**30 < bench.peak_bytes()
    process.join()


def test_the_decision_table_describes_runs_and_encodings_without_one(workplace):
    done = process("bench.py", "--table", "runs/expe", "runs/rope", "--json", "d.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    rows = {row["pe"]: row for row in json.loads((workplace / "d.json").read_text())}
    assert list(rows) == list(ENCODINGS)
    assert {pe: row["extra_parameters"] for pe, row in rows.items() if row["extra_parameters"]} == {
        "learned": 128 * 128, "t5": 32 * 4, "shaw": 2 * 17 * 32
    }  # fmt: skip
    assert {pe for pe, row in rows.items() if not row["streams"]} == {"sinusoidal", "learned"}
    assert all(row["cache_bytes_a_token"] == 4 * 2 * 128 * 4 for row in rows.values())  # blocks, k and v, width, fp32
    assert rows["nope"]["extra_operations_a_token"] == 0
    # sinusoidal: one sum a number of the residual stream; rope: q and k, two products, a sum and a copy of each number
    assert rows["sinusoidal"]["extra_operations_a_token"] == 128
    assert rows["rope"]["extra_operations_a_token"] == 4 * 2 * 5 * 128
    assert rows["rope"]["scaled_by"] == ["linear", "ntk", "dynamic", "yarn", "dual-chunk"]
    assert rows["t5"]["scaled_by"] == []
    assert rows["expe"]["scaled_by"] == ["scale", "dual-chunk"] and rows["learned"]["peak_bytes_at_16x"] is None
    line = command("eval.py", "runs/expe", "--json", "e.json", cwd=workplace)
    assert line.returncode == 0
    losses = [row["loss"] for row in json.loads((workplace / "e.json").read_text())]
    assert (rows["expe"]["loss_1x"], rows["expe"]["loss_16x"]) == pytest.approx((losses[0], losses[-1]))
    assert "no run, and so no loss: train with make train" in done.stdout and f"{losses[-1]:.3f}" in done.stdout
