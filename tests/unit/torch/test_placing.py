"""A stored state that is read into the memory of live objects, and checked on the way."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._errors import DamagedCheckpoint, NoGoodCheckpoint, RestoreDiffers, StateMismatch
from holdfast._keeper.storage import HeldArena
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture import capture, capture_generators
from holdfast._state.fit import places_in
from holdfast._state.restore import restore_again, restore_state
from holdfast._store.folder.layout import RunLayout, rank_file
from holdfast._store.format.checksum import digest_all
from holdfast._store.read import checked_copy, files
from holdfast._store.read.find import find_newest, open_leftovers
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import Loaded, read_manifest, verify_image
from tests.linked_files import link_unchanged, make_checkpoint
from tests.often import few

DTYPES = (
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
LINE: dict[int, int | None] = {1: None}


class Odd(torch.nn.Module):
    """Of all sizes and types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = torch.nn.Parameter(torch.randn(3, 1_100_003))  # in several pieces
        self.norm = torch.nn.BatchNorm1d(7)
        self.tied = torch.nn.Linear(5, 3)
        self.also = self.tied
        self.register_buffer("scalar", torch.tensor(float(seed)))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("passing", torch.randn(3), persistent=False)
        self.small = torch.nn.ParameterList(torch.randn(n % 13 + 1) for n in range(300))
        for dtype in DTYPES:
            value = torch.randint(0, 2, (11, 3)).to(dtype)
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", value)


