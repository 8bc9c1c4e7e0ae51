"""Kubernetes manifests: the pods that train, and what loses their training.

A manifest is a tree with line numbers. The rules: grace, memory, disk, first process, restarts.
Only this file imports PyYAML.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, SettingsError, not_installed
from holdfast._tools.lint.finding import LintFinding, Surroundings, in_order
from holdfast._tools.lint.launch import SHELLS, shell_input
from holdfast._tools.lint.shell import NotUnderstood, parse_commands

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class ManifestNode:
    """A value of a manifest: a mapping of nodes, a list of nodes, or a scalar."""

    value: Any
    line: int

    def get(self, *path: str) -> ManifestNode | None:
        found: ManifestNode | None = self
        for name in path:
            if found is None or not isinstance(found.value, dict):
                return None
            found = found.value.get(name)
        return found

    def plain(self, *path: str) -> Any:
        """The scalar below; None if there is none."""
        found = self.get(*path)
        return None if found is None or isinstance(found.value, dict | list) else found.value

    def items(self, *path: str) -> list[ManifestNode]:
        """The list below; empty if there is none."""
        found = self.get(*path)
        return found.value if found is not None and isinstance(found.value, list) else []


def is_manifest(name: str, text: str) -> bool:
    if name.endswith((".yaml", ".yml")):
        return True
    lines = text.splitlines()[:200]
    return any(each.startswith("apiVersion:") for each in lines) and any(
        each.startswith("kind:") for each in lines
    )


def read_documents(name: str, text: str) -> list[ManifestNode]:
    """The documents of a manifest; SettingsError if it is none."""
    try:
        import yaml
    except ImportError as error:
        what = f"{name}: reading a manifest"
        raise HoldfastError(not_installed(what, "PyYAML", "kubernetes")) from error
    try:
        return list(_documents(yaml, text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        what = getattr(error, "problem", None) or "not understood"
        raise SettingsError(
            f"{name}{where}: is not YAML ({what}).\n"
            "Of a template lint what it makes: helm template … | holdfast lint -"
        ) from error


def _documents(yaml: Any, text: str) -> Iterator[ManifestNode]:
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_node():
            document = loader.get_node()
            if document is not None:
                root = _convert(loader, document, {})
                # `kubectl get -o yaml` puts a list around them.
                yield from root.items("items") if root.plain("kind") == "List" else [root]
    finally:
        loader.dispose()


def _convert(loader: Any, found: Any, made: dict[int, ManifestNode]) -> ManifestNode:
    """A node of PyYAML. An alias is converted once: a few lines may name billions."""
    if id(found) in made:
        return made[id(found)]
    value: Any
    if found.id == "sequence":
        value = [_convert(loader, each, made) for each in found.value]
    elif found.id == "mapping":
        own: dict[str, ManifestNode] = {}
        merged: dict[str, ManifestNode] = {}
        for key, below in found.value:
            if key.id != "scalar":
                continue  # no key of Kubernetes is a list
            node = _convert(loader, below, made)
            if key.tag != _MERGE:
                own[str(key.value)] = node
                continue
            # <<: keys of this mapping override merged ones
            for each in node.value if isinstance(node.value, list) else [node]:
                merged = {**each.value, **merged} if isinstance(each.value, dict) else merged
        value = {**merged, **own}
    else:
        value = loader.construct_object(found)
    made[id(found)] = ManifestNode(value, found.start_mark.line + 1)
    return made[id(found)]


# -- The pods that train ---------------------------------------------------------------------------
_DEFAULT_GRACE_SECONDS = 30.0
_JOBS = {"Job": ("spec",), "CronJob": ("spec", "jobTemplate", "spec")}
_FOREVER = ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet")
# The built-in kinds of Kubernetes, and where the template of their pods is.
_TEMPLATES = {
    "Pod": (),
    **dict.fromkeys(_FOREVER, ("spec", "template")),
    **{kind: (*path, "template") for kind, path in _JOBS.items()},
}
_LASTING = (
    *("persistentVolumeClaim", "nfs", "hostPath", "csi", "cephfs", "glusterfs", "iscsi", "fc"),
    *("azureFile", "azureDisk", "awsElasticBlockStore", "gcePersistentDisk", "ephemeral"),
)
_UNITS = {"": 1.0, "m": 0.001, **{unit: 1000.0**n for n, unit in enumerate("kMGTP", 1)}}
_UNITS |= {f"{unit}i": 1024.0**n for n, unit in enumerate("KMGTP", 1)}
_TRAINS = re.compile(
    r"(?:^|[\s/'\"])(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|holdfast|lightning)"
    r"(?=[\s'\"]|$)"
)


@dataclass
class Container:
    node: ManifestNode
    volumes: dict[str, ManifestNode] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.node.plain("name") or "container")

    @property
    def words(self) -> list[str]:
        """The command by the manifest; the image may have another one."""
        found = [*self.node.items("command"), *self.node.items("args")]
        return [str(each.value) for each in found if not isinstance(each.value, dict | list)]

    @property
    def line(self) -> int:
        found = self.node.get("command") or self.node.get("args") or self.node
        return found.line

    def env(self, name: str) -> ManifestNode | None:
        found = (each for each in self.node.items("env") if each.plain("name") == name)
        return next(found, None)

    def mounted(self, path: str) -> ManifestNode | None:
        for mount in self.node.items("volumeMounts"):
            if str(mount.plain("mountPath") or "").rstrip("/") == path:
                return self.volumes.get(str(mount.plain("name")))
        return None


@dataclass
class Pod:
    kind: str
    root: ManifestNode
    spec: ManifestNode
    containers: list[Container]

    @property
    def grace_seconds(self) -> float:
        told = self.spec.plain("terminationGracePeriodSeconds")
        is_number = isinstance(told, int | float) and not isinstance(told, bool)
        return float(told) if is_number else _DEFAULT_GRACE_SECONDS

    def line_of(self, *path: str) -> int:
        """The line of an entry, or where it would be."""
        found = self.spec.get(*path)
        return self.spec.line if found is None else found.line


def find_pods(documents: list[ManifestNode]) -> Iterator[Pod]:
    """The pods with containers that train, by their commands."""
    for root in documents:
        kind = str(root.plain("kind") or "")
        known = root.get(*_TEMPLATES[kind], "spec") if kind in _TEMPLATES else None
        for spec in [known] if kind in _TEMPLATES else _templates(root, set()):
            if spec is not None:
                volumes = {str(each.plain("name")): each for each in spec.items("volumes")}
                found = [Container(each, volumes) for each in spec.items("containers")]
                if trains := [each for each in found if _may_train(each)]:
                    yield Pod(kind, root, spec, trains)


def _templates(node: ManifestNode, seen: set[int]) -> Iterator[ManifestNode]:
    """The pods in a custom resource: a PyTorchJob, a JobSet."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node.value, list):
        for each in node.value:
            yield from _templates(each, seen)
    elif isinstance(node.value, dict):
        spec = node.get("template", "spec")
        if spec is not None and spec.items("containers") and id(spec) not in seen:
            seen.add(id(spec))
            yield spec
        for each in node.value.values():
            yield from _templates(each, seen)


