"""What Python prints when it dies: tracebacks, and the dumps of faulthandler."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from holdfast._diagnose.texts.launchers import SIGNAL_WORDS
from holdfast._diagnose.texts.lines import Line, Text
from holdfast._diagnose.texts.sign import PROGRESS_BAR, Sign, make_sign

Frame = tuple[str, int, str]

_HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s+File "([^"]*)", line (\d+)(?:, in (.*))?')
_FRAME_OF_DUMP = re.compile(r'\s+File "([^"]*)", line (\d+) in (.*)')
_ERROR = re.compile(r"((?:[A-Za-z_]\w*\.|<locals>\.)*([A-Za-z_]\w*))(?:: ?(.*))?\s*$", re.DOTALL)
_BAR = re.compile(r"\s*[|+](?:-\+-*| )?")
_FIELD_OF_SUMMARY = re.compile(r"\btraceback\s*:$")
# rich draws a box, and the exception stands below it.
_BOXED_FRAME = re.compile(r"(?:^|\s)(\S+\.\w+):(\d{1,9}) in (\S+)")
_PATH_BEGINS = re.compile(r"(?:[/~]|[A-Z]:\\)\S+(?::\d+(?: in)?)?$")
_BOX = "\u2502\u2503|"
# IPython: the type and the header in one line, and frames of its own.
_CELL = re.compile(r"([A-Za-z_][\w.]*) {2,}$")
_CELL_FRAME = re.compile(
    r"(?P<file>(?:Cell |Input )(?:In ?)?\[\d+\]|<ipython-input-\d+-\w+>"
    r"|File (?:[A-Z]:)?[^:\n]{1,400}|(?:[~/]|[A-Z]:\\)\S*\.py"
    r"|\[[^\]\n]{1,400}\]\(\S+\))(?:[:,] ?(?:line )?(?P<line>\d{1,9}))?"
    r"(?:,? in (?:<cell line: \d+>\(\)|(?P<name>[\w<>.]+)))?"
)
_CELL_ARROW = re.compile(r"-+> ?(\d{1,9})\b")  # older ones number only the line of code
_LEVELS = ("INFO", "DEBUG", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "Error", "Epoch")
# Lines of a message that begin at the margin, as libraries print them.
# TensorFlow's message stands below its node, or below the frames that made it.
_ANNOUNCES = re.compile(r":$|^Node: |^File \"|^<stack traces unavail|^Exception encountered when ")
_GOES_ON = re.compile(
    r"nccl\w+: |Last error|CUDA kernel errors|For debugging|Compile with|Node:|Detected at"
    r"|Hint|Collectives differ|\(\d+\) |Exception raised from|Parameter (?:at|indices|which)"
    r"|making sure all|Please |[Bb]ut |In addition|If (?:you|this)\b|More info|\[\["
    r"|BufferAssignment|Device-side assert|- |Peak buffers|Search for `|[}\]]+['\"]?$|['\"]$"
)
# What TensorFlow and Keras add to a message: where the operation was made, and of what.
_ADDED = re.compile(
    r"Errors may have originated|Input Source operations|Function call stack:|Caused by op "
    r"|Original stack trace for |Stack trace of |(?:Call a|A)rguments received by "
)
_OF_DYNAMO = ("Set TORCH_LOGS", "You can suppress this")
_SENTENCE = re.compile(r"[A-Z][a-z']+ (?:\S+ ){4}")
_OF_PROSE = re.compile(r"[A-Z][a-z']+ \S|/\S+$|https?://\S+$|- \S")
_GOING_ON = re.compile(
    r"(?i)\b(?:sav(?:e|ed|ing)|done|finish\w*|complet\w*|retry\w*|resum\w*|continu\w*|skip\w*"
    r"|epoch|step|fall(?:ing)? back|exit\w*|loading|\d+ ?%)\b"
)
_MOST_ADDED = 5  # times as many lines as a message
OF_FIELDS = re.compile(r"^\d+ validation errors? for \S+$")
_A_FIELD = re.compile(r"[\w.\[\]-]+\s*")
# Lines that belong to nothing above them.
_NEW = re.compile(
    r"\[?[IWEF]\d{4} |holdfast: |srun: |slurmstepd: |Exception (?:in thread|ignored)|Process \S+:$"
    r"|=====|wandb: |-- Process |Fatal Python error|terminate called"
    r"|(?:WARNING|ERROR|INFO):[\w.]+:"
)
# A message that names nothing, below a line that says it with the name.
NAMES_A_THING = re.compile(r"[\d'\"`/\\]")
_WORDS, _WORDS_SHARED = re.compile(r"[^\W\d_]{3,}"), 2
_IN_A_HANDLER = "During handling of the above exception, another exception occurred:"
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    _IN_A_HANDLER,
)
_CAUGHT = re.compile(
    r"Caught (\S+) in (DataLoader worker process|\w+ rank|replica|pin memory thread for \w+) (\d+)"
)
_LOADER_FILES = (
    *("torch/utils/data/", "torch/multiprocessing/", "multiprocessing/resource_sharer"),
    "multiprocessing/connection.py",  # the other end of a pipe between processes
)
# Python goes on after such a traceback, and keeps its status.
_IGNORED = (
    *("Exception ignored in", "Error in atexit._run_exitfuncs", "--- Logging error ---"),
    *("Task exception was", "Future exception was", "Exception in callback "),  # asyncio
)
_WARNING = re.compile(r"^(?:\w+\.)?warn(?:_\w+)?\(", re.MULTILINE)  # that tells an exception
_STARTS = ("multiprocessing/spawn.py", "multiprocessing/forkserver.py")  # what a child runs first
DISGUISES = dict.fromkeys(
    ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError"),
    "worker_conn_reset",
) | {"FileNotFoundError": "worker_file_not_found"}
CUT = "the log ends in its traceback"  # in place of the exception
_BARE = re.compile(
    r"(?:[\w.\[\]-]{0,40}\b(?:ERROR|Error|error|CRITICAL|ErrorMessage)\b[\]:| \"-]{1,6})?"
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)|(?:[a-z_]\w*\.)+Error): (\S.*?)\"?"
)
_STATUS = re.compile(r"\(\d\)\s+([A-Z][A-Z_]{5,}):\s+(\S.*)")  # of TensorFlow
# As Hydra prints it, or wandb's agent.
_CALLED = re.compile(r"(?:.{0,40}\berrored: )?([A-Z]\w*(?:Error|Exception))\((['\"].*)\)")
_FATAL = re.compile(r"(?:.{0,40}[^\w\s]\s*)?(FATAL|[Ff]atal)(?: error)?\]?:? +(\S.*)")
# What bash and env say of a line of a script. A signal is told otherwise.
_OF_SHELL = re.compile(
    r"-?(?:\S+: line \d+|\S+\.sh: \d+|(?:\S*/)?(?:(?:ba|z|da)?sh|env)(?:: \d+)?): "
    r"(?!warning:|\s*\d+ [A-Z])(\S.*)|(?:\S.*: )?(?:No such file or directory|Permission denied"
    r".{0,40}|Operation not permitted|Resource temporarily unavailable|Not a directory"
    r"|Connection (?:refused|timed out))\W*"
    r"|.*\bWarning +Failed[A-Z]\w+ .*"  # of Kubernetes
)
# What a script echoes after that: `set -x`, or the status.
_OF_TRACE = re.compile(
    r"\++ .*|(?:\S+ ){0,6}(?i:exit(?:ed)?|status|code|rc)\W*(?:\w+\W+){0,3}\d{1,3}\W*"
)
_ALONE = re.compile(r"(MemoryError|KeyboardInterrupt):?()")  # without a message
_ANNOUNCED = re.compile(r"([A-Z]\w*Error):")  # its message follows, indented
_PROMPT = re.compile(r"\((?:Pdb|ipdb)(?:\+\+)?\)|ipdb>")
_WAITS_FOR_DEBUGGER = re.compile(r"^Waiting for (?:a |the )?(?:debugger|client)\b")
_PROMPT_PLACE = re.compile(r"> (\S.*)\((\d{1,9})\)(\S+?)\(\)")
_LAST_LINES = 60
_FEW_LINES = 3  # that a script prints after its command was not found
_MOST_BEFORE_CUT = 2  # lines of a frame before the first whole one
_WITHOUT_HEADER = ("SyntaxError", "IndentationError", "TabError")
_MOST_LINES = 600
_MOST_OF_MESSAGE = 40
_MOST_OF_OWN = 12
_OWN_END = re.compile(
    r"  (?:at (?:(?P<file>\S.{0,400}):(?P<line>\d{1,9})|line \d.*) )?"
    r"\((?P<type>holdfast\.\w{1,40})\)"
)
_OWN_LEAD = re.compile(r"holdfast: (?:rank \d{1,6}: )?")
_FATAL_OF_PYTHON = re.compile(
    r"\s*(?:Fatal Python error: |Windows fatal exception: (?=access violation|stack overflow))(.*)"
)
_FRAMES_KEPT = 12
_NOT_OWN = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "holdfast/_",
    ".pxi",
    ".pyx",
)
_PACKAGE = re.compile(r"(?:site|dist)-packages/[^/]+/")
_OF_THREAD = re.compile(r"(?:(?:^|: )Exception in t|^T)hread (.*?):?$")  # also of a logger, wandb
_COMMAND = re.compile(r"^/.*/bin/[^/.]+$")  # that pip has made
_LIB_OF_WINDOWS = re.compile(r"[A-Za-z]:.*/[Ll]ib/(\w+)(?:\.py|/)")


@dataclass
class Traceback:
    type: str
    message: str
    frames: list[Frame]
    head: Line
    last: Line  # the line of the exception itself
    end: Line  # the last line that belongs to it
    tail: str = ""  # what follows, which may be more of its message
    chain: list[str] = field(default_factory=list)  # its causes, the nearest first
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def is_own_file(file: str) -> bool:
    """Whether it is neither Python's nor of an installed package."""
    if any(part in file for part in _NOT_OWN):
        return False
    if _COMMAND.search(file):
        return False
    of_windows = _LIB_OF_WINDOWS.match(file)
    return of_windows is None or of_windows[1] not in sys.stdlib_module_names


