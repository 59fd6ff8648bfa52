"""Runs handed over to transformers, which loads, reads and writes on with them as we do; and models taken from it."""

import ast
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import unicodedata

import pytest
import torch
import transformers
from conftest import TINY, command, refused
from test_model import tiny
from test_tasks import asked
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import data
from common import load_model, read_run
from config import ENCODINGS
from interop.over import LLAMA, NEOX, SHAPE, write_tensors

STEPS = {"quick": 24, "slow": 200}
OWN = {"rope": "GPTNeoXForCausalLM", "partial": "GPTNeoXForCausalLM", "learned": "GPT2LMHeadModel"}      # with gelu
MORE = [
    ("rope", "llama", {}), ("rope", "llama", {"tied": False}), ("partial", "llama", {}), ("alibi", "llama", {}),
    ("learned", "gpt", {"tied": True}), ("rope", "gpt", {"nope_every": 2}), ("rope", "gpt", {"window": 4}),
    ("rope+sinks+log", "llama", {"nope_every": 2, "window": 5}), ("expe+sinks", "gpt", {}), ("nope+llama4", "gpt", {}),
    ("fox+log", "gpt", {"window": 5}), ("sinusoidal+sinks", "gpt", {}),
    *(("expe", "gpt", {"variant": variant}) for variant in ({"on": "k"}, {"once": True}, {"learn": "random"})),
]  # fmt: skip
CASES = [*((pe, "gpt", {}) for pe in ENCODINGS), *MORE]