def _may_train(container: Container) -> bool:
    """By its command; without one in the manifest, if it gets a GPU."""
    if container.words:
        return _TRAINS.search(" ".join(container.words)) is not None
    limits = container.node.get("resources", "limits")
    names = limits.value if limits is not None and isinstance(limits.value, dict) else {}
    return any("gpu" in name for name in names)


def quantity(value: object) -> float | None:
    """Bytes in a quantity such as "16Gi".

    >>> quantity("1.5Gi"), quantity("64M"), quantity("much")
    (1610612736.0, 64000000.0, None)
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(value if value is not None else ""))
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        return None
    return float(match[1]) * _UNITS[match[2]]


# The rules.
_SHELLS = SHELLS | {"ash"}
_INITS = ("tini", "dumb-init", "catatonit")
_COUNTED_ON_SECONDS = 10.0  # after SIGTERM, if no variable says otherwise
_MARGIN_SECONDS = 5.0
_GRACE = "terminationGracePeriodSeconds"
_GRACE_VARIABLE = "HOLDFAST_GRACE_SECONDS"


def lint_manifest(name: str, text: str, around: Surroundings) -> list[LintFinding]:
    found: list[LintFinding] = []
    pods = list(find_pods(read_documents(name, text)))
    if not pods:
        # Without this, "no problem found" would be said of a manifest that was not checked.
        text = "no container in it trains, as far as its commands show: there is nothing to check."
        found.append(_finding("no-training", "hint", 1, text))
    rules = (_check_expected_grace, _check_first_process, _check_memory, _check_disk)
    for pod in pods:
        found += _check_grace(pod, around)
        found += [each for c in pod.containers for rule in rules for each in rule(pod, c)]
        found += _check_restarts(pod)
    return in_order(found, around)


def _finding(
    rule: str, severity: str, line: int, text: str, *corrected: str, source: str = ""
) -> LintFinding:
    return LintFinding(rule, severity, line, text, source, corrected)


def _check_grace(pod: Pod, around: Surroundings) -> Iterator[LintFinding]:
    """Is there time to finish a step and save it after SIGTERM?"""
    grace, told = pod.grace_seconds, pod.spec.get(_GRACE)
    measured = around.needed_seconds
    if measured is not None and grace < (needed := measured + _MARGIN_SECONDS):
        killed = f"{grace:g} s after SIGTERM the pod is killed{'' if told else ' (the default)'}"
        text = f"{killed}, and a step with its save takes {measured:.0f} s in {around.run_name}."
        source = "" if told is None else f"{_GRACE}: {grace:g}"
        right = f"{_GRACE}: {2 * needed + 30:.0f}"
        yield _finding("grace-too-short", "error", pod.line_of(_GRACE), text, right, source=source)


def _check_expected_grace(pod: Pod, container: Container) -> Iterator[LintFinding]:
    grace, entry = pod.grace_seconds, container.env(_GRACE_VARIABLE)
    fit = f'value: "{max(1.0, grace - 10):g}"'
    if entry is None and grace <= _COUNTED_ON_SECONDS:
        text = f"holdfast counts on 10 s after SIGTERM, and the pod is killed after {grace:g} s."
        yield _finding("grace-too-short", "error", pod.line_of(_GRACE), text, f"{_GRACE}: 120")
    elif entry is None:
        text = (
            f"{container.name}: holdfast counts on 10 s after SIGTERM, and there are {grace:g} s."
        )
        right = f"- {{name: {_GRACE_VARIABLE}, {fit}}}"
        yield _finding("grace-not-told", "hint", container.line, text, right)
    else:
        try:
            seconds = float(str(entry.plain("value")).removesuffix("s"))
        except ValueError:
            return
        if seconds >= grace:
            killed = f"the pod is killed after {grace:g} s"
            text = f"holdfast counts on {seconds:g} s after SIGTERM, and {killed}."
            source = f'{_GRACE_VARIABLE} = "{seconds:g}"'
            yield _finding("grace-too-short", "error", entry.line, text, fit, source=source)


def _check_memory(_: Pod, container: Container) -> Iterator[LintFinding]:
    """Is there room in /dev/shm for snapshots and loaders, and does it fit into the limit?"""
    name, line = container.name, container.line
    shm = container.mounted("/dev/shm")
    limit = quantity(container.node.plain("resources", "limits", "memory"))
    volume = None if shm is None else shm.get("emptyDir")
    if shm is None:
        text = f"{name}: /dev/shm has 64 MB: too little for snapshots and for loaders with workers."
        right = "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}]"
        mount = "volumeMounts: [{name: shm, mountPath: /dev/shm}]"
        yield _finding("small-shm", "warning", line, text, right, mount)
    elif volume is not None and volume.plain("medium") != "Memory":
        text = f"{name}: /dev/shm is on the node's disk: snapshots are as slow as that."
        yield _finding("shm-on-disk", "warning", volume.line, text, "medium: Memory")
    elif volume is not None:
        size = volume.plain("sizeLimit")
        wanted = quantity(size)
        if wanted is not None and limit is not None and wanted >= limit:
            text = f"{name}: /dev/shm may take {size}, as much as the memory limit: an OOM kill."
            yield _finding("shm-over-the-limit", "error", volume.line, text)
    if limit is None:
        text = f"{name}: has no memory limit: a full node kills a process without a warning."
        yield _finding("no-memory-limit", "hint", line, text, "resources: {limits: {memory: 64Gi}}")


def _check_disk(pod: Pod, container: Container) -> Iterator[LintFinding]:
    """Does the run folder outlive the pod? An address may be that of a mirror."""
    mounted = [str(each.plain("name")) for each in container.node.items("volumeMounts")]
    volumes = [container.volumes[name] for name in mounted if name in container.volumes]
    is_lasting = any(each.get(kind) is not None for each in volumes for kind in _LASTING)
    values = [str(each.plain("value") or "") for each in container.node.items("env")]
    has_address = any("://" in each for each in (*container.words, *values))
    if is_lasting or has_address or pod.kind == "StatefulSet":
        return
    text = f"{container.name}: nothing that it writes outlives the pod: the next one starts over."
    right = "volumes: [{name: runs, persistentVolumeClaim: {claimName: runs}}]"
    yield _finding("no-lasting-volume", "warning", container.line, text, right)


def _check_first_process(_: Pod, container: Container) -> Iterator[LintFinding]:
    """Does SIGTERM reach the training, or does a shell in front keep it?"""
    words = container.words
    while words and words[0].rpartition("/")[2] in _INITS:
        words = words[1:]
        while words and words[0].startswith("-"):
            words = words[1:]
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return
    kind, at = shell_input(words) or ("", 0)
    if kind != "text":
        return
    try:
        commands = parse_commands(words[at])
    except NotUnderstood:
        return
    trains = [each for each in commands if each.words and _TRAINS.match(each.text)]
    if not trains or any(each.text == "trap" for each in commands):
        return
    last = trains[-1]
    shell = words[0].rpartition("/")[2]
    who = f"{container.name}: {shell} is process 1 and does not pass SIGTERM on to"
    written = words[at][last.start : last.end]
    severity, right = "error", f"exec {written}"
    if last.is_piped or last.is_background or last.within:
        how = "a pipe" if last.is_piped else "the background" if last.is_background else "a group"
        text = f"{who} what runs in {how}: the pod is killed at the end of its grace."
        right = f"exec holdfast run -- {shlex.join(word.text for word in last.words)}"
    elif len(commands) > 1:
        text = f"{who} the training: the pod is killed at the end of its grace."
    else:
        severity = "hint"
        text = f"{container.name}: some shells wait for their only command, and keep SIGTERM."
    rule = "shell-keeps-sigterm"
    yield _finding(rule, severity, container.line, text, right, source=written)


# -- Who starts an interrupted training again, and who must not ------------------------------------


def _check_restarts(pod: Pod) -> Iterator[LintFinding]:
    if pod.kind not in _TEMPLATES:
        return  # the controller of a PyTorchJob decides about its pods
    rule, line = "restart-policy", pod.line_of("restartPolicy")
    policy = str(pod.spec.plain("restartPolicy") or "Always")
    job = pod.root.get(*_JOBS[pod.kind]) if pod.kind in _JOBS else None
    if pod.kind in _FOREVER:
        text = (
            f"a {pod.kind} starts its pods again for ever: also one that is done, stopped or bad."
        )
        yield _finding(rule, "warning", pod.root.line, text, "kind: Job")
    elif job is None:
        text = "no other pod is made when this one's node is drained, preempted or gone."
        yield _finding(rule, "warning", pod.root.line, text, "kind: Job")
        if policy == "Always":
            text = "Always starts a training again that is done (0) or that a person has stopped."
            yield _finding(rule, "warning", line, text, "restartPolicy: OnFailure")
    elif policy == "Always":
        text = "a Job takes restartPolicy Never or OnFailure only, and Always is the default."
        yield _finding(rule, "error", line, text, "restartPolicy: Never")
    else:
        rules = job.get("podFailurePolicy", "rules")
        if rules is None or not isinstance(rules.value, list):
            yield _no_policy(job, policy)
        elif policy != "Never":
            text = "a podFailurePolicy is allowed with restartPolicy Never only."
            yield _finding(rule, "error", line, text, "restartPolicy: Never")


def _no_policy(job: ManifestNode, policy: str) -> LintFinding:
    limit = job.plain("backoffLimit")
    shown = "6 (the default)" if limit is None else limit
    text = (
        f"without a podFailurePolicy every interruption counts as a failure: after {shown} the Job "
        "fails, and a training that a person has stopped starts again."
    )
    if policy == "OnFailure":
        text += " It needs restartPolicy Never."
    again = ", ".join(map(str, (*_errors.RESTARTED, _errors.TERMINATED)))
    corrected = (
        "podFailurePolicy:",
        "  rules:",
        "    - action: Ignore",
        "      onPodConditions: [{type: DisruptionTarget, status: 'True'}]",
        "    - action: Ignore",
        f"      onExitCodes: {{operator: In, values: [{again}]}}",
        "    - action: FailJob",
        f"      onExitCodes: {{operator: In, values: [{_errors.BAD}, {_errors.PERSON}]}}",
    )
    return _finding("no-failure-policy", "warning", job.line, text, *corrected)
