"""Whether the ranks of a command reach each other, and how fast: by a real all_reduce."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast._check.chain import Chain, ChainError
from holdfast._check.doctor_finding import Check
from holdfast._check.probed import Probe
from holdfast._check.reduce_words import judge_ranks
from holdfast._check.target import Target, find_target
from holdfast._ranks.address import port_owner
from holdfast._slurm.torchrun import starts_torchrun
from holdfast._watch.tree import is_known

SECONDS = 60.0
_LOOK_SECONDS = 0.05
_NAME = "all_reduce"
_USUAL_PORT = 29500
_ENDPOINT = re.compile(r"--?rdzv[-_]endpoint(?:=|\s+)(\S*)")
_PORT = re.compile(r"--?master[-_]port(?:=|\s+)(\d+)")
_BACKEND = re.compile(r"init_process_group\(\s*(?:backend\s*=\s*)?[\"']([\w:,]+)[\"']")


def check_ranks(
    command: Sequence[str], *, folder: Path | None = None, seconds: float = SECONDS
) -> list[Check]:
    """Start the ranks for real, with a probe in the place of each, and let them reduce."""
    if not sys.platform.startswith("linux") or not is_known():
        return [Check(_NAME, "warn", "not tried: it needs Linux and its /proc")]
    where = folder or Path.cwd()
    target = find_target(command, where)
    keeps_out = target.clears or target.elsewhere or target.loses_path
    if keeps_out or not (target.names or target.scripts):
        return []  # the test of signals has said why
    taken = _check_port(command)
    if taken is not None:
        return [taken]
    began = time.monotonic()
    try:
        probes = _follow(command, target, where, seconds)
    except ChainError as error:
        return [Check(_NAME, error.state, error.found, _remedy(command, error))]
    return judge_ranks(probes, time.monotonic() - began)


def _follow(command: Sequence[str], target: Target, folder: Path, seconds: float) -> list[Probe]:
    deadline = time.monotonic() + seconds
    backend = _backend_of(target, folder)
    chain = Chain(command, target, "ranks", seconds=seconds / 2, folder=folder, backend=backend)
    with chain:
        chain.await_probes(seconds / 2)
        while True:
            probes = chain.probes()
            chain.guard()
            is_over = all(each.events("done") or each.events("error") for each in probes)
            ended = chain.process.poll() is not None
            if is_over or ended or time.monotonic() > deadline:
                return chain.probes()
            time.sleep(_LOOK_SECONDS)


def _backend_of(target: Target, folder: Path) -> str:
    """The one that the script names literally; empty if it names none."""
    for name in target.names:
        with contextlib.suppress(OSError, ValueError):
            found = _BACKEND.search((folder / name).read_text(errors="replace"))
            if found:
                return found[1]
    return ""


def _check_port(command: Sequence[str]) -> Check | None:
    """Whether somebody has the port at which torchrun's ranks are to meet on this host."""
    words = " ".join(command)
    if not starts_torchrun(command) or "--standalone" in words:
        return None
    endpoint, given = _ENDPOINT.search(words), _PORT.search(words)
    port = int(given[1]) if given else _USUAL_PORT
    if endpoint is not None:
        host, _, text = endpoint[1].rpartition(":")
        if not text.isdigit() or host not in ("localhost", "127.0.0.1", ""):
            return None  # the first of the nodes hosts it, and that may be another one
        port = int(text)
    if port == 0 or _is_free(port):
        return None
    return Check(
        "rendezvous port",
        "fail",
        f"port {port}, at which the ranks are to meet, is in use by {port_owner(port)}",
        f"torchrun --standalone finds a free one; or give another: --master-port={port + 1}",
        {"port": port},
    )


def _is_free(port: int) -> bool:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def _remedy(command: Sequence[str], error: ChainError) -> str:
    if re.search(r"--?nnodes[= ]+(?!1\b)\d", " ".join(command)):
        return "start the same on every node, at the same time, or by srun"
    return error.remedy
