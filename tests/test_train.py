"""Training as a user runs it: resumed bit for bit, never overwritten, checkpoints whole, and losses that fall."""

import contextlib
import csv
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import ROOT, TINY, command, refused, split_of

import config
import data
import files
import model_numpy
import model_torch
import runs
import train
from runs import checkpoint_file, read_run


def weights(run):
    return safetensors.torch.load_file(run / "model.safetensors")


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def assert_same_run(a, b):
    """Every weight, every moment of the optimizer and every line of the log, bit for bit."""
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name
    moments = [safetensors.torch.load_file(run / "optimizer.safetensors") for run in (a, b)]
    assert moments[0].keys() == {f"{moment}.{name}" for moment in "mv" for name in weights(a)}
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    assert log(a) == log(b)


@pytest.fixture(scope="module")
def flags(tokens):
    return [
        *("--pe", "expe", *TINY, "--data", tokens, "--steps", "200", "--dropout", "0.1"),
        *("--checkpoint-every", "7", "--eval-every", "50"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = command("train.py", *flags, "--out", "runs/a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a", done


def start_and_stop(flags, folder, signal_number, lines=25):
    """Start the run, send the signal once its log has so many lines, and wait; returns the process and its stderr."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *map(str, flags), "--out", "runs/a"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline, path = time.monotonic() + 120, folder / "runs" / "a" / "log.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            break
        time.sleep(0.005)
    process.send_signal(signal_number)
    return process, process.communicate()[1]


def test_a_run_leaves_what_it_promises(uninterrupted, tokens):
    run, done = uninterrupted
    files = ["config.json", "log.jsonl", "model.safetensors", "optimizer.safetensors", "tokenizer.tiktoken"]
    assert sorted(os.listdir(run)) == files
    model, train, record = read_run(run)
    assert model.encoding.pe == "expe" and train.steps == 200 and record["checkpoint"]["step"] == 200
    assert record["provenance"]["command"].startswith("python ") and "--pe expe" in record["provenance"]["command"]
    assert record["provenance"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    steps = [line["step"] for line in log(run) if "loss" in line]
    validations = [line["step"] for line in log(run) if "val_loss" in line]
    assert steps == list(range(1, 201)) and validations == [50, 100, 150, 200]
    assert (run / "tokenizer.tiktoken").read_bytes() == (tokens / "tokenizer.tiktoken").read_bytes()
    assert done.stdout.strip().endswith("next: python eval.py runs/a")


def test_the_loss_falls(uninterrupted):
    values = [line["val_loss"] for line in log(uninterrupted[0]) if "val_loss" in line]
    assert values[-1] < 5.0 < 5.7  # ln 300 = 5.70 is where the untrained model stands


def test_killed_in_the_middle_and_resumed_equals_uninterrupted(uninterrupted, flags, tmp_path):
    process, _ = start_and_stop(flags, tmp_path, signal.SIGKILL)
    run = tmp_path / "runs" / "a"
    assert process.returncode == -signal.SIGKILL
    assert 7 <= read_run(run)[2]["checkpoint"]["step"] < 200
    done = command("train.py", *flags, "--out", "runs/a", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, uninterrupted[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_last_step_and_says_how_to_go_on(uninterrupted, flags, tmp_path, number):
    process, said = start_and_stop(flags, tmp_path, number)
    run = tmp_path / "runs" / "a"
    assert process.returncode == 130 and "Traceback" not in said
    assert "stopping after this step (again: at once, back to the last checkpoint)" in said
    assert said.strip().endswith("go on with: python train.py --out runs/a --resume")
    step = read_run(run)[2]["checkpoint"]["step"]
    assert 10 <= step < 200 and log(run)[-1]["step"] == step
    done = command("train.py", "--out", "runs/a", "--resume", cwd=tmp_path)  # the line above, word for word
    assert done.returncode == 0, done.stderr
    assert_same_run(run, uninterrupted[0])
    again = command("train.py", "--out", "runs/a", "--resume", cwd=tmp_path)
    assert again.returncode == 0 and "complete: 200 of 200 steps" in again.stdout


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize(
    "variant, name",
    [
        (["expe", "--on", "k", "--theta", "1/32"], "expe-on_k-theta0.03125"),
        (["expe", "--constant", "--learn", "init"], "expe-learn_init-constant"),
        (["exqpe", "--once", "--l", "3", "--learn", "random"], "exqpe-l3-once-learn_random"),
        (["t5", "--buckets", "8", "--max-distance", "9"], "t5-buckets8-max_distance9"),
        (["shaw"], "shaw"),
        (["alibi", "--slopes", "1/2"], "alibi-slopes0.5"),
        (["partial", "--rotary-fraction", "1/2"], "partial-rotary_fraction0.5"),
        (["expe", "--nope-every", "2", "--window", "8"], "expe-context16-vocab300-nope_every2-window8"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_variants_train_resume_and_evaluate(variant, name, backend, tokens, tmp_path):
    flags = ["--pe", *variant, *TINY, "--data", tokens, "--steps", "6", "--checkpoint-every", "3", "--backend", backend]
    done = command("train.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = "" if "context" in name else "-context16-vocab300"
    by = "-backend_numpy" * (backend == "numpy")
    run = tmp_path / "runs" / f"mini-{name}{model}-steps6-batch_size4{by}-data_books-v300-s0"
    first, last = (json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()[:6:5])
    assert last < first
    again = command("train.py", *flags, "--resume", cwd=tmp_path)
    assert again.returncode == 0 and "complete: 6 of 6 steps" in again.stdout, again.stderr
    done = command("eval.py", run, "--lengths", "16,64", "--max-docs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_what_each_block_has_and_what_zoo_holds_resume_bit_for_bit(backend, tokens, tmp_path, stop_at, monkeypatch):
    flags = [*TINY, "--data", tokens, "--steps", "6", "--eval-every", "3", "--dropout", "0.1", "--pe", "kerple",
             "--nope-every", "2", "--window", "8", "--backend", backend]  # fmt: skip
    assert command("train.py", *flags, "--out", "runs/a", cwd=tmp_path).returncode == 0
    stop_at(3)
    assert command("train.py", *flags, "--out", "runs/b", cwd=tmp_path).returncode == 130
    monkeypatch.undo()
    assert read_run(tmp_path / "runs" / "b")[2]["checkpoint"]["step"] == 4
    done = command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "runs" / "a", tmp_path / "runs" / "b")


def test_a_run_of_an_earlier_version_goes_on_with_a_val_that_lacks_near_copies(copies, tmp_path, monkeypatch):
    source, flags = tmp_path / "books", [*TINY, "--data", "tokens", "--steps", "6", "--eval-every", "3", "--pe", "expe"]
    shutil.copytree(copies, source)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(data, "NEAR", 1)
        data.prepare("books", "tokens", 300, min_doc_tokens=256)
    meta = files.read_json("tokens/meta.json")
    del meta["near"]
    files.write_json("tokens/meta.json", meta)
    assert command("train.py", *flags, "--out", "runs/a", cwd=tmp_path).returncode == 0
    batch, stopped = data.batch, []

    def batch_that_is_stopped(tokens, context, n, seed, step):
        if step == 3 and not stopped:
            stopped.append(signal.raise_signal(signal.SIGINT))
        return batch(tokens, context, n, seed, step)

    monkeypatch.setattr(data, "batch", batch_that_is_stopped)
    assert command("train.py", *flags, "--out", "runs/b", cwd=tmp_path).returncode == 130
    data.prepare("books", "tokens", 300, min_doc_tokens=256, overwrite=True)
    found = data.read_meta("tokens")
    assert found["splits"]["train"] == meta["splits"]["train"] and found["splits"]["val"] != meta["splits"]["val"]
    done = command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "val of tokens is not what it was" in done.stdout, done.stderr
    a, b = (tmp_path / "runs" / name for name in "ab")
    for read in (weights, lambda run: safetensors.torch.load_file(run / "optimizer.safetensors")):
        torch.testing.assert_close(read(a), read(b), rtol=0, atol=0)
    assert [line for line in log(a) if "loss" in line] == [line for line in log(b) if "loss" in line]
    done = command("eval.py", "runs/a", "--lengths", "16,64", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files.read_json("rows.json")[0]["n_documents"] == found["splits"]["val"]["documents"]

    next(path for path in source.iterdir() if split_of(path.read_text(encoding="utf-8")) == "train").unlink()
    data.prepare("books", "tokens", tokenizer="runs/a/tokenizer.tiktoken", min_doc_tokens=256, overwrite=True)
    line = refused(command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path))
    assert "tokens is not the data that runs/b was trained on: its files' hashes differ" in line


def test_a_resumed_run_names_the_flag_that_was_given(tokens, tmp_path):
    flags = ["--pe", "expe", "--on", "k", *TINY, "--data", tokens, "--steps", "2", "--out", "runs/a"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    for given, message in (
        (["--once"], "once is False in runs/a and True by these flags"),
        (["--on", "q"], "on is k in runs/a and q by these flags"),
        (["--learn", "random"], "learn is none in runs/a and random by these flags"),
        (["--pe", "rope"], "pe is expe in runs/a and rope by these flags"),
        (["--base", "99"], "base is not set in runs/a and 99.0 by these flags"),
        (["--window", "8"], "window is 0 in runs/a and 8 by these flags"),
        (["--no-causal"], "causal is True in runs/a and False by these flags"),
    ):
        assert message in refused(command("train.py", "--out", "runs/a", "--resume", *given, cwd=tmp_path))


def test_gradient_accumulation_equals_the_whole_batch(tokens, tmp_path):
    losses, flags = [], [*TINY, "--data", tokens, "--steps", "5"]
    for micro in (4, 2, 1):
        done = command("train.py", *flags, "--micro-batch", micro, "--out", f"runs/{micro}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in log(tmp_path / "runs" / str(micro)) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_bf16_trains(tokens, tmp_path, uninterrupted):
    flags = [*TINY, "--data", tokens, "--steps", "60", "--dtype", "bf16"]
    done = command("train.py", *flags, "--out", "runs/b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "runs" / "b").values())
    assert [line["val_loss"] for line in log(tmp_path / "runs" / "b") if "val_loss" in line][-1] < 5.0


def test_a_run_that_exists_is_never_overwritten_unasked(uninterrupted, flags, tmp_path):
    run = tmp_path / "runs" / "a"
    shutil.copytree(uninterrupted[0], run)
    before = {name: (run / name).read_bytes() for name in os.listdir(run)}
    for more, message in (
        (flags, "runs/a exists: go on with it by --resume, replace it by --overwrite"),
        ([*flags, "--steps", "201", "--resume"], "steps is 200 in runs/a and 201 by these flags"),
        (["--l", "23", "--resume"], "l is 24 in runs/a and 23 by these flags"),
    ):
        assert message in refused(command("train.py", *more, "--out", "runs/a", cwd=tmp_path))
    assert before == {name: (run / name).read_bytes() for name in os.listdir(run)}
    done = command("train.py", *flags, "--steps", "3", "--out", "runs/a", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0 and read_run(run)[2]["checkpoint"]["step"] == 3 and log(run)[0]["step"] == 1


def test_overwrite_replaces_runs_and_nothing_else(tokens, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    line = refused(command("train.py", *TINY, "--data", tokens, "--out", "precious", "--overwrite", cwd=tmp_path))
    assert "precious exists and holds no config.json, so it is not overwritten" in line
    assert (tmp_path / "precious" / "thesis.txt").exists()


@pytest.mark.parametrize(
    "more", [("--batch-size", "12"), ("--lr", "5e-3"), ("--tokens", "300"), ("--min-doc-tokens", "256")]
)
def test_the_same_flags_with_resume_are_the_same_run(tokens, tmp_path, more):
    flags = ["--pe", "exqpe", *TINY, "--data", tokens, "--steps", "3", *more, "--out", "runs/a"]
    if "--tokens" in more:
        flags.remove("--steps"), flags.remove("3")
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    done = command("train.py", *flags, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "is complete" in done.stdout, done.stderr


def test_resume_of_another_encoding_reads_its_flags_by_the_run(tokens, tmp_path):
    flags = ["--pe", "rope", "--base", "500", *TINY, "--data", tokens, "--steps", "2", "--out", "runs/a"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    assert command("train.py", "--base", "500", "--out", "runs/a", "--resume", cwd=tmp_path).returncode == 0
    assert "base is" not in refused(command("train.py", "--l", "3", "--out", "runs/a", "--resume", cwd=tmp_path))


def test_a_run_that_diverges_stops_and_keeps_its_checkpoint(tokens, tmp_path):
    flags = ["--pe", "rope", *TINY, "--data", tokens, "--steps", "40", "--lr", "1e30", "--checkpoint-every", "1"]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    done = command("train.py", *flags, "--out", "runs/a", cwd=tmp_path)
    assert done.returncode.startswith("train.py: stopped: the loss is ") and "try a lower --lr" in done.returncode
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "runs" / "a").values())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


NAMES = """
mini-expe-s0                                            --pe expe
mini-expe-s0                                            --pe expe --l 24 --steps 1600 --start 0 --theta 1/512
mini-expe-s0                                            --eval-every 20 --checkpoint-every 9 --micro-batch 2 --compile
mini-expe-l8-s0                                         --l 8
mini-expe-steps200-s3                                   --steps 200 --seed 3
mini-expe-steps2930-s0                                  --tokens 3e6
mini-rope-base500-s0                                    --pe rope --base 500
mini-exqpe-theta2_0.125-data_my_books-s0                --pe exqpe --theta2 1/8 --data texts/my_books/
mini-rope-vocab300-data_a-v300-s0                       --pe rope --vocab 300 --data data/a-v300
mini-t5-buckets8-max_distance9-s0                       --pe t5 --buckets 8 --max-distance 9
mini-expe-width64-s0                                    --width 64
mini-expe-width64-mlp_width512-s0                       --width 64 --mlp-width 512
mini-expe-mlp_width64-s0                                --mlp-width 64
mini-expe-context64-s0                                  --context 64 --theta 1/256
mini-expe-theta0.001953125-context64-s0                 --context 64 --theta 1/512
mini-nope-lr0.008-s0                                    --pe nope --lr 8e-3
mini-nope-lr0.008-end_lr4e-05-s0                        --pe nope --lr 8e-3 --end-lr 4e-5
mini-nope-batch_size12-s0                               --pe nope --batch-size 12
mini-nope-norm_rmsnorm-tied-no_causal-beta2_0.99-s0     --pe nope --norm rmsnorm --tied --no-causal --beta2 0.99
paper-35m-expe-dtype_bf16-s0                            --preset paper-35m --dtype bf16
llama-342m-rope-no_tied-steps1000000-s0                 --preset llama-342m --pe rope --no-tied --steps 1000000
"""


def configured(line):
    """(preset, its ModelConfig, its TrainConfig) by the flags of a command line."""
    args = train.command_line().parse_args(line.split())
    preset = "mini" if args.preset == "auto" else args.preset
    return preset, *train.configure(args, *config.PRESETS[preset])


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_default_names_are_the_fewest_settings_that_make_the_run(line):
    name, flags = line.split(maxsplit=1)
    assert str(train.run_name(*configured(flags))) == f"runs/{name}"


def test_runs_share_a_name_if_and_only_if_they_are_one_run():
    """Drawn command lines: their configs are compared as dataclasses, without what is kept out of names."""
    rng, names, lines = random.Random(0), {}, 400
    some = ["--l 24", "--l 8", "--on k", "--theta 1/512", "--theta 1/384", "--constant", "--width 64", "--heads 2",
            "--mlp-width 256", "--mlp-width 512", "--context 64", "--context 128", "--tied", "--no-tied", "--lr 8e-3",
            "--end-lr 8e-5", "--end-lr 4e-5", "--batch-size 12", "--micro-batch 4", "--steps 200", "--steps 1600",
            "--seed 1", "--eval-every 9", "--data a/books", "--max-tokens 90"]  # fmt: skip
    for _ in range(lines):
        preset, model, trained = configured("--pe expe " + " ".join(rng.sample(some, rng.randrange(6))))
        aside = {"micro_batch": trained.batch_size, "eval_every": 1}
        run = dataclasses.astuple(model), dataclasses.astuple(dataclasses.replace(trained, **aside))
        names.setdefault(str(train.run_name(preset, model, trained)), set()).add(run)
    assert all(len(runs) == 1 for runs in names.values())
    assert len(names) == len(set().union(*names.values())) > lines / 4


def test_a_run_is_written_where_show_says_and_nothing_else_by_show(tokens, tmp_path):
    flags = ["--pe", "rope", *TINY, "--data", tokens, "--steps", "1", "--seed", "3", "--lr", "0.002"]
    shown = command("train.py", *flags, "--show", cwd=tmp_path)
    assert shown.returncode == 0 and os.listdir(tmp_path) == []
    run = tmp_path / shown.stdout.partition(":")[0]
    assert run.name == "mini-rope-context16-vocab300-steps1-batch_size4-lr0.002-data_books-v300-s3"
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0 and (run / "config.json").exists()
    model, trained, _ = read_run(run)
    values, marked = {}, set()
    for line in shown.stdout.split("\n\n")[1].splitlines():
        name, flag, value, *own = line.removeprefix("*").split()
        values[name] = value
        assert bool(own) == line.startswith("*") and (flag == f"--{name.replace('_', '-')}" or name in (
            "n_layers", "d_model", "n_heads", "vocab_size", "d_mlp"))  # fmt: skip
        marked |= {name} if own else set()
    assert marked == {"context", "vocab_size", "steps", "batch_size", "lr", "end_lr", "micro_batch", "data", "seed"}
    stored = vars(model.encoding) | vars(model) | vars(trained)
    for name, value in values.items():
        if name != "min_doc_tokens":  # which a run has of its folder
            assert value == str(stored[name]) or float(value) == stored[name], name
    assert values.keys() > {"base", "norm", "tied", "warmup", "clip", "dtype", "checkpoint_every"}
    assert "(mini: 0.004)" in shown.stdout and f"{4 * 16:,} training tokens" in shown.stdout


def test_help_has_every_default(tmp_path):
    text = " ".join(command("train.py", "--help", cwd=tmp_path).stdout.split())
    for words in ("blocks (mini 4, paper-35m 6)", "peak learning rate (mini 0.004, paper-35m 0.001)",
                  "AdamW's decay of the first moment (default: 0.9)", "base of the frequencies (default: 10000)",
                  "(mini stdlib, paper-35m fineweb)"):  # fmt: skip
        assert words in text
    for f in train.flags_of(config.ModelConfig, config.TrainConfig, *config.ENCODINGS.values()).values():
        about = re.escape(" ".join(f.metadata["help"].split()))
        assert "default" in about or re.search(rf"{about} \((mini|default:) ", text), f.name


# ---- what one sees of training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_samples_come_in_time_and_leave_the_run_as_it_is(backend, tokens, tmp_path):
    flags = [*TINY, "--data", tokens, "--steps", "6", "--dropout", "0.1", "--pe", "expe", "--backend", backend]
    plain = command("train.py", *flags, "--out", "runs/a", cwd=tmp_path)
    done = command("train.py", *flags, "--out", "runs/b", "--sample-every", "3", cwd=tmp_path)
    assert plain.returncode == done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    lines = [line for line in done.stdout.splitlines() if line not in plain.stdout and line.startswith("step ")]
    assert [line.split()[1] for line in lines if "tokens/s" not in line] == ["3/6", "6/6"]
    model, _ = runs.load_model(tmp_path / "runs" / "b")  # torch's, of the last step, token by token
    encoding, rng = data.load_tokenizer(tokens / "tokenizer.tiktoken"), np.random.default_rng([0, 6])
    text = [encoding.eot_token]
    while len(text) < 16:
        with torch.no_grad():
            logits = model(torch.tensor([text]))[0, -1].double().numpy()
        text.append(int((logits + rng.gumbel(size=300)).argmax()))
    seen = "".join(c for c in encoding.decode(text[1:]) if c in "\n\t" or unicodedata.category(c) != "Cc")
    assert lines[-1].partition("6/6   ")[2] == " ".join(seen.split())[:60]


def test_a_sample_is_drawn_by_the_models_probabilities_and_says_no_control_character():
    class Encoding:
        eot_token = 4
        decode = staticmethod(lambda tokens: f"\x1b[31m{tokens[0]}\r\n\x07 x\x9b")

    small = config.ModelConfig(1, 8, 2, context=2, vocab_size=5, encoding=config.EncodingConfig("nope"))
    weights = model_numpy.init_params(small, 0)
    weights = {name: 20 * w if name == "head.weight" else w for name, w in weights.items()}
    with torch.no_grad():
        model = model_torch.GPT(small)
        model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
        expected = model(torch.tensor([[4]]))[0, -1].softmax(-1).double().numpy()
    drawn = [train.sample(weights, small, Encoding, seed) for seed in range(4000)]
    counts = np.array([drawn.count(f"[31m{token} x") for token in range(5)])
    assert counts.sum() == 4000 and expected.max() < 0.9
    assert (np.abs(counts / 4000 - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3).all()


def log_csv(run):
    """A run's log.csv as log.jsonl has it."""
    lines = csv.DictReader((run / "log.csv").read_text().splitlines())
    return [{name: float(value) for name, value in line.items() if value} for line in lines]


def test_log_csv_is_log_jsonl_also_of_a_run_that_was_killed_or_had_none(flags, tmp_path):
    run, more = tmp_path / "runs" / "a", ["--steps", "60", "--eval-every", "20", "--log", "csv"]
    process, _ = start_and_stop([*flags, *more], tmp_path, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert command("train.py", "--out", "runs/a", "--resume", "--log", "csv", cwd=tmp_path).returncode == 0
    assert log_csv(run) == log(run) and len(log(run)) == 63
    (run / "log.csv").unlink()
    done = command("train.py", *flags, "--steps", "3", "--out", "runs/a", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0 and not (run / "log.csv").exists()
    done = command("train.py", *flags, *more, "--out", "runs/a", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0 and log_csv(run) == log(run)
    done = command("train.py", *flags, "--steps", "3", "--out", "runs/a", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0 and not (run / "log.csv").exists()


def test_log_tensorboard_is_told_all_that_log_jsonl_has(flags, tmp_path, monkeypatch):
    told, module = [], types.ModuleType("torch.utils.tensorboard")

    class SummaryWriter(contextlib.nullcontext):
        def __init__(self, folder, purge_step):
            super().__init__(self)
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def __exit__(self, *_):
            told.append("closed")

    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: name == "tensorboard")
    batch = data.batch

    def batch_that_is_stopped(tokens, context, n, seed, step):
        if step == 7:
            signal.raise_signal(signal.SIGINT)
        return batch(tokens, context, n, seed, step)

    more = ["--steps", "12", "--eval-every", "5", "--out", "runs/a", "--log", "tensorboard,csv"]
    with monkeypatch.context() as patch:
        patch.setattr(data, "batch", batch_that_is_stopped)
        assert command("train.py", *flags, *more, cwd=tmp_path).returncode == 130
    for steps in (8, 12):  # resumed, it is told what went before, too
        lines = log(tmp_path / "runs" / "a")
        assert lines[-1]["step"] == steps and told[0] == (Path("runs/a/tensorboard"), 1) and told[-1] == "closed"
        assert told[1:-1] == [(name, line[name], line["step"]) for line in lines for name in line if name != "step"]
        told.clear()
        assert command("train.py", *flags, *more, "--resume", cwd=tmp_path).returncode == 0


def test_log_tensorboard_where_it_is_not_installed(flags, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line = refused(command("train.py", *flags, "--log", "csv,tensorboard", cwd=tmp_path))
    assert "--log tensorboard needs the package tensorboard: pip install tensorboard, or --log csv" in line
    assert os.listdir(tmp_path) == []


def test_flags_of_the_models_shape_reach_the_model(tokens, tmp_path):
    small = ["--data", tokens, "--steps", "1", "--l", "8", "--layers", "3", "--width", "32", "--heads", "2"]
    styled = ["--norm", "rmsnorm", "--mlp", "swiglu", "--tied", "--no-causal", "--mlp-width", "48"]
    llama = ["--preset", "llama-342m", "--dtype", "fp32", "--no-tied", "--causal", "--norm", "layernorm"]
    found = {}
    for name, flags in (("small", small), ("styled", [*small, *styled]), ("llama", [*small, *llama, "--mlp", "gelu"])):
        done = command("train.py", *TINY, *flags, "--out", f"runs/{name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = tmp_path / "runs" / name
        model, shapes = read_run(run)[0], {name: tuple(w.shape) for name, w in weights(run).items()}
        assert (model.n_layers, model.d_model, model.n_heads, model.d_head) == (3, 32, 2, 16)
        assert shapes["embedding.weight"] == (300, 32) and "blocks.2.attn.qkv.weight" in shapes
        assert "blocks.3.attn.qkv.weight" not in shapes
        found[name] = model, shapes, log(run)[0]["loss"]
        done = command("eval.py", run, "--lengths", "16,32", "--max-docs", "1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for name in ("small", "llama"):
        model, shapes, _ = found[name]
        assert (model.norm, model.mlp, model.tied, model.causal) == ("layernorm", "gelu", False, True)
        assert shapes["head.weight"] == (300, 32) and shapes["blocks.0.norm1.bias"] == (32,)
        assert shapes["blocks.0.mlp.up.weight"] == (4 * 32, 32) == (model.d_mlp, model.d_model)
    model, shapes, loss = found["styled"]
    assert (model.norm, model.mlp, model.tied, model.causal, model.d_mlp) == ("rmsnorm", "swiglu", True, False, 48)
    assert "head.weight" not in shapes and "norm.bias" not in shapes
    assert shapes["blocks.0.mlp.gate.weight"] == shapes["blocks.0.mlp.up.weight"] == (48, 32)
    assert "no-causal" not in refused(command("generate.py", "runs/small", "--tokens", "0", cwd=tmp_path))
    assert "a cache needs causal attention" in refused(command("generate.py", "runs/styled", cwd=tmp_path))


@pytest.mark.parametrize("line, message", [
    ("--layers 0", "n_layers must be a whole number from 1 to 10,000, got 0"),
    ("--width 0", "d_model must be a whole number of at least 1, got 0"),
    ("--width 33", "n_heads must be a divisor of d_model, 33, got 4"),
    ("--heads 3", "n_heads must be a divisor of d_model, 128, got 3"),
    ("--width 16", "l must be from 1 to d_model, 16, got 24"),
    ("--norm batchnorm", "norm must be layernorm or rmsnorm, got 'batchnorm'"),
    ("--mlp relu", "mlp must be gelu or swiglu, got 'relu'"),
    ("--mlp-width 0", "d_mlp must be a whole number of at least 1, got 0"),
    ("--mlp-width x", "--mlp-width: 'x' is not a whole number"),
    ("--tied yes", "unrecognized arguments: yes"),
    ("--nope-every 1", "nope_every must be 0 or a whole number of at least 2, got 1"),
    ("--nope-every -2", "nope_every must be 0 or a whole number of at least 2, got -2"),
    ("--window -1", "window must be a whole number of at least 0, got -1"),
    ("--window 8 --no-causal", "window counts the keys before a query: it needs a causal model"),
    ("--pe rope --heads 128", "d_head must be even for RoPE to pair its dimensions, got 1"),
    ("--pe partial --rotary-fraction 0", "rotary_fraction must be above 0 and at most 1, got 0.0"),
    ("--pe partial --rotary-fraction 0.1", "rotary_fraction must leave an even width"),
    ("--pe kerple --base 500", "base is for sinusoidal and rope and partial and proportional and xpos, and kerple has"),
])
def test_wrong_shapes_are_named_in_one_line(line, message, tmp_path):
    flags = ["--preset", "mini", "--data", "nowhere/", *line.split()]
    assert message in refused(command("train.py", *flags, cwd=tmp_path))
    assert os.listdir(tmp_path) == []


def test_tokens_is_another_way_to_say_steps(tokens, tmp_path):
    done = command("train.py", *TINY, "--data", tokens, "--tokens", "129", "--out", "runs/t", cwd=tmp_path)
    assert done.returncode == 0 and read_run(tmp_path / "runs" / "t")[1].steps == 3  # 64 tokens a step


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_killed_between_its_renames_is_found_whole(uninterrupted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    record = read_run(run)[2]
    (run / "model.safetensors").rename(run / "model.safetensors.new")  # config.json names it, its last rename is due
    (run / "model.safetensors").write_bytes(b"the checkpoint before")
    (run / "optimizer.safetensors.new").write_bytes(b"the checkpoint after, cut short")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert checkpoint_file(run, record, name).read_bytes() == (uninterrupted[0] / name).read_bytes()
    assert (run / "model.safetensors.new").exists()  # a reader renames nothing: the writer may be at work
    done = command("train.py", "--out", run, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and not (run / "model.safetensors.new").exists(), done.stderr
    assert weights(run).keys() == weights(uninterrupted[0]).keys()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_damaged_checkpoints_are_named_with_what_is_off(uninterrupted, tmp_path, name):
    shutil.copytree(uninterrupted[0], tmp_path / "runs" / "a")
    path = tmp_path / "runs" / "a" / name
    whole = path.read_bytes()

    def said():
        line = refused(command("train.py", "--out", "runs/a", "--resume", cwd=tmp_path))
        if name == "model.safetensors":
            assert refused(command("eval.py", "runs/a", cwd=tmp_path)).split("error: ")[1] == line.split("error: ")[1]
        return line

    path.write_bytes(whole[:-100])
    assert f"runs/a/{name} has a size of {len(whole) - 100:,} bytes and config.json says {len(whole):,}" in said()
    path.write_bytes(whole[:-100] + bytes(100))
    assert f"runs/a/{name} has the right size and the wrong SHA-256 hash" in said()
    path.unlink()
    assert f"runs/a/{name} is missing" in said()


def forged(run, name, change):
    """Change a checkpoint's file and let config.json vouch for it."""
    change(run / name)
    record = files.read_json(run / "config.json")
    record["checkpoint"]["files"][name] = files.fingerprint(run / name)
    files.write_json(run / "config.json", record)


def with_tensors(**changes):
    """A change of a safetensors file: tensors replaced or added, or left out where None."""

    def change(path):
        tensors = safetensors.torch.load_file(path) | {name.replace("__", "."): x for name, x in changes.items()}
        safetensors.torch.save_file({name: x for name, x in tensors.items() if x is not None}, path)

    return change


@pytest.mark.parametrize(
    "backend, name, change, message",
    [
        (backend, *case) for backend in ("torch", "numpy") for case in (
            ("model.safetensors", lambda path: path.write_bytes(b"xx"), "is not a safetensors file"),
            ("optimizer.safetensors", lambda path: path.write_bytes(b"xx"), "is not a safetensors file"),
            ("optimizer.safetensors", with_tensors(m__norm__weight=None), "lacks the tensor m.norm.weight"),
            ("optimizer.safetensors", with_tensors(m__norm=torch.ones(1)), "has an unknown tensor m.norm"),
            ("optimizer.safetensors", with_tensors(v__norm__weight=torch.ones(3)), "v.norm.weight has the shape"),
            ("optimizer.safetensors", with_tensors(v__norm__weight=torch.ones(64, dtype=torch.int8)), "'int8')"),
        )
    ],
)
def test_forged_checkpoints_are_named_and_left_alone(tokens, tmp_path, backend, name, change, message):
    flags = ["--pe", "expe", *TINY, "--data", tokens, "--steps", "2", "--backend", backend, "--out", "runs/a"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    run = tmp_path / "runs" / "a"
    forged(run, name, change)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    line = refused(command("train.py", "--out", "runs/a", "--resume", cwd=tmp_path))
    assert f"runs/a/{name}" in line and message in line
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_a_run_of_an_earlier_version_is_upgraded_and_resumed(tokens, tmp_path, backend):
    """Its optimizer.pt held {"step", "optimizer"}: torch's own state, matrices first, or the moments by name."""
    flags = ["--pe", "t5", *TINY, "--data", tokens, "--steps", "4", "--eval-every", "2", "--backend", backend]
    for name in ("a", "b"):
        assert command("train.py", *flags, "--out", f"runs/{name}", cwd=tmp_path).returncode == 0
    run = tmp_path / "runs" / "b"
    moments, shapes = safetensors.torch.load_file(run / "optimizer.safetensors"), weights(run)
    names = [name for group in (True, False) for name in model_numpy.parameter_shapes(read_run(run)[0])
             if (shapes[name].ndim > 1) is group]  # fmt: skip
    by_index = {i: {"step": torch.tensor(4.0), "exp_avg": moments[f"m.{name}"], "exp_avg_sq": moments[f"v.{name}"]}
                for i, name in enumerate(names)}  # fmt: skip
    by_name = {"step": 4, **{key: {name: moments[f"{key}.{name}"] for name in names} for key in "mv"}}
    old = {"state": by_index, "param_groups": []} if backend == "torch" else by_name
    (run / "optimizer.safetensors").unlink()
    torch.save({"step": 4, "optimizer": old}, run / "optimizer.pt")
    record = files.read_json(run / "config.json")
    named = record["checkpoint"]["files"]
    named.pop("optimizer.safetensors")
    named["optimizer.pt"] = files.fingerprint(run / "optimizer.pt")
    files.write_json(run / "config.json", record)
    assert command("eval.py", run, "--lengths", "16", "--max-docs", "1", cwd=tmp_path).returncode == 0
    line = refused(command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path))
    assert "runs/b is of an earlier version: python -m lab.upgrade runs/b makes it resumable" in line
    done = command("lab.upgrade", "runs/b", cwd=tmp_path)
    assert done.returncode == 0 and "runs/b can be resumed" in done.stdout, done.stderr
    done = command("train.py", "--out", "runs/b", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "runs" / "a", run)


@pytest.mark.parametrize("optimizer", [
    [1], {"state": {0: {}}}, {"state": {}},
    {"m": {}, "v": {}}, {"m": [1], "v": []},
], ids=str)
def test_a_pickle_that_is_not_the_runs_is_named_and_left_alone(tokens, tmp_path, optimizer):
    run = tmp_path / "runs" / "a"
    flags = ["--pe", "nope", *TINY, "--data", tokens, "--steps", "1", "--out", "runs/a"]
    assert command("train.py", *flags, cwd=tmp_path).returncode == 0
    torch.save({"step": 1, "optimizer": optimizer}, run / "optimizer.pt")
    record = files.read_json(run / "config.json")
    record["checkpoint"]["files"]["optimizer.pt"] = files.fingerprint(run / "optimizer.pt")
    files.write_json(run / "config.json", record)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    line = refused(command("lab.upgrade", "runs/a", cwd=tmp_path))
    assert "runs/a/optimizer.pt is not the optimizer's state of this run" in line
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}


def test_config_json_is_replaced_before_the_files_it_names_and_each_is_on_the_disk(tmp_path, monkeypatch):
    preset, record = config.PRESETS["mini"], {}
    backend = train.NumpyBackend(dataclasses.replace(preset.model, n_layers=1), preset.train, "cpu", False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").touch()
    runs.save_checkpoint(run, backend, 1, record)
    order, replace, fsync = [], os.replace, os.fsync

    def recorded_fsync(descriptor):
        order.append(("on disk", next(path.name for path in (run, *run.iterdir())
                                      if os.path.samestat(path.stat(), os.fstat(descriptor)))))  # fmt: skip
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(("renamed", os.path.basename(b))), replace(a, b)))
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    runs.save_checkpoint(run, backend, 2, record)
    assert order == [
        ("on disk", "model.safetensors.new"), ("on disk", "optimizer.safetensors.new"), ("on disk", "log.jsonl"),
        ("on disk", "run"),
        ("on disk", ".config.json.new"), ("renamed", "config.json"), ("on disk", "run"),
        ("renamed", "model.safetensors"), ("renamed", "optimizer.safetensors"), ("on disk", "run"),
    ]  # fmt: skip
    assert files.read_json(run / "config.json")["checkpoint"]["step"] == 2
    assert sorted(os.listdir(run)) == ["config.json", "log.jsonl", "model.safetensors", "optimizer.safetensors"]


@pytest.mark.slow
def test_compile_trains_to_the_same_losses(uninterrupted, flags, tmp_path):
    done = command("train.py", *flags, "--compile", "--out", "runs/a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = (tmp_path / "runs" / "a", uninterrupted[0])
    losses = [[line["val_loss"] for line in log(run) if "val_loss" in line] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # another order of sums, and another dropout mask
