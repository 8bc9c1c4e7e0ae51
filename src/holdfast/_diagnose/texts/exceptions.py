"""What an exception means: the few kinds of trouble behind hundreds of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from holdfast import _text
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.texts.python import (
    DISGUISES,
    NAMES_A_THING,
    OF_FIELDS,
    innermost_own,
    shape_of,
)
from holdfast._diagnose.texts.sign import UNMET, Sign
from holdfast._diagnose.texts.signs import (
    is_of_another,
    read_signs,
    waits_in_vain,
    was_caught,
)

# In the order of what they tell: a worker that was killed says more than the file that was not
# found because of it.
KINDS = {
    **{"shm_full": "shm_full", "host_oom": "host_oom", "worker_killed": "worker"},
    **{"worker_exited": "worker", "worker_conn_reset": "worker", "worker_file_not_found": "worker"},
    **{"cuda_oom": "cuda_oom", "memory_refused": "cpu_oom", "quota": "disk_full"},
    **{"disk_full": "disk_full", "torch_save_short": "disk_full", "environment": "environment"},
    **{"arguments": "arguments"},
    **{"address_in_use": "rendezvous", "rendezvous": "rendezvous"},
    **{"collective_mismatch": "mismatch", "nccl_timeout": "timeout", "gloo_timeout": "timeout"},
    **{"peer_lost": "peer_lost", "cuda_error": "cuda_error", "cuda_assert": "cuda_error"},
    **{"files_limit": "files_limit", "nan": "nan", "nan_loss": "nan"},
}
_ORDER = list(KINDS)
# Errors of holdfast: their type tells, not their words.
_OWN = re.compile(
    r"(?:Settings|Folder|State|Checkpoint|Proof)Error|NotARun|RunIsLive|UnstorableState"
    r"|StateMismatch|RestoreDiffers|(?:Damaged|Unreadable|NoGood)Checkpoint"
)
_OF_HOLDFAST = re.compile(r"holdfast\.|[^.]*$")
# A folder that could not be written now may be written later.
_NO_ROOM = re.compile(r"\((?:No space left on device|Disk quota exceeded)\)")
_MAY_PASS = re.compile(
    rf"{_NO_ROOM.pattern}|\((?:Input/output error|Stale file handle|Connection timed out"
    r"|Host is down|No route to host|Transport endpoint is not connected|Remote I/O error"
    r"|Interrupted system call|Resource temporarily unavailable|Device or resource busy"
    r"|Too many open files(?: in system)?|Cannot allocate memory)\)"
)
# What a wrong program or a wrong call raises at every start.
_NEVER_RIGHT = re.compile(
    r"(?:Import|ModuleNotFound|Syntax|Indentation|Tab|Name|Type|Key|Attribute|FileNotFound"
    r"|NotADirectory|IsADirectory|Permission|Value|Index|Assertion|NotImplemented|UnboundLocal"
    r"|Argument|ArgumentType|JSONDecode|UnicodeDecode|YAML|Scanner|Parser|TOMLDecode|Config"
    rf"|Configuration|Validation|Usage|Recursion|ZeroDivision|Ranks)Error|{_OWN.pattern}"
    r"|BadParameter|NoSuchOption"
)
_SOCKETS = (*DISGUISES, "ConnectionError", "ConnectionAbortedError", "TimeoutError", "OSError")
_NAN = re.compile(
    r"(?i)(?:loss|grad\w*)\b.{0,40}\b(?:nan|inf)\b|\bnan\b.{0,40}(?:loss|grad)"
    r"|invalid values:\D{0,40}\bnan\b"
)
_NO_MEMORY = re.compile(r"(?i)\bout of memory\b|cannot allocate memory|failed to allocate memory")
# A server of TensorFlow or JAX; a web server is no rank.
_UNAVAILABLE = re.compile(r"(?s)(?:UnavailableError|XlaRuntimeError: UNAVAILABLE)\b(?!.*HTTP)")
_GPU = re.compile(r"(?i)\b(?:gpu|cuda|hip|rocm|xpu|npu|hbm|vram|device memory)")
_HOST = re.compile(r"(?i)OOM when allocating[^\0]*(?:\bcpu:\d|by allocator \w*cpu)")
_OTHER_MEMORY = ("OutOfMemoryError", "RayOutOfMemoryError")
_LIBRARY = re.compile(
    r"\.so\b|\.dll|DLL load|symbol|GLIBC|numpy.core|driver|(?:site|dist)-packages|pip install"
    r"|\brequire[sd]?\b|not (?:be )?installed",
    re.IGNORECASE,
)
_NOT_INSTALLED = re.compile(
    r"(?:ModuleNotFound|PackageNotFound)Error|DistributionNotFound|(?:Contextual)?VersionConflict"
    r"|NVMLError_(?:Lib|Driver)\w+"
)
_TO_INSTALL = re.compile(r"\b(?:pip|conda) install \S|(?i:\b(?:is|are) not installed\b)")
_PACKAGES = ("site-packages", "dist-packages")
_LOADER = ("torch/utils/data", "torch/multiprocessing", "multiprocessing/connection.py")
# What only a wrong start or a wrong setting raises, at any step.
_NOT_EVEN_LOADED = re.compile(
    r"(?:Import|ModuleNotFound|Syntax|Indentation|Tab|Misconfiguration|Config\w*|MissingConfig|Scanner"
    r"|UnsupportedInterpolationType|InterpolationKey|HFValidation)(?:Error|Exception)"
    r"|MissingMandatoryValue"
)
# What reads settings, by its package.
_READS_SETTINGS = re.compile(
    r"(?:(?:ruamel\.)?yaml|toml\w*|configparser|omegaconf\.errors|jsonargparse|argparse|tyro|draccus"
    r"|absl\.flags|jsonschema)\.|hydra\.errors\.(?!Instantiation)"
)
_OF_SETTINGS = re.compile(
    r"(?:world|batch)\w*[ _]?size\b.{0,60}(?:divisible|multiple)|Check batch related parameters"
    r"|is not in the [\w:]+ registry|arguments are not used by the HfArgumentParser"
    r"|Could not override '|is not in struct|strategy to match|Error in call to target .*\n?"
    r".*unexpected keyword|train a model that has been loaded in"
    r"|validation errors? for \w*(?:Config|Arg|Setting|Param)"
)
_ASKED_FOR = ("KeyboardInterrupt", "SystemExit", "BdbQuit")
_MAKING = re.compile(r"\b(?:makedirs|mkdir|FileHandler)\(|\bself\.baseFilename\b")
_NO_PLACE = re.compile(r"\[(?:Errno (?:2|13|17|20|21|30)|WinError (?:3|5|183))\]")
_NOT_HANDLED = ("cuda_oom", "cuda_error", "host_oom", "cpu_oom", "shm_full", "disk_full", "worker")
_OF_VICTIMS = ("timeout", "peer_lost")
# It says only that something failed: its cause tells.
_REFERS = re.compile(
    r"(?i)\bsee (?:the )?(?:inner exception|cause|exception above)"
    r"|^(?:an? )?(?:\w+ )?(?:error|exception|failure) (?:(?:has |is |was )?(?:occurred|raised)"
    r"|while|during|when|in)\b(?!.*: \S)"
)
_PROBES = ("ImportError", "ModuleNotFoundError", "KeyError", "AttributeError")  # with a fallback
_ANSWER_LINES = 30  # between a Ctrl-C and what the script then raised
_UNLOAD_LINES = 6  # between an exception and a crash of what is unloaded
_KEPT = ("is_late", "handled", "code", "announced", "caught_in")  # details of a sign
_AT_ONCE_LINES = 2  # between two tracebacks: nothing else was printed
_LOADER_ENDS = re.compile("exited unexpectedly|DataLoader timed out")
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
_OF_A_SCRIPT = re.compile(  # it printed itself why it left, or nothing tells
    r"Command '\['[^']*?\b(?:python[\d.]*|accelerate|torchrun|deepspeed)(?:\.exe)?'.*non-zero"
)
_OF_A_SIGNAL = ("SignalException", "SIGTERMException")  # a line of its own says which
_OF_WORKERS = ("WorkerGroupError", "TrainingFailedError")  # Ray's: with the end of each traceback
_NO_REASON = ("DeadKernelError", "ActorDiedError", "RayActorError")  # of another process's end
PROCESS_LEFT = re.compile(  # in any launcher's words
    r"(?i)\b(?:process|worker|child|rank|actor|task)(?:es)?\b.{0,40}\b(?:terminated|exited|died"
    r"|failed|crashed|ended|killed)\b.{0,30}\b(?:exit ?code|code|status|signal)\b"
)
CHILD_LEFT = re.compile(
    "returned (?:a )?non-zero exit |exited unexpectedly with exit code|no longer alive"
    r"|^[Pp]rocess \d+ terminated with |Trials did not complete"
)
# It only says where to look.
POINTS_ABOVE = re.compile(
    r"(?i)\b(?:see|causes?|errors?|logs?|exceptions?|tracebacks?|stack ?traces?) \(?above\b"
    r"|\bprevious (?:error|exception|log|message|traceback)"
)
# An exception that torch relayed from another process: the original is at the end of the text.
# Only lines of holdfast about its place come after it.
_RELAYED = re.compile(
    r"Caught [\w.]+ in ([^\n]{1,60}?)\.\nOriginal Traceback .*\n"
    r"(?!holdfast: )([A-Za-z_][\w.]*: \S.*)",
    re.DOTALL,
)
_EMBEDDED = re.compile(r"\n\s*((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))(?:\(['\"]|: )(.*)")
_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,9}), in ([^\n]{1,200})')
_NAME = re.compile(r"(Error|Exception|Exit|Interrupt|Warning|Failed)$")
_TYPE = re.compile(r"([A-Za-z_][\w.]*)(?::\s*(.*))?", re.DOTALL)
_STATUS_WORD = re.compile(r"(?:\(\d+\)\s+)?[A-Z][A-Z_]{3,}:\s")  # of TensorFlow and JAX
_OF_ROOTS = re.compile(r"\d+ root error\(s\) found")
_NO_NEWS = re.compile(r"\d+ root error|Detected at node|Node:|File \"|Traceback|\[\[|<stack traces")
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_RULE = re.compile(r"[\W_]*")  # a line without a word
_IN_JSON = re.compile(r"\"(?:message|error|detail)\": \"(.+)\",?$")
_OF_A_NODE = re.compile(r"\{\{function_node .*?\}\} ?")  # of TensorFlow
_ANSWER = re.compile(r'(?m)^message: "((?:[^"\\]|\\.)+)"')
_CALLING = re.compile(r"(?:Exception|Error) encountered when calling ")  # Keras: the rest is below
# It goes on: with the other half, or with the place in a file.
_CONTRASTS = re.compile(r"(?i)(?:but|however|while|expected|got|found|instead)\b|in \"")
# Of load_state_dict: strict=False gets over names, and not over sizes.
_PARTS = ("size mismatch for ", "Missing key(s)", "Unexpected key(s)")


def gist(message: str) -> str:
    """The line of a message that tells most: a first line often only announces another.

    >>> gist("Graph execution error:\\n1 root error(s) found.\\n(0) INVALID_ARGUMENT: It is empty")
    'Graph execution error: (0) INVALID_ARGUMENT: It is empty'
    """
    message = _OF_A_NODE.sub("", message)
    lines = [line.rstrip() for line in message.splitlines() if not _RULE.fullmatch(line)] or [""]
    first, *more = map(str.strip, lines)
    if "Last error:" in more[:-1]:  # NCCL: its own words, and their cause
        return f"{more[more.index('Last error:') + 1]} ({first})"
    if _OF_ROOTS.match(first):  # of TensorFlow: one of each device, mostly the same
        return next((line[4:] for line in more if line.startswith("(0) ")), first)
    if first.endswith("{"):  # of a server: its answer in JSON
        told = (found[1] for line in more if (found := _IN_JSON.match(line)))
        named = [line for line in more if line.startswith("when ")]
        return " ".join([first.rstrip(" {'\""), *dict.fromkeys([*told, *named])])
    if OF_FIELDS.search(first):  # of pydantic: each field, and what is wrong with it
        return f"{first}: {' '.join(line for line in more if not line.startswith('For further'))}"
    errors = [i for i, line in enumerate(more) if _ERROR_LINE.match(line)]
    if errors and first == "in user code:":  # of Keras: its own traceback follows, and the error
        said = more[errors[-1]].partition(": ")[2]
        return gist("\n".join([said, *more[errors[-1] + 1 :]]))
    if errors and first.endswith("errors:"):  # of the workers of Ray
        return f"{first} {more[errors[-1]]}"
    if first.endswith(":") and (answer := _ANSWER.search(message)):  # of a service
        return f"{first} {answer[1]}"
    if _CALLING.match(first) and more:
        return gist("\n".join(more))
    if not first.endswith(":"):
        below = [line.strip() for line in message.partition("\n\n")[2].splitlines()]
        if below and not NAMES_A_THING.search(first):  # its paragraphs name what it is about
            named = [line for line in below if NAMES_A_THING.search(line)][:2]
            return f"{first}: {'; '.join(named)}" if named else first
        return f"{first} {more[0]}" if more and _CONTRASTS.match(more[0]) else first
    frames = (i for i, line in enumerate(lines[:-1]) if line.lstrip().startswith('File "'))
    code = [lines[i + 1].strip() for i in frames if lines[i + 1].startswith(" ")]
    telling = [line for line in more if not _NO_NEWS.match(line) and line not in code] or more
    parts = [next((line for line in more if line.startswith(part)), "") for part in _PARTS]
    best = next(filter(_STATUS_WORD.match, telling), next(iter(telling), ""))
    best = ", ".join(line for line in telling if shape_of(line) == shape_of(best))  # a whole list
    return f"{first} {' '.join(filter(None, parts)) or best}".rstrip()


def kind_of_sign(sign: Sign) -> str:
    # MASTER_ADDR and the like are not set: no other rank is needed to tell.
    return "environment" if "variable" in sign.details else KINDS[sign.kind]


@dataclass
class Fault:
    """An exception that ended a process."""

    type: str
    message: str = ""
    qualified: str = ""
    chain: list[str] = field(default_factory=list)
    place: str = ""
    record: Record = field(default_factory=dict)  # the trainer's own record
    is_before_first_step: bool | None = None  # None: unknown
    exit_code: str | None = None  # what sys.exit was given
    tail: str = ""  # lines that may belong to its message
    by: str = ""  # the thread or process, if it is not the main one
    told: str = ""  # the part of its message by which its kind is known
    then: str = ""  # what the main thread raised because of it, most likely

    def sentence(self, most: int = 200) -> str:
        """As Python prints it, in one line."""
        if (relayed := _RELAYED.search(self.message)) is not None:
            return f"{_text.one_line(relayed[2], most)} (in {relayed[1]})"
        said = gist(self.message)
        is_announced = said.endswith((":", "{")) or _ANSWER.match(self.tail)
        if is_announced and self.tail:
            said = gist(f"{self.message}\n{self.tail}")
        if self.chain and not said:
            said = self.chain[0]
        elif self.chain and _REFERS.search(said):
            said = f"{said.rstrip('.')}: {self.chain[0]}"
        said = _text.one_line(said, most)
        where = f" (in {self.by})" if self.by else ""
        code = _text.text(self.record.get("code"))
        if not said and self.chain and self.type not in _ASKED_FOR:
            return f"{self.type}, because of {_text.one_line(self.chain[0], most)}{where}"
        if not said and code and self.type not in _ASKED_FOR:
            return f"{self.type} in `{_text.one_line(code, most)}`{where}"
        return f"{self.type}: {said}{where}" if said else f"{self.type}{where}"

    def came_of(self, first: Fault, **more: Any) -> Fault:
        """The exception of another thread or process, which led to this one of the main thread."""
        at = f" at {self.place}" if self.place else ""
        record = {**self.record, **first.record, **more.pop("record", {})}
        early, then = self.is_before_first_step, f"{self.sentence()}{at}"
        return replace(first, record=record, is_before_first_step=early, then=then, **more)

    @property
    def verb(self) -> str:
        """What a process did with it: FATAL, or a status of TensorFlow, is no exception."""
        return "printed" if self.type.isupper() or self.type.islower() else "raised"

    @property
    def is_exit(self) -> bool:
        return self.type == "SystemExit"

    @cached_property
    def kind(self) -> str:
        """What it is about; `plain` where it means what it says."""
        if self.is_exit:
            return "exit"
        if self.type == "KeyboardInterrupt":
            return "interrupt"
        if self.type.endswith("MemoryError") and self.type not in _OTHER_MEMORY:
            return "cpu_oom"
        if self.type == "OutOfMemoryError" and "ray" not in self.qualified.split("."):
            return "cuda_oom"
        if self.is_own:
            return "disk_full" if self._may_pass and _NO_ROOM.search(self.message) else "plain"
        if _OF_SETTINGS.search(self.message):
            return "plain"
        if self.type == "RanksError" and _OF_HOLDFAST.match(self.qualified):
            return "rendezvous"
        if _NOT_INSTALLED.fullmatch(self.type):
            return "environment"
        if self.type == "ImportError":
            # A name that the script's own module lacks: nothing is wrong with the machine.
            inner = [file for file in self._files() if not file.startswith("<frozen")][-1:]
            is_in_a_package = any(part in file for part in _PACKAGES for file in inner)
            is_of_a_library = is_in_a_package or _LIBRARY.search(self.message)
            return "environment" if is_of_a_library else "plain"
        if any(cause.startswith("MemoryError") for cause in self.chain):
            return "cpu_oom"
        # The exception tells more than its cause, if it tells anything.
        whole = f"{self.qualified or self.type}: {self.message}"
        chain = [] if "handled" in self.record else self.chain
        for said in (whole, *chain, f"{whole}\n{self.tail}" if self.tail else ""):
            found = [sign for sign in read_signs(said[:8000]) if sign.kind in KINDS]
            # Lines below it may be of another rank, if no rank stands before them.
            if said not in (whole, *chain) and self.record.get("rank") is None:
                found = [sign for sign in found if KINDS[sign.kind] not in _OF_VICTIMS]
            if found:
                best = min(found, key=lambda sign: _ORDER.index(sign.kind))
                told = best.text.removeprefix(f"{self.qualified or self.type}: ")
                kind, self.told = kind_of_sign(best), best.details.get("told") or told
                # The lines below a message of TensorFlow name the device.
                return "cpu_oom" if kind == "cuda_oom" and self.is_of_host else kind
        # A worker's death also shows as a lost connection or file: then a frame tells. A data set,
        # too, may miss a file: only the loader's own calls tell of a dead worker.
        files = self._files() if "Connection" in self.type else self._files()[-1:]
        told = " ".join(files) or _text.text(self.record.get("traceback"))
        if self.type in DISGUISES and any(part in told for part in _LOADER):
            return "worker"
        if _NO_MEMORY.search(f"{whole}\n{self.tail}"):
            return "cuda_oom" if _GPU.search(f"{whole}\n{self.tail}") else "cpu_oom"
        if _UNAVAILABLE.match(f"{self.type}: {self.message}"):
            return "peer_lost"
        if _TO_INSTALL.search(self.message):
            return "environment"
        return "nan" if _NAN.search(self.message) else "plain"

    @property
    def is_of_host(self) -> bool:
        """Whether the memory of TensorFlow's message is that of the host."""
        return _HOST.search(f"{self.message}\n{self.tail}") is not None

    def _files(self) -> list[str]:
        """The files of its frames, the innermost last."""
        frames = self.record.get("frames")
        places = frames if isinstance(frames, list) else []
        return [str(each[0]) for each in places if isinstance(each, list | tuple) and each]

    @property
    def is_own(self) -> bool:
        """Whether it is one of holdfast, raised while a run is opened."""
        return bool(_OWN.fullmatch(self.type)) and _OF_HOLDFAST.match(self.qualified) is not None

    @property
    def _may_pass(self) -> bool:
        """Whether the run folder could not be written for a reason that may be over soon."""
        is_of_folder = self.type == "FolderError" and self.is_own
        return is_of_folder and _MAY_PASS.search(self.message.partition("\n")[0]) is not None

    @property
    def inner(self) -> Fault:
        """The exception that this one only wraps: it repeats its type or its words."""
        told = _EMBEDDED.search(self.message)
        line = f"{told[1]}: {told[2]}" if told else next(iter(self.chain), "")
        first = fault_of_line(line) if line.partition(": ")[2][:60] in self.message else None
        return self if first is None or not first.message else first

    @property
    def is_configuration(self) -> bool:
        """Whether it would happen again at every start."""
        is_late = self.is_before_first_step is False
        if (inner := self.inner) is not self and not is_late and inner.is_configuration:
            return True
        if self._may_pass:
            return False
        if self.is_own and self.is_before_first_step is None:
            return True
        is_of_settings = (
            _NOT_EVEN_LOADED.fullmatch(self.type)
            or _READS_SETTINGS.match(self.qualified)
            or _OF_SETTINGS.search(self.message)
        )
        if is_of_settings and self.is_before_first_step is not False:
            return True
        # A folder for the output, or the log in it, cannot be made.
        is_made = _MAKING.search(_text.text(self.record.get("code"))) is not None
        if is_made and _NO_PLACE.search(self.message) and self.is_before_first_step is None:
            return not self.record.get("is_late")
        return bool(self.is_before_first_step) and bool(_NEVER_RIGHT.fullmatch(self.type))