def innermost_own(frames: Sequence[Frame]) -> Frame | None:
    """The innermost of the script itself, or of the package whose command was started."""
    own = [frame for frame in frames if is_own_file(frame[0])]
    package = next(filter(None, (_PACKAGE.search(frame[0]) for frame in frames)), None)
    if package is not None and not own:
        own = [frame for frame in frames if package[0] in frame[0]]
    found = own or [*frames]
    return found[-1] if found else None


def _frames_to_keep(frames: list[Frame]) -> list[Frame]:
    """The innermost ones; and the innermost of the script itself, which may be far outside."""
    own, last = innermost_own(frames), frames[-_FRAMES_KEPT:]
    return last if own is None or own in last else [own, *last]


def read_python(text: Text) -> Iterator[Sign]:
    for found in tracebacks(text):
        yield from _signs_of(found)
    for name in _WITHOUT_HEADER:
        for line in text.hits(f"{name}: "):
            # For a script that cannot be parsed, Python prints its place and no traceback.
            above = (_FRAME.match(each.text) for each in text.before(line, 4))
            frame = next(filter(None, above), None)
            if line.text.startswith(f"{name}: ") and frame is not None and not frame[3]:
                said = line.text.partition(": ")[2].strip()
                yield _sign_alone(line, name, said, [[frame[1], int(frame[2]), "<module>"]])
    for line in text.hits(" (holdfast."):
        yield from _read_own(text, line)
    for line in (*text.hits("Fatal Python error: "), *text.hits("Windows fatal exception: ")):
        fatal = _FATAL_OF_PYTHON.match(PROGRESS_BAR.sub("", line.text))
        if fatal is not None:
            yield _dump(text, line, fatal[1])


