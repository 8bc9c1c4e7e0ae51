"""What cannot be made here: the verdict on a true record of a death, with other figures in it."""

from __future__ import annotations

import json
import signal

import pytest

from holdfast._record.layout import RunLayout
from holdfast._why.gather import gather_run
from holdfast._why.judge import judge
from holdfast._why.logs import gather_log
from holdfast._why.verdict import Cause, Sure
from tests.deaths.stage import die, text_of
from tests.deaths.table import DEATHS

_KILL = next(d for d in DEATHS if d.sent == signal.SIGKILL)
# As torch prints it.
_CUDA_OOM = """\
Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in <module>
    loss = model(batch).square().mean()
           ^^^^^^^^^^^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \
capacity of 23.65 GiB of which 1.31 GiB is free. Including non-PyTorch memory, this process has \
22.33 GiB memory in use. Of the allocated memory 18.02 GiB is allocated by PyTorch, and 3.87 GiB \
is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting \
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
"""
_NCCL = """\
[rank0]:[E1016 10:00:10.123456789 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, \
Timeout(ms)=600000) ran for 600029 milliseconds before timing out.
[rank0]:[E1016 10:00:10.223456789 ProcessGroupNCCL.cpp:739] [Rank 0] To avoid data inconsistency, \
we are taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception: \
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=412, OpType=ALLREDUCE, \
NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.
"""


@pytest.mark.skip(reason="the whole machine would have to run out of memory: see the next test")
def test_oom_kill_of_the_machine():
    raise NotImplementedError


def test_oom_kill_of_the_machine_by_the_counters_of_a_record(on_stage):
    stage = on_stage(_KILL)
    die(stage, _KILL, is_run=True, is_led=False)
    assert stage.judge_run().cause is Cause.KILLED
    path = RunLayout(stage.folder).death(1)
    death = json.loads(path.read_text())
    quiet = {"version": 2, "path": "/job", "limit": 64 << 30, "oom": 0, "oom_kill": 0, "max": 0}
    before = {"cgroup": quiet, "vmstat_oom_kill": 3}
    after = {"cgroup": {**quiet, "oom_kill": 1}, "vmstat_oom_kill": 4}
    death["counters"] = {"start": before, "before": before, "death": after}
    path.write_text(json.dumps(death))
    verdict = judge(gather_run(stage.folder))
    assert (verdict.cause, verdict.sure) == (Cause.OOM_MACHINE, Sure.CERTAIN), text_of(verdict)


def test_cuda_out_of_memory_by_its_text(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(_CUDA_OOM)
    verdict = judge(gather_log(log))
    assert (verdict.cause, verdict.sure) == (Cause.CUDA_OOM, Sure.CERTAIN), text_of(verdict)
    for figure in ("2.0", "23.6", "3.8"):
        assert figure in text_of(verdict)
    assert "expandable_segments" in " ".join(verdict.advice)


def test_nccl_timeout_by_its_text(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(_NCCL)
    verdict = judge(gather_log(log))
    assert verdict.cause is Cause.COLLECTIVE_TIMEOUT, text_of(verdict)
    assert "ALLREDUCE" in text_of(verdict)
