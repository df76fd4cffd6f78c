"""Native models streamed from a file, with limits on the smallest ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanstream.host import ModelStreaming, ShareVisits, current_host
from wanstream.host.comfy.native import load


def load_native(
    path: Path,
    weight_dtype: str,
    policy: Any,
    *,
    share_visits: ShareVisits = ShareVisits.AUTO,
    **limits: int,
) -> Any:
    """Return a MODEL whose blocks stream. See `load.load_native` and `ModelStreaming`."""
    streaming = ModelStreaming(policy=policy, share_visits=share_visits)
    return load.load_native(path, weight_dtype, streaming, current_host(), limits)
