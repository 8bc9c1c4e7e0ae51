"""The process that logs: rows arrive through a pipe, and go to TensorBoard, W&B or MLflow.

It ends when the trainer asks for it, or has ended: then it writes the rows it has received. Its own
output goes to `loggers/NAME.log`. Lines for the user go to the trainer, which prints them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import secrets
import select
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.plain_file import open_log, read_plain

Row = dict[str, Any]  # "m": mark, "s": step, "t": time, "v": values; "b": between two loops

KILLED = 137  # the status of a trainer that has ended without a word
_TO_BE_RESUMED = (*_errors.ASKED, *_errors.RESTARTED, KILLED)
_MOST_TURNS = 2000
_ALL = 1 << 60
_MOST_AT_ONCE = 1000  # values in one request, which the servers of MLflow accept
_FORBIDDEN = re.compile(r"[^\w.\- :/]")
_LONGEST_NAME = 250


class Memory:
    """What one logger has logged so far, in all attempts: `loggers/NAME.json` in the run folder.

    A boundary has a mark: twice the number of complete steps, plus one at the end of an epoch. Rows
    that are logged after the boundary M have the mark M or a later one. An attempt that resumes
    from M logs all of them again.
    """

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        self.id = ""  # of the run in the service
        self.stamp = 0  # of the newest event file
        self.is_whole = True  # False if the previous process was killed
        self._last: dict[str, list[int]] = {}  # by name: its last mark, and how many values there
        self._here: dict[str, list[int]] = {}  # the same, in this attempt
        self._turns: list[Row] = []  # logged between the last step of an epoch and its end
        try:
            known = json.loads(read_plain(self._path))
            if known["target"] != self._target:
                return  # another place, where nothing was logged yet
            self.id, self.stamp = known["id"], known["stamp"]
            self.is_whole = known["whole"]
            self._last, self._turns = known["last"], known["turns"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return  # the first attempt, or nothing that can be used

    def rewind(self, mark: int) -> list[Row]:
        """Forget the rows that an attempt from this mark on logs again.

        A reader that knows only steps forgets too many: the rows of the same step that were logged
        before the end of an epoch. They are returned, to be logged once more.
        """
        for name, (last, _) in list(self._last.items()):
            if last >= mark:
                self._last[name] = [mark - 1, _ALL]
        self._turns = [row for row in self._turns if row["m"] < mark]
        return [row for row in self._turns if row["m"] == mark - 1 and row["s"] == mark // 2]

    def know_step(self, name: str, step: int) -> None:
        """The service has this step of a metric."""
        self._last[name] = max(self._last.get(name, [-1, 0]), [2 * step + 1, _ALL])

    def without_known(self, row: Row) -> Row:
        """The row without the values that an earlier attempt has logged."""
        fresh = {}
        for name, value in row["v"].items():
            mark, count = self._here.get(name, [-1, 0])
            self._here[name] = place = [row["m"], count + 1 if mark == row["m"] else 1]
            if place > self._last.get(name, [-1, 0]):
                fresh[name] = value
        return {**row, "v": fresh}

    def record(self, rows: list[Row]) -> None:
        for row in rows:
            for name in row["v"]:
                mark, count = self._last.get(name, [-1, 0])
                self._last[name] = [row["m"], count + 1 if mark == row["m"] else 1]
        self._turns += [row for row in rows if row.get("b") and row["v"]]
        del self._turns[:-_MOST_TURNS]

    def save(self, *, whole: bool = False) -> None:
        """Write it; `whole` says that this process logs nothing more."""
        known = {
            "schema": 1,
            "target": self._target,
            "id": self.id,
            "stamp": self.stamp,
            "whole": whole,
            "last": self._last,
            "turns": self._turns,
        }
        write_atomic(self._path, json.dumps(known).encode())


def tell(plan: dict[str, Any], text: str) -> None:
    """Send a line for the trainer to print; it may have ended."""
    with contextlib.suppress(OSError):  # the disk may be full
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        os.write(plan["told"], json.dumps({"say": text}).encode() + b"\n")


def first_line(error: BaseException) -> str:
    """The first line of an error; the rest is in the log."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def encodable(name: str) -> str:
    """The name without characters that cannot be written, such as bytes of a path."""
    return name.encode("utf-8", "replace").decode()


