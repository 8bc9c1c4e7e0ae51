"""A training without a framework that evaluates in phases: after each epoch, in the middle of
steps, or in a loop of its own. Prints what light.py prints, and `phase STEP IN_MEMORY` as a
phase begins; the phase of --hold-at never looks at anything, or sits in C for ever.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from light import make_weights, show_hash, stick_in_c, train_one

import holdfast
from holdfast._run.driver import session_of
from holdfast._run.saving import cadence

cadence._SMALL_SECONDS = 60.0  # this state is small, even if a busy machine takes long to copy it


class Decay:
    """A rate that is stepped between the last batch and the evaluation, like a scheduler."""

    def __init__(self) -> None:
        self.rate = 1.0

    def step(self) -> None:
        self.rate *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.weights = make_weights()
        self.decay = Decay()
        self.phases = 0

    def run(self) -> None:
        options = self.options
        settings = holdfast.Settings(**json.loads(options.settings))
        with holdfast.Run(
            options.folder, settings=settings, weights=self.weights, decay=self.decay
        ) as run:
            print("ready", run.step, run.resumed_from, run.attempt, flush=True)
            getattr(self, options.shape)(run)
        show_hash(np.append(self.weights, self.decay.rate))

    def epochs(self, run: holdfast.Run) -> None:
        batches = [[i] for i in range(20)]
        for _ in run.epochs(5):
            self.weights *= 0.5  # what stands at the top of an epoch is done once
            for batch in run.batches(batches):
                self.train(batch[0])
            self.decay.step()
            self.evaluate(run)

    def steps(self, run: holdfast.Run) -> None:
        for step in run.steps(100):
            self.train(step % 20)
            if step % 20 == 19:
                self.decay.step()
                self.evaluate(run)

    def by_hand(self, run: holdfast.Run) -> None:
        while run.step < 100:
            self.train(run.step % 20)
            if run.step % 20 == 19:
                self.decay.step()
            if run.boundary():
                return
            if run.step % 20 == 0:
                self.evaluate(run)
        run.finish()

    def train(self, number: int) -> None:
        train_one(self.weights)
        self.weights += number * self.decay.rate
        time.sleep(self.options.sleep)

    def evaluate(self, run: holdfast.Run) -> None:
        with run.phase("eval"):
            newest = session_of(run).saver.newest
            print("phase", run.step, newest.step if newest else None, flush=True)
            random.random()
            np.random.standard_normal(3)  # an evaluation that draws changes no training
            held, self.phases = self.phases == self.options.hold_at, self.phases + 1
            if held and self.options.stick:
                stick_in_c(with_gil=self.options.stick == "with-gil")
            while held and not self.options.gate.exists():
                try:
                    time.sleep(0.005)
                except SystemExit:
                    if not self.options.swallow:
                        raise
            run.log(val_loss=float(self.weights.sum()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--shape", choices=("epochs", "steps", "by_hand"), default="epochs")
    parser.add_argument("--hold-at", type=int, default=-1, help="phase of this life to be held up")
    parser.add_argument("--gate", type=Path, help="the file for which it waits")
    parser.add_argument("--stick", choices=("with-gil", "without-gil"), help="or for ever, in C")
    parser.add_argument("--swallow", action="store_true", help="catch what leaves the phase")
    parser.add_argument("--sleep", type=float, default=0.005)
    parser.add_argument("--settings", default="{}")
    Training(parser.parse_args()).run()


if __name__ == "__main__":
    main()
