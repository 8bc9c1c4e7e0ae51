"""TensorFlow: `adapter.py` is what a run uses; scripts need nothing from here."""

from __future__ import annotations

from holdfast._errors import missing_framework

try:
    import tensorflow as tensorflow
except ImportError as error:
    raise missing_framework("tensorflow", "TensorFlow") from error
