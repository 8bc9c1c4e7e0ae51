"""Ray Train's `fit` with loops that hold a run: a stop is an end, and not a failure to be undone.

    result = holdfast.ray.fit(trainer)  # in place of trainer.fit()

Ray Train starts all workers again when the loop of one has raised anything. That is right after a
death, and wrong after `holdfast stop`: so the loop returns there, and the exception is raised where
the script has asked for the training.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, Stopped, missing_framework
from holdfast._run.exit.leaving import cancel_exit
from holdfast._run.signals.handlers import set_host

if importlib.util.find_spec("ray") is None:
    raise missing_framework("ray", "Ray Train")

__all__ = ["fit"]

# A worker that Ray ends kills its children first. The keeper is one, and has still to write what
# the worker held in memory. Others are in the worker's group of processes, which Ray kills anyway.
_SPARE_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}


def fit(trainer: Any) -> Any:
    """Train as `trainer.fit()` does; `holdfast.Stopped` if the run was asked to stop.

    >>> result = holdfast.ray.fit(TorchTrainer(train_loop, …))  # doctest: +SKIP
    """
    _refuse_old()
    settings = trainer.run_config
    loop, surroundings = trainer.train_loop_per_worker, settings.worker_runtime_env
    trainer.train_loop_per_worker = led(loop, str(Path.cwd()))
    chosen = surroundings or {}  # a variable that the user has set stays
    variables = _SPARE_CHILDREN | chosen.get("env_vars", {})
    settings.worker_runtime_env = {**chosen, "env_vars": variables}
    try:
        result = trainer.fit()
    finally:
        trainer.train_loop_per_worker, settings.worker_runtime_env = loop, surroundings
    if isinstance(result.return_value, Stopped):
        raise result.return_value
    return result


def led(loop: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """A loop that returns the stop that it was asked for, and raises one that Ray must undo."""

    @functools.wraps(loop)  # Ray counts the arguments
    def run_loop(*config: Any) -> Any:
        is_in_thread = threading.current_thread() is not threading.main_thread()
        if is_in_thread:
            set_host(folder)
        try:
            return loop(*config)
        except Stopped as stopped:
            if stopped.status in _errors.RESTARTED:
                raise
            if is_in_thread:
                cancel_exit()  # the worker ends when Ray wants it to
            return stopped
        finally:
            set_host(None)

    return run_loop


def _refuse_old() -> None:
    import ray
    from ray.train import Result

    if "return_value" not in getattr(Result, "__dataclass_fields__", ()):
        raise HoldfastError(
            f"holdfast.ray needs a Ray whose fit() says what the loop has returned, and this is "
            f"Ray {ray.__version__}.\nInstall a newer one: pip install -U 'ray[train]'"
        )
