"""expe_torch, which pip installs: against the tables, our model, and in a Llama of transformers; and the wheel."""

import copy
import email
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, command, need
from test_ladder import T, V, tiny
from test_model import filled, like, some_tokens

import expe
from interop.drop_in import train
from interop.expe_torch import ExPE, ExQPE, drop_in, from_last

FAR = torch.tensor([[0, 1, 255, 256, 257], [10**6, 10**6 + 1, 2**31 + 7, 10**12, -3]])


@pytest.mark.parametrize("l", [1, 24])
def test_rows_are_those_of_the_tables_to_the_last_bit_at_any_position(l):
    for theta in (1 / 2048, 0.1):
        right = expe.expe_table(FAR.numpy(), l, 0.3, theta)
        np.testing.assert_array_equal(ExPE(l, start=0.3, theta=theta).rows(FAR).numpy(), right)
    for n in (FAR, torch.arange(-40, 400, dtype=torch.int32)):
        right = expe.exqpe_table(n.numpy(), l, 0.3, 1 / 300, 0.1)
        np.testing.assert_array_equal(ExQPE(l, start=0.3, theta1=1 / 300, theta2=0.1).rows(n).numpy(), right)


def default(pe, on):
    """What `tiny` has, by the defaults of the command line."""
    ramp = 1 / (4 * T)
    return ExPE(5, theta=64 / T if on == "k" else ramp, on=on) if pe == "expe" else ExQPE(5, theta1=ramp, on=on)


@pytest.mark.parametrize("pe, on", [("expe", "k"), ("expe", "qkv"), ("exqpe", "qk")])
def test_what_enters_is_what_enters_in_our_model_at_long_positions_too(pe, on):
    n = torch.arange(T) + 10**6
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model, h = tiny(pe, variant={"on": on}).to(dtype), torch.randn(2, T, 16, dtype=dtype)
        ours = model.encoding.override(h, model.tables(n.numpy())[model.config.encoding].rows)
        for positions in (n, n.expand(2, T)):
            assert all(map(torch.equal, default(pe, on)(h, positions), ours))


def test_positions_that_are_not_one_for_each_token_are_refused():
    h, encoding = torch.randn(2, 4, 8), ExPE(3, theta=1.0)
    assert all(map(torch.equal, encoding(h, torch.arange(4)[None]), encoding(h, torch.arange(4))))
    for shape in ((), (1,), (5,), (2, 1), (4, 1), (1, 2, 4)):
        with pytest.raises(ValueError, match=re.escape(f"positions must have the shape (4,) or (2, 4), got {shape}")):
            encoding(h, torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="positions must be integers, got torch.float32"):
        encoding(h, torch.arange(4.0))


def share_moved(dtype, n):
    """The largest share of a query's attention that goes to other keys than in float64 from position 0.

    One head on random inputs, keys and queries in a dtype and their scores in fp32 at least.
    """
    torch.manual_seed(0)
    encoding = ExPE(24, theta=1 / 2048)
    h = torch.randn(512, 64, dtype=torch.float64)
    w_q, w_k = torch.randn(2, 64, 64, dtype=torch.float64) / 8

    def weights(dtype, n):
        q = h.to(dtype) @ w_q.to(dtype).T
        k = encoding(h.to(dtype), n)[1] @ w_k.to(dtype).T
        q, k = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, torch.eye(512).to(q), is_causal=True).double()

    return (weights(dtype, n) - weights(torch.float64, torch.arange(512))).abs().sum(-1).max().item() / 2


@pytest.mark.parametrize("dtype, counted_from_last, as_they_are", [
    (torch.float64, 1e-12, 1e-14), (torch.float32, 1e-6, 1e-5), (torch.bfloat16, 3e-3, 0.4)])
def test_keys_counted_from_the_last_give_the_same_weights_and_keep_their_digits(dtype, counted_from_last, as_they_are):
    """The two last numbers: what is moved at most, and at least, at position 10^6."""
    n = torch.arange(512) + 10**6
    assert share_moved(dtype, from_last(n)) < counted_from_last
    assert share_moved(dtype, n) > as_they_are
    torch.testing.assert_close(from_last(FAR)[0], torch.tensor([-257, -256, -2, -1, 0]))


def test_from_last_counts_unsigned_positions_and_takes_an_empty_sequence():
    n = torch.tensor([[3, 200, 255], [0, 1, 7]], dtype=torch.uint8)
    torch.testing.assert_close(from_last(n), torch.tensor([[-252, -55, 0], [-7, -6, 0]]))
    assert from_last(torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0)
    h = torch.randn(2, 0, 8)
    assert all(x.shape == h.shape for x in ExPE(3, theta=1.0)(h, from_last(torch.arange(0))))
    with pytest.raises(ValueError, match="positions must be integers, got torch.float32"):
        from_last(torch.arange(3.0))


