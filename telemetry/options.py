"""Options of the telemetry of a run, set by a caller or by environment variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .phases import QueueItemPhases

TRACE = "WANSTREAM_TRACE"
"""Environment variable: folder in which every run writes a trace for ui.perfetto.dev or chrome://tracing."""

NVTX = "WANSTREAM_NVTX"
"""Environment variable: 1 makes steps, visits, fetches and reads NVTX ranges for NVIDIA's profilers."""


def no_dynamic_bytes() -> int | None:
    """Return None: the host has no dynamic VRAM."""
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class TelemetryOptions:
    """Outputs of a run in addition to its timeline; none by default."""

    trace: Path | None = None
    """Folder that the trace is written to; created if it does not exist."""
    nvtx: bool = False
    """Emit NVTX ranges."""
    ledger: QueueItemPhases | None = None
    """Phases of the queue item: those of the run are added, those before it appear in the timeline of the run."""
    dynamic_bytes: Callable[[], int | None] = no_dynamic_bytes
    """Returns the device bytes that the host's dynamic VRAM currently uses."""

    @classmethod
    def asked(
        cls,
        environment: Mapping[str, str],
        *,
        ledger: QueueItemPhases | None = None,
        dynamic_bytes: Callable[[], int | None] = no_dynamic_bytes,
    ) -> TelemetryOptions:
        """Return the options that `WANSTREAM_TRACE` and `WANSTREAM_NVTX` set in `environment`.

        Raises:
            ValueError: `WANSTREAM_NVTX` is not 0, 1 or empty.
        """
        nvtx = environment.get(NVTX, "") or "0"
        if nvtx not in ("0", "1"):
            raise ValueError(f"{NVTX} is {nvtx!r}: set it to 1 for ranges, or to 0")
        folder = environment.get(TRACE, "")
        return cls(trace=Path(folder) if folder else None, nvtx=nvtx == "1", ledger=ledger, dynamic_bytes=dynamic_bytes)
