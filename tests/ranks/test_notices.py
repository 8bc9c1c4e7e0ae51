"""A notice for one machine stops the ranks on all of them, at one step."""

from __future__ import annotations

import json

from tests.clouds import in_gmt, of_azure, serve
from tests.support import wait_until


def _event(kind: str) -> str:
    event = {"EventId": "E1", "EventType": kind, "EventStatus": "Scheduled"}
    return json.dumps({"Events": [{**event, "Resources": [], "NotBefore": in_gmt(60)}]})


def test_a_notice_for_one_host_stops_all_ranks(jobs, undisturbed):
    with serve(of_azure) as cloud:
        # The machine of rank 1 only: the others belong to no cloud.
        near = {"HOLDFAST_NOTICES": "azure", "HOLDFAST_NOTICES_ADDRESS": cloud.address}
        far = {"HOLDFAST_NOTICES": "off"}
        job = jobs.start(2, total=400, pauses=0.02, environment={0: far, 1: near})
        job.wait_for_step(8)
        wait_until(lambda: cloud.asked, what="a question to the cloud")
        cloud.set(events=_event("Preempt"))
        assert job.statuses() == [75, 75], job.outputs
    (step,) = set(job.steps_at_the_end())
    jobs.check_checkpoint(step, 2)
    assert "by Azure (spot): all ranks finish step" in job.said
    (noted,) = jobs.events("notice")
    assert (noted["rank"], noted["what"]) == (1, "preempt")
    again = jobs.start(2, total=400, pauses=0.0, environment={0: far, 1: far})
    assert again.hashes() == undisturbed(2, total=400)
    assert set(again.started_at()) == {step}
    jobs.check_nothing_left()


def test_of_several_ranks_on_one_machine_one_asks(jobs):
    with serve(of_azure) as cloud:
        near = {"HOLDFAST_NOTICES": "azure", "HOLDFAST_NOTICES_ADDRESS": cloud.address}
        places = {rank: {**near, "LOCAL_RANK": str(rank)} for rank in (0, 1)}
        job = jobs.start(2, total=4000, pauses=0.02, environment=places)
        job.wait_for_step(4)
        wait_until(lambda: len(cloud.asked) > 2, what="questions to the cloud")
        assert [keeper_env(job, rank) for rank in (0, 1)] == ["0", "1"]
        cloud.set(events=_event("Freeze"))
        job.wait_for("the next step is made durable, and the run goes on", rank=0)
        (made,) = wait_until(lambda: jobs.events("checkpoint"), what="the checkpoint")
        assert made["reason"] == "notice: freeze"
        assert len(jobs.events("notice")) == 1


def keeper_env(job, rank: int) -> str:
    return str(job.keeper(rank).environ()["LOCAL_RANK"])
