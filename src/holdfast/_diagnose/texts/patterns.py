"""The lines by which systems and libraries tell why something ended: a table, by kind.

A row is a regular expression. The part between « and » is plain text that every such line has: it
finds candidates at the speed of memory. A row without these marks is plain text altogether.
Named groups become the details of the sign, numbers as numbers. Groups that begin with `_` only
serve `_detail`.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, NamedTuple

from holdfast._diagnose.texts.lines import Line
from holdfast._diagnose.texts.sign import Sign, is_source_code, make_sign

_PREVIOUS_ATTEMPT = (
    "holdfast: the previous attempt ended",
    "holdfast: the attempt before ended",  # in logs of older versions
)
_SIGNALS = {
    **{"ABRT": 6, "SEGV": 11, "BUS": 7, "ILL": 4, "FPE": 8, "TERM": 15, "INT": 2, "HUP": 1},
    **{"KILL": 9, "QUIT": 3},
    **{"segfault": 11, "Segfault": 11, "bus error": 7, "illegal operation": 4, "^C": 2},
}

# A notice of a cloud or a scheduler has three words: what takes the machine, what it does, and that
# it does so now. Settings and handlers that are ready for it lack the third, or have one of these.
_NOTICE = (
    r"(?i)^(?!.*\b(?:no|not|any|if|when(?:ever)?|unless|waiting(?! for capacity)|watching|polling"
    r"|requests?|sequence|may|might|could|likely|indicates|kv|memory|cache|example)\b"
    r"|.*(?:handler|listener|hook|callback|monitor|watcher)\w* (?:(?:is|was|has been) )?"
    r"(?:installed|registered|enabled|set|started|initiali[sz]ed|ready|running|active))"
    r"(?=.*\b(?:spot|pre-?empt\w*|itn|instance|nodes?|vm|machine|host|capacity)\b)"
    r"(?=.*\b(?:notice|notification|itn|(?-i:warning)|interrupt\w*|terminat\w*|shut\w* ?down"
    r"|reclaim\w*|pre-?empt\w*|deallocat\w*|evict\w*|signal)\b)"
    r"(?=.*\b(?:received|detected|caught|got|issued|imminent|to accommodate|by (?:a )?higher"
    r"|(?:cluster|instance|node|vm|job) is preempt\w+"
    r"|in (?:less than )?\d+ ?s\w*|\w*(?:rupt|minat|claim|empt|evict|alloca)ed (?:due to|because)"
    r"|(?:will be|being|been|was|were) \w*(?:rupt|minat|claim|shut"
    r"|stopp|delet|evict|empt|alloca)\w*)\b)"
    r".*«{}»"
)
# What a script prints when it has trained, and not after a part of that.
_END = (
    r"(?i)^(?!(?:(?!\. |(?:finished|completed?|done|ended|over) ?[,;:(]).)*(?<!at )(?<!from )"
    r"\b(?:epoch|stage|phase|fold|step"
    r"|iter(?:ation)?|round|task|level|trial|part|split|seed)s?[ _:#]*\d"
    r"|.*\b(?:if|when|until|before|not|will|once|pre)\b)"
    r"(?:.*[\]:=>*|#,-]|.*\bINFO)?\W*(?:{words})(?: successfully)?"
    r"(?:\W*$|[.!,;:] | (?:in|after|at|and|with|on)\b)"
)
_PAST = "(?:finished|completed?|done|ended|over)"
_END_WORDS = (
    rf"(?:(?:the|all|model|network|distributed) )?(?-i:[Tt])«raining »(?:(?:of|for) .{{1,40}} )?"
    r"(?:(?:run|process|job|loop|procedure) )?(?:(?:is|was|has|have|been|now|successfully) )*"
    rf"{_PAST}",
    rf"(?:(?:is|was|has|have) )?{_PAST} «training»(?: (?:the|of|for) .{{1,40}})?",
    rf"{_PAST} «Training»(?: (?:the|of|for) .{{1,40}})?",
    *(r"«Optimization Finished»", r"(?:the )?end of «training»"),
    r"(?:total (?-i:[Tt])«raining time»\W.*\d.*|training time \d+:\d\d:\d\d)",
    r"(?:the )?(?-i:[Tt])«raining took »(?:about )?\d.*",
)
# What a service says of a job that took too long; of a request to a server it is no end.
_TOO_LONG = (
    r"(?i)^(?!.*\b(?:request|http\w*|connection|query|download|\d+ ?%|(?:must|should|may|can|will"
    r"|not|if|when)\b))(?=.*\b(?:job|run|build|task|pod|workflow|pipeline|attempt|command)\b)"
    r".*«{}».{{0,40}}\b(?:(?:execution|wall|run)[ _-]?time|duration|time ?(?:limit|out)"
    r"|minutes|hours)\b"
)
# A trainer that stops itself, in any words.
_STOPS_FOR_NAN = (
    r"(?i)^(?!.*\b(?:if|when|on|enabled|true|false)\b)(?=.*\b(?:loss|grad\w*|training)\b)"
    r"(?=.*\b(?:nan|inf|infinite|non-?finite|diverged)\b).*\w«{}»"
)
# A state of SLURM, in a row of sacct, or in what scontrol and seff print.
_STATE = (
    r"(?:^\d[\w.+\[\]-]* (?=.*\s\d+:\d+\s*$).*\s|\bState: |\bJobState="
    r"|\bSlurm Job_id=.*, )«{}»"  # the last one in a mail
)
_SUCCESSES = (  # of HTCondor, Kubernetes, Jenkins, GitLab, Vertex, SkyPilot and Ray
    (r"\s*\(1\) ", "Normal termination (return value 0)", ""),
    (r"Status: +", "Succeeded", ""),
    (r"\S+ +0/\d+ +", "Completed", r" +\d+ .*"),
    *(("", "Finished: SUCCESS", ""), ("", "Job succeeded", ""), (".*", "JOB_STATE_SUCCEEDED", "")),
    (r".{0,3}", "Job finished (status: SUCCEEDED)", r"\.?"),
    (r"(?:.* )?Job '\S+' ", "succeeded", ""),
)
_FAR, _TOLD = 150, 160  # within a line of which sentences show the beginning
# The kernel's victim was another one.
_OF_A_DAEMON = re.compile(r"Kill\w* process \d+ \((?:mysql|postgres|mongo|redis|chrom|Xorg|gnome)")
_TABLE: dict[str, tuple[str, ...]] = {
    # -- SLURM; PBS, LSF, Grid Engine, YARN, Kubernetes, clouds and systemd say the same
    "slurm_oom": (
        r"Detected (?P<count>\d+) «oom_kill event»s? in (?:StepId=|step )?(?P<step>[\w.+]*)",
        r"Detected (?P<count>\d+) «oom-kill event»\(s\) in (?:StepId=|step )?(?P<step>[\w.+]*)",
        r"(?:slurm|srun|step|Job)\S*.*«xceeded job memory»",
        r"(?:JobId|StepId|Job|Step)\S* ?\S* «exceeded memory limit» \((?P<used>\d+) > "
        r"(?P<limit>\d+)\)",
        *(r"«PBS: job killed: »(?:v?mem|pmem|pvmem)\b.*exceeded", "TERM_MEMLIMIT"),
        *(_STATE.format("OUT_OF_ME"), "TERM_SWAP", r"«exceeded resource »v?mem\b"),
        r'«exceeds job hard limit» "[hs]_(?:vmem|rss|data)"',
        *("killed by YARN for exceeding", "'PHYSICAL' memory limit"),
        r"(?:[Rr]eason\W+|STATUS.*|^|\d/\d +|\d[ms] +)«OOMKilled»|OOMKilled\W{1,3}true",
        "systemd.*«killed by the OOM killer»|A process of this unit has been killed by the OOM "
        "killer",
        *("with result 'oom-kill'", "is running beyond physical memory limits"),
        r"«Job has gone over »(?:\w+ )?memory limit of",
        *("«ran out-of-memory» and exited with a non-zero", "Container killed due to memory usage"),
    ),
    "slurm_node_fail": (
        _STATE.format("NODE_FAIL"),
        *(r"srun: error: «Node failure on »(?P<node>\S+)", "Owner's node has crashed"),
        "error: Aborting, io error and missing step on node",
        "marked dead because the detector has missed too many heartbeats",
        "which was running pod .*«is unresponsive»",
        *(r"^-- «Boot »\w{32} --$", "^-- «Reboot» --$"),  # of a journal
        r"«Host EC2 »\(instance \S+\) terminated",
        *("lost communication with the server", "We stopped hearing from agent"),  # of a CI
        *("The hosted runner encountered an error", "went offline during the build"),
        r"JSM server «is not responding on host »(?P<node>[a-z]\w*?)(?=\d\d-\d\d-|\W|$)",  # jsrun's
        r"PBS: job killed: node \d+ \((?P<node>[^)]+)\) «requested job terminate»",
        *("gent was lost", "TERM_ZOMBIE", "released on a *lost* node"),
        *(r"was marked offline: «Connection was broken»", "Job reconnection failed"),
        *("compute.instances.hostError", "The task's local raylet died"),
        r"node it was running on is dead or unavailable\. «Node IP: »(?P<node>[\w.:]+)",  # Ray's
        r"«(system failure): »(?!prepare|.*pull)",  # GitLab's
    ),
    "node_event": (r"Warning +«NodeNotReady»",),
    "slurm_refused": (
        r"(?:sbatch|srun|salloc): «error: »(?:Batch job submission failed|Unable to allocate "
        r"resources|Unable to c(?:reate step|onfirm allocation) for job|Invalid generic resource)"
        r"[^\n]*",
        *("Unable to contact slurm controller", r"^«qsub: »\S.*", r"^«Unable to run job: ».*"),
        r"srun: «error: »Task launch for \S+ failed on node (?P<node>[\w.-]+): (?P<why>[^\n]+)",
        r"srun: «error: »Application launch failed[^\n]*",
        r"(?:sbatch|srun|salloc): «fatal: »\S.*",
        r"(?:sbatch|srun|salloc): «unrecognized option» .*",
        *("Batch script contains DOS line breaks", "This does not look like a batch script"),
        r"slurmstepd: error: «execve(): »[^\n]*",
    ),
    "slurm_time_limit": (
        *("«PBS: job killed: »(?:walltime|cput)", "TERM_RUNLIMIT", "MaxRuntimeExceeded"),
        *("TERM_CPULIMIT", "TERM_DEADLINE", _STATE.format("TIMEOUT")),
        *("longer than specified deadline", "longer than the specified deadline"),
        *("this job is timed-out", "Build timed out (after"),  # submitit, Jenkins
        *(_TOO_LONG.format(words) for words in (" exceeded ", " longer than ")),
        r"(?i:\b(?:job|build|task|pipeline|workflow)) (?:\S+ )?(?:has )?« timed out after »\d",
        *("nested steps due to timeout", "Too long with no output (exceeded"),  # Jenkins, CircleCI
        *("Job failed: execution took longer than", "Service reached runtime time limit"),
        *(r"«exceeded resource »(?:walltime|cput)", "TERM_WINDOW"),
        r'«exceeds job hard limit» "[hs]_(?:rt|cpu)"',
    ),
    "slurm_cancelled": (
        *("TERM_OWNER", "TERM_FORCE_OWNER", "TERM_ADMIN", "TERM_FORCE_ADMIN"),
        *(r"\bJob '\S+' «was stopped»$", _STATE.format("CANCELLED")),
        r"(?i:jobs?|task) (?i:was )?«deleted at request of »(?P<by>\S+)",  # PBS
        r"via condor_\w+« (by user »(?P<by>[^)\s]+)",
        r"(?:macro|attribute) (?P<by>\w+)« expression '».*evaluated to TRUE",  # HTCondor's
        *(
            "TERM_BUCKET_KILL",
            "TERM_ORPHAN_SYSTEM",
            "Stopped - Training job",
            "JOB_STATE_CANCELLED",
        ),
        r"^(?P<by>\S+) «has registered the job» \d+ for deletion",  # Grid Engine
        r"^«Aborted by »(?P<by>\S.{0,60})$",  # Jenkins
        r"(?i:job|run|experiment|trial|build|workflow|pipeline)\b.{0,60}(?i:\b(?:was|is|been)"
        r" (?:cancell?ed|killed|stopped|aborted|terminated))« by »(?:user )?"
        r"(?P<by>(?!(?i:the|an?|signal|sig\w+|step|[\w-]*oomd?|kernel|slurm\w*|yarn|\d+)\b)[\w.@-]+)",
        *(
            "ERROR: Job failed: canceled",
            r"^(?:##\[error\]|Error: )?«The operation was canceled.»$",
        ),
        "The runner has received a shutdown signal",
        *("Received cancellation signal, interrupting", "Job allocation has been revoked"),
    ),
    "slurm_requeued": ("Requeued SLURM job ",),  # Lightning's
    "slurm_step_cancelled": ("srun: Job step aborted: Waiting up to",),
    "slurm_preempted": (
        *("TERM_PREEMPT", "TERM_LOAD", "TERM_REQUEUE_", "deleting pod for node scale down"),
        *(_STATE.format("PREEMPTED"), r"^state: «PREEMPTED»$"),
        *("TaintManagerEviction", "compute.instances.preempted", "instance preempted"),
        *("Metadata Service says termination is imminent", "in order to admit critical pod"),
        *(r"\) [\d/:. -]+ «Job was evicted.»", r"Preempted\s.*«Preempted by »"),
        *("this job is preempted", "SIGTERM caught at ", "in response to imminent node shutdown"),
        *(r"Reason: +(?:Node)?«Shutdown»\b", "the node is shutting down"),
        "Node is shutting, evict",
        *("PreemptionByScheduler", "TerminationByKubelet", "DeletionByTaintManager"),
        r"Member \S+ «has received termination notice»",
        *(_NOTICE.format(word) for word in ("Spot", "spot", "reempt", "REEMPT", "eclaim", "ITN")),
        *(_NOTICE.format("re-empt"), "PreemptionError: "),
        r"^(?!.*\b(?:no|No|not|any)\b).*[Ii]«nterruption »(?:notice|warn)",
        r"instance«-action»\W.*(?:terminate|stop|hibernate)\b",  # of AWS
        r"\W«EventType»\W+Preempt\b",  # of Azure
        r"(?i:\bpreempted)\W{1,4}«TRUE»\b",  # of Google
    ),
    "timed_out_line": (r"«timeout: sending signal »(?P<signal_name>\w+) to command",),
    # -- Signals, as torchrun's agent, Lightning and absl print them
    "terminated_line": (
        r"\b(?i:received|caught|got|handling)(?i: signal)?:? «SIG»(?P<_name>TERM|INT|HUP)\b",
        r"\b(?i:received|caught|got|handling)« signal »#?(?P<signal>15|2|1)\b",
        *(r"^(?P<_name>«^C»)", r"SignalException: Process \d+ «got signal: »(?P<signal>\d+)"),
        *(r"^(?:[\w.]+\.)?«SIGTERMException»$", r"Received (?P<signal>\d{1,2})« death signal»"),
        r"«Stop signal received» \(e\.g\. via SIG(?P<_name>INT)",  # Ray Tune's
        *("Detected KeyboardInterrupt, attempting graceful shutdown", "ERROR: InterruptException"),
        *(
            rf"(?i)^(?! {{4}}|.*\b(?:press|use|send|hit|if|when|to stop|will)\b).*«{word}».*"
            r"\b(?:ending|stopp|exit|sav|shut|quit|abort|caught|received|detected|by user)"
            for word in ("eyboardInterrupt", "eyboard Interrupt", "eyboard int")
        ),
        r"failed (?:live|readi|start)\w+« probe, will be restarted»",
        *(r"\bKilling .*«Stopping container »", "«The node was low on resource: »(?!memory|eph)"),
        *(
            r"«PBS: job killed: »(?!walltime|cput|p?v?mem|node)",
            "TERM_PROCESSLIMIT",
            "TERM_THREADLIMIT",
        ),
        *("System is powering down", "System is rebooting", r"^«Power key pressed»"),
        *("The system is going down", r"^The« system will »(?:power off|reboot|halt)\b"),
        r"Received (?:Signals\.)?SIG(?P<_name>TERM|INT|HUP)« death signal»",
    ),
    "sent_line": (
        r"«: Killing process »(?P<pid>\d+) \(.*\) with signal SIG(?P<_name>[A-Z]+)",
        ": Watchdog timeout (limit",
    ),
    "abort_line": (
        r"«*** SIG»(?P<_name>ABRT|SEGV|BUS|ILL|FPE|TERM)(?: \(@\w+\))? received (?:by PID|at time)",
        r"«Assertion failed: (».+\), function \S+, file \S+, line \d+",
        *(r"\.mm?:\d+:? «failed assertion »", "*** Check failure stack trace: ***"),
        r"^\S+: \S+\.\w+:\d+: .*: «Assertion `».*' failed\.?$",
        r"«received signal SIG»(?P<_name>ABRT|SEGV|BUS|ILL|FPE)\b",  # gdb's
        r"«*** caught »(?P<_name>segfault|bus error|illegal operation) \*\*\*",  # R's
        r"«!!!!!!! »(?P<_name>Segfault) encountered",
        r"^#\s+SIG(?P<_name>SEGV|BUS|ILL|FPE) \(0x\w+«) at pc=»",  # Java's
        r"«*** MPI_ERR»_(?!TRUNC)\w+: .*",
    ),
    # -- C++ and libc
    "cxx_exception": (
        "terminating (?:due to|with) «uncaught exception of type »(?P<type>.+?)(?:: "
        "(?P<what>.*))?$",
    ),
    "heap_damage": (
        *("double free or corruption", "corrupted size vs. prev_size"),
        *("corrupted double-linked list", "munmap_chunk(): invalid pointer"),
        *("*** stack smashing detected ***", r"«free(): »(?:invalid|double free|unaligned)[^\n]*"),
        r"«malloc(): »(?:corrupted|invalid|memory corruption|unaligned|unsorted|mismatch)[^\n]*",
        *(r"«realloc(): invalid» [^\n]*", r"«malloc_consolidate(): »[^\n]*"),
    ),
    # -- The kernel's log
    "kernel_oom": (
        r"«Killed process »(?P<pid>\d+) \((?P<comm>[^)]*)\)",
        r"out of memory: «Kill process »(?P<pid>\d+) \((?P<comm>[^)]*)\)",  # older
    ),
    "kernel_segfault": (
        r"(?P<comm>[^\[\s]+)\[(?P<pid>\d+)\]: «segfault at »(?P<address>\w+).*?(?: in "
        r"(?P<library>[^\s\[]+))?(?:\[|$)",
        r"(?P<comm>[^\[\s]+)\[(?P<pid>\d+)\]: «unhandled exception: »[DI]ABT.*(?:translation"
        r"|permission) fault(?: in (?P<library>[^\s\[]+))?",
    ),
    "kernel_trap": (
        r"«traps: »(?P<comm>[^\[\s]+)\[(?P<pid>\d+)\] (?:trap )?(?P<what>[a-z][a-z ]+?)(?= ip:| "
        "rip:|$)",
    ),
    # -- Disks and files
    "quota": ("[Dd]isk «quota exceeded»",),
    "disk_full": (
        r"^(?!.*(?:/dev/shm|</torch_\d+|shared memory)).*«No space left on device»",
        "[Cc]an't write data.*«errno = 28»",
        r"OSError: \d+« requested and »\d+ written",  # NumPy's
        *("There is not enough space on the disk", r"Resource exhausted: \S+«.tempstate»"),
        *("disk is full", "low on resource: ephemeral-storage", " are low on disk space"),
        r"Error\b.*(?:[Nn]ot|[Nn]o|[Ii]nsufficient|[Ll]ow|out of)\b[^\n]*« disk space»",
        *("ephemeral local storage usage exceeds", r"The node had condition: \[«DiskPressure»\]"),
        "Usage of EmptyDir volume .* «exceeds the limit»",
        r"«there is not enough space for »(?P<path>(?!/dev/shm)\S+)",  # Open MPI
    ),
    "torch_save_short": (
        r"«unexpected pos »(?P<position>\d+) vs (?P<wanted>\d+)",
        *("PytorchStreamWriter failed writing file", "basic_ios::clear: iostream error"),
        r"«write error: wrote »\d+ blocks instead of \d+",
    ),
    "read_only": (r"(?:Errno 30\]|error|cannot).*«Read-only file system»",),
    "io_error": ("[Errno 5] Input/output error",),
    "stale_handle": (r"(?:Errno 116\]|error|cannot).*«Stale file handle»",),
    "files_limit": (
        r"(?:Errno 24\]|RuntimeError|OSError|Error:)[^\n]*«Too many open files»|Too many open "
        r"files\. Communication|Too many open files \(24\)",
        r"received \d+ «items of ancdata»",
    ),
    # -- Arguments that are wrong: a command line that was torn, or what Hydra does not take
    "arguments": (
        r"(?:^|line \d+: |bash: |zsh: |sh: )(?:--?[a-z]|[\w.+/@~-]+=)[^: ]*«: command not found»",
        r"\bsh: \d+: (?:--?[A-Za-z]|[\w.+/@~-]+=)[^: ]*«: not found»$",
        *(r"^«missing EQUAL» at '", r"^(?:mis|extra)\w+ «input '».*(?:expecting|<EOF>)"),
        *("^«no viable alternative at input»", "^«token recognition error at»"),
        *("hydra.cc/docs/.*«override_grammar»", "^«Could not override '»"),
        *(r"^«Key '»\S+ is not in struct", "Unknown command line flag '"),
        "ERROR: Could not consume arg: ",
        *(r"^In '[^']+«': Could not »(?:find|load) '", "^«Could not append to config»"),
    ),
    # -- What a machine lacks, and no restart heals
    "environment": (
        *(r"(?:ModuleNotFoundError: |: )«No module named »'?(?P<name>[\w.]+)", "OMP: Error #15"),
        r"(?P<name>[\w.+-]+\.so[\w.]*): «cannot open shared object file»",
        *(r"version `(?P<name>[\w.]+)«' not found (required by »", "CondaError: Run 'conda init'"),
        *(r"\.so[\w.]*: «undefined symbol: »(?P<name>\w+)", "Could not find conda environment"),
        *(r"python[\w.]*«: can't open file '»(?P<name>[^']*)'", "NVIDIA-SMI has failed because"),
        r"(?:(?:cannot execute|^exec |exec user process).*: |Errno 8\] )[Ee]«xec format error»",
        *(r"^«FATAL:   »(?=\S).*", "TERM_CWD_NOTEXIST"),  # of Apptainer and LSF
        *(r"\b(?:«ImagePull»BackOff|ErrImagePull)\b", "Failed to pull image"),
        *("CannotPullContainer", "InvalidImageName", "RunContainerError"),
        *("executable file not found in $PATH", r"forbidden: «exceeded quota: ».*"),
        *("nvidia-container-cli: ", "No solution found when resolving dependencies"),
        *("Could not find a version that satisfies", "ResolvePackageNotFound", "PackagesNotFound"),
        r"(?:Error|INTERNAL)\b.*«Unable to load »(?P<name>[\w.+-]+) library",
        r"(?P<threads>«pthread_create»(?:\(\))?:? (?:failed|Resource temp))",
        *("(?P<threads>«libgomp: Thread creation failed»)", "nvcc fatal   : Unsupported gpu arch"),
        r"(?:^|line \d+: |bash: |zsh: |sh: )(?P<name>(?!-)[^: =]+)«: command not found»",
        *("Cuda is not available.", "Error: «Unable to initialize backend»"),
        "The TensorFlow library was compiled to use .* «aren't available on your machine»",
        "«KeyError: '»(?P<name>(?:LOCAL_)?RANK|WORLD_SIZE|MASTER_(?:ADDR|PORT))'",
        *("«Error locating target» '(?P<name>[^']+)'", "OCI runtime create failed"),
        *(r"operator (?P<name>[\w.]+::[\w.]+)« does not exist»", "couldn't start container"),
        *(r"«Call to ibv_»\w+ failed", "module(s) are unknown"),
        *(
            rf"(?:NCCL WARN |^Call to )[^\n]*«{words}»"
            for words in ("Permission denied", "Invalid argument", "No such device")
        ),
        r"«failed to map segment from shared object: »(?:Operation|Permission)",
        *("spank: required plugin ", "cannot allocate memory in static TLS block"),
        *("with link time reference", "module compiled against A", "Numpy is not available"),
        *("[WinError 126]", "[WinError 127]", "[WinError 193]", "[WinError 1114]"),
        *("compiled with different CUDA major versions", "Couldn't load custom C++ ops"),
        *("mismatches the version that was used to compile", "Ninja is required to load"),
        *("No XPU devices are available", "device kernel image is invalid"),
        *("Inconsistency detected by ld.so", "JAVA_HOME is not set", "[JAVA_GATEWAY_EXITED]"),
        *("Error building extension '", "Error compiling objects for extension"),
        r"Descriptors can(?:no|')t «be created directly»",
        *("MKL FATAL ERROR: Cannot load", "no Qt platform plugin could be init"),
        *(r"[Ff]«atal error in »(?:internal_)?P?MPI_Init", "Unable to locate a modulefile for"),
        *("CreateContainerConfigError", "Insufficient nvidia.com/gpu", "invalid device ordinal"),
        *("not enough slots available in the system", "Found no NVIDIA driver on your system"),
        *("CUDA driver version is insufficient for CUDA runtime version", "Duplicate GPU detected"),
        *("The NVIDIA driver on your system is too old", "No (?:CUDA|HIP)« GPUs are available»"),
        *("no CUDA-capable device is detected", "«Torch not compiled with »\\w+ enabled"),
        *("Distributed package doesn't have NCCL", "No supported gpu backend found"),
        *("no kernel image is available for execution on the device", "cuDNN version incompatib"),
        "ptxas fatal   : Value 'sm_",
        "is not compatible with the current PyTorch installation",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available()",
        *("Error response from daemon: ", "Could not find any running Ray instance"),
        r"\bversion \S+ is .{0,40}\b(?:in|not )«compatible with»",
        *("«Failed at step »[A-Z]+ spawning .*", "«(system failure): »(?:prepare|.*pull).*"),
        r"mpirun «was unable to »(?:launch|find) the specified .*",
        # No capacity, or a quota.
        *(
            "Resources are insufficient in",
            "InsufficientInstanceCapacity",
            "RESOURCE_POOL_EXHAUSTED",
        ),
        *("Failed to acquire resources in", "Unable to provision requested", "quotas are exceeded"),
        r"[Qq]«uota of »\d.*exceeded",
        *("CUDA driver initialization failed", "Unexpected error from cudaGetDeviceCount"),
        *("MKL_THREADING_LAYER=INTEL is incompatible", "CUDA call failed lazily at initialization"),
        "system has unsupported display driver / cuda driver combination",
        *("«river/library version mismatch»", "CUDA_HOME environment variable is not set"),
        *(r"(?:CUDA|HIP)[^\n]*«invalid device function»", "hipErrorNoBinaryForGpu"),
        *(
            "Fatal Python error: init",
            r"<«urlopen error »",
            r"Error\b.*«CERTIFICATE_VERIFY_FAILED»",
        ),
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        *("does not match the version torch was compiled with", "DNN library is not found"),
        r"«Loaded runtime CuDNN library: ».* but source was compiled with",
        *("«libdevice not found» at", "Can't find libdevice directory"),
        *("FlashAttention only supports Ampere GPUs or newer", "Could not load library libcudnn"),
        *("may indicate binary incompatibility. Expected ", "Failed to find C compiler"),
        "A module that was compiled using NumPy 1.x cannot be run in",
        *("numpy.core.multiarray failed to import", "«e couldn't connect to 'http»[^']+' to load"),
        *("CUDA Setup failed despite GPU being available", "api_key not configured (no-tty)"),
        r"[Ee]rror\b.*«Temporary failure in name resolution»",
        *(r"Error\b.*«Max retries exceeded with url»", "Cannot access gated repo for url"),
        *(r"«fatal error: »(?P<name>\S+\.h\w*): No such file", r"not «find a working »\w"),
        *("#error -- unsupported GNU version", r"«/ld: cannot find -l»(?P<name>\w+)"),
        *("Ninja is required to load C++", "«Error building extension» '(?P<name>[^']+)'"),
        "The detected CUDA version .* «mismatches the version that was used»",
        *("were compiled with different CUDA major", "device kernel image is invalid"),
        *("our setup doesn't support bf16", r"«nvrtc: error: »(?:failed to open|invalid value)"),
        *("«find the requested files in the »(?:local|disk) cache", "Numpy is not available"),
        *("AssertionError: «Invalid device id»", "module compiled against API version"),
        r"«Attempting to deserialize object on »\w+ device \d",
        *("«[WinError 12»[67]", r"DLL load failed« while importing »(?P<name>\w+)"),
        r"«module '»(?P<name>(?:numpy|distutils|collections|PIL|torch(?:vision|audio)?)"
        r"(?:\.\w+)*)' has no attribute",
    ),
    # -- Memory
    "cuda_oom": (
        *("CUDA out of memory", "HIP out of memory", "XPU out of memory", "CUDA: out of memory"),
        *("MPS backend out of memory", "CUDA error: out of memory", "CUDA Error: out of memory"),
        *("No executable batch size found", "cudaMalloc failed: out of memory"),
        *("Out of memory error on GPU", "cudaMalloc retry failed: out of memory"),
        *("cudaSuccess (2 vs. 0)", "CUBLAS_STATUS_ALLOC_FAILED", "Dst tensor is not initialized"),
        *("hipErrorOutOfMemory", "cudaErrorMemoryAllocation", "NCudaLib::TOutOfMemoryError"),
        *("Ran out of memory in memory space", "parallel_for failed: out of memory"),
        r"\b(?:UR|ZE)_RESULT_ERROR_«OUT_OF_»(?:DEVICE_MEMORY|RESOURCES)|PI_ERROR_OUT_OF_RESOURCES",
        *(r"«out of memory to allocate »(?P<tried>\d+) bytes", "NPU out of memory"),
        "CudaDeviceMemoryAllocator fail to allocate memory",
        "«RESOURCE_EXHAUSTED: »(?:.*[Oo]ut of memory|Attempting to reserve)",
        "«OOM when allocating tensor»(?!.*device:CPU)",
        r"(?:Error|INTERNAL|RESOURCE_EXHAUSTED|F\d{4} )\b.*«CUDA_ERROR_OUT_OF_MEMORY»",
        *(r"«Cuda failure»(?: \d+)? '?out of memory", "Failed to CUDA calloc"),
        r"Allocator \(GPU_\d+_bfc\) «ran out of memory trying»(?!.*not a failure)",
    ),
    "host_oom": (
        *("node running low on memory", "low memory! at or below SIG", "low on resource: memory"),
        *("crashed after using all available RAM", "tried to allocate more memory than is avail"),
        *("killed due to memory pressure", "address the out of memory issue: https://docs.ray.io"),
        "of the «memory on node »\\S+ is used",
        r"«systemd-oomd»(?:\[\d+\])?:? [Kk]illed",
        r"The node had condition: \[«MemoryPressure»\]",
    ),
    "memory_refused": (
        *("«OOM when allocating tensor».*device:CPU", "[WinError 1455]"),
        r"Errno 12\]|(?:fork|mmap|malloc)\b.*«Cannot allocate memory»|allocate memory \(12\)",
        "«failed to map segment from shared object»(?!: [OP])",
        "cannot allocate memory for thread-local data",
        r"«Unable to allocate »[\d.]+ ?[KMGT]i?B for an array",
        r"«DefaultCPUAllocator: »(?:can't|not enough)(?:.*allocate (?P<tried>\d+) bytes)?",
    ),
    # -- The GPU itself
    "cuda_error": (
        *(r"«CUDA error: »(?P<what>[^\n]+)", r"«HIP error: »(?P<what>[^\n]+)"),
        r"«CUDA driver error: »(?P<what>[^\n]+)",
        r"«cuda runtime error (»\d+\) : (?P<what>[^\n]+?)(?: at /[^\n]*)?$",
        *(r"(?P<what>«rtDeviceSynchronize execute failed»[^\n]*)", r"cu\w+ «error: CUFFT»\w+"),
        *(r"«CUDNN_STATUS_»(?!SUCCESS)\w+", r"«CUBLAS_STATUS_»(?!SUCCESS|ALLOC)\w+"),
        r"\bCU(?:SOLVER|SPARSE|FFT|RAND)«_STATUS_»(?!SUCCESS|ALLOC)\w+",
        r"\bcu(?:Solver|SPARSE|FFT|BLAS|DNN)\b[^\n]*« internal error»",
        "«device-side assert»(?:ion)? (?:triggered|.{0,40}failed)",
        r"«Cuda failure»(?: \d+)? '?(?P<what>[^'\n]+)",
        *(r"Triton Error «[CUDA]: »(?P<what>.+)", r"«CUDA driver error: »(?P<what>.+)"),
        *("cublasLt ran into an error", "was unable to find an engine to execute"),
        r"(?P<what>(?<!`)\b«cudaError»(?!MemoryAllocation|NoDevice|Insufficient|NoKernel|InvalidDevice)"
        r"[A-Z]\w+(?:: [^\n]+)?)",
        *("an illegal memory access was encountered", "unspecified launch failure"),
        r"(?:Error|INTERNAL|Internal|F\d{4} )\b.*(?P<what>«CUDA_ERROR_»(?!OUT_OF_MEMORY|NO_DEVICE)"
        r"\w+)",
        r"«Check failed: ».*(?P<what>(?:CU\w*_SUCCESS|cudaSuccess) \((?!2 ).*)",
        "unhandled cuda error",
        *("Core halted unexpectedly", "Accelerator device halted"),  # of a TPU
        *("cuDNN failed to initialize", r"«miopenStatus»(?!Success)\w+", "GEMM launch failed"),
        *(r"«synStatus»[ =]+(?:synStatus )?[1-9]\d*[^\n]*", "«Memory access fault by GPU».*"),
        *("«Unable to determine the device handle for GPU».*", r"«HSA_STATUS_ERROR»\w*[^\n]*"),
        *("GPU is lost", "«fallen off the bus».*", "«HW Exception by GPU».*"),
        *("«amdgpu_job_timedout».*", "«GPU HANG: ecode».*"),  # of the kernel
        r"(?P<what>\b(?:UR|ZE)_«RESULT_ERROR_»(?!OUT_OF|UNINIT|\w*NOT_FOUND)\w+)",
        r"(?i:\b(?:npu|acl)\b)[^\n]*«error code»(?: is |:)507(?!046|048)\d+",
        r"«NVRM: »(?P<what>Xid \([^)]*\): (?P<xid>\d+)[^\n]*)",
    ),
    "cuda_assert": (
        r"(?P<file>\S+\.(?:cuh?|hip)):(?P<at>\d+): .*«Assertion `»(?P<assertion>.*?)[`'] failed",
    ),
    # -- Collectives
    "nccl_timeout": (
        r"(?:Rank (?P<rank>\d+)\] )?«Watchdog caught collective operation timeout»: WorkNCCL"
        r"\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+)(?:, NumelIn="
        r"(?P<elements>\d+))?[^)]*?Timeout\(ms\)=(?P<timeout_ms>\d+)\) ran for (?P<ran_ms>\d+) "
        "milliseconds",
        r"(?:Rank (?P<rank>\d+)\] )?«Watchdog caught collective operation timeout»",
        r"(?:aborted on rank (?P<rank>\d+)\b.*)?«timed out in blocking wait»",
        *(
            rf"(?:Rank (?P<rank>\d+)\][^\]]{{0,120}})?(?P<is_stuck>«{words}»)"
            for words in ("Heartbeat monitor timed out", "watchdog got stuck for", "watchdog hang")
        ),
    ),
    "nccl_progress": (
        r"(?:Rank (?P<rank>\d+)\][^\]]{0,120})? at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+),?"
        r"(?: PG status:)? «last enqueued »(?:NCCL )?work: (?P<enqueued>-?\d+), last completed "
        r"(?:NCCL )?work: (?P<completed>-?\d+)",
    ),
    "gloo_timeout": (
        r"«Timed out waiting »(?P<_ms>\d+) ?ms for (?P<operation>\w+) operation",
        r"\[Rank (?P<rank>\d+)\]: Ranks? (?P<_names>[\d, ]+) «failed to pass monitoredBarrier»",
        r"Rank (?P<rank>\d+) «successfully reached monitoredBarrier»",
        "«Barrier timed out»(?!.*(?:PjRT|Connect|_register))",
        *(r"«[missing ranks: »(?P<_names>[\d, ]+)\]", "Remote Rank did not send the data in time"),
        r"«received the Notify record from remote rank»: ?\[(?P<_names>\d+)\]",
        "Application timeout caused pair closure",
        "submitted to be reduced.* «by subset of ranks»",
        "Termination timeout .*«to join the rendezvous»",  # XLA's
    ),
    "collective_mismatch": (
        "Is there a distributed collective mismatch in your code",
        *("Detected mismatch between collectives on ranks", "op.preamble.length <= op.nbytes"),
        "MPI_ERR_TRUNCATE: message truncated",
        "Received data size doesn't match expected size",
    ),
    "peer_lost": (
        r"«Connection closed by peer» \[(?P<peer>[^\]]*)\](?::(?P<port>\d+))?",
        r"(?:gloo|[Rr]ead error|[Ss]ocket|NCCL|Call to (?:recv|send)|TCPStore|recvValue|sendBytes"
        r"|DistNetworkError|c10d).*?(?:[\[ ](?P<peer>[\w.:-]+)(?:<\d+>|\]:\d+)[^\n]{0,20})?"
        "«Connection reset by peer»",
        r"(?:gloo|[Ww]rite error|TCPStore|sendBytes|NCCL|c10d)[^\n]*«Broken pipe»",
        *(r"gloo[^\n]*«Connection refused»", "ncclRemoteError", "NCCL.*«unhandled system error»"),
        *(r"«Connection closed by remote peer» (?P<peer>[^\s<]+)", "failed to recv, got 0 bytes"),
        *("remote process exited or there was a network error", "Horovod has been shut down"),
        *("TCP send error. Details: Broken pipe", r"«Got completion from peer» (?P<peer>[^\s<]+)"),
        *("Did the remote server shutdown or crash", "unhealthy (stopped sending heartbeats"),
        r"«Connect to »(?P<peer>[\w.:-]+)<\d+> failed : (?!Connection timed)",
        *("JAX distributed service detected fatal errors", "Collective ops is aborted by"),
        *("Failed to send RPC to coordination service", "Aborting RingReduce with Unavailable"),
        r"Task /job:\w+/replica:\d+/task:(?P<_names>\d+)« heartbeat timeout»",
        *("peer process has unexpectedly disconnected", "Unavailable: Socket closed"),
        r"\b(?:communicator|[Cc]ollective|[Pp]rocess group)\b.*(?:was|been|is)« aborted»\b",
        r"RTE «has lost communication with a remote daemon».*Remote daemon: \S+ on node "
        r"(?P<machine>[\w.-]+)",
        r"«InfiniBand retry count between two MPI processes».*Peer host: +(?P<machine>\S+)",
        "Possibly, this master has restarted",
        *("Transport retry count exceeded", "Unresponsive receiver"),  # UCX, EFA
        "(?:Error|infeed|outfeed|UNAVAILABLE): «Socket closed»",
        "Unavailable(?:Error)?\\b.*«Stream removed»",
        "Too many nodes went down and we cannot recover",
    ),
    "rendezvous": (
        r"environment variable (?P<variable>\w+)« expected, but not set»",
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/"
        r"(?P<wanted>\d+) «clients joined»",
        r"«wait timeout after »(?P<_ms>\d+)ms, keys: (?P<keys>[^\n]*)",
        r"«The client socket has »(?:timed out after (?:(?P<timeout_ms>\d+)m|\d+)s|failed)"
        r".{0,40}?connect to (?:any network address of )?\((?P<host>[^,)]+), (?P<port>\d+)\)",
        *("«Barrier timed out».*(?:PjRT|Connect|_register)", "Gloo connectFullMesh failed"),
        r"pair\.cc:\d+\] «Connect timeout» \[(?P<host>[^\]]+)\]:(?P<port>\d+)",
        *("ncclUniqueId from [0] via c10d key-value store", "RendezvousTimeoutError"),
        r"socket\w{1,20}«Connect: »[^\n]{0,120}(?:timed out|No route to|Network is)",
        r"Bootstrap Root : rank \d+ of \d+ ranks «has already checked in»",
        r"network addresses of \((?P<host>[^,)]+), (?P<port>\d+)\) «cannot be retrieved»",
        *(r"gloo.*«Unable to »(?:find address|resolve hostname)", "RendezvousConnectionError"),
        r"«Unable to resolve hostname» to a \(local\) address: (?P<host>[^\s\]]+?)\.? ",
        *("Bootstrap : no socket interface found", "RendezvousClosedError"),
        *("DNS resolution failed for", "Error: «connect() timed out»", "Master init: Unavailable"),
        *("Timed out initializing process group in store based barrier", "ssh: connect to host "),
        *("empty() failed to get ip", r"^(?!git@).*«Permission denied (publickey»"),
        *("Error: «Socket Timeout»$", "RuntimeError: «Connection timed out»$"),
        "DEADLINE_EXCEEDED: Connect() timed out",
        "CreateSession still waiting for response from worker",
        r"RTE «was unable to reliably start one or more daemons»",
        r"RTE daemon «has unexpectedly failed after launch»",
        r"«Timed out waiting for ».{0,40}(?:slot|host|process|worker)\w* to \w",
    ),
    "address_in_use": (
        r"(?:port: (?P<port>\d+).*)?«EADDRINUSE»",
        "The server socket has failed to listen on any local network",
        r"(?:Errno 98\]|bind|listen|socket|(?:OS|Runtime)Error|while attempting|c10d)[^\n]*[Aa]"
        "«ddress already in use»",
    ),
    # -- Data loaders and pools
    "worker_killed": (
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) «is killed by signal: »"
        "(?P<signal_name>[A-Za-z /]+)",
        r"Unexpected (?P<signal_name>[a-z -]+)« encountered in worker»",
        r"«exit codes of the workers are {».*?(?P<signal_name>SIG\w+)\(",  # joblib's
    ),
    "worker_exited": (
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) «exited unexpectedly»(?: with exit "
        r"code (?P<exitcode>-?\d+))?",
        "(?:A process in the process pool was|A child process) «terminated abruptly»",
        *("(?P<points_above>«workers are no longer alive»)", "workers died while running it"),
        *("subprocesses has abruptly died", "Pin memory thread exited unexpectedly"),
        "A worker process managed by the executor was unexpectedly",
        *("A compilation subprocess exited unexpectedly", "because its worker process has died"),
        "The (?:worker|actor) «died unexpectedly» (?:while|before)",
        "A worker died or was killed while executing",
    ),
    # An exception that Python could not print, because a signal raised another one.
    "worker_conn_reset": ("«object type name: »(?:EOFError|ConnectionResetError|BrokenPipeError)",),
    "worker_timeout": (r"«DataLoader timed out after» (?P<seconds>\d+) seconds",),
    "worker_file_not_found": ("«unable to open shared memory object» .*No such file or directory",),
    "shm_full": (
        r"«unable to allocate shared memory»\(shm\) for file (?P<file><[^>]*>): No space left",
        *("rror while creating shared memory segment", "are out of shared memory"),
        *("nsufficient shared memory", "unable to write to file </torch_"),
        "«there is not enough space for »/dev/shm",
        r"(?:/dev/shm|</torch_\d+).*«No space left on device»|No space left on device.*/dev/shm",
    ),
    # -- Numbers
    "nan": (
        *(r"Function '(?P<function>\w+)' «returned nan values»", "Loss is nan, stopping training"),
        *("loss returned in `training_step` «is nan or inf»", "Your loss is probably exploding"),
        *("Loss became infinite or NaN", "Current loss scale already at minimum"),
        *map(_STOPS_FOR_NAN.format, ("topping", "borting", "nding training", "xiting")),
        "is non-finite, so it cannot be clipped",
        r"Monitored metric .* «is not finite»",
        *("FloatingPointError: invalid value (nan)", "Invalid loss, terminating training"),
        r"OVERFLOW! .*«Attempted loss scale: »(?:0|1)(?:\.0)?, reducing to (?:0|1)\b",
    ),
    # -- holdfast's own words, and the last words of other trainers
    "holdfast_stop": (
        r"holdfast: .*«; leaving with status »(?P<status>\d+) \((?P<reason>.*?)\)",
        r"«holdfast: leaving at once (»(?P<reason>.*?)\): .*Status (?P<status>\d+)",
    ),
    "holdfast_start": (
        *(r"holdfast: .*« (attempt »(?P<attempt>\d+)[^)]*\)\.$", "holdfast: starting it again"),
        *(r"^001 \(\d[\d.]*\) .*«Job executing on host»", "Attempting to start training worker gr"),
    ),
    "holdfast_finished": (
        r"holdfast: .*trained to step (?P<step>\d+).*«; the last checkpoint is durable.»",
        r"«`Trainer.fit` stopped: `max_»(?:epochs=\d+|steps=(?P<step>\d+))` reached",
        r"^\s+\w+«_runtime »+= +\d",  # transformers' table of metrics
        *(r"\{«'train_runtime': »[\d.']+", r"(?i)epoch \d+: «early stopping»$", "Status: Finished"),
        *(r"\d+ epochs «completed in »[\d.]+ hours", "arly stopping, best iteration is:"),
        *("Did not meet early stopping. Best", "Stopping. Best iteration:", "] Finish train"),
        *("Reporting training SUCCESS", "Finished training loop.", ":Loss for final step: "),
        *("EarlyStopping: Training stopped early as no", "Completed - Training job completed"),
        *("Training completed. Do not forget to share your", "*** Best metric: "),
        *("^Process finished with «exit code 0»$", "worker group successfully finished"),
        r"(?P<reported>«Job execution was successful. Exit Status 0»)",
        r"(?P<reported>«State: COMPLETED (exit code 0)»)",
        *(_END.format(words=words) for words in _END_WORDS),
        r"^\s*«Number of finished trials: » *\d+$",  # of a search
        r"^\W{0,3}«Best »(?:hyper-?)?(?:trials?|param\w*)\b.{0,20}[:=]",
        *(r"launcher\.Parallel INFO: «End of run»", r"Process \d+ «exits successfully.»"),
        r"^«total images/sec: »[\d.]+$",
        # What was planned, and is no end of the training.
        r"(?P<planned>«Stopping training because the mean reward».*)",
        r"(?P<planned>\[«exiting program »(?:after [\d.]+|at iteration).*)",
        r"(?P<planned>«Stopping training due to ».*[>=] ?(?:max_update|stop_time).*)",
        r"(?P<planned>(?i:time|walltime|duration) «limit reached». .*(?i:stopp|exit|signaling).*)",
        r"^(?P<reported>«Successfully completed.»)$",  # LSF's
        *(rf"^{before}(?P<reported>«{words}»{after})$" for before, words, after in _SUCCESSES),
    ),
}


class Pattern(NamedTuple):
    """One row: `needle` finds candidates, `shape` decides."""

    kind: str
    needle: str
    shape: str


def _pattern(kind: str, row: str) -> Pattern:
    before, mark, rest = row.partition("«")
    if not mark:
        return Pattern(kind, row, re.escape(row))
    needle, _, after = rest.partition("»")
    return Pattern(kind, needle, f"{before}{re.escape(needle)}{after}")


PATTERNS = tuple(_pattern(kind, row) for kind, rows in _TABLE.items() for row in rows)


def sign_of(row: Pattern, line: Line) -> Sign | None:
    """The sign that a line is; None if it only looks like it."""
    match = _compiled(row.shape).search(line.text)
    if match is None or is_source_code(line.text, match.start()):
        return None
    if line.text.startswith(_PREVIOUS_ATTEMPT) or _OF_A_DAEMON.search(match[0]):
        return None
    details: dict[str, Any] = {}
    for name, value in match.groupdict().items():
        if value is not None or name == "_name":
            details |= _detail(name, value or "")
    if row.kind == "cuda_oom":
        details |= read_memory_error(line.text)
    elif row.kind == "cuda_error":
        what = (details.get("what") or match[0]).strip().rstrip(".")
        if "out of memory" in what:
            return None  # a cuda_oom
        details["what"] = what[:200]
    elif row.kind == "kernel_oom":
        details["of_cgroup"] = "Memory cgroup out of memory" in line.text
    if re.search("(?i)keyboard ?interrupt|InterruptException", match[0]):
        details["signal"] = 2
    if (start := line.text.find(row.needle)) > _FAR:
        details["told"] = line.text[start:][:_TOLD]
    rank = details.pop("rank", None)
    return make_sign(row.kind, line, details, rank if isinstance(rank, int) else line.rank)


@cache
def _compiled(shape: str) -> re.Pattern[str]:
    # On demand: few rows are ever met, and each leader of a training imports all of them.
    return re.compile(shape)


def _detail(name: str, value: str) -> dict[str, Any]:
    """What a group of a row tells: a number as a number, and more by those with an underscore."""
    number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else None
    if name == "_names":  # ranks that did not come
        return {"missing": [int(n) for n in re.findall(r"\d+", value)][:1024]} if value else {}
    if name == "_name":
        return {"signal": _SIGNALS.get(value, 0)}
    if name == "_ms":
        return {"timeout_ms": number}
    return {name: value if number is None else number}


# -- The sizes in an out-of-memory message, as torch, JAX and TensorFlow print them ----------------

_UNITS = {
    **{"": 1, "b": 1, "bytes": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4},
    **{"kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4},
    **{"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4},  # XLA's
}
_SIZE = r"(\d[\d.]*) ?([KMGT]i?B?\b|B\b|bytes\b|(?![\w.]))"
_FIGURES = {
    "tried": r"(?i)(?:(?:try\w*|tried|failed|unable|attempt\w*) to|cannot) (?:allocate|reserve)"
    rf":? {_SIZE}|Requested memory: {_SIZE}|requested bytes of {_SIZE}|buffer of size {_SIZE}",
    "total": rf"total capac(?:i)?ty of {_SIZE}|; {_SIZE} total capacity|max allowed: {_SIZE}"
    rf"|Used [\d.]+\w? of {_SIZE} hbm",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free|Free memory: {_SIZE}|There are {_SIZE} free"
    rf"|available memory is only {_SIZE}|Available memory of {_SIZE}",
    "allocated": rf"{_SIZE} is allocated by PyTorch|; {_SIZE} already allocated"
    rf"|{_SIZE} memory has been allocated|MPS allocated: {_SIZE}",
    "needed": rf"Used {_SIZE} of [\d.]+\w? hbm",
    "reserved_unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_SHAPE = re.compile(r"tensor with shape ?(\[[\d, ]*\])(?: and type (\w+))?")
_TYPES = {"half": 2, "bfloat16": 2, "float": 4, "int32": 4, "double": 8, "int64": 8}  # bytes
HARDWARE = re.compile(
    r"ECC|hardware|fallen off the bus|NVLink|unspecified launch failure|misaligned|row remap"
    r"|Xid|GPU is lost|system not yet initialized"
)


def read_memory_error(text: str) -> dict[str, Any]:
    """The figures of the message, in bytes."""
    found: dict[str, Any] = {}
    for name, shape in _FIGURES.items():
        if (size := re.search(shape, text)) is not None:
            number, unit = [group for group in size.groups() if group is not None][:2]
            found[name] = size_bytes(number, unit)
    if (tensor := _SHAPE.search(text)) is not None:
        found["shape"] = tensor[1]
        each = _TYPES.get(tensor[2] or "")
        if each and "tried" not in found:
            found["tried"] = math.prod(map(int, re.findall(r"\d+", tensor[1]))) * each
    if "tried" not in found and (plain := re.search(rf"allocat\w+ {_SIZE}", text)):
        found["tried"] = size_bytes(plain[1], plain[2])
    return found


def size_bytes(number: str, unit: str) -> int | None:
    """A size as libraries print it.

    >>> size_bytes("1.50", "GiB"), size_bytes("12", "bytes")
    (1610612736, 12)
    """
    try:
        return int(float(number) * _UNITS.get(unit.lower(), 1))
    except (ValueError, OverflowError):
        return None
