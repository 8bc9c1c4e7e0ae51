"""Rules that stop a run: `Run(…, stop_when=Plateau("val_loss", patience=5) | NotFinite())`.

They observe what `run.log` was given, at the next boundary, and keep their state across all
attempts of a run. A rule with the outcome "success" completes the training. A rule with the outcome
"failure" makes all states from the bad step on invalid, and the run exits with status 65.
"""

from __future__ import annotations

from holdfast.rules._rules import (
    At,
    Budget,
    Diverged,
    NotFinite,
    Plateau,
    Rule,
    Seen,
    Threshold,
    When,
)

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
