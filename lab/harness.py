"""A run as lm_eval sees a language model, for the benchmarks that the paper reports (section 4.2).

    python -m lab.harness runs/expe --tasks hellaswag,arc_easy,arc_challenge,mmlu

lm_eval (https://github.com/EleutherAI/lm-evaluation-harness) has the tasks, their prompts and their scores, and fetches
their data from a hub. This module gives it the log-likelihoods and the text of our GPT with its tokenizer.
"""

import itertools
import logging
import math
import os
from functools import partial

from cli import CommandLine, at_least, listed, new_file

# cli comes first: it says in one line which package is missing
# isort: split
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from backends import pick_device
from files import write_rows
from generate import choose
from longer import flags
from longer.cache import Cache
from longer.reading import BATCH_TOKENS, load
from longer.writing import generate_cached
from model_torch import at_least_fp32
from runs import describe_progress, read_named, read_run, warn_of_changes
from settings import InputError, prefix_errors, require_finite
from tokenizer import EOT, read_tokenizer

PROG, VERSION = "python -m lab.harness", "0.4.13"
try:
    from datasets.exceptions import DatasetsError
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as error:
    CommandLine(prog=PROG).error(f"this needs lm_eval ({error}): pip install lm_eval=={VERSION}")

class Run(TemplateLM):
    """A run directory behind lm_eval's interface. Log-likelihoods are in nats.

    Of a text that is longer than the trained length the last tokens are read, as is usual with these benchmarks; a
    continuation is always read whole. How many are cut is printed.
    """

    def __init__(self, run, device, dtype):
        super().__init__()
        self.run = run
        self.model, record = load(run, device, dtype)
        self.encoding = read_tokenizer(run, record["data"])
        self.context = self.model.config.context
        self.unfinished = describe_progress(record["step"], record["train"]["steps"])

    @property
    def eot_token_id(self):
        return self.encoding.eot_token

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encoding.encode_ordinary(string)

    def report_cut(self, n_cut, n):
        if n_cut:
            print(f"{self.run}: {n_cut} of {n} prompts have more tokens than are read, and were cut on the left")

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[(summed log-likelihood of the continuation, whether greedy decoding gives it)].

        Texts are read side by side: what pads a shorter one does not change its scores.
        """
        texts = [(context + continuation)[-max(self.context, len(continuation)) - 1 :]
                 for _, context, continuation in requests]
        if (longest := max(map(len, texts), default=0) - 1) > self.model.longest:
            raise InputError(f"{self.run} has positions for {self.model.longest} tokens, and this task needs {longest}")
        self.report_cut(sum(len(text) < len(context + continuation)
                            for text, (_, context, continuation) in zip(texts, requests, strict=True)), len(texts))
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        by_request = {}
        device = self.model.output_weight.device
        with tqdm(total=len(order), desc="log-likelihoods", disable=disable_tqdm) as bar:
            while order:
                batch = order[: max(1, BATCH_TOKENS // len(texts[order[0]]))]
                order = order[len(batch) :]
                tokens = [torch.tensor(texts[i][:-1], device=device) for i in batch]
                hidden = self.model.hidden(pad_sequence(tokens, batch_first=True))     # (B, T, C)
                for i, h in zip(batch, hidden, strict=True):
                    targets = torch.tensor(requests[i][2], device=device)
                    end = len(texts[i]) - 1
                    logits = F.linear(h[end - len(targets) : end], self.model.output_weight)
                    with prefix_errors(self.run):
                        require_finite(logits.isfinite().all(), "logits")
                    logs = at_least_fp32(logits).log_softmax(-1)                       # (n, V)
                    total = logs.gather(-1, targets[:, None]).double().sum().item()
                    by_request[i] = total, bool((logs.argmax(-1) == targets).all())
                bar.update(len(batch))
        return [by_request[i] for i in range(len(texts))]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, in windows of the trained length that do not overlap."""
        windows = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.context, 1)
            windows.append([(None, *make_disjoint_window(pair)) for pair in rolling])
        scores = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm))
        return [sum(next(scores)[0] for _ in mine) for mine in windows]

    def generate_until(self, requests, disable_tqdm=False):
        """What follows each text, token by token until one of its stop strings, <|endoftext|> or max_gen_toks.

        Prompt and new tokens share the trained length, as in lm_eval's own models: a longer prompt is cut on the left.
        Half of the trained length is left to it at least, and the text goes on past the trained length, unless the
        encoding ends before: then both must fit its positions. InputError if these are too few for max_gen_toks.
        """
        calls = [(context, normalize_gen_kwargs(kwargs)) for context, kwargs in (request.args for request in requests)]
        most = max((kwargs["max_gen_toks"] for _, kwargs in calls), default=0)
        if most > self.model.longest:
            raise InputError(f"{self.run} has positions for {self.model.longest} tokens, and this task writes up to "
                             f"{most}: give the task a max_gen_toks of at most {self.model.longest}")
        texts = []
        n_cut = 0
        for context, kwargs in tqdm(calls, desc="texts", disable=disable_tqdm):
            drawn = []
            stop = [EOT, *filter(None, kwargs["until"])]
            room = max(1, self.context // 2, self.context - kwargs["max_gen_toks"])
            room = min(room, self.model.longest - kwargs["max_gen_toks"] + 1)         # the last token is not read
            whole = self.tok_encode(context)
            n_cut += len(whole) > room
            prompt = whole[-room:] or [self.eot_token_id]                             # as loglikelihood's empty context
            by = partial(choose, temperature=kwargs.get("temperature", 0))
            steps = generate_cached(self.model, [prompt], Cache(), by)
            with prefix_errors(self.run):
                for (token,) in itertools.islice(steps, kwargs["max_gen_toks"]):
                    drawn.append(token)
                    if any(s in self.encoding.decode(drawn) for s in stop):
                        break
            texts.append(postprocess_generated_text(self.encoding.decode(drawn), stop, None))
        self.report_cut(n_cut, len(texts))
        return texts

def score(run, args, manager):
    """Print lm_eval's table of a run; returns a dict for each task and metric."""
    model = Run(run, pick_device(args.device), args.dtype)
    warn_of_changes(run)
    try:
        scores = simple_evaluate(model, tasks=list(args.tasks), num_fewshot=args.shots, limit=args.limit,
                                task_manager=manager, log_samples=False)
    except (OSError, DatasetsError) as error:              # by whichever library fetches
        raise InputError(f"the data of {', '.join(args.tasks)} cannot be had here ({type(error).__name__}): lm_eval's "
                         "own tasks need the hub once; local ones, by --task-path, must name files that exist"
                         ) from None
    names = {"run": str(run), "pe": model.model.config.encoding.pe}
    print(f"\n{' '.join(filter(None, (*names.values(), model.unfinished)))}\n{make_table(scores)}")
    rows = []
    for task, values in scores["results"].items():
        n = scores["n-samples"].get(task, {}).get("effective")
        for key, value in values.items():              # "acc,none", "acc_stderr,none", "alias"
            metric, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                rows.append(names | {"task": task, "metric": metric, "value": value if math.isfinite(value) else None,
                                     "stderr": error if isinstance(error, float) and math.isfinite(error) else None,
                                     "n": n})
    return rows

def main(argv=None):
    parser = CommandLine(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    add("--tasks", type=listed(str), required=True, metavar="NAME,...", help="such as hellaswag,arc_easy,mmlu")
    add("--limit", type=at_least(1), metavar="N", help="the first N examples of each task only")
    add("--shots", type=at_least(0), metavar="N", help="examples in the prompt (default: the task's)")
    add("--task-path", metavar="DIR", help="a folder of tasks in lm_eval's own YAML format")
    add("--dtype", choices=flags.PRECISIONS, default="fp32", help="as in lab.measure (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto, a GPU if any)")
    add("--json", type=new_file(".json"), metavar="FILE", help="write the numbers as a list of objects")
    with parser.one_line_errors():
        args = parser.parse_args(argv)
        for library in ("lm_eval", "huggingface_hub", "datasets"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        if args.task_path is not None and not os.path.isdir(args.task_path):
            raise InputError(f"--task-path {args.task_path} is not a folder")
        runs = [*read_named(args.runs, read_run)]
        manager = TaskManager(include_path=args.task_path)
        if unknown := [name for name in args.tasks if name not in manager.all_tasks]:
            raise InputError(f"lm_eval has no task {unknown[0]}: lm-eval ls tasks lists its own; yours come by "
                             "--task-path")
        rows = [row for run in runs for row in score(run, args, manager)]
        if args.json:
            write_rows(args.json, rows)

if __name__ == "__main__":
    main()
