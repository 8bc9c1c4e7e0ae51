"""The training and its machines: what the user knows, the defaults for the rest, and the costs.

A checkpoint stops training for one snapshot, then it is written beside the training, which slows
it down a little; it counts when it is durable. An interruption with a warning loses nothing. Of
the others, some take the host with all its memory, and the run goes back to the newest checkpoint;
the rest end processes only, and the run goes on from the newest snapshot in memory, which the
keeper makes durable meanwhile.

Where the defaults come from is in docs/plan.md: the report on Llama 3 (2024, section 3.3.4) has 419
unexpected interruptions in 54 days on 16,384 GPUs, 63 of which left the hosts as they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast._errors import SettingsError
from holdfast._run.saving.cadence import daly_interval, young_interval
from holdfast._tools.plan.units import shown

GPUS_PER_HOST = 8
GPU_MTBF_SECONDS = 16_384 * 54 * 86_400 / 419
JOB_MTBF_SECONDS = 86_400.0  # bugs, people, evictions: no GPU's fault
HOST_LOSS_SHARE = round(1 - 63 / 419, 2)
STATE_BYTES = 10e9
COPY_BYTES_PER_SECOND = 10e9  # of one GPU's state into its host's memory
HOST_BYTES_PER_SECOND = 1e9  # from a host to the disk
DISK_BYTES_PER_SECOND = 500e9  # of a shared file system, for all hosts together
RESTART_SECONDS = 120.0
INTERFERENCE = 0.05
MAX_OVERHEAD = 0.01
RUN_SECONDS = 30 * 86_400.0
SHORTEST_SNAPSHOT_SECONDS = 0.05  # as in the cadence of a run
_LEAST_COST_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True)
class Model:
    """All times in seconds."""

    mtbf: float  # between two interruptions of the whole job, of any kind
    write: float  # until a checkpoint is on disk
    snapshot: float  # for which one stops training
    restart: float  # from the interruption, or the end of the queue, to the first step
    queue: float = 0.0  # mean wait for machines
    notice_share: float = 0.0
    host_loss_share: float = 1.0  # of those without a warning
    interference: float = 0.0  # share of the writing time that training loses
    max_overhead: float = 0.0  # share of the time that snapshots may take; 0: no snapshots
    is_blocking: bool = False  # training stands still while it writes

    @property
    def cost(self) -> float:
        """The training time that a checkpoint takes."""
        return self.write if self.is_blocking else self.snapshot + self.interference * self.write

    @property
    def extra_cost(self) -> float:
        """The training time that one more checkpoint takes.

        With snapshots, the snapshot of a checkpoint counts as one of them, and the next one comes
        later for it.
        """
        extra = self.interference * self.write if self.has_snapshots else self.cost
        return max(extra, _LEAST_COST_SECONDS)

    @property
    def latency(self) -> float:
        """From the moment that a checkpoint holds until it is durable."""
        return self.write if self.is_blocking else max(self.cost, self.snapshot + self.write)

    @property
    def has_snapshots(self) -> bool:
        return self.max_overhead > 0

    @property
    def snapshot_interval(self) -> float:
        """The training between two snapshots in memory."""
        if not self.has_snapshots:
            return math.inf
        return max(SHORTEST_SNAPSHOT_SECONDS, self.snapshot / self.max_overhead)

    @property
    def losing_mtbf(self) -> float:
        """Between two interruptions that take the run back to its newest checkpoint."""
        share = 1.0 - self.notice_share
        if self.has_snapshots:
            share *= self.host_loss_share
        return self.mtbf / share if share > 0 else math.inf

    @property
    def young(self) -> float:
        return young_interval(self.extra_cost, self.losing_mtbf)

    @property
    def daly(self) -> float:
        return daly_interval(self.extra_cost, self.losing_mtbf)

    @property
    def least_interval(self) -> float:
        """One checkpoint is on disk before the next one begins."""
        return 0.0 if self.is_blocking else self.write


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the user has said, None where nothing; times in seconds, sizes in bytes."""

    state_size: float | None = None
    gpus: int = 1
    gpus_per_host: int | None = None
    mtbf_per_gpu: float | None = None
    interruptions: float | None = None
    over: float | None = None
    write_bandwidth: float | None = None
    write_time: float | None = None
    snapshot_cost: float | None = None
    restart_time: float | None = None
    queue_wait: float | None = None
    notice_share: float | None = None
    host_loss_share: float | None = None
    interference: float | None = None
    max_overhead: float | None = None
    run_time: float | None = None

    def __post_init__(self) -> None:
        if (self.interruptions is None) != (self.over is None):
            given, lacks = ("--interruptions", "--over")
            if self.interruptions is None:
                given, lacks = lacks, given
            raise SettingsError(
                f"{given} needs {lacks}: so many interruptions in so much time.\n"
                "Write both, for example: --interruptions 419 --over 54d"
            )
        for one, other in (("mtbf_per_gpu", "interruptions"), ("write_bandwidth", "write_time")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                names = " and ".join("--" + name.replace("_", "-") for name in (one, other))
                raise SettingsError(f"{names} say the same thing twice.\nLeave one of them out.")

    @property
    def hosts(self) -> int:
        return math.ceil(self.gpus / (self.gpus_per_host or GPUS_PER_HOST))

    @property
    def state_bytes(self) -> float:
        return STATE_BYTES if self.state_size is None else self.state_size

    @property
    def host_bytes(self) -> float:
        """Two snapshots of a host's share of the state; three with several ranks."""
        return (2 if self.gpus == 1 else 3) * self.state_bytes / self.hosts

    @property
    def run_seconds(self) -> float:
        return RUN_SECONDS if self.run_time is None else self.run_time


def build_model(given: Inputs) -> tuple[Model, list[str]]:
    """The model, and a sentence for each option that the user has left out."""
    assumed: list[str] = []

    def known(value: float | None, default: float, sentence: str) -> float:
        if value is not None:
            return value
        assumed.append(sentence)
        return default

    if given.state_size is None and (given.snapshot_cost is None or given.write_time is None):
        assumed.append("--state-size 10GB: 12 to 16 bytes for each parameter is usual with Adam")
    write = given.write_time
    if write is None:
        speed = min(HOST_BYTES_PER_SECOND * given.hosts, DISK_BYTES_PER_SECOND)
        most = ", and 500 GB/s for all" if speed == DISK_BYTES_PER_SECOND else ""
        hosts = f"{given.hosts:,} {'host' if given.hosts == 1 else 'hosts'}"
        text = f"--write-bandwidth {speed / 1e9:g}GB/s: 1 GB/s for each of {hosts}{most}. "
        text += "`holdfast doctor` measures it"
        write = given.state_bytes / known(given.write_bandwidth, speed, text)
    if given.interruptions is not None and given.over is not None:
        mtbf = given.over / given.interruptions
    elif given.mtbf_per_gpu is not None:
        mtbf = given.mtbf_per_gpu / given.gpus
    else:
        mtbf = 1 / (given.gpus / GPU_MTBF_SECONDS + 1 / JOB_MTBF_SECONDS)
        assumed.append(
            "--mtbf-per-gpu: one failure in 5.8 years for each GPU (Llama 3), and one "
            "interruption a day of the job besides"
        )
    copied = given.state_bytes / given.gpus / COPY_BYTES_PER_SECOND
    restart = RESTART_SECONDS + write
    copy_text = f"--snapshot-cost {_option(copied)}: a GPU's share of the state at 10 GB/s"
    restart_text = f"--restart-time {_option(restart)}: two minutes, and the time to read the state"
    loss_text = f"--host-loss-share {HOST_LOSS_SHARE}: as we read the causes in the Llama 3 report"
    slows_text = f"--interference {INTERFERENCE}: of the time that a checkpoint is being written"
    overhead_text = f"--max-overhead {MAX_OVERHEAD}: the default of Settings"
    model = Model(
        mtbf=mtbf,
        write=write,
        snapshot=known(given.snapshot_cost, copied, copy_text),
        restart=known(given.restart_time, restart, restart_text),
        queue=known(given.queue_wait, 0.0, "--queue-wait 0s: machines are there at once"),
        notice_share=known(given.notice_share, 0.0, "--notice-share 0: no warning ever comes"),
        host_loss_share=known(given.host_loss_share, HOST_LOSS_SHARE, loss_text),
        interference=known(given.interference, INTERFERENCE, slows_text),
        max_overhead=known(given.max_overhead, MAX_OVERHEAD, overhead_text),
    )
    if given.run_time is None:
        assumed.append("--run-time 30d")
    return model, assumed


def _option(seconds: float) -> str:
    return shown(seconds).replace(" ", "")
