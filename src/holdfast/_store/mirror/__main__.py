"""The entry point of a process that uses a store; `child.py` starts it.

It sends messages as lines of JSON on its standard output; all else goes into a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._store.folder.layout import RunLayout
from holdfast._store.mirror.child import Service, describe_trouble
from holdfast._store.mirror.fetch import candidates, fetch_newest
from holdfast._store.mirror.index import MirrorIndex
from holdfast._store.mirror.store import open_store
from holdfast._store.mirror.uploader import Uploader, locked, tell

_TELL_SECONDS = 1.0
# When memory runs out, the copy must be killed before the training.
_OOM_SCORE = 300
# Less than a worker of a data loader, but still progress where all cores are busy.
_NICE = 5


def main(config_text: str) -> None:
    config = json.loads(config_text)
    os.chdir("/")
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))
    if config["task"] == "serve":
        os.nice(_NICE)  # not where a start waits for it
        Uploader(Service(**config["service"]), tell).serve()
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _look_or_fetch(config)
    except HoldfastError as error:
        tell("failed", text=str(error))
    except Exception as error:  # noqa: BLE001  a store may raise anything: the parent is told
        traceback.print_exc()
        tell("failed", text=describe_trouble(config["address"], error))


def _end_with_parent() -> None:
    """The parent is gone, perhaps by a signal: the next start must not find this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _look_or_fetch(config: dict[str, Any]) -> None:
    index = MirrorIndex(open_store(config["address"]))
    run_id = index.identity()
    if run_id is None:
        tell("empty")
        return
    if config.get("run_id") not in (None, run_id):
        tell("other")  # the uploader will say so
        return
    found = candidates(index)
    newest = found[0].step if found else None
    tell("held", run_id=run_id, attempts=index.newest_attempt(), newest=newest)
    if config["task"] == "look":
        return
    told_at = 0.0
    damaged = []

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > _TELL_SECONDS:
            told_at = time.monotonic()
            tell("under-way", done_bytes=done, total_bytes=total)

    def tell_damage(name: str, text: str) -> None:
        damaged.append(name)
        tell("damaged", name=name, text=text)

    layout = RunLayout(Path(config["folder"]))
    with locked(layout, waits=True):
        done = fetch_newest(index, layout, tell_damage, progress)
    if done is not None:
        tell("fetched", **vars(done))
    else:
        # Checkpoints that cannot be read still show that the run has begun.
        tell("nothing", damaged=len({*damaged, *index.damaged}), strange=len(index.strange))


if __name__ == "__main__":
    main(sys.argv[1])
