"""What the second beat of a trainer costs it.

    python -m bench.pulse [--quick] [--seconds 60] [--torch]

One run: a step is 0.3 ms of plain Python, which needs the GIL that the beat takes for a moment;
with --torch it is a small model. The beat comes every 0.2 s instead of every second, to have many
of them. Steps into which one fell are compared, by their medians, with those into which the moment
half way to the next one fell: any moment is more likely to fall into a long step, so all the others
would not do. Printed are the processor time of the beat's own thread, and how much longer the step
takes that it falls into, both as shares of the second that lies between two beats.

Leaves with 1 if the thread takes more than 0.1% of one core. What this does not show: steps of more
than a second, in which the beat also reads the stacks of all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import holdfast
from holdfast._run.driver import session_of
from holdfast._run.saving import pulse
from holdfast._store.memory.control import PULSE_NS

BEAT_SECONDS = 0.2
MOST_SHARE = 0.001


def plain_step() -> None:
    total = 0
    for number in range(4000):
        total += number * number


def torch_step() -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cpu_seconds(thread: int | None) -> float:
    """Of one thread of this process, so far."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--torch", action="store_true")
    chosen = parser.parse_args()
    step = torch_step() if chosen.torch else plain_step
    pulse._BEAT_SECONDS = BEAT_SECONDS
    with_beat: list[float] = []
    without: list[float] = []
    usual: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(None),
        holdfast.Run(Path(folder, "run"), at=0) as run,
    ):
        words = session_of(run).boundary.words
        assert session_of(run).keeper._pulse is not None
        thread = session_of(run).keeper._pulse._thread.native_id
        until = time.perf_counter() + (5.0 if chosen.quick else chosen.seconds)
        used = cpu_seconds(thread)
        last, half_way = words[PULSE_NS], time.monotonic_ns()
        while (began := time.perf_counter()) < until:
            step()
            seconds = time.perf_counter() - began
            usual.append(seconds)
            if words[PULSE_NS] != last:
                last = words[PULSE_NS]
                half_way = last + int(BEAT_SECONDS / 2 * 1e9)
                with_beat.append(seconds)
            elif half_way and time.monotonic_ns() > half_way:
                half_way = 0
                without.append(seconds)
            run.boundary()
        used = cpu_seconds(thread) - used
    delay = statistics.median(with_beat) - statistics.median(without)
    share = used / len(with_beat)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"the thread: {share * 1e6:.0f} µs a beat, {share:.4%} of one core")
    print(
        f"a step: {statistics.median(usual) * 1e6:.0f} µs, and {delay * 1e6:+.0f} µs with one of "
        f"{len(with_beat)} beats in it: {delay:+.4%} of the time"
    )
    if share > MOST_SHARE:
        print(f"missed: {MOST_SHARE:.1%} of one core is the most", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
