"""JAX: `adapter.py` is what a run uses; scripts need nothing from here."""

from __future__ import annotations

from holdfast._errors import missing_framework

try:
    import jax as jax
except ImportError as error:
    raise missing_framework("jax", "JAX") from error
