"""Runs exported to transformers, which loads them, reads and generates as this project does."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import unicodedata
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from conftest import ROOT, command, need, refused, slow
from test_ladder import CYCLES, EXACT, SOFTMAXES, tiny
from test_paths import snapshot

import model_torch
from generate import generate
from interop.over import SHAPE
from interop.tokens import PAD, to_tokenizers
from positional_encodings import ENCODINGS
from runs import CHECKPOINT, load_model, read_checkpoint, read_run, save_checkpoint
from tokenizer import EOT, make_tokenizer, read_ranks, train_tokenizer

OWN = {"rope": "GPTNeoXForCausalLM", "partial": "GPTNeoXForCausalLM", "learned": "GPT2LMHeadModel"}      # with gelu
CASES = [
    *((pe, "gpt", {}) for pe in ENCODINGS), ("rope", "llama", {}), ("rope", "llama", {"tied": False}),
    ("partial", "llama", {}), ("learned", "gpt", {"tied": True}), ("rope", "gpt", {"nope_every": 2}),
    ("rope", "gpt", {"window": 4}), ("rope+sinks", "llama", {"nope_every": 2, "window": 5}), ("expe+sinks", "gpt", {}),
    ("rope", "gpt", {"layers": 4, "cycle": "rope:window=4,t5,rope:base=50,nope"}),
    ("fox", "llama", {"cycle": "fox,rope"}),
    ("nope+llama4", "gpt", {}), ("fox+log", "gpt", {"window": 5}), ("sinusoidal+sinks", "gpt", {}),
    *(("expe", "gpt", {"variant": variant}) for variant in ({"on": "k"}, {"once": True}, {"learn": "random"})),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """transformers without a hub, and with a folder of its own for the code that a model brings."""
    transformers = need("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
            patch.setattr(module, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")), raising=False)
        yield transformers


@contextlib.contextmanager
def without_this_repository():
    """None of its modules is imported, or can be."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}") and ".venv" not in str(
                    module.__file__):
                patch.delitem(sys.modules, name)
        patch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
        yield


def write_run(model, folder, other):
    """Make the run directory of a model, at step 8, with the tokenizer and the data of another run."""
    shutil.copytree(other, folder)
    change(folder, "config.json", model=dataclasses.asdict(model.config))
    save_checkpoint(folder, {name: w.numpy() for name, w in model.float().state_dict().items()}, 8)


