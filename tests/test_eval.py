"""Losses against an independent loop, targets counted, and what the user sees."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import command, refused

import data
from model_torch import load_model


def loss_in_loops(run, tokens, length, longest):
    """Protocol nonoverlap, document by document and window by window, from the logits."""
    model, record = load_model(run)
    total, count = 0.0, 0
    stream = data.open_split(tokens, "val").tolist()
    starts = [i for i, token in enumerate(stream) if token == record["data"]["eot"]]
    for start, end in zip(starts, [*starts[1:], len(stream)], strict=True):
        document = stream[start:end]
        usable = (len(document) - 1) // longest * longest
        for first in range(0, usable, length):
            window = document[first : first + length + 1]
            with torch.no_grad():
                logits = model(torch.tensor([window[:-1]])).double()
            picked = torch.log_softmax(logits[0], -1)[range(length), window[1:]]
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
