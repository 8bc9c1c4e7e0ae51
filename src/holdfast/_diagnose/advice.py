"""What to do next, for each cause: concrete, with the line to type."""

from __future__ import annotations

from pathlib import Path

from holdfast import _text
from holdfast._diagnose.evidence.case import Case
from holdfast._diagnose.evidence.memory import Use, tell_graphs
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout

_MEMORY_STEPS = 5.0  # per cent of the memory that a hint must be about to be worth it


def go_on(case: Case) -> list[str]:
    """How to go on from what is safe."""
    if case.evidence.kind != "run":
        return []
    attempt, newest = case.evidence.attempt, case.evidence.newest
    if attempt and newest and attempt < newest:
        return [f"The run has gone on since, in attempt {attempt + 1}: holdfast why RUN"]
    step = case.durable_step
    if step is None:
        # A start that was cut while it fetched has nothing here yet, and all of it there.
        known = _mirror_step(Path(case.evidence.subject))
        if known is not None:
            return [f"Start the same command again: its mirror has step {known}."]
        return ["Start the same command again: nothing was durable, so it begins at the beginning."]
    return [f"Start the same command again: it goes on at step {step}."]


def _mirror_step(folder: Path) -> int | None:
    """The newest step in the run's mirror, by what was noted of it."""
    held = _text.records(read_json(RunLayout(folder.absolute()).mirror).get("checkpoints"))
    return _text.whole(held[-1].get("step")) if held else None


def host_memory(case: Case, use: Use, *, is_machine: bool = False) -> list[str]:
    """Less memory, or more of it."""
    return [*less_memory(case, use), _more_memory(case, is_machine=is_machine), *go_on(case)]


def less_memory(case: Case, use: Use) -> list[str]:
    """What a training can do without."""
    whole = use.tree or use.used or 0
    said = []
    graphs = tell_graphs(case.end.graphs)
    if graphs:
        said.append(
            f"Let the graphs go: {graphs[0]}. Keep loss.item() or loss.detach() there, not the "
            "loss itself."
        )
    if use.worker_count and use.workers and use.workers > whole * _MEMORY_STEPS / 100:
        each = _text.size(use.workers / use.worker_count)
        said.append(
            f"Use fewer data-loader workers: DataLoader(…, num_workers={use.worker_count // 2}) "
            f"(each of the {use.worker_count} had {each}), or a smaller prefetch_factor."
        )
    if use.shm and use.limit and use.shm > use.limit / 10:
        said.append(
            f"/dev/shm counts too ({_text.size(use.shm)} of it were in use): pin_memory=False and "
            "fewer prefetched batches make it smaller. Old files there: holdfast clean"
        )
    if not graphs:
        said.append(
            "If memory grew step by step, something is kept: sum up loss.item() or loss.detach(), "
            "not the loss itself, which keeps its whole graph; a list in a Dataset grows in every "
            "worker."
        )
    return said


def _more_memory(case: Case, *, is_machine: bool) -> str:
    if is_machine:
        return (
            "See what else runs there (ps aux --sort=-rss | head), or move to a machine with more "
            "memory. A limit of its own (systemd-run -p MemoryMax=…, sbatch --mem=…) protects it."
        )
    if case.is_in_slurm:
        return "Ask SLURM for more: sbatch --mem=… (now: scontrol show job JOBID | grep -i mem)"
    return (
        "Or raise the limit: docker run --memory=…, in Kubernetes resources.limits.memory, in "
        "systemd MemoryMax=…"
    )


def worker_memory(case: Case) -> list[str]:
    """Where a worker was the victim."""
    return [
        "Use fewer data-loader workers (num_workers) or a smaller prefetch_factor: each worker "
        "holds whole batches, and its own copy of whatever its Dataset touches.",
        "Keep big tables in a Dataset as one numpy array or tensor, not as a list of Python "
        "objects: reading those copies them into every worker.",
        _more_memory(case, is_machine=False),
        *go_on(case),
    ]


LARGER_SHM = (
    "Make it larger: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with "
    "medium: Memory, mounted at /dev/shm; else: sudo mount -o remount,size=8g /dev/shm",
    "Or need less of it: fewer num_workers, a smaller prefetch_factor or batch size, or "
    "torch.multiprocessing.set_sharing_strategy('file_system').",
    "See what is in it: ls -l /dev/shm; what dead runs left there: holdfast clean",
)


def shm_full(case: Case) -> list[str]:
    """A /dev/shm that is too small for the batches on their way."""
    return [*LARGER_SHM, *go_on(case)]


