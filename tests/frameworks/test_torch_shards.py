"""Sharded tensors: stored in parts by real ranks, taken back on other meshes, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")
if not torch.distributed.is_available() or torch.__version__ < (2, 6):
    pytest.skip("pip install 'torch>=2.6' for fully_shard", allow_module_level=True)

from tests.fork_server import ForkServer
from tests.often import few
from tests.support import environment, wait_until

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
ROOT = Path(__file__).parents[2]
Act = Callable[[str, str, Path, int], None]
Saved = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def act(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Act:
    """Let a world of ranks do something; whatever a rank finds wrong fails here."""

    def begin(name: str, kind: str, folder: Path, world: int) -> None:
        place = tmp_path_factory.mktemp("world")
        ranks = [
            fork_server.start(
                *(SCRIPT, name, kind, folder, place / "meeting", r, world),
                output=place / f"{r}",
                env=environment(PYTHONPATH=str(ROOT)),
            )
            for r in range(world)
        ]
        wait_until(
            lambda: all(r.is_over for r in ranks) or any(r.poll() for r in ranks), 60, "its end"
        )
        failed = [rank.output for rank in ranks if rank.poll()]
        assert not failed, "\n".join(failed)

    return begin


@pytest.fixture(scope="module")
def saved(act: Act, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What a world of ranks has stored, made once."""
    known: dict[tuple[str, int], Path] = {}

    def find(kind: str, world: int) -> Path:
        if (kind, world) not in known:
            known[kind, world] = tmp_path_factory.mktemp(kind)
            act("save", kind, known[kind, world], world)
        return known[kind, world]

    return find


# Over 5 s: two lives of four ranks.
@pytest.mark.parametrize("kind", few(["fsdp", "wide-2d", "wide-hybrid"], ("fsdp",)))
def test_the_same_ranks_go_on_as_if_nothing_had_been(act: Act, saved: Saved, kind: str) -> None:
    act("go on", kind, saved(kind, 4), 4)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_numbers_of_ranks_hold_the_same_whole(act: Act, saved: Saved, world: int) -> None:
    act("resume", "fsdp", saved("fsdp", 4), world)


@pytest.mark.nightly  # as the next one
@pytest.mark.parametrize(
    ("kind", "world", "then", "ranks"),
    [
        ("plain", 1, "fsdp", 4),  # sharded, now whole
        ("fsdp", 3, "plain", 1),  # whole, now sharded
        ("wide-2d", 2, "wide-2d", 4),
        ("wide-plain", 1, "wide-2d", 4),
        ("wide", 3, "wide-hybrid", 4),
    ],
)
def test_another_way_of_sharding_holds_the_same_whole(
    act: Act, saved: Saved, kind: str, world: int, then: str, ranks: int
) -> None:
    act("resume", kind, saved(then, ranks), world)


@pytest.mark.parametrize("world", [2, 4, 6])
def test_corners(act: Act, tmp_path: Path, world: int) -> None:
    """What is checked is told by the names in sharded_corners.py."""
    act("corners", str(world), tmp_path, world)
