"""The settings of a small cluster: as a site has them, with every wait made short."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# What proctrack/cgroup tracks a job's processes with, and what task/cgroup limits memory with.
_FREEZER = Path("/sys/fs/cgroup/freezer")
_MEMORY = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Settings:
    """What a test may want otherwise."""

    nodes: int = 3
    kill_wait: int = 8  # seconds from SIGTERM to SIGKILL; SLURM's own default is 30
    grace: int = 20  # seconds that a preempted job of the partition lowgrace has
    node_timeout: int = 30  # seconds without an answer after which a node counts as down


def tracks_by_cgroup() -> bool:
    """Whether SLURM can follow processes by cgroup here, as nearly every site does."""
    return _is_writable(_FREEZER)


def limits_memory() -> bool:
    return tracks_by_cgroup() and _is_writable(_MEMORY)


def cgroup_folders(prefix: str) -> list[Path]:
    """What the slurmd of these nodes have made."""
    return sorted(Path("/sys/fs/cgroup").glob(f"*/slurm_{prefix}[0-9]"))


def slurm_conf(folder: Path, prefix: str, ports: list[int], settings: Settings) -> str:
    """The text of slurm.conf; the first port is slurmctld's, the others are the nodes'."""
    ours = tracks_by_cgroup()
    nodes = "\n".join(
        f"NodeName={prefix}{number} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000"
        for number, port in enumerate(ports[1:], 1)
    )
    # No RequeueExit: holdfast must do without what only some sites set.
    return f"""
ClusterName={prefix}
SlurmctldHost={prefix}0(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credentials have expired: 121 s unless one says so.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny

StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
SlurmctldDebug=verbose
SlurmdDebug=verbose
LogTimeFormat=iso8601_ms

ProctrackType=proctrack/{"cgroup" if ours else "linuxproc"}
TaskPlugin=task/{"cgroup" if ours else "none"}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
# The nodes claim processors and memory that the machine need not have.
SlurmdParameters=config_overrides

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
CompleteWait=0
KillWait={settings.kill_wait}
KillOnBadExit=0
InactiveLimit=0
MinJobAge=600
MessageTimeout=20
TCPTimeout=2
SlurmctldTimeout=30
SlurmdTimeout={settings.node_timeout}

{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=main PriorityTier=10 PreemptMode=OFF Default=YES
PartitionName=high PriorityTier=20 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=lowgrace PriorityTier=1 PreemptMode=REQUEUE GraceTime={settings.grace}
PartitionName=lowcancel PriorityTier=1 PreemptMode=CANCEL GraceTime=0
"""


def cgroup_conf() -> str:
    return f"""
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace={"yes" if limits_memory() else "no"}
ConstrainSwapSpace=no
MinRAMSpace=30
"""


def _is_writable(hierarchy: Path) -> bool:
    return (hierarchy / "cgroup.procs").exists() and os.access(hierarchy, os.W_OK)
