"""Every kind of loader, interrupted four or ten times by SIGTERM, and six or ten by kill -9.

The instants are random: as a life starts or goes on in the middle, between two batches,
in a phase, between two epochs. Whatever is given again is what was given before, to the
byte, and the training ends with the bits of one that nobody has interrupted.
"""

from __future__ import annotations

import random
import signal
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.data.lives import Line, Training, interrupt_all
from tests.fork_server import ForkServer
from tests.often import few
from tests.support import wait_until

torch = pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("torchdata", reason="pip install torchdata")

from tests.data.kinds import KINDS

Undisturbed = Callable[[str], tuple[list[Line], dict[str, str]]]
# One of each way to bring a loader to its place: by its sampler, by the state of a data set, by the
# loader's own state, by replay. All the others are nightly.
STOPPED = ("fork", "iterable_workers", "stateful_map", "list")
KILLED = ("fork", "iterable_stateful")

STOPS = [2, pytest.param(10, marks=pytest.mark.nightly)]
KILLS = [3, pytest.param(10, marks=pytest.mark.nightly)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", KILLS)
@pytest.mark.parametrize("kind", few(KINDS, KILLED))
def test_killed_at_random_instants_every_batch_is_the_undisturbed_one(
    kind: str, count: int, fork_server: ForkServer, undisturbed: Undisturbed, tmp_path
):
    training = _interrupted(kind, signal.SIGKILL, count, fork_server, undisturbed, tmp_path)
    reference, _ = undisturbed(kind)
    lives = [_of_training(lines) for lines in training.lines_by_life()]
    assert _effective(lives) == _of_training(reference)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", STOPS)
@pytest.mark.parametrize("kind", few(KINDS, STOPPED))
def test_stopped_at_random_instants_no_batch_is_given_twice(
    kind: str, count: int, fork_server: ForkServer, undisturbed: Undisturbed, tmp_path
):
    training = _interrupted(kind, signal.SIGTERM, count, fork_server, undisturbed, tmp_path)
    reference, _ = undisturbed(kind)
    lives = [_of_training(lines) for lines in training.lines_by_life()]
    if KINDS[kind].eval_every:
        # A stop in a phase amid steps leaves at once, with the last boundary that is in memory.
        assert _effective(lives) == _of_training(reference)
        return
    assert [line for lines in lives for line in lines] == _of_training(reference)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", few(KINDS, {*STOPPED, *KILLED}))
def test_an_undisturbed_epoch_has_every_sample_once(kind: str, undisturbed: Undisturbed):
    lines, _ = undisturbed(kind)
    loops: dict[tuple[int, str], list[int]] = {}
    for line in lines:
        epoch, loop, _ = line["at"]
        loops.setdefault((epoch, loop), []).extend(line["samples"])
    trained = {at: samples for at, samples in loops.items() if at[1].startswith("train")}
    expected = KINDS[kind].samples
    for samples in trained.values():
        assert expected is None or len(set(samples)) == len(samples) == expected
    if kind not in ("list", "counter"):  # nobody shuffles these
        assert len({tuple(samples) for samples in trained.values()}) == len(trained)


def test_workers_end_at_once_with_a_trainer_that_is_killed(fork_server: ForkServer, tmp_path):
    training = Training(fork_server, "persistent", tmp_path, {})
    life = training.begin("--brake", 3, "--brake-seconds", 60)
    wait_until(lambda: len(training.lines()) >= 3, 60, "three batches")
    assert len(life.processes()) == 3
    life.send_signal(signal.SIGKILL)
    assert life.wait() == -signal.SIGKILL
    died = time.monotonic()
    wait_until(lambda: not life.processes(), what="the end of the workers")
    assert time.monotonic() - died < 4.5  # by themselves torch's workers look every five seconds
    training.check_nothing_left()


def _interrupted(
    kind: str, number: int, count: int, fork_server: ForkServer, undisturbed: Undisturbed, tmp_path
) -> Training:
    reference, ended = undisturbed(kind)
    seed = zlib.crc32(f"{kind} {number}".encode())
    rng = random.Random(seed)
    settings = {"checkpoint_every": 2} if rng.random() < 0.5 else {}
    training = Training(fork_server, kind, tmp_path, settings)
    statuses = interrupt_all(training, number, count, reference, rng, KINDS[kind].start_seconds)
    expected = {-number, 143} if number == signal.SIGTERM else {-number}
    assert set(statuses) <= expected, (statuses, training.output)
    known = {tuple(line["at"]): line for line in reference}
    for lines in training.lines_by_life():
        for line in _without_the_way(lines, known):
            assert line == known[tuple(line["at"])], training.output
    assert training.result() == ended, training.output
    training.check_nothing_left()
    return training


def _without_the_way(lines: list[Line], known: dict[tuple[Any, ...], Line]) -> list[Line]:
    """Without the phases that a life comes by again on its way to where it goes on.

    The script runs an epoch from its top, and its phases there see a later state. Nothing is
    trained on the way.
    """
    way = 0
    for line in lines:
        if line["at"][1].startswith("train") or line["step"] == known[tuple(line["at"])]["step"]:
            break
        way += 1
    return lines[way:]


def _of_training(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["at"][1].startswith("train")]


def _effective(lives: list[list[Line]]) -> list[Line]:
    """What counts of all lives: of each what the next one did not do again."""
    effective: list[Line] = []
    for lines in lives:
        if lines and lines[0] in effective:
            del effective[effective.index(lines[0]) :]
        effective += lines
    return effective