def fault_of_error(error: Record) -> Fault | None:
    """From the trainer's own record."""
    name = _text.text(error.get("type"))
    if not name:
        return None
    chain = error.get("chain")
    code = error.get("exit_code")
    early = error.get("is_configuration")
    message = _text.text(error.get("message"))
    # torch relays an exception from another process in the message.
    relayed = _FRAME.findall(message.partition("\nOriginal Traceback ")[2])
    given_on = [[file, int(line), name] for file, line, name in relayed]
    found = Fault(
        type=name,
        message=message,
        qualified=_text.text(error.get("qualified")),
        chain=[t for t in chain if isinstance(t, str)][:20] if isinstance(chain, list) else [],
        place=_place(given_on) or _place(error.get("frames")),
        record=error,
        is_before_first_step=early if isinstance(early, bool) else None,
        exit_code=None if code is None else str(code)[:300],
    )
    return _before_the_loss(found)


def fault_of_signs(signs: Iterable[Sign]) -> Fault | None:
    """The last printed exception that does not only report the failure of another process."""
    signs = list(signs)
    found = [sign for sign in signs if sign.kind == "python_exception"]
    # One of another thread or process ends the script only if the script raises it.
    found.sort(key=lambda sign: not is_of_another(sign))
    last: Fault | None = None
    for sign in reversed(found):
        fault = _fault_of_sign(sign)
        if fault is None:
            continue
        if _is_own(fault):
            first = (sign.details.get("lines") or [sign.line])[0]
            stops = [s for s in signs if s.kind == "terminated_line" and s.rank == sign.rank]
            after = [first - s.line for s in stops if s.details.get("signal") == 2]
            is_asked = any(0 < lines < _ANSWER_LINES for lines in after)
            is_asked &= fault.type != "BdbQuit"  # pdb had answered the Ctrl-C
            return _interrupted(fault) if is_asked else cause_before(fault, found)
        last = last or fault  # another rank may have printed the cause into the same log
    return last


