"""A training on a GPU that runs out of its memory, by tensors and graphs that have names.

`cuda_oom.py FOLDER` keeps the graph of every step; with `--cut` it leaves holes between tensors
instead, so that most of what is free is in pieces too small to be of use.
"""

from __future__ import annotations

import sys

import torch

import holdfast

GIB = 1 << 30


def fill(share: float) -> list[torch.Tensor]:
    """Take a share of what is free, in eight tensors."""
    free, _ = torch.cuda.mem_get_info()
    size = int(free * share) // 8
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(8)]


def keep_graphs(run: holdfast.Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    losses = []
    ballast = fill(0.9)
    size = torch.cuda.mem_get_info()[0] // 32
    for _ in run.steps(1000):
        batch = torch.ones(size // (4 * 1024), 1024, device="cuda")
        loss = model(batch).square().mean()
        losses.append(loss)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
    return ballast


def cut_to_pieces(run: holdfast.Run) -> None:
    for _ in run.steps(1000):
        # Two such blocks share a segment of 20 MiB, and one of them stays.
        pieces = [torch.empty(9 << 20, dtype=torch.uint8, device="cuda") for _ in range(800)]
        kept = pieces[::2]
        del pieces
        blocks = fill(0.98)
        blocks.append(torch.empty(3 * GIB, dtype=torch.uint8, device="cuda"))
        print(len(kept))


def main() -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    with holdfast.Run(sys.argv[1], model=model, optimizer=optimizer) as run:
        if "--cut" in sys.argv:
            cut_to_pieces(run)
        else:
            keep_graphs(run, model, optimizer)


if __name__ == "__main__":
    main()
