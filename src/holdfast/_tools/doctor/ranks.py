"""Whether the ranks of a command reach each other: they meet for real, and add up one number."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from holdfast._run.ranks.world import name_ranks
from holdfast._text import count, one_line
from holdfast._tools.doctor.check import Check, slow
from holdfast._tools.doctor.signals.chain import Chain, ChainError, Probe
from holdfast._tools.doctor.signals.target import find_target

SECONDS = 60.0
_POLL_SECONDS = 0.05
_BACKEND = re.compile(r"init_process_group\(\s*(?:backend\s*=\s*)?[\"']([\w:,]+)[\"']")
_TIMEOUT = re.compile(r"\bwithin \d|tim(?:e|ed)[ -]?out", re.IGNORECASE)
_check = partial(Check, "all_reduce")


def check_ranks(
    command: Sequence[str], *, folder: Path | None = None, seconds: float = SECONDS
) -> list[Check]:
    """Start the ranks for real, with a probe in the place of each, and let them meet.

    Only for a command whose training a signal path has reached.
    """
    target = find_target(command, folder or Path.cwd())
    texts = [target.read(name) or "" for name in target.names]
    backend = next((found[1] for text in texts if (found := _BACKEND.search(text))), "")
    began = time.monotonic()
    try:
        with Chain(target, "ranks", seconds=seconds / 2, backend=backend) as chain:
            deadline = chain.deadline(seconds)
            chain.await_probes(seconds / 2)
            while chain.process.poll() is None and not deadline.is_over():
                chain.guard()
                if all(each.events("done") or each.events("error") for each in chain.probes()):
                    break
                time.sleep(_POLL_SECONDS)
            check = judge_ranks(chain.probes(), time.monotonic() - began)
            late = slow(check.name, check.found, deadline) if check.data.get("is_late") else None
            return [late or check]
    except ChainError as error:
        remedy = error.remedy
        if re.search(r"--?nnodes[= ]+(?!1\b)\d", " ".join(command)):
            remedy = "start the same on every node, at the same time, or by srun"
        return [_check(error.state, error.found, remedy)]


def judge_ranks(probes: Sequence[Probe], seconds: float) -> Check:
    """What the ranks have reported."""
    # A doctor in each task, or on each node, sees only its own ranks.
    size = max(len(probes), *(one.world or 1 for one in probes))
    if size < 2:
        return _check("ok", "one process: there is nothing to reduce")
    errors = [(one.rank, each) for one in probes for each in one.events("error")]
    if errors:
        # The first rank that fails ends the connections of all others.
        rank, first = min(errors, key=lambda each: each[1]["time"])
        if first["kind"] == "import":
            remedy = "install it into the environment that trains, or choose another"
            return _check("warn", f"not tried: {one_line(first['text'])}", remedy)
        fact, _, step = (one_line(each).rstrip(".") for each in first["text"].partition("\n"))
        remedy = "see that the ranks reach each other: holdfast doctor on each host"
        return _check(
            "fail",
            f"rank {rank} of {size}: {fact}",
            step or remedy,
            {"rank": rank, "error": first["text"], "is_late": bool(_TIMEOUT.search(fact))},
        )
    met = [one.rank for one in probes if one.events("met")]
    silent = [one.rank for one in probes if not one.events("done")]
    if silent:
        is_met = len(met) == len(probes)
        stage = "met, and did not end their all_reduce" if is_met else "did not meet"
        return _check(
            "fail",
            f"{name_ranks(silent)} of {size} {stage} within {seconds:.0f} s",
            "see that no firewall is between them; NCCL_DEBUG=INFO tells what nccl waits for",
            {"silent": silent, "is_late": True},
        )
    if not met:
        found = f"{size} processes without RANK and WORLD_SIZE: each trains by itself"
        return _check("ok", found)
    hosts = len({one.here["host"] for one in probes})
    where = f"on {count(hosts, 'host')}"
    if size > len(probes):
        where = f"({len(probes)} of them seen here)"
    backend = next((each.get("backend") for each in probes[0].events("met")), None)
    data = {"ranks": size, "hosts": hosts, "backend": backend}
    return _check("ok", f"{size} ranks {where} meet, and their sum is right", "", data)
