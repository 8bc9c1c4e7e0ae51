"""Sharded: FSDP2 (`fully_shard`) splits a small transformer and AdamW's moments over all ranks.

    torchrun --standalone --nproc-per-node=4 examples/fsdp.py
    python examples/fsdp.py

Press Ctrl-C, or kill a rank or torchrun with -9 from another terminal, and start the same command
again: it ends with the same hash of the weights. It can also be saved on 4 ranks and resumed on 2,
or on any other number: every rank takes its new parts of the tensors out of the stored ones.
"""

import argparse
import hashlib
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast.torch

LENGTH, NUMBERS, WIDTH = 12, 16, 48


def make_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, each marked with its place, and the same rows in order."""
    numbers = torch.randint(NUMBERS, (size, LENGTH))
    return numbers + NUMBERS * torch.arange(LENGTH), numbers.sort().values


def whole_hash(tensors: list[torch.Tensor]) -> str:
    """Of what all ranks have of these tensors together; all must call it."""
    whole = (each.full_tensor().cpu().numpy().tobytes() for each in tensors if each.dim())
    return hashlib.sha256(b"".join(whole)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/fsdp", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=2880, help="rows of numbers in an epoch")
    options = parser.parse_args()

    # A GPU gives the same bits twice only if it is asked to; cuBLAS reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the other ranks want a core too
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    holdfast.torch.init_process_group()  # nccl or gloo; says what is wrong, and does not hang
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    data = TensorDataset(*make_data(options.size))
    rows, in_order = (part.to(device) for part in make_data(240))
    loader = DataLoader(data, batch_size=max(1, 48 // ranks), sampler=DistributedSampler(data))
    model = nn.Sequential(
        nn.Embedding(NUMBERS * LENGTH, WIDTH),
        *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.05, batch_first=True) for _ in "ab"),
        *(nn.Linear(WIDTH, NUMBERS), nn.Flatten(0, 1), nn.LogSoftmax(dim=-1)),
    ).to(device)
    for part in (model[1], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(rank)  # but each drops out its own

    @torch.no_grad()
    def evaluate() -> float:
        right = model.eval()(rows).argmax(-1) == in_order.flatten()
        model.train()
        return right.float().mean().item()

    with holdfast.Run(options.folder, model=model, optimizer=optimizer) as run:
        if run.resumed_from is not None:
            moments = [m for p in model.parameters() for m in optimizer.state[p].values()]
            digest = whole_hash([*model.state_dict().values(), *moments])
            if rank == 0:
                print(f"going on with {ranks} rank(s), weights and moments {digest}")
        for _ in run.epochs(options.epochs):
            for inputs, targets in run.batches(loader):  # set_epoch is called for you
                loss = F.nll_loss(model(inputs.to(device)), targets.to(device).flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            with run.phase("eval"):
                run.log(sorted=evaluate())

    share, digest = evaluate(), whole_hash([*model.state_dict().values()])
    if rank == 0:
        print(f"{share:.1%} sorted on {device}, {ranks} rank(s), weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
