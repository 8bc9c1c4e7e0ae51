"""The rules of one session: they call a state bad, or end the training.

Bad: first the record that everything from that step on is void becomes durable, then the slots in
memory go, then all ranks leave. No snapshot is taken of a boundary whose values were not judged, so
a kill at any instant leaves no bad state from which a run would resume.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._adapters.registry import adapter_of
from holdfast._errors import CheckpointError, Stopped
from holdfast._keeper.protocol import DecisionForTrainer as Decision
from holdfast._run.resume.start import Resumed
from holdfast._state.capture import capture
from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import rank_file
from holdfast._store.folder.lineage import is_on_line, note_void, set_aside_void
from holdfast._store.format import manifest
from holdfast._store.format.image import ImagePlan, TensorSpec, header_bytes, parse_header
from holdfast._store.read.merge_ranks import FileSource
from holdfast._text import say
from holdfast.rules._judge import Judge, RuleVerdict
from holdfast.rules._rules import FAILURE

if TYPE_CHECKING:
    from holdfast._run.saving.saver import Saver
    from holdfast._run.session import Session


_MOST_NAMES = 8
_BY_SCRIPT = "run.finish()"  # why a run is over that no rule has ended


class Ruling:
    def __init__(self, session: Session, found: Resumed, step: int) -> None:
        self._session = session
        self.judge = Judge(session.spec.rule, session.attempt.size)
        self.judge.load(found.rules)
        self.bad: RuleVerdict | None = None  # by this rank or another one
        self.over: str | None = None  # why the training is complete, if a rule has ended it
        self._is_voided = False
        known = found.rules or {}
        self._nan_at_start: list[str] | None = known.get("nan")  # arrays that may hold a NaN
        if found.resumed_from is None and self.judge.names_tensors:
            self._nan_at_start = nan_at_start(session.spec.state)
        ended = known.get("over")
        # Rules that were changed since may let the training go on.
        holds = ended == _BY_SCRIPT or (ended is not None and self.judge.holds(step))
        group = session.attempt.group
        if group is not None and found.resumed_from is not None:
            of_ranks = group.exchange("over", [ended, holds])
            holds = any(each[1] for each in of_ranks)
            ended = next((each[0] for each in of_ranks if each[0] is not None), None)
        if holds:
            self.over = str(ended)

    def state(self) -> dict[str, Any]:
        """What the next attempt needs."""
        known = {"over": self.over, "nan": self._nan_at_start}
        return {**self.judge.state(), **{k: v for k, v in known.items() if v is not None}}

    def was_ended_before(self) -> bool:
        """True, with a line, if a rule or run.finish() had ended the training."""
        if self.over is None:
            return False
        step = self._session.boundary.step
        by_script = self.over == _BY_SCRIPT
        how = f"finished at step {step}" if by_script else f"ended at step {step} by a rule"
        say(f"{self._session.spec.folder}: {how} ({self.over}); nothing left to train.")
        return True

    # -- what the rules find ----------------------------------------------------------

    def is_bad(self) -> bool:
        """Before a save: True if this state is bad. Waits for all values up to this boundary."""
        self._session.log.flush()  # an attempt that resumes from here does not log this again
        if self.bad is None and self.judge.is_there and self.judge.wait_for_values():
            self._take_verdict()
        return self.bad is not None

    def poll(self) -> None:
        """Judge the values that have arrived up to this boundary."""
        step = self._session.boundary.step
        if self.bad is None and self.over is None and self.judge.look(step):
            self._take_verdict()
        if self.judge.is_there and self.judge.lacks_samples():
            say(
                "Budget(samples=…) counts what run.log(samples=…) is given, and nothing was given "
                "so far."
            )

    def receive_bad(self, reason: str, step: int, rank: int) -> None:
        """Another rank has called it bad; from the keeper's thread."""
        if self.bad is None:
            reason = reason or "a rule has called it bad"
            self.bad = RuleVerdict(FAILURE, reason, step, rank=rank)

    def _take_verdict(self) -> None:
        verdict = self.judge.verdict
        if verdict is not None and verdict.is_bad and self.bad is None:
            self.bad = verdict
            self._void(verdict)

    def _void(self, verdict: RuleVerdict) -> None:
        """Make everything from the bad step on void: on disk, in memory, for all ranks."""
        session, step = self._session, verdict.step
        attempt, state, rank = session.attempt, session.spec.state, session.attempt.rank
        self._record_void(step, verdict.reason)
        names: list[str] = []
        if verdict.names_tensors:
            with contextlib.suppress(Exception):  # state_dict() of a broken state may raise
                names = not_finite(state)
            of = (session.keeper.policy, session.saver)
            earlier = first_tainted(*of, names, trained(state, self._nan_at_start), step)
            if earlier < step:
                step = earlier
                self._record_void(step, verdict.reason)
        session.saver.void_from(step)
        for before, _ in set_aside_void(attempt.layout) if rank == 0 else ():
            attempt.journal("set-aside", name=before.name, why="called bad")
        session.keeper.void_from(step, verdict.reason)
        self._is_voided = True
        attempt.journal(
            "rule",
            step=session.boundary.step,
            bad_step=verdict.step,
            void_from=step,
            reason=verdict.reason,
            tensors=names[:_MOST_NAMES],
            rules=list(verdict.rules),
            outcome=verdict.outcome,
        )
        say(f"{verdict.reason}: no start resumes from step {step} or later.")
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            say(f"not finite: {', '.join(names[:_MOST_NAMES])}{more}.")

    def _record_void(self, step: int, reason: str) -> None:
        attempt = self._session.attempt
        try:
            note_void(attempt.layout, attempt.number, step, reason, attempt.rank)
        except OSError as error:  # the slots in memory still go, and nothing is saved
            say(
                f"{attempt.folder}: could not record that step {step} is bad "
                f"({error.strerror or error}).\n"
                f"Remove the checkpoints from step {step} on before the next start."
            )

    # -- leaving ----------------------------------------------------------------------

    def leave_bad(self) -> bool:
        """Leave without saving this step; False if all ranks leave at a later boundary."""
        assert self.bad is not None
        ranks, boundary = self._session.ranks, self._session.boundary
        if ranks is not None:
            ranks.request("stop", self.bad.reason, status=_errors.BAD)
            decision = ranks.at_boundary(boundary.mark())
            if decision is None or decision.what != "stop":
                boundary.poll_soon()
                return False  # nothing is saved until then
        self.stop_bad()
        return True

    def is_stopped_as_bad(self, decision: Decision) -> bool:
        """True if all ranks leave here since one of them has called it bad: nothing is saved."""
        if decision.what != "stop" or (self.bad is None and decision.status != _errors.BAD):
            return False
        self.receive_bad(decision.reason, self._session.boundary.step, decision.rank)
        self.stop_bad()
        return True

    def stop_bad(self) -> Stopped:
        assert self.bad is not None
        session, verdict = self._session, self.bad
        step, attempt = session.boundary.step, session.attempt
        if session.ranks is None:
            session.saver.keep_last("last good")  # a snapshot from before the bad step
        whose = ""
        if verdict.rank is not None and not self._is_voided:
            whose = f" (rank {verdict.rank})"
            facts = {"bad_step": verdict.step, "outcome": verdict.outcome, "rank": verdict.rank}
            attempt.journal("rule", step=step, reason=verdict.reason, **facts)
        stopped = session.stops.stop(Stopped(_errors.BAD, f"{verdict.reason}{whose}", step))
        attempt.journal("stop", step=step, reason=stopped.reason, status=stopped.status)
        kept, resumed_from = session.keeper.durable_step, session.found.resumed_from
        if kept is None and (resumed_from or verdict.step) < verdict.step:
            kept = resumed_from
        good = "nothing before it was saved" if kept is None else f"step {kept} is durable"
        if session.ranks is None:
            say(f"leaving with status {stopped.status} ({stopped.reason}); {good}.")
        return stopped

    def judge_the_end(self) -> None:
        """Before the last state is saved: it may be bad, or a rule may end the training here."""
        if self.is_bad():
            raise self.stop_bad()
        verdict = self.judge.verdict
        if verdict is not None and self.over is None:
            self.end_well(verdict.reason)

    def end_well(self, reason: str) -> None:
        """A rule ends the training: the loops end as if they had come to their end."""
        self.over = reason
        verdict, step = self.judge.verdict, self._session.boundary.step
        rules = [] if verdict is None else list(verdict.rules)
        facts = {"reason": reason, "rules": rules, "outcome": "success"}
        self._session.attempt.journal("rule", step=step, **facts)
        say(f"{reason}: the training is complete at step {step}.")

    def end_by_script(self) -> None:
        self.over = _BY_SCRIPT


