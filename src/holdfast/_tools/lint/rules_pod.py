"""What in a pod loses the state of a training: its grace, its memory, its disk, its first shell."""

from __future__ import annotations

import shlex

from holdfast import _errors
from holdfast._tools.doctor.run import save_seconds, step_seconds
from holdfast._tools.lint.finding import ERROR, HINT, WARNING, Finding
from holdfast._tools.lint.lint import Surroundings, in_order
from holdfast._tools.lint.pod import TRAINS, Container, Pod, find_pods, quantity
from holdfast._tools.lint.pod_text import Node, read_documents
from holdfast._tools.lint.shell import parse_commands
from holdfast._tools.lint.tokens import NotUnderstood

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_INITS = ("tini", "dumb-init", "catatonit")
_HARMLESS = ("cd", "export", "set", "source", ".", "ulimit", "umask", "echo", ":", "true", "unset")
_COUNTED_ON_SECONDS = 10.0  # after a SIGTERM, if nobody says anything else
_MARGIN_SECONDS = 5.0
_GRACE_VARIABLE = "HOLDFAST_GRACE_SECONDS"


def check_grace(pod: Pod, needed_seconds: float | None, run_name: str) -> list[Finding]:
    """Is there time to finish a step and save it after SIGTERM?"""
    grace, line = pod.grace_seconds, pod.line_of("terminationGracePeriodSeconds")
    told = pod.spec.get("terminationGracePeriodSeconds")
    source = "" if told is None else f"terminationGracePeriodSeconds: {grace:g}"
    found = []
    needed = None if needed_seconds is None else needed_seconds + _MARGIN_SECONDS
    if needed is not None and grace < needed:
        found.append(
            Finding(
                "grace-too-short",
                ERROR,
                line,
                f"{grace:g} s after SIGTERM the pod is killed{'' if told else ' (the default)'}, "
                f"and a step with its save takes {needed_seconds:.0f} s in {run_name}.",
                source,
                (f"terminationGracePeriodSeconds: {2 * needed + 30:.0f}",),
            )
        )
    for each in pod.containers:
        found += _check_counted_on(pod, each, grace)
        found += _check_pre_stop(each, grace)
    return found


def _check_counted_on(pod: Pod, container: Container, grace: float) -> list[Finding]:
    entry = container.env(_GRACE_VARIABLE)
    if entry is None:
        if grace <= _COUNTED_ON_SECONDS:
            text = f"holdfast counts on 10 s after SIGTERM, and the pod is killed after {grace:g} s"
            corrected = "terminationGracePeriodSeconds: 120"
            at = pod.line_of("terminationGracePeriodSeconds")
            return [Finding("grace-too-short", ERROR, at, f"{text}.", corrected=(corrected,))]
        text = (
            f"{container.name}: after SIGTERM holdfast counts on 10 s, and there are {grace:g}: a "
            "longer step is given up for the snapshot before it."
        )
        corrected = f'- {{name: {_GRACE_VARIABLE}, value: "{max(1.0, grace - 10):g}"}}'
        return [Finding("grace-not-told", HINT, container.line, text, corrected=(corrected,))]
    try:
        seconds = float(str(entry.plain("value")).removesuffix("s"))
    except ValueError:
        return []
    if seconds < grace:
        return []
    text = f"holdfast counts on {seconds:g} s after SIGTERM, and the pod is killed after {grace:g}"
    fit = f'value: "{max(1.0, grace - 10):g}"'
    source = f'{_GRACE_VARIABLE} = "{seconds:g}"'
    return [Finding("grace-too-short", ERROR, entry.line, f"{text} s.", source, (fit,))]


def _check_pre_stop(container: Container, grace: float) -> list[Finding]:
    """The time of the hook is taken from the grace, and SIGTERM comes only after it."""
    hook = container.node.get("lifecycle", "preStop")
    if hook is None:
        return []
    seconds = hook.plain("sleep", "seconds")
    words = [str(each.value) for each in hook.items("exec", "command")]
    for at, word in enumerate(" ".join(words).split()[:-1]):
        following = " ".join(words).split()[at + 1].rstrip("s;'\"")
        if word.endswith("sleep") and following.isdecimal():
            seconds = int(following)
    if not isinstance(seconds, int) or seconds < grace - _COUNTED_ON_SECONDS:
        return []
    text = (
        f"{container.name}: preStop sleeps {seconds} s of the {grace:g} s there are, and SIGTERM "
        "comes only then."
    )
    return [Finding("pre-stop-takes-the-grace", ERROR, hook.line, text)]


