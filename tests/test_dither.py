"""ExPE's table in fewer bits: what is rounded, what is not, and what equal columns lose."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY, command, refused

from config import ModelConfig, make_encoding
from longer.reading import Reader
from studies import dither

TOKENS = torch.arange(64)[None] % 50


def model(format="fp32"):
    made = dither.Rounded(ModelConfig(2, 32, 2, 64, 50, encoding=make_encoding("expe", l=24, start=1.0)))
    for block in made.blocks:
        block.attn.qkv.weight.data *= 20  # first weights are small, and so is what positions change
    made.format = format
    return made.eval()


def test_each_format_is_torchs_own_or_a_quantizer_of_torch():
    table = np.random.default_rng(0).normal(size=(50, 24)) * 3
    for name, dtype in ("bf16", torch.bfloat16), ("fp16", torch.float16):
        assert np.array_equal(dither.FORMATS[name](table), torch.from_numpy(table).to(dtype).double().numpy())
    scale = float(np.abs(table).max() / 127)
    expected = torch.fake_quantize_per_tensor_affine(torch.from_numpy(table).float(), scale, 0, -127, 127)
    assert np.allclose(dither.FORMATS["int8"](table), expected, atol=1e-6)
    assert len(np.unique(dither.FORMATS["int8"](np.linspace(-1, 1, 9999)))) == 255


def test_the_table_alone_is_rounded():
    n = np.arange(64)
    exact, rounded = model(), model(format="bf16")
    [at], [at16] = exact.tables(n).values(), rounded.tables(n).values()
    assert torch.equal(at16.rows, at.rows.bfloat16().float()) and not torch.equal(at16.rows, at.rows)
    reader = Reader(exact.config)
    reader.load_state_dict(exact.state_dict())
    with torch.no_grad():
        assert torch.equal(exact(TOKENS), reader.eval()(TOKENS))
        assert 1e-4 < (rounded(TOKENS) - exact(TOKENS)).abs().max()
    rounded.format = "fp32"  # nothing is kept from format to format
    with torch.no_grad():
        assert torch.equal(rounded(TOKENS), exact(TOKENS))


def test_runs_of_one_name_are_one_row_with_an_interval(tokens, tmp_path):
    flags = [*TINY[2:], "--l", "8", "--start", "1", "--data", tokens, "--steps", "3", "--batch-size", "4"]
    for seed in 1, 2:
        done = command("train.py", "--preset", "mini", "--pe", "expe", *flags, "--seed", seed, "--out", f"a-s{seed}",
                       cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = command("studies.dither", "a-s1", "a-s2", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines, rows = done.stdout.splitlines(), json.loads((tmp_path / "rows.json").read_text())
    assert [line.split()[0] for line in lines[2:]] == ["bf16", "a", "1x", "4x", "16x"] and max(map(len, lines)) <= 80
    assert all(line.count("(") == 3 for line in lines[-3:]) and len(rows) == 2 * 4 * 3
    done = command("lab.measure", "a-s1", "--protocol", "same-targets", "--lengths", "16,64,256", "--json", "e.json",
                   cwd=tmp_path)
    scored = json.loads((tmp_path / "e.json").read_text())
    exact = [row["loss"] for row in scored if row["protocol"] == "same-targets"]
    found = [row["loss"] for row in rows if row["seed"] == 1 and row["format"] == "fp32"]
    assert found == pytest.approx(exact, abs=1e-6)
    losses = {(row["format"], row["multiple"]): row["loss"] for row in rows if row["seed"] == 1}
    assert all(losses[format, 16] != losses["fp32", 16] for format in ("bf16", "int8"))


def test_blocks_without_a_table_are_read_and_runs_that_have_none_are_named(tokens, tmp_path):
    for name, more in ("bare", ["--nope-every", "2"]), ("log", ["--softmax", "log"]), ("k", ["--on", "k"]):
        flags = ["--pe", "expe", *more, *TINY, "--data", tokens, "--steps", "1", "--out", name]
        done = command("train.py", *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = command("studies.dither", "bare", "log", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = refused(command("studies.dither", "bare", "k", cwd=tmp_path))
    assert "k must have expe or exqpe on queries and keys" in line
