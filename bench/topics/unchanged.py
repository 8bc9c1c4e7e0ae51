"""What has not changed is not written again: a frozen base, a small trained part, as under LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures import LIMIT, OURS, PEER, Row, Table
from bench.ours import Holdfast, forget_memory
from bench.peers import Safetensors
from bench.plan import Plan
from bench.states import State, adapted
from bench.turns import once

BYTES, SECONDS = 0.05, 0.20
WHOLE, PART = "holdfast, everything has changed", "holdfast, only the trained part has"


def measure(plan: Plan) -> list[Table]:
    frozen, trained = plan.megabytes, max(1, plan.megabytes // 100)
    with plan.place("unchanged") as folder:

        def work() -> dict[str, Any]:
            return _alternate(adapted(frozen, trained), folder, plan.rounds)

        found = once(folder / "log", work, seconds=400)
        forget_memory(folder / "Holdfast" / "run")
    setting = f"{frozen} MB frozen, {trained} MB trained, {plan.rounds} rounds"
    tables = []
    for figure, title, unit, target in (
        ("seconds", "Request to durable", "ms", SECONDS),
        ("bytes", "Bytes written", "bytes", BYTES),
    ):
        rows = [
            Row(WHOLE, LIMIT, found["whole"][figure]),
            Row(PART, OURS, found["part"][figure], at_most=target),
            Row("safetensors save_file, fsync", PEER, found["safetensors"][figure]),
        ]
        name = f"unchanged-{figure}"
        title = f"Unchanged tensors: {title.lower()} of a checkpoint"
        tables.append(Table(name, title, unit, rows, setting, WHOLE, "× everything"))
    return tables


def _alternate(state: State, folder: Path, rounds: int) -> dict[str, Any]:
    ours, peer = Holdfast(), Safetensors()
    (folder / "Holdfast").mkdir()
    (folder / "Safetensors").mkdir()
    ours.open(state, folder / "Holdfast")
    peer.open(state, folder / "Safetensors")
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "bytes": []} for name in ("whole", "part", "safetensors")
    }
    few, number = state.trained, 0
    # First as a training that changes everything; then, from one checkpoint to the next, as one
    # that changes little. The first that has little to write counts too.
    order = ["warm-up"] * ours.warm_ups + ["whole"] * rounds + ["part"] * rounds
    for what in (each for name in order for each in (name, "safetensors")):
        if what != "safetensors":
            state.trained = few if what == "part" else None
            state.change()
        before = _files(folder)
        if what == "safetensors":
            seconds = peer.save(number)["durable"]
        else:
            seconds = ours.save(number)["durable"]
            ours.rest()
        written = sum(size for file, size in _files(folder).items() if file not in before)
        if what in found:
            found[what]["seconds"].append(seconds)
            found[what]["bytes"].append(written)
        if what == "safetensors":
            peer.kept(number).unlink()
            number += 1
    # As many of the peer's as of ours, so that each round of a table has its own.
    found["safetensors"] = {name: values[-rounds:] for name, values in found["safetensors"].items()}
    ours.close()
    return found


def _files(folder: Path) -> dict[tuple[int, int], int]:
    """Sizes of the files of checkpoints, each once however many names it has."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and (path.suffix in (".safetensors", ".json") or "save-" in path.name):
            status = path.stat()
            found[status.st_ino, status.st_mtime_ns] = status.st_size
    return found
