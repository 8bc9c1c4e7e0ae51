"""Sharded: a small transformer learns to sort, its weights and AdamW's moments split up over all
ranks by FSDP2 (`fully_shard`).

    torchrun --standalone --nproc-per-node=4 examples/fsdp.py
    python examples/fsdp.py

Press Ctrl-C, or kill a rank or torchrun with -9 from another terminal (`holdfast status runs` shows
the pids), and start the same command again. With as many ranks it ends with the same hash of the
weights, however often you interrupt it. It can also be saved on 4 ranks and resumed on 2, or on
any other number: every rank then takes its new parts of the tensors out of the stored ones, and
what is left of the epoch is shared out anew.
"""

import argparse
import hashlib
import os
from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
import holdfast.torch

LENGTH, NUMBERS, WIDTH, HEADS = 12, 16, 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))), 0.05, self.training)


def whole_hash(parts: Iterable[torch.Tensor]) -> str:
    """Of the tensors that these are parts of; all ranks must call it."""
    whole = (part.full_tensor().detach().cpu().numpy().tobytes() for part in parts)
    return hashlib.sha256(b"".join(whole)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/fsdp", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=4800, help="rows of numbers in an epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the other ranks want a core too
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    holdfast.torch.init_process_group()  # nccl or gloo; says what is wrong, and does not hang
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    data = TensorDataset(torch.randint(NUMBERS, (options.size, LENGTH)))
    loader = DataLoader(data, batch_size=max(1, 48 // ranks), sampler=DistributedSampler(data))
    layers = [nn.Embedding(NUMBERS, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, NUMBERS)]
    model = nn.Sequential(*layers).to(device)
    for layer in layers[1:4]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # but each drops out its own

    with holdfast.Run(options.folder, model=model, optimizer=optimizer) as run:
        if run.resumed_from is not None:
            moments = [m for p in model.parameters() for m in optimizer.state[p].values()]
            digests = whole_hash(model.parameters()), whole_hash(m for m in moments if m.dim())
            if rank == 0:
                print("from step {}: weights {}, moments {}".format(run.step, *digests))
        for _ in run.epochs(options.epochs):
            for (numbers,) in run.batches(loader):  # set_epoch is called for you
                numbers = numbers.to(device)
                loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.sort()[0].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

    digest = whole_hash(model.parameters())
    if rank == 0:
        print(f"loss {loss:.3f} on {device}, {ranks} rank(s), weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
