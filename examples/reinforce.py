"""Reinforcement learning with a loop of its own: REINFORCE balances a pole on a cart.

    python examples/reinforce.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: poles go on falling where they were. The carts and their random
generator are state of the run; `run.boundary()` says where a step ends, `run.finish()` where
training does. The last line has a hash of the weights, the same however often you interrupt it.
NumPy is enough: there is no framework in this one.
"""

import argparse
import hashlib

import numpy as np

import holdfast

CARTS, LENGTH, DISCOUNT = 32, 100, 0.97


class Carts:
    """Carts with a pole each. Whatever has `state_dict` and `load_state_dict` can be resumed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.places = self.rng.uniform(-0.05, 0.05, (CARTS, 4))  # x, its speed, angle, its speed

    def state_dict(self) -> dict[str, object]:
        return {"rng": self.rng.bit_generator.state, "places": self.places}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.places = state["places"]

    def push(self, right: np.ndarray) -> np.ndarray:
        """Push each cart for a fiftieth of a second; returns which poles fell."""
        _, speed, angle, turning = self.places.T
        force = np.where(right, 10.0, -10.0)
        pull = (force + 0.05 * turning**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (
            0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        )
        gain = pull - 0.05 * turn * np.cos(angle) / 1.1
        change = np.stack([speed, gain, turning, turn], axis=1)
        self.places = self.places + 0.02 * change
        fell = (np.abs(self.places[:, 0]) > 2.4) | (np.abs(self.places[:, 2]) > 0.21)
        self.places[fell] = self.rng.uniform(-0.05, 0.05, (fell.sum(), 4))
        return fell


def play(carts: Carts, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Watch the carts for a while; returns the direction to learn in, and which poles fell."""
    slopes = np.zeros((LENGTH, CARTS, 4))
    fell = np.zeros((LENGTH, CARTS), dtype=bool)
    for moment in range(LENGTH):
        likely = 1 / (1 + np.exp(-carts.places @ weights))
        right = carts.rng.random(CARTS) < likely
        slopes[moment] = (right - likely)[:, None] * carts.places
        fell[moment] = carts.push(right)
    worth = np.zeros((LENGTH, CARTS))  # what comes after: a pole that stands earns 1 a moment
    ahead = np.full(CARTS, 1 / (1 - DISCOUNT))
    for moment in reversed(range(LENGTH)):
        ahead = np.where(fell[moment], 0.0, 1 + DISCOUNT * ahead)
        worth[moment] = ahead
    return ((worth - worth.mean())[:, :, None] * slopes).mean(axis=(0, 1)), fell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/reinforce", help="where the run is kept")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()

    weights, carts = np.zeros(4), Carts(seed=0)
    with holdfast.Run(options.folder, weights=weights, carts=carts, upright=0.0) as run:
        while run.step < options.steps:
            slope, fell = play(carts, weights)
            weights += 0.5 * slope  # in place: the run knows this array
            upright = LENGTH * 0.02 * CARTS / max(1, fell.sum())
            run.update(upright=upright)
            run.log(upright_seconds=upright)
            if run.boundary():
                break
        else:
            run.finish()

    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
    print(f"a pole stands for {run.state['upright']:.1f} s, weights {digest}")


if __name__ == "__main__":
    main()