def state_of(seed: int, *, steps: bool = True) -> dict[str, Any]:
    model = Odd(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    if steps:
        sum(p.float().square().sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "seen": seed, "own": torch.full((4,), seed)}


def values_of(state: dict[str, Any]) -> list[bytes]:
    captured = capture(state)
    assert len(captured.specs) > 300
    return digest_all([memoryview(_bytes(value)) for value in captured.values])


def _bytes(value: torch.Tensor) -> bytes:
    plain = value.detach().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def read_into(state: dict[str, Any], folder: Path) -> Loaded:
    return read_checkpoint(folder, choose=places_in(state))


@pytest.fixture(params=["through the cache", "past it"])
def way(request, monkeypatch):
    held = int(request.param == "through the cache")
    monkeypatch.setattr(files, "resident_pages", lambda _, size: bytes([held]) * (size // 4096 + 1))


@pytest.mark.usefixtures("way")
def test_a_module_and_its_optimizer_are_filled_to_the_bit(on_disk):
    saved, fresh = state_of(1), state_of(2, steps=False)
    addresses = [p.data_ptr() for p in fresh["model"].parameters()]
    passing = fresh["model"].passing.clone()
    loaded = read_into(fresh, make_checkpoint(on_disk / "run", 1, [saved]))
    assert loaded.placement is not None
    assert loaded.placement.filled == {"model"}
    assert loaded.placement.is_exact
    assert restore_state(fresh, loaded) == []
    assert values_of(fresh) == values_of(saved)
    assert [p.data_ptr() for p in fresh["model"].parameters()] == addresses
    assert torch.equal(fresh["model"].passing, passing)
    kept = {t.data_ptr() for s in fresh["optimizer"].state.values() for t in s.values()}
    assert kept == {t.data_ptr() for t in loaded.placement.tensors.values()}


def test_no_other_copy_of_the_state_is_made(on_disk):
    saved, fresh = state_of(1), state_of(2, steps=False)
    loaded = read_into(fresh, make_checkpoint(on_disk / "run", 1, [saved]))
    assert loaded.placement is not None
    largest = max(range(len(loaded.plan.specs)), key=lambda n: loaded.plan.specs[n].size_bytes)
    assert largest in loaded.placement.views
    read_once = sum(
        v.nbytes for n, v in enumerate(loaded.tensors) if n not in loaded.placement.views
    )
    assert read_once < 100_000  # `own`, and the random generators


@pytest.mark.usefixtures("way")
def test_parts_in_a_linked_file_are_filled_too(on_disk):
    saved, fresh = state_of(1), state_of(2, steps=False)
    older = make_checkpoint(on_disk / "run", 8, [saved])
    saved["model"].tied.weight.data += 1
    newer = make_checkpoint(on_disk / "run", 9, [saved])
    link_unchanged(newer, older)
    restore_state(fresh, read_into(fresh, newer))
    assert values_of(fresh) == values_of(saved)


@pytest.mark.parametrize("long_bytes", [1 << 16, 1 << 30])
def test_a_snapshot_in_memory_is_copied_and_checked_at_once(long_bytes, monkeypatch):
    monkeypatch.setattr(checked_copy, "_LONG_BYTES", long_bytes)
    monkeypatch.setattr(checked_copy, "_LONG_PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(checked_copy, "_PIECE_BYTES", 1 << 17)
    saved, fresh = state_of(1), state_of(2, steps=False)
    with Slot(saved) as slot:
        loaded = slot.load(fresh)
        assert loaded.placement is not None
        restore_state(fresh, loaded)
        assert values_of(fresh) == values_of(saved)


@pytest.mark.nightly
def test_each_damaged_tensor_of_a_snapshot_is_found():
    saved = state_of(1)
    with Slot(saved) as slot:
        for extent in slot.plan.extents()[:: len(slot.plan.specs) // 40]:
            if extent.size_bytes:
                slot.image[extent.offset + extent.size_bytes // 2] ^= 1
                with pytest.raises(DamagedCheckpoint):
                    slot.load(state_of(2, steps=False))
                slot.image[extent.offset + extent.size_bytes // 2] ^= 1
        slot.load(state_of(2, steps=False))


class Slot:
    """A state in a slot of an arena."""

    def __init__(self, saved: dict[str, Any], step: int = 1) -> None:
        announced: list[Any] = []
        self.run_id = os.urandom(16).hex()
        self._snapshots = Snapshots(
            run_id=self.run_id,
            attempt=1,
            announce=lambda arena, backing: announced.append((arena, backing)),
            say=print,
        )
        captured = capture(saved, {"generators": capture_generators(), "position": None})
        taken, deadline = None, time.monotonic() + 30
        while taken is None and time.monotonic() < deadline:  # its memory is made in the background
            taken = self._snapshots.take(captured, {"attempt": 1, "metrics": {}}, 2 * step)
        assert taken is not None
        self.arena, self._backing = announced[0]
        for record in self.arena.whole():
            HeldArena(self.arena, None).digests(record)
        self._slot = taken.slot
        self.plan, self.image = self.arena.plan(self._slot), self.arena.image(self._slot)

    def load(self, state: dict[str, Any]) -> Loaded:
        digests = self.arena.digests(self._slot)
        return verify_image(self.image, self.plan, digests, "here", choose=places_in(state))

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self._backing.remove()
        self.image.release()
        self._snapshots.close()


# -- What is not only a copy ------------------------------------------------------------


def test_tensors_in_another_order_are_loaded_by_their_module(folder):
    class Turned(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.w = torch.nn.Parameter(torch.randn(4, 6).t())

    saved, fresh = {"model": Turned(1)}, {"model": Turned(2)}
    loaded = read_into(fresh, make_checkpoint(folder, 1, [saved]))
    assert loaded.placement is not None
    assert not loaded.placement.filled
    restore_state(fresh, loaded)
    assert torch.equal(fresh["model"].w, saved["model"].w)


class Pair(torch.nn.Module):
    def __init__(self, fill: float, *, is_tied: bool) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((5,), float(fill)))
        self.b = self.a if is_tied else torch.nn.Parameter(torch.full((5,), float(fill + 1)))


def test_tied_tensors_may_be_two_now(folder):
    saved, fresh = {"model": Pair(1, is_tied=True)}, {"model": Pair(7, is_tied=False)}
    restore_state(fresh, read_into(fresh, make_checkpoint(folder, 1, [saved])))
    assert fresh["model"].a.tolist() == fresh["model"].b.tolist() == [1.0] * 5


def test_two_tensors_that_are_one_now_are_noticed(folder):
    saved, fresh = {"model": Pair(1, is_tied=False)}, {"model": Pair(7, is_tied=True)}
    loaded = read_into(fresh, make_checkpoint(folder, 1, [saved]))
    with pytest.raises(RestoreDiffers):
        restore_state(fresh, loaded)


def test_tensors_that_overlap_are_noticed(folder):
    memory = torch.zeros(8)
    saved, fresh = {"model": Pair(1, is_tied=False)}, {"model": Pair(7, is_tied=False)}
    fresh["model"].a.data, fresh["model"].b.data = memory[:5], memory[3:]
    loaded = read_into(fresh, make_checkpoint(folder, 1, [saved]))
    with pytest.raises(RestoreDiffers):
        restore_state(fresh, loaded)


class Doubling(torch.nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.weight.data *= 2


class DoublingAdam(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for kept in self.state.values():
            kept["exp_avg"].data *= 2


class Meddler:
    """An object of the script that changes the model of another name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, _: Any) -> None:
        self._model.weight.data *= 2  # torch's version counter misses it


def _hooked(*size: int) -> torch.nn.Linear:
    model = torch.nn.Linear(*size)

    def double(module: Any, _: Any) -> None:
        module.weight.data.mul_(2)

    model.register_load_state_dict_post_hook(double)
    return model


def _small(kind: str) -> dict[str, Any]:
    make = {"method": Doubling, "hook": _hooked}.get(kind, torch.nn.Linear)
    model = make(3, 2)
    optimizer = (DoublingAdam if kind == "optimizer" else torch.optim.Adam)(model.parameters())
    if kind == "optimizer hook":
        optimizer.register_load_state_dict_post_hook(
            lambda each: [kept["exp_avg"].data.mul_(2) for kept in each.state.values()]
        )
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    found: dict[str, Any] = {"model": model, "optimizer": optimizer}
    return {**found, "other": Meddler(model)} if kind == "another object" else found


@pytest.mark.parametrize(
    "kind", ["method", "hook", "optimizer", "optimizer hook", "another object"]
)
def test_code_of_the_script_that_changes_what_it_loads_is_noticed(folder, kind):
    loaded = read_into(fresh := _small(kind), make_checkpoint(folder, 1, [_small(kind)]))
    assert loaded.placement is not None
    assert not loaded.placement.is_exact
    with pytest.raises(RestoreDiffers):
        restore_state(fresh, loaded)


def test_moments_of_another_type_than_the_parameters_stay_as_they_were(folder):
    def make() -> dict[str, Any]:
        model = torch.nn.Linear(3, 2).bfloat16()
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.randn(2)}
        return {"model": model, "optimizer": optimizer}

    saved, fresh = make(), make()
    restore_state(fresh, read_into(fresh, make_checkpoint(folder, 1, [saved])))
    pairs = zip(saved["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True)
    assert all(torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in pairs)


def test_nothing_is_touched_if_any_of_it_does_not_fit(folder):
    saved, fresh = state_of(1), state_of(2, steps=False)
    saved["more"] = torch.nn.Linear(2, 2)
    before = values_of({"model": fresh["model"]})
    loaded = read_into(fresh, make_checkpoint(folder, 1, [saved]))
    with pytest.raises(StateMismatch):
        restore_state(fresh, loaded)
    assert values_of({"model": fresh["model"]}) == before


@pytest.mark.nightly
def test_a_state_is_restored_once_more_from_its_files(folder):
    saved, fresh = state_of(1), state_of(2, steps=False)
    loaded = read_into(fresh, make_checkpoint(folder, 1, [saved]))
    restore_state(fresh, loaded)
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    for kept in fresh["optimizer"].state.values():
        kept["exp_avg"].zero_()
    restore_again(fresh, loaded, ["model", "optimizer"])
    assert values_of(fresh) == values_of(saved)


# -- Damage -----------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "where", few(["header", "large", "last tensor", "scalars"], ["last tensor"])
)
def test_after_damage_all_is_overwritten_by_the_one_before(on_disk, where):
    folder, older, newer = on_disk / "run", state_of(1), state_of(2)
    make_checkpoint(folder, 8, [older])
    damaged = make_checkpoint(folder, 9, [newer])
    parts = read_manifest(damaged).files[0].parts
    last = max(parts[1:-1], key=lambda part: part.offset + part.size_bytes)
    by_name = {"header": parts[0], "last tensor": last, "scalars": parts[-1]}
    part = by_name.get(where) or next(p for p in parts if p.name == "model.large")
    data = bytearray((damaged / rank_file(0)).read_bytes())
    data[part.offset + part.size_bytes - 1] ^= 1
    (damaged / rank_file(0)).write_bytes(data)

    fresh, said = state_of(3, steps=False), list[str]()
    found = find_newest(RunLayout(folder), LINE, [], said.append, None, places_in(fresh))
    assert found is not None
    assert found.step == 8
    restore_state(fresh, found.loaded)
    assert values_of(fresh) == values_of(older)
    assert len(said) == 1


def test_without_another_checkpoint_the_run_does_not_begin(folder):
    damaged = make_checkpoint(folder, 9, [state_of(1)])
    data = bytearray((damaged / rank_file(0)).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / rank_file(0)).write_bytes(data)
    fresh = state_of(2, steps=False)
    with pytest.raises(NoGoodCheckpoint):
        find_newest(RunLayout(folder), LINE, [], lambda _: None, None, places_in(fresh))


def test_a_damaged_snapshot_touches_nothing_if_the_run_may_begin_anew(folder):
    (folder / "checkpoints").mkdir(parents=True)
    fresh = state_of(2, steps=False)
    before = values_of({"model": fresh["model"]})
    with Slot(state_of(1)) as slot:
        slot.image[slot.plan.scalars.offset - 1] ^= 1
        leftovers = open_leftovers(slot.run_id)
        assert len(leftovers) == 1
        choose = places_in(fresh)
        layout = RunLayout(folder)
        assert find_newest(layout, LINE, leftovers, lambda _: None, None, choose) is None
        leftovers.pop().arena.close()
    assert values_of({"model": fresh["model"]}) == before


def test_a_damaged_snapshot_is_overwritten_by_the_checkpoint_before_it(folder):
    make_checkpoint(folder, 1, [state_of(5)])
    fresh = state_of(2, steps=False)
    with Slot(state_of(1), step=9) as slot:
        slot.image[slot.plan.scalars.offset - 1] ^= 1
        leftovers = open_leftovers(slot.run_id)
        choose = places_in(fresh)
        found = find_newest(RunLayout(folder), LINE, leftovers, lambda _: None, None, choose)
        assert found is not None
        assert found.step == 1
        restore_state(fresh, found.loaded)
        leftovers.pop().arena.close()
    assert values_of(fresh) == values_of(state_of(5))
