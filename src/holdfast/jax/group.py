"""jax.distributed: our rank."""

from __future__ import annotations

import jax


def rank_and_size() -> tuple[int, int] | None:
    """Those of this process, if jax.distributed.initialize() was called; starts no device."""
    state = _state()
    if getattr(state, "client", None) is None:
        return None
    # Not jax.process_index(): it would initialize the devices before the script does.
    rank, size = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    if rank is None or size is None:
        return jax.process_index(), jax.process_count()
    return int(rank), int(size)


def _state() -> object:
    # Public in versions before 0.6.
    from jax._src import distributed

    return distributed.global_state
