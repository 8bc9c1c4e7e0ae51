"""What is known of a training and its machines, and what follows for saving.

A checkpoint stops training for a snapshot's time and is written beside it then, which slows it
down a little; it counts when it is durable. Of the interruptions, some come with a warning and
lose nothing. Of the rest, some take the host and all that was in its memory, and the run goes
back to the newest checkpoint on disk; the others end processes only, and it goes on from the
newest snapshot in memory, which the keeper makes durable meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SHORTEST_SNAPSHOT_SECONDS = 0.05  # as the cadence of a run has it
_LEAST_COST_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True)
class Model:
    """All times in seconds."""

    mtbf: float  # between two interruptions of the whole job, of any kind
    write: float  # until a checkpoint is on disk
    snapshot: float  # for which one stops training
    restart: float  # from the interruption, or the end of the queue, to the first step
    queue: float = 0.0  # mean wait for machines
    notice_share: float = 0.0
    host_loss_share: float = 1.0  # of those without a warning
    interference: float = 0.0  # share of the writing time that training loses
    max_overhead: float = 0.0  # share of the time that snapshots may take; 0: there are none
    is_blocking: bool = False  # training stands still while it writes

    @property
    def cost(self) -> float:
        """What a checkpoint takes from training."""
        return self.write if self.is_blocking else self.snapshot + self.interference * self.write

    @property
    def extra_cost(self) -> float:
        """What one checkpoint more takes from training.

        Where snapshots have a share of the time, the one that a checkpoint is made of counts as
        one of them, and the next comes later for it.
        """
        extra = self.interference * self.write if self.has_snapshots else self.cost
        return max(extra, _LEAST_COST_SECONDS)

    @property
    def latency(self) -> float:
        """From the moment that a checkpoint holds until it is durable."""
        return self.write if self.is_blocking else max(self.cost, self.snapshot + self.write)

    @property
    def has_snapshots(self) -> bool:
        return self.max_overhead > 0

    @property
    def snapshot_interval(self) -> float:
        """The training between two snapshots in memory."""
        if not self.has_snapshots:
            return math.inf
        return max(SHORTEST_SNAPSHOT_SECONDS, self.snapshot / self.max_overhead)

    @property
    def losing_mtbf(self) -> float:
        """Between two interruptions that throw the run back to its newest checkpoint."""
        share = 1.0 - self.notice_share
        if self.has_snapshots:
            share *= self.host_loss_share
        return self.mtbf / share if share > 0 else math.inf

    @property
    def least_interval(self) -> float:
        """One checkpoint is on disk before the next one begins."""
        return 0.0 if self.is_blocking else self.write

    def without_snapshots(self) -> Model:
        """The same, where nothing is kept in memory."""
        return replace(self, max_overhead=0.0)

    def standing_still(self) -> Model:
        """The same, as a script does it that calls torch.save in its loop."""
        return replace(self, max_overhead=0.0, is_blocking=True)
