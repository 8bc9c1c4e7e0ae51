"""Tensors of every type, layout and sharing come back to the bit."""

from __future__ import annotations

import struct
import warnings

import pytest
import safetensors.torch
import torch

from tests.frameworks.roundtrip import assert_same, bits, data_file, restore, round_trip, store

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38, -1.5]
WORDS = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, -1], dtype=torch.int32)
BYTES = torch.arange(256, dtype=torch.uint8)


def examples():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield dtype, torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    yield "NaN payloads", WORDS.view(torch.float32)
    yield "every bit pattern of bf16", torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    ):
        yield dtype, BYTES.clone().view(dtype)
    yield torch.bool, torch.tensor([True, False, True])
    yield "no dimension", torch.tensor(-0.0)
    yield "no dimension, bool", torch.tensor(True)
    yield "no element", torch.empty(0)
    yield "no element, shaped", torch.empty(3, 0, 2, dtype=torch.int64)


EXAMPLES = {str(name).removeprefix("torch."): tensor for name, tensor in examples()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """All examples in one checkpoint: taken back in place, and as new tensors."""
    folder = tmp_path_factory.mktemp("dtypes") / "run"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")  # torch's own, of complex32
        store(folder, value=EXAMPLES)
        live = {
            name: torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8)
            .view(t.dtype)
            .view(t.shape)
            if t.numel()
            else torch.empty_like(t)
            for name, t in EXAMPLES.items()
        }
        before = dict(live)
        in_place = restore(folder, value=live)["value"]
        fresh = restore(folder, value={})["value"]
    return folder, before, in_place, fresh


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_tensor_of_any_type_comes_back_in_place_to_the_bit(stored, name):
    _, before, in_place, _ = stored
    assert in_place[name] is before[name]
    assert_same(in_place[name], EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_tensor_of_any_type_comes_back_as_a_new_one_to_the_bit(stored, name):
    assert_same(stored[3][name], EXAMPLES[name])


def test_any_safetensors_reader_can_open_the_checkpoint(stored):
    loaded = safetensors.torch.load_file(data_file(stored[0]))
    for name, tensor in EXAMPLES.items():
        assert bits(loaded[f"value.{name}"]) == bits(tensor), name


LAYOUTS = {
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 7).t(),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "every other column": torch.randn(6, 8)[:, ::2],
    "offset": torch.randn(10)[3:7],
    "one column": torch.randn(5, 3)[:, 1],
}


EXPANDED = {
    "columns": torch.randn(3, 1).expand(3, 4),
    "everything": torch.tensor(2.5).expand(2, 3),
    "one number": torch.randn(1).expand(5),
}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """All layouts in one checkpoint: taken back in place, and as new tensors."""
    folder = tmp_path_factory.mktemp("layouts") / "run"
    store(folder, value={**LAYOUTS, **EXPANDED})
    live = {name: torch.zeros_like(tensor) for name, tensor in LAYOUTS.items()}
    live |= {
        name: torch.zeros(1).as_strided((1,) * tensor.dim(), (0,) * tensor.dim()).expand_as(tensor)
        if name != "columns"
        else torch.zeros(3, 1).expand(3, 4)
        for name, tensor in EXPANDED.items()
    }
    held = dict(live)
    restored = restore(folder, value=live)["value"]
    return restored, held, restore(folder, value={})["value"]


@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDED])
def test_values_and_strides_of_a_tensor_are_kept(laid_out, name):
    tensor = {**LAYOUTS, **EXPANDED}[name]
    in_place, held, fresh = laid_out
    assert_same(fresh[name], tensor)
    assert fresh[name].stride() == tensor.stride()
    assert in_place[name] is held[name]
    assert_same(held[name], tensor)


def test_memory_that_was_told_apart_is_not_made_one(tmp_path):
    saved, live = torch.randn(3, 4), torch.zeros(3, 1).expand(3, 4)
    assert_same(round_trip(tmp_path / "run", {"t": saved}, {"t": live})["t"], saved)


def test_a_tensor_whose_elements_overlap_comes_back_with_its_values(tmp_path):
    windows = torch.arange(6.0).unfold(0, 3, 1)
    assert_same(round_trip(tmp_path / "run", {"t": windows}, {})["t"], windows)


