"""Ends that Python told of: an exception, `sys.exit`, or lines that mean as much."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.gpu import judge_cuda_error, judge_cuda_oom
from holdfast._diagnose.deaths.memory import judge_disk, judge_shm
from holdfast._diagnose.deaths.worker import judge_worker
from holdfast._diagnose.evidence.case import Case, Finding, Trouble
from holdfast._diagnose.evidence.memory import last_use, tell_memory, tell_space
from holdfast._diagnose.texts.exceptions import KINDS, Fault, kind_of_sign
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_BETTER = ("worker", "shm_full", "disk_full")  # than an exception that says nothing
_POINTS = re.compile("errors? above|see above|logs? above")  # it says nothing, but where to look
_SAYING_LITTLE = ("plain", "peer_lost", "timeout", "interrupt")
_VAGUE = ("InternalError", "UnknownError", "AbortedError", "UnavailableError", "XlaRuntimeError")
_WANTS_GPU = re.compile(r"\bGPUs?\b|(?i:cuda)")  # why there is none stands above it
_NEAR_LINES = 60  # of the end of a log: what is further up may have been got over
_USAGE = re.compile(r"^(?:usage|Usage): ", re.MULTILINE)


def judge_python(case: Case) -> Finding | None:
    """By the exception, or by what it printed."""
    trouble = _trouble(case)
    if trouble is None:
        return _usage(case)
    judges = {
        "worker": judge_worker,
        "shm_full": judge_shm,
        "disk_full": judge_disk,
        "cuda_oom": judge_cuda_oom,
        "cuda_error": judge_cuda_error,
    }
    if trouble.kind in judges:
        return judges[trouble.kind](case, trouble)
    fault, said = trouble.fault, trouble.said
    sure = Sure.CERTAIN if fault is not None else Sure.LIKELY  # a line may have been got over
    evidence = trouble.evidence(case)
    if trouble.kind == "environment":
        sentence = f"{case.opening} cannot run on this machine: {said}."
        return Finding(Cause.ENVIRONMENT, sentence, sure, evidence, list(_ONCE_RIGHT))
    if trouble.kind == "rendezvous":
        sentence = f"{case.opening} did not find the other ranks: {said}."
        return Finding(Cause.RENDEZVOUS, sentence, sure, evidence, advice.rendezvous(case))
    if trouble.kind == "host_oom":
        sentence = f"The machine ran out of memory, and what watches it ended {case.who}: {said}."
        use = last_use(case.end.memory)
        said_next = advice.host_memory(case, use, is_machine=True)
        return Finding(Cause.OOM_MACHINE, sentence, Sure.LIKELY, evidence, said_next)
    if trouble.kind == "nan":
        sentence = f"The training went bad: {said}."
        return Finding(
            Cause.BAD_TRAINING,
            sentence,
            Sure.LIKELY,
            evidence,
            [
                "Started again it would do the same: lower the learning rate, clip gradients, look "
                "at the data of the last steps; torch.autograd.set_detect_anomaly(True) names the "
                "operation. Earlier checkpoints: holdfast ls RUN"
            ],
        )
    if trouble.kind == "cpu_oom" and fault is None:
        sentence = f"{case.opening} got no more memory: {said}."
        use = last_use(case.end.memory)
        evidence += tell_space(use)
        advised = advice.host_memory(case, use, is_machine=True)
        return Finding(Cause.PYTHON_EXCEPTION, sentence, sure, evidence, advised)
    if fault is None or trouble.kind == "interrupt":
        return None
    if fault.type == "BdbQuit":
        return _breakpoint(case, fault, evidence)
    return _exit(case, fault) if fault.is_exit else _plain(case, fault, evidence)


def _breakpoint(case: Case, fault: Fault, evidence: list[str]) -> Finding:
    """pdb has ended the process: q was typed, or there was no terminal to type at."""
    at = f", at {fault.place}" if fault.place else ""
    said = "Take the breakpoint out"
    if "in DataLoader worker" in fault.message:
        why = "a worker of a data loader has no terminal, so pdb got no answer there"
        said += ", or debug with num_workers=0 at a terminal"
    else:
        why = "pdb was left there with q, or there was no terminal to answer at"
        said += ", or start it at a terminal"
    sentence = f"{case.opening} ended at a breakpoint (breakpoint() or pdb){at}: {why}."
    return Finding(
        Cause.DEBUGGER, sentence, Sure.CERTAIN, evidence, [f"{said}.", *advice.go_on(case)]
    )


def _trouble(case: Case) -> Trouble | None:
    fault = case.end.fault
    kind = fault.kind if fault is not None else ""
    signs = [
        sign
        for sign in case.end.signs
        if sign.kind in KINDS and (_text.whole(sign.details.get("from_end")) or 0) < _NEAR_LINES
    ]
    if fault is not None:
        better = [sign for sign in signs if _says_more(sign, fault)]
        if kind in _SAYING_LITTLE and better and not fault.is_own:
            return Trouble(kind_of_sign(better[-1]), fault.sentence(), fault, better[-1])
        return Trouble(kind, fault.sentence(), fault, None)
    if case.end.status in (0, None) and case.evidence.kind == "run":
        return None  # whatever was printed: it was not why it ended
    if signs:
        # Of several the gravest, which is the first of the table.
        order = list(KINDS)
        sign = min(signs, key=lambda each: order.index(each.kind))
        return Trouble(kind_of_sign(sign), _text.one_line(sign.text, 200), None, sign)
    return None


def _says_more(sign: Sign, fault: Fault) -> bool:
    """Whether a line that was printed says more of the cause than what was raised."""
    what = sign.details.get("what")
    if fault.kind == "interrupt":
        return what == "threads"  # OpenBLAS interrupts its own process then
    if _POINTS.search(fault.message) is not None:
        return True
    if sign.kind == "environment" and _WANTS_GPU.search(fault.message) is not None:
        return True
    if KINDS[sign.kind] in ("cuda_error", "cuda_oom") and fault.type in _VAGUE:
        return True
    # A worker that left by itself has printed why: that is what was raised.
    has_told = sign.details.get("exitcode") or sign.details.get("points_above")
    return KINDS[sign.kind] in _BETTER and not has_told


def _plain(case: Case, fault: Fault, evidence: list[str]) -> Finding:
    """An exception that means what it says."""
    step = case.end.step
    if fault.is_configuration:
        sentence = f"{case.opening} did not get to its first step: {fault.sentence()}."
        if fault.is_before_first_step is None:
            sentence = f"{case.opening} cannot run like this: {fault.sentence()}."
        elif step:
            sentence = (
                f"{case.opening} made no step after it had gone on at step {step}: "
                f"{fault.sentence()}."
            )
        said = ["It happens again at every start: put that right first, then start it again."]
        if fault.type == "ModuleNotFoundError":
            said.insert(0, "Install it in the environment that starts the job: python -m pip list")
        return Finding(Cause.CONFIGURATION, sentence, Sure.CERTAIN, evidence, said)
    sentence = f"{case.opening} raised {fault.sentence()}."
    if step is not None and case.finished_step is None:
        sentence = f"{case.opening} raised {fault.sentence()} (in step {step + 1})."
    if case.finished_step is not None:
        evidence.append(f"the training itself had finished, at step {case.finished_step}")
    said = []
    if fault.place:
        said.append(f"Look at {fault.place}.")
    if fault.kind == "files_limit":
        said.append(
            "Allow more open files: ulimit -n 65536; or share them by another way: "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    if fault.kind == "cpu_oom":
        use = last_use(case.end.memory)
        evidence += [*tell_space(use), *tell_memory(case.end.memory, case.end.time)]
        if use.space_limit is not None:
            sentence = f"{sentence[:-1]}: it may use {_text.size(use.space_limit)} (ulimit -v)."
            said.append("Raise that limit where it is set: ulimit -v unlimited")
        said += advice.host_memory(case, use, is_machine=True)
    else:
        said += advice.go_on(case)
    return Finding(Cause.PYTHON_EXCEPTION, sentence, Sure.CERTAIN, evidence, said)


def _exit(case: Case, fault: Fault) -> Finding:
    """`sys.exit` with something that is not 0."""
    code = fault.exit_code or fault.message or "?"
    status = _status_of(code)
    evidence = [f"it called sys.exit({_text.one_line(code, 200)})"]
    if status is not None and str(status) != code:
        evidence.append(f"what started it sees that as status {status}")
    if fault.place:
        evidence.append(f"at {fault.place}")
    if fault.is_before_first_step and (code == "2" or not code.lstrip("-").isdigit()):
        sentence = f"{case.opening} left before its first step, with sys.exit({code[:120]})."
        usage = _USAGE.search(case.evidence.output)
        if code == "2":
            evidence.append("2 is what argparse leaves with when it does not like an argument")
        said = ["See what it printed last" + (": its usage." if usage else "."), *_ONCE_RIGHT]
        return Finding(Cause.CONFIGURATION, sentence, Sure.LIKELY, evidence, said)
    sentence = f"{case.opening} left by itself, with sys.exit({code[:120]})."
    return Finding(Cause.PYTHON_EXCEPTION, sentence, Sure.CERTAIN, evidence, advice.go_on(case))


_ONCE_RIGHT = ["It happens again at every start: put that right first, then start it again."]


def _status_of(code: str) -> int | None:
    """What a parent sees of such a `sys.exit`."""
    try:
        return int(code) % 256 if len(code) < 18 else None
    except ValueError:
        return 1


def _usage(case: Case) -> Finding | None:
    """Status 2 and a usage: argparse, or click."""
    found = _USAGE.search(case.evidence.output, max(0, len(case.evidence.output) - 4000))
    if case.end.status != 2 or found is None:
        return None
    lines = [line for line in case.evidence.output[found.start() :].splitlines() if line.strip()]
    last = _text.one_line(next((line for line in lines if ": error: " in line), lines[-1]))
    return Finding(
        Cause.CONFIGURATION,
        f"{case.opening} did not take its arguments: {last}.",
        Sure.CERTAIN,
        ["it left with status 2, as argparse does", f"it printed: {_text.one_line(lines[0])}"],
        list(_ONCE_RIGHT),
    )
