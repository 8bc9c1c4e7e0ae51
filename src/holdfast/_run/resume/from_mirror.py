"""The trainer's side of a mirror: what to fetch before a run begins, what to wait for at its end.

An empty folder is a new run, or one that goes on on another machine: only the mirror knows, so it
is asked then. If it does not answer, the run is not opened, since training from the beginning
would be wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._errors import MirrorError, NoGoodCheckpoint, SettingsError, UnreadableCheckpoint
from holdfast._settings import Settings
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import create_atomic
from holdfast._store.folder.attempts import cannot_write, lives_elsewhere, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.prove_config import current as current_prove_config
from holdfast._store.mirror.store import folder_of
from holdfast._text import say
from holdfast._text import size as in_words

if TYPE_CHECKING:
    from holdfast._run.ranks.meeting import RankGroup
    from holdfast._run.resume.start import Start

_TURN_SECONDS = 5.0
_IDENTITY_SECONDS = 300.0
_LOOK_SECONDS = 0.05
_STILL_SECONDS = 60.0  # give up on an upload without progress
_MARGIN_SECONDS = 1.0  # of a grace time, for leaving


def refuse_inside(folder: Path, address: str) -> None:
    """SettingsError if a mirror would be lost together with the run folder, or be taken for it."""
    place = folder_of(address)
    if place is None:
        return
    here, there = folder.resolve(), place.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise SettingsError(
            f"mirror={address!r} and the run folder {folder} are one inside the other.\n"
            "A mirror is another place: another disk, another machine, a bucket."
        )


class MirrorClient:
    """What a session does with its mirror; nothing if it has none."""

    def __init__(self, folder: Path, settings: Settings, rank: int) -> None:
        # A proof interrupts copies of the run, which are not mirrored.
        self._address = None if current_prove_config() is not None else settings.mirror_address
        self._settings = settings
        self._folder = folder
        self._rank = rank
        self._is_empty = False
        self._leave_by: float | None = None
        if self._address is not None:
            self._adopt_identity(self._address)

    def policy(self) -> dict[str, Any]:
        if self._address is not None and sys.platform != "linux":
            say(
                f"without a keeper, which needs Linux, nothing is copied to {self._address}.\n"
                f"Copy it by hand: holdfast mirror {self._folder} --push --at {self._address}"
            )
        return {"mirror": self._address, "mirror_keep_last": self._settings.mirror_keep_last}

    # -- the beginning ----------------------------------------------------------------

    def _adopt_identity(self, address: str) -> None:
        """Give a new folder the id that its run has in the mirror."""
        layout = RunLayout(self._folder.absolute())
        refuse_inside(layout.folder, address)
        # Rank 0 asks, for all.
        deadline = time.monotonic() + _IDENTITY_SECONDS
        while not (is_known := "run_id" in read_json(layout.identity)) and self._rank:
            if time.monotonic() > deadline:
                raise MirrorError(
                    f"{self._folder}: rank 0 has not opened this run within "
                    f"{_IDENTITY_SECONDS:.0f} s.\nSee what rank 0 says of the mirror."
                )
            time.sleep(_LOOK_SECONDS)  # until the deadline above
        if is_known:
            return
        from holdfast._store.mirror.child import ask  # only where there is something to ask

        told = ask({"task": "look", "address": address})
        held = told[-1] if told else {"kind": "empty"}
        if held["kind"] == "empty":
            self._is_empty = True
            return
        identity = {
            "run_id": held["run_id"],
            "created": time.time(),
            "attempts_elsewhere": held["attempts"],
        }
        try:
            layout.folder.mkdir(parents=True, exist_ok=True)
            create_atomic(layout.identity, (json.dumps(identity, indent=1) + "\n").encode())
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        if held["newest"] is not None:
            # A start that is interrupted now must not look like a new run.
            known = {"address": address, "checkpoints": [{"step": held["newest"]}]}
            write_json(layout.mirror, {**known, "time": time.time()}, durable=False)
        say(f"{self._folder}: is empty; {address} has this run. It goes on under the same id.")

    def fetch(self, start: Start, group: RankGroup | None) -> None:
        """Fetch the newest checkpoint of the mirror, if the folder has none."""
        if self._address is None:
            return
        is_first = group is None or group.rank == 0
        with contextlib.closing(self._fetch(start, self._address)) as turns:
            while True:
                state = next(turns, "over") if is_first else "over"
                if group is not None:
                    # Exchanged often, so that no rank waits too long for another.
                    state = str(group.exchange("mirror", state)[0])
                if state == "over":
                    return

    def _fetch(self, start: Start, address: str) -> Generator[str]:
        layout = start.layout
        has_state = bool(layout.checkpoint_folders()) or bool(start.leftovers)
        # A folder may have the run from its beginning and have lost nothing.
        has_moved = lives_elsewhere(layout) or len(layout.attempt_numbers()) > 1
        if self._is_empty or has_state or not (has_moved or layout.set_aside.exists()):
            return
        from holdfast._store.mirror.child import Speaker

        config = {
            "task": "fetch",
            "address": address,
            "folder": str(layout.folder),
            "run_id": start.run_id,
        }
        with contextlib.closing(Speaker(config)) as speaker:
            while not speaker.is_over:
                for told in speaker.answers(_TURN_SECONDS):
                    self._take(layout, address, told)
                yield "under way"

    def _take(self, layout: RunLayout, address: str, told: dict[str, Any]) -> None:
        kind = told["kind"]
        if kind == "held" and told["newest"] is not None:
            say(f"{self._folder}: fetching step {told['newest']} from {address}.")
        elif kind == "damaged":
            say(f"{told['text']} It is not used; looking for the previous one.")
            journal.append(layout.journal, "mirror-damaged", name=told["name"], why=told["text"])
        elif kind == "fetched":
            seconds, size = told["seconds"], in_words(told["size_bytes"])
            say(
                f"{self._folder}: step {told['step']} (attempt {told['attempt']}) came from "
                f"{address}: {size} in {seconds:.2f} s, every byte checked."
            )
            figures = {name: value for name, value in told.items() if name != "kind"}
            journal.append(layout.journal, "restored", address=address, **figures)
        elif kind == "nothing" and told["strange"]:
            raise UnreadableCheckpoint(
                f"{address}: its checkpoints were copied by another version of holdfast.\n"
                "Use that version; nothing was changed."
            )
        elif kind == "nothing" and told["damaged"]:
            raise NoGoodCheckpoint(
                f"{address}: none of the {told['damaged']} checkpoints in this mirror is whole.\n"
                "To start over, use another address."
            )

    # -- the end ----------------------------------------------------------------------

    def note_grace(self, message: dict[str, Any]) -> None:
        """Record how much time a stop leaves, as a message of the keeper says."""
        grace = message.get("grace")
        if message["kind"] == "ending":
            grace = message.get("seconds")
        if self._address is not None and isinstance(grace, int | float) and not self._leave_by:
            self._leave_by = time.monotonic() + float(grace)

    def finish(
        self, layout: RunLayout, durable_step: int | None, is_pressed: Callable[[], bool]
    ) -> None:
        """The run leaves: wait for the mirror if `mirror_wait` is set, and say what it has."""
        if self._address is None or durable_step is None or self._has(layout, durable_step):
            return
        waits = self._settings.mirror_wait
        if waits and self._wait(layout, durable_step, is_pressed):
            return
        trouble = str(read_json(layout.mirror).get("trouble") or "").partition("\n")[0]
        if trouble:
            why = trouble.removeprefix(f"{self._address}: ").rstrip(".")
            say(f"step {durable_step} is durable here and not in {self._address}: {why}.")
            return
        then = "by itself, in the background."
        if waits or self._leave_by:
            then = "by itself, as far as this machine lets it."
        elif os.getpid() == 1 or "SLURM_JOB_ID" in variables.of_job():
            place = "container" if os.getpid() == 1 else "job"
            then = f"until this {place} ends.\nTo wait for it: Settings(mirror_wait=True)."
        say(
            f"step {durable_step} is durable here and not yet in {self._address}: the copy goes on "
            f"{then}"
        )

    def _wait(self, layout: RunLayout, durable_step: int, is_pressed: Callable[[], bool]) -> bool:
        within = ""
        if self._leave_by is not None:
            left = max(0.0, self._leave_by - _MARGIN_SECONDS - time.monotonic())
            within = f", for at most {left:.0f} s"
        say(f"waiting until {self._address} has step {durable_step}{within}.")
        moved_at, seen = time.monotonic(), None
        while not self._has(layout, durable_step):
            now = time.monotonic()
            record = read_json(layout.mirror)
            if (noted_at := record.get("time")) != seen:
                seen, moved_at = noted_at, now
            is_late = self._leave_by is not None and now > self._leave_by - _MARGIN_SECONDS
            if is_late or is_pressed() or now - moved_at > _STILL_SECONDS:
                return False
            if record.get("trouble") and self._leave_by is None and now - moved_at > _TURN_SECONDS:
                return False  # the store does not answer
            time.sleep(_LOOK_SECONDS)  # until the uploader's record changes
        return True

    def _has(self, layout: RunLayout, durable_step: int) -> bool:
        record = read_json(layout.mirror)
        held = record.get("checkpoints")
        if not isinstance(held, list) or not held:
            return False
        is_of_today = record.get("attempt") == layout.attempt_numbers()[-1]
        return is_of_today and int(held[-1]["step"]) >= durable_step
