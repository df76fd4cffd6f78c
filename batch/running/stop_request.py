"""The user's stop requests, shared by the signal handler and the batch's runners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopRequest:
    """Number of stop requests so far."""

    count: int = 0

    @property
    def requested(self) -> bool:
        """True after the first request: start nothing more."""
        return self.count > 0

    @property
    def immediate(self) -> bool:
        """True after the second request: end the running work, too."""
        return self.count > 1
