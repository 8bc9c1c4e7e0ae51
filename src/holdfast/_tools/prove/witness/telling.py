"""What every watch tells, whatever it watches: batches, and files that are saved and loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from holdfast._run.witness.eye import Eye
from holdfast._run.witness.leaves import digest_of
from holdfast._tools.prove.witness.handlers import in_handler

_MOST_BATCHES = 4096


class Teller:
    """Of one framework in one process."""

    def __init__(self, eye: Eye) -> None:
        self._eye = eye
        self.updates = 0
        self.batches: list[dict[str, Any]] = []
        self._amid = "start"

    def note_batch(
        self, loader: int, index: int, indices: Any, batch: Any, workers: int = 0
    ) -> None:
        """A batch was taken, for the next update or for nothing."""
        self._amid = "step"
        if index == 0:  # what is left of an earlier pass is for no update any more
            self.batches = [known for known in self.batches if known["loader"] != loader]
        self.batches.append(
            {
                "loader": loader,
                "at": index,
                "indices": None if indices is None else digest_of(indices),
                "bytes": digest_of(batch),
                "workers": workers,
            }
        )
        del self.batches[:-_MOST_BATCHES]

    def take_batches(self) -> list[dict[str, Any]]:
        """Those for this update: of the loader that gave the last one, not of an evaluation."""
        found, self.batches = self.batches, []
        last = found[-1]["loader"] if found else None
        return [{k: v for k, v in b.items() if k != "loader"} for b in found if b["loader"] == last]

    def tell_save(self, path: str | None, save: Callable[[], Any], tear: Callable[[], Any]) -> Any:
        """Save; or, if somebody wants to kill amid a save, tear: write half and wait."""
        if not self._eye.is_open or path is None:
            return save()
        self._eye.ask(
            "save",
            path=path,
            updates=self.updates,
            in_handler=in_handler(sys._getframe(1)),
            amid=self._amid,
        )
        result = tear() if self._eye.is_armed("tear") else save()
        self._eye.tell("saved", path=path)
        return result

    def tell_load(self, path: str | None, load: Callable[[], Any]) -> Any:
        """Load, and tell whether that worked."""
        if not self._eye.is_open or path is None:
            return load()
        self._eye.ask("load", path=path)
        try:
            found = load()
        except Exception as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
            self._eye.tell("load-failed", path=path, error=text.splitlines()[0][:200])
            raise
        self._eye.tell("loaded", path=path)
        return found

    def hear_renames(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event != "os.rename" or not self._eye.is_open:
            return
        source, target = (path_of(argument) for argument in arguments[:2])
        if source and target:
            self._eye.tell("rename", source=source, target=target)


def path_of(target: Any) -> str | None:
    """The whole path of a file that is given by its name, or is open."""
    if not isinstance(target, str | os.PathLike):
        target = getattr(target, "name", None)
    return os.path.realpath(target) if isinstance(target, str | os.PathLike) else None
