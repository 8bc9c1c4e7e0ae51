"""Variables of tf.distribute: one name, and a copy on each replica.

A mirrored variable is one value: its copies are equal, and one of them is stored. Others differ: a
variable that is summed on read (a metric) by design, and a mirrored variable without an aggregation
possibly. Keras makes all weights so, and the running means of a BatchNormalization are then those
of each replica. If copies differ, each of them is stored.

Nothing here is a collective operation: replicas of other workers are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

COPIES = "replicas"  # the key of a variable's copies in its state
_TPU = "tensorflow.python.distribute.tpu_values."
_SHARDED = "tensorflow.python.distribute.sharded_variable.ShardedVariableMixin"


def is_variable(value: object) -> bool:
    """Any variable, distributed or not; also a sharded one, which is refused later."""
    return isinstance(value, tf.Variable) or _is_sharded(value)


def copies(variable: Any) -> tuple[Any, ...]:
    """The copies of a variable on the replicas of this process."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return tuple(variable.values)
    return (variable,)


def first(variable: Any) -> Any:
    """The copy that is read if all are equal."""
    return copies(variable)[0]


def is_apart(variable: Any) -> bool:
    """Whether its copies differ, so that each must be stored."""
    found = copies(variable)
    if len(found) < 2:
        return False
    if _is_summed_when_read(variable):
        return True  # always: the form of the state must not change with each epoch
    if variable.aggregation != tf.VariableAggregation.NONE:
        return False
    return not all(_has_same_bits(found[0], other) for other in found[1:])


def _is_summed_when_read(variable: Any) -> bool:
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


def _has_same_bits(one: Any, other: Any) -> bool:
    here, there = one.read_value(), other.read_value()
    if "CPU" in here.device:
        return bool(here.numpy().tobytes() == there.numpy().tobytes())
    with tf.device(here.device):  # else both would be copied to the host
        there = tf.identity(there)
        # NaN is not equal to itself: such a variable is stored copy by copy, which is exact too.
        return bool(tf.reduce_all(tf.equal(here, there)))


def assign(variable: Any, stored: Any) -> None:
    """Restore a variable: one tensor for all copies, or one for each."""
    live = copies(variable)
    values = stored[COPIES] if isinstance(stored, dict) else stored
    if not isinstance(stored, dict):
        values = _spread(variable, values, len(live))
    elif len(values) != len(live):
        values = _spread(variable, _merge(variable, values), len(live))
    for copy, value in zip(live, values, strict=True):
        copy.assign(value)


def _merge(variable: Any, values: Sequence[Any]) -> Any:
    """One value for copies of another number of replicas, as reading the variable gives it."""
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
    """The scope of the strategy of these variables, for making others that belong to them."""
    for variable in variables:
        if isinstance(variable, tf.distribute.DistributedValues):
            found: AbstractContextManager[Any] = variable.distribute_strategy.scope()
            return found
    return nullcontext()


def refuse(variable: Any) -> str | None:
    """Why the values of a variable cannot be read here; None if they can."""
    if _is_sharded(variable) or "/job:ps" in (getattr(variable, "device", "") or ""):
        return (
            "this variable is on the parameter servers of a ParameterServerStrategy, whose "
            "workers do not step together: there is no moment at which all of it belongs to one "
            "step. Train with MultiWorkerMirroredStrategy, or without holdfast and with "
            "tf.train.CheckpointManager."
        )
    kind: Any = type(variable)
    if _has_base(kind, _TPU):
        return (
            "this variable is on a TPU (TPUStrategy), which holdfast cannot read step by step. "
            "Train with MirroredStrategy or MultiWorkerMirroredStrategy, or with JAX."
        )
    return None


def _is_sharded(value: object) -> bool:
    kind: Any = type(value)
    return _has_base(kind, _SHARDED)


@functools.cache  # called for each variable of each snapshot
def _has_base(kind: Any, place: str) -> bool:
    """Whether a class, or one of its bases, is from this module (and class)."""
    names = (f"{each.__module__}.{each.__name__}" for each in kind.__mro__)
    return any(name.startswith(place) for name in names)


def cluster() -> tuple[dict[str, list[int]], str, int] | None:
    """The tasks by job of a MultiWorkerMirroredStrategy, and which of them this is; else None."""
    from tensorflow.python.eager import context

    # The only place if the strategy was made with a custom resolver.
    server = getattr(context.context(), "_collective_ops_server_def", None)
    if server is None:
        return None
    jobs = {str(job.name): sorted(map(int, job.tasks)) for job in server.cluster.job}
    return jobs, str(server.job_name), int(server.task_index)
