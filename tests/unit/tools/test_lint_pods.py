"""What `holdfast lint` finds in a manifest, and what it leaves alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pip install 'holdfast[kubernetes]'")

from holdfast._errors import HoldfastError, SettingsError
from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.pods import is_manifest, lint_manifest, quantity, read_documents

_EXAMPLES = sorted((Path(__file__).parents[3] / "examples/kubernetes").glob("*.yaml"))
_GOOD = _EXAMPLES[-1].read_text()


def _lint(text: str, **around) -> list:
    return lint_manifest("pod.yaml", text, Surroundings(Path("/"), Path("/"), **around))


def _rules(text: str) -> set[str]:
    return {each.rule for each in _lint(text)}


def _changed(old: str, new: str) -> str:
    assert old in _GOOD, old
    return _GOOD.replace(old, new)


def _with_command(command: str) -> str:
    return _changed(
        "command: [holdfast, run, --, python, train.py, --folder, /runs/first]", command
    )


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.name)
def test_nothing_is_found_in_the_examples(path):
    assert _lint(path.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "rule", "severity"),
    [
        ("terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 60",
         "grace-too-short", "error"),
        ('value: "110"', 'value: "120"', "grace-too-short", "error"),
        ("HOLDFAST_GRACE_SECONDS", "OTHER", "grace-not-told", "hint"),
        ("mountPath: /dev/shm", "mountPath: /scratch", "small-shm", "warning"),
        ("medium: Memory", 'medium: ""', "shm-on-disk", "warning"),
        ("sizeLimit: 16Gi", "sizeLimit: 64Gi", "shm-over-the-limit", "error"),
        ("memory: 64Gi", "ephemeral-storage: 64Gi", "no-memory-limit", "hint"),
        ("persistentVolumeClaim:\n            claimName: runs", "emptyDir: {}",
         "no-lasting-volume", "warning"),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "restart-policy", "error"),
        ("restartPolicy: Never", "enableServiceLinks: false", "restart-policy", "error"),
        ("kind: Job", "kind: Deployment", "restart-policy", "warning"),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_nothing_else(old, new, rule, severity):
    found = _lint(_changed(old, new))
    assert {(each.rule, each.severity) for each in found} == {(rule, severity)}
    lines = _changed(old, new).splitlines()
    assert all(0 < each.line <= len(lines) for each in found)


@pytest.mark.parametrize(
    ("script", "severity"),
    [
        ("python train.py", "hint"),
        ("cd /work && python train.py", "error"),
        ("pip install -e . ; python train.py", "error"),
        ("python train.py | tee log", "error"),
        ("python train.py & wait", "error"),
        ("exec python train.py", None),
        ("cd /work && exec holdfast run -- python train.py", None),
        ("trap 'kill $!' TERM; python train.py & wait", None),
        ("echo ${x?", None),
    ],
)
def test_a_shell_in_front_keeps_sigterm_unless_it_gives_way(script, severity):
    found = _lint(_with_command(f"command: [/bin/sh, -ec, {script!r}]"))
    shells = [each for each in found if each.rule == "shell-keeps-sigterm"]
    assert [each.severity for each in shells] == ([] if severity is None else [severity])
    if severity is not None:
        assert shells[0].corrected[0].startswith("exec ")


def test_an_init_in_front_of_the_shell_does_not_mend_it():
    command = "command: [tini, -g, --, bash, -c, 'cd /work && python train.py']"
    assert _rules(_with_command(command)) == {"shell-keeps-sigterm"}


def test_the_default_of_half_a_minute_is_known():
    text = _changed("      terminationGracePeriodSeconds: 120\n", "")
    assert _rules(text) == {"grace-too-short"}


def test_a_bare_pod_is_started_again_by_nobody():
    text = textwrap.dedent(
        """
        apiVersion: v1
        kind: Pod
        metadata: {name: a}
        spec:
          containers: [{name: a, image: b, command: [python, train.py]}]
        """
    )
    messages = [each.message for each in _lint(text) if each.rule == "restart-policy"]
    assert len(messages) == 2


def test_a_job_without_a_policy_is_shown_one():
    start = _GOOD.index("  podFailurePolicy:")
    end = _GOOD.index("  template:\n    spec:\n      restartPolicy")
    (found,) = _lint(_GOOD[:start] + _GOOD[end:])
    assert found.rule == "no-failure-policy"
    shown = yaml.safe_load("\n".join(found.corrected))
    assert [rule["action"] for rule in shown["podFailurePolicy"]["rules"]] == [
        *("Ignore", "Ignore", "FailJob")
    ]


def test_what_does_not_train_is_left_alone():
    assert _rules(_with_command("command: [nginx]")) == {"no-training"}


def test_the_measured_save_of_a_run_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast._tools.lint.finding.save_seconds", lambda _: 200.0)
    monkeypatch.setattr("holdfast._tools.lint.finding.step_seconds", lambda _: 5.0)
    (found,) = _lint(_GOOD, run=tmp_path / "first")
    assert found.rule == "grace-too-short"
    assert "205 s in first" in found.message


@pytest.mark.parametrize("text", ["a: [", "{{ .Values.x }}: 1\nb", "\t"])
def test_what_is_no_manifest_is_two_lines(text):
    with pytest.raises(SettingsError) as caught:
        read_documents("pod.yaml", text)
    assert str(caught.value).count("\n") == 1


def test_the_lack_of_pyyaml_is_two_lines(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(HoldfastError, match=r"pip install 'PyYAML>=5\.4'"):
        read_documents("pod.yaml", "")


@pytest.mark.parametrize(
    "text", ["[]", "x", "kind: Job", "kind: Job\nspec: 3", "---\n---\n", "- 1"]
)
def test_odd_documents_are_passed_over(text):
    assert _rules(text) == {"no-training"}


def test_a_script_is_no_manifest():
    assert not is_manifest("job.sbatch", "#!/bin/sh\n#SBATCH -n 1\n")
    assert is_manifest("-", _GOOD)


def test_quantities():
    assert quantity("16Gi") == 16 * 2**30
    assert quantity("1.5.5") is None


@pytest.mark.layer("docs")
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.29", "1.31", "latest"])
def test_the_examples_fit_the_published_schema(path, version):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    if version == "latest":
        version = validate.latest_version()
    for document in yaml.safe_load_all(path.read_text()):
        validate.validate(document, version, strict=True)
