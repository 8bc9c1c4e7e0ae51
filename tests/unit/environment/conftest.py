"""A busy machine has longer to answer; tests of silence say how long they wait."""

from __future__ import annotations

import pytest

from holdfast._environment.cloud import azure, gcp, metadata

_PATIENCE_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"method": "GET", "seconds": _PATIENCE_SECONDS}
    monkeypatch.setattr(metadata.Metadata.ask, "__kwdefaults__", defaults)
    monkeypatch.setattr(gcp, "ANSWER_SECONDS", _PATIENCE_SECONDS)
    for source in (gcp.GcpSource, azure.AzureSource):
        monkeypatch.setattr(source._ask, "__defaults__", (_PATIENCE_SECONDS,))
