"""eval.py against an independent loop over documents and windows, and what the user sees."""

import json
import math
import shutil

import pytest
import torch
from conftest import TINY, command, refused

import common
import data
from common import load_model


@pytest.fixture(scope="module")
def few(tokens, tmp_path_factory):
    """(a folder of three texts, their documents as lists of tokens)."""
    folder = tmp_path_factory.mktemp("few")
    encoding = data.make_tokenizer(data.read_ranks(tokens / "tokenizer.tiktoken"))
    parts = zip(documents_of(tokens), (100, 300, 500), strict=False)
    texts = [encoding.decode(document[1:size]) for document, size in parts]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder, [[encoding.eot_token, *encoding.encode_ordinary(text)] for text in texts]


def documents_of(tokens):
    """The documents of val, found token by token."""
    stream = data.open_split(tokens, "val").tolist()
    starts = [i for i, token in enumerate(stream) if token == data.read_meta(tokens)["eot"]]
    return [stream[start:end] for start, end in zip(starts, [*starts[1:], len(stream)], strict=True)]


def loss_in_loops(run, documents, length, longest):
    """(mean loss, targets) of the plain model's logits, window by window."""
    model, _ = load_model(run)
    losses = []
    for document in documents:
        for first in range(0, (len(document) - 1) // longest * longest, length):
            window = torch.tensor(document[first : first + length + 1])
            with torch.no_grad():
                logits = model(window[None, :-1])[0].double()
            losses += (-torch.log_softmax(logits, -1)[range(length), window[1:]]).tolist()
    return sum(losses) / len(losses), len(losses)


def rows_of(workplace, *flags):
    done = command("eval.py", *flags, "--json", "rows.json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    return json.loads((workplace / "rows.json").read_text()), done.stdout


@pytest.mark.parametrize("pe", ["expe", "rope"])
def test_losses_equal_an_independent_loop_and_targets_are_the_same_at_every_length(workplace, few, pe):
    rows, printed = rows_of(workplace, f"runs/{pe}", "--lengths", "16,64,128", "--data", few[0])
    assert [row["length"] for row in rows] == [16, 64, 128] and len({row["n_targets"] for row in rows}) == 1
    for row in rows:
        loss, count = loss_in_loops(workplace / "runs" / pe, few[1], row["length"], 128)
        assert row["n_targets"] == count > 0 and row["n_documents"] == 2
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert (row["run"], row["pe"], row["protocol"], row["trained_length"]) == (f"runs/{pe}", pe, "nonoverlap", 16)
        assert f"{loss:.3f}" in printed and f"{row['bits_per_byte']:.3f}" in printed
        record = common.read_run(workplace / "runs" / pe)[2]
        tokenizer = data.run_tokenizer(workplace / "runs" / pe, record["data"])
        text = [token for document in few[1] for token in document[1 : (len(document) - 1) // 128 * 128 + 1]]
        assert row["bits_per_byte"] == pytest.approx(loss / math.log(2) * count / len(tokenizer.decode_bytes(text)))
    assert f"{rows[0]['n_documents']} documents, {rows[0]['n_targets']:,} targets at every length" in printed


def test_every_run_is_scored_past_the_learned_table_is_a_dash_and_a_picture_is_drawn(workplace, few):
    rows, printed = rows_of(workplace, "--plot", "loss.png", "--data", few[0])
    runs = [line for line in printed.splitlines() if line.startswith("runs/")]
    assert runs == ["runs/expe", "runs/learned", "runs/rope"] and printed.count("documents") == 1
    losses = [line.split()[4:] for line in printed.splitlines() if "nats a token" in line]
    assert [len(line) for line in losses] == [5, 5, 5] and losses[1][1:] == ["-", "-", "-", "-"]
    assert printed.splitlines()[2].split() == ["*", "trained", "length", "16*", "32", "64", "128", "256"]
    assert [row["length"] for row in rows] == [16, 32, 64, 128, 256] * 3
    assert [row["loss"] for row in rows if row["pe"] == "learned"][1:] == [None] * 4
    assert (workplace / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_source_of_the_training_text_is_scored_on_its_held_out_part_alone(workplace, books):
    flags = ([], ["--data", books], ["--split", "test"])
    own, source, test = (rows_of(workplace, "runs/expe", "--lengths", "32", *more)[0][0] for more in flags)
    assert own["loss"] == source["loss"] and own["data"] == source["data"]
    assert test["n_targets"] != own["n_targets"] and test["loss"] != own["loss"] and "test of" in test["data"]


@pytest.mark.parametrize("flag", ["--json", "--plot"])
@pytest.mark.parametrize("path", ["", ".", "missing/x.png", "folder", "file.png"])
def test_a_wrong_output_file_is_refused_before_anything_is_scored(flag, path, workplace, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.png").write_text("precious")
    done = command("eval.py", workplace / "runs" / "expe", flag, path, cwd=tmp_path)
    assert done.returncode == 2 and flag in done.stderr and done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file.png"}
    assert (tmp_path / "file.png").read_text() == "precious"


def test_other_text_is_scored_with_the_runs_own_tokenizer(workplace, tokens, tmp_path):
    encoding = data.make_tokenizer(data.read_ranks(tokens / "tokenizer.tiktoken"))
    for i, document in enumerate(documents_of(tokens)):
        (tmp_path / f"{i:03}.txt").write_text(encoding.decode(document[1:]), encoding="utf-8")
    own, prepared, text = (rows_of(workplace, "runs/expe", "--lengths", "32", *more)[0][0]
                           for more in ([], ["--data", tokens], ["--data", tmp_path]))
    assert own["loss"] == prepared["loss"] == pytest.approx(text["loss"], rel=1e-6)
    assert own["n_targets"] == prepared["n_targets"] == text["n_targets"]


def test_what_cannot_be_scored_is_named_in_one_line(workplace, tokens, tmp_path):
    longest = max(map(len, documents_of(tokens))) - 1
    assert rows_of(workplace, "runs/expe", "--lengths", longest)[0][0]["n_documents"] == 1
    flags = ["--pe", "expe", "--objective", "mlm", *TINY, "--steps", "1", "--data", tokens, "--out", "masked"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    (tmp_path / "setup.json").write_text('["precious"]')
    (tmp_path / "setup.cfg").write_text("[precious]")
    for line, message in {
        f"runs/expe --lengths {longest + 1}": f"tokens, the longest of --lengths: the longest one has {longest:,}",
        "runs/expe --lengths 16,24": "--lengths must divide the longest of them, 24",
        "runs/none": "runs/none is no run directory",
        f"runs/expe {tmp_path}/masked": "masked sees later tokens",
        f"runs/expe --json {tmp_path}/setup.json": "setup.json' exists, and was not written here",
        f"runs/expe --json {tmp_path}/setup.cfg": "--json: must end in .json",
        "runs/expe --plot a.txt": "--plot: must end in .png, .svg, .pdf",
    }.items():
        assert message in refused(command("eval.py", *line.split(), cwd=workplace)), line
    assert (tmp_path / "setup.json").read_text() == '["precious"]'


def test_data_that_has_changed_since_training_is_named(workplace, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    for path, name in ((tmp_path / "tokens/meta.json", "val"), (tmp_path / "run/config.json", None)):
        record = json.loads(path.read_text())
        if name:
            record["splits"][name]["sha256"] = "0" * 64
        else:
            record["data"]["folder"] = str(tmp_path / "tokens")
        path.write_text(json.dumps(record))
    line = refused(command("eval.py", "run", "--lengths", "16", cwd=tmp_path))
    assert "val.bin is not what it was when run was trained" in line
    assert command("eval.py", "run", "--lengths", "16", "--split", "test", cwd=tmp_path).returncode == 0