def cuda_memory(case: Case, *, is_fragmented: bool, keeps_graphs: bool) -> list[str]:
    """GPU memory."""
    said = []
    if keeps_graphs:
        said.append(
            "Let the graphs go: collect loss.item() or loss.detach() and not loss, and call "
            "backward() in every step of an accumulation, not once on a sum of losses."
        )
    if is_fragmented:
        said.append(
            "Much is reserved and not used, so it is fragmentation. Start it with: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    said += [
        "Make the batch smaller and accumulate gradients over several (backward() each time).",
        "Trade time for memory: torch.utils.checkpoint, bfloat16 (torch.autocast), "
        "optimizer.zero_grad(set_to_none=True), torch.no_grad() around the validation.",
        "See who else is on the GPU: nvidia-smi",
    ]
    if not is_fragmented:
        said.append("If sizes of batches vary: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return [*said, *go_on(case)]


def cuda_error(case: Case) -> list[str]:
    """An error of the device, told at some later call."""
    return [
        "The line in the traceback may be a later one: errors come when the GPU is waited for. For "
        "the right line: CUDA_LAUNCH_BLOCKING=1",
        "A device-side assert is mostly an index out of range (labels, embeddings): run the same "
        "batch on the CPU, which says which.",
        "For a broken GPU: nvidia-smi -q -d ECC, and sudo dmesg | grep -i xid",
        *go_on(case),
    ]


def disk_full(case: Case, path: str) -> list[str]:
    """No room."""
    where = path or "the folder that it wrote to"
    return [
        f"Make room: df -h {where}; df -i {where} (inodes run out too); quota -s",
        "Keep fewer checkpoints (keep_last=…), write them elsewhere, and see what dead runs have "
        "left: holdfast clean",
        *go_on(case),
    ]


def killed(case: Case, *, knows_counters: bool) -> list[str]:
    """Somebody's SIGKILL."""
    said = [
        "Linux does not record the sender of a SIGKILL. Candidates: you (kill -9, an IDE's stop "
        "button), another of the machine's users, a script that cleans up, a container's runtime."
    ]
    if case.is_in_slurm:
        said.append("SLURM may know: sacct -j JOBID --format=JobID,State,ExitCode,DerivedExitCode")
    if not knows_counters:
        said.append(
            "As root, the kernel log tells an OOM kill: dmesg -T | grep -i 'killed process'"
        )
    return [*said, *go_on(case)]


def crashed(case: Case, *, has_stack: bool) -> list[str]:
    """A crash outside Python."""
    said = []
    if not has_stack:
        said.append("For the Python stack of the next one: PYTHONFAULTHANDLER=1")
    said += [
        "Most are a library's: see that torch, its CUDA and extensions fit each other "
        "(python -m torch.utils.collect_env), and whether a newer version helps.",
        "With num_workers=0 it crashes in the open, if a data-loader worker or a library that does "
        "not survive fork (OpenCV, HDF5, CUDA) is behind it.",
        "For a core file: ulimit -c unlimited, then coredumpctl gdb or gdb python core",
    ]
    return [*said, *go_on(case)]


def worker_died(case: Case) -> list[str]:
    """A data-loader worker that is gone, for another reason than memory."""
    return [
        "Run it with num_workers=0: then the worker's own error shows, with its traceback.",
        "If the worker crashes only in a worker: multiprocessing_context='spawn', and "
        "cv2.setNumThreads(0) for OpenCV.",
        *go_on(case),
    ]


def timed_out(case: Case) -> list[str]:
    """A collective that not all ranks came to."""
    return [
        f"See what {case.who} did at that moment: its stack, its log, its data. The others only "
        "waited for it.",
        "Ranks that do unequal work (a rank-0 validation, an uneven last batch) need a longer "
        "timeout: init_process_group(timeout=timedelta(minutes=60)), or join=… for the batches.",
        "To learn which collective it was: TORCH_DISTRIBUTED_DEBUG=DETAIL, and for NCCL "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 NCCL_DEBUG=INFO",
        *go_on(case),
    ]


def mismatched(case: Case) -> list[str]:
    """Ranks that do not call the same collectives."""
    return [
        "Every rank must call the same collectives in the same order, and have as many batches: "
        "look for a condition on the rank or its data, a loader without drop_last=True, a "
        "parameter that not every batch uses (find_unused_parameters=True).",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that does not match.",
        *go_on(case),
    ]


def peer_lost(case: Case) -> list[str]:
    """A connection that broke, with nobody's death known."""
    return [
        "Look at the logs of all ranks: the one that does not say 'closed by peer' ended first. "
        "Under `holdfast run -- torchrun …` the order of their ends is recorded.",
        "If all ranks lived, it is the network: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME=… and "
        "GLOO_SOCKET_IFNAME=… name the interface.",
        *go_on(case),
    ]


def rendezvous(case: Case) -> list[str]:
    """Ranks that did not find each other."""
    return [
        "All ranks need the same MASTER_ADDR and MASTER_PORT, and must reach it: nc -vz "
        "$MASTER_ADDR $MASTER_PORT from every node; WORLD_SIZE must be the number that starts.",
        "If the name resolves to a wrong interface, give the address itself.",
        *go_on(case),
    ]


def lost(case: Case) -> list[str]:
    """A machine that went away, or everything on it."""
    said = [
        "Look at the machine: uptime, last -x reboot shutdown, journalctl -b -1 -e; for a "
        "container: docker inspect CONTAINER (OOMKilled, ExitCode); for a pod: kubectl describe pod"
    ]
    if case.is_in_slurm:
        said.append("SLURM may know: sacct -j JOBID --format=JobID,State,ExitCode,NodeList,End")
    return [*said, *go_on(case)]