def _is_own(fault: Fault) -> bool:
    """Whether it tells of the process itself, and does not report the end of another one."""
    # A child that left by itself has printed why.
    is_report = CHILD_LEFT.search(fault.message) or POINTS_ABOVE.search(fault.message)
    is_of_a_worker = fault.type in DISGUISES and fault.kind == "worker"
    # What is cancelled, is because of something else.
    is_cancelled = "CancelledError" in fault.type or fault.message.lower() == "cancelled"
    is_of_agent = fault.type in _LAUNCHERS or fault.qualified.startswith(UNMET)
    is_of_another_end = is_of_agent or fault.type in _OF_WORKERS or is_report or is_of_a_worker
    return not (is_of_another_end or is_cancelled) and fault.kind not in _OF_VICTIMS


def raises_after(sign: Sign, signs: Iterable[Sign]) -> bool:
    """Whether the main thread raised below this line: then the line was not its end."""
    later = (s for s in signs if s.line > sign.line and s.rank == sign.rank)
    raised = (s for s in later if s.kind == "python_exception" and not is_of_another(s))
    return any(fault is not None and _is_own(fault) for fault in map(_fault_of_sign, raised))


def raised_just_before(sign: Sign, signs: Iterable[Sign]) -> bool:
    """Whether it is a crash of a process that an exception had already ended.

    Libraries in C++ crash while they are unloaded: their threads still run.
    """
    if sign.kind not in ("segfault_line", "abort_line"):
        return False
    before = (s for s in signs if s.kind == "python_exception" and s.rank == sign.rank)
    main = (s for s in before if not is_of_another(s) and not was_caught(s))
    near = [s for s in main if 0 < sign.line - s.line < _UNLOAD_LINES]
    return any(fault is not None and _is_own(fault) for fault in map(_fault_of_sign, near))


