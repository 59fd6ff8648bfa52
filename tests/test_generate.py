"""Text from a run: the distribution, the draw, plain and cached reading, and wrong flags."""

import itertools
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, refused
from test_ladder import tiny

import generate
from longer.cache import Cache
from longer.reading import Reader, load
from longer.writing import generate_cached
from runs import load_model
from tokenizer import read_tokenizer


@pytest.mark.parametrize("temperature, top_k", [(1, None), (0.5, 7), (2, None), (0.9, 12)])
def test_the_distribution_is_transformers(temperature, top_k):
    transformers = need("transformers")
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    warpers = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    expected = warpers(torch.zeros(3, 1, dtype=torch.long), logits).softmax(-1)
    torch.testing.assert_close(generate.distribution(logits, temperature, top_k), expected)


def test_a_temperature_next_to_zero_is_the_largest_logit():
    logits = torch.tensor([[1000.0, -2000.0, 999.0]])
    for temperature in (0, 1e-300):
        assert generate.distribution(logits, temperature).tolist() == [[1, 0, 0]]


def test_draws_follow_the_distribution():
    p = torch.tensor([[0.1, 0.0, 0.6, 0.3]], dtype=torch.float64)
    rng = np.random.default_rng(0)
    counts = np.bincount([generate.draw(p, rng) for _ in range(10_000)], minlength=4) / 10_000
    np.testing.assert_allclose(counts, p[0], atol=0.01)


@pytest.mark.parametrize("pe", ["expe", "rope", "learned"])
def test_plain_and_cached_text_are_the_models_greedy_continuation(pe, workplace):
    run = workplace / "runs" / pe
    model, record = load_model(run)
    encoding = read_tokenizer(run, record["data"])
    tokens = [encoding.eot_token, *encoding.encode_ordinary("imp")]
    for _ in range(8):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = encoding.decode(tokens[1:])
    for more in ([], ["--cache"]):
        flags = ["--prompt", "imp", "--tokens", "8", "--temperature", "0", *more]
        done = command("generate.py", run, *flags, cwd=workplace)
        assert done.returncode == 0 and done.stdout.startswith(text[:20]), done.stderr


def test_text_with_hidden_keys_is_that_of_a_config_with_that_window(workplace, tmp_path):
    near = shutil.copytree(workplace / "runs" / "rope", tmp_path / "near")
    path = near / "config.json"
    assert '"window": 0' in (text := path.read_text())
    path.write_text(text.replace('"window": 0', '"window": 3'))
    flags = ["--prompt", "import os", "--tokens", "60"]
    for more in ([], ["--stream", "--sinks", "1", "--window", "9"]):
        found, right, plain = (command("generate.py", run, *flags, "--cache", *more, *keys, cwd=workplace)
                               for run, keys in (("runs/rope", ["--keys", "3"]), (near, []), ("runs/rope", [])))
        assert found.returncode == 0 and found.stdout == right.stdout != plain.stdout, found.stderr


def test_a_seed_gives_its_text_again_and_others_give_others(workplace):
    texts = [command("generate.py", "runs/rope", "--tokens", "20", "--seed", seed, *more, cwd=workplace).stdout
             for seed, more in ((1, []), (1, []), (2, []), (1, ["--cache"]))]
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_sequences_side_by_side_draw_from_generators_of_their_own():
    def write(prompts):
        steps = generate_cached(tiny(make=Reader), prompts, Cache(), generate.choose)
        return list(zip(*itertools.islice(steps, 9), strict=True))

    both = write([[1, 2], [1, 2]])
    assert both[0] != both[1] and both[:1] == write([[1, 2]])


def test_prompts_of_a_file_are_written_as_each_alone(workplace, tmp_path):
    prompts = ["imp", "def main(", "x\fy"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8-sig")      # with a byte order mark
    flags = ["--cache", "--tokens", "8", "--temperature", "0"]
    alone = [command("generate.py", "runs/rope", "--prompt", text, *flags, cwd=workplace).stdout for text in prompts]
    together = command("generate.py", "runs/rope", "--prompts", tmp_path / "prompts.txt", *flags, cwd=workplace)
    assert together.returncode == 0 and together.stdout == "\n".join(alone), together.stderr


def test_a_stream_goes_on_in_constant_memory(workplace):
    model, _ = load(workplace / "runs" / "rope")
    cache = Cache(2, 6)
    list(itertools.islice(generate_cached(model, [[299]], cache, generate.choose), 40))
    size = cache.nbytes
    list(itertools.islice(generate_cached(model, [[299]], cache, generate.choose), 100))
    assert cache.nbytes == size and len(cache) == 9
    for flags in ("--cache --stream --sinks 1 --window 5 --tokens 30", "--cache --tokens 30 --rope-scaling yarn"):
        assert command("generate.py", "runs/rope", *flags.split(), cwd=workplace).returncode == 0


@pytest.mark.parametrize("line, message", [
    ("runs/none", "no run directory"), ("runs/rope --tokens 0", "--tokens"), ("", "RUN"),
    ("runs/rope --temperature nan", "--temperature"), ("runs/rope --stream", "--stream"),
    ("runs/learned --tokens 60", "--tokens can be at most 16"), ("runs/rope --cache --sinks 2", "add --stream"),
    ("runs/rope --keys 8", "did you mean --cache --keys?"), ("runs/rope --cache --keys x", "--keys"),
    ("runs/rope --cache --keys 0", "--keys: must be at least 1"), ("runs/rope --cache --keys -1", "least 1, got -1"),
    ("runs/learned --cache --tokens 60", "at most 16"), ("runs/rope --cache --factor 2", "--factor is for"),
    ("runs/rope --cache --prompts none.txt", "--prompts none.txt"), ("runs/learned --cache --stream", "cannot stream"),
    ("runs/rope --cache --prompts f.txt --stream", "leave out --stream")])
def test_wrong_input_is_named_in_one_line(line, message, workplace):
    said = command("generate.py", *line.split(), cwd=workplace)
    assert said.returncode == 2 and message in said.stderr
    assert "usage" in said.stderr or refused(said)


def test_the_script_ends_quietly_where_its_output_does(workplace, start):
    writer = start([sys.executable, ROOT / "generate.py", "runs/rope", "--tokens", "100"], cwd=workplace)
    writer.stdout.read(1)
    writer.stdout.close()                                               # as head -c 1 does
    assert "Traceback" not in writer.stderr.read()
