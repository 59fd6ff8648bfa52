"""Text from a run: the distribution, the draw, plain and cached reading, and wrong flags."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, need, process, refused
from test_ladder import tiny
from test_model import some_tokens

import common
import data
import generate
from config import ENCODINGS
from longer import writing
from longer.cache import Cache
from longer.reading import Reader, load
from longer.writing import Step, generate_cached, lightened
from model_torch import GPT, Shaw


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
    counts = np.bincount([generate.draw(p, rng) for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, p[0], atol=0.01)


@pytest.mark.parametrize("pe", ["expe", "rope", "learned"])
def test_plain_and_cached_text_are_the_models_greedy_continuation(pe, workplace):
    run = workplace / "runs" / pe
    model, record = common.load_model(run)
    encoding = data.run_tokenizer(run, record["data"])
    tokens = [encoding.eot_token, *encoding.encode_ordinary("imp")]
    for _ in range(8):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = encoding.decode(tokens[1:])
    for more in ([], ["--cache"]):
        flags = ["--prompt", "imp", "--tokens", "8", "--temperature", "0", *more]
        done = command("generate.py", run, *flags, cwd=workplace)
        assert done.returncode == 0 and done.stdout.startswith(text[:20]), done.stderr


def test_a_seed_gives_its_text_again_and_others_give_others(workplace):
    texts = [command("generate.py", "runs/rope", "--tokens", "20", "--seed", seed, *more, cwd=workplace).stdout
             for seed, more in ((1, []), (1, []), (2, []), (1, ["--cache"]))]
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_prompts_of_different_lengths_side_by_side_are_as_each_alone(workplace):
    model, _ = load(workplace / "runs" / "rope")
    prompts = [[299, 5, 7, 9], [299], [299, 40]]

    def write(chosen, length):
        steps = generate_cached(model, chosen, Cache(), temperature=0)
        return list(zip(*itertools.islice(steps, length), strict=True))

    together = write(prompts, 12)
    for prompt, row in zip(prompts, together, strict=True):
        [alone] = write([prompt], 12 - len(prompt) + 1)
        assert list(row[len(prompt) - 1 :]) == list(alone) and list(row[: len(prompt) - 1]) == prompt[1:]


@pytest.mark.parametrize("pe, variant", [
    *((pe, ()) for pe in ENCODINGS), ("expe", [("on", "k")]), ("expe", [("on", "qkv")]),
    *(("expe", [("on", on), ("learn", learn)]) for on in ("k", "qk") for learn in ("init", "random")),
    ("fox+sinks", ()), ("rope+log", ()), ("nope+stick", ()), ("t5+sinks", ()), ("t5+log", ()), ("alibi+log", ())])
def test_a_step_gives_the_readers_numbers_bit_for_bit(pe, variant, monkeypatch):
    monkeypatch.setattr(writing, "AHEAD", 3)
    model, tokens = tiny(pe, variant=variant, make=Reader).float(), some_tokens(2, 12)
    steps_are_the_readers(model, tokens, np.arange(4))


def steps_are_the_readers(model, tokens, positions):
    with torch.inference_mode():
        kept, ours = Cache(), Cache()
        right = model.hidden(tokens[:, :4], positions, cache=kept)
        light = lightened(model)
        light.hidden(tokens[:, :4], positions, cache=ours)
        step = Step(light, ours)
        for t in range(4, tokens.shape[1]):
            right = model.hidden(tokens[:, t : t + 1], cache=kept)
            assert torch.equal(step(tokens[:, t : t + 1]), right)
    assert len(ours) == len(kept) == tokens.shape[1] and not torch.equal(right, right[:1].expand_as(right))


@pytest.mark.parametrize("pe", ["alibi", "t5", "rope", "expe", "grape"])
def test_a_step_follows_positions_with_gaps_and_other_classes(pe):
    model = tiny(pe, make=Reader).float()
    steps_are_the_readers(model, some_tokens(2, 12), np.array([0, 3, 5, 6]))
    encoding = model.encodings().pop()

    class Further(type(encoding)):
        def value(self, weights, v, table):
            more = weights.sum(-1, keepdim=True) * torch.ones(1 if table is None else table.shape[-1]).sum() / 2
            return weights @ v + more

    class ByPlace(type(encoding.settings)):
        def pairs(self, queries, keys, model):
            there = super().pairs(queries, keys, model)
            return None if there is None else (there + keys // 2) % 3

    own = ByPlace(**dataclasses.asdict(encoding.settings))
    for encoding in model.encodings():
        encoding.settings = own
    model.config = dataclasses.replace(model.config, encoding=own)
    steps_are_the_readers(model, some_tokens(2, 12), np.arange(4))
    for encoding in model.encodings():
        encoding.__class__ = Further
    steps_are_the_readers(model, some_tokens(2, 12), np.arange(4))


def test_another_encoding_with_a_value_door_is_read_as_it_is():
    class Squared(Shaw):
        def value(self, weights, v, table):
            return super().value(weights**2, v, table)

    plain, reader = tiny("shaw"), tiny("shaw", make=Reader)
    for model in (plain, reader):
        model.encoding.__class__ = Squared
    tokens = some_tokens(2, 300)
    with torch.no_grad():
        torch.testing.assert_close(reader(tokens), plain(tokens))


@pytest.mark.parametrize("pe", ["t5", "kerple", "shaw", "grape"])
def test_a_bias_that_is_kept_for_all_blocks_follows_its_weights(pe):
    model, tokens = tiny(pe, make=Reader), some_tokens(2, 9)
    with torch.no_grad():
        before = model(tokens)
        for w in model.encodings().pop().parameters():
            w.add_(torch.arange(w.numel()).view(w.shape) % 3)
        after = model(tokens)
        model._tables = None, None
        right = model(tokens)
        fresh, other = tiny(pe, make=Reader), tiny(pe, seed=1, make=Reader)
        fresh(tokens)
        fresh.load_state_dict(other.state_dict(), assign=True)                         # as many changes, other tensors
        assert torch.equal(fresh(tokens), other(tokens))
    assert torch.equal(after, right) and not torch.allclose(before, right)


def test_shaws_reader_follows_autocast_its_class_and_its_settings():
    tokens = some_tokens(2, 20)
    model, fresh, plain = (tiny("shaw", make=make).float() for make in (Reader, Reader, GPT))
    model(tokens)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = model(tokens, tokens)
            torch.testing.assert_close(found, fresh(tokens, tokens))
        found.backward()
        torch.testing.assert_close(model(tokens), plain(tokens))
    for settings, kind in ((dataclasses.replace(plain.encoding.settings, max_distance=2), Shaw),
                           (plain.encoding.settings, type("Other", (Shaw,), {"value": lambda _, p, v, table: p @ v}))):
        for changed in (model, plain):
            changed.encoding.__class__, changed.encoding.settings = kind, settings
            changed.config = dataclasses.replace(changed.config, encoding=settings)
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_a_model_can_be_trained_after_it_has_written():
    model = tiny("grape", make=Reader)
    next(generate_cached(model, [[3, 4]], Cache()))
    model(some_tokens(2, 9), some_tokens(2, 9)).backward()
    assert all(w.grad is not None and not w.is_inference() for w in model.parameters())


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
    list(itertools.islice(generate_cached(model, [[299]], cache, temperature=0), 40))
    size = cache.nbytes
    list(itertools.islice(generate_cached(model, [[299]], cache, temperature=0), 200))
    assert cache.nbytes == size and len(cache) == 9
    flags = "--cache --stream --sinks 1 --window 5 --tokens 30".split()
    assert command("generate.py", "runs/rope", *flags, cwd=workplace).returncode == 0


@pytest.mark.parametrize("line, message", [
    ("runs/none", "no run directory"), ("runs/rope --tokens 0", "--tokens"),
    ("runs/rope --temperature -1", "--temperature"),
    ("runs/rope --temperature nan", "--temperature"),
    ("runs/rope --top-k 0", "--top-k"),
    ("runs/learned --tokens 60", "--tokens can be at most 16"), ("runs/rope --stream", "--stream"),
    ("runs/learned --cache --tokens 60", "--tokens can be at most 16"), ("runs/rope --cache --sinks 2", "add --stream"),
    ("runs/rope --cache --scale 2", "--scale is for expe and exqpe"),
    ("runs/rope --cache --factor 2", "--factor is for"),
    ("runs/rope --cache --prompts none.txt", "--prompts none.txt"),
    ("runs/rope --cache --prompts f.txt --prompt x", "leave out --prompt"),
    ("runs/rope --cache --prompts f.txt --stream", "leave out --stream"),
    ("runs/learned --cache --stream", "cannot stream"), ("runs/rope --device cuda:7", "--device"), ("", "RUN")])
def test_wrong_input_is_named_in_one_line(line, message, workplace):
    said = command("generate.py", *line.split(), cwd=workplace)
    assert said.returncode == 2 and message in said.stderr
    assert "usage" in said.stderr or refused(said)


def test_the_script_ends_quietly_where_its_output_does(workplace):
    shell = f"{sys.executable} {ROOT}/generate.py runs/rope --tokens 400 | head -c 1"
    done = subprocess.run(shell, shell=True, cwd=workplace, capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert process("generate.py", "--help", cwd=workplace).returncode == 0
