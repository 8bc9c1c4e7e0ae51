"""A leak is told of in time; what only looks like one is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from holdfast._environment.processes.memory_growth import Forecast, Growth

MB, GB = 1e6, 1e9
Course = Callable[[float], float]


def _forecasts(
    course: Course, hertz: float, seconds: float, limit: float = 8 * GB
) -> tuple[list[tuple[float, Forecast]], float]:
    """All that were made, each with when, and the time of the end: at the limit or before."""
    growth, found, chance = Growth(), [], random.Random(1)
    for n in range(int(seconds * hertz)):
        at = n / hertz
        if course(at) >= limit:
            return found, at
        moment = 1e9 + at + chance.uniform(-0.02, 0.02) / hertz
        growth.add({"t": moment, "cgroup": int(course(at)), "limit": int(limit)})
        told = growth.forecast()
        if told is not None:
            found.append((at, told))
    return found, seconds


@pytest.mark.parametrize("hertz", [1, 10])
@pytest.mark.parametrize("noise", [0, 60 * MB])
def test_a_leak_of_40_mb_a_second_is_told_of_8_s_before_the_limit(
    hertz: float, noise: float
) -> None:
    chance = random.Random(2)
    found, end = _forecasts(
        lambda t: 500 * MB + 40 * MB * t + chance.uniform(0, noise), hertz, 100, 2 * GB
    )
    first, told = found[0]
    assert end - first >= 8
    assert told.seconds == pytest.approx(end - first, rel=0.25)
    assert told.bytes_per_second == pytest.approx(40 * MB, rel=0.25)
    assert (told.what, told.limit) == ("cgroup", 2 * GB)


def test_a_leak_of_400_mb_a_second_is_told_of_1_s_before_the_limit() -> None:
    found, end = _forecasts(lambda t: 500 * MB + 400 * MB * t, 10, 100, 2 * GB)
    assert end - found[0][0] >= 1


def test_it_is_told_of_until_the_end() -> None:
    found, end = _forecasts(lambda t: 500 * MB + 40 * MB * t, 10, 100, 2 * GB)
    assert found[-1][0] == pytest.approx(end, abs=0.15)
    assert found[-1][1].seconds < 0.3


def test_a_leak_that_is_faster_in_the_end_is_told_of_with_its_speed_of_late() -> None:
    found, end = _forecasts(lambda t: GB + MB * t + 200 * MB * max(0, t - 60), 10, 200, 5 * GB)
    assert end - found[0][0] >= 4
    assert found[-1][1].bytes_per_second == pytest.approx(201 * MB, rel=0.1)


@pytest.mark.parametrize("hertz", [1, 10])
@pytest.mark.parametrize("height", [3 * GB, 6 * GB, 7 * GB])
def test_a_jump_and_then_nothing_is_no_leak(hertz: float, height: float) -> None:
    """A model was loaded."""
    found, _ = _forecasts(lambda t: 500 * MB + (height if t > 10.05 else 0), hertz, 120)
    assert found == []


@pytest.mark.parametrize("hertz", [1, 10])
def test_a_load_that_takes_seconds_is_no_leak(hertz: float) -> None:
    found, _ = _forecasts(lambda t: 500 * MB + min(3 * GB, max(0, t - 10) * GB), hertz, 120)
    assert found == []


@pytest.mark.parametrize("hertz", [1, 10])
@pytest.mark.parametrize("period", [3, 10, 47])
def test_what_rises_and_falls_is_no_leak(hertz: float, period: float) -> None:
    found, _ = _forecasts(lambda t: GB + (t % period) / period * 3 * GB, hertz, 150)
    assert found == []


@pytest.mark.parametrize("hertz", [1, 10])
def test_what_has_shown_how_high_it_goes_is_no_leak_below_that(hertz: float) -> None:
    """Twice, since a fall from the only height may have been a load at the start."""
    found, _ = _forecasts(lambda t: 2 * GB + (t % 10) / 10 * 5 * GB, hertz, 100)
    assert all(at < 25 for at, _ in found)


def test_a_leak_below_what_rises_and_falls_is_found() -> None:
    found, end = _forecasts(lambda t: GB + (t % 10) / 10 * 2 * GB + t * 10 * MB, 1, 900)
    first, told = found[0]
    assert end - first > 60
    assert told.seconds == pytest.approx(end - first, rel=0.3)


@pytest.mark.parametrize("hertz", [1, 10])
def test_noise_is_no_leak(hertz: float) -> None:
    chance = random.Random(3)
    found, _ = _forecasts(lambda _: 5 * GB + chance.gauss(0, 0.5 * GB), hertz, 700 / hertz)
    assert found == []


def test_a_limit_that_is_hours_away_is_not_told_of() -> None:
    found, _ = _forecasts(lambda t: 4 * GB + 0.3 * MB * t, 1, 3000)
    assert found == []


def test_a_slow_leak_is_told_of_minutes_before() -> None:
    found, end = _forecasts(lambda t: GB + 5 * MB * t, 1, 3000)
    assert end - found[0][0] > 300
    assert found[0][1].seconds == pytest.approx(end - found[0][0], rel=0.1)


def test_page_cache_is_no_leak() -> None:
    """It is not in the level of the cgroup, and in no other."""
    growth = Growth()
    for n in range(300):
        growth.add(
            {
                **{"t": 1e9 + n, "cgroup": 2 * 10**9, "cache": n * 10**8, "limit": 32 * 10**9},
                **{"available": 60 * 10**9, "total": 64 * 10**9, "shm": 0, "shm_free": 32 * 10**9},
            }
        )
        assert growth.forecast() is None


@pytest.mark.parametrize("what", ["machine", "shm"])
def test_the_machine_and_shared_memory_have_limits_too(what: str) -> None:
    growth = Growth()
    for n in range(30):
        used = n * 10**8
        machine, shm = (used, 0) if what == "machine" else (10**9, used)
        growth.add(
            {
                **{"t": 1e9 + n, "cgroup": 10**8, "limit": None, "total": 4 * 10**9},
                **{"available": 4 * 10**9 - machine, "shm": shm, "shm_free": 4 * 10**9 - shm},
            }
        )
    found = growth.forecast()
    assert found is not None
    assert (found.what, found.limit, found.used) == (what, 4 * 10**9, 29 * 10**8)
    assert found.seconds == pytest.approx(11, rel=0.05)


def test_the_nearest_limit_is_told_of() -> None:
    growth = Growth()
    for n in range(30):
        used = n * 10**8
        levels = {"cgroup": used, "limit": 4 * 10**9, "available": 35 * 10**8 - used}
        growth.add({"t": 1e9 + n, "total": 35 * 10**8, **levels})
    found = growth.forecast()
    assert found is not None
    assert found.what == "machine"


def test_little_is_left_or_it_goes_fast_and_it_is_looked_at_more_often() -> None:
    def is_close(course: Course) -> bool:
        growth = Growth()
        for n in range(20):
            growth.add({"t": 1e9 + n, "cgroup": int(course(n)), "limit": int(8 * GB)})
        return growth.is_close()

    assert not is_close(lambda _: 5 * GB)
    assert is_close(lambda _: 6.5 * GB)
    assert not is_close(lambda t: GB + 10 * MB * t)
    assert is_close(lambda t: GB + 150 * MB * t)


def test_samples_without_figures_and_a_clock_that_was_set_back_are_borne() -> None:
    growth = Growth()
    assert growth.forecast() is None
    assert not growth.is_close()
    for sample in ({}, {"t": 1e9}, {"t": 1e9, "cgroup": None, "limit": 5}, {"t": 1e9, "shm": 3}):
        growth.add(sample)
    for n in range(100):
        at = 1e9 + n - (3600 if n > 50 else 0)
        growth.add({"t": at, "cgroup": int(math.fmod(n, 7)), "limit": 10**9})
    assert growth.forecast() is None
