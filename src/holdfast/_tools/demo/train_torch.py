"""The demo's training, with PyTorch: an ordinary script, and a kill -9 in it."""

from __future__ import annotations

import torch

import holdfast
from holdfast._tools.demo import child


def main() -> None:
    arguments = child.parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found, kinds = child.make_spirals()
    points, labels = torch.tensor(found), torch.tensor(kinds)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    shuffler = torch.Generator().manual_seed(1)
    order = torch.zeros(child.POINTS, dtype=torch.int64)
    run = holdfast.Run(
        arguments.folder,
        settings=child.settings(),
        model=model,
        optimizer=optimizer,
        shuffler=shuffler,
        order=order,
    )
    with run:
        child.report(begin=run.step)
        if arguments.sabotage:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-3
        per_epoch = child.POINTS // child.BATCH
        for step in run.steps(arguments.steps):
            if step % per_epoch == 0:
                order.copy_(torch.randperm(child.POINTS, generator=shuffler))
            start = step % per_epoch * child.BATCH
            batch = order[start : start + child.BATCH]
            loss = torch.nn.functional.cross_entropy(model(points[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            if step == arguments.kill_at and run.attempt == 1:
                child.die_at_once()
            optimizer.step()
            run.log(loss=loss)
            child.report(step=step + 1)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    state |= {
        "order": order,
        "shuffler": shuffler.get_state(),
        "dropout's generator": torch.get_rng_state(),
    }
    model.eval()
    accuracy = (model(points).argmax(1) == labels).float().mean().item()
    child.report(
        digests={name: child.digest(value.numpy().tobytes()) for name, value in state.items()},
        accuracy=accuracy,
    )


if __name__ == "__main__":
    main()
