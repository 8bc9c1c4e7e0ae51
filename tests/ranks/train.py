"""One rank of a training: a part of its state is equal on all ranks, the rest is its own.

Prints `ready STEP`, `step N` when a step is made, `holding STEP_IN_MEMORY` where a plan holds it
up, `left STEP` when it leaves by an exception, and `hash HEX` of all state and generators.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing

import holdfast
from holdfast import rules
from holdfast._run.driver import session_of

_BATCHES = 12  # of an epoch
_WIDTH = 64


class Rank:
    """One process, and what it trains."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rank: int = plan["rank"]
        self.is_grouped: bool = plan["meets"] == "group"
        self.common = torch.zeros(_WIDTH)
        self.own = np.zeros(_WIDTH)
        self.run = holdfast.Run(
            plan["folder"],
            settings=holdfast.Settings(**plan["settings"]),
            stop_when=_rule(plan.get("stop_when")),
            own=self.own,
            **({"common": self.common} if self.is_grouped else {}),
            **({"frozen": np.full(plan["frozen"], self.rank + 0.5)} if "frozen" in plan else {}),
        )
        self.steps = 0

    def train(self) -> None:
        random.seed(self.rank)
        np.random.seed(self.rank)
        torch.manual_seed(self.rank)
        try:
            with self.run as run:
                print("ready", run.step, flush=True)
                self._happen(run.step, "before")
                getattr(self, f"_loop_{self.plan['loop']}")()
        except BaseException:
            print("left", self.run.step, flush=True)
            raise
        self._show_hash()

    # -- loops ------------------------------------------------------------------------

    def _loop_steps(self) -> None:
        for _ in self.run.steps(self.plan["total"]):
            if self.run.step == 0:
                print("in its loop", flush=True)
            self._draw(1.0)
            self._end_step()

    def _loop_twice(self) -> None:
        """One loop after the other, as for a warm-up."""
        for total in (self.plan["total"] // 2, self.plan["total"]):
            for _ in self.run.steps(total):
                self._draw(1.0)
                self._end_step()

    def _loop_batches(self, accumulate: int = 1) -> None:
        """Epochs of batches; with `accumulate` several of them are one step."""
        sum_of = 0.0
        for _ in self.run.epochs(self.plan["total"]):
            for batch in self.run.batches(
                [float(i) for i in range(_BATCHES)], accumulate=accumulate
            ):
                sum_of += batch
                if self.run.completes_step:
                    self._draw(sum_of / _BATCHES)
                    sum_of = 0.0
                    self._end_step()
                else:
                    self._happen(self.run.step, "micro")

    def _loop_uneven(self) -> None:
        """Rank 0 has two batches more than the others, which do not wait for it."""
        for _ in self.run.epochs(self.plan["total"]):
            for batch in self.run.batches(list(range(_BATCHES + 2 * (self.rank == 0)))):
                self._draw(batch / _BATCHES)
                self._end_step()

    def _loop_accumulate(self) -> None:
        self._loop_batches(accumulate=3)

    def _loop_eval(self) -> None:
        """An evaluation after each epoch: on all ranks, or on those that the plan names."""
        who = self.plan.get("evaluates", range(self.plan["world"]))
        for _ in self.run.epochs(self.plan["total"]):
            for batch in self.run.batches([float(i) for i in range(_BATCHES)]):
                self._draw(batch / _BATCHES)
                self._end_step()
            if self.rank in who:
                with self.run.phase("eval"):
                    self._happen(self.run.step, "eval")

    # -- a step -----------------------------------------------------------------------

    def _draw(self, scale: float) -> None:
        self.own += np.random.standard_normal(_WIDTH) * random.random() * scale
        np.tanh(self.own, out=self.own)
        drawn = torch.randn(_WIDTH) * scale
        if self.is_grouped:
            torch.distributed.all_reduce(drawn)
            self.common.add_(drawn).tanh_()

    def _end_step(self) -> None:
        self._happen(self.run.step, "step")
        time.sleep(self.plan["pauses"][self.rank])
        print("step", self.run.step + 1, flush=True)

    def _happen(self, step: int, where: str) -> None:
        """What the plan has for this rank in this step."""
        for rank, at, what, value in self.plan["events"]:
            place, _, act = what.rpartition(":")
            if rank in (None, self.rank) and at == step and (place or "step") == where:
                getattr(self, f"_do_{act}")(value)

    # -- events -----------------------------------------------------------------------

    def _say_holding(self) -> None:
        newest = session_of(self.run).saver.newest
        print("holding", newest.step if newest else None, flush=True)

    def _do_sleep(self, seconds: float) -> None:
        self._say_holding()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(left)

    def _do_call(self, seconds: float) -> None:
        """A call into C that holds the interpreter."""
        self._say_holding()
        library = ctypes.PyDLL(None)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            library.usleep(int(left * 1e6))

    def _do_gate(self, name: str) -> None:
        """Wait for a file, in short calls."""
        self._say_holding()
        deadline = time.monotonic() + 60.0
        while not Path(name).exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _do_until_bad(self, _: Any) -> None:
        """Wait, in the first life, until this rank has heard that another one is bad."""
        deadline = time.monotonic() + 60.0
        ruling = session_of(self.run).ruling
        while self.run.attempt == 1 and not ruling.is_bad() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _do_hang(self, _: Any) -> None:
        """A lock that is taken twice, in the first life only."""
        if self.run.attempt == 1:
            self._say_holding()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

    def _do_save(self, _: Any) -> None:
        self.handle = self.run.save()

    def _do_wait(self, _: Any) -> None:
        print("saved", self.handle.wait(), flush=True)

    def _do_stop(self, _: Any) -> None:
        self.run.stop("enough")

    def _do_log(self, values: dict[str, float]) -> None:
        """In the first life only, as a bad draw that does not come again."""
        if self.run.attempt == 1:
            self.run.log(**values)

    def _do_die(self, _: Any) -> None:
        if self.run.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def _do_raise(self, text: str) -> None:
        raise ValueError(text)

    def _do_leave(self, _: Any) -> None:
        raise SystemExit(0)

    def _show_hash(self) -> None:
        digest = hashlib.sha256(self.own.tobytes() + self.common.numpy().tobytes())
        digest.update(np.random.get_state()[1].tobytes() + repr(random.getstate()).encode())
        digest.update(torch.get_rng_state().numpy().tobytes())
        print("hash", digest.hexdigest(), flush=True)


def _rule(spelled: list[Any] | None) -> rules.Rule | None:
    """As a plan spells it: the name of the rule, and what it is given."""
    if spelled is None:
        return None
    name, given, named = spelled
    made: rules.Rule = getattr(rules, name)(*given, **named)
    return made


@contextlib.contextmanager
def _group(plan: dict[str, Any]) -> Iterator[None]:
    if plan["meets"] != "group":
        yield
        return
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{plan['store']}", rank=plan["rank"], world_size=plan["world"]
    )
    yield
    torch.distributed.destroy_process_group()


def main(plan: dict[str, Any]) -> None:
    with _group(plan):
        Rank(plan).train()


def spawn(plan: dict[str, Any]) -> None:
    """Start the ranks as children of this process."""
    torch.multiprocessing.start_processes(
        _be_spawned, (plan,), nprocs=plan["world"], start_method="fork"
    )


def _be_spawned(rank: int, plan: dict[str, Any]) -> None:
    written = os.open(plan["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    main({**plan, "rank": rank})


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    spawn(plan) if "outputs" in plan else main(plan)
