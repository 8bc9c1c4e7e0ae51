"""Lightning's `Trainer.fit` as a run: it stops at a step, and resumes there.

    trainer = lightning.Trainer(max_epochs=3, callbacks=[holdfast.lightning.Callback("runs/a")])
    trainer.fit(module, loader)

It works with both packages of Lightning, `lightning` and `pytorch_lightning`: the one that the
script has imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._errors import missing_framework
from holdfast.lightning.package import find_package

if find_package() is None:
    raise missing_framework("lightning", "Lightning")

if TYPE_CHECKING:
    from holdfast.lightning.callback import Callback as Callback

__all__ = ["Callback"]


def __getattr__(name: str) -> Any:
    # On first use: Lightning takes seconds to import, and the script does that itself.
    if name == "Callback":
        from holdfast.lightning.callback import Callback

        return Callback
    raise AttributeError(f"module 'holdfast.lightning' has no attribute {name!r}")
