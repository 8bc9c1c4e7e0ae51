"""From the records of a run to its view: headline, attempts, curves, ranks, deaths and hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from holdfast import _text
from holdfast._report import attempts as outcomes
from holdfast._report import goodput, verdicts, view
from holdfast._report.attempts import AttemptHistory, Point, read_config
from holdfast._report.events import Counted, EventMarks, SampledEvents, list_checkpoints
from holdfast._report.labels import Labels
from holdfast._report.series import Curve, Rows, Times
from holdfast._report.status import parts
from holdfast._report.status.gather import RunSummary
from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import Origin
from holdfast._store.format import version
from holdfast._text import real, whole

if TYPE_CHECKING:
    from holdfast._diagnose.verdict import Verdict

_MOST_RANKS = 256
_SOON_SECONDS = 600.0  # until the job ends
_LEFT_TOGETHER = ("finished", "closed", "stopped")

Lineage = Mapping[int, int | None]  # the last step that counts of each attempt; None: all count


@dataclass
class Records:
    layout: RunLayout
    rows: Rows
    verdicts: verdicts.Verdicts
    marks: EventMarks
    histories: dict[int, AttemptHistory] = field(default_factory=dict)
    checkpoints: SampledEvents = field(default_factory=SampledEvents)
    current: int | None = None  # the attempt whose events are being read
    stragglers: dict[tuple[int | None, int | None], str] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)

    def in_order(self) -> list[AttemptHistory]:
        return [self.histories[number] for number in sorted(self.histories)]


def headline_of(run: RunSummary, how: str = "") -> str:
    """How it does, in a sentence; `how` says how it ended."""
    step = "" if run.step is None else f"step {run.step:,}"
    if step and run.total:
        done = min(run.step or 0, run.total) * 100 // run.total  # 100 only at the end
        step += f" of {run.total:,} ({done}%)"
    if run.outlook.epoch and run.outlook.epochs:
        step = f"epoch {run.outlook.epoch} of {run.outlook.epochs}, {step}"
    state = run.state[:1].upper() + run.state[1:]
    if run.is_live:
        return f"{state}: {step}." if step else f"{state}."
    found = f"{state} at {step}." if step else f"{state}."
    return f"{found} {_sentence(how)}" if how and run.state not in ("finished", "new") else found


def warnings_of(run: RunSummary) -> list[str]:
    """Sentences, the worst first."""
    folder = Path(run.folder)
    found = [
        parts.describe_stuck(run.trouble.stuck, folder),
        *(f"{parts.describe_death(each)}." for each in run.trouble.deaths[:3]),
        parts.describe_paused(run.trouble.paused, has_ranks=bool(run.ranks)),
        _unsafe(run),
        f"slowed {slower}" if (slower := parts.describe_disturbed(run.trouble.disturbed)) else "",
        parts.describe_straggler(run.trouble.straggler),
        _time_left(run),
        run.job.requeue if run.job is not None and not run.is_live else "",
    ]
    return [_sentence(each) for each in found if each]


def _unsafe(run: RunSummary) -> str:
    if not run.is_live or run.state == "starting":
        return ""
    if run.safe.slots is None and run.safe.disk_step is None:
        return "nothing is safe yet: neither a snapshot nor a checkpoint has been made"
    if run.safe.in_shm is False:
        return (
            "/dev/shm is too small for snapshots, so they are lost if trainer and keeper are both "
            "killed"
        )
    return ""


def _time_left(run: RunSummary) -> str:
    job = run.job
    if job is None or job.seconds_left is None or job.seconds_left > _SOON_SECONDS:
        return ""
    return f"job {job.id} ends in {_text.duration(job.seconds_left)}"


def _sentence(found: str) -> str:
    return _text.sentence(found[:1].upper() + found[1:])


def assemble(
    known: Records, run: RunSummary, now: float, proofs: list[view.ProofRecord], reading: float
) -> view.View:
    """The whole view; `reading` is the share of the files that has been read."""
    histories = known.in_order()
    live = run.attempt if run.is_live else None
    _add_saved_points(histories, known.checkpoints.events())
    ends = _ends(known, histories, run)
    cuts = _cuts(known, histories, run)
    segments, held = goodput.tile(histories, cuts, now, live)
    silent = [
        end.history for end in ends if end.outcome == "lost" and not end.history.exit.is_recorded
    ]
    silences = [_silence(each) for each in silent if each.last_seen is not None]
    hangs = _hangs(known, histories, run, now)
    kept: set[str] = set()
    with contextlib.suppress(OSError):
        kept = {path.name for _, _, path in known.layout.checkpoint_folders()}
    span = (segments[0]["start"], segments[-1]["end"]) if segments else (now, now)
    found = view.View(
        schema=view.SCHEMA,
        made_at=now,
        version=version.__version__,
        run=_run(known, histories, run, ends[-1].how if ends else ""),
        time=view.Span(start=span[0], end=span[1]),
        attempts=[_attempt(known, end, live, now) for end in ends],
        segments=goodput.simplify(segments),
        events=known.marks.all([known.checkpoints.marks(), silences]),
        goodput=goodput.account(segments, held),
        metrics=[_metric(name, each, cuts) for name, each in known.rows.curves.items()],
        step_time=_step_time(known.rows.times),
        ranks=_ranks(known, histories, run),
        stragglers=list(dict.fromkeys(known.stragglers.values())),
        memory=known.rows.memory_view(),
        gpus=known.rows.gpu_view(),
        checkpoints=list_checkpoints(known.checkpoints.events(), kept),
        deaths=_deaths(known, ends, {each["attempt"] for each in hangs}),
        hangs=hangs,
        proofs=proofs,
    )
    if reading < 1:
        found["reading"] = reading
    return found


def _add_saved_points(histories: Sequence[AttemptHistory], events: Sequence[Counted]) -> None:
    """Where there is no series, the checkpoints show how far it was."""
    bare = {history.number: history for history in histories if not history.timeline.points}
    found: dict[int, list[Point]] = {number: [] for number in bare}
    for event, _ in events if bare else ():
        number, t, step = whole(event.get("attempt")), real(event.get("time")), event.get("step")
        if number in found and t is not None and isinstance(step, int):
            found[number].append(Point(t, step))
    for number, history in bare.items():
        history.timeline.saved = found[number]
        if found[number]:
            newest = max(point.step for point in found[number])
            history.last_step = max(newest, history.last_step or 0)


class AttemptEnd(NamedTuple):
    history: AttemptHistory
    outcome: view.Outcome
    how: str
    verdict: Verdict | None = None


def _ends(known: Records, histories: Sequence[AttemptHistory], run: RunSummary) -> list[AttemptEnd]:
    """Each attempt; those that did not end well have a verdict once they were judged."""
    judged = {history.number for history in to_be_judged(histories, run)}
    live = run.attempt if run.is_live else None
    found = []
    for history in histories:
        outcome = outcomes.by_record(history, is_live=history.number == live)
        how = outcomes.sentence(history, outcome, run.state)
        verdict = known.verdicts.known(history.number) if history.number in judged else None
        if verdict is not None:
            cause, has_died = verdict.cause.value, history.has_died
            outcome = outcomes.by_verdict(cause, outcome, has_died=has_died)
            # The records name the rule, and what it found.
            how = how if verdict.cause.value in ("unknown", "bad-training") else verdict.sentence
        found.append(AttemptEnd(history, outcome, how, verdict))
    return found


def to_be_judged(histories: Sequence[AttemptHistory], run: RunSummary) -> list[AttemptHistory]:
    """The newest of those that did not end well."""
    found = []
    for history in histories:
        is_newest = history.number == run.attempt
        outcome = outcomes.by_record(history, is_live=run.is_live and is_newest)
        # A verdict would wait for the keeper, which still writes its records.
        is_open = is_newest and not history.exit.is_recorded and run.process.keeper_pid is not None
        if outcome not in outcomes.QUIET and not is_open:
            found.append(history)
    return found[-verdicts.MOST :]


def _silence(history: AttemptHistory) -> view.Event:
    return view.Event(
        t=history.last_seen or 0.0,
        kind="death",
        attempt=history.number,
        step=history.last_step,
        level="bad",
        title="Nothing more was heard of it",
        text="neither trainer nor keeper has noted an end",
    )


def _deaths(known: Records, ends: Sequence[AttemptEnd], hung: set[int]) -> list[view.Death]:
    """Post-mortems, except of attempts that were ended for a hang: `hangs` has those."""
    return [
        known.verdicts.death(end.history, end.verdict, is_newest=end is ends[-1])
        for end in ends
        if end.verdict is not None and not (end.outcome == "hung" and end.history.number in hung)
    ]


def _attempt(known: Records, end: AttemptEnd, live: int | None, now: float) -> view.AttemptView:
    history = end.history
    origin: view.Origin | None = None
    if history.first_step is not None and history.source not in ("", "new"):
        before = known.origins.get(history.number)
        number = None if before is None else whole(before[0])
        number = history.number - 1 if number is None else number
        origin = view.Origin(attempt=number, step=history.first_step, source=history.source)
    return view.AttemptView(
        number=history.number,
        start=history.began or history.started or history.last_seen or now,
        end=None if history.number == live else history.ended or history.last_seen,
        first_step=history.first_step,
        last_step=history.last_step,
        origin=origin,
        outcome=end.outcome,
        how=end.how,
        status=history.exit.status,
        host=history.process.host,
        pid=history.process.pid,
        job=history.process.job,
    )


def _cuts(
    known: Records, histories: Sequence[AttemptHistory], run: RunSummary
) -> dict[int, int | None]:
    """For each attempt the step after which its work was repeated, or has to be."""
    found: dict[int, int | None] = dict(known.lineage)
    live = run.attempt if run.is_live else None
    for history in histories:
        if history.number not in found:
            if history.number > max(known.lineage, default=0):
                found[history.number] = None  # it has only begun
            continue
        kept = [found[history.number], history.bad_step]
        if history.number != live and found[history.number] is None:
            safe = [run.safe.memory_step, run.safe.disk_step, history.exit.durable_step]
            newest = max((each for each in safe if each is not None), default=0)
            # Values logged after the last step, as by an evaluation, are safe with that step.
            kept.append(newest if newest < (history.last_step or 0) else None)
        found[history.number] = min((each for each in kept if each is not None), default=None)
    return found


def _hangs(
    known: Records, histories: Sequence[AttemptHistory], run: RunSummary, now: float
) -> list[view.Hang]:
    hangs = []
    for history in [history for history in histories if history.timeline.stuck][-verdicts.MOST :]:
        found = known.verdicts.hang(history.number)
        if found is None:
            continue
        is_live = run.is_live and history.number == run.attempt
        until = now if is_live else history.ended or history.last_seen
        if history.timeline.stuck[-1].end == float("inf") and until is not None:
            # The record is of the moment when it was found, and the hang has gone on since.
            seconds = max(found["seconds"] or 0.0, until - found["t"])
            sentence = parts.tell_duration(found["sentence"], seconds)
            found = {**found, "seconds": seconds, "sentence": sentence}
        hangs.append(found)
    return hangs


def _run(
    known: Records, histories: Sequence[AttemptHistory], run: RunSummary, how: str
) -> view.RunView:
    job: view.JobView | None = None
    if run.job is not None:
        text = parts.describe_job(run.job, is_live=run.is_live)
        job = view.JobView(id=run.job.id, seconds_left=run.job.seconds_left, text=text)
    record = run.as_record()
    found = {key: record[key] for key in view.RunView.__annotations__ if key in record}
    found |= {
        "name": Path(run.folder).absolute().name or run.folder,
        "id": run.run_id,
        "headline": headline_of(run, how),
        "ranks": max([1, len(run.ranks), *(each.process.ranks for each in histories[-1:])]),
        "job": job,
        "warnings": warnings_of(run),
        "config": read_config(known.layout, run.attempt),
        **asdict(known.labels),
    }
    return cast(view.RunView, found)


def _metric(name: str, curve: Curve, cuts: Lineage) -> view.Metric:
    """The values that count, and those of repeated steps."""
    lost = view.LostMetric(step=[], value=[])
    kept = []
    before: int | None = None
    for point in curve.points:
        # A value that was logged after so many steps leads to the newest state if they count.
        last = cuts.get(point.attempt, 0)
        if last is None or point.step < last:
            kept.append(point)
            continue
        if before is not None and before != point.attempt:
            lost["step"].append(None)
            lost["value"].append(None)
        before = point.attempt
        lost["step"].append(point.step)
        lost["value"].append(point.value)
    return view.Metric(
        name=name,
        attempt=[point.attempt for point in kept],
        step=[point.step for point in kept],
        value=[point.value for point in kept],
        low=[point.low for point in kept],
        high=[point.high for point in kept],
        bad=sorted({each for _, each in curve.bad}),  # also of repeated steps
        lost=lost,
    )


def _step_time(times: Times) -> view.StepTime:
    t, p50, p99, most = times.columns()
    total: dict[int, int] = {}
    attempts = []
    for number, histogram in sorted(times.of.items()):
        series.add_buckets(total, histogram.items())
        found = [series.quantile(histogram, share) or 0.0 for share in (0.5, 0.9, 0.99)]
        attempts.append(view.AttemptTimes(number=number, p50=found[0], p90=found[1], p99=found[2]))
    percentiles: view.Percentiles | None = None
    if total:
        percentiles = view.Percentiles(
            p50=series.quantile(total, 0.5) or 0.0,
            p90=series.quantile(total, 0.9) or 0.0,
            p99=series.quantile(total, 0.99) or 0.0,
            max=series.seconds_of(max(total)),
            count=sum(total.values()),
        )
    return view.StepTime(
        percentiles=percentiles, t=t, p50=p50, p99=p99, max=most, attempts=attempts
    )


def _ranks(known: Records, histories: Sequence[AttemptHistory], run: RunSummary) -> list[view.Rank]:
    """Each with how long it waits for the others; of very many, those that wait least."""
    newest = histories[-1] if histories else None
    waits = newest.timeline.waits if newest is not None else {}
    late = {rank for _, rank in known.stragglers}
    late |= {run.trouble.straggler.rank} if run.trouble.straggler is not None else set()
    histogram = known.rows.times.of.get(newest.number) if newest is not None else None
    usual = series.quantile(histogram, 0.5) if histogram else None
    # They left together, some time after the last heartbeat.
    together = run.step if run.state in _LEFT_TOGETHER else None
    found = []
    for each in run.ranks:
        wait = waits.get(each.rank)
        rank = view.Rank(
            rank=each.rank,
            host=each.host,
            step=each.step if together is None else together,
            wait_seconds=wait,
            is_straggler=each.rank in late,
        )
        if wait is not None and usual:
            rank["share"] = min(1.0, wait / usual)
        found.append(rank)
    if len(found) > _MOST_RANKS:
        found.sort(key=lambda rank: (not rank["is_straggler"], rank["wait_seconds"] or 0.0))
        found = sorted(found[:_MOST_RANKS], key=lambda rank: rank["rank"])
    return found
