"""Trains on a GPU in one of many ways, deterministically, and prints the hash of its end.

python train_on_gpu.py FOLDER WAY STEPS [SECONDS_PER_STEP]
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import holdfast
from holdfast._run.driver import session_of

WIDTH = 512
WIDE = 3072  # so that a copy takes longer than it takes to begin it


class Net(torch.nn.Module):
    """With running means, which a forward pass changes, and dropout, which draws."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *[
                torch.nn.Sequential(
                    torch.nn.Linear(width, width),
                    torch.nn.BatchNorm1d(width),
                    torch.nn.GELU(),
                    torch.nn.Dropout(0.1),
                )
                for _ in range(8)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make_optimizer(way: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    options = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "capturable": {"capturable": True},
        "graphs": {"capturable": True},
    }.get(way, {})
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def without_room() -> None:
    """As if the device had nothing left for a spare buffer."""
    from holdfast.torch import device

    device._ROOM_SHARE = 1  # all of its memory is to stay free


def unregistered() -> None:
    """As where the driver refuses to register shared memory."""
    from holdfast.torch import device

    device.Devices.register = lambda *_: None


def in_pieces() -> None:
    """As with a large state: two slots, built in the background, of many registered pieces."""
    from holdfast._run.saving import arena_builder
    from holdfast._store.memory import pages
    from holdfast.torch import device

    arena_builder._SMALL_BYTES = 0
    pages.PIECE_BYTES = device.PIECE_BYTES = 1 << 20


def show_hash(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = hashlib.sha256()
    moments = [
        item
        for held in optimizer.state_dict()["state"].values()
        for item in held.values()
        if isinstance(item, torch.Tensor)
    ]
    for tensor in (*model.state_dict().values(), *moments):
        found.update(tensor.detach().cpu().numpy().tobytes())
    print(f"state {found.hexdigest()}", flush=True)


def main() -> None:
    folder, way, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pause = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    if way.startswith("no-room"):
        without_room()
    if way.endswith("pieces"):
        in_pieces()
    if way == "unregistered":
        unregistered()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    width = WIDE if way.startswith("no-room") else WIDTH
    model = Net(width).cuda()
    optimizer = make_optimizer(way, model)
    scaler = torch.amp.GradScaler("cuda", enabled=way == "amp")
    ema = [p.detach().clone() for p in model.parameters()]
    step_of = {
        "amp": lambda x: amp_step(model, optimizer, scaler, x),
        "accumulate": lambda x: accumulated_step(model, optimizer, x),
    }.get(way, lambda x: plain_step(model, optimizer, x))
    if way == "compile":
        compiled = torch.compile(model)
        step_of = functools.partial(plain_step, compiled, optimizer)
    if way == "graphs":
        step_of = Graph(model, optimizer)
    side = torch.cuda.Stream()
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "ema": ema}
    with holdfast.Run(folder, settings=settings, **state) as run:
        print(f"started at {run.step}", flush=True)
        if isinstance(step_of, Graph):
            step_of.capture()
        for step in run.steps(steps):
            x = torch.randn(64, width, device="cuda")
            if way == "streams":
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    loss = plain_step(model, optimizer, x)
                    torch.cuda._sleep(2_000_000)  # it is behind when the boundary comes
                    torch._foreach_lerp_(ema, list(model.parameters()), 0.1)
                x.record_stream(side)
            else:
                if way == "no-room-swapped":
                    swap_and_back(model, ema)
                loss = step_of(x)
                torch._foreach_lerp_(ema, list(model.parameters()), 0.1)
            if step % 10 == 0:
                newest = session_of(run).saver.newest
                held = "-" if newest is None else newest.step
                print(f"step {step} loss {float(loss):.4f} held {held}", flush=True)
            time.sleep(pause)
        if way == "streams":
            torch.cuda.current_stream().wait_stream(side)
    show_hash(model, optimizer)


@torch.no_grad()
def swap_and_back(model: torch.nn.Module, ema: list[torch.Tensor]) -> None:
    """As an evaluation with averaged weights does, by the one way that torch does not notice."""
    stored = [p.detach().clone() for p in model.parameters()]
    for parameter, average in zip(model.parameters(), ema, strict=True):
        parameter.data.copy_(average)
    torch.cuda._sleep(20_000_000)
    for parameter, before in zip(model.parameters(), stored, strict=True):
        parameter.data.copy_(before)


def plain_step(model, optimizer, x) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def amp_step(model, optimizer, scaler, x) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = (model(x) - x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def accumulated_step(model, optimizer, x) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.zeros((), device="cuda")
    for part in x.chunk(4):
        piece = (model(part) - part).square().mean() / 4
        piece.backward()
        loss += piece.detach()
    optimizer.step()
    return loss


class Graph:
    """A whole step as one CUDA graph, optimizer included."""

    def __init__(self, model, optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._x = torch.zeros(64, WIDTH, device="cuda")
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> None:
        """After the state is there: what warms up must leave no trace."""
        import copy

        kept = copy.deepcopy((self._model.state_dict(), self._optimizer.state_dict()))
        generator = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._optimizer.zero_grad(set_to_none=True)
                (self._model(self._x) - self._x).square().mean().backward()
                self._optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self._graph):
            self._loss = (self._model(self._x) - self._x).square().mean()
            self._loss.backward()
            self._optimizer.step()
        with torch.no_grad():
            self._put_back(*kept)
        torch.cuda.set_rng_state(generator)

    def _put_back(self, model: dict, optimizer: dict) -> None:
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(model[name])
        now = self._optimizer.state_dict()["state"]
        for index, held in now.items():
            for key, tensor in held.items():
                before = optimizer["state"].get(index, {}).get(key)
                tensor.zero_() if before is None else tensor.copy_(before)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._loss.detach()


if __name__ == "__main__":
    main()
