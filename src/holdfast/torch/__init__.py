"""PyTorch: `init_process_group()` for scripts; `adapter.py` is what a run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._errors import missing_framework

try:
    import torch as torch
except ImportError as error:
    raise missing_framework("torch", "PyTorch") from error

if TYPE_CHECKING:
    from holdfast.torch.launch import init_process_group as init_process_group


def __getattr__(name: str) -> Any:
    # On first use: a run of one process needs nothing of it.
    if name != "init_process_group":
        raise AttributeError(f"module 'holdfast.torch' has no attribute {name!r}")
    from holdfast.torch import launch

    return launch.init_process_group
