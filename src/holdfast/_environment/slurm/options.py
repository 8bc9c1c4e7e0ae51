"""The options of a batch script, as sbatch reads them from its `#SBATCH` lines.

Only lines that begin with the mark count, and only before the first command: sbatch stops reading
there without a message. Of two equal options, the last one counts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

_MARK = "#SBATCH"
_DEFAULT_LEAD_SECONDS = 60
_MOST_LEAD_SECONDS = 65535
# The names that sbatch 22.05 accepts, with or without SIG, in any case. It accepts any number.
_SIGNALS = "HUP INT QUIT ABRT KILL ALRM TERM USR1 USR2 URG CONT STOP TSTP TTIN TTOU XCPU"
_SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task",
    "C": "constraint", "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses",
    "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "v": "verbose", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip
_NO_VALUE = """
    contiguous hold ignore-pbs no-requeue overcommit parsable quiet reboot requeue spread-job
    use-min-nodes verbose wait oversubscribe share test-only hetjob packjob help usage version
"""
_OTHERS = """
    bb bbf comment container cpu-freq deadline delay-boot export-file gid gres gres-flags mail-type
    mail-user mcs-label mem mem-per-cpu mem-per-gpu mincpus ntasks-per-node ntasks-per-core
    ntasks-per-socket ntasks-per-gpu open-mode power prefer priority profile reservation signal
    sockets-per-node cores-per-socket threads-per-core switches thread-spec time-min tmp uid wckey
    wrap cpus-per-gpu gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task
    kill-on-invalid-dep
"""
_WITHOUT_VALUE = frozenset(_NO_VALUE.split())
# Their value must be in the same word, after `=`.
_VALUE_OPTIONAL = frozenset(["exclusive", "export", "get-user-env", "nice", "no-kill", "propagate"])
_LONG = frozenset(_OTHERS.split()).union(_SHORT.values(), _WITHOUT_VALUE, _VALUE_OPTIONAL)
_WORD = re.compile(r"""(?:[^\s"'\\#]|\\.|"(?:[^"\\]|\\.)*"|'[^']*'|(?<=[^\s])#)+""")


@dataclass(frozen=True)
class Option:
    name: str  # the long one, without dashes
    value: str  # "" for one that has none
    line: int
    start: int
    end: int
    value_start: int  # of the value as written, its quotes too
    component: int = 0  # of a heterogeneous job


@dataclass(frozen=True)
class WarningSignal:
    name: str  # without SIG; the number if the signal has no name
    seconds: int
    to_batch: bool  # B: to the batch shell, and to it alone

    @property
    def status(self) -> int:
        """The shell's exit status for it: 128 and its number."""
        return 128 + (
            int(self.name) if self.name.isdecimal() else signal.Signals[f"SIG{self.name}"]
        )


def parse_signal(text: str) -> WarningSignal | None:
    """Parse the value of `--signal`; None if sbatch would refuse it.

    >>> parse_signal("B:USR2@60")
    WarningSignal(name='USR2', seconds=60, to_batch=True)
    """
    match = re.fullmatch(r"(?:([RrBb]{1,2}):)?([A-Za-z0-9]+)(?:@(\d{1,5}))?", text.strip())
    if match is None:
        return None
    seconds = _DEFAULT_LEAD_SECONDS if match[3] is None else int(match[3])
    name = _signal_name(match[2])
    if name is None or seconds > _MOST_LEAD_SECONDS:
        return None
    return WarningSignal(name, seconds, "b" in (match[1] or "").lower())


def _signal_name(text: str) -> str | None:
    if text.isdecimal():
        try:
            return signal.Signals(int(text)).name.removeprefix("SIG")
        except ValueError:
            return str(int(text)) if int(text) > 0 else None
    name = text.upper().removeprefix("SIG")
    return name if name in _SIGNALS.split() else None


def parse_time_limit(text: str) -> float | None:
    """Seconds of a `--time`; None if there is no limit, or sbatch would refuse the text.

    >>> parse_time_limit("90"), parse_time_limit("1-2:30"), parse_time_limit("1:30:00")
    (5400.0, 95400.0, 5400.0)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # without days and with one colon at most
        hours, minutes, seconds = 0, hours, minutes
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return float(total) or None  # 0 means no limit


def batch_options(text: str) -> dict[str, str]:
    """Long name to value; for a heterogeneous job, of its first component.

    >>> batch_options("#!/bin/bash\\n#SBATCH -t 10 --requeue\\ntrue\\n#SBATCH -N 2\\n")
    {'time': '10', 'requeue': ''}
    """
    return {option.name: option.value for option in read_options(text) if option.component == 0}


def read_options(text: str) -> list[Option]:
    found: list[Option] = []
    component = 0
    for number, start, line in _leading_lines(text):
        if not line.startswith(_MARK):
            continue
        for option in parse_option_line(line[len(_MARK) :], start + len(_MARK), number, component):
            if option.name in ("hetjob", "packjob"):
                component += 1
            else:
                found.append(option)
    return found


def options_end(text: str) -> int:
    """Where sbatch stops reading options: the start of the first command."""
    end = 0
    for _, start, line in _leading_lines(text):
        end = start + len(line) + 1
    return min(end, len(text))


def _leading_lines(text: str) -> Iterator[tuple[int, int, str]]:
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield number, start, line
        start += len(line) + 1


def parse_option_line(line: str, offset: int, number: int, component: int = 0) -> Iterator[Option]:
    """The options of one line, without its mark; `offset` is where it begins in the script."""
    words = _split(line, offset)
    while words:
        start, end, word = words.pop(0)
        if word in ("hetjob", "packjob"):
            yield Option(word, "", number, start, end, end, component)
            continue
        name, value, value_start = _read_word(word, start, end)
        if name is None:
            continue
        if value is None and not (name in _WITHOUT_VALUE or name in _VALUE_OPTIONAL) and words:
            value_start, end, value = words.pop(0)
        yield Option(name, value or "", number, start, end, value_start, component)


def _read_word(word: str, start: int, end: int) -> tuple[str | None, str | None, int]:
    """Name, value in the same word, and where that begins."""
    if word.startswith("--"):
        written, equals, value = word[2:].partition("=")
        name = _full_name(written)
        return name, (value if equals else None), start + len(written) + 3 if equals else end
    if word.startswith("-") and len(word) > 1 and word[1] in _SHORT:
        name = _SHORT[word[1]]
        if len(word) == 2 or name in _WITHOUT_VALUE:
            return name, None, end
        return name, word[2:], start + 2
    return None, None, end


def _full_name(written: str) -> str:
    if written in _LONG:
        return written
    fitting = [name for name in _LONG if name.startswith(written)]
    return fitting[0] if len(fitting) == 1 else written  # getopt accepts a unique prefix


def _split(line: str, offset: int) -> list[tuple[int, int, str]]:
    found = []
    at = 0
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        match = _WORD.match(line, at)
        if match is None:  # a comment, or a quote without an end
            break
        found.append((offset + at, offset + match.end(), unquote(match[0])))
        at = match.end()
    return found


def unquote(text: str) -> str:
    """A word without its quotes.

    >>> unquote('--comment="a b"')
    '--comment=a b'
    """
    pieces = re.finditer(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)""", text)
    return "".join(
        re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None
        else match[1] if match[1] is not None
        else (match[3] or match[4] or "")
        for match in pieces
    )  # fmt: skip