def test_conjugated_and_negated_views_come_back_with_the_values_that_are_seen(tmp_path):
    z = torch.randn(3, dtype=torch.complex64)
    saved = {"z": z, "conj": z.conj(), "neg": z.conj().imag}
    fresh = round_trip(tmp_path / "run", saved, {})
    for name, tensor in saved.items():
        assert torch.equal(fresh[name], tensor), name
    live = {"z": torch.zeros(3, dtype=torch.complex64), "conj": torch.zeros_like(z).conj()}
    store(tmp_path / "live", value={"z": z, "conj": z.clone().conj()})
    restore(tmp_path / "live", value=live)
    assert torch.equal(live["conj"], z.conj())


def test_a_leaf_that_requires_grad_is_restored_in_place_and_still_does(tmp_path):
    saved = torch.randn(4, requires_grad=True)
    live = torch.zeros(4, requires_grad=True)
    assert round_trip(tmp_path / "run", saved, live) is live
    assert_same(live, saved)
    assert live.requires_grad
    assert live.is_leaf
    live.sum().backward()
    assert live.grad is not None


def test_a_tensor_of_a_graph_is_stored_without_it(tmp_path):
    saved = torch.randn(4, requires_grad=True) * 2
    fresh = round_trip(tmp_path / "run", {"t": saved}, {})["t"]
    assert_same(fresh, saved)
    assert not fresh.requires_grad


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 200)
        self.head = torch.nn.Linear(200, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_still_tied_after_the_resume(tmp_path):
    saved, fresh = Tied(), Tied()
    round_trip(tmp_path / "run", saved, fresh)
    assert fresh.head.weight is fresh.embed.weight
    assert_same(fresh.head.weight, saved.embed.weight)
    weight_bytes = 50 * 200 * 4
    assert data_file(tmp_path / "run").stat().st_size < 1.8 * weight_bytes


def test_one_tensor_under_two_names_stays_one_tensor(tmp_path):
    shared = torch.randn(8)
    fresh = round_trip(tmp_path / "run", {"a": shared, "b": [shared]}, {})
    assert fresh["a"] is fresh["b"][0]
    assert_same(fresh["a"], shared)


def test_equal_tensors_with_memory_of_their_own_stay_apart(tmp_path):
    fresh = round_trip(tmp_path / "run", {"a": torch.ones(8), "b": torch.ones(8)}, {})
    fresh["a"].zero_()
    assert torch.equal(fresh["b"], torch.ones(8))


@pytest.mark.parametrize(
    "names",
    [("holdfast", "scalars"), ("holdfast", "generators"), ("header", "x"), ("a.b", "~2")],
)
def test_no_name_that_a_user_may_choose_collides_with_our_own(tmp_path, names):
    tensor = torch.randn(3)
    outer, inner = names
    store(tmp_path / "run", **{outer: {inner: tensor, "torch": tensor + 1}}, plain=tensor + 2)
    fresh = restore(tmp_path / "run", **{outer: {}}, plain=torch.zeros(3))
    assert_same(fresh[outer][inner], tensor)
    assert_same(fresh[outer]["torch"], tensor + 1)
    assert_same(fresh["plain"], tensor + 2)


@pytest.mark.parametrize("name", ["__metadata__", "header", "holdfast.scalars", "tree", "step"])
def test_a_tensor_may_have_any_name(tmp_path, name):
    tensor = torch.tensor(struct.unpack("4f", bytes(range(16))))
    store(tmp_path / "run", **{name: tensor})
    assert_same(restore(tmp_path / "run", **{name: torch.zeros(4)})[name], tensor)


def test_two_paths_that_read_the_same_keep_their_own_tensors(tmp_path):
    saved = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, "a.b~2": torch.full((2,), 7.0)}
    fresh = round_trip(tmp_path / "run", saved, {})
    assert_same(fresh["a.b"], saved["a.b"])
    assert_same(fresh["a"]["b"], saved["a"]["b"])
    assert_same(fresh["a.b~2"], saved["a.b~2"])
