"""`Trainer.train` of Transformers as a run: it stops at a step, and goes on there.

trainer = Trainer(model, args, …, callbacks=[holdfast.transformers.Callback("runs/a")])
trainer.train()
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast._errors import missing_framework

if find_spec("transformers") is None or find_spec("accelerate") is None:
    raise missing_framework("transformers", "Transformers with Accelerate")

if TYPE_CHECKING:
    from holdfast.transformers.callback import Callback as Callback

__all__ = ["Callback"]


def __getattr__(name: str) -> Any:
    # On first use: its Trainer takes seconds to import, and the script does that itself.
    if name == "Callback":
        from holdfast.transformers.callback import Callback

        return Callback
    raise AttributeError(f"module 'holdfast.transformers' has no attribute {name!r}")
