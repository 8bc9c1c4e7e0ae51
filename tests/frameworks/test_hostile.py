"""A checkpoint is data: whatever is in its files, nothing of it is ever run."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch

import holdfast
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import parse_header
from holdfast._store.format.manifest import DataFile, Part
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import read_manifest
from tests.frameworks.roundtrip import restore, store


class Bomb:
    """Pickled, it would make a file when it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "code-was-run"


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a good checkpoint."""
    store(tmp_path / "run", weights=torch.ones(4))
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    return folder


def sign(checkpoint, data):
    """Put bytes in place of the data, with a manifest whose every checksum fits them."""
    found = read_manifest(checkpoint)
    path = checkpoint / found.files[0].name
    path.write_bytes(data)
    parts = [Part(*e, digest(data[e[1] : e[1] + e[2]]).hex()) for e in extents_of(data)]
    forged = replace(found, files=(DataFile(path.name, len(data), tuple(parts)),))
    (checkpoint / "manifest.json").write_bytes(forged.to_bytes())


def extents_of(data):
    """The parts as the header has them; where it has none, what a header and scalars could be."""
    length = 8 + int.from_bytes(data[:8], "little")
    length = length if length <= len(data) else len(data)
    try:
        found = parse_header(data[:length]).extents()
        assert found[-1].offset + found[-1].size_bytes <= len(data)
    except (ValueError, AssertionError):
        return [("header", 0, length), ("holdfast.scalars", length, len(data) - length)]
    return found


def header(table):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


def good_parts(checkpoint):
    """The header's table and the data of the checkpoint."""
    data = (checkpoint / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


CODE = "__import__('os').system('touch {mark}')"


def contents(checkpoint, mark):
    """Hostile bytes for the data file, by name."""
    table, data = good_parts(checkpoint)
    own = json.loads(table["__metadata__"]["specs"])

    def with_specs(specs):
        metadata = {**table["__metadata__"], "specs": json.dumps(specs)}
        return header({**table, "__metadata__": metadata}) + data

    code = CODE.format(mark=mark)
    scalars = table["holdfast.scalars"]["data_offsets"]

    def with_scalars(text):
        room = scalars[1] - scalars[0]
        return header(table) + data[: scalars[0]] + text[:room].ljust(room) + data[scalars[1] :]

    return {
        "a pickle": pickle.dumps(Bomb(mark)),
        "a pickle behind a length": header(pickle.dumps(Bomb(mark))),
        "a huge header length": (2**63).to_bytes(8, "little") + b"{}",
        "the largest header length": b"\xff" * 8 + b"{}",
        "a header that never ends": header(b"[" * 200_000),
        "code for a header": header(code.encode()),
        "code as a format": header({"__metadata__": {"format": code, "specs": code}}) + data,
        "a giant tensor": with_specs([[own[0][0], "torch", "float32", [1 << 50], None, 4]]),
        "an empty giant": with_specs([[own[0][0], "torch", "float32", [1 << 50, 0], None, 0]]),
        "no data": header(table),
        "nothing": b"",
        "scalars that are a pickle": with_scalars(pickle.dumps(Bomb(mark))),
        "scalars that are code": with_scalars(code.encode()),
        "scalars that never end": with_scalars(b"[" * 200_000),
        "a step that is no number": with_scalars(b'{"step": 1e999, "tree": {"state": {}}}'),
        "a tree that is none": with_scalars(b'{"step": 1, "tree": []}'),
        "a state that is none": with_scalars(b'{"step": 1, "tree": {"state": 5}}'),
    }


NAMES = [
    "a pickle",
    "a pickle behind a length",
    "a huge header length",
    "the largest header length",
    "a header that never ends",
    "code for a header",
    "code as a format",
    "a giant tensor",
    "an empty giant",
    "no data",
    "nothing",
    "scalars that are a pickle",
    "scalars that are code",
    "scalars that never end",
    "a step that is no number",
    "a tree that is none",
    "a state that is none",
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_content_is_damage_even_if_every_checksum_fits(checkpoint, mark, name):
    sign(checkpoint, contents(checkpoint, mark)[name])
    with pytest.raises(holdfast.DamagedCheckpoint):
        read_checkpoint(checkpoint)
    assert not mark.exists()


def test_the_list_of_hostile_contents_is_whole(checkpoint, mark):
    assert list(contents(checkpoint, mark)) == NAMES


@pytest.mark.parametrize("name", ["a pickle", "a huge header length", "nothing"])
def test_a_run_refuses_hostile_content_and_sets_it_aside(checkpoint, mark, name, tmp_path):
    bytes_of = contents(checkpoint, mark)[name]
    sign(checkpoint, bytes_of)
    with pytest.raises(holdfast.NoGoodCheckpoint):
        restore(tmp_path / "run", weights=torch.zeros(4))
    assert not mark.exists()
    kept = tmp_path / "run" / "set-aside" / checkpoint.name / "rank-00000.safetensors"
    assert kept.read_bytes() == bytes_of


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("torch", "load"), ("torch", "nn"), ("numpy", "O"), ("numpy", "f4,f4"), ("pickle", "float32")],
)
def test_a_type_that_is_none_of_the_frameworks_is_a_mismatch_in_a_sentence(
    checkpoint, tmp_path, kind, dtype
):
    table, data = good_parts(checkpoint)
    own = json.loads(table["__metadata__"]["specs"])
    own[0][1:3] = kind, dtype
    metadata = {**table["__metadata__"], "specs": json.dumps(own)}
    sign(checkpoint, header({**table, "__metadata__": metadata}) + data)
    for live in (torch.zeros(4), None):
        with pytest.raises(holdfast.StateMismatch, match=f"weights: stored as {dtype} of {kind}"):
            restore(tmp_path / "run", weights=live)
