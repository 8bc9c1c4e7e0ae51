"""Store a state by a real run and take it back by another, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.torch.adapter import ADAPTER as adapter


def store(folder: Path, *, steps: int = 1, **state: Any) -> None:
    """A run that ends with this state in its last checkpoint."""
    with holdfast.Run(folder, **state) as run:
        for _ in run.steps(run.step + steps):
            pass


def restore(folder: Path, **state: Any) -> dict[str, Any]:
    """A second run of fresh objects; what it holds once it is open."""
    with holdfast.Run(folder, **state) as run:
        assert run.resumed_from is not None
        return dict(run.state)


def round_trip(folder: Path, saved: Any, fresh: Any) -> Any:
    store(folder, value=saved)
    return restore(folder, value=fresh)["value"]


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order: equal only if NaNs and signed zeros are too."""
    return bytes(adapter.bytes_of(tensor))


def assert_same(now: torch.Tensor, then: torch.Tensor) -> None:
    assert now.dtype == then.dtype
    assert now.shape == then.shape
    assert bits(now) == bits(then)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def data_file(folder: Path) -> Path:
    """The data of the newest checkpoint."""
    return sorted(folder.glob("checkpoints/step-*/rank-00000.safetensors"))[-1]
