"""Export a run as a model of transformers.

    python -m interop.export runs/mini-expe-s0 --to transformers exported/        a folder for AutoModelForCausalLM

A run with the layers of a Llama, a GPT-NeoX or a GPT-2 (interop/over.py) becomes one. For any other the folder has its
own code, modeling_gpt.py and what it imports, which you should read before you trust it. transformers loads the folder
offline, with its tokenizer, and generates with its cache. Its README.md has the lines of Python for that.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
import torch
from safetensors.torch import save

from files import is_unfinished, read_text, write_bytes, write_text
from generate import TOKENS
from interop.over import GPT2, LLAMA, NEOX, SHAPE
from interop.tokens import CONFIG, to_tokenizers
from model_torch import ENCODINGS
from runs import load_model, read_run
from settings import InputError, prefix_errors, require_finite
from tokenizer import read_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CORE = ("expe", "config", "model_numpy", "model_torch")
FILES = ("README.md", "LICENSE", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json",
         "modeling_gpt.py", *(f"{name}.py" for name in CORE))           # what an export writes, beside files of zoo/
UNFINISHED = "export.unfinished"         # lists the files of an export until its folder is complete
README = """# A GPT with the positional encoding {pe}, trained for {step:,} steps

In this folder, this writes a text that continues "The". Every text of the training data begins with the token
`<|endoftext|>`, and so must a prompt.

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code={own})
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code={own})
tokens = torch.tensor([[tokenizer.bos_token_id, *tokenizer("The").input_ids]])
written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length={length}, do_sample=False)
print(tokenizer.decode(written[0], skip_special_tokens=True))
```
"""

def to_transformers(run, out):
    """Write the folder of a run; returns (its architecture's name, the run's step). InputError for what cannot be."""
    folder = Path(os.path.realpath(out))
    leftovers = unfinished(folder, out)
    source = read_run(run)[2]["data"]["source"]
    if source.startswith("task:"):
        raise InputError(f"{run} is trained on {source}, whose symbols need no tokenizer, and transformers needs one: "
                         "export a run that is trained on text")
    gpt, record = load_model(run)
    config = gpt.config
    tokenizer = read_tokenizer(run, record["data"])
    if not config.causal:
        raise InputError(f"{run} sees both sides, and what generates from a cache must be causal: export a run that "
                         "was trained with a causal mask")
    with prefix_errors(run), torch.no_grad():
        require_finite(gpt(torch.arange(config.context)[None] % config.vocab).isfinite().all(), "logits")
    written = {"dtype": "float32", "bos_token_id": tokenizer.eot_token, "eos_token_id": tokenizer.eot_token,
               "use_cache": True}
    kind = next((kind for kind in (LLAMA, NEOX, GPT2) if kind.fits(gpt)), None)
    files = {}
    if kind:
        written |= {"architectures": [kind.architecture], "model_type": kind.model_type}
        written |= {name: getattr(config, field) for name, field in kind.fields.items()}
        written |= kind.fixed | kind.positions(config.encoding, config)
        weights = kind.theirs(gpt.state_dict(), config.heads)
    else:
        classes = {"AutoConfig": "modeling_gpt.GPTConfig", "AutoModelForCausalLM": "modeling_gpt.GPTForCausalLM"}
        written |= {name: getattr(config, field) for name, field in SHAPE.items()}
        written |= {"architectures": ["GPTForCausalLM"], "model_type": "exact-positions", "auto_map": classes,
                    "tie_word_embeddings": False, "model": dataclasses.asdict(config)}
        weights = {f"gpt.{name}": w for name, w in gpt.state_dict().items()}
        others = {config.block(i)[0].pe for i in range(config.layers)} - {config.encoding.pe, *ENCODINGS}
        if others:
            raise InputError(f"{run} has {', '.join(sorted(others))} in its --cycle, which an export can have as --pe "
                             "alone: export another run")
        files = sources(config.encoding.pe) | {"LICENSE": read_text(ROOT / "LICENSE")}
    length = min(TOKENS, config.encoding.longest(config))
    files |= {
        "README.md": README.format(pe=config.encoding.pe, step=record["step"], own=kind is None, length=length),
        "tokenizer.json": json.dumps(to_tokenizers(tokenizer)), "tokenizer_config.json": json.dumps(CONFIG, indent=1)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"OUT cannot be made: {error}") from None
    write_text(folder / UNFINISHED, "\n".join([*leftovers, *files, "model.safetensors", "config.json"]))
    for name in leftovers:
        (folder / name).unlink()
    write_bytes(folder / "model.safetensors", save(weights, {"format": "pt"}))
    for name, text in files.items():
        write_text(folder / name, text)
    write_text(folder / "config.json", json.dumps(written, indent=1))           # last: no part of a model loads
    (folder / UNFINISHED).unlink()
    return written["architectures"][0], record["step"]

def unfinished(folder, out):
    """What an export that was killed left in the folder, config.json first; InputError if it has any other file.

    Such a file is on the list of that export, and has a name that exports write, whoever wrote the list.
    """
    names = {*os.listdir(folder)} - {UNFINISHED} if folder.is_dir() else set()
    list_of_files = folder / UNFINISHED
    listed = read_text(list_of_files).split("\n") if list_of_files.exists() else []
    known = {*listed} & {*FILES, *(path.name for path in (ROOT / "zoo").glob("*.py"))}
    if not all((name in known or is_unfinished(name)) and (folder / name).is_file() for name in names):
        raise InputError(f"OUT must be a new folder, and {str(out)!r} has files in it: choose another")
    return sorted(names, key=lambda name: name != "config.json")

def sources(pe):
    """{file name: text} of interop/modeling_gpt.py and the files that it needs: those of CORE, zoo/ as they import it.

    They lie side by side, since transformers copies no sub-folder, and so their imports are made relative. It copies
    what `from .NAME import ...` names, which the last lines of modeling_gpt.py do for the files of zoo/.
    """
    paths = [ROOT / "interop/modeling_gpt.py", *(ROOT / f"{name}.py" for name in CORE), ROOT / f"zoo/{pe}.py"]
    texts = {}
    for path in paths:                                                                 # which grows meanwhile
        if path.exists() and path.name not in texts:
            text = read_text(path)
            names = re.findall(r'(?:from zoo import |\bzoo\.|zoo_module\(")(\w+)', text)
            paths += [ROOT / f"zoo/{name}.py" for name in names]
            for ours, relative in RELATIVE.items():
                text = re.sub(ours, relative, text, flags=re.MULTILINE)
            texts[path.name] = text
    zoo = [name.removesuffix(".py") for name in texts if (ROOT / "zoo" / name).exists()]
    texts["modeling_gpt.py"] += "\n" + "".join(
        f"from .{name} import __doc__ as about_{name}  # noqa: E402, F401\n" for name in zoo)
    return texts

RELATIVE = {                             # {an import of our files: the same among files that lie side by side}
    rf"^( *)import ({'|'.join(CORE)})$": r"\1from . import \2",
    rf"^( *)from ({'|'.join(CORE)}) import ": r"\1from .\2 import ",
    r"^( *)from zoo import ": r"\1from . import ",
    r"^( *)from zoo\.(\w+) import ": r"\1from .\2 import ",
    r"^( *)import zoo\.(\w+) as ": r"\1from . import \2 as ",
    r'import_module\(f"zoo(\.[^"]+)"\)': r'import_module(f"\1", __package__)',
}

def main(argv=None):
    parser = CommandLine(prog="python -m interop.export", epilog=(__doc__ or "").partition("\n\n")[2],
                                description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="run directory of train.py")
    parser.add_argument("--to", metavar="LIBRARY", choices=["transformers"], required=True,
                        help="the library to write for: transformers")
    parser.add_argument("out", metavar="OUT", help="the folder to write, a new one")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        architecture, step = to_transformers(args.run, args.out)
        print(f"{args.out}: {architecture}, step {step:,} of {args.run}")

if __name__ == "__main__":
    main()
