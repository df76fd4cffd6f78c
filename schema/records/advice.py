"""Advice on the policy of a run that has ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Policy predicted to be the fastest for a run with another one."""

    policy: str
    """Policy on the device and in RAM, in words."""
    gain: float
    """Simulated seconds of the run, divided by its simulated seconds with this policy."""
