"""What agreement between ranks costs: at each step, and from a request to the decision.

    python bench/ranks.py

Two questions. What does a boundary cost in a run of 1, 2 and 4 ranks while nobody asks for
anything, against an all_reduce of one integer, which is what others pay at each step? And how
does the time from a request to the decision grow with the number of keepers?
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 1000  # in a block
BLOCKS = 15
REDUCTIONS = 200
ROUNDS = 20
PROCESSES = 8


# -- the cost of a step ---------------------------------------------------------------


def measure_steps(rank: int, size: int, place: str, results: Any) -> None:
    """Blocks of boundaries, of collectives and of nothing, in turns, on one rank."""
    import torch
    import torch.distributed as dist

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{place}/store", size), rank=rank, world_size=size
    )
    one = torch.ones(1, dtype=torch.int64)
    found: dict[str, list[float]] = {"boundary": [], "all_reduce": [], "nothing": []}
    settings = holdfast.Settings(max_overhead=0, checkpoint_every="1h")
    with holdfast.Run(f"{place}/run", settings=settings, number=1) as run:
        began = time.perf_counter()
        for step in run.steps(STEPS * BLOCKS + 1):
            if step % STEPS:
                continue
            if step:
                found["boundary"].append((time.perf_counter() - began) / STEPS)
            began = time.perf_counter()
            for _ in range(REDUCTIONS):
                dist.all_reduce(one)
            found["all_reduce"].append((time.perf_counter() - began) / REDUCTIONS)
            began = time.perf_counter()
            for each in range(STEPS):
                if each % STEPS:
                    continue
            found["nothing"].append((time.perf_counter() - began) / STEPS)
            began = time.perf_counter()
    if rank == 0:
        results.put({name: statistics.median(each) for name, each in found.items()})
    dist.destroy_process_group()


def show_steps() -> None:
    print("| ranks | a boundary | an empty loop | all_reduce of one integer | share |")
    print("|---|---|---|---|---|")
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as place:
            results: Any = _context().Queue()
            ranks = [
                _context().Process(target=measure_steps, args=(rank, size, place, results))
                for rank in range(size)
            ]
            for each in ranks:
                each.start()
            found = results.get(timeout=300)
            for each in ranks:
                each.join()
        cost = found["boundary"] - found["nothing"]
        print(
            f"| {size} | {1e6 * found['boundary']:.2f} µs | {1e6 * found['nothing']:.2f} µs | "
            f"{1e6 * found['all_reduce']:.0f} µs | {100 * cost / found['all_reduce']:.2f} % |",
            flush=True,
        )


# -- from the request to the decision ---------------------------------------------------


class Members:
    """The keepers of some ranks, in one process: real connections, no trainers."""

    def __init__(self, ranks: range, port: int, key: bytes, place: Path) -> None:
        from holdfast._keeper.member import Member
        from holdfast._keeper.wire import MemberPost
        from holdfast._save.control import private_words

        self.selector = selectors.DefaultSelector()
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.decided: list[float] = []
        self.posts = []
        for rank in ranks:
            words = private_words()
            words[7] = 2 * rank  # each at a step of its own
            members: list[Any] = []
            post = MemberPost(
                self.selector,
                key,
                rank,
                lambda: [("127.0.0.1", port)],
                place,
                hear=lambda _, message, members=members: members[0].hear(message),
                lost=lambda _: None,
                found=lambda _, members=members: members[0].greet(),
            )
            send = lambda kind, post=post, **fields: post.send(0, kind, **fields)  # noqa: E731
            members.append(Member(1, words, send, self, {"rank": rank}))
            self.posts.append(post)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.due.append((time.monotonic() + seconds, act))

    def tell(self, kind: str, **_: Any) -> None:
        if kind == "decide":
            self.decided.append(time.monotonic())

    def held(self) -> list[tuple[int, int]]:
        return []

    def serve(self, results: Any, quits: Any) -> None:
        told = 0
        while not quits.is_set():
            now = time.monotonic()
            ripe = [act for at, act in self.due if at <= now]
            self.due = [pair for pair in self.due if pair[0] > now]
            for act in ripe:
                act()
            for post in self.posts:
                if now >= post.next_at():
                    post.tick(now)
            for key, _ in self.selector.select(0.001 if self.due else 0.01):
                key.data()
            if len(self.decided) - told == len(self.posts):
                told = len(self.decided)
                results.put(max(self.decided))
        for post in self.posts:
            post.close()


def serve_members(ranks: range, port: int, key: bytes, place: Path, results: Any, q: Any) -> None:
    Members(ranks, port, key, place).serve(results, q)


class NoBooks:
    """A hub without a run folder."""

    def begin(self, key: tuple[int, int]) -> str | None: ...

    def commit(self, key: tuple[int, int], reason: str, files: Any) -> None: ...

    def note(self, event: str, **fields: Any) -> None: ...

    def write_seconds(self) -> float:
        return 0.0


def measure_decisions(size: int) -> tuple[float, float]:
    """Median seconds from the request to the decision, and until the last keeper has it."""
    from holdfast._keeper.hub import Hub
    from holdfast._keeper.wire import HubPost

    key = os.urandom(32)
    decisions: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        selector = selectors.DefaultSelector()
        hubs: list[Hub] = []
        post = HubPost(
            selector,
            key,
            size + 1,
            Path(place),
            loopback=True,
            hear=lambda rank, message: hubs[0].hear(rank, message),
            lost=lambda rank: hubs[0].lost(rank),
            found=lambda rank: hubs[0].found(rank),
        )

        def send(rank: int, kind: str, **fields: Any) -> None:
            if kind == "decide" and (not decisions or decisions[-1] < began):
                decisions.append(time.monotonic())
            if rank:
                post.send(rank, kind, **fields)

        hub = Hub(size + 1, 1, send, NoBooks())
        hubs.append(hub)
        hub.seats[0].ended = None
        results, quits = _context().Queue(), _context().Event()
        shares = _shares(size)
        processes = [
            _context().Process(
                target=serve_members, args=(share, post.port, key, Path(place), results, quits)
            )
            for share in shares
        ]
        for each in processes:
            each.start()
        began = float("inf")
        _turn(selector, post, lambda: sum(seat.is_here for seat in hub.seats.values()) == size)
        times, last = [], []
        for _ in range(ROUNDS):
            began = time.monotonic()
            known = len(decisions)
            hub.hear(1, {"kind": "wish", "wish": {"kind": "save", "reason": "bench"}})
            # Rank 0 is the hub's own: it answers at once.
            hub.hear(0, {"kind": "at", "round": hub._rounds, "mark": 0})
            _turn(selector, post, lambda known=known: len(decisions) > known)
            times.append(decisions[-1] - began)
            arrived: list[float] = []

            def has_all(arrived: list[float] = arrived) -> bool:
                while not results.empty():
                    arrived.append(results.get())
                return len(arrived) == len(shares)

            _turn(selector, post, has_all)
            last.append(max(arrived) - began)
        quits.set()
        for each in processes:
            each.join()
        post.close()
    return statistics.median(times), statistics.median(last)


def _turn(selector: selectors.BaseSelector, post: Any, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        post.tick(time.monotonic())
        for key, _ in selector.select(0.001):
            key.data()


def _shares(size: int) -> list[range]:
    count = min(size, PROCESSES)
    bounds = [1 + size * number // count for number in range(count + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def show_decisions() -> None:
    print("| keepers | request to decision | until the last keeper has it |")
    print("|---|---|---|")
    for size in (8, 64, 512):
        decided, heard = measure_decisions(size)
        print(f"| {size} | {1e3 * decided:.1f} ms | {1e3 * heard:.1f} ms |", flush=True)


def _context() -> Any:
    return multiprocessing.get_context("spawn")


def main() -> int:
    show_steps()
    print()
    show_decisions()
    print(
        f"\nMedians of {BLOCKS} blocks of {STEPS} steps, in turns with blocks of {REDUCTIONS} "
        f"collectives (gloo, one machine);\nof {ROUNDS} requests, the keepers spread over "
        f"{PROCESSES} processes that share the machine's {os.cpu_count()} cores.\n"
        "Not shown: NCCL, whose collectives also wait for the device; a network between hosts; "
        "512 processes of their own."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
