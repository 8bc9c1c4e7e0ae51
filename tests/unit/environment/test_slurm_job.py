"""What the environment and scontrol say about a job, and what follows."""

from __future__ import annotations

import pytest

from holdfast._environment.slurm.controller import EndingCause, JobFacts, parse_job, why_terminated
from holdfast._environment.slurm.job import (
    Job,
    find_job,
    first_host,
    is_lonely_task,
    rank_environment,
)

LINE = (
    "JobId=12 JobName=a JobState=CANCELLED Restarts=9 UserId=me(7) GroupId=me(7) JobState=RUNNING "
    "Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:03 TimeLimit=00:02:00 StartTime=1794784800 EndTime=1794784920 Deadline=N/A "
    "Command=/home/me/Requeue=0 StdOut=/home/me/Restarts=8\n"
)
RUNNING = JobFacts("12", "RUNNING", "None", 0, 1e9, False, True, True)
TASK = {
    **{"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "7", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
    "SLURM_STEP_NODELIST": "gpu[07-09],login",
}


def test_a_line_of_scontrol_is_read_though_names_hold_what_looks_like_fields():
    found = parse_job(LINE)
    assert found == JobFacts("12", "RUNNING", "None", 2, 1794784920.0, False, True, True)
    assert parse_job(LINE.replace("EndTime=1794784920", "EndTime=Unknown")).end is None
    preempted = parse_job(LINE.replace("Deadline=", "PreemptTime=1794784900 Deadline="))
    assert preempted.is_preempted
    assert not parse_job(LINE.replace("PreemptTime", "x")).is_preempted
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, EndingCause.NOT_SLURM),
        ({"state": "COMPLETING"}, EndingCause.CANCELLED),
        ({"state": "CANCELLED"}, EndingCause.CANCELLED),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, EndingCause.TIME_LIMIT),
        ({"state": "RUNNING", "is_preempted": True}, EndingCause.PREEMPTED),
        ({"state": "COMPLETING", "is_preempted": True}, EndingCause.PREEMPTED),
        ({"state": "COMPLETING", "restarts": 1}, EndingCause.REQUEUED),
        ({"state": "CANCELLED", "restarts": 1}, EndingCause.REQUEUED),
    ],
)
def test_the_cause_of_a_sigterm(change, cause):
    facts = JobFacts(**{**RUNNING.__dict__, **change})
    assert why_terminated(0, facts) is cause
    assert cause.interrupts == (cause not in (EndingCause.NOT_SLURM, EndingCause.CANCELLED))


def test_without_an_answer_nothing_is_known_and_nothing_comes_back():
    assert why_terminated(0, None) is EndingCause.UNKNOWN
    assert not EndingCause.UNKNOWN.interrupts


def test_a_job_is_found_by_its_number_and_a_task_of_an_array_by_both():
    assert find_job({}) is None
    assert find_job({"SLURM_JOB_ID": "12"}) == Job("12", "12", 0)
    array = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    marker = {"HOLDFAST_MARKER": "/home/me/.again-12"}
    found = find_job({"SLURM_JOB_ID": "12", **array, **marker})
    assert found == Job("10_3", "12", 2, "/home/me/.again-12")


def test_a_marker_that_another_job_has_passed_on_is_none_of_ours():
    marker = {"HOLDFAST_MARKER": "/home/me/.again-12"}
    assert find_job({"SLURM_JOB_ID": "13", **marker}) == Job("13", "13", 0)


@pytest.mark.parametrize(
    ("environment", "is_lonely"),
    [
        ({"SLURM_TASK_PID": "100"}, True),  # srun python, or exec python in a batch script
        ({"SLURM_TASK_PID": "99"}, True),  # python in a batch script
        ({"SLURM_TASK_PID": "7"}, False),
        ({"SLURM_TASK_PID": "99", "HOLDFAST_LEADER": "99"}, False),
        ({"SLURM_TASK_PID": "99", "TORCHELASTIC_RUN_ID": "x"}, False),
        ({}, False),
    ],
)
def test_a_task_is_lonely_where_its_first_process_takes_the_keeper_along(environment, is_lonely):
    assert is_lonely_task(environment, 100, 99) is is_lonely


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("gpu[007-009,12],login1", "gpu007"),
        ("rack[1-2]-n[03,05]", "rack1-n03"),
        ("a,b[1-2]", "a"),
        ("n[2,4-5]-ib", "n2-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_tasks_of_srun_are_ranks():
    assert rank_environment(TASK) == {
        **{"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "gpu07", "MASTER_PORT": "20041"},
    }
    beside = rank_environment({**TASK, "SLURM_STEP_ID": "1"})
    assert beside["MASTER_PORT"] != "20041"
    assert rank_environment({**TASK, "MASTER_PORT": "5"}).get("MASTER_PORT") is None


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},  # the batch script itself, which has a PROCID too
        {"RANK": "0", "WORLD_SIZE": "1"},  # runs beside each other
        {"WORLD_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
    ],
)
def test_elsewhere_nobody_is_made_a_rank(change):
    assert rank_environment({**TASK, **change}) == {}
