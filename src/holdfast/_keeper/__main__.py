"""The keeper's entry point; the trainer starts it, see `_run/saving/launch.py`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from holdfast._keeper.decider import Alone
from holdfast._keeper.keeper import Keeper
from holdfast._keeper.protocol import KeeperConfig, RankConfig

if TYPE_CHECKING:
    from holdfast._keeper.decider import Decider


def main(config_text: str) -> None:
    config = KeeperConfig.from_json(json.loads(config_text))
    os.chdir("/")
    for descriptor in config.descriptors():
        os.set_inheritable(descriptor, False)
    decider: Decider = Alone()
    if config.ranks is not None:
        from holdfast._keeper.ranks.member import Member  # only where there are several

        decider = Member(RankConfig(**config.ranks))
    Keeper(config, decider).run()
