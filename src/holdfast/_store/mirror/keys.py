"""Where everything stands in a mirror: every key is spelled here, and nowhere else.

run.json                               the run's id: a mirror belongs to one run
attempts/0002.9f2c41b07a5d3e68.json    which run folder copies here, and in which life
pieces/CHECKSUM-SIZE                   a stretch of a file, named by what it holds
checkpoints/step-…-a0002/index.json    of which pieces its files are made
checkpoints/step-…-a0002/manifest.json the same as in the run folder; written last
"""

from __future__ import annotations

import re

from holdfast._store.folder.layout import MANIFEST

IDENTITY = "run.json"
CLAIMS = "attempts/"
PIECES = "pieces/"
CHECKPOINTS = "checkpoints/"
_INDEX = "index.json"
_CLAIM = re.compile(r"attempts/(\d{4,})\.([0-9a-f]{16})\.json")
_MANIFEST = re.compile(rf"checkpoints/(step-\d{{12}}-a\d{{4,}}(?:-turn)?)/{re.escape(MANIFEST)}")


def claim(attempt: int, holder: str) -> str:
    return f"{CLAIMS}{attempt:04d}.{holder}.json"


def claim_of(key: str) -> tuple[int, str] | None:
    """The attempt and the holder that a key names, if it is a claim."""
    match = _CLAIM.fullmatch(key)
    return None if match is None else (int(match[1]), match[2])


def piece(checksum: str, size_bytes: int) -> str:
    return f"{PIECES}{checksum}-{size_bytes}"


def index(checkpoint: str) -> str:
    return f"{CHECKPOINTS}{checkpoint}/{_INDEX}"


def manifest(checkpoint: str) -> str:
    return f"{CHECKPOINTS}{checkpoint}/{MANIFEST}"


def checkpoint_of(key: str) -> str | None:
    """The checkpoint whose manifest a key names, if it is one."""
    match = _MANIFEST.fullmatch(key)
    return None if match is None else match[1]
