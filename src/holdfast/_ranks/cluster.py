"""The tasks of a TensorFlow cluster, and which of them are the ranks of a run.

Those that train together are: the chief, if there is one, and the workers. An evaluator goes
its own way, and so does a parameter server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TRAINING = ("chief", "worker")  # in the order in which TensorFlow counts them


def rank_in(tasks: Mapping[str, Sequence[int]], job: str, index: int) -> tuple[int, int] | None:
    """The rank of a task and how many there are; None if it is none of those that train."""
    ranks = [(name, each) for name in _TRAINING for each in tasks.get(name, ())]
    return (ranks.index((job, index)), len(ranks)) if (job, index) in ranks else None


def rank_by_config(text: str) -> tuple[int, int] | None:
    """The same by what TF_CONFIG says."""
    cluster, job, index = _read(text)
    return rank_in({name: range(len(found)) for name, found in cluster.items()}, job, index)


def address_by_config(text: str) -> str:
    """The host under which the others know this task; empty if TF_CONFIG does not say."""
    cluster, job, index = _read(text)
    found = cluster.get(job, [])
    return found[index].rpartition(":")[0].strip("[]") if index < len(found) else ""


def cluster_by_config(text: str) -> str:
    """What TF_CONFIG says alike to all tasks of a cluster."""
    cluster, _, _ = _read(text)
    return json.dumps(cluster, sort_keys=True) if cluster else ""


def _read(text: str) -> tuple[dict[str, list[str]], str, int]:
    """The addresses by job, and the job and number of this task; nothing where it makes no sense.

    TensorFlow reads the variable before us, and says what is wrong with it.
    """
    try:
        config: Any = json.loads(text) if text else {}
        jobs, task = config["cluster"], config["task"]
        cluster = {str(job): list(map(str, found)) for job, found in jobs.items()}
        index = int(task["index"])
        return (cluster, str(task["type"]), index) if index >= 0 else ({}, "", 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, "", 0
