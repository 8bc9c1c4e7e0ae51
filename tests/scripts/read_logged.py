"""Read back what loggers have written, with the packages' own readers where they have one.

Prints {"metric": [[step, value, wall time], …]} of `tensorboard FOLDER`, `wandb FOLDER` or
`mlflow FOLDER`, as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind: whole, first, middle, last


def of_tensorboard(folder: Path) -> dict[str, Any]:
    # Else TensorBoard reads files by TensorFlow, which takes ten seconds to import.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    found.Reload()
    return {
        tag: [[e.step, e.value, e.wall_time] for e in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def of_wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    logged: dict[str, Any] = defaultdict(list)
    for path in sorted(folder.rglob("*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item
            }
            step = values.get("_step", record.history.step.num)
            for name, value in values.items():
                if not name.startswith("_"):
                    logged[name].append([step, value, values.get("_timestamp")])
    return logged


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB writes it, behind seven bytes of W&B's own."""
    at, whole = 7, b""
    while at + _HEADER.size <= len(content):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        whole += content[at : at + length]
        at += length
        if kind in (1, 4):
            yield whole
            whole = b""


def of_mlflow(folder: Path) -> dict[str, Any]:
    logged: dict[str, Any] = defaultdict(list)
    for path in folder.glob("*/*/metrics/**/*"):
        for line in path.read_text().splitlines() if path.is_file() else ():
            when, value, step, *_ = line.split()
            logged[path.name].append([int(step), float(value), int(when) / 1000])
    return logged


if __name__ == "__main__":
    readers = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
