"""expe_torch, which pip installs: against the tables, our model, and in a Llama of transformers; and the wheel."""

import copy
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, need
from test_ladder import T, tiny
from test_model import filled, like, some_tokens

import expe
from interop.drop_in import drop_in, train
from interop.expe_torch import ExPE, ExQPE, from_last

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


def test_pip_installs_the_tables_and_the_module_and_nothing_else(tmp_path):
    """setuptools builds the wheel in a copy of this folder, since it leaves files where it builds."""
    left_out = {".git", ".venv", "data", "runs", "studies"}
    shutil.copytree(ROOT, tmp_path / "source", ignore=lambda folder, names: left_out & {*names})
    program = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "source", capture_output=True, text=True)
    names = zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == {"expe.py", "expe_torch/__init__.py"}
