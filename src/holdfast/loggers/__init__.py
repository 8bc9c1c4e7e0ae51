"""Loggers that follow a run back to the step from which it resumes.

with holdfast.Run("runs/demo", model=model) as run:
    holdfast.loggers.TensorBoard(run, "tb")
    for step in run.steps(10_000):
        run.log(loss=train_one())

What `run.log` is given goes there too. Each logger has a process of its own, which imports the
package that it logs with: such a package draws random numbers and starts threads, which must not
affect the training. If the training is killed, that process writes what it has received, and ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._errors import SettingsError
from holdfast.loggers._logger import Logger

if TYPE_CHECKING:
    from holdfast._run.run import Run

__all__ = ["MLflow", "TensorBoard", "WandB"]

_CHOSEN_BY_US = ("fork_from", "reinit", "resume", "resume_from")


class TensorBoard(Logger):
    """Writes event files into `folder`; TensorBoard forgets the steps that a resume repeats.

    >>> holdfast.loggers.TensorBoard(run, "tb")  # doctest: +SKIP
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str]) -> None:
        place = os.fspath(folder)
        if "://" in place:
            raise SettingsError(
                f"TensorBoard(run, {place!r}): only folders of this machine can be written to.\n"
                "Write to one, and copy it: aws s3 sync, gsutil rsync, …"
            )
        options = {"folder": str(Path(place).absolute())}
        super().__init__(run, "tensorboard", "tensorboard", target=place, options=options)


class WandB(Logger):
    """Logs to Weights & Biases; other arguments are for `wandb.init`. All attempts are one run.

    With `rewind=True` an attempt that resumes rewinds the run to its step, which the servers must
    allow. Without it, steps that were logged before are not logged again.

    >>> holdfast.loggers.WandB(run, project="demo", config={"lr": 0.1})  # doctest: +SKIP
    """

    def __init__(self, run: Run, *, rewind: bool = False, **init: Any) -> None:
        for name in _CHOSEN_BY_US:
            if name in init:
                raise SettingsError(
                    f"WandB(run, {name}=…): holdfast sets it, so that all attempts are one run.\n"
                    "Leave it out; rewind=True takes the curve back when the run resumes."
                )
        target = "/".join(str(init.get(name) or "") for name in ("entity", "project", "id"))
        options = {"init": init, "rewind": bool(rewind)}
        super().__init__(run, "wandb", "wandb", target=target, options=options)


class MLflow(Logger):
    """Logs to MLflow. All attempts are one run, and no step is logged twice.

    >>> holdfast.loggers.MLflow(run, experiment="demo")  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Run,
        *,
        tracking_uri: str | os.PathLike[str] | None = None,
        experiment: str = "Default",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        uri = None if tracking_uri is None else os.fspath(tracking_uri)
        options = {
            "tracking_uri": uri,
            "experiment": experiment,
            "run_name": run_name,
            "tags": dict(tags or {}),
        }
        super().__init__(run, "mlflow", "mlflow", target=f"{uri}#{experiment}", options=options)
