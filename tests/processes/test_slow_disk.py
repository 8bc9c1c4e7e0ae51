"""A disk that is slower than the cadence: a stop does not wait behind older checkpoints."""

from __future__ import annotations

import re
import signal
import time

import psutil

from tests.cli.command import status_of
from tests.slow_disk import slow_disk
from tests.support import (
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

_FLUSH_SECONDS = 0.4  # a checkpoint has four
_OFTEN = '{"max_overhead": 1.0, "checkpoint_every": 4}'


def _busy(folder, tmp_path, light, *arguments):
    """A training that orders checkpoints faster than the disk takes them."""
    trainer = light(
        *(folder, "--total", 100_000, "--sleep", 0.02, "--settings", _OFTEN, *arguments),
        env=slow_disk(tmp_path / "slow", _FLUSH_SECONDS),
    )
    trainer.ready()
    wait_until(lambda: journal_events(folder, "checkpoint"), 30, "the first checkpoint")
    return trainer


def _under_way(folder):
    """The steps of the checkpoints that are being written."""
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return {int(found[1]) for name in names if (found := re.match(r"\..*step-0*(\d+)", name))}


def _written_after(folder, event):
    """The steps that became durable after an event of the journal, in their order."""
    events = journal_events(folder)
    at = next(index for index, each in enumerate(events) if each["event"] == event)
    return [each["step"] for each in events[at:] if each["event"] == "checkpoint"]


def test_after_sigterm_nothing_that_was_queued_is_written_before_the_last_step(
    folder, tmp_path, light
):
    trainer = _busy(folder, tmp_path, light)
    (keeper,) = keepers(folder)

    def stopped_in_a_write() -> set[int]:
        keeper.suspend()  # else it may begin another one before the signal is sent
        wait_until(lambda: keeper.status() == psutil.STATUS_STOPPED)
        found = _under_way(folder)
        if not found:
            keeper.resume()
        return found

    under_way = wait_until(stopped_in_a_write, 30, "a write under way")
    trainer.send(signal.SIGTERM)
    keeper.resume()
    assert trainer.wait() == 143, trainer.output
    wait_for_keeper_gone(folder)
    *before, last = _written_after(folder, "signal")
    assert last == max(checkpoint_steps(folder))
    assert f"step {last} is durable" in trainer.output
    assert len(before) <= 1, f"{before} were written before {last}"
    assert set(before) <= under_way
    steps = [each["step"] for each in journal_events(folder, "checkpoint")]
    assert steps == sorted(steps)


def test_after_kill_9_only_the_newest_snapshot_is_written_which_is_as_new_as_the_training(
    folder, tmp_path, light
):
    """Orders come while one is written: they keep no slot from newer snapshots."""
    trainer = _busy(folder, tmp_path, light)

    def newer_than_the_orders() -> int | None:
        """The step in memory, if it was made long after those that a queue of orders would hold."""
        under_way, step = _under_way(folder), status_of(folder)["memory_step"]
        return step if under_way and step > min(under_way) + 30 else None

    in_memory = wait_until(newer_than_the_orders, 30, "a snapshot while a write goes on")
    known = len(journal_events(folder, "checkpoint"))
    killed_at = time.time()
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    newest = max(checkpoint_steps(folder))
    assert newest >= in_memory
    written = journal_events(folder, "checkpoint")[known:]
    begun_later = {e["step"] for e in written if e["time"] - e["seconds"] > killed_at}
    assert begun_later <= {newest}
    assert len(written) <= 2, written