def change(folder, name, **values):
    """Set fields in a JSON file."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


@pytest.fixture
def export(workplace, tmp_path):
    """A function that exports a run with such a model, and returns the folder and the model as its run has it."""

    def made(pe, style="gpt", **changes):
        positions = {"n_positions": 300} if pe == "learned" else {}
        model = tiny(pe, style, vocab=300, **{"variant": positions} | changes)
        write_run(model, tmp_path / "run", workplace / "runs" / "rope")
        done = command("interop.export", "run", "--to", "transformers", "exported", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "step 8 of" in done.stdout
        return tmp_path / "exported", load_model(tmp_path / "run")[0]

    return made


def load(library, folder, **options):
    own = (folder / "modeling_gpt.py").exists()
    with without_this_repository():
        model = library.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=own, **options).eval()
    model.generation_config.eos_token_id = None  # or else a text might end
    return model


def some(*shape):
    return torch.randint(299, shape, generator=torch.Generator().manual_seed(1))


def greedy(model, tokens, steps):
    """What our model writes, reading all anew at each step."""
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    return tokens


# ---- to transformers -------------------------------------------------------------------------------------------------


QUICK = ("expe", "rope", "alibi", "fox", "learned", "shaw", "partial", "path")


@pytest.mark.parametrize("pe, style, changes", [
    *(case for case in CASES if case[0] in QUICK and not case[2]),
    *slow(*(case for case in CASES if case[0] not in QUICK or case[2]))], ids=str)
@torch.no_grad()
def test_logits_loss_and_greedy_tokens_are_our_models_and_padding_changes_nothing(library, export, pe, style, changes):
    folder, ours = export(pe, style, **changes)
    theirs, own = load(library, folder), pe in OWN and not changes.keys() & {"nope_every", "window", "cycle"}
    llama = pe == "rope" and style == "llama" and not changes.keys() & {"nope_every", "window", "cycle"}
    kind = "LlamaForCausalLM" if llama else OWN[pe] if own and style == "gpt" else "GPTForCausalLM"
    assert type(theirs).__name__ == kind and (folder / "modeling_gpt.py").exists() == (kind == "GPTForCausalLM")
    for T in (12, 48):  # the trained length and four times that
        torch.testing.assert_close(theirs(some(2, T)).logits, ours(some(2, T)), rtol=1e-5, atol=1e-5)
    found = theirs.generate(some(2, 8), max_new_tokens=10, do_sample=False)  # past the trained length
    assert torch.equal(found, greedy(ours, some(2, 8), 10))
    text = some(1, 7)
    torch.testing.assert_close(theirs(text, labels=text).loss, ours(text[:, :-1], text[:, 1:]))
    tokens = torch.cat((torch.cat((some(1, 4), text), 1), some(1, 11)))  # padded on the left, as `generate` pads
    mask = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    torch.testing.assert_close(theirs(tokens, **options).logits[:1, 4:], ours(text), rtol=1e-4, atol=1e-5)
    found = theirs.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=299)
    assert torch.equal(found[:1, 4:], greedy(ours, text, 6))
    if style == "gpt" and not changes and "+" not in pe:
        check_bf16(load(library, folder, dtype=torch.bfloat16) if pe == "expe" else theirs.bfloat16(), ours)


@pytest.mark.parametrize("pe, changes", [("fox", {}), ("rope", {}), ("learned", {"variant": {}})])
def test_the_code_of_the_readme_writes_what_generate_writes(library, export, monkeypatch, pe, changes):
    folder, ours = export(pe, **changes)  # learned has positions for 12 tokens
    monkeypatch.chdir(folder)
    names = {}
    exec(re.search("```python\n(.*?)```", Path("README.md").read_text(), re.S)[1], names)
    prompt, written = names["tokens"][0].tolist(), names["written"][0].tolist()
    encoding = make_tokenizer(read_ranks("../run/tokenizer.tiktoken"))
    assert prompt == [encoding.eot_token, *encoding.encode_ordinary("The")]
    new = [*itertools.islice(generate(ours, prompt, temperature=0), len(written) - len(prompt))]
    assert written == prompt + new
    assert written[-1] == encoding.eot_token or len(written) == (12 if pe == "learned" else 200)


@torch.no_grad()
def check_bf16(theirs, ours):
    """Logits in bf16 are nearly as right as those without an encoding."""
    def relative_error(found, exact):
        return (found - exact).abs().mean() / exact.std()

    tokens, nope = some(2, 120), tiny("nope", vocab=300).bfloat16()
    error = relative_error(theirs(tokens).logits, ours.bfloat16().double()(tokens))  # the same weights
    assert error < 1.5 * relative_error(nope(tokens), nope.double()(tokens))


# ---- positions that the caller gives ---------------------------------------------------------------------------------

SOFTENED = [f"{pe}+{softmax}" for pe in ENCODINGS for softmax in SOFTMAXES]
PACKED = [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]                            # the positions of three texts in one row


def build_own(ours):
    """The class of an exported folder, with the weights of a GPT, in its dtype."""
    from interop.export import own_names
    from interop.modeling_gpt import GPTConfig, GPTForCausalLM

    values = {name: getattr(ours.config, field) for name, field in SHAPE.items()} | {"tie_word_embeddings": False}
    model = GPTForCausalLM(GPTConfig(model=dataclasses.asdict(ours.config), **values)).to(ours.output_weight.dtype)
    model.load_state_dict(own_names(ours.state_dict()))
    model.generation_config.pad_token_id = 0
    return model.eval()


def build_pair(pe, **changes):
    """(ours, theirs): a tiny GPT in float64 with positions for 80 tokens, and the exported class with its weights."""
    ours = tiny(pe, **{"variant": {"n_positions": 80}} | changes if pe.startswith("learned") else changes)
    return ours, build_own(ours)


def draw_positions(seed):
    """(4, 11) positions below 80, each row its own: from an offset, with gaps, in any order, and with repeats."""
    rng = np.random.default_rng(seed)
    offset = rng.integers(1, 60) + np.arange(11)
    gaps = np.sort(rng.choice(80, 11, replace=False))
    return torch.from_numpy(np.stack((offset, gaps, 1 + rng.permutation(79)[:11], rng.integers(1, 9, 11))))


def read_in_parts(model, tokens, n, ends, cache=None, **options):
    """(logits, cache) of tokens at positions n, read up to one end after the other."""
    parts = []
    for begin, end in itertools.pairwise((0, *ends)):
        found = model(tokens[:, begin:end], position_ids=n[:, begin:end], past_key_values=cache, use_cache=True,
                      **{name: mask[:, :end] for name, mask in options.items()})
        cache = found.past_key_values
        parts.append(found.logits)
    return torch.cat(parts, 1), cache


def check_any_positions(pe, seed, **changes):
    """A whole pass, parts with a cache, and what changes a cache, against the plain model at the same positions."""
    ours, theirs = build_pair(pe, **changes)
    tokens, n = torch.randint(40, (4, 11), generator=torch.Generator().manual_seed(seed)), draw_positions(seed)
    close = functools.partial(torch.testing.assert_close, rtol=EXACT, atol=EXACT, msg=lambda words: f"{pe}: {words}")
    right = ours(tokens, positions=n)                                                  # (4, 11, V)
    close(theirs(tokens, position_ids=n, use_cache=False).logits, right)
    found, cache = read_in_parts(theirs, tokens, n, (5, 6, 8, 11))
    close(found, right)
    cache.crop(-4)                                                                     # as assisted generation does
    close(read_in_parts(theirs, tokens[:, 7:], n[:, 7:], (1, 4), cache)[0], right[:, 7:])
    cache.crop(-3)
    beams = torch.tensor([2, 0, 0, 3])
    cache.reorder_cache(beams)                                                         # as beam search does
    again, other = tokens[beams], n[beams]
    again[:, 8:], other[:, 8:] = tokens[:, 8:], n[:, 8:]
    close(theirs(again[:, 8:], position_ids=other[:, 8:], past_key_values=cache).logits,
          ours(again, positions=other)[:, 8:])
    _, cache = read_in_parts(theirs, tokens, n, (6,))
    cache.batch_select_indices(torch.tensor([3, 1]))
    cache.batch_repeat_interleave(2)
    chosen = torch.tensor([3, 3, 1, 1])
    found = theirs(tokens[chosen, 6:], position_ids=n[chosen, 6:], past_key_values=cache).logits
    close(found, right[chosen, 6:])
    mask = torch.ones(4, 11, dtype=torch.long)
    mask[0, :3], mask[2, :6] = 0, 0                                                    # padding on the left
    for found in (theirs(tokens, position_ids=n * mask, attention_mask=mask).logits,
                  read_in_parts(theirs, tokens, n * mask, (4, 9, 11), attention_mask=mask)[0]):
        for b, pads in enumerate((3, 0, 6, 0)):
            close(found[b, pads:], ours(tokens[b : b + 1, pads:], positions=n[b : b + 1, pads:])[0])


@pytest.mark.parametrize("pe", [*ENCODINGS, "nope+llama4", *slow(*SOFTENED)])
@torch.no_grad()
def test_a_cache_keeps_positions_that_the_caller_gives(library, pe):
    for seed in range(3):
        check_any_positions(pe, seed)


@pytest.mark.parametrize("pe", CYCLES)
@torch.no_grad()
def test_a_cache_keeps_positions_where_blocks_differ(library, pe):
    check_any_positions(pe, 0, layers=4, cycle=CYCLES[pe])


@pytest.mark.parametrize("pe", [*ENCODINGS, "t5+log"])
@torch.no_grad()
def test_positions_that_are_left_out_count_on_from_the_last_one(library, pe):
    """In each row of a batch by itself, past the padding that an earlier part has on the right."""
    from interop.modeling_gpt import COUNT_KEYS

    ours, theirs = build_pair(pe)
    tokens = some(2, 9) % 40
    for n in (torch.tensor([[4, 9, 10, 11], [7, 8, 3, 5]]), torch.tensor([[-9, -7, -4, -3], [-2, -1, 0, 1]])):
        if pe == "learned" and n.min() < 0:
            continue
        _, cache = read_in_parts(theirs, tokens, n, (4,))
        found = torch.cat([theirs(tokens[:, i:j], past_key_values=cache).logits for i, j in ((4, 5), (5, 9))], 1)
        whole = torch.cat((n, n[:, -1:] + torch.arange(1, 6)), 1)
        torch.testing.assert_close(found, ours(tokens, positions=whole)[:, 4:], rtol=EXACT, atol=EXACT)
    mask = torch.tensor([[1] * 9, [1] * 2 + [0] * 2 + [1] * 5])
    cache = theirs(tokens[:, :4], attention_mask=mask[:, :4]).past_key_values
    if pe in COUNT_KEYS:
        with pytest.raises(ValueError, match="attention_mask has padding between tokens, .*: pad texts on the left"):
            theirs(tokens[:, 4:], attention_mask=mask, past_key_values=cache)
        return
    found = theirs(tokens[:, 4:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found[:1], ours(tokens)[:1, 4:], rtol=EXACT, atol=EXACT)
    short = torch.cat((tokens[1:, :2], tokens[1:, 4:]), 1)
    torch.testing.assert_close(found[1:], ours(short)[:, 2:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("pe", ["t5", "rove", "fire", "expe", "shaw+sinks", "fox", *slow(
    *(pe for pe in ENCODINGS if pe not in ("t5", "rove", "fire", "expe", "fox")))])
@torch.no_grad()
def test_generation_goes_on_from_the_positions_of_the_prompt(library, pe):
    """Greedy, with beams, and with a draft that is partly taken back, with the plain model's tokens."""
    ours, theirs = build_pair(pe)
    tokens, n = some(1, 6) % 40, torch.tensor([[3, 4, 9, 10, 11, 20]])
    right = tokens
    for step in range(9):
        positions = torch.cat((n, 21 + torch.arange(step)[None]), 1)
        right = torch.cat((right, ours(right, positions=positions)[:, -1:].argmax(-1)), 1)
    write = functools.partial(theirs.generate, do_sample=False, max_new_tokens=9)
    assert torch.equal(write(tokens, position_ids=n), right)
    draft = build_pair(pe, seed=1)[1]
    for name, w in draft.named_parameters():                           # near to the model: some of its tokens hold
        w.lerp_(theirs.get_parameter(name), 0.9)
    assert torch.equal(write(tokens, position_ids=n, assistant_model=draft), right)
    assert torch.equal(write(tokens, position_ids=n, prompt_lookup_num_tokens=3), right)
    batch, own = torch.cat((tokens, some(1, 6) % 40)), torch.cat((n, n + 5))
    with_cache, without = (write(batch, position_ids=own, num_beams=3, use_cache=cache) for cache in (True, False))
    assert torch.equal(with_cache, without)


