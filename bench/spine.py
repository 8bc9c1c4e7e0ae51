"""What holdfast costs, beside the plain thing it cannot be quicker than.

    python bench/spine.py [--quick] [--megabytes 1000] [--rounds 7]

Every ratio comes from one interleaved run: in each round the plain way and
holdfast's take turns on the same bytes. Printed are the median, the spread
(lowest to highest) and the ratio of the medians. What this does not show: other
libraries, GPUs, network file systems and other disks than the one under --folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

import holdfast
from holdfast._record.attempts import read_json
from holdfast._save.arena import Arena, NotAnArena
from holdfast._save.backing import find_leftovers, open_leftover, populate
from holdfast._save.capture import capture

QUIET = holdfast.Settings(max_overhead=0, checkpoint_every="10h")


@dataclass
class Topic:
    """One comparison: seconds of both ways in every round."""

    name: str
    plain_name: str
    target: float
    plain: list[float]
    ours: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.plain)


def build(megabytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A transformer whose fp32 parameters and AdamW moments are about `megabytes` together."""
    torch.manual_seed(0)
    width, layers = 512, max(1, round(megabytes * 1e6 / 12 / (12 * 512 * 512)))
    layer = [
        torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        for _ in range(layers)
    ]
    model = torch.nn.Sequential(*layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return sum(spec.size_bytes for spec in capture({"m": model, "o": optimizer}).specs)


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def settle_keeper(run: holdfast.Run) -> None:
    """Wait until the keeper rests, so that it does not disturb what is measured next."""
    keeper = psutil.Process(run._custody.keeper_pid)
    before = -1.0
    while (used := sum(keeper.cpu_times()[:2])) != before:
        before = used
        time.sleep(0.05)


# -- topics ---------------------------------------------------------------------------


def measure_boundary(folder: Path) -> list[float]:
    """Seconds of one boundary with nothing to do, of many in a row, in several rounds."""
    model = torch.nn.Linear(4, 4)
    found = []
    with holdfast.Run(folder / "boundary", settings=QUIET, model=model) as run:
        run.boundary()
        run.boundary()
        for _ in range(9):
            count = 20_000
            began = time.perf_counter()
            for _ in range(count):
                run.boundary()
            found.append((time.perf_counter() - began) / count)
    return found


def measure_stall(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rounds: int
) -> Topic:
    tensors = capture({"model": model, "optimizer": optimizer}).values
    size = sum(t.numel() * t.element_size() for t in tensors)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size + 4096)
        mapped = mmap.mmap(file.fileno(), size + 4096)
        populate(mapped)
        targets = list(_views(mapped, tensors))
        topic = Topic("stall of a snapshot", "copy into mapped shared memory", 1.3, [], [])
        settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="10h")
        with holdfast.Run(
            folder / "stall", settings=settings, model=model, optimizer=optimizer
        ) as run:
            run.boundary()
            while run._saver.newest is None:
                run.boundary()
            for number in range(rounds + 2):
                settle_keeper(run)
                plain = timed(lambda: torch._foreach_copy_(targets, tensors))
                taken = None
                while taken is None or taken.step != run.step:
                    settle_keeper(run)
                    ours = timed(run.boundary)
                    taken = run._saver.newest
                if number >= 2:  # all three slots have been touched by then
                    topic.plain.append(plain)
                    topic.ours.append(ours)
    return topic


