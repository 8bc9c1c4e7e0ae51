"""Which cloud this machine is in, and what a cloud can announce: one form for all of them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from holdfast._environment.cloud.metadata import Metadata

CLOUDS = ("aws", "gcp", "azure")
_DMI = Path("/sys/class/dmi/id")
_XEN = Path("/sys/hypervisor/uuid")
# Every virtual machine of Azure has it. The vendor alone would match any Hyper-V.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_MOST_LETTERS = 40


def find_cloud(dmi: Path = _DMI, xen: Path = _XEN) -> str | None:
    """The cloud by the firmware's tables; None elsewhere. Nothing is sent on the network."""

    def read(path: Path) -> str:
        with contextlib.suppress(OSError):
            return path.read_text(encoding="ascii", errors="replace").strip().lower()
        return ""

    is_amazon = "amazon ec2" in (read(dmi / "sys_vendor"), read(dmi / "bios_vendor"))
    if is_amazon or "amazon" in read(dmi / "bios_version") or read(xen).startswith("ec2"):
        return "aws"
    if read(dmi / "product_name") == "google compute engine":
        return "gcp"
    return "azure" if read(dmi / "chassis_asset_tag") == _AZURE_TAG else None


@dataclass(frozen=True)
class Notice:
    key: str  # the same at every poll, although the remaining time changes
    what: str  # "interruption", "preemption", "maintenance", "reboot", …
    reason: str  # for the user's log
    stops: bool  # False: the machine goes on, and a checkpoint is enough
    ends_at: float | None = None  # on the clock of time.monotonic(); None: not known


class NoticeSource(ABC):
    """One cloud. For another one, edit also `CLOUDS`, `find_cloud`, `_settings.NOTICES` and
    `open_watch` in `_keeper/cloud_notices.py`, add a service to `tests/clouds.py`, cases to
    `test_notices.py` and `test_settings.py`, and describe it in docs/spot.md and docs/reference.md.
    """

    cloud: str  # as users read it
    interval_seconds: float  # between two polls

    def __init__(self, metadata: Metadata, host: str) -> None:
        self._metadata = metadata
        self._host = host
        self._seen: dict[str, float] = {}  # the first known end of what was announced

    @abstractmethod
    def look(self) -> list[Notice]:
        """All current notices; raises NoAnswer, or Closed if asking again is pointless.

        Words from the service pass `is_word` first.
        """


def is_word(value: object) -> TypeGuard[str]:
    """True if a value from outside may be printed on a terminal.

    >>> is_word("terminate"), is_word("a\\nb"), is_word(7)
    (True, False, False)
    """
    return isinstance(value, str) and 0 < len(value) <= _MOST_LETTERS and value.isprintable()


class NoAnswer(Exception):
    """No answer in time, or one that the service's documents do not describe."""


class Closed(NoAnswer):
    """The service refuses: another question is useless."""
