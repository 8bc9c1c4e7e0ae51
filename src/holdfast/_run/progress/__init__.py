"""The progress line: where the run stands and what is safe, for whoever watches.

It costs the training nothing: a thread looks now and then, and what it shows is never in the way
of what others write. Nothing in here may break a run.
"""

from __future__ import annotations

from holdfast._run.progress.line import Progress
from holdfast._run.progress.words import Standing

__all__ = ["Progress", "Standing"]
