"""Ends that Python or a library reported: an exception, `sys.exit`, or a line of a log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.signals import judge_worker
from holdfast._diagnose.evidence.case import (
    Case,
    Finding,
    Trouble,
    lost_children,
    waited_in_vain,
)
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import last_use, tell_graphs, tell_memory, tell_space
from holdfast._diagnose.texts.exceptions import (
    CHILD_LEFT,
    KINDS,
    POINTS_ABOVE,
    PROCESS_LEFT,
    Fault,
    fault_of_signs,
    kind_of_sign,
)
from holdfast._diagnose.texts.patterns import HARDWARE, read_memory_error
from holdfast._diagnose.texts.python import CUT
from holdfast._diagnose.texts.signs import is_of_another
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_BETTER = ("worker", "shm_full", "disk_full")  # than an exception that names no cause
_SAYING_LITTLE = ("plain", "peer_lost", "timeout", "interrupt")
_INTERNAL = re.compile(r"\binternal error - please report")  # NCCL's: its warnings tell
_VAGUE = re.compile("(?:Internal|Unknown|Aborted|Unavailable|ResourceExhausted|XlaRuntime)Error")
_WANTS_GPU = re.compile(r"(?i)\bgpus?\b|cuda")  # why there is none was printed above it
_NEAR_LINES = 60  # of the end, or the next sign of it: the training may have recovered from others
_OF_A_NETWORK = re.compile(
    "Max retries exceeded|failure in name resolution|couldn't connect to|urlopen error"
)
# A service beside the training, as an inference server: no way to the internet is missing.
_LOCAL_SERVER = re.compile(
    r"(?:host='|://|\b(?:at|to) |\()(localhost|0\.0\.0\.0|\[?::1\]?"
    r"|(?:127|10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})(?:', port=|:)(\d{2,5})\b"
)
_UNREACHED = re.compile(
    r"(?is)^(?!.*proxy).*(?:refused|Max retries|not reachable"
    r"|(?:can't|cannot|could not) (?:be reached|connect|reach)|failed to (?:connect|establish)"
    r"|connection attempts failed)"
)
_MAKERS = (
    (re.compile(r"(?:fault|Exception) by GPU|\bHIP\b|\bhip[A-Z]|\bHSA_|ROCm|amdgpu"), "amd_gpu"),
    (re.compile(r"\bsynStatus|\bHPU\b|\bNPU\b|\bacl\w+"), "accelerator"),
    (re.compile(r"\b(?:UR|ZE)_RESULT_|\bXPU\b"), "intel_gpu"),
)
_UNPICKLES = re.compile(  # the classes of a file
    "torch/serialization|/pickle|find_class|_unpickle|joblib/numpy_pickle"
)
_XIDS_OF_CLEANUP = (43, 45, 154)  # what the driver does after an error
_OF_A_LAYER = re.compile(r"OCI runtime|\[drm:")
_NO_ROOM_IN_NCCL = "Failed to CUDA calloc"
_NO_KEY = re.compile(r"(?m)^Key '\S+' is not in \S+")  # below Hydra's own line
_OF_RAY = re.compile(
    r"Memory on the node \(IP: (?P<ip>[\d.]+)[^)]*\) where the \w+ \((?:[^)]*?\bname=(?P<name>"
    r"[^,)]+))?[^)]*?\bpid=(?P<pid>\d+)[^)]*\) was running was (?P<used>[\d.]+GB) / "
    r"(?P<total>[\d.]+GB)"
)
_LARGEST = re.compile(r"(?m)^PID\s+MEM\(GB\)\s+COMMAND\n.*?(\d+)\t([\d.]+)\t(\S.*)$")
_OF_DEVICE = ("cuda_oom", "cuda_error")
# Not enough memory, or an error before it: of both a library says the same. TensorFlow and JAX
# tell of the memory of a host in the same words.
_SUSPECTED = re.compile(
    r"CU\w+_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|^(?!.*out of memory).*Failed to CUDA calloc"
    r"|^(?!.*(?i:gpu|cuda|hbm|rocm|tpu)).*(?:OOM when allocating|RESOURCE_EXHAUSTED)",
    re.DOTALL,
)
# A line of a job script that was to bring the modules.
_NOT_ACTIVATED = re.compile(
    r"(?m)^(?:\S+: line \d+: |\S+\.sh: \d+: |(?:ba|z)?sh: )"
    r"(?=.*(?:activate|conda|mamba|module|source|spack|venv))"
    r".*(?:No such file or directory|not found)$"
    r"|^.*(?:Could not find conda environment|EnvironmentNameNotFound|Run 'conda init'"
    r"|Unable to locate a modulefile|module\(s\) are unknown).*"
)
_HAD_MET = "failed to send a keep-alive heartbeat to the rendezvous"  # torchrun's agent
_NO_INTERFACE = re.compile(r"\biface (\S+) not found")  # NCCL's
_PORT_TAKEN = re.compile("(?i)address already in use|EADDRINUSE")
_IN_USE = re.compile("already in use by process|busy or unavailable")
_RELATIVE = re.compile("No such file or directory: '(?!/)")
_STATUS_2 = re.compile(r"CalledProcessError.*non-zero exit status 2\b")
_REFUSED = re.compile("(?:^|: )error: |^Error: ")
_USAGE = re.compile(
    r"^(?:usage|Usage): |^Could not override '"  # Hydra's
    r"|^\S+: error: (?:unrecognized arguments|the following arguments|argument |ambiguous option)",
    re.MULTILINE,
)
# Kinds whose sentence is the message with an opening: (cause, opening, advice).
_BY_KIND = {
    "environment": (Cause.ENVIRONMENT, "{opening} cannot run on this machine", "environment"),
    "arguments": (Cause.CONFIGURATION, "{opening} did not take its arguments", "environment"),
    "rendezvous": (Cause.RENDEZVOUS, "{opening} did not find the other ranks", "rendezvous"),
    "cuda_error": (Cause.CUDA_ERROR, "The GPU of {who} reported an error", "cuda_error"),
    "nan": (Cause.BAD_TRAINING, "The training went bad", "nan"),
    "left": (Cause.PEER_LOST, "{opening} trained, and then lost the other ranks", "peer_lost"),
}


def judge_python(case: Case) -> Finding | None:
    """By the exception, or by a line that was printed."""
    trouble = _trouble(case)
    if (found := _usage(case, trouble)) is not None or trouble is None:
        return found
    judges = {"worker": judge_worker, "shm_full": _judge_shm}
    judges |= {"disk_full": _judge_disk, "cuda_oom": _judge_cuda_oom}
    if trouble.kind in judges:
        return judges[trouble.kind](case, trouble)
    fault, said = trouble.fault, trouble.said
    # Without an exception or a status it is a line of a log, which may be about anything.
    sure = Sure.CERTAIN if fault is not None else Sure.LIKELY
    evidence = trouble.evidence(case)
    last = case.end.has("environment") if fault is None else None
    if last is not None and trouble.kind == "environment" and last is not trouble.sign:
        evidence.append(f"it printed: {_text.one_line(last.text, 240)}")
    if (found := _local_server(case, trouble, evidence)) is not None:
        return found
    is_network = fault is not None and _OF_A_NETWORK.search(fault.message)
    if fault is not None and is_network and fault.record.get("is_late"):
        return _plain(case, fault, evidence)  # it has run on this machine
    if trouble.kind in _BY_KIND:
        is_late = trouble.record.get("is_late") or _HAD_MET in case.evidence.output
        has_met = trouble.kind == "rendezvous" and is_late
        cause, opening, name = _BY_KIND["left" if has_met else trouble.kind]
        by_a_line = trouble.kind in ("environment", "rendezvous")
        is_inferred = by_a_line and fault is not None and fault.kind != trouble.kind
        if trouble.kind == "nan" or has_met or is_inferred:
            sure = Sure.LIKELY
        elif trouble.kind == "cuda_error":
            told = _text.text(trouble.details.get("what")) if fault is None else ""
            said, sure = _text.one_line(told or said, 160), _how_sure(case, trouble)
        if fault is not None and _text.one_line(fault.told, 60)[:59] not in said:
            said = f"{said.rstrip('.…')}… {_text.one_line(fault.told, 160)}"
        if _PORT_TAKEN.search(said):
            opening, name = "{opening} could not listen at its port", "in_use"
        elif _IN_USE.search(said):
            name = "in_use"
        elif trouble.kind == "cuda_error" and (own := _advice_of_gpu(case, trouble)):
            name = own
        elif fault is not None and fault.type == "ModuleNotFoundError":
            frames = fault.record.get("frames")
            name = "shadowed" if said.endswith("is not a package") else "module"
            name = "pickled" if _UNPICKLES.search(str(frames)) else name
            if failed := _NOT_ACTIVATED.search(case.evidence.output):
                line = _text.one_line(failed[0], 160)
                said = f"{said}; its environment was not activated: {line}"
        elif missing := trouble.kind == "rendezvous" and _NO_INTERFACE.search(case.evidence.output):
            said = f"{said}; this host has no network interface {missing[1]}"
        elif trouble.kind == "nan" and (since := trouble.details.get("since_line")):
            columns = trouble.details.get("columns")
            named = f", in the columns {', '.join(columns)}" if columns else ""
            evidence.append(f"the first such line is line {since}{named}")
            if fault is not None:
                said = f"from line {since} on its figures were not numbers, then {said}"
        if trouble.kind == "arguments" and (key := _NO_KEY.search(case.evidence.output)):
            said = said if key[0] in said else f"{said.rstrip('.')}: {key[0]}"
        if trouble.kind == "cuda_error":
            opening = opening.replace("GPU", _device_of(case, trouble))
        said = said.removeprefix("what(): ")
        sentence = f"{opening.format(opening=case.opening, who=case.who)}: {said}."
        return Finding(cause, sentence, sure, evidence, advice.advise(case, name))
    use = last_use(case.end.memory)
    if trouble.kind == "host_oom":
        sentence = f"The machine ran out of memory, and what watches it ended {case.who}: {said}."
        if fault is not None and (more := fault.tail or fault.message.partition("\n")[2]):
            evidence.append(f"it said: {_text.one_line(more, 240)}")
        if monitor := _OF_RAY.search(case.evidence.output):
            sentence = (
                f"The machine {monitor['ip']} ran out of memory ({monitor['used']} of "
                f"{monitor['total']} in use), and Ray's memory monitor ended "
                f"{monitor['name'] or 'a worker'} (pid {monitor['pid']})."
            )
            if row := _LARGEST.search(case.evidence.output, monitor.end()):
                evidence.append(f"the largest process: pid {row[1]} with {row[2]} GB: {row[3]}")
        lines = advice.host_memory(case, use, is_machine=True)
        return Finding(Cause.OOM_MACHINE, sentence, Sure.LIKELY, evidence, lines)
    if trouble.kind == "cpu_oom" and fault is None:
        sentence = f"{case.opening} got no more memory: {said}."
        evidence += tell_space(use)
        lines = advice.host_memory(case, use, is_machine=True)
        return Finding(Cause.PYTHON_EXCEPTION, sentence, sure, evidence, lines)
    if fault is None or trouble.kind == "interrupt":
        return None
    if fault.type == "BdbQuit":
        return _breakpoint(case, fault, evidence)
    return _exit(case, fault) if fault.is_exit else _plain(case, fault, evidence)


def _advice_of_gpu(case: Case, trouble: Trouble) -> str:
    makers = (name for shape, name in _MAKERS if shape.search(trouble.message))
    if (maker := next(makers, "")) or HARDWARE.search(trouble.message):
        return maker or "gpu_broken"
    return "cuda_assert" if case.sign("cuda_assert") is not None else ""


def _local_server(case: Case, trouble: Trouble, evidence: list[str]) -> Finding | None:
    """A server on this machine or beside it did not answer; it may have died in the same log."""
    fault = trouble.fault
    if fault is None or trouble.kind not in ("plain", "environment"):
        return None
    address = _LOCAL_SERVER.search(trouble.message)
    if address is None or not _UNREACHED.search(trouble.message):
        return None
    sentence = f"{case.who} could not reach the server at {address[1]}:{address[2]}"
    is_same = {id(s): str(s.details.get("type")).endswith(fault.type) for s in case.evidence.signs}
    line = max((s.line for s in case.end.signs if is_same.get(id(s))), default=0)
    above = [s for s in case.evidence.signs if s.line < line and not is_same[id(s)]]
    first = fault_of_signs([s for s in above if s.rank != case.end.rank or is_of_another(s)])
    said = f"{sentence[:1].upper()}{sentence[1:]}: it was not up, or had ended."
    if first is not None:
        at = f" at {first.place}" if first.place else ""
        evidence.append(f"above it, another process had raised {first.sentence(400)}{at}")
        said = f"Another process raised {first.sentence()}; then {sentence}."
    return Finding(Cause.PYTHON_EXCEPTION, said, Sure.LIKELY, evidence)


def _how_sure(case: Case, trouble: Trouble) -> Sure:
    """A line of a log may be about anything; an exception, or a line before a failure, is not."""
    is_only_a_line = trouble.fault is None and case.end.status is None
    is_told = trouble.kind not in _OF_DEVICE or case.sign("cuda_assert") is not None
    is_told = is_told or not _SUSPECTED.search(trouble.message)
    return Sure.LIKELY if is_only_a_line or not is_told else Sure.CERTAIN


def _breakpoint(case: Case, fault: Fault, evidence: list[str]) -> Finding:
    """pdb has ended the process: q was typed, or there was no terminal to type at."""
    at = f", at {fault.place}" if fault.place else ""
    is_worker = "in DataLoader worker" in fault.message
    why = "pdb was left there with q, or there was no terminal to answer at"
    none = "a worker of a data loader has no terminal, so pdb got no answer there"
    why = none if is_worker else why
    instead = "debug with num_workers=0 at a terminal" if is_worker else "start it at a terminal"
    sentence = f"{case.opening} ended at a breakpoint (breakpoint() or pdb){at}: {why}."
    if fault.message.startswith("Waiting"):
        sentence = f"{case.opening} waited for a debugger: {fault.message}."
    lines = [f"Take the breakpoint out, or {instead}.", *advice.go_on(case)]
    return Finding(Cause.DEBUGGER, sentence, Sure.CERTAIN, evidence, lines)


def _trouble(case: Case) -> Trouble | None:
    fault = case.end.fault
    begun = _where_the_end_begins(case)
    signs = [sign for sign in case.end.signs if sign.kind in KINDS and sign.from_end <= begun]
    if fault is not None:
        better = [sign for sign in signs if _says_more(sign, fault)]
        if fault.kind == "cuda_error" and (driver := [s for s in signs if "xid" in s.details]):
            own = [sign for sign in driver if sign.details["xid"] not in _XIDS_OF_CLEANUP]
            return Trouble(fault.kind, fault.sentence(), fault, (own or driver)[-1])
        asserted = [sign for sign in signs if sign.kind == "cuda_assert"]
        if asserted and fault.kind in ("cuda_oom", "cuda_error"):
            # The device does nothing more after it: any later call fails, in words of its own.
            failed = asserted[0].details.get("assertion")
            said = f"{fault.sentence()}, after its kernel's assertion `{failed}` failed"
            return Trouble("cuda_error", said, fault, asserted[-1])
        is_vague = _VAGUE.fullmatch(fault.type) and not fault.is_of_host
        vague = (*_SAYING_LITTLE, "cpu_oom") if is_vague else _SAYING_LITTLE
        if fault.kind in vague and better and not fault.is_configuration:
            kind, said = kind_of_sign(better[-1]), _text.one_line(better[-1].text, 200)
            if fault.kind == "interrupt":  # a library interrupted its own process
                return Trouble(kind, said, None, better[-1])
            return Trouble(kind, fault.sentence(), fault, better[-1])
        bad = [sign for sign in signs if sign.kind == "nan_loss"]
        if bad and fault.kind in ("plain", "nan") and not fault.is_configuration:
            return Trouble("nan", fault.sentence(), fault, bad[-1])
        # Of what a machine lacks, a library says more above the exception.
        # A tool that it had called labels no lines.
        tools = [s for s in case.evidence.signs if s.rank is None and s.from_end <= begun]
        near = signs if case.end.rank is None else [*signs, *tools]
        near = [s for s in near if s.kind in KINDS and kind_of_sign(s) == fault.kind]
        above = [s for s in near if fault.type not in s.text]
        below = [s for s in near if s.text in fault.tail]
        lacks = fault.kind in ("environment", "rendezvous") or _NO_ROOM_IN_NCCL in fault.message
        below += above if lacks else []
        below.sort(key=lambda sign: "out of memory" not in sign.text)
        return Trouble(fault.kind, fault.sentence(), fault, next(iter(below), None))
    if case.end.status in (0, None) and case.evidence.kind == "run":
        return None  # the printed lines are not why it ended
    if signs:
        order = list(KINDS)  # the gravest first
        # Of lines that tell the same, the one with a pid names the process. One that only tells
        # that a process or a peer was lost comes last: another line may say why.
        # A container's runtime, or the driver's user, names the reason below the first report.
        signs = sorted(
            signs,
            key=lambda each: ("pid" not in each.details, _OF_A_LAYER.search(each.text) is not None),
        )
        telling = [s for s in signs if kind_of_sign(s) not in ("worker", *_SAYING_LITTLE)]
        telling += [s for s in signs if {"exitcode", "signal_name"} & s.details.keys()]
        sign = min(telling or signs, key=lambda each: order.index(each.kind))
        return Trouble(kind_of_sign(sign), _text.one_line(sign.text, 200), None, sign)
    return None


def _where_the_end_begins(case: Case) -> int:
    """How many lines before the end of the log its last signs begin, with few lines in between.

    The other ranks and the launcher print what they then saw below the cause.
    """
    begun = 0
    for sign in sorted(case.evidence.signs, key=lambda each: each.from_end):
        if sign.from_end - begun >= _NEAR_LINES:
            break
        first = (sign.details.get("lines") or [sign.line])[0]
        begun = max(begun, sign.from_end + max(0, sign.line - first))
    return begun


def _says_more(sign: Sign, fault: Fault) -> bool:
    """Whether a printed line says more of the cause than the exception."""
    if fault.kind == "interrupt":
        return "threads" in sign.details  # OpenBLAS interrupts its own process then
    if POINTS_ABOVE.search(fault.message) is not None:
        return True
    # Why a compiler, say, has failed, was printed above it.
    lacks_more = _WANTS_GPU.search(fault.message) or CHILD_LEFT.search(fault.message)
    if sign.kind == "environment" and lacks_more is not None:
        return True
    is_vague = _VAGUE.fullmatch(fault.type) is not None
    if is_vague and KINDS[sign.kind] in ("cuda_error", "cuda_oom", "rendezvous"):
        return True
    if sign.kind == "rendezvous" and _INTERNAL.search(fault.message) is not None:
        return True
    # A worker that left by itself has printed the exception that ended it.
    has_told = sign.details.get("exitcode") or sign.details.get("points_above") or fault.by
    return KINDS[sign.kind] in _BETTER and not has_told


def _plain(case: Case, fault: Fault, evidence: list[str]) -> Finding:
    """An exception that means what it says."""
    step, said = case.end.step, fault.sentence()
    if fault.is_configuration:
        how = f"went on at step {step}, and made no new step" if step else ""
        how = how or "did not get to its first step"
        how = "cannot run like this" if fault.is_before_first_step is None else how
        # The second line of an error of holdfast is the remedy.
        lines = [*fault.message.splitlines()[1:2], advice.ONCE_RIGHT]
        lines = lines if fault.is_own else lines[-1:]
        sentence = f"{case.opening} {how}: {said}."
        return Finding(Cause.CONFIGURATION, sentence, Sure.CERTAIN, evidence, lines)
    is_file = fault.place and not fault.place.startswith("<string>")
    lines = [f"Look at {fault.place}."] if is_file else []
    if fault.message == CUT:
        at = f", at {fault.place}" if fault.place else ""
        sentence = f"The log ends inside a traceback of {case.who}{at}: its exception is missing."
        lines += advice.go_on(case)
        return Finding(Cause.PYTHON_EXCEPTION, sentence, Sure.LIKELY, evidence[1:], lines)
    sentence = f"{case.opening} {fault.verb} {said}."
    if case.finished_step is not None:
        evidence.append(f"the training itself had finished, at step {case.finished_step}")
    elif step is not None:
        sentence = f"{case.opening} raised {said} (in step {step + 1})."
    sure = Sure.LIKELY if PROCESS_LEFT.search(fault.message) else Sure.CERTAIN
    if waited_in_vain(fault) and (lost := lost_children(fault)):
        told = ", ".join(f"pid {pid}: status {status}" for pid, status in lost[:4])
        sentence = f"{sentence[:-1]}; a child process of it had failed before ({told})."
        sure = Sure.LIKELY
        lines.append("See what that child printed: it is the cause, most likely.")
    if fault.kind == "files_limit":
        lines.append(
            "Allow more open files: ulimit -n 65536; or share them by another way: "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    cwd = _text.text(_text.record(case.evidence.led).get("cwd"))
    if cwd and fault.type == "FileNotFoundError" and _RELATIVE.search(fault.message):
        lines.append(f"That path is relative; the command was started in {_text.one_line(cwd)}.")
    if fault.kind == "cpu_oom":
        evidence += ["that is the memory of the host (cpu:0), not of a GPU"] * fault.is_of_host
        use = last_use(case.end.memory)
        evidence += [*tell_space(use), *tell_memory(case.end.memory, case.end.time)]
        if use.space_limit is not None:
            sentence = f"{sentence[:-1]}: it may use {_text.size(use.space_limit)} (ulimit -v)."
            lines.append("Raise that limit where it is set: ulimit -v unlimited")
            lines += [*advice.less_memory(case, use), *advice.go_on(case)]
        else:
            lines += advice.host_memory(case, use, is_machine=True)
    else:
        lines += advice.go_on(case)
    return Finding(Cause.PYTHON_EXCEPTION, sentence, sure, evidence, lines)


def _exit(case: Case, fault: Fault) -> Finding:
    """`sys.exit` with something that is not 0."""
    code = fault.exit_code or fault.message or "?"
    evidence, status = [f"it called sys.exit({_text.one_line(code, 200)})"], _status_of(code)
    if status is not None and str(status) != code:
        evidence.append(f"its parent sees that as status {status}")
    evidence += [f"at {fault.place}"] if fault.place else []
    if fault.is_before_first_step and (code == "2" or not code.lstrip("-").isdigit()):
        sentence = f"{case.opening} left before its first step, with sys.exit({code[:120]})."
        usage = ": its usage." if _USAGE.search(case.evidence.output) else "."
        if code == "2":
            evidence.append("2 is what argparse leaves with when it does not like an argument")
        lines = [f"See what it printed last{usage}", advice.ONCE_RIGHT]
        return Finding(Cause.CONFIGURATION, sentence, Sure.LIKELY, evidence, lines)
    because = f" after {_text.one_line(fault.chain[0], 200)}" if fault.chain else ""
    sentence = f"{case.opening} left by itself, with sys.exit({code[:120]}){because}."
    return Finding(Cause.PYTHON_EXCEPTION, sentence, Sure.CERTAIN, evidence, advice.go_on(case))


def _status_of(code: str) -> int | None:
    """The status that a parent sees of such a `sys.exit`."""
    try:
        return int(code) % 256 if len(code) < 18 else None
    except ValueError:
        return 1


def _usage(case: Case, trouble: Trouble | None) -> Finding | None:
    """Status 2 and a usage: argparse, or click. In a log: a usage with an error below it.

    Hydra prints no usage, and leaves with status 1.
    """
    output = case.evidence.output
    found = _USAGE.search(output, max(0, len(output) - 4000))
    if found is None:
        return None
    lines = [line for line in output[found.start() :].splitlines() if line.strip()]
    of_hydra = lines[0] if found[0].startswith("Could not") else None
    errors = (i for i, line in enumerate(lines) if _REFUSED.search(line))
    first = next(errors, None)
    refused = of_hydra or (None if first is None else lines[first])
    if refused and refused.endswith(":") and first is not None:  # jsonargparse explains below it
        below = [line.strip(" -") for line in lines[first + 1 :] if line.startswith(" ")]
        why = next((line for line in below if "xpected" in line), next(iter(below), ""))
        refused = f"{refused} {why}".strip()
    has_left = trouble is None and case.end.status == 2 and of_hydra is None
    # A launcher then raises an exception of its own.
    is_reported = trouble is None or _STATUS_2.search(trouble.said) or CUT in trouble.said
    if not has_left and (refused is None or case.evidence.kind != "log" or not is_reported):
        return None
    sentence = f"{case.opening} did not take its arguments: {_text.one_line(refused or lines[-1])}."
    told = [f"it printed: {_text.one_line(refused or lines[0])}"]
    if has_left:
        told.insert(0, "it left with status 2, as argparse does")
    sure = Sure.CERTAIN if has_left else Sure.LIKELY
    return Finding(Cause.CONFIGURATION, sentence, sure, told, [advice.ONCE_RIGHT])


# -- The memory of a GPU ---------------------------------------------------------------------------

_OTHERS_USE = re.compile(r"\bProcess \d+ has [\d.]+ ?[KMGT]iB\b")
_FRAGMENTED = 0.15  # of all memory, reserved and not used
_LITTLE = 0.03
_FIGURES = ("tried", "total", "free", "allocated", "reserved_unallocated", "needed")
# The device, by its name in the message.
_DEVICES = (
    ("TPU", r"\bTPU|\bhbm\b|\bTensorCore|Core halted"),
    ("NPU", r"\bNPU"),
    ("XPU", r"\bXPU"),
    ("HPU", r"\bHPU"),
)
_OF_XLA = re.compile("Exception in device=(TPU)")


def _judge_cuda_oom(case: Case, trouble: Trouble) -> Finding:
    noted = _text.record(trouble.record.get("gpu"))
    figures = _figures(trouble, noted)
    tried, total, free, allocated, idle, needed = map(figures.get, _FIGURES)
    evidence = trouble.evidence(case)
    has = f"it had {_text.size_of(allocated, total)} allocated" if allocated and total else ""
    unused = "" if idle is None else f"{_text.size(idle)} were reserved and not in use"
    left = "" if free is None else f"{_text.size(free)} were free"
    evidence += filter(None, [", ".join(filter(None, (has, unused, left)))])
    if shape := _text.text(read_memory_error(trouble.message).get("shape")):
        evidence.append(f"it asked for a tensor of shape {shape}")
    evidence += [f"{each} of that GPU" for each in _OTHERS_USE.findall(trouble.message)[:4]]
    evidence += _largest(noted)
    is_much = idle and (not total or idle > _LITTLE * total)
    is_enough = (tried and (idle or 0) >= tried) or (total and (idle or 0) > _FRAGMENTED * total)
    is_fragmented = bool(is_much and is_enough)
    if is_fragmented:
        evidence.append("so there was room, but in pieces: fragmentation")
    graphs = tell_graphs(_text.records(trouble.record.get("graphs")))
    evidence += graphs
    device = _text.whole(noted.get("device"))
    which = f" {device}" if device is not None else ""
    asked = f": {_text.size(tried)} more did not fit" if tried else ""
    of = f" into its {_text.size(total)}" if total and tried else ""
    if needed and total:
        asked = f": it needs {_text.size(needed)}, and there are {_text.size(total)}"
    if _NO_ROOM_IN_NCCL in trouble.message:
        asked = ": NCCL got none for its buffers"
    what = _device_of(case, trouble)
    sentence = f"{case.opening} ran out of memory of its {what}{which}{asked}{of}."
    lines = advice.cuda_memory(case, is_fragmented=is_fragmented, keeps_graphs=bool(graphs))
    return Finding(Cause.CUDA_OOM, sentence, _how_sure(case, trouble), evidence, lines)


def _device_of(case: Case, trouble: Trouble) -> str:
    told = f"{trouble.message} {''.join(_OF_XLA.findall(case.evidence.output)[-1:])}"
    return next((name for name, shape in _DEVICES if re.search(shape, told)), "GPU")


def _figures(trouble: Trouble, noted: Record) -> dict[str, int]:
    """In bytes: as the trainer noted them, else as the message has them."""
    found: dict[str, int] = {}
    for source in (read_memory_error(trouble.message), trouble.details, noted):
        sizes = {key: _text.whole(source.get(key)) for key in _FIGURES}
        found |= {key: size for key, size in sizes.items() if size is not None and size >= 0}
    names = ("cached_free", "allocated", "reserved")
    cached, allocated, reserved = (_text.whole(noted.get(name)) for name in names)
    if cached is not None and cached >= 0:
        found["reserved_unallocated"] = cached
    elif allocated is not None and reserved is not None and reserved >= allocated:
        found["reserved_unallocated"] = reserved - allocated
    return found


def _largest(noted: Record) -> list[str]:
    told = []
    for each in _text.records(noted.get("largest"))[:5]:
        size, number, shape = _text.whole(each.get("bytes")), each.get("count"), each.get("shape")
        shown = "×".join(map(str, shape[:8])) if isinstance(shape, list) else ""
        name = _text.one_line(str(each.get("name") or "without a name"), 60)
        times = f"{number} of " if (_text.whole(number) or 1) > 1 else ""
        kind = _text.one_line(str(each.get("dtype") or ""), 20).removeprefix("torch.")
        if size is not None and size >= 0:
            told.append(f"{times}{name} {shown} {kind}".strip() + f": {_text.size(size)}")
    return [f"the largest tensors: {'; '.join(told)}"] if told else []


# -- No room: in /dev/shm, or on a disk, which `torch.save` does not report ------------------------

_FULL_BYTES = 64 << 20
_FULL_SHARE = 0.01
_GUESS = "It is possible that"  # torch's, after any bus error of a worker
_ROOM = 0.9  # of /dev/shm
_MUCH_BYTES = 1 << 30  # a smaller /dev/shm is full with a few batches
_NO_ROOM_IS_LEFT = re.compile(
    r"(?i)No space left|disk (?:is full|space)|not enough space|quota exceeded|Errno (?:28|122)\b"
)
_SAVING = re.compile(
    r"(?im)^.*\b(?:sav(?:e|ing)|writ(?:e|ing)|dump(?:ing)?|export(?:ing)?|stor(?:e|ing)|checkpointing)\b"
    r".{0,160}?\b(?:to|in|into|at|as|under)\b:? ['\"]?(?P<path>[\w.~@{}=+-]*/[^\s'\"<>|]+).*$"
)
# What a library keeps below the home folder, by its frames, and what moves it.
_CACHES = {
    "triton/runtime/cache": "Triton's cache, ~/.triton: TRITON_CACHE_DIR moves it",
    "torch/_inductor/codecache": "Inductor's cache, in /tmp: TORCHINDUCTOR_CACHE_DIR moves it",
    "torch/utils/cpp_extension": "torch's extensions, ~/.cache: TORCH_EXTENSIONS_DIR moves them",
    "huggingface_hub/file_download": "the cache of huggingface, ~/.cache: HF_HOME moves it",
    "torch/hub.py": "torch's hub, ~/.cache: TORCH_HOME moves it",
}
_PATH = re.compile(r"['\u2018]([^'\u2019\n]{0,300}/[^'\u2019\n]{0,300})['\u2019]")


def _judge_shm(case: Case, trouble: Trouble) -> Finding:
    use, said = last_use(case.end.memory), trouble.message
    noted = _text.record(trouble.record.get("shm"))
    free, total = _text.whole(noted.get("free")), _text.whole(noted.get("total"))
    evidence = trouble.evidence(case)
    size = f" (it has {_text.size(total)})" if total else ""
    if free is not None and total:
        evidence.append(f"/dev/shm had {_text.size_of(free, total)} free then")
    if use.shm_free is not None:
        used = f", {_text.size(use.shm)} were in use" if use.shm is not None else ""
        evidence.append(f"in the last sample it had {_text.size(use.shm_free)} free{used}")
    evidence.append("the room is free again once the process is gone, so df shows nothing now")
    if free and total and free > _ROOM * total and total > _MUCH_BYTES and _GUESS in said:
        why = "/dev/shm has room: a file that it had mapped was cut short, most likely"
        sentence = f"A data-loader worker died of a bus error, and {case.who} with it. {why}."
        lines = advice.advise(case, "worker_died")
        return Finding(Cause.WORKER_DIED, sentence, Sure.LIKELY, evidence, lines)
    sentence = f"/dev/shm was full{size}, and {case.who} got no room there."
    return Finding(Cause.SHM_FULL, sentence, Sure.LIKELY, evidence, advice.advise(case, "shm_full"))


def _judge_disk(case: Case, trouble: Trouble) -> Finding:
    """A disk, a quota or the inodes are used up."""
    said = trouble.message
    disks = _text.records(trouble.record.get("disks"))
    full = [disk for disk in disks if _is_full(disk)]
    now = [disk for disk in case.evidence.disks if _is_full(disk)] if not disks else []
    evidence = [*trouble.evidence(case), *map(_tell, full or disks[:3])]
    evidence += [f"on this machine, {_tell(disk, 'has')} now" for disk in now[:3]]
    is_told = _NO_ROOM_IS_LEFT.search(said)
    is_of_pod = re.search("ephemeral|EmptyDir|DiskPressure", said) is not None
    is_quota = "quota" in said.lower() or "Errno 122" in said
    named = _PATH.findall(said)  # of a copy the last: it is what was written
    named += [_text.text(trouble.details["path"])] if "path" in trouble.details else []
    if case.evidence.kind == "led" and not named and len(now) == 1:  # a log may be from elsewhere
        full = full or now
    path = _text.text(full[0].get("path")) if full else (named[-1] if named else "")
    if not path and not is_of_pod and (saving := _saving(case.evidence.output, trouble.said)):
        path = saving[1]
        evidence.append(f"it had printed before: {_text.one_line(saving[0], 240)}")
    frames = str(trouble.record.get("frames"))
    cache = next((each for part, each in _CACHES.items() if part in frames), "")
    path = path or cache
    where = f" ({path})" if path else ""
    sure = Sure.LIKELY
    if is_told:
        what = "A quota" if is_quota else "A disk"
        sentence = f"{what} was full{where}, and {case.who} could not write."
        if "disk space" in trouble.said:
            sentence = f"A disk has too little room for {case.who}: {trouble.said}."
        sure = _how_sure(case, trouble)
    elif is_of_pod:
        sentence = f"Kubernetes ended {case.who} for its use of the disk: {trouble.said}."
    elif full:
        sentence = f"A disk was full{where}: what {case.who} wrote was cut short."
    else:
        why = "as on a full disk or beyond a quota"
        sentence = f"A file that {case.who} wrote was cut short, {why}."
        unknown = "torch.save does not report a full disk, and the free room was not recorded"
        room = "there is room on the disks now: it may have been freed, or be another one"
        evidence += [] if now else [room if disks else unknown]
    where = path if path and path != cache else "the folder that it wrote to"
    lines = advice.advise(case, "quota" if is_quota else "disk_full", where=where)
    lines = [line for line in lines if path != cache or not cache or "checkpoints" not in line]
    return Finding(Cause.DISK_FULL, sentence, sure, evidence, lines)


def _saving(output: str, said: str) -> tuple[str, str] | None:
    """The last line before an error that tells what is being written, and where."""
    before = output.rpartition((said.partition(": ")[2] or said)[:40])[0] or output
    found = list(_SAVING.finditer(before))
    return (found[-1][0].strip(), found[-1]["path"].rstrip(".,:;)…")) if found else None


def _is_full(disk: Record) -> bool:
    free, total = _text.whole(disk.get("free")), _text.whole(disk.get("total"))
    if _text.whole(disk.get("free_inodes")) == 0:
        return bool(total)
    little = min(_FULL_BYTES, _FULL_SHARE * total if total else _FULL_BYTES)
    return free is not None and (free < little or free == 0)


def _tell(disk: Record, had: str = "had") -> str:
    free, total = _text.whole(disk.get("free")), _text.whole(disk.get("total"))
    path = _text.one_line(str(disk.get("path")), 120)
    room = f"{_text.size_of(free, total)} free" if free is not None and total else "room unknown"
    inodes = _text.whole(disk.get("free_inodes"))
    return f"{path} {had} {room}" + (", and no inode left" if inodes == 0 and total else "")
