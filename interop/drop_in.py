"""ExPE in a model of another library: a Llama of transformers, with hooks. It trains for ten steps and generates.

    python -m interop.drop_in

It needs transformers. drop_in itself is in expe_torch, which pip installs, and needs nothing of this repository.
"""

from cli import CommandLine

# cli comes first: it says in one line which package is missing
# isort: split
import torch

from interop.expe_torch import ExPE, drop_in


def train(model, text, steps=10, context=64, batch_size=8):
    """The loss of each step of AdamW on the bytes of a text."""
    tokens = torch.tensor(list(text.encode()))
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        begins = torch.randint(len(tokens) - context, (batch_size, 1))
        batch = tokens[begins + torch.arange(context)]                   # (B, T)
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def main(argv=None):
    CommandLine(prog="python -m interop.drop_in", description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None))
    drop_in(model, ExPE(l=24, theta=64 / 64, on="k"))
    with open(__file__, encoding="utf-8") as file:
        losses = train(model, file.read())
    print("loss of each step:", *(f"{loss:.2f}" for loss in losses))
    written = model.eval().generate(torch.tensor([list(b"def ")]), max_new_tokens=40, do_sample=False)
    print(bytes(written[0].tolist()))

if __name__ == "__main__":
    main()
