"""Rules that stop a run: `Run(…, stop_when=Plateau("val_loss", patience=5) | NotFinite())`.

They see what `run.log` was given, at the boundary that follows, and keep what they know across all
lives of a run. A rule whose outcome is "success" ends the training well; one whose outcome is
"failure" makes everything from the bad step on void, and the run leaves with status 65.
"""

from __future__ import annotations

from holdfast.rules._base import Rule
from holdfast.rules._clocks import At, Budget
from holdfast.rules._metrics import Diverged, NotFinite, Plateau, Threshold
from holdfast.rules._when import Seen, When

__all__ = [
    "At",
    "Budget",
    "Diverged",
    "NotFinite",
    "Plateau",
    "Rule",
    "Seen",
    "Threshold",
    "When",
]
