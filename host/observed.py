"""What is watched in a run under a host: its ledger, its dynamic VRAM, and what the environment asks for."""

from __future__ import annotations

import os

from ..metrics import Observe
from .door import Door


def observed(door: Door) -> Observe:
    """For the run of the node that is executed now. Raises ValueError where the environment asks for nonsense."""
    return Observe.asked(os.environ, ledger=door.ledger(), dynamic_bytes=door.dynamic_bytes)
