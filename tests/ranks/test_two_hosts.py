"""Two hosts that only the keepers' connection joins: it is cut, it heals, or a host is lost.

These are stories about waiting, so all of them are played at once, each on hosts of its own.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from holdfast._store.format.manifest import parse
from tests.cli.command import holdfast_process, output_of
from tests.ranks.hosts import SCRIPT, TwoHosts, has_ipv6, why_not
from tests.support import checkpoint_steps, journal_events, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]
_TOTAL = 1500
# Snapshots as often as they can be, and no checkpoint that nobody asks for.
_EAGER = ("--settings", json.dumps({"max_overhead": 1.0, "checkpoint_every": "10h"}))
_SLOWLY = (*_EAGER, "--total", _TOTAL, "--pause", 0.03)
_IMPATIENT = ("--unreachable", 4.0)
_stories: dict[str, Callable[[TwoHosts], None]] = {}


def _story(play: Callable[[TwoHosts], None]) -> Callable[[dict[str, Future[None]]], None]:
    """Make a test of a story: it waits until that is played to its end."""
    _stories[play.__name__] = play

    def test(played: dict[str, Future[None]]) -> None:
        played[play.__name__].result()

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """The stories that are to be tested, all on their way."""
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    _undisturbed()
    names = sorted({item.name for item in request.session.items} & set(_stories))
    with ThreadPoolExecutor(len(names)) as pool:
        yield {name: pool.submit(_play, name, tmp_path_factory.mktemp("hosts")) for name in names}


def _play(name, place):
    by_ipv6 = "ipv6" in name and has_ipv6()
    hosts = TwoHosts(place / "run", "fd77:" if by_ipv6 else "10.77.0")
    try:
        _stories[name](hosts)
    except BaseException as error:
        error.add_note(hosts.outputs)
        raise
    finally:
        hosts.end()


@functools.cache
def _undisturbed():
    """The final hashes of ranks that train without holdfast, and without each other."""
    command = [sys.executable, str(SCRIPT), "-", "--plain", "--total", str(_TOTAL), "--rank"]
    runs = [subprocess.run([*command, r], capture_output=True, text=True, check=True) for r in "01"]
    return [run.stdout.split()[1] for run in runs]


def _events(hosts, name):
    return journal_events(hosts.folder, name)


def _wait_for_event(hosts, name):
    wait_until(lambda: _events(hosts, name), 20, f"{name!r} in the journal")
    assert [event["rank"] for event in _events(hosts, name)] == [1]


def _common_step(hosts):
    """The newest step that the keeper of rank 0 knows both to hold."""
    (beat,) = (hosts.folder / "attempts").glob("0001/heartbeat.json")
    return json.loads(beat.read_text()).get("memory_step") or 0


def _start(hosts, *arguments, **variables):
    ranks = hosts.start(*_SLOWLY, *arguments, **variables)
    wait_until(
        lambda: all("ready 0\n" in rank.lines for rank in ranks) or any(r.is_over for r in ranks),
        60,
        "the start of both",
    )
    assert not any(rank.is_over for rank in ranks)
    wait_until(lambda: _common_step(hosts), 20, "a snapshot that both hold")
    own, other = hosts.addresses
    assert hosts.hosts[0].talks_to() == {(own, other)}
    assert hosts.hosts[1].talks_to() == {(other, own)}
    return ranks


def _save(hosts):
    """Ask both for a checkpoint, as a person does; returns its step."""
    before = len(checkpoint_steps(hosts.folder))
    output_of(holdfast_process("save", hosts.folder))
    wait_until(lambda: len(checkpoint_steps(hosts.folder)) > before, 20, "a checkpoint")
    step = checkpoint_steps(hosts.folder)[-1]
    _check_checkpoint(hosts, step)
    return step


def _check_checkpoint(hosts, step):
    """The newest checkpoint is of this step, with a file of each rank."""
    assert checkpoint_steps(hosts.folder)[-1] == step
    (found,) = (hosts.folder / "checkpoints").glob(f"step-{step:012d}-*")
    manifest = parse((found / "manifest.json").read_bytes(), str(found))
    names = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [file.name for file in manifest.files] == names
    assert sorted(path.name for path in found.iterdir()) == ["manifest.json", *names]


def _check_stop(hosts, ranks, status, seconds):
    """Both leave in time, at one step with one checkpoint; returns the step."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        assert rank.wait(max(0.1, deadline - time.monotonic())) == status
    (step,) = {int(rank.last("left")) for rank in ranks}
    _check_checkpoint(hosts, step)
    assert [event["step"] for event in _events(hosts, "stop")] == [step]
    return step