def _before_the_loss(fault: Fault) -> Fault:
    """The exception during whose handling another rank was lost, as in a barrier of a cleanup."""
    if fault.kind not in _OF_VICTIMS:
        return fault
    for first in filter(None, map(fault_of_line, reversed(fault.chain))):
        if first.type not in _SOCKETS and _is_own(first):
            early, said = fault.is_before_first_step, fault.sentence()
            return replace(first, record=fault.record, is_before_first_step=early, then=said)
    return fault


def cause_before(fault: Fault, signs: Iterable[Sign]) -> Fault:
    """What the main thread raised; or the exception of another thread or process that led to it.

    It did if the main thread then waited in vain, or raised at once.
    """
    found = [sign for sign in signs if sign.kind == "python_exception"]
    main = [sign for sign in found if not is_of_another(sign)]
    own = next((s for s in reversed(main) if _type_of(s) == fault.type), None)
    if own is None:
        return fault
    before = [sign for sign in found if is_of_another(sign) and _leads_to(sign, own)]
    first = _fault_of_sign(before[-1]) if before else None
    if first is None or first.kind in _OF_VICTIMS or first.type in DISGUISES:
        return fault
    return fault.came_of(first)


def _leads_to(other: Sign, main: Sign) -> bool:
    end = (other.details.get("lines") or [other.line])[-1]
    start = (main.details.get("lines") or [main.line])[0]
    lost = waits_in_vain(main) or _LOADER_ENDS.search(str(main.details.get("message"))) is not None
    return end < start and (lost or start - end <= _AT_ONCE_LINES)