# -- The first saved state that is bad, before the step that was logged ----------------------------
# A script that logs every tenth step learns late that a tensor is not finite. The states saved
# before contain it too: a run that resumes from them would end in the same way.


_Open = Callable[[], tuple[ImagePlan, Callable[[int], memoryview]]]


def first_tainted(
    policy: Policy, saver: Saver, names: list[str], trained: frozenset[str], step: int
) -> int:
    """The first step from which on all saved states have a tensor of `names` that is not finite.

    A tensor that is not finite in the oldest state is meant so, as a mask of infinities is. But a
    NaN in a trained parameter is not: then no good state is left.
    """
    saved: list[tuple[int, _Open]] = [
        (at, functools.partial(_open_image, image)) for at, image in saver.slots()
    ]
    for at, attempt, folder in policy.layout.checkpoint_folders():
        if is_on_line(policy.line, attempt, at):
            saved.append((at, functools.partial(_open_file, folder, rank_file(policy.rank))))
    candidates = [
        (at, functools.partial(_inspect, opened))
        for at, opened in sorted(saved, key=lambda each: -each[0])
        if at < step
    ]
    if not candidates or not names:
        return step
    suspects = frozenset([name for name in names if not name.endswith(".grad")][:_MOST_NAMES])
    inspect_oldest = candidates[-1][1]
    always = inspect_oldest(suspects) - inspect_oldest(suspects & trained, only_nan=True)
    suspects -= always
    if always and not suspects:
        say(
            f"not finite in the oldest state that is saved already: {', '.join(sorted(always))}.\n"
            "If that is not intended, the next start ends in the same way: use another folder."
        )
    found = step
    for at, inspect in candidates:
        if not suspects or not inspect(suspects):
            break
        found = at
    return found


