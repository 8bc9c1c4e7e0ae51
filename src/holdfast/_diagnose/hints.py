"""What helps against messages that say what is wrong, and not what to do: a row for each kind."""

from __future__ import annotations

import re

from holdfast._diagnose.verdict import Cause

# Others have advice of their own, which knows more than the words.
_CAUSES = (
    Cause.PYTHON_EXCEPTION,
    Cause.CONFIGURATION,
    Cause.ENVIRONMENT,
    Cause.RENDEZVOUS,
    Cause.PEER_LOST,
    Cause.CUDA_ERROR,
    Cause.BAD_TRAINING,
    Cause.CXX_EXCEPTION,
)
_ROWS = (
    # The start
    (
        r"environment variable \w+ expected|\b(?:MASTER_(?:ADDR|PORT)|WORLD_SIZE)\b.*not set"
        r"|KeyError: '(?:(?:LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        "Start it with torchrun (torchrun --nproc-per-node=2 train.py), which sets MASTER_ADDR, "
        "MASTER_PORT, RANK and WORLD_SIZE, or set them yourself.",
    ),
    (
        r"(?i)address already in use|EADDRINUSE",
        "Another process has the port, often an earlier start of the same job: ss -tlnp | grep "
        "PORT. Choose another: torchrun --master-port=29501, or --rdzv-endpoint=localhost:0",
    ),
    (
        r"ibv_\w+ failed|NET/IB|infiniband",
        "InfiniBand or RoCE does not get through: ibstat, NCCL_IB_HCA=…, NCCL_IB_GID_INDEX=3; to "
        "see whether it is that: NCCL_IB_DISABLE=1. For rail networks: NCCL_CROSS_NIC=0",
    ),
    (
        r"finished its bootstrapping phase",
        "Put what the script does under `if __name__ == '__main__':`, since each spawned worker "
        "imports it again.",
    ),
    (
        r"re-initialize CUDA in forked subprocess",
        "Start the workers with spawn (multiprocessing_context='spawn'), or keep CUDA out of them.",
    ),
    (
        r"Can't pickle|cannot pickle|Can't get local object",
        "What goes to a worker or into a file must be a function or class of a module: no lambda, "
        "no function inside another, no open file.",
    ),
    # The environment
    (
        r"could not select device driver|nvidia-container-cli",
        "Install the NVIDIA Container Toolkit on the host (nvidia-ctk runtime configure), and "
        "restart docker.",
    ),
    (
        r"couldn't start container|container creation failed|OCI runtime|ImagePull|ErrImage",
        "The container did not start: see what its runtime printed above (the image, its mounts, "
        "nvidia-container-cli), and start it once by hand on that node.",
    ),
    (
        r"busy or unavailable",
        "Another process has the GPU, which is in exclusive mode: nvidia-smi shows it; or take "
        "another one: CUDA_VISIBLE_DEVICES=…",
    ),
    (
        r"not enough slots",
        "Start fewer ranks (-np), or give mpirun the nodes: --hostfile, --map-by :OVERSUBSCRIBE",
    ),
    (
        r"no kernel image|not compatible with the current PyTorch",
        "Install a build for this GPU: python -c 'import torch; print(torch.version.cuda, "
        "torch.cuda.get_arch_list())' must have its capability (nvidia-smi --query-gpu=compute_cap "
        "--format=csv)",
    ),
    (
        r"Driver/library version mismatch",
        "The driver was updated under the running kernel: reboot, or reload the nvidia modules.",
    ),
    (
        r"(?i)nvidia driver|cuda driver|CUDA GPUs|gpu backend|compiled with CUDA",
        "Compare: nvidia-smi (the driver and the CUDA that it can), and python -c 'import torch; "
        "print(torch.version.cuda, torch.cuda.is_available())'; see CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"undefined symbol|binary incompatibility|compiled using NumPy 1",
        "That extension was built for another version: install or build it again for the torch "
        "and numpy that are here (pip install --force-reinstall --no-cache-dir …).",
    ),
    (
        r"cannot open shared object|GLIBC(?:XX)?_",
        "See which library is found: LD_DEBUG=libs python …; module list; echo $LD_LIBRARY_PATH",
    ),
    (
        r"has no attribute .*(?:removed|deprecated alias)|module 'numpy' has no attribute",
        "The library is newer than the script: change that line, or pin the older version.",
    ),
    # The network and what lies behind it
    (
        r"(?i)wandb.*(?:timed out|commerror|network)|Run initialization has timed out",
        "wandb did not reach its server: see the network and the key, or train without it: "
        "WANDB_MODE=offline (wandb sync sends it later).",
    ),
    (
        r"gated repo|GatedRepo|RepositoryNotFound|401 Client Error|403 Client Error",
        "Ask for access on the model's page, and log in where the job runs: huggingface-cli login, "
        "or HF_TOKEN=…",
    ),
    (
        r"(?i)name resolution|Max retries exceeded|couldn't connect to|ConnectTimeout"
        r"|Network is unreachable|SSLError|CERTIFICATE_VERIFY",
        "That node has no way to the internet, or through a proxy: fetch it beforehand on a login "
        "node, then HF_HUB_OFFLINE=1; else set https_proxy.",
    ),
    (
        r"(?i)unable to locate credentials|NoCredentials|AccessDenied|InvalidAccessKey"
        r"|DefaultCredentialsError",
        "Give the job its credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role, or "
        "~/.aws as the user that it runs as; for others likewise.",
    ),
    # Files
    (
        r"failed finding central directory|reading zip archive|deserializing header"
        r"|IncompleteBuffer|invalid load key|Ran out of input|truncated file|not a gzip|BadZipFile"
        r"|Truncated File Read|file signature not found",
        "The file is damaged or incomplete, mostly cut short while it was written or fetched: see "
        "its size, take an earlier checkpoint, or copy or download it again.",
    ),
    (
        r"[Ww]eights only load failed|weights_only",
        "torch 2.6 loads tensors only: torch.load(…, weights_only=False) for a file that you "
        "trust, or torch.serialization.add_safe_globals([…]).",
    ),
    (
        r"size mismatch for |Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        "The checkpoint is of another model: give the settings that it was saved with, or load "
        "what fits: strict=False for names, and leave out what differs in shape.",
    ),
    (
        r"[Ss]tale file handle|Errno 116",
        "The file was replaced or removed on its NFS server, or that was restarted: mount it "
        "again, and do not write to a data set that is being read.",
    ),
    (
        r"Input/output error|Errno 5\]",
        "The disk or the file system failed under it: sudo dmesg | tail, df -h, smartctl -a; on "
        "NFS or Lustre see the server and its quota.",
    ),
    (
        r"[Rr]ead-only file system|Errno 30\]",
        "The file system is mounted read-only, on purpose or after an error: mount | grep ro, "
        "sudo dmesg | tail; or write elsewhere.",
    ),
    (
        r"unable to lock file|Resource temporarily unavailable",
        "Another process has the file open: a worker that was forked, or a second job; save under "
        "another name, or HDF5_USE_FILE_LOCKING=FALSE",
    ),
    (r"File too large|Errno 27\]", "Files may not be that large there: ulimit -f unlimited"),
    (
        r"can't start new thread|pthread_create|Resource temporarily unavailable",
        "A limit on threads or memory was hit: ulimit -u, ulimit -v, OMP_NUM_THREADS=1, "
        "fewer workers; in a container --pids-limit.",
    ),
    # The GPU
    (
        r"(?i)\bECC\b|fallen off the bus|\bXid\b|GPU is lost|NVLink|row remap",
        "The GPU itself failed: take another node and tell its administrators; nvidia-smi -q, sudo "
        "nvidia-smi --gpu-reset -i N or a reboot may bring it back, else it is the hardware.",
    ),
    (
        r"n_classes|nll_loss|index out of bounds|indexSelect|ScatterGather|srcIndex",
        "A label or an index is out of range: see that it lies in 0 … classes - 1 (or is "
        "ignore_index), and ids below the size of the embedding.",
    ),
    (
        r"CUDNN_STATUS|[Cc]udnn handle|cuDNN failed",
        "Mostly the GPU's memory is full, or cuDNN does not fit: see nvidia-smi, make the batch "
        "smaller; in TensorFlow set_memory_growth(gpu, True); compare the versions of CUDA and "
        "cuDNN.",
    ),
    (
        r"out of resource: shared memory",
        "That is the GPU's own shared memory: smaller blocks or num_stages for that kernel, or "
        "torch.compile off (TORCH_COMPILE_DISABLE=1).",
    ),
    (
        r"std::bad_alloc",
        "It got no more memory: see free -h and its limits (ulimit -v, --mem), and load less at "
        "once.",
    ),
    # The model
    (
        r"finished reduction in the prior iteration|parameters that were not used in producing",
        "Some parameters got no gradient in that step: DistributedDataParallel(…, "
        "find_unused_parameters=True) (strategy='ddp_find_unused_parameters_true'), or take them "
        "out of the model.",
    ),
    (
        r"loss scale already at minimum",
        "The gradients overflowed in fp16 in every step: bf16 in its place, a lower learning rate, "
        "or a NaN in the data.",
    ),
    (
        r"backward through the graph a second time",
        "Call backward() once for each forward, detach() what is kept from step to step, or "
        "retain_graph=True.",
    ),
    (
        r"does not require grad and does not have a grad_fn",
        "Nothing in that loss depends on a parameter: see requires_grad, detach(), .item() and "
        "torch.no_grad() on its way.",
    ),
    (
        r"deserialize object on a CUDA device",
        "Load it where there is no GPU with map_location='cpu', or start on a node with a GPU.",
    ),
    (
        r"module\(s\) are unknown|locate a modulefile",
        "See which there are on that node: module avail, module spider NAME",
    ),
    (
        r"Expected all tensors to be on the same device",
        "Move the model and every tensor of the batch to one device: x = x.to(device)",
    ),
)


def hints_for(cause: Cause, said: str) -> list[str]:
    """What is known to help against such words, the most telling first; two at most."""
    if cause not in _CAUSES:
        return []
    return [advice for shape, advice in _ROWS if re.search(shape, said)][:2]
