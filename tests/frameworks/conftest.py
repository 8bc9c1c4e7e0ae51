"""Properties are checked without a clock: a busy machine is no counterexample."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, max_examples=50)
settings.load_profile("holdfast")
