"""A capture that remembers the one before gives what a first one would, whatever has changed."""

from __future__ import annotations

import contextlib
import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._adapters.registry import adapter_of
from holdfast._errors import UnstorableState
from holdfast._state.capture import Captured, capture, capture_generators
from holdfast._state.capture_cache import CaptureCache, _StoredElsewhere
from holdfast.torch.modules import flat_state


class Colour(enum.IntEnum):
    RED = 1


class Counter:
    """An object with a state of its own, and an answer that changes with every question."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked, "fresh": torch.full((3,), float(self.asked))}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


def some_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4, bias=False),
        torch.nn.BatchNorm1d(4),
        torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shared = torch.arange(6.0).view(2, 3)
    return {
        "model": model,
        "optimizer": optimizer,
        "plain": {"a": torch.ones(2), "b": shared, "c": shared, "n": np.arange(3), "s": 1.5},
        "rows": {number: {"x": torch.zeros(2), "y": torch.ones(1)} for number in range(10)},
        "items": [torch.zeros(1), (1, 2, None), "word", [1, 2, 3], {4, 5}, b"few", b"many" * 400],
        "ordered": OrderedDict(x=torch.zeros(0), y=torch.ones(2, 3).t()),
        "generator": torch.Generator(),
    }


def first(state: dict[str, Any]) -> torch.nn.Linear:
    layer = state["model"][0]
    assert isinstance(layer, torch.nn.Linear)
    return layer


def tie(state: dict[str, Any]) -> None:
    one, other = state["model"][2]
    other.weight = one.weight


def untie(state: dict[str, Any]) -> None:
    one, other = state["model"][2]
    other.weight = torch.nn.Parameter(one.weight.detach().clone())


def replace_memory(state: dict[str, Any]) -> None:
    first(state).weight.data = first(state).weight.data.clone()


def replace_all_memory(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone()


def share_memory(state: dict[str, Any]) -> None:
    one, other = state["model"][2]
    other.weight.data = one.weight.data


def another_type(state: dict[str, Any]) -> None:
    first(state).weight.data = first(state).weight.data.double()


def another_view(state: dict[str, Any]) -> None:
    first(state).weight.data = first(state).weight.data.view(-1).view(2, 6)


def turn_in_place(state: dict[str, Any]) -> None:
    state["plain"]["b"].t_()


def add_group(state: dict[str, Any]) -> None:
    extra = torch.nn.Parameter(torch.ones(2))
    state["optimizer"].add_param_group({"params": [extra], "lr": 0.5})


def forget_moments(state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


def new_rate(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["lr"] *= 0.5


def train(state: dict[str, Any]) -> None:
    # After `another_view` a weight has another shape than its moments.
    with contextlib.suppress(RuntimeError):
        state["optimizer"].step()
    state["model"].train(not state["model"].training)


def add_hook(state: dict[str, Any]) -> None:
    def rename(_module: Any, found: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        for key in list(found):
            found[f"{key}_renamed"] = found.pop(key)

    state["model"].register_state_dict_post_hook(rename)


def override(state: dict[str, Any]) -> None:
    def own(*_: Any, destination: dict[str, Any], prefix: str, **__: Any) -> dict[str, Any]:
        destination[f"{prefix}own"] = torch.ones(1)
        return destination

    vars(first(state))["state_dict"] = own


def drop_buffer(state: dict[str, Any]) -> None:
    norm = state["model"][1]
    norm._non_persistent_buffers_set ^= {"running_var"}


def toggle_bias(state: dict[str, Any]) -> None:
    layer = first(state)
    bias = torch.nn.Parameter(torch.zeros(4)) if layer.bias is None else None
    layer.register_parameter("bias", bias)


def freeze(state: dict[str, Any]) -> None:
    first(state).weight.requires_grad_(not first(state).weight.requires_grad)


def new_version(state: dict[str, Any]) -> None:
    first(state)._version += 1


def swap_keys(state: dict[str, Any]) -> None:
    state["plain"] = dict(reversed(state["plain"].items()))


def put(path: str, key: Any, value: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        state[path][key] = value()

    edit.__name__ = f"{path}[{key!r}]"
    return edit


EDITS: list[Callable[[dict[str, Any]], None]] = [
    tie, untie, replace_memory, replace_all_memory, share_memory, another_type, another_view,
    turn_in_place, add_group, forget_moments, new_rate, train, add_hook, override, drop_buffer,
    toggle_bias, freeze, new_version, swap_keys,
    put("plain", "s", lambda: 2.5),
    put("plain", "s", lambda: float("nan")),
    put("plain", "s", lambda: True),
    put("plain", "s", lambda: 1 << 2000),
    put("plain", "s", lambda: Colour.RED),
    put("plain", "s", lambda: torch.float16),
    put("plain", "s", lambda: [1, 2]),
    put("plain", "s", lambda: torch.ones(2)),
    put("plain", "a", lambda: torch.ones(2)),
    put("plain", "a", lambda: torch.ones(5)),
    put("plain", "a", lambda: torch.nn.Parameter(torch.ones(2))),
    put("plain", "n", lambda: np.arange(3)),
    put("plain", "n", lambda: np.arange(3.0)),
    put("plain", "n", lambda: np.float32(3)),
    put("plain", "new", lambda: 0),
    put("plain", "$t", lambda: 0),
    put("plain", 7, lambda: 0),
    put("plain", (1, 2), lambda: torch.ones(1)),
    put("rows", 3, lambda: {"x": torch.zeros(2), "y": torch.ones(1)}),
    put("rows", 3, lambda: {"y": torch.zeros(2), "x": torch.ones(1)}),
    put("rows", 3, lambda: {"x": torch.zeros(2), "y": 3}),
    put("rows", "3", lambda: {"x": torch.zeros(2), "y": torch.ones(1)}),
    put("items", 1, lambda: [1, 2, None]),
    put("items", 1, lambda: (1, 2, None, 3)),
    put("items", 3, lambda: (1, 2, 3)),
    put("items", 3, lambda: [1, 2, "3"]),
    put("items", 3, lambda: [1, 1 << 2000]),
    put("items", 4, lambda: {4, 5, 6}),
    put("items", 4, lambda: frozenset({4, 5})),
    put("items", 5, lambda: bytearray(b"few")),
    put("items", 6, lambda: b"even more" * 400),
    put("items", 6, lambda: b"less"),
    put("items", 2, Counter),
    put("ordered", "x", lambda: torch.zeros(0, 2)),
    put("ordered", "y", lambda: torch.ones(3, 2)),
]  # fmt: skip


def assert_same(found: Captured, expected: Captured) -> None:
    assert found.specs == expected.specs
    assert found.scalars({"head": 1}) == expected.scalars({"head": 1})
    assert found.tree == expected.tree
    pairs = zip(found.specs, found.values, expected.values, strict=True)
    for spec, value, wanted in pairs:
        adapter = adapter_of(spec.kind)
        assert bytes(adapter.bytes_of(value)) == bytes(adapter.bytes_of(wanted))
    for spec, value, address in zip(
        found.specs, found.values, found.addresses or [0] * len(found.specs), strict=True
    ):
        if address:
            assert address == value.data_ptr()
            assert value.is_contiguous()
            assert spec.size_bytes == value.numel() * value.element_size()


def look(recall: CaptureCache, state: dict[str, Any]) -> Captured:
    # One that answers differently each time is set back, so that both are told the same.
    counters = [each for each in state["items"] if isinstance(each, Counter)]
    extra = {"generators": capture_generators(), "position": {"step": 3}}
    asked = [each.asked for each in counters]
    found = recall.capture(state, extra)
    for each, count in zip(counters, asked, strict=True):
        assert each.asked == count + 1
        each.asked = count
    assert_same(found, capture(state, extra))
    return found


@pytest.mark.nightly
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(EDITS), max_size=6))
def test_any_edits_are_seen(edits: list[Callable[[dict[str, Any]], None]]) -> None:
    state, recall = some_state(), CaptureCache()
    look(recall, state)
    look(recall, state)
    for edit in edits:
        edit(state)
        look(recall, state)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_each_edit_is_seen_and_then_remembered(edit: Callable[[dict[str, Any]], None]) -> None:
    state, recall = some_state(), CaptureCache()
    look(recall, state)
    edit(state)
    look(recall, state)
    look(recall, state)


def test_what_has_not_changed_is_the_same_object() -> None:
    state, recall = some_state(), CaptureCache()
    del state["generator"]  # which gives another tensor each time
    look(recall, state)
    before = look(recall, state)
    train(state)
    new_rate(state)
    after = look(recall, state)
    assert after.specs is before.specs
    assert after.addresses is before.addresses
    assert before.scalars({}) != after.scalars({})  # the rate
    assert sum(map(bool, after.addresses or ())) > 20


def test_tensors_that_are_made_anew_each_time_keep_the_layout() -> None:
    state, recall = some_state(), CaptureCache()
    state["items"][2] = Counter()
    before = look(recall, state)
    for _ in range(4):
        after = look(recall, state)
        assert after.specs is before.specs


def test_a_state_that_moves_as_a_whole_each_time_is_captured_all_the_same() -> None:
    state, recall = some_state(), CaptureCache()
    for _ in range(6):
        replace_all_memory(state)
        look(recall, state)


def test_nothing_that_is_captured_is_held() -> None:
    import weakref

    state, recall = some_state(), CaptureCache()
    for _ in range(3):
        look(recall, state)
    held = weakref.ref(state["model"][0].weight)
    state["optimizer"] = None
    state["model"] = None
    assert held() is None


def test_a_view_with_the_negative_bit_is_no_raw_memory() -> None:
    recall = CaptureCache()
    state = {"a": torch.ones(3), "b": torch._neg_view(torch.ones(3)), "items": []}
    look(recall, state)
    found = look(recall, state)
    assert [bool(address) for address in (found.addresses or ())][:2] == [True, False]


def test_an_error_names_the_path_each_time() -> None:
    recall = CaptureCache()
    state = {"deep": {"er": [1, object()]}}
    for _ in range(5):
        with pytest.raises(UnstorableState, match=r"deep\.er\.1"):
            recall.capture(state, {})


def test_a_tensor_that_is_replaced_by_a_sparse_one_is_refused_by_its_path() -> None:
    state, recall = some_state(), CaptureCache()
    look(recall, state)
    state["plain"]["a"] = torch.ones(2).to_sparse()
    with pytest.raises(UnstorableState, match=r"plain\.a: a tensor of layout torch\.sparse_coo"):
        look(recall, state)


@pytest.mark.layer("keras")  # JAX brings these types
def test_types_of_one_code_are_told_apart() -> None:
    types = pytest.importorskip("ml_dtypes", reason="pip install jax")
    memory = np.arange(4, dtype=np.uint8)
    one, other = memory.view(types.float8_e4m3fn), memory.view(types.float8_e4m3fnuz)
    assert one.dtype.str == other.dtype.str
    recall = CaptureCache()
    state = {"one": one, "other": other, "again": other.view(), "items": []}
    names = [spec.dtype for spec in look(recall, state).specs][:2]
    assert names == ["float8_e4m3fn", "float8_e4m3fnuz"]
    state["one"] = other.view()
    assert look(recall, state).specs[0].dtype == "float8_e4m3fnuz"


def test_ranks_of_which_nothing_is_the_same_remember_too() -> None:
    # Without torch's DDP there is nobody to say what is the same on all ranks.
    recall, nothing = CaptureCache(), _StoredElsewhere({}, None)
    state = some_state()
    for _ in range(3):
        found = recall.capture(state, {"step": 1}, nothing)
        assert_same(found, capture(state, {"step": 1}))


def test_modules_with_ways_of_their_own_are_asked_for_their_state() -> None:
    class Own(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"more": 1}

        def set_extra_state(self, _: Any) -> None: ...

    assert flat_state(torch.nn.Sequential(torch.nn.Linear(1, 1))) is not None
    assert flat_state(torch.nn.Sequential(Own(1, 1))) is None
    assert flat_state(torch.nn.Sequential(torch.nn.LazyLinear(1))) is None
    hooked = torch.nn.Sequential(torch.nn.Linear(1, 1))
    hooked[0].register_state_dict_pre_hook(lambda *_: None)
    assert flat_state(hooked) is None
    assert flat_state(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])) is None
