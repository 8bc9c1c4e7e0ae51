"""Variables of tf.distribute: one name, and a copy on each replica.

A mirrored variable is one value: its copies are equal, and one of them is stored. But not all
are. What is summed up only when it is read (a metric) differs by design, and a mirrored variable
that no aggregation keeps equal may: Keras makes all weights so, and the running means of a
BatchNormalization are then those of each replica. Where copies differ, each of them is stored.

Nothing here is a collective: with several workers the replicas of the others are not asked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

COPIES = "replicas"  # the name under which the copies of a variable stand in its state
_TPU = "tensorflow.python.distribute.tpu_values"
_SHARDED = "tensorflow.python.distribute.sharded_variable"


def is_variable(value: object) -> bool:
    """Any variable, distributed or not; also one in shards, which has to be refused."""
    return isinstance(value, tf.Variable) or _is_sharded(value)


def copies(variable: Any) -> tuple[Any, ...]:
    """The copies of a variable on the replicas of this process, the first of them first."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return tuple(variable.values)
    return (variable,)


def first(variable: Any) -> Any:
    """The copy that is read for all, where they are one value."""
    return copies(variable)[0]


def is_apart(variable: Any) -> bool:
    """Whether its copies are several values, each of which has to be stored."""
    found = copies(variable)
    if len(found) < 2:
        return False
    if _is_summed_when_read(variable):
        return True  # always: what is stored must not change its form with each epoch
    if variable.aggregation != tf.VariableAggregation.NONE:
        return False
    return not all(_has_same_bits(found[0], other) for other in found[1:])


def _is_summed_when_read(variable: Any) -> bool:
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


def _has_same_bits(one: Any, other: Any) -> bool:
    here, there = one.read_value(), other.read_value()
    if "CPU" in here.device:
        return bool(here.numpy().tobytes() == there.numpy().tobytes())
    with tf.device(here.device):  # else all of it would go to the host for this
        there = tf.identity(there)
        # NaN is not equal to itself: such a variable is stored copy by copy, which is as exact.
        return bool(tf.reduce_all(tf.equal(here, there)))


def state(variable: Any) -> dict[str, Any]:
    """The state of a variable whose copies are several values."""
    return {COPIES: list(copies(variable))}


def assign(variable: Any, stored: Any) -> None:
    """Give a variable its stored value: a tensor for all copies, or one for each of them."""
    live = copies(variable)
    values = stored[COPIES] if isinstance(stored, dict) else stored
    if not isinstance(stored, dict):
        values = _spread(variable, values, len(live))
    elif len(values) != len(live):
        values = _spread(variable, _merge(variable, values), len(live))
    for copy, value in zip(live, values, strict=True):
        copy.assign(value)


def _merge(variable: Any, values: Sequence[Any]) -> Any:
    """One value for those of other replicas than today's, as reading the variable gives it."""
    aggregation = variable.aggregation
    if aggregation == tf.VariableAggregation.SUM:
        return tf.add_n(list(values))
    if aggregation == tf.VariableAggregation.MEAN:
        return tf.add_n(list(values)) / len(values)
    return values[0]


def _spread(variable: Any, value: Any, count: int) -> list[Any]:
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    if count > 1 and _is_summed_when_read(variable) and is_sum:
        return [value, *[tf.zeros_like(value)] * (count - 1)]  # they add up to it
    return [value] * count


def scope_of(variables: Iterable[Any]) -> AbstractContextManager[Any]:
    """Where what belongs to these variables has to be made: in the scope of their strategy."""
    for variable in variables:
        if isinstance(variable, tf.distribute.DistributedValues):
            found: AbstractContextManager[Any] = variable.distribute_strategy.scope()
            return found
    return nullcontext()


def refuse(variable: Any) -> str | None:
    """What to say of a variable whose values cannot be had here; None if they can."""
    if _is_sharded(variable) or "/job:ps" in (getattr(variable, "device", "") or ""):
        return (
            "this variable is on the parameter servers of a ParameterServerStrategy, whose "
            "workers do not step together: there is no moment at which all of it belongs to one "
            "step. Train with MultiWorkerMirroredStrategy, or without holdfast and with "
            "tf.train.CheckpointManager."
        )
    kind: Any = type(variable)
    if _is_of_a_tpu(kind):
        return (
            "this variable is on a TPU (TPUStrategy), which holdfast cannot read step by step. "
            "Train with MirroredStrategy or MultiWorkerMirroredStrategy, or with JAX."
        )
    return None


def _is_sharded(value: object) -> bool:
    kind: Any = type(value)
    return _is_of_shards(kind)


@functools.cache  # asked for each variable of each snapshot, and there are few classes
def _is_of_shards(kind: Any) -> bool:
    names = (each.__name__ for each in kind.__mro__ if _is_from(each, _SHARDED))
    return "ShardedVariableMixin" in names


@functools.cache
def _is_of_a_tpu(kind: Any) -> bool:
    return any(_is_from(each, _TPU) for each in kind.__mro__)


def _is_from(kind: type, module: str) -> bool:
    return kind.__module__ == module


def cluster() -> tuple[dict[str, list[int]], str, int] | None:
    """The tasks by job that MultiWorkerMirroredStrategy has connected, and which of them this is.

    None without such a strategy.
    """
    from tensorflow.python.eager import context

    # TensorFlow tells it nowhere else if the strategy was made with a resolver of one's own.
    server = getattr(context.context(), "_collective_ops_server_def", None)
    if server is None:
        return None
    jobs = {str(job.name): sorted(map(int, job.tasks)) for job in server.cluster.job}
    return jobs, str(server.job_name), int(server.task_index)
