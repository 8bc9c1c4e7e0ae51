"""A training that finds its interval by itself; its state takes a while to be had.

Asks for a checkpoint in its first step, so that its cost is known at once.
"""

from __future__ import annotations

import sys
import time

import holdfast


class Slow:
    """State that makes each snapshot stop training for a fifth of a second."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        time.sleep(0.2)
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def main() -> None:
    slow = Slow()
    settings = holdfast.Settings(checkpoint_every="auto", max_overhead=0.1)
    with holdfast.Run(sys.argv[1], settings=settings, slow=slow) as run:
        run.save()
        for _ in run.steps(10**7):
            slow.count += 1
            time.sleep(0.002)


if __name__ == "__main__":
    main()