class Sink:
    rewinds = False  # True if the service can forget steps, so that they are logged again

    def name(self, given: str) -> str:
        """The name of a metric there: a name that it refuses would delay all others."""
        return encodable(given)

    def open(self, replayed: list[Row]) -> None:
        """Before the first row; `replayed` are to be logged once more if it has rewound."""
        raise NotImplementedError

    def write(self, rows: list[Row]) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Make durable what was written; not needed where each write is."""

    def finish(self, status: int) -> None:
        raise NotImplementedError


class EventFiles(Sink):
    """Rows in event files of TensorBoard, one for each attempt.

    A file begins with the mark of a restart: TensorBoard then forgets the steps from there on, in
    all files. The records are TensorBoard's own. The file is ours, so that a record that a full
    disk has truncated can be removed: a reader would stop at it.
    """

    rewinds = True

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        self._memory = memory
        self._folder = Path(plan["options"]["folder"])
        self._attempt, self._step = plan["attempt"], plan["mark"] // 2
        # The modules that need no TensorFlow: importing it takes seconds.
        self._proto: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")

    def open(self, replayed: list[Row]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names. The clock of another machine may be behind.
        stamp = max(int(time.time()), self._memory.stamp + 1)
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{self._attempt:04d}"
        self._file = (self._folder / f"{name}.{os.getpid()}").open("ab", buffering=0)
        self._memory.stamp = stamp
        self._size = 0
        restart, now = self._proto.SessionLog(status=self._proto.SessionLog.START), time.time()
        version = self._proto.Event(wall_time=now, file_version="brain.Event:2")
        begin = self._proto.Event(wall_time=now, step=self._step, session_log=restart)
        self._append([version, begin])
        self.write(replayed)

    def write(self, rows: list[Row]) -> None:
        summary = self._summary.Summary
        events = []
        for row in rows:
            values = [summary.Value(tag=n, simple_value=v) for n, v in row["v"].items()]
            about = summary(value=values)
            events.append(self._proto.Event(wall_time=row["t"], step=row["s"], summary=about))
        self._append(events)

    def _append(self, events: list[Any]) -> None:
        buffer = io.BytesIO()
        records = self._records.RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        whole = memoryview(buffer.getvalue())
        try:
            while whole:
                whole = whole[self._file.write(whole) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += buffer.tell()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def finish(self, status: int) -> None:  # noqa: ARG002  an event file has no status
        self._file.close()


class WandBRun(Sink):
    """All attempts of a run as one run of Weights & Biases.

    The step there never decreases. An attempt that resumes logs some steps again, with the same
    values. They are left out, unless the run can be rewound. If the servers cannot be reached, all
    is written to files, which `wandb sync` uploads.
    """

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        # It reads what was started: a program given by -c has no file.
        sys.argv = [plan["script"] or "train.py"]
        self._plan, self._memory = plan, memory
        options = plan["options"]
        self._init: dict[str, Any] = dict(options["init"])
        is_first, step = not memory.id, plan["mark"] // 2
        memory.id = str(self._init.pop("id", None) or memory.id or secrets.token_hex(5))
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        if options["rewind"] and not is_first and step > 0:
            try:
                self._run = self._begin(resume_from=f"{memory.id}?_step={step - 1}")
                self.rewinds = True
            except Exception as error:  # noqa: BLE001  any error of the package: continue without
                tell(
                    plan,
                    f"could not be rewound ({first_line(error)}). Steps that were logged before "
                    "are not logged again.",
                )

    def open(self, replayed: list[Row]) -> None:
        if self._run is None:
            try:
                self._run = self._begin(id=self._memory.id, resume="allow")
            except Exception as error:  # no key, no network: log to files
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
        # It must measure and show the training process, not this one.
        ours = {"x_stats_pid": self._plan["parent"], "program": self._plan["script"] or None}
        settings = {"console": "off", **ours, **(init.pop("settings", None) or {})}
        return self._wandb.init(**init, settings=self._wandb.Settings(**settings))

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row["v"], step=row["s"])

    def finish(self, status: int) -> None:
        if status in _TO_BE_RESUMED:
            self._run.mark_preempting()
        self._run.finish(exit_code=status)


class MLflowRun(Sink):
    """All attempts of a run as one run of MLflow.

    MLflow cannot forget steps, so no step is logged twice. If the previous process was killed,
    MLflow is asked what it has.
    """

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        options = plan["options"]
        uri = options["tracking_uri"]
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            # Newer versions refuse folders unless this is set.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        self._names: dict[str, str] = {}  # the names in MLflow
        self._is_renamed = False
        self._rows: list[Row] = []  # that are being written, and how many of their values are
        self._at = 0

    def open(self, replayed: list[Row]) -> None:  # noqa: ARG002  never rewound
        memory, client = self._memory, self._client
        if memory.id and self._is_there():
            client.update_run(memory.id, status="RUNNING")
            if not memory.is_whole:  # ask what it has
                for name in client.get_run(memory.id).data.metrics:
                    for value in client.get_metric_history(memory.id, name):
                        memory.know_step(name, value.step)
        else:
            memory.id = self._create()

    def _is_there(self) -> bool:
        try:
            return bool(self._client.get_run(self._memory.id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return False  # it was deleted
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

    def write(self, rows: list[Row]) -> None:
        if rows is not self._rows:  # else this is another try, and some values are logged
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

    def finish(self, status: int) -> None:
        how = "FINISHED" if status == 0 else "FAILED"
        if status in _TO_BE_RESUMED:
            how = "KILLED"  # it will be resumed
        self._client.set_terminated(self._memory.id, how)


def _allowed(name: str) -> str:
    """The nearest name that is a plain relative path: some stores of MLflow use it as one."""
    parts = _FORBIDDEN.sub("_", name[:_LONGEST_NAME]).split("/")
    safe = ("_" * len(part) if part in (".", "..") else part for part in parts if part)
    return "/".join(safe) or "_"


SINKS = {"tensorboard": EventFiles, "wandb": WandBRun, "mlflow": MLflowRun}


# -- The rows on their way ---------------------------------------------------------------


_SAVE_SECONDS = 1.0
_LOCK_SECONDS = 60.0
_AGAIN_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0  # after the trainer's end


def _log_error() -> None:
    with contextlib.suppress(OSError):  # the log may be on the full disk
        traceback.print_exc()


def main(text: str) -> None:
    plan = json.loads(text)
    # A child of this process may outlive it, and must not hold the pipe open.
    plan["pipe"] = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    try:
        with _alone(plan["lock"]):
            _serve(plan)
    except Exception as error:  # noqa: BLE001  a package may raise anything; the user is told
        _log_error()
        tell(plan, f"{first_line(error)}. The training goes on without it.")
        sys.exit(0)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Wait for the process of the previous attempt, which may still write."""
    import fcntl

    with open_log(Path(path)) as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield


