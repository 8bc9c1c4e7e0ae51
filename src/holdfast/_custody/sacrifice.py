"""When memory runs out, the kernel is to end the trainer and not its keeper.

A trainer can be started again from what its keeper saves; without the keeper, what was in memory
is lost. Anybody may raise the score by which the kernel chooses, so the trainer's own is raised;
nobody's is lowered.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_SCORE = Path("/proc/self/oom_score_adj")
_MORE = 100  # thousandths of all memory: the trainer is chosen as if it used that much more
_MOST = 1000


class Sacrifice:
    """The trainer's score, while it has a keeper."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._raised = 0

    def offer(self) -> None:
        """Raise the score of this process, and of those that it starts from now on."""
        if self._before is None:
            with contextlib.suppress(OSError, ValueError):
                before = int(_SCORE.read_text())
                self._raised = min(before + _MORE, _MOST)
                _SCORE.write_text(str(self._raised))
                self._before = before

    def take_back(self) -> None:
        """As it was, unless somebody else has set it since."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                if int(_SCORE.read_text()) == self._raised:
                    _SCORE.write_text(str(before))
