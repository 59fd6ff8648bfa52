"""Make runs of earlier versions resumable: their optimizer.pt is a pickle, which train.py never opens.

    python -m lab.upgrade runs/expe

The moments are copied to optimizer.safetensors, and then config.json names that file in the place of the pickle.
"""

import torch

from cli import CommandLine
from config import InputError
from files import held
from model_numpy import parameter_shapes
from runs import checkpoint_file, commit, named_runs, read_run, read_tensors, write_tensors


def moments_of(path, shapes):
    """{"m.NAME", "v.NAME": tensor} of an optimizer.pt, of which nothing is taken but plain tensors of these shapes."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["optimizer"]
        if "m" in state:                                                # by NumPy
            found = {f"{moment}.{name}": state[moment][name] for moment in "mv" for name in shapes}
        else:                                                           # by torch, whose first group is the matrices
            names = sorted(shapes, key=lambda name: len(shapes[name]) < 2)
            each = [(name, state["state"][i]) for i, name in enumerate(names)]
            found = {f"m.{name}": w["exp_avg"] for name, w in each} | {f"v.{name}": w["exp_avg_sq"] for name, w in each}
        for name, tensor in found.items():
            plain = (tensor.layout, tensor.dtype, tensor.device.type) == (torch.strided, torch.float32, "cpu")
            if not plain or tuple(tensor.shape) != shapes[name[2:]]:
                raise TypeError(f"{name} is no float32 tensor of the shape {shapes[name[2:]]}")
    except Exception as error:                                          # a pickle can raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{path} is not the optimizer's state of this run ({reason})") from None
    return {name: tensor.contiguous().numpy() for name, tensor in found.items()}

def upgrade(run):
    """Replace the run's optimizer.pt; a kill leaves the run as it was, or upgraded."""
    model, _, record = read_run(run)
    if "optimizer.pt" not in record["checkpoint"]["files"]:
        return print(f"{run} is as this version writes it")
    old = checkpoint_file(run, record, "optimizer.pt")
    moments = moments_of(old, parameter_shapes(model)) if record["checkpoint"]["step"] else {}
    new = write_tensors(run / "optimizer.safetensors", moments)
    read_tensors(new, {name: tensor.shape for name, tensor in moments.items()})
    del record["checkpoint"]["files"]["optimizer.pt"]
    commit(run, record, ["optimizer.safetensors"])
    old.unlink()
    print(f"{run} can be resumed")

def main(argv=None):
    parser = CommandLine(prog="python -m lab.upgrade", description="Make runs of earlier versions resumable.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: every run under runs/)")
    with parser.one_line_errors():
        for run in named_runs(parser.parse_args(argv).runs):
            with held(run):
                upgrade(run)

if __name__ == "__main__":
    main()