@pytest.fixture(scope="module", autouse=True)
def own_code(tmp_path_factory):
    """Where transformers keeps the code that a folder brings; and no hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
            patch.setattr(module, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")), raising=False)
        yield


@pytest.fixture
def handed(workplace, tmp_path):
    """A function: the folder that export.py makes of a run with these weights, and the model as its run has it."""

    def hand(pe, style="gpt", **changes):
        positions = {"n_positions": 300} if pe == "learned" else {}
        model = tiny(pe, style, vocab_size=300, **{"variant": positions} | changes).float()
        run, out = tmp_path / "run", tmp_path / "handed"
        shutil.copytree(workplace / "runs" / "rope", run)
        write_tensors(run / "model.safetensors", model.state_dict())
        record = json.loads((run / "config.json").read_text()) | {"model": dataclasses.asdict(model.config)}
        record["checkpoint"]["files"]["model.safetensors"] = files.fingerprint(run / "model.safetensors")
        files.write_json(run / "config.json", record)
        done = command("export.py", run, "--to", "transformers", out, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "step 8 of" in done.stdout
        return out, load_model(run)[0]

    return hand


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=(folder / "modeling_gpt.py").exists()).eval()
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


@pytest.mark.parametrize("pe, style, changes", CASES, ids=str)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_our_models(handed, pe, style, changes, steps=STEPS["quick"]):
    folder, ours = handed(pe, style, **changes)
    theirs, own = loaded(folder), pe in OWN and not changes.keys() & {"nope_every", "window"}
    llama = pe == "rope" and style == "llama" and not changes.keys() & {"nope_every", "window"}
    kind = "LlamaForCausalLM" if llama else OWN[pe] if own and style == "gpt" else "GPTForCausalLM"
    assert type(theirs).__name__ == kind and (folder / "modeling_gpt.py").exists() == (kind == "GPTForCausalLM")
    for T in (12, 48):  # the trained length and four times that
        torch.testing.assert_close(theirs(some(2, T)).logits, ours(some(2, T)), rtol=1e-5, atol=1e-5)
    found = theirs.generate(some(2, 5), max_new_tokens=steps, do_sample=False)
    assert torch.equal(found, greedy(ours, some(2, 5), steps))


@pytest.mark.slow
@pytest.mark.parametrize("pe, style, changes", CASES, ids=str)
def test_two_hundred_greedy_tokens_are_our_models(handed, pe, style, changes):
    test_logits_and_greedy_tokens_are_our_models(handed, pe, style, changes, STEPS["slow"])


@pytest.mark.parametrize("pe, style, changes", CASES, ids=str)
@torch.no_grad()
def test_what_pads_a_text_changes_nothing(handed, pe, style, changes):
    """On the left as `generate` pads, with a cache and without; and the loss is of the next token."""
    folder, _ = handed(pe, style, **changes)
    theirs, text = loaded(folder), some(1, 7)
    tokens = torch.cat((torch.cat((some(1, 4), text), 1), some(1, 11)))
    mask = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    alone = theirs(text).logits
    how = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    torch.testing.assert_close(theirs(tokens, **how).logits[:1, 4:], alone, rtol=1e-4, atol=1e-5)
    found = theirs.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=299)
    assert torch.equal(found[:1, 4:], theirs.generate(text, max_new_tokens=6, do_sample=False))
    right = torch.nn.functional.cross_entropy(alone[0, :-1], text[0, 1:])
    torch.testing.assert_close(theirs(text, labels=text).loss, right)


def test_the_code_that_a_folder_brings_stands_alone_and_names_nothing_that_is_not_there(handed):
    folder, _ = handed("fire+sinks+log", nope_every=2)
    path = folder / "modeling_gpt.py"
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--isolated", "--select", "F", path], check=True)
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {n.names[0].name if isinstance(n, ast.Import) else n.module for n in found
             if isinstance(n, ast.Import | ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"functools", "math", "typing", "numpy", "torch", "transformers"}


def test_it_trains_on(handed):
    folder, _ = handed("t5")
    model = loaded(folder).train()
    before = model.encoding.weight.clone()
    model(some(2, 12), labels=some(2, 12)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(model.encoding.weight, before)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------

NASTY = [" ", "  ", "\n", "\r\n", "\r", "\t", "\v", "\x00", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\ufeff", "'s",
         "'LL", "'\u017f", "don't", "12", "1234567", "\u0663", "\u00bd", "\u2167", "\u65e5\u672c", "\U0001f680",
         "e\u0301", "\u00df", "\u0130", "<|endoftext|>", "----", "    ", "def", "self.", " import", "(((", "\\n",
         "\U0001d400", "\u0345", "\u200d", "a", "aaaa"]  # fmt: skip


def test_ten_thousand_nasty_strings_are_the_same_tokens(handed):
    folder, _ = handed("rope")
    theirs, ours = AutoTokenizer.from_pretrained(folder), data.load_tokenizer(folder.parent / "run/tokenizer.tiktoken")
    rng = random.Random(0)
    anything = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) != "Cs"]
    texts = ["", "\n", " \n ", "x ", *("a" + c + "1" + c for c in anything[::150])]
    while len(texts) < 10_000:
        parts = [rng.choice(NASTY) if rng.random() < 0.8 else rng.choice(anything) for _ in range(rng.randrange(1, 30))]
        texts.append("".join(parts) * rng.choice((1, 1, 1, 5)))
    for text, ids in zip(texts, theirs(texts)["input_ids"], strict=True):
        assert ids == ours.encode_ordinary(text), ascii(text)
        assert theirs.decode(ids) == text, ascii(text)
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_token and len(theirs) == ours.n_vocab


# ---- lm_eval ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe, style", [("rope", "llama"), ("expe", "gpt")])
def test_lm_eval_finds_the_same_log_likelihoods(handed, pe, style):
    pytest.importorskip("accelerate")  # HFLM imports it
    from lm_eval.models.huggingface import HFLM

    from lab import tasks

    folder, _ = handed(pe, style)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, trust_remote_code=True)
    ours = tasks.Run(folder.parent / "run", torch.device("cpu"), "fp32")
    pairs = [("import", " os"), ("def f(self, name, other, more, and_more):\n    return", " None"), ("", "class"),
             ("x =", " 1"), ("for i in", " range(10):")]  # fmt: skip
    for (found, same), (right, greedy) in zip(*(lm.loglikelihood(asked(*pairs), disable_tqdm=True)
                                                for lm in (theirs, ours)), strict=True):
        assert found == pytest.approx(right, abs=1e-4) and same == greedy


# ---- from transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pe, style", [("rope", "llama"), ("rope", "gpt"), ("partial", "gpt")])
def test_there_and_back_is_the_same_run_which_evaluates_and_writes(handed, tmp_path, tokens, pe, style):
    folder, ours = handed(pe, style)
    done = command("export.py", folder, "--from", "transformers", "back", cwd=tmp_path)
    assert done.returncode == 0 and "step 0, of the" in done.stdout
    model, record = load_model(tmp_path / "back")
    assert model.config == ours.config and read_run(tmp_path / "back")[1].steps > record["step"] == 0
    assert all(torch.equal(w, ours.state_dict()[name]) for name, w in model.state_dict().items())
    names = [tmp_path / run / "tokenizer.tiktoken" for run in ("run", "back")]
    assert names[0].read_bytes() == names[1].read_bytes()
    flags = ["--data", tokens, "--lengths", "12,24", "--max-docs", "2"]
    assert command("eval.py", "back", *flags, cwd=tmp_path).returncode == 0
    assert command("generate.py", "back", "--tokens", "5", cwd=tmp_path).returncode == 0
    begin = ["--init-from", tmp_path / "back", "--pe", "nope", "--layers", "2", "--width", "16", "--heads", "2"]
    shape = ["--norm", ours.config.norm, "--mlp", ours.config.mlp, "--mlp-width", "40", *["--tied"] * ours.config.tied]
    done = command("train.py", *TINY, *begin, *shape, "--steps", "1", "--data", tokens, "--out", "on", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


@torch.no_grad()
def test_a_llama_of_theirs_with_fewer_keys_than_queries_becomes_a_run(handed, tmp_path):
    folder, _ = handed("rope", "llama")
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=500.0, initializer_range=0.5)).eval()  # fmt: skip
    saved(theirs, folder, tmp_path / "theirs")
    assert command("export.py", "theirs", "--from", "transformers", "back", cwd=tmp_path).returncode == 0
    ours, _ = load_model(tmp_path / "back")
    torch.testing.assert_close(ours(some(2, 30)), theirs(some(2, 30)).logits, rtol=1e-4, atol=1e-4)


NEOX_OF = dict(vocab_size=300, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
               use_parallel_residual=False, hidden_act="gelu_new", initializer_range=0.5)


@torch.no_grad()
def test_a_gpt_neox_of_theirs_becomes_a_run_if_its_layers_are_ours(handed, tmp_path):
    folder, _ = handed("rope", "gpt")
    made = lambda **changes: transformers.GPTNeoXForCausalLM(  # noqa: E731
        transformers.GPTNeoXConfig(**NEOX_OF | changes)).eval()
    torch.manual_seed(0)
    theirs = made()  # a quarter of each head turns; its biases begin at 0
    saved(theirs, folder, tmp_path / "theirs")
    assert command("export.py", "theirs", "--from", "transformers", "back", cwd=tmp_path).returncode == 0
    ours, _ = load_model(tmp_path / "back")
    assert ours.config.encoding.pe == "partial"
    torch.testing.assert_close(ours(some(2, 30)), theirs(some(2, 30)).logits, rtol=1e-4, atol=1e-4)
    theirs.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[3] = 1
    saved(theirs, folder, tmp_path / "biased")
    saved(made(use_parallel_residual=True), folder, tmp_path / "parallel")
    saved(made(hidden_act="gelu"), folder, tmp_path / "gelu")
    for name, message in (("biased", "has gpt_neox.layers.1.mlp.dense_4h_to_h.bias, and our layers have no such part"),
                          ("parallel", "use_parallel_residual is True, and our layers have False"),
                          ("gelu", "hidden_act is 'gelu', and our layers have 'gelu_new'")):
        done = command("export.py", name, "--from", "transformers", "none", cwd=tmp_path)
        assert message in refused(done) and not (tmp_path / "none").exists()


# ---- what cannot be --------------------------------------------------------------------------------------------------


def change(folder, name, **values):
    files.write_json(folder / name, json.loads((folder / name).read_text()) | values)


WRONG = [
    ("nowhere --to transformers x", "nowhere: no such run directory", None),
    ("run --to gguf x", "--to: invalid choice: 'gguf'", None),
    ("run x", "say one of them: --to transformers, or --from transformers", None),
    ("run --to transformers --from transformers x", "say one of them", None),
    ("run --to transformers", "the following arguments are required: OUT", None),
    ("run --to transformers handed", "handed exists: it holds a model, replace it by --overwrite, or choose another f",
     None),
    ("run --to transformers run/log.jsonl", "exists and holds no config.json, so it is not overwritten: choose another",
     None),
    ("run --to transformers run --overwrite", "run exists and holds log.jsonl, so it is not overwritten", None),
    ("nowhere --from transformers x", "nowhere: no such folder", None),
    ("run --from transformers x", "is of the kind None, and what can be read is llama and gpt_neox", None),
    ("handed --from transformers x", "rope_type is 'yarn', and a run begins with 'default'",
     lambda folder: change(folder, "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})),
    ("handed --from transformers x", "rope_parameters must be of type dict, got [1]",
     lambda folder: change(folder, "config.json", rope_parameters=[1])),
    ("handed --from transformers x", "d_model must be a whole number of at least 1, got '8'",
     lambda folder: change(folder, "config.json", hidden_size="8")),
    ("handed --from transformers x", "config.json lacks 'rms_norm_eps'",
     lambda folder: files.write_json(folder / "config.json", {"model_type": "llama"} | dict.fromkeys(SHAPE, 8))),
    ("handed --from transformers x", "head_dim is 64, and our heads have width/heads, 8",
     lambda folder: change(folder, "config.json", head_dim=64)),
    ("handed --from transformers x", "lacks model.layers.2.input_layernorm.weight",
     lambda folder: change(folder, "config.json", num_hidden_layers=3)),
    ("handed --from transformers x", "has model.layers.1.",
     lambda folder: change(folder, "config.json", num_hidden_layers=1)),
    ("handed --from transformers x", "in another shape",
     lambda folder: change(folder, "config.json", intermediate_size=7)),
    ("handed --from transformers x", "is missing: the weights must be in one file",
     lambda folder: (folder / "model.safetensors").unlink()),
    ("handed --from transformers x", "model.safetensors Error while deserializing",
     lambda folder: (folder / "model.safetensors").write_bytes(b"none")),
    ("handed --from transformers x", "tokenizer.json is no byte-level BPE that splits a text as data.py does",
     lambda folder: change(folder, "tokenizer.json", added_tokens=[])),
    ("handed --from transformers x", "tokenizer.json is missing", lambda folder: (folder / "tokenizer.json").unlink()),
]  # fmt: skip


def test_wrong_input_is_named_in_one_line_and_leaves_nothing(handed, tmp_path):
    handed("rope", "llama")
    for line, message, damage in WRONG:
        place = shutil.copytree(tmp_path, tmp_path / "place")
        if damage:
            damage(place / "handed")
        before = sorted((path, path.stat().st_size) for path in place.rglob("*"))
        assert message in refused(command("export.py", *line.split(), cwd=place)), line
        assert sorted((path, path.stat().st_size) for path in place.rglob("*")) == before
        shutil.rmtree(place)


def test_what_sees_both_sides_cannot_be_handed_over(workplace, tmp_path):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    record["model"]["causal"] = False
    files.write_json(tmp_path / "run" / "config.json", record)
    line = refused(command("export.py", "run", "--to", "transformers", "x", cwd=tmp_path))
    assert "run sees both sides, and what generates from a cache must be causal" in line


def test_overwrite_replaces_what_was_handed_over(handed, tmp_path):
    folder, _ = handed("rope", "llama")
    (folder / "config.json").write_text("{}")
    assert command("export.py", "run", "--to", "transformers", folder, "--overwrite", cwd=tmp_path).returncode == 0
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("kind, pe, style", [(LLAMA, "rope", "llama"), (NEOX, "partial", "gpt")])
def test_weights_there_and_back_are_the_same(kind, pe, style):
    model = tiny(pe, style, tied=False)
    back = kind.from_theirs(kind.theirs(model.state_dict(), 2), model.config)
    assert all(torch.equal(back[name], w.float()) for name, w in model.state_dict().items())
