"""Rows to MLflow: all lives of a run are one run there.

MLflow forgets nothing, so what an earlier life has logged is not logged again. If the process of
that life did not come to its end, nobody knows how far it came: then MLflow is asked.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast.loggers._child import KILLED, tell
from holdfast.loggers._memory import Memory, Row

_MOST_AT_ONCE = 1000  # values, that their servers take in one request
_FORBIDDEN = re.compile(r"[^\w.\- :/]")
_LONGEST_NAME = 250


class MLflowRun:
    """One run there, opened for one life."""

    rewinds = False

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        options = plan["options"]
        uri = options["tracking_uri"]
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            # Newer ones refuse folders, for those who have not asked for one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        self._names: dict[str, str] = {}  # as they are called there
        self._is_renamed = False
        self._rows: list[Row] = []  # that are being written, and how many values of them are there
        self._at = 0

    def open(self, replayed: list[Row]) -> None:  # noqa: ARG002  never rewound
        memory, client = self._memory, self._client
        if memory.id and self._is_there():
            client.update_run(memory.id, status="RUNNING")
            if not memory.is_whole:
                self._ask_how_far()
        else:
            memory.id = self._create()

    def _is_there(self) -> bool:
        try:
            return bool(self._client.get_run(self._memory.id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return False  # somebody has removed it
            raise

    def _create(self) -> str:
        options, client = self._plan["options"], self._client
        name = options["experiment"]
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        folder = self._plan["folder"]
        run_name = options["run_name"] or Path(folder).name
        tags = {"mlflow.source.name": self._plan["script"], "holdfast.folder": folder}
        run = client.create_run(experiment, run_name=run_name, tags={**tags, **options["tags"]})
        return str(run.info.run_id)

    def _ask_how_far(self) -> None:
        for name in self._client.get_run(self._memory.id).data.metrics:
            for value in self._client.get_metric_history(self._memory.id, name):
                self._memory.know_step(name, value.step)

    def write(self, rows: list[Row]) -> None:
        if rows is not self._rows:  # else they are tried again, and a part of them is there
            self._rows, self._at = rows, 0
        metric = self._entities.Metric
        values = [
            metric(name, value, int(row["t"] * 1000), row["s"])
            for row in rows
            for name, value in row["v"].items()
        ]
        while self._at < len(values):
            some = values[self._at : self._at + _MOST_AT_ONCE]
            self._client.log_batch(self._memory.id, metrics=some)
            self._at += len(some)

    def name(self, given: str) -> str:
        if given in self._names:
            return self._names[given]
        allowed = self._names[given] = _allowed(given)
        if allowed != given and not self._is_renamed:
            self._is_renamed = True
            tell(self._plan, f"allows no metric {given!r}: it is called {allowed!r} there.")
        return allowed

    def flush(self) -> None:
        pass  # each request is there when it returns

    def finish(self, status: int) -> None:
        how = "FINISHED" if status == 0 else "FAILED"
        if status in (*_errors.ASKED, _errors.HUNG, KILLED):
            how = "KILLED"  # it goes on some day
        self._client.set_terminated(self._memory.id, how)


def _allowed(name: str) -> str:
    """The nearest name that is a plain path below a folder, as it is in some of their stores."""
    parts = _FORBIDDEN.sub("_", name[:_LONGEST_NAME]).split("/")
    return (
        "/".join("_" * len(part) if part in (".", "..") else part for part in parts if part) or "_"
    )


def open_sink(plan: dict[str, Any], memory: Memory) -> MLflowRun:
    return MLflowRun(plan, memory)
