"""torch's process group: our rank, and its key-value store."""

from __future__ import annotations

from typing import Any

import torch.distributed


def rank_and_size() -> tuple[int, int] | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class GroupStore:
    """The group's store, by a connection of its own: waiting on the shared one blocks all."""

    def __init__(self) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        self._store: Any = store.clone() if hasattr(store, "clone") else store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def has(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def get(self, keys: list[str]) -> list[bytes]:
        return [bytes(self._store.get(key)) for key in keys]
