"""The keeper's entry point; the trainer starts it, see `_run/saving/launch.py`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from holdfast._environment.slurm.job import Job
from holdfast._keeper.alone import Alone
from holdfast._keeper.decider import Decider
from holdfast._keeper.job import JobWatch
from holdfast._keeper.keeper import Keeper
from holdfast._keeper.trainer import Ends
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import ControlPage


def main(config_text: str) -> None:
    config = json.loads(config_text)
    os.chdir("/")
    link = socket.socket(fileno=config["link"])
    for name in ("link", "signals", "control", "stacks", "pidfd"):
        if config[name] is not None:
            os.set_inheritable(config[name], False)
    policy = Policy(
        layout=RunLayout(Path(config["folder"])),
        run_id=config["run_id"],
        attempt=config["attempt"],
        line={int(attempt): step for attempt, step in config["line"].items()},
        keep_last=config["keep_last"],
        best=None if config["best"] is None else (config["best"][0], config["best"][1]),
        version=config["version"],
        rank=config["rank"],
        size=config["size"],
        hang_seconds=config["hang"][0],
        hang_restarts=config["hang"][1],
        mirror=config["mirror"][0],
        mirror_keep_last=config["mirror"][1],
        notices=config["notices"],
    )
    ends = Ends(
        link=link,
        signals=config["signals"],
        control=ControlPage(config["control"]),
        pidfd=config["pidfd"],
        trainer_pid=config["trainer_pid"],
        stacks=config["stacks"],
        counters=config["counters"],
    )
    numbers, grace = frozenset(config["numbers"]), config["grace"]
    job = None
    if config["job"] is not None and policy.rank == 0:  # one speaks with SLURM, for all
        found, limit = Job(**config["job"]), config["requeue_limit"]
        job = JobWatch(found, policy.layout, policy.attempt, limit)
    decider: Decider = Alone()
    if config["crew"] is not None:
        from holdfast._keeper.protocol import RankConfig
        from holdfast._keeper.ranks.member import Member  # only where there are several

        decider = Member(RankConfig(**config["crew"]))
    Keeper(policy, ends, numbers, grace, job, decider).run()
