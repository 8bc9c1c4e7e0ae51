"""The keeper's messages: their bytes stay as they are, and each kind has one class a direction."""

from __future__ import annotations

import json

import pytest

from holdfast._keeper import protocol
from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import RunLayout


def _classes(direction: type[protocol.Message]) -> list[type[protocol.Message]]:
    return list(direction._kinds.values())


@pytest.mark.parametrize(
    ("direction", "count"),
    [
        (protocol.FromTrainer, 19),
        (protocol.ToTrainer, 25),
        (protocol.ToHub, 22),
        (protocol.FromHub, 18),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_kind_is_defined_twice_in_a_direction(direction, count):
    defined = [
        each
        for each in vars(protocol).values()
        if isinstance(each, type) and issubclass(each, direction) and each is not direction
    ]
    assert len(defined) == len({each.kind for each in defined}) == count
    assert set(defined) == set(_classes(direction))


def test_only_given_fields_are_sent_in_the_order_of_the_call():
    message = protocol.WriteDurable(order=None, step=4, mark=8)
    assert (message.kind, message.values()) == ("durable", {"order": None, "step": 4, "mark": 8})
    assert (message.sequence, message.seconds) == (0, 0.0)


def test_a_message_without_a_required_field_is_not_made():
    with pytest.raises(TypeError, match="RankAt without \\['mark'\\]"):
        protocol.RankAt(round=3)


def test_a_message_is_read_by_its_kind_and_direction():
    data = json.loads('{"kind": "waits", "order": 3}')
    message = protocol.ToTrainer.from_json(data)
    assert isinstance(message, protocol.WriteWaits)
    assert message.order == 3
    data = json.loads('{"kind": "waits", "waited": 0.5, "step_seconds": 1.5}')
    message = protocol.FromTrainer.from_json(data)
    assert isinstance(message, protocol.CollectiveWaits)
    assert isinstance(message, protocol.ToHub)  # passed on as it is
    assert data == {"kind": "waits", "waited": 0.5, "step_seconds": 1.5}


def test_an_unknown_kind_is_no_message():
    assert protocol.FromHub.from_json({"kind": "of a later version"}) is None
    assert protocol.FromHub.from_json({}) is None


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
    assert found.values() == config.values()
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
