"""Objects that have a `state_dict`, and yet no state that could be stored."""

from __future__ import annotations

import sys

from holdfast.torch import prepared


def refuse(value: object) -> str | None:
    """What to say of an object whose state cannot be had; None if it can."""
    if prepared.lacks_state(value):
        return (
            "a DataLoader that Accelerate has prepared cannot be stored.\n"
            "Take it out of the state, and go through it with `for batch in run.batches(loader)`, "
            "which keeps its position."
        )
    if "torch.distributed.fsdp" not in sys.modules and "torch.distributed.optim" not in sys.modules:
        return None
    from holdfast.torch import ddp

    return ddp.refuse(value)
