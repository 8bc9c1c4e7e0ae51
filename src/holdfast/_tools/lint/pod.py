"""The pods of a manifest, and what in them concerns a training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast._tools.lint.pod_text import ManifestNode

DEFAULT_GRACE_SECONDS = 30.0
_TEMPLATES = {
    "Pod": (),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "Deployment": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
}
_JOBS = {"Job": ("spec",), "CronJob": ("spec", "jobTemplate", "spec")}
_LASTING = (
    *("persistentVolumeClaim", "nfs", "hostPath", "csi", "cephfs", "glusterfs", "iscsi", "fc"),
    *("azureFile", "azureDisk", "awsElasticBlockStore", "gcePersistentDisk", "ephemeral"),
)
_UNITS: dict[str, float] = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "m": 0.001}
TRAINS = re.compile(
    r"(?:^|[\s/'\"])(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|holdfast|lightning)"
    r"(?=[\s'\"]|$)"
)


@dataclass
class Container:
    """One container that may train."""

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
        """The entry of a variable."""
        found = (each for each in self.node.items("env") if each.plain("name") == name)
        return next(found, None)

    def memory_limit(self) -> float | None:
        return quantity(self.node.plain("resources", "limits", "memory"))

    def mounted(self, path: str) -> ManifestNode | None:
        """The volume at a path of the container."""
        for mount in self.node.items("volumeMounts"):
            if str(mount.plain("mountPath") or "").rstrip("/") == path:
                return self.volumes.get(str(mount.plain("name")))
        return None

    def has_lasting_volume(self) -> bool:
        """Whether anything that it writes outlives the pod."""
        names = [str(each.plain("name")) for each in self.node.items("volumeMounts")]
        found = [self.volumes[name] for name in names if name in self.volumes]
        return any(each.get(kind) is not None for each in found for kind in _LASTING)

    def text(self) -> str:
        values = [str(each.plain("value") or "") for each in self.node.items("env")]
        return "\n".join([*self.words, *values])


@dataclass
class Pod:
    """One kind of pod, and what makes it."""

    kind: str
    root: ManifestNode
    spec: ManifestNode
    containers: list[Container]

    @property
    def is_known(self) -> bool:
        """Whether it is a built-in kind of Kubernetes."""
        return self.kind in _TEMPLATES

    @property
    def job(self) -> ManifestNode | None:
        """The spec of the Job around it."""
        return self.root.get(*_JOBS[self.kind]) if self.kind in _JOBS else None

    @property
    def grace_seconds(self) -> float:
        told = self.spec.plain("terminationGracePeriodSeconds")
        is_number = isinstance(told, int | float) and not isinstance(told, bool)
        return float(told) if is_number else DEFAULT_GRACE_SECONDS

    def line_of(self, *path: str) -> int:
        """The line of an entry, or where it would be."""
        found = self.spec.get(*path)
        return self.spec.line if found is None else found.line


def find_pods(documents: list[ManifestNode]) -> Iterator[Pod]:
    """The pods with containers that train, by their commands."""
    for root in documents:
        kind = str(root.plain("kind") or "")
        if kind in _TEMPLATES:
            spec = root.get(*_TEMPLATES[kind], "spec")
            specs = [] if spec is None else [spec]
        else:
            specs = list(_templates(root, set()))
        for spec in specs:
            volumes = {str(each.plain("name")): each for each in spec.items("volumes")}
            found = [Container(each, volumes) for each in spec.items("containers")]
            trains = [each for each in found if _may_train(each)]
            if trains:
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
        return TRAINS.search(" ".join(container.words)) is not None
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