def _open_file(folder: Path, name: str) -> tuple[ImagePlan, Callable[[int], memoryview]]:
    file = next(each for each in manifest.read(folder).files if each.name == name)
    stored = FileSource(folder, file)
    return stored.plan, stored.data


def _open_image(image: memoryview) -> tuple[ImagePlan, Callable[[int], memoryview]]:
    plan = parse_header(bytes(image[: header_bytes(image[:8])]))

    def read(index: int) -> memoryview:
        offset = plan.offsets[index]
        return image[offset : offset + plan.specs[index].size_bytes]

    return plan, read


def _inspect(opened: _Open, names: frozenset[str], *, only_nan: bool = False) -> frozenset[str]:
    """Which of these tensors are not finite; a damaged or removed state says nothing."""
    found = set()
    with contextlib.suppress(OSError, ValueError, LookupError, StopIteration, CheckpointError):
        plan, read = opened()
        for index, spec in enumerate(plan.specs):
            if spec.name in names:
                with read(index) as data:  # released at once: the arena may be closed next
                    if has_not_finite(data, spec.stored_as, only_nan=only_nan):
                        found.add(spec.name)
    return frozenset(found)


# -- Which tensors of a state are not finite: searched when a rule has called it bad ---------------


# Bytes of an item, and the bits of its exponent: if all are set, it is NaN or infinite.
_EXPONENTS = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "C64": (4, 0x7F80_0000),  # of its two parts
}
_FORMATS = {8: "Q", 4: "I", 2: "H"}
_CHUNK_BYTES = 16 << 20


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """The names of tensors in a state, and of gradients, that hold a NaN or an infinity."""
    found = [name for name, spec, value in _arrays(state) if _is_bad(spec, value)]
    for name, parameter in _parameters(state):
        gradient = getattr(parameter, "grad", None)
        if gradient is not None and not bool(gradient.detach().isfinite().all()):
            found.append(f"{name}.grad")
    return found


def _is_bad(spec: TensorSpec, value: Any, *, only_nan: bool = False) -> bool:
    data = adapter_of(spec.kind).bytes_of(value)
    return has_not_finite(data, spec.stored_as, only_nan=only_nan)


def has_not_finite(data: Any, stored_as: str, *, only_nan: bool = False) -> bool:
    """Whether the bytes of a tensor hold a NaN or an infinity, or a NaN at least."""
    size, mask = _EXPONENTS.get(stored_as, (0, 0))
    if not size:
        return False
    view = memoryview(data).cast("B")
    return any(
        _any_set(view[start : start + _CHUNK_BYTES], size, mask, only_nan)
        for start in range(0, view.nbytes, _CHUNK_BYTES)
    )


def _any_set(view: memoryview, size: int, mask: int, only_nan: bool) -> bool:
    # Without its sign, an infinity is the exponent alone, and a NaN is more than that.
    unsigned, least = (1 << (8 * size - 1)) - 1, mask + only_nan
    try:
        import numpy as np
    except ImportError:  # slow, but it runs once
        read = struct.unpack(f"={view.nbytes // size}{_FORMATS[size]}", view)
        return any(item & unsigned >= least for item in read)
    items = np.frombuffer(view, dtype=f"u{size}")
    return bool(((items & items.dtype.type(unsigned)) >= least).any())


def nan_at_start(state: Mapping[str, Any]) -> list[str]:
    """The names of arrays that hold a NaN before anything is trained, so by intention.

    Tensors of torch are left out: a module says which of them are trained.
    """
    arrays = (each for each in _arrays(state) if each[1].kind != "torch")
    return sorted(name for name, spec, value in arrays if _is_bad(spec, value, only_nan=True))


def _arrays(state: Mapping[str, Any]) -> Iterator[tuple[str, TensorSpec, Any]]:
    captured = capture(dict(state))
    for spec, value in zip(captured.specs, captured.values, strict=True):
        if spec.stored_as in _EXPONENTS:
            yield spec.name, spec, value


def trained(state: Mapping[str, Any], meant: Collection[str] | None = None) -> frozenset[str]:
    """The names of parameters that are trained: a NaN there is never intended.

    `meant` are the arrays that held one at the start, if that is known.
    """
    names = {
        name for name, parameter in _parameters(state) if getattr(parameter, "requires_grad", False)
    }
    if meant is not None:
        arrays = [name for name, spec, _ in _arrays(state) if spec.kind != "torch"]
        names.update(name for name in arrays if name not in meant)
    return frozenset(names)


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, module in state.items():
        named = getattr(module, "named_parameters", None)
        for path, parameter in named() if callable(named) else ():
            yield f"{name}.{path}", parameter
