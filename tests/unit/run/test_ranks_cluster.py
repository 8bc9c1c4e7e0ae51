"""Which rank a task of a TensorFlow cluster is, by TF_CONFIG."""

from __future__ import annotations

import json

import pytest

from holdfast._run.ranks.world import address_by_config, cluster_by_config, rank_by_config

_WORKERS = ["node7:2222", "node8:2222"]


def config(task: str, index: object, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


@pytest.mark.parametrize(
    ("task", "index", "jobs", "expected"),
    [
        ("worker", 1, {"worker": _WORKERS}, (1, 2)),
        ("worker", "1", {"worker": _WORKERS}, (1, 2)),
        ("chief", 0, {"worker": _WORKERS, "chief": ["node6:2222"]}, (0, 3)),
        ("worker", 0, {"worker": _WORKERS, "chief": ["node6:2222"]}, (1, 3)),
        ("worker", 0, {"worker": ["node7:2222"]}, (0, 1)),
        ("evaluator", 0, {"worker": _WORKERS, "evaluator": ["node9:2222"]}, None),
        ("ps", 0, {"worker": _WORKERS, "ps": ["node9:2222"]}, None),
        ("worker", 2, {"worker": _WORKERS}, None),
        ("worker", -1, {"worker": _WORKERS}, None),
    ],
)
def test_the_rank_of_a_task(task, index, jobs, expected):
    assert rank_by_config(config(task, index, **jobs)) == expected


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"cluster": {}}', '{"cluster": 1, "task": 2}']
)
def test_what_makes_no_sense_makes_no_ranks(text):
    assert rank_by_config(text) is None
    assert address_by_config(text) == ""
    assert cluster_by_config(text) == ""


def test_all_tasks_of_a_cluster_have_the_same_words_for_it_and_addresses_of_their_own():
    texts = [config("worker", index, worker=_WORKERS) for index in range(2)]
    assert len(set(map(cluster_by_config, texts))) == 1
    assert [address_by_config(text) for text in texts] == ["node7", "node8"]
    assert address_by_config(config("worker", 0, worker=["[::1]:2222"])) == "::1"