CANNOT = {  # what a model is called with, for 4 tokens of 2 texts: what is said
    "packed": (lambda m, x: m(x, position_ids=torch.tensor([[0, 1, 0, 1]])), "packed into one row here .position_ids"),
    "packed, one token each": (lambda m, x: m(x, position_ids=torch.zeros(2, 4, dtype=torch.long)),
                               "position_ids return to 0 within it.: give each text a row of its own, with padding"),
    "packed, in one row": (lambda m, x: m(x, position_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 0, 1]])), "return to 0"),
    "packed, by a cache": (lambda m, x: m(x, position_ids=torch.tensor([[0, 1, 2, 3]]), past_key_values=m(
        x).past_key_values), "position_ids return to 0 within it"),
    "flattened": (lambda m, x: m(**flatten(x)), "position_ids return to 0 within it"),
    "flattened, for a kernel": (lambda m, x: m(**flatten(x, return_position_ids=False, return_flash_attn_kwargs=True)),
                                "packed into one row here .as cu_seq_lens_q says.: give each text a row of its own"),
    "flattened, by index": (lambda m, x: m(**flatten(x, return_position_ids=False, return_seq_idx=True)), "as seq_idx"),
    "too few": (lambda m, x: m(x, position_ids=torch.arange(3)[None]), r"position_ids must be \(B, T\), \(2, 4\) here"),
    "one axis": (lambda m, x: m(x, position_ids=torch.arange(4)), r"one for each of input_ids, got \(4,\)"),
    "fractions": (lambda m, x: m(x, position_ids=torch.rand(2, 4)), "position_ids must be integers from -2"),
    "mask": (lambda m, x: m(x, attention_mask=torch.tensor([[0, 1, 1, 1]] * 2), past_key_values=m(x).past_key_values),
             r"attention_mask must be \(B, S\), \(2, 8\) here, a column for each key in the cache and each new token"),
    "fewer texts": (lambda m, x: m(x[:1], past_key_values=m(x).past_key_values), "past_key_values holds 2 sequences"),
    "static": (lambda m, x: m(x, past_key_values=import_module("transformers").StaticCache(m.config, max_cache_len=9)),
               "past_key_values must be a DynamicCache that keeps every key"),
    "sliding": (lambda m, x: m(x, past_key_values=sliding_cache()), "past_key_values must be a DynamicCache that keep"),
    "tuple": (lambda m, x: m(x, past_key_values=((x, x), (x, x))), "past_key_values must be a DynamicCache that keeps"),
    "of another": (lambda m, x: m(x, past_key_values=cache_without_positions()), "must come from this model, which ke"),
}