def check_memory(pod: Pod) -> list[Finding]:
    """Is there room in /dev/shm for snapshots and loaders, and does it fit into the limit?"""
    found = []
    for each in pod.containers:
        shm, limit = each.mounted("/dev/shm"), each.memory_limit()
        kind = None if shm is None else shm.get("emptyDir")
        if shm is None:
            text = (
                f"{each.name}: /dev/shm has 64 MB here: snapshots in memory do not fit, and "
                "loaders with workers die of SIGBUS."
            )
            corrected = (
                "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}]",
                "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
            )
            found.append(Finding("small-shm", WARNING, each.line, text, corrected=corrected))
        elif kind is not None and kind.plain("medium") != "Memory":
            text = f"{each.name}: /dev/shm is on the node's disk: snapshots are as slow as that."
            fit = ("medium: Memory",)
            found.append(Finding("shm-on-disk", WARNING, kind.line, text, corrected=fit))
        elif kind is not None:
            found += _check_size(each, kind.plain("sizeLimit"), limit, kind.line)
        if limit is None:
            text = (
                f"{each.name}: has no memory limit: when the node is full, whoever uses most is "
                "killed, and nothing warns before."
            )
            fit = ("resources: {limits: {memory: 64Gi}}",)
            found.append(Finding("no-memory-limit", HINT, each.line, text, corrected=fit))
    return found


def _check_size(
    container: Container, size: object, limit: float | None, line: int
) -> list[Finding]:
    wanted = quantity(size)
    if wanted is None or limit is None or wanted < limit:
        return []
    text = (
        f"{container.name}: /dev/shm may take {size}, which counts as memory, and the limit of all "
        "is no more than that: filling it is an OOM kill."
    )
    return [Finding("shm-over-the-limit", ERROR, line, text)]


def check_disk(pod: Pod) -> list[Finding]:
    """Does the run folder outlive the pod?"""
    found = []
    for each in pod.containers:
        if each.has_lasting_volume() or "://" in each.text() or pod.kind == "StatefulSet":
            continue  # an address may be that of a mirror
        text = (
            f"{each.name}: nothing that it writes outlives the pod: the next one begins from "
            "nothing."
        )
        corrected = ("volumes: [{name: runs, persistentVolumeClaim: {claimName: runs}}]",)
        found.append(Finding("no-lasting-volume", WARNING, each.line, text, corrected=corrected))
    return found


def check_first_process(pod: Pod) -> list[Finding]:
    """Does SIGTERM reach the training, or does a shell in front of it keep it?"""
    found = []
    for each in pod.containers:
        words = each.words
        while words and words[0].rpartition("/")[2] in _INITS:
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[1:]
        script = _script_of(words)
        if script is not None:
            found += _check_script(each, script, words[0].rpartition("/")[2])
    return found


