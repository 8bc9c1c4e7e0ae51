"""Forged files of a run, with right checksums: each ends in a result or in a sentence of holdfast.

    .venv/bin/python -m tests.fuzz_files --minutes 60

changes a manifest, a tree, a journal and the other records, how the run was started, an arena and a
.pt file in a few places, as often as the time allows. It leaves with 1 if anything raised what is
no error of holdfast. tests/unit/store/test_forged.py shows the same in `make test`, with few
examples.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from holdfast import HoldfastError
from holdfast._adapters.registry import adapter_of
from holdfast._environment.slurm.controller import digest_of
from holdfast._run.data.course import Position
from holdfast._state.capture import restore_generators
from holdfast._state.restore import decode_extra, decode_state, restore_state
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.format import manifest
from holdfast._store.format.image import plan_image
from holdfast._store.memory.arena import Arena, arena_bytes
from holdfast._store.memory.backing import SHM
from holdfast._store.read.find import find_newest, open_leftovers
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._tools import resume
from holdfast._tools.convert.adoption import Adoption, adopt_files
from tests.cli.command import holdfast
from tests.forging import dumps, forged
from tests.rank_folders import capture_of, make_run

RUN_ID = uuid.uuid4().hex  # two of these may run at once
COMMANDS = (
    *(("status",), ("status", "--json"), ("ls",), ("verify",), ("metrics",), ("why",), ("clean",)),
    *(("report", "-o", "page.html"), ("export", "out.safetensors"), ("export", "out.pt")),
    *(("compare",), ("compare", "-o", "page.html"), ("resume",), ("mirror",), ("stacks",)),
)


@contextlib.contextmanager
def not_starting() -> Iterator[None]:
    """`resume` without the start, which must be possible with the words that were read."""

    def start(found: resume.Resumption) -> str:
        words = [*found.command, *found.environment, *found.environment.values()]
        assert "\0" not in "".join(words)
        assert all(name and "=" not in name for name in found.environment)
        os.fsencode("".join(words))
        raise SystemExit(0)

    with (
        mock.patch.object(resume, "replace_this_process", start),
        mock.patch.object(resume, "submit_again", start),
    ):
        yield


class Workshop:
    """A whole run, made once, and copies of it to forge."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.whole = place / "whole"
        self.run = place / "run"
        rng = np.random.default_rng(7)
        state = {
            "weights": np.arange(12.0).reshape(3, 4),
            "counts": {"a": [1, 2.5, None], 3: (True, float("inf"))},
            "keys": {(1, "a"): 1, b"raw": 2, np.int64(5): 3, frozenset({1}): 4, 2**2000: 5, 1j: 6},
            "in_sets": {b"raw", np.float32(0.5), (1, 2)},
            "names": {"x", "y"},
            "blob": b"bytes",
            "rng": rng,
            "model": torch.nn.Linear(2, 2),
        }
        self.state = state
        make_run(self.whole, [state])
        self.captured = capture_of(state)
        layout = RunLayout(self.whole)
        identity = json.loads(layout.identity.read_text())
        layout.identity.write_text(json.dumps({**identity, "run_id": RUN_ID}))
        lease = json.loads(layout.lease(1).read_text())
        dead = {**lease["process"], "pid": 4_000_000}  # a live one would keep `clean` away
        layout.lease(1).write_text(json.dumps({**lease, "process": dead}))
        now = time.time()
        events = [
            {"event": "start", "attempt": 1, "step": 0, "source": "new", "pid": 5, "keep_last": 2},
            {"event": "loop", "attempt": 1, "step": 0, "total": 100},
            {"event": "checkpoint", "attempt": 1, "step": 8, "size_bytes": 9, "seconds": 0.1},
            {"event": "rank-died", "rank": 0, "how": "died", "host": "h", "step": 3},
            {"event": "hang", "attempt": 1, "step": 4, "cause": "input", "sentence": "It hangs."},
            {"event": "exit", "attempt": 1, "status": 0, "how": "closed", "step": 8},
        ]
        self.events = [{"time": now + n, **event} for n, event in enumerate(events)]
        metrics = {"loss": [0.5, 0.4, 0.6, 3, 0, 7]}
        row = {"t": now, "s": 4, "n": 4, "h": [[113, 4]], "save": 0.1, "snaps": 1, "m": metrics}
        self.rows = [row, {**row, "t": now + 1, "s": 8, "mem": {"rss": 5}, "waits": {"1": 0.5}}]
        beat = {"beat": 3, "time": now, "step": 8, "memory_step": 8, "memory_time": now, "slots": 2}
        beat |= {"keeper": {}, "ranks": [{"host": "h", "step": 8}], "slurm": {"job": "7"}}
        beat |= {"hang": {"since": now}, "pace": {"disturbed": ["x"], "usual": 1.0, "now": 3.0}}
        self.records = {
            layout.heartbeat(1): beat,
            layout.exit(1): {"status": 1, "how": "ValueError", "step": 8, "time": now},
            layout.origin(1): {"attempt": None, "step": None},
            layout.lease(1): json.loads(layout.lease(1).read_text()),
            layout.mirror: {"address": "/m", "checkpoints": [{"step": 8}], "newest_saved_at": now},
            layout.error(1): {"type": "ValueError", "message": "m", "traceback": ["a"], "rank": 0},
            layout.death(1): {"signal": 9, "time": now, "memory": {"rss": 5}, "oom": {}},
            layout.hang(1): {"began": now, "found": now, "cause": "input", "looks": [{"rank": 0}]},
            layout.void(1): {"step": 90, "reason": "nan"},
            layout.led(1): {"command": ["python"], "status": 1, "signals": [], "processes": [{}]},
            layout.requeue(1): {"said": "requeued"},
        }
        script = place / "job.sbatch"
        script.write_text("#!/bin/sh\n")
        command = [sys.executable, str(script), "--lr", "0.1"]
        self.start = {"command": command, "cwd": str(place), "environment": {"PATH": "/bin"}}
        self.start |= {"host": "h", "python": "3.11", "packages": {"torch": "2"}, "ranks": 2}
        self.start |= {"git": {"commit": "1a"}, "config": {"lr": 0.1, "net": {"size": [1, None]}}}
        self.start |= {"launcher": "torchrun", "folder": str(self.run), "job": None}
        self.start |= {"left_out": ["KEY"], "hardware": {"gpus": [{"name": "x"}], "cpus": 2}}
        part = {"command": command, "left_out": [], "cwd": str(place), "process": dead}
        self.start |= {"start": part, "batch": {}}
        self.batch = {"folder": str(place), "path": str(script), "options": [], "arguments": []}
        self.batch |= {
            "digest": digest_of(script.read_text()),
            "script": "#",
            "has_left_out": False,
        }
        identity = {"run_id": RUN_ID, "created": now, "folder": str(self.whole)}
        self.records_of_start = {
            layout.labels: {"tags": ["a", "b"], "note": "n", "is_archived": False},
            layout.identity: {**identity, "attempts_elsewhere": 1, "copied_from": "/x"},
            layout.rank(1, 0): {"keeper": dead, "trainer_pid": 5, "port": 7},
            layout.rank(1, 1): {"keeper": dead, "trainer_pid": 5, "port": 7},
        }

    @property
    def checkpoint(self) -> Path:
        return RunLayout(self.run).checkpoint_folders()[-1][2]

    def begin(self) -> RunLayout:
        """A new copy."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.whole, self.run)
        layout = RunLayout(self.run)
        layout.journal.write_bytes(b"".join(dumps(each) + b"\n" for each in self.events))
        layout.series(1).write_bytes(b"".join(dumps(each) + b"\n" for each in self.rows))
        return layout

    def forge_image(self, scalars: bytes | None = None, header: bytes | None = None) -> None:
        """Put other scalars or another header into the file, with the right checksums."""
        found = manifest.read(self.checkpoint)
        (file,) = found.files
        path = self.checkpoint / file.name
        data = path.read_bytes()
        pieces = [data[part.offset : part.offset + part.size_bytes] for part in file.parts]
        if scalars is not None:
            pieces[-1] = scalars.ljust(len(pieces[-1]))
        if header is not None:
            pieces[0] = header.ljust(len(pieces[0]))
        parts, at = [], 0
        for part, piece in zip(file.parts, pieces, strict=True):
            digest = xxhash.xxh3_128_hexdigest(piece)
            parts.append(part._replace(offset=at, size_bytes=len(piece), checksum=digest))
            at += len(piece)
        path.unlink()
        path.write_bytes(b"".join(pieces))
        body = json.loads(found.to_bytes())["manifest"]
        body["files"] = [manifest.DataFile(file.name, at, tuple(parts)).to_json()]
        (self.checkpoint / MANIFEST).write_bytes(manifest.seal(json.dumps(body).encode()))

    def look(self, data: Any) -> None:
        """Some of the commands that read a run, and what a start does with its state."""
        chosen = st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=3, unique=True)
        for name, *more in data.draw(chosen):
            for made in ("page.html", "out.safetensors", "out.pt"):
                (self.place / made).unlink(missing_ok=True)
            with not_starting():
                done = holdfast(name, self.run, *more, cwd=self.place)
            assert done.stdout or done.stderr, f"{name} says nothing"
            assert "\x1b" not in done.stdout + done.stderr, f"{name} sends an escape"
        with contextlib.suppress(HoldfastError):
            self.restore(read_checkpoint(self.checkpoint))

    def restore(self, loaded: Any) -> None:
        state = {**copy.deepcopy(self.state), "model": torch.nn.Linear(2, 2)}
        restore_state(state, loaded)
        decode_state(loaded)
        extra = decode_extra(loaded)
        with contextlib.suppress(HoldfastError):
            Position.from_tree(extra.get("position") or {})
        with contextlib.suppress(HoldfastError):
            restore_generators(extra["generators"])


def forge_manifest(shop: Workshop, data: Any) -> None:
    shop.begin()
    path = shop.checkpoint / MANIFEST
    body = json.loads(path.read_text())["manifest"]
    sealed = manifest.seal(dumps(data.draw(forged(body))))
    path.write_bytes(sealed)
    shop.look(data)


def forge_tree(shop: Workshop, data: Any) -> None:
    shop.begin()
    head = {"attempt": 1, "world": 1, "metrics": {"loss": 0.5}, "best": {}, "loop": -1, "step": 8}
    head |= {"phases": [-1, None], "rules": {}, "by_hand": True, "at_turn": False}
    shop.forge_image(scalars=dumps(data.draw(forged({**head, "tree": shop.captured.tree}))))
    shop.look(data)


def forge_header(shop: Workshop, data: Any) -> None:
    shop.begin()
    (file,) = manifest.read(shop.checkpoint).files
    header = (shop.checkpoint / file.name).read_bytes()[: file.parts[0].size_bytes]
    table = json.loads(header[8:])
    table["__metadata__"]["specs"] = json.loads(table["__metadata__"]["specs"])
    table = data.draw(forged(table))
    meta = table.get("__metadata__")
    if isinstance(meta, dict) and "specs" in meta:
        meta["specs"] = dumps(meta["specs"]).decode()
    text = dumps(table)
    length = data.draw(st.sampled_from([len(header) - 8] * 4 + [0, 2**63, len(header)]))
    shop.forge_image(header=length.to_bytes(8, "little") + text)
    shop.look(data)


def forge_journal(shop: Workshop, data: Any) -> None:
    layout = shop.begin()
    events = data.draw(forged(shop.events))
    rows = data.draw(forged(shop.rows))
    layout.journal.write_bytes(b"".join(dumps(each) + b"\n" for each in events))
    layout.series(1).write_bytes(b"".join(dumps(each) + b"\n" for each in rows))
    shop.look(data)


def forge_start(shop: Workshop, data: Any) -> None:
    """How it was started, its labels, its identity and its ranks."""
    layout = shop.begin()
    base = data.draw(st.sampled_from([shop.start, {**shop.start, "job": "7", "batch": shop.batch}]))
    layout.start(1).write_bytes(dumps(data.draw(st.just(base) | forged(base))))
    layout.ranks(1).mkdir(exist_ok=True)
    for path in data.draw(st.lists(st.sampled_from([*shop.records_of_start]), max_size=3)):
        place = shop.run / path.relative_to(shop.whole)
        place.unlink(missing_ok=True)
        place.write_bytes(dumps(data.draw(forged(shop.records_of_start[path]))))
    shop.look(data)


def forge_records(shop: Workshop, data: Any) -> None:
    shop.begin()
    chosen = data.draw(st.lists(st.sampled_from([*shop.records]), min_size=1, max_size=4))
    for path in chosen:
        place = shop.run / path.relative_to(shop.whole)
        place.unlink(missing_ok=True)
        place.write_bytes(dumps(data.draw(forged(shop.records[path]))))
    shop.look(data)


def forge_arena(shop: Workshop, data: Any) -> None:
    """A slot with forged scalars and right digests, and bytes of the arena itself changed."""
    layout = shop.begin()
    for path in shop.checkpoint.iterdir():
        path.unlink()
    shop.checkpoint.rmdir()
    path = SHM / f"holdfast-{os.geteuid()}-{RUN_ID}-a1-g1"
    path.unlink(missing_ok=True)
    captured = shop.captured
    head = {"attempt": 1, "world": 1, "metrics": {}, "step": 8, "tree": captured.tree}
    head = data.draw(st.just(head) | forged(head))
    scalars = dumps(head)
    plan = plan_image(captured.specs, len(scalars))
    size = arena_bytes(plan.size_bytes, len(plan.specs) + 2, 2)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.truncate(descriptor, size)
        options = {"run_id": RUN_ID, "attempt": 1, "generation": 1, "slots": 2}
        arena = Arena.create(descriptor, plan=plan, **options)
        slot = arena.begin()
        assert slot is not None
        image = arena.image(slot)
        values = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
        for spec, at in plan.in_file_order():
            image[at : at + spec.size_bytes] = adapter_of(spec.kind).bytes_of(values[spec.name])
        place = plan.scalars
        image[place.offset : place.offset + place.size_bytes] = scalars.ljust(place.size_bytes)
        extents = [image[e.offset : e.offset + e.size_bytes] for e in plan.extents()]
        arena.set_digests(slot, 1, [xxhash.xxh3_128_digest(each) for each in extents])
        arena.finish(slot, sequence=1, mark=16)
        words = data.draw(st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 2**64 - 1))))
        del image, extents
        arena.close()
        with path.open("r+b") as file:
            for word, value in words:
                file.seek(8 * word)
                file.write(value.to_bytes(8, "little"))
        _look_at_memory(shop, layout)
    finally:
        path.unlink(missing_ok=True)


def _look_at_memory(shop: Workshop, layout: RunLayout) -> None:
    for name in ("status", "clean", "ls", "why"):
        done = holdfast(name, shop.run, cwd=shop.place)
        assert done.stdout or done.stderr, f"{name} says nothing"
    leftovers = open_leftovers(RUN_ID)
    try:
        with contextlib.suppress(HoldfastError):
            found = find_newest(layout, {1: None}, leftovers, lambda _: None)
            if found is not None:
                shop.restore(found.loaded)
            del found
    finally:
        for each in leftovers:
            each.arena.close()


def forge_pt(shop: Workshop, data: Any) -> None:
    """A file of torch.save with other values, or with changed bytes."""
    value = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "optimizer": {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "epoch": 3,
        "global_step": 30,
        "pytorch-lightning_version": "2.0",
        "state_dict": {"w": torch.ones(2)},
        "loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 1, "started": 2}}}},
    }
    value = data.draw(st.just(value) | forged(value))
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):  # what torch does not save is no file
        torch.save(value, buffer)
    raw = bytearray(buffer.getvalue() or b"PK")
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4)):
        raw[at % len(raw)] = byte
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    path = shop.place / "model.pt"
    path.write_bytes(raw[:cut])
    target = shop.place / "adopted"
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(HoldfastError):
        adopt_files(target, Adoption(path))


TARGETS: dict[str, Callable[[Workshop, Any], None]] = {
    "manifest": forge_manifest,
    "tree": forge_tree,
    "header": forge_header,
    "journal": forge_journal,
    "records": forge_records,
    "start": forge_start,
    "arena": forge_arena,
    "pt": forge_pt,
}


@contextlib.contextmanager
def workshop() -> Iterator[Workshop]:
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as place:
        yield Workshop(Path(place))


def examples(shop: Workshop, name: str, count: int, number: int) -> int:
    """Try so many; returns how many were, and raises what was found, with the example."""
    tried = 0

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.data())
    def look(data: Any) -> None:
        nonlocal tried
        tried += 1
        TARGETS[name](shop, data)

    look()
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", choices=[*TARGETS], help="one kind of file")
    options = parser.parse_args()
    names = [options.only] if options.only else [*TARGETS]
    deadline = time.monotonic() + 60 * options.minutes
    tried = dict.fromkeys(names, 0)
    found: dict[str, str] = {}
    with workshop() as shop:
        while time.monotonic() < deadline:
            for name in names:
                number = random.randrange(2**32)
                try:
                    tried[name] += examples(shop, name, 25, number)
                except Exception as error:  # noqa: BLE001  that is what is looked for
                    frames = traceback.extract_tb(error.__traceback__)
                    ours = [f for f in frames if "/src/holdfast/" in f.filename] or frames
                    where = f"{name}: {type(error).__name__}, {ours[-1].filename}:{ours[-1].lineno}"
                    if where not in found:
                        found[where] = "".join(traceback.format_exception(error))
                        print(f"FOUND {where} (seed {number})\n{found[where]}", flush=True)
    for name, count in tried.items():
        print(f"{name}: {count} examples")
    print(f"{len(found)} kinds of failure" + "".join(f"\n  {where}" for where in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
