"""From shared memory to a GPU: how fast, against the link and with every byte checked.

    PYTHONPATH=src python bench/gpu_resume.py [--gigabytes 8] [--device cuda]
                                              [--piece-megabytes 32] [--threads 12]

Prints GB/s of the link alone (from pinned memory), and of `holdfast.torch.receive` from a new
mapping, as after a kill: the better of two rounds, and the first time in the process. With
--device cpu it only shows that the bytes arrive. The size of a registered piece and the number of
threads can be chosen, to find the best ones for a machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from holdfast.torch import receive
from holdfast.torch.receive import SentTensors, upload

_ROUNDS = 2


def _sizes(total: int) -> list[int]:
    """As a transformer with AdamW has them: three of each weight, and small ones in between."""
    found = [total // 40] * 3  # embeddings
    width = 2048 if total > 2 << 30 else 256
    while sum(found) < total:
        for _ in range(3):
            found += [4 * width * width, 12 * width * width, 16 * width * width, 4 * width]
    return found


def _fill(path: Path, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    path.unlink()
    os.posix_fallocate(descriptor, 0, size)
    block = os.urandom(16 << 20)

    def write(first: int) -> None:
        for at in range(first * len(block), size, 8 * len(block)):
            os.pwrite(descriptor, block[: min(len(block), size - at)], at)

    _all([lambda n=n: write(n) for n in range(8)])
    return descriptor


def _all(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bench:
    """A file in shared memory, cut into tensors, and what was measured with it."""

    def __init__(self, total: int, device: torch.device) -> None:
        self.device = device
        self.sizes = _sizes(total)
        self.total = sum(self.sizes)
        self.descriptor = _fill(Path(f"/dev/shm/holdfast-bench-{os.getpid()}"), self.total)
        self.found: dict[str, float] = {}

    def views(self, sizes: list[int] | None = None) -> list[memoryview]:
        """Of a new mapping, of which no page has been touched."""
        whole, at, found = memoryview(mmap.mmap(self.descriptor, self.total)), 0, []
        for size in sizes or self.sizes:
            found.append(whole[at : at + size])
            at += size
        return found

    def note(
        self, what: str, work: Callable[[list[memoryview]], SentTensors], **options: object
    ) -> None:
        """Time some work on a new mapping, which is populated first if asked for."""
        times = []
        rounds = int(str(options.get("rounds", _ROUNDS)))
        for _ in range(rounds):
            views = self.views(options.get("sizes"))
            _sync(self.device)
            began = time.perf_counter()
            kept = work(views)
            _sync(self.device)
            times.append(time.perf_counter() - began)
            kept.host.unregister()
            del kept, views
        self.found[what] = round(self.total / min(times) / 1e9, 1)
        print(f"{self.found[what]:7.1f} GB/s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--piece-megabytes", type=int)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    if chosen.piece_megabytes:
        receive.PIECE_BYTES = chosen.piece_megabytes << 20
    if chosen.threads:
        receive._MOST_THREADS = chosen.threads
    device = torch.device(chosen.device)
    bench = Bench(int(chosen.gigabytes * (1 << 30)), device)
    print(
        f"{bench.total / 1e9:.2f} GB, {len(bench.sizes)} tensors, {os.cpu_count()} cores, {device}"
    )
    torch.empty(1, device=device)
    bench.note("upload, checked, the first time", lambda v: upload(v, device), rounds=1)
    sent, views = upload(bench.views(), device), bench.views()
    assert sent.digests == [xxhash.xxh3_128_digest(view) for view in views], "other digests"
    for number in (0, 5, len(views) - 1):
        assert sent.raw[number].cpu().numpy().tobytes() == bytes(views[number]), "other bytes"
    sent.host.unregister()
    del sent, views
    if device.type == "cuda":
        pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(pinned, device=device)
        began = time.perf_counter()
        target.copy_(pinned, non_blocking=True)
        _sync(device)
        print(f"{(1 << 30) / (time.perf_counter() - began) / 1e9:7.1f} GB/s  limit: the link")
        del pinned, target
    bench.note("upload, checked", lambda v: upload(v, device))
    bench.note("upload, not checked", lambda v: upload(v, device, hashed=False))
    small = [10_240] * 100_000
    if sum(small) <= bench.total:
        bench.total = sum(small)
        bench.note(
            "upload, checked, 100,000 tensors of 10 kB", lambda v: upload(v, device), sizes=small
        )
        one = [bench.total]
        bench.note("upload, checked, one tensor of 1 GB", lambda v: upload(v, device), sizes=one)
    print(json.dumps(bench.found))


if __name__ == "__main__":
    main()
