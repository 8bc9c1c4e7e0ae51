"""What to do next: for each cause, and for messages that name the error and not the remedy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from holdfast import _text
from holdfast._diagnose.evidence.case import Case
from holdfast._diagnose.evidence.memory import Use, tell_graphs
from holdfast._diagnose.verdict import Cause
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout

_MUCH = 0.05  # the share of memory that makes a hint about it worth a line

LARGER_SHM = (
    "Make it larger: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with "
    "medium: Memory, mounted at /dev/shm; else: sudo mount -o remount,size=8g /dev/shm",
    "Or need less of it: fewer num_workers, a smaller prefetch_factor or batch size, or "
    "torch.multiprocessing.set_sharing_strategy('file_system').",
    "See what is in it: ls -l /dev/shm; what dead runs left there: holdfast clean",
)
ONCE_RIGHT = "Every start would fail in the same way: correct this first, then start it again."
START_AGAIN = "Start the same command again"
_BY_NAME = {
    "environment": (ONCE_RIGHT,),
    "module": (
        "Install it in the environment that starts the job, or activate the one that has it: "
        "python -m pip list",
        ONCE_RIGHT,
    ),
    "shm_full": LARGER_SHM,
    "nan": (
        "Started again it would do the same: lower the learning rate, clip gradients, check the "
        "data of the last steps.",
        "torch.autograd.set_detect_anomaly(True) names the operation.",
        "Earlier checkpoints: holdfast ls RUN",
    ),
    "cuda_error": (
        "Errors come when the GPU is waited for, so a traceback may name a later line. For the "
        "right one: CUDA_LAUNCH_BLOCKING=1",
        "A device-side assert is mostly an index out of range (labels, embeddings): run the same "
        "batch on the CPU, which says which.",
        "For a broken GPU: nvidia-smi -q -d ECC, and sudo dmesg | grep -i xid",
    ),
    "cuda_assert": (
        "The line in the traceback is a later one: CUDA_LAUNCH_BLOCKING=1, or the same batch on "
        "the CPU, tells which operation it was, and of which value.",
    ),
    "amd_gpu": (
        "It is reported when the GPU is waited for, or later: AMD_SERIALIZE_KERNEL=3 (and "
        "HIP_LAUNCH_BLOCKING=1) ends it at the kernel that did it.",
        "Without compiled kernels (torch.compile off) it shows whether one of them is at fault; "
        "ROCm, the driver and the build must fit: rocm-smi --showdriverversion",
        "For a broken GPU: rocm-smi --showrasinfo, and sudo dmesg | grep -i amdgpu",
    ),
    "accelerator": (
        "For the device: hl-smi (Habana) or npu-smi info (Ascend), and sudo dmesg | tail; see "
        "whether another process holds it.",
    ),
    "intel_gpu": (
        "For the GPU: sudo dmesg | grep -iE 'i915|xe ', and xpu-smi health -l; the driver, oneAPI "
        "and the build must fit: clinfo -l; torch.xpu.is_available()",
    ),
    "pickled": (
        "The file holds whole objects, with classes of the code that saved it: run it from that "
        "repository, or put that on PYTHONPATH, so that this name is its module and no other file.",
    ),
    "shadowed": (
        "Another file has the name of that package and is found first: python -c 'import NAME; "
        "print(NAME.__file__)' shows it. Rename it, or put the right folder first on PYTHONPATH.",
        ONCE_RIGHT,
    ),
    "gpu_broken": ("For the GPU: nvidia-smi -q -d ECC, and sudo dmesg | grep -i xid",),
    "in_use": (),  # a hint says it
    "worker_killed": (
        "A worker that is killed with SIGKILL is mostly out of memory: fewer num_workers, a "
        "smaller prefetch_factor, more memory. As root: dmesg -T | grep -i 'killed process'",
    ),
    "disk_full": (
        "Make room: df -h {where}; df -i {where} (inodes run out too); quota -s",
        "Keep fewer checkpoints, or write them elsewhere; for a pod: a volume, or a larger "
        "resources.limits.ephemeral-storage.",
        "See what dead runs have left: holdfast clean",
    ),
    "quota": (
        "Make room below the quota, or have it raised: quota -s (on Lustre: lfs quota -h -u $USER "
        "FOLDER). The disk itself may have room.",
        "Keep fewer checkpoints, or write them elsewhere.",
        "See what dead runs have left: holdfast clean",
    ),
    "crashed": (
        "Most such crashes are a library's: see that torch, its CUDA and extensions fit each other "
        "(python -m torch.utils.collect_env), and whether a newer version helps.",
        "With num_workers=0 a crash of a data-loader worker shows in the training process. "
        "Libraries that do not survive fork (OpenCV, HDF5, CUDA) crash there.",
        "For a core file: ulimit -c unlimited, then coredumpctl gdb or gdb python core",
    ),
    "worker_died": (
        "Run it with num_workers=0: then the worker's own error shows, with its traceback.",
        "If it crashes only in a worker: multiprocessing_context='spawn', and "
        "cv2.setNumThreads(0) for OpenCV.",
    ),
    "pool_worker_died": (
        "Call its function in the main process: then its own error shows, with its traceback.",
        "One that ends without a word was mostly killed for memory: fewer processes. As root: "
        "dmesg -T | grep -i 'killed process'",
        "If it crashes only in a worker: start it with multiprocessing_context='spawn'.",
    ),
    "timed_out_rank": (
        "See what {who} did at that moment: its stack, its log, its data. The others only waited "
        "for it.",
    ),
    "timed_out": (
        "Ranks that do unequal work (a rank-0 validation) need a longer timeout: "
        "init_process_group(timeout=timedelta(minutes=60)). All need the same number of batches: "
        "a DistributedSampler, or drop_last=True.",
        "To learn which collective it was: TORCH_DISTRIBUTED_DEBUG=DETAIL, and for NCCL "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 NCCL_DEBUG=INFO",
    ),
    "timed_out_all": (
        "All ranks had come to it, so it is the network or a GPU: nvidia-smi -q -d ECC, and sudo "
        "dmesg | grep -i xid, on every node; NCCL_DEBUG=INFO; NCCL's tests (all_reduce_perf).",
        "If it is only slow, as with a rank that was late: "
        "init_process_group(timeout=timedelta(minutes=60))",
    ),
    "stuck": (
        "Its thread waited in CUDA or for the GIL: see where the rank stood then (py-spy dump "
        "--native -p PID), a long call into C or the driver; dmesg for errors of the GPU.",
        "If it is only slow: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800",
    ),
    "mismatched": (
        "Every rank must call the same collectives in the same order, and have as many batches: "
        "look for a condition on the rank or its data, a loader without drop_last=True, a "
        "parameter that not every batch uses (find_unused_parameters=True).",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that does not match.",
    ),
    "peer_lost": (
        "Look at the logs of all ranks: the one that does not say 'closed by peer' ended first.",
        "Under `holdfast run -- torchrun …` the order of their ends is recorded.",
        "If all ranks lived, it is the network: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME=… and "
        "GLOO_SOCKET_IFNAME=… name the interface.",
    ),
    "system_error": (
        "NCCL_DEBUG=INFO names the call: of a socket (another rank had ended), of InfiniBand, or "
        "of shared memory. See whether another rank printed an error before this one.",
    ),
    "rendezvous": (
        "All ranks need the same MASTER_ADDR and MASTER_PORT, and must reach it: nc -vz "
        "$MASTER_ADDR $MASTER_PORT from every node; WORLD_SIZE must be the number that starts.",
        "If the name resolves to a wrong interface, give the address itself.",
    ),
    "time_limit": (
        "Ask for more time (sbatch --time=…), or let it go on by itself: holdfast submit, or "
        "--requeue with --signal=USR1@120; holdfast lint SCRIPT checks that.",
    ),
    "preempted": (
        "With sbatch --requeue it comes back by itself.",
        "Save at its notice; a job queue or a managed instance group starts it again.",
    ),
    "more_of_slurm": (
        "Ask SLURM for more: sbatch --mem=… (what it used: sacct -j JOBID "
        "--format=JobID,MaxRSS,ReqMem,State)",
    ),
    "more_of_others": (
        "Ask for more memory: in Kubernetes resources.limits.memory, PBS -l mem=…, LSF bsub -M …",
    ),
    "refused": (
        "See whether its controller answers (scontrol ping); look at the node's slurmd log, or ask "
        "its administrators: scontrol show node NODE",
    ),
    "request": (
        "Compare what it asks for with what there is: scontrol show job JOBID (in a job: its -n, "
        "--cpus-per-task, --mem, --gres); sinfo -o '%P %l %c %m %G'; sacctmgr show assoc",
        ONCE_RIGHT,
    ),
}
# The same command would fail again.
_NO_RESTART = ("environment", "module", "nan", "refused", "request")


def advise(case: Case, name: str, **figures: str) -> list[str]:
    """The advice of this name, and how to continue."""
    lines = lines_of(case, name, **figures)
    return lines if name in _NO_RESTART else [*lines, *go_on(case)]


def lines_of(case: Case, name: str, **figures: str) -> list[str]:
    return [line.format(who=case.who, **figures) for line in _BY_NAME[name]]


def go_on(case: Case) -> list[str]:
    """How to continue from the last durable step."""
    if case.evidence.kind != "run":
        return []
    attempt, newest = case.evidence.attempt, case.evidence.run.newest
    if attempt and newest and attempt < newest:
        return [f"The run has gone on since, in attempt {attempt + 1}: holdfast why RUN"]
    step = case.durable_step
    if step is not None:
        return [f"{START_AGAIN}: it goes on at step {step}."]
    # A start that was cut while it fetched has nothing in the folder yet; its mirror has all of it.
    known = read_json(RunLayout(Path(case.evidence.subject).absolute()).mirror)
    held = _text.records(known.get("checkpoints"))
    step = _text.whole(held[-1].get("step")) if held else None
    if step is not None:
        return [f"{START_AGAIN}: its mirror has step {step}."]
    return [f"{START_AGAIN}: nothing was durable, so it begins at the beginning."]


def host_memory(case: Case, use: Use, *, is_machine: bool = False) -> list[str]:
    return [*less_memory(case, use), _more_memory(case, is_machine=is_machine), *go_on(case)]


def less_memory(case: Case, use: Use) -> list[str]:
    whole = use.tree or use.used or 0
    lines = []
    graphs = tell_graphs(case.end.graphs)
    if graphs:
        lines.append(
            f"Release the graphs: {graphs[0]}. Keep loss.item() or loss.detach() there, not the "
            "loss itself."
        )
    if use.worker_count and use.workers and use.workers > whole * _MUCH:
        each = _text.size(use.workers / use.worker_count)
        lines.append(
            f"Use fewer data-loader workers: DataLoader(…, num_workers={use.worker_count // 2}) "
            f"(each of the {use.worker_count} had {each}), or a smaller prefetch_factor."
        )
    if use.shm and use.limit and use.shm > use.limit / 10:
        lines.append(
            f"/dev/shm counts too ({_text.size(use.shm)} of it were in use): pin_memory=False and "
            "fewer prefetched batches make it smaller. Old files there: holdfast clean"
        )
    if not graphs:
        lines.append(
            "If memory grew step by step, something is kept: sum up loss.item() or loss.detach(), "
            "not the loss itself, which keeps its whole graph; a list in a Dataset grows in every "
            "worker."
        )
    return lines


def _more_memory(case: Case, *, is_machine: bool) -> str:
    if is_machine:
        return (
            "See what else runs there (ps aux --sort=-rss | head), or move to a machine with more "
            "memory. A limit of its own (systemd-run -p MemoryMax=…, sbatch --mem=…, in Kubernetes "
            "a memory request that is as large as what it uses) protects it."
        )
    if case.is_in_slurm:
        return "Ask SLURM for more: sbatch --mem=… (now: scontrol show job JOBID | grep -i mem)"
    return (
        "Or raise the limit: docker run --memory=…, in Kubernetes resources.limits.memory, in "
        "systemd MemoryMax=…"
    )


def worker_memory(case: Case) -> list[str]:
    return [
        "Use fewer data-loader workers (num_workers) or a smaller prefetch_factor: each worker "
        "holds whole batches, and its own copy of what its Dataset touches.",
        "Keep big tables in a Dataset as one numpy array or tensor, not as a list of Python "
        "objects: reading those copies them into every worker.",
        _more_memory(case, is_machine=False),
        *go_on(case),
    ]


def cuda_memory(case: Case, *, is_fragmented: bool, keeps_graphs: bool) -> list[str]:
    lines = []
    if keeps_graphs:
        lines.append(
            "Release the graphs: collect loss.item() or loss.detach() and not loss, and call "
            "backward() in every step of an accumulation, not once on a sum of losses."
        )
    if is_fragmented:
        lines.append(
            "Memory is reserved and not used: it is fragmented. Start it with: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    lines += [
        "Make the batch smaller.",
        "Accumulate gradients over several small batches (backward() each time).",
        "Trade time for memory: torch.utils.checkpoint, bfloat16 (torch.autocast), "
        "optimizer.zero_grad(set_to_none=True), torch.no_grad() around the validation.",
        "See what else is on the GPU: nvidia-smi",
    ]
    if not is_fragmented:
        lines.append("If sizes of batches vary: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return [*lines, *go_on(case)]


def killed(case: Case, *, knows_counters: bool) -> list[str]:
    lines = [
        "Linux does not record the sender of a SIGKILL. Candidates: you (kill -9, an IDE's stop "
        "button), another user of the machine, a script that cleans up, a container's runtime."
    ]
    if case.is_in_slurm:
        lines.append("SLURM may know: sacct -j JOBID --format=JobID,State,ExitCode,DerivedExitCode")
    if not knows_counters:
        lines.append("As root, the kernel log shows OOM kills: dmesg -T | grep -i 'killed process'")
    return [*lines, *go_on(case)]


MAKE_ROOM = (
    "Make room on the disk of the run folder (df -h), then start it again: the state may still be "
    "in memory, and holdfast status RUN says so."
)


def lost(case: Case) -> list[str]:
    lines = [
        "Look at the machine: uptime, last -x reboot shutdown, journalctl -b -1 -e; for a "
        "container: docker inspect CONTAINER (OOMKilled, ExitCode); for a pod: kubectl describe pod"
    ]
    if case.is_in_slurm:
        lines.append("SLURM may know: sacct -j JOBID --format=JobID,State,ExitCode,NodeList,End")
    return [*lines, *go_on(case)]


# -- Hints: a message that says what is wrong, and the remedy that it does not say ----------------

# Other causes have advice of their own, which is more exact.
_HINTED = (
    *(Cause.PYTHON_EXCEPTION, Cause.CONFIGURATION, Cause.ENVIRONMENT, Cause.RENDEZVOUS),
    *(Cause.PEER_LOST, Cause.CUDA_ERROR, Cause.BAD_TRAINING, Cause.CXX_EXCEPTION),
    *(Cause.COLLECTIVE_TIMEOUT, Cause.CUDA_OOM),
)
_HINTS = {
    (
        r"environment variable \w+ expected|\b(?:MASTER_(?:ADDR|PORT)|WORLD_SIZE)\b.*not set"
        r"|KeyError: '(?:(?:LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
    ): "Start it with torchrun (torchrun --nproc-per-node=2 train.py), which sets MASTER_ADDR, "
    "MASTER_PORT, RANK and WORLD_SIZE, or set them yourself.",
    r"(?i)address already in use|EADDRINUSE": "Another process has the port, often an earlier "
    "start of the same job: ss -tlnp | grep {port}. Choose another: torchrun --master-port=29501, "
    "or --rdzv-endpoint=localhost:0",
    r"Could not override '": "That key is not in the configuration: see its spelling (--cfg job "
    "prints all keys). A + before it adds a new key.",
    r"EOF when reading a line": "It asked a question (input()) and its standard input had ended. "
    "Give the answer as an argument, or ask only if sys.stdin.isatty().",
    r"resolve hostname to a \(local\)": "A host cannot resolve its own name: add it to "
    "/etc/hosts, or name the interface: GLOO_SOCKET_IFNAME=…",
    r"socket\w*Connect: |no socket interface|none had completed": "NCCL connects by addresses of "
    "its own, after the ranks have met: a firewall, or an interface that the other nodes do not "
    "reach. NCCL_DEBUG=INFO shows which it takes, NCCL_SOCKET_IFNAME=… names another.",
    r"\b172\.17\.0\.1\b|docker0": "172.17.0.1 (docker0) is docker's bridge, which no other machine "
    "reaches: NCCL_SOCKET_IFNAME=^docker0,lo (GLOO_SOCKET_IFNAME=… for gloo).",
    r"ibv_\w+ failed|NET/IB|infiniband": "InfiniBand or RoCE does not get through: ibstat, "
    "NCCL_IB_HCA=…, NCCL_IB_GID_INDEX=3; to see whether it is that: NCCL_IB_DISABLE=1. For rail "
    "networks: NCCL_CROSS_NIC=0",
    r"finished its bootstrapping phase": "Put what the script does under `if __name__ == "
    "'__main__':`, since each spawned worker imports it again.",
    r"re-initialize CUDA in forked subprocess": "Start the workers with spawn "
    "(multiprocessing_context='spawn'), or keep CUDA out of them.",
    r"Can't pickle|cannot pickle"
    r"|Can't get (?:local object|attribute '\w+' on <module '__main__')": "What goes to a worker "
    "or into a file "
    "must be a function or class of a module: no lambda, no function inside another, no open file.",
    r"(?i)driver/library version mismatch": "The driver was updated under the running kernel: "
    "reboot, or reload the nvidia modules.",
    r"could not select device driver|nvidia-container-\S+\"?: .*not found": "Install the NVIDIA "
    "Container Toolkit "
    "on the host (nvidia-ctk runtime configure), and restart docker.",
    r"[Pp]aging file|WinError 1455": "Make the paging file of Windows larger (System, Advanced "
    "system settings, Performance, Virtual memory), or start fewer workers (num_workers=0): each "
    "loads the libraries again.",
    r"couldn't start container|container creation failed|OCI runtime|ImagePull|ErrImage": (
        "The container did not start: see what its runtime printed above (the image, its mounts, "
        "nvidia-container-cli), and start it once by hand on that node."
    ),
    r"(?s)^(?!.*heartbeat).*(?:PjRT_Client_Connect|[Cc]oordination ?[Ss]ervice)": "Each "
    "process must call jax.distributed.initialize with the same coordinator_address and "
    "num_processes and its own process_id: see whether those that are named have started, and "
    "reach it.",
    r"already in use by process with pid": "Another process has that device: see what it is "
    "(ps -fp PID), and end it or wait for it.",
    r"not enabled in this build|not compiled with (?:GPU|CUDA)": "Install a build of that library "
    "that can use the GPU, or set its device to cpu.",
    r"(?:XGBoost|LightGBM|CatBoost)Error.*(?:bad_alloc|[Oo]ut of memory)": "For less memory of the "
    "GPU: a smaller max_bin, xgboost.QuantileDMatrix, fewer rows, or the CPU.",
    r"busy or unavailable": "Another process has the GPU, which is in exclusive mode: nvidia-smi "
    "shows it; or take another one: CUDA_VISIBLE_DEVICES=…",
    r"not enough slots": "Start fewer ranks (-np), or give mpirun the nodes: --hostfile, "
    "--map-by :OVERSUBSCRIBE",
    r"HIP error: invalid device function|hipErrorNoBinaryForGpu": "Install a build for this GPU: "
    "torch.cuda.get_arch_list() must have what rocminfo | grep gfx shows; "
    "HSA_OVERRIDE_GFX_VERSION=… takes the kernels of a close relative.",
    r"(?s)no kernel image|not compatible with the current PyTorch"
    r"|CUDA[^\n]*invalid device function": "Install a build for this GPU: "
    "python -c 'import torch; print(torch.version.cuda, torch.cuda.get_arch_list())' must have "
    "its capability (nvidia-smi --query-gpu=compute_cap --format=csv)",
    r"Error 803\b|Error 804\b|unsupported display driver|forward compatibility was attempted": (
        "The CUDA of the image (or of LD_LIBRARY_PATH, cuda-compat) is newer than the driver, and "
        "this GPU has no forward compatibility: a newer driver on the host, or an image of the "
        "CUDA that nvidia-smi shows. After an update of the driver: reboot."
    ),
    r"(?is)^(?!.*Error 80[34]\b).*(?:nvidia driver|cuda driver(?! error)|CUDA GPUs|gpu backend"
    r"|compiled with CUDA)": "Compare: "
    "nvidia-smi (the driver and the CUDA that it can), and python -c 'import torch; "
    "print(torch.version.cuda, torch.cuda.is_available())'; see CUDA_VISIBLE_DEVICES.",
    r"(?m)lib(?:cu|nv|nccl)\w*\.so\S*: undefined symbol|Could not load library lib(?:cu|nv)": (
        "Libraries of two versions of CUDA or cuDNN are mixed: take the folder of the wrong one "
        "out of LD_LIBRARY_PATH (echo $LD_LIBRARY_PATH; pip list | grep -i nvidia)."
    ),
    r"(?m)^(?!.*lib(?:cu|nv|nccl)\w*\.so\S*: ).*(?:undefined symbol|binary incompatibility"
    r"|compiled using NumPy 1)": "That extension was built "
    "for another version: install or build it again for the torch and numpy that are here (pip "
    "install --force-reinstall --no-cache-dir …).",
    r"'conda init'": "It was not activated. In a script, before conda activate: source "
    '"$(conda info --base)/etc/profile.d/conda.sh"',
    r"libGL\.so|libgthread|libSM\.so|libX\w+": "Install opencv-python-headless in place of "
    "opencv-python, or the library: apt install libgl1 libglib2.0-0",
    r"Descriptors can\S+ be created": "protobuf is newer than the code that protoc has made: pip "
    "install 'protobuf<3.21', or a newer version of the package that brings that code.",
    r"Error building extension|objects for extension": "Its compiler tells why above it: it needs "
    "nvcc and the headers of the CUDA that torch was built for (CUDA_HOME=…; nvcc --version).",
    r"Python\.h: No such file": "Install the headers of that Python: apt install python3-dev, or a "
    "Python of conda or uv, which has them.",
    r"No locks available|Errno 37\]": "That file system (mostly NFS) gives no locks: put what is "
    "locked on a local disk, for datasets and the hub HF_HOME=/tmp/…",
    r"find C compiler": "Install a compiler there (apt install gcc), or name one: CC=/usr/bin/gcc",
    r"[Cc]uDNN library: |DNN library is not": "Two versions of cuDNN are mixed: pip list | grep -i "
    "cudnn; install the one that the framework asks for, and see LD_LIBRARY_PATH.",
    r"cannot open shared object|GLIBC(?:XX)?_": "See which library is found: LD_DEBUG=libs "
    "python …; module list; echo $LD_LIBRARY_PATH",
    r"has no attribute .*(?:removed|deprecated alias)|module 'numpy' has no attribute": (
        "The library is newer than the script: change that line, or pin the older version."
    ),
    r"(?i)wandb.*(?:timed out|commerror|network)|Run initialization has timed out": "wandb did "
    "not reach its server: see the network and the key, or train without it: WANDB_MODE=offline "
    "(wandb sync sends it later).",
    r"gated repo|GatedRepo|RepositoryNotFound|401 Client Error|403 Client Error": "Ask for access "
    "on the model's page, and log in where the job runs: huggingface-cli login, or HF_TOKEN=…",
    r"(?i)gai error": "That name has no address there: getent hosts NAME; take the name or address "
    "that all nodes know.",
    r"(?:HTTP\w*Error|status_code)\W.*\b429\b|Too Many Requests|[Rr]ate limit(?:ed| exceeded)": (
        "{host} limits how often it is asked: log in with a token (HF_TOKEN=…), which may ask "
        "more often; let one rank download for all; or read a local copy (HF_HUB_OFFLINE=1)."
    ),
    (
        r"(?i)Read ?Timeout|read timed out|(?:HTTP\w*Error|status_code)\W.*\b5\d\d\b"
        r"|\b5\d\d Server|Service Unavailable|Bad Gateway|ChunkedEncodingError|IncompleteRead"
        r"|Connection aborted|FSTimeout|PayloadError|ServerDisconnected"
    ): "{host} did not answer in time, or broke off: start it again. Against the next time: fetch "
    "it beforehand and read the cache (HF_HUB_OFFLINE=1), or a longer timeout "
    "(HF_HUB_DOWNLOAD_TIMEOUT=60, HF_HUB_ETAG_TIMEOUT=60).",
    r"could not reach the server at ": "Start that server first, see its own output for why it "
    "ended, and wait until it answers (curl). From another node, its name is needed: 0.0.0.0 and "
    "localhost are each machine itself.",
    (
        r"(?is)^(?!.*(?:could not reach the server|CERTIFICATE_VERIFY)).*"
        r"(?:(?<!gai error: -3 - temporary failure in )name"
        r" resolution|Max retries exceeded|couldn't connect to|ConnectTimeout"
        r"|Network is unreachable|SSLError|CAS service error|urlopen error)"
    ): "That node does not reach {host}: it has no way to the internet, or through a "
    "proxy. Fetch it beforehand on a login node, then HF_HUB_OFFLINE=1; else set https_proxy.",
    r"CERTIFICATE_VERIFY_FAILED": "The certificate of {host} is not signed by one that is known "
    "there, as behind a proxy that opens TLS: pip install -U certifi, or name the site's own file: "
    "SSL_CERT_FILE=…, REQUESTS_CA_BUNDLE=…; if it has expired, see the clock (date).",
    (
        r"(?i)unable to locate credentials|NoCredentials|AccessDenied|InvalidAccessKey"
        r"|DefaultCredentialsError|does not have \S+\.\S+\.\S+ (?:access|permission)"
    ): "Give the job its credentials, as the user that it runs as: AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, a role, or ~/.aws; GOOGLE_APPLICATION_CREDENTIALS; others likewise. "
    "Or they lack the right to that bucket.",
    r"ReadError: .{0,60}unexpected end of data": "A tar file, mostly a shard of the data set, was "
    "cut short, or its stream broke off: tar -tf FILE >/dev/null on each finds it; copy it again.",
    (
        r"failed finding central directory|reading zip archive|deserializing header"
        r"|IncompleteBuffer|invalid load key|Ran out of input|truncated file|not a gzip"
        r"|Compressed file ended before"
        r"|BadZipFile|Truncated File Read|file signature not found|magic bytes not found"
        r"|corrupted record at|cannot identify image file|image file is truncated|MDB_CORRUPTED"
        r"|moov atom not found"
        r"|Invalid data found when processing|pickle data was truncated|Corrupt \w+ data"
    ): "The file is damaged or incomplete, mostly cut short while it was written or fetched: see "
    "its size, take an earlier checkpoint, or copy or download it again.",
    r"[Ww]eights only load failed|weights_only": "torch 2.6 loads tensors only: torch.load(…, "
    "weights_only=False) for a file that you trust, or torch.serialization.add_safe_globals([…]).",
    r"No available memory for the cache blocks|KV cache is needed, which is larger": "The share of "
    "the GPU that the server may use is too small for its weights: a larger "
    "gpu_memory_utilization, a smaller max_model_len, or a GPU of its own.",
    r"match the size of optimizer's group|different number of parameter groups": "The optimizer's "
    "state is of other parameters than the model has now (some were added, left out or frozen): "
    "build it as it was saved, or load the weights alone and begin with a new optimizer.",
    r"stack expects each tensor to be equal size|Cannot (?:batch|add) tensors? .*shapes": "The "
    "items of a batch differ in shape: give all the same size and channels in the data set "
    "(resize; image.convert('RGB')), or pad them (collate_fn; padded_batch).",
    r"size mismatch for |Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict": (
        "The checkpoint is of another model: give the settings that it was saved with, or load "
        "what fits: strict=False for names, and leave out what differs in shape."
    ),
    r"[Ss]tale file handle|Errno 116": "The file was replaced or removed on its NFS server, or "
    "that was restarted: mount it again, and do not write to a data set that is being read.",
    r"Input/output error|Errno 5\]": "The disk or the file system failed under it: sudo dmesg | "
    "tail, df -h, smartctl -a; on NFS or Lustre see the server and its quota.",
    r"Transport endpoint is not connected|Errno 107\]": "The process behind that mount (FUSE: a "
    "bucket, sshfs) has died: see its log, then fusermount -u FOLDER, and mount it again.",
    r"[Rr]ead-only file system|Errno 30\]": "The file system is mounted read-only, on purpose or "
    "after an error: mount | grep ro, sudo dmesg | tail; or write elsewhere.",
    r"Errno 13\]|WinError 5\]": "It has no right to that path: see who owns it (ls -ld; id; in a "
    "container its user and mounts), and give it another folder, mostly an option or a setting.",
    r"FileExistsError": "It does not overwrite what an earlier start has made: give it another "
    "folder, remove that one, or os.makedirs(…, exist_ok=True).",
    r"unable to lock file|database is locked"
    r"|(?s:(?:lock|open|create) file.*Resource temporarily unavailable)": "Another process has the "
    "file open: a worker that was forked, or a second job; save under another name, or "
    "HDF5_USE_FILE_LOCKING=FALSE",
    r"File too large|Errno 27\]": "Files may not be that large there: ulimit -f unlimited",
    r"(?s)can't start new thread|pthread_create|^(?!.*(?:lock|open|create) file)"
    r".*Resource temporarily unavailable": "A limit on "
    "threads or memory was hit: ulimit -u, ulimit -v, OMP_NUM_THREADS=1, fewer workers; in a "
    "container --pids-limit.",
    r"Error 802\b|failure 802\b|system not yet initialized": "The GPUs are linked by NVSwitch, and "
    "the fabric manager does not run, or is of another version than the driver: systemctl status "
    "nvidia-fabricmanager; nvidia-smi -q | grep -i fabric",
    r"(?i)\bECC\b|fallen off the bus|\bXid\b|GPU is lost|NVLink|row remap": "The GPU itself "
    "failed: take another node and tell its administrators; nvidia-smi -q, sudo nvidia-smi "
    "--gpu-reset -i N or a reboot may bring it back, else it is the hardware.",
    r"(?s)^(?!.*Assertion `).*CU\w+_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)": (
        "Mostly the GPU's memory is full (nvidia-smi; make the batch smaller), or an index is out "
        "of range before it: CUDA_LAUNCH_BLOCKING=1, or the same batch on the CPU, tells which."
    ),
    r"Duplicate GPU": "Two ranks took the same GPU: torch.cuda.set_device(int(os.environ["
    "'LOCAL_RANK'])) before the first collective, and no more processes per node than GPUs: "
    "nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES",
    r"PanicException|panicked at": "A library in Rust failed on that input: find the item (one "
    "process, RUST_BACKTRACE=1), and see whether a newer version of that library helps.",
    r"n_classes|nll_loss|\"index out of bounds\"|indexSelect|ScatterGather|srcIndex": "A label or "
    "an index is out of range: see that it lies in 0 … classes - 1 (or is ignore_index), and ids "
    "below the size of the embedding.",
    r"(?s)^(?!.*Assertion `).*(?:CUDNN_STATUS|[Cc]udnn handle|cuDNN failed)": "Mostly the GPU's "
    "memory is full, or cuDNN "
    "does not fit: see nvidia-smi, make the batch smaller; in TensorFlow set_memory_growth(gpu, "
    "True); compare the versions of CUDA and cuDNN.",
    r"out of resource: shared memory": "That is the GPU's own shared memory: smaller blocks or "
    "num_stages for that kernel, or torch.compile off (TORCH_COMPILE_DISABLE=1).",
    r"std::bad_alloc(?!.*[Cc]uda)": "It got no more memory: see free -h and its limits (ulimit -v, "
    "--mem), and load less at once.",
    r"finished reduction in the prior iteration|parameters that were not used in producing": (
        "Some parameters got no gradient in that step: DistributedDataParallel(…, "
        "find_unused_parameters=True) (strategy='ddp_find_unused_parameters_true'), or take them "
        "out of the model."
    ),
    r"loss scale already at minimum": "The gradients overflowed in fp16 in every step: bf16 in "
    "its place, a lower learning rate, or a NaN in the data.",
    r"backward through the graph a second time": "Call backward() once for each forward, "
    "detach() what is kept from step to step, or retain_graph=True.",
    r"does not require grad and does not have a grad_fn": "Nothing in that loss depends on a "
    "parameter: see requires_grad, detach(), .item() and torch.no_grad() on its way.",
    r"deserialize object on a CUDA device": "Load it where there is no GPU with "
    "map_location='cpu', or start on a node with a GPU.",
    r"module\(s\) are unknown|locate a modulefile": "See which there are on that node: module "
    "avail, module spider NAME",
    r"Expected all tensors to be on the same device": "Move the model and every tensor of the "
    "batch to one device: x = x.to(device)",
}


_HOST = re.compile(r"host='([\w.-]+)'|https?://([\w.-]+)|[Rr]esolve '?([\w.-]+\.[\w-]+)")
_PORT = re.compile(r"(?:\]:|\.\d+:|\bport:? )(\d{4,5})\b")


def hints_for(cause: Cause, text: str) -> list[str]:
    """The remedies known for such words, in the order of the table; two at most."""
    if cause not in _HINTED:
        return []
    hints = [advice for shape, advice in _HINTS.items() if re.search(shape, text)][:2]
    host = next(filter(None, itertools.chain(*_HOST.findall(text))), "the server")
    port = next(iter(_PORT.findall(text)), "PORT")
    return [each.replace("{host}", host).replace("{port}", port) for each in hints]


# -- A log of anything: advice for another framework, GPU or scheduler would mislead ---------------

# (words of the advice, words of a log that it fits, words of a log that it does not fit)
_FOR = (
    (
        r"torch|PYTORCH|TORCH|GLOO|num_workers|DataLoader|init_process_group|loss\.item|MASTER_"
        r"|backward\(",
        r"(?i)torch|dataloader|accelerate|deepspeed",
        r"(?i)tensorflow|\d \[=+[>.]*\.*\]|keras|\bjax|mxnet|horovod|paddle|xgboost|lightgbm"
        r"|nnu-?net|kaldi|joblib",
    ),
    (
        r"nvidia-smi|CUDA|NCCL",
        r"(?i)cuda|nvidia|nccl|\bxid\b",
        r"(?i)\btpu|\bmps\b|roc[md]|miopen|\bhip\b|\bhsa_|habana|\bhpu\b|\bgloo\b|\bxpu\b|level.zero"
        r"|\bsycl|\b(?:UR|ZE)_RESULT",
    ),
    (
        r"sbatch|sacct|SLURM",
        r"(?i)slurm|srun|sbatch",
        r"\bPBS\b|TERM_|\bLSF\b|YARN|OOMKilled|EventType|(?i:kubelet|kubernetes|walltime|preempted"
        r"|interruption |\bspot\b|instance)",
    ),
    (r"holdfast (?:ls|clean)", r"holdfast", r""),
    (
        r"\b(?:ps aux|ulimit|dmesg|systemd|df -|free -h|coredumpctl|ls -l|ss -t)|/dev/shm|docker",
        r"(?:^|[\s\"'])/(?:home|usr|opt|root|workspace|mnt)/",
        r"WinError|[A-Z]:\\\\?\w|0xC0000",
    ),
    (r"main process|multiprocessing_context", r"joblib|Pool\b|concurrent", r"\bray::|\bray\."),
    (r"the batch", r"\bbatch", r"(?i)xgboost|lightgbm|catboost"),
)


def fitting(lines: Iterable[str], log: str) -> list[str]:
    """The lines that are not about another framework, GPU or scheduler than the log."""
    misfits = [of for of, fits, other in _FOR if re.search(other, log) and not re.search(fits, log)]
    return [line for line in lines if not any(re.search(of, line) for of in misfits)]