def flatten(texts, **options):
    collator = import_module("transformers").DataCollatorWithFlattening(**options, return_tensors="pt")
    return collator([{"input_ids": text} for text in texts.tolist()])


def sliding_cache():
    layer = import_module("transformers.cache_utils").DynamicSlidingWindowLayer
    cache = import_module("transformers").DynamicCache()
    cache.layers += [layer(sliding_window=4), layer(sliding_window=4)]
    return cache


def cache_without_positions():
    cache = import_module("transformers").DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8), layer)
    return cache


@pytest.mark.parametrize("case", CANNOT)
@torch.no_grad()
def test_what_cannot_be_right_is_refused_in_one_line(library, case):
    call, words = CANNOT[case]
    with pytest.raises(ValueError, match=words) as error:
        call(build_pair("t5")[1], some(2, 4) % 40)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_padding_within_a_window_is_refused(library):
    _, theirs = build_pair("t5", window=4)
    with pytest.raises(ValueError, match="attention_mask has padding between tokens"):
        theirs(some(1, 5) % 40, attention_mask=torch.tensor([[1, 1, 0, 1, 1]]))
    theirs(some(1, 5) % 40, attention_mask=torch.tensor([[0, 1, 1, 1, 0]]))


@pytest.mark.parametrize("pe, style", [("rope", "llama"), ("rope", "gpt"), ("partial", "gpt"), ("learned", "gpt")])
@torch.no_grad()
def test_what_transformers_own_classes_do_with_positions(library, export, pe, style):
    """As interop/README.md has it."""
    folder, ours = export(pe, style)
    theirs, tokens = load(library, folder), some(4, 11)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for seed in range(3):
        n = draw_positions(seed)
        right = ours(tokens, positions=n)
        close(theirs(tokens, position_ids=n).logits, right)                            # it makes a cache by default
        close(theirs(tokens, position_ids=n, use_cache=False, attention_mask=torch.ones_like(tokens)).logits, right)
        close(read_in_parts(theirs, tokens, n, (5, 6, 11))[0], right)
    texts = [slice(0, 5), slice(5, 8), slice(8, 11)]
    for n in (torch.tensor([PACKED]), torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11, 30, 31, 32]])):       # restarts, gaps
        found = theirs(tokens[:1], position_ids=n, use_cache=False).logits
        alone = [ours(tokens[:1, text], positions=n[:, text]) for text in texts]
        close(found, torch.cat(alone, 1))                              # each step other than 1 begins a new text
        together = ours(tokens[:1], positions=n)
        assert (together - found).abs().max() > 0.01
        close(theirs(tokens[:1], position_ids=n).logits, together)     # not so with a cache or a mask
        close(theirs(tokens[:1], position_ids=n, use_cache=False, attention_mask=torch.ones(1, 11)).logits, together)
    if pe == "learned":
        with pytest.raises(IndexError):
            theirs(tokens[:1], position_ids=torch.arange(290, 301)[None])              # of 300 rows


