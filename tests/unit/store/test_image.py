"""The image is a safetensors file without gaps, aligned, and its header says all."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._store.format.image import (
    PAGE,
    SCALARS,
    TensorSpec,
    decode_scalars,
    encode_scalars,
    parse_header,
    plan_image,
    read_extents,
)
from holdfast.torch.adapter import ADAPTER as adapter

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.uint64,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10).filter(
        lambda name: name not in ("__metadata__", SCALARS)
    ),
    unique=True,
    max_size=8,
)


@st.composite
def tensors(draw):
    """Named tensors with random bits."""
    found = {}
    for name in draw(names):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
        if dtype is torch.bool:
            raw &= 1
        found[name] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return found


def specs_of(found):
    return [adapter.spec(name, tensor) for name, tensor in found.items()]


def raw_bytes(tensor):
    return bytes(adapter.bytes_of(tensor))


def build(found, scalars=b"{}"):
    plan = plan_image(specs_of(found), len(scalars))
    image = bytearray(plan.size_bytes)
    image[: len(plan.header)] = plan.header
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        image[offset : offset + spec.size_bytes] = raw_bytes(found[spec.name])
    at = plan.scalars.offset
    image[at : at + plan.scalars.size_bytes] = scalars.ljust(plan.scalars.size_bytes)
    return plan, bytes(image)


@given(tensors(), st.integers(0, 20_000))
def test_extents_cover_the_file_without_a_gap(found, scalars_bytes):
    plan = plan_image(specs_of(found), scalars_bytes)
    position = 0
    for extent in plan.extents():
        assert extent.offset == position
        position += extent.size_bytes
    assert position == plan.size_bytes
    assert read_extents(plan.header) == plan.extents()  # also of several that are empty
    assert plan.size_bytes % PAGE == 0
    assert len(plan.header) % PAGE == 0
    assert plan.scalars.size_bytes >= scalars_bytes


@given(tensors())
def test_every_tensor_is_aligned_to_its_item(found):
    plan = plan_image(specs_of(found), 10)
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        assert offset % spec.item_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=8))
def test_items_of_odd_sizes_disturb_nobody_elses_alignment(items):
    specs = [
        TensorSpec(f"t{i}", "numpy", f"|S{size}", "U8", (count,), None, size, size * count)
        for i, (size, count) in enumerate(items)
    ]
    plan = plan_image(specs, 0)
    for spec, offset in zip(plan.specs, plan.offsets, strict=True):
        if spec.item_bytes in (1, 2, 4, 8, 16):
            assert offset % spec.item_bytes == 0


@given(tensors(), st.integers(0, 20_000))
def test_the_header_gives_back_the_plan_it_was_made_from(found, scalars_bytes):
    plan = plan_image(specs_of(found), scalars_bytes)
    assert parse_header(plan.header) == plan


@settings(max_examples=50)
@given(tensors())
def test_a_real_safetensors_reader_opens_it_and_gives_the_same_tensors(tmp_path_factory, found):
    _, image = build(found, encode_scalars({"step": 3}))
    path = tmp_path_factory.mktemp("image") / "x.safetensors"
    path.write_bytes(image)
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == {*found, SCALARS}
    for name, tensor in found.items():
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)
        if tensor.dtype is not torch.complex128:  # which safetensors lacks
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "holdfast-1"
        assert json.loads(bytes(file.get_tensor(SCALARS).tolist())) == {"step": 3}


def test_a_type_that_safetensors_lacks_is_stored_as_its_bytes():
    spec = adapter.spec("z", torch.zeros(2, 3, dtype=torch.complex128))
    assert (spec.stored_as, spec.stored_shape) == ("U8", (2, 3, 16))


def test_scalars_have_room_to_grow_before_a_new_plan_is_needed():
    assert plan_image([], 5000).scalars.size_bytes >= 10_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_scalars_come_back_from_their_padded_range(value):
    assert decode_scalars(memoryview(encode_scalars(value).ljust(9000))) == value


@pytest.mark.parametrize("data", [b"[]", b"3", b"", b"{", b"\xff\xff"])
def test_scalars_that_are_no_object_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011  in whatever words
        decode_scalars(memoryview(data))


def header_of(text):
    return len(text).to_bytes(8, "little") + text


GOOD = json.loads(plan_image([adapter.spec("w", torch.zeros(4))], 0).header[8:])


def changed(**metadata_or_entries):
    return header_of(json.dumps({**GOOD, **metadata_or_entries}).encode())


def own(*rows):
    return {"__metadata__": {"format": "holdfast-1", "specs": json.dumps(rows)}}


W = GOOD["w"]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        header_of(b""),
        header_of(b"\x80\x04\x95pickle"),
        header_of(b'"text"'),
        header_of(b"7"),
        header_of(b"null"),
        header_of(b"[]"),
        header_of(b"{}"),
        header_of(b"[" * 100_000),
        header_of(b'{"__metadata__": []}'),
        changed(__metadata__={"format": "another", "specs": "[]"}),
        changed(__metadata__={"format": "holdfast-1", "specs": "7"}),
        changed(__metadata__={"format": "holdfast-1", "specs": 7}),
        changed(__metadata__={"format": "holdfast-1", "specs": "[" * 100_000}),
        changed(**own([1, 2])),
        changed(**own(["absent", "torch", "float32", [4], None, 4])),
        changed(**own([["w"], "torch", "float32", [4], None, 4])),
        changed(**own(["w", "torch", "float32", 4, None, 4])),
        changed(**own(["w", "torch", "float32", [1 << 60], None, 4])),
        changed(**own(["w", "torch", "float32", [-4], None, -4])),
        changed(**own(["w", "torch", "float32", [4], None, 0])),
        changed(**own(["w", "torch", "float32", ["4"], None, 4])),
        changed(**own(["w", "torch", "float32", [4], ["1"], 4])),
        changed(**own(["w", 3, "float32", [4], None, 4])),
        changed(w={**W, "data_offsets": [0, 1 << 60]}),
        changed(w={**W, "data_offsets": [-16, 0]}),
        changed(w={**W, "data_offsets": [16, 0]}),
        changed(w={**W, "data_offsets": [0, 16.0]}),
        changed(w={**W, "data_offsets": [0, 1e999]}),
        changed(w={**W, "data_offsets": "ab"}),
        changed(w={**W, "data_offsets": [4, 20]}),
        changed(**{SCALARS: {**GOOD[SCALARS], "data_offsets": [0, 4096]}}),
        changed(**{SCALARS: {**GOOD[SCALARS], "data_offsets": [16, 8]}}),
        changed(**{SCALARS: None}),
    ],
)
def test_a_header_that_is_none_of_ours_is_a_value_error_and_nothing_else(header):
    with pytest.raises(ValueError):  # noqa: PT011  in whatever words
        parse_header(header)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_header_is_a_value_error_or_still_a_plan_that_covers_its_file(data):
    header = bytearray(plan_image([adapter.spec("w", torch.zeros(4))], 0).header)
    text_end = bytes(header).rindex(b"}") + 1
    at = data.draw(st.integers(8 * 8, text_end * 8 - 1))
    header[at // 8] ^= 1 << (at % 8)
    try:
        plan = parse_header(bytes(header))
    except ValueError:
        return
    position = 0
    for extent in plan.extents():
        assert extent.offset == position
        position += extent.size_bytes
