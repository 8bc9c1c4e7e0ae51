"""Who starts a training again that was interrupted, and who must not."""

from __future__ import annotations

from holdfast._check.finding import ERROR, WARNING, Finding
from holdfast._check.pod import Pod
from holdfast._check.pod_text import Node
from holdfast._leave import statuses

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
        f"      onExitCodes: {{operator: In, values: [{statuses.REQUEUE}, {statuses.TERMINATED}]}}",
        "    - action: FailJob",
        f"      onExitCodes: {{operator: In, values: [{statuses.BAD}, {statuses.PERSON}]}}",
    )
    return Finding("no-failure-policy", WARNING, job.line, text, corrected=corrected)


def _check_rules(rules: Node) -> list[Finding]:
    found = []
    if not any(_is_disruption(each) for each in rules.value if each.plain("action") == "Ignore"):
        text = "a drained or preempted pod counts as a failure: no rule ignores DisruptionTarget."
        found.append(_of_rules(rules, text, (f"- {_IGNORE}", f"  {_DISRUPTED}")))
    for status, who in ((statuses.REQUEUE, "interrupted"), (statuses.TERMINATED, "told to end")):
        if action_of(rules, status) == "FailJob":
            text = f"a training that was {who} leaves with {status}, and that fails the whole Job."
            found.append(_of_rules(rules, text, (f"- {_IGNORE}", _values(status))))
    if action_of(rules, statuses.REQUEUE) == "Count":
        text = f"each interruption that leaves with {statuses.REQUEUE} counts against backoffLimit."
        found.append(_of_rules(rules, text, (f"- {_IGNORE}", _values(statuses.REQUEUE))))
    for status, who in ((statuses.PERSON, "a person has stopped"), (statuses.BAD, "is bad")):
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
