"""From what is known of a run to the view of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import _text
from holdfast._report import attempts as outcomes
from holdfast._report import checkpoints as saved
from holdfast._report import goodput, verdicts, view
from holdfast._report import goodput as timeline
from holdfast._report.attempts import Life, Point
from holdfast._report.checkpoints import Frequent
from holdfast._report.columns import Curve, Times
from holdfast._report.events import Marks
from holdfast._report.json_lines import real, whole
from holdfast._report.series import Rows
from holdfast._report.status.gather import RunSummary
from holdfast._report.status.hangs import describe_disturbed, describe_paused, describe_stuck
from holdfast._report.status.job import describe_job
from holdfast._report.status.ranks import describe_death, describe_straggler
from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import Origin
from holdfast._store.format import version

if TYPE_CHECKING:
    from holdfast._diagnose.verdict import Verdict


# -- A run in one sentence, and what a person should know of it now --------------------------------


_SOON_SECONDS = 600.0  # until the job ends


def headline_of(run: RunSummary, how: str = "") -> str:
    """How it does, in a sentence; `how` is what is known of its end."""
    step = "" if run.step is None else f"step {run.step:,}"
    if step and run.total:
        done = min(run.step or 0, run.total) * 100 // run.total  # 100 only at the end
        step += f" of {run.total:,} ({done}%)"
    if run.epoch and run.epochs:
        step = f"epoch {run.epoch} of {run.epochs}, {step}"
    state = run.state[:1].upper() + run.state[1:]
    if run.is_live:
        return f"{state}: {step}." if step else f"{state}."
    found = f"{state} at {step}" if step else state
    return (
        f"{found}. {_sentence(how)}"
        if how and run.state not in ("finished", "new")
        else f"{found}."
    )


def warnings_of(run: RunSummary) -> list[str]:
    """Sentences, the worst first."""
    folder = Path(run.folder)
    found = [
        describe_stuck(run.stuck, folder),
        *(f"{describe_death(each)}." for each in run.deaths[:3]),
        describe_paused(run.paused, has_ranks=bool(run.ranks)),
        _unsafe(run),
        _told("slowed ", describe_disturbed(run.disturbed)),
        _told("", describe_straggler(run.straggler)),
        _time_left(run),
        _requeue(run),
    ]
    return [_sentence(each) for each in found if each]


def job_text(run: RunSummary) -> str:
    """What is known of its job, in a line."""
    return describe_job(run.job, is_live=run.is_live)


def _unsafe(run: RunSummary) -> str:
    if not run.is_live or run.state == "starting":
        return ""
    if run.slots is None and run.disk_step is None:
        return "nothing is safe yet: neither a snapshot nor a checkpoint has been made"
    if run.in_shm is False:
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


def _requeue(run: RunSummary) -> str:
    return run.job.requeue or "" if run.job is not None and not run.is_live else ""


def _told(before: str, found: str) -> str:
    return f"{before}{found}" if found else ""


def _sentence(found: str) -> str:
    shown = found[:1].upper() + found[1:]
    return shown if shown.endswith((".", "!", "?", "…")) else f"{shown}."


_MOST_RANKS = 256
_LEFT_TOGETHER = ("finished", "closed", "stopped")

Line = Mapping[int, int | None]


@dataclass(frozen=True)
class Known:
    """What a model has read so far."""

    layout: RunLayout
    summary: RunSummary
    now: float
    lives: Sequence[Life]
    line: Line
    origins: Mapping[int, Origin]
    rows: Rows
    marks: Marks
    frequent: Frequent
    current: int | None
    stragglers: list[str]
    late_ranks: set[int | None]  # that were named in them
    verdicts: verdicts.Verdicts
    proofs: list[view.Proof]
    reading: float


def assemble(known: Known) -> view.View:
    """All of it."""
    run = known.summary
    live = run.attempt if run.is_live else None
    checkpoints, requests = known.frequent.checkpoints, known.frequent.requests
    _help_out(known.lives, checkpoints.events())
    ends = _ends(known, live)
    cuts = _cuts(known, live)
    segments, held = timeline.tile(known.lives, cuts, known.now, live)
    folded = [checkpoints.marks(), requests.marks(known.current), known.rows.snapshots.events()]
    folded.append([_silence(end.life) for end in ends if _fell_silent(end)])
    last = ends[-1].how if ends else ""
    hangs = _hangs(known)
    found = view.View(
        schema=view.SCHEMA,
        made_at=known.now,
        version=version.__version__,
        run=_run(known, last),
        time=_span(segments, known.now),
        attempts=[_attempt(known, end, live) for end in ends],
        segments=timeline.simplify(segments),
        events=known.marks.all(folded),
        goodput=goodput.account(segments, held),
        metrics=[_metric(name, each, cuts) for name, each in known.rows.curves.items()],
        step_time=_step_time(known.rows.times),
        ranks=_ranks(known),
        stragglers=known.stragglers,
        memory=_memory(known.rows),
        checkpoints=saved.checkpoints(checkpoints.events(), _kept(known.layout)),
        deaths=_deaths(known, ends, {each["attempt"] for each in hangs}),
        hangs=hangs,
        proofs=known.proofs,
    )
    if known.reading < 1:
        found["reading"] = known.reading
    return found


def _help_out(lives: Sequence[Life], events: Sequence[saved.Counted]) -> None:
    """Where there is no series, the checkpoints tell how far it was."""
    bare = {life.number: life for life in lives if not life.points}
    found: dict[int, list[Point]] = {number: [] for number in bare}
    for event, _ in events if bare else ():
        number, t, step = whole(event.get("attempt")), real(event.get("time")), event.get("step")
        if number in found and t is not None and isinstance(step, int):
            found[number].append(Point(t, step))
    for number, life in bare.items():
        life.saved = found[number]
        if life.saved:
            newest = max(point.step for point in life.saved)
            life.last_step = max(newest, life.last_step or 0)


# -- attempts ------------------------------------------------------------------------------


class End(NamedTuple):
    """How an attempt ended."""

    life: Life
    outcome: view.Outcome
    how: str
    verdict: Verdict | None = None


def _ends(known: Known, live: int | None) -> list[End]:
    """Each attempt; for those that did not end well there is a verdict, once they were judged."""
    judged = {life.number for life in to_be_judged(known.lives, known.summary)}
    found = []
    for life in known.lives:
        outcome = outcomes.by_record(life, is_live=life.number == live)
        how = outcomes.sentence(life, outcome, known.summary.state)
        verdict = known.verdicts.known(life.number) if life.number in judged else None
        if verdict is not None:
            outcome = outcomes.by_verdict(verdict.cause.value, outcome)
            # Of a rule the records know which one, and what it saw.
            how = how if verdict.cause.value in ("unknown", "bad-training") else verdict.sentence
        found.append(End(life, outcome, how, verdict))
    return found


def to_be_judged(lives: Sequence[Life], run: RunSummary) -> list[Life]:
    """Those of which somebody may ask why they ended; the newest of them."""
    found = []
    for life in lives:
        is_newest = life.number == run.attempt
        outcome = outcomes.by_record(life, is_live=run.is_live and is_newest)
        # While its keeper is still writing what it knows, a verdict would wait for it.
        is_open = is_newest and not life.has_exit and run.keeper_pid is not None
        if outcome not in outcomes.QUIET and not is_open:
            found.append(life)
    return found[-verdicts.MOST :]


def _fell_silent(end: End) -> bool:
    return end.outcome == "lost" and not end.life.has_exit and end.life.last_seen is not None


def _silence(life: Life) -> view.Event:
    return view.Event(
        t=life.last_seen or 0.0,
        kind="death",
        attempt=life.number,
        step=life.last_step,
        level="bad",
        title="Nothing more was heard of it",
        text="neither trainer nor keeper has noted an end",
    )


def _deaths(known: Known, ends: Sequence[End], hung: set[int]) -> list[view.Death]:
    """Post-mortems, but for those who were ended since they hung: that is told once."""
    return [
        known.verdicts.death(end.life, end.verdict, is_newest=end is ends[-1])
        for end in ends
        if end.verdict is not None and not (end.outcome == "hung" and end.life.number in hung)
    ]


def _attempt(known: Known, end: End, live: int | None) -> view.Attempt:
    life = end.life
    origin: view.Origin | None = None
    if life.first_step is not None and life.source not in ("", "new"):
        before = known.origins.get(life.number)
        number = None if before is None else whole(before[0])
        number = life.number - 1 if number is None else number
        origin = view.Origin(attempt=number, step=life.first_step, source=life.source)
    return view.Attempt(
        number=life.number,
        start=life.began or life.started or life.last_seen or known.now,
        end=None if life.number == live else life.ended or life.last_seen,
        first_step=life.first_step,
        last_step=life.last_step,
        origin=origin,
        outcome=end.outcome,
        how=end.how,
        status=life.status,
        host=life.host,
        pid=life.pid,
        job=life.job,
    )


def _cuts(known: Known, live: int | None) -> dict[int, int | None]:
    """For each attempt the step after which its work was, or has to be, made again."""
    found: dict[int, int | None] = dict(known.line)
    for life in known.lives:
        if life.number not in found:
            if life.number > max(known.line, default=0):
                found[life.number] = None  # it has only begun
            continue
        kept = [found[life.number], life.bad_step]
        if life.number != live and found[life.number] is None:
            safe = [known.summary.memory_step, known.summary.disk_step, life.durable_step]
            newest = max((each for each in safe if each is not None), default=0)
            # What was logged after the last step, as by an evaluation, is not lost with it safe.
            kept.append(newest if newest < (life.last_step or 0) else None)
        found[life.number] = min((each for each in kept if each is not None), default=None)
    return found


def _hangs(known: Known) -> list[view.Hang]:
    stuck = [life for life in known.lives if life.stuck][-verdicts.MOST :]
    return [each for life in stuck if (each := _hang(known, life)) is not None]


def _hang(known: Known, life: Life) -> view.Hang | None:
    found = known.verdicts.hang(life.number)
    if found is None or life.stuck[-1].end != float("inf"):
        return found
    # Its record is of the moment in which it was found, and it has stood on since.
    is_live = known.summary.is_live and life.number == known.summary.attempt
    until = known.now if is_live else life.ended or life.last_seen
    stood = None if until is None else max(found["seconds"] or 0.0, until - found["t"])
    return {**found, "seconds": found["seconds"] if stood is None else stood}


# -- the run -----------------------------------------------------------------------------------


def _run(known: Known, how: str) -> view.Run:
    run = known.summary
    rate = known.rows.rate(known.now) if run.is_live else None
    left = None if run.total is None or run.step is None else max(0, run.total - run.step)
    job: view.Job | None = None
    if run.job is not None:
        job = view.Job(id=run.job.id, seconds_left=run.job.seconds_left, text=job_text(run))
    newest = known.lives[-1] if known.lives else None
    return view.Run(
        name=Path(run.folder).absolute().name or run.folder,
        folder=run.folder,
        id=run.run_id,
        state=run.state,
        is_live=run.is_live,
        headline=headline_of(run, how),
        step=run.step,
        total=run.total,
        epoch=run.epoch,
        epochs=run.epochs,
        phase=run.phase,
        attempt=run.attempt,
        rate_per_second=rate,
        eta_seconds=left / rate if rate and left is not None else None,
        memory_step=run.memory_step,
        memory_age_seconds=run.memory_age_seconds,
        disk_step=run.disk_step,
        disk_age_seconds=run.disk_age_seconds,
        pid=run.pid,
        host=run.host,
        ranks=max(1, len(run.ranks), newest.ranks if newest is not None else 1),
        job=job,
        warnings=warnings_of(run),
    )


def _span(segments: Sequence[view.Segment], now: float) -> view.Span:
    if not segments:
        return view.Span(start=now, end=now)
    return view.Span(start=segments[0]["start"], end=segments[-1]["end"])


def _kept(layout: RunLayout) -> set[str]:
    with contextlib.suppress(OSError):
        return {path.name for _, _, path in layout.checkpoint_folders()}
    return set()


# -- curves ------------------------------------------------------------------------------------


def _metric(name: str, curve: Curve, cuts: Line) -> view.Metric:
    """What is on the run's own line, and beside it what was made again."""
    lost = view.LostMetric(step=[], value=[])
    columns = (curve.attempt, curve.step, curve.value, curve.low, curve.high)
    rows = list(zip(*columns, strict=True))
    off = [not _counts(cuts, row[0], row[1]) for row in rows]
    if any(off):
        before: int | None = None
        for row, is_off in zip(rows, off, strict=True):
            if is_off:
                if before is not None and before != row[0]:
                    lost["step"].append(None)
                    lost["value"].append(None)
                before = row[0]
                lost["step"].append(row[1])
                lost["value"].append(row[2])
        rows = [row for row, is_off in zip(rows, off, strict=True) if not is_off]
    attempt, step, value, low, high = map(list, zip(*rows, strict=True)) if rows else [[]] * 5
    return view.Metric(
        name=name,
        attempt=attempt,
        step=step,
        value=value,
        low=low,
        high=high,
        bad=sorted({each for _, each in curve.bad}),  # lost ones too: a rule has seen to that
        lost=lost,
    )


def _counts(cuts: Line, attempt: int, step: int) -> bool:
    """Whether a value that was logged after `step` steps leads to today."""
    if attempt not in cuts:
        return False
    last = cuts[attempt]
    return last is None or step < last


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


def _memory(rows: Rows) -> view.Memory:
    t, used, limit, gpu = rows.levels.columns()
    found = view.Memory(t=t, used=used, limit=limit, limit_name=rows.limit_name)
    if rows.has_gpu:
        found["gpu"] = gpu
    return found


# -- ranks ---------------------------------------------------------------------------------------


def _ranks(known: Known) -> list[view.Rank]:
    """Each with how long it waits for the others; of very many, those that wait least."""
    newest = known.lives[-1] if known.lives else None
    waits = newest.waits if newest is not None else {}
    straggler = known.summary.straggler
    late = known.late_ranks | ({straggler.rank} if straggler is not None else set())
    histogram = known.rows.times.of.get(newest.number) if newest is not None else None
    usual = series.quantile(histogram, 0.5) if histogram else None
    # They left together, some time after the last heartbeat.
    together = known.summary.step if known.summary.state in _LEFT_TOGETHER else None
    found = []
    for each in known.summary.ranks:
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