def _type_of(sign: Sign) -> str:
    return _text.text(sign.details.get("type")).rpartition(".")[2]


def _fault_of_sign(sign: Sign) -> Fault | None:
    name = _type_of(sign)
    message = _text.text(sign.details.get("message"))
    if not name or name in (*_OF_A_SIGNAL, *_NO_REASON):
        return None
    tail, chain = sign.details.get("frames_tail"), sign.details.get("chain")
    more = {key: value for key, value in sign.details.items() if key in _KEPT}
    is_told = CHILD_LEFT.search(message) and not _OF_A_SCRIPT.search(message)
    if name in _LAUNCHERS and not is_told:
        return None
    found = Fault(
        type=name,
        message=message,
        qualified=_text.text(sign.details.get("type")),
        chain=[t for t in chain if isinstance(t, str)] if isinstance(chain, list) else [],
        place=_place(tail),
        record={"frames": tail, "rank": sign.rank, **more},
        tail=_text.text(sign.details.get("tail")),
        by=next((f"{k} {d[k]}" for k in ("thread", "process") if (d := sign.details).get(k)), ""),
    )
    if "KeyboardInterrupt" in found.chain:
        return _interrupted(found)
    first = fault_of_line(found.chain[0]) if "handled" in more and found.chain else None
    is_graver = first is not None and first.kind in _NOT_HANDLED and first.kind != found.kind
    # What a handler or a `finally` misses, the statement that failed was to set.
    is_missed = name in ("NameError", "UnboundLocalError")
    if first is not None and (is_graver or (is_missed and first.type not in _PROBES)):
        place, said = _place(more["handled"]), found.sentence()  # a save in need failed, too
        return replace(first, place=place, record=found.record, then=said)
    return _before_the_loss(found)


