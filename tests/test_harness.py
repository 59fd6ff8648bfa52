"""lm_eval on a task of our own, in its YAML format, against the same numbers computed token by token."""

import functools
import json

import pytest
import torch
from conftest import command, need, refused

need("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402  (it skips this module where lm_eval is missing)

from lab import harness  # noqa: E402
from settings import InputError  # noqa: E402
from tokenizer import EOT  # noqa: E402

CHOICES = [
    {"question": "import", "choices": ["os", "zebra crossing", "numbers"], "label": 0},
    {"question": "def f(self,", "choices": ["xylophone", "name):"], "label": 1},
    {"question": "for i in", "choices": ["range(10):", "))))))"], "label": 0},
    {"question": "", "choices": ["class", "???"], "label": 1},
]
YAML = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(autouse=True)
def without_lm_evals_own_tasks(monkeypatch):
    """Reading all of their YAML takes seconds."""
    monkeypatch.setattr(harness, "TaskManager", functools.partial(harness.TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def run(workplace):
    return harness.Run(workplace / "runs" / "rope", torch.device("cpu"), "fp32")


def in_loops(run, before, after):
    """(sum of log p(after | before), whether greedy decoding gives it), one token after the other."""
    total, greedy = 0.0, True
    for i, token in enumerate(after):
        seen = before + after[:i]
        first = max(0, len(before) + len(after) - 1 - max(16, len(after)))  # of what is read
        with torch.no_grad():
            logits = run.model(torch.tensor([seen[first:]]))[0, -1].double()
        total += logits.log_softmax(-1)[token].item()
        greedy &= int(logits.argmax()) == token
    return total, greedy


def asked(*arguments):
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(arguments)]


def test_log_likelihoods_equal_a_loop_over_tokens(run):
    encode = run.encoding.encode_ordinary
    likeliest = run.encoding.decode([int(run.model(torch.tensor([encode("import")]))[0, -1].argmax())])
    long = " = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]"  # alone more than the trained length
    pairs = [("import", " os"), ("import", likeliest), ("x", long), ("for ", "i in"), ("", "class"),
             ("def f(self, name, other, more, and_more):\n    return", " None")]  # fmt: skip
    found = run.loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        spaces = len(context) - len(context.rstrip())  # move to the continuation, by lm_eval's rule
        context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
        before = encode(context) if context else [run.eot_token_id]
        after = encode(context + continuation)[len(before) if context else 0 :]
        total, greedy = in_loops(run, before, after)
        assert value == pytest.approx(total, abs=1e-4) and is_greedy == greedy
    assert any(is_greedy for _, is_greedy in found)


def test_rolling_log_likelihoods_cover_each_token_once(run):
    for text in ("import os\nimport sys\n\ndef main():\n    print('one')\n", "x"):
        tokens = run.encoding.encode_ordinary(text)
        right = 0.0
        for begin in range(0, len(tokens), 16):
            part = tokens[begin : begin + 16]
            if begin and len(part) < 16:  # the last window is full: it reads back into what was scored before
                before = tokens[len(tokens) - 17 : begin]
            else:
                before = [tokens[begin - 1]] if begin else [run.eot_token_id]
            right += in_loops(run, before, part)[0]
        [value] = run.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
        assert value == pytest.approx(right, abs=1e-4)


def test_greedy_text_stops_where_it_is_told(run):
    prompt = run.encoding.encode_ordinary("import")
    for _ in range(6):
        prompt.append(int(run.model(torch.tensor([prompt]))[0, -1].argmax()))
    text = run.encoding.decode(prompt[-6:])
    for until, right in (([], text), ([text[2]], text[: text.index(text[2])])):
        how = {"until": until, "max_gen_toks": 6, "do_sample": False}
        assert run.generate_until([Instance("generate_until", {}, ("import", how), 0)], disable_tqdm=True) == [right]


def greedy_text(lm, prompt, n):
    """n tokens after a prompt, each from a pass of the model over all tokens before it."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(lm.model(torch.tensor([tokens]))[0, -1].argmax()))
    return lm.encoding.decode(tokens[len(prompt) :])


@pytest.mark.parametrize("n_new, n_read", [(3, 13), (8, 8), (9, 8), (12, 5), (16, 1)])
def test_a_prompt_is_cut_to_leave_positions_for_the_text(workplace, capsys, n_new, n_read):
    """learned has 16 positions, and the last token is drawn, and not read: n_read + n_new - 1 of them are used."""
    lm = harness.Run(workplace / "runs" / "learned", torch.device("cpu"), "fp32")
    long, short = "def f(self, name, other, more, and_more):\n    return", "im"
    how = {"until": [], "max_gen_toks": n_new, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, how), i) for i, text in enumerate((long, short, ""))]
    found = lm.generate_until(requests, disable_tqdm=True)
    prompts = [lm.encoding.encode_ordinary(text) for text in (long, short)]
    assert len(prompts[0]) > 16 and len(prompts[1]) <= 2
    right = [greedy_text(lm, prompt[-n_read:], n_new) for prompt in (*prompts, [lm.eot_token_id])]
    assert found == [text.split(EOT)[0] for text in right]
    n_cut = 1 + (len(prompts[1]) > n_read)
    assert f"runs/learned: {n_cut} of 3 prompts have more tokens than are read, and were cut" in capsys.readouterr().out
    lm.generate_until(requests[2:], disable_tqdm=True)
    assert not capsys.readouterr().out


def test_a_text_longer_than_the_positions_is_refused_before_any_is_written(workplace, monkeypatch):
    lm = harness.Run(workplace / "runs" / "learned", torch.device("cpu"), "fp32")
    monkeypatch.setattr(harness, "generate_cached", None)
    for more in ({"max_gen_toks": 17}, {"max_new_tokens": 300}, {}):  # by default lm_eval asks for 256
        how = [{"until": [], "do_sample": False} | values for values in ({"max_gen_toks": 2}, more)]
        with pytest.raises(InputError, match=r"learned has positions for 16 tokens, and this task writes up to \d+: "
                                             "give the task a max_gen_toks of at most 16"):
            lm.generate_until([Instance("generate_until", {}, ("x", values), 0) for values in how], disable_tqdm=True)


@pytest.mark.parametrize("n_new, n_read", [(3, 13), (12, 8), (40, 8)])
def test_a_text_goes_on_past_the_trained_length_where_there_are_positions(run, n_new, n_read):
    long = "def f(self, name, other, more, and_more):\n    return"
    how = {"until": [], "max_gen_toks": n_new, "do_sample": False}
    [found] = run.generate_until([Instance("generate_until", {}, (long, how), 0)], disable_tqdm=True)
    assert found == greedy_text(run, run.encoding.encode_ordinary(long)[-n_read:], n_new).split(EOT)[0]


def test_contexts_that_are_cut_are_counted(run, capsys):
    long = "def f(self, name, other, more, and_more):\n    return"
    run.loglikelihood(asked((long, " None"), ("x", " = 1")), disable_tqdm=True)
    assert "runs/rope: 1 of 2 prompts have more tokens than are read, and were cut" in capsys.readouterr().out
    run.loglikelihood_rolling(asked((long,)), disable_tqdm=True)
    assert not capsys.readouterr().out


def test_logits_that_are_not_finite_have_no_scores(run, monkeypatch):
    """Neither log-likelihoods nor greedy text, which would be the first token again and again."""
    hidden = type(run.model).hidden
    monkeypatch.setattr(run.model, "hidden", lambda *a, **how: hidden(run.model, *a, **how) * torch.inf, raising=False)
    how = {"until": [], "max_gen_toks": 2, "do_sample": False}
    for score in (lambda: run.loglikelihood(asked(("import", " os")), disable_tqdm=True),
                  lambda: run.loglikelihood_rolling(asked(("import os",)), disable_tqdm=True),
                  lambda: run.generate_until([Instance("generate_until", {}, ("import", how), 0)], disable_tqdm=True)):
        with pytest.raises(InputError, match="runs/rope: its logits are not finite numbers"):
            score()


def test_a_task_in_yaml_from_the_command_line(workplace, run, tmp_path):
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    (tmp_path / "choose.yaml").write_text(YAML.format(folder=tmp_path))
    flags = ["--tasks", "choose", "--task-path", tmp_path, "--json", "t.json"]
    done = command("lab.harness", "runs/rope", *flags, cwd=workplace)
    assert done.returncode == 0, done.stderr
    [row] = json.loads((workplace / "t.json").read_text())
    right = 0
    for choice in CHOICES:
        pairs = [(choice["question"], f" {answer}") for answer in choice["choices"]]
        values = [value for value, _ in run.loglikelihood(asked(*pairs), disable_tqdm=True)]
        right += values.index(max(values)) == choice["label"]
    named = {"run": "runs/rope", "task": "choose", "metric": "acc", "value": right / 4, "n": 4}
    assert row.items() >= named.items()
    line = refused(command("lab.harness", "runs/rope", "--tasks", "nonesuch", cwd=workplace))
    assert "lm_eval has no task nonesuch" in line
