"""What `holdfast prove` asks of the processes that it interrupts.

It is passed in the environment, so that it reaches every process of a job.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast._environment import variables


@dataclass(frozen=True)
class ProveConfig:
    """Where to report, and where to put files apart from those of another run."""

    socket: str  # of the listener
    work: str  # the copy of the user's folder
    runs: str  # for run folders that would be outside of it
    end: str  # for the final weights

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def redirected(self, folder: Path) -> Path:
        """The folder to use in place of one that the undisturbed run uses too."""
        whole = Path(folder).absolute()
        # `{dir}` has the same parent as `runs`: it differs in each course too.
        if whole.is_relative_to(self.work) or whole.is_relative_to(Path(self.runs).parent):
            return folder
        mark = hashlib.blake2s(str(whole).encode(), digest_size=4).hexdigest()
        return Path(self.runs) / f"{whole.name}-{mark}"


@functools.cache
def current() -> ProveConfig | None:
    """That of this process, if `holdfast prove` started it."""
    text = variables.text("HOLDFAST_ERRAND")
    return ProveConfig(**json.loads(text)) if text else None