def _serve(plan: dict[str, Any]) -> None:
    memory = Memory(Path(plan["state"]), plan["target"])
    sink: Sink = SINKS[plan["kind"]](plan, memory)
    sink.open(memory.rewind(plan["mark"]) if sink.rewinds else [])
    memory.save()
    feed = LogFeed(plan)
    saved, is_new = time.monotonic(), False
    for rows in feed:
        named = [{**row, "v": {sink.name(k): v for k, v in row["v"].items()}} for row in rows]
        fresh = [row for row in map(memory.without_known, named) if row["v"]]
        if fresh and _deliver(plan, sink, fresh, feed):
            memory.record(fresh)
            is_new = True
        if is_new and time.monotonic() - saved > _SAVE_SECONDS:
            saved, is_new = time.monotonic(), not _is_saved(sink, memory)
    sink.flush()
    memory.save()
    sink.finish(feed.status)
    memory.save(whole=True)


def _is_saved(sink: Sink, memory: Memory) -> bool:
    """Make durable what was logged; False on a full disk, to try it again later."""
    try:
        sink.flush()
        memory.save()
    except OSError:
        _log_error()
        return False
    return True


def _deliver(plan: dict[str, Any], sink: Sink, rows: list[Row], feed: LogFeed) -> bool:
    """Write rows, and try again if that fails; meanwhile new rows wait in the trainer."""
    is_told = False
    while True:
        try:
            sink.write(rows)
        except Exception as error:  # noqa: BLE001  a full disk or a server that is down may recover
            _log_error()
            if not is_told:
                tell(plan, f"cannot be written to now ({first_line(error)}). It is tried again.")
                is_told = True
            if feed.seconds_over() > _GIVE_UP_SECONDS:
                return False
            time.sleep(_AGAIN_SECONDS)
        else:
            if is_told:
                tell(plan, "can be written to again.")
            return True


class LogFeed:
    """The rows from the pipe, until the trainer has no more."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._parent = int(plan["parent"])
        self._pipe = plan["pipe"]
        self._rest = b""
        self._is_at_end = False
        self._over_since: float | None = None
        self.status = KILLED

    def is_over(self) -> bool:
        """Whether the trainer has ended, or has sent its last row."""
        # A worker that was forked from the trainer holds the pipe open. So this process also checks
        # whether its parent has changed.
        return self._is_at_end or os.getppid() != self._parent

    def seconds_over(self) -> float:
        """The seconds since then: all rows that cannot be written share one time limit."""
        if not self.is_over():
            return 0.0
        if self._over_since is None:
            self._over_since = time.monotonic()
        return time.monotonic() - self._over_since

    def __iter__(self) -> Iterator[list[Row]]:
        while not self._is_at_end:
            is_orphan = self.is_over()  # before the last read, so that no row is missed
            if not select.select([self._pipe], [], [], 0.0 if is_orphan else _SAVE_SECONDS)[0]:
                if is_orphan:
                    return
                yield []
                continue
            chunk = os.read(self._pipe, 1 << 20)
            self._is_at_end = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from self._rows(lines)

    def _rows(self, lines: list[bytes]) -> Iterator[list[Row]]:
        for line in lines:
            message = json.loads(line)
            if isinstance(message, dict):
                self.status = message["end"]
                self._is_at_end = True
            else:
                yield message
