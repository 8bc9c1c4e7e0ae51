"""The states that are saved and loaded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

LARGE, SMALL = 512, 64  # the width of a transformer, and of one of less than 50 MB


@dataclass
class State:
    """A model and, where there is one, its optimizer."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    trained: int | None = None  # tensors of the model that change; None: all

    def objects(self) -> dict[str, Any]:
        """By the names under which they are given to a run."""
        found: dict[str, Any] = {"model": self.model}
        return found if self.optimizer is None else {**found, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.objects().items()}

    def load(self, stored: dict[str, Any]) -> None:
        for name, each in self.objects().items():
            each.load_state_dict(stored[name])

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.state_dict().values()
        if self.optimizer is not None:
            for kept in self.optimizer.state.values():
                yield from (value for value in kept.values() if isinstance(value, torch.Tensor))

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def change(self) -> None:
        """Change every number, as a step does: what has not changed may not be written again."""
        tensors = list(self.tensors())
        with torch.no_grad():
            torch._foreach_add_(tensors if self.trained is None else tensors[-self.trained :], 1e-3)

    def share(self) -> None:
        """Move all tensors into memory that processes which are forked from here share.

        They would have a copy each else, as soon as they change it.
        """
        assert self.optimizer is not None
        memory = mmap.mmap(-1, sum(_padded(tensor) for tensor in self.tensors()))
        at = 0

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal at
            # Each with a storage of its own, as tensors have by default.
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            at += _padded(tensor)
            return target.view(tensor.shape).copy_(tensor.detach())

        for parameter in self.model.parameters():
            parameter.data = moved(parameter)
        for kept in self.optimizer.state.values():
            for name, tensor in kept.items():
                kept[name] = moved(tensor)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def transformer(megabytes: int, *, moments: bool = True) -> State:
    """A transformer whose fp32 parameters and AdamW moments are about `megabytes` together.

    Without moments it is what a script has before it resumes.
    """
    width = LARGE if megabytes >= 50 else SMALL
    # A layer has about 12 width² parameters, each of 4 bytes and with two moments.
    layers = max(1, round(megabytes * 1e6 / (12 * width * width * 12)))
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(
                torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
                for _ in range(layers)
            )
        )
    model = model.to_empty(device="cpu").requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.04, 0.04, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    if moments:
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.full_like(parameter, 1e-4).detach(),
                "exp_avg_sq": torch.full_like(parameter, 1e-4).detach(),
            }
    return State(model, optimizer)


class Many(torch.nn.Module):
    """So many parameters of one size."""

    def __init__(self, count: int, numbers: int) -> None:
        super().__init__()
        for each in range(count):
            tensor = torch.full((numbers,), float(each % 97))
            self.register_parameter(f"p{each}", torch.nn.Parameter(tensor))


def many(count: int, megabytes: int) -> State:
    return State(Many(count, int(megabytes * 1e6 / 4 / count)), None)


class Adapted(torch.nn.Module):
    """A frozen base of 100 tensors with a small trained part, as under LoRA."""

    def __init__(self, frozen_megabytes: int, trained_megabytes: int, trained: int) -> None:
        super().__init__()
        self.frozen = Many(100, int(frozen_megabytes * 1e6 / 400)).requires_grad_(False)
        self.trained = Many(trained, int(trained_megabytes * 1e6 / 4 / trained))


def adapted(frozen_megabytes: int, trained_megabytes: int) -> State:
    trained = 20
    return State(Adapted(frozen_megabytes, trained_megabytes, trained), None, trained)
