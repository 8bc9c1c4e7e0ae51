"""The progress line: where the run stands and what is safe. It must never break or slow a run."""

from __future__ import annotations

from holdfast._run.progress.line import Progress
from holdfast._run.progress.words import Standing

__all__ = ["Progress", "Standing"]
