"""Loaders prepared by Accelerate: a wrapper around a DataLoader.

The wrapper sets the epoch, synchronizes the ranks' generators, puts batches on their device, and
tells the accelerator which batch is the last one, at which gradients must be summed. It does all of
that in its own `__iter__`, which reads one batch ahead. Here are the same steps one by one.
"""

from __future__ import annotations

import sys
from typing import Any

_WRAPPERS = ("DataLoaderShard", "DataLoaderDispatcher")


def is_prepared(source: object) -> bool:
    """Whether `accelerator.prepare` has made it; does not import Accelerate."""
    module = sys.modules.get("accelerate.data_loader")
    kinds = tuple(getattr(module, name) for name in _WRAPPERS if hasattr(module, name))
    return any(kind in kinds for kind in type(source).__mro__)


def lacks_state(source: Any) -> bool:
    """Whether the loader inside has no state_dict; the wrapper always has one."""
    return is_prepared(source) and not hasattr(source.base_dataloader, "state_dict")


def has_shares(source: Any) -> bool:
    """Whether each rank reads its own share, instead of waiting for rank 0 to send it."""
    return type(source).__name__ == "DataLoaderShard" and not source.skip_batches


def set_epoch(source: Any, epoch: int) -> None:
    source.set_epoch(epoch)
    # That does not reach a batch sampler inside the sampler that divides batches among ranks.
    inner = getattr(getattr(source, "batch_sampler", None), "batch_sampler", None)
    tell = getattr(inner, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def share_generator(source: Any) -> None:
    """Give the sampler's generator the state of rank 0's, before that is captured."""
    _synchronize(source, [each for each in source.rng_types or () if each == "generator"])


def share_globals(source: Any) -> None:
    """Synchronize what `Accelerator(rng_types=…)` asks for, at the beginning of each pass."""
    _synchronize(source, [each for each in source.rng_types or () if each != "generator"])


def _synchronize(source: Any, kinds: list[str]) -> None:
    if kinds:
        from accelerate.utils import synchronize_rng_states

        synchronize_rng_states(kinds, source.synchronized_generator)


def put_in_place(source: Any, batch: Any) -> Any:
    if source.device is None:
        return batch
    from accelerate.utils import send_to_device

    # Private to Accelerate; a blocking copy is correct as well.
    soon = getattr(source, "_non_blocking", False)
    return send_to_device(batch, source.device, non_blocking=soon)


def accumulated(source: Any) -> int:
    """How many batches make one step."""
    return int(source.gradient_state.num_steps)


def restarts_with_epochs(source: Any) -> bool:
    """Whether the accelerator steps with the last batch of an epoch and counts from 0 again."""
    return bool(source.gradient_state.sync_with_dataloader)
