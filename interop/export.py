"""Export a run as a model of transformers, or import one as a run.

    python -m interop.export runs/mini-expe-s0 --to transformers exported/        a folder for AutoModelForCausalLM
    python -m interop.export exported/ --from transformers runs/back              a run, of a Llama or a GPT-NeoX

transformers loads the folder offline, with its tokenizer, and generates with its cache. Where transformers lacks the
encoding, the folder has its own code, modeling_gpt.py and what it imports, which you should read before you trust it.
Its README.md has the lines of Python that load the model and generate a text.
"""

from common import CommandLine
from config import InputError

# torch and what imports it are imported in main, so that --help and a wrong flag answer at once.

def main(argv=None):
    parser = CommandLine(prog="python -m interop.export", epilog=__doc__[__doc__.index("    python") :],
                         description="Export a run to another library, or import one from it.")
    add = parser.add_argument
    add("source", metavar="RUN", help="run directory of train.py; with --from: a folder of that library")
    add("--to", metavar="LIBRARY", choices=["transformers"], help="the library to write for: transformers")
    add("--from", dest="origin", metavar="LIBRARY", choices=["transformers"], help="or the library to read from")
    add("out", metavar="OUT", help="the folder to write, a new one")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        if (args.to is None) == (args.origin is None):
            raise InputError("give either --to transformers or --from transformers")
        from interop.over import from_transformers, to_transformers
        if args.to:
            architecture, step = to_transformers(args.source, args.out)
            print(f"{args.out}: {architecture}, step {step:,} of {args.source}")
        else:
            architecture = from_transformers(args.source, args.out)
            print(f"{args.out}: a run at step 0, of the {architecture} in {args.source}; "
                  f"next: python eval.py {args.out} --data TEXT")

if __name__ == "__main__":
    main()
