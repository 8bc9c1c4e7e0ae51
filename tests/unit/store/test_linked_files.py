"""Checkpoints with tensors in a file of an earlier one: read, checked and exported as any other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast._errors import DamagedCheckpoint
from holdfast._state.restore import restore_state
from holdfast._store.folder.layout import MANIFEST
from holdfast._store.format import manifest
from holdfast._store.read import files
from holdfast._store.read.merge_ranks import FileSource, read_checkpoint
from holdfast._store.read.verify import find_damage, read_manifest
from holdfast._tools.cli.checkpoints import list_with_reasons, verify_all
from holdfast._tools.convert.export import export
from holdfast._tools.convert.writers import ExportRequest
from tests.linked_files import link_unchanged, make_checkpoint

FROZEN = np.arange(3_000_001, dtype=np.float32)


def state_of(step: int) -> dict[str, Any]:
    changed = np.full(1001, step, dtype=np.float64)
    return {"frozen": FROZEN.copy(), "a": changed, "small": np.arange(7, dtype=np.int8), "n": step}


@pytest.fixture
def linked(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of step 8, and one of step 9 that has most of it by a link."""
    return make_linked(folder)


def make_linked(folder: Path) -> tuple[Path, Path]:
    older = make_checkpoint(folder, 8, [state_of(8), state_of(8)])
    newer = make_checkpoint(folder, 9, [state_of(9), state_of(9)])
    link_unchanged(newer, older)
    written = [sum(f.size_bytes for f in read_manifest(each).files) for each in (newer, older)]
    assert written[0] < written[1] / 5
    assert read_manifest(newer).size_bytes == read_manifest(older).size_bytes
    return older, newer


def restored(folder: Path, rank: int = 0) -> dict[str, Any]:
    state = state_of(0)
    state["frozen"][:] = 0
    restore_state(state, read_checkpoint(folder, rank))
    return state


def is_state_of(step: int, state: dict[str, Any]) -> bool:
    expected = state_of(step)
    return all(np.array_equal(state[name], expected[name]) for name in expected)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)  # into the file that all its links share


@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_read_as_any_other(linked, rank):
    assert is_state_of(9, restored(linked[1], rank))


@pytest.mark.parametrize("way", ["through the cache", "past it"])
def test_the_way_of_reading_does_not_matter(on_disk, way, monkeypatch):
    linked = make_linked(on_disk / "run")
    held = int(way == "through the cache")
    monkeypatch.setattr(files, "resident_pages", lambda _, size: bytes([held]) * (size // 4096 + 1))
    monkeypatch.setattr(files, "_PIECE_BYTES", 1 << 16)
    assert is_state_of(9, restored(linked[1]))
    assert is_state_of(8, restored(linked[0]))


def test_it_stays_whole_without_the_older_one_and_as_a_copy(linked, tmp_path):
    older, newer = linked
    shutil.rmtree(older)
    shutil.copytree(newer, tmp_path / "copy")
    assert find_damage(newer) == find_damage(tmp_path / "copy") == []
    assert is_state_of(9, restored(tmp_path / "copy"))


def test_what_another_rank_has_is_read_part_by_part(linked):
    file = read_manifest(linked[1]).files[1]
    source = FileSource(linked[1], file)
    names = [spec.name for spec in source.plan.specs]
    assert bytes(source.data(names.index("frozen"))) == FROZEN.tobytes()
    assert source.head["step"] == 9


def test_damage_in_a_shared_file_is_named_for_both(linked):
    older, newer = linked
    file = read_manifest(newer).files[0]
    frozen = next(part for part in file.parts if part.name == "frozen")
    flip(newer / frozen.file, frozen.offset + 5_000_000)
    assert find_damage(older) == ["rank-00000.safetensors: tensor frozen is damaged"]
    assert find_damage(newer) == [
        f"rank-00000.safetensors: tensor frozen is damaged (in {frozen.file})"
    ]
    with pytest.raises(DamagedCheckpoint, match=rf"{frozen.file}: tensor frozen has checksum"):
        read_checkpoint(newer)
    source = FileSource(newer, file)
    with pytest.raises(DamagedCheckpoint, match="frozen is damaged"):
        source.data([spec.name for spec in source.plan.specs].index("frozen"))


def test_what_no_part_names_may_be_stale(linked):
    older, newer = linked
    part = next(part for part in read_manifest(older).files[0].parts if part.name == "a")
    flip(older / "rank-00000.safetensors", part.offset)
    assert find_damage(older) == ["rank-00000.safetensors: tensor a is damaged"]
    assert find_damage(newer) == []
    assert is_state_of(9, restored(newer))


@pytest.mark.parametrize("where", ["wrapper", "own header", "a", "scalars"])
def test_damage_in_its_own_file_is_found(linked, where):
    newer = linked[1]
    file = read_manifest(newer).files[0]
    part = {
        "wrapper": file.wrapper,
        "own header": file.parts[0],
        "a": next(part for part in file.parts if part.name == "a"),
        "scalars": file.parts[-1],
    }[where]
    flip(newer / file.name, part.offset + part.size_bytes // 2)
    assert len(find_damage(newer)) == 1
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(newer)


@pytest.mark.parametrize("how", ["missing", "cut short"])
def test_a_linked_file_that_is_not_there_is_damage(linked, how):
    newer = linked[1]
    name = read_manifest(newer).files[0].linked[0].name
    if how == "missing":
        (newer / name).unlink()
    else:
        os.truncate(newer / name, 4096)
    assert any(name in line for line in find_damage(newer))
    with pytest.raises(DamagedCheckpoint, match=name):
        read_checkpoint(newer)


@pytest.mark.parametrize("other", ["../{}", "/{}", "..", "a\\u0000b"])
def test_no_manifest_leads_out_of_its_folder(linked, other):
    newer = linked[1]
    data = (newer / MANIFEST).read_bytes()
    inner = data[data.index(b'"manifest": ') + 12 : -2]
    name = read_manifest(newer).files[0].linked[0].name
    (newer / MANIFEST).write_bytes(
        manifest.seal(inner.replace(name.encode(), other.format(name).encode()))
    )
    with pytest.raises(DamagedCheckpoint, match="something that is not a file"):
        read_checkpoint(newer)
    assert "something that is not a file" in find_damage(newer)[0]


def test_ls_verify_and_export_see_through_it(linked, folder, tmp_path):
    assert [each.damage for each in verify_all(folder)] == [[], []]
    sizes = [each.size_bytes for each in list_with_reasons(folder).checkpoints]
    assert sizes[0] == sizes[1]
    out = tmp_path / "out.safetensors"
    assert export(folder, ExportRequest(out)).chosen.step == 9
    data = out.read_bytes()
    assert FROZEN.tobytes() in data
    assert np.full(1001, 9, dtype=np.float64).tobytes() in data
