"""Checkpoints whose unchanged tensors are in a file of an earlier one, made without a keeper."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from holdfast._adapters.registry import adapter_of
from holdfast._state.capture import capture, capture_generators
from holdfast._store.folder.attempts import claim, note_origin, open_folder
from holdfast._store.folder.layout import MANIFEST, rank_file
from holdfast._store.format import manifest
from holdfast._store.format.image import encode_scalars, plan_image
from holdfast._store.format.manifest import DataFile, Linked, Manifest, Part

_STORED_HEADER = "holdfast.header"


def make_checkpoint(folder: Path, step: int, states: Sequence[dict[str, Any]]) -> Path:
    """Write a checkpoint of what each rank has."""
    layout, run_id = open_folder(folder)
    if not layout.attempt_numbers():
        note_origin(layout, claim(layout, folder, lambda _: None), None)
        layout.exit(1).write_text('{"status": 0, "how": "closed"}')
    final = layout.checkpoint(step, 1, False)
    final.mkdir(parents=True)
    files = []
    for rank, state in enumerate(states):
        captured = capture(state, {"generators": capture_generators(), "position": None})
        head = {"attempt": 1, "world": len(states), "metrics": {}, "best": {}, "step": step}
        scalars = encode_scalars({**head, "tree": captured.tree})
        plan = plan_image(captured.specs, len(scalars))
        values = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
        data = plan.header + b"".join(
            adapter_of(spec.kind).bytes_of(values[spec.name]) for spec, _ in plan.in_file_order()
        )
        data += scalars.ljust(plan.scalars.size_bytes)
        (final / rank_file(rank)).write_bytes(data)
        parts = [
            Part(*e, xxhash.xxh3_128_hexdigest(data[e.offset : e.offset + e.size_bytes]))
            for e in plan.extents()
        ]
        files.append(DataFile(rank_file(rank), len(data), tuple(parts)))
    found = Manifest(run_id, 1, step, "made", 0.0, tuple(files))
    (final / MANIFEST).write_bytes(found.to_bytes())
    return final


def link_unchanged(newer: Path, older: Path) -> None:
    """Rewrite a checkpoint so that what an older one has too is only linked."""
    found = manifest.parse((newer / MANIFEST).read_bytes(), "newer")
    before = manifest.parse((older / MANIFEST).read_bytes(), "older")
    files = tuple(
        _link(newer, older, new, old) for new, old in zip(found.files, before.files, strict=True)
    )
    (newer / MANIFEST).write_bytes(replace(found, files=files).to_bytes())


def _link(newer: Path, older: Path, new: DataFile, old: DataFile) -> DataFile:
    known = {(part.name, part.checksum): part for part in old.parts if not part.file}
    stem = new.name.removesuffix(".safetensors")
    link = Linked(f"{stem}.{older.name}.safetensors", old.size_bytes)
    data = (newer / new.name).read_bytes()
    parts: list[Part] = []
    entries: dict[str, tuple[int, int]] = {}
    body = b""
    for part in new.parts:
        same = known.get((part.name, part.checksum))
        if same is not None and part.name not in ("header", "holdfast.scalars"):
            parts.append(same._replace(file=link.name))
            continue
        name = _STORED_HEADER if part.name == "header" else part.name
        entries[name] = (len(body), len(body) + part.size_bytes)
        parts.append(part._replace(offset=len(body)))
        body += data[part.offset : part.offset + part.size_bytes]
    table = {n: {"dtype": "U8", "shape": [e - s], "data_offsets": [s, e]} for n, (s, e) in
             entries.items()}  # fmt: skip
    text = json.dumps(table).encode()
    header = len(text).to_bytes(8, "little") + text
    parts = [p if p.file else p._replace(offset=p.offset + len(header)) for p in parts]
    (newer / new.name).write_bytes(header + body)
    os.link(older / old.name, newer / link.name)
    wrapper = Part("wrapper", 0, len(header), xxhash.xxh3_128_hexdigest(header))
    return DataFile(new.name, len(header) + len(body), tuple(parts), (link,), wrapper)
