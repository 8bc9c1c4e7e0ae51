"""What trainer and keeper exchange when a keeper is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Nothing is received for so long, on a connection or by mail: the host is gone. A network that
# recovers needs half of it, and mail may arrive late; torch's collectives wait for ten minutes.
UNREACHABLE_SECONDS = 60.0


@dataclass(frozen=True)
class RankConfig:
    """What the keeper of one rank must know of the others."""

    hub: list[tuple[str, int]]  # addresses; of the hub itself none
    is_one_host: bool
    launcher: dict[str, Any] | None  # the process that started the ranks
    launcher_name: str
    restarts: bool  # True if the launcher would start them again
    unreachable_seconds: float = UNREACHABLE_SECONDS  # after which a silent rank counts as lost
