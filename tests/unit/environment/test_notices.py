"""What each cloud announces, read from a service that answers as its documents say."""

from __future__ import annotations

import json
import time
from email.utils import formatdate

import pytest

from holdfast._environment.cloud import aws, azure, gcp, metadata
from holdfast._environment.cloud.metadata import Metadata
from holdfast._environment.cloud.notice import CLOUDS, Closed, NoAnswer, find_cloud
from holdfast._keeper.cloud_notices import NoticeWatch, open_watch
from holdfast._settings import NOTICES
from tests.clouds import Reply, in_gmt, in_utc, of_aws, of_azure, of_gcp, serve
from tests.support import wait_until


@pytest.fixture
def amazon():
    with serve(of_aws) as cloud:
        yield cloud


@pytest.fixture
def google():
    with serve(of_gcp) as cloud:
        cloud.set(preempted="FALSE", maintenance_event="NONE")
        yield cloud


@pytest.fixture
def microsoft():
    with serve(of_azure) as cloud:
        yield cloud


def _left(notice) -> float:
    return notice.ends_at - time.monotonic()


def _on_aws(cloud):
    return aws.AwsSource(Metadata(cloud.address), "host-a")


def _on_gcp(cloud):
    return gcp.GcpSource(Metadata(cloud.address), "host-a")


def _on_azure(cloud):
    return azure.AzureSource(Metadata(cloud.address), "host-a")


# -- AWS ---------------------------------------------------------------------------------


def test_nothing_is_announced_where_aws_says_404(amazon):
    assert _on_aws(amazon).look() == []
    assert [each.method for each in amazon.asked] == ["PUT", "GET", "GET"]


@pytest.mark.parametrize("action", ["stop", "terminate"])
def test_an_interruption_of_aws_stops_with_its_deadline(amazon, action):
    amazon.set(action=json.dumps({"action": action, "time": in_utc(90)}))
    (notice,) = _on_aws(amazon).look()
    assert notice.stops
    assert 85 < _left(notice) <= 91
    assert f"host-a by AWS (spot, {action})" in notice.reason


def test_a_notice_of_aws_is_one_however_often_it_is_seen(amazon):
    amazon.set(action=json.dumps({"action": "terminate", "time": in_utc(90)}))
    source = _on_aws(amazon)
    assert source.look() == source.look()


def test_never_more_than_two_minutes_are_believed_of_aws(amazon):
    amazon.set(action=json.dumps({"action": "terminate", "time": in_utc(4000)}))
    (notice,) = _on_aws(amazon).look()
    assert 115 < _left(notice) <= 120


def test_an_interruption_that_did_not_happen_stops_nothing(amazon):
    amazon.set(action=json.dumps({"action": "terminate", "time": in_utc(-3600)}))
    assert _on_aws(amazon).look() == []


def test_the_time_left_is_told_by_the_clock_of_the_service():
    def ahead(cloud, asked):
        reply = of_aws(cloud, asked)
        return Reply(reply.status, reply.text, {"Date": formatdate(time.time() + 3600)})

    with serve(ahead) as cloud:
        cloud.set(action=json.dumps({"action": "terminate", "time": in_utc(3600 + 60)}))
        (notice,) = _on_aws(cloud).look()
    assert 50 < _left(notice) <= 61


def test_hibernation_keeps_the_memory_and_stops_nothing(amazon):
    amazon.set(action=json.dumps({"action": "hibernate", "time": in_utc(0)}))
    (notice,) = _on_aws(amazon).look()
    assert not notice.stops


def test_a_recommendation_to_rebalance_is_no_stop(amazon):
    amazon.set(rebalance=json.dumps({"noticeTime": in_utc(-3)}))
    (notice,) = _on_aws(amazon).look()
    assert (notice.what, notice.stops) == ("rebalance", False)


def test_a_token_that_has_run_out_is_replaced(amazon):
    source = _on_aws(amazon)
    source.look()
    amazon.token = "token-2"
    amazon.set(action=json.dumps({"action": "stop", "time": in_utc(90)}))
    assert len(source.look()) == 1
    assert [each.method for each in amazon.asked].count("PUT") == 2


def test_a_service_that_is_switched_off_is_not_asked_again(amazon):
    amazon.fault = 403
    watch = NoticeWatch(_on_aws(amazon))
    watch.look()
    assert watch.is_closed
    assert "switched off" in watch.deafness()
    assert watch.deafness() == ""


# -- Google ------------------------------------------------------------------------------


def test_a_preemption_by_google_leaves_half_a_minute(google):
    source = _on_gcp(google)
    assert source.look() == []
    google.set(preempted="TRUE")
    (notice,) = source.look()
    assert notice.stops
    assert 20 < _left(notice) <= 30


def test_a_preemption_is_heard_while_the_question_is_held(google):
    source = _on_gcp(google)
    source.look()
    watch = NoticeWatch(source)
    watch.start()
    wait_until(lambda: any("wait_for_change" in each.query for each in google.asked))
    began = time.monotonic()
    google.set(preempted="TRUE")
    wait_until(lambda: watch.standing, what="the preemption")
    watch.stop()
    assert time.monotonic() - began < 4  # and not when the question would have been over


