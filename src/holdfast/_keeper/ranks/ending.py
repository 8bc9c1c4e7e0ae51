"""Why a run of several ranks ends: of all that is heard, the cause and not its victims."""

from __future__ import annotations

from dataclasses import dataclass, field

# Who is to blame, the surest first. A rank whose peer is gone fails too, within a second.
_ORDER = ("asked", "hung", "died", "failed", "left", "victim")


@dataclass
class Cause:
    """How one rank ended."""

    rank: int
    how: str
    kind: str
    host: str = ""
    status: int = 0

    def sentence(self) -> str:
        """In words, for the person who reads the other ranks' last line."""
        if self.kind in ("asked", "hung"):
            return self.how
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} {self.how}"


@dataclass
class Ending:
    """The end of a run that not everybody survived."""

    causes: list[Cause]
    began: float
    settles_at: float | None = None  # until then a better cause may be heard of
    has_saved: bool = False
    is_told: bool = False
    names: list[str] = field(default_factory=list)


def worst(causes: list[Cause]) -> Cause:
    """The one to name: of one kind, the first that was heard of."""
    return min(causes, key=lambda cause: _ORDER.index(cause.kind))


_SIGNS_OF_A_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "socket",
    "tcpstore",
    "store",
    "timed out",
    "connection refused",
    "process group",
    "distbackenderror",
)


def looks_like_a_lost_peer(error: str) -> bool:
    """Whether an error is what ranks get when another one is gone."""
    text = error.lower()
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