# ---- training on -----------------------------------------------------------------------------------------------------


def test_the_loss_of_accumulated_batches_is_that_of_one_large_batch(library, export, tmp_path):
    need("accelerate")
    folder, _ = export("expe")
    texts = [{"input_ids": text, "labels": text} for text in some(8, 10).tolist()]
    for text, targets in zip(texts, range(2, 10), strict=True):  # batches with unequally many targets
        text["labels"] = [-100] * (10 - targets) + text["labels"][10 - targets :]
    losses = []
    for size, steps in ((8, 1), (2, 4)):
        options = library.TrainingArguments(str(tmp_path / "trainer"), per_device_train_batch_size=size, max_steps=1,
                                            gradient_accumulation_steps=steps, report_to=[], save_strategy="no",
                                            use_cpu=True, logging_steps=1, disable_tqdm=True)
        trainer = library.Trainer(load(library, folder), options, train_dataset=texts)
        with contextlib.redirect_stdout(io.StringIO()):
            losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_collator_masks_padding_and_keeps_the_end_of_text(library, export):
    folder, _ = export("rope")
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    rows = [{"input_ids": [end, *tokenizer("def").input_ids, end]}, {"input_ids": [end, *tokenizer("ÿ = 1").input_ids]}]
    batch = library.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert tokenizer.pad_token_id != end and tokenizer.pad_token_id < 300
    for row, tokens, labels, seen in zip(rows, batch["input_ids"], batch["labels"], batch["attention_mask"],
                                         strict=True):
        n = len(row["input_ids"])
        first = len(tokens) - n if tokenizer.padding_side == "left" else 0
        assert labels[first : first + n].tolist() == tokens[first : first + n].tolist() == row["input_ids"]
        assert seen.sum() == n and (labels == -100).sum() == len(tokens) - n


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_the_vocabulary_grows_and_hidden_states_are_those_between_the_blocks(library, export, tmp_path, tied):
    folder, ours = export("expe", tied=tied)
    model = load(library, folder)
    found = model(some(2, 9), output_hidden_states=True)
    assert len(found.hidden_states) == 3 and model(some(2, 9)).hidden_states is None
    torch.testing.assert_close(found.hidden_states[0], ours.embedding(some(2, 9)))
    torch.testing.assert_close(found.hidden_states[-1], ours.hidden(some(2, 9)), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="output_attentions is not possible here: leave it out"):
        model(some(2, 9), output_attentions=True)
    model.resize_token_embeddings(310, mean_resizing=False)
    grown = model(some(2, 9)).logits
    assert grown.shape == (2, 9, 310)
    torch.testing.assert_close(grown[..., :300], found.logits, rtol=1e-5, atol=1e-5)
    assert model(torch.tensor([[309, 1]]), labels=torch.tensor([[309, 305]])).loss > 0
    model.save_pretrained(tmp_path / "grown")
    for path in folder.glob("*.py"):
        shutil.copy(path, tmp_path / "grown")
    torch.testing.assert_close(load(library, tmp_path / "grown")(some(2, 9)).logits, grown)


