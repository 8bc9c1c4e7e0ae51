"""A small GPT learns Python's own manual, byte by byte: warm-up and cosine, a moving average of the
weights (EMA), and an evaluation every so many steps.

    python examples/small_gpt.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next step. Batches are drawn from torch's random
generator, which travels with the run. However often you interrupt it, it ends with the same hash.
"""

import argparse
import hashlib
import math
from pydoc_data.topics import topics  # a text that every Python has

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))), 0.05, self.training)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        blocks = (Block() for _ in range(LAYERS))
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.layers(self.byte(text) + self.place.weight[: text.shape[1]])


def loss_of(model: nn.Module, text: torch.Tensor, batch: int) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT, (batch, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def evaluate(ema: AveragedModel, text: torch.Tensor) -> float:
    torch.manual_seed(1)  # the same pieces every time
    return loss_of(ema.eval(), text, batch=256).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/small-gpt", help="where the run is kept")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for so small a model
    torch.manual_seed(0)
    manual = torch.tensor(list("\n".join(topics.values()).encode()))
    model = GPT()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    wave = math.pi / options.steps
    scheduler = LambdaLR(optimizer, lambda n: min((n + 1) / 50, 0.5 + 0.5 * math.cos(wave * n)))
    state = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Run(options.folder, **state) as run:
        for step in run.steps(options.steps):
            loss = loss_of(model, manual[:-20_000], BATCH)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            run.log(loss=loss)
            if (step + 1) % options.eval_every == 0:
                with run.phase("eval"):  # leaves the random generators as it found them
                    run.log(val_loss=evaluate(ema, manual[-20_000:]))

    weights = nn.utils.parameters_to_vector(ema.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"val_loss {evaluate(ema, manual[-20_000:]):.3f}, averaged weights {digest}")


if __name__ == "__main__":
    main()