def _sign_alone(line: Line, name: str, said: str, frames: list[Any], **more: Any) -> Sign:
    """An exception without its traceback."""
    details = {"type": name, "message": said, "frames_tail": frames, "outermost": "", **more}
    return make_sign("python_exception", line, details)


def read_last_lines(text: Text, *, has_trained: bool) -> Iterator[Sign]:
    """An exception in the last lines, where a launcher or a logger prints only that."""
    end = text.line_at(len(text.whole))
    below, lines_below = "", 0  # the next line that is not empty, and how many there are
    for line in (end, *text.before(end, _LAST_LINES)):
        said = line.text.strip()
        if _OF_TRACE.fullmatch(said):
            continue
        if not below and _PROMPT.fullmatch(said):
            yield _at_prompt(text, line)
            return
        if not below and _WAITS_FOR_DEBUGGER.search(said):
            yield _sign_alone(line, "BdbQuit", said, [], is_bare=True)
            return
        is_shell = said and not has_trained and not _BARE.fullmatch(said)
        shell = _OF_SHELL.fullmatch(said) if is_shell else None
        if shell is not None and (not below or (shell[1] and lines_below < _FEW_LINES)):
            above = next(text.before(line, 1), line)  # bash prints the line of a syntax error, too
            first = above if _OF_SHELL.fullmatch(above.text.strip()) else line
            yield make_sign("environment", first)
            return
        shapes = (_BARE, _STATUS, _ALONE, _CALLED, *((_FATAL,) if line.from_end < 3 else ()))
        if error := next((e for each in shapes if (e := each.fullmatch(said))), None):
            if _is_ignored(text, line):
                below = said
                continue
            yield _sign_alone(line, error[1], error[2], [], is_bare=True)
            return
        if below.startswith((" ", "\t")) and (error := _ANNOUNCED.fullmatch(line.text.rstrip())):
            yield _sign_alone(line, error[1], below.strip(), [], is_bare=True)
            return
        below = line.text if said else below
        lines_below += bool(said)
    yield from _read_unfinished(text, end)


