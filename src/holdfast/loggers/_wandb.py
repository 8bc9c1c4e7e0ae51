"""Rows to Weights & Biases: all lives of a run are one run there.

Their step only ever grows. A life that resumes logs steps that are there already, to the same
values; these are left out, unless the run there can be rewound. Where the servers cannot be reached
everything is kept in files, which `wandb sync` uploads.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast.loggers._child import KILLED, encodable, first_line, tell
from holdfast.loggers._memory import Memory, Row

_STOPPED = (*_errors.ASKED, _errors.HUNG)  # it will go on
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class WandBRun:
    """One run there, opened for one life."""

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        options = plan["options"]
        self._init: dict[str, Any] = dict(options["init"])
        self._is_first = not memory.id
        memory.id = str(self._init.pop("id", None) or memory.id or _new_id())
        self._step = plan["mark"] // 2
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        self.rewinds = bool(options["rewind"]) and not self._is_first and self._step > 0
        if self.rewinds:
            self.rewinds = self._is_rewound()

    def _is_rewound(self) -> bool:
        where = f"{self._memory.id}?_step={self._step - 1}"
        try:
            self._run = self._begin(resume_from=where)
        except Exception as error:  # noqa: BLE001  of theirs; then it goes on as without
            tell(
                self._plan,
                f"could not be rewound ({first_line(error)}). Steps that were logged before are "
                "not logged again.",
            )
            return False
        return True

    def name(self, given: str) -> str:
        return encodable(given)

    def open(self, replayed: list[Row]) -> None:
        if self._run is None:
            try:
                self._run = self._begin(id=self._memory.id, resume="allow")
            except Exception as error:  # no key, no network: what is logged is kept
                if self._init.get("mode") == "offline":
                    raise
                self._init["mode"] = "offline"
                self._run = self._begin(id=self._memory.id, resume="allow")
                tell(
                    self._plan,
                    f"cannot be reached ({first_line(error)}). It is logged to files; to upload "
                    f"them: wandb sync {Path(self._run.dir).parent}",
                )
        self.write(replayed)

    def _begin(self, **how: Any) -> Any:
        given = {"dir": self._plan["loggers"], "name": Path(self._plan["folder"]).name}
        init = {**given, **self._init, **how}
        settings: Any = self._wandb.Settings(
            **{
                # What it measures and shows is of the training, and not of this process.
                "console": "off",
                "x_stats_pid": self._plan["parent"],
                "program": self._plan["script"] or None,
                **(init.pop("settings", None) or {}),
            }
        )
        return self._wandb.init(**init, settings=settings)

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row["v"], step=row["s"])

    def flush(self) -> None:
        pass  # it writes by itself, in a process of its own

    def finish(self, status: int) -> None:
        if status in (*_STOPPED, KILLED):
            self._run.mark_preempting()  # it goes on some day
        self._run.finish(exit_code=status)


def _new_id() -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(10))


def open_sink(plan: dict[str, Any], memory: Memory) -> WandBRun:
    # It looks at what was started: a program in a -c has no file.
    sys.argv = [plan["script"] or "train.py"]
    return WandBRun(plan, memory)