@pytest.mark.parametrize("make, said", [
    *((lambda l=l: ExPE(l, theta=1.0), "l must be a whole number of at least 1") for l in (True, 0, 2.0, "3", None)),
    *((lambda x=x: ExPE(3, theta=x), "theta must be a finite number") for x in (math.nan, -math.inf, True, "1", None)),
    (lambda: ExPE(3, theta=0), "theta must not be 0"),
    (lambda: ExPE(3, theta=1.0, start=math.nan), "start must be a finite number"),
    (lambda: ExPE(3, theta=1.0, on="qx"), 'on must be of the letters of "qkv"'),
    (lambda: ExQPE(3, theta1=math.inf), "theta1 must be a finite number"),
    (lambda: ExQPE(3, theta1=0.1, theta2=0.0), "theta2 must not be 0"),
    (lambda: ExQPE(3, theta1=0.1, theta2=math.nan), "theta2 must be a finite number"),
    (lambda: ExPE(3, theta=1.0)(torch.ones(1, 2, 8, dtype=torch.int64), torch.arange(2)),
     "h must be real floating-point numbers, such as torch.float32, got torch.int64"),
    (lambda: ExPE(3, theta=1.0).place(torch.ones(8, 8, dtype=torch.int8), torch.arange(2)),
     "weight must be real floating-point numbers"),
    (lambda: ExPE(9, theta=1.0)(torch.ones(1, 2, 8), torch.arange(2)), "l must be at most the width, 8, got 9")])
def test_what_cannot_be_right_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_what_looks_odd_and_is_right_is_taken():
    n = torch.arange(3)
    torch.testing.assert_close(ExPE(1, theta=np.float32(-2), start=1).rows(n)[:, 0], torch.tensor([1, -1, -3]).double())
    torch.testing.assert_close(ExQPE(1, theta1=0, theta2=1).rows(n)[:, 0], torch.tensor([1, 2, 3]).double())


@pytest.mark.parametrize("encoding", [ExPE(5, theta=0.2, start=0.2), ExQPE(5, theta1=0.2, start=0.2)])
def test_content_and_place_make_up_a_key(encoding):
    h, w = torch.randn(2, 5, 16).double(), torch.randn(8, 16).double()
    apart = F.linear(encoding.content(h), w) + encoding.place(w, FAR[:, :4].new_tensor([[0, 3, 9, 4, 1]]))
    whole = F.linear(encoding.phi(h, torch.tensor([0, 3, 9, 4, 1])), w)
    torch.testing.assert_close(apart, whole, rtol=1e-12, atol=1e-12)


# ---- in a Llama of transformers --------------------------------------------------------------------------------------


