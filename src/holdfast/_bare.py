"""What an adapter is without arrays and generators of its own.

An adapter takes from here what its framework does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATOR = "python"  # a seed for whoever has no global generator is not used


def is_array(_: object) -> bool:
    return False


def encode_other(_: object) -> None:
    return None


def is_generator(_: object) -> bool:
    return False


def is_global(_: object) -> bool:
    return False


def global_state() -> None:
    return None


def set_global_state(_: Any) -> None:
    return None


def seed_global(_: int) -> None:
    return None


def generators(*, devices: bool) -> dict[str, Any]:  # noqa: ARG001  there are none
    return {}


def restore_generators(_: Mapping[str, Any]) -> list[str]:
    return []
