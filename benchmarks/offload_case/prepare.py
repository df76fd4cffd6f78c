"""Writes all files of a case before anything is timed: the experts, and what peers write for themselves."""

from __future__ import annotations

from pathlib import Path

from .session import Session, Settings
from .variants import DISK_PEERS


def prepare(work: Path, shape: str) -> None:
    """About 23 GB for the case `cpu`; what is there already stays."""
    session = Session(work / "sessions" / "prepare.jsonl", Settings(shape=shape, work=work.resolve()))
    session.write_experts()
    for peer in DISK_PEERS:
        session.prepare(peer.name)