def _is_ignored(text: Text, line: Line) -> bool:
    """Whether it is the last line of a traceback after which Python goes on."""
    if any(_WARNING.match(each.text.strip()) for each in text.after(line, 2)):
        return True
    above = text.before(line, _LAST_LINES)
    head = next((each for each in above if not each.text.startswith(" ")), line)
    if _HEADER not in head.text:
        return False
    return any(each.text.strip().startswith(_IGNORED) for each in text.before(head, 2))


def _read_unfinished(text: Text, end: Line) -> Iterator[Sign]:
    """The traceback in which a log ends: the exception itself is cut off."""
    for line in (end, *text.before(end, _LAST_LINES)):
        if _HEADER in line.text:
            is_asked = line.text.startswith("^C")
            name = "KeyboardInterrupt" if is_asked else "Exception"
            below = map(_FRAME.match, (each.text for each in text.from_same(line, _LAST_LINES)))
            frames = [(found[1], int(found[2]), found[3] or "") for found in below if found]
            kept = [list(frame) for frame in _frames_to_keep(frames)]
            line = line._replace(from_end=end.from_end)
            yield _sign_alone(line, name, CUT, kept, is_bare=True)
            return
        if line.text.strip() and not line.text.startswith((" ", "\t")):
            return


def _read_own(text: Text, end: Line) -> Iterator[Sign]:
    """An uncaught error of holdfast, which is printed as its sentences, its place and its type."""
    told = _OWN_END.fullmatch(end.text.rstrip())
    above = [line.text for line in text.before(end, _MOST_OF_OWN)] if told is not None else []
    first = next((i for i, line in enumerate(above) if line.startswith("holdfast: ")), None)
    if told is None or first is None:
        return
    message = _OWN_LEAD.sub("", "\n".join(above[first::-1]), count=1)
    frames = [[told["file"], int(told["line"])]] if told["file"] else []
    lines = [end.number - first - 1, end.number]
    yield _sign_alone(end, told["type"], message, frames, lines=lines)


