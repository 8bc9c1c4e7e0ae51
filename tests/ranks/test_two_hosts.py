"""Two hosts that only the keepers' connection joins: it is cut, it heals, or a host is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from holdfast._record.manifest import parse
from tests.cli.command import succeed
from tests.ranks.hosts import SCRIPT, TwoHosts, why_not
from tests.support import checkpoint_steps, journal_events, wait_until

_TOTAL = 1500
# Snapshots as often as they can be, and no checkpoint that nobody asks for.
_EAGER = ("--settings", json.dumps({"max_overhead": 1.0, "checkpoint_every": "10h"}))
_SLOWLY = (*_EAGER, "--total", _TOTAL, "--pause", 0.02)


@pytest.fixture(scope="module", autouse=True)
def _needs_hosts():
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture
def hosts(tmp_path):
    made = TwoHosts(tmp_path / "run")
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed():
    """The final hashes of ranks that train without holdfast, and without each other."""
    command = [sys.executable, str(SCRIPT), "-", "--plain", "--total", str(_TOTAL), "--rank"]
    runs = [subprocess.run([*command, r], capture_output=True, text=True, check=True) for r in "01"]
    return [run.stdout.split()[1] for run in runs]


def _events(hosts, name):
    return journal_events(hosts.folder, name)


def _wait_for_event(hosts, name, seconds=15):
    return wait_until(lambda: _events(hosts, name), seconds, f"{name!r} in the journal")


def _common_step(hosts):
    """The newest step that the keeper of rank 0 knows both to hold."""
    beats = sorted((hosts.folder / "attempts").glob("[0-9]*/heartbeat.json"))
    return json.loads(beats[-1].read_text()).get("memory_step") or 0


def _start(hosts, *arguments, **variables):
    ranks = hosts.start(*_SLOWLY, *arguments, **variables)
    wait_until(
        lambda: all("ready 0\n" in rank.lines for rank in ranks) or any(r.is_over for r in ranks),
        30,
        "the start of both",
    )
    assert not any(rank.is_over for rank in ranks), hosts.outputs
    wait_until(lambda: _common_step(hosts), 15, "a snapshot that both hold")
    return ranks


def _check_checkpoint(hosts, step):
    """The newest checkpoint is of this step, with a file of each rank."""
    assert checkpoint_steps(hosts.folder)[-1] == step
    (found,) = (hosts.folder / "checkpoints").glob(f"step-{step:012d}-*")
    manifest = parse((found / "manifest.json").read_bytes(), str(found))
    names = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [file.name for file in manifest.files] == names
    assert sorted(path.name for path in found.iterdir()) == ["manifest.json", *names]


def _save(hosts):
    """Ask both for a checkpoint, as a person does; returns its step."""
    before = len(checkpoint_steps(hosts.folder))
    succeed("save", hosts.folder)
    wait_until(lambda: len(checkpoint_steps(hosts.folder)) > before, 15, "a checkpoint")
    step = checkpoint_steps(hosts.folder)[-1]
    _check_checkpoint(hosts, step)
    return step


def _check_stop(hosts, ranks, status, seconds):
    """Both have left at one step with one checkpoint, and nothing is left behind."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        left = max(0.1, deadline - time.monotonic())
        assert rank.wait(left) == status, rank.output
    (step,) = {int(rank.last("left")) for rank in ranks}
    _check_checkpoint(hosts, step)
    assert [event["step"] for event in _events(hosts, "stop")] == [step]
    _check_nothing_left(hosts)
    return step


def _check_nothing_left(hosts):
    for host in hosts.hosts:
        wait_until(lambda host=host: not host.processes(), 15, f"the end of {host.processes()}")
        assert host.arenas() == []
    assert list((hosts.folder / "checkpoints").glob(".*")) == []


def _check_goes_on(hosts, undisturbed, step):
    """The next life goes on from there, to the bits of a run that nobody disturbed."""
    again = hosts.start(*_EAGER, "--total", _TOTAL, MASTER_ADDR=hosts.addresses[0])
    for rank, expected in zip(again, undisturbed, strict=True):
        assert rank.state_hash() == expected
        assert int(rank.last("ready")) == step
    _check_nothing_left(hosts)


def test_a_stop_while_the_cable_is_cut_reaches_both_by_mail(hosts, undisturbed):
    ranks = _start(hosts, MASTER_ADDR=hosts.addresses[0])
    own, other = hosts.addresses
    assert hosts.hosts[0].talks_to() == {(own, other)}
    assert hosts.hosts[1].talks_to() == {(other, own)}
    _save(hosts)

    hosts.cut()
    assert _wait_for_event(hosts, "keeper-lost")[0]["rank"] == 1
    reached = [rank.step for rank in ranks]
    for rank, step in zip(ranks, reached, strict=True):
        rank.wait_for_step(step + 5)
    began = time.monotonic()
    succeed("stop", hosts.folder)
    step = _check_stop(hosts, ranks, 130, 20)
    print(f"stop by mail: {time.monotonic() - began:.1f} s")
    hosts.heal()
    _check_goes_on(hosts, undisturbed, step)
