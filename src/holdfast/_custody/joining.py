"""One rank's keeper takes its place among the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from holdfast._custody.crew import Crew
from holdfast._custody.orders import Custody
from holdfast._errors import RanksError
from holdfast._keeper.among import CrewConfig
from holdfast._keeper.keep import Policy
from holdfast._ranks.party import Party, make_key
from holdfast._ranks.world import addresses
from holdfast._say import say


def join_crew(
    party: Party,
    policy: Policy,
    grace_seconds: float | None,
    numbers: tuple[int, ...],
    hear: Callable[[dict[str, Any]], None],
) -> tuple[Custody, Crew]:
    """Start the keepers: that of rank 0 first, since the others connect to it."""
    if sys.platform != "linux":
        raise RanksError(
            "a run of several ranks needs keepers, and those need Linux.\n"
            "Train with one process here, or on Linux."
        )
    heard: list[dict[str, Any]] = []  # until there is somebody to hear it

    def listen(message: dict[str, Any]) -> None:
        if not crews:
            heard.append(message)
        elif message["kind"] in ("port", "joined"):
            crews[0].hear(message)
        else:
            hear(message)

    crews: list[Crew] = []
    told: list[Any] = []
    if party.rank == 0:
        make_key(policy.layout)
    else:
        told = party.exchange("hub", None)
    launcher = party.launcher
    config = CrewConfig(
        hub=[] if party.rank == 0 else [(a, told[0]["port"]) for a in told[0]["addresses"]],
        is_one_host=party.is_one_host,
        launcher=None if launcher is None else launcher.process,
        launcher_name="" if launcher is None else launcher.name,
        restarts=launcher is not None and launcher.restarts,
    )
    custody = Custody(policy, grace_seconds, numbers, listen, asdict(config))
    crew = Crew(party.rank, party.size, custody)
    crews.append(crew)
    for message in heard:
        crew.hear(message)
    if party.rank == 0:
        port = crew.wait_for_port()
        if port is None:
            raise RanksError(
                "the keeper of rank 0 did not start.\n"
                f"See {policy.layout.keeper_log(policy.attempt)}"
            )
        where = ["127.0.0.1"] if party.is_one_host else addresses()
        party.exchange("hub", {"port": port, "addresses": where})
    if not crew.wait_until_joined(party.look):
        raise RanksError(
            f"the keeper of rank {party.rank} cannot reach that of rank 0 at "
            f"{', '.join(f'{host} port {port}' for host, port in config.hub) or 'any address'}.\n"
            "Open the way between the hosts for any port, or name an address of rank 0's host "
            "that the others reach in HOLDFAST_ADDRESS there."
        )
    return custody, crew


def prepare_ranks(state: Mapping[str, Any], crew: Crew) -> None:
    """Let a framework's own ranks begin alike in every life, and see who waits for whom."""
    if "torch.nn.parallel.distributed" not in sys.modules:
        return
    from holdfast.torch import ddp

    modules = ddp.find_ddp(state)
    for sentence in ddp.settle_buckets(modules):
        say(sentence)
    if modules:
        crew.watch(ddp.WaitMeter(modules))
