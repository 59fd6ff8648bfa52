"""One optimizer step, in PyTorch and in NumPy: micro-batches, gradients, clipping, the learning rate, AdamW.

Both backends compute it from the same first weights and batches: PyTorch on any device, and NumPy, with gradients
written by hand, on the CPU. engine/fast.py makes PyTorch's faster, and engine/distributed.py uses several processes.
"""

import contextlib
import math
import sys

import cli  # noqa: F401

# cli comes first: it says in one line which package is missing
# isort: split
import numpy as np
import torch

import model_numpy
from model_torch import GPT
from positional_encodings import CORE
from settings import InputError

UNUSED = "the weight {} has no gradient, since the loss does not depend on it: use it in forward, or remove it"
QUIET = np.errstate(over="ignore", invalid="ignore")       # a loss that is not finite is refused in one line

def learning_rate(train_config, step):
    """Of step 0 .. steps-1: linear warm-up to lr, then half a cosine down to end_lr."""
    warm = round(train_config.warmup * train_config.steps)
    if step < warm:
        return train_config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, train_config.steps - 1 - warm)
    return train_config.end_lr + (train_config.lr - train_config.end_lr) * ((1 + math.cos(math.pi * progress)) / 2)

def draw_positions(train_config, step, T):
    """With --random-positions P, T of 0 .. P-1 without repeats, in order, for the whole batch of a step; else None."""
    if not train_config.random_positions:
        return None
    rng = np.random.default_rng([train_config.seed, step, 1])           # apart from those of the data and of dropout
    return np.sort(rng.choice(train_config.random_positions, T, replace=False))

def micro_batches(tokens, targets, size):
    """[(tokens, targets, their share of all targets)], of `size` sequences each."""
    parts = [(tokens[i : i + size], targets[i : i + size]) for i in range(0, len(tokens), size)]
    counts = [int(np.count_nonzero(part != model_numpy.IGNORED)) for _, part in parts]
    return [(*part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)]

# ---- PyTorch ---------------------------------------------------------------------------------------------------------

def pick_device(name="auto"):
    """A torch.device from "auto" (a GPU if any) or the name of one that this machine has; InputError for another."""
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return gpu or torch.device("cpu")
    known = ["cpu", *([gpu.type, *(f"{gpu.type}:{i}" for i in range(torch.accelerator.device_count()))] if gpu else [])]
    if name not in known:
        raise InputError(f"--device must be auto or one of {', '.join(known)} on this machine, got {name!r}")
    return torch.device(name)

class TorchBackend:
    """GPT, or another module of which model(tokens, targets, positions) is the loss, and AdamW, on any device."""

    def __init__(self, model_config, train_config, device, compiled=False, model=None):
        self.train_config = train_config
        self.device = device
        if train_config.fast and model is None:
            from engine import fast
            model = fast.make_model(model_config, train_config.seed, half=train_config.dtype == "bf16")
        self.model = (model or GPT(model_config, train_config.seed)).to(device)
        if compiled:
            from engine import fast
            fast.compile(self.model)
        weights = [*self.model.parameters()]
        groups = [{"params": [w for w in weights if w.ndim >= 2], "weight_decay": train_config.weight_decay},
                  {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]              # table 5
        betas = train_config.beta1, train_config.beta2
        self.optimizer = torch.optim.AdamW(groups, train_config.lr, betas, fused=True)
        self.size = train_config.micro_batch or train_config.batch_size
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=train_config.dtype == "bf16")
        torch.set_float32_matmul_precision("high" if train_config.dtype == "tf32" else "highest")

    def tensors(self):
        """Weights and moments as arrays, after a step: {"NAME", "m.NAME" of the gradient, "v.NAME" of its square}."""
        tensors = dict(self.model.state_dict())
        for name, w in self.model.named_parameters():
            tensors[f"m.{name}"] = self.optimizer.state[w]["exp_avg"]
            tensors[f"v.{name}"] = self.optimizer.state[w]["exp_avg_sq"]
        return {name: x.cpu().contiguous().numpy() for name, x in tensors.items()}

    def load(self, tensors, step):
        """Go on from these weights and moments, after so many steps."""
        tensors = {name: torch.from_numpy(x).to(self.device) for name, x in tensors.items()}
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        for name, w in self.model.named_parameters() if step else ():
            self.optimizer.state[w] = {"step": torch.tensor(float(step), device=w.device),
                                       "exp_avg": tensors[f"m.{name}"], "exp_avg_sq": tensors[f"v.{name}"]}

    def step(self, batch, step):
        """Optimizer step `step` on a batch, (tokens, targets); returns the loss and the gradient's norm."""
        positions = draw_positions(self.train_config, step, batch[0].shape[1])
        self.model.train()
        while True:
            torch.manual_seed(self.train_config.seed * 2**32 + step)    # of dropout
            try:
                loss = self.add_gradients(batch, positions)
                break
            except torch.OutOfMemoryError:                              # of a GPU
                self.size //= 2
                if not self.size:
                    raise
            self.optimizer.zero_grad(set_to_none=True)
            print(f"the GPU's memory is full: going on with --micro-batch {self.size}", file=sys.stderr)
        return loss, self.update(step)

    def add_gradients(self, batch, positions):
        """The loss of a batch; its gradients are added up."""
        loss = 0
        for part, share in self.losses(batch, positions):
            part = part * share
            part.backward()
            loss += part.detach()
        return loss

    def losses(self, batch, positions=None):
        """Yields the loss of each micro-batch, and its share of the batch's targets."""
        for tokens, targets, share in micro_batches(*batch, self.size):
            tokens, targets = self.on_device(tokens), self.on_device(targets)
            with self.autocast:
                loss = self.model(tokens, targets, positions)
            yield loss, share

    def on_device(self, x):
        """An array as a tensor; a GPU copies it when it gets there, and nothing waits for that."""
        x = torch.from_numpy(x)
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def update(self, step):
        """Clip the gradients, take AdamW's step, and return the gradients' norm; InputError if a weight has none."""
        if unused := [name for name, w in self.model.named_parameters() if w.grad is None]:
            raise InputError(UNUSED.format(unused[0]))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train_config.clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train_config, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def share_of_gpu(self, rate):
        """In words, how much of a GPU's bf16 rate so many tokens a second take; "" on a CPU."""
        if self.device.type != "cuda":
            return ""
        from engine import fast
        with contextlib.suppress(torch.OutOfMemoryError):
            share = rate * fast.flops_a_token(self.model.config) / fast.bf16_rate(self.device)
            return f", {share:.0%} of the GPU's bf16 rate"
        return ""

    def validation_loss(self, batch):
        """The mean loss of a batch, in nats."""
        self.model.eval()
        with torch.no_grad():
            return sum(loss.item() * share for loss, share in self.losses(batch))

