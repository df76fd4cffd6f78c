"""What is watched in a run beside its steps: requested for by a caller, or by the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .phases import QueueItemPhases

TRACE = "WANSTREAM_TRACE"
"""A folder: every run leaves a trace there that ui.perfetto.dev and chrome://tracing open."""

NVTX = "WANSTREAM_NVTX"
"""1: visits, fetches and reads are ranges for NVIDIA's profilers."""


def no_dynamic_bytes() -> int | None:
    """There is no dynamic VRAM."""
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class TelemetryOptions:
    """What a run tells beside its timeline. By default nothing."""

    trace: Path | None = None
    """A folder that the trace is written to; made where it is not there."""
    nvtx: bool = False
    ledger: QueueItemPhases | None = None
    """Gets the phases of the run, and gives those that came before it."""
    dynamic_bytes: Callable[[], int | None] = no_dynamic_bytes
    """Bytes of the device that the host's dynamic VRAM holds now."""

    @classmethod
    def asked(
        cls,
        environment: Mapping[str, str],
        *,
        ledger: QueueItemPhases | None = None,
        dynamic_bytes: Callable[[], int | None] = no_dynamic_bytes,
    ) -> TelemetryOptions:
        """What `WANSTREAM_TRACE` and `WANSTREAM_NVTX` ask for. Raises ValueError unless the latter is 0, 1 or empty."""
        nvtx = environment.get(NVTX, "") or "0"
        if nvtx not in ("0", "1"):
            raise ValueError(f"{NVTX} is {nvtx!r}: set it to 1 for ranges, or to 0")
        folder = environment.get(TRACE, "")
        return cls(trace=Path(folder) if folder else None, nvtx=nvtx == "1", ledger=ledger, dynamic_bytes=dynamic_bytes)
