"""The keeper's messages: each is a call, and its receiver takes what is sent."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast._keeper import protocol
from holdfast._keeper.hangs.judge import HangJudge
from holdfast._keeper.hangs.monitor import HangMonitor
from holdfast._keeper.ranks.agent import RankAgent
from holdfast._keeper.ranks.agreement import Agreement
from holdfast._keeper.ranks.commits import Commits
from holdfast._keeper.ranks.comparison import Comparison
from holdfast._keeper.ranks.hub import Hub
from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import RunLayout

HUB = (Hub, Agreement, Commits, Comparison)


def _fields(function: Callable[..., Any]) -> set[str]:
    named = inspect.signature(function).parameters.values()
    return {each.name for each in named if each.kind is not each.VAR_KEYWORD}


def _kinds(direction: type) -> dict[str, Callable[..., Any]]:
    return {name: each for name, each in vars(direction).items() if inspect.isfunction(each)}


_RECEIVERS = [(protocol.FromHub, (RankAgent, HangMonitor)), (protocol.ToHub, (HangJudge, *HUB))]


@pytest.mark.parametrize(("direction", "receivers"), _RECEIVERS, ids=["from the hub", "to it"])
def test_each_message_has_one_receiver_that_takes_its_fields(direction, receivers):
    kinds = {name: each for name, each in _kinds(direction).items() if not name.startswith("_")}
    assert len(kinds) >= 14
    for kind, sent in kinds.items():
        (receiver,) = (each for each in receivers if hasattr(each, f"on_{kind}"))
        taken = getattr(receiver, f"on_{kind}")
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(taken).parameters.values()):
            assert _fields(sent) - {"self"} <= _fields(taken), kind


def test_only_given_fields_are_sent():
    sent = []
    tell: protocol.ToTrainer = protocol.sender(lambda kind, **fields: sent.append((kind, fields)))
    tell.durable(order=None, step=4, mark=8)
    tell.short_warning(warning=1.0, needed=2.0)
    assert sent == [
        ("durable", {"order": None, "step": 4, "mark": 8}),
        ("short-warning", {"warning": 1.0, "needed": 2.0}),
    ]


def test_a_message_calls_the_method_of_its_name_and_a_key_is_a_tuple_again():
    class Receiver:
        def on_restart_clock(self, key: tuple[int, int]) -> None:
            calls.append(key)

    calls: list[tuple[int, int]] = []
    assert protocol.receive_call(Receiver(), "restart-clock", key=[3, 8])
    assert calls == [(3, 8)]


def test_an_unknown_kind_has_no_receiver():
    assert not protocol.receive_call(object(), "of a later version")


def test_a_keeper_reads_the_configuration_that_it_is_started_with(tmp_path):
    policy = Policy(
        layout=RunLayout(tmp_path),
        run_id="r",
        attempt=3,
        line={1: 40, 2: None},
        keep_last=2,
        best=("loss", "min"),
        version="1",
        hang_seconds=5.0,
    )
    config = protocol.KeeperConfig(
        policy=policy,
        grace_seconds=None,
        numbers=[15, 2],
        trainer_pid=7,
        counters={"oom": 1},
        job=None,
        ranks=None,
        link=3,
        signals=4,
        control=5,
        stacks=None,
        pidfd=6,
    )
    found = protocol.KeeperConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert found == config
    assert found.descriptors() == [3, 4, 5, 6]


def test_a_keeper_does_not_wait_for_a_message_that_is_taken_already():
    """Its loop finds one ready, and receives all that is pending before it comes to it."""
    trainer, keeper = protocol.socket_pair()
    protocol.send(trainer, "goodbye")
    assert protocol.receive(keeper, waits=False) == ({"kind": "goodbye"}, [])
    with pytest.raises(BlockingIOError):
        protocol.receive(keeper, waits=False)
    trainer.close()
    assert protocol.receive(keeper, waits=False) is None
    keeper.close()
