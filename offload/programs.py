"""The two programs of one run: how blocks come over the bus, and how they come into RAM before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import BlockKey, RamHomes, Residency, RunPrograms, Visit, compile_program, compile_ram


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where blocks may lie under one policy, and what lies there: buffers and slots, each by number."""

    residency: Residency
    buffers: int
    homes: RamHomes
    staging: int
    in_buffers: Mapping[int, BlockKey]
    in_slots: Mapping[int, BlockKey]


def compile_run(visits: Sequence[Visit], places: Places) -> RunPrograms:
    """The programs for `visits`. Raises ProgramError when there are too few buffers."""
    device = compile_program(visits, places.residency, places.buffers, contents=places.in_buffers)
    ram = compile_ram(device, places.homes, staging=places.staging, contents=places.in_slots)
    return RunPrograms(device=device, ram=ram)
