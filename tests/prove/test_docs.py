"""The page on proofs knows every cause, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast._tools.prove.causes import CAUSES

PAGE = Path(__file__).parents[2] / "docs" / "prove.md"


def test_every_cause_has_a_line_in_the_tables():
    named = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted(CAUSES)
