"""Which cloud this machine belongs to, decided without a word on the network.

The firmware tells: a cloud writes its name into the tables that the kernel shows below
/sys/class/dmi/id. A laptop or a cluster's node has other names there, and nobody is ever asked.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

CLOUDS = ("aws", "gcp", "azure")
_DMI = Path("/sys/class/dmi/id")
_XEN = Path("/sys/hypervisor/uuid")
# Every virtual machine of Azure has it; the vendor alone would be any Hyper-V.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def find_cloud(dmi: Path = _DMI, xen: Path = _XEN) -> str | None:
    """The cloud, or None if this is none that we know.

    >>> find_cloud(Path("/nowhere"), Path("/nowhere"))
    """
    vendor, bios = _read(dmi / "sys_vendor"), _read(dmi / "bios_vendor")
    if "amazon ec2" in (vendor, bios) or "amazon" in _read(dmi / "bios_version"):
        return "aws"
    if _read(xen).startswith("ec2"):
        return "aws"
    if _read(dmi / "product_name") == "google compute engine":
        return "gcp"
    if _read(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    return None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    return ""
