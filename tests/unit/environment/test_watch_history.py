"""Samples of the last minutes: few enough to write down, and the last seconds whole."""

from __future__ import annotations

from typing import Any

from holdfast._environment.processes.memory_growth import MemoryHistory


def _taken(hertz: float, seconds: float, **more: Any) -> list[dict[str, Any]]:
    return [{"t": 1e9 + n / hertz, "cgroup": n, **more} for n in range(int(seconds * hertz))]


def _kept(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    history = MemoryHistory()
    for each in samples:
        history.add(each)
    return history.recent()


def test_of_ten_a_second_for_an_hour_150_are_kept() -> None:
    samples = _taken(10, 3600)
    kept = _kept(samples)
    assert len(kept) <= 150
    assert kept == sorted(kept, key=lambda each: each["t"])
    assert kept[-100:] == samples[-100:]
    assert 280 < samples[-1]["t"] - kept[0]["t"] <= 300


def test_of_one_a_second_the_last_ten_seconds_are_whole() -> None:
    samples = _taken(1, 600)
    kept = _kept(samples)
    assert kept[-10:] == samples[-10:]
    assert len(kept) <= 60


def test_of_the_older_ones_the_highest_is_kept() -> None:
    samples = _taken(10, 60)
    peak = {"t": samples[300]["t"], "cgroup": 10**9}
    samples[300] = peak
    assert peak in _kept(samples)


def test_without_a_cgroup_the_highest_is_the_largest_process() -> None:
    samples = [{"t": 1e9 + n / 10, "rss": 5 if n == 300 else 1} for n in range(600)]
    assert samples[300] in _kept(samples)


def test_more_than_ten_a_second_are_not_too_many_either() -> None:
    samples = _taken(50, 30)
    kept = _kept(samples)
    assert len(kept) <= 150
    assert kept[-1] == samples[-1]
    assert samples[-1]["t"] - kept[0]["t"] > 25
