"""On a real GPU: how soon the first snapshot comes, and what slots take of the host's memory."""

from __future__ import annotations

import statistics
import time

import pytest

import holdfast
from holdfast._run.driver import session_of
from holdfast._run.saving import slot_memory, snapshots
from holdfast._store.memory.arena import used_bytes

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

STATE_BYTES = 2_000_000_000


def wait_until(look, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_state() -> dict[str, torch.Tensor]:
    count = STATE_BYTES // 4 // 8
    return {f"w{i}": torch.full((count,), float(i), device="cuda") for i in range(8)}


def train(state: dict[str, torch.Tensor], run: holdfast.Run) -> None:
    torch._foreach_add_(list(state.values()), 1.0)
    torch.cuda.synchronize()
    time.sleep(0.02)
    run.boundary()


def test_the_first_snapshot_comes_soon_and_two_slots_take_twice_the_state(tmp_path):
    state = make_state()
    with holdfast.Run(tmp_path / "run", state=state) as run:
        began = time.monotonic()
        saver = session_of(run).saver
        while saver.newest is None:
            train(state, run)
        first = time.monotonic() - began
        while saver.snapshots.is_building:
            train(state, run)
        arena = saver.snapshots.arena[0]
        print(f"first snapshot after {first:.2f} s, {used_bytes(arena.descriptor)} bytes")
        assert first < 2.0  # a second is the aim; other processes may run
        assert arena.present() == [0, 1]
        assert used_bytes(arena.descriptor) < 2.1 * STATE_BYTES
        devices = saver.snapshots._current._copies
        assert sorted(devices._registered) == [0, 1]


def test_a_script_that_waits_for_the_device_does_not_wait_for_a_snapshot(tmp_path):
    state = make_state()
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    waits = []
    with holdfast.Run(tmp_path / "run", settings=settings, state=state) as run:
        taker = session_of(run).saver.snapshots
        while taker.newest is None or taker.is_building:
            train(state, run)
        while len(waits) < 20:
            train(state, run)
            began = time.monotonic()
            if taker.is_busy:
                torch.cuda.synchronize()
                waits.append(time.monotonic() - began)
            wait_until(lambda: not taker.is_busy)
    # The link takes 36 ms for all of it.
    assert statistics.median(waits) < 0.012, waits


def test_a_busy_interpreter_does_not_hold_a_snapshot_up(tmp_path):
    state = make_state()
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    copies = []
    with holdfast.Run(tmp_path / "run", settings=settings, state=state) as run:
        taker = session_of(run).saver.snapshots
        while taker.newest is None or taker.is_building:
            train(state, run)
        while len(copies) < 10:
            train(state, run)
            began = time.monotonic()
            if not taker.is_busy:
                continue
            while taker.is_busy:
                sum(range(1000))  # the interpreter is given away only every 5 ms
            copies.append(time.monotonic() - began)
    # With one piece at a time 0.8 s; the link alone takes 0.04 s.
    assert statistics.median(copies) < 0.4, copies


def test_a_graph_can_be_captured_while_a_snapshot_is_on_its_way(tmp_path, capfd):
    state, counter, stream = make_state(), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    captured = 0
    with holdfast.Run(tmp_path / "run", settings=settings, state=state) as run:
        taker = session_of(run).saver.snapshots
        while taker.newest is None or taker.is_building:
            train(state, run)
        while captured < 10:
            train(state, run)
            if not taker.is_busy:
                continue
            graph, before = torch.cuda.CUDAGraph(), float(counter[0])
            with torch.cuda.stream(stream):
                graph.capture_begin()
                counter.add_(1.0)
                time.sleep(0.02)  # while pieces are queued
                graph.capture_end()
            captured += 1
            graph.replay()
            assert float(counter[0]) == before + 1
            wait_until(lambda: not taker.is_busy)
    assert "was lost" not in capfd.readouterr().err


def test_a_third_slot_is_registered_used_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(slot_memory, "_ASK_SECONDS", 0.0)
    state = make_state()
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    with holdfast.Run(tmp_path / "run", settings=settings, state=state) as run:
        saver = session_of(run).saver
        while saver.newest is None or saver.snapshots.is_building:
            train(state, run)
        taker = saver.snapshots
        arena, devices = taker.arena[0], taker._current._copies
        written = saver.newest
        taker.promise(written)  # as if the keeper wrote it to a slow disk
        while len(arena.present()) < 3:
            train(state, run)
        wait_until(lambda: not taker.is_building)
        assert sorted(devices._registered) == [0, 1, 2]
        before = saver.newest.step
        while saver.newest.step < before + 5:
            train(state, run)
        taker.release_slot(written.sequence)
        while used_bytes(arena.descriptor) > 2.1 * STATE_BYTES:
            train(state, run)
        wait_until(lambda: not taker.is_building)
        assert len(devices._registered) == len(arena.present()) == 2
        before = saver.newest.step
        while saver.newest.step < before + 5:
            train(state, run)


def test_frozen_weights_are_held_once_until_they_change(tmp_path):
    model = torch.nn.ParameterDict(
        {
            "base": torch.nn.Parameter(
                torch.randn(STATE_BYTES // 4, device="cuda"), requires_grad=False
            ),
            "adapter": torch.nn.Parameter(torch.zeros(2_000_000, device="cuda")),
        }
    )
    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="1h")
    state = {"adapter": model["adapter"]}

    def train_on(run: holdfast.Run, snapshots: int) -> None:
        saver = session_of(run).saver
        seen = set()
        while len(seen) < snapshots or saver.snapshots.is_building:
            train(state, run)
            if saver.newest is not None:
                seen.add(saver.newest.sequence)

    def newest() -> torch.Tensor:
        arena = saver.snapshots.arena[0]
        slot = arena.newest().slot
        plan = arena.plan(slot)
        ((spec, at),) = (
            pair for pair in zip(plan.specs, plan.offsets, strict=True) if "base" in pair[0].name
        )
        image = arena.image(slot)[at : at + spec.size_bytes]
        return torch.frombuffer(image, dtype=torch.float32)

    with holdfast.Run(tmp_path / "run", settings=settings, model=model) as run:
        saver = session_of(run).saver
        with torch.no_grad():
            train_on(run, 4)
            arena = saver.snapshots.arena[0]
            assert arena.present() == [0, 1]
            assert used_bytes(arena.descriptor) < 1.1 * STATE_BYTES
            assert torch.equal(newest(), model["base"].cpu())
            model["base"][STATE_BYTES // 8] += 1
            before = saver.newest.sequence
            while saver.newest.sequence < before + 3 or saver.snapshots.is_building:
                train(state, run)
        assert arena.shared == []
        assert torch.equal(newest(), model["base"].cpu())
        assert used_bytes(arena.descriptor) > 1.9 * STATE_BYTES


def test_a_slot_that_was_sent_stays_registered_for_the_next_copy_into_it(tmp_path):
    from holdfast._state.capture import capture
    from holdfast._store.format.image import plan_image
    from holdfast._store.memory.arena import Arena, arena_bytes
    from holdfast.torch import receive
    from holdfast.torch.adapter import ADAPTER
    from holdfast.torch.device import Devices

    state = {f"w{i}": torch.randn(20_000_003, device="cuda") for i in range(3)}
    captured = capture(state)
    plan = plan_image(captured.specs, 100)
    with (tmp_path / "arena").open("w+b") as file:
        file.truncate(arena_bytes(plan.size_bytes, len(plan.specs) + 2, 2))
        (tmp_path / "arena").chmod(0o600)
        arena = Arena.create(
            file.fileno(), run_id="a" * 32, attempt=1, generation=1, slots=2, plan=plan
        )
        places = list(zip(plan.specs, plan.offsets, strict=True))
        for slot in (0, 1):
            image = arena.image(slot)
            for (spec, at), value in zip(places, captured.values, strict=True):
                image[at : at + spec.size_bytes] = ADAPTER.bytes_of(value)
        image = arena.image(1)
        views = [image[at : at + spec.size_bytes] for spec, at in places]
        sent = receive.upload(views, torch.device("cuda:0"), slot=image)
        sizes = dict(receive.left_registered)
        assert sum(sizes.values()) >= 3 * 80_000_012
        devices = Devices(arena.mapped, places, [arena.slot_offset(slot) for slot in (0, 1)])
        assert devices._registered == {1: sizes}
        assert receive.left_registered == {}
        sent.host.unregister()  # another owner has them
        for number, (view, value) in enumerate(zip(views, captured.values, strict=True)):
            assert torch.equal(sent.raw[number].view(torch.float32), value)
            view[:] = bytes(len(view))
        # The device copies there; it may register what is left of the slot.
        assert devices.begin(1, list(captured.values), careful=False).wait()
        for view, value in zip(views, captured.values, strict=True):
            assert bytes(view) == bytes(ADAPTER.bytes_of(value))
        devices.close()
        assert devices._registered == {}
        # Without a new owner, the registration ends with the upload.
        again = receive.upload(views, torch.device("cuda:0"), slot=image)
        assert receive.left_registered
        again.host.unregister()
        assert receive.left_registered == {}
