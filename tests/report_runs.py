"""Run folders to look at: of many ends, of very many lines, with hostile names, of many ranks.

python -m tests.report_runs FOLDER    makes all of them there
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.report_ends import ENDS
from tests.report_story import GB, Pace, Story, usual_metrics

DAY = 86400.0
LINES = 1_000_000

# What would be seen if any of it ran: an attribute of the document, or another title.
_ACT = "document.documentElement.dataset.hacked='1';document.title='hacked'"
SCRIPTS = (
    f"</script><script>{_ACT}</script>",
    f'"><img src=x onerror="{_ACT}">',
    f"<svg/onload={_ACT.replace(' ', '')}>",
    f"--><!--<script>{_ACT}</script>",
    f"javascript:{_ACT}",
    f"${{{_ACT}}}{{{{constructor.constructor('{_ACT[:20]}')()}}}}",
    f"\u2028\u2029';{_ACT};//",
    "</textarea></title></style><plaintext>",
    "__proto__",
)
_ODD = (
    "\u202egnol dna drawkcab\u202c",
    "x" * 3000,
    "\x1b[31mred\x07",
    "名前 ❤ عربى",
    " ",
    "%00/../..",
)
HOSTILE_FOLDER = f"<img src=x onerror={_ACT.split(';')[0].replace(' ', '')}>"


def make_many_attempts(folder: Path, attempts: int = 40) -> Path:
    """Six days in forty attempts that end in every way there is, the last one at its end."""
    story = Story(folder, time.time() - 9 * DAY, job="184467", hosts=4)
    ends = list(ENDS.values())
    steps = story.pace.total // attempts
    for number in range(attempts):
        # Where the scheduler has it, it waits; where a person has, nobody does.
        waited = 0.0 if number == 0 else (5400.0 if number % 3 == 0 else 90.0 + 40 * (number % 7))
        story.begin("memory" if number % 5 == 2 else "disk", waited=waited)
        is_last = number == attempts - 1
        left = story.pace.total - story.step
        made = left if is_last else min(left - 1, int(steps * (0.6 + 0.8 * story.random.random())))
        story.train(made, phase_every=9000 if number % 2 else 0)
        if is_last:
            _finish(story)
        else:
            ends[number % len(ends)](story)
    return story.close()


def make_few_attempts(folder: Path) -> Path:
    """Three attempts on one machine: killed, stopped, finished."""
    pace = Pace(0.021, 24_576, 40_000, 6000, None, metrics=_two_metrics())
    story = Story(folder, time.time() - 3600, pace=pace)
    for steps, end in ((15_000, ENDS["killed"]), (9000, ENDS["terminated"])):
        story.begin(waited=20.0 if story.attempt else 0.0)
        story.train(steps)
        end(story)
    story.begin(waited=12.0)
    story.train(story.pace.total - story.step)
    _finish(story)
    return story.close()


def make_one_attempt(folder: Path) -> Path:
    """One that went as it should."""
    story = Story(folder, time.time() - 1800, pace=Pace(0.1, GB, 12_000, 2000, None))
    story.pace.metrics = _two_metrics()
    story.begin()
    story.train(12_000)
    _finish(story)
    return story.close()


def make_without_series(folder: Path) -> Path:
    """As an earlier version has left it: a journal that says less, and no series."""
    story = Story(folder, time.time() - 5 * DAY, has_series=False)
    for end in ("killed", "terminated", "failed"):
        story.begin(waited=600.0 if story.attempt else 0.0)
        story.train(20_000)
        ENDS[end](story)
    return story.close()


def make_just_begun(folder: Path) -> Path:
    """A process that has said that it is there, and nothing else yet."""
    story = Story(folder, time.time() - 4)
    story.begin(is_live=True)
    story.beat()
    return story.close()


def make_live(folder: Path) -> Path:
    """One that seems to train now: its process is this one."""
    story = Story(folder, time.time() - 0.9 * DAY, job="184469")
    story.begin()
    story.train(20_000)
    ENDS["preempted"](story)
    left = max(1.0, time.time() - story.now - 3700.0)
    story.begin(waited=3600.0, is_live=True)
    story.train(int(left / (1.01 * story.pace.step_seconds)), phase_every=9000)
    story.write_rows()
    story.now = time.time()
    slurm = {"job": "184469", "restarts": 1, "end": time.time() + 5040, "warning_seconds": 120}
    story.beat()
    beat = story.layout.heartbeat(story.attempt)
    beat.write_text(json.dumps({**json.loads(beat.read_text()), "slurm": slurm}))
    return story.close()


def make_many_ranks(folder: Path, ranks: int = 64) -> Path:
    """Sixty-four ranks on eight machines, with one that the others wait for."""
    story = Story(folder, time.time() - DAY, ranks=ranks, hosts=8, job="184468")
    story.pace.rows_per_attempt = 120
    for end in ("rank-died", "hung"):
        story.begin(waited=300.0 if story.attempt else 0.0)
        story.train(12_000)
        story.note("straggler", rank=3, host="gpu-04", seconds=0.1913)
        story.train(6000)
        ENDS[end](story)
    story.begin(waited=4000.0)
    story.train(9000)
    ENDS["asked"](story)
    return story.close()


def make_hostile(folder: Path) -> Path:
    """Everything that a user names is an attack."""
    metrics: dict[str, Callable[[int, random.Random], float]] = {}
    for name in (*SCRIPTS, *_ODD):
        metrics[name] = lambda step, r: math.sin(step / 900) + r.gauss(0, 0.1)
    metrics["not finite"] = lambda step, r: math.nan if step % 7 else math.inf
    metrics["huge"] = lambda step, r: 1e308 * r.random()
    metrics["tiny"] = lambda step, r: 5e-324
    metrics["constant"] = lambda step, r: 1.0
    pace = Pace(0.5, GB, 30_000, 3000, rows_per_attempt=60, metrics=metrics)
    story = Story(folder, time.time() - DAY, pace=pace, job=SCRIPTS[0])
    story.hosts = [SCRIPTS[1]]
    for number, script in enumerate((*SCRIPTS, *_ODD)):
        story.begin(SCRIPTS[number % len(SCRIPTS)], waited=30.0)
        story.train(900)
        story.note("request", kind="save", reason=script)
        story.checkpoint(script)
        story.note("save-failed", step=story.step, error=script)
        story.note("set-aside", name=script, where=script, why=script)
        story.note("straggler", rank=3, host=script, seconds=0.2)
        story.note(script, rank=script, cause=script, step=script, sentence=script)
        story.note("rule", step=story.step, reason=script, rules=[script], outcome="success")
        story.layout.output(story.attempt).write_text(f"Traceback\nValueError: {script}\n")
        story.layout.stacks(story.attempt).write_text(f'File "{script}", line 3 in {script}\n')
        story.record(
            story.layout.error(story.attempt),
            time=story.now,
            rank=0,
            step=story.step,
            type="ValueError",
            message=script,
            traceback=f"Traceback (most recent call last):\n  {script}\nValueError: {script}\n",
        )
        story.end(1, f"ValueError: {script}")
    story.write_lines(
        '\n{half a li\n[1, 2]\nnull\n{"time": "then", "event": 7}\n'
        '{"event": "death", "time": 1e400}\n'
        '{"time": NaN, "event": "checkpoint", "step": -1, "attempt": "one"}\n'
    )
    return story.close()


def make_long_journal(folder: Path, lines: int = LINES) -> Path:
    """A year of saves: a million lines, of which no two are the same."""
    began, attempts = time.time() - 360 * DAY, 40
    pace = Pace(1.0, 2 * GB, 1 << 30, 1 << 40, rows_per_attempt=60, metrics=usual_metrics())
    story = Story(folder, began, pace=pace, job="184470", hosts=2)
    ends = [ENDS[name] for name in ("preempted", "killed", "lost", "failed", "terminated")]
    pairs = lines // attempts // 2
    each = 350 * DAY / attempts / pairs  # seconds from one save to the next
    for number in range(attempts):
        story.begin(waited=1800.0 if number else 0.0)
        first, then = story.step, story.now
        steps = int(each * pairs)
        story.write_lines(_saves(story, pairs, each))
        story.train(steps, slower=(then + each * pairs - story.now) / steps / 1.01)
        story.now, story.step = then + each * pairs, first + steps
        story.checkpoint("checkpoint_every")
        ends[number % len(ends)](story)
    return story.close()


def _saves(story: Story, count: int, each: float) -> str:
    """Of each save what was asked and what was written, as json.dumps writes it."""
    attempt, lines = story.attempt, []
    asked = f'"event": "request", "kind": "save", "reason": "cron", "attempt": {attempt}'
    written = f'"attempt": {attempt}, "reason": "request", "size_bytes": 2147483648'
    for number in range(count):
        when, step = int(story.now + each * number), story.step + int(each * (number + 1))
        lines.append(
            f'{{"time": {when}.25, {asked}}}\n{{"time": {when + 1}.75, "event": "checkpoint", '
            f'"step": {step}, {written}, "seconds": 1.{number % 97}, "name": '
            f'"step-{step:012d}-a{attempt:04d}", "metrics": {{"loss": 0.{number % 997}}}}}\n'
        )
    return "".join(lines)


def _finish(story: Story) -> None:
    story.checkpoint("finished")
    story.note("finished", step=story.step, total=story.step)
    story.end(0, "closed")


def _two_metrics() -> dict[str, Callable[[int, random.Random], float]]:
    return dict(list(usual_metrics().items())[:2])


MAKERS: dict[str, Callable[[Path], Path]] = {
    "many-attempts": make_many_attempts,
    "few-attempts": make_few_attempts,
    "one-attempt": make_one_attempt,
    "without-series": make_without_series,
    "just-begun": make_just_begun,
    "live": make_live,
    "many-ranks": make_many_ranks,
    HOSTILE_FOLDER: make_hostile,
}

if __name__ == "__main__":
    for name, make in MAKERS.items():
        print(make(Path(sys.argv[1]) / name))
