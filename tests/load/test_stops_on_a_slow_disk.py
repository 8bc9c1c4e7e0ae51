"""Sixty stops on a disk on which a flush takes 4 s, on a crowded machine.

Never is less kept than the line at the signal has called certain, and the newest state is durable
first. About 45 minutes, or 12 with four at once (`-n 4`), since most of it is waiting:

    .venv/bin/python -m pytest -q -m nightly -n 4 tests/load/test_stops_on_a_slow_disk.py

Three of them on a quiet machine, in two minutes: the same with `-k quiet`. The same promises on a
quicker disk are in tests/processes/test_slow_disk.py, for `make test`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.slow_disk import slow_disk
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

FLUSH_SECONDS = 4.0  # a checkpoint has four
GRACE_SECONDS = 10.0  # what SIGTERM usually leaves
OFTEN = '{"max_overhead": 1.0, "checkpoint_every": 20}'
LONG_SECONDS = 240.0
HOW = ("TERM", "USR2", "KILL")


def _under_way(folder):
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return {int(found[1]) for name in names if (found := re.match(r"\..*step-0*(\d+)", name))}


def _begin(folder, start, tmp_path, number):
    """A training, at one of several moments: nothing durable, one durable, another on its way."""
    trainer = start(
        *(folder, "--total", 10_000_000, "--sleep", 0.02, "--settings", OFTEN),
        script=SCRIPTS / "light.py",
        env=slow_disk(tmp_path / "slow", FLUSH_SECONDS),
    )
    trainer.ready()
    wait_until(lambda: _under_way(folder), LONG_SECONDS, "the first write")
    if number % 3:
        wait_until(lambda: checkpoint_steps(folder), LONG_SECONDS, "the first checkpoint")
    if number % 3 == 2:
        wait_until(lambda: _under_way(folder), LONG_SECONDS, "the next write")
    return trainer


def _check_stop(folder, start, tmp_path, how, number):
    trainer = _begin(folder, start, tmp_path, number)
    known = checkpoint_steps(folder)
    name = "SIGUSR2" if how == "USR2" else "SIGTERM"
    sent_at = time.monotonic()
    trainer.send(signal.Signals[name])
    line = trainer.wait_for(f"{name}: step ", LONG_SECONDS)
    heard_at = time.time()
    certain = re.search(r"step (\d+) is durable already", line)
    if how == "KILL":
        pids = [trainer.pid, *(keeper.pid for keeper in keepers(folder))]
        left = sent_at + GRACE_SECONDS - time.monotonic()
        with contextlib.suppress(Exception):
            trainer.process.wait(max(0.0, left))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trainer.wait(LONG_SECONDS)
    else:
        assert trainer.wait(LONG_SECONDS) == (75 if how == "USR2" else 143), trainer.output
    wait_for_keeper_gone(folder, LONG_SECONDS)

    kept = checkpoint_steps(folder)
    assert max(kept, default=-1) >= max(known, default=-1)
    if certain is not None:
        assert max(kept) >= int(certain[1]), line
    written = journal_events(folder, "checkpoint")
    steps = [each["step"] for each in written]
    assert steps == sorted(steps), "an older one was written after a newer one"
    later = [step for step in steps if step not in known]
    begun = {each["step"] for each in written if each["time"] - each["seconds"] < heard_at}
    said = re.search(r"step (\d+) is durable; leaving", trainer.output)
    if how != "KILL":
        assert said is not None, trainer.output
    if said is not None:
        assert later[-1] == int(said[1]) == max(kept)
        # One write may have begun before the signal, and may be all that is durable in time. While
        # the step goes on, the newest snapshot is written too: the time may end before the step.
        insured = {each["step"] for each in written if each["reason"] == "deadline"}
        assert len(insured) <= 1, f"{insured} were written while the step went on"
        others = set(later[:-1]) - insured
        assert others <= begun, f"{later} became durable, {begun} had begun"
        ended = [each["step"] for each in written if each["time"] > heard_at]
        assert len(set(ended) - insured) <= 2, f"{ended} became durable after the signal"
    print(f"{how} {number}: {line.strip()} {later} after {time.monotonic() - sent_at:.1f} s")


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("how", HOW)
def test_never_less_is_kept_than_the_line_said(folder, start, tmp_path, load, how, number):
    _check_stop(folder, start, tmp_path, how, number)


@pytest.mark.parametrize("how", HOW)
def test_the_same_on_a_quiet_machine(folder, start, tmp_path, how):
    _check_stop(folder, start, tmp_path, how, 2)
