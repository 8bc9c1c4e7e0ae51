"""Tags, a note and whether a run is archived: what a person says of a run, in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast._errors import SettingsError
from holdfast._store.folder.attempts import cannot_write, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import name, text

MOST_TAGS = 20
MOST_TAG_CHARACTERS = 40
MOST_NOTE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Labels:
    """Empty for a run that was never labelled."""

    tags: tuple[str, ...] = ()
    note: str = ""
    is_archived: bool = False

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Labels:
        """From a record that may hold anything: what does not fit is left out or shortened."""
        given = record.get("tags")
        texts = [" ".join(text(each).split()) for each in given] if isinstance(given, list) else []
        tags = dict.fromkeys(name(each)[:MOST_TAG_CHARACTERS] for each in texts if each)
        note = text(record.get("note")).replace("\r\n", "\n")
        return cls(
            tuple(tags)[:MOST_TAGS],
            "\n".join(map(name, note.split("\n"))).strip()[:MOST_NOTE_CHARACTERS],
            record.get("is_archived") is True,
        )


def read_labels(layout: RunLayout) -> Labels:
    return Labels.parse(read_json(layout.labels))


def change_labels(layout: RunLayout, change: Mapping[str, Any]) -> Labels:
    """Set some of `tags`, `note` and `is_archived`; the others stay."""
    known = asdict(read_labels(layout))
    known["tags"] = list(known["tags"])
    if not change or not set(change) <= set(known):
        raise SettingsError("Labels are tags, note and is_archived.")
    found = Labels.parse({**known, **change})
    try:
        write_json(layout.labels, asdict(found))
    except OSError as error:
        raise cannot_write(layout.folder, error) from error
    return found
