"""In which ways people train on a GPU."""

from __future__ import annotations

WAYS = (
    "plain",
    "amp",
    "fused",
    "foreach",
    "capturable",
    "accumulate",
    "graphs",
    "compile",
    "streams",
    "no-room",
    "no-room-swapped",
    "unregistered",
    "pieces",
    "no-room-pieces",
)
