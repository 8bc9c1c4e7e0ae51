"""What Python itself prints as it dies: tracebacks, and the dumps of faulthandler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast._why.sign import Sign, make_sign
from holdfast._why.text import Line, Text

Frame = tuple[str, int, str]

_HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s+File "([^"]*)", line (\d+)(?:, in (.*))?')
_FRAME_OF_DUMP = re.compile(r'\s+File "([^"]*)", line (\d+) in (.*)')
_ERROR = re.compile(r"((?:[A-Za-z_]\w*\.|<locals>\.)*([A-Za-z_]\w*))(?:: ?(.*))?\s*$", re.DOTALL)
_BAR = re.compile(r"\s*[|+](?:-\+-*| )?")
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_CAUGHT = re.compile(r"Caught (\S+) in (DataLoader worker process|\w+ rank|replica) (\d+)")
_LOADER_FILES = ("torch/utils/data/", "torch/multiprocessing/", "multiprocessing/resource_sharer")
_DISGUISES = {
    "ConnectionResetError": "worker_conn_reset",
    "ConnectionRefusedError": "worker_conn_reset",
    "BrokenPipeError": "worker_conn_reset",
    "EOFError": "worker_conn_reset",
    "FileNotFoundError": "worker_file_not_found",
}
_SIGNALS = {
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Floating point exception": 8,
}
_MOST_LINES = 600
_FRAMES_KEPT = 12


@dataclass
class Traceback:
    """One exception as it was printed."""

    type: str
    message: str
    frames: list[Frame]
    head: Line
    last: Line  # the line of the exception itself
    end: Line  # the last line that belongs to it
    chain: list[str] = field(default_factory=list)  # what it came of, the nearest first
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def read_python(text: Text) -> Iterator[Sign]:
    """The exceptions that were printed, and faulthandler's dumps."""
    for found in tracebacks(text):
        yield from _signs_of(found)
    for line in text.hits("Fatal Python error: "):
        if line.text.lstrip().startswith("Fatal Python error: "):
            yield _dump(text, line)


def tracebacks(text: Text) -> list[Traceback]:
    """All tracebacks; of a chain the last, of a group the whole, each once."""
    found: list[Traceback] = []
    for line in text.hits(_HEADER):
        groups = [each for each in found[-8:] if "parts" in each.details]
        if any(each.head.start < line.start <= each.end.start for each in groups):
            continue  # it stands in the group
        one = _read(text, line)
        if one is None or one.details.pop("is_ignored", False):
            continue
        before = next((b for b in reversed(found[-8:]) if b.last.rank == one.last.rank), None)
        if before is not None and _is_what_was_given_on(before, one):
            one.details["given_on_as"] = before.type
            one.chain = before.chain
            found.remove(before)
        elif before is not None and _is_linked(text, before, one):
            one.chain = [before.sentence, *before.chain][:10]
            found.remove(before)
        if before is not None and before not in found:
            for key, value in before.details.items():
                one.details.setdefault(key, value)
        found.append(one)
    return found


def _read(text: Text, head: Line) -> Traceback | None:
    lead = head.text[: head.text.find(_HEADER)]
    if lead.strip().endswith(":"):
        return None  # in torchrun's summary, which is read as such
    in_group = lead.strip() in {"+ Exception Group", "|", "+"}
    indent = len(lead) if lead.isspace() and not in_group else 0
    frames: list[Frame] = []
    foreign = 0
    for line in text.from_same(head, _MOST_LINES):
        body = _BAR.sub("", line.text, count=1) if in_group else line.text[indent:]
        if frame := _FRAME.match(body):
            frames.append((frame[1], int(frame[2]), (frame[3] or "").strip()))
            continue
        if body.startswith((" ", "\t")) or not body.strip():
            if not body.strip() and frames:
                foreign += 1
            continue
        error = _ERROR.match(body)
        if error is not None and _is_a_name(error[2]):
            found = _finish(text, head, line, error, frames, in_group)
            if lead.strip() == "+ Exception Group":
                _add_parts(text, found)
            _add_context(text, found, lead)
            return found
        foreign += 1
        if foreign > 6 or _HEADER in body:
            return None
    return None


