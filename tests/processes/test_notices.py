"""A notice of the cloud stops a run in time, and whoever starts it again loses nothing."""

from __future__ import annotations

import json

import pytest

from tests.clouds import in_gmt, in_utc, of_aws, of_azure, of_gcp, serve
from tests.support import (
    Trainer,
    checkpoint_steps,
    environment,
    journal_events,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

_LONG = ("--total", 100000, "--sleep", 0.005)


def _at(cloud, name: str) -> dict[str, str]:
    return environment(HOLDFAST_NOTICES=name, HOLDFAST_NOTICES_ADDRESS=cloud.address)


def _event(kind: str, ahead: float, **more) -> str:
    event = {"EventId": "E1", "EventType": kind, "EventStatus": "Scheduled"}
    event |= {"Resources": ["west-0"], "NotBefore": in_gmt(ahead), **more}
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


@pytest.fixture
def started(tmp_path):
    """Starts a training in a cloud, once its keeper has asked for notices."""
    made: list[Trainer] = []

    def start(cloud, name, *arguments):
        trainer = Trainer(tmp_path / "run", *arguments, env=_at(cloud, name))
        made.append(trainer)
        trainer.ready()
        wait_until(lambda: cloud.asked, what="a question to the cloud")
        return trainer

    yield start
    for each in made:
        each.end()
    wait_for_keeper_gone(tmp_path / "run")


# Over 5 s: two lives, and the keeper asks for notices at its own pace.
def test_a_preemption_stops_the_run_and_the_next_life_goes_on_to_the_same_bits(started, tmp_path):
    folder = tmp_path / "run"
    with serve(of_gcp) as cloud:
        cloud.set(preempted="FALSE", maintenance_event="NONE")
        trainer = started(cloud, "gcp", "--total", 1000, "--sleep", 0.05)
        cloud.set(preempted="TRUE")
        assert trainer.wait() == 75, trainer.output
    assert "by Google is in" in trainer.output
    (noted,) = journal_events(folder, "notice")
    assert (noted["cloud"], noted["what"], noted["acts"]) == ("Google", "preemption", "stop")
    (stop,) = journal_events(folder, "stop")
    assert stop["status"] == 75
    assert checkpoint_steps(folder)[-1] == stop["step"]
    again = Trainer(folder, "--total", 1000)
    assert again.state_hash() == train_to_the_end(tmp_path / "whole", "--total", 1000)
    assert again.ready() == stop["step"]


# Over 5 s: the keeper asks for notices at its own pace.
def test_an_interruption_of_a_spot_instance_stops_the_run(started, tmp_path):
    with serve(of_aws) as cloud:
        trainer = started(cloud, "aws", *_LONG)
        cloud.set(action=json.dumps({"action": "terminate", "time": in_utc(120)}))
        assert trainer.wait() == 75, trainer.output
    assert "(spot, terminate) is in 1" in trainer.output


def test_a_step_that_does_not_end_in_time_leaves_the_newest_snapshot(started, tmp_path):
    folder, settings = tmp_path / "run", {"max_overhead": 1.0, "checkpoint_every": "10h"}
    more = ("--settings", json.dumps(settings), "--hold-at", 40, "--gate", tmp_path / "gate")
    with serve(of_azure) as cloud:
        trainer = started(cloud, "azure", *_LONG, *more)
        trainer.wait_for("holding")
        cloud.set(events=_event("Preempt", 4))
        wait_until(lambda: journal_events(folder, "checkpoint"), what="a checkpoint")
        trainer.kill()
        trainer.wait()
    (made,) = journal_events(folder, "checkpoint")[:1]
    assert made["reason"] == "deadline"
    assert made["step"] >= 30


def test_an_event_far_ahead_is_said_and_the_run_goes_on_until_it_is_near(started, tmp_path):
    folder = tmp_path / "run"
    with serve(of_azure) as cloud:
        trainer = started(cloud, "azure", *_LONG)
        cloud.set(events=_event("Redeploy", 900))
        trainer.wait_for("the run leaves 150 s before")
        assert journal_events(folder, "stop") == []
        cloud.set(events=_event("Redeploy", 140))
        assert trainer.wait() == 75, trainer.output
    assert [each["acts"] for each in journal_events(folder, "notice")] == ["later"]


def test_a_recommendation_to_rebalance_saves_once_and_stops_nothing(started, tmp_path):
    folder = tmp_path / "run"
    with serve(of_azure) as cloud:
        trainer = started(cloud, "azure", *_LONG)
        cloud.set(events=_event("Freeze", 900))
        trainer.wait_for("is made durable, and the run goes on")
        (made,) = wait_until(lambda: journal_events(folder, "checkpoint"), what="a checkpoint")
        assert made["reason"] == "notice: freeze"
        heartbeat = folder / "attempts/0001/heartbeat.json"
        wait_until(
            lambda: json.loads(heartbeat.read_text()).get("step", 0) > made["step"],
            what="a later step",
        )
        assert journal_events(folder, "stop") == []


def test_a_service_that_hangs_slows_neither_start_nor_end(tmp_path):
    with serve(of_azure) as cloud:
        cloud.fault = "hang"
        # The first question may take minutes, and nobody waits for its answer.
        trainer = Trainer(tmp_path / "run", "--total", 200, env=_at(cloud, "azure"))
        trainer.state_hash()
        wait_for_keeper_gone(tmp_path / "run")
        assert len(cloud.asked) == 1


def test_a_service_that_refuses_is_told_once_and_the_training_ends_well(tmp_path):
    with serve(of_azure) as cloud:
        cloud.fault = 403
        trainer = Trainer(tmp_path / "run", *_LONG, env=_at(cloud, "azure"))
        try:
            trainer.wait_for("Azure does not tell whether this machine is about to end")
            trainer.wait_for("Settings(notices='off')")
        finally:
            trainer.end()
    wait_for_keeper_gone(tmp_path / "run")
    assert len(cloud.asked) == 1