def test_a_maintenance_that_ends_the_machine_stops(google, monkeypatch):
    monkeypatch.setattr(gcp, "_HELD_SECONDS", 1)
    source = _on_gcp(google)
    source.look()
    google.set(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
    (notice,) = source.look()
    assert notice.stops
    assert 45 < _left(notice) <= 60


def test_a_maintenance_that_was_announced_before_is_no_reason_to_leave_at_once(google):
    google.set(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
    (notice,) = _on_gcp(google).look()
    assert not notice.stops
    assert "is near" in notice.reason


def test_a_live_migration_is_no_stop(google):
    google.set(maintenance_event="MIGRATE_ON_HOST_MAINTENANCE")
    (notice,) = _on_gcp(google).look()
    assert (notice.what, notice.stops) == ("migration", False)


def test_whoever_is_not_google_is_not_believed(microsoft):
    with pytest.raises(NoAnswer, match="another service"):
        _on_gcp(microsoft).look()


# -- Azure -------------------------------------------------------------------------------


def _event(kind: str, ahead: float = 60, **more) -> dict:
    event = {
        "EventId": "C7061BAC",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["west-0", "west-1"],
        "NotBefore": in_gmt(ahead),
        "EventSource": "Platform",
    }
    return {**event, **more}


def _announce(cloud, *events) -> None:
    cloud.set(events=json.dumps({"DocumentIncarnation": 2, "Events": list(events)}))


@pytest.mark.parametrize("kind", ["Preempt", "Reboot", "Redeploy", "Terminate"])
def test_an_event_of_azure_stops_with_its_deadline(microsoft, kind):
    _announce(microsoft, _event(kind))
    (notice,) = _on_azure(microsoft).look()
    assert notice.stops
    assert 55 < _left(notice) <= 61


def test_a_freeze_is_no_stop(microsoft):
    _announce(microsoft, _event("Freeze"))
    (notice,) = _on_azure(microsoft).look()
    assert not notice.stops


def test_events_of_other_machines_are_theirs(microsoft):
    _announce(microsoft, _event("Reboot", Resources=["west-1"]))
    assert _on_azure(microsoft).look() == []


def test_an_event_that_is_withdrawn_stands_no_more(microsoft):
    source = _on_azure(microsoft)
    _announce(microsoft, _event("Reboot", 900))
    assert len(source.look()) == 1
    _announce(microsoft)
    assert source.look() == []


def test_an_event_that_begins_is_due_now(microsoft):
    source = _on_azure(microsoft)
    _announce(microsoft, _event("Redeploy", 900))
    source.look()
    _announce(microsoft, _event("Redeploy", EventStatus="Started", NotBefore=""))
    (notice,) = source.look()
    assert _left(notice) <= 0


def test_an_event_that_had_begun_before_the_run_is_of_the_last_life(microsoft):
    _announce(microsoft, _event("Reboot", EventStatus="Started", NotBefore=""))
    source = _on_azure(microsoft)
    assert source.look() == []
    assert source.look() == []


# -- what goes wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 429, "garbage", "redirect", "words", "hang", "drip"])
@pytest.mark.parametrize(("answer", "make"), [(of_aws, _on_aws), (of_gcp, _on_gcp)])
def test_whatever_else_comes_is_no_answer_and_takes_no_time(monkeypatch, answer, make, fault):
    monkeypatch.setattr(metadata.Metadata.ask, "__kwdefaults__", {"method": "GET", "seconds": 0.3})
    monkeypatch.setattr(gcp, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(gcp.GcpSource._ask, "__defaults__", (0.3,))
    with serve(answer) as cloud:
        cloud.set(preempted="FALSE", maintenance_event="NONE")
        cloud.fault = fault
        source, began = make(cloud), time.monotonic()
        with pytest.raises(NoAnswer) as caught:
            source.look()
        assert time.monotonic() - began < 5
        assert not isinstance(caught.value, Closed)
        assert all(each.path != "/login" for each in cloud.asked)


@pytest.mark.parametrize("fault", [500, "garbage", "words"])
def test_azure_is_read_with_the_same_care(microsoft, fault):
    source = _on_azure(microsoft)
    microsoft.fault = fault
    with pytest.raises(NoAnswer):
        source.look()
    microsoft.fault = ""
    assert source.look() == []


@pytest.mark.parametrize(
    "text",
    ["[]", '{"action": 3}', '{"action": "stop", "time": "soon"}', '{"action": "stop"}', "null"],
)
def test_an_announcement_that_is_none_is_no_answer(amazon, text):
    amazon.set(action=text)
    with pytest.raises(NoAnswer):
        _on_aws(amazon).look()


def test_silence_takes_nothing_back(amazon):
    amazon.set(action=json.dumps({"action": "stop", "time": in_utc(90)}))
    watch = NoticeWatch(_on_aws(amazon))
    watch.look()
    amazon.fault = 500
    watch.look()
    assert len(watch.standing) == 1
    assert watch.trouble == "status 500"


def test_no_proxy_is_asked(amazon, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert _on_aws(amazon).look() == []


# -- where we are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"bios_vendor": "Amazon EC2"}, "aws"),
        ({"bios_version": "4.11.amazon"}, "aws"),
        ({"product_name": "Google Compute Engine\n"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation"}, None),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge"}, None),
        ({}, None),
    ],
)
def test_the_firmware_tells_which_cloud_it_is(tmp_path, files, cloud):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_cloud(tmp_path, tmp_path / "xen") == cloud


def test_an_older_machine_of_aws_tells_by_its_hypervisor(tmp_path):
    (tmp_path / "xen").write_text("ec2e1916-9099-7caf-fd21-012345abcdef\n")
    assert find_cloud(tmp_path / "none", tmp_path / "xen") == "aws"


def test_nobody_is_asked_outside_a_cloud():
    assert open_watch("off", "host-a") is None
    assert open_watch("elsewhere", "host-a") is None


def test_each_cloud_can_be_chosen_and_asked():
    assert ("auto", *CLOUDS, "off") == NOTICES
    for cloud in CLOUDS:
        watch = open_watch(cloud, "host", "http://127.0.0.1:1")
        assert watch is not None
        assert watch.cloud
