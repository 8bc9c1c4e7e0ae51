"""What a failing run says itself, before Python shows its traceback.

Only where it knows better than the traceback: that the disk was full where torch speaks of a
position in a file, or which worker died where a file was not found.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout
from holdfast._say import say


def say_verdict(error: BaseException, words: dict[str, Any], folder: Path) -> None:
    """Say why the run fails, if that can be told and the exception does not tell it itself."""
    if words and not isinstance(error, HoldfastError):  # ours are sentences already
        with contextlib.suppress(Exception):  # the exception itself must come through
            _say_verdict(words, folder)


def _say_verdict(words: dict[str, Any], folder: Path) -> None:
    # They are needed only where something has gone wrong.
    from holdfast._why.evidence import Evidence, RankEvidence
    from holdfast._why.gather import gather_run
    from holdfast._why.judge import judge
    from holdfast._why.verdict import Cause

    rank, attempt = words["rank"], words["attempt"]
    mine = RankEvidence(rank=rank, error=words, host=words["host"], step=words["step"])
    verdict = judge(Evidence(subject=str(folder), kind="run", ranks=[mine], attempt=attempt))
    is_victim = verdict.cause in (Cause.PEER_LOST, Cause.COLLECTIVE_TIMEOUT)
    if is_victim and words["ranks"] > 1:
        # What ended first is the news. If it could speak, it has; if not, one speaks for all.
        if rank:
            return
        evidence = gather_run(folder, attempt)
        evidence.is_live = False  # but for these words
        verdict = judge(evidence)
        culprit = verdict.rank
        if culprit not in (None, rank) and _has_failed(folder, attempt, culprit):
            return
    better = {
        *(Cause.CUDA_OOM, Cause.CUDA_ERROR, Cause.DISK_FULL, Cause.SHM_FULL, Cause.WORKER_DIED),
        *(Cause.OOM_WORKER, Cause.OOM_CGROUP, Cause.OOM_MACHINE, Cause.PEER_LOST, Cause.KILLED),
        *(Cause.COLLECTIVE_TIMEOUT, Cause.RENDEZVOUS, Cause.ENVIRONMENT, Cause.LYING_STATUS),
        *(Cause.SEGFAULT, Cause.ABORT, Cause.BUS_ERROR, Cause.CXX_EXCEPTION, Cause.TERMINATED),
    }
    if verdict.cause not in better:
        return
    say(verdict.sentence, each=not is_victim)
    if words.get("is_recorded"):
        say(f"more: holdfast why {folder}", each=not is_victim)
    elif verdict.advice:  # a full disk has not taken the record either
        say(verdict.advice[0], each=not is_victim)


def _has_failed(folder: Path, attempt: int, rank: int) -> bool:
    """Whether a rank has recorded an exception, and so has said itself what there is to say."""
    return "type" in read_json(RunLayout(folder).error(attempt, rank))