@torch.no_grad()
def test_the_dimensions_that_turn_are_ours_where_the_product_is_inexact(library, export):
    folder, ours = export("partial", width=200, heads=2, variant={"rotary_fraction": 0.58})  # 57.99999999999999 of 100
    theirs = load(library, folder)
    assert type(theirs).__name__ == "GPTNeoXForCausalLM"
    torch.testing.assert_close(theirs.gpt_neox.rotary_emb.inv_freq, 10_000.0 ** (-torch.arange(0, 58, 2) / 58))
    torch.testing.assert_close(theirs(some(2, 48)).logits, ours(some(2, 48)), rtol=1e-3, atol=1e-3)  # a wide model's


# ---- the tokenizer ---------------------------------------------------------------------------------------------------

NASTY = [" ", "  ", "\n", "\r\n", "\r", "\t", "\v", "\x00", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\ufeff", "'s",
         "'LL", "'\u017f", "don't", "12", "1234567", "\u0663", "\u00bd", "\u2167", "\u65e5\u672c", "\U0001f680",
         "e\u0301", "\u00df", "\u0130", "<|endoftext|>", "----", "    ", "def", "self.", " import", "(((", "\\n",
         "\U0001d400", "\u0345", "\u200d", "a", "aaaa", "</script>", "«»—…", "\uff11\uff12", "\u200b"]  # fmt: skip


ANYTHING = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) != "Cs"]                   # no surrogates
EDGES = ["", *NASTY, "\u00ff", "a\u00ff1\u00ff", "\u00ff<|endoftext|>\u00ff", "x<|endoftext|><|endoftext|>\n",
         "<|endoftext|", "".join(map(chr, [*range(32), *range(127, 160)])), "a" * 3_000, " " * 3_000, "\n" * 500,
         "1" * 500, "\u65e5" * 999, *(f"a{chr(plane << 16 | i)}1" for plane in range(17) for i in (0, 0xFFFE, 0xFFFF)),
         "unreachable", "an unreachable end", "xunreachable"]  # fmt: skip


def random_texts(n):
    rng = random.Random(0)
    return ["".join(rng.choices(NASTY + rng.choices(ANYTHING, k=len(NASTY) // 4), k=rng.randrange(1, 60)))
            for _ in range(n)]


def test_three_thousand_nasty_strings_are_the_same_tokens(library, export):
    folder, _ = export("rope")
    theirs = library.AutoTokenizer.from_pretrained(folder)
    ours = make_tokenizer(read_ranks(folder.parent / "run/tokenizer.tiktoken"))
    texts = [*EDGES, *random_texts(3_000)]
    for text, ids in zip(texts, theirs(texts)["input_ids"], strict=True):
        assert ids == ours.encode_ordinary(text), ascii(text)
        assert theirs.decode(ids) == text, ascii(text)
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_token and len(theirs) == ours.n_vocab
    ends = [theirs.eos_token_id, *theirs("class").input_ids, theirs.eos_token_id, theirs.pad_token_id]
    assert theirs.decode(ends, skip_special_tokens=True) == "class"


def check_tokenizer_json(theirs, ours, texts):
    """Of the tokenizers library, which has read tokenizer.json alone: our tokens, none of them the end or the pad."""
    end, pad = theirs.token_to_id(EOT), theirs.token_to_id(PAD)
    assert end == ours.eot_token and theirs.get_vocab_size() == ours.n_vocab and None is not pad != end
    for text, found in zip(texts, theirs.encode_batch(texts), strict=True):
        assert found.ids == ours.encode_ordinary(text), ascii(text[:99])
        assert theirs.decode(found.ids) == text and not {end, pad} & {*found.ids}, ascii(text[:99])


def test_tokenizer_json_alone_has_our_tokens_of_every_text(export, books):
    tokenizers = need("tokenizers")
    folder, _ = export("rope")
    ours = make_tokenizer(read_ranks(folder.parent / "run/tokenizer.tiktoken"))
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    check_tokenizer_json(theirs, ours, [*EDGES, *random_texts(500)])
    documents = [path.read_text() for path in sorted(books.glob("*.txt"))]
    ranks = train_tokenizer(documents, 2_000)
    ours = make_tokenizer(ranks | {b"unreachable": len(ranks)})        # by merges: it is a token as a whole piece only
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizers(ours)))
    assert ours.encode_ordinary("unreachable") == [len(ranks)]
    check_tokenizer_json(theirs, ours, [*EDGES, *random_texts(500), *documents])


@pytest.mark.slow
def test_tokenizer_json_alone_splits_every_character_as_ours_does(workplace):
    tokenizers = need("tokenizers")
    ours = make_tokenizer(read_ranks(workplace / "runs/rope/tokenizer.tiktoken"))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizers(ours)))
    texts = ["".join(f"a{c}1{c} {c}\n" for c in ANYTHING[i : i + 256]) for i in range(0, len(ANYTHING), 256)]
    check_tokenizer_json(theirs, ours, texts)


