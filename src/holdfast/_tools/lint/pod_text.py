"""A Kubernetes manifest as a tree with line numbers; the only file that imports PyYAML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast._errors import HoldfastError, SettingsError, install_command

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class ManifestNode:
    """A value of a manifest: a mapping of nodes, a list of nodes, or a scalar."""

    value: Any
    line: int

    def get(self, *path: str) -> ManifestNode | None:
        """The node below, by its path."""
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
    """Whether a file is for Kubernetes and not for a shell."""
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
        raise HoldfastError(
            f"{name}: PyYAML reads manifests, and is not installed.\n"
            f"Install it: {install_command('kubernetes')}"
        ) from error
    try:
        return list(_documents(yaml, text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        what = getattr(error, "problem", None) or "not understood"
        raise SettingsError(
            f"{name}{where}: is no YAML ({what}).\n"
            "Of a template lint what it makes: helm template … | holdfast lint -"
        ) from error


def _documents(yaml: Any, text: str) -> Iterator[ManifestNode]:
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_node():
            root = loader.get_node()
            if root is not None:
                yield from _flat(_Tree(yaml, loader).node(root))
    finally:
        loader.dispose()


def _flat(root: ManifestNode) -> Iterator[ManifestNode]:
    """Without the list around the items of `kubectl get -o yaml`."""
    if root.plain("kind") == "List":
        yield from root.items("items")
    else:
        yield root


class _Tree:
    """Converts PyYAML's nodes. An alias is converted once: a few lines may name billions."""

    def __init__(self, yaml: Any, loader: Any) -> None:
        self._yaml = yaml
        self._loader = loader
        self._made: dict[int, ManifestNode] = {}

    def node(self, found: Any) -> ManifestNode:
        made = self._made.get(id(found))
        if made is None:
            made = self._made[id(found)] = ManifestNode(
                self._value(found), found.start_mark.line + 1
            )
        return made

    def _value(self, found: Any) -> Any:
        if isinstance(found, self._yaml.MappingNode):
            return self._mapping(found)
        if isinstance(found, self._yaml.SequenceNode):
            return [self.node(each) for each in found.value]
        return self._loader.construct_object(found)

    def _mapping(self, found: Any) -> dict[str, ManifestNode]:
        own: dict[str, ManifestNode] = {}
        merged: dict[str, ManifestNode] = {}
        for key, value in found.value:
            if not isinstance(key, self._yaml.ScalarNode):
                continue  # no key of Kubernetes is a list
            if key.tag == _MERGE:  # <<: keys of this mapping override merged ones
                for each in _sources(self.node(value)):
                    merged = {**each, **merged}
            else:
                own[str(key.value)] = self.node(value)
        return {**merged, **own}


def _sources(node: ManifestNode) -> list[dict[str, ManifestNode]]:
    """The merged mappings, by precedence."""
    found = node.value if isinstance(node.value, list) else [node]
    return [each.value for each in found if isinstance(each.value, dict)]
