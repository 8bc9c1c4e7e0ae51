"""The callback that a user gives to a Trainer."""

from __future__ import annotations

import os
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.run import Run
from holdfast._settings import Settings
from holdfast._text import say
from holdfast.lightning.fitting import Fit
from holdfast.lightning.package import callback_class
from holdfast.lightning.yielding import refuse_strategy, refuse_unknown
from holdfast.rules import Rule

_OURS = ("module", "optimizer", "optimizers", "schedulers", "scaler", "fit")


class Callback(callback_class()):  # type: ignore[misc]  # of one package or the other
    """Makes `trainer.fit` a run that stops at a step and resumes in the middle of an epoch.

    >>> trainer = Trainer(callbacks=[holdfast.lightning.Callback("runs/a")])  # doctest: +SKIP
    >>> trainer.fit(module, loader)  # doctest: +SKIP

    Module, optimizers, schedulers, precision, loops, other callbacks and the position in the data
    are kept by themselves; `more_state` is what else decides what comes next. `run.log` is given
    what the module logs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        stop_when: Rule | None = None,
        **more_state: Any,
    ) -> None:
        super().__init__()
        taken = sorted(set(_OURS) & set(more_state))
        if taken:
            raise HoldfastError(
                f"holdfast.lightning.Callback({', '.join(taken)}=…): this is kept by itself.\n"
                "Leave it out, or give it another name."
            )
        self._folder = folder
        self._settings = settings
        self._rule = stop_when
        self._more_state = more_state
        self._fit: Fit | None = None

    @property
    def run(self) -> Run | None:
        """The run, while `trainer.fit` trains: for `run.stop()`, `run.log`, `run.save()`."""
        return None if self._fit is None else self._fit.run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  Lightning's
        if stage != "fit":
            return
        if trainer.fast_dev_run:
            say("fast_dev_run: this fit is a try and no run; nothing is kept or resumed.")
            return
        if sum(isinstance(each, Callback) for each in trainer.callbacks) > 1:
            raise HoldfastError(
                "two holdfast.lightning.Callback in one Trainer: each would count the steps.\n"
                "Give it one."
            )
        refuse_unknown(trainer)
        refuse_strategy(trainer)
        self._fit = Fit(self, trainer)

    def make_run(self, state: dict[str, Any]) -> Run:
        """The run of a fit, not open yet."""
        return Run(
            self._folder,
            settings=self._settings,
            stop_when=self._rule,
            **state,
            **self._more_state,
        )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  Lightning's
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  Lightning's
        self._let_go()

    def _let_go(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.let_go()
