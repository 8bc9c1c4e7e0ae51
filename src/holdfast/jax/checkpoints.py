"""Checkpoints of Orbax, read without a script: as NumPy arrays, for any devices."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from holdfast.jax.arrays import numbers_of

_TREES = ("_METADATA", "manifest.ocdbt", "checkpoint")  # a stored tree has at least one


def is_tree(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TREES)


def read_orbax(folder: Path) -> tuple[Any, list[str]]:
    """The stored tree, or a dict of several, and the names of other items."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # it logs every step
    # If one array is damaged, the threads that read the others print errors as well.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # about shardings, which do not matter here
        reader = ocp.PyTreeCheckpointer()
        if is_tree(folder):
            return _read(reader, folder), []
        items = sorted(each for each in folder.iterdir() if each.is_dir())
        found = {each.name: _read(reader, each) for each in items if is_tree(each)}
    return found, [each.name for each in items if each.name not in found]


def _read(reader: Any, folder: Path) -> Any:
    about = reader.metadata(str(folder.resolve()))
    about = getattr(about, "item_metadata", about)
    about = getattr(about, "tree", about)
    plain = ocp.RestoreArgs(restore_type=np.ndarray)
    wanted = jax.tree_util.tree_map(lambda _: plain, about)
    found = reader.restore(str(folder.resolve()), restore_args=wanted)
    return jax.tree_util.tree_map(
        lambda value: np.asarray(numbers_of(value)) if isinstance(value, jax.Array) else value,
        found,
    )