def tracebacks(text: Text) -> list[Traceback]:
    """All tracebacks, each once; of a chain the last, of a group the whole."""
    found: list[Traceback] = []
    if cut := _read_cut(text):
        found.append(cut)
    for line in text.hits(_HEADER):
        groups = [each for each in found[-8:] if "parts" in each.details]
        if any(each.head.start < line.start <= each.end.start for each in groups):
            continue  # it stands in the group
        one = _read(text, line)
        if one is None or one.details.pop("is_ignored", False):
            continue
        one.details["lines"] = lines = [line.number, one.end.number]
        before = next((b for b in reversed(found[-8:]) if b.last.rank == one.last.rank), None)
        # The exception before it may only relay this one in its message.
        if before is not None and (
            "caught_in" in before.details
            if one.details.get("is_original")
            else "rank" in one.details and before.type.endswith("ProcessRaisedException")
        ):
            one.details["outermost"] = before.frames[0][2] if before.frames else ""
            one.chain = before.chain
            one.frames = [*before.frames, *one.frames]  # the script's own may be among them
            found.remove(before)
        elif before is not None and (link := _link_between(text, before, one)):
            if before.sentence == one.sentence:  # of another process: its frames tell the place
                one.details["outermost"] = one.frames[0][2] if one.frames else ""
                one.frames, one.chain = [*one.frames, *before.frames], before.chain
            else:
                one.chain = [before.sentence, *before.chain][:10]
                if link == _IN_A_HANDLER:
                    one.details["handled"] = [list(frame) for frame in before.frames]
            lines[0] = before.details.get("lines", lines)[0]
            found.remove(before)
        if before is not None and before not in found:
            one.details = {**before.details, **one.details}
        found.append(one)
    return found


def _read_cut(text: Text) -> Traceback | None:
    """The traceback in which a log begins, as of `tail`."""
    start = text.whole.find('  File "')
    if start < 0 or text.whole.count("\n", 0, start) > _MOST_BEFORE_CUT:
        return None
    head = text.line_at(start)
    frame = _FRAME.match(head.text)
    if frame is None or frame[3] is None or 0 <= text.whole.find(_HEADER) < start:
        return None
    found = _read(text, head)
    if found is not None:
        found.details["outermost"] = ""  # it is cut off
    return found


def _read(text: Text, head: Line) -> Traceback | None:
    lead = head.text[: max(0, head.text.find(_HEADER))]
    if _FIELD_OF_SUMMARY.search(lead.strip()):
        return None  # in torchrun's summary, which is read as such
    if "\u256d" in lead:
        return _read_box(text, head)
    cell = _CELL.search(lead)
    in_group = lead.strip() in {"+ Exception Group", "|", "+"}
    bare = _without_lead(lead, in_group)
    frames: list[Frame] = []
    code, has_code = "", True  # of the innermost frame that has one
    foreign, most = 0, 60 if cell else 6
    for line in text.from_same(head, _MOST_LINES):
        body = bare(line.text)
        if frame := _FRAME.match(body):
            file = frame[1].replace("\\", "/")  # of Windows
            frames.append((file, int(frame[2]), (frame[3] or "").strip()))
            has_code = False
            continue
        if cell and (frame := _CELL_FRAME.match(body)):
            file = frame["file"].removeprefix("File ").partition("](")[0].lstrip("[")
            place = file.replace("\\", "/"), int(frame["line"] or 0)
            frames.append((*place, frame["name"] or "<module>"))
            continue
        if cell and frames and (arrow := _CELL_ARROW.match(body)):
            frames[-1] = (frames[-1][0], frames[-1][1] or int(arrow[1]), frames[-1][2])
        if body.startswith((" ", "\t")) or not body.strip():
            code, has_code = code if has_code else body.strip() or code, True
            if not body.strip() and frames:
                foreign += not cell
            continue
        error = _ERROR.match(body)
        if error is not None and lead.strip() == "C++" and error[2] == "FatalError":
            return None  # Paddle reports a signal, which a line of its own names
        if error is not None and _is_a_name(error[1]) and (not cell or error[2] in cell[1]):
            found = _finish(text, head, line, error, frames, 0 if in_group else _MOST_OF_MESSAGE)
            if lead.strip() == "+ Exception Group":
                _add_parts(text, found)
            found.details["code"] = "" if cell else code
            _add_context(text, found, lead)
            return found
        foreign += 1
        if foreign > most or _HEADER in body:
            return None
    return None


def _without_lead(lead: str, in_group: bool) -> Callable[[str], str]:
    """A function that removes the prefix of the first line from each line."""
    lead = lead.partition("Original")[0] if lead.strip() == "Original" else lead  # torch's word
    if in_group:
        return lambda line: _BAR.sub("", line, count=1)
    if not lead or lead.isspace():
        return lambda line: line[len(lead) :] if line[: len(lead)].isspace() else line
    # A logger's prefix: the same in each line except for its numbers; or only in the first.
    shape = re.compile(re.sub(r"(?:\\?\d)+", r"\\d+", re.escape(lead[-120:])))
    return lambda line: line[found.end() :] if (found := shape.search(line)) else line


