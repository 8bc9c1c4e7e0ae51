"""The keeper's entry point; the trainer starts it, see `_run/saving/launch.py`."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING

from holdfast._keeper.decider import Alone
from holdfast._keeper.keeper import Keeper
from holdfast._keeper.protocol import KeeperConfig, RankConfig
from holdfast._keeper.trainer import TrainerLink
from holdfast._store.memory.control import ControlPage

if TYPE_CHECKING:
    from holdfast._keeper.decider import Decider


def main(config_text: str) -> None:
    config = KeeperConfig.from_json(json.loads(config_text))
    os.chdir("/")
    for descriptor in config.descriptors():
        os.set_inheritable(descriptor, False)
    link = TrainerLink(
        messages=socket.socket(fileno=config.link),
        signals=config.signals,
        control=ControlPage(config.control),
        pidfd=config.pidfd,
        trainer_pid=config.trainer_pid,
        stacks=config.stacks,
        counters=config.counters,
    )
    decider: Decider = Alone()
    if config.ranks is not None:
        from holdfast._keeper.ranks.member import Member  # only where there are several

        decider = Member(RankConfig(**config.ranks))
    Keeper(config, link, decider).run()
