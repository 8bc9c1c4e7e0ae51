"""What the watch of each framework records: updates, batches, and files saved and loaded."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from holdfast._run.witness.observer import Observer, digest_of
from holdfast._tools.prove.witness.bootstrap import SEEDS, in_handler, record_seeds

_MOST_BATCHES = 4096


def intercept(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, whose first argument is the original."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def intercepted(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, intercepted)


class ScriptRecorder:
    """Records one framework in one process."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.updates = 0
        self.batches: list[dict[str, Any]] = []
        self._amid = "start"

    def install(self, module: Any, seed: str, generator: str) -> None:
        """Record seeds, renames of files and the end of the script."""
        record_seeds(module, seed, generator)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            record_seeds(numpy.random, "seed", "numpy")
        sys.addaudithook(self._record_renames)
        atexit.register(self.end)

    def end(self) -> None:
        raise NotImplementedError

    def ask_update(self, batches: list[dict[str, Any]], state: dict[str, Any]) -> None:
        self._amid = "update"
        self._observer.ask(
            "sight",
            number=self.updates,
            boundary_id=self._observer.boundary_id,
            batches=batches,
            seeds=SEEDS if self.updates == 0 else {},
            **state,
        )

    def count_update(self) -> None:
        self.updates += 1
        self._amid = "after the update"

    def record_batch(
        self, loader: int, index: int, indices: Any, batch: Any, workers: int = 0
    ) -> None:
        """A batch was taken, for the next update or for nothing."""
        self._amid = "step"
        if index == 0:  # the rest of an earlier pass was for no update
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

    def record_save(
        self, path: str | None, save: Callable[[], Any], tear: Callable[[], Any]
    ) -> Any:
        """Save; where the prover wants to kill during a save, `tear`: write half and wait."""
        if not self._observer.is_open or path is None:
            return save()
        self._observer.ask(
            "save",
            path=path,
            updates=self.updates,
            in_handler=in_handler(sys._getframe(1)),
            amid=self._amid,
        )
        result = tear() if self._observer.is_armed("tear") else save()
        self._observer.send("saved", path=path)
        return result

    def record_load(self, path: str | None, load: Callable[[], Any]) -> Any:
        """Load, and send whether that worked."""
        if not self._observer.is_open or path is None:
            return load()
        self._observer.ask("load", path=path)
        try:
            found = load()
        except Exception as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
            self._observer.send("load-failed", path=path, error=text.splitlines()[0][:200])
            raise
        self._observer.send("loaded", path=path)
        return found

    def _record_renames(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event != "os.rename" or not self._observer.is_open:
            return
        source, target = (path_of(argument) for argument in arguments[:2])
        if source and target:
            self._observer.send("rename", source=source, target=target)


def path_of(target: Any) -> str | None:
    """The absolute path of a file that is given by its name, or is open."""
    if not isinstance(target, str | os.PathLike):
        target = getattr(target, "name", None)
    return os.path.realpath(target) if isinstance(target, str | os.PathLike) else None
