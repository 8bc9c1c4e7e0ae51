"""What holdfast knows of DistributedDataParallel, with real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")
if not torch.distributed.is_available():
    pytest.skip("needs a torch that is built with torch.distributed", allow_module_level=True)

from holdfast._keeper.ranks.comparison import name_straggler
from holdfast._store.folder import series
from holdfast.torch.ddp import WaitMeter, find_ddp, refuse, replicated_keys, settle_buckets
from tests.fork_server import ForkServer
from tests.support import wait_until

SCRIPT = Path(__file__).with_name("ddp_ranks.py")
Act = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def act(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Act:
    """Let a world of ranks do something; whatever a rank finds wrong fails here."""

    def begin(name: str, world: int) -> Path:
        place = tmp_path_factory.mktemp("world")
        ranks = [
            fork_server.start(
                *(SCRIPT, name, place, place / "meeting", r, world), output=place / f"output-{r}"
            )
            for r in range(world)
        ]
        wait_until(
            lambda: all(r.is_over for r in ranks) or any(r.poll() for r in ranks), 60, "its end"
        )
        failed = [rank.output for rank in ranks if rank.poll()]
        assert not failed, "\n".join(failed)
        return place

    return begin


@pytest.mark.nightly  # tests/ranks/test_examples.py resumes DDP on two ranks to the bit
def test_the_first_step_after_a_resume_sums_as_the_undisturbed_run_did(act: Act) -> None:
    act("bits", 4)


@pytest.mark.nightly
def test_buckets_are_sent_while_the_backward_pass_goes_on(act: Act) -> None:
    act("buckets", 2)


def test_what_is_wrapped_and_what_is_replicated(act: Act) -> None:
    act("state", 2)


@pytest.mark.nightly  # tests/unit/keeper/test_stragglers.py
@pytest.mark.parametrize(("late", "where", "world"), [(0, "data", 2), (3, "backward", 4)])
def test_a_rank_that_sleeps_is_named_within_fifty_steps(
    act: Act, late: int, where: str, world: int
) -> None:
    folder = act(f"late:{late} in {where}", world)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    named = set()
    for count in range(1, len(found[0][0]) + 1):
        waits = {rank: samples[:count] for rank, (samples, _) in enumerate(found)}
        verdict = name_straggler(waits, found[0][1])
        if verdict is not None:
            named.add(verdict[0])
            assert verdict[1] == pytest.approx(0.05, rel=0.5)
    assert named == {late}, found


@pytest.mark.nightly
def test_one_series_tells_how_long_each_rank_waits(act: Act) -> None:
    folder = act("run:1", 2) / "run"
    (path,) = folder.glob("attempts/*/series*")
    rows = list(series.read(path))
    assert (rows[-1]["s"], sum(row["n"] for row in rows)) == (60, 60)
    waits = [row["waits"] for row in rows if "waits" in row][-1]
    assert waits["0"] - waits["1"] == pytest.approx(0.05, rel=0.5)
    folds = [row.get("m", {}) for row in rows]
    # What other ranks log is their own.
    assert {fold["rank"][2] for fold in folds if "rank" in fold} == {0.0}
    assert sum(fold["loss"][3] for fold in folds if "loss" in fold) == 60


def test_without_a_process_group_there_is_nothing_to_know() -> None:
    model = torch.nn.Linear(2, 2)
    assert find_ddp({"model": model}) == []
    assert len(replicated_keys({"model": model}, [])) == 0
    assert settle_buckets([]) == []
    assert WaitMeter([]).read() is None
    assert refuse(model) is None