def _script_of(words: list[str]) -> str | None:
    """What a shell is given to run, by -c."""
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return None
    for at, word in enumerate(words[1:-1], 1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return words[at + 1]
        if not word.startswith("-"):
            return None
    return None


def _check_script(container: Container, script: str, shell: str) -> list[Finding]:
    try:
        commands = parse_commands(script)
    except NotUnderstood:
        return []
    if any(each.text == "trap" for each in commands):
        return []  # somebody has thought of it
    trains = [each for each in commands if each.words and TRAINS.match(each.text)]
    if not trains:
        return []
    last = trains[-1]
    who = f"{container.name}: {shell} is process 1 and does not pass SIGTERM on to"
    written = script[last.start : last.end]
    if last.is_piped or last.is_background or last.within:
        how = "a pipe" if last.is_piped else "the background" if last.is_background else "a group"
        text = f"{who} what runs in {how}: the pod is killed at the end of its grace."
        corrected = (f"exec holdfast run -- {shlex.join(map(_word, last.words))}",)
        return [_of_shell(ERROR, container, text, written, corrected)]
    rest = [each for each in commands[commands.index(last) + 1 :] if each.text != "exit"]
    before = [each for each in commands if each is not last and each.text not in _HARMLESS]
    if rest or before or len(commands) > 1:
        text = f"{who} the training: the pod is killed at the end of its grace."
        return [_of_shell(ERROR, container, text, written, (f"exec {written}",))]
    text = (
        f"{container.name}: some shells stay in front of their only command and keep SIGTERM for "
        "themselves."
    )
    return [_of_shell(HINT, container, text, written, (f"exec {written}",))]


def _word(token: object) -> str:
    return str(getattr(token, "text", token))


def _of_shell(
    severity: str, container: Container, text: str, source: str, corrected: tuple[str, ...]
) -> Finding:
    return Finding("shell-keeps-sigterm", severity, container.line, text, source, corrected)


# -- Who starts a training again that was interrupted, and who must not ----------------------------


_IGNORE = "action: Ignore"
_DISRUPTED = "onPodConditions: [{type: DisruptionTarget, status: 'True'}]"
_FOREVER = ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet")


def check_restarts(pod: Pod) -> list[Finding]:
    """The restart policy, and a Job's podFailurePolicy."""
    if not pod.is_known:
        return []  # who starts the pods of a PyTorchJob again is a matter of its controller
    policy = str(pod.spec.plain("restartPolicy") or "Always")
    line = pod.line_of("restartPolicy")
    if pod.kind in _FOREVER:
        text = (
            f"a {pod.kind} starts its pods again for ever: also a training that is done (0), that "
            "a person has stopped (130), or that a rule called bad (65)."
        )
        return [_restart(WARNING, pod.root.line, text, "kind: Job")]
    if pod.kind == "Pod":
        text = "nobody makes another pod when this one's node is drained, preempted or gone."
        found = [_restart(WARNING, pod.root.line, text, "kind: Job")]
        if policy == "Always":
            text = "Always starts a training again that is done (0) or that a person has stopped."
            found.append(_restart(WARNING, line, text, "restartPolicy: OnFailure"))
        return found
    if policy == "Always":
        text = "a Job takes restartPolicy Never or OnFailure only, and Always is the default."
        return [_restart(ERROR, line, text, "restartPolicy: Never")]
    job = pod.job
    assert job is not None
    rules = job.get("podFailurePolicy", "rules")
    if rules is None or not isinstance(rules.value, list):
        return [_no_policy(job, policy)]
    if policy != "Never":
        text = "a podFailurePolicy is allowed with restartPolicy Never only."
        return [_restart(ERROR, line, text, "restartPolicy: Never")]
    return _check_rules(rules)


def _restart(severity: str, line: int, text: str, corrected: str) -> Finding:
    return Finding("restart-policy", severity, line, text, corrected=(corrected,))


def _no_policy(job: Node, policy: str) -> Finding:
    limit = job.plain("backoffLimit")
    told = "6 (the default)" if limit is None else limit
    text = (
        f"without a podFailurePolicy every interruption counts as a failure: after {told} the Job "
        "is given up, and a training that a person has stopped is started again."
    )
    if policy == "OnFailure":
        text += " It needs restartPolicy Never."
    corrected = (
        "podFailurePolicy:",
        "  rules:",
        f"    - {_IGNORE}",
        f"      {_DISRUPTED}",
        f"    - {_IGNORE}",
        f"      onExitCodes: {{operator: In, values: [{_errors.REQUEUE}, {_errors.TERMINATED}]}}",
        "    - action: FailJob",
        f"      onExitCodes: {{operator: In, values: [{_errors.BAD}, {_errors.PERSON}]}}",
    )
    return Finding("no-failure-policy", WARNING, job.line, text, corrected=corrected)


def _check_rules(rules: Node) -> list[Finding]:
    found = []
    if not any(_is_disruption(each) for each in rules.value if each.plain("action") == "Ignore"):
        text = "a drained or preempted pod counts as a failure: no rule ignores DisruptionTarget."
        found.append(_of_rules(rules, text, (f"- {_IGNORE}", f"  {_DISRUPTED}")))
    for status, who in ((_errors.REQUEUE, "interrupted"), (_errors.TERMINATED, "told to end")):
        if action_of(rules, status) == "FailJob":
            text = f"a training that was {who} leaves with {status}, and that fails the whole Job."
            found.append(_of_rules(rules, text, (f"- {_IGNORE}", _values(status))))
    if action_of(rules, _errors.REQUEUE) == "Count":
        text = f"each interruption that leaves with {_errors.REQUEUE} counts against backoffLimit."
        found.append(_of_rules(rules, text, (f"- {_IGNORE}", _values(_errors.REQUEUE))))
    for status, who in ((_errors.PERSON, "a person has stopped"), (_errors.BAD, "is bad")):
        if action_of(rules, status) != "FailJob":
            text = f"a training that {who} leaves with {status}, and the Job starts it again."
            found.append(_of_rules(rules, text, ("- action: FailJob", _values(status))))
    return found


def action_of(rules: Node, status: int) -> str:
    """What a podFailurePolicy does about an exit status: the first rule that fits decides."""
    for rule in rules.value:
        values = [each.value for each in rule.items("onExitCodes", "values")]
        operator = rule.plain("onExitCodes", "operator")
        if (operator == "In" and status in values) or (
            operator == "NotIn" and status not in values
        ):
            return str(rule.plain("action"))
    return "Count"


def _is_disruption(rule: Node) -> bool:
    return any(each.plain("type") == "DisruptionTarget" for each in rule.items("onPodConditions"))


def _values(status: int) -> str:
    return f"  onExitCodes: {{operator: In, values: [{status}]}}"


def _of_rules(rules: Node, text: str, corrected: tuple[str, ...]) -> Finding:
    return Finding("failure-policy", WARNING, rules.line, text, corrected=corrected)


# -- All rules over one manifest of Kubernetes -----------------------------------------------------


def lint_manifest(name: str, text: str, around: Surroundings) -> list[Finding]:
    """What is wrong with the pods that train, in the order of the lines."""
    needed, run_name = None, ""
    if around.run is not None:
        save, step = save_seconds(around.run), step_seconds(around.run)
        needed = None if save is None else save + (step or 0.0)
        run_name = around.run.name
    found: list[Finding] = []
    pods = list(find_pods(read_documents(name, text)))
    if not pods:
        # Else "nothing is lost here" would be said of what nobody has looked at.
        text = "no container in it trains, as far as its commands show: there is nothing to check."
        found.append(Finding("no-training", HINT, 1, text))
    for pod in pods:
        found += check_grace(pod, needed, run_name)
        found += check_first_process(pod)
        found += check_memory(pod)
        found += check_disk(pod)
        found += check_restarts(pod)
    return in_order(found, around)