def _read_box(text: Text, head: Line) -> Traceback | None:
    """As rich prints it."""
    frames: list[Frame] = []
    is_open, path = True, ""  # the first part of a path that is wrapped
    for line in text.from_same(head, _MOST_LINES):
        body = line.text.strip()
        if is_open and body.startswith(("\u2570", "+--")):
            is_open = False
        elif is_open:
            inner = body.strip(_BOX).strip()
            if (frame := _BOXED_FRAME.search(path + inner)) and not inner.startswith("\u2771"):
                frames.append((frame[1], int(frame[2]), frame[3]))
            is_path = frame is None and (path or _PATH_BEGINS.match(inner))
            path = path + inner + " " * inner.endswith(" in") if is_path else ""
        elif body:
            said, last = _unwrapped(text, line, len(head.text.strip()))
            error = _ERROR.match(said)
            if error is None or not _is_a_name(error[1]):
                return None
            found = _finish(text, head, last, error, frames, _MOST_OF_MESSAGE)
            found.last = line
            _add_context(text, found, "")
            return found
    return None


def _unwrapped(text: Text, line: Line, width: int) -> tuple[str, Line]:
    """A line that rich has wrapped at this width, as one, and the last of its lines."""
    said, last = line.text.rstrip(), line
    for more in text.from_same(line, _MOST_OF_MESSAGE):
        before, word = last.text.rstrip(), next(iter(more.text.split()), "")
        fits = len(before) + 1 + len(word) <= width
        if not word or more.text[0].isspace() or fits or _NEW.match(more.text):
            break
        is_cut = len(before) >= width and not last.text.endswith(" ")  # within a long word
        said, last = f"{said}{'' if is_cut else ' '}{more.text.rstrip()}", more
    return said, last


def _finish(
    text: Text, head: Line, line: Line, error: re.Match[str], frames: list[Frame], most: int
) -> Traceback:
    """With all lines of its message; lines that may belong to it are kept in `tail`."""
    said, end, loose = [(error[3] or "").strip()], line, []
    is_over, blanks, is_added = False, 0, False
    # Python prints a colon only if there is a message: it is below then.
    # A message that torch relays ends at a blank line.
    is_relayed = head.text.strip().startswith("Original")
    is_below = error[3] is not None and (is_relayed or not error[3].strip())
    for number, more in enumerate(text.from_same(line, most * _MOST_ADDED)):
        body = more.text
        is_added = is_added or _ADDED.match(body) is not None
        if number >= most and not is_added:
            break
        if _NEW.match(body) or _HEADER in body or body.strip() in _LINKS:
            break
        if not body.strip() or PROGRESS_BAR.fullmatch(body):
            blanks += 1
            continue
        is_inside = body.startswith((" ", "\t", *(_OF_DYNAMO if said[0] else ())))
        # A line at the margin or below a blank one ends it, unless the one before announces more.
        if not is_inside and not _ANNOUNCES.search(said[-1]):
            is_listed = len(said) > 1 and shape_of(body.strip()) == shape_of(said[-1])
            is_listed |= is_below and not blanks
            is_listed |= bool(OF_FIELDS.search(said[0]) and _A_FIELD.fullmatch(body))
            is_over = is_over or bool(blanks) or not (is_listed or _GOES_ON.match(body))
        if is_inside and _FRAME.match(body) and "most recent call last" not in "".join(said):
            is_over = True
        blanks = 0
        if is_over:
            loose.append(body.strip())
            end = more if is_added else end
        else:
            if _FRAME.match(body) or not (is_inside and said[-1].startswith('File "')):
                said.append(body.strip())  # without the code of its frames
            end = more
    if loose and (last := _last_of_message(text, line, loose)) is not None:
        said, loose, end = [*said, "", *loose], [], last
    message = "\n".join(said).strip()[:4000]
    return Traceback(error[1], message, frames, head, line, end, "\n".join(loose)[:4000])


