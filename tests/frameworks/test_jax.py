"""JAX: pytrees, keys and sharded arrays come back to the bit. The checks are beside this file."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import environment

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs: pip install 'holdfast[jax]' flax optax equinox", allow_module_level=True)

_HERE = Path(__file__).parent
_MODULES = ("jax_checks", "jax_tree_checks")
_NAMES = [
    node.name
    for module in _MODULES
    for node in ast.parse((_HERE / f"{module}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every check has found, in one process with four devices."""
    done = subprocess.run(
        [
            sys.executable,
            str(_HERE / "jax_support.py"),
            str(tmp_path_factory.mktemp("jax")),
            *_MODULES,
        ],
        env=environment(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4"),
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)  # the first of them waits for all checks
@pytest.mark.parametrize("name", _NAMES)
def test_that(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""
