"""What cannot be made here: the verdict on the text of a death.

An OOM kill of the whole machine is in tests/unit/diagnose/test_recorded_deaths.py, by its counters.
"""

from __future__ import annotations

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_log
from holdfast._diagnose.verdict import Cause, Sure
from tests.deaths.stage import text_of

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
