"""Wrong input to the real commands: one line on stderr, exit status 2, and no trace left."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, command, process, refused

WRONG = [
    ("train.py --pe rotary", "--pe: invalid choice: 'rotary' (choose from"),
    ("train.py --pe expe --l 0", "l must be a whole number of at least 1, got 0"),
    ("train.py --pe expe --l 129", "l must be from 1 to d_model, 128, got 129"),
    ("train.py --pe expe --l 2.5", "--l: '2.5' is not a whole number"),
    ("train.py --pe expe --theta x", "--theta: 'x' is not a number such as 0.5, 1e-3 or 1/2048"),
    ("train.py --pe rope --l 24", "l is for expe and exqpe, and rope has no use for it"),
    ("train.py --pe exqpe --constant", "constant is for expe, and exqpe has no use for it: leave it out"),
    ("train.py --pe expe --once --on k", "once overrides the residual stream, on the input of attention: leave one"),
    ("train.py --pe expe --on kv", "on must be k, q, qk or qkv, got 'kv'"),
    ("train.py --pe expe --learn", "--learn: expected one argument"),
    ("train.py --pe expe --learn maybe", "learn must be none, init or random, got 'maybe'"),
    ("train.py --pe exqpe --learn random --theta2 1/8", "learn random draws theta2, and 0.125 is given: leave one out"),
    ("train.py --pe rope --once", "once is for expe and exqpe, and rope has no use for it: leave it out"),
    ("train.py --pe t5 --max-distance 16", "max_distance must be a whole number from 17 to 65,536, got 16"),
    ("train.py --pe alibi --slopes 0", "slopes must be a finite number above 0, got 0"),
    ("train.py --pe shaw --max-distance 1e12", "max_distance must be a whole number from 1 to 65,536"),
    ("train.py --pe t5 --buckets 1e5", "buckets must be a whole number from 2 to 1,024, got 100000"),
    ("train.py --pe shaw --buckets 8", "buckets is for t5, and shaw has no use for it: leave it out"),
    ("train.py --preset mini --steps 0", "steps must be a whole number of at least 1, got 0"),
    ("train.py --steps 5 --tokens 500", "--tokens and --steps say the same thing"),
    ("train.py --tokens 0", "--tokens: must be at least 1, got 0"),
    ("train.py --lr -1", "lr must be a finite number above 0, got -1.0"),
    ("train.py --context 0", "context must be a whole number of at least 1, got 0"),
    ("train.py --batch-size 8 --micro-batch 3", "micro_batch must be a divisor of batch_size, 8, got 3"),
    ("train.py --dtype fp16", "dtype must be fp32, tf32 or bf16, got 'fp16'"),
    ("train.py --preset nano", "--preset: invalid choice: 'nano'"),
    ("train.py --vocab 100", "vocab must be from 257"),
    ("train.py --vocab 70000", "vocab_size must be a whole number from 2 to 65,536"),
    ("train.py --stepz 5", "unrecognized arguments: --stepz 5"),
    ("train.py --steps 1e400", "--steps: '1e400' is not a whole number"),
    ("train.py --lr 1e999999999", "--lr: '1e999999999' is not a number"),
    ("train.py --device cpu:", "device must be auto, cpu, cuda, cuda:N or mps, got 'cpu:'"),
    ("train.py --resume --overwrite", "leave one out"),
    ("train.py --resume --show", "--show trains none: leave one out"),
    ("train.py --show --l 0", "l must be a whole number of at least 1, got 0"),
    ("train.py --sample-every 0", "--sample-every: must be at least 1, got 0"),
    ("train.py --log csv,wandb", "--log: 'wandb' is not one of csv, tensorboard"),
    ("train.py --resume", "runs/mini-expe-s0: no such run directory"),
    ("train.py --device gpu", "device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
    ("train.py --data nowhere/", "nowhere/: no such file or folder; data is stdlib, packages, fineweb, fineweb-edu or"),
    ("train.py --data photo.jpg", "photo.jpg must end in .txt .md .py .rst .jsonl .parquet"),
    ("train.py --data empty.txt", "the training text has only enough pairs for a vocabulary of 257"),
    ("train.py --data short.txt --vocab 257", "short.txt has 1 usable documents, and none fell to val: cut them"
     " smaller"),
    ("data.py short.txt --vocab 257 --min-doc-tokens 5000", "left out: 1 shorter than 5,000 tokens, 0 not UTF-8"),
    ("data.py short.txt --vocab 257 --min-doc-tokens 5000", "short.txt has 0 usable documents, and none fell to train"),
    ("data.py", "one of the arguments source --show is required"),
    ("data.py stdlib --show x", "--show: not allowed with argument source"),
    ("data.py --show nowhere", "nowhere is not a folder of tokens (no meta.json)"),
    ("data.py stdlib --vocab 256", "vocab must be from 257"),
    ("data.py stdlib --min-doc-tokens 0", "--min-doc-tokens: must be at least 1, got 0"),
    ("data.py stdlib --max-doc-chars 0", "--max-doc-chars: must be at least 1, got 0"),
    ("data.py stdlib --max-tokens -1", "--max-tokens/--tokens: must be at least 0, got -1"),
    ("data.py stdlib --tokenizer gpt-9", "tokenizer must be a .tiktoken file, got 'gpt-9'"),
    ("data.py stdlib --tokenizer nowhere.tiktoken", "nowhere.tiktoken is missing"),
    ("data.py stdlib --tokenizer bad.tiktoken", 'bad.tiktoken line 2 is not "base64 rank"'),
    ("data.py stdlib --tokenizer gpt2 --vocab 999", "--vocab: not allowed with argument --tokenizer"),
    ("data.py stdlib --out photo.jpg", "photo.jpg exists"),
    ("eval.py", "there is no run under runs/: train one with python train.py"),
    ("eval.py nowhere", "nowhere: no such run directory"),
    ("eval.py not-a-run", "not-a-run holds no config.json"),
    ("eval.py --lengths 512,x", "--lengths: 'x' is not a whole number"),
    ("eval.py --lengths 512,,1024", "--lengths: '' is not a whole number"),
    ("eval.py --lengths 0,512", "--lengths: must be at least 1, got 0"),
    ("eval.py --lengths=-5", "--lengths: must be at least 1, got -5"),
    ("eval.py --plot loss.txt", "--plot: 'loss.txt' must end in .png, .svg or .pdf"),
    ("eval.py --json nowhere/x.json", "--json: 'nowhere/x.json' is not a file in a folder that exists"),
    ("eval.py --json /dev/null", "--json: '/dev/null' is not a file"),
    ("eval.py --max-docs 0", "--max-docs: must be at least 1, got 0"),
    ("eval.py --protocol guess", "--protocol: invalid choice: 'guess'"),
    ("lab.bench --preset nano", "--preset: invalid choice: 'nano'"),
    ("lab.bench --parts train,sleep", "--parts: 'sleep' is not one of train, evaluate, generate, data"),
    ("lab.bench --pe expe,new", "--pe: 'new' is not one of nope, sinusoidal"),
    ("lab.bench --backends torch,jax", "--backends: 'jax' is not one of torch, numpy, plain"),
    ("lab.bench --backends numpy --dtype bf16", "numpy computes in fp32 on the CPU, uncompiled: leave it out of"),
    ("lab.attention nowhere --out a.png", "nowhere: no such run directory"),
    ("lab.curves nowhere --out a.png", "nowhere: no such run directory; train one with python train.py"),
    ("lab.curves", "say where to: --out FILE.png for a picture, --csv FILE for the numbers"),
    ("lab.curves --out a.txt", "'a.txt' must end in .png, .svg or .pdf"),
    ("lab.reproduce table2 --verbose", "--verbose is for --dry-run: add it, or leave this out"),
    ("lab.attention nowhere", "the following arguments are required: --out"),
    ("generate.py nowhere", "nowhere: no such run directory"),
    ("generate.py", "the following arguments are required: RUN"),
    ("lab.bench --repeats 0", "--repeats: must be at least 1, got 0"),
    ("lab.formats --length 0", "--length must be from 1 to 65,536, got 0"),
    ("lab.formats --out nowhere/x.png", "--out: 'nowhere/x.png' is not a file in a folder that exists"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with some files that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too few words\n" * 200)
    (folder / "bad.tiktoken").write_text("IQ== 0\nnot a rank\n")
    (folder / "not-a-run").mkdir()
    return folder


def everything(folder):
    return sorted((str(p), p.stat().st_size if p.is_file() else 0) for p in folder.rglob("*"))


@pytest.mark.parametrize("line, message", WRONG, ids=[line for line, _ in WRONG])
def test_one_line_and_nothing_left_behind(desk, line, message):
    before = everything(desk)
    done = process(*line.split(), cwd=desk)
    assert message in refused(done)
    assert everything(desk) == before


def test_a_gpu_where_there_is_none(desk):
    line = refused(process("train.py", "--device", "cuda", cwd=desk, CUDA_VISIBLE_DEVICES=""))
    assert "device cuda: torch" in line and "use --device cpu" in line


@pytest.mark.parametrize("source", ["fineweb", "fineweb-edu"])
def test_a_hub_that_cannot_be_reached(desk, source):
    before = everything(desk)
    line = refused(process("train.py", "--data", source, cwd=desk, HF_HUB_OFFLINE="1"))
    assert f"HuggingFaceFW/{source} cannot be read" in line
    assert "choose other data with --data PATH (a file or folder of text) or --data stdlib" in line
    assert everything(desk) == before


def test_a_run_that_is_missing_is_told_with_those_that_are_there(workplace, tmp_path):
    line = refused(command("eval.py", "expe", cwd=workplace))
    assert "expe: no such run directory; there is runs/expe, runs/" in line
    assert {word.strip(",") for word in line.split("there is ")[1].split()} == {
        f"runs/{pe}" for pe in ("expe", "learned", "rope")}  # fmt: skip
    for i in range(9):
        shutil.copytree(workplace / "runs" / "rope", tmp_path / f"runs/mini/rope-s{i}")
    line = refused(command("generate.py", "runs/mini/rope-s10", cwd=tmp_path))
    assert "there is runs/mini/rope-s1, runs/mini/rope-s0" in line and line.endswith(", ...")
    assert line.count("/rope") == 1 + 6
    line = refused(command("eval.py", cwd=tmp_path))
    assert "there is no run under runs/ itself: name them, as runs/*/*, or train one with python train.py" in line


def test_parquet_without_the_datasets_library(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (desk / "x.parquet").write_bytes(b"")
    assert "read by the datasets library: pip install datasets" in refused(command("data.py", "x.parquet", cwd=desk))
    (desk / "x.parquet").unlink()


def test_a_folder_of_tokens_with_another_vocabulary(tokens, tmp_path):
    line = refused(command("train.py", "--preset", "mini", "--data", tokens, cwd=tmp_path))
    assert "was made with a vocabulary of 300, and this run has 1,024: add --vocab 300" in line
    assert os.listdir(tmp_path) == []


def test_a_token_outside_the_vocabulary(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "t")
    with open(tmp_path / "t" / "train.bin", "r+b") as file:
        file.write(b"\xff\xff")
    line = refused(command("train.py", *TINY, "--data", "t", cwd=tmp_path))
    assert "train.bin has not the size and hash that meta.json says: prepare the folder again" in line
    assert os.listdir(tmp_path) == ["t"]


def test_two_sources_of_one_name_are_not_mixed_up(books, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        shutil.copytree(books, tmp_path / folder / "books")
    flags = ["train.py", *TINY, "--steps", "1", "--min-doc-tokens", "64"]
    assert command(*flags, "--data", "one/books", "--out", "runs/1", cwd=tmp_path).returncode == 0
    line = refused(command(*flags, "--data", "two/books", "--out", "runs/2", cwd=tmp_path))
    assert "data/books-v300 was made from" in line and "not from two/books" in line


def test_data_of_another_tokenizer_is_refused_by_eval(workplace, books, tmp_path):
    flags = ["--vocab", "290", "--min-doc-tokens", "64", "--out", tmp_path / "t"]
    assert command("data.py", books, *flags, cwd=tmp_path).returncode == 0
    line = refused(command("eval.py", "runs/expe", "--data", tmp_path / "t", cwd=workplace))
    assert "was made with another tokenizer than the run's" in line


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda record: record["model"].update(n_layers=3), "has an unknown tensor blocks.3."),
        (lambda record: record["model"].update(n_layers=5), "lacks the tensor blocks.4."),
        (lambda record: record["model"].update(d_mlp=64), "config.json makes it"),
        (lambda record: record["model"].update(n_heads=0), "n_heads must be a whole number of at least 1, got 0"),
        (lambda record: record["model"].pop("d_model"), "config.json: ModelConfig missing 1 required"),
        (lambda record: record.pop("train"), "config.json lacks 'train'"),
        (lambda record: record.pop("checkpoint"), "config.json lacks 'checkpoint'"),
    ],
)
def test_an_edited_config_is_named(workplace, tmp_path, change, message):
    shutil.copytree(workplace / "runs" / "expe", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    change(record)
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    assert message in refused(command("eval.py", "run", cwd=tmp_path))


def test_an_unwritable_folder(tokens, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    flags = [*TINY, "--data", tokens]
    assert "file" in refused(command("train.py", *flags, "--steps", "1", "--out", "file/run", cwd=tmp_path))
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.access(tmp_path / "locked", os.W_OK):
        return  # root writes anywhere
    assert "locked" in refused(command("train.py", *flags, "--out", "locked/run", cwd=tmp_path))
    assert "locked" in refused(command("data.py", "stdlib", "--out", "locked/data", cwd=tmp_path))


HELP = {
    "train.py": "--pe --l --start --theta --theta1 --theta2 --preset --data --device --dtype --compile --tokens "
    "--steps --out --resume --overwrite --show --sample-every --log --seed --lr --batch-size --vocab --context "
    "--checkpoint-every --layers --width --heads --norm --mlp --mlp-width --tied --causal --nope-every --window "
    "--optimizer --activation-checkpointing --micro-batch",
    "eval.py": "--lengths --protocol --split --data --json --plot --max-docs --device --scale --rope-scaling --factor "
    "--chunk --sinks --window",
    "data.py": "--show --vocab --tokenizer --min-doc-tokens --max-doc-chars --max-tokens --out --overwrite",
    "lab.formats": "--out --length",
    "generate.py": "--prompt --prompt-file --tokens --temperature --top-k --top-p --seed --stream --sinks --window "
    "--scale --rope-scaling --factor --chunk --device",
    "export.py": "--to --from --overwrite",
    "lab.bench": "--preset --parts --pe --backends --batch-size --repeats --dtype --compile --device --json",
    "lab.curves": "--out --csv",
    "lab.gpu_day": "--out --work --minutes --rehearse",
    "lab.attention": "--out --lengths --split --data --dtype --device --scale --rope-scaling --factor --chunk",
}


@pytest.mark.parametrize("script", HELP)
def test_help_explains_every_flag(script, tmp_path):
    done = process(script, "--help", cwd=tmp_path)
    options = done.stdout.split("usage: ")[1].split("\n\n", 1)[1]
    assert done.returncode == 0 and done.stderr == ""
    for flag in HELP[script].split():
        assert re.search(rf"^  {flag}( |,|$)", options, re.M), flag


@pytest.mark.parametrize("module", ["expe", "config", "data", "model_numpy"])
def test_the_lower_rooms_do_without_torch(module):
    program = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