def llama(ours, **changes):
    transformers = need("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**like(ours, rms_norm_eps=1e-5, **changes)))


@pytest.mark.parametrize("pe, on", [("expe", "k"), ("exqpe", "qk")])
def test_a_llama_with_it_is_our_model(pe, on):
    ours, tokens = tiny(pe, "llama", variant={"on": on}), some_tokens(2, 3 * T)
    theirs = drop_in(filled(llama(ours), ours), default(pe, on))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)  # norms in fp32
    theirs, left = theirs.float(), torch.tensor([[0] * 3 + [1] * 9, [1] * 12])  # padded on the left
    how = dict(attention_mask=left, max_new_tokens=20, do_sample=False, pad_token_id=0)
    cached, anew = (theirs.generate(tokens[:, :12], **how, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, anew)
    alone = theirs.generate(tokens[:1, 3:12], max_new_tokens=20, do_sample=False)
    assert torch.equal(alone[0], cached[0, 3:])


ROPE = {  # of each rope_type of transformers; some act only past a limit, which the texts here pass
    "linear": dict(factor=2.0), "dynamic": dict(factor=2.0), "yarn": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": dict(factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4), "proportional": dict(factor=2.0)}


@pytest.mark.parametrize("rope_type", ROPE)
def test_rope_of_every_type_is_off_at_any_length(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": T} | ROPE[rope_type]
    ours, tokens = tiny("expe", "llama", variant={"on": "k"}), some_tokens(2, 5 * T)
    theirs = filled(llama(ours, rope_parameters=rope, max_position_embeddings=T), ours)
    assert (theirs(tokens).logits - ours(tokens)).abs().max() > 0.01  # RoPE is on
    theirs = drop_in(theirs, default("expe", "k"))
    for length in (T // 2, 5 * T, T // 2):
        right = ours(tokens[:, :length])
        torch.testing.assert_close(theirs(tokens[:, :length]).logits, right, rtol=1e-5, atol=1e-5)


def test_no_rope_type_of_transformers_is_left_out_here():
    need("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {*ROPE_INIT_FUNCTIONS} - {"default"} == {*ROPE}


def test_a_copy_has_its_own_positions_and_can_be_pickled():
    """Of other lengths and positions than those that the original has read last."""
    model = drop_in(llama(tiny("expe", "llama")).double().eval(), ExPE(5, theta=1 / 64, on="qk"))
    tokens, n = some_tokens(2, T), torch.arange(T) + torch.tensor([[7], [40]])
    right = model(tokens, position_ids=n).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(tokens[:, :3])
        torch.testing.assert_close(copied(tokens, position_ids=n).logits, right, rtol=1e-12, atol=1e-12)
        assert (copied(tokens).logits - right).abs().max() > 1e-6  # which positions change


def test_a_second_encoding_and_another_kind_of_model_are_refused():
    transformers = need("transformers")
    encoding = ExPE(5, theta=1.0)
    model = drop_in(llama(tiny("expe", "llama")), encoding)
    for taken in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="^this model has an encoding already: .* call drop_in once$"):
            drop_in(taken, encoding)
    sizes = dict(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    for other in (torch.nn.Linear(3, 3), model.model,
                  transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)),
                  transformers.PhiForCausalLM(transformers.PhiConfig(**sizes)),
                  transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, head_dim=8))):
        with pytest.raises(ValueError, match=f"^drop_in needs a Llama, .* got {type(other).__name__}$"):
            drop_in(other, encoding)
    fresh = llama(tiny("expe", "llama"))
    with pytest.raises(ValueError, match="^drop_in needs an ExPE or ExQPE, got int$"):
        drop_in(fresh, 5)
    drop_in(fresh, encoding)  # which was left as it was


def test_with_fewer_keys_than_queries_it_trains_and_writes():
    torch.manual_seed(0)
    ours = tiny("expe", "llama")
    one = drop_in(llama(ours, num_key_value_heads=1).double().eval(), ExPE(5, theta=1 / 64))
    weights = copy.deepcopy(one.state_dict())
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].repeat(2, 1)  # each of both heads has what they share
    two = drop_in(llama(ours).double().eval(), ExPE(5, theta=1 / 64))
    two.load_state_dict(weights)
    torch.testing.assert_close(one(some_tokens(2, T)).logits, two(some_tokens(2, T)).logits, rtol=1e-9, atol=1e-9)
    losses = train(one.float().train(), "".join(map(chr, range(40))) * 20, context=T)
    assert losses[-1] < losses[0] - 0.05
    assert one.eval().generate(some_tokens(1, 3), max_new_tokens=9, do_sample=False).shape == (1, 12)


# ---- as pip installs it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's file; setuptools builds it in a copy of this folder, since it leaves files where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = {".git", ".venv", "data", "runs", "studies"}
    shutil.copytree(ROOT, folder / "source", ignore=lambda folder, names: left_out & {*names})
    program = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder / "source", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_pip_installs_the_tables_and_the_module_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == {"expe.py", "expe_torch/__init__.py"}


def test_the_package_says_who_made_it_and_where_the_paper_is(wheel):
    """As CITATION.cff does; its description is the page on how to use it."""
    archive = zipfile.ZipFile(wheel)
    [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata, citation = email.message_from_bytes(archive.read(name)), (ROOT / "CITATION.cff").read_text("utf-8")
    assert metadata["Author"] == re.search('authors:\n  - name: "(.*)"', citation)[1]
    label, address = metadata["Project-URL"].split(", ")
    assert label == "Paper" and f'url: "{address}"' in citation and "arxiv" in address
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode() == (ROOT / "interop/README.md").read_text("utf-8")
    assert metadata["License-Expression"] == re.search("license: (.*)", citation)[1]


def test_the_lines_of_the_page_run_with_the_wheel_alone(wheel, tmp_path):
    """In a folder outside this repository, and with none of its scripts."""
    need("transformers")
    page = (ROOT / "interop/README.md").read_text("utf-8")
    [lines] = (block for block in re.findall("```python\n(.*?)```", page, re.DOTALL) if "import ExPE, drop_in" in block)
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = f"{lines}\nimport sys; print(expe_torch.__file__, *({{'cli', 'interop', 'settings'}} & {{*sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", f"import expe_torch\n{program}"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")})
    assert done.returncode == 0, done.stderr
    *written, module = done.stdout.strip().splitlines()
    assert module == str(tmp_path / "installed/expe_torch/__init__.py")
    assert len(re.findall("[0-9]+", "".join(written))) == 108  # a prompt of 8 tokens and 100 new ones


def test_the_script_of_the_repository_trains_and_writes():
    need("transformers")
    done = command("interop.drop_in", cwd=ROOT)
    losses = [float(x) for x in re.search("loss of each step: (.*)", done.stdout)[1].split()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    assert "b'def " in done.stdout or 'b"def ' in done.stdout
