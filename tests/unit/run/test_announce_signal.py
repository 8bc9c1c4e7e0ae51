"""What is said when a signal comes: nothing that the measured speed of the disk cannot keep."""

from __future__ import annotations

import signal

import pytest

from holdfast._run.signals import handlers
from holdfast._run.signals.handlers import announce_signal


@pytest.mark.parametrize(
    ("held", "durable", "needed", "promise"),
    [
        (
            *(202, 130, 4.0),
            " If 10 s are not enough, step 202 is likely kept. Step 130 is durable already.",
        ),
        (202, 130, 16.0, " A save takes about 16 s here, and there are 10 s: step 130 is durable"),
        (202, None, 16.0, " A save takes about 16 s here, and there are 10 s: nothing is durable"),
        (202, 202, 4.0, " If 10 s are not enough, step 202 is durable"),
        (202, None, None, " step 202 is likely kept. Nothing is durable yet."),
        (None, None, None, " If 10 s are not enough, nothing is durable yet."),
    ],
)
def test_only_what_is_durable_is_certain(monkeypatch, held, durable, needed, promise):
    said: list[str] = []
    monkeypatch.setattr(handlers, "say", said.append)
    announce_signal(signal.SIGTERM, 203, held, durable, grace=10.0, needed=needed)
    assert said[0].startswith("SIGTERM: step 203 is being finished and saved. ")
    assert promise in said[0]
    assert "is kept" not in said[0]
