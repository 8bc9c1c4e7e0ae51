"""A plugin that selects the tests of one layer: `pytest --layer jax`.

A layer is an environment and the tests that need it. tests/tiers.toml lists the files of each
layer. A file in no list belongs to `test`. A file may be in several lists: its tests belong to the
first, unless `@pytest.mark.layer("jax")` on a test or a parameter names another. Files that are
named on the command line without a layer are collected whole.
"""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
_LAYERS_OF = pytest.StashKey[dict[Path, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layer", help="whose tests to run (test): see tests/tiers.toml")


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background, or nohup, has these ignored. A process that
    # a test starts would inherit that.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    layers = tomllib.loads((ROOT / "tests" / "tiers.toml").read_text())["layers"]
    found: dict[Path, list[str]] = {}
    for name, layer in layers.items():
        for pattern in layer.get("files", []):
            paths = sorted(ROOT.glob(pattern))
            if not paths:
                raise pytest.UsageError(f"tests/tiers.toml: {name}: there is no {pattern}")
            for path in paths:
                found.setdefault(path, []).append(name)
    config.stash[_LAYERS_OF] = found
    # `make test` answers the same for the same code. At night other examples are drawn each time.
    settings.register_profile("tier", derandomize=config.option.markexpr == "not nightly")
    settings.load_profile("tier")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    layers = config.stash[_LAYERS_OF].get(collection_path, ["test"])
    return None if _wanted(config) in layers else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    are_files = all(word.partition("::")[0].endswith(".py") for word in config.args)
    if are_files and config.getoption("--layer") is None:
        return  # A person asks for just these.
    wanted, files = _wanted(config), config.stash[_LAYERS_OF]
    others = [item for item in items if _layer_of(item, files) != wanted]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _layer_of(item, files) == wanted]


def _wanted(config: pytest.Config) -> str:
    return config.getoption("--layer") or "test"


def _layer_of(item: pytest.Item, files: dict[Path, list[str]]) -> str:
    mark = item.get_closest_marker("layer")
    return str(mark.args[0]) if mark is not None else files.get(item.path, ["test"])[0]
