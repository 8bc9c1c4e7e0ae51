"""What agreement between ranks costs a step, and how long it takes from a request to the decision.

    python -m bench.ranks [--quick] [--rounds 15]

Per step: real ranks with real keepers, 1, 2 and 4 of them, without any request. In each
round, all ranks at once, an empty loop, the shared words alone, the boundary of a run, and gloo's
`all_reduce` of one integer take turns, in an order that is drawn. Printed are medians over the
rounds, of rank 0, with the lowest and the highest, the empty loop subtracted; the target is that
agreement costs less than 1% of the `all_reduce`, which is what it takes the place of.

To a decision: 8, 64 and 512 keepers without models, over TCP on the loopback. The hub is the real
one, in this process; the members are real too, but 4 processes hold all of them, so that on a small
machine they take turns. From the wish of the last rank to the decision of the hub, and until the
last rank has heard of it.

What this does not show: a network between hosts, GPUs, NCCL, and ranks that are busy computing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

import holdfast
from bench.machine import machine
from holdfast._keeper.network.endpoint import HubPost, MemberPost, PostOwner
from holdfast._keeper.protocol import sender
from holdfast._keeper.ranks.agent import RankAgent
from holdfast._keeper.ranks.hub import Hub
from holdfast._keeper.ranks.state import HubState
from holdfast._run.driver import session_of
from holdfast._store.memory.control import DUE, MARK, private_words

WORLDS = (1, 2, 4)
SIZES = (8, 64, 512)
TARGET = 0.01
MEMBER_PROCESSES = 4
KEY = b"k" * 32
QUIET = holdfast.Settings(max_overhead=0, checkpoint_every="10h")
Figures = dict[str, list[float]]


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Do it in a child; returns its pid and where its answer will come, as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        os.close(read)
        answer = json.dumps(work()).encode()
        while answer:
            answer = answer[os.write(write, answer) :]
        status = 0
    finally:
        os._exit(status)


def answer_of(pid: int, read: int) -> Any:
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"a process of the benchmark failed (status {status})")
    return json.loads(text)


# -- what a step costs ------------------------------------------------------------------


def empty_loop(count: int) -> None:
    for _ in range(count):
        pass


def touch_words(words: Any, count: int) -> None:
    """What agreement adds to a boundary without a request: one word written, one read."""
    for _ in range(count):
        words[MARK] = mark = 2
        if mark >= words[DUE]:
            raise AssertionError("nobody has asked for anything")


def pass_boundaries(run: holdfast.Run, count: int) -> None:
    boundary = session_of(run).boundary
    for _ in range(count):
        boundary.pass_step()


def reduce_integers(number: torch.Tensor, count: int) -> None:
    for _ in range(count):
        dist.all_reduce(number)


def measure_rank(rank: int, world: int, folder: Path, rounds: int, count: int) -> Figures:
    """Seconds of each way, per step, in every round."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the run says is no result
    number = torch.ones(1, dtype=torch.int64)
    found: Figures = {}
    order = random.Random(7)  # the same on all ranks
    with holdfast.Run(folder / "run", settings=QUIET, state=rank) as run:
        words = session_of(run).boundary.words
        ways: dict[str, tuple[Callable[[], None], int]] = {
            "empty": (lambda: empty_loop(count), count),
            "words": (lambda: touch_words(words, count), count),
            "boundary": (lambda: pass_boundaries(run, count), count),
            "all_reduce": (lambda: reduce_integers(number, count // 50), count // 50),
        }
        session_of(run).loops._enter()
        for each in range(rounds + 1):
            names = sorted(ways)
            order.shuffle(names)
            for name in names:
                work, times = ways[name]
                dist.barrier()
                began = time.perf_counter()
                work()
                if each:  # the first round warms up
                    found.setdefault(name, []).append((time.perf_counter() - began) / times)
        session_of(run).loops.leave()
        dist.barrier()
    dist.destroy_process_group()
    return found


def measure_world(world: int, rounds: int, count: int) -> Figures:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        ranks = [
            fork(lambda rank=rank: measure_rank(rank, world, folder, rounds, count))
            for rank in range(world)
        ]
        answers: list[Figures] = [answer_of(*rank) for rank in ranks]
        return answers[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show_world(world: int, found: Figures) -> bool:
    """Print one line for each way; True if the target is met."""
    empty = statistics.median(found["empty"])

    def words_of(name: str) -> str:
        low, middle, high = (f(found[name]) - empty for f in (min, statistics.median, max))
        return f"{middle * 1e6:9.2f} µs ({low * 1e6:.2f} to {high * 1e6:.2f})"

    reduced = statistics.median(found["all_reduce"]) - empty
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    print(f"{ranks:8} all_reduce  {words_of('all_reduce')}")
    met = True
    for name, meaning in (("words", "agreement alone"), ("boundary", "the whole boundary")):
        share = (statistics.median(found[name]) - empty) / reduced
        verdict = ""
        if world > 1:
            met = met and share < TARGET
            verdict = "   target 1%   " + ("ok" if share < TARGET else "MISSED")
        print(f"{'':8} {name:11} {words_of(name)}  {share:8.3%} of it: {meaning}{verdict}")
    return met


# -- from a request to a decision -----------------------------------------------------------


class Loop:
    """A keeper's loop, for one keeper or for many: selector, timers, posts."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.posts: list[Any] = []
        self._due: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def turn(self) -> None:
        now = time.monotonic()
        ready = [act for at, act in self._due if at <= now]
        self._due = [pair for pair in self._due if pair[0] > now]
        for act in ready:
            act()
        for post in self.posts:
            post.tick(now)
        times = [at for at, _ in self._due] + [post.next_at() for post in self.posts]
        wait = min([*times, now + 0.2]) - time.monotonic()
        for key, _ in self.selector.select(max(0.0, wait)):
            key.data()


class NoBooks:
    """Nothing is written here."""

    has_job = False

    def note(self, event: str, **fields: Any) -> None: ...

    def write_seconds(self) -> float:
        return 0.0


def make_member(rank: int, loop: Loop, told: Callable[[], None]) -> RankAgent:
    """With as much of a keeper as it needs; `told` is called when it hears of a decision."""
    words = private_words()
    words[MARK] = random.randrange(0, 2000, 2)
    tell = sender(lambda kind, **_: told() if kind == "decide" else None)
    storage = Mock()
    storage.holdings.boundaries = list
    keeper: Any = SimpleNamespace(
        policy=SimpleNamespace(attempt=1, rank=rank),
        trainer=SimpleNamespace(words=words, rests=False, pid=0, tell=tell),
        storage=storage,
        timers=SimpleNamespace(after=loop.later),
        hangs=None,
    )
    return RankAgent(keeper, sender(lambda *_, **__: None), Mock())


def run_members(ranks: list[int], last: int, port: int, mail: Path, rounds: int) -> list[float]:
    """The members of one process; returns when the last of them has heard each decision."""
    loop = Loop()
    heard: list[int] = [0] * rounds
    times: list[float] = []
    counts: dict[int, int] = dict.fromkeys(ranks, 0)
    wisher: Any = None

    def told(rank: int) -> None:
        number = counts[rank]
        counts[rank] += 1
        heard[number] += 1
        if heard[number] == len(ranks):
            times.append(time.monotonic())
            if wisher is not None:
                loop.later(0.05, ask)  # when all others have heard it too

    def ask() -> None:
        if len(times) < rounds:
            wish = {"kind": "save", "reason": "bench"}
            wisher.send(0, "wish", wish=wish, asked=time.monotonic())

    for rank in ranks:
        member = make_member(rank, loop, lambda rank=rank: told(rank))
        owner = PostOwner(
            loop.selector,
            KEY,
            mail,
            hear=lambda _, message, member=member: (
                ask()
                if message["kind"] == "begin"
                else member.receive(message.pop("kind"), **message)
            ),
            lost=lambda _: None,
            found=lambda _, member=member: member.greet(),
        )
        post = MemberPost(owner, rank, lambda: [("127.0.0.1", port)])
        member._hub = sender(partial(post.send, 0))
        loop.posts.append(post)
        if rank == last:
            wisher = post
    while len(times) < rounds:
        loop.turn()
    for post in loop.posts:
        post.close()
    return times


def measure_decisions(size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the wish of the last rank to the decision, and until all have heard it."""
    mail = Path(tempfile.mkdtemp(prefix="holdfast-bench-")) / "mail"
    loop = Loop()
    asked: list[float] = []
    decided: list[float] = []
    heard_here: list[float] = []
    member = make_member(0, loop, lambda: heard_here.append(time.monotonic()))

    def send(rank: int, kind: str, /, **fields: Any) -> None:
        if kind == "decide" and len(decided) < len(asked):
            decided.append(time.monotonic())
        if rank:
            post.send(rank, kind, **fields)
        else:
            loop.later(0.0, lambda: member.receive(kind, **fields))

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "wish":
            asked.append(message.pop("asked"))
        hub.receive(rank, message.pop("kind"), **message)

    books: Any = NoBooks()
    hub = Hub(HubState(size, 1, send, books))
    owner = PostOwner(loop.selector, KEY, mail, hear=hear, lost=hub.lost, found=hub.found)
    post = HubPost(owner, size, loopback=True)
    loop.posts.append(post)
    member._hub = sender(
        lambda kind, **fields: loop.later(0.0, lambda: hub.receive(0, kind, **fields))
    )
    member.greet()
    shares = [list(range(1, size))[each::MEMBER_PROCESSES] for each in range(MEMBER_PROCESSES)]
    processes = [
        fork(lambda share=share: run_members(share, size - 1, post.port, mail, rounds))
        for share in shares
    ]
    while not all(entry.is_here for entry in hub.state.entries.values()):
        loop.turn()
    post.send(size - 1, "begin")
    while len(heard_here) < rounds or post.unacknowledged():
        loop.turn()
        hub.tick()
    post.close()
    times = [answer_of(*process) for process in processes]
    shutil.rmtree(mail.parent, ignore_errors=True)
    lasts = [max(each) for each in zip(heard_here, *times, strict=True)]
    return (
        [after - before for before, after in zip(asked, decided, strict=True)],
        [after - before for before, after in zip(asked, lasts, strict=True)],
    )


def show_decisions(size: int, decided: list[float], heard: list[float]) -> None:
    def words_of(values: list[float]) -> str:
        low, middle, high = (f(values) * 1e3 for f in (min, statistics.median, max))
        return f"{middle:7.1f} ms ({low:.1f} to {high:.1f})"

    print(
        f"{size:4} keepers   decided after {words_of(decided)}   all know after {words_of(heard)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds, and no 512 keepers")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds, count = (3, 5_000) if options.quick else (options.rounds, 20_000)
    print(f"{machine()}\nmedians of {rounds} rounds\n")
    met = [show_world(world, measure_world(world, rounds, count)) for world in WORLDS]
    print()
    sizes = SIZES[:2] if options.quick else SIZES
    found: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in sizes}
    for _ in range(3):  # by turns, since the machine's speed drifts
        for size in sizes:
            decided, heard = measure_decisions(size, max(1, rounds // 3))
            found[size][0].extend(decided)
            found[size][1].extend(heard)
    for size, figures in found.items():
        show_decisions(size, *figures)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