# ---- lm_eval ---------------------------------------------------------------------------------------------------------


def test_lm_eval_finds_the_same_log_likelihoods(library, export):
    need("lm_eval")
    need("accelerate")  # HFLM imports it
    from lm_eval.api.instance import Instance

    from lab import harness

    folder, _ = export("expe")
    huggingface = need("lm_eval.models.huggingface")
    theirs = huggingface.HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, trust_remote_code=True)
    ours = harness.Run(folder.parent / "run", torch.device("cpu"), "fp32")
    pairs = [("import", " os"), ("def f(self, name, other, more, and_more):\n    return", " None"), ("", "class"),
             ("x =", " 1"), ("for i in", " range(10):")]  # fmt: skip
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (found, same), (right, greedy) in zip(*(lm.loglikelihood(requests, disable_tqdm=True)
                                                for lm in (theirs, ours)), strict=True):
        assert found == pytest.approx(right, abs=1e-4) and same == greedy


# ---- an edited model_torch.py ----------------------------------------------------------------------------------------


def with_gate(step):
    """Of output(y, h): the block's input gates what a head has found."""
    return lambda self, y, h: step(self, y, h) * torch.sigmoid(h)


@pytest.fixture
def run_export(workplace, tmp_path):
    """A function that exports a run of such a model to "x", whatever comes of it."""

    def exported(pe, style="gpt"):
        write_run(tiny(pe, style, vocab=300), tmp_path / "run", workplace / "runs" / "rope")
        return command("interop.export", "run", "--to", "transformers", "x", cwd=tmp_path)

    return exported


@pytest.mark.parametrize("pe, style, architecture", [
    ("rope", "llama", "LlamaForCausalLM"), ("partial", "gpt", "GPTNeoXForCausalLM"),
    ("learned", "gpt", "GPT2LMHeadModel"), ("expe", "gpt", None)])
@torch.no_grad()
def test_an_edit_of_a_shared_step_is_exported_with_its_own_code(library, run_export, tmp_path, monkeypatch, pe, style,
                                                                architecture):
    from interop.modeling_gpt import GPTConfig, GPTForCausalLM

    monkeypatch.setattr(model_torch.Attention, "output", with_gate(model_torch.Attention.output))
    done = run_export(pe, style)
    assert done.returncode == 0, done.stderr
    assert architecture is None or f"run is no {architecture} any more, since the model was edited (l" in done.stdout
    assert done.stdout.endswith("x: GPTForCausalLM, step 8 of run\n") and (tmp_path / "x/modeling_gpt.py").exists()
    theirs = GPTForCausalLM(GPTConfig.from_dict(json.loads((tmp_path / "x/config.json").read_text()))).eval()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "x/model.safetensors"))
    ours = load_model(tmp_path / "run")[0]
    torch.testing.assert_close(theirs(some(2, 12)).logits, ours(some(2, 12)), rtol=1e-5, atol=1e-5)