def _last_of_message(text: Text, error: Line, loose: list[str]) -> Line | None:
    """The last line of prose below an exception, if nothing else comes up to the end.

    Messages of several paragraphs have it. What a script prints after an error tells of what it
    does next, or has a prefix.
    """
    below = text.from_same(error, _MOST_OF_MESSAGE)
    lines = [*takewhile(lambda each: not _NEW.match(each.text), below)]
    has_prefix = {len(each.text) < each.end - each.start for each in (error, *lines)}
    own = [each for each in lines if each.text.strip()]
    if len(lines) == _MOST_OF_MESSAGE or len(has_prefix) > 1 or not _SENTENCE.match(loose[0]):
        return None
    is_prose = all(_OF_PROSE.match(each) and not _GOING_ON.search(each) for each in loose)
    is_all = [each.text.strip() for each in own[-len(loose) :]] == loose
    return own[-1] if is_prose and is_all else None


def _add_parts(text: Text, found: Traceback) -> None:
    parts: list[str] = []
    for line in text.from_same(found.last, _MOST_LINES):
        body = line.text.lstrip()
        if not body.startswith(("|", "+")):
            break
        found.end = line
        error = _ERROR.match(_BAR.sub("", body, count=1))
        if error is not None and _is_a_name(error[1]):
            parts.append(f"{error[1]}: {(error[3] or '').strip()}".rstrip(": "))
    found.details["parts"] = parts[:20]
    if parts:
        found.message = f"{found.message}: {'; '.join(parts)}"[:4000]


def _add_context(text: Text, found: Traceback, lead: str) -> None:
    """The lines around it: which thread or process raised it."""
    caught = _CAUGHT.match(found.message)
    if caught is not None:
        found.details["caught_in"] = f"{caught[2]} {caught[3]}"
    if lead.strip() == "Original":
        found.details["is_original"] = True
    if _WARNING.search(found.message):
        found.details["is_ignored"] = True
    outer = found.frames[0] if found.frames else ("", 0, "")
    if outer[0].endswith("multiprocessing/resource_sharer.py") and outer[2] == "_serve":
        found.details["is_ignored"] = True  # that thread prints it and goes on
    if outer[0].endswith("multiprocessing/queues.py") and outer[2] == "_feed":
        found.details["thread"] = "that feeds a queue"
    if outer[0] == "<string>" and any(file.endswith(_STARTS) for file, *_ in found.frames[1:3]):
        found.details["process"] = "of multiprocessing"
    for line in text.before(found.head, 2):
        said = PROGRESS_BAR.sub("", line.text).strip()
        is_bare = said not in _LINKS and not NAMES_A_THING.search(found.message)
        is_bare &= line.rank in (None, found.head.rank)
        if is_bare and _share_words(said, found.message):
            found.details["announced"] = said
        if said.startswith(_IGNORED):
            found.details["is_ignored"] = True
        elif said.startswith("Error executing job with overrides"):
            found.details["outermost"] = ""  # Hydra leaves out its own frames, and the script's
        elif thread := _OF_THREAD.search(said):
            found.details["thread"] = thread[1]
        elif match := re.fullmatch(r"Process (\S+):", said):
            found.details["process"] = match[1]
        elif match := re.fullmatch(r"-- Process (\d+) terminated with the following error:", said):
            found.details["rank"] = int(match[1])
        else:
            continue
        break


def _share_words(line: str, message: str) -> bool:
    words, own = (set(map(str.lower, _WORDS.findall(each))) for each in (line, message))
    return len(words & own) >= _WORDS_SHARED and line.strip() != message


def _link_between(text: Text, before: Traceback, one: Traceback) -> str:
    for line in text.before(one.head, 6):
        if line.start <= before.last.start:
            return ""
        for said in (line.text.strip(), _BAR.sub("", line.text, count=1).strip()):
            if said in _LINKS:
                return said
    return ""


def _signs_of(found: Traceback) -> Iterator[Sign]:
    details = {
        "type": found.type,
        "message": found.message,
        "frames_tail": [list(frame) for frame in _frames_to_keep(found.frames)],
        "chain": found.chain,
        "tail": found.tail,
        "outermost": found.frames[0][2] if found.frames else "",
        **found.details,
    }
    rank = details.pop("rank", None)
    rank = rank if isinstance(rank, int) else found.last.rank
    last = found.last._replace(from_end=found.end.from_end)  # its message ends there
    yield make_sign("python_exception", last, details, rank)
    name = found.type.rpartition(".")[2]
    # A data set, too, may miss a file: only the loader's own calls tell of a dead worker.
    frames = found.frames if "Connection" in name else found.frames[-1:]
    files = " ".join(frame[0] for frame in frames)
    is_of_main = "thread" not in details  # others lose a connection while the script leaves, too
    if name in DISGUISES and is_of_main and any(part in files for part in _LOADER_FILES):
        yield make_sign(DISGUISES[name], found.last, {"type": found.type}, rank)