def _check_goes_on(hosts, step):
    """The next life begins there, and comes to the bits of a run that nobody disturbed."""
    again = hosts.start("--total", _TOTAL, MASTER_ADDR=hosts.addresses[0])
    for rank, expected in zip(again, _undisturbed(), strict=True):
        assert rank.state_hash() == expected
        assert int(rank.last("ready")) == step
    for host in hosts.hosts:
        wait_until(lambda host=host: not host.processes(), 30, f"the end of all on {host.name}")
        assert host.arenas() == []
    assert list((hosts.folder / "checkpoints").glob(".*")) == []
    left = [*hosts.folder.glob("attempts/*/mail"), *hosts.folder.glob("attempts/.*")]
    assert left == []


@_story
def test_a_stop_while_the_cable_is_cut_reaches_both_by_mail(hosts):
    ranks = _start(hosts, MASTER_ADDR=hosts.addresses[0])
    hosts.cut()
    _wait_for_event(hosts, "keeper-lost")
    for rank in ranks:
        rank.wait_for_step(rank.step + 5)
    wait_until(lambda: not hosts.hosts[1].talks_to(), 10, "the end of the connection")
    output_of(holdfast_process("stop", hosts.folder))
    step = _check_stop(hosts, ranks, 130, 30)
    hosts.heal()
    _check_goes_on(hosts, step)


def _stop_when_the_cable_is_cut(hosts, number):
    """Nobody knows yet that what is said on the connection goes nowhere."""
    ranks = _start(hosts, MASTER_ADDR=hosts.addresses[0])
    hosts.cut(number)
    ranks[number].send(signal.SIGTERM)
    step = _check_stop(hosts, ranks, 143, 40)
    assert [event["rank"] for event in _events(hosts, "stop-asked")] == [number]
    hosts.heal(number)
    _check_goes_on(hosts, step)


@_story
def test_a_signal_to_rank_0_just_when_the_cable_is_cut_is_one_stop(hosts):
    _stop_when_the_cable_is_cut(hosts, 0)


@_story
def test_a_signal_to_rank_1_just_when_the_cable_is_cut_is_one_stop(hosts):
    _stop_when_the_cable_is_cut(hosts, 1)


@_story
def test_after_a_cable_with_ipv6_is_healed_checkpoints_are_of_both_again(hosts):
    ranks = _start(hosts, HOLDFAST_ADDRESS=hosts.addresses[0])
    hosts.cut()
    _wait_for_event(hosts, "keeper-lost")
    reached = max(rank.step for rank in ranks)
    hosts.heal()
    _wait_for_event(hosts, "keeper-found")
    wait_until(lambda: _common_step(hosts) > reached, 30, "a newer snapshot that both hold")
    assert _save(hosts) > reached
    output_of(holdfast_process("stop", hosts.folder))
    _check_goes_on(hosts, _check_stop(hosts, ranks, 130, 15))


@_story
def test_a_cut_for_longer_than_a_lost_host_is_waited_for_ends_nobody(hosts):
    """Letters show that it is only the cable."""
    ranks = _start(hosts, *_IMPATIENT, MASTER_ADDR=hosts.addresses[0])
    hosts.cut()
    _wait_for_event(hosts, "keeper-lost")
    until = time.monotonic() + 2 * _IMPATIENT[1]
    while time.monotonic() < until:
        for rank in ranks:
            rank.wait_for_step(rank.step + 5)
    hosts.heal()
    _wait_for_event(hosts, "keeper-found")
    assert _events(hosts, "rank-died") == []
    output_of(holdfast_process("stop", hosts.folder))
    _check_stop(hosts, ranks, 130, 15)


@_story
def test_when_a_host_is_lost_the_other_leaves_and_the_next_life_goes_on(hosts):
    ranks = _start(hosts, *_IMPATIENT, MASTER_ADDR=hosts.addresses[0])
    saved = _save(hosts)
    ranks[0].wait_for_step(saved + 10)
    hosts.cut()
    hosts.hosts[1].die()
    assert ranks[0].wait(30) == 75
    assert "rank 1 on host-b cannot be reached any more" in ranks[0].output
    assert checkpoint_steps(hosts.folder) == [saved]
    hosts.replace(1)
    _check_goes_on(hosts, saved)


@_story
def test_when_the_host_of_rank_0_is_lost_the_other_leaves_too(hosts):
    ranks = _start(hosts, *_IMPATIENT, MASTER_ADDR=hosts.addresses[0])
    saved = _save(hosts)
    hosts.cut()
    hosts.hosts[0].die()
    assert ranks[1].wait(30) == 75
    assert "rank 0 on host-a cannot be reached any more" in ranks[1].output
    hosts.replace(0)
    _check_goes_on(hosts, saved)
