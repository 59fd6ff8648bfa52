"""Text from a run: the distribution against another library, draws against logits without a cache, and what is seen."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, command, process, refused
from test_model import V, some_tokens, tiny
from test_past import reading

import data
from generate import distribution, generate
from past.cache import Cache
from past.reading import load
from runs import load_model


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
def test_the_distribution_is_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(5, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = TopPLogitsWarper(top_p)(None, theirs).softmax(-1)
    torch.testing.assert_close(distribution(logits, temperature, top_k, top_p), theirs, rtol=1e-12, atol=1e-15)


def test_a_temperature_next_to_zero_does_not_overflow():
    for temperature in (1e-308, 5e-324):
        p = distribution(torch.tensor([[0.0, 3.0, 2.0], [500.0, 1.0, 500.0]]), temperature)
        assert p.tolist() == [[0, 1, 0], [0.5, 0, 0.5]]


def test_temperature_zero_is_the_largest_logit():
    p = distribution(torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 1.0]]), temperature=0)
    assert p.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_draws_follow_the_distribution():
    model, seen = reading("expe"), np.zeros(V)
    prompts = [[3, 1, 2]] * 4000
    for token in next(generate(model, prompts, Cache(), temperature=0.8, top_k=6)):
        seen[token] += 1
    with torch.no_grad():
        p = distribution(tiny("expe")(torch.tensor([[3, 1, 2]]))[:, -1], 0.8, 6)[0].numpy()
    assert (seen[p == 0] == 0).all() and (p > 0).sum() == 6
    np.testing.assert_allclose(seen / 4000, p, atol=4 * 0.5 / 4000**0.5)  # four standard deviations


def without_a_cache(model, prompt, n):
    """Greedy tokens, each from all that stands before it, read anew."""
    tokens = list(prompt)
    for _ in range(n):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("pe, more", [
    *((pe, {}) for pe in ("expe", "rope", "t5", "sinusoidal", "kerple")), ("rope", {"nope_every": 2, "window": 5}),
], ids=str)
def test_prompts_of_different_lengths_side_by_side_are_as_each_alone(pe, more):
    model, plain = reading(pe, **more), tiny(pe, **more)
    prompts = [row[: 3 + 4 * b].tolist() for b, row in enumerate(some_tokens(3, 20))]
    steps = generate(model, prompts, Cache(), temperature=0)
    found = [prompt[:3] for prompt in prompts]
    for _ in range(30):
        for tokens, token in zip(found, next(steps), strict=True):
            tokens.append(token)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == without_a_cache(plain, prompt, 33 - len(prompt))


def test_a_sequence_draws_by_its_seed_and_index_alone():
    model, prompts = reading("rope"), [[1, 2, 3], [4]]

    def drawn(prompts, seed=0):
        steps = generate(model, prompts, Cache(), seed)
        return list(zip(*(next(steps) for _ in range(12)), strict=True))

    both = drawn(prompts)
    assert drawn(prompts) == both and drawn(prompts, seed=1) != both
    assert drawn([[1, 2, 3]])[0][:9] == both[0][2:11]  # alone it begins two steps earlier
    assert drawn([[4], [4]])[0] != drawn([[4], [4]])[1]


# ---- the command -----------------------------------------------------------------------------------------------------


def written(workplace, *arguments):
    done = command("generate.py", *arguments, cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stderr
    return done.stdout


def greedy_text(run, prompt, n, **scaling):
    """The text of n greedy tokens after the prompt, without a cache, and the logits of the last of them."""
    model, record = load(run)
    encoding = data.run_tokenizer(run, record["data"])
    prompt = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    model = model.scale_to(len(prompt) + n, **scaling) if scaling else load_model(run)[0]  # the plain GPT
    tokens = without_a_cache(model, prompt, n)
    text = tokens[1 : tokens.index(encoding.eot_token, 1)] if encoding.eot_token in tokens[1:] else tokens[1:]
    with torch.no_grad():
        return encoding.decode(text, errors="replace") + "\n", model(torch.tensor([tokens]))[0, -1]


def test_text_is_the_models_greedy_continuation_of_the_prompt(workplace):
    text = written(workplace, "runs/expe", "--prompt", "def f(", "--tokens", 20, "--temperature", 0)
    assert text == greedy_text(workplace / "runs/expe", "def f(", 20)[0]


def test_a_seed_gives_its_text_again_and_others_give_others(workplace):
    texts = [written(workplace, "runs/rope", "--seed", seed, "--tokens", 30) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_and_a_file(workplace, tmp_path):
    (tmp_path / "p.txt").write_text("häuser\n", encoding="utf-8")
    flags = ["--temperature", 0, "--tokens", 8]
    both = written(workplace, "runs/rope", "--prompt", "import ", "--prompt-file", tmp_path / "p.txt", *flags)
    alone = written(workplace, "runs/rope", "--prompt", "import ", *flags)
    other = written(workplace, "runs/rope", "--prompt-file", tmp_path / "p.txt", *flags)
    assert both == f"--- 1 ---\n{alone}--- 2 ---\n{other}" and other.startswith("häuser\n")


def test_bytes_wait_until_they_make_a_character(workplace):
    """With a vocabulary of 300 an ä is two tokens: neither alone is written as a broken character."""
    model, record = load(workplace / "runs/expe")
    encoding = data.run_tokenizer(workplace / "runs/expe", record["data"])
    assert len(encoding.encode_ordinary("ä€")) > 2
    assert written(workplace, "runs/expe", "--prompt", "ä€", "--tokens", 1).startswith("ä€")


def test_a_stream_is_plain_generation_until_its_window_is_full_and_then_goes_on(workplace):
    flags = ["runs/rope", "--prompt", "class "]
    plain = written(workplace, *flags, "--tokens", 5)
    stream = written(workplace, *flags, "--tokens", 60, "--stream", "--sinks", 2, "--window", 9)
    assert stream.startswith(plain.rstrip("\n")) and len(stream) > len(plain)
    assert stream != written(workplace, *flags, "--tokens", 60, "--stream", "--sinks", 2, "--window", 30)


@pytest.mark.parametrize(
    "run, flags, scaling",
    [
        ("rope", "--rope-scaling yarn", {"rope_scaling": "yarn"}),
        ("rope", "--rope-scaling dynamic --factor 3", {"rope_scaling": "dynamic", "factor": 3.0}),
        ("rope", "--rope-scaling dual-chunk --chunk 10", {"rope_scaling": "dual-chunk", "chunk": 10}),
        ("rope", "--rope-scaling self-extend --chunk 5 --factor 9", {"rope_scaling": "self-extend", "chunk": 5,
                                                                     "factor": 9}),
        ("rope", "--rope-scaling longrope --long-factors 1,1,1,1,1,1,1,1,2,2,2,2,3,3,3,3",
         {"rope_scaling": "longrope", "long": (1,) * 8 + (2,) * 4 + (3,) * 4}),
        ("expe", "--scale auto", {"scale": "auto"}),
    ],
)
def test_scaled_text_is_the_scaled_models(workplace, run, flags, scaling):
    prompt, run = "x" * 60, f"runs/{run}"  # the model was trained on 16 tokens
    text = written(workplace, run, *flags.split(), "--temperature", 0, "--prompt", prompt, "--tokens", 20)
    expected, logits = greedy_text(workplace / run, prompt, 20, **scaling)
    assert text == expected
    assert not torch.allclose(logits, greedy_text(workplace / run, prompt, 20)[1])


def test_learned_writes_as_much_as_it_has_positions_for(workplace):
    written(workplace, "runs/learned", "--prompt", "a b", "--seed", 3)
    written(workplace, "runs/learned", "--tokens", 16)


def test_a_terminal_that_lacks_a_character_gets_another(workplace):
    flags = ["runs/expe", "--prompt", "é漢字", "--tokens", 1]
    done = process("generate.py", *flags, cwd=workplace, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith("???")


def test_ctrl_c_ends_a_stream_well(workplace):
    process = subprocess.Popen(
        [sys.executable, ROOT / "generate.py", "runs/expe", "--stream"],
        cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a test run in the background ignores
    )  # fmt: skip
    first = process.stdout.read(40)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0 and len(first) == 40 and out.endswith(b"\n")
    assert b"tokens/s" in said and b"Traceback" not in said


@pytest.mark.parametrize(
    "line, message",
    [
        ("runs/expe --temperature -1", "--temperature must be at least 0, got -1.0"),
        ("runs/expe --top-k 0", "--top-k: must be at least 1, got 0"),
        ("runs/expe --top-p 1.5", "--top-p must be above 0 and at most 1, got 1.5"),
        ("runs/expe --temperature 0 --top-k 5", "leave out --top-k and --top-p"),
        ("runs/expe --tokens 0", "--tokens: must be at least 1, got 0"),
        ("runs/expe --seed -1", "--seed: must be at least 0, got -1"),
        ("runs/expe --window 8", "--sinks and --window say what a stream keeps: add --stream"),
        ("runs/expe --stream --window 0", "--window: must be at least 1, got 0"),
        ("runs/expe --stream --sinks -1", "--sinks: must be at least 0, got -1"),
        ("runs/learned --stream", "learned cannot stream as trained here: positions are part of the embeddings"),
        ("runs/learned --tokens 40", "<|endoftext|> and prompt are 1, so that --tokens can be at most 16"),
        ("runs/rope --scale 0.5", "scale is for expe and exqpe, and rope has no use for it"),
        ("runs/expe --rope-scaling yarn", "rope_scaling is for rope, and expe has no use for it"),
        ("runs/rope --rope-scaling cubic", "--rope-scaling: invalid choice: 'cubic'"),
        ("runs/expe --stream --prompt a --prompt b", "a stream has no end: add --tokens"),
        ("runs/expe --stream --sinks 15", "--sinks 15 leave no window within the trained length, 16"),
        ("runs/rope --rope-scaling ntk --factor 1e300", "factor must be above 0 and at most 1e6, got 1e+300"),
        ("runs/rope --rope-scaling dual-chunk --chunk 0", "chunk must be from 1 to 15, got 0"),
        ("runs/rope --factor 2", "--factor is for --rope-scaling linear, ntk, dynamic, yarn"),
        ("runs/rope --rope-scaling dual-chunk --factor 2", "--factor is for --rope-scaling linear"),
        ("runs/rope --rope-scaling yarn --chunk 4", "--chunk is for --rope-scaling dual-chunk"),
        ("runs/rope --rope-scaling yarn --factor 0", "factor must be above 0 and at most 1e6, got 0.0"),
        ("runs/rope --rope-scaling dual-chunk --chunk 16", "chunk must be from 1 to 15, got 16"),
        ("runs/expe --scale 0", "scale must be above 0 and at most 1e6, got 0"),
        ("runs/expe --scale half", "--scale: 'half' is not a number"),
        ("runs/nowhere", "runs/nowhere: no such run directory"),
        ("runs/expe --prompt-file nowhere.txt", "nowhere.txt is missing"),
        ("runs/expe --prompt-file runs/expe/model.safetensors", "model.safetensors is not UTF-8 text"),
        ("runs/expe --device gpu", "device must be auto, cpu"),
    ],
)
def test_wrong_input_is_named_in_one_line(workplace, line, message):
    done = command("generate.py", *line.split(), cwd=workplace)
    assert message in refused(done) and done.stdout == ""


def test_a_damaged_tokenizer_is_named(workplace, tmp_path):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    (tmp_path / "run" / "tokenizer.tiktoken").write_text("")
    assert "has not the size and hash" in refused(command("generate.py", "run", cwd=tmp_path))


# ---- without end -----------------------------------------------------------------------------------------------------

ENDLESS = """
import json, sys
from generate import generate
from lab.bench import peak_bytes
from past.cache import Cache
from test_past import reading
cache, peaks = Cache(4, 60), []
steps = generate(reading(sys.argv[1]).float(), [[1]], cache)
for i in range(100_000):
    token, = next(steps)
    if i % 20_000 == 19_999:
        peaks.append(peak_bytes())
print(json.dumps({"peaks": peaks, "keys": len(cache), "last": token}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("pe", ["expe", "t5"])
def test_a_stream_of_100000_tokens_in_constant_memory(pe):
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, pe], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["keys"] == 65 and 0 <= found["last"] < V
    assert found["peaks"][-1] - found["peaks"][0] < 4e6  # bytes; 80,000 keys and values would take 20 MB