def _dump(text: Text, line: Line, what: str) -> Sign:
    """faulthandler's dump, with the frames of the thread that died, the innermost first."""
    name = re.split(r"[:\n]", what)[0].strip().lower()
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
    # Without a current thread (it is not one of Python's), the last is the main thread.
    stack = [list(frame) for frame in stacks[-1][:40]]
    number = SIGNAL_WORDS.get("segmentation fault" if "violation" in name else name, ("", None))[1]
    return make_sign("faulthandler", line, {"signal": number, "stack": stack})


def _at_prompt(text: Text, line: Line) -> Sign:
    """The log ends at the prompt of a debugger, which prints above it where it is."""
    places = filter(None, (_PROMPT_PLACE.match(above.text) for above in text.before(line, 6)))
    frames = [[place[1], int(place[2]), place[3]] for place in places][:1]
    return _sign_alone(line, "BdbQuit", "", frames)


def shape_of(line: str) -> str:
    """A line without its numbers: the items of a list differ in them."""
    return re.sub(r"\d+", "0", line)


def _is_a_name(word: str) -> bool:
    """Whether a word may be an exception: prose and metrics begin lines as well."""
    name = word.rpartition(".")[2]
    is_named = name.lstrip("_")[:1].isupper() and word not in _LEVELS
    return is_named or name.endswith(("error", "timeout", "exception"))


# -- The stacks of all threads: a dump of py-spy, or of faulthandler after its timeout -------------
# A person printed them because nothing moved. They are judged as if they had just been read.

_PYSPY = re.compile(r'Thread (?:\S+ )?\((?P<state>[a-z+]+)\)(?:: "(?P<name>[^"]*)")?')
_PYSPY_FRAME = re.compile(r"\s+(?P<name>\S.*?) \((?P<file>[^()]+):(?P<line>\d{1,9})\)")
_TIMED_OUT = re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!")
_THREAD = re.compile(r"(?:Current t|T)hread 0x\w+.* \(most recent call first\):")
_STACK_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<name>.*)')
# py-spy leaves out where a package is installed.
_PACKAGES = re.compile(
    r"(?:torch\w*|deepspeed|accelerate|transformers|datasets|\w*lightning\w*|megatron|ray|jax\w*"
    r"|tensorflow|keras|numpy|tqdm|filelock|joblib|wandb|requests|urllib3|PIL|h5py|fsspec)/"
)
_MOST_THREADED = 2000
_MOST_FRAMES = 60


def read_stacks(text: Text) -> Iterator[Sign]:
    """The last such dump."""
    timeouts = [line for line in text.hits("Timeout (") if _TIMED_OUT.fullmatch(line.text.strip())]
    if timeouts:
        # faulthandler prints the main thread last.
        yield from _dumped(text, timeouts[-1], "faulthandler")
        return
    mains = [line for line in text.hits('"MainThread"') if _PYSPY.fullmatch(line.text.strip())]
    if mains:
        yield from _dumped(text, mains[-1], "py-spy")


def _dumped(text: Text, head: Line, by: str) -> Iterator[Sign]:
    threads: list[dict[str, Any]] = []
    last = head
    for line in (head, *text.from_same(head, _MOST_THREADED)):
        said = line.text.strip()
        if thread := _PYSPY.fullmatch(said):
            state = "R" if thread["state"].startswith("active") else "S"
            is_main = thread["name"] == "MainThread"
            threads.append({"name": thread["name"], "is_main": is_main, "state": state})
        elif _THREAD.fullmatch(said):
            threads.append({"name": None, "state": "S"})
        elif frame := _PYSPY_FRAME.fullmatch(line.text) or _STACK_FRAME.fullmatch(line.text):
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
