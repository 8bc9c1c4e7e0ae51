"""A checkpoint straight from the live tensors, without arena or keeper.

For machines without memory for slots, and for systems where there is no keeper.
Training stands still while it is written.
"""

from __future__ import annotations

from typing import Any

from holdfast._keeper.former import newest_former
from holdfast._keeper.keep import Policy, State, keep_checkpoint, remove_old
from holdfast._keeper.pieces import Labour
from holdfast._keeper.source import Ranges, Source
from holdfast._record.image import encode_scalars, plan_image
from holdfast._save.capture import Captured, adapter_of


def write_direct(
    policy: Policy, captured: Captured, head: dict[str, Any], step: int, reason: str
) -> None:
    """Make a captured state durable; returns when it is."""
    scalars = encode_scalars({**head, "step": step, "tree": captured.tree})
    plan = plan_image(captured.specs, len(scalars))
    by_name = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
    views = [memoryview(plan.header)]
    views += [adapter_of(s.kind).bytes_of(by_name[s.name]) for s, _ in plan.in_file_order()]
    views.append(memoryview(scalars.ljust(plan.scalars.size_bytes)))
    state = State(policy.attempt, step, reason, head["metrics"], bool(head.get("at_turn")))
    former = newest_former(policy.layout, policy.line, policy.rank)
    source = Source(views, Ranges.of(plan.extents()))
    keep_checkpoint(policy, state, source, Labour(is_background=False), former)
    remove_old(policy)
