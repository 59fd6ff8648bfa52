"""Training in several processes, which torchrun starts: each is a rank that runs train.py's own loop.

    torchrun --nproc_per_node 8 -m -- engine.distributed --pe expe --l 24      train.py's flags, and --timeout SECONDS

A batch is a function of (seed, step), so every rank has the same one, computes its share of it, and
DistributedDataParallel averages the gradients. Rank 0 prepares the data before the others begin, and it alone writes.
All ranks read the same folders. Each rank of a machine has a GPU of its own; ranks may share a CPU.
"""

import contextlib
import functools
import os
import sys
import time
from datetime import timedelta

TORCHRUN = os.getppid()                # before torch is loaded, which takes seconds in which it may be killed

from cli import CommandLine, number, read_environment

# cli comes first: it says in one line which package is missing
# isort: split
import torch
import torch.distributed as dist

import backends
from engine.workers import end_with_parent
from runs import check_finite, lock
from settings import InputError
from train import open_run, train_run
from training_run import Run

with CommandLine(prog="engine.distributed").one_line_errors():
    RANK, WORLD = read_environment("RANK", 0), read_environment("WORLD_SIZE", 1)
PREPARATION = timedelta(days=7)        # how long rank 0 may prepare data


class DistributedBackend(backends.TorchBackend):
    """TorchBackend that computes a rank's share of each step. The ranks meet by join() when it is made."""

    def __init__(self, join, model_config, train_config, device, compiled=False):
        if train_config.batch_size % WORLD:
            raise InputError(f"--batch-size must be a multiple of the {WORLD} processes, got {train_config.batch_size}")
        device = own_device(device)
        join()
        super().__init__(model_config, train_config, device, compiled)
        self.shared = None                                              # made at the first step, after load

    def step(self, batch, step):
        if self.shared is None:
            self.shared = torch.nn.parallel.DistributedDataParallel(self.model)
        config = self.train_config
        positions = backends.draw_positions(config, step, batch[0].shape[1])
        self.model.train()
        torch.manual_seed(config.seed * 2**32 + step + RANK * config.steps)     # each rank draws its own dropout
        tokens, targets, share = backends.micro_batches(*batch, len(batch[0]) // WORLD)[RANK]
        parts = backends.micro_batches(tokens, targets, config.micro_batch or len(tokens))
        loss = 0
        for i, (tokens, targets, part) in enumerate(parts, 1):
            self.shared.require_backward_grad_sync = i == len(parts)    # only the last gradients are averaged
            tokens, targets = self.on_device(tokens), self.on_device(targets)
            with self.autocast:
                part_loss = self.shared(tokens, targets, positions) * (part * share * WORLD)
            part_loss.backward()
            loss += part_loss.detach()
        dist.all_reduce(loss)
        return loss / WORLD, self.update(step)

    def share_of_gpu(self, rate):
        return super().share_of_gpu(rate / WORLD)

def own_device(device):
    """The device of this rank; InputError unless each rank of a machine has a GPU of its own."""
    if device.type != "cuda":
        return device
    ranks = read_environment("LOCAL_WORLD_SIZE", 1)
    if device.index or ranks > torch.cuda.device_count():
        raise InputError(f"--device {device} is not one for each of {ranks} processes: give --device cuda, and start "
                         f"at most {torch.cuda.device_count()} processes here with torchrun --nproc_per_node")
    index = read_environment("LOCAL_RANK", 0)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

class RankRun(Run):
    """A Run of which rank 0 alone writes, and which stops where any rank has a signal to."""

    quiet = True if RANK else Run.quiet

    def must_stop(self, signals):
        stop = torch.tensor(float(bool(signals)))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop)

    def save(self, backend, step, seconds):
        """Every rank checks what rank 0 saves, so that all of them end if it cannot be saved."""
        if RANK:
            check_finite(backend.tensors(), step)
        else:
            super().save(backend, step, seconds)

if RANK:
    for name in ("start", "write", "log"):
        setattr(RankRun, name, lambda self, *what, **line: None)

def wait_for_torchrun():
    """Wait for the end of the process that started this one."""
    while os.getppid() == TORCHRUN:
        time.sleep(1)

def main():
    """What each process does that torchrun has started; it ends the process."""
    parser = CommandLine(prog="engine.distributed", add_help=False)
    parser.add_argument("--timeout", type=number, default=600)          # seconds that ranks wait for one that hangs
    args, argv = parser.parse_known_args()
    if "RANK" not in os.environ:
        parser.error("start the processes with torchrun --nproc_per_node N -m -- engine.distributed FLAGS: train.py's, "
                     "and --timeout SECONDS, for which a rank waits for one that hangs")
    if not args.timeout >= 1:
        parser.error(f"--timeout must be at least 1 second, got {args.timeout}")
    if dist.is_torchelastic_launched():
        end_with_parent(wait_for_torchrun)                              # a killed torchrun would leave the ranks
    store, _, _ = next(dist.rendezvous("env://"))

    def join():
        store.set("rank 0", "trains")
        dist.init_process_group(store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=args.timeout))

    if RANK:
        sys.stdout = open(os.devnull, "w")                              # rank 0 prints
        store.wait(["rank 0"], PREPARATION)
        if store.get("rank 0") != b"trains":
            return
    code = 0
    try:
        with parser.one_line_errors():
            run = open_run(argv, RankRun)
            if run.train_config.backend == "numpy":
                raise InputError("--backend numpy is one process: start it with python train.py")
            with lock(run.folder) if RANK == 0 else contextlib.nullcontext():
                train_run(run, functools.partial(DistributedBackend, join))
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        if not dist.is_initialized():
            store.set("rank 0", "ends")
    if dist.is_initialized() and code in (0, 130):
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)                                                      # threads of torch can abort a longer goodbye

if __name__ == "__main__":
    main()
