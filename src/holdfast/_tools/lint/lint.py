"""All rules over one script, and the corrected script."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from holdfast._tools.lint import finding
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.rules_batch import check_batch, check_understood
from holdfast._tools.lint.rules_launch import check_launches
from holdfast._tools.lint.rules_options import check_options

_TEMPLATE = re.compile(r"^[ \t]*(?:\{%.*|\{\{.*\}\}[ \t]*)$", re.MULTILINE)  # whole lines
_ROUNDS = 10  # an edit may uncover the next finding


def lint(text: str, around: finding.Surroundings) -> list[finding.LintFinding]:
    plain = text.replace("\r\n", "\n")
    job = BatchScript(plain, around)
    rules = (check_options, check_launches, check_batch, check_understood)
    found = [each for rule in rules for each in rule(job)]
    if template := _TEMPLATE.search(plain):
        # Its final text is not known.
        found = [job.not_understood(template.start(), "this is a template, not yet a script.")]
    return finding.in_order(found, around)


def fix(text: str, around: finding.Surroundings) -> str:
    """The script with every error and warning corrected for which an edit is known."""
    if "\r\n" in text:
        return text  # sbatch refuses it, and offsets assume lines that end with LF
    for _ in range(_ROUNDS):
        found = lint(text, around)
        changed = finding.apply_edits(text, *(each.edits for each in found if each.is_fixable))
        if changed == text:
            break
        text = changed
    return text


def missing_folders(
    findings: Collection[finding.LintFinding], around: finding.Surroundings
) -> list[Path]:
    """The folders that the log needs, relative to where the script is submitted."""
    named = [Path(each.folder) for each in findings if each.folder is not None]
    return list(dict.fromkeys(around.cwd / folder for folder in named))
