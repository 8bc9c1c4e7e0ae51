"""Measure what holdfast costs.

    python -m bench [--quick] [--megabytes 1000] [--rounds 5] [topic …]
    python -m bench --pages        write docs/benchmarks.md and its pictures from the results again

In every round the limits of the machine, holdfast and each peer take turns on the same bytes, in
an order that is drawn. Printed are first the ratio to the limit, then the median and the spread.
Every figure is kept in bench/results/. Leaves with 1 if holdfast missed a target.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from bench.figures import OURS, Table
from bench.machine import machine, slug
from bench.plan import Plan

TOPICS = {
    "saving": "stall, request to durable, peak extra memory",
    "resuming": "resume from disk (cold, warm) and from memory",
    "steps": "step boundary, agreement by ranks",
    "beside": "interference: a training with saves against one without",
    "growing": "cost by size, by number of tensors, of checkpoints, and by length of the journal",
    "unchanged": "what has not changed is not written again",
    "starting": "start-up",
}
RESULTS = Path(__file__).parent / "results"


def options() -> argparse.Namespace:
    topics = "\n".join(f"  {name:10} {what}" for name, what in TOPICS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{__doc__}\ntopics:\n{topics}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topics", nargs="*", metavar="topic", default=list(TOPICS))
    parser.add_argument("--quick", action="store_true", help="100 MB and 3 rounds; kept apart")
    parser.add_argument("--megabytes", type=int, help="size of the state (1000)")
    parser.add_argument("--rounds", type=int, help="how often each way has its turn (5)")
    parser.add_argument("--no-peers", action="store_true", help="only limits and holdfast")
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--results", type=Path, help="where figures are kept (bench/results)")
    parser.add_argument("--pages", action="store_true", help="write docs/benchmarks.md")
    chosen = parser.parse_args()
    if unknown := set(chosen.topics) - set(TOPICS):
        parser.error(f"no topic {', '.join(sorted(unknown))}; there are: {', '.join(TOPICS)}")
    return chosen


def main() -> int:
    chosen = options()
    warnings.simplefilter("ignore")  # what peers have to say about each other's versions
    # Modules are compiled once, as they are for a user; some machines for tests turn that off.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    name = f"{slug()}-quick.json" if chosen.quick else f"{slug()}.json"
    results = (chosen.results or RESULTS) / name
    if not chosen.pages:
        print(f"{machine()}\nload before: {os.getloadavg()[0]:.1f}\n", flush=True)
        # Each topic in a process of its own, that has never used a thread of torch's.
        missed = [topic for topic in chosen.topics if not _in_own_process(topic, chosen, results)]
        print(f"figures: {results}")
        if missed:
            print(f"targets missed in: {', '.join(missed)}")
        return 1 if missed else 0
    from bench.pages import write_pages

    write_pages(results, Path("docs"))
    return 0


def _in_own_process(topic: str, chosen: argparse.Namespace, results: Path) -> bool:
    """Measure one topic; False if a target was missed or it failed."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = measure(topic, chosen, results)
        except BaseException:  # noqa: BLE001  a forked child must never return from here
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def measure(topic: str, chosen: argparse.Namespace, results: Path) -> int:
    import torch

    torch.set_num_threads(1)  # so that processes forked from here may use threads of their own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaving cleans up
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=chosen.folder))
    plan = Plan(
        folder,
        chosen.quick,
        not chosen.no_peers,
        chosen.megabytes or (100 if chosen.quick else 1000),
        chosen.rounds or (3 if chosen.quick else 5),
    )
    began = time.monotonic()
    try:
        tables: list[Table] = importlib.import_module(f"bench.topics.{topic}").measure(plan)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for table in tables:
        print(f"{table.text()}\n", flush=True)
    print(f"({topic}: {time.monotonic() - began:.0f} s)\n")
    keep(results, tables)
    missed = [row for t in tables for row in t.rows if t.verdict(row).endswith("missed")]
    return 1 if any(row.kind == OURS for row in missed) else 0


def keep(results: Path, tables: list[Table]) -> None:
    """Put the tables into the results' file, in place of older ones of the same topics."""
    kept: dict[str, Any] = {}
    if results.exists():
        kept = json.loads(results.read_text(encoding="utf-8"))
    about = {
        "machine": machine(),
        "measured": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }
    for table in tables:
        kept[table.topic] = {"about": about, "table": table.record()}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
