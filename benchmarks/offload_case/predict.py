"""WanStream's own prediction of a run, from the machine as it was measured before."""

from __future__ import annotations

from pathlib import Path

from wanstream.plan import Timeline
from wanstream.wan import ExpertEngine

from .shapes import CaseShape
from .variants import Variant


def predicted_timeline(machine: Path, engine: ExpertEngine, way: Variant, case: CaseShape) -> Timeline:
    """Simulate the programs that `engine` would run for the case under the variant's policy."""
    raise NotImplementedError
