"""Several processes, by torchrun: the first runs train.py as one alone would, the others follow it step by step.

    torchrun --nproc_per_node 8 -- train.py --pe expe --l 24

Before each step the first process tells the others which it is; each computes its share of that step's batch, and
DistributedDataParallel averages the gradients. Each process of a machine has a GPU of its own; they may share a CPU.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
import sys

import numpy as np
import torch

import train
from config import InputError

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class DistributedBackend(train.TorchBackend):
    """TorchBackend whose step is shared by all processes: they begin with the weights of the first one."""

    def __init__(self, model_config, config, device, compiled=False):
        if config.batch_size % WORLD:
            raise InputError(f"--batch-size must be a multiple of the {WORLD} processes, got {config.batch_size}")
        device = own_device(device)
        super().__init__(model_config, config, device, compiled)
        self.plan = (model_config, config, str(device.type), compiled)
        self.loaded = None
        self.shared = None                                              # made at the first step, after load

    def load(self, tensors, step):
        super().load(tensors, step)
        self.loaded = tensors, step

    def step(self, batch, step):
        if RANK == 0:
            if self.shared is None:
                tell((self.plan, self.loaded))
            tell((step, batch))
        if self.shared is None:
            self.shared = torch.nn.parallel.DistributedDataParallel(self.model)
        config = self.config
        self.model.train()
        torch.manual_seed(config.seed * 2**32 + step + RANK * config.steps)     # of dropout: of each process its own
        positions = train.draw_positions(config, step, batch.shape[1] - 1) if config.random_positions else None
        whole = dataclasses.replace(config, micro_batch=0)
        [inputs] = train.micro_batches(whole, self.vocab, batch, [config.seed, step, 2])
        mine = [torch.from_numpy(np.split(x, WORLD)[RANK]).to(self.device) for x in inputs]       # (B / WORLD, T) each
        parts = list(zip(*(x.split(config.micro_batch or len(x)) for x in mine), strict=True))
        loss = 0
        for i, (tokens, targets) in enumerate(parts, 1):
            self.shared.require_backward_grad_sync = i == len(parts)    # the last sums alone are averaged
            with self.autocast:
                share = self.shared(tokens, targets, positions) * (len(tokens) * WORLD / len(batch))
            share.backward()
            loss += share.detach()
        torch.distributed.all_reduce(loss)
        return loss.item() / WORLD, self.update(step)

def tell(what=None):
    """What the first process says, in every one."""
    said = [what]
    torch.distributed.broadcast_object_list(said, device=torch.device("cpu"))
    return said[0]

def own_device(device):
    """The device of this process; InputError unless each process of a machine has a GPU of its own."""
    if device.type != "cuda":
        return device
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.index or here > torch.cuda.device_count():
        raise InputError(f"--device {device} is not one for each of {here} processes: give --device cuda, and torchrun "
                         f"at most {torch.cuda.device_count()} of them here")
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

def refuse_numpy(*settings):
    raise InputError("--backend numpy is one process: start it without torchrun")

def main(argv):
    """All that a process does which torchrun has started."""
    torch.distributed.init_process_group(timeout=datetime.timedelta(days=7))            # data may be prepared first
    try:
        if RANK:
            follow()
        else:
            with contextlib.ExitStack() as stack:
                stack.callback(tell)                                    # None sends the others away, however this ends
                train.main(argv, {"torch": DistributedBackend, "numpy": refuse_numpy})
    finally:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)                                                         # threads of torch can abort a longer goodbye

def follow():
    """All that a process other than the first one does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)                           # the first one says when to end
    said = tell()
    if said is None:
        return
    (model_config, config, device, compiled), loaded = said
    backend = DistributedBackend(model_config, config, torch.device(device), compiled)
    if loaded is not None:
        backend.load(*loaded)
    while (said := tell()) is not None:
        step, batch = said
        backend.step(batch, step)