def _interrupted(fault: Fault) -> Fault:
    """What the script raised because of a Ctrl-C."""
    if fault.kind == "interrupt":
        return fault
    said = fault.sentence()
    return replace(fault, type="KeyboardInterrupt", message="", tail="", chain=[], then=said)


def fault_of_line(line: str) -> Fault | None:
    """From the one line of a launcher's summary, or a cause of another exception."""
    match = _TYPE.fullmatch(line.strip()[:2000])
    if match is None or not _NAME.search(match[1]):
        return None
    return Fault(match[1].rpartition(".")[2], (match[2] or "").strip(), qualified=match[1])


def fault_of_how(exit_record: Record) -> Fault | None:
    """From `exit.json`, which has the exception in words."""
    how, status = _text.text(exit_record.get("how")), _text.whole(exit_record.get("status"))
    early = how.startswith("could not start: ")
    match = _TYPE.fullmatch(how.removeprefix("could not start: "))
    if match is None or (status != 1 and not early and match[1] != "SystemExit"):
        return None
    name, message = match[1].rpartition(".")[2], match[2] or ""
    if not _NAME.search(name) and not early:
        return None
    code = (message.strip() or None) if name == "SystemExit" else None
    return Fault(name, message, is_before_first_step=early or None, exit_code=code)


def _place(frames: object) -> str:
    """The innermost frame that is neither Python's nor a library's."""
    found: list[tuple[str, int, str]] = []
    for frame in frames if isinstance(frames, list) else []:
        match frame:
            case [str(file), line, *more]:
                function = f" in {more[0]}" if more and isinstance(more[0], str) else ""
                found.append((file, line, function))
    own = innermost_own(found)
    return "" if own is None else f"{own[0]}:{own[1]}{own[2]}"
