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


# ---- the same targets, probes, precisions ----------------------------------------------------------------------------


def rows_of(workplace, *flags):
    """What eval.py writes for these flags."""
    done = command("eval.py", *flags, "--json", "rows.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return json.loads((workplace / "rows.json").read_text()), done.stdout


def last_losses(workplace, tokens, run, begin, n, change=lambda document, d: document):
    """{document: the losses of its last n targets}, each seen from begin(target's index in the document) on."""
    model, record = load_model(workplace / "runs" / run)
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
    exact, rounded = (load_model(workplace / "runs" / "expe", dtype=dtype)[0] for dtype in ("fp32", "int8"))
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


@pytest.mark.parametrize("run", ["expe", "rope"])
def test_attention_is_what_the_outputs_are_made_of(workplace, run):
    """The weights are causal, sum to 1, and are those of the fused kernel: W_v and W_proj make the same sum of them."""
    model, _ = load_model(workplace / "runs" / run)
    tokens = torch.arange(40)[None] % 300
    weights = model.attention(tokens)
    assert weights.shape == (4, 1, 4, 40, 40) and not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1, 4, 40))
    assert torch.equal(weights, weights.tril())
    block, seen = model.blocks[0], {}
    handles = [block.attn.register_forward_hook(lambda module, inputs, out: seen.update(h=inputs[0], out=out))]
    with torch.no_grad():
        model.hidden(tokens)
        v = (seen["h"] @ block.attn.qkv.weight[256:].T).unflatten(-1, (4, 32)).transpose(1, 2)
        y = (weights[0] @ v).transpose(1, 2).flatten(2) @ block.attn.proj.weight.T
    handles[0].remove()
    torch.testing.assert_close(y, seen["out"], rtol=1e-4, atol=1e-5)
    done = command("eval.py", f"runs/{run}", "--attention", "a.png", "--lengths", "16,64", cwd=workplace)
    assert done.returncode == 0 and (workplace / "a.png").read_bytes().startswith(b"\x89PNG")


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
        ("runs/learned --attention a.png --lengths 16,64", "runs/learned has positions for 16 tokens, and not for 64"),
        ("runs/rope --attention a.png --json b.json", "--json has no use with --attention"),
        ("runs/rope --sinks 4", "--sinks has no use with --protocol nonoverlap: leave it out"),
        ("runs/rope --protocol streaming --window 0", "--window must be at least 1, got 0"),
        ("runs/rope --protocol same-targets --targets 17", "--targets must be from 1 to 16, the shortest length, got"),
        ("runs/rope --protocol sliding --stride 0", "--stride must be from 1 to 16, the shortest length, got 0"),
        ("runs/rope --targets 4", "--targets has no use with --protocol nonoverlap"),
        ("runs/rope --probe swap --per-position", "--per-position has no use with --probe swap"),
        ("runs/rope --probe swap", "swap has nothing to ask at 16 tokens, of which the trained length is 16"),
        ("runs/rope --dtype fp8", "'fp8' is not one of fp32, bf16, fp16, int8"),
        ("--attention a.png", "--attention draws one run in one way"),
        ("runs/rope --attention a.bmp", "'a.bmp' must end in .png, .svg or .pdf"),
    ],
)
def test_contradictory_flags_are_named_in_one_line(workplace, line, message):
    done = command("eval.py", "--lengths", "16", *line.split(), cwd=workplace)
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