def _views(mapped: mmap.mmap, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    base = torch.frombuffer(mapped, dtype=torch.uint8)
    at = 0
    for tensor in tensors:  # all of them fp32, so each stays aligned
        size = tensor.numel() * tensor.element_size()
        yield base[at : at + size].view(tensor.dtype).view(tensor.shape)
        at += size


def measure_durable(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rounds: int
) -> Topic:
    topic = Topic("request to durable", "write + fsync", 1.15, [], [])
    settings = holdfast.Settings(max_overhead=0, checkpoint_every="10h", keep_last=1)
    with holdfast.Run(
        folder / "durable", settings=settings, model=model, optimizer=optimizer
    ) as run:
        handle = run.save()
        while not handle.done:
            run.boundary()
            time.sleep(0.01)
        size = next(run._layout.checkpoints.glob("step-*/rank-*")).stat().st_size
        payload = memoryview(bytearray(os.urandom(1 << 20)) * (size // (1 << 20)))

        def write_plainly() -> None:
            with (folder / "plain").open("wb", buffering=0) as file:
                done = 0
                while done < len(payload):
                    done += file.write(payload[done : done + (64 << 20)])
                os.fsync(file.fileno())

        def save() -> None:
            handle = run.save()
            run.boundary()
            handle.wait()

        for _ in range(rounds):
            os.sync()
            topic.plain.append(timed(write_plainly))
            (folder / "plain").unlink()
            os.sync()
            settle_keeper(run)
            topic.ours.append(timed(save))
    return topic


def measure_resume(folder: Path, megabytes: int, rounds: int) -> Topic:
    """Fresh processes: one copies the bytes back from the arena, one opens the run."""
    topic = Topic("resume from memory", "copy from shared memory", 1.5, [], [])
    run_folder = folder / "resume"
    arena = _leave_arena_behind(run_folder, megabytes)
    kept = arena.with_name("holdfast-bench-arena")
    shutil.copyfile(arena, kept)
    try:
        for _ in range(rounds):
            for what, place, seconds in (
                ("copy-back", arena, topic.plain),
                ("resume", run_folder, topic.ours),
            ):
                _put_back(kept, arena)
                os.sync()  # else a small fsync waits for what the last round wrote
                seconds.append(_child(what, str(place), megabytes))
    finally:
        kept.unlink()
        arena.unlink(missing_ok=True)
    return topic


def _put_back(kept: Path, arena: Path) -> None:
    arena.unlink(missing_ok=True)
    shutil.copyfile(kept, arena)
    arena.chmod(0o600)


def _leave_arena_behind(run_folder: Path, megabytes: int) -> Path:
    """Train in a child until a hashed snapshot is there, then kill trainer and keeper."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", "train", run_folder, f"{megabytes}"]
    )
    try:
        while True:
            time.sleep(0.1)
            assert child.poll() is None, "the training child died"
            identity = read_json(run_folder / "run.json").get("run_id")
            for path in find_leftovers(identity) if identity else []:
                if _is_filled(path):
                    keeper = read_json(run_folder / "attempts/0001/heartbeat.json")["keeper"]
                    os.kill(keeper["pid"], signal.SIGKILL)
                    child.kill()
                    child.wait()
                    return path
    finally:
        child.kill()
        child.wait()


def _is_filled(path: Path) -> bool:
    try:
        with Arena(open_leftover(path)) as arena:
            whole = arena.whole()
            return len(whole) == 3 and whole[0].is_hashed
    except NotAnArena:  # being made just now
        return False


def _child(what: str, place: str, megabytes: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, place, str(megabytes)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout.split()[-1])


def run_child(what: str, place: str, megabytes: int) -> None:
    if what == "train":
        model, optimizer = build(megabytes)
        settings = holdfast.Settings(max_overhead=0.5, checkpoint_every="10h")
        with holdfast.Run(place, settings=settings, model=model, optimizer=optimizer) as run:
            taken = 0
            while not run.boundary():
                newest = run._saver.newest
                if newest is not None and newest.sequence >= 4:
                    time.sleep(600)  # it is killed here
                taken = max(taken, newest.sequence if newest else 0)
                time.sleep(0.3)
    torch.manual_seed(0)
    model, _ = build(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # fresh: without moments
    if what == "copy-back":
        arena = Arena(open_leftover(Path(place)))
        slot = arena.whole()[0].slot
        plan = arena.plan(slot)
        live = model.state_dict()
        image = arena.image(slot)
        moments = []
        began = time.perf_counter()
        for spec, offset in plan.in_file_order():
            if spec.kind != "torch":  # generators: a few kilobytes
                continue
            raw = torch.frombuffer(image[offset : offset + spec.size_bytes], dtype=torch.uint8)
            stored = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
            if spec.name.startswith("model."):
                live[spec.name.removeprefix("model.")].copy_(stored)
            else:
                moments.append(stored.clone())
        print(time.perf_counter() - began)
    elif what == "resume":
        run = holdfast.Run(place, settings=QUIET, model=model, optimizer=optimizer)
        began = time.perf_counter()
        with run:
            print(time.perf_counter() - began)


def measure_import(rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of `import holdfast`, and of that and the first use of `holdfast.Run`."""
    code = (
        "import time; began = time.perf_counter(); import holdfast; "
        "print(time.perf_counter() - began); holdfast.Run; print(time.perf_counter() - began)"
    )
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        found.append([float(word) for word in done.stdout.split()])
    return [first for first, _ in found], [second for _, second in found]


# -- the table --------------------------------------------------------------------------


def machine() -> str:
    cores = os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cores} cores {platform.machine()}, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} torch threads"
    )


def _verdict(met: bool) -> str:
    return "ok" if met else "MISSED"


def show(topic: Topic) -> None:
    def words(values: list[float]) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"{middle * 1e3:8.1f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})"

    verdict = _verdict(topic.ratio <= topic.target)
    print(f"{topic.name:22} {topic.ratio:5.2f} x   target {topic.target} x   {verdict}")
    print(f"{'':22} holdfast {words(topic.ours)}, {topic.plain_name} {words(topic.plain)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 MB and 3 rounds")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="keep the figures as JSON here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child[0], options.child[1], int(options.child[2]))
        return 0
    megabytes, rounds = (100, 3) if options.quick else (options.megabytes, options.rounds)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.folder))
    try:
        return measure_all(folder, megabytes, rounds, options.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_all(folder: Path, megabytes: int, rounds: int, out: Path | None) -> int:
    model, optimizer = build(megabytes)
    size = state_bytes(model, optimizer)
    print(f"{machine()}\n{size / 1e6:.0f} MB of model + AdamW state, medians of {rounds} rounds\n")
    boundary = statistics.median(measure_boundary(folder)) * 1e6
    print(f"{'boundary':22} {boundary:5.2f} µs  target 5 µs   {_verdict(boundary <= 5)}")
    imported, used = (statistics.median(v) * 1e3 for v in measure_import(max(rounds, 5)))
    print(f"{'import holdfast':22} {imported:5.1f} ms  target 60 ms  {_verdict(imported <= 60)}")
    print(f"{'  and holdfast.Run':22} {used:5.1f} ms")
    topics = [
        measure_stall(folder, model, optimizer, rounds),
        measure_durable(folder, model, optimizer, rounds),
    ]
    del model, optimizer
    topics.append(measure_resume(folder, megabytes, rounds))
    for topic in topics:
        show(topic)
    if out is not None:
        record = {
            "machine": machine(),
            "state_bytes": size,
            "boundary_us": boundary,
            "import_ms": imported,
            "import_and_run_ms": used,
            "topics": [{**asdict(topic), "ratio": topic.ratio} for topic in topics],
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    met = boundary <= 5 and imported <= 60 and all(t.ratio <= t.target for t in topics)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
