"""What lab.measure is about to do: which positions each run takes, what it reads, and how many tokens that is."""

import functools
import itertools

from config import InputError
from eval import held_out
from lab import measures
from longer import scaling


def scalings(configs, options):
    """{run: [scaled's keywords]}: of the values asked for, each run takes those that its encoding has a use for.

    configs: {run: what read_run gives}. Raises InputError for a value that none of the runs has a use for, or that is
    wrong for one of them.
    """
    plain = options | {"scale": 1.0, "rope_scaling": "none"}
    by_run = {run: {"scale": [], "rope_scaling": []} for run in configs}
    for name, value in [(key, value) for key in ("scale", "rope_scaling") for value in options[key]]:
        errors = []
        for run, (model, _, _) in configs.items():
            try:
                scaling.scaled(model, model.context, **plain | {name: value})
                by_run[run][name].append(value)
            except scaling.NotForThisEncoding as error:
                errors.append(f"{run}: {error}")
            except InputError as error:
                raise InputError(f"{run}: {error}") from None
        if len(errors) == len(configs):
            raise InputError(errors[0])
    return {run: [options | {"scale": scale, "rope_scaling": rope_scaling}
                  for scale in values["scale"] or [1.0] for rope_scaling in values["rope_scaling"] or ["none"]]
            for run, values in by_run.items()}

def measured(run, record, lengths, args):
    """(source, documents, jobs) of a run: each job is (protocol or probe, length, lists of windows)."""
    import data

    measure = measures.MEASURES[args.measure]
    context = record["model"]["context"]
    longest = max(lengths)
    if measure.whole and (odd := [str(length) for length in lengths if longest % length]):
        raise InputError(f"--lengths must divide the longest, {longest}, so that each scores the same tokens: not "
                         f"{', '.join(odd)}")
    tokenizer = functools.cache(lambda: data.run_tokenizer(run, record["data"]))
    targets = args.targets or max(1, context // measure.share)
    settings = measures.Settings(context, longest, targets, args.stride or context // 4,
                                 lambda text: tokenizer().encode_ordinary(text))
    for flag in ("targets", "stride"):
        if flag in measure.flags and not 1 <= (value := getattr(settings, flag)) <= min(lengths):
            raise InputError(f"--{flag} must be from 1 to {min(lengths)}, the shortest length, got {value}")
    source, documents = held_out(run, record, args.split, args.data)
    documents = measures.usable(documents, longest, args.max_docs)
    jobs = [(args.measure, length) for length in lengths]
    if measure.beside and longest > context:
        jobs.append((measure.beside, context))
    jobs = [(job, length, measures.MEASURES[job].conditions(documents, length, settings)) for job, length in jobs]
    if not any(conditions for *_, conditions in jobs):
        raise InputError(f"{args.measure} has nothing to ask at {longest} tokens, of which the trained length is "
                         f"{context}")
    return source, documents, jobs

def tokens_of(jobs, scalings, args):
    """How many tokens a run has to read for its jobs."""
    windows = itertools.chain(*(windows for *_, conditions in jobs for windows in conditions))
    return len(scalings) * len(args.dtype) * sum(len(window.tokens) - 1 for window in windows)
