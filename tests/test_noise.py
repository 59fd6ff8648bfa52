"""studies/noise.py: what each way of training really is, and the table recomputed from files."""

import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, command, refused

from common import checkpoint_info
from config import InputError
from lab.grids import GRIDS
from studies import noise


def test_older_instructions_are_asked_for_and_got():
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    found = {way: subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True)
             for way, more in noise.WAYS.items()}
    assert found["AVX2"].stdout.split() == ["AVX2", "1"], found["AVX2"].stderr
    assert [found[way].stdout.split()[1] for way in ("1 thread", "2 threads")] == ["1", "2"]


def test_runs_are_trained_once_each_in_its_way_and_told_with_other_seeds(tokens, tmp_path, monkeypatch):
    flags = [*TINY[2:], "--data", str(tokens), "--steps", "6"]
    monkeypatch.setattr(noise, "flags_of", lambda variant, seed: shlex.join(["--pe", variant, *flags]))
    asked = "studies.noise", "--variants", "rope", "--json", "n.json"
    done = command(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "n.json").read_text())
    assert [row["way"] for row in rows] == list(noise.WAYS)
    command("train.py", "--preset", "mini", "--pe", "rope", "--seed", "1", *flags, "--out", "again", cwd=tmp_path)
    assert rows[0]["weights"] == checkpoint_info(tmp_path / "again")["sha256"]
    for row in rows:
        place = tmp_path / "runs/noise" / f"rope-{row['way'].replace(' ', '-').lower()}"
        threads = json.loads((place / "config.json").read_text())["provenance"]["threads"]
        assert threads == int(noise.WAYS[row["way"]]["OMP_NUM_THREADS"])
    of_results = [[row["loss"] for row in json.loads((ROOT / f"results/mini/rope-s{s}.same-targets.json").read_text())
                   if row["protocol"] == "same-targets" and row["length"] == 2048] for s in (1, 2, 3)]
    losses = [row["losses"][1] for row in rows] + of_results[0]
    assert done.stdout.splitlines()[-1].split(" | ")[1:] == [
        "16x", *(f"{loss:.3f}" for loss in losses), f"{statistics.stdev(losses):.3f}",
        f"{statistics.stdev(sum(of_results, [])):.3f} |"]
    before = (tmp_path / "n.json").stat().st_mtime_ns
    assert command(*asked, cwd=tmp_path).stdout == done.stdout and (tmp_path / "n.json").stat().st_mtime_ns == before


def test_the_table_of_evidence_is_that_of_the_committed_file():
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "results/mini/noise.json").read_text())
    assert len(rows) == len(noise.METHODS) * len(noise.WAYS)
    for line in noise.compared(rows):
        assert f"| {' | '.join(line)} |\n" in page


def test_the_table_of_the_gpu_is_that_of_results_and_of_what_ran_there(tmp_path):
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    printed = command("studies.noise", "--gpu", cwd=tmp_path).stdout.splitlines()
    assert len(printed) == 2 + 2 * len(GRIDS["gpu"].evaluations) and all(f"{line}\n" in page for line in printed)
    name, at, *numbers = printed[-1].strip("| ").split(" | ")
    losses = [[row["loss"] for seed in (1, 2, 3)
               for row in json.loads((ROOT / f"results/{place}/{name}-s{seed}.test-spread.json").read_text())
               if row["length"] == 16 * row["trained_length"]] for place in ("far", "gpu")]
    apart = np.subtract(*losses)
    assert at == "16x" and numbers == [f"{x:.3f}" for x in (
        *np.mean(losses, 1), np.sqrt(np.mean(apart**2 / 2)), np.sqrt(np.var(losses, axis=1, ddof=1).mean()))]
    texts = set()
    for variant, (what, device) in itertools.product(GRIDS["gpu"].evaluations, [("far", "cpu"), ("gpu", "cuda")]):
        run = json.loads((ROOT / f"results/{what}/{variant}-s2.run.json").read_text())
        assert run["provenance"]["device"] == device
        texts.add(run["data"]["splits"]["train"]["sha256"])
    places = {variant: [noise.of_place(place, variant) for place in ("far", "gpu")]
              for variant in GRIDS["gpu"].evaluations}
    most = max(abs(a - b) for variant, (cpu, gpu) in places.items() for end in noise.ENDS
               if (variant, end) != ("rope-base100", 16) for a, b in zip(cpu[end], gpu[end], strict=True))
    assert len(texts) == 1 and f"by {most:.3f} at most" in " ".join(GRIDS["gpu"].says.split())


@pytest.mark.parametrize("change", ["remove", "null"])
def test_a_loss_that_the_table_of_the_gpu_lacks_is_named(change, tmp_path, monkeypatch):
    for place in ("far", "gpu"):
        shutil.copytree(ROOT / "results" / place, tmp_path / "results" / place)
    monkeypatch.setattr(noise, "ROOT", tmp_path)
    file = tmp_path / "results/gpu/fox-lr-x2-s2.test-spread.json"
    text = file.read_text()
    file.unlink() if change == "remove" else file.write_text(re.sub('"loss": [0-9.]+', '"loss": null', text))
    with pytest.raises(InputError, match="--gpu needs a loss of fox-lr-x2 with seed 2 under results/gpu"):
        noise.beside_gpu()


@pytest.mark.parametrize("words, message", [
    ("--gpu --variants fox", "--gpu reads results/ and takes no other flag: leave the others out"),
    ("--variants rop", "must be of"), ("--variants rope --lr 1", "--lr"),
    ("--ways 3", "must be of 1 thread, 2 threads, AVX2"),
    ("--variants fox-lr-x2", "without seed 1 and another: choose among expe"),
    ("--variants expe-on-k-tokens-x4", "has no same-targets of expe-on-k-tokens-x4 on val")])
def test_what_cannot_be_done_is_told_before_it_is_trained(words, message, tmp_path):
    assert message in refused(command("studies.noise", *words.split(), cwd=tmp_path))
    assert not (tmp_path / "runs").exists()
