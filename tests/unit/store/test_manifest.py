"""The manifest tells any damage to itself from what was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._store.format import manifest
from holdfast._store.format.manifest import DataFile, Linked, Manifest, Part

texts = st.text(max_size=12)
numbers = st.integers(0, 2**50)
checksums = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def data_files(draw):
    linked = draw(st.lists(st.builds(Linked, texts.filter(bool), numbers), max_size=2))
    linked = tuple({item.name: item for item in linked}.values())
    wrapper = draw(st.none() | st.builds(Part, texts, st.just(0), numbers, checksums, st.just("")))
    end = 0 if wrapper is None else wrapper.size_bytes
    parts = []
    for part in draw(st.lists(texts, max_size=3, unique=True)):
        file = draw(st.sampled_from([None, *linked]))
        if file is None:
            parts.append(Part(part, end, draw(numbers), draw(checksums)))
            end += parts[-1].size_bytes
        else:
            offset = draw(st.integers(0, file.size_bytes))
            size = draw(st.integers(0, file.size_bytes - offset))
            parts.append(Part(part, offset, size, draw(checksums), file.name))
    names = {"", *(item.name for item in linked)}
    name = draw(texts.filter(lambda name: name not in names))
    return DataFile(name, end, tuple(parts), linked, wrapper)


manifests = st.builds(
    Manifest,
    run_id=texts,
    attempt=numbers,
    step=numbers,
    reason=texts,
    saved_at=st.floats(0, 4e9),
    files=st.lists(data_files(), max_size=2, unique_by=lambda file: file.name).map(tuple),
    metrics=st.dictionaries(texts, st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    holdfast=texts,
)


@given(manifests)
def test_what_was_written_is_what_is_read(written):
    assert manifest.parse(written.to_bytes(), "here") == written


@settings(max_examples=150)
@given(manifests, st.data())
def test_any_flipped_bit_is_found(written, data):
    damaged = bytearray(written.to_bytes())
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << (at % 8)
    with pytest.raises(holdfast.DamagedCheckpoint):
        manifest.parse(bytes(damaged), "here")


def test_every_single_flipped_bit_of_one_manifest_is_found():
    part = Part("model.w", 0, 64, "ab" * 16)
    written = Manifest("r", 1, 2, "stop", 1.5, (DataFile("f", 64, (part,)),), {"loss": 0.5})
    whole = written.to_bytes()
    assert manifest.parse(whole, "here") == written
    for at in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << (at % 8)
        with pytest.raises(holdfast.DamagedCheckpoint):
            manifest.parse(bytes(damaged), "here")


@given(manifests, st.data())
def test_a_manifest_that_was_cut_short_is_damaged(written, data):
    whole = written.to_bytes()
    with pytest.raises(holdfast.DamagedCheckpoint, match="here: the manifest is damaged"):
        manifest.parse(whole[: data.draw(st.integers(0, len(whole) - 1))], "here")


@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(data):
    with pytest.raises(holdfast.DamagedCheckpoint):
        manifest.parse(data, "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"manifest"',
        b"1e999",
        b'{"manifest": null}',
        b'{"manifest": [], "xxh3_128": []}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
    ],
)
def test_json_that_is_no_manifest_is_damaged_and_nothing_else(data):
    with pytest.raises(holdfast.DamagedCheckpoint):
        manifest.parse(data, "here")


FILE = {
    "name": "own",
    "size_bytes": 4,
    "names": ["header", "w"],
    "offsets": [0, 4],
    "sizes": [4, 6],
    "checksums": "0" * 64,
    "linked": [["other", 10]],
    "in": [0, 1],
}
WRONG: list[dict[str, object]] = [
    {"name": 5},
    {"size_bytes": "10"},
    {"size_bytes": -1},
    {"names": ["header", 5]},
    {"offsets": [0, -4]},
    {"offsets": [0, "4"]},
    {"sizes": [4, 6.0]},
    {"sizes": [True, 6]},
    {"checksums": "0" * 96},
    {"linked": [["own", 5]]},
    {"linked": [["other", 5], ["other", 6]]},
    {"linked": [[7, 5]]},
    {"linked": [["other", -5]]},
    {"in": [0, 2]},
    {"wrapper": ["wrapper", 0, 4, "0" * 32, "elsewhere"]},
    {"wrapper": ["wrapper", None, 4, "0" * 32]},
    {"size_bytes": 1 << 40},
    {"offsets": [1, 4]},
    {"offsets": [0, 5]},
    {"offsets": [0, 2**70]},
    {"names": ["w", "w"]},
    {"checksums": "g" * 64},
]


BODY = {**json.loads(Manifest("r", 1, 2, "x", 0.0, ()).to_bytes())["manifest"], "files": [FILE]}
WRONG_BODIES: list[dict[str, object]] = [
    {"saved_at": "now"},
    {"saved_at": float("nan")},
    {"saved_at": 10**400},
    {"metrics": []},
    {"metrics": {"loss": "small"}},
    {"step": -1},
    {"attempt": 2**70},
    {"reason": None},
    {"origin": [1]},
    {"origin": [1, "2"]},
    {"files": [FILE, FILE]},
]


def test_what_the_wrong_shapes_differ_from_is_right():
    found = manifest.parse(manifest.seal(json.dumps(BODY).encode()), "here")
    assert [part.file for part in found.files[0].parts] == ["", "other"]


@pytest.mark.parametrize(
    "body",
    [
        {"format": 2},
        {"format": 2, "files": 5},
        {"format": 2, "files": [], "unknown": 1},
        {"format": 2, "files": [{"name": "x", "size_bytes": 1}]},
        *({**BODY, **wrong} for wrong in WRONG_BODIES),
        {"format": 2, "files": [{"name": "x", "size_bytes": 1, "names": ["a"], "offsets": []}]},
        *({**BODY, "files": [{**FILE, **wrong}]} for wrong in WRONG),
        [],
        "text",
    ],
)
def test_a_body_with_a_right_checksum_and_a_wrong_shape_is_damaged(body):
    with pytest.raises(holdfast.DamagedCheckpoint):
        manifest.parse(manifest.seal(json.dumps(body).encode()), "here")


def test_another_version_is_named_as_such():
    body = {**json.loads(Manifest("r", 1, 2, "x", 0.0, ()).to_bytes())["manifest"], "format": 99}
    with pytest.raises(holdfast.UnreadableCheckpoint, match="another version"):
        manifest.parse(manifest.seal(json.dumps(body).encode()), "here")


def test_the_size_is_that_of_the_state_and_not_of_what_was_written():
    parts = (Part("header", 0, 5, "a" * 32), Part("x", 0, 7, "b" * 32, "before"))
    files = (DataFile("a", 5, parts, (Linked("before", 100),)), DataFile("b", 7, parts[:1]))
    found = Manifest("r", 1, 2, "x", 0.0, files)
    assert found.size_bytes == 17
