"""What a person knows of a training, and what is assumed in place of the rest.

Meta's report on Llama 3 (2024, section 3.3.4) is where some of it comes from: 419 unexpected
interruptions in 54 days on 16,384 GPUs is one in 5.8 years for each GPU. In its table of causes
63 of them (software 54, NCCL watchdog 7, dependency 2) leave the hosts as they were; that all
the others take a host out of the job is read into it here, and not said there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast._errors import SettingsError
from holdfast._tools.plan.model import Model
from holdfast._tools.plan.units import shown

GPUS_PER_HOST = 8
GPU_MTBF_SECONDS = 16_384 * 54 * 86_400 / 419
JOB_MTBF_SECONDS = 86_400.0  # bugs, people, evictions: what is no GPU's fault
HOST_LOSS_SHARE = round(1 - 63 / 419, 2)
STATE_BYTES = 10e9
COPY_BYTES_PER_SECOND = 10e9  # of one GPU's state into its host's memory
HOST_BYTES_PER_SECOND = 1e9  # from a host to the disk
DISK_BYTES_PER_SECOND = 500e9  # of a shared file system, for all hosts together
RESTART_SECONDS = 120.0
INTERFERENCE = 0.05
MAX_OVERHEAD = 0.01
RUN_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """None is what nobody has said; times in seconds, sizes in bytes."""

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
        _refuse_both("--mtbf-per-gpu", self.mtbf_per_gpu, "--interruptions", self.interruptions)
        _refuse_both("--write-bandwidth", self.write_bandwidth, "--write-time", self.write_time)

    @property
    def hosts(self) -> int:
        return math.ceil(self.gpus / (self.gpus_per_host or GPUS_PER_HOST))

    @property
    def run_seconds(self) -> float:
        return RUN_SECONDS if self.run_time is None else self.run_time


def _refuse_both(one: str, first: float | None, other: str, second: float | None) -> None:
    if first is not None and second is not None:
        raise SettingsError(f"{one} and {other} say the same thing twice.\nLeave one of them out.")


def build_model(given: Inputs) -> tuple[Model, list[str]]:
    """The model, and a sentence for each thing that nobody has said."""
    assumed: list[str] = []

    def known(value: float | None, otherwise: float, sentence: str) -> float:
        if value is None:
            assumed.append(sentence)
        return otherwise if value is None else value

    needs_size = given.snapshot_cost is None or given.write_time is None
    size = STATE_BYTES if given.state_size is None else given.state_size
    if given.state_size is None and needs_size:
        assumed.append("--state-size 10GB: 12 to 16 bytes for each parameter is usual with Adam")
    bandwidth = given.write_bandwidth
    if bandwidth is None:
        bandwidth = min(HOST_BYTES_PER_SECOND * given.hosts, DISK_BYTES_PER_SECOND)
    write = size / bandwidth if given.write_time is None else given.write_time
    if given.write_time is None and given.write_bandwidth is None:
        most = ", and 500 GB/s for all" if bandwidth == DISK_BYTES_PER_SECOND else ""
        assumed.append(
            f"--write-bandwidth {bandwidth / 1e9:g}GB/s: 1 GB/s for each of "
            f"{_count(given.hosts, 'host')}{most}. `holdfast doctor` measures it"
        )
    copied = size / given.gpus / COPY_BYTES_PER_SECOND
    model = Model(
        mtbf=_mtbf(given, assumed),
        write=write,
        snapshot=known(
            given.snapshot_cost,
            copied,
            f"--snapshot-cost {_option(copied)}: a GPU's share of the state at 10 GB/s",
        ),
        restart=known(
            given.restart_time,
            RESTART_SECONDS + write,
            f"--restart-time {_option(RESTART_SECONDS + write)}: two minutes, and the time to "
            "read the state",
        ),
        queue=known(given.queue_wait, 0.0, "--queue-wait 0s: machines are there at once"),
        notice_share=known(given.notice_share, 0.0, "--notice-share 0: no warning ever comes"),
        host_loss_share=known(
            given.host_loss_share,
            HOST_LOSS_SHARE,
            f"--host-loss-share {HOST_LOSS_SHARE}: as we read the causes in the Llama 3 report",
        ),
        interference=known(
            given.interference,
            INTERFERENCE,
            f"--interference {INTERFERENCE}: of the time that a checkpoint is being written",
        ),
        max_overhead=known(
            given.max_overhead,
            MAX_OVERHEAD,
            f"--max-overhead {MAX_OVERHEAD}: the default of Settings",
        ),
    )
    if given.run_time is None:
        assumed.append("--run-time 30d")
    return model, assumed


def _mtbf(given: Inputs, assumed: list[str]) -> float:
    if given.interruptions is not None and given.over is not None:
        return given.over / given.interruptions
    if given.mtbf_per_gpu is not None:
        return given.mtbf_per_gpu / given.gpus
    assumed.append(
        "--mtbf-per-gpu: one failure in 5.8 years for each GPU (Llama 3), and one interruption "
        "a day of the job besides"
    )
    return 1 / (given.gpus / GPU_MTBF_SECONDS + 1 / JOB_MTBF_SECONDS)


def _option(seconds: float) -> str:
    return shown(seconds).replace(" ", "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
