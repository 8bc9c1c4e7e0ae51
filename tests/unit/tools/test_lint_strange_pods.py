"""Manifests that nobody means well with, and kinds that Kubernetes does not have by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="pip install 'holdfast[kubernetes]'")

from holdfast._errors import SettingsError
from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.pods import lint_manifest, read_documents

_SHELL = "containers: [{name: t, command: [sh, -c, 'python t.py | tee log']}]"


def _rules(text: str) -> set[str]:
    around = Surroundings(Path("/"), Path("/"))
    return {each.rule for each in lint_manifest("pod.yaml", text, around)}


def _nested(first: str, level: str) -> str:
    """Twenty lines, of which each names the one before nine times."""
    lines = [f"- &a0 {first}"]
    for number in range(20):
        named = ", ".join([f"*a{number}"] * 9)
        lines.append(f"- &a{number + 1} {level.format(named)}")
    return "\n".join(lines)


# Each would be a list of more than 10^19, written out.
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "lines",
    [
        _nested("[x, x, x]", "[{}]"),
        _nested("{x: 1}", "{{<<: [{}]}}"),
        _nested("{x: 1}", "{{? [{}] : 1}}"),
        _nested("{x: [y]}", "{{a: [{}]}}"),
    ],
)
def test_aliases_of_aliases_take_no_time(lines):
    bomb = "\n".join(f"  {each}" for each in lines.splitlines())
    tail = "kind: Pod\nspec: {containers: [{name: t, command: [python, *a20], env: *a20}]}"
    assert "small-shm" in _rules(f"many:\n{bomb}\n{tail}")
    assert _rules(f"kind: Whatever\nmany:\n{bomb}") == {"no-training"}


def test_what_holds_itself_is_two_lines():
    with pytest.raises(SettingsError):
        read_documents("pod.yaml", "&a\nkind: Pod\nspec: *a\n")


def test_merged_mappings_count_after_what_stands_beside_them():
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 0}"
    (root,) = read_documents("pod.yaml", text)
    assert [root.plain("c", name) for name in "xyz"] == [0, 1, 2]


@pytest.mark.parametrize(
    "spec",
    [
        "podFailurePolicy: {rules: 7}",
        "podFailurePolicy: {rules: [7, {action: Ignore, onPodConditions: 5}]}",
        "podFailurePolicy: {rules: [{onExitCodes: {operator: In, values: 7}}]}",
        "podFailurePolicy: []",
    ],
)
@pytest.mark.parametrize(
    "container",
    [
        "{name: [a], command: [python, {a: b}, [c]], env: {a: b}, resources: 7}",
        "{command: [python], env: [1], volumeMounts: [{mountPath: {a: 1}, name: [x]}]}",
        "{command: [python], lifecycle: {preStop: {exec: {command: [sleep]}}}}",
    ],
)
def test_values_of_another_kind_than_expected_break_nothing(spec, container):
    assert "small-shm" in _rules(
        f"kind: Job\nspec:\n  {spec}\n  template:\n    spec:\n      restartPolicy: Never\n"
        f"      terminationGracePeriodSeconds: .nan\n      containers: [5, {container}]\n"
    )


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("PyTorchJob", "pytorchReplicaSpecs: {Worker: ", "}"),
        ("JobSet", "replicatedJobs: [{template: {spec: ", "}}]"),
    ],
)
def test_pods_of_other_kinds_are_looked_at(kind, before, after):
    pod = f"{{template: {{spec: {{{_SHELL}}}}}}}"
    text = f"kind: {kind}\nspec: {{{before}{pod}{after}}}"
    assert "shell-keeps-sigterm" in _rules(text)
    assert not _rules(text) & {"restart-policy", "no-failure-policy"}
