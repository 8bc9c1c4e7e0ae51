"""The buttons of a run's page: the same requests that the command line writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from holdfast import _text
from holdfast._diagnose.hangs.stacks import merge_looks
from holdfast._errors import HoldfastError, SettingsError
from holdfast._report.labels import change_labels
from holdfast._report.server.find import Odd
from holdfast._report.server.index import Watched
from holdfast._report.status.ask import ask_look
from holdfast._store.folder.attempts import lease_holder
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.requests import ask

Answer = dict[str, Any]
Record = dict[str, Any]

_MOST_STACK_CHARACTERS = 2_000_000


def act(kind: str, watched: Watched, body: bytes) -> Answer:
    """Called in a thread: a run of another machine is watched for some seconds."""
    try:
        # Requests are written into the folder: never through a link.
        watched.follower.check()
        return ACTIONS[kind](watched, body)
    except (Odd, HoldfastError) as error:
        sentence = str(error).partition("\n")[0]
        # The page shows the name of the run, not its path.
        return {"ok": False, "sentence": sentence.removeprefix(f"{watched.follower.folder}: ")}


def _label(watched: Watched, body: bytes) -> Answer:
    try:
        change = json.loads(body)
    except ValueError:
        raise SettingsError("The request is not JSON.") from None
    found = change_labels(watched.follower.layout, _text.record(change))
    return {"ok": True, "sentence": "Written into the run folder.", "labels": asdict(found)}


def _stop(watched: Watched, _: bytes) -> Answer:
    who = _ask(watched, "stop", reason="holdfast ui", now=False)
    what = "It ends the step that it is in, makes it durable and leaves."
    return {"ok": True, "sentence": f"Asked to stop ({who}). {what}"}


def _save(watched: Watched, _: bytes) -> Answer:
    who = _ask(watched, "save")
    what = "It is taken at the end of the step."
    return {"ok": True, "sentence": f"Asked for a checkpoint ({who}). {what}"}


def _stacks(watched: Watched, _: bytes) -> Answer:
    found = ask_look(watched.follower.folder)
    if found is None:
        return {"ok": False, "sentence": "Nothing of its processes can be read from here."}
    looks = found["looks"]
    lines = [_text.name(line) for line in merge_looks(looks, found["missing"])]
    text = "\n".join([*lines, *_lines_of(looks)])[:_MOST_STACK_CHARACTERS]
    # The first line may name a thousand ranks; the text below has all of it.
    sentence = (lines[0] if lines else "Looked at its processes.")[:300]
    return {"ok": True, "sentence": sentence, "stacks": text, "lines": lines}


ACTIONS: dict[str, Callable[[Watched, bytes], Answer]] = {
    "stop": _stop,
    "save": _save,
    "stacks": _stacks,
    "labels": _label,
}


def _ask(watched: Watched, kind: str, **details: object) -> str:
    folder = watched.follower.folder
    attempt = ask(folder, kind, **details)
    holder = lease_holder(RunLayout(folder), attempt)
    where = f", pid {holder.pid} on {_text.name(holder.host)}" if holder is not None else ""
    return f"attempt {attempt}{where}"


def _lines_of(looks: Sequence[Record]) -> Iterator[str]:
    """Every process and thread, innermost call first."""
    for look in looks:
        rank = look.get("rank")
        of = f"rank {rank}, " if isinstance(rank, int) else ""
        if look.get("stacks_error"):
            yield _text.name(f"{of}not all stacks: {look['stacks_error']}")
        for process in look.get("processes") or []:
            yield ""
            named = process.get("command") or process.get("name") or "?"
            yield _text.name(f"{of}pid {process.get('pid')}: {named}")
            for thread in process.get("threads") or []:
                name = thread.get("name") or ("main" if thread.get("is_main") else "?")
                holds = ", holds the GIL" if thread.get("owns_gil") else ""
                yield _text.name(f"  thread {thread.get('tid')} {name}{holds}")
                for frame in thread.get("frames") or []:
                    place = f"{frame.get('file')}:{frame.get('line')}"
                    yield _text.name(f"    {frame.get('name')} ({place})")
