"""The stacks of all threads in a log: a dump of py-spy, or of faulthandler after its timeout.

Somebody printed them because nothing moved. They are judged as if they had just been read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from holdfast._diagnose.texts.lines import Line, Text
from holdfast._diagnose.texts.sign import Sign, make_sign

_PYSPY = re.compile(r'Thread (?:\S+ )?\((?P<state>[a-z+]+)\)(?:: "(?P<name>[^"]*)")?')
_PYSPY_FRAME = re.compile(r"\s+(?P<name>\S.*?) \((?P<file>[^()]+):(?P<line>\d{1,9})\)")
_TIMEOUT = re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!")
_DUMP = re.compile(r"(?:Current t|T)hread 0x\w+.* \(most recent call first\):")
_DUMP_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<name>.*)')
# py-spy leaves out where a package is installed.
_PACKAGES = re.compile(
    r"(?:torch\w*|deepspeed|accelerate|transformers|datasets|\w*lightning\w*|megatron|ray|jax\w*"
    r"|tensorflow|keras|numpy|tqdm|filelock|joblib|wandb|requests|urllib3|PIL|h5py|fsspec)/"
)
_MOST_LINES = 2000
_MOST_FRAMES = 60


def read_stacks(text: Text) -> Iterator[Sign]:
    """The last such dump."""
    timeouts = [line for line in text.hits("Timeout (") if _TIMEOUT.fullmatch(line.text.strip())]
    if timeouts:
        # faulthandler prints the main thread last.
        yield from _dump(text, timeouts[-1], "faulthandler")
        return
    mains = [line for line in text.hits('"MainThread"') if _PYSPY.fullmatch(line.text.strip())]
    if mains:
        yield from _dump(text, mains[-1], "py-spy")


def _dump(text: Text, head: Line, by: str) -> Iterator[Sign]:
    threads: list[dict[str, Any]] = []
    last = head
    for line in (head, *text.from_same(head, _MOST_LINES)):
        said = line.text.strip()
        if thread := _PYSPY.fullmatch(said):
            state = "R" if thread["state"].startswith("active") else "S"
            is_main = thread["name"] == "MainThread"
            threads.append({"name": thread["name"], "is_main": is_main, "state": state})
        elif _DUMP.fullmatch(said):
            threads.append({"name": None, "state": "S"})
        elif frame := _PYSPY_FRAME.fullmatch(line.text) or _DUMP_FRAME.fullmatch(line.text):
            frames = threads[-1].setdefault("frames", []) if threads else []
            if len(frames) < _MOST_FRAMES:
                file, number = _installed(frame["file"]), int(frame["line"])
                frames.append({"file": file, "line": number, "name": frame["name"]})
        elif said and line is not head:
            break
        last = line
    if threads and by == "faulthandler":
        threads[-1]["is_main"] = True
    if any(each.get("is_main") and each.get("frames") for each in threads):
        yield make_sign("stacks", last, {"threads": threads, "by": by})


def _installed(file: str) -> str:
    """A path by which it is seen whether the file belongs to Python or to a package."""
    if file.startswith(("/", "<")):
        return file
    if _PACKAGES.match(file):
        return f"/site-packages/{file}"
    top = file.partition("/")[0].removesuffix(".py")
    return f"/lib/python3/{file}" if top in sys.stdlib_module_names else file
