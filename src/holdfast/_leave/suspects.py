"""What may be filling the memory, while there is still somebody to ask.

Whoever is killed for its memory says nothing any more. So when the keeper warns of the limit,
the trainer looks for what is known to grow without end: graphs of autograd that are kept.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time

from holdfast._leave.frames import frames_of_thread, is_users, view
from holdfast._leave.last_words import Scene
from holdfast._record.attempts import read_json, write_json
from holdfast._say import say

_SECONDS = 1.0


def look_for_graphs(scene: Scene, thread: int) -> None:
    """Look at what a thread's variables keep, and tell of it; nobody waits for it."""
    if "torch" not in sys.modules:
        return

    def look() -> None:
        with contextlib.suppress(Exception):  # objects of any kind are looked into
            _find_suspects(scene, thread)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=look, name="holdfast-suspects", daemon=True).start()


def _find_suspects(scene: Scene, thread: int) -> None:
    graphs = importlib.import_module("holdfast.torch.graphs")
    views = view([each for each in frames_of_thread(thread) if is_users(each[0])])
    counts = (scene.steps, scene.batch)
    found = graphs.find_kept_graphs(views, counts, time.monotonic() + _SECONDS)
    # What a backward pass has gone through is small: it is not what fills the memory.
    found = [each for each in found if not each["freed"]]
    if not found:
        return
    most = found[0]
    say(
        f"{most['holder']} ({most['where']}) keeps {most['count']} losses or outputs with all that "
        "their backward pass would need.\nKeep loss.item() or loss.detach() instead.",
        each=True,
    )
    # An exception says more: one that comes after all takes the place of this, and one that has
    # come meanwhile stays.
    path = scene.layout.error(scene.attempt, scene.rank)
    if "type" in read_json(path):
        return
    record = {"time": time.time(), "rank": scene.rank, "step": scene.step, "graphs": found}
    write_json(path, record, durable=False)
