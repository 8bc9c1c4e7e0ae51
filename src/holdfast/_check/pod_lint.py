"""All rules over one manifest of Kubernetes."""

from __future__ import annotations

from holdfast._check.finding import HINT, Finding
from holdfast._check.lint import Surroundings, in_order
from holdfast._check.measured import save_seconds, step_seconds
from holdfast._check.pod import find_pods
from holdfast._check.pod_text import read_documents
from holdfast._check.rules_pod import check_disk, check_first_process, check_grace, check_memory
from holdfast._check.rules_pod_restart import check_restarts


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
