"""A job of several ranks copies with one hand, and comes back with all of them."""

from __future__ import annotations

import shutil

import pytest

from tests.mirror.conftest import copied_steps, uploaders
from tests.ranks.conftest import jobs, undisturbed  # noqa: F401  fixtures
from tests.support import run_id, wait_until

_TOTAL = 30


@pytest.mark.nightly  # test_restoring.py
@pytest.mark.parametrize("meets", [pytest.param("group", marks=pytest.mark.nightly), "files"])
def test_two_ranks_go_on_from_the_mirror_to_the_same_bits(jobs, undisturbed, mirror, meets):  # noqa: F811  as above
    settings = {"mirror": str(mirror), "mirror_wait": True}
    job = jobs.start(meets=meets, total=12, settings=settings)
    job.hashes()
    jobs.check_nothing_left()
    wait_until(lambda: not uploaders(jobs.folder), what="the end of the uploader")
    assert copied_steps(jobs.folder) == [12]
    known = run_id(jobs.folder)
    shutil.rmtree(jobs.folder)
    again = jobs.start(meets=meets, total=_TOTAL, settings=settings)
    assert again.hashes() == undisturbed(meets=meets, total=_TOTAL)
    assert again.started_at() == [12, 12]
    assert again.said.count("came from") == 1
    assert run_id(jobs.folder) == known
    jobs.check_nothing_left()
