"""The scale of mixed precision, read without waiting for the device.

GradScaler.state_dict() asks the device for two numbers, and so waits for all that is queued
there. As tensors they travel like the rest of the state.
"""

from __future__ import annotations

from typing import Any

import torch


def knows_better(value: object) -> bool:
    """Whether an object's own state_dict is not what is stored."""
    if not isinstance(value, torch.amp.GradScaler):
        return False
    return value.is_enabled() and str(value._device).startswith("cuda")


is_object = knows_better


def object_state(value: Any) -> dict[str, Any]:
    scale, tracker = value._scale, value._growth_tracker
    return {
        "scale": torch.tensor(value._init_scale, dtype=torch.float32) if scale is None else scale,
        "growth_factor": value._growth_factor,
        "backoff_factor": value._backoff_factor,
        "growth_interval": value._growth_interval,
        "_growth_tracker": (
            torch.tensor(value._init_growth_tracker, dtype=torch.int32)
            if tracker is None
            else tracker
        ),
    }


def load_object(value: Any, state: dict[str, Any]) -> None:
    value.load_state_dict(
        {
            **state,
            "scale": float(state["scale"]),
            "_growth_tracker": int(state["_growth_tracker"]),
        }
    )
    if value._scale is None:  # now, and not at the first step: the layout stays as it was stored
        value._lazy_init_scale_growth_tracker(torch.device(value._device))
