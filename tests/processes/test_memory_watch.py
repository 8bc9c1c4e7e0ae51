"""The keeper sees the limit coming, saves before it, and outlives the kill that follows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.gather import gather_run
from holdfast._diagnose.verdict import Cause
from holdfast._store.folder.attempts import read_json
from tests import cgroups
from tests.cgroups import LimitedMemory, limited_memory
from tests.ordinary_user import as_user, home_of_user, why_no_user
from tests.support import (
    SCRIPTS,
    Trainer,
    arena_files,
    checkpoint_steps,
    environment,
    is_gone,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

LEAKING = SCRIPTS / "leaking.py"
_LIMIT = 300_000_000
_LEAK = ("--leak", 50)
# Only what the watch asks for: a checkpoint by the clock would hide that there was none.
_RARE = ("--settings", '{"checkpoint_every": "10h"}')
_WARNING = re.compile(
    r"memory grows by (\d+) MB/s: the limit of 300 MB \(cgroup\) is reached in about (\d+) s\. "
    r"(The next step|Step (\d+)) is made durable"
)

_no_cgroup = cgroups.why_not()
needs_cgroup = pytest.mark.skipif(_no_cgroup is not None, reason=_no_cgroup or "")


@pytest.fixture
def room() -> Iterator[LimitedMemory]:
    with limited_memory(_LIMIT) as group:
        yield group


@pytest.fixture
def leaking(start: Callable[..., Trainer]) -> Callable[..., Trainer]:
    def begin(folder: Path, *arguments: Any, **options: Any) -> Trainer:
        return start(folder, *arguments, script=LEAKING, **options)

    return begin


@pytest.fixture
def child_of() -> Iterator[Callable[[Trainer], psutil.Process]]:
    """The child that a trainer has started; it waits for nothing, and would outlive it."""
    found: list[psutil.Process] = []

    def find(trainer: Trainer) -> psutil.Process:
        found.append(psutil.Process(int(trainer.wait_for("child ").split()[1])))
        return found[-1]

    yield find
    for child in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def seen_in(folder: Path) -> dict[str, Any]:
    """The newest sample that the heartbeat shows."""
    return dict(read_json(folder / "attempts/0001/heartbeat.json").get("memory") or {})


def death_of(folder: Path, rank: int = 0, attempt: int = 1) -> dict[str, Any]:
    name = f"death-{rank:05d}.json" if rank else "death.json"
    return dict(json.loads((folder / f"attempts/{attempt:04d}/{name}").read_text()))


def oom_kills(death: dict[str, Any], when: str) -> int:
    return int(death["counters"][when]["cgroup"]["oom_kill"])


def _step_of(trainer: Trainer, line: str) -> int:
    """The last step that was made before a line."""
    before = trainer.output[: trainer.output.index(line)]
    return int(re.findall(r"^step (\d+)$", before, re.MULTILINE)[-1])


def _growth_before(at: float, samples: list[dict[str, Any]]) -> tuple[float, float]:
    """The least and the most bytes per second over any second or more up to a time."""
    seen = [each for each in samples if each["t"] <= at + 0.1]
    rates = [
        (later["cgroup"] - earlier["cgroup"]) / (later["t"] - earlier["t"])
        for earlier in seen
        for later in seen
        if later["t"] - earlier["t"] >= 1
    ]
    return min(rates), max(rates)


def _check_warned_saved_and_killed(trainer: Trainer, folder: Path, room: LimitedMemory) -> None:
    warning = trainer.wait_for("memory grows by")
    assert room.oom_kills() == 0, "the warning came too late"
    (keeper,) = keepers(folder)
    found = _WARNING.search(warning)
    assert found is not None, warning
    assert trainer.wait() == -signal.SIGKILL
    kills = room.oom_kills()
    made = _step_of(trainer, warning)  # by its output, some steps after the alarm
    wait_for_keeper_gone(folder)
    saved = [e for e in journal_events(folder, "checkpoint") if e["reason"] == "memory"]
    (told,) = journal_events(folder, "memory")
    assert told["what"] == "cgroup"
    assert abs(told["limit"] - _LIMIT) < 1e6
    assert trainer.output.count("memory grows by") == 1
    assert saved[-1]["step"] >= told["step"]
    assert len(saved) < 10, "as often as is useful, and not more"
    if kills == 2:
        # For some milliseconds the kernel has not yet freed what the trainer had. A request in
        # that time makes it choose again, and only the keeper is left: a process without
        # CAP_SYS_RESOURCE cannot forbid that. Both checkpoint and snapshot outlive it.
        assert is_gone(keeper)
        assert checkpoint_steps(folder)[-1] == saved[-1]["step"]
        assert arena_files(folder)
        verdict = judge_strictly(gather_run(folder))
        assert verdict.cause is Cause.OOM_CGROUP, verdict
        return
    assert kills == 1
    # The keeper was not chosen by the kernel: it has saved the rest.
    died_at = death_of(folder)["time"]
    in_time = [e for e in saved if e["time"] < died_at]  # one more may have been under way
    assert in_time
    assert in_time[-1]["step"] >= told["step"]
    death = death_of(folder)
    assert death["status"] == -signal.SIGKILL
    assert (oom_kills(death, "start"), oom_kills(death, "before")) == (0, 0)
    assert oom_kills(death, "death") == 1
    assert (death["pid"], death["rank"], death["asked"]) == (trainer.pid, 0, None)
    assert death["durable_step"] == checkpoint_steps(folder)[-1] >= max(made, saved[-1]["step"])
    times = [sample["t"] for sample in death["memory"]]
    assert times == sorted(times)
    assert death["memory"][-1]["cgroup"] > 0.75 * _LIMIT
    assert death["memory"][-1]["rss"] > death["memory"][0]["rss"]
    # The leak is of 50 MB/s, but in a short time on a busy machine it is less, or more.
    lowest, highest = _growth_before(told["time"], death["memory"])
    assert 0.9 * lowest <= int(found[1]) * 1e6 <= 1.1 * highest


# Over 5 s: the memory grows at the pace of a leak.
@needs_cgroup
def test_before_the_kernel_kills_it_there_is_a_warning_and_a_checkpoint(folder, leaking, room):
    trainer = leaking(folder, *_LEAK, *_RARE, prefix=room.prefix)
    _check_warned_saved_and_killed(trainer, folder, room)
    warned = journal_events(folder, "memory")[0]["step"] or 0
    made = int(re.findall(r"^step (\d+)$", trainer.output, re.MULTILINE)[-1])
    again = leaking(folder, "--total", made + 3)
    assert again.ready() >= warned
    assert again.wait() == 0


@pytest.mark.nightly  # as for root
@needs_cgroup
@pytest.mark.skipif(why_no_user() is not None, reason=why_no_user() or "")
def test_an_ordinary_user_is_warned_and_saved_as_well(leaking, room):
    with home_of_user() as home:
        folder = home / "run"
        user = environment(HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
        prefix = (*room.prefix, *as_user())
        trainer = leaking(folder, *_LEAK, *_RARE, prefix=prefix, env=user, cwd=home)
        trainer.ready()
        score = Path(f"/proc/{trainer.pid}/oom_score_adj").read_text()
        assert int(score) == _own_score() + 100
        _check_warned_saved_and_killed(trainer, folder, room)


@pytest.mark.nightly  # above: one process; tests/ranks/test_saves.py: ranks save together
@needs_cgroup
def test_two_ranks_save_together_before_the_memory_of_one_is_full(folder, leaking, room):
    ranks = [
        leaking(
            folder,
            *_LEAK,
            "--leaks-in",
            1,
            *_RARE,
            prefix=room.prefix,
            env=environment(RANK=str(rank), WORLD_SIZE="2"),
        )
        for rank in range(2)
    ]
    line = ranks[0].wait_for("memory grows by")
    assert re.search(r"rank [01] on \S+: memory grows by", line)
    assert room.oom_kills() == 0, "the warning came too late"
    assert [rank.wait() for rank in ranks] == [75, -signal.SIGKILL]
    wait_for_keeper_gone(folder)
    saved = [e for e in journal_events(folder, "checkpoint") if e["reason"] == "memory"]
    assert saved
    assert saved[-1]["step"] >= _step_of(ranks[0], line)
    assert "memory grows by" not in ranks[1].output
    assert ranks[0].output.count("memory grows by") == 1
    death = death_of(folder, rank=1)
    assert (death["status"], death["rank"], death["pid"]) == (-9, 1, ranks[1].pid)
    assert oom_kills(death, "death") == 1
    assert death["durable_step"] == checkpoint_steps(folder)[-1]
    assert not (folder / "attempts/0001/death.json").exists()


def _own_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def test_a_kill_by_hand_moves_no_counter(folder, leaking):
    trainer = leaking(folder)
    trainer.wait_for("step 20")
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    death = death_of(folder)
    assert (death["status"], death["signals"], death["left_status"]) == (-9, [], None)
    counters = death["counters"]
    assert counters["start"]["cgroup"] == counters["death"]["cgroup"]
    assert death["step"] >= death["durable_step"] >= 1
    ended = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert (ended["status"], ended["how"]) == (None, "was killed by SIGKILL")


def test_who_leaves_by_itself_has_no_post_mortem(folder, leaking):
    trainer = leaking(folder)
    trainer.wait_for("step 20")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143
    wait_for_keeper_gone(folder)
    assert not (folder / "attempts/0001/death.json").exists()


def test_a_child_that_was_killed_before_stands_in_the_post_mortem(folder, leaking, child_of):
    trainer = leaking(folder, "--child")
    child = child_of(trainer)
    wait_until(lambda: seen_in(folder).get("workers"), what="a look at the child")
    child.kill()
    wait_until(lambda: seen_in(folder).get("workers") == 0, what="a look after its end")
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    (ended,) = death_of(folder)["children"]
    assert (ended["pid"], ended["status"]) == (child.pid, -9)
    assert ended["ended"] <= death_of(folder)["time"]


def test_the_heartbeat_shows_what_is_used(folder, leaking):
    trainer = leaking(folder)
    trainer.ready()
    seen = wait_until(lambda: seen_in(folder), what="a sample")
    assert abs(seen["rss"] - psutil.Process(trainer.pid).memory_info().rss) < 20e6
    assert seen["total"] == psutil.virtual_memory().total


def test_the_trainer_goes_first_and_has_its_old_score_at_the_end(folder, leaking):
    is_over = folder.with_name("is-over")
    trainer = leaking(folder, "--until", is_over)
    trainer.wait_for("step 1")
    (keeper,) = keepers(folder)
    score = {pid: _score_of(pid) for pid in (trainer.pid, keeper.pid)}
    assert score == {trainer.pid: _own_score() + 100, keeper.pid: _own_score()}
    keeper.kill()
    trainer.wait_for("started another")
    (other,) = keepers(folder)
    assert (_score_of(other.pid), _score_of(trainer.pid)) == (_own_score(), _own_score() + 100)
    is_over.touch()
    assert trainer.wait() == 0
    assert f"oom_score_adj {_own_score()}\n" in trainer.output


def _score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.nightly  # only here
def test_a_training_that_becomes_another_program_is_not_called_dead_by_a_signal(folder, start):
    """By exec: it has said no goodbye, but it is there."""
    script = folder.parent / "becomes.py"
    script.write_text(
        "import os, sys, holdfast, numpy\n"
        "with holdfast.Run(sys.argv[1], weights=numpy.zeros(3)) as run:\n"
        "    for _ in run.steps(3):\n"
        "        pass\n"
        "    os.execv('/bin/sleep', ['sleep', '20'])\n"
    )
    trainer = start(folder, script=script)
    wait_until(lambda: (folder / "attempts/0001/death.json").exists(), what="the post-mortem")
    wait_for_keeper_gone(folder)
    found = death_of(folder)
    assert (found["status"], found["alive"]) == (None, True)
    os.kill(trainer.pid, signal.SIGKILL)
