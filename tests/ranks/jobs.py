"""Jobs of several ranks, over all their lives, and what they leave behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import psutil

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.manifest import parse
from holdfast._store.memory.arena import Arena, NotAnArena
from holdfast._store.memory.backing import open_leftover, rank_of
from tests.fork_server import Forked, ForkServer
from tests.support import (
    arena_files,
    checkpoint_steps,
    environment,
    journal_events,
    keepers,
    wait_until,
)

SCRIPT = Path(__file__).with_name("train.py")
# Snapshots as often as they can be, and no checkpoint that nobody asks for.
EAGER = {"max_overhead": 1.0, "checkpoint_every": "10h"}


class Job:
    """One life of a job: its ranks, and what they print."""

    def __init__(self, lives: list[Forked], outputs: list[Path], folder: Path) -> None:
        self.lives = lives
        self.folder = folder
        self._outputs = outputs

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text() if self._outputs[rank].exists() else ""

    @property
    def outputs(self) -> str:
        """Of all ranks, to be shown when something went wrong."""
        parts = (f"-- rank {r} --\n{self.output(r)}" for r in range(len(self.lives)))
        return "\n".join(parts) + self._logs()

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("attempts/*/keeper*.log"))
        return "".join(f"\n-- {log.name} --\n{text}" for log in logs if (text := log.read_text()))

    @property
    def said(self) -> str:
        """What holdfast has said to the user, on whichever rank."""
        lines = "".join(self.output(rank) for rank in range(len(self.lives))).splitlines()
        return "\n".join(line for line in lines if line.startswith("holdfast:"))

    def wait_for(self, text: str, rank: int | None = None, seconds: float = 30.0) -> str:
        """Wait for a line of a rank, or of each, that contains `text`; returns the last."""
        for each in range(len(self.lives)) if rank is None else [rank]:
            wait_until(
                lambda each=each: text in self.output(each) or self.lives[each].is_over,
                seconds,
                f"{text!r} of rank {each} in\n{self.outputs}\n",
            )
            found = [line for line in self.output(each).splitlines() if text in line]
            assert found, f"rank {each} ended without {text!r}:\n{self.outputs}"
        return found[-1]

    def wait_for_step(self, step: int, *ranks: int) -> None:
        """Wait until the ranks have made a step, or all of them have."""
        for rank in ranks or range(len(self.lives)):
            wait_until(
                lambda rank=rank: self._has_made(step, rank) or self.lives[rank].is_over,
                30,
                f"step {step} of rank {rank} in\n{self.outputs}\n",
            )
            assert self._has_made(step, rank), self.outputs

    def _has_made(self, step: int, rank: int) -> bool:
        return f"\nstep {step}\n" in self.output(rank)

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.lives)):
            self.lives[rank].send_signal(number)

    def statuses(self, seconds: float = 30.0) -> list[int]:
        """The exit statuses of all ranks, once all have left."""
        wait_until(
            lambda: all(life.is_over for life in self.lives),
            seconds,
            f"the end of\n{self.outputs}\n",
        )
        return [life.wait(0) for life in self.lives]

    def steps_at_the_end(self) -> list[int]:
        """The step at which each rank has left by an exception."""
        return [int(self._last("left", rank)) for rank in range(len(self.lives))]

    def hashes(self) -> list[str]:
        statuses = self.statuses(60.0)
        assert set(statuses) == {0}, self.outputs
        return [self._last("hash", rank) for rank in range(len(self.lives))]

    def started_at(self) -> list[int]:
        return [int(self._last("ready", rank)) for rank in range(len(self.lives))]

    def in_memory(self, rank: int) -> int:
        """The newest snapshot of a rank when it was held up."""
        return int(self.wait_for("holding", rank).split()[1])

    def _last(self, word: str, rank: int) -> str:
        found = re.findall(rf"^{word} (\S+)$", self.output(rank), re.MULTILINE)
        assert found, f"rank {rank} did not say {word!r}:\n{self.outputs}"
        return str(found[-1])

    def record(self, rank: int) -> dict[str, Any]:
        """What the keeper of a rank has noted of itself."""
        attempts = sorted((self.folder / "attempts").glob("[0-9]*"))
        return dict(json.loads((attempts[-1] / f"ranks/{rank:05d}.json").read_text()))

    def keeper(self, rank: int) -> psutil.Process:
        return psutil.Process(self.record(rank)["keeper"]["pid"])

    def common_step(self) -> int | None:
        return common_step(self.folder, len(self.lives))


def common_step(folder: Path, world: int) -> int | None:
    """The newest step that all ranks hold in memory just now."""
    held: dict[int, set[int]] = {}
    if not (folder / "run.json").exists():
        return None
    for path in arena_files(folder):
        with contextlib.suppress(NotAnArena, OSError), Arena(open_leftover(path)) as arena:
            steps = {record.step for record in arena.whole()}
            held.setdefault(rank_of(path), set()).update(steps)
    if len(held) < world:
        return None
    return max(set.intersection(*held.values()), default=None)


class Jobs:
    """The lives of the jobs in one run folder."""

    def __init__(
        self,
        fork_server: ForkServer,
        place: Path,
        script: Path = SCRIPT,
        framework: str = "torch",
    ) -> None:
        self._fork_server = fork_server
        self._script = script
        self._framework = framework
        self._place = place
        self._numbers = itertools.count(1)
        self.folder = place / "run"
        self.gate = place / "gate"
        self.lives: list[Forked] = []

    def spawn(self, world: int = 2, **plan: Any) -> Job:
        """Start ranks as torch.multiprocessing does: `lives` is their parent, for each of them."""
        return self.start(world, is_spawned=True, **plan)

    def start(
        self,
        world: int = 2,
        *,
        meets: str = "group",
        total: int = 30,
        loop: str = "steps",
        pauses: list[float] | float = 0.01,
        events: list[tuple[int | None, int, str, Any]] = (),
        settings: dict[str, Any] | None = None,
        environment: dict[int, dict[str, str]] | None = None,
        is_spawned: bool = False,
        **more: Any,
    ) -> Job:
        number = next(self._numbers)
        plan = {
            "folder": str(self.folder),
            "world": world,
            "meets": meets,
            "store": str(self._place / f"store{number}"),
            "total": total,
            "loop": loop,
            "pauses": pauses if isinstance(pauses, list) else [pauses] * world,
            "events": list(events),
            "settings": {**EAGER, **(settings or {})},
            **more,
        }
        outputs = [self._place / f"output-{number}-{rank}" for rank in range(world)]
        if is_spawned:
            plan["outputs"] = list(map(str, outputs))
            output = self._place / f"output-{number}"
            life = self._start(output, plan, {})
            return Job([life] * world, outputs, self.folder)
        lives = []
        for rank in range(world):
            variables = dict((environment or {}).get(rank, {}))
            if meets == "files":
                variables |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
            plan["rank"] = rank
            lives.append(self._start(outputs[rank], plan, variables))
        return Job(lives, outputs, self.folder)

    def _start(self, output: Path, plan: dict[str, Any], variables: dict[str, str]) -> Forked:
        life = self._fork_server.start(
            *(self._script, json.dumps(plan)),
            output=output,
            env=environment(GLOO_SOCKET_IFNAME="lo", **variables),
            framework=self._framework,
        )
        self.lives.append(life)
        return life

    def open_gate(self) -> None:
        self.gate.touch()

    # -- what is left behind ------------------------------------------------------------

    def check_checkpoint(self, step: int, world: int) -> None:
        """The newest checkpoint is whole: one manifest, and the files of all ranks."""
        assert checkpoint_steps(self.folder)[-1:] == [step]
        (found,) = (self.folder / "checkpoints").glob(f"step-{step:012d}-*")
        manifest = parse((found / "manifest.json").read_bytes(), str(found))
        names = [f"rank-{rank:05d}.safetensors" for rank in range(world)]
        assert [file.name for file in manifest.files] == names
        assert sorted(path.name for path in found.iterdir()) == sorted(["manifest.json", *names])
        assert manifest.step == step
        for file in manifest.files:
            assert (found / file.name).stat().st_size == file.size_bytes

    def check_nothing_left(self, *, may_leave_arena: bool = False) -> None:
        """No keeper, no rank, no arena, and no checkpoint that was begun and not made."""
        wait_until(lambda: not keepers(self.folder), 30, "the end of the keepers")
        wait_until(
            lambda: not any(life.processes() for life in self.lives),
            30,
            "the end of all processes",
        )
        left = [] if may_leave_arena else arena_files(self.folder)
        assert left == [], (self.events("save-failed"), self._said_by_keepers())
        begun = sorted(path.name for path in (self.folder / "checkpoints").glob(".*"))
        assert begun == [], begun

    def _said_by_keepers(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("attempts/*/keeper*.log"))]

    def events(self, name: str) -> list[dict[str, Any]]:
        return journal_events(self.folder, name)

    def post_mortem(self, rank: int, attempt: int = 1) -> dict[str, Any]:
        """What the keeper of a rank has noted of its death; nothing if it lived."""
        return read_json(RunLayout(self.folder).death(attempt, rank))

    def end(self) -> None:
        """For clean-up only: whatever still runs is ended."""
        for life in self.lives:
            life.kill()
        for keeper in keepers(self.folder):
            keeper.kill()
        if (self.folder / "run.json").exists():
            for path in arena_files(self.folder):
                path.unlink(missing_ok=True)
