"""The manifest tells any damage to itself from what was written."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._record import manifest
from holdfast._record.manifest import DataFile, Manifest, Part

texts = st.text(max_size=12)
numbers = st.integers(0, 2**63)
parts = st.builds(Part, texts, numbers, numbers, st.text("0123456789abcdef", min_size=32))
manifests = st.builds(
    Manifest,
    run_id=texts,
    attempt=numbers,
    step=numbers,
    reason=texts,
    saved_at=st.floats(0, 4e9),
    files=st.lists(
        st.builds(DataFile, texts, numbers, st.lists(parts, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    metrics=st.dictionaries(texts, st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    holdfast=texts,
)


@given(manifests)
def test_what_was_written_is_what_is_read(written):
    assert manifest.parse(written.to_bytes(), "here") == written


@settings(max_examples=150)
@given(manifests, st.data())
def test_any_flipped_bit_is_found_or_changes_nothing(written, data):
    damaged = bytearray(written.to_bytes())
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << (at % 8)
    with contextlib.suppress(holdfast.DamagedCheckpoint):
        assert manifest.parse(bytes(damaged), "here") == written


def test_every_single_flipped_bit_of_one_manifest_is_found_or_changes_nothing():
    part = Part("model.w", 4096, 64, "ab" * 16)
    written = Manifest("r", 1, 2, "stop", 1.5, (DataFile("f", 8192, (part,)),), {"loss": 0.5})
    whole = written.to_bytes()
    found = 0
    for at in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << (at % 8)
        try:
            assert manifest.parse(bytes(damaged), "here") == written
        except holdfast.DamagedCheckpoint:
            found += 1
    assert found > len(whole) * 6  # blanks between the values are all that may change


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


@pytest.mark.parametrize(
    "body",
    [
        {"format": 1},
        {"format": 1, "files": 5},
        {"format": 1, "files": [], "unknown": 1},
        {"format": 1, "files": [{"name": "x", "size_bytes": 1, "parts": [{"name": 1}]}]},
        [],
        "text",
    ],
)
def test_a_body_with_a_right_checksum_and_a_wrong_shape_is_damaged(body):
    text = json.dumps({"manifest": body, "xxh3_128": manifest._checksum(body)})
    with pytest.raises(holdfast.DamagedCheckpoint):
        manifest.parse(text.encode(), "here")


def test_another_version_is_named_as_such():
    body = {**json.loads(Manifest("r", 1, 2, "x", 0.0, ()).to_bytes())["manifest"], "format": 99}
    text = json.dumps({"manifest": body, "xxh3_128": manifest._checksum(body)})
    with pytest.raises(holdfast.UnreadableCheckpoint, match="another version"):
        manifest.parse(text.encode(), "here")


def test_the_size_is_that_of_all_files():
    files = (DataFile("a", 5, ()), DataFile("b", 7, ()))
    assert Manifest("r", 1, 2, "x", 0.0, files).size_bytes == 12
