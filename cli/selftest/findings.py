"""Self-test findings, their verdict, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...bench import Table

Outcome = Literal["passed", "limited", "failed", "not run", "not needed"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    outcome: Outcome
    """`limited`: works, but slower than it could. `not run`: could not be checked. `not needed`:
    does not apply."""
    words: str
    """Result for a reader, with figures, in one line."""
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same figures for programs."""

    @classmethod
    def passed(cls, words: str, **figures: Any) -> Finding:
        return cls(outcome="passed", words=words, figures=figures)

    @classmethod
    def failed(cls, words: str, **figures: Any) -> Finding:
        return cls(outcome="failed", words=words, figures=figures)


def verdict(findings: Mapping[str, Finding]) -> tuple[bool, str]:
    """Return True if a device works, and the verdict in words. `findings` are by check.

    A device does not work if a check failed or could not be run.
    """
    failed, missing, limited = (
        _named(findings, outcome) for outcome in ("failed", "not run", "limited")
    )
    if failed:
        return False, f"FAILED: {failed}. Videos may be wrong, or runs may end, on this device."
    if missing:
        return False, f"INCOMPLETE: {missing} could not be checked. All other checks passed."
    if limited:
        return True, f"WORKS, slower than it could: {limited}."
    return True, "WORKS: every check passed."


def findings_table(findings: Mapping[str, Finding]) -> str:
    """Return one line for each check, then the remedies."""
    rows = tuple((check, finding.outcome, finding.words) for check, finding in findings.items())
    remedies = [
        f"{check}: {finding.remedy}" for check, finding in findings.items() if finding.remedy
    ]
    return "\n".join([Table(head=("check", "outcome", "found"), rows=rows).text(), *remedies])


def _named(findings: Mapping[str, Finding], outcome: Outcome) -> str:
    return ", ".join(check for check, finding in findings.items() if finding.outcome == outcome)