# ---- NumPy -----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def name_the_file(model_config, params):
    """InputError that names the file of zoo/ whose pullbacks give no gradient of one of its parameters."""
    try:
        yield
    except KeyError as error:
        name = str(error.args[0])
        if name not in params or "encoding." not in name:
            raise
        if (pe := model_numpy.encoding_with(name, model_config).pe) in CORE:
            raise
        raise InputError(f"zoo/{pe}.py: no pullback gives a gradient of {name.rpartition('.')[2]}, which its "
                         "parameters declare") from None

class NumpyBackend:
    """The same in NumPy, in fp32 on the CPU. Dropout's masks are drawn by NumPy, and so are not torch's."""

    def __init__(self, model_config, train_config, device, compiled=False):
        if str(device) != "cpu" or compiled:
            raise InputError("--backend numpy computes on the CPU: leave out --compile, and give --device cpu")
        if train_config.fast:
            from engine import fast
            fast.keep_freed_memory()
        self.model_config = model_config
        self.train_config = train_config
        self.size = train_config.micro_batch or train_config.batch_size
        self.params = model_numpy.init_params(model_config, train_config.seed)
        self.state = model_numpy.adamw_state(self.params)

    def share_of_gpu(self, rate):
        return ""

    def tensors(self):
        return model_numpy.join({"": self.params, "m.": self.state["m"], "v.": self.state["v"]})

    def load(self, tensors, step):
        self.params = {name: tensors[name] for name in self.params}
        if step:
            self.state = {"step": step, **{m: model_numpy.strip_prefix(f"{m}.", tensors) for m in "mv"}}

    @QUIET
    def step(self, batch, step):
        """Optimizer step `step` on a batch, (tokens, targets); returns the loss and the gradient's norm."""
        positions = draw_positions(self.train_config, step, batch[0].shape[1])
        model_config, train_config = self.model_config, self.train_config
        rng = np.random.default_rng([train_config.seed, step])          # of dropout
        loss = 0
        grads = {}
        for tokens, targets, share in micro_batches(*batch, self.size):
            masks = model_numpy.dropout_masks(model_config, *tokens.shape, rng) if model_config.dropout else None
            with name_the_file(model_config, self.params):
                part, part_grads = model_numpy.loss_and_grads(self.params, tokens, targets, model_config, positions,
                                                              masks)
            loss += share * part
            grads = model_numpy.summed(grads, {name: share * g for name, g in part_grads.items()})
        if unused := self.params.keys() - grads.keys():
            raise InputError(UNUSED.format(min(unused)))
        norm = model_numpy.clip_grads(grads, train_config.clip)
        betas = train_config.beta1, train_config.beta2
        model_numpy.adamw_step(self.params, grads, self.state, learning_rate(train_config, step), *betas,
                               weight_decay=train_config.weight_decay)
        return float(loss), norm

    @QUIET
    def validation_loss(self, batch):
        """The mean loss of a batch, in nats."""
        total = 0
        for tokens, targets, _ in micro_batches(*batch, self.size):
            total += model_numpy.token_losses(self.params, tokens, targets, self.model_config).sum(dtype="float64")
        return float(total / np.count_nonzero(batch[1] != model_numpy.IGNORED))

BACKENDS = {"torch": TorchBackend, "numpy": NumpyBackend}
