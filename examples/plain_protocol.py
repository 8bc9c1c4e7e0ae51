"""No framework at all: a robot learns to walk along a line by cross-entropy search, in plain
Python. What a run needs of your own objects is two methods, state_dict and load_state_dict.

    python examples/plain_protocol.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next generation. However often you interrupt it,
it ends with the same hash of the weights. The same two methods make a run of any other library: of
its solver, its table of values, its population, its own random generator.
"""

import argparse
import hashlib
import math
import random

import holdfast


class Search:
    """A cloud of controllers: the best of each generation decide where the next one is drawn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mean = [0.0, 0.0, 0.0]
        self.spread = [2.0, 2.0, 2.0]

    def state_dict(self) -> dict:
        """All that decides what comes next: numbers, strings, bytes, and containers of these."""
        return {"mean": self.mean, "spread": self.spread, "random": self.random.getstate()}

    def load_state_dict(self, state: dict) -> None:
        """Takes back what state_dict gave, in a new process: tuples are tuples, bits are bits."""
        self.mean, self.spread = state["mean"], state["spread"]
        self.random.setstate(state["random"])

    def draw(self) -> list[float]:
        return [self.random.gauss(m, s) for m, s in zip(self.mean, self.spread, strict=True)]

    def learn(self, best: list[list[float]]) -> None:
        for index, values in enumerate(zip(*best, strict=True)):
            self.mean[index] = math.fsum(values) / len(values)
            apart = math.fsum((value - self.mean[index]) ** 2 for value in values)
            self.spread[index] = math.sqrt(apart / len(values)) + 0.02


def walk(controller: list[float], gusts: list[float]) -> float:
    """How far from the line a robot is on its way, in the mean, and how much it has to steer."""
    place, speed, cost = 1.0, 0.0, 0.0
    near, slow, steady = controller
    for gust in gusts:
        steer = math.tanh(-near * place - slow * speed + 0.1 * steady)
        speed += 0.1 * (steer + gust)
        place += 0.1 * speed
        cost += place * place + 0.01 * steer * steer
    return cost / len(gusts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/plain-protocol", help="where the run is kept")
    parser.add_argument("--steps", type=int, default=4000, help="generations")
    options = parser.parse_args()

    random.seed(0)  # Python's own generator, for the wind: it travels with the run unasked
    search = Search(seed=1)
    # A list changes in place, and so the run sees what is in it; a number is handed over anew.
    history: list[float] = []
    with holdfast.Run(options.folder, search=search, history=history, best=math.inf) as run:
        for _ in run.steps(options.steps):
            gusts = [random.gauss(0.0, 0.3) for _ in range(60)]
            drawn = sorted((search.draw() for _ in range(24)), key=lambda c: walk(c, gusts))
            search.learn(drawn[:6])
            cost = walk(drawn[0], gusts)
            history[:] = [*history[-9:], cost]
            run.update(best=min(run.state["best"], cost))
            run.log(cost=cost)
        best = run.state["best"]

    digest = hashlib.sha256(repr((search.mean, search.spread, history)).encode()).hexdigest()[:16]
    print(f"cost {math.fsum(history) / len(history):.4f}, best {best:.4f}, weights {digest}")


if __name__ == "__main__":
    main()
