"""Runs the checks of JAX in a process of its own: JAX has threads, and warns of every fork.

`python jax_support.py FOLDER MODULE…` runs every check of the modules and prints how each went.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import holdfast


def store(folder: Path, **state: Any) -> None:
    with holdfast.Run(folder, **state) as run:
        for _ in run.steps(run.step + 1):
            pass


def restore(folder: Path, **state: Any) -> dict[str, Any]:
    with holdfast.Run(folder, **state) as run:
        assert run.resumed_from is not None
        return dict(run.state)


def round_trip(folder: Path, saved: Any, fresh: Any) -> Any:
    store(folder, value=saved)
    return restore(folder, value=fresh)["value"]


def bits(value: Any) -> bytes:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def assert_same(now: Any, then: Any) -> None:
    leaves, tree = jax.tree.flatten(now)
    expected, tree_then = jax.tree.flatten(then)
    assert tree == tree_then, f"{tree}\n{tree_then}"
    for a, b in zip(leaves, expected, strict=True):
        assert type(a) is type(b)
        if not isinstance(b, jax.Array):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
        assert bits(a) == bits(b)


def emptied(tree: Any) -> Any:
    """Another value of the same form."""

    def empty(x: Any) -> Any:
        # By NumPy: JAX would compile a function for each shape and type.
        return jnp.asarray(np.zeros_like(np.asarray(x))) if isinstance(x, jax.Array) else x

    return jax.tree.map(empty, tree)


@contextlib.contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} not in: {caught.value}"


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is said meanwhile."""
    found: list[str] = []
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        yield found
    found += stream.getvalue().splitlines()


def mesh_of(count: int, name: str = "x") -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), (name,))


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    for module in map(importlib.import_module, sys.argv[2:]):
        for name, check in vars(module).items():
            if not name.startswith("check_"):
                continue
            (folder / name).mkdir()
            try:
                check(folder / name)
                results[name] = ""
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  each is to be heard of
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