def _finish(
    text: Text,
    head: Line,
    line: Line,
    error: re.Match[str],
    frames: list[Frame],
    in_group: bool,
) -> Traceback:
    said, end = [(error[3] or "").strip()], line
    for more in text.from_same(line, 0 if in_group else 12):
        # What a message has on further lines is indented as a rule; what is not may be anything.
        if more.text.startswith((" ", "\t")) and more.text.strip() and not _FRAME.match(more.text):
            said.append(more.text.strip())
            end = more
        else:
            break
    return Traceback(error[1], "\n".join(said).strip()[:4000], frames, head, line, end)


def _add_parts(text: Text, found: Traceback) -> None:
    """The exceptions of a group, which follow it."""
    parts: list[str] = []
    for line in text.from_same(found.last, _MOST_LINES):
        body = line.text.lstrip()
        if not body.startswith(("|", "+")):
            break
        found.end = line
        error = _ERROR.match(_BAR.sub("", body, count=1))
        if error is not None and _is_a_name(error[2]):
            parts.append(f"{error[1]}: {(error[3] or '').strip()}".rstrip(": "))
    found.details["parts"] = parts[:20]
    if parts:
        found.message = f"{found.message}: {'; '.join(parts)}"[:4000]


def _add_context(text: Text, found: Traceback, lead: str) -> None:
    """What is said around it: whose exception it was."""
    caught = _CAUGHT.match(found.message)
    if caught is not None:
        found.details["caught_in"] = f"{caught[2]} {caught[3]}"
    if lead.strip() == "Original":
        found.details["is_original"] = True
    for line in text.before(found.head, 2):
        said = line.text.strip()
        if said.startswith("Exception ignored in"):
            found.details["is_ignored"] = True  # Python goes on after it
        elif said.startswith("Exception in thread "):
            found.details["thread"] = said.removeprefix("Exception in thread ").rstrip(":")
        elif match := re.fullmatch(r"Process (\S+):", said):
            found.details["process"] = match[1]
        elif match := re.fullmatch(r"-- Process (\d+) terminated with the following error:", said):
            found.details["rank"] = int(match[1])
        else:
            continue
        break


def _is_what_was_given_on(before: Traceback, one: Traceback) -> bool:
    """Whether it stands in the message of the exception before it, which only gives it on."""
    if one.details.get("is_original"):
        return "caught_in" in before.details
    return "rank" in one.details and before.type.endswith("ProcessRaisedException")


def _is_linked(text: Text, before: Traceback, one: Traceback) -> bool:
    for line in text.before(one.head, 4):
        if line.start <= before.last.start:
            return False
        said = _BAR.sub("", line.text, count=1).strip()
        if said in _LINKS or line.text.strip() in _LINKS:
            return True
    return False


def _signs_of(found: Traceback) -> Iterator[Sign]:
    details = {
        "type": found.type,
        "message": found.message,
        "frames_tail": [list(frame) for frame in found.frames[-_FRAMES_KEPT:]],
        "chain": found.chain,
        **found.details,
    }
    rank = details.pop("rank", None)
    rank = rank if isinstance(rank, int) else found.last.rank
    yield make_sign("python_exception", found.last, details, rank)
    name = found.type.rpartition(".")[2]
    files = " ".join(frame[0] for frame in found.frames)
    if name in _DISGUISES and any(part in files for part in _LOADER_FILES):
        yield make_sign(_DISGUISES[name], found.last, {"type": found.type}, rank)


def _dump(text: Text, line: Line) -> Sign:
    """What faulthandler wrote, with the frames of the thread that died, the innermost first."""
    what = line.text.partition("Fatal Python error: ")[2].strip()
    name = re.split(r"[:\n]", what)[0].strip()
    stacks: list[list[Frame]] = [[]]
    is_current = False
    for other in text.from_same(line, 300):
        body = other.text
        if frame := _FRAME_OF_DUMP.match(body):
            stacks[-1].append((frame[1], int(frame[2]), frame[3].strip()))
        elif body.startswith(("Current thread", "Thread ")):
            if is_current:
                break
            is_current = body.startswith("Current thread")
            stacks.append([])
        elif body.strip() and not body.startswith((" ", "Python runtime")) and stacks[-1]:
            break
    # Without a current one, as in a thread that Python does not know, the last is the main one.
    frames = stacks[-1]
    details = {
        "what": what,
        "signal": _SIGNALS.get(name),
        "stack": [list(frame) for frame in frames[:40]],
        "is_current": is_current,
    }
    return make_sign("faulthandler", line, details)


def _is_a_name(word: str) -> bool:
    """Whether an exception could be called so: prose and metrics begin lines as well."""
    return word[:1].isupper() or word.endswith(("error", "timeout", "exception"))