def with_half_positions(tables):
    return lambda self, n: tables(self, n // 2)


def with_the_token_before(hidden):
    def edited(self, tokens, *positions, **options):
        return hidden(self, tokens, *positions, **options) + self.embedding(tokens.roll(1, dims=1))

    return edited


def with_gate_at_the_end(forward):
    return lambda self, h, pos: forward(self, h, pos) * torch.sigmoid(h)


REFUSED = {  # what is edited: (how, what is said)
    "Attention.forward": (with_gate_at_the_end, r"logits differ by \d+%\): make it in CachedAttention.forward there"),
    "GPT.tables": (with_half_positions, r"logits differ by \d+%\): make it in CachedGPT.tables there too"),
    "GPT.hidden": (with_the_token_before, r"logits in parts with a cache differ by \d+%\): keep what it reads in the"),
}


@pytest.mark.parametrize("step", REFUSED)
def test_an_edit_that_an_export_cannot_have_is_refused(library, run_export, tmp_path, monkeypatch, step):
    edit, words = REFUSED[step]
    owner, name = step.split(".")
    owner = getattr(model_torch, owner)
    monkeypatch.setattr(owner, name, edit(getattr(owner, name)))
    assert re.search(words, refused(run_export("sinusoidal")))
    assert not (tmp_path / "x").exists()


def test_a_loss_that_is_not_that_of_the_logits_is_said(library, run_export, monkeypatch):
    plain = model_torch.GPT.token_losses
    monkeypatch.setattr(model_torch.GPT, "token_losses", lambda self, *x: 0.9 * plain(self, *x) + 0.1)
    done = run_export("expe")
    assert done.returncode == 0 and "not the cross-entropy of its logits any more" in done.stdout


def test_without_transformers_nothing_is_written(run_export, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "make setup-all" in refused(run_export("rope", "llama"))
    assert not (tmp_path / "x").exists()


# ---- what cannot be --------------------------------------------------------------------------------------------------

WRONG = [
    ("run x", "the following arguments are required: --to", None),
    ("run --to transformers exported", "OUT must be a new folder, and 'exported' has files in it", None),
    ("run --to transformers x", "run sees both sides, and what generates from a cache must be causal",
     lambda at: change(at / "run", "config.json", model=read_run(at / "run")[2]["model"] | {"causal": False},
                       train=read_run(at / "run")[2]["train"] | {"objective": "mlm"})),
    ("run --to transformers x", "run has weights that are NaN or infinite, first embedding.weight: its training div",
     lambda at: break_weights(at / "run")),
    ("run --to transformers x", "run is trained on task:flip-flop, whose symbols need no tokenizer",
     lambda at: change(at / "run", "config.json", data=read_run(at / "run")[2]["data"] | {"source": "task:flip-flop"})),
    ("run --to transformers text", "OUT must be a new folder, and 'text' has files in it",
     lambda at: [shutil.copytree(at / "exported", at / "text"), (at / "text/config.json").unlink()]),
]


def break_weights(run):
    tensors, info = read_checkpoint(run)
    tensors["embedding.weight"][3, 3] = float("nan")
    metadata = {name: str(value) for name, value in info.items()}
    (run / CHECKPOINT).write_bytes(safetensors.numpy.save(tensors, metadata))       # which save_checkpoint refuses


def test_wrong_input_is_named_in_one_line_and_leaves_nothing(export, tmp_path):
    export("rope", "llama")
    for line, message, damage in WRONG:
        place = shutil.copytree(tmp_path, tmp_path / "place")
        if damage:
            damage(place)
        before = snapshot(place)
        assert message in refused(command("interop.export", *line.split(), cwd=place)), line
        assert snapshot(place) == before
        shutil.rmtree(place)


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_killed_export_loads_as_nothing_and_the_same_command_completes_it(export, tmp_path, monkeypatch):
    whole, _ = export("fox")
    right, config = snapshot(whole), "config.json"
    files = len(right) + 1  # and the list of them, first
    rename, remove = os.replace, Path.unlink

    def killed_at(step):
        left = itertools.chain([False] * step, itertools.repeat(True))  # a dead process does nothing more

        def last_act(act):
            def either(*arguments, **options):
                if next(left):
                    raise Killed
                return act(*arguments, **options)
            return either

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "replace", last_act(rename))
            patch.setattr(Path, "unlink", last_act(remove))
            command("interop.export", "run", "--to", "transformers", "again", cwd=tmp_path)

    for step in range(files + 1):
        killed_at(step)
        assert (tmp_path / "again" / config).exists() == (step == files), step  # then only the list is to be removed
        if step == files:
            killed_at(2)  # config.json is what goes first
            assert not (tmp_path / "again" / config).exists() and (tmp_path / "again/model.safetensors").exists()
        done = command("interop.export", "run", "--to", "transformers", "again", cwd=tmp_path)
        assert done.returncode == 0 and snapshot(tmp_path / "again") == right, (step, done.stderr)
        shutil.rmtree(tmp_path / "again")
    for name in ("notes.txt", ".unfinished-thesis", "export.unfinished-0/x"):
        killed_at(files)
        (tmp_path / "again" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "again" / name).write_text("mine")
        done = command("interop.export", "run", "--to", "transformers", "again", cwd=tmp_path)
        assert "OUT must be a new folder" in refused(done), name
        shutil.rmtree(tmp_path / "again")


@pytest.mark.parametrize("name", ["thesis.tex", "../above", ".unfinished-thesis", "README.md/inside"])
def test_a_forged_list_of_an_export_deletes_nothing_of_others(name, export, tmp_path):
    export("fox")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("mine")
    (tmp_path / "out/export.unfinished").write_text(f"{name}\n{name.partition('/')[0]}\nconfig.json")
    done = command("interop.export", "run", "--to", "transformers", "out", cwd=tmp_path)
    assert done.returncode == 0 if name == "../above" else "OUT must be a new folder" in refused(done)
    assert (tmp_path / "out" / name).read_text() == "mine"
