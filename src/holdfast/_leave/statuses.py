"""Exit statuses: the one table."""

from __future__ import annotations

import signal

FINISHED = 0
BAD = 65  # a rule called the training bad
NOT_DURABLE = 74  # asked to stop, and the disk would not take the state
IDLE = 76  # came back again and again without a step: somebody must look
REQUEUE = 75  # interrupted: whoever started it should start it again
PERSON = 130  # Ctrl-C, `holdfast stop`, run.stop()
HUNG = 77  # no step for too long, and whoever leads it starts it again
TERMINATED = 143
HUNG_UP = 129  # SIGHUP: the terminal was closed, or the connection was lost

ASKED = (PERSON, TERMINATED, HUNG_UP, REQUEUE)  # to leave, and it will go on


def of_signal(number: int) -> int:
    """The status with which a run leaves that this signal asked to stop."""
    if number == signal.SIGTERM:
        return TERMINATED
    name = signal.Signals(number).name
    if name == "SIGHUP":
        return HUNG_UP
    return REQUEUE if name in ("SIGUSR1", "SIGUSR2") else PERSON
