"""Findings of a self-test, its verdict, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...bench import Table

Outcome = Literal["passed", "limited", "failed", "not run", "not needed"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    outcome: Outcome
    """`limited`: works, but slower than it could. `not run`: could not be checked. `not needed`: does not apply."""
    words: str
    """Result for a reader, with its figures; one line."""
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same figures for programs."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Conclusion from all findings."""

    words: str
    works: bool
    """False if a check failed or could not be run."""


def verdict(findings: Mapping[str, Finding]) -> Verdict:
    """Return the verdict on a device; `findings` by the name of their check."""
    failed, missing, limited = (_named(findings, outcome) for outcome in ("failed", "not run", "limited"))
    if failed:
        return Verdict(words=f"FAILED: {failed}. Videos may be wrong, or runs may end, on this device.", works=False)
    if missing:
        return Verdict(words=f"INCOMPLETE: {missing} could not be checked. All other checks passed.", works=False)
    if limited:
        return Verdict(words=f"WORKS, slower than it could: {limited}.", works=True)
    return Verdict(words="WORKS: every check passed.", works=True)


def findings_table(findings: Mapping[str, Finding]) -> str:
    """Return one line for each check, then the remedies."""
    rows = tuple((check, finding.outcome, finding.words) for check, finding in findings.items())
    remedies = [f"{check}: {finding.remedy}" for check, finding in findings.items() if finding.remedy]
    return "\n".join([Table(head=("check", "outcome", "found"), rows=rows).text(), *remedies])


def _named(findings: Mapping[str, Finding], outcome: Outcome) -> str:
    names: Sequence[str] = [check for check, finding in findings.items() if finding.outcome == outcome]
    return ", ".join(names)
