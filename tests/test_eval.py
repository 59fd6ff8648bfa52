"""eval.py against an independent loop over documents and windows, and what the user sees."""

import json
import math
import shutil

import pytest
import torch
from conftest import TINY, command, refused

import data
from eval import default_lengths
from lab import pictures
from runs import CHECKPOINT, load_model, read_run
from settings import InputError
from tokenizer import make_tokenizer, read_ranks, read_tokenizer


@pytest.fixture(scope="module")
def few(tokens, tmp_path_factory):
    """(a folder of three texts, their documents as lists of tokens)."""
    folder = tmp_path_factory.mktemp("few")
    encoding = make_tokenizer(read_ranks(tokens / "tokenizer.tiktoken"))
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
        record = read_run(workplace / "runs" / pe)[2]
        tokenizer = read_tokenizer(workplace / "runs" / pe, record["data"])
        text = [token for document in few[1] for token in document[1 : (len(document) - 1) // 128 * 128 + 1]]
        assert row["bits_per_byte"] == pytest.approx(loss / math.log(2) * count / len(tokenizer.decode_bytes(text)))
    assert f": 2 of 3 held-out documents are long enough, {rows[0]['n_targets']:,} targets at every length" in printed


def test_every_run_is_scored_past_the_learned_table_is_a_dash_and_a_picture_is_drawn(workplace, few):
    rows, printed = rows_of(workplace, "--plot", "loss.png", "--data", few[0])
    runs = [line for line in printed.splitlines() if line.startswith("runs/")]
    assert runs == ["runs/expe", "runs/learned", "runs/rope"] and printed.count("held-out documents") == 1
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
    encoding = make_tokenizer(read_ranks(tokens / "tokenizer.tiktoken"))
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


def edit(run, part, **values):
    """Write other values in a part of a run's config.json."""
    record = json.loads((run / "config.json").read_text())
    record[part] |= values
    (run / "config.json").write_text(json.dumps(record))


@pytest.fixture
def desk(workplace, tmp_path):
    """A folder with copies of the three runs."""
    shutil.copytree(workplace / "runs", tmp_path / "runs")
    return tmp_path


def test_an_unfinished_run_has_its_step_beside_its_numbers(desk, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "curves", lambda path, lines, *more: drawn.append([*lines]))
    monkeypatch.setattr(pictures, "attention", lambda path, weights, title: drawn.append(title))
    monkeypatch.setattr(pictures, "training", lambda path, runs, unfinished: drawn.append(unfinished))
    edit(desk / "runs/rope", "train", steps=1600)

    def said(script, *flags):
        done = command(script, *flags, cwd=desk)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    lengths = "--lengths", "16"
    printed = said("eval.py", "runs/expe", "runs/rope", *lengths, "--json", "e.json", "--plot", "a.png")[0]
    assert [line for line in printed.splitlines() if line.startswith("runs/")] == [
        "runs/expe", "runs/rope (step 8 of 1,600)"]
    for printed in (said("lab.table", "e.json", "--plot", "a.png")[0], said("lab.measure", *lengths)[0]):
        assert "| rope (step 8 of 1,600) |" in printed and "| expe  " in printed
    assert said("generate.py", "runs/rope", "--tokens", "2")[1] == "runs/rope: step 8 of 1,600\n"
    assert said("generate.py", "runs/rope", "--tokens", "2", "--cache")[1] == "runs/rope: step 8 of 1,600\n"
    assert said("generate.py", "runs/expe", "--tokens", "2")[1] == ""
    said("lab.attention", "runs/rope", "--out", "a.png")
    said("lab.curves", "--out", "a.png")
    assert drawn[:2] == [["ExPE", "RoPE, step 8 of 1,600"], ["ExPE", "RoPE (step 8 of 1,600)"]]
    assert "(runs/rope, step 8 of 1,600, val of " in drawn[2]
    assert drawn[3] == {"runs/expe": "", "runs/learned": "", "runs/rope": "step 8 of 1,600"}


@pytest.mark.parametrize("script, flags", [("eval.py", "--lengths 16"), ("lab.measure", "--lengths 16"),
                                           ("lab.curves", "--out curves.png")])
def test_a_file_in_the_place_of_a_run_is_refused_and_beside_runs_it_is_named(script, flags, desk):
    (desk / "README.md").write_text("words")
    (desk / "runs/loss.png").write_bytes(b"")
    said = refused(command(script, "README.md", *flags.split(), cwd=desk))
    assert "README.md is a file: name a run directory, such as runs/" in said
    done = command(script, "runs/expe", "runs/loss.png", *flags.split(), cwd=desk)
    assert done.returncode == 0 and "rope" not in done.stdout
    assert done.stderr == "left out, since they are files and no run directories: runs/loss.png\n"


@pytest.mark.parametrize("script", ["eval.py", "lab.measure"])
def test_without_names_runs_that_cannot_be_read_are_left_out_with_their_reason(script, desk):
    edit(desk / "runs/expe", "model", encoding={"pe": "mine"})
    edit(desk / "runs/learned", "data", folder="gone")
    shutil.copytree(desk / "runs/rope", desk / "runs/killed", ignore=shutil.ignore_patterns(CHECKPOINT))
    done = command(script, "--lengths", "16", cwd=desk)
    assert done.returncode == 0 and "rope" in done.stdout and "learned" not in done.stdout
    said = sorted(done.stderr.splitlines())
    assert said[0] == "runs/expe is left out: needs zoo/mine.py, which is not here"
    assert said[1].startswith("runs/killed is left out: has no checkpoint yet")
    assert said[2].startswith("runs/learned is left out: gone/meta.json is missing") and len(said) == 3
    named = command(script, "runs/rope", "runs/expe", "--lengths", "16", cwd=desk)
    assert "runs/expe needs zoo/mine.py, which is not here" in refused(named) and not named.stdout
    (desk / "runs/rope" / CHECKPOINT).write_bytes(b"cut")
    done = command(script, "--lengths", "16", cwd=desk)
    assert done.returncode == 2 and "no run under runs/ can be" in done.stderr.splitlines()[-1]
    assert "runs/rope is left out: checkpoint.safetensors is not a checkpoint" in done.stderr


def text_of(tokens, folder, sizes):
    """A folder of texts, one with each number of tokens."""
    folder.mkdir()
    encoding = make_tokenizer(read_ranks(tokens / "tokenizer.tiktoken"))
    long = [token for document in documents_of(tokens) for token in document[1:]]
    for i, size in enumerate(sizes):
        text = encoding.decode(long[i : i + size])
        while (n := len(encoding.encode_ordinary(text))) != size:       # a cut may change how its ends are encoded
            text = text[:-1] if n > size else text + "\nx"
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("sizes, lengths, heading, said", [
    ([70, 40, 40], [16, 32, 64], "1 of 3 held-out documents are long enough, 64 targets",
     ["left out: 128 to 256 tokens, since the longest held-out document has 70 (give longer ones with --data)",
      "most documents are shorter: --lengths 16,32 scores 3 of 3"]),
    ([400, 300], [16, 32, 64, 128, 256], "2 documents, 512 targets", []),
    ([300, 7, 9, 9], [16, 32, 64, 128, 256], "1 of 4 held-out documents are long enough, 256 targets",
     ["most documents are shorter: --lengths 8 scores 3 of 4"]),
    ([15, 9, 8, 3], [8], "3 of 4 held-out documents are long enough, 24 targets",
     ["left out: 16 to 256 tokens, since the longest held-out document has 15 (give longer ones with --data)"])])
def test_without_lengths_those_are_scored_that_documents_have(
        workplace, tokens, tmp_path, sizes, lengths, heading, said):
    folder = text_of(tokens, tmp_path / "texts", sizes)
    rows, printed = rows_of(workplace, "runs/expe", "--data", folder)
    assert [row["length"] for row in rows] == lengths and len({row["n_targets"] for row in rows}) == 1
    assert {(row["n_documents"], row["n_held_out"]) for row in rows} == {
        (sum(size >= lengths[-1] for size in sizes), len(sizes))}
    above, *between = printed.splitlines()[1 : 2 + len(said)]
    assert above == f"{folder}: {heading} at every length" and between == said
    done = command("lab.measure", "runs/expe", "--data", folder, "--json", "m.json", cwd=workplace)
    assert done.returncode == 0 and done.stderr.splitlines() == [f"{folder}: {line}" for line in said]
    measured = json.loads((workplace / "m.json").read_text())
    other = command("lab.measure", "runs/expe", "--data", folder, "--protocol", "same-targets", cwd=workplace)
    assert other.returncode == 0, other.stderr                          # whose --targets shrink with the lengths
    assert [(row["length"], row["n_targets"]) for row in measured] == [(n, rows[0]["n_targets"]) for n in lengths]


def test_runs_of_one_text_are_scored_at_the_same_lengths_though_their_tokenizers_differ():
    def lengths_of(**texts):
        made = {run: (source, context, [[0] * (size + 1) for size in sizes])
                for run, (source, context, sizes) in texts.items()}
        return [lengths for lengths, _ in default_lengths(made).values()]

    assert lengths_of(a=("x", 16, [70]), b=("x", 16, [60, 2]), c=("y", 16, [70])) == [[16, 32], [16, 32], [16, 32, 64]]
    assert lengths_of(a=("x", 16, [15]), b=("x", 16, [9, 5, 3])) == [[4], [4]]
    assert lengths_of(a=("x", 16, [70]), b=("x", 32, [70])) == [[16, 32, 64], [32, 64]]
    assert lengths_of(a=("x", 12, [1])) == [[1]]
    with pytest.raises(InputError, match="b has no held-out document with a token"):
        lengths_of(a=("x", 16, [15]), b=("x", 16, [0]))
